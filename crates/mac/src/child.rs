//! The child process, and how its parent waits for it.
//!
//! ```text
//! parent --the work, one line of JSON--> anemoe step --Reply, the last line of JSON--> Ended
//!                                                   --reports of progress, a line each-->
//!        --standard input: `stop` ends endless work; its end tells the child that the parent is gone
//! ```

use anemoe_coreml::causes::End;
use anemoe_io::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Sub-command that a child is started as.
const COMMAND: &str = "step";
/// Exit status of a child whose parent is gone.
const ORPHANED: i32 = 3;
/// Bytes that are kept of the end of a child's standard error.
const STDERR_END: usize = 2000;
/// Longest line of a child's standard output, in bytes: the plan of a large package has some thousand ops.
const MAX_LINE: u64 = 256 << 20;
/// Line that tells a child that it may stop.
const STOP: &str = "stop";

/// End of a piece of work: its reason is empty, and its document is there, if it is done.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ended {
    /// End.
    pub end: End,
    /// Reason, with the end of the child's standard error.
    #[serde(default)]
    pub reason: String,
    /// Document; null without one.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub document: Value,
}

impl Ended {
    /// Makes the end of work that leaves no document.
    pub fn without_document(end: End, reason: impl Into<String>) -> Ended {
        Ended { end, reason: reason.into(), document: Value::Null }
    }

    /// Makes the end of work whose document shows these faults.
    pub fn with_faults(faults: String, document: Value) -> Ended {
        let end = if faults.is_empty() { End::Done } else { End::Failed };
        Ended { end, reason: faults, document }
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

/// A child at work. It ends when its input does, so that a child that nobody waits for is no leftover.
pub struct Worker {
    child: Child,
    input: Option<ChildStdin>,
    replies: Receiver<Reply>,
    /// Thread that collects the end of standard error.
    words: Option<JoinHandle<String>>,
    /// True if the user reads the child's messages as they come.
    speaks: bool,
    last: Option<Reply>,
    progress: u64,
    /// Time of the last report, or of the child's start.
    heard: Instant,
}

fn failed(e: std::io::Error) -> Error {
    Error::io(COMMAND, e)
}

impl Worker {
    /// Starts a child that does `work`; its messages go on to standard error if it `speaks`.
    pub fn start(work: &impl Serialize, speaks: bool) -> Result<Worker> {
        let program = std::env::current_exe().map_err(failed)?;
        let line = serde_json::to_string(work).map_err(|e| failed(e.into()))?;
        let mut command = Command::new(program);
        command.arg(COMMAND).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        let (send, replies) = channel();
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let (input, heard) = (child.stdin.take(), Instant::now());
        let mut worker =
            Worker { child, input, replies, words: None, speaks, last: None, progress: 0, heard };
        if let (Some(out), Some(err)) = (out, err) {
            Builder::new().spawn(move || listen(out, &send)).map_err(failed)?;
            worker.words = Some(Builder::new().spawn(move || last_words(err, speaks)).map_err(failed)?);
        }
        worker.tell(&line);
        Ok(worker)
    }

    /// Returns the last number that the child was heard to report; 0 before.
    pub fn progress(&self) -> u64 {
        self.progress
    }

    /// Tells the child that it may stop, if its work has no end of its own.
    pub fn stop(&mut self) {
        self.tell(STOP);
    }

    /// Writes a line to the child. Its exit status tells of a child that ended already.
    fn tell(&mut self, line: &str) {
        if let Some(input) = &mut self.input {
            let _ = writeln!(input, "{line}").and_then(|()| input.flush());
        }
    }

    /// Waits until the child has reported something or has replied, at most for `limit`; tells whether it has reported.
    pub fn wait_for_progress(&mut self, limit: Duration) -> bool {
        let until = self.heard + limit;
        while self.progress == 0 && self.last.is_none() && self.hear(until).is_ok() {}
        self.progress > 0
    }

    /// Waits for the end of the child, and ends a child that reports nothing for `limit`: before the first report, between
    /// two, or after the last. Work that reports has no limit as a whole.
    pub fn wait(&mut self, limit: Duration) -> Result<Ended> {
        let in_time = loop {
            match self.hear(self.heard + limit) {
                Ok(()) => {}
                Err(RecvTimeoutError::Timeout) => break false,
                // Standard output is closed: the process has ended.
                Err(RecvTimeoutError::Disconnected) => break true,
            }
        };
        if !in_time {
            // The child may have ended meanwhile.
            let _ = self.child.kill();
        }
        let status = self.child.wait().map_err(failed)?;
        drop(self.input.take());
        let said = self.words.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        let (end, reason) = match self.last.take() {
            _ if !in_time => (End::Hung, format!("no progress for {:.0} s (--timeout)", limit.as_secs_f64())),
            Some(Reply::Done(document)) if status.success() => {
                return Ok(Ended { end: End::Done, reason: String::new(), document });
            }
            Some(Reply::Failed(what)) => (End::Refused, what),
            _ => (End::Crashed, describe(status)),
        };
        // Core ML's compiler writes its messages to standard error; what a child that speaks has said was read already.
        let reason = match end {
            _ if said.is_empty() => reason,
            End::Refused if self.speaks => reason,
            End::Refused => format!("{reason}; {said}"),
            _ => format!("{reason}: {said}"),
        };
        Ok(Ended::without_document(end, reason))
    }

    /// Hears one reply of the child, at most until the time `until`.
    fn hear(&mut self, until: Instant) -> std::result::Result<(), RecvTimeoutError> {
        match self.replies.recv_timeout(until.saturating_duration_since(Instant::now()))? {
            Reply::Progress(number) => (self.progress, self.heard) = (number, Instant::now()),
            reply => self.last = Some(reply),
        }
        Ok(())
    }
}

/// Listens to a child's standard output, and sends its replies on.
fn listen(from: impl Read, replies: &Sender<Reply>) {
    let (mut from, mut line) = (BufReader::new(from), Vec::new());
    while let Ok(1..) = (&mut from).take(MAX_LINE).read_until(b'\n', &mut line) {
        // Lines that Core ML prints are no replies.
        if let Ok(reply) = serde_json::from_slice(&line) {
            let _ = replies.send(reply);
        }
        line.clear();
    }
}

/// Keeps the end of a child's standard error. Repeats it for the user if `speaks`; a failure to write is no error.
fn last_words(mut from: impl Read, speaks: bool) -> String {
    let (mut kept, mut piece) = (Vec::new(), [0; 4096]);
    while let Ok(n @ 1..) = from.read(&mut piece) {
        if speaks {
            let _ = std::io::stderr().write_all(&piece[..n]);
        }
        kept.extend_from_slice(&piece[..n]);
        kept.drain(..kept.len().saturating_sub(STDERR_END));
    }
    String::from_utf8_lossy(&kept).trim().to_string()
}

#[cfg(unix)]
fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    let meaning = match status.signal() {
        Some(6) => " (abort)",
        Some(9) => " (killed, which the system does for want of memory)",
        Some(10) => " (bus error on macOS)",
        Some(11) => " (segmentation fault)",
        _ => "",
    };
    let code = || format!("exit status {}", status.code().unwrap_or(-1));
    status.signal().map_or_else(code, |n| format!("signal {n}{meaning}"))
}

#[cfg(not(unix))]
fn describe(status: ExitStatus) -> String {
    format!("{status}")
}

/// The child's link to its parent during the work.
pub struct ParentLink(Arc<AtomicBool>);

impl ParentLink {
    /// Reports progress: a number above 0 that the work counts. The process ends when its parent is gone.
    pub fn report(&self, number: u64) {
        let _ = say(&Reply::Progress(number));
    }

