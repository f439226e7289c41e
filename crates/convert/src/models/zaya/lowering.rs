//! Programs of ZAYA's shards: attention, experts with their router, and whole layers.

use super::Zaya;
use crate::Result;
use crate::form::{HistoryForm, ShardForm};
use crate::lower::{Activation, Attention, HistoryInput, Lowering, NormShape, PositionInputs, Stored};
use crate::models::chain_builder::{ExpertUnit, calls, unit_name};
use crate::plan::{CHOICES_UNIT, Packing, layer_scope};
use crate::variants::ZayaSkip;
use anemoe_bundle::{ShardFunction, TokenCount};
use anemoe_mlpackage::mil::builder::{BuiltFunction, Var};
use std::ops::Range;

/// Name of the unit that chooses experts, where one call does not compute all of them.
const ROUTER: &str = "router";
/// Input with the state that the previous layer's router left.
pub(super) const ROUTER_STATE: &str = "router_state";
/// Names of a layer's norms and residuals, where the layer's package computes them.
pub(super) const ATTENTION_NORM: &str = "attention_norm";
pub(super) const MOE_NORM: &str = "moe_norm";
pub(super) const ATTENTION_RESIDUAL: &str = "attention_residual";
pub(super) const MOE_RESIDUAL: &str = "moe_residual";
/// Names of the vectors of a residual: `(branch + bias) scale + (stream + stream_bias) stream_scale`.
pub(super) const BRANCH_SCALE: &str = "branch_scale";
pub(super) const BRANCH_BIAS: &str = "branch_bias";
pub(super) const STREAM_SCALE: &str = "stream_scale";
pub(super) const STREAM_BIAS: &str = "stream_bias";
/// Name of the sum of what branches add to the stream.
const ADDED: &str = "added";

/// Names the output that holds what `layers` layers of a package add to the stream.
pub(super) fn added_output(layers: usize) -> String {
    format!("{}{MOE_RESIDUAL}_{ADDED}", layer_scope(layers.saturating_sub(1)))
}

/// Names the output of `layers` layers of a package that holds the state for the next router.
pub(super) fn state_output(layers: usize) -> String {
    format!("{}router_state_out", layer_scope(layers.saturating_sub(1)))
}

/// Role of a function of a MoE package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MoeRole {
    /// Routes, and computes all experts.
    Whole,
    /// Routes.
    Router,
    /// Computes experts that the host chose.
    Experts,
}

/// Returns the units of one package. A layer's first package has the router; where one call computes all experts, the
/// router is part of that call.
pub(super) fn units(pack: usize, packing: Packing, experts: usize) -> Vec<ExpertUnit<MoeRole>> {
    let first = pack * packing.per_package;
    if packing.per_call == experts {
        return vec![ExpertUnit { name: None, experts: 0..experts, role: MoeRole::Whole }];
    }
    if pack > 0 && packing.per_call == packing.per_package {
        return vec![ExpertUnit {
            name: None,
            experts: first..first + packing.per_package,
            role: MoeRole::Experts,
        }];
    }
    let router =
        (pack == 0).then(|| ExpertUnit { name: Some(ROUTER.into()), experts: 0..0, role: MoeRole::Router });
    let unit = |e: std::ops::Range<usize>| ExpertUnit {
        name: Some(unit_name(e.start)),
        experts: e,
        role: MoeRole::Experts,
    };
    router.into_iter().chain(calls(first, packing).map(unit)).collect()
}

