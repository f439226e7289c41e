//! Shards of Gemma 4 MoE: the contents of each package, and its program.

use super::Gemma4;
use crate::form::{IoForm, LAYERS_PER_SHARD, ShardForm};
use crate::lower::{Activation, Attention, HeadNorm, Lowering, NormShape, PositionInputs, Stored};
use crate::models::chain_builder::{
    self, ExpertUnit, OutputHead, attention_functions, calls, functions, named, not_ours, output, packing_of,
    register, rows_of, stream_outputs, tensor, unit_name,
};
use crate::models::checked::CheckedCheckpoint;
use crate::models::{Family, Preset, Sizes};
use crate::plan::{MatrixPlan, Packing, PartKinds, Plan, PlanOptions, PlannedShard, VectorPlan};
use crate::quant::Quant;
use crate::{Error, Result};
use anemoe_bundle::{
    Cache, Chain, HostInput, IndexBits, InputBinding, ModelInfo, OutputBinding, Rope, RowRange, Run,
    ShardFunction, ShardKind, Step, TokenCount, When,
};
use anemoe_mlpackage::mil::builder::{BuiltFunction, Var};
use std::collections::BTreeMap;
use std::ops::Range;

/// Reason of the preset of kinds, measured by benches/held_out.py.
const PRESET_REASON: &str = "these two lower the mean divergence of small-gemma4 from 0.0235 to 0.0096 nats over 16 prompts, for 22 % more bytes a token";
/// Name of the unit that joins a layer's branches, where no unit with experts does so.
const COMBINE: &str = "combine";
/// Prefix of the names of attention in a package that begins with the last pack of the layer before.
const NEXT_SCOPE: &str = "next_";

/// Returns a layer's kind, `full` or `sliding`, which names its rope and its cache in the chain.
fn kind_name(full: bool) -> &'static str {
    if full { "full" } else { "sliding" }
}

/// Returns the units of a pack; the last unit of a layer's last pack joins the layer's branches.
fn units(first: usize, packing: Packing, last: bool) -> Vec<ExpertUnit<Joins>> {
    if packing.per_call == packing.per_package {
        return vec![ExpertUnit {
            name: None,
            experts: first..first + packing.per_package,
            role: Joins(last),
        }];
    }
    let unit = |e: std::ops::Range<usize>| ExpertUnit {
        name: Some(unit_name(e.start)),
        experts: e,
        role: Joins(false),
    };
    let mut units: Vec<ExpertUnit<Joins>> = calls(first, packing).map(unit).collect();
    if last {
        units.push(ExpertUnit { name: Some(COMBINE.into()), experts: 0..0, role: Joins(true) });
    }
    units
}

/// True for the unit that joins the branches of a layer.
struct Joins(bool);

fn attention_name(layer: usize) -> String {
    format!("L{layer:02}.attn")
}

fn pack_name(layer: usize, pack: usize, packs: usize) -> String {
    format!("L{layer:02}.ffn.p{pack}of{packs}")
}

/// Names the package of a layer's last pack and the next layer's attention.
fn joined_name(layer: usize, packs: usize) -> String {
    format!("{}.{}", pack_name(layer, packs - 1, packs), attention_name(layer + 1))
}

/// Returns the pairs of layers that share a package. The host chooses experts inside each layer, so no package
/// crosses two borders of layers.
fn joined_layers(layers: usize, options: &PlanOptions) -> Vec<Range<usize>> {
    match options.layers_per_shard() {
        Some(most) if most.get() > 1 => (1..layers).map(|next| next - 1..next + 1).collect(),
        _ => Vec::new(),
    }
}

/// Binds the outputs of attention and router, whose names begin with `scope`.
fn attention_outputs(form: ShardForm, scope: &str) -> BTreeMap<String, OutputBinding> {
    let outputs =
        [("attended", "hidden"), ("expert_input", "expert_input"), ("router_logits", "router_logits")];
    let names = outputs.map(|(name, to)| (format!("{scope}{name}"), output(to)));
    stream_outputs(form, names.iter().map(|(name, to)| (name.as_str(), to.clone())).collect())
}

