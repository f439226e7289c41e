//! Counts the work of a call from its program: bytes, weights, multiply-adds, cache.

use crate::program_facts::graph::{Contraction, Graph};
use serde::Serialize;
use std::collections::BTreeSet;

/// Work of one call of a function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct CallWork {
    /// Bytes of weights as stored.
    pub bytes: f64,
    /// Number of weights.
    pub weights: f64,
    /// Number of multiply-adds.
    pub multiply_adds: f64,
    /// Bytes of caches that are read or written. States count twice, as a whole or as far as the function sees them.
    /// Inputs that the host keeps count once.
    pub cache_bytes: f64,
    /// True if the function has one large product and little else: a slice of a head.
    pub one_product: bool,
}

/// Bytes of an fp16 element.
const FP16: f64 = 2.0;

impl CallWork {
    /// Counts the work of a function. `kept` names the inputs that the host keeps.
    pub fn of<'a>(g: &Graph, kept: impl Iterator<Item = &'a String>) -> CallWork {
        let size = |dims: &[u64]| dims.iter().map(|&n| n as f64).product::<f64>();
        let used: BTreeSet<usize> = g.ops.iter().flat_map(|op| op.weights.iter().copied()).collect();
        let weights = || used.iter().filter_map(|&i| g.weights.get(i));
        let product = |c: &Contraction| {
            Some(c.depth? as f64 * c.outputs? as f64 * c.positions.unwrap_or(1) as f64 * size(&c.kernel))
        };
        let multiply_adds = g.ops.iter().filter_map(|op| op.contraction.as_ref()).filter_map(product).sum();
        let reach = g.state_reach.map_or(f64::INFINITY, |n| n as f64);
        let states = g.states.iter().filter(|s| !s.dims.is_empty());
        let states: f64 = states.map(|s| size(&s.dims).min(reach) * FP16).sum();
        let inputs = kept.filter_map(|name| g.input_bytes.get(name));
        CallWork {
            bytes: weights().map(|w| w.bytes as f64).sum(),
            weights: weights().map(|w| size(&w.dims)).sum(),
            multiply_adds,
            cache_bytes: 2.0 * states + inputs.map(|&n| n as f64).sum::<f64>(),
            one_product: g.matrices().count() == 1,
        }
    }
}
