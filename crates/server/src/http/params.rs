//! Parameters of requests: which are accepted, and how they are read.

use super::api_error::ApiError;
use anemoe_runtime::chat::SamplingDefaults;
use anemoe_runtime::sampler::{Sampling, SamplingSettings};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::hash::{BuildHasher, Hasher};

/// Most choices of a request.
const MOST_CHOICES: u64 = 8;
/// Most stop strings of a request.
const MOST_STOPS: usize = 16;
/// Highest temperature, as in OpenAI's API.
const HIGHEST_TEMPERATURE: f64 = 2.0;
/// Most alternatives to a token, as in OpenAI's API.
const MOST_LOGPROBS: u64 = 20;
/// Numeric parameters of other servers that would change an answer, with their neutral values.
const OTHER_NUMBERS: [(&str, f64); 11] = [
    ("repeat_penalty", 1.0),
    ("typical_p", 1.0),
    ("mirostat", 0.0),
    ("dry_multiplier", 0.0),
    ("xtc_probability", 0.0),
    ("min_tokens", 0.0),
    ("length_penalty", 1.0),
    ("no_repeat_ngram_size", 0.0),
    ("dynatemp_range", 0.0),
    ("tfs_z", 1.0),
    ("truncate_prompt_tokens", -1.0),
];
/// Switches of other servers that would change an answer, with their neutral values.
const OTHER_SWITCHES: [(&str, bool); 6] = [
    ("use_beam_search", false),
    ("include_stop_str_in_output", false),
    ("skip_special_tokens", true),
    ("add_special_tokens", true),
    ("continue_final_message", false),
    ("add_generation_prompt", true),
];
/// Formats, lists and texts of other servers that would change an answer.
const OTHER_FORMATS: [&str; 18] = [
    "grammar",
    "json_schema",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "regex",
    "ebnf",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "logits_processors",
    "prompt_logprobs",
    "samplers",
    "web_search_options",
    "chat_template",
    "documents",
];
/// Variables of a template that requests may not set.
const TEMPLATE_OWN: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// One text or several texts.
#[derive(Deserialize)]
#[serde(untagged, expecting = "neither a text nor a list of texts")]
enum OneOrMoreTexts {
    One(String),
    Several(Vec<String>),
}

/// Prompt of a completion.
#[derive(Deserialize)]
#[serde(untagged, expecting = "neither a text, nor a list of token ids, nor a list of either")]
pub enum Prompts {
    /// A text.
    Text(String),
    /// Token ids.
    Ids(Vec<u32>),
    /// Several texts.
    Texts(Vec<String>),
    /// Token ids of several prompts.
    AllIds(Vec<Vec<u32>>),
}

#[derive(Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// Body of `/v1/chat/completions` and `/v1/completions`. Unknown keys have no effect.
#[derive(Deserialize)]
pub struct Body {
    /// Name of the model.
    pub model: Option<String>,
    /// Messages of a chat.
    #[serde(default)]
    pub messages: Option<Vec<Value>>,
    /// Prompt of a completion.
    #[serde(default)]
    pub prompt: Option<Prompts>,
    /// Tools that the model may call.
    pub tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
    max_tokens: Option<i64>,
    max_completion_tokens: Option<i64>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    n: Option<u64>,
    best_of: Option<u64>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    stop: Option<OneOrMoreTexts>,
    seed: Option<i64>,
    logprobs: Option<Value>,
    top_logprobs: Option<u64>,
    response_format: Option<Value>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    logit_bias: Option<Map<String, Value>>,
    echo: Option<bool>,
    suffix: Option<String>,
    ignore_eos: Option<bool>,
    min_p: Option<f64>,
    repetition_penalty: Option<f64>,
    functions: Option<Value>,
    function_call: Option<Value>,
    audio: Option<Value>,
    modalities: Option<Value>,
}

/// Tools of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct OfferedTools<'a> {
    /// Tools that the model sees.
    pub shown: &'a [Value],
    /// Tools one of which the model must call; empty where it may answer with text.
    pub forced: Vec<&'a Value>,
}

