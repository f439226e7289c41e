//! Convolution over up to three spatial axes.
//!
//! ```text
//! image [batch, channels, d, h, w]  --windows-->  tokens [batch * positions, cols]  --matmul per group-->  [.., rows]
//!
//! conv            weights as stored    windows packed, one block of positions at a time, which stays in L2
//! packed_conv     dense weights        windows read where they lie in an image with channels last
//! depthwise_conv  one kernel each      windows read where they lie, a vector of channels at a time
//! ```
//! A result depends neither on blocks nor on threads.

use crate::activations::PackedActivations;
use crate::elementwise::{get, put};
use crate::matmul::{MatMul, OutputRows, PARALLEL_MATMUL, RowTiles, Tokens, matmul_batch, multiply_prepared};
use crate::memory::{CacheLevel, prefetch};
use crate::packed_rows::{PackedRows, TileProduct};
use crate::pool::SharedPointer;
use crate::simd::{F32x16, LANES, simd_fn};
use crate::{Isa, Matrix, Pool};
use std::cell::RefCell;
use std::ops::Range;

/// Most bytes of a group's weights that are prefetched at once: half of an L1 cache of 32 KB.
const NEAR_BYTES: usize = 16 << 10;
/// Bytes of packed windows that one thread multiplies at a time: a quarter of an L2 cache of 1 MB.
const BLOCK_BYTES: usize = 256 << 10;
/// Fewest windows of a block, so that weights are decoded for many; a multiple of the six that are multiplied together.
const MIN_BLOCK: usize = 24;
/// Most bytes of packed windows that threads share while they divide the rows of the weights.
const SHARED_BYTES: usize = 1 << 20;
/// Fewest channels of a group whose taps are read where they lie; windows of fewer are copied first.
const MIN_CHANNELS: usize = 8;
/// Bytes of an image that one part of a convolution reads, about; half of an L2 cache of 512 KB.
const PART_BYTES: usize = 256 << 10;
/// Fewest and most windows of a part, multiples of the 6 or 12 that are multiplied together. Few would decode weights of fp16 too
/// often.
const PART_WINDOWS: (usize, usize) = (48, 192);
/// Parts for each thread, so that threads end at about the same time.
const PARTS_PER_THREAD: usize = 4;
/// Vectors of channels, and windows of a row, that depthwise convolution sums at a time: their sums stay in registers, and a factor
/// serves all windows.
const DEPTHWISE_VECTORS: usize = 2;
const DEPTHWISE_WINDOWS: usize = 4;

/// Describes the windows of a convolution or a pool on the axes d, h and w; a missing axis has size 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Size of the input.
    pub size: [usize; 3],
    /// Size of the output.
    pub out: [usize; 3],
    /// Taps of the kernel.
    pub kernel: [usize; 3],
    /// Input elements from window to window.
    pub strides: [usize; 3],
    /// Input elements from tap to tap.
    pub dilations: [usize; 3],
    /// Zeros padded before the input.
    pub before: [usize; 3],
}

impl Window {
    /// Returns the number of taps.
    pub fn taps(&self) -> usize {
        self.kernel.iter().product()
    }

    /// Returns the number of windows of an image.
    pub fn positions(&self) -> usize {
        self.out.iter().product()
    }

    /// Splits a position into its indices on d, h and w.
    pub(crate) fn indices(&self, position: usize) -> [usize; 3] {
        let [_, h, w] = self.out;
        [position / (h * w), position / w % h, position % w]
    }

    /// Returns the range of taps of window `index` that lie within the input, on one axis.
    #[inline]
    pub fn inside(&self, axis: usize, index: usize) -> Range<usize> {
        self.range(axis, index * self.strides[axis], self.dilations[axis], self.kernel[axis])
    }

    /// Returns the range of windows whose tap `tap` lies within the input, on one axis.
    pub fn windows_inside(&self, axis: usize, tap: usize) -> Range<usize> {
        self.range(axis, tap * self.dilations[axis], self.strides[axis], self.out[axis])
    }

