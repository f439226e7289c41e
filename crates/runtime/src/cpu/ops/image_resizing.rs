//! Ops that crop and resample images: the last two axes are rows and columns.
//!
//! ```text
//! resize        place of each result along an axis --> Tap: two neighbours and a weight --> one pass for each axis
//! crop_resize   the same places inside a box
//! resample      places from a tensor, bilinear or nearest
//! ```

use super::operands::{OpContext, OpError, OpResult};
use super::shape::{around, count, invalid, unsupported};
use crate::tensor::{Data, Tensor};
use anemoe_kernels::Pool;
use std::ops::Range;

/// Elements that a thread computes in one part of a job.
const RESAMPLED: usize = 1 << 12;

pub(super) fn crop(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let rank = x.rank();
    if rank < 3 {
        return invalid(format!("input of shape {:?}, expected rank 3 or more", x.shape));
    }
    let mut places: Vec<Vec<usize>> = x.shape.iter().map(|&d| (0..d).collect()).collect();
    for (i, name) in [(rank - 2, "crop_height"), (rank - 1, "crop_width")] {
        let edges = c.ints(name)?.unwrap_or(&[]);
        let (Some(&a), Some(&b)) = (edges.first(), edges.get(1)) else {
            return invalid(format!("parameter `{name}` must have two values"));
        };
        let n = x.shape[i] as i64;
        let (low, high) = (i64::from(a), n - i64::from(b));
        if low < 0 || high < low || high > n {
            return invalid(format!("crop {edges:?} of size {n}"));
        }
        places[i] = (low as usize..high as usize).collect();
    }
    super::tensor_transformation::read_places(x, places, &mut out[0])
}

/// Positions of two neighbours along an axis, and the weight of the second.
type Tap = (usize, usize, f32);

/// Returns the taps of a place of an axis of `n` elements; a place outside reads the nearest element.
fn tap(place: f64, n: usize) -> Tap {
    let place = place.clamp(0.0, (n - 1) as f64);
    let low = place.floor() as usize;
    (low, (low + 1).min(n - 1), (place - low as f64) as f32)
}

/// Returns the places that a sampling mode gives to `o` results over `n` elements, before they are clamped to the axis.
fn grid(mode: &str, n: f64, o: usize) -> OpResult<Vec<f64>> {
    let span = |first: f64, last: f64, single: f64| -> Box<dyn Fn(usize) -> f64> {
        if o > 1 {
            Box::new(move |i| first + i as f64 * (last - first) / (o - 1) as f64)
        } else {
            Box::new(move |_| single)
        }
    };
    let place = match mode {
        "STRICT_ALIGN_CORNERS" => span(0.0, n - 1.0, 0.0),
        "ALIGN_CORNERS" => span(0.0, n - 1.0, (n - 1.0) / 2.0),
        "DEFAULT" => span(0.0, n - n / o as f64, 0.0),
        "OFFSET_CORNERS" => {
            let step = (n - 1.0).max(1.0) / o as f64;
            Box::new(move |i| (i as f64 + 0.5) * step)
        }
        "UNALIGN_CORNERS" => Box::new(move |i| (i as f64 + 0.5) * n / o as f64 - 0.5),
        other => return invalid(format!("sampling_mode `{other}`")),
    };
    Ok((0..o).map(place).collect())
}

/// Resizes one axis of a tensor.
fn resize_axis<T: Copy + Default + Send + Sync>(
    x: &[T],
    shape: &mut [usize],
    axis: usize,
    taps: &[Tap],
    mix: fn(T, T, f32) -> T,
) -> OpResult<Vec<T>> {
    let (_, n, inner) = around(shape, axis);
    shape[axis] = taps.len();
    let mut y = vec![T::default(); count(shape)?];
    let rows = (RESAMPLED / inner.max(1)).max(1);
    Pool::global().for_chunks(&mut y, rows * inner, &|i, y| {
        for (row, y) in (i * rows..).zip(y.chunks_exact_mut(inner.max(1))) {
            let (o, (a, b, f)) = (row / taps.len(), taps[row % taps.len()]);
            let at = |k: usize| &x[(o * n + k) * inner..][..inner];
            match f {
                0.0 => y.copy_from_slice(at(a)),
                _ => y.iter_mut().zip(at(a).iter().zip(at(b))).for_each(|(y, (a, b))| *y = mix(*a, *b, f)),
            }
        }
    });
    Ok(y)
}