impl OfferedTools<'_> {
    /// Returns the names of the tools.
    pub fn names(&self) -> Vec<String> {
        self.shown.iter().filter_map(|t| Some(t["function"]["name"].as_str()?.to_string())).collect()
    }
}

/// Parameters of both kinds of requests.
#[derive(Clone, Debug, PartialEq)]
pub struct Params {
    /// Most new tokens, where the request sets it.
    pub max_new: Option<usize>,
    /// Sampling: how tokens are chosen.
    pub sampling: Sampling,
    /// Number of answers to each prompt.
    pub choices: usize,
    /// Texts that end an answer.
    pub stops: Vec<String>,
    /// Number of alternatives reported with each token.
    pub logprobs: Option<usize>,
    /// True if tokens are sent as they come.
    pub stream: bool,
    /// True if a stream ends with token counts.
    pub include_usage: bool,
    /// JSON schema of the answer.
    pub schema: Option<Value>,
    /// True if the answer continues after end tokens.
    pub ignore_eos: bool,
}

impl Body {
    /// Parses a body.
    ///
    /// # Errors
    /// The body is not JSON, or a key has the wrong type.
    pub fn parse(bytes: &[u8]) -> Result<Body, ApiError> {
        let value: Value = anemoe_io::json::parse(bytes)
            .map_err(|e| ApiError::invalid(format!("the body is not valid JSON: {e}")))?;
        if !value.is_object() {
            return Err(ApiError::invalid("the body is not a JSON object"));
        }
        refuse_others(&value)?;
        serde_path_to_error::deserialize(value).map_err(|e| {
            let key = e.path().to_string();
            ApiError::param(key, format!("of another type: {}", in_words(&e.inner().to_string())))
        })
    }

