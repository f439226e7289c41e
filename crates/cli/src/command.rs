//! Sub-commands: arguments go in, a typed report comes out.
//!
//! ```text
//! arguments --Command::run--> report --Serialize--------------> the document of --json
//!                                    --CommandReport::show----> lines for people
//!                                    --CommandReport::passed--> exit status
//! ```

use crate::ui::Ui;
use anyhow::Context;
use serde::Serialize;
use serde_json::Value;
use std::ffi::OsStr;
use std::io;

/// A sub-command with its arguments.
pub trait Command {
    /// Result of the command.
    type Report: CommandReport;

    /// Does the work, and writes the outcome into the journal of its bundle, if it has one. Nothing goes to standard output but
    /// what has to be seen as it comes.
    fn run(self, ui: &Ui) -> anyhow::Result<Self::Report>;
}

/// Report of a command.
pub trait CommandReport: Serialize {
    /// Adds the lines for people.
    fn show(&self, out: &mut Vec<String>);

    /// Prints the report for people.
    fn print(&self, ui: &Ui) -> io::Result<()> {
        ui.lines(|lines| self.show(lines))
    }

    /// Tells whether the gate of the command passed, if it has one.
    fn passed(&self) -> bool {
        true
    }

    /// Does the work that goes on behind the report.
    fn go_on(self) -> anyhow::Result<()>
    where
        Self: Sized,
    {
        Ok(())
    }
}

/// Report whose document and lines are made where the work is done.
#[derive(Serialize)]
#[serde(transparent)]
pub struct Page {
    pub document: Value,
    #[serde(skip)]
    pub passed: bool,
    /// Lines for people.
    #[serde(skip)]
    pub lines: Vec<String>,
    /// Work that goes on behind the report, as a server's.
    #[serde(skip)]
    pub later: Option<Box<dyn FnOnce() -> anyhow::Result<()>>>,
}

impl Page {
    /// Makes the report of a command without a gate.
    pub fn new(document: Value, lines: impl IntoIterator<Item = impl Into<String>>) -> Page {
        let lines = lines.into_iter().map(Into::into).collect();
        Page { document, passed: true, lines, later: None }
    }
}

/// Converts a document to a value by way of its text, in which a number of 32 bits keeps its digits.
pub fn to_value(document: &impl Serialize) -> serde_json::Result<Value> {
    serde_json::from_slice(&serde_json::to_vec(document)?)
}

/// Adds the keys of another document to a document.
pub fn extended(mut document: Value, more: &impl Serialize) -> serde_json::Result<Value> {
    if let (Some(all), Value::Object(more)) = (document.as_object_mut(), to_value(more)?) {
        all.extend(more);
    }
    Ok(document)
}

impl CommandReport for Page {
    fn show(&self, out: &mut Vec<String>) {
        out.extend_from_slice(&self.lines);
    }

    fn passed(&self) -> bool {
        self.passed
    }

    fn go_on(self) -> anyhow::Result<()> {
        self.later.map_or(Ok(()), |later| later())
    }
}

/// Runs a command and reports what came out; returns whether its gate passed.
pub fn execute<C: Command>(command: C, ui: &Ui) -> anyhow::Result<bool> {
    let report = command.run(ui)?;
    ui.document(&report)?;
    report.print(ui)?;
    let passed = report.passed();
    report.go_on()?;
    Ok(passed)
}

/// Makes the parser of a command's arguments.
pub fn parser<A: clap::Args>(name: &'static str) -> clap::Command {
    A::augment_args(clap::Command::new(name).no_binary_name(true))
}

/// Parses arguments as the command line of a command.
pub fn parse<A: clap::Args>(name: &'static str, arguments: &[impl AsRef<OsStr>]) -> anyhow::Result<A> {
    let words = arguments.iter().map(|a| a.as_ref().to_os_string());
    let read = parser::<A>(name).try_get_matches_from(words).and_then(|m| A::from_arg_matches(&m));
    read.map_err(|e| {
        let text = e.to_string();
        let said = text.split("\n\nUsage").next().unwrap_or(&text);
        anyhow::anyhow!("{}", said.trim_start_matches("error: ").trim())
    })
    .with_context(|| {
        let words: Vec<_> = arguments.iter().map(|a| a.as_ref().to_string_lossy()).collect();
        format!("{name} {}", words.join(" "))
    })
}
