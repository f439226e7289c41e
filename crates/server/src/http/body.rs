//! Bodies of requests, read within limits of size and time.

use super::api_error::ApiError;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use std::time::Duration;

/// Reads a body of at most `most` bytes within `patience`.
///
/// # Errors
/// The body is too large or too slow, or is not plain JSON by its headers.
pub async fn read_body(request: Request, most: usize, patience: Duration) -> Result<Vec<u8>, ApiError> {
    let too_large = || {
        let what = format!("the body has more than {most} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, what).with_code("body_too_large")
    };
    let (head, body) = request.into_parts();
    let value = |name| head.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let encoding = value(header::CONTENT_ENCODING).trim();
    if !(encoding.is_empty() || encoding.eq_ignore_ascii_case("identity")) {
        let what =
            format!("the header content-encoding is {}; send the body as it is", encoding.escape_debug());
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, what).with_code("content_encoding"));
    }
    if value(header::CONTENT_LENGTH).parse::<u64>().is_ok_and(|n| n > most as u64) {
        return Err(too_large());
    }
    // A page of another origin can send any content type but this one without a preflight.
    let kind = value(header::CONTENT_TYPE).split(';').next().unwrap_or_default().trim();
    if !kind.eq_ignore_ascii_case("application/json") {
        let what = "the header content-type is not application/json; curl sends it with -H 'content-type: application/json'";
        return Err(ApiError::invalid(what));
    }
    let body = axum::body::to_bytes(body, most);
    match tokio::time::timeout(patience, body).await {
        Ok(Ok(bytes)) => Ok(bytes.into()),
        Ok(Err(e)) if format!("{e:?}").contains("LengthLimit") => Err(too_large()),
        Ok(Err(_)) => Err(ApiError::invalid("the body ends early")),
        Err(_) => Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body took too long")),
    }
}
