//! Vector traits that every backend implements, and the kernels written with them.

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Rounding constant, 1.5 * 2^23: adding and subtracting it rounds magnitudes below 2^22 to the nearest integer, ties to even.
pub(crate) const ROUND: f32 = 12_582_912.0;

/// Sixteen f32 lanes.
pub(crate) trait F32x16: Copy {
    /// Vectors of 16 lanes that fit into the registers.
    const REGISTERS: usize;
    /// True if this is the scalar reference.
    const IS_REFERENCE: bool = false;

    fn splat(v: f32) -> Self;
    fn load(v: &[f32; LANES]) -> Self;
    fn store(self, out: &mut [f32; LANES]);
    fn add(self, b: Self) -> Self;
    fn mul(self, b: Self) -> Self;
    fn div(self, b: Self) -> Self;
    /// Returns `self * b + c`, rounded once (scalar code: twice).
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// Returns `c - self * b`, rounded once (scalar code: twice).
    fn neg_mul_add(self, b: Self, c: Self) -> Self;
    fn min(self, b: Self) -> Self;
    fn max(self, b: Self) -> Self;
    /// Rounds to the nearest integer, ties to even, for magnitudes below 2^22.
    fn round(self) -> Self;

    /// Registers per vector.
    const REGISTERS_PER_VECTOR: usize;
    /// One register: `LANES / REGISTERS_PER_VECTOR` lanes. A tile of registers is wider in rows and tokens than a tile
    /// of vectors, so that fewer loads serve its sums.
    type Register: Copy;
    /// Loads register r of a vector.
    fn load_register(v: &[f32; LANES], r: usize) -> Self::Register;
    /// Stores register r of a vector.
    fn store_register(v: Self::Register, out: &mut [f32; LANES], r: usize);
    /// Returns `a * b + c`, rounded as [`F32x16::mul_add`] rounds.
    fn mul_add_register(a: Self::Register, b: Self::Register, c: Self::Register) -> Self::Register;

    /// Returns `x` where `self < bound`, else `y`.
    fn if_below(self, bound: Self, x: Self, y: Self) -> Self;

    /// Sixteen unsigned 32-bit integers.
    type U32s: Copy;

    /// Loads little-endian 32-bit words.
    fn load_u32(v: &[u8; 64]) -> Self::U32s;
    fn load_u16(v: &[u8; 32]) -> Self::U32s;
    fn load_u8(v: &[u8; 16]) -> Self::U32s;
    fn shift_right(v: Self::U32s, bits: u32) -> Self::U32s;
    /// Converts sixteen signed bytes.
    fn from_i8(v: &[u8; 16]) -> Self;
    fn from_u8(v: &[u8; 16]) -> Self;
    /// Loads sixteen little-endian f32.
    fn from_f32(v: &[u8; 64]) -> Self;
    /// Converts sixteen little-endian fp16.
    fn from_f16(v: &[u8; 32]) -> Self;
    /// Rounds to little-endian fp16, ties to even; values out of range become infinite.
    fn to_f16(self, out: &mut [u8; 32]);
    /// Returns `table[i & 15]` for each index i.
    fn lookup(table: Self, at: Self::U32s) -> Self;
    /// Returns `table[i & 63]` for each index i.
    fn lookup_64(table: &[f32; 64], at: Self::U32s) -> Self;
    /// Returns `table[i & 255]` for each index i.
    fn lookup_256(table: &[f32; 256], at: Self::U32s) -> Self;
    /// Returns `2^self` for integers from -126 to 127.
    fn power_of_two(self) -> Self;

    /// Entries of the largest fp16 table that takes a few instructions, 64 or 256; f32 tables are faster for larger
    /// ones. 0 where f32 tables are always faster.
    const LARGEST_HALF_TABLE: usize = 0;
    /// A table of 64 fp16 entries.
    type HalfTable: Copy;
    /// Two vectors of sixteen fp16.
    type F16x32: Copy;
    fn load_half_table(table: &[u16; 64]) -> Self::HalfTable;
    /// Looks up 128 indices of 6 bits; lane l has eight, in the 6 bytes from 6 l on. Returns pairs of vectors, see
    /// [`HALF_PAIRS`]: of each lane's first and second index, third and sixth, fourth and fifth, seventh and eighth.
    fn lookup_halves_6(table: Self::HalfTable, at: &[u8; 96]) -> [Self::F16x32; 4];
    /// Looks up 32 indices of 8 bits: a vector for the first sixteen, one for the others.
    fn lookup_halves_8(table: &[u16; 256], at: &[u8; 32]) -> Self::F16x32;
    /// Converts the first or the second of two vectors to f32.
    fn half_vector(v: Self::F16x32, second: bool) -> Self;

