//! Plans of functions whose shapes are known only with their inputs: one plan for each set of shapes.
//!
//! ```text
//! new shapes    interpreter on copies of the states: the shape of every value --> types --> plan, or none
//! known shapes  the plan
//! ```
//! A shape that depends on the contents of a value may change from call to call: such a function gets no plan.

use super::Options;
use super::bindings::name_of;
use super::ir::{Instr, InstrKind, ValueRef};
use super::ops::has_shape_by_shapes;
use super::recent::Recent;
use super::shared_constants::{CompileContext, SharedConstants};
use crate::Result;
use crate::tensor::Tensor;
use anemoe_io::locked;
use anemoe_mlpackage::mil::{
    Argument, Dim, FeatureShape, Function, FunctionDescription, Operation, TensorType, ValueType,
};
use anemoe_mlpackage::package::Package;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Most sets of input shapes for which plans are kept.
const KEPT_SHAPES: usize = 16;

/// Operands whose contents do not determine shapes.
const VALUES: &[&str] = &["x", "data", "indices", "input"];

/// Shapes of a function's inputs, in order.
type InputShapes = Vec<Vec<usize>>;

/// Shapes of values by name.
pub(super) type ValueShapes = BTreeMap<String, Vec<usize>>;

/// Function that compiles a function of known shapes to a plan; it returns none where there can be no plan.
type Compile<F> = fn(CompileContext<'_>, &Function, &FunctionDescription) -> Result<Option<F>>;

/// A function whose shapes are known only with its inputs, and its plans, compiled to `F`.
pub(super) struct PlansByShapes<F> {
    package: Arc<Package>,
    body: Function,
    described: FunctionDescription,
    options: Options,
    /// Constants of the function, the same for all shapes.
    constants: SharedConstants,
    compile: Compile<F>,
    /// Plans by the shapes of the inputs; none where there can be no plan.
    plans: Mutex<Recent<InputShapes, Option<Arc<F>>>>,
}

/// Tells whether the shape of the step's result follows from shapes and constants.
pub(super) fn follows_from_shapes(step: &Instr) -> bool {
    let InstrKind::Op { inputs, .. } = &step.work else { return true };
    let op = step.op_type.as_str();
    let constant = |place: ValueRef| matches!(place, ValueRef::Constant(_));
    let others = || inputs.iter().filter(|o| !VALUES.contains(&o.param.as_str()));
    op != "non_zero" && (has_shape_by_shapes(op) || others().all(|o| constant(o.place)))
}

/// Tells whether the shape of an operation's result may depend on the contents of a value; `is_constant` knows the constants.
pub(super) fn depends_on_values(op: &Operation, is_constant: &dyn Fn(&str) -> bool) -> bool {
    let read = |(param, Argument(bindings)): (&String, &Argument)| {
        !VALUES.contains(&param.as_str()) && bindings.iter().filter_map(name_of).any(|n| !is_constant(n))
    };
    op.op_type == "non_zero" || !has_shape_by_shapes(&op.op_type) && op.inputs.iter().any(read)
}

fn set_shape(ty: &mut ValueType, shape: &[usize]) {
    if let ValueType::Tensor(TensorType { dims, .. }) = ty
        && (!dims.is_empty() || !shape.is_empty())
    {
        *dims = shape.iter().map(|&d| Dim::Fixed(d as u64)).collect();
    }
}

impl<F> PlansByShapes<F> {
    /// Makes an empty set of plans for a function without control flow.
    pub fn new(
        package: &Arc<Package>,
        body: &Function,
        described: &FunctionDescription,
        options: Options,
        compile: Compile<F>,
    ) -> PlansByShapes<F> {
        let plans = Mutex::new(Recent::new(KEPT_SHAPES));
        PlansByShapes {
            package: package.clone(),
            body: body.clone(),
            described: described.clone(),
            options,
            constants: SharedConstants::default(),
            compile,
            plans,
        }
    }

    /// Returns the plan for inputs of these shapes; for new shapes, `trace` gives the shapes of all values and a plan is made.
    pub fn find(&self, inputs: &[&Tensor], trace: impl FnOnce() -> Option<ValueShapes>) -> Option<Arc<F>> {
        let plans = || locked(&self.plans);
        let key: InputShapes = inputs.iter().map(|t| t.shape.clone()).collect();
        if let Some(found) = plans().get(&key) {
            return found.clone();
        }
        let made = trace().and_then(|shapes| self.compile(&key, &shapes)).map(Arc::new);
        plans().insert(key, made.clone());
        made
    }

    fn compile(&self, inputs: &[Vec<usize>], shapes: &ValueShapes) -> Option<F> {
        let (mut body, mut described) = (self.body.clone(), self.described.clone());
        for (feature, shape) in described.inputs.iter_mut().zip(inputs) {
            let input = body.inputs.iter_mut().find(|i| i.name == feature.name)?;
            // The description of a scalar has one element.
            if input.ty.tensor()?.rank() > 0 {
                set_shape(&mut input.ty, shape);
            }
            feature.shape = FeatureShape::Fixed(shape.iter().map(|&d| d as u64).collect());
        }
        for output in body.block.operations.iter_mut().flat_map(|op| &mut op.outputs) {
            if let Some(shape) = shapes.get(&output.name) {
                set_shape(&mut output.ty, shape);
            }
        }
        let context = CompileContext {
            package: &self.package,
            options: self.options,
            constants: Some(&self.constants),
        };
        (self.compile)(context, &body, &described).ok().flatten()
    }
}