impl Gemma4 {
    fn attention_shape(&self, layer: usize, options: &PlanOptions, context: usize) -> Attention {
        let c = &self.config;
        let slots = match c.is_full(layer) {
            true => context,
            // A call of the most tokens must not overwrite slots that its first token sees.
            false => (c.sliding_window + options.max_tokens() - 1).min(context),
        };
        self.shape_with(layer, slots.next_multiple_of(32))
    }

    fn shape_with(&self, layer: usize, slots: usize) -> Attention {
        let c = &self.config;
        Attention {
            heads: c.num_attention_heads,
            kv_heads: c.kv_heads(layer),
            head_dim: c.head_dim(layer),
            slots,
            seen: slots,
            tail: 0,
        }
    }

    fn attention_shard(&self, layer: usize, options: &PlanOptions, context: usize) -> PlannedShard {
        let c = &self.config;
        let (h, d) = (c.hidden_size, c.head_dim(layer));
        let (q, kv) = (c.num_attention_heads * d, c.kv_heads(layer) * d);
        let matrix = |name: &str, rows, cols| {
            let t = tensor(layer, &format!("self_attn.{name}.weight"));
            chain_builder::matrix(options, name, "attention", t, 0, (rows, cols))
        };
        let mut matrices = vec![matrix("q_proj", q, h), matrix("k_proj", kv, h)];
        if !c.k_eq_v(layer) {
            matrices.push(matrix("v_proj", kv, h));
        }
        matrices.push(matrix("o_proj", h, q));
        let router = tensor(layer, "router.proj.weight");
        matrices.push(chain_builder::matrix(
            options,
            "router_logits",
            "router",
            router,
            0,
            (c.num_experts, h),
        ));
        let channels =
            |name: &str, t: &str| VectorPlan::channels(format!("{name}_weight"), tensor(layer, t), h);
        let vectors = vec![
            channels("input_norm", "input_layernorm.weight"),
            VectorPlan::last_axis("q_norm_weight", tensor(layer, "self_attn.q_norm.weight"), d),
            VectorPlan::last_axis("k_norm_weight", tensor(layer, "self_attn.k_norm.weight"), d),
            channels("post_attention_norm", "post_attention_layernorm.weight"),
            VectorPlan { scale: (h as f32).sqrt().recip(), ..channels("router_input", "router.scale") },
            channels("expert_input", "pre_feedforward_layernorm_2.weight"),
        ];
        let name = attention_name(layer);
        let mut shard = PlannedShard::new(name, ShardKind::Attention, Some(layer), matrices, vectors);
        let slots = self.attention_shape(layer, options, context).slots;
        shard.functions = attention_functions(options, ShardKind::Attention, slots, &[None], &None);
        shard.cache_slots = Some(slots);
        shard
    }

