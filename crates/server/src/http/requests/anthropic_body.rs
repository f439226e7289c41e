//! The body of Anthropic's `/v1/messages`, as one of `/v1/chat/completions`.

use super::chat_body::{Body, OneOrMoreTexts};
use super::template_messages::note_of_part;
use crate::http::api_error::ApiError;
use anemoe_text::chat::ChatTemplate;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// First line of Claude Code's system prompt. It differs in each request, so that no prefix would be known.
const BILLING: &str = "x-anthropic-billing-header:";

#[derive(Default, Deserialize)]
#[serde(default, expecting = "an object")]
struct OutputConfig {
    format: Option<Value>,
    effort: Option<String>,
}

/// Fields of the API that have an effect.
#[derive(Default, Deserialize)]
#[serde(default, expecting = "an object")]
pub struct AnthropicBody {
    model: Option<String>,
    messages: Option<Vec<Value>>,
    system: Option<Value>,
    max_tokens: Option<i64>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    thinking: Option<Value>,
    output_config: Option<OutputConfig>,
    output_format: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
}

/// Translates a body.
///
/// # Errors
/// A block is of a kind that this server does not have.
pub fn body(from: AnthropicBody) -> Result<Body, ApiError> {
    let all = from.messages.ok_or_else(|| ApiError::param("messages", "it is missing"))?;
    let mut messages = Vec::new();
    if let Some(system) = from.system.filter(|system| !system.is_null()) {
        let text = system_text(&system).map_err(|what| ApiError::param("system", what))?;
        if !text.is_empty() {
            messages.push(json!({"role": "system", "content": text}));
        }
    }
    for (i, message) in all.iter().enumerate() {
        let wrong = |what: String| ApiError::param("messages", format!("message {i}: {what}"));
        add(message, &mut messages).map_err(wrong)?;
    }
    let last = messages.last().filter(|message| message["role"] == "assistant");
    if last.is_some_and(|last| last["content"] == "" || !last["tool_calls"].is_null()) {
        return Err(ApiError::param(
            "messages",
            "the last one is the assistant's and has no text at its end",
        ));
    }
    let continues = last.is_some();
    let (tool_choice, parallel_tool_calls) =
        from.tool_choice.map(tool_choice).transpose()?.unwrap_or_default();
    let thinking = match &from.thinking {
        None | Some(Value::Null) => None,
        Some(thinking) => match thinking.get("type").and_then(Value::as_str) {
            Some("enabled" | "adaptive") => Some(true),
            Some("disabled") => Some(false),
            _ => return Err(ApiError::param("thinking", "type is not enabled, adaptive or disabled")),
        },
    };
    // What the model does without being told is the template's own.
    let mut variables: Map<String, Value> = thinking.into_iter().flat_map(ChatTemplate::thinking).collect();
    variables.extend(from.chat_template_kwargs.unwrap_or_default());
    let is_omitted = from.thinking.is_some_and(|thinking| thinking["display"] == "omitted");
    let config = from.output_config.unwrap_or_default();
    let format = config.format.or(from.output_format).filter(|format| !format.is_null());
    Ok(Body {
        model: from.model,
        messages: Some(messages),
        continues,
        tools: from.tools.map(|tools| tools.iter().map(tool).collect()),
        tool_choice,
        parallel_tool_calls,
        chat_template_kwargs: Some(variables),
        reasoning_effort: config.effort,
        include_reasoning: is_omitted.then_some(false),
        max_completion_tokens: from.max_tokens,
        stop: from.stop_sequences.map(OneOrMoreTexts::Several),
        stream: from.stream,
        response_format: format.map(|format| json!({"type": format["type"], "json_schema": format})),
        ..Body::default()
    })
}

