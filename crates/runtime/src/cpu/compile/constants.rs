//! Makes the constants of a program.

use super::super::located::Located;
use super::super::ops::OpError;
use super::super::shared_constants::{CompileContext, Results};
use super::super::weights::{Constant, Operands, StoredWeight, const_value, constexpr};
use super::known_values::KnownValues;
use crate::Result;
use crate::tensor::Tensor;
use anemoe_mlpackage::mil::Operation;
use smallvec::smallvec;
use std::sync::Arc;

/// Returns the results of a `const` or `constexpr_*` operation, made once where constants are shared.
pub(super) fn constants_of(
    context: CompileContext<'_>,
    known: &KnownValues<'_>,
    op: &Operation,
    at: &Located<'_>,
) -> Result<Results> {
    let make = || make_constants(context, known, op, at);
    match (context.constants, op.outputs.first()) {
        (Some(shared), Some(first)) => shared.results(&first.name, make),
        _ => make(),
    }
}

fn make_constants(
    context: CompileContext<'_>,
    known: &KnownValues<'_>,
    op: &Operation,
    at: &Located<'_>,
) -> Result<Results> {
    let CompileContext { package, options, .. } = context;
    match (op.op_type.as_str(), op.attributes.get("val")) {
        ("const", Some(value)) => Ok(smallvec![const_value(package, value).map_err(|e| at.error(e))?]),
        ("const", None) => Err(at.error(OpError::Invalid("a const without `val`".into()))),
        _ => {
            let constant = |n: &str| known.constant(n);
            let mut results =
                constexpr(op, &Operands::new(package, op, &constant)).map_err(|e| at.error(e))?;
            for result in &mut results {
                if let Constant::Stored(w) = result
                    && let Some(w) = Arc::get_mut(w)
                {
                    w.prepare(options.products);
                }
            }
            Ok(results.into())
        }
    }
}

/// Returns the dense tensor of the weight `name`.
pub(super) fn decoded(context: CompileContext<'_>, name: &str, weight: &StoredWeight) -> Arc<Tensor> {
    match context.constants {
        Some(shared) => shared.decoded(name, || weight.to_dense()),
        None => Arc::new(weight.to_dense()),
    }
}
