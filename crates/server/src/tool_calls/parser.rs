//! Finds tool calls in an answer that arrives in pieces.

use super::call_reader::{ARGUMENTS, Guess, Tools};
use super::{AnswerPart, CallForm};
use serde_json::Value;
use std::sync::Arc;

/// Mark before and after a block of code.
const FENCE: &str = "```";

/// Finds tool calls in an answer that arrives in pieces. Holds back text as long as it may begin a call, and blanks
/// before it. The parts do not depend on how the answer is cut.
#[derive(Clone)]
pub struct CallParser {
    form: CallForm,
    tools: Arc<Tools>,
    /// True if a call ends the answer.
    is_single: bool,
    /// True if the answer has to be a call.
    is_forced: bool,
    state: ParserState,
    /// Blanks that are not part of the text if a call follows.
    blanks: String,
    /// Text that is held back, without a tag before it.
    held: String,
    /// True if the held text begins a line.
    is_line_start: bool,
    /// True if anything but blanks came before the held text.
    is_begun: bool,
    /// True if a block of code began with the tag of the last call; its end is no text.
    is_fenced: bool,
    /// End tag of a call within a text in JSON, if the call goes on behind it.
    inner: Option<InnerTag>,
    /// True if end tags within texts are looked for.
    is_strict: bool,
}

/// State of the parser.
#[derive(Clone)]
enum ParserState {
    /// Text; what is held may become a tag or a call without a tag.
    Text,
    /// A call behind a tag. The guess is that of the held text.
    Tagged { tag: String, guess: Guess },
    /// A call without a tag before it, at the beginning of a line or within one.
    Untagged { is_line_start: bool },
    /// A call came, and the answer has only one.
    Done,
}

/// End tag within a text in JSON.
#[derive(Clone)]
struct InnerTag {
    tag: String,
    /// Place of the tag in the held text.
    at: usize,
    /// Place behind the last such tag.
    seen: usize,
}

impl CallParser {
    /// Makes a parser of calls of the request's `tools`, in the form of requests.
    pub fn new(form: CallForm, tools: &[Value]) -> CallParser {
        CallParser {
            form,
            tools: Arc::new(Tools::new(tools)),
            is_single: false,
            is_forced: false,
            state: ParserState::Text,
            blanks: String::new(),
            held: String::new(),
            is_line_start: true,
            is_begun: false,
            is_fenced: false,
            inner: None,
            is_strict: true,
        }
    }

    /// Makes the first call the end of the answer (`parallel_tool_calls: false`).
    pub fn single(self) -> CallParser {
        CallParser { is_single: true, ..self }
    }

    /// Makes the answer a call alone: what is cut is no text.
    pub fn forced(self) -> CallParser {
        CallParser { is_forced: true, ..self }
    }

