//! Checks a model against MIL's rules, as Core ML's compiler does before it chooses a device.

use super::ops::{self, Context, Operand};
use super::{
    Argument, Binding, Block, DataType, Dim, Feature, FeatureKind, FeatureShape, Function,
    FunctionDescription, MlModel, Operation, Opset, TensorType, Value, ValueData, ValueType, identifiers,
};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Legal, but not checked completely, or refused by some compilers.
    Warning,
    /// Breaks a rule of MIL.
    Error,
}

/// One fault of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// Severity.
    pub severity: Severity,
    /// Function; empty for the model as a whole.
    pub function: String,
    /// Operation, input or output.
    pub place: String,
    /// Fault, in words.
    pub text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = if self.severity == Severity::Error { "error" } else { "warning" };
        write!(f, "{severity}: function `{}`, `{}`: {}", self.function, self.place, self.text)
    }
}

/// Returns all findings of a model.
pub fn verify(model: &MlModel) -> Vec<Finding> {
    let mut v = Verifier { findings: Vec::new(), function: String::new() };
    let newest = model.program.functions.values().map(|f| f.opset.specification_version()).max().unwrap_or(0);
    if newest > model.specification_version {
        v.error(
            "specificationVersion",
            format!("{} for a program that needs {newest}", model.specification_version),
        );
    }
    let several = model.functions.len() > 1 || model.functions.first().is_some_and(|f| f.name != "main");
    if several && model.specification_version < Opset::CoreML8.specification_version() {
        v.error("specificationVersion", "several functions need specification version 9".into());
    }
    if !model.program.functions.contains_key(&model.default_function) {
        v.error("defaultFunctionName", format!("`{}` is not a function", model.default_function));
    }
    for (name, function) in &model.program.functions {
        v.function = name.clone();
        v.check_name(name, name);
        match model.functions.iter().find(|f| &f.name == name) {
            Some(described) => v.description(function, described, model.specification_version),
            None => v.error(name, "the function is not described".into()),
        }
        v.body(function);
    }
    v.findings
}

struct Verifier {
    findings: Vec<Finding>,
    function: String,
}

/// Type of a named value, and its constant value if it has one.
#[derive(Clone)]
struct KnownValue<'a> {
    ty: &'a ValueType,
    value: Option<&'a Value>,
}

type NameScope<'a> = BTreeMap<&'a str, KnownValue<'a>>;

impl Verifier {
    fn add(&mut self, severity: Severity, place: &str, text: String) {
        self.findings.push(Finding { severity, function: self.function.clone(), place: place.into(), text });
    }

    fn error(&mut self, place: &str, text: String) {
        self.add(Severity::Error, place, text);
    }

    fn check_name(&mut self, place: &str, name: &str) {
        if let Err(what) = identifiers::check(name) {
            self.error(place, what);
        }
    }

    fn description(&mut self, f: &Function, described: &FunctionDescription, version: i32) {
        let mut seen: BTreeSet<&str> = BTreeSet::new();
        for (state, feature) in
            described.inputs.iter().map(|f| (false, f)).chain(described.states.iter().map(|f| (true, f)))
        {
            seen.insert(&feature.name);
            let Some(input) = f.inputs.iter().find(|i| i.name == feature.name) else {
                self.error(&feature.name, "described, but not an input of the function".into());
                continue;
            };
            let ty = match (&input.ty, state) {
                (ValueType::Tensor(t), false) | (ValueType::State(t), true) => t,
                (other, _) => {
                    self.error(&feature.name, format!("its type {other} does not fit the description"));
                    continue;
                }
            };
            self.feature(feature, ty, version);
            if state && (ty.dtype != DataType::Float16 || ty.shape().is_none()) {
                self.error(&feature.name, format!("a state of {ty}: only fp16 of fixed shape is allowed"));
            }
        }
        for input in f.inputs.iter().filter(|i| !seen.contains(i.name.as_str())) {
            self.error(&input.name, "an input that the description leaves out".into());
        }
        let outputs: BTreeSet<&str> = described.outputs.iter().map(|f| f.name.as_str()).collect();
        if outputs != f.block.outputs.iter().map(String::as_str).collect::<BTreeSet<_>>() {
            self.error(
                "outputs",
                format!("described are {outputs:?}, the function gives {:?}", f.block.outputs),
            );
        }
        for feature in &described.outputs {
            let produced =
                f.block.operations.iter().flat_map(|op| &op.outputs).find(|o| o.name == feature.name);
            match produced.map(|o| &o.ty) {
                Some(ValueType::Tensor(ty)) => self.feature(feature, ty, version),
                Some(ty @ ValueType::Dictionary { key, .. }) => {
                    let fits = key.tensor().is_some_and(|t| t.dtype == feature.dtype);
                    if feature.kind != FeatureKind::Dictionary || !fits {
                        self.error(&feature.name, format!("described as {feature}, its type is {ty}"));
                    }
                }
                _ => {}
            }
        }
    }

