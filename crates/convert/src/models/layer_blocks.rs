//! Parts of packages that follow from a layer's description: weights, ops, and the host's bindings.

use super::chain_builder::{self, attention_functions, calls, not_ours};
use super::decoder::{
    Attention, ExpertLayer, HeadNorm, Layer, Norms, QkvProjection, RouterKind, ValueSource,
};
use super::family::Family;
use super::tensor_table::{ModelPart, TensorRow};
use crate::form::{AttentionForm, CacheForm, ExpertForm, HistoryForm, IoForm, ShardForm};
use crate::lower::{
    self, CCA_HISTORY, HISTORY, HISTORY_ROWS, HistoryInput, KV_CACHE, KV_PLACE, KV_ROWS, Lowering, NormShape,
    PositionInputs, QueryInputs, SharedCache,
};
use crate::plan::{MatrixPlan, Packing, PlanOptions, PlannedShard, VectorPlan, bank_name};
use crate::{Error, Result};
use anemoe_bundle::{HostInput, InputBinding, Kept, ShardFunction, ShardKind};
use anemoe_mlpackage::mil::builder::Var;
use std::collections::BTreeMap;
use std::ops::Range;

/// Matrices and vectors of a part of a package, each in the order in which they are stored.
#[derive(Default)]
pub(super) struct Weights {
    pub matrices: Vec<MatrixPlan>,
    pub vectors: Vec<VectorPlan>,
}

impl Weights {
    /// Adds those of another part, whose names get the prefix `scope`.
    pub fn add(&mut self, other: Weights, scope: &str) {
        let scoped = |name: &str| format!("{scope}{name}");
        self.matrices.extend(other.matrices.into_iter().map(|m| MatrixPlan { name: scoped(&m.name), ..m }));
        self.vectors.extend(other.vectors.into_iter().map(|v| VectorPlan { name: scoped(&v.name), ..v }));
    }
}

/// Inputs of attention besides the stream.
#[derive(Clone, Copy)]
pub(super) struct AttentionInputs<'a> {
    pub at: &'a PositionInputs,
    /// History of the layer, where it has one.
    pub history: Option<&'a HistoryInput>,
    /// The state that the layers of the package share, and the layer's number in it; none where each has its own cache.
    pub shared: Option<(&'a SharedCache, usize)>,
}

impl Family {
    /// Returns the tensor of a role in layer `l`.
    ///
    /// # Errors
    /// The description has no such tensor, a fault of the planner.
    pub(super) fn row(&self, l: usize, role: &str) -> Result<&TensorRow> {
        let found = self.rows.get(l).and_then(|rows| rows.iter().find(|row| row.role == role));
        found.ok_or_else(|| Error::usage(format!("layer {l} has no tensor of the role `{role}`")))
    }

    /// Returns the experts of a layer, their packing and the number of their packs.
    ///
    /// # Errors
    /// The layer has no experts, or the options do not fit their number.
    pub(super) fn packs(&self, l: usize, options: &PlanOptions) -> Result<(&ExpertLayer, Packing, usize)> {
        let e = self.decoder.layers[l].experts.as_ref();
        let e = e.ok_or_else(|| Error::usage(format!("layer {l} has no experts")))?;
        let packing = options.packing(e.count)?;
        Ok((e, packing, e.count / packing.per_package))
    }

    /// Plans the weights of these roles in layer `l`, in this order, as far as the layer has them.
    pub(super) fn weights(&self, options: &PlanOptions, l: usize, roles: &[&str]) -> Weights {
        let mut w = Weights::default();
        for row in roles.iter().filter_map(|role| self.row(l, role).ok()) {
            match (row.role, row.shape.len()) {
                ("conv_depthwise", _) => {
                    for (name, every) in [("depthwise_before", (0, 2)), ("depthwise_now", (1, 2))] {
                        w.vectors.push(VectorPlan { name: name.into(), every, ..self.vector(l, row) });
                    }
                }
                (_, 1) => w.vectors.push(self.vector(l, row)),
                _ => w.matrices.push(self.matrix(options, row)),
            }
        }
        w
    }

