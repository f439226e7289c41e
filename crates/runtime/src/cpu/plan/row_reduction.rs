//! Reductions of rows.

use super::view::StridedLoops;

#[derive(Clone, Copy)]
pub(super) enum Reduction {
    Max,
    Min,
    Sum,
    Mean,
}

/// Each row's elements, of which there are n, in the order of `inner`.
pub(super) fn reduce(
    kind: Reduction,
    rows: &StridedLoops<2>,
    inner: &StridedLoops<1>,
    n: usize,
    x: &[f32],
    y: &mut [f32],
) {
    let sum = |a: f32, b: f32| a + b;
    match kind {
        Reduction::Max => reduce_by(rows, inner, x, y, f32::NEG_INFINITY, f32::max),
        Reduction::Min => reduce_by(rows, inner, x, y, f32::INFINITY, f32::min),
        Reduction::Sum => reduce_by(rows, inner, x, y, 0.0, sum),
        Reduction::Mean => {
            reduce_by(rows, inner, x, y, 0.0, sum);
            rows.each(|[o, _], m, s| (0..m).for_each(|i| y[o + i * s[0]] /= n as f32));
        }
    }
}

/// Rows that lie beside each other are worth one pass for each element.
const BESIDE: usize = 8;

#[inline(always)]
fn reduce_by(
    rows: &StridedLoops<2>,
    inner: &StridedLoops<1>,
    x: &[f32],
    y: &mut [f32],
    first: f32,
    f: impl Fn(f32, f32) -> f32 + Copy,
) {
    rows.each(|[o, a], m, s| {
        let x = &x[a..];
        if *s == [1, 1] && m >= BESIDE {
            let y = &mut y[o..o + m];
            y.fill(first);
            return inner.each(|[a], n, s| {
                for k in 0..n {
                    y.iter_mut().zip(&x[a + k * s[0]..][..m]).for_each(|(y, x)| *y = f(*y, *x));
                }
            });
        }
        for i in 0..m {
            let (x, mut v) = (&x[i * s[1]..], first);
            inner.each(|[a], n, s| (0..n).for_each(|k| v = f(v, x[a + k * s[0]])));
            y[o + i * s[0]] = v;
        }
    });
}
