//! Bodies of requests, read within limits of size and time.

use super::api_error::ApiError;
use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

/// Most bytes that are read of a body that is refused: many clients look for an answer only when they have written all.
const MOST_UNUSED: usize = 64 << 20;

/// Reads a body of at most `most` bytes within `patience`.
///
/// # Errors
/// The body is too large or too slow, or is not plain JSON by its headers.
pub async fn read_body(request: Request, most: usize, patience: Duration) -> Result<Vec<u8>, ApiError> {
    let (head, mut body) = request.into_parts();
    if let Err(e) = check_headers(&head.headers, most) {
        // A client that waits for an answer before it writes gets it.
        if !head.headers.contains_key(header::EXPECT) {
            let _ = tokio::time::timeout(patience, read_frames(&mut body, 0)).await;
        }
        return Err(e);
    }
    match tokio::time::timeout(patience, read_frames(&mut body, most)).await {
        Ok(Ok(Some(bytes))) => Ok(bytes),
        Ok(Ok(None)) => Err(too_large(most)),
        Ok(Err(_)) => Err(ApiError::invalid("the body ends early")),
        Err(_) => Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body took too long")),
    }
}

fn too_large(most: usize) -> ApiError {
    let what = format!("the body has more than {most} bytes");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, what).with_code("body_too_large")
}

/// Refuses what the headers say of a body.
fn check_headers(headers: &HeaderMap, most: usize) -> Result<(), ApiError> {
    let value = |name| headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let encoding = value(header::CONTENT_ENCODING).trim();
    if !(encoding.is_empty() || encoding.eq_ignore_ascii_case("identity")) {
        let what =
            format!("the header content-encoding is {}; send the body as it is", encoding.escape_debug());
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, what).with_code("content_encoding"));
    }
    if value(header::CONTENT_LENGTH).parse::<u64>().is_ok_and(|n| n > most as u64) {
        return Err(too_large(most));
    }
    // A page of another origin can send any content type but this one without a preflight.
    let kind = value(header::CONTENT_TYPE).split(';').next().unwrap_or_default().trim();
    if !kind.eq_ignore_ascii_case("application/json") {
        let what = "the header content-type is not application/json; curl sends it with -H 'content-type: application/json'";
        return Err(ApiError::invalid(what));
    }
    Ok(())
}

/// Reads a body; returns none if it has more than `most` bytes. Of such a body at most [`MOST_UNUSED`] bytes are read.
async fn read_frames(body: &mut Body, most: usize) -> Result<Option<Vec<u8>>, axum::Error> {
    let (mut all, mut read) = (Vec::new(), 0);
    while let Some(frame) = poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await {
        let Ok(data) = frame?.into_data() else { continue };
        read += data.len();
        if read <= most {
            all.extend_from_slice(&data);
        } else {
            all = Vec::new();
            if read > MOST_UNUSED {
                break;
            }
        }
    }
    Ok((read <= most).then_some(all))
}
