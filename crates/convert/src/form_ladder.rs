//! Ladder of forms: the forms that make sense for a model, and published observations of each.

use crate::context_buckets::ContextBuckets;
use crate::form::ShardForm;
use crate::models::Family;
use crate::{Error, Result};
use anemoe_bundle::{Chain, ShardKind};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// Option that sets how many experts a call computes.
pub const EXPERTS_PER_SHARD: &str = "--experts-per-shard";

/// An observation of a form on a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sighting {
    /// Observation.
    pub seen: String,
    /// Chip on which it was seen.
    pub chip: String,
    /// Project and place.
    pub source: String,
}

/// A form that a build can have.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rung {
    /// Name for people.
    pub name: String,
    /// Options of `build` that choose the form, each with its word.
    pub build_args: Vec<String>,
    /// Sightings that speak for the form.
    #[serde(rename = "for")]
    pub speaks_for: Vec<Sighting>,
    /// Sightings that speak against the form.
    pub against: Vec<Sighting>,
    /// The form.
    #[serde(skip)]
    pub form: ShardForm,
    /// Experts that one call computes, where the rung asks for fewer than a build does by default.
    #[serde(skip)]
    pub experts_per_shard: Option<usize>,
}

/// Facts of a model that decide which forms it can have.
#[derive(Clone, Copy, Debug)]
pub struct LadderModel {
    /// True if the model's attention has a history.
    pub has_history: bool,
    /// Positions that the model's caches hold.
    pub context: usize,
    /// Experts of a layer; none in a model without experts.
    pub experts: Option<usize>,
}

impl LadderModel {
    /// Makes the facts of a family's model, with caches of `context` positions.
    pub fn of(family: &Family, context: usize) -> LadderModel {
        let experts = family.decoder.experts().map(|e| e.count);
        LadderModel { has_history: family.decoder.has_history(), context, experts }
    }

    /// Returns a quarter of a layer's experts; none where their number is no multiple of 4.
    fn quarter_of_experts(&self) -> Option<usize> {
        self.experts.filter(|n| n.is_multiple_of(4)).map(|n| n / 4)
    }
}

/// Entry of `forms.toml`: a form, and the models that can have it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LadderEntry {
    name: String,
    args: Vec<String>,
    /// Further options for a model with a history.
    #[serde(default)]
    history_args: Vec<String>,
    #[serde(default)]
    needs_history: bool,
    /// True if the form is none of a model without experts.
    #[serde(default)]
    needs_experts: bool,
    /// True if the form is none of a model with experts.
    #[serde(default)]
    needs_dense: bool,
    /// True if the form also has functions for a quarter of the context.
    #[serde(default)]
    quarter_bucket: bool,
    /// True if each call computes a quarter of a layer's experts.
    #[serde(default)]
    quarter_of_experts: bool,
    #[serde(default)]
    r#for: Vec<Sighting>,
    #[serde(default)]
    against: Vec<Sighting>,
}

#[derive(Deserialize)]
struct LadderTable {
    form: Vec<LadderEntry>,
}

static TABLE: LazyLock<std::result::Result<LadderTable, String>> =
    LazyLock::new(|| toml::from_str(include_str!("forms.toml")).map_err(|e| e.to_string()));

/// Returns the forms that a model can have, the default first.
///
/// # Errors
/// `forms.toml` is wrong, which a test rules out.
pub fn ladder(model: LadderModel) -> Result<Vec<Rung>> {
    let table = TABLE.as_ref().map_err(|e| Error::usage(format!("table of forms: {e}")))?;
    let has_bucket = ContextBuckets::quarter_of(model.context).is_some();
    let fits = |entry: &&LadderEntry| {
        let has_experts = model.experts.is_some();
        (model.has_history || !entry.needs_history)
            && (has_experts || !entry.needs_experts)
            && !(has_experts && entry.needs_dense)
            && (has_bucket || !entry.quarter_bucket)
            && (model.quarter_of_experts().is_some() || !entry.quarter_of_experts)
    };
    table.form.iter().filter(fits).map(|entry| entry.rung(model)).collect()
}

