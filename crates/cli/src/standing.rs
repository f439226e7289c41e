//! Results of an experiment's expectations and gates over its runs.
//!
//! ```text
//! runs, oldest first ──> the newest outcome for each golden; a failure stands until
//!                          its golden passes, or
//!                          the packages were built anew and are examined again
//! ```
//!
//! An easier golden therefore hides no failure. Runs without a golden file share one place, in which the newest counts.

use crate::registry::{Figure, FigureNeeds};
use anemoe_bundle::journal::{Event, status};
use anemoe_bundle::{Chain, file_sha256};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Fact with the goldens that a run was compared with: `file` and `sha256` of each.
pub const GOLDENS: &str = "goldens";
/// Fact with the hash of the packages that a run examined.
pub const PACKAGES: &str = "packages_sha256";
/// Commands that make packages.
const BUILDERS: [&str; 2] = ["build", "assemble"];

/// Computes the hash of a bundle's packages, which a build without changes keeps; none if the bundle cannot be read.
pub fn packages_sha256(bundle: &Path) -> Option<String> {
    let chain = Chain::read(bundle).ok()?;
    let hashes: Vec<&str> = chain.shards.iter().map(|s| s.sha256.as_str()).collect();
    Some(anemoe_bundle::sha256(hashes.concat().as_bytes()))
}

/// Describes files of goldens for an event: name and hash of each.
pub fn golden_facts(paths: &[PathBuf]) -> Vec<Value> {
    let one = |path: &PathBuf| {
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned());
        json!({"file": name, "sha256": file_sha256(path).ok()})
    };
    paths.iter().map(one).collect()
}

/// A golden that a run was compared with.
#[derive(Clone, PartialEq)]
struct ComparedGolden {
    /// Hash of the file; empty if no file was named.
    key: String,
    name: String,
}

/// Lists the goldens of a run; one without a name if the run had none.
fn goldens(run: &Event) -> Vec<ComparedGolden> {
    let text = |v: &Value, key: &str| v[key].as_str().unwrap_or_default().to_string();
    let listed = run.facts.get(GOLDENS).and_then(Value::as_array).into_iter().flatten();
    let mut found: Vec<ComparedGolden> =
        listed.map(|g| ComparedGolden { key: text(g, "sha256"), name: text(g, "file") }).collect();
    if found.is_empty() {
        // Earlier versions wrote the path alone.
        let path = run.options.get("golden").and_then(Value::as_str).unwrap_or_default();
        found.push(ComparedGolden { key: path.into(), name: path.into() });
    }
    found
}

/// Tells whether the packages that `failed` examined were built anew, by `run` or before it.
fn is_rebuilt(failed: &Event, run: &Event) -> bool {
    fn fact<'a>(e: &'a Event, key: &str) -> Option<&'a str> {
        e.facts.get(key).and_then(Value::as_str)
    }
    let (before, now) = (fact(failed, PACKAGES), fact(run, PACKAGES));
    let same_bundle = before.is_some() && fact(failed, "bundle") == fact(run, "bundle");
    now.is_some() && now != before && (BUILDERS.contains(&run.kind.as_str()) || same_bundle)
}

/// Outcome of an expectation.
pub struct Standing<'a> {
    pub found: f64,
    pub holds: bool,
    /// Run that brought the figure.
    pub run: &'a Event,
    /// File of the golden with which the expectation fails.
    pub golden: Option<String>,
}

/// A failed figure that no later run has replaced.
struct StandingFailure<'a> {
    found: f64,
    run: &'a Event,
    golden: ComparedGolden,
    /// True if the packages were built anew, so that the next figure replaces the failure.
    is_stale: bool,
}

/// Finds the figure that decides an expectation: the newest, or the newest failing one while a failure stands.
pub fn of_figure<'a>(
    events: &'a [Event],
    figure: &Figure,
    holds: impl Fn(f64) -> bool,
) -> Option<Standing<'a>> {
    let mut newest = None;
    let mut failures: Vec<StandingFailure<'a>> = Vec::new();
    for run in events {
        failures.iter_mut().for_each(|f| f.is_stale |= is_rebuilt(f.run, run));
        let figures = run.facts.get("figures");
        let Some(found) = figures.and_then(|f| f.get(figure.name)?.as_f64()) else { continue };
        failures.retain(|f| !f.is_stale);
        let keys = match figure.needs {
            FigureNeeds::Weights => goldens(run),
            // Sizes and speeds belong to the packages, independent of the golden.
            FigureNeeds::Nothing | FigureNeeds::Mac => {
                vec![ComparedGolden { key: String::new(), name: String::new() }]
            }
        };
        failures.retain(|f| !keys.contains(&f.golden));
        let holds = holds(found);
        if !holds {
            failures.extend(keys.into_iter().map(|golden| StandingFailure {
                found,
                run,
                golden,
                is_stale: false,
            }));
        }
        newest = Some(Standing { found, holds, run, golden: None });
    }
    let failed = failures.pop().map(|f| {
        let golden = Some(f.golden.name).filter(|name| !name.is_empty());
        Standing { found: f.found, holds: false, run: f.run, golden }
    });
    failed.or(newest)
}

