//! Calls in a text, in any of the forms that models write.
//!
//! ```text
//! {"name": NAME, "arguments": {..}}     "parameters", or within "function", or in a list
//! call:NAME{..}   NAME[ARGS]{..}        a word before and marks behind the name
//! NAME(KEY=VALUE, ..)                   as in Python
//! <function=NAME><parameter=KEY>text</parameter>..</function>
//! ```

use super::ToolCall;
use super::schema::{ArgumentShape, NULL};
use super::values::{ValueReader, fit, written};
use serde_json::{Map, Value, json};
use std::sync::LazyLock;

/// Keys with which the object of a call begins.
const KEYS: [&str; 8] = ["name", "arguments", "parameters", "args", "input", "function", "type", "id"];
/// Keys of the arguments; the last two only where the tool has no such property.
pub const ARGUMENTS: [&str; 4] = ["arguments", "parameters", "args", "input"];
/// Words between a name and its arguments; besides, there are marks in angle brackets or brackets.
const WORDS: [&str; 5] = ["json", "code", "commentary", "analysis", "```"];
/// Most bytes of a text that may still become a call.
const MAX_UNSURE: usize = 256;

/// Schema of a call; its arguments have the schema of the tool, also where they stand beside the name.
static CALL: LazyLock<Value> = LazyLock::new(|| {
    let arguments = json!({"allOf": [{"type": "object"}, {"$ref": "#"}]});
    let mut call = json!({"properties": {"name": {"type": "string"}}, "anyOf": [{"$ref": "#"}]});
    for key in ARGUMENTS {
        call["properties"][key] = arguments.clone();
    }
    let inner = call.clone();
    call["properties"]["function"] = inner;
    call
});

/// Tools of a request.
pub struct Tools {
    /// Name and schema of the arguments of each.
    tools: Vec<(String, Value)>,
}

/// Guess whether a text begins a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guess {
    /// It begins none.
    No,
    /// More text decides.
    Unsure,
    /// It begins one.
    Yes,
}

/// Marks around names and texts of calls.
pub struct CallMarks<'a> {
    /// Text before a name.
    pub word: &'a str,
    /// Mark before and after texts.
    pub quote: &'a str,
}

impl Tools {
    /// Makes the list of a request's `tools`.
    pub fn new(tools: &[Value]) -> Tools {
        let tool = |tool: &Value| {
            let function = &tool["function"];
            Some((function["name"].as_str()?.to_string(), function["parameters"].clone()))
        };
        Tools { tools: tools.iter().filter_map(tool).collect() }
    }

    fn find(&self, name: &str) -> Option<&(String, Value)> {
        let known = |name: &str| self.tools.iter().find(|(known, _)| known == name);
        known(name).or_else(|| known(name.strip_prefix("functions.")?))
    }

    /// Tells whether the object with which a text begins names one of these tools.
    pub fn know_name(&self, text: &str) -> bool {
        scan_name(text).is_some_and(|name| self.find(&name).is_some())
    }

