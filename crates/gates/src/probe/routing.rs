//! Choices of experts inside a probe. Where a shard's own router chooses another expert than its FP16 form, all later
//! values differ, and their cosine says nothing about the weights. The margin of the choice does.

use super::probe_context::{ProbeContext, ProbeToken, fp16_path, write_fp16};
use super::segment::{Segment, segment};
use crate::golden_gate::NEAR_TIE;
use crate::{Error, Result};
use anemoe_bundle::{Chain, OutputBinding, Run, Shard, ShardKind, Step};
use anemoe_convert::build::write_shard;
use anemoe_convert::lower::last_name;
use anemoe_convert::plan::{CHOICES_UNIT, Plan, PlanOptions, PlannedShard, layer_scope};
use anemoe_runtime::cpu::CpuBackend;
use anemoe_runtime::model::{Model, Registers};
use serde::Serialize;
use std::ops::Range;
use std::path::PathBuf;

/// Beginning of the names, in plans, of the parts of a model that choose experts.
const ROUTER_PART: &str = "router";
/// Name of the part that is a router with a network of its own.
const ROUTER_NETWORK: &str = "router_mlp";

/// Choice of experts that differs from the FP16 form's.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExpertChoice {
    /// Name of the probe.
    pub probe: String,
    /// Position in the probe.
    pub position: usize,
    /// Experts that the shard's router chooses, and the FP16 form's router does not.
    pub chosen: Vec<u32>,
    /// Experts that the FP16 form's router chooses, and the shard's router does not.
    pub expected: Vec<u32>,
    /// Rise of a logit of the FP16 form's router that would cause this choice.
    pub margin: f64,
    /// True if the margin is below [`NEAR_TIE`]: the position is excused.
    pub near_tie: bool,
    /// Cosine of the position; not in the statistics where the position is excused.
    pub cosine: Option<f64>,
}

/// Routers of a shard in two forms: compressed as in the shard, and FP16. The router of one layer is a package of its
/// own. The routers of several layers are in a copy of the shard's package that also returns their logits. Both make
/// choices visible that the shard makes inside.
pub struct OwnRouter {
    segment: Segment,
    routers: Vec<Router>,
    own: Model,
    fp16: Model,
}

/// Logits and rule of one layer's choice.
struct Router {
    /// Register of the logits.
    logits: String,
    top_k: usize,
    bias: Option<Vec<f32>>,
}

/// Tells whether a router in the shard chooses among experts of the same shard.
pub fn chooses_inside(shard: &PlannedShard) -> bool {
    let holds = |part: fn(&str) -> bool| shard.matrices.iter().any(|m| part(&m.part));
    match shard.kind {
        ShardKind::Attention | ShardKind::Head => false,
        // Beside joined attention, a router that is a single matrix gives its logits to the host.
        ShardKind::Layers => holds(|part| part == ROUTER_NETWORK),
        _ => holds(|part| part.starts_with(ROUTER_PART)),
    }
}

/// Choice that differs, and its margin.
#[derive(Clone, Debug, PartialEq)]
pub struct Flip {
    pub chosen: Vec<u32>,
    pub expected: Vec<u32>,
    pub margin: f64,
}

impl Flip {
    pub fn is_near(&self) -> bool {
        self.margin < f64::from(NEAR_TIE)
    }
}

/// Returns the run that computes the logits of a layer's choice, and the step that chooses.
fn route_of(plan: &Plan, layer: usize) -> Option<(&Run, &Step)> {
    let steps = &plan.chain.steps;
    steps.iter().enumerate().find_map(|(i, step)| {
        let Step::Route { logits, .. } = step else { return None };
        let gives = |s: &Step| match s {
            Step::Run(run) if run.outputs.values().any(|o| o.register == *logits) => Some(run.shard.clone()),
            _ => None,
        };
        let at = steps[..i].iter().rposition(|s| gives(s).is_some())?;
        let Step::Run(run) = &steps[at] else { return None };
        (plan.shard(&run.shard)?.layer == Some(layer)).then_some((run, step))
    })
}

