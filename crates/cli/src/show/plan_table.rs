//! Plans, for people.

use super::placement::{TOO_SMALL, device_label};
use crate::ui::{self, Table, Ui};
use anemoe_bundle::AutoChoice;
use anemoe_convert::outliers::{self, Outlier};
use anemoe_convert::plan::Plan;
use anemoe_gates::cost::forecast::TokenCalls;
use anemoe_gates::residency::Report;
use std::collections::BTreeMap;

/// Prints the plan: equal shards of different layers in one row, unless `all`.
pub fn print(plan: &Plan, placement: &Report, all: bool, ui: &Ui) -> std::io::Result<()> {
    let mut rows: Vec<(String, usize, Vec<String>)> = Vec::new();
    let mut known: BTreeMap<Vec<String>, usize> = BTreeMap::new();
    for (s, p) in plan.shards.iter().zip(&placement.packages) {
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
        match known.get(&cells).filter(|_| !all) {
            Some(&i) => rows[i].1 += 1,
            None => {
                known.insert(cells.clone(), rows.len());
                rows.push((s.name.clone(), 1, cells));
            }
        }
    }
    ui.line(format!("{}  {}", plan.family, plan.source))?;
    let mut table =
        Table::new(&["shard", "count", "kind", "functions", "quant", "weights", "MB", "predicted"]);
    for (name, n, cells) in rows {
        let mut row = vec![name, n.to_string()];
        row.extend(cells);
        table.row(row);
    }
    table.print(ui)?;
    print_verdict_reasons(placement, ui)?;
    if let Some(auto) = &plan.chain.auto {
        print_choice(auto, ui)?;
    }
    let t = &plan.totals;
    ui.line(format!(
        "{} ({} of layers), {} of weights ({:.1} % of FP16), {} of embedding on the host",
        ui::counted(t.shards, "package"),
        t.layer_shards,
        ui::bytes(t.bytes),
        100.0 * t.bytes as f64 / plan.fp16_bytes().max(1) as f64,
        ui::bytes(t.embedding_bytes)
    ))?;
    ui.line(format!(
        "{} parameters, {} active per token, {} to read per token",
        ui::count(t.params),
        ui::count(t.active_params_per_token),
        ui::bytes(t.bytes_per_token)
    ))?;
    ui.line(calls(TokenCalls::of(&plan.chain)))?;
    for note in &plan.notes {
        ui.line(format!("note: {note}"))?;
    }
    ui.line(
        "predicted device: by the rules of `anemoe check`, which gives the built packages the same; a shard is one package",
    )
}

/// Prints why packages are not predicted on the Neural Engine: a line for each reason.
fn print_verdict_reasons(placement: &Report, ui: &Ui) -> std::io::Result<()> {
    for r in placement.verdict_reasons() {
        let label = if r.too_small && !placement.strict { TOO_SMALL } else { r.verdict.name() };
        let at = match r.packages {
            1 => r.first,
            n => format!("{} and {} more", r.first, n - 1),
        };
        let change =
            if r.advice.is_empty() { String::new() } else { format!("; to change it: {}", r.advice) };
        ui.line(format!("{label}, {at}: {} [{}]{change}", r.text, r.rule))?;
    }
    Ok(())
}

/// Returns the calls per token, in words.
fn calls(c: TokenCalls) -> String {
    let layers = match c.layers_at_most - c.layers > 0.05 {
        true => format!("{:.1} of layers (expected; {} at most)", c.layers, c.layers_at_most),
        false => format!("{} of layers", c.layers_at_most),
    };
    format!("calls per token: {layers}, {} of the head", c.head)
}

/// Prints the result of the search for kinds.
fn print_choice(auto: &AutoChoice, ui: &Ui) -> std::io::Result<()> {
    ui.line(format!("\nkinds chosen for {} on {}", auto.goal, auto.measured_on))?;
    let mut table = Table::new(&["tensor", "part", "kind", "bytes", "output error", "sensitivity"]);
    for t in &auto.tensors {
        table.row(vec![
            t.tensor.clone(),
            t.part.clone(),
            t.kind.clone(),
            ui::bytes(t.bytes),
            format!("{:.2e}", t.output_error),
            format!("{:.2e}", t.sensitivity),
        ]);
    }
    table.print(ui)?;
    if let (Some(min), Some(mean)) = (auto.min_cosine, auto.mean_cosine) {
        let mut table = Table::new(&["whole model", "bytes", "lowest cosine", "mean cosine"]);
        table.row(vec!["auto".into(), ui::bytes(auto.bytes), format!("{min:.5}"), format!("{mean:.6}")]);
        for u in &auto.uniform {
            let (min, mean) = (format!("{:.5}", u.min_cosine), format!("{:.6}", u.mean_cosine));
            table.row(vec![u.kind.clone(), ui::bytes(u.bytes), min, mean]);
        }
        ui.line("")?;
        table.print(ui)?;
    }
    ui.line("the reason for each kind is in --json, --out and chain.json\n")
}

/// Most outliers that are printed; `--json` has all.
const SHOWN: usize = 5;

/// Relative outlier from which INT8 with one scale loses 1 %, see [`outliers::Spread::int8_tensor_loss`].
const RATIO_LIMIT: u32 = 55;

/// Prints how many weights share a scale, beside the rule of thumb of the field notes and the ratio that really counts.
/// `outliers` is none with `--skip-outliers`.
pub fn print_scales(plan: &Plan, outliers: Option<&[Outlier]>, ui: &Ui) -> std::io::Result<()> {
    let mut scales: BTreeMap<(&str, &str, &str), u64> = BTreeMap::new();
    for (shard, m) in outliers::matrices_at_risk(plan) {
        let own = if m.bank { "" } else { m.name.as_str() };
        *scales.entry((&shard.name, &m.tensor, own)).or_default() += m.weights();
    }
    let Some(most) = scales.values().max() else { return Ok(()) };
    let found = match outliers {
        None => "nobody looked (--skip-outliers)".to_string(),
        Some([]) => format!("less than {RATIO_LIMIT} everywhere"),
        Some(all) => format!("{:.0} in the worst of them", all.iter().map(|o| o.ratio).fold(0.0, f64::max)),
    };
    ui.line(format!(
        "one scale for up to {}. The rule of thumb of the field notes is none above 10,000,000; what counts is the \
         largest weight over the mean magnitude, of which {RATIO_LIMIT} lose 1 % in int8: {found}",
        ui::counted(*most, "weight")
    ))
}

/// Prints the first warnings about outliers.
pub fn print_outliers(outliers: &[Outlier], ui: &Ui) -> std::io::Result<()> {
    for outlier in outliers.iter().take(SHOWN) {
        ui.line(format!("warning: {outlier}"))?;
    }
    match outliers.len().checked_sub(SHOWN) {
        Some(more) if more > 0 => {
            ui.line(format!("warning: {} with such outliers", ui::counted(more, "more matrix")))
        }
        _ => Ok(()),
    }
}
