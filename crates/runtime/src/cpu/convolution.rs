//! Convolution with a constant weight, prepared once; plans and the interpreter run it in the same way.
//!
//! ```text
//! weights               columns                kernel
//! 1 x k, unpadded       as stored              conv          (for example over carried rows)
//! compressed            as stored              conv
//! depthwise             [taps, channels] f32   depthwise_conv
//! other                 [taps, channels]       conv          taps read neighbouring channels together
//! ```

use super::ops::image::{dense_image, to_channels_first, to_channels_last};
use super::ops::window::WindowParams;
use super::ops::{OpError, OpResult};
use super::weights::StoredWeight;
use crate::backend::Counts;
use anemoe_kernels::{Conv, DepthwiseConv, Image, Pool, Window, conv, depthwise_conv};
use std::cell::RefCell;
use std::sync::Arc;

/// Fewest channels of a group for which a weight is rearranged, so that a tap's channels are copied together.
const MIN_CHANNELS: usize = 8;

/// Layout of the weight's columns.
enum TapLayout {
    Stored,
    TapsFirst,
    /// `[taps, channels]`
    Depthwise(Vec<f32>),
}

/// A convolution, ready for inputs of any size.
pub(super) struct Convolution {
    weight: Arc<StoredWeight>,
    groups: usize,
    params: WindowParams,
    form: TapLayout,
}

thread_local! {
    /// Memory of a thread: an image with channels last, and a result with channels last.
    static IMAGES: RefCell<(Vec<f32>, Vec<f32>)> = RefCell::default();
}

impl Convolution {
    /// Prepares a weight `[O, C / groups, taps..]` and chooses the layout of its columns.
    pub fn new(weight: Arc<StoredWeight>, groups: usize, params: WindowParams) -> OpResult<Convolution> {
        let (taps, channels) = (params.taps(), weight.cols() / params.taps().max(1));
        let row = params.is_plain()
            && params.is_undilated()
            && params.kernel().split_last().is_some_and(|(_, rest)| rest.iter().all(|k| *k == 1));
        if (taps == 1 && params.is_plain()) || (row && params.kernel().len() == 2) {
            return Ok(Convolution { weight, groups, params, form: TapLayout::Stored });
        }
        if channels == 1 && groups == weight.rows() {
            let dense = weight.to_dense();
            let (values, mut transposed) = (dense.as_f32().unwrap_or_default(), vec![0.0; dense.len()]);
            for (c, values) in values.chunks_exact(taps.max(1)).enumerate() {
                values.iter().enumerate().for_each(|(tap, v)| transposed[tap * groups + c] = *v);
            }
            return Ok(Convolution { weight, groups, params, form: TapLayout::Depthwise(transposed) });
        }
        let rearranged = if channels >= MIN_CHANNELS { weight.with_taps_first(taps) } else { None };
        let (weight, form) = match rearranged {
            Some(weight) => (weight, TapLayout::TapsFirst),
            None => (weight, TapLayout::Stored),
        };
        Ok(Convolution { weight, groups, params, form })
    }

    /// Tells whether the kernel has size 1 and there is one group: the convolution is a matmul over tokens then.
    pub fn is_matmul(&self) -> bool {
        self.matmul_groups() == Some(1)
    }

    /// Returns the number of groups if the kernel has size 1: the convolution is a matmul over tokens for each group then.
    pub fn matmul_groups(&self) -> Option<usize> {
        (self.params.taps() == 1 && self.params.is_plain()).then_some(self.groups)
    }

    pub fn weight(&self) -> &Arc<StoredWeight> {
        &self.weight
    }

    /// Returns the bytes that were made from the stored weight.
    pub fn prepared_bytes(&self) -> u64 {
        match &self.form {
            TapLayout::Stored => 0,
            TapLayout::TapsFirst => self.weight.owned_bytes(),
            TapLayout::Depthwise(v) => v.len() as u64 * 4,
        }
    }

    /// Tells whether the convolution reads neighbouring channels, and runs faster if they lie together in memory.
    pub fn wants_channels_last(&self) -> bool {
        !matches!(self.form, TapLayout::Stored) || self.params.taps() == 1
    }

    /// Returns the windows over an input `[batch, channels, spatial..]`, and the shape of the result.
    pub fn over(&self, shape: &[usize]) -> OpResult<(Window, Vec<usize>)> {
        let (&[batch, channels, ..], rows) = (shape, self.weight.rows()) else {
            return Err(OpError::Invalid(format!("input of shape {shape:?}")));
        };
        let own = self.weight.cols() / self.params.taps().max(1);
        if own.checked_mul(self.groups) != Some(channels) {
            return Err(OpError::Invalid(format!(
                "input of shape {shape:?} for {own} channels in {} groups",
                self.groups
            )));
        }
        let (window, spatial) = self.params.over(&shape[2..], false)?;
        Ok((window, [batch, rows].into_iter().chain(spatial).collect()))
    }

    /// Computes `[batch * positions, rows]` and returns the work.
    pub fn run(
        &self,
        window: &Window,
        x: Image<'_>,
        y: &mut [f32],
        bias: Option<&[f32]>,
    ) -> OpResult<Counts> {
        let pool = Pool::global();
        let positions: usize = window.out.iter().product();
        let (results, depth) = (x.batch * positions * self.weight.rows(), self.weight.cols());
        if let TapLayout::Depthwise(w) = &self.form {
            depthwise_conv(pool, &mut DepthwiseConv { w, window, x, y, bias });
            return Ok(Counts::product(w.len() as u64 * 4, results, depth));
        }
        let (w, groups, taps_first) =
            (self.weight.matrix(), self.groups, matches!(self.form, TapLayout::TapsFirst));
        let bytes = w.bytes_read();
        conv(pool, &mut Conv { w, groups, taps_first, window, x, y, bias });
        Ok(Counts::product(bytes, results, depth))
    }

    /// Computes a dense result `[batch, rows, spatial..]` from a dense input `[batch, channels, spatial..]` and returns the work.
    pub fn run_dense(
        &self,
        window: &Window,
        (batch, channels): (usize, usize),
        x: &[f32],
        out: &mut [f32],
        bias: Option<&[f32]>,
    ) -> OpResult<Counts> {
        let (n, rows) = (window.size.iter().product::<usize>(), self.weight.rows());
        let (mut transposed, mut y) = IMAGES.take();
        let image = if self.wants_channels_last() && n > 1 && channels > 1 {
            to_channels_last(n, channels, x, &mut transposed);
            let [_, h, w] = window.size;
            let strides = [n * channels, 1, h * w * channels, w * channels, channels];
            Image { values: &transposed, first: 0, batch, channels, strides }
        } else {
            dense_image(window, (batch, channels), x)
        };
        y.resize(out.len(), 0.0);
        let bytes = self.run(window, image, &mut y, bias);
        to_channels_first(window, rows, &y, out);
        IMAGES.set((transposed, y));
        bytes
    }
}
