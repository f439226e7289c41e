use super::call_syntax::CallSyntax;
use super::*;
use anemoe_text::chat::ChatTemplate;
use serde_json::{Value, json};
use std::path::Path;

fn form_of(text: &str) -> Option<CallForm> {
    let config = json!({"bos_token": "<bos>", "eos_token": "<eos>"});
    CallForm::of(&ChatTemplate::new(text, config.as_object().unwrap(), Path::new("x.jinja")).unwrap())
}

fn form(template: &str) -> Option<CallForm> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../runtime/tests/chat_templates").join(template);
    form_of(&std::fs::read_to_string(path).unwrap())
}

/// Makes the form of a template that writes `before` and `behind` a call, where `NAME` stands for its name and `PARAMS`
/// for its arguments in JSON.
fn form_as(call: &str) -> Option<CallForm> {
    let call = call
        .replace("NAME", "{{ c.function.name }}")
        .replace("PARAMS", "{{ c.function.arguments | tojson }}");
    form_of(&format!(
        "{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}{{% for m in messages %}}<|{{{{ m.role }}}}|>{{{{ m.content }}}}\
         {{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}<|end|>{{% endfor %}}"
    ))
}

fn mistral() -> CallForm {
    form_as("[TOOL_CALLS] [{\"name\": \"NAME\", \"arguments\": PARAMS, \"id\": \"{{ c.id }}\"}]").unwrap()
}

fn coder() -> CallForm {
    form_as("<tool_call>\n<function=NAME>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>")
        .unwrap()
}

fn tagged() -> CallForm {
    form("qwen3.jinja").unwrap()
}

fn gemma() -> CallForm {
    form("gemma4.jinja").unwrap()
}

fn tool(name: &str, properties: Value) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}})
}

/// Tools of the tests; a property's name tells its type.
fn tools() -> Vec<Value> {
    let properties = json!({
        "q": {"type": "string"}, "r": {"type": "string"}, "n": {"type": "integer"}, "x": {"type": "number"},
        "on": {"type": "boolean"}, "list": {"type": "array", "items": {"type": "string"}},
        "numbers": {"type": "array", "items": {"type": "integer"}}, "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "word": {"type": ["string", "null"]}, "CAPITALS": {"type": "INTEGER"}, "o": {"$ref": "#/$defs/inner"}, "kind": {"enum": ["1", "a b"]}, "any": {},
    });
    let mut first = tool("f", properties);
    first["function"]["parameters"]["$defs"] = json!({"inner": {"type": "object", "properties": {"k": {"type": "string"}, "n": {"type": "integer"}}}});
    let mut second = tool("g", json!({"a": {"type": "string"}}));
    second["function"]["parameters"]["required"] = json!(["a"]);
    vec![first, second, json!({"type": "function", "function": {"name": "a-b.c"}})]
}

#[test]
fn forms_are_found_in_templates() {
    let json = |open: &str, close: &str, key: &str| CallSyntax::Json {
        around: (open.into(), close.into()),
        key: key.into(),
    };
    let made = |begin: &str, end: Option<&str>, syntax| CallForm {
        begins: vec![begin.into()],
        end: end.map(String::from),
        syntax,
    };
    assert_eq!(tagged(), made("<tool_call>", Some("</tool_call>"), json("\n", "\n", "arguments")));
    assert_eq!(form("llama3.jinja"), Some(made("<|python_tag|>", None, json("", "", "parameters"))));
    let braces = CallSyntax::Braces { word: "call:".into(), quote: "<|\"|>".into() };
    assert_eq!(gemma(), made("<|tool_call>", Some("<tool_call|>"), braces));
    assert_eq!(mistral(), made("[TOOL_CALLS]", None, json(" [", "]", "arguments")));
    let named = |between: &str| CallSyntax::Named { between: between.into() };
    assert_eq!(form_as("[TOOL_CALLS]NAME[ARGS]PARAMS"), Some(made("[TOOL_CALLS]", None, named("[ARGS]"))));
    assert_eq!(coder(), made("<tool_call>", Some("</tool_call>"), CallSyntax::Tags));
    let list = form_as("<|tool_call|>[{\"name\": \"NAME\", \"arguments\": PARAMS}]<|/tool_call|>");
    assert_eq!(list, Some(made("<|tool_call|>", Some("<|/tool_call|>"), json("[", "]", "arguments"))));
    let harmony = form_as(" to=functions.NAME<|channel|>commentary json<|message|>PARAMS<|call|>").unwrap();
    assert_eq!(harmony.end_tag(), Some("<|call|>"));
    // As gpt-oss's own template writes messages.
    let channels = form_of(
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.tool_calls %}\
         {% set c = m.tool_calls[0].function %}<|start|>assistant to={{ 'functions.' + c.name }}<|channel|>commentary json\
         <|message|>{{ c.arguments | tojson }}<|call|>{% elif m.role == 'assistant' %}\
         <|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% else %}\
         <|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}",
    );
    assert_eq!(channels, Some(harmony));
    for none in ["gemma3.jinja", "zaya.jinja"] {
        assert_eq!(form(none), None, "{none}");
    }
    assert_eq!(form_as("NAME with PARAMS"), None);
}

