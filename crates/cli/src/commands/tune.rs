//! `anemoe tune`

use crate::args::planning::{PlanArgs, PlanUse, PlannedCheckpoint, QuantChoice, plan_checkpoint};
use crate::child_work::{ChildFailure, Risky, RiskyArgs, Work};
use crate::files::Overwrite;
use crate::outcome::Outcome;
use crate::ui::{Table, Ui, message};
use anemoe_bundle::{ShardKind, sha256};
use anemoe_convert::build::check_room;
use anemoe_convert::form::ShardForm;
use anemoe_convert::form_ladder::{LadderModel, Rung, ladder};
use anemoe_convert::forms_file;
use anemoe_convert::plan::{Plan, PlanOptions, PlannedShard};
use anemoe_convert::shard_program::lower_without_weights;
use anemoe_gates::form_trial::{LEAST_COSINE, TrialFigures, trial_bytes, trial_package, write_trial};
use anemoe_gates::residency::device::PlannedOp;
use anemoe_io::Error;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Share of the time below which a difference does not count: the simpler form stays.
const SAME_TIME: f64 = 0.03;
/// File with the result of a trial.
const RESULT_FILE: &str = "result.json";
/// Largest result file that is read, in bytes.
const MAX_RESULT_BYTES: u64 = 1 << 24;

/// Find the form of shards that the Neural Engine of this Mac takes.
///
/// Of each sort of shard the largest is built in each form (see `anemoe forms`), compiled, loaded, asked for its placement, and
/// run beside the CPU executor, with one token in a call and with as many as its largest function takes; each step in a process
/// of its own: a form that crashes or hangs costs only itself. Forms whose numbers are wrong are out; of the others the ones that
/// are wholly on the Neural Engine come first, then the fastest; within 3 % the simpler one. The winners go into a file for
/// `anemoe build --forms`. An interrupted run goes on. Exit status 1 when some sort has no form that works.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe tune models/small-gemma4 --quant lut4 -o forms.toml\n  anemoe build models/small-gemma4 --quant lut4 --forms forms.toml -o small.anemoe"
)]
pub struct Args {
    /// The checkpoint.
    checkpoint: PathBuf,
    /// File of the winners.
    #[arg(short, long, value_name = "F.toml", default_value = "forms.toml")]
    out: PathBuf,
    /// Folder of the trials, which a later run goes on with [default: beside the file, with the ending .tune].
    #[arg(long, value_name = "DIR")]
    work: Option<PathBuf>,
    /// Calls that are measured of each form: so many of one token, and so many of the largest token count.
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u32).range(20..=100_000))]
    calls: u32,
    /// Sorts of shards to look at: attention, experts, experts_combine, moe, layers, head [default: all].
    #[arg(long, value_name = "SORT,..", value_delimiter = ',')]
    sorts: Vec<String>,
    /// Try forms again that an earlier run has tried.
    #[arg(long)]
    again: bool,
    #[command(flatten)]
    risky: RiskyArgs,
    #[command(flatten)]
    overwrite: Overwrite,
    #[command(flatten)]
    options: PlanArgs,
}

/// Placement of a form by the plans of all its functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Residency {
    /// Every operation with a device is on the Neural Engine.
    Ane,
    /// No operation is elsewhere, and some or all have no device.
    Unknown,
    /// An operation is elsewhere.
    Elsewhere,
}

/// Result of a form's trial.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct TrialResult {
    /// Hash of the facts that the result depends on.
    key: String,
    form: String,
    /// Options of `build`.
    options: String,
    #[serde(default)]
    residency: Option<Residency>,
    /// Operations of all functions: on the Neural Engine, elsewhere, and without a device.
    #[serde(default)]
    ops: [usize; 3],
    /// Judgements of calls with one token, and with as many as the largest function takes.
    #[serde(default)]
    tokens: Vec<JudgedTokens>,
    /// Reason why the form is out; none if the form works.
    #[serde(default)]
    out: Option<String>,
    /// True if an earlier run tried the form.
    #[serde(default)]
    reused: bool,
}

/// Judgement of a form by calls of one number of tokens.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct JudgedTokens {
    /// Tokens of a call.
    tokens: usize,
    /// Placement of the functions that are called with this number of tokens.
    #[serde(default)]
    residency: Option<Residency>,
    /// Operations of these functions: on the Neural Engine, elsewhere, and without a device.
    #[serde(default)]
    ops: [usize; 3],
    /// Numbers and times; none unless every call was answered.
    #[serde(default)]
    figures: Option<TrialFigures>,
}

