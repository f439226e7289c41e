//! Gemma 4 MoE as shards: what goes into which package, and the program of each.

use super::Gemma4;
use super::table::tensor_table;
use crate::checkpoint::SideFile;
use crate::family::Family;
use crate::lower::{Attention, HeadNorm, Lowering, RmsNorm, Stored};
use crate::models::{Part, TensorRow};
use crate::plan::{
    MAX_HEAD_WEIGHTS, MatrixPlan, Packing, Plan, PlanOptions, PlannedShard, Totals, VectorPlan,
};
use crate::quant::MatrixQuant;
use crate::{Error, Result};
use anemoe_bundle::{
    Cache, Chain, Embedding, FORMAT, HostInput, InputBinding, ModelInfo, OutputBinding, Rope, RowRange, Run,
    ShardFunction, ShardKind, Step, Storage, TokenCount, When,
};
use anemoe_mlpackage::mil::builder::BuiltFunction;
use std::collections::BTreeMap;
use std::ops::Range;

/// Head slices run on at most this many tokens at once: a slice of 65536 logits by 64 tokens is 8 MB of output that
/// prefill never asks for.
const MAX_HEAD_TOKENS: usize = 16;
/// Name of the function that joins a layer's branches, where that is not part of an expert function.
const COMBINE: &str = "combine";

/// A layer's kind, which names its rope and its cache in the chain.
fn kind_name(full: bool) -> &'static str {
    if full { "full" } else { "sliding" }
}

/// Which functions a pack has: name and unit without the token count, its experts, and whether it ends the layer.
struct Unit {
    unit: Option<String>,
    experts: Range<usize>,
    combine: bool,
}

fn units(first: usize, packing: Packing, last: bool) -> Vec<Unit> {
    if packing.per_call == packing.per_package {
        return vec![Unit { unit: None, experts: first..first + packing.per_package, combine: last }];
    }
    let mut units: Vec<Unit> = (first..first + packing.per_package)
        .step_by(packing.per_call)
        .map(|e| Unit { unit: Some(format!("e{e:03}")), experts: e..e + packing.per_call, combine: false })
        .collect();
    if last {
        units.push(Unit { unit: Some(COMBINE.into()), experts: 0..0, combine: true });
    }
    units
}

/// Names of functions: `main` for the only one of a package, else `t4`, `e003_t4`, `t1to4`.
fn functions(units: &[Option<String>], tokens: &[TokenCount]) -> Vec<ShardFunction> {
    let single = units.len() * tokens.len() == 1;
    let mut functions = Vec::new();
    for unit in units {
        for &t in tokens {
            let count = if t.min == t.max { format!("t{}", t.max) } else { format!("t{}to{}", t.min, t.max) };
            let name = match unit {
                _ if single => "main".to_string(),
                None => count,
                Some(unit) => format!("{unit}_{count}"),
            };
            functions.push(ShardFunction { name, unit: unit.clone(), tokens: t });
        }
    }
    functions
}

fn register(name: &str) -> InputBinding {
    InputBinding::Register { name: name.into(), rows: None }
}

fn output(register: &str) -> OutputBinding {
    OutputBinding { register: register.into(), rows: None, accumulate: false }
}

fn named<T>(pairs: Vec<(&str, T)>) -> BTreeMap<String, T> {
    pairs.into_iter().map(|(k, v)| (k.to_string(), v)).collect()
}

/// Tensor of layer `i`.
fn tensor(i: usize, name: &str) -> String {
    format!("layers.{i}.{name}")
}

/// Chooses the compression of matrices.
struct Quantizer<'a> {
    options: &'a PlanOptions,
}

impl Quantizer<'_> {
    fn matrix(
        &self,
        name: &str,
        part: &str,
        tensor: String,
        offset: u64,
        dims: (usize, usize),
    ) -> MatrixPlan {
        let (rows, cols) = dims;
        let quant = self.options.resolve(part, rows, cols);
        MatrixPlan { name: format!("{name}_weight"), part: part.into(), tensor, offset, rows, cols, quant }
    }
}

impl Gemma4 {
    fn attention_shape(&self, layer: usize, options: &PlanOptions, context: usize) -> Attention {
        let c = &self.config;
        let slots = match c.is_full(layer) {
            true => context,
            // The slots that a call of the most tokens overwrites must not be seen by its first token.
            false => (c.sliding_window + options.max_tokens() - 1).min(context),
        };
        Attention {
            heads: c.num_attention_heads,
            kv_heads: c.kv_heads(layer),
            head_dim: c.head_dim(layer),
            slots: slots.next_multiple_of(32),
        }
    }

