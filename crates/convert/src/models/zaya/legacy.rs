//! The original layout (80 half-layers, a tensor per expert, Megatron's configuration keys) under the names and shapes of
//! transformers.

use super::config::ZayaConfig;
use super::tensor_table::{Legacy, rows};
use crate::checkpoint::{Checkpoint, SideFile, TensorInfo, TensorSource};
use crate::models::keys::Keys;
use crate::{Error, Result};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

const PREFIX: &str = "model.";

/// Tells whether the configuration has a key that only the original layout has, and lacks transformers' key.
pub fn is_legacy(checkpoint: &Checkpoint) -> bool {
    let has = |key: &str| checkpoint.config.get(key).is_some_and(|v| !v.is_null());
    (has("ffn_hidden_size") || has("ffn_hidden_size_list")) && !has("moe_intermediate_size")
}

/// Renames the tensors and keys of a checkpoint in the original layout to those of transformers.
///
/// # Errors
/// A configuration key is missing or asks for something that is not implemented; a tensor is missing (an expert's is named),
/// superfluous or of another shape.
pub fn normalize_layout(checkpoint: Checkpoint) -> Result<Checkpoint> {
    let path = checkpoint.config_path();
    let config = config(&checkpoint.config, &path)?;
    let parsed = ZayaConfig::parse(&config, &path)?;
    let source = Box::new(Renamed::new(checkpoint.source, &parsed)?);
    Ok(Checkpoint { config, source, ..checkpoint })
}

/// Translates a configuration of the original layout to transformers' keys.
fn config(legacy: &Value, path: &Path) -> Result<Value> {
    let map = legacy.as_object().ok_or_else(|| Error::invalid(path, "configuration: not a JSON object"))?;
    let k = Keys { map, path };
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
        let value = &map[*name];
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

/// Tensors under transformers' names, with the experts stacked.
struct Renamed {
    inner: Box<dyn TensorSource>,
    tensors: Vec<TensorInfo>,
    /// Names of the pieces of each tensor, in order, and elements of one piece.
    pieces: Vec<(Vec<String>, u64)>,
}

impl Renamed {
    fn new(inner: Box<dyn TensorSource>, config: &ZayaConfig) -> Result<Renamed> {
        let mut found: BTreeMap<String, (TensorInfo, Vec<String>, u64)> = BTreeMap::new();
        let mut known = BTreeSet::from(["lm_head.weight".to_string()]);
        for (row, legacy) in rows(config) {
            let (names, shape) = match legacy {
                Legacy::Whole(name) => (vec![name], row.shape.clone()),
                Legacy::PerExpert(names) => (names, row.shape[1..].to_vec()),
            };
            let names: Vec<String> = names.into_iter().map(|n| format!("{PREFIX}{n}")).collect();
            let mut infos = Vec::with_capacity(names.len());
            for name in &names {
                let info = inner.info(name).ok_or_else(|| {
                    Error::invalid(inner.path(), format!("checkpoint: tensor `{name}` {shape:?} is missing"))
                })?;
                if info.shape != shape {
                    let what = format!("tensor `{name}`: shape {:?}, expected {shape:?}", info.shape);
                    return Err(Error::invalid(&info.file, what));
                }
                infos.push(info);
            }
            let info = TensorInfo {
                name: format!("{PREFIX}{}", row.name),
                dtype: infos[0].dtype,
                shape: row.shape,
                bytes: infos.iter().map(|i| i.bytes).sum(),
                file: infos[0].file.clone(),
            };
            known.extend(names.iter().cloned());
            found.insert(info.name.clone(), (info, names, shape.iter().product()));
        }
        if let Some(info) = inner.tensors().iter().find(|t| !known.contains(&t.name)) {
            let what = format!("tensor `{}`: this model has none of that name", info.name);
            return Err(Error::invalid(&info.file, what));
        }
        let (tensors, pieces) = found.into_values().map(|(info, names, n)| (info, (names, n))).unzip();
        Ok(Renamed { inner, tensors, pieces })
    }
}

impl TensorSource for Renamed {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn read(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        let i = self
            .tensors
            .binary_search_by(|t| t.name.as_str().cmp(name))
            .map_err(|_| Error::invalid(self.path(), format!("use: no tensor `{name}`")))?;
        let (names, elements) = &self.pieces[i];
        if range.start > range.end
            || range.end > self.tensors[i].elements()
            || range.end - range.start != out.len() as u64
        {
            return Err(Error::invalid(self.path(), format!("use: elements {range:?} of tensor `{name}`")));
        }
        let (mut at, mut rest) = (range.start, out);
        while !rest.is_empty() {
            let (piece, within) = ((at / elements) as usize, at % elements);
            let n = (rest.len() as u64).min(elements - within);
            let (now, later) = rest.split_at_mut(n as usize);
            self.inner.read(&names[piece], within..within + n, now)?;
            at += n;
            rest = later;
        }
        Ok(())
    }

    fn origin(&self, name: &str, element: u64) -> (PathBuf, String) {
        let found = self.tensors.binary_search_by(|t| t.name.as_str().cmp(name)).ok();
        let piece = found.and_then(|i| {
            let (names, elements) = &self.pieces[i];
            names.get((element / elements) as usize)
        });
        self.inner.origin(piece.map_or(name, String::as_str), element)
    }

    fn side_file(&self, name: &str) -> Result<Option<SideFile>> {
        self.inner.side_file(name)
    }
}
