//! MXFP4: 4-bit floats E2M1 that share a power of two.
//!
//! ```text
//! weight = 2^k * MXFP4_TABLE[index]     magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6
//! ```
//!
//! A block that lies on the lattice for any k also lies on it for the k that makes its largest magnitude 4 or 6: up to
//! 6, steps of a coarser lattice are steps of the finer one. So there is one exponent to try.

use anemoe_kernels::MXFP4_TABLE;
use half::f16;

/// Largest exponent: 6 * 2^13 is the last product below the end of fp16.
const LARGEST: i32 = 13;
/// Smallest exponent: 2^-24 is the least fp16.
const SMALLEST: i32 = -24;

/// Returns the k that makes the magnitude 4 or more, and less than 8; for less than the least normal f32, too small a k.
fn finest_exponent(largest: f32) -> i32 {
    ((largest.to_bits() >> 23) & 0xff) as i32 - 127 - 2
}

/// Returns the index of the nearest magnitude, ties to even indices; all above 6 become 6.
fn nearest(magnitude: f32) -> u8 {
    let mut index = u8::from(magnitude > 0.25) + u8::from(magnitude >= 0.75) + u8::from(magnitude > 1.25);
    index += u8::from(magnitude >= 1.75) + u8::from(magnitude > 2.5) + u8::from(magnitude >= 3.5);
    index + u8::from(magnitude > 5.0)
}

/// Tells whether a block lies on the lattice: every value is exactly a power of two, the same for all, times an entry
/// of the table.
pub fn is_exact(block: &[f32]) -> bool {
    let largest = block.iter().fold(0f32, |max, v| max.max(v.abs()));
    let inverse = (-f64::from(finest_exponent(largest))).exp2();
    largest.is_finite()
        && block.iter().all(|v| {
            let magnitude = (f64::from(v.abs()) * inverse) as f32;
            magnitude == MXFP4_TABLE[usize::from(nearest(magnitude))]
        })
}

/// Finds a value of a block that lies on the lattice and that fp16 cannot hold; none for other blocks.
pub(super) fn lost_by_fp16(block: &[f32]) -> Option<f32> {
    // fp16 holds the multiples of 2^-24 below 2^-14, and entries have two significant bits.
    let is_small = |v: &f32| v.abs() < 2f32.powi(SMALLEST + 2) && *v != 0.0;
    if !block.iter().any(is_small) || !is_exact(block) {
        return None;
    }
    block.iter().copied().find(|&v| f16::from_f32(v).to_f32() != v)
}

/// Returns the importance times squared error of a block under `2^exponent`.
fn error(values: &[f32], importance: Option<&[f32]>, exponent: i32) -> f32 {
    let (scale, inverse) = (2f32.powi(exponent), 2f32.powi(-exponent));
    let one = |v: f32| {
        let magnitude = v.abs();
        let error = magnitude - scale * MXFP4_TABLE[usize::from(nearest(magnitude * inverse))];
        error * error
    };
    match importance {
        None => values.iter().map(|&v| one(v)).sum(),
        Some(importance) => values.iter().zip(importance).map(|(&v, m)| m * one(v)).sum(),
    }
}

/// Finds the exponent of the least error: the finest one that holds the largest magnitude, a coarser one, or finer ones.
fn best_exponent(values: &[f32], importance: Option<&[f32]>) -> i32 {
    let largest = values.iter().fold(0f32, |max, v| max.max(v.abs()));
    if largest == 0.0 {
        return 0;
    }
    let finest = finest_exponent(largest).clamp(SMALLEST, LARGEST);
    let mut best = (finest, error(values, importance, finest));
    // Coarser by one, values between 6 and 8 are kept; finer, large values are cut as long as that pays.
    for exponents in [
        &mut (finest + 1..=LARGEST.min(finest + 1)) as &mut dyn Iterator<Item = i32>,
        &mut (SMALLEST..finest).rev(),
    ] {
        for exponent in exponents {
            let error = error(values, importance, exponent);
            if error >= best.1 {
                break;
            }
            best = (exponent, error);
        }
    }
    best.0
}

