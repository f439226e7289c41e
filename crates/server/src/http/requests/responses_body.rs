//! The body of `/v1/responses`, as one of `/v1/chat/completions`.

use super::chat_body::Body;
use crate::http::api_error::ApiError;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Keys that the answer repeats.
const REPEATED: &str = "instructions max_output_tokens metadata parallel_tool_calls reasoning temperature text \
                        tool_choice tools top_logprobs top_p user";
/// Types of a choice of tools that are read.
const CHOICES: [&str; 7] = ["function", "allowed_tools", "auto", "none", "any", "required", "tool"];
/// Entry of `include` that asks for probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";

#[derive(Default, Deserialize)]
#[serde(default, expecting = "an object")]
struct Reasoning {
    effort: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default, expecting = "an object")]
struct TextOptions {
    format: Option<Value>,
}

/// Fields of the API that have an effect.
#[derive(Default, Deserialize)]
#[serde(default, expecting = "an object")]
pub struct ResponsesBody {
    model: Option<String>,
    input: Option<Value>,
    instructions: Option<String>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    max_output_tokens: Option<i64>,
    top_logprobs: Option<u64>,
    include: Option<Vec<String>>,
    text: Option<TextOptions>,
    reasoning: Option<Reasoning>,
    stream: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
    /// All other fields.
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Translates a body.
///
/// # Errors
/// An item is of a kind that this server does not have.
pub fn body(from: ResponsesBody) -> Result<Body, ApiError> {
    let mut repeated = from.others.clone();
    repeated.retain(|key, _| REPEATED.split(' ').any(|repeated| repeated == key));
    let wants_logprobs = from.include.is_some_and(|all| all.iter().any(|entry| entry == LOGPROBS));
    let format = from.text.and_then(|text| text.format);
    for (key, value) in [
        ("instructions", json!(from.instructions)),
        ("tools", json!(from.tools)),
        ("tool_choice", json!(from.tool_choice)),
        ("text", json!({"format": format.clone().unwrap_or(json!({"type": "text"}))})),
        ("max_output_tokens", json!(from.max_output_tokens)),
        ("parallel_tool_calls", json!(from.parallel_tool_calls.unwrap_or(true))),
        (
            "reasoning",
            json!({"effort": from.reasoning.as_ref().and_then(|r| r.effort.clone()), "summary": null}),
        ),
    ] {
        repeated.insert(key.into(), value);
    }
    let mut messages = Vec::new();
    messages.extend(from.instructions.map(|text| json!({"role": "system", "content": text})));
    match from.input {
        None | Some(Value::Null) => return Err(ApiError::param("input", "it is missing")),
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) if items.is_empty() => {
            return Err(ApiError::param("input", "it has no items"));
        }
        Some(Value::Array(items)) => {
            let mut conversation = Conversation { messages, answer: None };
            for (i, item) in items.into_iter().enumerate() {
                let wrong = |what: String| ApiError::param("input", format!("item {i}: {what}"));
                conversation.add(item).map_err(wrong)?;
            }
            messages = conversation.finish();
        }
        Some(_) => return Err(ApiError::param("input", "neither a text nor a list of items")),
    }
    Ok(Body {
        model: from.model,
        messages: Some(messages),
        tools: from.tools.map(|tools| tools.iter().map(tool).collect()),
        tool_choice: from.tool_choice.map(tool_choice).transpose()?,
        parallel_tool_calls: from.parallel_tool_calls,
        reasoning_effort: from.reasoning.and_then(|r| r.effort),
        max_completion_tokens: from.max_output_tokens,
        stream: from.stream,
        chat_template_kwargs: from.chat_template_kwargs,
        logprobs: (wants_logprobs || from.top_logprobs.is_some_and(|n| n > 0)).then_some(true.into()),
        top_logprobs: from.top_logprobs,
        response_format: format.map(response_format),
        repeated,
        ..Body::default()
    })
}

/// Messages made of items. Thoughts, calls and text of one answer become one message.
struct Conversation {
    messages: Vec<Value>,
    /// Answer to which the next items may belong.
    answer: Option<Map<String, Value>>,
}

