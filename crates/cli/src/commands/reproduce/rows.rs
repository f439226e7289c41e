//! Table of a recipe: the book's figures, ours, and verdicts.

use super::command::GateCommand;
use super::figure::FigureNeeds;
use super::recipe::{Recipe, RecipeFigure};
use super::run_record::RunRecord;
use super::source::Source;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Verdict of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(into = "&'static str")]
pub enum RowVerdict {
    Agrees,
    Differs,
    NeedsMac,
    NeedsWeights,
    NotRun,
}

impl From<RowVerdict> for &'static str {
    fn from(verdict: RowVerdict) -> &'static str {
        ["agrees", "differs", "needs a Mac", "needs the real weights", "not run"][verdict as usize]
    }
}

/// One figure of a recipe.
#[derive(Serialize)]
pub struct FigureRow {
    pub figure: &'static str,
    pub unit: &'static str,
    pub build: String,
    pub book: Value,
    /// Source of the book's figure.
    pub from: String,
    pub ours: Option<f64>,
    pub verdict: RowVerdict,
    pub why: String,
    /// True if the figure agrees, was not compared, or differs as the recipe says.
    pub explained: bool,
    /// The book's figure and ours, as they are shown.
    #[serde(skip)]
    pub shown: [String; 2],
}

/// Makes the rows of a recipe from what its gates left. `reasons` says why a build's gates did not all run.
pub(super) fn rows(
    recipe: &Recipe,
    record: &RunRecord,
    sources: &[Source],
    reasons: &BTreeMap<&str, String>,
) -> Vec<FigureRow> {
    let row = |of: &RecipeFigure| {
        let index = recipe.build_of(of).unwrap_or(0);
        let build = recipe.builds[index].name.as_str();
        let left = of.figure.gates.iter().filter_map(|gate| record.get(build, *gate));
        let found = left.filter_map(|left| left.figures.0.get(&of.figure.name)).next().copied();
        let (ours, verdict, why) = judge(of, found, &sources[index], reasons.get(build).map(String::as_str));
        let expected = of.ours.as_ref().zip(ours).is_some_and(|(bound, x)| of.figure.keeps(bound, x));
        let explained = expected || verdict != RowVerdict::Differs;
        let (figure, unit) = (&of.figure.name, &of.figure.unit);
        let ours_shown = ours.map_or_else(|| "-".into(), |x| of.figure.show(x));
        FigureRow {
            figure,
            unit,
            build: build.into(),
            book: of.book.to_json(),
            from: of.from.clone(),
            ours,
            verdict,
            why,
            explained,
            shown: [of.book.text.clone(), ours_shown],
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
    let why = f.why.clone().unwrap_or_else(|| f.figure.needs_because(f.needs()).to_string());
    let join = |said: &str| if why.is_empty() { said.to_string() } else { format!("{said}; {why}") };
    match (f.needs(), found) {
        // A prediction or a figure of this processor is no figure of the Neural Engine.
        (FigureNeeds::Mac, None) => (None, RowVerdict::NeedsMac, why),
        (FigureNeeds::Mac, Some(x)) => {
            let here = match source.layers {
                _ if f.figure.gates.contains(&GateCommand::Plan) => "predicted here".to_string(),
                Some(layers) => format!("on this CPU, {layers} of the model's layers"),
                None => "on this CPU".into(),
            };
            let shown = format!("{here}: {} {}", f.figure.show(x), f.figure.unit);
            (None, RowVerdict::NeedsMac, join(&shown))
        }
        (FigureNeeds::Weights, None) if source.is_synthetic => {
            (None, RowVerdict::NeedsWeights, reason.map_or(why.clone(), join))
        }
        (FigureNeeds::Weights, _) if source.is_synthetic => (found, RowVerdict::NeedsWeights, why),
        (_, None) => (None, RowVerdict::NotRun, reason.unwrap_or("no gate of the recipe brought it").into()),
        (_, Some(x)) if f.figure.keeps(&f.book, x) => (found, RowVerdict::Agrees, String::new()),
        // A reason without a figure of ours is about other weights or another machine.
        (_, Some(x)) => {
            let by = (x / f.ours.as_ref().unwrap_or(&f.book).value - 1.0) * 100.0;
            let by = if by.is_finite() { format!("by {by:+.1} %, ") } else { String::new() };
            let said = match &f.ours {
                Some(ours) if f.figure.keeps(ours, x) => why,
                Some(ours) => format!("{by}not explained, which would be {} here: {why}", ours.text),
                None => format!("{by}not explained"),
            };
            (found, RowVerdict::Differs, said)
        }
    }
}
