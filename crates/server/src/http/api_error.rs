//! Errors in the shape of OpenAI's API.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::borrow::Cow;

/// An error that a client is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// Status of the answer.
    pub status: StatusCode,
    /// Message: what is wrong, and what helps.
    pub message: String,
    /// Parameter that is wrong.
    pub param: Option<Cow<'static, str>>,
    /// Word for programs.
    pub code: Option<&'static str>,
}

impl ApiError {
    /// An error with a status.
    pub fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError { status, message: message.into(), param: None, code: None }
    }

    /// A request that is wrong.
    pub fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, message)
    }

    /// A parameter that is wrong.
    pub fn param(name: impl Into<Cow<'static, str>>, message: impl std::fmt::Display) -> ApiError {
        let name = name.into();
        ApiError { message: format!("{name}: {message}"), param: Some(name), ..ApiError::invalid("") }
    }

    /// The same with a word for programs.
    #[must_use]
    pub fn with_code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    /// The document.
    pub fn to_json(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.to_json())).into_response();
        let headers = response.headers_mut();
        if matches!(self.status.as_u16(), 429 | 503) {
            headers.insert("retry-after", axum::http::HeaderValue::from_static("1"));
        }
        response
    }
}
