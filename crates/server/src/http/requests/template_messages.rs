//! Messages of a request in the form that chat templates read.

use super::lone_surrogates::without_lone_surrogates;
use crate::http::api_error::ApiError;
use serde_json::{Map, Value, json};

const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// Converts messages to the form of templates: contents as one text, arguments of calls as objects, thoughts under
/// `thought_key`, the template's own name for them; left out where it has none.
///
/// # Errors
/// A message has no role or content of the API, or holds something else than text.
pub fn template_messages(messages: &[Value], thought_key: Option<&str>) -> Result<Vec<Value>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::param("messages", "at least one message is needed"));
    }
    let convert = |(i, message): (usize, &Value)| {
        let wrong = |what| ApiError::param("messages", format!("message {i}: {what}"));
        template_message(message, thought_key).map_err(wrong)
    };
    messages.iter().enumerate().map(convert).collect()
}

fn template_message(message: &Value, thought_key: Option<&str>) -> Result<Value, String> {
    let message = message.as_object().ok_or("not an object")?;
    let role = message.get("role").and_then(Value::as_str).ok_or("`role` is missing")?;
    if !ROLES.contains(&role) {
        return Err(format!("there is no role `{}`; roles are {}", role.escape_debug(), ROLES.join(", ")));
    }
    let role = match role {
        "developer" => "system",
        // Templates know results of tools alone, and calls of several tools alone.
        "function" => "tool",
        role => role,
    };
    let one = message.get("function_call").filter(|call| !call.is_null());
    let one = one.map(|call| json!([{"type": "function", "function": call}]));
    // Clients write an empty list where there are no calls; templates take any list for calls.
    let calls = message.get("tool_calls").filter(|calls| !calls.is_null() && **calls != json!([]));
    let calls = calls.or(one.as_ref());
    let thoughts = ["reasoning_content", "reasoning"].iter().find_map(|key| message.get(*key)?.as_str());
    let content = match message.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => text_of_parts(parts, role == "tool")?,
        None | Some(Value::Null) if role == "assistant" && (calls.is_some() || thoughts.is_some()) => {
            String::new()
        }
        // An answer of thoughts alone, and a tool without a result.
        Some(Value::Null) if ["assistant", "tool"].contains(&role) => String::new(),
        _ => return Err("`content` is not a text".into()),
    };
    let mut out = Map::new();
    out.insert("role".into(), role.into());
    out.insert("content".into(), content.into());
    for key in ["name", "tool_call_id"] {
        if let Some(value) = message.get(key).filter(|v| v.is_string()) {
            out.insert(key.into(), value.clone());
        }
    }
    if let (Some(key), Some(thoughts)) = (thought_key, thoughts) {
        out.insert(key.into(), thoughts.into());
    }
    if let Some(calls) = calls {
        let mut calls = calls.clone();
        for call in calls.as_array_mut().ok_or("`tool_calls` is not a list")? {
            let function = call.get_mut("function").and_then(Value::as_object_mut);
            let function = function.filter(|function| function.get("name").is_some_and(Value::is_string));
            let arguments =
                function.ok_or("a tool call has no `function.name`")?.entry("arguments").or_insert(json!({}));
            let read = match arguments {
                Value::Null => Some(Map::new().into()),
                Value::String(text) if text.trim().is_empty() => Some(Map::new().into()),
                Value::String(text) => {
                    anemoe_io::json::parse::<Value>(&without_lone_surrogates(text.as_bytes())).ok()
                }
                _ => None,
            };
            read.into_iter().for_each(|read| *arguments = read);
        }
        out.insert("tool_calls".into(), calls);
    }
    Ok(out.into())
}

/// Returns what stands for a part of a tool's result that is no text. An agent could not go on without its results.
pub(super) fn note_of_part(kind: &str) -> String {
    format!("[{kind}, which this model cannot read]")
}

