//! Transposed convolution over 1 to 3 spatial axes: products of weights and positions, added up where their taps fall.
//!
//! ```text
//! weight [channels, outputs * taps], x [channels, positions]
//! terms  [outputs * taps, positions] = weight^T x               one product per group and block of positions
//! y      [outputs, ..]               = sum of terms over taps   the element of tap t at position p is that which
//!                                                               a convolution's window p reads with its tap t
//! ```
//! A group of few channels has no product: its inputs times their weights are added up at once.

use super::image::to_channels_last;
use super::operands::{OpContext, OpError, OpResult};
use super::shape::{count, invalid};
use super::window::{custom_padding, per_axis, window_of};
use crate::tensor::Tensor;
use anemoe_kernels::{Conv, Image, Matrix, Pool, Window};
use std::ops::Range;

/// Fewest channels of a group for which a product pays.
const MIN_CHANNELS: usize = 8;
/// Most terms that are kept at a time, 16 MB of f32; few in tests, so that blocks end within rows.
const MAX_TERMS: usize = if cfg!(test) { 200 } else { 4 << 20 };

pub(super) fn conv_transpose(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let ((xs, x), (ws, w)) = (c.f32s("x")?, c.f32s("weight")?);
    if xs.len() < 3 || xs.len() > 5 || ws.len() != xs.len() {
        return invalid(format!("input of shape {xs:?} with a weight of shape {ws:?}"));
    }
    let groups = usize::try_from(c.int("groups", 1)?).unwrap_or(0);
    let (batch, channels, per_group) = (xs[0], xs[1], ws[1]);
    if groups == 0 || channels % groups != 0 || ws[0] != channels {
        return invalid(format!("{channels} channels in {groups} groups with a weight of shape {ws:?}"));
    }
    let outputs = per_group * groups;
    let bias = c.get("bias").and_then(Tensor::as_f32);
    if bias.is_some_and(|b| b.len() != outputs) {
        return invalid(format!("bias for {outputs} output channels"));
    }
    let (window, sizes) = adjoint_window(c, &xs[2..], &ws[2..])?;
    let mut shape = vec![batch, outputs];
    shape.extend(&sizes);
    count(&shape)?;
    let y = out[0].reset_f32(&shape);
    let plane: usize = sizes.iter().product();
    if y.is_empty() {
        return Ok(());
    }
    Pool::global().for_chunks(y, plane, &|i, y| y.fill(bias.map_or(0.0, |b| b[i % outputs])));
    let (n, taps) = (window.positions(), window.taps());
    if n == 0 || channels == 0 || taps == 0 {
        return Ok(());
    }
    let own = channels / groups;
    for (x, y) in x.chunks_exact(channels * n).zip(y.chunks_exact_mut(outputs * plane)) {
        if own < MIN_CHANNELS {
            Pool::global().for_chunks(y, plane, &|o, y| {
                let (group, o) = (o / per_group, o % per_group);
                for ch in group * own..(group + 1) * own {
                    let weights = &w[(ch * per_group + o) * taps..][..taps];
                    let x = &x[ch * n..][..n];
                    each_tap(&window, |tap, t| add_terms(&window, tap, 0..n, x, weights[t], y));
                }
            });
            continue;
        }
        for group in 0..groups {
            let x = &x[group * own * n..][..own * n];
            let w = &w[group * own * per_group * taps..][..own * per_group * taps];
            let y = &mut y[group * per_group * plane..][..per_group * plane];
            add_products(&window, (own, per_group), (x, w), y)?;
        }
    }
    Ok(())
}

