//! Compiles a function's operations to instructions over buffers.
//!
//! Constants are decoded or left as stored. Values that depend only on constants are computed once. Every other value gets a
//! buffer, which another value reuses after its last reader.

use super::super::Precision;
use super::super::bindings::{bound_name, name_of};
use super::super::function::{CompiledFunction, Executable};
use super::super::fused::PlanInput;
use super::super::interpreter::Interpreter;
use super::super::ir::{Instr, InstrKind, ParamRef, ValueRef};
use super::super::located::Located;
use super::super::ops::shape::{MAX_ELEMENTS, with_limit};
use super::super::ops::{self, OpContext, OpError};
use super::super::plan_source::{PlanSource, bytes_of};
use super::super::shared_constants::CompileContext;
use super::super::weights::{Constant, const_value, to_f16};
use super::constants::{constants_of, decoded};
use super::known_values::{Definition, KnownValues};
use super::outline::{CALL, CALL_INPUTS, OutlinedPlans};
use super::projection::projection;
use super::uses::{count_op, count_uses};
use crate::memory_limit::{Allowance, MemoryNeed};
use crate::tensor::{Data, Tensor};
use crate::{Error, Result};
use anemoe_mlpackage::mil::{
    Argument, Binding, Block, DataType, Dim, Function, FunctionDescription, NamedType, Operation, TensorType,
    ValueType,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Largest result that is computed at load, in elements: results computed at load stay in memory.
const MAX_FOLDED: usize = 1 << 24;

/// Target of compilation: fused nodes, or instructions that run one after the other.
pub(super) enum CompileTarget {
    FusedPlan,
    /// Instructions, with the plans that they call.
    Interpreter(OutlinedPlans),
}

struct FunctionCompiler<'a> {
    context: CompileContext<'a>,
    function: &'a str,
    known: KnownValues<'a>,
    states: Vec<String>,
    /// Number of buffers so far.
    buffers: usize,
    /// Buffers that hold no value with readers left.
    free: Vec<usize>,
    /// Number of readers left of each name, outputs of blocks included.
    uses: BTreeMap<&'a str, usize>,
    /// Depth of nested blocks. Inside them buffers are not reused, because a loop's body runs again.
    depth: usize,
    /// True if every value gets a buffer of its own, as a plan needs.
    unique_buffers: bool,
    plans: OutlinedPlans,
    /// Type of each buffer's value, kept for a plan.
    buffer_types: Vec<Option<TensorType>>,
    /// Most bytes that each buffer has held; values of unknown shape do not count.
    buffer_bytes: Vec<u64>,
    allowance: Allowance,
    need: MemoryNeed,
}

/// Returns the bytes of a tensor in memory: 1 per bool, 4 per other element.
fn tensor_bytes(t: &Tensor) -> u64 {
    let element = if t.as_bool().is_some() { 1 } else { 4 };
    (t.len() as u64).saturating_mul(element)
}

/// A function lowered to instructions.
pub(super) struct LoweredFunction<'a> {
    compiler: FunctionCompiler<'a>,
    pub instructions: Vec<Instr>,
    /// Buffer and type of each input.
    inputs: Vec<(usize, TensorType)>,
    outputs: Vec<ValueRef>,
    states: Vec<(String, TensorType)>,
}

