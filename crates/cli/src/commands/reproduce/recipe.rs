//! Recipes: experiments as files. `docs/recipes.md` describes the format.

use super::figure::{Bound, Figure, FigureNeeds};
use crate::args::planning::PlanArgs;
use crate::command::parser;
use crate::error_report::sentence;
use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Deserializer, Serialize, de::Error};
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

/// Command that brings figures, in the order in which gates run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RecipeCommand {
    #[default]
    Plan,
    Build,
    Check,
    Validate,
    Trace,
    Generate,
    Bench,
}

/// Options that a recipe may give, besides those of plans: none that writes outside the folder of the run, sends something
/// away, or replaces what the recipe says.
const OPTIONS: &str = "against all backend checkpoint chip context decode device draft-max evidence exact fast golden \
    ignore-eos importance jobs max-loaded max-memory min-cosine ngram-corpus ngram-max ngram-min no-fuse no-journal \
    no-verify note ops precision prefill prefill-chunk probe-layers probe-seed probes repetitions report seed sequences \
    shards skip-gates speculate states strict swap system temperature timeout top-k top-p units verify-tokens";

impl RecipeCommand {
    /// Returns the name on the command line.
    pub const fn name(self) -> &'static str {
        ["plan", "build", "check", "validate", "trace", "generate", "bench"][self as usize]
    }

    /// Tells whether the command reads the bundle that `build` makes.
    pub fn needs_bundle(self) -> bool {
        self > RecipeCommand::Build
    }

    /// Checks that the words of a recipe are options that it may give.
    fn check_options(self, words: &[String]) -> anyhow::Result<()> {
        let of_plan = parser::<PlanArgs>("plan");
        let is_allowed = |name: &str| {
            let of_plan = || of_plan.get_arguments().any(|a| a.get_long() == Some(name));
            OPTIONS.split_whitespace().any(|allowed| allowed == name) || !self.needs_bundle() && of_plan()
        };
        let mut takes_value = false;
        for word in words {
            let name = word.strip_prefix("--").map(|rest| rest.split('=').next().unwrap_or(rest));
            ensure!(
                name.map_or(takes_value && !word.starts_with('-'), is_allowed),
                "`{}` for `{}`: a recipe gives options as --NAME=VALUE, and none that names outputs or stores: what it makes is in \
                 the folder of the run",
                word.escape_debug(),
                self.name()
            );
            takes_value = name.is_some() && !word.contains('=');
        }
        Ok(())
    }
}

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
    pub gates: BTreeSet<RecipeCommand>,
    #[serde(default)]
    pub options: BTreeMap<RecipeCommand, Vec<String>>,
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
    /// Options of single gates, which follow those of the recipe.
    #[serde(default)]
    pub gates: BTreeMap<RecipeCommand, Vec<String>>,
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

    /// Returns the reason why another source or machine gives another figure: the recipe's own before the figure's.
    pub fn why(&self) -> &str {
        self.why.as_deref().unwrap_or_else(|| self.figure.needs_because(self.needs()))
    }

    fn check(&self, recipe: &Recipe) -> anyhow::Result<()> {
        let Figure { unit, gates, .. } = self.figure;
        let given = self.unit.as_ref().with_context(|| format!("it has no unit; it is given in {unit}"))?;
        ensure!(given == unit, "it is given in {unit}, not in {given}");
        let builds: Vec<&str> = recipe.builds.iter().map(|b| b.name.as_str()).collect();
        let build = recipe.build_of(self);
        ensure!(builds.contains(&build), "no build is named `{build}`; there are: {}", builds.join(", "));
        let names: Vec<&str> = gates.iter().map(|g| g.name()).collect();
        let is_brought = gates.iter().any(|g| recipe.gates.contains(g));
        ensure!(is_brought, "it comes from {}, and none of these is among the gates", names.join(", "));
        let (has_why, has_ours) = (self.why.is_some(), self.ours.is_some());
        ensure!(has_why || !has_ours, "ours without why: say why it is another one than the book's");
        let may_lack_ours = has_ours || !has_why || self.needs() != FigureNeeds::Nothing;
        ensure!(may_lack_ours, "why without ours: a reason explains one difference, so say what ours is");
        Ok(())
    }
}

fn one() -> usize {
    1
}

fn known_figure<'de, D: Deserializer<'de>>(text: D) -> Result<&'static Figure, D::Error> {
    Figure::find(&String::deserialize(text)?).map_err(D::Error::custom)
}

/// Reads every built-in recipe.
pub(super) fn built_in() -> anyhow::Result<Vec<Recipe>> {
    BUILT_IN.iter().map(|(name, text)| Recipe::parse(name, text)).collect()
}

/// Opens the built-in recipe of this name, or the recipe in this file.
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
        ensure!(!self.builds.is_empty(), "there is no [[builds]]: a recipe builds its source at least once");
        ensure!(self.layers > 0, "layers = 0: a model has at least one");
        for (i, RecipeBuild { name, options, gates, .. }) in self.builds.iter().enumerate() {
            let is_plain = name.chars().all(|c: char| c.is_ascii_alphanumeric() || "-_.".contains(c));
            let fits = is_plain && !name.is_empty() && !name.starts_with('.');
            ensure!(fits, "build `{name}`: a name has letters, digits, `-`, `_` and `.`");
            ensure!(self.builds[..i].iter().all(|b| b.name != *name), "two builds are named `{name}`");
            let mut all = gates.iter().chain([(&RecipeCommand::Build, options)]);
            all.try_for_each(|(gate, words)| gate.check_options(words))
                .with_context(|| format!("build `{name}`"))?;
        }
        self.options.iter().try_for_each(|(gate, words)| gate.check_options(words)).context("[options]")?;
        for gate in self.gates.iter().filter(|gate| gate.needs_bundle()) {
            let (name, is_built) = (gate.name(), self.gates.contains(&RecipeCommand::Build));
            ensure!(is_built, "gate `{name}` needs the bundle that `build` makes, which is no gate here");
            // A prompt, or a golden of one.
            let has_prompt =
                matches!(gate, RecipeCommand::Check | RecipeCommand::Bench) || !self.prompt_ids.is_empty();
            ensure!(has_prompt, "gate `{name}` needs prompt_ids");
        }
        let mut figures = self.figures.iter();
        figures.try_for_each(|f| f.check(self).with_context(|| format!("figure `{}`", f.figure.name)))
    }

    /// Returns the name of a figure's build: the first one, if the recipe names none.
    pub fn build_of<'a>(&'a self, f: &'a RecipeFigure) -> &'a str {
        f.build.as_deref().unwrap_or(&self.builds[0].name)
    }
}
