//! Reads a line of a table of facts: one column per property that graphs share.

use super::super::graph::{GraphState, Shapes, StoredForm};
use super::super::rule::{Chip, Conditions, DeviceTarget, SystemRelease, Units};
use super::row::Row;
use super::sketch::Sketch;
use anemoe_convert::quant::Granularity;
use anemoe_mlpackage::mil::DataType;
use std::str::FromStr;

/// Column that tells a table of facts from a table of words.
pub const MARK: &str = "graph";

/// Columns that a table of facts needs. A cell `-` stands for what the source does not state.
pub const NEEDED: [&str; 28] = [
    "id",
    "project",
    "label",
    MARK,
    "layout",
    "ops",
    "named",
    "weights",
    "activations",
    "mb",
    "depths",
    "product",
    "extents",
    "layers",
    "hidden",
    "mlp",
    "heads",
    "head_dim",
    "slots",
    "tokens",
    "shapes",
    "states",
    "state_width",
    "vocabulary",
    "runtime_shapes",
    "units",
    "target",
    "chip",
];

/// Largest magnitude of a feature's value. Values lie near 0; a far one would decide every fit.
const MOST_OF_A_FEATURE: f64 = 10.0;

/// Cells of a line, by column name.
pub struct Cells<'a> {
    pub headings: &'a [&'a str],
    pub cells: &'a [&'a str],
}

impl<'a> Cells<'a> {
    /// Returns the text of a cell; empty where the source does not state it.
    fn text(&self, name: &str) -> &'a str {
        let at = self.headings.iter().position(|h| *h == name);
        let cell = at.and_then(|i| self.cells.get(i)).map_or("", |c| c.trim());
        if cell == "-" { "" } else { cell }
    }

    fn list(&self, name: &str) -> Result<Vec<u64>, String> {
        let number = |t: &str| {
            let n = u64::from_str(t).ok().filter(|&n| n < 1 << 24);
            n.ok_or_else(|| format!("`{t}` is not a number for `{name}`"))
        };
        self.text(name).split_whitespace().map(number).collect()
    }

    fn number(&self, name: &str) -> Result<Option<u64>, String> {
        Ok(self.list(name)?.first().copied())
    }

    fn pair(&self, name: &str) -> Result<Option<(u64, u64)>, String> {
        match self.list(name)?.as_slice() {
            [] => Ok(None),
            [a, b] => Ok(Some((*a, *b))),
            _ => Err(format!("`{name}` is two numbers")),
        }
    }

    fn yes(&self, name: &str) -> Result<bool, String> {
        self.one_of(name, &[("", false), ("yes", true)])
    }

    fn one_of<T: Copy>(&self, name: &str, values: &[(&str, T)]) -> Result<T, String> {
        let text = self.text(name);
        let known =
            || values.iter().map(|v| if v.0.is_empty() { "-" } else { v.0 }).collect::<Vec<_>>().join(", ");
        let found = values.iter().find(|(value, _)| *value == text).map(|(_, t)| *t);
        found.ok_or_else(|| format!("`{text}` is not a value of `{name}`: {}", known()))
    }
}

/// Reads a row from the cells of a line.
///
/// # Errors
/// A cell is not what its column holds; the message names both.
pub fn row(cells: &Cells<'_>) -> Result<Row, String> {
    let megabytes = match cells.text("mb") {
        "" => None,
        t => {
            let number = f64::from_str(t).ok().filter(|mb| mb.is_finite() && *mb >= 0.0);
            Some(number.ok_or_else(|| format!("`{t}` is not a number of megabytes"))?)
        }
    };
    let chip = match cells.text("chip") {
        "" => None,
        t => Some(Chip::parse(t).ok_or_else(|| format!("`{t}` is not a chip: {}", Chip::names()))?),
    };
    let target = cells.one_of("target", &[("", DeviceTarget::Mac), ("iphone", DeviceTarget::Iphone)])?;
    let units = cells.one_of("units", &[("", Units::CpuAndNe), ("all", Units::All)])?;
    Ok(Row {
        id: cells.text("id").into(),
        model: cells.text("name").into(),
        label: cells.text("label").to_ascii_uppercase(),
        project: cells.text("project").into(),
        conditions: Conditions { target, units, chip, system: SystemRelease::parse(cells.text("os")) },
        machine: [cells.text("chip"), cells.text("os")].join(", ").trim_matches([',', ' ']).into(),
        program: cells.text("program").into(),
        features: features(cells.text("features"))?,
        sketch: sketch(cells, megabytes)?,
    })
}

/// Reads values of features by name: `work=0.31 layers=1`.
fn features(text: &str) -> Result<Vec<(String, f64)>, String> {
    let value = |word: &str| {
        let (name, value) = word.split_once('=')?;
        let value = f64::from_str(value).ok().filter(|v| v.abs() <= MOST_OF_A_FEATURE)?;
        Some((name.to_string(), value))
    };
    let read = |word: &str| value(word).ok_or_else(|| format!("`{word}` is not a value of `features`"));
    text.split_whitespace().map(read).collect()
}

