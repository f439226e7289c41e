use super::*;
use serde_json::json;

/// Makes a template whose only special token is `<s>`.
fn template(text: &str) -> Result<ChatTemplate> {
    let mut config = Map::new();
    config.insert("bos_token".into(), "<s>".into());
    ChatTemplate::new(text, &config, Path::new("t.jinja"))
}

#[test]
fn a_template_that_is_wrong_says_where() {
    let e = template("one\n{% for m in messages %}").err().unwrap().to_string();
    assert!(e.contains("t.jinja") && e.contains("chat template") && e.contains("line"), "{e}");
    let fails = |text: &str| template(text).unwrap().render(&[message("user", "x")], None, true).unwrap_err();
    assert!(fails("{{ raise_exception('only users') }}").to_string().contains("only users (line 1)"));
    assert!(fails("{{ messages[0].no.where }}").to_string().contains("has no attribute 'no'"));
    assert!(fails("{{ messages | nofilter }}").to_string().contains("nofilter"));
    assert!(fails("{{ strftime_now('%!') }}").to_string().contains("strftime_now"));
}

#[test]
fn a_template_without_end_is_stopped() {
    let endless = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
    assert!(template(endless).unwrap().render(&[], None, true).is_err());
    let deep = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
    assert!(template(deep).unwrap().render(&[], None, true).is_err());
    let late = template("x").unwrap().render_until(&[], None, true, &Map::new(), Some(Instant::now()));
    assert!(late.unwrap_err().to_string().contains("chat template: takes longer than the time that is left"));
}

#[test]
fn answers_begin_as_the_template_writes_them_without_a_generation_prompt() {
    let t =
        template("{{ bos_token }}{% for m in messages %}<a>{{ m.role }}\n{{ m.content }}<b>\n{% endfor %}")
            .unwrap();
    let question = [message("user", "q")];
    assert_eq!(t.render(&question, None, true).unwrap(), "<s><a>user\nq<b>\n<a>assistant\n");
    assert_eq!(t.render(&question, None, false).unwrap(), "<s><a>user\nq<b>\n");
    assert_eq!(t.turn_end, "<b>\n");
    let t = template(
        "{% for m in messages %}{{ m.content }}|{% endfor %}{% if add_generation_prompt %}>{% endif %}",
    )
    .unwrap();
    assert_eq!(t.render(&question, None, true).unwrap(), "q|>");
    // Mistral's template writes a blank before an answer: it is part of the answer.
    let t = template(
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
    )
    .unwrap();
    assert_eq!(t.render(&question, None, true).unwrap(), "[INST] q [/INST]");
}

#[test]
fn an_answer_begins_inside_thoughts_that_the_prompt_opens() {
    let question = [message("user", "q")];
    for text in [
        "{{ messages[0].content }}{% if add_generation_prompt %}<a><think>\n{% endif %}",
        "{{ messages[0].content }}<a><think>\n",
        "{{ messages[0].content ~ add_generation_prompt }}<a><think>\n",
    ] {
        let t = template(text).unwrap();
        let prompt = t.render(&question, None, true).unwrap();
        let beginning = t.beginning_of_answer(&prompt, &question, None, &Map::new()).unwrap();
        let mut splitter = ThoughtSplitter::new(&beginning);
        let pieces =
            [crate::chat::AnswerPiece::Thought("so".into()), crate::chat::AnswerPiece::Text("4".into())];
        assert_eq!(splitter.push("so</think>4"), pieces, "{text}");
    }
}

#[test]
fn line_ends_are_those_of_jinja() {
    // `trim_blocks` takes the line end behind each tag, also a lone \r.
    let t = template("{% for m in messages %}\r\n<a>\r\n{{ m.content }}\r\n{% endfor %}\r|").unwrap();
    assert_eq!(t.render(&[message("user", "q\r")], None, false).unwrap(), "<a>\nq\r\n|");
}

#[test]
fn the_plain_template_writes_roles_as_words() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(CONFIG_FILE), r#"{"bos_token": "<s>"}"#).unwrap();
    let t = ChatTemplate::open(folder.path(), None).unwrap();
    assert!(t.is_fallback() && t.stop_strings() == [FALLBACK_STOP]);
    let messages =
        [message("system", "S"), message("user", "a"), message("assistant", "b"), message("user", "c")];
    let text = t.render(&messages, None, true).unwrap();
    assert_eq!(text, "<s>S\n\nUser: a\nAssistant: b\nUser: c\nAssistant:");
    let config = r#"{"bos_token": "<s>", "add_bos_token": false}"#;
    std::fs::write(folder.path().join(CONFIG_FILE), config).unwrap();
    let unstarted = ChatTemplate::open(folder.path(), None).unwrap().render(&messages, None, true).unwrap();
    assert_eq!(format!("<s>{unstarted}"), text);
}

#[test]
fn a_file_goes_before_the_bundles_templates() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let text = |file: Option<&Path>| {
        ChatTemplate::open(folder.path(), file).and_then(|t| t.render(&[], None, false))
    };
    let named = json!({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "config"}]});
    std::fs::write(at(CONFIG_FILE), format!("\u{feff}{named}")).unwrap();
    assert_eq!(text(None).unwrap(), "config");
    // Hermes has another template for tools.
    let both = ChatTemplate::open(folder.path(), None).unwrap();
    assert!(both.takes_tools() && both.render(&[], Some(&[json!({})]), true).unwrap() == "t");
    std::fs::write(at(TEMPLATE_FILE), "{# of the model #}jinja").unwrap();
    assert_eq!(text(None).unwrap(), "jinja");
    std::fs::write(at("own.jinja"), "\u{feff}own").unwrap();
    assert_eq!(text(Some(&at("own.jinja"))).unwrap(), "own");
    assert!(text(Some(&at("none.jinja"))).unwrap_err().to_string().contains("none.jinja"));
    std::fs::remove_file(at(TEMPLATE_FILE)).unwrap();
    for (template, rendered) in [
        (json!({"default": "object", "tool_use": "t"}), "object"),
        (json!([{"name": "rag", "template": "first"}, {"name": "tool_use", "template": "t"}]), "first"),
        (json!([]), ""),
        (json!({}), ""),
    ] {
        std::fs::write(at(CONFIG_FILE), json!({"chat_template": template}).to_string()).unwrap();
        assert_eq!(text(None).unwrap(), rendered, "{template}");
    }
    for wrong in [json!(3), json!([1]), json!({"default": null})] {
        std::fs::write(at(CONFIG_FILE), json!({"chat_template": wrong}).to_string()).unwrap();
        assert!(text(None).unwrap_err().to_string().contains("chat_template: neither"), "{wrong}");
    }
    std::fs::write(at(CONFIG_FILE), "[1]").unwrap();
    assert!(text(None).unwrap_err().to_string().contains(CONFIG_FILE));
}
