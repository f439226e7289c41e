//! Runs compiled steps.

use super::ops::shape::{count, with_limit};
use super::ops::{Kernel, OpContext, OpError};
use super::plan::Plan;
use super::states::{StateValue, States};
use super::weights::StoredWeight;
use super::{Located, OpErrorAt, Options, Precision};
use crate::backend::OpTime;
use crate::memory::Allowance;
use crate::tensor::{Data, Tensor};
use crate::{Error, Result};
use anemoe_kernels::{Columns, MatMul, PackedActivations, Pool, matmul_batch, round_to_f16};
use anemoe_mlpackage::mil::{DataType, Feature, FeatureShape, FunctionDescription, TensorType};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Rounds of a loop before it is taken for endless.
const MAX_ROUNDS: usize = 1 << 20;

/// Where a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Constant(usize),
    Buffer(usize),
    State(usize),
}

pub(super) struct Operand {
    pub param: String,
    pub place: Place,
}

/// A product with a stored weight.
pub(super) enum Projection {
    /// 1x1 convolution on `[1, C, ..]`.
    /// With more than one tap, `[1, taps]` kernels, which only a plan knows.
    Conv { weight: Arc<StoredWeight>, groups: usize, taps: usize },
    /// `x W^T` on `[.., I]`.
    Linear { weight: Arc<StoredWeight> },
}

type Nested = (Vec<Step>, Vec<Place>);

pub(super) enum Work {
    Kernel { kernel: Kernel, inputs: Vec<Operand>, values: Vec<Place>, outputs: Vec<usize> },
    Project { projection: Projection, x: Place, bias: Option<Place>, to: usize },
    Copy { from: Place, to: usize },
    WriteState { state: usize, data: Place },
    Cond { pred: Place, yes: Nested, no: Nested, outputs: Vec<usize> },
    While { initial: Vec<Place>, variables: Vec<usize>, cond: Nested, body: Nested },
}

/// One step, with the operation that it comes from.
pub(super) struct Step {
    pub op_type: String,
    pub name: String,
    pub types: Vec<TensorType>,
    pub work: Work,
}

/// Steps that are left out when `weight` is all zero.
pub(super) struct Guard {
    /// Buffer of the small factor.
    pub weight: usize,
    /// Step that multiplies by it, whose result is zero then.
    pub product: usize,
    /// Buffer of that result.
    pub out: usize,
}

impl Step {
    pub fn new(at: &Located<'_>, work: Work) -> Step {
        Step::typed(at, work, Vec::new())
    }

    pub fn typed(at: &Located<'_>, work: Work, types: Vec<TensorType>) -> Step {
        Step { op_type: at.op_type.to_string(), name: at.name.to_string(), types, work }
    }

    /// Buffers that the step reads.
    pub fn reads(&self) -> Vec<usize> {
        let mut places: Vec<Place> = Vec::new();
        match &self.work {
            Work::Kernel { inputs, values, .. } => {
                places.extend(inputs.iter().map(|o| o.place));
                places.extend(values);
            }
            Work::Project { x, bias, .. } => {
                places.push(*x);
                places.extend(bias);
            }
            Work::Copy { from, .. } => places.push(*from),
            Work::WriteState { data, .. } => places.push(*data),
            Work::Cond { pred, yes, no, .. } => {
                places.push(*pred);
                for (steps, results) in [yes, no] {
                    places.extend(results);
                    places.extend(steps.iter().flat_map(|s| s.reads()).map(Place::Buffer));
                }
            }
            Work::While { initial, cond, body, .. } => {
                places.extend(initial);
                for (steps, results) in [cond, body] {
                    places.extend(results);
                    places.extend(steps.iter().flat_map(|s| s.reads()).map(Place::Buffer));
                }
            }
        }
        places.into_iter().filter_map(|p| if let Place::Buffer(b) = p { Some(b) } else { None }).collect()
    }

    /// Buffers that the step writes.
    pub fn writes(&self) -> Vec<usize> {
        match &self.work {
            Work::Kernel { outputs, .. } => outputs.clone(),
            Work::Project { to, .. } | Work::Copy { to, .. } => vec![*to],
            Work::WriteState { .. } => vec![],
            Work::Cond { outputs, yes, no, .. } => {
                let inner = yes.0.iter().chain(&no.0).flat_map(|s| s.writes());
                outputs.iter().copied().chain(inner).collect()
            }
            Work::While { variables, cond, body, .. } => {
                let inner = cond.0.iter().chain(&body.0).flat_map(|s| s.writes());
                variables.iter().copied().chain(inner).collect()
            }
        }
    }

