//! Standard output for results, standard error for progress.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

/// How results and progress are shown.
pub struct Ui {
    json: bool,
}

impl Ui {
    /// With `json`, results are one document and nothing else goes to standard output.
    pub fn new(json: bool) -> Self {
        Ui { json }
    }

    /// Prints a line of the result for people.
    pub fn line(&self, text: impl AsRef<str>) -> io::Result<()> {
        if self.json {
            return Ok(());
        }
        writeln!(io::stdout(), "{}", printable(text.as_ref()))
    }

    /// Prints part of a line at once.
    pub fn part(&self, text: &str) -> io::Result<()> {
        if self.json {
            return Ok(());
        }
        let mut out = io::stdout();
        out.write_all(text.as_bytes())?;
        out.flush()
    }

    /// Prints the result for programs.
    pub fn document<T: Serialize>(&self, value: &T) -> anyhow::Result<()> {
        if self.json {
            let mut out = io::stdout().lock();
            serde_json::to_writer_pretty(&mut out, value).map_err(io::Error::from)?;
            writeln!(out)?;
        }
        Ok(())
    }

    /// A bar over `total` units of work, on a terminal; elsewhere nothing is drawn.
    pub fn bar(&self, total: u64, what: &str) -> ProgressBar {
        let target = if io::stderr().is_terminal() {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        let template = "{prefix} [{wide_bar}] {pos}/{len} {msg} {elapsed}, {eta} left";
        bar.set_style(
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
        bar.set_prefix(what.to_string());
        bar
    }
}

/// Text in which control characters are escapes, so that a name in a file cannot steer a terminal.
pub fn printable(text: &str) -> Cow<'_, str> {
    let steers = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(steers) {
        return text.into();
    }
    text.chars().map(|c| if steers(c) { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// A table of text columns: the first to the left, the others to the right.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings.
    pub fn new(headings: &[&str]) -> Self {
        Table { rows: vec![headings.iter().map(|h| h.to_string()).collect()] }
    }

    /// Adds a row of as many cells.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
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
                if c == 0 {
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
                ui.line("-".repeat(total))?;
            }
        }
        Ok(())
    }
}

/// Bytes in MB of 10^6 or GB of 10^9.
pub fn bytes(n: u64) -> String {
    match n {
        0..=999_999 => format!("{:.1} kB", n as f64 / 1e3),
        1_000_000..=999_999_999 => format!("{:.1} MB", n as f64 / 1e6),
        _ => format!("{:.2} GB", n as f64 / 1e9),
    }
}

/// A count with thin groups of three digits.
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
    use super::printable;

    #[test]
    fn control_characters_are_shown_as_escapes() {
        assert_eq!(printable("plain: a/b\tc\nd"), "plain: a/b\tc\nd");
        assert_eq!(printable("\u{1b}[31m\u{7}\u{9b}é"), "\\u{1b}[31m\\u{7}\\u{9b}é");
    }
}
