//! API keys, and origins whose pages may send requests.

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
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

    /// Tells whether a request has one of the keys. The time does not depend on which key.
    pub fn accept(&self, headers: &HeaderMap) -> bool {
        if self.0.is_empty() {
            return true;
        }
        let given = headers.get(header::AUTHORIZATION).and_then(|v| v.to_str().ok());
        let Some(key) =
            given.and_then(|v| v.split_once(' ')).filter(|(kind, _)| kind.eq_ignore_ascii_case("bearer"))
        else {
            return false;
        };
        let hash = anemoe_bundle::sha256(key.1.trim().as_bytes());
        let equal = |all: Equal, known: &String| all | known.as_bytes().ct_eq(hash.as_bytes());
        self.0.iter().fold(Equal::from(0), equal).into()
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
        assert!(!keys.accept(&HeaderMap::new()) && ApiKeys::default().accept(&HeaderMap::new()));
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
}
