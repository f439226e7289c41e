//! Renders templates for `xtask/oracle/jinja.py`: each line of standard input is `{"template": text, "variables": map}`, and each
//! line of output `{"text": text}` or `{"error": text}`.

use anemoe_runtime::chat::ChatTemplate;
use serde_json::{Map, Value, json};
use std::error::Error;
use std::io::BufRead;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    for line in std::io::stdin().lock().lines() {
        let mut case: Value = serde_json::from_str(&line?)?;
        let variables = case["variables"].as_object_mut().ok_or("no variables")?;
        let messages = match variables.remove("messages") {
            Some(Value::Array(messages)) => messages,
            _ => Vec::new(),
        };
        let tools = variables.remove("tools");
        let tools = tools.as_ref().and_then(Value::as_array).map(Vec::as_slice);
        let answer = variables.remove("add_generation_prompt") == Some(Value::Bool(true));
        let variables = std::mem::take(variables);
        let text = case["template"].as_str().ok_or("no template")?;
        let rendered = ChatTemplate::new(text, &Map::new(), Path::new("template"))
            .and_then(|template| template.render_until(&messages, tools, answer, &variables, None));
        println!(
            "{}",
            match rendered {
                Ok(text) => json!({"text": text}),
                Err(e) => json!({"error": e.to_string()}),
            }
        );
    }
    Ok(())
}
