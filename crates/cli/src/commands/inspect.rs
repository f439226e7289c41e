//! `anemoe inspect`

use crate::args::hub_checkpoint::{Extent, locate};
use crate::args::reading::Reading;
use crate::outcome::Outcome;
use crate::target::expect_bundle;
use crate::ui::{self, Table, Ui};
use anemoe_bundle::Chain;
use anemoe_convert::inspect::{self, CheckpointReport};
use anemoe_convert::path_kind::{self, PathKind};
use anemoe_io::Error;
use anemoe_mlpackage::mil::{Feature, FeatureKind};
use anemoe_mlpackage::package::{Package, is_model_name};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// Show what a checkpoint, a bundle or a .mlpackage holds.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe inspect models/small-gemma4\n  anemoe inspect shard.mlpackage --text"
)]
pub struct Args {
    /// A checkpoint (folder, .gguf file, hf:OWNER/NAME or synthetic:NAME), a bundle, or a .mlpackage.
    path: PathBuf,
    /// Every tensor of a checkpoint.
    #[arg(long)]
    tensors: bool,
    /// The program of a package as text.
    #[arg(long)]
    text: bool,
}

pub fn run(args: Args, ui: &Ui) -> anyhow::Result<Outcome> {
    let located = locate(&args.path, Extent::Headers)?;
    let path = located.path.as_ref();
    let is_synthetic = path.to_str().is_some_and(anemoe_convert::models::is_synthetic);
    match PathKind::at(path) {
        PathKind::Nothing if !is_synthetic => {
            let what = "no such file or folder; inspect takes a checkpoint (a Hugging Face folder, a .gguf file, \
                        hf:OWNER/NAME or synthetic:NAME), a bundle or a .mlpackage";
            let what = format!("{what}{}", path_kind::hub_hint(path));
            let source = io::Error::new(io::ErrorKind::NotFound, what);
            return Err(Error::io(path, source).into());
        }
        _ if is_model_name(path) => package(path, args.text, ui)?,
        PathKind::Bundle => bundle(path, ui)?,
        PathKind::Unfinished => expect_bundle(path)?,
        _ => {
            let report = inspect::checkpoint(Reading::default().open_extent(&args.path, Extent::Headers)?)?;
            ui.document(&report)?;
            checkpoint(&report, args.tensors, ui)?;
        }
    }
    Ok(Outcome::Done)
}

fn checkpoint(r: &CheckpointReport, tensors: bool, ui: &Ui) -> std::io::Result<()> {
    ui.line(format!("{} checkpoint {}", r.family, r.name))?;
    for (key, value) in &r.config {
        ui.line(format!("  {key}: {value}"))?;
    }
    let mut table = Table::new(&["part", "tensors", "parameters", "bytes"]);
    for (part, sums) in &r.parts {
        table.row(vec![
            part.clone(),
            sums.tensors.to_string(),
            ui::count(sums.parameters),
            ui::bytes(sums.bytes),
        ]);
    }
    table.row(vec![
        "total".into(),
        r.tensors.len().to_string(),
        ui::count(r.total_parameters),
        ui::bytes(r.bytes),
    ]);
    table.print(ui)?;
    ui.line(format!("{} parameters active per token", ui::count(r.active_parameters)))?;
    for remark in &r.remarks {
        ui.line(format!("note: {remark}"))?;
    }
    if !r.skipped.is_empty() {
        ui.line(format!("{} tensors of other modalities are skipped", r.skipped.len()))?;
    }
    if tensors {
        let mut table = Table::new(&["tensor", "dtype", "shape", "part"]);
        for t in &r.tensors {
            table.row(vec![t.name.clone(), t.dtype.clone(), format!("{:?}", t.shape), t.part.clone()]);
        }
        table.print(ui)?;
    }
    Ok(())
}

