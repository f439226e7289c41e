//! Functions with states, run for several sequences at once.

use super::function::CompiledFunction;
use super::plans_by_tokens::{PlansByTokens, ReadFunction};
use super::recent::Recent;
use super::tokens::{KnownCarried, Stages, WRITTEN_FOR};
use super::{CpuStates, Options};
use crate::backend::{
    BackendFunction, Counts, FunctionCall, FunctionInput, INLINE_TERMS, KeptRows, SequenceStates,
};
use crate::tensor::Tensor;
use crate::{Error, Result};
use anemoe_io::locked;
use anemoe_kernels::Pool;
use anemoe_mlpackage::mil::{Feature, FunctionDescription};
use anemoe_mlpackage::package::Package;
use smallvec::SmallVec;
use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Most functions kept, one for each token count: a pass has up to 64 tokens, but few counts are frequent.
const KEPT_COUNTS: usize = 32;

/// Functions that were compiled for token counts, by key.
pub(super) struct KeptFunctions<K> {
    functions: Mutex<Recent<K, Arc<CompiledFunction>>>,
    /// Work of functions that are no longer kept.
    gone: Mutex<Counts>,
}

impl<K: PartialEq> KeptFunctions<K> {
    pub fn new() -> KeptFunctions<K> {
        KeptFunctions { functions: Mutex::new(Recent::new(KEPT_COUNTS)), gone: Mutex::default() }
    }

    /// Returns the function of a key; compiles it with `make` if it is not kept.
    ///
    /// # Errors
    /// Fails like `make`.
    pub fn get<E>(
        &self,
        key: K,
        make: impl FnOnce() -> std::result::Result<CompiledFunction, E>,
    ) -> std::result::Result<Arc<CompiledFunction>, E> {
        if let Some(found) = locked(&self.functions).get(&key) {
            return Ok(found.clone());
        }
        let made = Arc::new(make()?);
        let mut functions = locked(&self.functions);
        if let Some(found) = functions.get(&key) {
            return Ok(found.clone());
        }
        if let Some(gone) = functions.insert(key, made.clone()) {
            *locked(&self.gone) += gone.counts();
        }
        Ok(made)
    }

    /// Returns the functions that are kept.
    pub fn all(&self) -> Vec<Arc<CompiledFunction>> {
        locked(&self.functions).values().cloned().collect()
    }

    /// Returns the work of functions that are no longer kept.
    pub fn gone(&self) -> Counts {
        *locked(&self.gone)
    }
}

/// A value of a batch: an input of the whole function, or an output of a stage.
#[derive(Clone, Copy)]
enum ValueOrigin {
    Input(usize),
    Stage(usize, usize),
}

impl ValueOrigin {
    /// Returns the value, given the function's inputs and the outputs of stages.
    fn value<'a>(self, inputs: &'a [FunctionInput<'a>], stages: &'a [Vec<Tensor>]) -> FunctionInput<'a> {
        match self {
            ValueOrigin::Input(i) => inputs[i],
            ValueOrigin::Stage(stage, i) => FunctionInput::Shared(&stages[stage][i]),
        }
    }
}

/// A stage, its compiled functions by token count, and the origins of its inputs.
struct CompiledStage {
    stage: PlansByTokens,
    functions: KeptFunctions<usize>,
    inputs: Vec<ValueOrigin>,
    /// Token axis of each input; none where each sequence has a value of its own.
    input_axes: Vec<Option<usize>>,
    output_axes: Vec<usize>,
}

/// A function in stages; those with odd numbers run once per sequence.
pub(super) struct StagedFunction {
    package: Arc<Package>,
    described: FunctionDescription,
    input_names: Vec<String>,
    output_names: Vec<String>,
    axes: BTreeMap<String, usize>,
    carried: Option<Arc<KnownCarried>>,
    stages: Vec<Option<CompiledStage>>,
    outputs: Vec<ValueOrigin>,
    spare: Mutex<Vec<StageValues>>,
}

