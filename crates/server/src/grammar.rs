//! Grammars of answers: JSON (by a schema, or any object) and tool calls.
//!
//! ```text
//! schema --limits--> source --a thread, LONGEST--> prepared grammar --copy or share--> AnswerGrammar of each answer
//! ```
//! Time and memory are bounded four times: by limits of the schema, of the time to prepare it, of the number that are
//! prepared together, and by what each token may take.

use crate::schema_limits;
use anemoe_io::locked;
use anemoe_runtime::model::Model;
use llguidance::api::{StopReason, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{ParserFactory, TokenParser, token_bytes_from_tokenizer_json};
use serde_json::{Map, Value, json};
use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Most bytes of `tokenizer.json` that are read.
const MAX_BYTES: u64 = 512 << 20;

/// Most work of the library's lexer for one token, in its own unit: some milliseconds.
const MAX_LEXER_FUEL: u64 = 50_000;
/// Longest preparation of a grammar; schemas of people take milliseconds.
const LONGEST: Duration = Duration::from_secs(3);
/// Most grammars that are prepared at the same time. The library cannot be stopped before it is done.
const MOST_PREPARING: usize = 2;
/// Most prepared grammars that are kept, and most bytes of theirs.
const MOST_KEPT: usize = 32;
const MAX_KEPT: usize = 128 << 20;
/// Bytes of a prepared grammar for each byte of its source, as measured for schemas of many properties.
const BYTES_PER_SOURCE_BYTE: usize = 500;
/// Most bytes of an automaton, in the library's count, which is a fifth of what it takes.
const MAX_AUTOMATON: usize = 16 << 20;
/// Bytes of an automaton from which on answers share it; smaller ones are copied, so that no answer waits for another.
const SHARED_AUTOMATON: usize = 256 << 10;
/// Time that an answer's masks may take beside [`MASK_TIME`] for each token.
const SPARE_TIME: Duration = Duration::from_secs(1);
const MASK_TIME: Duration = Duration::from_millis(5);
/// Most characters of a library's message that are passed on.
const MAX_MESSAGE: usize = 200;
/// Bound of numbers from which on it is left out: no answer has larger ones, and the library counts in 64 bits.
const LARGEST: f64 = 1e18;
/// Largest bound of a text's length that is kept: in a text with a bound, each character takes 5 kB of the automaton.
const MAX_LENGTH: f64 = 2000.0;
/// Most digits in a row of a number that may end: no double or 64-bit integer needs more.
const MAX_DIGITS: usize = 20;
/// Most values that lists of property names may add to a schema.
const MAX_NAMED: usize = 20_000;
/// Formats of texts that the library knows.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Prepares grammars over a model's vocabulary, which is prepared on first use.
#[derive(Default)]
pub struct Grammars {
    factory: OnceLock<Result<Arc<ParserFactory>, String>>,
    words: OnceLock<Result<Arc<TokenBytes>, String>>,
    kept: Arc<KeptGrammars>,
}

/// Grammars that are prepared or being prepared, the latest used last.
#[derive(Default)]
struct KeptGrammars {
    all: Mutex<(VecDeque<Arc<KeptGrammar>>, usize)>,
    /// Tells that a preparation ended.
    changed: Condvar,
}

struct KeptGrammar {
    /// JSON of a schema, or a grammar in Lark.
    source: String,
    prepared: OnceLock<Result<TokenParser, String>>,
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

    /// Makes a grammar of a call of one of `tools`, which `lark` writes from their names and parameters, of JSON that fits
    /// `schema`, or of either.
    ///
    /// # Errors
    /// A schema is wrong, not supported, or takes too much; or the tokenizer has no bytes of its tokens.
    pub fn answer(
        &self,
        model: &Model,
        tools: &[&Value],
        schema: Option<&Value>,
        lark: impl FnOnce(&[(&str, Value)]) -> String,
    ) -> Result<AnswerGrammar, String> {
        let tools: Vec<(&str, Value)> = tools
            .iter()
            .map(|tool| (&tool["function"]["name"], &tool["function"]["parameters"]))
            .map(|(name, parameters)| (name.as_str().unwrap_or_default(), call_schema(parameters)))
            .collect();
        let schema = schema.map(library_schema);
        schema_limits::check(tools.iter().map(|tool| &tool.1).chain(&schema))?;
        let json = schema.map(|mut schema| {
            schema.as_object_mut().map(set_options);
            schema.to_string()
        });
        let source = match json {
            None => lark(&tools),
            Some(json) if tools.is_empty() => json,
            Some(json) => {
                format!("{}json: %json {json}\n", lark(&tools).replacen("start: ", "start: json | ", 1))
            }
        };
        self.prepare(model, source)
    }

    fn prepare(&self, model: &Model, source: String) -> Result<AnswerGrammar, String> {
        let factory = self.factory.get_or_init(|| catch_panics(|| factory(model)).map(Arc::new));
        self.kept.prepare(factory.as_ref().map_err(Clone::clone)?, source, LONGEST)
    }
}

impl KeptGrammars {
    /// Returns a grammar, kept or prepared within the time `longest`.
    fn prepare(
        self: &Arc<Self>,
        factory: &Arc<ParserFactory>,
        source: String,
        longest: Duration,
    ) -> Result<AnswerGrammar, String> {
        let deadline = Instant::now() + longest;
        let mut all = locked(&self.all);
        let wait = |all| {
            let left = deadline.saturating_duration_since(Instant::now());
            let all = self.changed.wait_timeout(all, left).unwrap_or_else(PoisonError::into_inner).0;
            (all, Instant::now() >= deadline)
        };
        let kept = loop {
            if let Some(i) = all.0.iter().position(|kept| kept.source == source) {
                let Some(kept) = all.0.remove(i) else { continue };
                // An automaton that grew too large, or failed, is made anew.
                if kept.prepared.get().is_some_and(|p| p.as_ref().is_ok_and(|p| automaton(p).is_err())) {
                    continue;
                }
                all.0.push_back(Arc::clone(&kept));
                break kept;
            }
            if all.1 < MOST_PREPARING {
                all.1 += 1;
                let kept = Arc::new(KeptGrammar { source, prepared: OnceLock::new() });
                all.0.push_back(Arc::clone(&kept));
                let (mine, shared, factory) = (Arc::clone(&kept), Arc::clone(self), Arc::clone(factory));
                let run = move || {
                    let prepared = catch_panics(|| parser(&factory, &mine.source));
                    let _ = mine.prepared.set(prepared);
                    let mut all = locked(&shared.all);
                    all.1 -= 1;
                    drop_oldest(&mut all.0);
                    shared.changed.notify_all();
                };
                // Parts of a schema are 64 within each other, and each takes some frames.
                let thread = std::thread::Builder::new().name("anemoe-grammar".into()).stack_size(8 << 20);
                if let Err(e) = thread.spawn(run) {
                    all.1 -= 1;
                    all.0.pop_back();
                    return Err(format!("no thread: {e}"));
                }
                break kept;
            }
            let (next, is_late) = wait(all);
            all = next;
            if is_late {
                return Err("other grammars are being prepared; try again later".into());
            }
        };
        let mut is_late = false;
        while kept.prepared.get().is_none() && !is_late {
            (all, is_late) = wait(all);
        }
        drop(all);
        let prepared = kept.prepared.get().ok_or("it takes too long to prepare a grammar of it")?;
        let prepared = prepared.as_ref().map_err(Clone::clone)?;
        let parser = match automaton(prepared)? {
            ..SHARED_AUTOMATON => prepared.deep_clone(),
            _ => prepared.clone(),
        };
        Ok(AnswerGrammar { parser, time: SPARE_TIME, digits: 0 })
    }
}

/// Drops the oldest grammars beyond the limits; those that are being prepared stay.
fn drop_oldest(all: &mut VecDeque<Arc<KeptGrammar>>) {
    let bytes = |kept: &Arc<KeptGrammar>| match kept.prepared.get() {
        Some(Ok(parser)) => {
            kept.source.len() * BYTES_PER_SOURCE_BYTE + automaton(parser).unwrap_or(MAX_AUTOMATON) * 5
        }
        _ => kept.source.len(),
    };
    let mut sum: usize = all.iter().map(bytes).sum();
    while all.len() > 1 && (all.len() > MOST_KEPT || sum > MAX_KEPT) {
        let oldest = all.iter().position(|kept| kept.prepared.get().is_some());
        let Some(kept) = oldest.and_then(|i| all.remove(i)) else { return };
        sum -= bytes(&kept);
    }
}

/// Prepares a grammar up to its first mask.
fn parser(factory: &ParserFactory, source: &str) -> Result<TokenParser, String> {
    let grammar = match source.starts_with("start:") {
        true => TopLevelGrammar::from_lark(source.into()),
        false => TopLevelGrammar::from_json_schema(serde_json::from_str(source).map_err(|e| e.to_string())?),
    };
    let mut parser = factory.create_parser(grammar).map_err(|e| in_one_line(&e.to_string()))?;
    parser.start_without_prompt();
    // An unusable grammar fails at its first mask.
    parser.compute_mask().map_err(|e| in_one_line(&e.to_string()))?;
    automaton(&parser)?;
    Ok(parser)
}

/// Returns the bytes of a grammar's automaton.
///
/// # Errors
/// It failed, or is too large.
fn automaton(parser: &TokenParser) -> Result<usize, String> {
    let stats = catch_panics(|| Ok(parser.parser.lexer_stats()))?;
    match stats.num_bytes {
        _ if stats.error => Err("it takes too much work for a token".into()),
        ..=MAX_AUTOMATON => Ok(stats.num_bytes),
        _ => Err("it takes too much memory".into()),
    }
}

/// Grammar of one answer, at some token of it.
pub struct AnswerGrammar {
    parser: TokenParser,
    /// Time that masks may still take.
    time: Duration,
    /// Digits in a row at the end of the answer so far.
    digits: usize,
}

impl AnswerGrammar {
    /// Makes the grammar of another answer, which begins at the same token.
    pub fn another(&self) -> AnswerGrammar {
        let is_small = automaton(&self.parser).is_ok_and(|bytes| bytes < SHARED_AUTOMATON);
        let parser = if is_small { self.parser.deep_clone() } else { self.parser.clone() };
        AnswerGrammar { parser, time: self.time, digits: self.digits }
    }

    /// Returns the tokens that may come next; those that end the answer where it is complete.
    ///
    /// # Errors
    /// No token fits, or the grammar takes too much time or memory.
    pub fn mask(&mut self) -> Result<SimpleVob, String> {
        let started = Instant::now();
        let parser = &mut self.parser;
        let mask = catch_panics(|| match parser.stopped() {
            true => Ok(parser.token_env.tok_trie().eos_token_set()),
            false => parser.compute_mask().map_err(|e| in_one_line(&e.to_string())),
        })?;
        automaton(&self.parser)?;
        // Others wait for the masks of all.
        let left = (self.time + MASK_TIME).checked_sub(started.elapsed());
        self.time = left.ok_or("it takes too much time for a token")?.min(SPARE_TIME);
        Ok(if self.digits < MAX_DIGITS { mask } else { self.without_digits(mask) })
    }

    /// Returns the tokens that may come next behind many digits: in a number those that end it, if there are any.
    fn without_digits(&self, mask: SimpleVob) -> SimpleVob {
        let first = |id: u32| self.parser.token_env.tok_trie().token(id).first().copied().unwrap_or_default();
        let is_number =
            |byte: u8| b"0123456789.eE,]}) \t\r\n<".contains(&byte) || byte == TokTrie::SPECIAL_TOKEN_MARKER;
        let is_text = mask.iter().any(|id| !is_number(first(id)));
        let digits: Vec<u32> = mask.iter().filter(|id| first(*id).is_ascii_digit()).collect();
        if is_text || digits.len() == mask.num_set() {
            return mask;
        }
        let mut ended = mask;
        digits.into_iter().for_each(|id| ended.disallow_token(id));
        ended
    }

    /// Takes the chosen token.
    ///
    /// # Errors
    /// The token does not fit.
    pub fn accept(&mut self, id: u32) -> Result<(), String> {
        let parser = &mut self.parser;
        let bytes = parser.token_env.tok_trie().token(id);
        let digits = bytes.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
        self.digits = if digits == bytes.len() { self.digits + digits } else { digits };
        catch_panics(|| {
            parser
                .consume_token(id)
                .and_then(|_| parser.check_stop())
                .map_err(|e| in_one_line(&e.to_string()))
        })?;
        Ok(())
    }

    /// Tells whether the answer is complete.
    pub fn is_complete(&self) -> bool {
        self.parser.stop_reason() != StopReason::NotStopped
    }
}

/// Returns a text quoted as in JSON and Lark.
pub fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Makes a schema's JSON use the spacing that models are trained on, which also excludes endless blanks, and `oneOf` mean
/// `anyOf` where alternatives overlap.
pub fn set_options(schema: &mut Map<String, Value>) {
    let options = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": true});
    schema.entry("x-guidance").or_insert(options);
}

/// Returns a schema as the library reads it: without formats that it does not know, unlike items, words that say null, and patterns with
/// assertions beside a format, with types in lower case, and with references that have neither escapes nor slashes in the
/// names of definitions.
fn library_schema(schema: &Value) -> Value {
    library_part(schema, schema, &Cell::new(MAX_NAMED))
}

/// Translates a part of the schema `whole`, in which names of properties may add `room` values.
fn library_part(schema: &Value, whole: &Value, room: &Cell<usize>) -> Value {
    const SLASH: &str = "\u{2215}";
    let part = |schema: &Value| library_part(schema, whole, room);
    let all = match schema {
        Value::Object(all) => all,
        Value::Array(all) => return all.iter().map(part).collect(),
        _ => return schema.clone(),
    };
    let has_format =
        all.get("format").and_then(Value::as_str).is_some_and(|format| FORMATS.contains(&format));
    let mut together = Vec::new();
    let entry = |(key, value): (&String, &Value)| {
        let value = match (key.as_str(), value) {
            // Zod writes both for an address.
            ("pattern", Value::String(pattern)) if has_format && looks_around(pattern) => return None,
            ("format", Value::String(format)) if !FORMATS.contains(&format.as_str()) => return None,
            ("enum" | "const" | "default" | "examples", value) => value.clone(),
            (_, Value::Null) => return None,
            ("pattern", Value::String(pattern)) if !has_format => match look_aheads(pattern) {
                None => value.clone(),
                Some((ahead, rest)) => {
                    together.extend(ahead.into_iter().map(|pattern| json!({"pattern": pattern})));
                    rest.into()
                }
            },
            ("maximum" | "exclusiveMaximum", Value::Number(n)) if n.as_f64().is_some_and(|n| n > LARGEST) => {
                return None;
            }
            ("minimum" | "exclusiveMinimum", Value::Number(n))
                if n.as_f64().is_some_and(|n| n < -LARGEST) =>
            {
                return None;
            }
            ("maxLength", Value::Number(n)) if n.as_f64().is_some_and(|n| n > MAX_LENGTH) => return None,
            ("uniqueItems", Value::Bool(_)) => return None,
            ("type", Value::String(kind)) if kind.eq_ignore_ascii_case("any") => return None,
            ("type", Value::String(kind)) => kind.to_ascii_lowercase().into(),
            ("$ref", Value::String(name)) => {
                let name = percent_encoding::percent_decode_str(name).decode_utf8_lossy();
                name.replace("~1", SLASH).replace("~0", "~").into()
            }
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(all)) => {
                let slash = if key.starts_with('p') { "/" } else { SLASH };
                all.iter().map(|(name, one)| (name.replace('/', slash), part(one))).collect()
            }
            // Read as it is, below.
            ("propertyNames", value) => value.clone(),
            (_, value) => part(value),
        };
        Some((key.clone(), value))
    };
    let mut schema: Map<String, Value> = all.iter().filter_map(entry).collect();
    if !together.is_empty() {
        let all = schema.entry("allOf").or_insert(json!([]));
        all.as_array_mut().into_iter().for_each(|all| all.append(&mut together));
    }
    name_properties(&mut schema, whole, room);
    schema.into()
}

