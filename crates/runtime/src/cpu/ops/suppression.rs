//! `non_maximum_suppression`: the best boxes that do not overlap better ones.

use super::operands::{OpContext, OpResult};
use super::shape::{count, invalid};
use crate::tensor::Tensor;

/// A box by its corners.
struct Corners {
    low: [f32; 2],
    high: [f32; 2],
    area: f32,
}

impl Corners {
    /// Makes a box from its centre and size, x first.
    fn new([x, y, w, h]: [f32; 4]) -> Corners {
        let (a, b) = ([x - 0.5 * w, y - 0.5 * h], [x + 0.5 * w, y + 0.5 * h]);
        let pick = |f: fn(f32, f32) -> f32| [f(a[0], b[0]), f(a[1], b[1])];
        let (low, high) = (pick(f32::min), pick(f32::max));
        Corners { low, high, area: (high[0] - low[0]) * (high[1] - low[1]) }
    }

    /// Computes the intersection with another box over the union; 0 where a box is empty.
    fn overlap(&self, other: &Corners) -> f32 {
        let side = |i: usize| self.high[i].min(other.high[i]) - self.low[i].max(other.low[i]);
        // Most boxes lie apart: along x or y already.
        let (x, y) = (side(0), if side(0) > 0.0 { side(1) } else { 0.0 });
        if y > 0.0 && self.area > 0.0 && other.area > 0.0 {
            x * y / (self.area + other.area - x * y)
        } else {
            0.0
        }
    }
}

