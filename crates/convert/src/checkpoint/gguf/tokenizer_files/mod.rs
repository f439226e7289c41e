//! `tokenizer.json` and `tokenizer_config.json` made from a file's metadata.
//!
//! ```text
//! tokenizer.ggml.model   text before it is merged                  merges
//! gpt2                   pieces, by `tokenizer.ggml.pre`; bytes    of the file
//! llama                  `▁` for spaces, `<0x0A>` for bytes        made of the tokens' scores
//! gemma4                 `▁` for spaces, `<0x0A>` for bytes        of the file
//! ```

mod pre_tokenizers;
mod score_merges;
#[cfg(test)]
mod tests;

use super::metadata::{Metadata, TOKENS};
use crate::Result;
use pre_tokenizers::{PreTokenizer, byte_level};
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
/// Character that stands for a space.
const SPACE: &str = "\u{2581}";

/// Numbers in `tokenizer.ggml.token_type`.
const NORMAL: u64 = 1;
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// Tokens that end a text or a turn, which are control tokens whatever a file says: llama.cpp's `src/llama-vocab.cpp`
/// knows them by their text.
const ENDS: &str = "<|eot_id|> <|eom_id|> <|im_end|> <|return|> <|call|> <end_of_turn> <|endoftext|> <|end_of_text|> \
                    <EOT> _<EOT> <｜end▁of▁sentence｜>";

/// Kinds of tokenizers.
#[derive(Clone, Copy)]
enum TokenizerModel {
    /// Merges of bytes, within the pieces of a text.
    ByteLevel(&'static PreTokenizer),
    /// Merges of characters in the order of scores, as SentencePiece and llama.cpp do.
    Scores,
    /// Merges of characters in the order of the file.
    Gemma4,
}

impl TokenizerModel {
    fn read(m: Metadata<'_>) -> Result<TokenizerModel> {
        let name = m.needed(MODEL, m.text(MODEL)?)?;
        let model = match name {
            "gpt2" => {
                let pre = m.text(PRE)?;
                let found = PreTokenizer::named(pre).ok_or_else(|| {
                    let pre = pre.unwrap_or_default().escape_debug();
                    m.unsupported(PRE, format!("is {pre}; implemented are {}", PreTokenizer::names()))
                });
                TokenizerModel::ByteLevel(found?)
            }
            "llama" => TokenizerModel::Scores,
            "gemma4" => TokenizerModel::Gemma4,
            other => {
                let what = format!("is {}; implemented are gpt2, llama and gemma4", other.escape_debug());
                return Err(m.unsupported(MODEL, what));
            }
        };
        if !matches!(model, TokenizerModel::Scores) && m.array_len(MERGES).is_none() {
            return Err(m.invalid(MERGES, "is missing"));
        }
        Ok(model)
    }
}

/// The vocabulary, and the tokens with a role.
struct Vocabulary<'a> {
    model: TokenizerModel,
    tokens: Vec<&'a str>,
    bos: Option<u64>,
    eos: Option<u64>,
    unknown: Option<u64>,
    padding: Option<u64>,
    /// True if a text begins with `bos`, and if it ends with `eos`.
    adds_bos: bool,
    adds_eos: bool,
}

impl<'a> Vocabulary<'a> {
    /// Reads the vocabulary; None where the file has no tokenizer.
    fn read(m: Metadata<'a>) -> Result<Option<Self>> {
        let Some(tokens) = m.texts(TOKENS)? else { return Ok(None) };
        let model = TokenizerModel::read(m)?;
        let is_scores = matches!(model, TokenizerModel::Scores);
        // llama.cpp takes the default for an id outside the vocabulary, too.
        let id = |role: &str, default: Option<u64>| -> Result<_> {
            let default = default.filter(|id| is_scores && *id < tokens.len() as u64);
            Ok(m.special_token(role)?.or(default))
        };
        // The defaults are those of SentencePiece.
        let (unknown, bos, eos) = (id("unknown", Some(0))?, id("bos", Some(1))?, id("eos", Some(2))?);
        let padding = id("padding", None)?;
        let adds_bos = match model {
            TokenizerModel::ByteLevel(pre) => pre.adds_bos,
            TokenizerModel::Scores | TokenizerModel::Gemma4 => true,
        };
        let adds_bos = m.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos);
        let adds_eos = m.flag("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
        Ok(Some(Vocabulary { model, tokens, bos, eos, unknown, padding, adds_bos, adds_eos }))
    }

