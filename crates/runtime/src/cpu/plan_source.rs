//! Functions of fixed shapes, lowered to instructions for planning; and functions interpolated between two of them.
//!
//! ```text
//! A, B    token counts of two functions that were lowered
//! n(T)  = n(A) + (n(B) - n(A)) / (B - A) * (T - A)        every size, and every integer of a constant
//! ```
//! Lowering a function takes ten times as long as planning it. Where two functions differ only in sizes, every number in them
//! is a linear function of the token count, so the function of any other count follows from the two.

use super::convolution::Convolution;
use super::function::{CompiledFunction, Executable};
use super::fused::{self, PlanInput};
use super::ir::{Instr, InstrKind, Projection};
use super::ops::shape::count;
use super::shared_constants::CompileContext;
use crate::memory_limit::{Allowance, MemoryNeed};
use crate::tensor::{Data, Tensor};
use crate::{Error, Result};
use anemoe_mlpackage::mil::{DataType, Dim, Feature, FeatureShape, FunctionDescription, TensorType};
use std::sync::Arc;

/// A function of fixed shapes.
pub(super) struct PlanSource {
    pub described: FunctionDescription,
    pub inputs: Vec<TensorType>,
    pub states: Vec<(String, TensorType)>,
    pub source: PlanInput,
    pub need: MemoryNeed,
}

/// Returns the bytes of a value of this type in memory; 0 where its shape is unknown.
pub(super) fn bytes_of(ty: &TensorType) -> u64 {
    let element = if ty.dtype == DataType::Bool { 1 } else { 4 };
    match ty.shape() {
        Some(shape) => shape.into_iter().fold(element, u64::saturating_mul),
        None => 0,
    }
}

impl PlanSource {
    /// Plans the function; none where an operation or a shape does not fit a plan.
    ///
    /// # Errors
    /// The function takes more memory than is allowed.
    pub fn plan(&self, context: CompileContext<'_>, function: &str) -> Result<Option<CompiledFunction>> {
        let Some(mut plan) = fused::plan(&self.source) else { return Ok(None) };
        let CompileContext { package, options, .. } = context;
        let bytes =
            |types: &mut dyn Iterator<Item = &TensorType>| types.map(bytes_of).fold(0, u64::saturating_add);
        let states = bytes(&mut self.states.iter().map(|(_, ty)| ty));
        let allowance = Allowance::new(package.total_bytes(), bytes(&mut self.inputs.iter()));
        let checked = self.need.check(allowance, plan.bytes(), states);
        checked.map_err(|what| Error::invalid(package.path(), format!("function `{function}`: {what}")))?;
        if options.profile {
            plan.profile();
        }
        Ok(Some(CompiledFunction::new(
            package.path().to_path_buf(),
            function.to_string(),
            options,
            allowance,
            self.described.clone(),
            self.inputs.clone(),
            self.states.clone(),
            Executable::FusedPlan(plan),
        )))
    }

    /// Makes the function for `to` tokens from this one for `from` tokens and `other` for `at` tokens. Returns none where the two
    /// differ in more than numbers, a number is not an integer at `to`, or a value would be too large.
    pub fn between(&self, from: usize, (other, at): (&PlanSource, usize), to: usize) -> Option<PlanSource> {
        let line = Line::new(from, at, to)?;
        let (a, b) = (&self.source, &other.source);
        let is_same = self.states == other.states
            && (&a.types, &a.inputs, &a.outputs, &a.states) == (&b.types, &b.inputs, &b.outputs, &b.states)
            && (a.skip_zero, a.round) == (b.skip_zero, b.round);
        if !is_same {
            return None;
        }
        let (x, y) = (&self.described, &other.described);
        let described = FunctionDescription {
            name: x.name.clone(),
            inputs: line.each(&x.inputs, &y.inputs, Line::feature)?,
            outputs: line.each(&x.outputs, &y.outputs, Line::feature)?,
            states: (x.states == y.states).then(|| x.states.clone())?,
            ..FunctionDescription::default()
        };
        let source = PlanInput {
            instructions: line.each(&a.instructions, &b.instructions, Line::step)?,
            constants: line.each(&a.constants, &b.constants, Line::constant)?,
            shapes: line.each(&a.shapes, &b.shapes, |line, a, b| line.shape(a, b))?,
            types: a.types.clone(),
            inputs: a.inputs.clone(),
            outputs: a.outputs.clone(),
            states: a.states.clone(),
            skip_zero: a.skip_zero,
            round: a.round,
        };
        let inputs = line.each(&self.inputs, &other.inputs, Line::ty)?;
        Some(PlanSource { described, inputs, states: self.states.clone(), source, need: self.need.clone() })
    }
}

/// Linear function of the token count: `n(from) + (n(other) - n(from)) / tokens * steps`.
#[derive(Clone, Copy)]
struct Line {
    /// Difference of the two known token counts.
    tokens: i64,
    /// Wanted token count minus the first known one.
    steps: i64,
}

