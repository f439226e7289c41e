//! `anemoe serve` of a model that recites: thoughts and calls in all APIs, several bundles, and how clients reach it.

use crate::common::*;
use crate::serve::{Server, joined};
use serde_json::{Value, json};

/// Returns a bundle that recites.
fn reciting(name: &str, template: &str, scripts: &[&[&str]]) -> Place {
    shared(name, |bundle| {
        let checkpoint = folder();
        scripted::write(&checkpoint, template, scripts);
        build(checkpoint, bundle, "--quant fp16 --no-journal");
    })
}

fn bundle() -> Place {
    reciting(
        "recites",
        scripted::TEMPLATE,
        &[
            &["@@think", "<|channel>", "thought\n", "secret thoughts\n", "<channel|>", "Four.", "<eos>"],
            &["@@tags", "<think>", "why", "</think>", "\n\n", "Because.", "<eos>"],
            &[
                "@@call",
                "<|tool_call>",
                "call:f{a:1}",
                "<tool_call|>",
                "<|tool_response>",
                "invented",
                "<eos>",
            ],
            &["@@next", "Yes.", "<eos>"],
        ],
    )
}

fn question(text: &str) -> Value {
    json!({"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 60})
}

/// Makes a question with another member.
fn with(text: &str, key: &str, value: impl Into<Value>) -> Value {
    let mut body = question(text);
    body[key] = value.into();
    body
}

fn message(answer: &Value) -> &Value {
    &answer["choices"][0]["message"]
}

/// Returns the answer and its thoughts.
fn said(answer: &Value) -> Value {
    json!([message(answer)["content"], message(answer)["reasoning_content"]])
}

/// Returns the events of a stream with names, each checked against the `type` of its data.
fn named_events(server: &Server, path: &str, body: &Value) -> Vec<Value> {
    let event = |event: String| {
        let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        data
    };
    server.streamed(path, body).into_iter().map(event).collect()
}

#[test]
fn thoughts_stand_beside_the_answer_in_every_api() {
    let server = Server::of(&bundle(), "");
    for (ask, thoughts, text) in [("@@think", "secret thoughts", "Four."), ("@@tags", "why", "Because.")] {
        let answer = server.chat(question(ask));
        assert_eq!(said(&answer), json!([text, thoughts]));
        assert!(count(&answer["usage"]["completion_tokens_details"]["reasoning_tokens"]) > 0, "{answer}");
        let events = server.stream("/v1/chat/completions", &question(ask));
        let all =
            ["content", "reasoning_content"].map(|key| joined(&events, |e| &e["choices"][0]["delta"][key]));
        assert_eq!(all, [text, thoughts]);
        // Responses.
        let body = json!({"input": ask, "temperature": 0, "max_output_tokens": 60});
        let output = &server.answer("/v1/responses", body.clone())["output"];
        for (item, kind, said) in [(&output[0], "reasoning", thoughts), (&output[1], "message", text)] {
            assert!(item["type"] == kind && item["content"][0]["text"] == said, "{output}");
        }
        let events = named_events(&server, "/v1/responses", &body);
        assert!(events.iter().enumerate().all(|(i, e)| e["sequence_number"] == i), "{events:?}");
        let last = events.last().unwrap();
        assert_eq!(last["type"], "response.completed");
        assert_eq!(last["response"]["output"][1]["content"][0]["text"], text);
        // Anthropic's messages.
        let answer = server.answer("/v1/messages", question(ask));
        let content = &answer["content"];
        has(&answer, json!({"stop_reason": "end_turn"}));
        assert!(content[0]["thinking"] == thoughts && content[1]["text"] == text, "{answer}");
        let events = named_events(&server, "/v1/messages", &question(ask));
        assert_eq!(["thinking", "text"].map(|key| joined(&events, |e| &e["delta"][key])), [thoughts, text]);
        assert_eq!(events.last().unwrap()["type"], "message_stop");
    }
    // Probabilities are those of the answer.
    let tokens = &server.chat(with("@@think", "logprobs", true))["choices"][0]["logprobs"]["content"];
    assert_eq!(list(tokens).len(), 1, "{tokens}");
    // Other places of thoughts.
    let inside = said(&server.chat(with("@@think", "reasoning_format", "none")));
    assert!(text(&inside[0]).contains("secret") && inside[1].is_null(), "{inside}");
    assert!(said(&server.chat(with("@@think", "include_reasoning", false)))[1].is_null());
    // On the way in: the template of this model shows thoughts of the last message.
    let tokens = |body: Value| count(&server.chat(body)["usage"]["prompt_tokens"]);
    let of = |key: &str| {
        let answer = json!({"role": "assistant", "content": "", key: "@@next"});
        tokens(json!({"messages": [{"role": "user", "content": "@@next"}, answer], "max_tokens": 1}))
    };
    assert!(of("reasoning") == of("reasoning_content") && of("reasoning") > of("other"));
    let effort = |effort: &str| tokens(with("@@next", "reasoning_effort", effort));
    assert_eq!(effort("high"), effort("none") + 1);
}

#[test]
fn servers_and_chats_hide_thoughts_and_do_not_keep_them() {
    let hiding = Server::of(&bundle(), "--reasoning hide");
    assert_eq!(said(&hiding.chat(question("@@think"))), json!(["Four.", null]));
    // Thoughts that the prompt opens, and an answer that has to follow a schema.
    let template = "{{ bos_token }}{{ messages[-1]['content'] }}{% if add_generation_prompt %}<think>\n{{ messages[-1]['content'] }}{% endif %}";
    let script = ["@@open", "why", "</think>", "Because.", "<|im", "_end|>", "more", "<eos>"];
    let opens = reciting("opens", template, &[&script]);
    let server = Server::of(&opens, "");
    assert_eq!(said(&server.chat(question("@@open"))), json!(["Because.<|im_end|>more", "why"]));
    let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": {"a": 1}}}});
    assert_eq!(said(&server.chat(with("@@open", "response_format", format))), json!(["{\"a\": 1}", null]));
    let ending = folder().join("ends.jinja");
    std::fs::write(&ending, format!("{template}{{# <|im_end|> #}}")).unwrap();
    let server = Server::of(&opens, &format!("--chat-template {ending}"));
    assert_eq!(said(&server.chat(question("@@open")))[0], "Because.");
    let bundle = bundle();
    let (code, out, err) = fed(&mut anemoe(format!("chat {bundle} --json")), "@@think\n@@next\n");
    assert_eq!(code, 0, "{err}");
    let talk: Value = serde_json::from_str(&out).unwrap();
    let turns = &talk["turns"];
    has(&turns[0], json!({"text": "Four.", "thoughts": "secret thoughts"}));
    assert!(turns[1]["text"] == "Yes." && talk["messages"][1]["content"] == "Four.", "{talk}");
}

#[test]
fn an_answer_ends_where_a_turn_ends() {
    let server = Server::of(&bundle(), "");
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let tool = json!([{"type": "function", "function": {"name": "f", "parameters": schema}}]);
    let mut body = with("@@call", "tools", tool);
    let answer = server.chat(body.clone());
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls", "{answer}");
    assert_eq!(message(&answer)["tool_calls"][0]["function"], json!({"name": "f", "arguments": "{\"a\":1}"}));
    assert!(!answer.to_string().contains("invented"));
    // Beside tools, a schema allows a call.
    body["response_format"] = json!({"type": "json_object"});
    assert_eq!(message(&server.chat(body))["tool_calls"][0]["function"]["name"], "f");
    let tools = json!([{"type": "function", "name": "f", "parameters": schema}]);
    let answer = server.answer("/v1/responses", json!({"input": "@@call", "temperature": 0, "tools": tools}));
    let call = &answer["output"][0];
    has(call, json!({"type": "function_call", "name": "f", "arguments": "{\"a\":1}"}));
    // The call, its result, and the next question.
    let items = json!([{"role": "user", "content": "@@call"}, call, {"type": "function_call_output", "call_id": call["call_id"], "output": "2"},
        {"role": "user", "content": "@@next"}]);
    let answer = server.answer("/v1/responses", json!({"input": items, "temperature": 0}));
    assert_eq!(answer["output"][0]["content"][0]["text"], "Yes.", "{answer}");
    let answer = server
        .answer("/v1/messages", with("@@call", "tools", json!([{"name": "f", "input_schema": schema}])));
    let call = &answer["content"][0];
    has(call, json!({"type": "tool_use", "input": {"a": 1}}));
    assert_eq!(answer["stop_reason"], "tool_use");
    let turns = json!([{"role": "user", "content": "@@call"}, {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "2"}, {"type": "text", "text": "@@next"}]}]);
    let answer = server.answer("/v1/messages", json!({"messages": turns, "max_tokens": 9, "temperature": 0}));
    assert_eq!(answer["content"][0]["text"], "Yes.", "{answer}");
    let counted = server.answer("/v1/messages/count_tokens", json!({"messages": turns}));
    let usage = &answer["usage"];
    let known = count(&usage["cache_read_input_tokens"]);
    assert_eq!(count(&counted["input_tokens"]), count(&usage["input_tokens"]) + known);
    // A template in which no question may follow a result, and ids have nine characters.
    let strict = folder().join("strict.jinja");
    let refuse = "{% for m in messages %}{% if m.role == 'user' and not loop.first and messages[loop.index0 - 1].role == 'tool' %}\
                  {{ raise_exception('roles must alternate') }}{% endif %}{% set id = (m.tool_calls or [{'id': m.tool_call_id}])[0].id %}\
                  {% if id and id|length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}{% endfor %}";
    std::fs::write(&strict, format!("{refuse}{}", scripted::TEMPLATE)).unwrap();
    let strict = Server::of(&bundle(), &format!("--chat-template {strict}"));
    let answer = strict.answer("/v1/messages", json!({"messages": turns, "max_tokens": 9, "temperature": 0}));
    assert_eq!(answer["content"][0]["text"], "Yes.", "{answer}");
    // A stop sequence is named.
    let answer = server.answer("/v1/messages", with("@@think", "stop_sequences", json!(["our"])));
    has(&answer, json!({"stop_reason": "stop_sequence", "stop_sequence": "our"}));
}

