//! Object stores by the environment: by the names that AWS's tools and the crate `object_store` use.

use super::cloud_bucket::{Cloud, CloudBucket};
use super::cloud_http::CloudHttp;
use super::refusal::Account;
use super::store_location::{Bucket, CloudKind};
use crate::http_client::{HttpClient, shown};
use crate::variables::Variables;
use crate::{Error, Result};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, Checksum};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::{ClientOptions, HeaderMap, HeaderValue, RetryConfig};
use std::ffi::OsString;
use std::sync::Arc;
use url::Url;

/// Region where the environment names none.
const REGION: &str = "us-east-1";
/// Variables that let in at Azure, and what the crate calls their kind.
const AZURE_CREDENTIALS: [(&str, &str); 5] = [
    ("AZURE_STORAGE_ACCOUNT_KEY", "access_key"),
    ("AZURE_STORAGE_SAS_TOKEN", "sas_token"),
    ("AZURE_STORAGE_TOKEN", "bearer_token"),
    ("AZURE_CLIENT_SECRET", "client_secret"),
    ("AZURE_FEDERATED_TOKEN_FILE", "workload_identity"),
];

/// Opens a bucket. Without credentials, its requests are anonymous.
///
/// # Errors
/// A variable has an invalid value, or a file that it names cannot be read.
pub fn open_cloud<F: Fn(&str) -> Option<OsString>>(
    bucket: &Bucket,
    set: &Variables<F>,
) -> Result<CloudBucket> {
    let Bucket { cloud: kind, name, .. } = bucket;
    let is_on = |name: &str| Ok(set.switch(&format!("{}_{name}", kind.family()))? == Some(true));
    let client = Arc::new(HttpClient::new(set.path("SSL_CERT_FILE")?.as_deref())?);
    let http = CloudHttp { client, kind: *kind, allows_http: is_on("ALLOW_HTTP")? };
    let is_anonymous = is_on("SKIP_SIGNATURE")?;
    // This crate's client tries again.
    let once = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    // What the crate says of a wrong value may show a secret.
    let unfit = |what: &str| Error::usage(format!("{}://{name}: {what}", kind.scheme()));
    let given = |names: &[&'static str]| Ok(first(set, names)?.filter(|_| !is_anonymous));
    let account = |server: &Url, region: Option<String>, key: Option<&'static str>| Account {
        kind: *kind,
        server: shown(server),
        bucket: name.clone(),
        region,
        key,
    };
    let (cloud, telling, account): (Arc<dyn Cloud>, Option<Arc<dyn Cloud>>, Account) = match kind {
        CloudKind::S3 => {
            let (builder, server, region) = s3_builder(name, set, is_anonymous)?;
            let key = builder.get_config_value(&AmazonS3ConfigKey::AccessKeyId);
            let account = account(&server, Some(region), key.map(|_| "AWS_ACCESS_KEY_ID"));
            let builder = builder.with_retry(once).with_http_connector(http);
            let mut headers = HeaderMap::new();
            headers.insert("x-amz-checksum-mode", HeaderValue::from_static("ENABLED"));
            let options = ClientOptions::new().with_default_headers(headers);
            let telling = builder.clone().with_client_options(options);
            let built = |builder: AmazonS3Builder| builder.build().map_err(|e| unfit(&e.to_string()));
            (Arc::new(built(builder)?), Some(Arc::new(built(telling)?)), account)
        }
        CloudKind::Google => {
            let server = server(set, &["GOOGLE_BASE_URL"], "https://storage.googleapis.com")?;
            let given = given(&["GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_BEARER_TOKEN"])?;
            let builder = GoogleCloudStorageBuilder::new()
                .with_bucket_name(name)
                .with_base_url(server.as_str().trim_end_matches('/'))
                .with_skip_signature(given.is_none())
                .with_retry(once)
                .with_http_connector(http);
            let (builder, wrong) = match &given {
                Some((key @ "GOOGLE_APPLICATION_CREDENTIALS", file)) => {
                    let what =
                        "not the file of a service account or of `gcloud auth application-default login`";
                    (builder.with_application_credentials(file), format!("{key}={file}: {what}"))
                }
                // An empty one keeps the crate from looking for others.
                token => {
                    let token = token.as_ref().map_or("", |(_, token)| token.as_str());
                    (builder.with_bearer_token(token), "GOOGLE_BEARER_TOKEN: no token".into())
                }
            };
            let cloud = builder.build().map_err(|_| unfit(&wrong))?;
            (Arc::new(cloud), None, account(&server, None, given.map(|(key, _)| key)))
        }
        CloudKind::Azure => {
            let Some(user) = set.text("AZURE_STORAGE_ACCOUNT_NAME")? else {
                let what = "AZURE_STORAGE_ACCOUNT_NAME is not set: it names the account of the container";
                return Err(unfit(what));
            };
            let usual = format!("https://{user}.blob.core.windows.net");
            let server = server(set, &["AZURE_STORAGE_ENDPOINT"], &usual)?;
            let given = given(&AZURE_CREDENTIALS.map(|(key, _)| key))?;
            let key = given.as_ref().map(|(key, _)| *key);
            let mut builder = MicrosoftAzureBuilder::new()
                .with_container_name(name)
                .with_account(user)
                .with_endpoint(server.as_str().trim_end_matches('/').to_string())
                .with_skip_signature(given.is_none())
                .with_retry(once)
                .with_http_connector(http);
            if let Some((_, form)) = AZURE_CREDENTIALS.iter().find(|(name, _)| Some(*name) == key) {
                builder = builder.with_config(AzureConfigKey::CredentialType, *form);
            }
            let wrong = format!(
                "{}: not of its form, or AZURE_TENANT_ID and AZURE_CLIENT_ID do not name whose it is",
                key.unwrap_or_default()
            );
            let ids = [first(set, &["AZURE_TENANT_ID"])?, first(set, &["AZURE_CLIENT_ID"])?];
            for (name, value) in ids.into_iter().chain([given]).flatten() {
                let config = name.to_lowercase().parse().map_err(|_| unfit(&wrong))?;
                builder = builder.with_config(config, value);
            }
            (Arc::new(builder.build().map_err(|_| unfit(&wrong))?), None, account(&server, None, key))
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    Ok(CloudBucket {
        telling: telling.unwrap_or(Arc::clone(&cloud)),
        cloud,
        prefix: bucket.prefix.clone(),
        account,
        runtime: runtime.map_err(|e| Error::io(bucket.to_string(), e))?,
    })
}

/// Returns the first of these variables that is set, and its value.
fn first<F: Fn(&str) -> Option<OsString>>(
    set: &Variables<F>,
    names: &[&'static str],
) -> Result<Option<(&'static str, String)>> {
    let given = names.iter().map(|name| -> Result<_> { Ok(set.text(name)?.map(|text| (*name, text))) });
    given.filter_map(Result::transpose).next().transpose()
}

/// Returns the address of a server that one of these variables names, or the usual one.
fn server<F: Fn(&str) -> Option<OsString>>(
    set: &Variables<F>,
    names: &[&'static str],
    usual: &str,
) -> Result<Url> {
    let (name, text) = first(set, names)?.unwrap_or((names[0], usual.into()));
    let url = Url::parse(&text).ok();
    let url = url.filter(|u| matches!(u.scheme(), "http" | "https") && u.host().is_some());
    let url = url.filter(|u| u.username().is_empty() && u.password().is_none() && u.query().is_none());
    url.ok_or_else(|| Error::usage(format!("{name}: not the address of a server, http:// or https://")))
}

/// Makes the builder of a bucket of S3. Returns it with the address of the server, without the bucket, and the region.
fn s3_builder<F: Fn(&str) -> Option<OsString>>(
    bucket: &str,
    set: &Variables<F>,
    is_anonymous: bool,
) -> Result<(AmazonS3Builder, Url, String)> {
    let region = first(set, &["AWS_REGION", "AWS_DEFAULT_REGION"])?.map_or(REGION.into(), |(_, text)| text);
    let is_region = region.len() <= 64 && region.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    if !is_region {
        let shown = region.escape_debug();
        return Err(Error::usage(format!("AWS_REGION={shown} is not the name of a region")));
    }
    let domain = if region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" };
    let names = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];
    let server = server(set, &names, &format!("https://s3.{region}.{domain}"))?;
    let is_own = first(set, &names)?.is_some();
    let is_hosted = set.switch("AWS_VIRTUAL_HOSTED_STYLE_REQUEST")?.unwrap_or(!is_own);
    let mut endpoint = server.clone();
    // A certificate for `*.server` does not cover a bucket with a dot in its name.
    let host = format!("{bucket}.{}", server.host_str().unwrap_or_default());
    let is_hosted = is_hosted && !bucket.contains('.') && endpoint.set_host(Some(&host)).is_ok();
    let mut builder = AmazonS3Builder::new()
        .with_bucket_name(bucket)
        .with_region(&region)
        .with_endpoint(endpoint.as_str().trim_end_matches('/'))
        .with_virtual_hosted_style_request(is_hosted)
        .with_checksum_algorithm(Checksum::SHA256)
        .with_skip_signature(true);
    let pair = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"];
    let lacks = |is: &str, not: &str| Error::usage(format!("{is} is set, and {not} is not"));
    match (set.text(pair[0])?, set.text(pair[1])?) {
        _ if is_anonymous => {}
        (None, None) => {}
        (Some(key), Some(secret)) => {
            builder =
                builder.with_skip_signature(false).with_access_key_id(key).with_secret_access_key(secret);
            if let Some(token) = set.text("AWS_SESSION_TOKEN")? {
                builder = builder.with_token(token);
            }
        }
        (Some(_), None) => return Err(lacks(pair[0], pair[1])),
        (None, Some(_)) => return Err(lacks(pair[1], pair[0])),
    }
    Ok((builder, server, region))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stores::StoreLocation;

    fn open(location: &str, pairs: &[(&str, &str)]) -> Result<CloudBucket> {
        let Ok(StoreLocation::Bucket(bucket)) = StoreLocation::parse(location.as_ref()) else {
            panic!("{location}");
        };
        let value = |name: &str| pairs.iter().find(|(k, _)| *k == name).map(|(_, v)| v.into());
        open_cloud(&bucket, &Variables(value))
    }

    #[test]
    fn servers_follow_the_variables() {
        let of = |pairs: &[(&str, &str)]| {
            let value = |name: &str| pairs.iter().find(|(k, _)| *k == name).map(|(_, v)| v.into());
            let (builder, server, region) = s3_builder("models", &Variables(value), false)?;
            let endpoint = builder.get_config_value(&AmazonS3ConfigKey::Endpoint);
            Ok::<_, Error>((server.to_string(), region, endpoint.unwrap_or_default()))
        };
        let (server, region, endpoint) = of(&[]).unwrap();
        assert_eq!((server.as_str(), region.as_str()), ("https://s3.us-east-1.amazonaws.com/", "us-east-1"));
        assert_eq!(endpoint, "https://models.s3.us-east-1.amazonaws.com");
        assert_eq!(of(&[("AWS_REGION", "cn-north-1")]).unwrap().0, "https://s3.cn-north-1.amazonaws.com.cn/");
        let minio = [("AWS_ENDPOINT_URL", "https://minio:9000"), ("AWS_DEFAULT_REGION", "x")];
        let (_, region, endpoint) = of(&minio).unwrap();
        assert_eq!((region.as_str(), endpoint.as_str()), ("x", "https://minio:9000"));
        for (name, wrong) in [
            ("AWS_ENDPOINT_URL", "minio"),
            ("AWS_ENDPOINT_URL", "ftp://x"),
            ("AWS_ENDPOINT_URL", "https://u:p@x"),
            ("AWS_ENDPOINT_URL", "https://x/?a=b"),
            ("AWS_REGION", "a/b"),
        ] {
            assert!(of(&[(name, wrong)]).is_err(), "{name}={wrong}");
        }
        assert!(open("s3://models", &[("AWS_SKIP_SIGNATURE", "perhaps")]).is_err());
        let azure = open("az://models", &[("AZURE_STORAGE_ACCOUNT_NAME", "me")]).unwrap();
        assert_eq!(azure.account.server, "https://me.blob.core.windows.net/");
        let google = open("gs://models", &[("GOOGLE_BASE_URL", "http://127.0.0.1:1/")]).unwrap();
        assert_eq!(google.account.server, "http://127.0.0.1:1/");
    }

    #[test]
    fn credentials_are_whole_or_none_and_never_shown() {
        let pair = [("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", "s3cr3t")];
        let has = |location: &str, pairs: &[(&str, &str)]| {
            open(location, pairs).map(|bucket| bucket.account.key.is_some())
        };
        assert!(has("s3://models", &pair).unwrap() && !has("s3://models", &[]).unwrap());
        assert!(!has("s3://models", &[pair[0], pair[1], ("AWS_SKIP_SIGNATURE", "1")]).unwrap());
        for half in pair {
            assert!(has("s3://models", &[half]).unwrap_err().to_string().contains("is not"));
        }
        let token = ("GOOGLE_BEARER_TOKEN", "s3cr3t");
        assert!(has("gs://models", &[token]).unwrap() && !has("gs://models", &[]).unwrap());
        let said = has("az://models", &[]).unwrap_err().to_string();
        assert!(said.contains("AZURE_STORAGE_ACCOUNT_NAME"), "{said}");
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("key.json");
        let user = ("AZURE_STORAGE_ACCOUNT_NAME", "me");
        for text in [
            "",
            "\"s3cr3t\"",
            "{\"type\": \"s3cr3t\"}",
            "{\"type\": \"service_account\", \"private_key\": 3}",
        ] {
            std::fs::write(&file, text).unwrap();
            let wrong = [("GOOGLE_APPLICATION_CREDENTIALS", file.to_str().unwrap())];
            let said = has("gs://models", &wrong).unwrap_err().to_string();
            assert!(said.contains("key.json: not the file") && !said.contains("s3cr3t"), "{said}");
        }
        assert!(!has("az://models", &[user, ("AZURE_CLIENT_ID", "x")]).unwrap());
        for wrong in [
            ("AZURE_STORAGE_ACCOUNT_KEY", "s3cr3t!"),
            ("AZURE_STORAGE_SAS_TOKEN", "s3cr3t"),
            ("AZURE_CLIENT_SECRET", "s3cr3t"),
        ] {
            let said = has("az://models", &[user, wrong]).unwrap_err().to_string();
            assert!(said.contains(wrong.0) && !said.contains("s3cr3t"), "{said}");
        }
    }
}
