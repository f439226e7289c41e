//! Convolution with a constant weight, prepared once; plans and the interpreter run it in the same way.
//!
//! ```text
//! weight       kernel             used for
//! as stored    conv               compressed weights, tokens on one axis: 1 x k unpadded, for example over carried rows
//! depthwise    depthwise_conv     [taps, channels] f32
//! packed       packed_conv        other dense weights; a kernel of size 1 only over images, which have two axes
//! ```

use super::ops::image::{channels_last_image, dense_image, to_channels_first, to_channels_last};
use super::ops::window::WindowParams;
use super::ops::{OpError, OpResult};
use super::weights::StoredWeight;
use crate::backend::Counts;
use anemoe_kernels::{
    Conv, DepthwiseConv, Finish, Image, PackedConv, PackedRows, Pool, Window, conv, depthwise_conv,
    packed_conv,
};
use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

/// Form of the weight that a kernel reads.
enum Form {
    Stored,
    /// Packed at the first image.
    Packed(OnceLock<PackedRows>),
    /// The weight of a `linear` with many tokens, which packs itself.
    Linear,
    /// `[taps, channels]`
    Depthwise(Vec<f32>),
}

/// Results that a thread finishes at a time, about.
const FINISHED: usize = 1 << 13;

/// A convolution, ready for inputs of any size.
pub(super) struct Convolution {
    pub weight: Arc<StoredWeight>,
    groups: usize,
    params: WindowParams,
    form: Form,
}

thread_local! {
    /// Memory of a thread: an image with channels last, and a result with channels last.
    static IMAGES: RefCell<(Vec<f32>, Vec<f32>)> = RefCell::default();
}

impl Convolution {
    /// Prepares a weight `[O, C / groups, taps..]` and chooses its form.
    pub fn new(weight: Arc<StoredWeight>, groups: usize, params: WindowParams) -> OpResult<Convolution> {
        let (taps, channels) = (params.taps(), weight.cols() / params.taps().max(1));
        let row = params.is_plain()
            && params.dilations.iter().all(|d| *d == 1)
            && params.kernel.split_last().is_some_and(|(_, rest)| rest.iter().all(|k| *k == 1));
        let is_row = row && (taps == 1 || params.kernel.len() == 2);
        let form = if channels == 1 && groups == weight.rows() && !is_row {
            let dense = weight.to_dense();
            let (values, mut transposed) = (dense.as_f32().unwrap_or_default(), vec![0.0; dense.len()]);
            for (c, values) in values.chunks_exact(taps.max(1)).enumerate() {
                values.iter().enumerate().for_each(|(tap, v)| transposed[tap * groups + c] = *v);
            }
            Form::Depthwise(transposed)
        } else if weight.is_dense() && !(is_row && taps > 1) {
            Form::Packed(OnceLock::new())
        } else {
            Form::Stored
        };
        Ok(Convolution { weight, groups, params, form })
    }

    /// Makes the convolution with a kernel of size 1 over one axis, of tokens, that a product with `weight` is; `packs` says that
    /// it reads packed rows.
    pub fn of_linear(weight: Arc<StoredWeight>, packs: bool) -> Convolution {
        let form = if packs { Form::Linear } else { Form::Stored };
        Convolution { weight, groups: 1, params: WindowParams::pointwise(), form }
    }

    /// Returns the number of groups if the kernel has size 1: the convolution is a matmul over tokens for each group then.
    pub fn matmul_groups(&self) -> Option<usize> {
        (self.params.taps() == 1 && self.params.is_plain()).then_some(self.groups)
    }

    /// Returns the bytes that are made from the stored weight.
    pub fn prepared_bytes(&self) -> u64 {
        match &self.form {
            Form::Packed(_) if !self.is_pointwise() => self.weight.matrix().bytes_read(),
            Form::Stored | Form::Packed(_) | Form::Linear => 0,
            Form::Depthwise(v) => v.len() as u64 * 4,
        }
    }

    fn is_pointwise(&self) -> bool {
        self.params.taps() == 1 && self.params.is_plain()
    }

    /// Returns the packed rows, if this convolution reads them for such windows.
    pub fn packed(&self, window: &Window) -> Option<&PackedRows> {
        let rows = match &self.form {
            Form::Packed(rows) => rows,
            Form::Linear => return Some(self.weight.packed_rows()),
            Form::Stored | Form::Depthwise(_) => return None,
        };
        let is_image = window.size.iter().filter(|n| **n > 1).count() > 1;
        (is_image || !self.is_pointwise()).then(|| {
            rows.get_or_init(|| PackedRows::new(&self.weight.matrix(), self.groups, self.params.taps()))
        })
    }

    /// Tells whether the convolution reads neighbouring channels, and runs faster if they lie together in memory.
    pub fn wants_channels_last(&self, window: &Window) -> bool {
        match &self.form {
            Form::Depthwise(_) => true,
            _ => self.packed(window).is_some() || self.params.taps() == 1,
        }
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

    /// Computes `[batch * positions, rows]`, calls `finish` with parts of it, and returns the work.
    pub fn run(
        &self,
        window: &Window,
        x: Image<'_>,
        y: &mut [f32],
        bias: Option<&[f32]>,
        finish: Option<Finish<'_>>,
    ) -> OpResult<Counts> {
        let pool = Pool::global();
        let positions: usize = window.out.iter().product();
        let (results, depth) = (x.batch * positions * self.weight.rows(), self.weight.cols());
        if let Some(w) = self.packed(window) {
            packed_conv(pool, &mut PackedConv { w, window, x, y, bias, finish });
            return Ok(Counts::product(w.bytes(), results, depth));
        }
        if let Form::Depthwise(w) = &self.form {
            depthwise_conv(pool, &mut DepthwiseConv { w, window, x, y, bias, finish });
            return Ok(Counts::product(w.len() as u64 * 4, results, depth));
        }
        let (w, groups) = (self.weight.matrix(), self.groups);
        let bytes = w.bytes_read();
        conv(pool, &mut Conv { w, groups, window, x, y, bias });
        if let Some(finish) = finish {
            let n = FINISHED.next_multiple_of(self.weight.rows().max(1));
            pool.for_chunks(&mut y[..results], n, &|i, y| finish(i * n, y));
        }
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
        let image = if self.wants_channels_last(window) && n > 1 && channels > 1 {
            to_channels_last(n, channels, x, &mut transposed);
            channels_last_image(window, (batch, channels), &transposed)
        } else {
            dense_image(window, (batch, channels), x)
        };
        y.resize(out.len(), 0.0);
        let bytes = self.run(window, image, &mut y, bias, None);
        to_channels_first(window, rows, &y, out);
        IMAGES.set((transposed, y));
        bytes
    }
}