    /// Returns the range of i below `n` for which `first + i * step`, without what is padded before, lies within the input.
    #[inline]
    fn range(&self, axis: usize, first: usize, step: usize, n: usize) -> Range<usize> {
        let from = self.before[axis].saturating_sub(first).div_ceil(step).min(n);
        let end = (self.size[axis] + self.before[axis]).saturating_sub(first).div_ceil(step);
        from..end.min(n).max(from)
    }

    /// Returns the input index that a tap of window `index` reads; the tap must lie within the input.
    #[inline]
    pub fn at(&self, axis: usize, index: usize, tap: usize) -> usize {
        index * self.strides[axis] + tap * self.dilations[axis] - self.before[axis]
    }
}

/// Locates a batch of images: element (n, c, d, h, w) is `values[first + n * strides[0] + c * strides[1] + ..]`.
#[derive(Clone, Copy, Debug)]
pub struct Image<'a> {
    /// The elements.
    pub values: &'a [f32],
    /// Index of the first element.
    pub first: usize,
    /// Images.
    pub batch: usize,
    /// Channels.
    pub channels: usize,
    /// Elements from image to image, channel to channel, and along the axes d, h and w.
    pub strides: [usize; 5],
}

/// Describes a convolution: equal groups of rows of `w`, each multiplied with the windows of its own channels.
#[derive(Debug)]
pub struct Conv<'a> {
    /// Weights `[rows, channels of a group * taps]`.
    pub w: Matrix<'a>,
    /// Groups of rows and of channels.
    pub groups: usize,
    /// Places of the windows.
    pub window: &'a Window,
    /// Input.
    pub x: Image<'a>,
    /// Result `[batch * positions, rows]`.
    pub y: &'a mut [f32],
    /// Bias `[rows]`.
    pub bias: Option<&'a [f32]>,
}

thread_local! {
    static WINDOWS: RefCell<PackedActivations> = RefCell::default();
}

/// Channels of a group, and the order of a window's columns.
#[derive(Clone, Copy)]
struct GroupChannels {
    first: usize,
    channels: usize,
    /// Columns are `[taps, channels]` instead of `[channels, taps]`.
    taps_first: bool,
}

/// Writes a token's window.
fn gather(window: &Window, x: &Image<'_>, group: GroupChannels, token: usize, out: &mut [f32]) {
    let GroupChannels { first, channels, taps_first } = group;
    let positions = window.positions();
    let index = window.indices(token % positions);
    let [_, channel_stride, along @ ..] = x.strides;
    let first = x.first + token / positions * x.strides[0] + first * channel_stride;
    let inside: [Range<usize>; 3] = std::array::from_fn(|i| window.inside(i, index[i]));
    let [_, kh, kw] = window.kernel;
    if (0..3).any(|i| inside[i].len() < window.kernel[i]) {
        out.fill(0.0);
    }
    let taps = window.taps();
    let (channel_step, tap_step) = if taps_first { (1, channels) } else { (taps, 1) };
    for d in inside[0].clone() {
        for h in inside[1].clone() {
            let row = first + window.at(0, index[0], d) * along[0] + window.at(1, index[1], h) * along[1];
            let Range { start, end } = inside[2];
            if start == end {
                continue;
            }
            let step = window.dilations[2] * along[2];
            let from = row + window.at(2, index[2], start) * along[2];
            let tap = (d * kh + h) * kw + start;
            if taps_first && channel_stride == 1 && step == channels {
                let n = (end - start) * channels;
                out[tap * channels..][..n].copy_from_slice(&x.values[from..from + n]);
                continue;
            }
            for c in 0..channels {
                let from = from + c * channel_stride;
                let to = c * channel_step + tap * tap_step;
                (0..end - start).for_each(|k| out[to + k * tap_step] = x.values[from + k * step]);
            }
        }
    }
}

