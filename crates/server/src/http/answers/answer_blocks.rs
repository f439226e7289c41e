//! Blocks of an answer, as Anthropic's messages and OpenAI's responses have them.

use crate::tool_calls::{AnswerPart, ToolCall};

/// Kind of a block that grows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum BlockKind {
    /// Text for the user.
    Text,
    /// Thoughts.
    Thought,
}

/// Step in which an answer's blocks grow.
pub enum BlockStep<'a> {
    /// A block begins.
    Begin(BlockKind),
    /// Text is added to the open block.
    Add(String),
    /// The open block ends.
    End(BlockKind),
    /// A call comes, a block by itself.
    Call(&'a ToolCall),
}

/// The open block of an answer. Blanks begin none: they belong to a text that follows.
#[derive(Default)]
pub struct Blocks {
    open: Option<BlockKind>,
    blanks: String,
}

impl Blocks {
    /// Adds a part; returns the steps in which the blocks grow by it.
    pub fn add<'a>(&mut self, part: &'a AnswerPart) -> Vec<BlockStep<'a>> {
        let mut steps = Vec::new();
        let (kind, text) = match part {
            AnswerPart::Text(text) => (BlockKind::Text, text),
            AnswerPart::Thought(text) => (BlockKind::Thought, text),
            AnswerPart::Call(call) => {
                self.blanks.clear();
                steps.extend(self.end());
                steps.push(BlockStep::Call(call));
                return steps;
            }
        };
        let begins = self.open != Some(kind);
        if begins && text.trim().is_empty() {
            self.blanks.push_str(text);
            return steps;
        }
        let mut text = std::mem::take(&mut self.blanks) + text;
        if begins {
            steps.extend(self.end());
            steps.push(BlockStep::Begin(kind));
            self.open = Some(kind);
            if kind == BlockKind::Thought {
                // A line end that parts it from earlier thoughts.
                text.drain(..text.len() - text.trim_start().len());
            }
        }
        steps.push(BlockStep::Add(text));
        steps
    }

    /// Ends the open block.
    pub fn end(&mut self) -> Option<BlockStep<'static>> {
        self.open.take().map(BlockStep::End)
    }
}
