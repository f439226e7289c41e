//! Decodes stored rows to f32 vectors, a block of 128 columns at a time.
//!
//! Each format is decoded in the order of columns that costs least, and activations are packed to match
//! ([`crate::Layout`]). Packed indices are not unpacked. With 4 bits, for example:
//!
//! ```text
//! 64 bytes = 16 words u32, one per lane      word l = | i7 | i6 | i5 | i4 | i3 | i2 | i1 | i0 |   columns 8 l + 7 .. 8 l
//! vector k = table[(word >> 4 k) & 15]       lane l = column 8 l + k
//! ```
//!
//! The lookup instruction ignores the upper bits, so an index costs one shift. Tables of fewer than 16 entries are
//! therefore repeated to 16.

use crate::activations::BLOCK;
use crate::lut_tables::{Exponents, HalfLut, MXFP4_BLOCK};
use crate::matrix::Divisor;
use crate::memory::array_at;
use crate::simd::{F32x16, LANES};
use crate::weight_format::MXFP4_TABLE;

/// f32 vectors of a block.
pub(crate) const VECTORS: usize = BLOCK / LANES;

/// Decodes the rows of one weight format.
pub(crate) trait Decode: Copy {
    /// Bytes of a block.
    const BYTES: usize;
    /// Most tokens, with 32 registers, of a batch whose rows are decoded into registers; and the tokens that a decoded block
    /// is multiplied by, 2 or 4; more decode it again. Rows of larger batches are decoded to memory first. On machine T:
    ///
    /// ```text
    /// (2, 2)   two tokens take .67 (HalfLut8), .85 (Lut6) and .88 (Lut8) of the time through memory, four 1.16, 1.62 and 1.71
    /// (4, 2)   two, three and four take .49, .71 and .86 (HalfLut6), .55, .65 and .73 (Single), .50, .71 and .90 (Int4)
    /// (8, 4)   two, three, four and eight take .30, .40, .47 and .61 (LutSmall of 2 bits)
    /// ```
    const REGISTER_TOKENS: (usize, usize);
    /// True if any bytes stand for finite numbers, where the scales are finite.
    const IS_FINITE: bool = false;
    /// Entries of the fp16 table, if this is what the format is decoded with.
    const HALF_TABLE: usize = 0;
    /// Bytes of a vector where a block has its vectors one after the other, else 0.
    const VECTOR_BYTES: usize = 0;
    /// A row's table or scales.
    type Row<L: F32x16>: Copy;
    /// Returns the table or scales of row `row` of the storage.
    fn row<L: F32x16>(&self, row: usize) -> Self::Row<L>;
    /// A block in its storage form.
    type Raw<'b, L: F32x16>: Copy;
    /// Loads block `b` of a row from its `BYTES` bytes.
    fn raw<'b, L: F32x16>(&self, row: Self::Row<L>, b: usize, bytes: &'b [u8]) -> Self::Raw<'b, L>;
    /// Decodes vector k of a block; unrolled loops make k a constant.
    fn vector<L: F32x16>(&self, row: Self::Row<L>, b: usize, raw: Self::Raw<'_, L>, k: usize) -> L;
}

/// LUT weights with indices of 1, 2, 3 or 4 bits.
#[derive(Clone, Copy)]
pub(crate) struct LutSmall<'a, const BITS: usize> {
    pub lut: &'a [f32],
    pub group: Divisor,
}

impl<const BITS: usize> Decode for LutSmall<'_, BITS> {
    const BYTES: usize = {
        assert!(BITS <= 4, "tables of more than sixteen entries need a lookup of their own");
        16 * BITS
    };
    const REGISTER_TOKENS: (usize, usize) = (8, 4);
    type Row<L: F32x16> = L;
    type Raw<'b, L: F32x16> = L::U32s;
    #[inline(always)]
    fn row<L: F32x16>(&self, row: usize) -> L {
        let entries = &self.lut[self.group.divide(row) << BITS..][..1 << BITS];
        let mut full = [0f32; LANES];
        for (i, f) in full.iter_mut().enumerate() {
            *f = entries[i & ((1 << BITS) - 1)];
        }
        L::load(&full)
    }
    #[inline(always)]
    fn raw<L: F32x16>(&self, _: L, _: usize, bytes: &[u8]) -> L::U32s {
        match BITS {
            1 => L::load_u8(array_at(bytes, 0)),
            2 => L::load_u16(array_at(bytes, 0)),
            3 => L::load_u24(bytes, 3),
            4 => L::load_u32(array_at(bytes, 0)),
            _ => unreachable!("at most four bits"),
        }
    }
    #[inline(always)]
    fn vector<L: F32x16>(&self, table: L, _: usize, at: L::U32s, k: usize) -> L {
        L::lookup(table, L::shift_right(at, (BITS * k) as u32))
    }
}