    /// Returns the tools that the model may call, and those of which it must call one.
    ///
    /// # Errors
    /// A tool has no name, or the chosen tool does not exist.
    pub fn tools(&self) -> Result<OfferedTools<'_>, ApiError> {
        let shown = self.tools.as_deref().unwrap_or_default();
        for (i, tool) in shown.iter().enumerate() {
            let name = tool.pointer("/function/name").and_then(Value::as_str);
            if name.is_none_or(str::is_empty) {
                return Err(ApiError::param("tools", format!("tool {i} has no `function.name`")));
            }
            if tool.pointer("/function/parameters").is_some_and(|p| !p.is_object() && !p.is_null()) {
                let what = format!("tool {i}: `function.parameters` is not an object");
                return Err(ApiError::param("tools", what));
            }
        }
        let forced = match self.tool_choice.as_ref() {
            None | Some(Value::Null) => Vec::new(),
            Some(choice) if choice == "auto" => Vec::new(),
            Some(choice) if choice == "none" => return Ok(OfferedTools { shown: &[], forced: Vec::new() }),
            Some(choice) if choice == "required" => shown.iter().collect(),
            Some(choice) => {
                let name = choice.pointer("/function/name").and_then(Value::as_str).ok_or_else(|| {
                    let what = "neither \"auto\", \"none\", \"required\" nor a function by its name";
                    ApiError::param("tool_choice", what)
                })?;
                let named = shown.iter().find(|tool| tool["function"]["name"] == name);
                let missing = || format!("there is no tool `{}`", name.escape_debug());
                vec![named.ok_or_else(|| ApiError::param("tool_choice", missing()))?]
            }
        };
        if forced.is_empty() && self.tool_choice.as_ref().is_some_and(|choice| choice == "required") {
            return Err(ApiError::param("tool_choice", "there are no tools"));
        }
        Ok(OfferedTools { shown, forced })
    }

    /// Returns the template variables that this request sets, such as `enable_thinking`.
    ///
    /// # Errors
    /// A variable is one that only the server sets.
    pub fn template_variables(&self) -> Result<Map<String, Value>, ApiError> {
        let variables = self.chat_template_kwargs.clone().unwrap_or_default();
        match variables.keys().find(|key| TEMPLATE_OWN.contains(&key.as_str())) {
            Some(key) => {
                Err(ApiError::param("chat_template_kwargs", format!("`{key}` is set by the server")))
            }
            None => Ok(variables),
        }
    }

    /// Checks the parameters; `own` are the model's values for parameters that the request leaves out.
    ///
    /// # Errors
    /// A parameter is out of range or not supported.
    pub fn params(&self, own: &SamplingDefaults, is_chat: bool) -> Result<Params, ApiError> {
        self.refuse_unsupported()?;
        let max_new = match self.max_completion_tokens.or(self.max_tokens) {
            // Like llama.cpp's server: as many as fit.
            Some(-1) => None,
            Some(..=0) => {
                return Err(ApiError::param("max_tokens", "at least 1 is needed, or -1 for all that fit"));
            }
            Some(n) => Some(usize::try_from(n).unwrap_or(usize::MAX)),
            // The default of OpenAI's API.
            None if !is_chat => Some(16),
            None => None,
        };
        let temperature = self.temperature.unwrap_or_else(|| own.settings.temperature.map_or(1.0, f64::from));
        if !(0.0..=HIGHEST_TEMPERATURE).contains(&temperature) {
            return Err(ApiError::param(
                "temperature",
                format!("{temperature} is not from 0 to {HIGHEST_TEMPERATURE}"),
            ));
        }
        let sampling = own.sampling(&SamplingSettings {
            temperature: Some(temperature as f32),
            top_k: self.top_k,
            top_p: self.top_p.map(|p| p as f32),
            seed: self.seed.or(own.settings.seed).or_else(|| Some(fresh_seed() as i64)),
            ..SamplingSettings::default()
        });
        sampling.check().map_err(|e| ApiError::param(e.field, e.what))?;
        let choices = self.n.unwrap_or(1);
        if !(1..=MOST_CHOICES).contains(&choices) {
            return Err(ApiError::param("n", format!("{choices} is not from 1 to {MOST_CHOICES}")));
        }
        Ok(Params {
            max_new,
            sampling,
            choices: choices as usize,
            stops: self.stops()?,
            logprobs: self.logprobs(is_chat)?,
            stream: self.stream.unwrap_or(false),
            include_usage: self.stream_options.as_ref().and_then(|o| o.include_usage).unwrap_or(false),
            schema: self.schema()?,
            ignore_eos: self.ignore_eos.unwrap_or(false),
        })
    }

    fn refuse_unsupported(&self) -> Result<(), ApiError> {
        let penalty = |p: Option<f64>| p.is_some_and(|p| p != 0.0);
        for (name, given) in [
            ("presence_penalty", penalty(self.presence_penalty)),
            ("frequency_penalty", penalty(self.frequency_penalty)),
            ("logit_bias", self.logit_bias.as_ref().is_some_and(|b| !b.is_empty())),
            ("echo", self.echo == Some(true)),
            ("suffix", self.suffix.as_ref().is_some_and(|s| !s.is_empty())),
            ("min_p", self.min_p.is_some_and(|p| p != 0.0)),
            ("repetition_penalty", self.repetition_penalty.is_some_and(|p| p != 1.0)),
            (
                "functions",
                self.functions.as_ref().is_some_and(|f| f.as_array().is_none_or(|f| !f.is_empty())),
            ),
            ("function_call", self.function_call.as_ref().is_some_and(|c| c != "none")),
            ("audio", self.audio.is_some()),
            ("modalities", self.modalities.as_ref().is_some_and(|m| *m != json!(["text"]))),
            ("best_of", self.best_of.is_some_and(|b| b != self.n.unwrap_or(1))),
        ] {
            if given {
                return Err(ApiError::param(name, "this server does not support it"));
            }
        }
        Ok(())
    }

    fn stops(&self) -> Result<Vec<String>, ApiError> {
        let stops = match &self.stop {
            None => Vec::new(),
            Some(OneOrMoreTexts::One(text)) => vec![text.clone()],
            Some(OneOrMoreTexts::Several(texts)) => texts.clone(),
        };
        if stops.len() > MOST_STOPS || stops.iter().any(String::is_empty) {
            return Err(ApiError::param("stop", format!("at most {MOST_STOPS} texts, none of them empty")));
        }
        Ok(stops)
    }

    fn logprobs(&self, is_chat: bool) -> Result<Option<usize>, ApiError> {
        let wanted = match (&self.logprobs, is_chat) {
            (None | Some(Value::Null) | Some(Value::Bool(false)), _) => None,
            (Some(Value::Bool(true)), true) => Some(self.top_logprobs.unwrap_or(0)),
            (Some(n), false) if n.is_u64() => n.as_u64(),
            (Some(_), true) => return Err(ApiError::param("logprobs", "not true or false")),
            (Some(_), false) => return Err(ApiError::param("logprobs", "not a number from 0 on")),
        };
        if wanted.is_none() && self.top_logprobs.is_some_and(|n| n > 0) {
            return Err(ApiError::param("top_logprobs", "needs logprobs: true"));
        }
        match wanted {
            Some(n) if n > MOST_LOGPROBS => {
                let name = if is_chat { "top_logprobs" } else { "logprobs" };
                Err(ApiError::param(name, format!("{n} is more than {MOST_LOGPROBS}")))
            }
            wanted => Ok(wanted.map(|n| n as usize)),
        }
    }

    fn schema(&self) -> Result<Option<Value>, ApiError> {
        let Some(format) = &self.response_format else { return Ok(None) };
        match format.get("type").and_then(Value::as_str) {
            Some("text") => Ok(None),
            Some("json_object") => Ok(Some(json!({"type": "object"}))),
            Some("json_schema") => match format.pointer("/json_schema/schema") {
                Some(schema) if schema.is_object() => Ok(Some(schema.clone())),
                _ => Err(ApiError::param("response_format", "json_schema.schema is not an object")),
            },
            _ => Err(ApiError::param("response_format", "type is not text, json_object or json_schema")),
        }
    }
}

