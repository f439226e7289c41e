//! A blocking HTTP client that follows redirects itself, so that secrets go only to the server that they are for.

use anemoe_io::Error;
use jiff::Timestamp;
use std::fmt;
use std::io::Read;
use std::path::Path;
use std::time::Duration;
use ureq::SendBody;
use ureq::http::header::{ACCEPT_ENCODING, CONTENT_LENGTH, EXPECT};
use ureq::http::request::Parts;
use ureq::http::{HeaderValue, Request};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use url::Url;

/// Longest time for a connection, and between two reads of an answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// Longest time until a server answers a complete upload: it may assemble gigabytes first.
const UPLOAD_PATIENCE: Duration = Duration::from_secs(300);
/// Most bytes of the body of an error.
pub const MAX_ERROR: u64 = 64 << 10;
/// Longest wait that a server's `retry-after` asks for and gets.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// Most redirects of one request.
const MAX_REDIRECTS: usize = 5;
/// Tries of a request, and of a download without a new byte.
const TRIES: u32 = 6;
/// Pause before the second try; each later pause is twice as long.
const PAUSE: Duration = Duration::from_millis(500);
/// Most bytes of the certificates that `SSL_CERT_FILE` names.
const MAX_CERTIFICATES: u64 = 16 << 20;

/// A secret that is sent to one server only and never shown.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// Makes a token; `None` for an empty text, or a text that a header cannot hold.
    pub fn new(text: &str) -> Option<Token> {
        let text = text.trim_start_matches('\u{feff}').trim();
        let fits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
        fits.then(|| Token(text.to_string()))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// Count of failed tries in a row.
pub struct Tries {
    most: u32,
    /// Tries that failed.
    pub failed: u32,
    reached: u64,
}

impl Default for Tries {
    fn default() -> Tries {
        Tries::new(TRIES)
    }
}

impl Tries {
    /// Makes a count that ends with the try `most`.
    pub fn new(most: u32) -> Tries {
        Tries { most, failed: 0, reached: 0 }
    }

    /// Tells whether more bytes are there than before; then the count begins anew.
    pub fn reaches(&mut self, there: u64) -> bool {
        let is_more = there > self.reached;
        if is_more {
            *self = Tries { failed: 0, reached: there, ..*self };
        }
        is_more
    }

    /// Counts a failed try and pauses before the next one. Returns false at once after the last one.
    pub fn pause(&mut self, why: &dyn fmt::Display) -> bool {
        self.failed += 1;
        if self.failed >= self.most {
            return false;
        }
        let pause = PAUSE * 2u32.pow(self.failed - 1);
        // The second try often succeeds; warnings start after it.
        if self.failed > 1 {
            tracing::warn!("{why}; the next try is in {} s", pause.as_secs());
        }
        std::thread::sleep(pause);
        true
    }
}

/// Reason why no answer came.
#[derive(Clone, Debug)]
pub enum Trouble {
    /// A fault of the network or the server; another try may help.
    Passing(String),
    /// A fault that no other try changes.
    Lasting(String),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Trouble::Passing(what) | Trouble::Lasting(what)) = self;
        f.write_str(what)
    }
}

/// Answer of a server; its body is not read yet.
pub struct Answer {
    /// Status; that of a redirect only if redirects are not followed.
    pub status: u16,
    /// Address that answered, after redirects.
    pub url: Url,
    /// Headers.
    pub headers: ureq::http::HeaderMap,
    body: ureq::Body,
}

impl Answer {
    /// Returns a header as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// Returns a reader of the body, without a limit.
    pub fn reader(self) -> impl Read {
        self.body.into_with_config().limit(u64::MAX).reader()
    }

    /// Reads the whole body, at most `limit` bytes.
    ///
    /// # Errors
    /// The body is longer, or the connection broke.
    pub fn read(self, limit: u64) -> Result<Vec<u8>, Trouble> {
        let (from, announced) = (shown(&self.url), self.length());
        let mut bytes = Vec::new();
        let read = self.reader().take(limit + 1).read_to_end(&mut bytes);
        read.map_err(|e| Trouble::Passing(format!("{from}: {e}")))?;
        match bytes.len() as u64 {
            n if n > limit => {
                Err(Trouble::Lasting(format!("{from}: the answer has more than {limit} bytes")))
            }
            n if announced.is_some_and(|all| n < all) => {
                Err(Trouble::Passing(format!("{from}: the connection ended early")))
            }
            _ => Ok(bytes),
        }
    }

    /// Returns the length of the body, where the server announces it.
    pub fn length(&self) -> Option<u64> {
        self.header("content-length")?.parse().ok()
    }

    /// Tells whether the server's clock is minutes from that of this machine. Signatures are valid for a quarter of an hour.
    pub fn is_skewed(&self) -> bool {
        let there = self.header("date").and_then(date);
        there.is_some_and(|there| there.duration_since(Timestamp::now()).abs().as_secs() > 600)
    }

