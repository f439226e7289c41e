//! Architectures of GGUF files: names of tensors and `config.json` of each.
//!
//! Facts are from llama.cpp: what its converter writes (`conversion/*.py`) and its loader reads (`src/models/*.cpp`).

use super::config::{Arch, EXPERT_WIDTH, LayerNames, StatedModel, layer_type};
use crate::{Error, Result};
use serde_json::{Map, Value, json};

type Config = Map<String, Value>;

/// Every architecture that is read.
pub static ARCHS: [Arch; 8] = [
    Arch { has_paired_rows: true, ..arch("llama", "llama", llama, DENSE) },
    arch("qwen2", "qwen2", qwen2, DENSE),
    arch("qwen3", "qwen3", qwen3, DENSE),
    arch("qwen3moe", "qwen3_moe", qwen3moe, EXPERTS),
    arch("olmoe", "olmoe", olmoe, EXPERTS),
    Arch { has_norms_plus_one: true, ..arch("gemma3", "gemma3_text", gemma3, GEMMA3) },
    arch("gemma4", "gemma4_text", gemma4, GEMMA4),
    Arch { width: EXPERT_WIDTH, ..arch("gpt-oss", "gpt_oss", gpt_oss, GPT_OSS) },
];

const fn arch(
    name: &'static str,
    model_type: &'static str,
    config: fn(&StatedModel<'_>, &mut Config) -> Result<()>,
    names: LayerNames,
) -> Arch {
    let width = "feed_forward_length";
    Arch { name, model_type, width, config, names, has_paired_rows: false, has_norms_plus_one: false }
}

const DENSE: LayerNames = &[("ffn_norm.weight", "post_attention_layernorm.weight")];
const EXPERTS: LayerNames = &[
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
    ("ffn_gate_inp.weight", "mlp.gate.weight"),
    ("ffn_gate_exps.weight", "mlp.experts.gate_up_proj"),
    ("ffn_up_exps.weight", "mlp.experts.gate_up_proj"),
    ("ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj"),
    ("ffn_down_exps.weight", "mlp.experts.down_proj"),
];
const GPT_OSS: LayerNames = &[
    ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    ("attn_sinks.weight", "self_attn.sinks"),
    ("ffn_gate_inp.weight", "mlp.router.weight"),
    ("ffn_gate_inp.bias", "mlp.router.bias"),
    ("ffn_gate_exps.weight", "mlp.experts.gate_up_proj"),
    ("ffn_up_exps.weight", "mlp.experts.gate_up_proj"),
    ("ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj"),
    ("ffn_down_exps.weight", "mlp.experts.down_proj"),
    ("ffn_gate_exps.bias", "mlp.experts.gate_up_proj_bias"),
    ("ffn_up_exps.bias", "mlp.experts.gate_up_proj_bias"),
    ("ffn_gate_up_exps.bias", "mlp.experts.gate_up_proj_bias"),
    ("ffn_down_exps.bias", "mlp.experts.down_proj_bias"),
];
const GEMMA3: LayerNames = &[
    ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    ("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
    ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
];
const GEMMA4: LayerNames = &[
    ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    ("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
    ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
    ("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight"),
    ("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight"),
    ("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight"),
    ("ffn_gate_inp.weight", "router.proj.weight"),
    ("ffn_gate_inp.scale", "router.scale"),
    ("ffn_gate_exps.weight", "experts.gate_up_proj"),
    ("ffn_up_exps.weight", "experts.gate_up_proj"),
    ("ffn_gate_up_exps.weight", "experts.gate_up_proj"),
    ("ffn_down_exps.weight", "experts.down_proj"),
    ("ffn_down_exps.scale", "router.per_expert_scale"),
    ("layer_output_scale.weight", "layer_scalar"),
];

/// Adds keys to a configuration.
fn add<const N: usize>(c: &mut Config, keys: [(&str, Value); N]) {
    c.extend(keys.map(|(name, value)| (name.to_string(), value)));
}

/// Adds what models without a kind of layers of their own have: heads, an activation, and one rope.
fn add_plain(s: &StatedModel<'_>, c: &mut Config) -> Result<()> {
    let head_dim = s.add_heads(c)?;
    add(c, [("hidden_act", json!("silu")), ("rope_parameters", s.rope(head_dim)?.into())]);
    Ok(())
}

/// Adds the keys of Llama, or of Mistral, whose files are of this arch too; only theirs name a window. Some files of
/// this arch have experts.
fn llama(s: &StatedModel<'_>, c: &mut Config) -> Result<()> {
    s.expect_size("expert_count", 0)?;
    if s.window()?.is_some() {
        add(c, [("model_type", json!("mistral"))]);
    } else {
        add(c, [("attention_bias", json!(s.has_attention_bias())), ("mlp_bias", json!(false))]);
    }
    add_plain(s, c)
}

fn qwen2(s: &StatedModel<'_>, c: &mut Config) -> Result<()> {
    add(c, [("use_sliding_window", json!(false))]);
    add_plain(s, c)
}

fn qwen3(s: &StatedModel<'_>, c: &mut Config) -> Result<()> {
    let bias = s.has_attention_bias();
    add(c, [("use_sliding_window", json!(false)), ("attention_bias", json!(bias))]);
    add_plain(s, c)
}

fn qwen3moe(s: &StatedModel<'_>, c: &mut Config) -> Result<()> {
    let dense = (0..s.layers).filter(|l| s.names.contains(&*format!("blk.{l}.ffn_gate.weight")));
    let active = s.size("expert_used_count")?;
    // Without it, llama.cpp divides the width of all active experts.
    let width = match s.m.values.contains_key(&s.key(EXPERT_WIDTH)) {
        true => s.equal_sizes(EXPERT_WIDTH)?,
        false => s.equal_sizes("feed_forward_length")?.checked_div(active).unwrap_or(0),
    };
    add(
        c,
        [
            ("use_sliding_window", json!(false)),
            ("attention_bias", json!(s.has_attention_bias())),
            ("num_experts", json!(s.size("expert_count")?)),
            ("num_experts_per_tok", json!(active)),
            ("moe_intermediate_size", json!(width)),
            ("norm_topk_prob", json!(true)),
            ("decoder_sparse_step", json!(1)),
            ("mlp_only_layers", dense.collect()),
        ],
    );
    add_plain(s, c)
}

fn olmoe(s: &StatedModel<'_>, c: &mut Config) -> Result<()> {
    add(
        c,
        [
            ("attention_bias", json!(s.has_attention_bias())),
            ("clip_qkv", json!(s.m.number(&s.key("attention.clamp_kqv"))?.filter(|n| *n > 0.0))),
            ("num_experts", json!(s.size("expert_count")?)),
            ("num_experts_per_tok", json!(s.size("expert_used_count")?)),
            ("norm_topk_prob", json!(false)),
        ],
    );
    add_plain(s, c)
}

/// Adds the keys of gpt-oss. YaRN's betas, the clamp and the factor of the activation are not in files; they are those
/// of the published models.
fn gpt_oss(s: &StatedModel<'_>, c: &mut Config) -> Result<()> {
    s.size("attention.sliding_window")?;
    let sliding = s.sliding(2)?;
    add(
        c,
        [
            ("attention_bias", json!(true)),
            ("num_local_experts", json!(s.size("expert_count")?)),
            ("num_experts_per_tok", json!(s.size("expert_used_count")?)),
            ("swiglu_limit", json!(7.0)),
            ("swiglu_alpha", json!(1.702)),
            ("layer_types", sliding.iter().map(layer_type).collect()),
        ],
    );
    add_plain(s, c)?;
    if let Some(Value::Object(rope)) = c.get_mut("rope_parameters").filter(|r| r["rope_type"] == "yarn") {
        add(rope, [("beta_fast", json!(32.0)), ("beta_slow", json!(1.0)), ("truncate", json!(false))]);
    }
    Ok(())
}

/// Layers of Gemma 3 27B, whose queries are scaled by the width of a head as it would be without `head_dim`.
const GEMMA3_27B_LAYERS: usize = 62;

/// Adds the keys of Gemma 3. A scaling of the rope is that of full layers only.
fn gemma3(s: &StatedModel<'_>, c: &mut Config) -> Result<()> {
    let head_dim = s.add_heads(c)?;
    let heads = s.equal_sizes("attention.head_count")?;
    let by_width = s.size("embedding_length")?.checked_div(heads);
    let scalar = by_width.filter(|_| s.layers == GEMMA3_27B_LAYERS).unwrap_or(head_dim);
    let sliding = s.window()?.map_or_else(|| Ok(vec![false; s.layers]), |_| s.sliding(6))?;
    let local = s.m.number(&s.key("rope.freq_base_swa"))?.unwrap_or(10_000.0);
    add(
        c,
        [
            ("hidden_activation", json!("gelu_pytorch_tanh")),
            ("attention_bias", json!(s.has_attention_bias())),
            ("query_pre_attn_scalar", json!(scalar)),
            ("layer_types", sliding.iter().map(layer_type).collect()),
            (
                "rope_parameters",
                json!({
                    "full_attention": s.rope(head_dim)?,
                    "sliding_attention": {"rope_type": "default", "rope_theta": local},
                }),
            ),
        ],
    );
    for name in ["attn_logit_softcapping", "final_logit_softcapping"] {
        c.insert(name.into(), json!(s.m.number(&s.key(name))?.filter(|n| *n != 0.0)));
    }
    Ok(())
}

/// Share of a head's pairs that rotate on full layers, where a file of gemma4 has no `rope_freqs.weight`.
const PARTIAL_ROTARY_FACTOR: f64 = 0.25;
/// `final_logit_softcapping` where a file of gemma4 has none.
const SOFTCAPPING: f64 = 30.0;
/// Least divisor of a frequency that means no rotation of its pair; writers use 1e30.
const NO_ROTATION: f32 = 1e20;

fn gemma4(s: &StatedModel<'_>, c: &mut Config) -> Result<()> {
    let (m, layers) = (s.m, s.layers);
    let sliding_key = s.key("attention.sliding_window_pattern");
    m.needed(&sliding_key, m.flags(&sliding_key)?)?;
    let sliding = s.sliding(0)?;
    let kv_key = s.key("attention.head_count_kv");
    let kv_heads = m.needed(&kv_key, m.unsigneds(&kv_key, layers)?)?;
    let (head_dim, global_head_dim) = (s.size("attention.key_length_swa")?, s.size("attention.key_length")?);
    s.expect_size("attention.value_length", global_head_dim)?;
    s.expect_size("attention.value_length_swa", head_dim)?;
    s.expect_size("rope.dimension_count", global_head_dim)?;
    s.expect_size("rope.dimension_count_swa", head_dim)?;
    let scaling = s.key("rope.scaling.type");
    if let Some(kind) = m.text(&scaling)?.filter(|t| *t != "none") {
        return Err(m.unsupported(&scaling, format!("is {}, implemented is none", kind.escape_debug())));
    }
    let first = |s: bool| sliding.iter().position(|&x| x == s).map_or(kv_heads[0], |l| kv_heads[l]);
    let (kv, global_kv) = (first(true), first(false));
    s.size("attention.sliding_window")?;
    let experts = m.unsigned(&s.key("expert_count"))?.unwrap_or(0);
    add(c, [("enable_moe_block", json!(experts > 0))]);
    if experts > 0 {
        add(
            c,
            [
                ("num_experts", json!(experts)),
                ("top_k_experts", json!(s.size("expert_used_count")?)),
                ("moe_intermediate_size", json!(s.equal_sizes(EXPERT_WIDTH)?)),
            ],
        );
    }
    let softcapping = m.number(&s.key("final_logit_softcapping"))?.unwrap_or(SOFTCAPPING);
    add(c, [("final_logit_softcapping", json!(softcapping))]);
    // The configuration's reader refuses these features unless they are off.
    for (name, hf) in [
        ("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
        ("attention.shared_kv_layers", "num_kv_shared_layers"),
    ] {
        c.insert(hf.into(), json!(m.unsigned(&s.key(name))?.unwrap_or(0)));
    }
    if let Some(cap) = m.number(&s.key("attn_logit_softcapping"))? {
        add(c, [("attn_logit_softcapping", json!(cap))]);
    }
    add(
        c,
        [
            ("layer_types", sliding.iter().map(layer_type).collect()),
            ("head_dim", json!(head_dim)),
            ("global_head_dim", json!(global_head_dim)),
            ("num_key_value_heads", json!(kv)),
            ("num_global_key_value_heads", json!(global_kv)),
        ],
    );
    // If one full layer has no values of its own, no full layer has; the tensor table finds a superfluous tensor.
    let has_v = |l: usize| s.names.contains(&*format!("blk.{l}.attn_v.weight"));
    let k_eq_v = (0..layers).any(|l| !sliding[l] && !has_v(l));
    let has_global = |l: usize| k_eq_v && !sliding[l];
    let others = (0..layers).filter(|&l| kv_heads[l] != if has_global(l) { global_kv } else { kv });
    let others: Config =
        others.map(|l| (l.to_string(), json!({"num_key_value_heads": kv_heads[l]}))).collect();
    if !others.is_empty() {
        add(c, [("per_layer_config", others.into())]);
    }
    let factor = match &s.rope_freqs {
        Some(divisors) => rotary_factor(s, divisors, global_head_dim)?,
        None => PARTIAL_ROTARY_FACTOR,
    };
    add(
        c,
        [
            ("attention_k_eq_v", json!(k_eq_v)),
            (
                "rope_parameters",
                json!({
                    "sliding_attention": {"rope_type": "default", "rope_theta": s.number("rope.freq_base_swa")?},
                    "full_attention": {
                        "rope_type": "proportional", "rope_theta": s.number("rope.freq_base")?,
                        "partial_rotary_factor": factor,
                    },
                }),
            ),
        ],
    );
    Ok(())
}

/// Returns the share of pairs that rotate: those of divisor 1, before pairs whose divisors are so large that they
/// stand still.
fn rotary_factor(s: &StatedModel<'_>, divisors: &[f32], head_dim: u64) -> Result<f64> {
    let pairs = divisors.len();
    let refused = |what: String| Error::unsupported(s.m.path, format!("tensor `rope_freqs.weight`: {what}"));
    if pairs as u64 != head_dim / 2 {
        let what = format!("tensor `rope_freqs.weight`: {pairs} elements, expected {}", head_dim / 2);
        return Err(Error::invalid(s.m.path, what));
    }
    let rotating = divisors.iter().take_while(|d| **d == 1.0).count();
    if let Some(d) = divisors[rotating..].iter().find(|d| d.is_nan() || **d < NO_ROTATION) {
        return Err(refused(format!("divisor {d}; implemented are ones, then {NO_ROTATION:e} and more")));
    }
    if rotating == 0 {
        return Err(refused("no pair rotates".into()));
    }
    let factor = rotating as f64 / pairs as f64;
    // The configuration's reader multiplies this factor by the pairs again and rounds down.
    let exact = (factor * head_dim as f64 / 2.0) as usize == rotating;
    Ok(if exact { factor } else { factor.next_up() })
}
