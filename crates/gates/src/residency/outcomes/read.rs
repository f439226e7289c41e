//! Reads the facts of a row as rules take them.

use super::super::rule::PackageFacts;
use super::rebuild;
use super::sketch::Sketch;

/// Facts of a row, as rules take them.
pub struct Read {
    /// Facts of the row's graphs.
    pub facts: PackageFacts,
    /// True if the graph was rebuilt as a program.
    pub rebuilt: bool,
}

/// Rebuilds the program that a row describes, or makes a summary where the row states too little.
pub fn read(sketch: &Sketch) -> Read {
    if let Some(mut facts) = rebuild::facts(sketch) {
        // The measured size counts, where it is stated.
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
