//! Runs instructions one after the other, for functions with control flow or with shapes that are known only with their inputs;
//! runs of operations between control flow are calls of plans.

use super::convolution::Convolution;
use super::ir::{Instr, InstrKind, Projection, ValueRef};
use super::located::Located;
use super::ops::OpResult;
use super::ops::image::to_channels_first;
use super::ops::shape::{count, with_limit};
use super::ops::{OpContext, OpError, check_result, copy};
use super::plans_by_shapes::ValueShapes;
use super::{Options, Precision};
use crate::backend::Counts;
use crate::memory_limit::Allowance;
use crate::tensor::{Data, Tensor};
use crate::{Error, Result};
use anemoe_io::locked;
use anemoe_kernels::{Image, round_to_f16};
use anemoe_mlpackage::mil::{DataType, TensorType};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// Most rounds of a loop: a loop with more counts as endless.
const MAX_ROUNDS: usize = 1 << 20;

/// Instructions of a function, with the data that no run changes.
pub(super) struct Interpreter {
    pub path: PathBuf,
    pub function: String,
    pub options: Options,
    /// Memory that a run may take, without the share of its inputs.
    pub allowance: Allowance,
    /// Buffer and type of each input.
    pub inputs: Vec<(usize, TensorType)>,
    pub outputs: Vec<ValueRef>,
    /// Number of buffers.
    pub buffers: usize,
    pub constants: Vec<Arc<Tensor>>,
    pub instructions: Vec<Instr>,
    /// Values by buffer of earlier runs, whose memory the next ones use.
    pub spare: Mutex<Vec<Vec<Tensor>>>,
}

/// A run of a function.
struct Execution<'a> {
    program: &'a Interpreter,
    buffers: Vec<Tensor>,
    state_values: &'a mut [Tensor],
    allowance: Allowance,
    counts: Counts,
}

impl Interpreter {
    /// Runs the function on checked inputs, writes its results to `outputs` and returns the work; writes the shapes of all values
    /// to `shapes`. `states` are in the function's order.
    ///
    /// # Errors
    /// An instruction fails, or would take more memory than its inputs justify.
    pub fn run(
        &self,
        inputs: &[&Tensor],
        states: &mut [Tensor],
        outputs: &mut [Tensor],
        shapes: Option<&mut ValueShapes>,
    ) -> Result<Counts> {
        let mut buffers = locked(&self.spare).pop().unwrap_or_default();
        buffers.resize_with(self.buffers, Tensor::default);
        let bytes = inputs.iter().map(|t| t.len() as u64 * 4).fold(0, u64::saturating_add);
        let allowance = self.allowance.with_inputs(bytes);
        let counts = Counts::default();
        let mut run = Execution { program: self, buffers, state_values: states, allowance, counts };
        let result = run.take_inputs(inputs).and_then(|()| run.all(shapes));
        if result.is_ok() {
            for (place, out) in self.outputs.iter().zip(outputs) {
                let from = run.place(*place);
                copy(from, &from.shape, out);
            }
        }
        locked(&self.spare).push(run.buffers);
        result.map(|()| run.counts)
    }

    /// Frees the memory of earlier runs.
    pub fn release(&self) {
        locked(&self.spare).clear();
    }
}

