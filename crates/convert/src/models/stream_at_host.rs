//! Shards of a decoder whose stream stays at the host, in f32: shards take it normalized in fp16, and give back what
//! their branch adds to it. Each layer has attention and experts; the router may be in the package of the experts.

use super::chain_builder::{
    ExpertUnit, HIDDEN, expert_units, functions, layers_name, named, not_ours, output, packing_of, register,
    rows_of, run,
};
use super::decoder::{ExpertLayer, QkvProjection, RouterKind};
use super::family::Family;
use super::layer_blocks::{AttentionInputs, Weights, attention_name};
use super::tensor_roles::AFFINE;
use crate::form::{HistoryForm, LAYERS_PER_SHARD};
use crate::lower::{AttentionDims, HistoryInput, Lowering};
use crate::plan::{CHOICES_UNIT, Packing, PlanOptions, PlannedShard, VectorPlan, layer_scope};
use crate::{Error, Result};
use anemoe_bundle::{OutputBinding, RowRange, Run, ShardFunction, ShardKind, Step, When};
use anemoe_mlpackage::mil::builder::{BuiltFunction, Var};
use std::collections::BTreeMap;
use std::ops::Range;

/// Register with the normalized stream.
const INPUT: &str = "input";
/// Register with what the layers of a package add to the stream, and name of the sum of what branches add to it.
const ADDED: &str = "added";
/// Parts of a package of whole layers, as its name has them; the host's vectors behind the package have this name, too.
const PARTS: &str = "attn.moe";
/// Name of the unit that chooses experts, where one call does not compute all of them.
const ROUTER: &str = "router";
/// Input with the state that the previous layer's router left.
const ROUTER_STATE: &str = "router_state";
/// Names of a layer's norms and residuals, where the layer's package computes them, with the roles of the norms.
const HALVES: [(&str, &str, &str); 2] =
    [("attention_norm", "input_norm", "attention_residual"), ("moe_norm", "expert_input", "moe_residual")];

fn moe_name(layer: usize, pack: usize, packs: usize) -> String {
    match packs {
        1 => moe_vectors(layer),
        _ => format!("{}.p{pack}of{packs}", moe_vectors(layer)),
    }
}

/// Names the vectors of the residual behind a layer's experts: `L00.moe`.
fn moe_vectors(layer: usize) -> String {
    format!("L{layer:02}.moe")
}

/// Names the output that holds what `layers` layers of a package add to the stream.
fn added_output(layers: usize) -> String {
    format!("{}{}_{ADDED}", layer_scope(layers.saturating_sub(1)), HALVES[1].2)
}

/// Names the output of `layers` layers of a package that holds the state for the next router.
fn state_output(layers: usize) -> String {
    format!("{}router_state_out", layer_scope(layers.saturating_sub(1)))
}

/// Returns the units of one package. A layer's first package has the router; where one call computes all experts, the
/// router is part of that call.
fn units(pack: usize, packing: Packing, experts: usize) -> Vec<ExpertUnit> {
    let (first, routes) = (pack * packing.per_package, pack == 0);
    if packing.per_call == if routes { experts } else { packing.per_package } {
        let experts = first..first + packing.per_package;
        return vec![ExpertUnit { name: None, experts, has_own_part: routes }];
    }
    let router = ExpertUnit { name: Some(ROUTER.into()), experts: 0..0, has_own_part: true };
    routes.then_some(router).into_iter().chain(expert_units(first, packing)).collect()
}

impl Family {
    /// Returns the experts of a layer, the width of their router, and whether the class behind the last one passes its input.
    fn networked(&self, l: usize) -> Result<(&ExpertLayer, usize, bool)> {
        let experts = self.decoder.layers.get(l).and_then(|layer| layer.experts.as_ref());
        match experts.map(|e| (e, e.router)) {
            Some((e, RouterKind::Network { width, passes_input })) => Ok((e, width, passes_input)),
            _ => Err(Error::usage(format!("layer {l} has no router with a state"))),
        }
    }

