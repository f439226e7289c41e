//! Turns text into tokens and back, and messages of a chat into a prompt.
//!
//! ```text
//! messages --ChatTemplate::render--> text --PromptText::encode--> ids --(a model)--> answer --StopStrings--> shown --ThoughtSplitter--> thoughts, text
//! ```
//! The prompt of a later turn begins with the tokens of the turns before it, so that a sequence goes on from where it stands.
#![deny(unsafe_code)]

pub mod chat;
pub mod tokenizer;

pub use anemoe_io::{Error, Result};
