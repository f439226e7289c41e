//! Requests of `object_store`, sent by this crate's own client: tried again where that may help, never redirected.
//!
//! The crate makes and signs requests and reads answers. It sees only successes: all else ends here as a [`CloudFailure`],
//! which is found again in the chain of its errors.

use super::refusal::Refusal;
use crate::http_client::{Answer, HttpClient, MAX_ERROR, Trouble, shown};
use anemoe_io::{hex, locked};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame};
use object_store::ClientOptions;
use object_store::client::{
    ClientConfigKey, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService,
};
use std::fmt;
use std::io::Read;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use ureq::http::StatusCode;
use ureq::http::request::Parts;
use url::Url;

/// Tries of a request.
const TRIES: u32 = 6;
/// Pause before the second try; each later pause is twice as long.
pub const REST: Duration = Duration::from_millis(500);
/// Longest time after which a request is tried again: its signature is valid for 15 minutes.
const SIGNED: Duration = Duration::from_secs(600);
/// Most bytes of an answer, unless its request has an [`AnswerLimit`].
const MAX_ANSWER: u64 = 4 << 20;
/// Bytes of one read of an object.
const PIECE: usize = 1 << 18;

/// Most bytes of an answer, in a request's extensions.
#[derive(Clone)]
pub struct AnswerLimit(pub u64);

/// Mark, in a request's extensions, of an object that is read as it comes. It is asked for once: who reads it goes on
/// where it broke off.
#[derive(Clone)]
pub struct Streamed;

/// SHA-256 of an object in hexadecimal, in an answer's extensions.
#[derive(Clone)]
pub struct ToldHash(pub String);

/// Reason why a request to an object store failed.
#[derive(Clone, Debug)]
pub enum CloudFailure {
    /// The server refused it.
    Refused(Refusal),
    /// A fault of the network or the server; another try may help.
    Passing(String),
    /// A fault that no other try changes.
    Lasting(String),
}

/// Result of a request to an object store.
pub type CloudResult<T> = Result<T, CloudFailure>;

