//! Recipes: experiments as files. `docs/recipes.md` describes the format.

use super::command::GateCommand;
use crate::error_report::sentence;
use crate::registry::{self, Bound, Figure, FigureNeeds};
use anyhow::{Context, bail};
use serde::Deserialize;
use std::collections::BTreeMap;
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

/// Largest recipe that is read, in bytes; a recipe has a few kilobytes.
const MAX_RECIPE_BYTES: u64 = 1 << 20;

/// A recipe, read and checked.
pub(super) struct Recipe {
    pub name: String,
    /// Text of the file, for [`super::record`].
    pub text: String,
    pub title: String,
    pub intent: String,
    pub lesson: Option<String>,
    pub source: PathBuf,
    pub family: Option<String>,
    /// Layers of a synthetic source that are built by default.
    pub layers: usize,
    pub prompt_ids: Vec<u32>,
    pub new_tokens: usize,
    pub gates: Vec<GateCommand>,
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

/// A figure of the book.
pub(super) struct RecipeFigure {
    pub figure: &'static Figure,
    pub book: Bound,
    /// Index of the figure's build.
    pub build: usize,
    pub from: String,
    /// Reason why our figure differs from the book's, if it is known.
    pub why: Option<String>,
    /// Our expected figure: the reason explains this difference, and no other.
    pub ours: Option<Bound>,
    pub needs: FigureNeeds,
}

/// Fields of a recipe's file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RecipeText {
    title: String,
    intent: String,
    lesson: Option<String>,
    source: PathBuf,
    family: Option<String>,
    #[serde(default = "one")]
    layers: usize,
    #[serde(default)]
    prompt_ids: Vec<u32>,
    #[serde(default = "one")]
    new_tokens: usize,
    gates: Vec<GateCommand>,
    #[serde(default)]
    options: BTreeMap<GateCommand, Vec<String>>,
    builds: Vec<RecipeBuild>,
    figures: Vec<FigureText>,
}

fn one() -> usize {
    1
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FigureText {
    figure: String,
    unit: Option<String>,
    book: toml::Value,
    build: Option<String>,
    from: String,
    why: Option<String>,
    ours: Option<toml::Value>,
    needs: Option<FigureNeeds>,
}

/// Reads every built-in recipe.
///
/// # Errors
/// A recipe is wrong; a test reads them all.
pub(super) fn built_in() -> anyhow::Result<Vec<Recipe>> {
    BUILT_IN.iter().map(|(name, text)| parse(name, text)).collect()
}

/// Opens the built-in recipe of this name, or the recipe in this file.
///
/// # Errors
/// Neither exists, or the recipe is wrong.
pub(super) fn open(wanted: &Path) -> anyhow::Result<Recipe> {
    let name = wanted.to_string_lossy().to_lowercase().replace([' ', '_'], "-");
    let name = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name.as_str(), |(_, name)| name);
    if let Some((name, text)) = BUILT_IN.iter().find(|(known, _)| *known == name) {
        return parse(name, text);
    }
    if !wanted.exists() {
        let known: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
        bail!("{}: neither a file nor a recipe; there are: {}", wanted.display(), known.join(", "));
    }
    let text = anemoe_io::read_text(wanted, MAX_RECIPE_BYTES).map_err(|e| anemoe_io::Error::io(wanted, e))?;
    let stem = wanted.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let parsed = parse(&stem, &text)
        .map_err(|e| anemoe_io::Error::invalid(wanted, format!("recipe: {}", sentence(&e))));
    Ok(parsed?)
}

