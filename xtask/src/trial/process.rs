//! Runs the binary once: without privileges, with limits, and measures its peak memory.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// User id of `nobody` on most systems.
pub const NOBODY: u32 = 65534;

/// Bytes of memory at which a run is killed before it harms the machine.
const END_BYTES: u64 = 3 << 30;
/// Most bytes that a run may write into one file.
const FILE_BYTES: u64 = 1 << 30;

/// Result of a run.
#[derive(Clone, Debug)]
pub struct Ran {
    pub status: ExitStatus,
    /// Limit that ended the run: time or memory.
    pub ended: Option<&'static str>,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub peak_bytes: u64,
    pub seconds: f64,
}

/// Tells whether runs are made as `nobody`, which only root can do.
pub fn drops_rights() -> bool {
    // SAFETY: the call has no arguments and no effect.
    unsafe { libc::geteuid() == 0 }
}

/// Runs a binary in a folder. `logs` is a folder for its output.
pub fn run(binary: &Path, args: &[OsString], folder: &Path, logs: &Path, limit: Duration) -> io::Result<Ran> {
    let (out, err) = (logs.join("stdout"), logs.join("stderr"));
    let mut command = Command::new(binary);
    command.args(args).current_dir(folder).stdin(Stdio::null());
    command.stdout(File::create(&out)?).stderr(File::create(&err)?);
    let tmp = folder.join("tmp");
    command.env_clear().env("TMPDIR", &tmp).env("HOME", &tmp).env("LANG", "C.UTF-8");
    if drops_rights() {
        command.uid(NOBODY).gid(NOBODY);
    }
    // SAFETY: between fork and exec, setrlimit is safe to call, and the closure does nothing else.
    unsafe {
        command.pre_exec(|| {
            let limit = libc::rlimit { rlim_cur: FILE_BYTES, rlim_max: FILE_BYTES };
            match libc::setrlimit(libc::RLIMIT_FSIZE, &limit) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        })
    };
    let start = Instant::now();
    let pid = command.spawn()?.id() as libc::pid_t;
    let mut ended = None;
    let (status, usage) = loop {
        let mut status = 0;
        // SAFETY: `rusage` consists of numbers, for which zeros are valid.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: this function started the child and nobody else waits for it; both pointers point to local values.
        match unsafe { libc::wait4(pid, &mut status, libc::WNOHANG, &mut usage) } {
            0 => {}
            n if n == pid => break (ExitStatus::from_raw(status), usage),
            _ => return Err(io::Error::last_os_error()),
        }
        let since = start.elapsed();
        let resident = resident_bytes(pid);
        if ended.is_none() && (since > limit || resident > END_BYTES) {
            ended = Some(if resident > END_BYTES { "memory" } else { "time" });
            // SAFETY: the child was not waited for yet, so the id is still its own. A failure means that it has ended.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        std::thread::sleep(if since < Duration::from_millis(20) {
            Duration::from_micros(200)
        } else {
            Duration::from_millis(2)
        });
    };
    let seconds = start.elapsed().as_secs_f64();
    // Linux counts KiB, macOS bytes.
    let unit = if cfg!(target_os = "macos") { 1 } else { 1024 };
    let peak_bytes = usage.ru_maxrss as u64 * unit;
    Ok(Ran { status, ended, stdout: fs::read(out)?, stderr: fs::read(err)?, peak_bytes, seconds })
}

/// Returns the resident bytes of a process; 0 on systems without `/proc`.
fn resident_bytes(pid: libc::pid_t) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    text.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) * 4096
}

/// Makes a named pipe.
pub fn make_fifo(path: &Path) -> io::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let name = std::ffi::CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the name ends with a zero byte and lives until the call returns.
    match unsafe { libc::mkfifo(name.as_ptr(), 0o666) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
