//! Builds functions operation by operation, with types inferred and every optional parameter written out.
//!
//! coremltools writes a `const` for each parameter that has a default, and some compilers insist on it (coremltools
//! issue 2127), so the builder does the same.

mod methods;

pub use methods::{ConvParams, GeluMode, SliceParams};

use super::identifiers;
use super::ops::{self, Context, Default as OpDefault, Operand, Presence};
use super::{
    Argument, Binding, Block, DataType, Dim, Feature, FeatureShape, Function, FunctionDescription, MlModel,
    NamedType, Operation, Opset, Program, TensorType, Value, ValueType,
};
use crate::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A value of the function under construction.
#[derive(Clone, Debug)]
pub struct Var(Arc<VarData>);

#[derive(Debug)]
struct VarData {
    name: String,
    ty: ValueType,
    /// The constant's value, for inference of axes and shapes; `None` for any other value.
    constant: Option<Value>,
    /// A function input or a constant, which cannot be an output without an `identity`.
    fixed: bool,
}

impl Var {
    /// Returns the value's name, unique in the function.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the value's type.
    pub fn ty(&self) -> &ValueType {
        &self.0.ty
    }

    /// Returns the dimensions of a tensor or state; none for any other type.
    pub fn dims(&self) -> &[Dim] {
        self.0.ty.tensor().map_or(&[], |t| &t.dims)
    }

    /// Returns the element type of a tensor or state; fp16 for any other type, which the builder never makes.
    pub fn dtype(&self) -> DataType {
        self.0.ty.tensor().map_or(DataType::Float16, |t| t.dtype)
    }
}

/// Argument of a parameter.
#[derive(Clone, Debug)]
pub enum Arg {
    /// An earlier value.
    Var(Var),
    /// Several values, for variadic parameters.
    Vars(Vec<Var>),
    /// A constant. The builder makes a `const` operation for it; operands of `constexpr_*` are written in place.
    Value(Value),
    /// No value: an optional parameter that is left out.
    Absent,
}

impl From<&Var> for Arg {
    fn from(v: &Var) -> Self {
        Arg::Var(v.clone())
    }
}

impl From<Value> for Arg {
    fn from(v: Value) -> Self {
        Arg::Value(v)
    }
}

impl From<&[&Var]> for Arg {
    fn from(v: &[&Var]) -> Self {
        Arg::Vars(v.iter().map(|&v| v.clone()).collect())
    }
}

impl<T: Into<Arg>> From<Option<T>> for Arg {
    fn from(v: Option<T>) -> Self {
        v.map_or(Arg::Absent, Into::into)
    }
}

/// Converts Rust constants to arguments.
macro_rules! constants {
    ($($ty:ty, $value:path);* $(;)?) => {$(
        impl From<$ty> for Arg {
            fn from(v: $ty) -> Self {
                Arg::Value($value(v))
            }
        }
    )*};
}

constants! {
    bool, Value::bool;
    i32, Value::int32;
    &[i32], Value::int32s;
    &str, Value::string;
}

/// One function under construction.
pub struct FunctionBuilder {
    opset: Opset,
    inputs: Vec<NamedType>,
    /// Feature shapes of ranged and enumerated inputs. The type of a fixed input gives its shape.
    flexible: BTreeMap<String, FeatureShape>,
    operations: Vec<Operation>,
    outputs: Vec<String>,
    names: BTreeSet<String>,
    /// Prefix of the names of new values.
    scope: String,
}

/// A function and what [`model`] needs to describe it.
#[derive(Clone, Debug, PartialEq)]
pub struct BuiltFunction {
    /// The function.
    pub function: Function,
    flexible: BTreeMap<String, FeatureShape>,
}

impl FunctionBuilder {
    /// Makes an empty function.
    pub fn new(opset: Opset) -> Self {
        FunctionBuilder {
            opset,
            inputs: Vec::new(),
            flexible: BTreeMap::new(),
            operations: Vec::new(),
            outputs: Vec::new(),
            names: BTreeSet::new(),
            scope: String::new(),
        }
    }

