//! One line of a table of outcomes.

use super::super::rule::{Conditions, Verdict};
use super::sketch::Sketch;

/// One graph that someone measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Short name.
    pub id: String,
    /// Model and part, in words.
    pub model: String,
    /// Label: where it ran, `ANE_ALL`, `MIXED`, `CPU_ALL`, `GPU_ALL`, `COMPILE_FAIL` or `RUNTIME_FAIL`.
    pub label: String,
    /// Project that published it.
    pub project: String,
    /// Conditions that the graph met.
    pub conditions: Conditions,
    /// Chip and system in words, where the row says more than conditions hold.
    pub machine: String,
    /// Digest of the program, see [`super::super::program_digest`]; empty where the row is about a graph in words.
    pub program: String,
    /// Values of features by name, where they were computed from the program itself.
    pub features: Vec<(String, f64)>,
    /// Stated facts of the graph.
    pub sketch: Sketch,
}

impl Row {
    /// True verdict of the whole graph; `None` for a label that says nothing.
    pub fn truth(&self) -> Option<Verdict> {
        match self.label.as_str() {
            "ANE_ALL" | "ANE" => Some(Verdict::Ane),
            "MIXED" => Some(Verdict::NotAne),
            l if l.starts_with("CPU") || l.starts_with("GPU") || l.ends_with("FAIL") => Some(Verdict::NotAne),
            _ => None,
        }
    }
}
