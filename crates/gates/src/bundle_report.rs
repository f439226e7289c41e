//! Document of a report, gathered from the records of a bundle. `--json` prints it, and the page holds it.

use crate::cost::chips::ChipProfile;
use crate::cost::forecast::{PassSize, Span, forecast, open_packages};
use crate::quality_front::{QualityPoint, mark_best};
use crate::residency::rule::Verdict;
use crate::residency::{self, CheckOptions};
use anemoe_bundle::journal::{self, Event};
use anemoe_bundle::journal_entries::{Entry, HEADINGS, entries, time};
use anemoe_bundle::{Chain, GateResult, Shard};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Document of a report.
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
    /// Number of weights.
    pub weights: u64,
    /// Text or importances that weights were compressed for, and the goal of a search for kinds, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compressed_for: Option<String>,
    /// Packages.
    pub shards: Vec<ShardRow>,
    /// Errors of compression.
    pub errors: ErrorMap,
    /// Cosines of the hidden state to the golden's, if a trace recorded them.
    pub cosines: Option<CosineMap>,
    /// Size and quality of this bundle, of the others, and of the models of a search.
    pub qualities: Vec<QualityPoint>,
    /// Measured speeds beside the bandwidth of the memory, from the newest bench.
    pub roofline: Option<Roofline>,
    /// Gates at the end of the build, and each later run of a gate.
    pub gates: Vec<GateLine>,
    /// Predicted speed of the Neural Engines of some chips.
    pub chip_speeds: Vec<ChipSpeed>,
    /// Texts and runs of the journal.
    pub journal: Vec<JournalLine>,
}

/// One package.
#[derive(Serialize)]
pub struct ShardRow {
    /// Name.
    pub name: String,
    /// Kind.
    pub kind: &'static str,
    /// First layer; none for a package of no layer.
    pub layer: Option<usize>,
    /// Name of the layers that the package belongs to.
    pub group: String,
    /// Bytes.
    pub bytes: u64,
    /// Compression, by part.
    pub quant: BTreeMap<String, String>,
    /// Predicted verdict.
    pub verdict: Verdict,
    /// True if the package is too small for its device to matter.
    pub too_small: bool,
    /// Predicted device, in words.
    pub device: &'static str,
    /// Deciding rule, with its text.
    pub rule: String,
    /// Lowest cosine between a matrix and its compressed form.
    pub min_weight_cosine: f64,
    /// Squared error of the matrices over their squares.
    pub output_error: f64,
}

/// Largest error of the packages, by layer and kind.
#[derive(Serialize)]
pub struct ErrorMap {
    /// Names of the rows.
    pub rows: Vec<String>,
    /// Kinds of the columns.
    pub kinds: Vec<&'static str>,
    /// Errors; none where a layer has no package of a kind.
    pub values: Vec<Vec<Option<f64>>>, // [rows, kinds]
}

/// Cosines by layer and position.
#[derive(Serialize)]
pub struct CosineMap {
    /// Time of the trace.
    pub time: String,
    /// The embedding, then each layer at whose end no package goes on.
    pub names: Vec<String>,
    /// Cosines.
    pub rows: Vec<Vec<f64>>, // [names, positions]
}

/// Measured speeds beside a bandwidth.
#[derive(Serialize)]
pub struct Roofline {
    /// Time of the bench.
    pub time: String,
    /// Gigabytes per second that all threads read.
    pub read_gb_s: f64,
    /// Speeds.
    pub points: Vec<SpeedPoint>,
}

/// One measured speed.
#[derive(Serialize)]
pub struct SpeedPoint {
    /// Name.
    pub name: String,
    /// Tokens per second.
    pub tok_s: f64,
    /// Gigabytes read per token.
    pub gb_per_token: f64,
}

/// Outcome of one gate.
#[derive(Serialize)]
pub struct GateLine {
    /// Time of the run; none for a gate that the contract records.
    pub time: Option<String>,
    /// Name of the gate.
    pub gate: String,
    /// Outcome.
    pub said: String,
    /// Lowest cosine; none if the gate measures none.
    pub min_cosine: Option<f64>,
}

/// Predicted speed of a chip.
#[derive(Serialize)]
pub struct ChipSpeed {
    /// Name of the chip.
    pub chip: String,
    /// Tokens per second.
    pub tok_s: Span,
}

/// Chips whose speed is predicted.
const CHIPS: [&str; 6] = ["m1", "m2", "m3", "m4", "m4-pro", "m4-max"];

/// One text or run of the journal.
#[derive(Serialize)]
pub struct JournalLine {
    /// Time of the run, or of the entry that the text belongs to.
    pub time: String,
    /// Heading of the text, or kind of the run.
    pub what: String,
    /// The text.
    pub text: String,
}

