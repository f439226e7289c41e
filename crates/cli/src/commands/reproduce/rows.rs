//! Table of a recipe: the book's figures, ours, and verdicts.

use super::figure::FigureNeeds;
use super::recipe::{Recipe, RecipeCommand, RecipeFigure};
use super::recipe_run::{BuildRun, RunRecord};
use serde::Serialize;
use serde_json::Value;

// Verdicts.
const AGREES: &str = "agrees";
const DIFFERS: &str = "differs";
const NEEDS_MAC: &str = "needs a Mac";
const NEEDS_WEIGHTS: &str = "needs the real weights";
const NOT_RUN: &str = "not run";

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
    pub verdict: &'static str,
    pub why: String,
    /// True if the figure agrees, was not compared, or differs as the recipe says.
    pub explained: bool,
    /// The book's figure and ours, as they are shown.
    #[serde(skip)]
    pub shown: [String; 2],
}

impl FigureRow {
    /// Returns the cells of the row in a table; `names_build` where several builds are in it.
    pub fn cells(&self, names_build: bool) -> Vec<String> {
        let of = if names_build { format!("{}: ", self.build) } else { String::new() };
        let colon = if self.why.is_empty() { "" } else { ": " };
        let said = format!("{}{colon}{}", self.verdict, self.why);
        let [book, ours] = self.shown.clone();
        vec![of + self.figure, self.unit.into(), book, ours, said]
    }
}

/// Makes the rows of a recipe from what its gates left.
pub(super) fn rows(recipe: &Recipe, record: &RunRecord, builds: &[BuildRun<'_>]) -> Vec<FigureRow> {
    let row = |of: &RecipeFigure| {
        let run = builds.iter().find(|run| run.build.name == recipe.build_of(of))?;
        let found = record.figure(&run.build.name, &of.figure.name, &of.figure.gates);
        let (verdict, why) = judge(of, found, run);
        let ours = found.filter(|_| verdict != NEEDS_MAC);
        let expected = of.ours.as_ref().zip(ours).is_some_and(|(bound, x)| of.figure.keeps(bound, x));
        let ours_shown = ours.map_or_else(|| "-".into(), |x| of.figure.show(x));
        Some(FigureRow {
            figure: &of.figure.name,
            unit: &of.figure.unit,
            build: run.build.name.clone(),
            book: of.book.to_json(),
            from: of.from.clone(),
            ours,
            verdict,
            why,
            explained: expected || verdict != DIFFERS,
            shown: [of.book.text.clone(), ours_shown],
        })
    };
    recipe.figures.iter().filter_map(row).collect()
}

/// Compares what was found with the book's figure. A prediction or a figure of this processor is no figure of the Neural
/// Engine.
fn judge(f: &RecipeFigure, found: Option<f64>, run: &BuildRun<'_>) -> (&'static str, String) {
    let why = f.why().to_string();
    let join = |said: &str| if why.is_empty() { said.to_string() } else { format!("{said}; {why}") };
    let (is_synthetic, reason) = (run.source.is_synthetic, run.unfinished.as_deref());
    match (f.needs(), found) {
        (FigureNeeds::Mac, None) => (NEEDS_MAC, why),
        (FigureNeeds::Mac, Some(x)) => {
            let here = match run.source.layers {
                _ if f.figure.gates.contains(&RecipeCommand::Plan) => "predicted here".to_string(),
                Some(layers) => format!("on this CPU, {layers} of the model's layers"),
                None => "on this CPU".into(),
            };
            (NEEDS_MAC, join(&format!("{here}: {} {}", f.figure.show(x), f.figure.unit)))
        }
        (FigureNeeds::Weights, None) if is_synthetic => (NEEDS_WEIGHTS, reason.map_or(why.clone(), join)),
        (FigureNeeds::Weights, _) if is_synthetic => (NEEDS_WEIGHTS, why),
        (_, None) => (NOT_RUN, reason.unwrap_or("no gate of the recipe brought it").into()),
        (_, Some(x)) if f.figure.keeps(&f.book, x) => (AGREES, String::new()),
        // A reason without a figure of ours is about other weights or another machine.
        (_, Some(x)) => {
            let by = (x / f.ours.as_ref().unwrap_or(&f.book).value - 1.0) * 100.0;
            let by = if by.is_finite() { format!("by {by:+.1} %, ") } else { String::new() };
            let said = match &f.ours {
                Some(ours) if f.figure.keeps(ours, x) => why,
                Some(ours) => format!("{by}not explained, which would be {} here: {why}", ours.text),
                None => format!("{by}not explained"),
            };
            (DIFFERS, said)
        }
    }
}
