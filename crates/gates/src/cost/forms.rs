//! Compares one checkpoint in several forms.

use super::chips::ChipProfile;
use super::forecast::{Costed, Forecast, PassSize, forecast, with_memory};
use crate::program_facts::{PackageFacts, PlannedPrograms};
use crate::residency::imported::ImportedEvidence;
use crate::residency::rule::{Conditions, Verdict};
use crate::residency::verdict::PackageReport;
use crate::residency::{self, CheckOptions, Verdicts};
use anemoe_convert::form::{CacheForm, HistoryForm, LAYERS_PER_SHARD, ShardForm};
use anemoe_convert::form_ladder::{EXPERTS_PER_SHARD, LadderModel, Rung, ladder};
use anemoe_convert::models::Family;
use anemoe_convert::plan::{Plan, PlanOptions, PlannedShard};
use rayon::prelude::*;
use serde::Serialize;
use std::num::NonZeroUsize;
use std::sync::Arc;

/// Form with its speed and placement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CostedForm {
    /// Name: how the form differs from the plan as asked for.
    pub name: String,
    /// Forecast of a pass of one token.
    pub forecast: Forecast,
    /// Number of packages per predicted placement.
    pub verdicts: Verdicts,
    /// True if the form answers the same requests. Kinds and contexts change what a model can do, forms do not.
    pub same_model: bool,
}

impl CostedForm {
    /// Counts the options of the form's name.
    fn options(&self) -> usize {
        self.name.split(' ').filter(|word| word.starts_with("--")).count()
    }

    /// Tells whether every package is predicted on the ANE, but for packages that are too small to matter.
    fn resident(&self) -> bool {
        self.verdicts.not_ane == 0 && self.verdicts.unknown == 0
    }
}

/// Form to build, with the reasons.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recommendation {
    /// Name of the form.
    pub form: String,
    /// Reasons, in sentences.
    pub reasons: Vec<String>,
}

/// Lists the packages of a plan with the facts of their programs.
pub fn packages(plan: &Plan, programs: &PlannedPrograms) -> Vec<Costed> {
    let one = |(shard, facts): (&PlannedShard, &Arc<PackageFacts>)| Costed {
        name: shard.name.clone(),
        kind: shard.kind,
        functions: shard.functions.clone(),
        facts: facts.clone(),
        weight_bytes: Some(shard.bytes),
    };
    plan.shards.iter().zip(programs.of_each()).map(one).collect()
}

/// Setting in which forms are compared: machine, memory and conditions.
pub struct Setting<'a> {
    /// Chip whose speed decides.
    pub chip: &'a ChipProfile,
    /// Bytes of memory that packages may fill.
    pub memory: f64,
    /// Conditions under which placement is predicted.
    pub conditions: Conditions,
    /// Imported outcomes of the user's Macs.
    pub evidence: Option<Arc<ImportedEvidence>>,
}

impl Setting<'_> {
    /// Costs a form. Returns `None` for a form that the model does not have.
    fn form(&self, family: &Family, asked: &PlanOptions, form: &PlanOptions) -> Option<CostedForm> {
        let plan = family.plan(form).ok()?;
        let programs = PlannedPrograms::lower(family, &plan).ok()?;
        let packages = packages(&plan, &programs);
        let (conditions, evidence) = (self.conditions, self.evidence.clone());
        let check = CheckOptions { conditions, evidence, ..CheckOptions::default() };
        let report = residency::programs(&plan, &programs, &check);
        // A package that is too small to matter does not count against a form.
        let counts = |p: &&PackageReport| !(p.too_small && p.verdict == Verdict::NotAne);
        let mut verdicts = Verdicts::default();
        report.packages.iter().filter(counts).for_each(|p| verdicts.add(p.verdict));
        let pass = forecast(&plan.chain, &packages, self.chip, PassSize::of(1));
        let forecast = with_memory(pass, self.chip, self.memory);
        Some(CostedForm { name: name_of(asked, form), forecast, verdicts, same_model: true })
    }
}

