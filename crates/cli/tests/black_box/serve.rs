//! `anemoe serve` over plain connections: answers, streams, batches, grammars, limits, and refusals.

use crate::common::*;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::Child;
use std::time::{Duration, Instant};

/// Options of the small model's bundle, which has a short context.
const SHORT: &str = "--max-context 512 --no-journal";

/// A running server; it is killed at the end.
pub struct Server {
    child: Option<Child>,
    address: String,
    _bundle: Place,
}

impl Server {
    /// Starts a server of the small model.
    pub fn small(options: &str) -> Server {
        Server::of(&built("small", SHORT), options)
    }

    /// Starts a server of a bundle, and of others that begin the options.
    pub fn of(bundle: &Place, options: &str) -> Server {
        let mut child = start(&mut anemoe(format!("serve --port 0 {bundle} {options}")));
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let Some((_, rest)) = line.split_once("http://") else {
            panic!("{line}{:?}", ended(child.wait_with_output().unwrap()));
        };
        let address = rest.split_whitespace().next().unwrap().into();
        Server { address, child: Some(child), _bundle: bundle.clone() }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    fn port(&self) -> &str {
        self.address.rsplit(':').next().unwrap()
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
        let n = body.len();
        let kept = "host: localhost\r\nconnection: close\r\ncontent-type: application/json";
        let request =
            format!("{method} {path} HTTP/1.1\r\n{kept}\r\n{headers}content-length: {n}\r\n\r\n{body}");
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

    /// Returns a counter of the server's metrics.
    fn counter(&self, name: &str) -> u64 {
        let (_, metrics) = self.get("/metrics");
        let value = metrics.lines().find_map(|l| l.strip_prefix(&format!("anemoe_{name}_total ")));
        value.unwrap_or_else(|| panic!("{name}: {metrics}")).parse().unwrap()
    }

    /// Returns a figure of the server's health.
    pub fn health(&self, key: &str) -> u64 {
        count(&serde_json::from_str::<Value>(&self.get("/health").1).unwrap()[key])
    }

    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, _, text) = self.ask("POST", path, "", &body.to_string());
        (status, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}")))
    }

    /// Sends a request that has to be answered.
    pub fn answer(&self, path: &str, body: Value) -> Value {
        let (status, v) = self.post(path, &body);
        assert_eq!(status, 200, "{body}: {v}");
        v
    }

    pub fn complete(&self, body: Value) -> Value {
        self.answer("/v1/completions", body)
    }

    pub fn chat(&self, body: Value) -> Value {
        self.answer("/v1/chat/completions", body)
    }

    /// Sends a request that has to be refused for a parameter, and returns the message.
    pub fn wrong(&self, param: &str, body: &Value) -> String {
        let (status, v) = self.post("/v1/chat/completions", body);
        assert_eq!((status, &v["error"]["param"]), (400, &json!(param)), "{v}");
        text(&v["error"]["message"]).into()
    }

    /// Asks for an answer as a stream, and returns the text of its events.
    pub fn streamed(&self, path: &str, body: &Value) -> Vec<String> {
        let mut body = body.clone();
        body["stream"] = true.into();
        let (status, head, text) = self.ask("POST", path, "", &body.to_string());
        assert!(status == 200 && head.contains("text/event-stream"), "{head}{text}");
        text.split("\n\n").filter(|e| !e.is_empty()).map(String::from).collect()
    }

    /// Asks for an answer as a stream, and returns its events without the last, `[DONE]`.
    pub fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let mut events = self.streamed(path, body);
        assert_eq!(events.pop().as_deref(), Some("data: [DONE]"));
        events.iter().map(|e| serde_json::from_str(e.strip_prefix("data: ").unwrap()).unwrap()).collect()
    }

    /// Asks the server to end, and returns its exit status and messages.
    pub fn terminate(mut self) -> (i32, String) {
        let child = self.child.take().unwrap();
        signal(&child, "TERM");
        let (code, _, err) = ended(child.wait_with_output().unwrap());
        (code, err)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
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

/// Joins the texts of events.
pub fn joined<'a>(events: &'a [Value], of: impl Fn(&'a Value) -> &'a Value) -> String {
    events.iter().filter_map(|e| of(e).as_str()).collect()
}

fn content(v: &Value) -> &str {
    text(&v["choices"][0]["message"]["content"])
}

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

fn schema_format(schema: &Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})
}

