//! Lines that were typed at the terminal while nobody read it: during an answer, or while the model was loaded.
//!
//! The terminal gathers the lines in canonical mode, in which Ctrl-D is an end of input and no character. They are taken
//! before an editor leaves that mode: in its own mode an end is lost, and the second of two lines does not reach the next
//! question's editor.

use std::collections::VecDeque;
use std::io;

/// Most bytes that are taken at once; a larger paste arrives as several questions.
const MAX_BYTES: usize = 1 << 20;

/// Questions that were typed ahead.
#[derive(Default)]
pub struct TypedAhead {
    questions: VecDeque<String>,
    /// Beginning of a question whose end is missing.
    open: String,
    /// True if Ctrl-D was typed after the questions.
    is_ended: bool,
}

/// Next thing that was typed.
#[derive(Debug, PartialEq, Eq)]
pub enum NextTyped {
    /// A question.
    Question(String),
    /// The end of input.
    End,
    /// No complete question: the user is asked, and this beginning is already typed.
    Ask(String),
}

impl TypedAhead {
    /// Takes the typed lines. `read` returns a line, or nothing at an end of input; `is_ready` tells that `read` would not
    /// wait.
    pub fn take(
        &mut self,
        is_ready: &mut dyn FnMut() -> bool,
        read: &mut dyn FnMut() -> io::Result<Vec<u8>>,
        is_complete: fn(&str) -> bool,
    ) -> io::Result<()> {
        let mut taken = 0;
        while !self.is_ended && taken < MAX_BYTES && is_ready() {
            let bytes = read()?;
            taken += bytes.len();
            self.is_ended = bytes.is_empty();
            let not_utf8 = |_| io::Error::new(io::ErrorKind::InvalidData, "what was typed is not UTF-8");
            self.open += &String::from_utf8(bytes).map_err(not_utf8)?;
            if let Some(text) = self.open.strip_suffix('\n').filter(|text| is_complete(text)) {
                self.questions.push_back(text.to_string());
                self.open.clear();
            }
        }
        Ok(())
    }

    /// Takes the next question, end of input, or beginning of a question.
    pub fn next(&mut self) -> NextTyped {
        match self.questions.pop_front() {
            Some(question) => NextTyped::Question(question),
            None if std::mem::take(&mut self.is_ended) => NextTyped::End,
            None => NextTyped::Ask(std::mem::take(&mut self.open)),
        }
    }
}

/// Takes the lines that wait at standard input.
#[cfg(unix)]
pub fn take_from_stdin(typed: &mut TypedAhead, is_complete: fn(&str) -> bool) -> io::Result<()> {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::io::BufRead;
    use std::os::fd::AsFd;
    let stdin = io::stdin();
    let mut is_ready = || {
        let mut waiting = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
        let is_in = |w: &PollFd| w.revents().is_some_and(|events| events.contains(PollFlags::POLLIN));
        poll(&mut waiting, PollTimeout::ZERO).is_ok() && is_in(&waiting[0])
    };
    let mut read = || {
        // A terminal gives one line at a time: the buffer is empty after it.
        let mut stdin = stdin.lock();
        let line = stdin.fill_buf()?.to_vec();
        stdin.consume(line.len());
        Ok(line)
    };
    typed.take(&mut is_ready, &mut read, is_complete)
}

/// Takes nothing: a console keeps what is typed for the editor.
#[cfg(not(unix))]
pub fn take_from_stdin(_: &mut TypedAhead, _: fn(&str) -> bool) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(lines: &[&str]) -> TypedAhead {
        let mut typed = TypedAhead::default();
        let left = std::cell::RefCell::new(VecDeque::from(lines.to_vec()));
        let mut is_ready = || !left.borrow().is_empty();
        let mut read = || Ok(left.borrow_mut().pop_front().unwrap().as_bytes().to_vec());
        typed.take(&mut is_ready, &mut read, |text| !text.ends_with('\\')).unwrap();
        typed
    }

    #[test]
    fn lines_wait_in_order_and_an_end_behind_them() {
        let question = |text: &str| NextTyped::Question(text.into());
        let mut all = typed(&["one\n", "two\\\n", "lines\n", "", "never\n"]);
        assert_eq!(
            [all.next(), all.next(), all.next()],
            [question("one"), question("two\\\nlines"), NextTyped::End]
        );
        assert_eq!(all.next(), NextTyped::Ask(String::new()));
        // Ctrl-D inside a line hands over the line so far.
        let mut open = typed(&["one\n", "abc"]);
        assert_eq!([open.next(), open.next()], [question("one"), NextTyped::Ask("abc".into())]);
    }
}