    fn attention_shard(&self, layer: usize, options: &PlanOptions, context: usize) -> PlannedShard {
        let c = &self.config;
        let (h, d) = (c.hidden_size, c.head_dim(layer));
        let (q, kv) = (c.num_attention_heads * d, c.kv_heads(layer) * d);
        let quantizer = Quantizer { options };
        let matrix = |name: &str, rows, cols| {
            let t = tensor(layer, &format!("self_attn.{name}.weight"));
            quantizer.matrix(name, "attention", t, 0, (rows, cols))
        };
        let mut matrices = vec![matrix("q_proj", q, h), matrix("k_proj", kv, h)];
        if !c.k_eq_v(layer) {
            matrices.push(matrix("v_proj", kv, h));
        }
        matrices.push(matrix("o_proj", h, q));
        let router = tensor(layer, "router.proj.weight");
        matrices.push(quantizer.matrix("router_logits", "router", router, 0, (c.num_experts, h)));
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
        let name = format!("L{layer:02}.attn");
        let mut shard = PlannedShard::new(name, ShardKind::Attention, Some(layer), matrices, vectors);
        shard.functions = functions(&[None], &options.tokens);
        shard.cache_slots = Some(self.attention_shape(layer, options, context).slots);
        shard
    }

    fn expert_shard(
        &self,
        layer: usize,
        pack: usize,
        packing: Packing,
        options: &PlanOptions,
    ) -> PlannedShard {
        let c = &self.config;
        let (h, f) = (c.hidden_size, c.moe_intermediate_size);
        let packs = c.num_experts / packing.per_package;
        let last = pack + 1 == packs;
        let first = pack * packing.per_package;
        let quantizer = Quantizer { options };
        let mut matrices = Vec::new();
        for e in first..first + packing.per_package {
            let expert = |name: &str, t: &str, rows: usize, cols: usize| {
                let offset = (e * rows * cols) as u64;
                let name = format!("expert_{e:03}_{name}");
                quantizer.matrix(&name, "experts", tensor(layer, t), offset, (rows, cols))
            };
            matrices.push(expert("gate_up", "experts.gate_up_proj", 2 * f, h));
            matrices.push(expert("down", "experts.down_proj", h, f));
        }
        let mut vectors = Vec::new();
        if last {
            let i = c.intermediate_size;
            for (name, rows, cols) in [("gate_proj", i, h), ("up_proj", i, h), ("down_proj", h, i)] {
                let t = tensor(layer, &format!("mlp.{name}.weight"));
                matrices.push(quantizer.matrix(name, "dense_mlp", t, 0, (rows, cols)));
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
        let kind = if last { ShardKind::ExpertsCombine } else { ShardKind::Experts };
        let name = format!("L{layer:02}.ffn.p{pack}of{packs}");
        let mut shard = PlannedShard::new(name, kind, Some(layer), matrices, vectors);
        let names: Vec<Option<String>> = units(first, packing, last).into_iter().map(|u| u.unit).collect();
        shard.functions = functions(&names, &options.tokens);
        shard.experts = Some((first, packing.per_package));
        shard.experts_per_call = Some(packing.per_call);
        shard
    }

    fn head_shards(&self, options: &PlanOptions) -> Vec<PlannedShard> {
        let c = &self.config;
        let h = c.hidden_size;
        let limit = MAX_HEAD_WEIGHTS.min(options.max_shard_mb << 19).max(32 * h as u64);
        let slices = (c.vocab_size as u64 * h as u64).div_ceil(limit).max(1) as usize;
        let rows = c.vocab_size.div_ceil(slices).next_multiple_of(32);
        let starts: Vec<usize> = (0..c.vocab_size).step_by(rows).collect();
        let mut tokens: Vec<TokenCount> = options
            .tokens
            .iter()
            .map(|t| TokenCount {
                min: t.min,
                max: if t.min < t.max { t.max.min(MAX_HEAD_TOKENS) } else { t.max },
            })
            .filter(|t| t.max <= MAX_HEAD_TOKENS)
            .collect();
        tokens.dedup();
        let quantizer = Quantizer { options };
        let shard = |(i, &start): (usize, &usize)| {
            let n = rows.min(c.vocab_size - start);
            let offset = start as u64 * h as u64;
            let matrix = quantizer.matrix("logits", "head", "embed_tokens.weight".into(), offset, (n, h));
            let vectors = vec![VectorPlan::channels("final_norm_weight", "norm.weight", h)];
            let name = format!("head.{i}of{}", starts.len());
            let mut shard = PlannedShard::new(name, ShardKind::Head, None, vec![matrix], vectors);
            shard.functions = functions(&[None], &tokens);
            shard.vocab_rows = Some((start, n));
            shard
        };
        starts.iter().enumerate().map(shard).collect()
    }

    fn attention_step(&self, layer: usize) -> Step {
        let kind = kind_name(self.config.is_full(layer)).to_string();
        Step::Run(Run {
            shard: format!("L{layer:02}.attn"),
            unit: None,
            when: None,
            inputs: named(vec![
                ("hidden", register("hidden")),
                ("rope_cos", InputBinding::Host(HostInput::RopeCos(kind.clone()))),
                ("rope_sin", InputBinding::Host(HostInput::RopeSin(kind.clone()))),
                ("mask", InputBinding::Host(HostInput::Mask(kind.clone()))),
                ("kv_keep", InputBinding::Host(HostInput::Keep(kind.clone()))),
                ("kv_place", InputBinding::Host(HostInput::Place(kind))),
            ]),
            outputs: named(vec![
                ("attended", output("hidden")),
                ("expert_input", output("expert_input")),
                ("router_logits", output("router_logits")),
            ]),
        })
    }

    fn expert_steps(
        &self,
        layer: usize,
        per_expert_scale: Vec<f32>,
        packing: Packing,
        steps: &mut Vec<Step>,
    ) {
        let c = &self.config;
        steps.push(Step::Route {
            logits: "router_logits".into(),
            weights: "routing".into(),
            top_k: c.top_k_experts,
            scale: Some(per_expert_scale),
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
                    let routing = InputBinding::Register { name: "routing".into(), rows: Some(rows) };
                    inputs.insert("routing".into(), routing);
                }
                let outputs = if unit.combine {
                    inputs.insert("hidden".into(), register("hidden"));
                    inputs.insert("experts_in".into(), register("experts"));
                    named(vec![("hidden_out", output("hidden"))])
                } else {
                    named(vec![("experts_out", OutputBinding { accumulate: true, ..output("experts") })])
                };
                let when = (!unit.combine).then(|| When { register: "routing".into(), rows });
                let shard = format!("L{layer:02}.ffn.p{pack}of{packs}");
                steps.push(Step::Run(Run { shard, unit: unit.unit, when, inputs, outputs }));
            }
        }
    }

    fn chain(
        &self,
        options: &PlanOptions,
        context: usize,
        packing: Packing,
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
            steps.push(self.attention_step(layer));
            let mut scale = vec![0.0; c.num_experts];
            self.read(&tensor(layer, "router.per_expert_scale"), 0..c.num_experts as u64, &mut scale)?;
            self.expert_steps(layer, scale, packing, &mut steps);
        }
        let head_step = |shard: &PlannedShard| {
            let rows = shard.vocab_rows.map(|(start, count)| RowRange { start, count });
            Step::Run(Run {
                shard: shard.name.clone(),
                unit: None,
                when: None,
                inputs: named(vec![("hidden", register("hidden"))]),
                outputs: named(vec![("logits", OutputBinding { rows, ..output("logits") })]),
            })
        };
        Ok(Chain {
            format: FORMAT,
            generator: concat!("anemoe ", env!("CARGO_PKG_VERSION")).into(),
            family: self.name().into(),
            source: self.source_name(),
            model: ModelInfo {
                vocab_size: c.vocab_size,
                hidden_size: c.hidden_size,
                num_layers: c.num_hidden_layers,
                max_context: context,
                bos_token_id: c.bos_token_id,
                eos_token_ids: self.eos_token_ids.clone(),
                final_logit_softcapping: c.final_logit_softcapping,
            },
            importance: None,
            auto: None,
            embedding: Embedding {
                file: "embed.bin".into(),
                rows: c.vocab_size,
                cols: c.hidden_size,
                scale: (c.hidden_size as f32).sqrt(),
                storage: Storage::Fp16,
                sha256: String::new(),
            },
            tokens: options.tokens.clone(),
            ropes,
            caches,
            steps,
            head: head.iter().map(head_step).collect(),
            shards: Vec::new(),
        })
    }

