//! The facts of a row as the rules take them.

use super::super::rule::PackageFacts;
use super::rebuild;
use super::sketch::Sketch;

/// A row as the rules take it.
pub struct Read {
    /// The graph.
    pub facts: PackageFacts,
    /// True if it was rebuilt as a program.
    pub rebuilt: bool,
}

/// Builds the program that a row describes; where it states too little for that, a summary.
pub fn read(sketch: &Sketch) -> Read {
    if let Some(mut facts) = rebuild::facts(sketch) {
        // What was measured counts: the size that is stated, and the ops that are named beside the dimensions.
        if let Some(bytes) = sketch.bytes {
            facts.weight_bytes = Some(bytes);
            for g in &mut facts.graphs {
                g.weight_bytes = Some(bytes);
            }
        }
        return Read { facts, rebuilt: true };
    }
    let mut graphs = vec![sketch.graph()];
    // Two token counts in one package are two functions.
    if let [low, .., high] = sketch.positions.as_slice() {
        let mut other = graphs[0].clone();
        (graphs[0].positions, other.positions) = (Some(*low), Some(*high));
        other.function = "other".into();
        graphs.push(other);
    }
    Read { facts: PackageFacts { weight_bytes: sketch.bytes, graphs }, rebuilt: false }
}
