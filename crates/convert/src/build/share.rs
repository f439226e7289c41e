//! Shares of a build by several processes, as `--shard` names them.

use super::record::BuildPart;
use crate::{Error, Result};

/// The share of one process: `I/N`, or `N` with the index of an array job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    index: Option<usize>,
    of: usize,
}

/// Most parts of a build: more than any model has shards.
const MAX_PARTS: usize = 100_000;

/// Environment variables with the index of an array job: of Slurm, of Kubernetes and of AWS Batch.
const ARRAY_INDICES: [&str; 3] = ["SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX", "AWS_BATCH_JOB_ARRAY_INDEX"];

impl Share {
    /// Parses `I/N`, or `N` alone.
    ///
    /// # Errors
    /// The text has another form; the error says which are expected.
    pub fn parse(text: &str) -> std::result::Result<Share, String> {
        let wrong =
            || format!("`{text}` is neither I/N nor N, with N from 1 to {MAX_PARTS} and I from 0 to N");
        let (index, of) = match text.split_once('/') {
            Some((index, of)) => (Some(index.parse().map_err(|_| wrong())?), of),
            None => (None, text),
        };
        let of = of.parse().ok().filter(|n| (1..=MAX_PARTS).contains(n)).ok_or_else(wrong)?;
        if index.is_some_and(|i: usize| i > of) {
            return Err(wrong());
        }
        Ok(Share { index, of })
    }

    /// Returns the part; `variable` reads the environment where no index is given.
    ///
    /// # Errors
    /// No index is given, and no variable of an array job has one.
    pub fn part(self, variable: impl Fn(&str) -> Option<String>) -> Result<BuildPart> {
        let index = match self.index {
            Some(index) => index,
            None => {
                let set = |name: &&'static str| Some((*name, variable(name).filter(|v| !v.is_empty())?));
                let found = ARRAY_INDICES.iter().find_map(set);
                let (name, value) = found.ok_or_else(|| {
                    let names = ARRAY_INDICES.join(", ");
                    Error::usage(format!(
                        "--shard {}: no index is given, and none of {names} is set",
                        self.of
                    ))
                })?;
                let index: usize = value
                    .parse()
                    .map_err(|_| Error::usage(format!("{name} is `{value}`, expected a number")))?;
                if index > self.of {
                    let of = self.of;
                    let what = format!("{name} is {index}, and --shard says that there are {of} parts");
                    return Err(Error::usage(what));
                }
                index
            }
        };
        Ok(BuildPart { index: index % self.of, of: self.of })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_count_from_zero_or_from_one() {
        let none = |_: &str| None;
        let part = |text: &str| Share::parse(text).unwrap().part(none).unwrap();
        assert_eq!(part("0/3"), BuildPart { index: 0, of: 3 });
        assert_eq!(part("2/3"), BuildPart { index: 2, of: 3 });
        assert_eq!(part("3/3"), BuildPart { index: 0, of: 3 });
        for wrong in ["4/3", "0/0", "0", "-1/3", "1/", "/3", "a/b", "1/2/3", "", "0/100001"] {
            assert!(Share::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn schedulers_tell_the_index() {
        for name in ARRAY_INDICES {
            let set = |wanted: &str| (wanted == name).then(|| "5".to_string());
            assert_eq!(Share::parse("8").unwrap().part(set).unwrap(), BuildPart { index: 5, of: 8 });
            assert!(Share::parse("4").unwrap().part(set).unwrap_err().to_string().contains(name));
        }
        assert!(
            Share::parse("4")
                .unwrap()
                .part(|_| None)
                .unwrap_err()
                .to_string()
                .contains("SLURM_ARRAY_TASK_ID")
        );
        assert!(Share::parse("4").unwrap().part(|_| Some("x".into())).is_err());
    }
}
