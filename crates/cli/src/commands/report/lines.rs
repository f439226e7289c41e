//! The report for terminals.

use super::chart::short;
use super::facts::BundleReport;
use super::page::verdict;
use crate::ui::{self, Table, Ui};
use std::collections::BTreeMap;
use std::path::Path;

/// Prints the report.
pub fn print(r: &BundleReport, bundle: &Path, ui: &Ui) -> std::io::Result<()> {
    let name = crate::shell::quoted(bundle);
    ui.line(format!("{}: {} of the family {}, {} layers", r.name, r.source, r.family, r.layers))?;
    ui.line(format!(
        "{} packages, {}, {} weights; embedding {}; context of {} tokens",
        r.shards.len(),
        ui::bytes(r.bytes),
        ui::count(r.weights),
        ui::bytes(r.embedding_bytes),
        ui::count(r.max_context as u64)
    ))?;
    ui.line("\nPackages by kind and predicted device")?;
    print_kinds(r, ui)?;
    ui.line("\nCosine of the hidden state to the golden's, by layer")?;
    match &r.cosines {
        None => ui.line(format!("nothing is recorded; anemoe trace {name} --golden F.npz"))?,
        Some(map) => {
            let mut table = Table::new(&["behind", "lowest", "at position"]);
            for (i, row) in map.rows.iter().enumerate() {
                let lowest = row.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1));
                let Some((position, cosine)) = lowest else { continue };
                table.row(vec![map.row_name(i), format!("{cosine:.6}"), position.to_string()]);
            }
            table.print(ui)?;
        }
    }
    ui.line("\nBytes and quality (* nothing of its sort is smaller and better)")?;
    if r.qualities.is_empty() {
        ui.line(format!("nothing is recorded; anemoe validate {name} --golden F.npz"))?;
    } else {
        let mut table = Table::new(&["", "bytes", "lowest cosine"]);
        for q in &r.qualities {
            let mark = if q.is_best { " *" } else { "" };
            table.row(vec![format!("{}{mark}", q.name), ui::bytes(q.bytes), format!("{:.6}", q.min_cosine)]);
        }
        table.print(ui)?;
    }
    print_speeds(r, &name, ui)?;
    ui.line("\nGates")?;
    let mut table = Table::new(&["gate", "when", "said", "lowest cosine"]);
    for g in &r.gates {
        let cosine = g.min_cosine.map(|c| format!("{c:.6}")).unwrap_or_default();
        table.row(vec![g.gate.clone(), g.time.clone().unwrap_or("build".into()), g.said.clone(), cosine]);
    }
    table.print(ui)?;
    ui.line(format!("\n{} entries in the journal: anemoe journal {name}", r.journal.len()))
}

fn print_kinds(r: &BundleReport, ui: &Ui) -> std::io::Result<()> {
    let mut groups: BTreeMap<(&str, &str), (usize, u64, f64)> = BTreeMap::new();
    for s in &r.shards {
        let group = groups.entry((s.kind, verdict(s).1)).or_insert((0, 0, 0.0));
        *group = (group.0 + 1, group.1 + s.bytes, group.2.max(s.output_error));
    }
    let mut table = Table::ending_in_text(&["kind", "packages", "bytes", "largest error", "predicted"]);
    for ((kind, verdict), (count, bytes, error)) in groups {
        table.row(vec![
            kind.into(),
            count.to_string(),
            ui::bytes(bytes),
            format!("{error:.2e}"),
            verdict.into(),
        ]);
    }
    table.print(ui)
}

fn print_speeds(r: &BundleReport, name: &str, ui: &Ui) -> std::io::Result<()> {
    ui.line("\nSpeed, measured")?;
    match &r.roofline {
        None => ui.line(format!("nothing is recorded; anemoe bench {name}"))?,
        Some(roof) => {
            let mut table = Table::new(&["", "tokens a second", "GB a token", "of the bandwidth"]);
            for p in &roof.points {
                let share = 100.0 * p.tok_s * p.gb_per_token / roof.read_gb_s;
                table.row(vec![
                    p.name.clone(),
                    short(p.tok_s),
                    short(p.gb_per_token),
                    format!("{share:.0} %"),
                ]);
            }
            table.print(ui)?;
        }
    }
    ui.line("\nSpeed of the Neural Engine, predicted: tokens a second")?;
    let mut table = Table::new(&["chip", "likely", "from", "to"]);
    for s in &r.speeds {
        table.row(vec![s.chip.clone(), short(s.tok_s.likely), short(s.tok_s.low), short(s.tok_s.high)]);
    }
    table.print(ui)
}
