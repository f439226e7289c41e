//! Text from a file as windows of tokens, for the commands that measure models on text.

use anemoe_convert::checkpoint::Checkpoint;
use anemoe_gates::checkpoint_text::{bos, tokenizer};
use anemoe_gates::perplexity::windows;
use anemoe_io::Error;
use anemoe_text::tokenizer::Tokenizer;
use anyhow::bail;
use std::path::{Path, PathBuf};

/// Largest text that is read, in bytes.
const MAX_TEXT_BYTES: u64 = 256 << 20;

/// Text that is read, and the size of its pieces.
#[derive(clap::Args, Clone, Debug)]
pub struct TextArgs {
    /// Text in UTF-8.
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,
    /// Tokens that the model sees at a time, the starting token included.
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub context: usize,
    /// Most tokens of the text that are used.
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub max_tokens: usize,
}

impl TextArgs {
    /// Cuts the text's tokens into windows.
    pub fn windows(&self, tokenizer: &Tokenizer, bos: Option<u32>) -> anyhow::Result<Vec<Vec<u32>>> {
        if self.context < 2 || self.max_tokens == 0 {
            bail!("--context must be at least 2 and --max-tokens at least 1");
        }
        let bos = tokenizer.bos(bos);
        let ids = tokenizer.encode(&read_text(&self.text)?, bos)?;
        let windows = windows(&ids, bos, self.context, self.max_tokens);
        if windows.is_empty() {
            bail!("{}: the text has no token to predict", self.text.display());
        }
        Ok(windows)
    }

    /// Cuts the text into windows like [`TextArgs::windows`], with a checkpoint's tokenizer.
    pub fn of_checkpoint(&self, checkpoint: &Checkpoint) -> anyhow::Result<Vec<Vec<u32>>> {
        self.windows(&tokenizer(checkpoint)?, bos(checkpoint))
    }
}

/// Reads a text file.
pub fn read_text(path: &Path) -> anyhow::Result<String> {
    Ok(anemoe_io::read_text(path, MAX_TEXT_BYTES).map_err(|source| Error::io(path, source))?)
}