impl OwnRouter {
    /// Makes the routers of a shard that chooses inside. Returns `None` for other shards, which get their choice from
    /// the FP16 form of another shard.
    ///
    /// # Errors
    /// The checkpoint cannot be read, or a package cannot be written.
    pub fn of(site: &ProbeContext<'_>, shard: &PlannedShard) -> Result<Option<OwnRouter>> {
        let Some(layer) = shard.layer.filter(|_| chooses_inside(shard)) else { return Ok(None) };
        // With one expert per call, the logits leave the shard.
        let mut apart =
            PlanOptions { experts_per_shard: Some(1), ffn_shards: None, ..site.plan.options.clone() };
        apart.form.layers_per_shard = None;
        apart.forms.remove(&ShardKind::Layers);
        let plan = site.family.plan(&apart)?;
        if let Some(layers) = shard.joined_layers() {
            return OwnRouter::of_layers(site, shard, layers, &plan).map(Some);
        }
        let Some((run, Step::Route { logits, top_k, bias, .. })) = route_of(&plan, layer) else {
            return Ok(None);
        };
        let Some(planned) = plan.shard(&run.shard) else { return Ok(None) };
        let mut router = PlannedShard { name: format!("{}.router", shard.name), ..planned.clone() };
        router.functions.retain(|f| f.unit == run.unit && f.tokens.min == 1);
        router.matrices =
            shard.matrices.iter().filter(|m| m.part.starts_with(ROUTER_PART)).cloned().collect();
        let chain =
            Chain { vectors: site.chain.vectors.clone(), ..router_chain(&plan, planned, &router, run) };
        let routers = vec![Router { logits: logits.clone(), top_k: *top_k, bias: bias.clone() }];
        OwnRouter::open(site, &router, &chain, routers).map(Some)
    }

    /// Makes a copy of a package of several layers that also returns the logits of their routers.
    fn of_layers(
        site: &ProbeContext<'_>,
        shard: &PlannedShard,
        layers: Range<usize>,
        apart: &Plan,
    ) -> Result<OwnRouter> {
        let around = site.family.plan_around(&site.plan.options, shard)?;
        let mut router = PlannedShard { name: format!("{}.router", shard.name), ..shard.clone() };
        router.functions.retain(|f| f.tokens.min == 1);
        router.functions.iter_mut().for_each(|f| f.unit = Some(CHOICES_UNIT.into()));
        let names: Vec<String> =
            (0..layers.len()).map(|i| format!("{}router_logits", layer_scope(i))).collect();
        let mut steps = around.chain.steps.clone();
        for step in &mut steps {
            let Step::Run(run) = step else { continue };
            if !run.shards().any(|name| name == shard.name) {
                continue;
            }
            (run.shard, run.others, run.unit) =
                (router.name.clone(), Vec::new(), Some(CHOICES_UNIT.to_string()));
            for name in &names {
                let output = if run.channels_last { last_name(name) } else { name.clone() };
                let to = OutputBinding { register: name.clone(), rows: None, accumulate: false };
                run.outputs.insert(output, to);
            }
        }
        let other = |s: &&PlannedShard| s.name != shard.name;
        let shards =
            around.shards.iter().filter(other).chain([&router]).map(PlannedShard::chain_entry).collect();
        let chain = Chain { vectors: site.chain.vectors.clone(), steps, shards, ..around.chain.clone() };
        let mut routers = Vec::new();
        for (layer, logits) in layers.zip(names) {
            let Some((_, Step::Route { top_k, bias, .. })) = route_of(apart, layer) else {
                return Err(Error::usage(format!("no step of the chain chooses experts of layer {layer}")));
            };
            routers.push(Router { logits, top_k: *top_k, bias: bias.clone() });
        }
        OwnRouter::open(site, &router, &chain, routers)
    }