    /// Plans the weights of attention, from the normalized stream to the output projection, in the table's order.
    pub(super) fn attention_weights(&self, options: &PlanOptions, l: usize) -> Weights {
        let own = self.rows[l].iter().filter(|row| row.part == ModelPart::Attention);
        self.weights(options, l, &own.map(|row| row.role).collect::<Vec<_>>())
    }

    fn matrix(&self, options: &PlanOptions, row: &TensorRow) -> MatrixPlan {
        let is_network = |e: &ExpertLayer| matches!(e.router, RouterKind::Network { .. });
        let part = match row.part {
            ModelPart::Router if self.decoder.experts().is_some_and(is_network) => "router_mlp",
            part => part.name(),
        };
        let (rows, cols) = (row.shape[0] as usize, row.shape[1..].iter().product::<u64>() as usize);
        let mut plan = chain_builder::matrix(options, row.role, part, row.name.clone(), 0, (rows, cols));
        if row.role == "conv_grouped" {
            plan.taps = CCA_HISTORY;
            plan.quant = options.resolve_kernel(part, rows, cols, CCA_HISTORY);
        }
        plan
    }

    /// Plans a vector: norms and other factors of channels, `ROLE_weight` of shape `[1, C, 1, 1]`; biases of products, `ROLE`
    /// of shape `[C]`; and vectors of other shapes and names.
    pub(super) fn vector(&self, l: usize, row: &TensorRow) -> VectorPlan {
        let (d, a, n) = (&self.decoder, &self.decoder.layers[l].attention, row.elements() as usize);
        let named = |name: &str| VectorPlan::channels(name, row.name.clone(), n);
        let weight = named(&format!("{}_weight", row.role));
        let norm = VectorPlan { offset: d.norm_offset, ..weight.clone() };
        let head_norm = match a.projection {
            QkvProjection::Direct { norm: HeadNorm::WholeRow, .. } => norm.clone(),
            _ => VectorPlan { dims: vec![1, 1, 1, a.head_dim as u64], ..norm.clone() },
        };
        let heads = vec![1, (a.heads + a.kv_heads) as u64, 1, a.head_dim as u64];
        match row.role {
            "q_norm" => VectorPlan { scale: a.scale, ..head_norm },
            "k_norm" => head_norm,
            "conv_depthwise" => VectorPlan { dims: heads, ..weight },
            "conv_depthwise_bias" => VectorPlan { dims: heads, ..named("depthwise_bias") },
            // Keys are scaled by the temperature, and by the factor of the scores.
            "temperature" => VectorPlan { scale: a.scale, ..named("k_norm_weight") },
            // A norm after a branch divides the branch by the stream's unit.
            "post_attention_norm" | "post_feedforward_norm" => {
                VectorPlan { scale: d.stream_unit.recip(), ..norm }
            }
            "router_input" => VectorPlan { scale: (d.hidden as f32).sqrt().recip(), ..weight },
            "hidden_out" => weight,
            "sinks" | "router_state_scale" | "balancing_biases" => named(row.role),
            role if role.contains("_residual_") => named(role),
            role if role.ends_with("_bias") => VectorPlan::bias(role, row.name.clone(), n),
            _ => norm,
        }
    }

