//! Calls of tools in the text of an answer.
//!
//! ```text
//! Tagged   some words <tool_call>{"name": "f", "arguments": {..}}</tool_call> <tool_call>..     Qwen, Hermes
//! Bare     {"name": "f", "parameters": {..}}                                                    Llama 3; the whole answer
//! ```
//!
//! The form of a model is found by rendering a call that its template did not see before. Templates that write calls in
//! another way, as Gemma's do, have no form here: their calls stay text.

use crate::grammar::spell;
use anemoe_runtime::chat::{ChatTemplate, message};
use serde_json::{Map, Value, json};

/// Names that stand in no other text.
const TOOL: &str = "MARKOFATOOL";
const CALL: &str = "MARKOFACALL";
/// Longest tag before or behind a call.
const MAX_TAG: usize = 64;

/// Form in which a template writes calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallForm {
    /// Tags before and behind a call; none where the call is the whole answer.
    tags: Option<(String, String)>,
    /// Text between a tag and the call, as the template has it.
    blank: String,
    /// Key of the arguments: `arguments` or `parameters`.
    key: String,
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// Name of the tool.
    pub name: String,
    /// Its arguments, JSON as text.
    pub arguments: String,
}

/// Piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// Text for people.
    Text(String),
    /// A call.
    Call(ToolCall),
}

/// Describes one tool, as requests do.
fn marked_tool() -> Value {
    let parameters = json!({"type": "object", "properties": {"key": {"type": "string"}}});
    json!({"type": "function", "function": {"name": TOOL, "description": "", "parameters": parameters}})
}

impl CallForm {
    /// Finds the form of a template; none where it has none of these.
    pub fn of(template: &ChatTemplate) -> Option<CallForm> {
        if !template.takes_tools() {
            return None;
        }
        let tools = [marked_tool()];
        let function = json!({"name": CALL, "arguments": {"key": "value"}});
        let mut called = Map::from_iter(message("assistant", "").as_object().cloned().unwrap_or_default());
        called.insert("tool_calls".into(), json!([{"id": "x", "type": "function", "function": function}]));
        let question = message("user", "x");
        let whole = template.render(&[question, called.into()], Some(&tools), false).ok()?;
        let start = whole[..whole.find(CALL)?].rfind('{')?;
        let mut calls = serde_json::Deserializer::from_str(&whole[start..]).into_iter::<Map<String, Value>>();
        let call = calls.next()?.ok()?;
        let behind = &whole[start + calls.byte_offset()..];
        let key = ["arguments", "parameters"]
            .into_iter()
            .find(|key| call.get(*key).is_some_and(|arguments| arguments["key"] == "value"))?;
        if call.get("name").is_none_or(|name| name != CALL) {
            return None;
        }
        let before = &whole[..start];
        let blank = before[before.trim_end().len()..].to_string();
        let tags = first_tag(behind.trim_start()).and_then(|end| {
            let begin = end.replacen("</", "<", 1);
            (begin != end && before.trim_end().ends_with(&begin)).then_some((begin, end))
        });
        match (tags, key) {
            (Some(tags), _) => Some(CallForm { tags: Some(tags), blank, key: key.into() }),
            // Without tags, this key alone tells a call from another object.
            (None, "parameters") => Some(CallForm { tags: None, blank: String::new(), key: key.into() }),
            _ => None,
        }
    }

    /// A grammar in Lark of one call, of one of these tools.
    pub fn grammar(&self, tools: &[&Value]) -> String {
        let quoted = |text: &str| Value::from(text).to_string();
        let (before, behind) = match &self.tags {
            Some((begin, end)) => (format!("{begin}{}", self.blank), format!("{}{end}", self.blank)),
            None => (String::new(), String::new()),
        };
        let names: Vec<String> = (0..tools.len()).map(|i| format!("call{i}")).collect();
        let mut grammar = format!("start: {}\n", names.join(" | "));
        for (i, tool) in tools.iter().enumerate() {
            let head = format!("{before}{{\"name\": {}, {}: ", tool["function"]["name"], quoted(&self.key));
            let mut schema = match &tool["function"]["parameters"] {
                Value::Object(schema) => schema.clone(),
                _ => Map::from_iter([("type".to_string(), "object".into())]),
            };
            spell(&mut schema);
            let tail = quoted(&format!("}}{behind}"));
            grammar += &format!("call{i}: {} arguments{i} {tail}\n", quoted(&head));
            grammar += &format!("arguments{i}: %json {}\n", Value::from(schema));
        }
        grammar
    }

