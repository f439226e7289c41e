//! ZAYA as shards: what goes into which package, the program of each, and what the host does between them.

use super::Zaya;
use crate::form::{HistoryForm, IoForm, ShardForm};
use crate::lower::{
    Activation, Attention, CCA_HISTORY, HISTORY, HISTORY_ROWS, KV_PLACE, Lowering, NormShape, Stored,
};
use crate::models::CheckedCheckpoint;
use crate::models::chain_builder::{
    self, ExpertUnit, OutputHead, attention_functions, calls, functions, named, normalized, not_ours, output,
    packing_of, register, rows_of, stream_outputs, tensor, unit_name,
};
use crate::models::{Family, Preset, Sizes};
use crate::plan::{MatrixPlan, Packing, PartKinds, Plan, PlanOptions, PlannedShard, VectorPlan};
use crate::quant::{Granularity, Quant};
use crate::variants::ZayaSkip;
use crate::{Error, Result};
use anemoe_bundle::{
    Cache, Chain, HostInput, InputBinding, Kept, ModelInfo, OutputBinding, Rope, RowRange, Run,
    ShardFunction, ShardKind, Step, TokenCount, When,
};
use anemoe_mlpackage::mil::builder::{BuiltFunction, Var};
use std::collections::BTreeMap;

/// Reason of the preset of kinds, measured by benches/held_out.py.
const PRESET_REASON: &str = "it lowers the mean divergence of small-zaya from 0.0306 to 0.0196 nats over 16 prompts, for 16 % more bytes a token";
/// Name of the function that chooses experts, where they are called one by one.
const ROUTER: &str = "router";
/// Name of the rope and the cache: all layers are alike.
const KIND: &str = "hybrid";
/// Register with the stream.
const HIDDEN: &str = "hidden";
/// Register with the normalized stream.
const INPUT: &str = "input";

/// Role of a function of a MoE package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Routes, and computes all experts.
    Whole,
    /// Routes.
    Router,
    /// Computes experts that the host chose.
    Experts,
}

/// Functions of one package. The first one of a layer has the router; where one call computes all experts, the router is
/// part of it.
fn units(pack: usize, packing: Packing, experts: usize) -> Vec<ExpertUnit<Role>> {
    let first = pack * packing.per_package;
    if packing.per_call == experts {
        return vec![ExpertUnit { name: None, experts: 0..experts, role: Role::Whole }];
    }
    if pack > 0 && packing.per_call == packing.per_package {
        return vec![ExpertUnit {
            name: None,
            experts: first..first + packing.per_package,
            role: Role::Experts,
        }];
    }
    let router =
        (pack == 0).then(|| ExpertUnit { name: Some(ROUTER.into()), experts: 0..0, role: Role::Router });
    let unit = |e: std::ops::Range<usize>| ExpertUnit {
        name: Some(unit_name(e.start)),
        experts: e,
        role: Role::Experts,
    };
    router.into_iter().chain(calls(first, packing).map(unit)).collect()
}

fn attention_name(layer: usize) -> String {
    format!("L{layer:02}.attn")
}

fn moe_name(layer: usize, pack: usize, packs: usize) -> String {
    match packs {
        1 => format!("L{layer:02}.moe"),
        _ => format!("L{layer:02}.moe.p{pack}of{packs}"),
    }
}

impl Zaya {
    fn attention_shape(&self, slots: usize, seen: usize, form: ShardForm) -> Attention {
        let c = &self.config;
        let shape = Attention {
            heads: c.num_attention_heads,
            kv_heads: c.num_key_value_heads,
            head_dim: c.head_dim,
            slots,
            seen,
            tail: 0,
        };
        if form.history == HistoryForm::Host { shape } else { shape.with_history() }
    }

