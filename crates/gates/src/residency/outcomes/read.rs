//! Reads a row as the rules take it.

use super::super::rule::{Chip, Conditions, DeviceTarget, PackageFacts, Units};
use super::rebuild;
use super::row::Row;
use super::row_facts::{Sketch, Words};

/// A row as the rules take it.
pub struct Read {
    /// What the graph meets.
    pub conditions: Conditions,
    /// The graph.
    pub facts: PackageFacts,
    /// It was rebuilt as a program.
    pub rebuilt: bool,
}

/// Reads a row.
pub fn row(row: &Row) -> Read {
    let words = Words::new(&[&row.model, &row.facts]);
    let around = Words::new(&[&row.model, &row.facts, &row.shape, &row.chip]);
    let conditions = conditions(row, &around);
    let sketch = Sketch::new(row, &words);
    if let Some(mut facts) = rebuild::facts(&sketch) {
        // What was measured counts: the size that is stated, and the ops that are named beside the dimensions.
        if let Some(bytes) = sketch.bytes {
            facts.weight_bytes = Some(bytes);
            for g in &mut facts.graphs {
                g.weight_bytes = Some(bytes);
            }
        }
        return Read { conditions, facts, rebuilt: true };
    }
    let graph = sketch.graph();
    let mut graphs = vec![graph];
    // Two token counts in one package are two functions.
    if let [low, .., high] = sketch.positions.as_slice() {
        let mut other = graphs[0].clone();
        (graphs[0].positions, other.positions) = (Some(*low), Some(*high));
        other.function = "other".into();
        graphs.push(other);
    }
    Read { conditions, facts: PackageFacts { weight_bytes: sketch.bytes, graphs }, rebuilt: false }
}

fn conditions(row: &Row, around: &Words) -> Conditions {
    let chip_text = row.chip.to_ascii_lowercase();
    let chip = row.chip.split([',', '/', '(']).find_map(Chip::parse);
    let phone = chip_text.contains("iphone") || chip.is_some_and(|c| !c.mac);
    let all = around.has_pair("units", "all") || around.has("units=all") || around.has("computeunits.all");
    Conditions {
        target: if phone { DeviceTarget::Iphone } else { DeviceTarget::Mac },
        units: if all { Units::All } else { Units::CpuAndNe },
        chip,
    }
}