impl fmt::Display for CloudFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CloudFailure::Refused(refusal) => f.write_str(&refusal.words()),
            CloudFailure::Passing(what) | CloudFailure::Lasting(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for CloudFailure {}

impl From<Trouble> for CloudFailure {
    fn from(trouble: Trouble) -> CloudFailure {
        match trouble {
            Trouble::Passing(what) => CloudFailure::Passing(what),
            Trouble::Lasting(what) => CloudFailure::Lasting(what),
        }
    }
}

impl From<CloudFailure> for HttpError {
    fn from(failure: CloudFailure) -> HttpError {
        // `object_store` does not try again what is unknown.
        HttpError::new(HttpErrorKind::Unknown, failure)
    }
}

impl From<object_store::Error> for CloudFailure {
    fn from(error: object_store::Error) -> CloudFailure {
        let mut cause: &(dyn std::error::Error + 'static) = &error;
        loop {
            match (cause.downcast_ref::<CloudFailure>(), cause.source()) {
                (Some(failure), _) => return failure.clone(),
                (None, Some(deeper)) => cause = deeper,
                // The last cause only: those above it show addresses with what signs them.
                (None, None) => return CloudFailure::Lasting(format!("the server's answer: {cause}")),
            }
        }
    }
}

/// Connects `object_store` to this crate's client.
#[derive(Clone, Debug)]
pub struct CloudHttp(pub Arc<HttpClient>);

impl HttpConnector for CloudHttp {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<object_store::client::HttpClient> {
        let allows_http = options.get_config_value(&ClientConfigKey::AllowHttp);
        Ok(object_store::client::HttpClient::new(CloudService {
            http: Arc::clone(&self.0),
            allows_http: allows_http.is_some_and(|value| value == "true"),
        }))
    }
}

/// Sends requests, and blocks until they are answered.
#[derive(Debug)]
struct CloudService {
    http: Arc<HttpClient>,
    allows_http: bool,
}

#[async_trait::async_trait]
impl HttpService for CloudService {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (head, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok(self.perform(&head, &body)?)
    }
}

impl CloudService {
    /// Sends a request, again after passing faults, until it succeeds or is refused for good.
    fn perform(&self, head: &Parts, body: &[u8]) -> CloudResult<HttpResponse> {
        let lasting = |e: &dyn fmt::Display| CloudFailure::Lasting(format!("an address: {e}"));
        let url = Url::parse(&head.uri.to_string()).map_err(|e| lasting(&e))?;
        if url.scheme() == "http" && !self.allows_http {
            let what = "everybody on the way reads what goes over plain http; AZURE_ALLOW_HTTP=true or GOOGLE_ALLOW_HTTP=true allows it";
            return Err(CloudFailure::Lasting(format!("{}: {what}", shown(&url))));
        }
        let started = Instant::now();
        let mut tries = 0;
        loop {
            tries += 1;
            // A server that refuses early closes the connection, and its reason is lost while the body is written. Each
            // second try asks before it sends; servers that do not know the question refuse it with 417.
            let asks_first = tries % 2 == 0 && !body.is_empty();
            let failure = match self.try_once(head, &url, body, asks_first) {
                Ok(response) => return Ok(response),
                Err(failure) => failure,
            };
            match &failure {
                CloudFailure::Refused(refusal)
                    if refusal.is_passing() || asks_first && refusal.status == 417 => {}
                CloudFailure::Passing(_) => {}
                _ => return Err(failure),
            }
            if head.extensions.get::<Streamed>().is_some() {
                return Err(CloudFailure::Passing(failure.to_string()));
            }
            if tries >= TRIES || started.elapsed() > SIGNED {
                let what =
                    format!("{failure} ({tries} tries); the same command goes on where this one stopped");
                return Err(CloudFailure::Passing(what));
            }
            let rest = REST * 2u32.pow(tries - 1);
            // The second try often succeeds; warnings start after it.
            if tries > 1 {
                tracing::warn!("{}: {failure}; the next try is in {} s", shown(&url), rest.as_secs());
            }
            std::thread::sleep(rest);
        }
    }

    fn try_once(&self, head: &Parts, url: &Url, body: &[u8], asks_first: bool) -> CloudResult<HttpResponse> {
        let answer = self.http.exchange(head, url, body, asks_first)?;
        let status = match StatusCode::from_u16(answer.status) {
            Ok(status) if status.is_success() => status,
            _ => return Err(CloudFailure::Refused(Refusal::of(answer))),
        };
        let headers = answer.headers.clone();
        // An object in parts has a hash of hashes, with a `-` in it.
        let told = answer.header("x-amz-checksum-sha256").and_then(|text| BASE64_STANDARD.decode(text).ok());
        let told = told.filter(|hash| hash.len() == 32).map(|hash| ToldHash(hex(&hash)));
        let is_small = answer.length().is_some_and(|bytes| bytes <= MAX_ERROR);
        let body = if head.method == "HEAD" {
            Bytes::new().into()
        } else if head.extensions.get::<Streamed>().is_some() && !is_small {
            HttpResponseBody::new(AnswerBody::of(answer))
        } else {
            let limit = head.extensions.get::<AnswerLimit>().map_or(MAX_ANSWER, |limit| limit.0);
            let body = answer.read(limit)?;
            // A server may begin to answer before it has finished, and then fail.
            if let Some(refusal) = Refusal::in_success(&body) {
                return Err(CloudFailure::Refused(refusal));
            }
            body.into()
        };
        let mut response = HttpResponse::new(body);
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        told.map(|told| response.extensions_mut().insert(told));
        Ok(response)
    }
}

/// Body of an answer, read as it comes.
struct AnswerBody {
    reader: Mutex<Box<dyn Read + Send>>,
    from: String,
}

impl AnswerBody {
    fn of(answer: Answer) -> AnswerBody {
        let from = shown(&answer.url);
        AnswerBody { reader: Mutex::new(Box::new(answer.reader())), from }
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let mut piece = vec![0; PIECE];
        Poll::Ready(match locked(&self.reader).read(&mut piece) {
            Ok(0) => None,
            Ok(n) => {
                piece.truncate(n);
                Some(Ok(Frame::data(piece.into())))
            }
            Err(e) => Some(Err(CloudFailure::Passing(format!("{}: {e}", self.from)).into())),
        })
    }
}
