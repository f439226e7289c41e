//! Steps of a tokenizer, limited by the length of the text that they get.
//!
//! ```text
//! text -> normalizer steps -> pre-tokenizer -> model -> post-processor -> ids
//! ids -> tokens -> decoder steps -> text
//! ```
//! Every step of a chain may lengthen a text, and the growth multiplies: 26 steps that double a text make 67 million characters
//! of one. Normalizers and decoders are measured before every step. Pre-tokenizers and post-processors, whose steps have few
//! forms, are checked when they are loaded.

use super::contain::refuse;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::{Decoder, NormalizedString, Normalizer};

/// Largest growth of a text in a chain. Metaspace makes 3 bytes of a space, NFKC up to 11 bytes of one.
const MAX_GROWTH: usize = 16;
/// Bytes that a chain may add to a text of any length.
const MAX_ADDED: usize = 64 << 10;
/// Most steps of a chain; published tokenizers have up to 10.
const MAX_STEPS: usize = 64;
/// Deepest nesting of arrays and objects in a chain: a sequence in a sequence has depth 4.
const MAX_DEPTH: usize = 16;
/// Largest regular expression, in bytes; published ones have up to 5 thousand.
const MAX_REGEX_BYTES: usize = 64 << 10;
/// Largest product of the counts `{n}` of a regular expression: each count copies its operand.
const MAX_REGEX_COUNTS: u64 = 10_000;
/// Largest table of replacements, in bytes of base64; published ones have 320 thousand.
const MAX_TABLE_BYTES: usize = 4 << 20;
/// Most times that a post-processor may repeat a text; [`MAX_PRE_GROWTH`]: largest growth of a text by a pre-tokenizer.
const MAX_REPEATS: u64 = 4;
const MAX_PRE_GROWTH: u64 = 64;
/// Most tokens that a post-processor may add.
const MAX_ADDED_TOKENS: u64 = 4096;
/// Longest word that a WordPiece model may search, in characters: its time grows with the cube. The format's default is 100.
pub const MAX_WORD_CHARS: usize = 1000;

/// Returns the longest text, in bytes, that a chain may make of `bytes` bytes.
fn limit(bytes: usize) -> usize {
    bytes.saturating_mul(MAX_GROWTH).saturating_add(MAX_ADDED)
}

fn too_long(step: &str, bytes: usize, limit: usize) -> String {
    format!("step {step} makes {bytes} bytes or more of the text, more than {limit}")
}

/// Refuses a part of a tokenizer that is nested too deeply, or whose regular expressions or tables are too large.
pub fn check_part(value: &Value) -> Result<(), String> {
    fn walk(value: &Value, depth: usize) -> Result<(), String> {
        if depth > MAX_DEPTH {
            return Err(format!("nested more than {MAX_DEPTH} deep"));
        }
        match value {
            Value::Array(values) => values.iter().try_for_each(|v| walk(v, depth + 1)),
            Value::Object(map) => map.iter().try_for_each(|(key, v)| match (key.as_str(), v) {
                ("Regex", Value::String(regex)) => check_regex(regex),
                ("precompiled_charsmap", Value::String(table)) => check_table(table),
                _ => walk(v, depth + 1),
            }),
            _ => Ok(()),
        }
    }
    walk(value, 0)
}

/// Refuses a table of replacements that claims more bytes than it has: its first four bytes are the length of the part behind
/// them.
fn check_table(table: &str) -> Result<(), String> {
    let what = "`precompiled_charsmap`";
    if table.len() > MAX_TABLE_BYTES {
        return Err(format!("{what}: {} bytes of base64, more than {MAX_TABLE_BYTES}", table.len()));
    }
    let bytes = STANDARD.decode(table).ok();
    let claimed = bytes.as_ref().and_then(|bytes| Some(u32::from_le_bytes(*bytes.first_chunk()?)));
    match (claimed, table.len() / 4 * 3) {
        (None, _) => Err(format!("{what}: not the base64 of a table")),
        (Some(claimed), bytes) if claimed as usize > bytes => {
            Err(format!("{what}: a table of {claimed} bytes in {bytes}"))
        }
        _ => Ok(()),
    }
}

fn check_regex(regex: &str) -> Result<(), String> {
    if regex.len() > MAX_REGEX_BYTES {
        return Err(format!("a regular expression of {} bytes, more than {MAX_REGEX_BYTES}", regex.len()));
    }
    let mut product = 1u64;
    for (at, _) in regex.match_indices('{') {
        // `\x{20AC}` and `\u{20AC}` are characters.
        if regex[..at].ends_with("\\x") || regex[..at].ends_with("\\u") || regex[..at].ends_with("\\U") {
            continue;
        }
        let inside = regex[at + 1..].split('}').next().unwrap_or_default();
        let counts = inside.split(',').filter_map(|n| match n.trim() {
            n if n.is_empty() || n.bytes().any(|b| !b.is_ascii_digit()) => None,
            n => Some(n.parse::<u64>().unwrap_or(u64::MAX)),
        });
        product = product.saturating_mul(counts.max().unwrap_or(1).max(1));
    }
    match product {
        0..=MAX_REGEX_COUNTS => Ok(()),
        _ => Err(format!("the counts of a regular expression multiply to more than {MAX_REGEX_COUNTS}")),
    }
}

