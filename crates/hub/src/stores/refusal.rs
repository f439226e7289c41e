//! Error answers of object stores: which may succeed on another try, and what the others mean.

use super::store_location::CloudKind;
use crate::Error;
use crate::http_client::{Answer, MAX_ERROR, is_passing};
use quick_xml::de::from_str;
use serde::Deserialize;
use std::io;

/// Most characters of a server's text in a message.
const MAX_SHOWN: usize = 200;

/// Codes by which servers say that they do not know who asks: those of S3, of Azure, and of servers that give tokens.
const UNKNOWN_KEY: [&str; 5] =
    ["InvalidAccessKeyId", "AuthenticationFailed", "invalid_client", "invalid_grant", "unauthorized_client"];

/// Answer by which a server refuses a request.
#[derive(Clone, Debug)]
pub struct StoreRefusal {
    /// Status.
    pub status: u16,
    /// Code of the error, where the body has one.
    pub code: Option<String>,
    message: Option<String>,
    region: Option<String>,
    /// True if the server's clock is minutes from that of this machine.
    is_skewed: bool,
}

/// Account that asks an object store, for messages.
pub struct Account {
    /// Kind of object store.
    pub kind: CloudKind,
    /// Address of the server.
    pub server: String,
    /// Name of the bucket.
    pub bucket: String,
    /// Region of requests to S3.
    pub region: Option<String>,
    /// Variable that names who asks; `None` for anonymous requests.
    pub key: Option<&'static str>,
}

/// An XML document, by the name of its root. Namespaces, prefixes, order and white space do not matter.
#[derive(Deserialize)]
enum Document {
    Error(ErrorTexts),
    #[serde(other)]
    Other,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct ErrorTexts {
    code: Option<String>,
    message: Option<String>,
    region: Option<String>,
}

/// Error in JSON of a server that gives tokens.
#[derive(Deserialize)]
struct TokenError {
    error: String,
    error_description: Option<String>,
}

/// Reads the XML document of an error; `None` where the text is something else. White space before it is no XML, but S3
/// sends it to keep a connection open.
fn error_texts(text: &str) -> Option<ErrorTexts> {
    match from_str(text.trim_start_matches(|c: char| c.is_whitespace() || c == '\u{feff}')) {
        Ok(Document::Error(texts)) => Some(texts),
        _ => None,
    }
}

impl StoreRefusal {
    /// Reads the body of an error answer. After a passing fault, waits as long as the server asks.
    pub fn of(answer: Answer) -> StoreRefusal {
        let status = answer.status;
        let region = answer.header("x-amz-bucket-region").map(str::to_string);
        // Azure gives an answer to a HEAD its code so.
        let code = answer.header("x-ms-error-code").map(str::to_string);
        let is_skewed = answer.is_skewed();
        if is_passing(status, None) {
            answer.wait_as_asked();
        }
        let body = answer.read(MAX_ERROR).unwrap_or_default();
        let refusal = StoreRefusal::of_body(status, &String::from_utf8_lossy(&body));
        StoreRefusal { region: region.or(refusal.region), code: refusal.code.or(code), is_skewed, ..refusal }
    }

    /// Parses the document of an error: XML, or JSON.
    pub fn of_body(status: u16, body: &str) -> StoreRefusal {
        let of_tokens = || {
            let TokenError { error, error_description } = serde_json::from_str(body).ok()?;
            Some(ErrorTexts { code: Some(error), message: error_description, region: None })
        };
        let ErrorTexts { code, message, region } = error_texts(body).or_else(of_tokens).unwrap_or_default();
        // Azure adds the request's id and the time on lines of their own.
        let trimmed = |text: Option<String>| {
            text.map(|text| text.trim().lines().next().unwrap_or_default().trim_end().to_string())
        };
        StoreRefusal {
            status,
            code: trimmed(code),
            message: trimmed(message),
            region: trimmed(region),
            is_skewed: false,
        }
    }

