//! Runs the stages, each in a process of its own.

use super::energy::{self, PowerReading};
use super::verify_args::Args;
use super::work_folder::WorkFolder;
use crate::child_work::{CommandDone, Ended, Limit, Work, Worker, in_child};
use crate::mac_report::stage::{StageEnd, StageName, StageRecord};
use crate::mac_report::{STAND_IN, chip_slug};
use crate::ui::message;
use anemoe_bundle::Chain;
use anemoe_coreml::SystemFacts;
use anemoe_gates::cost::chips;
use anemoe_gates::soak::{SoakFigures, SoakLength};
use anemoe_runtime::model::MOST_UNDONE;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// Time limit of stages that have limits of their own, or do nothing risky.
const LONG: Duration = Duration::from_secs(24 * 3600);
/// Prompt of a golden that has to be made: ids that every vocabulary has.
const PROMPT_IDS: &str = "2,7,11,19,5,3,23,8";
/// Longest reason, in characters.
const LONGEST_REASON: usize = 600;
/// Most shards at fault that are named.
const MOST_CULPRITS: usize = 8;
/// Passes for which single shards are soaked beyond the pass at which the whole bundle failed.
const BEHIND: u64 = 100;

/// Runner of the stages of one verification.
pub struct StageRunner<'a> {
    pub args: &'a Args,
    pub checkpoint: &'a Path,
    pub folder: &'a WorkFolder,
    pub system: &'a SystemFacts,
}

/// Result of a stage, before it has a name and a time.
struct StageResult {
    end: StageEnd,
    reason: String,
    document: Value,
}

impl StageResult {
    fn new(end: StageEnd, reason: impl Into<String>) -> StageResult {
        StageResult { end, reason: reason.into(), document: Value::Null }
    }
}

