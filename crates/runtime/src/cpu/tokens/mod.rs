//! Follows tokens through a function: the token axes of its values, the function for other token counts, its stages, and the
//! rows that it carries from call to call.

mod carried;
mod resize;
mod stages;

pub use carried::{Carried, CarriedRows, carried};
pub(super) use carried::{KnownCarried, keep_rows};
pub(super) use resize::{TokenAxis, describe, resize, with_axes};
pub(super) use stages::{Stages, WRITTEN_FOR, stages};
