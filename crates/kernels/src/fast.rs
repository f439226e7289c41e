//! Products of integers: weights as 8-bit codes, tokens as 8-bit integers with scales of their own.
//!
//! A weight is `step * code + low` with a step and a low value per row, a token's element is `scale * q` with `|q| <= 127`.
//! Columns are taken 128 at a time, a chunk; lane l of sixteen adds the products of the same few columns of each of eight
//! chunks, and these at most 64 columns share one scale. Sums are integers until then, so that their order does not matter;
//! behind each eight chunks a lane is scaled and added in f32, then the lanes are added by halves. A token's result is the
//! same, bit by bit, whatever tokens, threads and instructions there are.
//!
//! Tables are looked up in tables of 8-bit codes, integers are codes as they are. Integers with scales for parts of a row are
//! scaled before they are added, see `blocks`. fp16 and f32 are multiplied in bf16, see `bf16`.

use crate::decode::{RowScales, Scales};
#[cfg(target_arch = "aarch64")]
use crate::lanes::neon::Neon;
use crate::lanes::{LANES, Lanes, Plain};
use crate::lines::{Ahead, Lines};
use crate::matrix::{Divisor, Storage};
use crate::panel::{Token, arranged};
use crate::product::{ROWS, RowBytes, Taken, Target, Tiles, prefetch, store, store_rows};
use crate::{Isa, Matrix, Pool};
use std::cell::RefCell;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(not(target_arch = "x86_64"))]
#[path = "fast/no_tiles.rs"]
mod amx;
pub(crate) mod bf16;
mod blocks;
#[cfg(test)]
mod bytes_tests;
mod codes;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

use codes::{Coded, Integers, Kind, LineOf, Nibbles, SmallTables, TableOf, Tables4, Tables6, Tables8, Whole};

pub(crate) use amx::turn;
pub use codes::Codes;

/// Columns of a chunk.
pub(crate) const CHUNK: usize = 128;
/// Vectors of a chunk.
const VECTORS: usize = CHUNK / LANES;
/// Chunks under one scale of a lane.
pub(crate) const SCALED: usize = 8;
/// Tokens up to which codes are made anew for each four rows and four tokens, in registers.
const FEW: usize = 8;
/// Tokens that pass together where codes are made once. With four rows they have twelve sums of integers and twelve of f32, all
/// of which fit into 32 registers; with six, sums would be stored and loaded again under each scale, which takes longer than
/// loading codes twice as often.
const WIDE: usize = 3;
/// Tiles of rows whose codes are made together.
const DECODED_TILES: usize = 4;
const DECODED_ROWS: usize = DECODED_TILES * ROWS;

/// Sixty-four bytes with the instructions of one [`Isa`].
pub(crate) trait Bytes: Lanes {
    type Bytes: Copy;
    /// Sixteen sums.
    type Sums: Copy;
    /// Tiles of several tokens are worth their code.
    const TILES: bool = true;
    fn bytes(v: &[u8; 64]) -> Self::Bytes;
    /// At most 64, and zeros.
    #[inline(always)]
    fn bytes_of(v: &[u8]) -> Self::Bytes {
        let mut whole = [0; 64];
        whole[..v.len()].copy_from_slice(v);
        Self::bytes(&whole)
    }
    /// Four times the same sixteen.
    fn table(v: &[u8; 16]) -> Self::Bytes;
    /// Some bits of each byte turned.
    fn flip(v: Self::Bytes, bits: u8) -> Self::Bytes;
    /// The lower and the upper four bits of each byte.
    fn nibbles(v: Self::Bytes) -> (Self::Bytes, Self::Bytes);
    /// `table[i]` for each byte, all below 16.
    fn find(table: Self::Bytes, at: Self::Bytes) -> Self::Bytes;
    fn put(v: Self::Bytes, out: &mut [u8; 64]);
    /// Sixty-four elements of `BITS` bits, least significant first, from `8 * BITS` bytes.
    #[inline(always)]
    fn unpack<const BITS: usize>(v: &[u8]) -> Self::Bytes {
        let mut out = [0; 64];
        for (v, out) in v.chunks_exact(BITS).zip(out.as_chunks_mut::<8>().0) {
            let all = v.iter().rev().fold(0u64, |all, b| all << 8 | u64::from(*b));
            for (i, o) in out.iter_mut().enumerate() {
                *o = (all >> (BITS * i)) as u8 & ((1 << BITS) - 1);
            }
        }
        Self::bytes(&out)
    }
    /// `table[i]` for each byte, all below 64.
    #[inline(always)]
    fn find_64(table: &[u8; 64], at: Self::Bytes) -> Self::Bytes {
        let mut all = [0; 64];
        Self::put(at, &mut all);
        Self::bytes(&all.map(|i| table[usize::from(i & 63)]))
    }
    /// `table[i]` for each byte.
    #[inline(always)]
    fn find_256(table: &[u8; 256], at: Self::Bytes) -> Self::Bytes {
        let mut all = [0; 64];
        Self::put(at, &mut all);
        Self::bytes(&all.map(|i| table[usize::from(i)]))
    }
    fn no_sums() -> Self::Sums;
    /// Adds to sum l the products of bytes `4 l .. 4 l + 4`, of which `codes` has no signs and `x` has.
    fn dot(sums: Self::Sums, codes: Self::Bytes, x: &[u8; 64]) -> Self::Sums;
    fn sums(v: Self::Sums) -> Self;
    /// Byte `4 l + j` is lane l of `v[j]`, a number from -127 to 127, to the nearest integer with ties to even.
    fn narrow(v: [Self; 4], out: &mut [u8; 64]);
}

