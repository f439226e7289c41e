//! Grammars of answers: JSON (by a schema, or any object) and tool calls.

use crate::schema_limits;
use anemoe_runtime::model::Model;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory, token_bytes_from_tokenizer_json};
use serde_json::{Map, Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

/// Most bytes of `tokenizer.json` that are read.
const MAX_BYTES: u64 = 512 << 20;

/// Most work of the library's lexer for one token, in its own unit: some milliseconds.
const MAX_LEXER_FUEL: u64 = 50_000;
/// Most characters of a library's message that are passed on.
const MAX_MESSAGE: usize = 200;

/// Makes matchers over a model's vocabulary, which is prepared on first use.
#[derive(Default)]
pub struct Grammars {
    factory: OnceLock<Result<ParserFactory, String>>,
    words: OnceLock<Result<Arc<TokenBytes>, String>>,
}

/// Bytes of every token, by id.
pub struct TokenBytes(Vec<Vec<u8>>);

impl TokenBytes {
    /// Returns the bytes of a token; `None` for a special token or an id outside the vocabulary.
    pub fn get(&self, id: u32) -> Option<&[u8]> {
        let word = self.0.get(id as usize)?;
        word.first().filter(|byte| **byte != TokTrie::SPECIAL_TOKEN_MARKER).map(|_| word.as_slice())
    }
}

impl Grammars {
    /// Returns the bytes of the model's tokens.
    ///
    /// # Errors
    /// The tokenizer does not tell the bytes of its tokens.
    pub fn words(&self, model: &Model) -> Result<Arc<TokenBytes>, String> {
        self.words.get_or_init(|| catch_panics(|| words(model)).map(|w| Arc::new(TokenBytes(w)))).clone()
    }

    /// Makes a matcher for JSON that fits `schema`.
    ///
    /// # Errors
    /// The schema is wrong, too large or not supported, or the tokenizer has no bytes of its tokens.
    pub fn json(&self, model: &Model, mut schema: Value) -> Result<Matcher, String> {
        schema_limits::check(&schema)?;
        if let Some(schema) = schema.as_object_mut() {
            set_spacing(schema);
        }
        self.matcher(model, TopLevelGrammar::from_json_schema(schema))
    }

    /// Makes a matcher for a grammar in Lark.
    ///
    /// # Errors
    /// The grammar is wrong or not supported, or the tokenizer has no bytes of its tokens.
    pub fn lark(&self, model: &Model, grammar: String) -> Result<Matcher, String> {
        self.matcher(model, TopLevelGrammar::from_lark(grammar))
    }

    fn matcher(&self, model: &Model, grammar: TopLevelGrammar) -> Result<Matcher, String> {
        let factory = self.factory.get_or_init(|| catch_panics(|| factory(model)));
        let factory = factory.as_ref().map_err(Clone::clone)?;
        catch_panics(|| {
            let parser = factory.create_parser(grammar).map_err(|e| first_line(&e.to_string()))?;
            let mut matcher = Matcher::new(Ok(parser));
            // An unusable grammar fails at its first mask.
            matcher.compute_mask().map_err(|e| first_line(&e.to_string()))?;
            Ok(matcher)
        })
    }
}

/// Returns a text quoted as in JSON and Lark.
pub fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Makes a schema's JSON use the spacing that models are trained on, which also excludes endless blanks.
pub fn set_spacing(schema: &mut Map<String, Value>) {
    let spelling = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
    schema.entry("x-guidance").or_insert(spelling);
}

/// Returns the first line of a library's message, at most `MAX_MESSAGE` characters.
pub fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().chars().take(MAX_MESSAGE).collect()
}

/// Turns panics of the library into errors.
fn catch_panics<T>(call: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err("the grammar library failed".into()))
}

/// Reads the bytes of all tokens; those of special tokens begin with a marker.
fn words(model: &Model) -> Result<Vec<Vec<u8>>, String> {
    let path = model.bundle().join("tokenizer.json");
    let text = anemoe_io::read_input(&path, MAX_BYTES).map_err(|e| format!("{}: {e}", path.display()))?;
    let tokenizer: Value = anemoe_io::json::parse(&text).map_err(|e| format!("{}: {e}", path.display()))?;
    token_bytes_from_tokenizer_json(&tokenizer).map_err(|e| e.to_string())
}

fn factory(model: &Model) -> Result<ParserFactory, String> {
    let mut words = words(model)?;
    let info = &model.chain().model;
    // Ids without a token, which no grammar allows.
    words.resize(info.vocab_size, Vec::new());
    for (id, word) in words.iter_mut().enumerate() {
        if word.is_empty() {
            word.push(TokTrie::SPECIAL_TOKEN_MARKER);
            word.extend(format!("<[{id}]>").bytes());
        }
    }
    let ends: Vec<u32> =
        info.eos_token_ids.iter().copied().filter(|id| (*id as usize) < words.len()).collect();
    let Some(&end) = ends.first() else { return Err("the model has no token that ends a text".into()) };
    let size = u32::try_from(words.len()).map_err(|e| e.to_string())?;
    let trie = TokTrie::from(&TokRxInfo::new(size, end), &words).with_eos_tokens(&ends);
    let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new_simple(&environment).map_err(|e| e.to_string())?;
    factory.quiet();
    let limits = factory.limits_mut();
    limits.verbose_errors = false;
    limits.step_lexer_fuel = MAX_LEXER_FUEL;
    Ok(factory)
}

#[cfg(test)]
mod tests {
    use super::{TokTrie, TokenBytes};

    #[test]
    fn a_byte_of_a_character_is_a_word_and_a_special_token_is_none() {
        let words =
            TokenBytes(vec![vec![TokTrie::SPECIAL_TOKEN_MARKER, b'<'], vec![0xe2], b" a".to_vec(), vec![]]);
        assert_eq!(
            [0, 1, 2, 3, 4].map(|id| words.get(id)),
            [None, Some(&[0xe2][..]), Some(b" a"), None, None]
        );
    }
}