    /// Parses the body of a success; `None` unless it is an error: a server may begin to answer before it has finished.
    pub fn in_success(body: &[u8]) -> Option<StoreRefusal> {
        let is_small = body.len() as u64 <= MAX_ERROR;
        let text = std::str::from_utf8(body).ok().filter(|text| is_small && text.contains("Error"))?;
        error_texts(text).map(|_| StoreRefusal::of_body(200, text))
    }

    /// Tells whether another try may help.
    pub fn is_passing(&self) -> bool {
        is_passing(self.status, self.code.as_deref())
    }

    /// Tells whether the object does not exist.
    pub fn is_absence(&self) -> bool {
        self.status == 404 && !self.is_about_bucket()
    }

    fn is_about_bucket(&self) -> bool {
        matches!(self.code.as_deref(), Some("NoSuchBucket" | "ContainerNotFound"))
    }

    /// Tells whether the server does not know an upload any more, or not its parts.
    pub fn is_lost_upload(&self) -> bool {
        let codes = ["NoSuchUpload", "InvalidPart", "InvalidPartOrder", "InvalidBlockList"];
        self.code.as_deref().is_some_and(|code| codes.contains(&code))
    }

    /// Returns the code of the error; that of AWS where Garage says in words alone what is wrong with a key.
    fn known_code(&self) -> &str {
        let message = self.message.as_ref().map_or(String::new(), |message| message.to_ascii_lowercase());
        match self.code.as_deref().unwrap_or_default() {
            "AccessDenied" if message.contains("no such key") => "InvalidAccessKeyId",
            "AccessDenied" if message.contains("invalid signature") => "SignatureDoesNotMatch",
            "AccessDenied" if message.contains("anonymous access") => "MissingAuthenticationToken",
            code => code,
        }
    }

