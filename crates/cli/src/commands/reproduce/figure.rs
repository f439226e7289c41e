//! Figures by name, and bounds on them. `figures.toml` lists the figures.

use super::recipe::GateCommand;
use serde::{Deserialize, Serialize};
use serde_json::Value;
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
    pub gates: Vec<GateCommand>,
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
#[derive(Default, Deserialize, Serialize)]
pub struct FigureTable {
    #[serde(skip_serializing)]
    reasons: Vec<NeedReason>,
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

impl Figure {
    /// Finds the figure of this name. If there is none, the error lists all.
    pub fn find(name: &str) -> Result<&'static Figure, String> {
        TABLE.figures.iter().find(|f| f.name == name).ok_or_else(|| {
            let known: Vec<&str> = TABLE.figures.iter().map(|f| f.name.as_str()).collect();
            format!("no figure is named `{name}`; there are: {}", known.join(", "))
        })
    }

    /// Returns the reason why another source or machine gives another figure; empty if the figure needs nothing.
    pub fn needs_because(&self, needs: FigureNeeds) -> &'static str {
        let is_about =
            |r: &&NeedReason| r.needs == needs && (r.units.is_empty() || r.units.contains(&self.unit));
        TABLE.reasons.iter().find(is_about).map_or("", |r| &r.text)
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

    /// Tells whether a value keeps a bound. A number alone holds for what rounds to its digits; a whole number of what is
    /// counted holds exactly.
    pub fn keeps(&self, bound: &Bound, value: f64) -> bool {
        let is_exact = bound.half == 0.5 && COUNTED.contains(&self.unit.as_str());
        (bound.holds)(value, bound.value, if is_exact { 0.0 } else { bound.half })
    }
}

/// Number that a figure is compared with: `101.2`, `>=0.97`, `<110`, `about 35`.
#[derive(Debug, Deserialize)]
#[serde(try_from = "toml::Value")]
pub struct Bound {
    /// The bound as it was written.
    pub text: String,
    pub value: f64,
    /// Half a unit of the last written digit.
    half: f64,
    holds: Holds,
}

/// Comparison of a value with a number, whose last digit stands for as much up and down.
type Holds = fn(f64, f64, f64) -> bool;

/// Largest relative deviation from an `about` bound.
const ABOUT: f64 = 0.1;

const EQUALS: Holds = |x, number, half| (x - number).abs() <= half * (1.0 + 1e-9);

/// Signs of comparisons; a sign that begins with another sign comes first.
const SIGNS: [(&str, Holds); 6] = [
    ("<=", |x, number, _| x <= number),
    (">=", |x, number, _| x >= number),
    ("<", |x, number, _| x < number),
    (">", |x, number, _| x > number),
    ("=", EQUALS),
    ("about ", |x, number, _| (x - number).abs() <= ABOUT * number.abs()),
];

impl TryFrom<toml::Value> for Bound {
    type Error = String;

    fn try_from(value: toml::Value) -> Result<Bound, String> {
        let text = match value {
            toml::Value::String(text) => text.trim().to_string(),
            toml::Value::Integer(_) | toml::Value::Float(_) => value.to_string(),
            _ => return Err("neither a number nor a text such as \"101.2\" or \">=0.97\"".into()),
        };
        let split = |(sign, holds): &(&str, Holds)| Some((*holds, text.strip_prefix(sign)?));
        let (holds, number) = SIGNS.iter().find_map(split).unwrap_or((EQUALS, text.as_str()));
        let number = number.trim();
        let plain = number.bytes().all(|b| b.is_ascii_digit() || b".-+eE".contains(&b));
        let Some(value) = number.parse().ok().filter(|v: &f64| plain && v.is_finite()) else {
            return Err(format!("`{text}` is not a number, nor <, <=, >, >=, = or `about` with one"));
        };
        let digits =
            number.split(['e', 'E']).next().and_then(|m| m.split_once('.')).map_or(0, |(_, d)| d.len());
        let half = 0.5 * 10f64.powi(-(digits as i32));
        Ok(Bound { value, half, holds, text })
    }
}

impl Bound {
    /// Returns the number for an equality, else the text as it was written.
    pub fn to_json(&self) -> Value {
        let number = self.text.trim_start_matches('=').trim().parse::<f64>();
        number.map_or_else(|_| self.text.clone().into(), Value::from)
    }
}
