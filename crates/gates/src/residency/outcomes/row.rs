//! Row of a table of outcomes.

use super::super::rule::{Conditions, Verdict};
use super::sketch::Sketch;

/// Measured graph, with its outcome.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Id of the row.
    pub id: String,
    /// Model and part, in words.
    pub model: String,
    /// Label: where the graph ran, or how it failed, `ANE_ALL`, `MIXED`, `CPU_ALL`, `GPU_ALL`, `COMPILE_FAIL` or
    /// `RUNTIME_FAIL`.
    pub label: String,
    /// Project that published the row.
    pub project: String,
    /// Conditions under which the graph ran.
    pub conditions: Conditions,
    /// Chip and system in words, where the row states more than `conditions` hold.
    pub machine: String,
    /// Digest of the program, see [`super::super::program_digest`]; empty where the row describes a graph in words.
    pub program: String,
    /// Values of features by name, where they were computed from the program.
    pub features: Vec<(String, f64)>,
    /// Stated facts of the graph.
    pub sketch: Sketch,
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
}
