//! Values of environment variables, as people write them.

use crate::{Error, Result};
use std::ffi::OsString;
use std::path::PathBuf;

/// File of the system with the homes of its users.
const USERS: &str = "/etc/passwd";
/// Most bytes of that file.
const MAX_USERS: u64 = 4 << 20;

/// Environment variables, by a function that returns the value of one.
pub struct Variables<F>(pub F);

impl<F: Fn(&str) -> Option<OsString>> Variables<F> {
    /// Returns a value without blanks and quotes around it, which files of variables leave there; `None` where it is
    /// not set or empty.
    fn value(&self, name: &str) -> Option<OsString> {
        let value = (self.0)(name)?;
        let Some(text) = value.to_str() else { return Some(value) };
        let text = text.trim();
        let quoted = |mark: char| text.strip_prefix(mark)?.strip_suffix(mark).map(str::trim);
        let text = quoted('"').or_else(|| quoted('\'')).unwrap_or(text);
        (!text.is_empty()).then(|| text.into())
    }

    /// Returns a text.
    ///
    /// # Errors
    /// The value is not UTF-8.
    pub fn text(&self, name: &str) -> Result<Option<String>> {
        let unfit = |_| Error::usage(format!("{name} is not UTF-8 text"));
        self.value(name).map(|value| value.into_string().map_err(unfit)).transpose()
    }

    /// Returns true or false.
    ///
    /// # Errors
    /// The value is neither.
    pub fn switch(&self, name: &str) -> Result<Option<bool>> {
        match self.text(name)?.map(|text| text.to_ascii_lowercase()).as_deref() {
            None => Ok(None),
            Some("1" | "on" | "yes" | "true") => Ok(Some(true)),
            Some("0" | "off" | "no" | "false") => Ok(Some(false)),
            Some(other) => Err(Error::usage(format!("{name}={other} is neither true nor false"))),
        }
    }

    /// Returns a path. As in the libraries of Hugging Face, `~`, `~USER`, `$NAME` and `${NAME}` stand for homes and
    /// other variables.
    ///
    /// # Errors
    /// There is no such home.
    pub fn path(&self, name: &str) -> Result<Option<PathBuf>> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let Some(text) = value.to_str() else { return Ok(Some(value.into())) };
        let Some(below) = text.strip_prefix('~') else { return Ok(Some(self.expanded(text).into())) };
        let (user, rest) = below.split_once('/').unwrap_or((below, ""));
        let home = if user.is_empty() { self.home() } else { home_of(user) };
        let home = home.ok_or_else(|| {
            Error::usage(format!("{name}={text}: the folder `~{user}` is not known; give the whole path"))
        })?;
        Ok(Some(home.join(self.expanded(rest))))
    }

    /// Returns the user's home.
    pub fn home(&self) -> Option<PathBuf> {
        self.value("HOME").or_else(|| self.value("USERPROFILE")).map(PathBuf::from)
    }

    /// Replaces the names of variables by their values. Unknown names stay.
    fn expanded(&self, text: &str) -> OsString {
        let (mut all, mut rest) = (OsString::new(), text);
        while let Some((before, behind)) = rest.split_once('$') {
            all.push(before);
            let braced = behind.strip_prefix('{').and_then(|b| b.split_once('}'));
            let end = behind.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(behind.len());
            let (name, next) = braced.unwrap_or(behind.split_at(end));
            match self.value(name).filter(|_| !name.is_empty()) {
                Some(value) => all.push(value),
                None => all.push(&rest[before.len()..rest.len() - next.len()]),
            }
            rest = next;
        }
        all.push(rest);
        all
    }
}

/// Returns the home of another user.
fn home_of(user: &str) -> Option<PathBuf> {
    let users = anemoe_io::read_text(USERS.as_ref(), MAX_USERS).ok()?;
    // NAME:PASSWORD:UID:GID:COMMENT:HOME:SHELL
    let line = users.lines().find(|line| line.split(':').next() == Some(user))?;
    line.split(':').nth(5).filter(|home| !home.is_empty()).map(PathBuf::from)
}