impl Conversation {
    fn add(&mut self, mut item: Value) -> Result<(), String> {
        let kind = item.get("type").and_then(Value::as_str).unwrap_or("message").to_string();
        let text = |key: &str| {
            item.get(key).and_then(Value::as_str).map(str::to_string).ok_or(format!("`{key}` is missing"))
        };
        match kind.as_str() {
            "message" if item.get("role").is_some_and(|role| role == "assistant") => {
                let content = item.get_mut("content").map(Value::take).unwrap_or_default();
                let mut answer = match self.answer.take() {
                    Some(open) if !open.contains_key("content") && !open.contains_key("tool_calls") => open,
                    open => {
                        self.messages.extend(open.map(Value::from));
                        Map::new()
                    }
                };
                answer.insert("content".into(), content);
                self.answer = Some(answer);
            }
            "message" => {
                self.close();
                self.messages.push(json!({"role": item["role"], "content": item["content"]}));
            }
            "reasoning" => {
                let parts = ["content", "summary"].into_iter().filter_map(|key| item.get(key)?.as_array());
                let parts = parts.flatten().filter_map(|part| part.get("text")?.as_str());
                let thoughts = parts.collect::<Vec<_>>().join("\n");
                self.close();
                self.answer = Some(Map::from_iter([("reasoning_content".to_string(), thoughts.into())]));
            }
            "function_call" => {
                let function = json!({"name": text("name")?, "arguments": text("arguments")?});
                let call = json!({"id": text("call_id")?, "type": "function", "function": function});
                let answer = self.answer.get_or_insert_default();
                match answer.entry("tool_calls").or_insert(json!([])) {
                    Value::Array(calls) => calls.push(call),
                    _ => return Err("calls are no list".into()),
                }
            }
            "function_call_output" => {
                let id = text("call_id")?;
                self.close();
                self.messages.push(json!({"role": "tool", "tool_call_id": id, "content": item["output"]}));
            }
            "item_reference" => return Err("this server keeps no items; send the item itself".into()),
            other => return Err(format!("items of type `{}` are not supported", other.escape_debug())),
        }
        Ok(())
    }

    fn close(&mut self) {
        if let Some(mut answer) = self.answer.take() {
            answer.insert("role".into(), "assistant".into());
            self.messages.push(answer.into());
        }
    }

    fn finish(mut self) -> Vec<Value> {
        self.close();
        self.messages
    }
}

/// Returns OpenAI's tool of chats; one that is no function stays as it is.
fn tool(tool: &Value) -> Value {
    let mut function = match tool.as_object() {
        Some(function) if function.get("type").is_some_and(|kind| kind == "function") => function.clone(),
        _ => return tool.clone(),
    };
    function.retain(|key, _| ["name", "description", "parameters"].contains(&key.as_str()));
    json!({"type": "function", "function": function})
}

fn tool_choice(choice: Value) -> Result<Value, ApiError> {
    match choice.get("type").and_then(Value::as_str) {
        Some(kind) if !CHOICES.contains(&kind) => {
            let what = format!("type `{}` is not supported", kind.escape_debug());
            Err(ApiError::param("tool_choice", what))
        }
        _ => Ok(choice),
    }
}

/// Translates `text.format`, whose schema stands beside its type.
fn response_format(format: Value) -> Value {
    match format.get("type") {
        Some(kind) if kind == "json_schema" => json!({"type": kind, "json_schema": format}),
        _ => format,
    }
}

#[cfg(test)]
mod tests {
    use crate::http::api::Api;
    use crate::http::requests::parse;
    use serde_json::{Value, json};

    fn messages(input: Value) -> Result<Value, String> {
        let body = json!({"input": input, "instructions": "i"});
        let body = parse(Api::Responses, body.to_string().as_bytes()).map_err(|e| e.message)?;
        Ok(body.messages.unwrap_or_default().into())
    }

    #[test]
    fn items_of_one_answer_become_one_message() {
        let call = |id: &str| json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"});
        let got = messages(json!([
            {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
            call("1"), call("2"),
            {"type": "function_call_output", "call_id": "1", "output": "r"},
            {"type": "function_call_output", "call_id": "2", "output": "s"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        ]));
        let got = got.unwrap();
        let roles: Vec<&str> = got.as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "tool", "assistant"]);
        assert_eq!(
            (&got[2]["reasoning_content"], got[2]["tool_calls"].as_array().unwrap().len()),
            (&json!("so"), 2)
        );
        assert_eq!(got[4]["tool_call_id"], "2");
        assert_eq!(messages(json!("q")).unwrap()[1], json!({"role": "user", "content": "q"}));
    }

    #[test]
    fn items_of_other_kinds_are_refused_by_name() {
        for (input, named) in [
            (json!([{"type": "item_reference", "id": "x"}]), "keeps no items"),
            (json!([{"type": "computer_call"}]), "computer_call"),
            (json!([{"type": "function_call", "name": "f"}]), "arguments"),
            (json!(3), "neither"),
            (json!(null), "missing"),
            (json!([]), "no items"),
        ] {
            let e = messages(input).unwrap_err();
            assert!(e.contains(named), "{e}");
        }
    }
}
