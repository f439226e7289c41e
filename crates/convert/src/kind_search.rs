//! Chooses the kind of every tensor: the least loss of the model for the bytes.
//!
//! `loss = sum over tensors of sensitivity * relative squared error of the tensor's output`
//!
//! On each tensor only kinds on the lower convex hull of (bytes, loss) can be part of a best choice. The steps of all
//! hulls, ordered by the loss that a byte saves, form one path from the smallest model to the most exact. Every best
//! choice under a limit is a prefix of this path.

use crate::importance::Importance;
use crate::lattice::Lattice;
use crate::lower::encode_matrix;
use crate::models::Family;
use crate::plan::{MatrixPlan, Plan};
use crate::quant::{Granularity, Groups, MatrixQuant, Quant};
use crate::quantize::{Encoder, Metrics};
use crate::{Error, Result};
use anemoe_bundle::{IndexBits, IntBits, TensorChoice};
use std::collections::BTreeMap;

/// Kinds that are tried. `int4-block` is left out: scales per block along the inputs gave wrong results on the ANE
/// (reported for group 32; palettized weights of the same model were right). Asymmetric kinds are left out: no
/// measured shard had offsets. Tensors on a lattice get the kind that keeps them in addition.
pub const KINDS: [Quant; 8] = [
    Quant::lut(IndexBits::Two),
    Quant::lut(IndexBits::Three),
    Quant::lut(IndexBits::Four),
    Quant::lut(IndexBits::Six),
    Quant::lut(IndexBits::Eight),
    Quant::int(IntBits::Eight, Granularity::Tensor),
    Quant::int(IntBits::Eight, Granularity::Channel),
    Quant::Fp16,
];

/// Weights of a tensor that are compressed to measure a kind, where all would take too long.
const SAMPLE: u64 = 1 << 19;

/// A tensor whose matrices get one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Checkpoint tensor without its prefix.
    pub tensor: String,
    /// Part of the model.
    pub part: String,
    /// Kinds with their bytes and errors, in the order of [`KINDS`]; behind them the kind of the tensor's lattice.
    pub candidates: Vec<Candidate>,
    /// Loss per unit of output error.
    pub sensitivity: f64,
    /// Share of the tensor's bytes that a token reads: 1, or for experts the share of tokens that choose them.
    pub read: f64,
}

/// Bytes that a search saves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Objective {
    /// Bytes of all matrices: the size of the bundle.
    #[default]
    Size,
    /// Bytes of matrices that a token reads: they set the time of a token where memory is the limit.
    Speed,
}

impl Objective {
    /// Returns the word that chooses the objective: `size` or `speed`.
    pub fn name(self) -> &'static str {
        match self {
            Objective::Size => "size",
            Objective::Speed => "speed",
        }
    }
}

impl Group {
    /// Returns the share of each byte that an objective counts.
    fn share(&self, objective: Objective) -> f64 {
        match objective {
            Objective::Size => 1.0,
            Objective::Speed => self.read,
        }
    }
}

/// Tokens that chose each expert, by layer: `chosen[layer][expert]` of `tokens`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExpertUse {
    /// Number of tokens that chose each expert, `[layers, experts]`.
    pub chosen: Vec<Vec<u64>>,
    /// Tokens that were counted.
    pub tokens: u64,
}

/// Tokens added to the counts as if they chose all experts equally often, so that an expert without tokens is not
/// free.
const PRIOR_TOKENS: f64 = 8.0;

