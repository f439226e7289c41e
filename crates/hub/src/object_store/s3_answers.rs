//! Error answers of object stores: which may succeed on another try, and what the others mean.

use super::s3_settings::S3Settings;
use crate::http_client::{Answer, MAX_ERROR, is_passing};
use crate::{Error, xml};
use std::io;

/// Most characters of a server's text in a message.
const MAX_SHOWN: usize = 200;

/// Answer by which a server refuses a request.
#[derive(Debug)]
pub struct S3Refusal {
    /// Status.
    pub status: u16,
    /// Code of the error, where the body has one.
    pub code: Option<String>,
    message: Option<String>,
    region: Option<String>,
}

/// Fault of credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CredentialFault {
    /// The server does not know the key.
    Key,
    /// The secret is not the key's.
    Secret,
    /// The server answers no request without credentials.
    Missing,
}

impl S3Refusal {
    /// Makes a refusal with only a status and an optional code.
    pub fn of_status(status: u16, code: Option<String>) -> S3Refusal {
        S3Refusal { status, code, message: None, region: None }
    }

    /// Reads the body of an error answer. After a passing fault, waits as long as the server asks.
    pub fn of(answer: Answer) -> S3Refusal {
        let status = answer.status;
        let region = answer.header("x-amz-bucket-region").map(str::to_string);
        if is_passing(status, None) {
            answer.wait_as_asked();
        }
        let body = answer.read(MAX_ERROR).unwrap_or_default();
        let refusal = S3Refusal::of_body(status, &String::from_utf8_lossy(&body));
        S3Refusal { region: region.or(refusal.region), ..refusal }
    }

    /// Parses the XML document of an error.
    pub fn of_body(status: u16, body: &str) -> S3Refusal {
        let read = xml::parse(body).ok();
        let text = |name: &str| xml::text(read.as_ref()?.root(), name);
        S3Refusal { status, code: text("Code"), message: text("Message"), region: text("Region") }
    }

    /// Parses the body of a success; `None` unless it is an error: a server may begin to answer before it has finished.
    pub fn in_success(body: &[u8]) -> Option<S3Refusal> {
        let text = std::str::from_utf8(body).ok()?;
        let is_error = xml::parse(text).ok()?.root_element().tag_name().name() == "Error";
        is_error.then(|| S3Refusal::of_body(200, text))
    }

    /// Tells whether another try may help.
    pub fn is_passing(&self) -> bool {
        is_passing(self.status, self.code.as_deref())
    }

    /// Tells whether the server does not know `expect: 100-continue`.
    pub fn is_about_question(&self) -> bool {
        self.status == 417
    }

    /// Tells whether the object does not exist.
    pub fn is_absence(&self) -> bool {
        self.status == 404 && self.code.as_deref() != Some("NoSuchBucket")
    }

    /// Tells whether the server does not know the upload that a part is for.
    pub fn is_lost_upload(&self) -> bool {
        self.code.as_deref() == Some("NoSuchUpload")
    }

    /// Tells what is wrong with the credentials; `None` where the server knows them. Garage says it in words alone.
    fn fault_of_credentials(&self) -> Option<CredentialFault> {
        let says = |words: &str| {
            self.message.as_ref().is_some_and(|message| message.to_ascii_lowercase().contains(words))
        };
        match self.code.as_deref()? {
            "InvalidAccessKeyId" => Some(CredentialFault::Key),
            "SignatureDoesNotMatch" => Some(CredentialFault::Secret),
            "AccessDenied" if says("no such key") => Some(CredentialFault::Key),
            "AccessDenied" if says("invalid signature") => Some(CredentialFault::Secret),
            "AccessDenied" if says("anonymous access") => Some(CredentialFault::Missing),
            _ => None,
        }
    }

    /// Tells whether other requests may succeed: what is asked for is not there, or may not be seen.
    pub fn is_of_this_request(&self) -> bool {
        let is_denied = self.code.as_deref() == Some("AccessDenied");
        self.is_absence() || is_denied && self.fault_of_credentials().is_none()
    }

    /// Returns the refusal in a few words.
    pub fn words(&self) -> String {
        let said = match (&self.code, &self.message) {
            (Some(code), Some(message)) => format!(" ({code}: {message})"),
            (Some(code), None) => format!(" ({code})"),
            _ => String::new(),
        };
        let said: String = said.chars().take(MAX_SHOWN).collect();
        format!("status {}{said}", self.status)
    }

