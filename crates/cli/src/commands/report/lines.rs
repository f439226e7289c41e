//! The report for terminals.

use super::bundle_facts::{BundleReport, CosineMap, ShardRow};
use super::chart::{SHADES, log_range, shade, short};
use super::layers::{by_layer, layer_errors};
use super::page::{device, distance};
use crate::commands::journal::wrapped;
use crate::ui::{self, Table, Ui};
use std::collections::BTreeMap;
use std::path::Path;

/// Characters of a heat map, from the smallest value to the largest.
const HEAT: [char; SHADES] = ['.', ',', ':', '-', '=', '+', '*', '%', '#', '@'];
/// Most columns of a heat map: with names it fits a terminal of 80 columns.
const MAX_COLUMNS: usize = 44;

/// Longest line of the journal, in characters.
const WIDTH: usize = 80;

/// Prints the report for terminals.
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
    print_layers(r, ui)?;
    print_errors(r, ui)?;
    ui.line("\nCosine of the hidden state to the golden's, by layer and position")?;
    match &r.cosines {
        None => ui.line(format!("nothing is recorded; anemoe trace {name} --golden F.npz"))?,
        Some(map) => print_cosines(map, ui)?,
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
    let mut table = Table::ending_in_text(&["when", "said", "cosine", "gate"]);
    for g in &r.gates {
        let cosine = g.min_cosine.map(|c| format!("{c:.6}")).unwrap_or_default();
        // Cut to the minute, so that the line fits.
        let when = g.time.as_deref().map_or("build", |time| time.get(..16).unwrap_or(time));
        table.row(vec![when.into(), g.said.clone(), cosine, g.gate.clone()]);
    }
    table.print(ui)?;
    print_journal(r, ui)
}

/// Counts packages by their predicted device, in words.
fn devices(shards: &[&ShardRow]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for shard in shards {
        *counts.entry(device(shard)).or_insert(0) += 1;
    }
    let words: Vec<String> = counts.iter().map(|(words, n)| format!("{n} {words}")).collect();
    words.join(", ")
}

fn print_layers(r: &BundleReport, ui: &Ui) -> std::io::Result<()> {
    ui.line("\nPackages by layer and predicted device")?;
    let mut table = Table::ending_in_text(&["", "packages", "bytes", "predicted"]);
    for (layer, own) in by_layer(&r.shards) {
        let bytes = own.iter().map(|s| s.bytes).sum();
        table.row(vec![layer, own.len().to_string(), ui::bytes(bytes), devices(&own)]);
    }
    table.print(ui)
}

fn print_errors(r: &BundleReport, ui: &Ui) -> std::io::Result<()> {
    ui.line("\nError by layer and part: squared error of matrices over their squares, the largest")?;
    let errors = layer_errors(&r.shards);
    let mut table = Table::new(&[&[""], &errors.kinds[..]].concat());
    for (layer, values) in errors.rows.into_iter().zip(errors.values) {
        let values = values.iter().map(|v| v.map_or(String::new(), |v| format!("{v:.1e}")));
        table.row(std::iter::once(layer).chain(values).collect());
    }
    table.print(ui)
}

/// Returns the largest distance from a cosine of 1 of every `step` neighbouring positions.
fn worst_of(row: &[f64], step: usize) -> Vec<f64> {
    row.chunks(step).map(|cosines| cosines.iter().map(|&c| distance(c)).fold(0.0, f64::max)).collect()
}

fn print_cosines(map: &CosineMap, ui: &Ui) -> std::io::Result<()> {
    let positions = map.rows.iter().map(Vec::len).max().unwrap_or(0);
    let step = positions.div_ceil(MAX_COLUMNS).max(1);
    let rows: Vec<Vec<f64>> = map.rows.iter().map(|row| worst_of(row, step)).collect();
    let range = log_range(rows.iter().flatten().copied());
    let mut table = Table::ending_in_text(&["behind", "lowest", "position", "by position"]);
    for (i, (cosines, errors)) in map.rows.iter().zip(&rows).enumerate() {
        let Some((position, cosine)) = cosines.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1)) else {
            continue;
        };
        let heat = errors.iter().map(|&e| HEAT[shade(e, range)]).collect();
        table.row(vec![map.row_name(i), format!("{cosine:.6}"), position.to_string(), heat]);
    }
    table.print(ui)?;
    if range.0 > range.1 {
        return Ok(());
    }
    let (best, worst) = (1.0 - 10f64.powf(range.0), 1.0 - 10f64.powf(range.1));
    let each = if step == 1 { String::new() } else { format!("; a column is the worst of {step} positions") };
    let scale: String = HEAT.iter().collect();
    ui.line(format!("{best:.6} {scale} {worst:.6}, by the logarithm of 1 minus the cosine{each}"))
}

fn print_journal(r: &BundleReport, ui: &Ui) -> std::io::Result<()> {
    let many = ui::counted(r.journal.len(), "entry");
    ui.line(format!("\nJournal: {many}"))?;
    for entry in &r.journal {
        ui.line(format!("{}: {}", entry.time, entry.kinds.join(", ")))?;
        for (heading, lines) in entry.texts() {
            for line in lines {
                ui.line(wrapped(&format!("{heading}: {line}"), WIDTH))?;
            }
        }
        for run in &entry.result {
            let status = if run.status.is_empty() { String::new() } else { format!(" {}", run.status) };
            let colon = if run.figures.is_empty() { "" } else { ": " };
            ui.line(wrapped(&format!("{}{status}{colon}{}", run.kind, run.figures.join(", ")), WIDTH))?;
        }
    }
    Ok(())
}

fn print_kinds(r: &BundleReport, ui: &Ui) -> std::io::Result<()> {
    let mut groups: BTreeMap<(&str, &str), (usize, u64, f64)> = BTreeMap::new();
    for s in &r.shards {
        let group = groups.entry((s.kind, device(s))).or_insert((0, 0, 0.0));
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
    table.print(ui)?;
    ui.line("\nPredicted tokens a second by form")?;
    let found = &r.form_speeds;
    if let Some(why) = &found.missing {
        return ui.line(format!(
            "nothing is predicted: {why}; anemoe report {name} --text --checkpoint CHECKPOINT"
        ));
    }
    let chips: Vec<&str> = found.chips.iter().map(String::as_str).chain(["form"]).collect();
    let mut table = Table::ending_in_text(&chips);
    for form in &found.forms {
        let speeds = form.tok_s.iter().map(|s| short(s.likely));
        table.row(speeds.chain([form.name.clone()]).collect());
    }
    table.print(ui)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_the_worst_of_their_positions() {
        let found = worst_of(&[1.0, 0.9, 0.5, 1.0, 0.75], 2);
        assert_eq!(found.len(), 3);
        for (found, expected) in found.iter().zip([0.1, 0.5, 0.25]) {
            assert!((found - expected).abs() < 1e-9, "{found}");
        }
        assert_eq!(worst_of(&[1.0], 1), [0.0]);
    }
}
