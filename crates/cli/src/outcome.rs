//! Ends of commands.

/// End of a command, besides an error.
pub enum Outcome {
    /// Done, or the gate passed.
    Done,
    /// A gate failed.
    GateFailed,
}

impl Outcome {
    /// Returns the end of a command that ran a gate.
    pub fn of_gate(pass: bool) -> Outcome {
        if pass { Outcome::Done } else { Outcome::GateFailed }
    }
}
