//! Types of ops that crop and resample images.

use super::context::{Checked, Context, Inferred};
use super::infer::one;
use super::infer_shape::dim;
use crate::mil::{DataType, Dim, TensorType, ValueType};

/// Infers the type of upsampling by constant factors; factors that are not constant give unknown sizes.
pub(super) fn upsample(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let rank = x.rank();
    if rank < 3 {
        return Err(format!("input of rank {rank}"));
    }
    let factor = |param: &str| -> Checked<Option<f64>> {
        if !c.has(param) {
            return Ok(Some(1.0));
        }
        let Some(value) = c.operand(param)?.value else { return Ok(None) };
        match value.tensor_data() {
            Some(crate::mil::TensorData::Ints(v)) if v.len() == 1 => Ok(Some(f64::from(v[0]))),
            Some(crate::mil::TensorData::Floats(v)) if v.len() == 1 => Ok(Some(f64::from(v[0]))),
            Some(crate::mil::TensorData::Bytes(b)) if b.len() == 2 => {
                Ok(Some(f64::from(half::f16::from_le_bytes([b[0], b[1]]).to_f32())))
            }
            _ => Err(format!("parameter `{param}` must be a number")),
        }
    };
    let mut dims = x.dims.clone();
    for (i, param) in [(rank - 2, "scale_factor_height"), (rank - 1, "scale_factor_width")] {
        dims[i] = match (dims[i], factor(param)?) {
            (Dim::Fixed(n), Some(f)) if f.is_finite() && f > 0.0 && f * (n as f64) < 1e15 => {
                Dim::Fixed((n as f64 * f).floor() as u64)
            }
            (Dim::Fixed(_), Some(f)) => return Err(format!("parameter `{param}` is {f}")),
            _ => Dim::Unknown,
        };
    }
    one(x.dtype, dims)
}

/// Reads a constant size; the default where it is left out.
fn size(c: &Context<'_>, param: &str) -> Checked<Dim> {
    dim(c.int(param, 1)?)
}

/// Checks that a text is one of `known`.
fn one_of(c: &Context<'_>, param: &str, known: &[&str]) -> Checked<()> {
    match c.text(param)? {
        Some(text) if !known.contains(&text) => {
            Err(format!("parameter `{param}`: `{text}` is none of {}", known.join(", ")))
        }
        _ => Ok(()),
    }
}

const SAMPLING_MODES: &[&str] =
    &["DEFAULT", "STRICT_ALIGN_CORNERS", "ALIGN_CORNERS", "OFFSET_CORNERS", "UNALIGN_CORNERS"];

/// Infers the type of resizing to constant sizes.
pub(super) fn resize_to(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let rank = x.rank();
    if rank < 3 {
        return Err(format!("input of rank {rank}"));
    }
    one_of(c, "sampling_mode", SAMPLING_MODES)?;
    let mut dims = x.dims.clone();
    dims[rank - 2] = size(c, "target_size_height")?;
    dims[rank - 1] = size(c, "target_size_width")?;
    one(x.dtype, dims)
}

pub(super) fn crop(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let rank = x.rank();
    if rank < 3 {
        return Err(format!("input of rank {rank}"));
    }
    let mut dims = x.dims.clone();
    for (i, param) in [(rank - 2, "crop_height"), (rank - 1, "crop_width")] {
        let edges = c.const_ints(param)?;
        if edges.len() != 2 {
            return Err(format!("parameter `{param}` must have two values"));
        }
        if let Dim::Fixed(n) = dims[i] {
            dims[i] = dim((n as i64).saturating_sub(edges[0]).saturating_sub(edges[1]))?;
        }
    }
    one(x.dtype, dims)
}

/// Infers the type of `resize`: the last `resized_dims` sizes are those of `shape`, where they are not 0.
pub(super) fn resize(c: &Context<'_>) -> Inferred {
    let (x, sizes) = (c.tensor("x")?, c.tensor("shape")?);
    one_of(c, "sampling_mode", SAMPLING_MODES)?;
    one_of(c, "interpolation_mode", &["LINEAR", "NEAREST_NEIGHBOR"])?;
    let axes = c.count("resized_dims")?;
    let length = match sizes.dims.as_slice() {
        [Dim::Fixed(n)] => usize::try_from(*n).unwrap_or(usize::MAX),
        _ => return Err(format!("a shape of type {sizes}")),
    };
    if axes > length || length > x.rank() {
        return Err(format!(
            "{axes} resized_dims of a shape of length {length} for input of rank {}",
            x.rank()
        ));
    }
    let mut dims = x.dims.clone();
    let first = x.rank() - axes;
    match c.ints("shape") {
        None => dims[first..].fill(Dim::Unknown),
        Some(sizes) => {
            for (d, &n) in dims[first..].iter_mut().zip(&sizes[length - axes..]) {
                *d = if n == 0 { *d } else { dim(n)? };
            }
        }
    }
    one(x.dtype, dims)
}