/// Sets, for each group, the share of the tensor's bytes that a token reads, from the experts that tokens chose.
/// Without counts all experts are taken to be chosen equally often.
pub fn share_reads(plan: &Plan, groups: &mut [Group], used: Option<&ExpertUse>) {
    let average = plan.totals.experts_per_token as f64 / (plan.totals.experts as f64).max(1.0);
    let share = |layer: Option<usize>, expert: Option<usize>| {
        let counts = used.and_then(|u| Some((u, u.chosen.get(layer?)?.get(expert?)?)));
        counts
            .map_or(average, |(u, &n)| (n as f64 + PRIOR_TOKENS * average) / (u.tokens as f64 + PRIOR_TOKENS))
    };
    let mut sums: BTreeMap<(&str, &str), (f64, f64)> = BTreeMap::new();
    for shard in &plan.shards {
        for m in &shard.matrices {
            let read = match m.part.as_str() {
                "experts" => share(m.layer(), m.expert()),
                _ => 1.0,
            };
            let (sum, weights) = sums.entry((&m.tensor, &m.part)).or_default();
            *sum += read * m.weights() as f64;
            *weights += m.weights() as f64;
        }
    }
    for group in groups {
        if let Some((sum, weights)) = sums.get(&(group.tensor.as_str(), group.part.as_str())) {
            group.read = sum / weights.max(1.0);
        }
    }
}

/// Kind that a tensor may get, with its bytes and its error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The kind.
    pub kind: Quant,
    /// Bytes of all matrices of the tensor.
    pub bytes: u64,
    /// Relative squared error of the output.
    pub error: f64,
}

/// Returns the matrices of a plan by tensor and part of the model.
pub fn matrices(plan: &Plan) -> BTreeMap<(String, String), Vec<MatrixPlan>> {
    let mut all: BTreeMap<(String, String), Vec<MatrixPlan>> = BTreeMap::new();
    for m in plan.shards.iter().flat_map(|s| &s.matrices) {
        all.entry((m.tensor.clone(), m.part.clone())).or_default().push(m.clone());
    }
    all
}

