//! Row of a table of outcomes: one typed column per fact of a graph, and the graph that rules judge.

use super::super::rule::{Chip, Conditions, DeviceTarget, Evidence, Strength, Units, Verdict};
use crate::program_facts::PackageFacts;
use crate::program_facts::graph::{
    Contraction, Graph, GraphKind, GraphState, GraphWeight, Op, Shapes, StoredForm,
};
use anemoe_mlpackage::mil::{DataType, TensorType};
use std::collections::BTreeMap;

/// Columns that a table needs, in order. A cell `-` stands for what the source does not state.
pub const NEEDED: [&str; 17] = [
    "id", "project", "label", "graph", "weights", "mb", "ops", "named", "depth", "layers", "tokens",
    "shapes", "states", "traits", "units", "target", "chip",
];

/// Names in the column `traits`.
pub const TRAITS: [&str; 4] = ["head", "rank-2", "runtime-shapes", "quantized-activations"];

/// Cells of a line, by column name; missing cells are unknown.
pub type OutcomeCells = BTreeMap<String, String>;

/// Measured graph, with its outcome.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Id of the row.
    pub id: String,
    /// Model and part, in words.
    pub name: String,
    /// Label: where the graph ran, or how it failed, `ANE_ALL`, `MIXED`, `CPU_ALL`, `GPU_ALL`, `COMPILE_FAIL` or
    /// `RUNTIME_FAIL`.
    pub label: String,
    /// Project that published the row.
    pub project: String,
    /// Place in the project.
    pub source: String,
    /// Conditions under which the graph ran.
    pub conditions: Conditions,
    /// Chip and system, as the source names them.
    pub machine: String,
    /// Digest of the program, see [`crate::program_facts::digest`]; empty where the program is not at hand.
    pub program: String,
    /// Stated facts, as rules take them: a function for each number of tokens.
    pub graphs: Vec<Graph>,
}

impl Row {
    /// Returns the true verdict of the whole graph; `None` for a label without an outcome.
    pub fn truth(&self) -> Option<Verdict> {
        match self.label.as_str() {
            "ANE_ALL" | "ANE" => Some(Verdict::Ane),
            "MIXED" => Some(Verdict::NotAne),
            l if l.starts_with("CPU") || l.starts_with("GPU") || l.ends_with("FAIL") => Some(Verdict::NotAne),
            _ => None,
        }
    }

    /// Returns the facts as those of a package.
    pub fn package(&self) -> PackageFacts {
        let weight_bytes = self.graphs.first().and_then(|g| g.weight_bytes);
        PackageFacts { weight_bytes, graphs: self.graphs.clone() }
    }

    /// Returns the row as evidence.
    pub fn evidence(&self) -> Evidence {
        let bytes = self.graphs.first().and_then(|g| g.weight_bytes);
        let size = bytes.map_or(String::new(), |b| format!(", {}", super::super::matchers::size(b)));
        Evidence {
            source: if self.source.is_empty() { self.project.clone() } else { self.source.clone() },
            chip: self.machine.clone(),
            os: String::new(),
            strength: Strength::B,
            finding: format!("{}{size}: {}", self.name, self.label),
            rows: vec![self.id.clone()],
        }
    }

    /// Reads a row from the cells of a line.
    ///
    /// # Errors
    /// A cell is not what its column holds; the message names both.
    pub fn of(cells: &OutcomeCells) -> Result<Row, String> {
        let c = Cells(cells);
        let chip = match c.text("chip") {
            "" => None,
            t => Some(Chip::parse(t).ok_or_else(|| format!("`{t}` is not a chip: {}", Chip::names()))?),
        };
        let target = c.one_of("target", &[("", DeviceTarget::Mac), ("iphone", DeviceTarget::Iphone)])?;
        let units = c.one_of("units", &[("", Units::CpuAndNe), ("all", Units::All)])?;
        Ok(Row {
            id: c.text("id").into(),
            name: c.text("name").into(),
            label: c.text("label").to_ascii_uppercase(),
            project: c.text("project").into(),
            source: c.text("source").into(),
            conditions: Conditions { target, units, chip },
            machine: [c.text("chip"), c.text("os")].join(", ").trim_matches([',', ' ']).into(),
            program: c.text("program").into(),
            graphs: c.graphs()?,
        })
    }
}

struct Cells<'a>(&'a OutcomeCells);

