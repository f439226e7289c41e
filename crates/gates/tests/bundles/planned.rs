//! Checks that the residency gate judges a plan as it judges the packages built from it. Takes about 30 s on 2 busy cores.

use crate::common::{fixed, fixture};
use anemoe_bundle::{Chain, TokenCount};
use anemoe_convert::build::build;
use anemoe_convert::models;
use anemoe_convert::models::Family;
use anemoe_convert::plan::{Plan, PlanOptions};
use anemoe_convert::shard_program::lower_without_weights;
use anemoe_gates::residency::rule::{Conditions, DeviceTarget, Units};
use anemoe_gates::residency::verdict::{PackageReport, Reason};
use anemoe_gates::residency::{self, CheckOptions, facts};
use anemoe_mlpackage::package::Package;
use std::path::Path;

fn open(checkpoint: &str) -> Family {
    models::open(models::load(checkpoint).unwrap()).unwrap()
}

fn quantized(kind: &str) -> PlanOptions {
    PlanOptions { quant: kind.parse().unwrap(), ..PlanOptions::default() }
}

/// Returns sets of options, one for each cause of different programs: kinds, token counts, packing.
fn all_options() -> Vec<PlanOptions> {
    let default = PlanOptions::default;
    let range = vec![TokenCount { min: 1, max: 4 }];
    let kinds = [
        "fp16",
        "lut2-uniform",
        "lut6-tensor",
        "int8-tensor",
        "int8-channel-asymmetric",
        "int8-block",
        "int4-channel",
        "int4-block",
        "mxfp4",
    ];
    let mut all: Vec<PlanOptions> = kinds.map(quantized).into();
    all.extend([
        default(),
        PlanOptions { tokens: fixed(&[1, 4]), ..default() },
        PlanOptions { tokens: range.clone(), ..quantized("fp16") },
        PlanOptions { experts_per_shard: Some(1), ..default() },
        PlanOptions { ffn_shards: Some(2), ..quantized("int8-channel") },
        PlanOptions { tokens: range, ffn_shards: Some(2), ..quantized("int4-block-asymmetric") },
        PlanOptions { tokens: fixed(&[1]), max_context: Some(32), ..quantized("fp16") },
    ]);
    all
}

/// Returns a report without names of ops and figures in texts, which may come from another shard of the type.
fn anonymous(report: &PackageReport) -> PackageReport {
    let strip =
        |r: &Reason| Reason { op: String::new(), text: String::new(), function: String::new(), ..r.clone() };
    let mut report = report.clone();
    report.reasons = report.reasons.iter().map(strip).collect();
    report.warnings = report.warnings.iter().map(strip).collect();
    for f in &mut report.functions {
        f.name.clear();
    }
    report
}

/// Checks, for every shard, that a program lowered without weights has the facts of the built one.
fn same_facts(family: &Family, plan: &Plan, bundle: &Path) {
    for shard in &plan.shards {
        let built = Package::open(&bundle.join(shard.package_file())).unwrap();
        let (built, planned) = (facts(built.model()), facts(&lower_without_weights(family, shard).unwrap()));
        assert_eq!(built.weight_bytes, planned.weight_bytes, "{}", shard.name);
        assert_eq!(built.graphs, planned.graphs, "{}", shard.name);
    }
}

#[test]
fn plans_are_judged_as_their_packages_are() {
    let dir = tempfile::tempdir().unwrap();
    let iphone = Conditions { target: DeviceTarget::Iphone, ..Conditions::default() };
    let all_units = Conditions { units: Units::All, ..Conditions::default() };
    for name in ["tiny-gemma4-moe", "tiny-zaya"] {
        let family = fixture(name);
        for (i, options) in all_options().iter().enumerate() {
            let plan = family.plan(options).unwrap();
            let bundle = dir.path().join(format!("{name}.{i}"));
            build(&family, &plan, None, &bundle, 2, &|_| ()).unwrap();
            same_facts(&family, &plan, &bundle);
            let chain = Chain::read(&bundle).unwrap();
            for conditions in [Conditions::default(), iphone, all_units] {
                let options = CheckOptions { conditions, ..CheckOptions::default() };
                let planned = residency::plan(&family, &plan, &options).unwrap();
                let built = residency::bundle(&bundle, &chain, &options, || ()).unwrap();
                let what = format!("{name}, options {i}, {conditions:?}");
                assert_eq!(
                    (planned.pass, planned.verdicts, planned.ops),
                    (built.pass, built.verdicts, built.ops),
                    "{what}"
                );
                assert_eq!(planned.warnings, built.warnings, "{what}");
                for (p, b) in planned.packages.iter().zip(&built.packages) {
                    assert_eq!(anonymous(p), anonymous(b), "{what}");
                    assert_eq!(p.deciding_rule(), b.deciding_rule(), "{what}");
                }
                assert_eq!(planned.packages.len(), built.packages.len(), "{what}");
            }
            std::fs::remove_dir_all(&bundle).unwrap();
        }
    }
}

/// Checks shards of the two models that were measured on an M4 Max, all of them on the ANE. Shards with another graph
/// than the measured one are unknown.
#[test]
fn measured_shards_are_predicted_where_they_were_seen() {
    for (model, kind, expected) in [
        // Measured: 40 MoE shards in lut4 (101 MB) and in int8-tensor (202 MB), and attention without rows of
        // convolutions in its state.
        ("synthetic:zaya1-8b", "lut4", "attention unknown 40, head ane 5, moe ane 40"),
        ("synthetic:zaya1-8b", "int8-tensor", "attention unknown 40, head ane 5, moe ane 40"),
        // Measured: packs of 16 experts in lut4 (46 and 54 MB) and in fp16 (191 and 226 MB), and 30 attention shards.
        (
            "synthetic:gemma4-26b-a4b",
            "lut4",
            "attention ane 30, experts ane 210, experts_combine ane 30, head ane 4",
        ),
        (
            "synthetic:gemma4-26b-a4b",
            "fp16",
            "attention ane 30, experts ane 210, experts_combine ane 30, head ane 4",
        ),
    ] {
        let family = open(model);
        let plan = family.plan(&quantized(kind)).unwrap();
        let report = residency::plan(&family, &plan, &CheckOptions::default()).unwrap();
        let mut counts = std::collections::BTreeMap::<String, usize>::new();
        for p in &report.packages {
            let kind = p.kind.as_deref().unwrap_or_default();
            *counts.entry(format!("{kind} {}", p.verdict.name())).or_default() += 1;
        }
        let counts: Vec<String> = counts.iter().map(|(what, n)| format!("{what} {n}")).collect();
        assert_eq!(counts.join(", "), expected, "{model} {kind}");
        assert!(report.pass, "{model} {kind}");
    }
}
