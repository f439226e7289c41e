//! API keys, names of the server, and origins whose pages may send requests.

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use std::net::IpAddr;
use subtle::{Choice as Equal, ConstantTimeEq};

/// Seconds for which a browser may cache a preflight's answer; Chromium allows at most 7200.
const PREFLIGHT_SECONDS: &str = "7200";

/// API keys as SHA-256 hashes: all have one length, so that the time of a comparison does not depend on a key.
#[derive(Default)]
pub struct ApiKeys(Vec<String>);

impl ApiKeys {
    /// Makes the set of accepted keys; an empty set accepts every request.
    pub fn new(keys: &[String]) -> ApiKeys {
        ApiKeys(keys.iter().map(|key| anemoe_bundle::sha256(key.as_bytes())).collect())
    }

    /// Tells whether no key is asked for.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Tells whether a request has one of the keys. The time does not depend on which key.
    pub fn accept(&self, headers: &HeaderMap) -> bool {
        if self.0.is_empty() {
            return true;
        }
        let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok());
        let bearer = text("authorization").and_then(|v| v.split_once(' '));
        let bearer = bearer.filter(|(kind, _)| kind.eq_ignore_ascii_case("bearer")).map(|(_, key)| key);
        // Clients of Anthropic's API send the second.
        let given: Vec<String> = bearer
            .into_iter()
            .chain(text("x-api-key"))
            .map(|key| anemoe_bundle::sha256(key.trim().as_bytes()))
            .collect();
        let equal =
            |all: Equal, (known, hash): (&String, &String)| all | known.as_bytes().ct_eq(hash.as_bytes());
        let pairs = self.0.iter().flat_map(|known| given.iter().map(move |hash| (known, hash)));
        pairs.fold(Equal::from(0), equal).into()
    }
}

/// Names under which the server may be asked. A page of any site can reach this machine by a name of its own that it lets
/// point here; it cannot by an address, or by `localhost`.
#[derive(Default)]
pub struct Hosts(Vec<String>);

impl Hosts {
    /// Makes the set of names besides addresses and `localhost`.
    pub fn new(names: &[String]) -> Hosts {
        Hosts(names.iter().map(|name| name.to_ascii_lowercase()).collect())
    }

    /// Tells whether a request is meant for one of the names: by its target, if that has a host, else by its header.
    pub fn accept(&self, target: Option<&str>, headers: &HeaderMap) -> bool {
        let header = headers.get(header::HOST).map(|v| v.to_str().unwrap_or_default());
        target.into_iter().chain(header).all(|host| {
            let host = host.to_ascii_lowercase();
            let name = match host.rsplit_once(':') {
                Some((name, port)) if !port.ends_with(']') => name,
                _ => &host,
            };
            let name = name.strip_suffix('.').unwrap_or(name);
            let address = name.strip_prefix('[').and_then(|n| n.strip_suffix(']')).unwrap_or(name);
            address.parse::<IpAddr>().is_ok()
                || name == "localhost"
                || name.ends_with(".localhost")
                || self.0.iter().any(|known| known == name || known == "*")
        })
    }
}

/// Origins whose pages may send requests; none by default.
#[derive(Default)]
pub struct Origins(Vec<String>);

impl Origins {
    /// Makes the set of origins, named as browsers do, or `*`.
    pub fn new(origins: Vec<String>) -> Origins {
        Origins(origins)
    }

