//! Tables of `anemoe bench`.

use super::bench_report::{BenchReport, Part};
use crate::ui::{Table, Ui};

/// Most operations in the table.
const MOST_OPS: usize = 24;

pub(super) fn print(report: &BenchReport, shards: bool, ui: &Ui) -> anyhow::Result<()> {
    let m = &report.machine;
    ui.line(format!(
        "{}, {} threads, {}: reads {:.1} GB/s before, {:.1} after",
        m.machine.cpu.as_deref().unwrap_or("this machine"),
        m.threads,
        m.machine.isa.as_deref().unwrap_or("scalar"),
        m.read_gb_s,
        m.read_gb_s_after
    ))?;
    ui.line(format!(
        "{} ({}), {}; loaded in {:.2} s, first token behind {:.2} s",
        report.bundle.display(),
        report.source,
        report.mode,
        report.load_s,
        report.first_token_s
    ))?;
    if let (Some(own), Some(mapped)) = (report.memory.own_bytes, report.memory.mapped_bytes) {
        ui.line(format!("resident: {} MB, and {} MB of mapped files", own / 1_000_000, mapped / 1_000_000))?;
    }
    ui.line("")?;
    let mut headings =
        vec!["", "tok/s", "ms per token", "GB per token", "GB/s", "of bandwidth", "ceiling tok/s"];
    if report.against.is_some() {
        headings.extend(["earlier tok/s", "ratio"]);
    }
    let mut table = Table::new(&headings);
    let beside = |cells: &mut Vec<String>| {
        if let Some(against) = &report.against {
            let found = against.beside.iter().find(|b| b.what == cells[0]);
            cells.push(found.map_or("-".into(), |b| format!("{:.2}", b.earlier_tok_s)));
            cells.push(found.map_or("-".into(), |b| format!("{:.3}", b.ratio)));
        }
    };
    for d in &report.decode {
        let mut cells = vec![
            d.name(),
            format!("{:.2}", d.tok_s),
            format!("{:.2}", d.ms_per_token),
            format!("{:.4}", d.gb_per_token),
            format!("{:.1}", d.gb_s),
            format!("{:.0} %", 100.0 * d.share_of_bandwidth),
            format!("{:.2}", d.ceiling_tok_s),
        ];
        beside(&mut cells);
        table.row(cells);
    }
    for b in &report.batches {
        let mut cells = vec![
            b.name(),
            format!("{:.2}", b.tok_s),
            format!("{:.2}", b.seconds * 1e3 / (b.sequences * b.tokens) as f64),
            format!("{:.4}", b.gb_per_token),
            format!("{:.1}", b.gb_s),
            format!("{:.0} %", 100.0 * b.gb_s / m.read_gb_s),
            "-".into(),
        ];
        beside(&mut cells);
        table.row(cells);
    }
    for p in &report.prefill {
        let mut cells = vec![
            p.name(),
            format!("{:.2}", p.tok_s),
            format!("{:.2}", p.seconds * 1e3 / p.tokens as f64),
            format!("{:.4}", p.gb / p.tokens as f64),
            format!("{:.1}", p.gb_s),
            format!("{:.0} %", 100.0 * p.gb_s / m.read_gb_s),
            "-".into(),
        ];
        beside(&mut cells);
        table.row(cells);
    }
    table.print(ui)?;
    for b in &report.batches {
        let over = b.over_one.map_or(String::new(), |x| format!(", {x:.2} times one sequence"));
        ui.line(format!("{}: {:.2} tok/s each{over}", b.name(), b.tok_s_per_sequence))?;
    }
    passes_over_drafts(report, ui)?;
    let batches = report.batches.iter().map(|b| (b.name(), b.distinct_experts));
    for (name, experts) in report.prefill.iter().map(|p| (p.name(), p.distinct_experts)).chain(batches) {
        if let Some(experts) = experts {
            ui.line(format!("{name}: {experts:.1} different experts in a layer and call"))?;
        }
    }
    if let Some(against) = report.against.as_ref().filter(|a| !a.differs.is_empty()) {
        ui.line(format!("earlier, of {}: {}", against.file.display(), against.differs.join("; ")))?;
    }
    let of = |parts: &[Part], title: &str| -> anyhow::Result<()> {
        ui.line("")?;
        let mut table = Table::new(&[
            title,
            "calls",
            "ms per token",
            "share",
            "GB per token",
            "GB/s",
            "M multiply-adds per token",
        ]);
        for p in parts {
            table.row(vec![
                p.name.clone(),
                p.calls.to_string(),
                format!("{:.3}", p.ms_per_token),
                format!("{:.1} %", 100.0 * p.share),
                format!("{:.4}", p.gb_per_token),
                format!("{:.1}", p.gb_s),
                p.million_multiply_adds_per_token.map_or("-".into(), |n| format!("{n:.2}")),
            ]);
        }
        Ok(table.print(ui)?)
    };
    if !report.kinds.is_empty() {
        of(&report.kinds, "shards")?;
    }
    if !report.bounds.is_empty() {
        bounds(report, ui)?;
    }
    if shards {
        of(&report.shards, "shard")?;
    }
    if !report.ops.is_empty() {
        ui.line("")?;
        let mut table = Table::new(&["operation", "ms per token", "share"]);
        for o in report.ops.iter().take(MOST_OPS) {
            table.row(vec![
                o.op.clone(),
                format!("{:.3}", o.ms_per_token),
                format!("{:.1} %", 100.0 * o.share),
            ]);
        }
        table.print(ui)?;
    }
    Ok(())
}

