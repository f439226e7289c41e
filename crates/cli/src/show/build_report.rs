//! Results of gated builds, for people.

use super::{gate_results, placement};
use crate::shell::quoted;
use crate::ui::{self, verdict};
use anemoe_convert::build::BuildReport;
use anemoe_gates::gated::{GateStage, GatedReport, LayerGates};
use anemoe_gates::golden_gate::GoldenGate;
use anemoe_gates::layer_sample::LayerSample;
use anemoe_gates::probe::{DecidingRule, ProbeReport, ShardProbes};
use anemoe_gates::residency::Report;
use std::path::Path;

/// Shows the gates and the build.
pub fn show(report: &GatedReport, bundle: &Path, golden: Option<&Path>, all: usize, out: &mut Vec<String>) {
    let r = &report.representative;
    let place = |found: &Report| {
        format!("  predicted device: {}: {}", verdict(found.pass), placement::devices(found))
    };
    if let Some(found) = &r.residency {
        let names = r.shards.join(", ");
        out.push(format!("representative shards, one of each group that differs only in weights ({names}):"));
        out.push(place(found));
    }
    if let Some(found) = &r.probes {
        show_quality(found, out);
        out.extend(found.warnings.iter().map(|warning| format!("  warning: {warning}")));
    }
    report.layers.iter().for_each(|layers| show_layers(layers, out));
    if let Some(found) = &report.full_stack.residency {
        out.push("the whole:".into());
        out.push(place(found));
    }
    if let Some(weights) = &report.full_stack.weights {
        gate_results::show_weights(weights, "  ", out);
    }
    if let Some(gate) = &report.full_stack.golden {
        show_logits(report, gate, out);
    }
    show_failed(report, out);
    out.extend(report.build.as_ref().map(summary));
    let (name, Some(stage)) = (quoted(bundle), report.failed) else { return };
    let failed = format!("gate FAILED: {}", stage.name());
    if report.build.is_none() {
        let probed = report.layers.as_ref().map_or(0, |l| l.sample.shards.len());
        let others = match all.saturating_sub(r.shards.len() + probed) {
            _ if stage == GateStage::Shards => "the build ended there".to_string(),
            0 => "no other shard was left".to_string(),
            1 => "the other shard was not built".to_string(),
            n => format!("the other {n} shards were not built"),
        };
        return out.push(format!(
            "{failed}; {others}. For other options remove {name} first; the same ones and --skip-gates go on"
        ));
    }
    out.push(format!("{failed}; the bundle is complete, and chain.json says that the gate failed"));
    // The first golden that failed, not the first that was given.
    let stack = &report.full_stack;
    let other = stack.also.iter().find(|a| !a.gate.pass).map(|a| a.golden.as_path());
    let golden = if stack.golden.as_ref().is_some_and(|g| g.pass) { other.or(golden) } else { golden };
    out.push(match (stage, golden) {
        (GateStage::Golden, Some(golden)) => {
            format!("next: anemoe trace {name} --golden {} shows which layer loses how much", quoted(golden))
        }
        (GateStage::Golden, None) => format!(
            "next: anemoe golden CHECKPOINT --prompt TEXT -o golden.npz, then anemoe trace {name} --golden golden.npz shows \
             which layer loses how much"
        ),
        _ => format!("next: anemoe check {name} shows why"),
    });
}

/// Shows the golden gate of the whole in a few lines.
fn show_logits(report: &GatedReport, gate: &GoldenGate, out: &mut Vec<String>) {
    let (v, stack) = (&gate.usual, &report.full_stack);
    let ties = match v.near_ties {
        0 => String::new(),
        n => format!(", {} among them", ui::counted(n, "near tie")),
    };
    out.push(format!(
        "  logits: {}, median cosine {:.6} (at least {} wanted), lowest {:.6}, {} of {} greedy tokens equal, choices that differ: {}{ties}",
        if stack.undecided.is_some() { "undecided" } else { verdict(gate.pass) },
        v.median_cosine,
        v.threshold,
        v.min_cosine,
        v.tokens_equal,
        v.expected_ids.len(),
        v.wrong_choices.len(),
    ));
    for also in &stack.also {
        let (golden, said) = (also.golden.display(), verdict(also.gate.pass));
        out.push(format!("  logits with {golden}: {said}, lowest cosine {:.6}", also.gate.usual.min_cosine));
    }
    if let Some(t) = &stack.text {
        let said = if t.pass || t.is_good_enough() { "pass" } else { "FAIL" };
        out.push(format!("  {said}: {}", gate_results::text_gate(t)));
    }
    let Some(nats) = stack.undecided else { return };
    out.push(format!(
        "  this model predicts the text {}: its weights are random, or it has not learned such text; its logits say nothing about \
         quality. --golden compares it with a reference all the same",
        against_chance(nats)
    ));
}

