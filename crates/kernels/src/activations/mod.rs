//! Packs activations in the layouts that the tile loops read.
//!
//! ```text
//! [tokens, channels], strided           a token, packed: blocks of 128 columns, the last one filled with zeros
//!   t0: x x x x x x ...        f32      [blocks][8 vectors][16 lanes] f32, columns in the order of the layout
//!   t1: x x x x x x ...  --->  int16    [blocks][4][2 digits][32] i16, a power of two per lane and 4 blocks
//!   ...                        int8     [digits][blocks][2][64] i8, a scale per lane and 8 blocks
//!                              bf16     [lines][32] bf16
//! ```
//!
//! A block's 128 columns lie in 8 vectors of 16 lanes. [`Layout`] says which column is lane `l` of vector `k`.

mod bf16;
mod f32;
mod layout;
mod packed_int16;
mod packed_int8;
mod packed_integers;

pub(crate) use bf16::COLUMNS_PER_LINE;
#[cfg(test)]
pub(crate) use bf16::pack as pack_bf16;
pub(crate) use layout::BLOCK;
pub use layout::Layout;

pub(crate) use packed_int8::{
    BLOCKS_PER_SCALE as INT8_BLOCKS_PER_SCALE, WITH_SUMS as INT8_LINES_WITH_SUMS, ZERO as ZERO_CODE,
};
pub(crate) use packed_int16::{BLOCKS_PER_SCALE as INT16_BLOCKS_PER_SCALE, VECTORS as INT16_VECTORS};

use crate::Pool;
use crate::memory::AlignedVec;
use crate::simd::LANES;
use f32::{WriteToken, arrange, with_arranged};
use packed_integers::IntegerTokens;
use std::cell::RefCell;

/// Holds the tokens of a matmul in the layout that a matrix needs. Reuses its memory from use to use.
#[derive(Clone, Debug, Default)]
pub struct PackedActivations {
    /// f32 vectors, of the f32 layouts and of Int16.
    pub(crate) data: AlignedVec<[f32; LANES]>, // [tokens, blocks, 8, 16]
    pub(crate) tokens: usize,
    pub(crate) cols: usize,
    pub(crate) layout: Layout,
    /// Elements of the layouts of 8-bit integers, and the sum of each token.
    pub(crate) int8: IntegerTokens<f32>,
    /// Elements of [`Layout::Int16`], and whether a token is out of range and multiplied in f32.
    pub(crate) int16: IntegerTokens<bool>,
    /// Elements of [`Layout::Bf16`].
    pub(crate) bf16: AlignedVec<[u8; 64]>, // [tokens, lines, 32] bf16
}

/// Elements that one thread packs at a time: 32 KB of f32, which stay in L1. Not tuned.
const PART: usize = 1 << 13;

thread_local! {
    /// The channels of one token, gathered where they are not contiguous.
    static GATHERED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Describes where the channels of tokens lie: element (t, c) is `values[first + t * token_stride + c * channel_stride]`.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// The elements.
    pub values: &'a [f32],
    /// Index of channel 0 of token 0.
    pub first: usize,
    /// Elements from token to token.
    pub token_stride: usize,
    /// Elements from channel to channel.
    pub channel_stride: usize,
}

impl PackedActivations {
    /// Returns the number of channels, padded to whole blocks.
    pub(crate) fn padded(&self) -> usize {
        self.cols.next_multiple_of(BLOCK)
    }

    /// Returns the number of blocks per token.
    pub(crate) fn blocks(&self) -> usize {
        self.cols.div_ceil(BLOCK)
    }

    /// Returns a token's f32 vectors.
    #[inline(always)]
    pub(crate) fn vectors(&self, token: usize) -> &[[f32; LANES]] {
        let n = self.padded() / LANES;
        &self.data[token * n..(token + 1) * n]
    }

    /// Tells whether memory for all tokens is allocated in the layout.
    pub(crate) fn is_packed(&self) -> bool {
        let elements = self.tokens * self.padded();
        match self.layout {
            Layout::F32 | Layout::F32Interleaved | Layout::Int16 => self.data.len() * LANES >= elements,
            Layout::Int8 | Layout::Int8Interleaved => self.int8.lines.len() * 64 >= elements,
            Layout::Int8Digits => self.int8.lines.len() * 64 >= 2 * elements,
            Layout::Int8Blocks => self.int8.lines.len() * 64 >= elements / 2 * 3,
            Layout::Bf16 => self.bf16.len() * COLUMNS_PER_LINE >= elements,
        }
    }

    /// Returns the number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Packs `tokens` tokens of `cols` channels.
    ///
    /// # Panics
    /// An element lies outside `x`.
    pub fn pack(&mut self, pool: &Pool, layout: Layout, x: Columns<'_>, tokens: usize, cols: usize) {
        let start = |t: usize| x.first + t * x.token_stride;
        if x.channel_stride == 1 {
            let write = |t, out: &mut [f32]| arrange(layout, &x.values[start(t)..][..cols], out);
            return self.pack_tokens(pool, layout, tokens, cols, &write);
        }
        self.pack_gathered(pool, layout, tokens, cols, &|t, gathered| {
            for (c, v) in gathered.iter_mut().enumerate() {
                *v = x.values[start(t) + c * x.channel_stride];
            }
        });
    }

