//! Shard probes: compare a shard with its FP16 form on stated inputs, so that a fault shows before hours are spent on
//! the other shards.
//!
//! A probe is the residual stream of some tokens before the shard's layer. Steps between the stream and the shard
//! (for a pack of experts, the layer's attention and the choice of experts) run in FP16 for both forms.

mod deciding_rule;
mod probe_context;
mod residual;
mod routing;
pub(crate) mod segment;

pub use deciding_rule::DecidingRule;
pub use probe_context::ProbeContext;
pub use residual::CosineRange;
pub use routing::{ExpertChoice, chooses_inside};
pub use segment::Segment;

use crate::golden_gate::cosine;
use crate::reference::Golden;
use crate::{Error, Result};
use anemoe_bundle::{Chain, Shard, ShardKind};
use anemoe_convert::build::check_scratch;
use anemoe_convert::models::{Family, is_synthetic};
use anemoe_convert::plan::{Plan, PlannedShard};
use anemoe_io::Random;
use anemoe_runtime::cpu::CpuBackend;
use anemoe_runtime::model::{Model, Registers};
use probe_context::{ProbeToken, fp16_path, write_fp16};
use residual::BothCosines;
use routing::{Flip, OwnRouter};
use segment::segment;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Default number of random probes.
pub const PROBES: usize = 8;
/// Default seed of random probes.
pub const SEED: u64 = 1;
/// Name of the input that takes a router's state from the layer before.
const ROUTER_STATE: &str = "router_state";
/// Share of the vocabulary's median embedding length below which a token is warned of: its norm output is mostly
/// rounding and epsilon.
const LOW_NORM: f64 = 0.05;

/// Inputs of the probes.
#[derive(Clone, Debug)]
pub struct Inputs<'a> {
    /// Number of random probes: one token each, a vector of length 1 in a random direction. The prompt tests
    /// attention over several tokens; between random tokens, attention is a random choice of one token.
    pub count: usize,
    /// Seed of the random directions.
    pub seed: u64,
    /// Golden with hidden states (and router states where the model's routers have them), whose prompt is one more
    /// probe.
    pub real: Option<&'a Golden>,
    /// Token that starts a text; a prompt that begins with it is warned of.
    pub bos: Option<u32>,
}

/// Results of the probes of some shards.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProbeReport {
    /// True if every shard passes.
    pub pass: bool,
    /// Cosine that a shard has to reach.
    pub threshold: f64,
    /// Rule that says at which positions the cosine has to be reached.
    pub rule: DecidingRule,
    /// Reason for the rule, in words.
    pub rule_reason: String,
    /// Form that the shards are compared with: `fp16`.
    pub against: &'static str,
    /// Seed of the random probes, see [`Inputs::seed`].
    pub seed: u64,
    /// Number of random probes, see [`Inputs::count`].
    pub random_probes: usize,
    /// Warnings: facts that make a figure less telling than it seems.
    pub warnings: Vec<String>,
    /// Results by shard.
    pub shards: Vec<ShardProbes>,
}

/// Results of the probes of one shard.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ShardProbes {
    /// Name of the shard.
    pub shard: String,
    /// Part of the model that the shard computes.
    pub kind: ShardKind,
    /// True if all results are numbers, zeros of the FP16 form are zero in the shard, at least one position counts,
    /// and every counted position (or the median, see [`DecidingRule`]) reaches the threshold.
    pub pass: bool,
    /// Median of the cosines at all counted positions.
    pub median_cosine: f64,
    /// Lowest cosine of the counted positions.
    pub min_cosine: f64,
    /// Mean cosine of the counted positions.
    pub mean_cosine: f64,
    /// Cosines of the shard's addition to the residual stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub branch: Option<CosineRange>,
    /// Cosines of the residual stream after the shard's addition.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub with_residual: Option<CosineRange>,
    /// Number of positions in the statistics.
    pub counted: usize,
    /// Number of positions where the FP16 form gives zero: the token chose none of the shard's experts. They are not
    /// in the statistics.
    pub no_active_expert: usize,
    /// Number of positions whose result is not a number, or overflows.
    pub not_finite: usize,
    /// Positions with a result that is zero in the FP16 form and not in the shard.
    pub not_zero: Vec<ProbePlace>,
    /// Counted positions below the threshold, lowest first.
    pub below: Vec<ProbePlace>,
    /// Choices of the shard's own router that differ from its FP16 form. Positions of near ties are excused: they do
    /// not count.
    pub choices: Vec<ExpertChoice>,
    /// Number of excused positions.
    pub excused: usize,
    /// Results by probe.
    pub probes: Vec<ProbeResult>,
}