/// Joins neighbouring texts.
fn joined(parts: impl IntoIterator<Item = AnswerPart>) -> Vec<AnswerPart> {
    let mut all: Vec<AnswerPart> = Vec::new();
    for part in parts {
        match (all.last_mut(), part) {
            (Some(AnswerPart::Text(text)), AnswerPart::Text(more)) => text.push_str(&more),
            (_, part) => all.push(part),
        }
    }
    all
}

/// Returns all parts of an answer that arrives in these pieces.
fn parts(form: &CallForm, pieces: &[&str]) -> Vec<AnswerPart> {
    let mut parser = CallParser::new(form.clone(), &tools());
    let come = pieces.iter().flat_map(|p| parser.push(p)).collect::<Vec<_>>();
    joined(come.into_iter().chain(parser.finish(false)))
}

/// Checks the parts of an answer for every way to cut it in three pieces.
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

/// Checks the calls, as name and arguments, that whole answers make; `None` stays text.
fn check_all<'t>(form: &CallForm, rows: impl IntoIterator<Item = (&'t str, Option<Value>)>) {
    for (written, read) in rows {
        let got = parts(form, &[written]);
        let calls: Vec<Value> = got
            .iter()
            .filter_map(|part| match part {
                AnswerPart::Call(c) => {
                    Some(json!([c.name, serde_json::from_str::<Value>(&c.arguments).unwrap()]))
                }
                AnswerPart::Text(_) | AnswerPart::Thought(_) => None,
            })
            .collect();
        match read {
            Some(read) => assert_eq!(
                (Value::from(calls), got.len()),
                (read.clone(), read.as_array().unwrap().len()),
                "{written}"
            ),
            None => assert_eq!(got, [text(written)], "{written}"),
        }
    }
}

