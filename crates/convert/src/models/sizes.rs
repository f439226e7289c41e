//! Counts of a model.

use super::decoder::{Decoder, ExpertLayer};

/// Counts of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Layers with experts.
    pub layers: usize,
    /// Experts of a layer that has some; 0 in models without experts.
    pub experts: usize,
    /// Experts that a token uses.
    pub experts_per_token: usize,
    /// Most positions of a sequence.
    pub positions: usize,
    /// Parameters; a tied embedding counts once.
    pub parameters: u64,
    /// Parameters of one expert.
    pub expert_parameters: u64,
    /// Parameters of an embedding that is not the head: a token reads one row of it.
    pub looked_up_parameters: u64,
}

impl Sizes {
    /// Returns the parameters that a token uses; a tied embedding counts once, as the head.
    pub fn active_parameters(&self) -> u64 {
        let idle = (self.layers * (self.experts - self.experts_per_token)) as u64;
        self.parameters - self.looked_up_parameters - idle * self.expert_parameters
    }
}

impl Decoder {
    /// Returns counts from the configuration: layers, experts, positions, parameters.
    pub fn sizes(&self) -> Sizes {
        let d = self;
        let e = d.experts();
        let biases = |e: &ExpertLayer| if e.has_bias { 2 * e.width + d.hidden } else { 0 };
        Sizes {
            layers: d.routed().count(),
            experts: e.map_or(0, |e| e.count),
            experts_per_token: e.map_or(0, |e| e.active),
            positions: d.positions,
            parameters: d.parameters(),
            expert_parameters: e.map_or(0, |e| (3 * d.hidden * e.width + biases(e)) as u64),
            looked_up_parameters: if d.is_tied { 0 } else { (d.vocab * d.hidden) as u64 },
        }
    }
}
