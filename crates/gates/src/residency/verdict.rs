//! Makes verdicts from the rules that apply: per op, per function and per package.

use super::imported::{ImportedEvidence, MeasuredOutcome};
use super::matchers;
use super::op_summary::{OpCounts, OpSummary, predicted_device};
use super::precedents::{Nearest, Precedents};
use super::rule::{Conditions, Evidence, Hit, Matcher, Question, Rule, RuleSeverity, Verdict};
use super::rules;
use crate::program_facts::PackageFacts;
use crate::program_facts::digest::program_digest;
use crate::program_facts::graph::{Graph, Op};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Rule of an op type about which nothing is published.
pub const NO_SIGHTING: &str = "op.no_sighting";
/// Rule of a function that measured graphs of its kind and form decide, or on which they contradict each other.
pub const ALIKE: &str = "measured.alike";
/// Rule of a function of whose kind, form and size nothing was measured.
pub const NOTHING_ALIKE: &str = "measured.nothing_alike";
/// Rule of a package whose program an imported report measured.
pub const MEASURED: &str = "evidence.measured";

/// Rules by which a graph goes to the CPU because it has next to no work.
const TOO_SMALL: [&str; 2] = ["prefer.tiny", "prefer.trivial"];

/// Reason for a verdict: a rule that applied, once per op type.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reason {
    /// Id of the rule.
    pub rule: &'static str,
    /// Question that the rule answers.
    pub question: Question,
    /// Severity of the rule.
    pub severity: RuleSeverity,
    /// Verdict that follows from the rule.
    pub verdict: Verdict,
    /// Name of the first op that the rule applies to; empty for a function or package as a whole.
    pub op: String,
    /// Type of the first op.
    pub op_type: String,
    /// Name of the first function that the rule applies to; empty for a package as a whole.
    pub function: String,
    /// Number of functions that the rule applies to.
    pub functions: u64,
    /// Number of ops that the rule applies to, over all functions.
    pub ops: u64,
    /// Statement of the rule, with the figures of the first op.
    pub text: String,
    /// Advice: a change that helps.
    pub advice: String,
    /// Evidence for the rule.
    pub evidence: Vec<Evidence>,
}

/// Op with its prediction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OpVerdict {
    /// Name of the op.
    pub name: String,
    /// Name of the op's first result.
    pub result: String,
    /// Type of the op.
    #[serde(rename = "type")]
    pub op_type: String,
    /// Prediction for the op, at most as good as its function's as a whole.
    pub verdict: Verdict,
    /// Ids of the rules that apply to the op.
    pub rules: Vec<&'static str>,
}

/// Report on one function.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FunctionReport {
    /// Name of the function.
    pub name: String,
    /// Prediction for the function.
    pub verdict: Verdict,
    /// True if the function is predicted elsewhere only because it is too small for its device to matter.
    pub too_small: bool,
    /// Bytes of the weights that the function uses, as stored.
    pub weight_bytes: Option<u64>,
    /// Number of ops by predicted device.
    pub ops: OpCounts,
    /// Id of a rule that speaks for the ANE, if there is one.
    pub support: Option<&'static str>,
    /// Ids of the measured graphs that are nearest to the function, where no rule speaks against the ANE.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub precedents: Vec<String>,
    /// Every op, where the list was wanted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub op_list: Vec<OpVerdict>,
}

/// Function that runs on the CPU because it is tiny, in a package whose weights other functions hold.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SmallFunction {
    /// Name of the function.
    pub name: String,
    /// Bytes of its weights, which the CPU reads in each call.
    pub weight_bytes: u64,
}

/// Report on one package.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PackageReport {
    /// Name of the package.
    pub name: String,
    /// Kind of shard; present in a bundle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Verdict of the functions that hold the package's weights, or the measured outcome of the same program.
    pub verdict: Verdict,
    /// Measured outcome of the same program, in imported reports.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<MeasuredOutcome>,
    /// True if the package is predicted elsewhere only because the functions that hold its weights are too small for
    /// their device to matter. That is not a failure.
    pub too_small: bool,
    /// Functions that are too small for their device to matter, where other functions hold the weights. They do not
    /// count for the verdict.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub small_functions: Vec<SmallFunction>,
    /// Counts of the ops, and one line about them.
    pub summary: OpSummary,
    /// Number of ops by predicted device, over all functions.
    pub ops: OpCounts,
    /// Bytes of weights as stored.
    pub weight_bytes: Option<u64>,
    /// Reports on the functions.
    pub functions: Vec<FunctionReport>,
    /// Reasons for which the verdict is not `ane`.
    pub reasons: Vec<Reason>,
    /// Findings that decide nothing.
    pub warnings: Vec<Reason>,
}