    /// Loads sixteen little-endian 24-bit integers, `stride` bytes apart, 3 or 6. The last of them lies within `v`. The upper
    /// byte of a lane is undefined.
    #[inline(always)]
    fn load_u24(v: &[u8], stride: usize) -> Self::U32s {
        let mut wide = [0u8; 64];
        for (l, out) in wide.chunks_exact_mut(4).enumerate() {
            out[..3].copy_from_slice(&v[l * stride..l * stride + 3]);
        }
        Self::load_u32(&wide)
    }

    /// Returns `v[l >> shift]` in lane l.
    #[inline(always)]
    fn repeat_lanes(v: &[f32], shift: u32) -> Self {
        let mut lanes = [0f32; LANES];
        for (l, lane) in lanes.iter_mut().enumerate() {
            *lane = v[l >> shift];
        }
        Self::load(&lanes)
    }

    /// Returns `2^(exponents[l / 4] - 127)` in lane l, and 0 where the exponent is 0.
    #[inline(always)]
    fn powers_of_two(exponents: &[u8; 4]) -> Self {
        let mut lanes = [0f32; LANES];
        for (l, lane) in lanes.iter_mut().enumerate() {
            *lane = f32::from_bits(u32::from(exponents[l / 4]) << 23);
        }
        Self::load(&lanes)
    }

    /// Returns the horizontal sum of each of four vectors.
    #[inline(always)]
    fn horizontal_sums(v: [Self; 4]) -> [f32; 4] {
        v.map(Self::horizontal_sum)
    }

    /// Adds the sixteen lanes of each vector to four: lane `4 i + l` is `(v[i][l] + v[i][l + 8]) + (v[i][l + 4] + v[i][l + 12])`.
    #[inline(always)]
    fn partial_sums(v: [Self; 4]) -> Self {
        let mut all = [0f32; LANES];
        for (v, out) in v.into_iter().zip(all.as_chunks_mut::<4>().0) {
            let mut lanes = [0f32; LANES];
            v.store(&mut lanes);
            for l in 0..4 {
                out[l] = (lanes[l] + lanes[l + 8]) + (lanes[l + 4] + lanes[l + 12]);
            }
        }
        Self::load(&all)
    }

    /// Finishes the horizontal sums of sixteen vectors from four [`F32x16::partial_sums`]: lane `4 q + i` is the sum of
    /// vector i of `v[q]`.
    #[inline(always)]
    fn finish_partial_sums(v: [Self; 4]) -> Self {
        let mut all = [0f32; LANES];
        for (v, out) in v.into_iter().zip(all.as_chunks_mut::<4>().0) {
            let mut lanes = [0f32; LANES];
            v.store(&mut lanes);
            for (out, l) in out.iter_mut().zip(lanes.as_chunks::<4>().0) {
                *out = (l[0] + l[2]) + (l[1] + l[3]);
            }
        }
        Self::load(&all)
    }

    /// Transposes sixteen vectors: lane i of vector j becomes lane j of vector i.
    #[inline(always)]
    fn transpose(v: [Self; LANES]) -> [Self; LANES] {
        let mut from = [[0f32; LANES]; LANES];
        for (v, from) in v.into_iter().zip(&mut from) {
            v.store(from);
        }
        let mut transposed = v;
        for (i, transposed) in transposed.iter_mut().enumerate() {
            let mut to = [0f32; LANES];
            for (to, from) in to.iter_mut().zip(&from) {
                *to = from[i];
            }
            *transposed = Self::load(&to);
        }
        transposed
    }

    /// Returns the index of the first smallest lane, and its value. No lane may be NaN.
    #[inline(always)]
    fn argmin(self) -> (usize, f32) {
        let mut v = [0f32; LANES];
        self.store(&mut v);
        let best = (1..LANES).fold(0, |best, g| if v[g] < v[best] { g } else { best });
        (best, v[best])
    }

    /// Adds all lanes by halves: 16 to 8 to 4 to 2 to 1.
    #[inline(always)]
    fn horizontal_sum(self) -> f32 {
        let mut v = [0f32; LANES];
        self.store(&mut v);
        for width in [8, 4, 2, 1] {
            for g in 0..width {
                v[g] += v[g + width];
            }
        }
        v[0]
    }
}

/// Implements methods of one expression each, always inlined.
macro_rules! methods {
    ($($name:ident($($parameter:tt)*) $(-> $output:ty)? = $result:expr;)*) => {$(
        #[inline(always)]
        fn $name($($parameter)*) $(-> $output)? {
            $result
        }
    )*};
}
pub(crate) use methods;

