//! Facts that commands found, for events. Nothing stands here that was not measured or counted.

use super::Facts;
use anemoe_bundle::journal::status;
use anemoe_bundle::{Chain, file_sha256};
use anemoe_convert::build::BuildReport;
use anemoe_convert::plan::Plan;
use anemoe_gates::ablation::AblationReport;
use anemoe_gates::gated::{GatedReport, NamedGate};
use anemoe_gates::golden_gate::{Agreement, Choice, GoldenGate};
use anemoe_gates::int8_gate::Int8Gate;
use anemoe_gates::probe::ProbeReport;
use anemoe_gates::residency::Report;
use anemoe_gates::residency::rule::Verdict;
use anemoe_gates::trace::Trace;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Most columns and rows of a map of cosines: some 50 kB of journal.
const MAX_MAP_POSITIONS: usize = 64;
const MAX_MAP_LAYERS: usize = 100;
/// Most items of a list in an event.
const MAX_LIST: usize = 16;

/// The members of an object that are not null.
pub fn of(value: Value) -> Facts {
    let Value::Object(mut map) = value else { return Facts::new() };
    map.retain(|_, v| !v.is_null());
    map
}

/// A cosine that was measured: without compression there is none, and the figure is 1.
fn measured(cosine: f64) -> Option<f64> {
    (cosine < 1.0).then_some(cosine)
}

/// A file that was read, by its name and hash.
pub fn file(path: &Path) -> Value {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned());
    json!({"file": name, "sha256": file_sha256(path).ok()})
}

/// A bundle, from its contract.
pub fn bundle(path: &Path, chain: &Chain) -> Facts {
    let mut kinds: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (part, kind) in chain.shards.iter().flat_map(|s| &s.quant) {
        kinds.entry(part).or_default().insert(kind);
    }
    let mut kinds: BTreeMap<&str, String> =
        kinds.into_iter().map(|(part, k)| (part, k.into_iter().collect::<Vec<_>>().join(", "))).collect();
    kinds.insert("embedding", chain.embedding.storage.name());
    let lowest = chain.shards.iter().min_by(|a, b| a.min_weight_cosine.total_cmp(&b.min_weight_cosine));
    let lowest = lowest.filter(|s| measured(s.min_weight_cosine).is_some());
    let tokens: Vec<String> = chain
        .tokens
        .iter()
        .map(|t| if t.min == t.max { t.min.to_string() } else { format!("{}..{}", t.min, t.max) })
        .collect();
    of(json!({
        "family": chain.family,
        "source": chain.source,
        "layers": chain.model.num_layers,
        "packages": chain.shards.len(),
        "package_bytes": chain.shards.iter().map(|s| s.bytes).sum::<u64>(),
        "embedding_bytes": std::fs::metadata(path.join(&chain.embedding.file)).ok().map(|m| m.len()),
        "weights": chain.shards.iter().map(|s| s.weights).sum::<u64>(),
        "quant": kinds,
        "min_weight_cosine": lowest.map(|s| s.min_weight_cosine),
        "min_weight_cosine_shard": lowest.map(|s| &s.name),
        "tokens": tokens.join(","),
        "max_context": chain.model.max_context,
        "importance_sha256": chain.importance,
        "auto_goal": chain.auto.as_ref().map(|a| &a.goal),
    }))
}

/// Fast products held to exact ones.
pub fn fast(gate: &Int8Gate) -> Facts {
    of(json!({
        "pass": gate.pass,
        "min_cosine": gate.min_cosine,
        "median_cosine": gate.median_cosine,
        "differing_tokens": gate.differing.len(),
    }))
}

/// Facts of a build that begins.
pub fn begun(plan: &Plan, part: Option<String>) -> Facts {
    of(
        json!({"part": part, "family": plan.chain.family, "source": plan.chain.source, "packages": plan.shards.len()}),
    )
}

/// A build or one part of it; with what the contract says where the bundle is complete.
pub fn build(report: &BuildReport, path: &Path, part: Option<String>) -> Facts {
    let mut facts = match Chain::read(path) {
        Ok(chain) => bundle(path, &chain),
        Err(_) => of(json!({
            "part": part,
            "packages": report.shards,
            "package_bytes": report.package_bytes,
            "min_weight_cosine": measured(report.min_weight_cosine),
        })),
    };
    facts.insert("reused".into(), report.reused.into());
    facts
}

fn choices(list: &[Choice]) -> Value {
    list.iter().take(MAX_LIST).map(|c| serde_json::to_value(c).unwrap_or_default()).collect()
}

