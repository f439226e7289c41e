//! `--quant auto`: chooses a kind per tensor by measured errors of tensors and of the whole model.

use crate::checkpoint_text::MAX_WHOLE;
use crate::many_runs::{Distance, ManyRuns, ReplacedSet, ReplacedTensor};
use crate::reference::HEAD;
use crate::search_record::SearchRecord;
use crate::text_feedback::{Candidates, windows_sha256};
use anemoe_bundle::{AutoChoice, IndexBits, UniformResult};
use anemoe_convert::build;
use anemoe_convert::checkpoint::Checkpoint;
use anemoe_convert::importance::Importance;
use anemoe_convert::kind_search::{self, Choice, Group, KINDS, Kinds, Objective};
use anemoe_convert::models::{BY_NORM, Family};
use anemoe_convert::plan::{MatrixPlan, Plan, PlanOptions};
use anemoe_convert::quant::Quant;
use anemoe_convert::{Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Kind with which the model's sensitivity to each tensor is measured: coarse enough that its error stands out from rounding.
const PROBE_KIND: Quant = Quant::lut(IndexBits::Three);

/// Factor that the divergence of chosen kinds grows by, beside Q4_0's, on texts that they were not chosen on: at most 1.18 for
/// three models and two texts.
const UNSEEN: f64 = 1.2;
/// Divergence in nats that counts as none: a checkpoint on the lattice of Q4_0 loses nothing by it.
const NOTHING: f64 = 1e-5;
/// Points of a path of choices that are tried at once, and how often the part between two of them is cut like this.
const POINTS: usize = 16;
const ROUNDS: usize = 2;
/// Most decoded weights of a layer of a large model that are kept in memory while runs go through it.
const DECODED: usize = 1 << 29;
/// Most steps behind the last one that fits which are tried by themselves, where matrices are compressed for a text: such
/// a search takes minutes anyway.
const SMALLER_STEPS: usize = 24;

/// Goal of a choice of kinds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goal {
    /// Objective: the kind of bytes that is saved, and that [`SearchBound::MaxBytes`] bounds.
    pub objective: Objective,
    /// Bound on the quality or on the bytes.
    pub bound: SearchBound,
}

/// Bound of a search: the user gives the quality or the bytes, and the search optimizes the other one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SearchBound {
    /// Lowest cosine of logits over the text; the search saves bytes.
    MinCosine(f64),
    /// Largest mean divergence of the next token's distribution over the text, in nats; the search saves bytes.
    MaxKl(f64),
    /// Most bytes; the search makes the loss small.
    MaxBytes(u64),
    /// The mean divergence that GGUF's Q4_0 of the same matrices has; the search saves bytes.
    LikeQ4,
}

impl SearchBound {
    /// Tells whether a distance satisfies a bound of quality; bounds of bytes admit every distance.
    fn admits(self, distance: Distance) -> bool {
        match self {
            SearchBound::MinCosine(c) => distance.min >= c,
            SearchBound::MaxKl(nats) => distance.loss <= nats,
            SearchBound::MaxBytes(_) | SearchBound::LikeQ4 => true,
        }
    }
}

impl std::fmt::Display for Goal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.bound {
            SearchBound::MinCosine(c) => write!(f, "min_cosine {c}")?,
            SearchBound::MaxKl(nats) => write!(f, "max_kl {nats}")?,
            SearchBound::MaxBytes(n) => write!(f, "max_bytes {n}")?,
            SearchBound::LikeQ4 => write!(f, "like q4_0")?,
        }
        match self.objective {
            Objective::Size => Ok(()),
            Objective::Speed => write!(f, ", for speed"),
        }
    }
}

