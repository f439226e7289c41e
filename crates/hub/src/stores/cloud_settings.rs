//! Object stores by the environment: by the names that AWS's tools and the crate `object_store` use.

use super::cloud_bucket::{Cloud, CloudBucket};
use super::cloud_http::CloudHttp;
use super::refusal::Account;
use super::store_location::{Bucket, CloudKind};
use crate::http_client::HttpClient;
use crate::variables::Variables;
use crate::{Error, Result};
use object_store::aws::{AmazonS3Builder, Checksum};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::{ClientOptions, HeaderMap, HeaderValue, RetryConfig};
use std::ffi::OsString;
use std::sync::Arc;
use url::Url;

/// Region where the environment names none.
const REGION: &str = "us-east-1";
/// Variables of stores of Google.
const GOOGLE: [&str; 7] = [
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_BEARER_TOKEN",
    "GOOGLE_SKIP_SIGNATURE",
    "GOOGLE_BASE_URL",
    "GOOGLE_ALLOW_HTTP",
];
/// Variables of stores of Azure.
const AZURE: [&str; 13] = [
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_CLIENT_ID",
    "AZURE_CLIENT_SECRET",
    "AZURE_TENANT_ID",
    "AZURE_FEDERATED_TOKEN_FILE",
    "AZURE_USE_AZURE_CLI",
    "AZURE_SKIP_SIGNATURE",
    "AZURE_STORAGE_USE_EMULATOR",
    "AZURE_ALLOW_HTTP",
];