fn bundle(path: &Path, ui: &Ui) -> anyhow::Result<()> {
    let chain = Chain::read(path)?;
    let bytes: u64 = chain.shards.iter().map(|s| s.bytes).sum();
    ui.document(&serde_json::json!({
        "family": chain.family, "source": chain.source, "model": chain.model, "tokens": chain.tokens,
        "caches": chain.caches, "readings": chain.readings, "shards": chain.shards, "bytes": bytes,
    }))?;
    ui.line(format!("{} bundle of {}, by {}", chain.family, chain.source, chain.generator))?;
    ui.line(format!(
        "vocabulary {}, hidden size {}, {} layers, context of {} tokens",
        chain.model.vocab_size, chain.model.hidden_size, chain.model.num_layers, chain.model.max_context
    ))?;
    for (what, how) in &chain.readings {
        ui.line(format!("the checkpoint was read with {what} {how}"))?;
    }
    let mut table =
        Table::new(&["shard", "kind", "functions", "quant", "weights", "package", "weight cosine"]);
    for s in &chain.shards {
        let functions: Vec<&str> = s.functions.iter().map(|f| f.name.as_str()).take(4).collect();
        let more =
            if s.functions.len() > 4 { format!(" (+{})", s.functions.len() - 4) } else { String::new() };
        let quant: Vec<String> = s.quant.iter().map(|(part, kind)| format!("{part} {kind}")).collect();
        table.row(vec![
            s.name.clone(),
            s.kind.name().into(),
            format!("{}{more}", functions.join(" ")),
            quant.join(", "),
            ui::count(s.weights),
            ui::bytes(s.bytes),
            format!("{:.5}", s.min_weight_cosine),
        ]);
    }
    table.print(ui)?;
    ui.line(format!("{}, {}", ui::counted(chain.shards.len(), "package"), ui::bytes(bytes)))?;
    Ok(())
}

fn feature(f: &Feature) -> serde_json::Value {
    let kind = match f.kind {
        FeatureKind::MultiArray => "array",
        FeatureKind::Image(_) => "image",
        FeatureKind::Scalar => "scalar",
        FeatureKind::Dictionary => "dictionary",
        FeatureKind::Sequence => "sequence",
    };
    let color = if let FeatureKind::Image(color) = f.kind { Some(color.name()) } else { None };
    serde_json::json!({
        "name": f.name, "kind": kind, "dtype": f.dtype.name(), "shape": f.shape.to_string(), "color": color,
        "default": f.default,
    })
}

fn package(path: &Path, text: bool, ui: &Ui) -> anyhow::Result<()> {
    let package = Package::open(path)?;
    let model = package.model();
    let mut functions = serde_json::Map::new();
    for described in &model.functions {
        let Some(f) = model.program.functions.get(&described.name) else { continue };
        let mut ops: BTreeMap<&str, u64> = BTreeMap::new();
        for op in &f.block.operations {
            *ops.entry(op.op_type.as_str()).or_default() += 1;
        }
        let list =
            |features: &[Feature]| -> Vec<serde_json::Value> { features.iter().map(feature).collect() };
        functions.insert(
            described.name.clone(),
            serde_json::json!({
                "opset": f.opset.name(), "inputs": list(&described.inputs), "outputs": list(&described.outputs),
                "states": list(&described.states), "ops": ops,
            }),
        );
    }
    ui.document(&serde_json::json!({
        "path": path.display().to_string(), "specification_version": model.specification_version,
        "default_function": model.default_function, "functions": functions, "bytes": package.total_bytes(),
    }))?;
    ui.line(format!(
        "{}: specification version {}, {}",
        path.display(),
        model.specification_version,
        ui::bytes(package.total_bytes())
    ))?;
    for described in &model.functions {
        let Some(f) = model.program.functions.get(&described.name) else { continue };
        let mark = if described.name == model.default_function && model.functions.len() > 1 {
            " (default)"
        } else {
            ""
        };
        ui.line(format!("\nfunction {}{mark}, {}", described.name, f.opset))?;
        for (what, features) in
            [("input", &described.inputs), ("output", &described.outputs), ("state", &described.states)]
        {
            for f in features {
                ui.line(format!("  {what:6} {} {f}", f.name))?;
            }
        }
        let mut ops: BTreeMap<&str, u64> = BTreeMap::new();
        for op in &f.block.operations {
            *ops.entry(op.op_type.as_str()).or_default() += 1;
        }
        let ops: Vec<String> = ops.iter().map(|(op, n)| format!("{op} {n}")).collect();
        ui.line(format!("  ops    {}", ops.join(", ")))?;
    }
    if text {
        ui.line(format!("\n{}", anemoe_mlpackage::mil::text::program(&model.program)))?;
    }
    Ok(())
}