    /// Writes the package `router` in both forms, and opens the segment that leads to it.
    fn open(
        site: &ProbeContext<'_>,
        router: &PlannedShard,
        chain: &Chain,
        routers: Vec<Router>,
    ) -> Result<OwnRouter> {
        let segment = segment(chain, &router.name)
            .ok_or_else(|| Error::usage(format!("no step of the chain runs {}", router.name)))?;
        let at = |form: &str| site.scratch.join(format!("{}{form}.mlpackage", router.name));
        let (own, fp16) = (at(".own"), at(".fp16"));
        for (path, shard) in [(&own, router), (&fp16, &router.in_fp16())] {
            if !path.is_dir() {
                write_shard(site.family, shard, site.importance, path)?;
            }
        }
        for before in segment.chain.shards.iter().filter_map(|s| site.plan.shard(&s.name)) {
            write_fp16(site, before)?;
        }
        let backend = CpuBackend::default();
        let open = |path: &PathBuf| {
            let file =
                |s: &Shard| if s.name == router.name { path.clone() } else { fp16_path(site, &s.name) };
            Model::with_chain(site.bundle, segment.chain.clone(), &backend, &file)
        };
        let (own, fp16) = (open(&own)?, open(&fp16)?);
        Ok(OwnRouter { routers, own, fp16, segment })
    }

    /// Returns, by token, the first layer's choice that differs; all later layers differ because of it.
    ///
    /// # Errors
    /// A package fails.
    pub fn flips(&self, tokens: &[ProbeToken<'_>]) -> Result<Vec<Option<Flip>>> {
        let (mut of_fp16, mut of_own) = (self.fp16.sequence(), self.own.sequence());
        let mut all = Vec::new();
        for token in tokens.iter().take(self.segment.chain.model.max_context) {
            // The router's steps read fewer registers than the whole shard's.
            let registers: Vec<(&str, &[f32])> = token
                .iter()
                .filter(|(name, _)| *name == "hidden" || self.segment.seeds.iter().any(|s| s == name))
                .map(|(name, values)| (*name, values.as_slice()))
                .collect();
            let mut read = |left: Registers<'_>| -> Vec<Vec<f32>> {
                let of =
                    |r: &Router| left.get(&r.logits).and_then(|t| t.as_f32()).unwrap_or_default().to_vec();
                self.routers.iter().map(of).collect()
            };
            let expected = self.fp16.pass_from(&mut of_fp16, 1, &registers, &mut read)?;
            let own = self.own.pass_from(&mut of_own, 1, &registers, &mut read)?;
            let mut layers = self.routers.iter().zip(expected.iter().zip(&own));
            all.push(layers.find_map(|(r, (expected, own))| flip(expected, own, r.bias.as_deref(), r.top_k)));
        }
        Ok(all)
    }
}

/// Returns the chain of `plan` with the router in a package of its own, and without the experts after it.
fn router_chain(plan: &Plan, planned: &PlannedShard, router: &PlannedShard, run: &Run) -> Chain {
    let steps = plan.chain.steps.iter().filter_map(|step| match step {
        Step::Run(r) if r.shard == planned.name && r.unit != run.unit => None,
        Step::Run(r) if r.shard == planned.name => {
            Some(Step::Run(Run { shard: router.name.clone(), ..r.clone() }))
        }
        other => Some(other.clone()),
    });
    let own = |s: &PlannedShard| if s.name == planned.name { router.chain_entry() } else { s.chain_entry() };
    Chain { steps: steps.collect(), shards: plan.shards.iter().map(own).collect(), ..plan.chain.clone() }
}

fn softmax(logits: &[f32]) -> Vec<f64> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f64> = logits.iter().map(|&l| f64::from(l - most).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.into_iter().map(|p| p / sum).collect()
}

/// Returns the indices of the `k` largest scores, largest first; of equal scores the lower index first.
fn chosen(scores: &[f64], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    order.truncate(k);
    order
}