/// Prints how long reading alone and multiplying alone would take, by kind of shard.
fn bounds(report: &BenchReport, ui: &Ui) -> std::io::Result<()> {
    ui.line("")?;
    let mut table = Table::new(&[
        "shards in a pass",
        "tokens",
        "ms",
        "GB",
        "M multiply-adds",
        "ms to read",
        "ms to multiply",
        "bound by",
    ]);
    for b in &report.bounds {
        table.row(vec![
            b.kind.clone(),
            b.tokens.to_string(),
            format!("{:.3}", b.ms),
            format!("{:.4}", b.gb),
            format!("{:.1}", b.million_multiply_adds),
            format!("{:.3}", b.read_ms),
            format!("{:.3}", b.multiply_ms),
            b.bound.name().into(),
        ]);
    }
    table.print(ui)
}

/// Prints passes over several tokens of one sequence, and decoding with drafts.
fn passes_over_drafts(report: &BenchReport, ui: &Ui) -> anyhow::Result<()> {
    if let Some(first) = report.verify.first() {
        ui.line("")?;
        let title = format!("pass over T tokens at {}", first.context);
        let mut table = Table::new(&[
            &title,
            "ms",
            "t(T)/t(1)",
            "bytes(T)/bytes(1)",
            "GB/s",
            "experts",
            "pays from acceptance",
        ]);
        for v in &report.verify {
            table.row(vec![
                v.tokens.to_string(),
                format!("{:.2}", v.ms),
                format!("{:.2}", v.over_one),
                format!("{:.2}", v.bytes_over_one),
                format!("{:.1}", v.gb_s),
                v.distinct_experts.map_or("-".into(), |n| format!("{n:.1}")),
                v.break_even.map_or("never".into(), |a| format!("{a:.2}")),
            ]);
        }
        table.print(ui)?;
    }
    if !report.drafts.is_empty() {
        ui.line("")?;
        let mut table = Table::new(&[
            "drafts right with",
            "tok/s",
            "plain tok/s",
            "gain",
            "passes",
            "accepted",
            "drafted",
            "without",
        ]);
        for d in &report.drafts {
            table.row(vec![
                format!("{:.2}", d.planted),
                format!("{:.2}", d.tok_s),
                format!("{:.2}", d.plain_tok_s),
                format!("{:.3}", d.gain),
                d.verifier_calls.to_string(),
                d.accepted.to_string(),
                d.drafted.to_string(),
                d.fallbacks.to_string(),
            ]);
        }
        table.print(ui)?;
        if report.drafts.iter().any(|d| d.planted > 0.0 && d.drafted == 0) {
            ui.line("where nothing was drafted, the gain is the difference of two equal runs: a longer --decode gives drafts time to pay")?;
        }
    }
    Ok(())
}
