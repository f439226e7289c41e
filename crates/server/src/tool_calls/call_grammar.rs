//! Grammars in Lark of calls that an answer must make.
//!
//! A schema becomes a rule for each way to spell its values. Values in JSON without references are left to the library,
//! which knows more of a schema's words.

use super::call_syntax::{CallSyntax, tags};
use super::schema::{branches, target};
use super::text_patterns::text_patterns;
use crate::grammar::{quoted, set_options};
use anemoe_text::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};
use std::fmt::Write;

/// Most nested schemas that become rules; deeper values are not restricted.
const MAX_SCHEMA_DEPTH: usize = 64;
/// Most bytes of rules, from which on values are not restricted: parts of `allOf` may be in many objects.
const MAX_RULES: usize = 4 << 20;
/// Most items of a list that are counted.
const MAX_ITEMS: u64 = 1000;
/// Limits of numbers and texts.
const LIMITS: [&str; 9] = [
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "pattern",
    "format",
    "minLength",
    "maxLength",
];

/// Text behind a value between tags.
const CLOSE: &str = "\n</parameter>\n";
/// Texts between tags, in which the reader of calls finds no tag. A lexer takes the longest text, so that the tag behind it
/// is a part of `TEXT`.
const TEXT_BETWEEN_TAGS: &str = r#"BODY: /(?s:.*)/ & ~/(?s:.*)(<\/parameter>|<parameter|<\/function>|<\/tool_call>)(?s:.*)/
TEXT: BODY "\n</parameter>\n"
"#;

/// Spelling of a value.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Spelling {
    /// Keys without quotation marks, texts between the marks of the syntax.
    Braces,
    /// An object whose entries have tags around them.
    Tags,
    /// A value between such tags, with the closing one: a text without marks, or JSON.
    Bare,
    Json,
}

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
    /// Schema in which references begin.
    root: &'a Value,
    /// Rules of schemas, by address.
    rules: HashMap<(*const Value, Spelling), String>,
}