/// Returns the dimensions of an operand that must have `rank` of them.
fn ranked<'a>(c: &Context<'a>, param: &str, rank: usize) -> Checked<&'a TensorType> {
    let t = c.tensor(param)?;
    if t.rank() == rank { Ok(t) } else { Err(format!("parameter `{param}` is {t}, expected rank {rank}")) }
}

/// Tells whether two sizes may be equal.
pub(super) fn agree(a: Dim, b: Dim) -> bool {
    a == b || a == Dim::Unknown || b == Dim::Unknown
}

/// Infers the type of cut boxes: of `roi` in iOS15 and iOS16, of `boxes` in iOS17.
pub(super) fn crop_resize(c: &Context<'_>) -> Inferred {
    let x = ranked(c, "x", 4)?;
    one_of(c, "sampling_mode", SAMPLING_MODES)?;
    let boxes = [
        "CORNERS_HEIGHT_FIRST",
        "CORNERS_WIDTH_FIRST",
        "CENTER_SIZE_HEIGHT_FIRST",
        "CENTER_SIZE_WIDTH_FIRST",
    ];
    one_of(c, "box_coordinate_mode", &boxes)?;
    let (h, w) = (size(c, "target_height")?, size(c, "target_width")?);
    if c.has("roi") {
        let roi = ranked(c, "roi", 5)?;
        let fits = [1, 3, 4].iter().all(|&i| agree(roi.dims[i], Dim::Fixed(1)));
        return match roi.dims[2] {
            Dim::Fixed(4) if fits => one(x.dtype, vec![roi.dims[0], x.dims[0], x.dims[1], h, w]),
            Dim::Fixed(5) if fits => one(x.dtype, vec![roi.dims[0], Dim::Fixed(1), x.dims[1], h, w]),
            _ => Err(format!("parameter `roi` is {roi}, expected [N, 1, 4, 1, 1] or [N, 1, 5, 1, 1]")),
        };
    }
    let boxes = ranked(c, "boxes", 2)?;
    if !agree(boxes.dims[1], Dim::Fixed(4)) {
        return Err(format!("parameter `boxes` is {boxes}, expected [N, 4]"));
    }
    if c.has("box_indices") && !agree(ranked(c, "box_indices", 1)?.dims[0], boxes.dims[0]) {
        return Err(format!("box_indices of type {} for boxes of type {boxes}", c.tensor("box_indices")?));
    }
    one(x.dtype, vec![boxes.dims[0], x.dims[1], h, w])
}

/// Infers the type of images sampled at `coordinates`, `[B, H2, W2, 2]`.
pub(super) fn resample(c: &Context<'_>) -> Inferred {
    let (x, at) = (ranked(c, "x", 4)?, ranked(c, "coordinates", 4)?);
    one_of(c, "sampling_mode", &["bilinear", "nearest"])?;
    one_of(c, "padding_mode", &["constant", "border", "reflection", "symmetric"])?;
    if !agree(at.dims[0], x.dims[0]) || !agree(at.dims[3], Dim::Fixed(2)) {
        return Err(format!("coordinates of type {at} for input of type {x}"));
    }
    one(x.dtype, vec![x.dims[0], x.dims[1], at.dims[1], at.dims[2]])
}

/// Infers the type of transformed images; the matrices are `[B, 6]` or `[1, 6]`.
pub(super) fn affine(c: &Context<'_>) -> Inferred {
    let (x, m) = (ranked(c, "x", 4)?, ranked(c, "transform_matrix", 2)?);
    let single = m.dims[0] == Dim::Fixed(1);
    if !(single || agree(m.dims[0], x.dims[0])) || !agree(m.dims[1], Dim::Fixed(6)) {
        return Err(format!("a transform_matrix of type {m} for input of type {x}"));
    }
    one(x.dtype, vec![x.dims[0], x.dims[1], size(c, "output_height")?, size(c, "output_width")?])
}

/// Infers selected boxes, their scores and their indices; in iOS15, which has `score_threshold`, also their number.
pub(super) fn non_maximum_suppression(c: &Context<'_>) -> Inferred {
    let (boxes, scores) = (ranked(c, "boxes", 3)?, ranked(c, "scores", 3)?);
    let most = dim(c.int("max_boxes", 0)?)?;
    let counted = c.has("score_threshold");
    // Axes of the boxes and of what each box has.
    let (all, fields) = if counted { (1, 2) } else { (2, 1) };
    if !agree(boxes.dims[fields], Dim::Fixed(4))
        || !agree(boxes.dims[all], scores.dims[all])
        || !agree(boxes.dims[0], scores.dims[0])
    {
        return Err(format!("boxes of type {boxes} with scores of type {scores}"));
    }
    let mut results = Vec::new();
    for t in [boxes, scores] {
        let mut dims = t.dims.clone();
        dims[all] = most;
        results.push(TensorType { dtype: t.dtype, dims });
    }
    results.push(TensorType { dtype: DataType::Int32, dims: vec![boxes.dims[0], most] });
    if counted {
        results.push(TensorType { dtype: DataType::Int32, dims: vec![boxes.dims[0]] });
    }
    Ok(results.into_iter().map(ValueType::Tensor).collect())
}