#[test]
fn tagged_calls_are_found_wherever_pieces_are_cut() {
    let form = tagged();
    let one = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"q\": \"Kö<\"}}\n</tool_call>";
    check(&form, one, &[call("f", r#"{"q":"Kö<"}"#)]);
    let two = format!("So:\n\n{one}\n<tool_call>{{\"name\":\"f\"}}</tool_call> x");
    check(&form, &two, &[text("So:"), call("f", r#"{"q":"Kö<"}"#), call("f", "{}"), text(" x")]);
    // Arguments as a text, and an answer that ends without the end tag.
    let open = r#"<tool_call>{"name": "f", "arguments": "{\"n\": 1}"}"#;
    check(&form, open, &[call("f", r#"{"n":1}"#)]);
    check(
        &gemma(),
        "So: <|tool_call>call:f{q:<|\"|>K{ö,\"<|\"|>,n:1}<tool_call|>",
        &[text("So:"), call("f", r#"{"q":"K{ö,\"","n":1}"#)],
    );
    check(
        &gemma(),
        "<|tool_call>call:f{q:Oslo}\n<|tool_call>call:f{n:1}",
        &[call("f", r#"{"q":"Oslo"}"#), call("f", r#"{"n":1}"#)],
    );
    check(&gemma(), "So: call:f{n:1}<tool_call|>", &[text("So:"), call("f", r#"{"n":1}"#)]);
    check(&tagged(), "So: {\"name\": \"f\"}</tool_call>", &[text("So:"), call("f", "{}")]);
    for (inner, before) in [("</tool_call>", ""), ("a\\\"</tool_call></tool_call> b", "So: ")] {
        let written =
            format!("{before}<tool_call>{{\"name\":\"f\",\"arguments\":{{\"q\":\"{inner}\"}}}}</tool_call>");
        let read = call("f", &format!("{{\"q\":\"{inner}\"}}"));
        let words = (!before.is_empty()).then(|| text("So:"));
        check(&tagged(), &written, &words.into_iter().chain([read]).collect::<Vec<_>>());
    }
    check(
        &tagged(),
        "<tool_call>{\"name\":\"f\",\"arguments\":{\"q\":\"x}}</tool_call> \"y\" <tool_call>{\"name\":\"f\"}</tool_call>",
        &[call("f", r#"{"q":"x"}"#), text(" \"y\""), call("f", "{}")],
    );
    check(
        &tagged(),
        "So:\n```json\n<tool_call>{\"name\":\"f\"}</tool_call>\n```\nx\n```",
        &[text("So:"), call("f", "{}"), text("\nx\n```")],
    );
    check(&tagged(), "```py\n<tool_call>h</tool_call>\n```", &[text("```py\n<tool_call>h</tool_call>\n```")]);
    let long = "<|tool_call>call:f{n:12345678901234567890123,any:[-12345678901234567890123]}<tool_call|>";
    let read = r#"{"n":12345678901234567890123,"any":[-12345678901234567890123]}"#;
    check(&gemma(), long, &[call("f", read)]);
    check(&gemma(), "So: call:f{n:1}", &[text("So: call:f{n:1}")]);
    check(&gemma(), "So:\n call:f{n:1}<tool_call|>.", &[text("So:"), call("f", r#"{"n":1}"#), text(".")]);
}

#[test]
fn what_is_no_call_stays_text() {
    for same in [
        "a < b, <tool_cal> and <tool_",
        "words \n",
        "<tool_call>{\"name\": 1}</tool_call>.",
        "<tool_call>\n{\"name\": \"f\", \"argum",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {",
        "<tool_call>not JSON</tool_call>",
        "<tool_call>{\"name\": \"unknown\", \"arguments\": {}}</tool_call>",
        "{\"name\": \"Ann\", \"arguments\": 1}",
        "Write {\"name\": \"f\", \"arguments\": {}}",
        "```rust\nfn f() {}\n```",
        "",
    ] {
        let expected = if same.is_empty() { vec![] } else { vec![text(same)] };
        check(&tagged(), same, &expected);
    }
    // What cannot be a call is not held back.
    let mut parser = CallParser::new(tagged(), &tools());
    for piece in ["So ", "{x", "<tool_call>x", "\n{\"a\"", "\n```py\nx", "\nThe"] {
        assert_eq!(joined(parser.push(piece)).len(), 1, "{piece}");
    }
    assert_eq!(parser.finish(false), []);
}

#[test]
fn a_bare_call_is_the_whole_answer_and_of_a_known_tool() {
    let form = form("llama3.jinja").unwrap();
    check(
        &form,
        "\n{\"name\": \"f\", \"parameters\": {\"numbers\": [1]}}\n",
        &[call("f", r#"{"numbers":[1]}"#)],
    );
    let rows = [
        (
            "<|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": {\"n\": \"1\"}}",
            Some(json!([["f", {"n": 1}]])),
        ),
        (
            "{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {\"a\": \"x\"}}",
            Some(json!([["f", {}], ["g", {"a": "x"}]])),
        ),
        ("{\"function\": {\"name\": \"f\", \"arguments\": {\"n\": 2}}}", Some(json!([["f", {"n": 2}]]))),
        ("```json\n{\"name\": \"f\", \"parameters\": {\"n\": 1}}\n```", Some(json!([["f", {"n": 1}]]))),
        (r#"{"name": "h", "parameters": {}}"#, None),
        (r#"{"name": "f"}"#, None),
        (r#"{"name": "f", "parameters": {}} and more"#, None),
        (r#"So {"name": "f", "parameters": {}}"#, None),
        ("{", None),
    ];
    check_all(&form, rows);
}

#[test]
fn arguments_in_braces_are_read_as_models_write_them() {
    let form = gemma();
    let in_tags = |inner: &str| format!("<|tool_call>{inner}<tool_call|>");
    for (written, read) in [
        ("call:f{}", json!([["f", {}]])),
        ("call:f", json!([["f", {}]])),
        ("call:g{a:None}", json!([["g", {"a": "None"}]])),
        (r#"call:f{q:<|"|>x"}"#, json!([["f", {"q": "x"}]])),
        (r#"call:f{any:<|"|>x"}"#, json!([["f", {"any": "x"}]])),
        (r#"call:f{q:"x<|"|>}"#, json!([["f", {"q": "x"}]])),
        (r#"call:f{q:<|"|>x'}"#, json!([["f", {"q": "x"}]])),
        (r#"call:f{q:"x'}"#, json!([["f", {"q": "x"}]])),
        (r#"call:f{q:'x"}"#, json!([["f", {"q": "x"}]])),
        (r#"call:f{q:x',r:it's}"#, json!([["f", {"q": "x'", "r": "it's"}]])),
        ("call:f{q:\"\"\"tri\"\"\",r:'''a'''}", json!([["f", {"q": "tri", "r": "a"}]])),
        (r#"call:f{q:<|"|>a<|"|> r:<|"|>b<|"|>}"#, json!([["f", {"q": "a", "r": "b"}]])),
        (r#"call:f{list:("a","b"),n:1}"#, json!([["f", {"list": ["a", "b"], "n": 1}]])),
        ("call:f{q:None,r:null,n:None,any:None,x:1}", json!([["f", {"any": null, "x": 1}]])),
        ("call:f{maybe:NaN,q:NaN}", json!([["f", {"maybe": null, "q": "NaN"}]])),
        (
            r#"call:a-b.c{x:{y:[1,-2.5e3,true,null,<|"|>z<|"|>]},w:[]}"#,
            json!([["a-b.c", {"x": {"y": [1, -2.5e3, true, null, "z"]}, "w": []}]]),
        ),
        (
            r#" call:f { <|"|>k 1<|"|> : "a\"b" , q: New York } "#,
            json!([["f", {"k 1": "a\"b", "q": "New York"}]]),
        ),
        ("call:f{n:1}call:g{a:b}", json!([["f", {"n": 1}], ["g", {"a": "b"}]])),
        // Missing marks.
        (r#"call:f{q:weather in Oslo<|"|>}"#, json!([["f", {"q": "weather in Oslo"}]])),
        (r#"call:f{q:wet, cold<|"|>,r:<|"|>b<|"|>}"#, json!([["f", {"q": "wet, cold", "r": "b"}]])),
        (r#"call:f{q:<|"|>weather in Oslo}"#, json!([["f", {"q": "weather in Oslo"}]])),
        (r#"call:f{q:<|"|>Oslo,r:<|"|>b<|"|>}"#, json!([["f", {"q": "Oslo", "r": "b"}]])),
        (
            r#"call:f{list:[<|"|>Rome,<|"|>Oslo<|"|>,a b<|"|>]}"#,
            json!([["f", {"list": ["Rome", "Oslo", "a b"]}]]),
        ),
        ("call:f{q:Rome, Italy}", json!([["f", {"q": "Rome, Italy"}]])),
        (
            "call:f{q:Rome, note: a, r: see http://x.y/{z}, n: 2}",
            json!([["f", {"q": "Rome, note: a", "r": "see http://x.y/{z}", "n": 2}]]),
        ),
        (
            "call:f{o:{k:a, b,n:1},q:print({x}) + 1}",
            json!([["f", {"o": {"k": "a, b", "n": 1}, "q": "print({x}) + 1"}]]),
        ),
        (r#"call:f{q:weather in Oslo",r:<|"|>a b"}"#, json!([["f", {"q": "weather in Oslo", "r": "a b"}]])),
        (r#"call:f{q:"weather in Oslo<|"|>,r:"a b}"#, json!([["f", {"q": "weather in Oslo", "r": "a b"}]])),
        ("call: f{q=Rome, x=1, n=2}", json!([["f", {"q": "Rome", "x": 1, "n": 2}]])),
        // Quotation marks of other languages.
        (
            "call:f{list:['Rome','Oslo'],o:{k:'v'}}",
            json!([["f", {"list": ["Rome", "Oslo"], "o": {"k": "v"}}]]),
        ),
        (
            "call:f{q:'it's \\'so\\'',any:['a', \"b\", 'c, d']}",
            json!([["f", {"q": "it's 'so'", "any": ["a", "b", "c, d"]}]]),
        ),
        ("call:f{list:[Rome, Oslo,],'n':\"3\",}", json!([["f", {"list": ["Rome", "Oslo"], "n": 3}]])),
        (
            "call:f{\"q\":\"a\\u00e9\\n\\\"\",\"on\":True,\"maybe\":None}",
            json!([["f", {"q": "aé\n\"", "on": true, "maybe": null}]]),
        ),
        // Types of the schema.
        (
            "call:f{q:5,n:<|\"|>7<|\"|>,x:\"2.50\",on:'true',kind:1}",
            json!([["f", {"q": "5", "n": 7, "x": 2.5, "on": true, "kind": "1"}]]),
        ),
        (
            "call:f{n:3.0,x:4,maybe:05,numbers:['1', 2],any:7,q:true}",
            json!([["f", {"n": 3, "x": 4, "maybe": 5, "numbers": [1, 2], "any": 7, "q": "true"}]]),
        ),
        (
            "call:f{list:<|\"|>['a','b']<|\"|>,o:\"{'n': '1'}\",n:many}",
            json!([["f", {"list": ["a", "b"], "o": {"n": 1}, "n": "many"}]]),
        ),
        ("call:f{q:['a','b'],n:1}", json!([["f", {"q": ["a", "b"], "n": 1}]])),
        ("call:f{q:[1] of {2} things,n:1}", json!([["f", {"q": "[1] of {2} things", "n": 1}]])),
        // Ends that are missing, or one too many.
        ("call:f{q:Oslo", json!([["f", {"q": "Oslo"}]])),
        ("call:f{list:['a','b'}", json!([["f", {"list": ["a", "b"]}]])),
        ("call:f{any:[{k:'v'],q:x}", json!([["f", {"any": [{"k": "v"}], "q": "x"}]])),
        ("call:f{list:[a,b", json!([["f", {"list": ["a", "b"]}]])),
        ("call:f{{q:'Oslo'}}", json!([["f", {"q": "Oslo"}]])),
        ("call:f{n:1}}", json!([["f", {"n": 1}]])),
        ("f{n:1}", json!([["f", {"n": 1}]])),
        ("```json\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n```", json!([["f", {"n": 1}]])),
    ] {
        let written = in_tags(written);
        check_all(&form, [(written.as_str(), Some(read))]);
    }
    let deep = format!("call:f{{any:{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    for same in [
        "",
        "call:g",
        "call:f{x:NaN}",
        "call:f{",
        "call:f{a}",
        "call:f{a:}",
        "call:f{:1}",
        "call:{a:1}",
        "call:h{a:1}",
        "call:f{n} b:1}",
        "call:f{n:1} and",
        "call:f{q:a} and",
        "call:g{",
        "call:g{b:1",
        r#"call:f{q:<|"|>a <|"|>b<|"|> c<|"|>}"#,
        &deep,
    ] {
        let written = in_tags(same);
        check_all(&form, [(written.as_str(), None)]);
    }
}

#[test]
fn objects_are_read_as_models_write_them() {
    let whole = |inner: &str| format!("<tool_call>\n{inner}\n</tool_call>");
    for (written, read) in [
        (
            "{'name': 'f', 'arguments': {'q': 'it\\'s', 'on': True, 'any': None}}",
            json!([["f", {"q": "it's", "on": true, "any": null}]]),
        ),
        (
            "{\"name\": \"f\", \"arguments\": {\"q\": \"say \"hi\" now\", \"n\": \"1\",}}",
            json!([["f", {"q": "say \"hi\" now", "n": 1}]]),
        ),
        ("{{\"name\": \"f\", \"arguments\": {{\"q\": \"x\"}}}}", json!([["f", {"q": "x"}]])),
        ("{\"name\": \"f\", \"arguments\": {\"q\": \"x\"}", json!([["f", {"q": "x"}]])),
        ("{\"name\": \"f\", \"arguments\": {\"q\": \"x\"}}}", json!([["f", {"q": "x"}]])),
        ("{\"name\": \"f\", \"arguments\": {\"q\": \"two\nlines\"}}", json!([["f", {"q": "two\nlines"}]])),
        (
            "{\"name\": \"f\", \"arguments\": {\"q\": Rome, Italy, \"n\": 2}}",
            json!([["f", {"q": "Rome, Italy", "n": 2}]]),
        ),
        ("{\"name\": \"functions.f\", \"parameters\": \"{'n': 2}\"}", json!([["f", {"n": 2}]])),
        ("{\"arguments\": {\"n\": 2}, \"name\": \"f\"}", json!([["f", {"n": 2}]])),
        (r#"{"name":"f","args":{"n":"2"}}"#, json!([["f", {"n": 2}]])),
        (r#"{"name":"f","input":{"q":"x"},"id":"1"}"#, json!([["f", {"q": "x"}]])),
        (r#"{"name":"f","q":5,"n":"2"}"#, json!([["f", {"q": "5", "n": 2}]])),
        (r#"{"name":"f","arguments":{"q":"x"},"n":2,"index":0}"#, json!([["f", {"q": "x", "n": 2}]])),
        (r#"{"name":"f","arguments":""}"#, json!([["f", {}]])),
        (
            "[{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"f\", \"arguments\": null}]",
            json!([["f", {}], ["f", {}]]),
        ),
        ("{\"name\": \"f\", \"arguments\": {}}\n{\"name\": \"f\"}", json!([["f", {}], ["f", {}]])),
        ("```json\n{\"name\": \"f\", \"arguments\": {}}\n```", json!([["f", {}]])),
        ("<function=f>\n<parameter=q>\nx < 1\n</parameter>\n</function>", json!([["f", {"q": "x < 1"}]])),
        ("f\n{\"n\": 1}", json!([["f", {"n": 1}]])),
        ("f(q=\"a, (b)\", n=2, list=['x'])", json!([["f", {"q": "a, (b)", "n": 2, "list": ["x"]}]])),
        ("f({\"n\": 1})", json!([["f", {"n": 1}]])),
        ("f()", json!([["f", {}]])),
    ] {
        let written = whole(written);
        check_all(&tagged(), [(written.as_str(), Some(read))]);
    }
    check_all(
        &tagged(),
        [
            ("{\"name\": \"f\", \"arguments\": {\"n\": 1}}</tool_call>", Some(json!([["f", {"n": 1}]]))),
            (
                "<tool_call>{\"name\": \"f\"}<tool_call>{\"name\": \"f\", \"arguments\": {\"n\": 1}}",
                Some(json!([["f", {}], ["f", {"n": 1}]])),
            ),
            ("<tool_call>{\"name\": \"f\", \"arguments\": {\"n\": {}}</tool_call", None),
            ("<tool_call>{\"name\": \"f\", \"arguments\": 3}</tool_call>", None),
            (r#"<tool_call>{"name":"f","q":"x","other":1}</tool_call>"#, None),
            (r#"<tool_call>{"name":"g","arguments":""}</tool_call>"#, None),
        ],
    );
    check_all(
        &mistral(),
        [
            (
                "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"n\": 1}, \"id\": \"abcdefghi\"}, {\"name\": \"g\", \"arguments\": {\"a\": \"]\"}}]",
                Some(json!([["f", {"n": 1}], ["g", {"a": "]"}]])),
            ),
            (
                "[TOOL_CALLS]f[ARGS]{\"n\": 1}[TOOL_CALLS]g{\"a\": \"x\"}",
                Some(json!([["f", {"n": 1}], ["g", {"a": "x"}]])),
            ),
            ("[TOOL_CALLS] and [TOOL_CALLS", None),
        ],
    );
    check_all(
        &coder(),
        [
            (
                "<tool_call>\n<function=f>\n<parameter=q>\n{1, \"2\"}\n\n</parameter>\n<parameter=n>\n 5\n</parameter>\n<parameter=list>\n['a']\n</parameter>\n</function>\n</tool_call>",
                Some(json!([["f", {"q": "{1, \"2\"}\n", "n": 5, "list": ["a"]}]])),
            ),
            (
                "<function=f>\n<parameter=n>5</parameter>\n<parameter=q>x\n</function>\n</tool_call>",
                Some(json!([["f", {"n": 5, "q": "x"}]])),
            ),
            (
                "<function=f>\n<parameter=q>\nnull\n</parameter>\n<parameter=word>\nnull\n</parameter>\n</function>",
                Some(json!([["f", {"q": "null", "word": null}]])),
            ),
            ("<tool_call>\n<function=f>\n<parameter=q>\nx", Some(json!([["f", {"q": "x"}]]))),
            (
                "<function=f>\n<parameter=CAPITALS>\n5\n</parameter>\n</function>",
                Some(json!([["f", {"CAPITALS": 5}]])),
            ),
            ("<function=h>\n</function>", None),
        ],
    );
    let harmony = form_as(" to=functions.NAME<|channel|>commentary json<|message|>PARAMS<|call|>").unwrap();
    for between in ["", " json", " code", " <|constrain|>json", " <|constrain|>json ", "<|constrain|>json"] {
        for (recipient, end) in [("functions.f", "<|call|>"), ("f", "")] {
            let written =
                format!("<|channel|>commentary to={recipient}{between}<|message|>{{\"q\":\"x\"}}{end}");
            check_all(&harmony, [(written.as_str(), Some(json!([["f", {"q": "x"}]])))]);
        }
    }
    check_all(
        &harmony,
        [
            (
                "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"n\": 1}<|call|>",
                Some(json!([["f", {"n": 1}]])),
            ),
            (
                "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{\"n\": 1}",
                Some(json!([["f", {"n": 1}]])),
            ),
            (
                "<|channel|>commentary to=functions.f<|message|>{\"n\": 1}<|start|>assistant<|channel|>commentary to=functions.g<|message|>{\"a\":\"x\"}",
                Some(json!([["f", {"n": 1}], ["g", {"a": "x"}]])),
            ),
            ("<|channel|>commentary to=functions.h<|message|>{}", None),
        ],
    );
}

#[test]
fn calls_in_another_form_than_the_template_s_are_read() {
    let named = form_as("[TOOL_CALLS]NAME[ARGS]PARAMS").unwrap();
    for form in [gemma(), tagged(), mistral(), coder(), named, form("llama3.jinja").unwrap()] {
        for written in [
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"q\": \"x\"}}</tool_call>",
            "<|tool_call>call:f{q:<|\"|>x<|\"|>}<tool_call|>",
            "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"q\": \"x\"}}",
            "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"q\": \"x\"}}]",
            "[TOOL_CALLS]f[ARGS]{\"q\": \"x\"}",
            "<tool_call>\n<function=f>\n<parameter=q>\nx\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>f(q=\"x\")</tool_call>",
            "call:f(q=<|\"|>x<|\"|>)",
            "call:f{q=<|\"|>x<|\"|>}",
            "call:f({\"q\":\"x\"})",
        ] {
            check_all(&form, [(written, Some(json!([["f", {"q": "x"}]])))]);
        }
        for same in ["<tool_call>{\"name\": \"h\"}</tool_call>", "[TOOL_CALLS] x", "<|python_tag|>h{}"] {
            check_all(&form, [(same, None)]);
        }
    }
}

#[test]
fn a_cut_answer_has_whole_calls_alone_and_a_single_call_ends_it() {
    let cut = |text: &str| {
        let mut parser = CallParser::new(gemma(), &tools());
        let come = parser.push(text);
        joined(come.into_iter().chain(parser.finish(true)))
    };
    assert_eq!(cut("<|tool_call>call:f{n:1}"), [call("f", "{\"n\":1}")]);
    assert_eq!(cut("<|tool_call>call:f{q:Os"), []);
    let mut parser = CallParser::new(gemma(), &tools()).single();
    let come =
        parser.push("x <|tool_call>call:f{n:1}call:f{n:2}<tool_call|> y <|tool_call>call:f{n:3}<tool_call|>");
    assert_eq!(joined(come.into_iter().chain(parser.finish(false))), [text("x"), call("f", "{\"n\":1}")]);
}

#[test]
fn what_has_come_of_a_cut_call_is_no_text() {
    let cut = |form: &CallForm, is_forced: bool, text: &str| {
        let parser = CallParser::new(form.clone(), &tools());
        let mut parser = if is_forced { parser.forced() } else { parser };
        let come = parser.push(text);
        joined(come.into_iter().chain(parser.finish(true)))
    };
    for (form, written) in [
        (tagged(), "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 12"),
        (coder(), "<tool_call>\n<function=f>\n<parameter=n>\n12\n</param"),
        (gemma(), "<|tool_call>call:f{n:12"),
        (mistral(), "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"n\": 12"),
    ] {
        for end in 1..=written.len() {
            let begun = &written[..end];
            assert_eq!(cut(&form, false, &format!("so {begun}")), [text("so")], "{begun}");
            assert_eq!(cut(&form, true, begun), [], "{begun}");
        }
    }
    let llama = form("llama3.jinja").unwrap();
    let written = "{\"name\": \"f\", \"parameters\": {\"n\": 12";
    assert_eq!(cut(&llama, false, written), []);
    for end in 1..=written.len() {
        assert_eq!(cut(&llama, true, &written[..end]), []);
    }
    for same in
        ["{\"id\": 3, \"name\": \"Bob", "{\"name\": \"Bob", "1 < 2, [a", "x {\"name\": \"f\", \"n\": 1"]
    {
        assert_eq!(cut(&llama, false, same), [text(same)]);
    }
}

#[test]
fn any_text_is_read_in_linear_time_and_alike_in_any_pieces() {
    let forms = [gemma(), tagged(), mistral(), coder(), form("llama3.jinja").unwrap()];
    let words = [
        "<|tool_call>",
        "<tool_call|>",
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "call:",
        "f",
        "{",
        "}",
        "[",
        "]",
        "<|\"|>",
        "'",
        "\"",
        "\\",
        "q",
        "n",
        ":",
        ",",
        " ",
        "\n",
        "```",
        "{\"name\": \"f\", \"arguments\": ",
        "<function=f>",
        "<parameter=q>",
        "</parameter>",
        "ö",
        "1",
        "null",
        "<",
    ];
    // Numbers of a linear congruential generator.
    let mut seed = 7u64;
    let mut next = |n: usize| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as usize % n
    };
    for _ in 0..2000 {
        let text: String = (0..next(30)).map(|_| words[next(words.len())]).collect();
        let whole: Vec<Vec<AnswerPart>> = forms.iter().map(|form| parts(form, &[&text])).collect();
        let mut pieces: Vec<&str> = Vec::new();
        let mut rest = text.as_str();
        while let Some((i, _)) = rest.char_indices().nth(1 + next(6)) {
            let (piece, behind) = rest.split_at(i);
            (rest, pieces) = (behind, [pieces, vec![piece]].concat());
        }
        pieces.push(rest);
        for (form, whole) in forms.iter().zip(whole) {
            assert_eq!(parts(form, &pieces), whole, "{pieces:?}");
        }
    }
    for word in [
        "<",
        "{",
        "{q:'",
        "```",
        "<|\"|>,",
        ",\"b",
        "['a",
        "{a:b,",
        "}, ",
        "<parameter=q>",
        "\n{\"name\": ",
        "f{",
        " ,",
    ] {
        for begin in [
            "",
            "<|tool_call>call:f{q:",
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"any\": [",
            "<tool_call><function=f>",
        ] {
            let text = format!("{begin}{}", word.repeat(300_000 / word.len()));
            for form in &forms[..2] {
                let started = std::time::Instant::now();
                parts(form, &[&text]);
                // Some 30 ms; quadratic time would be minutes.
                assert!(started.elapsed().as_secs() < 5, "{begin}{word}: {:?}", started.elapsed());
            }
        }
    }
}
