//! Serves a bundle over HTTP, as OpenAI's API does.
//!
//! ```text
//! connection ── http (async): limits, key, parameters, template, tokens ──Job──> engine (one thread): batches, samples
//!      ^                                                                            │
//!      └───────────────── JSON or server-sent events <──── Events through a Sink ───┘
//! ```
//! The engine knows nothing of HTTP, and [`http`] nothing of sequences. [`http`] is the only asynchronous code of the workspace.
//!
//! # Tests
//! Beside the code: limits of parameters, sizes of chunks, buckets of histograms. `cli/tests/black_box/serve.rs` speaks HTTP with the built
//! binary. `cargo test -p anemoe-server` runs for less than a second, besides the compilation.
#![deny(unsafe_code)]

pub mod batching;
mod counters;
mod grammar;
pub mod http;
mod schema_limits;
mod tool_calls;

pub use anemoe_io::{Error, Result};