/// Computes a convolution on all threads of the pool.
///
/// # Panics
/// Lengths do not match.
pub fn conv(pool: &Pool, p: &mut Conv<'_>) {
    let (rows, cols, groups) = (p.w.rows, p.w.cols, p.groups);
    assert!(groups > 0 && rows.is_multiple_of(groups), "rows in groups");
    assert!(p.x.channels.is_multiple_of(groups), "channels in groups");
    assert_eq!(p.x.channels / groups * p.window.taps(), cols, "columns of w");
    let tokens = p.x.batch * p.window.positions();
    assert!(p.y.len() >= tokens * rows && p.bias.is_none_or(|b| b.len() == rows), "y and a bias per row");
    if tokens == 0 || rows == 0 {
        return;
    }
    let (per, channels) = (rows / groups, p.x.channels / groups);
    let of = |group: usize| GroupChannels { first: group * channels, channels, taps_first: false };
    let bytes = cols.next_multiple_of(crate::activations::BLOCK) * 4;
    let isa = Isa::best();
    let block = (BLOCK_BYTES / bytes).max(MIN_BLOCK) / 6 * 6;
    let blocks = tokens.div_ceil(block);
    let is_shared = groups < pool.threads() && tokens * bytes <= SHARED_BYTES;
    if is_shared || groups * blocks < pool.threads() {
        // Threads share the rows of a group.
        let mut packed = WINDOWS.take();
        for g in 0..groups {
            let w = p.w.row_range(g * per, (g + 1) * per);
            packed.pack_gathered(pool, w.layout(), tokens, cols, &|t, out| {
                gather(p.window, &p.x, of(g), t, out)
            });
            let bias = p.bias.map(|b| &b[g * per..(g + 1) * per]);
            let y = &mut p.y[g * per..];
            matmul_batch(
                isa,
                pool,
                &mut [Some(MatMul { w, x: &packed, tokens: None, y, stride: rows, bias })],
            );
        }
        WINDOWS.set(packed);
        return;
    }
    // Parts write disjoint rows of disjoint tokens.
    let to = SharedPointer(p.y.as_mut_ptr());
    let p = &*p;
    // Parts are blocks of tokens of each group, group by group.
    let compute = |parts: Range<usize>| {
        let to = &to;
        let mut packed = WINDOWS.take();
        for part in parts {
            let (g, first) = (part / blocks, part % blocks * block);
            let n = block.min(tokens - first);
            let w = p.w.row_range(g * per, (g + 1) * per);
            // Prefetches the weights while the windows are packed.
            let stored = w.stored();
            prefetch(CacheLevel::L1, stored.as_ptr(), stored.len().min(NEAR_BYTES));
            packed.pack_gathered(pool, w.layout(), n, cols, &|t, out| {
                gather(p.window, &p.x, of(g), first + t, out);
            });
            let bias = p.bias.map(|b| &b[g * per..(g + 1) * per]);
            // SAFETY: the tokens' rows of the group lie below `tokens * rows`.
            let y = OutputRows { y: unsafe { to.0.add(first * rows + g * per) }, stride: rows, bias };
            multiply_prepared(isa, &w, Tokens::new(&packed, None), &RowTiles::all(&w, n), &y);
        }
        WINDOWS.set(packed);
    };
    let work = (rows * cols * tokens).max(1);
    let parts = groups * blocks;
    if work < PARALLEL_MATMUL {
        return compute(0..parts);
    }
    // Joins parts so that each takes a few microseconds.
    let together = (parts * (PARALLEL_MATMUL / 4) / work).max(1);
    pool.run(parts.div_ceil(together), &|i| compute(i * together..parts.min((i + 1) * together)));
}

/// Function that a convolution calls with results that are complete, and with the index in the result of the first of them.
pub type Finish<'a> = &'a (dyn Fn(usize, &mut [f32]) + Sync);

