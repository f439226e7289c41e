//! Signals: Ctrl-C keeps finished results and removes temporary ones; a limit of file sizes is an error like any other.

use anemoe_convert::build;
use anemoe_io::locked;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

/// Exit status of a command that Ctrl-C (SIGINT) interrupted: 128 plus the signal's number, as in shells.
pub const BY_CTRL_C: u8 = 130;

/// Time that a build has to come to rest. Leaving sooner loses no finished result, since builds survive being killed.
const PATIENCE: Duration = Duration::from_secs(5);

/// True if the running command ends by itself after [`build::interrupt`].
static RESTS: AtomicBool = AtomicBool::new(false);

/// Reaction of a command to a signal, asked first: takes the exit status, and tells whether the process goes on.
type Handler = Box<dyn FnMut(u8) -> bool + Send>;

/// Handler that [`handle`] installed.
static HANDLER: Mutex<Option<Handler>> = Mutex::new(None);

/// Exit status of the first signal.
static STATUS: AtomicU8 = AtomicU8::new(BY_CTRL_C);

/// Installs the handlers. Ctrl-C, the signal of schedulers (SIGTERM) and the signal of a closed terminal (SIGHUP, unless it
/// is ignored as under `nohup`) end the process with [`status`], once a build has come to rest and temporary files are
/// removed; `last_words` tells the user.
pub fn install(last_words: impl Fn() + Send + 'static) -> anyhow::Result<()> {
    #[cfg(unix)]
    {
        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
        // A write beyond `ulimit -f` fails with an error, instead of ending the process by the signal's default.
        signal_hook::flag::register(SIGXFSZ, std::sync::Arc::default())?;
        let mut wanted = vec![SIGINT, SIGTERM];
        if !is_ignored(SIGHUP) {
            wanted.push(SIGHUP);
        }
        let mut signals = signal_hook::iterator::Signals::new(wanted)?;
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                let status = u8::try_from(128 + signal).unwrap_or(BY_CTRL_C);
                if !is_handled(status) {
                    STATUS.store(status, Ordering::Relaxed);
                    end(&last_words);
                }
            }
        })?;
    }
    #[cfg(not(unix))]
    ctrlc::set_handler(move || {
        if !is_handled(BY_CTRL_C) {
            end(&last_words);
        }
    })?;
    Ok(())
}

/// Lets a command handle signals itself: `handler` takes the exit status of each signal, [`BY_CTRL_C`] for Ctrl-C, and
/// returns whether the process goes on.
pub fn handle(handler: impl FnMut(u8) -> bool + Send + 'static) {
    *locked(&HANDLER) = Some(Box::new(handler));
}

fn is_handled(status: u8) -> bool {
    locked(&HANDLER).as_mut().is_some_and(|handler| handler(status))
}

/// Ends the process with [`status`], after a build has come to rest and temporary files are removed.
fn end(last_words: &dyn Fn()) {
    build::interrupt();
    if RESTS.load(Ordering::Relaxed) {
        std::thread::sleep(PATIENCE);
    }
    anemoe_io::remove_all_temporary();
    last_words();
    std::process::exit(i32::from(status()));
}

/// Returns the exit status of an interrupted command.
pub fn status() -> u8 {
    STATUS.load(Ordering::Relaxed)
}

/// Tells whether the process was started with this signal ignored; false where the system does not tell.
#[cfg(unix)]
fn is_ignored(signal: i32) -> bool {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = text.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

/// Announces that the running command ends by itself soon after an interruption.
pub fn announce_rest() {
    RESTS.store(true, Ordering::Relaxed);
}