    /// Adds a piece of the answer. Returns the parts that are certain now.
    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        piece.chars().for_each(|c| self.add(c, &mut parts));
        parts
    }

    fn add(&mut self, c: char, parts: &mut Vec<AnswerPart>) {
        match &mut self.state {
            ParserState::Done => {}
            ParserState::Text => {
                if self.held.is_empty() && c.is_whitespace() {
                    self.is_line_start |= c == '\n';
                    self.blanks.push(c);
                } else {
                    self.held.push(c);
                    self.decide(parts);
                }
            }
            ParserState::Tagged { .. } | ParserState::Untagged { .. } => {
                self.held.push(c);
                let ends = |tag: &&str| tag.ends_with(c) && self.held.ends_with(tag);
                let (mut end, mut begin) = (None, None);
                if ">].=".contains(c) {
                    end = self.form.ends().find(ends).map(String::from);
                    begin = self.form.begins().filter(ends).max_by_key(|tag| tag.len()).map(String::from);
                }
                if self.inner.is_some() && begin.is_some() {
                    self.cut(parts);
                } else if let Some(tag) = end {
                    if self.is_inner(&tag) {
                        return;
                    }
                    if self.inner.is_some() && !self.is_json(self.held.len() - tag.len()) {
                        return self.cut(parts);
                    }
                    self.inner = None;
                    self.held.truncate(self.held.len() - tag.len());
                    self.close(&tag, parts);
                } else if let Some(tag) = begin {
                    // The end tag is missing.
                    self.held.truncate(self.held.len() - tag.len());
                    self.close("", parts);
                    if !matches!(self.state, ParserState::Done) {
                        self.state = ParserState::Tagged { tag, guess: Guess::Unsure };
                    }
                } else if let ParserState::Tagged { guess, .. } = &mut self.state
                    && *guess == Guess::Unsure
                {
                    *guess = self.tools.guess(&self.held, &self.form.marks(), true);
                    if *guess == Guess::No {
                        self.release("", parts);
                    }
                }
            }
        }
    }

    /// Tells whether the end tag of the held text stands within a text in JSON, and notes it then.
    fn is_inner(&mut self, tag: &str) -> bool {
        let at = self.held.len() - tag.len();
        let seen = self.inner.as_ref().map_or(0, |inner| inner.seen);
        let (mut is_text, mut chars) = (seen > 0, self.held[seen..at].chars());
        while let Some(c) = chars.next() {
            is_text ^= c == '"';
            if c == '\\' {
                chars.next();
            }
        }
        let is_inner = is_text && self.is_strict && self.held.trim_start().starts_with(['{', '[']);
        if is_inner {
            let inner = self.inner.get_or_insert(InnerTag { tag: tag.into(), at, seen });
            inner.seen = self.held.len();
        }
        is_inner
    }

    fn is_json(&self, end: usize) -> bool {
        serde_json::from_str::<serde::de::IgnoredAny>(&self.held[..end]).is_ok()
    }

    /// Ends a call at the first end tag after all, since what follows is no JSON.
    fn cut(&mut self, parts: &mut Vec<AnswerPart>) {
        let Some(inner) = self.inner.take() else { return };
        let rest = self.held.split_off(inner.at + inner.tag.len());
        self.held.truncate(inner.at);
        self.is_strict = false;
        self.close(&inner.tag, parts);
        rest.chars().for_each(|c| self.add(c, parts));
        self.is_strict = true;
    }

    /// Decides whether the held text begins a tag, a call, or is text.
    fn decide(&mut self, parts: &mut Vec<AnswerPart>) {
        loop {
            if self.is_fenced && self.held == FENCE {
                self.held.clear();
                self.blanks.clear();
                self.is_fenced = false;
                return;
            }
            let body = self.body();
            if self.form.begins().any(|tag| tag == body) {
                let tag = std::mem::take(&mut self.held);
                self.state = ParserState::Tagged { tag, guess: Guess::Unsure };
                return;
            }
            if self.held.is_empty() || self.may_begin_tag() {
                return;
            }
            if self.is_line_start || !self.blanks.is_empty() {
                match self.tools.guess(&self.held, &self.form.marks(), false) {
                    Guess::Yes => {
                        self.state = ParserState::Untagged { is_line_start: self.is_line_start };
                        return;
                    }
                    Guess::Unsure => return,
                    Guess::No => {}
                }
            }
            // The first character is text; the next one may begin a tag.
            let rest = self.held.split_off(self.held.chars().next().map_or(0, char::len_utf8));
            let first = std::mem::replace(&mut self.held, rest);
            self.text(&first, parts);
            while let Some(blank) = self.held.chars().next().filter(|c| c.is_whitespace()) {
                self.is_line_start |= blank == '\n';
                self.blanks.push(blank);
                self.held.remove(0);
            }
        }
    }

    /// Returns the held text, without the line that begins a block of code: such a block may begin with a tag.
    fn body(&self) -> &str {
        let fenced = self.held.strip_prefix(FENCE).filter(|_| self.is_line_start);
        let body = fenced.and_then(|fenced| fenced.split_once('\n')).map(|(_, inner)| inner.trim_start());
        body.unwrap_or(&self.held)
    }

    /// Tells whether the held text may become a tag before a call.
    fn may_begin_tag(&self) -> bool {
        let body = self.body();
        !body.is_empty() && self.form.begins().any(|tag| tag.starts_with(body))
    }

    /// Tells whether the held text is a call, or a tag before one, that the end of the answer cut.
    fn is_unfinished(&self) -> bool {
        match self.state {
            _ if self.is_forced => true,
            ParserState::Text => self.may_begin_tag(),
            ParserState::Tagged { .. } => true,
            // An object may be anything else.
            ParserState::Untagged { is_line_start } if self.held.starts_with(['{', '[', '`']) => {
                is_line_start && !self.is_begun && self.tools.know_name(&self.held)
            }
            ParserState::Untagged { is_line_start } => is_line_start || self.held.starts_with('<'),
            ParserState::Done => false,
        }
    }

    /// Emits text, with the blanks before it.
    fn text(&mut self, text: &str, parts: &mut Vec<AnswerPart>) {
        let is_empty = self.blanks.is_empty() && text.is_empty();
        if !is_empty && !matches!(parts.last(), Some(AnswerPart::Text(_))) {
            parts.push(AnswerPart::Text(String::new()));
        }
        if let Some(AnswerPart::Text(all)) = parts.last_mut() {
            *all += &std::mem::take(&mut self.blanks);
            *all += text;
        }
        self.is_begun |= !text.is_empty();
        self.is_fenced &= text.is_empty();
        self.is_line_start = text.ends_with('\n');
    }

    /// Emits the held text, with the tags around it.
    fn release(&mut self, end: &str, parts: &mut Vec<AnswerPart>) {
        let held = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.state, ParserState::Text) {
            ParserState::Tagged { tag, .. } => self.text(&format!("{tag}{held}{end}"), parts),
            _ => self.text(&format!("{held}{end}"), parts),
        }
    }

    /// Ends a call at its end tag; at an empty one another tag or the end of the answer follows.
    fn close(&mut self, end: &str, parts: &mut Vec<AnswerPart>) {
        let is_tagged = matches!(self.state, ParserState::Tagged { .. }) || !end.is_empty();
        match self.calls(is_tagged, true) {
            Some(calls) => self.emit(calls, parts),
            None => self.release(end, parts),
        }
    }

    /// Reads the held text as calls.
    fn calls(&self, is_tagged: bool, is_ended: bool) -> Option<Vec<super::ToolCall>> {
        let marks = self.form.marks();
        // Without tags, an object is a call if it is the whole answer and has arguments; what a word marks begins a line.
        let is_object = self.held.starts_with(['{', '[', '`']);
        let has_arguments = || ARGUMENTS.iter().any(|key| self.held.contains(key));
        let is_line_start = !matches!(self.state, ParserState::Untagged { is_line_start: false });
        let is_meant = is_tagged || is_line_start && (!is_object || !self.is_begun && has_arguments());
        self.tools.read(&self.held, &marks, is_ended).filter(|_| is_meant)
    }

    fn emit(&mut self, calls: Vec<super::ToolCall>, parts: &mut Vec<AnswerPart>) {
        let most = if self.is_single { 1 } else { usize::MAX };
        parts.extend(calls.into_iter().take(most).map(AnswerPart::Call));
        self.blanks.clear();
        self.held.clear();
        self.is_fenced |= matches!(&self.state, ParserState::Tagged { tag, .. } if tag.starts_with(FENCE));
        self.is_begun = true;
        self.is_line_start = true;
        self.state = if self.is_single { ParserState::Done } else { ParserState::Text };
    }

    /// Returns the parts of the held text when the answer has ended. A call without its end tag counts; if the answer
    /// `is_cut` at its most tokens, only a complete one, and what has come of another is no text.
    pub fn finish(&mut self, is_cut: bool) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        if self.inner.is_some() && !self.is_json(self.held.len()) {
            self.cut(&mut parts);
        }
        let is_tagged = matches!(self.state, ParserState::Tagged { .. });
        match &self.state {
            ParserState::Done => {}
            ParserState::Text if is_cut && self.is_unfinished() => self.held.clear(),
            ParserState::Text => self.release("", &mut parts),
            ParserState::Tagged { .. } | ParserState::Untagged { .. } => match self.calls(is_tagged, !is_cut)
            {
                Some(calls) => self.emit(calls, &mut parts),
                None if is_cut && self.is_unfinished() => self.held.clear(),
                None => self.release("", &mut parts),
            },
        }
        parts
    }
}