    /// A kernel's operand.
    pub fn argument(&self, param: &str) -> Option<Place> {
        match &self.work {
            Work::Kernel { inputs, .. } => inputs.iter().find(|o| o.param == param).map(|o| o.place),
            _ => None,
        }
    }

    /// A kernel's variadic operands.
    pub fn values(&self) -> &[Place] {
        match &self.work {
            Work::Kernel { values, .. } => values,
            _ => &[],
        }
    }

    /// Leaving the step out has no effect but on its results.
    pub fn is_pure(&self) -> bool {
        matches!(self.work, Work::Kernel { .. } | Work::Project { .. })
    }

    pub fn is_projection(&self) -> bool {
        matches!(self.work, Work::Project { .. })
    }

    /// Factors and result of a product.
    pub fn product(&self) -> Option<(Place, Place, usize)> {
        match &self.work {
            Work::Kernel { inputs, outputs, .. } if self.op_type == "mul" => {
                let of = |param: &str| inputs.iter().find(|o| o.param == param).map(|o| o.place);
                Some((of("x")?, of("y")?, *outputs.first()?))
            }
            _ => None,
        }
    }

    /// The result has the shape of `value`, and `weight` only repeats: whether its type says so is not known here, so the
    /// check is made when the product runs. Only fp16 and fp32 results qualify.
    pub fn scales(&self, value: Place, weight: Place) -> bool {
        value != weight && self.types.first().is_some_and(|t| t.dtype.is_float())
    }
}

/// What a session has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionStats {
    /// Steps that ran.
    pub steps: u64,
    /// Steps left out because they were multiplied by zero.
    pub skipped: u64,
    /// Bytes of weights that products read; of fused functions also those of keys and values that attention sees.
    pub bytes_read: u64,
}

/// A compiled function.
pub struct Session {
    path: PathBuf,
    function: String,
    options: Options,
    described: FunctionDescription,
    inputs: Vec<(usize, TensorType)>,
    outputs: Vec<Place>,
    pub(super) states: Vec<(String, TensorType)>,
    /// Of each state, the slots that are held in fp16; none where it is in f32.
    pub(super) caches: Vec<Option<usize>>,
    buffers: Vec<Tensor>,
    /// Set for buffers that are known to be all zero.
    zero: Vec<bool>,
    constants: Vec<Arc<Tensor>>,
    steps: Vec<Step>,
    guards: Vec<Guard>,
    guard_of: Vec<Option<usize>>,
    /// Values of the states that this session needs, while it runs.
    state_values: Vec<Tensor>,
    /// Names of states that are in the function's order.
    ordered_as: Option<Arc<Vec<String>>>,
    /// Copies of outputs that are states or constants.
    output_copies: BTreeMap<usize, Tensor>,
    stats: SessionStats,
    /// Bytes that a run may take; of a function whose shapes come with its inputs, those of the last run.
    allowance: Allowance,
    /// Runs instead of the steps, where there is one.
    plan: Option<Plan>,
}

/// Adds to `sum`, `[1, channels, 1, tokens]`, what functions of several packages give that are sums of experts, as one job.
/// Gives for each the bytes of weights that were read, and the experts that were left out, in `counts`. False, and nothing
/// has been done, where they are anything else, or do not read the same.
///
/// # Errors
/// As [`Session::run`].
pub fn add_experts(
    calls: &[(&Session, &[&Tensor])],
    sum: &mut Tensor,
    counts: &mut [(u64, u64)],
) -> Result<bool> {
    let mut plans: SmallVec<[_; super::MANY]> = SmallVec::new();
    for (session, inputs) in calls {
        session.check_inputs(inputs)?;
        let Some(plan) = &session.plan else { return Ok(false) };
        plans.push((plan, *inputs));
    }
    super::plan::add_experts(&plans, sum, counts).map_err(|e| {
        let Some((session, _)) = calls.first() else { return Error::Input("no calls".into()) };
        let (op_type, name) = plans[0].0.describe(0);
        Located { path: &session.path, function: &session.function, op_type, name }.error(e)
    })
}

