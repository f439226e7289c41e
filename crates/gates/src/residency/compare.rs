//! Compares predictions with the plan report of a Mac.

use super::device::{Device, DeviceCounts, FunctionPlan, PlanReport};
use super::op_summary::OpSummary;
use super::report::{Comparison, Disagreement, PackagePlan, Report, passes};
use super::rule::Verdict;
use super::verdict::{FunctionReport, PackageReport};
use std::collections::HashMap;

/// Most disagreements that are listed; all are counted.
const LISTED: usize = 1000;

/// Removes the opset from an op type: `ios18.conv` becomes `conv`.
fn without_opset(name: &str) -> &str {
    match name.split_once('.') {
        Some((opset, rest)) if opset.to_ascii_lowercase().starts_with("ios") && !rest.is_empty() => rest,
        _ => name,
    }
}

fn stem(name: &str) -> &str {
    let name = name.rsplit('/').next().unwrap_or(name);
    name.strip_suffix(".mlpackage").or_else(|| name.strip_suffix(".mlmodelc")).unwrap_or(name)
}

fn has_no_device(op_type: &str) -> bool {
    let op_type = without_opset(op_type);
    op_type == "const" || op_type.starts_with("constexpr_")
}

/// Adds a plan report to a check that listed its ops. Packages with a plan pass by the plan, all others by their prediction.
pub fn compare(checked: &mut Report, report: &PlanReport) {
    let mut c = Comparison {
        os: report.os.clone(),
        chip: report.chip.clone(),
        compute_units: report.compute_units.clone(),
        confusion: ["ane", "unknown", "not_ane"].into_iter().map(|v| (v, DeviceCounts::default())).collect(),
        ..Comparison::default()
    };
    let mut plans: HashMap<&str, Vec<&FunctionPlan>> = HashMap::new();
    for plan in &report.plans {
        plans.entry(stem(&plan.package)).or_default().push(plan);
    }
    let mut pass = true;
    for package in &checked.packages {
        let Some(plans) = plans.remove(stem(&package.name)) else {
            c.packages_without_plan += 1;
            pass &= passes(package, checked.strict);
            continue;
        };
        let mut ops = DeviceCounts::default();
        let mut summary = OpSummary::default();
        for plan in plans {
            count(plan, &mut summary);
            match function(package, &plan.function) {
                Some(f) => join(&mut c, package, f, plan, &mut ops),
                None => {
                    c.not_in_packages +=
                        plan.ops.iter().filter(|op| !has_no_device(&op.op_type)).count() as u64
                }
            }
        }
        let measured = ops.verdict();
        pass &= measured == Verdict::Ane;
        c.verdicts.add(measured);
        c.verdict = Some(c.verdict.map_or(measured, |v| v.max(measured)));
        c.packages.push(PackagePlan {
            name: package.name.clone(),
            predicted: package.verdict,
            measured,
            ops,
            summary: summary.finish(),
        });
    }
    for plan in plans.into_values().flatten() {
        c.not_in_packages += plan.ops.iter().filter(|op| !has_no_device(&op.op_type)).count() as u64;
    }
    // A report without any of these packages measured nothing.
    checked.pass = pass && c.verdict.is_some();
    checked.device = Some(c);
}

/// Adds the ops of a plan to a summary, by their planned devices.
fn count(plan: &FunctionPlan, summary: &mut OpSummary) {
    for op in &plan.ops {
        let op_type = without_opset(&op.op_type);
        match has_no_device(op_type) {
            true => summary.count_without_device(op_type, 1),
            false => summary.count(op_type, op.preferred),
        }
    }
}

fn function<'a>(package: &'a PackageReport, name: &str) -> Option<&'a FunctionReport> {
    match package.functions.as_slice() {
        [only] if name.is_empty() || name == only.name => Some(only),
        all => all.iter().find(|f| f.name == name),
    }
}

