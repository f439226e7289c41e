//! The tokenizer of a bundle.
//!
//! A `tokenizer.json` is a program: a chain of replacements, regular expressions and templates, which the `tokenizers`
//! library runs. The file is checked when it is loaded, steps are bounded while they run, and panics of the library are errors.

mod bounded;
mod contain;
#[cfg(test)]
mod tests;

use crate::{Error, Result};
use bounded::BoundedChain;
use contain::contain;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tokenizers::models::ModelWrapper;
use tokenizers::{
    DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl,
};

/// Largest `tokenizer.json` that is read, in bytes; Gemma's has about 32 MB.
const MAX_TOKENIZER_BYTES: u64 = 512 << 20;
/// Largest `tokenizer_config.json` that is read, in bytes; Gemma's has 1 MB.
const MAX_CONFIG_BYTES: u64 = 64 << 20;

type Inner = TokenizerImpl<
    ModelWrapper,
    BoundedChain<NormalizerWrapper>,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    BoundedChain<DecoderWrapper>,
>;

/// Converts text to ids and back, by a `tokenizer.json`.
///
/// The whole text is tokenized, without padding: `truncation` and `padding` of the file are for training and are not used.
pub struct Tokenizer {
    inner: Inner,
    path: PathBuf,
    /// True if texts begin with a starting token, false if they do not, by the `tokenizer_config.json`; none where it does not
    /// say.
    add_bos_token: Option<bool>,
    /// Characters of the longest name in the vocabulary, once it was asked for.
    longest: OnceLock<usize>,
}

/// The parts of a `tokenizer.json` that are checked before the library reads it.
#[derive(Deserialize)]
struct TokenizerParts {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    model: ModelHead,
}

/// Fields of a model, without its vocabulary.
#[derive(Default, Deserialize)]
struct ModelHead {
    #[serde(default)]
    continuing_subword_prefix: Value,
}

/// The keys of `tokenizer_config.json` that are read here.
#[derive(Default, Deserialize)]
struct ConfigHead {
    #[serde(default)]
    add_bos_token: Value,
    #[serde(default)]
    tokenizer_class: Value,
}

impl ConfigHead {
    /// Tells whether texts begin with a starting token. Files of Gemma say wrongly that they do not.
    fn adds_bos(&self) -> Option<bool> {
        let is_gemma = self.tokenizer_class.as_str().is_some_and(|class| class.starts_with("Gemma"));
        self.add_bos_token.as_bool().filter(|adds| *adds || !is_gemma)
    }
}

/// Merges of a BPE model, in both forms of the file.
#[derive(Deserialize)]
struct Merging {
    model: Merges,
}

#[derive(Deserialize)]
struct Merges {
    #[serde(default)]
    merges: Vec<Merge>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair((IgnoredAny, String)),
    Text(String),
}

/// Refuses merges whose second token is shorter than the prefix that the library cuts off it, or would be cut inside a
/// character: the library does not check.
fn check_merges(text: &[u8], prefix: &str) -> std::result::Result<(), String> {
    let Merging { model } = serde_json::from_slice(text).map_err(|e| format!("model: {e}"))?;
    for merge in &model.merges {
        let second = match merge {
            Merge::Pair((_, second)) => second,
            Merge::Text(both) => both.split_once(' ').map_or("", |(_, second)| second),
        };
        if !second.is_char_boundary(prefix.len()) {
            let (second, prefix) = (second.escape_debug(), prefix.escape_debug());
            return Err(format!(
                "model: a merge ends with `{second}`, which has no `continuing_subword_prefix` `{prefix}`"
            ));
        }
    }
    Ok(())
}

/// Reads the text of a `tokenizer.json`.
///
/// # Errors
/// The file cannot be read, or is too large.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    anemoe_io::read_input(path, MAX_TOKENIZER_BYTES).map_err(|e| Error::io(path, e))
}

impl Tokenizer {
    /// Reads a `tokenizer.json`, and `add_bos_token` of a `tokenizer_config.json` beside it.
    ///
    /// # Errors
    /// The file cannot be read, or it fails like [`Tokenizer::from_bytes`].
    pub fn open(path: &Path) -> Result<Tokenizer> {
        let text = read(path)?;
        let config = anemoe_io::read_input(&path.with_file_name("tokenizer_config.json"), MAX_CONFIG_BYTES);
        Ok(Tokenizer::from_bytes(&text, path)?.with_config(&config.unwrap_or_default()))
    }

    /// Returns the tokenizer with what the text of a `tokenizer_config.json` says of it.
    #[must_use]
    pub fn with_config(self, text: &[u8]) -> Tokenizer {
        // A wrong configuration is the chat template's to refuse.
        let config: ConfigHead = anemoe_io::json::parse(text).unwrap_or_default();
        Tokenizer { add_bos_token: config.adds_bos(), ..self }
    }