#[test]
fn several_bundles_are_opened_when_asked_for_and_closed_when_idle() {
    let (bundle, dir) = (bundle(), folder());
    let other = dir.join("other.anemoe");
    copy(&reciting("other", scripted::TEMPLATE, &[&["@@next", "No.", "<eos>"]]), &other);
    let server = Server::of(&bundle, &format!("{other} --idle 1 --max-models 1"));
    let open = || server.health("open");
    let of = &|model: &str| text(&said(&server.chat(with("@@next", "model", model)))[0]).to_string();
    assert_eq!(open(), 0);
    assert_eq!((of("b"), open()), ("Yes.".into(), 1));
    assert_eq!((of("other"), open()), ("No.".into(), 1));
    assert_eq!(of("b"), "Yes.");
    let all = server.get("/v1/models").1;
    assert!(all.contains("\"b\"") && all.contains("\"other\""), "{all}");
    assert_eq!(server.post("/v1/chat/completions", &question("@@next")).0, 400);
    let (status, answer) = server.post("/v1/chat/completions", &with("@@next", "model", "third"));
    assert_eq!((status, &answer["error"]["code"]), (404, &json!("model_not_found")), "{answer}");
    // Each waits for the other to be closed.
    std::thread::scope(|scope| {
        for i in 0..8 {
            let (model, answer) = [("b", "Yes."), ("other", "No.")][i % 2];
            scope.spawn(move || (0..3).for_each(|_| assert_eq!(of(model), answer)));
        }
    });
    wait_for("end of idle models", || open() == 0);
    assert_eq!(of("other"), "No.");
}

