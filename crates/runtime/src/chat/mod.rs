//! Conversations: messages as a prompt by the model's own template, and answers that end where they should.
//!
//! ```text
//! messages --ChatTemplate::render--> text --PromptText::encode--> ids --generate_behind--> answer --StopStrings--> shown --ThoughtSplitter--> thoughts, text
//! ```
//! The prompt of a later turn begins with the tokens of the turns before it, so that a sequence goes on from where it stands.

mod history;
mod jinja;
mod prompt_text;
mod sampling_defaults;
pub mod session;
mod stop_strings;
mod template;
mod thoughts;

pub use history::{History, Overflow, Turn};
pub use prompt_text::PromptText;
pub use sampling_defaults::SamplingDefaults;
pub use stop_strings::StopStrings;
pub use template::ChatTemplate;
pub use thoughts::{AnswerPiece, ThoughtSplitter};

/// Makes a message of a role, as templates read it.
pub fn message(role: &str, content: &str) -> serde_json::Value {
    serde_json::json!({"role": role, "content": content})
}
