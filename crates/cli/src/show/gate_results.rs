//! Results of the quality gates, for people.

use crate::ui::{self, Table, Ui};
use anemoe_gates::golden_gate::{Agreement, GoldenGate, RepeatedToken};
use anemoe_gates::int8_gate::Int8Gate;
use anemoe_gates::probe::{DecidingRule, ProbePlace, ProbeReport, ShardProbes};

/// Prints the comparison of fast products with exact ones.
pub fn print_fast(f: &Int8Gate, ui: &Ui) -> std::io::Result<()> {
    for d in &f.differing {
        ui.line(format!(
            "position {}: fast, token {} is the most probable instead of {}, whose logit leads by {:.3}{}",
            d.position,
            d.fast,
            d.exact,
            d.margin,
            if d.near_tie { ": a near tie" } else { "" }
        ))?;
    }
    let behind: Vec<String> = f.stream.iter().map(|c| format!("{c:.6}")).collect();
    ui.line(format!(
        "values between the layers (hidden state), lowest cosine before the first layer and behind each: {}",
        behind.join(" ")
    ))?;
    ui.line(format!(
        "{}: fast against exact products, median cosine of the logits {:.6} (at least {} wanted), lowest {:.6}, {} of {} below {}; {}",
        if f.pass { "pass" } else { "FAIL" },
        f.median_cosine,
        f.threshold,
        f.min_cosine,
        f.below,
        ui::counted(f.positions, "position"),
        f.threshold,
        match f.differing.len() {
            1 => "1 token differs".to_string(),
            n => format!("{n} tokens differ"),
        }
    ))
}

/// Prints the probes: a row per shard, and the exceptions.
pub fn print_probes(report: &ProbeReport, ui: &Ui) -> std::io::Result<()> {
    let mut table = Table::new(&[
        "shard",
        "kind",
        "positions",
        "median",
        "mean",
        "lowest",
        "at",
        "branch",
        "with residual",
        "no active expert",
        "near ties",
        "",
    ]);
    for s in &report.shards {
        let all = s.probes.iter().flat_map(|p| p.positions.iter().enumerate().map(move |(i, c)| (p, i, c)));
        let excused =
            |p: &str, i: usize| s.choices.iter().any(|c| c.near_tie && c.probe == p && c.position == i);
        let all = all.filter(|(p, i, _)| !excused(&p.probe, *i));
        let lowest = all.filter_map(|(p, i, c)| Some((p, i, (*c)?))).min_by(|a, b| a.2.total_cmp(&b.2));
        let cosine = |c: f64| format!("{c:.6}");
        table.row(vec![
            s.shard.clone(),
            s.kind.name().into(),
            s.counted.to_string(),
            cosine(s.median_cosine),
            cosine(s.mean_cosine),
            cosine(s.min_cosine),
            lowest.map_or_else(String::new, |(p, i, _)| format!("{}, {i}", p.probe)),
            s.branch.map_or_else(String::new, |c| cosine(c.mean_cosine)),
            s.with_residual.map_or_else(String::new, |c| cosine(c.mean_cosine)),
            s.no_active_expert.to_string(),
            s.excused.to_string(),
            if s.pass { "pass" } else { "FAIL" }.into(),
        ]);
    }
    table.print(ui)?;
    for s in &report.shards {
        print_places(s, ui)?;
    }
    for s in report.shards.iter().filter(|s| s.not_finite > 0) {
        ui.line(format!(
            "{}: results of {} are not numbers",
            s.shard,
            ui::counted(s.not_finite, "position")
        ))?;
    }
    for s in report.shards.iter().filter(|s| s.counted == 0) {
        ui.line(format!("{}: no probe has an active expert of it: nothing can be said", s.shard))?;
    }
    for warning in &report.warnings {
        ui.line(format!("warning: {warning}"))?;
    }
    let wanted = wanted_at(report.rule);
    ui.line(rule(report))?;
    ui.line(format!(
        "{}: {} against {}; {} of length 1 (seed {}) and what the prompt gives; \
         at least {} wanted {wanted}, near ties of a router left out",
        if report.pass { "pass" } else { "FAIL" },
        ui::counted(report.shards.len(), "shard"),
        report.against,
        ui::counted(report.random_probes, "random probe"),
        report.seed,
        report.threshold
    ))
}

/// Returns the deciding rule and its reason, in words.
pub fn rule(report: &ProbeReport) -> String {
    let rule = match report.rule {
        DecidingRule::EveryPosition => "every position decides",
        DecidingRule::Median => "the median decides, not every position",
    };
    format!("{rule}: {}", report.rule_reason)
}

/// Returns the place at which the threshold has to be reached, in words.
pub fn wanted_at(rule: DecidingRule) -> &'static str {
    match rule {
        DecidingRule::EveryPosition => "at every position",
        DecidingRule::Median => "in the median",
    }
}