    /// Plans a pack of experts, whose matrices have the layout of the sort `form_of`, or of the shard's own sort.
    fn expert_shard(
        &self,
        layer: usize,
        pack: usize,
        packing: Packing,
        options: &PlanOptions,
        form_of: Option<ShardKind>,
    ) -> PlannedShard {
        let c = &self.config;
        let (h, f) = (c.hidden_size, c.moe_intermediate_size);
        let packs = c.num_experts / packing.per_package;
        let last = pack + 1 == packs;
        let first = pack * packing.per_package;
        let kind = if last { ShardKind::ExpertsCombine } else { ShardKind::Experts };
        let tensors = ["experts.gate_up_proj", "experts.down_proj"].map(|t| tensor(layer, t));
        let mut matrices = chain_builder::expert_matrices(
            options,
            form_of.unwrap_or(kind),
            first,
            packing,
            (h, f),
            (&tensors[0], &tensors[1]),
        );
        let mut vectors = Vec::new();
        if last {
            let i = c.intermediate_size;
            for (name, rows, cols) in [("gate_proj", i, h), ("up_proj", i, h), ("down_proj", h, i)] {
                let t = tensor(layer, &format!("mlp.{name}.weight"));
                matrices.push(chain_builder::matrix(options, name, "dense_mlp", t, 0, (rows, cols)));
            }
            for (name, t) in [
                ("dense_input", "pre_feedforward_layernorm.weight"),
                ("dense_norm", "post_feedforward_layernorm_1.weight"),
                ("experts_norm", "post_feedforward_layernorm_2.weight"),
                ("post_feedforward_norm", "post_feedforward_layernorm.weight"),
            ] {
                vectors.push(VectorPlan::channels(format!("{name}_weight"), tensor(layer, t), h));
            }
            vectors.push(VectorPlan::channels("hidden_out_weight", tensor(layer, "layer_scalar"), 1));
        }
        let name = pack_name(layer, pack, packs);
        let mut shard = PlannedShard::new(name, kind, Some(layer), matrices, vectors);
        let names: Vec<Option<String>> = units(first, packing, last).into_iter().map(|u| u.name).collect();
        shard.functions = functions(&names, &options.tokens);
        shard.experts = Some((first, packing.per_package));
        shard.experts_per_call = Some(packing.per_call);
        shard
    }

    /// Plans the package of a layer's last pack and the next layer's attention.
    fn joined_shard(
        &self,
        layer: usize,
        packing: Packing,
        options: &PlanOptions,
        context: usize,
    ) -> PlannedShard {
        let packs = self.config.num_experts / packing.per_package;
        let pack = self.expert_shard(layer, packs - 1, packing, options, Some(ShardKind::Layers));
        let attention = self.attention_shard(layer + 1, options, context);
        let scoped = |name: &str| format!("{NEXT_SCOPE}{name}");
        let mut matrices = pack.matrices;
        let own = attention.matrices.into_iter();
        matrices.extend(own.map(|m| MatrixPlan { name: scoped(&m.name), ..m }));
        let mut vectors = pack.vectors;
        let own = attention.vectors.into_iter();
        vectors.extend(own.map(|v| VectorPlan { name: scoped(&v.name), ..v }));
        let name = joined_name(layer, packs);
        let mut shard = PlannedShard::new(name, ShardKind::Layers, Some(layer), matrices, vectors);
        shard.last_layer = Some(layer + 1);
        // The unit that ends the layer holds the next layer's attention.
        let units = units((packs - 1) * packing.per_package, packing, true);
        let joins = units.iter().find(|unit| unit.role.0).and_then(|unit| unit.name.clone());
        let names: Vec<Option<String>> = units.iter().map(|unit| unit.name.clone()).collect();
        let slots = self.attention_shape(layer + 1, options, context).slots;
        shard.functions = attention_functions(options, ShardKind::Layers, slots, &names, &joins);
        shard.experts = pack.experts;
        shard.experts_per_call = pack.experts_per_call;
        shard.cache_slots = Some(slots);
        shard
    }

    fn head(&self) -> OutputHead {
        let c = &self.config;
        OutputHead {
            hidden: c.hidden_size,
            vocab: c.vocab_size,
            norm: "norm.weight",
            matrix: "embed_tokens.weight",
            eps: c.rms_norm_eps,
        }
    }

    /// Binds the inputs of a layer's attention that follow from positions.
    fn position_inputs(&self, layer: usize, form: ShardForm) -> BTreeMap<String, InputBinding> {
        let kind = kind_name(self.config.is_full(layer)).to_string();
        named(vec![
            ("rope_cos", InputBinding::Host(HostInput::RopeCos(kind.clone()))),
            ("rope_sin", InputBinding::Host(HostInput::RopeSin(kind.clone()))),
            ("mask", InputBinding::Host(chain_builder::mask_input(form, kind.clone()))),
            ("kv_keep", InputBinding::Host(chain_builder::keep_input(form, kind.clone()))),
            ("kv_place", InputBinding::Host(chain_builder::place_input(form, kind))),
        ])
    }

