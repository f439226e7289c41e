//! A compiled function and the checks of its inputs.

use super::Options;
use super::fused::FusedPlan;
use super::interpreter::Interpreter;
use super::ir::OutlinedPlan;
use super::located::{Located, with_tuples};
use super::plans_by_shapes::{PlansByShapes, ValueShapes};
use super::state_value::StateValue;
use super::states::CpuStates;
use super::tokens::KnownCarried;
use crate::backend::{Counts, OpTime};
use crate::memory_limit::Allowance;
use crate::tensor::{Data, Tensor};
use crate::{Error, Result};
use anemoe_io::locked;
use anemoe_mlpackage::mil::{DataType, Feature, FeatureShape, FunctionDescription, TensorType};
use smallvec::SmallVec;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Executable form of a function.
pub(super) enum Executable {
    /// Fused nodes over planned buffers.
    FusedPlan(FusedPlan),
    /// Instructions that run one after the other.
    Interpreter(Interpreter),
}

/// A compiled function. It does not change when it runs: threads and sequences share it.
pub struct CompiledFunction {
    path: PathBuf,
    name: String,
    described: FunctionDescription,
    pub(super) input_names: Vec<String>,
    pub(super) output_names: Vec<String>,
    /// Types of the inputs in the program, in the order of the description.
    inputs: Vec<TensorType>,
    states: Vec<(String, TensorType)>,
    /// Slots of each state that are held in fp16; none where the state is in f32.
    caches: Vec<Option<usize>>,
    /// Memory that a run may take.
    allowance: Allowance,
    code: Executable,
    /// Plans for shapes that are known only with the inputs.
    pub(super) plans_by_shapes: Option<PlansByShapes<CompiledFunction>>,
    /// Rows and slots that the function carries; none where that is not known.
    pub(super) carried: Option<Arc<KnownCarried>>,
    /// True if its states hold nothing but rows in slots of caches, which may stay and be masked when a call is undone.
    pub(super) may_stay: bool,
    counts: Mutex<Counts>,
}