/// Reads the new size of each resized axis, from the last one on, and its taps.
fn resized_axes(c: &OpContext<'_>, shape: &[usize]) -> OpResult<Vec<(usize, Vec<Tap>)>> {
    let rank = shape.len();
    let scaled = |name: &str, n: usize| -> OpResult<usize> {
        let f = c.float(name, 1.0)?;
        let size = (n as f64 * f64::from(f)).floor();
        if f > 0.0 && size < 1e9 { Ok(size as usize) } else { invalid(format!("parameter `{name}` is {f}")) }
    };
    let sizes: Vec<usize> = match c.op {
        "resize" => {
            let wanted = c.ints("shape")?.unwrap_or(&[]);
            let axes = usize::try_from(c.int("resized_dims", 0)?).unwrap_or(usize::MAX);
            if axes > wanted.len() || wanted.len() > rank {
                return invalid(format!(
                    "{axes} resized_dims of shape {wanted:?} for input of shape {shape:?}"
                ));
            }
            let own = &shape[rank - axes..];
            let sizes = wanted[wanted.len() - axes..].iter().zip(own).map(|(&n, &own)| match n {
                0 => Ok(own),
                n => usize::try_from(n).map_err(|_| OpError::Invalid(format!("shape {wanted:?}"))),
            });
            sizes.collect::<OpResult<_>>()?
        }
        _ if rank < 3 => return invalid(format!("input of shape {shape:?}, expected rank 3 or more")),
        "upsample_nearest_neighbor" | "upsample_bilinear" => vec![
            scaled("scale_factor_height", shape[rank - 2])?,
            scaled("scale_factor_width", shape[rank - 1])?,
        ],
        _ => vec![c.size("target_size_height", 1)?, c.size("target_size_width", 1)?],
    };
    let mode = c.str("sampling_mode", "DEFAULT")?;
    let nearest = c.op.ends_with("nearest_neighbor")
        || match c.str("interpolation_mode", "LINEAR")? {
            "LINEAR" => false,
            "NEAREST_NEIGHBOR" => true,
            other => return invalid(format!("interpolation_mode `{other}`")),
        };
    let mut axes = Vec::new();
    for (axis, o) in (rank - sizes.len()..).zip(sizes) {
        let n = shape[axis];
        // A tap takes the memory of six elements, a place of two.
        count(&[8, o])?;
        let places = match c.op {
            _ if n == 0 => return invalid(format!("input of shape {shape:?}: an empty image")),
            "upsample_nearest_neighbor" => (0..o).map(|i| (i * n / o) as f64).collect(),
            "upsample_bilinear" => {
                let aligned = c.bool("align_corners", true)?;
                match (aligned, c.bool("half_pixel_centers", !aligned)?) {
                    (true, _) => grid("STRICT_ALIGN_CORNERS", n as f64, o)?,
                    (_, true) => grid("UNALIGN_CORNERS", n as f64, o)?,
                    _ => (0..o).map(|i| i as f64 * n as f64 / o as f64).collect(),
                }
            }
            // The pixel under the centre of each result, as TensorFlow's half_pixel_centers has it: coremltools writes
            // those resizes as this op.
            _ if nearest && mode == "DEFAULT" => (0..o).map(|i| ((2 * i + 1) * n / (2 * o)) as f64).collect(),
            _ if nearest => grid(mode, n as f64, o)?.iter().map(|v| (v + 0.5).floor()).collect(),
            _ => grid(mode, n as f64, o)?,
        };
        axes.push((axis, places.iter().map(|&place| tap(place, n)).collect()));
    }
    axes.reverse();
    Ok(axes)
}

