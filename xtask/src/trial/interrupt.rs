//! placeholder
use std::path::Path;
pub fn run(_b: &Path, _s: &Path, _n: u64, _seed: u64, _k: bool) -> crate::Passed {
    Ok(true)
}
