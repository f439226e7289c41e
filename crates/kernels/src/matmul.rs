//! Products of a stored matrix with a few columns.

use crate::matrix::Storage;
use crate::{Isa, Matrix};

/// Rows that are decoded together, so that each value of x is loaded once for all of them.
const ROWS: usize = 4;
/// Columns of y that are accumulated together, in registers.
const TOKENS: usize = 16;
/// A product is worth several threads from this many multiplications on.
const PARALLEL: usize = 1 << 18;

/// `y = w x` with f32 accumulation: x `[cols, t]`, y `[rows, t]`, both row-major. A row of y does not depend on which other
/// rows are computed with it.
///
/// # Panics
/// A length does not fit.
pub fn matmul(w: &Matrix<'_>, x: &[f32], t: usize, y: &mut [f32]) {
    matmul_on(Isa::best(), w, x, t, y);
}

/// As [`matmul`], with rows spread over the current rayon pool. The result is the same for any number of threads.
///
/// # Panics
/// A length does not fit.
pub fn matmul_parallel(w: &Matrix<'_>, x: &[f32], t: usize, y: &mut [f32]) {
    let threads = rayon::current_num_threads();
    if threads < 2 || w.rows * w.cols * t < PARALLEL {
        return matmul(w, x, t, y);
    }
    assert_eq!(y.len(), w.rows * t);
    let rows = w.rows.div_ceil(threads * 2).next_multiple_of(ROWS);
    use rayon::prelude::*;
    y.par_chunks_mut((rows * t).max(1)).enumerate().for_each(|(i, part)| {
        let start = i * rows;
        matmul(&w.row_range(start, start + part.len() / t), x, t, part);
    });
}