#[test]
fn answers_are_those_of_generate_alone_and_together() {
    let bundle = built("small", SHORT);
    let server = Server::of(&bundle, "--max-sequences 12");
    let prompts: Vec<String> =
        (0..8).map(|i| format!("def function_{i}(self, {}):\n", "x, ".repeat(i))).collect();
    let body = |prompt: &str| json!({"prompt": prompt, "max_tokens": 16, "temperature": 0});
    let generate = |p: &String| json(0, format!("generate {bundle} --prompt '{p}' -n 16"));
    let alone: Vec<String> = prompts.iter().map(|p| text(&generate(p)["text"]).into()).collect();
    let texts = |v: &Value| -> Vec<String> { each(&v["choices"], "text").map(String::from).collect() };
    std::thread::scope(|scope| {
        let ask = |i: usize| texts(&server.complete(body(&prompts[i]))).remove(0);
        let all: Vec<_> = (0..24).map(|i| (i % 8, scope.spawn(move || ask(i % 8)))).collect();
        for (i, thread) in all {
            assert_eq!(thread.join().unwrap(), alone[i], "{}", prompts[i]);
        }
    });
    let v = server.complete(json!({"prompt": prompts, "max_tokens": 16, "temperature": 0, "n": 1}));
    assert_eq!(texts(&v), alone);
    assert!(list(&v["choices"]).iter().enumerate().all(|(i, c)| c["index"] == i), "{v}");
    // The same seed gives the same text, whichever sequences run beside it.
    let seeded = json!({"prompt": prompts[0], "max_tokens": 16, "temperature": 1, "seed": 5, "n": 3});
    let first = texts(&server.complete(seeded.clone()));
    assert_eq!(first, texts(&server.complete(seeded)));
    assert_ne!(first[0], first[1]);
    // A stream has the same text in pieces, and reports its tokens.
    let mut streamed = body(&prompts[1]);
    streamed["stream_options"] = json!({"include_usage": true});
    let events = server.stream("/v1/completions", &streamed);
    assert_eq!(joined(&events, |e| &e["choices"][0]["text"]), alone[1]);
    let [.., ending, last] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!(
        json!([last["usage"]["completion_tokens"], ending["choices"][0]["finish_reason"]]),
        json!([16, "length"])
    );
    // Each piece has the offset of its token in the text.
    streamed["logprobs"] = 0.into();
    let events = server.stream("/v1/completions", &streamed);
    let mut end = 0;
    for logprobs in events.iter().map(|e| &e["choices"][0]["logprobs"]).filter(|l| l.is_object()) {
        assert_eq!(logprobs["text_offset"][0], end, "{logprobs}");
        end += text(&logprobs["tokens"][0]).chars().count();
    }
    assert_eq!(end, alone[1].chars().count());
    // Stop strings and probabilities.
    let stop: String = alone[1].chars().skip(8).take(3).collect();
    let mut stopped = body(&prompts[1]);
    (stopped["stop"], stopped["logprobs"]) = (json!(stop), json!(2));
    let choice = &server.complete(stopped)["choices"][0];
    assert_eq!(choice["text"], alone[1][..alone[1].find(&stop).unwrap()]);
    let logprobs = &choice["logprobs"];
    assert!(
        choice["finish_reason"] == "stop" && logprobs["token_logprobs"][0].as_f64() <= Some(0.0),
        "{choice}"
    );
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);
    let (status, metrics) = server.get("/metrics");
    assert!(status == 200 && metrics.contains("path=\"/v1/completions\",status=\"200\""), "{metrics}");
}

