//! Compares chat templates in the form of five families with the results of Hugging Face transformers
//! (`xtask/oracle/chat_templates.py`). `CHAT_TEMPLATES=DIR` tests another folder of templates with its goldens.

use anemoe_text::chat::ChatTemplate;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

#[test]
fn templates_render_as_in_transformers() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../runtime/tests/chat_templates");
    let folder = std::env::var_os("CHAT_TEMPLATES").map_or(own, PathBuf::from);
    let goldens = std::fs::read(folder.join("goldens.json")).unwrap();
    let goldens: Vec<Value> = serde_json::from_slice(&goldens).unwrap();
    let config: Map<String, Value> =
        serde_json::from_value(json!({"bos_token": {"content": "<bos>"}, "eos_token": "<eos>"})).unwrap();
    assert!(goldens.len() >= 50);
    let mut wrong = Vec::new();
    for golden in &goldens {
        let path = folder.join(golden["template"].as_str().unwrap());
        let text = std::fs::read_to_string(&path).unwrap();
        let mut template = ChatTemplate::new(&text, &config, &path).unwrap();
        template.set("date_string", "26 Jul 2024".into());
        let case = &golden["case"];
        if let Some(thinking) = case.get("enable_thinking") {
            template.set("enable_thinking", thinking.clone());
        }
        let messages = case["messages"].as_array().unwrap();
        let tools = case.get("tools").and_then(Value::as_array).map(Vec::as_slice);
        let answer = case["add_generation_prompt"].as_bool().unwrap();
        let rendered = template.render(messages, tools, answer);
        if rendered.as_ref().ok().map(String::as_str) != golden["text"].as_str() {
            wrong.push(format!(
                "{} {}: {rendered:?} and not {}",
                golden["template"], golden["name"], golden["text"]
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
