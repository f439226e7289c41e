//! Interface between the reference run and the models that it runs.

use super::tensor_reader::Rows;
use anemoe_convert::Result;
use std::collections::BTreeMap;

/// Records of a reference run besides logits and tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    /// The residual stream before the first layer and after each one, for the prompt.
    pub hidden: bool,
    /// The experts that each layer chose for each prompt token, and what a router hands to the next layer's.
    pub routing: bool,
}

/// Results of a pass.
#[derive(Clone, Debug, Default)]
pub struct Pass {
    /// `[T, vocab_size]`
    pub logits: Rows,
    /// `[layers + 1, T, hidden_size]`, or empty.
    pub hidden_states: Vec<Rows>,
    /// `[layers, T, top_k]`, or empty.
    pub router_index: Vec<Vec<Vec<u32>>>,
    /// `[layers, T, router_hidden_size]`, or empty: also where routers have no state.
    pub router_states: Vec<Rows>,
}

/// State of a layer besides keys and values.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerState {
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Row-major.
    pub values: Vec<f32>,
}

/// Sizes that a run must respect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Positions of a context.
    pub positions: usize,
    /// Layers.
    pub layers: usize,
}

/// A model with the state of its context.
pub trait Forward {
    /// Its sizes.
    fn limits(&self) -> Limits;

    /// Empties the context.
    fn reset(&mut self);

    /// Appends tokens to the context; `tick` is called after each layer.
    ///
    /// # Errors
    /// A weight cannot be read, has another shape than its configuration says or is not finite.
    fn forward(&mut self, tokens: &[u32], options: RunOptions, tick: &mut dyn FnMut()) -> Result<Pass>;

    /// States of the layers besides keys and values, under the names that transformers' goldens have.
    fn states(&self) -> BTreeMap<&'static str, Vec<LayerState>> {
        BTreeMap::new()
    }
}