    fn lower_attention(
        &self,
        layer: usize,
        slots: usize,
        tokens: TokenCount,
        stored: &Stored,
    ) -> Result<BuiltFunction> {
        let c = &self.config;
        let shape = Attention {
            heads: c.num_attention_heads,
            kv_heads: c.kv_heads(layer),
            head_dim: c.head_dim(layer),
            slots,
        };
        let (h, d) = (c.hidden_size as u64, shape.head_dim);
        let norm = RmsNorm { axis: 1, eps: c.rms_norm_eps };
        let head_norm = RmsNorm { axis: 3, eps: c.rms_norm_eps };
        let mut l = Lowering::new(stored, tokens);
        let hidden = l.input("hidden", &[1, h, 1, 0], Some(3))?;
        let at = l.position_inputs(&shape)?;

        let x = l.rms_norm_weighted("input_norm", &hidden, norm)?;
        let q = l.project("q_proj", &x)?;
        let q = l.to_heads("q", &q, shape.heads, d)?;
        let q = l.head_norm("q_norm", &q, HeadNorm::Weighted(head_norm))?;
        let q = l.rotate("q_rotated", &q, &at)?;
        let k = l.project("k_proj", &x)?;
        let k = l.to_heads("k", &k, shape.kv_heads, d)?;
        // Where a layer has no v_proj, V is the output of k_proj before K's norm and rotation.
        let v = match c.k_eq_v(layer) {
            true => k.clone(),
            false => {
                let v = l.project("v_proj", &x)?;
                l.to_heads("v", &v, shape.kv_heads, d)?
            }
        };
        let k = l.head_norm("k_norm", &k, HeadNorm::Weighted(head_norm))?;
        let k = l.rotate("k_rotated", &k, &at)?;
        let v = l.head_norm("v_norm", &v, HeadNorm::Unit(head_norm))?;
        let (keys, values) = l.update_cache(&k, &v, &at, &shape)?;
        let context = l.attend(&q, &keys, &values, &at, &shape)?;
        let o = l.project("o_proj", &context)?;
        let o = l.rms_norm_weighted("post_attention_norm", &o, norm)?;
        let attended = l.f().add("attended", &hidden, &o)?;

        // The router and the experts read the same normalized stream, each with its own weight.
        let unit = l.rms_norm("stream_unit", &attended, norm)?;
        let router_input = l.scale_by("router_input", &unit)?;
        let router_logits = l.project("router_logits", &router_input)?;
        let expert_input = l.scale_by("expert_input", &unit)?;
        Ok(l.finish(&[&attended, &expert_input, &router_logits])?)
    }

