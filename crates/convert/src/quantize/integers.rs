//! Linear quantization: integers times a scale, the scale searched for the smallest squared error.

use super::q4_0;
use anemoe_kernels::{GRIDS, Grids, Isa, find_extremes, find_scale, sum_grid_errors};
use half::f16;

/// Scale and offset of weights that share them: `scale * (q - offset)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scale {
    pub scale: f16,
    pub offset: i8,
}

/// Returns the least and greatest signed integer of `bits` bits.
fn range(bits: u8) -> (f32, f32) {
    let half = (1i32 << (bits - 1)) as f32;
    (-half, half - 1.0)
}

/// Returns the nearest positive fp16: never zero, which would lose every weight, and never infinite.
fn positive(scale: f32) -> f16 {
    let smallest = f16::from_bits(1);
    f16::from_f32(scale).max(smallest).min(f16::MAX)
}

/// Chooses the scale and offset of the least squared error for `values`, or the scale with which all of them lie on the
/// lattice of Q4_0, which may be negative; masses say how often each occurs, or its
/// importance.
pub(super) fn fit(values: &[f32], masses: Option<&[f32]>, bits: u8, asymmetric: bool) -> Scale {
    let isa = Isa::best();
    if !asymmetric {
        let scale = f16::from_f32(find_scale(isa, values, masses, bits));
        // The lattice of Q4_0 needs -8 for its largest magnitude, so that half of its scales are negative: no search finds them.
        let exact = if bits == 4 && !is_kept(values, scale) { q4_0::exact_scale(values) } else { None };
        return Scale { scale: exact.unwrap_or(scale), offset: 0 };
    }
    let (low, high) = find_extremes(isa, values);
    if low == 0.0 && high == 0.0 {
        return Scale { scale: f16::ONE, offset: 0 };
    }
    // Masses that are all zero say nothing.
    let masses = masses.filter(|m| m.iter().any(|&m| m > 0.0));
    Search { isa, values, masses, bits }.asymmetric(low, high)
}

/// Tells whether 4-bit integers under a scale keep every value.
fn is_kept(values: &[f32], scale: f16) -> bool {
    let (scale, (low, high)) = (scale.to_f32(), range(4));
    values.iter().all(|&v| f16::from_f32((v / scale).round().clamp(low, high) * scale).to_f32() == v)
}

struct Search<'a> {
    isa: Isa,
    values: &'a [f32],
    masses: Option<&'a [f32]>,
    bits: u8,
}

