//! Requests to an S3-compatible server: signed in their addresses, tried again where that may help, never redirected.

use super::s3_answers::S3Refusal;
use super::s3_settings::S3Settings;
use crate::http_client::{Answer, HttpClient, HttpRequest, Trouble, UploadRequest};
use crate::{Error, Result};
use anemoe_io::hex;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rusty_s3::{Bucket, Credentials, S3Action, UrlStyle};
use std::borrow::Cow;
use std::cell::Cell;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use url::Url;

/// Validity of a signed address. A download may take long, and reconnects to the same address.
pub const VALID: Duration = Duration::from_secs(24 * 3600);
/// Tries of a request.
const TRIES: u32 = 6;
/// Most bytes of an answer to an upload.
const MAX_UPLOAD_ANSWER: u64 = 4 << 20;
/// Pause before the second try; each later pause is twice as long.
pub const REST: Duration = Duration::from_millis(500);
/// Header with the SHA-256 of an object.
pub const CHECKSUM: &str = "x-amz-checksum-sha256";

/// Bucket, credentials and HTTP client.
pub struct S3Client {
    pub bucket: Bucket,
    prefix: String,
    settings: S3Settings,
    http: HttpClient,
    /// True once the server has refused to be asked before a body is sent.
    knows_no_question: AtomicBool,
}

/// A request that is signed for each try.
pub struct S3Request<'a> {
    /// `GET`, `HEAD`, `PUT` or `POST`.
    pub method: &'static str,
    /// Makes the signed address.
    pub sign: &'a dyn Fn() -> Url,
    /// Headers of an upload.
    pub headers: &'a [(&'static str, String)],
    /// Body of an upload.
    pub body: &'a [u8],
    /// Called with bytes sent, and with a negative number for bytes of a failed try.
    pub moved: &'a dyn Fn(i64),
}

/// A whole answer of the server.
pub struct S3Reply {
    /// Entity tag, without quotes.
    pub tag: Option<String>,
    pub body: Vec<u8>,
}

impl S3Reply {
    /// Returns the body as text, for parsing.
    pub fn text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.body)
    }
}

/// End of a try: the answer, or a refusal.
type Tried<T> = std::result::Result<T, S3Refusal>;

impl S3Client {
    /// Makes a client for a bucket, with all keys below a prefix.
    ///
    /// # Errors
    /// The certificates cannot be read, or the server's address cannot contain a bucket.
    pub fn new(settings: S3Settings, bucket: &str, prefix: &str) -> Result<S3Client> {
        let certificates = settings.certificates.as_deref();
        let http = HttpClient::new(certificates)
            .map_err(|e| Error::io(certificates.unwrap_or(Path::new("SSL_CERT_FILE")), e))?;
        // A certificate for `*.server` does not cover a bucket with a dot in its name.
        let style = match settings.virtual_hosted && !bucket.contains('.') {
            true => UrlStyle::VirtualHost,
            false => UrlStyle::Path,
        };
        let made = Bucket::new(settings.endpoint.clone(), style, bucket.to_string(), settings.region.clone());
        let bucket = made.map_err(|e| Error::usage(format!("s3://{bucket}: {e}")))?;
        Ok(S3Client {
            bucket,
            prefix: prefix.to_string(),
            settings,
            http,
            knows_no_question: AtomicBool::new(false),
        })
    }

    /// Returns a key with the prefix, as it is in the bucket.
    pub fn full(&self, key: &str) -> String {
        if self.prefix.is_empty() { key.to_string() } else { format!("{}/{key}", self.prefix) }
    }

    /// Returns the credentials that sign requests; `None` for unsigned requests.
    pub fn credentials(&self) -> Option<&Credentials> {
        self.settings.credentials.as_ref()
    }

    /// Makes the error of a refusal for an object.
    pub fn refused(&self, key: &str, refusal: &S3Refusal) -> Error {
        refusal.error(&self.place(key), self.bucket.name(), &self.settings)
    }

    /// Makes the error of a network fault or of a server that breaks the rules.
    pub fn failed(&self, key: &str, what: impl Into<String>) -> Error {
        Error::io(self.place(key), io::Error::other(what.into()))
    }

    /// Sends a request, again after passing faults, until it succeeds or is refused for good. The answer's body is not
    /// read yet.
    ///
    /// # Errors
    /// No answer comes, or only passing faults.
    pub fn request(&self, key: &str, request: &S3Request) -> Result<Tried<Answer>> {
        self.retry(key, request, &|answer| Ok(Ok(answer)))
    }

    /// Sends a request like [`S3Client::request`], and reads the answer, at most `limit` bytes. An answer that breaks
    /// off, and a success whose body is an error, count as failed tries.
    ///
    /// # Errors
    /// No answer comes, only passing faults, or the answer is longer.
    pub fn ask(&self, key: &str, request: &S3Request, limit: u64) -> Result<Tried<S3Reply>> {
        self.retry(key, request, &|answer| {
            let tag = answer.header("etag").map(|tag| tag.trim_matches('"').to_string());
            let body = answer.read(limit)?;
            Ok(match S3Refusal::in_success(&body) {
                Some(refusal) => Err(refusal),
                None => Ok(S3Reply { tag, body }),
            })
        })
    }