    /// Makes the error of the refusal, with its meaning and what to do about it.
    pub fn error(&self, place: &str, bucket: &str, settings: &S3Settings) -> Error {
        let (status, code) = (self.status, self.code.as_deref().unwrap_or_default());
        let server = crate::http_client::shown(&settings.endpoint);
        let words = self.words();
        // Some servers name the region in every error.
        let other_region = self.region.as_deref().filter(|region| *region != settings.region);
        let fault = self.fault_of_credentials();
        let what = match (status, code) {
            (_, "NoSuchBucket") => format!("there is no bucket `{bucket}` at {server}"),
            (301 | 302 | 307 | 308 | 400, _) if other_region.is_some() => {
                let region = other_region.unwrap_or_default();
                format!("the bucket `{bucket}` is in the region {region}; set AWS_REGION={region}")
            }
            (301 | 302 | 307 | 308, _) => {
                format!(
                    "{server} redirects to another server; AWS_REGION or AWS_ENDPOINT_URL is not that of the bucket"
                )
            }
            _ if fault == Some(CredentialFault::Key) => {
                format!("{server} does not know this AWS_ACCESS_KEY_ID ({words})")
            }
            _ if fault == Some(CredentialFault::Secret) => {
                format!(
                    "AWS_SECRET_ACCESS_KEY is not the secret of AWS_ACCESS_KEY_ID, or AWS_REGION is another one ({words})"
                )
            }
            (_, "RequestTimeTooSkewed") => {
                format!("the clock of this machine is not that of {server} ({words})")
            }
            (_, "ExpiredToken" | "TokenRefreshRequired" | "InvalidToken") => {
                format!("AWS_SESSION_TOKEN has expired or is another one ({words})")
            }
            (401 | 403, _) if settings.credentials.is_none() => {
                format!(
                    "{server} does not let everybody do this: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY ({words})"
                )
            }
            (401 | 403, _) => format!("{server} does not let this AWS_ACCESS_KEY_ID do it ({words})"),
            (404, _) => format!("it is not there ({words}); push the bundle again"),
            _ => format!("{server} answers with {words}"),
        };
        let kind = match status {
            404 => io::ErrorKind::NotFound,
            401 | 403 => io::ErrorKind::PermissionDenied,
            _ => io::ErrorKind::Other,
        };
        Error::io(place, io::Error::new(kind, what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_say_what_to_do() {
        let variables = |name: &str| {
            let value = match name {
                "AWS_ENDPOINT_URL" => "https://store.example",
                "AWS_ACCESS_KEY_ID" | "AWS_SECRET_ACCESS_KEY" => "x",
                _ => return None,
            };
            Some(value.into())
        };
        let known = S3Settings::from_variables(variables).unwrap();
        let nobody =
            S3Settings::from_variables(|n| variables(n).filter(|_| n == "AWS_ENDPOINT_URL")).unwrap();
        for (settings, status, body, says) in [
            (
                &known,
                404,
                "<Error><Code>NoSuchBucket</Code></Error>",
                "no bucket `b` at https://store.example",
            ),
            (
                &known,
                403,
                "<Error><Code>AccessDenied</Code><Message>No &amp; no</Message></Error>",
                "does not let this AWS_ACCESS_KEY_ID do it (status 403 (AccessDenied: No & no))",
            ),
            (&nobody, 403, "", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
            (
                &known,
                403,
                "<Error><Code>InvalidAccessKeyId</Code></Error>",
                "does not know this AWS_ACCESS_KEY_ID",
            ),
            (
                &known,
                403,
                "<Error><Code>SignatureDoesNotMatch</Code></Error>",
                "AWS_SECRET_ACCESS_KEY is not the secret",
            ),
            (&known, 403, "<Error><Code>RequestTimeTooSkewed</Code></Error>", "clock of this machine"),
            (&known, 400, "<Error><Code>ExpiredToken</Code></Error>", "AWS_SESSION_TOKEN"),
            (
                &known,
                400,
                "<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region></Error>",
                "set AWS_REGION=eu-west-1",
            ),
            // Garage names its region in every error, and tells what is wrong with a key in words.
            (
                &known,
                400,
                "<Error><Code>InvalidPart</Code><Message>do not match</Message><Region>us-east-1</Region></Error>",
                "answers with status 400 (InvalidPart: do not match)",
            ),
            (
                &known,
                403,
                "<Error><Code>AccessDenied</Code><Message>Forbidden: Invalid signature</Message></Error>",
                "AWS_SECRET_ACCESS_KEY is not the secret",
            ),
            (
                &known,
                403,
                "<Error><Code>AccessDenied</Code><Message>Forbidden: No such key: x</Message></Error>",
                "does not know this AWS_ACCESS_KEY_ID",
            ),
            (&known, 301, "", "redirects to another server"),
            (&known, 404, "<Error><Code>NoSuchKey</Code></Error>", "not there"),
            (&known, 418, "", "answers with status 418"),
        ] {
            let refusal = S3Refusal::of_body(status, body);
            let said = refusal.error("s3://b/k", "b", settings).to_string();
            assert!(said.starts_with("s3://b/k: ") && said.contains(says), "{said}");
            assert!(!refusal.is_passing(), "{said}");
        }
        assert!(S3Refusal::of_body(400, "<Error><Code>RequestTimeout</Code></Error>").is_passing());
        assert!(
            S3Refusal::of_status(503, None).is_passing() && !S3Refusal::of_status(501, None).is_passing()
        );
        let denied = |message: &str| {
            S3Refusal::of_body(
                403,
                &format!("<Error><Code>AccessDenied</Code><Message>{message}</Message></Error>"),
            )
        };
        assert!(denied("not allowed for this key").is_of_this_request());
        for about_the_key in ["Invalid signature", "No such key: x", "does not support anonymous access"] {
            assert!(!denied(about_the_key).is_of_this_request(), "{about_the_key}");
        }
        assert!(S3Refusal::of_status(404, None).is_absence());
        assert!(!S3Refusal::of_body(404, "<Error><Code>NoSuchBucket</Code></Error>").is_absence());
    }
}