#[test]
fn clients_reach_the_server_as_they_expect() {
    let server = Server::of(&bundle(), "--allow-host my.server");
    let ask = |method: &str, path: &str, host: &str| {
        let request = format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        let answer = server.raw(request.as_bytes());
        (answer.split(' ').nth(1).unwrap().parse::<u16>().unwrap(), answer)
    };
    for (path, host, status) in [
        ("/health", "localhost", 200),
        ("/health", "my.server", 200),
        ("/health", "evil.example", 403),
        ("/v1/models/", "localhost", 200),
        ("/v1/models/%ff%fe", "localhost", 404),
    ] {
        let (got, answer) = ask("GET", path, host);
        assert_eq!(got, status, "{path} {host}: {answer}");
        assert!(status == 200 || answer.contains("\"error\""), "{answer}");
    }
    let (status, answer) = ask("HEAD", "/health", "localhost");
    assert!(status == 200 && answer.ends_with("\r\n\r\n"), "{answer}");
    // Many small objects take more memory than their text.
    let many = format!("{{\"messages\": [{}0]}}", "{\"\":0},".repeat(400_000));
    for (path, headers, body, status, says) in [
        ("/v1/chat/completions", "content-encoding: gzip\r\n", "x", 415, "gzip"),
        ("/v1/messages", "", "{}", 400, "\"type\":\"error\""),
        ("/v1/chat/completions", "", &many, 400, "too many values"),
        ("/v1/chat/completions/", "", &question("@@next").to_string(), 200, ""),
    ] {
        let (found, _, text) = server.ask("POST", path, headers, body);
        assert!(found == status && text.contains(says), "{path}: {text}");
    }
}

#[test]
fn many_streams_of_all_kinds_do_not_mix() {
    let server = Server::of(&bundle(), "");
    let tool = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    let schema = json!({"type": "object", "required": ["a"], "properties": {"a": {"enum": ["Yes."]}}, "additionalProperties": false});
    let ask = |kind: usize| match kind % 4 {
        0 => {
            let events = server.stream("/v1/chat/completions", &question("@@think"));
            assert_eq!(joined(&events, |e| &e["choices"][0]["delta"]["content"]), "Four.");
        }
        1 => {
            let answer = server.chat(with("@@call", "tools", tool.clone()));
            assert_eq!(message(&answer)["tool_calls"][0]["function"]["name"], "f");
        }
        2 => {
            let events = named_events(&server, "/v1/messages", &question("@@tags"));
            assert_eq!(joined(&events, |e| &e["delta"]["text"]), "Because.");
        }
        _ => {
            let format = json!({"type": "json_object", "schema": schema});
            let answer = server.chat(with("@@next", "response_format", format));
            assert_eq!(said(&answer)[0], "{\"a\": \"Yes.\"}");
        }
    };
    std::thread::scope(|scope| {
        for stream in 0..32 {
            let ask = &ask;
            scope.spawn(move || (0..4).for_each(|turn| ask(stream + turn)));
        }
    });
}
