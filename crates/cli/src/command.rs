//! Sub-commands: arguments go in, a typed report comes out.
//!
//! ```text
//! arguments --Command::run--> report --CommandReport::record--> journal of the bundle
//!                                    --Serialize--------------> the document of --json
//!                                    --CommandReport::print---> lines for people
//!                                    --CommandReport::outcome-> exit status
//! ```

use crate::outcome::Outcome;
use crate::recorder::{JournalArgs, Recorder};
use crate::ui::Ui;
use serde::Serialize;
use std::io;

/// A sub-command with its arguments.
pub trait Command {
    /// Result of the command.
    type Report: CommandReport;

    /// Does the work. Nothing goes to standard output but what has to be seen as it comes.
    ///
    /// # Errors
    /// The arguments or their files are wrong, or the work cannot be done.
    fn run(self, ui: &Ui) -> anyhow::Result<Self::Report>;

    /// Returns the options of the journal, if the report goes into the journal of a bundle.
    fn journal(&self) -> Option<&JournalArgs> {
        None
    }
}

/// Report of a command.
pub trait CommandReport: Serialize {
    /// Prints the report for people.
    ///
    /// # Errors
    /// Standard output cannot be written.
    fn print(&self, ui: &Ui) -> io::Result<()>;

    /// Returns the end of the command.
    fn outcome(&self) -> Outcome {
        Outcome::Done
    }

    /// Writes the report into the journal of a bundle.
    fn record(&self, _: &Recorder) {}

    /// Does the work that goes on behind the report, as a server's.
    ///
    /// # Errors
    /// The work fails.
    fn go_on(self) -> anyhow::Result<()>
    where
        Self: Sized,
    {
        Ok(())
    }
}

/// Runs a command and writes its report into the journal of the bundle. `name` is the kind of its events there.
///
/// # Errors
/// The command fails.
pub fn complete<C: Command>(command: C, name: &'static str, ui: &Ui) -> anyhow::Result<C::Report> {
    let recorder = command.journal().map(|args| Recorder::new(args, name));
    let report = command.run(ui)?;
    recorder.iter().for_each(|recorder| report.record(recorder));
    Ok(report)
}

/// Runs a command and reports what came out.
///
/// # Errors
/// The command fails, or standard output cannot be written.
pub fn execute<C: Command>(command: C, name: &'static str, ui: &Ui) -> anyhow::Result<Outcome> {
    let report = complete(command, name, ui)?;
    ui.document(&report)?;
    report.print(ui)?;
    let outcome = report.outcome();
    report.go_on()?;
    Ok(outcome)
}
