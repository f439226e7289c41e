//! The form in which a chat template writes tool calls.

use super::ToolCall;
use super::braces::BraceCalls;
use crate::grammar::{quoted, set_spacing};
use anemoe_runtime::chat::{ChatTemplate, message};
use anemoe_runtime::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// Markers that occur in no other text.
const TOOL: &str = "MARKOFATOOL";
const CALL: &str = "MARKOFACALL";
/// Key and value of the marker call's only argument.
const ARGUMENT: (&str, &str) = ("key", "value");
/// Most bytes of a tag before or after a call.
const MAX_TAG: usize = 64;

/// The form in which a template writes tool calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallForm {
    /// Tags before and after a call; `None` where the call is the whole answer.
    pub(super) tags: Option<(String, String)>,
    /// Syntax between the tags.
    pub(super) syntax: CallSyntax,
}

/// Syntax of a call between its tags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CallSyntax {
    /// A JSON object with a name and arguments.
    Json {
        /// Text between a tag and the object, as in the template.
        blank: String,
        /// Key of the arguments: `arguments` or `parameters`.
        key: String,
    },
    /// Names with arguments in braces.
    Braces(BraceCalls),
}

/// Returns the description of a tool, in the form of requests.
fn marked_tool() -> Value {
    let parameters = json!({"type": "object", "properties": {ARGUMENT.0: {"type": "string"}}});
    json!({"type": "function", "function": {"name": TOOL, "description": "", "parameters": parameters}})
}

impl CallForm {
    /// Finds the form of a template; `None` where it writes no calls, or in an unknown form.
    pub fn of(template: &ChatTemplate) -> Option<CallForm> {
        if !template.takes_tools() {
            return None;
        }
        let tools = [marked_tool()];
        let function = json!({"name": CALL, "arguments": {ARGUMENT.0: ARGUMENT.1}});
        let mut called = Map::from_iter(message("assistant", "").as_object().cloned().unwrap_or_default());
        called.insert("tool_calls".into(), json!([{"id": "x", "type": "function", "function": function}]));
        let question = message("user", "x");
        let whole = template.render(&[question, called.into()], Some(&tools), false).ok()?;
        CallForm::of_json(&whole).or_else(|| CallForm::of_braces(&whole))
    }

    /// Finds the JSON object of the marker call in a rendered conversation.
    fn of_json(whole: &str) -> Option<CallForm> {
        let start = whole[..whole.find(CALL)?].rfind('{')?;
        let mut calls = serde_json::Deserializer::from_str(&whole[start..]).into_iter::<Map<String, Value>>();
        let call = calls.next()?.ok()?;
        let behind = &whole[start + calls.byte_offset()..];
        let key = ["arguments", "parameters"]
            .into_iter()
            .find(|key| call.get(*key).is_some_and(|arguments| arguments[ARGUMENT.0] == ARGUMENT.1))?;
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
            (Some(tags), _) => {
                Some(CallForm { tags: Some(tags), syntax: CallSyntax::Json { blank, key: key.into() } })
            }
            // Without tags, only this key distinguishes a call from another object.
            (None, "parameters") => Some(CallForm {
                tags: None,
                syntax: CallSyntax::Json { blank: String::new(), key: key.into() },
            }),
            _ => None,
        }
    }

    /// Finds the marker call with braces in a rendered conversation.
    fn of_braces(whole: &str) -> Option<CallForm> {
        let at = whole.find(CALL)?;
        let (begin, word) = last_tag(&whole[..at])?;
        let (calls, behind) = BraceCalls::find(word, &whole[at + CALL.len()..], ARGUMENT)?;
        let end = first_tag(behind)?;
        Some(CallForm { tags: Some((begin, end)), syntax: CallSyntax::Braces(calls) })
    }

    /// Returns the special tokens that are part of a call's text, so that decoding must show them.
    pub fn marks(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let tags = self.tags.iter().flat_map(|(begin, end)| [begin.as_str(), end.as_str()]);
        let quote = match &self.syntax {
            CallSyntax::Json { .. } => None,
            CallSyntax::Braces(calls) => Some(calls.quote()),
        };
        tags.chain(quote).filter_map(|mark| tokenizer.special_id(mark)).collect()
    }

    /// Makes a grammar in Lark for one call of one of these tools.
    pub fn grammar(&self, tools: &[&Value], tokenizer: &Tokenizer) -> String {
        match &self.syntax {
            CallSyntax::Json { blank, key } => self.json_grammar(tools, blank, key),
            CallSyntax::Braces(calls) => {
                let (begin, end) = self.tags.clone().unwrap_or_default();
                calls.grammar(tools, (&begin, &end), tokenizer)
            }
        }
    }

    fn json_grammar(&self, tools: &[&Value], blank: &str, key: &str) -> String {
        let (before, behind) = match &self.tags {
            Some((begin, end)) => (format!("{begin}{blank}"), format!("{blank}{end}")),
            None => (String::new(), String::new()),
        };
        let names: Vec<String> = (0..tools.len()).map(|i| format!("call{i}")).collect();
        let mut grammar = format!("start: {}\n", names.join(" | "));
        for (i, tool) in tools.iter().enumerate() {
            let head = format!("{before}{{\"name\": {}, {}: ", tool["function"]["name"], quoted(key));
            let mut schema = match &tool["function"]["parameters"] {
                Value::Object(schema) => schema.clone(),
                _ => Map::from_iter([("type".to_string(), "object".into())]),
            };
            set_spacing(&mut schema);
            let tail = quoted(&format!("}}{behind}"));
            grammar += &format!("call{i}: {} arguments{i} {tail}\n", quoted(&head));
            grammar += &format!("arguments{i}: %json {}\n", Value::from(schema));
        }
        grammar
    }

    /// Parses the text between tags as calls, at least one; `None` where it is something else.
    pub(super) fn read(&self, text: &str) -> Option<Vec<ToolCall>> {
        match &self.syntax {
            CallSyntax::Json { key, .. } => self.read_json(text, key).map(|call| vec![call]),
            CallSyntax::Braces(calls) => calls.read(text),
        }
    }

    fn read_json(&self, text: &str, key: &str) -> Option<ToolCall> {
        let call: Map<String, Value> = serde_json::from_str(text.trim()).ok()?;
        let name = call.get("name")?.as_str()?.to_string();
        let arguments = match call.get(key).or_else(|| call.get("arguments")) {
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

/// Returns the tag with which a text begins.
fn first_tag(text: &str) -> Option<String> {
    let end = text.find('>').filter(|end| *end < MAX_TAG)?;
    text.starts_with('<').then(|| text[..=end].to_string())
}

/// Returns the last tag of a text, and the text after it.
fn last_tag(text: &str) -> Option<(String, &str)> {
    let tag = first_tag(&text[text.rfind('<')?..])?;
    let behind = &text[text.rfind('<')? + tag.len()..];
    Some((tag, behind))
}