    /// Plans the weights of a package's experts, from `first` on, whose matrices have the layout of the sort `kind`.
    /// Their tensors are stacks: `gate_up` is `[experts, 2 * width, hidden]`, `down` is `[experts, hidden, width]`. A
    /// bank holds the matrices of a call's experts one below the other, as the tensor does.
    pub(super) fn expert_weights(
        &self,
        options: &PlanOptions,
        kind: ShardKind,
        (l, first): (usize, usize),
    ) -> Result<Weights> {
        let (e, packing, _) = self.packs(l, options)?;
        let (h, width) = (self.decoder.hidden, e.width);
        let (gate_up, down) = (self.row(l, "gate_up")?.name.clone(), self.row(l, "down")?.name.clone());
        let mut w = Weights::default();
        let mut push = |prefix: String, first: usize, experts: usize| {
            for (name, tensor, rows, cols) in [("gate_up", &gate_up, 2 * width, h), ("down", &down, h, width)]
            {
                let (name, tensor) = (format!("{prefix}_{name}"), tensor.clone());
                let (offset, shape) = ((first * rows * cols) as u64, (experts * rows, cols));
                w.matrices.push(chain_builder::matrix(options, &name, "experts", tensor, offset, shape));
            }
        };
        let is_bank = options.form_of(kind).experts == ExpertForm::Bank;
        match is_bank {
            false => (first..first + packing.per_package).for_each(|e| push(expert_name(e), e, 1)),
            true => calls(first, packing).for_each(|c| push(bank_name(c.start), c.start, c.len())),
        }
        if e.has_bias {
            let (gate_up, down) = (self.row(l, "gate_up_bias")?, self.row(l, "down_bias")?);
            let bias = |name: String, tensor: &TensorRow, dims: Vec<u64>, first: usize| VectorPlan {
                dims,
                start: (first * tensor.shape[1] as usize) as u64,
                ..VectorPlan::bias(name, tensor.name.clone(), 0)
            };
            let own = |name: String, first: usize, n: usize| {
                bias(format!("{name}_gate_up_bias"), gate_up, vec![(n * 2 * width) as u64], first)
            };
            for call in calls(first, packing) {
                match is_bank {
                    false => w.vectors.extend(call.clone().map(|e| own(expert_name(e), e, 1))),
                    true => w.vectors.push(own(bank_name(call.start), call.start, call.len())),
                }
                let name = format!("{}_down_bias", bank_name(call.start));
                w.vectors.push(bias(name, down, vec![1, 1, call.len() as u64, h as u64], call.start));
            }
        }
        Ok(w)
    }

    /// Returns the shape of a layer's attention over a cache of `slots` slots, of which a function sees `seen`.
    pub(super) fn attention_shape(
        &self,
        l: usize,
        slots: usize,
        seen: usize,
        form: ShardForm,
    ) -> lower::AttentionDims {
        let a = &self.decoder.layers[l].attention;
        let shape = lower::AttentionDims {
            heads: a.heads,
            kv_heads: a.kv_heads,
            head_dim: a.head_dim,
            slots,
            seen,
            tail: 0,
            has_sinks: a.has_sinks,
        };
        match a.projection {
            QkvProjection::Convolved if form.history == HistoryForm::State => shape.with_history(),
            _ => shape,
        }
    }

    /// Returns the shape of a layer's attention in a function of a shard.
    ///
    /// # Errors
    /// The shard has no cache.
    pub(super) fn attention_in(
        &self,
        shard: &PlannedShard,
        function: &ShardFunction,
        l: usize,
    ) -> Result<lower::AttentionDims> {
        let slots = shard.cache_slots.ok_or_else(|| not_ours(shard))?;
        Ok(self.attention_shape(l, slots, function.context.unwrap_or(slots), shard.form))
    }

    /// Declares the inputs of a layer's attention that follow from positions.
    pub(super) fn declare_positions(
        &self,
        l: &mut Lowering<'_>,
        layer: usize,
        shape: &lower::AttentionDims,
    ) -> Result<PositionInputs> {
        l.position_inputs(shape, self.decoder.layers[layer].attention.rope.width)
    }

