//! Fields of the four APIs, and of the additions of llama.cpp's server and vLLM, that would change an answer and are refused.
//! Others that [`Body`](super::Body) lacks have no effect.
//!
//! `docs/serve.md` has a table of the refused and the honoured ones; the tests hold it against them, and send every row's
//! example.

use crate::http::api::Api;
use crate::http::api::Api::{Chat, Completion, Messages, Responses};
use crate::http::api_error::ApiError;
use serde_json::Value;

/// A field that is refused: its name, the APIs that have it, the values, as JSON, that change nothing, and one that would.
type RefusedField = (&'static str, &'static [Api], &'static [&'static str], &'static str);

const BOTH: &[Api] = &[Chat, Completion];
const OPENAI: &[Api] = &[Chat, Completion, Responses];

/// Fields that are refused, in the order of the document.
#[rustfmt::skip]
const REFUSED: &[RefusedField] = &[
    // What is asked.
    ("prompt", &[Responses], &[], r#"{"id": "x"}"#),
    ("suffix", &[Completion], &[], r#""x""#),
    ("echo", BOTH, &["false"], "true"),
    ("documents", &[Chat], &[], r#"[{"text": "x"}]"#),
    ("chat_template", &[Chat], &[], r#""x""#),
    ("add_generation_prompt", &[Chat], &["true"], "false"),
    ("continue_final_message", &[Chat], &["false"], "true"),
    ("add_special_tokens", BOTH, &[], "true"),
    ("truncate_prompt_tokens", BOTH, &["-1"], "5"),
    ("previous_response_id", &[Responses], &[], r#""resp_1""#),
    ("conversation", &[Responses], &[], r#""conv_1""#),
    ("background", &[Responses], &["false"], "true"),
    ("compaction", &[Messages], &[], r#"{"type": "x"}"#),
    ("thread", &[Messages], &[], r#"{"id": "x"}"#),
    ("container", &[Messages], &[], r#""x""#),
    ("mcp_servers", &[Messages], &[], r#"[{"name": "x"}]"#),
    // Tools.
    ("tools", &[Completion], &[], r#"[{"type": "function", "function": {"name": "f"}}]"#),
    ("tool_choice", &[Completion], &[r#""none""#, r#""auto""#], r#""required""#),
    ("functions", BOTH, &[], r#"[{"name": "f"}]"#),
    ("function_call", BOTH, &[r#""none""#], r#"{"name": "f"}"#),
    ("web_search_options", &[Chat], &[], r#"{"user_location": null}"#),
    // Length.
    ("n_predict", BOTH, &["-1"], "8"),
    ("stop", &[Responses], &[], r#""x""#),
    ("stop_token_ids", &[Responses], &[], "[5]"),
    ("ignore_eos", &[Responses], &["false"], "true"),
    ("skip_special_tokens", &[Responses], &["true"], "false"),
    ("response_format", &[Responses], &[], r#"{"type": "json_object"}"#),
    ("include_stop_str_in_output", BOTH, &["false"], "true"),
    ("t_max_predict_ms", BOTH, &["0", "-1"], "5"),
    ("n_indent", BOTH, &["0"], "2"),
    // Choice of tokens.
    ("mirostat", BOTH, &["0"], "2"),
    ("dry_multiplier", BOTH, &["0"], "0.8"),
    ("xtc_probability", BOTH, &["0"], "0.5"),
    ("dynatemp_range", BOTH, &["0"], "0.5"),
    ("top_n_sigma", BOTH, &["-1", "0"], "1"),
    ("adaptive_target", BOTH, &["-1"], "0.5"),
    ("tfs_z", BOTH, &["1"], "0.5"),
    ("no_repeat_ngram_size", BOTH, &["0"], "3"),
    ("length_penalty", BOTH, &["1"], "1.2"),
    ("min_keep", BOTH, &["0", "1"], "3"),
    ("samplers", BOTH, &[], r#"["top_k"]"#),
    ("use_beam_search", BOTH, &["false"], "true"),
    ("logits_processors", BOTH, &[], r#"["x"]"#),
    ("allowed_token_ids", BOTH, &[], "[5]"),
    ("bad_words", BOTH, &[], r#"["x"]"#),
    ("lora", BOTH, &[], r#"[{"id": 0, "scale": 1}]"#),
    // Form of the answer.
    ("n_cmpl", BOTH, &["1"], "2"),
    ("best_of", BOTH, &["1"], "2"),
    ("grammar", BOTH, &[], r#""root ::= x""#),
    ("json_schema", BOTH, &[], r#"{"type": "object"}"#),
    ("guided_json", BOTH, &[], r#"{"type": "object"}"#),
    ("guided_regex", BOTH, &[], r#""x""#),
    ("guided_choice", BOTH, &[], r#"["x"]"#),
    ("guided_grammar", BOTH, &[], r#""x""#),
    ("structured_outputs", OPENAI, &[], r#"{"regex": "x"}"#),
    ("regex", BOTH, &[], r#""x""#),
    ("ebnf", BOTH, &[], r#""x""#),
    ("thinking_budget_tokens", &[Chat], &["-1"], "100"),
    ("thinking_token_budget", &[Chat], &["-1"], "100"),
    ("reasoning.summary", &[Responses], &[r#""auto""#], r#""detailed""#),
    ("reasoning.generate_summary", &[Responses], &[r#""auto""#], r#""detailed""#),
    ("verbosity", &[Chat], &[r#""medium""#], r#""low""#),
    ("text.verbosity", &[Responses], &[r#""medium""#], r#""low""#),
    ("modalities", &[Chat], &[r#"["text"]"#], r#"["text", "audio"]"#),
    ("audio", &[Chat], &[], r#"{"voice": "x"}"#),
    ("mm_processor_kwargs", &[Chat], &[], r#"{"x": 1}"#),
    ("logprob_token_ids", BOTH, &[], "[5]"),
    ("prompt_logprobs", BOTH, &[], "1"),
    ("n_probs", BOTH, &["0"], "3"),
    ("post_sampling_probs", BOTH, &["false"], "true"),
    ("return_tokens_as_token_ids", BOTH, &["false"], "true"),
    ("return_token_ids", BOTH, &["false"], "true"),
    ("return_tokens", BOTH, &["false"], "true"),
    ("response_fields", BOTH, &[], r#"["content"]"#),
    ("skip_special_tokens", BOTH, &["true"], "false"),
    ("parse_tool_calls", &[Chat], &["true"], "false"),
];

/// Returns the value of a field, whose name may lead into objects; null where it is not there.
fn value<'a>(body: &'a Value, name: &str) -> &'a Value {
    name.split('.').fold(body, |value, key| value.get(key).unwrap_or(&Value::Null))
}

/// Tells whether two values are the same for a client: 1 and 1.0 are.
fn is_same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|a| b.as_f64() == Some(a))
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// Refuses fields that would change the answer and are not supported.
///
/// # Errors
/// Names the first such field.
pub fn refuse(api: Api, body: &Value) -> Result<(), ApiError> {
    for (name, _, neutral, _) in REFUSED.iter().filter(|(_, apis, ..)| apis.contains(&api)) {
        let given = value(body, name);
        let is_neutral = |text: &&str| serde_json::from_str(text).is_ok_and(|v: Value| is_same(&v, given));
        let is_all = *name == "best_of" && is_same(given, &body["n"]);
        if !(is_nothing(given) || is_all || neutral.iter().any(is_neutral)) {
            let what = match *name {
                "n_predict" => "it is called max_tokens here",
                "functions" if api == Chat => "it is called tools here",
                "function_call" if api == Chat => "it is called tool_choice here",
                "previous_response_id" | "conversation" => {
                    "this server keeps no answers; send the whole input"
                }
                _ => "this server does not support it",
            };
            return Err(ApiError::param(*name, what));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::requests::parse;
    use anemoe_runtime::sampler::SamplingDefaults;
    use serde_json::json;

    const ALL: &[Api] = &[Chat, Completion, Responses, Messages];
    const CHATS: &[Api] = &[Chat, Responses, Messages];
    const TOOL: &str =
        r#"[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]"#;

    /// Fields that are honoured: name, APIs that have it, and a value, as JSON, that has an effect.
    #[rustfmt::skip]
    const HONOURED: &[(&str, &[Api], &str)] = &[
        ("model", ALL, r#""other""#),
        ("messages", &[Chat, Messages], r#"[{"role": "user", "content": "other"}]"#),
        ("prompt", &[Completion], r#""other""#),
        ("input", &[Responses], r#""other""#),
        ("instructions", &[Responses], r#""be brief""#),
        ("system", &[Messages], r#""be brief""#),
        ("chat_template_kwargs", CHATS, r#"{"enable_thinking": true}"#),
        ("tools", &[Chat], TOOL),
        ("tools", &[Responses], r#"[{"type": "function", "name": "f"}]"#),
        ("tools", &[Messages], r#"[{"name": "f", "input_schema": {"type": "object"}}]"#),
        ("tool_choice", &[Chat, Responses], r#""none""#),
        ("tool_choice", &[Messages], r#"{"type": "none"}"#),
        ("parallel_tool_calls", &[Chat, Responses], "false"),
        ("max_tokens", &[Chat, Completion, Messages], "3"),
        ("max_completion_tokens", BOTH, "3"),
        ("max_output_tokens", &[Responses], "3"),
        ("min_tokens", ALL, "3"),
        ("ignore_eos", BOTH, "true"),
        ("stop", BOTH, r#""x""#),
        ("stop_sequences", &[Messages], r#"["x"]"#),
        ("stop_token_ids", BOTH, "[5]"),
        ("temperature", ALL, "0.25"),
        ("top_p", ALL, "0.5"),
        ("top_k", ALL, "7"),
        ("seed", ALL, "9"),
        ("min_p", ALL, "0.1"),
        ("typical_p", ALL, "0.5"),
        ("presence_penalty", ALL, "0.5"),
        ("frequency_penalty", ALL, "0.5"),
        ("repetition_penalty", ALL, "1.1"),
        ("repeat_penalty", ALL, "1.1"),
        ("repeat_last_n", ALL, "5"),
        ("logit_bias", ALL, r#"{"5": 1}"#),
        ("n", BOTH, "2"),
        ("response_format", BOTH, r#"{"type": "json_object"}"#),
        ("text.format", &[Responses], r#"{"type": "json_object"}"#),
        ("output_format", &[Messages], r#"{"type": "json_schema", "schema": {"type": "object"}}"#),
        ("output_config.format", &[Messages], r#"{"type": "json_schema", "schema": {"type": "object"}}"#),
        ("reasoning_effort", &[Chat], r#""high""#),
        ("reasoning.effort", &[Responses], r#""high""#),
        ("thinking", &[Messages], r#"{"type": "enabled", "budget_tokens": 1024}"#),
        ("output_config.effort", &[Messages], r#""high""#),
        ("reasoning_format", &[Chat], r#""none""#),
        ("include_reasoning", &[Chat], "false"),
        ("logprobs", &[Chat], "true"),
        ("logprobs", &[Completion], "3"),
        ("top_logprobs", &[Chat, Responses], "3"),
        ("include", &[Responses], r#"["message.output_text.logprobs"]"#),
        ("stream", ALL, "true"),
        ("stream_options.include_usage", BOTH, "true"),
    ];

    fn least(api: Api) -> Value {
        let messages = json!([{"role": "user", "content": "x"}]);
        match api {
            Chat => json!({"messages": messages}),
            Completion => json!({"prompt": "x"}),
            Responses => json!({"input": "x"}),
            Messages => json!({"messages": messages, "max_tokens": 9}),
        }
    }

    /// Returns all that the server makes of a request; the seed is left out where a request cannot set it.
    fn effect(api: Api, body: &Value) -> Result<String, ApiError> {
        let body = parse(api, body.to_string().as_bytes())?;
        let mut params = body.params(&SamplingDefaults::default(), 9, api)?;
        if body.sampling.seed.is_none() {
            params.sampling.seed = 0;
        }
        let tools = body.tools()?;
        let variables = body.template_variables()?;
        Ok(format!(
            "{:?} {:?} {:?} {tools:?} {variables:?} {params:?}",
            body.model, body.messages, body.prompt
        ))
    }

    /// Returns the least body of an API, and the same with a field. Tools are beside the fields that mean nothing without.
    fn with(api: Api, name: &str, value: &str) -> [Value; 2] {
        let mut plain = least(api);
        match name {
            "tool_choice" | "parallel_tool_calls" => {
                let tools = HONOURED.iter().find(|field| field.0 == "tools" && field.1.contains(&api));
                tools.into_iter().for_each(|tools| plain["tools"] = serde_json::from_str(tools.2).unwrap());
            }
            "top_logprobs" if api == Chat => plain["logprobs"] = true.into(),
            _ => {}
        }
        let mut body = plain.clone();
        *name.split('.').fold(&mut body, |place, key| &mut place[key]) = serde_json::from_str(value).unwrap();
        [plain, body]
    }

    #[test]
    fn every_field_is_honoured_or_refused() {
        for (name, apis, example) in HONOURED {
            for &api in *apis {
                let [plain, got] = with(api, name, example).map(|body| effect(api, &body).unwrap());
                assert_ne!(got, plain, "{name} of {api:?}");
            }
        }
        for (name, apis, neutral, example) in REFUSED {
            for &api in *apis {
                let e = effect(api, &with(api, name, example)[1]).unwrap_err();
                assert_eq!((e.status.as_u16(), e.param.as_deref()), (400, Some(*name)), "{name} of {api:?}");
                for value in neutral.iter().chain(&["null"]) {
                    let [plain, got] = with(api, name, value).map(|body| effect(api, &body).unwrap());
                    assert_eq!(got, plain, "{name} of {api:?}: {value}");
                }
            }
        }
    }

    /// Clients send these; they change no answer.
    #[test]
    fn other_fields_have_no_effect() {
        let harmless = json!({
            // Claude Code sends this with each request. What is left out of a prompt that is too long is the client's to decide.
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "truncation": "auto",
            "store": true, "metadata": {"user_id": "x"}, "user": "x", "safety_identifier": "x", "service_tier": "auto",
            "prompt_cache_key": "x", "prompt_cache_retention": "24h", "cache_control": {"type": "ephemeral"},
            "stream_options": {"include_obfuscation": false, "continuous_usage_stats": true}, "cache_prompt": false,
            "prediction": {"type": "content", "content": "x"}, "max_tool_calls": 3, "id_slot": 3, "request_id": "x",
            "return_progress": true, "timings_per_token": true, "priority": 3, "speculative": {"n_max": 3},
            "grammar_lazy": true, "mirostat_tau": 4, "dry_base": 2, "dry_sequence_breakers": ["x"],
            "xtc_threshold": 0.2, "dynatemp_exponent": 2, "adaptive_decay": 0.5, "penalize_nl": false,
            "spaces_between_special_tokens": false, "kv_transfer_params": {"x": 1}, "unknown_to_all": [1],
        });
        for &api in ALL {
            let plain = least(api);
            let mut body = plain.clone();
            body.as_object_mut().unwrap().extend(harmless.as_object().unwrap().clone());
            assert_eq!(effect(api, &body).unwrap(), effect(api, &plain).unwrap(), "{api:?}");
        }
    }

    /// Returns the rows of the document's table: the fields that the same APIs honour or refuse.
    fn table() -> String {
        let honoured = HONOURED.iter().map(|(name, apis, _)| ("honoured", *name, *apis));
        let refused = REFUSED.iter().map(|(name, apis, ..)| ("refused", *name, *apis));
        let all: Vec<_> = honoured.chain(refused).collect();
        let mut rows: Vec<(String, Vec<String>)> = Vec::new();
        for (what, name, _) in &all {
            let own = || all.iter().filter(|field| (field.0, field.1) == (*what, *name));
            let apis = ALL.iter().zip(["chat", "completions", "responses", "messages"]);
            let apis = apis.filter(|(api, _)| own().any(|field| field.2.contains(api))).map(|(_, name)| name);
            let (begin, name) =
                (format!("| {what} | {} | ", apis.collect::<Vec<_>>().join(", ")), format!("`{name}`"));
            match rows.iter_mut().find(|row| row.0 == begin) {
                Some((_, names)) if names.contains(&name) => {}
                Some((_, names)) => names.push(name),
                None => rows.push((begin, vec![name])),
            }
        }
        rows.iter().map(|(begin, names)| format!("{begin}{} |\n", names.join(", "))).collect()
    }

    #[test]
    fn the_document_has_the_rows() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/serve.md");
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.contains(&table()), "docs/serve.md needs this table:\n{}", table());
    }
}