    /// Plans the shards and the host's steps of all layers, where the layers of each range of `joined` share a package.
    ///
    /// # Errors
    /// The options do not fit the model.
    pub(super) fn plan_at_host(
        &self,
        options: &PlanOptions,
        context: usize,
        joined: &[Range<usize>],
    ) -> Result<(Vec<PlannedShard>, Vec<Step>)> {
        let (e, packing, _) = self.packs(0, options)?;
        if options.layers_per_shard().is_some() && packing.per_call != e.count {
            return Err(Error::usage(format!(
                "{LAYERS_PER_SHARD}: with {} of {} experts in a call the host chooses experts inside of each layer: give \
                 --experts-per-shard {}",
                packing.per_call, e.count, e.count
            )));
        }
        let mut shards = Vec::new();
        let mut steps = vec![Step::Residual { stream: HIDDEN.into(), branch: None, vectors: INPUT.into() }];
        let mut layer = 0;
        while layer < self.decoder.layers.len() {
            if let Some(layers) = joined.iter().find(|group| group.start == layer && !group.is_empty()) {
                shards.push(self.layers_shard(layers, options, context)?);
                steps.extend(self.joined_steps(layers, options));
                layer = layers.end;
                continue;
            }
            let named = (attention_name(layer), ShardKind::Attention);
            let w = self.attention_weights(options, layer);
            shards.push(self.package_with_cache(named, &(layer..layer + 1), w, options, context));
            for pack in 0..e.count / packing.per_package {
                shards.push(self.moe_shard(layer, pack, options, false)?);
            }
            steps.extend(self.layer_steps(layer, options)?);
            layer += 1;
        }
        Ok((shards, steps))
    }

