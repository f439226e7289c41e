//! Finds the form of shards that the Neural Engine of this Mac takes: tries each form of each sort, step by step.

use crate::child::{LoadSeconds, Work, of_tokens};
use crate::device_check::PlanAnswer;
use crate::form_trial::{LEAST_COSINE, Trial, TrialFigures, write_trial};
use crate::json_file::{read_json, write_json};
use crate::risky_steps::{Listener, StepResult, finding, run_step};
use anemoe_bundle::{ShardKind, sha256};
use anemoe_convert::form::ShardForm;
use anemoe_convert::form_ladder::{LadderModel, Rung, ladder};
use anemoe_convert::forms_file;
use anemoe_convert::importance::Importance;
use anemoe_convert::models::Family;
use anemoe_convert::plan::{Plan, PlannedShard};
use anemoe_convert::shard_program::lower_without_weights;
use anemoe_gates::residency::device::{DeviceCounts, PlannedOp};
use anemoe_gates::residency::rule::Verdict;
use anemoe_io::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

/// Share of the time below which a difference does not count: the simpler form stays.
const SAME_TIME: f64 = 0.03;
const RESULT_FILE: &str = "result.json";

/// Forms that were chosen.
#[derive(Debug, Serialize)]
pub struct TuneReport {
    system: Option<String>,
    calls: u32,
    /// Choices, one for each sort of shards.
    pub sorts: Vec<FormChoice>,
    /// Sorts without a form that works, and the reasons.
    pub faults: Vec<String>,
}

/// Form chosen for a sort of shards.
#[derive(Debug, Serialize)]
pub struct FormChoice {
    /// Sort of shards.
    pub sort: ShardKind,
    /// Name of the representative shard.
    pub shard: String,
    bytes: u64,
    /// Name of the form; none if no form works.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chosen: Option<String>,
    options: String,
    /// Reason for the choice.
    pub reason: String,
    /// Results of all forms.
    pub trials: Vec<TrialResult>,
    #[serde(skip)]
    form: Option<ShardForm>,
}

/// Result of a form's trial.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TrialResult {
    /// Hash of the facts that the result depends on.
    key: String,
    pub form: String,
    options: String,
    #[serde(flatten)]
    placement: FormPlacement,
    /// Judgements of calls with one token, and with as many as the largest function takes.
    pub tokens: Vec<JudgedTokens>,
    /// Reason why the form is out; none if the form works.
    pub out: Option<String>,
    /// True if an earlier run tried the form.
    reused: bool,
    #[serde(skip)]
    built: ShardForm,
}

/// Placement of functions by their plans.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct FormPlacement {
    /// Verdict; none before the functions were planned.
    residency: Option<Verdict>,
    /// Number of operations on the Neural Engine, elsewhere, and without a device.
    pub ops: [u64; 3],
}

/// Judgement of a form by calls of one number of tokens.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct JudgedTokens {
    pub tokens: usize,
    /// Placement of the functions that are called with this number of tokens.
    #[serde(flatten)]
    pub placement: FormPlacement,
    /// Numbers and times; none unless every call was answered.
    pub figures: Option<TrialFigures>,
}

impl FormPlacement {
    fn of<'a>(ops: impl IntoIterator<Item = &'a PlannedOp>) -> FormPlacement {
        let counts = DeviceCounts::of(ops);
        let ops = [counts.ane, counts.gpu + counts.cpu, counts.none];
        FormPlacement { residency: Some(counts.verdict()), ops }
    }
}

impl TrialResult {
    /// Computes the geometric mean of the median times of all token counts, in microseconds. A form that is twice as fast
    /// for one token counts as much as a form that is twice as fast for many.
    fn mean_us(&self) -> f64 {
        let logs = self.tokens.iter().map(|t| t.figures.as_ref().map_or(f64::INFINITY, |f| f.median_us.ln()));
        (logs.sum::<f64>() / self.tokens.len().max(1) as f64).exp()
    }