fn sketch(cells: &Cells<'_>, megabytes: Option<f64>) -> Result<Sketch, String> {
    let (form, fp32) = weights(cells.text("weights"))?;
    let kinds = ["linear", "conv", "matmul", "attention", "mlp", "layers", "glue", "other"].map(|k| (k, k));
    let graph = cells.one_of(MARK, &kinds)?;
    let lone = match graph {
        "linear" | "conv" | "matmul" => Some(graph),
        "attention" => Some("scaled_dot_product_attention"),
        _ => None,
    };
    let layouts = ["", "conv", "rank2", "batch-pixels"].map(|k| (k, k));
    let layout = cells.one_of("layout", &layouts)?;
    let width = cells.number("state_width")?;
    let state = |i: u64| GraphState {
        name: format!("state{i}"),
        dims: width.filter(|_| i == 0).map(|w| vec![1, w]).unwrap_or_default(),
    };
    let states = cells.number("states")?.unwrap_or(0).min(64);
    Ok(Sketch {
        form,
        fp32,
        activations: cells.yes("activations")?,
        bytes: megabytes.map(|mb| (mb * 1e6) as u64),
        positions: cells.list("tokens")?,
        shapes: shapes(cells.text("shapes"))?,
        states: (0..states).map(state).collect(),
        named: cells.text("named").split_whitespace().map(str::to_string).collect(),
        op_count: cells.number("ops")?,
        layers: cells.number("layers")?,
        lone,
        lone_product: cells.pair("product")?,
        depths: cells.list("depths")?,
        extents: Some(cells.list("extents")?).filter(|e| !e.is_empty()),
        width: cells.number("hidden")?,
        mlp: cells.number("mlp")?,
        heads: cells.pair("heads")?,
        head_dim: cells.number("head_dim")?,
        slots: cells.number("slots")?,
        gated_mlp: graph == "mlp",
        layered: graph == "layers",
        glue: graph == "glue",
        head: cells.yes("vocabulary")?,
        rank_2: layout == "rank2",
        batch_over_pixels: layout == "batch-pixels",
        conv: layout == "conv",
        runtime_bound: cells.yes("runtime_shapes")?,
    })
}

/// Reads `fixed`, `enumerated`, `range`, or `range4` for four sizes.
fn shapes(text: &str) -> Result<Shapes, String> {
    match text {
        "" | "fixed" => Ok(Shapes::Fixed),
        "enumerated" => Ok(Shapes::Enumerated),
        "range" => Ok(Shapes::Ranged(None)),
        _ => text
            .strip_prefix("range")
            .and_then(|n| n.parse().ok())
            .map(|n| Shapes::Ranged(Some(n)))
            .ok_or_else(|| format!("`{text}` is not a value of `shapes`: fixed, enumerated, range, range4")),
    }
}

/// Reads a storage form, and whether it is fp32: `fp16`, `fp32`, `lut4`, `lut4-tensor`, `int8-channel`. Words after a
/// dash describe tables or scales.
fn weights(text: &str) -> Result<(StoredForm, bool), String> {
    let mut words = text.split('-');
    let stem = words.next().unwrap_or("");
    let rest: Vec<&str> = words.collect();
    let bad =
        || format!("`{text}` is not a value of `weights`: fp16, fp32, int8-tensor, int4-block, lut4, sparse");
    if let Some(bits) = stem.strip_prefix("lut") {
        let known = ["tensor", "two", "axes", "scaled", "int8"];
        let bits =
            bits.parse().ok().filter(|bits| (1..=8).contains(bits) && rest.iter().all(|w| known.contains(w)));
        let grouped_axes = match (rest.contains(&"two"), rest.contains(&"tensor")) {
            (true, _) => vec![0, 1],
            (_, true) => vec![],
            _ => vec![0],
        };
        let entries = if rest.contains(&"int8") { DataType::Int8 } else { DataType::Float16 };
        let scaled = rest.contains(&"scaled");
        return Ok((
            StoredForm::Lut { bits: bits.ok_or_else(bad)?, grouped_axes, entries, vector: 1, scaled },
            false,
        ));
    }
    if let Some(bits) = stem.strip_prefix("int") {
        let [name] = rest.as_slice() else { return Err(bad()) };
        let grain = Granularity::of_name(name).ok_or_else(bad)?;
        let bits = bits.parse().ok().filter(|bits| (1..=8).contains(bits)).ok_or_else(bad)?;
        return Ok((StoredForm::Linear { bits, grain }, false));
    }
    match text {
        "fp16" => Ok((StoredForm::Dense(DataType::Float16), false)),
        "fp32" => Ok((StoredForm::Dense(DataType::Float32), true)),
        "sparse" => Ok((StoredForm::Sparse, false)),
        "" => Ok((StoredForm::Unstated, false)),
        _ => Err(bad()),
    }
}