    /// Waits as long as the server asks before another try (`retry-after`), but not for minutes.
    pub fn wait_as_asked(&self) {
        let asked = self.header("retry-after").and_then(|text| wait(text, Timestamp::now()));
        std::thread::sleep(asked.unwrap_or_default().min(MAX_WAIT));
    }
}

/// Reads the value of `retry-after`: seconds, or a date.
fn wait(text: &str, now: Timestamp) -> Option<Duration> {
    match text.trim().parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => date(text)?.duration_since(now).try_into().ok(),
    }
}

/// Reads a date of a header.
fn date(text: &str) -> Option<Timestamp> {
    Some(jiff::fmt::rfc2822::parse(text.trim()).ok()?.timestamp())
}

/// A request without a body.
pub struct HttpRequest<'a> {
    /// `GET` or `HEAD`.
    pub method: &'static str,
    /// Address of the request.
    pub url: &'a Url,
    /// First byte wanted; 0 for the whole file.
    pub from: u64,
    /// End of the bytes wanted; `None` for the file's end.
    pub to: Option<u64>,
    /// Token for the server of `url`; servers that it redirects to do not get it.
    pub token: Option<&'a Token>,
    /// True if redirects to other servers are followed.
    pub follow: bool,
}

/// A client that sends requests.
#[derive(Debug)]
pub struct HttpClient {
    agent: ureq::Agent,
}

impl HttpClient {
    /// Makes a client. It trusts the certificates of the file `certificates`, else Mozilla's, and takes proxies from
    /// the environment.
    ///
    /// # Errors
    /// The file of certificates cannot be read.
    pub fn new(certificates: Option<&Path>) -> anemoe_io::Result<HttpClient> {
        let roots = match certificates {
            None => RootCerts::WebPki,
            Some(path) => {
                let pem = anemoe_io::read_input(path, MAX_CERTIFICATES).map_err(|e| Error::io(path, e))?;
                let items = parse_pem(&pem).filter_map(|item| match item {
                    Ok(PemItem::Certificate(certificate)) => Some(certificate),
                    _ => None,
                });
                let certificates: Vec<Certificate<'static>> = items.collect();
                RootCerts::from(certificates)
            }
        };
        let config = ureq::Agent::config_builder()
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .timeout_connect(Some(PATIENCE))
            .timeout_per_read(Some(PATIENCE))
            .timeout_per_write(Some(PATIENCE))
            .user_agent(concat!("anemoe/", env!("CARGO_PKG_VERSION")))
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            .build();
        Ok(HttpClient { agent: config.into() })
    }

    /// Sends a request and follows redirects.
    ///
    /// # Errors
    /// No answer comes, or a redirect has no valid target.
    pub fn send(&self, request: &HttpRequest) -> Result<Answer, Trouble> {
        let mut url = request.url.clone();
        for _ in 0..=MAX_REDIRECTS {
            let answer = self.send_once(request, &url)?;
            if !matches!(answer.status, 301 | 302 | 303 | 307 | 308) {
                return Ok(answer);
            }
            // Without an address, what else it says tells more.
            if !request.follow && answer.header("location").is_none() {
                return Ok(answer);
            }
            let lost = || Trouble::Lasting(format!("{} redirects to nowhere", shown(&url)));
            let next = answer.header("location").and_then(|to| url.join(to).ok()).ok_or_else(lost)?;
            if next.origin() != url.origin() && !request.follow {
                return Ok(answer);
            }
            if !matches!(next.scheme(), "http" | "https")
                || (url.scheme() == "https" && next.scheme() == "http")
            {
                return Err(Trouble::Lasting(format!(
                    "{} redirects to {}, which is not https",
                    shown(&url),
                    shown(&next)
                )));
            }
            url = next;
        }
        Err(Trouble::Lasting(format!("{} redirects more than {MAX_REDIRECTS} times", shown(request.url))))
    }

    fn send_once(&self, request: &HttpRequest, url: &Url) -> Result<Answer, Trouble> {
        let mut builder = Request::builder().method(request.method).uri(url.as_str());
        match (request.from, request.to) {
            (0, None) => {}
            (from, None) => builder = builder.header("range", format!("bytes={from}-")),
            (from, Some(to)) => {
                builder = builder.header("range", format!("bytes={from}-{}", to.saturating_sub(1)));
            }
        }
        if let Some(token) = request.token.filter(|_| url.origin() == request.url.origin() && is_private(url))
        {
            builder = builder.header("authorization", format!("Bearer {}", token.0));
        }
        let head = builder.body(()).map_err(|e| Trouble::Lasting(format!("{}: {e}", shown(url))))?;
        self.exchange(head.into_parts().0, url, &[], false)
    }

