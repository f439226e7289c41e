//! Packs activations as f32 vectors in the order of a layout.

use super::layout::Layout;
use crate::memory::AlignedVec;
use crate::simd::{F32x16, LANES, simd_fn};
use std::cell::RefCell;

thread_local! {
    /// One token's f32 vectors in the order of its layout: the input of packing as integers or bf16.
    static ARRANGED: RefCell<AlignedVec<[f32; LANES]>> = const { RefCell::new(AlignedVec::new()) };
}

/// Writes the vectors of token t in the order of a layout.
pub(super) type WriteToken<'a> = dyn Fn(usize, &mut [f32]) + Sync + 'a;

/// Calls `then` with the vectors of token `t`, padded to `padded` channels.
pub(super) fn with_arranged(
    token: &WriteToken<'_>,
    t: usize,
    padded: usize,
    then: impl FnOnce(&[[f32; LANES]]),
) {
    let mut vectors = ARRANGED.take();
    vectors.grow(padded / LANES, [0.0; LANES]);
    token(t, &mut vectors.as_flattened_mut()[..padded]);
    then(&vectors[..padded / LANES]);
    ARRANGED.set(vectors);
}

/// Arranges one token whose channels are contiguous.
pub(super) fn arrange(layout: Layout, x: &[f32], out: &mut [f32]) {
    match layout {
        Layout::F32 | Layout::Bf16 => {
            out[..x.len()].copy_from_slice(x);
            out[x.len()..].fill(0.0);
        }
        Layout::F32Interleaved | Layout::Int16 | Layout::Int8Interleaved | Layout::Int8Blocks => {
            to_interleaved(x, out);
        }
        Layout::Int8 | Layout::Int8Digits => to_byte_groups(x, out),
    }
}

simd_fn! {
    /// Writes a token's vectors: lane l of vector k of a block has column `8 l + k`.
    fn to_interleaved(x: &[f32], out: &mut [f32]) = interleave, 8
}

simd_fn! {
    /// Writes a token's vectors: lane l of vector k of a block has column `64 (k / 4) + 4 l + k % 4`.
    fn to_byte_groups(x: &[f32], out: &mut [f32]) = interleave, 4
}

/// Columns of one transposition: 16 vectors of 16 lanes.
const COLUMNS: usize = LANES * LANES;

/// Writes P vectors for each `16 P` columns of `x`: lane l of vector k has column `P l + k`. `out` is whole blocks;
/// zeros pad `x`.
#[inline(always)]
fn interleave<L: F32x16, const P: usize>(x: &[f32], out: &mut [f32]) {
    let (whole, rest) = x.as_chunks::<COLUMNS>();
    let (out, out_rest) = out.split_at_mut(whole.len() * COLUMNS);
    for (x, out) in whole.iter().zip(out.as_chunks_mut().0) {
        transpose_columns::<L, P>(x, out);
    }
    if !out_rest.is_empty() {
        let (mut columns, mut transposed) = ([0f32; COLUMNS], [0f32; COLUMNS]);
        columns[..rest.len()].copy_from_slice(rest);
        transpose_columns::<L, P>(&columns, &mut transposed);
        out_rest.copy_from_slice(&transposed[..out_rest.len()]);
    }
}

#[inline(always)]
fn transpose_columns<L: F32x16, const P: usize>(x: &[f32; COLUMNS], out: &mut [f32; COLUMNS]) {
    let mut rows = [L::splat(0.0); LANES];
    for (l, row) in rows.iter_mut().enumerate() {
        let mut parts = [0f32; LANES];
        for (p, part) in parts.as_chunks_mut::<P>().0.iter_mut().enumerate() {
            part.copy_from_slice(&x[LANES * P * p + P * l..][..P]);
        }
        *row = L::load(&parts);
    }
    for (row, out) in L::transpose(rows).into_iter().zip(out.as_chunks_mut::<LANES>().0) {
        row.store(out);
    }
}