    fn feature(&mut self, feature: &Feature, ty: &TensorType, version: i32) {
        // A program takes pixels in the float type that suits it.
        let is_image = matches!(feature.kind, FeatureKind::Image(_));
        if feature.dtype != ty.dtype && !(is_image && ty.dtype.is_float()) {
            self.error(&feature.name, format!("described as {}, its type is {ty}", feature.dtype));
        }
        if feature.dtype == DataType::Float16 && !is_image && version < Opset::CoreML6.specification_version()
        {
            self.error(&feature.name, "fp16 features need specification version 7".into());
        }
        let fits = |shape: &[u64], ty: &TensorType| {
            shape.len() == ty.rank()
                && shape.iter().zip(&ty.dims).all(|(n, d)| d.fixed().is_none_or(|d| d == *n))
        };
        let ok = match &feature.shape {
            // A scalar is described as one element.
            FeatureShape::Fixed(shape) => fits(shape, ty) || ty.rank() == 0 && shape == &[1],
            FeatureShape::Dynamic => ty.shape().is_none() || ty.rank() == 0,
            FeatureShape::Enumerated(shapes) => {
                (1..=128).contains(&shapes.len()) && shapes.iter().all(|s| fits(s, ty))
            }
            FeatureShape::Range { default, ranges } => {
                let inside =
                    |(d, (low, high)): (&u64, &(u64, Option<u64>))| low <= d && high.is_none_or(|h| *d <= h);
                let varies = |(dim, (low, high)): (&Dim, &(u64, Option<u64>))| {
                    dim.fixed().is_none_or(|n| *low == n && *high == Some(n))
                };
                fits(default, ty)
                    && default.iter().zip(ranges).all(inside)
                    && ty.dims.iter().zip(ranges).all(varies)
            }
        };
        if !ok {
            self.error(&feature.name, format!("described as {}, its type is {ty}", feature.shape));
        }
    }

    fn body(&mut self, f: &Function) {
        let mut scope = NameScope::new();
        for input in &f.inputs {
            self.check_name(&input.name, &input.name);
            if scope.insert(&input.name, KnownValue { ty: &input.ty, value: None }).is_some() {
                self.error(&input.name, "two inputs of this name".into());
            }
        }
        let mut all: BTreeSet<&str> = scope.keys().copied().collect();
        self.block(&f.block, f.opset, &mut scope, &mut all);
        for output in &f.block.outputs {
            let made = f.block.operations.iter().find(|op| op.outputs.iter().any(|o| &o.name == output));
            match made {
                None => self.error(output, "an output that no operation makes".into()),
                Some(op) if op.op_type == "const" => {
                    self.error(output, "an output that is a constant".into())
                }
                Some(_) => {}
            }
        }
    }