/// As [`matmul`], with the instructions of `isa`.
///
/// # Panics
/// A length does not fit, or the processor lacks `isa`.
pub fn matmul_on(isa: Isa, w: &Matrix<'_>, x: &[f32], t: usize, y: &mut [f32]) {
    assert_eq!(x.len(), w.cols * t, "x is [cols, t]");
    assert_eq!(y.len(), w.rows * t, "y is [rows, t]");
    assert!(isa.is_available());
    if t == 0 || w.rows == 0 {
        return;
    }
    match isa {
        Isa::Scalar => product(w, x, t, y, |w, r, out| w.decode_row(r, out)),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, which was asserted above.
        Isa::Avx2 => unsafe { x86::product_avx2(w, x, t, y) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, which was asserted above.
        Isa::Avx512 => unsafe { x86::product_avx512(w, x, t, y) },
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 | Isa::Avx512 => unreachable!("asserted above"),
    }
}

/// Decodes rows and multiplies them. Inlined into functions with more instructions, it is compiled once for each.
#[inline(always)]
fn product(
    w: &Matrix<'_>,
    x: &[f32],
    t: usize,
    y: &mut [f32],
    decode: impl Fn(&Matrix<'_>, usize, &mut [f32]),
) {
    let cols = w.cols;
    let mut panel = vec![0f32; ROWS * cols];
    for first in (0..w.rows).step_by(ROWS) {
        let n = ROWS.min(w.rows - first);
        for r in 0..n {
            decode(w, first + r, &mut panel[r * cols..(r + 1) * cols]);
        }
        if t == 1 {
            for r in 0..n {
                y[first + r] = dot(&panel[r * cols..(r + 1) * cols], x);
            }
            continue;
        }
        let (p0, rest) = panel.split_at(cols);
        let (p1, rest) = rest.split_at(cols);
        let (p2, p3) = rest.split_at(cols);
        let mut from = 0;
        while from < t {
            let width = TOKENS.min(t - from);
            let mut acc = [[0f32; TOKENS]; ROWS];
            if width == TOKENS {
                for c in 0..cols {
                    let xs: &[f32; TOKENS] = x[c * t + from..][..TOKENS].try_into().expect("TOKENS values");
                    for (a, p) in acc.iter_mut().zip([p0, p1, p2, p3]) {
                        let v = p[c];
                        for k in 0..TOKENS {
                            a[k] = xs[k].mul_add(v, a[k]);
                        }
                    }
                }
            } else {
                for c in 0..cols {
                    let xs = &x[c * t + from..][..width];
                    for (a, p) in acc.iter_mut().zip([p0, p1, p2, p3]) {
                        let v = p[c];
                        for (a, x) in a.iter_mut().zip(xs) {
                            *a = x.mul_add(v, *a);
                        }
                    }
                }
            }
            for (r, a) in acc.iter().enumerate().take(n) {
                y[(first + r) * t + from..][..width].copy_from_slice(&a[..width]);
            }
            from += width;
        }
    }
}

/// Inner product in 64 partial sums.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 64;
    let mut acc = [0f32; LANES];
    let (a_main, a_rest) = a.as_chunks::<LANES>();
    let (b_main, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_main.iter().zip(b_main) {
        for k in 0..LANES {
            acc[k] = a[k].mul_add(b[k], acc[k]);
        }
    }
    for (k, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        acc[k] = a.mul_add(*b, acc[k]);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for k in 0..width {
            acc[k] += acc[k + width];
        }
        width /= 2;
    }
    acc[0]
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use std::arch::x86_64::*;

    /// # Safety
    /// The processor has AVX2, FMA and F16C.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub unsafe fn product_avx2(w: &Matrix<'_>, x: &[f32], t: usize, y: &mut [f32]) {
        product(w, x, t, y, |w, r, out| {
            if !lut4_row(w, r, out, |bytes, table, out| {
                // SAFETY: the enclosing function's contract.
                unsafe { decode_lut4_avx2(bytes, table, out) }
            }) {
                w.decode_row(r, out);
            }
        });
    }

    /// # Safety
    /// The processor has AVX-512 F, BW and VL, AVX2, FMA and F16C.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
    pub unsafe fn product_avx512(w: &Matrix<'_>, x: &[f32], t: usize, y: &mut [f32]) {
        product(w, x, t, y, |w, r, out| {
            if !lut4_row(w, r, out, |bytes, table, out| {
                // SAFETY: the enclosing function's contract.
                unsafe { decode_lut4_avx512(bytes, table, out) }
            }) {
                w.decode_row(r, out);
            }
        });
    }

    /// Decodes a row of 4-bit indices that starts at a byte; false for any other row.
    #[inline(always)]
    fn lut4_row(
        w: &Matrix<'_>,
        row: usize,
        out: &mut [f32],
        decode: impl Fn(&[u8], &[f32; 16], &mut [f32]),
    ) -> bool {
        let Storage::Lut { bits: 4, indices, lut, rows_per_group } = w.data else { return false };
        let row = w.first + row;
        let start = row * w.cols;
        if !start.is_multiple_of(2) {
            return false;
        }
        let table: &[f32; 16] = match lut[row / rows_per_group * 16..][..16].try_into() {
            Ok(table) => table,
            Err(_) => return false,
        };
        decode(&indices[start / 2..(start + w.cols).div_ceil(2)], table, out);
        true
    }

    fn decode_tail(bytes: &[u8], table: &[f32; 16], from: usize, out: &mut [f32]) {
        for (i, o) in out.iter_mut().enumerate().skip(from) {
            *o = table[usize::from(bytes[i / 2] >> (i % 2 * 4) & 15)];
        }
    }

    /// # Safety
    /// The processor has AVX-512 F, BW and VL.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn decode_lut4_avx512(bytes: &[u8], table: &[f32; 16], out: &mut [f32]) {
        let n = out.len() / 32 * 32;
        // SAFETY: loads and stores lie inside: 16 bytes from i / 2 and 32 floats from i, with i + 32 <= n; prefetching reads
        // nothing.
        unsafe {
            let lut = _mm512_loadu_ps(table.as_ptr());
            let low_bits = _mm_set1_epi8(15);
            for i in (0..n).step_by(32) {
                let at = bytes.as_ptr().add(i / 2);
                // Far enough ahead for the next rows to be on their way (measured: 4 KiB).
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(4096).cast());
                let packed = _mm_loadu_si128(at.cast());
                let even = _mm_and_si128(packed, low_bits);
                let odd = _mm_and_si128(_mm_srli_epi16::<4>(packed), low_bits);
                let first = _mm_unpacklo_epi8(even, odd);
                let second = _mm_unpackhi_epi8(even, odd);
                let p = out.as_mut_ptr().add(i);
                _mm512_storeu_ps(p, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(first), lut));
                _mm512_storeu_ps(p.add(16), _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(second), lut));
            }
        }
        decode_tail(bytes, table, n, out);
    }

    /// # Safety
    /// The processor has AVX2.
    #[target_feature(enable = "avx2")]
    unsafe fn decode_lut4_avx2(bytes: &[u8], table: &[f32; 16], out: &mut [f32]) {
        let n = out.len() / 16 * 16;
        // SAFETY: loads and stores lie inside: 8 bytes from i / 2 and 16 floats from i, with i + 16 <= n; prefetching reads
        // nothing.
        unsafe {
            let low = _mm256_loadu_ps(table.as_ptr());
            let high = _mm256_loadu_ps(table.as_ptr().add(8));
            let low_bits = _mm_set1_epi8(15);
            for i in (0..n).step_by(16) {
                let at = bytes.as_ptr().add(i / 2);
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(2048).cast());
                let packed = _mm_loadl_epi64(at.cast());
                let even = _mm_and_si128(packed, low_bits);
                let odd = _mm_and_si128(_mm_srli_epi16::<4>(packed), low_bits);
                let both = _mm_unpacklo_epi8(even, odd);
                for (k, half) in [both, _mm_srli_si128::<8>(both)].into_iter().enumerate() {
                    let index = _mm256_cvtepu8_epi32(half);
                    // Bit 3 of an index, moved to the sign, selects the upper half of the table.
                    let upper = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index));
                    let a = _mm256_permutevar8x32_ps(low, index);
                    let b = _mm256_permutevar8x32_ps(high, index);
                    _mm256_storeu_ps(out.as_mut_ptr().add(i + 8 * k), _mm256_blendv_ps(a, b, upper));
                }
            }
        }
        decode_tail(bytes, table, n, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Values that look random and are the same everywhere.
    fn noise(seed: u64, n: usize) -> Vec<f32> {
        let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        (0..n)
            .map(|_| {
                s ^= s << 13;
                s ^= s >> 7;
                s ^= s << 17;
                (s >> 40) as f32 / (1u64 << 24) as f32 - 0.5
            })
            .collect()
    }

    fn bytes(seed: u64, n: usize) -> Vec<u8> {
        noise(seed, n).iter().map(|v| (v * 1000.0) as i32 as u8).collect()
    }

    /// Calls `check` with a matrix of each kind.
    fn each_kind(seed: u64, rows: usize, cols: usize, mut check: impl FnMut(&str, &Matrix<'_>)) {
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
        }
        for (bits, signed) in [(4, true), (4, false), (8, true), (8, false)] {
            let block = (
                (1..=2).rev().find(|g| rows.is_multiple_of(*g)).unwrap(),
                (1..=8).rev().find(|g| cols.is_multiple_of(*g)).unwrap(),
            );
            let blocks = rows / block.0 * (cols / block.1);
            let (scale, offset) = (noise(seed + 3, blocks), noise(seed + 4, blocks));
            let data = bytes(seed + 5, (n * bits).div_ceil(8));
            for offset in [None, Some(offset.as_slice())] {
                let m = Matrix::int(bits, signed, &data, &scale, offset, block, rows, cols).unwrap();
                check(&format!("int{bits} {signed}"), &m);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn every_path_agrees_with_plain_arithmetic(seed in 1u64..1000, rows in 1usize..40, cols in 1usize..150, t in prop::sample::select(vec![1usize, 2, 3, 7, 16, 17, 33, 70])) {
            each_kind(seed, rows, cols, |kind, w| {
                let x = noise(seed + 9, cols * t);
                let mut dense = vec![0f32; rows * cols];
                w.to_dense(&mut dense);
                for isa in [Isa::Scalar, Isa::Avx2, Isa::Avx512].into_iter().filter(|i| i.is_available()) {
                    let mut y = vec![f32::NAN; rows * t];
                    matmul_on(isa, w, &x, t, &mut y);
                    for r in 0..rows {
                        for k in 0..t {
                            let exact: f64 = (0..cols).map(|c| f64::from(dense[r * cols + c]) * f64::from(x[c * t + k])).sum();
                            let size: f64 = (0..cols).map(|c| (f64::from(dense[r * cols + c]) * f64::from(x[c * t + k])).abs()).sum();
                            let error = (f64::from(y[r * t + k]) - exact).abs();
                            assert!(error <= 1e-6 * size + 1e-12, "{kind} {isa:?} [{rows}, {cols}] t {t}: {} for {exact}", y[r * t + k]);
                        }
                    }
                    // Rows do not depend on how they are cut.
                    let mut part = vec![0f32; rows.div_ceil(2) * t];
                    matmul_on(isa, &w.row_range(rows / 2, rows), &x, t, &mut part);
                    assert_eq!(part, &y[rows / 2 * t..], "{kind} {isa:?}");
                }
                let (mut a, mut b) = (vec![0f32; rows * t], vec![0f32; rows * t]);
                matmul(w, &x, t, &mut a);
                matmul_parallel(w, &x, t, &mut b);
                assert_eq!(a, b);
            });
        }
    }

    #[test]
    fn threads_do_not_change_the_result() {
        let (rows, cols, t) = (515, 700, 3);
        let (data, x) = (noise(1, rows * cols), noise(2, cols * t));
        let w = Matrix::f32(&data, rows, cols).unwrap();
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut y = vec![0f32; rows * t];
            pool.install(|| matmul_parallel(&w, &x, t, &mut y));
            y
        };
        let one = run(1);
        assert!([2, 3, 8].into_iter().all(|n| run(n) == one));
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        assert!(Matrix::f32(&[0.0; 5], 2, 3).is_err());
        assert!(Matrix::f16(&[0; 11], 2, 3).is_err());
        assert!(Matrix::lut(5, &[0; 4], &[0.0; 32], 1, 1, 6).is_err());
        assert!(Matrix::lut(4, &[0; 3], &[0.0; 16], 2, 3, 2).is_err());
        assert!(Matrix::int(8, true, &[0; 6], &[1.0], None, (2, 2), 2, 3).is_err());
        assert!(Matrix::f32(&[], usize::MAX, 2).is_err());
    }
}