impl JudgedTokens {
    fn of(tokens: usize) -> JudgedTokens {
        JudgedTokens { tokens, residency: None, ops: [0; 3], figures: None }
    }
}

impl TrialResult {
    /// Computes the geometric mean of the median times of all token counts, in microseconds. A form that is twice as fast
    /// for one token counts as much as a form that is twice as fast for many.
    fn mean_us(&self) -> f64 {
        let logarithms =
            self.tokens.iter().map(|t| t.figures.as_ref().map_or(f64::INFINITY, |f| f.median_us.ln()));
        (logarithms.sum::<f64>() / self.tokens.len().max(1) as f64).exp()
    }
}

/// Form chosen for a sort of shards.
#[derive(Serialize)]
struct FormChoice {
    sort: ShardKind,
    /// Name of the representative shard.
    shard: String,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    chosen: Option<String>,
    options: String,
    reason: String,
    trials: Vec<TrialResult>,
    #[serde(skip)]
    form: Option<ShardForm>,
}

pub fn run(mut args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    anemoe_coreml::available()?;
    let out = args.overwrite.output(&args.out)?;
    anyhow::ensure!(
        ShardForm { layers_per_shard: None, ..args.options.form.form() } == ShardForm::default()
            && args.options.form.forms()?.is_empty(),
        "tune tries all forms: options that name one, but for --layers-per-shard, are those of `build`"
    );
    let kind = QuantChoice::Kind(PlanOptions::default().quant);
    args.options.quant.get_or_insert(kind);
    let planned = plan_checkpoint(&args.checkpoint, &args.options, PlanUse::Build, ui)?;
    let work = args.work.clone().unwrap_or_else(|| args.out.with_extension("tune"));
    let tuner = Tuner {
        args: &args,
        planned: &planned,
        work: std::path::absolute(&work)?,
        risky: args.risky.runner(),
    };
    let mut choices = Vec::new();
    for shard in representatives(&planned.plan, &args.sorts)? {
        choices.push(tuner.sort(shard, ui)?);
    }
    let text = winners(&choices);
    out.write(|file| std::io::Write::write_all(file, text.as_bytes()))
        .map_err(|e| Error::io(&args.out, e))?;
    ui.document(&serde_json::json!({
        "out": args.out.display().to_string(), "work": work.display().to_string(), "system": anemoe_coreml::this_system(), "calls": args.calls, "sorts": choices,
    }))?;
    choices.iter().try_for_each(|choice| print(choice, ui))?;
    let works = choices.iter().all(|c| c.chosen.is_some());
    ui.line(format!("{}: for anemoe build --forms; trials stay in {}", args.out.display(), work.display()))?;
    Ok(if works { Outcome::Done } else { Outcome::GateFailed })
}

/// Returns the largest shard of each sort, and the first of those of equal size.
fn representatives<'a>(plan: &'a Plan, sorts: &[String]) -> anyhow::Result<Vec<&'a PlannedShard>> {
    let mut largest: BTreeMap<ShardKind, &PlannedShard> = BTreeMap::new();
    for shard in &plan.shards {
        let known = largest.entry(shard.kind).or_insert(shard);
        if shard.bytes > known.bytes {
            *known = shard;
        }
    }
    for sort in sorts {
        let names: Vec<&str> = largest.keys().map(|kind| kind.name()).collect();
        anyhow::ensure!(
            names.contains(&sort.as_str()),
            "--sorts {sort}: this model has {}",
            names.join(", ")
        );
    }
    let wanted = |shard: &&PlannedShard| sorts.is_empty() || sorts.iter().any(|s| s == shard.kind.name());
    Ok(largest.into_values().filter(wanted).collect())
}

struct Tuner<'a> {
    args: &'a Args,
    planned: &'a PlannedCheckpoint,
    work: PathBuf,
    risky: Risky,
}

