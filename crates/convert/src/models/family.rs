//! An opened checkpoint of a model family: its description, and the plan and programs that follow from it.

use super::chain_builder::{HIDDEN, OutputHead, normalized, not_ours, register, split_by_token_count};
use super::checked::{BY_NORM, CheckedCheckpoint};
use super::decoder::{Decoder, Preset, Residual};
use super::keys::eos_token_ids;
use super::tensor_table::{TOKEN_ORDERING, TensorRow};
use crate::context_buckets::ContextBuckets;
use crate::lower::Stored;
use crate::plan::{PartKinds, Plan, PlanOptions, PlannedShard, Totals, VectorPlan};
use crate::quant::{Granularity, MatrixQuant, Quant};
use crate::{Error, Result};
use anemoe_bundle::{
    Cache, Chain, Embedding, FORMATS, IntBits, ModelInfo, ShardFunction, ShardKind, Step, TokenCount,
    WeightFormat,
};
use anemoe_mlpackage::mil::builder::BuiltFunction;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Parameters below which the preset of a model without experts has 8 bits.
const SMALL_DENSE: u64 = 1_500_000_000;
/// Preset of small models without experts.
const SMALL_PRESET: Preset = Preset {
    quant: Quant::int(IntBits::Eight, Granularity::Channel),
    parts: PartKinds {
        attention: None,
        experts: None,
        dense_mlp: None,
        router: None,
        head: None,
        embedding: None,
    },
    reason: "small models have no weights to spare: in lut4, shards of SmolLM2-135M and Gemma 3 270M fall to cosines of 0.83 and 0.81, and in this to 0.998",
};

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
        let single = PlanOptions { tokens: vec![TokenCount::ONE], ..options.clone() };
        let mut head = self.head();
        if self.sorts_head(options) {
            head.matrix += BY_NORM;
        }
        let head = head.shards(if d.assistant.is_some() { &single } else { options });
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

    fn head(&self) -> OutputHead {
        let d = &self.decoder;
        let norm = VectorPlan::channels("final_norm_weight", d.tensor(None, "final_norm"), d.hidden);
        OutputHead {
            hidden: d.hidden,
            vocab: d.centroids().map_or(d.vocab, |of| of.count),
            norm: VectorPlan { offset: d.norm_offset, ..norm },
            matrix: match (d.centroids(), d.has_own_head()) {
                (Some(_), _) => d.tensor(None, "centroids"),
                (None, false) => d.tensor(None, "embedding"),
                (None, true) => d.tensor(None, "head"),
            },
            eps: self.stream_norm().eps,
        }
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
            tokens: if d.assistant.is_some() { vec![TokenCount::ONE] } else { options.tokens.clone() },
            ropes,
            caches,
            steps,
            head: OutputHead::steps(head, hidden, options.form_of(ShardKind::Head)),
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
        match (shard.kind, shard.layer, self.decoder.residual) {
            (ShardKind::Head, None, _) => self.head().lower(function.tokens, stored, shard.form),
            (ShardKind::Head, Some(_), _) | (_, None, _) => Err(not_ours(shard)),
            (_, _, Residual::Affine) => self.lower_at_host(shard, function, stored),
            _ => self.lower_in_packages(shard, function, stored),
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
            let order = self.checked.rows_by_norm(&self.head().matrix)?;
            all.insert(HEAD_ORDER.into(), order.iter().map(|&id| id as f32).collect());
        }
        Ok(all)
    }
}
