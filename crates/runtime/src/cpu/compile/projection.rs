//! Prepares matmuls and convolutions with constant weights.

use super::super::convolution::Convolution;
use super::super::ir::Projection;
use super::super::ops::OpContext;
use super::super::ops::OpResult;
use super::super::ops::window::WindowParams;
use super::super::weights::{Constant, StoredWeight, const_value};
use super::known_values::KnownValues;
use crate::tensor::Tensor;
use anemoe_mlpackage::mil::{Argument, Binding, Operation};
use anemoe_mlpackage::package::Package;
use std::sync::Arc;

/// Prepares a matmul or convolution with a constant weight. Returns it with the name of its other operand and the bytes made
/// from the weight. Returns none where both operands are constants, which are folded, or where the op library has to report
/// an error.
pub(super) fn projection(
    package: &Arc<Package>,
    known: &KnownValues<'_>,
    op: &Operation,
) -> OpResult<Option<(Projection, String, u64)>> {
    let constant = |param: &str| match op.inputs.get(param).and_then(|a| a.0.first()) {
        Some(Binding::Name(name)) => match known.constant(name)? {
            Constant::Stored(weight) => Some(weight),
            Constant::Dense(t) => {
                t.as_f32()?;
                StoredWeight::dense(t).ok().map(Arc::new)
            }
        },
        _ => None,
    };
    let value = |param: &str| match op.inputs.get(param).and_then(|a| a.0.first()) {
        Some(Binding::Name(x)) if known.constant(x).is_none() && known.is_float(x) => Some(x.clone()),
        _ => None,
    };
    let has_elements = |w: &Arc<StoredWeight>| !w.shape.contains(&0);
    match op.op_type.as_str() {
        "conv" => {
            let (Some(weight), Some(x)) = (constant("weight").filter(has_elements), value("x")) else {
                return Ok(None);
            };
            let fits = (3..=5).contains(&weight.shape.len()) && known.rank(&x) == weight.shape.len();
            let parameters = constant_parameters(package, known, op, &["x", "weight", "bias"]);
            let (true, Some(parameters)) = (fits, parameters) else { return Ok(None) };
            let inputs: Vec<(&str, &Tensor)> =
                parameters.iter().map(|(name, t)| (name.as_str(), t)).collect();
            let c = OpContext { op: "conv", inputs: &inputs, values: &[], outputs: &[] };
            let groups = usize::try_from(c.int("groups", 1)?).unwrap_or(0);
            if groups == 0 || weight.rows() % groups != 0 {
                return Ok(None);
            }
            let params = WindowParams::new(&c, &weight.shape[2..], true)?;
            let conv = Convolution::new(weight, groups, params)?;
            let prepared = conv.prepared_bytes();
            Ok(Some((Projection::Conv(Arc::new(conv)), x, prepared)))
        }
        "linear" => match (constant("weight").filter(has_elements), value("x")) {
            (Some(weight), Some(x)) if weight.shape.len() == 2 && known.rank(&x) >= 1 => {
                Ok(Some((Projection::Linear { weight, input: 1, output: 1 }, x, 0)))
            }
            _ => Ok(None),
        },
        "matmul" => {
            let Some(parameters) = constant_parameters(package, known, op, &["x", "y"]) else {
                return Ok(None);
            };
            let flag = |name: &str| {
                let found = parameters.iter().find(|(n, _)| n == name);
                found.and_then(|(_, t)| t.as_bool()?.first().copied()).unwrap_or(false)
            };
            let (tx, ty) = (flag("transpose_x"), flag("transpose_y"));
            let is_matrix = |w: &Arc<StoredWeight>| has_elements(w) && w.shape.len() == 2;
            let right = (constant("y").filter(is_matrix), value("x"));
            let left = (constant("x").filter(is_matrix), value("y"));
            // Rows of a weight are outputs: of a transposed right operand, or of a left operand that is not transposed.
            let (weight, x, rows_first, input, output) = match (right, left) {
                ((Some(w), Some(x)), _) => (w, x, ty, if tx { 2 } else { 1 }, 1),
                (_, (Some(w), Some(y))) => (w, y, !tx, if ty { 1 } else { 2 }, 2),
                _ => return Ok(None),
            };
            if known.rank(&x) < 2 {
                return Ok(None);
            }
            if rows_first {
                return Ok(Some((Projection::Linear { weight, input, output }, x, 0)));
            }
            let weight = weight.transposed()?;
            let prepared = weight.owned_bytes();
            Ok(Some((Projection::Linear { weight, input, output }, x, prepared)))
        }
        _ => Ok(None),
    }
}

/// Returns the parameters of an operation except `without`; none where one is not a constant.
fn constant_parameters(
    package: &Arc<Package>,
    known: &KnownValues<'_>,
    op: &Operation,
    without: &[&str],
) -> Option<Vec<(String, Tensor)>> {
    let others = op.inputs.iter().filter(|(name, _)| !without.contains(&name.as_str()));
    others
        .map(|(name, Argument(bindings))| {
            let constant = match bindings.as_slice() {
                [Binding::Name(n)] => known.constant(n)?,
                [Binding::Value(v)] => const_value(package, v).ok()?,
                _ => return None,
            };
            Some((name.clone(), constant.to_tensor().ok()?))
        })
        .collect()
}