#[test]
fn a_chat_goes_on_from_its_last_turn_and_may_be_held_to_a_schema() {
    let server = Server::small("--max-sequences 4 --model-name m");
    let mut messages = vec![
        json!({"role": "system", "content": "import os, sys, re\n".repeat(8)}),
        json!({"role": "user", "content": "def f(x):"}),
    ];
    let body =
        |messages: &[Value]| json!({"model": "m", "messages": messages, "max_tokens": 12, "temperature": 0});
    let first = server.chat(body(&messages));
    messages.push(json!({"role": "assistant", "content": content(&first)}));
    messages.push(json!({"role": "user", "content": "def g(y):"}));
    let known = |v: &Value| count(&v["usage"]["prompt_tokens_details"]["cached_tokens"]);
    let second = server.chat(body(&messages));
    assert!(known(&second) >= count(&first["usage"]["prompt_tokens"]), "{second}");
    // A server that keeps no prefixes gives the same text.
    let fresh = Server::small("--max-sequences 2 --prefix-cache 0 --model-name m");
    assert_eq!(content(&fresh.chat(body(&messages[..2]))), content(&first));
    assert_eq!(known(&fresh.chat(body(&messages))), 0);
    // Several answers to one question share its tokens.
    let mut several = body(&messages[..2]);
    (several["n"], several["logprobs"], several["top_logprobs"]) = (4.into(), true.into(), 2.into());
    for choice in list(&server.chat(several)["choices"]) {
        assert_eq!(choice["message"]["content"], content(&first));
        let tokens = list(&choice["logprobs"]["content"]);
        assert_eq!(list(&tokens[0]["top_logprobs"]).len(), 2);
        let bytes = tokens.iter().flat_map(|t| list(&t["bytes"]));
        let bytes: Vec<u8> = bytes.map(|b| count(b) as u8).collect();
        assert_eq!(String::from_utf8_lossy(&bytes), content(&first));
    }
    let events = server.stream("/v1/chat/completions", &body(&messages[..2]));
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(joined(&events, |e| &e["choices"][0]["delta"]["content"]), content(&first));
    // A schema with a finite number of answers.
    let schema = json!({"type": "object", "required": ["name", "n", "ok"], "additionalProperties": false, "properties": {
        "name": {"enum": ["a", "b c"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}}});
    let ask = |format: Value, tokens: u64, seed: u64| {
        server.chat(
            json!({"messages": user("x"), "max_tokens": tokens, "seed": seed, "response_format": format}),
        )
    };
    for seed in 0..4 {
        let v = ask(schema_format(&schema), 60, seed);
        let answer: Value = serde_json::from_str(content(&v)).unwrap_or_else(|e| panic!("{e}: {v}"));
        assert!(count(&answer["n"]) < 100 && answer["ok"].is_boolean(), "{v}");
        assert_eq!(v["choices"][0]["finish_reason"], "stop");
    }
    let v = ask(json!({"type": "json_object"}), 5, 0);
    assert!(content(&v).starts_with('{'), "{v}");
}

#[test]
fn a_call_of_a_tool_is_one_in_the_answer() {
    let days = json!({"type": "integer", "minimum": 1, "maximum": 9});
    let tool = |name: &str| {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "required": ["days", "place"],
            "additionalProperties": false, "properties": {"place": {"enum": ["here", "there"]}, "days": days}}}})
    };
    let question = user("Weather?");
    let body = |choice: &Value| json!({"messages": question, "tools": [tool("weather"), tool("wind")], "tool_choice": choice, "max_tokens": 120, "seed": 1});
    // The marks of Gemma 4's calls as special tokens, in place of three that the model's texts do not use.
    let (plain, dir) = (built("small", SHORT), folder());
    copy(&small(), &dir.join("model"));
    let mut tokenizer = std::fs::read_to_string(small().join("tokenizer.json")).unwrap();
    for (old, mark) in
        [("<pad>", "<|\\\"|>"), ("<mask>", "<|tool_call>"), ("<start_of_turn>", "<tool_call|>")]
    {
        tokenizer = tokenizer.replace(&format!("\"{old}\""), &format!("\"{mark}\""));
    }
    std::fs::write(dir.join("model/tokenizer.json"), tokenizer).unwrap();
    let marks = dir.join("marks.anemoe");
    build(dir.join("model"), &marks, SHORT);
    let template =
        |name: &str| format!("--chat-template {}/{name}.jinja", root("crates/runtime/tests/chat_templates"));
    for (bundle, name) in [(&plain, "qwen3"), (&plain, "llama3"), (&marks, "gemma4")] {
        let server = Server::of(bundle, &template(name));
        let named = json!({"type": "function", "function": {"name": "wind"}});
        for (choice, names) in [(json!("required"), &["weather", "wind"][..]), (named, &["wind"])] {
            let v = server.chat(body(&choice));
            let (reason, message) = (&v["choices"][0]["finish_reason"], &v["choices"][0]["message"]);
            assert!(reason == "tool_calls" && message["content"].is_null(), "{v}");
            let [call] = list(&message["tool_calls"]).as_slice() else { panic!("{v}") };
            let function = &call["function"];
            assert!(names.contains(&text(&function["name"])), "{v}");
            let arguments: Value = serde_json::from_str(text(&function["arguments"])).unwrap();
            assert!((1..=9).contains(&count(&arguments["days"])), "{v}");
            // The same call as a stream.
            let events = server.stream("/v1/chat/completions", &body(&choice));
            let deltas: Vec<&Value> = events.iter().map(|e| &e["choices"][0]["delta"]).collect();
            let called: Vec<&Value> = deltas.iter().filter_map(|d| d["tool_calls"].get(0)).collect();
            let [streamed] = called.as_slice() else { panic!("{events:?}") };
            assert_eq!((&streamed["index"], &streamed["function"]), (&json!(0), function));
            assert!(text(&streamed["id"]).starts_with("call_"));
            assert!(deltas.iter().all(|d| d["content"].as_str().is_none_or(str::is_empty)), "{events:?}");
            let reasons = events.iter().filter_map(|e| e["choices"][0]["finish_reason"].as_str());
            assert_eq!(reasons.collect::<Vec<_>>(), ["tool_calls"]);
            // The call and its result continue the conversation, as messages.
            let messages = json!([question[0], message, {"role": "tool", "content": "windy", "tool_call_id": call["id"]}]);
            let v = server.chat(json!({"messages": messages, "tools": [tool("wind")], "max_tokens": 4}));
            assert!(count(&v["usage"]["prompt_tokens"]) > 20, "{v}");
        }
        // Without a call, the answer is text as usual; without tools, no call is searched for.
        let schema = json!({"type": "object", "required": ["name", "parameters"], "additionalProperties": false,
            "properties": {"name": {"const": "wind"}, "parameters": {"type": "object", "additionalProperties": false}}});
        let v = server
            .chat(json!({"messages": question, "response_format": schema_format(&schema), "max_tokens": 60}));
        assert_eq!(content(&v), r#"{"name": "wind", "parameters": {}}"#);
        server.wrong("tool_choice", &body(&json!("always")));
        server.wrong("tool_choice", &body(&json!({"type": "function", "function": {"name": "rain"}})));
    }
    // A template whose form of calls is unknown: calls stay text, and none can be forced.
    let server = Server::of(&plain, &template("zaya"));
    server.wrong("tool_choice", &body(&json!("required")));
    assert!(server.chat(body(&json!("auto")))["choices"][0]["message"]["tool_calls"].is_null());
}

