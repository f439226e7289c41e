//! Images that convolutions read, and convolution results in the order of tensors.

use anemoe_kernels::{Image, Pool, Strided, Window, transpose};

/// Makes an image from `values`, `[batch, channels, spatial..]`, row-major.
pub(in crate::cpu) fn dense_image<'a>(
    window: &Window,
    (batch, channels): (usize, usize),
    values: &'a [f32],
) -> Image<'a> {
    let [d, h, w] = window.size;
    Image { values, first: 0, batch, channels, strides: [channels * d * h * w, d * h * w, h * w, w, 1] }
}

/// Makes an image from `values`, `[batch, spatial.., channels]`, row-major.
pub(in crate::cpu) fn channels_last_image<'a>(
    window: &Window,
    (batch, channels): (usize, usize),
    values: &'a [f32],
) -> Image<'a> {
    let [d, h, w] = window.size;
    let strides = [d * h * w * channels, 1, h * w * channels, w * channels, channels];
    Image { values, first: 0, batch, channels, strides }
}

/// Transposes `[batch * positions, rows]` to `[batch, rows, positions]`.
pub(in crate::cpu) fn to_channels_first(window: &Window, rows: usize, y: &[f32], out: &mut [f32]) {
    transpose_each((rows, window.positions()), y, out);
}

/// Transposes images `[channels, positions]`, one after the other, to `[positions, channels]`; replaces what `out` holds.
pub(in crate::cpu) fn to_channels_last(positions: usize, channels: usize, x: &[f32], out: &mut Vec<f32>) {
    out.resize(x.len(), 0.0);
    transpose_each((positions, channels), x, out);
}

/// Transposes matrices `[columns, rows]`, one after the other, to `[rows, columns]`.
fn transpose_each((rows, columns): (usize, usize), x: &[f32], out: &mut [f32]) {
    let one = (rows * columns).max(1);
    for (x, out) in x.chunks_exact(one).zip(out.chunks_exact_mut(one)) {
        let (from, to) = (Strided { first: 0, stride: rows }, Strided { first: 0, stride: columns });
        transpose(Pool::global(), (rows, columns), (x, from), (out, to));
    }
}
