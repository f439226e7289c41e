//! The report as one HTML file: no script, nothing from a network.

use super::bundle_facts::{BundleReport, ShardRow};
use super::chart::{Grid, MapBar, Plot, PlotPoint, bar_map, grid, plot, short};
use super::layers::{layer_errors, layer_name};
use super::markup::Markup;
use crate::ui;
use anemoe_gates::residency::Verdicts;
use anemoe_gates::residency::rule::Verdict;
use std::collections::BTreeSet;
use std::path::Path;

/// Smallest difference from a cosine of 1 that counts, since the journal has seven digits.
const LEAST_DIFFERENCE: f64 = 1e-6;
/// Style of the page: light, dark, and on paper.
const STYLE: &str = include_str!("page.css");

/// Computes `1 - cosine`; returns 0 up to `LEAST_DIFFERENCE`, so that rounding stretches no scale.
pub fn distance(cosine: f64) -> f64 {
    if 1.0 - cosine > LEAST_DIFFERENCE { 1.0 - cosine } else { 0.0 }
}

/// Writes the page. The commands that it shows name the bundle by the path `bundle`.
pub fn page(report: &BundleReport, bundle: &Path) -> String {
    let name = crate::shell::quoted(bundle);
    let mut m = Markup::default();
    m.raw("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    m.raw("<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">");
    m.raw("<meta name=\"viewport\" content=\"width=device-width\"><title>").text(&report.name);
    m.raw("</title><style>")
        .raw(STYLE)
        .raw("</style></head><body><main><h1>")
        .text(&report.name)
        .raw("</h1>");
    head(&mut m, report);
    shards(&mut m, report);
    errors(&mut m, report);
    cosines(&mut m, report, &name);
    qualities(&mut m, report, &name);
    roofline(&mut m, report, &name);
    gates(&mut m, report, &name);
    speeds(&mut m, report, &name);
    form_speeds(&mut m, report, &name);
    journal(&mut m, report);
    m.raw("<footer>anemoe ").text(env!("CARGO_PKG_VERSION")).raw("</footer></main></body></html>\n");
    m.finish()
}

fn head(m: &mut Markup, r: &BundleReport) {
    m.raw("<div class=\"wide\"><table>");
    for (key, value) in [
        ("model", format!("{} of the family {}", r.source, r.family)),
        ("layers", r.layers.to_string()),
        ("context", format!("{} tokens", ui::count(r.max_context as u64))),
        ("packages", format!("{}, {}", r.shards.len(), ui::bytes(r.bytes))),
        ("embedding", ui::bytes(r.embedding_bytes)),
        ("weights", ui::count(r.weights)),
    ] {
        m.raw("<tr><th>").raw(key).raw("</th><td class=\"text\">").text(value).raw("</td></tr>");
    }
    m.raw("</table></div>");
}

fn section(m: &mut Markup, title: &'static str, note: impl std::fmt::Display) {
    m.raw("<h2>").raw(title).raw("</h2><p>").text(note).raw("</p>");
}

/// Adds a note with the command that records the content of a section.
fn absent(m: &mut Markup, command: impl std::fmt::Display) {
    m.raw("<p class=\"absent\">Nothing is recorded. This brings it: <code>").text(command).raw("</code></p>");
}

/// Returns the CSS class and the words of a predicted placement.
pub fn verdict(shard: &ShardRow) -> (&'static str, &'static str) {
    match (shard.verdict, shard.too_small) {
        (_, true) => ("small", "too small for the Neural Engine, runs on the CPU, which is fine"),
        (Verdict::Ane, _) => ("ane", "on the Neural Engine"),
        (Verdict::Unknown, _) => ("unknown", "unknown"),
        (Verdict::NotAne, _) => ("not-ane", "elsewhere"),
    }
}

/// Names the predicted device of a package.
pub fn device(shard: &ShardRow) -> &'static str {
    verdict(shard).1.split(',').next().unwrap_or_default()
}

