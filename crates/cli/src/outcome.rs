//! Ends of commands.

/// End of a command, besides an error.
pub enum Outcome {
    /// Done, or the gate passed.
    Done,
    /// A gate failed.
    GateFailed,
}