/// LUT weights with 6-bit indices.
#[derive(Clone, Copy)]
pub(crate) struct Lut6<'a> {
    pub lut: &'a [f32],
    pub group: Divisor,
}

impl<'a> Decode for Lut6<'a> {
    const BYTES: usize = 96;
    const REGISTER_TOKENS: (usize, usize) = (2, 2);
    type Row<L: F32x16> = &'a [f32; 64];
    type Raw<'b, L: F32x16> = [L::U32s; 2];
    #[inline(always)]
    fn row<L: F32x16>(&self, row: usize) -> Self::Row<L> {
        array_at(self.lut, self.group.divide(row) * 64)
    }
    #[inline(always)]
    fn raw<L: F32x16>(&self, _: Self::Row<L>, _: usize, bytes: &[u8]) -> [L::U32s; 2] {
        [L::load_u24(bytes, 6), L::load_u24(&bytes[3..], 6)]
    }
    #[inline(always)]
    fn vector<L: F32x16>(&self, table: Self::Row<L>, _: usize, halves: [L::U32s; 2], k: usize) -> L {
        L::lookup_64(table, L::shift_right(halves[k / 4], 6 * (k as u32 % 4)))
    }
}

/// LUT weights with 8-bit indices.
#[derive(Clone, Copy)]
pub(crate) struct Lut8<'a> {
    pub lut: &'a [f32],
    pub group: Divisor,
}

impl<'a> Decode for Lut8<'a> {
    const BYTES: usize = 128;
    const REGISTER_TOKENS: (usize, usize) = (2, 2);
    type Row<L: F32x16> = &'a [f32; 256];
    type Raw<'b, L: F32x16> = &'b [u8];
    #[inline(always)]
    fn row<L: F32x16>(&self, row: usize) -> Self::Row<L> {
        array_at(self.lut, self.group.divide(row) * 256)
    }
    #[inline(always)]
    fn raw<'b, L: F32x16>(&self, _: Self::Row<L>, _: usize, bytes: &'b [u8]) -> &'b [u8] {
        bytes
    }
    #[inline(always)]
    fn vector<L: F32x16>(&self, table: Self::Row<L>, _: usize, bytes: &[u8], k: usize) -> L {
        L::lookup_256(table, L::load_u8(array_at(bytes, 16 * k)))
    }
}

/// LUT weights with 6-bit indices into fp16 tables.
///
/// ```text
/// 96 bytes = 16 lanes of 48 bits = eight indices each      vector k, lane l = column 8 l + k
/// one lookup gives two vectors in fp16, which are converted one by one
/// ```
#[derive(Clone, Copy)]
pub(crate) struct HalfLut6<'a> {
    pub lut: &'a HalfLut,
    pub group: Divisor,
}

impl Decode for HalfLut6<'_> {
    const BYTES: usize = 96;
    const HALF_TABLE: usize = 64;
    const REGISTER_TOKENS: (usize, usize) = (4, 2);
    type Row<L: F32x16> = L::HalfTable;
    type Raw<'b, L: F32x16> = [L::F16x32; 4];
    #[inline(always)]
    fn row<L: F32x16>(&self, row: usize) -> L::HalfTable {
        L::load_half_table(self.lut.table(self.group.divide(row)))
    }
    #[inline(always)]
    fn raw<L: F32x16>(&self, table: L::HalfTable, _: usize, bytes: &[u8]) -> [L::F16x32; 4] {
        L::lookup_halves_6(table, array_at(bytes, 0))
    }
    #[inline(always)]
    fn vector<L: F32x16>(&self, _: L::HalfTable, _: usize, pairs: [L::F16x32; 4], k: usize) -> L {
        // Pair of vectors and place in it of each index, see `HALF_PAIRS`.
        const PLACES: [(usize, bool); VECTORS] =
            [(0, false), (0, true), (1, false), (2, false), (2, true), (1, true), (3, false), (3, true)];
        let (pair, second) = PLACES[k];
        L::half_vector(pairs[pair], second)
    }
}

