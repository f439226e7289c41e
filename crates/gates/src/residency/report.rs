//! Report of a residency check.

use super::device::{Device, DeviceCounts};
use super::op_summary::{OpCounts, OpSummary};
use super::rule::{Conditions, Verdict};
use super::verdict::{PackageReport, Reason};
use serde::Serialize;
use std::collections::BTreeMap;

/// Report of a residency check.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// True if no package is predicted off the ANE, in whole or in part, but for packages that are too small to
    /// matter. With `strict`, true if all packages are predicted on the ANE, small functions included.
    pub pass: bool,
    /// True if `unknown` fails, too.
    pub strict: bool,
    /// Conditions under which the packages will run.
    pub conditions: Conditions,
    /// Number of packages per verdict.
    pub verdicts: Verdicts,
    /// Number of ops per predicted device, over all packages.
    pub ops: OpCounts,
    /// The same numbers with one line for people.
    pub summary: OpSummary,
    /// Reports on the packages.
    pub packages: Vec<PackageReport>,
    /// Findings about all packages together, which decide nothing.
    pub warnings: Vec<Reason>,
    /// Comparison with the plan report of a Mac.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<Comparison>,
}

/// Number of packages per verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verdicts {
    /// Predicted on the ANE.
    pub ane: u64,
    /// Predicted elsewhere, in whole or in part.
    pub not_ane: u64,
    /// Not decided: the evidence is missing, or contradicts itself.
    pub unknown: u64,
}

impl Verdicts {
    /// Counts a package.
    pub fn add(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Ane => self.ane += 1,
            Verdict::NotAne => self.not_ane += 1,
            Verdict::Unknown => self.unknown += 1,
        }
    }
}

/// Reason for which packages are not predicted on the ANE, once for all packages that share the reason.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VerdictReason {
    /// Verdict that follows from the reason.
    pub verdict: Verdict,
    /// True if the packages are too small for their device to matter.
    pub too_small: bool,
    /// Id of the deciding rule.
    pub rule: &'static str,
    /// Statement of the rule.
    pub text: String,
    /// Advice: a change that helps.
    pub advice: String,
    /// Name of the first package with this reason.
    pub first: String,
    /// Number of packages with this reason.
    pub packages: u64,
}

impl Report {
    /// Returns the reasons of the verdicts `not_ane` and `unknown`, each once, in the order of the packages.
    pub fn verdict_reasons(&self) -> Vec<VerdictReason> {
        let mut found: Vec<VerdictReason> = Vec::new();
        for p in self.packages.iter().filter(|p| p.verdict != Verdict::Ane) {
            let (rule, text) = p.deciding();
            let is_same =
                |r: &&mut VerdictReason| (r.verdict, r.too_small, r.rule) == (p.verdict, p.too_small, rule);
            match found.iter_mut().find(is_same) {
                Some(known) => known.packages += 1,
                None => found.push(VerdictReason {
                    verdict: p.verdict,
                    too_small: p.too_small,
                    rule,
                    text,
                    advice: p.reason_against().map(|r| r.advice.clone()).unwrap_or_default(),
                    first: p.name.clone(),
                    packages: 1,
                }),
            }
        }
        found
    }
}

/// Tells whether a package passes by its prediction.
pub fn passes(p: &PackageReport, strict: bool) -> bool {
    match p.verdict {
        Verdict::Ane => !strict || p.small_functions.is_empty(),
        Verdict::Unknown => !strict,
        Verdict::NotAne => p.too_small && !strict,
    }
}

/// Package in a plan report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PackagePlan {
    /// Name of the package.
    pub name: String,
    /// Predicted verdict.
    pub predicted: Verdict,
    /// Verdict by the plan.
    pub measured: Verdict,
    /// Number of the package's compute ops per device, by the plan.
    pub ops: DeviceCounts,
    /// Counts of all ops in the plan, with one line for people.
    pub summary: OpSummary,
}

/// Op whose predicted and planned devices differ: the ANE on one side only.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Disagreement {
    /// Name of the package.
    pub package: String,
    /// Name of the function.
    pub function: String,
    /// Name of the op.
    pub op: String,
    /// Type of the op.
    #[serde(rename = "type")]
    pub op_type: String,
    /// Predicted verdict.
    pub predicted: Verdict,
    /// Preferred device in the plan.
    pub preferred: Option<Device>,
    /// Devices in the plan that support the op.
    pub supported: Vec<Device>,
    /// Ids of the rules that apply to the op.
    pub rules: Vec<&'static str>,
}

/// Comparison of predictions with a plan report.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Comparison {
    /// Operating system of the report.
    pub os: String,
    /// Chip of the report.
    pub chip: String,
    /// Compute units of the report.
    pub compute_units: String,
    /// Worst verdict by the plan, over the checked packages that the report has.
    pub verdict: Option<Verdict>,
    /// Number of packages per verdict by the plan.
    pub verdicts: Verdicts,
    /// Number of compute ops that are in both the packages and the report.
    pub joined: u64,
    /// Number of compute ops that the report lacks, in functions that the report has.
    pub not_in_report: u64,
    /// Number of ops of the report that no checked package has.
    pub not_in_packages: u64,
    /// Number of checked packages that the report lacks.
    pub packages_without_plan: u64,
    /// Number of joined ops per planned device, by predicted verdict: `ane`, `unknown`, `not_ane`.
    pub confusion: BTreeMap<&'static str, DeviceCounts>,
    /// Number of decided predictions that agree with the plan.
    pub agreeing: u64,
    /// Number of decided predictions for ops with a device in the plan.
    pub decided: u64,
    /// Packages that the report has.
    pub packages: Vec<PackagePlan>,
    /// The first 1000 ops on which prediction and plan disagree.
    pub disagreements: Vec<Disagreement>,
    /// Number of all ops on which prediction and plan disagree.
    pub disagreeing: u64,
}
