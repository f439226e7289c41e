//! Facts for the events of journals: reports of gates and builds, condensed. Every fact was measured or counted.

use crate::ablation::AblationReport;
use crate::gated::{FullStackGates, GatedReport, NamedGate};
use crate::golden_gate::GoldenGate;
use crate::probe::ProbeReport;
use crate::residency::Report;
use crate::text_gate::TextGate;
use crate::trace::Trace;
use anemoe_bundle::journal::status;
use anemoe_bundle::{Chain, file_sha256};
use anemoe_convert::build::BuildReport;
use anemoe_convert::plan::Plan;
use anemoe_runtime::bench::Speeds;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Facts of an event.
pub type Facts = Map<String, Value>;

/// Most columns of a map of cosines; with [`MAX_MAP_LAYERS`] rows the map takes some 50 kB of journal.
const MAX_MAP_POSITIONS: usize = 64;
/// Most rows of a map of cosines.
const MAX_MAP_LAYERS: usize = 100;
/// Longest list in an event.
const MAX_LIST: usize = 16;

/// Returns the members of an object that are not null.
pub fn of(value: Value) -> Facts {
    let Value::Object(mut map) = value else { return Facts::new() };
    map.retain(|_, v| !v.is_null());
    map
}

/// Condenses a document: a list becomes its length, unless it is short and of plain values.
pub fn condense(document: &impl Serialize) -> Facts {
    fn condensed(value: Value) -> Value {
        match value {
            Value::Object(map) => of(map.into_iter().map(|(k, v)| (k, condensed(v))).collect()).into(),
            Value::Array(list) => {
                let is_plain = |v: &Value| !v.is_object() && !v.is_array();
                let stays = (1..=MAX_LIST).contains(&list.len()) && list.iter().all(is_plain);
                if stays { list.into() } else { list.len().into() }
            }
            plain => plain,
        }
    }
    of(condensed(serde_json::to_value(document).unwrap_or_default()))
}

/// Condenses a document and adds facts to it.
fn with(document: &impl Serialize, more: Value) -> Facts {
    let mut facts = condense(document);
    facts.extend(of(more));
    facts
}

/// Returns a measured cosine; none for 1, which means no compression.
fn measured(cosine: f64) -> Option<f64> {
    (cosine < 1.0).then_some(cosine)
}

/// Describes a file by its name and hash.
pub fn file(path: &Path) -> Value {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned());
    json!({"file": name, "sha256": file_sha256(path).ok()})
}

/// Returns the facts of a bundle, from its contract.
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

/// Returns the facts of a build that begins.
pub fn begun(plan: &Plan, part: Option<String>) -> Facts {
    of(
        json!({"part": part, "family": plan.chain.family, "source": plan.chain.source, "packages": plan.shards.len()}),
    )
}

/// Returns the facts of a build or of one part; with those of the contract if the bundle is complete.
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

/// Returns the facts of the golden gate.
pub fn validation(gate: &GoldenGate, golden: Option<&Path>) -> Facts {
    with(gate, json!({"golden": golden.map(file)}))
}

/// Returns the results of the golden gate with further references.
pub fn also(gates: &[NamedGate]) -> Value {
    let one = |g: &NamedGate| {
        json!({"golden": file(&g.golden), "pass": g.gate.pass, "min_cosine": g.gate.usual.min_cosine,
            "repeated": g.gate.usual.repeated.or(g.gate.fp16.repeated)})
    };
    gates.iter().map(one).collect()
}

/// Returns the facts of a run of probes.
pub fn probes(report: &ProbeReport) -> Facts {
    let median = report.shards.iter().map(|s| s.median_cosine).reduce(f64::min);
    let position = report.shards.iter().map(|s| s.min_cosine).reduce(f64::min);
    with(report, json!({"lowest_median_cosine": median, "lowest_position_cosine": position}))
}

