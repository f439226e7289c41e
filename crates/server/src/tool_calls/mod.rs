//! Tool calls in the text of an answer.
//!
//! ```text
//! Tagged   some words <tool_call>{"name": "f", "arguments": {..}}</tool_call> <tool_call>..     Qwen, Hermes
//! Braces   some words <|tool_call>call:f{key:<|"|>text<|"|>,n:[1,true]}<tool_call|>             Gemma 4
//! Bare     {"name": "f", "parameters": {..}}                                                    Llama 3; the whole answer
//! ```
//!
//! The form of a model is found by rendering a marker call with its template. Templates that write calls in another way
//! have no form here: their calls stay text.

mod braces;
mod call_form;
mod parser;

pub use call_form::CallForm;
pub use parser::CallParser;

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// Name of the tool.
    pub name: String,
    /// Arguments as JSON text.
    pub arguments: String,
}

/// Part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// Text for the user.
    Text(String),
    /// A tool call.
    Call(ToolCall),
}

#[cfg(test)]
mod tests {
    use super::call_form::CallSyntax;
    use super::*;
    use anemoe_runtime::chat::ChatTemplate;
    use serde_json::json;
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
        let json = |blank: &str, key: &str| CallSyntax::Json { blank: blank.into(), key: key.into() };
        assert_eq!(tagged(), CallForm { tags: Some(tags), syntax: json("\n", "arguments") });
        assert_eq!(form("llama3.jinja"), Some(CallForm { tags: None, syntax: json("", "parameters") }));
        let tags = ("<|tool_call>".to_string(), "<tool_call|>".to_string());
        let gemma = form("gemma4.jinja").unwrap();
        assert_eq!(gemma.tags, Some(tags));
        assert!(matches!(&gemma.syntax, CallSyntax::Braces(calls) if calls.quote() == "<|\"|>"), "{gemma:?}");
        for none in ["gemma3.jinja", "zaya.jinja"] {
            assert_eq!(form(none), None, "{none}");
        }
    }

    /// Returns all parts of an answer that arrives in these pieces, neighbouring texts joined.
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

    #[test]
    fn tagged_calls_are_found_wherever_pieces_are_cut() {
        let form = tagged();
        let one = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"p\": \"Kö<\"}}\n</tool_call>";
        check(&form, one, &[call("f", r#"{"p":"Kö<"}"#)]);
        let two = format!("So:\n\n{one}\n<tool_call>{{\"name\":\"g\"}}</tool_call> x");
        check(&form, &two, &[text("So:"), call("f", r#"{"p":"Kö<"}"#), call("g", "{}"), text(" x")]);
        // Arguments as a text, and an answer that ends without the end tag.
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
        // Plain words are not held back.
        let mut parser = CallParser::new(form, vec![]);
        assert_eq!(parser.push("So "), [text("So ")]);
        assert_eq!(parser.push("{"), [text("{")]);
    }

    #[test]
    fn calls_in_braces_are_found_wherever_pieces_are_cut() {
        let form = form("gemma4.jinja").unwrap();
        let one = r#"<|tool_call>call:f{p:<|"|>K{ö,"<|"|>,n:1}<tool_call|>"#;
        check(&form, &format!("So: {one}"), &[text("So:"), call("f", r#"{"p":"K{ö,\"","n":1}"#)]);
        let mut open = one.to_string();
        open.truncate(one.find("<tool_call|>").unwrap());
        check(&form, &open, &[call("f", r#"{"p":"K{ö,\"","n":1}"#)]);
    }

    #[test]
    fn values_in_braces_are_read_as_models_write_them() {
        let form = form("gemma4.jinja").unwrap();
        for (written, read) in [
            ("call:f{}", vec![("f", "{}")]),
            (
                r#"call:a-b.c{x:{y:[1,-2.5e3,true,null,<|"|>z<|"|>]},w:[]}"#,
                vec![("a-b.c", r#"{"x":{"y":[1,-2.5e3,true,null,"z"]},"w":[]}"#)],
            ),
            // Marks around keys, JSON's quotation marks, blanks, and words without marks.
            (
                r#" call:f { <|"|>k 1<|"|> : "a\"b" , city: New York } "#,
                vec![("f", r#"{"k 1":"a\"b","city":"New York"}"#)],
            ),
            ("call:f{a:1}call:g{b:2}", vec![("f", r#"{"a":1}"#), ("g", r#"{"b":2}"#)]),
        ] {
            let got = form.read(written).unwrap_or_else(|| panic!("{written}"));
            let got: Vec<(&str, serde_json::Value)> =
                got.iter().map(|c| (c.name.as_str(), serde_json::from_str(&c.arguments).unwrap())).collect();
            let read: Vec<(&str, serde_json::Value)> =
                read.into_iter().map(|(name, json)| (name, serde_json::from_str(json).unwrap())).collect();
            assert_eq!(got, read, "{written}");
        }
        let deep = format!("call:f{{a:{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        for same in [
            "",
            "call:f",
            "call:f{",
            "call:f{a}",
            "call:f{a:}",
            "call:f{a:1",
            "call:f{:1}",
            "f{a:1}",
            "call:{a:1}",
            "call:f{a} b:1}",
            "call:f{a:1} and",
            r#"call:f{a:<|"|>b}"#,
            &deep,
        ] {
            assert_eq!(form.read(same), None, "{}", &same[..same.len().min(40)]);
        }
    }
}