/// Adds a message; those of one role that follow each other are one turn.
fn push(message: Value, messages: &mut Vec<Value>) {
    let last = messages.last_mut().filter(|last| last["role"] == message["role"] && last["role"] != "tool");
    let (Some(last), Value::Object(message)) = (last, &message) else { return messages.push(message) };
    for (key, more) in message.iter().filter(|(key, _)| *key != "role") {
        match (&mut last[key], more) {
            (Value::Array(all), Value::Array(more)) => all.extend_from_slice(more),
            (Value::String(text), Value::String(more)) if !text.is_empty() => {
                *text += if more.is_empty() { "" } else { "\n\n" };
                *text += more;
            }
            (old, more) => *old = more.clone(),
        }
    }
}

/// Adds the messages that one of Anthropic's stands for: results of tools are messages of their own.
fn add(message: &Value, messages: &mut Vec<Value>) -> Result<(), String> {
    let role = message.get("role").and_then(Value::as_str).ok_or("`role` is missing")?;
    if !["user", "assistant", "system"].contains(&role) {
        return Err(format!("there is no role `{}`; roles are user and assistant", role.escape_debug()));
    }
    let blocks = match message.get("content") {
        Some(Value::String(text)) => {
            push(json!({"role": role, "content": text}), messages);
            return Ok(());
        }
        Some(Value::Array(blocks)) => blocks,
        _ => return Err("`content` is neither a text nor a list of blocks".into()),
    };
    let (mut text, mut thoughts, mut calls) = (None::<String>, None::<String>, Vec::new());
    for block in blocks {
        let kind = block.get("type").and_then(Value::as_str).unwrap_or("?");
        let field = |key: &str| {
            block.get(key).and_then(Value::as_str).ok_or(format!("a block `{kind}` has no `{key}`"))
        };
        match (kind, role) {
            ("text", _) => *text.get_or_insert_default() += field("text")?,
            ("document" | "search_result", "user") => {
                *text.get_or_insert_default() += &text_of_source(kind, block)?;
            }
            ("thinking", "assistant") => *thoughts.get_or_insert_default() += field("thinking")?,
            ("redacted_thinking", "assistant") => {}
            ("tool_use", "assistant") => {
                let function =
                    json!({"name": field("name")?, "arguments": block.get("input").unwrap_or(&json!({}))});
                calls.push(json!({"id": field("id")?, "type": "function", "function": function}));
            }
            ("tool_result", "user") => {
                let content = block.get("content").filter(|content| !content.is_null());
                let mut content = content.map_or(Ok(String::new()), |content| texts(content, true))?;
                if content.is_empty() && block["is_error"] == true {
                    content.push_str("error");
                }
                messages
                    .push(json!({"role": "tool", "tool_call_id": field("tool_use_id")?, "content": content}));
            }
            _ => return Err(format!("a block of type `{}` is not supported here", kind.escape_debug())),
        }
    }
    if role == "assistant" {
        let mut answer = Map::from_iter([
            ("role".to_string(), role.into()),
            ("content".to_string(), text.unwrap_or_default().into()),
        ]);
        answer.extend(thoughts.map(|thoughts| ("reasoning_content".to_string(), thoughts.into())));
        if !calls.is_empty() {
            answer.insert("tool_calls".into(), calls.into());
        }
        push(answer.into(), messages);
    } else if let Some(text) = text {
        push(json!({"role": role, "content": text}), messages);
    }
    Ok(())
}

/// Returns the system prompt without the line that differs in each request.
fn system_text(system: &Value) -> Result<String, String> {
    let blocks = system.as_array().map_or(std::slice::from_ref(system), Vec::as_slice);
    let text = |block: &Value| {
        let text = if block.is_object() { texts(&json!([block]), false)? } else { texts(block, false)? };
        let behind =
            text.strip_prefix(BILLING).map(|line| line.split_once('\n').map_or("", |(_, rest)| rest));
        Ok(behind.map_or(text.clone(), str::to_string))
    };
    blocks.iter().map(text).collect()
}

/// Returns the text of a content: a text, or blocks of texts. A result of a tool may have other blocks.
fn texts(content: &Value, is_result: bool) -> Result<String, String> {
    let text = |block: &Value| match (block["type"].as_str(), block["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text.to_string()),
        (Some(kind @ ("document" | "search_result")), _) if is_result => {
            Ok(text_of_source(kind, block).unwrap_or_else(|_| note_of_part(kind)))
        }
        (Some(kind), _) if is_result && kind != "text" => Ok(note_of_part(kind)),
        _ => Err("a block is not of type `text`".to_string()),
    };
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => blocks.iter().map(text).collect(),
        _ => Err("neither a text nor a list of blocks".into()),
    }
}

