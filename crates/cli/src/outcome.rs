//! Ends of commands.

/// End of a command, besides an error.
pub enum Outcome {
    /// Done, or the gate passed.
    Done,
    /// A gate failed.
    GateFailed,
}

impl Outcome {
    /// Returns the end of a command whose gate passed or failed.
    pub fn of(passed: bool) -> Outcome {
        if passed { Outcome::Done } else { Outcome::GateFailed }
    }
}
