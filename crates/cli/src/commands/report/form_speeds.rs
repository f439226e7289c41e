//! Predicted speed of a bundle's model in other forms, from the shapes of its checkpoint.

use crate::args::reading::Reading;
use crate::error_report::sentence;
use crate::ui::Ui;
use anemoe_bundle::Chain;
use anemoe_bundle::journal::Event;
use anemoe_convert::models;
use anemoe_convert::variants::ZayaSkip;
use anemoe_gates::cost::chips::ChipProfile;
use anemoe_gates::cost::forecast::Span;
use anemoe_gates::cost::forms::{self, Setting};
use anemoe_gates::residency::Verdicts;
use anemoe_gates::residency::rule::Conditions;
use anemoe_hub::HubSpec;
use anyhow::{Context, bail};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Speeds by form and chip, or the reason why there are none.
#[derive(Debug, Serialize)]
pub struct FormSpeeds {
    /// Checkpoint that gave the shapes.
    pub checkpoint: Option<String>,
    /// Chips, in the order of each form's speeds.
    pub chips: Vec<String>,
    /// Forms, the bundle's own first.
    pub forms: Vec<FormSpeed>,
    /// Reason why there are no forms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
}

/// Speeds of one form.
#[derive(Debug, Serialize)]
pub struct FormSpeed {
    /// Options of `build` that differ from the bundle's.
    pub name: String,
    /// Calls per pass.
    pub calls: f64,
    /// Tokens per second on each chip.
    pub tok_s: Vec<Span>,
    /// Packages by predicted placement, without those that are too small to matter.
    pub verdicts: Verdicts,
}

/// Finds the checkpoint that a bundle's newest build named. Fails for a checkpoint of the hub, from which a report fetches
/// nothing.
fn recorded(events: &[Event]) -> Result<PathBuf, String> {
    let named = events.iter().rev().filter(|e| e.kind == "build");
    let named = named.filter_map(|e| e.options.get("checkpoint")?.as_str().map(PathBuf::from)).next();
    let path = named.ok_or("the journal does not name the checkpoint")?;
    match HubSpec::parse(&path) {
        Some(_) => Err(format!("the checkpoint {} is not fetched for a report", path.display())),
        None => Ok(path),
    }
}

/// Predicts the speed of each form. `given` is the checkpoint that the user named; without it the checkpoint that the build
/// recorded is used, if it is still in its place.
///
/// # Errors
/// The checkpoint that the user names is not the bundle's, or cannot be read.
pub fn form_speeds(
    bundle: &Path,
    chain: &Chain,
    events: &[Event],
    given: Option<&Path>,
    chips: &[ChipProfile],
    ui: &Ui,
) -> anyhow::Result<FormSpeeds> {
    let missing = |why: String| FormSpeeds {
        checkpoint: None,
        chips: Vec::new(),
        forms: Vec::new(),
        missing: Some(why),
    };
    match given {
        Some(path) => {
            costed(bundle, chain, path, chips, ui).with_context(|| format!("--checkpoint {}", path.display()))
        }
        None => Ok(match recorded(events) {
            Ok(path) => costed(bundle, chain, &path, chips, ui).unwrap_or_else(|e| missing(sentence(&e))),
            Err(why) => missing(why),
        }),
    }
}

fn costed(
    bundle: &Path,
    chain: &Chain,
    path: &Path,
    chips: &[ChipProfile],
    ui: &Ui,
) -> anyhow::Result<FormSpeeds> {
    let Some((chip, further)) = chips.split_first() else { bail!("no chip is known") };
    let zaya_skip = chain.readings.get("zaya_skip").map(|name| name.parse::<ZayaSkip>());
    let zaya_skip = zaya_skip.transpose().map_err(anyhow::Error::msg)?;
    let family = models::open(Reading { zaya_skip }.open(path)?)?;
    if chain.family != family.name() {
        bail!("{}: it is of the family {}, the bundle of {}", path.display(), family.name(), chain.family);
    }
    let plan = models::replan(family.as_ref(), bundle, chain)?;
    let bar = ui.bar(1, "forms");
    let setting =
        Setting { chip, further, memory: f64::INFINITY, conditions: Conditions::default(), evidence: None };
    let costed = forms::all(family.as_ref(), &plan.options, &setting);
    bar.finish_and_clear();
    let forms = costed.into_iter().enumerate().map(|(i, form)| FormSpeed {
        // The first form is the bundle's own.
        name: if i == 0 { "as built".into() } else { form.name },
        calls: form.forecast.calls,
        tok_s: std::iter::once(&form.forecast).chain(&form.further).map(|f| f.tok_s).collect(),
        verdicts: form.verdicts,
    });
    Ok(FormSpeeds {
        checkpoint: Some(path.display().to_string()),
        chips: chips.iter().map(|c| c.chip.clone()).collect(),
        forms: forms.collect(),
        missing: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn build(checkpoint: &str) -> Event {
        let mut event = Event::new("build", "done");
        event.options = json!({"checkpoint": checkpoint}).as_object().cloned().unwrap_or_default();
        event
    }

    #[test]
    fn the_newest_build_names_the_checkpoint() {
        assert!(recorded(&[]).unwrap_err().contains("journal"));
        let found = recorded(&[build("old"), build("new"), Event::new("bench", "")]).unwrap();
        assert_eq!(found, Path::new("new"));
        assert!(recorded(&[build("hf:a/b")]).unwrap_err().contains("hf:a/b is not fetched"));
    }
}