    /// Plans a package of layers, with attention and one unit.
    pub(super) fn package_with_cache(
        &self,
        (name, kind): (String, ShardKind),
        layers: &Range<usize>,
        w: Weights,
        options: &PlanOptions,
        context: usize,
    ) -> PlannedShard {
        let mut shard = PlannedShard::new(name, kind, Some(layers.start), w.matrices, w.vectors);
        shard.last_layer = (layers.len() > 1).then(|| layers.end - 1);
        let slots = self.slots(layers.start, options, context);
        shard.functions = attention_functions(options, kind, slots, &[None], &None);
        shard.cache_slots = Some(slots);
        shard
    }

    /// Returns the slots of a layer's cache.
    pub(super) fn slots(&self, l: usize, options: &PlanOptions, context: usize) -> usize {
        let slots = match self.decoder.layers[l].attention.window {
            None => context,
            // A call of the most tokens must not overwrite slots that its first token sees.
            Some(window) => (window + options.max_tokens() - 1).min(context),
        };
        slots.next_multiple_of(32)
    }

    /// Returns a norm over the stream's channels, where the stream is divided by its unit.
    pub(super) fn stream_norm(&self) -> NormShape {
        let unit = self.decoder.stream_unit;
        NormShape { axis: 1, eps: self.decoder.eps / (unit * unit) }
    }

