//! Option of commands whose steps work in processes of their own.

use std::time::Duration;

/// Time limit of steps.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct StepLimit {
    /// Seconds that a step may take in its process before it is ended: compiling a package, loading it, asking for its plan.
    #[arg(long, value_name = "S", default_value_t = 900, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: u64,
}

impl StepLimit {
    pub fn limit(self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}