/// Lowers a function's operations to instructions.
pub(super) fn lower<'a>(
    context: CompileContext<'a>,
    function: &'a str,
    body: &'a Function,
    described: &FunctionDescription,
    target: CompileTarget,
) -> Result<LoweredFunction<'a>> {
    let package = context.package;
    let inputs = body.inputs.iter().filter_map(|i| match &i.ty {
        ValueType::Tensor(ty) => Some(bytes_of(ty)),
        _ => None,
    });
    let allowance = Allowance::new(package.total_bytes(), inputs.fold(0, u64::saturating_add));
    let mut uses = BTreeMap::new();
    count_uses(&body.block, &mut uses);
    let (unique_buffers, plans) = match target {
        CompileTarget::Interpreter(plans) => (false, plans),
        CompileTarget::FusedPlan => (true, OutlinedPlans::new()),
    };
    let mut c = FunctionCompiler {
        context,
        function,
        known: KnownValues::default(),
        states: Vec::new(),
        buffers: 0,
        free: Vec::new(),
        uses,
        depth: 0,
        unique_buffers,
        plans,
        buffer_types: Vec::new(),
        buffer_bytes: Vec::new(),
        allowance,
        need: MemoryNeed::default(),
    };
    let wrong = |what: String| Error::invalid(package.path(), format!("function `{function}`: {what}"));
    let mut input_places = Vec::new();
    for (i, input) in body.inputs.iter().enumerate() {
        if body.inputs[..i].iter().any(|other| other.name == input.name) {
            return Err(wrong(format!("two inputs are named `{}`", input.name)));
        }
        let place = match &input.ty {
            ValueType::Tensor(ty) => ValueRef::Buffer(c.new_buffer(Some(ty))),
            ValueType::State(ty) => {
                if ty.elements().is_none_or(|n| n > MAX_ELEMENTS as u64) {
                    return Err(wrong(format!(
                        "state `{}` of type {ty}: its size is unknown or too large",
                        input.name
                    )));
                }
                c.states.push(input.name.clone());
                ValueRef::State(c.states.len() - 1)
            }
            other => {
                return Err(Error::unsupported(
                    package.path(),
                    format!("input `{}` of type {other}", input.name),
                ));
            }
        };
        // An input has one reader more than its operations: its buffer is not reused, so that the next call finds it.
        *c.uses.entry(input.name.as_str()).or_default() += 1;
        c.known.names.insert(&input.name, Definition::Value(place));
        c.known.types.insert(&input.name, &input.ty);
    }
    for feature in &described.inputs {
        let Some(Definition::Value(ValueRef::Buffer(b))) = c.known.names.get(feature.name.as_str()) else {
            return Err(wrong(format!("described input `{}` is not an input of the function", feature.name)));
        };
        let Some(ValueType::Tensor(ty)) = c.known.types.get(feature.name.as_str()) else {
            return Err(wrong(format!("described input `{}` is not a tensor", feature.name)));
        };
        input_places.push((*b, ty.clone()));
    }
    if described.inputs.len() + c.states.len() != body.inputs.len() {
        return Err(wrong("an input of the function is not described".into()));
    }
    let instructions = with_limit(allowance.elements_beside(0), || c.block(&body.block))?;
    let mut outputs = Vec::new();
    for feature in &described.outputs {
        if !body.block.outputs.contains(&feature.name) {
            return Err(wrong(format!(
                "described output `{}` is not an output of the function",
                feature.name
            )));
        }
        outputs.push(c.operand_place(&feature.name).map_err(wrong)?);
    }
    let state_types = c.states.iter().map(|s| c.known.types.get(s.as_str())?.tensor().cloned());
    let state_types: Vec<TensorType> = state_types.collect::<Option<_>>().unwrap_or_default();
    let states = c.states.iter().cloned().zip(state_types).collect();
    Ok(LoweredFunction { compiler: c, instructions, inputs: input_places, outputs, states })
}

impl LoweredFunction<'_> {
    /// Returns the input of a plan; none where a shape is unknown or too large.
    pub fn plan_source(self, described: &FunctionDescription) -> Option<PlanSource> {
        let LoweredFunction { compiler: c, instructions, inputs, outputs, states } = self;
        let shape = |ty: &TensorType| {
            let shape =
                ty.shape()?.into_iter().map(|d| usize::try_from(d).ok()).collect::<Option<Vec<_>>>()?;
            let n = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
            (n <= MAX_ELEMENTS && shape.len() <= 8).then_some(shape)
        };
        let source = PlanInput {
            instructions,
            constants: c.known.constants,
            shapes: c.buffer_types.iter().map(|ty| shape(ty.as_ref()?)).collect::<Option<_>>()?,
            types: c.buffer_types.iter().map(|ty| Some(ty.as_ref()?.dtype)).collect::<Option<_>>()?,
            inputs: inputs.iter().map(|(b, _)| *b).collect(),
            outputs,
            states: states.iter().map(|(_, ty)| shape(ty)).collect::<Option<_>>()?,
            skip_zero: c.context.options.skip_zero,
            round: c.context.options.precision == Precision::Fp16,
        };
        let inputs = inputs.into_iter().map(|(_, ty)| ty).collect();
        Some(PlanSource { described: described.clone(), inputs, states, source, need: c.need })
    }

    /// Makes a function that the interpreter runs.
    pub fn interpreted(self, described: &FunctionDescription) -> Result<CompiledFunction> {
        let LoweredFunction { compiler: c, instructions, inputs, outputs, states } = self;
        let (package, function, options) = (c.context.package, c.function, c.context.options);
        let values = c.buffer_bytes.iter().copied().fold(0, u64::saturating_add);
        let state_bytes = states.iter().map(|(_, ty)| bytes_of(ty)).fold(0, u64::saturating_add);
        let checked = c.need.check(c.allowance, values, state_bytes);
        checked.map_err(|what| Error::invalid(package.path(), format!("function `{function}`: {what}")))?;
        let types = inputs.iter().map(|(_, ty)| ty.clone()).collect();
        let code = Executable::Interpreter(Interpreter {
            path: package.path().to_path_buf(),
            function: function.to_string(),
            options,
            allowance: c.allowance,
            inputs,
            outputs,
            buffers: c.buffers,
            constants: c.known.constants,
            instructions,
            spare: Mutex::default(),
        });
        let (path, name) = (package.path().to_path_buf(), function.to_string());
        Ok(CompiledFunction::new(path, name, options, c.allowance, described.clone(), types, states, code))
    }
}

