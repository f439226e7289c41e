//! Standard output for results, standard error for progress.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

/// Display of results and progress.
pub struct Ui {
    json: bool,
    /// True if nothing goes to standard output.
    silent: bool,
}

impl Ui {
    /// Makes the output of a command: with `json`, one document and nothing else on standard output.
    pub fn new(json: bool) -> Self {
        Ui { json, silent: false }
    }

    /// Makes the output of a command inside another one: nothing goes to standard output.
    pub fn inner() -> Self {
        Ui { json: true, silent: true }
    }

    /// Prints a line of the result for people.
    pub fn line(&self, text: impl AsRef<str>) -> io::Result<()> {
        if self.json {
            return Ok(());
        }
        writeln!(io::stdout(), "{}", printable(text.as_ref())).map_err(name_stdout)
    }

    /// Prints part of a line at once.
    pub fn part(&self, text: &str) -> io::Result<()> {
        if self.json {
            return Ok(());
        }
        let mut out = io::stdout();
        out.write_all(printable(text).as_bytes()).and_then(|()| out.flush()).map_err(name_stdout)
    }

    /// Prints part of a model's thoughts at once: dimmed on a terminal, else on standard error, so that the result alone is
    /// on standard output.
    pub fn thought(&self, text: &str) -> io::Result<()> {
        let mut out = io::stdout();
        match (self.json, out.is_terminal()) {
            (true, _) => Ok(()),
            (false, true) => {
                let written = write!(out, "\u{1b}[2m{}\u{1b}[0m", printable(text));
                written.and_then(|()| out.flush()).map_err(name_stdout)
            }
            (false, false) => io::stderr().write_all(printable(text).as_bytes()),
        }
    }

    /// Prints the result for programs.
    pub fn document<T: Serialize>(&self, value: &T) -> anyhow::Result<()> {
        if self.json && !self.silent {
            // Whole or not at all: an error half-way has a document of its own.
            let mut text = serde_json::to_vec_pretty(value)?;
            text.push(b'\n');
            io::stdout().write_all(&text).map_err(name_stdout)?;
        }
        Ok(())
    }

    /// Makes a bar over `total` units of work, drawn only on a terminal.
    pub fn bar(&self, total: u64, what: &str) -> ProgressBar {
        styled_bar(total, what, "{prefix} [{wide_bar}] {pos}/{len} {msg} {elapsed}, {eta} left")
    }
}

/// Makes a bar over `total` bytes to transfer, drawn only on a terminal.
pub fn byte_bar(total: u64, what: &str) -> ProgressBar {
    styled_bar(total, what, "{prefix} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {msg}, {eta} left")
}

fn styled_bar(total: u64, what: &str, template: &str) -> ProgressBar {
    let target =
        if io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(total), target);
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_prefix(printable(what).into_owned());
    bar
}

/// Prints a line on standard error. A failure to print is no error.
pub fn message(text: impl AsRef<str>) {
    let _ = writeln!(io::stderr(), "{}", printable(text.as_ref()));
}

