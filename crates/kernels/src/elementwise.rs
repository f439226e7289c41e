//! Functions of elements and of pairs of elements: gates, activations, soft cap and exponentials.

use crate::simd::*;

/// Returns `e^x` to about 2 units in the last place; 0 below -87.
///
/// ```text
/// n = round(x / ln 2),  r = x - n ln 2,  e^x = 2^n (1 + r + r^2 p(r))      p of degree 5, coefficients of Cephes
/// ```
#[inline(always)]
pub(crate) fn exp<L: F32x16>(x: L) -> L {
    // NaN as the second operand of max and min stays NaN.
    let low = L::splat(-87.3);
    let bounded = low.max(L::splat(88.7).min(x));
    let n = L::splat(127.0).min(bounded.mul(L::splat(std::f32::consts::LOG2_E)).round());
    let r = n.neg_mul_add(L::splat(0.693_359_4), bounded);
    let r = n.neg_mul_add(L::splat(-2.121_944_4e-4), r);
    let mut p = L::splat(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p.mul_add(r, L::splat(c));
    }
    let e = p.mul_add(r.mul(r), r).add(L::splat(1.0)).mul(n.power_of_two());
    x.if_below(low, L::splat(0.0), e)
}

/// Factors a and b of `x * sigmoid(x (a + b x^2))`: `2 sqrt(2/pi)` and `0.044715 * 2 sqrt(2/pi)`, rounded to fp16.
pub const GELU_FP16: [f32; 2] = [1.595_703_1, 0.071_350_1];

/// Names the activation of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationFunction {
    /// GELU with the error function.
    Gelu,
    /// GELU in its tanh form.
    GeluTanh,
    /// `x * sigmoid(x (a + b x^2))` with a and b of [`GELU_FP16`]: the tanh form with factors rounded to fp16.
    GeluFp16,
    /// `x * sigmoid(1.702 x)`
    GeluSigmoid,
    /// `x * sigmoid(x)`
    Silu,
}

impl ActivationFunction {
    /// Returns the activation that a `mode` of the op `gelu` names; none where it names none.
    pub fn of_gelu(mode: &str) -> Option<ActivationFunction> {
        match mode {
            "EXACT" => Some(ActivationFunction::Gelu),
            "TANH_APPROXIMATION" => Some(ActivationFunction::GeluTanh),
            "SIGMOID_APPROXIMATION" => Some(ActivationFunction::GeluSigmoid),
            _ => None,
        }
    }
}

/// Names the function that joins the halves of a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GateFunction {
    /// `activation(gate) * up`
    Product(ActivationFunction),
    /// `g sigmoid(steepness g) (u + 1)` with `g = min(gate, limit)` and u, which is `up` within `limit` of zero.
    Clamped {
        /// Largest gate, and largest magnitude of the other half.
        limit: f32,
        /// Factor in the sigmoid.
        steepness: f32,
    },
}

/// Computes `erfc(z)` for `z >= 0` within 2e-7 (Abramowitz and Stegun, formula 7.1.26).
#[inline(always)]
fn erfc<L: F32x16>(z: L) -> L {
    let one = L::splat(1.0);
    let t = one.div(z.mul(L::splat(0.327_591_1)).add(one));
    let mut p = L::splat(1.061_405_4);
    for c in [-1.453_152, 1.421_413_8, -0.284_496_74, 0.254_829_6] {
        p = p.mul_add(t, L::splat(c));
    }
    p.mul(t).mul(exp(z.mul(z).mul(L::splat(-1.0))))
}

/// Computes the activation of a gate, mostly as `x * sigmoid(u)`; the tanh form has `(1 + tanh u) / 2 = sigmoid(2 u)`.
#[inline(always)]
fn activate<L: F32x16>(x: L, gate: ActivationFunction) -> L {
    let u = match gate {
        ActivationFunction::Silu => x,
        ActivationFunction::Gelu => {
            let z = x.max(x.mul(L::splat(-1.0))).mul(L::splat(std::f32::consts::FRAC_1_SQRT_2));
            let tail = erfc(z).mul(L::splat(0.5));
            return x.mul(x.if_below(L::splat(0.0), tail, tail.neg_mul_add(L::splat(1.0), L::splat(1.0))));
        }
        ActivationFunction::GeluSigmoid => x.mul(L::splat(1.702)),
        ActivationFunction::GeluTanh => {
            let square = x.mul(x);
            let inner = square.mul(L::splat(0.044_715)).add(L::splat(1.0));
            x.mul(inner).mul(L::splat(2.0 * 0.797_884_6))
        }
        ActivationFunction::GeluFp16 => {
            let [linear, cubic] = GELU_FP16;
            x.mul(x).mul(L::splat(cubic)).add(L::splat(linear)).mul(x)
        }
    };
    let e = exp(u.mul(L::splat(-1.0)));
    x.div(e.add(L::splat(1.0)))
}