    /// Reads consecutive calls of these tools; `None` where the text is something else. `is_ended` says that the model
    /// ended the text, so that its end may close what is open.
    pub fn read<'t>(&self, text: &'t str, marks: &CallMarks<'t>, is_ended: bool) -> Option<Vec<ToolCall>> {
        let between = |c: char| c.is_whitespace() || "[],;".contains(c);
        let mut rest = without_fence(text.trim()).trim_start_matches(between);
        let mut calls = Vec::new();
        while !rest.is_empty() {
            let (call, behind) = if let Some(inner) = rest.strip_prefix("<function") {
                self.read_tags(inner, is_ended)?
            } else if rest.starts_with('{') {
                self.read_object(rest, marks, is_ended)?
            } else {
                self.read_named(rest, marks, is_ended)?
            };
            calls.push(call);
            // A brace too many closes nothing.
            rest = behind.trim_start().trim_start_matches('}').trim_start_matches(between);
        }
        (!calls.is_empty()).then_some(calls)
    }

    /// Reads a call as an object with a name and arguments.
    fn read_object<'t>(
        &self,
        text: &'t str,
        marks: &CallMarks<'t>,
        is_ended: bool,
    ) -> Option<(ToolCall, &'t str)> {
        let any = ArgumentShape::new(&Value::Null, &Value::Null);
        let whole = ValueReader::new(text, marks.quote, is_ended).object(&any, 0);
        let named = whole.as_ref().and_then(|whole| self.find(part(whole, &["name"])?.as_str()?));
        let (name, parameters) = named.or_else(|| self.find(&scan_name(text)?))?;
        let mut reader = ValueReader::new(text, marks.quote, is_ended);
        let call = reader.object(&ArgumentShape::new(parameters, &CALL), 0)?;
        let shape = ArgumentShape::new(parameters, parameters);
        let keys: Vec<&str> =
            ARGUMENTS.into_iter().filter(|key| KEYS[1..3].contains(key) || !shape.has(key)).collect();
        let (mut arguments, is_given, is_empty) = match part(&call, &keys) {
            None | Some(Value::Null) => (Map::new(), false, false),
            Some(Value::String(text)) if text.trim().is_empty() => (Map::new(), false, true),
            Some(Value::Object(arguments)) => (arguments.clone(), true, false),
            Some(_) => return None,
        };
        // Arguments beside the name.
        let inner = call.get("function").and_then(Value::as_object);
        for (key, value) in call.iter().chain(inner.into_iter().flatten()) {
            let is_frame = ["name", "function"].contains(&key.as_str()) || keys.contains(&key.as_str());
            let is_known = ["type", "id"].contains(&key.as_str());
            if is_frame || is_known && (is_given || !shape.has(key)) {
                continue;
            }
            if shape.has(key) {
                arguments.entry(key.as_str()).or_insert_with(|| value.clone());
            } else if !is_given {
                return None;
            }
        }
        Some((made(name, parameters, arguments, reader.is_mended || is_empty)?, reader.rest()))
    }

    /// Reads a name with arguments behind it.
    fn read_named<'t>(
        &self,
        text: &'t str,
        marks: &CallMarks<'t>,
        is_ended: bool,
    ) -> Option<(ToolCall, &'t str)> {
        let text = text.strip_prefix(marks.word.trim()).unwrap_or(text);
        let text = text.strip_prefix("functions.").unwrap_or(text).trim_start();
        let end = text.find(|c: char| c.is_whitespace() || "{[<(".contains(c)).unwrap_or(text.len());
        let (name, parameters) = self.find(&text[..end])?;
        let mut behind = text[end..].trim_start();
        if behind.is_empty() && is_ended {
            return Some((made(name, parameters, Map::new(), true)?, ""));
        }
        // As a call in Python.
        if let Some(inner) = behind.strip_prefix('(').and_then(|inner| inner.trim_end().strip_suffix(')')) {
            let is_object = inner.trim_start().starts_with('{');
            let written = if is_object { inner.to_string() } else { format!("{{{inner}}}") };
            let mut reader = ValueReader::new(&written, marks.quote, is_ended);
            let arguments = reader.object(&ArgumentShape::new(parameters, parameters), 0)?;
            let call = made(name, parameters, arguments, reader.is_mended)?;
            return reader.rest().trim().is_empty().then_some((call, ""));
        }
        while !behind.starts_with('{') {
            let word = WORDS.iter().find_map(|word| behind.strip_prefix(word));
            let close = if behind.starts_with('<') { '>' } else { ']' };
            let mark = || Some(behind.split_once(close)?.1).filter(|_| behind.starts_with(['<', '[']));
            behind = word.or_else(mark)?.trim_start();
        }
        let mut reader = ValueReader::new(behind, marks.quote, is_ended);
        let arguments = reader.object(&ArgumentShape::new(parameters, parameters), 0)?;
        let rest = reader.rest().trim_start().trim_start_matches("```");
        Some((made(name, parameters, arguments, reader.is_mended)?, rest))
    }

    /// Reads a call whose name and arguments stand in tags, behind `<function`.
    fn read_tags<'t>(&self, text: &'t str, is_ended: bool) -> Option<(ToolCall, &'t str)> {
        let (name, mut rest) = tag_name(text)?;
        let (name, parameters) = self.find(name)?;
        let shape = ArgumentShape::new(parameters, parameters);
        if rest.trim_start().starts_with('{') {
            let mut reader = ValueReader::new(rest, "", is_ended);
            let arguments = reader.object(&shape, 0)?;
            let rest = reader.rest().trim_start();
            let call = made(name, parameters, arguments, reader.is_mended)?;
            return Some((call, rest.strip_prefix("</function>").unwrap_or(rest)));
        }
        let mut arguments = Map::new();
        let mut is_mended = false;
        loop {
            rest = rest.trim_start();
            if let Some(behind) = rest.strip_prefix("</function>") {
                rest = behind;
                break;
            }
            if rest.is_empty() && is_ended {
                is_mended = true;
                break;
            }
            let (key, value) = tag_name(rest.strip_prefix("<parameter")?)?;
            let closes = |tail: &str| {
                ["</parameter>", "<parameter", "</function>"].iter().any(|t| tail.starts_with(t))
            };
            let end = value.match_indices('<').map(|(i, _)| i).find(|i| closes(&value[*i..]));
            is_mended |= end.is_none();
            let end = end.or_else(|| is_ended.then_some(value.len()))?;
            let text = value[..end].strip_prefix('\n').unwrap_or(&value[..end]);
            let text = text.strip_suffix('\n').unwrap_or(text);
            let shape = shape.property(key);
            let is_null = text == "null" && shape.types() & NULL != 0;
            arguments.insert(key.into(), if is_null { Value::Null } else { fit(text.into(), &shape, 0) });
            rest = value[end..].strip_prefix("</parameter>").unwrap_or(&value[end..]);
        }
        Some((made(name, parameters, arguments, is_mended)?, rest))
    }

    /// Guesses from its beginning whether a text is a call. Without a tag before it (`is_tagged`), a name alone is none.
    pub fn guess(&self, text: &str, marks: &CallMarks<'_>, is_tagged: bool) -> Guess {
        let long = self.tools.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let unsure = if text.len() > MAX_UNSURE + long { Guess::No } else { Guess::Unsure };
        let text = text.trim_start();
        let text = match text.strip_prefix("```").map(|fenced| fenced.split_once('\n')) {
            Some(None) => return unsure,
            Some(Some((_, inner))) => inner,
            None => text,
        };
        let text = text.trim_start_matches(|c: char| c.is_whitespace() || c == '[');
        if let Some(inner) = text.strip_prefix('{') {
            let inner = inner.trim_start().trim_start_matches('{').trim_start();
            return match self.guess_object(inner) {
                Guess::Unsure => unsure,
                sure => sure,
            };
        }
        if "```".starts_with(text) || "<function".starts_with(text) {
            return unsure;
        }
        if text.starts_with("<function") {
            return Guess::Yes;
        }
        let tail = text.strip_prefix(marks.word);
        if tail.is_none() && marks.word.starts_with(text) {
            return unsure;
        }
        if tail.is_none() && !is_tagged {
            return Guess::No;
        }
        let tail = tail.unwrap_or(text).trim_start();
        let tail = tail.strip_prefix("functions.").unwrap_or(tail);
        match self.guess_name(tail, "{[<( \n") {
            Guess::No if "functions.".starts_with(tail) => unsure,
            Guess::Unsure => unsure,
            sure => sure,
        }
    }

    fn guess_name(&self, text: &str, ends: &str) -> Guess {
        let guess = |(name, _): &(String, Value)| match text.strip_prefix(name.as_str()) {
            Some(behind) => behind
                .chars()
                .next()
                .map_or(Guess::Unsure, |c| if ends.contains(c) { Guess::Yes } else { Guess::No }),
            None if name.starts_with(text) => Guess::Unsure,
            None => Guess::No,
        };
        let all: Vec<Guess> = self.tools.iter().map(guess).collect();
        [Guess::Yes, Guess::Unsure].into_iter().find(|guess| all.contains(guess)).unwrap_or(Guess::No)
    }

    /// Guesses whether an object is a call by its first key, and by the name where that comes first.
    fn guess_object(&self, text: &str) -> Guess {
        let text = text.trim_start_matches(['"', '\'']);
        let length = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
        let (key, behind) = text.split_at(length);
        if behind.is_empty() {
            return if KEYS.iter().any(|known| known.starts_with(key)) { Guess::Unsure } else { Guess::No };
        }
        if !KEYS.contains(&key) {
            return Guess::No;
        }
        let value = behind.trim_start_matches(['"', '\'']).trim_start();
        let Some(value) = value.strip_prefix(':') else {
            return if value.is_empty() { Guess::Unsure } else { Guess::No };
        };
        let value = value.trim_start();
        match value.chars().next() {
            None => Guess::Unsure,
            Some('"' | '\'') if key == "name" => {
                match value[1..].strip_prefix("functions.").unwrap_or(&value[1..]) {
                    name if "functions.".starts_with(name) => Guess::Unsure,
                    name => self.guess_name(name, "\"'"),
                }
            }
            Some(_) => Guess::Yes,
        }
    }
}

