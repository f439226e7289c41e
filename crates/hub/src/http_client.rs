//! A blocking HTTP client that follows redirects itself, so that secrets stay with the server they are for.

use std::io::{self, Read};
use std::time::Duration;
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use url::Url;

/// Longest time for a connection, and between two pieces of an answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// Longest time until a server that has a whole upload answers: it may put gigabytes together first.
const UPLOAD_PATIENCE: Duration = Duration::from_secs(300);
/// Largest body of an answer that is an error.
const MAX_ERROR: u64 = 64 << 10;
/// Most redirects of one request.
const MAX_REDIRECTS: usize = 5;
/// Largest file of certificates that `SSL_CERT_FILE` may name.
const MAX_CERTIFICATES: u64 = 16 << 20;

/// A secret that is sent to one server only, and never shown.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// A token; none for an empty text, or one that no header can hold.
    pub fn new(text: &str) -> Option<Token> {
        let text = text.trim();
        let fits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
        fits.then(|| Token(text.to_string()))
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

/// Reason why there is no answer.
#[derive(Debug)]
pub enum Trouble {
    /// The network, or the server: another try may help.
    Passing(String),
    /// No try will help.
    Lasting(String),
}

impl Trouble {
    /// The reason in words.
    pub fn what(&self) -> &str {
        match self {
            Trouble::Passing(what) | Trouble::Lasting(what) => what,
        }
    }
}

/// Answer of a server, its body not yet read.
pub struct Answer {
    /// Status, not that of a redirect unless they are not followed.
    pub status: u16,
    /// Address that answered, behind the redirects.
    pub url: Url,
    headers: ureq::http::HeaderMap,
    body: ureq::Body,
}

impl Answer {
    /// A header as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The body as it comes.
    pub fn reader(self) -> impl Read {
        self.body.into_with_config().limit(u64::MAX).reader()
    }

    /// The name that the server gives an error: of a hub in a header, of an object store in the body.
    pub fn error_code(self) -> Option<String> {
        if let Some(code) = self.header("x-error-code") {
            return Some(code.to_string());
        }
        let body = self.read(MAX_ERROR).ok()?;
        xml_text(&String::from_utf8_lossy(&body), "Code")
    }

    /// The whole body, of at most `limit` bytes.
    ///
    /// # Errors
    /// It is longer, or the connection broke.
    pub fn read(self, limit: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.reader().take(limit + 1).read_to_end(&mut bytes)?;
        match bytes.len() as u64 > limit {
            true => Err(io::Error::other(format!("the answer has more than {limit} bytes"))),
            false => Ok(bytes),
        }
    }
}

/// A request without a body.
pub struct HttpRequest<'a> {
    /// `GET` or `HEAD`.
    pub method: &'static str,
    /// Address.
    pub url: &'a Url,
    /// First byte that is wanted, where not all are.
    pub from: u64,
    /// End of what is wanted, where it is not that of the file.
    pub to: Option<u64>,
    /// Goes to the server of `url`, and to none that it redirects to.
    pub token: Option<&'a Token>,
    /// More headers, none of them secret.
    pub headers: &'a [(&'static str, &'a str)],
    /// Follow redirects to other servers.
    pub follow: bool,
}

/// A request with a body, for the server of its address and no other.
pub struct UploadRequest<'a> {
    /// `PUT`, `POST` or `DELETE`.
    pub method: &'static str,
    /// Address.
    pub url: &'a Url,
    /// Headers, as the server wants them.
    pub headers: &'a [(&'static str, String)],
    /// Body.
    pub body: &'a [u8],
    /// Told how many bytes of the body went out since it was told last.
    pub sent: &'a dyn Fn(u64),
}

/// Body that says how much of it was taken.
struct CountedBody<'a> {
    left: &'a [u8],
    sent: &'a dyn Fn(u64),
}

impl Read for CountedBody<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.left.read(buffer)?;
        (self.sent)(n as u64);
        Ok(n)
    }
}

/// Sends requests.
#[derive(Debug)]
pub struct HttpClient {
    agent: ureq::Agent,
}