/// Implements [`methods!`] whose expressions call intrinsics. The comment above such a table says why the calls are sound.
macro_rules! intrinsics {
    ($($name:ident($($parameter:tt)*) $(-> $output:ty)? = $result:expr;)*) => {
        methods! {
            // SAFETY: see above the table.
            $($name($($parameter)*) $(-> $output)? = unsafe { $result };)*
        }
    };
}
pub(crate) use intrinsics;

/// Implements [`F32x16::Register`] for a vector that is one register.
macro_rules! one_register {
    () => {
        const REGISTERS_PER_VECTOR: usize = 1;
        type Register = Self;
        methods! {
            load_register(v: &[f32; LANES], _r: usize) -> Self = Self::load(v);
            store_register(v: Self, out: &mut [f32; LANES], _r: usize) = v.store(out);
            mul_add_register(a: Self, b: Self, c: Self) -> Self = a.mul_add(b, c);
        }
    };
}
pub(crate) use one_register;

/// Implements the registers of [`I16x32`] for words that are one register.
macro_rules! one_word_register {
    () => {
        type WordRegister = Self::Bytes;
        type SumRegister = Self::Sums;
        methods! {
            dot_i16(sums: Self::Sums, w: Self::Bytes, x: &[u8; 64]) -> Self::Sums =
                Self::dot_word_register(sums, w, Self::load_bytes(x));
            load_word_register(v: &[u8; 64], _r: usize) -> Self::Bytes = Self::load_bytes(v);
            zero_sum_register() -> Self::Sums = Self::zero_sums();
            sum_register_to_f32(v: Self::Sums) -> Self = Self::sums_to_f32(v);
        }
        #[inline(always)]
        fn lookup_word_registers(table: Self::Table, at: &[u8; 64], _: usize) -> [Self::Bytes; 4] {
            let at = Self::load_bytes(at);
            [
                Self::lookup_i16::<0>(table, at),
                Self::lookup_i16::<1>(table, at),
                Self::lookup_i16::<2>(table, at),
                Self::lookup_i16::<3>(table, at),
            ]
        }
    };
}
pub(crate) use one_word_register;

/// Computes [`F32x16::lookup_halves_6`] in scalar code.
#[inline(always)]
pub(crate) fn plain_halves_6(table: &[u16; 64], at: &[u8; 96]) -> [[u16; 32]; 4] {
    HALF_PAIRS.map(|pair| {
        std::array::from_fn(|i| {
            let bit = 6 * pair[i / LANES];
            let (byte, lane) = (bit / 8, i % LANES * 6);
            let word = u16::from(at[lane + byte]) | u16::from(*at.get(lane + byte + 1).unwrap_or(&0)) << 8;
            table[usize::from(word >> (bit % 8) & 63)]
        })
    })
}

/// Pairs of a lane's indices whose vectors [`F32x16::lookup_halves_6`] returns together.
pub(crate) const HALF_PAIRS: [[usize; 2]; 4] = [[0, 1], [2, 5], [3, 4], [6, 7]];

/// Implements fp16 lookups in scalar code, for instruction sets that do not use them.
macro_rules! plain_half_tables {
    () => {
        type HalfTable = [u16; 64];
        type F16x32 = [u16; 32];
        #[inline(always)]
        fn load_half_table(table: &[u16; 64]) -> [u16; 64] {
            *table
        }
        #[inline(always)]
        fn lookup_halves_6(table: [u16; 64], at: &[u8; 96]) -> [[u16; 32]; 4] {
            crate::simd::traits::plain_halves_6(&table, at)
        }
        #[inline(always)]
        fn lookup_halves_8(table: &[u16; 256], at: &[u8; 32]) -> [u16; 32] {
            at.map(|i| table[usize::from(i)])
        }
        #[inline(always)]
        fn half_vector(v: [u16; 32], second: bool) -> Self {
            let first = if second { 16 } else { 0 };
            let mut bytes = [0u8; 32];
            for (to, from) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(&v[first..]) {
                *to = from.to_le_bytes();
            }
            Self::from_f16(&bytes)
        }
    };
}
pub(crate) use plain_half_tables;