impl Bytes for Plain {
    type Bytes = [u8; 64];
    type Sums = [i32; LANES];
    const TILES: bool = false;
    #[inline(always)]
    fn bytes(v: &[u8; 64]) -> [u8; 64] {
        *v
    }
    #[inline(always)]
    fn table(v: &[u8; 16]) -> [u8; 64] {
        std::array::from_fn(|i| v[i % 16])
    }
    #[inline(always)]
    fn flip(v: [u8; 64], bits: u8) -> [u8; 64] {
        v.map(|b| b ^ bits)
    }
    #[inline(always)]
    fn nibbles(v: [u8; 64]) -> ([u8; 64], [u8; 64]) {
        (v.map(|b| b & 15), v.map(|b| b >> 4))
    }
    #[inline(always)]
    fn find(table: [u8; 64], at: [u8; 64]) -> [u8; 64] {
        at.map(|i| table[usize::from(i & 15)])
    }
    #[inline(always)]
    fn put(v: [u8; 64], out: &mut [u8; 64]) {
        *out = v;
    }
    #[inline(always)]
    fn no_sums() -> Self::Sums {
        [0; LANES]
    }
    #[inline(always)]
    fn dot(mut sums: Self::Sums, codes: [u8; 64], x: &[u8; 64]) -> Self::Sums {
        for i in 0..64 {
            sums[i / 4] += i32::from(codes[i]) * i32::from(x[i] as i8);
        }
        sums
    }
    #[inline(always)]
    fn sums(v: Self::Sums) -> Self {
        Plain::load(&v.map(|s| s as f32))
    }
    #[inline(always)]
    fn narrow(v: [Self; 4], out: &mut [u8; 64]) {
        for (j, v) in v.into_iter().enumerate() {
            let mut lanes = [0f32; LANES];
            v.round().store(&mut lanes);
            for (l, v) in lanes.into_iter().enumerate() {
                out[4 * l + j] = v as i32 as u8;
            }
        }
    }
}

/// Tokens as 8-bit integers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Narrow {
    /// `[tokens, chunks, 2, 64]`
    bytes: Lines<[u8; 64]>,
    /// `[tokens, chunks / SCALED rounded up, 16]`
    scales: Lines<[f32; LANES]>,
    /// `[tokens, chunks, 2, 16]`: sums of the bytes of each lane, for weights that are scaled by parts of a row.
    lanes: Lines<[f32; LANES]>,
    /// Sum of all elements of each token.
    sums: Vec<f32>,
}

/// Elements that one thread makes bytes of at a time.
const SHARED: usize = 1 << 13;

/// Which vectors of a chunk are bytes 0, 1, 2, 3 of the lanes of its two halves.
type Quarters = [[usize; 4]; 2];

impl Narrow {
    /// For which there is room.
    pub fn elements(&self) -> usize {
        self.bytes.len() * 64
    }