impl HttpClient {
    /// A client that trusts the certificates in `SSL_CERT_FILE`, where that is set, else Mozilla's; proxies come from the
    /// environment.
    ///
    /// # Errors
    /// The file of certificates cannot be read.
    pub fn new(certificates: Option<&std::path::Path>) -> io::Result<HttpClient> {
        let roots = match certificates {
            None => RootCerts::WebPki,
            Some(path) => {
                let pem = anemoe_io::read_input(path, MAX_CERTIFICATES)?;
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
            .timeout_recv_response(Some(PATIENCE))
            .timeout_per_read(Some(PATIENCE))
            .timeout_per_write(Some(PATIENCE))
            .user_agent(concat!("anemoe/", env!("CARGO_PKG_VERSION")))
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            .build();
        Ok(HttpClient { agent: config.into() })
    }

    /// Sends a request and follows where it leads.
    ///
    /// # Errors
    /// There is no answer, or a redirect leads nowhere.
    pub fn send(&self, request: &HttpRequest) -> Result<Answer, Trouble> {
        let mut url = request.url.clone();
        for _ in 0..=MAX_REDIRECTS {
            let answer = self.send_once(request, &url)?;
            if !matches!(answer.status, 301 | 302 | 303 | 307 | 308) {
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

    /// Sends a request with a body. Redirects are answers like any other.
    ///
    /// # Errors
    /// There is no answer.
    pub fn upload(&self, request: &UploadRequest) -> Result<Answer, Trouble> {
        let mut builder = ureq::http::Request::builder().method(request.method).uri(request.url.as_str());
        builder = builder.header("content-length", request.body.len());
        for (name, value) in request.headers {
            builder = builder.header(*name, value);
        }
        let mut body = CountedBody { left: request.body, sent: request.sent };
        let wrong = |e: ureq::http::Error| Trouble::Lasting(format!("{}: {e}", shown(request.url)));
        let built = builder.body(ureq::SendBody::from_reader(&mut body)).map_err(wrong)?;
        let built = self.agent.configure_request(built).timeout_recv_response(Some(UPLOAD_PATIENCE)).build();
        let (parts, body) = self.agent.run(built).map_err(|e| trouble(request.url, &e))?.into_parts();
        let url = request.url.clone();
        Ok(Answer { status: parts.status.as_u16(), url, headers: parts.headers, body })
    }

    fn send_once(&self, request: &HttpRequest, url: &Url) -> Result<Answer, Trouble> {
        let mut builder = ureq::http::Request::builder().method(request.method).uri(url.as_str());
        builder = builder.header("accept-encoding", "identity");
        match (request.from, request.to) {
            (0, None) => {}
            (from, None) => builder = builder.header("range", format!("bytes={from}-")),
            (from, Some(to)) => {
                builder = builder.header("range", format!("bytes={from}-{}", to.saturating_sub(1)));
            }
        }
        for (name, value) in request.headers {
            builder = builder.header(*name, *value);
        }
        if let Some(token) = request.token.filter(|_| url.origin() == request.url.origin() && is_private(url))
        {
            builder = builder.header("authorization", format!("Bearer {}", token.0));
        }
        let wrong = |e: ureq::http::Error| Trouble::Lasting(format!("{}: {e}", shown(url)));
        let answer = self.agent.run(builder.body(()).map_err(wrong)?);
        let (parts, body) = answer.map_err(|e| trouble(url, &e))?.into_parts();
        Ok(Answer { status: parts.status.as_u16(), url: url.clone(), headers: parts.headers, body })
    }
}

/// Nobody on the way can read what is sent.
fn is_private(url: &Url) -> bool {
    let is_here = match url.host() {
        Some(url::Host::Domain(name)) => name == "localhost",
        Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
        Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
        None => false,
    };
    url.scheme() == "https" || is_here
}

/// An address without what may be secret in it: signed addresses have their signature behind the `?`.
pub fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.set_fragment(None);
    let _ = url.set_password(None);
    let _ = url.set_username("");
    url.to_string()
}

/// The text of the first element of this name in an XML document.
pub fn xml_text(xml: &str, name: &str) -> Option<String> {
    let from = xml.split_once(&format!("<{name}>"))?.1;
    let text = from.split_once(&format!("</{name}>"))?.0;
    let known = [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&apos;", "'"), ("&amp;", "&")];
    Some(known.iter().fold(text.to_string(), |text, (escaped, plain)| text.replace(escaped, plain)))
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
    fn secrets_are_not_shown_and_not_sent_in_the_clear() {
        let url = |text: &str| Url::parse(text).unwrap();
        assert_eq!(shown(&url("https://u:p@cdn.example/f?sig=abc#x")), "https://cdn.example/f");
        assert!(is_private(&url("https://a.example")) && is_private(&url("http://127.0.0.1:80")));
        assert!(is_private(&url("http://localhost")) && !is_private(&url("http://a.example")));
        assert_eq!(format!("{:?}", Token::new("hf_abc")), "Some(Token)");
        assert!(Token::new(" ").is_none() && Token::new("a\r\nb").is_none());
    }
}
