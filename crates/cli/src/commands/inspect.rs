//! `anemoe inspect`

use crate::args::hub_checkpoint::{Extent, locate};
use crate::args::reading::Reading;
use crate::command::{Command, CommandReport};
use crate::target::expect_bundle;
use crate::ui::{self, Table, Ui};
use anemoe_bundle::Chain;
use anemoe_convert::inspect::{self, CheckpointReport, TensorReport};
use anemoe_convert::path_kind::{self, PathKind};
use anemoe_io::Error;
use anemoe_mlpackage::mil::{Feature, FeatureKind};
use anemoe_mlpackage::package::{Package, is_model_name};
use serde::Serialize;
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

impl Command for Args {
    type Report = InspectReport;

    fn run(self, _: &Ui) -> anyhow::Result<InspectReport> {
        let located = locate(&self.path, Extent::Headers)?;
        let path = located.path.as_ref();
        let is_synthetic = path.to_str().is_some_and(anemoe_convert::models::is_synthetic);
        Ok(match PathKind::at(path) {
            PathKind::Nothing if !is_synthetic => {
                let what = "no such file or folder; inspect takes a checkpoint (a Hugging Face folder, a .gguf file, \
                            hf:OWNER/NAME or synthetic:NAME), a bundle or a .mlpackage";
                let what = format!("{what}{}", path_kind::hub_hint(path));
                let source = io::Error::new(io::ErrorKind::NotFound, what);
                return Err(Error::io(path, source).into());
            }
            _ if is_model_name(path) => InspectReport::Package(PackageContents::of(path, self.text)?),
            PathKind::Bundle => InspectReport::Bundle(Box::new(BundleContents::of(Chain::read(path)?))),
            place => {
                if matches!(place, PathKind::Unfinished) {
                    expect_bundle(path)?;
                }
                let checkpoint = Reading::default().open_extent(&self.path, Extent::Headers)?;
                InspectReport::Checkpoint { found: inspect::checkpoint(checkpoint)?, lists_tensors: self.tensors }
            }
        })
    }
}

/// Contents of a checkpoint, a bundle or a package.
#[derive(Serialize)]
#[serde(untagged)]
pub enum InspectReport {
    Checkpoint {
        #[serde(flatten)]
        found: CheckpointReport,
        /// True if every tensor is printed.
        #[serde(skip)]
        lists_tensors: bool,
    },
    Bundle(Box<BundleContents>),
    Package(PackageContents),
}

impl CommandReport for InspectReport {
    fn print(&self, ui: &Ui) -> io::Result<()> {
        match self {
            InspectReport::Checkpoint { found, lists_tensors } => print_checkpoint(found, *lists_tensors, ui),
            InspectReport::Bundle(bundle) => bundle.print(ui),
            InspectReport::Package(package) => package.print(ui),
        }
    }
}

fn print_checkpoint(r: &CheckpointReport, tensors: bool, ui: &Ui) -> io::Result<()> {
    ui.line(format!("{} checkpoint {}", r.family, r.name))?;
    for (key, value) in &r.config {
        ui.line(format!("  {key}: {value}"))?;
    }
    let row = |part: &str, tensors: u64, parameters, bytes| {
        vec![part.into(), tensors.to_string(), ui::count(parameters), ui::bytes(bytes)]
    };
    let parts = r.parts.iter().map(|(part, sums)| row(part, sums.tensors, sums.parameters, sums.bytes));
    let total = row("total", r.tensors.len() as u64, r.total_parameters, r.bytes);
    Table::new(&["part", "tensors", "parameters", "bytes"]).with_rows(parts.chain([total])).print(ui)?;
    ui.line(format!("{} parameters active per token", ui::count(r.active_parameters)))?;
    for remark in &r.remarks {
        ui.line(format!("note: {remark}"))?;
    }
    if !r.skipped.is_empty() {
        ui.line(format!("{} tensors of other modalities are skipped", r.skipped.len()))?;
    }
    if !tensors {
        return Ok(());
    }
    let row = |t: &TensorReport| vec![t.name.clone(), t.dtype.clone(), format!("{:?}", t.shape), t.part.clone()];
    Table::new(&["tensor", "dtype", "shape", "part"]).with_rows(r.tensors.iter().map(row)).print(ui)
}

/// Contents of a bundle: its contract.
#[derive(Serialize)]
pub struct BundleContents {
    #[serde(flatten)]
    chain: Chain,
    /// Bytes of all packages.
    bytes: u64,
}

impl BundleContents {
    fn of(chain: Chain) -> BundleContents {
        BundleContents { bytes: chain.shards.iter().map(|s| s.bytes).sum(), chain }
    }

