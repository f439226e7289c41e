//! Bounds a template's work: steps, bytes held at once, and time; and the texts and lists that are counted.
//!
//! The counts belong to the thread, since every value that a template makes is made and dropped on the thread that renders it.

use std::cell::Cell;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;

/// Steps of a template: a thousand messages take about 100,000. A step evaluates a term or copies [`BYTES_PER_STEP`] bytes; all
/// of them take about two seconds.
const MOST_STEPS: u64 = 10_000_000;
/// Bytes that are copied in the time of a step.
const BYTES_PER_STEP: usize = 256;
/// Bytes that a template may hold at once, the conversation and the text so far included.
const MOST_BYTES: usize = 256_000_000;
/// Steps between two looks at the clock.
const STEPS_PER_LOOK: u64 = 4096;

thread_local! {
    static STEPS: Cell<u64> = const { Cell::new(MOST_STEPS) };
    static LOOK_AT: Cell<u64> = const { Cell::new(0) };
    static HELD: Cell<usize> = const { Cell::new(0) };
    static DEADLINE: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// An error of a template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateFault {
    /// Description of the fault.
    pub what: String,
    /// Line of the template; 0 where not known.
    pub line: usize,
}

impl TemplateFault {
    /// Makes a fault without a line.
    pub fn new(what: impl Into<String>) -> TemplateFault {
        TemplateFault { what: what.into(), line: 0 }
    }
}

/// Returns a fault as the result of any function.
pub fn fail<T>(what: impl Into<String>) -> Fallible<T> {
    Err(TemplateFault::new(what))
}

/// Result of a step.
pub type Fallible<T> = Result<T, TemplateFault>;

/// Begins a count for this thread.
pub fn begin(deadline: Option<Instant>) {
    STEPS.set(MOST_STEPS);
    LOOK_AT.set(MOST_STEPS);
    HELD.set(0);
    DEADLINE.set(deadline);
}

/// Takes steps.
pub fn spend(steps: u64) -> Fallible<()> {
    let left = STEPS.get().saturating_sub(steps);
    STEPS.set(left);
    if left == 0 {
        return fail(format!("takes more than {MOST_STEPS} steps"));
    }
    if left < LOOK_AT.get() {
        LOOK_AT.set(left.saturating_sub(STEPS_PER_LOOK));
        if DEADLINE.get().is_some_and(|deadline| Instant::now() >= deadline) {
            return fail("takes longer than the time that is left");
        }
    }
    reserve(0)
}

/// Refuses bytes that would not fit beside those held, and takes the steps to copy them.
pub fn reserve(bytes: usize) -> Fallible<()> {
    copied(bytes);
    match HELD.get().checked_add(bytes) {
        Some(n) if n <= MOST_BYTES => Ok(()),
        _ => fail(format!("asks for more than {} MB of memory", MOST_BYTES / 1_000_000)),
    }
}

/// Takes the steps to copy bytes; [`spend`] then finds them gone.
pub fn copied(bytes: usize) {
    STEPS.set(STEPS.get().saturating_sub((bytes / BYTES_PER_STEP) as u64));
}

/// Takes the steps to look at each character of a text.
pub fn scan(text: &str) -> Fallible<()> {
    spend((text.len() / if text.is_ascii() { 32 } else { 8 }) as u64)
}

/// Counts bytes as held.
pub fn hold(bytes: usize) {
    HELD.set(HELD.get().saturating_add(bytes));
}

/// Counts bytes as no longer held.
pub fn release(bytes: usize) {
    HELD.set(HELD.get().saturating_sub(bytes));
}

/// A text that is counted while it lives.
#[derive(Debug)]
pub struct Text(Box<str>);

/// Bytes of a text besides its characters: counts and length.
const TEXT_BYTES: usize = 48;

impl Text {
    /// Makes a text.
    pub fn new(text: impl Into<Box<str>>) -> Arc<Text> {
        let text = text.into();
        copied(text.len() + BYTES_PER_STEP);
        hold(text.len() + TEXT_BYTES);
        Arc::new(Text(text))
    }
}

impl Deref for Text {
    type Target = str;
    fn deref(&self) -> &str {
        &self.0
    }
}

impl Drop for Text {
    fn drop(&mut self) {
        release(self.0.len() + TEXT_BYTES);
    }
}

/// A text that grows, within the bounds.
#[derive(Default)]
pub struct TextOut(String);

impl TextOut {
    /// Adds a text.
    pub fn push(&mut self, text: &str) -> Fallible<()> {
        spend(1)?;
        reserve(text.len())?;
        hold(text.len());
        self.0.push_str(text);
        Ok(())
    }

    /// Adds a character `n` times.
    pub fn pad(&mut self, c: char, n: usize) -> Fallible<()> {
        reserve(n.saturating_mul(c.len_utf8()))?;
        self.push(&String::from(c).repeat(n))
    }

    /// Returns the text so far.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Returns the whole text.
    pub fn finish(mut self) -> String {
        release(self.0.len());
        std::mem::take(&mut self.0)
    }
}

impl Drop for TextOut {
    fn drop(&mut self) {
        release(self.0.len());
    }
}