/// A replacement; it gives the length of its result without computing the result.
struct Replacement {
    /// Bytes that a match becomes.
    content: usize,
    /// Fewest bytes of a match; 0 if the pattern also matches between two characters.
    least: usize,
}

impl Replacement {
    /// Makes the replacement of a step in the library's own form; `None` where it is another step.
    fn of(step: &Value) -> Option<Replacement> {
        let content = step["content"].as_str().filter(|_| step["type"] == "Replace")?.len();
        Some(Replacement { content, least: step["pattern"]["String"].as_str().map_or(0, str::len) })
    }

    /// Returns the most bytes that the replacement may make of `bytes` bytes.
    fn worst(&self, bytes: usize) -> usize {
        let matches = bytes.checked_div(self.least).unwrap_or(bytes.saturating_add(1));
        bytes.saturating_add(matches.saturating_mul(self.content))
    }
}

/// A normalizer or a decoder.
pub trait StepOfChain: DeserializeOwned + Serialize {
    /// Returns the steps of a sequence; `None` where this is a step.
    fn inner(&self) -> Option<Vec<Self>>;
}

impl StepOfChain for NormalizerWrapper {
    fn inner(&self) -> Option<Vec<Self>> {
        match self {
            NormalizerWrapper::Sequence(sequence) => Some(sequence.clone().into_iter().collect()),
            _ => None,
        }
    }
}

impl StepOfChain for DecoderWrapper {
    fn inner(&self) -> Option<Vec<Self>> {
        match self {
            DecoderWrapper::Sequence(sequence) => Some(sequence.get_decoders().to_vec()),
            _ => None,
        }
    }
}

struct BoundedStep<S> {
    name: String,
    step: S,
    replacement: Option<Replacement>,
}

/// Normalizers or decoders that run one after the other, each measured before it runs.
pub struct BoundedChain<S>(Vec<BoundedStep<S>>);

impl<'de, S: StepOfChain> Deserialize<'de> for BoundedChain<S> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        fn add<S: StepOfChain>(step: S, steps: &mut Vec<BoundedStep<S>>) -> Result<(), String> {
            if let Some(inner) = step.inner() {
                return inner.into_iter().try_for_each(|step| add(step, steps));
            }
            let value = serde_json::to_value(&step).map_err(|e| e.to_string())?;
            let name = value["type"].as_str().unwrap_or("without a type").to_string();
            steps.push(BoundedStep { name, step, replacement: Replacement::of(&value) });
            check_steps(steps.len())
        }
        // Any JSON value is read first; a value that is no step then gets an error of its own.
        let value = Value::deserialize(deserializer)?;
        let mut steps = Vec::new();
        add(serde_json::from_value(value).map_err(D::Error::custom)?, &mut steps)
            .map_err(D::Error::custom)?;
        Ok(BoundedChain(steps))
    }
}

impl<S> BoundedChain<S> {
    /// Returns the steps, in order.
    pub fn steps(&self) -> impl Iterator<Item = &S> {
        self.0.iter().map(|bounded| &bounded.step)
    }
}

fn check_steps(steps: usize) -> Result<(), String> {
    match steps {
        0..=MAX_STEPS => Ok(()),
        _ => Err(format!("more than {MAX_STEPS} steps")),
    }
}

/// Returns the bytes that a normalizer makes of `text`, or an upper bound of them; a number above `limit` if the result would be
/// longer than that.
fn measure(step: &BoundedStep<NormalizerWrapper>, text: &str, limit: usize) -> Result<usize, String> {
    use NormalizerWrapper::*;
    if let Some(replacement) = &step.replacement {
        return Ok(replacement.worst(text.len()));
    }
    // Largest growth of a byte, and bytes of text that are normalized at a time.
    let (growth, piece) = match &step.step {
        Prepend(prepend) => return Ok(text.len().saturating_add(prepend.prepend.len())),
        Replace(_) | Sequence(_) | StripNormalizer(_) | StripAccents(_) | Nmt(_) => return Ok(text.len()),
        // `İ`, 2 bytes, becomes `i̇`, 3 bytes.
        ByteLevel(_) | Lowercase(_) => (2, 4096),
        NFC(_) | NFD(_) => (3, 4096),
        BertNormalizer(_) => (9, 4096),
        // U+FDFA, 3 bytes, becomes 33 bytes.
        NFKC(_) | NFKD(_) => (11, 4096),
        // Any character may become a text of any length.
        Precompiled(_) => (usize::MAX, 16),
    };
    let worst = text.len().saturating_mul(growth);
    if worst <= limit {
        return Ok(worst);
    }
    let (mut rest, mut bytes) = (text, 0usize);
    while !rest.is_empty() && bytes <= limit {
        let end = rest.char_indices().map(|(at, c)| at + c.len_utf8()).find(|end| *end >= piece);
        let (one, others) = rest.split_at(end.unwrap_or(rest.len()));
        let mut made = NormalizedString::from(one);
        step.step.normalize(&mut made).map_err(|e| e.to_string())?;
        bytes = bytes.saturating_add(made.len());
        rest = others;
    }
    Ok(bytes)
}