/// Loads sixteen elements from `i` on; zeros follow the end of `v`.
#[inline(always)]
pub(crate) fn get<L: F32x16>(v: &[f32], i: usize) -> L {
    match v.get(i..i + LANES).and_then(|v| v.try_into().ok()) {
        Some(v) => L::load(v),
        None => {
            let mut rest = [0f32; LANES];
            rest[..v.len() - i].copy_from_slice(&v[i..]);
            L::load(&rest)
        }
    }
}

#[inline(always)]
pub(crate) fn put<L: F32x16>(out: &mut [f32], i: usize, v: L) {
    match out.get_mut(i..i + LANES).and_then(|o| o.try_into().ok()) {
        Some(out) => v.store(out),
        None => {
            let mut rest = [0f32; LANES];
            v.store(&mut rest);
            let n = out.len() - i;
            out[i..].copy_from_slice(&rest[..n]);
        }
    }
}

#[inline(always)]
fn gated_on<L: F32x16>(gate: &[f32], up: &[f32], factor: f32, f: GateFunction, out: &mut [f32]) {
    let n = out.len();
    let (gate, up) = (&gate[..n], &up[..n]);
    match f {
        GateFunction::Product(kind) => {
            for i in (0..n).step_by(LANES) {
                let v = activate::<L>(get(gate, i), kind).mul(get(up, i)).mul(L::splat(factor));
                put(out, i, v);
            }
        }
        GateFunction::Clamped { limit, steepness } => {
            // NaN as the second operand of max and min stays NaN.
            let (most, least, one) = (L::splat(limit), L::splat(-limit), L::splat(1.0));
            for i in (0..n).step_by(LANES) {
                let gate = most.min(get(gate, i));
                let e = exp(gate.mul(L::splat(-steepness)));
                let up = least.max(most.min(get(up, i))).add(one);
                put(out, i, gate.div(e.add(one)).mul(up).mul(L::splat(factor)));
            }
        }
    }
}

simd_fn! {
    /// Computes `out = f(gate, up) * factor`; slices are at least as long as `out`.
    ///
    /// # Panics
    /// A slice is shorter than `out`.
    pub fn apply_gate(gate: &[f32], up: &[f32], factor: f32, f: GateFunction, out: &mut [f32]) = gated_on
}