#[test]
fn what_other_servers_take_is_taken_or_answered_with_what_is_meant() {
    let template = root("crates/runtime/tests/chat_templates/qwen3.jinja");
    let server = Server::small(&format!("--chat-template {template} --max-tokens 3"));
    // A limit of -1 means all the room that is left, within the server's own limit.
    let v = server.chat(json!({"messages": user("x"), "max_tokens": -1, "top_k": -1, "ignore_eos": true}));
    assert_eq!(v["usage"]["completion_tokens"], 3, "{v}");
    // A variable of the template changes the prompt.
    let body =
        |variables: Value| json!({"messages": user("x"), "max_tokens": 1, "chat_template_kwargs": variables});
    let tokens = |variables: Value| count(&server.chat(body(variables))["usage"]["prompt_tokens"]);
    assert!(tokens(json!({"enable_thinking": false})) > tokens(json!({})));
    server.wrong("chat_template_kwargs", &body(json!({"messages": []})));
    for (path, says) in [
        ("/chat/completions", "/v1/chat/completions is"),
        ("/models", "/v1/models is"),
        ("/api/chat", "OpenAI's API: /v1/chat/completions"),
        ("/v1", "OpenAI's API"),
    ] {
        let (status, v) = server.post(path, &json!({}));
        assert!(status == 404 && text(&v["error"]["message"]).contains(says), "{path}: {v}");
    }
}

