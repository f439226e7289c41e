//! Facts of a report, gathered from the records of a bundle.

use super::form_speeds::{FormSpeeds, form_speeds};
use crate::commands::journal::entries::{Entry, entries};
use crate::ui::Ui;
use anemoe_bundle::journal::{self, Event};
use anemoe_bundle::{Chain, GateResult};
use anemoe_gates::cost::chips::ChipProfile;
use anemoe_gates::cost::forecast::{Costed, PassSize, Span, forecast};
use anemoe_gates::residency::rule::Verdict;
use anemoe_gates::residency::{self, CheckOptions, facts};
use anemoe_mlpackage::package::Package;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Chips whose speed is predicted.
const CHIPS: [&str; 6] = ["m1", "m2", "m3", "m4", "m4-pro", "m4-max"];

/// A report as JSON.
#[derive(Serialize)]
pub struct BundleReport {
    /// Name of the bundle's folder.
    pub name: String,
    /// Family of the model.
    pub family: String,
    /// Name of the checkpoint.
    pub source: String,
    /// Number of layers.
    pub layers: usize,
    /// Positions that the caches hold.
    pub max_context: usize,
    /// Bytes of all packages.
    pub bytes: u64,
    /// Bytes of the embedding.
    pub embedding_bytes: u64,
    /// Weights of all packages.
    pub weights: u64,
    /// Packages.
    pub shards: Vec<ShardRow>,
    /// Cosines of the hidden state to the golden's, after each layer and at each position.
    pub cosines: Option<CosineMap>,
    /// Size and quality of this bundle, of the others, and of the models of a search.
    pub qualities: Vec<QualityPoint>,
    /// Measured speeds beside the bandwidth of the memory, from the newest bench.
    pub roofline: Option<Roofline>,
    /// Gates at the end of the build, and each later run of a gate.
    pub gates: Vec<GateLine>,
    /// Predicted speed of the Neural Engine, by chip.
    pub speeds: Vec<PredictedSpeed>,
    /// Predicted speed in other forms, by chip.
    pub form_speeds: FormSpeeds,
    /// The journal's entries, by intent.
    pub journal: Vec<Entry>,
}

/// One package.
#[derive(Serialize)]
pub struct ShardRow {
    /// Name.
    pub name: String,
    /// Kind.
    pub kind: &'static str,
    /// Layer; none for a package of no layer.
    pub layer: Option<usize>,
    /// Last layer, if the package has parts of several layers.
    pub last_layer: Option<usize>,
    /// Bytes of the package.
    pub bytes: u64,
    /// Compression, by part.
    pub quant: BTreeMap<String, String>,
    /// Predicted device.
    pub verdict: Verdict,
    /// True if the package is too small for its device to matter.
    pub too_small: bool,
    /// Deciding rule, with its text.
    pub rule: String,
    /// Lowest cosine between a matrix and its compressed form.
    pub min_weight_cosine: f64,
    /// Squared error of the matrices over their squares.
    pub output_error: f64,
}

/// Cosines by layer and position.
#[derive(Serialize)]
pub struct CosineMap {
    /// Time of the trace.
    pub time: String,
    /// Cosines before the first layer, then after each layer at whose end no package goes on.
    pub rows: Vec<Vec<f64>>,
    /// Number of layers before each row.
    pub behind: Vec<usize>,
}

impl CosineMap {
    /// Returns the name of a row: the embedding, or a layer.
    pub fn row_name(&self, row: usize) -> String {
        match self.behind.get(row).copied().unwrap_or(row) {
            0 => "embedding".into(),
            n => format!("layer {}", n - 1),
        }
    }
}

/// Size and quality of a bundle, or of a whole model with one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QualityPoint {
    /// Name of the bundle or the kind.
    pub name: String,
    /// Bytes.
    pub bytes: u64,
    /// Lowest cosine of the logits.
    pub min_cosine: f64,
    /// True if it was measured while kinds were chosen, on matrices alone.
    pub is_search: bool,
    /// True if no other point of the same sort is smaller and better.
    pub is_best: bool,
}

/// Speeds beside a bandwidth.
#[derive(Serialize)]
pub struct Roofline {
    /// Time of the measurement.
    pub time: String,
    /// Gigabytes per second that all threads read.
    pub read_gb_s: f64,
    /// Measurements.
    pub points: Vec<SpeedPoint>,
}

/// One measurement.
#[derive(Serialize)]
pub struct SpeedPoint {
    /// Name of the measurement.
    pub name: String,
    /// Tokens per second.
    pub tok_s: f64,
    /// Gigabytes read per token.
    pub gb_per_token: f64,
}

/// One gate.
#[derive(Serialize)]
pub struct GateLine {
    /// Time of the entry; none for a gate that the contract records.
    pub time: Option<String>,
    /// Name of the gate.
    pub gate: String,
    /// Message of the gate.
    pub said: String,
    /// Lowest cosine; none if the gate measures none.
    pub min_cosine: Option<f64>,
}