    fn attention_shard(&self, layer: usize, options: &PlanOptions, slots: usize) -> PlannedShard {
        let c = &self.config;
        let (h, d, q, kv) = (c.hidden_size, c.head_dim, c.q_size(), c.kv_size());
        let own = |name: &str| tensor(layer, &format!("self_attn.{name}"));
        let matrix = |name: &str, rows, cols| {
            let t = own(&format!("qkv_proj.{name}.weight"));
            chain_builder::matrix(options, name, "attention", t, 0, (rows, cols))
        };
        let conv = own("qkv_proj.conv_qk_grouped.weight");
        let grouped = MatrixPlan {
            taps: 2,
            quant: options.resolve_kernel("attention", q + kv, 2 * d, 2),
            ..chain_builder::matrix(options, "conv_grouped", "attention", conv, 0, (q + kv, 2 * d))
        };
        let matrices = vec![
            matrix("q_proj", q, h),
            matrix("k_proj", kv, h),
            matrix("v_proj_current", kv / 2, h),
            matrix("v_proj_delayed", kv / 2, h),
            grouped,
            chain_builder::matrix(options, "o_proj", "attention", own("o_proj.weight"), 0, (h, q)),
        ];
        let heads = ((q + kv) / d) as u64;
        let per_head = |name: &str, t: &str, every: (usize, usize)| VectorPlan {
            dims: vec![1, heads, 1, d as u64],
            every,
            ..VectorPlan::channels(name, own(t), q + kv)
        };
        let depthwise = "qkv_proj.conv_qk_depthwise.weight";
        let vectors = vec![
            per_head("depthwise_before", depthwise, (0, 2)),
            per_head("depthwise_now", depthwise, (1, 2)),
            per_head("depthwise_bias", "qkv_proj.conv_qk_depthwise.bias", (0, 1)),
            VectorPlan::bias("conv_grouped_bias", own("qkv_proj.conv_qk_grouped.bias"), q + kv),
            // The temperature, and the scale of the scores.
            VectorPlan {
                scale: (d as f32).sqrt().recip(),
                ..VectorPlan::channels("k_norm_weight", own("qk_norm.temp"), c.num_key_value_heads)
            },
        ];
        let mut shard =
            PlannedShard::new(attention_name(layer), ShardKind::Attention, Some(layer), matrices, vectors);
        shard.functions = attention_functions(options, slots);
        shard.cache_slots = Some(slots);
        shard
    }