    fn lower_experts(&self, unit: &Unit, tokens: TokenCount, stored: &Stored) -> Result<BuiltFunction> {
        let c = &self.config;
        let h = c.hidden_size as u64;
        let experts: Vec<usize> = unit.experts.clone().collect();
        let mut l = Lowering::new(stored, tokens);
        let mut sum = None;
        if !experts.is_empty() {
            let y = l.input("expert_input", &[1, h, 1, 0], Some(3))?;
            let routing = l.input("routing", &[1, experts.len() as u64, 1, 0], Some(3))?;
            let name = if unit.combine { "experts_own" } else { "experts_out" };
            sum = Some(l.experts(name, &y, &routing, &experts)?);
        }
        if !unit.combine {
            let sum = sum.ok_or_else(|| Error::Usage("a pack without experts".into()))?;
            return Ok(l.finish(&[&sum])?);
        }
        let norm = RmsNorm { axis: 1, eps: c.rms_norm_eps };
        let hidden = l.input("hidden", &[1, h, 1, 0], Some(3))?;
        let others = l.input("experts_in", &[1, h, 1, 0], Some(3))?;
        let experts = match sum {
            Some(own) => l.f().add("experts_all", &others, &own)?,
            None => others,
        };
        let experts = l.rms_norm_weighted("experts_norm", &experts, norm)?;
        let x = l.rms_norm_weighted("dense_input", &hidden, norm)?;
        let gate = l.project("gate_proj", &x)?;
        let up = l.project("up_proj", &x)?;
        let dense = l.gated_gelu("dense_hidden", &gate, &up)?;
        let dense = l.project("down_proj", &dense)?;
        let dense = l.rms_norm_weighted("dense_norm", &dense, norm)?;
        let both = l.f().add("branches", &dense, &experts)?;
        let both = l.rms_norm_weighted("post_feedforward_norm", &both, norm)?;
        let stream = l.f().add("stream", &hidden, &both)?;
        let out = l.scale_by("hidden_out", &stream)?;
        Ok(l.finish(&[&out])?)
    }