fn shards(m: &mut Markup, r: &BundleReport) {
    section(
        m,
        "Packages",
        "A row for each layer; a bar for each package, as long as it has bytes; its colour is the predicted device, from published measurements. Only a Mac can measure.",
    );
    m.raw("<p class=\"key\">");
    for (class, words) in [
        ("ane", "Neural Engine"),
        ("unknown", "unknown"),
        ("not-ane", "elsewhere"),
        ("small", "too small to matter"),
    ] {
        m.raw("<span class=\"").raw(class).raw("\"></span> ").raw(words).raw(" ");
    }
    m.raw("</p>");
    let bars: Vec<MapBar> = r
        .shards
        .iter()
        .map(|s| MapBar {
            row: layer_name(&r.shards, s.layer),
            size: s.bytes as f64,
            class: verdict(s).0,
            title: format!("{}, {}, {}: {} ({})", s.name, s.kind, ui::bytes(s.bytes), verdict(s).1, s.rule),
        })
        .collect();
    m.append(&bar_map("bytes and predicted device of each package, by layer", &bars));
    m.raw("<details><summary>As a table</summary><div class=\"wide\"><table><tr><th>package</th><th>kind</th><th>bytes</th><th>compression</th><th>predicted</th><th>lowest weight cosine</th><th>output error</th></tr>");
    for s in &r.shards {
        let quant: BTreeSet<&str> = s.quant.values().map(String::as_str).collect();
        let quant = quant.into_iter().collect::<Vec<_>>().join(", ");
        m.raw("<tr><td>")
            .text(&s.name)
            .raw("</td><td>")
            .text(s.kind)
            .raw("</td><td>")
            .text(ui::bytes(s.bytes));
        m.raw("</td><td class=\"text\">")
            .text(quant)
            .raw("</td><td class=\"text\">")
            .text(device(s))
            .raw("</td><td>");
        m.text(format!("{:.5}", s.min_weight_cosine))
            .raw("</td><td>")
            .text(format!("{:.2e}", s.output_error))
            .raw("</td></tr>");
    }
    m.raw("</table></div></details>");
}

fn errors(m: &mut Markup, r: &BundleReport) {
    section(
        m,
        "Error by layer and part",
        "Squared error of compressed matrices over their squares, the largest of a layer's packages of a kind; stronger is worse.",
    );
    let errors = layer_errors(&r.shards);
    let columns = errors.kinds.iter().map(|k| k.to_string()).collect();
    let made = Grid { rows: errors.rows, values: errors.values, columns };
    m.append(&grid("error by layer and part", &made, |v| format!("{v:.2e}")));
}

fn cosines(m: &mut Markup, r: &BundleReport, name: &str) {
    section(
        m,
        "Cosine by layer and position",
        "The values that flow from layer to layer (the hidden state) beside those of the golden, the checkpoint run in f32: 1 minus the cosine, stronger is worse.",
    );
    let Some(map) = &r.cosines else { return absent(m, format!("anemoe trace {name} --golden F.npz")) };
    let rows = (0..map.rows.len()).map(|i| map.row_name(i));
    let values = map.rows.iter().map(|row| row.iter().map(|c| Some(distance(*c))).collect());
    let made = Grid { rows: rows.collect(), values: values.collect(), columns: Vec::new() };
    m.append(&grid("one minus the cosine of the hidden state, by layer and position", &made, |v| {
        format!("cosine {:.6}", 1.0 - v)
    }));
    m.raw("<p class=\"note\">Traced ").text(&map.time).raw(".</p>");
}