/// Opens a bucket.
///
/// # Errors
/// A variable has an invalid value, or the certificates cannot be read.
pub fn open_cloud<F: Fn(&str) -> Option<OsString>>(
    bucket: &Bucket,
    set: &Variables<F>,
) -> Result<CloudBucket> {
    let http = CloudHttp(Arc::new(HttpClient::new(set.path("SSL_CERT_FILE")?.as_deref())?));
    // This crate's client tries again.
    let once = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    let unfit = |e: object_store::Error| {
        let cause = std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string);
        Error::usage(format!("{}://{}: {cause}", bucket.cloud.scheme(), bucket.name))
    };
    let account = |server: String, key: &'static str, keys: &'static str, skip: &str| -> Result<Account> {
        let has_credentials = set.switch(skip)? != Some(true);
        Ok(Account { server, bucket: bucket.name.clone(), region: None, key, keys, has_credentials })
    };
    let (cloud, telling, account): (Arc<dyn Cloud>, Arc<dyn Cloud>, Account) = match bucket.cloud {
        CloudKind::S3 => {
            let settings = S3Settings::of(set)?;
            let builder = settings.builder(&bucket.name).with_retry(once).with_http_connector(http);
            let mut telling = HeaderMap::new();
            telling.insert("x-amz-checksum-mode", HeaderValue::from_static("ENABLED"));
            let options = ClientOptions::new().with_allow_http(true).with_default_headers(telling);
            let telling = builder.clone().with_client_options(options).build().map_err(unfit)?;
            (Arc::new(builder.build().map_err(unfit)?), Arc::new(telling), settings.account(&bucket.name))
        }
        CloudKind::Google => {
            let mut builder = GoogleCloudStorageBuilder::new()
                // Its own allow plain http.
                .with_client_options(ClientOptions::new())
                .with_bucket_name(&bucket.name)
                .with_retry(once)
                .with_http_connector(http);
            for (key, value) in set.known(&GOOGLE)? {
                builder = builder.with_config(key.parse().map_err(unfit)?, value);
            }
            let cloud: Arc<dyn Cloud> = Arc::new(builder.build().map_err(unfit)?);
            let server = set.text("GOOGLE_BASE_URL")?.unwrap_or("https://storage.googleapis.com".into());
            let key = "GOOGLE_APPLICATION_CREDENTIALS";
            let account = account(server, key, key, "GOOGLE_SKIP_SIGNATURE")?;
            (Arc::clone(&cloud), cloud, account)
        }
        CloudKind::Azure => {
            let mut builder = MicrosoftAzureBuilder::new()
                .with_container_name(&bucket.name)
                .with_retry(once)
                .with_http_connector(http);
            for (key, value) in set.known(&AZURE)? {
                builder = builder.with_config(key.parse().map_err(unfit)?, value);
            }
            let cloud: Arc<dyn Cloud> = Arc::new(builder.build().map_err(unfit)?);
            let name = set.text("AZURE_STORAGE_ACCOUNT_NAME")?.unwrap_or_default();
            let server = set.text("AZURE_STORAGE_ENDPOINT")?;
            let server = server.unwrap_or(format!("https://{name}.blob.core.windows.net"));
            let keys = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY";
            let account = account(server, "AZURE_STORAGE_ACCOUNT_KEY", keys, "AZURE_SKIP_SIGNATURE")?;
            (Arc::clone(&cloud), cloud, account)
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    Ok(CloudBucket {
        cloud,
        telling,
        name: format!("{}://{}", bucket.cloud.scheme(), bucket.name),
        prefix: bucket.prefix.clone(),
        account,
        runtime: runtime.map_err(|e| Error::io(bucket.to_string(), e))?,
    })
}

/// Server, region and credentials of S3.
#[cfg_attr(test, derive(Debug))]
struct S3Settings {
    /// Address of the server (`AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, `AWS_ENDPOINT`).
    endpoint: Url,
    /// Region (`AWS_REGION`, `AWS_DEFAULT_REGION`).
    region: String,
    /// `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`; `None` where they are not set, or with
    /// `AWS_SKIP_SIGNATURE`.
    credentials: Option<(String, String, Option<String>)>,
    /// True if the bucket is part of the server's name instead of the path (`AWS_VIRTUAL_HOSTED_STYLE_REQUEST`).
    virtual_hosted: bool,
}

impl S3Settings {
    fn of<F: Fn(&str) -> Option<OsString>>(set: &Variables<F>) -> Result<S3Settings> {
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
        if endpoint.scheme() == "http" && set.switch("AWS_ALLOW_HTTP")? != Some(true) {
            return Err(Error::usage(format!(
                "{name}={text}: everybody on the way reads what goes over plain http; AWS_ALLOW_HTTP=true allows it"
            )));
        }
        let pair = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"];
        let lacks =
            |is: usize, not: usize| Error::usage(format!("{} is set, and {} is not", pair[is], pair[not]));
        let credentials = match (set.text(pair[0])?, set.text(pair[1])?) {
            _ if set.switch("AWS_SKIP_SIGNATURE")? == Some(true) => None,
            (None, None) => None,
            (Some(key), Some(secret)) => Some((key, secret, set.text("AWS_SESSION_TOKEN")?)),
            (Some(_), None) => return Err(lacks(0, 1)),
            (None, Some(_)) => return Err(lacks(1, 0)),
        };
        let virtual_hosted = set.switch("AWS_VIRTUAL_HOSTED_STYLE_REQUEST")?.unwrap_or(!is_own);
        Ok(S3Settings { endpoint, region, credentials, virtual_hosted })
    }

    fn builder(&self, bucket: &str) -> AmazonS3Builder {
        let mut endpoint = self.endpoint.clone();
        // A certificate for `*.server` does not cover a bucket with a dot in its name.
        let host = format!("{bucket}.{}", self.endpoint.host_str().unwrap_or_default());
        let virtual_hosted =
            self.virtual_hosted && !bucket.contains('.') && endpoint.set_host(Some(&host)).is_ok();
        let builder = AmazonS3Builder::new()
            .with_bucket_name(bucket)
            .with_region(&self.region)
            .with_endpoint(endpoint.as_str().trim_end_matches('/'))
            .with_virtual_hosted_style_request(virtual_hosted)
            .with_allow_http(true)
            .with_checksum_algorithm(Checksum::SHA256)
            .with_skip_signature(self.credentials.is_none());
        let Some((key, secret, token)) = &self.credentials else { return builder };
        let builder = builder.with_access_key_id(key).with_secret_access_key(secret);
        match token {
            Some(token) => builder.with_token(token),
            None => builder,
        }
    }

    fn account(&self, bucket: &str) -> Account {
        Account {
            server: crate::http_client::shown(&self.endpoint),
            bucket: bucket.into(),
            region: Some(self.region.clone()),
            key: "AWS_ACCESS_KEY_ID",
            keys: "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            has_credentials: self.credentials.is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> Result<S3Settings> {
        S3Settings::of(&Variables(|name: &str| pairs.iter().find(|(k, _)| *k == name).map(|(_, v)| v.into())))
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
    fn credentials_are_whole_or_none() {
        assert!(settings(&[]).unwrap().credentials.is_none());
        let pair = [("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", "s3cr3t")];
        let both = settings(&pair).unwrap();
        assert!(both.credentials.is_some());
        assert!(settings(&[pair[0], pair[1], ("AWS_SKIP_SIGNATURE", "1")]).unwrap().credentials.is_none());
        for half in pair {
            assert!(settings(&[half]).unwrap_err().to_string().contains("is not"));
        }
    }
}
