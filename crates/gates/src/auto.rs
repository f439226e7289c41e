//! `--quant auto`: chooses a kind per tensor by measured errors of tensors and of the whole model.

use crate::checkpoint_text::{MAX_BY_ROLE, MAX_WHOLE};
use crate::golden_gate::{cosine, divergence};
use crate::perplexity::each_window;
use crate::reference::{self, HEAD, Probe, RunOptions};
use crate::text_feedback::Candidates;
use anemoe_bundle::{AutoChoice, IndexBits, UniformResult};
use anemoe_convert::checkpoint::Checkpoint;
use anemoe_convert::importance::Importance;
use anemoe_convert::kind_search::{self, Choice, ExpertUse, Group, KINDS, Objective};
use anemoe_convert::models::{BY_NORM, Family};
use anemoe_convert::plan::{MatrixPlan, Plan};
use anemoe_convert::quant::Quant;
use anemoe_convert::quantize::q4_0;
use anemoe_convert::{Error, Result};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Kind with which the model's sensitivity to each tensor is measured: coarse enough that its error stands out from rounding.
const PROBE_KIND: Quant = Quant::lut(IndexBits::Three);

/// Factor of the divergence of chosen kinds on texts that they were not chosen on: 1.4 and 1.6 for two models.
const UNSEEN: f64 = 1.5;
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
    /// Importances of inputs; without them, all inputs count the same.
    pub importance: Option<&'a Importance>,
    /// Matrices that were compressed for a text; without them, candidates are compressed without one.
    pub candidates: Option<&'a Candidates>,
    /// Windows of token ids that are run.
    pub windows: &'a [Vec<u32>],
    /// Name of the windows' source, for people.
    pub text: String,
}

/// Distance of logits from the uncompressed model's.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Distance {
    /// Mean cosine of the logits.
    mean: f64,
    /// Lowest cosine of the logits.
    min: f64,
    /// Loss that the search makes small: mean Kullback-Leibler divergence of the next token's distribution from the
    /// uncompressed model's, in nats.
    loss: f64,
}

/// Returns the name under which a probe replaces a group's tensor.
fn name_of(group: &Group) -> String {
    if group.part == "head" { HEAD.to_string() } else { group.tensor.clone() }
}

/// Whole model that is run with compressed weights.
struct WholeModel<'a, 'b> {
    search: &'a KindSearch<'a>,
    matrices: BTreeMap<(String, String), Vec<MatrixPlan>>,
    plan: &'a Plan,
    reference: Vec<Vec<f32>>,
    decoded: BTreeMap<(usize, usize), Arc<Vec<f32>>>,
    progress: &'b mut dyn FnMut(),
}

impl WholeModel<'_, '_> {
    fn logits(&mut self, probe: &Probe) -> Result<Vec<Vec<f32>>> {
        let mut rows = Vec::new();
        let search = self.search;
        each_window(search.checkpoint, Some(probe), search.windows, &mut || {}, &mut |_, logits| {
            rows.extend(logits);
        })?;
        (self.progress)();
        Ok(rows)
    }

    /// Runs the uncompressed model: keeps its logits, and counts the experts that its tokens choose.
    fn run_reference(&mut self) -> Result<ExpertUse> {
        let mut used = ExpertUse::default();
        let mut model = reference::open(self.search.checkpoint, None)?;
        for window in self.search.windows {
            model.reset();
            let options = RunOptions { routing: true, ..RunOptions::default() };
            let pass = model.forward(window, options, &mut || {})?;
            self.reference.extend(pass.logits);
            used.tokens += window.len() as u64;
            used.chosen.resize(pass.router_index.len(), vec![0; self.plan.totals.experts]);
            for (counts, layer) in used.chosen.iter_mut().zip(&pass.router_index) {
                for &expert in layer.iter().flatten() {
                    // A token that skips its expert reads no expert.
                    if let Some(n) = counts.get_mut(expert as usize) {
                        *n += 1;
                    }
                }
            }
        }
        (self.progress)();
        Ok(used)
    }

