//! What becomes of stored elements: codes of 8 bits.

use super::{Bytes, CHUNK};
use crate::decode::RowScales;
use crate::matrix::Divisor;

/// Tables of 8-bit codes for tables of f32: entry `i` of table `g` is close to `step[g] * codes[entries g + i] + low[g]`.
#[derive(Clone, Debug)]
pub struct Codes {
    /// Entries of a table.
    entries: usize,
    /// Repeated to sixteen entries where there are fewer.
    codes: Vec<u8>,
    /// Step and low value.
    lines: Vec<(f32, f32)>,
}

impl Codes {
    /// Codes for tables of `2^bits` entries, as many as there are; none where an entry is not finite.
    pub fn new(lut: &[f32], bits: usize) -> Option<Codes> {
        let entries = 1usize << bits;
        if bits > 8 || !lut.len().is_multiple_of(entries) || lut.iter().any(|v| !v.is_finite()) {
            return None;
        }
        let mut all = Codes { entries, codes: Vec::new(), lines: Vec::new() };
        for table in lut.chunks_exact(entries) {
            let (low, high) =
                table.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(a, b), &v| (a.min(v), b.max(v)));
            let step = (high - low) / 255.0;
            if !step.is_finite() {
                return None;
            }
            let code = |v: f32| if step > 0.0 { ((v - low) / step).round() as u8 } else { 0 };
            all.codes.extend((0..entries.max(16)).map(|i| code(table[i % entries])));
            all.lines.push((step, low));
        }
        Some(all)
    }

    /// They are for `lut`'s tables of `2^bits` entries.
    pub(crate) fn fit(&self, lut: &[f32], bits: usize) -> bool {
        self.entries == 1 << bits && self.entries * self.lines.len() == lut.len()
    }

    pub(super) fn line(&self, table: usize) -> (f32, f32) {
        self.lines[table]
    }

    /// Codes of a table, of which there are N.
    #[inline(always)]
    pub(super) fn table<const N: usize>(&self, table: usize) -> &[u8; N] {
        match self.codes[table * N..(table + 1) * N].try_into() {
            Ok(codes) => codes,
            Err(_) => unreachable!("N codes"),
        }
    }
}

/// How the bytes of a row become codes.
pub(super) trait Coded<L: Bytes>: Copy {
    /// Bytes of a chunk.
    const BYTES: usize;
    /// Worth code of its own for several tokens; others are decoded first.
    const OFTEN: bool = false;
    /// A chunk's codes; `chunk` has `BYTES` bytes.
    fn codes(self, chunk: &[u8]) -> (L::Bytes, L::Bytes);
    /// As [`Coded::codes`], from fewer bytes and zeros.
    #[inline(always)]
    fn rest(self, bytes: &[u8]) -> (L::Bytes, L::Bytes) {
        let mut chunk = [0u8; CHUNK];
        chunk[..bytes.len()].copy_from_slice(bytes);
        self.codes(&chunk[..Self::BYTES])
    }
}

#[inline(always)]
fn half<const N: usize>(chunk: &[u8], i: usize) -> &[u8; N] {
    match chunk[N * i..N * (i + 1)].try_into() {
        Ok(half) => half,
        Err(_) => unreachable!("N bytes"),
    }
}

/// 4-bit indices.
#[derive(Clone, Copy)]
pub(super) struct Indices<L: Bytes>(pub L::Bytes);

impl<L: Bytes> Coded<L> for Indices<L> {
    const BYTES: usize = CHUNK / 2;
    const OFTEN: bool = true;
    #[inline(always)]
    fn codes(self, chunk: &[u8]) -> (L::Bytes, L::Bytes) {
        let (even, odd) = L::nibbles(L::bytes(half(chunk, 0)));
        (L::find(self.0, even), L::find(self.0, odd))
    }
    #[inline(always)]
    fn rest(self, bytes: &[u8]) -> (L::Bytes, L::Bytes) {
        let (even, odd) = L::nibbles(L::bytes_of(bytes));
        (L::find(self.0, even), L::find(self.0, odd))
    }
}

/// Indices of 1, 2 or 3 bits.
#[derive(Clone, Copy)]
pub(super) struct Small<L: Bytes, const BITS: usize>(pub L::Bytes);

impl<L: Bytes, const BITS: usize> Coded<L> for Small<L, BITS> {
    const BYTES: usize = CHUNK / 8 * BITS;
    #[inline(always)]
    fn codes(self, chunk: &[u8]) -> (L::Bytes, L::Bytes) {
        let (a, b) = chunk[..CHUNK / 8 * BITS].split_at(8 * BITS);
        (L::find(self.0, L::unpack::<BITS>(a)), L::find(self.0, L::unpack::<BITS>(b)))
    }
}

/// 6-bit indices.
#[derive(Clone, Copy)]
pub(super) struct Six<'a>(pub &'a [u8; 64]);

