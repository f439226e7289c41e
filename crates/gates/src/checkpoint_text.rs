//! Text as tokens of a checkpoint, for gates and for the search for kinds.

use crate::perplexity::windows;
use crate::probe;
use crate::reference::{self, Golden, RunOptions};
use crate::text_gate::{self, GateText};
use crate::{Error, Result};
use anemoe_convert::checkpoint::{Checkpoint, SideFile};
use anemoe_convert::plan::Plan;
use anemoe_text::tokenizer::Tokenizer;

/// Most parameters of a model that is searched by default, with a sensitivity of every tensor.
pub const MAX_WHOLE: u64 = 64_000_000;
/// Fewest tokens of a user's text that decide: the mean of fewer says little.
pub const LEAST_JUDGED: usize = 2000;
/// Built-in text that models run on if the user gives none.
const TEXT: &str = include_str!("gate_text.txt");
/// Most tokens of a text that a search for kinds runs the model on.
const TOKENS: usize = 192;
/// Most tokens of a window of the text.
const WINDOW: usize = 96;

/// Returns the id of the token that starts a text; none if the configuration names none.
pub fn bos(checkpoint: &Checkpoint) -> Option<u32> {
    anemoe_convert::models::describe(checkpoint).ok()?.bos
}

/// Opens the tokenizer of a checkpoint, from the file beside the weights or from inside the weight file (GGUF).
///
/// # Errors
/// There is no tokenizer, or it is wrong.
pub fn tokenizer(checkpoint: &Checkpoint) -> Result<Tokenizer> {
    let file = checkpoint.side_file("tokenizer.json")?;
    let none = || Error::usage(format!("{}: no tokenizer", checkpoint.path.display()));
    let file = file.ok_or_else(none)?;
    let path = match &file {
        SideFile::Path(path) => path,
        SideFile::Bytes(_) => &checkpoint.path,
    };
    let config = checkpoint.side_file("tokenizer_config.json")?;
    let config = config.as_ref().map(SideFile::read).transpose()?.unwrap_or_default();
    Ok(Tokenizer::from_bytes(&file.read()?, path)?.with_config(&config))
}

/// Returns `n` ids spread evenly over the vocabulary, for models without a tokenizer.
fn spread_ids(n: usize, vocab: usize) -> Vec<u32> {
    let vocab = vocab as u64;
    (1..=n as u64).map(|i| ((i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % vocab) as u32).collect()
}

/// Cuts a text into windows of tokens that a search for kinds runs the model on, and names the text: `own`, a text with its
/// name, or a built-in one.
///
/// # Errors
/// The text has no token, or there is no tokenizer for `own`.
pub fn search_windows(
    checkpoint: &Checkpoint,
    plan: &Plan,
    own: Option<(String, String)>,
) -> Result<(Vec<Vec<u32>>, String)> {
    let vocab = plan.chain.model.vocab_size;
    let context = WINDOW.min(plan.chain.model.max_context);
    cut(checkpoint, vocab, (context, TOKENS), own, "--auto-text")
}

/// Cuts a text with its name, or the built-in one, into windows of at most `context` tokens, at most `most` in all.
/// `option` is the one that names the text.
fn cut(
    checkpoint: &Checkpoint,
    vocab: usize,
    (context, most): (usize, usize),
    own: Option<(String, String)>,
    option: &str,
) -> Result<(Vec<Vec<u32>>, String)> {
    let mut bos = bos(checkpoint);
    let (ids, name) = match (tokenizer(checkpoint), own) {
        (Ok(tokenizer), own) => {
            bos = tokenizer.bos(bos);
            let (text, name) = own.unwrap_or_else(|| (TEXT.into(), "a built-in text".into()));
            (tokenizer.encode(&text, bos)?, name)
        }
        (Err(e), Some(_)) => return Err(Error::usage(format!("{option} needs the model's tokenizer: {e}"))),
        // Without a tokenizer any tokens are as good as others.
        (Err(_), None) => {
            (spread_ids(most, vocab), "evenly spread tokens (there is no tokenizer)".to_string())
        }
    };
    let windows = windows(&ids, bos, context, most);
    match windows.is_empty() {
        true => Err(Error::usage("the text has no token to predict")),
        false => Ok((windows, name)),
    }
}

/// Cuts a text with its name, or the built-in one, into windows of the text gate. Of a text of the user's all tokens
/// count.
///
/// # Errors
/// The text has fewer than [`LEAST_JUDGED`] tokens to predict, or there is no tokenizer for it.
pub fn gate_text(
    checkpoint: &Checkpoint,
    vocab: usize,
    context: usize,
    own: Option<(String, String)>,
) -> Result<GateText> {
    let most = if own.is_some() { usize::MAX } else { text_gate::TOKENS };
    let sizes = (context.min(text_gate::WINDOW), most);
    let is_own = own.is_some();
    let (windows, name) = cut(checkpoint, vocab, sizes, own, "--gate-text")?;
    let tokens: usize = windows.iter().map(|w| w.len() - 1).sum();
    if is_own && tokens < LEAST_JUDGED {
        let what = format!("--gate-text: {name} has {tokens} tokens to predict, a gate needs {LEAST_JUDGED}");
        return Err(Error::usage(what));
    }
    Ok(GateText { windows, name })
}

/// Returns the prompt of a build's gates, and the number of tokens after it; both are smaller for models that take long.
///
/// # Errors
/// The text cannot be tokenized.
pub fn gate_prompt(checkpoint: &Checkpoint, plan: &Plan) -> Result<(Vec<u32>, usize)> {
    let (prompt, decode) = if plan.totals.params > MAX_WHOLE { (8, 4) } else { (16, 8) };
    // The caches have to hold the prompt and the tokens after it.
    let prompt = prompt.min(plan.chain.model.max_context.saturating_sub(decode)).max(1);
    let bos = bos(checkpoint);
    let mut ids = match tokenizer(checkpoint) {
        Ok(tokenizer) => tokenizer.encode(TEXT, bos)?,
        Err(_) => bos.into_iter().chain(spread_ids(prompt, plan.chain.model.vocab_size)).collect(),
    };
    ids.truncate(prompt);
    Ok((ids, decode.min(plan.chain.model.max_context.saturating_sub(prompt))))
}

/// Runs a checkpoint in f32 to a golden with hidden states and choices of experts. `show` takes layers that are done, of how
/// many.
///
/// # Errors
/// The checkpoint cannot be read, or the prompt does not fit it.
pub fn full_golden(
    checkpoint: &Checkpoint,
    prompt: &[u32],
    decode: usize,
    show: &mut dyn FnMut(usize, usize),
) -> Result<Golden> {
    reference::run(checkpoint, prompt, decode, RunOptions { hidden: true, routing: true }, show)
}

/// Returns the golden of the gates: the file's, completed if it lacks hidden states, or a run of the gates' own prompt.
///
/// # Errors
/// The checkpoint cannot be run.
pub fn gate_golden(
    checkpoint: &Checkpoint,
    plan: &Plan,
    given: Option<&Golden>,
    show: &mut dyn FnMut(usize, usize),
) -> Result<Golden> {
    let Some(golden) = given else {
        let (prompt, decode) = gate_prompt(checkpoint, plan)?;
        return full_golden(checkpoint, &prompt, decode, show);
    };
    if probe::suffices(golden, plan) {
        let mut golden = golden.clone();
        if checkpoint.variants.is_rotated {
            golden.rotate_states();
        }
        return Ok(golden);
    }
    Ok(golden.with_states_of(full_golden(checkpoint, &golden.prompt_ids, 0, show)?))
}
