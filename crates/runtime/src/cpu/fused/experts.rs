//! A sum of gated MLPs, each times a weight per token. Only experts with a nonzero weight are read, and only for their tokens.

use super::super::weights::StoredWeight;
use super::inputs::NodeInputs;
use super::rounded;
use super::view::View;
use crate::backend::Counts;
use crate::tensor::Tensor;
use anemoe_kernels::{Columns, GateFunction, Isa, Layout, MatMul, Matrix, PackedActivations, Pool, Strided};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

/// Experts whose products run as one job.
const EXPERTS_PER_JOB: usize = 8;
/// Fewest experts of one token whose activations are computed on several threads.
const MIN_SHARED_EXPERTS: usize = 4;
/// Tokens to which a thread adds results in one part of a job.
const ADDED: usize = 16;

/// Rows of a weight: an expert's own matrix, or its rows of a bank.
pub(super) struct WeightRows {
    weight: Arc<StoredWeight>,
    rows: Range<usize>,
}

impl WeightRows {
    /// Makes part `place` of `of` equal parts of a weight; none where the rows cannot be divided so.
    pub fn new(weight: Arc<StoredWeight>, place: usize, of: usize) -> Option<WeightRows> {
        let each = weight.rows().checked_div(of)?;
        let fits = place < of && each * of == weight.rows();
        fits.then_some(WeightRows { weight, rows: place * each..(place + 1) * each })
    }

    pub fn matrix(&self) -> Matrix<'_> {
        self.weight.matrix().row_range(self.rows.start, self.rows.end)
    }
}

/// Elements of a constant: an expert's own bias, or its rows of a bank.
pub(super) struct BiasRows {
    constant: Arc<Tensor>,
    rows: Range<usize>,
}

impl BiasRows {
    /// Makes part `place` of the parts of `n` elements; none where there is no such part.
    pub fn new(constant: Arc<Tensor>, place: usize, n: usize) -> Option<BiasRows> {
        let first = place.checked_mul(n)?;
        let rows = first..first.checked_add(n)?;
        constant.as_f32()?.get(rows.clone())?;
        Some(BiasRows { constant, rows })
    }

    fn values(&self) -> &[f32] {
        self.constant.as_f32().and_then(|all| all.get(self.rows.clone())).unwrap_or_default()
    }
}

/// An expert: `(W_down f(gate, up) + b_down) w` with `[gate, up] = W_gate_up x + b`.
pub(super) struct Branch {
    pub gate_up: WeightRows,
    pub bias: Option<BiasRows>,
    pub down: WeightRows,
    pub down_bias: Option<BiasRows>,
    /// `[1, 1, 1, T]`
    pub weight: View,
    pub function: GateFunction,
}

/// Memory of one expert while it runs.
#[derive(Default)]
struct ExpertScratch {
    tokens: Vec<u32>,
    /// `[tokens, 2 F]`
    gate_up: Vec<f32>,
    /// `[tokens, F]`
    hidden: Vec<f32>,
    h: PackedActivations,
    /// `[tokens, rows]`
    out: Vec<f32>,
}

pub(super) struct Experts {
    pub x: View,
    pub branches: Vec<Branch>,
    pub tokens: usize,
    /// Channels of the result.
    pub rows: usize,
}

/// Memory of experts while they run.
#[derive(Default)]
struct ExpertWorkspace {
    /// The input, packed in each layout that the packs multiply.
    x: [PackedActivations; Layout::ALL.len()],
    /// The input with the channels of a token together, where it is not stored so.
    transposed: Vec<f32>,
    scratch: [ExpertScratch; EXPERTS_PER_JOB],
    /// Indices of pack and expert, for each chosen expert.
    chosen: Vec<(usize, usize)>,
    /// The sum, where it is added to other values.
    sum: Vec<f32>,
}

thread_local! {
    static WORKSPACE: RefCell<ExpertWorkspace> = RefCell::default();
}

/// Frees this thread's memory of experts.
pub(super) fn release_memory() {
    drop(WORKSPACE.take());
}

/// Experts of one function, with the values that they read.
pub(in crate::cpu) struct ExpertPack<'a> {
    pub(super) experts: &'a Experts,
    pub(super) sources: NodeInputs<'a>,
    /// Skip experts whose routing weights are all zero.
    pub(super) skip_zero: bool,
    /// Round every result to fp16, as separate operations do.
    pub(super) round: bool,
}