    fn totals(&self, shards: &[PlannedShard], layer_shards: usize) -> Totals {
        let c = &self.config;
        Totals {
            shards: shards.len(),
            layer_shards,
            bytes: 0,
            embedding_bytes: 0,
            params: c.parameters(),
            active_params_per_token: self.active_parameters(),
            bytes_per_token: 0,
            experts: c.num_experts,
            experts_per_token: c.top_k_experts,
        }
    }

    fn lower_head(&self, tokens: TokenCount, stored: &Stored) -> Result<BuiltFunction> {
        let mut l = Lowering::new(stored, tokens);
        let hidden = l.input("hidden", &[1, self.config.hidden_size as u64, 1, 0], Some(3))?;
        let norm = RmsNorm { axis: 1, eps: self.config.rms_norm_eps };
        let x = l.rms_norm_weighted("final_norm", &hidden, norm)?;
        let logits = l.project("logits", &x)?;
        Ok(l.finish(&[&logits])?)
    }
}

impl Family for Gemma4 {
    fn name(&self) -> &'static str {
        "gemma4"
    }

    fn plan(&self, options: &PlanOptions) -> Result<Plan> {
        options.check()?;
        let c = &self.config;
        let context = options.context(c.max_position_embeddings)?;
        let packing = options.packing(c.num_experts)?;
        let packs = c.num_experts / packing.per_package;
        let mut shards = Vec::new();
        for layer in 0..c.num_hidden_layers {
            shards.push(self.attention_shard(layer, options, context));
            shards.extend((0..packs).map(|pack| self.expert_shard(layer, pack, packing, options)));
        }
        let layer_shards = shards.len();
        let head = self.head_shards(options);
        let chain = self.chain(options, context, packing, &head)?;
        shards.extend(head);
        let totals = self.totals(&shards, layer_shards);
        let mut plan = Plan {
            family: self.name().into(),
            source: self.source_name(),
            options: options.clone(),
            shards,
            totals,
            embedding: MatrixQuant::FP16,
            notes: Vec::new(),
            chain,
        };
        plan.complete()?;
        Ok(plan)
    }

    fn lower(
        &self,
        shard: &PlannedShard,
        function: &ShardFunction,
        stored: &Stored,
    ) -> Result<BuiltFunction> {
        let wrong = || Error::Usage(format!("shard {} is not one of this model's", shard.name));
        match (shard.kind, shard.layer) {
            (ShardKind::Attention, Some(layer)) if layer < self.config.num_hidden_layers => {
                let slots = shard.cache_slots.ok_or_else(wrong)?;
                self.lower_attention(layer, slots, function.tokens, stored)
            }
            (ShardKind::Experts | ShardKind::ExpertsCombine, Some(_)) => {
                let (first, per_package) = shard.experts.ok_or_else(wrong)?;
                let per_call = shard.experts_per_call.ok_or_else(wrong)?;
                let last = shard.kind == ShardKind::ExpertsCombine;
                let units = units(first, Packing { per_package, per_call }, last);
                let unit = units.iter().find(|u| u.unit == function.unit).ok_or_else(wrong)?;
                self.lower_experts(unit, function.tokens, stored)
            }
            (ShardKind::Head, None) => self.lower_head(function.tokens, stored),
            _ => Err(wrong()),
        }
    }

    fn read(&self, tensor: &str, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        self.read_elements(tensor, range, out)
    }

    fn fingerprint(&self) -> String {
        self.checkpoint().fingerprint()
    }

    fn embedding_tensor(&self) -> &str {
        "embed_tokens.weight"
    }

    fn parts(&self) -> BTreeMap<String, Part> {
        let name = |r: TensorRow| (format!("{}{}", self.prefix, r.name), r.part);
        tensor_table(&self.config).into_iter().map(name).collect()
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

    fn active_parameters(&self) -> u64 {
        let c = &self.config;
        let idle = (c.num_hidden_layers * (c.num_experts - c.top_k_experts)) as u64;
        c.parameters() - idle * c.expert_parameters()
    }

    fn files(&self) -> Result<Vec<(&'static str, SideFile)>> {
        self.checkpoint().side_files()
    }
}
