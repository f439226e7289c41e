//! Runs of a checkpoint in f32 that gates compare with, under a progress bar.

use crate::ui::{Ui, advance};
use anemoe_convert::checkpoint::Checkpoint;
use anemoe_convert::plan::Plan;
use anemoe_gates::checkpoint_text::{full_golden, gate_golden};
use anemoe_gates::gated::NamedGolden;
use anemoe_gates::reference::Golden;
use std::path::PathBuf;

/// Reads the files of `--golden`.
pub fn read_goldens(paths: &[PathBuf]) -> anemoe_gates::Result<Vec<NamedGolden>> {
    let read = |path: &PathBuf| Ok(NamedGolden { path: path.clone(), golden: Golden::read(path)? });
    paths.iter().map(read).collect()
}

/// Makes a golden with hidden states and choices of experts.
pub fn with_bar(
    checkpoint: &Checkpoint,
    prompt: &[u32],
    decode: usize,
    ui: &Ui,
) -> anemoe_gates::Result<Golden> {
    let bar = ui.bar(1, "golden, layers");
    full_golden(checkpoint, prompt, decode, &mut |done, total| advance(&bar, done, total, ""))
}

/// Returns the golden of the gates, see [`gate_golden`].
pub fn reference(
    checkpoint: &Checkpoint,
    plan: &Plan,
    given: Option<&Golden>,
    ui: &Ui,
) -> anemoe_gates::Result<Golden> {
    let bar = ui.bar(1, "golden, layers");
    gate_golden(checkpoint, plan, given, &mut |done, total| advance(&bar, done, total, ""))
}
