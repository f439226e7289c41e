//! A checkpoint in the shape of Gemma 4 with experts that recites: the next token is a function of the newest one alone.
//!
//! ```text
//! embedding   one-hot rows
//! layer 0     its MLP adds, four times as large, the row of the token that follows; all else adds nothing
//! head        the embedding
//! ```
//! The template ends a prompt with the last message, whose text is a token that begins a script.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Special tokens; the second and the sixth end an answer.
const SPECIAL: &str = "<pad> <eos> <bos> <unk> <|turn> <turn|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> \
    <|\"|> <|tool> <tool|> <|channel> <channel|> <|think|>";
/// A template that shows tools and calls as Gemma 4's does, and leaves out earlier thoughts.
pub const TEMPLATE: &str = r#"{%- macro shown(text) -%}{%- set ns = namespace(t='') -%}{%- for part in text.split('<channel|>') -%}
{%- set ns.t = ns.t + part.split('<|channel>')[0] -%}{%- endfor -%}{{ ns.t | trim }}{%- endmacro -%}
{{- bos_token -}}{%- if enable_thinking | default(false) -%}<|think|>{%- endif -%}
{%- for t in tools or [] -%}<|tool>declaration:{{ t['function']['name'] }}<tool|>{%- endfor -%}
{%- for m in messages -%}{{ '<|turn>' + m['role'] + '\n' }}
{%- if m.reasoning_content is defined and loop.last -%}{{ m.reasoning_content }}{%- endif -%}
{%- for c in m['tool_calls'] or [] -%}<|tool_call>call:{{ c['function']['name'] }}{
{%- for k, v in c['function']['arguments'] | dictsort -%}{{ k }}:<|"|>{{ v }}<|"|>{{ ',' if not loop.last }}{%- endfor -%}}<tool_call|>{%- endfor -%}
{{ shown(m['content']) }}{{ '<turn|>\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|turn>model\n' + messages[-1]['content'] }}{%- endif -%}"#;

