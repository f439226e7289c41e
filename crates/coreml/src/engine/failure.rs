//! Errors and exceptions of Core ML, turned into errors of this crate.

use crate::Error;
use crate::causes::is_no_plan;
use objc2::exception;
use objc2::rc::Retained;
use objc2::runtime::AnyObject;
use objc2_foundation::{NSError, NSException};
use std::panic::AssertUnwindSafe;
use std::path::Path;

/// Reason why Core ML did not do what was asked.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An `NSError`.
    Reported { domain: String, code: isize, text: String },
    /// An Objective-C exception.
    Thrown { name: String, reason: String },
    /// The function is not loaded, or was unloaded.
    Absent,
    /// Shapes, types or numbers that do not fit, found by this crate.
    Misfit(String),
    /// An error that names its path already.
    Known(Error),
}

/// Most underlying errors whose texts are shown.
const MOST_BELOW: usize = 4;

impl Failure {
    /// Makes a failure of an `NSError` and its underlying errors, which carry messages of the Neural Engine's compiler
    /// and driver.
    pub fn reported(error: &NSError) -> Failure {
        let mut text = error.localizedDescription().to_string();
        let mut below = error.underlyingErrors().firstObject();
        for _ in 0..MOST_BELOW {
            let Some(e) = below else { break };
            let said = e.localizedDescription().to_string();
            if !text.contains(&said) {
                text += &format!("; {} {}: {said}", e.domain(), e.code());
            }
            below = e.underlyingErrors().firstObject();
        }
        Failure::Reported { domain: error.domain().to_string(), code: error.code(), text }
    }

    /// Turns the failure into an error that names the package and the function.
    pub fn at(self, package: &Path, function: &str) -> Error {
        let what = match self {
            Failure::Known(error) => return error,
            Failure::Absent => "it was unloaded while it was wanted; allow more --max-loaded".into(),
            Failure::Misfit(what) => what,
            Failure::Thrown { name, reason } => format!("exception {name}: {reason}"),
            Failure::Reported { domain, code, text } => {
                let hint = if code == -14 || is_no_plan(&text) { hint() } else { "" };
                format!("{domain} {code}: {text}{hint}")
            }
        };
        Error::unsupported(package, format!("by Core ML on this machine: function `{function}`: {what}"))
    }
}

/// Returns the likely causes of error -14 as the end of a message, the most frequent first.
fn hint() -> &'static str {
    "; likely causes: it was compiled for another version of the system (anemoe compile), a form that this Neural Engine does \
     not take, or too much loaded at once (--max-loaded)"
}

/// Runs `f`; an Objective-C exception becomes a failure.
pub(crate) fn caught<R>(f: impl FnOnce() -> Result<R, Failure>) -> Result<R, Failure> {
    match exception::catch(AssertUnwindSafe(f)) {
        Ok(result) => result,
        Err(Some(thrown)) => Err(describe(&thrown)),
        Err(None) => Err(Failure::Thrown { name: "nil".into(), reason: String::new() }),
    }
}

fn describe(thrown: &Retained<exception::Exception>) -> Failure {
    let thrown: &exception::Exception = thrown;
    let object: &AnyObject = thrown;
    match object.downcast_ref::<NSException>() {
        Some(e) => Failure::Thrown {
            name: e.name().to_string(),
            reason: e.reason().map(|r| r.to_string()).unwrap_or_default(),
        },
        None => Failure::Thrown { name: format!("{thrown:?}"), reason: String::new() },
    }
}
