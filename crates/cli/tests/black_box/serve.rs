//! `anemoe serve` over plain connections: answers, streams, batches, grammars, limits, and refusals.

use crate::common::{anemoe, build, json, refused};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Returns a bundle of the small model with a short context, built once.
fn bundle() -> &'static Path {
    static BUNDLE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = BUNDLE.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("small.anemoe");
        let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/small-gemma4");
        build(&small, &path, &["--max-context", "512", "--no-journal"]);
        (dir, path)
    });
    path
}

/// Builds the small model with the marks of Gemma 4's calls as special tokens, in place of three that its texts do not use.
fn bundle_with_marks(dir: &Path) -> PathBuf {
    let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/small-gemma4");
    let checkpoint = dir.join("checkpoint");
    std::fs::create_dir(&checkpoint).unwrap();
    for name in ["config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"] {
        std::fs::copy(small.join(name), checkpoint.join(name)).unwrap();
    }
    let mut text = std::fs::read_to_string(small.join("tokenizer.json")).unwrap();
    let marks = [("<pad>", "<|\\\"|>"), ("<mask>", "<|tool_call>"), ("<start_of_turn>", "<tool_call|>")];
    for (old, mark) in marks {
        text = text.replace(&format!("\"{old}\""), &format!("\"{mark}\""));
    }
    std::fs::write(checkpoint.join("tokenizer.json"), text).unwrap();
    let out = dir.join("marks.anemoe");
    build(&checkpoint, &out, &["--max-context", "512", "--no-journal", "--quant", "lut4"]);
    out
}

/// A running server; it is killed at the end.
pub struct Server {
    child: Child,
    address: String,
    errors: Option<ChildStderr>,
}

impl Server {
    pub fn start(options: &[&str]) -> Server {
        Server::of(bundle(), options)
    }

    pub fn of(bundle: &Path, options: &[&str]) -> Server {
        Server::of_all(&[bundle], options)
    }

    pub fn of_all(bundles: &[&Path], options: &[&str]) -> Server {
        let mut args = vec!["serve", "--port", "0"];
        args.extend(bundles.iter().map(|bundle| bundle.to_str().unwrap()));
        args.extend(options);
        let mut child = anemoe(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let errors = child.stderr.take();
        let Some((_, rest)) = line.split_once("http://") else {
            let mut text = String::new();
            errors.unwrap().read_to_string(&mut text).unwrap();
            panic!("{line}{text}");
        };
        let address = rest.split_whitespace().next().unwrap().to_string();
        Server { child, address, errors }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Sends bytes and reads all that comes back.
    pub fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect();
        // A server that refuses may close before it has read all.
        let _ = stream.write_all(bytes);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// Sends a request and returns status, headers and body.
    pub fn ask(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String, String) {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n{headers}content-length: {}\r\n\r\n{body}",
            body.len()
        );
        let answer = self.raw(request.as_bytes());
        let (head, body) =
            answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{method} {path}: {answer}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let body = if head.contains("transfer-encoding: chunked") { unchunked(body) } else { body.into() };
        (status, head.to_lowercase(), body)
    }

    pub fn get(&self, path: &str) -> (u16, String) {
        let (status, _, body) = self.ask("GET", path, "", "");
        (status, body)
    }

    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, _, text) = self.ask("POST", path, "", &body.to_string());
        (status, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}")))
    }

    pub fn complete(&self, body: Value) -> Value {
        let (status, v) = self.post("/v1/completions", &body);
        assert_eq!(status, 200, "{body}: {v}");
        v
    }

    pub fn chat(&self, body: Value) -> Value {
        let (status, v) = self.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{body}: {v}");
        v
    }

    /// Sends a request for a stream, and returns its events without the last, `[DONE]`.
    pub fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let (status, head, text) = self.ask("POST", path, "", &body.to_string());
        assert!(status == 200 && head.contains("text/event-stream"), "{head}{text}");
        let mut events: Vec<&str> = text.split("\n\n").filter(|e| !e.is_empty()).collect();
        assert_eq!(events.pop(), Some("data: [DONE]"), "{text}");
        events.iter().map(|e| serde_json::from_str(e.strip_prefix("data: ").unwrap()).unwrap()).collect()
    }

    /// Asks the server to end, and returns its exit status and messages.
    pub fn terminate(mut self) -> (Option<i32>, String) {
        let kill = std::process::Command::new("kill").arg(self.child.id().to_string()).status().unwrap();
        assert!(kill.success());
        let status = self.child.wait().unwrap().code();
        let mut text = String::new();
        self.errors.take().unwrap().read_to_string(&mut text).unwrap();
        (status, text)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn unchunked(mut body: &str) -> String {
    let mut out = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            break;
        }
        out += &rest[..size];
        body = &rest[size + 2..];
    }
    out
}

