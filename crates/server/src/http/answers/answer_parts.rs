//! Parts of an answer.

use crate::batching::{ChosenToken, EndReason, Usage};
use crate::tool_calls::{AnswerPart, ToolCall};

/// Answer to one prompt, so far or whole.
#[derive(Default)]
pub struct ChoiceAnswer {
    /// Parts; neighbours of the same kind are one part.
    pub parts: Vec<AnswerPart>,
    /// Tokens with probabilities, where wanted.
    pub choices: Vec<ChosenToken>,
    /// Index of the part that was the last one when each of these tokens had come.
    pub places: Vec<usize>,
    /// Reason why the answer ended; `None` before that.
    pub reason: Option<EndReason>,
    /// Stop string that ended it.
    pub stop: Option<String>,
}

impl ChoiceAnswer {
    /// Adds a part.
    pub fn add(&mut self, part: AnswerPart) {
        match (self.parts.last_mut(), part) {
            (Some(AnswerPart::Text(last)), AnswerPart::Text(text))
            | (Some(AnswerPart::Thought(last)), AnswerPart::Thought(text)) => {
                last.push_str(&text);
            }
            (_, part) => self.parts.push(part),
        }
    }

    /// Returns all text for the user.
    pub fn text(&self) -> String {
        self.parts.iter().map(|part| if let AnswerPart::Text(text) = part { text } else { "" }).collect()
    }

    /// Returns the thoughts; `None` where there are none.
    pub fn thoughts(&self) -> Option<String> {
        let text = |part: &AnswerPart| {
            if let AnswerPart::Thought(text) = part { text.clone() } else { String::new() }
        };
        Some(self.parts.iter().map(text).collect()).filter(|all: &String| !all.is_empty())
    }

    /// Returns the calls.
    pub fn calls(&self) -> impl Iterator<Item = &ToolCall> {
        self.parts.iter().filter_map(|part| if let AnswerPart::Call(call) = part { Some(call) } else { None })
    }
}

/// Token counts of all answers to a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct AnswerCounts {
    /// Tokens of prompts and answers.
    pub usage: Usage,
    /// New tokens of thoughts.
    pub thoughts: usize,
}

impl AnswerCounts {
    /// Adds the counts of a choice; the prompt of several choices counts once.
    pub fn add(&mut self, usage: Usage, is_first_of_prompt: bool) {
        if is_first_of_prompt {
            self.usage.prompt += usage.prompt;
            self.usage.reused += usage.reused;
        }
        self.usage.generated += usage.generated;
    }
}
