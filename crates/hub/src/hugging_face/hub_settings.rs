//! Settings of the hub from the environment, by the names that Hugging Face's libraries use.

use crate::http_client::Token;
use crate::{Error, Result};
use std::path::{Path, PathBuf};
use url::Url;

/// Address of the Hugging Face hub.
const ENDPOINT: &str = "https://huggingface.co";
/// Most bytes of a file that holds a token.
const MAX_TOKEN_FILE: u64 = 4096;

/// Addresses, folders and token of the hub.
#[derive(Clone, Debug)]
pub struct HubSettings {
    /// Address of the server (`HF_ENDPOINT`).
    pub endpoint: Url,
    /// Folder of the cache (`HF_HUB_CACHE`, or `hub` in `HF_HOME`).
    pub cache: PathBuf,
    /// Token of requests (`HF_TOKEN`, or the file that `huggingface-cli login` writes).
    pub(crate) token: Option<Token>,
    /// True if the hub must not be asked (`HF_HUB_OFFLINE`).
    pub offline: bool,
    /// File of certificates to trust (`SSL_CERT_FILE`).
    pub certificates: Option<PathBuf>,
}

impl HubSettings {
    /// Reads the settings from this process's environment.
    ///
    /// # Errors
    /// A variable has an invalid value.
    pub fn from_environment() -> Result<HubSettings> {
        HubSettings::from_variables(|name| std::env::var(name).ok())
    }

    /// Reads the settings by a function that returns the value of a variable.
    ///
    /// # Errors
    /// A variable has an invalid value.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<HubSettings> {
        let set = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let is_on = |name: &str| {
            set(name).is_some_and(|v| matches!(v.to_ascii_lowercase().as_str(), "1" | "on" | "yes" | "true"))
        };
        let text = set("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        let endpoint = Url::parse(text.trim_end_matches('/')).ok();
        let endpoint = endpoint.filter(|u| matches!(u.scheme(), "http" | "https") && u.host().is_some());
        let endpoint = endpoint
            .ok_or_else(|| Error::usage(format!("HF_ENDPOINT={text} is not the address of a server")))?;
        let home = set("HF_HOME").map(PathBuf::from).or_else(|| {
            let caches = set("XDG_CACHE_HOME").map(PathBuf::from);
            let user =
                || set("HOME").or_else(|| set("USERPROFILE")).map(|home| Path::new(&home).join(".cache"));
            Some(caches.or_else(user)?.join("huggingface"))
        });
        let named = set("HF_HUB_CACHE").or_else(|| set("HUGGINGFACE_HUB_CACHE")).map(PathBuf::from);
        let cache = named
            .or_else(|| Some(home.as_ref()?.join("hub")))
            .ok_or_else(|| Error::usage("there is no folder for the cache of checkpoints: set HF_HOME"))?;
        let file = set("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| Some(home?.join("token")));
        let from_file = || {
            Some((anemoe_io::read_text(file.as_deref()?, MAX_TOKEN_FILE).ok()?, file?.display().to_string()))
        };
        let from_variable = |name: &str| Some((set(name)?, name.to_string()));
        let given = from_variable("HF_TOKEN").or_else(|| from_variable("HUGGING_FACE_HUB_TOKEN"));
        let given = given.or_else(|| if is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN") { None } else { from_file() });
        let given = given.filter(|(text, _)| !text.trim().is_empty());
        let token = given.map(|(text, place)| {
            // Without a token, the hub would answer that the checkpoint does not exist.
            let unfit = || {
                Error::usage(format!(
                    "{place} holds no token: only letters, digits and signs fit in one, on one line"
                ))
            };
            Token::new(&text).ok_or_else(unfit)
        });
        let token = token.transpose()?;
        Ok(HubSettings {
            endpoint,
            cache,
            token,
            offline: is_on("HF_HUB_OFFLINE"),
            certificates: set("SSL_CERT_FILE").map(PathBuf::from),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> Result<HubSettings> {
        let pairs: Vec<(String, String)> =
            pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        HubSettings::from_variables(|name| pairs.iter().find(|(k, _)| k == name).map(|(_, v)| v.clone()))
    }

    #[test]
    fn places_follow_the_variables() {
        let cache = |pairs: &[(&str, &str)]| settings(pairs).unwrap().cache;
        assert_eq!(cache(&[("HOME", "/u")]), Path::new("/u/.cache/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/u"), ("XDG_CACHE_HOME", "/x")]), Path::new("/x/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/u"), ("HF_HOME", "/h")]), Path::new("/h/hub"));
        assert_eq!(cache(&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "/c")]), Path::new("/c"));
        assert!(settings(&[]).is_err());
        let found = settings(&[("HOME", "/u"), ("HF_ENDPOINT", "http://mirror:8000/")]).unwrap();
        assert_eq!((found.endpoint.as_str(), found.offline), ("http://mirror:8000/", false));
        assert!(settings(&[("HOME", "/u"), ("HF_HUB_OFFLINE", "1")]).unwrap().offline);
        for wrong in ["mirror", "ftp://x", "file:///x"] {
            assert!(settings(&[("HOME", "/u"), ("HF_ENDPOINT", wrong)]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn tokens_come_from_a_variable_or_a_file() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("token"), "hf_file\n").unwrap();
        let home = dir.path().to_str().unwrap();
        assert!(settings(&[("HF_HOME", home)]).unwrap().token.is_some());
        assert!(
            settings(&[("HF_HOME", home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]).unwrap().token.is_none()
        );
        assert!(settings(&[("HF_HOME", "/none"), ("HF_TOKEN", "hf_x")]).unwrap().token.is_some());
        assert!(settings(&[("HF_HOME", "/none")]).unwrap().token.is_none());
        for wrong in ["hf_a\nhf_b", "hf a", "hf_\u{fc}"] {
            let said = settings(&[("HF_HOME", "/none"), ("HF_TOKEN", wrong)]).unwrap_err().to_string();
            assert!(said.starts_with("HF_TOKEN holds no token"), "{said}");
        }
        std::fs::write(dir.path().join("token"), "hf a\n").unwrap();
        let said = settings(&[("HF_HOME", home)]).unwrap_err().to_string();
        assert!(said.contains("token holds no token"), "{said}");
    }
}
