//! Shards of an assistant: one package with all layers, which read the caches of another model, then the head.
//!
//! ```text
//! input    [embedding of the newest token; hidden state before it]   [1, 2 H', 1, 1]
//!          -> pre_projection -> layers over the lent caches, one for each kind of layer -> hidden
//! state    post_projection N(hidden): the hidden state of the next step                     [1, H', 1, 1]
//! head     logits of the vocabulary, or of the centroids of groups of tokens
//! ```

use super::chain_builder::{HIDDEN, functions, matrix, not_ours, output, register, run};
use super::decoder::Decoder;
use super::family::Family;
use super::layer_blocks::Weights;
use super::stream_in_packages::stream_out;
use super::tensor_table::{ModelPart, TOKEN_ORDERING};
use crate::lower::{LENT_CACHE, Lowering};
use crate::plan::{PlanOptions, PlannedShard, layer_scope};
use crate::{Error, Result};
use anemoe_bundle::{Assistant, Kept, Run, ShardKind, Step, TokenCount};
use anemoe_mlpackage::mil::builder::BuiltFunction;
use std::collections::BTreeMap;

/// Name of the package, and register of its first input.
const NAME: &str = "assistant";
const INPUT: &str = "input";
/// Output with the hidden state of the next step; `state` is a reserved word.
const NEXT_STATE: &str = "next_state";
/// Returns the prefix of the inputs that layers of a kind share: `sliding_`.
fn prefix(kind: &str) -> String {
    format!("{kind}_")
}

impl Decoder {
    /// Returns a layer of each kind, in the order of the first ones.
    fn kinds(&self) -> Vec<usize> {
        let kind = |l: usize| self.layers[l].attention.kind;
        (0..self.layers.len()).filter(|&l| (0..l).all(|before| kind(before) != kind(l))).collect()
    }
}

impl Family {
    /// Plans the package of an assistant's layers, and the step that runs it.
    ///
    /// # Errors
    /// The options do not fit the model.
    pub(super) fn plan_assistant(
        &self,
        of: &Assistant,
        options: &PlanOptions,
        context: usize,
    ) -> Result<(Vec<PlannedShard>, Vec<Step>)> {
        let (d, n) = (&self.decoder, self.decoder.layers.len());
        let outer = |role: &str, shape| {
            matrix(options, role, ModelPart::DenseMlp.name(), d.tensor(None, role), 0, shape)
        };
        let mut w = Weights::default();
        w.matrices.push(outer("pre_projection", (d.hidden, 2 * of.target_hidden_size)));
        for l in 0..n {
            w.add(self.dense_layer_weights(l, options), &layer_scope(l));
        }
        w.matrices.push(outer("post_projection", (of.target_hidden_size, d.hidden)));
        w.vectors.push(self.final_norm());
        let mut shard = PlannedShard::new(NAME.into(), ShardKind::Layers, Some(0), w.matrices, w.vectors);
        shard.last_layer = (n > 1).then(|| n - 1);
        shard.functions = functions(&[None], &[TokenCount::ONE]);

        let form = options.form_of(ShardKind::Layers);
        let mut inputs = BTreeMap::from([(INPUT.to_string(), register(INPUT))]);
        let mut kept = BTreeMap::new();
        for l in d.kinds() {
            let a = &d.layers[l].attention;
            let kind = || a.kind.to_string();
            let shape = self.attention_shape(l, 0, 0, form);
            inputs.extend(self.query_inputs(l, form, &prefix(a.kind)));
            let (heads, channels) = (2 * shape.kv_heads, shape.padded_dim());
            shard.lent_slots.insert(kind(), self.slots(l, options, context));
            kept.insert(prefix(a.kind) + LENT_CACHE, Kept::Lent { cache: kind(), heads, channels });
        }
        let mut outputs = vec![(stream_out(n), output(HIDDEN)), (NEXT_STATE.into(), output("state"))];
        outputs.extend(of.centroids.map(|_| ("final_norm".into(), output("normalized"))));
        let step = run((NAME.into(), None), inputs, outputs, form);
        Ok((vec![shard], vec![Step::Run(Run { kept, ..step })]))
    }

    /// Lowers the package of [`Family::plan_assistant`].
    ///
    /// # Errors
    /// The program breaks MIL's rules, or the shard is not one of the model's.
    pub(super) fn lower_assistant(
        &self,
        mut l: Lowering<'_>,
        of: &Assistant,
        shard: &PlannedShard,
    ) -> Result<BuiltFunction> {
        let d = &self.decoder;
        let input = l.stream_input(INPUT, 2 * of.target_hidden_size)?;
        let mut lent = BTreeMap::new();
        for layer in d.kinds() {
            let a = &d.layers[layer].attention;
            let slots = *shard.lent_slots.get(a.kind).ok_or_else(|| not_ours(shard))?;
            let shape = self.attention_shape(layer, slots, slots, shard.form);
            lent.insert(a.kind, (l.lent_cache(&prefix(a.kind), &shape, a.rope.width)?, shape));
        }
        let mut hidden = l.project("projected", &input, "pre_projection")?;
        for (i, layer) in d.layers.iter().enumerate() {
            l.set_scope(&layer_scope(i));
            let (cache, shape) = &lent[layer.attention.kind];
            let attended = self.attended_to(&mut l, i, &hidden, cache, shape)?;
            hidden = self.end_dense_layer(&mut l, layer, &attended)?;
        }
        l.set_scope("");
        let normalized = l.rms_norm_weighted("final_norm", &hidden, self.stream_norm())?;
        let state = l.project(NEXT_STATE, &normalized, "post_projection")?;
        let outputs = [&hidden, &state, &normalized];
        l.finish_streams(&outputs[..2 + usize::from(of.centroids.is_some())])
    }

    /// Returns the tokens in the order of their groups; none where there are no groups.
    ///
    /// # Errors
    /// The tensor cannot be read, or does not hold each token once.
    pub fn token_ordering(&self) -> Result<Option<Vec<u32>>> {
        if self.decoder.assistant.as_ref().is_none_or(|of| of.centroids.is_none()) {
            return Ok(None);
        }
        let name = self.decoder.tensor(None, TOKEN_ORDERING);
        let ids = self.checked.checkpoint.source.read_integers(&name)?;
        let mut seen = vec![false; self.decoder.vocab];
        let mut order = Vec::with_capacity(ids.len());
        for (i, id) in ids.into_iter().enumerate() {
            let known = usize::try_from(id).ok().and_then(|id| seen.get_mut(id));
            match known.map(|seen| std::mem::replace(seen, true)) {
                Some(false) => order.push(id as u32),
                Some(true) => {
                    return Err(self.checked.refuse(&name, 0, &format!("element {i} is {id} again")));
                }
                None => {
                    let what = format!("element {i} is {id}, expected a token below {}", seen.len());
                    return Err(self.checked.refuse(&name, 0, &what));
                }
            }
        }
        match order.len() == seen.len() {
            true => Ok(Some(order)),
            false => Err(Error::usage(format!("tensor `{name}`: {} tokens", order.len()))),
        }
    }
}