    /// Sets the prefix of all later names, so that a block can be built several times.
    pub fn set_scope(&mut self, scope: &str) {
        self.scope = scope.to_string();
    }

    fn scoped(&self, name: &str) -> String {
        format!("{}{name}", self.scope)
    }

    fn claim(&mut self, name: &str) -> Result<()> {
        identifiers::check(name).map_err(Error::invalid_program)?;
        if !self.names.insert(name.to_string()) {
            return Err(Error::invalid_program(format!("the name `{name}` is used twice")));
        }
        Ok(())
    }

    fn add_input(&mut self, name: &str, ty: ValueType) -> Result<Var> {
        self.claim(name)?;
        self.inputs.push(NamedType { name: name.into(), ty: ty.clone() });
        Ok(Var(Arc::new(VarData { name: name.into(), ty, constant: None, fixed: true })))
    }

    /// Adds a tensor input of fixed shape.
    ///
    /// # Errors
    /// The name is illegal or taken.
    pub fn input(&mut self, name: &str, ty: TensorType) -> Result<Var> {
        self.add_input(&self.scoped(name), ValueType::Tensor(ty))
    }

    /// Adds a tensor input whose dimensions lie in ranges, both ends included; `default` is its default shape.
    ///
    /// # Errors
    /// The name is illegal or taken, or the default is outside a range.
    pub fn input_ranged(
        &mut self,
        name: &str,
        dtype: DataType,
        default: &[u64],
        ranges: &[(u64, u64)],
    ) -> Result<Var> {
        let name = self.scoped(name);
        let fits =
            default.len() == ranges.len() && default.iter().zip(ranges).all(|(d, (a, b))| a <= d && d <= b);
        if !fits {
            return Err(Error::invalid_program(format!(
                "input `{name}`: shape {default:?} is not in {ranges:?}"
            )));
        }
        let dims = ranges.iter().map(|&(a, b)| if a == b { Dim::Fixed(a) } else { Dim::Unknown }).collect();
        let ranges = ranges.iter().map(|&(a, b)| (a, Some(b))).collect();
        self.flexible.insert(name.clone(), FeatureShape::Range { default: default.to_vec(), ranges });
        self.add_input(&name, ValueType::Tensor(TensorType { dtype, dims }))
    }

    /// Adds a state: fp16, of fixed shape.
    ///
    /// # Errors
    /// The name is illegal or taken, the type is not fp16, or the opset has no states.
    pub fn state(&mut self, name: &str, ty: TensorType) -> Result<Var> {
        if ty.dtype != DataType::Float16 || ty.shape().is_none() || self.opset < Opset::CoreML8 {
            return Err(Error::invalid_program(format!(
                "state `{name}` of {ty} in {}: fp16 of fixed shape from CoreML8 on",
                self.opset
            )));
        }
        self.add_input(&self.scoped(name), ValueType::State(ty))
    }

    /// Adds a constant; the scope is put before its name.
    ///
    /// # Errors
    /// The name is illegal or taken.
    pub fn constant(&mut self, name: &str, value: Value) -> Result<Var> {
        self.constant_named(&self.scoped(name), value)
    }

    /// Adds a constant whose name has its scope already.
    fn constant_named(&mut self, name: &str, value: Value) -> Result<Var> {
        self.claim(name)?;
        let ty = value.ty.clone();
        self.operations.push(Operation {
            op_type: "const".into(),
            inputs: BTreeMap::new(),
            outputs: vec![NamedType { name: name.into(), ty: ty.clone() }],
            blocks: Vec::new(),
            attributes: BTreeMap::from([("name".into(), Value::string(name)), ("val".into(), value.clone())]),
        });
        Ok(Var(Arc::new(VarData { name: name.into(), ty, constant: Some(value), fixed: true })))
    }

