//! Products of stored matrices with a panel of tokens.
//!
//! An element of the result is a sum in sixteen lanes, each of which adds its columns in ascending order of blocks and
//! vectors; then the lanes are added by halves. This order does not depend on the number of tokens, of threads or of rows that
//! are computed together, nor on whether AVX2, AVX-512 or NEON runs: a token's result is the same, bit by bit, by itself and
//! in a batch.

use crate::decode::{self, BLOCK, Decode, MOST_BYTES, VECTORS};
use crate::fast::Turned;
#[cfg(target_arch = "aarch64")]
use crate::lanes::neon::Neon;
use crate::lanes::{LANES, Lanes, Plain};
use crate::lines::{Ahead, Cache, Lines};
use crate::matrix::{Divisor, Storage, as_bytes};
use crate::panel::Panel;
use crate::{Isa, Matrix, Pool};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Rows that are computed together: one of each of as many streams.
pub(crate) const ROWS: usize = 4;
/// Tokens up to which rows are decoded anew for each four tokens, in registers.
const FEW: usize = 8;
/// Tiles that are decoded together where there are several tokens: each token is read once for all of them.
const DECODED_TILES: usize = 4;
/// Bytes of weights in one part of a parallel job.
const PART: usize = 32 << 10;
/// The same of small matrices, which have this many parts or fewer.
const SMALL_PART: usize = 4 << 10;
const FEWEST: usize = 8;
/// Products of one job.
const TOGETHER: usize = 8;
/// A job is worth several threads from this many multiplications on.
pub(crate) const PARALLEL: usize = 1 << 15;
/// Bytes between what is read and what is prefetched, in each stream.
const AHEAD: usize = 2048;

/// One product `y = w x`.
#[derive(Debug)]
pub struct Product<'a> {
    /// `[rows, cols]`
    pub w: Matrix<'a>,
    /// `[tokens, cols]` in `w`'s order.
    pub x: &'a Panel,
    /// Tokens of `x` that are wanted; all in order where absent.
    pub tokens: Option<&'a [u32]>,
    /// `[tokens, stride]`, of which the first `rows` of each token are written.
    pub y: &'a mut [f32],
    /// From token to token of `y`.
    pub stride: usize,
    /// `[rows]`
    pub bias: Option<&'a [f32]>,
}

/// Tiles of a matrix, each of which has a row of each of four streams, the quarters of all rows. A thread that goes through
/// them reads four places far from each other, each in order, which keeps about half as many more reads under way than rows
/// that lie together: those share pages, and with them what the processor knows of streams.
#[derive(Clone, Debug)]
pub(crate) struct Tiles {
    tiles: Range<usize>,
    /// From tile to tile.
    step: usize,
    /// From row to row of a tile.
    stream: usize,
    /// Rows of the matrix.
    rows: usize,
}

impl Tiles {
    pub fn all(w: &Matrix<'_>, tokens: usize) -> Tiles {
        if tokens > FEW {
            // Reading is not what takes the time, and sixteen results of a token that lie together are written as one.
            return Tiles { tiles: 0..w.rows.div_ceil(ROWS), step: ROWS, stream: 1, rows: w.rows };
        }
        let stream = stream(w.rows, w.bytes_read() as usize / w.rows.max(1));
        Tiles { tiles: 0..stream.min(w.rows), step: 1, stream, rows: w.rows }
    }

    fn len(&self) -> usize {
        self.tiles.len()
    }

    /// Piece i of `size` tiles.
    fn piece(&self, size: usize, i: usize) -> Tiles {
        let (start, end) = (self.tiles.start + i * size, self.tiles.end);
        Tiles { tiles: start..(start + size).min(end), ..*self }
    }

    /// Each tile's rows, and how many are wanted, the first of them; the others repeat one of those.
    pub fn each(&self) -> impl Iterator<Item = ([usize; ROWS], usize)> + use<> {
        let Tiles { tiles, step, stream, rows } = self.clone();
        // A division would take as long as a short row.
        let last = [stream, 2 * stream, 3 * stream];
        tiles.map(move |t| {
            let first = t * step;
            let n = 1 + last.iter().filter(|&&more| first + more < rows).count();
            (std::array::from_fn(|i| if i < n { first + i * stream } else { first }), n)
        })
    }

    /// As many rows at a time as N tiles have, and how many.
    pub fn rows<const N: usize>(&self) -> impl Iterator<Item = ([usize; N], usize)> + use<N> {
        let all = self.clone();
        (0..self.len().div_ceil(N / ROWS)).map(move |i| {
            let (mut which, mut n) = ([0; N], 0);
            for (rows, wanted) in all.piece(N / ROWS, i).each() {
                which[n..n + wanted].copy_from_slice(&rows[..wanted]);
                n += wanted;
            }
            (which, n)
        })
    }
}