/// Translates a message about a type from Rust's words to JSON's.
fn in_words(message: &str) -> String {
    let words = [
        ("expected f64", "expected a number"),
        ("expected i64", "expected a whole number"),
        ("expected u64", "expected a whole number from 0 on"),
        ("expected u32", "expected a whole number from 0 on"),
        ("floating point", "number"),
        ("invalid type: ", ""),
        ("expected a sequence", "expected a list"),
        ("expected a map", "expected an object"),
    ];
    words.iter().fold(message.to_string(), |text, (from, to)| text.replace(from, to))
}

/// Refuses options of other servers that would change the answer and have no effect here.
fn refuse_others(body: &Value) -> Result<(), ApiError> {
    let number = |(name, neutral): &&(&'static str, f64)| body[*name].as_f64().is_some_and(|n| n != *neutral);
    let switch =
        |(name, neutral): &&(&'static str, bool)| body[*name].as_bool().is_some_and(|b| b != *neutral);
    let format = |name: &&&'static str| match &body[**name] {
        Value::Null => false,
        Value::Array(list) => !list.is_empty(),
        other => *other != "",
    };
    let number = OTHER_NUMBERS.iter().find(number).map(|(name, _)| *name);
    let switch = || OTHER_SWITCHES.iter().find(switch).map(|(name, _)| *name);
    match number.or_else(switch).or_else(|| OTHER_FORMATS.iter().find(format).copied()) {
        Some(name) => Err(ApiError::param(name, "this server does not support it")),
        None if body["n_predict"].is_i64() => {
            Err(ApiError::param("n_predict", "it is called max_tokens here"))
        }
        None => Ok(()),
    }
}

/// Returns a random seed.
fn fresh_seed() -> u64 {
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

/// Converts messages to the form of templates: contents as one text, arguments of calls as objects.
///
/// # Errors
/// A message has no role or content of the API, or holds something else than text.
pub fn template_messages(messages: &[Value]) -> Result<Vec<Value>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::param("messages", "at least one message is needed"));
    }
    messages
        .iter()
        .enumerate()
        .map(|(i, m)| {
            template_message(m).map_err(|what| ApiError::param("messages", format!("message {i}: {what}")))
        })
        .collect()
}