    fn attention_step(&self, layer: usize, form: ShardForm) -> Step {
        let mut inputs = self.position_inputs(layer, form);
        inputs.insert("hidden".into(), register("hidden"));
        Step::Run(Run {
            shard: attention_name(layer),
            others: Vec::new(),
            unit: None,
            when: None,
            inputs,
            outputs: attention_outputs(form, ""),
            kept: chain_builder::kept_cache(form, ""),
            channels_last: form.io == IoForm::ChannelsLast,
        })
    }

    fn expert_steps(
        &self,
        layer: usize,
        per_expert_scale: Vec<f32>,
        packing: Packing,
        options: &PlanOptions,
        is_joined: bool,
        steps: &mut Vec<Step>,
    ) {
        let c = &self.config;
        steps.push(Step::Route {
            logits: "router_logits".into(),
            weights: "routing".into(),
            top_k: c.top_k_experts,
            scale: Some(per_expert_scale),
            bias: None,
            over_all: false,
        });
        steps.push(Step::Zero { register: "experts".into(), channels: c.hidden_size });
        let packs = c.num_experts / packing.per_package;
        for pack in 0..packs {
            let first = pack * packing.per_package;
            for unit in units(first, packing, pack + 1 == packs) {
                let rows = RowRange { start: unit.experts.start, count: unit.experts.len() };
                let mut inputs = BTreeMap::new();
                if !unit.experts.is_empty() {
                    inputs.insert("expert_input".into(), register("expert_input"));
                    inputs.insert("routing".into(), rows_of("routing", rows));
                }
                let joins = unit.role.0;
                let last = pack + 1 == packs;
                let (kind, shard) = match (last, is_joined) {
                    (true, true) => (ShardKind::Layers, joined_name(layer, packs)),
                    (true, false) => (ShardKind::ExpertsCombine, pack_name(layer, pack, packs)),
                    (false, _) => (ShardKind::Experts, pack_name(layer, pack, packs)),
                };
                let form = options.form_of(kind);
                let mut kept = BTreeMap::new();
                let outputs = if joins {
                    inputs.insert("hidden".into(), register("hidden"));
                    inputs.insert("experts_in".into(), register("experts"));
                    if is_joined {
                        inputs.extend(self.position_inputs(layer + 1, form));
                        kept = chain_builder::kept_cache(form, NEXT_SCOPE);
                        attention_outputs(form, NEXT_SCOPE)
                    } else {
                        stream_outputs(form, vec![("hidden_out", output("hidden"))])
                    }
                } else {
                    let sum = OutputBinding { accumulate: true, ..output("experts") };
                    stream_outputs(form, vec![("experts_out", sum)])
                };
                let when = (!joins).then(|| When { register: "routing".into(), rows });
                steps.push(Step::Run(Run {
                    shard,
                    others: Vec::new(),
                    unit: unit.name,
                    when,
                    inputs,
                    outputs,
                    kept,
                    channels_last: form.io == IoForm::ChannelsLast,
                }));
            }
        }
    }

    fn chain(
        &self,
        options: &PlanOptions,
        context: usize,
        packing: Packing,
        joined: &[Range<usize>],
        head: &[PlannedShard],
    ) -> Result<Chain> {
        let c = &self.config;
        let mut ropes = BTreeMap::new();
        let mut caches = BTreeMap::new();
        let mut steps = Vec::new();
        for layer in 0..c.num_hidden_layers {
            let full = c.is_full(layer);
            let kind = kind_name(full);
            let shape = self.attention_shape(layer, options, context);
            let window = (!full).then_some(c.sliding_window);
            caches.entry(kind.to_string()).or_insert(Cache { slots: shape.slots, window });
            let rope = || Rope { width: shape.head_dim, inv_freq: c.inv_freq(layer) };
            ropes.entry(kind.to_string()).or_insert_with(rope);
            if !joined.iter().any(|layers| layers.end == layer + 1) {
                steps.push(self.attention_step(layer, options.form_of(ShardKind::Attention)));
            }
            let is_joined = joined.iter().any(|layers| layers.start == layer);
            let scale = self.checkpoint.vector(&tensor(layer, "router.per_expert_scale"), c.num_experts)?;
            self.expert_steps(layer, scale, packing, options, is_joined, &mut steps);
        }
        let model = ModelInfo {
            vocab_size: c.vocab_size,
            hidden_size: c.hidden_size,
            num_layers: c.num_hidden_layers,
            num_experts: Some(c.num_experts),
            max_context: context,
            bos_token_id: c.bos_token_id,
            eos_token_ids: self.eos_token_ids.clone(),
            final_logit_softcapping: c.final_logit_softcapping,
        };
        let scale = (c.hidden_size as f32).sqrt();
        let head = OutputHead::steps(head, register("hidden"), options.form_of(ShardKind::Head));
        let empty = chain_builder::chain(self.name(), &self.checkpoint, model, scale, options);
        Ok(Chain { ropes, caches, steps, head, ..empty })
    }