    /// Returns the decoded values of a group's tensor in one kind, or `None` for fp16.
    fn values(&mut self, groups: &[Group], group: usize, candidate: usize) -> Result<Option<Arc<Vec<f32>>>> {
        let kind = groups[group].candidates[candidate].kind;
        if kind == Quant::Fp16 {
            return Ok(None);
        }
        if let Some(found) = self.decoded.get(&(group, candidate)) {
            return Ok(Some(found.clone()));
        }
        let key = (groups[group].tensor.clone(), groups[group].part.clone());
        let for_text = self.search.candidates.map(|c| c.values(&key, kind)).transpose()?.flatten();
        let values = match for_text {
            Some(values) => values,
            None => {
                let (family, groups) = (self.search.family, self.plan.options.groups);
                kind_search::decoded(family, &self.matrices[&key], kind, groups, self.search.importance)?.0
            }
        };
        let values = Arc::new(self.in_order(&key.0, values)?);
        if self.plan.totals.params <= MAX_WHOLE {
            self.decoded.insert((group, candidate), values.clone());
        }
        Ok(Some(values))
    }

    /// Puts the rows of a tensor that is stored in another order back into the checkpoint's.
    fn in_order(&self, tensor: &str, values: Vec<f32>) -> Result<Vec<f32>> {
        let Some(matrix) = tensor.strip_suffix(BY_NORM) else { return Ok(values) };
        let order = self.search.family.checked_checkpoint().rows_by_norm(matrix)?;
        let cols = values.len() / order.len();
        let mut out = vec![0f32; values.len()];
        for (row, &id) in values.chunks_exact(cols).zip(order) {
            out[id as usize * cols..][..cols].copy_from_slice(row);
        }
        Ok(out)
    }

    /// Measures the distance of the model with all matrices in GGUF's Q4_0.
    fn of_q4(&mut self, groups: &[Group]) -> Result<Distance> {
        let mut probe = Probe::default();
        for g in groups {
            let key = (g.tensor.clone(), g.part.clone());
            let mut matrices: Vec<&MatrixPlan> = self.matrices[&key].iter().collect();
            matrices.sort_by_key(|m| m.offset);
            let mut values = Vec::new();
            for m in matrices {
                let mut own = vec![0f32; m.weights() as usize];
                self.search.family.read(&m.tensor, m.offset..m.offset + m.weights(), &mut own)?;
                own.chunks_mut(m.cols).for_each(q4_0::round_trip);
                values.extend(own);
            }
            probe.replaced.insert(name_of(g), Arc::new(self.in_order(&g.tensor, values)?));
        }
        self.distance_with(&probe)
    }

    /// Runs the model with the kinds of a choice, and measures its distance. Groups without a kind keep their weights.
    fn distance(&mut self, groups: &[Group], choice: &[Option<usize>]) -> Result<Distance> {
        let mut probe = Probe::default();
        for (g, candidate) in choice.iter().enumerate() {
            let Some(candidate) = candidate else { continue };
            if let Some(values) = self.values(groups, g, *candidate)? {
                probe.replaced.insert(name_of(&groups[g]), values);
            }
        }
        self.distance_with(&probe)
    }

    /// Runs the model with the weights of a probe, and measures its distance.
    fn distance_with(&mut self, probe: &Probe) -> Result<Distance> {
        let logits = self.logits(probe)?;
        let cosines: Vec<f64> = logits.iter().zip(&self.reference).map(|(a, b)| cosine(a, b)).collect();
        let losses = logits.iter().zip(&self.reference).map(|(a, b)| divergence(b, a));
        Ok(Distance {
            loss: losses.sum::<f64>() / cosines.len().max(1) as f64,
            mean: cosines.iter().sum::<f64>() / cosines.len().max(1) as f64,
            min: cosines.iter().copied().fold(1.0, f64::min),
        })
    }

    fn of_choice(&mut self, groups: &[Group], choice: &Choice) -> Result<Distance> {
        self.distance(groups, &choice.iter().map(|&i| Some(i)).collect::<Vec<_>>())
    }
}

/// Chooses kinds for a plan and applies them. `progress` hears the name of the work, the steps done and the steps in all.
///
/// # Errors
/// The goal cannot be reached, or cannot be measured on a model of this size. The checkpoint cannot be read.
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

