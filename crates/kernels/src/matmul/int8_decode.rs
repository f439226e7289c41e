//! Decodes stored elements to codes, a block of 128 columns as two lines of 64 bytes, or, for codes of 15 bits, two lines of
//! upper bytes and two of lower bytes.
//!
//! ```text
//! 4 bits: 64 bytes    byte m = | i1 | i0 |   line 0 = codes of columns 2 m (low nibbles), line 1 = of 2 m + 1 (high nibbles)
//! others: 16 bits bytes                      line 0 = codes of columns 0 .. 63,           line 1 = of 64 .. 127
//! ```

use crate::activations::BLOCK;
use crate::lut_tables::Int8Codes;
use crate::simd::U8x64;

/// Decodes the rows of one weight format to codes of PARTS bytes.
pub(super) trait Int8Decode<const PARTS: usize = 1>: Copy {
    /// Bits of an element.
    const BITS: usize;
    /// Bytes of a block.
    const BYTES: usize = BLOCK / 8 * Self::BITS;
    /// True if small batches decode into registers, as all decoders do where bytes are permuted; otherwise rows are decoded into
    /// memory for two tokens or more.
    const IN_REGISTERS: bool = false;
    /// See [`Kernel::PERMUTES_BYTES`](crate::simd::Kernel::PERMUTES_BYTES).
    const PERMUTES_BYTES: bool = false;
    /// A row's table.
    type Table<'c, L: U8x64>: Copy;
    /// Returns the table of a group of rows.
    fn table<L: U8x64>(codes: &Int8Codes, group: usize) -> Self::Table<'_, L>;
    /// Decodes a block to its two lines of each part, upper bytes first.
    fn codes<L: U8x64>(self, table: Self::Table<'_, L>, block: &[u8]) -> [[L::Bytes; 2]; PARTS];
}

/// Returns a block of 64 bytes.
#[inline(always)]
fn line(block: &[u8]) -> &[u8; 64] {
    block.try_into().expect("64 bytes")
}

/// Returns the two halves of a block of N bytes each.
#[inline(always)]
fn halves<const N: usize>(block: &[u8]) -> [&[u8; N]; 2] {
    match block.as_chunks() {
        ([first, second], []) => [first, second],
        _ => unreachable!("two halves"),
    }
}

/// Indices of 4 bits.
#[derive(Clone, Copy)]
pub(super) struct Index4;

impl Int8Decode for Index4 {
    const BITS: usize = 4;
    const IN_REGISTERS: bool = true;
    type Table<'c, L: U8x64> = L::Bytes;
    #[inline(always)]
    fn table<L: U8x64>(codes: &Int8Codes, group: usize) -> L::Bytes {
        L::load_byte_table(codes.table(group))
    }
    #[inline(always)]
    fn codes<L: U8x64>(self, table: L::Bytes, block: &[u8]) -> [[L::Bytes; 2]; 1] {
        let (even, odd) = L::split_nibbles(L::load_bytes(line(block)));
        [[L::lookup_bytes_16(table, even), L::lookup_bytes_16(table, odd)]]
    }
}

/// Indices of 1, 2 or 3 bits.
#[derive(Clone, Copy)]
pub(super) struct SmallIndex<const BITS: usize>;

impl<const BITS: usize> Int8Decode for SmallIndex<BITS> {
    const BITS: usize = {
        assert!(BITS <= 4, "tables of more than sixteen entries need a lookup of their own");
        BITS
    };
    const PERMUTES_BYTES: bool = BITS > 1;
    type Table<'c, L: U8x64> = L::Bytes;
    #[inline(always)]
    fn table<L: U8x64>(codes: &Int8Codes, group: usize) -> L::Bytes {
        L::load_byte_table(codes.table(group))
    }
    #[inline(always)]
    fn codes<L: U8x64>(self, table: L::Bytes, block: &[u8]) -> [[L::Bytes; 2]; 1] {
        let [a, b] = L::unpack::<BITS>(block);
        [[L::lookup_bytes_16(table, a), L::lookup_bytes_16(table, b)]]
    }
}

/// Indices of 6 bits.
#[derive(Clone, Copy)]
pub(super) struct Index6;

impl Int8Decode for Index6 {
    const BITS: usize = 6;
    const PERMUTES_BYTES: bool = true;
    type Table<'c, L: U8x64> = &'c [u8; 64];
    #[inline(always)]
    fn table<L: U8x64>(codes: &Int8Codes, group: usize) -> &[u8; 64] {
        codes.table(group)
    }
    #[inline(always)]
    fn codes<L: U8x64>(self, table: &[u8; 64], block: &[u8]) -> [[L::Bytes; 2]; 1] {
        let [a, b] = L::unpack::<6>(block);
        [[L::lookup_bytes_64(table, a), L::lookup_bytes_64(table, b)]]
    }
}

impl Int8Decode<2> for Index6 {
    const BITS: usize = 6;
    const PERMUTES_BYTES: bool = true;
    type Table<'c, L: U8x64> = [&'c [u8; 64]; 2];
    #[inline(always)]
    fn table<L: U8x64>(codes: &Int8Codes, group: usize) -> [&[u8; 64]; 2] {
        [codes.table(group), codes.lower(group)]
    }
    #[inline(always)]
    fn codes<L: U8x64>(self, [upper, lower]: [&[u8; 64]; 2], block: &[u8]) -> [[L::Bytes; 2]; 2] {
        let [a, b] = L::unpack::<6>(block);
        [
            [L::lookup_bytes_64(upper, a), L::lookup_bytes_64(upper, b)],
            [L::lookup_bytes_64(lower, a), L::lookup_bytes_64(lower, b)],
        ]
    }
}