/// Compares the choice by `own` logits with the choice by `expected` logits. A bias is added to the probabilities for
/// the choice. Returns `None` where both choose the same experts.
///
/// The margin is the rise of class j's logit, with all other logits unchanged, from which on j is chosen instead of i:
///
/// ```text
/// p_j' = p_j x / Z,  p_i' = p_i / Z,  Z = 1 + p_j (x - 1)     after a rise of ln x
/// p_j' + b_j = p_i' + b_i  at  x = (p_i + (b_i - b_j) (1 - p_j)) / (p_j (1 + b_j - b_i))
/// ```
///
/// The margin is `ln x`, and the largest of all pairs (i, j). Without a bias, it is the difference of the two logits.
fn flip(expected: &[f32], own: &[f32], bias: Option<&[f32]>, top_k: usize) -> Option<Flip> {
    let b = |i: usize| bias.and_then(|b| b.get(i)).map_or(0.0, |&b| f64::from(b));
    let p = softmax(expected);
    let scores = |p: &[f64]| p.iter().enumerate().map(|(i, p)| p + b(i)).collect::<Vec<f64>>();
    let right = chosen(&scores(&p), top_k);
    let wrong = chosen(&scores(&softmax(own)), top_k);
    let lost: Vec<usize> = right.iter().copied().filter(|i| !wrong.contains(i)).collect();
    let gained: Vec<usize> = wrong.iter().copied().filter(|i| !right.contains(i)).collect();
    let rise = |i: usize, j: usize| {
        let x = (p[i] + (b(i) - b(j)) * (1.0 - p[j])) / (p[j] * (1.0 + b(j) - b(i)));
        if x > 0.0 { x.ln() } else { f64::INFINITY }
    };
    let margin = lost.iter().flat_map(|&i| gained.iter().map(move |&j| (i, j))).map(|(i, j)| rise(i, j));
    let margin = margin.reduce(|a, b| if a >= b { a } else { b })?;
    let ids = |list: &[usize]| list.iter().map(|&i| i as u32).collect();
    // A margin that is not a number is no near tie.
    let margin = if margin.is_nan() { f64::INFINITY } else { margin };
    Some(Flip { chosen: ids(&gained), expected: ids(&lost), margin })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_by_logits_has_their_difference_as_margin() {
        assert_eq!(flip(&[1.0, 2.0, 0.0], &[1.9, 2.0, 0.0], None, 1), None);
        let near = flip(&[1.8, 2.0, 0.0], &[2.1, 2.0, 0.0], None, 1).unwrap();
        assert_eq!((near.chosen.as_slice(), near.expected.as_slice()), (&[0][..], &[1][..]));
        assert!((near.margin - 0.2).abs() < 1e-6 && near.is_near(), "{near:?}");
        let far = flip(&[1.0, 2.0, 0.0], &[2.1, 2.0, 0.0], None, 1).unwrap();
        assert!((far.margin - 1.0).abs() < 1e-6 && !far.is_near(), "{far:?}");
        // Of two experts one changes; their order does not count.
        assert_eq!(flip(&[3.0, 2.0, 0.0], &[2.0, 3.0, 0.0], None, 2), None);
        let one = flip(&[3.0, 2.0, 1.9], &[3.0, 1.8, 1.9], None, 2).unwrap();
        assert_eq!((one.chosen, one.expected), (vec![2], vec![1]));
        assert!((one.margin - 0.1).abs() < 1e-6);
    }

    /// Checks that the choice changes at the rise that the margin names.
    #[test]
    fn a_biased_choice_changes_where_its_margin_says() {
        let (logits, bias) = ([1.0f32, 0.4, -0.3], [-0.1f32, 0.05, 0.2]);
        let scores =
            |l: &[f32]| -> Vec<f64> { softmax(l).iter().zip(bias).map(|(p, b)| p + f64::from(b)).collect() };
        assert_eq!(chosen(&scores(&logits), 1), [0]);
        for j in [1, 2] {
            let risen = |by: f64| {
                let mut l = logits;
                l[j] += by as f32;
                l
            };
            let margin = flip(&logits, &risen(5.0), Some(&bias), 1).unwrap().margin;
            assert!(margin > 0.0 && margin < 1.0, "{j}: {margin}");
            assert_eq!(flip(&logits, &risen(margin - 1e-3), Some(&bias), 1), None, "{j}");
            assert!(flip(&logits, &risen(margin + 1e-3), Some(&bias), 1).is_some(), "{j}");
        }
        // A logit that is not a number is no near tie.
        let wrong = flip(&[f32::NAN, 1.0], &[0.0, 1.0], None, 1);
        assert!(wrong.is_none_or(|f| !f.is_near()));
    }
}