impl Tuner<'_> {
    /// Tries the forms of a sort, and chooses one.
    fn sort(&self, shard: &PlannedShard, ui: &Ui) -> anyhow::Result<FormChoice> {
        let family = self.planned.family.as_ref();
        let (mut programs, mut tried) = (Vec::new(), Vec::new());
        for mut rung in ladder(LadderModel::of(family, self.planned.plan.chain.model.max_context))? {
            // Layers that share a package and fewer experts per call make other shards, not another form of these shards.
            if rung.form.layers_per_shard.is_some() || rung.experts_per_shard.is_some() {
                continue;
            }
            let mut options = self.planned.plan.options.clone();
            if shard.kind == ShardKind::Layers {
                rung.form.layers_per_shard = options.layers_per_shard();
            }
            options.forms.insert(shard.kind, rung.form);
            let plan = family.plan(&options)?;
            let own = plan.packages(&shard.name);
            let lower = |package: &&PlannedShard| Ok(lower_without_weights(family, package)?.program);
            let own_programs: Vec<_> = own.iter().map(lower).collect::<anyhow::Result<_>>()?;
            // A choice without effect on this sort makes programs that are known already.
            if own.is_empty() || programs.contains(&own_programs) {
                continue;
            }
            programs.push(own_programs);
            message(format!("{}: {}", shard.kind.name(), rung.name));
            tried.push((rung.form, self.form(&plan, &own, &rung, ui)?));
        }
        let (best, reason) = choose(&tried);
        let form = best.map(|i| tried[i].0);
        let chosen = best.map(|i| tried[i].1.form.clone());
        let options = best.map(|i| tried[i].1.options.clone()).unwrap_or_default();
        let trials = tried.into_iter().map(|(_, trial)| trial).collect();
        let (name, bytes) = (shard.name.clone(), shard.bytes);
        Ok(FormChoice { sort: shard.kind, shard: name, bytes, chosen, options, reason, trials, form })
    }

    /// Tries a form, unless an earlier run has done so.
    fn form(&self, plan: &Plan, own: &[&PlannedShard], rung: &Rung, ui: &Ui) -> anyhow::Result<TrialResult> {
        let words: Vec<&str> = rung.build_args.iter().map(|a| a.trim_start_matches('-')).collect();
        let slug = if words.is_empty() { "default".to_string() } else { words.join("-") };
        let sort = own.first().context("a form without packages")?.kind;
        let folder = self.work.join(sort.name()).join(slug);
        let family = self.planned.family.as_ref();
        let facts = serde_json::json!([
            family.fingerprint()?,
            own,
            anemoe_coreml::this_system(),
            self.args.calls,
            self.judged_tokens(own),
            env!("CARGO_PKG_VERSION"),
            self.planned.importance.as_ref().map(|i| i.sha256().to_string()),
        ]);
        let mut result = TrialResult {
            key: sha256(&serde_json::to_vec(&facts)?),
            form: rung.name.clone(),
            options: rung.build_args.join(" "),
            residency: None,
            ops: [0; 3],
            tokens: self.judged_tokens(own).into_iter().map(JudgedTokens::of).collect(),
            out: None,
            reused: false,
        };
        let file = folder.join(RESULT_FILE);
        if let Some(known) = read_result(&file).filter(|known| known.key == result.key && !self.args.again) {
            return Ok(TrialResult { reused: true, ..known });
        }
        // Parts depend on the same facts, except for the form.
        let parts = self
            .work
            .join("parts")
            .join(&sha256(&serde_json::to_vec(&(family.fingerprint()?, &self.planned.plan.options))?)[..16]);
        // The package, its compiled model, as much for the Neural Engine's compiler, and other packages that are missing.
        let (bytes, others) = trial_bytes(family, plan, own, &parts)?;
        let what = format!("the trial of the form `{}` for {} needs about", rung.name, sort.name());
        check_room(&self.work, &what, 3 * bytes + bytes / 20 + others)?;
        let bar = ui.bar((1 + 3 * own.len() + result.tokens.len()) as u64, &rung.name);
        write_trial(family, plan, own, self.planned.importance.as_ref(), &parts, &folder)?;
        bar.inc(1);
        result.out = match self.steps(&folder, own, rung.form, &mut result, &bar)? {
            Err(out) => Some(out),
            Ok(()) => result.tokens.iter().find_map(fault),
        };
        bar.finish_and_clear();
        // The packages of a large model are large, and can be made again.
        for shard in own {
            let _ = std::fs::remove_dir_all(trial_package(&folder, &shard.name));
            let _ = std::fs::remove_dir_all(compiled_model(&folder, &shard.name));
        }
        anemoe_bundle::write_atomic(&file, &serde_json::to_vec_pretty(&result)?)?;
        Ok(result)
    }

    /// Returns the token counts by which a shard's forms are judged: 1, and that of its largest function.
    fn judged_tokens(&self, own: &[&PlannedShard]) -> Vec<usize> {
        let largest = own.iter().flat_map(|s| &s.functions).map(|f| f.tokens.max).max().unwrap_or(1);
        let mut all = vec![1, largest.min(self.planned.plan.chain.model.max_context).max(1)];
        all.dedup();
        all
    }

    /// Runs the steps of a trial, each in a child process; the inner error is the reason why the form is out.
    fn steps(
        &self,
        folder: &Path,
        own: &[&PlannedShard],
        form: ShardForm,
        result: &mut TrialResult,
        bar: &indicatif::ProgressBar,
    ) -> anyhow::Result<Result<(), String>> {
        let sort = own.first().map(|s| s.kind);
        let told = |failure: ChildFailure| {
            bar.suspend(|| failure.lines().iter().for_each(message));
            format!("{} {}: {}", failure.step, failure.end.word(), failure.message)
        };
        let step = |what: &str, work: Work| {
            bar.inc(1);
            let ended = self.risky.step(what, &work, sort.map(|sort| (sort, form)))?;
            anyhow::Ok(ended.map_err(told))
        };
        let mut packages = Vec::new();
        let mut plans: Option<Vec<(String, Vec<PlannedOp>)>> = Some(Vec::new());
        for shard in own {
            let (package, compiled) =
                (trial_package(folder, &shard.name), compiled_model(folder, &shard.name));
            let (p, c) = (|| package.clone(), || compiled.clone());
            let functions: Vec<String> = shard.functions.iter().map(|f| f.name.clone()).collect();
            let work = Work::Compile { package: p(), target: c() };
            if let Err(out) = step(&shard.name, work)? {
                return Ok(Err(out));
            }
            let work = Work::Load { package: p(), compiled: c(), functions: functions.clone() };
            if let Err(out) = step(&shard.name, work)? {
                return Ok(Err(out));
            }
            // A form without a plan may still run; its placement is unknown then.
            let work = Work::Plan { package: p(), compiled: c(), functions, cpu_only: false };
            match (step(&shard.name, work)?, &mut plans) {
                (Ok(found), Some(plans)) => {
                    let found: Vec<(String, Vec<PlannedOp>)> = serde_json::from_value(found)?;
                    plans.extend(found.into_iter().map(|(f, ops)| (in_package(shard, &f), ops)));
                }
                _ => plans = None,
            }
            packages.push((package, compiled));
        }
        match plans {
            Some(plans) => {
                (result.residency, result.ops) = count_places(&plans);
                for judged in &mut result.tokens {
                    let called = functions_called(own, judged.tokens);
                    let mut plans = plans.clone();
                    plans.retain(|(function, _)| called.contains(function));
                    (judged.residency, judged.ops) = count_places(&plans);
                }
            }
            None => {
                result.residency = Some(Residency::Unknown);
                result.tokens.iter_mut().for_each(|judged| judged.residency = Some(Residency::Unknown));
            }
        }
        let name = own.first().map(|s| s.name.as_str()).unwrap_or_default();
        for judged in &mut result.tokens {
            let (tokens, calls) = (judged.tokens, self.args.calls as usize);
            let what = format!("{name}{}", of_tokens(tokens));
            let work =
                Work::Measure { folder: folder.to_path_buf(), packages: packages.clone(), tokens, calls };
            match step(&what, work)? {
                Ok(figures) => judged.figures = Some(serde_json::from_value(figures)?),
                Err(out) => return Ok(Err(format!("{out}{}", of_tokens(tokens)))),
            }
        }
        Ok(Ok(()))
    }
}

