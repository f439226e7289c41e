//! Ops that draw numbers: `random_uniform`, `random_normal`, `random_bernoulli`, `random_categorical`.
//!
//! Numbers are those of SplitMix64 ([`anemoe_io::Random`]), not Core ML's, whose generator is not published. A seed gives the same
//! numbers in every call and on every machine; without one (-1), each call of a process draws the next numbers.

use super::operands::{OpContext, OpResult};
use super::shape::{count, invalid};
use crate::tensor::Tensor;
use anemoe_io::Random;
use std::sync::atomic::{AtomicU64, Ordering};

/// Calls without a seed so far.
static UNSEEDED: AtomicU64 = AtomicU64::new(0);

/// Makes the generator of a call.
fn generator(c: &OpContext<'_>) -> OpResult<Random> {
    let seed = match c.int("seed", -1)? {
        -1 => UNSEEDED.fetch_add(1, Ordering::Relaxed) | 1 << 32,
        seed => u64::from(seed as u32),
    };
    // Neighbouring seeds are states that follow each other; one draw takes them apart.
    Ok(Random::new(Random::new(seed).bits()))
}

pub(super) fn distribution(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let shape = c.arg("shape").and_then(|_| c.sizes("shape"))?.unwrap_or_default();
    count(&shape)?;
    let mut random = generator(c)?;
    let y = out[0].reset_f32(&shape);
    match c.op {
        "random_uniform" => {
            let (low, high) = (c.float("low", 0.0)?, c.float("high", 1.0)?);
            for y in y {
                let v = low + (high - low) * random.uniform() as f32;
                // Rounding may reach the upper end, which is not in the range.
                *y = if v < high { v } else { low };
            }
        }
        "random_normal" => {
            let (mean, deviation) = (f64::from(c.float("mean", 0.0)?), f64::from(c.float("stddev", 1.0)?));
            for pair in y.chunks_mut(2) {
                // Box and Muller, 1958.
                let radius = deviation * (-2.0 * (1.0 - random.uniform()).ln()).sqrt();
                let angle = std::f64::consts::TAU * random.uniform();
                let both = [angle.cos(), angle.sin()];
                pair.iter_mut().zip(both).for_each(|(y, v)| *y = (mean + radius * v) as f32);
            }
        }
        _ => {
            let p = f64::from(c.float("prob", 0.5)?);
            y.iter_mut().for_each(|y| *y = f32::from(u8::from(random.uniform() < p)));
        }
    }
    Ok(())
}

/// Draws `size` classes of each row of logits or probabilities.
pub(super) fn categorical(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let values = c.exact_numbers("x")?;
    let Some((&classes, outer)) = x.shape.split_last().filter(|(n, _)| **n > 0) else {
        return invalid(format!("input of shape {:?}: no classes", x.shape));
    };
    let draws = c.size("size", 1)?;
    let logits = match c.str("mode", "logits")? {
        "logits" => true,
        "probs" => false,
        other => return invalid(format!("mode `{other}`")),
    };
    let mut shape = outer.to_vec();
    shape.push(draws);
    count(&shape)?;
    let mut random = generator(c)?;
    let y = out[0].reset_f32(&shape);
    for (row, y) in values.chunks_exact(classes).zip(y.chunks_exact_mut(draws.max(1))) {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut sum = 0.0;
        let weight = |&v: &f64| if logits { (v - max).exp() } else { v.max(0.0) };
        let upper: Vec<f64> = row
            .iter()
            .map(|v| {
                sum += weight(v);
                sum
            })
            .collect();
        for y in y {
            let at = random.uniform() * sum;
            *y = upper.partition_point(|&u| u <= at).min(classes - 1) as f32;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Data;

    fn run(function: super::super::OpFunction, op: &str, inputs: &[(&str, Tensor)]) -> OpResult<Vec<f32>> {
        let bound: Vec<(&str, &Tensor)> = inputs.iter().map(|(n, t)| (*n, t)).collect();
        let mut out = [Tensor::default()];
        function(&OpContext { op, inputs: &bound, values: &[], outputs: &[] }, &mut out)?;
        Ok(out[0].as_f32().unwrap().to_vec())
    }

    fn moments(v: &[f32]) -> (f64, f64) {
        let n = v.len() as f64;
        let mean = v.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        (mean, (v.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n).sqrt())
    }

    #[test]
    fn distributions_have_their_moments_and_seeds_repeat() {
        let shape = ("shape", Tensor::i32(&[2], vec![100, 500]));
        let number = |v: f32| Tensor::f32(&[], vec![v]);
        let seed = |v: i32| ("seed", Tensor::i32(&[], vec![v]));
        let close = |found: (f64, f64), expected: (f64, f64)| {
            assert!((found.0 - expected.0).abs() < 0.03 && (found.1 - expected.1).abs() < 0.03, "{found:?}");
        };
        let uniform = |with| {
            run(
                distribution,
                "random_uniform",
                &[shape.clone(), ("low", number(1.0)), ("high", number(3.0)), with],
            )
            .unwrap()
        };
        let a = uniform(seed(7));
        assert!(a.iter().all(|v| (1.0..3.0).contains(v)));
        close(moments(&a), (2.0, 1.0 / 3f64.sqrt()));
        assert_eq!(a, uniform(seed(7)));
        assert_ne!(a, uniform(seed(8)));
        assert_ne!(uniform(seed(-1)), uniform(seed(-1)));
        let normal = [shape.clone(), ("mean", number(-1.0)), ("stddev", number(2.0)), seed(1)];
        close(moments(&run(distribution, "random_normal", &normal).unwrap()), (-1.0, 2.0));
        let flips = run(distribution, "random_bernoulli", &[shape, ("prob", number(0.2)), seed(1)]).unwrap();
        close(moments(&flips), (0.2, 0.4));
    }

    #[test]
    fn classes_come_as_often_as_they_are_probable() {
        let rows = Tensor::f32(&[2, 3], vec![0.2, 0.5, 0.3, 0.0, 0.0, 1.0]);
        let size = ("size", Tensor::i32(&[], vec![20000]));
        let probabilities = Tensor { shape: vec![], data: Data::Str(vec!["probs".into()]) };
        let y = run(categorical, "", &[("x", rows), size.clone(), ("mode", probabilities)]).unwrap();
        let share = |v: &[f32], k: f32| v.iter().filter(|&&v| v == k).count() as f64 / v.len() as f64;
        assert!((share(&y[..20000], 1.0) - 0.5).abs() < 0.02);
        assert_eq!(share(&y[20000..], 2.0), 1.0);
        let logits = Tensor::f32(&[2], vec![0.0, 3f32.ln()]);
        let y = run(categorical, "", &[("x", logits), size]).unwrap();
        assert!((share(&y, 1.0) - 0.75).abs() < 0.02);
    }
}