/// Makes a call. `None` if the end of its text had to close it and a required argument is missing.
fn made(name: &str, parameters: &Value, arguments: Map<String, Value>, is_mended: bool) -> Option<ToolCall> {
    let mut required = parameters["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let is_cut = is_mended && required.any(|key| !arguments.contains_key(key));
    (!is_cut).then(|| ToolCall { name: name.into(), arguments: written(&arguments.into()) })
}

/// Returns the first of these parts of a call, also from within its `function`.
fn part<'v>(call: &'v Map<String, Value>, keys: &[&str]) -> Option<&'v Value> {
    let inner = call.get("function");
    let find = |key: &&str| call.get(*key).or_else(|| inner?.get(*key));
    // `{"function": NAME, ..}`
    keys.iter().find_map(find).or_else(|| inner.filter(|name| keys == ["name"] && name.is_string()))
}

/// Finds the name of a call whose object cannot be read without the tool's schema.
fn scan_name(text: &str) -> Option<String> {
    let behind = text.split_once("name")?.1.trim_start_matches(['"', '\'', ':', ' ', '\n', '\t']);
    Some(behind.split(['"', '\'', ',', '}']).next()?.trim().into())
}

/// Returns the name in a tag `=NAME>` or ` name="NAME">`, and the text behind the tag.
fn tag_name(text: &str) -> Option<(&str, &str)> {
    let (name, behind) = text.split_once('>')?;
    let name = name.trim_start().strip_prefix("name").unwrap_or(name).trim_start().strip_prefix('=')?;
    Some((name.trim().trim_matches(['"', '\'']), behind))
}

/// Returns a text without the lines that make it a block of code.
fn without_fence(text: &str) -> &str {
    let inner = text.strip_prefix("```").and_then(|fenced| fenced.split_once('\n'));
    inner.map_or(text, |(_, inner)| inner).trim_end().trim_end_matches("```").trim_end()
}
