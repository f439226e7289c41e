//! The chat template of a model, from `chat_template.jinja` or `tokenizer_config.json`.

use super::jinja::Jinja;
use super::{ThoughtSplitter, message, prompt_text};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// File of a template alone; read before `tokenizer_config.json`.
const TEMPLATE_FILE: &str = "chat_template.jinja";
const CONFIG_FILE: &str = "tokenizer_config.json";
/// Largest file that is read, in bytes: templates with tools have about 20 kB, a configuration with all special tokens some MB.
const MAX_BYTES: u64 = 64 << 20;
/// Largest template, in bytes: published ones have up to 50 kB.
const MAX_TEMPLATE_BYTES: usize = 256 << 10;
/// Special tokens that templates name, by their keys in `tokenizer_config.json`.
const SPECIAL_TOKENS: [&str; 6] =
    ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"];
/// The plain template, for models without one: roles as words.
const FALLBACK: &str = "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}

{% else %}{% if m.role == 'user' %}User{% elif m.role == 'assistant' %}Assistant{% else %}{{ m.role }}{% endif %}: {{ m.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}";
/// Text that ends an answer of [`FALLBACK`].
const FALLBACK_STOP: &str = "\nUser:";
/// Tokens that end a turn in the templates of published models. The files of a checkpoint often name only some of them.
const TURN_ENDS: &str = "<tool_response> <end_of_turn> <|im_end|> <|eot_id|> <|eom_id|> <|call|> <|return|> \
                         <|tool_response> <|end_of_text|> <|endoftext|>";
/// Keys of a message's thoughts in templates of published models.
const THOUGHT_KEYS: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];
/// Switches of thinking in templates of published models.
const THINKING: [&str; 2] = ["enable_thinking", "thinking"];
/// An answer whose text appears nowhere else, to find what a template puts around answers.
const MARK: &str = "MARKOFANANSWER";

/// A chat template with its special tokens.
pub struct ChatTemplate {
    program: Jinja,
    /// Template of conversations with tools, where it is another one.
    tool_use: Option<Jinja>,
    /// Variables besides messages and tools.
    variables: Map<String, Value>,
    path: PathBuf,
    is_fallback: bool,
    /// True if the template names `tools`.
    takes_tools: bool,
    /// Key of a message's thoughts; none where the template reads no thoughts.
    thought_key: Option<&'static str>,
    /// Text before an answer, where the template ignores `add_generation_prompt`.
    before_answer: Option<String>,
    /// Text behind an answer; a special token at its beginning ends answers.
    turn_end: String,
    /// Ends of a turn, of [`TURN_ENDS`], that the template writes.
    written_ends: Vec<&'static str>,
}

impl ChatTemplate {
    /// Opens the template of a bundle: `file`, else `chat_template.jinja`, else the template in `tokenizer_config.json`, else the
    /// plain template with roles as words.
    ///
    /// # Errors
    /// A file cannot be read, or the template is wrong.
    pub fn open(bundle: &Path, file: Option<&Path>) -> Result<ChatTemplate> {
        let config_path = bundle.join(CONFIG_FILE);
        let mut config: Map<String, Value> = match config_path.symlink_metadata() {
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
        let texts = match config.get("chat_template") {
            None | Some(Value::Null) => Vec::new(),
            Some(template) => named_texts(template).ok_or_else(|| {
                Error::invalid(&config_path, "chat_template: neither a text nor texts with names")
            })?,
        };
        let named = |name: &str| texts.iter().find(|(n, _)| *n == name).map(|(_, text)| *text);
        let Some(text) = named("default").or(texts.first().map(|(_, text)| *text)) else {
            // The plain template begins a conversation as any text.
            let has_bos = config.get("add_bos_token") != Some(&Value::Bool(false));
            config.retain(|key, _| has_bos || key != "bos_token");
            let template = ChatTemplate::new(FALLBACK, &config, &config_path)?;
            return Ok(ChatTemplate { is_fallback: true, ..template });
        };
        let own = ChatTemplate::new(text, &config, &config_path)?;
        let tool_use = named("tool_use").map(|text| parse(text, &config_path)).transpose()?;
        Ok(ChatTemplate { takes_tools: own.takes_tools || tool_use.is_some(), tool_use, ..own })
    }

    /// Makes a template from its text and the special tokens of a `tokenizer_config.json`; `path` names the template in errors.
    ///
    /// # Errors
    /// The text is no template, or too long.
    pub fn new(text: &str, config: &Map<String, Value>, path: &Path) -> Result<ChatTemplate> {
        let takes_tools = text.contains("tools");
        let program = parse(text, path)?;
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
            program,
            tool_use: None,
            variables,
            path: path.to_path_buf(),
            is_fallback: false,
            takes_tools,
            thought_key: THOUGHT_KEYS.into_iter().find(|key| reads_key(text, key)),
            before_answer: None,
            turn_end: String::new(),
            written_ends: TURN_ENDS.split(' ').filter(|end| text.contains(end)).collect(),
        };
        template.look_around_answers();
        // In harmony it ends a message of an answer, which goes on.
        if text.contains("<|channel|>") && template.turn_end.starts_with("<|end|>") {
            template.turn_end.clear();
        }
        Ok(template)
    }