impl Zaya {
    pub(super) fn attention_shape(&self, slots: usize, seen: usize, form: ShardForm) -> Attention {
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

    pub(super) fn lower_attention(
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
        let (attended, kept) = self.attention(&mut l, &x, (&at, &old), &shape)?;
        l.finish_attention(&[&attended], &kept)
    }

    /// Computes attention's branch from the normalized stream, and returns it with the rows that the host keeps.
    fn attention(
        &self,
        l: &mut Lowering<'_>,
        x: &Var,
        (at, old): (&PositionInputs, &HistoryInput),
        shape: &Attention,
    ) -> Result<(Var, Vec<Var>)> {
        let c = &self.config;
        let cache = l.read_cache(shape)?;
        let all = l.compress(x, &cache, old, shape)?;
        let q = l.rotate("q_rotated", &all.q, c.rotary_dim, c.head_dim, at)?;
        let k = l.rotate("k_rotated", &all.k, c.rotary_dim, c.head_dim, at)?;
        let tail = all.tail.as_ref();
        let (keys, values, mut kept) = l.update_cache(&cache, (&k, &all.v), tail, at, shape)?;
        kept.extend(all.rows);
        let context = l.attend(&q, &keys, &values, at, shape)?;
        Ok((l.project("attended", &context, "o_proj")?, kept))
    }

    /// Computes the router's logits over the classes, and the state for the next layer's router, from the normalized
    /// stream and the state of the previous layer's router.
    fn route(&self, l: &mut Lowering<'_>, x: &Var, before: Option<&Var>) -> Result<(Var, Var)> {
        let c = &self.config;
        let norm = NormShape { axis: 1, eps: c.rms_norm_eps };
        let state = match before {
            None => l.project_biased("router_state_out", x, "router_down")?,
            Some(before) => {
                let own = l.project_biased("router_state_own", x, "router_down")?;
                let scale = l.vector("router_state_scale")?;
                let before = l.f().mul("router_state_before", before, &scale)?;
                l.f().add("router_state_out", &own, &before)?
            }
        };
        let mut n = l.rms_norm_weighted("router_norm", &state, norm)?;
        for name in ["router_fc1", "router_fc2"] {
            let wide = l.project_biased(name, &n, name)?;
            n = l.gelu_exact(&format!("{name}_gelu"), &wide)?;
        }
        Ok((l.project("router_logits", &n, "router_logits")?, state))
    }

    pub(super) fn lower_moe(
        &self,
        layer: usize,
        unit: &ExpertUnit<MoeRole>,
        tokens: TokenCount,
        stored: &Stored,
        form: ShardForm,
    ) -> Result<BuiltFunction> {
        let c = &self.config;
        let experts: Vec<usize> = unit.experts.clone().collect();
        let mut l = Lowering::new(stored, tokens, form);
        let x = l.stream_input("input", c.hidden_size)?;
        if unit.role == MoeRole::Experts {
            let routing = l.stream_input("routing", experts.len())?;
            let sum = l.experts("experts_out", &x, &routing, &experts, Activation::Silu)?;
            return l.finish_streams(&[&sum]);
        }
        let before = self.router_state_input(&mut l, layer)?;
        if unit.role == MoeRole::Router {
            let (logits, state) = self.route(&mut l, &x, before.as_ref())?;
            return l.finish_streams(&[&logits, &state]);
        }
        let (out, state, _) = self.moe(&mut l, &x, before.as_ref(), &experts)?;
        l.finish_streams(&[&out, &state])
    }

    /// Declares the input with the state of the previous layer's router; the first layer has none.
    fn router_state_input(&self, l: &mut Lowering<'_>, layer: usize) -> Result<Option<Var>> {
        let width = self.config.router_hidden_size;
        Ok(if layer == 0 { None } else { Some(l.stream_input(ROUTER_STATE, width)?) })
    }

    /// Computes the branch of all experts, the state for the next layer's router, and the logits of this router, from
    /// the normalized stream and the state of the previous layer's router.
    fn moe(
        &self,
        l: &mut Lowering<'_>,
        x: &Var,
        before: Option<&Var>,
        experts: &[usize],
    ) -> Result<(Var, Var, Var)> {
        let (logits, state) = self.route(l, x, before)?;
        let probabilities = l.f().softmax("router_probabilities", &logits, 1)?;
        let routing = l.top_1("routing_weight", &probabilities, "balancing_biases", self.config.classes())?;
        let name = match self.skip {
            ZayaSkip::Zero => "experts_out",
            ZayaSkip::Identity => "experts_sum",
        };
        let (sum, skip) = l.experts_and_skip(name, x, &routing, experts, Activation::Silu)?;
        let out = match self.skip {
            ZayaSkip::Zero => sum,
            ZayaSkip::Identity => {
                let kept = l.f().mul("skip", x, &skip)?;
                l.f().add("experts_out", &sum, &kept)?
            }
        };
        Ok((out, state, logits))
    }

    /// Lowers whole layers: from the stream to what the layers add to it, and the state for the next layer's router.
    ///
    /// The host keeps the stream in f32; the stream is no output. From the stream s that goes in, each half-layer
    /// with branch b makes
    ///
    /// ```text
    /// s <- (b + bias) scale + (s + residual_bias) residual_scale
    /// a <- b scale + a residual_scale                              what branches add, 0 at first
    /// ```
    /// and the host adds a to its own stream, which it scales and shifts by vectors that are known before the run.
    pub(super) fn lower_layers(
        &self,
        layers: Range<usize>,
        slots: usize,
        function: &ShardFunction,
        stored: &Stored,
        form: ShardForm,
    ) -> Result<BuiltFunction> {
        let c = &self.config;
        let shape = self.attention_shape(slots, function.context.unwrap_or(slots), form);
        let with_choices = function.unit.as_deref() == Some(CHOICES_UNIT);
        let norm = NormShape { axis: 1, eps: c.rms_norm_eps };
        let experts: Vec<usize> = (0..c.num_experts).collect();
        let mut l = Lowering::new(stored, function.tokens, form);
        let mut stream = l.stream_input("hidden", c.hidden_size)?;
        let mut state = self.router_state_input(&mut l, layers.start)?;
        let at = l.position_inputs(&shape, c.rotary_dim)?;
        // One carry selects the rows of all layers; rows that the host keeps are an input of each layer.
        let carry = match form.history {
            HistoryForm::State => Some(l.history_input(&shape)?),
            HistoryForm::Host => None,
        };
        let (mut added, mut kept, mut choices): (Option<Var>, Vec<Var>, Vec<Var>) = Default::default();
        for i in 0..layers.len() {
            l.set_scope(&layer_scope(i));
            let x = l.rms_norm_weighted(ATTENTION_NORM, &stream, norm)?;
            let old = match &carry {
                Some(carry) => carry.clone(),
                None => l.history_input(&shape)?,
            };
            let (branch, rows) = self.attention(&mut l, &x, (&at, &old), &shape)?;
            kept.extend(rows);
            let (middle, sum) = join(&mut l, ATTENTION_RESIDUAL, &stream, added.as_ref(), &branch, false)?;
            let x = l.rms_norm_weighted(MOE_NORM, &middle, norm)?;
            let (branch, next, choice) = self.moe(&mut l, &x, state.as_ref(), &experts)?;
            choices.extend(with_choices.then_some(choice));
            let is_last = i + 1 == layers.len();
            let joined = join(&mut l, MOE_RESIDUAL, &middle, Some(&sum), &branch, is_last)?;
            (stream, added, state) = (joined.0, Some(joined.1), Some(next));
        }
        let outputs: Vec<&Var> = added.iter().chain(&state).chain(&choices).collect();
        l.finish_attention(&outputs, &kept)
    }
}

/// Joins a branch with the stream and with the sum of earlier branches; returns both. Behind a package's last branch
/// the stream is not computed: the host has its own.
fn join(
    l: &mut Lowering<'_>,
    residual: &str,
    stream: &Var,
    added: Option<&Var>,
    branch: &Var,
    is_last: bool,
) -> Result<(Var, Var)> {
    let n = |part: &str| format!("{residual}_{part}");
    let (scale, stream_scale) = (l.vector(&n(BRANCH_SCALE))?, l.vector(&n(STREAM_SCALE))?);
    let added = match added {
        None => l.f().mul(&n(ADDED), branch, &scale)?,
        Some(added) => {
            let own = l.f().mul(&n("own"), branch, &scale)?;
            let earlier = l.f().mul(&n("earlier"), added, &stream_scale)?;
            l.f().add(&n(ADDED), &own, &earlier)?
        }
    };
    if is_last {
        return Ok((stream.clone(), added));
    }
    let (bias, stream_bias) = (l.vector(&n(BRANCH_BIAS))?, l.vector(&n(STREAM_BIAS))?);
    let f = l.f();
    let shifted = f.add(&n("branch_shifted"), branch, &bias)?;
    let scaled = f.mul(&n("branch_scaled"), &shifted, &scale)?;
    let shifted = f.add(&n("stream_shifted"), stream, &stream_bias)?;
    let kept = f.mul(&n("stream_scaled"), &shifted, &stream_scale)?;
    Ok((f.add(&n("stream"), &scaled, &kept)?, added))
}