/// Returns the status and the facts of each gate of a build.
pub fn gates(report: &GatedReport, golden: Option<&Path>) -> Vec<(&'static str, Facts)> {
    let (first, whole) = (&report.representative, &report.full_stack);
    let layers = report.layers.as_ref().and_then(|layers| layers.probes.as_ref());
    let stages = [
        ("representative residency", first.residency.as_ref().map(residency)),
        ("representative quality", first.probes.as_ref().map(probes)),
        ("layer quality", layers.map(probes)),
        ("weights", report.weight_fault.as_ref().map(|fault| of(json!({"pass": false, "fault": fault})))),
        ("full_stack residency", whole.residency.as_ref().map(residency)),
        ("full_stack weights", whole.weights.as_ref().map(condense)),
        ("full_stack golden", whole.golden.as_ref().map(|gate| full_stack(whole, gate, golden))),
    ];
    let staged = stages.into_iter().filter_map(|(stage, facts)| Some((stage, facts?)));
    let with_status = |(stage, mut facts): (&str, Facts)| {
        facts.insert("stage".into(), stage.into());
        let said = match facts.get("pass") {
            _ if facts.contains_key("undecided_nats_better_than_chance") => status::UNDECIDED,
            Some(Value::Bool(true)) => status::PASS,
            _ => status::FAIL,
        };
        (said, facts)
    };
    staged.map(with_status).collect()
}

/// Returns the facts of the golden and text gates of a whole bundle.
fn full_stack(whole: &FullStackGates, gate: &GoldenGate, golden: Option<&Path>) -> Facts {
    let text = whole.text.as_ref();
    let mut facts = validation(gate, golden);
    facts.extend(of(json!({
        "undecided_nats_better_than_chance": whole.undecided,
        "text": text.map(condense),
        "pass": gate.pass && whole.also.iter().all(|g| g.gate.pass) && text.is_none_or(TextGate::is_good_enough),
        "also": (!whole.also.is_empty()).then(|| also(&whole.also)),
    })));
    facts
}

/// Returns measured speeds by name, which `anemoe report` reads.
pub fn speeds(speeds: &Speeds) -> Facts {
    let prefill = speeds.prefill.iter().map(|p| (format!("prefill_{}", p.tokens), p.tok_s, p.gb_s));
    let decode = speeds.decode.iter().map(|d| (format!("decode_at_{}", d.context), d.tok_s, d.gb_s));
    let named = |(name, tok_s, gb_s): (String, f64, f64)| {
        [(format!("{name}_tok_s"), tok_s.into()), (format!("{name}_gb_s"), gb_s.into())]
    };
    prefill.chain(decode).flat_map(named).collect()
}

/// Returns the facts of replacing parts by FP16.
pub fn swaps(report: &AblationReport) -> Facts {
    with(report, json!({"costs_most": report.swaps.first().map(condense)}))
}

/// Returns the facts of the residency gate.
pub fn residency(report: &Report) -> Facts {
    with(report, json!({"too_small": report.packages.iter().filter(|p| p.too_small).count()}))
}

/// Returns the facts of a fidelity trace.
pub fn trace(trace: &Trace, golden: &Path) -> Facts {
    let lowest = trace.layers.iter().min_by(|a, b| a.fidelity.min_cosine.total_cmp(&b.fidelity.min_cosine));
    with(
        trace,
        json!({
            "min_cosine": lowest.map(|l| l.fidelity.min_cosine),
            "min_cosine_behind": lowest.map(|l| match l.boundary {
                0 => "embedding".into(),
                i => format!("layer {}", i - 1),
            }),
            "cosine_map": cosine_map(trace),
            "cosine_map_layers": trace.layers.iter().map(|l| l.boundary).collect::<Vec<_>>(),
            "golden": file(golden),
        }),
    )
}

/// Returns the cosines by layer and position, for `anemoe report`. Where positions are many, neighbours are merged to the
/// lowest of their cosines.
fn cosine_map(trace: &Trace) -> Option<Vec<Vec<f64>>> {
    let positions = trace.layers.iter().map(|l| l.positions.len()).max()?;
    let together = positions.div_ceil(MAX_MAP_POSITIONS).max(1);
    let lowest = |part: &[f64]| part.iter().copied().fold(1.0, f64::min);
    let rounded = |c: f64| (c * 1e7).round() / 1e7;
    let row = |cosines: &[f64]| cosines.chunks(together).map(|part| rounded(lowest(part))).collect();
    (trace.layers.len() <= MAX_MAP_LAYERS).then(|| trace.layers.iter().map(|l| row(&l.positions)).collect())
}
