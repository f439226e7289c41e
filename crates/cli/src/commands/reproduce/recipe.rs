//! Recipes: experiments as files. `docs/recipes.md` describes the format.

use super::command::GateCommand;
use super::figure::{Bound, Figure, FigureNeeds};
use crate::error_report::sentence;
use anyhow::{Context, bail};
use serde::{Deserialize, Deserializer, de::Error};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Recipes that come with the program, by name; their files are in `recipes/` of the repository.
const BUILT_IN: [(&str, &str); 7] = [
    ("exp-34", include_str!("../../../../../recipes/exp-34.toml")),
    ("exp-35", include_str!("../../../../../recipes/exp-35.toml")),
    ("t4.1.2", include_str!("../../../../../recipes/t4.1.2.toml")),
    ("t4.1.3", include_str!("../../../../../recipes/t4.1.3.toml")),
    ("t4.3", include_str!("../../../../../recipes/t4.3.toml")),
    ("exp-36", include_str!("../../../../../recipes/exp-36.toml")),
    ("l0-probe", include_str!("../../../../../recipes/l0-probe.toml")),
];

/// Other names of built-in recipes.
const ALIASES: [(&str, &str); 2] = [("t4.4", "exp-36"), ("l0", "l0-probe")];

/// Largest recipe that is read, in bytes; a recipe has a few kilobytes, and its rows have to fit a line of a journal.
const MAX_RECIPE_BYTES: u64 = 64 << 10;

/// A recipe.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Recipe {
    #[serde(skip)]
    pub name: String,
    /// Hash of all that decides what runs.
    #[serde(skip)]
    pub sha256: String,
    pub title: String,
    pub intent: String,
    pub lesson: Option<String>,
    pub source: PathBuf,
    pub family: Option<String>,
    /// Layers of a synthetic source that are built by default.
    #[serde(default = "one")]
    pub layers: usize,
    #[serde(default)]
    pub prompt_ids: Vec<u32>,
    #[serde(default = "one")]
    pub new_tokens: usize,
    pub gates: BTreeSet<GateCommand>,
    #[serde(default)]
    pub options: BTreeMap<GateCommand, Vec<String>>,
    pub builds: Vec<RecipeBuild>,
    pub figures: Vec<RecipeFigure>,
}

/// One way to build the source.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RecipeBuild {
    pub name: String,
    /// Options of the plan, as on the command line of `plan` and `build`.
    #[serde(default)]
    pub options: Vec<String>,
    /// Source of this build, if it is not the recipe's; `--checkpoint` does not replace it.
    pub source: Option<PathBuf>,
    /// Tokens of this build's prompt, if it is not the recipe's.
    #[serde(default)]
    pub prompt_ids: Vec<u32>,
    /// Options of single gates, which follow those of the recipe.
    #[serde(default)]
    pub gates: BTreeMap<GateCommand, Vec<String>>,
}

/// A figure of the book, or an expectation.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RecipeFigure {
    #[serde(deserialize_with = "known_figure")]
    pub figure: &'static Figure,
    unit: Option<String>,
    pub book: Bound,
    /// Name of the figure's build, if it is not the first.
    build: Option<String>,
    /// Source of the book's figure.
    pub from: String,
    /// Reason why our figure differs from the book's, if it is known.
    pub why: Option<String>,
    /// Our expected figure: the reason explains this difference, and no other.
    pub ours: Option<Bound>,
    needs: Option<FigureNeeds>,
}

impl RecipeFigure {
    /// Returns the need of the figure, in this recipe.
    pub fn needs(&self) -> FigureNeeds {
        self.needs.unwrap_or(self.figure.needs)
    }
}

fn one() -> usize {
    1
}

fn known_figure<'de, D: Deserializer<'de>>(text: D) -> Result<&'static Figure, D::Error> {
    Figure::find(&String::deserialize(text)?).map_err(D::Error::custom)
}

/// Reads every built-in recipe.
///
/// # Errors
/// A recipe is wrong; a test reads them all.
pub(super) fn built_in() -> anyhow::Result<Vec<Recipe>> {
    BUILT_IN.iter().map(|(name, text)| Recipe::parse(name, text)).collect()
}