impl<'a> FunctionCompiler<'a> {
    fn new_buffer(&mut self, ty: Option<&TensorType>) -> usize {
        self.buffers += 1;
        self.buffer_types.push(ty.cloned());
        self.buffer_bytes.push(ty.map_or(0, bytes_of));
        self.buffers - 1
    }

    /// Adds the bytes of a constant to the need, and checks the sum against the allowance.
    fn count_constant(&mut self, t: &Tensor) -> std::result::Result<(), String> {
        self.need.constants = self.need.constants.saturating_add(tensor_bytes(t));
        self.allowance.check("constants up to here", self.need.constants)
    }

    fn take_buffer(&mut self, ty: Option<&TensorType>) -> usize {
        if self.unique_buffers {
            return self.new_buffer(ty);
        }
        match self.free.pop() {
            Some(b) if self.depth == 0 => {
                self.buffer_bytes[b] = self.buffer_bytes[b].max(ty.map_or(0, bytes_of));
                b
            }
            Some(b) => {
                self.free.push(b);
                self.new_buffer(ty)
            }
            None => self.new_buffer(ty),
        }
    }

    fn constant(&mut self, t: Arc<Tensor>) -> ValueRef {
        self.known.constants.push(t);
        ValueRef::Constant(self.known.constants.len() - 1)
    }

    /// Returns the place where a value can be read; a stored weight is decoded first.
    fn operand_place(&mut self, name: &str) -> std::result::Result<ValueRef, String> {
        let constant = match self.known.names.get(name) {
            None => return Err(format!("`{name}` is used before it is defined")),
            Some(Definition::Value(p)) => return Ok(*p),
            Some(Definition::Constant(constant)) => constant.clone(),
        };
        let t = match constant {
            Constant::Dense(t) => t,
            Constant::Stored(w) => {
                let t = decoded(self.context, name, &w);
                self.count_constant(&t)?;
                t
            }
        };
        let place = self.constant(t);
        if let Some(found) = self.known.names.get_mut(name) {
            *found = Definition::Value(place);
        }
        Ok(place)
    }

    fn block(&mut self, block: &'a Block) -> Result<Vec<Instr>> {
        let mut instructions = Vec::new();
        for (i, op) in block.operations.iter().enumerate() {
            let at = Located {
                path: self.context.package.path(),
                function: self.function,
                op_type: &op.op_type,
                name: op.name(),
            };
            let before = instructions.len();
            self.operation(op, &block.operations[i + 1..], &at, &mut instructions)?;
            if let Some(step) = instructions.get_mut(before) {
                step.results = op.outputs.iter().map(|o| o.name.clone()).collect();
            }
            self.release(op);
        }
        Ok(instructions)
    }