/// Adds the products of a group with `(channels, outputs)`: x `[channels, positions]`, w `[channels, outputs * taps]`, y
/// `[outputs, ..]`.
fn add_products(
    window: &Window,
    (channels, outputs): (usize, usize),
    (x, w): (&[f32], &[f32]),
    y: &mut [f32],
) -> OpResult {
    let (n, taps) = (window.positions(), window.taps());
    let rows = outputs * taps;
    let mut positions_first = Vec::new();
    to_channels_last(n, channels, x, &mut positions_first);
    let weights = Image { values: w, first: 0, batch: 1, channels, strides: [w.len(), rows, rows, rows, 1] };
    let one = [1; 3];
    let flat = Window {
        size: [1, 1, rows],
        out: [1, 1, rows],
        kernel: one,
        strides: one,
        dilations: one,
        before: [0; 3],
    };
    let block = (MAX_TERMS / rows).max(1).min(n);
    let mut terms = vec![0.0; rows * block];
    for first in (0..n).step_by(block) {
        let positions = first..n.min(first + block);
        let x = &positions_first[first * channels..positions.end * channels];
        let x = Matrix::f32(x, positions.len(), channels).map_err(|e| OpError::Invalid(e.to_string()))?;
        let terms = &mut terms[..rows * positions.len()];
        let mut product = Conv { w: x, groups: 1, window: &flat, x: weights, y: terms, bias: None };
        anemoe_kernels::conv(Pool::global(), &mut product);
        let (terms, plane) = (&*terms, y.len() / outputs);
        Pool::global().for_chunks(y, plane, &|o, y| {
            each_tap(window, |tap, t| {
                let terms = &terms[(o * taps + t) * positions.len()..][..positions.len()];
                add_terms(window, tap, positions.clone(), terms, 1.0, y);
            });
        });
    }
    Ok(())
}

/// Returns the windows of the convolution that this one transposes: they read what it writes. Also returns the sizes of
/// the result.
fn adjoint_window(c: &OpContext<'_>, spatial: &[usize], kernel: &[usize]) -> OpResult<(Window, Vec<usize>)> {
    let n = spatial.len();
    let (strides, dilations) = (per_axis(c, "strides", n)?, per_axis(c, "dilations", n)?);
    let full = |i: usize| (spatial[i].max(1) - 1) * strides[i] + (kernel[i].max(1) - 1) * dilations[i] + 1;
    let wanted = match c.ints("output_shape")? {
        None => None,
        Some(shape) => {
            let tail = shape.len().checked_sub(n).and_then(|s| shape.get(s..));
            let sizes: Option<Vec<usize>> =
                tail.and_then(|tail| tail.iter().map(|&size| usize::try_from(size).ok()).collect());
            let wrong = || OpError::Invalid(format!("parameter `output_shape`: {shape:?} for {n} axes"));
            Some(sizes.ok_or_else(wrong)?)
        }
    };
    let mut before = vec![0usize; n];
    let mut sizes: Vec<usize> = (0..n).map(full).collect();
    match c.str("pad_type", "valid")? {
        "custom" => {
            for (i, (first, last)) in custom_padding(c, n)?.into_iter().enumerate() {
                before[i] = first;
                sizes[i] = sizes[i].saturating_sub(first + last);
            }
        }
        same @ ("same" | "same_lower") => {
            for i in 0..n {
                // The convolution that is transposed pads its input, of the size wanted here, until windows fit.
                let size = wanted.as_ref().map_or(spatial[i] * strides[i], |wanted| wanted[i]);
                let cut = sizes[i].saturating_sub(size);
                before[i] = if same == "same" { cut / 2 } else { cut - cut / 2 };
                sizes[i] = size;
            }
        }
        "valid" => {}
        other => return invalid(format!("pad_type `{other}`")),
    }
    let sizes = wanted.unwrap_or(sizes);
    Ok((window_of([&sizes, spatial, kernel, &strides, &dilations], &before), sizes))
}

/// Calls `f` with each tap of the kernel, and its index.
fn each_tap(window: &Window, mut f: impl FnMut([usize; 3], usize)) {
    let [_, h, w] = window.kernel;
    (0..window.taps()).for_each(|t| f([t / (h * w), t / w % h, t % w], t));
}

/// Adds `factor * terms` of one tap to a plane of the result; `terms` are those of `positions`, which are numbered along
/// rows.
fn add_terms(
    window: &Window,
    tap: [usize; 3],
    positions: Range<usize>,
    terms: &[f32],
    factor: f32,
    y: &mut [f32],
) {
    let [_, height, width] = window.out;
    let [_, y_height, y_width] = window.size;
    let columns = window.windows_inside(2, tap[2]);
    let step = window.strides[2];
    let mut first = positions.start;
    while first < positions.end {
        let (row, column) = (first / width, first % width);
        let end = positions.end.min((row + 1) * width);
        let (d, h) = (row / height, row % height);
        let inside = columns.start.max(column)..columns.end.min(column + end - first);
        if !inside.is_empty()
            && window.inside(0, d).contains(&tap[0])
            && window.inside(1, h).contains(&tap[1])
        {
            let y_row = window.at(0, d, tap[0]) * y_height + window.at(1, h, tap[1]);
            let y = &mut y[y_row * y_width + window.at(2, inside.start, tap[2])..];
            let terms = &terms[first - positions.start + inside.start - column..][..inside.len()];
            if step == 1 {
                y.iter_mut().zip(terms).for_each(|(y, term)| *y += factor * term);
            } else {
                y.iter_mut().step_by(step).zip(terms).for_each(|(y, term)| *y += factor * term);
            }
        }
        first = end;
    }
}

