//! The original layout (80 half-layers, a tensor per expert, Megatron's configuration keys) under the names and shapes of
//! transformers.

use crate::Result;
use crate::checkpoint::{Checkpoint, DerivedTensor, TensorOrigin, derive};
use crate::models::checked::is_unneeded;
use crate::models::keys::Keys;
use crate::models::tensor_table::TensorRow;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

const PREFIX: &str = "model.";
/// Beginnings of transformers' names, each with that of the original one and its half-layer: layer i has its attention in
/// half-layer 2i, its experts in 2i + 1, and the residual behind these in 2i + 2.
const NAMES: [(&str, usize, &str); 18] = [
    ("input_layernorm", 0, "input_norm"),
    ("self_attn.qkv_proj.q_proj", 0, "self_attn.qkv.linear_q"),
    ("self_attn.qkv_proj.k_proj", 0, "self_attn.qkv.linear_k"),
    ("self_attn.qkv_proj.v_proj_current", 0, "self_attn.qkv.val_proj1"),
    ("self_attn.qkv_proj.v_proj_delayed", 0, "self_attn.qkv.val_proj2"),
    ("self_attn.qkv_proj.conv_qk_depthwise", 0, "self_attn.qkv.conv_qk.0"),
    ("self_attn.qkv_proj.conv_qk_grouped", 0, "self_attn.qkv.conv_qk.1"),
    ("self_attn.qk_norm.temp", 0, "self_attn.qkv.temp"),
    ("post_attention_residual_scale", 1, "res_scale"),
    ("post_attention_layernorm", 1, "input_norm"),
    ("mlp.gate.router_mlp.norm", 1, "zaya_block.router.rmsnorm_eda"),
    ("mlp.gate.router_mlp.fc1", 1, "zaya_block.router.router_mlp.0"),
    ("mlp.gate.router_mlp.fc2", 1, "zaya_block.router.router_mlp.2"),
    ("mlp.gate.router_mlp.out_proj", 1, "zaya_block.router.router_mlp.4"),
    ("mlp.gate", 1, "zaya_block.router"),
    ("post_mlp_residual_scale", 2, "res_scale"),
    ("norm", 0, "final_norm"),
    ("input_hidden_states", 0, "layers.0.res_scale.hidden_states"),
];

/// Tells whether the configuration has a key that only the original layout has, and lacks transformers' key.
fn is_legacy(checkpoint: &Checkpoint) -> bool {
    let has = |key: &str| checkpoint.config.get(key).is_some_and(|v| !v.is_null());
    let is_ours = checkpoint.config.get("model_type").is_some_and(|t| t == "zaya");
    is_ours && (has("ffn_hidden_size") || has("ffn_hidden_size_list")) && !has("moe_intermediate_size")
}

/// Renames the tensors and keys of a checkpoint in the original layout to those of transformers; gives other
/// checkpoints back as they are.
///
/// # Errors
/// A configuration key is missing or asks for something that is not implemented; a tensor is missing (an expert's is named),
/// superfluous or of another shape.
pub fn normalize_layout(checkpoint: Checkpoint) -> Result<Checkpoint> {
    if !is_legacy(&checkpoint) {
        return Ok(checkpoint);
    }
    let path = checkpoint.config_path();
    let config = config(&checkpoint.config, &path)?;
    let decoder = super::parse(Keys::of_text(&config, &path)?, Default::default())?;
    let derived = |row: TensorRow| DerivedTensor {
        origin: origin(&row, decoder.layers.len()),
        name: format!("{PREFIX}{}", row.name),
        shape: row.shape,
    };
    let tensors = decoder.tensors().into_iter().map(derived).collect();
    derive(Checkpoint { config, ..checkpoint }, tensors, is_unneeded)
}

/// Returns the place of a tensor in the original layout of a model of `layers` layers.
fn origin(row: &TensorRow, layers: usize) -> TensorOrigin {
    let half = |half: usize, name: &str| match row.layer {
        None => format!("{PREFIX}{name}"),
        // Behind the last half-layer.
        Some(l) if 2 * l + half == 2 * layers => format!("{PREFIX}{name}"),
        Some(l) => format!("{PREFIX}layers.{}.{name}", 2 * l + half),
    };
    let experts = |of: &str| {
        let one = |e| half(1, &format!("zaya_block.experts.local_experts.{e}.{of}.weight"));
        TensorOrigin::Pieces((0..row.shape[0]).map(one).collect())
    };
    match row.role {
        "gate_up" => experts("linear_fc1"),
        "down" => experts("linear_fc2"),
        _ => {
            let own = row.layer.and_then(|l| row.name.strip_prefix(&format!("layers.{l}.")));
            let own = own.unwrap_or(&row.name);
            let renamed = |(ours, at, theirs): &(&str, usize, &str)| {
                Some(half(*at, &format!("{theirs}{}", own.strip_prefix(ours)?)))
            };
            TensorOrigin::Whole(NAMES.iter().find_map(renamed).unwrap_or_else(|| half(0, own)))
        }
    }
}

