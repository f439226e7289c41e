//! `anemoe plan`

use super::auto::{self, Planned, QuantChoice, byte_count};
use super::check;
use super::checkpoint::Reading;
use super::generate::count;
use crate::Outcome;
use crate::files::Overwrite;
use crate::ui::{self, Table, Ui};
use anemoe_bundle::TokenCount;
use anemoe_convert::models::Family;
use anemoe_convert::outliers::{self, Outlier};
use anemoe_convert::plan::{PartKinds, Plan, PlanOptions};
use anemoe_convert::quant::{Groups, Quant};
use anemoe_gates::residency::{self, Report};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Show the packages that a checkpoint becomes: sizes, compression, predicted device.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe plan synthetic:gemma4-26b-a4b --quant lut4 --experts-per-shard 16"
)]
pub struct Args {
    /// A Hugging Face folder, a .gguf file, or synthetic:NAME?seed=N&layers=N.
    checkpoint: PathBuf,
    #[command(flatten)]
    options: Options,
    /// Write the whole plan as JSON to this file.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    overwrite: Overwrite,
    /// Print every shard, not one of each kind.
    #[arg(long)]
    all: bool,
}

/// Options that decide a plan, shared with `build`.
#[derive(clap::Args, Clone)]
pub struct Options {
    /// Compression: fp16, int8-tensor, int8-channel, int4-block (each integer kind also with -asymmetric), or
    /// lut{1,2,3,4,6,8} with -uniform and -tensor as options (lut4, lut6-tensor, ...); or auto: a kind per tensor,
    /// chosen from measured errors.
    #[arg(long, value_name = "KIND", default_value = "lut4")]
    pub quant: QuantChoice,
    /// For --quant auto: the fewest bytes with at least this cosine of logits. For the gates of a build: the least cosine
    /// that passes [default: 0.97].
    #[arg(long, value_name = "COSINE", conflicts_with = "max_bytes")]
    pub min_cosine: Option<f64>,
    /// For --quant auto: the least loss with at most this many bytes of matrices (6000000, 6MB, 1.5GiB).
    #[arg(long, value_name = "BYTES", value_parser = byte_count)]
    pub max_bytes: Option<u64>,
    /// For --quant auto: text to run the model on, instead of a built-in one.
    #[arg(long, value_name = "FILE")]
    pub auto_text: Option<PathBuf>,
    /// Second moments of the projections' inputs, from `calibrate`: errors are weighed with them.
    #[arg(long, value_name = "F.npz")]
    pub importance: Option<PathBuf>,
    /// Compression of the attention projections, where it differs.
    #[arg(long, value_name = "KIND")]
    pub attn_quant: Option<Quant>,
    /// Compression of the experts, where it differs.
    #[arg(long, value_name = "KIND")]
    pub expert_quant: Option<Quant>,
    /// Compression of the MLP that every token meets, where it differs.
    #[arg(long, value_name = "KIND")]
    pub mlp_quant: Option<Quant>,
    /// Compression of the router [default: fp16 where it is one matrix (Gemma), as the model where it is a network (ZAYA)].
    #[arg(long, value_name = "KIND")]
    pub router_quant: Option<Quant>,
    /// Compression of the output head, where it differs.
    #[arg(long, value_name = "KIND")]
    pub head_quant: Option<Quant>,
    /// Compression of the host's embedding [default: fp16, whatever --quant says].
    #[arg(long, value_name = "KIND")]
    pub embed_quant: Option<Quant>,
    /// Output channels that share a table.
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub group_size: usize,
    /// Input channels that share a scale in int4-block.
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub block_size: usize,
    /// Experts that one call computes; fewer than 16 become functions of one package [default: 16].
    #[arg(long, value_name = "N", conflicts_with = "ffn_shards")]
    pub experts_per_shard: Option<usize>,
    /// Packages that the experts of a layer are spread over.
    #[arg(long, value_name = "N")]
    pub ffn_shards: Option<usize>,
    /// Token counts for which each package has a function.
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', default_value = "1,64", value_parser = count)]
    pub tokens: Vec<usize>,
    /// One function for a range of token counts instead, for instance 1..4.
    #[arg(long, value_name = "MIN..MAX", conflicts_with = "tokens", value_parser = token_range)]
    pub token_range: Option<TokenCount>,
    /// Positions that the caches hold [default: 2048, or the model's limit where that is less].
    #[arg(long, value_name = "N")]
    pub max_context: Option<usize>,
    /// Most weights in a package, in MiB (1 MiB is 1.05 MB).
    #[arg(long, value_name = "MiB", default_value_t = 1900)]
    pub max_shard_mb: u64,
    /// Do not look for outliers. It takes reading every weight whose kind has one step for a whole tensor (int8-tensor).
    #[arg(long)]
    pub skip_outliers: bool,
    #[command(flatten)]
    pub reading: Reading,
}

fn token_range(text: &str) -> Result<TokenCount, String> {
    let parsed = text.split_once("..").and_then(|(a, b)| {
        Some(TokenCount { min: a.parse().ok()?, max: b.trim_start_matches('=').parse().ok()? })
    });
    parsed
        .filter(|t| t.min >= 1 && t.min < t.max)
        .ok_or_else(|| format!("`{text}` is not a range such as 1..4"))
}