/// LUT weights with 8-bit indices into fp16 tables.
#[derive(Clone, Copy)]
pub(crate) struct HalfLut8<'a> {
    pub lut: &'a HalfLut,
    pub group: Divisor,
}

impl<'a> Decode for HalfLut8<'a> {
    const BYTES: usize = 128;
    const HALF_TABLE: usize = 256;
    const REGISTER_TOKENS: (usize, usize) = (2, 2);
    type Row<L: F32x16> = &'a [u16; 256];
    type Raw<'b, L: F32x16> = [L::F16x32; 4];
    #[inline(always)]
    fn row<L: F32x16>(&self, row: usize) -> Self::Row<L> {
        self.lut.table(self.group.divide(row))
    }
    #[inline(always)]
    fn raw<L: F32x16>(&self, table: Self::Row<L>, _: usize, bytes: &[u8]) -> [L::F16x32; 4] {
        [
            L::lookup_halves_8(table, array_at(bytes, 0)),
            L::lookup_halves_8(table, array_at(bytes, 32)),
            L::lookup_halves_8(table, array_at(bytes, 64)),
            L::lookup_halves_8(table, array_at(bytes, 96)),
        ]
    }
    #[inline(always)]
    fn vector<L: F32x16>(&self, _: Self::Row<L>, _: usize, pairs: [L::F16x32; 4], k: usize) -> L {
        L::half_vector(pairs[k / 2], !k.is_multiple_of(2))
    }
}

/// Defines a decoder of dense weights with elements of `$size` bytes.
macro_rules! dense {
    ($(#[$doc:meta])* $name:ident: $size:literal, $tokens:expr, $load:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        impl Decode for $name {
            const BYTES: usize = $size * BLOCK;
            const REGISTER_TOKENS: (usize, usize) = $tokens;
            const VECTOR_BYTES: usize = $size * LANES;
            type Row<L: F32x16> = ();
            type Raw<'b, L: F32x16> = &'b [u8];
            #[inline(always)]
            fn row<L: F32x16>(&self, _: usize) {}
            #[inline(always)]
            fn raw<'b, L: F32x16>(&self, (): (), _: usize, bytes: &'b [u8]) -> &'b [u8] {
                bytes
            }
            #[inline(always)]
            fn vector<L: F32x16>(&self, (): (), _: usize, bytes: &[u8], k: usize) -> L {
                L::$load(array_at(bytes, $size * LANES * k))
            }
        }
    };
}
dense! {
    /// Dense fp16 weights.
    Half: 2, (8, 4), from_f16
}
dense! {
    /// Dense f32 weights.
    Single: 4, (4, 2), from_f32
}

/// Finds the scales and offsets of blocks of rows and columns.
#[derive(Clone, Copy)]
pub(crate) struct Scales<'a> {
    pub scale: &'a [f32],
    pub offset: Option<&'a [f32]>,
    block_rows: Divisor,
    /// Columns per block.
    block: Divisor,
    /// Blocks per row.
    blocks: usize,
}

impl<'a> Scales<'a> {
    /// Makes the scales of blocks of `block.0` rows and `block.1` columns; rows have `cols` columns.
    pub fn new(scale: &'a [f32], offset: Option<&'a [f32]>, block: (usize, usize), cols: usize) -> Self {
        let (block_rows, columns) = (Divisor::new(block.0), Divisor::new(block.1));
        Scales { scale, offset, block_rows, block: columns, blocks: cols / block.1 }
    }

    /// Returns the index of a row's first block.
    #[inline(always)]
    pub fn first(&self, row: usize) -> usize {
        self.block_rows.divide(row) * self.blocks
    }

    /// Returns the scale and offset of a row that is one block.
    #[inline(always)]
    fn of_row(&self, row: usize) -> (f32, f32) {
        let at = self.first(row);
        (self.scale[at], self.offset.map_or(0.0, |o| o[at]))
    }

