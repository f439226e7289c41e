//! Ctrl-C: finish what cannot be left half-done, keep what is finished, exit status 130.

use anemoe_convert::build;
use std::time::Duration;

/// Exit status of an interrupted command.
pub const STATUS: u8 = 130;

/// How long a command may take to come to rest. Leaving sooner loses nothing that is finished: builds survive being killed.
const PATIENCE: Duration = Duration::from_secs(5);

/// From now on Ctrl-C and the signal of schedulers (SIGTERM) ask builds to stop; one that does not come to rest is left.
///
/// # Errors
/// The system refuses a handler.
pub fn install() -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        build::interrupt();
        std::thread::sleep(PATIENCE);
        std::process::exit(i32::from(STATUS));
    })?;
    Ok(())
}