/// A position of a probe.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProbePlace {
    /// Name of the probe.
    pub probe: String,
    /// Position in the probe.
    pub position: usize,
    /// Cosine of the position, where there is one.
    pub cosine: Option<f64>,
}

/// Result of one probe of one shard.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ProbeResult {
    /// Name of the probe: `random 0`, or `prompt`.
    pub probe: String,
    /// Cosine by position; the lowest one where the shard has several results, absent where no expert of the shard is active.
    pub positions: Vec<Option<f64>>,
    /// Cosine by position of the shard's addition to the residual stream; absent where the shard adds nothing, or a
    /// router's near tie excuses the position.
    pub branch: Vec<Option<f64>>,
    /// Cosine by position of the residual stream after the addition.
    pub with_residual: Vec<Option<f64>>,
}

/// Probes shards of a plan, whose packages `package` finds. Shards that take no single token are left out: they hold
/// the weights of shards that do.
///
/// # Errors
/// The golden does not fit the model, the checkpoint cannot be read, an FP16 form cannot be written, or a package is wrong.
pub fn probe(
    site: &ProbeContext<'_>,
    shards: &[&PlannedShard],
    package: &dyn Fn(&PlannedShard) -> PathBuf,
    inputs: &Inputs<'_>,
    threshold: f64,
    progress: &mut dyn FnMut(&str),
) -> Result<ProbeReport> {
    let references = fp16_references(site.family, site.plan, shards)?;
    let shards: Vec<&PlannedShard> = shards.iter().copied().filter(|s| s.takes_one_token()).collect();
    check_scratch(site.scratch, references.iter().map(|s| s.in_fp16().package_bytes()).sum())?;
    let is_searched = site.chain.auto.is_some() || site.plan.chain.auto.is_some();
    let (rule, rule_reason) = match is_searched {
        true => (DecidingRule::Median, "a search that measured the whole model chose the kinds".to_string()),
        false => DecidingRule::choose(inputs.real, is_synthetic(&site.chain.source)),
    };
    let threshold = if is_searched { threshold.min(SEARCHED_COSINE) } else { threshold };
    let mut found = Vec::new();
    for shard in shards {
        progress(&shard.name);
        found.push(one(site, shard, &package(shard), inputs, rule, threshold)?);
    }
    Ok(ProbeReport {
        pass: found.iter().all(|s| s.pass),
        threshold,
        rule,
        rule_reason,
        against: "fp16",
        seed: inputs.seed,
        random_probes: inputs.count,
        warnings: warnings(inputs, typical_norm(site)?),
        shards: found,
    })
}

/// Returns warnings about the prompt, to be read before its figures. `median` is the median length of the
/// vocabulary's embeddings.
fn warnings(inputs: &Inputs<'_>, median: f64) -> Vec<String> {
    let mut warnings = Vec::new();
    let Some(golden) = inputs.real else { return warnings };
    if inputs.bos.is_some() && golden.prompt_ids.first().copied() == inputs.bos {
        warnings.push(
            "the prompt begins with the token that starts a text: the values behind that token are unlike any \
             other's, and its cosine says nothing about other positions"
                .into(),
        );
    }
    let Some(states) = golden.hidden_states.first() else { return warnings };
    let norms = states.iter().map(|h| norm(h)).enumerate();
    for (position, norm) in norms.filter(|(_, n)| *n < LOW_NORM * median) {
        warnings.push(format!(
            "position {position} of the prompt has an embedding of length {norm:.2e}, {:.0} times shorter than the \
             vocabulary's median: its cosines say little",
            median / norm.max(f64::MIN_POSITIVE)
        ));
    }
    warnings
}