    fn lower_attention(
        &self,
        layer: usize,
        slots: usize,
        function: &ShardFunction,
        stored: &Stored,
        form: ShardForm,
    ) -> Result<BuiltFunction> {
        let c = &self.config;
        let seen = function.context.unwrap_or(slots);
        let shape = Attention { seen, ..self.shape_with(layer, slots) };
        let mut l = Lowering::new(stored, function.tokens, form);
        let hidden = l.stream_input("hidden", c.hidden_size)?;
        let at = l.position_inputs(&shape, shape.head_dim)?;
        self.attention(l, &hidden, layer, &at, &shape)
    }

    /// Lowers attention, the residual stream after it, and the router, and ends the function.
    fn attention(
        &self,
        mut l: Lowering<'_>,
        hidden: &Var,
        layer: usize,
        at: &PositionInputs,
        shape: &Attention,
    ) -> Result<BuiltFunction> {
        let c = &self.config;
        let d = shape.head_dim;
        let norm = NormShape { axis: 1, eps: c.rms_norm_eps };
        let head_norm = NormShape { axis: 3, eps: c.rms_norm_eps };

        let x = l.rms_norm_weighted("input_norm", hidden, norm)?;
        let q = l.project("q_proj", &x, "q_proj")?;
        let q = l.to_heads("q", &q, shape.heads, d)?;
        let q = l.head_norm("q_norm", &q, HeadNorm::Weighted(head_norm))?;
        let q = l.rotate("q_rotated", &q, d, d, at)?;
        let k = l.project("k_proj", &x, "k_proj")?;
        let k = l.to_heads("k", &k, shape.kv_heads, d)?;
        // Where a layer has no v_proj, V is the output of k_proj before K's norm and rotation.
        let v = match c.k_eq_v(layer) {
            true => k.clone(),
            false => {
                let v = l.project("v_proj", &x, "v_proj")?;
                l.to_heads("v", &v, shape.kv_heads, d)?
            }
        };
        let k = l.head_norm("k_norm", &k, HeadNorm::Weighted(head_norm))?;
        let k = l.rotate("k_rotated", &k, d, d, at)?;
        let v = l.head_norm("v_norm", &v, HeadNorm::Unit(head_norm))?;
        let cache = l.read_cache(shape)?;
        let (keys, values, kept) = l.update_cache(&cache, (&k, &v), None, at, shape)?;
        let context = l.attend(&q, &keys, &values, at, shape)?;
        let o = l.project("o_proj", &context, "o_proj")?;
        let o = l.rms_norm_weighted("post_attention_norm", &o, norm)?;
        let attended = l.f().add("attended", hidden, &o)?;

        // The router and the experts read the same normalized stream, each with its own weight.
        let unit = l.rms_norm("stream_unit", &attended, norm)?;
        let router_input = l.scale_by("router_input", &unit)?;
        let router_logits = l.project("router_logits", &router_input, "router_logits")?;
        let expert_input = l.scale_by("expert_input", &unit)?;
        l.finish_attention(&[&attended, &expert_input, &router_logits], &kept)
    }

