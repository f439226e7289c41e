//! Errors in the form of OpenAI's API.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::borrow::Cow;

/// An error that a client receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// Message: the fault, and what to do about it.
    pub message: String,
    /// Parameter at fault.
    pub param: Option<Cow<'static, str>>,
    /// Code for programs.
    pub code: Option<&'static str>,
}

impl ApiError {
    /// Makes an error with a status.
    pub fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError { status, message: message.into(), param: None, code: None }
    }

    /// Makes the error of an invalid request.
    pub fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, message)
    }

    /// Makes the error of an invalid parameter.
    pub fn param(name: impl Into<Cow<'static, str>>, message: impl std::fmt::Display) -> ApiError {
        let name = name.into();
        ApiError { message: format!("{name}: {message}"), param: Some(name), ..ApiError::invalid("") }
    }

    /// Returns the error with a code for programs.
    #[must_use]
    pub fn with_code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    /// Returns the JSON document of the error.
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