/// Sixty-four bytes, and sixteen i32 sums of their products.
pub(crate) trait U8x64: F32x16 {
    type Bytes: Copy;
    /// Sixteen i32 sums.
    type Sums: Copy;
    /// True if several tokens are multiplied together; with few registers their sums would be stored and reloaded.
    const MULTIPLIES_SEVERAL_TOKENS: bool = true;
    /// True if bytes are permuted across a whole vector by one instruction, so that elements of few bits are unpacked fast.
    const PERMUTES_BYTES: bool = false;
    fn load_bytes(v: &[u8; 64]) -> Self::Bytes;
    /// Loads at most 64 bytes, filled with zeros.
    #[inline(always)]
    fn load_partial_bytes(v: &[u8]) -> Self::Bytes {
        let mut whole = [0; 64];
        whole[..v.len()].copy_from_slice(v);
        Self::load_bytes(&whole)
    }
    /// Repeats sixteen bytes four times.
    fn load_byte_table(v: &[u8; 16]) -> Self::Bytes;
    /// Flips the bits `bits` of each byte.
    fn xor_bytes(v: Self::Bytes, bits: u8) -> Self::Bytes;
    /// Splits each byte into its lower and its upper four bits.
    fn split_nibbles(v: Self::Bytes) -> (Self::Bytes, Self::Bytes);
    /// Returns `table[i]` for each byte i below 16, or for its lowest bits where it is of [`U8x64::unpack`] and the table
    /// repeats its entries.
    fn lookup_bytes_16(table: Self::Bytes, at: Self::Bytes) -> Self::Bytes;
    fn store_bytes(v: Self::Bytes, out: &mut [u8; 64]);
    /// Unpacks twice sixty-four elements of `BITS` bits, least significant first, from `16 * BITS` bytes. Upper bits that
    /// lookups ignore may be set.
    #[inline(always)]
    fn unpack<const BITS: usize>(v: &[u8]) -> [Self::Bytes; 2] {
        let mut out = [0; 128];
        for (v, out) in v.chunks_exact(BITS).zip(out.as_chunks_mut::<8>().0) {
            let all = v.iter().rev().fold(0u64, |all, b| all << 8 | u64::from(*b));
            for (i, o) in out.iter_mut().enumerate() {
                *o = (all >> (BITS * i)) as u8 & ((1 << BITS) - 1);
            }
        }
        let lines = out.as_chunks().0;
        [Self::load_bytes(&lines[0]), Self::load_bytes(&lines[1])]
    }
    /// Returns `table[i]` for the lowest six bits i of each byte.
    #[inline(always)]
    fn lookup_bytes_64(table: &[u8; 64], at: Self::Bytes) -> Self::Bytes {
        let mut all = [0; 64];
        Self::store_bytes(at, &mut all);
        Self::load_bytes(&all.map(|i| table[usize::from(i & 63)]))
    }
    /// Returns `table[i]` for each byte i.
    #[inline(always)]
    fn lookup_bytes_256(table: &[u8; 256], at: Self::Bytes) -> Self::Bytes {
        let mut all = [0; 64];
        Self::store_bytes(at, &mut all);
        Self::load_bytes(&all.map(|i| table[usize::from(i)]))
    }
    fn zero_sums() -> Self::Sums;
    /// Loads sixteen i32.
    fn load_sums(v: &[u8; 64]) -> Self::Sums;
    /// Adds `codes[j] * x[j]` for the four bytes `4 l .. 4 l + 4` to sum l; codes are unsigned, `x` signed and above -128.
    fn dot_u8i8(sums: Self::Sums, codes: Self::Bytes, x: &[u8; 64]) -> Self::Sums;
    fn sums_to_f32(v: Self::Sums) -> Self;
    /// Rounds numbers from -127 to 127 to bytes, ties to even: byte `4 l + j` is lane l of `v[j]`.
    fn pack_i8(v: [Self; 4], out: &mut [u8; 64]);
}

/// Thirty-two words of 16 bits, held as bytes.
pub(crate) trait I16x32: U8x64 {
    /// A lookup table of sixteen words.
    type Table: Copy;
    fn load_i16_table(table: &[i16; 16]) -> Self::Table;
    /// Looks up bits `4 J .. 4 J + 4` of each word of `at`.
    fn lookup_i16<const J: usize>(table: Self::Table, at: Self::Bytes) -> Self::Bytes;
    /// Adds `w[2 l] * x[2 l] + w[2 l + 1] * x[2 l + 1]` (16-bit words) to sum l.
    fn dot_i16(sums: Self::Sums, w: Self::Bytes, x: &[u8; 64]) -> Self::Sums;
    /// Words of one register.
    type WordRegister: Copy;
    /// Sums of one register.
    type SumRegister: Copy;
    /// Loads register r of thirty-two words.
    fn load_word_register(v: &[u8; 64], r: usize) -> Self::WordRegister;
    /// Looks up register r of the results of [`I16x32::lookup_i16`] for J from 0 to 3.
    fn lookup_word_registers(table: Self::Table, at: &[u8; 64], r: usize) -> [Self::WordRegister; 4];
    fn zero_sum_register() -> Self::SumRegister;
    /// Adds products to one register of sums, see [`I16x32::dot_i16`].
    fn dot_word_register(
        sums: Self::SumRegister,
        w: Self::WordRegister,
        x: Self::WordRegister,
    ) -> Self::SumRegister;
    fn sum_register_to_f32(v: Self::SumRegister) -> Self::Register;