impl StageRunner<'_> {
    /// Runs a stage, or returns the record of an earlier run; the flag is true for a record of an earlier run.
    ///
    /// # Errors
    /// No process can be started, or the record cannot be written.
    pub fn stage(&self, stage: StageName) -> anyhow::Result<(StageRecord, bool)> {
        let wanted = self.args.stages.is_empty() || self.args.stages.contains(&stage);
        let known = self.folder.record(stage);
        if let Some(known) = known.filter(|_| !wanted || !self.args.again) {
            return Ok((known, true));
        }
        let started = Instant::now();
        let found = if !wanted {
            StageResult::new(StageEnd::Skipped, "not asked for (--stages)")
        } else {
            message(format!("{}: begins", stage.name()));
            self.run(stage)?
        };
        let reason = found.reason.chars().take(LONGEST_REASON).collect();
        let seconds = (started.elapsed().as_secs_f64() * 1e3).round() / 1e3;
        let record = StageRecord { stage, end: found.end, seconds, reason, document: found.document };
        if record.end.is_finished() {
            self.folder.keep(&record)?;
        }
        if wanted {
            let colon = if record.reason.is_empty() { "" } else { ": " };
            message(format!("{}: {}{colon}{}", stage.name(), record.end.word(), record.reason));
        }
        Ok((record, false))
    }

    fn run(&self, stage: StageName) -> anyhow::Result<StageResult> {
        let bundle = self.folder.bundle();
        if stage.needs_bundle() && !bundle.join(anemoe_bundle::CHAIN_FILE).is_file() {
            return Ok(StageResult::new(
                StageEnd::Skipped,
                "there is no bundle, which the stage build makes",
            ));
        }
        if self.folder.record(stage).is_some() {
            // A stage with a record is repeated from the start; an unfinished tune or build goes on.
            self.folder.forget(&[stage])?;
        }
        if matches!(stage, StageName::Tune | StageName::Build) {
            let depends =
                |later: &StageName| *later > stage && (later.needs_bundle() || *later == StageName::Build);
            let later: Vec<StageName> = StageName::ALL.into_iter().filter(depends).collect();
            self.folder.forget(&later)?;
        }
        match stage {
            StageName::Soak => self.soak(),
            StageName::Validate => self.validate(),
            StageName::Energy => self.energy(),
            _ => {
                let arguments = self.arguments(stage)?;
                let inner = [StageName::Tune, StageName::Build, StageName::Compile, StageName::Check];
                let limit = if inner.contains(&stage) { LONG } else { self.limit() };
                self.command(stage, stage.command(), arguments, limit)
            }
        }
    }

    fn limit(&self) -> Duration {
        Duration::from_secs(self.args.risky.timeout)
    }

    /// Returns the arguments of a stage that is one command.
    fn arguments(&self, stage: StageName) -> anyhow::Result<Vec<String>> {
        let text = |path: &Path| path.display().to_string();
        let (folder, args) = (self.folder, self.args);
        let (bundle, checkpoint) = (text(&folder.bundle()), text(self.checkpoint));
        let timeout = args.risky.timeout.to_string();
        let tokens = args.tokens.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let words = |all: &[&str]| all.iter().map(|w| w.to_string()).collect::<Vec<String>>();
        Ok(match stage {
            StageName::Tune => {
                let (out, trials) = (text(&folder.forms()), text(&folder.trials()));
                let (quant, calls) = (args.quant.to_string(), args.calls.to_string());
                let mut all =
                    words(&[&checkpoint, "-o", &out, "--work", &trials, "--force", "--quant", &quant]);
                all.extend(words(&["--tokens", &tokens, "--calls", &calls, "--timeout", &timeout]));
                all
            }
            StageName::Build => {
                let quant = args.quant.to_string();
                let mut all = words(&[&checkpoint, "-o", &bundle, "--quant", &quant, "--tokens", &tokens]);
                all.extend(words(&["--skip-gates", "--no-journal"]));
                let forms = folder.forms();
                if forms.is_file() {
                    all.extend(words(&["--forms", &text(&forms)]));
                }
                all
            }
            StageName::Compile => words(&[&bundle, "--timeout", &timeout]),
            StageName::Check => {
                let plan = text(&folder.plan());
                let fixed = ["--device", "--save", &plan, "--force", "--no-journal", "--timeout", &timeout];
                words(&[&[bundle.as_str()][..], &fixed].concat())
            }
            StageName::Bench => self.bench_arguments(&bundle)?,
            StageName::Predict => {
                let slug = chip_slug(&self.system.chip);
                // A chip that the table of chips lacks is calibrated from the best known one.
                let chip = if chips::names().contains(&slug) { slug } else { STAND_IN.into() };
                words(&[&bundle, "--chip", &chip])
            }
            _ => Vec::new(),
        })
    }

    /// Returns the arguments of the bench over every token count: passes that verify drafts up to [`MOST_UNDONE`], prompts
    /// above. Contexts fit the context of the bundle.
    fn bench_arguments(&self, bundle: &str) -> anyhow::Result<Vec<String>> {
        let chain = Chain::read(Path::new(bundle))?;
        let room = chain.model.max_context;
        let context = 64.min(room / 4).max(1);
        let decode = 32.min(room / 4).max(1);
        let counts = || self.args.tokens.iter().copied().filter(|n| *n > 1);
        let list = |all: Vec<usize>| {
            let none = all.is_empty();
            let joined = all.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
            if none { "0".to_string() } else { joined }
        };
        let verified = list(counts().filter(|n| *n <= MOST_UNDONE + 1 && context + n <= room).collect());
        let prompts = list(counts().filter(|n| *n > MOST_UNDONE + 1 && *n <= room).collect());
        let saved = self.folder.bench().display().to_string();
        let (context, decode) = (context.to_string(), decode.to_string());
        let all = [
            bundle,
            "--backend",
            "coreml",
            "--save",
            &saved,
            "--force",
            "--no-journal",
            "--context",
            &context,
            "--decode",
            &decode,
            "--verify-tokens",
            &verified,
            "--prefill",
            &prompts,
        ];
        Ok(all.map(String::from).into())
    }

    /// Runs a whole command in a child process.
    fn command(
        &self,
        stage: StageName,
        command: &str,
        arguments: Vec<String>,
        limit: Duration,
    ) -> anyhow::Result<StageResult> {
        let work = Work::Command { command: command.into(), arguments };
        Ok(match in_child(&work, limit)? {
            Ended::Done(value) => {
                let CommandDone { passed, document } = serde_json::from_value(value)?;
                let reason = if passed { String::new() } else { reason_of(stage, &document) };
                let end = if passed { StageEnd::Done } else { StageEnd::Failed };
                StageResult { end, reason, document }
            }
            other => result_of_child(other),
        })
    }

    fn validate(&self) -> anyhow::Result<StageResult> {
        let own = self.checkpoint.join("golden.npz");
        let golden = if own.is_file() { own } else { self.folder.golden() };
        let text = golden.display().to_string();
        if !golden.is_file() {
            let made = ["--prompt-ids", PROMPT_IDS, "--decode", "16", "-o", &text].map(String::from);
            let arguments = [&[self.checkpoint.display().to_string()][..], &made].concat();
            let made = self.command(StageName::Validate, "golden", arguments, LONG)?;
            if made.end != StageEnd::Done {
                return Ok(StageResult { reason: format!("golden: {}", made.reason), ..made });
            }
        }
        let bundle = self.folder.bundle().display().to_string();
        let arguments =
            [bundle.as_str(), "--golden", &text, "--backend", "coreml", "--no-journal"].map(String::from);
        self.command(StageName::Validate, "validate", arguments.into(), self.limit())
    }

    /// Soaks the whole bundle. If that does not end well, soaks groups of shards to name the shards at fault.
    fn soak(&self) -> anyhow::Result<StageResult> {
        let length = SoakLength { passes: self.args.soak_passes, seconds: self.args.soak_seconds as f64 };
        // The limit holds for one pass: a missing pass is a hang, and many passes are none.
        let limit = Limit::Silence(self.limit());
        let bundle = self.folder.bundle();
        let soak = |only: &[String], length: SoakLength| {
            let work = Work::Soak { bundle: bundle.clone(), only: only.to_vec(), length };
            let mut worker = Worker::start(&work)?;
            let ended = worker.wait(limit)?;
            anyhow::Ok((ended, worker.progress()))
        };
        let (whole, said) = soak(&[], length)?;
        let (end, reason, figures, reached) = match whole {
            Ended::Done(value) => {
                let figures: SoakFigures = serde_json::from_value(value)?;
                let reason = figures.faults.join("; ");
                let end = if reason.is_empty() { StageEnd::Done } else { StageEnd::Failed };
                let reached = figures.first_wrong.unwrap_or(figures.passes);
                (end, reason, Some(figures), reached)
            }
            other => {
                let found = result_of_child(other);
                let reason = format!("behind {said} passes: {}", found.reason);
                (found.end, reason, None, said)
            }
        };
        let mut shards: Vec<Value> = Vec::new();
        if end != StageEnd::Done {
            let chain = Chain::read(&bundle)?;
            let short = SoakLength { passes: length.passes.min(reached + BEHIND), seconds: 0.0 };
            let all: Vec<String> = chain.shards.iter().map(|s| s.name.clone()).collect();
            shards = find_culprits(all, &|group: &[String]| {
                message(format!("soak: {} of {} shards on the device", group.len(), chain.shards.len()));
                alone(soak(group, short)?.0)
            })?;
        }
        let document = json!({
            "length": length, "seconds_without_a_pass": self.args.risky.timeout, "passes_done": reached.max(said),
            "figures": figures, "shards": shards,
        });
        Ok(StageResult { end, reason, document })
    }

    fn energy(&self) -> anyhow::Result<StageResult> {
        let work = Work::Run { bundle: self.folder.bundle() };
        Ok(match energy::measure(&work, self.args.energy_seconds, self.limit())? {
            PowerReading::Measured(figures) => StageResult {
                end: StageEnd::Done,
                reason: String::new(),
                document: serde_json::to_value(figures)?,
            },
            PowerReading::DidNotRun(why) => StageResult::new(
                StageEnd::Failed,
                format!("the model did not run while power was measured: {why}"),
            ),
            PowerReading::Unreadable(why) => StageResult::new(StageEnd::Skipped, why),
        })
    }
}