    /// Lowers the experts of a unit. The unit that ends the layer also joins the layer's branches, and goes on with
    /// the attention of `next`, a layer and the shape of its attention.
    fn lower_experts(
        &self,
        unit: &ExpertUnit<Joins>,
        tokens: TokenCount,
        stored: &Stored,
        form: ShardForm,
        next: Option<(usize, Attention)>,
    ) -> Result<BuiltFunction> {
        let c = &self.config;
        let experts: Vec<usize> = unit.experts.clone().collect();
        let mut l = Lowering::new(stored, tokens, form);
        let mut sum = None;
        if !experts.is_empty() {
            let y = l.stream_input("expert_input", c.hidden_size)?;
            let routing = l.stream_input("routing", experts.len())?;
            let name = if unit.role.0 { "experts_own" } else { "experts_out" };
            sum = Some(l.experts(name, &y, &routing, &experts, Activation::GeluTanh)?);
        }
        if !unit.role.0 {
            let sum = sum.ok_or_else(|| Error::usage("a pack without experts"))?;
            return l.finish_streams(&[&sum]);
        }
        let norm = NormShape { axis: 1, eps: c.rms_norm_eps };
        let hidden = l.stream_input("hidden", c.hidden_size)?;
        let others = l.stream_input("experts_in", c.hidden_size)?;
        let experts = match sum {
            Some(own) => l.f().add("experts_all", &others, &own)?,
            None => others,
        };
        let experts = l.rms_norm_weighted("experts_norm", &experts, norm)?;
        let x = l.rms_norm_weighted("dense_input", &hidden, norm)?;
        let gate = l.project("gate_proj", &x, "gate_proj")?;
        let up = l.project("up_proj", &x, "up_proj")?;
        let dense = l.gated("dense_hidden", &gate, &up, Activation::GeluTanh)?;
        let dense = l.project("down_proj", &dense, "down_proj")?;
        let dense = l.rms_norm_weighted("dense_norm", &dense, norm)?;
        let both = l.f().add("branches", &dense, &experts)?;
        let both = l.rms_norm_weighted("post_feedforward_norm", &both, norm)?;
        let stream = l.f().add("stream", &hidden, &both)?;
        let out = l.scale_by("hidden_out", &stream)?;
        let Some((layer, shape)) = next else { return l.finish_streams(&[&out]) };
        let at = l.position_inputs(&shape, shape.head_dim)?;
        l.set_scope(NEXT_SCOPE);
        self.attention(l, &out, layer, &at, &shape)
    }

    /// Plans with one package for each pair of `joined`, from its first layer into its second; all other layers are
    /// in parts.
    fn plan_joining(&self, options: &PlanOptions, joined: &[Range<usize>]) -> Result<Plan> {
        options.check()?;
        options.check_forms(self.has_history())?;
        let c = &self.config;
        let context = options.context(c.max_position_embeddings)?;
        let packing = options.packing(c.num_experts)?;
        let packs = c.num_experts / packing.per_package;
        let mut shards = Vec::new();
        for layer in 0..c.num_hidden_layers {
            if !joined.iter().any(|layers| layers.end == layer + 1) {
                shards.push(self.attention_shard(layer, options, context));
            }
            let is_joined = joined.iter().any(|layers| layers.start == layer);
            let alone = if is_joined { packs - 1 } else { packs };
            shards.extend((0..alone).map(|pack| self.expert_shard(layer, pack, packing, options, None)));
            if is_joined {
                shards.push(self.joined_shard(layer, packing, options, context));
            }
        }
        let head = self.head().shards(options);
        let chain = self.chain(options, context, packing, joined, &head)?;
        let facts = options.layers_per_shard().map(|most| {
            format!(
                "{LAYERS_PER_SHARD} {most}: the host chooses experts inside of each layer, so that a package reaches over one border of \
                 layers at most, from the last pack of experts through the next attention; more than 2 change nothing, and 1 joins \
                 nothing"
            )
        });
        chain_builder::plan(self, options, shards, head, chain, facts.into_iter().collect())
    }
}