/// Computes `resize`, and `resize_*` and `upsample_*` of the last two axes.
pub(super) fn resize(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let x = c.arg("x")?;
    let axes = resized_axes(c, &x.shape)?;
    fn passes<T: Copy + Default + Send + Sync>(
        x: &[T],
        shape: &mut [usize],
        axes: &[(usize, Vec<Tap>)],
        mix: fn(T, T, f32) -> T,
    ) -> OpResult<Vec<T>> {
        axes.iter().try_fold(x.to_vec(), |x, (axis, taps)| resize_axis(&x, shape, *axis, taps, mix))
    }
    let mut shape = x.shape.clone();
    out[0] = match &x.data {
        Data::F32(v) => {
            let y = passes(v, &mut shape, &axes, |a, b, f| a * (1.0 - f) + b * f)?;
            Tensor { data: Data::F32(y), shape }
        }
        Data::I32(v) if axes.iter().all(|(_, taps)| taps.iter().all(|t| t.2 == 0.0)) => {
            let y = passes(v, &mut shape, &axes, |a, _, _| a)?;
            Tensor { data: Data::I32(y), shape }
        }
        _ => return unsupported("interpolation between other than floats"),
    };
    Ok(())
}

/// Reads a plane of `h` rows and `w` columns at a place inside it, bilinearly.
fn bilinear(plane: &[f32], w: usize, (a, b, fr): Tap, (p, q, fc): Tap) -> f32 {
    let row = |r: usize| mix(plane[r * w + p], plane[r * w + q], fc);
    mix(row(a), row(b), fr)
}

/// Computes `a (1 - f) + b f`; `b` does not count where `f` is zero.
fn mix(a: f32, b: f32, f: f32) -> f32 {
    if f == 0.0 { a } else { a * (1.0 - f) + b * f }
}