    fn text(&self, id: Option<u64>) -> Option<&'a str> {
        id.and_then(|id| self.tokens.get(id as usize)).copied()
    }

    /// Reads the tokens' types.
    fn types(&self, m: Metadata<'_>) -> Result<Vec<u64>> {
        let named = [self.bos, self.eos, self.unknown, self.padding];
        let mut types = m.unsigneds(TYPES, self.tokens.len())?.unwrap_or_else(|| {
            let is_named = |id| named.contains(&Some(id as u64));
            (0..self.tokens.len()).map(|id| if is_named(id) { CONTROL } else { NORMAL }).collect()
        });
        if !matches!(self.model, TokenizerModel::Gemma4) {
            let ends: HashSet<&str> = ENDS.split(' ').collect();
            for (kind, text) in types.iter_mut().zip(&self.tokens) {
                if ends.contains(text) {
                    *kind = CONTROL;
                }
            }
        }
        Ok(types)
    }
}

/// Makes `tokenizer.json`; none where the file has no tokenizer.
pub fn tokenizer(m: Metadata<'_>) -> Result<Option<Value>> {
    let Some(v) = Vocabulary::read(m)? else { return Ok(None) };
    let ids = ids(m, &v)?;
    let types = v.types(m)?;
    let mut added = Vec::new();
    let mut unknown = v.text(v.unknown);
    for (id, (text, kind)) in v.tokens.iter().zip(types).enumerate() {
        if kind == UNKNOWN {
            unknown = unknown.or(Some(text));
        }
        // An empty token would be found everywhere.
        if matches!(kind, UNKNOWN | CONTROL | USER_DEFINED) && !text.is_empty() {
            added.push(json!({
                "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": kind != USER_DEFINED,
            }));
        }
    }
    let unknown = unknown.or_else(|| ids.contains_key("<unk>").then_some("<unk>"));
    let mut model = json!({
        "type": "BPE",
        "dropout": null,
        "unk_token": unknown,
        "continuing_subword_prefix": null,
        "end_of_word_suffix": null,
        "fuse_unk": true,
        "byte_fallback": true,
        "ignore_merges": false,
    });
    let (normalizer, pre_tokenizer, decoder, merges) = match v.model {
        TokenizerModel::ByteLevel(pre) => {
            // Every byte is a letter, so that nothing is unknown.
            model["unk_token"] = Value::Null;
            model["fuse_unk"] = json!(false);
            model["byte_fallback"] = json!(false);
            model["ignore_merges"] = json!(pre.ignore_merges);
            (pre.normalizer(), pre.steps(), byte_level(), merges(m, &ids)?)
        }
        TokenizerModel::Scores => {
            let adds_space = m.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
            let merges = score_merges::merges(m, &v.tokens, &ids)?;
            (score_normalizer(m, adds_space)?, Value::Null, space_decoder(adds_space), merges)
        }
        TokenizerModel::Gemma4 => {
            let split = json!({
                "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false,
            });
            (replace(" ", SPACE), split, space_decoder(false), merges(m, &ids)?)
        }
    };
    let vocab: Map<String, Value> =
        v.tokens.iter().enumerate().map(|(id, text)| (name(id, text), id.into())).collect();
    model["vocab"] = vocab.into();
    model["merges"] = merges.into();
    Ok(Some(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor(&v),
        "decoder": decoder,
        "model": model,
    })))
}

fn replace(text: &str, with: &str) -> Value {
    json!({"type": "Replace", "pattern": {"String": text}, "content": with})
}

/// Makes the normalizer of a tokenizer with scores. It runs on each stretch between special tokens, and each begins
/// with a space, as in llama.cpp and in Llama 2's `tokenizer.json`.
fn score_normalizer(m: Metadata<'_>, adds_space: bool) -> Result<Value> {
    if m.array_len("tokenizer.ggml.precompiled_charsmap").is_some_and(|n| n > 0) {
        return Err(m.unsupported("tokenizer.ggml.precompiled_charsmap", "is there; implemented is none"));
    }
    let mut steps = Vec::new();
    if m.flag("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false) {
        for (spaces, one) in [("^ +| +$", ""), (" {2,}", " ")] {
            steps.push(json!({"type": "Replace", "pattern": {"Regex": spaces}, "content": one}));
        }
    }
    if adds_space {
        steps.push(json!({"type": "Prepend", "prepend": SPACE}));
    }
    steps.push(replace(" ", SPACE));
    Ok(match steps.len() {
        1 => steps.remove(0),
        _ => json!({"type": "Sequence", "normalizers": steps}),
    })
}