    /// Tells whether other requests may succeed: what is asked for is not there, or may not be seen.
    pub fn is_of_this_request(&self) -> bool {
        self.is_absence() || matches!(self.known_code(), "AccessDenied" | "AuthorizationPermissionMismatch")
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
    pub fn error(&self, place: &str, account: &Account) -> Error {
        let Account { kind, server, bucket, .. } = account;
        let key = account.key.unwrap_or(kind.credentials());
        let (status, code) = (self.status, self.known_code());
        let words = self.words();
        // Some servers name the region in every error.
        let other_region = self.region.as_ref().filter(|region| Some(*region) != account.region.as_ref());
        let what = match (status, code) {
            _ if self.is_about_bucket() => format!("there is no bucket `{bucket}` at {server}"),
            (301 | 302 | 307 | 308 | 400, _) if other_region.is_some() => {
                let region = other_region.map_or("", String::as_str);
                format!("the bucket `{bucket}` is in the region {region}; set AWS_REGION={region}")
            }
            (301 | 302 | 307 | 308, _) if *kind == CloudKind::S3 => {
                format!(
                    "{server} redirects to another server; AWS_REGION or AWS_ENDPOINT_URL is not that of the bucket"
                )
            }
            (301 | 302 | 307 | 308, _) => {
                format!("{server} redirects to another server, where a signed request does not go")
            }
            (400 | 401 | 403, _) if self.is_skewed || code == "RequestTimeTooSkewed" => {
                format!("the clock of this machine is not that of {server} ({words})")
            }
            _ if UNKNOWN_KEY.contains(&code) => format!("{server} does not know this {key} ({words})"),
            (_, "SignatureDoesNotMatch") => {
                format!(
                    "AWS_SECRET_ACCESS_KEY is not the secret of AWS_ACCESS_KEY_ID, or AWS_REGION is another one ({words})"
                )
            }
            (_, "ExpiredToken" | "TokenRefreshRequired" | "InvalidToken") => {
                format!("AWS_SESSION_TOKEN has expired or is another one ({words})")
            }
            (401 | 403, _) if account.key.is_none() => {
                format!("{server} does not let everybody do this: set {key} ({words})")
            }
            (401 | 403, _) => format!("{server} does not let this {key} do it ({words})"),
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
        let account = |kind, key| Account {
            kind,
            server: "https://store.example".into(),
            bucket: "b".into(),
            region: Some("us-east-1".into()),
            key,
        };
        let (known, nobody) =
            (account(CloudKind::S3, Some("AWS_ACCESS_KEY_ID")), account(CloudKind::S3, None));
        let azure = account(CloudKind::Azure, Some("AZURE_STORAGE_SAS_TOKEN"));
        let google = account(CloudKind::Google, Some("GOOGLE_APPLICATION_CREDENTIALS"));
        for (account, status, body, says) in [
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
            (&known, 301, "", "AWS_REGION or AWS_ENDPOINT_URL"),
            (&azure, 302, "", "redirects to another server"),
            (&azure, 404, "<Error><Code>ContainerNotFound</Code></Error>", "no bucket `b`"),
            (
                &azure,
                403,
                "<Error><Code>AuthenticationFailed</Code></Error>",
                "does not know this AZURE_STORAGE_SAS_TOKEN",
            ),
            (
                &google,
                400,
                "{\"error\": \"invalid_grant\", \"error_description\": \"Account deleted\"}",
                "does not know this GOOGLE_APPLICATION_CREDENTIALS (status 400 (invalid_grant: Account deleted))",
            ),
            (&account(CloudKind::Google, None), 401, "", "set GOOGLE_APPLICATION_CREDENTIALS"),
            (&known, 404, "<Error><Code>NoSuchKey</Code></Error>", "not there"),
            (&known, 418, "", "answers with status 418"),
        ] {
            let refusal = StoreRefusal::of_body(status, body);
            let said = refusal.error("s3://b/k", account).to_string();
            assert!(said.starts_with("s3://b/k: ") && said.contains(says), "{said}");
            assert!(!refusal.is_passing(), "{said}");
        }
        assert!(StoreRefusal::of_body(400, "<Error><Code>RequestTimeout</Code></Error>").is_passing());
        assert!(StoreRefusal::of_body(503, "").is_passing() && !StoreRefusal::of_body(501, "").is_passing());
        let denied = |message: &str| {
            StoreRefusal::of_body(
                403,
                &format!("<Error><Code>AccessDenied</Code><Message>{message}</Message></Error>"),
            )
        };
        assert!(denied("not allowed for this key").is_of_this_request());
        for about_the_key in ["Invalid signature", "No such key: x", "does not support anonymous access"] {
            assert!(!denied(about_the_key).is_of_this_request(), "{about_the_key}");
        }
        assert!(StoreRefusal::of_body(404, "").is_absence());
        assert!(!StoreRefusal::of_body(404, "<Error><Code>NoSuchBucket</Code></Error>").is_absence());
    }

    #[test]
    fn errors_are_read_however_they_are_written() {
        for xml in [
            "<Error><Code>a&amp;b</Code></Error>",
            "\n \u{feff}<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error xmlns=\"x\">\n <Other/>\n <Code>\n a&#38;b</Code>\n</Error>\n",
            "<s:Error xmlns:s=\"x\"><s:Code><![CDATA[a&]]><!-- c -->b</s:Code></s:Error>",
        ] {
            assert_eq!(StoreRefusal::of_body(500, xml).code.as_deref(), Some("a&b"), "{xml}");
            assert!(StoreRefusal::in_success(xml.as_bytes()).is_some(), "{xml}");
        }
        let entity = "<!DOCTYPE a [<!ENTITY b \"c\">]><Error><Code>&b;</Code></Error>";
        for other in
            ["", "{}", "<html><body>Error", "<Error><Code>a</Error>", "<A><Code>Error</Code></A>", entity]
        {
            assert_eq!(StoreRefusal::of_body(500, other).code, None, "{other}");
            assert!(StoreRefusal::in_success(other.as_bytes()).is_none(), "{other}");
        }
    }
}
