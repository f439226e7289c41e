//! Text as tokens of a checkpoint.

use anemoe_convert::checkpoint::{Checkpoint, SideFile};
use anemoe_convert::plan::Plan;
use anemoe_text::tokenizer::Tokenizer;

/// Built-in text that models run on if the user gives none.
pub const TEXT: &str = include_str!("../calibration.txt");

/// Returns the id of the token that starts a text; none if the configuration names none.
pub fn bos(checkpoint: &Checkpoint) -> Option<u32> {
    let text = checkpoint.config.get("text_config").unwrap_or(&checkpoint.config);
    text.get("bos_token_id").and_then(|v| v.as_u64()).and_then(|v| u32::try_from(v).ok())
}

/// Opens the tokenizer of a checkpoint, from the file beside the weights or from inside the weight file (GGUF).
pub fn tokenizer(checkpoint: &Checkpoint) -> anyhow::Result<Tokenizer> {
    match checkpoint.side_file("tokenizer.json")? {
        Some(SideFile::Path(path)) => Ok(Tokenizer::open(&path)?),
        Some(SideFile::Bytes(text)) => Ok(Tokenizer::from_bytes(&text, &checkpoint.path)?),
        None => anyhow::bail!("{}: no tokenizer", checkpoint.path.display()),
    }
}

/// Returns `n` ids spread evenly over the vocabulary, for models without a tokenizer.
pub fn spread_ids(n: usize, plan: &Plan) -> Vec<u32> {
    let vocab = plan.chain.model.vocab_size as u64;
    (1..=n as u64).map(|i| ((i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % vocab) as u32).collect()
}