/// Gathers the document of a bundle, with the qualities and speeds of the bundles `others`. `tick` is called after
/// each package.
///
/// # Errors
/// A file of a bundle is missing or invalid.
pub fn bundle_report(
    bundle: &Path,
    chain: &Chain,
    others: &[(&Path, Chain)],
    tick: impl Fn() + Sync,
) -> crate::Result<BundleReport> {
    let placement = residency::bundle(bundle, chain, &CheckOptions::default(), tick)?;
    let shards = chain.shards.iter().zip(&placement.packages).map(|(s, p)| ShardRow {
        name: s.name.clone(),
        kind: s.kind.name(),
        layer: s.layer,
        group: layer_name(&chain.shards, s.layer),
        bytes: s.bytes,
        quant: s.quant.clone(),
        verdict: p.verdict,
        too_small: p.too_small,
        device: device(p.verdict, p.too_small),
        rule: p.deciding_rule(),
        min_weight_cosine: s.min_weight_cosine,
        output_error: s.output_error,
    });
    let shards: Vec<ShardRow> = shards.collect();
    let packages = open_packages(bundle, chain)?;
    let chip_speed = |name: &&str| {
        let chip = ChipProfile::named(name).ok()?;
        let tok_s = forecast(chain, &packages, &chip, PassSize::of(1)).tok_s;
        Some(ChipSpeed { chip: chip.chip, tok_s })
    };
    let events = journal::read(bundle)?.events;
    let mut qualities = QualityPoint::of_search(chain);
    qualities.extend(QualityPoint::of_bundle(&name_of(bundle), chain, &events));
    let mut measured = events.iter().rev().find_map(roofline);
    for (path, chain) in others {
        let (name, events) = (name_of(path), journal::read(path)?.events);
        qualities.extend(QualityPoint::of_bundle(&name, chain, &events));
        let speeds = events.iter().rev().find_map(roofline).into_iter().flat_map(|roof| roof.points);
        let speeds = speeds.map(|p| SpeedPoint { name: format!("{} of {name}", p.name), ..p });
        if let Some(own) = &mut measured {
            own.points.extend(speeds);
        }
    }
    mark_best(&mut qualities);
    Ok(BundleReport {
        name: name_of(bundle),
        family: chain.family.clone(),
        source: chain.source.clone(),
        layers: chain.model.num_layers,
        max_context: chain.model.max_context,
        bytes: shards.iter().map(|s| s.bytes).sum(),
        embedding_bytes: bundle.join(&chain.embedding.file).metadata().map_or(0, |m| m.len()),
        weights: chain.shards.iter().map(|s| s.weights).sum(),
        compressed_for: chain.compressed_for(),
        errors: errors(&shards),
        cosines: events.iter().rev().find_map(cosines),
        qualities,
        roofline: measured,
        gates: gates(chain, &events),
        chip_speeds: CHIPS.iter().filter_map(chip_speed).collect(),
        shards,
        journal: entries(events).iter().flat_map(journal_lines).collect(),
    })
}

fn name_of(bundle: &Path) -> String {
    let whole = bundle.canonicalize().unwrap_or_else(|_| bundle.to_path_buf());
    whole.file_name().map_or_else(|| "bundle".into(), |n| n.to_string_lossy().into_owned())
}

/// Names the packages that begin in a layer. A single package of several layers is named by all of them.
fn layer_name(shards: &[Shard], layer: Option<usize>) -> String {
    let Some(first) = layer else { return "head".into() };
    let mut own = shards.iter().filter(|s| s.layer == layer);
    match (own.next().and_then(|s| s.last_layer), own.next()) {
        (Some(last), None) => format!("layers {first} to {last}"),
        _ => format!("layer {first}"),
    }
}

fn device(verdict: Verdict, too_small: bool) -> &'static str {
    match (verdict, too_small) {
        (_, true) => "too small for the Neural Engine",
        (Verdict::Ane, _) => "on the Neural Engine",
        (Verdict::Unknown, _) => "unknown",
        (Verdict::NotAne, _) => "elsewhere",
    }
}

/// Groups packages by a key, in the order in which keys appear.
pub fn grouped<K: PartialEq>(shards: &[ShardRow], key: impl Fn(&ShardRow) -> K) -> Vec<(K, Vec<&ShardRow>)> {
    let mut groups: Vec<(K, Vec<&ShardRow>)> = Vec::new();
    for shard in shards {
        let key = key(shard);
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, own)) => own.push(shard),
            None => groups.push((key, vec![shard])),
        }
    }
    groups
}

/// Finds the largest error of each layer and kind.
fn errors(shards: &[ShardRow]) -> ErrorMap {
    let kinds: Vec<&'static str> = grouped(shards, |s| s.kind).into_iter().map(|(kind, _)| kind).collect();
    let (mut rows, mut values) = (Vec::new(), Vec::new());
    for (name, own) in grouped(shards, |s| s.group.clone()) {
        let worst =
            |kind: &&str| own.iter().filter(|s| s.kind == *kind).map(|s| s.output_error).reduce(f64::max);
        values.push(kinds.iter().map(worst).collect());
        rows.push(name);
    }
    ErrorMap { rows, kinds, values }
}