/// Encodes a block of fp16 values: writes its indices and the values that they stand for, and returns the scale.
pub(super) fn encode(
    values: &[f32],
    importance: Option<&[f32]>,
    indices: &mut [u8],
    decoded: &mut [f32],
) -> f16 {
    let exponent = best_exponent(values, importance);
    let (scale, inverse) = (2f32.powi(exponent), 2f32.powi(-exponent));
    for ((v, index), decoded) in values.iter().zip(indices).zip(decoded) {
        *index = nearest(v.abs() * inverse) | u8::from(v.is_sign_negative()) << 3;
        *decoded = scale * MXFP4_TABLE[usize::from(*index)];
    }
    f16::from_f32(scale)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{KINDS, weights};
    use super::*;
    use proptest::prelude::*;

    fn round_trip(values: &[f32]) -> (Vec<f32>, f16) {
        let (mut indices, mut decoded) = (vec![0; values.len()], vec![0.0; values.len()]);
        let scale = encode(values, None, &mut indices, &mut decoded);
        let of_table = indices.iter().map(|&i| scale.to_f32() * MXFP4_TABLE[usize::from(i)]);
        assert!(of_table.zip(&decoded).all(|(a, b)| a.to_bits() == b.to_bits()));
        (decoded, scale)
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|v| v.to_bits()).collect()
    }

    proptest! {
        #[test]
        fn blocks_of_the_lattice_are_kept_bit_for_bit(
            codes in prop::collection::vec(0usize..16, 1..40), exponent in -23i32..=13,
        ) {
            let block: Vec<f32> = codes.iter().map(|&c| 2f32.powi(exponent) * MXFP4_TABLE[c]).collect();
            prop_assert!(is_exact(&block));
            prop_assert_eq!(lost_by_fp16(&block), None);
            prop_assert_eq!(bits(&round_trip(&block).0), bits(&block));
        }

        #[test]
        fn what_fp16_loses_is_found(codes in prop::collection::vec(0usize..16, 1..40), exponent in -150i32..=-24) {
            let block: Vec<f32> = codes.iter().map(|&c| (f64::from(exponent).exp2() as f32) * MXFP4_TABLE[c]).collect();
            let lost = block.iter().any(|&v| f16::from_f32(v).to_f32() != v);
            prop_assert_eq!(lost_by_fp16(&block).is_some(), lost && is_exact(&block));
            prop_assert!(is_exact(&block) || exponent < -128);
        }

        #[test]
        fn no_power_of_two_has_a_smaller_error(seed in 0u64..200, kind in 0..KINDS) {
            let values: Vec<f32> = weights(seed, 32, kind).iter().map(|&v| f16::from_f32(v).to_f32()).collect();
            let (_, scale) = round_trip(&values);
            let found = error(&values, None, f64::from(scale).log2() as i32);
            for exponent in SMALLEST..=LARGEST {
                prop_assert!(found <= error(&values, None, exponent), "{} for 2^{exponent}", scale);
            }
        }
    }

    #[test]
    fn zeros_keep_their_signs_and_have_a_scale() {
        let (decoded, scale) = round_trip(&[0.0, -0.0, 0.0]);
        assert_eq!((bits(&decoded), scale), (bits(&[0.0, -0.0, 0.0]), f16::ONE));
        let (decoded, _) = round_trip(&[0.0, -0.0, -6.0]);
        assert_eq!(bits(&decoded), bits(&[0.0, -0.0, -6.0]));
    }

    #[test]
    fn the_ends_of_fp16_are_reached_and_not_passed() {
        for block in [[65504.0, -65504.0, 1.0], [2f32.powi(-24), 0.0, 0.0], [-32768.0, 16384.0, 49152.0]] {
            let (decoded, scale) = round_trip(&block);
            assert!(scale > f16::ZERO && scale.is_finite());
            assert!(decoded.iter().all(|&v| f16::from_f32(v).to_f32() == v), "{decoded:?}");
        }
        assert_eq!(round_trip(&[2f32.powi(-24), 0.0]).0, [2f32.powi(-24), 0.0]);
    }

    #[test]
    fn other_values_are_not_on_the_lattice() {
        assert!(is_exact(&[0.5, 3.0, -6.0, 0.0]));
        assert!(is_exact(&[12.0, 2.0]));
        for not in [[1.0, 5.0], [0.25, 6.0], [1.0, 1.1], [f32::INFINITY, 0.0], [f32::NAN, 1.0]] {
            assert!(!is_exact(&not), "{not:?}");
        }
    }
}
