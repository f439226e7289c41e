//! Text with its tokens, and the tokens of a text that continues it.

use crate::Result;
use crate::tokenizer::Tokenizer;

/// Text of a prompt and its answer, with its tokens; the answer's tokens are the generated ones. A tokenizer may split the same
/// text in another way, and the next turn's tokens would then not begin with those of the turn before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptText {
    /// Text of prompt and answer.
    pub text: String,
    /// Tokens of the text.
    pub ids: Vec<u32>,
}

impl PromptText {
    /// Returns the tokens of a whole text, in which special tokens are written out. Where `text` begins with the text of `self`
    /// and ends there or goes on with a special token, the tokens begin with those of `self`.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn encode(&self, tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
        // Templates cut blanks off the end of an answer.
        for known in [self.text.as_str(), self.text.trim_end()] {
            if known.is_empty() || self.ids.is_empty() {
                continue;
            }
            if let Some(rest) = text.strip_prefix(known)
                && (rest.is_empty() || first_special(tokenizer, rest).is_some())
            {
                let mut ids = self.ids.clone();
                ids.extend(tokenizer.encode_written(rest)?);
                return Ok(ids);
            }
        }
        tokenizer.encode_written(text)
    }
}

/// Returns the special token that a text begins with.
pub fn first_special(tokenizer: &Tokenizer, text: &str) -> Option<u32> {
    // Tokens are short: the first 256 characters decide.
    let end = text.char_indices().nth(256).map_or(text.len(), |(i, _)| i);
    let ids = tokenizer.encode_written(&text[..end]).ok()?;
    ids.first().copied().filter(|id| tokenizer.is_special(*id))
}