fn text(v: &Value) -> &str {
    v["choices"][0]["text"].as_str().unwrap()
}

fn content(v: &Value) -> &str {
    v["choices"][0]["message"]["content"].as_str().unwrap()
}

#[test]
fn answers_are_those_of_generate_alone_and_together() {
    let server = Server::start(&["--max-sequences", "12"]);
    let prompts: Vec<String> =
        (0..8).map(|i| format!("def function_{i}(self, {}):\n", "x, ".repeat(i))).collect();
    let body = |prompt: &str| json!({"prompt": prompt, "max_tokens": 16, "temperature": 0});
    let alone: Vec<String> = prompts
        .iter()
        .map(|prompt| {
            let v = json(0, &["generate", bundle().to_str().unwrap(), "--prompt", prompt, "-n", "16"]);
            v["text"].as_str().unwrap().to_string()
        })
        .collect();
    std::thread::scope(|scope| {
        let ask = |i: usize| text(&server.complete(body(&prompts[i]))).to_string();
        let all: Vec<_> = (0..24).map(|i| (i % 8, scope.spawn(move || ask(i % 8)))).collect();
        for (i, thread) in all {
            assert_eq!(thread.join().unwrap(), alone[i], "{}", prompts[i]);
        }
    });
    let v = server.complete(json!({"prompt": prompts, "max_tokens": 16, "temperature": 0, "n": 1}));
    for (i, choice) in v["choices"].as_array().unwrap().iter().enumerate() {
        assert_eq!(
            (choice["index"].as_u64(), choice["text"].as_str()),
            (Some(i as u64), Some(alone[i].as_str()))
        );
    }
    // The same seed gives the same text, whichever sequences run beside it.
    let seeded = json!({"prompt": prompts[0], "max_tokens": 16, "temperature": 1, "seed": 5, "n": 3});
    let first = server.complete(seeded.clone());
    let texts = |v: &Value| {
        v["choices"].as_array().unwrap().iter().map(|c| c["text"].to_string()).collect::<Vec<_>>()
    };
    assert_eq!(texts(&first), texts(&server.complete(seeded)));
    assert_ne!(texts(&first)[0], texts(&first)[1]);
    // A stream has the same text in pieces, and reports its tokens.
    let mut streamed = body(&prompts[1]);
    streamed["stream"] = true.into();
    streamed["stream_options"] = json!({"include_usage": true});
    let events = server.stream("/v1/completions", &streamed);
    let all: String = events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(all, alone[1]);
    let (last, ending) = (&events[events.len() - 1], &events[events.len() - 2]);
    assert_eq!(
        (last["usage"]["completion_tokens"].as_u64(), ending["choices"][0]["finish_reason"].as_str()),
        (Some(16), Some("length"))
    );
    // Each piece has the offset of its token in the text.
    streamed["logprobs"] = 0.into();
    let events = server.stream("/v1/completions", &streamed);
    let mut end = 0;
    for logprobs in events.iter().map(|e| &e["choices"][0]["logprobs"]).filter(|l| l.is_object()) {
        assert_eq!(logprobs["text_offset"][0].as_u64(), Some(end), "{logprobs}");
        end += logprobs["tokens"][0].as_str().unwrap().chars().count() as u64;
    }
    assert_eq!(end, alone[1].chars().count() as u64);
    // Stop strings and probabilities.
    let stop: String = alone[1].chars().skip(8).take(3).collect();
    let v = server.complete(
        json!({"prompt": prompts[1], "max_tokens": 16, "temperature": 0, "stop": stop, "logprobs": 2}),
    );
    assert_eq!(text(&v), &alone[1][..alone[1].find(&stop).unwrap()]);
    assert_eq!(v["choices"][0]["finish_reason"], "stop");
    let logprobs = &v["choices"][0]["logprobs"];
    assert!(logprobs["token_logprobs"][0].as_f64().unwrap() <= 0.0);
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);
    let (status, metrics) = server.get("/metrics");
    assert!(
        status == 200
            && metrics.contains("anemoe_generated_tokens_total")
            && metrics.contains("path=\"/v1/completions\",status=\"200\"")
    );
}