impl Line {
    fn new(from: usize, other: usize, to: usize) -> Option<Line> {
        let [from, other, to] = [from, other, to].map(|n| i64::try_from(n).ok());
        let (from, other, to) = (from?, other?, to?);
        (from != other).then_some(Line { tokens: other - from, steps: to - from })
    }

    fn number(self, a: i64, b: i64) -> Option<i64> {
        if a == b {
            return Some(a);
        }
        let more = b.checked_sub(a)?;
        (more % self.tokens == 0).then_some(())?;
        a.checked_add((more / self.tokens).checked_mul(self.steps)?)
    }

    fn size(self, a: usize, b: usize) -> Option<usize> {
        usize::try_from(self.number(i64::try_from(a).ok()?, i64::try_from(b).ok()?)?).ok()
    }

    /// Returns the shape; none where it has too many elements.
    fn shape(self, a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
        let shape = self.each(a, b, |line, a, b| line.size(*a, *b))?;
        count(&shape).is_ok().then_some(shape)
    }

    fn wide(self, a: u64, b: u64) -> Option<u64> {
        u64::try_from(self.number(i64::try_from(a).ok()?, i64::try_from(b).ok()?)?).ok()
    }

    fn each<T, U>(self, a: &[T], b: &[T], of: impl Fn(Line, &T, &T) -> Option<U>) -> Option<Vec<U>> {
        (a.len() == b.len()).then(|| a.iter().zip(b).map(|(a, b)| of(self, a, b)).collect())?
    }

    fn ty(self, a: &TensorType, b: &TensorType) -> Option<TensorType> {
        let dim = |line: Line, a: &Dim, b: &Dim| match (a, b) {
            (Dim::Fixed(a), Dim::Fixed(b)) => line.wide(*a, *b).map(Dim::Fixed),
            _ => None,
        };
        (a.dtype == b.dtype).then_some(TensorType { dtype: a.dtype, dims: self.each(&a.dims, &b.dims, dim)? })
    }

    fn feature(self, a: &Feature, b: &Feature) -> Option<Feature> {
        let shape = match (&a.shape, &b.shape) {
            (FeatureShape::Fixed(a), FeatureShape::Fixed(b)) => {
                FeatureShape::Fixed(self.each(a, b, |line, a, b| line.wide(*a, *b))?)
            }
            (a, b) => (a == b).then(|| a.clone())?,
        };
        let joined = Feature { shape, ..a.clone() };
        (joined == Feature { shape: joined.shape.clone(), ..b.clone() }).then_some(joined)
    }

    fn constant(self, a: &Arc<Tensor>, b: &Arc<Tensor>) -> Option<Arc<Tensor>> {
        if Arc::ptr_eq(a, b) || a == b {
            return Some(a.clone());
        }
        match (&a.data, &b.data) {
            (Data::I32(x), Data::I32(y)) if a.shape == b.shape => {
                let number = |line: Line, a: &i32, b: &i32| {
                    i32::try_from(line.number(i64::from(*a), i64::from(*b))?).ok()
                };
                Some(Arc::new(Tensor::i32(&a.shape, self.each(x, y, number)?)))
            }
            _ => None,
        }
    }

    fn step(self, a: &Instr, b: &Instr) -> Option<Instr> {
        let is_same =
            (&a.op_type, &a.name, &a.results) == (&b.op_type, &b.name, &b.results) && is_same_work(a, b);
        is_same.then_some(Instr { types: self.each(&a.types, &b.types, Line::ty)?, ..a.clone() })
    }
}

/// Tells whether two instructions compute the same with the same operands.
fn is_same_work(a: &Instr, b: &Instr) -> bool {
    match (&a.work, &b.work) {
        (
            InstrKind::Kernel { inputs: a, values: av, outputs: ao, .. },
            InstrKind::Kernel { inputs: b, values: bv, outputs: bo, .. },
        ) => a == b && av == bv && ao == bo,
        (
            InstrKind::Project { projection: a, x: ax, bias: ab, to: at },
            InstrKind::Project { projection: b, x: bx, bias: bb, to: bt },
        ) => (ax, ab, at) == (bx, bb, bt) && is_same_projection(a, b),
        (InstrKind::Copy { from: a, to: at }, InstrKind::Copy { from: b, to: bt }) => (a, at) == (b, bt),
        (InstrKind::WriteState { state: a, data: ad }, InstrKind::WriteState { state: b, data: bd }) => {
            (a, ad) == (b, bd)
        }
        _ => false,
    }
}

fn is_same_projection(a: &Projection, b: &Projection) -> bool {
    match (a, b) {
        (Projection::Conv(a), Projection::Conv(b)) => Convolution::is_same(a, b),
        (
            Projection::Linear { weight: a, input: ai, output: ao },
            Projection::Linear { weight: b, input: bi, output: bo },
        ) => a.is_same(b) && (ai, ao) == (bi, bo),
        _ => false,
    }
}