/// Cosine that the median of a shard's positions has to reach where a search chose the kinds: it spends bits where the
/// whole model needs them, and leaves few to shards that hardly matter.
const SEARCHED_COSINE: f64 = 0.9;
/// Name of the probe with the values that the prompt gives.
const PROMPT: &str = "prompt";
/// Rows of the embedding whose length is measured.
const SAMPLE: usize = 64;

/// Returns the median length of embeddings, measured on rows that are spread over the vocabulary.
fn typical_norm(site: &ProbeContext<'_>) -> Result<f64> {
    let embedding = &site.chain.embedding;
    let (rows, cols) = (embedding.rows, embedding.cols);
    let mut norms = Vec::new();
    let mut row = vec![0f32; cols];
    for i in 0..SAMPLE.min(rows) {
        let start = (i * rows / SAMPLE.min(rows) * cols) as u64;
        site.family.checked.read(
            &site.family.decoder.tensor(None, "embedding"),
            start..start + cols as u64,
            &mut row,
        )?;
        norms.push(norm(&row) * f64::from(embedding.scale));
    }
    norms.sort_by(f64::total_cmp);
    Ok(norms.get(norms.len() / 2).copied().unwrap_or(0.0))
}

fn norm(v: &[f32]) -> f64 {
    v.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
}

fn one(
    site: &ProbeContext<'_>,
    shard: &PlannedShard,
    package: &Path,
    inputs: &Inputs<'_>,
    rule: DecidingRule,
    threshold: f64,
) -> Result<ShardProbes> {
    let around = site.family.plan_around(&site.plan.options, shard)?;
    let segment = segment_of(&around, site.chain, shard)?;
    for s in &segment.chain.shards {
        if let Some(planned) = around.shard(&s.name) {
            write_fp16(site, planned)?;
        }
    }
    let backend = CpuBackend::default();
    let of_fp16 = |s: &Shard| fp16_path(site, &s.name);
    let of_own = |s: &Shard| if s.name == shard.name { package.to_path_buf() } else { of_fp16(s) };
    let fp16 = Model::with_chain(site.bundle, segment.chain.clone(), &backend, &of_fp16)?;
    let own = Model::with_chain(site.bundle, segment.chain.clone(), &backend, &of_own)?;

    let router = OwnRouter::of(site, shard)?;
    let mut found = ShardProbes::new(shard);
    let (mut cosines, mut both) = (Vec::new(), BothCosines::default());
    // Weights that are compressed for a text keep what texts need, and not random directions: these count where the prompt
    // reaches nothing of the shard.
    let is_for_text = site.chain.calibration.is_some() || site.family.calibration.is_some();
    let mut others = Vec::new();
    for (name, tokens) in tokens(site, shard, &segment, inputs)? {
        let flips = router.as_ref().map(|r| r.flips(&tokens)).transpose()?.unwrap_or_default();
        let (mut of_fp16, mut of_own) = (fp16.sequence(), own.sequence());
        let mut result = ProbeResult { probe: name.clone(), ..ProbeResult::default() };
        for (position, token) in tokens.iter().take(segment.chain.model.max_context).enumerate() {
            let registers: Vec<(&str, &[f32])> = token.iter().map(|(n, v)| (*n, v.as_slice())).collect();
            let mut read = |left: Registers<'_>| values(&segment.outputs, &left);
            let expected = fp16.pass_from(&mut of_fp16, 1, &registers, &mut read)?;
            let own = own.pass_from(&mut of_own, 1, &registers, &mut read)?;
            let compared = Compared::of(&expected, &own);
            let flip = flips.get(position).and_then(Option::as_ref);
            let excused = found.excused;
            if is_for_text && name != PROMPT {
                others.extend(found.count(&name, position, &compared, flip, f64::NEG_INFINITY));
            } else {
                cosines.extend(found.count(&name, position, &compared, flip, threshold));
            }
            let stream = token.iter().find(|(name, _)| *name == "hidden" && found.excused == excused);
            let outputs = segment.outputs.iter().zip(expected.iter().zip(&own));
            let added =
                outputs.filter_map(|(output, (expected, own))| both.add(output, &stream?.1, expected, own));
            let lowest = added.reduce(|a, b| [a[0].min(b[0]), a[1].min(b[1])]);
            result.positions.push(compared.cosine);
            result.branch.push(lowest.map(|[branch, _]| branch));
            result.with_residual.push(lowest.map(|[_, with]| with));
        }
        found.probes.push(result);
    }
    match cosines.is_empty() {
        true => found.finish(others, DecidingRule::Median, threshold),
        false => found.finish(cosines, rule, threshold),
    }
    (found.branch, found.with_residual) = (both.branch.range(), both.with_residual.range());
    Ok(found)
}