    /// Adds any operation of the op table and returns its results. One result is named `name`; several are named
    /// `name_0`, `name_1` and so on. A parameter that is not in `args` is written with its default.
    ///
    /// # Errors
    /// The op is unknown, newer than the opset, or its operands do not fit.
    pub fn op(&mut self, op_type: &str, name: &str, args: Vec<(&'static str, Arg)>) -> Result<Vec<Var>> {
        let name = self.scoped(name);
        let name = name.as_str();
        let fail = |what: String| Error::invalid_op(name, op_type, what);
        let def = ops::op(op_type)
            .ok_or_else(|| Error::unsupported_here(format!("operation type `{op_type}` (`{name}`)")))?;
        if def.opset > self.opset {
            return Err(fail(format!("needs {}, the function has {}", def.opset, self.opset)));
        }
        let in_place = op_type.starts_with("constexpr_");
        let mut bound: BTreeMap<&'static str, Vec<Var>> = BTreeMap::new();
        let mut literal: BTreeMap<&'static str, Value> = BTreeMap::new();
        for (param, arg) in args {
            let known = def.param(param).ok_or_else(|| fail(format!("has no parameter `{param}`")))?;
            match arg {
                Arg::Var(v) => drop(bound.insert(param, vec![v])),
                Arg::Vars(v) if known.variadic => drop(bound.insert(param, v)),
                Arg::Vars(_) => return Err(fail(format!("parameter `{param}` takes one value"))),
                Arg::Absent => {}
                Arg::Value(v) if in_place => drop(literal.insert(param, v)),
                Arg::Value(v) => {
                    let var = self.constant_named(&format!("{name}_{param}_0"), v)?;
                    bound.insert(param, vec![var]);
                }
            }
        }
        let first_dtype = def.params.iter().find_map(|p| bound.get(p.name)?.first().map(Var::dtype));
        for p in &def.params {
            if let Presence::Default(default) = &p.presence
                && !bound.contains_key(p.name)
                && !in_place
            {
                let value = default_value(default, first_dtype.unwrap_or(DataType::Float32));
                let var = self.constant_named(&format!("{name}_{}_0", p.name), value)?;
                bound.insert(p.name, vec![var]);
            }
        }
        let mut context = Context::default();
        for (param, vars) in &bound {
            context.bind(
                param,
                vars.iter().map(|v| Operand { ty: v.ty(), value: v.0.constant.as_ref() }).collect(),
            );
        }
        for (param, value) in &literal {
            context.bind(param, vec![Operand { ty: &value.ty, value: Some(value) }]);
        }
        let types = def.infer(&context).map_err(fail)?;
        drop(context);
        let single = types.len() == 1;
        let mut outputs = Vec::new();
        for (i, ty) in types.into_iter().enumerate() {
            let output = if single { name.to_string() } else { format!("{name}_{i}") };
            self.claim(&output)?;
            outputs.push(Var(Arc::new(VarData { name: output, ty, constant: None, fixed: false })));
        }
        let mut inputs: BTreeMap<String, Argument> = BTreeMap::new();
        for (param, vars) in bound {
            let names = vars.iter().map(|v| Binding::Name(v.name().into())).collect();
            inputs.insert(param.into(), Argument(names));
        }
        let mut attributes = BTreeMap::from([("name".into(), Value::string(name))]);
        for (param, value) in literal {
            // Before iOS18 the operands of `constexpr_*` are attributes.
            if self.opset < Opset::CoreML8 {
                attributes.insert(param.into(), value);
            } else {
                inputs.insert(param.into(), Argument(vec![Binding::Value(value)]));
            }
        }
        self.operations.push(Operation {
            op_type: op_type.into(),
            inputs,
            outputs: outputs
                .iter()
                .map(|v| NamedType { name: v.name().into(), ty: v.ty().clone() })
                .collect(),
            blocks: Vec::new(),
            attributes,
        });
        Ok(outputs)
    }

    /// Adds any operation of the op table that has one result; see [`FunctionBuilder::op`].
    ///
    /// # Errors
    /// Fails like [`FunctionBuilder::op`], or the operation has several results.
    pub fn single(&mut self, op_type: &str, name: &str, args: Vec<(&'static str, Arg)>) -> Result<Var> {
        let mut outputs = self.op(op_type, name, args)?;
        match (outputs.pop(), outputs.is_empty()) {
            (Some(v), true) => Ok(v),
            _ => Err(Error::invalid_op(name, op_type, "expected one result")),
        }
    }

    /// Makes a value an output. An input or a constant goes through an `identity` named `NAME_out`.
    ///
    /// # Errors
    /// The value is an output already.
    pub fn output(&mut self, var: &Var) -> Result<()> {
        let var = if var.0.fixed { self.identity(&format!("{}_out", var.name()), var)? } else { var.clone() };
        if self.outputs.iter().any(|o| o == var.name()) {
            return Err(Error::invalid_program(format!("`{}` is an output twice", var.name())));
        }
        self.outputs.push(var.name().into());
        Ok(())
    }

    /// Ends the function.
    ///
    /// # Errors
    /// The function has no output.
    pub fn finish(self) -> Result<BuiltFunction> {
        if self.outputs.is_empty() {
            return Err(Error::invalid_program("a function without outputs"));
        }
        let block = Block { inputs: Vec::new(), operations: self.operations, outputs: self.outputs };
        let function = Function { inputs: self.inputs, opset: self.opset, block };
        Ok(BuiltFunction { function, flexible: self.flexible })
    }
}

fn default_value(default: &OpDefault, dtype: DataType) -> Value {
    match default {
        OpDefault::Bool(v) => Value::bool(*v),
        OpDefault::Int(v) => Value::int32(*v),
        OpDefault::Text(v) => Value::string(*v),
        OpDefault::Number(v) if dtype == DataType::Float16 => Value::fp16(half::f16::from_f32(*v)),
        OpDefault::Number(v) => Value::fp32(*v),
    }
}

/// Makes a model of these functions. A single function should be named `main`, as Core ML expects.
///
/// # Errors
/// There is no function, or a feature has no representable type.
pub fn model(
    opset: Opset,
    functions: Vec<(String, BuiltFunction)>,
    default_function: &str,
) -> Result<MlModel> {
    let mut program = Program::default();
    let mut described = Vec::new();
    for (name, built) in functions {
        described.push(describe(&name, &built)?);
        program.functions.insert(name, built.function);
    }
    if !program.functions.contains_key(default_function) {
        return Err(Error::invalid_program(format!("no function is named `{default_function}`")));
    }
    Ok(MlModel {
        specification_version: opset.specification_version(),
        functions: described,
        default_function: default_function.into(),
        metadata: BTreeMap::new(),
        program,
    })
}

fn describe(name: &str, built: &BuiltFunction) -> Result<FunctionDescription> {
    let f = &built.function;
    let mut d = FunctionDescription { name: name.into(), ..Default::default() };
    for input in &f.inputs {
        let Some(ty) = input.ty.tensor() else {
            return Err(Error::invalid_program(format!("input `{}` has type {}", input.name, input.ty)));
        };
        let shape = match (built.flexible.get(&input.name), ty.shape()) {
            (Some(shape), _) => shape.clone(),
            // A scalar is described as one element.
            (None, Some(shape)) => FeatureShape::Fixed(if shape.is_empty() { vec![1] } else { shape }),
            (None, None) => {
                return Err(Error::invalid_program(format!("input `{}` has no fixed shape", input.name)));
            }
        };
        let feature = Feature::array(&input.name, ty.dtype, shape);
        if matches!(input.ty, ValueType::State(_)) { d.states.push(feature) } else { d.inputs.push(feature) }
    }
    for output in &f.block.outputs {
        let produced = f.block.operations.iter().flat_map(|op| &op.outputs).find(|o| &o.name == output);
        let ty = produced.and_then(|o| o.ty.tensor()).ok_or_else(|| {
            Error::invalid_program(format!("output `{output}` is not the result of an operation"))
        })?;
        let shape = ty.shape().map_or(FeatureShape::Dynamic, FeatureShape::Fixed);
        d.outputs.push(Feature::array(output, ty.dtype, shape));
    }
    Ok(d)
}
