//! Shards of a decoder whose stream goes through packages: each takes and gives it in fp16.
//!
//! ```text
//! layer without experts   Layers: hidden -> attention -> dense MLP -> hidden; neighbours of one kind share a package
//! layer with experts      Attention: hidden -> attended hidden, experts' input, router's logits
//!                         the host chooses experts
//!                         Experts: packs, each adds to the sum of the chosen experts
//!                         ExpertsCombine: the last pack, with all that joins the layer's branches
//! ```
//! With joined layers, the last pack of a layer and the next layer's attention are one package: the host chooses
//! experts inside each layer, so no package crosses two borders of such layers.

use super::chain_builder::{
    ExpertUnit, HIDDEN, attention_functions, expert_units, functions, layers_name, not_ours, output,
    packing_of, register, rows_of, run,
};
use super::decoder::{Layer, Residual, RouterKind};
use super::family::Family;
use super::layer_blocks::{AttentionInputs, Weights, attention_name};
use super::tensor_table::TensorRow;
use crate::form::{CacheForm, LAYERS_PER_SHARD, ShardForm};
use crate::lower::{AttentionDims, Lowering};
use crate::plan::{Packing, PlanOptions, PlannedShard, layer_scope};
use crate::{Error, Result};
use anemoe_bundle::{OutputBinding, RowRange, Run, ShardFunction, ShardKind, Step, When};
use anemoe_mlpackage::mil::builder::{BuiltFunction, Var};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ops::Range;

/// Name of the unit that joins a layer's branches, where no unit with experts does so.
const COMBINE: &str = "combine";
/// Parts of a package of whole layers, as its name has them.
const PARTS: &str = "attn.mlp";
/// Roles of a dense MLP's weights.
const DENSE: [&str; 4] = ["gate_proj", "up_proj", "down_proj", "dense_input"];
/// Prefix of the names of attention in a package that begins with the last pack of the layer before.
const NEXT_SCOPE: &str = "next_";
/// Most layers without experts that share a package where the options do not say: a call of 4 to 8 layers takes up to
/// 2 ms on the Neural Engine, of which a part does not depend on the layers.
const MOST_DENSE_LAYERS: usize = 8;
/// Most bytes of their weights: packages of 288 MB were seen on the Neural Engine whole.
const MOST_DENSE_BYTES: u64 = 288_000_000;

/// Returns the units of a pack; the last unit of a layer's last pack joins the layer's branches.
fn units(first: usize, packing: Packing, last: bool) -> Vec<ExpertUnit> {
    if packing.per_call == packing.per_package {
        let experts = first..first + packing.per_package;
        return vec![ExpertUnit { name: None, experts, has_own_part: last }];
    }
    let combine = ExpertUnit { name: Some(COMBINE.into()), experts: 0..0, has_own_part: true };
    expert_units(first, packing).chain(last.then_some(combine)).collect()
}

fn pack_name(layer: usize, pack: usize, packs: usize) -> String {
    format!("L{layer:02}.ffn.p{pack}of{packs}")
}

/// Names the package of a layer's last pack and the next layer's attention.
fn joined_name(layer: usize, packs: usize) -> String {
    format!("{}.{}", pack_name(layer, packs - 1, packs), attention_name(layer + 1))
}

/// Returns the name of the stream that leaves a package of `n` layers.
pub(super) fn stream_out(n: usize) -> String {
    format!("{}hidden_out", layer_scope(n.saturating_sub(1)))
}

/// Binds the outputs of attention and router, whose names begin with `scope`.
fn attention_outputs(scope: &str) -> Vec<(String, OutputBinding)> {
    let outputs =
        [("attended", HIDDEN), ("expert_input", "expert_input"), ("router_logits", "router_logits")];
    outputs.map(|(name, to)| (format!("{scope}{name}"), output(to))).to_vec()
}

impl Family {
    /// Returns the groups of layers that share a package: neighbours of one kind without experts, and pairs of layers
    /// with experts.
    pub(super) fn groups_in_packages(&self, options: &PlanOptions) -> Vec<Range<usize>> {
        let layers = &self.decoder.layers;
        let asked = options.layers_per_shard().map(NonZeroUsize::get);
        let is_routed = |l: usize| layers[l].experts.is_some();
        let mut groups = Vec::new();
        let mut first = 0;
        while first < layers.len() {
            let mut end = first + 1;
            if is_routed(first) {
                if asked.is_some_and(|n| n > 1) && end < layers.len() && is_routed(end) {
                    groups.push(first..end + 1);
                }
            } else {
                let kind = layers[first].attention.kind;
                let most = asked.unwrap_or_else(|| self.dense_layers_together(first, options));
                let fits = |l: usize| l < layers.len() && !is_routed(l) && layers[l].attention.kind == kind;
                while end - first < most && fits(end) {
                    end += 1;
                }
                groups.push(first..end);
            }
            first = end;
        }
        groups
    }

