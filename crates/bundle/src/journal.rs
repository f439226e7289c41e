//! `journal.jsonl`: what was done to a bundle and what came out of it, one event per line, oldest first.
//!
//! The only file of a bundle with times in it, and the only one that grows: nothing that runs a bundle reads it, and two bundles
//! are compared without it. Kinds, states and fields that this version does not know are kept as they are.

use crate::{Error, Result};
use anemoe_io::hex;
use jiff::{Timestamp, Unit};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Name of the journal in a bundle.
pub const JOURNAL_FILE: &str = "journal.jsonl";

/// Name of the journal of a book, a folder of experiments. It is no file of a bundle.
pub const BOOK_FILE: &str = "book.jsonl";

/// Largest journal that is read or written: an event has a kilobyte or two.
pub const MAX_JOURNAL_BYTES: u64 = 16 << 20;
/// Longest line, its end included.
pub const MAX_LINE_BYTES: usize = 256 << 10;
/// Longest id, kind or state.
const MAX_WORD: usize = 64;

/// Most attempts of an appender to get the lock that another one holds for a moment, and the pause between
/// two of them.
const LOCK_TRIES: usize = 500;
const LOCK_WAIT: Duration = Duration::from_millis(10);

/// States of an event that this version writes; others are shown as they are.
pub mod status {
    /// Begun; the event that ends it names this one in [`super::Event::of`].
    pub const STARTED: &str = "started";
    /// Ended, where there is nothing to pass.
    pub const DONE: &str = "done";
    /// A gate passed.
    pub const PASS: &str = "pass";
    /// A gate was run, and says nothing of this model.
    pub const UNDECIDED: &str = "undecided";
    /// A gate failed.
    pub const FAIL: &str = "fail";
    /// Ended by an error.
    pub const ERROR: &str = "error";
}

/// One thing that happened to a bundle.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Short and unique; made when the event is appended.
    pub id: String,
    /// Time of writing, in UTC.
    pub time: Timestamp,
    /// `build`, `assemble`, `check`, `validate`, `trace`, `note`, or whatever else.
    pub kind: String,
    /// See [`status`].
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub status: String,
    /// Duration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Id of the event that this one ends or belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<String>,
    /// Version of the program.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// Machine on which it ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<Machine>,
    /// Options of the command, defaults included.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub options: Map<String, Value>,
    /// Figures of one run.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub facts: Map<String, Value>,
    /// Words of people about it.
    #[serde(flatten)]
    pub prose: Prose,
    /// Fields of other versions.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// Words of people about an event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prose {
    /// Intent: the reason for doing it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub intent: Option<String>,
    /// Note: anything else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Surprise: a result that was not expected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub surprise: Option<String>,
    /// Lesson: a conclusion for later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lesson: Option<String>,
    /// Next step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
    /// References to more about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refs: Option<String>,
}

/// A machine, as far as it tells.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Model of the processor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// Processors that the program may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<u64>,
    /// Bytes of memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Operating system and its version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub os: Option<String>,
    /// Architecture, for instance `x86_64`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arch: Option<String>,
    /// Instructions that kernels use: `scalar`, `neon`, `avx2`, `avx512`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isa: Option<String>,
    /// Fields of other versions.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// Events of a journal.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Journal {
    /// Oldest first.
    pub events: Vec<Event>,
    /// The last line was cut off, as a kill leaves it. The next append removes it.
    pub torn: bool,
}

impl Event {
    /// An event of this moment with nothing in it.
    pub fn new(kind: &str, status: &str) -> Event {
        let now = Timestamp::now();
        // Milliseconds say enough. Rounding fails only at the end of time.
        let time = now.round(Unit::Millisecond).unwrap_or(now);
        Event { time, kind: kind.into(), status: status.into(), ..Event::default() }
    }

    /// Checks the event against the format; the error says what breaks it.
    fn check(&self) -> std::result::Result<(), String> {
        let word = |what: &str, text: &str| {
            let fits = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
            if !text.is_empty() && text.len() <= MAX_WORD && text.chars().all(fits) {
                return Ok(());
            }
            Err(format!("`{what}` must be 1 to {MAX_WORD} letters, digits, `_`, `-` or `.`"))
        };
        word("id", &self.id)?;
        word("kind", &self.kind)?;
        if !self.status.is_empty() {
            word("status", &self.status)?;
        }
        self.of.as_ref().map_or(Ok(()), |of| word("of", of))
    }