#[cfg(test)]
mod tests {
    use super::conv_transpose;
    use crate::cpu::ops::OpContext;
    use crate::tensor::{Data, Tensor};
    use anemoe_io::Random;

    /// Shape of a case: input, outputs per group, kernel, groups, strides, dilations, padding of each side.
    struct Case {
        x: &'static [usize],
        per_group: usize,
        kernel: &'static [usize],
        groups: usize,
        strides: &'static [i32],
        dilations: &'static [i32],
        pad: &'static [i32],
    }

    /// Computes the definition: element by element, tap by tap, in f64.
    fn defined(case: &Case, x: &[f32], w: &[f32], bias: &[f32]) -> (Vec<usize>, Vec<f64>) {
        let axes = case.kernel.len();
        let (batch, channels) = (case.x[0], case.x[1]);
        let (own, outputs) = (channels / case.groups, case.per_group * case.groups);
        let at = |i: usize, p: usize, t: usize| {
            (p * case.strides[i] as usize + t * case.dilations[i] as usize) as i64 - case.pad[2 * i] as i64
        };
        let size = |i: usize| {
            let last = at(i, case.x[2 + i] - 1, case.kernel[i] - 1);
            usize::try_from(last + 1 - i64::from(case.pad[2 * i + 1])).unwrap()
        };
        let sizes: Vec<usize> = (0..axes).map(size).collect();
        let split = |mut n: usize, sizes: &[usize]| {
            let mut index = vec![0; sizes.len()];
            for (i, size) in sizes.iter().enumerate().rev() {
                (index[i], n) = (n % size, n / size);
            }
            index
        };
        let (positions, taps, plane) = (
            case.x[2..].iter().product::<usize>(),
            case.kernel.iter().product::<usize>(),
            sizes.iter().product::<usize>(),
        );
        let mut y: Vec<f64> =
            (0..batch * outputs * plane).map(|i| f64::from(bias[i / plane % outputs])).collect();
        for (b, ch) in (0..batch).flat_map(|b| (0..channels).map(move |ch| (b, ch))) {
            for (p, t) in (0..positions).flat_map(|p| (0..taps).map(move |t| (p, t))) {
                let (place, tap) = (split(p, &case.x[2..]), split(t, case.kernel));
                let target = (0..axes).try_fold(0, |sum, i| {
                    let v = usize::try_from(at(i, place[i], tap[i])).ok().filter(|v| *v < sizes[i])?;
                    Some(sum * sizes[i] + v)
                });
                let Some(target) = target else { continue };
                for o in 0..case.per_group {
                    let v = x[(b * channels + ch) * positions + p] * w[(ch * case.per_group + o) * taps + t];
                    y[(b * outputs + ch / own * case.per_group + o) * plane + target] += f64::from(v);
                }
            }
        }
        ([&[batch, outputs][..], &sizes].concat(), y)
    }

