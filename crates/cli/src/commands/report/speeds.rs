//! Predicted speed of a bundle on chips, as built and in the other forms of its checkpoint.

use crate::args::reading::Reading;
use crate::error_report::sentence;
use crate::ui::Ui;
use anemoe_bundle::Chain;
use anemoe_bundle::journal::Event;
use anemoe_convert::models;
use anemoe_convert::variants::ZayaSkip;
use anemoe_gates::cost::chips::ChipProfile;
use anemoe_gates::cost::forecast::open_packages;
use anemoe_gates::cost::forms::{self, FormSpeed, Setting};
use anemoe_gates::residency::Verdicts;
use anemoe_gates::residency::rule::Conditions;
use anemoe_hub::HubSpec;
use anyhow::{Context, bail};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Chips whose speed is predicted.
const CHIPS: [&str; 6] = ["m1", "m2", "m3", "m4", "m4-pro", "m4-max"];

/// Speeds by form and chip.
#[derive(Serialize)]
pub struct Speeds {
    pub chips: Vec<String>,
    /// Forms, the bundle's own first.
    pub forms: Vec<FormSpeed>,
    /// Checkpoint that gave the shapes of the other forms.
    pub checkpoint: Option<String>,
    /// Reason why there are no other forms.
    pub missing: Option<String>,
}

/// Predicts the speed of the bundle, and of each form of `given`, the checkpoint that the user named. Without it the
/// checkpoint that the build recorded is used, if it is still in its place.
///
/// # Errors
/// A package cannot be read, or the checkpoint that the user names is not the bundle's.
pub fn speeds(
    bundle: &Path,
    chain: &Chain,
    verdicts: Verdicts,
    events: &[Event],
    given: Option<&Path>,
    ui: &Ui,
) -> anyhow::Result<Speeds> {
    let chips: Vec<ChipProfile> = CHIPS.iter().filter_map(|name| ChipProfile::named(name).ok()).collect();
    let own = FormSpeed::as_built(chain, &open_packages(bundle, chain)?, &chips, verdicts);
    let others = |path: &Path| other_forms(bundle, chain, path, &chips, ui);
    let (path, found) = match given {
        Some(path) => {
            let what = || format!("--checkpoint {}", path.display());
            (Some(path.to_path_buf()), Ok(others(path).with_context(what)?))
        }
        None => match recorded(events) {
            Ok(path) => (Some(path.clone()), others(&path).map_err(|e| sentence(&e))),
            Err(why) => (None, Err(why)),
        },
    };
    Ok(Speeds {
        chips: chips.iter().map(|c| c.chip.clone()).collect(),
        checkpoint: path.filter(|_| found.is_ok()).map(|path| path.display().to_string()),
        missing: found.as_ref().err().cloned(),
        forms: std::iter::once(own).chain(found.unwrap_or_default()).collect(),
    })
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

fn other_forms(
    bundle: &Path,
    chain: &Chain,
    path: &Path,
    chips: &[ChipProfile],
    ui: &Ui,
) -> anyhow::Result<Vec<FormSpeed>> {
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
    // The first form is the bundle's own.
    let forms = forms::all(family.as_ref(), &plan.options, &setting);
    bar.finish_and_clear();
    Ok(forms.into_iter().skip(1).map(FormSpeed::from).collect())
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