/// Shows the gate that failed, in full.
fn show_failed(report: &GatedReport, out: &mut Vec<String>) {
    let (first, whole) = (&report.representative, &report.full_stack);
    let layers = report.layers.as_ref().and_then(|l| l.probes.as_ref());
    match report.failed {
        Some(GateStage::RepresentativeResidency) => {
            first.residency.iter().for_each(|r| placement::show(r, out));
        }
        Some(GateStage::Residency) => whole.residency.iter().for_each(|r| placement::show(r, out)),
        Some(GateStage::RepresentativeProbes) => {
            first.probes.iter().for_each(|found| gate_results::show_probes(found, out));
        }
        Some(GateStage::LayerProbes) => {
            layers.into_iter().for_each(|found| gate_results::show_probes(found, out));
        }
        Some(GateStage::Shards) => out.extend(report.weight_fault.iter().map(|fault| {
            let option = fault.quant_option();
            format!("weights: FAIL, {fault}; {option} chooses another kind for its part")
        })),
        Some(GateStage::Golden) => {
            whole.golden.iter().for_each(|gate| gate_results::show_golden(gate, out));
            for also in whole.also.iter().filter(|g| !g.gate.pass) {
                out.push(format!("{}:", also.golden.display()));
                gate_results::show_golden(&also.gate, out);
            }
        }
        _ => {}
    }
}

/// Shows a line about probes.
fn show_quality(found: &ProbeReport, out: &mut Vec<String>) {
    let every = found.rule == DecidingRule::EveryPosition;
    let deciding = |s: &ShardProbes| if every { s.min_cosine } else { s.median_cosine };
    let Some(s) = found.shards.iter().min_by(|a, b| deciding(a).total_cmp(&deciding(b))) else {
        return;
    };
    let ties = match found.shards.iter().map(|s| s.excused).sum::<usize>() {
        0 => String::new(),
        n => format!(
            "; {} excused, where a near tie of a router chose another expert",
            ui::counted(n, "position")
        ),
    };
    out.push(format!(
        "  quality: {}, lowest {}cosine to FP16 of {} {:.5} ({}), at least {} wanted {}{ties}",
        verdict(found.pass),
        if every { "" } else { "median " },
        ui::counted(found.shards.len(), "shard"),
        deciding(s),
        s.shard,
        found.threshold,
        gate_results::wanted_at(found.rule)
    ));
    out.push(format!("    {}", gate_results::rule(found)));
}

/// Shows the probes of the worst layers and of evenly spread ones.
fn show_layers(layers: &LayerGates, out: &mut Vec<String>) {
    let LayerSample { worst, spread, .. } = &layers.sample;
    let Some(found) = &layers.probes else { return };
    let spread: Vec<String> = spread.iter().map(usize::to_string).collect();
    out.push(format!("layers {}, evenly spread, and those whose weights stand out most:", spread.join(", ")));
    for w in worst {
        let sample = if w.whole { "" } else { " of a sample" };
        out.push(format!(
            "  layer {}: {}, {} (tensor `{}`): the largest weight{sample} is {:.1} times the mean magnitude",
            w.layer, w.shard, w.matrix, w.tensor, w.ratio
        ));
    }
    show_quality(found, out);
}

/// Returns the difference to chance in words, in nats per token; it may be negative.
fn against_chance(nats: f64) -> String {
    format!("{:.2} nats per token {} than chance", nats.abs(), if nats < 0.0 { "worse" } else { "better" })
}

/// Formats a finished build in one line.
pub fn summary(report: &BuildReport) -> String {
    let reused = match report.reused {
        0 => String::new(),
        n => format!(", {n} of them from an earlier run"),
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
