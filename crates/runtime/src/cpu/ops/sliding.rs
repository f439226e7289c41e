//! Convolutions whose weights are not constant, and pools, over 1 to 3 spatial axes.

use super::image::{channels_last_image, dense_image, to_channels_first, to_channels_last};
use super::operands::{OpContext, OpError, OpResult};
use super::shape::{count, invalid, unsupported};
use super::window::{WindowParams, per_axis};
use crate::tensor::Tensor;
use anemoe_kernels::{Conv, Matrix, Pool, PoolFunction, Pooling, Window, pool_windows};

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
    let (window, spatial) = WindowParams::new(c, &ws[2..], true)?.over(&xs[2..], false)?;
    let mut shape = vec![batch, outputs];
    shape.extend(spatial);
    count(&shape)?;
    let y = out[0].reset_f32(&shape);
    let cols = per_group * window.taps();
    let w = Matrix::f32(w, outputs, cols).map_err(|e| OpError::Invalid(e.to_string()))?;
    let x = dense_image(&window, (batch, channels), x);
    let mut tokens = vec![0.0; y.len()];
    let mut job = Conv { w, groups, window: &window, x, y: &mut tokens, bias };
    anemoe_kernels::conv(Pool::global(), &mut job);
    to_channels_first(&window, outputs, &tokens, y);
    Ok(())
}

/// Computes `conv` with the weight `weight quant_scale + quant_bias`, whose factors are one for all or for each output channel.
pub(super) fn conv_quantized(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    if c.str("quantization_type", "linear")? != "linear" {
        return unsupported("conv_quantized with a table");
    }
    let shape = &c.arg("weight")?.shape;
    let (mut weight, scale, offset) =
        (c.numbers("weight")?, c.numbers("quant_scale")?, c.numbers("quant_bias")?);
    let rows = shape.first().copied().unwrap_or(0);
    if [&scale, &offset].iter().any(|v| v.len() != 1 && v.len() != rows) {
        let (a, b) = (scale.len(), offset.len());
        return invalid(format!("{a} values of quant_scale and {b} of quant_bias for {rows} outputs"));
    }
    let row = (weight.len() / rows.max(1)).max(1);
    for (r, weight) in weight.chunks_exact_mut(row).enumerate() {
        let (scale, offset) = (scale[r % scale.len()], offset[r % offset.len()]);
        weight.iter_mut().for_each(|w| *w = *w * scale + offset);
    }
    let mut owned = vec![("weight", Tensor::f32(shape, weight))];
    if let Some(bias) = c.get("bias") {
        owned.push(("bias", Tensor::f32(&bias.shape, c.numbers("bias")?)));
    }
    let others = c.inputs.iter().filter(|(name, _)| !matches!(*name, "weight" | "bias")).copied();
    let inputs: Vec<(&str, &Tensor)> = others.chain(owned.iter().map(|(name, t)| (*name, t))).collect();
    conv(&OpContext { op: "conv", inputs: &inputs, ..*c }, out)
}

/// A pool, ready for inputs of any size.
#[derive(Clone, Debug)]
pub(in crate::cpu) struct PoolParams {
    params: WindowParams,
    pub function: PoolFunction,
    ceil: bool,
    /// Averages are over the elements inside the input alone.
    excludes_padding: bool,
}

impl PoolParams {
    /// Reads the parameters of a pool of `axes` axes.
    pub fn new(c: &OpContext<'_>, axes: usize) -> OpResult<PoolParams> {
        let kernel = per_axis(c, "kernel_sizes", axes)?;
        Ok(PoolParams {
            params: WindowParams::new(c, &kernel, false)?,
            function: match c.op {
                "max_pool" => PoolFunction::Max,
                "l2_pool" => PoolFunction::L2,
                _ => PoolFunction::Average,
            },
            ceil: c.bool("ceil_mode", false)?,
            excludes_padding: c.bool("exclude_padding_from_average", false)?,
        })
    }

    /// Returns the windows over an input, and the sizes of the result.
    pub fn over(&self, spatial: &[usize]) -> OpResult<(Window, Vec<usize>)> {
        self.params.over(spatial, self.ceil)
    }

    /// Returns for each index of each axis the elements that count for an average. With ceil_mode a window may reach beyond the
    /// padding; that part does not.
    pub fn counts(&self, window: &Window, spatial: &[usize]) -> [Vec<usize>; 3] {
        let skip = 3 - spatial.len();
        std::array::from_fn(|axis| {
            let counted = |index| match axis.checked_sub(skip) {
                Some(axis) if !self.excludes_padding => self.params.padded_taps(axis, index, spatial[axis]),
                _ => window.inside(axis, index).len(),
            };
            (0..window.out[axis]).map(counted).collect()
        })
    }
}

pub(super) fn pool(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let (xs, x) = c.f32s("x")?;
    if xs.len() < 3 || xs.len() > 5 {
        return invalid(format!("input of shape {xs:?}"));
    }
    let spatial = &xs[2..];
    let params = PoolParams::new(c, spatial.len())?;
    let (window, out_spatial) = params.over(spatial)?;
    let mut shape = xs[..2].to_vec();
    shape.extend(&out_spatial);
    count(&shape)?;
    let y = out[0].reset_f32(&shape);
    if y.is_empty() {
        return Ok(());
    }
    let (n, channels) = (spatial.iter().product(), xs[1]);
    let (mut values, mut pooled) = (Vec::new(), vec![0.0; y.len()]);
    to_channels_last(n, channels, x, &mut values);
    let x = channels_last_image(&window, (xs[0], channels), &values);
    let counts = &params.counts(&window, spatial);
    let pooling = Pooling { function: params.function, window: &window, counts, x };
    pool_windows(Pool::global(), &pooling, &mut pooled);
    to_channels_first(&window, channels, &pooled, y);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantized_weights_have_a_scale_for_each_output() {
        let inputs = [
            ("x", Tensor::f32(&[1, 1, 3], vec![1.0, 2.0, 3.0])),
            ("weight", Tensor::i32(&[2, 1, 2], vec![1, 2, 3, 4])),
            ("bias", Tensor::i32(&[2], vec![0, 1])),
            ("quant_scale", Tensor::f32(&[2], vec![1.0, 0.5])),
            ("quant_bias", Tensor::f32(&[1], vec![-1.0])),
        ];
        let bound: Vec<(&str, &Tensor)> = inputs.iter().map(|(n, t)| (*n, t)).collect();
        let c = OpContext { op: "conv_quantized", inputs: &bound, values: &[], outputs: &[] };
        let mut out = [Tensor::default()];
        conv_quantized(&c, &mut out).unwrap();
        // Weights (0, 1) and (0.5, 1).
        assert_eq!(out[0], Tensor::f32(&[1, 2, 2], vec![2.0, 3.0, 3.5, 5.0]));
        let three = Tensor::f32(&[3], vec![1.0; 3]);
        let wrong: Vec<(&str, &Tensor)> =
            bound.iter().map(|&(n, t)| (n, if n == "quant_scale" { &three } else { t })).collect();
        assert!(conv_quantized(&OpContext { inputs: &wrong, ..c }, &mut out).is_err());
    }
}