/// Receiver of a sum of experts.
pub(in crate::cpu) enum SumTarget<'a> {
    /// `[tokens, rows]`, which the sum replaces.
    Written(&'a mut [f32]),
    /// `[rows, tokens]`, to which the sum is added.
    Added(&'a mut [f32]),
}

impl ExpertPack<'_> {
    /// Returns the routing weight of expert `i` for token `t`.
    fn weight(&self, i: usize, t: usize) -> f32 {
        let weight = &self.experts.branches[i].weight;
        self.sources.get(weight.base)[weight.offset + t * weight.strides[3]]
    }

    fn columns(&self) -> Columns<'_> {
        let x = &self.experts.x;
        self.sources.columns(x, (x.strides[3], x.strides[1]))
    }

    /// Tells whether the packs read the same elements and have results of the same shape, so that they can be one sum.
    fn is_like(&self, other: &ExpertPack<'_>) -> bool {
        let (a, b) = (self.columns(), other.columns());
        let shapes = |e: &Experts| (e.tokens, e.rows, e.x.shape[1]);
        shapes(self.experts) == shapes(other.experts)
            && std::ptr::eq(a.values, b.values)
            && (a.first, a.token_stride, a.channel_stride) == (b.first, b.token_stride, b.channel_stride)
    }
}

