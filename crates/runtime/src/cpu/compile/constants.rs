//! Constants that a program says.

use super::super::located::Located;
use super::super::ops::OpError;
use super::super::shared_constants::{CompileContext, Results};
use super::super::weights::{Constant, Operands, StoredWeight, const_value, constexpr, located};
use super::FunctionCompiler;
use crate::Result;
use crate::tensor::Tensor;
use anemoe_mlpackage::mil::Operation;
use smallvec::smallvec;
use std::sync::Arc;

impl<'a> FunctionCompiler<'a> {
    /// Results of a `const` or `constexpr_*` operation.
    pub(super) fn constants_of(&self, op: &'a Operation, at: &Located<'_>) -> Result<Results> {
        let make = || self.make_constants(op, at);
        match (self.context.constants, op.outputs.first()) {
            (Some(shared), Some(first)) => shared.results(&first.name, make),
            _ => make(),
        }
    }

    fn make_constants(&self, op: &'a Operation, at: &Located<'_>) -> Result<Results> {
        let CompileContext { package, options, .. } = self.context;
        match (op.op_type.as_str(), op.attributes.get("val")) {
            ("const", Some(value)) => Ok(smallvec![located(at, const_value(package, value))?]),
            ("const", None) => Err(at.error(OpError::Invalid("a const without `val`".into()))),
            _ => {
                let known = |n: &str| self.constant_named(n);
                let mut results = located(at, constexpr(op, &Operands::new(package, op, &known)))?;
                for result in &mut results {
                    if let Constant::Stored(w) = result
                        && let Some(w) = Arc::get_mut(w)
                    {
                        w.prepare(options.fast);
                    }
                }
                Ok(results.into())
            }
        }
    }

    /// The dense tensor of the weight `name`.
    pub(super) fn decoded(&self, name: &str, weight: &StoredWeight) -> Arc<Tensor> {
        match self.context.constants {
            Some(shared) => shared.decoded(name, || weight.to_dense()),
            None => Arc::new(weight.to_dense()),
        }
    }
}