fn parse(name: &str, text: &str) -> anyhow::Result<Recipe> {
    let read: RecipeText = toml::from_str(text).map_err(|e| {
        // The message names the line; toml's excerpt of the file is left out.
        let line = e.span().map(|s| text[..s.start.min(text.len())].matches('\n').count() + 1);
        let place = line.map(|n| format!("line {n}: ")).unwrap_or_default();
        anyhow::anyhow!("{place}{}", e.message().trim())
    })?;
    if read.builds.is_empty() {
        bail!("there is no [[builds]]: a recipe builds its source at least once");
    }
    for (i, build) in read.builds.iter().enumerate() {
        let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if build.name.is_empty() || !build.name.chars().all(fits) || build.name.starts_with('.') {
            bail!("build `{}`: a name has letters, digits, `-`, `_` and `.`", build.name);
        }
        if read.builds[..i].iter().any(|b| b.name == build.name) {
            bail!("two builds are named `{}`", build.name);
        }
        let of_build = || format!("build `{}`", build.name);
        GateCommand::Build.check_options(&build.options).with_context(of_build)?;
        build.gates.iter().try_for_each(|(gate, words)| gate.check_options(words)).with_context(of_build)?;
    }
    if read.layers == 0 {
        bail!("layers = 0: a model has at least one");
    }
    read.options.iter().try_for_each(|(gate, words)| gate.check_options(words)).context("[options]")?;
    check_order(&read.gates)?;
    let needs_prompt = |g: &GateCommand| g.needs_golden() || *g == GateCommand::Generate;
    let without = || read.prompt_ids.is_empty() && read.builds.iter().any(|b| b.prompt_ids.is_empty());
    if let Some(gate) = read.gates.iter().find(|g| needs_prompt(g) && without()) {
        bail!("gate `{}` needs prompt_ids", gate.name());
    }
    let figures = read.figures.iter().map(|f| figure(f, &read.builds, &read.gates));
    Ok(Recipe {
        name: name.into(),
        text: text.into(),
        figures: figures.collect::<anyhow::Result<_>>()?,
        title: read.title,
        intent: read.intent,
        lesson: read.lesson,
        source: read.source,
        family: read.family,
        layers: read.layers,
        prompt_ids: read.prompt_ids,
        new_tokens: read.new_tokens,
        gates: read.gates,
        options: read.options,
        builds: read.builds,
    })
}

/// Checks that no gate stands twice, and that gates that read the bundle follow `build`.
fn check_order(gates: &[GateCommand]) -> anyhow::Result<()> {
    if let Some((_, twice)) = gates.iter().enumerate().find(|(i, g)| gates[..*i].contains(g)) {
        bail!("gates: `{}` stands twice, and every gate runs once for each build", twice.name());
    }
    let built = gates.iter().position(|g| *g == GateCommand::Build);
    let early = gates[..built.unwrap_or(gates.len())].iter().find(|g| g.needs_bundle());
    let Some(early) = early else { return Ok(()) };
    let (after, mut order): (Vec<GateCommand>, Vec<GateCommand>) =
        gates.iter().copied().partition(|g| g.needs_bundle());
    if built.is_none() {
        order.push(GateCommand::Build);
    }
    order.extend(after);
    let order: Vec<String> = order.iter().map(|g| format!("\"{}\"", g.name())).collect();
    let place = if built.is_some() { "stands before `build`" } else { "stands in a recipe without `build`" };
    bail!(
        "gates: `{}` {place}, and needs the bundle that `build` makes; a possible order is: gates = [{}]",
        early.name(),
        order.join(", ")
    )
}