impl PackageReport {
    /// Returns the id and text of the rule that decides: the one that weighs most against the ANE, or one that speaks for it.
    pub fn deciding_rule(&self) -> String {
        let (rule, text) = self.deciding();
        format!("{rule}: {text}")
    }

    /// Returns the id of the rule that decides, and its text.
    pub(super) fn deciding(&self) -> (&'static str, String) {
        if let Some(measured) = &self.measured {
            return (MEASURED, measured.text());
        }
        let support = || {
            let id = self.functions.iter().find_map(|f| f.support).unwrap_or(ALIKE);
            (id, "measured graphs of its kind and form, nearest in size, ran on the ANE")
        };
        let against = self.reason_against().map(|r| (r.rule, r.text.as_str()));
        let (id, found) = against.unwrap_or_else(support);
        // The table's text holds for all packages of a type; a reason's text may name an op of one package.
        (id, rules::find(id).map_or(found, |rule| &rule.text).to_string())
    }

    /// Returns the reason that weighs most against the ANE, among those with the package's verdict.
    pub(super) fn reason_against(&self) -> Option<&Reason> {
        self.reasons.iter().find(|r| r.verdict == self.verdict)
    }
}

/// Judge: the rules, the measured graphs and the evidence for one set of conditions.
pub struct Judge {
    conditions: Conditions,
    evidence: Option<Arc<ImportedEvidence>>,
    precedents: Arc<Precedents>,
    rules: Vec<&'static Rule>,
    by_type: HashMap<&'static str, Vec<&'static Rule>>,
}

/// Rules that applied to a package so far, each once per op type.
#[derive(Default)]
struct RuleFindings {
    /// Reasons, each with the last function that the rule applied to.
    list: Vec<(Reason, String)>,
    known: BTreeMap<(&'static str, String), usize>,
}

/// Verdict and rules of one op.
struct JudgedOp {
    verdict: Verdict,
    /// Verdict by rules of whether the program loads with the op.
    loads: Verdict,
    rules: Vec<&'static str>,
}

impl Judge {
    /// Makes a judge with all rules and published outcomes, and those of imported reports where there are any.
    pub fn new(conditions: Conditions, evidence: Option<Arc<ImportedEvidence>>) -> Judge {
        let precedents = evidence.as_ref().map_or_else(Precedents::known, |e| e.precedents());
        Judge { evidence, ..Judge::with_rules(conditions, rules::all().collect(), precedents) }
    }

    /// Makes a judge with some rules and outcomes.
    pub fn with_rules(
        conditions: Conditions,
        rules: Vec<&'static Rule>,
        precedents: Arc<Precedents>,
    ) -> Judge {
        let mut by_type: HashMap<&str, Vec<&Rule>> = HashMap::new();
        for rule in &rules {
            for t in &rule.types {
                by_type.entry(t).or_default().push(rule);
            }
        }
        Judge { conditions, evidence: None, precedents, rules, by_type }
    }

    /// Returns the conditions under which the packages will run.
    pub fn conditions(&self) -> &Conditions {
        &self.conditions
    }

