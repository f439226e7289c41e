//! One checkpoint in several forms, side by side.

use super::chips::ChipProfile;
use super::forecast::{Costed, Forecast, PassSize, forecast, with_memory};
use crate::residency::imported::ImportedEvidence;
use crate::residency::rule::{Conditions, Verdict};
use crate::residency::{self, CheckOptions, Verdicts, facts};
use anemoe_convert::form::LAYERS_PER_SHARD;
use anemoe_convert::form_ladder::ladder;
use anemoe_convert::models::Family;
use anemoe_convert::plan::{Plan, PlanOptions};
use anemoe_convert::shard_program::lower_without_weights;
use serde::Serialize;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

/// A form, what it would take, and where it would run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CostedForm {
    /// Name of the difference from the plan as it was asked for.
    pub name: String,
    /// The pass of one token.
    pub forecast: Forecast,
    /// Forecasts of that pass on further chips.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub further: Vec<Forecast>,
    /// Packages by predicted placement.
    pub verdicts: Verdicts,
    /// It answers the same requests: kinds and contexts change what a model can do, forms do not.
    pub same_model: bool,
}

impl CostedForm {
    /// Counts the options that ask for it.
    fn options(&self) -> usize {
        self.name.split(' ').filter(|word| word.starts_with("--")).count()
    }

    /// True if every package is predicted on the ANE, but for those that are too small to matter.
    fn resident(&self) -> bool {
        self.verdicts.not_ane == 0 && self.verdicts.unknown == 0
    }
}

/// A form to build, and why.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recommendation {
    /// Name of the form.
    pub form: String,
    /// Why, in sentences.
    pub reasons: Vec<String>,
}

/// The packages of a plan with what they do. Of shards of one type the first is lowered.
///
/// # Errors
/// A shard cannot be lowered.
pub fn packages(family: &dyn Family, plan: &Plan) -> crate::Result<Vec<Costed>> {
    let mut known = BTreeMap::new();
    let mut all = Vec::new();
    for shard in &plan.shards {
        let signature = shard.signature();
        if !known.contains_key(&signature) {
            known.insert(signature.clone(), facts(&lower_without_weights(family, shard)?));
        }
        let mut own = known[&signature].clone();
        own.weight_bytes = Some(shard.bytes);
        let (name, functions) = (shard.name.clone(), shard.functions.clone());
        all.push(Costed { name, kind: shard.kind, functions, facts: own });
    }
    Ok(all)
}

/// Machine and pass that forms are compared for.
pub struct Setting<'a> {
    /// Chip.
    pub chip: &'a ChipProfile,
    /// Chips whose speed is predicted beside it.
    pub further: &'a [ChipProfile],
    /// Bytes of memory that packages may fill.
    pub memory: f64,
    /// Chip by which placement is predicted.
    pub conditions: Conditions,
    /// Outcomes of one's own Macs.
    pub evidence: Option<Arc<ImportedEvidence>>,
}

impl Setting<'_> {
    fn form(&self, family: &dyn Family, name: &str, options: &PlanOptions) -> Option<CostedForm> {
        // An option that the model does not have is no form of it.
        let plan = family.plan(options).ok()?;
        let packages = packages(family, &plan).ok()?;
        let (conditions, evidence) = (self.conditions, self.evidence.clone());
        let check = CheckOptions { conditions, evidence, ..CheckOptions::default() };
        let report = residency::plan(family, &plan, &check).ok()?;
        let mut verdicts = report.verdicts;
        // What is too small for it to matter speaks against no form.
        let small = report.packages.iter().filter(|p| p.too_small && p.verdict == Verdict::NotAne).count();
        verdicts.not_ane -= small as u64;
        let pass =
            |chip| with_memory(forecast(&plan.chain, &packages, chip, PassSize::of(1)), chip, self.memory);
        Some(CostedForm {
            name: name.into(),
            forecast: pass(self.chip),
            further: self.further.iter().map(pass).collect(),
            verdicts,
            same_model: true,
        })
    }
}

/// Share of the fastest form's speed from which another is as fast: figures are known to some 10 %.
const AS_FAST: f64 = 0.98;
/// Numbers of experts per call that are tried.
const EXPERTS: [usize; 5] = [1, 2, 4, 8, 16];
/// Layers of a package that are tried.
const LAYERS: [usize; 4] = [1, 2, 4, 8];
/// Contexts that are tried.
const CONTEXTS: [usize; 3] = [512, 2048, 8192];
/// Kinds that are tried.
const KINDS: [&str; 3] = ["lut4", "int8-tensor", "fp16"];

/// Lists the forms that `plan` recommends from: the plan as asked for, other numbers of experts per call, the ladder of forms.
pub fn buildable(family: &dyn Family, options: &PlanOptions, setting: &Setting<'_>) -> Vec<CostedForm> {
    let mut forms = packings(family, options, setting);
    let plan = family.plan(options);
    let rungs = plan.ok().and_then(|p| ladder(p.chain.has_history(), p.chain.model.max_context).ok());
    let rungs = rungs.unwrap_or_default();
    let shared = options.forms.is_empty();
    for rung in rungs.iter().filter(|r| shared && r.form != options.form) {
        let changed = PlanOptions { form: rung.form, ..options.clone() };
        forms.extend(setting.form(family, &rung.build_args.join(" "), &changed));
    }
    forms
}

