//! Every field of the four APIs, and of the additions of llama.cpp's server and vLLM, with what becomes of it.
//!
//! `docs/serve.md` has these rows as a table; the tests hold it against them, and send every row's example.

use crate::http::api::Api;
use crate::http::api::Api::{Chat, Completion, Messages, Responses};
use crate::http::api_error::ApiError;
use serde_json::Value;

/// Treatment of a field.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Treatment {
    /// The answer follows it.
    Honoured,
    /// A request with another value than null, nothing or one of these, as JSON, is refused.
    Refused(&'static [&'static str]),
    /// It has no effect, because it changes no answer.
    Harmless,
}

/// A field of requests.
struct RequestField {
    name: &'static str,
    apis: &'static [Api],
    treatment: Treatment,
    /// A value that has an effect where it is supported, as JSON.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests send it"))]
    example: &'static str,
}

const fn honoured(name: &'static str, apis: &'static [Api], example: &'static str) -> RequestField {
    RequestField { name, apis, treatment: Treatment::Honoured, example }
}

const fn refused(
    name: &'static str,
    apis: &'static [Api],
    example: &'static str,
    neutral: &'static [&'static str],
) -> RequestField {
    RequestField { name, apis, treatment: Treatment::Refused(neutral), example }
}

const fn harmless(name: &'static str, apis: &'static [Api], example: &'static str) -> RequestField {
    RequestField { name, apis, treatment: Treatment::Harmless, example }
}

const ALL: &[Api] = &[Chat, Completion, Responses, Messages];
const BOTH: &[Api] = &[Chat, Completion];
const OPENAI: &[Api] = &[Chat, Completion, Responses];
const CHATS: &[Api] = &[Chat, Responses, Messages];

const TOOL: &str = r#"[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]"#;

