//! The child, and how its parent waits for it.

use super::Work;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Exit status of a child whose parent is gone.
const ORPHANED: i32 = 3;
/// Pause between two looks at a child.
const PAUSE: Duration = Duration::from_millis(5);
/// Bytes of a child's last words that are kept.
const LAST_WORDS: usize = 2000;
/// Most bytes of a reply: the plan of a large package has some thousand ops.
const MAX_REPLY: u64 = 256 << 20;

/// End of a child's work.
#[derive(Clone, Debug)]
pub enum Ended {
    /// The work is done; what it found.
    Done(Value),
    /// The work was refused, with this message.
    Failed(String),
    /// The process ended without a reply.
    Crashed {
        /// Signal or exit status.
        how: String,
        /// Its last words.
        said: String,
    },
    /// It was ended because it took too long.
    TimedOut {
        /// Seconds after which it was ended.
        seconds: f64,
        /// Its last words.
        said: String,
    },
}

impl Ended {
    /// Says how a child without a result ended, with its last words; nothing of one that is done.
    pub fn reason(&self) -> String {
        let (how, said) = match self {
            Ended::Done(_) => return String::new(),
            Ended::Failed(message) => return message.clone(),
            Ended::Crashed { how, said } => (how.clone(), said),
            Ended::TimedOut { seconds, said } => (format!("no end after {seconds:.0} s (--timeout)"), said),
        };
        if said.is_empty() { how } else { format!("{how}: {said}") }
    }
}

/// Reply of a child, on the last line of its standard output.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reply {
    Done(Value),
    Failed(String),
}

/// Does `work` in a child and waits for it, at most as long as `limit`.
///
/// # Errors
/// No process can be started.
pub fn in_child(work: &Work, limit: Duration) -> anyhow::Result<Ended> {
    let program = std::env::current_exe().context("the path of this program")?;
    let mut command = Command::new(program);
    command.arg("step").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let started = Instant::now();
    let mut child = command.spawn().context("a child process")?;
    let replies = child.stdout.take().map(|out| reader(out, MAX_REPLY));
    let speaks = work.speaks();
    let words = child.stderr.take().map(|err| last_words(err, speaks));
    let mut input = child.stdin.take();
    if let Some(input) = &mut input {
        // A child that ended already says so by its status.
        let _ = writeln!(input, "{}", serde_json::to_string(work)?).and_then(|()| input.flush());
    }
    let status = wait(&mut child, started, limit)?;
    drop(input);
    let said = words.map(join).unwrap_or_default();
    let Some(status) = status else {
        return Ok(Ended::TimedOut { seconds: started.elapsed().as_secs_f64(), said });
    };
    let reply = replies.map(join).unwrap_or_default();
    let last = reply.lines().rev().find_map(|line| serde_json::from_str::<Reply>(line).ok());
    Ok(match last {
        Some(Reply::Done(value)) if status.success() => Ended::Done(value),
        // What Core ML's compiler says, it says there.
        Some(Reply::Failed(what)) if !said.is_empty() && !speaks => Ended::Failed(format!("{what}; {said}")),
        Some(Reply::Failed(what)) => Ended::Failed(what),
        _ => Ended::Crashed { how: describe(status), said },
    })
}

/// Waits for a child; none if it had to be ended.
fn wait(child: &mut Child, started: Instant, limit: Duration) -> anyhow::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if started.elapsed() >= limit {
            // It may have ended meanwhile.
            let _ = child.kill();
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(PAUSE);
    }
}

fn reader(from: impl Read + Send + 'static, most: u64) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.take(most).read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Keeps the end of what is said: a child that talks without end takes no memory. Repeats it where the user reads along.
fn last_words(mut from: impl Read + Send + 'static, speaks: bool) -> JoinHandle<String> {
    thread::spawn(move || {
        let (mut kept, mut piece) = (Vec::new(), [0; 4096]);
        while let Ok(n @ 1..) = from.read(&mut piece) {
            if speaks {
                // That nobody can read it is no error.
                let _ = std::io::stderr().write_all(&piece[..n]);
            }
            kept.extend_from_slice(&piece[..n]);
            let beyond = kept.len().saturating_sub(LAST_WORDS);
            kept.drain(..beyond);
        }
        String::from_utf8_lossy(&kept).trim().to_string()
    })
}

fn join(thread: JoinHandle<String>) -> String {
    thread.join().unwrap_or_default()
}

#[cfg(unix)]
fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match status.signal() {
        Some(6) => "signal 6 (abort)".into(),
        Some(9) => "signal 9 (killed, which the system does for want of memory)".into(),
        Some(10) => "signal 10 (bus error on macOS)".into(),
        Some(11) => "signal 11 (segmentation fault)".into(),
        Some(n) => format!("signal {n}"),
        None => format!("exit status {}", status.code().unwrap_or(-1)),
    }
}

#[cfg(not(unix))]
fn describe(status: ExitStatus) -> String {
    format!("{status}")
}

/// The child's side: reads its work, does it with `work` and replies.
///
/// # Errors
/// Standard input holds no work.
pub fn serve(work: impl FnOnce(Work) -> anyhow::Result<Value>) -> anyhow::Result<()> {
    let mut line = String::new();
    let mut input = BufReader::new(std::io::stdin());
    input.read_line(&mut line)?;
    let asked: Work = serde_json::from_str(&line)
        .map_err(|_| anyhow::anyhow!("`step` is for anemoe itself: it does one step of another command"))?;
    thread::spawn(move || {
        let _ = std::io::copy(&mut input, &mut std::io::sink());
        anemoe_io::remove_all_temporary();
        std::process::exit(ORPHANED);
    });
    let reply = match work(asked) {
        Ok(value) => Reply::Done(value),
        Err(e) => Reply::Failed(format!("{e:#}")),
    };
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{}", serde_json::to_string(&reply)?)?;
    Ok(out.flush()?)
}