/// Makes the result of a stage from the end of its child process, without a document.
fn result_of_child(ended: Ended) -> StageResult {
    let end = match &ended {
        Ended::Done(_) => StageEnd::Done,
        Ended::Failed(_) => StageEnd::Refused,
        Ended::Crashed { .. } => StageEnd::Crashed,
        Ended::TimedOut { .. } => StageEnd::Hung,
    };
    StageResult::new(end, ended.reason())
}

/// Result of running some shards on the device.
struct GroupResult {
    end: StageEnd,
    reason: String,
}

fn alone(ended: Ended) -> anyhow::Result<GroupResult> {
    Ok(match ended {
        Ended::Done(value) => {
            let figures: SoakFigures = serde_json::from_value(value)?;
            let end = if figures.faults.is_empty() { StageEnd::Done } else { StageEnd::Failed };
            GroupResult { end, reason: figures.faults.join("; ") }
        }
        other => {
            let StageResult { end, reason, .. } = result_of_child(other);
            GroupResult { end, reason }
        }
    })
}

/// Finds the shards that fail, by halving groups down to single shards; all other shards end well together. Shards beyond
/// the first [`MOST_CULPRITS`], and groups whose halves end well, are not in the result.
fn find_culprits(
    mut all: Vec<String>,
    run: &dyn Fn(&[String]) -> anyhow::Result<GroupResult>,
) -> anyhow::Result<Vec<Value>> {
    let shown = |shard: &str, r: &GroupResult| json!({"shard": shard, "end": r.end, "reason": r.reason});
    let mut found = Vec::new();
    for _ in 0..MOST_CULPRITS {
        let mut group = all.clone();
        while group.len() > 1 {
            let other = group.split_off(group.len() / 2);
            if run(&group)?.end == StageEnd::Done {
                group = other;
            }
        }
        let [culprit] = group.as_slice() else { break };
        let result = run(std::slice::from_ref(culprit))?;
        if result.end == StageEnd::Done {
            break;
        }
        found.push(shown(culprit, &result));
        all.retain(|shard| shard != culprit);
        let rest = if all.is_empty() {
            GroupResult { end: StageEnd::Done, reason: String::new() }
        } else {
            run(&all)?
        };
        if rest.end == StageEnd::Done {
            found.extend(all.iter().map(|shard| shown(shard, &rest)));
            break;
        }
    }
    Ok(found)
}