/// Describes a convolution with dense weights: packed rows with columns `[taps, channels of a group]`, or `[taps, channels]` of a
/// depthwise convolution.
pub struct PackedConv<'a, W: ?Sized = PackedRows> {
    /// Weights.
    pub w: &'a W,
    /// Places of the windows.
    pub window: &'a Window,
    /// Input. Groups of eight channels or more are read where they lie if channels are contiguous; those of a depthwise convolution
    /// are.
    pub x: Image<'a>,
    /// Result `[batch * positions, rows]`.
    pub y: &'a mut [f32],
    /// Bias `[rows]`.
    pub bias: Option<&'a [f32]>,
    /// Function for complete results.
    pub finish: Option<Finish<'a>>,
}

/// Memory of a thread: copied windows, zeros, and the pieces of a part's windows.
#[derive(Default)]
struct PartWindows {
    copied: Vec<f32>,
    zeros: Vec<f32>,
    pieces: Vec<*const f32>,
}

thread_local! {
    static PART: RefCell<PartWindows> = RefCell::default();
}

/// Computes a convolution with dense weights on all threads of the pool. A sum adds taps, and the channels of a tap, in ascending
/// order, then the bias.
///
/// # Panics
/// Lengths do not match.
pub fn packed_conv(pool: &Pool, p: &mut PackedConv<'_>) {
    let (rows, groups) = (p.w.rows(), p.w.groups);
    assert!(p.x.channels.is_multiple_of(groups), "channels in groups");
    let (per, channels) = (rows / groups, p.x.channels / groups);
    assert_eq!(channels * p.window.taps(), p.w.columns, "columns of w");
    let tokens = p.x.batch * p.window.positions();
    assert!(p.y.len() >= tokens * rows && p.bias.is_none_or(|b| b.len() == rows), "y and a bias per row");
    if tokens == 0 || rows == 0 || channels == 0 {
        return;
    }
    let work = rows * p.w.columns * tokens;
    let threads = if work < PARALLEL_MATMUL { 1 } else { pool.threads() };
    let wanted = if threads == 1 { 1 } else { PARTS_PER_THREAD * threads };
    let most =
        (PART_BYTES / (channels * 4)).min(tokens.div_ceil(wanted)).clamp(PART_WINDOWS.0, PART_WINDOWS.1);
    let blocks = tokens.div_ceil(most);
    let block = tokens.div_ceil(blocks).next_multiple_of(PART_WINDOWS.0 / 4).min(tokens);
    let blocks = tokens.div_ceil(block);
    // Few windows share the rows of a group among threads.
    let tiles = wanted.div_ceil(groups * blocks).clamp(1, p.w.tiles());
    let tiles = p.w.tiles().div_ceil(tiles);
    let row_parts = p.w.tiles().div_ceil(tiles);
    // Parts write disjoint rows of disjoint tokens.
    let to = SharedPointer(p.y.as_mut_ptr());
    let p = &*p;
    pool.run_on(threads, groups * row_parts * blocks, &|i| {
        let to = &to;
        let (group, row_part, first) = (i / blocks / row_parts, i / blocks % row_parts, i % blocks * block);
        let part_tokens = first..tokens.min(first + block);
        let mut memory = PART.take();
        let length = find_pieces(p, group, part_tokens.clone(), &mut memory);
        for tile in row_part * tiles..p.w.tiles().min((row_part + 1) * tiles) {
            let row = group * per + tile * LANES;
            let n = p.w.tile_rows(tile);
            p.w.with_tile(group, tile, |lines| {
                // SAFETY: pieces are whole, see `find_pieces`; rows of the tokens lie below `tokens * rows`.
                unsafe {
                    let y = to.0.add(first * rows + row);
                    let bias = p.bias.map(|b| &b[row..row + n]);
                    let pieces = &memory.pieces;
                    TileProduct { lines, pieces, length, rows: n, bias, y, stride: rows, is_fused: true }
                        .run();
                }
            });
        }
        PART.set(memory);
        let Some(finish) = p.finish else { return };
        let part_rows = row_part * tiles * LANES..per.min((row_part + 1) * tiles * LANES);
        if part_rows.len() == rows {
            let n = part_tokens.len() * rows;
            // SAFETY: results of this part alone.
            return finish(first * rows, unsafe {
                std::slice::from_raw_parts_mut(to.0.add(first * rows), n)
            });
        }
        for t in part_tokens {
            let at = t * rows + group * per + part_rows.start;
            // SAFETY: results of this part alone.
            finish(at, unsafe { std::slice::from_raw_parts_mut(to.0.add(at), part_rows.len()) });
        }
    });
}

