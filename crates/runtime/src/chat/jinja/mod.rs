//! Jinja as Python runs it: the templates of chats are written for Hugging Face transformers, whose values print, compare and
//! compute as Python's do.
//!
//! ```text
//! text --lexer--> tokens --syntax--> ast --template_run--> text        meter: steps, bytes and time of all of it
//!                                          |  calls, items, operators: functions, attributes and arithmetic of values
//!                                          |  filters, filter_text, json_text, checks: what stands behind `|` and `is`
//!                                          |  text_methods, format, print: texts, and values as text
//! ```
//! Lists and maps do not change once they are made, as in the sandbox of transformers: no template can make endless ones, and
//! only scopes and namespaces may hold themselves. Whole numbers have 127 bits.

mod arguments;
mod ast;
mod calls;
mod checks;
mod filter_text;
mod filters;
mod format;
mod items;
mod json_text;
mod lexer;
mod meter;
mod operators;
mod print;
mod py_value;
mod syntax;
mod template_run;
#[cfg(test)]
mod tests;
mod text_methods;

use serde_json::{Map, Value as Json};
use std::time::Instant;

/// Stack of the thread that reads or runs a template, in bytes: what its depth may take, more than twice.
const STACK: usize = 16 << 20;

/// A template that was read.
pub struct Jinja(Vec<ast::TemplateLine>);

/// Runs `f` on a thread with the stack that a template may take.
fn on_own_stack<T: Send>(f: impl FnOnce() -> Result<T, meter::TemplateFault> + Send) -> Result<T, String> {
    let done = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, f);
        let thread = thread.map_err(|e| format!("no thread to run it: {e}"))?;
        thread.join().map_err(|_| "the program that runs it failed".to_string())
    })?;
    done.map_err(|fault| match fault.line {
        0 => fault.what,
        line => format!("{} (line {line})", fault.what),
    })
}

impl Jinja {
    /// Reads a template.
    pub fn parse(text: &str) -> Result<Jinja, String> {
        on_own_stack(|| syntax::parse(text)).map(Jinja)
    }

    /// Runs the template.
    pub fn run(&self, variables: &Map<String, Json>, deadline: Option<Instant>) -> Result<String, String> {
        on_own_stack(|| {
            meter::begin(deadline);
            let pair = |(name, value): (&String, &Json)| {
                Ok((meter::Text::new(name.as_str()), py_value::PyValue::from_json(value)?))
            };
            template_run::run(&self.0, variables.iter().map(pair).collect::<meter::Fallible<_>>()?)
        })
    }
}
