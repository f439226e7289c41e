//! Sections of a report: what the terminal shows, and the page without its script.

use crate::ui::{self, Table};
use anemoe_gates::bundle_report::{BundleReport, ChipSpeed, CosineMap, ShardRow, grouped};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A table of a report. The page's script draws charts for some of them.
pub struct ReportSection {
    /// Name by which the page's script finds the section.
    pub id: &'static str,
    pub title: &'static str,
    pub note: String,
    pub table: Table,
    /// True for a table that is too long for a terminal.
    pub is_long: bool,
    /// Command that brings rows, if none are recorded.
    pub missing: Option<String>,
}

impl ReportSection {
    fn new(id: &'static str, title: &'static str, note: impl Into<String>, table: Table) -> ReportSection {
        ReportSection { id, title, note: note.into(), table, is_long: false, missing: None }
    }

    /// Adds the command that records the rows, if there is none.
    fn recorded_by(self, command: String) -> ReportSection {
        let is_missing = self.table.rows().len() == 1;
        ReportSection { missing: is_missing.then_some(command), ..self }
    }
}

/// Makes a table whose last column holds text.
fn table(headings: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> Table {
    Table::ending_in_text(headings).with_rows(rows)
}

/// Lists the sections of a report. `bundle` is the path by which commands name the bundle.
pub fn sections(r: &BundleReport, bundle: &Path) -> Vec<ReportSection> {
    let name = crate::shell::quoted(bundle);
    let golden = |command: &str| format!("anemoe {command} {name} --golden F.npz");
    vec![
        facts(r),
        layers(r),
        kinds(r),
        packages(r),
        errors(r),
        cosines(r.cosines.as_ref()).recorded_by(golden("trace")),
        qualities(r).recorded_by(golden("validate")),
        roofline(r).recorded_by(format!("anemoe bench {name}")),
        gates(r),
        chips(r, &name),
        journal(r),
    ]
}

fn facts(r: &BundleReport) -> ReportSection {
    let rows = [
        ("layers", r.layers.to_string()),
        ("context", format!("{} tokens", ui::count(r.max_context as u64))),
        ("packages", format!("{}, {}", r.shards.len(), ui::bytes(r.bytes))),
        ("embedding", ui::bytes(r.embedding_bytes)),
        ("weights", ui::count(r.weights)),
    ];
    let model = format!("{} of the family {}", r.source, r.family);
    let compressed = r.compressed_for.iter().map(|what| ("compressed for", what.clone()));
    let rows = rows.into_iter().chain(compressed).map(|(key, value)| vec![key.into(), value]);
    ReportSection::new("bundle", "Bundle", "the model and its packages", table(&["model", &model], rows))
}

fn layers(r: &BundleReport) -> ReportSection {
    let row = |(layer, own): (String, Vec<&ShardRow>)| {
        vec![layer, own.len().to_string(), ui::bytes(own.iter().map(|s| s.bytes).sum()), devices(&own)]
    };
    let rows = grouped(&r.shards, |s| s.group.clone()).into_iter().map(row);
    let note = "bytes, and the device that rules and published measurements predict; only a Mac can measure";
    let table = table(&["", "packages", "bytes", "predicted"], rows);
    ReportSection::new("packages", "Packages by layer", note, table)
}

fn kinds(r: &BundleReport) -> ReportSection {
    let row = |(kind, own): (&str, Vec<&ShardRow>)| {
        let error = own.iter().map(|s| s.output_error).fold(0.0, f64::max);
        let bytes = ui::bytes(own.iter().map(|s| s.bytes).sum());
        vec![kind.into(), own.len().to_string(), bytes, format!("{error:.2e}"), devices(&own)]
    };
    let rows = grouped(&r.shards, |s| s.kind).into_iter().map(row);
    let table = table(&["kind", "packages", "bytes", "largest error", "predicted"], rows);
    ReportSection::new("kinds", "Packages by kind", "the error is the largest of a kind's packages", table)
}

/// Counts packages by their predicted device, in words.
fn devices(shards: &[&ShardRow]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for shard in shards {
        *counts.entry(shard.device).or_insert(0) += 1;
    }
    let words: Vec<String> = counts.iter().map(|(words, n)| format!("{n} {words}")).collect();
    words.join(", ")
}

fn packages(r: &BundleReport) -> ReportSection {
    let row = |s: &ShardRow| {
        let quant: BTreeSet<&str> = s.quant.values().map(String::as_str).collect();
        vec![
            s.name.clone(),
            s.kind.into(),
            ui::bytes(s.bytes),
            quant.into_iter().collect::<Vec<_>>().join(", "),
            format!("{:.5}", s.min_weight_cosine),
            format!("{:.2e}", s.output_error),
            format!("{}; {}", s.device, s.rule),
        ]
    };
    let headings =
        ["package", "kind", "bytes", "compression", "lowest weight cosine", "output error", "predicted"];
    let note = "the rule that decides stands behind the device";
    let table = table(&headings, r.shards.iter().map(row));
    ReportSection { is_long: true, ..ReportSection::new("shards", "Every package", note, table) }
}

fn errors(r: &BundleReport) -> ReportSection {
    let errors = &r.errors;
    let row = |(layer, values): (&String, &Vec<Option<f64>>)| {
        let values = values.iter().map(|v| v.map_or(String::new(), |v| format!("{v:.1e}")));
        std::iter::once(layer.clone()).chain(values).collect()
    };
    let rows = errors.rows.iter().zip(&errors.values).map(row);
    let note = "squared error of compressed matrices over their squares, the largest of a layer's packages of a kind";
    let headings = [&[""], &errors.kinds[..]].concat();
    ReportSection::new("errors", "Error by layer and part", note, table(&headings, rows))
}

fn cosines(map: Option<&CosineMap>) -> ReportSection {
    let mut note = "lowest cosine of the hidden state to the golden's, the checkpoint run in f32".to_string();
    note += &map.map_or_else(String::new, |map| format!("; traced {}", map.time));
    let row = |(name, cosines): (&String, &Vec<f64>)| {
        let (column, cosine) = cosines.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1))?;
        Some(vec![name.clone(), format!("{cosine:.6}"), column.to_string()])
    };
    let rows = map.into_iter().flat_map(|map| map.names.iter().zip(&map.rows)).filter_map(row);
    let table = Table::new(&["behind", "lowest", "position"]).with_rows(rows);
    ReportSection::new("cosines", "Cosine by layer and position", note, table)
}

