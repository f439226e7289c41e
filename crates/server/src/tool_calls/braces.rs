//! Tool calls as a name with arguments in braces, as Gemma 4 writes them.
//!
//! ```text
//! call:NAME{KEY:VALUE,KEY:VALUE}
//! VALUE  <|"|>text<|"|>  |  number  |  true  |  false  |  null  |  {KEY:VALUE,..}  |  [VALUE,..]
//! ```
//!
//! The mark around texts is a token of its own in Gemma's vocabulary, so that a text may hold any character.

use super::ToolCall;
use crate::grammar::quoted;
use anemoe_runtime::tokenizer::Tokenizer;
use serde_json::{Map, Value};
use std::fmt::Write;

/// Characters that an unquoted key cannot have.
const MARKS: [char; 5] = ['{', '}', '[', ']', ','];
/// Most nested values that are read.
const MAX_DEPTH: usize = 64;
/// Most nested schemas that become rules; deeper values are not restricted.
const MAX_SCHEMA_DEPTH: usize = 16;

/// Spelling of calls between their tags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BraceCalls {
    /// Text before the name.
    word: String,
    /// Mark before and after a text.
    quote: String,
}

impl BraceCalls {
    /// Finds the spelling of a call whose only argument is the text `key`: `word` precedes the call's name, `behind`
    /// follows it. Returns the spelling and the text after the call.
    pub fn find<'a>(
        word: &str,
        behind: &'a str,
        (key, value): (&str, &str),
    ) -> Option<(BraceCalls, &'a str)> {
        let argument = behind.strip_prefix('{')?.strip_prefix(key)?.strip_prefix(':')?;
        let (quote, rest) = argument.split_once(value)?;
        let rest = rest.strip_prefix(quote)?.strip_prefix('}')?;
        let calls = BraceCalls { word: word.into(), quote: quote.into() };
        (!quote.is_empty()).then_some((calls, rest))
    }

    /// Returns the mark before and after a text.
    pub fn quote(&self) -> &str {
        &self.quote
    }

    /// Parses consecutive calls; `None` where the text is something else.
    pub fn read(&self, text: &str) -> Option<Vec<ToolCall>> {
        let mut rest = text.trim();
        let mut calls = Vec::new();
        while !rest.is_empty() {
            let named = rest.strip_prefix(self.word.trim())?;
            let (name, _) = named.split_once('{')?;
            let mut values = BraceValues { rest: &named[name.len()..], quote: &self.quote };
            let arguments = values.object(0)?;
            calls.push(ToolCall { name: name.trim().into(), arguments: Value::from(arguments).to_string() });
            rest = values.rest.trim_start().trim_start_matches(',').trim_start();
        }
        (!calls.is_empty() && calls.iter().all(|call| !call.name.is_empty())).then_some(calls)
    }

    /// Makes a grammar in Lark for one call, between these tags, of one of these tools.
    pub fn grammar(&self, tools: &[&Value], (begin, end): (&str, &str), tokenizer: &Tokenizer) -> String {
        // A grammar does not match a special token as text.
        let mark = |text: &str| match tokenizer.special_id(text) {
            Some(id) => format!("<[{id}]>"),
            None => quoted(text),
        };
        let text = match tokenizer.special_id(&self.quote) {
            Some(_) => "/(.|\\n)*/",
            None => "/[^<]*/",
        };
        let mut rules = Rules { lines: String::new(), count: 0, quote: mark(&self.quote) };
        let names: Vec<String> = (0..tools.len()).map(|i| format!("call{i}")).collect();
        let mut grammar = format!("start: {}\n", names.join(" | "));
        for (i, tool) in tools.iter().enumerate() {
            let function = &tool["function"];
            let head = format!("{}{}", self.word, function["name"].as_str().unwrap_or_default());
            let arguments = rules.object(&function["parameters"], 0);
            let _ = writeln!(grammar, "call{i}: {} {} {arguments} {}", mark(begin), quoted(&head), mark(end));
        }
        grammar += &rules.lines;
        let quote = &rules.quote;
        let _ = write!(
            grammar,
            "any: text | NUMBER | \"true\" | \"false\" | \"null\" | any_object | any_list\n\
             any_object: \"{{\" (pair (\",\" pair)*)? \"}}\"\n\
             pair: KEY \":\" any\n\
             any_list: \"[\" (any (\",\" any)*)? \"]\"\n\
             text: {quote} TEXT {quote}\n\
             TEXT: {text}\n\
             KEY: /[A-Za-z0-9_.-]+/\n\
             NUMBER: /-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?/\n"
        );
        grammar
    }
}

/// Parser of values at the beginning of a text.
struct BraceValues<'a> {
    rest: &'a str,
    quote: &'a str,
}

