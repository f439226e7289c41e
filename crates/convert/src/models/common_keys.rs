//! Configuration keys that most families share.

use super::decoder::{
    Attention, Decoder, ExpertLayer, HeadNorm, Layer, Norms, Preset, QkvProjection, Residual, RouterKind,
    ValueSource,
};
use super::keys::Keys;
use super::rope::rope;
use crate::Result;
use crate::plan::PartKinds;
use crate::quant::Quant;
use anemoe_bundle::IndexBits;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Name of the rope and the cache of layers that attend to all positions.
pub const FULL: &str = "full";
/// Name of the rope and the cache of layers that attend to a window.
pub const SLIDING: &str = "sliding";
/// Type of a layer that attends to all positions.
pub const FULL_ATTENTION: &str = "full_attention";
/// Type of a layer that attends to a window.
pub const SLIDING_ATTENTION: &str = "sliding_attention";
/// Prefixes of the text model's tensors: alone, beside images in two layouts, and both saved from the base model.
pub const PREFIXES: &[&str] =
    &["model.", "model.language_model.", "language_model.model.", "language_model.", ""];

/// Most experts of a layer: far more than any model has. One layout has a tensor for each expert.
const MAX_EXPERTS: usize = 4096;
/// Names of SiLU in `hidden_act`.
pub const SILU: [&str; 2] = ["silu", "swish"];

/// Kinds for models that were not measured: attention and head get more bits, since they are a small part of an
/// MoE model.
pub const PRESET: Preset = Preset {
    quant: Quant::lut(IndexBits::Four),
    parts: PartKinds {
        attention: Some(Quant::lut(IndexBits::Six)),
        head: Some(Quant::lut(IndexBits::Six)),
        ..PartKinds::NONE
    },
    reason: "these lower the mean divergence of small-gemma4 from 0.0235 to 0.0096 nats over 16 prompts, for 22 % more bytes a token",
};

/// Keys that a summary shows where a configuration has them.
const SUMMARY: [&str; 16] = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "intermediate_size",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "top_k_experts",
    "moe_intermediate_size",
    "router_hidden_size",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
];

/// Makes the description of a decoder from the keys that families share: RMS norms before each branch, a plain
/// residual, no factor of the embedding, logits without bounds.
///
/// # Errors
/// A key is missing or has an impossible value.
pub fn decoder(k: Keys<'_>, family: &'static str, is_tied: bool, layers: Vec<Layer>) -> Result<Decoder> {
    let vocab = k.size("vocab_size")?;
    Ok(Decoder {
        family,
        hidden: k.size("hidden_size")?,
        vocab,
        positions: k.size("max_position_embeddings")?,
        eps: k.epsilon("rms_norm_eps")?,
        norm_offset: 0.0,
        norms: Norms::Before,
        residual: Residual::Plain,
        embedding_scale: 1.0,
        stream_unit: 1.0,
        is_tied: k.flag("tie_word_embeddings", is_tied)?,
        is_rotated: false,
        softcap: None,
        bos: k.tokens("bos_token_id", vocab)?.first().copied(),
        eos: k.tokens("eos_token_id", vocab)?,
        layers,
        assistant: None,
        names: &[],
        prefixes: PREFIXES,
        preset: PRESET,
        attention_kind: None,
        readings: BTreeMap::new(),
        summary: k.summary(&SUMMARY),
    })
}

/// Makes attention from the keys that families share: direct projections with or without biases, scores over the square
/// root of a head's channels. A layer with a window is of the kind [`SLIDING`].
///
/// # Errors
/// A key is missing or has an impossible value.
pub fn attention(k: Keys<'_>, norm: HeadNorm, window: Option<usize>, has_bias: bool) -> Result<Attention> {
    let heads = k.size("num_attention_heads")?;
    let kv_heads = k.size_or("num_key_value_heads", heads)?;
    let head_dim = k.size_or("head_dim", (k.size("hidden_size")? / heads).max(1))?;
    let projection = QkvProjection::Direct { norm, values: ValueSource::Own, has_bias };
    let sizes = (heads, kv_heads, head_dim);
    let attention = attention_of(k, sizes, window, (head_dim as f64).sqrt(), projection)?;
    Ok(Attention { has_output_bias: has_bias, ..attention })
}

/// Makes attention of sizes that a family has found: query heads, key/value heads, and channels of a head. Scores are
/// divided by `root`. A layer with a window is of the kind [`SLIDING`].
///
/// # Errors
/// The heads do not fit each other, or a key of the rope is missing or has an impossible value.
pub fn attention_of(
    k: Keys<'_>,
    (heads, kv_heads, head_dim): (usize, usize, usize),
    window: Option<usize>,
    root: f64,
    projection: QkvProjection,
) -> Result<Attention> {
    k.check_heads(heads, kv_heads)?;
    let (kind, of) = match window {
        None => (FULL, FULL_ATTENTION),
        Some(_) => (SLIDING, SLIDING_ATTENTION),
    };
    let (rope, factor) = rope(k, of, head_dim, false)?;
    Ok(Attention {
        kind,
        heads,
        kv_heads,
        head_dim,
        window,
        rope,
        scale: (factor / root) as f32,
        projection,
        has_output_bias: false,
        has_sinks: false,
    })
}

/// Makes experts without biases from their number, those that a token uses, and the width of one.
///
/// # Errors
/// There are more than `MAX_EXPERTS`, or fewer than a token uses.
pub fn experts(
    k: Keys<'_>,
    (count, active, width): (usize, usize, usize),
    router: RouterKind,
) -> Result<ExpertLayer> {
    if count > MAX_EXPERTS {
        return Err(k.invalid(format!("`num_experts` is {count}, more than {MAX_EXPERTS}")));
    }
    match active <= count {
        true => Ok(ExpertLayer { count, active, width, has_bias: false, router }),
        false => Err(k.invalid(format!("`num_experts_per_tok` is {active} of {count} experts"))),
    }
}

/// Returns the window of each layer for which `is_sliding` of its number holds; `layer_types` says nothing.
///
/// # Errors
/// A window is missing.
pub fn sliding(k: Keys<'_>, is_sliding: impl Fn(usize) -> bool) -> Result<Vec<Option<usize>>> {
    (0..k.layers()?).map(|l| is_sliding(l).then(|| k.size("sliding_window")).transpose()).collect()
}

/// Returns the window of each layer: `layer_types` where the configuration has them, else `is_sliding` of the layer's
/// number.
///
/// # Errors
/// A type is not known, or a window is missing.
pub fn windows(k: Keys<'_>, is_sliding: impl Fn(usize) -> bool) -> Result<Vec<Option<usize>>> {
    let layers = k.layers()?;
    let types = k.layer_types(layers, &[FULL_ATTENTION, SLIDING_ATTENTION])?;
    sliding(k, |l| types.as_ref().map_or_else(|| is_sliding(l), |t| t[l] == SLIDING_ATTENTION))
}

/// Refuses activations other than SiLU, and biases of the MLP.
///
/// # Errors
/// A key asks for something else.
pub fn expect_silu(k: Keys<'_>) -> Result<()> {
    k.expect("hidden_act", &SILU.map(Value::from))?;
    k.expect("mlp_bias", &[json!(false)])
}