    /// The call that a JSON text is; none where it is something else.
    fn read(&self, text: &str) -> Option<ToolCall> {
        let call: Map<String, Value> = serde_json::from_str(text.trim()).ok()?;
        let name = call.get("name")?.as_str()?.to_string();
        let arguments = match call.get(&self.key).or_else(|| call.get("arguments")) {
            None if self.tags.is_some() => "{}".into(),
            Some(Value::String(text)) if serde_json::from_str::<Map<String, Value>>(text).is_ok() => {
                text.clone()
            }
            Some(arguments @ Value::Object(_)) => arguments.to_string(),
            _ => return None,
        };
        Some(ToolCall { name, arguments })
    }
}

/// The tag that a text begins with.
fn first_tag(text: &str) -> Option<String> {
    let end = text.find('>').filter(|end| *end < MAX_TAG)?;
    text.starts_with('<').then(|| text[..=end].to_string())
}

/// Finds calls in an answer that comes piece by piece. What may be a call or the blanks before one is held back.
#[derive(Clone)]
pub struct CallParser {
    form: CallForm,
    /// Names of the request's tools.
    names: Vec<String>,
    /// Text that was not given away.
    held: String,
    /// The begin tag came, and the end tag did not.
    is_inside: bool,
    /// Text that is no blank came: the whole answer is no call.
    is_text: bool,
}

impl CallParser {
    /// Looks for calls of these tools.
    pub fn new(form: CallForm, names: Vec<String>) -> CallParser {
        CallParser { form, names, held: String::new(), is_inside: false, is_text: false }
    }

    /// Adds a piece; gives what is known now.
    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        self.held.push_str(piece);
        let mut parts = Vec::new();
        match self.form.tags.clone() {
            Some((begin, end)) => self.push_tagged(&begin, &end, &mut parts),
            None => {
                let start = self.held.trim_start();
                self.is_text |= !start.is_empty() && !start.starts_with('{');
                if self.is_text {
                    add_text(&mut parts, std::mem::take(&mut self.held));
                }
            }
        }
        parts
    }

    fn push_tagged(&mut self, begin: &str, end: &str, parts: &mut Vec<AnswerPart>) {
        loop {
            let tag = if self.is_inside { end } else { begin };
            let Some(at) = self.held.find(tag) else { break };
            let rest = self.held.split_off(at + tag.len());
            let mut before = std::mem::replace(&mut self.held, rest);
            before.truncate(at);
            match (self.is_inside, self.form.read(&before)) {
                // Blanks before a call are none of the text.
                (false, _) => add_text(parts, before.trim_end().to_string()),
                (true, Some(call)) => parts.push(AnswerPart::Call(call)),
                (true, None) => add_text(parts, format!("{begin}{before}{end}")),
            }
            self.is_inside = !self.is_inside;
        }
        if !self.is_inside {
            // What may begin a tag, and blanks before it.
            let (tag, held) = (begin.as_bytes(), self.held.as_bytes());
            let kept = (1..tag.len()).rev().find(|n| held.ends_with(&tag[..*n]));
            let shown = self.held[..self.held.len() - kept.unwrap_or(0)].trim_end().len();
            let held = self.held.split_off(shown);
            add_text(parts, std::mem::replace(&mut self.held, held));
        }
    }

    /// Gives what was held back when the answer ended; a call whose end tag did not come counts where it is whole.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        let held = std::mem::take(&mut self.held);
        let mut parts = Vec::new();
        let call = match &self.form.tags {
            Some(_) if self.is_inside => self.form.read(&held),
            Some(_) => None,
            None => self.form.read(&held).filter(|call| self.names.contains(&call.name)),
        };
        match (call, &self.form.tags) {
            (Some(call), _) => parts.push(AnswerPart::Call(call)),
            (None, Some((begin, _))) if self.is_inside => add_text(&mut parts, format!("{begin}{held}")),
            (None, _) => add_text(&mut parts, held),
        }
        self.is_inside = false;
        parts
    }
}

