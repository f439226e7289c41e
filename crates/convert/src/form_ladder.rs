//! The ladder of forms: those that make sense for a model, and what was seen of each.

use crate::context_buckets::ContextBuckets;
use crate::form::ShardForm;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::sync::LazyLock;

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
    /// For people.
    pub name: String,
    /// Options of `build` that ask for it.
    pub build_args: Vec<String>,
    /// Sightings that speak for it.
    #[serde(rename = "for")]
    pub speaks_for: Vec<Sighting>,
    /// Sightings that speak against it.
    pub against: Vec<Sighting>,
    /// The form.
    #[serde(skip)]
    pub form: ShardForm,
}

/// An entry of the table.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LadderEntry {
    name: String,
    args: Vec<String>,
    /// Options that a model with a history needs besides.
    #[serde(default)]
    history_args: Vec<String>,
    #[serde(default)]
    needs_history: bool,
    /// It has functions for a quarter of the context besides.
    #[serde(default)]
    quarter_bucket: bool,
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

/// Gives the forms for a model whose attention has a history, or none, and whose caches hold `context` positions; the default
/// first.
///
/// # Errors
/// The table is wrong, which a test rules out.
pub fn ladder(has_history: bool, context: usize) -> Result<Vec<Rung>> {
    let table = TABLE.as_ref().map_err(|e| Error::usage(format!("table of forms: {e}")))?;
    let quarter = ContextBuckets::quarter_of(context);
    let fits = |entry: &&LadderEntry| {
        (has_history || !entry.needs_history) && (quarter.is_some() || !entry.quarter_bucket)
    };
    table.form.iter().filter(fits).map(|entry| entry.rung(has_history, quarter)).collect()
}

impl LadderEntry {
    fn rung(&self, has_history: bool, quarter: Option<ContextBuckets>) -> Result<Rung> {
        let mut build_args = self.args.clone();
        if let Some(buckets) = quarter.filter(|_| self.quarter_bucket) {
            build_args.extend(["--context-buckets".into(), buckets.to_string()]);
        }
        if has_history {
            build_args.extend(self.history_args.iter().cloned());
        }
        let wrong = |what: String| Error::usage(format!("table of forms: `{}`: {what}", self.name));
        let mut form = ShardForm::default();
        for pair in build_args.chunks(2) {
            let [option, word] = pair else { return Err(wrong("an option without a word".into())) };
            form.set(option, word).map_err(wrong)?;
        }
        form.check(has_history)?;
        Ok(Rung {
            name: self.name.clone(),
            build_args,
            speaks_for: self.r#for.clone(),
            against: self.against.clone(),
            form,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_rung_is_a_form_of_its_own_with_something_for_and_against_it() {
        for (has_history, context) in [(false, 2048), (true, 2048), (false, 32), (true, 64)] {
            let rungs = ladder(has_history, context).unwrap();
            let with_buckets = rungs.iter().filter(|r| r.build_args.contains(&"--context-buckets".into()));
            assert_eq!(with_buckets.count(), if context > 32 { 2 } else { 0 });
            assert_eq!(rungs[0].form, ShardForm::default());
            let forms: BTreeSet<ShardForm> = rungs.iter().map(|r| r.form).collect();
            assert_eq!(forms.len(), rungs.len());
            for rung in &rungs {
                assert!(!rung.speaks_for.is_empty() && !rung.against.is_empty(), "{}", rung.name);
                let words: Vec<String> =
                    rung.form.differences().iter().flat_map(|(o, w)| [o.to_string(), w.clone()]).collect();
                let set = |v: &[String]| v.chunks(2).map(<[String]>::to_vec).collect::<BTreeSet<_>>();
                assert_eq!(set(&words), set(&rung.build_args), "{}", rung.name);
            }
        }
    }
}