#[test]
fn a_chat_goes_on_from_its_last_turn_and_may_be_held_to_a_schema() {
    let server = Server::start(&["--max-sequences", "4", "--model-name", "m"]);
    let mut messages = vec![
        json!({"role": "system", "content": "import os, sys, re\n".repeat(8)}),
        json!({"role": "user", "content": "def f(x):"}),
    ];
    let body =
        |messages: &[Value]| json!({"model": "m", "messages": messages, "max_tokens": 12, "temperature": 0});
    let first = server.chat(body(&messages));
    messages.push(json!({"role": "assistant", "content": content(&first)}));
    messages.push(json!({"role": "user", "content": "def g(y):"}));
    let second = server.chat(body(&messages));
    let count = |v: &Value, key: &str| v["usage"][key].as_u64().unwrap();
    let known = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(known >= count(&first, "prompt_tokens"), "{second}");
    // A server that keeps no prefixes gives the same text.
    let fresh = Server::start(&["--max-sequences", "2", "--prefix-cache", "0", "--model-name", "m"]);
    let other = fresh.chat(body(&messages[..2]));
    assert_eq!(content(&other), content(&first));
    assert_eq!(fresh.chat(body(&messages))["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    // Several answers to one question share its tokens.
    let mut several = body(&messages[..2]);
    several["n"] = 4.into();
    several["logprobs"] = true.into();
    several["top_logprobs"] = 2.into();
    let v = server.chat(several);
    for choice in v["choices"].as_array().unwrap() {
        assert_eq!(choice["message"]["content"], content(&first));
        assert_eq!(choice["logprobs"]["content"][0]["top_logprobs"].as_array().unwrap().len(), 2);
        let tokens = choice["logprobs"]["content"].as_array().unwrap();
        let bytes = tokens.iter().flat_map(|t| t["bytes"].as_array().unwrap());
        let bytes: Vec<u8> = bytes.map(|b| b.as_u64().unwrap() as u8).collect();
        assert_eq!(String::from_utf8_lossy(&bytes), content(&first));
    }
    let events = server.stream(
        "/v1/chat/completions",
        &json!({"messages": &messages[..2], "max_tokens": 12, "temperature": 0, "stream": true}),
    );
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let all: String = events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(all, content(&first));
    // A schema with a finite number of answers.
    let schema = json!({"type": "object", "required": ["name", "n", "ok"], "additionalProperties": false, "properties": {
        "name": {"enum": ["a", "b c"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}}});
    for seed in 0..4 {
        let v = server
            .chat(json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "seed": seed,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}));
        let answer: Value = serde_json::from_str(content(&v)).unwrap_or_else(|e| panic!("{e}: {v}"));
        assert!(answer["n"].as_u64().unwrap() < 100 && answer["ok"].is_boolean(), "{v}");
        assert_eq!(v["choices"][0]["finish_reason"], "stop");
    }
    let v = server.chat(json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "response_format": {"type": "json_object"}}));
    assert!(content(&v).starts_with('{'), "{v}");
}

#[test]
fn answers_do_not_depend_on_earlier_ones() {
    let (one, other) = (Server::start(&[]), Server::start(&[]));
    for seed in 0..8 {
        let question = json!({"role": "user", "content": format!("write number {seed}")});
        let first =
            one.chat(json!({"messages": [question], "max_tokens": 40, "temperature": 2.0, "seed": seed}));
        let answer = json!({"role": "assistant", "content": content(&first)});
        let messages = json!([question, answer, {"role": "user", "content": "go on"}]);
        let goes_on = |server: &Server| {
            let v = server.chat(json!({"messages": messages, "max_tokens": 20, "temperature": 0}));
            (content(&v).to_string(), v["usage"]["prompt_tokens"].clone())
        };
        assert_eq!(goes_on(&one), goes_on(&other), "{messages}");
    }
}

