//! Risky work in a process of its own, so that a crash or a hang becomes a report, and how its parent waits for it.
//!
//! ```text
//! parent --Work, one line of JSON--> anemoe step --Reply, the last line of JSON--> Ended
//!                                                --reports of progress, a line each-->
//!        --standard input: `stop` ends endless work; its end tells the child that the parent is gone
//! ```

use crate::caches::{ModelFiles, compiled_models};
use crate::form_trial::{Trial, run_trial};
use crate::soak::{SoakLength, Told, run_until, soak};
use anemoe_bundle::Chain;
use anemoe_coreml::causes::End;
use anemoe_coreml::{CompiledModels, ComputeUnits, CoreMlBackend, CoreMlSettings, plan_of};
use anemoe_io::{Error, Result};
use anemoe_runtime::backend::{Backend, BackendPackage, KeptCache};
use anemoe_runtime::cpu::CpuBackend;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
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
/// Line that tells a child that it may stop, if its work has no end of its own.
pub const STOP: &str = "stop";

/// Work of a child.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Compiles a package.
    Compile(ModelFiles),
    /// Loads functions, one after the other: [`LoadSeconds`].
    Load(ModelFiles),
    /// Asks for the plans of functions, as for the CPU alone if `cpu_only`: a list of operations by function.
    Plan { model: ModelFiles, cpu_only: bool },
    /// Runs the trial of a form: [`crate::form_trial::TrialFigures`].
    Measure { trial: Box<Trial>, tokens: usize, calls: usize },
    /// Soaks a bundle, the shards `only` on Core ML, or all if it is empty: [`crate::soak::SoakFigures`].
    Soak { bundle: PathBuf, only: Vec<String>, length: SoakLength },
    /// Runs a bundle on Core ML until it is told to stop, with progress once all is loaded: tokens per second.
    Run { bundle: PathBuf },
    /// Runs a whole command: [`CommandDone`].
    Command { command: String, arguments: Vec<String> },
}

/// Result of [`Work::Command`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CommandDone {
    /// True if the command's gate passed, or the command has no gate.
    pub passed: bool,
    /// Document of the command.
    pub document: Value,
}

/// Seconds to load each function, by name.
pub type LoadSeconds = BTreeMap<String, f64>;

impl Work {
    /// Returns the name of the step, the shard that it is about, and a note; all empty for work on more than a shard.
    pub fn about(&self) -> (&'static str, &str, String) {
        match self {
            Work::Compile(model) => ("compile", &model.shard, String::new()),
            Work::Load(model) => ("load", &model.shard, String::new()),
            Work::Plan { model, .. } => ("plan", &model.shard, String::new()),
            Work::Measure { trial, tokens, .. } => ("measure", &trial.models[0].shard, of_tokens(*tokens)),
            Work::Soak { .. } | Work::Run { .. } | Work::Command { .. } => Default::default(),
        }
    }

    /// Does the work in a child and waits for it, at most for `limit`.
    pub fn run(&self, limit: Duration) -> Result<Ended> {
        Worker::start(self)?.wait(limit)
    }
}

/// Returns a note on calls of more than one token; empty for one token.
pub fn of_tokens(tokens: usize) -> String {
    if tokens == 1 { String::new() } else { format!(" (calls of {tokens} tokens)") }
}

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
    pub fn new(end: End, reason: impl Into<String>) -> Ended {
        Ended { end, reason: reason.into(), document: Value::Null }
    }

    /// Makes the end of work whose document shows these faults.
    pub fn with_faults(faults: String, document: Value) -> Ended {
        let end = if faults.is_empty() { End::Done } else { End::Failed };
        Ended { end, reason: faults, document }
    }
}

/// Line of a child's standard output: a number that the work counts, or what is last, its result or why it was refused.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reply {
    Progress(u64),
    Done(Value),
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
    /// Last number that the child has reported; 0 before.
    pub progress: u64,
    /// Time of the last report, or of the child's start.
    heard: Instant,
}

fn failed(e: std::io::Error) -> Error {
    Error::io(COMMAND, e)
}

