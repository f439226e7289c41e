//! Sixteen f32 lanes with the instructions of one [`crate::Isa`], so that a kernel is written once.
//!
//! Values of the wider kinds exist only inside functions that were entered after the processor was asked for their
//! instructions, of which NEON is one that code for AArch64 is compiled for anyway; that is what the SAFETY lines rely on.

#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

/// Number of lanes.
pub(crate) const LANES: usize = 16;

/// Sixteen numbers.
pub(crate) trait Lanes: Copy {
    /// Values that registers hold at a time.
    const REGISTERS: usize;

    fn splat(v: f32) -> Self;
    fn load(v: &[f32; LANES]) -> Self;
    fn store(self, out: &mut [f32; LANES]);
    fn add(self, b: Self) -> Self;
    fn mul(self, b: Self) -> Self;
    fn div(self, b: Self) -> Self;
    /// `self * b + c`
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// `c - self * b`
    fn neg_mul_add(self, b: Self, c: Self) -> Self;
    fn min(self, b: Self) -> Self;
    fn max(self, b: Self) -> Self;
    /// To the nearest integer, ties to even; magnitudes below 2^22.
    fn round(self) -> Self;

    /// `x` where `self < bound`, else `y`.
    fn if_below(self, bound: Self, x: Self, y: Self) -> Self;

    /// Sixteen unsigned integers.
    type Ints: Copy;

    /// Little endian.
    fn ints(v: &[u8; 64]) -> Self::Ints;
    /// As [`Lanes::ints`], from at most 64 bytes and zeros.
    #[inline(always)]
    fn ints_of(v: &[u8]) -> Self::Ints {
        let mut whole = [0; 64];
        whole[..v.len()].copy_from_slice(v);
        Self::ints(&whole)
    }
    fn ints_u16(v: &[u8; 32]) -> Self::Ints;
    fn ints_u8(v: &[u8; 16]) -> Self::Ints;
    fn shift_right(v: Self::Ints, bits: u32) -> Self::Ints;
    /// Signed integers as numbers.
    fn from_i8(v: &[u8; 16]) -> Self;
    fn from_u8(v: &[u8; 16]) -> Self;
    /// Little endian f32.
    fn from_f32(v: &[u8; 64]) -> Self;
    /// Little endian fp16.
    fn from_f16(v: &[u8; 32]) -> Self;
    /// `table[i & 15]` for each of `at`.
    fn lookup(table: Self, at: Self::Ints) -> Self;
    /// `table[i & 63]` for each of `at`.
    fn lookup_64(table: &[f32; 64], at: Self::Ints) -> Self;
    /// `table[i & 255]` for each of `at`.
    fn lookup_256(table: &[f32; 256], at: Self::Ints) -> Self;
    /// `2^self` for integers from -126 to 127.
    fn power_of_two(self) -> Self;

    /// Little endian integers of 24 bits, each `stride` bytes behind the one before; the last one's four bytes are inside.
    #[inline(always)]
    fn ints_u24(v: &[u8], stride: usize) -> Self::Ints {
        let mut wide = [0u8; 64];
        for (l, out) in wide.chunks_exact_mut(4).enumerate() {
            out[..3].copy_from_slice(&v[l * stride..l * stride + 3]);
        }
        Self::ints(&wide)
    }

    /// Lane l is `v[l >> shift]`, of which there are enough.
    #[inline(always)]
    fn repeated(v: &[f32], shift: u32) -> Self {
        let mut lanes = [0f32; LANES];
        for (l, lane) in lanes.iter_mut().enumerate() {
            *lane = v[l >> shift];
        }
        Self::load(&lanes)
    }

    /// The totals of four; each is [`Lanes::total`].
    #[inline(always)]
    fn totals(v: [Self; 4]) -> [f32; 4] {
        v.map(Self::total)
    }

