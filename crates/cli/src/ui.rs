//! Standard output for results, standard error for progress.

pub use anemoe_io::words::{bytes, count, counted, duration};
use indicatif::{
    HumanDuration, ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressState, ProgressStyle, TermLike,
};
use serde::Serialize;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

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

    /// Prints the lines that `show` adds.
    pub fn lines(&self, show: impl FnOnce(&mut Vec<String>)) -> io::Result<()> {
        let mut lines = Vec::new();
        show(&mut lines);
        lines.iter().try_for_each(|line| self.line(line))
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

    /// Makes a bar over `total` units of work; off a terminal it is a line now and then, see [`ProgressLines`].
    pub fn bar(&self, total: u64, what: &str) -> ProgressBar {
        styled_bar(total, what, "{prefix} [{wide_bar}] {pos}/{len} {msg} {elapsed}, {left} left")
    }
}

/// Makes a bar over `total` bytes to transfer; off a terminal it is a line now and then, see [`ProgressLines`].
pub fn byte_bar(total: u64, what: &str) -> ProgressBar {
    styled_bar(total, what, "{prefix} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {msg}, {left} left")
}

fn styled_bar(total: u64, what: &str, template: &str) -> ProgressBar {
    let (target, template) = match io::stderr().is_terminal() {
        true => (ProgressDrawTarget::stderr(), template.to_string()),
        false => {
            let lines = Box::new(ProgressLines(Mutex::new(Instant::now())));
            (ProgressDrawTarget::term_like_with_hz(lines, 1), template.replace(" [{wide_bar}]", ":"))
        }
    };
    let bar = ProgressBar::with_draw_target(Some(total), target).with_finish(ProgressFinish::AndClear);
    let style = ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style.with_key("left", |state: &ProgressState, out: &mut dyn fmt::Write| {
        let _ = out.write_str(&time_left(state.elapsed(), state.pos(), state.len().unwrap_or(0)));
    }));
    bar.set_prefix(printable(what).into_owned());
    bar
}

/// Returns the time that the rest takes at the pace so far; `?` before the first unit is done. The library's own estimate forgets
/// all within seconds, and layers take minutes.
fn time_left(elapsed: Duration, done: u64, total: u64) -> String {
    if done == 0 {
        return "?".to_string();
    }
    let left = elapsed.mul_f64(total.saturating_sub(done) as f64 / done as f64);
    format!("{:#}", HumanDuration(left))
}

/// Time between two lines of progress off a terminal.
const LINE_EACH: Duration = Duration::from_secs(30);

/// Draws a bar on standard error where that is no terminal, as a file or a pipe: as a line each [`LINE_EACH`]. Holds when
/// it drew the last one.
#[derive(Debug)]
struct ProgressLines(Mutex<Instant>);

impl ProgressLines {
    /// Returns true, and begins to wait again, once [`LINE_EACH`] has passed.
    fn is_due(&self) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = last.elapsed() >= LINE_EACH;
        if is_due {
            *last = Instant::now();
        }
        is_due
    }
}

impl TermLike for ProgressLines {
    fn width(&self) -> u16 {
        120
    }

    fn move_cursor_up(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_down(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_right(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_left(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.write_str(text)
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        if !text.trim().is_empty() && self.is_due() {
            message(text.trim_end());
        }
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Shows on a bar how much of the work is done, and which part is under way.
pub fn advance<N: TryInto<u64>>(bar: &ProgressBar, done: N, total: N, part: &str) {
    bar.set_length(total.try_into().unwrap_or(0));
    bar.set_position(done.try_into().unwrap_or(0));
    bar.set_message(part.to_string());
}

/// Returns the word for a gate that passed or failed.
pub fn verdict(pass: bool) -> &'static str {
    if pass { "pass" } else { "FAIL" }
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

    /// Returns the lines of the table.
    pub fn lines(&self) -> Vec<String> {
        let columns = self.rows[0].len();
        let width =
            |c: usize| self.rows.iter().map(|r| r.get(c).map_or(0, |s| s.chars().count())).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut lines = Vec::new();
        for row in &self.rows {
            let mut line = String::new();
            for (c, cell) in row.iter().enumerate() {
                let fill = " ".repeat(widths[c].saturating_sub(cell.chars().count()));
                let is_left = c == 0 || self.ends_in_text && c + 1 == columns;
                line += if c > 0 { "  " } else { "" };
                line += &if is_left { format!("{cell}{fill}") } else { format!("{fill}{cell}") };
            }
            lines.push(line.trim_end().to_string());
        }
        let total: usize = widths.iter().sum::<usize>() + 2 * (columns - 1);
        lines.insert(1, "-".repeat(if self.ends_in_text { total.min(MAX_RULE) } else { total }));
        lines
    }
}

/// Joins rows with equal cells: the first item of each, the number of items, and the cells.
pub fn folded<T>(items: impl IntoIterator<Item = (T, Vec<String>)>) -> Vec<(T, usize, Vec<String>)> {
    let mut rows: Vec<(T, usize, Vec<String>)> = Vec::new();
    let mut known: BTreeMap<Vec<String>, usize> = BTreeMap::new();
    for (item, cells) in items {
        match known.get(&cells) {
            Some(&i) => rows[i].1 += 1,
            None => {
                known.insert(cells.clone(), rows.len());
                rows.push((item, 1, cells));
            }
        }
    }
    rows
}

/// Longest line under the headings of a table that ends in sentences, in characters.
const MAX_RULE: usize = 110;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_off_a_terminal_is_a_line_now_and_then() {
        let lines = ProgressLines(Mutex::new(Instant::now().checked_sub(LINE_EACH).unwrap()));
        assert_eq!([lines.is_due(), lines.is_due()], [true, false]);
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
