//! A model with rotated weights: the same function, whose weights and activations have no outlying channels.
//!
//! ```text
//! stream   s R          embedding E R; o and down R' W; all that reads the stream W diag(g) R, g the norm before it
//! values   v R_h        within each head: v R_h' W; o W R_h
//! norms    1            N(s R) = N(s) R, since R keeps lengths
//! ```
//! Residual rotation after folding norms, and rotation of values: QuaRot, arXiv 2404.00456, sections 4 and 4.1.

use super::checked::is_unneeded;
use super::decoder::{Decoder, Layer, Norms, QkvProjection, Residual, RouterKind, ValueSource};
use super::tensor_table::{check_tensors, full_name};
use super::{describe, prefix};
use crate::checkpoint::{Checkpoint, Rotation, TensorRotation, rotated};
use crate::variants::Variants;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Largest odd factor of a size that is rotated: its transform takes a product of this size. gpt-oss has 45.
const MAX_ODD: usize = 1023;

/// Tells whether a model's weights can be rotated: nothing but norms without offset stands between the stream and the
/// matrices that read it, and nothing between them and the stream.
pub fn can_rotate(d: &Decoder) -> bool {
    let is_direct = d.layers.iter().all(|l| {
        let router = l.experts.map(|e| e.router);
        matches!(l.attention.projection, QkvProjection::Direct { .. })
            && matches!(router, None | Some(RouterKind::Linear { is_scaled: false, .. }))
    });
    let is_plain = d.norms == Norms::Before && d.residual == Residual::Plain && d.norm_offset == 0.0;
    let sizes = d.layers.iter().map(|l| l.attention.head_dim).chain([d.hidden]);
    let is_quick = sizes.into_iter().all(|n| n > 0 && n >> n.trailing_zeros() <= MAX_ODD);
    is_direct && is_plain && is_quick && d.assistant.is_none()
}

/// Rotates the weights of a checkpoint. The head becomes a matrix of its own.
///
/// # Errors
/// The model cannot be rotated, or the checkpoint does not fit its family.
pub fn rotate(checkpoint: Checkpoint) -> Result<Checkpoint> {
    let d = describe(&checkpoint)?;
    if !can_rotate(&d) {
        let what = format!("configuration: weights of the family {} cannot be rotated", d.family);
        return Err(Error::unsupported(checkpoint.config_path(), what));
    }
    let prefix = prefix(&checkpoint, &d)?;
    check_tensors(checkpoint.source.as_ref(), prefix, &d.tensors(), is_unneeded)?;
    let mut changed = rotated(checkpoint, changes(&d, prefix))?;
    changed.variants = Variants { is_rotated: true, ..changed.variants };
    Ok(changed)
}

/// Lists what becomes of the tensors, by their names in the checkpoint.
fn changes(d: &Decoder, prefix: &str) -> BTreeMap<String, TensorRotation> {
    let stream = Arc::new(Rotation::new(d.hidden));
    let of_values = |layer: &Layer| match layer.attention.projection {
        QkvProjection::Direct { values: ValueSource::Own, .. } => {
            Some(Arc::new(Rotation::new(layer.attention.head_dim)))
        }
        _ => None,
    };
    let name = |layer: Option<usize>, role: &str| full_name(prefix, &d.tensor(layer, role));
    let within: Vec<Option<Arc<Rotation>>> = d.layers.iter().map(of_values).collect();
    let mut all = BTreeMap::new();
    let plain = TensorRotation::default;
    let reads =
        |norm: String| TensorRotation { scale: Some(norm), inputs: Some(Arc::clone(&stream)), ..plain() };
    let writes = || TensorRotation { outputs: Some(Arc::clone(&stream)), ..plain() };
    for row in d.tensors() {
        let l = row.layer;
        let of_values = || l.and_then(|l| within[l].clone());
        let change = match row.role {
            "embedding" => TensorRotation { inputs: Some(Arc::clone(&stream)), ..plain() },
            "q_proj" | "k_proj" => reads(name(l, "input_norm")),
            "v_proj" => TensorRotation { outputs: of_values(), ..reads(name(l, "input_norm")) },
            "v_proj_bias" => TensorRotation { outputs: of_values(), ..plain() },
            "o_proj" => TensorRotation { inputs: of_values(), ..writes() },
            "gate_proj" | "up_proj" => reads(name(l, "dense_input")),
            "router_logits" | "gate_up" => reads(name(l, "expert_input")),
            "o_proj_bias" | "down_proj" | "down" => writes(),
            "down_bias" => TensorRotation { is_vectors: true, ..writes() },
            "final_norm" | "input_norm" | "dense_input" | "expert_input" => {
                TensorRotation { is_one: true, ..plain() }
            }
            _ => continue,
        };
        all.insert(full_name(prefix, &row.name), change);
    }
    let from = name(None, if d.is_tied { "embedding" } else { "head" });
    let head = TensorRotation { from: Some(from), ..reads(name(None, "final_norm")) };
    all.insert(name(None, "head"), head);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_a_large_odd_factor_are_not_rotated() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny-llama");
        let decoder = describe(&super::super::load(path).unwrap()).unwrap();
        for (hidden, is_quick) in [(2880, true), (2 * 1023, true), (2 * 1025, false), ((1 << 24) - 1, false)]
        {
            assert_eq!(can_rotate(&Decoder { hidden, ..decoder.clone() }), is_quick, "{hidden}");
        }
    }
}