impl<'a> Cells<'a> {
    /// Returns the text of a cell; empty where the source does not state it.
    fn text(&self, name: &str) -> &'a str {
        self.0.get(name).map(|c| c.trim()).filter(|c| *c != "-").unwrap_or_default()
    }

    fn numbers(&self, name: &str) -> Result<Vec<u64>, String> {
        let number = |t: &str| {
            let n = t.parse().ok().filter(|&n: &u64| n < 1 << 32);
            n.ok_or_else(|| format!("`{t}` is not a number for `{name}`"))
        };
        self.text(name).split_whitespace().map(number).collect()
    }

    fn number(&self, name: &str) -> Result<Option<u64>, String> {
        Ok(self.numbers(name)?.first().copied())
    }

    fn one_of<T: Copy>(&self, name: &str, values: &[(&str, T)]) -> Result<T, String> {
        let text = self.text(name);
        let names = values.iter().map(|v| if v.0.is_empty() { "-" } else { v.0 });
        let known = || names.collect::<Vec<_>>().join(", ");
        let found = values.iter().find(|(value, _)| *value == text).map(|(_, t)| *t);
        found.ok_or_else(|| format!("`{text}` is not a value of `{name}`: {}", known()))
    }

    /// Makes the graphs of the stated facts. Ops that the row does not name are left out.
    fn graphs(&self) -> Result<Vec<Graph>, String> {
        let megabytes = match self.text("mb") {
            "" => None,
            t => {
                let number = t.parse().ok().filter(|mb: &f64| mb.is_finite() && *mb >= 0.0);
                Some(number.ok_or_else(|| format!("`{t}` is not a number of megabytes"))?)
            }
        };
        let traits: Vec<&str> = self.text("traits").split_whitespace().collect();
        if let Some(other) = traits.iter().find(|t| !TRAITS.contains(t)) {
            return Err(format!("`{other}` is not a value of `traits`: {}", TRAITS.join(", ")));
        }
        let form = StoredForm::parse(self.text("weights"))?;
        let states = self.number("states")?.unwrap_or(0).min(64);
        let mut g = Graph {
            function: "main".into(),
            kind: self.one_of("graph", &GraphKind::NAMED)?,
            weight_bytes: megabytes.map(|mb| (mb * 1e6) as u64),
            layers: self.number("layers")?,
            shapes: Shapes::parse(self.text("shapes"))?,
            states: (0..states).map(|i| GraphState { name: format!("state{i}"), dims: vec![] }).collect(),
            vocabulary_head: traits.contains(&"head"),
            ..Graph::default()
        };
        let depth = self.number("depth")?;
        let dtype =
            if form == StoredForm::Dense(DataType::Float32) { DataType::Float32 } else { DataType::Float16 };
        g.ops = self.ops(g.kind, depth, &traits, dtype);
        if !matches!(g.kind, GraphKind::Matmul | GraphKind::Attention) {
            let bytes = g.weight_bytes.unwrap_or(0);
            g.weights.push(GraphWeight { name: "weights".into(), dims: vec![], form, bytes });
        }
        let named = g.ops.len() as u64;
        let is_lone = g.kind.is_lone() || g.kind == GraphKind::Few;
        g.op_count = self.number("ops")?.map(|n| n.max(named)).or(is_lone.then_some(named));
        let mut tokens: Vec<Option<u64>> = self.numbers("tokens")?.into_iter().map(Some).collect();
        tokens.resize(tokens.len().max(1), None);
        let one = |(i, positions): (usize, Option<u64>)| Graph {
            function: if i == 0 { "main".into() } else { format!("function{i}") },
            positions,
            ..g.clone()
        };
        Ok(tokens.into_iter().enumerate().map(one).collect())
    }

    fn ops(&self, kind: GraphKind, depth: Option<u64>, traits: &[&str], dtype: DataType) -> Vec<Op> {
        let mut ops = Vec::new();
        let computed = matches!(kind, GraphKind::Matmul | GraphKind::Attention);
        let op_type = match kind {
            GraphKind::Conv | GraphKind::Head => "conv",
            GraphKind::Matmul => "matmul",
            GraphKind::Attention => "scaled_dot_product_attention",
            _ => "linear",
        };
        let input: &[u64] = match (kind, depth) {
            (GraphKind::Attention, Some(n)) => &[1, 1, 1, n],
            _ if traits.contains(&"rank-2") => &[1, 1024],
            _ => &[1, 1, 1024],
        };
        let is_open = matches!(kind, GraphKind::Other | GraphKind::Unstated);
        let stated = depth.is_some() || !is_open || !self.text("mb").is_empty();
        if stated {
            // A matmul of n multiplications stands here as a product of depth 1 with n outputs.
            let contraction = Contraction {
                depth: if computed { Some(1) } else { depth },
                outputs: depth.filter(|_| computed),
                positions: Some(1),
                groups: 1,
                between_activations: computed,
                ..Contraction::default()
            };
            let bounds = traits.contains(&"runtime-shapes").then(|| "bounds".to_string());
            ops.push(Op {
                name: "products".into(),
                op_type: op_type.into(),
                inputs: vec![TensorType::fixed(dtype, input)],
                weights: if computed { vec![] } else { vec![0] },
                contraction: (kind != GraphKind::Attention).then_some(contraction),
                runtime_bounds: bounds.into_iter().collect(),
                ..Op::default()
            });
        }
        let quantizes = traits.contains(&"quantized-activations").then_some("quantize");
        for name in self.text("named").split_whitespace().chain(quantizes) {
            // A search beside a vocabulary is over its words.
            let axis_extent = traits.contains(&"head").then_some(1 << 15);
            ops.push(Op { name: name.into(), op_type: name.into(), axis_extent, ..Op::default() });
        }
        ops
    }
}