/// Share of the fastest form's speed from which on a form counts as equally fast: figures are known to about 10 %.
const AS_FAST: f64 = 0.97;
/// Numbers of experts per call that are tried.
const EXPERTS: [usize; 5] = [1, 2, 4, 8, 16];
/// Numbers of layers per package that are tried.
const LAYERS: [usize; 4] = [1, 2, 4, 8];
/// Contexts that are tried, in positions.
const CONTEXTS: [usize; 3] = [512, 2048, 8192];
/// Compression kinds that are tried.
const PROBED_KINDS: [&str; 3] = ["lut4", "int8-tensor", "fp16"];
/// Name of the form without any option, where another form was asked for.
const DEFAULT_FORM: &str = "default form";

/// Lists the forms that `plan` recommends from: the plan as asked for, other numbers of experts per call, the ladder
/// of forms, several layers per package, and useful combinations.
pub fn buildable(family: &Family, options: &PlanOptions, setting: &Setting<'_>) -> Vec<CostedForm> {
    let mut candidates = vec![options.clone()];
    candidates.extend(EXPERTS.map(|n| with_experts(options, n)));
    // A file of forms states the form of every kind of shard.
    if options.forms.is_empty() {
        candidates.extend(rungs(family, options));
        candidates.extend(combinations(family, options));
    }
    let mut distinct: Vec<PlanOptions> = Vec::new();
    for candidate in candidates {
        if !distinct.contains(&candidate) {
            distinct.push(candidate);
        }
    }
    let costed: Vec<Option<CostedForm>> =
        distinct.par_iter().map(|changed| setting.form(family, options, changed)).collect();
    let mut forms: Vec<CostedForm> = Vec::new();
    for form in costed.into_iter().flatten() {
        // Where the host chooses experts, more layers per package give the plan of 2 layers. More experts per call
        // than there are give the plan of all experts.
        let joins = form.name.contains(LAYERS_PER_SHARD) || form.name.contains(EXPERTS_PER_SHARD);
        let is_known =
            |other: &CostedForm| other.forecast == form.forecast && other.verdicts == form.verdicts;
        if !(joins && forms.iter().any(is_known)) {
            forms.push(form);
        }
    }
    forms
}

/// Names the options by which a form differs from the one that was asked for.
fn name_of(asked: &PlanOptions, form: &PlanOptions) -> String {
    let mut words = Vec::new();
    let experts = form.experts_per_shard.filter(|_| !has_same_packing(asked, form));
    words.extend(experts.map(|n| format!("{EXPERTS_PER_SHARD} {n}")));
    let (own, known) = (form.form.differences(), asked.form.differences());
    words.extend(
        own.iter().filter(|pair| !known.contains(pair)).map(|(option, word)| format!("{option} {word}")),
    );
    words.extend((form.quant != asked.quant).then(|| format!("--quant {}", form.quant)));
    let context = form.max_context.filter(|_| form.max_context != asked.max_context);
    words.extend(context.map(|n| format!("--max-context {n}")));
    let gone = known.iter().filter(|(option, _)| own.iter().all(|(other, _)| other != option));
    let gone: Vec<&str> = gone.map(|(option, _)| *option).collect();
    match (words.is_empty(), gone.is_empty()) {
        (true, true) => "as asked for".into(),
        (true, false) if own.is_empty() => DEFAULT_FORM.into(),
        (true, false) => format!("without {}", gone.join(" and ")),
        (false, true) => words.join(" "),
        (false, false) => format!("{}, without {}", words.join(" "), gone.join(" and ")),
    }
}

fn has_same_packing(asked: &PlanOptions, form: &PlanOptions) -> bool {
    (asked.ffn_shards, asked.experts_per_shard) == (form.ffn_shards, form.experts_per_shard)
}

fn with_experts(options: &PlanOptions, n: usize) -> PlanOptions {
    PlanOptions { experts_per_shard: Some(n), ffn_shards: None, ..options.clone() }
}

fn with_form(options: &PlanOptions, form: ShardForm) -> PlanOptions {
    PlanOptions { form, ..options.clone() }
}

/// Lists the ladder of forms. Several layers per package and few experts per call are in [`combinations`], in every
/// number.
fn rungs(family: &Family, options: &PlanOptions) -> Vec<PlanOptions> {
    let plan = family.plan(options);
    let rungs = plan.ok().and_then(|p| ladder(LadderModel::of(family, p.chain.model.max_context)).ok());
    let is_single = |rung: &Rung| rung.form.layers_per_shard.is_none() && rung.experts_per_shard.is_none();
    let rungs = rungs.unwrap_or_default().into_iter().filter(is_single);
    rungs.map(|rung| with_form(options, rung.form)).collect()
}

