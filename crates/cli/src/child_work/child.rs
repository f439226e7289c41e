//! The child process, and how its parent waits for it.

use super::Work;
use crate::error_report::sentence;
use anemoe_io::locked;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Exit status of a child whose parent is gone.
const ORPHANED: i32 = 3;
/// Pause between two checks of a child.
const PAUSE: Duration = Duration::from_millis(5);
/// Bytes that are kept of the end of a child's standard error.
const STDERR_END: usize = 2000;
/// Longest line of a child's standard output, in bytes: the plan of a large package has some thousand ops.
const MAX_LINE: u64 = 256 << 20;
/// Line that tells a child that it may stop.
const STOP: &str = "stop";
/// Least time between two reports of progress.
const BETWEEN_REPORTS: Duration = Duration::from_secs(1);
/// Progress after which a report is sent sooner, so that a parent misses less than this of a child that crashes.
const STEP_OF_REPORTS: u64 = 50;

/// End of a child's work.
#[derive(Clone, Debug)]
pub enum Ended {
    /// The work is done, with this result.
    Done(Value),
    /// The work was refused, with this message.
    Failed(String),
    /// The process ended without a reply.
    Crashed {
        /// Signal or exit status of the process.
        how: String,
        /// End of the child's standard error.
        said: String,
    },
    /// The process was ended because it took too long.
    TimedOut {
        /// Limit that the process exceeded.
        limit: Limit,
        /// End of the child's standard error.
        said: String,
    },
}

/// Limit of a child's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Time for all of the work.
    Whole(Duration),
    /// Time without progress: before the first report, between two, and after the last. The whole work has no limit.
    Silence(Duration),
}

impl Limit {
    /// Returns the reason for a child that was ended, in words.
    fn reason(self) -> String {
        match self {
            Limit::Whole(limit) => format!("no end after {:.0} s (--timeout)", limit.as_secs_f64()),
            Limit::Silence(limit) => format!("no progress for {:.0} s (--timeout)", limit.as_secs_f64()),
        }
    }
}

impl Ended {
    /// Returns how a child without a result ended, with the end of its standard error; empty for a child that is done.
    pub fn reason(&self) -> String {
        let (how, said) = match self {
            Ended::Done(_) => return String::new(),
            Ended::Failed(message) => return message.clone(),
            Ended::Crashed { how, said } => (how.clone(), said),
            Ended::TimedOut { limit, said } => (limit.reason(), said),
        };
        if said.is_empty() { how } else { format!("{how}: {said}") }
    }
}

/// Line of a child's standard output.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reply {
    /// Report of progress: a number that the work counts.
    Progress(u64),
    /// The work is done; the last line.
    Done(Value),
    /// The work was refused; the last line.
    Failed(String),
}

/// Reports of a child so far.
struct Heard {
    progress: AtomicU64,
    /// Time of the last report, or of the child's start.
    at: Mutex<Instant>,
}

/// A child at work.
pub struct Worker {
    child: Child,
    input: Option<ChildStdin>,
    started: Instant,
    heard: Arc<Heard>,
    speaks: bool,
    replies: Option<JoinHandle<Option<Reply>>>,
    words: Option<JoinHandle<String>>,
}

impl Worker {
    /// Starts a child that does `work`.
    ///
    /// # Errors
    /// No process can be started.
    pub fn start(work: &Work) -> anyhow::Result<Worker> {
        let program = std::env::current_exe().context("the path of this program")?;
        let mut command = Command::new(program);
        command.arg("step").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let started = Instant::now();
        let mut child = command.spawn().context("a child process")?;
        let heard = Arc::new(Heard { progress: AtomicU64::new(0), at: Mutex::new(started) });
        let replies = child.stdout.take().map(|out| listen(out, heard.clone())).transpose()?;
        let speaks = work.speaks();
        let words = child.stderr.take().map(|err| last_words(err, speaks)).transpose()?;
        let mut input = child.stdin.take();
        if let Some(input) = &mut input {
            // The exit status tells of a child that ended already.
            let _ = writeln!(input, "{}", serde_json::to_string(work)?).and_then(|()| input.flush());
        }
        Ok(Worker { child, input, started, heard, speaks, replies, words })
    }

    /// Returns the last number that the child has reported; 0 before.
    pub fn progress(&self) -> u64 {
        self.heard.progress.load(Ordering::SeqCst)
    }

    /// Tells the child that it may stop, if its work has no end of its own.
    pub fn stop(&mut self) {
        if let Some(input) = &mut self.input {
            // A child that ended already needs no message.
            let _ = writeln!(input, "{STOP}").and_then(|()| input.flush());
        }
    }

    /// Waits until the child has reported something or has ended, at most for `limit`; returns whether it has reported.
    ///
    /// # Errors
    /// The system does not tell the state of the child.
    pub fn wait_for_progress(&mut self, limit: Duration) -> anyhow::Result<bool> {
        while self.progress() == 0 && self.started.elapsed() < limit {
            if self.child.try_wait()?.is_some() {
                break;
            }
            thread::sleep(PAUSE);
        }
        Ok(self.progress() > 0)
    }