fn qualities(m: &mut Markup, r: &BundleReport, name: &str) {
    section(
        m,
        "Bytes and quality",
        "Lowest cosine of the logits; further left is smaller, further down is better. A line joins what nothing beats.",
    );
    if r.qualities.is_empty() {
        return absent(m, format!("anemoe validate {name} --golden F.npz"));
    }
    let error = |c: f64| (1.0 - c).max(LEAST_DIFFERENCE);
    let points = r.qualities.iter().map(|q| PlotPoint {
        x: q.bytes as f64 / 1e6,
        y: error(q.min_cosine),
        class: if q.is_search { "search" } else { "own" },
        name: q.name.clone(),
    });
    let front = |is_search: bool| {
        let mut best: Vec<(f64, f64)> = r
            .qualities
            .iter()
            .filter(|q| q.is_best && q.is_search == is_search)
            .map(|q| (q.bytes as f64 / 1e6, error(q.min_cosine)))
            .collect();
        best.sort_by(|a, b| a.0.total_cmp(&b.0));
        best
    };
    let lines = vec![("front search", front(true)), ("front own", front(false))];
    m.raw("<p class=\"key\"><span class=\"own\"></span> bundles, as validated <span class=\"search\"></span> whole models of one kind, measured on matrices while kinds were chosen</p>");
    m.append(&plot(
        "bytes and quality",
        &Plot { along: "MB", up: "1 - lowest cosine", points: points.collect(), lines },
    ));
    m.raw(
        "<details><summary>As a table</summary><div class=\"wide\"><table><tr><th></th><th>bytes</th><th>lowest cosine</th></tr>",
    );
    for q in &r.qualities {
        m.raw("<tr><td>").text(&q.name).raw("</td><td>").text(ui::bytes(q.bytes)).raw("</td><td>");
        m.text(format!("{:.6}", q.min_cosine)).raw(if q.is_best { " *</td></tr>" } else { "</td></tr>" });
    }
    m.raw("</table></div></details>");
}

fn roofline(m: &mut Markup, r: &BundleReport, name: &str) {
    section(
        m,
        "Speed and bandwidth",
        "Tokens a second over gigabytes read for each token. The line is the bandwidth of the memory, measured in the same run: nothing that reads its weights from memory is above it.",
    );
    let Some(roof) = &r.roofline else { return absent(m, format!("anemoe bench {name}")) };
    let points = roof.points.iter().map(|p| PlotPoint {
        x: p.gb_per_token,
        y: p.tok_s,
        class: "own",
        name: p.name.clone(),
    });
    let xs = || roof.points.iter().map(|p| p.gb_per_token);
    let (low, high) = (xs().fold(f64::INFINITY, f64::min) / 1.3, xs().fold(0.0, f64::max) * 1.3);
    let line = [low, high].map(|x| (x, roof.read_gb_s / x)).to_vec();
    m.append(&plot(
        "speed beside the bandwidth of the memory",
        &Plot {
            along: "GB read for a token",
            up: "tokens a second",
            points: points.collect(),
            lines: vec![("roof", line)],
        },
    ));
    m.raw("<div class=\"wide\"><table><tr><th></th><th>tokens a second</th><th>GB a token</th><th>of the bandwidth</th></tr>");
    for p in &roof.points {
        let share = 100.0 * p.tok_s * p.gb_per_token / roof.read_gb_s;
        m.raw("<tr><td>").text(&p.name).raw("</td><td>").text(short(p.tok_s)).raw("</td><td>");
        m.text(short(p.gb_per_token)).raw("</td><td>").text(format!("{share:.0} %")).raw("</td></tr>");
    }
    m.raw("</table></div><p class=\"note\">Measured ")
        .text(&roof.time)
        .raw(", beside ")
        .text(short(roof.read_gb_s))
        .raw(" GB/s.</p>");
}

fn gates(m: &mut Markup, r: &BundleReport, name: &str) {
    section(
        m,
        "Gates",
        "What the contract says of the build, then every run of a gate since, the newest last.",
    );
    if r.gates.is_empty() {
        return absent(m, format!("anemoe validate {name} --golden F.npz"));
    }
    m.raw(
        "<div class=\"wide\"><table><tr><th>when</th><th>gate</th><th>said</th><th>lowest cosine</th></tr>",
    );
    for g in &r.gates {
        let class = match g.said.as_str() {
            "pass" | "passed" => "<td class=\"good\">",
            "fail" | "failed" => "<td class=\"bad\">",
            _ => "<td>",
        };
        m.raw("<tr><td>")
            .text(g.time.as_deref().unwrap_or("build"))
            .raw("</td><td>")
            .text(&g.gate)
            .raw("</td>")
            .raw(class);
        m.text(&g.said)
            .raw("</td><td>")
            .text(g.min_cosine.map(|c| format!("{c:.6}")).unwrap_or_default())
            .raw("</td></tr>");
    }
    m.raw("</table></div>");
}

