//! A request to stop: builds end between two matrices, and leave nothing half-written.

use crate::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Asks every build of this process to stop; safe in a signal handler.
pub fn request() {
    REQUESTED.store(true, Ordering::Relaxed);
}

/// Checks that no stop was requested.
///
/// # Errors
/// [`Kind::Interrupted`](anemoe_io::Kind::Interrupted) once [`request`] was called.
pub fn check() -> Result<()> {
    if REQUESTED.load(Ordering::Relaxed) { Err(Error::interrupted()) } else { Ok(()) }
}
