//! Finds tool calls in an answer that arrives in pieces.

use super::{AnswerPart, CallForm, ToolCall};

/// Finds tool calls in an answer that arrives in pieces. Holds back text that may begin a call, and blanks before it.
#[derive(Clone)]
pub struct CallParser {
    form: CallForm,
    /// Names of the request's tools.
    names: Vec<String>,
    /// Text that is held back.
    held: String,
    /// True if the begin tag came, but not the end tag.
    is_inside: bool,
    /// True if the answer begins with other text, so that it is no call.
    is_text: bool,
}

impl CallParser {
    /// Makes a parser of calls of the tools `names`.
    pub fn new(form: CallForm, names: Vec<String>) -> CallParser {
        CallParser { form, names, held: String::new(), is_inside: false, is_text: false }
    }

    /// Adds a piece of the answer. Returns the parts that are certain now.
    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        self.held.push_str(piece);
        let mut parts = Vec::new();
        match self.form.tags.clone() {
            Some((begin, end)) => self.push_tagged(&begin, &end, &mut parts),
            None => {
                let start = self.held.trim_start();
                self.is_text |= !start.is_empty() && !start.starts_with('{');
                if self.is_text {
                    add_text(&mut parts, std::mem::take(&mut self.held));
                }
            }
        }
        parts
    }

    fn push_tagged(&mut self, begin: &str, end: &str, parts: &mut Vec<AnswerPart>) {
        loop {
            let tag = if self.is_inside { end } else { begin };
            let Some(at) = self.held.find(tag) else { break };
            let rest = self.held.split_off(at + tag.len());
            let mut before = std::mem::replace(&mut self.held, rest);
            before.truncate(at);
            match (self.is_inside, self.form.read(&before)) {
                // Blanks before a call are not part of the text.
                (false, _) => add_text(parts, before.trim_end().to_string()),
                (true, Some(calls)) => parts.extend(calls.into_iter().map(AnswerPart::Call)),
                (true, None) => add_text(parts, format!("{begin}{before}{end}")),
            }
            self.is_inside = !self.is_inside;
        }
        if !self.is_inside {
            // Text that may begin a tag, and blanks before it.
            let (tag, held) = (begin.as_bytes(), self.held.as_bytes());
            let kept = (1..tag.len()).rev().find(|n| held.ends_with(&tag[..*n]));
            let shown = self.held[..self.held.len() - kept.unwrap_or(0)].trim_end().len();
            let held = self.held.split_off(shown);
            add_text(parts, std::mem::replace(&mut self.held, held));
        }
    }

    /// Returns the parts of the held text when the answer has ended; a complete call without its end tag counts.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        let held = std::mem::take(&mut self.held);
        let mut parts = Vec::new();
        let is_known = |calls: &Vec<ToolCall>| calls.iter().all(|call| self.names.contains(&call.name));
        let calls = match &self.form.tags {
            Some(_) if self.is_inside => self.form.read(&held),
            Some(_) => None,
            None => self.form.read(&held).filter(is_known),
        };
        match (calls, &self.form.tags) {
            (Some(calls), _) => parts.extend(calls.into_iter().map(AnswerPart::Call)),
            (None, Some((begin, _))) if self.is_inside => add_text(&mut parts, format!("{begin}{held}")),
            (None, _) => add_text(&mut parts, held),
        }
        self.is_inside = false;
        parts
    }
}

fn add_text(parts: &mut Vec<AnswerPart>, text: String) {
    if !text.is_empty() {
        parts.push(AnswerPart::Text(text));
    }
}
