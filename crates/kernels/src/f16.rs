//! fp16 to f32 and rounding.

use crate::Isa;
use half::f16;

/// Converts little-endian fp16 values. `out` is half as long as `bytes`.
pub fn f16_to_f32(bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len() * 2);
    #[cfg(target_arch = "x86_64")]
    if Isa::best() >= Isa::Avx2 {
        // SAFETY: the processor has F16C and AVX2.
        unsafe { x86::f16_to_f32(bytes, out) };
        return;
    }
    #[cfg(target_arch = "aarch64")]
    if Isa::best() == Isa::Neon {
        neon::f16_to_f32(bytes, out);
        return;
    }
    f16_to_f32_scalar(bytes, out);
}

/// Converts fp16 values from bits. Both slices are of one length.
pub fn f16_bits_to_f32(bits: &[u16], out: &mut [f32]) {
    // SAFETY: the bytes of initialized integers, as many as there are; halves are stored as this processor stores integers.
    let bytes = unsafe { std::slice::from_raw_parts(bits.as_ptr().cast(), size_of_val(bits)) };
    if cfg!(target_endian = "little") {
        return f16_to_f32(bytes, out);
    }
    assert_eq!(bits.len(), out.len());
    for (o, b) in out.iter_mut().zip(bits) {
        *o = f16::from_bits(*b).to_f32();
    }
}

fn f16_to_f32_scalar(bytes: &[u8], out: &mut [f32]) {
    for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        *o = f16::from_le_bytes([b[0], b[1]]).to_f32();
    }
}

/// Rounds values to fp16, as bits; ties to even, too large ones become infinite. Both slices are of one length.
pub fn f32_to_f16(values: &[f32], out: &mut [u16]) {
    assert_eq!(values.len(), out.len());
    #[cfg(target_arch = "x86_64")]
    if Isa::best() >= Isa::Avx2 {
        // SAFETY: the processor has F16C and AVX2.
        unsafe { x86::f32_to_f16(values, out) };
        return;
    }
    #[cfg(target_arch = "aarch64")]
    if Isa::best() == Isa::Neon {
        neon::f32_to_f16(values, out);
        return;
    }
    f32_to_f16_scalar(values, out);
}

fn f32_to_f16_scalar(values: &[f32], out: &mut [u16]) {
    for (o, v) in out.iter_mut().zip(values) {
        *o = f16::from_f32(*v).to_bits();
    }
}

/// Rounds every value to the nearest fp16 value, ties to even; too large ones become infinite.
pub fn round_to_f16(values: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if Isa::best() >= Isa::Avx2 {
        // SAFETY: the processor has F16C and AVX2.
        unsafe { x86::round_to_f16(values) };
        return;
    }
    #[cfg(target_arch = "aarch64")]
    if Isa::best() == Isa::Neon {
        neon::round_to_f16(values);
        return;
    }
    round_scalar(values);
}