    /// Judges a package. With `list_ops`, the report has every op.
    pub fn package(&self, name: &str, facts: &PackageFacts, list_ops: bool) -> PackageReport {
        let mut findings = RuleFindings::default();
        let mut whole = Verdict::Ane;
        for rule in &self.rules {
            if let Matcher::Package(matches) = rule.matcher
                && let Some(hit) = matches(facts, &self.conditions)
            {
                findings.add(&rule.id, "", None, || reason(rule, "", None, hit));
                whole = whole.max(rule.weight());
            }
        }
        let mut summary = OpSummary::default();
        let functions: Vec<FunctionReport> = facts
            .graphs
            .iter()
            .map(|g| self.function(g, whole, &mut findings, &mut summary, list_ops))
            .collect();
        let summary = summary.finish();
        let (reasons, warnings) = findings.split();
        let weight_bytes = facts.weight_bytes;
        let (verdict, too_small, small_functions) = weigh_functions(&functions, weight_bytes);
        let report = PackageReport {
            name: name.into(),
            kind: None,
            verdict,
            measured: None,
            too_small,
            small_functions,
            ops: summary.ops,
            summary,
            weight_bytes,
            functions,
            reasons,
            warnings,
        };
        let find = |e: &Arc<ImportedEvidence>| e.find(&program_digest(facts), &self.conditions);
        match self.evidence.as_ref().and_then(find) {
            Some(measured) => as_measured(report, measured),
            None => report,
        }
    }

    fn function(
        &self,
        g: &Graph,
        package: Verdict,
        findings: &mut RuleFindings,
        summary: &mut OpSummary,
        list_ops: bool,
    ) -> FunctionReport {
        // A rule about the function as a whole decides for all of its ops.
        let mut around = package;
        let mut too_small = false;
        let mut other_reasons = package == Verdict::NotAne;
        let mut to_gpu = false;
        for rule in &self.rules {
            let Matcher::Graph(matches) = rule.matcher else { continue };
            let Some(hit) = matches(g, &self.conditions) else { continue };
            to_gpu |= rule.decides() && rule.id.starts_with("prefer.gpu");
            findings.add(&rule.id, &g.function, None, || reason(rule, &g.function, None, hit));
            around = around.max(rule.weight());
            if rule.decides() && rule.verdict == Verdict::NotAne {
                let is_small = TOO_SMALL.contains(&rule.id.as_str());
                (too_small, other_reasons) = (too_small || is_small, other_reasons || !is_small);
            }
        }
        let judged: Vec<JudgedOp> = g.ops.iter().map(|op| self.op(op, g, findings)).collect();
        let worst_op = judged.iter().map(|j| j.verdict).max().unwrap_or(Verdict::Ane);
        // A program that does not load runs none of its ops on the ANE.
        around = judged.iter().map(|j| j.loads).fold(around, Verdict::max);
        let (mut support, mut precedents) = (None, Vec::new());
        if around.max(worst_op) == Verdict::Ane {
            let found = self.by_measured(g, &mut precedents);
            around = found.verdict;
            match around {
                Verdict::Ane => support = Some(found.rule),
                _ => findings.add(found.rule, &g.function, None, || found),
            }
        }
        let mut own = OpSummary::default();
        g.no_device.iter().for_each(|(op_type, n)| own.count_without_device(op_type, *n));
        let mut op_list = Vec::new();
        for (op, judged) in g.ops.iter().zip(judged) {
            let verdict = judged.verdict.max(around);
            own.count(&op.op_type, predicted_device(verdict, to_gpu));
            if list_ops {
                op_list.push(OpVerdict {
                    name: op.name.clone(),
                    result: op.result.clone(),
                    op_type: op.op_type.clone(),
                    verdict,
                    rules: judged.rules,
                });
            }
        }
        let verdict = worst_op.max(around);
        summary.add(&own);
        FunctionReport {
            name: g.function.clone(),
            verdict,
            too_small: too_small && !other_reasons && worst_op != Verdict::NotAne,
            weight_bytes: g.weight_bytes,
            ops: own.ops,
            support,
            precedents,
            op_list,
        }
    }

    /// Judges a function against which no rule speaks: by measured graphs, else by the rules for what was not measured.
    fn by_measured(&self, g: &Graph, precedents: &mut Vec<String>) -> Reason {
        let nearest = self.precedents.nearest(g, &self.conditions).unwrap_or_default();
        if !nearest.in_reach {
            let mut otherwise = self.rules.iter().filter_map(|rule| match rule.matcher {
                Matcher::Otherwise(matches) => {
                    matches(g, &self.conditions).map(|hit| reason(rule, &g.function, None, hit))
                }
                _ => None,
            });
            if let Some(found) = otherwise.next() {
                return found;
            }
        }
        precedents.extend(nearest.rows.iter().map(|row| row.id.clone()));
        measured(g, &nearest)
    }