    /// Reads the text of a `tokenizer.json`; `path` names the file in errors.
    ///
    /// # Errors
    /// The text is not a tokenizer, or one of its parts may make a text much longer.
    pub fn from_bytes(text: &[u8], path: &Path) -> Result<Tokenizer> {
        let inner = load(anemoe_io::without_mark(text))
            .map_err(|what| Error::invalid(path, format!("tokenizer: {what}")))?;
        Ok(Tokenizer { inner, path: path.to_path_buf(), add_bos_token: None, longest: OnceLock::new() })
    }

    /// Returns the token that begins a text: `bos`, the model's, or none where texts of this tokenizer begin without it.
    ///
    /// `tokenizer.json` decides where it writes the token itself (Llama 3), else `add_bos_token`. Without both,
    /// SentencePiece's tokenizers (Llama 2, Gemma) begin with it, and byte-level ones (Qwen, SmolLM2, gpt-oss) do not.
    pub fn bos(&self, bos: Option<u32>) -> Option<u32> {
        let own = || self.ids_of("", true).ok()?.first().copied();
        bos.filter(|bos| self.add_bos_token.unwrap_or(!self.is_byte_level()) || own() == Some(*bos))
    }

    fn is_byte_level(&self) -> bool {
        use DecoderWrapper::ByteLevel;
        self.inner.get_decoder().is_some_and(|d| d.steps().any(|step| matches!(step, ByteLevel(_))))
    }