/// Finds the pieces of the windows of some tokens, taps inside the image or zeros, or copies windows to be single pieces. Returns
/// the length of a piece.
fn find_pieces(p: &PackedConv<'_>, group: usize, tokens: Range<usize>, memory: &mut PartWindows) -> usize {
    let (window, x) = (p.window, &p.x);
    let channels = x.channels / p.w.groups;
    let columns = p.w.columns;
    let PartWindows { copied, zeros, pieces } = memory;
    pieces.clear();
    if channels < MIN_CHANNELS || x.strides[1] != 1 {
        let of = GroupChannels { first: group * channels, channels, taps_first: true };
        copied.resize(tokens.len() * columns, 0.0);
        for (token, out) in tokens.zip(copied.chunks_exact_mut(columns)) {
            gather(window, x, of, token, out);
            pieces.push(out.as_ptr());
        }
        return columns;
    }
    if zeros.len() < channels {
        zeros.resize(channels, 0.0);
    }
    let positions = window.positions();
    for token in tokens {
        let index = window.indices(token % positions);
        let first = x.first + token / positions * x.strides[0] + group * channels;
        let inside: [Range<usize>; 3] = std::array::from_fn(|i| window.inside(i, index[i]));
        let at = |i: usize, tap: usize| {
            inside[i].contains(&tap).then(|| window.at(i, index[i], tap) * x.strides[2 + i])
        };
        for d in 0..window.kernel[0] {
            for h in 0..window.kernel[1] {
                let row = at(0, d).zip(at(1, h)).map(|(d, h)| first + d + h);
                for w in 0..window.kernel[2] {
                    let piece = match row.zip(at(2, w)) {
                        Some((row, w)) => &x.values[row + w..][..channels],
                        None => &zeros[..channels],
                    };
                    pieces.push(piece.as_ptr());
                }
            }
        }
    }
    channels
}

/// Describes a convolution of each channel with a kernel of its own.
pub type DepthwiseConv<'a> = PackedConv<'a, [f32]>;

/// Computes a depthwise convolution on all threads of the pool. Taps are added in ascending order, then the bias.
///
/// # Panics
/// Lengths do not match, or channels are not contiguous.
pub fn depthwise_conv(pool: &Pool, p: &mut DepthwiseConv<'_>) {
    let channels = p.x.channels;
    assert!(channels == 1 || p.x.strides[1] == 1, "channels that lie together");
    assert_eq!(p.w.len(), channels * p.window.taps(), "taps of each channel");
    assert!(p.bias.is_none_or(|b| b.len() == channels), "a bias per channel");
    let tokens = p.x.batch * p.window.positions();
    let n = tokens * channels;
    let y = &mut p.y[..n];
    if n == 0 {
        return;
    }
    let (w, window, x, bias, finish) = (p.w, p.window, p.x, p.bias, p.finish);
    let per_part = (PARALLEL_MATMUL / (4 * channels * window.taps()).max(1)).max(window.out[2]);
    pool.for_chunks(y, per_part * channels, &|i, y| {
        depthwise_tokens(w, window, x, bias, i * per_part, y);
        if let Some(finish) = finish {
            finish(i * per_part * channels, y);
        }
    });
}

