//! Stored rows as vectors, 128 columns at a time.
//!
//! A kind is decoded in the order that costs least, and the panel of x is laid out to match ([`Order`]). Packed indices are
//! never unpacked: sixteen words of eight indices each are looked up as they are, shifted by one index at a time, since a
//! lookup sees the lowest bits alone. Tables with fewer than 16 entries are repeated to 16 for that.

use crate::lanes::{LANES, Lanes};
use crate::matrix::{Divisor, Matrix, Storage};

/// Columns that are decoded together.
pub(crate) const BLOCK: usize = 128;
/// Vectors of a block.
pub(crate) const VECTORS: usize = BLOCK / LANES;
/// Most bytes of a block.
pub(crate) const MOST_BYTES: usize = 4 * BLOCK;

/// Which column is lane l of vector k of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Order {
    /// `16 k + l`
    #[default]
    Natural,
    /// `8 l + k`
    Packed,
    /// As [`Order::Packed`], and as integers of 24 bits.
    Whole,
    /// As [`Order::Packed`], then as integers of 8 bits.
    FastPacked,
    /// `64 (k / 4) + 4 l + k % 4`, then as integers of 8 bits.
    Fast,
    /// As [`Order::Natural`], then as bf16.
    Rounded,
}

impl Order {
    /// The column of a block at place `i` of its vectors.
    #[inline(always)]
    pub(crate) fn column(self, i: usize) -> usize {
        match self {
            Order::Natural | Order::Rounded => i,
            Order::Packed | Order::Whole | Order::FastPacked => i % LANES * VECTORS + i / LANES,
            Order::Fast => i / 64 * 64 + i % LANES * 4 + i / LANES % 4,
        }
    }
}

/// A kind of stored row.
pub(crate) trait Decode<L: Lanes>: Copy {
    /// Bytes of a block.
    const BYTES: usize;
    /// Worth code of its own for several tokens; others are decoded first.
    const OFTEN: bool = false;
    /// What a row needs besides its bytes.
    type Row: Copy;
    /// Of row `row` of the storage.
    fn row(&self, row: usize) -> Self::Row;
    /// A block as it is stored.
    type Raw<'b>: Copy;
    /// Block `b` of a row from its `BYTES` bytes.
    fn raw<'b>(&self, row: Self::Row, b: usize, bytes: &'b [u8]) -> Self::Raw<'b>;
    /// As [`Decode::raw`] from fewer bytes, those that a row ends with, and zeros; put together in `whole` where need be.
    #[inline(always)]
    fn rest<'b>(
        &self,
        row: Self::Row,
        b: usize,
        bytes: &'b [u8],
        whole: &'b mut [u8; MOST_BYTES],
    ) -> Self::Raw<'b> {
        whole[..bytes.len()].copy_from_slice(bytes);
        whole[bytes.len()..Self::BYTES].fill(0);
        self.raw(row, b, &whole[..Self::BYTES])
    }
    /// Vector k of a block; k is a constant once loops are unrolled.
    fn vector(&self, row: Self::Row, b: usize, raw: Self::Raw<'_>, k: usize) -> L;
}

#[inline(always)]
fn part<const N: usize>(bytes: &[u8], at: usize) -> &[u8; N] {
    match bytes[at..at + N].try_into() {
        Ok(part) => part,
        Err(_) => unreachable!("a slice of N bytes"),
    }
}

/// 4-bit indices.
#[derive(Clone, Copy)]
pub(crate) struct Lut4<'a> {
    pub lut: &'a [f32],
    pub group: Divisor,
}

/// The table of a row, repeated to sixteen entries.
#[inline(always)]
fn table<L: Lanes>(lut: &[f32], group: usize, bits: usize) -> L {
    let entries = &lut[group << bits..][..1 << bits];
    let mut full = [0f32; LANES];
    for (i, f) in full.iter_mut().enumerate() {
        *f = entries[i & ((1 << bits) - 1)];
    }
    L::load(&full)
}

/// What gives each row a table of sixteen entries.
pub(crate) trait Sixteen<L: Lanes>: Copy {
    /// Worth code of its own for several tokens.
    const OFTEN: bool;
    fn table(&self, row: usize) -> L;
}

impl<L: Lanes> Sixteen<L> for Lut4<'_> {
    const OFTEN: bool = true;
    #[inline(always)]
    fn table(&self, row: usize) -> L {
        match self.lut[self.group.divide(row) * 16..][..16].try_into() {
            Ok(table) => L::load(table),
            Err(_) => unreachable!("a slice of 16"),
        }
    }
}

/// Elements of 4 bits, looked up in their row's table.
#[derive(Clone, Copy)]
pub(crate) struct Nibbles<T>(pub T);