/// Most positions of a shard that are listed.
const LISTED: usize = 8;

/// Prints the positions of a shard that fail, and the choices of its router that differ.
fn print_places(s: &ShardProbes, ui: &Ui) -> std::io::Result<()> {
    let below: &[ProbePlace] = if s.pass { &[] } else { &s.below };
    for p in below.iter().take(LISTED) {
        let cosine = p.cosine.unwrap_or(0.0);
        ui.line(format!("{}: {}, position {}: cosine {cosine:.6}, too low", s.shard, p.probe, p.position))?;
    }
    if below.len() > LISTED {
        ui.line(format!("{}: {} positions are too low in all", s.shard, s.below.len()))?;
    }
    for p in s.not_zero.iter().take(LISTED) {
        ui.line(format!(
            "{}: {}, position {}: zero in the FP16 form, and not in the shard",
            s.shard, p.probe, p.position
        ))?;
    }
    for c in &s.choices {
        ui.line(format!(
            "{}: {}, position {}: its router chooses {:?} instead of {:?}, whose logit leads by {:.3} in the FP16 form{}",
            s.shard,
            c.probe,
            c.position,
            c.chosen,
            c.expected,
            c.margin,
            if c.near_tie { ": a near tie, excused" } else { "" }
        ))?;
    }
    Ok(())
}

/// Describes a continuation that falls into one token.
fn repeated(r: &RepeatedToken) -> String {
    format!(
        "FAIL: decoding falls into one repeated token: {} from step {} on, {} times; the reference does not",
        r.token, r.from_step, r.times
    )
}

/// Prints the golden gate.
pub fn print_golden(gate: &GoldenGate, ui: &Ui) -> std::io::Result<()> {
    let v = &gate.usual;
    let mut table = Table::new(&["after", "cosine", "KL, nats", "same top token"]);
    let mut row = |name: String, a: &Agreement| {
        let kl = a.kl.map_or_else(|| "not a number".into(), |kl| format!("{kl:.5}"));
        table.row(vec![name, format!("{:.6}", a.cosine), kl, if a.top1 { "yes" } else { "no" }.into()]);
    };
    for p in &v.positions {
        row(format!("prompt token {}", p.pos), &p.agreement);
    }
    // Steps are many and alike: the first one and the lowest one are shown.
    let lowest = v.decode.iter().min_by(|a, b| a.agreement.cosine.total_cmp(&b.agreement.cosine));
    let mut shown: Vec<_> = v.decode.first().into_iter().chain(lowest).collect();
    shown.dedup_by_key(|d| d.step);
    for d in shown {
        row(format!("decode step {}", d.step), &d.agreement);
    }
    table.print(ui)?;
    for c in &v.wrong_choices {
        ui.line(format!(
            "decode step {}: token {} instead of {}, whose logit leads by {:.3} in the reference{}",
            c.step,
            c.chosen,
            c.expected,
            c.margin,
            if c.near_tie { ": a near tie" } else { "" }
        ))?;
    }
    ui.line(format!(
        "mean divergence {:.5} nats; the same token is the most probable in {:.1} %",
        v.mean_kl,
        100.0 * v.top1_agreement
    ))?;
    if let Some(exact) = &gate.exact {
        ui.line(format!(
            "with exact products (--exact): lowest cosine {:.6}, mean divergence {:.5} nats",
            exact.min_cosine, exact.mean_kl
        ))?;
    }
    let fp16 = &gate.fp16;
    ui.line(format!(
        "with every result rounded to fp16, as on the device: median cosine {:.6} (at least {} wanted), lowest {:.6}, {}",
        fp16.median_cosine,
        fp16.threshold,
        fp16.min_cosine,
        ui::counted(fp16.wrong_choices.len(), "differing choice")
    ))?;
    if let Some(first) = fp16.not_finite.first() {
        ui.line(format!(
            "in fp16 the logits of {} are not numbers, first at {first}, steps counted behind the prompt: values overflow there",
            ui::counted(fp16.not_finite.len(), "position")
        ))?;
    }
    if let Some(r) = &v.repeated {
        ui.line(repeated(r))?;
    }
    if let Some(r) = &fp16.repeated {
        ui.line(format!("{} (rounded to fp16)", repeated(r)))?;
    }
    let equal = v.generated_ids.iter().zip(&v.expected_ids).take_while(|(a, b)| a == b).count();
    ui.line(format!(
        "{}: lowest cosine {:.6} (at least {} wanted) over {} and {}; {equal} of {} equal",
        if gate.pass { "pass" } else { "FAIL" },
        v.min_cosine,
        v.threshold,
        ui::counted(v.positions.len(), "position"),
        ui::counted(v.decode.len(), "step"),
        ui::counted(v.expected_ids.len(), "greedy token")
    ))
}