/// Opens the built-in recipe of this name, or the recipe in this file.
///
/// # Errors
/// Neither exists, or the recipe is wrong.
pub(super) fn open(wanted: &Path) -> anyhow::Result<Recipe> {
    let name = wanted.to_string_lossy().to_lowercase().replace([' ', '_'], "-");
    let name = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name.as_str(), |(_, name)| name);
    if let Some((name, text)) = BUILT_IN.iter().find(|(known, _)| *known == name) {
        return Recipe::parse(name, text);
    }
    if !wanted.exists() {
        let known: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
        bail!("{}: neither a file nor a recipe; there are: {}", wanted.display(), known.join(", "));
    }
    let text = anemoe_io::read_text(wanted, MAX_RECIPE_BYTES).map_err(|e| anemoe_io::Error::io(wanted, e))?;
    let stem = wanted.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let parsed = Recipe::parse(&stem, &text);
    Ok(parsed.map_err(|e| anemoe_io::Error::invalid(wanted, format!("recipe: {}", sentence(&e))))?)
}

impl Recipe {
    pub fn parse(name: &str, text: &str) -> anyhow::Result<Recipe> {
        let mut recipe: Recipe = toml::from_str(text).map_err(|e| {
            // The message names the line; toml's excerpt of the file is left out.
            let line = e.span().map(|s| text[..s.start.min(text.len())].matches('\n').count() + 1);
            let place = line.map(|n| format!("line {n}: ")).unwrap_or_default();
            anyhow::anyhow!("{place}{}", e.message().trim())
        })?;
        recipe.check()?;
        // Prose and figures may be written later: they change nothing that runs.
        let mut table: toml::Table = toml::from_str(text)?;
        table.retain(|key, _| !["title", "intent", "lesson", "figures"].contains(&key));
        (recipe.name, recipe.sha256) = (name.into(), anemoe_bundle::sha256(table.to_string().as_bytes()));
        Ok(recipe)
    }

    fn check(&self) -> anyhow::Result<()> {
        if self.builds.is_empty() {
            bail!("there is no [[builds]]: a recipe builds its source at least once");
        }
        if self.layers == 0 {
            bail!("layers = 0: a model has at least one");
        }
        for (i, build) in self.builds.iter().enumerate() {
            let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            if build.name.is_empty() || !build.name.chars().all(fits) || build.name.starts_with('.') {
                bail!("build `{}`: a name has letters, digits, `-`, `_` and `.`", build.name);
            }
            if self.builds[..i].iter().any(|b| b.name == build.name) {
                bail!("two builds are named `{}`", build.name);
            }
            let all = build.gates.iter().chain([(&GateCommand::Build, &build.options)]);
            for (gate, words) in all {
                gate.check_options(words).with_context(|| format!("build `{}`", build.name))?;
            }
        }
        for (gate, words) in &self.options {
            gate.check_options(words).context("[options]")?;
        }
        let bare = self.prompt_ids.is_empty() && self.builds.iter().any(|b| b.prompt_ids.is_empty());
        for gate in &self.gates {
            if gate.needs_bundle() && !self.gates.contains(&GateCommand::Build) {
                bail!(
                    "gate `{}` needs the bundle that `build` makes, which is not among the gates",
                    gate.name()
                );
            }
            if gate.needs_prompt() && bare {
                bail!("gate `{}` needs prompt_ids", gate.name());
            }
        }
        self.figures
            .iter()
            .try_for_each(|f| self.check_figure(f).with_context(|| format!("figure `{}`", f.figure.name)))
    }

    fn check_figure(&self, f: &RecipeFigure) -> anyhow::Result<()> {
        let Figure { unit, gates, .. } = f.figure;
        match &f.unit {
            None => bail!("it has no unit; it is given in {unit}"),
            Some(given) if given != unit => bail!("it is given in {unit}, not in {given}"),
            Some(_) => {}
        }
        if let Some(wanted) = f.build.as_ref().filter(|_| self.build_of(f).is_none()) {
            let names: Vec<&str> = self.builds.iter().map(|b| b.name.as_str()).collect();
            bail!("no build is named `{wanted}`; there are: {}", names.join(", "));
        }
        if !gates.iter().any(|g| self.gates.contains(g)) {
            let names: Vec<&str> = gates.iter().map(|g| g.name()).collect();
            bail!("it comes from {}, and none of these is among the gates", names.join(", "));
        }
        match (&f.why, &f.ours) {
            (None, Some(_)) => bail!("ours without why: say why it is another one than the book's"),
            (Some(_), None) if f.needs() == FigureNeeds::Nothing => {
                bail!("why without ours: a reason explains one difference, so say what ours is")
            }
            _ => Ok(()),
        }
    }

    /// Returns the index of a figure's build; none if there is no such build.
    pub fn build_of(&self, f: &RecipeFigure) -> Option<usize> {
        f.build.as_ref().map_or(Some(0), |name| self.builds.iter().position(|b| b.name == *name))
    }
}