    /// Lane 4 i + l is what lanes l, l + 4, l + 8 and l + 12 of vector i are together, added by halves.
    #[inline(always)]
    fn quarters(v: [Self; 4]) -> Self {
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

    /// The totals of sixteen vectors, of which [`Lanes::quarters`] has made four: lane 4 q + i is vector i of those in `v[q]`.
    #[inline(always)]
    fn totals_of_quarters(v: [Self; 4]) -> Self {
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

    /// Lane i of vector j is lane j of vector i.
    #[inline(always)]
    fn turn(v: [Self; LANES]) -> [Self; LANES] {
        let mut from = [[0f32; LANES]; LANES];
        for (v, from) in v.into_iter().zip(&mut from) {
            v.store(from);
        }
        let mut turned = v;
        for (i, turned) in turned.iter_mut().enumerate() {
            let mut to = [0f32; LANES];
            for (to, from) in to.iter_mut().zip(&from) {
                *to = from[i];
            }
            *turned = Self::load(&to);
        }
        turned
    }

    /// The first of the smallest lanes, and its number. No lane is NaN.
    #[inline(always)]
    fn least(self) -> (usize, f32) {
        let mut v = [0f32; LANES];
        self.store(&mut v);
        let mut best = 0;
        for g in 1..LANES {
            if v[g] < v[best] {
                best = g;
            }
        }
        (best, v[best])
    }

    /// The sum of all lanes, by halves.
    #[inline(always)]
    fn total(self) -> f32 {
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

/// Adding and subtracting it rounds to the nearest integer, ties to even, for magnitudes below 2^22.
pub(crate) const ROUND: f32 = 12_582_912.0;

/// What every processor can do.
#[derive(Clone, Copy)]
pub(crate) struct Plain([f32; LANES]);

impl Plain {
    #[inline(always)]
    fn with(self, b: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let mut out = self.0;
        for (o, b) in out.iter_mut().zip(b.0) {
            *o = f(*o, b);
        }
        Plain(out)
    }
}

impl Lanes for Plain {
    const REGISTERS: usize = 8;

    #[inline(always)]
    fn splat(v: f32) -> Self {
        Plain([v; LANES])
    }
    #[inline(always)]
    fn load(v: &[f32; LANES]) -> Self {
        Plain(*v)
    }
    #[inline(always)]
    fn store(self, out: &mut [f32; LANES]) {
        *out = self.0;
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        self.with(b, |a, b| a + b)
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        self.with(b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        self.with(b, |a, b| a / b)
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        self.mul(b).add(c)
    }
    #[inline(always)]
    fn neg_mul_add(self, b: Self, c: Self) -> Self {
        c.with(self.mul(b), |c, p| c - p)
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        self.with(b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        self.with(b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn if_below(self, bound: Self, x: Self, y: Self) -> Self {
        let mut out = y.0;
        for g in 0..LANES {
            out[g] = if self.0[g] < bound.0[g] { x.0[g] } else { y.0[g] };
        }
        Plain(out)
    }
    #[inline(always)]
    fn round(self) -> Self {
        let mut out = self.0;
        for o in &mut out {
            *o = *o + ROUND - ROUND;
        }
        Plain(out)
    }

    type Ints = [u32; LANES];

    #[inline(always)]
    fn ints(v: &[u8; 64]) -> Self::Ints {
        std::array::from_fn(|l| u32::from_le_bytes([v[4 * l], v[4 * l + 1], v[4 * l + 2], v[4 * l + 3]]))
    }
    #[inline(always)]
    fn ints_u16(v: &[u8; 32]) -> Self::Ints {
        std::array::from_fn(|l| u32::from(u16::from_le_bytes([v[2 * l], v[2 * l + 1]])))
    }
    #[inline(always)]
    fn ints_u8(v: &[u8; 16]) -> Self::Ints {
        v.map(u32::from)
    }
    #[inline(always)]
    fn shift_right(v: Self::Ints, bits: u32) -> Self::Ints {
        v.map(|i| i >> bits)
    }
    #[inline(always)]
    fn from_i8(v: &[u8; 16]) -> Self {
        Plain(v.map(|b| f32::from(b as i8)))
    }
    #[inline(always)]
    fn from_u8(v: &[u8; 16]) -> Self {
        Plain(v.map(f32::from))
    }
    #[inline(always)]
    fn from_f32(v: &[u8; 64]) -> Self {
        Plain(Self::ints(v).map(f32::from_bits))
    }
    #[inline(always)]
    fn from_f16(v: &[u8; 32]) -> Self {
        Plain(std::array::from_fn(|l| half::f16::from_le_bytes([v[2 * l], v[2 * l + 1]]).to_f32()))
    }
    #[inline(always)]
    fn lookup(table: Self, at: Self::Ints) -> Self {
        Plain(at.map(|i| table.0[(i & 15) as usize]))
    }
    #[inline(always)]
    fn lookup_64(table: &[f32; 64], at: Self::Ints) -> Self {
        Plain(at.map(|i| table[(i & 63) as usize]))
    }
    #[inline(always)]
    fn lookup_256(table: &[f32; 256], at: Self::Ints) -> Self {
        Plain(at.map(|i| table[(i & 255) as usize]))
    }
    #[inline(always)]
    fn power_of_two(self) -> Self {
        Plain(self.0.map(|v| f32::from_bits(((v as i32 + 127) as u32) << 23)))
    }
}