#[test]
fn schemas_without_measure_are_refused_and_the_server_lives() {
    let server = Server::start(&[]);
    let all = |n: usize, one: &dyn Fn(usize) -> Value| -> Value {
        (0..n).map(|i| (format!("d{i}"), one(i))).collect::<serde_json::Map<_, _>>().into()
    };
    let link = |i: usize| json!({"$ref": format!("#/$defs/d{}", i + 1)});
    let nested = |i: usize| json!({"type": "object", "properties": {"a": link(i)}, "required": ["a"]});
    let text = |_| json!({"type": "string"});
    let classes: String =
        (0..20_000u32).map(|i| format!("[a-{}]?", char::from(b'b' + (i % 20) as u8))).collect();
    for schema in [
        json!({"$ref": "#/$defs/d0", "$defs": all(300, &nested)}),
        json!({"$ref": "#/$defs/d0", "$defs": all(1000, &link)}),
        json!({"type": "object", "properties": all(8000, &text), "additionalProperties": false}),
        json!({"type": "object", "properties": all(600, &text), "additionalProperties": false}),
        json!({"type": "string", "pattern": classes}),
        json!({"type": "string", "pattern": "(".repeat(20_000)}),
        json!({"$ref": "#"}),
        json!({"type": "integer", "multipleOf": 999_983}),
        json!({"type": "object", "required": (0..19_000).map(|i| format!("r{i}")).collect::<Vec<_>>()}),
        json!({"type": "object", "patternProperties": all(300, &text)}),
        json!({"$defs": {"a": {"anyOf": all(8, &text).as_object().unwrap().values().collect::<Vec<_>>()}},
            "allOf": vec![json!({"$ref": "#/$defs/a"}); 6]}),
    ] {
        let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
        let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "response_format": format});
        let (status, answer) = server.post("/v1/chat/completions", &body);
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("response_format")), "{message}");
        assert!(message.len() < 300 && !message.contains("<state>"), "{message}");
    }
    // Schemas just below the limits are accepted.
    let ended = |i: usize| if i == 198 { text(i) } else { nested(i) };
    let wide = json!({"type": "object", "properties": all(400, &text), "additionalProperties": false});
    for schema in [json!({"$ref": "#/$defs/d0", "$defs": all(199, &ended)}), wide] {
        let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
        let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "response_format": format});
        let (status, answer) = server.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
    }
    assert!(
        !content(&server.chat(json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 4})))
            .is_empty()
    );
}