impl<L: Bytes> Coded<L> for Six<'_> {
    const BYTES: usize = CHUNK / 8 * 6;
    #[inline(always)]
    fn codes(self, chunk: &[u8]) -> (L::Bytes, L::Bytes) {
        let (a, b) = chunk[..CHUNK / 8 * 6].split_at(48);
        (L::find_64(self.0, L::unpack::<6>(a)), L::find_64(self.0, L::unpack::<6>(b)))
    }
}

/// 8-bit indices.
#[derive(Clone, Copy)]
pub(super) struct Eight<'a>(pub &'a [u8; 256]);

impl<L: Bytes> Coded<L> for Eight<'_> {
    const BYTES: usize = CHUNK;
    #[inline(always)]
    fn codes(self, chunk: &[u8]) -> (L::Bytes, L::Bytes) {
        (L::find_256(self.0, L::bytes(half(chunk, 0))), L::find_256(self.0, L::bytes(half(chunk, 1))))
    }
}

/// 8-bit integers, with these bits turned: those that have signs become 128 more.
#[derive(Clone, Copy)]
pub(super) struct Whole(pub u8);

impl<L: Bytes> Coded<L> for Whole {
    const BYTES: usize = CHUNK;
    const OFTEN: bool = true;
    #[inline(always)]
    fn codes(self, chunk: &[u8]) -> (L::Bytes, L::Bytes) {
        let (a, b) = (L::bytes(half(chunk, 0)), L::bytes(half(chunk, 1)));
        (L::flip(a, self.0), L::flip(b, self.0))
    }
    #[inline(always)]
    fn rest(self, bytes: &[u8]) -> (L::Bytes, L::Bytes) {
        let (a, b) = bytes.split_at(bytes.len().min(CHUNK / 2));
        (L::flip(L::bytes_of(a), self.0), L::flip(L::bytes_of(b), self.0))
    }
}

/// 4-bit integers, with these bits turned: those that have signs become 8 more.
#[derive(Clone, Copy)]
pub(super) struct Nibbles(pub u8);

impl<L: Bytes> Coded<L> for Nibbles {
    const BYTES: usize = CHUNK / 2;
    #[inline(always)]
    fn codes(self, chunk: &[u8]) -> (L::Bytes, L::Bytes) {
        L::nibbles(L::flip(L::bytes(half(chunk, 0)), self.0))
    }
    #[inline(always)]
    fn rest(self, bytes: &[u8]) -> (L::Bytes, L::Bytes) {
        L::nibbles(L::flip(L::bytes_of(bytes), self.0))
    }
}

/// What is needed of each row of a matrix besides its bytes.
pub(super) trait Kind<L: Bytes>: Copy {
    /// How its bytes become codes.
    type Code: Coded<L>;
    /// Of row `row` of the storage: the code, step and low value.
    fn row(&self, row: usize) -> (Self::Code, (f32, f32));
}

/// Which table a row has.
#[derive(Clone, Copy)]
pub(super) struct TableOf<'a> {
    pub codes: &'a Codes,
    pub group: Divisor,
}

macro_rules! tables {
    ($(#[$doc:meta])* $name:ident $([$bits:ident])?, $code:ty, |$table:ident| $coded:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name<'a $(, const $bits: usize)?>(pub TableOf<'a>);

        impl<'a, L: Bytes $(, const $bits: usize)?> Kind<L> for $name<'a $(, $bits)?> {
            type Code = $code;
            #[inline(always)]
            fn row(&self, row: usize) -> ($code, (f32, f32)) {
                let at = self.0.group.divide(row);
                let $table = self.0.codes.table(at);
                ($coded, self.0.codes.line(at))
            }
        }
    };
}

tables!(
    /// 1, 2 or 3 bits.
    SmallTables[BITS],
    Small<L, BITS>,
    |table| Small(L::table(table))
);
tables!(
    /// 4 bits.
    Tables4,
    Indices<L>,
    |table| Indices(L::table(table))
);
tables!(
    /// 6 bits.
    Tables6,
    Six<'a>,
    |table| Six(table)
);
tables!(
    /// 8 bits.
    Tables8,
    Eight<'a>,
    |table| Eight(table)
);

/// Scales of rows, for codes.
#[derive(Clone, Copy)]
pub(super) struct LineOf<'a> {
    pub scales: RowScales<'a>,
    /// How much more than the integers their codes are.
    pub more: f32,
}

/// Integers with a scale per row.
#[derive(Clone, Copy)]
pub(super) struct Integers<'a, C>(pub C, pub LineOf<'a>);

impl<L: Bytes, C: Coded<L>> Kind<L> for Integers<'_, C> {
    type Code = C;
    #[inline(always)]
    fn row(&self, row: usize) -> (C, (f32, f32)) {
        let (s, z) = self.1.scales.of(row);
        (self.0, (s, -s * (z + self.1.more)))
    }
}