/// Inputs of a search for kinds.
pub struct KindSearch<'a> {
    /// Checkpoint that is run in f32.
    pub checkpoint: &'a Checkpoint,
    /// Family of the same checkpoint, which reads tensors to be compressed.
    pub family: &'a Family,
    /// Family of the checkpoint as it is stored, where the other is rotated: Q4_0 stores those weights.
    pub stored: Option<&'a Family>,
    /// Importances of inputs; without them, all inputs count the same.
    pub importance: Option<&'a Importance>,
    /// Matrices that were compressed for a text; without them, candidates are compressed without one.
    pub candidates: Option<&'a Candidates>,
    /// Record of what was measured; without it, everything is measured.
    pub record: Option<&'a SearchRecord>,
    /// Windows of token ids that are run.
    pub windows: &'a [Vec<u32>],
    /// Name of the windows' source, for people.
    pub text: String,
}

impl KindSearch<'_> {
    /// Returns the answer to a question, from the record where it was measured before.
    fn once<T: Serialize + DeserializeOwned>(
        &self,
        question: &impl Serialize,
        measure: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        match self.record {
            Some(record) => record.once(question, measure),
            None => measure(),
        }
    }

    /// Hashes all that decides what a search over `plan` measures; `calibration` are all windows that weights are
    /// compressed for, where they are for any.
    ///
    /// # Errors
    /// The checkpoint cannot be read.
    pub fn identity(&self, plan: &Plan, calibration: Option<&[Vec<u32>]>) -> Result<String> {
        let plan = build::plan_sha256(self.family, plan, self.importance)?;
        let windows = [Some(self.windows), calibration].map(|w| w.map(windows_sha256));
        let inputs = serde_json::json!([env!("CARGO_PKG_VERSION"), plan, windows]);
        Ok(anemoe_bundle::sha256(inputs.to_string().as_bytes()))
    }
}

/// Model that is run with compressed weights, for many choices of kinds at once.
struct CompressedRuns<'a, 'b> {
    search: &'a KindSearch<'a>,
    plan: &'a Plan,
    groups: &'a [Group],
    tensors: &'a [ReplacedTensor],
    /// Values of groups in their kinds: of all groups of a small model, else of one layer.
    decoded: BTreeMap<(usize, usize), Arc<Vec<f32>>>,
    /// Is called after each layer of many runs.
    tick: &'b dyn Fn(),
}

impl<'a, 'b> CompressedRuns<'a, 'b> {
    fn new(
        search: &'a KindSearch<'a>,
        plan: &'a Plan,
        groups: &'a [Group],
        tensors: &'a [ReplacedTensor],
        tick: &'b dyn Fn(),
    ) -> Self {
        CompressedRuns { search, plan, groups, tensors, decoded: BTreeMap::new(), tick }
    }

    /// Returns the values of a group's tensor in one of its kinds.
    fn values(&mut self, group: usize, candidate: usize) -> Result<Arc<Vec<f32>>> {
        if let Some(found) = self.decoded.get(&(group, candidate)) {
            return Ok(found.clone());
        }
        if self.plan.totals.params > MAX_WHOLE {
            let layer = &self.tensors[group].layer;
            self.decoded.retain(|&(g, _), _| self.tensors[g].layer == *layer);
            if self.decoded.values().map(|v| v.len()).sum::<usize>() > DECODED {
                self.decoded.clear();
            }
        }
        let own = &self.groups[group];
        let kind = own.candidates[candidate].kind;
        let values = match self.search.candidates.map(|c| c.values(own, kind)).transpose()?.flatten() {
            Some(for_text) => for_text,
            None => {
                let (family, groups) = (self.search.family, self.plan.options.groups);
                kind_search::decoded(family, &own.matrices, kind, groups, self.search.importance)?.0
            }
        };
        let values = Arc::new(self.in_order(&own.tensor, values)?);
        self.decoded.insert((group, candidate), values.clone());
        Ok(values)
    }

    /// Puts the rows of a tensor that is stored in another order back into the checkpoint's.
    fn in_order(&self, tensor: &str, values: Vec<f32>) -> Result<Vec<f32>> {
        let Some(matrix) = tensor.strip_suffix(BY_NORM) else { return Ok(values) };
        let order = self.search.family.checked.rows_by_norm(matrix)?;
        let cols = values.len() / order.len();
        let mut out = vec![0f32; values.len()];
        for (row, &id) in values.chunks_exact(cols).zip(order) {
            out[id as usize * cols..][..cols].copy_from_slice(row);
        }
        Ok(out)
    }