/// Indices of 8 bits.
#[derive(Clone, Copy)]
pub(super) struct Index8;

impl Int8Decode for Index8 {
    const BITS: usize = 8;
    const PERMUTES_BYTES: bool = true;
    type Table<'c, L: U8x64> = &'c [u8; 256];
    #[inline(always)]
    fn table<L: U8x64>(codes: &Int8Codes, group: usize) -> &[u8; 256] {
        codes.table(group)
    }
    #[inline(always)]
    fn codes<L: U8x64>(self, table: &[u8; 256], block: &[u8]) -> [[L::Bytes; 2]; 1] {
        let [a, b] = halves(block);
        [[L::lookup_bytes_256(table, L::load_bytes(a)), L::lookup_bytes_256(table, L::load_bytes(b))]]
    }
}

/// Integers of 8 bits, whose sign bit is flipped.
#[derive(Clone, Copy)]
pub(super) struct Integer8 {
    pub sign_bit: u8,
}

impl Int8Decode for Integer8 {
    const BITS: usize = 8;
    const IN_REGISTERS: bool = true;
    type Table<'c, L: U8x64> = ();
    #[inline(always)]
    fn table<L: U8x64>(_: &Int8Codes, _: usize) {}
    #[inline(always)]
    fn codes<L: U8x64>(self, (): (), block: &[u8]) -> [[L::Bytes; 2]; 1] {
        let [a, b] = halves(block);
        [[L::xor_bytes(L::load_bytes(a), self.sign_bit), L::xor_bytes(L::load_bytes(b), self.sign_bit)]]
    }
}

/// Integers of 4 bits, whose sign bit is flipped.
#[derive(Clone, Copy)]
pub(super) struct Integer4 {
    pub sign_bit: u8,
}

impl Int8Decode for Integer4 {
    const BITS: usize = 4;
    const IN_REGISTERS: bool = true;
    type Table<'c, L: U8x64> = ();
    #[inline(always)]
    fn table<L: U8x64>(_: &Int8Codes, _: usize) {}
    #[inline(always)]
    fn codes<L: U8x64>(self, (): (), block: &[u8]) -> [[L::Bytes; 2]; 1] {
        [L::split_nibbles(L::xor_bytes(L::load_bytes(line(block)), self.sign_bit * 0x11)).into()]
    }
}