fn template_message(message: &Value) -> Result<Value, String> {
    let message = message.as_object().ok_or("not an object")?;
    let role = message.get("role").and_then(Value::as_str).ok_or("`role` is missing")?;
    if !ROLES.contains(&role) {
        return Err(format!("there is no role `{}`; roles are {}", role.escape_debug(), ROLES.join(", ")));
    }
    let role = if role == "developer" { "system" } else { role };
    let calls = message.get("tool_calls").filter(|calls| !calls.is_null());
    let content = match message.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => text_of_parts(parts)?,
        None | Some(Value::Null) if role == "assistant" && calls.is_some() => String::new(),
        _ => return Err("`content` is not a text".into()),
    };
    let mut out = Map::new();
    out.insert("role".into(), role.into());
    out.insert("content".into(), content.into());
    for key in ["name", "tool_call_id", "reasoning_content"] {
        if let Some(value) = message.get(key).filter(|v| v.is_string()) {
            out.insert(key.into(), value.clone());
        }
    }
    if let Some(calls) = calls {
        let mut calls = calls.clone();
        for call in calls.as_array_mut().ok_or("`tool_calls` is not a list")? {
            let Some(arguments) = call.pointer_mut("/function/arguments") else {
                return Err("a tool call has no `function.arguments`".into());
            };
            if let Some(object) = arguments.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok())
            {
                *arguments = object;
            }
        }
        out.insert("tool_calls".into(), calls);
    }
    Ok(out.into())
}