    /// Checks products and sums of few channels, one to three axes, groups, strides, dilations and padding.
    #[test]
    fn results_are_those_of_the_definition() {
        let case = |x, per_group, kernel, groups, strides, dilations, pad| Case {
            x,
            per_group,
            kernel,
            groups,
            strides,
            dilations,
            pad,
        };
        for (seed, case) in [
            case(&[1, 16, 6, 5], 7, &[2, 2], 1, &[2, 2], &[1, 1], &[0; 4]),
            case(&[2, 24, 4, 7], 5, &[3, 3], 2, &[1, 1], &[1, 1], &[1, 1, 1, 1]),
            case(&[1, 8, 5, 9], 3, &[3, 4], 1, &[2, 3], &[2, 1], &[1, 0, 2, 1]),
            case(&[1, 32, 40], 6, &[5], 1, &[2], &[1], &[2, 2]),
            case(&[1, 9, 2, 3, 4], 4, &[2, 3, 2], 1, &[1, 2, 2], &[1, 1, 1], &[0, 0, 1, 1, 0, 0]),
            case(&[2, 6, 5, 4], 1, &[4, 4], 6, &[2, 2], &[1, 1], &[1, 1, 1, 1]),
            case(&[1, 3, 4, 6], 4, &[3, 2], 1, &[1, 2], &[3, 2], &[0, 2, 0, 0]),
        ]
        .into_iter()
        .enumerate()
        {
            let mut random = Random::new(seed as u64);
            let mut values = |n: usize| (0..n).map(|_| random.uniform() as f32 - 0.5).collect::<Vec<f32>>();
            let weight_shape = [&[case.x[1], case.per_group][..], case.kernel].concat();
            let x = values(case.x.iter().product());
            let w = values(weight_shape.iter().product());
            let bias = values(case.per_group * case.groups);
            let (shape, expected) = defined(&case, &x, &w, &bias);
            let list = |v: &[i32]| Tensor::i32(&[v.len()], v.to_vec());
            let custom = Tensor { shape: vec![], data: Data::Str(vec!["custom".into()]) };
            let inputs = [
                ("x", Tensor::f32(case.x, x)),
                ("weight", Tensor::f32(&weight_shape, w)),
                ("bias", Tensor::f32(&[bias.len()], bias)),
                ("groups", Tensor::i32(&[], vec![case.groups as i32])),
                ("strides", list(case.strides)),
                ("dilations", list(case.dilations)),
                ("pad_type", custom),
                ("pad", list(case.pad)),
            ];
            let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, t)| (*name, t)).collect();
            let c = OpContext { op: "conv_transpose", inputs: &inputs, values: &[], outputs: &[] };
            let mut out = vec![Tensor::f32(&[0], vec![])];
            conv_transpose(&c, &mut out).unwrap();
            assert_eq!(out[0].shape, shape);
            for (i, (y, expected)) in out[0].as_f32().unwrap().iter().zip(expected).enumerate() {
                assert!((f64::from(*y) - expected).abs() < 1e-4, "case {seed}, {i}: {y} {expected}");
            }
        }
    }

    /// Checks that `same` pads as the convolution does whose input has the size in `output_shape`.
    #[test]
    fn same_padding_follows_the_size_that_is_asked_for() {
        let list = |v: &[i32]| Tensor::i32(&[v.len()], v.to_vec());
        let text = |v: &str| Tensor { shape: vec![], data: Data::Str(vec![v.into()]) };
        let run = |others: &[(&str, Tensor)]| {
            let x = Tensor::f32(&[1, 1, 3], vec![1.0, 10.0, 100.0]);
            let weight = Tensor::f32(&[1, 1, 3], vec![1.0, 2.0, 3.0]);
            let strides = list(&[2]);
            let mut inputs = vec![("x", &x), ("weight", &weight), ("strides", &strides)];
            inputs.extend(others.iter().map(|(name, t)| (*name, t)));
            let c = OpContext { op: "conv_transpose", inputs: &inputs, values: &[], outputs: &[] };
            let mut out = vec![Tensor::f32(&[0], vec![])];
            conv_transpose(&c, &mut out).map(|()| out[0].as_f32().unwrap().to_vec())
        };
        // Without padding: 1, 2, 3 + 10, 20, 30 + 100, 200, 300.
        assert_eq!(run(&[]).unwrap(), [1.0, 2.0, 13.0, 20.0, 130.0, 200.0, 300.0]);
        let wanted = |n: i32| ("output_shape", list(&[1, 1, n]));
        let same = || ("pad_type", text("same"));
        assert_eq!(run(&[same()]).unwrap(), [1.0, 2.0, 13.0, 20.0, 130.0, 200.0]);
        assert_eq!(run(&[same(), wanted(5)]).unwrap(), [2.0, 13.0, 20.0, 130.0, 200.0]);
        let lower = ("pad_type", text("same_lower"));
        assert_eq!(run(&[lower]).unwrap(), [2.0, 13.0, 20.0, 130.0, 200.0, 300.0]);
        assert_eq!(run(&[wanted(8)]).unwrap(), [1.0, 2.0, 13.0, 20.0, 130.0, 200.0, 300.0, 0.0]);
        assert!(run(&[("pad_type", text("some"))]).is_err());
        assert!(run(&[wanted(-1)]).is_err());
    }
}