/// Kinds by tensor and part of the model.
pub type Kinds = BTreeMap<(String, String), Quant>;

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
    let whole = plan.totals.params <= MAX_BY_ROLE && !search.windows.is_empty();
    if !whole && goals.iter().any(|g| !matches!(g.bound, SearchBound::MaxBytes(_))) {
        return Err(Error::usage(format!(
            "--quant auto with --min-cosine, --max-kl or --like runs the whole model many times, which is done up to \
             {MAX_BY_ROLE} parameters; this one has {}: give --max-bytes",
            plan.totals.params
        )));
    }
    let mut groups =
        kind_search::measure(search.family, plan, search.importance, !whole, &mut |done, total| {
            progress("tensors", done, total);
        })?;
    let measured_on = match whole {
        true => format!(
            "{}: the whole model in f32 on {} tokens, each {} share from {PROBE_KIND}{}",
            search.text,
            search.windows.iter().map(Vec::len).sum::<usize>(),
            if plan.totals.params <= MAX_WHOLE { "tensor's" } else { "role's" },
            if search.candidates.is_some() { ", compressed for a text" } else { "" }
        ),
        false => "a sample of each tensor's weights; every tensor is taken as equally sensitive".into(),
    };
    let found =
        |groups: &[Group], goal: String, choice: &Choice, distance: Option<Distance>, uniform| AutoChoice {
            goal,
            measured_on: measured_on.clone(),
            bytes: kind_search::cost(groups, choice, Objective::Size),
            bytes_read_per_token: Some(kind_search::cost(groups, choice, Objective::Speed)),
            mean_kl: distance.map(|d| d.loss),
            min_cosine: distance.map(|d| d.min),
            mean_cosine: distance.map(|d| d.mean),
            tensors: kind_search::explain(groups, choice),
            uniform,
        };
    let mut all = Vec::new();
    if !whole {
        kind_search::share_reads(plan, &mut groups, None);
        for &goal in goals {
            let SearchBound::MaxBytes(limit) = goal.bound else { unreachable!("refused above") };
            let choice = kind_search::within(&groups, limit, goal.objective)?;
            let kinds = kind_search::kinds(&groups, &choice);
            all.push((found(&groups, goal.to_string(), &choice, None, Vec::new()), kinds));
        }
        return Ok(all);
    }
    let runs = groups.len() + KINDS.len() + (10 + SMALLER_STEPS) * goals.len();
    let mut done = 0;
    let mut tick = || {
        done += 1;
        progress("runs of the model", done, runs);
    };
    let mut model = WholeModel {
        search,
        matrices: kind_search::matrices(plan),
        plan,
        reference: Vec::new(),
        decoded: BTreeMap::new(),
        progress: &mut tick,
    };
    let used = model.run_reference()?;
    kind_search::share_reads(plan, &mut groups, Some(&used));
    sensitivities(&mut model, &mut groups)?;
    let mut uniform = Vec::new();
    for (k, kind) in KINDS.into_iter().enumerate() {
        let choice: Choice = vec![k; groups.len()];
        let d = model.of_choice(&groups, &choice)?;
        uniform.push((choice, d, kind));
    }
    for &asked in goals {
        let (mut goal, mut name) = (asked, asked.to_string());
        if goal.bound == SearchBound::LikeQ4 {
            let loss = model.of_q4(&groups)?.loss;
            goal.bound = SearchBound::MaxKl(loss / UNSEEN);
            name += &format!(", of {loss:.5} nats");
        }
        let (choice, distance) = match goal.bound {
            SearchBound::MaxBytes(limit) => {
                best_within(&mut model, &groups, limit, goal.objective, &uniform)?
            }
            _ => smallest(&mut model, &groups, goal, &uniform)?,
        };
        let result = |(choice, d, kind): &Uniform| UniformResult {
            kind: kind.to_string(),
            bytes: kind_search::cost(&groups, choice, Objective::Size),
            min_cosine: d.min,
            mean_cosine: d.mean,
        };
        let uniform = uniform.iter().map(result).collect();
        let kinds = kind_search::kinds(&groups, &choice);
        all.push((found(&groups, name, &choice, Some(distance), uniform), kinds));
    }
    Ok(all)
}

