//! What the executor knows of tokens in a function: on which axes they lie, how the function looks for other numbers of them, and
//! what it carries from call to call.

mod carried;
mod resize;
mod stages;

pub(super) use carried::{Carried, carried};
pub(super) use resize::{describe, resize};
pub(super) use stages::{Stage, Stages, WRITTEN_FOR, stages};
