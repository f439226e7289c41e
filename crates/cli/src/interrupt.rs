//! Signals: Ctrl-C keeps what is finished and removes what is temporary; a limit of file sizes is an error like any other.

use crate::fail;
use anemoe_convert::build;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Exit status of an interrupted command.
pub const STATUS: u8 = 130;

/// How long a build may take to come to rest. Leaving sooner loses nothing that is finished: builds survive being killed.
const PATIENCE: Duration = Duration::from_secs(5);

/// The running command ends by itself after [`build::interrupt`].
static RESTS: AtomicBool = AtomicBool::new(false);

/// Installs the handlers. Ctrl-C and the signal of schedulers (SIGTERM) end the process with [`STATUS`], once a build has come
/// to rest and temporary files are removed.
///
/// # Errors
/// The system refuses a handler.
pub fn install(json: bool) -> anyhow::Result<()> {
    // A write beyond `ulimit -f` then fails with a reason; the signal's default ends the process.
    #[cfg(unix)]
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, std::sync::Arc::default())?;
    ctrlc::set_handler(move || {
        build::interrupt();
        if RESTS.load(Ordering::Relaxed) {
            std::thread::sleep(PATIENCE);
        }
        anemoe_io::remove_all_temporary();
        fail::interrupted(json);
        std::process::exit(i32::from(STATUS));
    })?;
    Ok(())
}

/// Announces that the running command ends by itself soon after an interruption.
pub fn comes_to_rest() {
    RESTS.store(true, Ordering::Relaxed);
}
