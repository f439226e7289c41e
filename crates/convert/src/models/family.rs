//! An opened checkpoint of a model family: its description, and the plan and programs that follow from it.

use super::chain_builder::{
    HIDDEN, functions, matrix, named, normalized, not_ours, output, register, run, split_by_token_count,
};
use super::checked::{BY_NORM, CheckedCheckpoint};
use super::decoder::{Decoder, Preset, Residual};
use super::keys::eos_token_ids;
use super::tensor_table::{TOKEN_ORDERING, TensorRow};
use crate::context_buckets::ContextBuckets;
use crate::lower::{Lowering, Stored};
use crate::plan::{
    MAX_HEAD_ROWS, MAX_HEAD_WEIGHTS, PartKinds, Plan, PlanOptions, PlannedShard, Totals, VectorPlan,
};
use crate::quant::{Granularity, MatrixQuant, Quant};
use crate::{Error, Result};
use anemoe_bundle::{
    Cache, Chain, Embedding, FORMATS, IntBits, ModelInfo, OutputBinding, RowRange, ShardFunction, ShardKind,
    Step, TokenCount, WeightFormat,
};
use anemoe_mlpackage::mil::builder::BuiltFunction;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Parameters below which the preset of a model without experts has 8 bits.
const SMALL_DENSE: u64 = 1_500_000_000;
/// Preset of small models without experts.
const SMALL_PRESET: Preset = Preset {
    quant: Quant::int(IntBits::Eight, Granularity::Channel),
    parts: PartKinds::NONE,
    reason: "small models have no weights to spare: in lut4, shards of SmolLM2-135M and Gemma 3 270M fall to cosines of 0.83 and 0.81, and in this to 0.998",
};

/// Most tokens of a call of a head slice: 65536 logits of 64 tokens would be 8 MB of output that prefill never asks
/// for.
const MAX_HEAD_TOKENS: usize = 16;
/// Name of the vector with the token of each row of the head.
const HEAD_ORDER: &str = "head_order";

/// Remarks on a checkpoint's values.
pub type Remarks = fn(&Decoder, &CheckedCheckpoint) -> Result<Vec<String>>;

/// An opened checkpoint of one model family.
pub struct Family {
    /// Description of the model.
    pub decoder: Decoder,
    /// The checkpoint, whose tensors fit the description.
    pub checked: CheckedCheckpoint,
    /// Tensors of each layer.
    pub(super) rows: Vec<Vec<TensorRow>>,
    remarks: Remarks,
    /// SHA-256 of the tokens that matrices are compressed for, where they are for any.
    pub calibration: Option<String>,
}

impl Family {
    /// Makes the family of a checkpoint whose tensors fit the description.
    pub(super) fn new(mut decoder: Decoder, checked: CheckedCheckpoint, remarks: Remarks) -> Family {
        decoder.eos = eos_token_ids(&checked.checkpoint, &decoder.eos, decoder.vocab);
        let mut rows = vec![Vec::new(); decoder.layers.len()];
        for row in decoder.tensors() {
            if let Some(own) = row.layer.and_then(|l| rows.get_mut(l)) {
                own.push(row);
            }
        }
        Family { decoder, checked, rows, remarks, calibration: None }
    }

    /// Returns the kinds that `--quant` stands for when it is not given and the model is not run.
    pub fn preset(&self) -> Preset {
        let is_small = self.decoder.experts().is_none() && self.decoder.parameters() < SMALL_DENSE;
        if is_small { SMALL_PRESET } else { self.decoder.preset }
    }

    /// Returns remarks on the checkpoint's values that a user should know.
    ///
    /// # Errors
    /// The checkpoint cannot be read.
    pub fn remarks(&self) -> Result<Vec<String>> {
        (self.remarks)(&self.decoder, &self.checked)
    }

    /// Decides packages, compression and the chain.
    ///
    /// # Errors
    /// The options do not fit the model.
    pub fn plan(&self, options: &PlanOptions) -> Result<Plan> {
        self.plan_joining(options, &self.groups(options))
    }

    /// Plans like [`Family::plan`], but joins only the layers that `shard` joins and leaves all others in parts.
    /// If `shard` begins in the middle of a layer, the layer's first part has a package of its own.
    ///
    /// # Errors
    /// The options do not fit the model.
    pub fn plan_around(&self, options: &PlanOptions, shard: &PlannedShard) -> Result<Plan> {
        self.plan_joining(options, &shard.joined_layers().into_iter().collect::<Vec<_>>())
    }

