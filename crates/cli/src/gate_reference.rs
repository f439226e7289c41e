//! Runs of a checkpoint in f32 that gates compare with.

use crate::args::checkpoint_text::{TEXT, bos, spread_ids, tokenizer};
use crate::error_report::sentence;
use crate::ui::{Ui, advance};
use anemoe_convert::checkpoint::Checkpoint;
use anemoe_convert::plan::Plan;
use anemoe_gates::auto::MAX_WHOLE;
use anemoe_gates::gated::NamedGolden;
use anemoe_gates::probe;
use anemoe_gates::reference::{self, Golden, RunOptions};
use std::path::PathBuf;

/// Reads the files of `--golden`.
pub fn read_goldens(paths: &[PathBuf]) -> anemoe_gates::Result<Vec<NamedGolden>> {
    let read = |path: &PathBuf| Ok(NamedGolden { path: path.clone(), golden: Golden::read(path)? });
    paths.iter().map(read).collect()
}

/// Makes a golden with hidden states and choices of experts, under a progress bar.
pub fn with_bar(
    checkpoint: &Checkpoint,
    prompt: &[u32],
    decode: usize,
    ui: &Ui,
) -> anemoe_convert::Result<Golden> {
    let bar = ui.bar(1, "golden, layers");
    let options = RunOptions { hidden: true, routing: true };
    let mut show = |done, total| advance(&bar, done, total, "");
    reference::run_with_progress(checkpoint, prompt, decode, options, &mut show)
}

/// Returns the prompt of a build's gates, and the number of tokens after it; both are smaller for models that take long.
pub fn gate_prompt(checkpoint: &Checkpoint, plan: &Plan) -> anyhow::Result<(Vec<u32>, usize)> {
    let (prompt, decode) = if plan.totals.params > MAX_WHOLE { (8, 4) } else { (16, 8) };
    // The caches have to hold the prompt and the tokens after it.
    let prompt = prompt.min(plan.chain.model.max_context.saturating_sub(decode)).max(1);
    let bos = bos(checkpoint);
    let mut ids = match tokenizer(checkpoint) {
        Ok(tokenizer) => tokenizer.encode(TEXT, bos)?,
        Err(_) => bos.into_iter().chain(spread_ids(prompt, plan)).collect(),
    };
    ids.truncate(prompt);
    Ok((ids, decode.min(plan.chain.model.max_context.saturating_sub(prompt))))
}

/// Returns the golden of the gates: the file's, completed if it lacks hidden states, or a run of the gates' own prompt.
pub fn reference(
    checkpoint: &Checkpoint,
    plan: &Plan,
    given: Option<&Golden>,
    ui: &Ui,
) -> anemoe_gates::Result<Golden> {
    if let Some(golden) = given.filter(|g| probe::suffices(g, plan)) {
        return Ok(golden.clone());
    }
    let (prompt, decode) = match given {
        Some(golden) => (golden.prompt_ids.clone(), 0),
        None => gate_prompt(checkpoint, plan).map_err(|e| anemoe_gates::Error::usage(sentence(&e)))?,
    };
    let own = with_bar(checkpoint, &prompt, decode, ui)?;
    Ok(match given {
        Some(golden) => golden.with_states_of(own),
        None => own,
    })
}