fn speeds(m: &mut Markup, r: &BundleReport, name: &str) {
    section(
        m,
        "Predicted speed of the Neural Engine",
        format!(
            "One token after the other, from published figures of chips; nothing is measured. Of other chips and contexts: anemoe predict-speed {name}."
        ),
    );
    m.raw("<div class=\"wide\"><table><tr><th>chip</th><th>tokens a second</th><th>from</th><th>to</th><th>ms a token</th></tr>");
    for s in &r.speeds {
        m.raw("<tr><td>")
            .text(&s.chip)
            .raw("</td><td>")
            .text(short(s.tok_s.likely))
            .raw("</td><td>")
            .text(short(s.tok_s.low));
        m.raw("</td><td>")
            .text(short(s.tok_s.high))
            .raw("</td><td>")
            .text(short(s.ms.likely))
            .raw("</td></tr>");
    }
    m.raw("</table></div>");
}

/// Counts packages by predicted device, in words, without those that are too small to matter.
fn placement(v: &Verdicts) -> String {
    let counts = [(v.ane, "Neural Engine"), (v.unknown, "unknown"), (v.not_ane, "elsewhere")];
    let counts = counts.iter().filter(|(n, _)| *n > 0).map(|(n, words)| format!("{n} {words}"));
    let counts: Vec<String> = counts.collect();
    if counts.is_empty() { "too small to matter".into() } else { counts.join(", ") }
}

fn form_speeds(m: &mut Markup, r: &BundleReport, name: &str) {
    section(
        m,
        "Predicted speed by form",
        "Tokens a second of the same model built with other options, from the shapes of its checkpoint: the likely figure, the range at the pointer. Nothing is measured.",
    );
    let found = &r.form_speeds;
    if let Some(why) = &found.missing {
        m.raw("<p class=\"absent\">Nothing is predicted: ").text(why);
        m.raw(". This brings it: <code>anemoe report ")
            .text(name)
            .raw(" --checkpoint CHECKPOINT -o F.html</code></p>");
        return;
    }
    m.raw("<div class=\"wide\"><table><tr><th>form</th><th>calls</th>");
    for chip in &found.chips {
        m.raw("<th>").text(chip).raw("</th>");
    }
    m.raw("<th>packages, as predicted</th></tr>");
    for form in &found.forms {
        m.raw("<tr><td class=\"text\">")
            .text(&form.name)
            .raw("</td><td>")
            .text(short(form.calls))
            .raw("</td>");
        for span in &form.tok_s {
            m.raw("<td title=\"")
                .text(format!("{} to {}", short(span.low), short(span.high)))
                .raw("\">")
                .text(short(span.likely))
                .raw("</td>");
        }
        m.raw("<td class=\"text\">").text(placement(&form.verdicts)).raw("</td></tr>");
    }
    m.raw("</table></div>");
}

fn journal(m: &mut Markup, r: &BundleReport) {
    section(m, "Journal", "What was done to this bundle, and what came out of it.");
    if r.journal.is_empty() {
        m.raw("<p class=\"absent\">Nothing is written yet: commands on this bundle write it, unless they are run with <code>--no-journal</code>.</p>");
    }
    for entry in &r.journal {
        m.raw("<article><h3>").text(&entry.time).raw("</h3>");
        for (title, lines) in entry.texts() {
            for line in lines {
                m.raw("<p><b>").raw(title).raw("</b> ").text(line).raw("</p>");
            }
        }
        for run in &entry.result {
            m.raw("<p><b>")
                .text(&run.kind)
                .raw("</b> ")
                .text(&run.status)
                .raw(" ")
                .text(run.figures.join(", "))
                .raw("</p>");
        }
        m.raw("</article>");
    }
}