#[test]
fn a_stream_that_runs_alone_drafts_and_its_answer_stays_the_same() {
    let plain = Server::small("--max-sequences 4 --prefix-cache 0 --speculate off");
    let drafting = Server::small("--max-sequences 4 --prefix-cache 0 --speculate ngram --draft-max 6");
    let lines = "    self.name = name\n    self.value = value\n".repeat(3);
    let prompt = format!("def __init__(self, name, value):\n{lines}");
    for mut body in [
        json!({"temperature": 0, "max_tokens": 40, "ignore_eos": true}),
        json!({"temperature": 0, "max_tokens": 40, "logprobs": 2}),
        json!({"temperature": 0.8, "max_tokens": 40, "seed": 3}),
        json!({"temperature": 0, "max_tokens": 40, "stop": "value\n"}),
        json!({"temperature": 0, "max_tokens": 1}),
        json!({"temperature": 0, "max_tokens": 4000}),
    ] {
        body["prompt"] = prompt.clone().into();
        let [one, other] = [&plain, &drafting].map(|server| server.complete(body.clone()));
        assert_eq!((&one["choices"], &one["usage"]), (&other["choices"], &other["usage"]), "{body}");
    }
    assert_eq!(plain.counter("drafted_tokens"), 0);
    let right = drafting.counter("accepted_tokens");
    assert!(right > 8 && drafting.counter("drafted_tokens") >= right);
    assert!(drafting.counter("passes") < plain.counter("passes"));
    // A grammar checks each drafted token, and tokens that were cut back are not part of the next turn.
    let schema = json!({"type": "array", "items": {"const": "name name"}, "minItems": 6, "maxItems": 6});
    let body = json!({"messages": user(&prompt), "max_tokens": 200, "temperature": 0, "response_format": schema_format(&schema)});
    assert_eq!(content(&plain.chat(body.clone())), content(&drafting.chat(body)));
}

#[test]
fn few_streams_draft_together_with_a_drafter_and_their_answers_stay_the_same() {
    let coarse = built("small", "--max-context 512 --no-journal --quant lut4");
    let plain = Server::small("--speculate off");
    let options = "--speculate ngram --draft-max 3 --ngram-min 24";
    let drafting = Server::small(&format!("{options} --drafter {coarse}"));
    let bodies: Vec<Value> = (0..9)
        .map(|i| {
            let prompt = format!("class A{i}:\n    def __init__(self, value{i}):\n");
            json!({"prompt": prompt, "temperature": 0.2 * (i % 3) as f64, "seed": i, "max_tokens": 30 + i, "ignore_eos": true})
        })
        .collect();
    let answers = |server: &Server, streams: usize| -> Vec<Value> {
        let mut all = Vec::new();
        for bodies in bodies.chunks(streams) {
            std::thread::scope(|scope| {
                let running: Vec<_> =
                    bodies.iter().map(|body| scope.spawn(|| server.complete(body.clone()))).collect();
                all.extend(running.into_iter().map(|answer| answer.join().unwrap()["choices"].clone()));
            });
        }
        all
    };
    let expected = answers(&plain, 1);
    for streams in [1, 3, 9] {
        assert_eq!(answers(&drafting, streams), expected, "{streams} streams");
    }
    assert!(drafting.counter("drafter_accepted") > 100);
}