impl LadderEntry {
    fn rung(&self, model: LadderModel) -> Result<Rung> {
        let mut build_args = self.args.clone();
        if let Some(buckets) = ContextBuckets::quarter_of(model.context).filter(|_| self.quarter_bucket) {
            build_args.extend(["--context-buckets".into(), buckets.to_string()]);
        }
        if model.has_history {
            build_args.extend(self.history_args.iter().cloned());
        }
        let wrong = |what: String| Error::usage(format!("table of forms: `{}`: {what}", self.name));
        let mut form = ShardForm::default();
        for pair in build_args.chunks(2) {
            let [option, word] = pair else { return Err(wrong("an option without a word".into())) };
            form.set(option, word).map_err(wrong)?;
        }
        form.check(model.has_history)?;
        let experts_per_shard = model.quarter_of_experts().filter(|_| self.quarter_of_experts);
        build_args
            .extend(experts_per_shard.into_iter().flat_map(|n| [EXPERTS_PER_SHARD.into(), n.to_string()]));
        Ok(Rung {
            name: self.name.clone(),
            build_args,
            speaks_for: self.r#for.clone(),
            against: self.against.clone(),
            form,
            experts_per_shard,
        })
    }
}

/// Form of a bundle by its `chain.json`: of all shards, and of the sorts that `--forms` names. None if this version does
/// not know it.
#[derive(Serialize)]
pub struct OwnForm {
    /// Form of all sorts that have none of their own.
    pub form: Option<ShardForm>,
    #[serde(skip_serializing_if = "Option::is_none")]
    /// Forms by sort.
    pub forms: Option<BTreeMap<ShardKind, ShardForm>>,
    /// Experts that one call computes; none if the build was given no number.
    #[serde(skip)]
    experts_per_shard: Option<usize>,
}

impl OwnForm {
    /// Reads the form from a contract.
    pub fn of(chain: &Chain) -> OwnForm {
        let at = |key: &str| chain.options.get(key).filter(|v| !v.is_null()).cloned();
        let form = at("form").map_or(Some(ShardForm::default()), |f| serde_json::from_value(f).ok());
        let experts_per_shard =
            at("experts_per_shard").and_then(|n| n.as_u64()).and_then(|n| usize::try_from(n).ok());
        OwnForm { form, forms: at("forms").and_then(|f| serde_json::from_value(f).ok()), experts_per_shard }
    }

    /// Tells whether the bundle was built in the form of the rung.
    pub fn is(&self, rung: &Rung) -> bool {
        let same_experts =
            rung.experts_per_shard.is_none() || rung.experts_per_shard == self.experts_per_shard;
        self.forms.is_none() && self.form == Some(rung.form) && same_experts
    }

    /// Describes the form in words.
    pub fn text(&self) -> String {
        let all = self.form.map_or("a form that this version does not know".into(), |form| form.to_string());
        let Some(forms) = &self.forms else { return all };
        let sorts: Vec<String> = forms.iter().map(|(sort, form)| format!("{} {form}", sort.name())).collect();
        format!("by --forms: {}; other sorts {all}", sorts.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_rung_is_a_form_of_its_own_with_something_for_and_against_it() {
        for (has_history, context) in [(false, 2048), (true, 2048), (false, 32), (true, 64)] {
            let experts = Some(16).filter(|_| context > 64);
            let rungs = ladder(LadderModel { has_history, context, experts }).unwrap();
            let few = rungs.iter().filter_map(|r| r.experts_per_shard).collect::<Vec<_>>();
            assert_eq!(few, if has_history && context > 64 { vec![4] } else { vec![] });
            let with_buckets = rungs.iter().filter(|r| r.build_args.contains(&"--context-buckets".into()));
            assert_eq!(with_buckets.count(), if context > 32 { 2 } else { 0 });
            assert_eq!(rungs[0].form, ShardForm::default());
            let forms: BTreeSet<(ShardForm, Option<usize>)> =
                rungs.iter().map(|r| (r.form, r.experts_per_shard)).collect();
            assert_eq!(forms.len(), rungs.len());
            let has = |option: &str| rungs.iter().any(|r| r.build_args.iter().any(|a| a == option));
            assert_eq!(has("--experts"), experts.is_some());
            let layers = rungs.iter().filter_map(|r| r.form.layers_per_shard).map(|n| n.get());
            let wanted = [vec![2, 4], vec![1, 2, 4], vec![1], vec![1]];
            let case = 2 * usize::from(experts.is_none()) + usize::from(has_history);
            assert_eq!(layers.collect::<Vec<_>>(), wanted[case]);
            for rung in &rungs {
                assert!(!rung.speaks_for.is_empty() && !rung.against.is_empty(), "{}", rung.name);
                let experts = rung.experts_per_shard.map(|n| (EXPERTS_PER_SHARD, n.to_string()));
                let words = rung.form.differences().into_iter().chain(experts);
                let words: Vec<String> = words.flat_map(|(o, w)| [o.to_string(), w]).collect();
                let set = |v: &[String]| v.chunks(2).map(<[String]>::to_vec).collect::<BTreeSet<_>>();
                assert_eq!(set(&words), set(&rung.build_args), "{}", rung.name);
            }
        }
    }
}