/// Returns the text of a document or a search result, below its title and what else describes it.
fn text_of_source(kind: &str, block: &Value) -> Result<String, String> {
    let source = &block["source"];
    let (about, text) = match (kind, source["type"].as_str()) {
        ("search_result", _) => (source, texts(&block["content"], false)?),
        (_, Some("text")) => {
            let text = source["data"].as_str().ok_or("the source of a `document` has no `data`")?;
            (&block["context"], text.to_string())
        }
        (_, Some("content")) => (&block["context"], texts(&source["content"], false)?),
        (_, other) => {
            let other = other.unwrap_or("?").escape_debug();
            return Err(format!("a `document` of type `{other}` is not supported, text is"));
        }
    };
    let parts = [block["title"].as_str(), about.as_str(), Some(text.as_str())];
    let parts: Vec<&str> = parts.into_iter().flatten().filter(|part| !part.is_empty()).collect();
    Ok(parts.join("\n") + "\n\n")
}

/// Returns OpenAI's tool; one that runs at Anthropic keeps its type.
fn tool(tool: &Value) -> Value {
    if let Some(kind) = tool.get("type").and_then(Value::as_str).filter(|kind| *kind != "custom") {
        return json!({"type": kind});
    }
    let mut function = json!({"name": tool["name"], "parameters": tool["input_schema"]});
    if tool["description"].is_string() {
        function["description"] = tool["description"].clone();
    }
    json!({"type": "function", "function": function})
}

/// Checks a choice of tools, and tells whether several calls may follow each other.
fn tool_choice(choice: Value) -> Result<(Option<Value>, Option<bool>), ApiError> {
    let several = choice.get("disable_parallel_tool_use").and_then(Value::as_bool).map(|no| !no);
    let kind = choice.as_str().or_else(|| choice.get("type")?.as_str());
    match (kind, choice.get("name")) {
        (Some("auto" | "none" | "any"), _) | (Some("tool"), Some(Value::String(_))) => {
            Ok((Some(choice), several))
        }
        _ => Err(ApiError::param("tool_choice", "type is not auto, any, none, or tool with a name")),
    }
}

#[cfg(test)]
mod tests {
    use crate::http::api::Api;
    use crate::http::requests::parse;
    use serde_json::{Value, json};