#[test]
fn a_call_of_a_tool_is_one_in_the_answer() {
    let template = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../text/tests/chat_templates").join(name);
        path.to_str().unwrap().to_string()
    };
    let days = json!({"type": "integer", "minimum": 1, "maximum": 9});
    let tool = |name: &str| {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "required": ["days", "place"],
            "additionalProperties": false, "properties": {"place": {"enum": ["here", "there"]}, "days": days}}}})
    };
    let question = json!([{"role": "user", "content": "Weather?"}]);
    let body = |choice: Value| json!({"messages": question, "tools": [tool("weather"), tool("wind")], "tool_choice": choice, "max_tokens": 120, "seed": 1});
    let dir = tempfile::tempdir().unwrap();
    let with_marks = bundle_with_marks(dir.path());
    for (bundle, name) in [
        (bundle(), "qwen3.jinja"),
        (bundle(), "llama3.jinja"),
        (bundle(), "gemma4.jinja"),
        (with_marks.as_path(), "gemma4.jinja"),
    ] {
        let server = Server::of(bundle, &["--chat-template", &template(name)]);
        let named = json!({"type": "function", "function": {"name": "wind"}});
        for (choice, names) in [(json!("required"), &["weather", "wind"][..]), (named, &["wind"])] {
            let v = server.chat(body(choice.clone()));
            let answer = &v["choices"][0];
            assert_eq!(
                (&answer["finish_reason"], &answer["message"]["content"]),
                (&json!("tool_calls"), &Value::Null),
                "{v}"
            );
            let calls = answer["message"]["tool_calls"].as_array().unwrap();
            assert_eq!(calls.len(), 1, "{v}");
            let function = &calls[0]["function"];
            assert!(names.contains(&function["name"].as_str().unwrap()), "{v}");
            let arguments: Value = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
            assert!((1..=9).contains(&arguments["days"].as_u64().unwrap()), "{v}");
            // The same call as a stream.
            let mut streamed = body(choice);
            streamed["stream"] = true.into();
            let events = server.stream("/v1/chat/completions", &streamed);
            let deltas: Vec<&Value> = events.iter().map(|e| &e["choices"][0]["delta"]).collect();
            let called: Vec<&Value> = deltas.iter().filter_map(|d| d["tool_calls"].get(0)).collect();
            assert_eq!(called.len(), 1, "{events:?}");
            assert_eq!((&called[0]["index"], &called[0]["function"]), (&json!(0), function));
            assert!(called[0]["id"].as_str().unwrap().starts_with("call_"));
            assert!(deltas.iter().all(|d| d["content"].as_str().is_none_or(str::is_empty)), "{events:?}");
            let reasons = events.iter().filter_map(|e| e["choices"][0]["finish_reason"].as_str());
            assert_eq!(reasons.collect::<Vec<_>>(), ["tool_calls"]);
            // The call and its result continue the conversation, as messages.
            let messages = json!([question[0], answer["message"],
                {"role": "tool", "content": "windy", "tool_call_id": calls[0]["id"]}]);
            let v = server.chat(json!({"messages": messages, "tools": [tool("wind")], "max_tokens": 4}));
            assert!(v["usage"]["prompt_tokens"].as_u64().unwrap() > 20, "{v}");
        }
        // Without a call, the answer is text as usual; without tools, no call is searched for.
        let schema = json!({"type": "object", "required": ["name", "parameters"], "additionalProperties": false,
            "properties": {"name": {"const": "wind"}, "parameters": {"type": "object", "additionalProperties": false}}});
        let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
        let v = server.chat(json!({"messages": question, "response_format": format, "max_tokens": 60}));
        assert_eq!(content(&v), r#"{"name": "wind", "parameters": {}}"#);
        for (choice, param) in [
            (json!("always"), "tool_choice"),
            (json!({"type": "function", "function": {"name": "rain"}}), "tool_choice"),
        ] {
            let (status, answer) = server.post("/v1/chat/completions", &body(choice));
            assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{answer}");
        }
    }
    // A template whose form of calls is unknown: calls stay text, and none can be forced.
    let server = Server::start(&["--chat-template", &template("zaya.jinja")]);
    let (status, answer) = server.post("/v1/chat/completions", &body(json!("required")));
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("tool_choice")), "{answer}");
    assert!(server.chat(body(json!("auto")))["choices"][0]["message"]["tool_calls"].is_null());
}

