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
use crate::quantize::{Encoder, Metrics, q4_0};
use crate::{Error, Result};
use anemoe_bundle::{IndexBits, IntBits, TensorChoice};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

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

/// Matrices that get one kind: those of a tensor, or of some experts of a stacked tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// Checkpoint tensor without its prefix.
    pub tensor: String,
    /// Part of the model.
    pub part: String,
    /// The experts, ascending; empty for all of a tensor.
    pub experts: Vec<usize>,
    /// The matrices, in the order of their places in the tensor.
    pub matrices: Vec<MatrixPlan>,
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
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpertUse {
    /// Number of tokens that chose each expert, `[layers, experts]`.
    pub chosen: Vec<Vec<u64>>,
    /// Tokens that were counted.
    pub tokens: u64,
}

/// Tokens added to the counts as if they chose all experts equally often, so that an expert without tokens is not
/// free.
const PRIOR_TOKENS: f64 = 8.0;

impl ExpertUse {
    /// Returns the share of tokens that chose an expert of a layer, see [`PRIOR_TOKENS`]; `average` where the layer or
    /// the expert is not known.
    fn share(&self, layer: Option<usize>, expert: Option<usize>, average: f64) -> f64 {
        let count = layer.zip(expert).and_then(|(l, e)| self.chosen.get(l)?.get(e));
        let share = |&n: &u64| (n as f64 + PRIOR_TOKENS * average) / (self.tokens as f64 + PRIOR_TOKENS);
        count.map_or(average, share)
    }
}

/// Returns the share of tokens that choose an expert, if all were chosen equally often.
fn average_use(plan: &Plan) -> f64 {
    plan.totals.experts_per_token as f64 / (plan.totals.experts as f64).max(1.0)
}

/// Sets, for each group, the share of its bytes that a token reads, from the experts that tokens chose.
pub fn share_reads(plan: &Plan, groups: &mut [Group], used: &ExpertUse) {
    let average = average_use(plan);
    for group in groups.iter_mut().filter(|g| g.part == "experts") {
        let (mut sum, mut weights) = (0.0, 0.0);
        for m in &group.matrices {
            sum += used.share(m.layer(), m.expert(), average) * m.weights() as f64;
            weights += m.weights() as f64;
        }
        group.read = sum / f64::max(weights, 1.0);
    }
}

/// Classes of experts of a stacked tensor that may get kinds of their own.
const EXPERT_CLASSES: usize = 4;

/// Divides groups of stacked tensors, whose experts lie in matrices of their own, by how often tokens chose the experts:
/// what an expert loses counts for the tokens that choose it, and its bytes always.
pub fn divide_by_use(plan: &Plan, groups: Vec<Group>, used: &ExpertUse) -> Vec<Group> {
    let average = average_use(plan);
    let mut divided = Vec::new();
    for group in groups {
        let experts: Option<BTreeSet<usize>> = group.matrices.iter().map(MatrixPlan::expert).collect();
        let mut experts: Vec<usize> = experts.unwrap_or_default().into_iter().collect();
        let layer = group.matrices.first().and_then(MatrixPlan::layer);
        // Matrices of a bank share a scale.
        if experts.len() < 2 || group.part != "experts" || group.matrices.iter().any(|m| m.bank) {
            divided.push(group);
            continue;
        }
        let share = |expert: usize| used.share(layer, Some(expert), average);
        experts.sort_by(|&a, &b| share(a).total_cmp(&share(b)));
        for class in experts.chunks(experts.len().div_ceil(EXPERT_CLASSES)) {
            let mut own = Group { experts: class.to_vec(), ..group.clone() };
            own.experts.sort_unstable();
            own.matrices.retain(|m| m.expert().is_some_and(|e| own.experts.contains(&e)));
            for c in &mut own.candidates {
                c.bytes = bytes(&own.matrices, c.kind, plan.options.groups);
            }
            divided.push(own);
        }
    }
    divided
}

/// Returns the bytes of matrices in a kind.
fn bytes(matrices: &[MatrixPlan], kind: Quant, groups: Groups) -> u64 {
    matrices.iter().map(|m| MatrixQuant::resolve(kind, groups, m.rows, m.cols).bytes(m.rows, m.cols)).sum()
}

/// Kind that a tensor may get, with its bytes and its error.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// The kind.
    pub kind: Quant,
    /// Bytes of all matrices of the tensor.
    pub bytes: u64,
    /// Relative squared error of the output.
    pub error: f64,
}

/// Returns the matrices of a plan by tensor and part of the model, in the order of their places in the tensor.
pub fn matrices(plan: &Plan) -> BTreeMap<(String, String), Vec<MatrixPlan>> {
    let mut all: BTreeMap<(String, String), Vec<MatrixPlan>> = BTreeMap::new();
    for m in plan.shards.iter().flat_map(|s| &s.matrices) {
        all.entry((m.tensor.clone(), m.part.clone())).or_default().push(m.clone());
    }
    all.values_mut().for_each(|own| own.sort_by_key(|m| m.offset));
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
            let bytes = bytes(&matrices, kind, plan.options.groups);
            let mut metrics = Metrics::default();
            for m in &parts {
                let m = MatrixPlan { quant: resolve(m), ..m.clone() };
                metrics
                    .merge(&encode_matrix(&family.checked, &m, importance, None, &mut |_| Ok(()))?.metrics);
            }
            candidates.push(Candidate { kind, bytes, error: metrics.output_error() });
        }
        let average = average_use(plan);
        let read = if part == "experts" { average } else { 1.0 };
        groups.push(Group {
            tensor,
            part,
            experts: Vec::new(),
            matrices,
            candidates,
            sensitivity: 1.0,
            read,
        });
        progress(done, total);
    }
    if groups.is_empty() {
        return Err(Error::usage("--quant auto has nothing to choose: every part has a kind of its own"));
    }
    Ok(groups)
}