/// Returns the path of a trial's compiled model.
fn compiled_model(folder: &Path, shard: &str) -> PathBuf {
    folder.join(format!("{shard}.mlmodelc"))
}

/// Returns the name of a function with its package, which no other function has.
fn in_package(shard: &PlannedShard, function: &str) -> String {
    format!("{}/{function}", shard.name)
}

/// Lists the functions of a shard's packages that calls of `tokens` tokens use.
fn functions_called(own: &[&PlannedShard], tokens: usize) -> Vec<String> {
    let all = || own.iter().flat_map(|s| s.functions.iter().map(move |f| (*s, f)));
    let width = all().map(|(_, f)| f.tokens.max).filter(|most| *most >= tokens).min();
    let called = all().filter(|(_, f)| Some(f.tokens.max) == width);
    called.map(|(shard, f)| in_package(shard, &f.name)).collect()
}

/// Returns a note on calls of more than one token; empty for one token.
fn of_tokens(tokens: usize) -> String {
    if tokens == 1 { String::new() } else { format!(" (calls of {tokens} tokens)") }
}

fn read_result(file: &Path) -> Option<TrialResult> {
    anemoe_io::json::parse(&anemoe_io::read_input(file, MAX_RESULT_BYTES).ok()?).ok()
}

/// Counts the operations of all functions by device: Neural Engine, elsewhere, none.
fn count_places(plans: &[(String, Vec<PlannedOp>)]) -> (Option<Residency>, [usize; 3]) {
    use anemoe_gates::residency::device::Device;
    let mut ops = [0; 3];
    for op in plans.iter().flat_map(|(_, ops)| ops) {
        let name = op.op_type.rsplit('.').next().unwrap_or_default();
        if name == "const" || name.starts_with("constexpr_") {
            continue;
        }
        ops[match op.preferred {
            Some(Device::Ane) => 0,
            Some(_) => 1,
            None => 2,
        }] += 1;
    }
    let residency = match (ops[0], ops[1], ops[2]) {
        (_, 1.., _) => Residency::Elsewhere,
        (1.., 0, 0) => Residency::Ane,
        _ => Residency::Unknown,
    };
    (Some(residency), ops)
}