    /// Frees the buffers whose last reader was this operation. Reads in nested blocks count as reads of the operation that
    /// contains them.
    fn release(&mut self, op: &'a Operation) {
        if self.depth > 0 {
            return;
        }
        let mut read = BTreeMap::new();
        count_op(op, &mut read);
        // Results without readers are free at once.
        for output in &op.outputs {
            read.entry(output.name.as_str()).or_insert(0);
        }
        for (name, n) in read {
            let left = self.uses.entry(name).or_default();
            *left = left.saturating_sub(n);
            if *left == 0
                && let Some(Definition::Value(ValueRef::Buffer(b))) = self.known.names.get(name)
            {
                self.free.push(*b);
            }
        }
    }

    fn define(&mut self, op: &'a Operation) -> Vec<usize> {
        let mut buffers = Vec::new();
        for output in &op.outputs {
            let b = self.take_buffer(output.ty.tensor());
            self.known.names.insert(&output.name, Definition::Value(ValueRef::Buffer(b)));
            self.known.types.insert(&output.name, &output.ty);
            buffers.push(b);
        }
        buffers
    }

    fn operation(
        &mut self,
        op: &'a Operation,
        later: &[Operation],
        at: &Located<'_>,
        instructions: &mut Vec<Instr>,
    ) -> Result<()> {
        let invalid = |what: String| at.invalid(what);
        for output in &op.outputs {
            if self.known.names.contains_key(output.name.as_str()) {
                return Err(invalid(format!("`{}` is defined twice", output.name)));
            }
        }
        match op.op_type.as_str() {
            name if name == "const" || name.starts_with("constexpr_") => {
                let constants = constants_of(self.context, &self.known, op, at)?;
                if constants.len() != op.outputs.len() {
                    return Err(invalid(format!(
                        "{} outputs, expected {}",
                        op.outputs.len(),
                        constants.len()
                    )));
                }
                for (output, constant) in op.outputs.iter().zip(constants) {
                    if let Constant::Dense(t) = &constant {
                        self.count_constant(t).map_err(invalid)?;
                    }
                    self.define_constant(output, constant);
                }
                Ok(())
            }
            "read_state" => self.read_state(op, later, at, instructions),
            "write_state" => {
                let state = self.state_operand(op, at)?;
                let data = self.named(op, "data", at)?;
                let data = self.operand_place(data).map_err(invalid)?;
                instructions.push(Instr::new(at, InstrKind::WriteState { state, data }));
                Ok(())
            }
            "cond" => self.cond(op, at, instructions),
            "while_loop" => self.while_loop(op, at, instructions),
            CALL if self.plans.contains_key(op.name()) => {
                let plan = self.plans[op.name()].clone();
                let inputs = op.inputs.get(CALL_INPUTS).into_iter().flat_map(|Argument(bindings)| bindings);
                let inputs = inputs
                    .filter_map(name_of)
                    .map(|n| self.operand_place(n))
                    .collect::<std::result::Result<_, _>>();
                let inputs = inputs.map_err(invalid)?;
                let outputs = self.define(op);
                instructions.push(Instr::new(at, InstrKind::Call { plan, inputs, outputs }));
                Ok(())
            }
            _ => self.library_op(op, at, instructions),
        }
    }

    fn named<'o>(&self, op: &'o Operation, param: &str, at: &Located<'_>) -> Result<&'o str> {
        let wrong = || at.invalid(format!("parameter `{param}` must be a value of the program"));
        bound_name(op, param).ok_or_else(wrong)
    }

    fn state_operand(&self, op: &Operation, at: &Located<'_>) -> Result<usize> {
        let name = self.named(op, "input", at)?;
        match self.known.names.get(name) {
            Some(Definition::Value(ValueRef::State(i))) => Ok(*i),
            _ => Err(at.invalid(format!("`{name}` is not a state"))),
        }
    }