/// Computes `crop_resize`, with boxes in `roi` (iOS15, iOS16) or in `boxes` and `box_indices` (iOS17).
pub(super) fn crop_resize(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let (xs, x) = c.f32s("x")?;
    let &[batch, channels, h, w] = xs else {
        return invalid(format!("input of shape {xs:?}, expected rank 4"));
    };
    if h == 0 || w == 0 {
        return invalid(format!("input of shape {xs:?}: an empty image"));
    }
    let (oh, ow) = (c.size("target_height", 1)?, c.size("target_width", 1)?);
    // Each box with the images that it is cut from.
    let mut boxes: Vec<(Range<usize>, [f32; 4])> = Vec::new();
    let image = |index: i64| match usize::try_from(index) {
        Ok(i) if i < batch => Ok(i..i + 1),
        _ => invalid(format!("a box of image {index} of {batch}")),
    };
    let shape: Vec<usize> = if c.get("roi").is_some() {
        let (rs, r) = c.f32s("roi")?;
        let &[n, 1, fields @ (4 | 5), 1, 1] = rs else {
            return invalid(format!("roi of shape {rs:?}, expected (N, 1, 4, 1, 1) or (N, 1, 5, 1, 1)"));
        };
        for row in r.chunks_exact(fields) {
            let images = if fields == 5 { image(row[0] as i64)? } else { 0..batch };
            boxes.push((images, std::array::from_fn(|k| row[fields - 4 + k])));
        }
        vec![n, if fields == 5 { 1 } else { batch }, channels, oh, ow]
    } else {
        let t = c.arg("boxes")?;
        let values = c.numbers("boxes")?;
        let &[n, 4] = t.shape.as_slice() else {
            return invalid(format!("boxes of shape {:?}, expected (N, 4)", t.shape));
        };
        let indices = c.ints("box_indices")?;
        if indices.is_some_and(|v| v.len() != n) {
            return invalid(format!("box_indices of another length than {n} boxes"));
        }
        for (k, row) in values.chunks_exact(4).enumerate() {
            let index = indices.map_or(k as i64, |v| i64::from(v[k]));
            boxes.push((image(index)?, [row[0], row[1], row[2], row[3]]));
        }
        vec![n, channels, oh, ow]
    };
    let mode = c.str("sampling_mode", "DEFAULT")?;
    let coordinates = c.str("box_coordinate_mode", "CORNERS_HEIGHT_FIRST")?;
    let (normalized, scale) = (c.bool("normalized_coordinates", false)?, c.float("spatial_scale", 1.0)?);
    let outside = c.float("pad_value", 0.0)?;
    // Places along an axis of `n` elements, of a box from `start` to `end`.
    let places = |n: usize, start: f32, end: f32, o: usize| -> OpResult<Vec<f64>> {
        let factor = f64::from(scale) * if normalized { (n - 1) as f64 } else { 1.0 };
        let (start, end) = (f64::from(start) * factor, f64::from(end) * factor);
        let inside = |v: f64| if mode == "DEFAULT" { v.min((end - start).max(0.0)) } else { v };
        Ok(match mode {
            // Core ML's CPU lays this grid over the whole image (coremltools' op tests).
            "UNALIGN_CORNERS" => grid(mode, n as f64, o)?,
            _ => grid(mode, end - start + 1.0, o)?.into_iter().map(|v| start + inside(v)).collect(),
        })
    };
    // A place takes the memory of two elements.
    count(&[2, oh.max(ow)])?;
    count(&shape)?;
    let y = out[0].reset_f32(&shape);
    let mut planes = y.chunks_exact_mut((oh * ow).max(1));
    for (images, b) in boxes {
        let [top, left, bottom, right] = match coordinates {
            "CORNERS_HEIGHT_FIRST" => b,
            "CORNERS_WIDTH_FIRST" => [b[1], b[0], b[3], b[2]],
            "CENTER_SIZE_HEIGHT_FIRST" | "CENTER_SIZE_WIDTH_FIRST" => {
                let [y, x, h, w] =
                    if coordinates.ends_with("HEIGHT_FIRST") { b } else { [b[1], b[0], b[3], b[2]] };
                [y - h / 2.0, x - w / 2.0, y + h / 2.0, x + w / 2.0]
            }
            other => return invalid(format!("box_coordinate_mode `{other}`")),
        };
        let (rows, columns) = (places(h, top, bottom, oh)?, places(w, left, right, ow)?);
        let is_inside = |place: f64, n: usize| (0.0..=(n - 1) as f64).contains(&place);
        for image in images {
            for ch in 0..channels {
                let Some(y) = planes.next() else { return Ok(()) };
                let plane = &x[(image * channels + ch) * h * w..][..h * w];
                for (y, &r) in y.chunks_exact_mut(ow.max(1)).zip(&rows) {
                    for (y, &k) in y.iter_mut().zip(&columns) {
                        let inside = is_inside(r, h) && is_inside(k, w);
                        *y = if inside { bilinear(plane, w, tap(r, h), tap(k, w)) } else { outside };
                    }
                }
            }
        }
    }
    Ok(())
}

/// Handling of places outside an image.
#[derive(Clone, Copy)]
enum Edge {
    /// A value stands there.
    Constant(f32),
    /// The nearest pixel stands there.
    Border,
    /// Pixels are mirrored at the centre of the last pixel.
    Reflection,
    /// Pixels are mirrored at the edge of the last pixel.
    Symmetric,
}

impl Edge {
    /// Moves a place to the image where pixels stand for what lies outside.
    fn settle(self, place: f64, n: usize) -> f64 {
        let last = (n - 1) as f64;
        let mirrored = |low: f64, high: f64| {
            let span = high - low;
            let at = (place - low).abs() % (2.0 * span).max(f64::MIN_POSITIVE);
            (low + if at > span { 2.0 * span - at } else { at }).clamp(0.0, last)
        };
        match self {
            Edge::Constant(_) => place,
            Edge::Border => place.clamp(0.0, last),
            Edge::Reflection => mirrored(0.0, last),
            Edge::Symmetric => mirrored(-0.5, last + 0.5),
        }
    }

    /// Reads a pixel of a plane.
    fn pixel(self, plane: &[f32], (h, w): (usize, usize), r: f64, k: f64) -> f32 {
        let inside = |v: f64, n: usize| (0.0..n as f64).contains(&v);
        match self {
            Edge::Constant(value) if !(inside(r, h) && inside(k, w)) => value,
            _ => plane[(r as usize).min(h - 1) * w + (k as usize).min(w - 1)],
        }
    }

