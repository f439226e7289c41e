//! `anemoe serve` of a model that recites: thoughts and calls in all APIs, several bundles, and how clients reach it.

use crate::common::{anemoe, build, finish, scripted};
use crate::serve::Server;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Returns a bundle that recites, built once.
fn bundle() -> &'static Path {
    static BUNDLE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = BUNDLE.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("recites.anemoe");
        scripted::write(
            &dir.path().join("checkpoint"),
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
        );
        build(&dir.path().join("checkpoint"), &path, &["--quant", "fp16", "--no-journal"]);
        (dir, path)
    });
    path
}

fn question(text: &str) -> Value {
    json!({"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 60})
}

fn message(answer: &Value) -> &Value {
    &answer["choices"][0]["message"]
}

/// Returns the events of a stream with names, each checked against the `type` of its data.
fn named_events(server: &Server, path: &str, body: &Value) -> Vec<Value> {
    let (status, head, text) = server.ask("POST", path, "", &body.to_string());
    assert!(status == 200 && head.contains("text/event-stream"), "{head}{text}");
    let event = |event: &str| {
        let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        data
    };
    text.split("\n\n").filter(|e| !e.is_empty()).map(event).collect()
}

#[test]
fn thoughts_stand_beside_the_answer_in_every_api() {
    let server = Server::of(bundle(), &[]);
    for (ask, thoughts, text) in [("@@think", "secret thoughts", "Four."), ("@@tags", "why", "Because.")] {
        let answer = server.chat(question(ask));
        assert_eq!(
            (&message(&answer)["content"], &message(&answer)["reasoning_content"]),
            (&json!(text), &json!(thoughts))
        );
        assert!(
            answer["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 0,
            "{answer}"
        );
        let mut streamed = question(ask);
        streamed["stream"] = true.into();
        let events = server.stream("/v1/chat/completions", &streamed);
        let all = |key: &str| -> String {
            events.iter().filter_map(|e| e["choices"][0]["delta"][key].as_str()).collect()
        };
        assert_eq!((all("reasoning_content").as_str(), all("content").as_str()), (thoughts, text));
        // Responses.
        let mut body = json!({"input": ask, "temperature": 0, "max_output_tokens": 60});
        let (status, answer) = server.post("/v1/responses", &body);
        assert_eq!(status, 200, "{answer}");
        assert_eq!(
            (&answer["output"][0]["type"], &answer["output"][1]["type"]),
            (&json!("reasoning"), &json!("message"))
        );
        assert_eq!(answer["output"][0]["content"][0]["text"], thoughts);
        assert_eq!(answer["output"][1]["content"][0]["text"], text);
        body["stream"] = true.into();
        let events = named_events(&server, "/v1/responses", &body);
        let numbers: Vec<u64> = events.iter().map(|e| e["sequence_number"].as_u64().unwrap()).collect();
        assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
        let last = events.last().unwrap();
        assert_eq!(
            (&last["type"], &last["response"]["output"][1]["content"][0]["text"]),
            (&json!("response.completed"), &json!(text))
        );
        // Anthropic's messages.
        let mut body = question(ask);
        let (status, answer) = server.post("/v1/messages", &body);
        assert_eq!((status, &answer["stop_reason"]), (200, &json!("end_turn")), "{answer}");
        assert_eq!(
            (&answer["content"][0]["thinking"], &answer["content"][1]["text"]),
            (&json!(thoughts), &json!(text))
        );
        body["stream"] = true.into();
        let events = named_events(&server, "/v1/messages", &body);
        let deltas =
            |key: &str| -> String { events.iter().filter_map(|e| e["delta"][key].as_str()).collect() };
        assert_eq!((deltas("thinking").as_str(), deltas("text").as_str()), (thoughts, text));
        assert_eq!(events.last().unwrap()["type"], "message_stop");
    }
    // Probabilities are those of the answer.
    let mut body = question("@@think");
    body["logprobs"] = true.into();
    let tokens = &server.chat(body)["choices"][0]["logprobs"]["content"];
    assert_eq!(tokens.as_array().unwrap().len(), 1, "{tokens}");
    // Other places of thoughts.
    let with = |key: &str, value: Value| {
        let mut body = question("@@think");
        body[key] = value;
        message(&server.chat(body)).clone()
    };
    let inside = with("reasoning_format", json!("none"));
    assert!(
        inside["content"].as_str().unwrap().contains("secret") && inside["reasoning_content"].is_null(),
        "{inside}"
    );
    assert!(with("include_reasoning", json!(false))["reasoning_content"].is_null());
    // On the way in: the template of this model shows thoughts of the last message.
    let tokens = |messages: Value| {
        server.chat(json!({"messages": messages, "max_tokens": 1}))["usage"]["prompt_tokens"]
            .as_u64()
            .unwrap()
    };
    let of = |key: &str| {
        tokens(
            json!([{"role": "user", "content": "@@next"}, {"role": "assistant", "content": "", key: "@@next"}]),
        )
    };
    assert_eq!(of("reasoning"), of("reasoning_content"));
    assert!(of("reasoning") > of("other"));
    let effort = |effort: &str| {
        let mut body = question("@@next");
        body["reasoning_effort"] = effort.into();
        server.chat(body)["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    assert_eq!(effort("high"), effort("none") + 1);
}

#[test]
fn servers_and_chats_hide_thoughts_and_do_not_keep_them() {
    let hiding = Server::of(bundle(), &["--reasoning", "hide"]);
    let answer = hiding.chat(question("@@think"));
    assert_eq!(
        (&message(&answer)["content"], &message(&answer)["reasoning_content"]),
        (&json!("Four."), &Value::Null)
    );
    // Thoughts that the prompt opens, and an answer that has to follow a schema.
    let dir = tempfile::tempdir().unwrap();
    let opens = dir.path().join("opens.anemoe");
    let template = "{{ bos_token }}{{ messages[-1]['content'] }}{% if add_generation_prompt %}<think>\n{{ messages[-1]['content'] }}{% endif %}";
    scripted::write(
        &dir.path().join("checkpoint"),
        template,
        &[&["@@open", "why", "</think>", "Because.", "<|im", "_end|>", "more", "<eos>"]],
    );
    build(&dir.path().join("checkpoint"), &opens, &["--quant", "fp16", "--no-journal"]);
    let server = Server::of(&opens, &[]);
    let answer = server.chat(question("@@open"));
    assert_eq!(
        (&message(&answer)["content"], &message(&answer)["reasoning_content"]),
        (&json!("Because.<|im_end|>more"), &json!("why"))
    );
    let mut held = question("@@open");
    held["response_format"] =
        json!({"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": {"a": 1}}}});
    let answer = server.chat(held);
    assert_eq!(
        (&message(&answer)["content"], &message(&answer)["reasoning_content"]),
        (&json!("{\"a\": 1}"), &Value::Null)
    );
    let ending = dir.path().join("ends.jinja");
    std::fs::write(&ending, format!("{template}{{# <|im_end|> #}}")).unwrap();
    let server = Server::of(&opens, &["--chat-template", ending.to_str().unwrap()]);
    assert_eq!(message(&server.chat(question("@@open")))["content"], "Because.");
    let chat = |options: &[&str]| {
        let mut args = vec!["chat", bundle().to_str().unwrap(), "--json"];
        args.extend(options);
        let mut child = anemoe(&args);
        child
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped());
        let mut child = child.spawn().unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"@@think\n@@next\n").unwrap();
        let (code, out, err) = finish(child.wait_with_output().unwrap());
        assert_eq!(code, 0, "{err}");
        serde_json::from_str::<Value>(&out).unwrap()
    };
    let talk = chat(&[]);
    assert_eq!(
        (&talk["turns"][0]["text"], &talk["turns"][0]["thoughts"]),
        (&json!("Four."), &json!("secret thoughts"))
    );
    assert_eq!(talk["messages"][1]["content"], "Four.");
    assert_eq!(talk["turns"][1]["text"], "Yes.");
}

#[test]
fn an_answer_ends_where_a_turn_ends() {
    let server = Server::of(bundle(), &[]);
    let mut body = question("@@call");
    let tool =
        json!({"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}});
    body["tools"] = json!([{"type": "function", "function": tool}]);
    let answer = server.chat(body.clone());
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls", "{answer}");
    assert_eq!(message(&answer)["tool_calls"][0]["function"], json!({"name": "f", "arguments": "{\"a\":1}"}));
    assert!(!answer.to_string().contains("invented"));
    // Beside tools, a schema allows a call.
    let mut both = body.clone();
    both["response_format"] = json!({"type": "json_object"});
    assert_eq!(message(&server.chat(both))["tool_calls"][0]["function"]["name"], "f");
    let body = json!({"input": "@@call", "temperature": 0, "tools": [{"type": "function", "name": "f", "parameters": tool["parameters"]}]});
    let (_, answer) = server.post("/v1/responses", &body);
    let call = &answer["output"][0];
    assert_eq!(
        (&call["type"], &call["name"], &call["arguments"]),
        (&json!("function_call"), &json!("f"), &json!("{\"a\":1}"))
    );
    // The call, its result, and the next question.
    let items = json!([{"role": "user", "content": "@@call"}, call, {"type": "function_call_output", "call_id": call["call_id"], "output": "2"},
        {"role": "user", "content": "@@next"}]);
    let (status, answer) = server.post("/v1/responses", &json!({"input": items, "temperature": 0}));
    assert_eq!((status, &answer["output"][0]["content"][0]["text"]), (200, &json!("Yes.")), "{answer}");
    let mut body = question("@@call");
    body["tools"] = json!([{"name": "f", "input_schema": tool["parameters"]}]);
    let (_, answer) = server.post("/v1/messages", &body);
    assert_eq!(answer["stop_reason"], "tool_use", "{answer}");
    let call = &answer["content"][0];
    assert_eq!((&call["type"], &call["input"]), (&json!("tool_use"), &json!({"a": 1})));
    let turns = json!([{"role": "user", "content": "@@call"}, {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "2"}, {"type": "text", "text": "@@next"}]}]);
    let (status, answer) =
        server.post("/v1/messages", &json!({"messages": turns, "max_tokens": 9, "temperature": 0}));
    assert_eq!((status, &answer["content"][0]["text"]), (200, &json!("Yes.")), "{answer}");
    let (_, counted) = server.post("/v1/messages/count_tokens", &json!({"messages": turns}));
    assert_eq!(counted["input_tokens"], answer["usage"]["input_tokens"]);
    // A stop sequence is named.
    let mut body = question("@@think");
    body["stop_sequences"] = json!(["our"]);
    let (_, answer) = server.post("/v1/messages", &body);
    assert_eq!(
        (&answer["stop_reason"], &answer["stop_sequence"]),
        (&json!("stop_sequence"), &json!("our")),
        "{answer}"
    );
}

#[test]
fn several_bundles_are_opened_when_asked_for_and_closed_when_idle() {
    let dir = tempfile::tempdir().unwrap();
    let other = dir.path().join("other.anemoe");
    scripted::write(&dir.path().join("checkpoint"), scripted::TEMPLATE, &[&["@@next", "No.", "<eos>"]]);
    build(&dir.path().join("checkpoint"), &other, &["--quant", "fp16", "--no-journal"]);
    let server = Server::of_all(&[bundle(), &other], &["--idle", "1", "--max-models", "1"]);
    let open = &|| serde_json::from_str::<Value>(&server.get("/health").1).unwrap()["open"].as_u64().unwrap();
    let of = &|model: &str| {
        let mut body = question("@@next");
        body["model"] = model.into();
        message(&server.chat(body))["content"].as_str().unwrap().to_string()
    };
    assert_eq!(open(), 0);
    assert_eq!((of("recites"), open()), ("Yes.".into(), 1));
    assert_eq!((of("other"), open()), ("No.".into(), 1));
    assert_eq!(of("recites"), "Yes.");
    let all = server.get("/v1/models").1;
    assert!(all.contains("\"recites\"") && all.contains("\"other\""), "{all}");
    assert_eq!(server.post("/v1/chat/completions", &question("@@next")).0, 400);
    let mut wrong = question("@@next");
    wrong["model"] = "third".into();
    let (status, answer) = server.post("/v1/chat/completions", &wrong);
    assert_eq!((status, &answer["error"]["code"]), (404, &json!("model_not_found")), "{answer}");
    // Each waits for the other to be closed.
    std::thread::scope(|scope| {
        for i in 0..8 {
            scope.spawn(move || {
                let model = ["recites", "other"][i % 2];
                (0..3).for_each(|_| assert_eq!(of(model), ["Yes.", "No."][i % 2]));
            });
        }
    });
    let started = std::time::Instant::now();
    while open() > 0 {
        assert!(started.elapsed().as_secs() < 60, "an idle model stays open");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    assert_eq!(of("other"), "No.");
}

#[test]
fn clients_reach_the_server_as_they_expect() {
    let server = Server::of(bundle(), &["--allow-host", "my.server"]);
    let ask = |method: &str, path: &str, host: &str, headers: &str| {
        let answer = server.raw(
            format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{headers}\r\n")
                .as_bytes(),
        );
        (answer.split(' ').nth(1).unwrap().parse::<u16>().unwrap(), answer)
    };
    for (path, host, status) in [
        ("/health", "localhost", 200),
        ("/health", "127.0.0.1:9", 200),
        ("/health", "my.server", 200),
        ("/health", "evil.example", 403),
        ("/", "evil.example", 403),
        ("/v1/models/", "localhost", 200),
        ("//v1/models", "localhost", 200),
        ("/v1/models/%ff%fe", "localhost", 404),
        ("/v1/models/a/b", "localhost", 404),
    ] {
        let (got, answer) = ask("GET", path, host, "");
        assert_eq!(got, status, "{path} {host}: {answer}");
        assert!(status == 200 || answer.contains("\"error\""), "{answer}");
    }
    let (status, answer) = ask("HEAD", "/health", "localhost", "");
    assert!(status == 200 && answer.ends_with("\r\n\r\n"), "{answer}");
    let (status, _, text) = server.ask("POST", "/v1/chat/completions", "content-encoding: gzip\r\n", "x");
    assert!(status == 415 && text.contains("gzip"), "{text}");
    let (status, _, text) = server.ask("POST", "/v1/messages", "", "{}");
    assert!(status == 400 && text.contains("\"type\":\"error\""), "{text}");
    // Many small objects take more memory than their text.
    let many = format!("{{\"messages\": [{}0]}}", "{\"\":0},".repeat(400_000));
    let (status, _, text) = server.ask("POST", "/v1/chat/completions", "", &many);
    assert!(status == 400 && text.contains("too many values"), "{text}");
    assert_eq!(server.post("/v1/chat/completions/", &question("@@next")).0, 200);
}

#[test]
fn many_streams_of_all_kinds_do_not_mix() {
    let server = Server::of(bundle(), &[]);
    let tool = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    let ask = |kind: usize| match kind % 4 {
        0 => {
            let mut body = question("@@think");
            body["stream"] = true.into();
            let events = server.stream("/v1/chat/completions", &body);
            let text: String =
                events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
            assert_eq!(text, "Four.");
        }
        1 => {
            let mut body = question("@@call");
            body["tools"] = tool.clone();
            assert_eq!(message(&server.chat(body))["tool_calls"][0]["function"]["name"], "f");
        }
        2 => {
            let mut body = question("@@tags");
            body["stream"] = true.into();
            let events = named_events(&server, "/v1/messages", &body);
            let text: String = events.iter().filter_map(|e| e["delta"]["text"].as_str()).collect();
            assert_eq!(text, "Because.");
        }
        _ => {
            let schema = json!({"type": "object", "required": ["a"], "properties": {"a": {"enum": ["Yes."]}}, "additionalProperties": false});
            let mut body = question("@@next");
            body["response_format"] = json!({"type": "json_object", "schema": schema});
            assert_eq!(message(&server.chat(body))["content"], "{\"a\": \"Yes.\"}");
        }
    };
    std::thread::scope(|scope| {
        for stream in 0..32 {
            scope.spawn(move || (0..4).for_each(|turn| ask(stream + turn)));
        }
    });
}
