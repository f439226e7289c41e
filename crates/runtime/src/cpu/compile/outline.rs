//! Plans in functions that cannot be one plan: of segments of operations between control flow and operations whose shapes depend
//! on the contents of a value.
//!
//! ```text
//! a, b, while(c, d, e, non_zero, f, g)   -->   call(a b), while(call(c d e), non_zero, call(f g))
//! ```
//! Each segment becomes a function of its own, fused like any other. An operation `call` takes its place.

use super::super::bindings::names;
use super::super::ir::OutlinedPlan;
use super::super::plans_by_shapes::depends_on_values;
use super::uses::count_uses;
use anemoe_mlpackage::mil::{
    Argument, Binding, Block, Feature, FeatureShape, Function, FunctionDescription, NamedType, Operation,
    TensorType, Value, ValueType,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Type of the operation that runs an outlined plan. No MIL operation has this name.
pub(super) const CALL: &str = "call";

/// Parameter of a call that lists the plan's inputs in order.
pub(super) const CALL_INPUTS: &str = "inputs";

/// Fewest operations that become a call.
const MIN_OUTLINED: usize = 2;

/// Plans, by the names of their calls.
pub(super) type OutlinedPlans = BTreeMap<String, Arc<dyn OutlinedPlan>>;

/// Function that compiles outlined operations; it returns none where no plan can be made.
type CompileOutlined<'a> = dyn Fn(&Function, &FunctionDescription) -> Option<Arc<dyn OutlinedPlan>> + 'a;

/// Tells whether a function has control flow, or an operation whose shape depends on the contents of a value.
pub(super) fn needs_outlining(block: &Block) -> bool {
    let mut constants = BTreeSet::new();
    block.operations.iter().any(|op| {
        let breaks = !op.blocks.is_empty() || depends_on_values(op, &|name| constants.contains(name));
        note_constant(op, &mut constants);
        breaks
    })
}

/// Moves segments of operations, where `compile` makes plans of them, into functions of their own.
pub(super) fn outline(body: &Function, compile: &CompileOutlined<'_>) -> (Function, OutlinedPlans) {
    let mut outliner = Outliner { body, compile, plans: OutlinedPlans::new() };
    let mut scope = OutlineScope::default();
    scope.types.extend(body.inputs.iter().map(|i| (i.name.clone(), i.ty.clone())));
    let mut block = outliner.block(&body.block, scope);
    drop_unread_constants(&mut block);
    (Function { block, ..body.clone() }, outliner.plans)
}

/// Names that are known at an operation.
#[derive(Clone, Default)]
struct OutlineScope<'a> {
    types: BTreeMap<String, ValueType>,
    /// Constants, with the operations that define them.
    constants: BTreeMap<&'a str, &'a Operation>,
    /// Values that depend only on constants.
    folded: BTreeSet<String>,
}

struct Outliner<'a> {
    body: &'a Function,
    compile: &'a CompileOutlined<'a>,
    plans: OutlinedPlans,
}

fn is_constant(op: &Operation) -> bool {
    op.op_type == "const" || op.op_type.starts_with("constexpr_")
}

/// Adds the results of an operation that reads only constants.
fn note_constant(op: &Operation, constants: &mut BTreeSet<String>) {
    let folds = op.blocks.is_empty() && names(op).all(|n| constants.contains(n));
    if is_constant(op) || folds && op.op_type != "read_state" {
        constants.extend(op.outputs.iter().map(|o| o.name.clone()));
    }
}

impl<'a> Outliner<'a> {
    fn block(&mut self, block: &'a Block, mut scope: OutlineScope<'a>) -> Block {
        scope.types.extend(block.inputs.iter().map(|i| (i.name.clone(), i.ty.clone())));
        let mut uses = BTreeMap::new();
        count_uses(block, &mut uses);
        let mut operations = Vec::new();
        let mut segment: Vec<&Operation> = Vec::new();
        for op in &block.operations {
            if is_constant(op) {
                scope.constants.extend(op.outputs.iter().map(|o| (o.name.as_str(), op)));
                operations.push(op.clone());
            } else if op.blocks.is_empty()
                && !matches!(op.op_type.as_str(), "read_state" | "write_state")
                && !depends_on_values(op, &|name| scope.folded.contains(name))
            {
                segment.push(op);
            } else {
                self.end(&mut segment, &scope, &uses, &mut operations);
                let blocks = op.blocks.iter().map(|b| self.block(b, scope.clone())).collect();
                operations.push(Operation { blocks, ..op.clone() });
            }
            note_constant(op, &mut scope.folded);
            scope.types.extend(op.outputs.iter().map(|o| (o.name.clone(), o.ty.clone())));
        }
        self.end(&mut segment, &scope, &uses, &mut operations);
        Block { operations, ..block.clone() }
    }

    /// Replaces a segment of operations by a call, or keeps them where the call is not possible.
    fn end(
        &mut self,
        segment: &mut Vec<&'a Operation>,
        scope: &OutlineScope<'a>,
        uses: &BTreeMap<&str, usize>,
        operations: &mut Vec<Operation>,
    ) {
        let segment = std::mem::take(segment);
        let call = (segment.len() >= MIN_OUTLINED).then(|| self.call(&segment, scope, uses)).flatten();
        match call {
            Some(call) => operations.push(call),
            None => operations.extend(segment.into_iter().cloned()),
        }
    }