    fn op(&self, op: &Op, g: &Graph, findings: &mut RuleFindings) -> JudgedOp {
        let mut judged = JudgedOp { verdict: Verdict::Ane, loads: Verdict::Ane, rules: Vec::new() };
        // A rule about types, shapes or compression does not make an op type known.
        let mut known = false;
        let by_type = self.by_type.get(op.op_type.as_str()).into_iter().flatten();
        let by_type = by_type.map(|rule| (rule, Hit::default()));
        let others = self.rules.iter().filter_map(|rule| match rule.matcher {
            Matcher::Op(matches) => matches(op, g, &self.conditions).map(|hit| (rule, hit)),
            _ => None,
        });
        for (rule, hit) in by_type.chain(others) {
            judged.rules.push(&rule.id);
            if rule.decides() {
                known |= rule.id.starts_with("op.");
                judged.verdict = judged.verdict.max(rule.verdict);
                if rule.question == Question::Loads {
                    judged.loads = judged.loads.max(rule.verdict);
                }
            }
            if !rule.decides() || rule.verdict != Verdict::Ane {
                findings.add(&rule.id, &g.function, Some(op), || reason(rule, &g.function, Some(op), hit));
            }
        }
        if !known {
            findings.add(NO_SIGHTING, &g.function, Some(op), || no_sighting(op, g));
            judged.rules.push(NO_SIGHTING);
            judged.verdict = judged.verdict.max(Verdict::Unknown);
        }
        judged
    }
}

/// Replaces the prediction by the measured outcome of the same program. Ops stay as predicted, unless all of them ran
/// on the Neural Engine.
fn as_measured(mut report: PackageReport, measured: MeasuredOutcome) -> PackageReport {
    report.verdict = measured.verdict;
    // Too small is an excuse for running on the CPU, not for being refused or ending the process.
    report.too_small &= measured.verdict == Verdict::NotAne && !measured.label.ends_with("FAIL");
    if measured.verdict == Verdict::Ane {
        report.small_functions.clear();
        report.warnings.extend(std::mem::take(&mut report.reasons));
        report.summary.place_all_on_ane();
        report.ops = report.summary.ops;
        for f in &mut report.functions {
            (f.verdict, f.too_small) = (Verdict::Ane, false);
            f.ops.place_all_on_ane();
            f.op_list.iter_mut().for_each(|op| op.verdict = Verdict::Ane);
        }
    } else {
        let reason = Reason {
            severity: RuleSeverity::Hard,
            functions: report.functions.len() as u64,
            text: measured.text(),
            advice: "try another form: anemoe tune on that Mac, or anemoe forms".into(),
            ..Reason::of(MEASURED, measured.verdict, "")
        };
        report.reasons.insert(0, reason);
    }
    report.measured = Some(measured);
    report
}

/// Combines the verdicts of a package's functions: the worst of those that are not too small. Functions that are too
/// small count only where they hold at least half of the weights, or are all. Returns the verdict, whether the package is
/// too small, and the functions that do not count.
fn weigh_functions(
    functions: &[FunctionReport],
    weight_bytes: Option<u64>,
) -> (Verdict, bool, Vec<SmallFunction>) {
    let deciding = |small: bool| functions.iter().filter(move |f| small || !f.too_small);
    let verdict = |small: bool| deciding(small).map(|f| f.verdict).max();
    let small: Vec<SmallFunction> = functions
        .iter()
        .filter(|f| f.too_small)
        .map(|f| SmallFunction { name: f.name.clone(), weight_bytes: f.weight_bytes.unwrap_or(0) })
        .collect();
    let small_bytes = small.iter().fold(0u64, |n, f| n.saturating_add(f.weight_bytes));
    match verdict(false) {
        Some(verdict) if small_bytes < weight_bytes.unwrap_or(0).div_ceil(2) => (verdict, false, small),
        others => {
            let verdict = verdict(true).unwrap_or(Verdict::Unknown);
            let too_small = !small.is_empty() && others != Some(Verdict::NotAne);
            (verdict, too_small, Vec::new())
        }
    }
}

fn no_sighting(op: &Op, g: &Graph) -> Reason {
    Reason {
        question: Question::Admissible,
        op: op.name.clone(),
        op_type: op.op_type.clone(),
        ops: 1,
        text: format!("nothing is published about `{}` on the ANE", op.op_type),
        advice: "look it up in the first plan report of a Mac, or spell it out of known ops".into(),
        ..Reason::of(NO_SIGHTING, Verdict::Unknown, &g.function)
    }
}

/// Most measured graphs that a reason lists as evidence.
const LISTED: usize = 6;

/// Makes the reason for the verdict of measured graphs.
fn measured(g: &Graph, nearest: &Nearest<'_>) -> Reason {
    const ADVICE: &str = "look at a plan report of a Mac, or put it into one package with";
    let (rule, what, with) = match (nearest.in_reach, nearest.verdict) {
        (false, _) => {
            (NOTHING_ALIKE, "nothing of its kind and form was measured near its size", "more of its kind")
        }
        (true, Verdict::Unknown) => (
            ALIKE,
            "measured graphs of its kind and form contradict each other near its size",
            "its neighbours",
        ),
        (true, _) => (
            ALIKE,
            "measured graphs of its kind and form, nearest in size, did not run on the ANE",
            "its neighbours",
        ),
    };
    let bytes = g.weight_bytes.map_or("of unknown size".into(), matchers::size);
    Reason {
        text: format!("{what} ({} ops, {bytes})", g.at_least_ops()),
        advice: format!("{ADVICE} {with}"),
        evidence: nearest.rows.iter().take(LISTED).map(|row| row.evidence()).collect(),
        ..Reason::of(rule, nearest.verdict, &g.function)
    }
}

impl RuleFindings {
    fn add(&mut self, rule: &'static str, function: &str, op: Option<&Op>, make: impl FnOnce() -> Reason) {
        let key = (rule, op.map(|op| op.op_type.clone()).unwrap_or_default());
        let Some(&i) = self.known.get(&key) else {
            self.known.insert(key, self.list.len());
            self.list.push((make(), function.to_string()));
            return;
        };
        let (reason, last) = &mut self.list[i];
        reason.ops += u64::from(op.is_some());
        // Functions are added one after another, so another name is another function.
        if last != function {
            reason.functions += 1;
            *last = function.to_string();
        }
    }