impl<L: Lanes, T: Sixteen<L>> Decode<L> for Nibbles<T> {
    const BYTES: usize = 64;
    const OFTEN: bool = T::OFTEN;
    type Row = L;
    type Raw<'b> = L::Ints;
    #[inline(always)]
    fn row(&self, row: usize) -> L {
        self.0.table(row)
    }
    #[inline(always)]
    fn raw(&self, _: L, _: usize, bytes: &[u8]) -> L::Ints {
        L::ints(part(bytes, 0))
    }
    #[inline(always)]
    fn rest(&self, _: L, _: usize, bytes: &[u8], _: &mut [u8; MOST_BYTES]) -> L::Ints {
        L::ints_of(bytes)
    }
    #[inline(always)]
    fn vector(&self, table: L, _: usize, at: L::Ints, k: usize) -> L {
        L::lookup(table, L::shift_right(at, 4 * k as u32))
    }
}

/// Indices of 1, 2 or 3 bits.
#[derive(Clone, Copy)]
pub(crate) struct LutSmall<'a, const BITS: usize> {
    pub lut: &'a [f32],
    pub group: Divisor,
}

impl<L: Lanes, const BITS: usize> Decode<L> for LutSmall<'_, BITS> {
    const BYTES: usize = 16 * BITS;
    type Row = L;
    type Raw<'b> = L::Ints;
    #[inline(always)]
    fn row(&self, row: usize) -> L {
        table(self.lut, self.group.divide(row), BITS)
    }
    #[inline(always)]
    fn raw(&self, _: L, _: usize, bytes: &[u8]) -> L::Ints {
        match BITS {
            1 => L::ints_u8(part(bytes, 0)),
            2 => L::ints_u16(part(bytes, 0)),
            _ => L::ints_u24(bytes, 3),
        }
    }
    #[inline(always)]
    fn vector(&self, table: L, _: usize, at: L::Ints, k: usize) -> L {
        L::lookup(table, L::shift_right(at, (BITS * k) as u32))
    }
}

/// 6-bit indices.
#[derive(Clone, Copy)]
pub(crate) struct Lut6<'a> {
    pub lut: &'a [f32],
    pub group: Divisor,
}

impl<'a, L: Lanes> Decode<L> for Lut6<'a> {
    const BYTES: usize = 96;
    type Row = &'a [f32; 64];
    type Raw<'b> = [L::Ints; 2];
    #[inline(always)]
    fn row(&self, row: usize) -> Self::Row {
        match self.lut[self.group.divide(row) * 64..][..64].try_into() {
            Ok(table) => table,
            Err(_) => unreachable!("a slice of 64"),
        }
    }
    #[inline(always)]
    fn raw(&self, _: Self::Row, _: usize, bytes: &[u8]) -> [L::Ints; 2] {
        [L::ints_u24(bytes, 6), L::ints_u24(&bytes[3..], 6)]
    }
    #[inline(always)]
    fn vector(&self, table: Self::Row, _: usize, halves: [L::Ints; 2], k: usize) -> L {
        L::lookup_64(table, L::shift_right(halves[k / 4], 6 * (k as u32 % 4)))
    }
}

/// 8-bit indices.
#[derive(Clone, Copy)]
pub(crate) struct Lut8<'a> {
    pub lut: &'a [f32],
    pub group: Divisor,
}

impl<'a, L: Lanes> Decode<L> for Lut8<'a> {
    const BYTES: usize = 128;
    type Row = &'a [f32; 256];
    type Raw<'b> = &'b [u8];
    #[inline(always)]
    fn row(&self, row: usize) -> Self::Row {
        match self.lut[self.group.divide(row) * 256..][..256].try_into() {
            Ok(table) => table,
            Err(_) => unreachable!("a slice of 256"),
        }
    }
    #[inline(always)]
    fn raw<'b>(&self, _: Self::Row, _: usize, bytes: &'b [u8]) -> &'b [u8] {
        bytes
    }
    #[inline(always)]
    fn vector(&self, table: Self::Row, _: usize, bytes: &[u8], k: usize) -> L {
        L::lookup_256(table, L::ints_u8(part(bytes, 16 * k)))
    }
}

/// fp16.
#[derive(Clone, Copy)]
pub(crate) struct Half;

impl<L: Lanes> Decode<L> for Half {
    const BYTES: usize = 256;
    const OFTEN: bool = true;
    type Row = ();
    type Raw<'b> = &'b [u8];
    #[inline(always)]
    fn row(&self, _: usize) {}
    #[inline(always)]
    fn raw<'b>(&self, (): (), _: usize, bytes: &'b [u8]) -> &'b [u8] {
        bytes
    }
    #[inline(always)]
    fn vector(&self, (): (), _: usize, bytes: &[u8], k: usize) -> L {
        L::from_f16(part(bytes, 32 * k))
    }
}