    fn call(
        &mut self,
        segment: &[&'a Operation],
        scope: &OutlineScope<'a>,
        uses: &BTreeMap<&str, usize>,
    ) -> Option<Operation> {
        let mut outlined = OutlinedBody::default();
        for op in segment {
            outlined.add(op, scope)?;
        }
        let mut inside = BTreeMap::new();
        let block = Block { inputs: Vec::new(), operations: outlined.operations, outputs: Vec::new() };
        count_uses(&block, &mut inside);
        let is_read = |o: &&NamedType| {
            let name = o.name.as_str();
            uses.get(name).copied().unwrap_or(0) > inside.get(name).copied().unwrap_or(0)
        };
        let outputs: Vec<NamedType> =
            segment.iter().flat_map(|op| &op.outputs).filter(is_read).cloned().collect();
        if outputs.is_empty() {
            return None;
        }
        let name = format!("plan {}", self.plans.len());
        let described = FunctionDescription {
            name: name.clone(),
            inputs: outlined.inputs.iter().map(|(name, ty)| feature(name, ty)).collect(),
            outputs: outputs.iter().map(|o| Some(feature(&o.name, o.ty.tensor()?))).collect::<Option<_>>()?,
            ..FunctionDescription::default()
        };
        let block = Block { outputs: outputs.iter().map(|o| o.name.clone()).collect(), ..block };
        let inputs =
            outlined.inputs.iter().map(|(name, ty)| NamedType::tensor(name.clone(), ty.clone())).collect();
        let function = Function { inputs, opset: self.body.opset, block };
        self.plans.insert(name.clone(), (self.compile)(&function, &described)?);
        let inputs = outlined.inputs.into_iter().map(|(name, _)| Binding::Name(name)).collect();
        Some(Operation {
            op_type: CALL.into(),
            inputs: BTreeMap::from([(CALL_INPUTS.into(), Argument(inputs))]),
            outputs,
            blocks: Vec::new(),
            attributes: BTreeMap::from([("name".into(), Value::string(name))]),
        })
    }
}

fn feature(name: &str, ty: &TensorType) -> Feature {
    let shape = match ty.shape() {
        Some(shape) if !shape.is_empty() => FeatureShape::Fixed(shape),
        _ => FeatureShape::Dynamic,
    };
    Feature::array(name, ty.dtype, shape)
}

/// Operations of an outlined plan with the constants that they read, and the plan's inputs.
#[derive(Default)]
struct OutlinedBody {
    operations: Vec<Operation>,
    inputs: Vec<(String, TensorType)>,
    known: BTreeSet<String>,
}

impl OutlinedBody {
    /// Adds an operation after the constants that it reads; none where it reads a value that is no tensor.
    fn add(&mut self, op: &Operation, scope: &OutlineScope<'_>) -> Option<()> {
        for name in names(op) {
            if self.known.contains(name) {
                continue;
            }
            match scope.constants.get(name) {
                Some(constant) => self.add(constant, scope)?,
                None => {
                    let ty = scope.types.get(name)?.tensor()?;
                    self.inputs.push((name.into(), ty.clone()));
                    self.known.insert(name.into());
                }
            }
        }
        self.known.extend(op.outputs.iter().map(|o| o.name.clone()));
        self.operations.push(op.clone());
        Some(())
    }
}

/// Removes constants that are now read only inside plans.
fn drop_unread_constants(block: &mut Block) {
    loop {
        let mut uses = BTreeMap::new();
        count_uses(block, &mut uses);
        let read: BTreeSet<String> = uses.into_keys().map(str::to_string).collect();
        if !remove_constants(block, &read) {
            return;
        }
    }
}

fn remove_constants(block: &mut Block, read: &BTreeSet<String>) -> bool {
    let before = block.operations.len();
    block.operations.retain(|op| !is_constant(op) || op.outputs.iter().any(|o| read.contains(&o.name)));
    let mut removed = block.operations.len() < before;
    for inner in block.operations.iter_mut().flat_map(|op| &mut op.blocks) {
        removed |= remove_constants(inner, read);
    }
    removed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Counts;
    use crate::tensor::Tensor;
    use anemoe_mlpackage::package::Package;
    use std::path::Path;

    struct Nothing;

    impl OutlinedPlan for Nothing {
        fn run(&self, _: &[&Tensor], _: &mut Vec<Tensor>) -> crate::Result<Counts> {
            Ok(Counts::default())
        }
    }

    /// Lists the operation types of a block in order, without constants; nested blocks are in brackets.
    fn outline_text(block: &Block) -> String {
        let one = |op: &Operation| {
            let nested: Vec<String> = op.blocks.iter().map(outline_text).collect();
            let nested = if nested.is_empty() { String::new() } else { format!("[{}]", nested.join(" | ")) };
            format!("{}{nested}", op.op_type)
        };
        block.operations.iter().filter(|op| !is_constant(op)).map(one).collect::<Vec<_>>().join(" ")
    }

    fn outlined(case: &str) -> (String, OutlinedPlans) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/suite").join(case);
        let package = Package::open(&folder.join(format!("{case}.mlpackage"))).unwrap();
        let model = package.model();
        let body = &model.program.functions[&model.default_function];
        assert!(needs_outlining(&body.block));
        let (function, plans) = outline(body, &|_, _| Some(Arc::new(Nothing)));
        (outline_text(&function.block), plans)
    }

    #[test]
    fn loops_and_branches_become_calls() {
        let (text, plans) = outlined("loop_block");
        assert_eq!(text, "call while_loop[less | call cond[call | call] call] call");
        assert_eq!(plans.len(), 6);
    }

    #[test]
    fn shapes_that_values_decide_stand_between_calls() {
        let (text, _) = outlined("found_rows");
        assert_eq!(text, "call non_zero call");
    }
}