    /// Runs the model once for each of `runs`, and measures the distances.
    fn of_runs(&mut self, runs: &[ReplacedSet]) -> Result<Vec<Distance>> {
        let (tensors, tick) = (self.tensors, self.tick);
        let (checkpoint, windows) = (self.search.checkpoint, self.search.windows);
        let model = ManyRuns { checkpoint, tensors, windows };
        let changed = |run: &ReplacedSet| -> Vec<(usize, usize)> {
            run.iter().enumerate().filter_map(|(g, candidate)| Some((g, (*candidate)?))).collect()
        };
        let question = ("distances", tensors, runs.iter().map(changed).collect::<Vec<_>>());
        let search = self.search;
        search.once(&question, || {
            let values = &mut |group, candidate| self.values(group, candidate);
            Ok(model.distances(runs, values, &mut || tick())?.0)
        })
    }

    /// Runs the model once for each of `choices`, and measures the distances.
    fn of_choices(&mut self, choices: &[Choice]) -> Result<Vec<Distance>> {
        let is_own = |group: usize, candidate: usize| {
            self.groups[group].candidates.get(candidate).is_some_and(|c| c.kind == Quant::Fp16)
        };
        let run = |choice: &Choice| -> ReplacedSet {
            choice.iter().enumerate().map(|(g, &c)| Some(c).filter(|&c| !is_own(g, c))).collect()
        };
        let runs: Vec<ReplacedSet> = choices.iter().map(run).collect();
        self.of_runs(&runs)
    }
}

/// Chooses kinds for a plan and applies them. `progress` hears the name of the work, the steps done and the steps in all.
///
/// # Errors
/// The goal cannot be reached, or the checkpoint cannot be read.
pub fn choose(
    search: &KindSearch<'_>,
    plan: &mut Plan,
    goal: Goal,
    progress: &mut dyn FnMut(&str, usize, usize),
) -> Result<AutoChoice> {
    let mut found = choose_each(search, plan, &[goal], progress)?;
    let (choice, kinds) = found.pop().ok_or_else(|| Error::usage("no goal"))?;
    plan.chain.auto = Some(choice.clone());
    kind_search::apply(plan, &kinds)?;
    Ok(choice)
}

