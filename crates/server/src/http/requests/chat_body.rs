//! Bodies of `/v1/chat/completions` and `/v1/completions`, into which those of the other APIs are translated.

use crate::http::api::Api;
use crate::http::api_error::ApiError;
use anemoe_runtime::sampler::SamplingDefaults;
use anemoe_runtime::sampler::{Sampling, SamplingSettings};
use anemoe_text::chat::ChatTemplate;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::hash::{BuildHasher, Hasher};

/// Most choices of a request.
const MOST_CHOICES: u64 = 8;
/// Most stop strings of a request.
const MOST_STOPS: usize = 64;
/// Most bytes of all stop strings together.
const MAX_STOP_BYTES: usize = 16 << 10;
/// Highest temperature, as in OpenAI's API.
const HIGHEST_TEMPERATURE: f32 = 2.0;
/// Most alternatives to a token, as in OpenAI's API.
const MOST_LOGPROBS: u64 = 20;
/// Variables of a template that requests may not set.
const TEMPLATE_OWN: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];
/// Values of `reasoning_effort`.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// One text or several texts.
#[derive(Deserialize)]
#[serde(untagged, expecting = "neither a text nor a list of texts")]
pub(super) enum OneOrMoreTexts {
    One(String),
    Several(Vec<String>),
}

/// Prompt of a completion.
#[derive(Debug, Deserialize)]
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

#[derive(Debug, Default, Deserialize)]
#[serde(expecting = "an object")]
pub(super) struct StreamOptions {
    pub(super) include_usage: Option<bool>,
}

/// Body of a request. [`fields`](super::fields) says what becomes of other keys.
#[derive(Default, Deserialize)]
#[serde(default, expecting = "an object")]
pub struct Body {
    /// Name of the model.
    pub model: Option<String>,
    /// Messages of a chat.
    pub messages: Option<Vec<Value>>,
    /// Prompt of a completion.
    pub prompt: Option<Prompts>,
    /// Tools that the model may call.
    pub tools: Option<Vec<Value>>,
    /// Facts of the request that its answer repeats; only of `/v1/responses`.
    #[serde(skip)]
    pub repeated: Map<String, Value>,
    /// True if the answer goes on with the last message; only of `/v1/messages`.
    #[serde(skip)]
    pub continues: bool,
    /// Sampling settings.
    #[serde(skip)]
    pub sampling: SamplingSettings,
    pub(super) tool_choice: Option<Value>,
    pub(super) parallel_tool_calls: Option<bool>,
    pub(super) chat_template_kwargs: Option<Map<String, Value>>,
    pub(super) reasoning_effort: Option<String>,
    pub(super) reasoning_format: Option<String>,
    pub(super) include_reasoning: Option<bool>,
    pub(super) max_tokens: Option<i64>,
    pub(super) max_completion_tokens: Option<i64>,
    pub(super) n: Option<u64>,
    pub(super) stream: Option<bool>,
    pub(super) stream_options: Option<StreamOptions>,
    pub(super) stop: Option<OneOrMoreTexts>,
    pub(super) stop_token_ids: Option<Vec<u32>>,
    pub(super) logprobs: Option<Value>,
    pub(super) top_logprobs: Option<u64>,
    pub(super) response_format: Option<Value>,
    pub(super) ignore_eos: Option<bool>,
}

/// Tools of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct OfferedTools<'a> {
    /// Tools that the model sees.
    pub shown: &'a [Value],
    /// Tools one of which the model must call; empty where it may answer with text.
    pub forced: Vec<&'a Value>,
    /// True if an answer has one call at most.
    pub is_single: bool,
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
    /// Tokens that end the answer besides the model's own.
    pub ends: Vec<u32>,
    /// Place of the model's thoughts in the answer.
    pub thoughts: ShownThoughts,
}

/// Place of a model's thoughts in an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShownThoughts {
    /// In a field of their own.
    Apart,
    /// In the text, as the model writes them.
    Inside,
    /// Left out.
    Nowhere,
}

impl Body {
    /// Leaves out tools that are no functions, which this server cannot offer, and those that `tool_choice` does not allow.
    /// Gives functions without parameters an empty object, which templates read.
    pub(super) fn settle_tools(&mut self) {
        self.tool_choice = self.tool_choice.take().map(settled_choice);
        let Some(tools) = &mut self.tools else { return };
        tools.retain(|tool| tool.get("type").and_then(Value::as_str).is_none_or(|kind| kind == "function"));
        for function in tools.iter_mut().filter_map(|tool| tool.get_mut("function")?.as_object_mut()) {
            if function.get("parameters").is_none_or(Value::is_null) {
                function.insert("parameters".into(), json!({"type": "object", "properties": {}}));
            }
        }
        if let Some(choice) = self.tool_choice.take_if(|choice| choice["type"] == "allowed_tools") {
            let choice = choice.get("allowed_tools").unwrap_or(&choice);
            let name = |tool: &Value| tool.pointer("/function/name").or(tool.get("name")).cloned();
            let names: Vec<_> = choice["tools"].as_array().into_iter().flatten().map(name).collect();
            tools.retain(|tool| names.contains(&name(tool)));
            self.tool_choice = Some(settled_choice(choice["mode"].clone()));
        }
    }