impl Search<'_> {
    /// Tries 16 candidates, keeps the best in `found` if its error is less, and returns its position.
    fn attempt(&self, candidates: &[Scale; GRIDS], found: &mut (Scale, f64)) -> usize {
        let (low, high) = range(self.bits);
        let grids = Grids {
            scale: candidates.map(|c| c.scale.to_f32()),
            zero: candidates.map(|c| f32::from(c.offset)),
            low,
            high,
        };
        let errors = sum_grid_errors(self.isa, self.values, self.masses, &grids);
        let mut best = 0;
        for (i, e) in errors.iter().enumerate() {
            if *e < errors[best] {
                best = i;
            }
        }
        if errors[best] < found.1 {
            *found = (candidates[best], errors[best]);
        }
        best
    }

    /// Searches scale and offset. First the whole range fits; then either end is cut, as long as the error falls;
    /// then steps get finer.
    fn asymmetric(&self, low: f32, high: f32) -> Scale {
        let (first, last) = range(self.bits);
        let of = |a: f32, b: f32| {
            let scale = positive((b * high - a * low) / (last - first));
            let offset = (first - a * low / scale.to_f32()).round().clamp(first, last);
            Scale { scale, offset: offset as i8 }
        };
        let mut center = (1f32, 1f32);
        let mut found = (of(1.0, 1.0), f64::INFINITY);
        // Factors of either end that are tried in a round: wide ones as long as they pay, then finer ones.
        let rounds: [[f32; 4]; 4] = [
            [1.0, 0.8, 0.6, 0.4],
            [1.12, 1.04, 0.96, 0.9],
            [1.03, 1.0, 0.985, 0.97],
            [1.008, 1.0, 0.996, 0.992],
        ];
        for (round, factors) in rounds.iter().enumerate() {
            for _ in 0..if round == 0 { 8 } else { 1 } {
                let mut ends = [(0f32, 0f32); GRIDS];
                for (i, e) in ends.iter_mut().enumerate() {
                    *e = (center.0 * factors[i / 4], center.1 * factors[i % 4]);
                }
                let candidates = ends.map(|(a, b)| of(a, b));
                let before = found.1;
                let i = self.attempt(&candidates, &mut found);
                if found.1 >= before {
                    break;
                }
                center = ends[i];
                if round == 0 && i / 4 < 3 && i % 4 < 3 {
                    break;
                }
            }
        }
        found.0
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{KINDS, weights};
    use super::*;

    fn error(v: &[f32], s: Scale, bits: u8) -> f64 {
        let grid = [anemoe_kernels::ScaleAndZero { scale: s.scale.to_f32(), zero: f32::from(s.offset) }];
        anemoe_kernels::quantize_linear(Isa::best(), v, None, &grid, bits, &mut vec![0i8; v.len()]).error
    }

    #[test]
    fn never_worse_than_the_largest_magnitude_as_the_last_integer() {
        for kind in 0..KINDS {
            for (bits, n) in [(8, 4096), (8, 704), (4, 32)] {
                for seed in 0..8 {
                    let v: Vec<f32> =
                        weights(seed, n, kind).iter().map(|&w| f16::from_f32(w).to_f32()).collect();
                    let largest = v.iter().fold(0f32, |m, v| m.max(v.abs()));
                    let plain = Scale { scale: positive(largest / range(bits).1), offset: 0 };
                    let (found, plain) =
                        (error(&v, fit(&v, None, bits, false), bits), error(&v, plain, bits));
                    assert!(found <= plain * (1.0 + 1e-5), "kind {kind}, {bits} bits: {found} for {plain}");
                }
            }
        }
    }

    /// Checks that the search is near the best of all fp16 scales.
    #[test]
    fn the_search_is_near_the_best_of_all_scales() {
        for kind in [0, 1, 2, 5, 6] {
            for (bits, n, slack) in [(8, 2048, 1.07), (4, 32, 1.10)] {
                let v: Vec<f32> = weights(7, n, kind).iter().map(|&w| f16::from_f32(w).to_f32()).collect();
                let best = (1..0x7c00u16)
                    .map(f16::from_bits)
                    .filter(|s| {
                        let top = v.iter().fold(0f32, |m, v| m.max(v.abs())) / range(bits).1;
                        (top * 0.02..top * 1.1).contains(&s.to_f32())
                    })
                    .map(|scale| error(&v, Scale { scale, offset: 0 }, bits))
                    .fold(f64::INFINITY, f64::min);
                let found = error(&v, fit(&v, None, bits, false), bits);
                assert!(found <= slack * best + 1e-12, "kind {kind}, {bits} bits: {found} for {best}");
            }
        }
    }

    #[test]
    fn an_offset_helps_where_weights_lie_on_one_side() {
        let v: Vec<f32> = (0..256).map(|i| f16::from_f32(1.0 + i as f32 / 256.0).to_f32()).collect();
        for bits in [4, 8] {
            let (plain, offset) = (fit(&v, None, bits, false), fit(&v, None, bits, true));
            assert!(error(&v, offset, bits) < error(&v, plain, bits), "{bits} bits");
        }
    }

    #[test]
    fn importance_moves_the_scale() {
        let mut v = vec![0.01f32; 31];
        v.push(1.0);
        let masses: Vec<f32> = (0..32).map(|i| if i < 31 { 1000.0 } else { 1e-6 }).collect();
        let (plain, weighted) = (fit(&v, None, 4, false), fit(&v, Some(&masses), 4, false));
        assert!(weighted.scale < plain.scale);
        let ignored = fit(&v, Some(&[0.0; 32]), 4, false);
        assert_eq!(ignored, plain);
    }

    /// Checks blocks that llama.cpp's `q4_0` made: exactly, and with products rounded to bf16.
    #[test]
    fn the_lattice_of_q4_0_is_kept() {
        for (d, is_rounded) in [(0.0123f32, false), (-0.0123, false), (0.0123, true), (-0.0371, true)] {
            let d = f16::from_f32(d).to_f32();
            let product = |i: usize| d * ((i * 5 % 16) as f32 - 8.0);
            let stored = |v: f32| match is_rounded {
                true => half::bf16::from_f32(v).to_f32(),
                false => f16::from_f32(v).to_f32(),
            };
            let values: Vec<f32> = (0..32).map(|i| stored(product(i))).collect();
            for masses in [None, Some([0.3; 32].as_slice())] {
                let s = fit(&values, masses, 4, false);
                let mut codes = vec![0i8; 32];
                let grid = [anemoe_kernels::ScaleAndZero { scale: s.scale.to_f32(), zero: 0.0 }];
                anemoe_kernels::quantize_linear(Isa::best(), &values, masses, &grid, 4, &mut codes);
                let decoded = codes.iter().map(|&q| stored(s.scale.to_f32() * f32::from(q)));
                assert!(decoded.eq(values.iter().copied()), "{d} {is_rounded}: {s:?}");
            }
        }
    }

    #[test]
    fn zeros_and_extremes_have_a_positive_scale() {
        for v in [vec![0f32; 8], vec![6e-8; 8], vec![65504.0, -65504.0]] {
            for bits in [4, 8] {
                for asymmetric in [false, true] {
                    let s = fit(&v, None, bits, asymmetric);
                    assert!(s.scale > f16::ZERO && s.scale.is_finite(), "{v:?}: {s:?}");
                }
            }
        }
    }
}
