//! MIL as readable text, one operation a line. Constants are written where they are used; blobs are named by their offset.

use super::{
    Argument, Binding, Block, DataType, Function, Immediate, NamedType, Operation, Program, TensorData,
    Value, ValueData, ValueType,
};
use half::f16;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Most elements of a constant that are written out.
const MAX_SHOWN: usize = 8;

/// Writes a program as text.
pub fn program(program: &Program) -> String {
    let mut out = String::new();
    for (name, f) in &program.functions {
        if !out.is_empty() {
            out.push('\n');
        }
        function(name, f, &mut out);
    }
    out
}

fn function(name: &str, f: &Function, out: &mut String) {
    // Writing to a string cannot fail.
    let _ = write!(out, "func {name}<{}>(", f.opset);
    for (i, input) in f.inputs.iter().enumerate() {
        let _ = write!(out, "{}{} {}", if i > 0 { ", " } else { "" }, input.ty, input.name);
    }
    out.push_str(") {\n");
    block(&f.block, 1, &mut BTreeMap::new(), out);
    out.push_str("}\n");
}

fn block<'a>(b: &'a Block, depth: usize, constants: &mut BTreeMap<&'a str, &'a Value>, out: &mut String) {
    let indent = "    ".repeat(depth);
    for op in &b.operations {
        if op.op_type == "const"
            && let (Some(value), [output]) = (op.attributes.get("val"), op.outputs.as_slice())
        {
            constants.insert(&output.name, value);
            continue;
        }
        let results: Vec<String> = op.outputs.iter().map(typed).collect();
        out.push_str(&indent);
        if !results.is_empty() {
            let _ = write!(out, "{} = ", results.join(", "));
        }
        let _ = writeln!(out, "{}({})", op.op_type, operands(op, constants));
        for (i, inner) in op.blocks.iter().enumerate() {
            let inputs: Vec<String> = inner.inputs.iter().map(typed).collect();
            let _ = writeln!(out, "{indent}  block {i}({}) {{", inputs.join(", "));
            block(inner, depth + 2, constants, out);
            let _ = writeln!(out, "{indent}  }}");
        }
    }
    let results: Vec<String> =
        b.outputs.iter().map(|n| constants.get(n.as_str()).map_or_else(|| n.clone(), |v| value(v))).collect();
    let _ = writeln!(out, "{indent}-> ({})", results.join(", "));
}

/// Appends the operations of a block, a line each: types, and constants in the program, without names of values.
pub fn outline(b: &Block, lines: &mut Vec<String>) {
    let mut constants = BTreeMap::new();
    for op in &b.operations {
        match (op.op_type.as_str(), op.attributes.get("val"), op.outputs.as_slice()) {
            ("const", Some(value), [output]) => drop(constants.insert(output.name.as_str(), value)),
            _ => {
                let types: Vec<String> = op.outputs.iter().map(|o| o.ty.to_string()).collect();
                let mut parts = Vec::new();
                for (param, Argument(bindings)) in &op.inputs {
                    let short = |b: &Binding| match b {
                        Binding::Name(name) => constants.get(name.as_str()).copied().and_then(short_value),
                        Binding::Value(v) => short_value(v),
                    };
                    let values: Option<Vec<String>> = bindings.iter().map(short).collect();
                    parts.push(values.map_or(param.clone(), |v| format!("{param} = {}", v.join(", "))));
                }
                lines.push(format!("  {}({}) -> {}", op.op_type, parts.join(", "), types.join(", ")));
                op.blocks.iter().for_each(|inner| outline(inner, lines));
            }
        }
    }
}

/// Writes a value that is no weight.
fn short_value(v: &Value) -> Option<String> {
    let is_float = v.ty.tensor().is_some_and(|t| t.dtype.is_float() && t.rank() > 0);
    (matches!(v.data, ValueData::Immediate(_)) && !is_float).then(|| value(v))
}

fn typed(t: &NamedType) -> String {
    format!("{} {}", t.ty, t.name)
}

fn operands(op: &Operation, constants: &BTreeMap<&str, &Value>) -> String {
    let binding = |b: &Binding| match b {
        Binding::Name(name) => constants.get(name.as_str()).map_or_else(|| name.clone(), |v| value(v)),
        Binding::Value(v) => value(v),
    };
    let mut parts = Vec::new();
    for (param, Argument(bindings)) in &op.inputs {
        let values: Vec<String> = bindings.iter().map(binding).collect();
        let text = if values.len() == 1 { values.concat() } else { format!("({})", values.join(", ")) };
        parts.push(format!("{param} = {text}"));
    }
    for (name, v) in op.attributes.iter().filter(|(name, _)| *name != "name") {
        parts.push(format!("{name} = {}", value(v)));
    }
    parts.join(", ")
}

fn value(v: &Value) -> String {
    match &v.data {
        ValueData::Blob { offset, .. } => format!("{}(BLOB({offset}))", v.ty),
        ValueData::Immediate(Immediate::Tensor(data)) => {
            let elements = elements(data, &v.ty);
            match &v.ty {
                ValueType::Tensor(t) if t.rank() == 0 => elements,
                _ => format!("{}({elements})", v.ty),
            }
        }
        ValueData::Immediate(Immediate::Tuple(all) | Immediate::List(all)) => {
            format!("[{}]", all.iter().map(value).collect::<Vec<_>>().join(", "))
        }
        ValueData::Immediate(Immediate::Dictionary(pairs)) => {
            let pairs: Vec<String> =
                pairs.iter().map(|(k, v)| format!("{}: {}", value(k), value(v))).collect();
            format!("{{{}}}", pairs.join(", "))
        }
    }
}

fn elements(data: &TensorData, ty: &ValueType) -> String {
    fn list<T>(v: &[T], show: impl Fn(&T) -> String) -> String {
        let shown: Vec<String> = v.iter().take(MAX_SHOWN).map(show).collect();
        let rest = if v.len() > MAX_SHOWN { format!(", ... {} in all", v.len()) } else { String::new() };
        if v.len() == 1 { shown.concat() } else { format!("[{}{rest}]", shown.join(", ")) }
    }
    match data {
        TensorData::Floats(v) => list(v, |x| format!("{x:?}")),
        TensorData::Ints(v) => list(v, i32::to_string),
        TensorData::Bools(v) => list(v, bool::to_string),
        TensorData::Strings(v) => list(v, |x| format!("{x:?}")),
        TensorData::LongInts(v) => list(v, i64::to_string),
        TensorData::Doubles(v) => list(v, |x| format!("{x:?}")),
        TensorData::Bytes(v) if ty.tensor().is_some_and(|t| t.dtype == DataType::Float16) => {
            let halves: Vec<f16> = v.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
            list(&halves, |x| format!("{:?}", x.to_f32()))
        }
        TensorData::Bytes(v) => format!("{} bytes", v.len()),
    }
}
