//! Interface between the reference run and its models.

use super::tensor_reader::Rows;
use anemoe_convert::Result;
use std::collections::BTreeMap;

/// Values that a reference run records besides logits and tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    /// True to record the residual stream of the prompt, before the first layer and after each layer.
    pub hidden: bool,
    /// True to record the experts that each layer chose for each prompt token, and the router states between layers.
    pub routing: bool,
}

/// Results of a pass.
#[derive(Clone, Debug, Default)]
pub struct Pass {
    /// Logits, `[T, vocab_size]`.
    pub logits: Rows,
    /// Residual streams, `[layers + 1, T, hidden_size]`; empty where not recorded.
    pub hidden_states: Vec<Rows>,
    /// Chosen experts, `[layers, T, top_k]`; empty where not recorded.
    pub router_index: Vec<Vec<Vec<u32>>>,
    /// Router states, `[layers, T, router_hidden_size]`; empty where not recorded, or where routers have no state.
    pub router_states: Vec<Rows>,
}

/// State of a layer besides keys and values.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerState {
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Elements, row-major.
    pub values: Vec<f32>,
}

/// Sizes that a run has to respect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Number of tokens in the vocabulary.
    pub vocab: usize,
    /// Most positions of a context.
    pub positions: usize,
    /// Number of layers.
    pub layers: usize,
}

/// Model with the state of its context.
pub trait Forward {
    /// Returns the sizes of the model.
    fn limits(&self) -> Limits;

    /// Empties the context.
    fn reset(&mut self);

    /// Appends tokens to the context; `tick` is called after each layer.
    ///
    /// # Errors
    /// A weight cannot be read, is not finite, or has another shape than the configuration says.
    fn forward(&mut self, tokens: &[u32], options: RunOptions, tick: &mut dyn FnMut()) -> Result<Pass>;

    /// Returns the layers' states besides keys and values, under the names in transformers' goldens.
    fn states(&self) -> BTreeMap<&'static str, Vec<LayerState>> {
        BTreeMap::new()
    }
}
