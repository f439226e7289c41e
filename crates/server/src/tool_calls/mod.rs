//! Tool calls in the text of an answer.
//!
//! ```text
//! JSON     some words <tool_call>{"name": "f", "arguments": {..}}</tool_call> <tool_call>..     Qwen, Hermes
//!          [TOOL_CALLS] [{"name": "f", "arguments": {..}}]                                      Mistral
//!          {"name": "f", "parameters": {..}}                                                    Llama 3; the whole answer
//! Braces   <|tool_call>call:f{key:<|"|>text<|"|>,n:[1,true]}<tool_call|>                        Gemma 4
//! Named    [TOOL_CALLS]f[ARGS]{..}                                                              Mistral
//!          <|channel|>commentary to=functions.f <|constrain|>json<|message|>{..}<|call|>        gpt-oss
//! Tags     <tool_call><function=f><parameter=key>text</parameter></function></tool_call>        Qwen 3 Coder
//! ```
//!
//! The form of a model is found by rendering a marker call with its template. Templates that write calls in another way
//! have no form here: their calls stay text. The form says where calls begin and end; [`call_reader`] takes what stands there in
//! any syntax, since small models mix them, and [`values`] reads arguments by the schema of the tool. A call of a tool
//! that the request does not have stays text.

mod call_form;
mod call_grammar;
mod call_reader;
mod call_syntax;
mod parser;
mod schema;
mod text_patterns;
mod values;

pub use call_form::CallForm;
pub use parser::CallParser;

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// Name of the tool.
    pub name: String,
    /// Arguments as JSON text.
    pub arguments: String,
}

/// Part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// Thoughts.
    Thought(String),
    /// Text for the user.
    Text(String),
    /// A tool call.
    Call(ToolCall),
}

#[cfg(test)]
mod tests;
