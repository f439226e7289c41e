//! Decodes stored elements to 8-bit codes, a block of 128 columns as two lines of 64 bytes.
//!
//! ```text
//! 4 bits: 64 bytes    byte m = | i1 | i0 |   line 0 = codes of columns 2 m (low nibbles), line 1 = of 2 m + 1 (high nibbles)
//! others: 16 bits bytes                      line 0 = codes of columns 0 .. 63,           line 1 = of 64 .. 127
//! ```

use super::decode::RowScales;
use super::schedule::*;
use crate::Matrix;
use crate::lut_tables::Int8Lut;
use crate::matrix::{BLOCK, Divisor};
use crate::memory::Prefetch;
use crate::simd::U8x64;

/// Decodes a row's bytes to codes.
pub(super) trait Coded<L: U8x64>: Copy {
    /// Bytes of a block.
    const BYTES: usize;
    /// True if a kernel for small batches decodes into registers; otherwise rows are decoded into memory first.
    const SMALL_BATCH_KERNEL: bool = false;
    /// Decodes a block of `BYTES` bytes.
    fn codes(self, block: &[u8]) -> (L::Bytes, L::Bytes);
    /// Decodes the last block of a row from fewer bytes; zeros follow.
    #[inline(always)]
    fn rest(self, bytes: &[u8]) -> (L::Bytes, L::Bytes) {
        let mut block = [0u8; BLOCK];
        block[..bytes.len()].copy_from_slice(bytes);
        self.codes(&block[..Self::BYTES])
    }
}

#[inline(always)]
fn line<const N: usize>(block: &[u8], i: usize) -> &[u8; N] {
    match block[N * i..N * (i + 1)].try_into() {
        Ok(line) => line,
        Err(_) => unreachable!("N bytes"),
    }
}

/// LUT weights with 4-bit indices.
#[derive(Clone, Copy)]
pub(super) struct Indices<L: U8x64>(pub L::Bytes);

impl<L: U8x64> Coded<L> for Indices<L> {
    const BYTES: usize = BLOCK / 2;
    const SMALL_BATCH_KERNEL: bool = true;
    #[inline(always)]
    fn codes(self, block: &[u8]) -> (L::Bytes, L::Bytes) {
        let (even, odd) = L::split_nibbles(L::load_bytes(line(block, 0)));
        (L::lookup_bytes_16(self.0, even), L::lookup_bytes_16(self.0, odd))
    }
    #[inline(always)]
    fn rest(self, bytes: &[u8]) -> (L::Bytes, L::Bytes) {
        let (even, odd) = L::split_nibbles(L::load_partial_bytes(bytes));
        (L::lookup_bytes_16(self.0, even), L::lookup_bytes_16(self.0, odd))
    }
}

/// LUT weights with indices of 1, 2 or 3 bits.
#[derive(Clone, Copy)]
pub(super) struct Small<L: U8x64, const BITS: usize>(pub L::Bytes);

impl<L: U8x64, const BITS: usize> Coded<L> for Small<L, BITS> {
    const BYTES: usize = BLOCK / 8 * BITS;
    #[inline(always)]
    fn codes(self, block: &[u8]) -> (L::Bytes, L::Bytes) {
        let (a, b) = block[..BLOCK / 8 * BITS].split_at(8 * BITS);
        (L::lookup_bytes_16(self.0, L::unpack::<BITS>(a)), L::lookup_bytes_16(self.0, L::unpack::<BITS>(b)))
    }
}

/// LUT weights with 6-bit indices.
#[derive(Clone, Copy)]
pub(super) struct Six<'a>(pub &'a [u8; 64]);

impl<L: U8x64> Coded<L> for Six<'_> {
    const BYTES: usize = BLOCK / 8 * 6;
    #[inline(always)]
    fn codes(self, block: &[u8]) -> (L::Bytes, L::Bytes) {
        let (a, b) = block[..BLOCK / 8 * 6].split_at(48);
        (L::lookup_bytes_64(self.0, L::unpack::<6>(a)), L::lookup_bytes_64(self.0, L::unpack::<6>(b)))
    }
}

/// LUT weights with 8-bit indices.
#[derive(Clone, Copy)]
pub(super) struct Eight<'a>(pub &'a [u8; 256]);

impl<L: U8x64> Coded<L> for Eight<'_> {
    const BYTES: usize = BLOCK;
    #[inline(always)]
    fn codes(self, block: &[u8]) -> (L::Bytes, L::Bytes) {
        (
            L::lookup_bytes_256(self.0, L::load_bytes(line(block, 0))),
            L::lookup_bytes_256(self.0, L::load_bytes(line(block, 1))),
        )
    }
}

/// 8-bit integers; the field's bits are flipped, which adds 128 to signed integers.
#[derive(Clone, Copy)]
pub(super) struct Whole(pub u8);

impl<L: U8x64> Coded<L> for Whole {
    const BYTES: usize = BLOCK;
    const SMALL_BATCH_KERNEL: bool = true;
    #[inline(always)]
    fn codes(self, block: &[u8]) -> (L::Bytes, L::Bytes) {
        let (a, b) = (L::load_bytes(line(block, 0)), L::load_bytes(line(block, 1)));
        (L::xor_bytes(a, self.0), L::xor_bytes(b, self.0))
    }
    #[inline(always)]
    fn rest(self, bytes: &[u8]) -> (L::Bytes, L::Bytes) {
        let (a, b) = bytes.split_at(bytes.len().min(BLOCK / 2));
        (L::xor_bytes(L::load_partial_bytes(a), self.0), L::xor_bytes(L::load_partial_bytes(b), self.0))
    }
}

