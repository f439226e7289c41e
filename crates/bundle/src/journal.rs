//! `journal.jsonl`: the record of what was done to a bundle, and the results; one event per line, oldest first.
//!
//! The journal is the only file of a bundle with times in it, and the only one that grows. Nothing that runs a bundle
//! reads it, and comparisons of bundles leave it out. Kinds, states and fields that this version does not know are
//! kept as they are.

pub use crate::machine::Machine;
use crate::{Error, Result};
use anemoe_io::{json, open_regular};
use jiff::{Timestamp, Unit};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Name of the journal in a bundle.
pub const JOURNAL_FILE: &str = "journal.jsonl";

/// Largest journal that is read or written, in bytes; an event takes one or two kB.
pub const MAX_JOURNAL_BYTES: u64 = 16 << 20;
/// Longest line in bytes, newline included.
pub const MAX_LINE_BYTES: usize = 256 << 10;
/// Longest id, kind or state, in bytes.
const MAX_WORD: usize = 64;

/// Attempts of an appender to take the lock while another process holds it: 5 seconds with [`LOCK_WAIT`].
const LOCK_TRIES: usize = 500;
/// Pause between two attempts.
const LOCK_WAIT: Duration = Duration::from_millis(10);

/// Values of [`Event::status`] that this version writes; others are shown as they are.
pub mod status {
    /// The work has begun; the event that ends it names this event in [`super::Event::of`].
    pub const STARTED: &str = "started";
    /// The work ended, and there was no gate to pass.
    pub const DONE: &str = "done";
    /// A gate passed.
    pub const PASS: &str = "pass";
    /// A gate was run, and does not apply: the model has not learned from any text.
    pub const UNDECIDED: &str = "undecided";
    /// A gate failed.
    pub const FAIL: &str = "fail";
    /// An error ended the work.
    pub const ERROR: &str = "error";
}

/// Event of a journal: one thing that was done to a bundle.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Id: short and unique; made when the event is appended.
    pub id: String,
    /// Time of writing, in UTC.
    pub time: Timestamp,
    /// Kind: `build`, `assemble`, `check`, `validate`, `trace`, `note`, or another one.
    pub kind: String,
    /// State; see [`status`].
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub status: String,
    /// Duration in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Id of the event that this one ends or belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<String>,
    /// Version of the program that wrote the event.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// Machine on which the program ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<Machine>,
    /// Options of the command, defaults included.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub options: Map<String, Value>,
    /// Results of the work, by name.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub facts: Map<String, Value>,
    /// Texts of people (`intent`, `note`, `surprise`, `lesson`, `next`, `refs`), and fields that this version does not know.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// Events of a journal.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Journal {
    /// Events, oldest first.
    pub events: Vec<Event>,
    /// True if the last line was cut off, as a kill leaves it. The next append removes that line.
    pub torn: bool,
}

impl Event {
    /// Makes an event of the present time, without id and content.
    pub fn new(kind: &str, status: &str) -> Event {
        let now = Timestamp::now();
        // Milliseconds are precise enough. Rounding fails only for the last representable time.
        let time = now.round(Unit::Millisecond).unwrap_or(now);
        Event { time, kind: kind.into(), status: status.into(), ..Event::default() }
    }

    /// Returns the text that people gave under this name.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.rest.get(name).and_then(Value::as_str)
    }

    /// Checks the event against the format; the error says what breaks it.
    fn check(&self) -> std::result::Result<(), String> {
        let fits = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        let is_word = |text: &str| (1..=MAX_WORD).contains(&text.len()) && text.chars().all(fits);
        let status = Some(self.status.as_str()).filter(|status| !status.is_empty());
        let words = [("id", Some(&*self.id)), ("kind", Some(&*self.kind)), ("of", self.of.as_deref())];
        let mut words = words.into_iter().chain([("status", status)]);
        let wrong = words.find(|(_, text)| text.is_some_and(|text| !is_word(text)));
        wrong.map_or(Ok(()), |(what, _)| {
            Err(format!("`{what}` must be 1 to {MAX_WORD} letters, digits, `_`, `-` or `.`"))
        })
    }
}

/// Makes an id: ten hexadecimal digits of a hash of the time, the process and a counter.
fn make_id() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let (now, count) = (Timestamp::now().as_nanosecond(), COUNT.fetch_add(1, Ordering::Relaxed));
    crate::sha256(format!("{now} {} {count}", std::process::id()).as_bytes())[..10].into()
}

/// Reason for which a line is no event.
struct Fault {
    /// True if the line is the cut-off beginning of an event.
    torn: bool,
    what: String,
}