    fn moe_shard(&self, layer: usize, pack: usize, packing: Packing, options: &PlanOptions) -> PlannedShard {
        let c = &self.config;
        let (h, f, r) = (c.hidden_size, c.moe_intermediate_size, c.router_hidden_size);
        let packs = c.num_experts / packing.per_package;
        let gate = |name: &str| tensor(layer, &format!("mlp.gate.{name}"));
        let (mut matrices, mut vectors) = (Vec::new(), Vec::new());
        if pack == 0 {
            for (name, t, dims) in [
                ("router_down", "down_proj.weight", (r, h)),
                ("router_fc1", "router_mlp.fc1.weight", (r, r)),
                ("router_fc2", "router_mlp.fc2.weight", (r, r)),
                ("router_logits", "router_mlp.out_proj.weight", (c.classes(), r)),
            ] {
                matrices.push(chain_builder::matrix(options, name, "router_mlp", gate(t), 0, dims));
            }
            if layer > 0 {
                vectors.push(VectorPlan::channels("router_state_scale", gate("router_states_scale"), r));
            }
            vectors.push(VectorPlan::channels("router_norm_weight", gate("router_mlp.norm.weight"), r));
            for (name, t) in [
                ("router_down", "down_proj.bias"),
                ("router_fc1", "router_mlp.fc1.bias"),
                ("router_fc2", "router_mlp.fc2.bias"),
            ] {
                vectors.push(VectorPlan::bias(format!("{name}_bias"), gate(t), r));
            }
            if packing.per_call == c.num_experts {
                let biases = gate("balancing_biases");
                vectors.push(VectorPlan::channels("balancing_biases", biases, c.classes()));
            }
        }
        let tensors = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"].map(|t| tensor(layer, t));
        let first = pack * packing.per_package;
        let kind = if pack == 0 { ShardKind::Moe } else { ShardKind::Experts };
        matrices.extend(chain_builder::expert_matrices(
            options,
            kind,
            first,
            packing,
            (h, f),
            (&tensors[0], &tensors[1]),
        ));
        let mut shard = PlannedShard::new(moe_name(layer, pack, packs), kind, Some(layer), matrices, vectors);
        let names: Vec<Option<String>> =
            units(pack, packing, c.num_experts).into_iter().map(|u| u.name).collect();
        shard.functions = functions(&names, &options.tokens);
        shard.experts = Some((first, packing.per_package));
        shard.experts_per_call = Some(packing.per_call);
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

    fn layer_steps(
        &self,
        layer: usize,
        packing: Packing,
        options: &PlanOptions,
        steps: &mut Vec<Step>,
    ) -> Result<()> {
        let c = &self.config;
        let normalize = |name: String| Step::Normalize {
            from: HIDDEN.into(),
            to: INPUT.into(),
            vector: format!("{name}.norm"),
            eps: c.rms_norm_eps,
        };
        steps.push(normalize(attention_name(layer)));
        let host = |input: fn(String) -> HostInput| InputBinding::Host(input(KIND.into()));
        let form = options.form_of(ShardKind::Attention);
        let mut kept = chain_builder::kept_cache(form);
        let mut carry = None;
        match form.history {
            HistoryForm::State => carry = Some(("carry", InputBinding::Host(HostInput::Carry(CCA_HISTORY)))),
            HistoryForm::Host => {
                let (heads, channels) = self.attention_shape(0, 0, form).history_shape();
                let newest = Kept::Newest {
                    rows: HISTORY_ROWS.into(),
                    place: KV_PLACE.into(),
                    count: CCA_HISTORY,
                    heads,
                    channels,
                };
                kept.insert(HISTORY.into(), newest);
            }
        }
        let mut inputs = named(vec![
            ("input", register(INPUT)),
            ("rope_cos", host(HostInput::RopeCos)),
            ("rope_sin", host(HostInput::RopeSin)),
            ("mask", InputBinding::Host(chain_builder::mask_input(form, KIND.into()))),
            ("kv_keep", host(HostInput::Keep)),
            ("kv_place", host(HostInput::Place)),
        ]);
        inputs.extend(carry.map(|(name, binding)| (name.to_string(), binding)));
        steps.push(Step::Run(Run {
            shard: attention_name(layer),
            others: Vec::new(),
            unit: None,
            when: None,
            inputs,
            outputs: stream_outputs(form, vec![("attended", output("attended"))]),
            kept,
            channels_last: form.io == IoForm::ChannelsLast,
        }));
        let residual = |branch: &str, vectors: String| Step::Residual {
            stream: HIDDEN.into(),
            branch: Some(branch.into()),
            vectors,
        };
        steps.push(residual("attended", attention_name(layer)));
        steps.push(normalize(moe_vectors(layer)));
        let packs = c.num_experts / packing.per_package;
        for pack in 0..packs {
            for unit in units(pack, packing, c.num_experts) {
                let rows = RowRange { start: unit.experts.start, count: unit.experts.len() };
                let form = options.form_of(if pack == 0 { ShardKind::Moe } else { ShardKind::Experts });
                let mut inputs = named(vec![("input", register(INPUT))]);
                if layer > 0 {
                    inputs.insert("router_state".into(), register("router_state"));
                }
                let mut outputs = vec![("router_state_out", output("router_state"))];
                let mut when = None;
                match unit.role {
                    Role::Whole => {
                        outputs.push(("experts_out", output("experts")));
                    }
                    Role::Router => {
                        outputs.push(("router_logits", output("router_logits")));
                    }
                    Role::Experts => {
                        when = Some(When { register: "routing".into(), rows });
                        inputs =
                            named(vec![("input", register(INPUT)), ("routing", rows_of("routing", rows))]);
                        let sum = OutputBinding { accumulate: true, ..output("experts") };
                        outputs = vec![("experts_out", sum)];
                    }
                }
                let shard = moe_name(layer, pack, packs);
                steps.push(Step::Run(Run {
                    shard,
                    others: Vec::new(),
                    unit: unit.name,
                    when,
                    inputs,
                    outputs: stream_outputs(form, outputs),
                    kept: BTreeMap::new(),
                    channels_last: form.io == IoForm::ChannelsLast,
                }));
                if unit.role == Role::Router {
                    let biases = tensor(layer, "mlp.gate.balancing_biases");
                    steps.push(Step::Route {
                        logits: "router_logits".into(),
                        weights: "routing".into(),
                        top_k: 1,
                        scale: None,
                        bias: Some(self.checkpoint.vector(&biases, c.classes())?),
                        over_all: true,
                    });
                    steps.push(Step::Zero { register: "experts".into(), channels: c.hidden_size });
                    if self.skip == ZayaSkip::Identity {
                        steps.push(Step::AddScaled {
                            register: "experts".into(),
                            from: INPUT.into(),
                            weights: "routing".into(),
                            row: c.num_experts,
                        });
                    }
                }
            }
        }
        steps.push(residual("experts", moe_vectors(layer)));
        Ok(())
    }

    fn chain(
        &self,
        options: &PlanOptions,
        context: usize,
        packing: Packing,
        head: &[PlannedShard],
    ) -> Result<Chain> {
        let c = &self.config;
        let mut steps = vec![Step::Residual { stream: HIDDEN.into(), branch: None, vectors: "input".into() }];
        for layer in 0..c.num_hidden_layers {
            self.layer_steps(layer, packing, options, &mut steps)?;
        }
        let model = ModelInfo {
            vocab_size: c.vocab_size,
            hidden_size: c.hidden_size,
            num_layers: c.num_hidden_layers,
            max_context: context,
            bos_token_id: c.bos_token_id,
            eos_token_ids: self.eos_token_ids.clone(),
            final_logit_softcapping: None,
        };
        let rope = Rope { width: c.rotary_dim, inv_freq: c.inv_freq() };
        let cache = Cache { slots: context.next_multiple_of(32), window: None };
        Ok(Chain {
            readings: named(vec![("zaya_skip", self.skip.name().to_string())]),
            ropes: named(vec![(KIND, rope)]),
            caches: named(vec![(KIND, cache)]),
            steps,
            head: OutputHead::steps(head, normalized(HIDDEN), options.form_of(ShardKind::Head)),
            ..chain_builder::chain(self.name(), &self.checkpoint, model, 1.0, options)
        })
    }

    fn lower_attention(
        &self,
        slots: usize,
        function: &ShardFunction,
        stored: &Stored,
        form: ShardForm,
    ) -> Result<BuiltFunction> {
        let c = &self.config;
        let shape = self.attention_shape(slots, function.context.unwrap_or(slots), form);
        let mut l = Lowering::new(stored, function.tokens, form);
        let x = l.stream_input("input", c.hidden_size)?;
        let at = l.position_inputs(&shape, c.rotary_dim)?;
        let old = l.history_input(&shape)?;
        let cache = l.read_cache(&shape)?;
        let all = l.compress(&x, &cache, &old, &shape)?;
        let q = l.rotate("q_rotated", &all.q, c.rotary_dim, c.head_dim, &at)?;
        let k = l.rotate("k_rotated", &all.k, c.rotary_dim, c.head_dim, &at)?;
        let tail = all.tail.as_ref();
        let (keys, values, mut kept) = l.update_cache(&cache, (&k, &all.v), tail, &at, &shape)?;
        kept.extend(all.rows);
        let context = l.attend(&q, &keys, &values, &at, &shape)?;
        let attended = l.project("attended", &context, "o_proj")?;
        l.finish_attention(&[&attended], &kept)
    }

    /// Logits over the classes, and the state for the next layer's router, from the normalized stream.
    fn route(&self, l: &mut Lowering<'_>, x: &Var, layer: usize) -> Result<(Var, Var)> {
        let c = &self.config;
        let norm = NormShape { axis: 1, eps: c.rms_norm_eps };
        let state = if layer == 0 {
            l.project_biased("router_state_out", x, "router_down")?
        } else {
            let before = l.stream_input("router_state", c.router_hidden_size)?;
            let own = l.project_biased("router_state_own", x, "router_down")?;
            let scale = l.vector("router_state_scale")?;
            let before = l.f().mul("router_state_before", &before, &scale)?;
            l.f().add("router_state_out", &own, &before)?
        };
        let mut n = l.rms_norm_weighted("router_norm", &state, norm)?;
        for name in ["router_fc1", "router_fc2"] {
            let wide = l.project_biased(name, &n, name)?;
            n = l.gelu_exact(&format!("{name}_gelu"), &wide)?;
        }
        Ok((l.project("router_logits", &n, "router_logits")?, state))
    }

    fn lower_moe(
        &self,
        layer: usize,
        unit: &ExpertUnit<Role>,
        tokens: TokenCount,
        stored: &Stored,
        form: ShardForm,
    ) -> Result<BuiltFunction> {
        let c = &self.config;
        let experts: Vec<usize> = unit.experts.clone().collect();
        let mut l = Lowering::new(stored, tokens, form);
        let x = l.stream_input("input", c.hidden_size)?;
        if unit.role == Role::Experts {
            let routing = l.stream_input("routing", experts.len())?;
            let sum = l.experts("experts_out", &x, &routing, &experts, Activation::Silu)?;
            return l.finish_streams(&[&sum]);
        }
        let (logits, state) = self.route(&mut l, &x, layer)?;
        if unit.role == Role::Router {
            return l.finish_streams(&[&logits, &state]);
        }
        let probabilities = l.f().softmax("router_probabilities", &logits, 1)?;
        let routing = l.top_1("routing_weight", &probabilities, "balancing_biases", c.classes())?;
        let name = match self.skip {
            ZayaSkip::Zero => "experts_out",
            ZayaSkip::Identity => "experts_sum",
        };
        let (sum, skip) = l.experts_and_skip(name, &x, &routing, &experts, Activation::Silu)?;
        let out = match self.skip {
            ZayaSkip::Zero => sum,
            ZayaSkip::Identity => {
                let kept = l.f().mul("skip", &x, &skip)?;
                l.f().add("experts_out", &sum, &kept)?
            }
        };
        l.finish_streams(&[&out, &state])
    }

    /// Vectors that scale and shift the stream and a branch where they meet: `(branch + b) g + (stream + b')
    /// g'`.
    fn residual(&self, tensors: &str, name: &str, out: &mut BTreeMap<String, Vec<f32>>) -> Result<()> {
        let h = self.config.hidden_size;
        let read = |part: &str| self.checkpoint.vector(&format!("{tensors}.{part}"), h);
        let (branch_scale, branch_bias) = (read("hidden_states_scale")?, read("hidden_states_bias")?);
        let (scale, bias) = (read("residual_scale")?, read("residual_bias")?);
        let shift: Vec<f32> = (0..h).map(|i| branch_bias[i] * branch_scale[i] + bias[i] * scale[i]).collect();
        if let Some(i) = shift.iter().position(|v| !v.is_finite()) {
            let what = format!("element {i} becomes {} in f32 when it is scaled", shift[i]);
            return Err(self.checkpoint.refuse(&format!("{tensors}.hidden_states_bias"), i as u64, &what));
        }
        out.insert(format!("{name}.scale"), scale);
        out.insert(format!("{name}.branch_scale"), branch_scale);
        out.insert(format!("{name}.shift"), shift);
        Ok(())
    }
}

/// The least probability p with which a class of this bias can be chosen before experts of those biases: its score p + bias
/// has to exceed each expert's bias, and their scores when they share 1 - p as evenly as that allows.
fn needed_probability(experts: &[f32], bias: f32) -> f32 {
    let n = experts.len() as f32;
    let best = experts.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shared = (1.0 - n * bias + experts.iter().sum::<f32>()) / (n + 1.0);
    (best - bias).max(shared).max(0.0)
}

/// Attention in int8-tensor where nothing is said and all else has fewer bits: that form of stateful shard was measured on the
/// ANE, palettized stateful models were reported to crash there (coremltools #2716), and it is a fortieth of the weights.
fn attention_kind(options: &PlanOptions) -> (PlanOptions, Option<String>) {
    let mut options = options.clone();
    if options.parts.attention.is_some() || options.quant.bits() >= 8 {
        return (options, None);
    }
    let kind = Quant::Int { granularity: Granularity::Tensor, asymmetric: false };
    options.defaults.attention = Some(kind);
    let fact = format!(
        "attention is {kind} where neither --attn-quant nor a search says otherwise: the kind that stateful shards were \
         measured with on the ANE"
    );
    (options, Some(fact))
}

/// Name of the vectors of the residual behind a layer's experts.
fn moe_vectors(layer: usize) -> String {
    format!("L{layer:02}.moe")
}

impl Family for Zaya {
    fn name(&self) -> &'static str {
        "zaya"
    }

