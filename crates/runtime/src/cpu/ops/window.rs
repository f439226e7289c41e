//! Windows of convolutions and pools over 1 to 3 spatial axes.

use super::operands::{OpContext, OpError, OpResult};
use super::shape::invalid;
use anemoe_kernels::Window;

/// Padding around the input.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Padding {
    /// Elements before and after each axis.
    Custom(Vec<(usize, usize)>),
    /// Padding that keeps the size, divided by strides; an odd element goes after the input, or before it if `lower` is set.
    Same { lower: bool },
}

/// Parameters of windows; with the size of an input they give a [`Window`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cpu) struct WindowParams {
    /// Taps of each spatial axis.
    pub kernel: Vec<usize>,
    strides: Vec<usize>,
    pub dilations: Vec<usize>,
    padding: Padding,
}

/// Returns a parameter of `n` positive integers, one per spatial axis; ones where it is absent.
pub(super) fn per_axis(c: &OpContext<'_>, name: &str, n: usize) -> OpResult<Vec<usize>> {
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

/// Returns the parameter `pad`: elements before and after each of `n` spatial axes.
pub(super) fn custom_padding(c: &OpContext<'_>, n: usize) -> OpResult<Vec<(usize, usize)>> {
    let pad = c.ints("pad")?.unwrap_or(&[]);
    let pad: Option<Vec<usize>> = pad.iter().map(|&p| usize::try_from(p).ok()).collect();
    let wrong = || OpError::Invalid(format!("parameter `pad`: expected {} integers", 2 * n));
    let pad = pad.filter(|p| p.len() == 2 * n).ok_or_else(wrong)?;
    Ok(pad.chunks_exact(2).map(|p| (p[0], p[1])).collect())
}

/// Makes windows over 1 to 3 spatial axes. Sizes of input and output, kernel, strides, dilations and elements before the input
/// are given for these axes only.
pub(super) fn window_of(of_axes: [&[usize]; 5], before: &[usize]) -> Window {
    let on_three_axes = |v: &[usize], missing| {
        let mut all = [missing; 3];
        all[3 - v.len()..].copy_from_slice(v);
        all
    };
    let [size, out, kernel, strides, dilations] = of_axes.map(|v| on_three_axes(v, 1));
    Window { size, out, kernel, strides, dilations, before: on_three_axes(before, 0) }
}

impl WindowParams {
    /// Reads the parameters of an operation whose kernel has 1 to 3 axes; `dilated` says whether the op has dilations.
    pub fn new(c: &OpContext<'_>, kernel: &[usize], dilated: bool) -> OpResult<WindowParams> {
        let n = kernel.len();
        let strides = per_axis(c, "strides", n)?;
        let dilations = if dilated { per_axis(c, "dilations", n)? } else { vec![1; n] };
        if kernel.contains(&0) {
            return invalid("a kernel of size 0");
        }
        let padding = match c.str("pad_type", "valid")? {
            "valid" => Padding::Custom(vec![(0, 0); n]),
            "custom" => Padding::Custom(custom_padding(c, n)?),
            "same" => Padding::Same { lower: false },
            "same_lower" => Padding::Same { lower: true },
            other => return invalid(format!("pad_type `{other}`")),
        };
        Ok(WindowParams { kernel: kernel.to_vec(), strides, dilations, padding })
    }

    /// Makes windows of one element, on one axis.
    pub fn pointwise() -> WindowParams {
        let (one, padding) = (vec![1], Padding::Custom(vec![(0, 0)]));
        WindowParams { kernel: one.clone(), strides: one.clone(), dilations: one, padding }
    }

    /// Tells whether windows have stride 1 and no padding.
    pub fn is_plain(&self) -> bool {
        let unpadded = match &self.padding {
            Padding::Custom(pad) => pad.iter().all(|p| *p == (0, 0)),
            Padding::Same { .. } => self.taps() == 1,
        };
        unpadded && self.strides.iter().all(|s| *s == 1)
    }

    /// Returns the number of taps.
    pub fn taps(&self) -> usize {
        self.kernel.iter().product()
    }

    /// Returns the padding before and after an axis of `size` elements.
    fn padding(&self, axis: usize, size: usize) -> (usize, usize) {
        match &self.padding {
            Padding::Custom(pad) => pad[axis],
            Padding::Same { lower } => {
                let reach = (self.kernel[axis] - 1) * self.dilations[axis] + 1;
                let step = self.strides[axis];
                let needed = (size.div_ceil(step).max(1) - 1) * step + reach;
                let all = needed.saturating_sub(size);
                let (small, large) = (all / 2, all - all / 2);
                if *lower { (large, small) } else { (small, large) }
            }
        }
    }

    /// Returns the windows over an input of these spatial sizes, and the sizes of the result; `ceil` rounds the sizes up.
    pub fn over(&self, spatial: &[usize], ceil: bool) -> OpResult<(Window, Vec<usize>)> {
        if spatial.len() != self.kernel.len() {
            return invalid(format!("a kernel of {} axes over {spatial:?}", self.kernel.len()));
        }
        let padding: Vec<(usize, usize)> =
            spatial.iter().enumerate().map(|(i, &n)| self.padding(i, n)).collect();
        let mut out = Vec::new();
        for (i, &size) in spatial.iter().enumerate() {
            let (before, after) = padding[i];
            let reach = (self.kernel[i] - 1).saturating_mul(self.dilations[i]).saturating_add(1);
            let padded = size.saturating_add(before).saturating_add(after);
            let room = padded
                .checked_sub(reach)
                .ok_or_else(|| OpError::Invalid(format!("a kernel of reach {reach} over {spatial:?}")))?;
            let mut n = room / self.strides[i] + 1;
            if ceil && room % self.strides[i] != 0 && n * self.strides[i] < size + before {
                n += 1;
            }
            out.push(n);
        }
        let before: Vec<usize> = padding.iter().map(|p| p.0).collect();
        let sizes = [spatial, &out, &self.kernel, &self.strides, &self.dilations];
        Ok((window_of(sizes, &before), out))
    }

    /// Returns how many taps of the window at `index` of an axis lie in the input or its padding.
    pub fn padded_taps(&self, axis: usize, index: usize, size: usize) -> usize {
        let (before, after) = self.padding(axis, size);
        (size + before + after).saturating_sub(index * self.strides[axis]).min(self.kernel[axis])
    }
}

/// Returns the strides of batch, channels and three spatial axes, from the strides of a value of rank 3 to 5.
pub(in crate::cpu) fn image_strides(strides: &[usize]) -> [usize; 5] {
    let mut all = [0; 5];
    let (outer, spatial) = strides.split_at(2);
    all[..2].copy_from_slice(outer);
    all[5 - spatial.len()..].copy_from_slice(spatial);
    all
}
