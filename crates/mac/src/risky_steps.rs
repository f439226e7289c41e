//! Steps of a command in child processes, who listens to them, and the meaning of their failures.

use crate::child::{Work, from_value};
use anemoe_bundle::{Chain, Shard, ShardKind};
use anemoe_convert::form::ShardForm;
use anemoe_coreml::causes::{self, Cause, End, STALE, is_no_plan};
use anemoe_io::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Shows a user how long work goes on.
pub trait Listener {
    /// Shows a message.
    fn message(&self, text: &str);

    /// Shows that `done` of `total` parts of `what` are done, and `part` is next.
    fn progress(&self, what: &str, part: &str, done: usize, total: usize);
}

/// Kind and form of the shard that a step is about; none for a package that is no shard.
pub type StepForm = Option<(ShardKind, ShardForm)>;

pub type StepResult<T> = std::result::Result<T, StepError>;

/// Error of a step: a finding about the step, or a fault of this machine.
pub enum StepError {
    Finding(Box<StepFailure>),
    Fault(Error),
}

impl From<Error> for StepError {
    fn from(fault: Error) -> StepError {
        StepError::Fault(fault)
    }
}

/// Splits the findings of steps from the faults of this machine.
pub fn finding<T>(result: StepResult<T>) -> Result<std::result::Result<T, StepFailure>> {
    match result {
        Ok(value) => Ok(Ok(value)),
        Err(StepError::Finding(failure)) => Ok(Err(*failure)),
        Err(StepError::Fault(e)) => Err(e),
    }
}

/// A step that did not end well.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepFailure {
    /// Package, function or form of the step.
    pub what: String,
    /// Step: `compile`, `load`, `plan` or `measure`.
    pub step: String,
    /// `refused`, `crashed` or `hung`.
    pub end: End,
    /// Message of the system, or of the process.
    pub message: String,
    /// Likely causes, the most likely first.
    #[serde(default)]
    causes: Vec<String>,
    /// Further advice, besides forms.
    #[serde(default)]
    advice: Vec<String>,
    /// Options of the form to try next; none without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    try_form: Option<String>,
}

/// Returns kind and form of a bundle's shard.
pub fn form_of(chain: &Chain, shard: &Shard) -> StepForm {
    let own = chain.options.get("forms").and_then(|forms| forms.get(shard.kind.name()));
    let form = own.or_else(|| chain.options.get("form")).cloned();
    Some((shard.kind, form.and_then(|f| serde_json::from_value(f).ok()).unwrap_or_default()))
}

/// Does a step in a child process, which may take `limit`, and returns its result.
pub fn run_step<T: DeserializeOwned>(limit: Duration, form: StepForm, work: &Work) -> StepResult<T> {
    let ended = work.run(limit)?;
    if ended.end == End::Done {
        return Ok(from_value(ended.document)?);
    }
    let (step, shard, note) = work.about();
    let found = causes::of(ended.end, step, &ended.reason);
    let list = |of: fn(&Cause) -> &'static str| {
        found.iter().map(of).filter(|text| !text.is_empty()).map(String::from).collect()
    };
    Err(StepError::Finding(Box::new(StepFailure {
        causes: list(|cause| cause.text),
        advice: list(|cause| cause.advice),
        try_form: form.and_then(|(kind, form)| next_form(&found, kind, form)),
        ..StepFailure::new(shard, step, ended.end, ended.reason + &note)
    })))
}

impl StepFailure {
    /// Makes a failure without causes and advice.
    pub fn new(what: &str, step: &str, end: End, message: String) -> StepFailure {
        let (what, step) = (what.into(), step.into());
        StepFailure { what, step, end, message, causes: Vec::new(), advice: Vec::new(), try_form: None }
    }

    /// Removes the cause that the model is of another system, for a model that was compiled just before.
    pub fn of_new_model(mut self) -> StepFailure {
        if is_no_plan(&self.message) {
            self.causes.retain(|c| *c != STALE.text);
            self.advice.retain(|a| *a != STALE.advice);
            self.advice
                .push("anemoe doctor --clean, which lists what Core ML keeps of earlier models".into());
        }
        self
    }

    /// Formats step, end and message.
    pub fn text(&self) -> String {
        format!("{} {}: {}", self.step, self.end.word(), self.message)
    }

    /// Formats the failure in a line.
    pub fn line(&self) -> String {
        format!("{}: {}", self.what, self.text())
    }

    /// Formats the failure in lines, with causes and advice.
    pub fn lines(&self) -> String {
        let mut lines = vec![self.line()];
        lines.extend(self.causes.iter().map(|c| format!("    likely: {c}")));
        lines.extend(self.advice.iter().map(|a| format!("    do: {a}")));
        lines.extend(self.try_form.iter().map(|f| format!("    try the form: {f}")));
        lines.join("\n")
    }
}

/// Returns the form to try next: the first one named by a cause that concerns this kind of shard and is new.
fn next_form(causes: &[Cause], kind: ShardKind, form: ShardForm) -> Option<String> {
    let concerns = |option: &str| match option {
        "--cache" | "--attention" | "--history" => matches!(kind, ShardKind::Attention | ShardKind::Layers),
        "--experts" | "--activation" => !matches!(kind, ShardKind::Attention | ShardKind::Head),
        _ => true,
    };
    let options = causes.iter().flat_map(|c| c.forms).filter(|(option, _)| concerns(option));
    let mut new = options.filter(|(option, word)| {
        let mut other = form;
        other.set(option, word).is_ok() && other != form
    });
    new.next().map(|(option, word)| format!("{option} {word}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_convert::form::CacheForm;

    #[test]
    fn forms_to_try_concern_the_kind_and_are_new() {
        let no_plan = causes::of(End::Refused, "load", "com.apple.CoreML -14: error code: -14.");
        let next = |kind, form| next_form(&no_plan, kind, form);
        assert_eq!(next(ShardKind::Attention, ShardForm::default()).as_deref(), Some("--cache host"));
        let host = ShardForm { cache: CacheForm::Host, ..ShardForm::default() };
        assert_ne!(next(ShardKind::Attention, host).as_deref(), Some("--cache host"));
        assert_eq!(next(ShardKind::Experts, ShardForm::default()).as_deref(), Some("--experts bank"));
    }
}