    fn has_history(&self) -> bool {
        true
    }

    fn preset(&self) -> Preset {
        Preset {
            quant: Quant::lut(4),
            parts: PartKinds { head: Some(Quant::lut(6)), ..PartKinds::default() },
            reason: PRESET_REASON,
        }
    }

    fn plan(&self, options: &PlanOptions) -> Result<Plan> {
        options.check()?;
        options.check_forms(self.has_history())?;
        let c = &self.config;
        if options.parts.dense_mlp.is_some() {
            return Err(Error::usage("--mlp-quant: zaya has no MLP that every token meets"));
        }
        let (options, attention) = attention_kind(options);
        let options = &options;
        let context = options.context(c.max_position_embeddings)?;
        let packing = options.packing(c.num_experts)?;
        let packs = c.num_experts / packing.per_package;
        let slots = context.next_multiple_of(32);
        let mut shards = Vec::new();
        for layer in 0..c.num_hidden_layers {
            shards.push(self.attention_shard(layer, options, slots));
            shards.extend((0..packs).map(|pack| self.moe_shard(layer, pack, packing, options)));
        }
        let head = self.head().shards(options);
        let chain = self.chain(options, context, packing, &head)?;
        let skip = match self.skip {
            ZayaSkip::Identity => "its own input times the probability, as in the original implementation",
            ZayaSkip::Zero => "nothing, as in transformers",
        };
        let mut facts = vec![
            "the hidden state, its scales and its norms stay in f32 on the host: shards take it normalized as fp16 \
             and give back what is added to it; the head norms it itself, and a token above 16384 is divided by a power of two \
             before that"
                .into(),
            format!("a token that chooses the class behind the last expert gets {skip}"),
        ];
        facts.extend(attention);
        chain_builder::plan(self, options, shards, head, chain, facts)
    }