    /// Returns how many layers like layer `l` share a package where the options do not say.
    fn dense_layers_together(&self, l: usize, options: &PlanOptions) -> usize {
        let weights: u64 = self.rows[l].iter().map(TensorRow::elements).sum();
        let bytes = weights * u64::from(options.kind("dense_mlp").bits()) / 8;
        let limit = MOST_DENSE_BYTES.min(options.max_shard_mb.saturating_mul(500_000));
        ((limit / bytes.max(1)) as usize).clamp(1, MOST_DENSE_LAYERS)
    }

    /// Plans the shards and the host's steps of all layers.
    ///
    /// # Errors
    /// The options do not fit the model.
    pub(super) fn plan_in_packages(
        &self,
        options: &PlanOptions,
        context: usize,
        joined: &[Range<usize>],
    ) -> Result<(Vec<PlannedShard>, Vec<Step>)> {
        let (mut shards, mut steps) = (Vec::new(), Vec::new());
        let mut layer = 0;
        while layer < self.decoder.layers.len() {
            let group = joined.iter().find(|g| g.start == layer);
            if self.decoder.layers[layer].experts.is_none() {
                let layers = group.cloned().unwrap_or(layer..layer + 1);
                shards.push(self.dense_shard(&layers, options, context));
                steps.push(self.dense_step(&layers, options.form_of(ShardKind::Layers)));
                layer = layers.end.max(layer + 1);
                continue;
            }
            let (_, _, packs) = self.packs(layer, options)?;
            // The package before has the attention where layers are joined.
            if !joined.iter().any(|g| g.len() > 1 && g.end == layer + 1) {
                let named = (attention_name(layer), ShardKind::Attention);
                let w = self.routed_attention_weights(layer, options);
                shards.push(self.package_with_cache(named, &(layer..layer + 1), w, options, context));
                steps.push(self.attention_step(layer, options.form_of(ShardKind::Attention)));
            }
            let joins_next = group.is_some_and(|g| g.len() > 1);
            for pack in 0..packs - usize::from(joins_next) {
                shards.push(self.expert_shard(layer, pack, options, false)?);
            }
            if joins_next {
                shards.push(self.joined_shard(layer, options, context)?);
            }
            steps.extend(self.expert_steps(layer, options, joins_next)?);
            layer += 1;
        }
        Ok((shards, steps))
    }

    /// Explains what joining layers can do where the host chooses experts.
    pub(super) fn fact_of_joining(&self, options: &PlanOptions) -> Option<String> {
        let most = options.layers_per_shard().filter(|_| self.decoder.experts().is_some())?;
        Some(format!(
            "{LAYERS_PER_SHARD} {most}: the host chooses experts inside of each layer, so that a package reaches over one border of \
             layers at most, from the last pack of experts through the next attention; more than 2 change nothing, and 1 joins \
             nothing"
        ))
    }

    /// Plans the weights of attention and the router behind it.
    fn routed_attention_weights(&self, l: usize, options: &PlanOptions) -> Weights {
        let mut w = self.weights(options, l, &["input_norm"]);
        w.add(self.attention_weights(options, l), "");
        w.add(self.weights(options, l, &["post_attention_norm", "router_input", "expert_input"]), "");
        w.add(self.weights(options, l, &["router_logits", "router_logits_bias"]), "");
        w
    }

    /// Plans a pack of experts, whose matrices have the layout of its own sort, or of joined layers.
    fn expert_shard(
        &self,
        l: usize,
        pack: usize,
        options: &PlanOptions,
        is_joined: bool,
    ) -> Result<PlannedShard> {
        let (_, packing, packs) = self.packs(l, options)?;
        let (last, first) = (pack + 1 == packs, pack * packing.per_package);
        let kind = if last { ShardKind::ExpertsCombine } else { ShardKind::Experts };
        let form_of = if is_joined { ShardKind::Layers } else { kind };
        let mut w = self.expert_weights(options, form_of, (l, first))?;
        if last {
            w.add(self.weights(options, l, &DENSE), "");
            w.add(self.weights(options, l, &["dense_norm", "experts_norm"]), "");
            w.add(self.weights(options, l, &["post_feedforward_norm", "hidden_out"]), "");
        }
        let name = pack_name(l, pack, packs);
        let mut shard = PlannedShard::new(name, kind, Some(l), w.matrices, w.vectors);
        let names: Vec<Option<String>> = units(first, packing, last).into_iter().map(|u| u.name).collect();
        shard.functions = functions(&names, &options.tokens);
        shard.experts = Some((first, packing.per_package));
        shard.experts_per_call = Some(packing.per_call);
        Ok(shard)
    }