/// Returns the text of a content's parts. Those of a result of a tool may be something else.
fn text_of_parts(parts: &[Value], is_result: bool) -> Result<String, String> {
    let mut text = String::new();
    for part in parts {
        let kind = part.get("type").and_then(Value::as_str);
        let key = if kind == Some("refusal") { "refusal" } else { "text" };
        match (part, kind, part.get(key).and_then(Value::as_str)) {
            // Frameworks of agents nest lists, or leave out what is around a text.
            (Value::String(part), ..) => text += part,
            (Value::Array(parts), ..) => text += &text_of_parts(parts, is_result)?,
            (_, Some("text" | "input_text" | "output_text" | "refusal"), Some(part)) => text += part,
            (_, Some(kind), _) if is_result && kind != "text" => text += &note_of_part(kind),
            (_, kind, _) => {
                return Err(format!("content of type `{}` is not supported, text is", kind.unwrap_or("?")));
            }
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_become_what_templates_read() {
        let call =
            json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
        let messages = [
            json!({"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
            json!({"role": "assistant", "content": null, "tool_calls": [call], "reasoning": "so"}),
            json!({"role": "tool", "content": "r", "tool_call_id": "1", "other": 1}),
            json!({"role": "assistant", "reasoning_content": "so"}),
        ];
        let all = template_messages(&messages, Some("thinking")).unwrap();
        assert_eq!(all[0], json!({"role": "system", "content": "ab"}));
        assert_eq!(all[1]["tool_calls"][0]["function"]["arguments"], json!({"a": 1}));
        assert_eq!(all[1]["thinking"], "so");
        assert_eq!(all[2], json!({"role": "tool", "content": "r", "tool_call_id": "1"}));
        assert_eq!(
            template_messages(&messages, None).unwrap()[3],
            json!({"role": "assistant", "content": ""})
        );
        for function in [
            json!({"name": "f", "arguments": null}),
            json!({"name": "f", "arguments": ""}),
            json!({"name": "f"}),
        ] {
            let call = json!({"id": "1", "function": function});
            let message = json!({"role": "assistant", "content": "", "tool_calls": [call]});
            let got = template_messages(&[message], None).unwrap();
            assert_eq!(got[0]["tool_calls"][0]["function"]["arguments"], json!({}));
        }
        for empty in [
            json!({"role": "assistant", "content": null, "tool_calls": []}),
            json!({"role": "tool", "content": null, "tool_calls": null}),
        ] {
            let got = template_messages(std::slice::from_ref(&empty), None).unwrap();
            assert_eq!(got, [json!({"role": empty["role"], "content": ""})]);
        }
        let old = [
            json!({"role": "assistant", "content": null, "function_call": {"name": "f", "arguments": "{\"a\": \"\\ud83d\"}"}}),
            json!({"role": "function", "name": "f", "content": "r"}),
        ];
        let got = template_messages(&old, None).unwrap();
        let function = json!({"name": "f", "arguments": {"a": "\u{fffd}"}});
        assert_eq!(got[0]["tool_calls"], json!([{"type": "function", "function": function}]));
        assert_eq!(got[1], json!({"role": "tool", "content": "r", "name": "f"}));
        let part = json!({"type": "text", "text": "c"});
        let picture = json!({"type": "image_url", "image_url": {"url": "x"}});
        let nested =
            json!({"role": "tool", "content": ["a", [{"type": "text", "text": "b"}, [part]], picture]});
        let read = template_messages(&[nested], None).unwrap();
        assert_eq!(read[0]["content"], "abc[image_url, which this model cannot read]");
        for wrong in [
            json!({"role": "wizard", "content": "x"}),
            json!({"content": "x"}),
            json!({"role": "user"}),
            json!({"role": "user", "content": null}),
            json!({"role": "user", "content": 3}),
            json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
            json!({"role": "assistant", "content": "", "tool_calls": [{}]}),
            json!("text"),
        ] {
            let e = template_messages(std::slice::from_ref(&wrong), None).unwrap_err();
            assert_eq!(e.param.as_deref(), Some("messages"), "{wrong}");
        }
        assert!(template_messages(&[], None).is_err());
    }
}