    /// Returns the tools that the model may call, and those of which it must call one.
    ///
    /// # Errors
    /// A tool has no name, or the chosen tool does not exist.
    pub fn tools(&self) -> Result<OfferedTools<'_>, ApiError> {
        let shown = self.tools.as_deref().unwrap_or_default();
        let is_single = self.parallel_tool_calls == Some(false);
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
            Some(choice) if choice == "none" => {
                return Ok(OfferedTools { shown: &[], forced: Vec::new(), is_single });
            }
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
        Ok(OfferedTools { shown, forced, is_single })
    }

    /// Returns the template variables that this request sets, such as `enable_thinking`.
    ///
    /// # Errors
    /// A variable is one that only the server sets.
    pub fn template_variables(&self) -> Result<Map<String, Value>, ApiError> {
        let own = self.chat_template_kwargs.clone().unwrap_or_default();
        if let Some(key) = own.keys().find(|key| TEMPLATE_OWN.contains(&key.as_str())) {
            return Err(ApiError::param("chat_template_kwargs", format!("`{key}` is set by the server")));
        }
        let mut variables = Map::new();
        if let Some(effort) = &self.reasoning_effort {
            if !EFFORTS.contains(&effort.as_str()) {
                let what = format!("`{}` is not one of {}", effort.escape_debug(), EFFORTS.join(", "));
                return Err(ApiError::param("reasoning_effort", what));
            }
            variables.extend(ChatTemplate::thinking(effort != "none"));
            variables.insert("reasoning_effort".into(), effort.as_str().into());
        }
        variables.extend(own);
        Ok(variables)
    }

    /// Checks the parameters; `own` are the model's values for parameters that the request leaves out, `vocab_size` the number
    /// of its tokens.
    ///
    /// # Errors
    /// A parameter is out of range or not supported.
    pub fn params(&self, own: &SamplingDefaults, vocab_size: usize, api: Api) -> Result<Params, ApiError> {
        let is_chat = api != Api::Completion;
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
        let said = &self.sampling;
        let sampling = own.sampling(&SamplingSettings {
            temperature: said.temperature.or(own.settings.temperature).or(Some(1.0)),
            // 0 keeps the most probable token alone, as in OpenAI's API.
            top_p: said.top_p.map(|share| if share == 0.0 { f32::MIN_POSITIVE } else { share }),
            seed: said.seed.or(own.settings.seed).or_else(|| Some(fresh_seed() as i64)),
            ..said.clone()
        });
        if let Some(share) = said.top_p.filter(|share| !(0.0..=1.0).contains(share)) {
            return Err(ApiError::param("top_p", format!("{share} is not from 0 to 1")));
        }
        if said.temperature.is_some_and(|t| t > HIGHEST_TEMPERATURE) {
            let what = format!("{} is more than {HIGHEST_TEMPERATURE}", sampling.temperature);
            return Err(ApiError::param("temperature", what));
        }
        let checked = sampling.check().and_then(|()| said.check(vocab_size));
        checked.map_err(|e| ApiError::param(e.field, e.what))?;
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
            ends: self.stop_token_ids.clone().unwrap_or_default(),
            thoughts: self.thoughts()?,
        })
    }

    fn thoughts(&self) -> Result<ShownThoughts, ApiError> {
        match (self.reasoning_format.as_deref(), self.include_reasoning) {
            (Some("none"), _) => Ok(ShownThoughts::Inside),
            (None | Some("auto" | "deepseek"), Some(false)) => Ok(ShownThoughts::Nowhere),
            (None | Some("auto" | "deepseek"), _) => Ok(ShownThoughts::Apart),
            (Some(_), _) => Err(ApiError::param("reasoning_format", "not auto, deepseek or none")),
        }
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
        if stops.iter().map(String::len).sum::<usize>() > MAX_STOP_BYTES {
            return Err(ApiError::param("stop", format!("more than {MAX_STOP_BYTES} bytes together")));
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
            // A schema beside it is an addition of llama.cpp's server.
            Some("json_object") => match format.get("schema") {
                None | Some(Value::Null) => Ok(Some(json!({"type": "object"}))),
                Some(schema) if schema.is_object() => Ok(Some(schema.clone())),
                Some(_) => Err(ApiError::param("response_format", "schema is not an object")),
            },
            Some("json_schema") => match format.pointer("/json_schema/schema") {
                Some(schema) if schema.is_object() => Ok(Some(schema.clone())),
                _ => Err(ApiError::param("response_format", "json_schema.schema is not an object")),
            },
            _ => Err(ApiError::param("response_format", "type is not text, json_object or json_schema")),
        }
    }
}