    /// Tells whether the parent has said that the work may stop.
    pub fn is_stopped(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Writes a line for the parent, apart from whatever Core ML has printed.
fn say(reply: &Reply) -> std::io::Result<()> {
    let line = serde_json::to_string(reply)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{line}").and_then(|()| out.flush())
}

/// Serves a parent as its child: reads the work, does it with `work`, and replies.
pub fn serve<W: DeserializeOwned>(
    work: impl FnOnce(W, &ParentLink) -> std::result::Result<Value, String>,
) -> Result<()> {
    let mut line = String::new();
    let mut input = BufReader::new(std::io::stdin());
    input.read_line(&mut line).map_err(failed)?;
    let asked = serde_json::from_str(&line)
        .map_err(|_| Error::usage("`step` is for anemoe itself: it does one step of another command"))?;
    let stopped = Arc::new(AtomicBool::new(false));
    let link = ParentLink(stopped.clone());
    let watch = move || {
        for line in input.lines().map_while(std::io::Result::ok) {
            stopped.fetch_or(line == STOP, Ordering::SeqCst);
        }
        anemoe_io::remove_all_temporary();
        std::process::exit(ORPHANED);
    };
    Builder::new().spawn(watch).map_err(failed)?;
    say(&work(asked, &link).map_or_else(Reply::Failed, Reply::Done)).map_err(failed)
}
