//! `anemoe inspect`

use crate::args::hub_checkpoint::{Extent, locate};
use crate::args::reading::Reading;
use crate::command::{Command, Page, extended, to_value};
use crate::target::expect_bundle;
use crate::ui::{self, Table, Ui};
use anemoe_bundle::Chain;
use anemoe_convert::inspect::{self, CheckpointReport, PackageContents, TensorReport};
use anemoe_convert::path_kind::{self, PathKind};
use anemoe_io::Error;
use anemoe_mlpackage::package::{Package, is_model_name};
use serde_json::json;
use std::io;
use std::path::PathBuf;

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

impl Command for Args {
    type Report = Page;

    fn run(self, _: &Ui) -> anyhow::Result<Page> {
        let located = locate(&self.path, Extent::Headers)?;
        let path = located.path.as_ref();
        let is_synthetic = path.to_str().is_some_and(anemoe_convert::models::is_synthetic);
        let mut lines = Vec::new();
        let document = match PathKind::at(path) {
            PathKind::Nothing if !is_synthetic => {
                let what = "no such file or folder; inspect takes a checkpoint (a Hugging Face folder, a .gguf file, \
                            hf:OWNER/NAME or synthetic:NAME), a bundle or a .mlpackage";
                let what = format!("{what}{}", path_kind::hub_hint(path));
                let source = io::Error::new(io::ErrorKind::NotFound, what);
                return Err(Error::io(path, source).into());
            }
            _ if is_model_name(path) => {
                let package = Package::open(path)?;
                let found = inspect::package(path, &package);
                show_package(&found, &mut lines);
                if self.text {
                    let program = anemoe_mlpackage::mil::text::program(&package.model().program);
                    lines.push(format!("\n{program}"));
                }
                to_value(&found)?
            }
            PathKind::Bundle => {
                let chain = Chain::read(path)?;
                let bytes = chain.shards.iter().map(|s| s.bytes).sum();
                show_bundle(&chain, bytes, &mut lines);
                extended(to_value(&chain)?, &json!({"bytes": bytes}))?
            }
            place => {
                if matches!(place, PathKind::Unfinished) {
                    expect_bundle(path)?;
                }
                let checkpoint = Reading::default().open_extent(&self.path, Extent::Headers)?;
                let found = inspect::checkpoint(checkpoint)?;
                show_checkpoint(&found, self.tensors, &mut lines);
                to_value(&found)?
            }
        };
        Ok(Page::new(document, lines))
    }
}

fn show_checkpoint(r: &CheckpointReport, tensors: bool, out: &mut Vec<String>) {
    out.push(format!("{} checkpoint {}", r.family, r.name));
    for (key, value) in &r.config {
        out.push(format!("  {key}: {value}"));
    }
    let row = |part: &str, tensors: u64, parameters, bytes| {
        vec![part.into(), tensors.to_string(), ui::count(parameters), ui::bytes(bytes)]
    };
    let parts = r.parts.iter().map(|(part, sums)| row(part, sums.tensors, sums.parameters, sums.bytes));
    let total = row("total", r.tensors.len() as u64, r.total_parameters, r.bytes);
    out.extend(
        Table::new(&["part", "tensors", "parameters", "bytes"]).with_rows(parts.chain([total])).lines(),
    );
    out.push(format!("{} parameters active per token", ui::count(r.active_parameters)));
    for remark in &r.remarks {
        out.push(format!("note: {remark}"));
    }
    if !r.skipped.is_empty() {
        out.push(format!("{} tensors of other modalities are skipped", r.skipped.len()));
    }
    if !tensors {
        return;
    }
    let row =
        |t: &TensorReport| vec![t.name.clone(), t.dtype.clone(), format!("{:?}", t.shape), t.part.clone()];
    out.extend(
        Table::new(&["tensor", "dtype", "shape", "part"]).with_rows(r.tensors.iter().map(row)).lines(),
    );
}

fn show_bundle(chain: &Chain, bytes: u64, out: &mut Vec<String>) {
    let Chain { family, generator, source, model: m, readings, shards, .. } = chain;
    out.push(format!("{family} bundle of {source}, by {generator}"));
    out.push(format!(
        "vocabulary {}, hidden size {}, {} layers, context of {} tokens",
        m.vocab_size, m.hidden_size, m.num_layers, m.max_context
    ));
    if let Some(drafter) = &chain.drafter {
        out.push(format!("{drafter} drafts for it"));
    }
    if let Some(what) = chain.compressed_for() {
        out.push(format!("compressed for: {what}"));
    }
    for (what, how) in readings {
        out.push(format!("the checkpoint was read with {what} {how}"));
    }
    let rows = shards.iter().map(|s| {
        let functions: Vec<&str> = s.functions.iter().map(|f| f.name.as_str()).take(4).collect();
        let more =
            if s.functions.len() > 4 { format!(" (+{})", s.functions.len() - 4) } else { String::new() };
        let quant: Vec<String> = s.quant.iter().map(|(part, kind)| format!("{part} {kind}")).collect();
        let [name, kind] = [s.name.as_str(), s.kind.name()].map(str::to_string);
        let sizes = [ui::count(s.weights), ui::bytes(s.bytes), format!("{:.5}", s.min_weight_cosine)];
        [&[name, kind, format!("{}{more}", functions.join(" ")), quant.join(", ")], &sizes[..]].concat()
    });
    let headings = ["shard", "kind", "functions", "quant", "weights", "package", "weight cosine"];
    out.extend(Table::new(&headings).with_rows(rows).lines());
    out.push(format!("{}, {}", ui::counted(shards.len(), "package"), ui::bytes(bytes)));
}

fn show_package(r: &PackageContents, out: &mut Vec<String>) {
    out.push(format!(
        "{}: specification version {}, {}",
        r.path,
        r.specification_version,
        ui::bytes(r.bytes)
    ));
    for (name, f) in &r.functions {
        let is_marked = *name == r.default_function && r.functions.len() > 1;
        out.push(format!("\nfunction {name}{}, {}", if is_marked { " (default)" } else { "" }, f.opset));
        for (what, features) in [("input", &f.inputs), ("output", &f.outputs), ("state", &f.states)] {
            for feature in features {
                out.push(format!("  {what:6} {} {}", feature.name, feature.shown));
            }
        }
        let ops: Vec<String> = f.ops.iter().map(|(op, n)| format!("{op} {n}")).collect();
        out.push(format!("  ops    {}", ops.join(", ")));
    }
}
