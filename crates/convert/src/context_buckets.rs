//! Context buckets: contexts for which attention has functions of its own, which read the first slots of a cache alone.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Most buckets. Each is one more function for every token count, which a Mac compiles and loads.
const MAX_BUCKETS: usize = 4;
/// Slots of a cache come in multiples of this number.
const SLOT_STEP: usize = 32;

/// Contexts in positions, ascending and multiples of 32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ContextBuckets {
    /// Contexts in positions, then zeros.
    contexts: [u32; MAX_BUCKETS],
}

impl ContextBuckets {
    /// Makes buckets from contexts in positions, given in ascending order.
    ///
    /// # Errors
    /// There are more than 4 contexts, or a context is 0, no multiple of 32 or not above the context before it.
    pub fn new(contexts: &[usize]) -> std::result::Result<ContextBuckets, String> {
        if contexts.len() > MAX_BUCKETS {
            return Err(format!("{} contexts, expected {MAX_BUCKETS} at most", contexts.len()));
        }
        let mut buckets = ContextBuckets::default();
        let mut before = 0;
        for (to, &context) in buckets.contexts.iter_mut().zip(contexts) {
            if context == 0 {
                return Err("a context of 0 positions, expected 32 or more".into());
            }
            if !context.is_multiple_of(SLOT_STEP) {
                let near = context.checked_next_multiple_of(SLOT_STEP).unwrap_or(context);
                return Err(format!(
                    "{context} is not a multiple of {SLOT_STEP}, as slots of a cache are: give {near}"
                ));
            }
            if context <= before {
                return Err(format!("{context} behind {before}: contexts must be ascending"));
            }
            *to = u32::try_from(context).map_err(|_| format!("a context of {context} positions"))?;
            before = context;
        }
        Ok(buckets)
    }

    /// Returns the contexts in positions, ascending.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        self.contexts.into_iter().filter(|n| *n > 0).map(|n| n as usize)
    }

    /// Returns the contexts for which a cache of `slots` slots has functions of its own: those below `slots`.
    pub fn below(self, slots: usize) -> impl Iterator<Item = usize> {
        self.iter().filter(move |context| *context < slots)
    }

    /// Returns the bucket of a quarter of a context, rounded up to a multiple of 32; none where that is the whole
    /// context.
    pub fn quarter_of(context: usize) -> Option<ContextBuckets> {
        let quarter = (context / 4).max(1).checked_next_multiple_of(SLOT_STEP)?;
        if quarter >= context { None } else { ContextBuckets::new(&[quarter]).ok() }
    }

    /// Refuses buckets that are larger than the model's context.
    ///
    /// # Errors
    /// A bucket is larger; the error names the option and the bucket.
    pub fn check(self, context: usize) -> Result<()> {
        match self.iter().find(|bucket| *bucket > context.next_multiple_of(SLOT_STEP)) {
            Some(bucket) => Err(Error::usage(format!(
                "--context-buckets {bucket} is more than the {context} positions that the caches hold: give a larger \
                 --max-context, or leave it out"
            ))),
            None => Ok(()),
        }
    }
}

impl FromStr for ContextBuckets {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let number = |part: &str| {
            let part = part.trim();
            part.parse().map_err(|_| format!("`{part}` is not a number of positions"))
        };
        if text.trim().is_empty() {
            return Ok(ContextBuckets::default());
        }
        ContextBuckets::new(&text.split(',').map(number).collect::<std::result::Result<Vec<_>, String>>()?)
    }
}

impl fmt::Display for ContextBuckets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, context) in self.iter().enumerate() {
            write!(f, "{}{context}", if i > 0 { "," } else { "" })?;
        }
        Ok(())
    }
}

impl TryFrom<String> for ContextBuckets {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Self, String> {
        text.parse()
    }
}

impl From<ContextBuckets> for String {
    fn from(buckets: ContextBuckets) -> String {
        buckets.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_read_back_and_wrong_ones_are_named() {
        let buckets: ContextBuckets = "512, 2048".parse().unwrap();
        assert_eq!(buckets.to_string(), "512,2048");
        assert_eq!(buckets.iter().collect::<Vec<_>>(), [512, 2048]);
        assert_eq!(buckets.below(2048).collect::<Vec<_>>(), [512]);
        assert_eq!("".parse::<ContextBuckets>().unwrap(), ContextBuckets::default());
        for (text, says) in [
            ("0", "0 positions"),
            ("512,512", "ascending"),
            ("512,256", "ascending"),
            ("500", "give 512"),
            ("half", "`half` is not a number"),
            ("512,", "`` is not a number"),
            ("-32", "`-32` is not a number"),
            ("32,64,96,128,160", "4 at most"),
            ("18446744073709551615", "not a multiple of 32"),
            ("1099511627776", "a context of 1099511627776"),
        ] {
            let error = text.parse::<ContextBuckets>().unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn buckets_lie_inside_of_the_context() {
        let buckets: ContextBuckets = "64,128".parse().unwrap();
        assert!(buckets.check(128).is_ok() && buckets.check(100).is_ok());
        let error = buckets.check(96).unwrap_err().to_string();
        assert!(error.contains("--context-buckets 128") && error.contains("--max-context"), "{error}");
    }

    #[test]
    fn a_quarter_is_less_than_the_whole() {
        let quarter = |n| ContextBuckets::quarter_of(n).map(|b| b.to_string());
        assert_eq!(quarter(2048).as_deref(), Some("512"));
        assert_eq!(quarter(64).as_deref(), Some("32"));
        assert_eq!((quarter(32), quarter(1)), (None, None));
    }
}
