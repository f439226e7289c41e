//! Names of checkpoints on the hub.

use crate::safe_name::{MAX_PART, is_safe_name};
use crate::{Error, Result};
use std::fmt;
use std::path::Path;

/// Prefix of a checkpoint's name on the hub.
const PREFIX: &str = "hf:";
/// Revision where the name has none.
const DEFAULT_REVISION: &str = "main";

/// A checkpoint's name `hf:OWNER/NAME[/FILE.gguf][@REV]`, parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubSpec {
    /// User or organization that owns the repository.
    pub owner: String,
    /// Name of the repository.
    pub name: String,
    /// File that is wanted, for repositories with several models.
    pub file: Option<String>,
    /// Branch, tag or commit.
    pub revision: String,
}

impl HubSpec {
    /// Parses a name that begins with `hf:`, or with `hf://` as other tools write it; `None` for other names.
    ///
    /// # Errors
    /// The name begins with `hf:` but does not have the form.
    pub fn parse(path: &Path) -> Option<Result<HubSpec>> {
        let text = path.to_str()?;
        let rest = text.strip_prefix(PREFIX)?;
        let parsed = parse_rest(rest.strip_prefix("//").unwrap_or(rest));
        Some(parsed.ok_or_else(|| {
            Error::usage(format!(
                "`{text}` is not {PREFIX}OWNER/NAME[@REV], nor {PREFIX}OWNER/NAME/FILE.gguf[@REV]"
            ))
        }))
    }

    /// Returns the same checkpoint at another revision.
    #[must_use]
    pub fn at(&self, revision: &str) -> HubSpec {
        HubSpec { revision: revision.into(), ..self.clone() }
    }
}

impl fmt::Display for HubSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}/{}", self.owner, self.name)?;
        if let Some(file) = &self.file {
            write!(f, "/{file}")?;
        }
        write!(f, "@{}", self.revision)
    }
}

fn parse_rest(rest: &str) -> Option<HubSpec> {
    let (path, revision) = match rest.split_once('@') {
        Some((path, revision)) => (path, revision),
        None => (rest, DEFAULT_REVISION),
    };
    let mut parts = path.splitn(3, '/');
    let (owner, name, file) = (parts.next()?, parts.next()?, parts.next());
    let is_name = |part: &str| is_safe_name(part) && part.len() <= MAX_PART && !part.contains('/');
    let is_file = |file: &str| is_safe_name(file) && file.to_ascii_lowercase().ends_with(".gguf");
    let fits = is_name(owner) && is_name(name) && file.is_none_or(is_file) && is_safe_name(revision);
    fits.then(|| HubSpec {
        owner: owner.into(),
        name: name.into(),
        file: file.map(str::to_string),
        revision: revision.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        let parse = |text: &str| HubSpec::parse(Path::new(text));
        let spec = parse("hf:Zyphra/ZAYA1-8B").unwrap().unwrap();
        assert_eq!(
            (spec.owner.as_str(), spec.name.as_str(), spec.revision.as_str()),
            ("Zyphra", "ZAYA1-8B", "main")
        );
        assert_eq!(spec.to_string(), "hf:Zyphra/ZAYA1-8B@main");
        assert_eq!(parse("hf://Zyphra/ZAYA1-8B@main").unwrap().unwrap(), spec);
        let spec = parse("hf:a/b/sub/x-Q4_0.gguf@refs/pr/1").unwrap().unwrap();
        assert_eq!((spec.file.as_deref(), spec.revision.as_str()), (Some("sub/x-Q4_0.gguf"), "refs/pr/1"));
        assert!(parse("models/x").is_none() && parse("synthetic:x").is_none());
        for wrong in [
            "hf:",
            "hf:a",
            "hf:a/",
            "hf:/b",
            "hf:a/b@",
            "hf:a/b/c",
            "hf:../b",
            "hf:a/..",
            "hf:a/b@../x",
            "hf:a/b@-x",
            "hf:a/b\u{1b}",
            "hf:a b/\\c",
            "hf:.a/b",
            "hf:a/b/../x.gguf",
            "hf:a//b",
            "hf://a",
            "hf:///a/b",
            "hf:a/b@x//y",
        ] {
            assert!(parse(wrong).unwrap().is_err(), "{wrong}");
        }
    }
}
