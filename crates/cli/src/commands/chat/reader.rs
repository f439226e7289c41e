//! Questions from a terminal, with history and several lines, or from a pipe.

use super::typed_ahead::{NextTyped, TypedAhead, take_from_stdin};
use crate::args::prompt::MAX_PROMPT;
use anyhow::Context;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::{History, MemHistory};
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Behavior, Config, Editor, Helper};
use std::io::{BufRead, IsTerminal, Read};

/// Mark around a question of several lines.
const BLOCK_MARK: &str = "\"\"\"";
/// Text that a terminal shows before a question.
const PROMPT: &str = "> ";

/// Helper of the editor that keeps a question open until its last line.
struct OpenLines;

impl Helper for OpenLines {}
impl Completer for OpenLines {
    type Candidate = String;
}
impl Hinter for OpenLines {
    type Hint = String;
}
impl Highlighter for OpenLines {}
impl Validator for OpenLines {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match is_complete(context.input()) {
            true => ValidationResult::Valid(None),
            false => ValidationResult::Incomplete,
        })
    }
}

/// Source of questions.
pub enum Questions {
    /// Standard input is a terminal.
    Terminal(AtTerminal),
    /// Standard input is a file or a pipe.
    Pipe,
}

/// Questions from a terminal.
#[derive(Default)]
pub struct AtTerminal {
    earlier: Vec<String>,
    typed: TypedAhead,
}

impl AtTerminal {
    /// Returns the next question, which may have been typed ahead; none at the end of input.
    fn next(&mut self) -> anyhow::Result<Option<String>> {
        loop {
            take_from_stdin(&mut self.typed, is_complete).context("terminal")?;
            let begun = match self.typed.next() {
                NextTyped::Question(text) => {
                    crate::ui::message(format!("{PROMPT}{text}"));
                    return Ok(Some(self.remember(&text)));
                }
                NextTyped::End => return Ok(None),
                NextTyped::Ask(begun) => begun,
            };
            let line = editor(&self.earlier)
                .and_then(|mut editor| editor.readline_with_initial(PROMPT, (begun.as_str(), "")));
            match line {
                Ok(text) => return Ok(Some(self.remember(&text))),
                Err(ReadlineError::Interrupted) => crate::ui::message("(Ctrl-D or /quit ends the chat)"),
                Err(ReadlineError::Eof) => return Ok(None),
                Err(e) => return Err(anyhow::Error::new(e).context("terminal")),
            }
        }
    }

    /// Adds a question to the history of the arrow keys, and returns it without its marks.
    fn remember(&mut self, text: &str) -> String {
        if !text.trim().is_empty() && self.earlier.last().is_none_or(|last| last != text) {
            self.earlier.push(text.to_string());
        }
        unfolded(text)
    }
}

impl Questions {
    /// Opens standard input.
    pub fn open() -> Questions {
        match std::io::stdin().is_terminal() {
            true => Questions::Terminal(AtTerminal::default()),
            false => Questions::Pipe,
        }
    }

    /// Tells whether standard input is a terminal.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Questions::Terminal(_))
    }

    /// Returns the next question or command; none at the end.
    pub fn next(&mut self) -> anyhow::Result<Option<String>> {
        match self {
            Questions::Terminal(terminal) => terminal.next(),
            Questions::Pipe => piped(&mut std::io::stdin().lock()),
        }
    }
}

/// Makes an editor of one question. The editor handles Ctrl-C itself while it lives, so none lives during an answer.
fn editor(earlier: &[String]) -> rustyline::Result<Editor<OpenLines, MemHistory>> {
    // Standard output may be a file, which must not get prompts and typed text.
    let behavior = match std::io::stdout().is_terminal() {
        true => Behavior::Stdio,
        false => Behavior::PreferTerm,
    };
    let config = Config::builder().bracketed_paste(true).behavior(behavior).build();
    let mut history = MemHistory::with_config(&config);
    for question in earlier {
        history.add(question)?;
    }
    let mut editor = Editor::with_history(config, history)?;
    editor.set_helper(Some(OpenLines));
    Ok(editor)
}

/// Reads one question from a pipe; none at its end.
fn piped(source: &mut impl BufRead) -> anyhow::Result<Option<String>> {
    let mut text = String::new();
    let mut source = source.take(MAX_PROMPT + 1);
    loop {
        if source.read_line(&mut text).context("standard input")? == 0 {
            let is_block = text.trim_start().starts_with(BLOCK_MARK);
            let inside = if is_block {
                format!("inside {BLOCK_MARK}")
            } else {
                "behind a `\\`, where a line is to follow".into()
            };
            anyhow::ensure!(text.is_empty() || is_complete(&text), "standard input ends {inside}");
            return Ok((!text.is_empty()).then(|| unfolded(&text)));
        }
        if text.starts_with('\u{feff}') {
            text.remove(0);
        }
        let room = text.len() as u64 <= MAX_PROMPT;
        anyhow::ensure!(room, "standard input: a question has more than {} MB", MAX_PROMPT / 1_000_000);
        let line = text.trim_end_matches(['\n', '\r']);
        if is_complete(line) {
            return Ok(Some(unfolded(line)));
        }
    }
}

/// Tells whether a question ends here: no `\` at the end of its last line, no block left open.
fn is_complete(text: &str) -> bool {
    match text.trim_start().strip_prefix(BLOCK_MARK) {
        Some(block) => block.contains(BLOCK_MARK),
        None => !text.ends_with('\\'),
    }
}

/// Removes the marks that let a question have several lines.
fn unfolded(text: &str) -> String {
    let text = text.trim().replace("\r\n", "\n");
    if let Some(block) = text.strip_prefix(BLOCK_MARK) {
        // Text after the closing mark belongs to the question, too.
        let (inside, tail) = block.split_once(BLOCK_MARK).unwrap_or((block, ""));
        return format!("{}{tail}", inside.trim_matches('\n'));
    }
    text.replace("\\\n", "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_have_one_line_or_several() {
        let text = "one\ntwo \\\nlines\r\n\n\"\"\"a\r\n\"b\"\n\"\"\"\r\n/stats\nlast";
        let mut source = text.as_bytes();
        let mut all = Vec::new();
        while let Some(question) = piped(&mut source).unwrap() {
            all.push(question);
        }
        assert_eq!(all, ["one", "two \nlines", "", "a\n\"b\"", "/stats", "last"]);
        assert!(piped(&mut &b"\"\"\"open\n"[..]).is_err());
        assert!(piped(&mut &b"\xff\xfe\n"[..]).is_err());
    }
}