/// Reads the cosines that a trace recorded; none if the event has no map.
fn cosines(event: &Event) -> Option<CosineMap> {
    let rows = event.facts.get("cosine_map")?.as_array()?;
    let row = |row: &Value| row.as_array()?.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>();
    let rows: Vec<Vec<f64>> = rows.iter().map(row).collect::<Option<_>>()?;
    // Number of layers before each row.
    let before = event.facts.get("cosine_map_layers").and_then(Value::as_array);
    let name = |i: usize| match before.and_then(|b| b.get(i)?.as_u64()).unwrap_or(i as u64) {
        0 => "embedding".into(),
        n => format!("layer {}", n - 1),
    };
    Some(CosineMap { time: time(event), names: (0..rows.len()).map(name).collect(), rows })
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
    let line = |gate: &str, result: GateResult| {
        let said = match result {
            GateResult::Passed => "passed",
            GateResult::Failed => "failed",
            GateResult::Undecided => "undecided",
            GateResult::Skipped => "skipped",
            GateResult::NotRun => "not run",
        };
        GateLine { time: None, gate: gate.into(), said: said.into(), min_cosine: None }
    };
    let mut lines = Vec::new();
    if let Some(gates) = &chain.gates {
        lines.push(line("one shard of each sort, before the others", gates.representative));
        lines.push(line("the whole bundle", gates.full_stack));
    }
    for e in events.iter().filter(|e| ["gate", "check", "validate"].contains(&e.kind.as_str())) {
        let stage = e.facts.get("stage").and_then(Value::as_str).unwrap_or(&e.kind);
        let number = |key: &str| e.facts.get(key)?.as_f64();
        lines.push(GateLine {
            time: Some(time(e)),
            gate: stage.replace('_', " "),
            said: e.status.clone(),
            min_cosine: number("min_cosine").or_else(|| number("lowest_median_cosine")),
        });
    }
    lines
}

fn journal_lines(entry: &Entry) -> Vec<JournalLine> {
    let line = |time: &str, what: &str, text| JournalLine { time: time.into(), what: what.into(), text };
    let headings = HEADINGS.into_iter().filter(|heading| *heading != "refs");
    let texts = headings.flat_map(|heading| entry.texts[heading].iter().map(move |t| (heading, t)));
    let runs = entry.result.iter().map(|run| {
        let parts = [run.status.clone(), run.figures.join(", ")].into_iter().filter(|part| !part.is_empty());
        line(&run.time, &run.kind, parts.collect::<Vec<_>>().join(": "))
    });
    texts.map(|(what, text)| line(&entry.time, what, text.clone())).chain(runs).collect()
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
    fn events_of_another_shape_give_nothing() {
        let bench = json!({"read_gb_s": 20.0, "decode_at_64_tok_s": 10.0, "decode_at_64_gb_s": 5.0, "load_s": 1.0, "x_tok_s": 3});
        let found = roofline(&event("bench", bench)).unwrap();
        assert_eq!((found.points.len(), found.points[0].gb_per_token), (1, 0.5));
        assert_eq!(found.points[0].name, "decode at 64");
        for odd in [json!({}), json!({"read_gb_s": "x"}), json!({"read_gb_s": -1})] {
            assert!(roofline(&event("bench", odd)).is_none());
        }
        let found = cosines(&event("trace", json!({"cosine_map": [[1.0, 0.5], [0.25, 1]]}))).unwrap();
        assert_eq!(
            (found.rows[1][0], found.names),
            (0.25, ["embedding", "layer 0"].map(String::from).to_vec())
        );
        for odd in [json!({}), json!({"cosine_map": 7}), json!({"cosine_map": [["x"]]})] {
            assert!(cosines(&event("trace", odd)).is_none());
        }
    }

    #[test]
    fn errors_are_the_largest_of_a_layer_and_kind() {
        let shard = |group: &str, kind, output_error| ShardRow {
            name: String::new(),
            kind,
            layer: None,
            group: group.into(),
            bytes: 1,
            quant: BTreeMap::new(),
            verdict: Verdict::Ane,
            too_small: false,
            device: "",
            rule: String::new(),
            min_weight_cosine: 1.0,
            output_error,
        };
        let shards = [
            shard("layer 0", "attention", 0.1),
            shard("layer 0", "experts", 0.2),
            shard("layer 0", "experts", 0.3),
            shard("head", "head", 0.5),
        ];
        let errors = errors(&shards);
        assert_eq!(errors.rows, ["layer 0", "head"]);
        assert_eq!(errors.kinds, ["attention", "experts", "head"]);
        assert_eq!(errors.values, [[Some(0.1), Some(0.3), None], [None, None, Some(0.5)]].map(Vec::from));
    }
}
