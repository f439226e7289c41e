//! The stage `soak`: soaks the whole bundle, and names the shards at fault where that does not end well.

use crate::child::{Ended, Work, Worker, from_value, to_value};
use crate::listener::Listener;
use crate::soak::{SoakFigures, SoakLength};
use anemoe_bundle::Chain;
use anemoe_coreml::causes::End;
use anemoe_io::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

/// Most shards at fault that are named.
const MOST_CULPRITS: usize = 8;
/// Passes for which single shards are soaked beyond the pass at which the whole bundle failed.
const BEHIND: u64 = 100;

/// Document of the stage.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SoakDocument {
    length: SoakLength,
    /// Seconds without a pass after which a soak is a hang.
    seconds_without_a_pass: u64,
    passes_done: u64,
    /// Figures; none if the soak of the whole bundle did not end.
    figures: Option<SoakFigures>,
    /// Ends of single shards on the device; empty unless the soak of the whole bundle failed.
    pub shards: Vec<ShardEnd>,
}

/// End of a shard's soak.
#[derive(Debug, Serialize, Deserialize)]
pub struct ShardEnd {
    /// Name of the shard.
    pub shard: String,
    /// End and reason.
    #[serde(flatten)]
    pub ended: Ended,
}

/// Soaks a bundle. `limit` is the longest time without a pass: a missing pass is a hang, and many passes are none.
pub fn soak_stage(
    bundle: &Path,
    length: SoakLength,
    limit: Duration,
    listener: &dyn Listener,
) -> Result<Ended> {
    let soak = |only: &[String], length: SoakLength| -> Result<(Ended, Option<SoakFigures>, u64)> {
        let mut worker = Worker::start(&Work::Soak { bundle: bundle.into(), only: only.to_vec(), length })?;
        let ended = worker.wait(limit)?;
        if ended.end != End::Done {
            return Ok((ended, None, worker.progress));
        }
        let figures: SoakFigures = from_value(ended.document)?;
        let judged = Ended::with_faults(figures.faults.join("; "), Value::Null);
        Ok((judged, Some(figures), worker.progress))
    };
    let (ended, figures, said) = soak(&[], length)?;
    let reached = figures.as_ref().map_or(said, |f| f.first_wrong.unwrap_or(f.passes));
    let reason =
        if figures.is_some() { ended.reason } else { format!("behind {said} passes: {}", ended.reason) };
    let mut shards = Vec::new();
    if ended.end != End::Done {
        let chain = Chain::read(bundle)?;
        let short = SoakLength { passes: length.passes.min(reached + BEHIND), seconds: 0.0 };
        let all: Vec<String> = chain.shards.iter().map(|s| s.name.clone()).collect();
        let n = all.len();
        shards = find_culprits(all, &|group: &[String]| {
            listener.message(&format!("soak: {} of {n} shards on the device", group.len()));
            Ok(soak(group, short)?.0)
        })?;
    }
    let document = SoakDocument {
        length,
        seconds_without_a_pass: limit.as_secs(),
        passes_done: reached.max(said),
        figures,
        shards,
    };
    Ok(Ended { end: ended.end, reason, document: to_value(&document)? })
}

/// Finds the shards that fail, by halving groups down to single shards; all other shards end well together. Shards beyond
/// the first [`MOST_CULPRITS`], and groups whose halves end well, are not in the result.
fn find_culprits(mut all: Vec<String>, run: &dyn Fn(&[String]) -> Result<Ended>) -> Result<Vec<ShardEnd>> {
    let mut found = Vec::new();
    for _ in 0..MOST_CULPRITS {
        let mut group = all.clone();
        while group.len() > 1 {
            let other = group.split_off(group.len() / 2);
            if run(&group)?.end == End::Done {
                group = other;
            }
        }
        let [culprit] = group.as_slice() else { break };
        let ended = run(std::slice::from_ref(culprit))?;
        if ended.end == End::Done {
            break;
        }
        found.push(ShardEnd { shard: culprit.clone(), ended });
        all.retain(|shard| shard != culprit);
        if all.is_empty() || run(&all)?.end == End::Done {
            let done = |shard| ShardEnd { shard, ended: Ended::new(End::Done, "") };
            found.extend(all.into_iter().map(done));
            break;
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn culprits_are_found_by_halving() {
        let all: Vec<String> = (0..100).map(|i| i.to_string()).collect();
        let runs = std::cell::Cell::new(0);
        let ended = |bad| Ended::new(if bad { End::Crashed } else { End::Done }, "");
        let run = |group: &[String]| {
            runs.set(runs.get() + 1);
            Ok(ended(group.iter().any(|s| s == "17" || s == "64")))
        };
        let found = find_culprits(all.clone(), &run).unwrap();
        let bad: Vec<&str> =
            found.iter().filter(|s| s.ended.end == End::Crashed).map(|s| s.shard.as_str()).collect();
        assert_eq!((bad, found.len()), (vec!["17", "64"], 100));
        assert!(runs.get() < 25, "{}", runs.get());
        // A shard that fails only beside another shard cannot be named.
        let both = |group: &[String]| Ok(ended(["17", "64"].iter().all(|s| group.iter().any(|g| g == s))));
        assert!(find_culprits(all, &both).unwrap().is_empty());
    }
}
