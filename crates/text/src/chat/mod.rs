//! Conversations: messages as a prompt by the model's own template, and answers that end where they should.

mod history;
mod jinja;
mod prompt_text;
mod stop_strings;
mod template;
mod thoughts;

pub use history::{History, Overflow, Turn};
pub use jinja::Jinja;
pub use prompt_text::PromptText;
pub use stop_strings::StopStrings;
pub use template::ChatTemplate;
pub use thoughts::{AnswerPiece, ThoughtSplitter};

/// Makes a message of a role, as templates read it.
pub fn message(role: &str, content: &str) -> serde_json::Value {
    serde_json::json!({"role": role, "content": content})
}
