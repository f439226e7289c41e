//! The chat template of a model: what its `tokenizer_config.json` or `chat_template.jinja` makes of messages.

use super::python::environment;
use super::{message, prompt_text};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use anemoe_io::memory_budget;
use minijinja::Environment;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// File of a template alone, which goes before `tokenizer_config.json`.
const TEMPLATE_FILE: &str = "chat_template.jinja";
const CONFIG_FILE: &str = "tokenizer_config.json";
/// Largest file that is read; templates with tools have about 20 kB, a configuration with all special tokens some MB.
const MAX_BYTES: u64 = 64 << 20;
/// Most bytes of a template: those of published ones have up to 50 kB.
const MAX_TEMPLATE_BYTES: usize = 256 << 10;
/// Stack of the thread that compiles a template, whose expressions lie in each other as deep as its text is long.
const COMPILING_STACK: usize = 512 << 20;
/// Memory that a template may take for a conversation, besides the conversation.
const MAX_MEMORY: usize = 256_000_000;
/// Name of the template in its environment.
const NAME: &str = "chat";
/// Special tokens that templates name, by their keys in `tokenizer_config.json`.
const SPECIAL_TOKENS: [&str; 6] =
    ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"];
/// Roles as words, for models without a template.
const FALLBACK: &str = "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}

{% else %}{% if m.role == 'user' %}User{% elif m.role == 'assistant' %}Assistant{% else %}{{ m.role }}{% endif %}: {{ m.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}";
/// Text that ends an answer of [`FALLBACK`].
const FALLBACK_STOP: &str = "\nUser:";
/// An answer that stands in no other text, to see what a template puts around answers.
const MARK: &str = "MARKOFANANSWER";

/// A template with the special tokens that it names.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Variables besides messages and tools.
    variables: Map<String, Value>,
    path: PathBuf,
    is_fallback: bool,
    /// The template names `tools`.
    takes_tools: bool,
    /// Text before an answer, where the template does not know `add_generation_prompt`.
    before_answer: Option<String>,
    /// Token that ends an answer, as text, where it is one token.
    turn_end: String,
}

/// Compiles a template, the only one of its environment.
fn compiled(text: String) -> std::result::Result<Environment<'static>, String> {
    let compile = move || {
        let mut environment = environment();
        let added = environment.add_template_owned(NAME, text);
        added.map(|()| environment).map_err(|e| in_words(&e).to_string())
    };
    let thread = std::thread::Builder::new().stack_size(COMPILING_STACK).spawn(compile);
    let thread = thread.map_err(|e| format!("no thread to compile it: {e}"))?;
    thread.join().unwrap_or_else(|_| Err("the library that reads it failed".into()))
}

impl ChatTemplate {
    /// The template of a bundle: that of `file`, else of `chat_template.jinja`, else of `tokenizer_config.json`, else a plain one
    /// with roles as words.
    ///
    /// # Errors
    /// A file cannot be read, or the template in it is wrong.
    pub fn open(bundle: &Path, file: Option<&Path>) -> Result<ChatTemplate> {
        let config_path = bundle.join(CONFIG_FILE);
        let config: Map<String, Value> = match config_path.symlink_metadata() {
            Ok(_) => {
                let text =
                    anemoe_io::read_input(&config_path, MAX_BYTES).map_err(|e| Error::io(&config_path, e))?;
                anemoe_io::json::parse(&text)
                    .map_err(|e| Error::invalid(&config_path, format!("JSON: {e}")))?
            }
            Err(_) => Map::new(),
        };
        let own = bundle.join(TEMPLATE_FILE);
        let own = own.symlink_metadata().is_ok().then_some(own);
        if let Some(path) = file.map(Path::to_path_buf).or(own) {
            let text = anemoe_io::read_text(&path, MAX_BYTES).map_err(|e| Error::io(&path, e))?;
            return ChatTemplate::new(&text, &config, &path);
        }
        match config.get("chat_template") {
            None | Some(Value::Null) => {
                let mut template = ChatTemplate::new(FALLBACK, &config, &config_path)?;
                template.is_fallback = true;
                Ok(template)
            }
            Some(template) => {
                let text = template_text(template).ok_or_else(|| {
                    Error::invalid(
                        &config_path,
                        "chat_template: neither a text nor a list with a template named `default`",
                    )
                })?;
                ChatTemplate::new(text, &config, &config_path)
            }
        }
    }

    /// A template from its text and a `tokenizer_config.json`; `path` names it in errors.
    ///
    /// # Errors
    /// It is no template.
    pub fn new(text: &str, config: &Map<String, Value>, path: &Path) -> Result<ChatTemplate> {
        // As Jinja does.
        let text = &text.replace("\r\n", "\n").replace('\r', "\n");
        let wrong = |what: String| Error::invalid(path, format!("chat template: {what}"));
        if text.len() > MAX_TEMPLATE_BYTES {
            return Err(wrong(format!("{} bytes, more than {MAX_TEMPLATE_BYTES}", text.len())));
        }
        let takes_tools = text.contains("tools");
        let environment = compiled(without_generation_tags(text)).map_err(wrong)?;
        let mut variables = Map::new();
        for name in SPECIAL_TOKENS {
            let token = match config.get(name) {
                Some(Value::Object(token)) => token.get("content").cloned(),
                token => token.cloned(),
            };
            if let Some(token) = token.filter(Value::is_string) {
                variables.insert(name.into(), token);
            }
        }
        let mut template = ChatTemplate {
            environment,
            variables,
            path: path.to_path_buf(),
            is_fallback: false,
            takes_tools,
            before_answer: None,
            turn_end: String::new(),
        };
        template.look_around_answers();
        Ok(template)
    }

