//! Names of stores: a folder, `file://FOLDER`, or `SCHEME://BUCKET/PREFIX`.

use crate::{Error, Result};
use std::fmt;
use std::path::{Path, PathBuf};
use url::Url;

/// Most bytes of a prefix; S3 allows keys of 1024 bytes, and the rest of a key needs some.
const MAX_PREFIX: usize = 600;

/// Place of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreLocation {
    /// A folder of this machine.
    Folder(PathBuf),
    /// A part of a bucket.
    Bucket(Bucket),
}

/// A part of a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Kind of object store.
    pub cloud: CloudKind,
    /// Name of the bucket; Azure calls it a container.
    pub name: String,
    /// Prefix of all keys; empty, or without slashes at its ends.
    pub prefix: String,
}

/// Kind of object store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloudKind {
    /// S3, and servers like it.
    S3,
    /// Google Cloud Storage.
    Google,
    /// Azure Blob Storage.
    Azure,
}

impl CloudKind {
    /// Returns the scheme of locations.
    pub fn scheme(self) -> &'static str {
        match self {
            CloudKind::S3 => "s3",
            CloudKind::Google => "gs",
            CloudKind::Azure => "az",
        }
    }

    /// Returns the beginning of the names of its variables.
    pub fn family(self) -> &'static str {
        match self {
            CloudKind::S3 => "AWS",
            CloudKind::Google => "GOOGLE",
            CloudKind::Azure => "AZURE",
        }
    }

    /// Returns the variables that let in, for a message.
    pub fn credentials(self) -> &'static str {
        match self {
            CloudKind::S3 => "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            CloudKind::Google => "GOOGLE_APPLICATION_CREDENTIALS",
            CloudKind::Azure => "AZURE_STORAGE_ACCOUNT_KEY",
        }
    }
}

impl StoreLocation {
    /// Parses the name of a store.
    ///
    /// # Errors
    /// The name has an unknown scheme, or no bucket.
    pub fn parse(path: &Path) -> Result<StoreLocation> {
        let Some(text) = path.to_str() else { return Ok(StoreLocation::Folder(path.into())) };
        if text.is_empty() {
            return Err(Error::usage("a store has an empty name; give a folder or s3://BUCKET/PREFIX"));
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            return Ok(StoreLocation::Folder(path.into()));
        };
        match scheme {
            "file" => {
                let folder = Url::parse(text).ok().and_then(|url| url.to_file_path().ok());
                folder.map(StoreLocation::Folder).ok_or_else(|| {
                    Error::usage(format!("`{text}` is not file:// and an absolute path of this machine"))
                })
            }
            "s3" => parse_bucket(CloudKind::S3, text, rest),
            "gs" => parse_bucket(CloudKind::Google, text, rest),
            "az" => parse_bucket(CloudKind::Azure, text, rest),
            other => Err(Error::usage(format!(
                "`{text}`: stores of the kind {other}:// are not known; give a folder, file://, s3://BUCKET/PREFIX, gs:// or az://"
            ))),
        }
    }
}

fn parse_bucket(cloud: CloudKind, text: &str, rest: &str) -> Result<StoreLocation> {
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let prefix = prefix.trim_matches('/');
    let signs: &[u8] = if cloud == CloudKind::Google { b"-._" } else { b"-." };
    let is_bucket = (3..=63).contains(&bucket.len())
        && bucket.bytes().all(|b| b.is_ascii_alphanumeric() || signs.contains(&b))
        && bucket.starts_with(|c: char| c.is_ascii_alphanumeric())
        && bucket.ends_with(|c: char| c.is_ascii_alphanumeric());
    let is_part = |part: &str| {
        !matches!(part, "" | "." | "..")
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-=+".contains(&b))
    };
    let is_prefix = prefix.is_empty() || prefix.split('/').all(is_part);
    if is_bucket && is_prefix && prefix.len() <= MAX_PREFIX {
        return Ok(StoreLocation::Bucket(Bucket { cloud, name: bucket.into(), prefix: prefix.into() }));
    }
    let what =
        "with a bucket of 3 to 63 letters, digits, `-` and `.`, and a prefix of letters, digits and `._-/=+`";
    Err(Error::usage(format!("`{text}` is not {}://BUCKET/PREFIX, {what}", cloud.scheme())))
}

impl fmt::Display for StoreLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreLocation::Folder(folder) => write!(f, "{}", folder.display()),
            StoreLocation::Bucket(bucket) => bucket.fmt(f),
        }
    }
}

impl fmt::Display for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.cloud.scheme(), self.name)?;
        if self.prefix.is_empty() { Ok(()) } else { write!(f, "/{}", self.prefix) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_and_buckets_are_told_apart() {
        let parse = |text: &str| StoreLocation::parse(Path::new(text));
        let bucket = |cloud, name: &str, prefix: &str| {
            StoreLocation::Bucket(Bucket { cloud, name: name.into(), prefix: prefix.into() })
        };
        assert_eq!(parse("s3://models").unwrap(), bucket(CloudKind::S3, "models", ""));
        assert_eq!(parse("s3://models/a/b/").unwrap(), bucket(CloudKind::S3, "models", "a/b"));
        assert_eq!(parse("gs://my_models/a").unwrap(), bucket(CloudKind::Google, "my_models", "a"));
        assert_eq!(parse("az://models/a").unwrap(), bucket(CloudKind::Azure, "models", "a"));
        assert_eq!(parse("az://models").unwrap().to_string(), "az://models");
        assert_eq!(parse("s3://models/a/b").unwrap().to_string(), "s3://models/a/b");
        assert_eq!(parse("some/folder").unwrap(), StoreLocation::Folder("some/folder".into()));
        #[cfg(unix)]
        assert_eq!(parse("file:///a%20b/c").unwrap(), StoreLocation::Folder("/a b/c".into()));
        for wrong in [
            "",
            "s3://",
            "s3://ab",
            "s3:///x",
            "s3://b_c/x",
            "s3://models/../x",
            "s3://models/a//b",
            "s3://models/a b",
            "s3://models/a?b",
            "s3://.models",
            "az://b_c/x",
            "http://x/y",
            "file://host/x",
            "file://x",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        let said = parse("ftp://models/x").unwrap_err().to_string();
        assert!(said.contains("ftp://") && said.contains("s3://BUCKET/PREFIX"), "{said}");
    }
}