/// The golden gate.
pub fn validation(gate: &GoldenGate, golden: Option<&Path>) -> Facts {
    let v = &gate.exact;
    let all: Vec<Agreement> =
        v.positions.iter().map(|p| p.agreement).chain(v.decode.iter().map(|d| d.agreement)).collect();
    let mut cosines: Vec<f64> = all.iter().map(|a| a.cosine).collect();
    cosines.sort_by(f64::total_cmp);
    let equal = v.generated_ids.iter().zip(&v.expected_ids).take_while(|(a, b)| a == b).count();
    let divergences: Vec<f64> = all.iter().filter_map(|a| a.kl).collect();
    of(json!({
        "pass": gate.pass,
        "threshold": v.threshold,
        "min_cosine": v.min_cosine,
        "median_cosine": cosines.get(cosines.len() / 2),
        "mean_kl": (!divergences.is_empty()).then_some(v.mean_kl),
        "max_kl": divergences.iter().copied().reduce(f64::max),
        "top1_agreement": v.top1_agreement,
        "positions": v.positions.len(),
        "steps": v.decode.len(),
        "tokens_match": v.tokens_match,
        "tokens_equal": equal,
        "tokens_expected": v.expected_ids.len(),
        "wrong_choices": v.wrong_choices.len(),
        "near_ties": v.wrong_choices.iter().filter(|c| c.near_tie).count(),
        "repeated": v.repeated.or(gate.fp16.repeated),
        "first_wrong_choices": choices(&v.wrong_choices),
        "fp16": {
            "pass": gate.fp16.pass,
            "threshold": gate.fp16.threshold,
            "min_cosine": gate.fp16.min_cosine,
            "median_cosine": gate.fp16.median_cosine,
            "wrong_choices": gate.fp16.wrong_choices.len(),
            "not_finite": gate.fp16.not_finite.len(),
            "tokens_match": gate.fp16.tokens_match,
        },
        "golden": golden.map(file),
    }))
}

/// The golden gate with further references.
pub fn also(gates: &[NamedGate]) -> Value {
    let one = |g: &NamedGate| {
        json!({"golden": file(&g.golden), "pass": g.gate.pass, "min_cosine": g.gate.exact.min_cosine,
            "repeated": g.gate.exact.repeated.or(g.gate.fp16.repeated)})
    };
    gates.iter().map(one).collect()
}

/// Probes of shards.
pub fn probes(report: &ProbeReport) -> Facts {
    let lowest = report.shards.iter().min_by(|a, b| a.median_cosine.total_cmp(&b.median_cosine));
    of(json!({
        "pass": report.pass,
        "threshold": report.threshold,
        "against": report.against,
        "seed": report.seed,
        "random_probes": report.random_probes,
        "shards": report.shards.iter().take(MAX_LIST).map(|s| &s.shard).collect::<Vec<_>>(),
        "lowest_median_cosine": lowest.map(|s| s.median_cosine),
        "lowest_median_cosine_shard": lowest.map(|s| &s.shard),
        "lowest_position_cosine": report.shards.iter().map(|s| s.min_cosine).reduce(f64::min),
        "no_active_expert": report.shards.iter().map(|s| s.no_active_expert).sum::<usize>(),
        "excused_near_ties": report.shards.iter().map(|s| s.excused).sum::<usize>(),
        "not_zero": report.shards.iter().map(|s| s.not_zero.len()).sum::<usize>(),
        "not_finite": report.shards.iter().map(|s| s.not_finite).sum::<usize>(),
    }))
}

/// The gates of a build: what each said, and its facts.
pub fn gates(report: &GatedReport, golden: Option<&Path>) -> Vec<(&'static str, Facts)> {
    let staged = |stage: &str, pass: bool, mut facts: Facts| {
        facts.insert("stage".into(), stage.into());
        (if pass { status::PASS } else { status::FAIL }, facts)
    };
    let (first, whole) = (&report.representative, &report.full_stack);
    let placed = |stage: &str, r: &Report| staged(stage, r.pass, residency(r));
    let mut all = Vec::new();
    all.extend(first.residency.as_ref().map(|r| placed("representative residency", r)));
    all.extend(first.probes.as_ref().map(|r| staged("representative quality", r.pass, probes(r))));
    if let Some(layers) = &report.layers {
        all.extend(layers.probes.as_ref().map(|r| staged("layer quality", r.pass, probes(r))));
    }
    if let Some(fault) = &report.weight_fault {
        all.push(staged("weights", false, of(json!({"pass": false, "fault": fault}))));
    }
    all.extend(whole.residency.as_ref().map(|r| placed("full_stack residency", r)));
    all.extend(whole.golden.as_ref().map(|gate| {
        let mut facts = validation(gate, golden);
        if let Some(nats) = whole.undecided {
            facts.insert("undecided_nats_better_than_chance".into(), nats.into());
        }
        let pass = gate.pass && whole.also.iter().all(|g| g.gate.pass);
        if !whole.also.is_empty() {
            facts.insert("pass".into(), pass.into());
            facts.insert("also".into(), also(&whole.also));
        }
        let (said, facts) = staged("full_stack golden", pass, facts);
        (if whole.undecided.is_some() { status::UNDECIDED } else { said }, facts)
    }));
    all
}

