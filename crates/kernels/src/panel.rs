//! Activations laid out for products.

use crate::decode::{BLOCK, Order};
use crate::fast::{IN_ORDER, Narrow, PACKED, bf16};
use crate::lanes::{LANES, Lanes};
use crate::lines::Lines;
use crate::pool::Pool;
use crate::vector::dispatch;
use crate::words::WideTokens;
use std::cell::RefCell;

/// Tokens of a product: each token's channels one after the other, in the order of a matrix kind, padded with zeros to whole
/// blocks. Its allocation is kept from use to use.
#[derive(Clone, Debug, Default)]
pub struct Panel {
    /// `[tokens, padded]`, where products are of f32 or exact integers.
    pub(crate) data: Lines<[f32; LANES]>,
    pub(crate) tokens: usize,
    pub(crate) cols: usize,
    pub(crate) order: Order,
    /// Where the order is one of integers.
    pub(crate) narrow: Narrow,
    /// Where the order is one of exact integers.
    pub(crate) wide: WideTokens,
    /// `[tokens, padded]`, where the order is one of bf16.
    pub(crate) halves: Lines<[u8; 64]>,
}

/// Elements that one thread arranges at a time; a call with fewer is not shared.
const TOGETHER: usize = 1 << 13;

thread_local! {
    /// Columns of a token that do not lie together.
    static GATHERED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// A token that is rounded.
    static ARRANGED: RefCell<Lines<[f32; LANES]>> = const { RefCell::new(Lines::new()) };
}

/// Where the channels of tokens are in a slice.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// The elements.
    pub values: &'a [f32],
    /// Place of channel 0 of token 0.
    pub first: usize,
    /// From token to token.
    pub token_stride: usize,
    /// From channel to channel.
    pub channel_stride: usize,
}

impl Panel {
    /// Channels, padded to whole blocks.
    pub(crate) fn padded(&self) -> usize {
        self.cols.next_multiple_of(BLOCK)
    }

    /// Chunks of a token.
    pub(crate) fn chunks(&self) -> usize {
        self.cols.div_ceil(BLOCK)
    }

    /// A token's vectors.
    #[inline(always)]
    pub(crate) fn vectors(&self, token: usize) -> &[[f32; LANES]] {
        let n = self.padded() / LANES;
        &self.data[token * n..(token + 1) * n]
    }

    /// There is room for all tokens in the form of the order.
    pub(crate) fn is_filled(&self) -> bool {
        let elements = self.tokens * self.padded();
        match self.order {
            Order::Natural | Order::Packed | Order::Whole => self.data.len() * LANES >= elements,
            Order::Fast | Order::FastPacked => self.narrow.elements() >= elements,
            Order::Rounded => self.halves.len() * bf16::COLUMNS >= elements,
        }
    }

    /// Tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Takes `tokens` tokens of `cols` channels.
    ///
    /// # Panics
    /// A place is outside of `x`.
    pub fn fill(&mut self, order: Order, x: Columns<'_>, tokens: usize, cols: usize) {
        self.fill_taps(order, x, tokens, (cols, 1), 0);
    }

    /// As [`Panel::fill`] for convolutions of `taps` taps: column `c * taps + j` is channel c, `tap_stride * j` places on.
    ///
    /// # Panics
    /// A place is outside of `x`.
    pub fn fill_taps(
        &mut self,
        order: Order,
        x: Columns<'_>,
        tokens: usize,
        (channels, taps): (usize, usize),
        tap_stride: usize,
    ) {
        let cols = channels * taps;
        (self.order, self.tokens, self.cols) = (order, tokens, cols);
        let (padded, chunks) = (self.padded(), self.chunks());
        let token = |t: usize, out: &mut [f32]| {
            let start = x.first + t * x.token_stride;
            if taps == 1 && x.channel_stride == 1 {
                return arrange(order, &x.values[start..start + cols], out);
            }
            let mut gathered = GATHERED.take();
            gathered.resize(cols, 0.0);
            for j in 0..taps {
                for c in 0..channels {
                    gathered[c * taps + j] = x.values[start + c * x.channel_stride + j * tap_stride];
                }
            }
            arrange(order, &gathered, out);
            GATHERED.set(gathered);
        };
        let some = (TOGETHER / padded.max(1)).max(1);
        match order {
            Order::Natural | Order::Packed | Order::Whole => {
                self.data.grow(tokens * padded / LANES, [0.0; LANES]);
                let data = &mut self.data.as_flattened_mut()[..tokens * padded];
                Pool::global().pieces(data, some * padded, &|i, out| {
                    (i * some..).zip(out.chunks_exact_mut(padded)).for_each(|(t, out)| token(t, out));
                });
                if order == Order::Whole {
                    self.wide.fill(&self.data, tokens, chunks);
                }
            }
            Order::FastPacked => self.narrow.fill(&token, tokens, chunks, &PACKED),
            Order::Fast => self.narrow.fill(&token, tokens, chunks, &IN_ORDER),
            Order::Rounded => {
                let lines = padded / bf16::COLUMNS;
                self.halves.grow(tokens * lines, [0; 64]);
                Pool::global().pieces(&mut self.halves[..tokens * lines], some * lines, &|i, out| {
                    for (t, out) in (i * some..).zip(out.chunks_exact_mut(lines)) {
                        arranged(&token, t, padded, |vectors| bf16::narrow(vectors, out));
                    }
                });
            }
        }
    }
}