/// Rows of a stream: a quarter, or a little more where quarters would start at places that caches take for neighbours, which
/// are those that are a multiple of 4 KB apart.
fn stream(rows: usize, row_bytes: usize) -> usize {
    let quarter = rows.div_ceil(ROWS);
    // Of few rows, a few more would leave the last stream without its part.
    let most = if quarter < 256 { 0 } else { 16 };
    let apart =
        |more: &usize| (1..ROWS).all(|i| (512..=3584).contains(&(i * (quarter + more) * row_bytes % 4096)));
    quarter + (0..=most).find(apart).unwrap_or(0)
}

#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    pub y: *mut f32,
    pub stride: usize,
    pub bias: Option<&'a [f32]>,
}

/// Tokens of a panel.
#[derive(Clone, Copy)]
pub(crate) struct Taken<'a> {
    pub x: &'a Panel,
    which: Option<&'a [u32]>,
    /// The tokens for tiles of bytes, where those multiply them, see [`crate::fast::amx`].
    pub turned: Option<&'a [[u8; 64]]>,
}

impl<'a> Taken<'a> {
    pub fn some(x: &'a Panel, which: Option<&'a [u32]>) -> Taken<'a> {
        Taken { x, which, turned: None }
    }

    fn of(p: &Product<'a>) -> Taken<'a> {
        Taken::some(p.x, p.tokens)
    }

    pub fn tokens(&self) -> usize {
        self.which.map_or(self.x.tokens, <[u32]>::len)
    }

    /// Place in the panel.
    #[inline(always)]
    pub fn at(&self, token: usize) -> usize {
        self.which.map_or(token, |which| which[token] as usize)
    }
}
// SAFETY: parts of a job write disjoint rows.
unsafe impl Sync for Target<'_> {}

fn check(p: &Product<'_>) {
    let (w, x) = (&p.w, p.x);
    assert_eq!(x.cols, w.cols, "x has the matrix' columns");
    assert_eq!(x.order, w.order(), "x is in the matrix' order");
    assert!(x.is_filled());
    assert!(p.tokens.is_none_or(|t| t.iter().all(|&t| (t as usize) < x.tokens)), "tokens of x");
    let end = Taken::of(p).tokens().checked_sub(1).map(|t| t * p.stride + w.rows);
    assert!(w.rows <= p.stride && end.is_none_or(|end| end <= p.y.len()), "y is [tokens, stride]");
    assert!(p.bias.is_none_or(|b| b.len() == w.rows), "a bias per row");
}

/// Tiles of a part.
fn part_tiles(w: &Matrix<'_>, tokens: usize) -> usize {
    let bytes = w.bytes_read() as usize;
    let tile = (ROWS * bytes / w.rows.max(1)).max(1);
    // Of a small matrix smaller ones, so that all threads have some.
    let part = (bytes / FEWEST).clamp(SMALL_PART, PART);
    // Many tokens make a row dear.
    let step = if tokens <= FEW { 1 } else { DECODED_TILES };
    (part / tile / tokens.div_ceil(8).clamp(1, 8)).max(1).next_multiple_of(step)
}

