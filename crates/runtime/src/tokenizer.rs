//! The tokenizer of a bundle.

use crate::{Error, Result};
use std::path::Path;

/// Largest `tokenizer.json` that is read; Gemma's is about 32 MB.
const MAX_TOKENIZER_BYTES: u64 = 512 << 20;

/// Text to ids and back, as `tokenizer.json` says.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// The file cannot be read or is not a tokenizer.
    pub fn open(path: &Path) -> Result<Tokenizer> {
        let len = std::fs::metadata(path).map_err(|e| Error::io(path, e))?.len();
        if len > MAX_TOKENIZER_BYTES {
            return Err(Error::invalid(
                path,
                format!("tokenizer: {len} bytes, more than {MAX_TOKENIZER_BYTES}"),
            ));
        }
        let text = anemoe_files::read(path).map_err(|e| Error::io(path, e))?;
        Tokenizer::from_bytes(&text, path)
    }

    /// From the text of a `tokenizer.json`; `path` names it in errors.
    ///
    /// # Errors
    /// The text is not a tokenizer.
    pub fn from_bytes(text: &[u8], path: &Path) -> Result<Tokenizer> {
        let inner = tokenizers::Tokenizer::from_bytes(text)
            .map_err(|e| Error::invalid(path, format!("tokenizer: {e}")))?;
        Ok(Tokenizer { inner })
    }

    /// Ids of `text`, special tokens recognised, started by `bos` where the tokenizer itself does not add it.
    ///
    /// # Errors
    /// The tokenizer refuses the text.
    pub fn encode(&self, text: &str, bos: Option<u32>) -> Result<Vec<u32>> {
        let encoding =
            self.inner.encode(text, true).map_err(|e| Error::Input(format!("cannot tokenize: {e}")))?;
        let mut ids = encoding.get_ids().to_vec();
        if let Some(bos) = bos.filter(|bos| ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Text of `ids`, special tokens left out.
    ///
    /// # Errors
    /// The tokenizer refuses the ids.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, true).map_err(|e| Error::Input(format!("cannot decode: {e}")))
    }
}

/// Text that grows token by token. A character whose bytes are spread over tokens appears with its last one.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    ids: Vec<u32>,
    /// Tokens whose text is settled; those behind are decoded again with every token, since a decoder may join them.
    settled: usize,
    shown: usize,
}

impl<'a> TextStream<'a> {
    /// A stream that continues `prompt`, whose text is not repeated.
    pub fn new(tokenizer: &'a Tokenizer, prompt: &[u32]) -> Result<Self> {
        // A few tokens of context decide whether the first new token starts with a space.
        let ids = prompt[prompt.len().saturating_sub(4)..].to_vec();
        let shown = tokenizer.decode(&ids)?.len();
        Ok(TextStream { tokenizer, ids, settled: 0, shown })
    }

    /// Adds a token and returns the text that it settles; empty while a character is incomplete.
    ///
    /// # Errors
    /// The tokenizer refuses the ids.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids[self.settled..])?;
        if text.ends_with('\u{fffd}') || !text.is_char_boundary(self.shown.min(text.len())) {
            return Ok(String::new());
        }
        let new = text.get(self.shown..).unwrap_or_default().to_string();
        self.shown = text.len();
        if self.ids.len() - self.settled > 32 {
            // Keeps the cost per token constant; the last tokens stay as context.
            self.settled = self.ids.len() - 4;
            self.shown = self.tokenizer.decode(&self.ids[self.settled..])?.len();
        }
        Ok(new)
    }
}