    /// Sets a variable of the template, such as `enable_thinking`.
    pub fn set(&mut self, name: &str, value: Value) {
        self.variables.insert(name.into(), value);
    }

    /// The bundle has no template, and this is the plain one.
    pub fn is_fallback(&self) -> bool {
        self.is_fallback
    }

    /// The template reads `tools`.
    pub fn takes_tools(&self) -> bool {
        self.takes_tools
    }

    /// Text of a conversation, with what begins an answer if `answer` is wanted.
    ///
    /// # Errors
    /// The template refuses the messages, or fails.
    pub fn render(&self, messages: &[Value], tools: Option<&[Value]>, answer: bool) -> Result<String> {
        self.render_with(messages, tools, answer, &Map::new())
    }

    /// The same with variables of one conversation, which go before those of the template.
    ///
    /// # Errors
    /// The template refuses the messages, or fails.
    pub fn render_with(
        &self,
        messages: &[Value],
        tools: Option<&[Value]>,
        answer: bool,
        own: &Map<String, Value>,
    ) -> Result<String> {
        let mut variables = self.variables.clone();
        variables.extend(own.clone());
        variables.insert("messages".into(), messages.into());
        variables.insert("tools".into(), tools.map_or(Value::Null, |t| t.into()));
        variables.insert("documents".into(), Value::Null);
        variables.insert("add_generation_prompt".into(), answer.into());
        let failed =
            |e: minijinja::Error| Error::invalid(&self.path, format!("chat template: {}", in_words(&e)));
        let template = self.environment.get_template(NAME).map_err(failed)?;
        let render = || template.render(variables);
        let mut text = memory_budget::within(MAX_MEMORY, "chat template", render).map_err(failed)?;
        if answer && let Some(before) = &self.before_answer {
            text += before;
        }
        Ok(text)
    }

    /// Finds what stands before and behind an answer.
    fn look_around_answers(&mut self) {
        let question = [message("user", "x")];
        let answered = [message("user", "x"), message("assistant", MARK)];
        let (Ok(open), Ok(asked), Ok(whole)) = (
            self.render(&question, None, false),
            self.render(&question, None, true),
            self.render(&answered, None, false),
        ) else {
            return;
        };
        let Some((before, behind)) = whole.split_once(MARK) else { return };
        if open == asked {
            // Blanks alone belong to the answer: transformers ends the prompt of Llama 2 and Mistral before them.
            let begin = before.strip_prefix(&open).filter(|t| !t.trim().is_empty());
            self.before_answer = begin.map(str::to_string);
        }
        self.turn_end = behind.trim_start().to_string();
    }

    /// Tokens that end an answer besides the model's own: the special token that the template puts behind one.
    pub fn end_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        prompt_text::first_special(tokenizer, &self.turn_end).into_iter().collect()
    }

    /// Texts that end an answer.
    pub fn stop_strings(&self) -> &[&str] {
        if self.is_fallback { &[FALLBACK_STOP] } else { &[] }
    }
}

/// The text of `chat_template`, or the one named `default` of several.
fn template_text(template: &Value) -> Option<&str> {
    match template {
        Value::String(text) => Some(text),
        Value::Array(all) => {
            let named = all.iter().find(|t| t.get("name").and_then(Value::as_str) == Some("default"));
            named?.get("template")?.as_str()
        }
        _ => None,
    }
}

/// Leaves out `{% generation %}` and its end, which mark answers for training and print nothing.
fn without_generation_tags(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let end = start + length + 2;
        let inner = rest[start + 2..end - 2].trim_matches(['-', '+']).trim();
        if inner == "generation" || inner == "endgeneration" {
            let tag = &rest[start..end];
            out.push_str(&rest[..start]);
            // A comment keeps what the tag does to the blanks around it.
            out.push_str(if tag.starts_with("{%-") { "{#-" } else { "{#" });
            out.push_str(if tag.ends_with("-%}") { "-#}" } else { "#}" });
        } else {
            out.push_str(&rest[..end]);
        }
        rest = &rest[end..];
    }
    out + rest
}

/// The message of a template's error, its line, and its causes.
fn in_words(e: &minijinja::Error) -> String {
    let mut text = match (e.detail(), e.kind()) {
        (Some(detail), minijinja::ErrorKind::InvalidOperation) => detail.to_string(),
        (Some(detail), kind) => format!("{kind}: {detail}"),
        (None, kind) => kind.to_string(),
    };
    if let Some(line) = e.line() {
        text += &format!(" (line {line})");
    }
    text
}

#[cfg(test)]
mod tests;
