//! Report of a check.

use super::device::{Device, DeviceCounts};
use super::op_summary::{OpCounts, OpSummary};
use super::rule::{Conditions, Verdict};
use super::verdict::{PackageReport, Reason};
use serde::Serialize;
use std::collections::BTreeMap;

/// Report of a check.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// No package, and no op of one, is predicted off the ANE, save packages that are too small to matter. With `strict`, all
    /// packages are predicted on it.
    pub pass: bool,
    /// `unknown` fails too.
    pub strict: bool,
    /// Conditions that the packages will meet.
    pub conditions: Conditions,
    /// Packages per verdict.
    pub verdicts: Verdicts,
    /// Ops of all packages.
    pub ops: OpCounts,
    /// The same in a line.
    pub summary: OpSummary,
    /// The packages.
    pub packages: Vec<PackageReport>,
    /// Findings about the packages together, which decide nothing.
    pub warnings: Vec<Reason>,
    /// Comparison with a Mac's plan report.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<Comparison>,
}

/// Packages per verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verdicts {
    /// Predicted on the ANE.
    pub ane: u64,
    /// Predicted elsewhere, in whole or in part.
    pub not_ane: u64,
    /// Not decided.
    pub unknown: u64,
}

impl Verdicts {
    /// Counts a package.
    pub(super) fn add(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Ane => self.ane += 1,
            Verdict::NotAne => self.not_ane += 1,
            Verdict::Unknown => self.unknown += 1,
        }
    }
}

/// Reason for which packages are not predicted on the ANE, once for all packages that share it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VerdictReason {
    /// Verdict that it gives.
    pub verdict: Verdict,
    /// True if the packages are too small for their place to matter.
    pub too_small: bool,
    /// Id of the rule that decides.
    pub rule: &'static str,
    /// Statement of the rule.
    pub text: String,
    /// Advice: the change that helps.
    pub advice: String,
    /// First package that it decides.
    pub first: String,
    /// Packages that it decides.
    pub packages: u64,
}

impl Report {
    /// Reasons of the verdicts `not_ane` and `unknown`, each once, in the order of the packages.
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

/// True if a package passes by its prediction.
pub fn passes(p: &PackageReport, strict: bool) -> bool {
    match p.verdict {
        Verdict::Ane => !strict || p.small_functions.is_empty(),
        Verdict::Unknown => !strict,
        Verdict::NotAne => p.too_small && !strict,
    }
}

/// A package in a plan report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PackagePlan {
    /// Name.
    pub name: String,
    /// Prediction.
    pub predicted: Verdict,
    /// Verdict of the plan.
    pub measured: Verdict,
    /// Its compute ops in the plan.
    pub ops: DeviceCounts,
    /// All of its ops in the plan, in a line.
    pub summary: OpSummary,
}

/// An op that is predicted on one side and planned on the other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Disagreement {
    /// Package.
    pub package: String,
    /// Function.
    pub function: String,
    /// Op.
    pub op: String,
    /// Its type.
    #[serde(rename = "type")]
    pub op_type: String,
    /// Prediction.
    pub predicted: Verdict,
    /// Preferred device in the plan.
    pub preferred: Option<Device>,
    /// Devices that the plan lists for it.
    pub supported: Vec<Device>,
    /// Rules that say something about the op.
    pub rules: Vec<&'static str>,
}

/// Predictions against a plan report.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Comparison {
    /// System of the report.
    pub os: String,
    /// Chip of the report.
    pub chip: String,
    /// Compute units of the report.
    pub compute_units: String,
    /// Verdict over all packages that the plan has: `ane` if it says so for every one.
    pub verdict: Option<Verdict>,
    /// Packages by what the plan says.
    pub verdicts: Verdicts,
    /// Compute ops that are in both.
    pub joined: u64,
    /// Compute ops of the packages' functions in the report that the report lacks.
    pub not_in_report: u64,
    /// Ops of the report that no checked package has.
    pub not_in_packages: u64,
    /// Checked packages that the report says nothing about.
    pub packages_without_plan: u64,
    /// Devices of the joined ops in the plan, by prediction: `ane`, `unknown`, `not_ane`.
    pub confusion: BTreeMap<&'static str, DeviceCounts>,
    /// Decided predictions that agree with the plan, of all decided predictions with a device.
    pub agreeing: u64,
    /// Decided predictions with a device in the plan.
    pub decided: u64,
    /// Packages of the report.
    pub packages: Vec<PackagePlan>,
    /// The first 1000 ops on which prediction and plan disagree.
    pub disagreements: Vec<Disagreement>,
    /// All of them.
    pub disagreeing: u64,
}