/// Returns a choice of tools as OpenAI's chats write it, from the spellings of the other APIs: `any` for `required`, a word
/// as an object's type, and a tool's name beside the type.
fn settled_choice(choice: Value) -> Value {
    let word = choice.as_str().or_else(|| choice["type"].as_str());
    match (word, choice["name"].as_str()) {
        (Some("any" | "required"), _) => json!("required"),
        (Some(word @ ("auto" | "none")), _) => json!(word),
        (Some("function" | "tool"), Some(name)) => json!({"type": "function", "function": {"name": name}}),
        _ => choice,
    }
}

/// Returns a random seed.
fn fresh_seed() -> u64 {
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::requests::parse;

    fn params(body: Value, api: Api) -> Result<Params, ApiError> {
        parse(api, body.to_string().as_bytes())?.params(&SamplingDefaults::default(), 9, api)
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        for (body, name) in [
            (json!({"temperature": -0.1}), "temperature"),
            (json!({"temperature": 2.5}), "temperature"),
            (json!({"top_p": -0.1}), "top_p"),
            (json!({"top_p": 1.01}), "top_p"),
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"n": 0}), "n"),
            (json!({"n": 1000}), "n"),
            (json!({"stop": [""]}), "stop"),
            (json!({"stop": ["x".repeat(9000), "y".repeat(9000)]}), "stop"),
            (json!({"top_logprobs": 3}), "top_logprobs"),
            (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
            (json!({"logprobs": 3}), "logprobs"),
            (json!({"max_tokens": -2}), "max_tokens"),
            (json!({"logit_bias": {"9": 1}}), "logit_bias"),
            (json!({"min_p": 2}), "min_p"),
            (json!({"presence_penalty": 3}), "presence_penalty"),
            (json!({"response_format": {"type": "xml"}}), "response_format"),
            (json!({"response_format": {"type": "json_object", "schema": 1}}), "response_format"),
            (json!({"reasoning_format": "x"}), "reasoning_format"),
            (json!({"response_format": {"type": "json_schema", "json_schema": {}}}), "response_format"),
        ] {
            let e = params(body.clone(), Api::Chat).unwrap_err();
            assert_eq!((e.status.as_u16(), e.param.as_deref()), (400, Some(name)), "{body}");
        }
        let e = params(json!({"logprobs": 21}), Api::Completion).unwrap_err();
        assert_eq!(e.param.as_deref(), Some("logprobs"), "of /v1/completions");
        let e = params(json!({"top_p": -0.1}), Api::Chat).unwrap_err();
        assert_eq!(e.message, "top_p: -0.1 is not from 0 to 1");
        for (body, name) in [
            (json!({"max_tokens": "2"}), "max_tokens"),
            (json!({"prompt": {"a": 1}}), "prompt"),
            (json!({"stop": 1}), "stop"),
            (json!({"stream_options": {"include_usage": 1}}), "stream_options.include_usage"),
        ] {
            let e = params(body.clone(), Api::Chat).unwrap_err();
            assert_eq!((e.status.as_u16(), e.param.as_deref()), (400, Some(name)), "{body}");
            assert!(!e.message.contains("untagged"), "{}", e.message);
        }
        for body in [json!({"temperature": "hot"}), json!({"max_tokens": 1.5}), json!({"n": 1.5}), json!([1])]
        {
            assert_eq!(params(body.clone(), Api::Chat).unwrap_err().status.as_u16(), 400, "{body}");
        }
        for text in ["", "{", "{\"temperature\": NaN}", "{\"seed\": 1e999}", "{\"n\":1,\"n\":2}"] {
            assert!(parse(Api::Chat, text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_not_said_is_as_in_the_api_or_the_models_own() {
        let p =
            params(json!({"seed": -1, "temperature": null, "stop": "x", "unknown": 1}), Api::Chat).unwrap();
        assert_eq!((p.max_new, p.sampling.temperature, p.sampling.seed, p.choices), (None, 1.0, u64::MAX, 1));
        assert_eq!(p.stops, ["x"]);
        assert_eq!(params(json!({}), Api::Completion).unwrap().max_new, Some(16));
        let p = params(json!({"max_tokens": 150.0, "top_p": 0}), Api::Chat).unwrap();
        assert!(p.max_new == Some(150) && p.sampling.top_p > 0.0 && p.sampling.top_p < 1e-30);
        let text = r#"{"max_tokens": 1180591620717411303424, "top_k": 9223372036854775808, "seed": 18446744073709551615}"#;
        let p = parse(Api::Chat, text.as_bytes()).unwrap().params(&SamplingDefaults::default(), 9, Api::Chat);
        let p = p.unwrap();
        assert_eq!((p.max_new, p.sampling.seed), (Some(i64::MAX as usize), u64::MAX));
        let p = params(json!({"max_tokens": -1, "top_k": -1}), Api::Completion).unwrap();
        assert_eq!((p.max_new, p.sampling.top_k), (None, 0));
        let own = json!({"temperature": 0.5, "top_k": 64, "top_p": 0.9});
        let own = SamplingDefaults::parse(&own).unwrap();
        let p = parse(Api::Chat, b"{\"top_p\": 1}").unwrap().params(&own, 9, Api::Chat).unwrap();
        assert_eq!((p.sampling.temperature, p.sampling.top_k, p.sampling.top_p), (0.5, 64, 1.0));
    }

    #[test]
    fn tools_that_are_no_functions_are_left_out_and_choices_leave_out_others() {
        let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
        let allowed = |mode: &str| json!({"mode": mode, "tools": [tool("g")]});
        let nested = json!({"type": "allowed_tools", "allowed_tools": allowed("required")});
        let chat = |choice: Value| {
            let tools = json!([tool("f"), {"type": "custom", "custom": {"name": "c"}}, tool("g")]);
            (Api::Chat, json!({"tools": tools, "tool_choice": choice}))
        };
        let responses = |choice: Value| {
            let tools = json!([{"type": "web_search"}, {"type": "function", "name": "f"}, {"type": "function", "name": "g"}]);
            (Api::Responses, json!({"input": "x", "tools": tools, "tool_choice": choice}))
        };
        let flat = json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}]});
        let anthropic = |choice: Value| {
            let tools = json!([{"name": "f", "input_schema": null}, {"type": "web_search_20250305", "name": "web_search"}]);
            (Api::Messages, json!({"messages": [], "tools": tools, "tool_choice": choice}))
        };
        for ((api, body), shown, forced) in [
            (chat(json!("required")), "fg", 2),
            (chat(nested), "g", 1),
            (responses(json!("auto")), "fg", 0),
            (responses(flat), "f", 0),
            (anthropic(json!({"type": "any"})), "f", 1),
        ] {
            let body = parse(api, body.to_string().as_bytes()).unwrap();
            let tools = body.tools().unwrap();
            let names: String =
                tools.shown.iter().filter_map(|tool| tool["function"]["name"].as_str()).collect();
            assert_eq!((names.as_str(), tools.forced.len()), (shown, forced));
            let empty = json!({"type": "object", "properties": {}});
            assert!(tools.shown.iter().all(|tool| tool["function"]["parameters"] == empty));
        }
        let g = json!({"type": "function", "name": "g"});
        for (choice, shown, forced) in [
            (json!("any"), "fg", 2),
            (json!({"type": "auto"}), "fg", 0),
            (json!({"type": "none"}), "", 0),
            (json!(null), "fg", 0),
            (json!({"type": "function", "function": {"name": "g"}}), "fg", 1),
            (g.clone(), "fg", 1),
            (json!({"type": "tool", "name": "g", "disable_parallel_tool_use": true}), "fg", 1),
            (json!({"type": "allowed_tools", "mode": "any", "tools": [g]}), "g", 1),
        ] {
            let again = |(api, body): (Api, Value)| {
                let body = parse(api, body.to_string().as_bytes()).unwrap();
                let tools = body.tools().unwrap();
                let names = tools.shown.iter().filter_map(|tool| tool["function"]["name"].as_str());
                (names.collect::<String>(), tools.forced.len())
            };
            let expected = (shown.to_string(), forced);
            assert_eq!(again(chat(choice.clone())), expected, "{choice}");
            assert_eq!(again(responses(choice.clone())), expected, "{choice}");
        }
        for choice in [json!({"type": "tool", "name": "f"}), json!("any"), json!({"type": "any"})] {
            let (api, body) = anthropic(choice);
            let body = parse(api, body.to_string().as_bytes()).unwrap();
            assert_eq!(body.tools().unwrap().forced.len(), 1);
        }
        let single = json!({"type": "auto", "disable_parallel_tool_use": true});
        let (api, body) = anthropic(single);
        assert!(parse(api, body.to_string().as_bytes()).unwrap().tools().unwrap().is_single);
        for (api, body) in [
            chat(json!({"type": "custom", "custom": {"name": "c"}})),
            responses(json!({"type": "web_search"})),
            anthropic(json!({"type": "tool", "name": "web_search"})),
        ] {
            let wrong = parse(api, body.to_string().as_bytes()).and_then(|body| body.tools().map(|_| ()));
            assert_eq!(wrong.unwrap_err().param.as_deref(), Some("tool_choice"), "{api:?}");
        }
    }
}
