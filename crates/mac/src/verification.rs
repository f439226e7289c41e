//! Runs the stages of a verification, each in a process of its own. A later run goes on in the same work folder.

use crate::child::{CommandDone, Ended, Work, Worker, from_value, to_value};
use crate::energy::measure_energy;
use crate::json_file::{read_json, write_json};
use crate::mac_report::{ReportSystem, STAND_IN, chip_slug};
use crate::risky_steps::Listener;
use crate::soak::{SoakFigures, SoakLength};
use crate::stage_list::{BUNDLE, FORMS, MAX_REASON, MacStage, STAGES, StageRecord};
use anemoe_bundle::{CHAIN_FILE, Chain};
use anemoe_coreml::causes::End;
use anemoe_gates::cost::chips;
use anemoe_io::{Error, Result};
use anemoe_runtime::model::MOST_UNDONE;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time limit of stages that have limits of their own, or do nothing risky.
const LONG: Duration = Duration::from_secs(24 * 3600);
// Indices of the stages that choose forms, and make the bundle.
const TUNE: usize = 1;
const BUILD: usize = 2;
/// Makes a golden; the ids of its prompt are ones that every vocabulary has.
const MAKE_GOLDEN: &str = "golden {checkpoint} --prompt-ids 2,7,11,19,5,3,23,8 --decode 16 -o {golden}";
/// Golden that is made if the checkpoint has none.
const GOLDEN: &str = "golden.npz";
/// File with the settings that the folder's documents depend on.
const SETTINGS: &str = "settings.json";

/// Most shards at fault that are named.
const MOST_CULPRITS: usize = 8;
/// Passes for which single shards are soaked beyond the pass at which the whole bundle failed.
const BEHIND: u64 = 100;

/// Settings of a verification.
pub struct Verification {
    /// Folder of bundle, trials, and the record of each stage that was finished; an absolute path.
    pub work: PathBuf,
    /// Checkpoint.
    pub checkpoint: PathBuf,
    /// The machine, the compression, and the token counts of the functions.
    pub about: ReportSystem,
    /// Calls of each form in the stage `tune`.
    pub calls: u32,
    /// Length of the soak.
    pub soak: SoakLength,
    /// Seconds of which power is measured.
    pub energy_seconds: u64,
    /// Seconds that a step may take, or a soak without a pass.
    pub timeout: u64,
    /// Names of the stages to run; empty for all.
    pub stages: Vec<String>,
    /// True if stages run again that an earlier run has finished.
    pub again: bool,
}

impl Verification {
    /// Runs all stages, and returns their records; a record of an earlier run has the flag true.
    ///
    /// # Errors
    /// The work folder is another one's, or was begun with other settings; or this machine fails.
    pub fn run(&self, listener: &dyn Listener) -> Result<Vec<(StageRecord, bool)>> {
        self.open_folder()?;
        (0..STAGES.len()).map(|i| self.stage(i, listener)).collect()
    }