impl<'a> BraceValues<'a> {
    fn skip(&mut self, mark: &str) -> bool {
        let rest = self.rest.trim_start().strip_prefix(mark);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// Parses a text between marks, or in quotation marks as in JSON.
    fn text(&mut self) -> Option<Option<String>> {
        if self.skip(self.quote) {
            let (text, rest) = self.rest.split_once(self.quote)?;
            self.rest = rest;
            return Some(Some(text.into()));
        }
        let rest = self.rest.trim_start();
        if !rest.starts_with('"') {
            return Some(None);
        }
        let mut texts = serde_json::Deserializer::from_str(rest).into_iter::<String>();
        let text = texts.next()?.ok()?;
        self.rest = &rest[texts.byte_offset()..];
        Some(Some(text))
    }

    fn object(&mut self, depth: usize) -> Option<Map<String, Value>> {
        if depth >= MAX_DEPTH || !self.skip("{") {
            return None;
        }
        let mut object = Map::new();
        while !self.skip("}") {
            let key = match self.text()? {
                Some(key) => key,
                None => {
                    let (key, _) = self.rest.split_once(':').filter(|(key, _)| !key.contains(MARKS))?;
                    self.rest = &self.rest[key.len()..];
                    key.trim().to_string()
                }
            };
            if key.is_empty() || !self.skip(":") {
                return None;
            }
            object.insert(key, self.value(depth + 1)?);
            if !self.skip(",") && !self.rest.trim_start().starts_with('}') {
                return None;
            }
        }
        Some(object)
    }

    fn list(&mut self, depth: usize) -> Option<Vec<Value>> {
        if depth >= MAX_DEPTH || !self.skip("[") {
            return None;
        }
        let mut list = Vec::new();
        while !self.skip("]") {
            list.push(self.value(depth + 1)?);
            if !self.skip(",") && !self.rest.trim_start().starts_with(']') {
                return None;
            }
        }
        Some(list)
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if let Some(text) = self.text()? {
            return Some(text.into());
        }
        match self.rest.trim_start().chars().next()? {
            '{' => self.object(depth).map(Value::from),
            '[' => self.list(depth).map(Value::from),
            _ => {
                let end = self.rest.find([',', '}', ']'])?;
                let word = self.rest[..end].trim();
                self.rest = &self.rest[end..];
                // A word without marks is a text, since models forget marks.
                let known = serde_json::from_str(word).ok();
                (!word.is_empty()).then(|| known.unwrap_or_else(|| word.into()))
            }
        }
    }
}

/// Rules in Lark that are made of schemas.
struct Rules {
    lines: String,
    count: usize,
    /// Mark around texts.
    quote: String,
}

impl Rules {
    /// Adds a rule. Returns its name.
    fn add(&mut self, body: &str) -> String {
        let name = format!("rule{}", self.count);
        self.count += 1;
        let _ = writeln!(self.lines, "{name}: {body}");
        name
    }

    /// Makes the rule of an object with a schema's properties, in their order; optional properties may be missing.
    /// Returns its name.
    fn object(&mut self, schema: &Value, depth: usize) -> String {
        let properties = schema["properties"].as_object();
        let Some(properties) = properties.filter(|p| !p.is_empty() && depth < MAX_SCHEMA_DEPTH) else {
            return "any_object".into();
        };
        let required = schema["required"].as_array();
        let is_required = |name: &str| required.is_some_and(|all| all.iter().any(|r| r == name));
        let pairs: Vec<(String, bool)> = properties
            .iter()
            .map(|(name, schema)| {
                let value = self.value(schema, depth + 1);
                (format!("{} {value}", quoted(&format!("{name}:"))), is_required(name))
            })
            .collect();
        // Rules for the pairs from one on: `rest` follows other pairs and begins with a comma, `first` comes first.
        let (mut rest, mut first): (Option<String>, Option<String>) = (None, None);
        for (pair, is_required) in pairs.iter().rev() {
            let tail = rest.clone().unwrap_or_default();
            let here = format!("{pair} {tail}");
            let begun = match (is_required, &first) {
                (true, _) => here.clone(),
                (false, Some(later)) => format!("{here} | {later}"),
                (false, None) => format!("({here})?"),
            };
            let behind = match (is_required, &rest) {
                (true, _) => format!("\",\" {here}"),
                (false, Some(tail)) => format!("\",\" {here} | {tail}"),
                (false, None) => format!("(\",\" {here})?"),
            };
            (first, rest) = (Some(self.add(&begun)), Some(self.add(&behind)));
        }
        let body = format!("\"{{\" {} \"}}\"", first.unwrap_or_default());
        self.add(&body)
    }

    /// Makes the rule of a schema's value; any value where the schema has no rule here. Returns its name.
    fn value(&mut self, schema: &Value, depth: usize) -> String {
        if let Some(words) = schema["enum"].as_array().filter(|words| !words.is_empty()) {
            let one = |word: &Value| match word {
                Value::String(text) => format!("{0} {1} {0}", self.quote, quoted(text)),
                other => quoted(&other.to_string()),
            };
            let body = words.iter().map(one).collect::<Vec<_>>().join(" | ");
            return self.add(&body);
        }
        match schema["type"].as_str() {
            Some("string") => "text".into(),
            // These types are written as in JSON.
            Some("integer" | "number" | "boolean" | "null") => self.add(&format!("%json {schema}")),
            Some("object") => self.object(schema, depth),
            Some("array") if depth < MAX_SCHEMA_DEPTH => {
                let item = self.value(&schema["items"], depth + 1);
                self.add(&format!("\"[\" ({item} (\",\" {item})*)? \"]\""))
            }
            _ => "any".into(),
        }
    }
}