/// Gains of replacing parts by FP16.
pub fn swaps(report: &AblationReport) -> Value {
    let first = report.swaps.first();
    json!({
        "baseline": report.baseline,
        "swaps": report.swaps.len(),
        "costs_most": first.map(|s| json!({
            "layer": s.layer, "part": s.part, "gain_kl": s.gain_kl, "tensor": s.worst.tensor, "cause": s.worst.cause,
        })),
    })
}

/// The residency gate.
pub fn residency(report: &Report) -> Facts {
    // Packages per rule that speaks against the Neural Engine.
    let mut rules: BTreeMap<&str, (Verdict, u64)> = BTreeMap::new();
    for p in &report.packages {
        let own: BTreeMap<&str, Verdict> = p.reasons.iter().map(|r| (r.rule, r.verdict)).collect();
        for (rule, verdict) in own {
            rules.entry(rule).or_insert((verdict, 0)).1 += 1;
        }
    }
    let rules: Vec<Value> = rules
        .into_iter()
        .take(MAX_LIST)
        .map(|(rule, (verdict, n))| json!({"rule": rule, "verdict": verdict, "packages": n}))
        .collect();
    let device = report.device.as_ref().map(|d| {
        json!({"chip": d.chip, "os": d.os, "verdict": d.verdict, "decided": d.decided, "agreeing": d.agreeing})
    });
    of(json!({
        "pass": report.pass,
        "strict": report.strict,
        "conditions": report.conditions,
        "packages": report.packages.len(),
        "verdicts": report.verdicts,
        "too_small": report.packages.iter().filter(|p| p.too_small).count(),
        "ops": report.ops,
        "op_summary": report.summary.line,
        "rules": rules,
        "warnings": report.warnings.iter().take(MAX_LIST).map(|w| w.rule).collect::<Vec<_>>(),
        "device": device,
    }))
}

/// The fidelity trace.
pub fn trace(trace: &Trace, golden: &Path) -> Facts {
    let lowest = trace
        .layers
        .iter()
        .min_by(|a, b| a.fidelity.min_cosine.total_cmp(&b.fidelity.min_cosine))
        .map(|l| (l, place(l.boundary)));
    let last = trace.layers.last();
    of(json!({
        "layers": trace.layers.len().saturating_sub(1),
        "positions": last.map(|l| l.positions.len()),
        "min_cosine": lowest.as_ref().map(|(l, _)| l.fidelity.min_cosine),
        "min_cosine_behind": lowest.as_ref().map(|(_, place)| place),
        "min_cosine_position": lowest.as_ref().map(|(l, _)| l.fidelity.position),
        "last_min_cosine": last.map(|l| l.fidelity.min_cosine),
        "last_mean_cosine": last.map(|l| l.fidelity.mean_cosine),
        "largest_value": trace.layers.iter().map(|l| l.largest).reduce(f32::max),
        "f32_stream": trace.f32_stream,
        "cosine_map": cosine_map(trace),
        "cosine_map_layers": trace.layers.iter().map(|l| l.boundary).collect::<Vec<_>>(),
        "golden": file(golden),
    }))
}

/// Cosines by layer and position, for `anemoe report`: neighbouring positions together where there are many, the lowest of them.
fn cosine_map(trace: &Trace) -> Option<Vec<Vec<f64>>> {
    let positions = trace.layers.iter().map(|l| l.positions.len()).max()?;
    let together = positions.div_ceil(MAX_MAP_POSITIONS).max(1);
    let lowest = |part: &[f64]| part.iter().copied().fold(1.0, f64::min);
    let rounded = |c: f64| (c * 1e7).round() / 1e7;
    let row = |cosines: &[f64]| cosines.chunks(together).map(|part| rounded(lowest(part))).collect();
    (trace.layers.len() <= MAX_MAP_LAYERS).then(|| trace.layers.iter().map(|l| row(&l.positions)).collect())
}

fn place(boundary: usize) -> String {
    match boundary {
        0 => "embedding".into(),
        i => format!("layer {}", i - 1),
    }
}