    /// Defines the value of a state: the state itself if nothing writes it before the value's last reader, else a copy.
    fn read_state(
        &mut self,
        op: &'a Operation,
        later: &[Operation],
        at: &Located<'_>,
        instructions: &mut Vec<Instr>,
    ) -> Result<()> {
        let state = self.state_operand(op, at)?;
        let Some(output) = op.outputs.first() else {
            return Err(at.invalid("no output"));
        };
        let mentions = |op: &Operation| {
            let mut uses = BTreeMap::new();
            count_op(op, &mut uses);
            uses.contains_key(output.name.as_str())
        };
        let state_name = self.states[state].clone();
        let writes =
            |op: &Operation| op.op_type == "write_state" && bound_name(op, "input") == Some(&state_name);
        let first_write = later.iter().position(writes);
        // The write itself may read the value: the value is read before the state changes.
        let safe = first_write.is_none_or(|w| !later[w + 1..].iter().any(mentions));
        // An output of the function is read after all operations.
        let readers: usize = later.iter().filter(|op| mentions(op)).count();
        let is_output =
            self.uses.get(output.name.as_str()).copied().unwrap_or(0) > readers && first_write.is_some();
        if safe && self.depth == 0 && !is_output {
            self.known.names.insert(&output.name, Definition::Value(ValueRef::State(state)));
            self.known.types.insert(&output.name, &output.ty);
        } else {
            let out = self.define(op);
            instructions.push(Instr::new(at, InstrKind::Copy { from: ValueRef::State(state), to: out[0] }));
        }
        Ok(())
    }

    /// Returns the place of what a parameter is bound to.
    fn bound(&mut self, binding: &Binding, at: &Located<'_>) -> Result<ValueRef> {
        match binding {
            Binding::Name(name) => self.operand_place(name).map_err(|what| at.invalid(what)),
            Binding::Value(value) => {
                let constant = const_value(self.context.package, value).and_then(|c| c.to_tensor());
                Ok(self.constant(Arc::new(constant.map_err(|e| at.error(e))?)))
            }
        }
    }

    /// Defines a result as a constant.
    fn define_constant(&mut self, output: &'a NamedType, constant: Constant) {
        self.known.names.insert(&output.name, Definition::Constant(constant));
        self.known.types.insert(&output.name, &output.ty);
    }

    /// Returns the operands of an operation by parameter, and those of its variadic parameter as a list.
    fn operands(&mut self, op: &Operation, at: &Located<'_>) -> Result<(Vec<ParamRef>, Vec<ValueRef>)> {
        let (mut inputs, mut values) = (Vec::new(), Vec::new());
        for (param, Argument(bindings)) in &op.inputs {
            let variadic = matches!(
                (op.op_type.as_str(), param.as_str()),
                ("concat" | "stack" | "einsum", "values") | ("reshape_like", "ref_tensors")
            );
            // The declared type has the shape of a list's elements.
            if (op.op_type.as_str(), param.as_str()) == ("make_list", "elem_shape") {
                continue;
            }
            if bindings.len() != 1 && !variadic {
                if let Some(t) = self.joined(bindings) {
                    let place = self.constant(Arc::new(t));
                    inputs.push(ParamRef { param: param.clone(), place });
                    continue;
                }
                return Err(at.invalid(format!("parameter `{param}` has {} values", bindings.len())));
            }
            for binding in bindings {
                let place = self.bound(binding, at)?;
                if variadic {
                    values.push(place)
                } else {
                    inputs.push(ParamRef { param: param.clone(), place })
                }
            }
        }
        Ok((inputs, values))
    }

    /// Joins constant scalars to a vector, as `begins` of `reshape_like` has them; none where a value is not one.
    fn joined(&self, bindings: &[Binding]) -> Option<Tensor> {
        let constants = bindings.iter().map(|binding| {
            let constant = match binding {
                Binding::Name(name) => self.known.constant(name)?,
                Binding::Value(value) => const_value(self.context.package, value).ok()?,
            };
            constant.to_tensor().ok().filter(|t| t.rank() == 0)
        });
        let constants = constants.collect::<Option<Vec<Tensor>>>()?;
        let shape = vec![constants.len()];
        let data = match constants.first()?.data {
            Data::I32(_) => {
                Data::I32(constants.iter().map(|t| t.as_i32()?.first().copied()).collect::<Option<_>>()?)
            }
            Data::Bool(_) => {
                Data::Bool(constants.iter().map(|t| t.as_bool()?.first().copied()).collect::<Option<_>>()?)
            }
            _ => return None,
        };
        Some(Tensor { shape, data })
    }