    /// Returns the layers that share a package.
    fn groups(&self, options: &PlanOptions) -> Vec<Range<usize>> {
        match self.decoder.residual {
            // As many layers as the options allow, the last group with the rest; none where they join no layers.
            Residual::Affine => options.layers_per_shard().map_or_else(Vec::new, |most| {
                let n = self.decoder.layers.len();
                (0..n).step_by(most.get()).map(|first| first..(first + most.get()).min(n)).collect()
            }),
            Residual::Plain | Residual::LayerScalar => self.groups_in_packages(options),
        }
    }

    /// Refuses options for parts that the model does not have.
    fn check(&self, options: &PlanOptions) -> Result<()> {
        let d = &self.decoder;
        options.check()?;
        options.check_forms(d.has_history(), d.routed().count() < d.layers.len())?;
        if options.parts.dense_mlp.is_some() && !d.has_dense() {
            return Err(Error::usage(format!("--mlp-quant: {} has no MLP that every token meets", d.family)));
        }
        if d.experts().is_none() {
            if let Some(option) = options.option_of_experts() {
                return Err(Error::usage(format!("{option}: this model has no experts")));
            }
            let is_own = |kind: &&ShardKind| matches!(kind, ShardKind::Layers | ShardKind::Head);
            if let Some(kind) = options.forms.keys().find(|kind| !is_own(kind)) {
                let what = "this model has no experts, and so no shard of this sort; there are layers, head";
                return Err(Error::usage(format!("[{}]: {what}", kind.name())));
            }
        }
        Ok(())
    }

    /// Plans with each range of `joined` layers in one package.
    fn plan_joining(&self, options: &PlanOptions, joined: &[Range<usize>]) -> Result<Plan> {
        let d = &self.decoder;
        self.check(options)?;
        let (options, fact) = self.with_attention_kind(options);
        let options = &options;
        let context = options.context(d.positions)?;
        let at_host = d.residual == Residual::Affine;
        let (mut shards, steps) = match (&d.assistant, at_host) {
            (Some(of), _) => self.plan_assistant(of, options, context)?,
            (None, true) => self.plan_at_host(options, context, joined)?,
            (None, false) => self.plan_in_packages(options, context, joined)?,
        };
        let mut facts = match at_host {
            true => self.facts_at_host(options)?,
            false => self.fact_of_joining(options).into_iter().collect(),
        };
        facts.extend(fact);
        facts.extend(self.checked.remark_on_others());
        facts.extend(self.checked.checkpoint.remarks.iter().cloned());
        facts.extend(d.assistant.as_ref().map(|_| {
            "an assistant runs on the keys and values of the model that it drafts for: it has no gates, and its acceptance shows its quality".to_string()
        }));
        let head = self.head_shards(options);
        let mut chain = self.chain(options, context, steps, &head);
        shards.extend(head);
        shards.iter_mut().for_each(|shard| shard.form = options.form_of(shard.kind));
        let shards = split_by_token_count(shards, &mut chain);
        let buckets: BTreeSet<usize> = options.context_buckets().flat_map(ContextBuckets::iter).collect();
        let has = |bucket: usize| shards.iter().flat_map(|s| &s.functions).any(|f| f.context == Some(bucket));
        facts.extend(buckets.into_iter().filter(|bucket| !has(*bucket)).map(|bucket| {
            format!(
                "the context bucket {bucket} is the whole cache of every layer and has no functions of its own"
            )
        }));
        let experts = d.experts();
        let totals = Totals {
            shards: shards.len(),
            layer_shards: shards.iter().filter(|s| s.layer.is_some()).count(),
            bytes: 0,
            embedding_bytes: 0,
            params: d.parameters(),
            active_params_per_token: d.active_parameters(),
            bytes_per_token: 0,
            experts: experts.map_or(0, |e| e.count),
            experts_per_token: experts.map_or(0, |e| e.active),
        };
        let mut plan = Plan {
            family: d.family.into(),
            source: self.checked.checkpoint.name.clone(),
            options: options.clone(),
            shards,
            totals,
            embedding: MatrixQuant::FP16,
            facts,
            notes: Vec::new(),
            chain,
        };
        plan.complete()?;
        Ok(plan)
    }