/// Measures the loss per unit of output error of each tensor, by compressing one tensor at a time with
/// [`PROBE_KIND`]; of larger models, all tensors of one role at a time.
fn sensitivities(model: &mut WholeModel<'_, '_>, groups: &mut [Group]) -> Result<()> {
    let probe = KINDS.iter().position(|k| *k == PROBE_KIND).unwrap_or(0);
    let mut together: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (g, group) in groups.iter().enumerate() {
        let is_role = model.plan.totals.params > MAX_WHOLE;
        let role = group.tensor.chars().filter(|c| !is_role || !c.is_ascii_digit());
        together.entry(role.chain(group.part.chars()).collect()).or_default().push(g);
    }
    let mut found = vec![0.0; groups.len()];
    for members in together.values() {
        let mut choice = vec![None; groups.len()];
        members.iter().for_each(|&g| choice[g] = Some(probe));
        let distance = model.distance(groups, &choice)?;
        let error: f64 = members.iter().map(|&g| groups[g].candidates[probe].error).sum();
        let sensitivity = if error > 0.0 { distance.loss.max(0.0) / error } else { 0.0 };
        members.iter().for_each(|&g| found[g] = sensitivity);
    }
    // No tensor gets less than 1 % of the mean: one without an effect on this text may have an effect on others.
    let typical = found.iter().sum::<f64>() / found.len().max(1) as f64;
    for (group, sensitivity) in groups.iter_mut().zip(found) {
        group.sensitivity = sensitivity.max(0.01 * typical);
    }
    Ok(())
}

type Uniform = (Choice, Distance, Quant);

/// Finds the cheapest choice that reaches a goal of quality, by bisection along the path of choices.
fn smallest(
    model: &mut WholeModel<'_, '_>,
    groups: &[Group],
    goal: Goal,
    uniform: &[Uniform],
) -> Result<(Choice, Distance)> {
    let path = kind_search::path(groups, goal.objective);
    let top = path.len() - 1;
    let mut best = (path[top].clone(), model.of_choice(groups, &path[top])?);
    if !goal.bound.admits(best.1) {
        let (option, reached) = match goal.bound {
            SearchBound::MaxKl(nats) => (format!("--max-kl {nats}"), format!("{:.2e} nats", best.1.loss)),
            SearchBound::MinCosine(c) => (format!("--min-cosine {c}"), format!("{:.6}", best.1.min)),
            SearchBound::MaxBytes(n) => (format!("--max-bytes {n}"), String::new()),
            SearchBound::LikeQ4 => ("--like q4_0".into(), String::new()),
        };
        return Err(Error::usage(format!("{option}: the most exact kinds reach {reached} over the text")));
    }
    // Losses are noisy, so bisection finds a place where the goal is just reached, not always the first one.
    let (mut low, mut high) = (0, top);
    while low < high {
        let mid = low.midpoint(high);
        let d = model.of_choice(groups, &path[mid])?;
        if goal.bound.admits(d) {
            best = (path[mid].clone(), d);
            high = mid;
        } else {
            low = mid + 1;
        }
    }
    // A large step ends the path where smaller ones before it would still fit.
    let more = if model.search.candidates.is_some() { SMALLER_STEPS } else { 0 };
    for step in path[..=low].windows(2).rev().take(more) {
        let Some(g) = (0..groups.len()).find(|&g| step[0][g] != step[1][g] && best.0[g] == step[1][g]) else {
            continue;
        };
        let mut choice = best.0.clone();
        choice[g] = step[0][g];
        let d = model.of_choice(groups, &choice)?;
        if goal.bound.admits(d) {
            best = (choice, d);
        }
    }
    let cost = |choice: &Choice| kind_search::cost(groups, choice, goal.objective);
    for (choice, d, _) in uniform {
        if goal.bound.admits(*d) && cost(choice) < cost(&best.0) {
            best = (choice.clone(), *d);
        }
    }
    Ok(best)
}

/// Finds the choice with the least loss whose cost by `objective` is at most `limit` bytes.
fn best_within(
    model: &mut WholeModel<'_, '_>,
    groups: &[Group],
    limit: u64,
    objective: Objective,
    uniform: &[Uniform],
) -> Result<(Choice, Distance)> {
    let choice = kind_search::within(groups, limit, objective)?;
    let mut best = (choice.clone(), model.of_choice(groups, &choice)?);
    for (choice, d, _) in uniform {
        if kind_search::cost(groups, choice, objective) <= limit && d.loss < best.1.loss {
            best = (choice.clone(), *d);
        }
    }
    Ok(best)
}
