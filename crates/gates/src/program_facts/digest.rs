//! Digests of programs: packages with equal digests differ only in the names and values of their weights.

use super::graph::{Graph, GraphWeight, PackageFacts};
use anemoe_bundle::sha256;
use anemoe_mlpackage::mil::TensorType;
use std::fmt::Write;

/// Version of the hashed text; a new version changes all digests.
const VERSION: &str = "1";
/// Hexadecimal digits of a digest.
pub const DIGITS: usize = 32;

/// Computes the digest of a package's functions, in hexadecimal: their ops in order with types and shapes, storage
/// forms of weights, states and shapes of inputs.
pub fn program_digest(facts: &PackageFacts) -> String {
    let mut text = format!("program {VERSION}\n");
    for graph in &facts.graphs {
        // Writing to a string does not fail.
        let _ = write_graph(&mut text, graph);
    }
    sha256(text.as_bytes())[..DIGITS].to_string()
}

/// Tells whether a text has the form of a digest.
pub fn is_digest(text: &str) -> bool {
    text.len() == DIGITS && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

fn write_graph(text: &mut String, g: &Graph) -> std::fmt::Result {
    writeln!(text, "function {:?} {:?}", g.positions, g.shapes)?;
    for state in &g.states {
        writeln!(text, "state {:?}", state.dims)?;
    }
    for (op_type, n) in &g.no_device {
        writeln!(text, "{op_type} {n}")?;
    }
    for op in &g.ops {
        write!(text, "{}", op.op_type)?;
        op.inputs.iter().try_for_each(|t| write_type(text, "in", t))?;
        op.outputs.iter().try_for_each(|t| write_type(text, "out", t))?;
        op.weights.iter().filter_map(|&i| g.weights.get(i)).try_for_each(|w| write_weight(text, w))?;
        writeln!(text)?;
    }
    Ok(())
}

fn write_type(text: &mut String, what: &str, t: &TensorType) -> std::fmt::Result {
    let dims: Vec<Option<u64>> = t.dims.iter().map(|d| d.fixed()).collect();
    write!(text, " {what} {} {dims:?}", t.dtype.name())
}

fn write_weight(text: &mut String, w: &GraphWeight) -> std::fmt::Result {
    write!(text, " weight {:?} {}", w.dims, w.form.describe())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program_facts::graph::{Op, StoredForm};
    use anemoe_mlpackage::mil::DataType;

    fn program(name: &str, op_type: &str, dims: &[u64], bits: u64) -> PackageFacts {
        let form = StoredForm::Lut {
            bits,
            grouped_axes: vec![0],
            entries: DataType::Float16,
            vector: 1,
            scaled: false,
        };
        let weight = GraphWeight { name: format!("{name}_weight"), dims: vec![8, 4], form, bytes: 32 };
        let op = Op {
            name: name.into(),
            op_type: op_type.into(),
            inputs: vec![TensorType::fixed(DataType::Float16, dims)],
            weights: vec![0],
            ..Op::default()
        };
        let graph = Graph { ops: vec![op], weights: vec![weight], positions: Some(1), ..Graph::default() };
        PackageFacts { weight_bytes: Some(32), graphs: vec![graph] }
    }

    #[test]
    fn names_and_values_of_weights_change_nothing_and_everything_else_does() {
        let digest = program_digest(&program("a", "conv", &[1, 4, 1, 1], 4));
        assert!(is_digest(&digest) && !is_digest("00") && !is_digest(&digest.to_uppercase()));
        assert_eq!(digest, program_digest(&program("b", "conv", &[1, 4, 1, 1], 4)));
        for other in [
            program("a", "linear", &[1, 4, 1, 1], 4),
            program("a", "conv", &[1, 4, 1, 2], 4),
            program("a", "conv", &[1, 4, 1, 1], 6),
        ] {
            assert_ne!(digest, program_digest(&other));
        }
    }
}