/// 4-bit integers; the field's bits are flipped, which adds 8 to signed integers.
#[derive(Clone, Copy)]
pub(super) struct Nibbles(pub u8);

impl<L: U8x64> Coded<L> for Nibbles {
    const BYTES: usize = BLOCK / 2;
    const SMALL_BATCH_KERNEL: bool = true;
    #[inline(always)]
    fn codes(self, block: &[u8]) -> (L::Bytes, L::Bytes) {
        L::split_nibbles(L::xor_bytes(L::load_bytes(line(block, 0)), self.0))
    }
    #[inline(always)]
    fn rest(self, bytes: &[u8]) -> (L::Bytes, L::Bytes) {
        L::split_nibbles(L::xor_bytes(L::load_partial_bytes(bytes), self.0))
    }
}

/// Decodes the rows of one weight format to codes.
pub(super) trait Format: Copy {
    /// The decoder of a row.
    type Code<L: U8x64>: Coded<L>;
    /// Returns the decoder, step and low value of row `row` of the storage: `weight = step * code + low`.
    fn row<L: U8x64>(&self, row: usize) -> (Self::Code<L>, (f32, f32));
}

/// Finds a row's table.
#[derive(Clone, Copy)]
pub(super) struct TableOf<'a> {
    pub lut: &'a Int8Lut,
    pub group: Divisor,
}

macro_rules! tables {
    ($(#[$doc:meta])* $name:ident $([$bits:ident])?, $code:ty, |$table:ident| $coded:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name<'a $(, const $bits: usize)?>(pub TableOf<'a>);

        impl<'a $(, const $bits: usize)?> Format for $name<'a $(, $bits)?> {
            type Code<L: U8x64> = $code;
            #[inline(always)]
            fn row<L: U8x64>(&self, row: usize) -> (Self::Code<L>, (f32, f32)) {
                let at = self.0.group.divide(row);
                let $table = self.0.lut.table(at);
                ($coded, self.0.lut.line(at))
            }
        }
    };
}

tables!(
    /// Tables of 1, 2 or 3 bits.
    SmallTables[BITS],
    Small<L, BITS>,
    |table| Small(L::load_byte_table(table))
);
tables!(
    /// Tables of 4 bits.
    Tables4,
    Indices<L>,
    |table| Indices(L::load_byte_table(table))
);
tables!(
    /// Tables of 6 bits.
    Tables6,
    Six<'a>,
    |table| Six(table)
);
tables!(
    /// Tables of 8 bits.
    Tables8,
    Eight<'a>,
    |table| Eight(table)
);

/// Stored integers, which are codes once their sign bit is flipped.
pub(super) trait StoredIntegers: Copy {
    /// The decoder.
    type Code<L: U8x64>: Coded<L>;
    /// Returns the decoder.
    fn code<L: U8x64>(self) -> Self::Code<L>;
}

macro_rules! stored_integers {
    ($name:ident) => {
        impl StoredIntegers for $name {
            type Code<L: U8x64> = $name;
            #[inline(always)]
            fn code<L: U8x64>(self) -> $name {
                self
            }
        }
    };
}
stored_integers!(Whole);
stored_integers!(Nibbles);

/// Integers with one scale per row.
#[derive(Clone, Copy)]
pub(super) struct Integers<'a, C> {
    pub codes: C,
    pub scales: RowScales<'a>,
    /// Codes minus integers, see [`code_excess`].
    pub excess: f32,
}

impl<C: StoredIntegers> Format for Integers<'_, C> {
    type Code<L: U8x64> = C::Code<L>;
    #[inline(always)]
    fn row<L: U8x64>(&self, row: usize) -> (C::Code<L>, (f32, f32)) {
        let (s, z) = self.scales.get(row);
        (self.codes.code::<L>(), (s, -s * (z + self.excess)))
    }
}

/// Returns the sign bit of integers, 0 for unsigned ones. Flipping it adds half their range and makes unsigned codes.
pub(super) fn sign_bit(bits: u8, signed: bool) -> u8 {
    if signed { 1 << (bits - 1) } else { 0 }
}

/// Returns codes minus integers: half the range of signed integers, 0 for unsigned ones.
pub(super) fn code_excess(bits: u8, signed: bool) -> f32 {
    f32::from(sign_bit(bits, signed))
}

/// Holds the weights and activations of an 8-bit matmul.
pub(super) struct Weights<'a> {
    pub rows: RowBytes<'a>,
    pub w: &'a Matrix<'a>,
    pub x: TokenSelection<'a>,
}

/// Holds up to sixteen decoded rows as codes.
pub(super) struct DecodedInt8<'a> {
    pub codes: &'a [[[u8; 64]; ROWS]], // [tiles, blocks, 2, 4, 64]
    pub steps: [f32; ROWS_PER_PASS],
    pub lows: [f32; ROWS_PER_PASS],
    /// The rows that are decoded next.
    pub next: Prefetch,
}

/// Decodes block b of a row to codes; zeros follow the row's end.
#[inline(always)]
pub(super) fn decode_block<L: U8x64, C: Coded<L>>(coded: C, bytes: &[u8], b: usize) -> (L::Bytes, L::Bytes) {
    let bytes = &bytes[b * C::BYTES..];
    match bytes.get(..C::BYTES) {
        Some(bytes) => coded.codes(bytes),
        None => coded.rest(bytes),
    }
}