/// Defines a function that replaces each vector of `x`; the last vector is filled with zeros.
macro_rules! map_fn {
    ($(#[$doc:meta])* $vis:vis fn $name:ident(x $(, $arg:ident: $ty:ty)*) = $on:ident, |$v:ident: $l:ident| $result:expr) => {
        #[inline(always)]
        fn $on<$l: F32x16>(x: &mut [f32] $(, $arg: $ty)*) {
            for i in (0..x.len()).step_by(LANES) {
                let $v = get::<$l>(x, i);
                put(x, i, $result);
            }
        }
        simd_fn! { $(#[$doc])* $vis fn $name(x: &mut [f32] $(, $arg: $ty)*) = $on }
    };
}

map_fn! {
    /// Computes `x = activation(x)`.
    pub fn apply_activation(x, kind: ActivationFunction) = activated_on, |v: L| activate(v, kind)
}

map_fn! {
    /// Computes `x = 1 / (1 + e^-x)`.
    pub fn apply_sigmoid(x) = sigmoid_on, |v: L| L::splat(1.0).div(exp(v.mul(L::splat(-1.0))).add(L::splat(1.0)))
}

map_fn! {
    /// Computes `x = cap * tanh(x / cap)`.
    pub fn softcap(x, cap: f32) = softcap_on, |v: L| {
        // tanh u = 1 - 2 / (e^2u + 1)
        let e = exp(v.mul(L::splat(2.0 / cap)));
        let t = L::splat(2.0).div(e.add(L::splat(1.0))).neg_mul_add(L::splat(1.0), L::splat(1.0));
        t.mul(L::splat(cap))
    }
}

map_fn! {
    /// Computes `x = min(max(x, low), high)`; as the second operand of max and min NaN stays NaN, as in Apple's kernels. A `low` of 0
    /// makes -0 to 0; adding -0 changes nothing.
    pub fn clamp(x, low: f32, high: f32) = clamp_on, |v: L| {
        L::splat(high).min(L::splat(low).max(v)).add(L::splat(if low == 0.0 { 0.0 } else { -0.0 }))
    }
}

map_fn! {
    /// Computes `x = slope x` where x is below zero.
    pub fn leaky_relu(x, slope: f32) = leaky_relu_on, |v: L| v.if_below(L::splat(0.0), v.mul(L::splat(slope)), v)
}

/// Names an operation on pairs of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairFunction {
    /// `x + y`
    Add,
    /// `x - y`
    Sub,
    /// `x y`
    Mul,
    /// `x / y`
    Div,
}

#[inline(always)]
fn pair_on<L: F32x16>(x: &mut [f32], y: &[f32], f: PairFunction) {
    let y = &y[..x.len()];
    for i in (0..x.len()).step_by(LANES) {
        let (a, b) = (get::<L>(x, i), get::<L>(y, i));
        let v = match f {
            PairFunction::Add => a.add(b),
            PairFunction::Sub => a.add(b.mul(L::splat(-1.0))),
            PairFunction::Mul => a.mul(b),
            PairFunction::Div => a.div(b),
        };
        put(x, i, v);
    }
}

simd_fn! {
    /// Computes `x = f(x, y)` for each pair of elements.
    ///
    /// # Panics
    /// `y` is shorter than `x`.
    pub fn apply_pair(x: &mut [f32], y: &[f32], f: PairFunction) = pair_on
}

simd_fn! {
    /// Computes the dot products of `a` and each row of `b`, `[out.len(), a.len()]`: sixteen lanes, each rounded after each product
    /// and sum, are added from the first to the last, and then the rest of the row.
    ///
    /// # Panics
    /// `b` is shorter.
    pub fn dot_products(a: &[f32], b: &[f32], out: &mut [f32]) = dot_products_on
}

#[inline(always)]
fn dot_products_on<L: F32x16>(a: &[f32], b: &[f32], out: &mut [f32]) {
    let k = a.len();
    let (a_main, a_rest) = a.as_chunks::<LANES>();
    for (j, out) in out.chunks_mut(LANES).enumerate() {
        let b = &b[j * LANES * k..][..out.len() * k];
        let mut lanes = [L::splat(0.0); LANES];
        for (i, lanes) in lanes.iter_mut().enumerate().take(out.len()) {
            let row = b[i * k..(i + 1) * k].as_chunks::<LANES>().0;
            for (x, y) in a_main.iter().zip(row) {
                *lanes = lanes.add(L::load(x).mul(L::load(y)));
            }
        }
        let mut sums = L::splat(0.0);
        for lane in L::transpose(lanes) {
            sums = sums.add(lane);
        }
        let mut all = [0.0; LANES];
        sums.store(&mut all);
        for (i, out) in out.iter_mut().enumerate() {
            let rest = a_rest.iter().zip(&b[(i + 1) * k - a_rest.len()..]);
            *out = all[i] + rest.map(|(x, y)| x * y).sum::<f32>();
        }
    }
}

/// Returns the largest element; skips NaN.
#[inline(always)]
pub(crate) fn largest<L: F32x16>(x: &[f32]) -> f32 {
    let mut largest = L::splat(f32::NEG_INFINITY);
    let n = x.len() / LANES * LANES;
    for i in (0..n).step_by(LANES) {
        // NaN as the first operand of max is dropped.
        largest = get::<L>(x, i).max(largest);
    }
    let mut lanes = [0f32; LANES];
    largest.store(&mut lanes);
    lanes.iter().chain(&x[n..]).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// Computes `x = e^(x - from)` in place. Returns the sum of the results.
#[inline(always)]
pub(crate) fn exp_from<L: F32x16>(x: &mut [f32], from: f32) -> f32 {
    let mut total = L::splat(0.0);
    for i in (0..x.len()).step_by(LANES) {
        let e = exp(get::<L>(x, i).add(L::splat(-from)));
        put(x, i, e);
        total = total.add(get(x, i));
    }
    total.horizontal_sum()
}

simd_fn! {
    /// Computes `x = e^(x - from)` in place. Returns the sum of the results.
    pub fn exp_and_sum_from(x: &mut [f32], from: f32) -> f32 = exp_from
}

simd_fn! {
    /// Returns the largest element; skips NaN. Negative infinity where there is none.
    pub fn largest_element(x: &[f32]) -> f32 = largest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dot_products_add_lanes_in_order() {
        let values = crate::test_data::noise(1, 40 * 71);
        for (k, n) in [(64, 21), (71, 16), (7, 3), (0, 2)] {
            let (a, b) = (&values[..k], &values[k..(n + 1) * k]);
            let mut found = vec![f32::NAN; n];
            dot_products(a, b, &mut found);
            for (j, v) in found.iter().enumerate() {
                let row = &b[j * k..(j + 1) * k];
                let mut lanes = [0f32; 16];
                let main = k / 16 * 16;
                (0..main).for_each(|i| lanes[i % 16] += a[i] * row[i]);
                let rest: f32 = (main..k).map(|i| a[i] * row[i]).sum();
                assert_eq!(*v, lanes.iter().sum::<f32>() + rest, "{k} {n}");
            }
        }
    }

    #[test]
    fn functions_are_those_of_f64() {
        let x: Vec<f32> = (-4000..4000).map(|i| i as f32 * 0.005 + 0.001).collect();
        let close = |a: f32, b: f64, what: &str, x: f32| {
            assert!((f64::from(a) - b).abs() <= 3e-6 * b.abs().max(1.0), "{what}({x}): {a}, expected {b}");
        };
        for (kind, f) in [
            (ActivationFunction::Silu, (|v| v / (1.0 + (-v).exp())) as fn(f64) -> f64),
            (ActivationFunction::Gelu, |v| 0.5 * v * libm::erfc(-v * std::f64::consts::FRAC_1_SQRT_2)),
            (ActivationFunction::GeluSigmoid, |v| v / (1.0 + (-1.702 * v).exp())),
            (ActivationFunction::GeluTanh, |v| {
                0.5 * v * (1.0 + (0.797_884_560_8 * (v + 0.044_715 * v * v * v)).tanh())
            }),
            (ActivationFunction::GeluFp16, |v| {
                v / (1.0 + (-v * (1.595_703_125 + 0.071_350_097_656_25 * v * v)).exp())
            }),
        ] {
            let mut y = x.clone();
            apply_activation(&mut y, kind);
            let ones = vec![1f32; x.len()];
            let mut z = vec![0f32; x.len() - 3];
            apply_gate(&x, &ones, 2.0, GateFunction::Product(kind), &mut z);
            for (i, v) in x.iter().enumerate() {
                close(y[i], f(f64::from(*v)), "activation", *v);
            }
            z.iter().zip(&x).for_each(|(z, v)| close(*z, 2.0 * f(f64::from(*v)), "apply_gate", *v));
        }
        let mut z = vec![0f32; x.len() - 3];
        let up: Vec<f32> = x.iter().rev().map(|v| 0.7 * v).collect();
        apply_gate(&x, &up, 0.5, GateFunction::Clamped { limit: 7.0, steepness: 1.702 }, &mut z);
        for ((z, g), u) in z.iter().zip(&x).zip(&up) {
            let (v, u) = (f64::from(*g).min(7.0), f64::from(*u).clamp(-7.0, 7.0));
            close(*z, 0.5 * v / (1.0 + (-f64::from(1.702f32) * v).exp()) * (u + 1.0), "clamped gate", *g);
        }
        let mut y = x.clone();
        apply_sigmoid(&mut y);
        y.iter().zip(&x).for_each(|(y, v)| close(*y, 1.0 / (1.0 + (-f64::from(*v)).exp()), "sigmoid", *v));
        y.clone_from(&x);
        softcap(&mut y, 5.0);
        y.iter().zip(&x).for_each(|(y, v)| close(*y, 5.0 * (f64::from(*v) / 5.0).tanh(), "softcap", *v));
        let mut y = x.clone();
        let sum = exp_and_sum_from(&mut y, largest_element(&x));
        let largest = f64::from(*x.last().unwrap());
        let expected: f64 = x.iter().map(|v| (f64::from(*v) - largest).exp()).sum();
        close(sum, expected, "sum", 0.0);
        y.clone_from(&x);
        clamp(&mut y, 0.0, 6.0);
        assert!(y.iter().zip(&x).all(|(y, v)| *y == v.clamp(0.0, 6.0)));
        let mut lost = [f32::NAN; 19];
        clamp(&mut lost, 0.0, 6.0);
        assert!(lost.iter().all(|y| y.is_nan()));
        let mut zeros = [-0.0; 19];
        clamp(&mut zeros, -1.0, 6.0);
        assert!(zeros.iter().all(|y| *y == 0.0 && y.is_sign_negative()));
        clamp(&mut zeros, 0.0, 6.0);
        assert!(zeros.iter().all(|y| *y == 0.0 && y.is_sign_positive()));
        y.clone_from(&x);
        leaky_relu(&mut y, 0.1);
        assert!(y.iter().zip(&x).all(|(y, v)| *y == if *v < 0.0 { 0.1 * v } else { *v }));
        for (f, expected) in [
            (PairFunction::Add, (|a, b| a + b) as fn(f32, f32) -> f32),
            (PairFunction::Sub, |a, b| a - b),
            (PairFunction::Mul, |a, b| a * b),
            (PairFunction::Div, |a, b| a / b),
        ] {
            y.clone_from(&x);
            apply_pair(&mut y[..33], &up, f);
            assert!(y[..33].iter().zip(x.iter().zip(&up)).all(|(y, (a, b))| *y == expected(*a, *b)), "{f:?}");
        }
        let mut extreme = [-1e9, -100.0, 0.0, f32::NAN];
        exp_and_sum_from(&mut extreme[..3], 0.0);
        assert_eq!(extreme[..3], [0.0, 0.0, 1.0]);
        apply_activation(&mut extreme[3..], ActivationFunction::Silu);
        assert!(extreme[3].is_nan());
    }
}
