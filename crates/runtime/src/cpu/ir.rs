//! Instructions that a function is compiled to, over numbered values.

use super::convolution::Convolution;
use super::located::Located;
use super::ops::OpFunction;
use super::weights::StoredWeight;
use crate::Result;
use crate::backend::Counts;
use crate::tensor::Tensor;
use anemoe_mlpackage::mil::TensorType;
use std::sync::Arc;

/// A value: a constant, a buffer or a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueRef {
    Constant(usize),
    Buffer(usize),
    State(usize),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ParamRef {
    pub param: String,
    pub place: ValueRef,
}

/// A product with a stored weight.
#[derive(Clone)]
pub(super) enum Projection {
    Conv(Arc<Convolution>),
    /// A matmul with `[O, I]`; `input` and `output` are the feature axes of `x` and of the result, counted from the end.
    Linear {
        weight: Arc<StoredWeight>,
        input: usize,
        output: usize,
    },
}

type Nested = (Vec<Instr>, Vec<ValueRef>);

#[derive(Clone)]
pub(super) enum InstrKind {
    Op {
        function: OpFunction,
        inputs: Vec<ParamRef>,
        values: Vec<ValueRef>,
        outputs: Vec<usize>,
    },
    Project {
        projection: Projection,
        x: ValueRef,
        bias: Option<ValueRef>,
        to: usize,
    },
    Copy {
        from: ValueRef,
        to: usize,
    },
    WriteState {
        state: usize,
        data: ValueRef,
    },
    Cond {
        pred: ValueRef,
        yes: Nested,
        no: Nested,
        outputs: Vec<usize>,
    },
    While {
        initial: Vec<ValueRef>,
        variables: Vec<usize>,
        cond: Nested,
        body: Nested,
    },
    /// Operations of the function, compiled to a plan of their own.
    Call {
        plan: Arc<dyn OutlinedPlan>,
        inputs: Vec<ValueRef>,
        outputs: Vec<usize>,
    },
}

/// The plan of some operations of a function: it has inputs and outputs, but no states.
pub(super) trait OutlinedPlan: Send + Sync {
    /// Runs the plan, writes its results to the first of `outputs`, and returns the work.
    ///
    /// # Errors
    /// An operation fails on these inputs.
    fn run(&self, inputs: &[&Tensor], outputs: &mut Vec<Tensor>) -> Result<Counts>;
}

/// One step, with the operation that it was made from.
#[derive(Clone)]
pub(super) struct Instr {
    pub op_type: String,
    pub name: String,
    pub types: Vec<TensorType>,
    /// Names of the results.
    pub results: Vec<String>,
    pub work: InstrKind,
}

impl Instr {
    pub fn new(at: &Located<'_>, work: InstrKind) -> Instr {
        Instr::typed(at, work, Vec::new())
    }

    pub fn typed(at: &Located<'_>, work: InstrKind, types: Vec<TensorType>) -> Instr {
        Instr { op_type: at.op_type.to_string(), name: at.name.to_string(), types, results: Vec::new(), work }
    }

    /// Returns the values that the step reads.
    pub fn operands(&self) -> Vec<ValueRef> {
        let mut places: Vec<ValueRef> = Vec::new();
        match &self.work {
            InstrKind::Op { inputs, values, .. } => {
                places.extend(inputs.iter().map(|o| o.place));
                places.extend(values);
            }
            InstrKind::Project { x, bias, .. } => {
                places.push(*x);
                places.extend(bias);
            }
            InstrKind::Copy { from, .. } => places.push(*from),
            InstrKind::WriteState { data, .. } => places.push(*data),
            InstrKind::Call { inputs, .. } => places.extend(inputs),
            InstrKind::Cond { pred, .. } => places.push(*pred),
            InstrKind::While { initial, .. } => places.extend(initial),
        }
        for (instructions, results) in self.nested() {
            places.extend(results);
            places.extend(instructions.iter().flat_map(Instr::operands));
        }
        places
    }

    /// Returns the nested blocks.
    fn nested(&self) -> Vec<&Nested> {
        match &self.work {
            InstrKind::Cond { yes: a, no: b, .. } | InstrKind::While { cond: a, body: b, .. } => vec![a, b],
            _ => Vec::new(),
        }
    }

    /// Returns the buffers that the step reads.
    pub fn reads(&self) -> Vec<usize> {
        let buffer = |place| if let ValueRef::Buffer(b) = place { Some(b) } else { None };
        self.operands().into_iter().filter_map(buffer).collect()
    }

    /// Returns the buffers that the step writes.
    pub fn writes(&self) -> Vec<usize> {
        let mut written = match &self.work {
            InstrKind::Op { outputs, .. }
            | InstrKind::Call { outputs, .. }
            | InstrKind::Cond { outputs, .. }
            | InstrKind::While { variables: outputs, .. } => outputs.clone(),
            InstrKind::Project { to, .. } | InstrKind::Copy { to, .. } => vec![*to],
            InstrKind::WriteState { .. } => vec![],
        };
        written.extend(self.nested().into_iter().flat_map(|(inner, _)| inner).flat_map(Instr::writes));
        written
    }

    /// Returns the operand of an op by parameter.
    pub fn argument(&self, param: &str) -> Option<ValueRef> {
        match &self.work {
            InstrKind::Op { inputs, .. } => inputs.iter().find(|o| o.param == param).map(|o| o.place),
            _ => None,
        }
    }

    /// Returns the variadic operands of an op.
    pub fn values(&self) -> &[ValueRef] {
        match &self.work {
            InstrKind::Op { values, .. } => values,
            _ => &[],
        }
    }
}