    /// Checks operations in order. Returns the types of the block's results.
    fn block<'a>(
        &mut self,
        block: &'a Block,
        opset: Opset,
        scope: &mut NameScope<'a>,
        all: &mut BTreeSet<&'a str>,
    ) -> Vec<ValueType> {
        for op in &block.operations {
            self.operation(op, opset, scope, all);
        }
        let mut results = Vec::new();
        for name in &block.outputs {
            match scope.get(name.as_str()) {
                Some(known) => results.push(known.ty.clone()),
                None => self.error(name, "a result of a block that is not defined in it".into()),
            }
        }
        results
    }

    fn operation<'a>(
        &mut self,
        op: &'a Operation,
        opset: Opset,
        scope: &mut NameScope<'a>,
        all: &mut BTreeSet<&'a str>,
    ) {
        let place = op.name().to_string();
        for output in &op.outputs {
            self.check_name(&place, &output.name);
            if !all.insert(&output.name) {
                self.error(&place, format!("the name `{}` is used twice", output.name));
            }
            if output.ty.tensor().is_some_and(|t| t.rank() > 5) && !is_constant(&op.op_type) {
                self.error(
                    &place,
                    format!(
                        "a result of rank {}, at most 5 is allowed",
                        output.ty.tensor().map_or(0, TensorType::rank)
                    ),
                );
            }
        }
        if op.op_type == "const" {
            self.constant(op, &place, scope);
            return;
        }
        self.checked(op, opset, &place, scope, all);
        for output in &op.outputs {
            scope.insert(&output.name, KnownValue { ty: &output.ty, value: None });
        }
    }

    fn constant<'a>(&mut self, op: &'a Operation, place: &str, scope: &mut NameScope<'a>) {
        match (op.attributes.get("val"), op.outputs.as_slice()) {
            (Some(value), [output]) if op.inputs.is_empty() => {
                if value.ty != output.ty {
                    self.error(place, format!("a value of {} declared as {}", value.ty, output.ty));
                }
                scope.insert(&output.name, KnownValue { ty: &output.ty, value: Some(value) });
            }
            _ => {
                self.error(place, "a const has the attribute `val`, one output and no inputs".into());
                scope.extend(
                    op.outputs.iter().map(|o| (o.name.as_str(), KnownValue { ty: &o.ty, value: None })),
                );
            }
        }
    }

    fn checked<'a>(
        &mut self,
        op: &'a Operation,
        opset: Opset,
        place: &str,
        scope: &mut NameScope<'a>,
        all: &mut BTreeSet<&'a str>,
    ) {
        let Some(def) = ops::op(&op.op_type) else {
            self.add(
                Severity::Warning,
                place,
                format!("operation type `{}` is not known and not checked", op.op_type),
            );
            return;
        };
        if def.opset > opset {
            self.error(place, format!("`{}` needs {}, the function has {opset}", op.op_type, def.opset));
        }
        let constexpr = op.op_type.starts_with("constexpr_");
        if constexpr {
            // iOS16 and 17 keep the operands of constexpr in attributes, iOS18 in inputs.
            let in_inputs = !op.inputs.is_empty();
            if in_inputs != (opset >= Opset::CoreML8) {
                self.error(place, format!("operands of `{}` are in the wrong place for {opset}", op.op_type));
            }
        }
        let mut context = Context::default();
        for (param, Argument(bindings)) in &op.inputs {
            match def.param(param) {
                None => {
                    self.error(place, format!("`{}` has no parameter `{param}`", op.op_type));
                    continue;
                }
                Some(p) if !p.variadic && bindings.len() != 1 => {
                    self.error(place, format!("parameter `{param}` has {} values", bindings.len()));
                    continue;
                }
                Some(_) => {}
            }
            let mut operands = Vec::new();
            for binding in bindings {
                match binding {
                    Binding::Value(v) => operands.push(Operand { ty: &v.ty, value: Some(v) }),
                    Binding::Name(name) => match scope.get(name.as_str()) {
                        Some(known) => operands.push(Operand { ty: known.ty, value: known.value }),
                        None => {
                            self.error(place, format!("`{name}` is used before it is defined"));
                            return;
                        }
                    },
                }
            }
            context.bind(param, operands);
        }
        for (name, value) in op.attributes.iter().filter(|(name, _)| *name != "name") {
            if !constexpr || def.param(name).is_none() {
                self.error(place, format!("`{}` has no attribute `{name}`", op.op_type));
            }
            context.bind(name, vec![Operand { ty: &value.ty, value: Some(value) }]);
        }
        for block in &op.blocks {
            let mut inner = scope.clone();
            for input in &block.inputs {
                self.check_name(place, &input.name);
                inner.insert(&input.name, KnownValue { ty: &input.ty, value: None });
            }
            // Names that a block defines are known only in it; another block may use the same names.
            let mut taken = all.clone();
            let results = self.block(block, opset, &mut inner, &mut taken);
            context.add_block(results);
        }
        if op.op_type == "conv" && !op.inputs.contains_key("pad") {
            self.add(Severity::Warning, place, "`pad` is left out: some compilers refuse that".into());
        }
        if !context.has_ranks() {
            return;
        }
        match def.infer(&context) {
            Err(what) => self.error(place, what),
            Ok(types) if types.len() != op.outputs.len() => {
                self.error(place, format!("{} outputs, expected {}", op.outputs.len(), types.len()));
            }
            Ok(types) => {
                for (output, inferred) in op.outputs.iter().zip(types) {
                    if !agrees(&output.ty, &inferred) {
                        self.error(place, format!("declared as {}, but it is {inferred}", output.ty));
                    }
                }
            }
        }
        let dangling = |v: &Value| matches!(&v.data, ValueData::Blob { offset, .. } if offset % 64 != 0);
        if op.attributes.values().any(dangling) {
            self.error(place, "a blob offset that is not a multiple of 64".into());
        }
    }
}

fn is_constant(op_type: &str) -> bool {
    op_type == "const" || op_type.starts_with("constexpr_")
}

/// Tells whether the declared and the inferred type agree where both know a size. Inference may know less than the
/// converter did, which is no fault of the model.
fn agrees(declared: &ValueType, inferred: &ValueType) -> bool {
    match (declared, inferred) {
        (ValueType::Tensor(a), ValueType::Tensor(b)) => {
            let dim = |(x, y): (&Dim, &Dim)| x == y || *x == Dim::Unknown || *y == Dim::Unknown;
            let shapes = a.rank() == b.rank() && a.dims.iter().zip(&b.dims).all(dim);
            a.dtype == b.dtype && (shapes || !a.has_rank() || !b.has_rank())
        }
        (a, b) => a == b,
    }
}
