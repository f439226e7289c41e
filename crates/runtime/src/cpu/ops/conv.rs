//! Convolutions and pools over 1 to 3 spatial axes.

use super::shape::{count, invalid, strides, unsupported};
use super::{OpContext, OpError, OpResult};
use crate::tensor::Tensor;

/// Most pairs of a kernel's tap and an output position; a list of them is kept.
const MAX_TAPS: usize = 1 << 27;

/// Windows over the spatial axes.
struct Window {
    kernel: Vec<usize>,
    strides: Vec<usize>,
    dilations: Vec<usize>,
    before: Vec<usize>,
    after: Vec<usize>,
}

/// Positive integers, one per spatial axis; ones when absent.
fn per_axis(c: &OpContext<'_>, name: &str, n: usize) -> OpResult<Vec<usize>> {
    match c.ints(name)? {
        None => Ok(vec![1; n]),
        Some(v) => {
            let v: Option<Vec<usize>> =
                v.iter().map(|&x| usize::try_from(x).ok().filter(|&x| x > 0)).collect();
            v.filter(|v| v.len() == n).ok_or_else(|| {
                OpError::Invalid(format!("parameter `{name}`: expected {n} positive integers"))
            })
        }
    }
}

impl Window {
    fn new(c: &OpContext<'_>, spatial: &[usize], kernel: &[usize], dilated: bool) -> OpResult<Window> {
        let n = spatial.len();
        let strides = per_axis(c, "strides", n)?;
        let dilations = if dilated { per_axis(c, "dilations", n)? } else { vec![1; n] };
        if kernel.contains(&0) {
            return invalid("a kernel of size 0");
        }
        let (mut before, mut after) = (vec![0; n], vec![0; n]);
        match c.str("pad_type", "valid")? {
            "valid" => {}
            "custom" => {
                let pad = c.ints("pad")?.unwrap_or(&[]);
                let pad: Option<Vec<usize>> = pad.iter().map(|&p| usize::try_from(p).ok()).collect();
                let pad = pad.filter(|p| p.len() == 2 * n);
                let pad = pad.ok_or_else(|| {
                    OpError::Invalid(format!("parameter `pad`: expected {} integers", 2 * n))
                })?;
                for i in 0..n {
                    (before[i], after[i]) = (pad[2 * i], pad[2 * i + 1]);
                }
            }
            same @ ("same" | "same_lower") => {
                for i in 0..n {
                    let reach = (kernel[i] - 1) * dilations[i] + 1;
                    let needed = (spatial[i].div_ceil(strides[i]).max(1) - 1) * strides[i] + reach;
                    let total = needed.saturating_sub(spatial[i]);
                    (before[i], after[i]) = (total / 2, total - total / 2);
                    if same == "same_lower" {
                        std::mem::swap(&mut before[i], &mut after[i]);
                    }
                }
            }
            other => return invalid(format!("pad_type `{other}`")),
        }
        Ok(Window { kernel: kernel.to_vec(), strides, dilations, before, after })
    }

    fn output(&self, spatial: &[usize], ceil: bool) -> OpResult<Vec<usize>> {
        (0..spatial.len())
            .map(|i| {
                let reach = (self.kernel[i] - 1) * self.dilations[i] + 1;
                let room = (spatial[i] + self.before[i] + self.after[i]).checked_sub(reach);
                let room = room
                    .ok_or_else(|| OpError::Invalid(format!("a kernel of reach {reach} over {spatial:?}")))?;
                let mut n = room / self.strides[i] + 1;
                if ceil && room % self.strides[i] != 0 && n * self.strides[i] < spatial[i] + self.before[i] {
                    n += 1;
                }
                Ok(n)
            })
            .collect()
    }

    /// Where a tap of a window lies, if inside the input.
    #[inline]
    fn input(&self, axis: usize, out: usize, tap: usize, size: usize) -> Option<usize> {
        let at = (out * self.strides[axis] + tap * self.dilations[axis]).checked_sub(self.before[axis])?;
        (at < size).then_some(at)
    }
}