    /// Formats the median time of a call, by token count.
    fn times(&self) -> String {
        let timed = self.tokens.iter().filter_map(|t| Some((t.tokens, t.figures.as_ref()?.median_us)));
        let text = |(tokens, us): (usize, f64)| {
            let unit = if tokens == 1 { " token" } else { "" };
            format!("{us:.0} us a call of {tokens}{unit}")
        };
        timed.map(text).collect::<Vec<_>>().join(", ")
    }
}

impl TuneReport {
    /// Formats the chosen forms as a file for `build --forms`.
    pub fn forms_file(&self) -> String {
        let system = self.system.as_deref().unwrap_or_default();
        let mut text = format!("# By anemoe tune {}, for {system}.\n", env!("CARGO_PKG_VERSION"));
        for choice in &self.sorts {
            let (sort, reason) = (choice.sort.name(), &choice.reason);
            text += &match choice.form {
                Some(form) => format!("\n# {reason}\n[{sort}]\n{}", forms_file::lines(choice.sort, &form)),
                None => format!("\n# {sort}: {reason}\n"),
            };
        }
        text
    }
}

/// Tuner of the forms of a planned checkpoint.
pub struct Tuner<'a> {
    /// The checkpoint.
    pub family: &'a Family,
    /// Its plan in the default form.
    pub plan: &'a Plan,
    /// Weights of errors.
    pub importance: Option<&'a Importance>,
    /// Folder of the trials, which a later run goes on with; an absolute path.
    pub work: PathBuf,
    /// Number of calls of each form and token count.
    pub calls: u32,
    /// True if forms are tried again that an earlier run has tried.
    pub again: bool,
    /// Time that a step may take.
    pub limit: Duration,
    /// Shows how the work goes on.
    pub listener: &'a dyn Listener,
}