/// Chooses kinds like [`choose`] for several goals, with one set of measurements. The plan stays as it is.
///
/// # Errors
/// Fails like [`choose`].
pub fn choose_each(
    search: &KindSearch<'_>,
    plan: &Plan,
    goals: &[Goal],
    progress: &mut dyn FnMut(&str, usize, usize),
) -> Result<Vec<(AutoChoice, Kinds)>> {
    let is_large = plan.totals.params > MAX_WHOLE;
    let mut show = |done, total| progress("tensors", done, total);
    let mut groups = search.once(&"errors of kinds", || {
        kind_search::measure(search.family, plan, search.importance, is_large, &mut show)
    })?;
    for goal in goals {
        if let (SearchBound::MaxBytes(limit), Objective::Size) = (goal.bound, goal.objective) {
            kind_search::within(&groups, limit, Objective::Size)?;
        }
    }
    let measured_on = format!(
        "{}: the whole model in f32 on {} tokens, with each {} by itself in {PROBE_KIND}{}",
        search.text,
        search.windows.iter().map(Vec::len).sum::<usize>(),
        if is_large { "part of a layer" } else { "tensor" },
        if search.candidates.is_some() { ", compressed for a text" } else { "" }
    );
    let more = if search.candidates.is_some() { 2 } else { 0 };
    let is_like_q4 = goals.iter().any(|g| g.bound == SearchBound::LikeQ4);
    let passes = 3 + usize::from(is_like_q4) + (ROUNDS + more) * goals.len();
    let steps = passes * (search.family.decoder.layers.len() + 1);
    let state = std::cell::RefCell::new((0, progress));
    let tick = || {
        let (done, progress) = &mut *state.borrow_mut();
        *done += 1;
        progress("layers", *done, steps);
    };
    let own = ManyRuns { checkpoint: search.checkpoint, tensors: &[], windows: search.windows };
    let no_values = &mut |_, _| Err(Error::usage("a run without replaced tensors asked for one"));
    let used = search.once(&"use of experts", || Ok(own.distances(&[], no_values, &mut || tick())?.1))?;
    // For speed, what an expert loses and what it costs grow alike with its use.
    if goals.iter().any(|g| g.objective == Objective::Size) {
        groups = kind_search::divide_by_use(plan, groups, &used);
    }
    kind_search::share_reads(plan, &mut groups, &used);
    let tensor = |g: &Group| {
        let layer = g.matrices.first().and_then(MatrixPlan::layer);
        let name = if g.part == "head" { HEAD.to_string() } else { g.tensor.clone() };
        ReplacedTensor { layer, name, experts: g.experts.clone() }
    };
    let tensors: Vec<ReplacedTensor> = groups.iter().map(tensor).collect();
    let sensitivity = {
        let of = groups.clone();
        sensitivities(&mut CompressedRuns::new(search, plan, &of, &tensors, &tick))?
    };
    groups.iter_mut().zip(sensitivity).for_each(|(g, found)| g.sensitivity = found);
    let model = &mut CompressedRuns::new(search, plan, &groups, &tensors, &tick);
    let same: Vec<Choice> = (0..KINDS.len()).map(|k| vec![k; groups.len()]).collect();
    let distances = model.of_choices(&same)?;
    let q4 = match is_like_q4 {
        true => search.once(&"q4_0", || q4_distance(search, plan, &groups, &tick))?.loss,
        false => 0.0,
    };
    let uniform: Vec<Uniform> =
        same.into_iter().zip(distances).zip(KINDS).map(|((choice, d), kind)| (choice, d, kind)).collect();
    let mut all = Vec::new();
    for &asked in goals {
        let (mut goal, mut name) = (asked, asked.to_string());
        if goal.bound == SearchBound::LikeQ4 {
            goal.bound = SearchBound::MaxKl((q4 / UNSEEN).max(NOTHING));
            name += &format!(", of {q4:.5} nats");
        }
        let (choice, distance) = match goal.bound {
            SearchBound::MaxBytes(limit) => best_within(model, limit, goal.objective, &uniform)?,
            _ => smallest(model, goal, &uniform)?,
        };
        let result = |(choice, d, kind): &Uniform| UniformResult {
            kind: kind.to_string(),
            bytes: kind_search::cost(&groups, choice, Objective::Size),
            min_cosine: d.min,
            mean_cosine: d.mean,
        };
        let found = AutoChoice {
            goal: name,
            measured_on: measured_on.clone(),
            bytes: kind_search::cost(&groups, &choice, Objective::Size),
            bytes_read_per_token: Some(kind_search::cost(&groups, &choice, Objective::Speed)),
            mean_kl: Some(distance.loss),
            min_cosine: Some(distance.min),
            mean_cosine: Some(distance.mean),
            tensors: kind_search::explain(&groups, &choice),
            uniform: uniform.iter().map(result).collect(),
        };
        all.push((found, kind_search::kinds(&groups, &choice)));
    }
    Ok(all)
}

/// Measures the model with the parts of all groups in GGUF's Q4_0, of the weights as they are stored.
fn q4_distance(search: &KindSearch<'_>, plan: &Plan, groups: &[Group], tick: &dyn Fn()) -> Result<Distance> {
    let family = search.stored.unwrap_or(search.family);
    let searched = |part: &str| groups.iter().any(|g| g.part == part);
    let plan = family.plan(&PlanOptions { sort_head: false, ..plan.options.clone() })?;
    let (mut tensors, mut matrices) = (Vec::new(), Vec::new());
    for ((tensor, part), own) in
        kind_search::matrices(&plan).into_iter().filter(|((_, part), _)| searched(part))
    {
        let name = if part == "head" { HEAD.to_string() } else { tensor };
        tensors.push(ReplacedTensor { layer: own[0].layer(), name, experts: Vec::new() });
        matrices.push(own);
    }
    let checkpoint = &family.checked.checkpoint;
    let model = ManyRuns { checkpoint, tensors: &tensors, windows: search.windows };
    let values = &mut |tensor: usize, _| Ok(Arc::new(kind_search::in_q4(family, &matrices[tensor])?));
    let (found, _) = model.distances(&[vec![Some(0); tensors.len()]], values, &mut || tick())?;
    Ok(found[0])
}

