//! Runs functions of the op library as nodes of a plan.

use super::super::ops::{OpContext, OpError, OpResult, check_result};
use super::super::state_value::StateValue;
use super::super::strided::copy_floats;
use super::inputs::NodeInputs;
use super::nodes::{OpCall, OpOperand};
use super::rounded::round;
use super::view::Base;
use crate::tensor::Tensor;
use anemoe_kernels::Pool;
use anemoe_mlpackage::mil::DataType;
use std::sync::Arc;

/// Runs a function on dense tensors: copies operands that are none, binds them to parameters, and checks the results.
///
/// # Errors
/// The function refuses its operands, or a result is not of the type that the program states.
pub(super) fn run(
    call: &OpCall,
    (buffers, tensors): (&[Vec<f32>], &mut [Tensor]),
    (constants, inputs): (&[Arc<Tensor>], &[&Tensor]),
    states: &[StateValue],
    is_rounded: bool,
) -> OpResult<()> {
    let operands = || call.inputs.iter().map(|(_, o)| o).chain(&call.values);
    for operand in operands() {
        if let OpOperand::Copied { loops, x, shape, copy: to } = operand {
            let mut taken = std::mem::take(&mut tensors[*to]);
            let sources = NodeInputs { buffers, tensors, constants, inputs };
            match x {
                Base::State(s) => states[*s].copy_to(loops, taken.reset_f32(shape)),
                base => copy_floats(loops, sources.get(*base), taken.reset_f32(shape)),
            }
            tensors[*to] = taken;
        }
    }
    let mut results: Vec<Tensor> = call.outputs.iter().map(|&t| std::mem::take(&mut tensors[t])).collect();
    let sources = NodeInputs { buffers, tensors, constants, inputs };
    let get = |o| match o {
        &OpOperand::Whole(base) => sources.tensor(base).ok_or_else(|| OpError::Invalid("no tensor".into())),
        OpOperand::Copied { copy, .. } => Ok(&sources.tensors[*copy]),
    };
    let bound: Vec<(&str, &Tensor)> =
        call.inputs.iter().map(|(n, o)| Ok((n.as_str(), get(o)?))).collect::<OpResult<_>>()?;
    let values: Vec<&Tensor> = call.values.iter().map(get).collect::<OpResult<_>>()?;
    let context = OpContext { op: &call.op_type, inputs: &bound, values: &values, outputs: &call.types };
    (call.function)(&context, &mut results)?;
    for ((&t, mut result), ty) in call.outputs.iter().zip(results).zip(&call.types) {
        check_result(&result, ty)?;
        if is_rounded
            && ty.dtype == DataType::Float16
            && let Some(values) = result.as_f32_mut()
        {
            round(Pool::global(), values);
        }
        tensors[t] = result;
    }
    Ok(())
}
