//! Tables of `anemoe bench`.

use crate::ui::Table;
use anemoe_runtime::bench::{BatchSpeed, Speeds};
use anemoe_runtime::shard_work::WorkPart;

/// Most operations in the table.
const MOST_OPS: usize = 24;

/// Shows a table behind an empty line; nothing without rows.
fn table<const N: usize>(headings: [&str; N], rows: Vec<[String; N]>, out: &mut Vec<String>) {
    if rows.is_empty() {
        return;
    }
    out.push(String::new());
    out.extend(Table::new(&headings).with_rows(rows.into_iter().map(Vec::from)).lines());
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

/// Shows speeds, beside a bandwidth of `read_gb_s`; those of each shard if asked to.
pub fn show(speeds: &Speeds, read_gb_s: f64, lists_shards: bool, out: &mut Vec<String>) {
    show_speeds(speeds, read_gb_s, out);
    passes_over_drafts(speeds, out);
    let experts = speeds.prefill.iter().map(|p| (format!("prefill {}", p.tokens), p.distinct_experts));
    for (name, experts) in experts.chain(speeds.batches.iter().map(|b| (name(b), b.distinct_experts))) {
        if let Some(experts) = experts {
            out.push(format!("{name}: {experts:.1} different experts in a layer and call"));
        }
    }
    parts("shards", &speeds.kinds, out);
    bounds(speeds, out);
    if lists_shards {
        parts("shard", &speeds.shards, out);
    }
    let ops = speeds.ops.iter().take(MOST_OPS);
    let ops =
        ops.map(|o| [o.op.clone(), format!("{:.3}", o.ms_per_token), format!("{:.1} %", 100.0 * o.share)]);
    table(["operation", "ms per token", "share"], ops.collect(), out);
}

fn name(batch: &BatchSpeed) -> String {
    format!("{} sequences at {}", batch.sequences, batch.context)
}

/// Shows decoding, batches and prompts.
fn show_speeds(report: &Speeds, roof: f64, out: &mut Vec<String>) {
    let row = |name: String, [tok_s, ms, gb, gb_s, share]: [f64; 5], ceiling: String| {
        let speed = format!("{tok_s:.2}");
        [name, speed, format!("{ms:.2}"), format!("{gb:.4}"), format!("{gb_s:.1}"), percent(share), ceiling]
    };
    let decode = report.decode.iter().map(|d| {
        let figures = [d.tok_s, d.ms_per_token, d.gb_per_token, d.gb_s, d.share_of_bandwidth];
        row(format!("decode at {}", d.context), figures, format!("{:.2}", d.ceiling_tok_s))
    });
    let batches = report.batches.iter().map(|b| {
        let ms = b.seconds * 1e3 / (b.sequences * b.tokens) as f64;
        row(name(b), [b.tok_s, ms, b.gb_per_token, b.gb_s, b.gb_s / roof], "-".into())
    });
    let prefill = report.prefill.iter().map(|p| {
        let n = p.tokens as f64;
        let figures = [p.tok_s, p.seconds * 1e3 / n, p.gb / n, p.gb_s, p.gb_s / roof];
        row(format!("prefill {}", p.tokens), figures, "-".into())
    });
    let headings = ["", "tok/s", "ms per token", "GB per token", "GB/s", "of bandwidth", "ceiling tok/s"];
    table(headings, decode.chain(batches).chain(prefill).collect(), out);
    for b in &report.batches {
        let over = b.over_one.map_or(String::new(), |x| format!(", {x:.2} times one sequence"));
        out.push(format!("{}: {:.2} tok/s each{over}", name(b), b.tok_s_per_sequence));
    }
}

fn parts(title: &str, parts: &[WorkPart], out: &mut Vec<String>) {
    let rows = parts.iter().map(|p| {
        [
            p.name.clone(),
            p.calls.to_string(),
            format!("{:.3}", p.ms_per_token),
            format!("{:.1} %", 100.0 * p.share),
            format!("{:.4}", p.gb_per_token),
            format!("{:.1}", p.gb_s),
            p.million_multiply_adds_per_token.map_or("-".into(), |n| format!("{n:.2}")),
        ]
    });
    let headings =
        [title, "calls", "ms per token", "share", "GB per token", "GB/s", "M multiply-adds per token"];
    table(headings, rows.collect(), out);
}

/// Shows how long reading alone and multiplying alone would take, by kind of shard.
fn bounds(report: &Speeds, out: &mut Vec<String>) {
    let rows = report.bounds.iter().map(|b| {
        [
            b.kind.clone(),
            b.tokens.to_string(),
            format!("{:.3}", b.ms),
            format!("{:.4}", b.gb),
            format!("{:.1}", b.million_multiply_adds),
            format!("{:.3}", b.read_ms),
            format!("{:.3}", b.multiply_ms),
            b.bound.name().into(),
        ]
    });
    let headings = [
        "shards in a pass",
        "tokens",
        "ms",
        "GB",
        "M multiply-adds",
        "ms to read",
        "ms to multiply",
        "bound by",
    ];
    table(headings, rows.collect(), out);
}

/// Shows passes over several tokens of one sequence, and decoding with drafts.
fn passes_over_drafts(report: &Speeds, out: &mut Vec<String>) {
    let context = report.verify.first().map_or(0, |v| v.context);
    let rows = report.verify.iter().map(|v| {
        [
            v.tokens.to_string(),
            format!("{:.2}", v.ms),
            format!("{:.2}", v.over_one),
            format!("{:.2}", v.bytes_over_one),
            format!("{:.1}", v.gb_s),
            v.distinct_experts.map_or("-".into(), |n| format!("{n:.1}")),
            v.break_even.map_or("never".into(), |a| format!("{a:.2}")),
        ]
    });
    let title = format!("pass over T tokens at {context}");
    let headings =
        [title.as_str(), "ms", "t(T)/t(1)", "bytes(T)/bytes(1)", "GB/s", "experts", "pays from acceptance"];
    table(headings, rows.collect(), out);
    let rows = report.drafts.iter().map(|d| {
        [
            d.planted.map_or("as the drafter is".into(), |p| format!("{p:.2}")),
            format!("{:.2}", d.tok_s),
            format!("{:.2}", d.plain_tok_s),
            format!("{:.3}", d.gain),
            d.verifier_calls.to_string(),
            d.accepted.to_string(),
            d.drafted.to_string(),
            d.fallbacks.to_string(),
        ]
    });
    let headings =
        ["drafts right with", "tok/s", "plain tok/s", "gain", "passes", "accepted", "drafted", "without"];
    table(headings, rows.collect(), out);
    if report.drafts.iter().any(|d| d.planted != Some(0.0) && d.drafted == 0) {
        out.push(
            "where nothing was drafted, the gain is the difference of two equal runs: a longer --decode gives \
             drafts time to pay"
                .into(),
        );
    }
}