/// Selects boxes of each image in the order of their best scores; one box remains even where no score is large enough.
///
/// ```text
/// iOS15  boxes [n, B, 4], scores [n, B, K] --> [n, max, 4], [n, max, K], indices [n, max], number [n]
/// iOS17  boxes [n, 4, B], scores [n, K, B] --> [n, 4, max], [n, K, max], indices [n, max]
/// ```
/// Places without a box have coordinates and scores of 0 and the index -1.
pub(super) fn non_maximum_suppression(c: &OpContext<'_>, out: &mut [Tensor]) -> OpResult {
    let ((bs, boxes), (ss, scores)) = (c.f32s("boxes")?, c.f32s("scores")?);
    // iOS17 has no threshold of scores, and boxes along the last axis.
    let boxes_last = c.get("score_threshold").is_none();
    let (&[n, b1, b2], &[n2, s1, s2]) = (bs, ss) else {
        return invalid(format!("boxes of shape {bs:?} with scores of shape {ss:?}, expected rank 3"));
    };
    let ((all, fields), (all2, classes)) =
        if boxes_last { ((b2, b1), (s2, s1)) } else { ((b1, b2), (s1, s2)) };
    if n != n2 || all != all2 || fields != 4 || classes == 0 {
        return invalid(format!("boxes of shape {bs:?} with scores of shape {ss:?}"));
    }
    let required = |name: &str| c.arg(name).and_then(|_| c.float(name, 0.0));
    let threshold = required("iou_threshold")?;
    let enough = c.float("score_threshold", f32::NEG_INFINITY)?;
    let most = c.arg("max_boxes").and_then(|_| c.size("max_boxes", 0))?;
    let by_class = c.bool("per_class_suppression", false)?;
    // A field of a box of an image lies at `[image, box, field]` or `[image, field, box]`.
    let at = |image: usize, fields: usize, boxes: usize, b: usize, f: usize| {
        image * fields * boxes + if boxes_last { f * boxes + b } else { b * fields + f }
    };
    let mut kept: Vec<Vec<usize>> = Vec::with_capacity(n);
    for image in 0..n {
        let corners: Vec<Corners> =
            (0..all).map(|b| Corners::new(std::array::from_fn(|f| boxes[at(image, 4, all, b, f)]))).collect();
        // The best score of each box and its class; the first class of equal ones.
        let best: Vec<(f32, usize)> = (0..all)
            .map(|b| {
                let score = |k: usize| scores[at(image, classes, all, b, k)];
                (1..classes)
                    .fold((score(0), 0), |best, k| if score(k) > best.0 { (score(k), k) } else { best })
            })
            .collect();
        let mut order: Vec<usize> = (0..all).collect();
        order.sort_by(|&a, &b| best[b].0.total_cmp(&best[a].0));
        let mut chosen: Vec<usize> = Vec::new();
        for &b in order.iter().filter(|&&b| best[b].0 > enough) {
            if chosen.len() == most {
                break;
            }
            let suppresses = |&k: &usize| {
                (!by_class || best[k].1 == best[b].1) && corners[k].overlap(&corners[b]) > threshold
            };
            if !chosen.iter().any(suppresses) {
                chosen.push(b);
            }
        }
        if chosen.is_empty() && most > 0 {
            chosen.extend(order.first());
        }
        kept.push(chosen);
    }
    for (result, (values, fields)) in out.iter_mut().zip([(boxes, 4), (scores, classes)]) {
        let shape = if boxes_last { [n, fields, most] } else { [n, most, fields] };
        count(&shape)?;
        let y = result.reset_f32(&shape);
        y.fill(0.0);
        for (image, chosen) in kept.iter().enumerate() {
            for (place, &b) in chosen.iter().enumerate() {
                for f in 0..fields {
                    y[at(image, fields, most, place, f)] = values[at(image, fields, all, b, f)];
                }
            }
        }
    }
    if let Some(indices) = out.get_mut(2) {
        count(&[n, most])?;
        let y = indices.reset_i32(&[n, most]);
        y.fill(-1);
        for (y, chosen) in y.chunks_exact_mut(most.max(1)).zip(&kept) {
            y.iter_mut().zip(chosen).for_each(|(y, &b)| *y = b as i32);
        }
    }
    if let Some(number) = out.get_mut(3) {
        number.reset_i32(&[n]).iter_mut().zip(&kept).for_each(|(y, chosen)| *y = chosen.len() as i32);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Data;

    fn scalar(v: f32) -> Tensor {
        Tensor::f32(&[], vec![v])
    }

    fn run(inputs: &[(&str, Tensor)], results: usize) -> OpResult<Vec<Tensor>> {
        let bound: Vec<(&str, &Tensor)> = inputs.iter().map(|(n, t)| (*n, t)).collect();
        let mut out = vec![Tensor::default(); results];
        non_maximum_suppression(&OpContext { op: "", inputs: &bound, values: &[], outputs: &[] }, &mut out)?;
        Ok(out)
    }

    /// Boxes 0 and 1 overlap by 0.6; box 2 lies apart; classes are 0, 1, 0.
    fn inputs() -> Vec<(&'static str, Tensor)> {
        let boxes = vec![2.0, 2.0, 4.0, 4.0, 3.0, 2.0, 4.0, 4.0, 20.0, 20.0, 1.0, 1.0];
        vec![
            ("boxes", Tensor::f32(&[1, 3, 4], boxes)),
            ("scores", Tensor::f32(&[1, 3, 2], vec![0.9, 0.1, 0.2, 0.8, 0.7, 0.3])),
            ("iou_threshold", scalar(0.5)),
            ("max_boxes", Tensor::i32(&[], vec![4])),
            ("score_threshold", scalar(0.1)),
        ]
    }

    #[test]
    fn better_boxes_suppress_those_that_they_overlap() {
        let mut inputs = inputs();
        let found = run(&inputs, 4).unwrap();
        assert_eq!(found[2], Tensor::i32(&[1, 4], vec![0, 2, -1, -1]));
        assert_eq!(found[3], Tensor::i32(&[1], vec![2]));
        assert_eq!(
            found[0].as_f32().unwrap()[4..],
            [20.0, 20.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        );
        assert_eq!(found[1].as_f32().unwrap()[..4], [0.9, 0.1, 0.7, 0.3]);
        inputs.push(("per_class_suppression", Tensor { shape: vec![], data: Data::Bool(vec![true]) }));
        assert_eq!(run(&inputs, 4).unwrap()[2].as_i32().unwrap(), [0, 1, 2, -1]);
        inputs[4].1 = scalar(0.75);
        assert_eq!(run(&inputs, 4).unwrap()[2].as_i32().unwrap(), [0, 1, -1, -1]);
        // One box remains.
        inputs[4].1 = scalar(2.0);
        assert_eq!(run(&inputs, 4).unwrap()[3].as_i32().unwrap(), [1]);
    }

    #[test]
    fn boxes_lie_along_the_last_axis_in_ios17() {
        let mut inputs = inputs();
        inputs.pop();
        assert!(run(&inputs, 3).unwrap_err().to_string().contains("boxes of shape"));
        let swap = |t: &Tensor| {
            let (rows, columns) = (t.shape[1], t.shape[2]);
            Tensor::f32(
                &[1, columns, rows],
                super::super::linear::transposed(t.as_f32().unwrap(), rows, columns),
            )
        };
        (inputs[0].1, inputs[1].1) = (swap(&inputs[0].1), swap(&inputs[1].1));
        let found = run(&inputs, 3).unwrap();
        assert_eq!(found[2].as_i32().unwrap(), [0, 2, -1, -1]);
        assert_eq!(found[0].shape, [1, 4, 4]);
        assert_eq!(found[0].as_f32().unwrap()[..4], [2.0, 20.0, 0.0, 0.0]);
    }
}
