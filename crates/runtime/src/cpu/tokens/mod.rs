//! Follows tokens through a function: the axes on which they lie, the function for other numbers of them, its stages, and the rows
//! that it carries from call to call.

mod carried;
mod resize;
mod stages;

pub use carried::{Carried, CarriedRows, carried};
pub(super) use resize::{describe, rewrite};
pub(super) use stages::{Stages, WRITTEN_FOR, stages};