impl Options {
    /// As the planner takes them.
    pub fn to_plan_options(&self) -> PlanOptions {
        let tokens = match self.token_range {
            Some(range) => vec![range],
            None => self.tokens.iter().map(|&n| TokenCount { min: n, max: n }).collect(),
        };
        PlanOptions {
            quant: match self.quant {
                QuantChoice::Kind(kind) => kind,
                QuantChoice::Auto => PlanOptions::default().quant,
            },
            parts: PartKinds {
                attention: self.attn_quant,
                experts: self.expert_quant,
                dense_mlp: self.mlp_quant,
                router: self.router_quant,
                head: self.head_quant,
                embedding: self.embed_quant,
            },
            defaults: PartKinds::default(),
            groups: Groups { rows: self.group_size, block: self.block_size },
            experts_per_shard: self.experts_per_shard,
            ffn_shards: self.ffn_shards,
            tokens,
            max_context: self.max_context,
            max_shard_mb: self.max_shard_mb,
        }
    }
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    if let Some(out) = &args.out {
        args.overwrite.output(out)?;
    }
    let Planned { family, plan, .. } = auto::plan(&args.checkpoint, &args.options, false, ui)?;
    let outliers = outliers(family.as_ref(), &plan, &args.options, ui)?;
    let placement = residency::plan(family.as_ref(), &plan, &residency::Options::default())?;
    if let Some(path) = &args.out {
        let mut text = serde_json::to_vec_pretty(&full_document(&plan, &placement)?)?;
        text.push(b'\n');
        anemoe_bundle::write_atomic(path, &text)?;
    }
    ui.document(&document(&plan, &placement, &outliers))?;
    print(&plan, &placement, args.all, ui)?;
    print_outliers(&outliers, ui)?;
    Ok(Outcome::Done)
}

/// Tensors that the plan's kinds would spoil. Only kinds with one step for a whole tensor are looked at: it takes reading
/// their weights.
pub fn outliers(
    family: &dyn Family,
    plan: &Plan,
    options: &Options,
    ui: &Ui,
) -> anyhow::Result<Vec<Outlier>> {
    if options.skip_outliers {
        return Ok(Vec::new());
    }
    let weights: u64 = outliers::concerned(plan).map(|(_, m)| m.weights()).sum();
    let bar = ui.bar(weights, "looking for outliers");
    let found = outliers::find(family, plan, &mut |n| bar.inc(n));
    bar.finish_and_clear();
    Ok(found?)
}

/// Most outliers that are printed; `--json` has all.
const SHOWN: usize = 5;

/// The warnings for people.
pub fn print_outliers(outliers: &[Outlier], ui: &Ui) -> std::io::Result<()> {
    for outlier in outliers.iter().take(SHOWN) {
        ui.line(format!("warning: {outlier}"))?;
    }
    match outliers.len().checked_sub(SHOWN) {
        Some(more) if more > 0 => ui.line(format!("warning: {more} more matrices have such outliers")),
        _ => Ok(()),
    }
}

/// The document that `--out` writes: the plan, and the predicted device of each shard.
fn full_document(plan: &Plan, placement: &Report) -> anyhow::Result<serde_json::Value> {
    // By its text: as a value, a number of 32 bits would get the digits of 64.
    let mut document: serde_json::Value = serde_json::from_slice(&serde_json::to_vec(plan)?)?;
    let shards = document["shards"].as_array_mut().into_iter().flatten();
    for (shard, p) in shards.zip(&placement.packages) {
        shard["verdict"] = p.verdict.name().into();
        shard["verdict_reason"] = p.deciding_rule().into();
    }
    Ok(document)
}

/// The document that `--json` prints: the plan without its matrices and its chain, which `--out` writes.
fn document(plan: &Plan, placement: &Report, outliers: &[Outlier]) -> serde_json::Value {
    let shards: Vec<serde_json::Value> = plan
        .shards
        .iter()
        .zip(&placement.packages)
        .map(|(s, p)| {
            let functions: Vec<&str> = s.functions.iter().map(|f| f.name.as_str()).collect();
            serde_json::json!({
                "name": s.name, "kind": s.kind, "layer": s.layer, "functions": functions, "quant": s.quant,
                "weights": s.weights, "bytes": s.bytes, "verdict": p.verdict, "verdict_reason": p.deciding_rule(),
            })
        })
        .collect();
    serde_json::json!({
        "family": plan.family, "source": plan.source, "options": plan.options, "shards": shards, "totals": plan.totals,
        "embedding": plan.embedding, "notes": plan.notes, "auto": plan.chain.auto,
        "outliers": outliers,
    })
}

/// The table for people: equal shards of different layers in one row, unless `all`.
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
            check::device_label(p, placement.strict).into(),
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
    if let Some(auto) = &plan.chain.auto {
        auto::print(auto, ui)?;
    }
    let t = &plan.totals;
    ui.line(format!(
        "{} packages ({} of layers), {} of weights, {} of embedding on the host",
        t.shards,
        t.layer_shards,
        ui::bytes(t.bytes),
        ui::bytes(t.embedding_bytes)
    ))?;
    ui.line(format!(
        "{} parameters, {} active per token, {} to read per token",
        ui::count(t.params),
        ui::count(t.active_params_per_token),
        ui::bytes(t.bytes_per_token)
    ))?;
    for note in &plan.notes {
        ui.line(format!("note: {note}"))?;
    }
    ui.line(
        "predicted device: by the rules of `anemoe check`, which gives the built packages the same; a shard is one package",
    )
}