    /// Loads one value of `of` per lane of block `b` of a row; lane l holds columns `8 l` to `8 l + 7` of it, which belong to one
    /// block of scales, see `Matrix::is_read_in_place`.
    #[inline(always)]
    fn lanes<L: F32x16>(&self, of: &[f32], first: usize, b: usize) -> L {
        let last = first + self.blocks - 1;
        let at = self.of_block(first, b);
        let block = self.block.by;
        if block.is_multiple_of(BLOCK) {
            return L::splat(of[at.min(last)]);
        }
        // Blocks of a few lanes each, all within the row.
        let lanes = block / VECTORS;
        if matches!(lanes, 1 | 2 | 4 | 8)
            && let Some(of) = of.get(at..at + LANES / lanes)
            && at + LANES / lanes <= last + 1
        {
            return L::repeat_lanes(of, lanes.trailing_zeros());
        }
        let mut v = [0f32; LANES];
        // Rare blocks: not unrolled, so that there is less code.
        for l in 0..std::hint::black_box(LANES) {
            v[l] = of[(first + self.block.divide(b * BLOCK + VECTORS * l)).min(last)];
        }
        L::load(&v)
    }

    /// Returns the scale of column 0 of block `b` of a row, as an index.
    #[inline(always)]
    fn of_block(&self, first: usize, b: usize) -> usize {
        first + self.block.divide(b * BLOCK)
    }
}

/// 8-bit integers with scales per block, of which a vector of sixteen columns has one, see `Matrix::is_read_in_place`.
#[derive(Clone, Copy)]
pub(crate) struct Int8Blocks<'a> {
    pub scales: Scales<'a>,
    /// s for blocks of 2^s columns, 7 for multiples of 128: scale (16 k) >> s, counted from that of column 0 of a [`BLOCK`],
    /// belongs to vector k of it.
    pub shift: u32,
    pub signed: bool,
}

impl Decode for Int8Blocks<'_> {
    const IS_FINITE: bool = true;
    const BYTES: usize = 128;
    const REGISTER_TOKENS: (usize, usize) = (8, 4);
    type Row<L: F32x16> = usize;
    /// Bytes, and the index of the scale of the first.
    type Raw<'b, L: F32x16> = (&'b [u8], usize);
    #[inline(always)]
    fn row<L: F32x16>(&self, row: usize) -> usize {
        self.scales.first(row)
    }
    #[inline(always)]
    fn raw<'b, L: F32x16>(&self, first: usize, b: usize, bytes: &'b [u8]) -> (&'b [u8], usize) {
        (bytes, self.scales.of_block(first, b))
    }
    #[inline(always)]
    fn vector<L: F32x16>(&self, first: usize, _: usize, (bytes, at): (&[u8], usize), k: usize) -> L {
        let bytes = array_at(bytes, 16 * k);
        let q = if self.signed { L::from_i8(bytes) } else { L::from_u8(bytes) };
        // Columns behind the last have no scale.
        let at = (at + ((LANES * k) >> self.shift)).min(first + self.scales.blocks - 1);
        let q = match self.scales.offset {
            None => q,
            Some(offset) => L::splat(offset[at]).neg_mul_add(L::splat(1.0), q),
        };
        q.mul(L::splat(self.scales.scale[at]))
    }
}

/// 8-bit integers with one scale per row.
#[derive(Clone, Copy)]
pub(crate) struct WholeInt8Rows<'a> {
    pub scales: Scales<'a>,
    pub signed: bool,
}

impl Decode for WholeInt8Rows<'_> {
    const IS_FINITE: bool = true;
    const BYTES: usize = 128;
    const REGISTER_TOKENS: (usize, usize) = (8, 4);
    /// Scale and offset.
    type Row<L: F32x16> = (L, L);
    type Raw<'b, L: F32x16> = &'b [u8];
    #[inline(always)]
    fn row<L: F32x16>(&self, row: usize) -> (L, L) {
        let (scale, zero) = self.scales.of_row(row);
        (L::splat(scale), L::splat(zero))
    }
    #[inline(always)]
    fn raw<'b, L: F32x16>(&self, _: (L, L), _: usize, bytes: &'b [u8]) -> &'b [u8] {
        bytes
    }
    #[inline(always)]
    fn vector<L: F32x16>(&self, (scale, zero): (L, L), _: usize, bytes: &[u8], k: usize) -> L {
        let bytes = array_at(bytes, 16 * k);
        let q = if self.signed { L::from_i8(bytes) } else { L::from_u8(bytes) };
        zero.neg_mul_add(L::splat(1.0), q).mul(scale)
    }
}