    /// From tokens of `chunks * 8` vectors, in the order that belongs to `quarters`.
    pub fn fill(&mut self, token: &Token<'_>, tokens: usize, chunks: usize, quarters: &Quarters) {
        let scaled = chunks.div_ceil(SCALED);
        self.bytes.grow(tokens * chunks * 2, [0; 64]);
        self.scales.grow(tokens * scaled, [0.0; LANES]);
        self.lanes.grow(tokens * chunks * 2, [0.0; LANES]);
        self.sums.resize(self.sums.len().max(tokens), 0.0);
        let (bytes, scales, lanes, sums) =
            (&mut *self.bytes, &mut *self.scales, &mut *self.lanes, &mut self.sums[..tokens]);
        // Tokens by the few, so that threads share large calls; one token allocates nothing.
        let some = (SHARED / (chunks * CHUNK).max(1)).max(1);
        let some_tokens = |first: usize, (bytes, scales, lanes, sums): Narrowed<'_>| {
            for (t, sum) in sums.iter_mut().enumerate() {
                let lines = t * chunks * 2..(t + 1) * chunks * 2;
                let (bytes, lanes) = (&mut bytes[lines.clone()], &mut lanes[lines]);
                let scales = &mut scales[t * scaled..(t + 1) * scaled];
                arranged(token, first + t, chunks * CHUNK, |x| {
                    narrow(x, quarters, bytes, scales, lanes, sum)
                });
            }
        };
        if tokens <= some {
            return some_tokens(0, (bytes, scales, lanes, sums));
        }
        let bytes = bytes[..tokens * chunks * 2].chunks_mut((some * chunks * 2).max(1));
        let scales = scales[..tokens * scaled].chunks_mut((some * scaled).max(1));
        let lanes = lanes[..tokens * chunks * 2].chunks_mut((some * chunks * 2).max(1));
        let parts = bytes.zip(scales).zip(lanes).zip(sums.chunks_mut(some));
        let mut parts: Vec<_> = parts.collect();
        Pool::global().pieces(&mut parts, 1, &|i, parts| {
            for (((bytes, scales), lanes), sums) in parts {
                some_tokens(i * some, (bytes, scales, lanes, sums));
            }
        });
    }
}

/// Bytes, scales, sums of lanes and sums of some tokens, see [`Narrow`].
type Narrowed<'a> = (&'a mut [[u8; 64]], &'a mut [[f32; LANES]], &'a mut [[f32; LANES]], &'a mut [f32]);

crate::vector::dispatch! {
    fn narrow(data: &[[f32; LANES]], quarters: &Quarters, bytes: &mut [[u8; 64]], scales: &mut [[f32; LANES]], lanes: &mut [[f32; LANES]], sum: &mut f32) = narrow_on
}

#[inline(always)]
fn narrow_on<L: Bytes>(
    data: &[[f32; LANES]],
    quarters: &Quarters,
    bytes: &mut [[u8; 64]],
    scales: &mut [[f32; LANES]],
    lanes: &mut [[f32; LANES]],
    sum: &mut f32,
) {
    let mut total = L::splat(0.0);
    let parts = data.chunks(SCALED * VECTORS).zip(bytes.chunks_mut(SCALED * 2)).zip(scales);
    for (((data, bytes), scale), lanes) in parts.zip(lanes.chunks_mut(SCALED * 2)) {
        let (mut largest, mut wrong) = (L::splat(0.0), L::splat(0.0));
        for v in data {
            let v = L::load(v);
            largest = largest.max(v).max(v.mul(L::splat(-1.0)));
            // Zero, or NaN where an element is not finite: then all that it touches is NaN.
            wrong = v.mul_add(L::splat(0.0), wrong);
        }
        let inverse = L::splat(127.0).div(largest.max(L::splat(1e-30)));
        let step = largest.mul(L::splat(1.0 / 127.0)).add(wrong);
        step.store(scale);
        let mut q = L::splat(0.0);
        let chunks = data.as_chunks::<VECTORS>().0.iter().zip(bytes.as_chunks_mut::<2>().0);
        for ((chunk, out), lanes) in chunks.zip(lanes.as_chunks_mut::<2>().0) {
            for ((quarter, out), lanes) in quarters.iter().zip(out).zip(lanes) {
                let mut four = [q; 4];
                for j in 0..4 {
                    four[j] = L::load(&chunk[quarter[j]]).mul(inverse).round();
                }
                let sum = four[0].add(four[1]).add(four[2]).add(four[3]);
                sum.store(lanes);
                q = q.add(sum);
                L::narrow(four, out);
            }
        }
        total = step.mul_add(q, total);
    }
    *sum = total.total();
}

/// The halves of a chunk, for indices of 4 bits: columns of even and of odd places.
pub(crate) const PACKED: Quarters = [[0, 2, 4, 6], [1, 3, 5, 7]];
/// For elements of 8 bits: one half behind the other.
pub(crate) const IN_ORDER: Quarters = [[0, 1, 2, 3], [4, 5, 6, 7]];

impl Isa {
    /// The widest up to `self` that has products of bytes.
    pub(crate) fn for_bytes(self) -> Isa {
        #[cfg(target_arch = "x86_64")]
        if self == Isa::Avx512 && !std::arch::is_x86_feature_detected!("avx512vnni") {
            return Isa::Avx2;
        }
        self
    }
}