    /// Sets a variable of the template, such as `enable_thinking`.
    pub fn set(&mut self, name: &str, value: Value) {
        self.variables.insert(name.into(), value);
    }

    /// Tells whether this is the plain template because the bundle has none.
    pub fn is_fallback(&self) -> bool {
        self.is_fallback
    }

    /// Tells whether the template reads `tools`.
    pub fn takes_tools(&self) -> bool {
        self.takes_tools
    }

    /// Renders a conversation to text; if `answer` is set, the text ends with the beginning of an answer.
    ///
    /// # Errors
    /// The template refuses the messages, or fails.
    pub fn render(&self, messages: &[Value], tools: Option<&[Value]>, answer: bool) -> Result<String> {
        self.render_until(messages, tools, answer, &Map::new(), None)
    }

    /// Renders a conversation like [`ChatTemplate::render`], with variables `own`, which replace the template's of the same name, up
    /// to a deadline.
    ///
    /// # Errors
    /// The template refuses the messages, fails, or takes too many steps, too much memory or time.
    pub fn render_until(
        &self,
        messages: &[Value],
        tools: Option<&[Value]>,
        answer: bool,
        own: &Map<String, Value>,
        deadline: Option<Instant>,
    ) -> Result<String> {
        let mut variables = self.variables.clone();
        variables.extend(own.clone());
        variables.insert("messages".into(), messages.into());
        variables.insert("tools".into(), tools.map_or(Value::Null, |t| t.into()));
        variables.insert("documents".into(), Value::Null);
        variables.insert("add_generation_prompt".into(), answer.into());
        let failed = |what| Error::invalid(&self.path, format!("chat template: {what}"));
        if let Some(program) = self.tool_use.as_ref().filter(|_| tools.is_some()) {
            return program.run(&variables, deadline).map_err(failed);
        }
        let mut text = self.program.run(&variables, deadline).map_err(failed)?;
        if answer && let Some(before) = &self.before_answer {
            text += before;
        }
        Ok(text)
    }

    /// Finds the texts that the template puts before and behind an answer.
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

    /// Returns the tokens that end an answer besides the model's own: the special token that the template puts behind an answer,
    /// and those that end a turn in published templates.
    pub fn end_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let known = TURN_ENDS.split(' ').filter_map(|name| tokenizer.id(name));
        prompt_text::first_special(tokenizer, &self.turn_end).into_iter().chain(known).collect()
    }

    /// Returns the variables that switch thinking on or off.
    pub fn thinking(on: bool) -> impl Iterator<Item = (String, Value)> {
        THINKING.into_iter().map(move |name| (name.to_string(), on.into()))
    }

    /// Returns the key of a message's thoughts; none where the template reads no thoughts.
    pub fn thought_key(&self) -> Option<&'static str> {
        self.thought_key
    }

    /// Returns the texts that end an answer: those of the template that end a turn, for models that write them in several tokens.
    pub fn stop_strings(&self) -> Vec<&'static str> {
        let fallback = self.is_fallback.then_some(FALLBACK_STOP);
        fallback.into_iter().chain(self.written_ends.iter().copied()).collect()
    }

    /// Returns the end of the prompt `text` of a conversation that belongs to the answer.
    ///
    /// # Errors
    /// The template fails.
    pub fn beginning_of_answer(
        &self,
        text: &str,
        messages: &[Value],
        tools: Option<&[Value]>,
        own: &Map<String, Value>,
    ) -> Result<String> {
        let asked = self.render_until(messages, tools, false, own, None)?;
        let begun = text.strip_prefix(&asked).filter(|begun| !begun.is_empty());
        Ok(begun.or_else(|| ThoughtSplitter::opened_by(text)).unwrap_or_default().to_string())
    }
}

/// Tells whether a template reads a key of an object: as `.key`, `'key'` or `"key"`.
fn reads_key(template: &str, key: &str) -> bool {
    template.match_indices(key).any(|(at, _)| {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        template[..at].ends_with(['.', '\'', '"']) && !template[at + key.len()..].starts_with(is_word)
    })
}

/// Returns the texts of a `chat_template` with their names: one text, or a list or an object of named ones.
fn named_texts(template: &Value) -> Option<Vec<(&str, &str)>> {
    match template {
        Value::String(text) => Some(vec![("default", text)]),
        Value::Array(list) => {
            list.iter().map(|entry| Some((entry["name"].as_str()?, entry["template"].as_str()?))).collect()
        }
        Value::Object(all) => all.iter().map(|(name, text)| Some((name.as_str(), text.as_str()?))).collect(),
        _ => None,
    }
}

/// Parses the text of a template; `path` names it in errors.
fn parse(text: &str, path: &Path) -> Result<Jinja> {
    let wrong = |what: String| Error::invalid(path, format!("chat template: {what}"));
    match text.len() {
        ..=MAX_TEMPLATE_BYTES => Jinja::parse(text).map_err(wrong),
        n => Err(wrong(format!("{n} bytes, more than {MAX_TEMPLATE_BYTES}"))),
    }
}

#[cfg(test)]
mod tests;