/// f32.
#[derive(Clone, Copy)]
pub(crate) struct Single;

impl<L: Lanes> Decode<L> for Single {
    const BYTES: usize = 512;
    type Row = ();
    type Raw<'b> = &'b [u8];
    #[inline(always)]
    fn row(&self, _: usize) {}
    #[inline(always)]
    fn raw<'b>(&self, (): (), _: usize, bytes: &'b [u8]) -> &'b [u8] {
        bytes
    }
    #[inline(always)]
    fn vector(&self, (): (), _: usize, bytes: &[u8], k: usize) -> L {
        L::from_f32(part(bytes, 64 * k))
    }
}

/// Scales and offsets of blocks.
#[derive(Clone, Copy)]
pub(crate) struct Scales<'a> {
    pub scale: &'a [f32],
    pub offset: Option<&'a [f32]>,
    block_rows: Divisor,
    /// Columns of a block.
    block: Divisor,
    /// Blocks of a row.
    blocks: usize,
}

impl<'a> Scales<'a> {
    /// Of blocks of `block.0` rows and `block.1` columns of rows of `cols` columns.
    pub fn new(scale: &'a [f32], offset: Option<&'a [f32]>, block: (usize, usize), cols: usize) -> Self {
        let (block_rows, columns) = (Divisor::new(block.0), Divisor::new(block.1));
        Scales { scale, offset, block_rows, block: columns, blocks: cols / block.1 }
    }

    /// The first block of a row.
    #[inline(always)]
    pub fn first(&self, row: usize) -> usize {
        self.block_rows.divide(row) * self.blocks
    }

    /// One value for all lanes where the block's columns from `column` on have one, else each lane's.
    #[inline(always)]
    pub(crate) fn lanes<L: Lanes>(&self, of: &[f32], first: usize, column: usize, step: usize) -> L {
        let last = first + self.blocks - 1;
        let at = first + self.block.divide(column);
        let block = self.block.by();
        if block.is_multiple_of(BLOCK) || (step == 1 && block.is_multiple_of(LANES)) {
            return L::splat(of[at.min(last)]);
        }
        // Blocks of a few lanes each, all of them inside the row.
        let lanes = block / step;
        if block.is_multiple_of(step)
            && matches!(lanes, 1 | 2 | 4 | 8)
            && let Some(of) = of.get(at..at + LANES / lanes)
            && at + LANES / lanes <= last + 1
        {
            return L::repeated(of, lanes.trailing_zeros());
        }
        let mut v = [0f32; LANES];
        for l in 0..LANES {
            v[l] = of[(first + self.block.divide(column + step * l)).min(last)];
        }
        L::load(&v)
    }

    #[inline(always)]
    fn apply<L: Lanes>(&self, q: L, first: usize, column: usize, step: usize) -> L {
        let q = match self.offset {
            None => q,
            Some(offset) => {
                let zero = self.lanes::<L>(offset, first, column, step);
                zero.neg_mul_add(L::splat(1.0), q)
            }
        };
        q.mul(self.lanes::<L>(self.scale, first, column, step))
    }
}

/// 8-bit integers.
#[derive(Clone, Copy)]
pub(crate) struct Int8<'a> {
    pub scales: Scales<'a>,
    pub signed: bool,
}

impl<L: Lanes> Decode<L> for Int8<'_> {
    const BYTES: usize = 128;
    const OFTEN: bool = true;
    type Row = usize;
    type Raw<'b> = &'b [u8];
    #[inline(always)]
    fn row(&self, row: usize) -> usize {
        self.scales.first(row)
    }
    #[inline(always)]
    fn raw<'b>(&self, _: usize, _: usize, bytes: &'b [u8]) -> &'b [u8] {
        bytes
    }
    #[inline(always)]
    fn vector(&self, first: usize, b: usize, bytes: &[u8], k: usize) -> L {
        let bytes = part(bytes, 16 * k);
        let q = if self.signed { L::from_i8(bytes) } else { L::from_u8(bytes) };
        self.scales.apply(q, first, b * BLOCK + LANES * k, 1)
    }
}

/// One scale, and maybe an offset, for whole rows.
#[derive(Clone, Copy)]
pub(crate) struct RowScales<'a> {
    pub scale: &'a [f32],
    pub offset: Option<&'a [f32]>,
    /// Rows that share them.
    pub block_rows: Divisor,
}

impl RowScales<'_> {
    /// Scale and offset of a row.
    #[inline(always)]
    pub fn of(&self, row: usize) -> (f32, f32) {
        let at = self.block_rows.divide(row);
        (self.scale[at], self.offset.map_or(0.0, |o| o[at]))
    }
}