    /// Sets the family's kind of attention where the options name none and `--quant` has fewer than 8 bits; returns
    /// the options and a remark. Attention of an MoE model is a small part of its weights.
    fn with_attention_kind(&self, options: &PlanOptions) -> (PlanOptions, Option<String>) {
        let mut options = options.clone();
        let Some((kind, reason)) = self.decoder.attention_kind else { return (options, None) };
        if options.parts.attention.is_some() || options.quant.bits() >= 8 {
            return (options, None);
        }
        options.defaults.attention = Some(kind);
        let fact =
            format!("attention is {kind} where neither --attn-quant nor a search says otherwise: {reason}");
        (options, Some(fact))
    }

    /// Tells whether the head's rows are stored in the order of their norms.
    fn sorts_head(&self, options: &PlanOptions) -> bool {
        let d = &self.decoder;
        let kind = options.resolve("head", d.vocab, d.hidden).kind;
        options.sort_head && d.assistant.is_none() && !matches!(kind, Quant::Fp16 | Quant::Mxfp4)
    }

    /// Returns the rows of the head's matrix, and its tensor, which may be the embedding.
    fn head(&self) -> (usize, String) {
        let d = &self.decoder;
        let (rows, role) = match (d.centroids(), d.has_own_head()) {
            (Some(of), _) => (of.count, "centroids"),
            (None, false) => (d.vocab, "embedding"),
            (None, true) => (d.vocab, "head"),
        };
        (rows, d.tensor(None, role))
    }

    /// Plans the weights of the norm before the head.
    pub(super) fn final_norm(&self) -> VectorPlan {
        let d = &self.decoder;
        let norm = VectorPlan::channels("final_norm_weight", d.tensor(None, "final_norm"), d.hidden);
        VectorPlan { offset: d.norm_offset, ..norm }
    }

    /// Plans slices of the head of equally many rows, small enough for the ANE; the last may have fewer rows.
    fn head_shards(&self, options: &PlanOptions) -> Vec<PlannedShard> {
        let (h, (vocab, mut tensor)) = (self.decoder.hidden, self.head());
        if self.sorts_head(options) {
            tensor += BY_NORM;
        }
        let limit = MAX_HEAD_WEIGHTS.min(options.max_shard_mb.saturating_mul(500_000)).max(32 * h as u64);
        let slices = (vocab as u64 * h as u64).div_ceil(limit).max(1) as usize;
        let slices = slices.max(vocab.div_ceil(MAX_HEAD_ROWS));
        let rows = vocab.div_ceil(slices).next_multiple_of(32);
        let starts: Vec<usize> = (0..vocab).step_by(rows).collect();
        let cap = |t: &TokenCount| TokenCount {
            min: t.min,
            max: if t.min < t.max { t.max.min(MAX_HEAD_TOKENS) } else { t.max },
        };
        let mut tokens: Vec<TokenCount> =
            self.tokens(options).iter().map(cap).filter(|t| t.max <= MAX_HEAD_TOKENS).collect();
        tokens.dedup();
        let shard = |(i, &start): (usize, &usize)| {
            let n = rows.min(vocab - start);
            let offset = start as u64 * h as u64;
            let matrix = matrix(options, "logits", "head", tensor.clone(), offset, (n, h));
            let name = format!("head.{i}of{}", starts.len());
            let mut shard =
                PlannedShard::new(name, ShardKind::Head, None, vec![matrix], vec![self.final_norm()]);
            shard.functions = functions(&[None], &tokens);
            shard.vocab_rows = Some((start, n));
            shard
        };
        starts.iter().enumerate().map(shard).collect()
    }