/// Lists the plan as asked for, and with other numbers of experts per call.
fn packings(family: &dyn Family, options: &PlanOptions, setting: &Setting<'_>) -> Vec<CostedForm> {
    let mut forms: Vec<CostedForm> = setting.form(family, "as asked for", options).into_iter().collect();
    for n in EXPERTS {
        if options.ffn_shards.is_none() && options.experts_per_shard == Some(n) {
            continue;
        }
        let changed = PlanOptions { experts_per_shard: Some(n), ffn_shards: None, ..options.clone() };
        let name = format!("--experts-per-shard {n}");
        forms.extend(setting.form(family, &name, &changed));
    }
    forms.dedup_by(|a, b| a.forecast == b.forecast && a.verdicts == b.verdicts);
    forms
}

/// Lists all forms: packings, kinds, contexts, the ladder of forms, several layers in a package.
pub fn all(family: &dyn Family, options: &PlanOptions, setting: &Setting<'_>) -> Vec<CostedForm> {
    let mut forms = buildable(family, options, setting);
    for kind in KINDS {
        let Ok(quant) = kind.parse() else { continue };
        if quant != options.quant {
            let changed = PlanOptions { quant, ..options.clone() };
            let form = setting.form(family, &format!("--quant {kind}"), &changed);
            forms.extend(form.map(|f| CostedForm { same_model: false, ..f }));
        }
    }
    for n in CONTEXTS {
        let changed = PlanOptions { max_context: Some(n), ..options.clone() };
        let form = setting.form(family, &format!("--max-context {n}"), &changed);
        forms.extend(form.map(|f| CostedForm { same_model: false, ..f }));
    }
    for n in LAYERS {
        let mut changed = options.clone();
        changed.form.layers_per_shard = NonZeroUsize::new(n);
        let is_known = options.layers_per_shard().map(NonZeroUsize::get) == Some(n);
        if is_known || !options.forms.is_empty() {
            continue;
        }
        let form = setting.form(family, &format!("{LAYERS_PER_SHARD} {n}"), &changed);
        // Where the host chooses experts, more layers are those of 2.
        let is_new = |f: &CostedForm| {
            forms.iter().all(|other| f.forecast != other.forecast || f.verdicts != other.verdicts)
        };
        forms.extend(form.filter(is_new));
    }
    forms
}

/// Recommends the fastest form whose packages are all predicted on the ANE, among those of the same kinds and context.
pub fn recommend(forms: &[CostedForm]) -> Option<Recommendation> {
    let speed = |f: &&CostedForm| f.forecast.tok_s.likely;
    let fastest = |wanted: fn(&&CostedForm) -> bool| {
        forms.iter().filter(|f| f.same_model).filter(wanted).max_by(|a, b| speed(a).total_cmp(&speed(b)))
    };
    let any = fastest(|_| true)?;
    let resident = fastest(|f| f.resident());
    let best = resident.unwrap_or(any);
    // Of forms that are as fast, the one with the fewest options.
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
    if any.name != chosen.name && speed(&any) > 1.02 * speed(&chosen) {
        reasons.push(format!(
            "`{}` would have {:.1}, but {} of its packages are unknown and {} elsewhere: measure it on a Mac first",
            any.name, any.forecast.tok_s.likely, any.verdicts.unknown, any.verdicts.not_ane
        ));
    }
    Some(Recommendation { form: chosen.name.clone(), reasons })
}

#[cfg(test)]
mod tests {
    use super::{Setting, all, recommend};
    use crate::cost::chips::ChipProfile;
    use crate::residency::rule::Conditions;
    use anemoe_bundle::TokenCount;
    use anemoe_convert::models;
    use anemoe_convert::plan::PlanOptions;

    /// The forms of both models, as the documentation lists them; the recommended one is the fastest of those that are resident.
    #[test]
    fn forms_are_compared_and_one_is_recommended() {
        let chip = ChipProfile::named("m4-max").unwrap();
        let further = [ChipProfile::named("m1").unwrap()];
        let setting = Setting {
            chip: &chip,
            further: &further,
            memory: 48e9,
            conditions: Conditions::default(),
            evidence: None,
        };
        let tokens = [1, 4].map(|n| TokenCount { min: n, max: n }).to_vec();
        for model in ["synthetic:zaya1-8b", "synthetic:gemma4-26b-a4b"] {
            let family = models::open(models::load(model).unwrap()).unwrap();
            let options = PlanOptions { tokens: tokens.clone(), ..PlanOptions::default() };
            let forms = all(family.as_ref(), &options, &setting);
            for f in &forms {
                let (s, v) = (f.forecast.tok_s, f.verdicts);
                println!(
                    "ROW {model} | `{}` | {:.0} | {:.0} | {:.1} ({:.1} to {:.1}) | {} | {} / {} / {} |",
                    f.name,
                    f.forecast.calls,
                    f.forecast.ms.likely,
                    s.likely,
                    s.low,
                    s.high,
                    f.forecast.bottleneck.name(),
                    v.ane,
                    v.unknown,
                    v.not_ane
                );
            }
            println!("ROW {:?}", recommend(&forms));
            assert!(forms.len() >= 8 && forms[0].forecast.calls > 80.0, "{model}");
            assert!(forms.iter().all(|f| f.forecast.tok_s.low <= f.forecast.tok_s.likely), "{model}");
            assert!(recommend(&forms).is_some(), "{model}");
            // A chip with less bandwidth is slower in every form.
            assert!(forms.iter().all(|f| f.further[0].tok_s.likely < f.forecast.tok_s.likely), "{model}");
        }
    }
}