    /// Plans the package of a layer's last pack and the next layer's attention.
    fn joined_shard(&self, l: usize, options: &PlanOptions, context: usize) -> Result<PlannedShard> {
        let (_, packing, packs) = self.packs(l, options)?;
        let pack = self.expert_shard(l, packs - 1, options, true)?;
        let mut w = Weights { matrices: pack.matrices, vectors: pack.vectors };
        w.add(self.routed_attention_weights(l + 1, options), NEXT_SCOPE);
        let name = joined_name(l, packs);
        let mut shard = PlannedShard::new(name, ShardKind::Layers, Some(l), w.matrices, w.vectors);
        shard.last_layer = Some(l + 1);
        // The unit that ends the layer holds the next layer's attention.
        let units = units((packs - 1) * packing.per_package, packing, true);
        let joins = units.iter().find(|unit| unit.has_own_part).and_then(|unit| unit.name.clone());
        let names: Vec<Option<String>> = units.iter().map(|unit| unit.name.clone()).collect();
        let slots = self.slots(l + 1, options, context);
        shard.functions = attention_functions(options, ShardKind::Layers, slots, &names, &joins);
        shard.experts = pack.experts;
        shard.experts_per_call = pack.experts_per_call;
        shard.cache_slots = Some(slots);
        Ok(shard)
    }

    /// Plans the weights of a layer without experts.
    pub(super) fn dense_layer_weights(&self, l: usize, options: &PlanOptions) -> Weights {
        let mut w = self.weights(options, l, &["input_norm"]);
        w.add(self.attention_weights(options, l), "");
        w.add(self.weights(options, l, &DENSE), "");
        w.add(self.weights(options, l, &["post_attention_norm", "post_feedforward_norm", "hidden_out"]), "");
        w
    }

    /// Plans a package of whole layers without experts.
    fn dense_shard(&self, layers: &Range<usize>, options: &PlanOptions, context: usize) -> PlannedShard {
        let mut w = Weights::default();
        for (i, l) in layers.clone().enumerate() {
            w.add(self.dense_layer_weights(l, options), &layer_scope(i));
        }
        let named = (layers_name(layers, PARTS), ShardKind::Layers);
        self.package_with_cache(named, layers, w, options, context)
    }

    fn dense_step(&self, layers: &Range<usize>, form: ShardForm) -> Step {
        let mut inputs = self.position_inputs(layers.start, form);
        inputs.insert(HIDDEN.into(), register(HIDDEN));
        let kept = layers.clone().enumerate().flat_map(|(i, l)| self.kept_rows(l, form, &layer_scope(i)));
        let outputs = vec![(stream_out(layers.len()), output(HIDDEN))];
        let run = run((layers_name(layers, PARTS), None), inputs, outputs, form);
        Step::Run(Run { kept: kept.collect(), ..run })
    }

    fn attention_step(&self, layer: usize, form: ShardForm) -> Step {
        let mut inputs = self.position_inputs(layer, form);
        inputs.insert(HIDDEN.into(), register(HIDDEN));
        let attention = run((attention_name(layer), None), inputs, attention_outputs(""), form);
        Step::Run(Run { kept: self.kept_rows(layer, form, ""), ..attention })
    }