#[test]
fn what_other_servers_take_is_taken_or_answered_with_what_is_meant() {
    let template = Path::new(env!("CARGO_MANIFEST_DIR")).join("../text/tests/chat_templates/qwen3.jinja");
    let server = Server::start(&["--chat-template", template.to_str().unwrap(), "--max-tokens", "3"]);
    let messages = json!([{"role": "user", "content": "x"}]);
    // A limit of -1 means all the room that is left, within the server's own limit.
    let v = server.chat(json!({"messages": messages, "max_tokens": -1, "top_k": -1, "ignore_eos": true}));
    assert_eq!(v["usage"]["completion_tokens"], 3, "{v}");
    // A variable of the template changes the prompt.
    let tokens = |variables: Value| {
        let v =
            server.chat(json!({"messages": messages, "max_tokens": 1, "chat_template_kwargs": variables}));
        v["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    assert!(tokens(json!({"enable_thinking": false})) > tokens(json!({})));
    let (status, v) = server.post(
        "/v1/chat/completions",
        &json!({"messages": messages, "chat_template_kwargs": {"messages": []}}),
    );
    assert_eq!((status, &v["error"]["param"]), (400, &json!("chat_template_kwargs")), "{v}");
    for (path, says) in [
        ("/chat/completions", "/v1/chat/completions is"),
        ("/models", "/v1/models is"),
        ("/api/chat", "OpenAI's API: /v1/chat/completions"),
        ("/v1", "OpenAI's API"),
    ] {
        let (status, v) = server.post(path, &json!({}));
        assert!(status == 404 && v["error"]["message"].as_str().unwrap().contains(says), "{path}: {v}");
    }
    let port = server.address.rsplit(':').next().unwrap();
    refused(&["serve", bundle().to_str().unwrap(), "--port", port], &["cannot listen at", "--port 0"]);
}

#[test]
fn localhost_is_reached_by_both_of_its_addresses() {
    let server = Server::start(&["--host", "localhost"]);
    let port = server.address.strip_prefix("localhost:").expect("localhost and a port").to_string();
    let mut reached = 0;
    for address in ["127.0.0.1", "[::1]"] {
        // A machine may have no IPv6.
        if address.contains(':') && std::net::TcpListener::bind("[::1]:0").is_err() {
            continue;
        }
        let mut stream = TcpStream::connect(format!("{address}:{port}")).unwrap();
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{address}: {answer}");
        reached += 1;
    }
    assert!(reached > 0);
    assert_eq!(server.terminate().0, Some(0));
}

/// Returns the value of a counter.
fn counter(server: &Server, name: &str) -> u64 {
    let (_, metrics) = server.get("/metrics");
    let line =
        metrics.lines().find(|l| l.starts_with(&format!("{name} "))).unwrap_or_else(|| panic!("{name}"));
    line.split(' ').nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_stream_that_runs_alone_drafts_and_its_answer_stays_the_same() {
    let options = ["--max-sequences", "4", "--prefix-cache", "0"];
    let (plain, drafting) = (
        Server::start(&[&options[..], &["--speculate", "off"]].concat()),
        Server::start(&[&options[..], &["--speculate", "ngram", "--draft-max", "6"]].concat()),
    );
    let lines = "    self.name = name\n    self.value = value\n".repeat(3);
    let prompt = format!("def __init__(self, name, value):\n{lines}");
    let bodies = [
        json!({"temperature": 0, "ignore_eos": true}),
        json!({"temperature": 0, "logprobs": 2}),
        json!({"temperature": 0.8, "seed": 3}),
        json!({"temperature": 0, "stop": "value\n"}),
        json!({"temperature": 0, "max_tokens": 1}),
        json!({"temperature": 0, "max_tokens": 4000}),
    ];
    for mut body in bodies {
        body["prompt"] = prompt.clone().into();
        if body["max_tokens"].is_null() {
            body["max_tokens"] = 40.into();
        }
        let (one, other) = (plain.complete(body.clone()), drafting.complete(body.clone()));
        assert_eq!(one["choices"], other["choices"], "{body}");
        assert_eq!(one["usage"], other["usage"], "{body}");
    }
    assert_eq!(counter(&plain, "anemoe_drafted_tokens_total"), 0);
    let right = counter(&drafting, "anemoe_accepted_tokens_total");
    assert!(right > 8 && counter(&drafting, "anemoe_drafted_tokens_total") >= right);
    let passes = [&plain, &drafting].map(|s| counter(s, "anemoe_passes_total"));
    assert!(passes[1] < passes[0], "{passes:?}");
    // A grammar checks each drafted token, and tokens that were cut back are not part of the next turn.
    let schema = json!({"type": "array", "items": {"const": "name name"}, "minItems": 6, "maxItems": 6});
    let body = json!({"messages": [{"role": "user", "content": prompt}], "max_tokens": 200, "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}});
    assert_eq!(content(&plain.chat(body.clone())), content(&drafting.chat(body)));
    // Other sequences join and leave while the server drafts.
    let ask = |server: &Server, i: usize| {
        let body =
            json!({"prompt": format!("{prompt}# {i}\n{lines}"), "max_tokens": 24 + 8 * i, "temperature": 0});
        text(&server.complete(body)).to_string()
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..4)
            .map(|i| {
                (
                    i,
                    scope.spawn({
                        let (ask, drafting) = (&ask, &drafting);
                        move || ask(drafting, i)
                    }),
                )
            })
            .collect();
        for (i, thread) in all {
            assert_eq!(thread.join().unwrap(), ask(&plain, i), "{i}");
        }
    });
}

#[test]
fn what_is_wrong_gets_an_error_and_the_server_lives() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    std::fs::write(&keys, "\u{feff}secret-1\n# ours\n\nsecret-2\r\n").unwrap();
    let server = Server::start(&[
        "--max-sequences",
        "4",
        "--max-body",
        "20000",
        "--max-tokens",
        "64",
        "--client-timeout",
        "1",
    ]);
    let message = json!([{"role": "user", "content": "x"}]);
    for (path, body, status, says) in [
        ("/v1/chat/completions", json!({"messages": message, "model": "other"}), 404, "no model `other`"),
        ("/v1/chat/completions", json!({"messages": []}), 400, "at least one message"),
        ("/v1/chat/completions", json!({}), 400, "messages"),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "wizard", "content": "x"}]}),
            400,
            "no role `wizard`",
        ),
        ("/v1/chat/completions", json!({"messages": message, "temperature": -1}), 400, "temperature"),
        (
            "/v1/chat/completions",
            json!({"messages": message, "max_tokens": 65}),
            400,
            "the most that this server gives",
        ),
        ("/v1/chat/completions", json!({"messages": message, "tools": [{"type": "function"}]}), 400, "tools"),
        (
            "/v1/chat/completions",
            json!({"messages": message, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}),
            400,
            "response_format",
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "word ".repeat(1000)}]}),
            400,
            "the context of this model holds 512",
        ),
        ("/v1/completions", json!({"prompt": ""}), 200, ""),
        ("/v1/completions", json!({"prompt": []}), 400, "prompt"),
        ("/v1/completions", json!({"prompt": [99999]}), 400, "outside the vocabulary"),
        ("/v1/completions", json!({"prompt": {"a": 1}}), 400, "another type"),
        ("/v1/completions", json!({"prompt": "x".repeat(30_000)}), 413, "20000 bytes"),
        ("/v1/embeddings", json!({"input": "x"}), 400, "no embeddings"),
        ("/v1/nothing", json!({}), 404, "nothing at this path"),
        ("/v1/models", json!({}), 405, "another method"),
    ] {
        let (found, v) = server.post(path, &body);
        assert_eq!(found, status, "{path} {body}: {v}");
        if status != 200 {
            assert!(v["error"]["message"].as_str().unwrap().contains(says), "{says}: {v}");
            assert!(v["error"]["type"].is_string(), "{v}");
        }
    }
    let (status, _, body) =
        server.ask("POST", "/v1/completions", "", "{\"prompt\": \"x\", \"temperature\": NaN}");
    assert!(status == 400 && body.contains("not valid JSON"), "{body}");
    assert_eq!(server.get("/v1/models/small").0, 200);
    assert_eq!(server.get("/v1/models/..%2f..").0, 404);
    let (_, page) = server.get("/");
    assert!(page.contains("<!doctype html>") && !page.contains("http://") && !page.contains("https://"));
    // Requests that are not HTTP, lie about their length, or stop half-way.
    let post = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    let started = Instant::now();
    for bytes in [
        "\r\n\r\n\r\n".to_string(),
        "GET / HTTP/9.9\r\n\r\n".into(),
        "\u{0}\u{1}\u{2}".into(),
        format!("{post}content-length: -5\r\n\r\n"),
        format!("{post}content-length: 99999999999999999999\r\n\r\n"),
        format!("{post}content-length: 100000000\r\n\r\n{{"),
        format!("{post}content-length: 5\r\ncontent-length: 6\r\n\r\n{{}}"),
        format!("{post}content-length: 50\r\n\r\n{{\"prompt\""),
        format!("{post}transfer-encoding: chunked\r\n\r\nzz\r\n"),
        format!("{post}content-length: 3\r\nconnection: close\r\n\r\n\u{fffd}"),
        format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(600_000)),
        format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(5000)),
    ] {
        let mut stream = server.connect();
        let _ = stream.write_all(bytes.as_bytes());
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.is_empty() || !answer.starts_with("HTTP/1.1 200"), "{bytes:.200}: {answer}");
    }
    assert!(started.elapsed() < Duration::from_secs(40));
    // A body that does not come, with the connection open.
    let answer = server.raw(format!("{post}content-length: 50\r\n\r\n{{\"prompt\"").as_bytes());
    assert!(answer.contains("408") && answer.contains("took too long"), "{answer}");
    // A head that does not come.
    let waited = Instant::now();
    assert!(server.raw(b"GET /health HTTP/1.1\r\nhost: localhost\r\n").is_empty());
    assert!(waited.elapsed() < Duration::from_secs(15));
    // Clients that leave while their answer comes.
    let body = json!({"prompt": "def f", "max_tokens": 64, "stream": true, "ignore_eos": true}).to_string();
    for _ in 0..20 {
        let mut stream = server.connect();
        write!(stream, "{post}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut first = [0; 32];
        stream.read_exact(&mut first).unwrap();
    }
    let waited = Instant::now();
    loop {
        let health: Value = serde_json::from_str(&server.get("/health").1).unwrap();
        if health["jobs"] == 0 {
            break;
        }
        assert!(waited.elapsed() < Duration::from_secs(20), "{health}");
        std::thread::sleep(Duration::from_millis(20));
    }
    let (code, messages) = server.terminate();
    assert!(code == Some(0) && !messages.contains("panicked"), "{messages}");
    // Keys, and pages of other origins.
    let server = Server::start(&[
        "--max-sequences",
        "1",
        "--api-key-file",
        keys.to_str().unwrap(),
        "--cors",
        "http://here",
    ]);
    let models = |headers: &str| server.ask("GET", "/v1/models", headers, "");
    assert_eq!(models("").0, 401);
    assert_eq!(models("authorization: Bearer secret-3\r\n").0, 401);
    assert_eq!(models("authorization: Bearer # ours\r\n").0, 401);
    let (status, head, _) = models("authorization: Bearer secret-2\r\norigin: http://here\r\n");
    assert!(status == 200 && head.contains("access-control-allow-origin: http://here"), "{head}");
    assert!(
        !models("authorization: Bearer secret-2\r\norigin: http://there\r\n").1.contains("access-control")
    );
    let preflight = "origin: http://here\r\naccess-control-request-headers: authorization,x-stainless-os\r\n";
    let (status, head, _) = server.ask("OPTIONS", "/v1/models", preflight, "");
    assert!(
        status == 204 && head.contains("access-control-allow-headers: authorization,x-stainless-os"),
        "{head}"
    );
    assert_eq!((server.get("/health").0, server.get("/").0, server.get("/metrics").0), (200, 200, 401));
    let b = bundle().to_str().unwrap();
    std::fs::write(&keys, "# none\n").unwrap();
    refused(&["serve", b, "--port", "0", "--api-key-file", keys.to_str().unwrap()], &["no key"]);
    let port = server.address.rsplit(':').next().unwrap();
    refused(&["serve", b, "--port", port], &["cannot listen"]);
    refused(&["serve", b, "--host", "nowhere"], &["--host"]);
    refused(&["serve", b, "--cors", "http://here/"], &["--cors", "SCHEME://HOST"]);
}