    /// Samples a plane of `h` rows and `w` columns.
    fn sample(self, plane: &[f32], size: (usize, usize), nearest: bool, (r, k): (f64, f64)) -> f32 {
        let (r, k) = (self.settle(r, size.0), self.settle(k, size.1));
        if !(r.is_finite() && k.is_finite()) {
            return if let Edge::Constant(value) = self { value } else { f32::NAN };
        }
        if nearest {
            return self.pixel(plane, size, r.round_ties_even(), k.round_ties_even());
        }
        let (a, p) = (r.floor(), k.floor());
        let row = |r: f64| {
            let at = |k: f64| self.pixel(plane, size, r, k);
            mix(at(p), at(p + 1.0), (k - p) as f32)
        };
        mix(row(a), row(a + 1.0), (r - a) as f32)
    }
}

/// Samples every channel of `x` at the places that `at` gives to each image and pixel of the result.
fn sampled(
    c: &OpContext<'_>,
    (oh, ow): (usize, usize),
    edge: Edge,
    nearest: bool,
    at: &(dyn Fn(usize, usize) -> (f64, f64) + Sync),
    out: &mut Tensor,
) -> OpResult {
    let (xs, x) = c.f32s("x")?;
    let (channels, size) = (xs[1], (xs[2], xs[3]));
    let shape = [xs[0], channels, oh, ow];
    count(&shape)?;
    let y = out.reset_f32(&shape);
    if y.is_empty() {
        return Ok(());
    }
    if size.0 == 0 || size.1 == 0 {
        return invalid(format!("input of shape {xs:?}: an empty image"));
    }
    Pool::global().for_chunks(y, oh * ow, &|plane, y| {
        let source = &x[plane * size.0 * size.1..][..size.0 * size.1];
        for (k, y) in y.iter_mut().enumerate() {
            *y = edge.sample(source, size, nearest, at(plane / channels, k));
        }
    });
    Ok(())
}

/// Reads `coordinates_mode` and `align_corners`: the place on an axis of `n` pixels that a coordinate means.
fn placement(c: &OpContext<'_>) -> OpResult<impl Fn(f64, usize) -> f64 + Sync + use<>> {
    let aligned = c.bool("align_corners", true)?;
    // A coordinate `v` lies at `scale v + offset` of an axis from 0 to 1.
    let unit = match c.str("coordinates_mode", "unnormalized")? {
        "unnormalized" => None,
        "normalized_minus_one_to_one" => Some((0.5, 0.5)),
        "normalized_zero_to_one" => Some((1.0, 0.0)),
        other => return invalid(format!("coordinates_mode `{other}`")),
    };
    Ok(move |v: f64, n: usize| match unit {
        None => v,
        Some((scale, offset)) if aligned => (v * scale + offset) * (n as f64 - 1.0),
        Some((scale, offset)) => (v * scale + offset) * n as f64 - 0.5,
    })
}

/// Reads `sampling_mode` and the padding: true for the nearest pixel.
fn sampling(c: &OpContext<'_>) -> OpResult<(bool, Edge)> {
    let nearest = match c.str("sampling_mode", "bilinear")? {
        "bilinear" => false,
        "nearest" => true,
        other => return invalid(format!("sampling_mode `{other}`")),
    };
    let edge = match c.str("padding_mode", "constant")? {
        "constant" => Edge::Constant(c.float("padding_value", 0.0)?),
        "border" => Edge::Border,
        "reflection" => Edge::Reflection,
        "symmetric" => Edge::Symmetric,
        other => return invalid(format!("padding_mode `{other}`")),
    };
    Ok((nearest, edge))
}