    /// Sends a request once. Returns redirects like other answers. With `asks_first`, the server is asked to accept the
    /// headers before the body follows (`expect: 100-continue`).
    ///
    /// # Errors
    /// No answer comes.
    pub fn exchange(
        &self,
        mut head: Parts,
        url: &Url,
        mut body: &[u8],
        asks_first: bool,
    ) -> Result<Answer, Trouble> {
        head.headers.remove(CONTENT_LENGTH);
        if matches!(head.method.as_str(), "GET" | "HEAD") {
            head.headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
            return self.run(url, Request::from_parts(head, SendBody::none()), PATIENCE);
        }
        head.headers.insert(CONTENT_LENGTH, body.len().into());
        if asks_first {
            head.headers.insert(EXPECT, HeaderValue::from_static("100-continue"));
        }
        self.run(url, Request::from_parts(head, SendBody::from_reader(&mut body)), UPLOAD_PATIENCE)
    }

    fn run(&self, url: &Url, request: Request<SendBody>, patience: Duration) -> Result<Answer, Trouble> {
        let request = self.agent.configure_request(request).timeout_recv_response(Some(patience)).build();
        let (parts, body) = self.agent.run(request).map_err(|e| trouble(url, &e))?.into_parts();
        Ok(Answer { status: parts.status.as_u16(), url: url.clone(), headers: parts.headers, body })
    }
}

/// Tells whether nobody on the way can read what is sent: HTTPS, or a server on this machine.
fn is_private(url: &Url) -> bool {
    let is_here = match url.host() {
        Some(url::Host::Domain(name)) => name == "localhost",
        Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
        Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
        None => false,
    };
    url.scheme() == "https" || is_here
}

/// Returns an address without parts that may be secret: user, password, fragment, and the query, where signed addresses
/// carry their signature.
pub fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.set_fragment(None);
    let _ = url.set_password(None);
    let _ = url.set_username("");
    url.to_string()
}

/// Codes by which object stores say that another try may help, whatever the status. A body that differs from its hash
/// broke on the way.
const PASSING_CODES: &str = "BadDigest BandwidthLimitExceeded ConditionalRequestConflict IncompleteBody InternalError \
    OperationAborted RequestLimitExceeded RequestTimeout ServerBusy ServiceUnavailable SlowDown \
    SlowDownRead SlowDownWrite Throttling ThrottlingException TooManyRequests XAmzContentSHA256Mismatch \
    XMinioServerNotInitialized";

/// Tells whether another try may help after an error with this status and code.
pub fn is_passing(status: u16, code: Option<&str>) -> bool {
    // 520 to 530 are those of proxies that do not reach the server.
    matches!(status, 408 | 425 | 429 | 500 | 502..=504 | 509 | 520..=530)
        // The answer to a HEAD has no code: another request may be at work on the object.
        || code.map_or(status == 409, |code| PASSING_CODES.split(' ').any(|known| known == code))
}

fn trouble(url: &Url, e: &ureq::Error) -> Trouble {
    let what = format!("{}: {e}", shown(url));
    match e {
        ureq::Error::Io(_)
        | ureq::Error::Timeout(_)
        | ureq::Error::HostNotFound
        | ureq::Error::ConnectionFailed
        | ureq::Error::Protocol(_)
        | ureq::Error::BodyStalled => Trouble::Passing(what),
        _ => Trouble::Lasting(what),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_seconds_or_dates() {
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let seconds = |text: &str| wait(text, now).map(|wait| wait.as_secs());
        assert_eq!((seconds("7"), seconds(" 0 ")), (Some(7), Some(0)));
        assert_eq!(seconds("Thu, 01 Jan 2026 00:00:09 GMT"), Some(9));
        for wrong in ["", "soon", "-1", "Wed, 31 Dec 2025 23:00:00 GMT"] {
            assert_eq!(seconds(wrong), None, "{wrong}");
        }
        assert!(
            is_passing(200, Some("SlowDown")) && is_passing(503, None) && !is_passing(404, Some("NoSuchKey"))
        );
        assert!(is_passing(409, None) && !is_passing(409, Some("InvalidBucketState")));
        for (status, code) in [
            (400, "IncompleteBody"),
            (400, "BadDigest"),
            (400, "XAmzContentSHA256Mismatch"),
            (200, "XMinioServerNotInitialized"),
            (409, "OperationAborted"),
        ] {
            assert!(is_passing(status, Some(code)), "{code}");
        }
    }

    #[test]
    fn secrets_are_not_shown_and_not_sent_in_the_clear() {
        let url = |text: &str| Url::parse(text).unwrap();
        assert_eq!(shown(&url("https://u:p@cdn.example/f?sig=abc#x")), "https://cdn.example/f");
        assert!(is_private(&url("https://a.example")) && is_private(&url("http://127.0.0.1:80")));
        assert!(is_private(&url("http://localhost")) && !is_private(&url("http://a.example")));
        assert_eq!(format!("{:?}", Token::new("hf_abc")), "Some(Token)");
        assert!(Token::new(" ").is_none() && Token::new("a\r\nb").is_none());
    }
}