/// Tells whether all packs can be one sum, of `n` elements.
pub(in crate::cpu) fn are_alike(packs: &[ExpertPack<'_>], n: usize) -> bool {
    let fits = packs.first().is_some_and(|p| p.experts.tokens * p.experts.rows == n);
    fits && packs.windows(2).all(|pair| pair[0].is_like(&pair[1]))
}

/// Computes the sum of all experts of packs that are alike. Counts for each pack the bytes of weights read and the experts skipped.
pub(in crate::cpu) fn sum(packs: &[ExpertPack<'_>], target: SumTarget<'_>, counts: &mut [Counts]) {
    let Some(&ExpertPack { experts, skip_zero, round, .. }) = packs.first() else { return };
    let (&Experts { tokens, rows, ref x, .. }, pool) = (experts, Pool::global());
    let mut workspace = WORKSPACE.take();
    let ExpertWorkspace { x: packed, transposed, scratch, chosen, sum } = &mut workspace;
    let (y, added) = match target {
        SumTarget::Written(y) => (&mut y[..tokens * rows], None),
        SumTarget::Added(to) => (at_least(sum, tokens * rows), Some(to)),
    };
    chosen.clear();
    for (p, (pack, counts)) in packs.iter().zip(counts.iter_mut()).enumerate() {
        for i in 0..pack.experts.branches.len() {
            match !skip_zero || (0..tokens).any(|t| pack.weight(i, t) != 0.0) {
                true => chosen.push((p, i)),
                false => counts.skipped += 1,
            }
        }
    }
    // For one token, the first expert writes its result, so zeros need not be written first.
    let mut first = tokens == 1 && !chosen.is_empty();
    if chosen.is_empty() {
        y.fill(0.0);
    } else {
        let (mut columns, channels) = (packs[0].columns(), x.shape[1]);
        if tokens > 1 && columns.token_stride == 1 {
            let from = Strided { first: columns.first, stride: columns.channel_stride };
            let to = Strided { first: 0, stride: channels };
            let out = at_least(transposed, tokens * channels);
            anemoe_kernels::transpose(pool, (tokens, channels), (columns.values, from), (out, to));
            columns = Columns { values: out, first: 0, token_stride: channels, channel_stride: 1 };
        }
        let mut wanted = [false; Layout::ALL.len()];
        for &(p, i) in &*chosen {
            wanted[packs[p].experts.branches[i].gate_up.matrix().layout() as usize] = true;
        }
        for ((order, packed), _) in
            Layout::ALL.into_iter().zip(packed.iter_mut()).zip(wanted).filter(|(_, w)| *w)
        {
            packed.pack(pool, order, columns, tokens, channels);
        }
    }
    for (at, chosen) in chosen.chunks(EXPERTS_PER_JOB).enumerate() {
        let mut all: [Option<MatMul<'_>>; EXPERTS_PER_JOB] = Default::default();
        for ((&(p, i), s), product) in chosen.iter().zip(scratch.iter_mut()).zip(&mut all) {
            let Branch { gate_up, bias, .. } = &packs[p].experts.branches[i];
            let w = gate_up.matrix();
            s.tokens.clear();
            s.tokens
                .extend((0..tokens as u32).filter(|t| !skip_zero || packs[p].weight(i, *t as usize) != 0.0));
            let y = at_least(&mut s.gate_up, s.tokens.len() * w.rows());
            let x = &packed[w.layout() as usize];
            let bias = bias.as_ref().map(BiasRows::values);
            *product = Some(MatMul { w, x, tokens: Some(&s.tokens), y, stride: w.rows(), bias });
            counts[p] += Counts::product(w.bytes_read(), s.tokens.len() * w.rows(), w.cols());
        }
        anemoe_kernels::matmul_batch(Isa::best(), pool, &mut all);
        let mut down: [Option<Matrix<'_>>; EXPERTS_PER_JOB] = [None; EXPERTS_PER_JOB];
        for (&(p, i), w) in chosen.iter().zip(&mut down) {
            *w = Some(packs[p].experts.branches[i].down.matrix());
        }
        let activate = |k: usize, s: &mut ExpertScratch| {
            let Some(w) = down[k] else { return };
            let (p, i) = chosen[k];
            let function = packs[p].experts.branches[i].function;
            let (n, m) = (w.cols(), s.tokens.len());
            let hidden = at_least(&mut s.hidden, m * n);
            if round {
                anemoe_kernels::round_to_f16(&mut s.gate_up[..2 * m * n]);
            }
            let each = s.tokens.iter().zip(hidden.chunks_exact_mut(n)).zip(s.gate_up.chunks_exact(2 * n));
            for ((t, h), g) in each {
                let weight = packs[p].weight(i, *t as usize);
                match round {
                    true => rounded::gate(&g[..n], &g[n..], weight, function, h),
                    false => anemoe_kernels::apply_gate(&g[..n], &g[n..], weight, function, h),
                }
            }
            let values = Columns { values: hidden, first: 0, token_stride: n, channel_stride: 1 };
            s.h.pack(pool, w.layout(), values, m, n);
        };
        let own = &mut scratch[..chosen.len()];
        if tokens == 1 && own.len() < MIN_SHARED_EXPERTS {
            // The work costs less than a job.
            own.iter_mut().enumerate().for_each(|(k, s)| activate(k, s));
        } else {
            pool.for_chunks(own, 1, &|k, s| s.iter_mut().for_each(|s| activate(k, s)));
        }
        let mut all: [Option<MatMul<'_>>; EXPERTS_PER_JOB] = Default::default();
        for (((w, s), product), (p, _)) in down.iter().zip(scratch.iter_mut()).zip(&mut all).zip(chosen) {
            let Some(w) = *w else { continue };
            let y = at_least(&mut s.out, s.tokens.len() * rows);
            *product = Some(MatMul { w, x: &s.h, tokens: None, y, stride: rows, bias: None });
            counts[*p] += Counts::product(w.bytes_read(), s.tokens.len() * rows, w.cols());
            counts[*p].experts += 1;
        }
        anemoe_kernels::matmul_batch(Isa::best(), pool, &mut all);
        for (&(p, i), s) in chosen.iter().zip(scratch.iter_mut()) {
            let Some(bias) = &packs[p].experts.branches[i].down_bias else { continue };
            for (t, out) in s.tokens.iter().zip(s.out.chunks_exact_mut(rows)) {
                let weight = packs[p].weight(i, *t as usize);
                out.iter_mut().zip(bias.values()).for_each(|(o, b)| *o += weight * b);
            }
        }
        if round {
            let own = &mut scratch[..chosen.len()];
            pool.for_chunks(own, 1, &|_, s| {
                s.iter_mut().for_each(|s| anemoe_kernels::round_to_f16(&mut s.out[..s.tokens.len() * rows]));
            });
        }
        if std::mem::take(&mut first) && !round {
            // Adding to zero turns -0 into 0, as in the sum.
            y.iter_mut().zip(&scratch[0].out[..rows]).for_each(|(y, o)| *y = 0.0 + o);
            add(&scratch[1..chosen.len()], y, 0, rows, false);
            continue;
        }
        let all = &scratch[..chosen.len()];
        pool.for_chunks(y, ADDED * rows, &|i, y| {
            if at == 0 {
                y.fill(0.0);
            }
            add(all, y, (i * ADDED) as u32, rows, round);
        });
    }
    match added {
        Some(to) if tokens == 1 => to.iter_mut().zip(y).for_each(|(a, b)| *a += *b),
        Some(to) => {
            let strided = |stride| Strided { first: 0, stride };
            anemoe_kernels::transpose_add(pool, (rows, tokens), (y, strided(rows)), (to, strided(tokens)));
        }
        None => {}
    }
    WORKSPACE.set(workspace);
}

/// Adds the results of experts to tokens `first..` of the sum, in the order of the experts, for any number of threads.
fn add(experts: &[ExpertScratch], y: &mut [f32], first: u32, rows: usize, round: bool) {
    let end = first + (y.len() / rows.max(1)) as u32;
    for s in experts {
        let (from, to) = (s.tokens.partition_point(|t| *t < first), s.tokens.partition_point(|t| *t < end));
        let out = s.out[from * rows..to * rows].chunks_exact(rows);
        for (t, out) in s.tokens[from..to].iter().zip(out) {
            let y = &mut y[(*t - first) as usize * rows..][..rows];
            y.iter_mut().zip(out).for_each(|(y, o)| *y += o);
            if round {
                anemoe_kernels::round_to_f16(y);
            }
        }
    }
}

/// Returns the first `n` elements of a buffer, which only grows.
fn at_least(buffer: &mut Vec<f32>, n: usize) -> &mut [f32] {
    if buffer.len() < n {
        buffer.resize(n, 0.0);
    }
    &mut buffer[..n]
}