fn figure(f: &FigureText, builds: &[RecipeBuild], gates: &[GateCommand]) -> anyhow::Result<RecipeFigure> {
    let known = registry::find(&f.figure).map_err(anyhow::Error::msg)?;
    let name = known.name;
    match &f.unit {
        None => bail!("figure `{name}` has no unit; it is given in {}", known.unit),
        Some(unit) if unit != known.unit => {
            bail!("figure `{name}` is given in {}, not in {unit}", known.unit)
        }
        Some(_) => {}
    }
    let bound = |key: &str, value: &toml::Value| {
        let text = match value {
            toml::Value::String(text) => text.clone(),
            toml::Value::Integer(n) => n.to_string(),
            toml::Value::Float(x) => x.to_string(),
            _ => {
                bail!("figure `{name}`: {key} is neither a number nor a text such as \"101.2\" or \">=0.97\"")
            }
        };
        known.bound(&text).map_err(anyhow::Error::msg).with_context(|| format!("figure `{name}`: {key}"))
    };
    let book = bound("book", &f.book)?;
    let ours = f.ours.as_ref().map(|value| bound("ours", value)).transpose()?;
    let build = match &f.build {
        None => 0,
        Some(wanted) => builds.iter().position(|b| b.name == *wanted).with_context(|| {
            let names: Vec<&str> = builds.iter().map(|b| b.name.as_str()).collect();
            format!("figure `{name}`: no build is named `{wanted}`; there are: {}", names.join(", "))
        })?,
    };
    if !known.commands().any(|c| gates.iter().any(|g| g.name() == c)) {
        let commands: Vec<&str> = known.commands().collect();
        bail!("figure `{name}` comes from {}, and none of these is among the gates", commands.join(", "));
    }
    let needs = f.needs.unwrap_or(known.needs);
    match (&f.why, &ours) {
        (None, Some(_)) => {
            bail!("figure `{name}`: ours without why: say why it is another one than the book's")
        }
        (Some(_), None) if needs == FigureNeeds::Nothing => {
            bail!("figure `{name}`: why without ours: a reason explains one difference, so say what ours is")
        }
        _ => {}
    }
    Ok(RecipeFigure { figure: known, book, build, from: f.from.clone(), why: f.why.clone(), ours, needs })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_recipes_are_right() {
        for recipe in built_in().unwrap() {
            assert!(!recipe.figures.is_empty(), "{}", recipe.name);
            assert_eq!(recipe.gates.first(), Some(&GateCommand::Plan), "{}", recipe.name);
        }
        assert_eq!(open(Path::new("Exp 36")).unwrap().name, open(Path::new("T4.4")).unwrap().name);
    }

    #[test]
    fn wrong_recipes_are_refused_by_what_is_known() {
        let good = "title = 'a'\nintent = 'b'\nsource = 'c'\ngates = ['plan']\n[[builds]]\nname = 'x'\n\
                    [[figures]]\nfigure = 'shards'\nunit = 'packages'\nbook = 3\nfrom = 'd'\n";
        assert!(parse("good", good).is_ok());
        for (old, new, says) in [
            ("title", "titel", "expected one of `title`, `intent`"),
            ("'plan'", "'plans'", "expected one of `plan`, `build`"),
            ("'shards'", "'shardz'", "shard_mb"),
            ("unit = 'packages'\n", "", "has no unit; it is given in packages"),
            ("'packages'", "'MB'", "is given in packages, not in MB"),
            ("book = 3", "book = 'three'", "is not a number"),
            ("book = 3", "book = [3]", "neither a number"),
            ("from = 'd'", "from = 'd'\nbuild = 'y'", "no build is named `y`; there are: x"),
            ("'shards'\nunit = 'packages'", "'drafted'\nunit = 'tokens'", "comes from generate"),
            ("name = 'x'", "name = '../x'", "letters, digits"),
            ("from = 'd'", "from = 'd'\nwhy = 'luck'", "say what ours is"),
            ("from = 'd'", "from = 'd'\nours = 4", "say why"),
            ("from = 'd'", "from = 'd'\nwhy = 'luck'\nours = []", "ours is neither"),
            ("gates = ['plan']", "gates = ['plan', 'build', 'validate']", "needs prompt_ids"),
            ("gates = ['plan']", "gates = ['check', 'plan']", "`check` stands in a recipe without `build`"),
            (
                "source = 'c'\ngates = ['plan']",
                "source = 'c'\nprompt_ids = [2]\ngates = ['plan', 'trace', 'build', 'validate']",
                "`trace` stands before `build`, and needs the bundle that `build` makes; a possible order is: \
                 gates = [\"plan\", \"build\", \"trace\", \"validate\"]",
            ),
            ("gates = ['plan']", "gates = ['plan', 'build', 'plan']", "`plan` stands twice"),
            ("title = 'a'", "title = 'a", "line 1"),
            ("title = 'a'", "title = 'a'\nlayers = 0", "at least one"),
            ("name = 'x'", "name = 'x'\noptions = ['--quant', 'lut4', 'y']", "build `x`: `y` for `build`"),
            ("name = 'x'", "name = 'x'\noptions = ['--out=y']", "`--out=y`"),
            ("name = 'x'", "name = 'x'\noptions = ['-oy']", "`-oy`"),
            ("name = 'x'", "name = 'x'\noptions = ['--quant', '--force']", "`--force`"),
            ("name = 'x'", "name = 'x'\noptions = ['--', 'y']", "`--`"),
            ("name = 'x'", "name = 'x'\ngates.build = ['--skip-gates', '--push=s3://y']", "`--push=s3://y`"),
            ("name = 'x'", "name = 'x'\ngates.bench = ['--save', 'y']", "`--save` for `bench`"),
            ("name = 'x'", "name = 'x'\ngates.validate = ['--scratch=y']", "folder of the run"),
            ("name = 'x'", "name = 'x'\ngates.generate = ['--compiled=y']", "`--compiled=y`"),
            ("[[builds]]", "[options]\nplan = ['--out=y']\n[[builds]]", "[options]: `--out=y` for `plan`"),
            ("from = 'd'", "from = 'd'\nneeds = 'luck'", "expected one of `nothing`, `weights`, `mac`"),
        ] {
            assert!(good.contains(old), "{old}");
            let said = format!("{:#}", parse("bad", &good.replacen(old, new, 1)).err().unwrap());
            assert!(said.contains(says), "{new}: {said}");
        }
    }
}
