//! Plans, for people.

use super::placement::{TOO_SMALL, device_label};
use crate::ui::{self, Table};
use anemoe_bundle::AutoChoice;
use anemoe_convert::outliers::{self, Outlier};
use anemoe_convert::plan::Plan;
use anemoe_gates::cost::forecast::TokenCalls;
use anemoe_gates::residency::Report;
use std::collections::BTreeMap;

/// Shows the plan: equal shards of different layers in one row, unless `all`.
pub fn show(plan: &Plan, placement: &Report, all: bool, out: &mut Vec<String>) {
    let rows = plan.shards.iter().zip(&placement.packages).map(|(s, p)| {
        let mut kinds: Vec<&str> = s.quant.values().map(String::as_str).collect();
        kinds.dedup();
        let cells = vec![
            s.kind.name().to_string(),
            s.functions.len().to_string(),
            kinds.join(", "),
            ui::count(s.weights),
            format!("{:.2}", s.bytes as f64 / 1e6),
            device_label(p, placement.strict).into(),
        ];
        (&s.name, cells)
    });
    let rows = if all { rows.map(|(name, cells)| (name, 1, cells)).collect() } else { ui::folded(rows) };
    out.push(format!("{}  {}", plan.family, plan.source));
    let headings = ["shard", "count", "kind", "functions", "quant", "weights", "MB", "predicted"];
    let rows = rows.into_iter().map(|(name, n, cells)| [vec![name.clone(), n.to_string()], cells].concat());
    out.extend(Table::new(&headings).with_rows(rows).lines());
    show_verdict_reasons(placement, out);
    if let Some(auto) = &plan.chain.auto {
        show_choice(auto, out);
    }
    let t = &plan.totals;
    out.push(format!(
        "{} ({} of layers), {} of weights ({:.1} % of FP16), {} of embedding on the host",
        ui::counted(t.shards, "package"),
        t.layer_shards,
        ui::bytes(t.bytes),
        100.0 * t.bytes as f64 / plan.fp16_bytes().max(1) as f64,
        ui::bytes(t.embedding_bytes)
    ));
    out.push(format!(
        "{} parameters, {} active per token, {} to read per token",
        ui::count(t.params),
        ui::count(t.active_params_per_token),
        ui::bytes(t.bytes_per_token)
    ));
    out.push(calls(TokenCalls::of(&plan.chain)));
    out.extend(plan.notes.iter().map(|note| format!("note: {note}")));
    out.push(
        "predicted device: by the rules of `anemoe check`, which gives the built packages the same; a shard is one package".into(),
    );
}

/// Shows why packages are not predicted on the Neural Engine: a line for each reason.
fn show_verdict_reasons(placement: &Report, out: &mut Vec<String>) {
    for r in placement.verdict_reasons() {
        let label = if r.too_small && !placement.strict { TOO_SMALL } else { r.verdict.name() };
        let at = match r.packages {
            1 => r.first,
            n => format!("{} and {} more", r.first, n - 1),
        };
        let change =
            if r.advice.is_empty() { String::new() } else { format!("; to change it: {}", r.advice) };
        out.push(format!("{label}, {at}: {} [{}]{change}", r.text, r.rule));
    }
}

/// Returns the calls per token, in words.
fn calls(c: TokenCalls) -> String {
    let layers = match c.layers_at_most - c.layers > 0.05 {
        true => format!("{:.1} of layers (expected; {} at most)", c.layers, c.layers_at_most),
        false => format!("{} of layers", c.layers_at_most),
    };
    format!("calls per token: {layers}, {} of the head", c.head)
}

/// Shows the result of the search for kinds.
fn show_choice(auto: &AutoChoice, out: &mut Vec<String>) {
    out.push(format!("\nkinds chosen for {} on {}", auto.goal, auto.measured_on));
    let rows = auto.tensors.iter().map(|t| {
        let numbers = [t.output_error, t.sensitivity].map(|x| format!("{x:.2e}"));
        let name = match t.experts.len() {
            0 => t.tensor.clone(),
            n => format!("{}: {n} experts", t.tensor),
        };
        [&[name, t.part.clone(), t.kind.clone(), ui::bytes(t.bytes)], &numbers[..]].concat()
    });
    let headings = ["tensor", "part", "kind", "bytes", "output error", "sensitivity"];
    out.extend(Table::new(&headings).with_rows(rows).lines());
    if let (Some(min), Some(mean)) = (auto.min_cosine, auto.mean_cosine) {
        let row = |name: &str, bytes: u64, min: f64, mean: f64| {
            vec![name.into(), ui::bytes(bytes), format!("{min:.5}"), format!("{mean:.6}")]
        };
        let uniform = auto.uniform.iter().map(|u| row(&u.kind, u.bytes, u.min_cosine, u.mean_cosine));
        let rows = std::iter::once(row("auto", auto.bytes, min, mean)).chain(uniform);
        out.push(String::new());
        out.extend(
            Table::new(&["whole model", "bytes", "lowest cosine", "mean cosine"]).with_rows(rows).lines(),
        );
    }
    out.push("the reason for each kind is in --json, --out and chain.json\n".into());
}

/// Most outliers that are printed; `--json` has all.
const SHOWN: usize = 5;

/// Relative outlier from which INT8 with one scale loses 1 %, see [`outliers::Spread::int8_tensor_loss`].
const RATIO_LIMIT: u32 = 55;

/// Shows how many weights share a scale, beside the rule of thumb of the field notes and the ratio that really counts.
/// `outliers` is none with `--skip-outliers`.
pub fn show_scales(plan: &Plan, outliers: Option<&[Outlier]>, out: &mut Vec<String>) {
    let mut scales: BTreeMap<(&str, &str, &str), u64> = BTreeMap::new();
    for (shard, m) in outliers::matrices_at_risk(plan) {
        let own = if m.bank { "" } else { m.name.as_str() };
        *scales.entry((&shard.name, &m.tensor, own)).or_default() += m.weights();
    }
    let Some(most) = scales.values().max() else { return };
    let found = match outliers {
        None => "nobody looked (--skip-outliers)".to_string(),
        Some([]) => format!("less than {RATIO_LIMIT} everywhere"),
        Some(all) => format!("{:.0} in the worst of them", all.iter().map(|o| o.ratio).fold(0.0, f64::max)),
    };
    out.push(format!(
        "one scale for up to {}. The rule of thumb of the field notes is none above 10,000,000; what counts is the \
         largest weight over the mean magnitude, of which {RATIO_LIMIT} lose 1 % in int8: {found}",
        ui::counted(*most, "weight")
    ));
}

/// Shows the first warnings about outliers.
pub fn show_outliers(outliers: &[Outlier], out: &mut Vec<String>) {
    for outlier in outliers.iter().take(SHOWN) {
        out.push(format!("warning: {outlier}"));
    }
    if outliers.len() > SHOWN {
        let more = ui::counted(outliers.len() - SHOWN, "more matrix");
        out.push(format!("warning: {more} with such outliers"));
    }
}
