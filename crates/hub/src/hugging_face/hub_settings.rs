//! Settings of the hub from the environment, by the names that Hugging Face's libraries use.

use crate::http_client::Token;
use crate::variables::Variables;
use crate::{Error, Result};
use std::ffi::OsString;
use std::path::PathBuf;
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
        HubSettings::from_variables(|name| std::env::var_os(name))
    }

    /// Reads the settings by a function that returns the value of a variable.
    ///
    /// # Errors
    /// A variable has an invalid value.
    pub fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Result<HubSettings> {
        let set = Variables(variable);
        let is_on = |name: &str| -> Result<bool> {
            let value = set.text(name)?.map(|v| v.to_ascii_lowercase());
            Ok(matches!(value.as_deref(), Some("1" | "on" | "yes" | "true")))
        };
        let text = set.text("HF_ENDPOINT")?.unwrap_or_else(|| ENDPOINT.into());
        let endpoint = Url::parse(text.trim_end_matches('/')).ok();
        let endpoint = endpoint.filter(|u| matches!(u.scheme(), "http" | "https") && u.host().is_some());
        let endpoint = endpoint
            .ok_or_else(|| Error::usage(format!("HF_ENDPOINT={text} is not the address of a server")))?;
        let caches = set.path("XDG_CACHE_HOME")?.or_else(|| Some(set.home()?.join(".cache")));
        let home = set.path("HF_HOME")?.or_else(|| Some(caches?.join("huggingface")));
        let named = match set.path("HF_HUB_CACHE")? {
            None => set.path("HUGGINGFACE_HUB_CACHE")?,
            named => named,
        };
        let cache = named
            .or_else(|| Some(home.as_ref()?.join("hub")))
            .ok_or_else(|| Error::usage("there is no folder for the cache of checkpoints: set HF_HOME"))?;
        let file = set.path("HF_TOKEN_PATH")?.or_else(|| Some(home?.join("token")));
        let from_file = || {
            Some((anemoe_io::read_text(file.as_deref()?, MAX_TOKEN_FILE).ok()?, file?.display().to_string()))
        };
        let mut given = None;
        for name in ["HUGGING_FACE_HUB_TOKEN", "HF_TOKEN"] {
            given = set.text(name)?.map(|text| (text, name.to_string())).or(given);
        }
        if given.is_none() && !is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN")? {
            given = from_file().filter(|(text, _)| !text.trim().is_empty());
        }
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
            offline: is_on("HF_HUB_OFFLINE")? || is_on("TRANSFORMERS_OFFLINE")?,
            certificates: set.path("SSL_CERT_FILE")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn settings(pairs: &[(&str, &str)]) -> Result<HubSettings> {
        HubSettings::from_variables(|name| pairs.iter().find(|(k, _)| *k == name).map(|(_, v)| v.into()))
    }

    #[test]
    fn places_follow_the_variables() {
        let cache = |pairs: &[(&str, &str)]| settings(pairs).unwrap().cache;
        assert_eq!(cache(&[("HOME", "/u")]), Path::new("/u/.cache/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/u"), ("XDG_CACHE_HOME", "/x")]), Path::new("/x/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/u"), ("HF_HOME", "/h")]), Path::new("/h/hub"));
        assert_eq!(cache(&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "/c")]), Path::new("/c"));
        // As the libraries of Hugging Face read them, and as files of variables hold them.
        let user = [("HOME", "/u"), ("D", "d")];
        for (name, value, found) in [
            ("HF_HOME", "~/x", "/u/x/hub"),
            ("HF_HOME", "~", "/u/hub"),
            ("HF_HOME", " '~/x'\n", "/u/x/hub"),
            ("HF_HOME", "\"/a b\"", "/a b/hub"),
            ("HF_HOME", "", "/u/.cache/huggingface/hub"),
            ("HF_HOME", "$HOME/x", "/u/x/hub"),
            ("HF_HOME", "/h/${D}e/$D/$no/$", "/h/de/d/$no/$/hub"),
            ("HF_HUB_CACHE", "~/x", "/u/x"),
            ("HUGGINGFACE_HUB_CACHE", "~/x", "/u/x"),
            ("XDG_CACHE_HOME", "~/x", "/u/x/huggingface/hub"),
            #[cfg(target_os = "linux")]
            ("HF_HOME", "~root/x", "/root/x/hub"),
            ("HF_HOME", "/x/~", "/x/~/hub"),
        ] {
            assert_eq!(cache(&[user[0], user[1], (name, value)]), Path::new(found), "{name}={value}");
        }
        let said = settings(&[("HF_HOME", "~nobody-here/x")]).unwrap_err().to_string();
        assert!(said.contains("`~nobody-here` is not known"), "{said}");
        assert!(settings(&[]).is_err());
        let found = settings(&[("HOME", "/u"), ("HF_ENDPOINT", "http://mirror:8000/")]).unwrap();
        assert_eq!((found.endpoint.as_str(), found.offline), ("http://mirror:8000/", false));
        for (value, offline) in [("1", true), ("ON", true), (" true\n", true), ("'yes'", true), ("0", false)]
        {
            let found = settings(&[("HOME", "/u"), ("HF_HUB_OFFLINE", value)]).unwrap().offline;
            assert_eq!(found, offline, "{value}");
        }
        let slashes = settings(&[("HOME", "/u"), ("HF_ENDPOINT", "\"https://mirror/hub//\" ")]).unwrap();
        assert_eq!(slashes.endpoint.as_str(), "https://mirror/hub");
        for wrong in ["mirror", "ftp://x", "file:///x"] {
            assert!(settings(&[("HOME", "/u"), ("HF_ENDPOINT", wrong)]).is_err(), "{wrong}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn folders_need_not_be_text() {
        use std::os::unix::ffi::OsStringExt;
        let value = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
        let home = |name: &str| (name == "HOME").then(|| value(b"/h\xff"));
        let cache = HubSettings::from_variables(home).unwrap().cache;
        assert_eq!(cache.into_os_string(), value(b"/h\xff/.cache/huggingface/hub"));
        let token = |name: &str| if name == "HF_TOKEN" { Some(value(b"hf_\xff")) } else { home(name) };
        let said = HubSettings::from_variables(token).unwrap_err().to_string();
        assert!(said.contains("HF_TOKEN is not UTF-8"), "{said}");
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
        for padded in ["hf_x\n", " hf_x\r\n", "\"hf_x\""] {
            assert!(settings(&[("HF_HOME", "/none"), ("HF_TOKEN", padded)]).unwrap().token.is_some());
        }
        for text in ["\u{feff}hf_file\r\n", "\n", ""] {
            std::fs::write(dir.path().join("t"), text).unwrap();
            let path = dir.path().join("t");
            let found = settings(&[("HF_HOME", "/none"), ("HF_TOKEN_PATH", path.to_str().unwrap())]);
            assert_eq!(found.unwrap().token.is_some(), text.contains("hf"), "{text:?}");
        }
        for wrong in ["hf_a\nhf_b", "hf a", "hf_\u{fc}"] {
            let said = settings(&[("HF_HOME", "/none"), ("HF_TOKEN", wrong)]).unwrap_err().to_string();
            assert!(said.starts_with("HF_TOKEN holds no token"), "{said}");
        }
        std::fs::write(dir.path().join("token"), "hf a\n").unwrap();
        let said = settings(&[("HF_HOME", home)]).unwrap_err().to_string();
        assert!(said.contains("token holds no token"), "{said}");
    }
}