/// Returns the reason why a form's numbers are wrong; none if they are right.
fn fault(judged: &JudgedTokens) -> Option<String> {
    let figures = judged.figures.as_ref()?;
    let of = of_tokens(judged.tokens);
    if figures.calls == 0 {
        return Some(format!("never called: no token chose one of its experts{of}"));
    }
    (!figures.is_right()).then(|| {
        let first =
            figures.first_wrong.map_or_else(String::new, |n| format!(", the first in call number {}", n + 1));
        format!(
            "wrong numbers: cosine {:.4} with the CPU executor, {LEAST_COSINE} is wanted; {} of {} tokens{first}{of}",
            figures.min_cosine,
            figures.wrong_tokens,
            figures.calls * judged.tokens as u64
        )
    })
}

/// Chooses among forms in their order, simple ones first; returns the index and the reason.
fn choose(tried: &[(ShardForm, TrialResult)]) -> (Option<usize>, String) {
    let time = |i: usize| tried[i].1.mean_us();
    let right: Vec<usize> = (0..tried.len()).filter(|&i| tried[i].1.out.is_none()).collect();
    let Some(best) = right.iter().filter_map(|&i| tried[i].1.residency).min() else {
        return (None, format!("no form works: {} were tried, see why each is out", tried.len()));
    };
    let placed: Vec<usize> = right.iter().copied().filter(|&i| tried[i].1.residency == Some(best)).collect();
    let fastest = placed.iter().copied().map(time).fold(f64::INFINITY, f64::min);
    let near = |i: &&usize| time(**i) <= fastest * (1.0 + SAME_TIME);
    let simplicity = |i: &&usize| (tried[**i].0.differences().len(), **i);
    let Some(&chosen) = placed.iter().filter(near).min_by_key(simplicity) else {
        return (None, "no form was measured".into());
    };
    let place = match best {
        Residency::Ane => "wholly on the Neural Engine",
        Residency::Unknown => {
            "placed nowhere that is known (no form is known to be wholly on the Neural Engine)"
        }
        Residency::Elsewhere => "partly elsewhere (no form is wholly on the Neural Engine)",
    };
    let mut reason = format!("{place}; {}", times(&tried[chosen].1));
    let others = placed.len() - 1;
    if others == 0 {
        reason += if right.len() > 1 { "; the only one placed so well" } else { "; the only one that works" };
    } else if time(chosen) <= fastest {
        reason += &format!("; the fastest of {} placed so", placed.len());
    } else {
        reason += &format!(
            "; another takes {:.1} % less, which is a tie ({:.0} %), and it is simpler",
            100.0 * (1.0 - fastest / time(chosen)),
            100.0 * SAME_TIME
        );
    }
    (Some(chosen), reason)
}