fn qualities(r: &BundleReport) -> ReportSection {
    let rows = r.qualities.iter().map(|q| {
        let mark = if q.is_best { "*" } else { "" };
        vec![q.name.clone(), ui::bytes(q.bytes), format!("{:.6}", q.min_cosine), mark.into()]
    });
    let note = "lowest cosine of the logits; nothing of its sort is smaller and better than a *";
    let table = table(&["", "bytes", "lowest cosine", ""], rows);
    ReportSection::new("qualities", "Bytes and quality", note, table)
}

fn roofline(r: &BundleReport) -> ReportSection {
    let mut note = "tokens a second beside the bandwidth of the memory".to_string();
    let mut rows = Vec::new();
    if let Some(roof) = &r.roofline {
        note += &format!(", {} GB/s in the same run, {}", short(roof.read_gb_s), roof.time);
        for p in &roof.points {
            let share = 100.0 * p.tok_s * p.gb_per_token / roof.read_gb_s;
            rows.push(vec![p.name.clone(), short(p.tok_s), short(p.gb_per_token), format!("{share:.0} %")]);
        }
    }
    let table = table(&["", "tokens a second", "GB a token", "of the bandwidth"], rows);
    ReportSection::new("roofline", "Speed, measured", note, table)
}

fn gates(r: &BundleReport) -> ReportSection {
    let rows = r.gates.iter().map(|g| {
        let cosine = g.min_cosine.map(|c| format!("{c:.6}")).unwrap_or_default();
        let when = g.time.as_deref().map_or("build", minute);
        vec![when.into(), g.said.clone(), cosine, g.gate.clone()]
    });
    let note = "what the contract says of the build, then every run of a gate since, the newest last";
    ReportSection::new("gates", "Gates", note, table(&["when", "said", "cosine", "gate"], rows))
}

fn chips(r: &BundleReport, name: &str) -> ReportSection {
    let rows = r.chip_speeds.iter().map(|ChipSpeed { chip, tok_s }| {
        vec![chip.clone(), short(tok_s.likely), format!("{} to {}", short(tok_s.low), short(tok_s.high))]
    });
    let note = format!(
        "tokens a second, from published figures of chips; nothing is measured. Other chips: anemoe predict-speed {name}; other forms: anemoe predict-speed CHECKPOINT"
    );
    let table = table(&["chip", "likely", "range"], rows);
    ReportSection::new("chips", "Speed of the Neural Engine, predicted", note, table)
}

fn journal(r: &BundleReport) -> ReportSection {
    let rows = r.journal.iter();
    let rows = rows.map(|line| vec![minute(&line.time).into(), line.what.clone(), line.text.clone()]);
    let note = "what was done to this bundle and came out of it; --no-journal leaves nothing here";
    ReportSection::new("journal", "Journal", note, table(&["when", "what", "text"], rows))
}

/// Cuts a time to the minute, so that lines fit.
fn minute(time: &str) -> &str {
    time.get(..16).unwrap_or(time)
}

/// Formats a number in a few characters.
fn short(x: f64) -> String {
    match x.abs() {
        0.0 => "0".into(),
        a if !(1e-3..1e6).contains(&a) => format!("{x:.1e}"),
        a if a >= 100.0 => format!("{x:.0}"),
        a if a >= 1.0 => format!("{x:.1}").trim_end_matches(".0").into(),
        _ => format!("{x:.4}").trim_end_matches('0').into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let shown: Vec<String> = [0.0, 1e-5, 0.05, 3.25, 12.0, 1234.5, 2e7].map(short).to_vec();
        assert_eq!(shown, ["0", "1.0e-5", "0.05", "3.2", "12", "1234", "2.0e7"]);
    }
}