impl ShardProbes {
    fn new(shard: &PlannedShard) -> ShardProbes {
        ShardProbes {
            shard: shard.name.clone(),
            kind: shard.kind,
            pass: false,
            median_cosine: 0.0,
            min_cosine: 0.0,
            mean_cosine: 0.0,
            branch: None,
            with_residual: None,
            counted: 0,
            no_active_expert: 0,
            not_finite: 0,
            not_zero: Vec::new(),
            below: Vec::new(),
            choices: Vec::new(),
            excused: 0,
            probes: Vec::new(),
        }
    }

    /// Counts a position, and returns its cosine where the position is in the statistics.
    fn count(
        &mut self,
        probe: &str,
        position: usize,
        compared: &Compared,
        flip: Option<&Flip>,
        threshold: f64,
    ) -> Option<f64> {
        let cosine = compared.cosine;
        let place = || ProbePlace { probe: probe.to_string(), position, cosine };
        self.not_finite += usize::from(!compared.finite);
        self.choices.extend(flip.map(|f| ExpertChoice {
            probe: probe.to_string(),
            position,
            chosen: f.chosen.clone(),
            expected: f.expected.clone(),
            margin: f.margin,
            near_tie: f.is_near(),
            cosine,
        }));
        if compared.finite && flip.is_some_and(Flip::is_near) {
            self.excused += 1;
            return None;
        }
        if compared.not_zero {
            self.not_zero.push(place());
        } else if cosine.is_none() {
            self.no_active_expert += 1;
        }
        if cosine.is_some_and(|c| c < threshold) {
            self.below.push(place());
        }
        cosine
    }

    /// Computes the statistics from the cosines that count, and decides whether the shard passes.
    fn finish(&mut self, mut cosines: Vec<f64>, rule: DecidingRule, threshold: f64) {
        cosines.sort_by(f64::total_cmp);
        self.counted = cosines.len();
        self.median_cosine = cosines.get(cosines.len() / 2).copied().unwrap_or(0.0);
        self.min_cosine = cosines.first().copied().unwrap_or(0.0);
        self.mean_cosine = cosines.iter().sum::<f64>() / cosines.len().max(1) as f64;
        self.below.sort_by(|a, b| a.cosine.unwrap_or(0.0).total_cmp(&b.cosine.unwrap_or(0.0)));
        let reaches = match rule {
            DecidingRule::EveryPosition => self.below.is_empty(),
            DecidingRule::Median => self.median_cosine >= threshold,
        };
        self.pass = self.not_finite == 0 && self.not_zero.is_empty() && self.counted > 0 && reaches;
    }
}

/// Returns the values of the registers `outputs`.
fn values(outputs: &[String], registers: &Registers<'_>) -> Vec<Vec<f32>> {
    let of = |name: &String| registers.get(name).and_then(|t| t.as_f32()).unwrap_or_default().to_vec();
    outputs.iter().map(of).collect()
}

/// Results of a shard at one position, compared with its FP16 form.
struct Compared {
    /// Lowest cosine of the results; `None` where the FP16 form gives zeros only.
    cosine: Option<f64>,
    /// True if all results are numbers.
    finite: bool,
    /// True if a result is zero in the FP16 form and not in the shard.
    not_zero: bool,
}