    fn messages(all: Value) -> Result<Value, String> {
        let body = json!({"messages": all, "max_tokens": 5, "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]});
        let body = parse(Api::Messages, body.to_string().as_bytes()).map_err(|e| e.message)?;
        Ok(body.messages.unwrap_or_default().into())
    }

    #[test]
    fn blocks_become_messages() {
        let got = messages(json!([
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "so", "signature": ""}, {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}, {"type": "image", "source": {}}]},
                {"type": "text", "text": "and"}]},
        ]));
        let got = got.unwrap();
        let roles: Vec<&str> = got.as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "user"]);
        assert_eq!((&got[2]["reasoning_content"], &got[2]["content"]), (&json!("so"), &json!("a")));
        assert_eq!(got[2]["tool_calls"][0]["function"]["arguments"], json!({"a": 1}));
        assert_eq!(
            (&got[3]["content"], &got[4]["content"]),
            (&json!("r[image, which this model cannot read]"), &json!("and"))
        );
    }

    #[test]
    fn a_result_without_text_says_that_a_tool_failed() {
        for (content, is_error, says) in [
            (json!(""), true, "error"),
            (json!([]), true, "error"),
            (json!(null), true, "error"),
            (json!("r"), true, "r"),
            (json!(""), false, ""),
        ] {
            let result =
                json!({"type": "tool_result", "tool_use_id": "1", "content": content, "is_error": is_error});
            let got = messages(json!([{"role": "user", "content": [result]}])).unwrap();
            assert_eq!(got[1]["content"], says, "{content}");
        }
    }

    #[test]
    fn turns_of_one_role_are_one_and_what_says_nothing_is_left_out() {
        let call = |id: &str| json!({"type": "tool_use", "id": id, "name": "f", "input": null});
        let got = messages(json!([
            {"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [call("1")]}, {"role": "assistant", "content": [{"type": "text", "text": "c"}, call("2")]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": null}]},
            {"role": "user", "content": "d"},
        ]));
        let got = got.unwrap();
        let contents: Vec<&Value> = got.as_array().unwrap().iter().map(|m| &m["content"]).collect();
        assert_eq!(contents, ["s", "a\n\nb", "c", "", "d"]);
        assert_eq!(got[2]["tool_calls"].as_array().unwrap().len(), 2);
        let bill =
            |n: usize| json!({"type": "text", "text": format!("x-anthropic-billing-header: cch={n};")});
        let text = json!({"type": "text", "text": "s"});
        for (system, left) in [
            (json!(""), None),
            (json!([]), None),
            (json!([bill(1), text]), Some("s")),
            (json!("x-anthropic-billing-header: cch=2;\ns"), Some("s")),
        ] {
            let body = json!({"messages": [], "system": system, "tools": [{"name": "f"}]});
            let body = parse(Api::Messages, body.to_string().as_bytes()).unwrap();
            let messages = body.messages.unwrap();
            assert_eq!(messages.first().map(|message| message["content"].as_str().unwrap()), left);
            assert_eq!(body.tools.unwrap()[0]["function"].get("description"), None);
        }
    }

    #[test]
    fn documents_and_search_results_are_texts_below_their_titles() {
        let plain = json!({"type": "text", "media_type": "text/plain", "data": "d"});
        let document = |source: &Value| json!({"type": "document", "source": source, "title": "T", "context": null, "citations": {"enabled": true}});
        let blocks = json!({"type": "content", "content": [{"type": "text", "text": "c"}]});
        let found = json!({"type": "search_result", "source": "https://x", "title": "S", "content": [{"type": "text", "text": "r"}]});
        let pdf = document(&json!({"type": "base64", "media_type": "application/pdf", "data": "x"}));
        let user = |content: Value| messages(json!([{"role": "user", "content": content}]));
        let got = user(json!([document(&plain), document(&blocks), found, {"type": "text", "text": "q"}]));
        assert_eq!(got.unwrap()[1]["content"], "T\nd\n\nT\nc\n\nS\nhttps://x\nr\n\nq");
        let result = json!({"type": "tool_result", "tool_use_id": "1", "content": [found, pdf]});
        let got = user(json!([result])).unwrap();
        assert_eq!(got[1]["content"], "S\nhttps://x\nr\n\n[document, which this model cannot read]");
        let says = user(json!([pdf])).unwrap_err();
        assert!(says.contains("a `document` of type `base64` is not supported"), "{says}");
    }

    #[test]
    fn an_answer_continues_the_text_of_the_assistant() {
        let parsed = |content: Value| {
            let messages =
                json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]);
            let body = json!({"messages": messages, "max_tokens": 5}).to_string();
            parse(Api::Messages, body.as_bytes()).map(|body| body.continues)
        };
        assert_eq!(parsed(json!("a")), Ok(true));
        let call = json!({"type": "tool_use", "id": "1", "name": "f", "input": {}});
        for content in [json!(""), json!([{"type": "text", "text": "a"}, call])] {
            assert!(parsed(content).unwrap_err().message.contains("no text at its end"));
        }
    }

    #[test]
    fn blocks_of_other_kinds_are_refused_by_name() {
        for (content, named) in [
            (json!([{"type": "image", "source": {}}]), "image"),
            (json!([{"type": "tool_use", "id": "1", "name": "f"}]), "tool_use"),
            (json!([{"type": "text"}]), "text"),
            (json!(3), "content"),
        ] {
            let e = messages(json!([{"role": "user", "content": content}])).unwrap_err();
            assert!(e.contains(named), "{e}");
        }
    }
}
