//! Progress of transfers.

/// Progress of a push, a pull or a download.
#[derive(Clone, Copy, Debug)]
pub struct TransferProgress<'a> {
    /// File that moved last.
    pub file: &'a str,
    /// Bytes moved by this run.
    pub done: u64,
    /// Bytes that this run has to move, as far as known.
    pub total: u64,
}