    /// Returns the path of a file of the work folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.work.join(name)
    }

    /// Opens or makes the work folder. With `again`, deletes the results of other settings.
    fn open_folder(&self) -> Result<()> {
        let not_ours = |what: &str| Err(Error::invalid(&self.work, format!("work folder: {what}")));
        let checkpoint = std::path::absolute(&self.checkpoint).unwrap_or_else(|_| self.checkpoint.clone());
        let mut settings = to_value(&self.about)?;
        settings["checkpoint"] = checkpoint.display().to_string().into();
        let file = self.file(SETTINGS);
        let is_empty = self.work.read_dir().map_or(true, |mut entries| entries.next().is_none());
        if !file.is_file() && !is_empty {
            return not_ours("a folder that verify-on-mac did not make; give another --work");
        }
        let known = if file.is_file() { read_json(&file).unwrap_or_default() } else { settings.clone() };
        let changed = settings.as_object().into_iter().flatten().find(|(key, value)| known[*key] != **value);
        if let Some((key, value)) = changed {
            if !self.again {
                let was = &known[key];
                return not_ours(&format!("{key} was {was} and is {value}; give --again or another --work"));
            }
            STAGES.iter().try_for_each(|stage| self.forget(stage))?;
        }
        let stages = self.file("stages");
        std::fs::create_dir_all(&stages).map_err(|e| Error::io(&stages, e))?;
        write_json(&file, &settings)
    }

    /// Reads the record of a stage; none if it is missing or damaged, or the stage was not finished.
    fn record(&self, stage: &MacStage) -> Option<StageRecord> {
        let record: StageRecord = read_json(&self.file(&stage.entry()))?;
        (record.stage == stage.name && record.ended.end != End::Skipped).then_some(record)
    }

    /// Removes the record of a stage and what the stage made.
    fn forget(&self, stage: &MacStage) -> Result<()> {
        let made = stage.makes().map(|name| self.file(name));
        for path in made.chain([self.file(&stage.entry())]).filter(|path| path.exists()) {
            let is_dir = path.is_dir();
            let removed = if is_dir { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            removed.map_err(|e| Error::io(&path, e))?;
        }
        Ok(())
    }

    /// Runs a stage, or returns the record of an earlier run.
    fn stage(&self, index: usize, listener: &dyn Listener) -> Result<(StageRecord, bool)> {
        let stage = &STAGES[index];
        let wanted = self.stages.is_empty() || self.stages.iter().any(|name| name == stage.name);
        if let Some(known) = self.record(stage).filter(|_| !wanted || !self.again) {
            return Ok((known, true));
        }
        if !wanted {
            let ended = Ended::new(End::Skipped, "not asked for (--stages)");
            return Ok((StageRecord { stage: stage.name.into(), seconds: 0.0, ended }, false));
        }
        listener.message(&format!("{}: begins", stage.name));
        let started = Instant::now();
        let found = self.work_of(index, listener)?;
        let record = StageRecord {
            stage: stage.name.into(),
            seconds: (started.elapsed().as_secs_f64() * 1e3).round() / 1e3,
            ended: Ended { reason: found.reason.chars().take(MAX_REASON).collect(), ..found },
        };
        let Ended { end, reason, .. } = &record.ended;
        if *end != End::Skipped {
            write_json(&self.file(&stage.entry()), &record)?;
        }
        let colon = if reason.is_empty() { "" } else { ": " };
        listener.message(&format!("{}: {}{colon}{reason}", stage.name, end.word()));
        Ok((record, false))
    }

    fn work_of(&self, index: usize, listener: &dyn Listener) -> Result<Ended> {
        let stage = &STAGES[index];
        if index > BUILD && !self.file(BUNDLE).join(CHAIN_FILE).is_file() {
            return Ok(Ended::new(End::Skipped, "there is no bundle, which the stage build makes"));
        }
        if self.record(stage).is_some() {
            // A stage with a record is repeated from the start; an unfinished tune or build goes on.
            self.forget(stage)?;
        }
        // The bundle depends on the forms, and every stage behind it on the bundle.
        if (TUNE..=BUILD).contains(&index) {
            STAGES[index + 1..].iter().try_for_each(|later| self.forget(later))?;
        }
        let limit = Duration::from_secs(self.timeout);
        match stage.name {
            "soak" => self.soak(limit, listener),
            "energy" => measure_energy(&self.file(BUNDLE), self.energy_seconds, limit),
            _ => {
                if stage.job.contains("{golden}") && !self.golden().is_file() {
                    let made = self.command(MAKE_GOLDEN, LONG)?;
                    if made.end != End::Done {
                        return Ok(Ended { reason: format!("golden: {}", made.reason), ..made });
                    }
                }
                let is_safe = index <= BUILD || stage.job.contains("{timeout}");
                self.command(stage.job, if is_safe { LONG } else { limit })
            }
        }
    }

    /// Soaks the bundle, and names the shards at fault where that does not end well. `limit` is the longest time without a
    /// pass: a missing pass is a hang, and many passes are none.
    fn soak(&self, limit: Duration, listener: &dyn Listener) -> Result<Ended> {
        let soak = |only: &[String], length: SoakLength| -> Result<(Ended, Option<SoakFigures>, u64)> {
            let mut worker =
                Worker::start(&Work::Soak { bundle: self.file(BUNDLE), only: only.to_vec(), length })?;
            let ended = worker.wait(limit)?;
            if ended.end != End::Done {
                return Ok((ended, None, worker.progress));
            }
            let figures: SoakFigures = from_value(ended.document)?;
            let judged = Ended::with_faults(figures.faults.join("; "), Value::Null);
            Ok((judged, Some(figures), worker.progress))
        };
        let (ended, figures, said) = soak(&[], self.soak)?;
        let reached = figures.as_ref().map_or(said, |f| f.first_wrong.unwrap_or(f.passes));
        let reason =
            if figures.is_some() { ended.reason } else { format!("behind {said} passes: {}", ended.reason) };
        let mut shards = Vec::new();
        if ended.end != End::Done {
            let chain = Chain::read(&self.file(BUNDLE))?;
            let short = SoakLength { passes: self.soak.passes.min(reached + BEHIND), seconds: 0.0 };
            let all: Vec<String> = chain.shards.iter().map(|s| s.name.clone()).collect();
            let n = all.len();
            shards = find_culprits(all, &|group: &[String]| {
                listener.message(&format!("soak: {} of {n} shards on the device", group.len()));
                Ok(soak(group, short)?.0)
            })?;
        }
        let document = SoakDocument {
            length: self.soak,
            seconds_without_a_pass: limit.as_secs(),
            passes_done: reached.max(said),
            figures,
            shards,
        };
        Ok(Ended { end: ended.end, reason, document: to_value(&document)? })
    }

    /// Runs a whole command in a child process.
    fn command(&self, line: &str, limit: Duration) -> Result<Ended> {
        let forms = if self.file(FORMS).is_file() { "--forms @forms.toml" } else { "" };
        let line = line.replace("{--forms}", forms);
        let words = line.split_whitespace().map(|word| self.expand(word));
        let mut words = words.collect::<Result<Vec<String>>>()?;
        let command = words.remove(0);
        let ended = Work::Command { command, arguments: words }.run(limit)?;
        if ended.end != End::Done {
            return Ok(ended);
        }
        let CommandDone { passed, document } = from_value(ended.document)?;
        let faults = if passed { String::new() } else { faults(&document) };
        Ok(Ended::with_faults(faults, document))
    }

    /// Replaces a word in braces, or the name of a file of the work folder, by what it stands for.
    fn expand(&self, word: &str) -> Result<String> {
        let path = |path: &Path| path.display().to_string();
        let counts = |range: RangeInclusive<usize>| {
            let own = self.about.tokens.iter().filter(|n| range.contains(n));
            let words: Vec<String> = own.map(usize::to_string).collect();
            if words.is_empty() { "0".to_string() } else { words.join(",") }
        };
        // Contexts fit the context of the bundle; passes verify drafts up to a length, prompts are longer.
        let room = || Ok::<usize, Error>(Chain::read(&self.file(BUNDLE))?.model.max_context);
        let quarter = |most: usize| room().map(|room| most.min(room / 4).max(1));
        let drafts = MOST_UNDONE + 1;
        Ok(match word {
            "{checkpoint}" => path(&self.checkpoint),
            "{golden}" => path(&self.golden()),
            "{quant}" => self.about.quant.clone(),
            "{tokens}" => counts(0..=usize::MAX),
            "{calls}" => self.calls.to_string(),
            "{timeout}" => self.timeout.to_string(),
            "{context}" => quarter(64)?.to_string(),
            "{decode}" => quarter(32)?.to_string(),
            "{verified}" => counts(2..=room()?.saturating_sub(quarter(64)?).min(drafts)),
            "{prompts}" => counts(drafts + 1..=room()?),
            "{chip}" => {
                let slug = chip_slug(&self.about.system.chip);
                // A chip that the table of chips lacks is calibrated from the best known one.
                if chips::names().contains(&slug) { slug } else { STAND_IN.into() }
            }
            word => word.strip_prefix(['@', '>']).map_or_else(|| word.into(), |name| path(&self.file(name))),
        })
    }

    /// Returns the golden of the checkpoint, or the place of the one that is made.
    fn golden(&self) -> PathBuf {
        let own = self.checkpoint.join(GOLDEN);
        if own.is_file() { own } else { self.file(GOLDEN) }
    }
}

/// Returns the reason why the gate of a command failed, from the command's document.
fn faults(document: &Value) -> String {
    let listed = document["faults"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let listed: Vec<&str> = listed.collect();
    match document["min_cosine"].as_f64() {
        _ if !listed.is_empty() => listed.join("; "),
        Some(cosine) => format!("lowest cosine {cosine:.5}; tokens match: {}", document["tokens_match"]),
        None => "its gate failed".into(),
    }
}

/// Document of the stage `soak`.
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
    pub shard: String,
    #[serde(flatten)]
    pub ended: Ended,
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