/// Returns the reason why a stage's gate failed, from its document.
fn reason_of(stage: StageName, document: &Value) -> String {
    let text = |v: &Value, key: &str| v[key].as_str().unwrap_or_default().to_string();
    let failures = |key: &str| -> Vec<String> {
        let all = document[key].as_array().into_iter().flatten();
        all.map(|f| {
            format!("{}: {} {}: {}", text(f, "what"), text(f, "step"), text(f, "end"), text(f, "message"))
        })
        .collect()
    };
    match stage {
        StageName::Compile => failures("failures").join("; "),
        StageName::Check => {
            let mut said = failures("plan_failures");
            let packages = document["device"]["packages"].as_array().into_iter().flatten();
            let elsewhere = packages.filter(|p| p["measured"] != "ane");
            said.extend(elsewhere.map(|p| format!("{}: {}", text(p, "name"), text(p, "measured"))));
            let controls = document["controls"].as_array().into_iter().flatten();
            said.extend(controls.filter(|c| c["pass"] != true).map(|c| {
                let why = c["failure"].as_str().unwrap_or("it says yes, or nothing");
                format!("negative control ({}): {why}; the reader's no is not proven", text(c, "control"))
            }));
            said.join("; ")
        }
        StageName::Tune => {
            let sorts = document["sorts"].as_array().into_iter().flatten();
            let none = sorts.filter(|s| s["chosen"].is_null());
            none.map(|s| format!("{}: {}", text(s, "sort"), text(s, "reason"))).collect::<Vec<_>>().join("; ")
        }
        StageName::Validate => match document["min_cosine"].as_f64() {
            Some(cosine) => format!("lowest cosine {cosine:.5}; tokens match: {}", document["tokens_match"]),
            None => "the golden gate failed".into(),
        },
        _ => "its gate failed".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn culprits_are_found_by_halving() {
        let all: Vec<String> = (0..100).map(|i| i.to_string()).collect();
        let runs = std::cell::Cell::new(0);
        let run = |group: &[String]| {
            runs.set(runs.get() + 1);
            let bad = group.iter().any(|s| s == "17" || s == "64");
            Ok(GroupResult {
                end: if bad { StageEnd::Crashed } else { StageEnd::Done },
                reason: String::new(),
            })
        };
        let found = find_culprits(all.clone(), &run).unwrap();
        let bad: Vec<&str> =
            found.iter().filter(|v| v["end"] == "crashed").filter_map(|v| v["shard"].as_str()).collect();
        assert_eq!((bad, found.len()), (vec!["17", "64"], 100));
        assert!(runs.get() < 25, "{}", runs.get());
        // A shard that fails only beside another shard cannot be named.
        let both = |group: &[String]| {
            let bad = ["17", "64"].iter().all(|s| group.iter().any(|g| g == s));
            Ok(GroupResult {
                end: if bad { StageEnd::Crashed } else { StageEnd::Done },
                reason: String::new(),
            })
        };
        assert!(find_culprits(all, &both).unwrap().is_empty());
    }
}