/// Head of a request for tokens, without the length of its body.
const POST: &str = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";

#[test]
fn what_is_wrong_gets_an_error_and_the_server_lives() {
    let server = Server::small("--max-sequences 4 --max-body 20000 --max-tokens 64 --client-timeout 1");
    for (body, status, says) in [
        (json!({"messages": user("x"), "model": "other"}), 404, "no model `other`"),
        (json!({"messages": []}), 400, "at least one message"),
        (json!({}), 400, "messages"),
        (json!({"messages": [{"role": "wizard", "content": "x"}]}), 400, "no role `wizard`"),
        (json!({"messages": user("x"), "temperature": -1}), 400, "temperature"),
        (json!({"messages": user("x"), "max_tokens": 65}), 400, "the most that this server gives"),
        (json!({"messages": user("x"), "tools": [{"type": "function"}]}), 400, "tools"),
        (
            json!({"messages": user("x"), "response_format": schema_format(&json!({"type": "nothing"}))}),
            400,
            "response_format",
        ),
        (json!({"messages": user(&"word ".repeat(1000))}), 400, "tokens > 512 maximum"),
        (json!({"prompt": []}), 400, "prompt"),
        (json!({"prompt": [99999]}), 400, "outside the vocabulary"),
        (json!({"prompt": {"a": 1}}), 400, "another type"),
        (json!({"prompt": "x".repeat(30_000)}), 413, "20000 bytes"),
        (json!({"path": "/v1/embeddings"}), 400, "no embeddings"),
        (json!({"path": "/v1/nothing"}), 404, "nothing at this path"),
        (json!({"path": "/v1/models"}), 405, "another method"),
    ] {
        let path = match (body["path"].as_str(), body["prompt"].is_null()) {
            (Some(path), _) => path,
            (_, true) => "/v1/chat/completions",
            (_, false) => "/v1/completions",
        };
        let (found, v) = server.post(path, &body);
        assert_eq!(found, status, "{path} {body}: {v}");
        assert!(text(&v["error"]["message"]).contains(says) && v["error"]["type"].is_string(), "{says}: {v}");
    }
    let schema = schema_format(&json!({"type": "string", "pattern": "(".repeat(10_000)}));
    server.wrong("response_format", &json!({"messages": user("x"), "response_format": schema}));
    server.complete(json!({"prompt": ""}));
    let (status, _, body) =
        server.ask("POST", "/v1/completions", "", "{\"prompt\": \"x\", \"temperature\": NaN}");
    assert!(status == 400 && body.contains("not valid JSON"), "{body}");
    assert_eq!((server.get("/v1/models/b").0, server.get("/v1/models/..%2f..").0), (200, 404));
    let (_, page) = server.get("/");
    assert!(page.contains("<!doctype html>") && !page.contains("http://") && !page.contains("https://"));
    // Requests that are not HTTP, lie about their length, or stop half-way.
    let started = Instant::now();
    for bytes in [
        "\r\n\r\n\r\n".to_string(),
        "GET / HTTP/9.9\r\n\r\n".into(),
        "\u{0}\u{1}\u{2}".into(),
        format!("{POST}content-length: -5\r\n\r\n"),
        format!("{POST}content-length: 99999999999999999999\r\n\r\n"),
        format!("{POST}content-length: 100000000\r\n\r\n{{"),
        format!("{POST}content-length: 5\r\ncontent-length: 6\r\n\r\n{{}}"),
        format!("{POST}content-length: 50\r\n\r\n{{\"prompt\""),
        format!("{POST}transfer-encoding: chunked\r\n\r\nzz\r\n"),
        format!("{POST}content-length: 3\r\nconnection: close\r\n\r\n\u{fffd}"),
        format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(600_000)),
        format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(5000)),
    ] {
        let mut stream = server.connect();
        let _ = stream.write_all(bytes.as_bytes());
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        assert!(!answer.starts_with("HTTP/1.1 200"), "{bytes:.200}: {answer}");
    }
    assert!(started.elapsed() < Duration::from_secs(40));
    // A body that does not come, with the connection open.
    let answer = server.raw(format!("{POST}content-length: 50\r\n\r\n{{\"prompt\"").as_bytes());
    assert!(answer.contains("408") && answer.contains("took too long"), "{answer}");
    // A head that does not come.
    let waited = Instant::now();
    assert!(server.raw(b"GET /health HTTP/1.1\r\nhost: localhost\r\n").is_empty());
    assert!(waited.elapsed() < Duration::from_secs(15));
    // Clients that leave while their answer comes.
    let body = json!({"prompt": "def f", "max_tokens": 64, "stream": true, "ignore_eos": true}).to_string();
    for _ in 0..20 {
        let mut stream = server.connect();
        write!(stream, "{POST}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
        stream.read_exact(&mut [0; 32]).unwrap();
    }
    wait_for("end of jobs", || server.health("jobs") == 0);
    assert_eq!(server.terminate().0, 0);
}