    /// Returns the token counts of calls; an assistant takes one token.
    fn tokens<'a>(&self, options: &'a PlanOptions) -> &'a [TokenCount] {
        if self.decoder.assistant.is_some() { &[TokenCount::ONE] } else { &options.tokens }
    }

    fn chain(&self, options: &PlanOptions, context: usize, steps: Vec<Step>, head: &[PlannedShard]) -> Chain {
        let d = &self.decoder;
        let (mut ropes, mut caches) = (BTreeMap::new(), BTreeMap::new());
        for (l, layer) in d.layers.iter().enumerate() {
            let a = &layer.attention;
            let slots = self.slots(l, options, context);
            // An assistant's token lies behind the cache, so that its window ends one position earlier.
            let window = a.window.map(|w| if d.assistant.is_some() { (w + 1).min(slots) } else { w });
            let cache = Cache { slots, window };
            caches.entry(a.kind.to_string()).or_insert(cache);
            ropes.entry(a.kind.to_string()).or_insert_with(|| a.rope.clone());
        }
        let model = ModelInfo {
            vocab_size: d.vocab,
            hidden_size: d.hidden,
            num_layers: d.layers.len(),
            num_experts: d.experts().map(|e| e.count),
            max_context: context,
            bos_token_id: d.bos,
            eos_token_ids: d.eos.clone(),
            final_logit_softcapping: d.softcap,
        };
        let hidden = if d.residual == Residual::Affine { normalized(HIDDEN) } else { register(HIDDEN) };
        // Each slice of the head reads the stream and writes its rows of the logits.
        let head_step = |shard: &PlannedShard| {
            let rows = shard.vocab_rows.map(|(start, count)| RowRange { start, count });
            let logits = ("logits".into(), OutputBinding { rows, ..output("logits") });
            let inputs = named(vec![("hidden", hidden.clone())]);
            Step::Run(run((shard.name.clone(), None), inputs, vec![logits], options.form_of(ShardKind::Head)))
        };
        let is_sorted = self.sorts_head(options);
        let is_looked_up = d.assistant.as_ref().is_none_or(|of| of.centroids.is_some());
        Chain {
            format: FORMATS[usize::from(is_sorted)],
            generator: concat!("anemoe ", env!("CARGO_PKG_VERSION")).into(),
            family: d.family.into(),
            source: self.checked.checkpoint.name.clone(),
            checkpoint_sha256: None,
            readings: d.readings.clone(),
            options: serde_json::Value::Null,
            gates: None,
            importance: None,
            calibration: None,
            head_order: is_sorted.then(|| HEAD_ORDER.into()),
            auto: None,
            embedding: Embedding {
                file: "embed.bin".into(),
                rows: if is_looked_up { d.vocab } else { 0 },
                cols: d.hidden,
                scale: d.embedding_scale / d.stream_unit,
                storage: WeightFormat::Fp16,
                sha256: String::new(),
            },
            model,
            assistant: d.assistant.clone(),
            vectors: None,
            drafter: None,
            tokens: self.tokens(options).to_vec(),
            ropes,
            caches,
            steps,
            head: head.iter().map(head_step).collect(),
            shards: Vec::new(),
        }
    }

    /// Lowers one function of a shard over weights that are stored already.
    ///
    /// # Errors
    /// The program breaks MIL's rules; a fault of the lowering, not of the input.
    pub fn lower(
        &self,
        shard: &PlannedShard,
        function: &ShardFunction,
        stored: &Stored,
    ) -> Result<BuiltFunction> {
        let mut l = Lowering::new(stored, function.tokens, shard.form);
        let layer = shard.layer.filter(|l| *l < self.decoder.layers.len());
        match (shard.kind, layer, &self.decoder.assistant) {
            (ShardKind::Head, None, _) if shard.layer.is_none() => {
                let hidden = l.stream_input("hidden", self.decoder.hidden)?;
                let x = l.rms_norm_weighted("final_norm", &hidden, self.stream_norm())?;
                let logits = l.project("logits", &x, "logits")?;
                l.finish_streams(&[&logits])
            }
            (ShardKind::Head, ..) | (_, None, _) => Err(not_ours(shard)),
            (_, _, Some(of)) => self.lower_assistant(l, of, shard),
            (_, Some(layer), None) if self.decoder.residual == Residual::Affine => {
                self.lower_at_host(l, layer, shard, function)
            }
            (_, Some(layer), None) => self.lower_in_packages(l, layer, shard, function),
        }
    }

    /// Reads the vectors, in f32, that the host steps of a plan with these options name, and those of the parts of
    /// joined layers.
    ///
    /// # Errors
    /// The checkpoint cannot be read.
    pub fn host_vectors(&self, options: &PlanOptions) -> Result<BTreeMap<String, Vec<f32>>> {
        if let Some(ids) = self.token_ordering()? {
            let ids = ids.into_iter().map(|id| id as f32).collect();
            return Ok(BTreeMap::from([(TOKEN_ORDERING.to_string(), ids)]));
        }
        let mut all = match self.decoder.residual {
            Residual::Affine => self.vectors_at_host(&self.groups(options))?,
            Residual::Plain | Residual::LayerScalar => BTreeMap::new(),
        };
        if self.sorts_head(options) {
            let order = self.checked.rows_by_norm(&self.head().1)?;
            all.insert(HEAD_ORDER.into(), order.iter().map(|&id| id as f32).collect());
        }
        Ok(all)
    }
}
