//! Serves a bundle over HTTP with OpenAI's API.
//!
//! ```text
//! connection ── http (async): limits, key, parameters, template, tokens ──Job──> batcher (one thread): batches, samples
//!      ^                                                                            │
//!      └───────────────── JSON or server-sent events <──── Events through a Sink ───┘
//! ```
//! The batcher does not depend on HTTP, and [`http`] does not know sequences. [`http`] is the only asynchronous code of
//! the workspace.
//!
//! # Tests
//! Unit tests cover limits of parameters, sizes of chunks and buckets of histograms. `cli/tests/black_box/serve.rs`
//! speaks HTTP with the built binary. `cargo test -p anemoe-server` runs for less than a second, after the compilation.
#![deny(unsafe_code)]

pub mod batching;
mod counters;
mod grammar;
pub mod http;
pub mod listen_host;
mod schema_limits;
mod tool_calls;

pub use anemoe_io::{Error, Result};