/// Compresses matrices of a tensor and decodes them again: returns their values, one matrix behind the other, and
/// compressed bytes.
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
    let (mut values, mut bytes) = (Vec::new(), 0);
    for m in matrices {
        let quant = MatrixQuant::resolve(kind, groups, m.rows, m.cols);
        let m = MatrixPlan { quant, ..m.clone() };
        let mut packed = Vec::new();
        let side = encode_matrix(&family.checked, &m, importance, None, &mut |b| {
            packed.extend_from_slice(b);
            Ok(())
        })?;
        let encoder = Encoder::plain(m.rows, m.cols, quant);
        values.extend(encoder.decode(&packed, &side).map_err(|e| Error::usage(e.to_string()))?);
        bytes += m.bytes();
    }
    Ok((values, bytes))
}

/// Returns the values that GGUF's Q4_0 gives matrices.
///
/// # Errors
/// A tensor cannot be read.
pub fn in_q4(family: &Family, matrices: &[MatrixPlan]) -> Result<Vec<f32>> {
    let mut values = Vec::new();
    for m in matrices {
        let mut own = vec![0f32; m.weights() as usize];
        family.checked.read(&m.tensor, m.offset..m.offset + m.weights(), &mut own)?;
        own.chunks_mut(m.cols).for_each(q4_0::round_trip);
        values.extend(own);
    }
    Ok(values)
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

/// Kinds by tensor, part of the model, and expert where experts of a tensor have kinds of their own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Kinds(BTreeMap<(String, String, Option<usize>), Quant>);

impl Kinds {
    /// Sets the kind of a tensor, or of some of its experts.
    pub fn set(&mut self, tensor: &str, part: &str, experts: &[usize], kind: Quant) {
        let key = |expert| (tensor.to_string(), part.to_string(), expert);
        match experts {
            [] => self.0.extend([(key(None), kind)]),
            experts => self.0.extend(experts.iter().map(|&e| (key(Some(e)), kind))),
        }
    }

    /// Returns the kind of a matrix; none where nothing was chosen for it.
    pub fn of(&self, m: &MatrixPlan) -> Option<Quant> {
        let of = |expert| self.0.get(&(m.tensor.clone(), m.part.clone(), expert)).copied();
        of(None).or_else(|| of(Some(m.expert()?)))
    }
}

/// Returns the kinds of a choice.
pub fn kinds(groups: &[Group], choice: &Choice) -> Kinds {
    let mut kinds = Kinds::default();
    for (g, &i) in groups.iter().zip(choice) {
        kinds.set(&g.tensor, &g.part, &g.experts, g.candidates[i].kind);
    }
    kinds
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
                experts: g.experts.clone(),
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
pub fn apply(plan: &mut Plan, kinds: &Kinds) -> Result<()> {
    let groups: Groups = plan.options.groups;
    plan.requantize(|m| Some(MatrixQuant::resolve(kinds.of(m)?, groups, m.rows, m.cols)))
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
        let (tensor, part) = ("t".into(), "experts".into());
        Group { tensor, part, experts: vec![], matrices: vec![], candidates, sensitivity, read: 1.0 }
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

    #[test]
    fn experts_are_divided_by_use() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny-gemma4-moe");
        let family = crate::models::open(crate::models::load(&path).unwrap()).unwrap();
        let plan = family.plan(&Default::default()).unwrap();
        let groups = measure(&family, &plan, None, true, &mut |_, _| ()).unwrap();
        let experts = plan.totals.experts as usize;
        // The last expert is chosen most often.
        let chosen = vec![(0..experts as u64).map(|e| e * e * 10).collect(); family.decoder.layers.len()];
        let used = ExpertUse { chosen, tokens: 1000 };
        let mut divided = divide_by_use(&plan, groups.clone(), &used);
        share_reads(&plan, &mut divided, &used);
        assert_eq!(cost(&groups, &vec![2; groups.len()], Objective::Size), {
            cost(&divided, &vec![2; divided.len()], Objective::Size)
        });
        let own: Vec<&Group> = divided.iter().filter(|g| g.tensor == "layers.0.experts.down_proj").collect();
        assert_eq!(own.len(), EXPERT_CLASSES.min(experts));
        assert_eq!(
            own.iter().flat_map(|g| g.experts.clone()).collect::<Vec<_>>(),
            (0..experts).collect::<Vec<_>>()
        );
        assert!(own.windows(2).all(|pair| pair[0].read < pair[1].read), "{own:?}");
        let choice = divided.iter().map(|g| usize::from(g.experts.contains(&(experts - 1)))).collect();
        let kinds = kinds(&divided, &choice);
        let mut changed = plan.clone();
        apply(&mut changed, &kinds).unwrap();
        let of_experts = changed.shards.iter().flat_map(|s| &s.matrices).filter(|m| m.part == "experts");
        for m in of_experts {
            let kind =
                if own.last().unwrap().experts.contains(&m.expert().unwrap()) { KINDS[1] } else { KINDS[0] };
            assert_eq!(
                (kinds.of(m), m.quant),
                (Some(kind), MatrixQuant::resolve(kind, plan.options.groups, m.rows, m.cols))
            );
        }
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