#[test]
fn requests_too_many_are_refused_and_running_ones_end_well() {
    let server = Server::start(&["--max-sequences", "1", "--max-queue", "1"]);
    let body =
        json!({"prompt": "def f", "max_tokens": 400, "stream": true, "ignore_eos": true, "temperature": 0})
            .to_string();
    let post = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut running = server.connect();
    running.write_all(post.as_bytes()).unwrap();
    let mut first = [0; 32];
    running.read_exact(&mut first).unwrap();
    let mut waiting = server.connect();
    waiting.write_all(post.as_bytes()).unwrap();
    let started = Instant::now();
    loop {
        let health: Value = serde_json::from_str(&server.get("/health").1).unwrap();
        if health["jobs"] == 2 {
            break;
        }
        assert!(started.elapsed() < Duration::from_secs(10), "{health}");
    }
    let (status, v) = server.post("/v1/completions", &json!({"prompt": ["x", "y"], "n": 2, "max_tokens": 1}));
    assert!(status == 400 && v["error"]["param"] == "n", "{v}");
    let (status, v) = server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 1}));
    assert!(status == 429 && v["error"]["code"] == "queue_full", "{v}");
    // Both running answers are complete when the server ends.
    let (code, messages) = server.terminate();
    assert!(code == Some(0) && messages.contains("closing"), "{messages}");
    for mut stream in [running, waiting] {
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.contains("data: [DONE]") && text.contains("\"finish_reason\":\"length\""), "{text}");
    }
}