/// Computes products that do not depend on each other as one job; those that are absent are left out.
///
/// # Panics
/// Lengths or orders do not fit.
pub fn products(pool: &Pool, all: &mut [Option<Product<'_>>]) {
    products_on(Isa::best(), pool, all);
}

/// As [`products`], with the instructions of `isa`.
///
/// # Panics
/// Lengths or orders do not fit, or the processor lacks `isa`.
pub fn products_on(isa: Isa, pool: &Pool, all: &mut [Option<Product<'_>>]) {
    assert!(isa.is_available());
    let mut work = 0;
    for p in all.iter().flatten() {
        check(p);
        work += p.w.rows * p.w.cols * Taken::of(p).tokens();
    }
    if work < PARALLEL {
        for p in all.iter_mut().flatten() {
            let y = Target { y: p.y.as_mut_ptr(), stride: p.stride, bias: p.bias };
            rows_on(isa, &p.w, Taken::of(p), &Tiles::all(&p.w, Taken::of(p).tokens()), &y);
        }
        return;
    }
    for some in all.chunks_mut(TOGETHER) {
        together(isa, pool, some);
    }
}

/// Up to `TOGETHER` products as one job.
fn together(isa: Isa, pool: &Pool, all: &mut [Option<Product<'_>>]) {
    // Of each product its tiles, those of a part, and the number of its first part.
    let mut plan: [Option<(Tiles, usize, usize)>; TOGETHER] = [const { None }; TOGETHER];
    let mut total = 0;
    let (mut memory, mut turned) = (TURNED.take(), [false; TOGETHER]);
    for (((p, plan), memory), turned) in all.iter().zip(&mut plan).zip(&mut memory).zip(&mut turned) {
        let Some(p) = p else { continue };
        *turned = crate::fast::turn(isa, pool, &p.w, Taken::of(p), memory);
        let tokens = Taken::of(p).tokens();
        let (tiles, size) = (Tiles::all(&p.w, tokens), part_tiles(&p.w, tokens));
        let parts = tiles.len().div_ceil(size);
        *plan = Some((tiles, size, total));
        total += parts;
    }
    struct Shared<'s, 'a>(&'s [Option<Product<'a>>]);
    // SAFETY: parts write disjoint rows of `y` and read everything else.
    unsafe impl Sync for Shared<'_, '_> {}
    let shared = Shared(all);
    pool.run(total, &|i| {
        let shared = &shared;
        let found = shared.0.iter().zip(&plan).enumerate().rev().find_map(|(k, (p, plan))| match (p, plan) {
            (Some(p), Some((tiles, size, first))) if *first <= i => {
                Some((k, p, tiles.piece(*size, i - first)))
            }
            _ => None,
        });
        if let Some((k, p, tiles)) = found {
            let y = Target { y: p.y.as_ptr().cast_mut(), stride: p.stride, bias: p.bias };
            let x = Taken { turned: turned[k].then_some(&memory[k]), ..Taken::of(p) };
            rows_on(isa, &p.w, x, &tiles, &y);
        }
    });
    TURNED.set(memory);
}

thread_local! {
    /// Tokens for tiles, of each product of a job.
    static TURNED: RefCell<[Turned; TOGETHER]> = RefCell::default();
}

pub(crate) fn rows_on(isa: Isa, w: &Matrix<'_>, x: Taken<'_>, rows: &Tiles, y: &Target<'_>) {
    if x.tokens() == 0 {
        return;
    }
    if w.fast {
        return crate::fast::rows_on(isa, w, x, rows, y);
    }
    match w.words {
        Some(words) => crate::words::rows_on(isa, w, words, x, rows, y),
        None => in_f32(isa, w, x, rows, y),
    }
}

/// Exact products of any kind.
pub(crate) fn in_f32(isa: Isa, w: &Matrix<'_>, x: Taken<'_>, rows: &Tiles, y: &Target<'_>) {
    match isa {
        Isa::Scalar => undirect(w, x, rows, y, panel::<Plain, 1>),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, which callers assert.
        Isa::Avx2 => unsafe { each_kind::<crate::lanes::x86::Avx2>(w, x, rows, y) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, which callers assert.
        Isa::Avx512 | Isa::Amx => unsafe { each_kind::<crate::lanes::x86::Avx512>(w, x, rows, y) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: the processor has NEON.
        Isa::Neon => unsafe { each_kind::<Neon>(w, x, rows, y) },
        _ => unreachable!("not available"),
    }
}

/// Instructions that kernels are compiled for: each kind of matrix becomes a function of its own, since one for all kinds takes
/// a compiler minutes.
trait Compiled: Lanes {
    /// # Safety
    /// The processor has the instructions.
    unsafe fn rows<D: Decode<Self>>(s: &Source<'_, D>, x: Taken<'_>, rows: &Tiles, y: &Target<'_>);
    /// See [`Dense`].
    ///
    /// # Safety
    /// The processor has the instructions.
    unsafe fn panel(rows: &Decoded<'_>, which: &[usize], x: Taken<'_>, y: &Target<'_>);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use crate::lanes::x86::{Avx2, Avx512};

    impl Compiled for Avx2 {
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn rows<D: Decode<Self>>(s: &Source<'_, D>, x: Taken<'_>, rows: &Tiles, y: &Target<'_>) {
            block_rows::<Self, D>(s, x, rows, y);
        }
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn panel(rows: &Decoded<'_>, which: &[usize], x: Taken<'_>, y: &Target<'_>) {
            panel::<Self, 1>(rows, which, x, y);
        }
    }

    impl Compiled for Avx512 {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
        unsafe fn rows<D: Decode<Self>>(s: &Source<'_, D>, x: Taken<'_>, rows: &Tiles, y: &Target<'_>) {
            block_rows::<Self, D>(s, x, rows, y);
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
        unsafe fn panel(rows: &Decoded<'_>, which: &[usize], x: Taken<'_>, y: &Target<'_>) {
            panel::<Self, 6>(rows, which, x, y);
        }
    }
}

#[cfg(target_arch = "aarch64")]
impl Compiled for Neon {
    unsafe fn rows<D: Decode<Self>>(s: &Source<'_, D>, x: Taken<'_>, rows: &Tiles, y: &Target<'_>) {
        block_rows::<Self, D>(s, x, rows, y);
    }
    unsafe fn panel(rows: &Decoded<'_>, which: &[usize], x: Taken<'_>, y: &Target<'_>) {
        panel::<Self, 1>(rows, which, x, y);
    }
}

/// Multiplies decoded rows, which are rows `which` of the matrix, with all tokens.
type Dense = fn(&Decoded<'_>, &[usize], Taken<'_>, &Target<'_>);

/// Up to sixteen rows as f32.
struct Decoded<'a> {
    /// `[tiles of four rows, vectors, 4, 16]`
    vectors: &'a [[[f32; LANES]; ROWS]],
    /// The rows that are decoded next.
    next: Ahead,
}

/// # Safety
/// The processor has L's instructions.
unsafe fn each_kind<L: Compiled>(w: &Matrix<'_>, x: Taken<'_>, rows: &Tiles, y: &Target<'_>) {
    if !w.is_direct() {
        // SAFETY: as this function's.
        return undirect(w, x, rows, y, |rows, which, x, y| unsafe { L::panel(rows, which, x, y) });
    }
    macro_rules! run {
        ($decoder:expr, $data:expr, $bits:expr) => {{
            let s = Source { d: $decoder, rows: RowBytes::new(w, $data, $bits), first: w.first };
            // SAFETY: as this function's.
            unsafe { L::rows(&s, x, rows, y) }
        }};
    }
    match w.data {
        Storage::F32(data) => run!(decode::Single, as_bytes(data), 32),
        Storage::F16(data) => run!(decode::Half, data, 16),
        Storage::Lut { bits, indices, lut, rows_per_group } => {
            let group = Divisor::new(rows_per_group);
            match bits {
                1 => run!(decode::LutSmall::<1> { lut, group }, indices, 1),
                2 => run!(decode::LutSmall::<2> { lut, group }, indices, 2),
                3 => run!(decode::LutSmall::<3> { lut, group }, indices, 3),
                4 => run!(decode::Nibbles(decode::Lut4 { lut, group }), indices, 4),
                6 => run!(decode::Lut6 { lut, group }, indices, 6),
                _ => run!(decode::Lut8 { lut, group }, indices, 8),
            }
        }
        Storage::Int { bits, signed, data, scale, offset, block } if block.1 == w.cols => {
            let scales = decode::RowScales { scale, offset, block_rows: Divisor::new(block.0) };
            match bits {
                4 => run!(decode::Nibbles(decode::Int4Rows { scales, signed }), data, 4),
                _ => run!(decode::Int8Rows { scales, signed }, data, 8),
            }
        }
        Storage::Int { bits, signed, data, scale, offset, block } => {
            let scales = decode::Scales::new(scale, offset, block, w.cols);
            match bits {
                4 => run!(decode::Int4 { scales, signed }, data, 4),
                _ => run!(decode::Int8 { scales, signed }, data, 8),
            }
        }
    }
}

thread_local! {
    /// Decoded rows.
    static DECODED: RefCell<Lines<[f32; LANES]>> = const { RefCell::new(Lines::new()) };
}

/// A row, and its vectors in a tile.
type OneRow = (Vec<f32>, Vec<[[f32; LANES]; ROWS]>);

thread_local! {
    static UNDIRECT: RefCell<OneRow> = RefCell::default();
}

/// Rows that no kernel reads in place are decoded one by one.
fn undirect(w: &Matrix<'_>, x: Taken<'_>, rows: &Tiles, y: &Target<'_>, dense: Dense) {
    let n = x.x.padded();
    let mut memory = UNDIRECT.take();
    let (row, vectors) = &mut memory;
    row.resize(w.cols, 0.0);
    vectors.resize(n / LANES, [[0.0; LANES]; ROWS]);
    for r in rows.each().flat_map(|(rows, n)| rows.into_iter().take(n)) {
        w.decode_row(r, row);
        for (k, [v, ..]) in vectors.iter_mut().enumerate() {
            for (l, v) in v.iter_mut().enumerate() {
                let i = k * LANES + l;
                *v = row.get(i / BLOCK * BLOCK + x.x.order.column(i % BLOCK)).copied().unwrap_or(0.0);
            }
        }
        dense(&Decoded { vectors, next: Ahead::NOTHING }, &[r], x, y);
    }
    UNDIRECT.set(memory);
}

/// Row r of the target for token `t`.
#[inline(always)]
pub(crate) fn store(y: &Target<'_>, r: usize, t: usize, v: f32) {
    let v = v + y.bias.map_or(0.0, |b| b[r]);
    // SAFETY: the token's row r lies inside of y, see `check`; no other part writes row r.
    unsafe { *y.y.add(t * y.stride + r) = v };
}

/// The stored rows of a matrix. Looking each up in a slice would take as long as a short row's product.
#[derive(Clone, Copy)]
pub(crate) struct RowBytes<'a> {
    start: *const u8,
    row_bytes: usize,
    of: PhantomData<&'a [u8]>,
}

impl<'a> RowBytes<'a> {
    /// Of `data`, in which a row has `bits` bits per element.
    ///
    /// # Panics
    /// There are fewer rows than `w` has.
    pub fn new(w: &Matrix<'_>, data: &'a [u8], bits: usize) -> Self {
        let row_bytes = w.cols * bits / 8;
        let own = &data[w.first * row_bytes..(w.first + w.rows) * row_bytes];
        RowBytes { start: own.as_ptr(), row_bytes, of: PhantomData }
    }

    /// # Safety
    /// The matrix has a row `row`.
    #[inline(always)]
    pub unsafe fn row(&self, row: usize) -> &'a [u8] {
        // SAFETY: `new` has seen the bytes of all rows of the matrix.
        unsafe { std::slice::from_raw_parts(self.start.add(row * self.row_bytes), self.row_bytes) }
    }

    /// As many rows behind `rows` as are decoded together, which may be more than there are; none behind rows of streams, which
    /// are read ahead of where they are decoded.
    #[inline(always)]
    pub fn behind(&self, rows: &[usize]) -> Ahead {
        match rows {
            [first, second, ..] if *second == first + 1 => {
                let from = self.start.wrapping_add((rows[rows.len() - 1] + 1) * self.row_bytes);
                Ahead { from, bytes: DECODED_TILES * ROWS * self.row_bytes }
            }
            _ => Ahead::NOTHING,
        }
    }
}

/// Rows of the target for token `t`, of which there are as many as `which` has.
#[inline(always)]
pub(crate) fn store_rows<L: Lanes>(y: &Target<'_>, which: &[usize], t: usize, v: L) {
    // Sixteen rows lie together or are of streams, where the second is as far from the first as streams are.
    if which.len() == LANES && which[1] == which[0] + 1 && which[LANES - 1] == which[0] + LANES - 1 {
        let bias = match y.bias {
            Some(all) => L::load(all[which[0]..].first_chunk().expect("a bias per row")),
            None => L::splat(0.0),
        };
        // SAFETY: as in `store`, for rows that lie together.
        return v.add(bias).store(unsafe { &mut *y.y.add(t * y.stride + which[0]).cast::<[f32; LANES]>() });
    }
    let mut all = [0f32; LANES];
    v.store(&mut all);
    which.iter().zip(all).for_each(|(&r, v)| store(y, r, t, v));
}

struct Source<'a, D> {
    d: D,
    rows: RowBytes<'a>,
    /// Row of the storage that is row 0.
    first: usize,
}

#[inline(always)]
fn block_rows<L: Compiled, D: Decode<L>>(s: &Source<'_, D>, x: Taken<'_>, rows: &Tiles, y: &Target<'_>) {
    let t = x.tokens();
    if t <= if D::OFTEN { FEW } else { 1 } {
        for (which, n) in rows.each() {
            let mut first = 0;
            while first < t {
                first += match t - first {
                    4.. if D::OFTEN => few::<L, D, 4>(s, which, n, x, first, y),
                    2.. if D::OFTEN => few::<L, D, 2>(s, which, n, x, first, y),
                    _ => few::<L, D, 1>(s, which, n, x, first, y),
                };
            }
        }
        return;
    }
    let mut decoded = DECODED.take();
    for (which, n) in rows.rows::<{ DECODED_TILES * ROWS }>() {
        decode_rows::<L, D>(s, &which[..n], (x.x.padded() / LANES, t <= FEW), &mut decoded);
        let rows = Decoded { vectors: decoded.as_chunks().0, next: s.rows.behind(&which[..n]) };
        // SAFETY: values of L exist only where the processor has its instructions, see the module of lanes.
        unsafe { L::panel(&rows, &which[..n], x, y) };
    }
    DECODED.set(decoded);
}

/// Asks for what comes behind some bytes of a row.
#[inline(always)]
pub(crate) fn prefetch(bytes: &[u8]) {
    crate::lines::prefetch(Cache::Second, bytes.as_ptr().wrapping_add(AHEAD), bytes.len());
}

/// As [`prefetch`], for exact products: those with weights of a few bits wait for instructions more than for memory.
#[inline(always)]
fn prefetch_block<L: Lanes, D: Decode<L>>(bytes: &[u8]) {
    let cache = if D::BYTES < BLOCK { Cache::First } else { Cache::Second };
    crate::lines::prefetch(cache, bytes.as_ptr().wrapping_add(AHEAD), bytes.len());
}

/// Four rows, of which n are wanted, times T tokens; rows are decoded into registers. Gives T.
#[inline(always)]
fn few<L: Lanes, D: Decode<L>, const T: usize>(
    s: &Source<'_, D>,
    which: [usize; ROWS],
    n: usize,
    x: Taken<'_>,
    first: usize,
    y: &Target<'_>,
) -> usize {
    let mut acc = [[L::splat(0.0); ROWS]; T];
    // In loops: closures given to other functions would be compiled without this one's instructions.
    let mut rows = [s.d.row(s.first + which[0]); ROWS];
    let mut bytes: [&[u8]; ROWS] = [&[]; ROWS];
    for i in 0..ROWS {
        rows[i] = s.d.row(s.first + which[i]);
        // SAFETY: tiles have rows of the matrix.
        bytes[i] = unsafe { s.rows.row(which[i]) };
    }
    let mut tokens: [&[[[f32; LANES]; VECTORS]]; T] = [&[]; T];
    for t in 0..T {
        tokens[t] = x.x.vectors(x.at(first + t)).as_chunks().0;
    }
    let whole = bytes[0].len() / D::BYTES;
    for b in 0..whole {
        let mut blocks = [bytes[0]; ROWS];
        for i in 0..ROWS {
            blocks[i] = &bytes[i][b * D::BYTES..(b + 1) * D::BYTES];
            prefetch_block::<L, D>(blocks[i]);
        }
        let raw = [
            s.d.raw(rows[0], b, blocks[0]),
            s.d.raw(rows[1], b, blocks[1]),
            s.d.raw(rows[2], b, blocks[2]),
            s.d.raw(rows[3], b, blocks[3]),
        ];
        block::<L, D, T>(&s.d, &rows, b, raw, &tokens, &mut acc);
    }
    // What a row ends with.
    if whole < tokens[0].len() {
        let mut space = [[0u8; MOST_BYTES]; ROWS];
        let [p, q, r, t] = &mut space;
        let from = whole * D::BYTES;
        let raw = [
            s.d.rest(rows[0], whole, &bytes[0][from..], p),
            s.d.rest(rows[1], whole, &bytes[1][from..], q),
            s.d.rest(rows[2], whole, &bytes[2][from..], r),
            s.d.rest(rows[3], whole, &bytes[3][from..], t),
        ];
        block::<L, D, T>(&s.d, &rows, whole, raw, &tokens, &mut acc);
    }
    for t in 0..T {
        for (i, sum) in L::totals(acc[t]).into_iter().enumerate().take(n) {
            store(y, which[i], first + t, sum);
        }
    }
    T
}

/// Adds one block of four rows; the rows take turns, so that four sums are under way at any time.
#[inline(always)]
fn block<L: Lanes, D: Decode<L>, const T: usize>(
    d: &D,
    rows: &[D::Row; ROWS],
    b: usize,
    raw: [D::Raw<'_>; ROWS],
    tokens: &[&[[[f32; LANES]; VECTORS]]; T],
    acc: &mut [[L; ROWS]; T],
) {
    let mut x = [&[[0f32; LANES]; VECTORS]; T];
    for t in 0..T {
        x[t] = &tokens[t][b];
    }
    for k in 0..VECTORS {
        for i in 0..ROWS {
            let w = d.vector(rows[i], b, raw[i], k);
            for t in 0..T {
                acc[t][i] = w.mul_add(L::load(&x[t][k]), acc[t][i]);
            }
        }
    }
}

/// Decodes rows to `[n / 4 rounded up, len, 4]` vectors; those of few tokens are read ahead of, each by itself.
#[inline(always)]
fn decode_rows<L: Lanes, D: Decode<L>>(
    s: &Source<'_, D>,
    which: &[usize],
    (len, few): (usize, bool),
    out: &mut Lines<[f32; LANES]>,
) {
    out.grow(which.len().next_multiple_of(ROWS) * len, [0.0; LANES]);
    let mut rest = [0u8; MOST_BYTES];
    let out = out.as_chunks_mut::<ROWS>().0;
    for (i, &r) in which.iter().enumerate() {
        let (out, i) = (&mut out[i / ROWS * len..][..len], i % ROWS);
        // SAFETY: tiles have rows of the matrix.
        let (row, bytes) = (s.d.row(s.first + r), unsafe { s.rows.row(r) });
        for (b, out) in out.as_chunks_mut::<VECTORS>().0.iter_mut().enumerate() {
            let raw = match bytes.get(b * D::BYTES..(b + 1) * D::BYTES) {
                Some(bytes) => {
                    if few {
                        prefetch_block::<L, D>(bytes);
                    }
                    s.d.raw(row, b, bytes)
                }
                None => s.d.rest(row, b, &bytes[b * D::BYTES..], &mut rest),
            };
            for k in 0..VECTORS {
                s.d.vector(row, b, raw, k).store(&mut out[k][i]);
            }
        }
    }
}

/// Vectors of columns that tiles go through at a time: those of six tokens stay in the first cache for all tiles of rows, whose
/// own come from the second.
const NEAR: usize = 32;

/// Decoded rows with all tokens, up to WIDE of them at a time.
#[inline(always)]
fn panel<L: Lanes, const WIDE: usize>(rows: &Decoded<'_>, which: &[usize], x: Taken<'_>, y: &Target<'_>) {
    let mut first = 0;
    while first < x.tokens() {
        first += match x.tokens() - first {
            // Rather than six and two.
            8 | 9 if WIDE > 4 => group::<L, 4>(rows, which, x, first, y),
            left if left >= WIDE => group::<L, WIDE>(rows, which, x, first, y),
            4.. if WIDE > 4 => group::<L, 4>(rows, which, x, first, y),
            2.. if WIDE > 2 => group::<L, 2>(rows, which, x, first, y),
            _ => group::<L, 1>(rows, which, x, first, y),
        };
    }
}

/// Decoded rows with T tokens. Gives T.
#[inline(always)]
fn group<L: Lanes, const T: usize>(
    rows: &Decoded<'_>,
    which: &[usize],
    x: Taken<'_>,
    first: usize,
    y: &Target<'_>,
) -> usize {
    let len = x.x.padded() / LANES;
    let tiles = if len == 0 { 0 } else { which.len().div_ceil(ROWS) };
    // Zeros would take as long to write as some of the products.
    let mut sums = [[MaybeUninit::<L>::uninit(); DECODED_TILES * ROWS]; T];
    for start in (0..len).step_by(NEAR) {
        let columns = start..len.min(start + NEAR);
        // In loops: closures given to other functions would be compiled without this one's instructions.
        let mut tokens: [&[[f32; LANES]]; T] = [&[]; T];
        for t in 0..T {
            tokens[t] = &x.x.vectors(x.at(first + t))[columns.clone()];
        }
        for i in 0..tiles {
            let mut before = [[L::splat(0.0); ROWS]; T];
            if start > 0 {
                for t in 0..T {
                    for r in 0..ROWS {
                        // SAFETY: written where start was 0.
                        before[t][r] = unsafe { sums[t][i * ROWS + r].assume_init() };
                    }
                }
            }
            if start == 0 {
                let piece = first * tiles + i * T;
                rows.next.pieces(piece..piece + T, x.tokens() * tiles);
            }
            let all = tile::<L, T>(&rows.vectors[i * len..][columns.clone()], &tokens, before);
            for t in 0..T {
                for r in 0..ROWS {
                    sums[t][i * ROWS + r].write(all[t][r]);
                }
            }
        }
    }
    for t in 0..T {
        let mut quarters = [L::splat(0.0); DECODED_TILES];
        for (i, quarters) in quarters.iter_mut().enumerate().take(tiles) {
            let mut four = [L::splat(0.0); ROWS];
            for r in 0..ROWS {
                // SAFETY: written above.
                four[r] = unsafe { sums[t][i * ROWS + r].assume_init() };
            }
            *quarters = L::quarters(four);
        }
        store_rows(y, which, first + t, L::totals_of_quarters(quarters));
    }
    T
}

#[inline(always)]
fn tile<L: Lanes, const T: usize>(
    rows: &[[[f32; LANES]; ROWS]],
    tokens: &[&[[f32; LANES]]; T],
    mut acc: [[L; ROWS]; T],
) -> [[L; ROWS]; T] {
    assert!(tokens.iter().all(|v| v.len() == rows.len()));
    for (k, rows) in rows.iter().enumerate() {
        let mut four = [acc[0][0]; ROWS];
        for i in 0..ROWS {
            four[i] = L::load(&rows[i]);
        }
        for t in 0..T {
            // SAFETY: as many vectors as the rows have.
            let v = L::load(unsafe { tokens[t].get_unchecked(k) });
            for i in 0..ROWS {
                acc[t][i] = four[i].mul_add(v, acc[t][i]);
            }
        }
    }
    acc
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{bytes, cases, noise};
    use crate::{Columns, Order};
    use proptest::prelude::*;

    /// Calls `check` with a matrix of each kind.
    fn each_matrix(seed: u64, rows: usize, cols: usize, mut check: impl FnMut(&str, &Matrix<'_>)) {
        let n = rows * cols;
        let dense = noise(seed, n);
        check("f32", &Matrix::f32(&dense, rows, cols).unwrap());
        let halves: Vec<u8> = dense.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect();
        check("f16", &Matrix::f16(&halves, rows, cols).unwrap());
        for bits in [1, 2, 3, 4, 6, 8] {
            let group = (1..=4).rev().find(|g| rows.is_multiple_of(*g)).unwrap();
            let lut = noise(seed + 1, (rows / group) << bits);
            let indices = bytes(seed + 2, (n * bits).div_ceil(8));
            check(&format!("lut{bits}"), &Matrix::lut(bits, &indices, &lut, group, rows, cols).unwrap());
            if bits == 4 {
                let mut lut = lut;
                lut.chunks_mut(16).for_each(crate::round_to_words);
                let words = crate::Words::new(&lut).unwrap();
                let w = Matrix::lut(bits, &indices, &lut, group, rows, cols).unwrap().whole(Some(&words));
                assert_eq!(w.order() == Order::Whole, cols.is_multiple_of(2));
                check("lut4 in words", &w);
            }
        }
        for (bits, signed) in [(4, true), (4, false), (8, true), (8, false)] {
            for most in [cols, 32, 8, 5] {
                let block = (
                    (1..=2).rev().find(|g| rows.is_multiple_of(*g)).unwrap(),
                    (1..=most).rev().find(|g| cols.is_multiple_of(*g)).unwrap(),
                );
                let blocks = rows / block.0 * (cols / block.1);
                let (scale, offset) = (noise(seed + 3, blocks), noise(seed + 4, blocks));
                let data = bytes(seed + 5, (n * bits).div_ceil(8));
                for offset in [None, Some(offset.as_slice())] {
                    let m = Matrix::int(bits, signed, &data, &scale, offset, block, rows, cols).unwrap();
                    check(&format!("int{bits} {signed} {block:?}"), &m);
                }
            }
        }
    }

    fn run(isa: Isa, pool: &Pool, w: &Matrix<'_>, x: &[f32], t: usize, bias: Option<&[f32]>) -> Vec<f32> {
        let mut panel = Panel::default();
        // Rubbish of an earlier use.
        panel.fill(
            Order::Packed,
            Columns { values: &[7.0; 900], first: 0, token_stride: 0, channel_stride: 1 },
            9,
            900,
        );
        let at = Columns { values: x, first: 0, token_stride: w.cols(), channel_stride: 1 };
        panel.fill(w.order(), at, t, w.cols());
        let mut y = vec![f32::NAN; t * w.rows()];
        products_on(
            isa,
            pool,
            &mut [Some(Product { w: *w, x: &panel, tokens: None, y: &mut y, stride: w.rows(), bias })],
        );
        y
    }

    /// Any, and those that end a little behind or before a block.
    fn columns() -> impl Strategy<Value = usize> {
        prop_oneof![1usize..400, (1usize..4, 0usize..9).prop_map(|(blocks, more)| 128 * blocks + more - 2)]
    }

    proptest! {
        #![proptest_config(cases())]
        #[test]
        fn every_kind_agrees_with_plain_arithmetic(seed in 1u64..1000, rows in 1usize..40, cols in columns(), t in prop::sample::select(vec![1usize, 2, 3, 5, 6, 7, 13])) {
            let (one, three) = (Pool::new(1), Pool::new(3));
            each_matrix(seed, rows, cols, |kind, w| {
                let x = noise(seed + 9, cols * t);
                let bias = noise(seed + 10, rows);
                let mut dense = vec![0f32; rows * cols];
                w.to_dense(&mut dense);
                let mut of_avx2 = None;
                for isa in Isa::available() {
                    let y = run(isa, &one, w, &x, t, Some(&bias));
                    for k in 0..t {
                        for r in 0..rows {
                            let terms = |f: fn(f64) -> f64| -> f64 {
                                (0..cols).map(|c| f(f64::from(dense[r * cols + c]) * f64::from(x[k * cols + c]))).sum()
                            };
                            let exact = terms(|v| v) + f64::from(bias[r]);
                            let error = (f64::from(y[k * rows + r]) - exact).abs();
                            let bound = 1e-6 * (terms(f64::abs) + exact.abs()) + 1e-12;
                            assert!(error <= bound, "{kind} {isa:?} [{rows}, {cols}] t {t}: {} for {exact}", y[k * rows + r]);
                        }
                        // A token by itself has the same result.
                        let alone = run(isa, &one, w, &x[k * cols..(k + 1) * cols], 1, Some(&bias));
                        assert_eq!(alone, &y[k * rows..(k + 1) * rows], "{kind} {isa:?} [{rows}, {cols}] t {t}");
                    }
                    assert_eq!(run(isa, &three, w, &x, t, Some(&bias)), y, "{kind} {isa:?}");
                    match (isa, &of_avx2) {
                        (Isa::Avx2, _) => of_avx2 = Some(y),
                        (Isa::Avx512 | Isa::Amx, Some(other)) => assert_eq!(other, &y, "{isa:?} {kind}"),
                        _ => {}
                    }
                }
                // Some rows by themselves.
                let part = w.row_range(rows / 2, rows);
                let all = run(Isa::best(), &one, w, &x, t, None);
                let some = run(Isa::best(), &one, &part, &x, t, None);
                for k in 0..t {
                    assert_eq!(&some[k * part.rows()..(k + 1) * part.rows()], &all[k * rows + rows / 2..(k + 1) * rows]);
                }
            });
        }
    }

    #[test]
    fn streams_cover_all_rows_once_and_do_not_meet_in_caches() {
        for (rows, row_bytes) in
            [(1, 8), (5, 1408), (7, 64), (1408, 1408), (262_144, 1408), (4096, 2048), (999, 4096)]
        {
            let stream = stream(rows, row_bytes);
            let all = Tiles { tiles: 0..stream, step: 1, stream, rows };
            let mut seen = vec![0; rows];
            for (which, n) in
                all.piece(3, 0).each().chain((1..stream.div_ceil(3)).flat_map(|i| all.piece(3, i).each()))
            {
                assert!(n > 0);
                which[..n].iter().for_each(|&r| seen[r] += 1);
            }
            assert!(seen.iter().all(|n| *n == 1), "{rows} {row_bytes}");
        }
        assert_ne!(stream(262_144, 1408) * 1408 % 4096, 0);
        assert_eq!(stream(262_144, 4096), 65_536);
    }

    #[test]
    fn threads_and_chosen_tokens_do_not_change_products() {
        let (rows, cols, t) = (515, 700, 3);
        let (data, other) = (noise(1, rows * cols), noise(7, rows * cols));
        let w = Matrix::f32(&data, rows, cols).unwrap();
        let v = Matrix::f32(&other, rows, cols).unwrap();
        let values = noise(2, cols * t);
        let x = Columns { values: &values, first: 0, token_stride: cols, channel_stride: 1 };
        let mut all = Panel::default();
        all.fill(w.order(), x, t, cols);
        let run = |threads| {
            let pool = Pool::new(threads);
            let (mut y, mut z, mut some) = (vec![0f32; rows * t], vec![0f32; rows * t], vec![0f32; rows * 2]);
            let product = |w, y, tokens| Some(Product { w, x: &all, tokens, y, stride: rows, bias: None });
            let a = product(w, y.as_mut_slice(), None);
            let b = product(v, z.as_mut_slice(), None);
            let c = product(v, some.as_mut_slice(), Some(&[2, 0]));
            products(&pool, &mut [a, None, b, c]);
            assert_eq!(some[..rows], z[2 * rows..3 * rows]);
            assert_eq!(some[rows..], z[..rows]);
            (y, z)
        };
        let one = run(1);
        assert!([2, 3, 8, 64].into_iter().all(|n| run(n) == one));
    }
}
