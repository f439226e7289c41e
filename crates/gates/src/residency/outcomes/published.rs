//! Tables of published outcomes: lines of facts, or lines of words for people.

use super::columns::{self, Cells, MARK, NEEDED};
use super::row::Row;
use super::words::WordRow;

/// Table of published outcomes that anemoe ships. The rules were written with most of them in view.
pub const KNOWN: &str = include_str!("known.tsv");

/// Reads a table: tab-separated, with a line of headings, columns in any order. With a column `graph` the cells are
/// facts, without it they are words.
///
/// # Errors
/// A needed column is missing, a line has too few cells, or a cell has an unknown value; the message names the line.
pub fn parse(text: &str) -> Result<Vec<Row>, String> {
    let mut lines = text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty() && !l.starts_with('#'));
    let (_, headings) = lines.next().ok_or("it is empty")?;
    let headings: Vec<&str> = headings.split('\t').map(str::trim).collect();
    if headings.contains(&MARK) { facts(&headings, lines) } else { words(&headings, lines) }
}

fn facts<'a>(headings: &[&str], lines: impl Iterator<Item = (usize, &'a str)>) -> Result<Vec<Row>, String> {
    if let Some(missing) = NEEDED.iter().find(|n| !headings.contains(n)) {
        return Err(format!("no column `{missing}`"));
    }
    lines
        .map(|(number, line)| {
            let cells: Vec<&str> = line.split('\t').collect();
            if cells.len() < headings.len() {
                return Err(format!("line {}: {} cells of {}", number + 1, cells.len(), headings.len()));
            }
            columns::row(&Cells { headings, cells: &cells })
                .map_err(|what| format!("line {}: {what}", number + 1))
        })
        .collect()
}

fn words<'a>(headings: &[&str], lines: impl Iterator<Item = (usize, &'a str)>) -> Result<Vec<Row>, String> {
    let column = |name: &str| headings.iter().position(|h| h.eq_ignore_ascii_case(name));
    let needed = |name: &str| column(name).ok_or_else(|| format!("no column `{name}`"));
    let (id, model, facts) = (column("id"), needed("model_or_op")?, needed("graph_facts")?);
    let (quant, mb, shape) = (needed("quant")?, needed("MB")?, needed("shape/state")?);
    let (chip, label, source) = (column("chip_os"), needed("label")?, column("source"));
    let mut rows = Vec::new();
    for (number, line) in lines {
        let cells: Vec<&str> = line.split('\t').collect();
        let cell = |i: usize| cells.get(i).map(|c| c.trim().to_string()).unwrap_or_default();
        if cells.len() <= label {
            return Err(format!("line {}: {} cells, no label", number + 1, cells.len()));
        }
        let size = cell(mb);
        let size = match size.trim_start_matches(['~', '<']) {
            "" | "?" | "-" => None,
            t => Some(
                t.parse()
                    .ok()
                    .filter(|v: &f64| v.is_finite() && *v >= 0.0)
                    .ok_or_else(|| format!("line {}: `{t}` is not a number of megabytes", number + 1))?,
            ),
        };
        let row = WordRow {
            id: id.map_or_else(|| format!("line {}", number + 1), cell),
            model: cell(model),
            facts: cell(facts),
            quant: cell(quant),
            mb: size,
            shape: cell(shape),
            chip: chip.map(cell).unwrap_or_default(),
            label: cell(label).to_ascii_uppercase(),
            source: source.map(cell).unwrap_or_default(),
        };
        rows.push(row.read());
    }
    Ok(rows)
}