/// 8-bit integers with a scale for the row.
#[derive(Clone, Copy)]
pub(crate) struct Int8Rows<'a> {
    pub scales: RowScales<'a>,
    pub signed: bool,
}

impl<L: Lanes> Decode<L> for Int8Rows<'_> {
    const BYTES: usize = 128;
    const OFTEN: bool = true;
    /// Scale and offset.
    type Row = (L, L);
    type Raw<'b> = &'b [u8];
    #[inline(always)]
    fn row(&self, row: usize) -> (L, L) {
        let (scale, zero) = self.scales.of(row);
        (L::splat(scale), L::splat(zero))
    }
    #[inline(always)]
    fn raw<'b>(&self, _: (L, L), _: usize, bytes: &'b [u8]) -> &'b [u8] {
        bytes
    }
    #[inline(always)]
    fn vector(&self, (scale, zero): (L, L), _: usize, bytes: &[u8], k: usize) -> L {
        let bytes = part(bytes, 16 * k);
        let q = if self.signed { L::from_i8(bytes) } else { L::from_u8(bytes) };
        zero.neg_mul_add(L::splat(1.0), q).mul(scale)
    }
}

/// 4-bit integers with a scale for the row: its sixteen values are a table.
#[derive(Clone, Copy)]
pub(crate) struct Int4Rows<'a> {
    pub scales: RowScales<'a>,
    pub signed: bool,
}

impl<L: Lanes> Sixteen<L> for Int4Rows<'_> {
    const OFTEN: bool = false;
    #[inline(always)]
    fn table(&self, row: usize) -> L {
        let (scale, zero) = self.scales.of(row);
        L::splat(zero).neg_mul_add(L::splat(1.0), integers(self.signed)).mul(L::splat(scale))
    }
}

/// What 4 bits stand for.
#[inline(always)]
fn integers<L: Lanes>(signed: bool) -> L {
    let mut values = [0f32; LANES];
    for i in 0..LANES {
        values[i] = if signed && i >= 8 { i as f32 - 16.0 } else { i as f32 };
    }
    L::load(&values)
}

/// 4-bit integers.
#[derive(Clone, Copy)]
pub(crate) struct Int4<'a> {
    pub scales: Scales<'a>,
    pub signed: bool,
}

impl<L: Lanes> Decode<L> for Int4<'_> {
    const BYTES: usize = 64;
    type Row = usize;
    type Raw<'b> = (L::Ints, L, L);
    #[inline(always)]
    fn row(&self, row: usize) -> usize {
        self.scales.first(row)
    }
    #[inline(always)]
    fn raw(&self, first: usize, b: usize, bytes: &[u8]) -> (L::Ints, L, L) {
        // Eight columns of a lane are of one block, see `is_direct`.
        let scale = self.scales.lanes::<L>(self.scales.scale, first, b * BLOCK, VECTORS);
        let zero = match self.scales.offset {
            Some(offset) => self.scales.lanes::<L>(offset, first, b * BLOCK, VECTORS),
            None => L::splat(0.0),
        };
        (L::ints(part(bytes, 0)), scale, zero)
    }
    #[inline(always)]
    fn vector(&self, _: usize, _: usize, (at, scale, zero): (L::Ints, L, L), k: usize) -> L {
        let q = L::lookup(integers(self.signed), L::shift_right(at, 4 * k as u32));
        zero.neg_mul_add(L::splat(1.0), q).mul(scale)
    }
}

impl Matrix<'_> {
    /// Rows start at bytes, and blocks of scales do not end inside a lane: a kernel reads it as it is stored.
    pub(crate) fn is_direct(&self) -> bool {
        let whole = |bits: usize| (self.cols * bits).is_multiple_of(8);
        match self.data {
            Storage::F32(_) | Storage::F16(_) => true,
            Storage::Lut { bits, .. } => whole(bits),
            Storage::Int { bits: 4, block, .. } => {
                whole(4) && (block.1.is_multiple_of(VECTORS) || block.1 == self.cols)
            }
            Storage::Int { .. } => true,
        }
    }

    /// The order in which x is laid out for a product with this matrix.
    pub fn order(&self) -> Order {
        match self.data {
            Storage::Lut { bits: 4, .. } | Storage::Int { bits: 4, .. } if self.fast => Order::FastPacked,
            Storage::Lut { .. } | Storage::Int { .. } if self.fast => Order::Fast,
            Storage::F16(_) | Storage::F32(_) if self.fast => Order::Rounded,
            _ if self.words.is_some() => Order::Whole,
            Storage::Lut { bits, .. } if bits < 8 && self.is_direct() => Order::Packed,
            Storage::Int { bits: 4, .. } if self.is_direct() => Order::Packed,
            _ => Order::Natural,
        }
    }
}