impl Tuner<'_> {
    /// Tries the forms of some sorts of shards, or of all if `sorts` is empty, and chooses one for each.
    ///
    /// # Errors
    /// The model lacks a sort, a trial does not fit the disk or cannot be written, or no process can be started.
    pub fn run(&self, sorts: &[String]) -> Result<TuneReport> {
        let system = anemoe_coreml::this_system();
        let chosen = self.representatives(sorts)?.into_iter().map(|shard| self.sort(shard));
        let sorts: Vec<FormChoice> = chosen.collect::<Result<_>>()?;
        let none = sorts.iter().filter(|choice| choice.chosen.is_none());
        let faults = none.map(|choice| format!("{}: {}", choice.sort.name(), choice.reason)).collect();
        Ok(TuneReport { system, calls: self.calls, sorts, faults })
    }

    /// Returns the largest shard of each sort, and the first of those of equal size.
    fn representatives(&self, sorts: &[String]) -> Result<Vec<&PlannedShard>> {
        let kinds: BTreeSet<ShardKind> = self.plan.shards.iter().map(|s| s.kind).collect();
        let names: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
        if let Some(sort) = sorts.iter().find(|sort| !names.contains(&sort.as_str())) {
            return Err(Error::usage(format!("--sorts {sort}: this model has {}", names.join(", "))));
        }
        let is_wanted = |kind: &ShardKind| sorts.is_empty() || sorts.iter().any(|s| s == kind.name());
        let largest = |kind| self.plan.shards.iter().rev().filter(|s| s.kind == kind).max_by_key(|s| s.bytes);
        Ok(kinds.into_iter().filter(is_wanted).filter_map(largest).collect())
    }

    /// Tries the forms of a sort, and chooses one.
    fn sort(&self, shard: &PlannedShard) -> Result<FormChoice> {
        let (mut programs, mut tried) = (Vec::new(), Vec::new());
        for mut rung in ladder(LadderModel::of(self.family, self.plan.chain.model.max_context))? {
            // Layers that share a package and fewer experts per call make other shards, not another form of these shards.
            if rung.form.layers_per_shard.is_some() || rung.experts_per_shard.is_some() {
                continue;
            }
            let mut options = self.plan.options.clone();
            if shard.kind == ShardKind::Layers {
                rung.form.layers_per_shard = options.layers_per_shard();
            }
            options.forms.insert(shard.kind, rung.form);
            let plan = self.family.plan(&options)?;
            let own = plan.packages(&shard.name);
            let lower = |package: &&PlannedShard| Ok(lower_without_weights(self.family, package)?.program);
            let own_programs: Vec<_> = own.iter().map(lower).collect::<Result<_>>()?;
            // A choice without effect on this sort makes programs that are known already.
            if own.is_empty() || programs.contains(&own_programs) {
                continue;
            }
            programs.push(own_programs);
            self.listener.message(&format!("{}: {}", shard.kind.name(), rung.name));
            tried.push(self.form(&plan, &own, &rung)?);
        }
        let (best, reason) = choose(&tried);
        Ok(FormChoice {
            sort: shard.kind,
            shard: shard.name.clone(),
            bytes: shard.bytes,
            chosen: best.map(|trial| trial.form.clone()),
            options: best.map(|trial| trial.options.clone()).unwrap_or_default(),
            form: best.map(|trial| trial.built),
            reason,
            trials: tried,
        })
    }

    /// Tries a form, unless an earlier run has done so.
    fn form(&self, plan: &Plan, own: &[&PlannedShard], rung: &Rung) -> Result<TrialResult> {
        let words: Vec<&str> = rung.build_args.iter().map(|a| a.trim_start_matches('-')).collect();
        let slug = if words.is_empty() { "default".to_string() } else { words.join("-") };
        let fingerprint = self.family.checked.checkpoint.fingerprint()?;
        let folder = self.work.join(own[0].kind.name()).join(slug);
        // Parts depend on the same facts, except for the form.
        let parts = self.work.join("parts").join(&digest(&(&fingerprint, &self.plan.options))?[..16]);
        let counts = self.judged_tokens(own);
        let mut result = TrialResult {
            key: digest(&(
                (&fingerprint, own, anemoe_coreml::this_system(), self.calls, &counts),
                env!("CARGO_PKG_VERSION"),
                self.importance.map(|i| i.sha256().to_string()),
            ))?,
            form: rung.name.clone(),
            options: rung.build_args.join(" "),
            tokens: counts.iter().map(|&tokens| JudgedTokens { tokens, ..JudgedTokens::default() }).collect(),
            built: rung.form,
            ..TrialResult::default()
        };
        let file = folder.join(RESULT_FILE);
        let known = read_json(&file).filter(|known: &TrialResult| known.key == result.key && !self.again);
        if let Some(known) = known {
            return Ok(TrialResult { reused: true, built: rung.form, ..known });
        }
        self.listener.progress(&rung.name, "build", 0, 1);
        let trial = write_trial(self.family, self.importance, (plan, own), (folder, parts), &rung.name)?;
        result.out = match finding(self.steps(own, &trial, &mut result))? {
            Err(failure) => {
                self.listener.message(&failure.lines());
                Some(failure.text())
            }
            Ok(()) => result.tokens.iter().find_map(fault),
        };
        self.listener.progress(&rung.name, "", 1, 1);
        // The packages of a large model are large, and can be made again.
        for model in trial.models {
            let _ = std::fs::remove_dir_all(model.package);
            let _ = std::fs::remove_dir_all(model.compiled);
        }
        write_json(&file, &result)?;
        Ok(result)
    }

    /// Returns the token counts by which a shard's forms are judged: 1, and that of its largest function.
    fn judged_tokens(&self, own: &[&PlannedShard]) -> Vec<usize> {
        let largest = own.iter().flat_map(|s| &s.functions).map(|f| f.tokens.max).max().unwrap_or(1);
        BTreeSet::from([1, largest.min(self.plan.chain.model.max_context).max(1)]).into_iter().collect()
    }

    /// Runs the steps of a trial, each in a child process. A finding is the reason why the form is out.
    fn steps(&self, own: &[&PlannedShard], trial: &Trial, result: &mut TrialResult) -> StepResult<()> {
        let form_name = result.form.clone();
        let form = Some((own[0].kind, result.built));
        // Operations of each function, with the most tokens that the function takes; none if a plan is missing.
        let mut plans = Some(Vec::new());
        let total = own.len() + result.tokens.len();
        for (i, (shard, model)) in own.iter().zip(&trial.models).enumerate() {
            self.listener.progress(&form_name, &shard.name, i, total);
            run_step::<()>(self.limit, form, &Work::Compile(model.clone()))?;
            run_step::<LoadSeconds>(self.limit, form, &Work::Load(model.clone()))?;
            // A form without a plan may still run; its placement is unknown then.
            let plan = Work::Plan { model: model.clone(), cpu_only: false };
            let answer: PlanAnswer = finding(run_step(self.limit, form, &plan))?;
            let answer = answer.map_err(|failure| self.listener.message(&failure.lines())).ok();
            plans = plans.zip(answer).map(|(mut plans, found)| {
                let widths = shard.functions.iter().map(|f| f.tokens.max);
                plans.extend(widths.zip(found.into_iter().map(|(_, ops)| ops)));
                plans
            });
        }
        let plans = plans.unwrap_or_default();
        result.placement = FormPlacement::of(plans.iter().flat_map(|(_, ops)| ops));
        for (i, judged) in result.tokens.iter_mut().enumerate() {
            let tokens = judged.tokens;
            let widths = own.iter().flat_map(|s| &s.functions).map(|f| f.tokens.max);
            let called = widths.filter(|width| *width >= tokens).min();
            let own_plans = plans.iter().filter(|(width, _)| Some(*width) == called);
            judged.placement = FormPlacement::of(own_plans.flat_map(|(_, ops)| ops));
            let name = format!("{}{}", own[0].name, of_tokens(tokens));
            self.listener.progress(&form_name, &name, own.len() + i, total);
            let work = Work::Measure { trial: Box::new(trial.clone()), tokens, calls: self.calls as usize };
            judged.figures = Some(run_step(self.limit, form, &work)?);
        }
        Ok(())
    }
}

