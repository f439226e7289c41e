//! Errors in the form of each API.

use super::api::Api;

use axum::Json;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::borrow::Cow;

/// Code of what took too long.
const TIMEOUT: &str = "timeout";

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

    /// Makes the error of what the server cannot do now.
    pub fn unavailable(message: impl Into<String>, code: &'static str) -> ApiError {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code(code)
    }

    /// Makes the error of a server that takes no more requests.
    pub fn closing() -> ApiError {
        ApiError::unavailable("the server is closing", "closing")
    }

    /// Makes the error of what takes longer than allowed.
    pub fn timeout(what: &str) -> ApiError {
        ApiError::unavailable(format!("{what} took longer than this server allows"), TIMEOUT)
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

    /// Returns the JSON document of the error, in the form of an API.
    pub fn to_json(&self, api: Api) -> Value {
        let is_openai = api != Api::Messages;
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 if !is_openai => "permission_error",
            404 if !is_openai => "not_found_error",
            413 if !is_openai => "request_too_large",
            429 => "rate_limit_error",
            503 if !is_openai && self.code == Some(TIMEOUT) => "timeout_error",
            503 if !is_openai => "overloaded_error",
            500.. if is_openai => "server_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        };
        match is_openai {
            true => {
                json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
            }
            false => json!({"type": "error", "error": {"type": kind, "message": self.message}}),
        }
    }

    /// Returns the HTTP response, in the form of an API.
    pub fn response(&self, api: Api) -> Response {
        let mut response = (self.status, Json(self.to_json(api))).into_response();
        let headers = response.headers_mut();
        match self.status.as_u16() {
            // Clients would repeat work that takes too long again.
            503 if self.code == Some(TIMEOUT) => {
                headers.insert("x-should-retry", HeaderValue::from_static("false"));
            }
            429 | 503 => {
                headers.insert("retry-after", HeaderValue::from_static("1"));
            }
            _ => {}
        }
        response
    }

    /// Returns the error with the names that an API has for its fields.
    #[must_use]
    pub fn named_for(self, api: Api) -> ApiError {
        let Some(param) = &self.param else { return self };
        let name = api.field(param).to_string();
        let rest = self.message.strip_prefix(&**param).map(|rest| format!("{name}{rest}"));
        ApiError { message: rest.unwrap_or(self.message), param: Some(name.into()), ..self }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.response(Api::Chat)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_do_not_repeat_what_took_too_long() {
        let headers = |error: ApiError| error.response(Api::Messages).headers().clone();
        let late = ApiError::timeout("the answer");
        assert_eq!(late.to_json(Api::Messages)["error"]["type"], "timeout_error");
        assert_eq!(headers(late.clone())["x-should-retry"], "false");
        assert!(!headers(late).contains_key("retry-after"));
        assert_eq!(headers(ApiError::closing())["retry-after"], "1");
    }
}
