//! What the executor knows of tokens in a function: on which axes they lie, and how the function looks for other numbers of them.

mod resize;

pub(super) use resize::{describe, resize};