/// Turns `propertyNames` into what the library knows: a list of names into `properties`, a pattern into `patternProperties`.
/// Statements that names are texts of a length or format are left out; the library refuses any other and names the key.
fn name_properties(schema: &mut Map<String, Value>, whole: &Value, room: &Cell<usize>) {
    const PLAIN: [&str; 7] =
        ["title", "description", "default", "examples", "format", "minLength", "maxLength"];
    let Some(mut names) = schema.get("propertyNames") else { return };
    // Definitions may refer to each other.
    for _ in 0..64 {
        let Some(name) = names["$ref"].as_str().and_then(|name| name.strip_prefix('#')) else { break };
        let name = percent_encoding::percent_decode_str(name).decode_utf8_lossy();
        let Some(target) = whole.pointer(&name) else { return };
        names = target;
    }
    let Some(names) = names.as_object() else { return };
    let one_of = names.get("enum").and_then(Value::as_array).map(Vec::as_slice);
    let one_of = names.get("const").map(std::slice::from_ref).or(one_of);
    let is_text = |kind: &Value| kind.as_str().is_some_and(|kind| kind.eq_ignore_ascii_case("string"));
    let is_plain = |(key, value): &(&String, &Value)| match key.as_str() {
        "enum" | "const" | "pattern" => false,
        "type" => is_text(value),
        key => PLAIN.contains(&key),
    };
    let said: Vec<&str> =
        names.iter().filter(|entry| !is_plain(entry)).map(|(key, _)| key.as_str()).collect();
    let values = schema.get("additionalProperties").cloned().unwrap_or(true.into());
    let (key, own) = match (&said[..], one_of, names.get("pattern")) {
        ([], ..) => ("properties", Map::new()),
        (["enum"] | ["const"] | ["const", "enum"] | ["enum", "const"], Some(all), _) => {
            let Some(left) = room.get().checked_sub(all.len() * count(&values)) else { return };
            room.set(left);
            let names = all.iter().filter_map(Value::as_str);
            ("properties", names.map(|name| (name.to_string(), values.clone())).collect())
        }
        (["pattern"], _, Some(Value::String(name))) => {
            ("patternProperties", Map::from_iter([(name.clone(), values)]))
        }
        _ => return,
    };
    if !said.is_empty() {
        let all = schema.entry(key).or_insert(json!({}));
        let Some(all) = all.as_object_mut() else { return };
        if key == "properties" {
            all.retain(|name, _| own.contains_key(name));
        }
        for (name, value) in own {
            all.entry(name).or_insert(value);
        }
        schema.insert("additionalProperties".into(), false.into());
    }
    schema.remove("propertyNames");
}