/// Outputs of the stages for all tokens of the batch, and memory of single calls.
#[derive(Default)]
struct StageValues {
    stages: Vec<Vec<Tensor>>,
    inputs: Vec<Tensor>,
    parts: Vec<Mutex<PartValues>>,
}

/// Inputs and outputs of the stage with states, for the tokens of one sequence.
#[derive(Default)]
struct PartValues {
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
}

/// Copies entries `first..first + count` of `axis` to entries `to_first..` of a tensor whose axis has `width` entries.
fn copy_entries(
    from: &Tensor,
    axis: usize,
    first: usize,
    count: usize,
    (to, to_first, width): (&mut Tensor, usize, usize),
) -> Option<()> {
    let has = *from.shape.get(axis)?;
    let values = from.as_f32()?;
    let inner: usize = from.shape[axis + 1..].iter().product();
    let is_size =
        |(i, n): (usize, &usize)| if i == axis { *n == width } else { from.shape.get(i) == Some(n) };
    let fits = to.shape.len() == from.shape.len() && to.shape.iter().enumerate().all(is_size);
    if !fits || to.as_f32().is_none() {
        let mut shape = from.shape.clone();
        shape[axis] = width;
        to.reset_f32(&shape);
    }
    let out = to.as_f32_mut()?;
    let n = count * inner;
    let rows = values.chunks_exact((has * inner).max(1)).zip(out.chunks_exact_mut((width * inner).max(1)));
    for (from, to) in rows {
        to[to_first * inner..to_first * inner + n]
            .copy_from_slice(from.get(first * inner..first * inner + n)?);
    }
    Some(())
}

impl StagedFunction {
    /// Prepares the stages of a function; each is compiled for a token count when a call has it.
    pub fn new(
        package: Arc<Package>,
        options: Options,
        described: FunctionDescription,
        carried: Option<Arc<KnownCarried>>,
        stages: Stages,
    ) -> Option<StagedFunction> {
        let Stages { stages, axes } = stages;
        let mut made: BTreeMap<String, ValueOrigin> = BTreeMap::new();
        for (i, input) in described.inputs.iter().enumerate() {
            made.insert(input.name.clone(), ValueOrigin::Input(i));
        }
        let mut compiled = Vec::new();
        for (number, stage) in stages.into_iter().enumerate() {
            let Some(stage) = stage else {
                compiled.push(None);
                continue;
            };
            let from = |f: &Feature| made.get(&f.name).copied();
            let inputs = stage.described.inputs.iter().map(from).collect::<Option<Vec<_>>>()?;
            let axis = |f: &Feature| axes.get(&f.name).copied();
            let input_axes: Vec<Option<usize>> = stage.described.inputs.iter().map(axis).collect();
            let output_axes = stage.described.outputs.iter().map(axis).collect::<Option<Vec<_>>>()?;
            for (i, output) in stage.described.outputs.iter().enumerate() {
                made.insert(output.name.clone(), ValueOrigin::Stage(number, i));
            }
            let functions = KeptFunctions::new();
            let (body, described) = (stage.function, stage.described);
            let (package, carried) = (package.clone(), carried.clone());
            let function = ReadFunction { package, body, described, carried };
            let stage = PlansByTokens::new(function, options);
            compiled.push(Some(CompiledStage { stage, functions, inputs, input_axes, output_axes }));
        }
        let outputs =
            described.outputs.iter().map(|f| made.get(&f.name).copied()).collect::<Option<Vec<_>>>()?;
        if outputs.iter().any(|from: &ValueOrigin| matches!(from, ValueOrigin::Input(_))) {
            return None;
        }
        let names = |features: &[Feature]| features.iter().map(|f| f.name.clone()).collect();
        Some(StagedFunction {
            package,
            input_names: names(&described.inputs),
            output_names: names(&described.outputs),
            described,
            axes,
            carried,
            stages: compiled,
            outputs,
            spare: Mutex::default(),
        })
    }

    /// Returns the functions that the stages were compiled to.
    pub fn functions(&self) -> impl Iterator<Item = &KeptFunctions<usize>> {
        self.stages.iter().flatten().map(|stage| &stage.functions)
    }