    /// Packs `tokens` tokens of `cols` channels; `gather` writes a token's channels in order.
    pub(crate) fn pack_gathered(
        &mut self,
        pool: &Pool,
        layout: Layout,
        tokens: usize,
        cols: usize,
        gather: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        self.pack_tokens(pool, layout, tokens, cols, &|t, out| {
            if layout == Layout::F32 {
                gather(t, &mut out[..cols]);
                return out[cols..].fill(0.0);
            }
            let mut gathered = GATHERED.take();
            gathered.resize(cols, 0.0);
            gather(t, &mut gathered);
            arrange(layout, &gathered, out);
            GATHERED.set(gathered);
        });
    }

    /// Packs `tokens` tokens of `cols` channels; `token` writes a token's vectors in the order of the layout.
    fn pack_tokens(
        &mut self,
        pool: &Pool,
        layout: Layout,
        tokens: usize,
        cols: usize,
        token: &WriteToken<'_>,
    ) {
        (self.layout, self.tokens, self.cols) = (layout, tokens, cols);
        let (padded, blocks) = (self.padded(), self.blocks());
        let per_part = (PART / padded.max(1)).max(1);
        match layout {
            Layout::F32 | Layout::F32Interleaved | Layout::Int16 => {
                self.data.grow(tokens * padded / LANES, [0.0; LANES]);
                let data = &mut self.data.as_flattened_mut()[..tokens * padded];
                pool.for_chunks(data, per_part * padded, &|i, out| {
                    (i * per_part..).zip(out.chunks_exact_mut(padded)).for_each(|(t, out)| token(t, out));
                });
                if layout == Layout::Int16 {
                    let (vectors, scales) = (padded / LANES, blocks.div_ceil(INT16_BLOCKS_PER_SCALE));
                    let data = &self.data;
                    let sizes = (blocks * packed_int16::LINES, scales);
                    self.int16.pack(pool, (tokens, per_part), sizes, &|t, lines, scales, out_of_range| {
                        packed_int16::pack_token(
                            &data[t * vectors..][..vectors],
                            lines,
                            scales,
                            out_of_range,
                        );
                    });
                }
            }
            Layout::Int8Interleaved | Layout::Int8Blocks | Layout::Int8 | Layout::Int8Digits => {
                use packed_int8::*;
                let (order, lines, scales, pack): (_, _, _, PackIntegers) = match layout {
                    Layout::Int8Interleaved => (NIBBLES, LINES, 1, pack_token),
                    Layout::Int8Blocks => (NIBBLES, WITH_SUMS, 1, pack_token_with_sums),
                    Layout::Int8Digits => (BYTES, 2 * LINES, 2, pack_token_in_digits),
                    _ => (BYTES, LINES, 1, pack_token),
                };
                let sizes = (blocks * lines, blocks.div_ceil(BLOCKS_PER_SCALE) * scales);
                self.int8.pack(pool, (tokens, per_part), sizes, &|t, lines, scales, sum| {
                    with_arranged(token, t, padded, |x| pack(x, &order, lines, scales, sum));
                });
            }
            Layout::Bf16 => {
                let lines = padded / COLUMNS_PER_LINE;
                self.bf16.grow(tokens * lines, [0; 64]);
                pool.for_chunks(&mut self.bf16[..tokens * lines], per_part * lines, &|i, out| {
                    for (t, out) in (i * per_part..).zip(out.chunks_exact_mut(lines)) {
                        with_arranged(token, t, padded, |vectors| bf16::pack(vectors, out));
                    }
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::noise;

    #[test]
    fn tokens_are_the_same_however_they_lie() {
        for (tokens, cols) in [(1, 1), (3, 130), (16, 256), (37, 300), (70, 1)] {
            let x = noise(tokens as u64, 5 + tokens * cols);
            let pool = Pool::new(2);
            let mut across = x.clone();
            for t in 0..tokens {
                (0..cols).for_each(|c| across[5 + c * tokens + t] = x[5 + t * cols + c]);
            }
            for (i, layout) in Layout::ALL.into_iter().enumerate() {
                assert_eq!(layout as usize, i);
                let (mut a, mut b) = (PackedActivations::default(), PackedActivations::default());
                let lie = |values, token_stride, channel_stride| Columns {
                    values,
                    first: 5,
                    token_stride,
                    channel_stride,
                };
                a.pack(&pool, layout, lie(&x, cols, 1), tokens, cols);
                b.pack(&pool, layout, lie(&across, 1, tokens), tokens, cols);
                assert!(a.is_packed());
                assert_eq!((&*a.data, &*a.bf16), (&*b.data, &*b.bf16), "{layout:?}");
                assert_eq!(format!("{:?}", a.int8), format!("{:?}", b.int8), "{layout:?}");
                assert_eq!(format!("{:?}", a.int16), format!("{:?}", b.int16), "{layout:?}");
            }
        }
    }

    #[test]
    fn vectors_have_the_columns_of_their_layout() {
        for cols in [1usize, 100, 128, 300, 512] {
            let x: Vec<f32> = (0..cols).map(|c| 1.0 + c as f32).collect();
            for layout in [Layout::F32Interleaved, Layout::Int8] {
                let mut out = vec![f32::NAN; cols.next_multiple_of(BLOCK)];
                arrange(layout, &x, &mut out);
                for (i, v) in out.iter().enumerate() {
                    let (block, k, l) = (i / BLOCK, i % BLOCK / LANES, i % LANES);
                    let column = match layout {
                        Layout::Int8 => 64 * (k / 4) + 4 * l + k % 4,
                        _ => 8 * l + k,
                    };
                    let c = block * BLOCK + column;
                    assert_eq!(*v, if c < cols { 1.0 + c as f32 } else { 0.0 }, "{layout:?} {cols}");
                }
            }
        }
    }
}