/// Measures the loss per unit of output error of each tensor, by compressing one tensor at a time with [`PROBE_KIND`];
/// of larger models, all tensors of a layer's part at a time, which share it by how often they are read.
fn sensitivities(model: &mut CompressedRuns<'_, '_>) -> Result<Vec<f64>> {
    let probe = KINDS.iter().position(|k| *k == PROBE_KIND).unwrap_or(0);
    /// Layer, part, tensor and experts of what one run compresses.
    type Measured<'a> = (Option<usize>, &'a str, &'a str, &'a [usize]);
    let mut together: BTreeMap<Measured<'_>, Vec<usize>> = BTreeMap::new();
    for (g, group) in model.groups.iter().enumerate() {
        let is_large = model.plan.totals.params > MAX_WHOLE;
        let (tensor, experts) = if is_large { ("", &[][..]) } else { (&*group.tensor, &*group.experts) };
        together.entry((model.tensors[g].layer, &group.part, tensor, experts)).or_default().push(g);
    }
    let members: Vec<Vec<usize>> = together.into_values().collect();
    let run = |members: &Vec<usize>| -> ReplacedSet {
        (0..model.groups.len()).map(|g| members.contains(&g).then_some(probe)).collect()
    };
    let runs: Vec<ReplacedSet> = members.iter().map(run).collect();
    let distances = model.of_runs(&runs)?;
    let mut found = vec![0.0; model.groups.len()];
    for (members, distance) in members.iter().zip(distances) {
        let part = |g: usize| model.groups[g].read * model.groups[g].experts.len().max(1) as f64;
        let error: f64 = members.iter().map(|&g| part(g) * model.groups[g].candidates[probe].error).sum();
        let sensitivity = if error > 0.0 { distance.loss.max(0.0) / error } else { 0.0 };
        members.iter().for_each(|&g| found[g] = sensitivity * part(g));
    }
    // No tensor gets less than 1 % of the mean: one without an effect on this text may have an effect on others.
    let typical = found.iter().sum::<f64>() / found.len().max(1) as f64;
    found.iter_mut().for_each(|f| *f = f.max(0.01 * typical));
    Ok(found)
}

type Uniform = (Choice, Distance, Quant);

/// Finds the cheapest choice that reaches a goal of quality: cuts the path of choices between points that reach it and
/// points that do not.
fn smallest(
    model: &mut CompressedRuns<'_, '_>,
    goal: Goal,
    uniform: &[Uniform],
) -> Result<(Choice, Distance)> {
    let path = kind_search::path(model.groups, goal.objective);
    let top = path.len() - 1;
    // Behind `low` points reach the goal, as far as was tried; the one at `best` is the first of them.
    let (mut low, mut best) = (0, None);
    for round in 0..ROUNDS {
        let high = best.as_ref().map_or(top + 1, |(at, _)| *at);
        let n = POINTS.min(high - low);
        let mut points: Vec<usize> = (0..n).map(|i| low + i * (high - low) / n).collect();
        if round == 0 {
            points.push(top);
        }
        points.dedup();
        let choices: Vec<Choice> = points.iter().map(|&at| path[at].clone()).collect();
        for (at, d) in points.into_iter().zip(model.of_choices(&choices)?).rev() {
            if !goal.bound.admits(d) {
                if at == top {
                    return Err(beyond(goal, d));
                }
                low = at + 1;
                break;
            }
            best = Some((at, d));
        }
        if best.is_some_and(|(at, _)| at <= low) {
            break;
        }
    }
    let Some((at, distance)) = best else { return Err(Error::usage("no choice was tried")) };
    let mut best = (path[at].clone(), distance);
    if model.search.candidates.is_some() {
        best = smaller_steps(model, goal, &path[..=at], best)?;
    }
    let cost = |choice: &Choice| kind_search::cost(model.groups, choice, goal.objective);
    for (choice, d, _) in uniform {
        if goal.bound.admits(*d) && cost(choice) < cost(&best.0) {
            best = (choice.clone(), *d);
        }
    }
    Ok(best)
}