/// Lists several layers per package, and several layers or few experts with caches or history kept by the host. A
/// package of several layers otherwise has several states, and the placement of a history in a state is undecided.
fn combinations(family: &Family, options: &PlanOptions) -> Vec<PlanOptions> {
    let asked = options.form;
    let history = if family.decoder.has_history() { HistoryForm::Host } else { asked.history };
    let mut kept =
        vec![asked, ShardForm { history, ..asked }, ShardForm { cache: CacheForm::Host, history, ..asked }];
    kept.dedup();
    // The host keeps a history alone only where there is one; a cache kept by the host includes the history.
    kept.retain(|form| form.check(family.decoder.has_history()).is_ok());
    let joined = |n, form| ShardForm { layers_per_shard: NonZeroUsize::new(n), ..form };
    let mut all: Vec<PlanOptions> = Vec::new();
    for n in LAYERS.into_iter().filter(|&n| options.layers_per_shard().map(NonZeroUsize::get) != Some(n)) {
        all.extend(kept.iter().map(|form| with_form(options, joined(n, *form))));
    }
    // Layers between which the host chooses experts share a package from 2 layers on, whatever the packing.
    let single = with_experts(options, 1);
    if !has_same_packing(options, &single) {
        all.extend(kept.iter().skip(1).map(|form| with_form(&single, *form)));
        all.push(with_form(&single, joined(2, asked)));
    }
    // Packs of a few experts are large enough for the Neural Engine, and a history kept by the host leaves attention
    // as it is.
    let few = if history == asked.history { &[] } else { &EXPERTS[1..] };
    all.extend(few.iter().map(|&n| with_form(&with_experts(options, n), ShardForm { history, ..asked })));
    all
}

/// Lists all forms: those of the same model, other kinds, other contexts.
pub fn all(family: &Family, options: &PlanOptions, setting: &Setting<'_>) -> Vec<CostedForm> {
    let kinds =
        PROBED_KINDS.iter().filter_map(|kind| kind.parse().ok()).filter(|quant| *quant != options.quant);
    let kinds = kinds.map(|quant| PlanOptions { quant, ..options.clone() });
    let contexts = CONTEXTS.map(Some).into_iter().filter(|n| *n != options.max_context);
    let contexts = contexts.map(|max_context| PlanOptions { max_context, ..options.clone() });
    let others = kinds.chain(contexts).filter_map(|changed| setting.form(family, options, &changed));
    let others: Vec<CostedForm> = others.map(|form| CostedForm { same_model: false, ..form }).collect();
    buildable(family, options, setting).into_iter().chain(others).collect()
}

/// Recommends the fastest form of the same model whose packages are all predicted on the ANE. `forms` are those that
/// [`buildable`] lists for `options`.
pub fn recommend(forms: &[CostedForm], options: &PlanOptions) -> Option<Recommendation> {
    let speed = |f: &&CostedForm| f.forecast.tok_s.likely;
    let fastest = |wanted: fn(&&CostedForm) -> bool| {
        forms.iter().filter(|f| f.same_model).filter(wanted).max_by(|a, b| speed(a).total_cmp(&speed(b)))
    };
    let any = fastest(|_| true)?;
    let resident = fastest(|f| f.resident());
    let best = resident.unwrap_or(any);
    // Of equally fast forms, the one with the fewest options.
    let as_good = |f: &&CostedForm| {
        f.same_model && f.resident() == best.resident() && speed(f) >= AS_FAST * speed(&best)
    };
    let chosen = forms.iter().filter(as_good).min_by_key(|f| f.options()).unwrap_or(best);
    let asked = forms.first()?;
    let s = chosen.forecast.tok_s;
    let mut reasons = vec![format!(
        "{:.1} tokens a second ({:.1} to {:.1}), bound by {}",
        s.likely,
        s.low,
        s.high,
        chosen.forecast.bottleneck.name()
    )];
    reasons.push(match resident {
        Some(_) if chosen.verdicts.ane == 0 => {
            "all of its packages are too small for it to matter where they run: the CPU takes them".into()
        }
        Some(_) => "all of its packages that matter are predicted on the Neural Engine".into(),
        None => format!(
            "in no form are all packages predicted on the Neural Engine; of this one {} are unknown and {} elsewhere",
            chosen.verdicts.unknown, chosen.verdicts.not_ane
        ),
    });
    if asked.name != chosen.name {
        reasons.push(format!("as asked for: {:.1} tokens a second", asked.forecast.tok_s.likely));
    }
    if any.name != chosen.name && AS_FAST * speed(&any) > speed(&chosen) {
        reasons.push(format!(
            "`{}` would have {:.1}, but {} of its packages are unknown and {} elsewhere: measure it on a Mac first",
            any.name, any.forecast.tok_s.likely, any.verdicts.unknown, any.verdicts.not_ane
        ));
    }
    if !options.forms.is_empty() {
        reasons.push(
            "the forms of --forms are kept: nothing but the number of experts in a call was compared".into(),
        );
    }
    Some(Recommendation { form: chosen.name.clone(), reasons })
}

