//! Requests of `object_store`, sent by this crate's own client: tried again where that may help, never redirected.
//!
//! The crate makes and signs requests and reads answers. It sees only successes: all else ends here as a [`CloudFailure`],
//! which is found again in the chain of its errors.

use super::refusal::StoreRefusal;
use super::store_location::CloudKind;
use crate::http_client::{HttpClient, Tries, Trouble, shown};
use anemoe_io::{hex, locked};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use futures_util::stream::iter;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use object_store::ClientOptions;
use object_store::client::{
    HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
};
use std::fmt;
use std::io::Read;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use ureq::http::StatusCode;
use ureq::http::request::Parts;
use url::Url;

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
    Refused(StoreRefusal),
    /// No answer came, or none that can be read.
    Trouble(Trouble),
}

/// Result of a request to an object store.
pub type CloudResult<T> = Result<T, CloudFailure>;

impl fmt::Display for CloudFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CloudFailure::Refused(refusal) => f.write_str(&refusal.words()),
            CloudFailure::Trouble(trouble) => trouble.fmt(f),
        }
    }
}

impl std::error::Error for CloudFailure {}

impl From<Trouble> for CloudFailure {
    fn from(trouble: Trouble) -> CloudFailure {
        CloudFailure::Trouble(trouble)
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
                (None, None) => return Trouble::Lasting(format!("the server's answer: {cause}")).into(),
            }
        }
    }
}

/// Sends the requests of `object_store`, and blocks until they are answered.
#[derive(Clone, Debug)]
pub struct CloudHttp {
    /// Sends a request.
    pub client: Arc<HttpClient>,
    /// Kind of object store.
    pub kind: CloudKind,
    /// True if requests may go over plain http.
    pub allows_http: bool,
}

impl HttpConnector for CloudHttp {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<object_store::client::HttpClient> {
        Ok(object_store::client::HttpClient::new(self.clone()))
    }
}

#[async_trait::async_trait]
impl HttpService for CloudHttp {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (head, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok(self.perform(&head, &body)?)
    }
}

impl CloudHttp {
    /// Sends a request, again after passing faults, until it succeeds or is refused for good.
    fn perform(&self, head: &Parts, body: &[u8]) -> CloudResult<HttpResponse> {
        let url = Url::parse(&head.uri.to_string());
        let url = url.map_err(|e| Trouble::Lasting(format!("an address: {e}")))?;
        if url.scheme() != "https" && !self.allows_http {
            let variable = format!("{}_ALLOW_HTTP", self.kind.family());
            let what = "everybody on the way reads what goes over plain http";
            return Err(
                Trouble::Lasting(format!("{}: {what}; {variable}=true allows it", shown(&url))).into()
            );
        }
        let (started, mut tries) = (Instant::now(), Tries::default());
        loop {
            // A server that refuses early closes the connection, and its reason is lost while the body is written. Each
            // second try asks before it sends; servers that do not know the question refuse it with 417.
            let asks_first = tries.failed % 2 == 1 && !body.is_empty();
            let failure = match self.try_once(head, &url, body, asks_first) {
                Ok(response) => return Ok(response),
                Err(failure) => failure,
            };
            let is_passing = match &failure {
                CloudFailure::Refused(refusal) => refusal.is_passing() || asks_first && refusal.status == 417,
                CloudFailure::Trouble(trouble) => matches!(trouble, Trouble::Passing(_)),
            };
            if !is_passing {
                return Err(failure);
            }
            if head.extensions.get::<Streamed>().is_some() {
                return Err(Trouble::Passing(failure.to_string()).into());
            }
            let what = match &failure {
                CloudFailure::Refused(_) => format!("{}: {failure}", shown(&url)),
                CloudFailure::Trouble(trouble) => trouble.to_string(),
            };
            if started.elapsed() > SIGNED || !tries.pause(&what) {
                let count = tries.failed;
                let what =
                    format!("{failure} ({count} tries); the same command goes on where this one stopped");
                return Err(Trouble::Passing(what).into());
            }
        }
    }

    fn try_once(&self, head: &Parts, url: &Url, body: &[u8], asks_first: bool) -> CloudResult<HttpResponse> {
        let answer = self.client.exchange(head.clone(), url, body, asks_first)?;
        let status = match StatusCode::from_u16(answer.status) {
            Ok(status) if status.is_success() => status,
            _ => return Err(CloudFailure::Refused(StoreRefusal::of(answer))),
        };
        let headers = answer.headers.clone();
        // An object in parts has a hash of hashes, with a `-` in it.
        let told = answer.header("x-amz-checksum-sha256").and_then(|text| BASE64_STANDARD.decode(text).ok());
        let told = told.filter(|hash| hash.len() == 32).map(|hash| ToldHash(hex(&hash)));
        let body = if head.method == "HEAD" {
            Bytes::new().into()
        } else if head.extensions.get::<Streamed>().is_some() {
            streamed(shown(&answer.url), answer.reader())
        } else {
            let limit = head.extensions.get::<AnswerLimit>().map_or(MAX_ANSWER, |limit| limit.0);
            let body = answer.read(limit)?;
            // A server may begin to answer before it has finished, and then fail.
            if let Some(refusal) = StoreRefusal::in_success(&body) {
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

/// Makes a body of an answer that is read as it comes.
fn streamed(from: String, reader: impl Read + Send + 'static) -> HttpResponseBody {
    let reader = Mutex::new(reader);
    let next = move || {
        let mut piece = vec![0; PIECE];
        match locked(&reader).read(&mut piece) {
            Ok(0) => None,
            Ok(n) => {
                piece.truncate(n);
                Some(Ok(Frame::data(Bytes::from(piece))))
            }
            Err(e) => Some(Err(CloudFailure::from(Trouble::Passing(format!("{from}: {e}"))).into())),
        }
    };
    HttpResponseBody::new(StreamBody::new(iter(std::iter::from_fn(next))))
}