    /// True if bytes are multiplied as words, for lack of dot products of bytes.
    const MULTIPLIES_BYTES_AS_WORDS: bool = false;
    /// Widens unsigned bytes to words: the even bytes, then the odd bytes.
    fn widen_codes(codes: Self::Bytes) -> [Self::Bytes; 2];
    /// Joins upper and lower bytes to words: those of the even bytes, then those of the odd bytes.
    #[inline(always)]
    fn join_bytes(upper: Self::Bytes, lower: Self::Bytes) -> [Self::Bytes; 2] {
        let (mut bytes, mut words) = ([[0; 64]; 2], [[0; 64]; 2]);
        Self::store_bytes(lower, &mut bytes[0]);
        Self::store_bytes(upper, &mut bytes[1]);
        for i in 0..128 {
            words[i / 2 % 2][i / 4 * 2 + i % 2] = bytes[i % 2][i / 2];
        }
        words.map(|words| Self::load_bytes(&words))
    }
    /// Widens register r of signed bytes to words: the even bytes, then the odd bytes.
    fn widen_signed_register(v: &[u8; 64], r: usize) -> [Self::WordRegister; 2];

    /// Rounds to integers q, |q| <= 2^23, and splits them into digits: `q = 4096 * out[0] + out[1]`. Words `2 l` are
    /// lane l of `even`, words `2 l + 1` lane l of `odd`.
    fn split_digits(even: Self, odd: Self, out: &mut [[u8; 64]; 2]);
    /// Returns `2^(22 - e)` and `2^(e - 22)` for lanes `2^e <= v < 2^(e + 1)`, and any powers for zero. Lanes other
    /// than zero are finite and at least 2^-104.
    fn exponent_scales(self) -> (Self, Self);
}

/// f32 exponent bits of 2^-104, of the product of a scale and its inverse, and of 2^22.
pub(crate) const MIN_EXPONENT: u32 = 23 << 23;
pub(crate) const INVERSE_EXPONENT: u32 = (254 + 22) << 23;
pub(crate) const STEP_EXPONENT: u32 = 22 << 23;

/// Thirty-two bf16 in a line of 64 bytes.
pub(crate) trait Bf16x32: F32x16 {
    /// Rounds thirty-two numbers to bf16, ties to even.
    fn pack_bf16(low: Self, high: Self, out: &mut [u8; 64]);
    /// Adds `w[2 l + 1] * x[2 l + 1]`, then `w[2 l] * x[2 l]`, to lane l.
    fn dot_bf16(sums: Self, w: &[u8; 64], x: &[u8; 64]) -> Self;
}

/// All vector traits of one instruction set.
pub(crate) trait Simd: I16x32 {
    /// Runs a kernel in a function of its own, compiled for the instruction set.
    ///
    /// A single function for all weight formats would take minutes to compile.
    ///
    /// # Safety
    /// The processor has the instructions.
    unsafe fn call<K: Kernel>(kernel: K) -> K::Output;
}

/// A computation that is written once and compiled for each instruction set.
pub(crate) trait Kernel {
    type Output;
    /// True if the kernel multiplies bytes or words: AVX2 and NEON then take the fastest dot products that the processor has.
    /// Other kernels are compiled without these. (NEON has the choice for bytes only; its kernels of words are compiled alike.)
    #[cfg_attr(
        not(any(target_arch = "x86_64", target_arch = "aarch64")),
        expect(dead_code, reason = "scalar code has one dot product")
    )]
    const HAS_DOT_PRODUCTS: bool = false;
    /// True if the kernel unpacks elements of few bits, or looks bytes up in tables of more than 16: AVX-512 then permutes bytes
    /// where the processor does (VBMI). Other kernels are compiled without these instructions.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only AVX-512 has the choice"))]
    const PERMUTES_BYTES: bool = false;
    /// Runs the computation; always inlined, so that it is compiled with the caller's instructions.
    fn run<S: Simd>(self) -> Self::Output;
}

/// A [`Kernel`] of bf16.
pub(crate) trait Bf16Kernel {
    /// Runs the computation, see [`Kernel::run`].
    fn run<S: Bf16x32>(self);
}
