//! Tests of packages, and of chat templates. They are one binary, since linking each takes seconds.

mod chat_templates;
mod interop;
mod memory;
mod refused;
mod sparsity;