impl Family for Gemma4 {
    fn name(&self) -> &'static str {
        "gemma4"
    }

    fn preset(&self) -> Preset {
        Preset {
            quant: Quant::lut(IndexBits::Four),
            parts: PartKinds {
                attention: Some(Quant::lut(IndexBits::Six)),
                head: Some(Quant::lut(IndexBits::Six)),
                ..PartKinds::default()
            },
            reason: PRESET_REASON,
        }
    }

    fn plan(&self, options: &PlanOptions) -> Result<Plan> {
        self.plan_joining(options, &joined_layers(self.config.num_hidden_layers, options))
    }

    fn plan_around(&self, options: &PlanOptions, shard: &PlannedShard) -> Result<Plan> {
        self.plan_joining(options, &shard.joined_layers().into_iter().collect::<Vec<_>>())
    }

    fn lower(
        &self,
        shard: &PlannedShard,
        function: &ShardFunction,
        stored: &Stored,
    ) -> Result<BuiltFunction> {
        let wrong = || not_ours(shard);
        match (shard.kind, shard.layer) {
            (ShardKind::Attention, Some(layer)) if layer < self.config.num_hidden_layers => {
                let slots = shard.cache_slots.ok_or_else(wrong)?;
                self.lower_attention(layer, slots, function, stored, shard.form)
            }
            (ShardKind::Experts | ShardKind::ExpertsCombine, Some(_)) => {
                let (first, packing) = packing_of(shard)?;
                let units = units(first, packing, shard.kind == ShardKind::ExpertsCombine);
                let unit = units.iter().find(|u| u.name == function.unit).ok_or_else(wrong)?;
                self.lower_experts(unit, function.tokens, stored, shard.form, None)
            }
            (ShardKind::Layers, Some(_)) => {
                let (first, packing) = packing_of(shard)?;
                let units = units(first, packing, true);
                let unit = units.iter().find(|u| u.name == function.unit).ok_or_else(wrong)?;
                let next = shard.last_layer.filter(|layer| *layer < self.config.num_hidden_layers);
                let (next, slots) = (next.ok_or_else(wrong)?, shard.cache_slots.ok_or_else(wrong)?);
                let shape =
                    Attention { seen: function.context.unwrap_or(slots), ..self.shape_with(next, slots) };
                self.lower_experts(unit, function.tokens, stored, shard.form, Some((next, shape)))
            }
            (ShardKind::Head, None) => self.head().lower(function.tokens, stored, shard.form),
            _ => Err(wrong()),
        }
    }

    fn checked_checkpoint(&self) -> &CheckedCheckpoint {
        &self.checkpoint
    }

    fn embedding_tensor(&self) -> &str {
        "embed_tokens.weight"
    }

    fn summary(&self) -> BTreeMap<String, serde_json::Value> {
        let c = &self.config;
        let full = (0..c.num_hidden_layers).filter(|&l| c.is_full(l)).count();
        let sizes = [
            ("hidden_size", c.hidden_size),
            ("num_hidden_layers", c.num_hidden_layers),
            ("full_attention_layers", full),
            ("num_attention_heads", c.num_attention_heads),
            ("sliding_window", c.sliding_window),
            ("intermediate_size", c.intermediate_size),
            ("num_experts", c.num_experts),
            ("top_k_experts", c.top_k_experts),
            ("moe_intermediate_size", c.moe_intermediate_size),
            ("vocab_size", c.vocab_size),
            ("max_position_embeddings", c.max_position_embeddings),
        ];
        sizes.into_iter().map(|(k, v)| (k.to_string(), v.into())).collect()
    }

    fn sizes(&self) -> Sizes {
        let c = &self.config;
        Sizes {
            layers: c.num_hidden_layers,
            experts: c.num_experts,
            experts_per_token: c.top_k_experts,
            positions: c.max_position_embeddings,
            parameters: c.parameters(),
            expert_parameters: c.expert_parameters(),
        }
    }
}
