//! A sum of gated MLPs, each times a weight per token: only those with a weight are read, and only for their tokens.

use super::super::OpErrorAt;
use super::super::weights::StoredWeight;
use super::Sources;
use super::view::View;
use anemoe_kernels::{Columns, Gate, Matrix, Panel, Pool, Product};
use std::sync::Arc;

/// Experts whose products are one job.
const TOGETHER: usize = 8;
/// Tokens to which a thread adds at a time.
const ADDED: usize = 16;

pub(super) struct Branch {
    pub gate_up: Arc<StoredWeight>,
    pub down: Arc<StoredWeight>,
    /// `[1, 1, 1, T]`
    pub weight: View,
    pub kind: Gate,
}

/// What one expert needs while it runs.
#[derive(Default)]
struct Scratch {
    tokens: Vec<u32>,
    /// `[tokens, 2 F]`
    gate_up: Vec<f32>,
    /// `[tokens, F]`
    hidden: Vec<f32>,
    h: Panel,
    /// `[tokens, rows]`
    out: Vec<f32>,
}

pub(super) struct Experts {
    pub x: View,
    pub branches: Vec<Branch>,
    pub tokens: usize,
    pub out: usize,
    /// Channels of the result.
    rows: usize,
}

/// What experts need while they run.
#[derive(Default)]
pub(super) struct Workspace {
    x: Panel,
    scratch: [Scratch; TOGETHER],
    chosen: Vec<usize>,
}

impl Experts {
    pub fn new(x: View, branches: Vec<Branch>, tokens: usize, rows: usize, out: usize) -> Experts {
        Experts { x, branches, tokens, rows, out }
    }

    /// Gives the bytes of weights that were read, and the experts that were left out.
    pub fn run(
        &mut self,
        pool: &Pool,
        sources: &Sources<'_>,
        y: &mut [f32],
        skip_zero: bool,
        workspace: &mut Workspace,
    ) -> OpErrorAt<(u64, u64)> {
        let Experts { x, branches, tokens, rows, .. } = self;
        let (tokens, rows) = (*tokens, *rows);
        let Workspace { x: panel, scratch, chosen } = workspace;
        let y = &mut y[..tokens * rows];
        let weight =
            |b: &Branch, t: usize| sources.get(b.weight.base)[b.weight.offset + t * b.weight.strides[3]];
        chosen.clear();
        for (i, b) in branches.iter().enumerate() {
            if !skip_zero || (0..tokens).any(|t| weight(b, t) != 0.0) {
                chosen.push(i);
            }
        }
        // One token's first expert writes in place of zeros.
        let mut first = tokens == 1 && !chosen.is_empty();
        if !first {
            y.fill(0.0);
        }
        let mut bytes = 0;
        if let Some(&i) = chosen.first() {
            let values = Columns {
                values: sources.get(x.base),
                first: x.offset,
                token_stride: x.strides[3],
                channel_stride: x.strides[1],
            };
            // All are of one order, see `Builder::experts`.
            panel.fill(branches[i].gate_up.matrix()?.order(), values, tokens, x.shape[1], None);
        }
        for chosen in chosen.chunks(TOGETHER) {
            let mut all: [Option<Product<'_>>; TOGETHER] = Default::default();
            for ((i, s), p) in chosen.iter().zip(scratch.iter_mut()).zip(&mut all) {
                let b = &branches[*i];
                let w = b.gate_up.matrix()?;
                s.tokens.clear();
                s.tokens.extend((0..tokens as u32).filter(|t| !skip_zero || weight(b, *t as usize) != 0.0));
                let y = at_least(&mut s.gate_up, s.tokens.len() * w.rows());
                *p = Some(Product { w, x: panel, tokens: Some(&s.tokens), y, stride: w.rows(), bias: None });
                bytes += w.bytes_read();
            }
            anemoe_kernels::products(pool, &mut all);
            let mut down: [Option<Matrix<'_>>; TOGETHER] = [None; TOGETHER];
            for (i, w) in chosen.iter().zip(&mut down) {
                *w = Some(branches[*i].down.matrix()?);
            }
            let activate = |k: usize, s: &mut Scratch| {
                let (b, Some(w)) = (&branches[chosen[k]], down[k]) else { return };
                let (n, m) = (w.cols(), s.tokens.len());
                let hidden = at_least(&mut s.hidden, m * n);
                let each = s.tokens.iter().zip(hidden.chunks_exact_mut(n)).zip(s.gate_up.chunks_exact(2 * n));
                for ((t, h), g) in each {
                    anemoe_kernels::gated(&g[..n], &g[n..], weight(b, *t as usize), b.kind, h);
                }
                let values = Columns { values: hidden, first: 0, token_stride: n, channel_stride: 1 };
                s.h.fill(w.order(), values, m, n, None);
            };
            let own = &mut scratch[..chosen.len()];
            if tokens == 1 {
                // Less than what a job costs.
                own.iter_mut().enumerate().for_each(|(k, s)| activate(k, s));
            } else {
                pool.pieces(own, 1, &|k, s| s.iter_mut().for_each(|s| activate(k, s)));
            }
            let mut all: [Option<Product<'_>>; TOGETHER] = Default::default();
            for ((w, s), p) in down.iter().zip(scratch.iter_mut()).zip(&mut all) {
                let Some(w) = *w else { continue };
                let y = at_least(&mut s.out, s.tokens.len() * rows);
                *p = Some(Product { w, x: &s.h, tokens: None, y, stride: rows, bias: None });
                bytes += w.bytes_read();
            }
            anemoe_kernels::products(pool, &mut all);
            if std::mem::take(&mut first) {
                y.copy_from_slice(&scratch[0].out[..rows]);
                add(&scratch[1..chosen.len()], y, 0, rows);
                continue;
            }
            let all = &scratch[..chosen.len()];
            pool.pieces(y, ADDED * rows, &|i, y| add(all, y, (i * ADDED) as u32, rows));
        }
        Ok((bytes, (branches.len() - chosen.len()) as u64))
    }
}

/// Adds what experts gave to tokens `first..` of the result, in the order of the experts, whatever threads there are.
fn add(experts: &[Scratch], y: &mut [f32], first: u32, rows: usize) {
    let end = first + (y.len() / rows.max(1)) as u32;
    for s in experts {
        let (from, to) = (s.tokens.partition_point(|t| *t < first), s.tokens.partition_point(|t| *t < end));
        let out = s.out[from * rows..to * rows].chunks_exact(rows);
        for (t, out) in s.tokens[from..to].iter().zip(out) {
            let y = &mut y[(*t - first) as usize * rows..][..rows];
            y.iter_mut().zip(out).for_each(|(y, o)| *y += o);
        }
    }
}

/// The first n of a buffer that only grows.
fn at_least(buffer: &mut Vec<f32>, n: usize) -> &mut [f32] {
    if buffer.len() < n {
        buffer.resize(n, 0.0);
    }
    &mut buffer[..n]
}