fn join(
    c: &mut Comparison,
    package: &PackageReport,
    f: &FunctionReport,
    plan: &FunctionPlan,
    ops: &mut DeviceCounts,
) {
    // Names are unique in a function. A plan may call an op by its own name or by its first result.
    let mut by_name: HashMap<&str, usize> = HashMap::new();
    for (i, op) in f.op_list.iter().enumerate() {
        by_name.entry(&op.name).or_insert(i);
        if !op.result.is_empty() {
            by_name.entry(&op.result).or_insert(i);
        }
    }
    let mut seen = vec![false; f.op_list.len()];
    for planned in plan.ops.iter().filter(|op| !has_no_device(&op.op_type)) {
        ops.count(planned.preferred);
        let found = by_name.get(planned.name.as_str()).or_else(|| by_name.get(without_opset(&planned.name)));
        let Some(&i) = found else {
            // An op without a result has no name in a plan.
            c.not_in_packages += u64::from(!planned.name.is_empty());
            continue;
        };
        let op = &f.op_list[i];
        seen[i] = true;
        c.joined += 1;
        c.confusion.entry(op.verdict.name()).or_default().count(planned.preferred);
        let (Some(device), true) = (planned.preferred, op.verdict != Verdict::Unknown) else { continue };
        c.decided += 1;
        if (device == Device::Ane) == (op.verdict == Verdict::Ane) {
            c.agreeing += 1;
            continue;
        }
        c.disagreeing += 1;
        if c.disagreements.len() < LISTED {
            c.disagreements.push(Disagreement {
                package: package.name.clone(),
                function: f.name.clone(),
                op: op.name.clone(),
                op_type: op.op_type.clone(),
                predicted: op.verdict,
                preferred: planned.preferred,
                supported: planned.supported.clone(),
                rules: op.rules.clone(),
            });
        }
    }
    // `write_state` has no result, so plans leave it out.
    let missing = f.op_list.iter().zip(&seen).filter(|(op, seen)| !**seen && op.op_type != "write_state");
    c.not_in_report += missing.count() as u64;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::residency::Verdicts;
    use crate::residency::op_summary::OpCounts;
    use crate::residency::rule::Conditions;
    use crate::residency::verdict::OpVerdict;

    fn checked(verdicts: &[(&str, &str, Verdict)]) -> Report {
        let op_list = verdicts
            .iter()
            .map(|(name, op_type, verdict)| OpVerdict {
                name: name.to_string(),
                result: format!("{name}_out"),
                op_type: op_type.to_string(),
                verdict: *verdict,
                rules: vec![],
            })
            .collect();
        let verdict = verdicts.iter().map(|v| v.2).max().unwrap();
        let function = FunctionReport {
            name: "main".into(),
            verdict,
            too_small: false,
            weight_bytes: None,
            ops: OpCounts::default(),
            support: None,
            precedents: vec![],
            op_list,
        };
        let package = PackageReport {
            name: "p.mlpackage".into(),
            kind: None,
            measured: None,
            verdict,
            too_small: false,
            small_functions: vec![],
            summary: OpSummary::default(),
            ops: OpCounts::default(),
            weight_bytes: None,
            functions: vec![function],
            reasons: vec![],
            warnings: vec![],
        };
        Report {
            pass: true,
            strict: false,
            conditions: Conditions::default(),
            verdicts: Verdicts::default(),
            ops: OpCounts::default(),
            summary: OpSummary::default(),
            packages: vec![package],
            warnings: vec![],
            device: None,
        }
    }

    fn plan(ops: &str) -> PlanReport {
        let text = format!(
            r#"{{"format": 1, "os": "macOS 26.0", "chip": "Apple M4", "compute_units": "cpuAndNeuralEngine",
                "plans": [{{"package": "x/p.mlmodelc", "function": "main", "ops": [{ops}]}}]}}"#
        );
        PlanReport::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn ops_are_joined_by_name_and_by_result() {
        let mut r = checked(&[
            ("a", "conv", Verdict::Ane),
            ("b", "mul", Verdict::Ane),
            ("c", "topk", Verdict::NotAne),
        ]);
        let p = plan(
            r#"{"name": "k", "type": "ios18.constexpr_lut_to_dense"}, {"name": "ios18.a", "type": "ios18.conv", "preferred": "ane"},
               {"name": "b_out", "type": "ios18.mul", "preferred": "MLCPUComputeDevice", "supported": ["cpu", "ane"], "cost": 0.1},
               {"name": "c", "type": "ios18.topk", "preferred": "cpu"}, {"name": "other", "type": "mul", "preferred": "ane"}"#,
        );
        compare(&mut r, &p);
        let c = r.device.unwrap();
        assert_eq!((c.joined, c.not_in_packages, c.not_in_report), (3, 1, 0));
        assert_eq!((c.agreeing, c.decided, c.disagreeing), (2, 3, 1));
        assert_eq!(c.confusion["ane"], DeviceCounts { ane: 1, cpu: 1, ..DeviceCounts::default() });
        assert_eq!(c.disagreements[0].op, "b");
        assert_eq!(c.verdict, Some(Verdict::NotAne));
        let line = "conv 1/1 ane; 2 compute ops ane, 0 gpu, 2 cpu; no device: 1 constexpr_lut_to_dense";
        assert_eq!(c.packages[0].summary.line, line);
        assert!(!r.pass);
    }

    #[test]
    fn no_device_is_unknown_and_never_a_pass() {
        for ops in [r#"{"name": "a", "type": "conv"}"#, "", r#"{"name": "k", "type": "const"}"#] {
            let mut r = checked(&[("a", "conv", Verdict::Ane)]);
            compare(&mut r, &plan(ops));
            assert_eq!(r.device.unwrap().verdict, Some(Verdict::Unknown), "{ops}");
            assert!(!r.pass);
        }
        // A report about other packages is no pass either.
        let mut r = checked(&[("a", "conv", Verdict::Ane)]);
        let mut other = plan(r#"{"name": "a", "type": "conv", "preferred": "ane"}"#);
        other.plans[0].package = "q".into();
        compare(&mut r, &other);
        assert_eq!((r.pass, r.device.unwrap().packages_without_plan), (false, 1));
    }

    #[test]
    fn a_plan_overrides_a_prediction() {
        let mut r = checked(&[("a", "conv", Verdict::NotAne)]);
        r.pass = false;
        compare(&mut r, &plan(r#"{"name": "a", "type": "conv", "preferred": "neuralEngine"}"#));
        assert!(r.pass);
        assert_eq!(r.device.unwrap().disagreeing, 1);
    }

    #[test]
    fn reports_that_are_none_are_refused() {
        for (text, says) in [
            ("{", "plan report"),
            (r#"{"format": 2, "os": "", "chip": "", "compute_units": "", "plans": []}"#, "format 2"),
        ] {
            assert!(PlanReport::parse(text.as_bytes()).unwrap_err().contains(says));
        }
    }
}
