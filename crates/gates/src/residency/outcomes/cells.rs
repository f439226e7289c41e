//! Writes a measured program as a line of a table of outcomes.

use super::super::rules;
use super::row::NEEDED;
use crate::program_facts::PackageFacts;
use crate::program_facts::digest::program_digest;
use crate::program_facts::graph::GraphKind;
use std::collections::BTreeSet;

pub use super::row::OutcomeCells;

/// Columns besides the needed ones.
const MORE: [&str; 4] = ["os", "name", "source", "program"];

/// Returns all columns that are written, in order.
pub fn columns() -> impl Iterator<Item = &'static str> {
    NEEDED.into_iter().chain(MORE)
}

/// Returns the line of headings.
pub fn heading_line() -> String {
    columns().collect::<Vec<_>>().join("\t")
}

/// Returns a line with these cells. Control characters, which would break the line, become spaces.
pub fn line(cells: &OutcomeCells) -> String {
    let text = |name: &str| cells.get(name).map(|c| c.trim()).filter(|c| !c.is_empty()).unwrap_or("-");
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    columns().map(|name| text(name).chars().map(plain).collect::<String>()).collect::<Vec<_>>().join("\t")
}

/// Returns the cells that follow from a package's programs. The number of ops is left out, since they are not named.
pub fn program_cells(facts: &PackageFacts) -> OutcomeCells {
    let mut cells = OutcomeCells::new();
    let mut put = |name: &str, text: String| drop(cells.insert(name.into(), text));
    put("program", program_digest(facts));
    if let Some(bytes) = facts.weight_bytes {
        put("mb", format!("{}", bytes as f64 / 1e6));
    }
    // The function with the fewest positions represents the package, as in published tables.
    let Some(g) = facts.graphs.iter().min_by_key(|g| g.positions.unwrap_or(1)) else { return cells };
    let kind = GraphKind::NAMED.iter().find(|(_, kind)| *kind == g.kind).map_or("", |(name, _)| name);
    put("graph", kind.into());
    let doubtful: BTreeSet<&str> = rules::doubtful_types().collect();
    let named: BTreeSet<&str> =
        g.ops.iter().map(|op| op.op_type.as_str()).filter(|t| doubtful.contains(t)).collect();
    put("named", named.into_iter().collect::<Vec<_>>().join(" "));
    let largest = g.weights.iter().max_by_key(|w| w.bytes);
    put("weights", largest.map_or(String::new(), |w| w.form.name()));
    let depth = if g.kind.is_lone() { g.size() } else { g.matrices().filter_map(|(_, c)| c.depth).max() };
    put("depth", depth.map_or(String::new(), |n| n.to_string()));
    if let Some(layers) = g.layers.filter(|n| *n > 0) {
        put("layers", layers.to_string());
    }
    let tokens: BTreeSet<u64> = facts.graphs.iter().filter_map(|g| g.positions).collect();
    put("tokens", tokens.iter().map(u64::to_string).collect::<Vec<_>>().join(" "));
    put("shapes", g.shapes.name());
    put("states", g.states.len().to_string());
    let runtime = g.ops.iter().any(|op| !op.runtime_bounds.is_empty());
    let traits = [g.vocabulary_head.then_some("head"), runtime.then_some("runtime-shapes")];
    put("traits", traits.into_iter().flatten().collect::<Vec<_>>().join(" "));
    cells
}