#[cfg(test)]
mod tests {
    use super::{DEFAULT_FORM, Setting, all, buildable, recommend};
    use crate::cost::chips::ChipProfile;
    use crate::residency::rule::Conditions;
    use anemoe_bundle::TokenCount;
    use anemoe_convert::form::{CacheForm, HistoryForm, ShardForm};
    use anemoe_convert::models;
    use anemoe_convert::plan::PlanOptions;
    use std::collections::BTreeSet;

    /// Checks that the default form is listed with a name where another form was asked for.
    #[test]
    fn the_default_form_has_a_name() {
        let chip = ChipProfile::named("m4-max").unwrap();
        let conditions = Conditions::default();
        let setting = Setting { chip: &chip, memory: 48e9, conditions, evidence: None };
        let family = models::open(models::load("synthetic:zaya1-8b?layers=2").unwrap()).unwrap();
        let form = ShardForm { cache: CacheForm::Host, history: HistoryForm::Host, ..ShardForm::default() };
        let tokens = vec![TokenCount { min: 1, max: 1 }];
        let options = PlanOptions { tokens, form, ..PlanOptions::default() };
        let names: Vec<String> = buildable(&family, &options, &setting).into_iter().map(|f| f.name).collect();
        assert!(names.iter().any(|name| name == DEFAULT_FORM), "{names:?}");
        assert!(names.iter().all(|name| !name.is_empty()), "{names:?}");
    }

    /// Checks the forms of both models, as the documentation lists them, and that the fastest resident form is recommended.
    #[test]
    fn forms_are_compared_and_one_is_recommended() {
        let chip = ChipProfile::named("m4-max").unwrap();
        let conditions = Conditions::default();
        let setting = Setting { chip: &chip, memory: 48e9, conditions, evidence: None };
        let tokens = [1, 4].map(|n| TokenCount { min: n, max: n }).to_vec();
        for model in ["synthetic:zaya1-8b", "synthetic:gemma4-26b-a4b"] {
            let family = models::open(models::load(model).unwrap()).unwrap();
            let options = PlanOptions { tokens: tokens.clone(), ..PlanOptions::default() };
            let forms = all(&family, &options, &setting);
            let names: BTreeSet<&str> = forms.iter().map(|f| f.name.as_str()).collect();
            assert!(names.len() == forms.len() && !names.contains(""), "{names:?}");
            let host = if model.contains("zaya") { "--history host " } else { "--cache host " };
            let n = if model.contains("zaya") { 1 } else { 2 };
            assert!(names.contains(format!("{host}--layers-per-shard {n}").as_str()), "{names:?}");
            assert!(forms.len() >= 8 && forms[0].forecast.calls > 80.0, "{model}");
            assert!(forms.iter().all(|f| f.forecast.tok_s.low <= f.forecast.tok_s.likely), "{model}");
            assert!(recommend(&forms, &options).is_some(), "{model}");
            if model.contains("zaya") {
                let best = recommend(&buildable(&family, &options, &setting), &options).unwrap();
                assert_eq!(best.form, "--experts-per-shard 4 --history host");
            }
        }
    }
}
