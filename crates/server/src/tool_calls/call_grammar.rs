//! Grammars in Lark of calls that an answer must make.

use super::call_syntax::{CallSyntax, tags};
use crate::grammar::{quoted, set_spacing};
use anemoe_text::tokenizer::Tokenizer;
use serde_json::{Map, Value};
use std::fmt::Write;

/// Most nested schemas that become rules; deeper values are not restricted.
const MAX_SCHEMA_DEPTH: usize = 16;

/// Returns the terminals of a text. A grammar does not match a special token as text.
pub(super) fn terminals(text: &str, tokenizer: &Tokenizer) -> String {
    let mut out = String::new();
    let mut rest = text;
    let special = |tag: &&str| tokenizer.special_id(tag).is_some();
    while let Some(tag) = tags(rest).find(special) {
        let (before, behind) = rest.split_once(tag).unwrap_or((rest, ""));
        if !before.is_empty() {
            let _ = write!(out, "{} ", quoted(before));
        }
        let _ = write!(out, "<[{}]> ", tokenizer.special_id(tag).unwrap_or_default());
        rest = behind;
    }
    if !rest.is_empty() {
        out += &quoted(rest);
    }
    out
}

/// Writer of the grammar of one call.
pub(super) struct CallGrammar<'a> {
    syntax: &'a CallSyntax,
    /// Makes terminals of a text.
    mark: &'a dyn Fn(&str) -> String,
    /// Terminals of the mark around texts.
    quote: String,
    lines: String,
    count: usize,
}

impl<'a> CallGrammar<'a> {
    /// Makes a writer of calls in a syntax.
    pub fn new(syntax: &'a CallSyntax, mark: &'a dyn Fn(&str) -> String) -> CallGrammar<'a> {
        let quote = match syntax {
            CallSyntax::Braces { quote, .. } => mark(quote),
            _ => String::new(),
        };
        CallGrammar { syntax, mark, quote, lines: String::new(), count: 0 }
    }

    /// Writes the grammar of a call, between the tags `begin` and `end`, of one of these tools.
    pub fn write(mut self, tools: &[&Value], begin: &str, end: &str) -> String {
        let names: Vec<String> = (0..tools.len()).map(|i| format!("call{i}")).collect();
        let mut grammar = format!("start: {}\n", names.join(" | "));
        let mark = self.mark;
        for (i, tool) in tools.iter().enumerate() {
            let (name, parameters) =
                (tool["function"]["name"].as_str().unwrap_or_default(), &tool["function"]["parameters"]);
            let (head, arguments, tail) = match self.syntax {
                CallSyntax::Json { around: (open, close), key } => {
                    let head = format!("{begin}{open}{{\"name\": {}, {}: ", quoted(name), quoted(key));
                    (head, self.json(parameters), format!("}}{close}{end}"))
                }
                CallSyntax::Named { between } => {
                    (format!("{begin}{name}{between}"), self.json(parameters), end.into())
                }
                CallSyntax::Braces { word, .. } => {
                    (format!("{begin}{word}{name}"), self.object(parameters, 0), end.into())
                }
                CallSyntax::Tags => {
                    let head = format!("{begin}\n<function={name}>\n");
                    (head, self.tagged(parameters), format!("</function>\n{end}"))
                }
            };
            let _ = writeln!(grammar, "call{i}: {} {arguments} {}", mark(&head), mark(&tail));
        }
        grammar += &self.lines;
        if matches!(self.syntax, CallSyntax::Braces { .. }) {
            let quote = &self.quote;
            let text = if quote.starts_with('<') { "/(.|\\n)*/" } else { "/[^<]*/" };
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
        }
        if *self.syntax == CallSyntax::Tags {
            grammar += "TEXT: /([^<]|<[^\\/])*/\n";
        }
        grammar
    }

    /// Adds a rule. Returns its name.
    fn add(&mut self, body: &str) -> String {
        let name = format!("rule{}", self.count);
        self.count += 1;
        let _ = writeln!(self.lines, "{name}: {body}");
        name
    }

    /// Adds the rule of a value in JSON. Returns its name.
    fn json(&mut self, schema: &Value) -> String {
        let mut schema = match schema {
            Value::Object(schema) => schema.clone(),
            _ => Map::from_iter([("type".to_string(), "object".into())]),
        };
        set_spacing(&mut schema);
        self.add(&format!("%json {}", Value::from(schema)))
    }

    /// Adds the rule of arguments in tags of their own, in the order of the properties. Returns its name.
    fn tagged(&mut self, schema: &Value) -> String {
        let mut body = String::new();
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            let value = match property["type"].as_str() {
                Some(kind) if kind != "string" => self.json(property),
                _ => "TEXT".into(),
            };
            let is_required = schema["required"].as_array().is_some_and(|all| all.iter().any(|r| r == name));
            let (open, close) = (quoted(&format!("<parameter={name}>\n")), quoted("\n</parameter>\n"));
            let _ = write!(body, "({open} {value} {close}){} ", if is_required { "" } else { "?" });
        }
        self.add(if body.is_empty() { "\"\"" } else { &body })
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