/// Returns the error for a goal that the most exact choice, at distance `d`, misses.
fn beyond(goal: Goal, d: Distance) -> Error {
    let (option, reached) = match goal.bound {
        SearchBound::MinCosine(c) => (format!("--min-cosine {c}"), format!("{:.6}", d.min)),
        SearchBound::MaxKl(nats) => (format!("--max-kl {nats}"), format!("{:.2e} nats", d.loss)),
        SearchBound::MaxBytes(_) | SearchBound::LikeQ4 => (goal.to_string(), format!("{:.2e} nats", d.loss)),
    };
    Error::usage(format!("{option}: the most exact kinds reach {reached} over the text"))
}

/// Undoes steps of a path before its end, as many as the goal allows: a large step ends the path where smaller ones
/// before it would still fit. Steps are undone by the loss that each adds for its bytes.
fn smaller_steps(
    model: &mut CompressedRuns<'_, '_>,
    goal: Goal,
    path: &[Choice],
    best: (Choice, Distance),
) -> Result<(Choice, Distance)> {
    let undo = |choice: &Choice, (g, candidate): (usize, usize)| {
        let mut choice = choice.clone();
        choice[g] = candidate;
        choice
    };
    // One step of each tensor, the last.
    let mut steps: Vec<(usize, usize)> = Vec::new();
    for step in path.windows(2).rev() {
        let changed = (0..model.groups.len()).find(|&g| step[0][g] != step[1][g]);
        if let Some(g) = changed.filter(|g| !steps.iter().any(|s| s.0 == *g)) {
            steps.push((g, step[0][g]));
        }
        if steps.len() == SMALLER_STEPS {
            break;
        }
    }
    let single: Vec<Choice> = steps.iter().map(|&s| undo(&best.0, s)).collect();
    let cost = |choice: &Choice| kind_search::cost(model.groups, choice, goal.objective) as f64;
    let whole = cost(&best.0);
    let saved: Vec<f64> = single.iter().map(|choice| whole - cost(choice)).collect();
    let mut order: Vec<(f64, usize)> = model
        .of_choices(&single)?
        .iter()
        .enumerate()
        .map(|(i, d)| ((d.loss - best.1.loss) / saved[i].max(1.0), i))
        .collect();
    order.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut undone = Vec::new();
    let mut choice = best.0.clone();
    for (_, i) in order {
        choice = undo(&choice, steps[i]);
        undone.push(choice.clone());
    }
    let distances = model.of_choices(&undone)?;
    let fitting = undone.into_iter().zip(distances).rev().find(|(_, d)| goal.bound.admits(*d));
    Ok(fitting.unwrap_or(best))
}

/// Finds the choice with the least loss whose cost by `objective` is at most `limit` bytes.
fn best_within(
    model: &mut CompressedRuns<'_, '_>,
    limit: u64,
    objective: Objective,
    uniform: &[Uniform],
) -> Result<(Choice, Distance)> {
    let choice = kind_search::within(model.groups, limit, objective)?;
    let distance = model.of_choices(std::slice::from_ref(&choice))?[0];
    let mut best = (choice, distance);
    for (choice, d, _) in uniform {
        if kind_search::cost(model.groups, choice, objective) <= limit && d.loss < best.1.loss {
            best = (choice.clone(), *d);
        }
    }
    Ok(best)
}
