//! Figures by name, and bounds on them. `figures.toml` lists the figures, and says how each is read from the documents of gates.

use super::recipe::RecipeCommand;
use anemoe_text::chat::Jinja;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::LazyLock;

/// Figure that gates bring.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    pub name: String,
    pub unit: String,
    #[serde(default)]
    pub needs: FigureNeeds,
    /// Gates that bring the figure, the most telling first.
    pub gates: Vec<RecipeCommand>,
    /// Jinja expression over the document of each of these gates.
    #[serde(skip_serializing)]
    value: String,
    pub meaning: String,
}

/// Need of a figure, without which its name misleads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FigureNeeds {
    /// Nothing: it follows from shapes and options.
    #[default]
    Nothing,
    /// Trained weights.
    Weights,
    /// A Neural Engine.
    Mac,
}

/// All figures.
#[derive(Default, Deserialize)]
pub(super) struct FigureTable {
    reasons: Vec<NeedReason>,
    /// Lines of Jinja that give names to parts of a gate's document, and, as `all`, of every document.
    names: BTreeMap<String, String>,
    pub figures: Vec<Figure>,
}

/// Reason why another source or machine gives another figure.
#[derive(Deserialize)]
struct NeedReason {
    needs: FigureNeeds,
    /// Units of the figures that it is about; empty for all others.
    units: Vec<String>,
    text: String,
}

pub(super) static TABLE: LazyLock<FigureTable> =
    LazyLock::new(|| toml::from_str(include_str!("figures.toml")).unwrap_or_default());

/// Units of figures that are counted, and therefore exact.
const COUNTED: [&str; 7] = ["layer", "packages", "ops", "tokens", "calls", "probes", "weights"];

/// Reads the figures that a gate brings from its document, by name.
pub(super) fn figures(gate: RecipeCommand, document: &Map<String, Value>) -> BTreeMap<String, f64> {
    let own = TABLE.figures.iter().filter(|figure| figure.gates.contains(&gate));
    own.filter_map(|figure| Some((figure.name.clone(), figure.read(gate, document)?))).collect()
}

impl Figure {
    /// Reads the figure from the document of a gate; none if it is not there, or no number.
    fn read(&self, gate: RecipeCommand, document: &Map<String, Value>) -> Option<f64> {
        let shown = self.program(gate).ok()?.run(document, None).ok()?;
        shown.trim().parse().ok().filter(|x: &f64| x.is_finite())
    }

    /// Returns the template that prints the figure.
    pub(super) fn program(&self, gate: RecipeCommand) -> Result<Jinja, String> {
        let names = [gate.name(), "all"].map(|of| TABLE.names.get(of).map_or("", String::as_str)).concat();
        Jinja::parse(&format!("{names}{{{{ {} }}}}", self.value))
    }

    /// Finds the figure of this name. If there is none, the error lists all.
    pub fn find(name: &str) -> Result<&'static Figure, String> {
        TABLE.figures.iter().find(|f| f.name == name).ok_or_else(|| {
            let known: Vec<&str> = TABLE.figures.iter().map(|f| f.name.as_str()).collect();
            format!("no figure is named `{name}`; there are: {}", known.join(", "))
        })
    }

    /// Returns the reason why another source or machine gives another figure; empty if the figure needs nothing.
    pub fn needs_because(&self, needs: FigureNeeds) -> &'static str {
        let fits = |r: &&NeedReason| r.needs == needs && (r.units.is_empty() || r.units.contains(&self.unit));
        TABLE.reasons.iter().find(fits).map_or("", |r| &r.text)
    }

    /// Formats a value for people.
    pub fn show(&self, value: f64) -> String {
        match self.unit.as_str() {
            unit if COUNTED.contains(&unit) => {
                let sign = if value < 0.0 { "-" } else { "" };
                format!("{sign}{}", crate::ui::count(value.abs().round() as u64))
            }
            "cosine" | "nats" => format!("{value:.5}"),
            _ if value.abs() >= 1000.0 => format!("{value:.0}"),
            _ if value.abs() >= 1.0 => format!("{value:.2}"),
            _ => format!("{value:.4}"),
        }
    }

    /// Tells whether a value keeps a bound. Whole numbers of what is counted hold exactly.
    pub fn keeps(&self, bound: &Bound, value: f64) -> bool {
        match bound.is_whole && COUNTED.contains(&self.unit.as_str()) {
            true => value == bound.value,
            false => bound.holds.contains(&value),
        }
    }
}

/// Number that a figure is compared with: `101.2`, `>=0.97`, `<110`, `about 35`.
#[derive(Debug, Deserialize)]
#[serde(try_from = "toml::Value")]
pub struct Bound {
    /// The bound as it was written.
    pub text: String,
    pub value: f64,
    /// True for a whole number without a sign, or behind `=`.
    is_whole: bool,
    /// Values that keep the bound: of a number alone, those that round to its digits.
    holds: RangeInclusive<f64>,
}

/// Signs before a number; a sign that begins with another sign comes first.
const SIGNS: [&str; 6] = ["<=", ">=", "<", ">", "=", "about "];
/// Largest relative deviation from an `about` bound.
const ABOUT: f64 = 0.1;

impl TryFrom<toml::Value> for Bound {
    type Error = String;

    fn try_from(value: toml::Value) -> Result<Bound, String> {
        let text = match value {
            toml::Value::String(text) => text.trim().to_string(),
            toml::Value::Integer(_) | toml::Value::Float(_) => value.to_string(),
            _ => return Err("neither a number nor a text such as \"101.2\" or \">=0.97\"".into()),
        };
        let sign = SIGNS.into_iter().find(|sign| text.starts_with(sign)).unwrap_or_default();
        let number = text[sign.len()..].trim();
        let plain = number.bytes().all(|b| b.is_ascii_digit() || b".-+eE".contains(&b));
        let Some(x) = number.parse().ok().filter(|x: &f64| plain && x.is_finite()) else {
            return Err(format!("`{text}` is not a number, nor <, <=, >, >=, = or `about` with one"));
        };
        let mantissa = number.split(['e', 'E']).next().unwrap_or_default();
        let digits = mantissa.split_once('.').map_or(0, |(_, digits)| digits.len());
        let half = 0.5 * 10f64.powi(-(digits as i32)) * (1.0 + 1e-9);
        let (below, above) = (f64::NEG_INFINITY, f64::INFINITY);
        let holds = match sign {
            "<=" => below..=x,
            ">=" => x..=above,
            "<" => below..=x.next_down(),
            ">" => x.next_up()..=above,
            "about " => x - ABOUT * x.abs()..=x + ABOUT * x.abs(),
            _ => x - half..=x + half,
        };
        Ok(Bound { value: x, is_whole: digits == 0 && ["", "="].contains(&sign), holds, text })
    }
}

impl Bound {
    /// Returns the number for an equality, else the text as it was written.
    pub fn to_json(&self) -> Value {
        let number = self.text.trim_start_matches('=').trim().parse::<f64>();
        number.map_or_else(|_| self.text.clone().into(), Value::from)
    }
}