/// Writes a checkpoint whose scripts are lists of tokens: the first begins the script, the others are said. `<eos>` ends an
/// answer. No token may have two successors.
pub fn write(folder: &Path, template: &str, scripts: &[&[&str]]) {
    std::fs::create_dir_all(folder).unwrap();
    let mut tokens: Vec<String> = SPECIAL.split_whitespace().map(String::from).collect();
    tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    tokens.push("\n".into());
    tokens.extend((33..127u8).map(|c| char::from(c).to_string()));
    tokens.push("\u{2581}".into());
    let special = SPECIAL.split_whitespace().count();
    let mut added: Vec<usize> = (0..special).collect();
    let mut follows = BTreeMap::new();
    for script in scripts {
        let mut last = None;
        for (i, text) in script.iter().enumerate() {
            let text = text.replace(' ', "\u{2581}");
            let id = tokens.iter().position(|t| *t == text).unwrap_or_else(|| {
                tokens.push(text.clone());
                tokens.len() - 1
            });
            if i == 0 {
                added.push(id);
            }
            if let Some(last) = last.replace(id) {
                assert_eq!(*follows.entry(last).or_insert(id), id, "{script:?} {text}");
            }
        }
    }
    let vocab = tokens.len();
    weights(folder, vocab, &follows);
    let entry = |id: &usize| {
        json!({"id": id, "content": tokens[*id], "special": *id < special, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false})
    };
    let ids: serde_json::Map<String, Value> =
        tokens.iter().enumerate().map(|(i, t)| (t.clone(), i.into())).collect();
    let blanks = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    let back = json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "});
    let tokenizer = json!({"version": "1.0", "added_tokens": added.iter().map(entry).collect::<Vec<_>>(), "normalizer": blanks,
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false},
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": ids, "merges": []}});
    let rope = json!({"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}});
    let width = width(vocab);
    let config = json!({"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "tie_word_embeddings": true,
        "text_config": {"model_type": "gemma4_text", "attention_k_eq_v": true, "bos_token_id": 2, "eos_token_id": [1, 5], "pad_token_id": 0,
            "enable_moe_block": true, "head_dim": 16, "global_head_dim": 32, "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": 30.0, "hidden_size": width, "hidden_size_per_layer_input": 0, "intermediate_size": width,
            "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 4096, "moe_intermediate_size": 16,
            "num_attention_heads": 2, "num_experts": 2, "top_k_experts": 1, "num_key_value_heads": 1, "num_global_key_value_heads": 1,
            "num_hidden_layers": 2, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-6, "rope_parameters": rope, "sliding_window": 64,
            "tie_word_embeddings": true, "use_double_wide_mlp": false, "vocab_size": vocab}});
    let own = json!({"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "chat_template": template});
    for (name, value) in [("config", config), ("tokenizer", tokenizer), ("tokenizer_config", own)] {
        std::fs::write(folder.join(format!("{name}.json")), value.to_string()).unwrap();
    }
}

fn width(vocab: usize) -> usize {
    vocab.next_multiple_of(64)
}

/// Writes `model.safetensors` in BF16.
fn weights(folder: &Path, vocab: usize, follows: &BTreeMap<usize, usize>) {
    const ONE: f32 = 1.0;
    let h = width(vocab);
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    // Zeros, with the same value at some places.
    let mut add = |name: String, shape: &[usize], value: f32, places: &mut dyn Iterator<Item = usize>| {
        let start = data.len();
        data.resize(start + 2 * shape.iter().product::<usize>(), 0);
        let bits = ((value.to_bits() >> 16) as u16).to_le_bytes();
        for place in places {
            data[start + 2 * place..start + 2 * place + 2].copy_from_slice(&bits);
        }
        let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(format!("model.language_model.{name}"), entry);
    };
    add("embed_tokens.weight".into(), &[vocab, h], ONE, &mut (0..vocab).map(|i| i * h + i));
    add("norm.weight".into(), &[h], ONE, &mut (0..h));
    for (layer, d) in [16, 32].into_iter().enumerate() {
        let p = format!("layers.{layer}.");
        let norms = "input_layernorm post_attention_layernorm pre_feedforward_layernorm pre_feedforward_layernorm_2 \
            post_feedforward_layernorm post_feedforward_layernorm_1 post_feedforward_layernorm_2";
        for norm in norms.split_whitespace() {
            let value = if layer == 0 && norm == "post_feedforward_layernorm" { 4.0 } else { ONE };
            add(format!("{p}{norm}.weight"), &[h], value, &mut (0..h));
        }
        add(format!("{p}layer_scalar"), &[1], ONE, &mut (0..1));
        let diagonal = if layer == 0 { h } else { 0 };
        for name in ["gate", "up"] {
            add(format!("{p}mlp.{name}_proj.weight"), &[h, h], ONE, &mut (0..diagonal).map(|i| i * h + i));
        }
        let next = follows.iter().filter(|_| layer == 0).map(|(from, to)| to * h + from);
        add(format!("{p}mlp.down_proj.weight"), &[h, h], ONE, &mut next.into_iter());
        add(format!("{p}router.proj.weight"), &[2, h], ONE, &mut (0..0));
        add(format!("{p}router.scale"), &[h], ONE, &mut (0..h));
        add(format!("{p}router.per_expert_scale"), &[2], ONE, &mut (0..2));
        add(format!("{p}experts.gate_up_proj"), &[2, 32, h], ONE, &mut (0..0));
        add(format!("{p}experts.down_proj"), &[2, h, 16], ONE, &mut (0..0));
        let values = (layer == 0).then_some(("v", d));
        for (name, rows) in [("q", 2 * d), ("k", d)].into_iter().chain(values) {
            add(format!("{p}self_attn.{name}_proj.weight"), &[rows, h], ONE, &mut (0..0));
        }
        add(format!("{p}self_attn.o_proj.weight"), &[h, 2 * d], ONE, &mut (0..0));
        for name in ["q", "k"] {
            add(format!("{p}self_attn.{name}_norm.weight"), &[d], ONE, &mut (0..d));
        }
    }
    let mut head = Value::from(header).to_string().into_bytes();
    head.resize(head.len().next_multiple_of(8), b' ');
    let mut file = (head.len() as u64).to_le_bytes().to_vec();
    file.extend(head);
    file.extend(data);
    std::fs::write(folder.join("model.safetensors"), file).unwrap();
}