impl Normalizer for BoundedChain<NormalizerWrapper> {
    /// Normalizes `text`. A refusal unwinds to [`contain`](super::contain::contain), because the library drops errors of
    /// normalizers.
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        let limit = limit(text.len());
        let mut run = |step: &BoundedStep<NormalizerWrapper>| {
            let bytes = measure(step, text.get(), limit)?;
            if bytes > limit {
                return Err(too_long(&step.name, bytes, limit));
            }
            step.step.normalize(text).map_err(|e| format!("step {}: {e}", step.name))
        };
        self.0.iter().try_for_each(&mut run).unwrap_or_else(|what| refuse(format!("normalizer: {what}")));
        Ok(())
    }
}

impl Decoder for BoundedChain<DecoderWrapper> {
    fn decode_chain(&self, mut tokens: Vec<String>) -> tokenizers::Result<Vec<String>> {
        let bytes = |tokens: &[String]| tokens.iter().map(String::len).sum::<usize>();
        let limit = limit(bytes(&tokens));
        for BoundedStep { name, step, replacement } in &self.0 {
            let worst = |token: &String| replacement.as_ref().map_or(token.len(), |r| r.worst(token.len()));
            let mut made = tokens.iter().map(worst).fold(0, usize::saturating_add);
            if made <= limit {
                // Every other decoder adds at most a space to a character or a token.
                tokens = step.decode_chain(tokens)?;
                made = bytes(&tokens);
            }
            if made > limit {
                return Err(format!("decoder: {}", too_long(name, made, limit)).into());
            }
        }
        Ok(tokens)
    }
}

/// Lists the steps of a part in the library's own form, with sequences flattened.
fn steps<'a>(value: &'a Value, list: &str, out: &mut Vec<&'a Value>) {
    match value[list].as_array() {
        Some(inner) => inner.iter().for_each(|v| steps(v, list, out)),
        None => out.push(value),
    }
}

/// Refuses a pre-tokenizer that may lengthen a text too much; `value` is the library's own form of it.
pub fn check_pre_tokenizer(value: &Value) -> Result<(), String> {
    let mut all = Vec::new();
    steps(value, "pretokenizers", &mut all);
    check_steps(all.len())?;
    let mut growth = 1u64;
    for step in all {
        growth = growth.saturating_mul(match step["type"].as_str() {
            // Two bytes for each byte, and a space before each word.
            Some("ByteLevel") => 4,
            // Four bytes for a space, and four before each word.
            Some("Metaspace") => 8,
            _ => 1,
        });
        if step["type"] == "FixedLength" && step["length"] == 0 {
            return Err("FixedLength: pieces of length 0".into());
        }
    }
    match growth {
        0..=MAX_PRE_GROWTH => Ok(()),
        _ => Err(format!("its steps may make a text {growth} times as long, more than {MAX_PRE_GROWTH}")),
    }
}

/// Refuses a post-processor that repeats a text too often, adds too many tokens, or names tokens that it does not define;
/// `value` is the library's own form of it.
pub fn check_post_processor(value: &Value) -> Result<(), String> {
    let mut all = Vec::new();
    steps(value, "processors", &mut all);
    check_steps(all.len())?;
    let (mut repeats, mut added) = (1u64, 0u64);
    for step in all.into_iter().filter(|step| step["type"] == "TemplateProcessing") {
        let tokens = &step["special_tokens"];
        for template in ["single", "pair"] {
            let (mut sequences, mut ids) = (0, 0);
            for piece in step[template].as_array().into_iter().flatten() {
                let Some(id) = piece["SpecialToken"]["id"].as_str() else {
                    if template == "single" && piece["Sequence"]["id"] != "A" {
                        return Err("template `single` has a second text".into());
                    }
                    sequences += 1;
                    continue;
                };
                let lengths = ["ids", "tokens"].map(|list| tokens[id][list].as_array().map(Vec::len));
                ids += match lengths {
                    [Some(ids), Some(tokens)] if ids == tokens => ids as u64,
                    [Some(ids), Some(tokens)] => {
                        return Err(format!(
                            "`special_tokens` has {ids} `ids` and {tokens} `tokens` for `{}`, expected as many of both",
                            id.escape_debug()
                        ));
                    }
                    _ => {
                        return Err(format!(
                            "template `{template}` has the token `{}`, which is not among `special_tokens`",
                            id.escape_debug()
                        ));
                    }
                };
            }
            if template == "single" {
                repeats = repeats.saturating_mul(sequences);
                added = added.saturating_add(ids);
            }
        }
    }
    if repeats > MAX_REPEATS {
        return Err(format!("its templates repeat a text {repeats} times, more than {MAX_REPEATS}"));
    }
    if added > MAX_ADDED_TOKENS {
        return Err(format!("its templates add {added} tokens, more than {MAX_ADDED_TOKENS}"));
    }
    Ok(())
}