fn add_text(parts: &mut Vec<AnswerPart>, text: String) {
    if !text.is_empty() {
        parts.push(AnswerPart::Text(text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn form(template: &str) -> Option<CallForm> {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../runtime/tests/chat_templates").join(template);
        let text = std::fs::read_to_string(&path).unwrap();
        let config = json!({"bos_token": "<bos>", "eos_token": "<eos>"});
        CallForm::of(&ChatTemplate::new(&text, config.as_object().unwrap(), &path).unwrap())
    }

    fn tagged() -> CallForm {
        form("qwen3.jinja").unwrap()
    }

    #[test]
    fn forms_are_found_in_templates() {
        let tags = ("<tool_call>".to_string(), "</tool_call>".to_string());
        let expected = CallForm { tags: Some(tags), blank: "\n".into(), key: "arguments".into() };
        assert_eq!(tagged(), expected);
        let bare = CallForm { tags: None, blank: String::new(), key: "parameters".into() };
        assert_eq!(form("llama3.jinja"), Some(bare));
        for none in ["gemma3.jinja", "gemma4.jinja", "zaya.jinja"] {
            assert_eq!(form(none), None, "{none}");
        }
    }

    /// All parts of an answer that is cut into these pieces, with neighbouring texts joined.
    fn parts(form: &CallForm, pieces: &[&str]) -> Vec<AnswerPart> {
        let mut parser = CallParser::new(form.clone(), vec!["f".into(), "g".into()]);
        let mut all: Vec<AnswerPart> = Vec::new();
        let come = pieces.iter().flat_map(|p| parser.push(p)).collect::<Vec<_>>();
        for part in come.into_iter().chain(parser.finish()) {
            match (all.last_mut(), part) {
                (Some(AnswerPart::Text(text)), AnswerPart::Text(more)) => text.push_str(&more),
                (_, part) => all.push(part),
            }
        }
        all
    }

    /// Checks an answer however it is cut in three.
    fn check(form: &CallForm, text: &str, expected: &[AnswerPart]) {
        let places: Vec<usize> = text.char_indices().map(|(i, _)| i).chain([text.len()]).collect();
        for &a in &places {
            for &b in places.iter().filter(|b| **b >= a) {
                let pieces = [&text[..a], &text[a..b], &text[b..]];
                assert_eq!(parts(form, &pieces), expected, "{pieces:?}");
            }
        }
        let single: Vec<String> = text.chars().map(String::from).collect();
        let single: Vec<&str> = single.iter().map(String::as_str).collect();
        assert_eq!(parts(form, &single), expected);
    }

    fn text(text: &str) -> AnswerPart {
        AnswerPart::Text(text.into())
    }

    fn call(name: &str, arguments: &str) -> AnswerPart {
        AnswerPart::Call(ToolCall { name: name.into(), arguments: arguments.into() })
    }

    #[test]
    fn tagged_calls_are_found_wherever_pieces_are_cut() {
        let form = tagged();
        let one = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"p\": \"Kö<\"}}\n</tool_call>";
        check(&form, one, &[call("f", r#"{"p":"Kö<"}"#)]);
        let two = format!("So:\n\n{one}\n<tool_call>{{\"name\":\"g\"}}</tool_call> x");
        check(&form, &two, &[text("So:"), call("f", r#"{"p":"Kö<"}"#), call("g", "{}"), text(" x")]);
        // Arguments as text, and an end without its tag.
        let open = r#"<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}"#;
        check(&form, open, &[call("f", r#"{"a": 1}"#)]);
    }

    #[test]
    fn what_is_no_call_stays_text() {
        let form = tagged();
        for same in [
            "a < b, <tool_cal> and <tool_",
            "words \n",
            "<tool_call>{\"name\": 1}</tool_call>.",
            "<tool_call>\n{\"name\": \"f\", \"argum",
            "<tool_call>not JSON</tool_call>",
            "",
        ] {
            let expected = if same.is_empty() { vec![] } else { vec![text(same)] };
            check(&form, same, &expected);
        }
    }

    #[test]
    fn a_bare_call_is_the_whole_answer_and_of_a_known_tool() {
        let form = form("llama3.jinja").unwrap();
        check(&form, "\n{\"name\": \"f\", \"parameters\": {\"a\": [1]}}\n", &[call("f", r#"{"a":[1]}"#)]);
        for same in [
            r#"{"name": "h", "parameters": {}}"#,
            r#"{"name": "f"}"#,
            r#"{"name": "f", "parameters": {}} and more"#,
            r#"So {"name": "f", "parameters": {}}"#,
            "{",
        ] {
            check(&form, same, &[text(same)]);
        }
        // Words are not held back.
        let mut parser = CallParser::new(form, vec![]);
        assert_eq!(parser.push("So "), [text("So ")]);
        assert_eq!(parser.push("{"), [text("{")]);
    }
}
