//! `tokenizer.json` made from the metadata of the tokenizer `gemma4`: byte pair encoding of text whose spaces are
//! `▁`, with bytes for characters that the vocabulary does not have.

use super::metadata::Metadata;
use crate::Result;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

const MODEL: &str = "tokenizer.ggml.model";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
/// Character that stands for a space.
const SPACE: &str = "\u{2581}";

/// Numbers in `tokenizer.ggml.token_type`.
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// The vocabulary, and the tokens with a role.
struct Vocabulary<'a> {
    tokens: Vec<&'a str>,
    bos: Option<u64>,
    eos: Option<u64>,
    unknown: Option<u64>,
    padding: Option<u64>,
}

impl<'a> Vocabulary<'a> {
    /// Reads the vocabulary; None where the file has no tokenizer.
    fn read(m: Metadata<'a>) -> Result<Option<Self>> {
        let model = m.text(MODEL)?;
        let Some(tokens) = m.texts(TOKENS)? else { return Ok(None) };
        match (model, m.array_len(MERGES)) {
            (Some("gemma4"), Some(_)) => {}
            (Some("gemma4"), None) => return Err(m.invalid(MERGES, "is missing")),
            (Some(other), _) => {
                let what = format!("is {}; implemented is gemma4", other.escape_debug());
                return Err(m.unsupported(MODEL, what));
            }
            (None, _) => return Err(m.invalid(MODEL, "is missing")),
        }
        let id = |name: &str| {
            let key = format!("tokenizer.ggml.{name}_token_id");
            match m.unsigned(&key)? {
                Some(id) if id >= tokens.len() as u64 => {
                    Err(m.invalid(&key, format!("is {id} of {} tokens", tokens.len())))
                }
                id => Ok(id),
            }
        };
        let (bos, eos, unknown, padding) = (id("bos")?, id("eos")?, id("unknown")?, id("padding")?);
        Ok(Some(Vocabulary { tokens, bos, eos, unknown, padding }))
    }

    fn text(&self, id: Option<u64>) -> Option<&'a str> {
        id.and_then(|id| self.tokens.get(id as usize)).copied()
    }
}

/// Makes `tokenizer.json`; none where the file has no tokenizer.
pub fn tokenizer(m: Metadata<'_>) -> Result<Option<Value>> {
    let Some(v) = Vocabulary::read(m)? else { return Ok(None) };
    let ids = ids(m, &v)?;
    let types = m.unsigneds(TYPES, v.tokens.len())?;
    let named = [v.bos, v.eos, v.unknown, v.padding];
    let kind = |id: usize| match &types {
        Some(types) => types[id],
        None if named.contains(&Some(id as u64)) => CONTROL,
        None => 1,
    };
    let mut added = Vec::new();
    let mut unknown = v.text(v.unknown);
    for (id, text) in v.tokens.iter().enumerate() {
        let kind = kind(id);
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
    let vocab: Map<String, Value> =
        v.tokens.iter().enumerate().map(|(id, text)| (text.to_string(), id.into())).collect();
    Ok(Some(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false,
        },
        "post_processor": post_processor(m, &v)?,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": unknown,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": true,
            "byte_fallback": true,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": merges(m, &ids)?,
        },
    })))
}

fn ids<'a>(m: Metadata<'_>, v: &Vocabulary<'a>) -> Result<HashMap<&'a str, usize>> {
    let mut ids = HashMap::with_capacity(v.tokens.len());
    for (id, text) in v.tokens.iter().enumerate() {
        if let Some(other) = ids.insert(*text, id) {
            return Err(m.invalid(TOKENS, format!("has `{}` as {other} and as {id}", text.escape_debug())));
        }
    }
    Ok(ids)
}

/// Reads the merges: pairs of tokens that make a third.
fn merges(m: Metadata<'_>, ids: &HashMap<&str, usize>) -> Result<Vec<Value>> {
    let mut joined = String::new();
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
        pairs.push(json!([left, right]));
    }
    Ok(pairs)
}

/// Makes the post-processor, which puts the tokens around a text that the file asks for. By default it adds the
/// start.
fn post_processor(m: Metadata<'_>, v: &Vocabulary<'_>) -> Result<Value> {
    let add_bos = m.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(true);
    let add_eos = m.flag("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
    let bos = v.bos.filter(|_| add_bos).and_then(|id| v.text(Some(id)).map(|text| (id, text)));
    let eos = v.eos.filter(|_| add_eos).and_then(|id| v.text(Some(id)).map(|text| (id, text)));
    if bos.is_none() && eos.is_none() {
        return Ok(Value::Null);
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
    Ok(json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": specials}))
}

/// Makes `tokenizer_config.json`; none where the file has no tokenizer.
pub fn tokenizer_config(m: Metadata<'_>) -> Result<Option<Value>> {
    let Some(v) = Vocabulary::read(m)? else { return Ok(None) };
    let mut c = Map::new();
    c.insert("tokenizer_class".into(), json!("GemmaTokenizer"));
    for (name, id) in
        [("bos_token", v.bos), ("eos_token", v.eos), ("pad_token", v.padding), ("unk_token", v.unknown)]
    {
        if let Some(text) = v.text(id) {
            c.insert(name.into(), json!(text));
        }
    }
    c.insert("add_bos_token".into(), json!(m.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(true)));
    if let Some(template) = m.text("tokenizer.chat_template")? {
        c.insert("chat_template".into(), json!(template));
    }
    Ok(Some(c.into()))
}