#[test]
fn keys_and_origins_are_checked() {
    let keys = folder().join("keys");
    std::fs::write(&keys, "\u{feff}secret-1\n# ours\n\nsecret-2\r\n").unwrap();
    let bundle = built("small", SHORT);
    let server = Server::of(&bundle, &format!("--max-sequences 1 --api-key-file {keys} --cors http://here"));
    let models = |headers: &str| server.ask("GET", "/v1/models", headers, "");
    for wrong in ["", "authorization: Bearer secret-3\r\n", "authorization: Bearer # ours\r\n"] {
        assert_eq!(models(wrong).0, 401);
    }
    let from =
        |origin: &str| models(&format!("authorization: Bearer secret-2\r\norigin: http://{origin}\r\n"));
    let (status, head, _) = from("here");
    assert!(status == 200 && head.contains("access-control-allow-origin: http://here"), "{head}");
    assert!(!from("there").1.contains("access-control"));
    let preflight = "origin: http://here\r\naccess-control-request-headers: authorization,x-stainless-os\r\n";
    let (status, head, _) = server.ask("OPTIONS", "/v1/models", preflight, "");
    let allowed = "access-control-allow-headers: authorization,x-stainless-os";
    assert!(status == 204 && head.contains(allowed), "{head}");
    assert_eq!((server.get("/health").0, server.get("/").0, server.get("/metrics").0), (200, 200, 401));
    std::fs::write(&keys, "# none\n").unwrap();
    for (options, says) in [
        (format!("--port 0 --api-key-file {keys}"), &["no key"][..]),
        (format!("--port {}", server.port()), &["cannot listen at", "--port 0"]),
        ("--host nowhere".into(), &["--host"]),
        ("--cors http://here/".into(), &["--cors", "SCHEME://HOST"]),
    ] {
        refused(format!("serve {bundle} {options}"), says);
    }
}

#[test]
fn requests_too_many_are_refused_and_running_ones_end_well() {
    let server = Server::small("--max-sequences 1 --max-queue 1");
    let body =
        json!({"prompt": "def f", "max_tokens": 400, "stream": true, "ignore_eos": true, "temperature": 0})
            .to_string();
    let post = format!("{POST}connection: close\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let mut running = server.connect();
    running.write_all(post.as_bytes()).unwrap();
    running.read_exact(&mut [0; 32]).unwrap();
    let mut waiting = server.connect();
    waiting.write_all(post.as_bytes()).unwrap();
    wait_for("waiting job", || server.health("jobs") == 2);
    let (status, v) = server.post("/v1/completions", &json!({"prompt": ["x", "y"], "n": 2, "max_tokens": 1}));
    assert!(status == 400 && v["error"]["param"] == "n", "{v}");
    let (status, v) = server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 1}));
    assert!(status == 429 && v["error"]["code"] == "queue_full", "{v}");
    // Both running answers are complete when the server ends.
    let (code, messages) = server.terminate();
    assert!(code == 0 && messages.contains("closing"), "{messages}");
    for mut stream in [running, waiting] {
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.contains("data: [DONE]") && text.contains("\"finish_reason\":\"length\""), "{text}");
    }
}