    /// Computes attention from the normalized stream `x`, up to its output projection, `name`. Returns it with the
    /// rows that the host keeps, or the new cache where layers share a state.
    pub(super) fn attention(
        &self,
        l: &mut Lowering<'_>,
        (layer, name): (usize, &str),
        x: &Var,
        inputs: AttentionInputs<'_>,
        shape: &lower::AttentionDims,
    ) -> Result<(Var, Vec<Var>)> {
        let (a, at) = (&self.decoder.layers[layer].attention, inputs.at);
        let read_cache = |l: &mut Lowering<'_>| match inputs.shared {
            Some((all, i)) => l.cache_of(all, i),
            None => l.read_cache(shape),
        };
        let (cache, q, k, v, tail, history) = match (a.projection, inputs.history) {
            (QkvProjection::Direct { norm, values, has_bias }, _) => {
                let [q, k, v] = self.direct(l, a, x, (norm, values, has_bias), at)?;
                (read_cache(l)?, q, k, v, None, None)
            }
            (QkvProjection::Convolved, Some(old)) => {
                let cache = read_cache(l)?;
                let all = l.compress(x, &cache, old, shape)?;
                let q = l.rotate("q_rotated", &all.q, a.rope.width, a.head_dim, &at.of_queries)?;
                let k = l.rotate("k_rotated", &all.k, a.rope.width, a.head_dim, &at.of_queries)?;
                (cache, q, k, all.v, all.tail, all.rows)
            }
            (QkvProjection::Convolved, None) => return Err(Error::usage("convolutions without a history")),
            (QkvProjection::Lent, _) => {
                return Err(Error::usage("keys of another model in a cache of its own"));
            }
        };
        let (keys, values, mut kept) = l.update_cache(&cache, (&k, &v), tail.as_ref(), at, shape)?;
        kept.extend(history);
        let context = l.attend(&q, &keys, &values, &at.of_queries, shape)?;
        Ok((l.project_with(name, &context, "o_proj", a.has_output_bias)?, kept))
    }

    /// Computes rotated queries by a product.
    fn queries(
        &self,
        l: &mut Lowering<'_>,
        a: &Attention,
        x: &Var,
        (norm, has_bias): (HeadNorm, bool),
        at: &QueryInputs,
    ) -> Result<Var> {
        let q = l.project_with("q_proj", x, "q_proj", has_bias)?;
        let q = self.normed(l, "q_norm", q, (norm, HeadNorm::WholeRow))?;
        let q = l.to_heads("q", &q, a.heads, a.head_dim)?;
        let q = self.normed(l, "q_norm", q, (norm, HeadNorm::PerHead))?;
        let q = l.rotate("q_rotated", &q, a.rope.width, a.head_dim, at)?;
        // The weights of a norm have taken up the factor of the scores.
        if norm != HeadNorm::None || a.scale == 1.0 {
            return Ok(q);
        }
        let scale = l.scalar("score_scale", a.scale)?;
        l.f().mul("q_scaled", &q, &scale)
    }

    /// Norms whole rows, or heads, where the description's norm is `here`.
    fn normed(
        &self,
        l: &mut Lowering<'_>,
        name: &str,
        x: Var,
        (norm, here): (HeadNorm, HeadNorm),
    ) -> Result<Var> {
        if norm != here {
            return Ok(x);
        }
        let axis = if norm == HeadNorm::PerHead { 3 } else { 1 };
        l.rms_norm_weighted(name, &x, NormShape { axis, eps: self.decoder.eps })
    }

    /// Computes attention's half of a layer over keys and values of another model, from the stream to the stream.
    pub(super) fn attended_to(
        &self,
        l: &mut Lowering<'_>,
        layer: usize,
        hidden: &Var,
        (at, keys, values): &(QueryInputs, Var, Var),
        shape: &lower::AttentionDims,
    ) -> Result<Var> {
        let a = &self.decoder.layers[layer].attention;
        let x = l.rms_norm_weighted("input_norm", hidden, self.stream_norm())?;
        let q = self.queries(l, a, &x, (HeadNorm::PerHead, false), at)?;
        let context = l.attend(&q, keys, values, at, shape)?;
        let o = l.project("o_proj", &context, "o_proj")?;
        let o = self.after(l, "post_attention_norm", o)?;
        l.f().add("attended", hidden, &o)
    }

    /// Computes queries, keys and values by products.
    fn direct(
        &self,
        l: &mut Lowering<'_>,
        a: &Attention,
        x: &Var,
        (norm, values, has_bias): (HeadNorm, ValueSource, bool),
        at: &PositionInputs,
    ) -> Result<[Var; 3]> {
        let (d, eps) = (a.head_dim, self.decoder.eps);
        let q = self.queries(l, a, x, (norm, has_bias), &at.of_queries)?;
        let k = l.project_with("k_proj", x, "k_proj", has_bias)?;
        let k = self.normed(l, "k_norm", k, (norm, HeadNorm::WholeRow))?;
        let k = l.to_heads("k", &k, a.kv_heads, d)?;
        let v = match values {
            ValueSource::KeysNormed => k.clone(),
            ValueSource::Own | ValueSource::OwnNormed => {
                let v = l.project_with("v_proj", x, "v_proj", has_bias)?;
                l.to_heads("v", &v, a.kv_heads, d)?
            }
        };
        let k = self.normed(l, "k_norm", k, (norm, HeadNorm::PerHead))?;
        let k = l.rotate("k_rotated", &k, a.rope.width, d, &at.of_queries)?;
        let v = match values {
            ValueSource::Own => v,
            ValueSource::OwnNormed | ValueSource::KeysNormed => {
                l.rms_norm("v_norm", &v, NormShape { axis: 3, eps })?
            }
        };
        Ok([q, k, v])
    }

    /// Computes attention's half of a layer, from the stream to the stream.
    pub(super) fn attended(
        &self,
        l: &mut Lowering<'_>,
        layer: usize,
        hidden: &Var,
        inputs: AttentionInputs<'_>,
        shape: &lower::AttentionDims,
    ) -> Result<(Var, Vec<Var>)> {
        let x = l.rms_norm_weighted("input_norm", hidden, self.stream_norm())?;
        let (o, kept) = self.attention(l, (layer, "o_proj"), &x, inputs, shape)?;
        let o = self.after(l, "post_attention_norm", o)?;
        Ok((l.f().add("attended", hidden, &o)?, kept))
    }

    /// Norms a branch's result, where the decoder has norms around its branches.
    pub(super) fn after(&self, l: &mut Lowering<'_>, name: &str, x: Var) -> Result<Var> {
        match self.decoder.norms {
            Norms::Before => Ok(x),
            Norms::Around => {
                let norm = NormShape { axis: 1, eps: self.decoder.eps };
                Ok(l.rms_norm_weighted(name, &x, norm)?)
            }
        }
    }

    /// Computes the dense MLP's branch from the stream.
    pub(super) fn dense(&self, l: &mut Lowering<'_>, layer: &Layer, hidden: &Var) -> Result<Var> {
        let x = l.rms_norm_weighted("dense_input", hidden, self.stream_norm())?;
        let gate = l.project("gate_proj", &x, "gate_proj")?;
        let up = l.project("up_proj", &x, "up_proj")?;
        let dense = l.gated("dense_hidden", &gate, &up, layer.activation)?;
        l.project("down_proj", &dense, "down_proj")
    }

    /// Binds the inputs of a layer's queries that follow from positions, whose names begin with `prefix`.
    pub(super) fn query_inputs(
        &self,
        l: usize,
        form: ShardForm,
        prefix: &str,
    ) -> BTreeMap<String, InputBinding> {
        let kind = || self.decoder.layers[l].attention.kind.to_string();
        let mask = match (form.attention, form.io) {
            (AttentionForm::PerHead, IoForm::ChannelsFirst) => HostInput::MaskColumns(kind()),
            _ => HostInput::Mask(kind()),
        };
        let inputs = [
            ("rope_cos", HostInput::RopeCos(kind())),
            ("rope_sin", HostInput::RopeSin(kind())),
            ("mask", mask),
        ];
        inputs.map(|(name, input)| (format!("{prefix}{name}"), InputBinding::Host(input))).into()
    }

    /// Binds the inputs of a layer's attention that follow from positions.
    pub(super) fn position_inputs(&self, l: usize, form: ShardForm) -> BTreeMap<String, InputBinding> {
        let a = &self.decoder.layers[l].attention;
        let kind = || a.kind.to_string();
        // Slots that a call leaves as they are, and those of its tokens.
        let (keep, place) = match form.io {
            IoForm::ChannelsFirst => (HostInput::Keep(kind()), HostInput::Place(kind())),
            IoForm::ChannelsLast => (HostInput::KeepRow(kind()), HostInput::PlaceRows(kind())),
        };
        let mut inputs = self.query_inputs(l, form, "");
        inputs.insert("kv_keep".into(), InputBinding::Host(keep));
        inputs.insert("kv_place".into(), InputBinding::Host(place));
        if a.projection == QkvProjection::Convolved && form.history == HistoryForm::State {
            inputs.insert("carry".into(), InputBinding::Host(HostInput::Carry(CCA_HISTORY)));
        }
        inputs
    }

    /// Binds the rows that the host keeps of layer `l`, whose names begin with `scope`.
    pub(super) fn kept_rows(&self, l: usize, form: ShardForm, scope: &str) -> BTreeMap<String, Kept> {
        let mut kept = BTreeMap::new();
        if form.cache == CacheForm::Host {
            let cache = Kept::Cache { rows: format!("{scope}{KV_ROWS}"), place: KV_PLACE.into() };
            kept.insert(format!("{scope}{KV_CACHE}"), cache);
        }
        let is_convolved = self.decoder.layers[l].attention.projection == QkvProjection::Convolved;
        if is_convolved && form.history == HistoryForm::Host {
            let (heads, channels) = self.attention_shape(l, 0, 0, form).history_shape();
            let newest = Kept::Newest {
                rows: format!("{scope}{HISTORY_ROWS}"),
                place: KV_PLACE.into(),
                count: CCA_HISTORY,
                heads,
                channels,
            };
            kept.insert(format!("{scope}{HISTORY}"), newest);
        }
        kept
    }
}

/// Names the package of a layer's attention: `L00.attn`.
pub(super) fn attention_name(layer: usize) -> String {
    format!("L{layer:02}.attn")
}

/// Returns the prefix of the names of an expert's weights: `expert_003`.
fn expert_name(expert: usize) -> String {
    format!("expert_{expert:03}")
}
