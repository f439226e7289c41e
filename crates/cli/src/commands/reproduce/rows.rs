//! Table of a recipe: the book's figures, ours, and verdicts.

use super::command::GateCommand;
use super::recipe::{Recipe, RecipeFigure};
use super::run_record::RunRecord;
use super::source::Source;
use crate::registry::{Bound, FigureNeeds};
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::collections::BTreeMap;

/// Verdict of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowVerdict {
    Agrees,
    Differs,
    NeedsMac,
    NeedsWeights,
    NotRun,
}

impl RowVerdict {
    pub const fn name(self) -> &'static str {
        match self {
            RowVerdict::Agrees => "agrees",
            RowVerdict::Differs => "differs",
            RowVerdict::NeedsMac => "needs a Mac",
            RowVerdict::NeedsWeights => "needs the real weights",
            RowVerdict::NotRun => "not run",
        }
    }
}

fn verdict_name<S: Serializer>(verdict: &RowVerdict, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(verdict.name())
}

/// One figure of a recipe.
#[derive(Serialize)]
pub(super) struct FigureRow {
    pub figure: &'static str,
    pub unit: &'static str,
    pub build: String,
    pub book: Value,
    /// Source of the book's figure.
    pub from: String,
    pub ours: Option<f64>,
    #[serde(serialize_with = "verdict_name")]
    pub verdict: RowVerdict,
    pub why: String,
    #[serde(skip)]
    pub book_text: String,
    #[serde(skip)]
    pub ours_text: String,
    #[serde(skip)]
    explained: bool,
}

impl FigureRow {
    /// Tells whether the figure agrees, was not compared, or differs for a reason that the recipe gives.
    pub fn is_explained(&self) -> bool {
        self.verdict != RowVerdict::Differs || self.explained
    }
}

/// Makes the rows of a recipe from the documents of its commands. `reasons` says why a build's gates did not all run.
pub(super) fn rows(
    recipe: &Recipe,
    record: &RunRecord,
    sources: &[Source],
    reasons: &BTreeMap<&str, String>,
) -> Vec<FigureRow> {
    let row = |f: &RecipeFigure| {
        let build = recipe.builds[f.build].name.as_str();
        let read = |gate: &GateCommand| f.figure.read(gate.name(), record.get(build, *gate)?);
        // In the registry's order of commands, the most telling first.
        let mut gates = recipe.gates.clone();
        let place = |g: &GateCommand| f.figure.commands().position(|c| c == g.name());
        gates.sort_by_key(|g| place(g).unwrap_or(usize::MAX));
        let found = gates.iter().find_map(read);
        let source = &sources[f.build];
        let (ours, verdict, why) = judge(f, found, source, reasons.get(build).map(String::as_str));
        FigureRow {
            figure: f.figure.name,
            unit: f.figure.unit,
            build: build.into(),
            book: f.book.to_json(),
            from: f.from.clone(),
            ours,
            verdict,
            why,
            book_text: f.book.text().into(),
            ours_text: ours.map_or_else(|| "-".into(), |x| f.figure.show(x)),
            explained: f.ours.as_ref().zip(ours).is_some_and(|(bound, x)| bound.holds(x)),
        }
    };
    recipe.figures.iter().map(row).collect()
}

fn judge(
    f: &RecipeFigure,
    found: Option<f64>,
    source: &Source,
    reason: Option<&str>,
) -> (Option<f64>, RowVerdict, String) {
    // A recipe's own reason comes before the general reason of the figure.
    let why = f.why.clone().unwrap_or_else(|| f.figure.needs_because(f.needs).to_string());
    let join = |said: String| if why.is_empty() { said } else { format!("{said}; {why}") };
    let by = |x: f64, from: &Bound| {
        let by = (x / from.value - 1.0) * 100.0;
        if by.is_finite() { format!("by {by:+.1} %, not explained") } else { "not explained".into() }
    };
    let shown = found.map(|x| format!("{} {}", f.figure.show(x), f.figure.unit));
    // Placement is predicted; speed is measured on this processor.
    let predicts = f.figure.commands().any(|c| c == GateCommand::Plan.name());
    let here = match source.layers {
        _ if predicts => "predicted here".to_string(),
        Some(layers) => format!("on this CPU, {layers} of the model's layers"),
        None => "on this CPU".into(),
    };
    match (f.needs, found) {
        // A prediction or a figure of this processor is no figure of the Neural Engine.
        (FigureNeeds::Mac, _) => {
            (None, RowVerdict::NeedsMac, shown.map_or(why.clone(), |s| join(format!("{here}: {s}"))))
        }
        (FigureNeeds::Weights, None) if source.is_synthetic => {
            (None, RowVerdict::NeedsWeights, reason.map_or(why.clone(), |r| join(r.to_string())))
        }
        (FigureNeeds::Weights, _) if source.is_synthetic => (found, RowVerdict::NeedsWeights, why),
        (_, None) => {
            let reason = reason.unwrap_or("no gate of the recipe brought it");
            (None, RowVerdict::NotRun, reason.into())
        }
        (_, Some(x)) if f.book.holds(x) => (found, RowVerdict::Agrees, String::new()),
        (_, Some(x)) => {
            let said = match &f.ours {
                Some(ours) if ours.holds(x) => why,
                Some(ours) => format!("{}, which would be {} here: {why}", by(x, ours), ours.text()),
                // A reason without a figure of ours is about other weights or another machine.
                None => by(x, &f.book),
            };
            (found, RowVerdict::Differs, said)
        }
    }
}