/// 4-bit integers with one scale per row: the sixteen values are a table.
#[derive(Clone, Copy)]
pub(crate) struct Int4Rows<'a> {
    pub scales: Scales<'a>,
    pub signed: bool,
}

impl Decode for Int4Rows<'_> {
    const IS_FINITE: bool = true;
    const BYTES: usize = 64;
    const REGISTER_TOKENS: (usize, usize) = (8, 4);
    type Row<L: F32x16> = L;
    type Raw<'b, L: F32x16> = L::U32s;
    #[inline(always)]
    fn row<L: F32x16>(&self, row: usize) -> L {
        let (scale, zero) = self.scales.of_row(row);
        L::splat(zero).neg_mul_add(L::splat(1.0), integers(self.signed)).mul(L::splat(scale))
    }
    #[inline(always)]
    fn raw<L: F32x16>(&self, _: L, _: usize, bytes: &[u8]) -> L::U32s {
        L::load_u32(array_at(bytes, 0))
    }
    #[inline(always)]
    fn vector<L: F32x16>(&self, table: L, _: usize, at: L::U32s, k: usize) -> L {
        L::lookup(table, L::shift_right(at, 4 * k as u32))
    }
}

/// Returns the values of the sixteen 4-bit integers.
#[inline(always)]
fn integers<L: F32x16>(signed: bool) -> L {
    let mut values = [0f32; LANES];
    for i in 0..LANES {
        values[i] = if signed && i >= 8 { i as f32 - 16.0 } else { i as f32 };
    }
    L::load(&values)
}

/// 4-bit integers with scales per block.
#[derive(Clone, Copy)]
pub(crate) struct Int4<'a> {
    pub scales: Scales<'a>,
    pub signed: bool,
}

impl Decode for Int4<'_> {
    const IS_FINITE: bool = true;
    const BYTES: usize = 64;
    const REGISTER_TOKENS: (usize, usize) = (4, 2);
    type Row<L: F32x16> = usize;
    type Raw<'b, L: F32x16> = (L::U32s, L, L);
    #[inline(always)]
    fn row<L: F32x16>(&self, row: usize) -> usize {
        self.scales.first(row)
    }
    #[inline(always)]
    fn raw<L: F32x16>(&self, first: usize, b: usize, bytes: &[u8]) -> (L::U32s, L, L) {
        let scale = self.scales.lanes::<L>(self.scales.scale, first, b);
        let zero = match self.scales.offset {
            Some(offset) => self.scales.lanes::<L>(offset, first, b),
            None => L::splat(0.0),
        };
        (L::load_u32(array_at(bytes, 0)), scale, zero)
    }
    #[inline(always)]
    fn vector<L: F32x16>(&self, _: usize, _: usize, (at, scale, zero): (L::U32s, L, L), k: usize) -> L {
        let q = L::lookup(integers(self.signed), L::shift_right(at, 4 * k as u32));
        zero.neg_mul_add(L::splat(1.0), q).mul(scale)
    }
}

/// MXFP4 weights with a power of two for each 32 columns.
#[derive(Clone, Copy)]
pub(crate) struct Mxfp4<'a> {
    pub exponents: &'a Exponents,
    /// Scales of a row.
    pub blocks: usize,
}

impl Decode for Mxfp4<'_> {
    const BYTES: usize = 64;
    const REGISTER_TOKENS: (usize, usize) = (4, 2);
    /// Index of the first scale.
    type Row<L: F32x16> = usize;
    type Raw<'b, L: F32x16> = (L::U32s, L);
    #[inline(always)]
    fn row<L: F32x16>(&self, row: usize) -> usize {
        row * self.blocks
    }
    #[inline(always)]
    fn raw<L: F32x16>(&self, first: usize, b: usize, bytes: &[u8]) -> (L::U32s, L) {
        // Eight columns share a lane, so four lanes share a scale.
        let four = self.exponents.four(first + BLOCK / MXFP4_BLOCK * b);
        (L::load_u32(array_at(bytes, 0)), L::powers_of_two(four))
    }
    #[inline(always)]
    fn vector<L: F32x16>(&self, _: usize, _: usize, (at, scale): (L::U32s, L), k: usize) -> L {
        L::lookup(L::load(&MXFP4_TABLE), L::shift_right(at, 4 * k as u32)).mul(scale)
    }
}