/// Calls `f` with each multi-index of `shape`.
fn each_index(shape: &[usize], mut f: impl FnMut(&[usize])) {
    if shape.contains(&0) {
        return;
    }
    let mut index = vec![0; shape.len()];
    loop {
        f(&index);
        let mut axis = shape.len();
        loop {
            if axis == 0 {
                return;
            }
            axis -= 1;
            index[axis] += 1;
            if index[axis] < shape[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
}

pub(super) fn conv(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let ((xs, x), (ws, w)) = (c.f32s("x")?, c.f32s("weight")?);
    if xs.len() < 3 || xs.len() > 5 || ws.len() != xs.len() {
        return invalid(format!("input of shape {xs:?} with a weight of shape {ws:?}"));
    }
    let groups = usize::try_from(c.int("groups", 1)?).unwrap_or(0);
    let (batch, channels, outputs, per_group) = (xs[0], xs[1], ws[0], ws[1]);
    if groups == 0 || outputs % groups != 0 || per_group.checked_mul(groups) != Some(channels) {
        return invalid(format!("{channels} channels in {groups} groups with a weight of shape {ws:?}"));
    }
    let bias = c.get("bias").and_then(Tensor::as_f32);
    if bias.is_some_and(|b| b.len() != outputs) {
        return invalid(format!("bias for {outputs} output channels"));
    }
    let spatial = &xs[2..];
    let window = Window::new(c, spatial, &ws[2..], true)?;
    let out_spatial = window.output(spatial, false)?;
    let mut shape = vec![batch, outputs];
    shape.extend(&out_spatial);
    count(&shape)?;
    let y = out[0].reset_f32(&shape);
    let (in_size, out_size, taps): (usize, usize, usize) =
        (spatial.iter().product(), out_spatial.iter().product(), ws[2..].iter().product());
    let in_strides = strides(spatial);
    if taps.saturating_mul(out_size) > MAX_TAPS {
        return unsupported(format!("a kernel of {taps} taps over {out_size} positions"));
    }
    // For each tap, where each output position reads: shared by all channels.
    let mut reads: Vec<Vec<Option<usize>>> = Vec::with_capacity(taps);
    each_index(&ws[2..], |tap| {
        let mut places = Vec::with_capacity(out_size);
        each_index(&out_spatial, |o| {
            let at = |i: usize| window.input(i, o[i], tap[i], spatial[i]).map(|p| p * in_strides[i]);
            places.push((0..o.len()).try_fold(0, |sum, i| at(i).map(|p| sum + p)));
        });
        reads.push(places);
    });
    let per_out = outputs / groups;
    for (n, y) in y.chunks_exact_mut((outputs * out_size).max(1)).enumerate() {
        for (o, y) in y.chunks_exact_mut(out_size.max(1)).enumerate() {
            y.fill(bias.map_or(0.0, |b| b[o]));
            let first = o / per_out * per_group;
            for i in 0..per_group {
                let x = &x[(n * channels + first + i) * in_size..][..in_size];
                for (tap, places) in reads.iter().enumerate() {
                    let v = w[(o * per_group + i) * taps + tap];
                    for (y, place) in y.iter_mut().zip(places) {
                        if let Some(p) = place {
                            *y += v * x[*p];
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

pub(super) fn conv_transpose(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let ((xs, x), (ws, w)) = (c.f32s("x")?, c.f32s("weight")?);
    if xs.len() < 3 || xs.len() > 5 || ws.len() != xs.len() {
        return invalid(format!("input of shape {xs:?} with a weight of shape {ws:?}"));
    }
    let n = xs.len() - 2;
    let groups = usize::try_from(c.int("groups", 1)?).unwrap_or(0);
    let (batch, channels, per_out) = (xs[0], xs[1], ws[1]);
    if groups == 0 || channels % groups != 0 || ws[0] != channels {
        return invalid(format!("{channels} channels in {groups} groups with a weight of shape {ws:?}"));
    }
    let outputs = per_out * groups;
    let bias = c.get("bias").and_then(Tensor::as_f32);
    if bias.is_some_and(|b| b.len() != outputs) {
        return invalid(format!("bias for {outputs} output channels"));
    }
    let (step, dilations) = (per_axis(c, "strides", n)?, per_axis(c, "dilations", n)?);
    let spatial = &xs[2..];
    let kernel = &ws[2..];
    let full = |i: usize| (spatial[i].max(1) - 1) * step[i] + (kernel[i].max(1) - 1) * dilations[i] + 1;
    let mut before = vec![0usize; n];
    let mut sizes: Vec<usize> = (0..n).map(full).collect();
    match c.str("pad_type", "valid")? {
        "custom" => {
            let pad = c.ints("pad")?.unwrap_or(&[]);
            if pad.len() != 2 * n || pad.iter().any(|&p| p < 0) {
                return invalid(format!("parameter `pad`: expected {} integers", 2 * n));
            }
            for i in 0..n {
                before[i] = pad[2 * i] as usize;
                sizes[i] = sizes[i].saturating_sub(pad[2 * i] as usize + pad[2 * i + 1] as usize);
            }
        }
        same @ ("same" | "same_lower") => {
            for i in 0..n {
                let size = spatial[i] * step[i];
                let cut = sizes[i].saturating_sub(size);
                before[i] = if same == "same" { cut / 2 } else { cut - cut / 2 };
                sizes[i] = size;
            }
        }
        _ => {}
    }
    if let Some(shape) = c.ints("output_shape")? {
        let Some(tail) = shape.len().checked_sub(n).and_then(|s| shape.get(s..)) else {
            return invalid("parameter `output_shape` is too short");
        };
        for i in 0..n {
            sizes[i] =
                usize::try_from(tail[i]).map_err(|_| OpError::Invalid("negative output_shape".into()))?;
        }
    }
    let mut shape = vec![batch, outputs];
    shape.extend(&sizes);
    count(&shape)?;
    let y = out[0].reset_f32(&shape);
    let (in_size, out_size, taps): (usize, usize, usize) =
        (spatial.iter().product(), sizes.iter().product(), kernel.iter().product());
    let out_strides = strides(&sizes);
    for (i, y) in y.chunks_exact_mut(out_size.max(1)).enumerate() {
        y.fill(bias.map_or(0.0, |b| b[i % outputs]));
    }
    let per_in = channels / groups;
    let mut position = 0;
    each_index(spatial, |p| {
        let mut tap_index = 0;
        each_index(kernel, |tap| {
            let at = |i: usize| {
                let at = (p[i] * step[i] + tap[i] * dilations[i]).checked_sub(before[i])?;
                (at < sizes[i]).then_some(at * out_strides[i])
            };
            if let Some(target) = (0..n).try_fold(0, |sum, i| at(i).map(|v| sum + v)) {
                for b in 0..batch {
                    for ch in 0..channels {
                        let v = x[(b * channels + ch) * in_size + position];
                        let group = ch / per_in;
                        for o in 0..per_out {
                            let weight = w[(ch * per_out + o) * taps + tap_index];
                            y[(b * outputs + group * per_out + o) * out_size + target] += v * weight;
                        }
                    }
                }
            }
            tap_index += 1;
        });
        position += 1;
    });
    Ok(())
}

pub(super) fn pool(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let (xs, x) = c.f32s("x")?;
    if xs.len() < 3 || xs.len() > 5 {
        return invalid(format!("input of shape {xs:?}"));
    }
    let spatial = &xs[2..];
    let kernel = per_axis(c, "kernel_sizes", spatial.len())?;
    let window = Window::new(c, spatial, &kernel, false)?;
    let out_spatial = window.output(spatial, c.bool("ceil_mode", false)?)?;
    let exclude = c.bool("exclude_padding_from_average", false)?;
    let mut shape = xs[..2].to_vec();
    shape.extend(&out_spatial);
    count(&shape)?;
    let y = out[0].reset_f32(&shape);
    let (in_size, out_size): (usize, usize) = (spatial.iter().product(), out_spatial.iter().product());
    let in_strides = strides(spatial);
    for (plane, y) in y.chunks_exact_mut(out_size.max(1)).enumerate() {
        let x = &x[plane * in_size..][..in_size];
        let mut position = 0;
        each_index(&out_spatial, |o| {
            let (mut max, mut sum, mut square, mut n, mut padded) =
                (f32::NEG_INFINITY, 0.0f32, 0.0f32, 0usize, 0usize);
            each_index(&kernel, |tap| {
                let at = |i: usize| window.input(i, o[i], tap[i], spatial[i]).map(|p| p * in_strides[i]);
                // With ceil_mode a window may reach beyond the padding, which does not count as padding.
                let counts = (0..o.len()).all(|i| {
                    o[i] * window.strides[i] + tap[i] < spatial[i] + window.before[i] + window.after[i]
                });
                padded += usize::from(counts);
                if let Some(p) = (0..o.len()).try_fold(0, |sum, i| at(i).map(|v| sum + v)) {
                    let v = x[p];
                    max = max.max(v);
                    sum += v;
                    square += v * v;
                    n += 1;
                }
            });
            y[position] = match c.op {
                "max_pool" => max,
                "l2_pool" => square.sqrt(),
                _ => sum / (if exclude { n } else { padded }).max(1) as f32,
            };
            position += 1;
        });
    }
    Ok(())
}