fn round_scalar(values: &mut [f32]) {
    for v in values {
        *v = f16::from_f32(*v).to_f32();
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    /// # Safety
    /// The processor has AVX2 and F16C; the slices are of one length.
    #[target_feature(enable = "avx2,f16c")]
    pub unsafe fn f32_to_f16(values: &[f32], out: &mut [u16]) {
        let n = out.len() / 8 * 8;
        for i in (0..n).step_by(8) {
            // SAFETY: 8 floats and 8 halves from i lie inside the slices, since i + 8 <= n.
            unsafe {
                let v = _mm256_loadu_ps(values.as_ptr().add(i));
                let h = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
                _mm_storeu_si128(out.as_mut_ptr().add(i).cast(), h);
            }
        }
        super::f32_to_f16_scalar(&values[n..], &mut out[n..]);
    }

    /// # Safety
    /// The processor has AVX2 and F16C.
    #[target_feature(enable = "avx2,f16c")]
    pub unsafe fn f16_to_f32(bytes: &[u8], out: &mut [f32]) {
        let n = out.len() / 8 * 8;
        for i in (0..n).step_by(8) {
            // SAFETY: 16 bytes from 2 i and 8 floats from i lie inside the slices, since i + 8 <= n.
            unsafe {
                let h = _mm_loadu_si128(bytes.as_ptr().add(2 * i).cast());
                _mm256_storeu_ps(out.as_mut_ptr().add(i), _mm256_cvtph_ps(h));
            }
        }
        super::f16_to_f32_scalar(&bytes[2 * n..], &mut out[n..]);
    }

    /// # Safety
    /// The processor has AVX2 and F16C.
    #[target_feature(enable = "avx2,f16c")]
    pub unsafe fn round_to_f16(values: &mut [f32]) {
        let n = values.len() / 8 * 8;
        for i in (0..n).step_by(8) {
            // SAFETY: 8 floats from i lie inside the slice, since i + 8 <= n.
            unsafe {
                let p = values.as_mut_ptr().add(i);
                let h = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(p));
                _mm256_storeu_ps(p, _mm256_cvtph_ps(h));
            }
        }
        super::round_scalar(&mut values[n..]);
    }
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use std::arch::aarch64::*;

    pub fn f32_to_f16(values: &[f32], out: &mut [u16]) {
        let n = values.len().min(out.len()) / 4 * 4;
        for i in (0..n).step_by(4) {
            // SAFETY: 4 floats and 4 halves from i lie inside the slices, since i + 4 <= n; the processor has NEON.
            unsafe {
                let h = vcvt_f16_f32(vld1q_f32(values.as_ptr().add(i)));
                vst1_u16(out.as_mut_ptr().add(i), vreinterpret_u16_f16(h));
            }
        }
        super::f32_to_f16_scalar(&values[n..], &mut out[n..]);
    }

    pub fn f16_to_f32(bytes: &[u8], out: &mut [f32]) {
        let n = out.len().min(bytes.len() / 2) / 4 * 4;
        for i in (0..n).step_by(4) {
            // SAFETY: 8 bytes from 2 i and 4 floats from i lie inside the slices, since i + 4 <= n; the processor has NEON.
            unsafe {
                let h = vreinterpret_f16_u8(vld1_u8(bytes.as_ptr().add(2 * i)));
                vst1q_f32(out.as_mut_ptr().add(i), vcvt_f32_f16(h));
            }
        }
        super::f16_to_f32_scalar(&bytes[2 * n..], &mut out[n..]);
    }

    pub fn round_to_f16(values: &mut [f32]) {
        let n = values.len() / 4 * 4;
        for i in (0..n).step_by(4) {
            // SAFETY: 4 floats from i lie inside the slice, since i + 4 <= n; the processor has NEON.
            unsafe {
                let p = values.as_mut_ptr().add(i);
                vst1q_f32(p, vcvt_f32_f16(vcvt_f16_f32(vld1q_f32(p))));
            }
        }
        super::round_scalar(&mut values[n..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fp16_value_converts_as_the_scalar_code_does() {
        let bytes: Vec<u8> = (0..=u16::MAX).flat_map(|c| c.to_le_bytes()).collect();
        let (mut a, mut b) = (vec![0f32; 65536], vec![0f32; 65536]);
        f16_to_f32(&bytes, &mut a);
        f16_to_f32_scalar(&bytes, &mut b);
        let same =
            |a: &[f32]| a.iter().zip(&b).all(|(x, y)| x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan());
        assert!(same(&a));
        a.fill(9.0);
        f16_bits_to_f32(&(0..=u16::MAX).collect::<Vec<_>>(), &mut a);
        assert!(same(&a));
    }

    #[test]
    fn rounding_is_to_nearest_even_and_overflows_to_infinity() {
        let mut v = vec![
            1.0 + 2f32.powi(-11),
            1.0 + 3.0 * 2f32.powi(-11),
            65519.9,
            65520.0,
            -1e9,
            2f32.powi(-25),
            6e-8,
            0.1,
            -0.0,
        ];
        let mut scalar = v.clone();
        let (mut a, mut b) = (vec![0u16; 9], vec![0u16; 9]);
        f32_to_f16(&v, &mut a);
        f32_to_f16_scalar(&v, &mut b);
        assert_eq!(a, b);
        round_to_f16(&mut v);
        round_scalar(&mut scalar);
        assert_eq!(v, scalar);
        assert_eq!(&v[..5], &[1.0, 1.0 + 2f32.powi(-9), 65504.0, f32::INFINITY, f32::NEG_INFINITY]);
        assert_eq!(v[5], 0.0);
    }
}