/// Predicted speed of one chip.
#[derive(Serialize)]
pub struct PredictedSpeed {
    /// Chip.
    pub chip: String,
    /// Tokens per second.
    pub tok_s: Span,
    /// Milliseconds per token.
    pub ms: Span,
}

/// Gathers the facts of a bundle, and the qualities of the bundles `others`. Shapes of other forms come from `checkpoint`,
/// else from the checkpoint that the build recorded.
///
/// # Errors
/// A file of a bundle is missing or invalid, or `checkpoint` is not the bundle's.
pub fn gather(
    bundle: &Path,
    chain: &Chain,
    others: &[(&Path, Chain)],
    checkpoint: Option<&Path>,
    ui: &Ui,
) -> anyhow::Result<BundleReport> {
    let bar = ui.bar(chain.shards.len() as u64, "packages");
    let placement = residency::bundle(bundle, chain, &CheckOptions::default(), || bar.inc(1));
    bar.finish_and_clear();
    let placement = placement?;
    let shards = chain.shards.iter().zip(&placement.packages).map(|(s, p)| ShardRow {
        name: s.name.clone(),
        kind: s.kind.name(),
        layer: s.layer,
        last_layer: s.last_layer,
        bytes: s.bytes,
        quant: s.quant.clone(),
        verdict: p.verdict,
        too_small: p.too_small,
        rule: p.deciding_rule(),
        min_weight_cosine: s.min_weight_cosine,
        output_error: s.output_error,
    });
    let events = journal::read(bundle)?.events;
    let mut qualities = search_points(chain);
    qualities.extend(bundle_point(bundle, chain, &events));
    for (path, chain) in others {
        qualities.extend(bundle_point(path, chain, &journal::read(path)?.events));
    }
    mark_best(&mut qualities);
    let chips: Vec<ChipProfile> = CHIPS.iter().filter_map(|name| ChipProfile::named(name).ok()).collect();
    Ok(BundleReport {
        name: name_of(bundle),
        family: chain.family.clone(),
        source: chain.source.clone(),
        layers: chain.model.num_layers,
        max_context: chain.model.max_context,
        bytes: chain.shards.iter().map(|s| s.bytes).sum(),
        embedding_bytes: bundle.join(&chain.embedding.file).metadata().map_or(0, |m| m.len()),
        weights: chain.shards.iter().map(|s| s.weights).sum(),
        shards: shards.collect(),
        cosines: events.iter().rev().find_map(cosines),
        qualities,
        roofline: events.iter().rev().find_map(roofline),
        gates: gates(chain, &events),
        speeds: speeds(bundle, chain, &chips)?,
        form_speeds: form_speeds(bundle, chain, &events, checkpoint, &chips, ui)?,
        journal: entries(events),
    })
}

fn name_of(bundle: &Path) -> String {
    let whole = bundle.canonicalize().unwrap_or_else(|_| bundle.to_path_buf());
    whole.file_name().map_or_else(|| "bundle".into(), |n| n.to_string_lossy().into_owned())
}

fn time(event: &Event) -> String {
    crate::commands::journal::entries::time(event)
}

/// Reads the cosines that a trace recorded; none if the event has no map.
fn cosines(event: &Event) -> Option<CosineMap> {
    let rows = event.facts.get("cosine_map")?.as_array()?;
    let row = |row: &Value| row.as_array()?.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>();
    let rows: Vec<Vec<f64>> = rows.iter().map(row).collect::<Option<_>>()?;
    let known = event.facts.get("cosine_map_layers").and_then(Value::as_array);
    let behind = known.into_iter().flatten().filter_map(Value::as_u64).map(|n| n as usize).collect();
    Some(CosineMap { time: time(event), rows, behind })
}

/// Returns the points that a search measured: whole models of one kind, and the chosen model.
fn search_points(chain: &Chain) -> Vec<QualityPoint> {
    let Some(auto) = &chain.auto else { return Vec::new() };
    let point = |name: &str, bytes, min_cosine| QualityPoint {
        name: name.into(),
        bytes,
        min_cosine,
        is_search: true,
        is_best: false,
    };
    let chosen = auto.min_cosine.map(|cosine| point("auto", auto.bytes, cosine));
    auto.uniform.iter().map(|u| point(&u.kind, u.bytes, u.min_cosine)).chain(chosen).collect()
}

/// Returns the point of a bundle: its bytes, and the newest lowest cosine of its logits; none if none was measured.
fn bundle_point(bundle: &Path, chain: &Chain, events: &[Event]) -> Option<QualityPoint> {
    let measured = |e: &Event| {
        let is_golden = e.kind == "validate" || e.facts.get("stage")? == "full_stack golden";
        e.facts.get("min_cosine").filter(|_| is_golden)?.as_f64()
    };
    let min_cosine = events.iter().rev().find_map(measured)?;
    let bytes = chain.shards.iter().map(|s| s.bytes).sum();
    Some(QualityPoint { name: name_of(bundle), bytes, min_cosine, is_search: false, is_best: false })
}