/// Counts the values of a JSON value, itself included.
fn count(value: &Value) -> usize {
    let inner: usize = match value {
        Value::Array(all) => all.iter().map(count).sum(),
        Value::Object(all) => all.values().map(count).sum(),
        _ => 0,
    };
    1 + inner
}

/// Takes assertions about what follows off the beginning of a regular expression: what fits `^(?=A)B` fits `^A` and `^B`.
/// Returns them and the rest; `None` where the expression does not begin with one.
fn look_aheads(pattern: &str) -> Option<(Vec<String>, String)> {
    let mut rest = pattern.strip_prefix('^')?;
    let mut ahead = Vec::new();
    while let Some(inside) = rest.strip_prefix("(?=") {
        let (end, has_alternatives) = group_end(inside)?;
        // The library knows an end of the text at the end alone.
        let group = inside[..end].strip_suffix('$').filter(|g| !has_alternatives && !g.ends_with('\\'));
        ahead.push(match group {
            Some(group) => format!("^(?:{group})$"),
            None => format!("^(?:{})", &inside[..end]),
        });
        rest = &inside[end + 1..];
    }
    // The assertions would be a part of the first alternative alone.
    let is_one = group_end(&format!("{rest})")) == Some((rest.len(), false));
    (!ahead.is_empty() && is_one).then(|| (ahead, format!("^{rest}")))
}