/// Formats the median time of a call, by token count.
fn times(trial: &TrialResult) -> String {
    let timed = trial.tokens.iter().filter_map(|t| Some((t.tokens, t.figures.as_ref()?.median_us)));
    let mut all = timed.map(|(tokens, us)| match tokens {
        1 => format!("{us:.0} us a call of 1 token"),
        _ => format!("{us:.0} us a call of {tokens}"),
    });
    all.by_ref().collect::<Vec<_>>().join(", ")
}

/// Formats the chosen forms as a file for `build --forms`.
fn winners(choices: &[FormChoice]) -> String {
    let system = anemoe_coreml::this_system().unwrap_or_default();
    let mut text = format!("# By anemoe tune {}, for {system}.\n", env!("CARGO_PKG_VERSION"));
    for choice in choices {
        let Some(form) = choice.form else {
            text += &format!("\n# {}: {}\n", choice.sort.name(), choice.reason);
            continue;
        };
        text += &format!("\n# {}\n[{}]\n", choice.reason, choice.sort.name());
        text += &forms_file::lines(choice.sort, &form);
    }
    text
}

fn print(choice: &FormChoice, ui: &Ui) -> anyhow::Result<()> {
    let mut table =
        Table::ending_in_text(&["form", "tokens", "ANE ops", "elsewhere", "none", "us a call", "cosine", ""]);
    for t in &choice.trials {
        let mark = if choice.chosen.as_ref() == Some(&t.form) {
            "chosen".into()
        } else {
            t.out.clone().unwrap_or_default()
        };
        for (i, judged) in t.tokens.iter().enumerate() {
            let (us, cosine) = match &judged.figures {
                Some(f) => (format!("{:.0}", f.median_us), format!("{:.4}", f.min_cosine)),
                None => (String::new(), String::new()),
            };
            let [ane, elsewhere, none] = judged.ops.map(|n| n.to_string());
            let (form, mark) = if i == 0 { (t.form.clone(), mark.clone()) } else { Default::default() };
            table.row(vec![form, judged.tokens.to_string(), ane, elsewhere, none, us, cosine, mark]);
        }
    }
    ui.line(format!("{} ({})", choice.sort.name(), choice.shard))?;
    table.print(ui)?;
    ui.line(format!("{}: {}\n", choice.chosen.as_deref().unwrap_or("none"), choice.reason))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_convert::form::{AttentionForm, CacheForm};

    fn judged(tokens: usize, median_us: f64) -> JudgedTokens {
        let figures = TrialFigures {
            calls: 300,
            median_us,
            p90_us: median_us,
            min_cosine: 1.0,
            wrong_tokens: 0,
            first_wrong: None,
            may_be_wrong: 0,
        };
        JudgedTokens { figures: Some(figures), ..JudgedTokens::of(tokens) }
    }

    /// Makes trials of three forms in order: the default, the cache kept by the host, and attention per head.
    fn tried(trials: [(Option<Residency>, f64, Option<&str>); 3]) -> Vec<(ShardForm, TrialResult)> {
        let forms = [
            ShardForm::default(),
            ShardForm { cache: CacheForm::Host, ..ShardForm::default() },
            ShardForm { attention: AttentionForm::PerHead, ..ShardForm::default() },
        ];
        let trial = |(residency, median_us, out): (Option<Residency>, f64, Option<&str>)| TrialResult {
            key: String::new(),
            form: String::new(),
            options: String::new(),
            residency,
            ops: [0; 3],
            tokens: vec![judged(1, median_us)],
            out: out.map(String::from),
            reused: false,
        };
        forms.into_iter().zip(trials.map(trial)).collect()
    }

    #[test]
    fn placement_comes_before_time_and_near_ties_keep_the_simpler_form() {
        use Residency::{Ane, Elsewhere, Unknown};
        let chosen = |trials| choose(&tried(trials));
        let (ane, unknown, elsewhere) = (Some(Ane), Some(Unknown), Some(Elsewhere));
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
        let ane = Some(Residency::Ane);
        let mut trials = tried([(ane, 100.0, None), (ane, 90.0, None), (ane, 400.0, None)]);
        for ((_, trial), us) in trials.iter_mut().zip([1000.0, 2000.0, 200.0]) {
            trial.tokens.push(judged(64, us));
        }
        let (chosen, reason) = choose(&trials);
        assert_eq!(chosen, Some(2));
        assert!(reason.contains("400 us a call of 1 token, 200 us a call of 64"), "{reason}");
        trials.pop();
        assert_eq!(choose(&trials).0, Some(0));
    }
}