impl Compared {
    fn of(expected: &[Vec<f32>], own: &[Vec<f32>]) -> Compared {
        let mut found = Compared { cosine: None, finite: true, not_zero: false };
        for (expected, own) in expected.iter().zip(own) {
            found.finite &= own.iter().chain(expected).all(|v| v.is_finite());
            if expected.iter().any(|&v| v != 0.0) {
                let c = cosine(own, expected);
                found.cosine = Some(found.cosine.map_or(c, |l| l.min(c)));
            } else {
                found.not_zero |= own.iter().any(|&v| v != 0.0);
            }
        }
        found
    }
}

/// Returns the part of a chain that leads to a shard. `around` is a plan around the shard (see
/// [`Family::plan_around`]), `chain` the bundle's.
///
/// # Errors
/// No step runs the shard.
pub fn segment_of(around: &Plan, chain: &Chain, shard: &PlannedShard) -> Result<Segment> {
    // A plan's chain has no shards yet; its steps need the shards' functions only.
    let shards = around.shards.iter().map(PlannedShard::chain_entry).collect();
    let known = Chain { shards, steps: around.chain.steps.clone(), ..chain.clone() };
    segment(&known, &shard.name)
        .ok_or_else(|| Error::usage(format!("no step of the chain runs shard {}", shard.name)))
}

/// Tells whether a golden recorded all states that probes of this plan's shards need.
pub fn suffices(golden: &Golden, plan: &Plan) -> bool {
    let with_states = !golden.hidden_states.is_empty();
    with_states && (!golden.router_states.is_empty() || !plan.chain.steps.iter().any(reads_router_state))
}

/// Tells whether a step reads the router state of the layer before.
fn reads_router_state(step: &anemoe_bundle::Step) -> bool {
    let anemoe_bundle::Step::Run(run) = step else { return false };
    run.inputs.contains_key(ROUTER_STATE)
}

/// Returns the shards whose FP16 forms the probes of `shards` need; also copies of shards with routers, which are
/// written in two forms.
///
/// # Errors
/// A shard is not in the plan.
pub fn fp16_references(family: &Family, plan: &Plan, shards: &[&PlannedShard]) -> Result<Vec<PlannedShard>> {
    let mut found: BTreeMap<String, PlannedShard> = BTreeMap::new();
    for shard in shards.iter().filter(|s| s.takes_one_token()) {
        let around = family.plan_around(&plan.options, shard)?;
        let segment = segment_of(&around, &plan.chain, shard)?;
        let needed = around.shards.into_iter().filter(|s| segment.chain.shard(&s.name).is_some());
        found.extend(needed.map(|s| (s.name.clone(), s)));
        // The routers of several layers are read in a copy of the shard's package, in both forms.
        if chooses_inside(shard) && shard.joined_layers().is_some() {
            found.extend([".own", ".fp16"].map(|form| (format!("{}{form}", shard.name), (*shard).clone())));
        }
    }
    Ok(found.into_values().collect())
}

/// Returns the probes of a shard: name and tokens.
fn tokens<'a>(
    site: &ProbeContext<'_>,
    shard: &PlannedShard,
    segment: &'a Segment,
    inputs: &Inputs<'_>,
) -> Result<Vec<(String, Vec<ProbeToken<'a>>)>> {
    let model = &site.chain.model;
    // Stream before the shard's layer; after the last layer for the head.
    let boundary = shard.layer.unwrap_or(model.num_layers);
    let seed_width = inputs.real.and_then(|g| g.router_states.first()?.first()).map(Vec::len);
    let mut all = Vec::new();
    let mut random = Random::new(inputs.seed);
    for probe in 0..inputs.count {
        let mut token: ProbeToken<'a> = vec![("hidden", unit_vector(&mut random, model.hidden_size))];
        for seed in &segment.seeds {
            let width = seed_width.ok_or_else(|| no_seed(shard, seed))?;
            token.push((seed, unit_vector(&mut random, width)));
        }
        all.push((format!("random {probe}"), vec![token]));
    }
    if let Some(golden) = inputs.real {
        let states = golden.hidden_states.get(boundary).filter(|s| s.len() == golden.prompt_ids.len());
        let states = states.filter(|s| s.iter().all(|h| h.len() == model.hidden_size)).ok_or_else(|| {
            Error::usage(format!(
                "the golden has no `hidden_states` of {} layers of width {} for its prompt",
                model.num_layers, model.hidden_size
            ))
        })?;
        let mut tokens = Vec::new();
        for (t, hidden) in states.iter().enumerate() {
            let mut token: ProbeToken<'a> = vec![("hidden", hidden.clone())];
            for seed in &segment.seeds {
                let before = boundary.checked_sub(1).and_then(|l| golden.router_states.get(l)?.get(t));
                token.push((seed, before.ok_or_else(|| no_seed(shard, seed))?.clone()));
            }
            tokens.push(token);
        }
        all.push((PROMPT.into(), tokens));
    }
    Ok(all)
}