    /// Returns the types of an operation's results as tensors: a list of tensors has an axis in front that counts them.
    fn output_types(&self, op: &Operation, at: &Located<'_>) -> Result<Vec<TensorType>> {
        let tensor = |o: &NamedType| match &o.ty {
            ValueType::Tensor(t) => Ok(t.clone()),
            ValueType::List { element, .. }
                if element.tensor().is_some_and(|t| t.dtype != DataType::String) =>
            {
                let elements = element.tensor().into_iter().flat_map(|t| &t.dims);
                let dims = std::iter::once(Dim::Unknown).chain(elements.copied()).collect();
                Ok(TensorType::new(element.tensor().map_or(DataType::Float32, |t| t.dtype), dims))
            }
            other => Err(at.error(OpError::Unsupported(format!("result `{}` of type {other}", o.name)))),
        };
        op.outputs.iter().map(tensor).collect()
    }

    fn library_op(
        &mut self,
        op: &'a Operation,
        at: &Located<'_>,
        instructions: &mut Vec<Instr>,
    ) -> Result<()> {
        let function = ops::op_function(&op.op_type)
            .ok_or_else(|| at.error(OpError::Unsupported("the operation is not implemented".into())))?;
        if op.outputs.is_empty() {
            return Err(at.invalid("no output"));
        }
        let types = self.output_types(op, at)?;
        self.check_results(&types, at)?;
        if let Some((projection, x, prepared)) =
            projection(self.context.package, &self.known, op).map_err(|e| at.error(e))?
        {
            self.need.constants = self.need.constants.saturating_add(prepared);
            let checked = self.allowance.check("constants up to here", self.need.constants);
            checked.map_err(|what| at.invalid(what))?;
            let x = self.operand_place(&x).map_err(|what| at.invalid(what))?;
            let bias = op.inputs.get("bias").and_then(|a| a.0.first());
            let bias = bias.map(|bias| self.bound(bias, at)).transpose()?;
            let out = self.define(op);
            instructions.push(Instr::typed(
                at,
                InstrKind::Project { projection, x, bias, to: out[0] },
                types,
            ));
            return Ok(());
        }
        let (inputs, values) = self.operands(op, at)?;
        let constant = |p: &ValueRef| matches!(p, ValueRef::Constant(_));
        // Each run draws numbers of its own.
        let draws = op.op_type.starts_with("random_");
        let folds = !draws && inputs.iter().all(|o| constant(&o.place)) && values.iter().all(constant);
        let small = types.iter().all(|t| t.elements().is_none_or(|n| n <= MAX_FOLDED as u64));
        let bytes = types.iter().map(bytes_of).fold(self.need.constants, u64::saturating_add);
        if folds && small && bytes <= self.allowance.bytes {
            let left = self.allowance.elements_beside(self.need.constants);
            let results = with_limit(left, || self.fold(op, function, &inputs, &values, &types));
            let results = results.map_err(|e| at.error(e))?;
            for (output, t) in op.outputs.iter().zip(results) {
                self.count_constant(&t).map_err(|what| at.invalid(what))?;
                self.define_constant(output, Constant::Dense(Arc::new(t)));
            }
            return Ok(());
        }
        // The shape of a value of fixed type is a constant.
        if op.op_type == "shape"
            && let Ok(x) = self.named(op, "x", at)
            && let Some(shape) =
                self.known.types.get(x).and_then(|ty| ty.tensor()).and_then(TensorType::shape)
        {
            let v: Vec<i32> = shape.iter().map(|&d| i32::try_from(d).unwrap_or(i32::MAX)).collect();
            self.define_constant(&op.outputs[0], Constant::Dense(Arc::new(Tensor::i32(&[v.len()], v))));
            return Ok(());
        }
        let outputs = self.define(op);
        let work = InstrKind::Op { function, inputs, values, outputs };
        instructions.push(Instr::typed(at, work, types));
        Ok(())
    }

    /// Refuses a result that alone takes more bytes than allowed, and keeps the largest one.
    fn check_results(&mut self, types: &[TensorType], at: &Located<'_>) -> Result<()> {
        for ty in types {
            let bytes = bytes_of(ty);
            let checked = self.allowance.check(&format!("a result of type {ty}"), bytes);
            checked.map_err(|what| at.invalid(what))?;
            if bytes > self.need.largest.1 {
                self.need.largest = (format!("op `{}` (operation `{}`)", at.op_type, at.name), bytes);
            }
        }
        Ok(())
    }

