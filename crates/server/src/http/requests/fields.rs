//! Every field of the four APIs, and of the additions of llama.cpp's server and vLLM, that is honoured or refused. Any other
//! has no effect, because it changes no answer.
//!
//! `docs/serve.md` has these rows as a table; the tests hold it against them, and send every row's example.

use crate::http::api::Api;
use crate::http::api::Api::{Chat, Completion, Messages, Responses};
use crate::http::api_error::ApiError;
use Treatment::{Honoured, Refused};
use serde_json::Value;

/// Treatment of a field.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Treatment {
    /// The answer follows it.
    Honoured,
    /// A request with another value than null, nothing or one of these, as JSON, is refused.
    Refused(&'static [&'static str]),
}

/// A field of requests: its name, the APIs that have it, its treatment there, and a value, as JSON, that has an effect where it
/// is supported.
type RequestField = (&'static str, &'static [Api], Treatment, &'static str);

const ALL: &[Api] = &[Chat, Completion, Responses, Messages];
const BOTH: &[Api] = &[Chat, Completion];
const OPENAI: &[Api] = &[Chat, Completion, Responses];
const CHATS: &[Api] = &[Chat, Responses, Messages];

const TOOL: &str = r#"[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]"#;

/// All fields, in the order of the document.
#[rustfmt::skip]
const FIELDS: &[RequestField] = &[
    // What is asked.
    ("model", ALL, Honoured, r#""other""#),
    ("messages", &[Chat, Messages], Honoured, r#"[{"role": "user", "content": "other"}]"#),
    ("prompt", &[Completion], Honoured, r#""other""#),
    ("prompt", &[Responses], Refused(&[]), r#"{"id": "x"}"#),
    ("input", &[Responses], Honoured, r#""other""#),
    ("instructions", &[Responses], Honoured, r#""be brief""#),
    ("system", &[Messages], Honoured, r#""be brief""#),
    ("chat_template_kwargs", CHATS, Honoured, r#"{"enable_thinking": true}"#),
    ("suffix", &[Completion], Refused(&[]), r#""x""#),
    ("echo", BOTH, Refused(&["false"]), "true"),
    ("documents", &[Chat], Refused(&[]), r#"[{"text": "x"}]"#),
    ("chat_template", &[Chat], Refused(&[]), r#""x""#),
    ("add_generation_prompt", &[Chat], Refused(&["true"]), "false"),
    ("continue_final_message", &[Chat], Refused(&["false"]), "true"),
    ("add_special_tokens", BOTH, Refused(&[]), "true"),
    ("truncate_prompt_tokens", BOTH, Refused(&["-1"]), "5"),
    ("previous_response_id", &[Responses], Refused(&[]), r#""resp_1""#),
    ("conversation", &[Responses], Refused(&[]), r#""conv_1""#),
    ("background", &[Responses], Refused(&["false"]), "true"),
    ("truncation", &[Responses], Refused(&[r#""disabled""#]), r#""auto""#),
    ("context_management", &[Responses, Messages], Refused(&[]), r#"[{"type": "compaction"}]"#),
    ("compaction", &[Messages], Refused(&[]), r#"{"type": "x"}"#),
    ("thread", &[Messages], Refused(&[]), r#"{"id": "x"}"#),
    ("container", &[Messages], Refused(&[]), r#""x""#),
    ("mcp_servers", &[Messages], Refused(&[]), r#"[{"name": "x"}]"#),
    // Tools.
    ("tools", &[Chat], Honoured, TOOL),
    ("tools", &[Responses], Honoured, r#"[{"type": "function", "name": "f"}]"#),
    ("tools", &[Messages], Honoured, r#"[{"name": "f", "input_schema": {"type": "object"}}]"#),
    ("tools", &[Completion], Refused(&[]), TOOL),
    ("tool_choice", &[Chat, Responses], Honoured, r#""none""#),
    ("tool_choice", &[Messages], Honoured, r#"{"type": "none"}"#),
    ("tool_choice", &[Completion], Refused(&[r#""none""#, r#""auto""#]), r#""required""#),
    ("parallel_tool_calls", &[Chat, Responses], Honoured, "false"),
    ("functions", BOTH, Refused(&[]), r#"[{"name": "f"}]"#),
    ("function_call", BOTH, Refused(&[r#""none""#]), r#"{"name": "f"}"#),
    ("web_search_options", &[Chat], Refused(&[]), r#"{"user_location": null}"#),
    // Length.
    ("max_tokens", &[Chat, Completion, Messages], Honoured, "3"),
    ("max_completion_tokens", BOTH, Honoured, "3"),
    ("max_output_tokens", &[Responses], Honoured, "3"),
    ("n_predict", BOTH, Refused(&[]), "8"),
    ("min_tokens", ALL, Honoured, "3"),
    ("ignore_eos", BOTH, Honoured, "true"),
    ("stop", BOTH, Honoured, r#""x""#),
    ("stop", &[Responses], Refused(&[]), r#""x""#),
    ("stop_token_ids", &[Responses], Refused(&[]), "[5]"),
    ("ignore_eos", &[Responses], Refused(&["false"]), "true"),
    ("skip_special_tokens", &[Responses], Refused(&["true"]), "false"),
    ("response_format", &[Responses], Refused(&[]), r#"{"type": "json_object"}"#),
    ("stop_sequences", &[Messages], Honoured, r#"["x"]"#),
    ("stop_token_ids", BOTH, Honoured, "[5]"),
    ("include_stop_str_in_output", BOTH, Refused(&["false"]), "true"),
    ("t_max_predict_ms", BOTH, Refused(&["0", "-1"]), "5"),
    ("n_indent", BOTH, Refused(&["0"]), "2"),
    // Choice of tokens.
    ("temperature", ALL, Honoured, "0.25"),
    ("top_p", ALL, Honoured, "0.5"),
    ("top_k", ALL, Honoured, "7"),
    ("seed", ALL, Honoured, "9"),
    ("min_p", ALL, Honoured, "0.1"),
    ("typical_p", ALL, Honoured, "0.5"),
    ("presence_penalty", ALL, Honoured, "0.5"),
    ("frequency_penalty", ALL, Honoured, "0.5"),
    ("repetition_penalty", ALL, Honoured, "1.1"),
    ("repeat_penalty", ALL, Honoured, "1.1"),
    ("repeat_last_n", ALL, Honoured, "5"),
    ("logit_bias", ALL, Honoured, r#"{"5": 1}"#),
    ("mirostat", BOTH, Refused(&["0"]), "2"),
    ("dry_multiplier", BOTH, Refused(&["0"]), "0.8"),
    ("xtc_probability", BOTH, Refused(&["0"]), "0.5"),
    ("dynatemp_range", BOTH, Refused(&["0"]), "0.5"),
    ("top_n_sigma", BOTH, Refused(&["-1", "0"]), "1"),
    ("adaptive_target", BOTH, Refused(&["-1"]), "0.5"),
    ("tfs_z", BOTH, Refused(&["1"]), "0.5"),
    ("no_repeat_ngram_size", BOTH, Refused(&["0"]), "3"),
    ("length_penalty", BOTH, Refused(&["1"]), "1.2"),
    ("min_keep", BOTH, Refused(&["0", "1"]), "3"),
    ("samplers", BOTH, Refused(&[]), r#"["top_k"]"#),
    ("use_beam_search", BOTH, Refused(&["false"]), "true"),
    ("logits_processors", BOTH, Refused(&[]), r#"["x"]"#),
    ("allowed_token_ids", BOTH, Refused(&[]), "[5]"),
    ("bad_words", BOTH, Refused(&[]), r#"["x"]"#),
    ("lora", BOTH, Refused(&[]), r#"[{"id": 0, "scale": 1}]"#),
    // Form of the answer.
    ("n", BOTH, Honoured, "2"),
    ("n_cmpl", BOTH, Refused(&["1"]), "2"),
    ("best_of", BOTH, Refused(&["1"]), "2"),
    ("response_format", BOTH, Honoured, r#"{"type": "json_object"}"#),
    ("text.format", &[Responses], Honoured, r#"{"type": "json_object"}"#),
    ("output_format", &[Messages], Honoured, r#"{"type": "json_schema", "schema": {"type": "object"}}"#),
    ("output_config.format", &[Messages], Honoured, r#"{"type": "json_schema", "schema": {"type": "object"}}"#),
    ("grammar", BOTH, Refused(&[]), r#""root ::= x""#),
    ("json_schema", BOTH, Refused(&[]), r#"{"type": "object"}"#),
    ("guided_json", BOTH, Refused(&[]), r#"{"type": "object"}"#),
    ("guided_regex", BOTH, Refused(&[]), r#""x""#),
    ("guided_choice", BOTH, Refused(&[]), r#"["x"]"#),
    ("guided_grammar", BOTH, Refused(&[]), r#""x""#),
    ("structured_outputs", OPENAI, Refused(&[]), r#"{"regex": "x"}"#),
    ("regex", BOTH, Refused(&[]), r#""x""#),
    ("ebnf", BOTH, Refused(&[]), r#""x""#),
    ("reasoning_effort", &[Chat], Honoured, r#""high""#),
    ("reasoning.effort", &[Responses], Honoured, r#""high""#),
    ("thinking", &[Messages], Honoured, r#"{"type": "enabled", "budget_tokens": 1024}"#),
    ("output_config.effort", &[Messages], Honoured, r#""high""#),
    ("reasoning_format", &[Chat], Honoured, r#""none""#),
    ("include_reasoning", &[Chat], Honoured, "false"),
    ("thinking_budget_tokens", &[Chat], Refused(&["-1"]), "100"),
    ("thinking_token_budget", &[Chat], Refused(&["-1"]), "100"),
    ("reasoning.summary", &[Responses], Refused(&[r#""auto""#]), r#""detailed""#),
    ("reasoning.generate_summary", &[Responses], Refused(&[r#""auto""#]), r#""detailed""#),
    ("verbosity", &[Chat], Refused(&[r#""medium""#]), r#""low""#),
    ("text.verbosity", &[Responses], Refused(&[r#""medium""#]), r#""low""#),
    ("modalities", &[Chat], Refused(&[r#"["text"]"#]), r#"["text", "audio"]"#),
    ("audio", &[Chat], Refused(&[]), r#"{"voice": "x"}"#),
    ("mm_processor_kwargs", &[Chat], Refused(&[]), r#"{"x": 1}"#),
    ("logprobs", &[Chat], Honoured, "true"),
    ("logprobs", &[Completion], Honoured, "3"),
    ("top_logprobs", &[Chat, Responses], Honoured, "3"),
    ("logprob_token_ids", BOTH, Refused(&[]), "[5]"),
    ("prompt_logprobs", BOTH, Refused(&[]), "1"),
    ("n_probs", BOTH, Refused(&["0"]), "3"),
    ("post_sampling_probs", BOTH, Refused(&["false"]), "true"),
    ("return_tokens_as_token_ids", BOTH, Refused(&["false"]), "true"),
    ("return_token_ids", BOTH, Refused(&["false"]), "true"),
    ("return_tokens", BOTH, Refused(&["false"]), "true"),
    ("response_fields", BOTH, Refused(&[]), r#"["content"]"#),
    ("skip_special_tokens", BOTH, Refused(&["true"]), "false"),
    ("parse_tool_calls", &[Chat], Refused(&["true"]), "false"),
    ("include", &[Responses], Honoured, r#"["message.output_text.logprobs"]"#),
    // How it is sent.
    ("stream", ALL, Honoured, "true"),
    ("stream_options.include_usage", BOTH, Honoured, "true"),
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
    for (name, apis, treatment, _) in FIELDS {
        let Refused(neutral) = treatment else { continue };
        if !apis.contains(&api) {
            continue;
        }
        let given = value(body, name);
        let is_neutral = |text: &&str| serde_json::from_str(text).is_ok_and(|v: Value| is_same(&v, given));
        let is_all = *name == "best_of" && is_same(given, &body["n"]);
        if !(is_nothing(given) || is_all || neutral.iter().any(is_neutral)) {
            let what = match *name {
                "n_predict" => "it is called max_tokens here",
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
    fn every_field_is_honoured_or_refused() {
        for &(name, apis, treatment, example) in FIELDS {
            for &api in apis {
                let mut body = least(api);
                // Fields that mean something only beside others.
                match name {
                    "tool_choice" | "parallel_tool_calls" => {
                        let tools = FIELDS.iter().find(|f| f.0 == "tools" && f.1.contains(&api)).unwrap();
                        if tools.2 == Honoured {
                            body["tools"] = serde_json::from_str(tools.3).unwrap();
                        }
                    }
                    "top_logprobs" if api == Chat => body["logprobs"] = true.into(),
                    _ => {}
                }
                let plain = effect(api, &body).unwrap();
                let example: Value = serde_json::from_str(example).unwrap();
                let mut place = &mut body;
                for key in name.split('.') {
                    place = &mut place[key];
                }
                *place = example;
                let got = effect(api, &body);
                let named = format!("{name} of {api:?}: {got:?}");
                match treatment {
                    Honoured => assert_ne!(got.unwrap(), plain, "{named}"),
                    Refused(neutral) => {
                        let e = got.unwrap_err();
                        assert_eq!((e.status.as_u16(), e.param.as_deref()), (400, Some(name)), "{named}");
                        for value in neutral.iter().chain(&["null"]) {
                            let mut place = &mut body;
                            for key in name.split('.') {
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
        for &(name, apis, treatment, _) in FIELDS {
            if !rows.iter().any(|(known, _)| *known == name) {
                rows.push((name, ["", "", "", ""]));
            }
            let (_, row) = rows.iter_mut().find(|(known, _)| *known == name).unwrap();
            for api in apis {
                row[ALL.iter().position(|a| a == api).unwrap()] = match treatment {
                    Honoured => "honoured",
                    Refused(_) => "refused",
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