impl Session {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        path: PathBuf,
        function: String,
        options: Options,
        allowance: Allowance,
        described: FunctionDescription,
        inputs: Vec<(usize, TensorType)>,
        outputs: Vec<Place>,
        states: Vec<(String, TensorType)>,
        buffers: usize,
        constants: Vec<Arc<Tensor>>,
        steps: Vec<Step>,
        (guards, guard_of): (Vec<Guard>, Vec<Option<usize>>),
    ) -> Session {
        Session {
            path,
            function,
            options,
            described,
            inputs,
            outputs,
            caches: vec![None; states.len()],
            states,
            buffers: vec![Tensor::default(); buffers],
            zero: vec![false; buffers],
            constants,
            steps,
            guards,
            guard_of,
            state_values: Vec::new(),
            ordered_as: None,
            output_copies: BTreeMap::new(),
            stats: SessionStats::default(),
            allowance,
            plan: None,
        }
    }

    /// With a plan that runs instead of steps.
    pub(super) fn with_plan(mut self, plan: Plan) -> Session {
        if self.options.holds_halves() {
            for ((cache, found), (_, ty)) in self.caches.iter_mut().zip(plan.caches()).zip(&self.states) {
                *cache = found.filter(|_| ty.dtype == DataType::Float16);
            }
        }
        self.plan = Some(plan);
        self
    }

    /// Inputs, in the order of [`Session::run`].
    pub fn inputs(&self) -> &[Feature] {
        &self.described.inputs
    }

    /// Outputs, in the order of [`Session::output`].
    pub fn outputs(&self) -> &[Feature] {
        &self.described.outputs
    }

    /// States.
    pub fn states(&self) -> &[Feature] {
        &self.described.states
    }

    /// The package.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Counters since compiling.
    pub fn stats(&self) -> SessionStats {
        match &self.plan {
            Some(p) => SessionStats { steps: p.steps, skipped: p.skipped, bytes_read: p.bytes_read },
            None => self.stats,
        }
    }

    /// Time by operation since compiling; none unless [`Options::profile`] is set and the function is fused.
    pub fn op_times(&self) -> Vec<OpTime> {
        self.plan.as_ref().map(Plan::op_times).unwrap_or_default()
    }

    /// Runs the function. `states` holds at least the session's states.
    ///
    /// # Errors
    /// An input has the wrong shape or type, a state is missing, or an operation fails on these shapes.
    pub fn run(&mut self, inputs: &[&Tensor], states: &mut States) -> Result<()> {
        self.check_inputs(inputs)?;
        if self.plan.is_some() {
            return self.run_plan(inputs, states);
        }
        let bytes = inputs.iter().map(|t| t.len() as u64 * 4).fold(0, u64::saturating_add);
        self.allowance = self.allowance.with_inputs(bytes);
        for (i, input) in inputs.iter().enumerate() {
            let (buffer, ty) = (self.inputs[i].0, self.inputs[i].1.clone());
            let shape: Vec<usize> = if ty.rank() == 0 { vec![] } else { input.shape.clone() };
            let target = &mut self.buffers[buffer];
            match &input.data {
                Data::F32(v) => {
                    let out = target.reset_f32(&shape);
                    out.copy_from_slice(v);
                    if ty.dtype == DataType::Float16 && self.options.precision == Precision::Fp16 {
                        round_to_f16(out);
                    }
                }
                Data::I32(v) => target.reset_i32(&shape).copy_from_slice(v),
                Data::Bool(v) => target.reset_bool(&shape).copy_from_slice(v),
                Data::Str(_) => return Err(Error::Input("a string input".into())),
            }
            self.zero[buffer] = false;
        }
        // The states move in for the run, and out again whatever happens.
        let mut places = Vec::new();
        for (name, _) in &self.states {
            let i = states.names.iter().position(|n| n == name);
            places.push(i.ok_or_else(|| Error::Input(format!("state `{name}` is missing")))?);
        }
        self.state_values =
            places.iter().map(|&i| std::mem::take(&mut states.values[i]).into_tensor()).collect();
        let result = self.run_steps();
        for (i, value) in places.iter().zip(std::mem::take(&mut self.state_values)) {
            states.values[*i] = StateValue::Full(value);
        }
        result
    }

    fn check_inputs(&self, inputs: &[&Tensor]) -> Result<()> {
        if inputs.len() != self.inputs.len() {
            return Err(Error::Input(format!(
                "{}: {} inputs given, function `{}` has {}",
                self.path.display(),
                inputs.len(),
                self.function,
                self.inputs.len()
            )));
        }
        for (feature, input) in self.described.inputs.iter().zip(inputs) {
            self.check_input(feature, input)?;
            if input.len() != input.shape.iter().product::<usize>() {
                return Err(Error::Input(format!(
                    "{}: input `{}`: {} elements of shape {:?}",
                    self.path.display(),
                    feature.name,
                    input.len(),
                    input.shape
                )));
            }
        }
        // The program's own types, which a description may contradict or leave open. A plan's places are theirs.
        for ((feature, input), (_, ty)) in self.described.inputs.iter().zip(inputs).zip(&self.inputs) {
            let fits = match ty.dims.as_slice() {
                [] => input.shape.iter().product::<usize>() == 1,
                _ if self.plan.is_none() => true,
                dims => {
                    let own = dims.iter().map(|d| d.fixed().map(|n| n as usize));
                    own.eq(input.shape.iter().map(|n| Some(*n)))
                }
            };
            if !fits {
                return Err(Error::Input(format!(
                    "{}: input `{}`: shape {:?}, where function `{}` takes {ty}",
                    self.path.display(),
                    feature.name,
                    input.shape,
                    self.function
                )));
            }
        }
        Ok(())
    }

    /// The function is a sum of experts and nothing else, which [`add_experts`] can add up with others'.
    pub fn is_experts(&self) -> bool {
        self.plan.as_ref().is_some_and(Plan::is_experts)
    }

    /// Counts a run by [`add_experts`]: the bytes of weights that were read, the experts that were left out, and the time.
    pub fn count(&mut self, counts: (u64, u64), time: Duration) {
        if let Some(plan) = &mut self.plan {
            plan.count(counts, time);
        }
    }

    fn run_plan(&mut self, inputs: &[&Tensor], states: &mut States) -> Result<()> {
        let Some(plan) = &mut self.plan else { return Ok(()) };
        let limit = self.allowance.elements_beside(0);
        let hold = |values: &mut [StateValue]| {
            values.iter_mut().zip(&self.caches).for_each(|(value, cache)| value.hold(*cache));
        };
        let own = self.states.iter().map(|(name, _)| name);
        // Names are compared once.
        let known = self.ordered_as.as_ref().is_some_and(|names| Arc::ptr_eq(names, &states.names));
        let result = if known || own.clone().eq(states.names.iter()) {
            if !known {
                self.ordered_as = Some(states.names.clone());
            }
            hold(&mut states.values);
            with_limit(limit, || plan.run(inputs, &mut states.values))
        } else {
            // The states move in for the run, and out again whatever happens.
            let mut places = Vec::new();
            for name in own {
                let i = states.names.iter().position(|n| n == name);
                places.push(i.ok_or_else(|| Error::Input(format!("state `{name}` is missing")))?);
            }
            let mut values: Vec<StateValue> =
                places.iter().map(|&i| std::mem::take(&mut states.values[i])).collect();
            hold(&mut values);
            let result = with_limit(limit, || plan.run(inputs, &mut values));
            places.iter().zip(values).for_each(|(&i, value)| states.values[i] = value);
            result
        };
        result.map_err(|(e, node)| {
            let (op_type, name) = plan.describe(node);
            Located { path: &self.path, function: &self.function, op_type, name }.error(e)
        })
    }

    /// An output of the last run.
    pub fn output(&self, index: usize) -> &Tensor {
        if let Some(plan) = &self.plan {
            return plan.output(index);
        }
        match self.outputs[index] {
            Place::Buffer(b) => &self.buffers[b],
            Place::Constant(c) => &self.constants[c],
            Place::State(_) => &self.output_copies[&index],
        }
    }

    /// Gives memory that the next run may use for an output.
    pub fn lend(&mut self, index: usize, memory: Tensor) {
        if let Some(plan) = &mut self.plan {
            *plan.output_mut(index) = memory;
        }
    }

    /// Moves an output of the last run out.
    pub fn take(&mut self, index: usize) -> Tensor {
        match &mut self.plan {
            Some(plan) => std::mem::take(plan.output_mut(index)),
            None => self.output(index).clone(),
        }
    }

    /// Frees what the next run makes anew; the outputs of the last one go with it.
    pub fn release(&mut self) {
        self.buffers.iter_mut().for_each(|b| *b = Tensor::default());
        self.zero.fill(false);
        self.output_copies.clear();
        if let Some(plan) = &mut self.plan {
            plan.release();
        }
    }

    fn check_input(&self, feature: &Feature, input: &Tensor) -> Result<()> {
        let wrong = |what: String| {
            Err(Error::Input(format!("{}: input `{}`: {what}", self.path.display(), feature.name)))
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
            return wrong(format!("shape {:?}, expected {}", input.shape, feature.shape));
        }
        match (&input.data, feature.dtype.is_float()) {
            (Data::F32(_), true) | (Data::I32(_), false) => Ok(()),
            _ => wrong(format!("elements of another type than {}", feature.dtype)),
        }
    }

    fn run_steps(&mut self) -> Result<()> {
        let steps = std::mem::take(&mut self.steps);
        let mut skip: Vec<Option<bool>> = vec![None; self.guards.len()];
        let mut result = Ok(());
        for (i, step) in steps.iter().enumerate() {
            if let Some(g) = self.guard_of.get(i).copied().flatten() {
                let guard = &self.guards[g];
                let all_zero = *skip[g].get_or_insert_with(|| {
                    let zero = |v: &[f32]| v.iter().all(|&x| x == 0.0);
                    self.buffers[guard.weight].as_f32().is_some_and(zero)
                        && self.product_shape(&steps[guard.product], guard.weight).is_some()
                });
                if all_zero && i != guard.product {
                    self.stats.skipped += 1;
                    continue;
                }
                if all_zero && let Some(shape) = self.product_shape(step, guard.weight) {
                    self.stats.skipped += 1;
                    let out = guard.out;
                    self.buffers[out].reset_f32(&shape).fill(0.0);
                    self.zero[out] = true;
                    continue;
                }
            }
            result = self.step(step);
            if result.is_err() {
                break;
            }
        }
        self.steps = steps;
        result?;
        for (i, place) in self.outputs.iter().enumerate() {
            if let Place::State(s) = place {
                self.output_copies.insert(i, self.state_values[*s].clone());
            }
        }
        Ok(())
    }

    /// Shape of a product whose other factor was not computed: its declared type, with sizes of the tokens' axis from the
    /// weight that was. None where that may be less than the other factor's.
    fn product_shape(&self, step: &Step, weight: usize) -> Option<Vec<usize>> {
        let ty = step.types.first()?;
        let known = &self.buffers[weight].shape;
        // A single token; otherwise a weight of size 1 may be that of all tokens.
        let single = || {
            self.inputs.iter().all(|(buffer, ty)| {
                let sizes = ty.dims.iter().zip(&self.buffers[*buffer].shape);
                ty.rank() == self.buffers[*buffer].shape.len()
                    && sizes.into_iter().all(|(dim, n)| dim.fixed().is_some() || *n == 1)
            })
        };
        (0..ty.rank())
            .map(|i| match ty.dims[i].fixed() {
                Some(n) => Some(n as usize),
                None => (known.len() + i)
                    .checked_sub(ty.rank())
                    .and_then(|k| known.get(k).copied())
                    .filter(|n| *n != 1 || single()),
            })
            .collect()
    }

    fn place(&self, place: Place) -> &Tensor {
        match place {
            Place::Constant(i) => &self.constants[i],
            Place::Buffer(i) => &self.buffers[i],
            Place::State(i) => &self.state_values[i],
        }
    }

    fn step(&mut self, step: &Step) -> Result<()> {
        // What a kernel makes is known when it runs; what its result took before is in its hands.
        let writes = step.writes();
        let held = self.buffers.iter().enumerate().filter(|(b, _)| !writes.contains(b));
        let held = held.map(|(_, t)| t.len() as u64 * 4).fold(0, u64::saturating_add);
        let done = with_limit(self.allowance.elements_beside(held), || self.work(step));
        self.stats.steps += 1;
        match done {
            Ok(done) => done,
            Err(e) => {
                let at = Located {
                    path: &self.path,
                    function: &self.function,
                    op_type: &step.op_type,
                    name: &step.name,
                };
                Err(at.error(e))
            }
        }
    }

    /// An operation's own error inside, a nested step's error (already located) outside.
    fn work(&mut self, step: &Step) -> OpErrorAt<Result<()>> {
        match &step.work {
            Work::Kernel { kernel, inputs, values, outputs } => {
                let mut results: Vec<Tensor> =
                    outputs.iter().map(|&b| std::mem::take(&mut self.buffers[b])).collect();
                let bound: Vec<(&str, &Tensor)> =
                    inputs.iter().map(|o| (o.param.as_str(), self.place(o.place))).collect();
                let listed: Vec<&Tensor> = values.iter().map(|&p| self.place(p)).collect();
                let context =
                    OpContext { op: &step.op_type, inputs: &bound, values: &listed, outputs: &step.types };
                kernel(&context, &mut results)?;
                for ((&b, mut result), ty) in outputs.iter().zip(results).zip(&step.types) {
                    check_result(&result, ty)?;
                    self.round(&mut result, ty);
                    self.buffers[b] = result;
                    self.zero[b] = false;
                }
            }
            Work::Project { projection, x, bias, to } => {
                let mut y = std::mem::take(&mut self.buffers[*to]);
                let known_zero = matches!(x, Place::Buffer(b) if self.zero[*b]) && self.options.skip_zero;
                let bytes = self.project(projection, *x, *bias, known_zero, &mut y)?;
                self.stats.bytes_read += bytes;
                if let Some(ty) = step.types.first() {
                    check_result(&y, ty)?;
                    self.round(&mut y, ty);
                }
                self.buffers[*to] = y;
                self.zero[*to] = known_zero && bias.is_none();
            }
            Work::Copy { from, to } => {
                let mut t = std::mem::take(&mut self.buffers[*to]);
                let source = self.place(*from);
                super::ops::copy_tensor(source, &mut t);
                self.buffers[*to] = t;
                self.zero[*to] = false;
            }
            Work::WriteState { state, data } => {
                let mut value = std::mem::take(&mut self.state_values[*state]);
                let source = match data {
                    // Written with itself.
                    Place::State(s) if s == state => {
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
                super::ops::copy_tensor(source, &mut value);
                self.state_values[*state] = value;
            }
            Work::Cond { pred, yes, no, outputs } => {
                let chosen = self.flag(*pred)?;
                let (steps, results) = if chosen { yes } else { no };
                for step in steps {
                    if let Err(e) = self.step(step) {
                        return Ok(Err(e));
                    }
                }
                self.assign(results, outputs);
            }
            Work::While { initial, variables, cond, body } => {
                self.assign(initial, variables);
                for round in 0.. {
                    if round == MAX_ROUNDS {
                        return Err(OpError::Invalid(format!("a loop of more than {MAX_ROUNDS} rounds")));
                    }
                    for step in &cond.0 {
                        if let Err(e) = self.step(step) {
                            return Ok(Err(e));
                        }
                    }
                    if !self.flag(cond.1[0])? {
                        break;
                    }
                    for step in &body.0 {
                        if let Err(e) = self.step(step) {
                            return Ok(Err(e));
                        }
                    }
                    self.assign(&body.1, variables);
                }
            }
        }
        Ok(Ok(()))
    }

    fn flag(&self, place: Place) -> OpErrorAt<bool> {
        let value = self.place(place).as_bool().and_then(|v| v.first().copied());
        value.ok_or_else(|| OpError::Invalid("a condition that is not bool".into()))
    }

    /// Copies values to buffers, all at once: a value may be another's old buffer.
    fn assign(&mut self, from: &[Place], to: &[usize]) {
        let values: Vec<Tensor> = from.iter().map(|&p| self.place(p).clone()).collect();
        for (&b, value) in to.iter().zip(values) {
            self.buffers[b] = value;
            self.zero[b] = false;
        }
    }

    fn round(&self, t: &mut Tensor, ty: &TensorType) {
        if ty.dtype == DataType::Float16
            && self.options.precision == Precision::Fp16
            && let Data::F32(v) = &mut t.data
        {
            round_to_f16(v);
        }
    }

    /// A product with a stored weight; gives the bytes of weights that it read.
    fn project(
        &self,
        projection: &Projection,
        x: Place,
        bias: Option<Place>,
        known_zero: bool,
        y: &mut Tensor,
    ) -> OpErrorAt<u64> {
        let x = self.place(x);
        let values =
            x.as_f32().ok_or_else(|| OpError::Invalid("parameter `x` must be a float tensor".into()))?;
        let bias = bias.map(|b| self.place(b));
        let bias = bias.and_then(Tensor::as_f32);
        let mut bytes = 0;
        match projection {
            Projection::Conv { weight, groups, .. } => {
                let (rows, cols) = (weight.rows(), weight.cols());
                if x.rank() < 3 || x.shape[0] != 1 || x.shape[1] != cols * groups {
                    return Err(OpError::Invalid(format!(
                        "input of shape {:?} for {cols} channels in {groups} groups",
                        x.shape
                    )));
                }
                let t: usize = x.shape[2..].iter().product();
                let mut shape = x.shape.clone();
                shape[1] = rows;
                count(&shape)?;
                if bias.is_some_and(|b| b.len() != rows) {
                    return Err(OpError::Invalid(format!("bias of another length than {rows} outputs")));
                }
                let out = y.reset_f32(&shape);
                if known_zero {
                    for (r, row) in out.chunks_exact_mut(t.max(1)).enumerate() {
                        row.fill(bias.map_or(0.0, |b| b[r]));
                    }
                } else {
                    let matrix = weight.matrix()?;
                    let per = rows / groups;
                    let (mut panel, mut product) = (PackedActivations::default(), vec![0f32; per * t]);
                    for g in 0..*groups {
                        let w = matrix.row_range(g * per, (g + 1) * per);
                        let columns =
                            Columns { values, first: g * cols * t, token_stride: 1, channel_stride: t };
                        panel.pack(Pool::global(), w.layout(), columns, t, cols);
                        let bias = bias.map(|b| &b[g * per..(g + 1) * per]);
                        let one = MatMul { w, x: &panel, tokens: None, y: &mut product, stride: per, bias };
                        matmul_batch(Pool::global(), &mut [Some(one)]);
                        for (r, row) in out[g * per * t..].chunks_exact_mut(t.max(1)).enumerate().take(per) {
                            row.iter_mut().enumerate().for_each(|(k, v)| *v = product[k * per + r]);
                        }
                    }
                    bytes = matrix.bytes_read();
                }
            }
            Projection::Linear { weight } => {
                let (rows, cols) = (weight.rows(), weight.cols());
                if x.shape.last() != Some(&cols) {
                    return Err(OpError::Invalid(format!(
                        "input of shape {:?} for {cols} features",
                        x.shape
                    )));
                }
                let t = values.len() / cols.max(1);
                let mut shape = x.shape.clone();
                if let Some(last) = shape.last_mut() {
                    *last = rows;
                }
                count(&shape)?;
                let out = y.reset_f32(&shape);
                if bias.is_some_and(|b| b.len() != rows) {
                    return Err(OpError::Invalid(format!("bias of another length than {rows} outputs")));
                }
                let w = weight.matrix()?;
                bytes = w.bytes_read();
                let mut panel = PackedActivations::default();
                let columns = Columns { values, first: 0, token_stride: cols, channel_stride: 1 };
                panel.pack(Pool::global(), w.layout(), columns, t, cols);
                matmul_batch(
                    Pool::global(),
                    &mut [Some(MatMul { w, x: &panel, tokens: None, y: out, stride: rows, bias })],
                );
            }
        }
        Ok(bytes)
    }
}

/// A kernel's result has the declared type.
pub(super) fn check_result(t: &Tensor, ty: &TensorType) -> OpErrorAt<()> {
    let fits = t.rank() == ty.rank()
        && t.shape.iter().zip(&ty.dims).all(|(&d, declared)| declared.fixed().is_none_or(|n| n == d as u64));
    let kind = match &t.data {
        Data::F32(_) => ty.dtype.is_float(),
        Data::I32(_) => ty.dtype.is_int(),
        Data::Bool(_) => ty.dtype == DataType::Bool,
        Data::Str(_) => ty.dtype == DataType::String,
    };
    if fits && kind {
        Ok(())
    } else {
        Err(OpError::Invalid(format!("a result of shape {:?}, declared is {ty}", t.shape)))
    }
}