    /// Waits for the end of the child, and ends a child that exceeds `limit`.
    ///
    /// # Errors
    /// The system does not tell the state of the child.
    pub fn wait(&mut self, limit: Limit) -> anyhow::Result<Ended> {
        let status = self.status_within(limit)?;
        drop(self.input.take());
        let said = self.words.take().map(join).unwrap_or_default();
        let Some(status) = status else { return Ok(Ended::TimedOut { limit, said }) };
        Ok(match self.replies.take().map(join).unwrap_or_default() {
            Some(Reply::Done(value)) if status.success() => Ended::Done(value),
            // Core ML's compiler writes its messages to standard error.
            Some(Reply::Failed(what)) if !said.is_empty() && !self.speaks => {
                Ended::Failed(format!("{what}; {said}"))
            }
            Some(Reply::Failed(what)) => Ended::Failed(what),
            _ => Ended::Crashed { how: describe(status), said },
        })
    }

    /// Waits for the status of the child; none if it had to be ended.
    fn status_within(&mut self, limit: Limit) -> anyhow::Result<Option<ExitStatus>> {
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            let is_over = match limit {
                Limit::Whole(limit) => self.started.elapsed() >= limit,
                Limit::Silence(limit) => locked(&self.heard.at).elapsed() >= limit,
            };
            if is_over {
                // The child may have ended meanwhile.
                let _ = self.child.kill();
                self.child.wait()?;
                return Ok(None);
            }
            thread::sleep(PAUSE);
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // A child that nobody waited for ends with its input; a status that was read already is no error.
        drop(self.input.take());
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Does `work` in a child and waits for it, at most for `limit`.
///
/// # Errors
/// No process can be started.
pub fn in_child(work: &Work, limit: Duration) -> anyhow::Result<Ended> {
    Worker::start(work)?.wait(Limit::Whole(limit))
}

/// Listens to a child's standard output: notes reports of progress, and returns the last line that is a reply.
fn listen(from: impl Read + Send + 'static, heard: Arc<Heard>) -> std::io::Result<JoinHandle<Option<Reply>>> {
    thread::Builder::new().spawn(move || {
        let (mut from, mut line, mut last) = (BufReader::new(from), Vec::new(), None);
        loop {
            line.clear();
            match (&mut from).take(MAX_LINE).read_until(b'\n', &mut line) {
                Ok(1..) => {}
                _ => return last,
            }
            // Lines that Core ML prints are no replies.
            match serde_json::from_slice(&line) {
                Ok(Reply::Progress(number)) => {
                    heard.progress.store(number, Ordering::SeqCst);
                    *locked(&heard.at) = Instant::now();
                }
                Ok(reply) => last = Some(reply),
                Err(_) => {}
            }
        }
    })
}

/// Keeps the end of a child's standard error, within bounds. Repeats it for the user if `speaks`.
fn last_words(mut from: impl Read + Send + 'static, speaks: bool) -> std::io::Result<JoinHandle<String>> {
    thread::Builder::new().spawn(move || {
        let (mut kept, mut piece) = (Vec::new(), [0; 4096]);
        while let Ok(n @ 1..) = from.read(&mut piece) {
            if speaks {
                // A failure to write is no error.
                let _ = std::io::stderr().write_all(&piece[..n]);
            }
            kept.extend_from_slice(&piece[..n]);
            let beyond = kept.len().saturating_sub(STDERR_END);
            kept.drain(..beyond);
        }
        String::from_utf8_lossy(&kept).trim().to_string()
    })
}

fn join<T: Default>(thread: JoinHandle<T>) -> T {
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

/// The child's link to its parent during the work.
pub struct ParentLink {
    stopped: Arc<AtomicBool>,
    /// The last report, and its time.
    reported: Option<(u64, Instant)>,
}

impl ParentLink {
    /// Reports progress: a number above 0 that the work counts. Leaves out most reports that follow each other closely.
    pub fn report(&mut self, number: u64) {
        let is_close = |(last, at): (u64, Instant)| {
            number < last.saturating_add(STEP_OF_REPORTS) && at.elapsed() < BETWEEN_REPORTS
        };
        if self.reported.is_some_and(is_close) {
            return;
        }
        self.reported = Some((number, Instant::now()));
        let Ok(line) = serde_json::to_string(&Reply::Progress(number)) else { return };
        let mut out = std::io::stdout().lock();
        // The process ends when its parent is gone.
        let _ = writeln!(out, "\n{line}").and_then(|()| out.flush());
    }

    /// Tells whether the parent has said that the work may stop.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }
}

/// Serves a parent as its child: reads the work, does it with `work`, and replies.
///
/// # Errors
/// Standard input holds no work.
pub fn serve(work: impl FnOnce(Work, &mut ParentLink) -> anyhow::Result<Value>) -> anyhow::Result<()> {
    let mut line = String::new();
    let mut input = BufReader::new(std::io::stdin());
    input.read_line(&mut line)?;
    let asked: Work = serde_json::from_str(&line)
        .map_err(|_| anyhow::anyhow!("`step` is for anemoe itself: it does one step of another command"))?;
    let stopped = Arc::new(AtomicBool::new(false));
    let mut link = ParentLink { stopped: stopped.clone(), reported: None };
    thread::Builder::new().spawn(move || {
        for line in input.lines() {
            match line {
                Ok(line) if line == STOP => stopped.store(true, Ordering::SeqCst),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        anemoe_io::remove_all_temporary();
        std::process::exit(ORPHANED);
    })?;
    let reply = match work(asked, &mut link) {
        Ok(value) => Reply::Done(value),
        Err(e) => Reply::Failed(sentence(&e)),
    };
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{}", serde_json::to_string(&reply)?)?;
    Ok(out.flush()?)
}