/// Returns the newest of these runs for each command, and the runs whose gate failed with a golden that has not passed since.
pub fn deciding_runs<'a>(runs: impl Iterator<Item = &'a Event>) -> Vec<&'a Event> {
    // Each run has the goldens that still have to pass, and whether the packages were built anew since.
    let mut kept: Vec<(&Event, Vec<ComparedGolden>, bool)> = Vec::new();
    for run in runs {
        let ended = [status::DONE, status::FAIL].contains(&run.status.as_str());
        kept.retain_mut(|(old, open, is_stale)| {
            *is_stale |= is_rebuilt(old, run);
            if old.kind != run.kind {
                return true;
            }
            if ended {
                let passed = goldens(run);
                open.retain(|golden| !passed.contains(golden));
            }
            old.status == status::FAIL && !(ended && (*is_stale || open.is_empty()))
        });
        kept.push((run, goldens(run), false));
    }
    kept.into_iter().map(|(run, ..)| run).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry;

    /// Makes a run of `kind` over packages of this hash, with a golden if one is named.
    fn run(kind: &str, packages: &str, golden: &str, cosine: Option<f64>, passed: bool) -> Event {
        let mut facts = json!({"bundle": "b", PACKAGES: packages});
        if !golden.is_empty() {
            facts[GOLDENS] = json!([{"file": format!("{golden}.npz"), "sha256": golden}]);
        }
        if let Some(cosine) = cosine {
            facts["figures"] = json!({"logit_cosine_min": cosine, "shard_mb": 100.0 * cosine});
        }
        let facts = facts.as_object().unwrap().clone();
        Event { facts, ..Event::new(kind, if passed { status::DONE } else { status::FAIL }) }
    }

    fn cosine(events: &[Event]) -> (f64, bool, Option<String>) {
        let figure = registry::find("logit_cosine_min").unwrap();
        let found = of_figure(events, figure, |x| x >= 0.97).unwrap();
        (found.found, found.holds, found.golden)
    }

    fn fails(events: &[Event]) -> bool {
        deciding_runs(events.iter()).iter().any(|e| e.status == status::FAIL)
    }

    #[test]
    fn an_easier_golden_hides_no_failure() {
        let hard = run("validate", "p", "hard", Some(0.88), false);
        let easy = run("validate", "p", "easy", Some(0.99), true);
        let mut events = vec![hard, easy];
        assert_eq!(cosine(&events), (0.88, false, Some("hard.npz".into())));
        assert!(fails(&events));
        // A later failure of the same golden replaces the failure, and a pass ends it.
        events.push(run("validate", "p", "hard", Some(0.9), false));
        assert_eq!(cosine(&events), (0.9, false, Some("hard.npz".into())));
        events.push(run("validate", "p", "hard", Some(0.98), true));
        assert_eq!(cosine(&events), (0.98, true, None));
        assert!(!fails(&events));
    }

    #[test]
    fn packages_that_are_built_anew_begin_anew() {
        let mut events = vec![run("validate", "p", "hard", Some(0.88), false)];
        // A build that reuses everything changes nothing, nor does a build that no run has examined yet.
        events.push(run("build", "p", "", None, true));
        events.push(run("validate", "p", "easy", Some(0.99), true));
        assert!(!cosine(&events).1 && fails(&events));
        events.push(run("build", "q", "", None, true));
        assert!(!cosine(&events).1 && fails(&events));
        events.push(run("validate", "q", "easy", Some(0.99), true));
        assert!(cosine(&events).1 && !fails(&events));
        // The build may have run outside of the experiment.
        events.push(run("validate", "q", "hard", Some(0.5), false));
        events.push(run("validate", "r", "easy", Some(0.99), true));
        assert!(cosine(&events).1 && !fails(&events));
    }

    #[test]
    fn several_goldens_have_to_pass_each() {
        let mut both = run("validate", "p", "hard", Some(0.88), false);
        both.facts[GOLDENS].as_array_mut().unwrap().push(json!({"file": "easy.npz", "sha256": "easy"}));
        let mut events = vec![both, run("validate", "p", "easy", Some(0.99), true)];
        assert!(!cosine(&events).1 && fails(&events));
        events.push(run("validate", "p", "hard", Some(0.99), true));
        assert!(cosine(&events).1 && !fails(&events));
    }

    #[test]
    fn figures_of_packages_know_no_golden() {
        let events = [run("build", "p", "hard", Some(0.88), true), run("check", "p", "", Some(0.99), true)];
        let found = of_figure(&events, registry::find("shard_mb").unwrap(), |x| x > 90.0).unwrap();
        assert!(found.holds && found.found == 99.0);
        // Neither an error nor a run without an end hides a failure.
        let mut gates = vec![run("validate", "p", "hard", None, false)];
        gates.push(Event { status: status::ERROR.into(), ..run("validate", "p", "hard", None, false) });
        assert!(fails(&gates));
    }
}
