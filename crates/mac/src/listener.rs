//! Messages and progress of long work.

/// Shows a user how long work goes on.
pub trait Listener {
    /// Shows a message.
    fn message(&self, text: &str);

    /// Shows that `done` of `total` parts of `what` are done, and `part` is next.
    fn progress(&self, what: &str, part: &str, done: usize, total: usize);
}
