//! Shards of ZAYA: the contents of each package, its program, and the host's steps between packages.

use super::Zaya;
use super::lowering::{
    ATTENTION_NORM, ATTENTION_RESIDUAL, BRANCH_BIAS, BRANCH_SCALE, MOE_NORM, MOE_RESIDUAL, MoeRole,
    ROUTER_STATE, STREAM_BIAS, STREAM_SCALE, added_output, state_output, units,
};
use crate::form::{HistoryForm, IoForm, LAYERS_PER_SHARD, ShardForm};
use crate::lower::{CCA_HISTORY, HISTORY, HISTORY_ROWS, KV_PLACE, Stored};
use crate::models::CheckedCheckpoint;
use crate::models::chain_builder::{
    self, LayerRun, OutputHead, attention_functions, functions, layer_groups, named, normalized, not_ours,
    output, packing_of, register, rows_of, runs_of_layers, stream_outputs, tensor,
};
use crate::models::{Family, Preset, Sizes};
use crate::plan::{MatrixPlan, Packing, PartKinds, Plan, PlanOptions, PlannedShard, VectorPlan, layer_scope};
use crate::quant::{Granularity, Quant};
use crate::variants::ZayaSkip;
use crate::{Error, Result};
use anemoe_bundle::{
    Cache, Chain, HostInput, IndexBits, InputBinding, IntBits, Kept, ModelInfo, OutputBinding, Rope,
    RowRange, Run, ShardFunction, ShardKind, Step, When,
};
use anemoe_mlpackage::mil::builder::BuiltFunction;
use std::collections::BTreeMap;
use std::ops::Range;

/// Reason of the preset of kinds, measured by benches/held_out.py.
const PRESET_REASON: &str = "it lowers the mean divergence of small-zaya from 0.0306 to 0.0196 nats over 16 prompts, for 16 % more bytes a token";
/// Name of the only rope and the only cache: all layers are alike.
const KIND: &str = "hybrid";
/// Register with the stream.
const HIDDEN: &str = "hidden";
/// Register with the normalized stream.
const INPUT: &str = "input";
/// Register with what the layers of a package add to the stream.
const ADDED: &str = "added";

fn attention_name(layer: usize) -> String {
    format!("L{layer:02}.attn")
}

fn moe_name(layer: usize, pack: usize, packs: usize) -> String {
    match packs {
        1 => format!("L{layer:02}.moe"),
        _ => format!("L{layer:02}.moe.p{pack}of{packs}"),
    }
}

/// Names the package of whole layers, and the host's vectors of the residual behind the package.
fn layers_name(layers: &Range<usize>) -> String {
    match layers.len() {
        1 => format!("L{:02}.attn.moe", layers.start),
        _ => format!("L{:02}to{:02}.attn.moe", layers.start, layers.end - 1),
    }
}