/// Samples images `[B, C, H, W]` at `coordinates`, `[B, H2, W2, (x, y)]`.
pub(super) fn resample(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let (xs, _) = c.f32s("x")?;
    let t = c.arg("coordinates")?;
    let (&[batch, _, h, w], &[images, oh, ow, 2]) = (xs, t.shape.as_slice()) else {
        return invalid(format!("input of shape {xs:?} with coordinates of shape {:?}", t.shape));
    };
    if batch != images {
        return invalid(format!("{batch} images with coordinates for {images}"));
    }
    let coordinates = c.exact_numbers("coordinates")?;
    let (place, (nearest, edge)) = (placement(c)?, sampling(c)?);
    let at = |image: usize, k: usize| {
        let first = 2 * (image * oh * ow + k);
        (place(coordinates[first + 1], h), place(coordinates[first], w))
    };
    sampled(c, (oh, ow), edge, nearest, &at, &mut out[0])
}

/// Samples images at `(a0 x + a1 y + a2, b0 x + b1 y + b2)`, with `x` and `y` from -1 to 1 over the result.
pub(super) fn affine(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let ((xs, _), (ms, m)) = (c.f32s("x")?, c.f32s("transform_matrix")?);
    let (&[batch, _, h, w], &[matrices, 6]) = (xs, ms) else {
        return invalid(format!("input of shape {xs:?} with a transform_matrix of shape {ms:?}"));
    };
    if matrices != 1 && matrices != batch {
        return invalid(format!("{batch} images with {matrices} matrices"));
    }
    let size = |name: &str| c.arg(name).and_then(|_| c.size(name, 0));
    let (oh, ow) = (size("output_height")?, size("output_width")?);
    if c.str("coordinates_mode", "")? != "normalized_minus_one_to_one" {
        return unsupported("affine with other than coordinates from -1 to 1");
    }
    let (place, (nearest, edge)) = (placement(c)?, sampling(c)?);
    let is_aligned = c.bool("align_corners", true)?;
    let unit = |i: usize, n: usize| match is_aligned {
        true if n > 1 => 2.0 * i as f64 / (n - 1) as f64 - 1.0,
        true => 0.0,
        // The centre of a pixel, where the ends are the edges of the first and the last one.
        false => (2 * i + 1) as f64 / n as f64 - 1.0,
    };
    let at = |image: usize, k: usize| {
        let m = &m[if matrices == 1 { 0 } else { 6 * image }..][..6];
        let (x, y) = (unit(k % ow, ow), unit(k / ow, oh));
        let along = |m: &[f32]| f64::from(m[0]) * x + f64::from(m[1]) * y + f64::from(m[2]);
        (place(along(&m[3..]), h), place(along(m), w))
    };
    sampled(c, (oh, ow), edge, nearest, &at, &mut out[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(value: &str) -> Tensor {
        Tensor { shape: vec![], data: Data::Str(vec![value.into()]) }
    }

    fn run(function: super::super::OpFunction, op: &str, inputs: &[(&str, Tensor)]) -> OpResult<Tensor> {
        let bound: Vec<(&str, &Tensor)> = inputs.iter().map(|(n, t)| (*n, t)).collect();
        let mut out = [Tensor::default()];
        function(&OpContext { op, inputs: &bound, values: &[], outputs: &[] }, &mut out)?;
        let [out] = out;
        Ok(out)
    }

    fn close(found: &Tensor, expected: &[f32]) {
        let found = found.as_f32().unwrap();
        assert_eq!(found.len(), expected.len(), "{found:?}");
        assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{found:?} {expected:?}");
    }

    /// Checks grid points of coremltools' documentation of `resize_bilinear`.
    #[test]
    fn sampling_modes_have_their_grids() {
        let five = [
            ("UNALIGN_CORNERS", [0.0, 0.1, 0.5, 0.9, 1.0]),
            ("STRICT_ALIGN_CORNERS", [0.0, 0.25, 0.5, 0.75, 1.0]),
            ("ALIGN_CORNERS", [0.0, 0.25, 0.5, 0.75, 1.0]),
            ("DEFAULT", [0.0, 0.4, 0.8, 1.0, 1.0]),
            ("OFFSET_CORNERS", [0.1, 0.3, 0.5, 0.7, 0.9]),
        ];
        for (mode, expected) in five {
            let inputs = [
                ("x", Tensor::f32(&[1, 1, 2], vec![0.0, 1.0])),
                ("target_size_width", Tensor::i32(&[], vec![5])),
                ("sampling_mode", text(mode)),
            ];
            close(&run(resize, "resize_bilinear", &inputs).unwrap(), &expected);
        }
        for (mode, expected) in
            [("ALIGN_CORNERS", 1.0), ("STRICT_ALIGN_CORNERS", 0.0), ("OFFSET_CORNERS", 1.0)]
        {
            let inputs = [("x", Tensor::f32(&[1, 1, 3], vec![0.0, 1.0, 2.0])), ("sampling_mode", text(mode))];
            close(&run(resize, "resize_bilinear", &inputs).unwrap(), &[expected]);
        }
    }

    #[test]
    fn resize_takes_sizes_from_the_right_and_keeps_zeros() {
        let sizes = |shape: &[i32], axes: i32| {
            [
                ("shape", Tensor::i32(&[shape.len()], shape.to_vec())),
                ("resized_dims", Tensor::i32(&[], vec![axes])),
            ]
        };
        let mut inputs = vec![("x", Tensor::f32(&[1, 2, 1], vec![-1.0, 3.0]))];
        inputs.extend(sizes(&[1, 3, 2], 2));
        inputs.push(("interpolation_mode", text("NEAREST_NEIGHBOR")));
        let y = run(resize, "resize", &inputs).unwrap();
        assert_eq!(y, Tensor::f32(&[1, 3, 2], vec![-1.0, -1.0, 3.0, 3.0, 3.0, 3.0]));
        inputs[0].1 = Tensor::i32(&[1, 2, 1], vec![-1, 3]);
        inputs[1].1 = Tensor::i32(&[2], vec![0, 2]);
        assert_eq!(run(resize, "resize", &inputs).unwrap(), Tensor::i32(&[1, 2, 2], vec![-1, -1, 3, 3]));
        inputs[2].1 = Tensor::i32(&[], vec![3]);
        assert!(run(resize, "resize", &inputs).unwrap_err().to_string().contains("resized_dims"));
    }

    /// Results that coremltools' op tests state.
    #[test]
    fn boxes_are_cut_and_resized() {
        let x = Tensor::f32(&[1, 1, 4, 4], (1..17).map(|v| v as f32).collect());
        let with = |roi: Tensor, size: i32, normalized: bool, mode: &str| {
            let inputs = [
                ("x", x.clone()),
                ("roi", roi),
                ("target_height", Tensor::i32(&[], vec![size])),
                ("target_width", Tensor::i32(&[], vec![size])),
                ("normalized_coordinates", Tensor { shape: vec![], data: Data::Bool(vec![normalized]) }),
                ("sampling_mode", text(mode)),
                ("pad_value", Tensor::f32(&[], vec![10.0])),
            ];
            run(crop_resize, "crop_resize", &inputs).unwrap()
        };
        let roi = |v: [f32; 4]| Tensor::f32(&[1, 1, 4, 1, 1], v.to_vec());
        close(&with(roi([1.0, 1.0, 2.0, 2.0]), 2, false, "ALIGN_CORNERS"), &[6.0, 7.0, 10.0, 11.0]);
        close(&with(roi([1.0, 1.0, 2.0, 2.0]), 1, false, "ALIGN_CORNERS"), &[8.5]);
        close(&with(roi([2.0, 2.0, 1.0, 1.0]), 2, false, "ALIGN_CORNERS"), &[11.0, 10.0, 7.0, 6.0]);
        close(&with(roi([2.0, 2.0, 1.0, 1.0]), 2, true, "UNALIGN_CORNERS"), &[3.5, 5.5, 11.5, 13.5]);
        let y = with(Tensor::f32(&[1, 1, 5, 1, 1], vec![0.0, 0.1, 0.3, 1.3, 1.0]), 2, true, "ALIGN_CORNERS");
        assert_eq!(y.shape, [1, 1, 1, 2, 2]);
        close(&y, &[3.1, 5.2, 10.0, 10.0]);
    }

    /// Results that coremltools' op tests state.
    #[test]
    fn places_outside_an_image_follow_the_padding_mode() {
        let coordinates = vec![-1.0, -2.0, -3.7, -1.0, 0.0, 0.0, 3.5, 1.2];
        let cases = [
            ("bilinear", "constant", 6.17, "normalized_minus_one_to_one", true, [8.585, 6.17, 27.5, 6.17]),
            ("nearest", "border", -1.0, "unnormalized", false, [11.0, 11.0, 11.0, 44.0]),
            ("bilinear", "reflection", -1.0, "normalized_zero_to_one", true, [22.0, 36.3, 11.0, 34.1]),
            ("nearest", "symmetric", -1.0, "normalized_zero_to_one", false, [22.0, 33.0, 11.0, 33.0]),
        ];
        for (sampling, padding, value, mode, aligned, expected) in cases {
            let inputs = [
                ("x", Tensor::f32(&[1, 1, 2, 2], vec![11.0, 22.0, 33.0, 44.0])),
                ("coordinates", Tensor::f32(&[1, 2, 2, 2], coordinates.clone())),
                ("sampling_mode", text(sampling)),
                ("padding_mode", text(padding)),
                ("padding_value", Tensor::f32(&[], vec![value])),
                ("coordinates_mode", text(mode)),
                ("align_corners", Tensor { shape: vec![], data: Data::Bool(vec![aligned]) }),
            ];
            close(&run(resample, "resample", &inputs).unwrap(), &expected);
        }
    }

    #[test]
    fn affine_transforms_an_image() {
        let inputs = [
            ("x", Tensor::f32(&[1, 1, 2, 2], vec![11.0, 22.0, 33.0, 44.0])),
            ("transform_matrix", Tensor::f32(&[1, 6], vec![-1.0, -2.0, -3.7, -1.0, 3.5, 1.2])),
            ("output_height", Tensor::i32(&[], vec![2])),
            ("output_width", Tensor::i32(&[], vec![5])),
            ("coordinates_mode", text("normalized_minus_one_to_one")),
        ];
        let expected = [10.7525, 5.94, 2.5025, 0.44, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        close(&run(affine, "affine", &inputs).unwrap(), &expected);
    }

    /// Checks a turned image against torch's affine_grid and grid_sample with align_corners=False.
    #[test]
    fn affine_reads_from_edge_to_edge_where_corners_are_not_aligned() {
        let inputs = [
            ("x", Tensor::f32(&[1, 1, 2, 3], vec![1.0, 2.0, 4.0, 8.0, 16.0, 32.0])),
            ("transform_matrix", Tensor::f32(&[1, 6], vec![0.5, 0.25, 0.0, -0.25, 1.0, 0.125])),
            ("output_height", Tensor::i32(&[], vec![2])),
            ("output_width", Tensor::i32(&[], vec![2])),
            ("coordinates_mode", text("normalized_minus_one_to_one")),
            ("align_corners", Tensor { shape: vec![], data: Data::Bool(vec![false]) }),
        ];
        close(&run(affine, "affine", &inputs).unwrap(), &[3.953_125, 2.375, 10.875, 25.0]);
    }

    #[test]
    fn sizes_that_nothing_justifies_are_refused() {
        let side = |n: i32| Tensor::i32(&[], vec![n]);
        let resized = [
            ("x", Tensor::f32(&[1, 4, 1], vec![1.0; 4])),
            ("target_size_height", side(1)),
            ("target_size_width", side(1 << 30)),
        ];
        let boxes = [
            ("x", Tensor::f32(&[2, 0, 1, 1], vec![])),
            ("boxes", Tensor::f32(&[1, 4], vec![0.0; 4])),
            ("target_height", side(i32::MAX)),
        ];
        let refused =
            |result: OpResult<Tensor>| assert!(result.unwrap_err().to_string().contains("too large"));
        refused(run(resize, "resize_bilinear", &resized));
        refused(run(crop_resize, "crop_resize", &boxes));
    }
}