/// Marks the points that no other point of their sort beats in size and quality.
fn mark_best(points: &mut [QualityPoint]) {
    let all = points.to_vec();
    for p in points {
        let beats = |q: &QualityPoint| {
            q.is_search == p.is_search
                && q.bytes <= p.bytes
                && q.min_cosine >= p.min_cosine
                && (q.bytes < p.bytes || q.min_cosine > p.min_cosine)
        };
        p.is_best = !all.iter().any(beats);
    }
}

/// Reads the speeds that `bench` recorded: `decode_at_64_tok_s` beside `decode_at_64_gb_s`; none for other events.
fn roofline(event: &Event) -> Option<Roofline> {
    if event.kind != "bench" {
        return None;
    }
    let number = |key: &str| event.facts.get(key)?.as_f64().filter(|x| *x > 0.0);
    let points = event.facts.keys().filter_map(|key| {
        let name = key.strip_suffix("_tok_s")?;
        let (tok_s, gb_s) = (number(key)?, number(&format!("{name}_gb_s"))?);
        Some(SpeedPoint { name: name.replace('_', " "), tok_s, gb_per_token: gb_s / tok_s })
    });
    Some(Roofline { time: time(event), read_gb_s: number("read_gb_s")?, points: points.collect() })
}

fn gates(chain: &Chain, events: &[Event]) -> Vec<GateLine> {
    let said = |result: GateResult| match result {
        GateResult::Passed => "passed",
        GateResult::Failed => "failed",
        GateResult::Undecided => "undecided",
        GateResult::Skipped => "skipped",
        GateResult::NotRun => "not run",
    };
    let contract = chain.gates.iter().flat_map(|g| {
        [("one shard of each sort, before the others", g.representative), ("the whole bundle", g.full_stack)]
            .map(|(gate, result)| GateLine {
                time: None,
                gate: gate.into(),
                said: said(result).into(),
                min_cosine: None,
            })
    });
    let runs = events.iter().filter(|e| ["gate", "check", "validate"].contains(&e.kind.as_str())).map(|e| {
        let stage = e.facts.get("stage").and_then(Value::as_str).unwrap_or(&e.kind);
        let number = |key: &str| e.facts.get(key)?.as_f64();
        GateLine {
            time: Some(time(e)),
            gate: stage.replace('_', " "),
            said: e.status.clone(),
            min_cosine: number("min_cosine").or_else(|| number("lowest_median_cosine")),
        }
    });
    contract.chain(runs).collect()
}

fn speeds(bundle: &Path, chain: &Chain, chips: &[ChipProfile]) -> anyhow::Result<Vec<PredictedSpeed>> {
    let open = |shard: &anemoe_bundle::Shard| -> anyhow::Result<Costed> {
        let package = Package::open(&bundle.join(&shard.file))?;
        Ok(Costed::of_package(shard, facts(package.model())))
    };
    let packages = chain.shards.iter().map(open).collect::<anyhow::Result<Vec<Costed>>>()?;
    let of = |chip: &ChipProfile| {
        let found = forecast(chain, &packages, chip, PassSize::of(1));
        PredictedSpeed { chip: found.chip, tok_s: found.tok_s, ms: found.ms }
    };
    Ok(chips.iter().map(of).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn event(kind: &str, facts: Value) -> Event {
        let mut event = Event::new(kind, "");
        event.facts = facts.as_object().cloned().unwrap_or_default();
        event
    }

    #[test]
    fn the_best_points_are_those_that_nothing_beats() {
        let point = |name: &str, bytes, min_cosine, is_search| QualityPoint {
            name: name.into(),
            bytes,
            min_cosine,
            is_search,
            is_best: false,
        };
        let mut all = vec![
            point("small", 1, 0.9, true),
            point("worse", 2, 0.8, true),
            point("large", 3, 0.99, true),
            point("other sort", 9, 0.1, false),
        ];
        mark_best(&mut all);
        assert_eq!(all.iter().map(|p| p.is_best).collect::<Vec<_>>(), [true, false, true, true]);
    }

    #[test]
    fn events_of_another_shape_give_nothing() {
        let bench = json!({"read_gb_s": 20.0, "decode_at_64_tok_s": 10.0, "decode_at_64_gb_s": 5.0, "load_s": 1.0, "x_tok_s": 3});
        let found = roofline(&event("bench", bench)).unwrap();
        assert_eq!((found.points.len(), found.points[0].gb_per_token), (1, 0.5));
        assert_eq!(found.points[0].name, "decode at 64");
        for odd in [json!({}), json!({"read_gb_s": "x"}), json!({"read_gb_s": -1})] {
            assert!(roofline(&event("bench", odd)).is_none());
        }
        assert_eq!(
            cosines(&event("trace", json!({"cosine_map": [[1.0, 0.5], [0.25, 1]]}))).unwrap().rows[1][0],
            0.25
        );
        for odd in [json!({}), json!({"cosine_map": 7}), json!({"cosine_map": [["x"]]})] {
            assert!(cosines(&event("trace", odd)).is_none());
        }
    }
}
