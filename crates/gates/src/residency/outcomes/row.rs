//! One line of a table of outcomes.

use super::super::rule::Verdict;

/// One graph that someone measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// Short name.
    pub id: String,
    /// What it is.
    pub model: String,
    /// Its dimensions and ops, in words.
    pub facts: String,
    /// Compression, in words.
    pub quant: String,
    /// Megabytes of weights.
    pub mb: Option<f64>,
    /// Token count and states, in words.
    pub shape: String,
    /// Machine and system.
    pub chip: String,
    /// Where it ran: `ANE_ALL`, `MIXED`, `CPU_ALL`, `GPU_ALL`, `COMPILE_FAIL`, `RUNTIME_FAIL`.
    pub label: String,
    /// Where the row comes from.
    pub source: String,
}

impl Row {
    /// What the verdict of the whole graph should be; `None` for a label that says nothing.
    pub fn truth(&self) -> Option<Verdict> {
        match self.label.as_str() {
            "ANE_ALL" | "ANE" => Some(Verdict::Ane),
            "MIXED" => Some(Verdict::NotAne),
            l if l.starts_with("CPU") || l.starts_with("GPU") || l.ends_with("FAIL") => Some(Verdict::NotAne),
            _ => None,
        }
    }
}