    /// Returns the headers that let a request's page read the answer; none for other origins.
    pub fn headers(&self, request: &HeaderMap) -> Vec<(HeaderName, HeaderValue)> {
        let Some(origin) = request.get(header::ORIGIN) else { return Vec::new() };
        let any = self.0.iter().any(|o| o == "*");
        if !any && !self.0.iter().any(|o| o.as_bytes() == origin.as_bytes()) {
            return Vec::new();
        }
        let allowed = if any { HeaderValue::from_static("*") } else { origin.clone() };
        // Clients send headers of their own: OpenAI's client for JavaScript has a dozen.
        let wanted = request.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
        vec![
            (header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed),
            (
                header::ACCESS_CONTROL_ALLOW_HEADERS,
                wanted.unwrap_or(HeaderValue::from_static("authorization, content-type")),
            ),
            (header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST")),
            (header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(PREFLIGHT_SECONDS)),
            (header::VARY, HeaderValue::from_static("origin, access-control-request-headers")),
        ]
    }
}

/// Parses `*`, or an origin as browsers write it: scheme, host, and a port that is not the scheme's own.
///
/// # Errors
/// The text is neither.
pub fn parse_origin(text: &str) -> Result<String, String> {
    let wrong =
        || "neither * nor SCHEME://HOST[:PORT] without a path, as in http://localhost:3000".to_string();
    if text == "*" {
        return Ok(text.into());
    }
    let (scheme, place) = text.split_once("://").ok_or_else(wrong)?;
    let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    let (host, port) = match place.rsplit_once(':') {
        // The last colon of an IPv6 address in brackets may be part of the address.
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (place, None),
    };
    let is_host = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
        Some(inner) => inner.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c)),
    };
    let is_port =
        port.is_none_or(|p| p.starts_with(|c: char| c.is_ascii_digit()) && p.parse::<u16>().is_ok());
    if !(is_scheme && is_host && is_port) {
        return Err(wrong());
    }
    // Browsers write scheme and host in lower case.
    Ok(text.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn one_of_the_keys_is_needed() {
        let keys = ApiKeys::new(&["first".into(), "second".into()]);
        let accept = |value: &str| keys.accept(&headers(header::AUTHORIZATION, value));
        assert!(accept("Bearer first") && accept("bearer second") && accept("Bearer  second "));
        assert!(!accept("Bearer third") && !accept("first") && !accept("Basic first") && !accept("Bearer "));
        assert!(keys.accept(&headers(HeaderName::from_static("x-api-key"), "second")));
        assert!(!keys.accept(&headers(HeaderName::from_static("x-api-key"), "third")));
        assert!(!keys.accept(&HeaderMap::new()) && ApiKeys::default().accept(&HeaderMap::new()));
    }

    #[test]
    fn names_that_anybody_may_point_here_are_refused() {
        let hosts = Hosts::new(&["My.Server".into()]);
        let accept = |host: &str| hosts.accept(None, &headers(header::HOST, host));
        for good in [
            "127.0.0.1:80",
            "localhost",
            "localhost:8080",
            "[::1]:80",
            "[::1]",
            "a.localhost",
            "my.server:1",
            "10.0.0.2",
        ] {
            assert!(accept(good), "{good}");
        }
        for wrong in
            ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil", "", "[x]:80"]
        {
            assert!(!accept(wrong), "{wrong}");
        }
        assert!(hosts.accept(None, &HeaderMap::new()));
        assert!(!hosts.accept(Some("evil.example"), &headers(header::HOST, "localhost")));
        assert!(Hosts::new(&["*".into()]).accept(None, &headers(header::HOST, "evil.example")));
    }

    #[test]
    fn pages_of_other_origins_may_not_ask_unless_told() {
        let of = |allowed: &[&str], origin: &str| {
            let origins = Origins::new(allowed.iter().map(|o| o.to_string()).collect());
            let all = origins.headers(&headers(header::ORIGIN, origin));
            all.first().map(|(_, value)| value.to_str().unwrap().to_string())
        };
        assert_eq!(of(&[], "http://a"), None);
        assert_eq!(of(&["http://a"], "http://a"), Some("http://a".into()));
        assert_eq!(of(&["http://a"], "http://a.b"), None);
        assert_eq!(of(&["*"], "http://b"), Some("*".into()));
        let mut request = headers(header::ORIGIN, "http://a");
        request.insert(
            header::ACCESS_CONTROL_REQUEST_HEADERS,
            HeaderValue::from_static("authorization, x-stainless-os"),
        );
        let all = HeaderMap::from_iter(Origins::new(vec!["http://a".into()]).headers(&request));
        assert_eq!(all[header::ACCESS_CONTROL_ALLOW_HEADERS], "authorization, x-stainless-os");
        assert!(all.contains_key(header::ACCESS_CONTROL_MAX_AGE));
        assert!(Origins::new(vec!["http://b".into()]).headers(&request).is_empty());
    }

    #[test]
    fn origins_are_those_that_browsers_send() {
        for good in
            ["*", "http://localhost:3000", "https://a.example", "http://[::1]:80", "tauri://localhost"]
        {
            assert_eq!(parse_origin(good).as_deref(), Ok(good));
        }
        assert_eq!(parse_origin("HTTP://Here").as_deref(), Ok("http://here"));
        for wrong in [
            "",
            "localhost",
            "http://",
            "http://a/",
            "http://a/b",
            "http://a:",
            "http://a:+1",
            "http://a:99999",
            "http://[x]",
            "null",
        ] {
            assert!(parse_origin(wrong).is_err(), "{wrong}");
        }
    }
}