/// Some rows of w with all tokens.
pub(crate) fn rows_on(isa: Isa, w: &Matrix<'_>, x: Taken<'_>, rows: &Tiles, y: &Target<'_>) {
    if let Storage::F16(_) | Storage::F32(_) = w.data {
        return bf16::rows_on(isa, w, x, rows, y);
    }
    // SAFETY: the processor has the instructions, which callers and `for_bytes` assert.
    unsafe {
        match isa.for_bytes() {
            Isa::Scalar => each_kind::<Plain>(w, x, rows, y),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => each_kind::<crate::lanes::x86::Avx2>(w, x, rows, y),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => each_kind::<crate::lanes::x86::Avx512>(w, x, rows, y),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => neon::rows_on(w, x, rows, y),
            _ => unreachable!("not available"),
        }
    }
}

/// Tokens turned for tiles.
pub(crate) type Turned = Lines<[u8; 64]>;

/// Instructions that kernels are compiled for, each kind of matrix as a function of its own.
trait Compiled: Bytes {
    /// # Safety
    /// The processor has the instructions.
    unsafe fn rows<K: Kind<Self>>(s: &Source<'_>, kind: K, rows: &Tiles, y: &Target<'_>);
    /// # Safety
    /// The processor has the instructions.
    unsafe fn blocks<C: Coded<Self>, const HALVES: usize>(
        s: &Source<'_>,
        coded: C,
        scales: &Scales<'_>,
        more: f32,
        rows: &Tiles,
        y: &Target<'_>,
    );
    /// Multiplies decoded rows, which are rows `which` of the matrix, with all tokens.
    ///
    /// # Safety
    /// The processor has the instructions.
    unsafe fn panel(rows: &Decoded<'_>, which: &[usize], x: Taken<'_>, y: &Target<'_>);
}

macro_rules! compiled {
    ($l:ty, $(#[$features:meta])?) => {
        impl Compiled for $l {
            $(#[$features])?
            unsafe fn rows<K: Kind<Self>>(s: &Source<'_>, kind: K, rows: &Tiles, y: &Target<'_>) {
                all::<Self, K>(s, kind, rows, y);
            }
            $(#[$features])?
            unsafe fn blocks<C: Coded<Self>, const HALVES: usize>(
                s: &Source<'_>,
                coded: C,
                scales: &Scales<'_>,
                more: f32,
                rows: &Tiles,
                y: &Target<'_>,
            ) {
                blocks::all::<Self, C, HALVES>(s, coded, scales, more, rows, y);
            }
            $(#[$features])?
            unsafe fn panel(rows: &Decoded<'_>, which: &[usize], x: Taken<'_>, y: &Target<'_>) {
                panel::<Self>(rows, which, x, y);
            }
        }
    };
}

compiled!(Plain,);
#[cfg(target_arch = "x86_64")]
compiled!(crate::lanes::x86::Avx2, #[target_feature(enable = "avx2,fma,f16c")]);
#[cfg(target_arch = "x86_64")]
compiled!(
    crate::lanes::x86::Avx512,
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
);

#[cfg(target_arch = "aarch64")]
compiled!(Neon<neon::Widening>,);
#[cfg(target_arch = "aarch64")]
compiled!(Neon<neon::SignedDots>,);
#[cfg(target_arch = "aarch64")]
compiled!(Neon<neon::MixedDots>,);

/// # Safety
/// The processor has L's instructions.
unsafe fn each_kind<L: Compiled>(w: &Matrix<'_>, x: Taken<'_>, rows: &Tiles, y: &Target<'_>) {
    let source = |data, bits: usize| Source { rows: RowBytes::new(w, data, bits), w, x };
    // SAFETY: as this function's.
    unsafe {
        match (w.data, w.codes) {
            (Storage::Lut { bits, indices, rows_per_group, .. }, Some(codes)) => {
                let s = source(indices, bits);
                let of = TableOf { codes, group: Divisor::new(rows_per_group) };
                match bits {
                    1 => L::rows(&s, SmallTables::<1>(of), rows, y),
                    2 => L::rows(&s, SmallTables::<2>(of), rows, y),
                    3 => L::rows(&s, SmallTables::<3>(of), rows, y),
                    4 => L::rows(&s, Tables4(of), rows, y),
                    6 => L::rows(&s, Tables6(of), rows, y),
                    _ => L::rows(&s, Tables8(of), rows, y),
                }
            }
            (Storage::Int { bits, signed, data, scale, offset, block }, _) if block.1 == w.cols => {
                let s = source(data, bits);
                let (flip, more) = (signed_bit(bits, signed), codes_are_more(bits, signed));
                let scales = RowScales { scale, offset, block_rows: Divisor::new(block.0) };
                let line = LineOf { scales, more };
                match bits {
                    4 => L::rows(&s, Integers(Nibbles(flip * 0x11), line), rows, y),
                    _ => L::rows(&s, Integers(Whole(flip), line), rows, y),
                }
            }
            (Storage::Int { bits, signed, data, scale, offset, block }, _) => {
                let s = source(data, bits);
                let scales = Scales::new(scale, offset, block, w.cols);
                let (flip, more) = (signed_bit(bits, signed), codes_are_more(bits, signed));
                match bits {
                    4 => L::blocks::<_, 1>(&s, Nibbles(flip * 0x11), &scales, more, rows, y),
                    _ => L::blocks::<_, 2>(&s, Whole(flip), &scales, more, rows, y),
                }
            }
            _ => unreachable!("a matrix that has codes"),
        }
    }
}

/// The highest bit of integers with signs; with it turned they are codes.
fn signed_bit(bits: usize, signed: bool) -> u8 {
    if signed { 1 << (bits - 1) } else { 0 }
}

/// How much more than the integers their codes are.
fn codes_are_more(bits: usize, signed: bool) -> f32 {
    f32::from(signed_bit(bits, signed))
}

struct Source<'a> {
    rows: RowBytes<'a>,
    w: &'a Matrix<'a>,
    x: Taken<'a>,
}

thread_local! {
    static DECODED: RefCell<Lines<[u8; 64]>> = const { RefCell::new(Lines::new()) };
}

#[inline(always)]
fn all<L: Compiled, K: Kind<L>>(s: &Source<'_>, kind: K, rows: &Tiles, y: &Target<'_>) {
    let (x, first) = (s.x, s.w.first);
    let several = K::Code::OFTEN && L::TILES;
    if x.tokens() <= if several { FEW } else { 1 } {
        for (which, n) in rows.each() {
            // In loops: closures given to other functions would be compiled without this one's instructions.
            let (code, line) = kind.row(first + which[0]);
            let (mut codes, mut lines, mut bytes) = ([code; ROWS], [line; ROWS], [&[] as &[u8]; ROWS]);
            for i in 0..ROWS {
                (codes[i], lines[i]) = kind.row(first + which[i]);
                // SAFETY: tiles have rows of the matrix.
                bytes[i] = unsafe { s.rows.row(which[i]) };
            }
            let rows = Rows { codes, bytes, lines, which, n };
            let mut at = 0;
            while at < x.tokens() {
                at += match x.tokens() - at {
                    4.. if several => tile::<L, K::Code, 4>(&rows, x, at, y),
                    2.. if several => tile::<L, K::Code, 2>(&rows, x, at, y),
                    _ => tile::<L, K::Code, 1>(&rows, x, at, y),
                };
            }
        }
        return;
    }
    let (lines, few) = (x.x.chunks() * 2, x.tokens() <= FEW);
    let mut memory = DECODED.take();
    memory.grow(DECODED_ROWS * lines, [0; 64]);
    for (which, n) in rows.rows::<DECODED_ROWS>() {
        let (mut steps, mut lows) = ([0.0; DECODED_ROWS], [0.0; DECODED_ROWS]);
        for (i, &r) in which[..n].iter().enumerate() {
            let (code, line) = kind.row(first + r);
            (steps[i], lows[i]) = line;
            // SAFETY: tiles have rows of the matrix.
            let bytes = unsafe { s.rows.row(r) };
            let (tile, _) = memory[i / ROWS * ROWS * lines..][..ROWS * lines].as_chunks_mut::<{ 2 * ROWS }>();
            for (b, out) in tile.iter_mut().enumerate() {
                if few && !bytes.is_empty() {
                    let size = K::Code::BYTES;
                    prefetch(&bytes[(b * size).min(bytes.len())..bytes.len().min((b + 1) * size)]);
                }
                let halves = chunk::<L, K::Code>(code, bytes, b);
                L::put(halves.0, &mut out[i % ROWS]);
                L::put(halves.1, &mut out[ROWS + i % ROWS]);
            }
        }
        let next = s.rows.behind(&which[..n]);
        let decoded = Decoded { codes: memory.as_chunks().0, steps, lows, next };
        if let Some(turned) = x.turned {
            // SAFETY: tokens are turned only where the processor has tiles, see `turn`.
            unsafe { amx::in_tiles(&decoded, &which[..n], x, turned, y) };
            continue;
        }
        // SAFETY: values of L exist only where the processor has its instructions, see the module of lanes.
        unsafe { L::panel(&decoded, &which[..n], x, y) };
    }
    DECODED.set(memory);
}

/// Up to sixteen rows as codes.
pub(crate) struct Decoded<'a> {
    /// `[tiles of four rows, chunks, 2, 4, 64]`
    codes: &'a [[[u8; 64]; ROWS]],
    steps: [f32; DECODED_ROWS],
    lows: [f32; DECODED_ROWS],
    /// The rows that are decoded next.
    next: Ahead,
}

/// See [`Compiled::panel`].
#[inline(always)]
fn panel<L: Bytes>(rows: &Decoded<'_>, which: &[usize], x: Taken<'_>, y: &Target<'_>) {
    let mut at = 0;
    while at < x.tokens() {
        at += match x.tokens() - at {
            WIDE.. if L::TILES => block::<L, WIDE>(rows, which, x, at, y),
            2.. if L::TILES => block::<L, 2>(rows, which, x, at, y),
            _ => block::<L, 1>(rows, which, x, at, y),
        };
    }
}

/// Decoded rows with T tokens. Gives T.
#[inline(always)]
fn block<L: Bytes, const T: usize>(
    rows: &Decoded<'_>,
    which: &[usize],
    x: Taken<'_>,
    first: usize,
    y: &Target<'_>,
) -> usize {
    let (lines, scaled) = (x.x.chunks() * 2, x.x.chunks().div_ceil(SCALED));
    let mut tokens: [&[[u8; 64]]; T] = [&[]; T];
    let mut scales: [&[[f32; LANES]]; T] = [&[]; T];
    for t in 0..T {
        let token = x.at(first + t);
        tokens[t] = &x.x.narrow.bytes[token * lines..][..lines];
        scales[t] = &x.x.narrow.scales[token * scaled..][..scaled];
    }
    let mut quarters = [[L::splat(0.0); DECODED_TILES]; T];
    let tiles = if scaled == 0 { 0 } else { which.len().div_ceil(ROWS) };
    for i in 0..tiles {
        let codes = &rows.codes[i * lines..][..lines];
        let piece = first * tiles + i * T;
        rows.next.pieces(piece..piece + T, x.tokens() * tiles);
        let mut totals = [[L::splat(0.0); ROWS]; T];
        for s in 0..scaled {
            let columns = 2 * s * SCALED..lines.min(2 * (s + 1) * SCALED);
            // SAFETY: codes and tokens have as many lines.
            let sums = unsafe { dots::<L, T>(codes, &tokens, columns) };
            for t in 0..T {
                let scale = L::load(&scales[t][s]);
                for k in 0..ROWS {
                    totals[t][k] = L::sums(sums[t][k]).mul_add(scale, totals[t][k]);
                }
            }
        }
        for t in 0..T {
            quarters[t][i] = L::quarters(totals[t]);
        }
    }
    for t in 0..T {
        let sum = L::splat(x.x.narrow.sums[x.at(first + t)]);
        let scaled = L::load(&rows.steps).mul(L::totals_of_quarters(quarters[t]));
        store_rows(y, which, first + t, scaled.add(L::load(&rows.lows).mul(sum)));
    }
    T
}

/// Sums of products of four rows' codes with T tokens.
///
/// # Safety
/// All have these lines.
#[inline(always)]
unsafe fn dots<L: Bytes, const T: usize>(
    codes: &[[[u8; 64]; ROWS]],
    tokens: &[&[[u8; 64]]; T],
    lines: Range<usize>,
) -> [[L::Sums; ROWS]; T] {
    let mut sums = [[L::no_sums(); ROWS]; T];
    for c in lines {
        // SAFETY: as this function's.
        let codes = unsafe { codes.get_unchecked(c) };
        for k in 0..ROWS {
            let code = L::bytes(&codes[k]);
            for t in 0..T {
                // SAFETY: as this function's.
                sums[t][k] = L::dot(sums[t][k], code, unsafe { tokens[t].get_unchecked(c) });
            }
        }
    }
    sums
}

/// Codes of chunk b of a row; behind the row's end are zeros.
#[inline(always)]
fn chunk<L: Bytes, C: Coded<L>>(coded: C, bytes: &[u8], b: usize) -> (L::Bytes, L::Bytes) {
    let bytes = &bytes[b * C::BYTES..];
    match bytes.get(..C::BYTES) {
        Some(bytes) => coded.codes(bytes),
        None => coded.rest(bytes),
    }
}

/// Four rows, of which the first n are wanted.
struct Rows<'a, C> {
    codes: [C; ROWS],
    bytes: [&'a [u8]; ROWS],
    /// Step and low value.
    lines: [(f32, f32); ROWS],
    which: [usize; ROWS],
    n: usize,
}

/// Four rows with T tokens.
#[inline(always)]
fn tile<L: Bytes, C: Coded<L>, const T: usize>(
    rows: &Rows<'_, C>,
    x: Taken<'_>,
    first: usize,
    y: &Target<'_>,
) -> usize {
    let chunks = x.x.chunks();
    let scaled = chunks.div_ceil(SCALED);
    let mut tokens: [&[[[u8; 64]; 2]]; T] = [&[]; T];
    let mut scales: [&[[f32; LANES]]; T] = [&[]; T];
    for t in 0..T {
        tokens[t] = x.x.narrow.bytes[x.at(first + t) * chunks * 2..][..chunks * 2].as_chunks().0;
        scales[t] = &x.x.narrow.scales[x.at(first + t) * scaled..][..scaled];
    }
    let mut totals = [[L::splat(0.0); ROWS]; T];
    // Chunks that are whole in all rows.
    let whole = chunks.min(rows.bytes[0].len() / C::BYTES);
    assert!(rows.bytes.iter().all(|b| b.len() == rows.bytes[0].len()));
    for s in 0..scaled {
        let mut sums = [[L::no_sums(); ROWS]; T];
        let end = chunks.min((s + 1) * SCALED);
        for c in s * SCALED..end.min(whole) {
            for i in 0..ROWS {
                // SAFETY: c is below `whole`, by which all rows' bytes were measured.
                let bytes = unsafe { rows.bytes[i].get_unchecked(c * C::BYTES..(c + 1) * C::BYTES) };
                if T == 1 || C::BYTES < CHUNK {
                    prefetch(bytes);
                }
                let (a, b) = rows.codes[i].codes(bytes);
                for t in 0..T {
                    // SAFETY: c is below `chunks`, as many as each token has.
                    let x = unsafe { tokens[t].get_unchecked(c) };
                    sums[t][i] = L::dot(L::dot(sums[t][i], a, &x[0]), b, &x[1]);
                }
            }
        }
        for c in whole.max(s * SCALED)..end {
            for i in 0..ROWS {
                let (a, b) = rows.codes[i].rest(&rows.bytes[i][c * C::BYTES..]);
                for t in 0..T {
                    let x = &tokens[t][c];
                    sums[t][i] = L::dot(L::dot(sums[t][i], a, &x[0]), b, &x[1]);
                }
            }
        }
        for t in 0..T {
            let scale = L::load(&scales[t][s]);
            for i in 0..ROWS {
                totals[t][i] = L::sums(sums[t][i]).mul_add(scale, totals[t][i]);
            }
        }
    }
    for t in 0..T {
        let sum = x.x.narrow.sums[x.at(first + t)];
        for (i, total) in L::totals(totals[t]).into_iter().enumerate().take(rows.n) {
            let (step, low) = rows.lines[i];
            store(y, rows.which[i], first + t, step * total + low * sum);
        }
    }
    T
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{bytes, cases, noise};
    use crate::{Columns, Order, Panel, Product, products_on};
    use proptest::prelude::*;

    fn run(isa: Isa, pool: &Pool, w: &Matrix<'_>, x: &[f32], t: usize) -> Vec<f32> {
        let mut panel = Panel::default();
        let rubbish = Columns { values: &[7.0; 900], first: 0, token_stride: 0, channel_stride: 1 };
        panel.fill(Order::Fast, rubbish, 9, 900);
        let at = Columns { values: x, first: 0, token_stride: w.cols, channel_stride: 1 };
        panel.fill(w.order(), at, t, w.cols);
        let mut y = vec![f32::NAN; t * w.rows];
        products_on(
            isa,
            pool,
            &mut [Some(Product { w: *w, x: &panel, tokens: None, y: &mut y, stride: w.rows, bias: None })],
        );
        y
    }

    /// Calls `check` with a matrix of each kind, the bits of its tables or 0, and how long its rows are.
    fn each_matrix(seed: u64, rows: usize, cols: usize, mut check: impl FnMut(&str, usize, &Matrix<'_>)) {
        let group = (1..=4).rev().find(|g| rows.is_multiple_of(*g)).unwrap();
        for bits in [1, 2, 3, 4, 6, 8] {
            let cols = if bits == 8 { cols } else { cols.next_multiple_of(8) };
            let lut = noise(seed + 1, (rows / group) << bits);
            let indices = bytes(seed + 2, rows * cols * bits / 8);
            let codes = Codes::new(&lut, bits).unwrap();
            let m = Matrix::lut(bits, &indices, &lut, group, rows, cols).unwrap().fast(Some(&codes));
            check(&format!("lut{bits}"), bits, &m);
        }
        for (bits, signed) in [(8, true), (8, false), (4, true), (4, false)] {
            let cols = cols.next_multiple_of(32);
            let data = bytes(seed + 3, rows * cols * bits / 8);
            for block in [cols, 8, 32, 64, 96, 128] {
                if !cols.is_multiple_of(block) {
                    continue;
                }
                let n = rows / group * (cols / block);
                let (scale, offset) = (noise(seed + 4, n), noise(seed + 5, n));
                for offset in [None, Some(offset.as_slice())] {
                    let m = Matrix::int(bits, signed, &data, &scale, offset, (group, block), rows, cols);
                    check(&format!("int{bits} {signed} by {block}"), 0, &m.unwrap().fast(None));
                }
            }
        }
    }

    proptest! {
        #![proptest_config(cases())]
        #[test]
        fn products_of_integers_are_close_and_do_not_depend_on_what_is_beside(
            seed in 1u64..1000,
            rows in 1usize..40,
            cols in 1usize..1300,
            t in prop::sample::select(vec![1usize, 2, 3, 4, 5, 6, 7, 13]),
        ) {
            let (one, three) = (Pool::new(1), Pool::new(3));
            each_matrix(seed, rows, cols, |kind, bits, w| {
                prop_assert_fast(kind, bits, w, seed, t, &one, &three);
            });
        }
    }

    fn prop_assert_fast(
        kind: &str,
        bits: usize,
        w: &Matrix<'_>,
        seed: u64,
        t: usize,
        one: &Pool,
        three: &Pool,
    ) {
        assert!(w.fast, "{kind}");
        let (rows, cols) = (w.rows, w.cols);
        let x = noise(seed + 9, cols * t);
        let mut dense = vec![0f32; rows * cols];
        w.to_dense(&mut dense);
        let mut of_avx2: Option<Vec<f32>> = None;
        for isa in Isa::available() {
            let y = run(isa, one, w, &x, t);
            for k in 0..t {
                for r in 0..rows {
                    let pairs = || (0..cols).map(|c| (dense[r * cols + c], x[k * cols + c]));
                    let exact: f64 = pairs().map(|(w, x)| f64::from(w) * f64::from(x)).sum();
                    // Half a step of each factor in the worst case; x is at most 0.5, a step of tables of at most 1 a 255th.
                    let half_step = if bits > 0 { 0.5 / 255.0 } else { 0.0 };
                    let terms: f64 =
                        pairs().map(|(w, _)| f64::from(w).abs() * 0.25 / 127.0 + 0.51 * half_step).sum();
                    let bound = terms * 1.01
                        + pairs().map(|(w, x)| f64::from((w * x).abs())).sum::<f64>() * 1e-5
                        + 1e-5;
                    let error = (f64::from(y[k * rows + r]) - exact).abs();
                    assert!(
                        error <= bound,
                        "{kind} {isa:?} [{rows}, {cols}] t {t}: {} for {exact}",
                        y[k * rows + r]
                    );
                }
                let alone = run(isa, one, w, &x[k * cols..(k + 1) * cols], 1);
                assert_eq!(alone, &y[k * rows..(k + 1) * rows], "{kind} {isa:?} [{rows}, {cols}] t {t}");
            }
            assert_eq!(run(isa, three, w, &x, t), y, "{kind} {isa:?}");
            match (isa, &of_avx2) {
                (Isa::Avx2, _) => of_avx2 = Some(y),
                (Isa::Avx512 | Isa::Amx, Some(other)) => assert_eq!(other, &y, "{isa:?} {kind}"),
                _ => {}
            }
        }
    }

    /// The error as a share of the norm, which random signs average to.
    #[test]
    fn the_error_of_a_product_is_below_one_percent() {
        let (rows, cols) = (256, 2816);
        let lut: Vec<f32> = noise(3, rows / 32 * 16);
        let indices = bytes(4, rows * cols / 2);
        let codes = Codes::new(&lut, 4).unwrap();
        let exact = Matrix::lut(4, &indices, &lut, 32, rows, cols).unwrap();
        let x: Vec<f32> = noise(5, cols).chunks(2).flat_map(|v| [v[0] + v[1], v[0] * 3.0 - v[1]]).collect();
        let pool = Pool::new(1);
        let a = run(Isa::best(), &pool, &exact, &x, 1);
        let b = run(Isa::best(), &pool, &exact.fast(Some(&codes)), &x, 1);
        let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        let error = norm(&mut a.iter().zip(&b).map(|(a, b)| a - b)) / norm(&mut a.iter().copied());
        assert!(error > 1e-5 && error < 0.01, "{error}");
        let dot: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(a * b)).sum();
        let cosine = dot / norm(&mut a.iter().copied()) / norm(&mut b.iter().copied());
        assert!(cosine > 0.9999, "{cosine}");
    }

    #[test]
    fn what_is_not_finite_is_not_hidden() {
        let lut = noise(3, 16);
        let codes = Codes::new(&lut, 4).unwrap();
        let indices = bytes(4, 4 * 100);
        let w = Matrix::lut(4, &indices, &lut, 4, 4, 200).unwrap().fast(Some(&codes));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = noise(5, 200);
            x[77] = bad;
            assert!(run(Isa::best(), &Pool::new(1), &w, &x, 1).iter().all(|v| v.is_nan()), "{bad}");
        }
        assert!(Codes::new(&[f32::NAN; 16], 4).is_none());
        assert!(Codes::new(&[0.0; 15], 4).is_none());
        let zeros = run(Isa::best(), &Pool::new(1), &w, &[0.0; 200], 1);
        assert_eq!(zeros, [0.0; 4]);
    }
}