/// Returns the place of the parenthesis that closes a group, and whether the group has alternatives, from the text behind
/// its beginning.
fn group_end(regex: &str) -> Option<(usize, bool)> {
    let (mut depth, mut is_class, mut is_escaped, mut has_alternatives) = (0usize, false, false, false);
    for (at, c) in regex.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            ']' => is_class = false,
            _ if is_class => {}
            '[' => is_class = true,
            '(' => depth += 1,
            ')' if depth == 0 => return Some((at, has_alternatives)),
            ')' => depth -= 1,
            '|' => has_alternatives |= depth == 0,
            _ => {}
        }
    }
    None
}

/// Tells whether a regular expression has assertions about the text around, which the library does not know.
fn looks_around(pattern: &str) -> bool {
    use regex_syntax::ast::ErrorKind::UnsupportedLookAround;
    match regex_syntax::parse(pattern) {
        Err(regex_syntax::Error::Parse(e)) => *e.kind() == UnsupportedLookAround,
        _ => false,
    }
}

/// Returns the schema of a call's arguments: an object, and an empty one where `parameters` declares nothing.
pub fn call_schema(parameters: &Value) -> Value {
    let mut schema = library_schema(parameters).as_object().cloned().unwrap_or_default();
    let declares = |(key, value): (&String, &Value)| match key.as_str() {
        "properties" => *value != json!({}),
        "required" => *value != json!([]),
        "additionalProperties" | "patternProperties" | "$ref" | "anyOf" | "oneOf" | "allOf" => true,
        _ => false,
    };
    if !schema.iter().any(declares) {
        schema.insert("additionalProperties".into(), false.into());
    }
    schema.insert("type".into(), "object".into());
    schema.into()
}

