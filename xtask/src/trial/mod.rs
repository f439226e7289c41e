//! placeholder
use crate::{options::Options, Passed};
pub fn run(_o: Options) -> Passed { Ok(true) }
