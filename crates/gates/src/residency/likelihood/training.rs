//! Published outcomes as examples.

use super::super::graph::Op;
use super::super::outcomes::read::read;
use super::super::outcomes::row::Row;
use super::super::rule::{Conditions, Matcher, PackageFacts, Rule, RuleSeverity, Verdict};
use super::super::rules;
use super::features;
use super::logistic::Example;
use std::collections::BTreeMap;

/// An outcome with what follows from its graph, whatever is left out later.
pub struct PreparedOutcome {
    project: String,
    ane: bool,
    values: Vec<f64>,
    /// Rules that decide something and apply, but those that speak for the ANE.
    against: Vec<&'static Rule>,
}

/// Prepares the rows whose label says something.
pub fn prepare(rows: &[Row]) -> Vec<PreparedOutcome> {
    let labelled = rows.iter().filter_map(|row| Some((row, row.truth()?)));
    labelled
        .map(|(row, truth)| {
            let facts = read(&row.sketch).facts;
            let first = facts.graphs.first();
            let values = match row.features.is_empty() {
                true => first.map_or_else(Vec::new, |g| features::values(g, &row.conditions)),
                false => features::named_values(&row.features),
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
    /// True if a rule with this verdict speaks about it, among those that stand without a project's findings.
    fn says(&self, verdict: Verdict, without: Option<&str>) -> bool {
        let stands = |r: &&Rule| r.verdict == verdict && without.is_none_or(|p| r.stands_without(p));
        self.against.iter().copied().any(|r| stands(&r))
    }
}

/// Outcomes that no rule decides, as examples, and the record of rules that speak against the ANE: how many outcomes they were
/// asked about, and on how many of those they were wrong. Rows and rules of one project may be left out.
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
            // Graphs of one project resemble each other: ten of them count as much as three that know nothing of each other.
            weight: EVEN / (counts[p.project.as_str()] as f64).sqrt(),
        })
        .collect();
    let vetoed: Vec<&PreparedOutcome> = kept().filter(|p| p.says(Verdict::NotAne, without)).collect();
    (examples, (vetoed.len(), vetoed.iter().filter(|p| p.ane).count()))
}

/// Weight of a project's only outcome. With 3, a project of nine counts 1 for each.
const EVEN: f64 = 3.0;
