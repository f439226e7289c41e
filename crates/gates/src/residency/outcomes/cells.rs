//! Writes a measured program as a line of a table of facts.

use super::super::graph::{Graph, LAYER_OPS, Shapes, StoredForm};
use super::super::likelihood::features;
use super::super::program_digest::program_digest;
use super::super::rule::{Matcher, PackageFacts, Verdict};
use super::super::rules;
use super::columns::{MARK, NEEDED};
use anemoe_mlpackage::mil::DataType;
use std::collections::BTreeMap;

/// Columns besides the needed ones.
const MORE: [&str; 5] = ["os", "name", "source", "program", "features"];

/// Cells of a line, by column name; missing cells are unknown.
pub type OutcomeCells = BTreeMap<String, String>;

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

/// Returns the cells that follow from a package's programs. The number of ops is left out: with unnamed ops it would
/// stand for a network that nobody described.
pub fn program_cells(facts: &PackageFacts) -> OutcomeCells {
    let mut cells = OutcomeCells::new();
    cells.insert("program".into(), program_digest(facts));
    if let Some(bytes) = facts.weight_bytes {
        cells.insert("mb".into(), format!("{}", bytes as f64 / 1e6));
    }
    // The function with the fewest positions represents the package, as in published tables.
    let Some(g) = facts.graphs.iter().min_by_key(|g| g.positions.unwrap_or(1)) else { return cells };
    let mut put = |name: &str, text: String| cells.insert(name.into(), text);
    let kind = kind(g);
    put(MARK, kind.into());
    let all_conv = g.matrices().next().is_some() && g.matrices().all(|(op, _)| op.op_type == "conv");
    put("layout", if all_conv { "conv".into() } else { String::new() });
    put("named", named(g));
    put("weights", weights(g));
    let depths: Vec<String> =
        g.matrices().filter_map(|(_, c)| c.depth).take(2).map(|d| d.to_string()).collect();
    put("depths", depths.join(" "));
    let lone = g.matrices().next().map(|(_, c)| c).filter(|_| kind == "conv" || kind == "linear");
    if let Some((depth, outputs)) = lone.and_then(|c| c.depth.zip(c.outputs)) {
        put("product", format!("{depth} {outputs}"));
    }
    if let Some(layers) = g.layers.filter(|n| *n > 0 && kind == "layers") {
        put("layers", layers.to_string());
    }
    let mut tokens: Vec<u64> = facts.graphs.iter().filter_map(|g| g.positions).collect();
    tokens.sort_unstable();
    tokens.dedup();
    put("tokens", tokens.iter().map(u64::to_string).collect::<Vec<_>>().join(" "));
    let shapes = match g.shapes {
        Shapes::Fixed => "fixed".into(),
        Shapes::Enumerated => "enumerated".into(),
        Shapes::Ranged(None) => "range".into(),
        Shapes::Ranged(Some(n)) => format!("range{n}"),
    };
    put("shapes", shapes);
    put("states", g.states.len().to_string());
    put("vocabulary", if g.vocabulary_head { "yes".into() } else { String::new() });
    let runtime = g.ops.iter().any(|op| !op.runtime_bounds.is_empty());
    put("runtime_shapes", if runtime { "yes".into() } else { String::new() });
    let pairs = features::program_values(g).map(|(name, value)| format!("{name}={value:.4}"));
    put("features", pairs.collect::<Vec<_>>().join(" "));
    cells
}

fn kind(g: &Graph) -> &'static str {
    let attends = !g.states.is_empty()
        || g.ops.iter().any(|op| op.op_type == "softmax" || op.op_type == "scaled_dot_product_attention");
    let mut matrices = g.matrices();
    match (matrices.next(), matrices.next()) {
        (Some((op, _)), None) if g.at_least_ops() < LAYER_OPS && op.op_type == "conv" => "conv",
        (Some(_), None) if g.at_least_ops() < LAYER_OPS => "linear",
        _ if g.glue => "glue",
        _ if attends && g.at_least_ops() >= LAYER_OPS => "layers",
        _ => "other",
    }
}

/// Returns the op types that some rule speaks against, with spaces.
fn named(g: &Graph) -> String {
    let against = |op_type: &str| {
        rules::all().any(|r| match r.matcher {
            Matcher::Types(types) => r.verdict != Verdict::Ane && types.contains(&op_type),
            _ => false,
        })
    };
    let mut types: Vec<&str> = g.ops.iter().map(|op| op.op_type.as_str()).filter(|t| against(t)).collect();
    types.sort_unstable();
    types.dedup();
    types.join(" ")
}

/// Returns the storage form of the largest weight, in the words of the column `weights`.
fn weights(g: &Graph) -> String {
    let largest = g.weights.iter().max_by_key(|w| w.bytes).map(|w| &w.form);
    match largest {
        Some(StoredForm::Dense(DataType::Float16)) => "fp16".into(),
        Some(StoredForm::Dense(DataType::Float32)) => "fp32".into(),
        Some(StoredForm::Sparse) => "sparse".into(),
        Some(StoredForm::Linear { bits, grain }) => format!("int{bits}-{}", grain.name()),
        Some(StoredForm::Lut { bits, grouped_axes, entries, scaled, .. }) => {
            let mut text = format!("lut{bits}");
            match grouped_axes.len() {
                0 => text += "-tensor",
                1 => {}
                _ => text += "-two",
            }
            if *entries == DataType::Int8 {
                text += "-int8";
            }
            if *scaled {
                text += "-scaled";
            }
            text
        }
        _ => String::new(),
    }
}
