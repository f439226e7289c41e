//! Residency: predicts whether the Neural Engine runs a package, by rules over its programs and by measured graphs.
//!
//! ```text
//! .mlpackage -----------------------analyze--> Graph --\
//! plan --lowered without weights----analyze--> Graph --+
//! row of outcomes.tsv -----------------------> Graph --rules--> against the ANE? --no--> precedents --> verdict, reasons
//! plan report of a Mac --device---------------------------> decides over the verdict
//! imported reports ---imported--> measured outcomes of the same program decide; of others, they are precedents
//! ```
//!
//! Every verdict is a prediction, and `unknown` where evidence is missing or contradicts itself. `docs/residency.md` has
//! the figures.

pub mod compare;
pub mod device;
pub mod imported;
mod matchers;
pub mod op_summary;
pub mod outcomes;
pub mod precedents;
mod report;
pub mod rule;
pub mod rules;
pub mod verdict;

pub use crate::program_facts::{PlannedPrograms, digest as program_digest, facts};
pub use report::{Comparison, Report, VerdictReason, Verdicts};

use crate::program_facts::PackageFacts;
use crate::residency::imported::ImportedEvidence;
use crate::residency::op_summary::OpSummary;
use crate::residency::report::passes;
use crate::residency::rule::{BundleFacts, Conditions, Matcher};
use crate::residency::verdict::{Judge, PackageReport};
use anemoe_bundle::Chain;
use anemoe_convert::models::Family;
use anemoe_convert::plan::{Plan, PlannedShard};
use anemoe_mlpackage::package::Package;
use rayon::prelude::*;
use std::path::Path;
use std::sync::Arc;

/// Options of a residency check.
#[derive(Clone, Debug, Default)]
pub struct CheckOptions {
    /// Conditions under which the packages will run.
    pub conditions: Conditions,
    /// True if `unknown` fails, too.
    pub strict: bool,
    /// True to list every op.
    pub list_ops: bool,
    /// Imported outcomes of the user's Macs.
    pub evidence: Option<Arc<ImportedEvidence>>,
}

impl CheckOptions {
    fn judge(&self) -> Judge {
        Judge::new(self.conditions, self.evidence.clone())
    }
}

/// Checks the residency of one package.
///
/// # Errors
/// The package is missing or invalid.
pub fn package(path: &Path, options: &CheckOptions) -> Result<Report, anemoe_mlpackage::Error> {
    Ok(opened(&Package::open(path)?, options))
}

/// Checks the residency of an opened package.
pub fn opened(package: &Package, options: &CheckOptions) -> Report {
    let name = package.path().file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let judge = options.judge();
    let facts = facts(package.model());
    let report = judge.package(&name, &facts, options.list_ops);
    let bundle = BundleFacts { packages: 1, bytes: package.total_bytes(), most_tokens: None };
    summary(vec![report], bundle, &judge, options)
}

/// Checks the residency of every package of a bundle; `done` is called after each package.
///
/// # Errors
/// A package is missing or invalid.
pub fn bundle(
    path: &Path,
    chain: &Chain,
    options: &CheckOptions,
    done: impl Fn() + Sync,
) -> Result<Report, anemoe_mlpackage::Error> {
    let judge = options.judge();
    let one = |shard: &anemoe_bundle::Shard| {
        let package = Package::open(&path.join(&shard.file))?;
        let mut report = judge.package(&shard.name, &facts(package.model()), options.list_ops);
        report.kind = Some(shard.kind.name().into());
        done();
        Ok(report)
    };
    let packages: Result<Vec<PackageReport>, anemoe_mlpackage::Error> =
        chain.shards.par_iter().map(one).collect();
    let bundle = BundleFacts {
        packages: chain.shards.len() as u64,
        bytes: chain.shards.iter().map(|s| s.bytes).sum(),
        most_tokens: most_tokens(chain),
    };
    Ok(summary(packages?, bundle, &judge, options))
}

/// Checks the packages that a plan makes, before they are built, by their programs without weights. Only the first
/// shard of each type is lowered, and the reasons of all shards name its ops.
///
/// # Errors
/// A shard cannot be lowered.
pub fn plan(family: &Family, plan: &Plan, options: &CheckOptions) -> crate::Result<Report> {
    Ok(programs(plan, &PlannedPrograms::lower(family, plan)?, options))
}

/// Checks the programs of a plan, as [`plan`] does.
pub fn programs(plan: &Plan, programs: &PlannedPrograms, options: &CheckOptions) -> Report {
    let judge = options.judge();
    let one = |(i, facts): (usize, &Arc<PackageFacts>)| {
        let first = programs.of_shards().iter().position(|&of| of == i);
        let name = first.map_or("", |shard| plan.shards[shard].name.as_str());
        judge.package(name, facts, options.list_ops)
    };
    let judged: Vec<PackageReport> = programs.types().par_iter().enumerate().map(one).collect();
    let packages = programs.of_shards().iter().zip(&plan.shards).map(|(&of, shard)| PackageReport {
        name: shard.name.clone(),
        kind: Some(shard.kind.name().into()),
        ..judged[of].clone()
    });
    let packages = packages.collect();
    let bundle = BundleFacts {
        packages: plan.shards.len() as u64,
        bytes: plan.shards.iter().map(PlannedShard::package_bytes).sum(),
        most_tokens: most_tokens(&plan.chain),
    };
    summary(packages, bundle, &judge, options)
}

fn most_tokens(chain: &Chain) -> Option<u64> {
    chain.tokens.iter().map(|count| count.max as u64).max()
}

fn summary(
    packages: Vec<PackageReport>,
    bundle: BundleFacts,
    judge: &Judge,
    options: &CheckOptions,
) -> Report {
    let mut ops = OpSummary::default();
    let mut verdicts = Verdicts::default();
    for p in &packages {
        ops.add(&p.summary);
        verdicts.add(p.verdict);
    }
    let warnings = rules::all()
        .filter_map(|rule| match rule.matcher {
            Matcher::Bundle(matches) => {
                matches(&bundle, judge.conditions()).map(|hit| verdict::reason(rule, "", None, hit))
            }
            _ => None,
        })
        .collect();
    let pass = packages.iter().all(|p| passes(p, options.strict));
    Report {
        pass,
        strict: options.strict,
        conditions: options.conditions,
        verdicts,
        ops: ops.ops,
        summary: ops.finish(),
        packages,
        warnings,
        device: None,
    }
}

#[cfg(test)]
mod tests;