    fn lower(
        &self,
        shard: &PlannedShard,
        function: &ShardFunction,
        stored: &Stored,
    ) -> Result<BuiltFunction> {
        let wrong = || not_ours(shard);
        match (shard.kind, shard.layer) {
            (ShardKind::Attention, Some(_)) => {
                let slots = shard.cache_slots.ok_or_else(wrong)?;
                self.lower_attention(slots, function, stored, shard.form)
            }
            (ShardKind::Moe | ShardKind::Experts, Some(layer)) => {
                let (first, packing) = packing_of(shard)?;
                let pack = first.checked_div(packing.per_package).ok_or_else(wrong)?;
                let units = units(pack, packing, self.config.num_experts);
                let unit = units.iter().find(|u| u.name == function.unit).ok_or_else(wrong)?;
                self.lower_moe(layer, unit, function.tokens, stored, shard.form)
            }
            (ShardKind::Head, None) => self.head().lower(function.tokens, stored, shard.form),
            _ => Err(wrong()),
        }
    }

    fn checked_checkpoint(&self) -> &CheckedCheckpoint {
        &self.checkpoint
    }

    fn host_vectors(&self) -> Result<BTreeMap<String, Vec<f32>>> {
        let h = self.config.hidden_size;
        let mut out = BTreeMap::new();
        let scale = self.checkpoint.vector("input_hidden_states_scale", h)?;
        let bias = self.checkpoint.vector("input_hidden_states_bias", h)?;
        out.insert("input.shift".into(), bias.iter().zip(&scale).map(|(b, s)| b * s).collect());
        out.insert("input.scale".into(), scale);
        for layer in 0..self.config.num_hidden_layers {
            let attention = tensor(layer, "post_attention_residual_scale");
            self.residual(&attention, &attention_name(layer), &mut out)?;
            let norm = self.checkpoint.vector(&tensor(layer, "input_layernorm.weight"), h)?;
            out.insert(format!("{}.norm", attention_name(layer)), norm);
            let norm = self.checkpoint.vector(&tensor(layer, "post_attention_layernorm.weight"), h)?;
            out.insert(format!("{}.norm", moe_vectors(layer)), norm);
            let experts = tensor(layer, "post_mlp_residual_scale");
            self.residual(&experts, &moe_vectors(layer), &mut out)?;
        }
        Ok(out)
    }

