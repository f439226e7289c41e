//! Steps of a command in child processes, and the meaning of their failures.

use super::{Ended, Work, in_child};
use anemoe_bundle::ShardKind;
use anemoe_convert::form::ShardForm;
use anemoe_coreml::causes::{self, Cause, End, STALE};
use serde::Serialize;
use serde_json::Value;
use std::time::Duration;

/// Options of commands that work in children.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct RiskyArgs {
    /// Seconds that a step may take in its process before it is ended: compiling a package, loading it, asking for its plan.
    #[arg(long, value_name = "S", default_value_t = 900, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: u64,
}

/// Runner of steps.
#[derive(Clone, Copy, Debug)]
pub struct Risky {
    limit: Duration,
}

/// A step that did not end well.
#[derive(Clone, Debug, Serialize)]
pub struct ChildFailure {
    /// Package, function or form of the step.
    pub what: String,
    /// Step: `compile`, `load`, `plan` or `measure`.
    pub step: &'static str,
    /// `refused`, `crashed` or `hung`.
    pub end: End,
    /// Message of the system, or of the process.
    pub message: String,
    /// Likely causes, the most likely first.
    pub causes: Vec<&'static str>,
    /// Further advice, besides forms.
    pub advice: Vec<&'static str>,
    /// Options of the form to try next; none without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub try_form: Option<String>,
}

impl RiskyArgs {
    /// Makes the runner of steps.
    pub fn runner(self) -> Risky {
        Risky { limit: Duration::from_secs(self.timeout) }
    }
}

impl Risky {
    /// Does a step in a child process; `of` is the kind and the form of the shard, if they are known.
    ///
    /// # Errors
    /// No process can be started.
    pub fn step(
        &self,
        what: &str,
        work: &Work,
        of: Option<(ShardKind, ShardForm)>,
    ) -> anyhow::Result<Result<Value, ChildFailure>> {
        let ended = in_child(work, self.limit)?;
        let message = ended.reason();
        let end = match ended {
            Ended::Done(value) => return Ok(Ok(value)),
            Ended::Failed(_) => End::Refused,
            Ended::Crashed { .. } => End::Crashed,
            Ended::TimedOut { .. } => End::Hung,
        };
        let found = causes::of(end, work.name(), &message);
        let list = |f: fn(&Cause) -> &'static str| found.iter().map(f).filter(|t| !t.is_empty()).collect();
        Ok(Err(ChildFailure {
            what: what.into(),
            step: work.name(),
            end,
            causes: list(|c| c.text),
            advice: list(|c| c.advice),
            try_form: of.and_then(|(kind, form)| next_form(&found, kind, form)),
            message,
        }))
    }
}

impl ChildFailure {
    /// Makes the failure of a step that was not tried, or whose refusal says everything.
    pub fn refused(what: &str, step: &'static str, message: String) -> ChildFailure {
        let (causes, advice) = (Vec::new(), Vec::new());
        ChildFailure { what: what.into(), step, end: End::Refused, message, causes, advice, try_form: None }
    }

    /// Removes the cause that the model is of another system, since it was compiled just before.
    pub fn rule_out_stale(&mut self) {
        self.causes.retain(|c| *c != STALE.text);
        self.advice.retain(|a| *a != STALE.advice);
        self.advice.push("anemoe doctor --clean, which lists what Core ML keeps of earlier models");
    }

    /// Formats the failure in lines, for people.
    pub fn lines(&self) -> Vec<String> {
        let ChildFailure { what, step, end, message, .. } = self;
        let mut lines = vec![format!("{what}: {step} {}: {message}", end.word())];
        lines.extend(self.causes.iter().map(|c| format!("    likely: {c}")));
        lines.extend(self.advice.iter().map(|a| format!("    do: {a}")));
        lines.extend(self.try_form.iter().map(|f| format!("    try the form: {f}")));
        lines
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