/// Shows control characters as text: a name from a file must not move the cursor, change colours or turn the direction of
/// writing. Line ends and tabs stay.
pub fn printable(text: &str) -> Cow<'_, str> {
    let turns =
        |c: char| matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let hidden = |c: char| c.is_control() && !matches!(c, '\n' | '\t') || turns(c);
    if !text.contains(hidden) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if hidden(c) {
            shown.extend(c.escape_unicode());
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

/// Writes what libraries log to standard error, as [`printable`] text.
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        io::stderr().write_all(printable(&String::from_utf8_lossy(bytes)).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Names standard output, which has no path, in an error.
fn name_stdout(e: io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("standard output: {e}"))
}

/// A table of text columns: the first one is aligned to the left, the others to the right.
pub struct Table {
    rows: Vec<Vec<String>>,
    /// True if the last column holds sentences, which are aligned to the left.
    ends_in_text: bool,
}

impl Table {
    /// Makes a table with these headings.
    pub fn new(headings: &[&str]) -> Self {
        Table { rows: vec![headings.iter().map(|h| h.to_string()).collect()], ends_in_text: false }
    }

    /// Makes a table whose last column holds sentences.
    pub fn ending_in_text(headings: &[&str]) -> Self {
        Table { ends_in_text: true, ..Table::new(headings) }
    }

    /// Adds a row with one cell per column.
    pub fn row(&mut self, cells: Vec<String>) {
        // A line end in a name would break the row.
        let cell = |c: String| if c.contains(['\n', '\t']) { c.escape_debug().to_string() } else { c };
        self.rows.push(cells.into_iter().map(|c| printable(&cell(c)).into_owned()).collect());
    }

    /// Adds rows.
    pub fn with_rows(mut self, rows: impl IntoIterator<Item = Vec<String>>) -> Self {
        rows.into_iter().for_each(|row| self.row(row));
        self
    }

    /// Returns the cells, row by row, the headings first.
    pub fn rows(&self) -> &[Vec<String>] {
        &self.rows
    }

    /// Prints the table.
    pub fn print(&self, ui: &Ui) -> io::Result<()> {
        let columns = self.rows[0].len();
        let width =
            |c: usize| self.rows.iter().map(|r| r.get(c).map_or(0, |s| s.chars().count())).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for (i, row) in self.rows.iter().enumerate() {
            let mut line = String::new();
            for (c, cell) in row.iter().enumerate() {
                let fill = " ".repeat(widths[c].saturating_sub(cell.chars().count()));
                if c > 0 {
                    line.push_str("  ");
                }
                if c == 0 || self.ends_in_text && c + 1 == columns {
                    line.push_str(cell);
                    line.push_str(&fill);
                } else {
                    line.push_str(&fill);
                    line.push_str(cell);
                }
            }
            ui.line(line.trim_end())?;
            if i == 0 {
                let total: usize = widths.iter().sum::<usize>() + 2 * (columns - 1);
                ui.line("-".repeat(if self.ends_in_text { total.min(MAX_RULE) } else { total }))?;
            }
        }
        Ok(())
    }
}

/// Longest line under the headings of a table that ends in sentences, in characters.
const MAX_RULE: usize = 110;

/// Formats bytes in kB, MB or GB, of 10^3, 10^6 or 10^9.
pub fn bytes(n: u64) -> String {
    match n {
        0..=999_999 => format!("{:.1} kB", n as f64 / 1e3),
        1_000_000..=999_999_999 => format!("{:.1} MB", n as f64 / 1e6),
        _ => format!("{:.2} GB", n as f64 / 1e9),
    }
}

/// Formats a duration in a fitting unit: `42 s`, `12 min`, `2.3 h`.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 90.0 => format!("{s:.0} s"),
        s if s < 5400.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// Formats a count of things: `1 shard`, `12,000 shards`.
pub fn counted(n: impl TryInto<u64>, thing: &str) -> String {
    match n.try_into().unwrap_or(u64::MAX) {
        1 => format!("1 {thing}"),
        n => format!("{} {}", count(n), plural(thing)),
    }
}

/// Returns the plural of a noun, which may follow an adjective: `near tie`, `entry`, `matrix`, `pass`.
fn plural(thing: &str) -> String {
    let consonant_y = thing.strip_suffix('y').filter(|stem| !stem.ends_with(['a', 'e', 'o', 'u']));
    match (thing.strip_suffix("ix"), consonant_y) {
        (Some(stem), _) => format!("{stem}ices"),
        (_, Some(stem)) => format!("{stem}ies"),
        _ if thing.ends_with('s') => format!("{thing}es"),
        _ => format!("{thing}s"),
    }
}

/// Formats a count with commas between groups of three digits.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::{counted, printable};

    #[test]
    fn one_thing_is_not_several() {
        for (n, thing, said) in [
            (1, "shard", "1 shard"),
            (0, "shard", "0 shards"),
            (12_000u64, "near tie", "12,000 near ties"),
            (2, "entry", "2 entries"),
            (2, "matrix", "2 matrices"),
            (1, "pass", "1 pass"),
            (2, "pass", "2 passes"),
            (3, "day", "3 days"),
        ] {
            assert_eq!(counted(n, thing), said);
        }
    }

    #[test]
    fn control_characters_are_shown_and_not_sent() {
        assert_eq!(printable("plain\ttext\n"), "plain\ttext\n");
        assert_eq!(
            printable("\u{1b}[31mred\r\u{7f}\u{9b}0m\u{202e}"),
            "\\u{1b}[31mred\\u{d}\\u{7f}\\u{9b}0m\\u{202e}"
        );
    }
}
