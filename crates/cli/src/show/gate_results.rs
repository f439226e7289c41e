//! Results of the quality gates, for people.

use crate::ui::{self, Table, verdict};
use anemoe_gates::golden_gate::{Agreement, GoldenGate, RepeatedToken};
use anemoe_gates::probe::{DecidingRule, ProbeReport, ShardProbes};
use anemoe_gates::text_gate::TextGate;
use anemoe_gates::weight_gate::WeightGate;

/// Shows the probes: a row per shard, and the exceptions.
pub fn show_probes(report: &ProbeReport, out: &mut Vec<String>) {
    let cosine = |c: f64| format!("{c:.6}");
    let rows = report.shards.iter().map(|s| {
        let all = s.probes.iter().flat_map(|p| p.positions.iter().enumerate().map(move |(i, c)| (p, i, c)));
        let excused =
            |p: &str, i: usize| s.choices.iter().any(|c| c.near_tie && c.probe == p && c.position == i);
        let counted = all.filter(|(p, i, _)| !excused(&p.probe, *i));
        let lowest = counted.filter_map(|(p, i, c)| Some((p, i, (*c)?))).min_by(|a, b| a.2.total_cmp(&b.2));
        vec![
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
            verdict(s.pass).into(),
        ]
    });
    let cosines = ["median", "mean", "lowest", "at", "branch", "with residual"];
    let headings =
        [&["shard", "kind", "positions"][..], &cosines, &["no active expert", "near ties", ""]].concat();
    out.extend(Table::new(&headings).with_rows(rows).lines());
    report.shards.iter().for_each(|s| show_places(s, out));
    for s in report.shards.iter().filter(|s| s.not_finite > 0) {
        let positions = ui::counted(s.not_finite, "position");
        out.push(format!("{}: results of {positions} are not numbers", s.shard));
    }
    for s in report.shards.iter().filter(|s| s.counted == 0) {
        out.push(format!("{}: no probe has an active expert of it: nothing can be said", s.shard));
    }
    out.extend(report.warnings.iter().map(|warning| format!("warning: {warning}")));
    out.push(rule(report));
    out.push(format!(
        "{}: {} against {}; {} of length 1 (seed {}) and what the prompt gives; at least {} wanted {}, near ties of a router left out",
        verdict(report.pass),
        ui::counted(report.shards.len(), "shard"),
        report.against,
        ui::counted(report.random_probes, "random probe"),
        report.seed,
        report.threshold,
        wanted_at(report.rule)
    ));
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

/// Shows the positions of a shard that fail, and the choices of its router that differ.
fn show_places(s: &ShardProbes, out: &mut Vec<String>) {
    let shard = &s.shard;
    for p in s.below.iter().filter(|_| !s.pass).take(LISTED) {
        let cosine = p.cosine.unwrap_or(0.0);
        out.push(format!("{shard}: {}, position {}: cosine {cosine:.6}, too low", p.probe, p.position));
    }
    if s.below.len() > LISTED && !s.pass {
        out.push(format!("{shard}: {} positions are too low in all", s.below.len()));
    }
    for p in s.not_zero.iter().take(LISTED) {
        let (probe, position) = (&p.probe, p.position);
        out.push(format!(
            "{shard}: {probe}, position {position}: zero in the FP16 form, and not in the shard"
        ));
    }
    for c in &s.choices {
        let tie = if c.near_tie { ": a near tie, excused" } else { "" };
        out.push(format!(
            "{shard}: {}, position {}: its router chooses {:?} instead of {:?}, whose logit leads by {:.3} in the FP16 form{tie}",
            c.probe, c.position, c.chosen, c.expected, c.margin
        ));
    }
}

/// Describes a continuation that falls into one token.
fn repeated(r: &RepeatedToken) -> String {
    format!(
        "FAIL: decoding falls into one repeated token: {} from step {} on, {} times; the reference does not",
        r.token, r.from_step, r.times
    )
}

/// Describes the text gate in a line.
pub fn text_gate(t: &TextGate) -> String {
    let b = t.bounds;
    let [low, high] = t.perplexity_ratio_interval;
    let mut line = format!(
        "{} of text ({}): mean divergence {:.5} nats (at most {}), 99 % below {:.4} ({}), the same token is the most probable \
         in {:.1} % (at least {:.0}), perplexity times {:.4} ({low:.4} to {high:.4}, at most {})",
        ui::counted(t.tokens, "token"),
        t.text,
        t.mean_kl,
        b.mean_kl,
        t.p99_kl,
        b.p99_kl,
        100.0 * t.top1_agreement,
        100.0 * b.top1_agreement,
        t.perplexity_ratio,
        b.perplexity_ratio,
    );
    if !t.outside.is_empty() {
        line += &format!("; outside: {}", t.outside.join(", "));
    }
    if !t.pass && !t.learned {
        line += "; says nothing, since the checkpoint predicts this text hardly better than chance";
    }
    line
}

/// Shows the weight gate, each line behind `indent`.
pub fn show_weights(w: &WeightGate, indent: &str, out: &mut Vec<String>) {
    out.push(format!(
        "{indent}{}: {} compared with the checkpoint's, lowest cosine of a row {:.3}, scales {:.3} to {:.3}, {} wrong",
        verdict(w.pass),
        ui::counted(w.compared, "weight"),
        w.min_row_cosine,
        w.min_excess,
        w.max_share,
        w.wrong
    ));
    out.extend(w.faults.iter().map(|fault| format!("{indent}  {fault}")));
}

/// Shows the golden gate.
pub fn show_golden(gate: &GoldenGate, out: &mut Vec<String>) {
    let (v, fp16) = (&gate.usual, &gate.fp16);
    let row = |name: String, a: &Agreement| {
        let kl = a.kl.map_or_else(|| "not a number".into(), |kl| format!("{kl:.5}"));
        vec![name, format!("{:.6}", a.cosine), kl, if a.top1 { "yes" } else { "no" }.into()]
    };
    let positions = v.positions.iter().map(|p| row(format!("prompt token {}", p.pos), &p.agreement));
    // Steps are many and alike: the first one and the lowest one are shown.
    let lowest = v.decode.iter().min_by(|a, b| a.agreement.cosine.total_cmp(&b.agreement.cosine));
    let mut shown: Vec<_> = v.decode.first().into_iter().chain(lowest).collect();
    shown.dedup_by_key(|d| d.step);
    let steps = shown.iter().map(|d| row(format!("decode step {}", d.step), &d.agreement));
    let table = Table::new(&["after", "cosine", "KL, nats", "same top token"]);
    out.extend(table.with_rows(positions.chain(steps)).lines());
    for c in &v.wrong_choices {
        let tie = if c.near_tie { ": a near tie" } else { "" };
        out.push(format!(
            "decode step {}: token {} instead of {}, whose logit leads by {:.3} in the reference{tie}",
            c.step, c.chosen, c.expected, c.margin
        ));
    }
    out.push(format!(
        "mean divergence {:.5} nats; the same token is the most probable in {:.1} %",
        v.mean_kl,
        100.0 * v.top1_agreement
    ));
    out.extend(gate.exact.iter().map(|exact| {
        format!(
            "with exact products (--exact): lowest cosine {:.6}, mean divergence {:.5} nats",
            exact.min_cosine, exact.mean_kl
        )
    }));
    out.push(format!(
        "with every result rounded to fp16, as on the device: median cosine {:.6} (at least {} wanted), lowest {:.6}, {}",
        fp16.median_cosine,
        fp16.threshold,
        fp16.min_cosine,
        ui::counted(fp16.wrong_choices.len(), "differing choice")
    ));
    if let Some(first) = fp16.not_finite.first() {
        out.push(format!(
            "in fp16 the logits of {} are not numbers, first at {first}, steps counted behind the prompt: values overflow there",
            ui::counted(fp16.not_finite.len(), "position")
        ));
    }
    out.extend(v.repeated.as_ref().map(repeated));
    out.extend(fp16.repeated.iter().map(|r| format!("{} (rounded to fp16)", repeated(r))));
    out.push(format!(
        "{}: median cosine {:.6} (at least {} wanted), lowest {:.6}, {} below, over {} and {}; {} of {} equal",
        verdict(gate.pass),
        v.median_cosine,
        v.threshold,
        v.min_cosine,
        v.below,
        ui::counted(v.positions.len(), "position"),
        ui::counted(v.decode.len(), "step"),
        v.tokens_equal,
        ui::counted(v.expected_ids.len(), "greedy token")
    ));
}
