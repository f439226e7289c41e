//! The prompt on the command line.

use anemoe_text::tokenizer::Tokenizer;
use anyhow::Context;
use std::io::Read;
use std::path::{Path, PathBuf};

/// A prompt as text or as ids.
#[derive(clap::Args, Clone)]
#[group(required = true, multiple = false)]
pub struct PromptArgs {
    /// Text, tokenized with the model's tokenizer; - reads it from standard input.
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,
    /// File that holds the text, in UTF-8. The end of its last line does not count, as for standard input.
    #[arg(long, value_name = "F")]
    prompt_file: Option<PathBuf>,
    /// Token ids, for instance 2,42,7.
    #[arg(long, value_name = "IDS", value_delimiter = ',', value_parser = token_id)]
    prompt_ids: Option<Vec<u32>>,
}

impl PromptArgs {
    /// Returns the prompt's token ids; `tokenizer` opens the model's tokenizer, which only a text needs.
    pub fn ids(
        &self,
        tokenizer: impl FnOnce() -> anyhow::Result<Tokenizer>,
        bos: Option<u32>,
    ) -> anyhow::Result<Vec<u32>> {
        if let Some(ids) = &self.prompt_ids {
            return Ok(ids.clone());
        }
        let text = match (&self.prompt, &self.prompt_file) {
            (Some(text), _) if text == "-" => {
                bounded_text(std::io::stdin().lock(), "standard input", "prompt")?
            }
            (Some(text), _) => text.clone(),
            (None, Some(path)) => text_of(path)?,
            (None, None) => anyhow::bail!("give --prompt, --prompt-file or --prompt-ids"),
        };
        let tokenizer =
            tokenizer().context("a text prompt needs the model's tokenizer; give --prompt-ids instead")?;
        // An empty text is a prompt where one token starts every text.
        let ids = tokenizer.encode(&text, bos)?;
        anyhow::ensure!(!ids.is_empty(), "--prompt: the prompt is empty");
        Ok(ids)
    }
}

/// Longest prompt from a file or from standard input, in bytes: far beyond any context.
pub const MAX_PROMPT: u64 = 16_000_000;

fn text_of(path: &Path) -> anyhow::Result<String> {
    let what = || format!("--prompt-file {}", path.display());
    if path == Path::new("-") && !path.exists() {
        anyhow::bail!("{}: there is no file of this name; --prompt - reads standard input", what());
    }
    let found = std::fs::metadata(path).with_context(what)?;
    anyhow::ensure!(found.is_file(), "{}: not a regular file; --prompt - reads standard input", what());
    bounded_text(anemoe_io::open_input(path, u64::MAX).with_context(what)?, &what(), "prompt")
}

/// Reads a text of at most [`MAX_PROMPT`] bytes, without its byte order mark and the end of its last line; `what` names the
/// source in errors.
pub fn bounded_text(source: impl Read, what: &str, kind: &str) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    source.take(MAX_PROMPT + 1).read_to_end(&mut bytes).with_context(|| what.to_string())?;
    let room = bytes.len() as u64 <= MAX_PROMPT;
    anyhow::ensure!(room, "{what}: the {kind} has more than {} MB", MAX_PROMPT / 1_000_000);
    let text = anemoe_io::without_mark(&bytes).to_vec();
    let Ok(mut text) = String::from_utf8(text) else { anyhow::bail!("{what}: the {kind} is not UTF-8") };
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    anyhow::ensure!(!text.is_empty(), "{what}: the {kind} is empty");
    Ok(text)
}

fn token_id(text: &str) -> Result<u32, String> {
    let text = text.trim();
    text.parse().map_err(|_| format!("`{text}` is not a token id: a number from 0 on"))
}