impl Worker {
    /// Starts a child that does `work`. The messages of a whole command go on to standard error.
    pub fn start(work: &Work) -> Result<Worker> {
        let speaks = matches!(work, Work::Command { .. });
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

    /// Writes a line to the child. Its exit status tells of a child that ended already.
    pub fn tell(&mut self, line: &str) {
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
        let why = loop {
            if let Err(why) = self.hear(self.heard + limit) {
                break why;
            }
        };
        // Otherwise standard output is closed: the process has ended.
        let is_hung = why == RecvTimeoutError::Timeout;
        if is_hung {
            // The child may have ended meanwhile.
            let _ = self.child.kill();
        }
        let status = self.child.wait().map_err(failed)?;
        drop(self.input.take());
        let said = self.words.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        // Core ML's compiler writes its messages to standard error; what a child that speaks has said was read already.
        let with = |what: String, sign| if said.is_empty() { what } else { format!("{what}{sign} {said}") };
        Ok(match self.last.take() {
            _ if is_hung => {
                let what = format!("no progress for {:.0} s (--timeout)", limit.as_secs_f64());
                Ended::new(End::Hung, with(what, ":"))
            }
            Some(Reply::Done(document)) if status.success() => Ended::with_faults(String::new(), document),
            Some(Reply::Failed(what)) if self.speaks => Ended::new(End::Refused, what),
            Some(Reply::Failed(what)) => Ended::new(End::Refused, with(what, ";")),
            _ => Ended::new(End::Crashed, with(describe(status), ":")),
        })
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

/// Writes a line for the parent, apart from whatever Core ML has printed.
fn say(reply: &Reply) -> std::io::Result<()> {
    let line = serde_json::to_string(reply)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{line}").and_then(|()| out.flush())
}

/// Converts the result of a child's work to JSON.
pub fn to_value(result: &impl Serialize) -> Result<Value> {
    serde_json::to_value(result).map_err(|e| Error::usage(format!("result of a step: {e}")))
}

/// Reads the result of a child's work.
pub fn from_value<T: DeserializeOwned>(result: Value) -> Result<T> {
    serde_json::from_value(result).map_err(|e| Error::usage(format!("result of a step: {e}")))
}

/// Runs a whole command, given its name and arguments.
type CommandRunner = dyn Fn(&str, &[String]) -> std::result::Result<CommandDone, String>;

/// Serves a parent as its child: reads the work, does it, with `command` for whole commands, and replies.
///
/// # Errors
/// Standard input holds no work.
pub fn serve_parent(command: &CommandRunner) -> Result<()> {
    let mut line = String::new();
    let mut input = BufReader::new(std::io::stdin());
    input.read_line(&mut line).map_err(failed)?;
    let work = serde_json::from_str(&line)
        .map_err(|_| Error::usage("`step` is for anemoe itself: it does one step of another command"))?;
    let stopped = Arc::new(AtomicBool::new(false));
    let is_stopped = stopped.clone();
    let watch = move || {
        for line in input.lines().map_while(std::io::Result::ok) {
            stopped.fetch_or(line == STOP, Ordering::SeqCst);
        }
        anemoe_io::remove_all_temporary();
        std::process::exit(ORPHANED);
    };
    Builder::new().spawn(watch).map_err(failed)?;
    let mut told = |number| {
        let _ = say(&Reply::Progress(number));
        is_stopped.load(Ordering::SeqCst)
    };
    let done = perform(work, &mut told, command);
    say(&done.map_or_else(|e| Reply::Failed(e.to_string()), Reply::Done)).map_err(failed)
}

fn perform(work: Work, told: Told<'_>, run: &CommandRunner) -> Result<Value> {
    match work {
        Work::Compile(model) => anemoe_coreml::compile(&model.package, &model.compiled).map(|_| Value::Null),
        Work::Load(model) => to_value(&load(&model)?),
        Work::Plan { model: ModelFiles { package, compiled, functions, .. }, cpu_only } => {
            let units = if cpu_only { ComputeUnits::CpuOnly } else { ComputeUnits::CpuAndNeuralEngine };
            let named = functions.len() > 1;
            let plan = |name: &String| Ok((name.clone(), plan_of(&package, &compiled, name, named, units)?));
            to_value(&functions.iter().map(plan).collect::<Result<Vec<_>>>()?)
        }
        Work::Measure { trial, tokens, calls } => {
            let own = trial.models.iter().map(|m| m.package.clone()).collect();
            let backend = Mixed { own, core_ml: core_ml_for(&trial.models)?, cpu: CpuBackend::default() };
            to_value(&run_trial(&trial, &backend, tokens, calls)?)
        }
        Work::Soak { bundle, only, length } => {
            let (chain, core_ml) = core_ml_of(&bundle)?;
            let on_core_ml = chain.shards.iter().filter(|s| only.is_empty() || only.contains(&s.name));
            let own = on_core_ml.map(|shard| bundle.join(&shard.file)).collect();
            let backend = Mixed { own, core_ml, cpu: CpuBackend::default() };
            to_value(&soak(&bundle, &backend, length, told)?)
        }
        Work::Run { bundle } => to_value(&run_until(&bundle, &core_ml_of(&bundle)?.1, told)?),
        Work::Command { command, arguments } => to_value(&run(&command, &arguments).map_err(Error::usage)?),
    }
}

fn load(model: &ModelFiles) -> Result<LoadSeconds> {
    let backend = core_ml_for(std::slice::from_ref(model))?;
    let seconds = |name: &String| {
        let opened = backend.open(&model.package)?;
        let started = Instant::now();
        opened.prepare(name)?;
        Ok((name.clone(), started.elapsed().as_secs_f64()))
    };
    model.functions.iter().map(seconds).collect()
}

fn core_ml_for(models: &[ModelFiles]) -> Result<CoreMlBackend> {
    let places = models.iter().map(|m| (m.package.clone(), m.compiled.clone()));
    core_ml(CompiledModels::of_packages(places))
}

fn core_ml_of(bundle: &Path) -> Result<(Chain, CoreMlBackend)> {
    let chain = Chain::read(bundle)?;
    let core_ml = core_ml(compiled_models(None, bundle, &chain))?;
    Ok((chain, core_ml))
}

fn core_ml(compiled: CompiledModels) -> Result<CoreMlBackend> {
    CoreMlBackend::new(CoreMlSettings { compiled, ..CoreMlSettings::default() })
}

/// Backend with Core ML for some packages, and the CPU executor for all others.
struct Mixed {
    own: Vec<PathBuf>,
    core_ml: CoreMlBackend,
    cpu: CpuBackend,
}

impl Backend for Mixed {
    fn open_with(&self, path: &Path, caches: &[KeptCache]) -> Result<Box<dyn BackendPackage>> {
        let backend: &dyn Backend =
            if self.own.iter().any(|p| p == path) { &self.core_ml } else { &self.cpu };
        backend.open_with(path, caches)
    }
}