/// Returns a library's message in one line, at most `MAX_MESSAGE` characters: its first line, and what a regular
/// expression says is wrong below a picture of it.
fn in_one_line(message: &str) -> String {
    let mut lines = message.lines();
    let first = lines.next().unwrap_or_default();
    let error = lines.clone().find_map(|line| line.strip_prefix("error: "));
    let line = match (error, lines.next()) {
        (Some(error), Some(pattern)) => format!("{first} `{}`: {error}", pattern.trim()),
        _ => first.to_string(),
    };
    line.chars().take(MAX_MESSAGE).collect()
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
    limited(&(Arc::new(ApproximateTokEnv::new(trie)) as TokEnv))
}

/// Makes a factory with limits of what a token may take.
fn limited(environment: &TokEnv) -> Result<ParserFactory, String> {
    let mut factory = ParserFactory::new_simple(environment).map_err(|e| e.to_string())?;
    factory.quiet();
    let limits = factory.limits_mut();
    limits.verbose_errors = false;
    limits.step_lexer_fuel = MAX_LEXER_FUEL;
    Ok(factory)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[test]
    fn a_byte_of_a_character_is_a_word_and_a_special_token_is_none() {
        let words =
            TokenBytes(vec![vec![TokTrie::SPECIAL_TOKEN_MARKER, b'<'], vec![0xe2], b" a".to_vec(), vec![]]);
        assert_eq!(
            [0, 1, 2, 3, 4].map(|id| words.get(id)),
            [None, Some(&[0xe2][..]), Some(b" a"), None, None]
        );
    }

    pub(crate) fn token_bytes(words: &[&[u8]]) -> TokenBytes {
        TokenBytes(words.iter().map(|word| word.to_vec()).collect())
    }

    /// Makes a factory whose tokens are bytes.
    fn bytes() -> Arc<ParserFactory> {
        Arc::new(limited(&ApproximateTokEnv::single_byte_env()).unwrap())
    }

    pub(crate) fn prepared_source(source: String) -> Result<AnswerGrammar, String> {
        Arc::<KeptGrammars>::default().prepare(&bytes(), source, Duration::from_secs(60))
    }

    fn prepared(schema: &Value) -> Result<AnswerGrammar, String> {
        let mut schema = library_schema(schema);
        schema_limits::check([&schema])?;
        schema.as_object_mut().map(set_options);
        prepared_source(schema.to_string())
    }

    /// Tells whether an answer may begin with this text.
    pub(crate) fn takes(mut grammar: AnswerGrammar, text: &str) -> bool {
        text.bytes().all(|byte| {
            grammar.mask().unwrap().is_allowed(byte.into()) && grammar.accept(byte.into()).is_ok()
        })
    }

    #[test]
    fn what_a_schema_says_beside_the_library_s_words_is_left_out() {
        let ends = "{\"a\": \"\", \"b\": 1, \"format\": {\"format\": \"path\"}}";
        for (schema, fits) in [
            (
                json!({"type": "object", "properties": {"a": {"type": "string", "format": "password"},
                "b": {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "format": {"const": {"format": "path"}}},
                "required": ["a", "b", "format"]}),
                ends,
            ),
            (json!({"$defs": {"a/b c": {"const": 1}}, "$ref": "#/$defs/a~1b%20c"}), "1"),
            (json!({"type": "string", "format": "email", "pattern": "^(?!\\.)[a-z@.]+$"}), "\"a@b.c\""),
            (
                json!({"type": "OBJECT", "properties": {"a": {"type": "STRING", "const": "b"}}, "required": null}),
                "{\"a\": \"b\"}",
            ),
        ] {
            assert!(takes(prepared(&schema).ok().unwrap(), fits), "{schema}");
        }
        assert!(!takes(prepared(&json!({"type": "string", "format": "date"})).ok().unwrap(), "\"x"));
    }

    /// Checks which answers a schema allows, from the first byte to an end.
    fn allows(schema: &Value, fits: &[&str], others: &[&str]) {
        let grammar = prepared(schema).map_err(|e| format!("{schema}: {e}")).unwrap();
        let is_whole = |text: &str| {
            let mut own = grammar.another();
            text.bytes()
                .all(|byte| own.mask().unwrap().is_allowed(byte.into()) && own.accept(byte.into()).is_ok())
                && (own.is_complete() || own.parser.is_accepting())
        };
        for text in fits {
            assert!(is_whole(text), "{schema}: {text}");
        }
        for text in others {
            assert!(!is_whole(text), "{schema}: {text}");
        }
    }

    #[test]
    fn look_ahead_at_the_beginning_of_a_pattern_is_a_pattern_of_its_own() {
        let text = |pattern: &str| json!({"type": "string", "pattern": pattern});
        allows(
            &text(r"^(?=.*[a-z])(?=.*\d)(?=.{4,6}$)[a-z\d]+$"),
            &["\"abc1\"", "\"1a23bc\""],
            &["\"abcd\"", "\"1234\"", "\"ab1\"", "\"abcdef1\"", "\"ABC1\""],
        );
        allows(&text(r"^(?=a|b)[a-c]$"), &["\"a\"", "\"b\""], &["\"c\""]);
        allows(&text(r"^(?=[^)(]\))..$"), &["\"a)\""], &["\"))\"", "\"ab\""]);
        for pattern in [r"^(?!a)b$", r"^(?=a)b|c", r"a(?=b)", r"^(?=a)(?!b).$", r"(?<=a)b"] {
            let error = prepared(&text(pattern)).err().unwrap();
            assert!(error.contains("look-around"), "{error}");
        }
    }

    #[test]
    fn unlike_items_and_any_type_are_no_rule_of_a_grammar() {
        let set = json!({"type": "array", "items": {"type": "integer"}, "uniqueItems": true});
        allows(&set, &["[1, 2]", "[1, 1]"], &["[\"a\"]"]);
        allows(&json!({"type": "object", "properties": {"a": {"type": "any"}}}), &["{\"a\": [1]}"], &["[1]"]);
    }

    #[test]
    fn names_of_properties_are_those_of_a_list_or_a_pattern() {
        let record = |names: Value| json!({"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}});
        allows(&record(json!({"type": "string"})), &["{\"x y\": 1}", "{}"], &["{\"x\": \"y\"}"]);
        allows(
            &record(json!({"type": "string", "enum": ["a", "b"]})),
            &["{\"a\": 1, \"b\": 2}", "{}"],
            &["{\"c\": 1}", "{\"a\": \"y\"}"],
        );
        allows(
            &record(json!({"pattern": "^[a-z]+$"})),
            &["{\"ab\": 1, \"c\": 2}"],
            &["{\"A\": 1}", "{\"ab\": true}"],
        );
        let mut of_one = record(json!({"enum": ["a"]}));
        of_one["properties"] = json!({"a": {"const": 1}, "b": {"const": 2}});
        allows(&of_one, &["{\"a\": 1}", "{}"], &["{\"a\": 2}", "{\"b\": 2}"]);
        for names in [
            json!({"anyOf": [{"minLength": 3}]}),
            json!({"$ref": "#/nowhere"}),
            json!({"$ref": "#/propertyNames"}),
        ] {
            let error = prepared(&record(names)).err().unwrap();
            assert!(error.contains("propertyNames"), "{error}");
        }
    }

    #[test]
    fn names_of_properties_are_those_of_a_definition_or_texts_of_any_length() {
        let record = |names: Value| {
            json!({"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"},
                "$defs": {"C": {"enum": ["a", "b"], "title": "C", "type": "string"}, "D": {"$ref": "#/$defs/C"}}})
        };
        for names in [json!({"$ref": "#/$defs/C"}), json!({"$ref": "#/$defs/D"})] {
            allows(&record(names), &["{\"a\": 1, \"b\": 2}", "{}"], &["{\"c\": 1}", "{\"a\": \"y\"}"]);
        }
        for names in [json!({"const": "a"}), json!({"const": "a", "enum": ["a"], "type": "string"})] {
            allows(&record(names), &["{\"a\": 1}", "{}"], &["{\"b\": 1}", "{\"a\": \"y\"}"]);
        }
        for names in
            [json!({"minLength": 3, "maxLength": 4}), json!({"format": "uuid"}), json!({"format": "date"})]
        {
            allows(&record(names), &["{\"abc\": 1}"], &["{\"abc\": \"y\"}"]);
        }
        allows(&record(json!({"pattern": "^[a-z]+$", "minLength": 1})), &["{\"a\": 1}"], &["{\"A\": 1}"]);
        // Each level would double the schema.
        let names = json!({"enum": ["a", "b"]});
        let deep = (0..60)
            .fold(json!({}), |inner, _| json!({"propertyNames": names, "additionalProperties": inner}));
        assert!(prepared(&deep).is_err());
    }

    #[test]
    fn digits_of_numbers_end_and_those_of_texts_go_on() {
        let (most, more) = ("3".repeat(MAX_DIGITS), "3".repeat(MAX_DIGITS + 1));
        let number = |digits: &str| format!("-{digits}.{digits}e{digits}");
        allows(
            &json!({"type": "number"}),
            &[&number(&most)],
            &[&more, &format!("0.{more}"), &format!("1e{more}")],
        );
        allows(&json!({"type": "integer"}), &[&most], &[&more]);
        allows(
            &json!({"type": "object"}),
            &[&format!("{{\"{more}\": [{most}, {most}, \"{more}\"]}}")],
            &[&format!("{{\"a\": {more}}}"), &format!("{{\"a\": [{more}]}}")],
        );
        let text = |pattern: &str| json!({"type": "string", "pattern": pattern});
        allows(&text("^[0-9]+$"), &[&format!("\"{more}\"")], &[]);
        allows(&text("^[0-9]{21}$"), &[&format!("\"{more}\"")], &[]);
        let tenths = json!({"type": "integer", "multipleOf": 10});
        allows(&tenths, &[&format!("{most}0")], &[&format!("{most}00")]);
    }

    #[test]
    fn large_bounds_take_bounded_memory() {
        let safe = 9_007_199_254_740_991i64;
        for bounds in [[-1e300, 1e300], [i64::MIN as f64, i64::MAX as f64], [-(safe as f64), safe as f64]] {
            for kind in ["number", "integer"] {
                let schema = json!({"type": kind, "minimum": bounds[0], "maximum": bounds[1]});
                allows(&schema, &["12345", "-3"], &["\"a\""]);
                let schema = json!({"type": kind, "exclusiveMinimum": 0, "exclusiveMaximum": bounds[1]});
                allows(&schema, &["12345"], &["-3"]);
            }
        }
        for most in [2000u64, 100_000, 1_000_000_000] {
            let mut grammar = prepared(&json!({"type": "string", "maxLength": most})).ok().unwrap();
            for byte in std::iter::once(b'"').chain([b'a'; 2000]) {
                assert!(grammar.mask().unwrap().is_allowed(byte.into()));
                grammar.accept(byte.into()).unwrap();
            }
            let next = grammar.mask().unwrap();
            assert_eq!((next.is_allowed(b'"'.into()), next.is_allowed(b'a'.into())), (true, most > 2000));
            let array =
                json!({"type": "array", "maxItems": most, "minItems": 2, "items": {"type": "integer"}});
            allows(&array, &["[1, 2]", "[1, 2, 3]"], &["[1]"]);
        }
        for schema in [
            json!({"type": "array", "minItems": u32::MAX, "items": {"type": "integer"}}),
            json!({"type": "string", "minLength": 1e18 as u64}),
            json!({"type": "integer", "minimum": 1e300}),
        ] {
            if let Ok(grammar) = prepared(&schema) {
                assert!(automaton(&grammar.parser).is_ok(), "{schema}");
            }
        }
    }

    #[test]
    fn answers_share_a_large_automaton_and_are_independent() {
        let grammar = prepared(&json!({"type": "integer", "multipleOf": 19_997})).unwrap();
        assert!(automaton(&grammar.parser).unwrap() > SHARED_AUTOMATON);
        let all: Vec<AnswerGrammar> = (0..50).map(|_| grammar.another()).collect();
        for (i, one) in all.into_iter().enumerate() {
            assert!(takes(one, &(19_997 * (i + 7)).to_string()), "{i}");
        }
        let mut other = grammar.another();
        for byte in *b"1999" {
            other.accept(byte.into()).unwrap();
        }
        let next: Vec<u32> = other.mask().unwrap().iter().collect();
        assert!(next.contains(&b'7'.into()) && takes(grammar, "39994"), "{next:?}");
    }

    #[test]
    fn what_is_wrong_with_a_schema_is_said() {
        for (schema, says) in [
            (json!({"type": "string", "pattern": "(a"}), "`(a`: unclosed group"),
            (json!({"type": "string", "pattern": "a(?=b)"}), "look-around"),
            (json!({"type": "integer", "minimum": 3, "maximum": 2}), "minimum"),
            (json!({"not": {}}), "not"),
            (json!({"type": "string", "if": {}, "then": {}, "else": {}}), r#"["else", "if", "then"]"#),
            (json!({"type": "array", "uniqueItems": true, "contains": {}}), r#"["contains"]"#),
            (json!({"$ref": "#/nowhere"}), "nowhere"),
        ] {
            let error = prepared(&schema).err().unwrap();
            assert!(error.contains(says) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn schemas_that_take_much_are_prepared_or_refused_soon() {
        let names = |n: usize| (0..n).map(|i| format!("p{i}")).collect::<Vec<_>>();
        let object = |n: usize| json!({"type": "object", "properties": names(n).into_iter().map(|k| (k, json!({}))).collect::<Map<_, _>>()});
        let patterns = |n: usize| {
            (0..n).map(|i| (format!("^a{{{i}}}b.*$"), json!({"type": "string"}))).collect::<Map<_, _>>()
        };
        let started = Instant::now();
        for schema in [
            json!({"type": "integer", "multipleOf": 999_983}),
            json!({"type": "object", "required": names(19_000)}),
            json!({"type": "object", "required": names(400)}),
            json!({"type": "object", "patternProperties": patterns(300)}),
            json!({"type": "object", "patternProperties": patterns(30)}),
            json!({"enum": names(15_000)}),
            json!({"oneOf": names(5000).into_iter().map(|name| json!({"const": name})).collect::<Vec<_>>()}),
            json!({"allOf": vec![object(300); 20]}),
            json!({"$defs": {"a": object(300)}, "allOf": vec![json!({"$ref": "#/$defs/a"}); 3000]}),
            json!({"type": "string", "pattern": "(a|b)*a(a|b){500}"}),
            json!({"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}),
            json!({"type": "string", "minLength": 1_000_000_000, "maxLength": 2_000_000_000}),
            json!({"type": "array", "minItems": 1_000_000_000, "items": object(300)}),
            json!({"const": "x".repeat(1 << 20)}),
            (0..60).fold(json!({}), |inner, _| json!({"anyOf": [{"items": inner.clone()}, {"type": "object", "properties": {"a": {}}}]})),
        ] {
            // Walks along the first token that fits, as an answer would.
            if let Ok(mut grammar) = prepared(&schema) {
                for _ in 0..20 {
                    let Ok(mask) = grammar.mask() else { break };
                    let Some(id) = mask.iter().last() else { break };
                    if grammar.accept(id).is_err() || grammar.is_complete() {
                        break;
                    }
                }
            }
        }
        // Some seconds; without limits, minutes.
        assert!(started.elapsed().as_secs() < 60, "{:?}", started.elapsed());
    }

    #[test]
    fn who_asks_for_a_slow_grammar_does_not_wait_and_finds_it_later() {
        let kept = Arc::<KeptGrammars>::default();
        let source = |n: usize| json!({"type": "integer", "multipleOf": n}).to_string();
        let (factory, soon, late) = (bytes(), Duration::from_millis(1), Duration::from_secs(60));
        let error = kept.prepare(&factory, source(19_997), soon).err().unwrap();
        assert!(error.contains("too long"), "{error}");
        kept.prepare(&factory, source(19_993), soon).err().unwrap();
        let error = kept.prepare(&factory, source(19_991), soon).err().unwrap();
        assert!(error.contains("other grammars"), "{error}");
        assert!(takes(kept.prepare(&factory, source(19_997), late).ok().unwrap(), "19997"));
        for n in 2..100 {
            kept.prepare(&factory, source(n), late).ok().unwrap();
        }
        assert_eq!(locked(&kept.all).0.len(), MOST_KEPT);
    }
}