    /// Tells if the two readings of the class behind the last expert can differ, and from which probability
    /// on.
    fn remarks(&self) -> Result<Vec<String>> {
        let c = &self.config;
        let mut reachable = Vec::new();
        let mut least = f32::INFINITY;
        let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
        for layer in 0..c.num_hidden_layers {
            let all = self.checkpoint.vector(&tensor(layer, "mlp.gate.balancing_biases"), c.classes())?;
            let (experts, skip) = all.split_at(c.num_experts);
            let needed = needed_probability(experts, skip[0]);
            if needed < 1.0 {
                reachable.push(layer.to_string());
                least = least.min(needed);
            }
            (low, high) = (low.min(skip[0]), high.max(skip[0]));
        }
        let layers = c.num_hidden_layers;
        Ok(vec![if reachable.is_empty() {
            format!(
                "the class behind the last expert (skip) can never be chosen: biases {low} to {high} in {layers} layers; \
                 --zaya-skip identity and zero are the same"
            )
        } else {
            format!(
                "the class behind the last expert (skip) can be chosen in {} of {layers} layers ({}), from a probability of \
                 {least:.4} on: biases {low} to {high}; --zaya-skip identity (the original implementation, the default) and zero \
                 (transformers, which also overwrites these biases with -1 when it loads them) differ there",
                reachable.len(),
                reachable.join(", ")
            )
        }])
    }