/// Vectors of token t, in the order of a kind of matrix.
pub(crate) type Token<'a> = dyn Fn(usize, &mut [f32]) + Sync + 'a;

/// Calls `then` with the vectors of one token, of `padded` channels.
pub(crate) fn arranged(token: &Token<'_>, t: usize, padded: usize, then: impl FnOnce(&[[f32; LANES]])) {
    let mut vectors = ARRANGED.take();
    vectors.grow(padded / LANES, [0.0; LANES]);
    token(t, &mut vectors.as_flattened_mut()[..padded]);
    then(&vectors[..padded / LANES]);
    ARRANGED.set(vectors);
}

/// One token whose channels lie together.
fn arrange(order: Order, x: &[f32], out: &mut [f32]) {
    match order {
        Order::Natural | Order::Rounded => {
            out[..x.len()].copy_from_slice(x);
            out[x.len()..].fill(0.0);
        }
        Order::Packed | Order::Whole | Order::FastPacked => eights(x, out),
        Order::Fast => fours(x, out),
    }
}

dispatch! {
    /// Vector k of a block has column `8 l + k` in lane l.
    fn eights(x: &[f32], out: &mut [f32]) = eights_on
}

dispatch! {
    /// Vector k of a block has column `64 (k / 4) + 4 l + k % 4` in lane l.
    fn fours(x: &[f32], out: &mut [f32]) = fours_on
}

#[inline(always)]
fn eights_on<L: Lanes>(x: &[f32], out: &mut [f32]) {
    turn::<L, 8>(x, out);
}

#[inline(always)]
fn fours_on<L: Lanes>(x: &[f32], out: &mut [f32]) {
    turn::<L, 4>(x, out);
}

/// Columns that are turned together.
const TURNED: usize = LANES * LANES;

/// Of each `16 P` columns the vectors have every Pth, in order. `out` are whole blocks, behind `x` are zeros.
#[inline(always)]
fn turn<L: Lanes, const P: usize>(x: &[f32], out: &mut [f32]) {
    let (whole, rest) = x.as_chunks::<TURNED>();
    let (out, out_rest) = out.split_at_mut(whole.len() * TURNED);
    for (x, out) in whole.iter().zip(out.as_chunks_mut().0) {
        turn_some::<L, P>(x, out);
    }
    if !out_rest.is_empty() {
        let (mut some, mut turned) = ([0f32; TURNED], [0f32; TURNED]);
        some[..rest.len()].copy_from_slice(rest);
        turn_some::<L, P>(&some, &mut turned);
        out_rest.copy_from_slice(&turned[..out_rest.len()]);
    }
}

#[inline(always)]
fn turn_some<L: Lanes, const P: usize>(x: &[f32; TURNED], out: &mut [f32; TURNED]) {
    let mut rows = [L::splat(0.0); LANES];
    for (l, row) in rows.iter_mut().enumerate() {
        let mut parts = [0f32; LANES];
        for (p, part) in parts.as_chunks_mut::<P>().0.iter_mut().enumerate() {
            part.copy_from_slice(&x[LANES * P * p + P * l..][..P]);
        }
        *row = L::load(&parts);
    }
    for (row, out) in L::turn(rows).into_iter().zip(out.as_chunks_mut::<LANES>().0) {
        row.store(out);
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
            let mut across = x.clone();
            for t in 0..tokens {
                (0..cols).for_each(|c| across[5 + c * tokens + t] = x[5 + t * cols + c]);
            }
            for order in
                [Order::Natural, Order::Packed, Order::Whole, Order::Fast, Order::FastPacked, Order::Rounded]
            {
                let (mut a, mut b) = (Panel::default(), Panel::default());
                let lie = |values, token_stride, channel_stride| Columns {
                    values,
                    first: 5,
                    token_stride,
                    channel_stride,
                };
                a.fill(order, lie(&x, cols, 1), tokens, cols);
                b.fill(order, lie(&across, 1, tokens), tokens, cols);
                assert!(a.is_filled());
                assert_eq!((&*a.data, &*a.halves), (&*b.data, &*b.halves), "{order:?}");
                assert_eq!(format!("{:?}", a.narrow), format!("{:?}", b.narrow), "{order:?}");
                assert_eq!(format!("{:?}", a.wide), format!("{:?}", b.wide), "{order:?}");
            }
        }
    }

    #[test]
    fn vectors_have_the_columns_of_their_order() {
        for cols in [1usize, 100, 128, 300, 512] {
            let x: Vec<f32> = (0..cols).map(|c| 1.0 + c as f32).collect();
            for order in [Order::Packed, Order::Fast] {
                let mut out = vec![f32::NAN; cols.next_multiple_of(BLOCK)];
                arrange(order, &x, &mut out);
                for (i, v) in out.iter().enumerate() {
                    let (block, k, l) = (i / BLOCK, i % BLOCK / LANES, i % LANES);
                    let column = match order {
                        Order::Fast => 64 * (k / 4) + 4 * l + k % 4,
                        _ => 8 * l + k,
                    };
                    let c = block * BLOCK + column;
                    assert_eq!(*v, if c < cols { 1.0 + c as f32 } else { 0.0 }, "{order:?} {cols}");
                }
            }
        }
    }
}