impl<'a> CallGrammar<'a> {
    /// Makes a writer of calls in a syntax.
    pub fn new(syntax: &'a CallSyntax, mark: &'a dyn Fn(&str) -> String) -> CallGrammar<'a> {
        let quote = match syntax {
            CallSyntax::Braces { quote, .. } => mark(quote),
            _ => String::new(),
        };
        let (lines, rules) = (String::new(), HashMap::new());
        CallGrammar { syntax, mark, quote, lines, count: 0, root: &Value::Null, rules }
    }

    /// Writes the grammar of a call, between the tags `begin` and `end`, of one of these tools: names, and schemas of
    /// arguments.
    pub fn write(mut self, tools: &'a [(&str, Value)], begin: &str, end: &str) -> String {
        let names: Vec<String> = (0..tools.len()).map(|i| format!("call{i}")).collect();
        let mut grammar = format!("start: {}\n", names.join(" | "));
        let mark = self.mark;
        for (i, (name, parameters)) in tools.iter().enumerate() {
            self.root = parameters;
            let (head, spelling, tail) = match self.syntax {
                CallSyntax::Json { around: (open, close), key } => {
                    let head = format!("{begin}{open}{{\"name\": {}, {}: ", quoted(name), quoted(key));
                    (head, Spelling::Json, format!("}}{close}{end}"))
                }
                CallSyntax::Named { between } => {
                    (format!("{begin}{name}{between}"), Spelling::Json, end.into())
                }
                CallSyntax::Braces { word, .. } => {
                    (format!("{begin}{word}{name}"), Spelling::Braces, end.into())
                }
                CallSyntax::Tags => {
                    let head = format!("{begin}\n<function={name}>\n");
                    (head, Spelling::Tags, format!("</function>\n{end}"))
                }
            };
            let arguments = match spelling {
                Spelling::Json => self.json(parameters),
                _ => self.value(parameters, spelling, 0),
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
            grammar += TEXT_BETWEEN_TAGS;
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
        let mut schema = schema.as_object().cloned().unwrap_or_default();
        set_options(&mut schema);
        self.add(&format!("%json {}", Value::from(schema)))
    }

    /// Returns the rule of a schema's value, which is added once.
    fn value(&mut self, schema: &'a Value, spelling: Spelling, depth: usize) -> String {
        let key = (std::ptr::from_ref(schema), spelling);
        if let Some(name) = self.rules.get(&key) {
            return name.clone();
        }
        if depth >= MAX_SCHEMA_DEPTH || self.lines.len() > MAX_RULES {
            return self.any(spelling);
        }
        let name = format!("value{}", self.rules.len());
        self.rules.insert(key, name.clone());
        let body = self.body(schema, spelling, depth + 1);
        let _ = writeln!(self.lines, "{name}: {body}");
        name
    }

    /// Returns the rule of any value.
    fn any(&mut self, spelling: Spelling) -> String {
        match spelling {
            Spelling::Braces => "any".into(),
            Spelling::Tags => "\"\"".into(),
            Spelling::Bare => "TEXT".into(),
            Spelling::Json => self.json(&Value::Null),
        }
    }

    /// Returns the body of a schema's rule.
    fn body(&mut self, schema: &'a Value, spelling: Spelling, depth: usize) -> String {
        let referred = branches(self.root, schema, &[]).last().copied().unwrap_or(schema);
        if target(self.root, referred).is_some() {
            // A circle.
            return self.any(spelling);
        }
        if !std::ptr::eq(referred, schema) {
            return self.value(referred, spelling, depth);
        }
        if spelling == Spelling::Json && !schema.to_string().contains("\"$ref\"") {
            return self.json(schema);
        }
        let parts = branches(self.root, schema, &["allOf"]);
        let find = |key: &str| parts.iter().find_map(|part| part.get(key));
        let words = find("enum").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let words = find("const").map_or(words, std::slice::from_ref);
        if !words.is_empty() {
            let one = |word: &Value| match word {
                Value::String(text) if spelling != Spelling::Json => {
                    format!("{0} {1} {0}", self.quote, quoted(text))
                }
                other => quoted(&other.to_string()),
            };
            let words = words.iter().map(one).collect::<Vec<_>>().join(" | ");
            return if spelling == Spelling::Bare { format!("({words}) {}", quoted(CLOSE)) } else { words };
        }
        let has = |key: &str| find(key).is_some_and(Value::is_object);
        let kinds: Vec<&str> = match find("type") {
            Some(Value::String(kind)) => vec![kind],
            Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
            _ if has("properties") => vec!["object"],
            _ if has("items") => vec!["array"],
            _ => Vec::new(),
        };
        let alternatives = ["anyOf", "oneOf"].iter().find_map(|key| find(key)?.as_array());
        let is_open = !has("properties") && kinds.iter().all(|kind| ["object", "array"].contains(kind));
        if let Some(all) = alternatives.filter(|all| is_open && !all.is_empty()) {
            let all: Vec<String> = all.iter().map(|one| self.value(one, spelling, depth)).collect();
            return all.join(" | ");
        }
        match (spelling, kinds.as_slice()) {
            (_, []) => self.any(spelling),
            (Spelling::Bare, kinds) if kinds.contains(&"string") => {
                let text = self.text(&parts);
                let mut others = schema.as_object().cloned().unwrap_or_default();
                let left: Vec<&str> = kinds.iter().copied().filter(|kind| *kind != "string").collect();
                if text == "TEXT" || left.is_empty() {
                    return text;
                }
                others.insert("type".into(), left.into());
                format!("{text} | {} {}", self.json(&others.into()), quoted(CLOSE))
            }
            (Spelling::Bare, _) => format!("{} {}", self.value(schema, Spelling::Json, depth), quoted(CLOSE)),
            (Spelling::Tags, _) => self.object(&parts, spelling, depth),
            (_, kinds) => {
                let all = kinds.iter().map(|kind| match *kind {
                    "string" if spelling == Spelling::Braces => match self.text(&parts).as_str() {
                        "TEXT" => "text".into(),
                        text => format!("{0} {text} {0}", self.quote),
                    },
                    "object" => self.object(&parts, spelling, depth),
                    "array" => self.list(&parts, spelling, depth),
                    // These are written as in JSON.
                    kind => {
                        let mut leaf = Map::from_iter([("type".to_string(), kind.into())]);
                        let bound = |key: &str| Some((key.to_string(), find(key)?.clone()));
                        leaf.extend(LIMITS.into_iter().filter_map(bound));
                        self.json(&leaf.into())
                    }
                });
                all.collect::<Vec<String>>().join(" | ")
            }
        }
    }

    /// Returns the terminal of a text.
    fn text(&mut self, parts: &[&Value]) -> String {
        let patterns = text_patterns(parts);
        if patterns.is_empty() {
            return "TEXT".into();
        }
        let name = format!("TEXT{}", self.count);
        self.count += 1;
        let patterns = patterns.join(" & ");
        let _ = match self.syntax {
            CallSyntax::Tags => writeln!(self.lines, "{name}: (BODY & {patterns}) {}", quoted(CLOSE)),
            _ => writeln!(self.lines, "{name}: TEXT & {patterns}"),
        };
        name
    }

    /// Returns the body of an object with the properties of `parts`, in their order; optional ones may be missing.
    fn object(&mut self, parts: &[&'a Value], spelling: Spelling, depth: usize) -> String {
        let extra = parts.iter().find_map(|part| part.get("additionalProperties"));
        let lists = parts.iter().filter_map(|part| part["required"].as_array());
        let required: Vec<&str> = lists.flatten().filter_map(Value::as_str).collect();
        let declared = || parts.iter().filter_map(|part| part["properties"].as_object());
        let undeclared = required.iter().map(|name| (*name, extra.unwrap_or(&Value::Null)));
        let all = declared().flatten().map(|(name, schema)| (name.as_str(), schema)).chain(undeclared);
        let mut known = HashSet::new();
        let fields: Vec<(&str, &Value)> = all.filter(|(name, _)| known.insert(*name)).collect();
        let (comma, colon) = if spelling == Spelling::Json { (", ", ": ") } else { (",", ":") };
        let comma = quoted(comma);
        if spelling == Spelling::Tags {
            let mut body = "\"\" ".to_string();
            for (name, schema) in fields {
                let value = self.value(schema, Spelling::Bare, depth);
                let open = quoted(&format!("<parameter={name}>\n"));
                let mark = if required.contains(&name) { "" } else { "?" };
                let _ = write!(body, "({open} {value}){mark} ");
            }
            return body;
        }
        if fields.is_empty() {
            let key = match (spelling, extra) {
                (_, Some(Value::Bool(false))) => return "\"{}\"".into(),
                (_, None) if declared().next().is_some() => return "\"{}\"".into(),
                (Spelling::Braces, _) => "KEY".into(),
                _ => self.json(&json!({"type": "string"})),
            };
            let value = self.value(extra.unwrap_or(&Value::Null), spelling, depth);
            let pair = self.add(&format!("{key} {} {value}", quoted(colon)));
            return format!("\"{{\" ({pair} ({comma} {pair})*)? \"}}\"");
        }
        // Rules for the pairs from one on: `rest` follows other pairs and begins with a comma, `first` comes first.
        let (mut rest, mut first): (Option<String>, Option<String>) = (None, None);
        for (name, schema) in fields.iter().rev() {
            let value = self.value(schema, spelling, depth);
            let key = if spelling == Spelling::Json { quoted(name) } else { name.to_string() };
            let is_required = required.contains(name);
            let here =
                format!("{} {value} {}", quoted(&format!("{key}{colon}")), rest.clone().unwrap_or_default());
            let begun = match (is_required, &first) {
                (true, _) => here.clone(),
                (false, Some(later)) => format!("{here} | {later}"),
                (false, None) => format!("({here})?"),
            };
            let behind = match (is_required, &rest) {
                (true, _) => format!("{comma} {here}"),
                (false, Some(tail)) => format!("{comma} {here} | {tail}"),
                (false, None) => format!("({comma} {here})?"),
            };
            (first, rest) = (Some(self.add(&begun)), Some(self.add(&behind)));
        }
        format!("\"{{\" {} \"}}\"", first.unwrap_or_default())
    }

    /// Returns the body of a list: items of their own schemas first, others behind them.
    fn list(&mut self, parts: &[&'a Value], spelling: Spelling, depth: usize) -> String {
        let find = |key: &str| parts.iter().find_map(|part| part.get(key));
        let number = |key: &str| find(key).and_then(Value::as_u64).filter(|n| *n <= MAX_ITEMS);
        let (least, most) = (number("minItems").unwrap_or(0), number("maxItems").unwrap_or(u64::MAX));
        // Older schemas have a list of items, and others under `additionalItems`.
        let (first, others) = match (find("prefixItems"), find("items")) {
            (None, Some(first @ Value::Array(_))) => (Some(first), find("additionalItems")),
            (first, others) => (first, others),
        };
        let first: Vec<&Value> = first.and_then(Value::as_array).into_iter().flatten().collect();
        let first = &first[..first.len().min(most as usize)];
        let count = first.len() as u64;
        let most = if others == Some(&Value::Bool(false)) { count.min(most) } else { most };
        let comma = quoted(if spelling == Spelling::Json { ", " } else { "," });
        let more = |item: &str, least: u64, most: u64| match most {
            0 => String::new(),
            u64::MAX => format!("({comma} {item}){{{least},}}"),
            most => format!("({comma} {item}){{{least},{most}}}"),
        };
        // Items from one on, with the comma before them.
        let mut rest = String::new();
        if most > count {
            let item = self.value(others.unwrap_or(&Value::Null), spelling, depth);
            let (begin, own) = if count == 0 { (item.as_str(), 1) } else { ("", count) };
            let most = if most == u64::MAX { most } else { most - own };
            rest = format!("{begin} {}", more(&item, least.saturating_sub(own), most));
        }
        for (i, schema) in first.iter().enumerate().rev() {
            let item = self.value(schema, spelling, depth);
            let all = format!("{item} {rest}");
            rest = match i as u64 {
                0 => all,
                i if i < least => format!("{comma} {all}"),
                // A rule of its own: groups within groups have a limit.
                _ => format!("{}?", self.add(&format!("{comma} {all}"))),
            };
        }
        match (rest.is_empty(), least) {
            (true, _) => "\"[]\"".into(),
            (_, 0) => format!("\"[\" ({rest})? \"]\""),
            _ => format!("\"[\" {rest} \"]\""),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grammar::call_schema;
    use crate::grammar::tests::{prepared_source, takes};

    /// Returns the texts, of these, that are arguments of a call and nothing more.
    fn fitting<'t>(syntax: &CallSyntax, parameters: &Value, texts: &[&'t str]) -> Vec<&'t str> {
        let tools = [("f", call_schema(parameters))];
        let source = CallGrammar::new(syntax, &|text| quoted(text)).write(&tools, "", "!");
        let head = match syntax {
            CallSyntax::Braces { .. } => "f",
            CallSyntax::Tags => "\n<function=f>\n",
            _ => "f ",
        };
        let grammar = prepared_source(source.clone()).unwrap_or_else(|e| panic!("{e}: {source}"));
        let tail = if *syntax == CallSyntax::Tags { "</function>\n!" } else { "!" };
        let fits = |text: &&&str| takes(grammar.another(), &format!("{head}{text}{tail}"));
        texts.iter().filter(fits).copied().collect()
    }

    /// Parameters with a property `a` of this schema, which refers to others.
    fn of(a: Value) -> Value {
        let item = json!({"type": "object", "properties": {"k": {"$ref": "#/$defs/word"}, "next": {"$ref": "#/$defs/item"}}, "required": ["k"]});
        let loops = json!({"$ref": "#/$defs/loops"});
        json!({"properties": {"a": a, "b": {"type": "integer"}}, "required": ["a"],
            "$defs": {"word": {"enum": ["x", "y"]}, "item": item, "loops": loops}})
    }

    #[test]
    fn arguments_fit_the_schema_in_any_form() {
        let braces = CallSyntax::Braces { word: String::new(), quote: "'".into() };
        let named = CallSyntax::Named { between: " ".into() };
        let word = json!({"$ref": "#/$defs/word"});
        let items = json!({"type": "array", "items": word, "minItems": 1, "maxItems": 2});
        for (a, fit, unfit) in [
            (json!({"const": "x"}), vec![json!("x")], vec![json!("y"), json!(1)]),
            (json!({"type": "integer", "const": 3}), vec![json!(3)], vec![json!(4)]),
            (word.clone(), vec![json!("y")], vec![json!("z")]),
            (json!({"allOf": [word]}), vec![json!("y")], vec![json!("z")]),
            (
                json!({"type": "array", "items": {"allOf": [word]}}),
                vec![json!(["y", "x", "x"]), json!([])],
                vec![json!(["z"])],
            ),
            (
                json!({"anyOf": [word, {"type": "null"}]}),
                vec![json!("x"), json!(null)],
                vec![json!("z"), json!(1)],
            ),
            (
                json!({"type": ["integer", "null"], "maximum": 5}),
                vec![json!(5), json!(null)],
                vec![json!(6), json!("x")],
            ),
            (
                items,
                vec![json!(["x"]), json!(["x", "y"])],
                vec![json!([]), json!(["z"]), json!(["x", "x", "x"])],
            ),
            (
                json!({"$ref": "#/$defs/item"}),
                vec![json!({"k": "x", "next": {"k": "y"}})],
                vec![json!({}), json!({"k": "z"}), json!({"k": "x", "next": {}})],
            ),
            (
                json!({"type": "object", "properties": {}, "additionalProperties": false}),
                vec![json!({})],
                vec![json!({"c": 1})],
            ),
            (
                json!({"additionalProperties": {"$ref": "#/properties/b"}, "type": "object"}),
                vec![json!({}), json!({"c": 1})],
                vec![json!({"c": "x"})],
            ),
        ] {
            let parameters = of(a);
            let braced = |value: &Value| {
                format!(
                    "{{a:{}}}",
                    value
                        .to_string()
                        .replace('"', "'")
                        .replace("'k'", "k")
                        .replace("'next'", "next")
                        .replace("'c'", "c")
                )
            };
            let in_json = |value: &Value| value.to_string().replace(':', ": ").replace(',', ", ");
            let tagged = |value: &Value| {
                let text = value.as_str().map_or_else(|| in_json(value), str::to_string);
                format!("<parameter=a>\n{text}\n</parameter>\n")
            };
            let whole = |value: &Value| format!("{{\"a\": {}}}", in_json(value));
            let check = |syntax: &CallSyntax, write: &dyn Fn(&Value) -> String| {
                let fit: Vec<String> = fit.iter().map(write).collect();
                let texts: Vec<String> = fit.iter().cloned().chain(unfit.iter().map(write)).collect();
                let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
                assert_eq!(fitting(syntax, &parameters, &texts), fit, "{parameters}");
            };
            check(&braces, &braced);
            check(&CallSyntax::Tags, &tagged);
            check(&named, &whole);
        }
    }

    #[test]
    fn texts_and_lists_fit_their_limits_in_any_form() {
        let braces = CallSyntax::Braces { word: String::new(), quote: "<q>".into() };
        let named = CallSyntax::Named { between: " ".into() };
        let text = |key: &str, value: Value| json!({"type": "string", key: value});
        let pair = json!([text("maxLength", json!(2)), {"type": "integer"}]);
        let pair = |key: &str, more: Value| {
            let mut list = json!({"type": "array", key: pair});
            list.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            list
        };
        for (a, fit, unfit) in [
            (text("pattern", json!("^[a-z]+/\\d$")), json!(["ab/1"]), json!(["ab/", "1ab/1"])),
            (text("pattern", json!("b|^c")), json!(["abc", "cd"]), json!(["ac"])),
            (text("pattern", json!("x(a|b)$")), json!(["xa", "yxb"]), json!(["xc", "xab"])),
            (
                json!({"type": "string", "minLength": 2, "maxLength": 3}),
                json!(["äö", "abc"]),
                json!(["a", "abcd"]),
            ),
            (
                json!({"type": ["string", "null"], "format": "date"}),
                json!(["2026-02-28", null]),
                json!(["2026-13-01"]),
            ),
            (
                pair("prefixItems", json!({"items": false, "minItems": 2})),
                json!([["ab", 1]]),
                json!([["abc", 1], ["ab"], ["ab", 1, 2]]),
            ),
            (
                pair("items", json!({"additionalItems": {"type": "boolean"}})),
                json!([[], ["a"], ["a", 1, true, false]]),
                json!([[1], ["a", 1, 2]]),
            ),
            (
                pair("prefixItems", json!({"maxItems": 3, "items": {"$ref": "#/$defs/word"}})),
                json!([["a", 1, "x"]]),
                json!([["a", 1, "z"], ["a", 1, "x", "x"]]),
            ),
        ] {
            let parameters = of(a);
            let spaced = |value: &Value| value.to_string().replace(',', ", ");
            let check = |syntax: &CallSyntax, write: &dyn Fn(&Value) -> String| {
                let written = |all: &Value| all.as_array().unwrap().iter().map(write).collect::<Vec<_>>();
                let (fit, unfit) = (written(&fit), written(&unfit));
                let all: Vec<&str> = fit.iter().chain(&unfit).map(String::as_str).collect();
                assert_eq!(fitting(syntax, &parameters, &all), fit, "{parameters}");
            };
            check(&braces, &|value| format!("{{a:{}}}", value.to_string().replace('"', "<q>")));
            check(&CallSyntax::Tags, &|value| {
                let text = value.as_str().map_or_else(|| spaced(value), str::to_string);
                format!("<parameter=a>\n{text}\n</parameter>\n")
            });
            check(&named, &|value| format!("{{\"a\": {}}}", spaced(value)));
        }
        // More items than groups may be nested.
        let long =
            of(json!({"type": "array", "prefixItems": vec![json!({"type": "integer"}); 40], "items": false}));
        assert_eq!(fitting(&named, &long, &["{\"a\": [1, 2, 3]}"]).len(), 1);
        for (pattern, says) in [("(a", "unclosed group"), ("a(?=b)", "look-around")] {
            let parameters = json!({"properties": {"a": {"type": "string", "pattern": pattern}}});
            let tools = [("f", call_schema(&parameters))];
            let source = CallGrammar::new(&braces, &|text| quoted(text)).write(&tools, "", "");
            let error = prepared_source(source).err().unwrap();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn texts_between_tags_end_before_a_tag_of_calls() {
        let parameters = json!({"properties": {"a": {"type": "string"}, "b": {}}});
        let written = |text: &str| {
            format!("<parameter=a>\n{text}\n</parameter>\n<parameter=b>\n{text}\n</parameter>\n")
        };
        let fit = ["", "x", "def f():\n    return 1\n", "<b>a</b>\n< <<", "\n\n"].map(written);
        let unfit = ["a</parameter>", "<parameter=c>", "</function>"].map(written);
        let all: Vec<&str> = fit.iter().chain(&unfit).map(String::as_str).collect();
        assert_eq!(fitting(&CallSyntax::Tags, &parameters, &all), fit);
    }

    #[test]
    fn formats_take_and_refuse_the_same_texts_as_in_json() {
        let braces = CallSyntax::Braces { word: String::new(), quote: "<q>".into() };
        for (format, fit, unfit) in [
            ("date-time", "2026-11-28T23:30:26.5Z", "2026-11-28 23:30"),
            ("time", "23:59:60+01:00", "24:00:00Z"),
            ("duration", "P1DT2H", "P"),
            ("email", "a.b+c@d-e.org", "a b@c"),
            ("hostname", "a-1.example.com", "-a.com"),
            ("ipv4", "255.0.19.1", "256.0.0.1"),
            ("ipv6", "fe80::1:2", "1:2:3"),
            ("uuid", "0a1b2c3d-0000-1111-2222-333344445555", "0a1b2c3d"),
            ("uri", "https://a.org/b?c=%20#d", "a b"),
            ("password", "x", ""),
        ] {
            let parameters =
                json!({"properties": {"a": {"type": "string", "format": format}}, "required": ["a"]});
            let named = CallSyntax::Named { between: " ".into() };
            for (syntax, write) in [
                (&braces, "{a:<q>T<q>}"),
                (&CallSyntax::Tags, "<parameter=a>\nT\n</parameter>\n"),
                (&named, "{\"a\": \"T\"}"),
            ] {
                let [fit, unfit] = [fit, unfit].map(|text| write.replace('T', text));
                let got = fitting(syntax, &parameters, &[&fit, &unfit]);
                assert_eq!(got.first(), Some(&fit.as_str()), "{format}");
                assert_eq!(got.len() == 1, format != "password", "{format} {unfit}");
            }
        }
    }

    #[test]
    fn what_is_not_declared_is_left_out() {
        let braces = CallSyntax::Braces { word: String::new(), quote: "'".into() };
        let named = CallSyntax::Named { between: " ".into() };
        for none in
            [json!(null), json!({}), json!({"type": "object"}), json!({"properties": {}, "required": []})]
        {
            for syntax in [&braces, &named] {
                assert_eq!(
                    fitting(syntax, &none, &["{}", "{b:1}", "{\"b\": 1}", "'x'", "\"x\""]),
                    ["{}"],
                    "{none}"
                );
            }
            assert_eq!(fitting(&CallSyntax::Tags, &none, &["", "<parameter=b>\n1\n</parameter>\n"]), [""]);
        }
        let free = json!({"type": "object", "additionalProperties": true});
        assert_eq!(fitting(&braces, &free, &["{}", "{b:1}"]), ["{}", "{b:1}"]);
        let named_only = json!({"properties": {"b": {"type": "integer"}}, "required": ["z"]});
        assert_eq!(fitting(&braces, &named_only, &["{}", "{b:1}", "{b:1,z:'x'}"]), ["{b:1,z:'x'}"]);
        let circle = of(json!({"$ref": "#/$defs/loops"}));
        assert_eq!(fitting(&braces, &circle, &["{a:1}", "{a:'x',b:1}", "{}"]), ["{a:1}", "{a:'x',b:1}"]);
        // Many definitions that refer to each other.
        let next = |i: usize| json!({"anyOf": [{"type": "array", "items": {"$ref": format!("#/$defs/d{}", i + 1)}, "minItems": 1}]});
        let chain: Map<_, _> = (0..190).map(|i| (format!("d{i}"), next(i))).collect();
        let deep = json!({"properties": {"a": {"$ref": "#/$defs/d0"}}, "required": ["a"], "$defs": chain});
        let nested = format!("{{a:{}'x'{}}}", "[".repeat(40), "]".repeat(40));
        assert_eq!(fitting(&braces, &deep, &[&nested, "{a:[[[]]]}"]), [nested.as_str()]);
        // Parts that are in many objects.
        let part = |n: usize| json!({"properties": (0..300).map(|i| (format!("p{n}_{i}"), json!(true))).collect::<Map<_, _>>()});
        let parts: Map<_, _> = (0..60).map(|n| (format!("d{n}"), part(n))).collect();
        let all: Vec<Value> = (0..60).map(|n| json!({"$ref": format!("#/$defs/d{n}")})).collect();
        let many: Map<_, _> =
            (0..300).map(|i| (format!("o{i}"), json!({"type": "object", "allOf": all}))).collect();
        let tools = [("f", call_schema(&json!({"properties": many, "$defs": parts})))];
        let source = CallGrammar::new(&braces, &|text| quoted(text)).write(&tools, "", "");
        assert!(source.len() < 16 << 20, "{}", source.len());
    }
}
