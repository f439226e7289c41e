//! The lattice of GGUF's `q4_0`, on which checkpoints of quantization-aware training lie.
//!
//! ```text
//! weight = d * q,  q in -8 .. 7        d = the value of largest magnitude, with its sign, over -8
//! ```
//!
//! The largest magnitude has q = -8, so d is negative where that value is positive. Stored weights are the products,
//! exactly or rounded to bf16.

use half::{bf16, f16};

/// Steps of fp16 within half a step of bf16, on either side.
const NEIGHBOURS: i32 = 4;
/// Largest distance from an integer that values over d may have, where d is off by half a step of bf16 and so are the
/// products: 8 * 2^-8 each.
const SLACK: f32 = 1.0 / 16.0;

/// Returns the scale with which a block of fp16 values lies on the lattice: `d * q` is each value, or becomes it when it
/// is rounded to bf16. None for other blocks.
pub(super) fn exact_scale(block: &[f32]) -> Option<f16> {
    let extremum = block.iter().fold(0f32, |m, &v| if v.abs() > m.abs() { v } else { m });
    let middle = extremum / -8.0;
    let inverse = 1.0 / middle;
    let is_near = |v: &f32| {
        let q = v * inverse;
        (q - q.round()).abs() <= SLACK && (-8.0 - SLACK..7.0 + SLACK).contains(&q)
    };
    if !inverse.is_finite() || !block.iter().all(is_near) {
        return None;
    }
    let middle = f16::from_f32(middle);
    // Neighbours in fp16 have neighbouring bits.
    let candidates = (0..=2 * NEIGHBOURS).map(|i| match i % 2 {
        0 => i / 2,
        _ => -(i + 1) / 2,
    });
    let candidates =
        candidates.filter_map(|step| Some(f16::from_bits(middle.to_bits().checked_add_signed(step as i16)?)));
    let candidates = candidates.filter(|d| d.is_finite() && *d != f16::ZERO);
    let error = |d: f16| -> Option<f32> {
        let d = d.to_f32();
        let of = |v: &f32| {
            let product = (v / d).round() * d;
            let half = f16::from_f32(product).to_f32();
            let is_exact = half == *v || f16::from_f32(bf16::from_f32(product).to_f32()).to_f32() == *v;
            is_exact.then_some((half - v) * (half - v))
        };
        block.iter().map(of).sum()
    };
    let found = candidates.filter_map(|d| Some((d, error(d)?))).min_by(|a, b| a.1.total_cmp(&b.1));
    found.map(|(d, _)| d)
}

/// Replaces a row by what GGUF's `q4_0` makes of it, in blocks of 32 inputs.
pub fn round_trip(row: &mut [f32]) {
    for block in row.chunks_mut(32) {
        let extremum = block.iter().fold(0f32, |m, &v| if v.abs() > m.abs() { v } else { m });
        let scale = extremum / -8.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let stored = f16::from_f32(scale).to_f32();
        block.iter_mut().for_each(|v| *v = stored * ((*v * inverse + 8.5).floor().clamp(0.0, 15.0) - 8.0));
    }
}

/// Tells whether a block lies on the lattice, see the head of this file.
pub fn is_exact(block: &[f32]) -> bool {
    exact_scale(block).is_some() || block.iter().all(|&v| v == 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_trip_keeps_the_lattice_and_the_extremum() {
        let mut row: Vec<f32> = (0..64).map(|i| 0.5 * (i % 16 - 8) as f32).collect();
        let lattice = row.clone();
        round_trip(&mut row);
        assert_eq!(row, lattice);
        // The extremum is -8 steps of 0.125; half a step rounds up.
        let mut row = vec![1.0, 0.0625, -0.06, 0.9];
        round_trip(&mut row);
        assert_eq!(row, [1.0, 0.0, 0.0, 0.875]);
        let mut zeros = vec![0.0; 3];
        round_trip(&mut zeros);
        assert_eq!(zeros, [0.0; 3]);
    }
    use proptest::prelude::*;

    /// Makes a block as quantization does: its largest magnitude has q = -8.
    fn block(codes: &[i32], d: f32) -> Vec<f32> {
        let mut codes = codes.to_vec();
        codes[0] = -8;
        codes.iter().map(|&q| q as f32 * d).collect()
    }

    proptest! {
        #[test]
        fn exact_products_are_found(
            codes in prop::collection::vec(-8i32..8, 2..33), bits in 0x0400u16..0x6000, negative in any::<bool>(),
        ) {
            let d = f16::from_bits(bits | u16::from(negative) << 15);
            let values: Vec<f32> =
                block(&codes, d.to_f32()).iter().map(|&v| f16::from_f32(v).to_f32()).collect();
            let found = exact_scale(&values).expect("a scale").to_f32();
            for v in values {
                prop_assert_eq!(f16::from_f32((v / found).round() * found).to_f32(), v);
            }
        }

        #[test]
        fn products_rounded_to_bf16_are_found(
            codes in prop::collection::vec(-8i32..8, 2..33), bits in 0x1400u16..0x6000, negative in any::<bool>(),
        ) {
            let d = f16::from_bits(bits | u16::from(negative) << 15).to_f32();
            let values: Vec<f32> = block(&codes, d).iter().map(|&v| bf16::from_f32(v).to_f32()).collect();
            let found = exact_scale(&values).expect("a scale").to_f32();
            for v in values {
                prop_assert_eq!(bf16::from_f32((v / found).round() * found).to_f32(), v);
            }
        }

        #[test]
        fn random_blocks_are_not_on_the_lattice(seed in 0u64..500, kind in 0usize..3) {
            let values: Vec<f32> =
                super::super::testing::weights(seed, 32, kind).iter().map(|&v| f16::from_f32(v).to_f32()).collect();
            prop_assert!(!is_exact(&values));
        }
    }

    #[test]
    fn zeros_have_no_scale_and_lie_on_every_lattice() {
        assert_eq!(exact_scale(&[0.0; 32]), None);
        assert!(is_exact(&[0.0; 32]));
        assert!(!is_exact(&[1.0, 0.77]));
    }
}