simd_fn! {
    /// Computes depthwise convolution of consecutive tokens from `first` on.
    fn depthwise_tokens(w: &[f32], window: &Window, x: Image<'_>, bias: Option<&[f32]>, first: usize, y: &mut [f32]) = depthwise_on
}

#[inline(always)]
fn depthwise_on<L: F32x16>(
    w: &[f32],
    window: &Window,
    x: Image<'_>,
    bias: Option<&[f32]>,
    first: usize,
    y: &mut [f32],
) {
    let (channels, positions, kernel) = (x.channels, window.positions(), window.kernel[2]);
    let [from, to] = [0, kernel - 1].map(|tap| window.windows_inside(2, tap));
    // Windows of a row whose taps all lie within the input.
    let whole = from.start.max(to.start)..from.end.min(to.end);
    let (mut t, mut y) = (first, y);
    while !y.is_empty() {
        let index = window.indices(t % positions);
        let start = x.first + t / positions * x.strides[0];
        let at = ChannelWindows { w, window, x, bias, index, start };
        let run = if whole.contains(&index[2]) { whole.end - index[2] } else { 1 };
        let n = if run.min(y.len() / channels) < DEPTHWISE_WINDOWS { 1 } else { DEPTHWISE_WINDOWS };
        let (now, rest) = y.split_at_mut(n * channels);
        if n == 1 {
            at.sum::<L, 1>(now)
        } else {
            at.sum::<L, DEPTHWISE_WINDOWS>(now)
        }
        (t, y) = (t + n, rest);
    }
}

/// Windows of a depthwise convolution that follow each other in a row, and what they are multiplied by.
struct ChannelWindows<'a> {
    w: &'a [f32],
    window: &'a Window,
    x: Image<'a>,
    bias: Option<&'a [f32]>,
    /// Indices of the first window.
    index: [usize; 3],
    /// Place of its image.
    start: usize,
}

impl ChannelWindows<'_> {
    /// Computes all channels of N windows to `[N, channels]`.
    #[inline(always)]
    fn sum<L: F32x16, const N: usize>(&self, y: &mut [f32]) {
        let channels = self.x.channels;
        let (whole, mut c) = (channels - channels % LANES, 0);
        // Sixteen registers hold the sums of four windows of one vector.
        while L::REGISTERS >= 32 && c + DEPTHWISE_VECTORS * LANES <= whole {
            self.sum_vectors::<L, N, DEPTHWISE_VECTORS, true>(c, y);
            c += DEPTHWISE_VECTORS * LANES;
        }
        while c < whole {
            self.sum_vectors::<L, N, 1, true>(c, y);
            c += LANES;
        }
        if c < channels {
            self.sum_vectors::<L, N, 1, false>(c, y);
        }
    }

    /// Computes V vectors of channels from `c` on, which are whole or one shorter vector.
    #[inline(always)]
    fn sum_vectors<L: F32x16, const N: usize, const V: usize, const WHOLE: bool>(
        &self,
        c: usize,
        y: &mut [f32],
    ) {
        let ChannelWindows { window, x, index, .. } = self;
        let ([_, kh, kw], channels) = (window.kernel, x.channels);
        let (n, step) = ((channels - c).min(V * LANES), window.strides[2] * x.strides[4]);
        let mut sums = [[L::splat(0.0); V]; N];
        for d in window.inside(0, index[0]) {
            for h in window.inside(1, index[1]) {
                for k in window.inside(2, index[2]) {
                    let at = self.start
                        + window.at(0, index[0], d) * x.strides[2]
                        + window.at(1, index[1], h) * x.strides[3]
                        + window.at(2, index[2], k) * x.strides[4]
                        + c;
                    let x = &x.values[at..at + (N - 1) * step + n];
                    let w = &self.w[((d * kh + h) * kw + k) * channels + c..][..n];
                    for v in 0..V {
                        // SAFETY: whole vectors lie within the slices, whose lengths were checked.
                        let factor = unsafe { vector::<L, WHOLE>(w, v * LANES) };
                        for i in 0..N {
                            // SAFETY: as above.
                            let x = unsafe { vector::<L, WHOLE>(x, i * step + v * LANES) };
                            sums[i][v] = factor.mul_add(x, sums[i][v]);
                        }
                    }
                }
            }
        }
        for i in 0..N {
            let y = &mut y[i * channels + c..][..n];
            for v in 0..V {
                let sum = match self.bias {
                    Some(bias) => sums[i][v].add(get(&bias[c..c + n], v * LANES)),
                    None => sums[i][v],
                };
                put(y, v * LANES, sum);
            }
        }
    }
}