    fn fold(
        &self,
        op: &Operation,
        function: ops::OpFunction,
        inputs: &[ParamRef],
        values: &[ValueRef],
        types: &[TensorType],
    ) -> std::result::Result<Vec<Tensor>, OpError> {
        let get = |p: &ValueRef| match p {
            ValueRef::Constant(i) => self.known.constants[*i].as_ref(),
            _ => unreachable!("only constants are folded"),
        };
        let bound: Vec<(&str, &Tensor)> = inputs.iter().map(|o| (o.param.as_str(), get(&o.place))).collect();
        let listed: Vec<&Tensor> = values.iter().map(get).collect();
        let mut out = vec![Tensor::default(); op.outputs.len()];
        function(&OpContext { op: &op.op_type, inputs: &bound, values: &listed, outputs: types }, &mut out)?;
        for (t, ty) in out.iter_mut().zip(types) {
            if let (DataType::Float16, Precision::Fp16, Data::F32(v)) =
                (ty.dtype, self.context.options.precision, &mut t.data)
            {
                v.iter_mut().for_each(|v| *v = to_f16(*v));
            }
        }
        Ok(out)
    }

    /// Returns the instructions of a nested block, and the places of its results.
    fn nested(
        &mut self,
        block: &'a Block,
        inputs: &[usize],
        at: &Located<'_>,
    ) -> Result<(Vec<Instr>, Vec<ValueRef>)> {
        if block.inputs.len() != inputs.len() {
            return Err(at.invalid(format!("a block with {} inputs", block.inputs.len())));
        }
        // Names that a block defines are known only inside it; another block may use the same names.
        let outside = (self.known.names.clone(), self.known.types.clone());
        for (input, &buffer) in block.inputs.iter().zip(inputs) {
            if self.known.names.insert(&input.name, Definition::Value(ValueRef::Buffer(buffer))).is_some() {
                return Err(at.invalid(format!("`{}` is defined twice", input.name)));
            }
            self.known.types.insert(&input.name, &input.ty);
        }
        self.depth += 1;
        let instructions = self.block(block)?;
        let results: std::result::Result<Vec<ValueRef>, String> =
            block.outputs.iter().map(|n| self.operand_place(n)).collect();
        self.depth -= 1;
        (self.known.names, self.known.types) = outside;
        Ok((instructions, results.map_err(|what| at.invalid(what))?))
    }

    fn cond(&mut self, op: &'a Operation, at: &Located<'_>, instructions: &mut Vec<Instr>) -> Result<()> {
        let pred = self.named(op, "pred", at)?;
        let pred = self.operand_place(pred).map_err(|what| at.invalid(what))?;
        let [yes, no] = op.blocks.as_slice() else {
            return Err(at.invalid(format!("{} blocks, expected two", op.blocks.len())));
        };
        let (yes, no) = (self.nested(yes, &[], at)?, self.nested(no, &[], at)?);
        if yes.1.len() != op.outputs.len() || no.1.len() != op.outputs.len() {
            return Err(at.invalid("branches with other numbers of results"));
        }
        let outputs = self.define(op);
        instructions.push(Instr::new(at, InstrKind::Cond { pred, yes, no, outputs }));
        Ok(())
    }

    fn while_loop(
        &mut self,
        op: &'a Operation,
        at: &Located<'_>,
        instructions: &mut Vec<Instr>,
    ) -> Result<()> {
        let Some(Argument(bindings)) = op.inputs.get("loop_vars") else {
            return Err(at.invalid("required parameter `loop_vars` is missing"));
        };
        let initial = bindings.iter().map(|b| self.bound(b, at)).collect::<Result<Vec<ValueRef>>>()?;
        let [cond, body] = op.blocks.as_slice() else {
            return Err(at.invalid(format!("{} blocks, expected two", op.blocks.len())));
        };
        if initial.len() != op.outputs.len() {
            return Err(at.invalid("as many results as loop variables are expected"));
        }
        let variables = self.define(op);
        let cond = self.nested(cond, &variables, at)?;
        let body = self.nested(body, &variables, at)?;
        if cond.1.len() != 1 || body.1.len() != variables.len() {
            return Err(at.invalid("the loop's blocks have other numbers of results"));
        }
        instructions.push(Instr::new(at, InstrKind::While { initial, variables, cond, body }));
        Ok(())
    }
}