impl Execution<'_> {
    fn take_inputs(&mut self, inputs: &[&Tensor]) -> Result<()> {
        for ((buffer, ty), input) in self.program.inputs.iter().zip(inputs) {
            let shape: &[usize] = if ty.rank() == 0 { &[] } else { &input.shape };
            if let Data::Str(_) = input.data {
                return Err(Error::input("a string input"));
            }
            let mut target = std::mem::take(&mut self.buffers[*buffer]);
            copy(input, shape, &mut target);
            self.round(&mut target, ty);
            self.buffers[*buffer] = target;
        }
        Ok(())
    }

    fn all(&mut self, mut shapes: Option<&mut ValueShapes>) -> Result<()> {
        for step in &self.program.instructions {
            self.step(step)?;
            if let Some(shapes) = &mut shapes {
                for (name, buffer) in step.results.iter().zip(step.writes()) {
                    shapes.insert(name.clone(), self.buffers[buffer].shape.clone());
                }
            }
        }
        Ok(())
    }

    fn place(&self, place: ValueRef) -> &Tensor {
        match place {
            ValueRef::Constant(i) => &self.program.constants[i],
            ValueRef::Buffer(i) => &self.buffers[i],
            ValueRef::State(i) => &self.state_values[i],
        }
    }

    fn step(&mut self, step: &Instr) -> Result<()> {
        // The size of an op's result is known only when it runs. The step's own buffers do not count: the op reuses them.
        let writes = step.writes();
        let held = self.buffers.iter().enumerate().filter(|(b, _)| !writes.contains(b));
        let held = held.map(|(_, t)| t.len() as u64 * 4).fold(0, u64::saturating_add);
        let done = with_limit(self.allowance.elements_beside(held), || self.work(step));
        let Interpreter { path, function, .. } = self.program;
        let at = Located { path, function, op_type: &step.op_type, name: &step.name };
        done.unwrap_or_else(|e| Err(at.error(e)))
    }

    /// Executes one step. The outer result holds an error of the step itself, the inner one a nested step's located error.
    fn work(&mut self, step: &Instr) -> OpResult<Result<()>> {
        match &step.work {
            InstrKind::Op { function, inputs, values, outputs } => {
                let mut results: Vec<Tensor> =
                    outputs.iter().map(|&b| std::mem::take(&mut self.buffers[b])).collect();
                let bound: Vec<(&str, &Tensor)> =
                    inputs.iter().map(|o| (o.param.as_str(), self.place(o.place))).collect();
                let listed: Vec<&Tensor> = values.iter().map(|&p| self.place(p)).collect();
                let context =
                    OpContext { op: &step.op_type, inputs: &bound, values: &listed, outputs: &step.types };
                function(&context, &mut results)?;
                for ((&b, mut result), ty) in outputs.iter().zip(results).zip(&step.types) {
                    check_result(&result, ty)?;
                    self.round(&mut result, ty);
                    self.buffers[b] = result;
                }
            }
            InstrKind::Project { projection, x, bias, to } => {
                let mut y = std::mem::take(&mut self.buffers[*to]);
                self.counts += self.project(projection, *x, *bias, &mut y)?;
                if let Some(ty) = step.types.first() {
                    check_result(&y, ty)?;
                    self.round(&mut y, ty);
                }
                self.buffers[*to] = y;
            }
            InstrKind::Copy { from, to } => {
                let mut t = std::mem::take(&mut self.buffers[*to]);
                let source = self.place(*from);
                copy(source, &source.shape, &mut t);
                self.buffers[*to] = t;
            }
            InstrKind::WriteState { state, data } => {
                let mut value = std::mem::take(&mut self.state_values[*state]);
                let source = match data {
                    // The state is written with itself.
                    ValueRef::State(s) if s == state => {
                        self.state_values[*state] = value;
                        return Ok(Ok(()));
                    }
                    _ => self.place(*data),
                };
                if source.shape != value.shape {
                    let message =
                        format!("a state of shape {:?} written with {:?}", value.shape, source.shape);
                    self.state_values[*state] = value;
                    return Err(OpError::Invalid(message));
                }
                copy(source, &source.shape, &mut value);
                self.state_values[*state] = value;
            }
            InstrKind::Call { plan, inputs, outputs } => {
                let mut results: Vec<Tensor> =
                    outputs.iter().map(|&b| std::mem::take(&mut self.buffers[b])).collect();
                let inputs: Vec<&Tensor> = inputs.iter().map(|&p| self.place(p)).collect();
                match plan.run(&inputs, &mut results) {
                    Ok(counts) => self.counts += counts,
                    Err(e) => return Ok(Err(e)),
                }
                for (&b, result) in outputs.iter().zip(results) {
                    self.buffers[b] = result;
                }
            }
            InstrKind::Cond { pred, yes, no, outputs } => {
                let chosen = self.flag(*pred)?;
                let (instructions, results) = if chosen { yes } else { no };
                if let Err(e) = instructions.iter().try_for_each(|step| self.step(step)) {
                    return Ok(Err(e));
                }
                self.assign(results, outputs);
            }
            InstrKind::While { initial, variables, cond, body } => {
                self.assign(initial, variables);
                for round in 0.. {
                    if round == MAX_ROUNDS {
                        return Err(OpError::Invalid(format!("a loop of more than {MAX_ROUNDS} rounds")));
                    }
                    if let Err(e) = cond.0.iter().try_for_each(|step| self.step(step)) {
                        return Ok(Err(e));
                    }
                    if !self.flag(cond.1[0])? {
                        break;
                    }
                    if let Err(e) = body.0.iter().try_for_each(|step| self.step(step)) {
                        return Ok(Err(e));
                    }
                    self.assign(&body.1, variables);
                }
            }
        }
        Ok(Ok(()))
    }

    fn flag(&self, place: ValueRef) -> OpResult<bool> {
        let value = self.place(place).as_bool().and_then(|v| v.first().copied());
        value.ok_or_else(|| OpError::Invalid("a condition that is not bool".into()))
    }

    /// Copies values to buffers, all values first: a value may lie in a buffer that is written.
    fn assign(&mut self, from: &[ValueRef], to: &[usize]) {
        let values: Vec<Tensor> = from.iter().map(|&p| self.place(p).clone()).collect();
        for (&b, value) in to.iter().zip(values) {
            self.buffers[b] = value;
        }
    }

    fn round(&self, t: &mut Tensor, ty: &TensorType) {
        if ty.dtype == DataType::Float16
            && self.program.options.precision == Precision::Fp16
            && let Data::F32(v) = &mut t.data
        {
            round_to_f16(v);
        }
    }

    /// Computes a product with a stored weight and returns its work.
    fn project(
        &self,
        projection: &Projection,
        x: ValueRef,
        bias: Option<ValueRef>,
        y: &mut Tensor,
    ) -> OpResult<Counts> {
        let x = self.place(x);
        let values =
            x.as_f32().ok_or_else(|| OpError::Invalid("parameter `x` must be a float tensor".into()))?;
        let bias = bias.map(|b| self.place(b));
        let bias = bias.and_then(Tensor::as_f32);
        let check_bias = |rows: usize| match bias.is_some_and(|b| b.len() != rows) {
            true => Err(OpError::Invalid(format!("bias of another length than {rows} outputs"))),
            false => Ok(()),
        };
        match projection {
            Projection::Conv(conv) => {
                let (window, shape) = conv.over(&x.shape)?;
                count(&shape)?;
                check_bias(shape[1])?;
                let out = y.reset_f32(&shape);
                conv.run_dense(&window, (x.shape[0], x.shape[1]), values, out, bias)
            }
            Projection::Linear { weight, input, output } => {
                let (rows, cols) = (weight.rows(), weight.cols());
                let axis = x.rank().checked_sub(*input).filter(|a| x.shape[*a] == cols);
                let Some(axis) = axis else {
                    return Err(OpError::Invalid(format!(
                        "input of shape {:?} for {cols} features",
                        x.shape
                    )));
                };
                // The tokens of a matrix are its other axis; a vector is one token.
                let tokens = match (*input, *output) {
                    (2, _) => x.shape[axis + 1],
                    (_, 1) => values.len() / cols.max(1),
                    _ => axis.checked_sub(1).map_or(1, |i| x.shape[i]),
                };
                let mut shape = x.shape.clone();
                shape.remove(axis);
                shape.insert((shape.len() + 1).saturating_sub(*output), rows);
                count(&shape)?;
                check_bias(rows)?;
                let out = y.reset_f32(&shape);
                if out.is_empty() {
                    return Ok(Counts::default());
                }
                let packs = *output == 1 && weight.packs_for(values.len() / cols.max(1));
                let conv = Convolution::of_linear(weight.clone(), packs);
                let (batch, (token, channel)) = (
                    values.len() / (tokens * cols).max(1),
                    if *input == 2 { (1, tokens) } else { (cols, 1) },
                );
                let (window, _) = conv.over(&[batch, cols, tokens])?;
                let strides = [tokens * cols, channel, 0, 0, token];
                let image = Image { values, first: 0, batch, channels: cols, strides };
                if *output == 1 {
                    return conv.run(&window, image, out, bias, None);
                }
                let mut transposed = vec![0.0; out.len()];
                let counts = conv.run(&window, image, &mut transposed, bias, None)?;
                to_channels_first(&window, rows, &transposed, out);
                Ok(counts)
            }
        }
    }
}
