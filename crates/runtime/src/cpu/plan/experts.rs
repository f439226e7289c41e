//! A sum of gated MLPs, each times a weight per token: only those with a weight are read, and only for their tokens.

use super::super::OpErrorAt;
use super::super::weights::StoredWeight;
use super::Sources;
use super::view::View;
use anemoe_kernels::{Columns, Gate, Panel, Pool, Product, Term};
use std::sync::Arc;

/// Experts whose products are one job.
const TOGETHER: usize = 8;

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
    x: Panel,
    /// `[tokens, 2 F]`
    gate_up: Vec<f32>,
    /// `[tokens, F]`
    hidden: Vec<f32>,
    h: Panel,
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
        let Workspace { scratch, chosen } = workspace;
        let y = &mut y[..tokens * rows];
        let weight =
            |b: &Branch, t: usize| sources.get(b.weight.base)[b.weight.offset + t * b.weight.strides[3]];
        chosen.clear();
        for (i, b) in branches.iter().enumerate() {
            if !skip_zero || (0..tokens).any(|t| weight(b, t) != 0.0) {
                chosen.push(i);
            }
        }
        let mut bytes = 0;
        let mut first = true;
        if chosen.is_empty() {
            y.fill(0.0);
        }
        for chosen in chosen.chunks(TOGETHER) {
            for (i, s) in chosen.iter().zip(scratch.iter_mut()) {
                let b = &branches[*i];
                s.tokens.clear();
                s.tokens.extend((0..tokens as u32).filter(|t| !skip_zero || weight(b, *t as usize) != 0.0));
                let values = Columns {
                    values: sources.get(x.base),
                    first: x.offset,
                    token_stride: x.strides[3],
                    channel_stride: x.strides[1],
                };
                let w = b.gate_up.matrix()?;
                s.x.fill(w.order(), values, s.tokens.len(), w.cols(), Some(&s.tokens));
                s.gate_up.resize(s.tokens.len() * w.rows(), 0.0);
                bytes += w.bytes_read();
            }
            let mut all: [Option<Product<'_>>; TOGETHER] = Default::default();
            for ((i, s), p) in chosen.iter().zip(scratch.iter_mut()).zip(&mut all) {
                let w = branches[*i].gate_up.matrix()?;
                *p = Some(Product { w, x: &s.x, y: &mut s.gate_up, stride: w.rows(), bias: None });
            }
            anemoe_kernels::products(pool, &mut all);
            for (i, s) in chosen.iter().zip(scratch.iter_mut()) {
                let b = &branches[*i];
                let w = b.down.matrix()?;
                let n = w.cols();
                s.hidden.resize(s.tokens.len() * n, 0.0);
                for ((t, h), g) in
                    s.tokens.iter().zip(s.hidden.chunks_exact_mut(n)).zip(s.gate_up.chunks_exact(2 * n))
                {
                    anemoe_kernels::gated(&g[..n], &g[n..], weight(b, *t as usize), b.kind, h);
                }
                let values = Columns { values: &s.hidden, first: 0, token_stride: n, channel_stride: 1 };
                s.h.fill(w.order(), values, s.tokens.len(), n, None);
                bytes += w.bytes_read();
            }
            let mut terms: [Option<Term<'_>>; TOGETHER] = [None; TOGETHER];
            for ((i, s), term) in chosen.iter().zip(scratch.iter()).zip(&mut terms) {
                *term = Some(Term { w: branches[*i].down.matrix()?, x: &s.h, tokens: Some(&s.tokens) });
            }
            anemoe_kernels::add_products(pool, &terms, y, rows, first);
            first = false;
        }
        Ok((bytes, (branches.len() - chosen.len()) as u64))
    }
}