/// Measures every kind on every tensor of a plan whose part has no kind of its own. With `sample`, large tensors are
/// measured on some of their matrices or rows.
///
/// # Errors
/// The checkpoint cannot be read, or the importances do not fit.
pub fn measure(
    family: &Family,
    plan: &Plan,
    importance: Option<&Importance>,
    sample: bool,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<Group>> {
    let mut groups = Vec::new();
    let all = matrices(plan);
    let (total, mut done) = (all.len(), 0);
    for ((tensor, part), matrices) in all {
        done += 1;
        if is_fixed(plan, &part) {
            continue;
        }
        let mut candidates = Vec::new();
        let parts = if sample { sampled(&matrices) } else { matrices.clone() };
        let exact = Lattice::of_tensor(family, &matrices).map(Lattice::kind);
        for kind in KINDS.into_iter().chain(exact) {
            let resolve = |m: &MatrixPlan| MatrixQuant::resolve(kind, plan.options.groups, m.rows, m.cols);
            let bytes = matrices.iter().map(|m| resolve(m).bytes(m.rows, m.cols)).sum();
            let mut metrics = Metrics::default();
            for m in &parts {
                let m = MatrixPlan { quant: resolve(m), ..m.clone() };
                metrics.merge(
                    &encode_matrix(family.checked_checkpoint(), &m, importance, None, &mut |_| Ok(()))?
                        .metrics,
                );
            }
            candidates.push(Candidate { kind, bytes, error: metrics.output_error() });
        }
        groups.push(Group { tensor, part, candidates, sensitivity: 1.0, read: 1.0 });
        progress(done, total);
    }
    if groups.is_empty() {
        return Err(Error::usage("--quant auto has nothing to choose: every part has a kind of its own"));
    }
    Ok(groups)
}

/// Compresses the matrices of a tensor and decodes them again: returns values in the tensor's order, and compressed
/// bytes.
///
/// # Errors
/// The checkpoint cannot be read, or the importances do not fit.
pub fn decoded(
    family: &Family,
    matrices: &[MatrixPlan],
    kind: Quant,
    groups: Groups,
    importance: Option<&Importance>,
) -> Result<(Vec<f32>, u64)> {
    let mut order: Vec<&MatrixPlan> = matrices.iter().collect();
    order.sort_by_key(|m| m.offset);
    let (mut values, mut bytes) = (Vec::new(), 0);
    for m in order {
        let quant = MatrixQuant::resolve(kind, groups, m.rows, m.cols);
        let m = MatrixPlan { quant, ..m.clone() };
        let mut packed = Vec::new();
        let side = encode_matrix(family.checked_checkpoint(), &m, importance, None, &mut |b| {
            packed.extend_from_slice(b);
            Ok(())
        })?;
        let encoder =
            Encoder { rows: m.rows, cols: m.cols, quant, exact: false, importance: None, scale: None };
        values.extend(encoder.decode(&packed, &side).map_err(|e| Error::usage(e.to_string()))?);
        bytes += m.bytes();
    }
    Ok((values, bytes))
}

/// Tells whether a part's kind is not searched: the user chose it, or the part stays fp16 unless the user chooses.
fn is_fixed(plan: &Plan, part: &str) -> bool {
    let p = &plan.options.parts;
    match part {
        "attention" => p.attention.is_some(),
        "experts" => p.experts.is_some(),
        "dense_mlp" => p.dense_mlp.is_some(),
        "head" => p.head.is_some(),
        "router_mlp" => p.router.is_some(),
        _ => true,
    }
}

/// Samples a tensor: a few matrices, evenly spread, or the first rows of a single large matrix.
pub fn sampled(matrices: &[MatrixPlan]) -> Vec<MatrixPlan> {
    let Some(first) = matrices.first() else { return Vec::new() };
    let wanted = (SAMPLE / first.weights().max(1)).max(1) as usize;
    let step = (matrices.len() / wanted.min(matrices.len())).max(1);
    let mut parts: Vec<MatrixPlan> = matrices.iter().step_by(step).take(wanted).cloned().collect();
    if let [one] = parts.as_mut_slice() {
        let rows = (SAMPLE as usize / one.cols).max(32) / 32 * 32;
        one.rows = one.rows.min(rows);
    }
    parts
}

/// A choice: for every group, the position of its kind among the candidates.
pub type Choice = Vec<usize>;

/// Returns the choices from the smallest to the most exact; each differs from the one before in one tensor.
pub fn path(groups: &[Group], objective: Objective) -> Vec<Choice> {
    let mut choice: Choice = Vec::new();
    // (loss that a byte saves, group, kind)
    let mut steps: Vec<(f64, usize, usize)> = Vec::new();
    for (g, group) in groups.iter().enumerate() {
        let hull = hull(&group.candidates);
        choice.push(hull[0]);
        for pair in hull.windows(2) {
            let (a, b) = (&group.candidates[pair[0]], &group.candidates[pair[1]]);
            let cost = (b.bytes - a.bytes) as f64 * group.share(objective);
            let slope = group.sensitivity * (a.error - b.error) / cost.max(f64::MIN_POSITIVE);
            steps.push((slope, g, pair[1]));
        }
    }
    // Steps of one group stay in order, since a hull's slopes fall. Equal slopes keep the order of groups.
    steps.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut all = vec![choice.clone()];
    for (_, group, kind) in steps {
        choice[group] = kind;
        all.push(choice.clone());
    }
    all
}

/// Returns the positions of the candidates on the lower convex hull of (bytes, error), from few bytes to many.
fn hull(candidates: &[Candidate]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    order.sort_by(|&a, &b| {
        let (a, b) = (&candidates[a], &candidates[b]);
        a.bytes.cmp(&b.bytes).then(a.error.total_cmp(&b.error))
    });
    let mut hull: Vec<usize> = Vec::new();
    for i in order {
        let c = &candidates[i];
        if hull.last().is_some_and(|&last| candidates[last].error <= c.error) {
            continue;
        }
        while let [.., a, b] = hull.as_slice() {
            let (a, b) = (&candidates[*a], &candidates[*b]);
            let before = (a.error - b.error) * (c.bytes - b.bytes) as f64;
            let after = (b.error - c.error) * (b.bytes - a.bytes) as f64;
            if before > after {
                break;
            }
            hull.pop();
        }
        if hull.last().is_some_and(|&last| candidates[last].bytes == c.bytes) {
            hull.pop();
        }
        hull.push(i);
    }
    hull
}

/// Returns the bytes of a choice that count for an objective.
pub fn cost(groups: &[Group], choice: &Choice, objective: Objective) -> u64 {
    let each = groups.iter().zip(choice).map(|(g, &i)| g.candidates[i].bytes as f64 * g.share(objective));
    each.sum::<f64>().round() as u64
}

/// Finds the most exact choice of the path within `limit` bytes, then adds each later step that still fits.
///
/// # Errors
/// Even the smallest choice exceeds the limit.
pub fn within(groups: &[Group], limit: u64, objective: Objective) -> Result<Choice> {
    let cost = |choice: &Choice| cost(groups, choice, objective);
    let path = path(groups, objective);
    let smallest = cost(&path[0]);
    let Some(at) = path.iter().rposition(|c| cost(c) <= limit) else {
        let what = match objective {
            Objective::Size => "needs",
            Objective::Speed => "reads for each token",
        };
        return Err(Error::usage(format!(
            "--max-bytes {limit}: the smallest choice {what} {smallest} bytes for its matrices"
        )));
    };
    let mut choice = path[at].clone();
    for better in &path[at + 1..] {
        for (g, (&now, &next)) in choice.clone().iter().zip(better).enumerate() {
            let (a, b) = (groups[g].candidates[now], groups[g].candidates[next]);
            let mut changed = choice.clone();
            changed[g] = next;
            if b.error < a.error && cost(&changed) <= limit {
                choice = changed;
            }
        }
    }
    Ok(choice)
}

/// Returns the kinds of a choice by tensor and part.
pub fn kinds(groups: &[Group], choice: &Choice) -> BTreeMap<(String, String), Quant> {
    groups
        .iter()
        .zip(choice)
        .map(|(g, &i)| ((g.tensor.clone(), g.part.clone()), g.candidates[i].kind))
        .collect()
}

/// Explains a choice for every tensor: what the neighbouring kinds would cost or gain.
pub fn explain(groups: &[Group], choice: &Choice) -> Vec<TensorChoice> {
    groups
        .iter()
        .zip(choice)
        .map(|(g, &i)| {
            let own = &g.candidates[i];
            let hull = hull(&g.candidates);
            let loss = |c: &Candidate| g.sensitivity * c.error;
            let mut reason = Vec::new();
            let smaller = hull.iter().rev().map(|&j| &g.candidates[j]).find(|c| c.bytes < own.bytes);
            if let Some(c) = smaller {
                reason.push(format!(
                    "{} would save {} bytes for {:.1e} more loss",
                    c.kind,
                    own.bytes - c.bytes,
                    loss(c) - loss(own)
                ));
            }
            let larger = hull.iter().map(|&j| &g.candidates[j]).find(|c| c.bytes > own.bytes);
            if let Some(c) = larger {
                reason.push(format!(
                    "{} would take {:.1e} of loss away for {} more bytes",
                    c.kind,
                    loss(own) - loss(c),
                    c.bytes - own.bytes
                ));
            }
            let dominated = g
                .candidates
                .iter()
                .find(|c| c.kind.has_one_scale() && c.error > 4.0 * own.error && c.bytes >= own.bytes);
            if let Some(c) = dominated {
                reason.push(format!(
                    "{} would be {:.0} times as wrong and no smaller: outliers set its one scale",
                    c.kind,
                    c.error / own.error
                ));
            }
            TensorChoice {
                tensor: g.tensor.clone(),
                part: g.part.clone(),
                kind: own.kind.to_string(),
                bytes: own.bytes,
                output_error: own.error,
                sensitivity: g.sensitivity,
                reason: reason.join("; "),
            }
        })
        .collect()
}

/// Sets the kinds of a choice in a plan.
///
/// # Errors
/// A shard becomes larger than the options allow.
pub fn apply(plan: &mut Plan, kinds: &BTreeMap<(String, String), Quant>) -> Result<()> {
    let groups: Groups = plan.options.groups;
    plan.requantize(|m| {
        let kind = kinds.get(&(m.tensor.clone(), m.part.clone()))?;
        Some(MatrixQuant::resolve(*kind, groups, m.rows, m.cols))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Computes the loss that is expected of a choice.
    fn expected_loss(groups: &[Group], choice: &Choice) -> f64 {
        groups.iter().zip(choice).map(|(g, &i)| g.sensitivity * g.candidates[i].error).sum()
    }

    fn size(groups: &[Group], choice: &Choice) -> u64 {
        cost(groups, choice, Objective::Size)
    }

    fn group(sensitivity: f64, candidates: &[(u64, f64)]) -> Group {
        let candidates = candidates
            .iter()
            .zip(KINDS)
            .map(|(&(bytes, error), kind)| Candidate { kind, bytes, error })
            .collect();
        Group { tensor: "t".into(), part: "experts".into(), candidates, sensitivity, read: 1.0 }
    }

    #[test]
    fn dominated_kinds_are_not_on_the_hull() {
        let g = group(1.0, &[(1, 1.0), (2, 0.9), (3, 0.1), (4, 0.5), (5, 0.0), (5, 0.2)]);
        assert_eq!(hull(&g.candidates), [0, 2, 4]);
    }

    #[test]
    fn sensitive_tensors_get_bits_first() {
        let kinds = [(2, 0.2), (3, 0.05), (4, 0.01)];
        let groups = [group(1.0, &kinds), group(100.0, &kinds)];
        let path = path(&groups, Objective::Size);
        assert_eq!(path.first(), Some(&vec![0, 0]));
        assert_eq!(path[1], [0, 1]);
        assert_eq!(path[2], [0, 2]);
        assert_eq!(path.last(), Some(&vec![2, 2]));
        assert_eq!(within(&groups, 5, Objective::Size).unwrap(), [0, 1]);
        assert_eq!(within(&groups, 100, Objective::Size).unwrap(), [2, 2]);
        assert!(within(&groups, 3, Objective::Size).unwrap_err().to_string().contains("needs 4 bytes"));
        let text = &explain(&groups, &vec![0, 1])[1];
        assert!(
            text.reason.contains("would save 1 bytes") && text.reason.contains("1 more bytes"),
            "{text:?}"
        );
    }

    #[test]
    fn for_speed_bits_go_where_they_are_read_seldom() {
        let kinds = [(2, 0.2), (4, 0.05)];
        let mut groups = [group(1.0, &kinds), group(1.0, &kinds)];
        groups[1].read = 0.125;
        assert_eq!(path(&groups, Objective::Speed)[1], [0, 1]);
        assert_eq!(cost(&groups, &vec![0, 1], Objective::Speed), 3, "2 and an eighth of 4, rounded");
        assert_eq!(cost(&groups, &vec![0, 1], Objective::Size), 6);
        assert_eq!(within(&groups, 3, Objective::Speed).unwrap(), [0, 1]);
        let refused = within(&groups, 1, Objective::Speed).unwrap_err().to_string();
        assert!(refused.contains("reads for each token 2 bytes"), "{refused}");
    }

    proptest! {
        /// Checks that bytes rise and loss falls along the path, and that no choice lies below the line between two
        /// neighbours of the path.
        #[test]
        fn the_path_is_the_convex_frontier(values in prop::collection::vec((1u64..50, 0.0f64..1.0), 12), s in 0.1f64..10.0) {
            let groups: Vec<Group> = values.chunks(4).map(|c| group(s, c)).collect();
            let path = path(&groups, Objective::Size);
            for pair in path.windows(2) {
                prop_assert!(size(&groups, &pair[0]) < size(&groups, &pair[1]));
                prop_assert!(expected_loss(&groups, &pair[0]) >= expected_loss(&groups, &pair[1]));
            }
            for choice in (0..64).map(|n| vec![n % 4, n / 4 % 4, n / 16]) {
                let (b, l) = (size(&groups, &choice) as f64, expected_loss(&groups, &choice));
                // Every choice lies on or above the line between two neighbours of the path.
                for pair in path.windows(2) {
                    let (b0, b1) = (size(&groups, &pair[0]) as f64, size(&groups, &pair[1]) as f64);
                    let (l0, l1) = (expected_loss(&groups, &pair[0]), expected_loss(&groups, &pair[1]));
                    prop_assert!(l + 1e-9 >= l0 + (l1 - l0) * (b - b0) / (b1 - b0));
                }
            }
        }
    }
}