fn text_of_parts(parts: &[Value]) -> Result<String, String> {
    let mut text = String::new();
    for part in parts {
        match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
            (Some("text"), Some(part)) => text += part,
            (kind, _) => {
                return Err(format!("content of type `{}` is not supported, text is", kind.unwrap_or("?")));
            }
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(body: Value, is_chat: bool) -> Result<Params, ApiError> {
        Body::parse(body.to_string().as_bytes())?.params(&SamplingDefaults::default(), is_chat)
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        for (body, name) in [
            (json!({"temperature": -0.1}), "temperature"),
            (json!({"temperature": 2.5}), "temperature"),
            (json!({"top_p": 0}), "top_p"),
            (json!({"top_p": 1.01}), "top_p"),
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"n": 0}), "n"),
            (json!({"n": 1000}), "n"),
            (json!({"stop": [""]}), "stop"),
            (json!({"top_logprobs": 3}), "top_logprobs"),
            (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
            (json!({"logprobs": 3}), "logprobs"),
            (json!({"presence_penalty": 0.5}), "presence_penalty"),
            (json!({"logit_bias": {"5": 1}}), "logit_bias"),
            (json!({"min_p": 0.1}), "min_p"),
            (json!({"max_tokens": -2}), "max_tokens"),
            (json!({"repeat_penalty": 1.1}), "repeat_penalty"),
            (json!({"mirostat": 2}), "mirostat"),
            (json!({"grammar": "root ::= x"}), "grammar"),
            (json!({"guided_json": {"type": "object"}}), "guided_json"),
            (json!({"n_predict": 8}), "n_predict"),
            (json!({"repetition_penalty": 1.1}), "repetition_penalty"),
            (json!({"functions": [{"name": "f"}]}), "functions"),
            (json!({"function_call": {"name": "f"}}), "function_call"),
            (json!({"audio": {"voice": "x"}}), "audio"),
            (json!({"modalities": ["text", "audio"]}), "modalities"),
            (json!({"response_format": {"type": "xml"}}), "response_format"),
            (json!({"response_format": {"type": "json_schema", "json_schema": {}}}), "response_format"),
        ] {
            let e = params(body.clone(), true).unwrap_err();
            assert_eq!((e.status.as_u16(), e.param.as_deref()), (400, Some(name)), "{body}");
        }
        let e = params(json!({"logprobs": 21}), false).unwrap_err();
        assert_eq!(e.param.as_deref(), Some("logprobs"), "of /v1/completions");
        for body in [
            json!({"repeat_penalty": 1.0, "mirostat": 0, "grammar": "", "json_schema": null, "top_k": -1}),
            json!({"min_p": 0, "repetition_penalty": 1, "functions": [], "function_call": "none"}),
            json!({"min_p": null, "audio": null, "functions": null, "modalities": ["text"]}),
        ] {
            assert!(params(body.clone(), true).is_ok(), "{body}");
        }
        for (body, name) in [
            (json!({"max_tokens": "2"}), "max_tokens"),
            (json!({"prompt": {"a": 1}}), "prompt"),
            (json!({"stop": 1}), "stop"),
            (json!({"stream_options": {"include_usage": 1}}), "stream_options.include_usage"),
        ] {
            let e = params(body.clone(), true).unwrap_err();
            assert_eq!((e.status.as_u16(), e.param.as_deref()), (400, Some(name)), "{body}");
            assert!(!e.message.contains("untagged"), "{}", e.message);
        }
        for body in [json!({"temperature": "hot"}), json!({"max_tokens": 1.5}), json!({"n": 1.5}), json!([1])]
        {
            assert_eq!(params(body.clone(), true).unwrap_err().status.as_u16(), 400, "{body}");
        }
        for text in
            ["", "{", "{\"temperature\": NaN}", "{\"seed\": 1e999}", "\u{feff}{}", "{\"n\":1,\"n\":2}"]
        {
            assert!(Body::parse(text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_not_said_is_as_in_the_api_or_the_models_own() {
        let p = params(json!({"seed": -1, "temperature": null, "stop": "x", "unknown": 1}), true).unwrap();
        assert_eq!((p.max_new, p.sampling.temperature, p.sampling.seed, p.choices), (None, 1.0, u64::MAX, 1));
        assert_eq!(p.stops, ["x"]);
        assert_eq!(params(json!({}), false).unwrap().max_new, Some(16));
        let p = params(json!({"max_tokens": -1, "top_k": -1}), false).unwrap();
        assert_eq!((p.max_new, p.sampling.top_k), (None, 0));
        let own = json!({"temperature": 0.5, "top_k": 64, "top_p": 0.9});
        let own = SamplingDefaults::parse(&own).unwrap();
        let p = Body::parse(b"{\"top_p\": 1}").unwrap().params(&own, true).unwrap();
        assert_eq!((p.sampling.temperature, p.sampling.top_k, p.sampling.top_p), (0.5, 64, 1.0));
    }

    #[test]
    fn messages_become_what_templates_read() {
        let call =
            json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
        let messages = [
            json!({"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
            json!({"role": "assistant", "content": null, "tool_calls": [call]}),
            json!({"role": "tool", "content": "r", "tool_call_id": "1", "other": 1}),
        ];
        let all = template_messages(&messages).unwrap();
        assert_eq!(all[0], json!({"role": "system", "content": "ab"}));
        assert_eq!(all[1]["tool_calls"][0]["function"]["arguments"], json!({"a": 1}));
        assert_eq!(all[2], json!({"role": "tool", "content": "r", "tool_call_id": "1"}));
        for wrong in [
            json!({"role": "wizard", "content": "x"}),
            json!({"content": "x"}),
            json!({"role": "user"}),
            json!({"role": "user", "content": 3}),
            json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
            json!({"role": "assistant", "content": "", "tool_calls": [{}]}),
            json!("text"),
        ] {
            assert_eq!(
                template_messages(std::slice::from_ref(&wrong)).unwrap_err().param.as_deref(),
                Some("messages"),
                "{wrong}"
            );
        }
        assert!(template_messages(&[]).is_err());
    }
}