    fn embedding_tensor(&self) -> &str {
        "embed_tokens.weight"
    }

    fn summary(&self) -> BTreeMap<String, serde_json::Value> {
        let c = &self.config;
        let sizes = [
            ("hidden_size", c.hidden_size),
            ("num_hidden_layers", c.num_hidden_layers),
            ("num_attention_heads", c.num_attention_heads),
            ("num_key_value_heads", c.num_key_value_heads),
            ("head_dim", c.head_dim),
            ("num_experts", c.num_experts),
            ("num_experts_per_tok", 1),
            ("moe_intermediate_size", c.moe_intermediate_size),
            ("router_hidden_size", c.router_hidden_size),
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
            experts_per_token: 1,
            positions: c.max_position_embeddings,
            parameters: c.parameters(),
            expert_parameters: c.expert_parameters(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_class_needs_to_be_chosen() {
        // Without biases, more than an equal share.
        assert!((needed_probability(&[0.0; 3], 0.0) - 0.25).abs() < 1e-6);
        // As training starts: never.
        assert!(needed_probability(&[0.0, 0.01, -0.01], -1.0) >= 1.0);
        assert!((needed_probability(&[-0.1, -0.2], -1.0) - 0.9).abs() < 1e-6);
        // Two experts at 0.3 + 0.2, the class at 0.4 + 0.1.
        assert!((needed_probability(&[0.2, 0.2], 0.1) - 0.4).abs() < 1e-6);
        // Always.
        assert_eq!(needed_probability(&[0.0, 0.1], 2.0), 0.0);
    }
}