    fn expert_steps(&self, layer: usize, options: &PlanOptions, is_joined: bool) -> Result<Vec<Step>> {
        let (e, packing, packs) = self.packs(layer, options)?;
        let RouterKind::Linear { renormalizes, is_scaled, .. } = e.router else {
            let what = format!("layer {layer}: a router with a state needs the stream at the host");
            return Err(Error::usage(what));
        };
        let scale = match is_scaled {
            true => Some(self.checked.vector(&self.row(layer, "expert_scale")?.name, e.count)?),
            false => None,
        };
        let route = Step::Route {
            logits: "router_logits".into(),
            weights: "routing".into(),
            top_k: e.active,
            scale,
            bias: None,
            over_all: !renormalizes,
        };
        let mut steps = vec![route, Step::Zero { register: "experts".into(), channels: self.decoder.hidden }];
        for pack in 0..packs {
            let first = pack * packing.per_package;
            for unit in units(first, packing, pack + 1 == packs) {
                let rows = RowRange { start: unit.experts.start, count: unit.experts.len() };
                let mut inputs = BTreeMap::new();
                if !unit.experts.is_empty() {
                    inputs.insert("expert_input".into(), register("expert_input"));
                    inputs.insert("routing".into(), rows_of("routing", rows));
                }
                let (kind, shard) = match (pack + 1 == packs, is_joined) {
                    (true, true) => (ShardKind::Layers, joined_name(layer, packs)),
                    (true, false) => (ShardKind::ExpertsCombine, pack_name(layer, pack, packs)),
                    (false, _) => (ShardKind::Experts, pack_name(layer, pack, packs)),
                };
                let form = options.form_of(kind);
                let mut kept = BTreeMap::new();
                let sum = OutputBinding { accumulate: true, ..output("experts") };
                let mut outputs = vec![("experts_out".into(), sum)];
                if unit.has_own_part {
                    inputs.insert(HIDDEN.into(), register(HIDDEN));
                    inputs.insert("experts_in".into(), register("experts"));
                    outputs = vec![("hidden_out".into(), output(HIDDEN))];
                    if is_joined {
                        inputs.extend(self.position_inputs(layer + 1, form));
                        kept = self.kept_rows(layer + 1, form, NEXT_SCOPE);
                        outputs = attention_outputs(NEXT_SCOPE);
                    }
                }
                let when = (!unit.has_own_part).then(|| When { register: "routing".into(), rows });
                steps.push(Step::Run(Run { when, kept, ..run((shard, unit.name), inputs, outputs, form) }));
            }
        }
        Ok(steps)
    }

    /// Lowers a function of a shard of [`Family::plan_in_packages`].
    ///
    /// # Errors
    /// The program breaks MIL's rules, or the shard is not one of the model's.
    pub(super) fn lower_in_packages(
        &self,
        mut l: Lowering<'_>,
        layer: usize,
        shard: &PlannedShard,
        function: &ShardFunction,
    ) -> Result<BuiltFunction> {
        let wrong = || not_ours(shard);
        if shard.kind == ShardKind::Attention {
            let hidden = l.stream_input(HIDDEN, self.decoder.hidden)?;
            let shape = self.attention_in(shard, function, layer)?;
            return self.lower_routed_attention(l, "", &hidden, layer, &shape);
        }
        if shard.experts.is_none() {
            let layers = shard.joined_layers().ok_or_else(wrong)?;
            let shape = self.attention_in(shard, function, layer)?;
            return self.lower_dense(l, layers, shard.form.cache, &shape);
        }
        let (first, packing) = packing_of(shard)?;
        let units = units(first, packing, shard.kind != ShardKind::Experts);
        let unit = units.iter().find(|u| u.name == function.unit).ok_or_else(wrong)?;
        let next = match shard.kind {
            ShardKind::Layers => {
                let next = shard.last_layer.filter(|l| *l < self.decoder.layers.len()).ok_or_else(wrong)?;
                Some((next, self.attention_in(shard, function, next)?))
            }
            _ => None,
        };
        self.lower_experts(l, layer, unit, next)
    }

    /// Lowers whole layers without experts.
    fn lower_dense(
        &self,
        mut l: Lowering<'_>,
        layers: Range<usize>,
        cache: CacheForm,
        shape: &AttentionDims,
    ) -> Result<BuiltFunction> {
        let mut hidden = l.stream_input(HIDDEN, self.decoder.hidden)?;
        let at = self.declare_positions(&mut l, layers.start, shape)?;
        let is_shared = cache == CacheForm::State && layers.len() > 1;
        let shared = if is_shared { Some(l.shared_cache(shape, layers.len())?) } else { None };
        let mut kept = Vec::new();
        for (i, layer) in layers.enumerate() {
            l.set_scope(&layer_scope(i));
            let shared = shared.as_ref().map(|all| (all, i));
            let inputs = AttentionInputs { at: &at, history: None, shared };
            let (attended, rows) = self.attended(&mut l, layer, &hidden, inputs, shape)?;
            kept.extend(rows);
            hidden = self.end_dense_layer(&mut l, &self.decoder.layers[layer], &attended)?;
        }
        if let Some(all) = shared {
            l.set_scope("");
            l.write_shared(&all, &std::mem::take(&mut kept), &at)?;
        }
        l.finish_attention(&[&hidden], &kept)
    }