    /// Splits the findings into reasons and warnings, most decisive first.
    fn split(self) -> (Vec<Reason>, Vec<Reason>) {
        let mut list: Vec<Reason> = self.list.into_iter().map(|(reason, _)| reason).collect();
        list.sort_by_key(|r| (std::cmp::Reverse(r.verdict), r.severity));
        list.into_iter().partition(|r| r.severity != RuleSeverity::Warning)
    }
}

impl Reason {
    /// Makes a reason without a text, about a function; about a package where the name is empty.
    fn of(rule: &'static str, verdict: Verdict, function: &str) -> Reason {
        Reason {
            rule,
            question: Question::Preferred,
            severity: RuleSeverity::Soft,
            verdict,
            op: String::new(),
            op_type: String::new(),
            function: function.into(),
            functions: u64::from(!function.is_empty()),
            ops: 0,
            text: String::new(),
            advice: String::new(),
            evidence: Vec::new(),
        }
    }
}

/// Makes the reason for a rule that applied.
pub(super) fn reason(rule: &'static Rule, function: &str, op: Option<&Op>, hit: Hit) -> Reason {
    let text =
        if hit.detail.is_empty() { rule.text.clone() } else { format!("{} ({})", rule.text, hit.detail) };
    Reason {
        question: rule.question,
        severity: rule.severity,
        op: op.map(|op| op.name.clone()).unwrap_or_default(),
        op_type: op.map(|op| op.op_type.clone()).unwrap_or_default(),
        ops: u64::from(op.is_some()),
        text,
        advice: hit.advice.unwrap_or_else(|| rule.advice.clone()),
        evidence: rule.evidence.clone(),
        ..Reason::of(&rule.id, rule.verdict, function)
    }
}