    /// Ten hexadecimal digits from the event, the process and a counter.
    fn make_id(&mut self) -> std::result::Result<(), String> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let content = serde_json::to_vec(self).map_err(|e| e.to_string())?;
        let mut hasher = Sha256::new();
        hasher.update(content);
        hasher.update(std::process::id().to_le_bytes());
        hasher.update(COUNT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        hasher.update(Timestamp::now().as_nanosecond().to_le_bytes());
        self.id = hex(hasher.finalize())[..10].to_string();
        Ok(())
    }
}

/// Fault for which a line is no event.
struct Fault {
    /// True if it is the beginning of one.
    torn: bool,
    what: String,
}

fn parse_line(line: &[u8]) -> std::result::Result<Event, Fault> {
    // Some file systems leave zeros where data had not arrived when the power went; an append behind them ends the line.
    let end = line.iter().rposition(|&b| b != 0 && !b.is_ascii_whitespace()).map_or(0, |i| i + 1);
    let line = &line[..end];
    let value: Value = anemoe_io::json::parse(line).map_err(|e| {
        let torn = e.is_eof() && line.trim_ascii_start().first().is_none_or(|&b| b == b'{');
        let text = e.to_string();
        let what = text.split(" at line ").next().unwrap_or(&text);
        Fault { torn, what: format!("{what}, at character {}", e.column()) }
    })?;
    let fault = |what: String| Fault { torn: false, what };
    let event: Event =
        serde_json::from_value(value).map_err(|e| fault(anemoe_io::json::JsonError::from(e).to_string()))?;
    event.check().map_err(fault)?;
    Ok(event)
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Journal> {
    let mut journal = Journal::default();
    for (i, line) in bytes.split_inclusive(|&b| b == b'\n').enumerate() {
        let invalid = |what: String| Err(Error::invalid(path, format!("journal: line {}: {what}", i + 1)));
        if line.len() > MAX_LINE_BYTES {
            return invalid(format!("{} bytes, more than {MAX_LINE_BYTES}", line.len()));
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        match parse_line(line) {
            Ok(event) => journal.events.push(event),
            Err(fault) if fault.torn && !line.ends_with(b"\n") => journal.torn = true,
            Err(fault) => return invalid(fault.what),
        }
    }
    Ok(journal)
}

/// A journal is a file of its own: through a link, a bundle from elsewhere could name any file of this machine.
fn exists(path: &Path) -> Result<bool> {
    match path.symlink_metadata() {
        Ok(meta) if meta.is_file() => Ok(true),
        Ok(_) => Err(Error::invalid(path, "journal: not a regular file")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(Error::io(path, e)),
    }
}

fn too_long(path: &Path, bytes: u64) -> Error {
    Error::invalid(path, format!("journal: {bytes} bytes, more than {MAX_JOURNAL_BYTES}"))
}

/// The journal in a folder: that of a book, or of a bundle.
pub fn file_of(folder: &Path) -> PathBuf {
    let book = folder.join(BOOK_FILE);
    if book.symlink_metadata().is_ok() { book } else { folder.join(JOURNAL_FILE) }
}

/// Makes a folder a book, unless it is one.
///
/// # Errors
/// It cannot be made.
pub fn make_book(folder: &Path) -> Result<()> {
    let path = folder.join(BOOK_FILE);
    let io = |e| Error::io(&path, e);
    std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
    if !exists(&path)? {
        OpenOptions::new().append(true).create(true).open(&path).map_err(io)?;
    }
    Ok(())
}

/// Reads the journal of a bundle or of a book; a bundle without one has an empty one.
///
/// # Errors
/// The file cannot be read or is too long, or a line is no event (the error names it). A last line that was cut off is none.
pub fn read(bundle: &Path) -> Result<Journal> {
    let path = file_of(bundle);
    if !exists(&path)? {
        return Ok(Journal::default());
    }
    let bytes = anemoe_io::read_input(&path, MAX_JOURNAL_BYTES).map_err(|e| Error::io(&path, e))?;
    parse(&path, &bytes)
}

/// Adds an event in a single write, flushed to disk, and gives it as written, with its id. Several processes may append at
/// the same time. A last line that was cut off goes.
///
/// # Errors
/// The file cannot be written, would become too long, or ends with something else than an event; it is as it was then.
pub fn append(bundle: &Path, mut event: Event) -> Result<Event> {
    let path = file_of(bundle);
    let io = |e| Error::io(&path, e);
    let invalid = |what: String| Error::invalid(&path, format!("journal: {what}"));
    if event.id.is_empty() {
        event.make_id().map_err(invalid)?;
    }
    event.check().map_err(invalid)?;
    let mut line = serde_json::to_vec(&event).map_err(|e| invalid(e.to_string()))?;
    line.push(b'\n');
    if line.len() > MAX_LINE_BYTES {
        return Err(invalid(format!("an event of {} bytes, more than {MAX_LINE_BYTES}", line.len())));
    }
    let is_new = !exists(&path)?;
    let mut file = OpenOptions::new().read(true).append(true).create(true).open(&path).map_err(io)?;
    let locked = lock(&file).map_err(io)?;
    let end = mend(&path, &mut file, locked)?;
    if end.lacks_newline {
        line.insert(0, b'\n');
    }
    let len = end.len + line.len() as u64;
    if len > MAX_JOURNAL_BYTES {
        return Err(too_long(&path, len));
    }
    let written = file.write(&line).map_err(io)?;
    if written < line.len() {
        // A full disk. What is left of the line, should this fail too, is found by the next one who reads.
        if locked {
            let _ = file.set_len(end.len);
        }
        return Err(io(io::Error::from(io::ErrorKind::WriteZero)));
    }
    file.sync_all().map_err(io)?;
    if is_new {
        anemoe_io::sync_dir(bundle).map_err(|e| Error::io(bundle, e))?;
    }
    Ok(event)
}

/// Adds the events of another journal, as text, to that of a bundle: those whose ids it lacks, in the order of their times.
///
/// # Errors
/// Either of them is no journal, both together are too long, or the file cannot be written; it is as it was then.
pub fn merge(bundle: &Path, other: &[u8]) -> Result<()> {
    let path = bundle.join(JOURNAL_FILE);
    let mut events = match exists(&path)? {
        true => read(bundle)?.events,
        false => Vec::new(),
    };
    let known: HashSet<String> = events.iter().map(|e| e.id.clone()).collect();
    let more = parse(&path, other)?.events.into_iter().filter(|e| !known.contains(&e.id));
    events.extend(more);
    events.sort_by_key(|e| e.time);
    let mut text = Vec::new();
    for event in &events {
        serde_json::to_writer(&mut text, event)
            .map_err(|e| Error::invalid(&path, format!("journal: {e}")))?;
        text.push(b'\n');
    }
    match text.len() as u64 {
        len if len > MAX_JOURNAL_BYTES => Err(too_long(&path, len)),
        _ => crate::write_atomic(&path, &text),
    }
}

/// Takes the lock, which is released when the file is closed. False where the file system has none: appending then rests on
/// the single write.
fn lock(file: &File) -> io::Result<bool> {
    for _ in 0..LOCK_TRIES {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_WAIT),
            Err(TryLockError::Error(_)) => return Ok(false),
        }
    }
    Err(io::Error::new(io::ErrorKind::WouldBlock, "another process holds the journal's lock"))
}

/// End of a journal.
struct JournalEnd {
    len: u64,
    /// The last line is whole but for its end.
    lacks_newline: bool,
}

/// Removes a last line that was cut off.
fn mend(path: &Path, file: &mut File, locked: bool) -> Result<JournalEnd> {
    let io = |e| Error::io(path, e);
    let len = file.metadata().map_err(io)?.len();
    if len > MAX_JOURNAL_BYTES {
        return Err(too_long(path, len));
    }
    let mut last = [b'\n'];
    if len > 0 {
        file.seek(SeekFrom::Start(len - 1)).and_then(|_| file.read_exact(&mut last)).map_err(io)?;
    }
    if last == *b"\n" {
        return Ok(JournalEnd { len, lacks_newline: false });
    }
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).map_err(io)?;
    file.take(len).read_to_end(&mut bytes).map_err(io)?;
    if !parse(path, &bytes)?.torn {
        return Ok(JournalEnd { len, lacks_newline: true });
    }
    if !locked {
        // Perhaps another process is in the middle of it.
        return Err(Error::invalid(path, "journal: the last line is cut off, and the file cannot be locked"));
    }
    let whole = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |i| i as u64 + 1);
    file.set_len(whole).map_err(io)?;
    Ok(JournalEnd { len: whole, lacks_newline: false })
}

#[cfg(test)]
mod tests;