    /// Computes the dense MLP's half of a layer, from the stream to the stream.
    pub(super) fn end_dense_layer(&self, l: &mut Lowering<'_>, layer: &Layer, attended: &Var) -> Result<Var> {
        let dense = self.dense(l, layer, attended)?;
        let dense = self.after(l, "post_feedforward_norm", dense)?;
        self.end_layer(l, attended, &dense)
    }

    /// Adds a layer's last branch to the stream, as `hidden_out`.
    fn end_layer(&self, l: &mut Lowering<'_>, hidden: &Var, branch: &Var) -> Result<Var> {
        match self.decoder.residual {
            Residual::LayerScalar => {
                let stream = l.f().add("stream", hidden, branch)?;
                Ok(l.scale_by("hidden_out", &stream)?)
            }
            _ => Ok(l.f().add("hidden_out", hidden, branch)?),
        }
    }

    /// Lowers attention, the residual stream after it, and the router, whose names begin with `scope`, and ends the function.
    fn lower_routed_attention(
        &self,
        mut l: Lowering<'_>,
        scope: &str,
        hidden: &Var,
        layer: usize,
        shape: &AttentionDims,
    ) -> Result<BuiltFunction> {
        let at = self.declare_positions(&mut l, layer, shape)?;
        l.set_scope(scope);
        let inputs = AttentionInputs { at: &at, history: None, shared: None };
        let (attended, kept) = self.attended(&mut l, layer, hidden, inputs, shape)?;
        let norm = self.stream_norm();
        let router = self.decoder.layers[layer].experts.as_ref().map(|e| e.router);
        let (router_logits, expert_input) = match router {
            // The router and the experts read the same normalized stream, each with its own weight.
            Some(RouterKind::Linear { is_scaled: true, has_bias, .. }) => {
                let unit = l.rms_norm("stream_unit", &attended, norm)?;
                let router_input = l.scale_by("router_input", &unit)?;
                let logits = l.project_with("router_logits", &router_input, "router_logits", has_bias)?;
                (logits, l.scale_by("expert_input", &unit)?)
            }
            router => {
                let has_bias = matches!(router, Some(RouterKind::Linear { has_bias: true, .. }));
                let input = l.rms_norm_weighted("expert_input", &attended, norm)?;
                (l.project_with("router_logits", &input, "router_logits", has_bias)?, input)
            }
        };
        l.finish_attention(&[&attended, &expert_input, &router_logits], &kept)
    }

    /// Lowers the experts of a unit. The unit that ends the layer also joins the layer's branches, and goes on with
    /// the attention of `next`, a layer and the shape of its attention.
    fn lower_experts(
        &self,
        mut l: Lowering<'_>,
        layer: usize,
        unit: &ExpertUnit,
        next: Option<(usize, AttentionDims)>,
    ) -> Result<BuiltFunction> {
        let (own, hidden_size) = (&self.decoder.layers[layer], self.decoder.hidden);
        let experts: Vec<usize> = unit.experts.clone().collect();
        let mut sum = None;
        if !experts.is_empty() {
            let y = l.stream_input("expert_input", hidden_size)?;
            let routing = l.stream_input("routing", experts.len())?;
            let name = if unit.has_own_part { "experts_own" } else { "experts_out" };
            sum = Some(l.experts(name, &y, &routing, &experts, own.activation)?);
        }
        if !unit.has_own_part {
            let sum = sum.ok_or_else(|| Error::usage("a pack without experts"))?;
            return l.finish_streams(&[&sum]);
        }
        let hidden = l.stream_input(HIDDEN, hidden_size)?;
        let others = l.stream_input("experts_in", hidden_size)?;
        let mut branch = match sum {
            Some(own) => l.f().add("experts_all", &others, &own)?,
            None => others,
        };
        if own.dense.is_some() {
            branch = self.after(&mut l, "experts_norm", branch)?;
            let dense = self.dense(&mut l, own, &hidden)?;
            let dense = self.after(&mut l, "dense_norm", dense)?;
            branch = l.f().add("branches", &dense, &branch)?;
        }
        let branch = self.after(&mut l, "post_feedforward_norm", branch)?;
        let out = self.end_layer(&mut l, &hidden, &branch)?;
        match next {
            None => l.finish_streams(&[&out]),
            Some((layer, shape)) => self.lower_routed_attention(l, NEXT_SCOPE, &out, layer, &shape),
        }
    }
}