    /// Sends an upload like [`S3Client::ask`].
    ///
    /// # Errors
    /// Fails like [`S3Client::ask`].
    pub fn send(&self, key: &str, request: &S3Request) -> Result<Tried<S3Reply>> {
        self.ask(key, request, MAX_UPLOAD_ANSWER)
    }

    fn retry<T>(
        &self,
        key: &str,
        request: &S3Request,
        finish: &dyn Fn(Answer) -> std::result::Result<Tried<T>, Trouble>,
    ) -> Result<Tried<T>> {
        let mut tries = 0;
        loop {
            tries += 1;
            let went = Cell::new(0);
            let tried = match self.try_once(request, tries, &went) {
                Ok(Ok(answer)) => finish(answer),
                Ok(Err(refusal)) => Ok(Err(refusal)),
                Err(trouble) => Err(trouble),
            };
            if !matches!(tried, Ok(Ok(_))) {
                (request.moved)(-went.get());
            }
            let why = match tried {
                Ok(Ok(answer)) => return Ok(Ok(answer)),
                Ok(Err(refusal)) if refusal.is_about_question() => {
                    // Only the question was refused: this is no try.
                    if !self.knows_no_question.swap(true, Ordering::Relaxed) {
                        tries -= 1;
                        continue;
                    }
                    refusal.words()
                }
                Ok(Err(refusal)) if !refusal.is_passing() => return Ok(Err(refusal)),
                Ok(Err(refusal)) => refusal.words(),
                Err(Trouble::Lasting(what)) => return Err(self.failed(key, what)),
                Err(Trouble::Passing(what)) => what,
            };
            if tries >= TRIES {
                let what = format!("{why} ({TRIES} tries); the same command goes on where this one stopped");
                return Err(self.failed(key, what));
            }
            let rest = REST * 2u32.pow(tries - 1);
            // The second try often succeeds; warnings start after it.
            if tries > 1 {
                tracing::warn!("{}: {why}; the next try is in {} s", self.place(key), rest.as_secs());
            }
            std::thread::sleep(rest);
        }
    }

    /// Sends a request once. Adds the bytes sent to `went`.
    fn try_once(
        &self,
        request: &S3Request,
        tries: u32,
        went: &Cell<i64>,
    ) -> std::result::Result<Tried<Answer>, Trouble> {
        let url = (request.sign)();
        let answer = if matches!(request.method, "GET" | "HEAD") {
            let headers: Vec<(&'static str, &str)> =
                request.headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
            let request = HttpRequest {
                method: request.method,
                url: &url,
                from: 0,
                to: None,
                token: None,
                headers: &headers,
                follow: false,
            };
            self.http.send(&request)
        } else {
            let sent = |n: u64| {
                went.set(went.get() + n as i64);
                (request.moved)(n as i64);
            };
            let (method, headers, body) = (request.method, request.headers, request.body);
            // A server that refuses early closes the connection, and its reason is lost while the body is written. Each
            // second try asks before it sends; some servers do not know the question.
            let asks_first = tries.is_multiple_of(2)
                && !request.body.is_empty()
                && !self.knows_no_question.load(Ordering::Relaxed);
            let upload = UploadRequest { method, url: &url, headers, body, asks_first, sent: &sent };
            self.http.upload(&upload)
        }?;
        Ok(match answer.status {
            200..=299 => Ok(answer),
            _ => Err(S3Refusal::of(answer)),
        })
    }

    /// Returns an object's length, and its SHA-256 where the server tells it; `None` where the object does not exist or
    /// may not be seen.
    ///
    /// # Errors
    /// The server does not answer, or refuses for another reason.
    pub fn find(&self, key: &str) -> Result<Option<(u64, Option<String>)>> {
        let full = self.full(key);
        let mode = ("x-amz-checksum-mode", "ENABLED".to_string());
        let sign = || {
            let mut action = self.bucket.head_object(self.credentials(), &full);
            action.headers_mut().insert(mode.0, mode.1.clone());
            action.sign(VALID)
        };
        let headers = [mode.clone()];
        let request = S3Request { method: "HEAD", sign: &sign, headers: &headers, body: &[], moved: &|_| () };
        let answer = match self.request(key, &request)? {
            Ok(answer) => answer,
            // A user who may not list gets 403 for a missing object. Other causes show when the upload fails.
            Err(refusal) if matches!(refusal.status, 403 | 404) => return Ok(None),
            Err(refusal) => return Err(self.refused(key, &refusal)),
        };
        let bytes = answer.header("content-length").and_then(|n| n.parse().ok());
        let Some(bytes) = bytes else { return Err(self.failed(key, "the server does not tell its length")) };
        // An object in parts has a hash of hashes, with a `-` in it.
        let told = answer.header(CHECKSUM).and_then(|text| BASE64_STANDARD.decode(text).ok());
        let sha256 = told.filter(|hash| hash.len() == 32).map(|hash| hex(&hash));
        Ok(Some((bytes, sha256)))
    }

    /// Returns the HTTP client, for downloads.
    pub fn http(&self) -> &HttpClient {
        &self.http
    }

    /// Returns the name of an object in messages.
    pub fn place(&self, key: &str) -> String {
        format!("s3://{}/{}", self.bucket.name(), self.full(key))
    }
}