fn no_seed(shard: &PlannedShard, register: &str) -> Error {
    Error::usage(format!(
        "the test of shard {} needs `{register}` of the layer before: the golden has no `router_states`",
        shard.name
    ))
}

/// Draws a vector of length 1 in a uniform direction, by normal deviates after Box and Muller.
fn unit_vector(random: &mut Random, n: usize) -> Vec<f32> {
    // In (0, 1]; exact, as both terms are multiples of 2^-53.
    let mut uniform = || random.uniform() + 1.0 / (1u64 << 53) as f64;
    let mut normal = || {
        let radius = libm::sqrt(-2.0 * libm::log(uniform()));
        radius * libm::cos(std::f64::consts::TAU * uniform())
    };
    let v: Vec<f64> = (0..n).map(|_| normal()).collect();
    let length = v.iter().map(|x| x * x).sum::<f64>().sqrt().max(f64::MIN_POSITIVE);
    v.iter().map(|x| (x / length) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard() -> ShardProbes {
        ShardProbes::new(&PlannedShard::new("s".into(), ShardKind::Moe, Some(0), vec![], vec![]))
    }

    /// Probes a shard at a threshold of 0.97; each position has results of the FP16 form, of the shard, and a
    /// router's margin.
    fn probed(positions: &[(&[f32], &[f32], Option<f64>)]) -> ShardProbes {
        probed_by(DecidingRule::EveryPosition, positions)
    }

    fn probed_by(rule: DecidingRule, positions: &[(&[f32], &[f32], Option<f64>)]) -> ShardProbes {
        let mut found = shard();
        let mut cosines = Vec::new();
        for (i, (expected, own, margin)) in positions.iter().enumerate() {
            let compared = Compared::of(&[expected.to_vec()], &[own.to_vec()]);
            let flip = margin.map(|margin| Flip { chosen: vec![1], expected: vec![0], margin });
            cosines.extend(found.count("prompt", i, &compared, flip.as_ref(), 0.97));
        }
        found.finish(cosines, rule, 0.97);
        found
    }

    #[test]
    fn every_position_counts_and_not_the_median() {
        let good: (&[f32], &[f32], _) = (&[1.0, 0.0], &[1.0, 0.1], None);
        // Cosine 0.968.
        let low: (&[f32], &[f32], _) = (&[1.0, 0.0], &[1.0, 0.26], None);
        assert!(probed(&[good; 3]).pass);
        let found = probed(&[good, good, low, good]);
        assert!(!found.pass && found.median_cosine > 0.99 && found.min_cosine < 0.97, "{found:?}");
        assert_eq!((found.below.len(), found.below[0].position), (1, 2));
        // With random weights half of the positions suffice; a result that should be zero still fails.
        assert!(probed_by(DecidingRule::Median, &[good, good, low, good]).pass);
        assert!(!probed_by(DecidingRule::Median, &[low, good, low, low]).pass);
        assert!(!probed_by(DecidingRule::Median, &[good, good, (&[0.0], &[1.0], None)]).pass);
    }

    #[test]
    fn zero_in_the_reference_is_zero_in_the_shard() {
        let good: (&[f32], &[f32], _) = (&[1.0, 0.0], &[1.0, 0.1], None);
        let found = probed(&[good, (&[0.0, 0.0], &[0.0, -0.0], None)]);
        assert!(found.pass && found.no_active_expert == 1 && found.counted == 1);
        let found = probed(&[good, (&[0.0, 0.0], &[0.0, 1e-6], None)]);
        assert!(!found.pass && found.no_active_expert == 0, "{found:?}");
        assert_eq!(found.not_zero, [ProbePlace { probe: "prompt".into(), position: 1, cosine: None }]);
        // A zero in one of several results.
        let both = Compared::of(&[vec![1.0], vec![0.0]], &[vec![1.0], vec![0.5]]);
        assert!(both.not_zero && both.cosine == Some(1.0));
        // A shard without a counted position does not pass.
        assert!(!probed(&[(&[0.0], &[0.0], None)]).pass);
    }

    #[test]
    fn near_ties_of_a_router_are_excused_and_named() {
        let good: (&[f32], &[f32], _) = (&[1.0, 0.0], &[1.0, 0.1], None);
        let other = |margin| -> (&[f32], &[f32], Option<f64>) { (&[1.0, 0.0], &[0.0, 1.0], Some(margin)) };
        let found = probed(&[good, other(0.2)]);
        assert!(found.pass && found.excused == 1 && found.counted == 1, "{found:?}");
        assert!(found.choices[0].near_tie && found.choices[0].cosine == Some(0.0));
        let found = probed(&[good, other(0.7)]);
        assert!(!found.pass && found.excused == 0 && !found.choices[0].near_tie, "{found:?}");
        // A near tie between no expert and an expert is excused.
        assert!(probed(&[good, (&[0.0], &[1.0], Some(0.1))]).pass);
        assert!(!probed(&[good, (&[0.0], &[f32::NAN], Some(0.1))]).pass);
    }

    #[test]
    fn random_directions_are_the_same_everywhere_and_of_length_one() {
        let mut random = Random::new(SEED);
        let first = unit_vector(&mut random, 64);
        // The first deviates of SplitMix64 from seed 1, by Box and Muller; never to be changed, since figures are
        // compared over time.
        let again = unit_vector(&mut Random::new(SEED), 64);
        assert_eq!(first, again);
        assert_ne!(first, unit_vector(&mut random, 64));
        assert_ne!(first, unit_vector(&mut Random::new(SEED + 1), 64));
        for _ in 0..32 {
            let v = unit_vector(&mut random, 2816);
            assert!((norm(&v) - 1.0).abs() < 1e-6);
            // No direction is preferred: the mean is within 5 standard deviations of 0.
            let mean = v.iter().map(|&x| f64::from(x)).sum::<f64>() / 2816.0;
            assert!(mean.abs() < 5.0 / 2816.0, "{mean}");
        }
    }

    #[test]
    fn prompts_that_say_little_are_warned_of() {
        let golden = |first: u32, embeddings: Vec<Vec<f32>>| Golden {
            prompt_ids: std::iter::once(first).chain(3..).take(embeddings.len()).collect(),
            logits_full: vec![],
            next_token_logits: vec![],
            decode_tokens: vec![],
            hidden_states: vec![embeddings],
            router_index: vec![],
            router_states: vec![],
        };
        let said =
            |golden: &Golden| warnings(&Inputs { count: 0, seed: 0, real: Some(golden), bos: Some(2) }, 5.0);
        let sane = vec![vec![3.0, 4.0]; 4];
        assert!(said(&golden(7, sane.clone())).is_empty());
        let warned = said(&golden(2, sane.clone()));
        assert!(warned.len() == 1 && warned[0].contains("starts a text"), "{warned:?}");
        let mut tiny = sane;
        tiny[2] = vec![0.03, 0.04];
        let warned = said(&golden(7, tiny));
        assert!(
            warned.len() == 1 && warned[0].contains("position 2") && warned[0].contains("100 times"),
            "{warned:?}"
        );
        assert!(warnings(&Inputs { count: 1, seed: 0, real: None, bos: None }, 5.0).is_empty());
        // The median is the vocabulary's: a prompt of short embeddings only is warned of at every position.
        assert_eq!(said(&golden(7, vec![vec![0.03, 0.04]; 3])).len(), 3);
    }
}