    /// Explains where the stream is, and what a token gets that chooses no expert.
    pub(super) fn facts_at_host(&self, options: &PlanOptions) -> Result<Vec<String>> {
        let skip = match self.networked(0)?.2 {
            true => "its own input times the probability, as in the original implementation",
            false => "nothing, as in transformers",
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
        Ok(vec![stream.into(), format!("a token that chooses the class behind the last expert gets {skip}")])
    }

    /// Plans a pack of experts, whose matrices have the layout of its own sort, or of joined layers.
    fn moe_shard(
        &self,
        l: usize,
        pack: usize,
        options: &PlanOptions,
        is_joined: bool,
    ) -> Result<PlannedShard> {
        let (e, packing, packs) = self.packs(l, options)?;
        let is_whole = packing.per_call == e.count;
        let mut w = Weights::default();
        if pack == 0 {
            w = self.weights(options, l, &["router_down", "router_fc1", "router_fc2", "router_logits"]);
            w.add(self.weights(options, l, &["router_state_scale", "router_norm"]), "");
            w.add(self.weights(options, l, &["router_down_bias", "router_fc1_bias", "router_fc2_bias"]), "");
            if is_whole {
                w.add(self.weights(options, l, &["balancing_biases"]), "");
            }
        }
        let first = pack * packing.per_package;
        let kind = if pack == 0 { ShardKind::Moe } else { ShardKind::Experts };
        let form_of = if is_joined { ShardKind::Layers } else { kind };
        w.add(self.expert_weights(options, form_of, (l, first))?, "");
        let mut shard = PlannedShard::new(moe_name(l, pack, packs), kind, Some(l), w.matrices, w.vectors);
        let names: Vec<Option<String>> = units(pack, packing, e.count).into_iter().map(|u| u.name).collect();
        shard.functions = functions(&names, &options.tokens);
        shard.experts = Some((first, packing.per_package));
        shard.experts_per_call = Some(packing.per_call);
        shard.triangle = (pack == 0 && is_whole).then(|| e.classes());
        Ok(shard)
    }

    /// Plans a package of whole layers: the matrices and vectors of their parts, with norms and residuals.
    fn layers_shard(
        &self,
        layers: &Range<usize>,
        options: &PlanOptions,
        context: usize,
    ) -> Result<PlannedShard> {
        let (e, packing, _) = self.packs(layers.start, options)?;
        let mut w = Weights::default();
        for (i, l) in layers.clone().enumerate() {
            let moe = self.moe_shard(l, 0, options, true)?;
            let mut own = self.attention_weights(options, l);
            own.add(Weights { matrices: moe.matrices, vectors: moe.vectors }, "");
            for (half, (norm, role, residual)) in HALVES.into_iter().enumerate() {
                let plan = self.vector(l, self.row(l, role)?);
                own.vectors.push(VectorPlan { name: format!("{norm}_weight"), ..plan });
                // Behind the last branch the host computes the stream, and the package needs no biases.
                let has_biases = l + 1 < layers.end || half == 0;
                for part in [0, 2, 1, 3].into_iter().filter(|part| has_biases || part % 2 == 0) {
                    let row = self.row(l, &format!("{residual}_{}", AFFINE[part]))?;
                    own.vectors.push(self.vector(l, row));
                }
            }
            w.add(own, &layer_scope(i));
        }
        let named = (layers_name(layers, PARTS), ShardKind::Layers);
        let mut shard = self.package_with_cache(named, layers, w, options, context);
        shard.experts = Some((0, packing.per_package));
        shard.experts_per_call = Some(packing.per_call);
        shard.triangle = Some(e.classes());
        Ok(shard)
    }

    /// Makes the steps of a package of whole layers: its run, then the residual of the host's own stream.
    fn joined_steps(&self, layers: &Range<usize>, options: &PlanOptions) -> [Step; 2] {
        let form = options.form_of(ShardKind::Layers);
        let (shard, n) = (layers_name(layers, PARTS), layers.len());
        let mut inputs = self.position_inputs(layers.start, form);
        inputs.insert(HIDDEN.into(), register(HIDDEN));
        if layers.start > 0 {
            inputs.insert(ROUTER_STATE.into(), register(ROUTER_STATE));
        }
        let outputs = vec![(added_output(n), output(ADDED)), (state_output(n), output(ROUTER_STATE))];
        let kept = layers.clone().enumerate().flat_map(|(i, l)| self.kept_rows(l, form, &layer_scope(i)));
        let kept = kept.collect();
        let run = Run { kept, ..run((shard.clone(), None), inputs, outputs, form) };
        [Step::Run(run), residual_step(ADDED, shard)]
    }

    fn layer_steps(&self, layer: usize, options: &PlanOptions) -> Result<Vec<Step>> {
        let (_, _, passes_input) = self.networked(layer)?;
        let (e, packing, packs) = self.packs(layer, options)?;
        let normalize = |name: String| Step::Normalize {
            from: HIDDEN.into(),
            to: INPUT.into(),
            vector: format!("{name}.norm"),
            eps: self.decoder.eps,
        };
        let mut steps = vec![normalize(attention_name(layer))];
        let form = options.form_of(ShardKind::Attention);
        let mut inputs = self.position_inputs(layer, form);
        inputs.insert(INPUT.into(), register(INPUT));
        let outputs = vec![("attended".into(), output("attended"))];
        let kept = self.kept_rows(layer, form, "");
        steps.push(Step::Run(Run { kept, ..run((attention_name(layer), None), inputs, outputs, form) }));
        steps.push(residual_step("attended", attention_name(layer)));
        steps.push(normalize(moe_vectors(layer)));
        for pack in 0..packs {
            for unit in units(pack, packing, e.count) {
                let rows = RowRange { start: unit.experts.start, count: unit.experts.len() };
                let form = options.form_of(if pack == 0 { ShardKind::Moe } else { ShardKind::Experts });
                let mut inputs = named(vec![(INPUT, register(INPUT))]);
                if layer > 0 {
                    inputs.insert(ROUTER_STATE.into(), register(ROUTER_STATE));
                }
                let mut outputs = vec![("router_state_out".to_string(), output(ROUTER_STATE))];
                let mut when = None;
                let is_router = unit.has_own_part && unit.experts.is_empty();
                match unit.has_own_part {
                    true if is_router => outputs.push(("router_logits".into(), output("router_logits"))),
                    true => outputs.push(("experts_out".into(), output("experts"))),
                    false => {
                        when = Some(When { register: "routing".into(), rows });
                        inputs = named(vec![(INPUT, register(INPUT)), ("routing", rows_of("routing", rows))]);
                        let sum = OutputBinding { accumulate: true, ..output("experts") };
                        outputs = vec![("experts_out".into(), sum)];
                    }
                }
                let shard = moe_name(layer, pack, packs);
                steps.push(Step::Run(Run { when, ..run((shard, unit.name), inputs, outputs, form) }));
                if is_router {
                    let biases = &self.row(layer, "balancing_biases")?.name;
                    steps.push(Step::Route {
                        logits: "router_logits".into(),
                        weights: "routing".into(),
                        top_k: e.active,
                        scale: None,
                        bias: Some(self.checked.vector(biases, e.classes())?),
                        over_all: true,
                    });
                    steps.push(Step::Zero { register: "experts".into(), channels: self.decoder.hidden });
                    if passes_input {
                        steps.push(Step::AddScaled {
                            register: "experts".into(),
                            from: INPUT.into(),
                            weights: "routing".into(),
                            row: e.count,
                        });
                    }
                }
            }
        }
        steps.push(residual_step("experts", moe_vectors(layer)));
        Ok(steps)
    }

    /// Reads the vectors of the host's steps, and those of the parts of joined layers.
    ///
    /// # Errors
    /// The checkpoint cannot be read.
    pub(super) fn vectors_at_host(&self, joined: &[Range<usize>]) -> Result<BTreeMap<String, Vec<f32>>> {
        let h = self.decoder.hidden;
        let mut out = BTreeMap::new();
        let scale = self.checked.vector(&self.decoder.tensor(None, "input_scale"), h)?;
        let bias = self.checked.vector(&self.decoder.tensor(None, "input_bias"), h)?;
        out.insert("input.shift".into(), bias.iter().zip(&scale).map(|(b, s)| b * s).collect());
        out.insert("input.scale".into(), scale);
        for l in 0..self.decoder.layers.len() {
            for ((_, norm, residual), name) in HALVES.into_iter().zip([attention_name(l), moe_vectors(l)]) {
                out.insert(format!("{name}.norm"), self.checked.vector(&self.row(l, norm)?.name, h)?);
                self.residual(l, residual, &name, &mut out)?;
            }
        }
        for layers in joined {
            let vectors = joined_residual(layers, h, &out);
            out.extend(vectors);
        }
        Ok(out)
    }

    /// Adds the vectors of a residual, `(branch + b) g + (stream + b') g'`, to `out`: `scale` is g', `branch_scale`
    /// is g, and `shift` is b g + b' g'.
    fn residual(
        &self,
        l: usize,
        residual: &str,
        name: &str,
        out: &mut BTreeMap<String, Vec<f32>>,
    ) -> Result<()> {
        let h = self.decoder.hidden;
        let tensor =
            |part: usize| Ok::<_, Error>(&self.row(l, &format!("{residual}_{}", AFFINE[part]))?.name);
        let read = |part: usize| self.checked.vector(tensor(part)?, h);
        let (branch_scale, branch_bias, scale, bias) = (read(0)?, read(1)?, read(2)?, read(3)?);
        let shift: Vec<f32> = (0..h).map(|i| branch_bias[i] * branch_scale[i] + bias[i] * scale[i]).collect();
        if let Some(i) = shift.iter().position(|v| !v.is_finite()) {
            let what = format!("element {i} becomes {} in f32 when it is scaled", shift[i]);
            return Err(self.checked.refuse(tensor(1)?, i as u64, &what));
        }
        out.insert(format!("{name}.scale"), scale);
        out.insert(format!("{name}.branch_scale"), branch_scale);
        out.insert(format!("{name}.shift"), shift);
        Ok(())
    }

    /// Lowers a function of a shard of [`Family::plan_at_host`].
    ///
    /// # Errors
    /// The program breaks MIL's rules, or the shard is not one of the model's.
    pub(super) fn lower_at_host(
        &self,
        mut l: Lowering<'_>,
        layer: usize,
        shard: &PlannedShard,
        function: &ShardFunction,
    ) -> Result<BuiltFunction> {
        let wrong = || not_ours(shard);
        match shard.kind {
            ShardKind::Attention => {
                let shape = self.attention_in(shard, function, layer)?;
                let x = l.stream_input(INPUT, self.decoder.hidden)?;
                let at = self.declare_positions(&mut l, layer, &shape)?;
                let old = self.history(&mut l, layer, &shape)?;
                let inputs = AttentionInputs { at: &at, history: old.as_ref(), shared: None };
                let (attended, kept) = self.attention(&mut l, (layer, "attended"), &x, inputs, &shape)?;
                l.finish_attention(&[&attended], &kept)
            }
            ShardKind::Moe | ShardKind::Experts => {
                let (first, packing) = packing_of(shard)?;
                let pack = first.checked_div(packing.per_package).ok_or_else(wrong)?;
                let units = units(pack, packing, self.networked(layer)?.0.count);
                let unit = units.iter().find(|u| u.name == function.unit).ok_or_else(wrong)?;
                self.lower_moe(l, layer, unit)
            }
            _ => {
                let layers = shard.joined_layers().ok_or_else(wrong)?;
                let with_choices = function.unit.as_deref() == Some(CHOICES_UNIT);
                let shape = self.attention_in(shard, function, layer)?;
                self.lower_layers(l, layers, with_choices, shard.form.history, &shape)
            }
        }
    }

    /// Declares the input with a layer's history, where it has one.
    fn history(
        &self,
        l: &mut Lowering<'_>,
        layer: usize,
        shape: &AttentionDims,
    ) -> Result<Option<HistoryInput>> {
        match self.decoder.layers[layer].attention.projection {
            QkvProjection::Convolved => Ok(Some(l.history_input(shape)?)),
            _ => Ok(None),
        }
    }

    /// Computes the router's logits over the classes, and the state for the next layer's router, from the normalized
    /// stream and the state of the previous layer's router.
    fn route(&self, l: &mut Lowering<'_>, x: &Var, before: Option<&Var>) -> Result<(Var, Var)> {
        let state = match before {
            None => l.project_with("router_state_out", x, "router_down", true)?,
            Some(before) => {
                let own = l.project_with("router_state_own", x, "router_down", true)?;
                let scale = l.vector("router_state_scale")?;
                let before = l.f().mul("router_state_before", before, &scale)?;
                l.f().add("router_state_out", &own, &before)?
            }
        };
        let mut n = l.rms_norm_weighted("router_norm", &state, self.stream_norm())?;
        for name in ["router_fc1", "router_fc2"] {
            let wide = l.project_with(name, &n, name, true)?;
            n = l.gelu_exact(&format!("{name}_gelu"), &wide)?;
        }
        Ok((l.project("router_logits", &n, "router_logits")?, state))
    }

    fn lower_moe(&self, mut l: Lowering<'_>, layer: usize, unit: &ExpertUnit) -> Result<BuiltFunction> {
        let experts: Vec<usize> = unit.experts.clone().collect();
        let x = l.stream_input(INPUT, self.decoder.hidden)?;
        if !unit.has_own_part {
            let routing = l.stream_input("routing", experts.len())?;
            let activation = self.decoder.layers[layer].activation;
            let sum = l.experts("experts_out", &x, &routing, &experts, activation)?;
            return l.finish_streams(&[&sum]);
        }
        let before = self.router_state_input(&mut l, layer)?;
        if experts.is_empty() {
            let (logits, state) = self.route(&mut l, &x, before.as_ref())?;
            return l.finish_streams(&[&logits, &state]);
        }
        let (out, state, _) = self.moe(&mut l, layer, &x, before.as_ref(), &experts)?;
        l.finish_streams(&[&out, &state])
    }

    /// Declares the input with the state of the previous layer's router; the first layer has none.
    fn router_state_input(&self, l: &mut Lowering<'_>, layer: usize) -> Result<Option<Var>> {
        let (_, width, _) = self.networked(layer)?;
        (layer > 0).then(|| l.stream_input(ROUTER_STATE, width)).transpose()
    }

    /// Computes the branch of all experts, the state for the next layer's router, and the logits of this router, from
    /// the normalized stream and the state of the previous layer's router.
    fn moe(
        &self,
        l: &mut Lowering<'_>,
        layer: usize,
        x: &Var,
        before: Option<&Var>,
        experts: &[usize],
    ) -> Result<(Var, Var, Var)> {
        let (e, _, passes_input) = self.networked(layer)?;
        let (logits, state) = self.route(l, x, before)?;
        let probabilities = l.f().softmax("router_probabilities", &logits, 1)?;
        let routing = l.top_1("routing_weight", &probabilities, "balancing_biases", e.classes())?;
        let name = if passes_input { "experts_sum" } else { "experts_out" };
        let activation = self.decoder.layers[layer].activation;
        let (sum, weight) = l.experts_and_skip(name, x, &routing, experts, activation)?;
        if !passes_input {
            return Ok((sum, state, logits));
        }
        let kept = l.f().mul("skip", x, &weight)?;
        Ok((l.f().add("experts_out", &sum, &kept)?, state, logits))
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
    fn lower_layers(
        &self,
        mut l: Lowering<'_>,
        layers: Range<usize>,
        with_choices: bool,
        history: HistoryForm,
        shape: &AttentionDims,
    ) -> Result<BuiltFunction> {
        let norm = self.stream_norm();
        let experts: Vec<usize> = (0..self.networked(layers.start)?.0.count).collect();
        let mut stream = l.stream_input(HIDDEN, self.decoder.hidden)?;
        let mut state = self.router_state_input(&mut l, layers.start)?;
        let at = self.declare_positions(&mut l, layers.start, shape)?;
        // One carry selects the rows of all layers; rows that the host keeps are an input of each layer.
        let carry = match history {
            HistoryForm::State => self.history(&mut l, layers.start, shape)?,
            HistoryForm::Host => None,
        };
        let [(attention_norm, _, attention_residual), (moe_norm, _, moe_residual)] = HALVES;
        let (mut added, mut kept, mut choices): (Option<Var>, Vec<Var>, Vec<Var>) = Default::default();
        for (i, layer) in layers.clone().enumerate() {
            l.set_scope(&layer_scope(i));
            let x = l.rms_norm_weighted(attention_norm, &stream, norm)?;
            let old = match &carry {
                Some(carry) => Some(carry.clone()),
                None => self.history(&mut l, layer, shape)?,
            };
            let inputs = AttentionInputs { at: &at, history: old.as_ref(), shared: None };
            let (branch, rows) = self.attention(&mut l, (layer, "attended"), &x, inputs, shape)?;
            kept.extend(rows);
            let (middle, sum) = join(&mut l, attention_residual, &stream, added.as_ref(), &branch, false)?;
            let x = l.rms_norm_weighted(moe_norm, &middle, norm)?;
            let (branch, next, choice) = self.moe(&mut l, layer, &x, state.as_ref(), &experts)?;
            choices.extend(with_choices.then_some(choice));
            let is_last = i + 1 == layers.len();
            let joined = join(&mut l, moe_residual, &middle, Some(&sum), &branch, is_last)?;
            (stream, added, state) = (joined.0, Some(joined.1), Some(next));
        }
        let outputs: Vec<&Var> = added.iter().chain(&state).chain(&choices).collect();
        l.finish_attention(&outputs, &kept)
    }
}

/// Makes the step that joins a branch with the host's stream.
fn residual_step(branch: &str, vectors: String) -> Step {
    Step::Residual { stream: HIDDEN.into(), branch: Some(branch.into()), vectors }
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
    let [branch_scale, branch_bias, stream_scale, stream_bias] = AFFINE.map(n);
    let (scale, stream_scale) = (l.vector(&branch_scale)?, l.vector(&stream_scale)?);
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
    let (bias, stream_bias) = (l.vector(&branch_bias)?, l.vector(&stream_bias)?);
    let f = l.f();
    let shifted = f.add(&n("branch_shifted"), branch, &bias)?;
    let scaled = f.mul(&n("branch_scaled"), &shifted, &scale)?;
    let shifted = f.add(&n("stream_shifted"), stream, &stream_bias)?;
    let kept = f.mul(&n("stream_scaled"), &shifted, &stream_scale)?;
    Ok((f.add(&n("stream"), &scaled, &kept)?, added))
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
    let name = layers_name(layers, PARTS);
    let vectors = [("scale", scale), ("branch_scale", vec![1.0; hidden]), ("shift", shift)];
    vectors.into_iter().map(|(part, values)| (format!("{name}.{part}"), values)).collect()
}