/// Loads a vector; one that is not whole has zeros behind the slice's end.
///
/// # Safety
/// A whole vector lies within the slice.
#[inline(always)]
unsafe fn vector<L: F32x16, const WHOLE: bool>(values: &[f32], at: usize) -> L {
    match WHOLE {
        // SAFETY: by the function's condition.
        true => L::load(unsafe { &*values.as_ptr().add(at).cast() }),
        false => get(values, at),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{cases, noise};
    use proptest::prelude::*;

    /// Computes one output of a dense convolution by its definition.
    fn expected(p: &Conv<'_>, w: &[f32], token: usize, row: usize) -> f64 {
        let (window, x) = (p.window, &p.x);
        let (channels, taps) = (x.channels / p.groups, window.taps());
        let group = row / (p.w.rows / p.groups);
        let index = window.indices(token % window.positions());
        let mut sum = p.bias.map_or(0.0, |b| f64::from(b[row]));
        for c in 0..channels {
            for tap in 0..taps {
                let [_, kh, kw] = window.kernel;
                let tap_index = [tap / (kh * kw), tap / kw % kh, tap % kw];
                let places: Option<Vec<usize>> = (0..3)
                    .map(|i| {
                        let at = index[i] * window.strides[i] + tap_index[i] * window.dilations[i];
                        at.checked_sub(window.before[i]).filter(|at| *at < window.size[i])
                    })
                    .collect();
                let Some(at) = places else { continue };
                let column = c * taps + tap;
                let from = x.first
                    + token / window.positions() * x.strides[0]
                    + (group * channels + c) * x.strides[1]
                    + (0..3).map(|i| at[i] * x.strides[i + 2]).sum::<usize>();
                sum += f64::from(w[row * p.w.cols + column]) * f64::from(x.values[from]);
            }
        }
        sum
    }

    proptest! {
        #![proptest_config(cases())]
        #[test]
        fn windows_of_any_form_are_multiplied(
            seed in 1u64..1000,
            size in prop::array::uniform3(1usize..7),
            kernel in prop::array::uniform3(1usize..4),
            strides in prop::array::uniform3(1usize..3),
            dilations in prop::array::uniform3(1usize..3),
            before in prop::array::uniform3(0usize..3),
            after in prop::array::uniform3(0usize..3),
            (groups, per_in, per_out) in (1usize..4, 1usize..11, 1usize..20),
            (batch, channels_last) in (1usize..3, any::<bool>()),
        ) {
            let reach = |i: usize| (kernel[i] - 1) * dilations[i] + 1;
            prop_assume!((0..3).all(|i| size[i] + before[i] + after[i] >= reach(i)));
            let out = std::array::from_fn(|i| (size[i] + before[i] + after[i] - reach(i)) / strides[i] + 1);
            let window = Window { size, out, kernel, strides, dilations, before };
            let (channels, rows, n) = (groups * per_in, groups * per_out, size.iter().product::<usize>());
            let cols = per_in * window.taps();
            let strides = match channels_last {
                true => [n * channels, 1, size[1] * size[2] * channels, size[2] * channels, channels],
                false => [n * channels, n, size[1] * size[2], size[2], 1],
            };
            let (dense, values, bias) = (noise(seed, rows * cols), noise(seed + 1, batch * n * channels), noise(seed + 2, rows));
            let x = Image { values: &values, first: 0, batch, channels, strides };
            let w = Matrix::f32(&dense, rows, cols).unwrap();
            let tokens = batch * window.positions();
            let run = |threads| {
                let mut y = vec![f32::NAN; tokens * rows];
                conv(&Pool::new(threads), &mut Conv { w, groups, window: &window, x, y: &mut y, bias: Some(&bias) });
                y
            };
            let y = run(1);
            let mut none = [];
            let p = Conv { w, groups, window: &window, x, y: &mut none, bias: Some(&bias) };
            for (i, v) in y.iter().enumerate() {
                prop_assert!((f64::from(*v) - expected(&p, &dense, i / rows, i % rows)).abs() < 1e-4);
            }
            prop_assert!([2, 3].into_iter().all(|threads| run(threads) == y));
            let halves: Vec<u8> = dense.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect();
            for (w, bound) in [(w, 1e-4), (Matrix::f16(&halves, rows, cols).unwrap(), 0.02)] {
                let w = PackedRows::new(&w, groups, window.taps());
                let run = |threads| {
                    let mut y = vec![f32::NAN; tokens * rows];
                    let finish = |at: usize, y: &mut [f32]| y.iter_mut().zip(at..).for_each(|(y, i)| *y += i as f32);
                    packed_conv(&Pool::new(threads), &mut PackedConv { w: &w, window: &window, x, y: &mut y, bias: Some(&bias), finish: Some(&finish) });
                    y
                };
                let packed = run(1);
                for (i, (a, b)) in packed.iter().zip(&y).enumerate() {
                    prop_assert!((a - i as f32 - b).abs() < bound + 2e-7 * i as f32, "{a} {i} {b}");
                }
                prop_assert!([2, 3].into_iter().all(|threads| run(threads) == packed));
            }
            if channels_last {
                let dense = noise(seed, window.taps() * channels);
                let (mut y, mut same) = (vec![f32::NAN; tokens * channels], vec![f32::NAN; tokens * channels]);
                let bias = noise(seed + 3, channels);
                let own = |y| DepthwiseConv { w: &dense, window: &window, x, y, bias: Some(&bias), finish: None };
                depthwise_conv(&Pool::new(1), &mut own(&mut y));
                depthwise_conv(&Pool::new(3), &mut own(&mut same));
                prop_assert_eq!(&y, &same);
                let transposed: Vec<f32> = (0..dense.len()).map(|i| dense[i % window.taps() * channels + i / window.taps()]).collect();
                let w = Matrix::f32(&transposed, channels, window.taps()).unwrap();
                conv(&Pool::new(2), &mut Conv { w, groups: channels, window: &window, x, y: &mut same, bias: Some(&bias) });
                prop_assert!(y.iter().zip(&same).all(|(a, b)| (a - b).abs() < 1e-5));
            }
        }
    }

    #[test]
    fn many_windows_are_multiplied_in_blocks() {
        let (channels, rows, side) = (40, 24, 31);
        let window = Window {
            size: [1, side, side],
            out: [1, side, side],
            kernel: [1, 3, 3],
            strides: [1; 3],
            dilations: [1; 3],
            before: [0, 1, 1],
        };
        let cols = channels * 9;
        let (dense, values) = (noise(1, rows * cols), noise(2, side * side * channels));
        let strides = [0, 1, 0, side * channels, channels];
        let x = Image { values: &values, first: 0, batch: 1, channels, strides };
        let w = Matrix::f32(&dense, rows, cols).unwrap();
        let mut y = vec![f32::NAN; side * side * rows];
        let mut same = y.clone();
        conv(&Pool::new(2), &mut Conv { w, groups: 1, window: &window, x, y: &mut y, bias: None });
        let packed = PackedRows::new(&w, 1, 9);
        let mut job = PackedConv { w: &packed, window: &window, x, y: &mut same, bias: None, finish: None };
        packed_conv(&Pool::new(2), &mut job);
        let p = Conv { w, groups: 1, window: &window, x, y: &mut [], bias: None };
        for (i, (v, u)) in y.iter().zip(&same).enumerate() {
            let expected = expected(&p, &dense, i / rows, i % rows);
            assert!((f64::from(*v) - expected).abs() < 1e-3 && (f64::from(*u) - expected).abs() < 1e-3);
        }
    }
}
