//! Results of gated builds, for people.

use super::{gate_results, placement};
use crate::shell::quoted;
use crate::ui::{self, Ui};
use anemoe_convert::build::BuildReport;
use anemoe_gates::gated::{GateStage, GatedReport, LayerGates};
use anemoe_gates::layer_sample::LayerSample;
use anemoe_gates::probe::{DecidingRule, ProbeReport, ShardProbes};
use anemoe_gates::residency::Report;
use std::io;
use std::path::Path;

/// Prints the gates and the build.
pub fn print(report: &GatedReport, out: &Path, golden: Option<&Path>, all: usize, ui: &Ui) -> io::Result<()> {
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
        print_quality(found, ui)?;
        for warning in &found.warnings {
            ui.line(format!("  warning: {warning}"))?;
        }
    }
    if let Some(layers) = &report.layers {
        print_layers(layers, ui)?;
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
             differ: {}{}",
            v.min_cosine,
            v.threshold,
            v.expected_ids.len(),
            v.wrong_choices.len(),
            if ties > 0 { format!(", {} among them", ui::counted(ties, "near tie")) } else { String::new() }
        ))?;
        for also in &report.full_stack.also {
            let v = &also.gate.exact;
            ui.line(format!(
                "  logits with {}: {}, lowest cosine {:.6}",
                also.golden.display(),
                verdict(also.gate.pass),
                v.min_cosine
            ))?;
        }
        if let Some(nats) = report.full_stack.undecided {
            ui.line(format!(
                "  this model predicts the text {}: its weights are random, or it has not learned \
                 such text; its logits say nothing about quality. --golden compares it with a reference all the same",
                against_chance(nats)
            ))?;
        }
    }
    print_failed(report, ui)?;
    match (&report.build, report.failed) {
        (Some(built), None) => ui.line(summary(built))?,
        (Some(built), Some(stage)) => {
            ui.line(summary(built))?;
            ui.line(format!(
                "gate FAILED: {}; the bundle is complete, and chain.json says that the gate failed",
                stage.name()
            ))?;
            let name = quoted(out);
            // The first golden that failed, not the first that was given.
            let stack = &report.full_stack;
            let other = stack.also.iter().find(|a| !a.gate.pass).map(|a| a.golden.as_path());
            let golden =
                if stack.golden.as_ref().is_some_and(|g| g.pass) { other.or(golden) } else { golden };
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
            let probed = report.layers.as_ref().map_or(0, |l| l.sample.shards.len());
            let others = match failed {
                Some(GateStage::Shards) => "the build ended there".to_string(),
                _ => match all.saturating_sub(r.shards.len() + probed) {
                    0 => "no other shard was left".to_string(),
                    1 => "the other shard was not built".to_string(),
                    n => format!("the other {n} shards were not built"),
                },
            };
            ui.line(format!(
                "gate FAILED: {}; {others}. For other options remove {} first; the same ones and \
                 --skip-gates go on",
                failed.map_or("a stage", GateStage::name),
                quoted(out)
            ))?;
        }
    }
    Ok(())
}

/// Prints the gate that failed, in full.
fn print_failed(report: &GatedReport, ui: &Ui) -> std::io::Result<()> {
    let r = &report.representative;
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
        Some(GateStage::LayerProbes) => {
            if let Some(found) = report.layers.as_ref().and_then(|l| l.probes.as_ref()) {
                gate_results::print_probes(found, ui)?;
            }
        }
        Some(GateStage::Shards) => {
            if let Some(fault) = &report.weight_fault {
                ui.line(format!(
                    "weights: FAIL, {fault}; {} chooses another kind for its part",
                    fault.quant_option()
                ))?;
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
            for also in report.full_stack.also.iter().filter(|g| !g.gate.pass) {
                ui.line(format!("{}:", also.golden.display()))?;
                gate_results::print_golden(&also.gate, ui)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// Prints a line about probes.
fn print_quality(found: &ProbeReport, ui: &Ui) -> std::io::Result<()> {
    let verdict = if found.pass { "pass" } else { "FAIL" };
    let every = found.rule == DecidingRule::EveryPosition;
    let deciding = |s: &ShardProbes| if every { s.min_cosine } else { s.median_cosine };
    let Some(s) = found.shards.iter().min_by(|a, b| deciding(a).total_cmp(&deciding(b))) else {
        return Ok(());
    };
    let excused: usize = found.shards.iter().map(|s| s.excused).sum();
    let ties = match excused {
        0 => String::new(),
        n => format!(
            "; {} excused, where a near tie of a router chose another expert",
            ui::counted(n, "position")
        ),
    };
    ui.line(format!(
        "  quality: {verdict}, lowest {}cosine to FP16 of {} {:.5} ({}), at least {} wanted {}{ties}",
        if every { "" } else { "median " },
        ui::counted(found.shards.len(), "shard"),
        deciding(s),
        s.shard,
        found.threshold,
        gate_results::wanted_at(found.rule)
    ))?;
    ui.line(format!("    {}", gate_results::rule(found)))
}

/// Prints the probes of the worst layers and of evenly spread ones.
fn print_layers(layers: &LayerGates, ui: &Ui) -> std::io::Result<()> {
    let LayerSample { worst, spread, .. } = &layers.sample;
    let Some(found) = &layers.probes else { return Ok(()) };
    let spread: Vec<String> = spread.iter().map(usize::to_string).collect();
    ui.line(format!("layers {}, evenly spread, and those whose weights stand out most:", spread.join(", ")))?;
    for w in worst {
        ui.line(format!(
            "  layer {}: {}, {} (tensor `{}`): the largest weight{} is {:.1} times the mean magnitude",
            w.layer,
            w.shard,
            w.matrix,
            w.tensor,
            if w.whole { "" } else { " of a sample" },
            w.ratio
        ))?;
    }
    print_quality(found, ui)
}

/// Returns the difference to chance in words, in nats per token; it may be negative.
fn against_chance(nats: f64) -> String {
    format!("{:.2} nats per token {} than chance", nats.abs(), if nats < 0.0 { "worse" } else { "better" })
}

/// Formats a finished build in one line.
pub fn summary(report: &BuildReport) -> String {
    let reused = if report.reused > 0 {
        format!(", {} of them from an earlier run", report.reused)
    } else {
        String::new()
    };
    format!(
        "{}: {}{reused}, {} in {:.1} s; lowest weight cosine {:.5}",
        report.bundle.display(),
        ui::counted(report.shards, "package"),
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
