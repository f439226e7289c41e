//! Makes training examples of published outcomes.

use super::super::graph::Op;
use super::super::outcomes::read::read;
use super::super::outcomes::row::Row;
use super::super::rule::{Conditions, Matcher, PackageFacts, Rule, RuleSeverity, Verdict};
use super::super::rules;
use super::features;
use super::logistic::Example;
use std::collections::BTreeMap;

/// Outcome with the facts that follow from its graph; projects can be left out later.
pub struct PreparedOutcome {
    project: String,
    ane: bool,
    values: Vec<f64>,
    /// Rules that apply, decide something, and do not speak for the ANE.
    against: Vec<&'static Rule>,
}

/// Prepares the rows whose label states an outcome.
pub fn prepare(rows: &[Row]) -> Vec<PreparedOutcome> {
    let labelled = rows.iter().filter_map(|row| Some((row, row.truth()?)));
    labelled
        .map(|(row, truth)| {
            let facts = read(&row.sketch).facts;
            let first = facts.graphs.first();
            let values = match row.features.is_empty() {
                true => first.map_or_else(Vec::new, |g| features::values(g, &row.conditions)),
                false => features::named_values(&row.features, &row.conditions),
            };
            PreparedOutcome {
                project: row.project.clone(),
                ane: truth == Verdict::Ane,
                values,
                against: against(&facts, &row.conditions),
            }
        })
        .collect()
}

fn against(facts: &PackageFacts, c: &Conditions) -> Vec<&'static Rule> {
    let decides = |r: &&Rule| r.severity != RuleSeverity::Warning && r.verdict != Verdict::Ane;
    rules::all().filter(decides).filter(|rule| applies(rule, facts, c)).collect()
}

fn applies(rule: &Rule, facts: &PackageFacts, c: &Conditions) -> bool {
    let graphs = || facts.graphs.iter();
    match rule.matcher {
        Matcher::Types(types) => {
            graphs().flat_map(|g| &g.ops).any(|op: &Op| types.contains(&op.op_type.as_str()))
        }
        Matcher::Op(matches) => graphs().any(|g| g.ops.iter().any(|op| matches(op, g, c).is_some())),
        Matcher::Graph(matches) => graphs().any(|g| matches(g, c).is_some()),
        Matcher::Package(matches) => matches(facts, c).is_some(),
        Matcher::Bundle(_) => false,
    }
}

impl PreparedOutcome {
    /// Tells whether a rule with this verdict applies, among the rules that have evidence outside of the project `without`.
    fn says(&self, verdict: Verdict, without: Option<&str>) -> bool {
        let stands = |r: &&Rule| r.verdict == verdict && without.is_none_or(|p| r.stands_without(p));
        self.against.iter().copied().any(|r| stands(&r))
    }
}

/// Returns the outcomes that no rule decides, as examples, and the record of rules against the ANE: the number of
/// outcomes that they ruled out, and how many of these ran on the ANE. Rows and rules of the project `without` are left out.
pub fn examples(prepared: &[PreparedOutcome], without: Option<&str>) -> (Vec<Example>, (usize, usize)) {
    let kept = || prepared.iter().filter(|p| without != Some(p.project.as_str()));
    let open = |p: &&PreparedOutcome| !p.says(Verdict::NotAne, without) && !p.says(Verdict::Unknown, without);
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for p in kept().filter(open) {
        *counts.entry(&p.project).or_default() += 1;
    }
    let examples = kept()
        .filter(open)
        .map(|p| Example {
            values: p.values.clone(),
            ane: p.ane,
            // Graphs of one project resemble each other: n of them weigh as much as `sqrt(n)` independent ones.
            weight: EVEN / (counts[p.project.as_str()] as f64).sqrt(),
        })
        .collect();
    let vetoed: Vec<&PreparedOutcome> = kept().filter(|p| p.says(Verdict::NotAne, without)).collect();
    (examples, (vetoed.len(), vetoed.iter().filter(|p| p.ane).count()))
}

/// Weight of an outcome that is the only one of its project; in a project of nine, each outcome weighs 1.
const EVEN: f64 = 3.0;
