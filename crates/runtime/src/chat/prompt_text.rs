//! Text whose tokens are known, and the tokens of a text that goes on from it.

use crate::Result;
use crate::tokenizer::Tokenizer;

/// Text of a prompt and its answer, with the tokens that it is made of: those of the answer as they were generated. A tokenizer
/// may cut the same text in another way, and then the sequence of the turn before would not be the beginning of the next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptText {
    /// Text.
    pub text: String,
    /// Its tokens.
    pub ids: Vec<u32>,
}

impl PromptText {
    /// Tokens of a whole text, in which special tokens are written out; those of `self` for what it begins with, if a special
    /// token follows there.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn encode(&self, tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
        // Templates cut blanks off an answer.
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

/// The special token that a text begins with.
pub fn first_special(tokenizer: &Tokenizer, text: &str) -> Option<u32> {
    // Tokens are short: the rest of a long text does not matter.
    let end = text.char_indices().nth(256).map_or(text.len(), |(i, _)| i);
    let ids = tokenizer.encode_written(&text[..end]).ok()?;
    ids.first().copied().filter(|id| tokenizer.is_special(*id))
}