impl Zaya {
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
            // Keys are scaled by the temperature, and by the 1/sqrt(head_dim) of the scores.
            VectorPlan {
                scale: (d as f32).sqrt().recip(),
                ..VectorPlan::channels("k_norm_weight", own("qk_norm.temp"), c.num_key_value_heads)
            },
        ];
        let mut shard =
            PlannedShard::new(attention_name(layer), ShardKind::Attention, Some(layer), matrices, vectors);
        shard.functions = attention_functions(options, ShardKind::Attention, slots, &[None], &None);
        shard.cache_slots = Some(slots);
        shard
    }

    /// Plans a pack of experts, whose matrices have the layout of the sort `form_of`, or of the shard's own sort.
    fn moe_shard(
        &self,
        layer: usize,
        pack: usize,
        packing: Packing,
        options: &PlanOptions,
        form_of: Option<ShardKind>,
    ) -> PlannedShard {
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
            form_of.unwrap_or(kind),
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
        shard.triangle = (pack == 0 && packing.per_call == c.num_experts).then(|| c.classes());
        shard
    }

    /// Plans a package of whole layers: the matrices and vectors of their parts, with norms and residuals.
    fn layers_shard(
        &self,
        layers: &Range<usize>,
        packing: Packing,
        options: &PlanOptions,
        slots: usize,
    ) -> PlannedShard {
        let h = self.config.hidden_size;
        let (mut matrices, mut vectors) = (Vec::new(), Vec::new());
        for (i, layer) in layers.clone().enumerate() {
            let scoped = |name: &str| format!("{}{name}", layer_scope(i));
            let attention = self.attention_shard(layer, options, slots);
            let moe = self.moe_shard(layer, 0, packing, options, Some(ShardKind::Layers));
            let mut own = attention.vectors;
            own.extend(moe.vectors);
            let halves = [
                (ATTENTION_NORM, "input_layernorm", ATTENTION_RESIDUAL, "post_attention_residual_scale"),
                (MOE_NORM, "post_attention_layernorm", MOE_RESIDUAL, "post_mlp_residual_scale"),
            ];
            for (norm, weight, residual, scales) in halves {
                let t = tensor(layer, &format!("{weight}.weight"));
                own.push(VectorPlan::channels(format!("{norm}_weight"), t, h));
                let mut parts = vec![(BRANCH_SCALE, "hidden_states_scale"), (STREAM_SCALE, "residual_scale")];
                // Behind the last branch the host computes the stream, and the package needs no biases.
                if layer + 1 < layers.end || residual == ATTENTION_RESIDUAL {
                    parts.extend([(BRANCH_BIAS, "hidden_states_bias"), (STREAM_BIAS, "residual_bias")]);
                }
                own.extend(parts.into_iter().map(|(name, part)| {
                    let t = tensor(layer, &format!("{scales}.{part}"));
                    VectorPlan::channels(format!("{residual}_{name}"), t, h)
                }));
            }
            matrices.extend(
                attention
                    .matrices
                    .into_iter()
                    .chain(moe.matrices)
                    .map(|m| MatrixPlan { name: scoped(&m.name), ..m }),
            );
            vectors.extend(own.into_iter().map(|v| VectorPlan { name: scoped(&v.name), ..v }));
        }
        let first = Some(layers.start);
        let mut shard = PlannedShard::new(layers_name(layers), ShardKind::Layers, first, matrices, vectors);
        shard.last_layer = (layers.len() > 1).then(|| layers.end - 1);
        shard.functions = attention_functions(options, ShardKind::Layers, slots, &[None], &None);
        shard.cache_slots = Some(slots);
        shard.experts = Some((0, packing.per_package));
        shard.experts_per_call = Some(packing.per_call);
        shard.triangle = Some(self.config.classes());
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

    /// Binds the inputs of attention that follow from positions, for all layers of a package.
    fn position_inputs(&self, form: ShardForm) -> BTreeMap<String, InputBinding> {
        let host = |input: fn(String) -> HostInput| InputBinding::Host(input(KIND.into()));
        let mut inputs = named(vec![
            ("rope_cos", host(HostInput::RopeCos)),
            ("rope_sin", host(HostInput::RopeSin)),
            ("mask", InputBinding::Host(chain_builder::mask_input(form, KIND.into()))),
            ("kv_keep", InputBinding::Host(chain_builder::keep_input(form, KIND.into()))),
            ("kv_place", InputBinding::Host(chain_builder::place_input(form, KIND.into()))),
        ]);
        if form.history == HistoryForm::State {
            inputs.insert("carry".into(), InputBinding::Host(HostInput::Carry(CCA_HISTORY)));
        }
        inputs
    }

    /// Binds the rows that the host keeps of a layer whose names begin with `scope`.
    fn kept_rows(&self, form: ShardForm, scope: &str) -> BTreeMap<String, Kept> {
        let mut kept = chain_builder::kept_cache(form, scope);
        if form.history == HistoryForm::Host {
            let (heads, channels) = self.attention_shape(0, 0, form).history_shape();
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

    /// Adds the steps of a package of whole layers: its run, then the residual of the host's own stream.
    fn joined_steps(&self, layers: &Range<usize>, options: &PlanOptions, steps: &mut Vec<Step>) {
        let form = options.form_of(ShardKind::Layers);
        let (shard, n) = (layers_name(layers), layers.len());
        let mut inputs = self.position_inputs(form);
        inputs.insert("hidden".into(), register(HIDDEN));
        if layers.start > 0 {
            inputs.insert(ROUTER_STATE.into(), register(ROUTER_STATE));
        }
        let (added, state) = (added_output(n), state_output(n));
        let outputs = vec![(added.as_str(), output(ADDED)), (state.as_str(), output(ROUTER_STATE))];
        steps.push(Step::Run(Run {
            shard: shard.clone(),
            others: Vec::new(),
            unit: None,
            when: None,
            inputs,
            outputs: stream_outputs(form, outputs),
            kept: (0..n).flat_map(|i| self.kept_rows(form, &layer_scope(i))).collect(),
            channels_last: form.io == IoForm::ChannelsLast,
        }));
        steps.push(Step::Residual { stream: HIDDEN.into(), branch: Some(ADDED.into()), vectors: shard });
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
        let form = options.form_of(ShardKind::Attention);
        let mut inputs = self.position_inputs(form);
        inputs.insert("input".into(), register(INPUT));
        steps.push(Step::Run(Run {
            shard: attention_name(layer),
            others: Vec::new(),
            unit: None,
            when: None,
            inputs,
            outputs: stream_outputs(form, vec![("attended", output("attended"))]),
            kept: self.kept_rows(form, ""),
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
                    inputs.insert(ROUTER_STATE.into(), register(ROUTER_STATE));
                }
                let mut outputs = vec![("router_state_out", output(ROUTER_STATE))];
                let mut when = None;
                match unit.role {
                    MoeRole::Whole => {
                        outputs.push(("experts_out", output("experts")));
                    }
                    MoeRole::Router => {
                        outputs.push(("router_logits", output("router_logits")));
                    }
                    MoeRole::Experts => {
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
                if unit.role == MoeRole::Router {
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
        joined: &[Range<usize>],
        head: &[PlannedShard],
    ) -> Result<Chain> {
        let c = &self.config;
        let mut steps = vec![Step::Residual { stream: HIDDEN.into(), branch: None, vectors: "input".into() }];
        for layers in runs_of_layers(c.num_hidden_layers, joined) {
            match layers {
                LayerRun::Joined(layers) => self.joined_steps(&layers, options, &mut steps),
                LayerRun::Parts(layer) => self.layer_steps(layer, packing, options, &mut steps)?,
            }
        }
        let model = ModelInfo {
            vocab_size: c.vocab_size,
            hidden_size: c.hidden_size,
            num_layers: c.num_hidden_layers,
            num_experts: Some(c.num_experts),
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

    /// Plans with each range of `joined` layers in a package of whole layers, all other layers in parts.
    fn plan_joining(&self, options: &PlanOptions, joined: &[Range<usize>]) -> Result<Plan> {
        options.check()?;
        options.check_forms(self.has_history())?;
        let c = &self.config;
        if options.parts.dense_mlp.is_some() {
            return Err(Error::usage("--mlp-quant: zaya has no MLP that every token meets"));
        }
        let (options, attention) = with_attention_kind(options);
        let options = &options;
        let context = options.context(c.max_position_embeddings)?;
        let packing = options.packing(c.num_experts)?;
        let packs = c.num_experts / packing.per_package;
        let slots = context.next_multiple_of(32);
        let mut shards = Vec::new();
        if options.layers_per_shard().is_some() && packing.per_call != c.num_experts {
            return Err(Error::usage(format!(
                "{LAYERS_PER_SHARD}: with {} of {} experts in a call the host chooses experts inside of each layer: give \
                 --experts-per-shard {}",
                packing.per_call, c.num_experts, c.num_experts
            )));
        }
        for layers in runs_of_layers(c.num_hidden_layers, joined) {
            match layers {
                LayerRun::Joined(layers) => {
                    shards.push(self.layers_shard(&layers, packing, options, slots));
                }
                LayerRun::Parts(layer) => {
                    shards.push(self.attention_shard(layer, options, slots));
                    shards.extend((0..packs).map(|pack| self.moe_shard(layer, pack, packing, options, None)));
                }
            }
        }
        let head = self.head().shards(options);
        let chain = self.chain(options, context, packing, joined, &head)?;
        let skip = match self.skip {
            ZayaSkip::Identity => "its own input times the probability, as in the original implementation",
            ZayaSkip::Zero => "nothing, as in transformers",
        };
        let stream = match options.layers_per_shard() {
            None => {
                "the hidden state, its scales and its norms stay in f32 on the host: shards take it normalized as fp16 and give \
                 back what is added to it; the head norms it itself, and a token above 16384 is divided by a power of two before \
                 that"
            }
            Some(_) => {
                "the hidden state stays in f32 on the host between packages: shards take it as fp16, so that none of its values may \
                 reach 65504 (`anemoe trace` shows the largest), have it in fp16 from layer to layer, and give back what they add"
            }
        };
        let mut facts =
            vec![stream.into(), format!("a token that chooses the class behind the last expert gets {skip}")];
        facts.extend(attention);
        chain_builder::plan(self, options, shards, head, chain, facts)
    }

    /// Adds the vectors of a residual, `(branch + b) g + (stream + b') g'`, to `out`: `scale` is g', `branch_scale`
    /// is g, and `shift` is b g + b' g'.
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

/// Computes the least probability p with which a class of this bias can be chosen before experts of those biases. The
/// class's score p + bias has to exceed each expert's bias, and the experts' scores when they share 1 - p as evenly
/// as possible.
fn needed_probability(experts: &[f32], bias: f32) -> f32 {
    let n = experts.len() as f32;
    let best = experts.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shared = (1.0 - n * bias + experts.iter().sum::<f32>()) / (n + 1.0);
    (best - bias).max(shared).max(0.0)
}

/// Sets attention to int8-tensor where the options name no kind for it and `--quant` has fewer than 8 bits; returns
/// the options and a remark. Stateful shards in INT8 were measured on the ANE, palettized stateful models were
/// reported to crash there (coremltools #2716), and attention is a fortieth of the weights.
fn with_attention_kind(options: &PlanOptions) -> (PlanOptions, Option<String>) {
    let mut options = options.clone();
    if options.parts.attention.is_some() || options.quant.bits() >= 8 {
        return (options, None);
    }
    let kind = Quant::int(IntBits::Eight, Granularity::Tensor);
    options.defaults.attention = Some(kind);
    let fact = format!(
        "attention is {kind} where neither --attn-quant nor a search says otherwise: stateful shards were measured in \
         INT8 on the ANE, of which some palettized ones crashed"
    );
    (options, Some(fact))
}

/// Computes the vectors of the residual behind a package of whole layers: the layers' residuals one after the other,
/// without the branches, which the package has scaled and added up.
fn joined_residual(
    layers: &Range<usize>,
    hidden: usize,
    all: &BTreeMap<String, Vec<f32>>,
) -> BTreeMap<String, Vec<f32>> {
    let (mut scale, mut shift) = (vec![1f32; hidden], vec![0f32; hidden]);
    for name in layers.clone().flat_map(|layer| [attention_name(layer), moe_vectors(layer)]) {
        let of = |part: &str| all.get(&format!("{name}.{part}")).into_iter().flatten();
        for (((scale, shift), s), t) in scale.iter_mut().zip(&mut shift).zip(of("scale")).zip(of("shift")) {
            (*scale, *shift) = (*scale * s, *shift * s + t);
        }
    }
    let name = layers_name(layers);
    let vectors = [("scale", scale), ("branch_scale", vec![1.0; hidden]), ("shift", shift)];
    vectors.into_iter().map(|(part, values)| (format!("{name}.{part}"), values)).collect()
}

/// Names the vectors of the residual behind a layer's experts: `L00.moe`.
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
            quant: Quant::lut(IndexBits::Four),
            parts: PartKinds { head: Some(Quant::lut(IndexBits::Six)), ..PartKinds::default() },
            reason: PRESET_REASON,
        }
    }

    fn plan(&self, options: &PlanOptions) -> Result<Plan> {
        self.plan_joining(options, &layer_groups(self.config.num_hidden_layers, options))
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
            (ShardKind::Layers, Some(_)) => {
                let layers = shard.joined_layers().ok_or_else(wrong)?;
                let slots = shard.cache_slots.ok_or_else(wrong)?;
                self.lower_layers(layers, slots, function, stored, shard.form)
            }
            (ShardKind::Head, None) => self.head().lower(function.tokens, stored, shard.form),
            _ => Err(wrong()),
        }
    }

    fn checked_checkpoint(&self) -> &CheckedCheckpoint {
        &self.checkpoint
    }

    fn host_vectors(&self, options: &PlanOptions) -> Result<BTreeMap<String, Vec<f32>>> {
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
        for layers in layer_groups(self.config.num_hidden_layers, options) {
            let vectors = joined_residual(&layers, h, &out);
            out.extend(vectors);
        }
        Ok(out)
    }

    /// Explains whether the two readings of the class behind the last expert can differ, and from which probability
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
        // Never, with the biases that training starts with.
        assert!(needed_probability(&[0.0, 0.01, -0.01], -1.0) >= 1.0);
        assert!((needed_probability(&[-0.1, -0.2], -1.0) - 0.9).abs() < 1e-6);
        // Two experts at 0.3 + 0.2, the class at 0.4 + 0.1.
        assert!((needed_probability(&[0.2, 0.2], 0.1) - 0.4).abs() < 1e-6);
        // Always.
        assert_eq!(needed_probability(&[0.0, 0.1], 2.0), 0.0);
    }
}