/// Makes the decoder of tokens with `▁`; the first space is left out where the normalizer adds it.
fn space_decoder(adds_space: bool) -> Value {
    let mut steps = vec![replace(SPACE, " "), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})];
    if adds_space {
        steps.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    json!({"type": "Sequence", "decoders": steps})
}

/// Returns a token's name in `tokenizer.json`: its text, or llama.cpp's name of an empty one.
fn name(id: usize, text: &str) -> String {
    if text.is_empty() { format!("[EMPTY_{id}]") } else { text.to_string() }
}

fn ids<'a>(m: Metadata<'_>, v: &Vocabulary<'a>) -> Result<HashMap<&'a str, usize>> {
    let mut ids = HashMap::with_capacity(v.tokens.len());
    for (id, text) in v.tokens.iter().enumerate().filter(|(_, text)| !text.is_empty()) {
        if let Some(other) = ids.insert(*text, id) {
            return Err(m.invalid(TOKENS, format!("has `{}` as {other} and as {id}", text.escape_debug())));
        }
    }
    Ok(ids)
}

/// Reads the merges: pairs of tokens that make a third. Of equal pairs the first counts.
fn merges(m: Metadata<'_>, ids: &HashMap<&str, usize>) -> Result<Vec<Value>> {
    let mut joined = String::new();
    let mut seen = HashSet::new();
    let mut pairs = Vec::new();
    for (i, merge) in m.texts(MERGES)?.unwrap_or_default().into_iter().enumerate() {
        let wrong = |what: &str| m.invalid(MERGES, format!("has `{}` as {i}, {what}", merge.escape_debug()));
        // The search skips the first byte: the first token may begin with a space itself.
        let space = merge.bytes().skip(1).position(|b| b == b' ').map(|at| at + 1);
        let Some((left, right)) = space.map(|at| (&merge[..at], &merge[at + 1..])) else {
            return Err(wrong("which is not two tokens"));
        };
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        if ![left, right, &joined].iter().all(|t| ids.contains_key(*t)) {
            return Err(wrong("which is not two tokens that make a third"));
        }
        if seen.insert(merge) {
            pairs.push(json!([left, right]));
        }
    }
    Ok(pairs)
}

/// Makes the post-processor, which puts the tokens around a text that the file asks for.
fn post_processor(v: &Vocabulary<'_>) -> Value {
    let bos = v.bos.filter(|_| v.adds_bos).and_then(|id| v.text(Some(id)).map(|text| (id, text)));
    let eos = v.eos.filter(|_| v.adds_eos).and_then(|id| v.text(Some(id)).map(|text| (id, text)));
    if bos.is_none() && eos.is_none() {
        return Value::Null;
    }
    let special = |token: Option<(u64, &str)>, type_id: u32| {
        token.map(|(_, text)| json!({"SpecialToken": {"id": text, "type_id": type_id}}))
    };
    let sequence = |id: &str, type_id: u32| {
        let text = json!({"Sequence": {"id": id, "type_id": type_id}});
        [special(bos, type_id), Some(text), special(eos, type_id)].into_iter().flatten()
    };
    let single: Vec<Value> = sequence("A", 0).collect();
    let pair: Vec<Value> =
        single.iter().cloned().chain([json!({"Sequence": {"id": "B", "type_id": 1}})]).collect();
    let specials: Map<String, Value> = [bos, eos]
        .into_iter()
        .flatten()
        .map(|(id, text)| (text.to_string(), json!({"id": text, "ids": [id], "tokens": [text]})))
        .collect();
    json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": specials})
}

/// Makes `tokenizer_config.json`; none where the file has no tokenizer.
pub fn tokenizer_config(m: Metadata<'_>) -> Result<Option<Value>> {
    let Some(v) = Vocabulary::read(m)? else { return Ok(None) };
    let mut c = Map::new();
    let class = match v.model {
        TokenizerModel::Gemma4 => "GemmaTokenizer",
        TokenizerModel::ByteLevel(_) | TokenizerModel::Scores => "PreTrainedTokenizerFast",
    };
    c.insert("tokenizer_class".into(), json!(class));
    for (name, id) in
        [("bos_token", v.bos), ("eos_token", v.eos), ("pad_token", v.padding), ("unk_token", v.unknown)]
    {
        if let Some(text) = v.text(id) {
            c.insert(name.into(), json!(text));
        }
    }
    c.insert("add_bos_token".into(), json!(v.adds_bos));
    if let Some(template) = m.text("tokenizer.chat_template")? {
        c.insert("chat_template".into(), json!(template));
    }
    Ok(Some(c.into()))
}