/// Translates a configuration of the original layout to transformers' keys.
fn config(legacy: &Value, path: &Path) -> Result<Value> {
    let k = Keys::of_text(legacy, path)?;
    let yes = [json!(true)];
    let no = [json!(false)];
    for key in [
        "cca",
        "zaya_use_eda",
        "zaya_use_mod",
        "scale_residual_merge",
        "residual_in_fp32",
        "gated_linear_unit",
    ] {
        k.expect(key, &yes)?;
    }
    for key in ["add_bias_linear", "clamp_temp", "rope_scaling"] {
        k.expect(key, &no)?;
    }
    k.expect("activation_func", &[json!("swiglu"), json!("silu")])?;
    k.expect("normalization", &[json!("RMSNorm")])?;
    let windows = match k.get("swa_layers") {
        Some(Value::Array(list)) => list.as_slice(),
        Some(one) => std::slice::from_ref(one),
        None => &[],
    };
    if windows.iter().any(|v| *v != json!(0) && *v != json!(false)) {
        return Err(
            k.unsupported("`swa_layers` has a window, implemented is attention to all positions".into())
        );
    }
    let halves = k.size("num_hidden_layers")?;
    if !halves.is_multiple_of(2) {
        return Err(
            k.invalid(format!("`num_hidden_layers` is {halves}: attention and MoE half-layers alternate"))
        );
    }
    // Some releases give a size for each half-layer, 0 for a half-layer without it.
    let size = |names: &[&str]| -> Result<usize> {
        let found = names.iter().find(|n| k.get(n).is_some());
        let name = found.ok_or_else(|| k.invalid(format!("`{}` is missing", names[0])))?;
        let value = &k.map[*name];
        let Some(list) = value.as_array() else { return k.size_of(name, value) };
        let sizes: Option<BTreeSet<u64>> = list.iter().map(Value::as_u64).collect();
        let mut sizes = sizes
            .ok_or_else(|| k.invalid(format!("`{name}` is {value}, expected a size for each half-layer")))?;
        sizes.remove(&0);
        match (sizes.len(), sizes.first()) {
            (1, Some(n)) => k.size_of(name, &json!(n)),
            _ => Err(k.unsupported(format!("`{name}` has {} sizes, implemented is one", sizes.len()))),
        }
    };
    let ffn = size(&["ffn_hidden_size", "ffn_hidden_size_list"])?;
    if !ffn.is_multiple_of(2) {
        return Err(k.invalid(format!("`ffn_hidden_size` is {ffn}: gate and up projection are equally wide")));
    }
    let layers = halves / 2;
    let mut out = json!({
        "model_type": "zaya",
        "hidden_size": size(&["hidden_size"])?,
        "num_hidden_layers": layers,
        "layer_types": vec!["hybrid"; layers.min(1001)],
        // The first release also counts 16 heads before compression, under the second key.
        "num_attention_heads": size(&["cca_num_q_heads", "num_attention_heads"])?,
        "num_key_value_heads": size(&["num_query_groups", "num_query_groups_list", "num_key_value_heads"])?,
        "head_dim": size(&["head_dim", "kv_channels"])?,
        "num_experts": size(&["num_experts"])?,
        "moe_intermediate_size": ffn / 2,
        "router_hidden_size": size(&["zaya_mlp_expansion"])?,
        "vocab_size": size(&["vocab_size"])?,
        "max_position_embeddings": size(&["max_position_embeddings"])?,
        "hidden_act": "silu",
        "rope_parameters": {"hybrid": {
            "rope_type": "default",
            "rope_theta": k.get("rope_theta").cloned().unwrap_or(Value::Null),
            "partial_rotary_factor": k.get("partial_rotary_factor").cloned().unwrap_or(Value::Null),
        }},
        "rms_norm_eps": k.get("norm_epsilon").cloned().unwrap_or(Value::Null),
        "num_experts_per_tok": k.get("moe_router_topk").cloned().unwrap_or(json!(1)),
    });
    for key in [
        "tie_word_embeddings",
        "attention_bias",
        "lm_head_bias",
        "sliding_window",
        "cca_time0",
        "cca_time1",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ] {
        out[key] = k.get(key).cloned().unwrap_or(Value::Null);
    }
    Ok(out)
}