/// Returns the hash of facts.
fn digest(facts: &impl Serialize) -> Result<String> {
    let text = serde_json::to_vec(facts).map_err(|e| Error::usage(format!("facts of a trial: {e}")))?;
    Ok(sha256(&text))
}

/// Returns the reason why a form's numbers are wrong; none if they are right.
fn fault(judged: &JudgedTokens) -> Option<String> {
    let figures = judged.figures.as_ref()?;
    let of = of_tokens(judged.tokens);
    if figures.calls == 0 {
        return Some(format!("never called: no token chose one of its experts{of}"));
    }
    let first =
        figures.first_wrong.map(|n| format!(", the first in call number {}", n + 1)).unwrap_or_default();
    let TrialFigures { min_cosine, wrong_tokens, may_be_wrong, calls, .. } = figures;
    let all = calls * judged.tokens as u64;
    (wrong_tokens > may_be_wrong).then(|| {
        format!(
            "wrong numbers: cosine {min_cosine:.4} with the CPU executor, {LEAST_COSINE} is wanted; {wrong_tokens} of {all} \
             tokens{first}{of}"
        )
    })
}

/// Chooses among forms in their order, simple ones first; returns the choice and the reason.
fn choose(tried: &[TrialResult]) -> (Option<&TrialResult>, String) {
    let right: Vec<&TrialResult> = tried.iter().filter(|t| t.out.is_none()).collect();
    let Some(best) = right.iter().filter_map(|t| t.placement.residency).min() else {
        return (None, format!("no form works: {} were tried, see why each is out", tried.len()));
    };
    let placed: Vec<_> = right.iter().filter(|t| t.placement.residency == Some(best)).collect();
    let fastest = placed.iter().map(|t| t.mean_us()).fold(f64::INFINITY, f64::min);
    let near = placed.iter().filter(|t| t.mean_us() <= fastest * (1.0 + SAME_TIME));
    let chosen: &TrialResult = near.min_by_key(|t| t.built.differences().len()).unwrap_or(&placed[0]);
    let place = match best {
        Verdict::Ane => "wholly on the Neural Engine",
        Verdict::Unknown => "nowhere that is known (no form is known to be wholly on the Neural Engine)",
        Verdict::NotAne => "partly elsewhere (no form is wholly on the Neural Engine)",
    };
    let times = chosen.times();
    let (less, tie) = (100.0 * (1.0 - fastest / chosen.mean_us()), 100.0 * SAME_TIME);
    let rank = match placed.len() {
        1 if right.len() > 1 => "the only one placed so well".into(),
        1 => "the only one that works".into(),
        n if chosen.mean_us() <= fastest => format!("the fastest of {n} placed so"),
        _ => format!("another takes {less:.1} % less, which is a tie ({tie:.0} %), and it is simpler"),
    };
    (Some(chosen), format!("{place}; {times}; {rank}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_convert::form::{AttentionForm, CacheForm};

    fn judged(tokens: usize, median_us: f64) -> JudgedTokens {
        let figures = TrialFigures { calls: 300, median_us, ..TrialFigures::default() };
        JudgedTokens { tokens, figures: Some(figures), ..JudgedTokens::default() }
    }

    /// Makes trials of three forms in order: the default, the cache kept by the host, and attention per head.
    fn tried(trials: [(Option<Verdict>, f64, Option<&str>); 3]) -> Vec<TrialResult> {
        let forms = [
            ShardForm::default(),
            ShardForm { cache: CacheForm::Host, ..ShardForm::default() },
            ShardForm { attention: AttentionForm::PerHead, ..ShardForm::default() },
        ];
        let trial = |(residency, median_us, out): (Option<Verdict>, f64, Option<&str>)| TrialResult {
            placement: FormPlacement { residency, ops: [0; 3] },
            tokens: vec![judged(1, median_us)],
            out: out.map(String::from),
            ..TrialResult::default()
        };
        let built = forms.into_iter().zip(trials.map(trial));
        built.map(|(built, trial)| TrialResult { built, ..trial }).collect()
    }

    fn place(tried: &[TrialResult], chosen: &TrialResult) -> usize {
        tried.iter().position(|t| std::ptr::eq(t, chosen)).unwrap()
    }

    #[test]
    fn placement_comes_before_time_and_near_ties_keep_the_simpler_form() {
        use Verdict::{Ane, NotAne, Unknown};
        let chosen = |trials| {
            let tried = tried(trials);
            let (chosen, reason) = choose(&tried);
            (chosen.map(|chosen| place(&tried, chosen)), reason)
        };
        let (ane, unknown, elsewhere) = (Some(Ane), Some(Unknown), Some(NotAne));
        assert_eq!(chosen([(ane, 102.9, None), (ane, 100.0, None), (ane, 110.0, None)]).0, Some(0));
        assert_eq!(chosen([(ane, 103.1, None), (ane, 100.0, None), (ane, 110.0, None)]).0, Some(1));
        assert_eq!(chosen([(elsewhere, 1.0, None), (unknown, 2.0, None), (ane, 900.0, None)]).0, Some(2));
        assert_eq!(
            chosen([(elsewhere, 1.0, None), (unknown, 2.0, None), (ane, 9.0, Some("wrong"))]).0,
            Some(1)
        );
        let (none, reason) = chosen([(ane, 1.0, Some("x")), (ane, 1.0, Some("x")), (None, 0.0, Some("x"))]);
        assert!(none.is_none() && reason.contains("no form works"), "{reason}");
        let (_, reason) = chosen([(ane, 102.0, None), (ane, 100.0, None), (ane, 110.0, None)]);
        assert!(reason.contains("tie (3 %)") && reason.contains("simpler"), "{reason}");
    }

    #[test]
    fn time_for_many_tokens_counts_as_much_as_time_for_one() {
        let ane = Some(Verdict::Ane);
        let mut trials = tried([(ane, 100.0, None), (ane, 90.0, None), (ane, 400.0, None)]);
        for (trial, us) in trials.iter_mut().zip([1000.0, 2000.0, 200.0]) {
            trial.tokens.push(judged(64, us));
        }
        let (chosen, reason) = choose(&trials);
        assert_eq!(chosen.map(|chosen| place(&trials, chosen)), Some(2));
        assert!(reason.contains("400 us a call of 1 token, 200 us a call of 64"), "{reason}");
        trials.pop();
        assert_eq!(choose(&trials).0.map(|chosen| place(&trials, chosen)), Some(0));
    }
}