/// All fields, in the order of the document.
#[rustfmt::skip]
const FIELDS: &[RequestField] = &[
    // What is asked.
    honoured("model", ALL, r#""other""#),
    honoured("messages", &[Chat, Messages], r#"[{"role": "user", "content": "other"}]"#),
    honoured("prompt", &[Completion], r#""other""#),
    refused("prompt", &[Responses], r#"{"id": "x"}"#, &[]),
    honoured("input", &[Responses], r#""other""#),
    honoured("instructions", &[Responses], r#""be brief""#),
    honoured("system", &[Messages], r#""be brief""#),
    honoured("chat_template_kwargs", CHATS, r#"{"enable_thinking": true}"#),
    refused("suffix", &[Completion], r#""x""#, &[]),
    refused("echo", BOTH, "true", &["false"]),
    refused("documents", &[Chat], r#"[{"text": "x"}]"#, &[]),
    refused("chat_template", &[Chat], r#""x""#, &[]),
    refused("add_generation_prompt", &[Chat], "false", &["true"]),
    refused("continue_final_message", &[Chat], "true", &["false"]),
    refused("add_special_tokens", BOTH, "true", &[]),
    refused("truncate_prompt_tokens", BOTH, "5", &["-1"]),
    refused("previous_response_id", &[Responses], r#""resp_1""#, &[]),
    refused("conversation", &[Responses], r#""conv_1""#, &[]),
    refused("background", &[Responses], "true", &["false"]),
    refused("truncation", &[Responses], r#""auto""#, &[r#""disabled""#]),
    refused("context_management", &[Responses, Messages], r#"[{"type": "compaction"}]"#, &[]),
    refused("compaction", &[Messages], r#"{"type": "x"}"#, &[]),
    refused("thread", &[Messages], r#"{"id": "x"}"#, &[]),
    refused("container", &[Messages], r#""x""#, &[]),
    refused("mcp_servers", &[Messages], r#"[{"name": "x"}]"#, &[]),
    // Tools.
    honoured("tools", &[Chat], TOOL),
    honoured("tools", &[Responses], r#"[{"type": "function", "name": "f"}]"#),
    honoured("tools", &[Messages], r#"[{"name": "f", "input_schema": {"type": "object"}}]"#),
    refused("tools", &[Completion], TOOL, &[]),
    honoured("tool_choice", &[Chat, Responses], r#""none""#),
    honoured("tool_choice", &[Messages], r#"{"type": "none"}"#),
    refused("tool_choice", &[Completion], r#""required""#, &[r#""none""#, r#""auto""#]),
    honoured("parallel_tool_calls", &[Chat, Responses], "false"),
    refused("functions", BOTH, r#"[{"name": "f"}]"#, &[]),
    refused("function_call", BOTH, r#"{"name": "f"}"#, &[r#""none""#]),
    refused("web_search_options", &[Chat], r#"{"user_location": null}"#, &[]),
    harmless("max_tool_calls", &[Responses], "3"),
    // Length.
    honoured("max_tokens", &[Chat, Completion, Messages], "3"),
    honoured("max_completion_tokens", BOTH, "3"),
    honoured("max_output_tokens", &[Responses], "3"),
    refused("n_predict", BOTH, "8", &[]),
    honoured("min_tokens", ALL, "3"),
    honoured("ignore_eos", BOTH, "true"),
    honoured("stop", BOTH, r#""x""#),
    refused("stop", &[Responses], r#""x""#, &[]),
    refused("stop_token_ids", &[Responses], "[5]", &[]),
    refused("ignore_eos", &[Responses], "true", &["false"]),
    refused("skip_special_tokens", &[Responses], "false", &["true"]),
    refused("response_format", &[Responses], r#"{"type": "json_object"}"#, &[]),
    honoured("stop_sequences", &[Messages], r#"["x"]"#),
    honoured("stop_token_ids", BOTH, "[5]"),
    refused("include_stop_str_in_output", BOTH, "true", &["false"]),
    refused("t_max_predict_ms", BOTH, "5", &["0", "-1"]),
    refused("n_indent", BOTH, "2", &["0"]),
    // Choice of tokens.
    honoured("temperature", ALL, "0.25"),
    honoured("top_p", ALL, "0.5"),
    honoured("top_k", ALL, "7"),
    honoured("seed", ALL, "9"),
    honoured("min_p", ALL, "0.1"),
    honoured("typical_p", ALL, "0.5"),
    honoured("presence_penalty", ALL, "0.5"),
    honoured("frequency_penalty", ALL, "0.5"),
    honoured("repetition_penalty", ALL, "1.1"),
    honoured("repeat_penalty", ALL, "1.1"),
    honoured("repeat_last_n", ALL, "5"),
    honoured("logit_bias", ALL, r#"{"5": 1}"#),
    refused("mirostat", BOTH, "2", &["0"]),
    refused("dry_multiplier", BOTH, "0.8", &["0"]),
    refused("xtc_probability", BOTH, "0.5", &["0"]),
    refused("dynatemp_range", BOTH, "0.5", &["0"]),
    refused("top_n_sigma", BOTH, "1", &["-1", "0"]),
    refused("adaptive_target", BOTH, "0.5", &["-1"]),
    harmless("adaptive_decay", BOTH, "0.5"),
    refused("tfs_z", BOTH, "0.5", &["1"]),
    refused("no_repeat_ngram_size", BOTH, "3", &["0"]),
    refused("length_penalty", BOTH, "1.2", &["1"]),
    refused("min_keep", BOTH, "3", &["0", "1"]),
    refused("samplers", BOTH, r#"["top_k"]"#, &[]),
    refused("use_beam_search", BOTH, "true", &["false"]),
    refused("logits_processors", BOTH, r#"["x"]"#, &[]),
    refused("allowed_token_ids", BOTH, "[5]", &[]),
    refused("bad_words", BOTH, r#"["x"]"#, &[]),
    refused("lora", BOTH, r#"[{"id": 0, "scale": 1}]"#, &[]),
    harmless("penalize_nl", BOTH, "false"),
    harmless("mirostat_tau", BOTH, "4"),
    harmless("mirostat_eta", BOTH, "0.2"),
    harmless("dry_base", BOTH, "2"),
    harmless("dry_allowed_length", BOTH, "3"),
    harmless("dry_penalty_last_n", BOTH, "64"),
    harmless("dry_sequence_breakers", BOTH, r#"["x"]"#),
    harmless("xtc_threshold", BOTH, "0.2"),
    harmless("dynatemp_exponent", BOTH, "2"),
    // Form of the answer.
    honoured("n", BOTH, "2"),
    refused("n_cmpl", BOTH, "2", &["1"]),
    refused("best_of", BOTH, "2", &["1"]),
    honoured("response_format", BOTH, r#"{"type": "json_object"}"#),
    honoured("text.format", &[Responses], r#"{"type": "json_object"}"#),
    honoured("output_format", &[Messages], r#"{"type": "json_schema", "schema": {"type": "object"}}"#),
    honoured("output_config.format", &[Messages], r#"{"type": "json_schema", "schema": {"type": "object"}}"#),
    refused("grammar", BOTH, r#""root ::= x""#, &[]),
    harmless("grammar_lazy", BOTH, "true"),
    refused("json_schema", BOTH, r#"{"type": "object"}"#, &[]),
    refused("guided_json", BOTH, r#"{"type": "object"}"#, &[]),
    refused("guided_regex", BOTH, r#""x""#, &[]),
    refused("guided_choice", BOTH, r#"["x"]"#, &[]),
    refused("guided_grammar", BOTH, r#""x""#, &[]),
    refused("structured_outputs", OPENAI, r#"{"regex": "x"}"#, &[]),
    refused("regex", BOTH, r#""x""#, &[]),
    refused("ebnf", BOTH, r#""x""#, &[]),
    honoured("reasoning_effort", &[Chat], r#""high""#),
    honoured("reasoning.effort", &[Responses], r#""high""#),
    honoured("thinking", &[Messages], r#"{"type": "enabled", "budget_tokens": 1024}"#),
    honoured("output_config.effort", &[Messages], r#""high""#),
    honoured("reasoning_format", &[Chat], r#""none""#),
    honoured("include_reasoning", &[Chat], "false"),
    refused("thinking_budget_tokens", &[Chat], "100", &["-1"]),
    refused("thinking_token_budget", &[Chat], "100", &["-1"]),
    refused("reasoning.summary", &[Responses], r#""detailed""#, &[r#""auto""#]),
    refused("reasoning.generate_summary", &[Responses], r#""detailed""#, &[r#""auto""#]),
    refused("verbosity", &[Chat], r#""low""#, &[r#""medium""#]),
    refused("text.verbosity", &[Responses], r#""low""#, &[r#""medium""#]),
    refused("modalities", &[Chat], r#"["text", "audio"]"#, &[r#"["text"]"#]),
    refused("audio", &[Chat], r#"{"voice": "x"}"#, &[]),
    refused("mm_processor_kwargs", &[Chat], r#"{"x": 1}"#, &[]),
    harmless("media_io_kwargs", &[Chat], r#"{"x": 1}"#),
    honoured("logprobs", &[Chat], "true"),
    honoured("logprobs", &[Completion], "3"),
    honoured("top_logprobs", &[Chat, Responses], "3"),
    refused("logprob_token_ids", BOTH, "[5]", &[]),
    refused("prompt_logprobs", BOTH, "1", &[]),
    refused("n_probs", BOTH, "3", &["0"]),
    refused("post_sampling_probs", BOTH, "true", &["false"]),
    refused("return_tokens_as_token_ids", BOTH, "true", &["false"]),
    refused("return_token_ids", BOTH, "true", &["false"]),
    refused("return_tokens", BOTH, "true", &["false"]),
    refused("response_fields", BOTH, r#"["content"]"#, &[]),
    refused("skip_special_tokens", BOTH, "false", &["true"]),
    refused("parse_tool_calls", &[Chat], "false", &["true"]),
    honoured("include", &[Responses], r#"["message.output_text.logprobs"]"#),
    harmless("spaces_between_special_tokens", BOTH, "false"),
    // How it is sent.
    honoured("stream", ALL, "true"),
    honoured("stream_options.include_usage", BOTH, "true"),
    harmless("stream_options.include_obfuscation", OPENAI, "false"),
    harmless("stream_options.continuous_usage_stats", BOTH, "true"),
    harmless("return_progress", BOTH, "true"),
    harmless("timings_per_token", BOTH, "true"),
    // About the request, not the answer.
    harmless("store", &[Chat, Responses], "true"),
    harmless("metadata", CHATS, r#"{"user_id": "x"}"#),
    harmless("user", OPENAI, r#""x""#),
    harmless("safety_identifier", &[Chat, Responses], r#""x""#),
    harmless("prompt_cache_key", &[Chat, Responses], r#""x""#),
    harmless("prompt_cache_retention", &[Chat, Responses], r#""24h""#),
    harmless("service_tier", CHATS, r#""auto""#),
    harmless("moderation", &[Chat, Responses], r#"{"x": 1}"#),
    harmless("prompt_cache_options", &[Chat, Responses], r#"{"x": 1}"#),
    harmless("background_options", &[Responses], r#"{"x": 1}"#),
    harmless("cache_control", &[Messages], r#"{"type": "ephemeral"}"#),
    harmless("speed", &[Messages], r#""fast""#),
    harmless("fallbacks", &[Messages], r#"["x"]"#),
    harmless("diagnostics", &[Messages], r#"{"x": 1}"#),
    harmless("user_profile_id", &[Messages], r#""x""#),
    harmless("workspace_id", &[Messages], r#""x""#),
    harmless("sse_ping_interval", BOTH, "3"),
    harmless("backend_sampling", BOTH, "true"),
    harmless("truncation_side", BOTH, r#""left""#),
    harmless("inference_geo", &[Messages], r#""us""#),
    harmless("prediction", &[Chat], r#"{"type": "content", "content": "x"}"#),
    harmless("cache_prompt", BOTH, "false"),
    harmless("n_keep", BOTH, "3"),
    harmless("n_discard", BOTH, "3"),
    harmless("n_cache_reuse", BOTH, "3"),
    harmless("id_slot", BOTH, "3"),
    harmless("priority", BOTH, "3"),
    harmless("request_id", BOTH, r#""x""#),
    harmless("cache_salt", BOTH, r#""x""#),
    harmless("kv_transfer_params", BOTH, r#"{"x": 1}"#),
    harmless("vllm_xargs", BOTH, r#"{"x": 1}"#),
    harmless("speculative.n_max", BOTH, "3"),
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
    for field in FIELDS.iter().filter(|field| field.apis.contains(&api)) {
        let Treatment::Refused(neutral) = field.treatment else { continue };
        let given = value(body, field.name);
        let is_neutral = |text: &&str| serde_json::from_str(text).is_ok_and(|v: Value| is_same(&v, given));
        let is_all = field.name == "best_of" && is_same(given, &body["n"]);
        if !(is_nothing(given) || is_all || neutral.iter().any(is_neutral)) {
            let what = match field.name {
                "n_predict" => "it is called max_tokens here",
                "previous_response_id" | "conversation" => {
                    "this server keeps no answers; send the whole input"
                }
                _ => "this server does not support it",
            };
            return Err(ApiError::param(field.name, what));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::requests::parse;
    use anemoe_runtime::chat::SamplingDefaults;
    use serde_json::json;

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

    #[test]
    fn every_field_is_honoured_refused_or_harmless() {
        for field in FIELDS {
            for &api in field.apis {
                let mut body = least(api);
                // Fields that mean something only beside others.
                match field.name {
                    "tool_choice" | "parallel_tool_calls" => {
                        let tools =
                            FIELDS.iter().find(|f| f.name == "tools" && f.apis.contains(&api)).unwrap();
                        if tools.treatment == Treatment::Honoured {
                            body["tools"] = serde_json::from_str(tools.example).unwrap();
                        }
                    }
                    "top_logprobs" if api == Chat => body["logprobs"] = true.into(),
                    _ => {}
                }
                let plain = effect(api, &body).unwrap();
                let example: Value = serde_json::from_str(field.example).unwrap();
                let mut place = &mut body;
                for key in field.name.split('.') {
                    place = &mut place[key];
                }
                *place = example;
                let got = effect(api, &body);
                let named = format!("{} of {api:?}: {got:?}", field.name);
                match field.treatment {
                    Treatment::Honoured => assert_ne!(got.unwrap(), plain, "{named}"),
                    Treatment::Harmless => assert_eq!(got.unwrap(), plain, "{named}"),
                    Treatment::Refused(neutral) => {
                        let e = got.unwrap_err();
                        assert_eq!(
                            (e.status.as_u16(), e.param.as_deref()),
                            (400, Some(field.name)),
                            "{named}"
                        );
                        for value in neutral.iter().chain(&["null"]) {
                            let mut place = &mut body;
                            for key in field.name.split('.') {
                                place = &mut place[key];
                            }
                            *place = serde_json::from_str(value).unwrap();
                            assert_eq!(effect(api, &body).unwrap(), plain, "{named} {value}");
                        }
                    }
                }
            }
        }
    }

    /// Returns the rows as the table of the document.
    fn table() -> String {
        let mut rows: Vec<(&str, [&str; 4])> = Vec::new();
        for field in FIELDS {
            if !rows.iter().any(|(name, _)| *name == field.name) {
                rows.push((field.name, ["", "", "", ""]));
            }
            let (_, row) = rows.iter_mut().find(|(name, _)| *name == field.name).unwrap();
            for api in field.apis {
                row[ALL.iter().position(|a| a == api).unwrap()] = match field.treatment {
                    Treatment::Honoured => "honoured",
                    Treatment::Refused(_) => "refused",
                    Treatment::Harmless => "harmless",
                };
            }
        }
        rows.iter().map(|(name, row)| format!("| `{name}` | {} |\n", row.join(" | "))).collect()
    }

    #[test]
    fn the_document_has_the_rows() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/serve.md");
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.contains(&table()), "docs/serve.md needs this table:\n{}", table());
    }
}
