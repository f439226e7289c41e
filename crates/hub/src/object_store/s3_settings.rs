//! Settings of object stores from the environment, by the names that AWS's tools and `object_store` use.

use crate::variables::Variables;
use crate::{Error, Result};
use rusty_s3::Credentials;
use std::ffi::OsString;
use std::path::PathBuf;
use url::Url;

/// Region where the environment names none.
const REGION: &str = "us-east-1";

/// Server, region and credentials.
#[derive(Clone, Debug)]
pub struct S3Settings {
    /// Address of the server (`AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, `AWS_ENDPOINT`).
    pub endpoint: Url,
    /// Region (`AWS_REGION`, `AWS_DEFAULT_REGION`).
    pub region: String,
    /// Credentials (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`); `None` where they are not set,
    /// or with `AWS_SKIP_SIGNATURE`.
    pub(super) credentials: Option<Credentials>,
    /// True if the bucket is part of the server's name instead of the path (`AWS_VIRTUAL_HOSTED_STYLE_REQUEST`).
    pub(super) virtual_hosted: bool,
    /// File of certificates to trust (`SSL_CERT_FILE`).
    pub certificates: Option<PathBuf>,
}

impl S3Settings {
    /// Reads the settings from this process's environment.
    ///
    /// # Errors
    /// A variable has an invalid value.
    pub fn from_environment() -> Result<S3Settings> {
        S3Settings::from_variables(|name| std::env::var_os(name))
    }

    /// Reads the settings by a function that returns the value of a variable.
    ///
    /// # Errors
    /// A variable has an invalid value.
    pub fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Result<S3Settings> {
        let set = Variables(variable);
        let switch = |name: &str| match set.text(name)?.map(|v| v.to_ascii_lowercase()).as_deref() {
            None => Ok(None),
            Some("1" | "on" | "yes" | "true") => Ok(Some(true)),
            Some("0" | "off" | "no" | "false") => Ok(Some(false)),
            Some(other) => Err(Error::usage(format!("{name}={other} is neither true nor false"))),
        };
        // The first of these variables that is set, and its value.
        let first = |names: &[&'static str]| {
            let set = names.iter().map(|name| -> Result<_> { Ok(set.text(name)?.map(|text| (*name, text))) });
            set.filter_map(Result::transpose).next().transpose()
        };
        let region = first(&["AWS_REGION", "AWS_DEFAULT_REGION"])?.map_or(REGION.into(), |(_, text)| text);
        let is_region = region.len() <= 64 && region.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        if !is_region {
            return Err(Error::usage(format!(
                "AWS_REGION={} is not the name of a region",
                region.escape_debug()
            )));
        }
        let named = first(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])?;
        let is_own = named.is_some();
        let (name, text) = named.unwrap_or_else(|| {
            let domain = if region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" };
            ("AWS_REGION", format!("https://s3.{region}.{domain}"))
        });
        let endpoint = Url::parse(&text).ok();
        let endpoint = endpoint.filter(|u| matches!(u.scheme(), "http" | "https") && u.host().is_some());
        let endpoint =
            endpoint.filter(|u| u.username().is_empty() && u.password().is_none() && u.query().is_none());
        let endpoint = endpoint.ok_or_else(|| {
            Error::usage(format!("{name}: not the address of a server, http:// or https://"))
        })?;
        if endpoint.scheme() == "http" && switch("AWS_ALLOW_HTTP")? != Some(true) {
            return Err(Error::usage(format!(
                "{name}={text}: everybody on the way reads what goes over plain http; AWS_ALLOW_HTTP=true allows it"
            )));
        }
        let pair = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"];
        let credentials = match (set.text(pair[0])?, set.text(pair[1])?) {
            _ if switch("AWS_SKIP_SIGNATURE")? == Some(true) => None,
            (None, None) => None,
            (Some(key), Some(secret)) => Some(match set.text("AWS_SESSION_TOKEN")? {
                Some(token) => Credentials::new_with_token(key, secret, token),
                None => Credentials::new(key, secret),
            }),
            (Some(_), None) => {
                return Err(Error::usage(format!("{} is set, and {} is not", pair[0], pair[1])));
            }
            (None, Some(_)) => {
                return Err(Error::usage(format!("{} is set, and {} is not", pair[1], pair[0])));
            }
        };
        Ok(S3Settings {
            endpoint,
            region,
            credentials,
            virtual_hosted: switch("AWS_VIRTUAL_HOSTED_STYLE_REQUEST")?.unwrap_or(!is_own),
            certificates: set.path("SSL_CERT_FILE")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> Result<S3Settings> {
        S3Settings::from_variables(|name| pairs.iter().find(|(k, _)| *k == name).map(|(_, v)| v.into()))
    }

    #[test]
    fn servers_follow_the_variables() {
        let of = |pairs: &[(&str, &str)]| {
            let s = settings(pairs).unwrap();
            (s.endpoint.to_string(), s.region, s.virtual_hosted)
        };
        assert_eq!(of(&[]), ("https://s3.us-east-1.amazonaws.com/".into(), "us-east-1".into(), true));
        assert_eq!(of(&[("AWS_REGION", "cn-north-1")]).0, "https://s3.cn-north-1.amazonaws.com.cn/");
        let minio = [("AWS_ENDPOINT_URL", "https://minio:9000"), ("AWS_DEFAULT_REGION", "x")];
        assert_eq!(of(&minio), ("https://minio:9000/".into(), "x".into(), false));
        let plain = ("AWS_ENDPOINT_URL", "http://minio:9000");
        let said = settings(&[plain]).unwrap_err().to_string();
        assert!(said.contains("AWS_ALLOW_HTTP"), "{said}");
        assert_eq!(of(&[plain, ("AWS_ALLOW_HTTP", "true")]).0, "http://minio:9000/");
        for (name, wrong) in [
            ("AWS_ENDPOINT_URL", "minio"),
            ("AWS_ENDPOINT_URL", "ftp://x"),
            ("AWS_ENDPOINT_URL", "https://u:p@x"),
            ("AWS_ENDPOINT_URL", "https://x/?a=b"),
            ("AWS_REGION", "a/b"),
            ("AWS_SKIP_SIGNATURE", "perhaps"),
        ] {
            assert!(settings(&[(name, wrong)]).is_err(), "{name}={wrong}");
        }
    }

    #[test]
    fn credentials_are_whole_or_none_and_never_shown() {
        assert!(settings(&[]).unwrap().credentials.is_none());
        let pair = [("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", "s3cr3t")];
        let both = settings(&pair).unwrap();
        assert!(both.credentials.is_some() && !format!("{both:?}").contains("s3cr3t"));
        assert!(settings(&[pair[0], pair[1], ("AWS_SKIP_SIGNATURE", "1")]).unwrap().credentials.is_none());
        for half in pair {
            assert!(settings(&[half]).unwrap_err().to_string().contains("is not"));
        }
    }
}