    /// Returns the function of a stage for `tokens` tokens, compiled if it is not kept.
    fn function(&self, compiled: &CompiledStage, tokens: usize) -> Result<Arc<CompiledFunction>> {
        compiled.functions.get(tokens, || compiled.stage.for_tokens(&self.axes, WRITTEN_FOR, tokens))
    }

    fn wrong(&self, what: &str) -> Error {
        Error::invalid(self.package.path(), format!("function `{}`: {what}", self.described.name))
    }

    /// Runs a stage once over all tokens.
    fn run_whole(
        &self,
        number: usize,
        all: usize,
        inputs: &[FunctionInput<'_>],
        parts: &[Range<usize>],
        StageValues { stages, inputs: copies, .. }: &mut StageValues,
    ) -> Result<()> {
        let Some(compiled) = &self.stages[number] else { return Ok(()) };
        let function = self.function(compiled, all)?;
        let mut outputs = std::mem::take(&mut stages[number]);
        copies.resize_with(copies.len().max(compiled.inputs.len()), Tensor::default);
        let each = compiled.inputs.iter().zip(&compiled.input_axes).zip(copies.iter_mut());
        let operands = each.map(|((from, axis), copy)| match from.value(inputs, stages) {
            FunctionInput::Shared(value) => Ok(value),
            // Concatenates the inputs that each sequence has for itself.
            FunctionInput::Own(own) => {
                let axis = axis.ok_or_else(|| self.wrong("a value of one sequence for all of them"))?;
                for (part, own) in parts.iter().zip(own) {
                    let copied = copy_entries(own, axis, 0, part.len(), (&mut *copy, part.start, all));
                    copied.ok_or_else(|| self.wrong("an input of another shape"))?;
                }
                Ok(&*copy)
            }
        });
        let done = operands.collect::<Result<Vec<&Tensor>>>().and_then(|operands| {
            CompiledFunction::run(&function, &operands, &mut CpuStates::default(), &mut outputs)
        });
        stages[number] = outputs;
        done.map(|_| ())
    }

    /// Runs a stage with states for one sequence; `stages` are the outputs of the earlier stages.
    fn run_part(
        &self,
        compiled: &CompiledStage,
        (part, number): (&Range<usize>, usize),
        inputs: &[FunctionInput<'_>],
        states: &mut (dyn SequenceStates + 'static),
        stages: &[Vec<Tensor>],
        PartValues { inputs: copies, outputs }: &mut PartValues,
    ) -> Result<()> {
        let function = self.function(compiled, part.len())?;
        copies.resize_with(copies.len().max(compiled.inputs.len()), Tensor::default);
        let each = compiled.inputs.iter().zip(&compiled.input_axes).zip(copies.iter_mut());
        let operands = each.map(|((from, axis), copy)| match from.value(inputs, stages) {
            FunctionInput::Own(own) => Ok(FunctionInput::Shared(own[number])),
            FunctionInput::Shared(whole) => {
                let axis = axis.ok_or_else(|| self.wrong("a value of all sequences for one of them"))?;
                let copied = copy_entries(whole, axis, part.start, part.len(), (&mut *copy, 0, part.len()));
                copied.ok_or_else(|| self.wrong("a value of another shape"))?;
                Ok(FunctionInput::Shared(&*copy))
            }
        });
        let operands = operands.collect::<Result<SmallVec<[FunctionInput<'_>; 8]>>>()?;
        let call = FunctionCall { inputs: &operands, parts: &[], states: &mut [states] };
        BackendFunction::run(function.as_ref(), call, outputs)
    }

    /// Tells sequences whether their states hold nothing but rows that may stay: where all stages together hold all states.
    fn keep_what_may_stay(
        &self,
        parts: &[Range<usize>],
        states: &mut [&mut (dyn SequenceStates + 'static)],
    ) -> Result<()> {
        for (part, states) in parts.iter().zip(states) {
            let (mut may_stay, mut held) = (true, 0);
            for stage in self.stages.iter().skip(1).step_by(2).flatten() {
                let function = self.function(stage, part.len())?;
                may_stay &= function.may_stay;
                held += function.states().len();
            }
            let states: &mut dyn Any = &mut **states;
            if let Some(states) = states.downcast_mut::<CpuStates>() {
                states.may_stay = may_stay && held == states.names().len();
            }
        }
        Ok(())
    }

    /// Runs a stage with states for each sequence. If no sequence has more than a thread's share of the tokens, each runs on
    /// a thread of its own; else they run one after the other, each on all threads.
    fn run_parts(
        &self,
        number: usize,
        inputs: &[FunctionInput<'_>],
        parts: &[Range<usize>],
        states: &mut [&mut (dyn SequenceStates + 'static)],
        values: &mut StageValues,
    ) -> Result<()> {
        let Some(each) = &self.stages[number] else { return Ok(()) };
        let all = parts.last().map_or(0, |p| p.end);
        let StageValues { stages, parts: memory, .. } = values;
        memory.resize_with(memory.len().max(parts.len()), Default::default);
        let of_states: SmallVec<[Mutex<&mut (dyn SequenceStates + 'static)>; INLINE_TERMS]> =
            states.iter_mut().map(|s| Mutex::new(&mut **s)).collect();
        let failed: Mutex<Option<Error>> = Mutex::default();
        let run = |i: usize| {
            let mut states = locked(&of_states[i]);
            let mut values = locked(&memory[i]);
            if let Err(e) = self.run_part(each, (&parts[i], i), inputs, &mut **states, stages, &mut values) {
                locked(&failed).get_or_insert(e);
            }
        };
        let pool = Pool::global();
        let largest = parts.iter().map(Range::len).max().unwrap_or(0);
        match largest * pool.threads() <= all {
            true => pool.run(parts.len(), &run),
            false => (0..parts.len()).for_each(run),
        }
        if let Some(e) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(e);
        }
        let results = &mut stages[number];
        results.resize_with(results.len().max(each.output_axes.len()), Tensor::default);
        for (part, memory) in parts.iter().zip(memory) {
            let outputs = &memory.get_mut().unwrap_or_else(PoisonError::into_inner).outputs;
            for ((axis, output), result) in each.output_axes.iter().zip(outputs).zip(results.iter_mut()) {
                let to = (result, part.start, all);
                copy_entries(output, *axis, 0, part.len(), to)
                    .ok_or_else(|| self.wrong("a result of another shape"))?;
            }
        }
        Ok(())
    }
}

impl BackendFunction for StagedFunction {
    fn inputs(&self) -> &[String] {
        &self.input_names
    }

    fn outputs(&self) -> &[String] {
        &self.output_names
    }

    fn has_states(&self) -> bool {
        true
    }

    fn kept_rows(&self) -> &[KeptRows] {
        self.carried.as_ref().map_or(&[], |carried| &carried.kept)
    }

    fn run(&self, call: FunctionCall<'_, '_>, outputs: &mut Vec<Tensor>) -> Result<()> {
        let FunctionCall { inputs, parts, states } = call;
        let all = parts.last().map_or(0, |p| p.end);
        let spare = locked(&self.spare).pop();
        let mut values = spare.unwrap_or_default();
        values.stages.resize_with(self.stages.len(), Vec::new);
        for number in 0..self.stages.len() {
            match number % 2 {
                0 => self.run_whole(number, all, inputs, parts, &mut values)?,
                _ => self.run_parts(number, inputs, parts, states, &mut values)?,
            }
        }
        self.keep_what_may_stay(parts, states)?;
        outputs.resize_with(outputs.len().max(self.outputs.len()), Tensor::default);
        for (from, output) in self.outputs.iter().zip(outputs.iter_mut()) {
            match from {
                ValueOrigin::Stage(stage, i) => std::mem::swap(&mut values.stages[*stage][*i], output),
                ValueOrigin::Input(_) => return Err(self.wrong("an output that is an input")),
            }
        }
        locked(&self.spare).push(values);
        Ok(())
    }
}
