//! Gated builds for people.

use super::{gate_results, placement};
use crate::shell::quoted;
use crate::ui::{self, Ui};
use anemoe_convert::build::BuildReport;
use anemoe_gates::gated::{GateStage, GatedReport};
use anemoe_gates::residency::Report;
use std::path::Path;

/// The gates and the build for people.
pub fn print(
    report: &GatedReport,
    out: &Path,
    golden: Option<&Path>,
    all: usize,
    ui: &Ui,
) -> anyhow::Result<()> {
    let r = &report.representative;
    let verdict = |pass: bool| if pass { "pass" } else { "FAIL" };
    let placed = |found: &Report| {
        let v = found.verdicts;
        let small = found.packages.iter().filter(|p| p.too_small).count();
        format!("{}: {}", verdict(found.pass), placement::devices(v.ane, v.unknown, v.not_ane, small))
    };
    if let Some(found) = &r.residency {
        ui.line(format!(
            "representative shards, one of each group that differs only in weights ({}):",
            r.shards.join(", ")
        ))?;
        ui.line(format!("  predicted device: {}", placed(found)))?;
    }
    if let Some(found) = &r.probes {
        let lowest = found.shards.iter().min_by(|a, b| a.median_cosine.total_cmp(&b.median_cosine));
        if let Some(s) = lowest {
            ui.line(format!(
                "  quality: {}, lowest median cosine to FP16 {:.5} ({}), at least {} wanted",
                verdict(found.pass),
                s.median_cosine,
                s.shard,
                found.threshold
            ))?;
        }
        for warning in &found.warnings {
            ui.line(format!("  warning: {warning}"))?;
        }
    }
    if let Some(found) = &report.full_stack.residency {
        ui.line("the whole:")?;
        ui.line(format!("  predicted device: {}", placed(found)))?;
    }
    if let Some(gate) = &report.full_stack.golden {
        let v = &gate.exact;
        let equal = v.generated_ids.iter().zip(&v.expected_ids).take_while(|(a, b)| a == b).count();
        let ties = v.wrong_choices.iter().filter(|c| c.near_tie).count();
        let said = if report.full_stack.undecided.is_some() { "undecided" } else { verdict(gate.pass) };
        ui.line(format!(
            "  logits: {said}, lowest cosine {:.6} (at least {} wanted), {equal} of {} greedy tokens equal, choices that \
             differ: {}, of which {ties} near ties",
            v.min_cosine,
            v.threshold,
            v.expected_ids.len(),
            v.wrong_choices.len()
        ))?;
        if let Some(nats) = report.full_stack.undecided {
            ui.line(format!(
                "  this model predicts the text {}: its weights are random, or it has not learned \
                 such text; its logits say nothing about quality. --golden compares it with a reference all the same",
                against_chance(nats)
            ))?;
        }
    }
    match report.failed {
        Some(GateStage::RepresentativeResidency) => {
            if let Some(found) = &r.residency {
                placement::print(found, ui)?;
            }
        }
        Some(GateStage::RepresentativeProbes) => {
            if let Some(found) = &r.probes {
                gate_results::print_probes(found, ui)?;
            }
        }
        Some(GateStage::Residency) => {
            if let Some(found) = &report.full_stack.residency {
                placement::print(found, ui)?;
            }
        }
        Some(GateStage::Golden) => {
            if let Some(gate) = &report.full_stack.golden {
                gate_results::print_golden(gate, ui)?;
            }
        }
        _ => {}
    }
    match (&report.build, report.failed) {
        (Some(built), None) => ui.line(summary(built))?,
        (Some(built), Some(stage)) => {
            ui.line(summary(built))?;
            ui.line(format!(
                "gate FAILED: {}; the bundle is complete, and chain.json says that the gate failed",
                stage.name()
            ))?;
            let name = quoted(out);
            ui.line(match (stage, golden) {
                (GateStage::Golden, Some(golden)) => {
                    format!("next: anemoe trace {name} --golden {} shows which layer loses how much", quoted(golden))
                }
                (GateStage::Golden, None) => format!(
                    "next: anemoe golden CHECKPOINT --prompt TEXT -o golden.npz, then anemoe trace {name} --golden golden.npz shows \
                     which layer loses how much"
                ),
                _ => format!("next: anemoe check {name} shows why"),
            })?;
        }
        (None, failed) => {
            ui.line(format!(
                "gate FAILED: {}; the other {} shards were not built. For other options remove {} first; the same ones and \
                 --skip-gates go on",
                failed.map_or("a stage", GateStage::name),
                all.saturating_sub(r.shards.len()),
                quoted(out)
            ))?;
        }
    }
    Ok(())
}

/// Says how much better than chance a model is, in nats per token, which may be less than nothing.
fn against_chance(nats: f64) -> String {
    format!("{:.2} nats per token {} than chance", nats.abs(), if nats < 0.0 { "worse" } else { "better" })
}

/// One line about a finished build.
pub fn summary(report: &BuildReport) -> String {
    let reused = if report.reused > 0 {
        format!(", {} of them from an earlier run", report.reused)
    } else {
        String::new()
    };
    format!(
        "{}: {} packages{reused}, {} in {:.1} s; lowest weight cosine {:.5}",
        report.bundle.display(),
        report.shards,
        ui::bytes(report.package_bytes),
        report.seconds,
        report.min_weight_cosine
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn less_than_chance_is_worse() {
        assert_eq!(against_chance(0.3), "0.30 nats per token better than chance");
        assert_eq!(against_chance(-5.02), "5.02 nats per token worse than chance");
    }
}