fn parse_line(line: &[u8], left: &mut u64) -> std::result::Result<Event, Fault> {
    // Some file systems leave zeros where data had not arrived before a power failure; a later append ends that line.
    let end = line.iter().rposition(|&b| b != 0 && !b.is_ascii_whitespace()).map_or(0, |i| i + 1);
    let line = &line[..end];
    let value: Value = json::parse_within(line, left).map_err(|e| {
        let torn = e.is_eof() && line.trim_ascii_start().first().is_none_or(|&b| b == b'{');
        let text = e.to_string();
        let what = text.split(" at line ").next().unwrap_or(&text);
        Fault { torn, what: format!("{what}, at character {}", e.column()) }
    })?;
    let fault = |what: String| Fault { torn: false, what };
    let event: Event =
        serde_json::from_value(value).map_err(|e| fault(json::JsonError::from(e).to_string()))?;
    event.check().map_err(fault)?;
    Ok(event)
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Journal> {
    let mut journal = Journal::default();
    let mut left = json::form_limit(bytes.len() as u64);
    for (i, line) in bytes.split_inclusive(|&b| b == b'\n').enumerate() {
        let invalid = |what: String| Err(Error::invalid(path, format!("journal: line {}: {what}", i + 1)));
        if line.len() > MAX_LINE_BYTES {
            return invalid(format!("{} bytes, more than {MAX_LINE_BYTES}", line.len()));
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        match parse_line(line, &mut left) {
            Ok(event) => journal.events.push(event),
            Err(fault) if fault.torn && !line.ends_with(b"\n") => journal.torn = true,
            Err(fault) => return invalid(fault.what),
        }
    }
    Ok(journal)
}

/// Tells whether the journal exists. Anything but a regular file is an error: through a link, a foreign bundle could
/// name any file of this machine.
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

/// Reads the journal of a bundle. A missing journal is read as an empty one.
///
/// # Errors
/// The file cannot be read or is too long, or a line is no event (the error names the line). A last line that was cut
/// off is not an error.
pub fn read(bundle: &Path) -> Result<Journal> {
    let path = bundle.join(JOURNAL_FILE);
    if !exists(&path)? {
        return Ok(Journal::default());
    }
    let bytes = anemoe_io::read_input(&path, MAX_JOURNAL_BYTES).map_err(|e| Error::io(&path, e))?;
    parse(&path, &bytes)
}

/// Appends an event in a single write and flushes it to disk; returns the event as written, with its id. Several
/// processes may append at the same time. A last line that was cut off is removed.
///
/// # Errors
/// The file cannot be written, would become too long, or ends with something that is no event. The file is then as it was.
pub fn append(bundle: &Path, mut event: Event) -> Result<Event> {
    let path = bundle.join(JOURNAL_FILE);
    let io = |e| Error::io(&path, e);
    let invalid = |what: String| Error::invalid(&path, format!("journal: {what}"));
    if event.id.is_empty() {
        event.id = make_id();
    }
    event.check().map_err(invalid)?;
    let mut line = serde_json::to_vec(&event).map_err(|e| invalid(e.to_string()))?;
    line.push(b'\n');
    if line.len() > MAX_LINE_BYTES {
        return Err(invalid(format!("an event of {} bytes, more than {MAX_LINE_BYTES}", line.len())));
    }
    let is_new = !exists(&path)?;
    let mut file =
        open_regular(&path, OpenOptions::new().read(true).append(true).create(true)).map_err(io)?;
    lock(&file).map_err(io)?;
    let mut bytes = Vec::new();
    Read::by_ref(&mut file).take(MAX_JOURNAL_BYTES + 1).read_to_end(&mut bytes).map_err(io)?;
    let mut end = bytes.len() as u64;
    if end > MAX_JOURNAL_BYTES {
        return Err(too_long(&path, end));
    }
    if !bytes.is_empty() && !bytes.ends_with(b"\n") {
        if parse(&path, &bytes)?.torn {
            end = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |i| i as u64 + 1);
            file.set_len(end).map_err(io)?;
        } else {
            line.insert(0, b'\n');
        }
    }
    let len = end + line.len() as u64;
    if len > MAX_JOURNAL_BYTES {
        return Err(too_long(&path, len));
    }
    let written = file.write(&line).map_err(io)?;
    if written < line.len() {
        // The disk is full. If the truncation fails too, the rest of the line stays, and the next reader finds it torn.
        let _ = file.set_len(end);
        return Err(io(io::Error::from(io::ErrorKind::WriteZero)));
    }
    file.sync_all().map_err(io)?;
    if is_new {
        anemoe_io::sync_dir(bundle).map_err(|e| Error::io(bundle, e))?;
    }
    Ok(event)
}

/// Merges the events of another journal (`other` is its text) into a bundle's journal: adds events with unknown ids,
/// and sorts all events by time.
///
/// # Errors
/// One of the two is no journal, both together are too long, or the file cannot be written. The file is then as it was.
pub fn merge(bundle: &Path, other: &[u8]) -> Result<()> {
    let path = bundle.join(JOURNAL_FILE);
    let mut events = read(bundle)?.events;
    let known: HashSet<String> = events.iter().map(|e| e.id.clone()).collect();
    events.extend(parse(&path, other)?.events.into_iter().filter(|e| !known.contains(&e.id)));
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

/// Takes the lock, which is released when the file is closed.
fn lock(file: &File) -> io::Result<()> {
    for _ in 0..LOCK_TRIES {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_WAIT),
            Err(TryLockError::Error(e)) => return Err(e),
        }
    }
    Err(io::Error::new(io::ErrorKind::WouldBlock, "another process holds the journal's lock"))
}

#[cfg(test)]
mod tests;