impl CompiledFunction {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        path: PathBuf,
        name: String,
        options: Options,
        allowance: Allowance,
        described: FunctionDescription,
        inputs: Vec<TensorType>,
        states: Vec<(String, TensorType)>,
        code: Executable,
    ) -> CompiledFunction {
        let mut caches = vec![None; states.len()];
        if let Executable::FusedPlan(plan) = &code
            && options.holds_halves()
        {
            for ((cache, found), (_, ty)) in caches.iter_mut().zip(&plan.caches).zip(&states) {
                *cache = found.filter(|_| ty.dtype == DataType::Float16);
            }
        }
        let names = |features: &[Feature]| features.iter().map(|f| f.name.clone()).collect();
        CompiledFunction {
            path,
            name,
            input_names: names(&described.inputs),
            output_names: names(&described.outputs),
            described,
            inputs,
            states,
            caches,
            allowance,
            code,
            plans_by_shapes: None,
            carried: None,
            may_stay: false,
            counts: Mutex::default(),
        }
    }

    /// Tells whether the function is fused: when it was compiled, or for the shapes of each call's inputs.
    pub(super) fn is_planned(&self) -> bool {
        matches!(self.code, Executable::FusedPlan(_)) || self.plans_by_shapes.is_some()
    }

    /// Runs the instructions on copies of the states and returns the shapes of all values; none where the run fails.
    fn trace(
        &self,
        interpreter: &Interpreter,
        inputs: &[&Tensor],
        states: &CpuStates,
    ) -> Option<ValueShapes> {
        let value = |(name, _): &(String, TensorType)| states.get(name);
        let mut values: Vec<Tensor> = self.states.iter().map(value).collect::<Option<_>>()?;
        let mut outputs = vec![Tensor::default(); self.described.outputs.len()];
        let mut shapes = ValueShapes::new();
        interpreter.run(inputs, &mut values, &mut outputs, Some(&mut shapes)).ok()?;
        Some(shapes)
    }

    /// Sets what the function carries.
    pub(super) fn set_carried(&mut self, carried: Option<&Arc<KnownCarried>>) {
        self.carried = carried.cloned();
        let (Some(carried), Executable::FusedPlan(plan)) = (carried, &self.code) else { return };
        self.may_stay = self.states.iter().zip(&plan.caches).all(|((state, ty), cache)| {
            let all = ty.dims.get(2).and_then(|d| d.fixed()).and_then(|rows| usize::try_from(rows).ok());
            cache.is_some() && *cache == carried.slots.get(state).copied().or(all)
        });
    }

    /// Frees memory that the next run allocates again.
    pub(super) fn release(&self) {
        if let Executable::Interpreter(interpreter) = &self.code {
            interpreter.release();
        }
    }

    /// Returns the inputs, in the order of [`CompiledFunction::run`].
    pub fn inputs(&self) -> &[Feature] {
        &self.described.inputs
    }

    /// Returns the outputs, in the order of [`CompiledFunction::run`].
    pub fn outputs(&self) -> &[Feature] {
        &self.described.outputs
    }

    /// Returns the states.
    pub fn states(&self) -> &[Feature] {
        &self.described.states
    }

    /// Returns the path of the package.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the work done since compiling.
    pub fn counts(&self) -> Counts {
        *locked(&self.counts)
    }

    /// Returns the time of each operation since compiling; empty unless [`Options::profile`] is set and the function is fused.
    pub fn op_times(&self) -> Vec<OpTime> {
        match &self.code {
            Executable::FusedPlan(plan) => plan.op_times(),
            Executable::Interpreter(_) => Vec::new(),
        }
    }

    /// Runs the function, writes its results to the first of `outputs`, and returns the work. Memory of `outputs` is used again
    /// where it is large enough. `states` holds at least the function's states.
    ///
    /// # Errors
    /// An input has the wrong shape or type, a state is missing, or an operation fails on these shapes.
    pub fn run(
        &self,
        inputs: &[&Tensor],
        states: &mut CpuStates,
        outputs: &mut Vec<Tensor>,
    ) -> Result<Counts> {
        self.check_inputs(inputs)?;
        if let (Some(plans), Executable::Interpreter(interpreter)) = (&self.plans_by_shapes, &self.code)
            && let Some(plan) = plans.find(inputs, || self.trace(interpreter, inputs, states))
        {
            let counts = plan.run(inputs, states, outputs)?;
            *locked(&self.counts) += counts;
            return Ok(counts);
        }
        outputs.resize_with(outputs.len().max(self.described.outputs.len()), Tensor::default);
        let places: SmallVec<[usize; 2]> = self
            .states
            .iter()
            .map(|(name, _)| {
                let i = states.names.iter().position(|n| n == name);
                i.ok_or_else(|| Error::input(format!("state `{name}` is missing")))
            })
            .collect::<Result<_>>()?;
        // The states move into `values` for the run, and back even if the run fails.
        let mut values: SmallVec<[StateValue; 2]> =
            places.iter().map(|&i| std::mem::take(&mut states.values[i])).collect();
        let result = match &self.code {
            Executable::FusedPlan(plan) => {
                values.iter_mut().zip(&self.caches).for_each(|(value, cache)| value.convert_to(*cache));
                let limit = self.allowance.elements_beside(0);
                let run = || plan.run(inputs, &mut values, outputs);
                super::ops::shape::with_limit(limit, run).map_err(|(error, node)| {
                    let (op_type, name) = plan.describe(node);
                    Located { path: &self.path, function: &self.name, op_type, name }.error(error)
                })
            }
            Executable::Interpreter(interpreter) => {
                let mut tensors: Vec<Tensor> = values.drain(..).map(StateValue::into_tensor).collect();
                let result = interpreter.run(inputs, &mut tensors, outputs, None);
                values.extend(tensors.into_iter().map(StateValue::Full));
                result
            }
        };
        places.iter().zip(values).for_each(|(&i, value)| states.values[i] = value);
        let counts = result?;
        *locked(&self.counts) += counts;
        Ok(counts)
    }

    /// Adds a run as a term of a sum to the counters and times.
    pub(super) fn count_term(&self, counts: Counts, time: Duration) {
        *locked(&self.counts) += counts;
        if let Executable::FusedPlan(plan) = &self.code {
            plan.add_time(0, time);
        }
    }

    /// Returns the plan; none where the interpreter runs the function.
    pub(super) fn plan(&self) -> Option<&FusedPlan> {
        if let Executable::FusedPlan(plan) = &self.code { Some(plan) } else { None }
    }

    /// Refuses inputs of other shapes and types than those of the function.
    pub(super) fn check_inputs(&self, inputs: &[&Tensor]) -> Result<()> {
        if inputs.len() != self.inputs.len() {
            return Err(Error::input(format!(
                "{}: {} inputs given, function `{}` has {}",
                self.path.display(),
                inputs.len(),
                self.name,
                self.inputs.len()
            )));
        }
        for (feature, input) in self.described.inputs.iter().zip(inputs) {
            self.check_input(feature, input)?;
            if input.len() != input.shape.iter().product::<usize>() {
                return Err(Error::input(format!(
                    "{}: input `{}`: {} elements of shape {:?}",
                    self.path.display(),
                    feature.name,
                    input.len(),
                    input.shape
                )));
            }
        }
        // A description may contradict the program's own types or leave them open; a plan's buffers have the program's types.
        for ((feature, input), ty) in self.described.inputs.iter().zip(inputs).zip(&self.inputs) {
            let fits = match ty.dims.as_slice() {
                [] => input.shape.iter().product::<usize>() == 1,
                _ if matches!(self.code, Executable::Interpreter(_)) => true,
                dims => {
                    let own = dims.iter().map(|d| d.fixed().map(|n| n as usize));
                    own.eq(input.shape.iter().map(|n| Some(*n)))
                }
            };
            if !fits {
                let what = format!("shape {:?}, where function `{}` takes {ty}", input.shape, self.name);
                let (path, name) = (self.path.display(), &feature.name);
                return Err(Error::input(format!("{path}: input `{name}`: {}", with_tuples(&what))));
            }
        }
        Ok(())
    }

    fn check_input(&self, feature: &Feature, input: &Tensor) -> Result<()> {
        let wrong = |what: String| {
            Err(Error::input(format!("{}: input `{}`: {what}", self.path.display(), feature.name)))
        };
        let shape = || input.shape.iter().map(|&d| d as u64);
        let fits = match &feature.shape {
            FeatureShape::Fixed(s) => shape().eq(s.iter().copied()),
            FeatureShape::Enumerated(all) => all.iter().any(|s| shape().eq(s.iter().copied())),
            FeatureShape::Range { ranges, .. } => {
                shape().len() == ranges.len()
                    && shape().zip(ranges).all(|(d, (low, high))| d >= *low && high.is_none_or(|h| d <= h))
            }
            FeatureShape::Dynamic => true,
        };
        if !fits {
            let what = format!("shape {:?}, expected shape {}", input.shape, feature.shape);
            return wrong(with_tuples(&what));
        }
        match (&input.data, feature.dtype.is_float()) {
            (Data::F32(_), true) | (Data::I32(_), false) => Ok(()),
            (Data::Bool(_), false) if feature.dtype == DataType::Bool => Ok(()),
            _ => wrong(format!("elements of another type than {}", feature.dtype)),
        }
    }
}

impl OutlinedPlan for CompiledFunction {
    fn run(&self, inputs: &[&Tensor], outputs: &mut Vec<Tensor>) -> Result<Counts> {
        CompiledFunction::run(self, inputs, &mut CpuStates::default(), outputs)
    }
}

impl CpuStates {
    /// Makes the states of a function, all zero.
    pub fn new(function: &CompiledFunction) -> CpuStates {
        let mut states = CpuStates::default();
        for ((name, ty), cache) in function.states.iter().zip(&function.caches) {
            states.add(name, ty, *cache);
        }
        states
    }

    /// Adds the states of another function of the same package; states of equal name are shared.
    pub(super) fn add_states_of(&mut self, function: &CompiledFunction) -> std::result::Result<(), String> {
        for ((name, ty), cache) in function.states.iter().zip(&function.caches) {
            match self.names.iter().position(|n| n == name) {
                None => self.add(name, ty, *cache),
                Some(i) if self.types[i] == *ty => {}
                Some(i) => {
                    return Err(format!(
                        "state `{name}` has type {ty} in one function and {} in another",
                        self.types[i]
                    ));
                }
            }
        }
        Ok(())
    }
}