    /// Returns the ids of `text`, with special tokens recognised; [`Tokenizer::bos`] is put first where the tokenizer itself
    /// does not add it.
    ///
    /// # Errors
    /// The tokenizer fails on the text, or lengthens it too much.
    pub fn encode(&self, text: &str, bos: Option<u32>) -> Result<Vec<u32>> {
        let mut ids = self.ids_of(text, true)?;
        if let Some(bos) = self.bos(bos).filter(|bos| ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Returns the ids of a text in which special tokens are written out, as by chat templates; no token is added.
    ///
    /// # Errors
    /// Fails like [`Tokenizer::encode`].
    pub fn encode_written(&self, text: &str) -> Result<Vec<u32>> {
        self.ids_of(text, false)
    }

    fn ids_of(&self, text: &str, adds_special: bool) -> Result<Vec<u32>> {
        let encoding = called(|| self.inner.encode(text, adds_special))
            .map_err(|e| Error::invalid(&self.path, format!("tokenizer: cannot encode the text: {e}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Tells whether a token is special: it stands for no text.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.get_added_vocabulary().is_special_token(&self.name(id))
    }

    /// Returns the id of the special token `name`; none where it is no token, or stands for text.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        let added = self.inner.get_added_vocabulary();
        self.inner.token_to_id(name).filter(|_| added.is_special_token(name))
    }

    /// Returns the id of a token by its name in the vocabulary.
    pub fn id(&self, name: &str) -> Option<u32> {
        self.inner.token_to_id(name)
    }

    /// Returns the number of characters of the longest name in the vocabulary: no token stands for more of a text.
    pub fn longest_token(&self) -> usize {
        let names = || self.inner.get_vocab(true).keys().map(|name| name.chars().count()).max();
        *self.longest.get_or_init(|| names().unwrap_or(0).max(1))
    }

    /// Returns the token's name in the vocabulary; empty for an id that has none.
    pub fn name(&self, id: u32) -> String {
        self.inner.id_to_token(id).unwrap_or_default()
    }

    /// Returns the first id that has another name in `other`, with both names; none where all agree.
    pub fn difference(&self, other: &Tokenizer) -> Option<(u32, [String; 2])> {
        let differing = |(own, other): (&Tokenizer, &Tokenizer)| {
            let names = own.inner.get_vocab(true).into_iter();
            names.filter(|(name, id)| other.id(name) != Some(*id)).map(|(_, id)| id).min()
        };
        let id = [(self, other), (other, self)].into_iter().filter_map(differing).min()?;
        Some((id, [self.name(id), other.name(id)]))
    }

    /// Returns the text of `ids`, without special tokens.
    ///
    /// # Errors
    /// The tokenizer fails on the ids, or makes too long a text of them.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        called(|| self.inner.decode(ids, true))
            .map_err(|e| Error::invalid(&self.path, format!("tokenizer: cannot decode tokens: {e}")))
    }
}

/// Calls the library; its errors and its panics become text.
fn called<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> std::result::Result<T, String> {
    contain(call)?.map_err(|e| e.to_string())
}

fn load(text: &[u8]) -> std::result::Result<Inner, String> {
    // Merges as lists of two short texts take 25 times their text; the library keeps them in less.
    let mut left = 2 * anemoe_io::json::form_limit(text.len() as u64);
    let parts: TokenizerParts = anemoe_io::json::parse_within(text, &mut left).map_err(|e| e.to_string())?;
    let in_part = |part: &'static str| move |what: String| format!("{part}: {what}");
    for (part, value) in [
        ("normalizer", &parts.normalizer),
        ("pre_tokenizer", &parts.pre_tokenizer),
        ("post_processor", &parts.post_processor),
        ("decoder", &parts.decoder),
    ] {
        bounded::check_part(value).map_err(in_part(part))?;
    }
    if let Some(prefix) = parts.model.continuing_subword_prefix.as_str().filter(|p| !p.is_empty()) {
        check_merges(text, prefix)?;
    }
    let mut inner: Inner = called(|| Ok(serde_json::from_slice(text)?))?;
    inner.with_padding(None);
    called(|| inner.with_truncation(None).map(|_| ()))?;
    // In the library's own form every step has its type.
    let own = serde_json::to_value((inner.get_pre_tokenizer(), inner.get_post_processor()));
    let own = own.map_err(|e| e.to_string())?;
    bounded::check_pre_tokenizer(&own[0]).map_err(in_part("pre_tokenizer"))?;
    bounded::check_post_processor(&own[1]).map_err(in_part("post_processor"))?;
    if let ModelWrapper::WordPiece(model) = inner.get_model()
        && model.max_input_chars_per_word > bounded::MAX_WORD_CHARS
    {
        let (n, max) = (model.max_input_chars_per_word, bounded::MAX_WORD_CHARS);
        return Err(format!("model: `max_input_chars_per_word` is {n}, more than {max}"));
    }
    Ok(inner)
}

/// Text that grows token by token. A character whose bytes are in several tokens appears with its last token.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    ids: Vec<u32>,
    /// Number of tokens whose text is final. Later ones are decoded again with every token, because a decoder may join them.
    settled: usize,
    shown: usize,
    /// Special tokens whose names appear in the text.
    marks: Vec<u32>,
}

impl<'a> TextStream<'a> {
    /// Makes a stream that continues `prompt`, without the prompt's text.
    pub fn new(tokenizer: &'a Tokenizer, prompt: &[u32]) -> Result<Self> {
        let (start, shown) = context(tokenizer, prompt)?;
        Ok(TextStream { tokenizer, ids: prompt[start..].to_vec(), settled: 0, shown, marks: Vec::new() })
    }

    /// Returns the stream with these special tokens shown by name; other special tokens are left out.
    #[must_use]
    pub fn with_marks(self, marks: Vec<u32>) -> Self {
        TextStream { marks, ..self }
    }

    /// Adds a token and returns the text that becomes final; empty while a character is incomplete.
    ///
    /// # Errors
    /// The tokenizer fails on the ids.
    pub fn push(&mut self, id: u32) -> Result<String> {
        let mut text = self.settle(id)?;
        if self.marks.contains(&id) {
            text += &self.tokenizer.name(id);
        }
        Ok(text)
    }

    /// Adds a token and returns the text that becomes final, without names of special tokens.
    fn settle(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids[self.settled..])?;
        let is_open = text.ends_with('\u{fffd}') && !self.ends_with_replacement();
        if is_open || !text.is_char_boundary(self.shown.min(text.len())) {
            return Ok(String::new());
        }
        let new = text.get(self.shown..).unwrap_or_default().to_string();
        self.shown = text.len();
        if self.ids.len() - self.settled > 32 {
            // This keeps the cost per token constant.
            (self.settled, self.shown) = context(self.tokenizer, &self.ids)?;
        }
        Ok(new)
    }

    /// Tells whether the last tokens name the replacement character itself, U+FFFD, rather than a part of a character: as
    /// text, as the letters that stand for its three bytes, or as bytes.
    fn ends_with_replacement(&self) -> bool {
        let last = &self.ids[self.ids.len().saturating_sub(3)..];
        let names: String = last.iter().map(|id| self.tokenizer.name(*id)).collect();
        ["\u{fffd}", "ï¿½", "<0xEF><0xBF><0xBD>"].iter().any(|name| names.ends_with(name))
    }
}

/// Returns the start of the last tokens that decide on the text of the next one, and the bytes of their text. They decide whether
/// it starts with a space, and begin with the first byte of a character: a decoder spoils all bytes behind a wrong one.
fn context(tokenizer: &Tokenizer, ids: &[u32]) -> Result<(usize, usize)> {
    let mut four = None;
    // A character has up to four bytes, each a token.
    for n in 4..8 {
        let start = ids.len().saturating_sub(n);
        let text = tokenizer.decode(&ids[start..])?;
        if !text.starts_with('\u{fffd}') {
            return Ok((start, text.len()));
        }
        four.get_or_insert((start, text.len()));
    }
    Ok(four.unwrap_or_default())
}