    fn print(&self, ui: &Ui) -> io::Result<()> {
        let Chain { family, generator, source, model: m, readings, shards, .. } = &self.chain;
        ui.line(format!("{family} bundle of {source}, by {generator}"))?;
        ui.line(format!(
            "vocabulary {}, hidden size {}, {} layers, context of {} tokens",
            m.vocab_size, m.hidden_size, m.num_layers, m.max_context
        ))?;
        if let Some(drafter) = &self.chain.drafter {
            ui.line(format!("{drafter} drafts for it"))?;
        }
        for (what, how) in readings {
            ui.line(format!("the checkpoint was read with {what} {how}"))?;
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
        Table::new(&headings).with_rows(rows).print(ui)?;
        ui.line(format!("{}, {}", ui::counted(shards.len(), "package"), ui::bytes(self.bytes)))
    }
}

/// Contents of a package.
#[derive(Serialize)]
pub struct PackageContents {
    path: String,
    specification_version: i32,
    default_function: String,
    functions: BTreeMap<String, FunctionFacts>,
    bytes: u64,
    /// The program, if it is asked for.
    #[serde(skip)]
    text: Option<String>,
}

/// Interface and ops of a function.
#[derive(Serialize)]
struct FunctionFacts {
    opset: &'static str,
    inputs: Vec<FeatureFacts>,
    outputs: Vec<FeatureFacts>,
    states: Vec<FeatureFacts>,
    /// Number of ops of each type.
    ops: BTreeMap<String, u64>,
}

#[derive(Serialize)]
struct FeatureFacts {
    name: String,
    kind: &'static str,
    dtype: &'static str,
    shape: String,
    color: Option<&'static str>,
    default: Option<f64>,
    #[serde(skip)]
    shown: String,
}

impl FeatureFacts {
    fn of(f: &Feature) -> FeatureFacts {
        let (kind, color) = match f.kind {
            FeatureKind::MultiArray => ("array", None),
            FeatureKind::Image(color) => ("image", Some(color.name())),
            FeatureKind::Scalar => ("scalar", None),
            FeatureKind::Dictionary => ("dictionary", None),
            FeatureKind::Sequence => ("sequence", None),
        };
        let (name, dtype, shape) = (f.name.clone(), f.dtype.name(), f.shape.to_string());
        FeatureFacts { name, kind, dtype, shape, color, default: f.default, shown: f.to_string() }
    }
}

impl PackageContents {
    fn of(path: &Path, with_text: bool) -> anyhow::Result<PackageContents> {
        let package = Package::open(path)?;
        let model = package.model();
        let facts = |features: &[Feature]| features.iter().map(FeatureFacts::of).collect();
        let mut functions = BTreeMap::new();
        for described in &model.functions {
            let Some(f) = model.program.functions.get(&described.name) else { continue };
            let mut ops: BTreeMap<String, u64> = BTreeMap::new();
            for op in &f.block.operations {
                *ops.entry(op.op_type.clone()).or_default() += 1;
            }
            let facts = FunctionFacts {
                opset: f.opset.name(),
                inputs: facts(&described.inputs),
                outputs: facts(&described.outputs),
                states: facts(&described.states),
                ops,
            };
            functions.insert(described.name.clone(), facts);
        }
        Ok(PackageContents {
            path: path.display().to_string(),
            specification_version: model.specification_version,
            default_function: model.default_function.clone(),
            functions,
            bytes: package.total_bytes(),
            text: with_text.then(|| anemoe_mlpackage::mil::text::program(&model.program)),
        })
    }

    fn print(&self, ui: &Ui) -> io::Result<()> {
        ui.line(format!(
            "{}: specification version {}, {}",
            self.path,
            self.specification_version,
            ui::bytes(self.bytes)
        ))?;
        for (name, f) in &self.functions {
            let is_marked = *name == self.default_function && self.functions.len() > 1;
            ui.line(format!("\nfunction {name}{}, {}", if is_marked { " (default)" } else { "" }, f.opset))?;
            for (what, features) in [("input", &f.inputs), ("output", &f.outputs), ("state", &f.states)] {
                for feature in features {
                    ui.line(format!("  {what:6} {} {}", feature.name, feature.shown))?;
                }
            }
            let ops: Vec<String> = f.ops.iter().map(|(op, n)| format!("{op} {n}")).collect();
            ui.line(format!("  ops    {}", ops.join(", ")))?;
        }
        self.text.iter().try_for_each(|text| ui.line(format!("\n{text}")))
    }
}
