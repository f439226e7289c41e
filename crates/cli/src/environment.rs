//! Settings that do not belong to one command.

use anemoe_kernels::{Isa, MAX_THREADS as MOST};

/// Returns the threads to compute with, from `--threads` or `ANEMOE_THREADS`; none without either.
pub fn threads(option: Option<usize>) -> anyhow::Result<Option<usize>> {
    let fits = |n: &usize| (1..=MOST).contains(n);
    if let Some(n) = option {
        anyhow::ensure!(fits(&n), "--threads {n} is not a number from 1 to {MOST}");
        return Ok(option);
    }
    let Some(said) = std::env::var_os("ANEMOE_THREADS").filter(|said| !said.is_empty()) else {
        return Ok(None);
    };
    let said = said.to_string_lossy();
    let n = said.parse().ok().filter(fits);
    anyhow::ensure!(n.is_some(), "ANEMOE_THREADS={said} is not a number from 1 to {MOST}");
    Ok(n)
}

/// Checks `ANEMOE_CPU`.
pub fn instructions() -> anyhow::Result<()> {
    Isa::asked_for().map(|_| ()).map_err(anyhow::Error::msg)
}
