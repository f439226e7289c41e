//! How commands end.

/// What a command ends with, besides an error.
pub enum Outcome {
    /// Done, or the gate passed.
    Done,
    /// A gate failed.
    GateFailed,
}
