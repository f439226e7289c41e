//! `anemoe quantize`

use crate::args::numbers::choice;
use crate::command::{Command, CommandReport};
use crate::files::Overwrite;
use crate::ui::{self, Ui};
use anemoe_convert::one_tensor::{CompressedTensor, SystemTarget, TensorJob, WeightOp};
use anemoe_convert::quant::{Groups, Quant};
use anemoe_convert::quantize::Metrics;
use anemoe_convert::tensor_file::{LoadedTensor, file_and_tensor, read_channel_importance};
use anyhow::bail;
use serde::Serialize;
use std::io;
use std::path::PathBuf;
use std::time::Instant;

/// Compress one tensor and show what that costs and saves.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  anemoe quantize weight.npy --quant lut4\n  anemoe quantize model.safetensors:layers.0.mlp.weight --quant int8-channel -o out.mlpackage"
)]
pub struct Args {
    /// F.npy, or F.safetensors or F.mlpackage with :TENSOR where it holds several.
    tensor: PathBuf,
    #[arg(long, value_name = "KIND", default_value = "lut4", help = format!("Compression: {}", Quant::NAMES_EXPECTED))]
    quant: Quant,
    /// Output channels that share a table.
    #[arg(long, value_name = "N", default_value_t = 32)]
    group_size: usize,
    /// Input channels that share a scale in kinds with -block.
    #[arg(long, value_name = "N", default_value_t = 32)]
    block_size: usize,
    /// Operation that the weight belongs to, which decides its axes: conv [out, in, kernel..], linear [out, in], matmul [in,
    /// out] [default: conv from rank 4 on, else linear].
    #[arg(long, value_parser = choice([("conv", WeightOp::Conv), ("linear", WeightOp::Linear), ("matmul", WeightOp::MatMul)]))]
    op: Option<WeightOp>,
    /// The global optimum of k-means; the default is within 1e-4 of it.
    #[arg(long)]
    exact: bool,
    /// Importance of each input channel: F.npy `[in]`, or F.npz with an array named after the tensor.
    #[arg(long, value_name = "FILE")]
    importance: Option<PathBuf>,
    /// Systems that a package is for.
    #[arg(long, value_parser = choice([("ios16", SystemTarget::IOS16), ("ios18", SystemTarget::IOS18)]), default_value = "ios18")]
    target: SystemTarget,
    /// Write the result: .mlpackage (an operation with this weight), .npz (elements, tables or scales, decoded values) or .npy
    /// (decoded values).
    #[arg(short, long, value_name = "OUT")]
    out: Option<PathBuf>,
    #[command(flatten)]
    overwrite: Overwrite,
}

impl Command for Args {
    type Report = QuantizeReport;

    fn run(self, _: &Ui) -> anyhow::Result<QuantizeReport> {
        if self.group_size == 0 || self.block_size == 0 {
            bail!("--group-size and --block-size must be at least 1");
        }
        if self.target == SystemTarget::IOS16
            && let Some(why) = self.quant.refused_by_ios16()
        {
            bail!("{} for iOS16: {why}", self.quant);
        }
        if let Some(out) = &self.out
            && !["mlpackage", "npz", "npy"].iter().any(|e| out.extension().is_some_and(|x| x == *e))
        {
            bail!("{}: expected a name that ends in .mlpackage, .npz or .npy", out.display());
        }
        let (file, _) = file_and_tensor(&self.tensor);
        let out = self.out.as_deref().map(|out| self.overwrite.output_beside(out, &[&file])).transpose()?;
        let started = Instant::now();
        let loaded = LoadedTensor::read(&self.tensor)?;
        let read = started.elapsed();
        let op = self.op.unwrap_or(if loaded.shape.len() >= 4 { WeightOp::Conv } else { WeightOp::Linear });
        let importance = self.importance.as_deref();
        let importance = importance.map(|p| read_channel_importance(p, &loaded.name)).transpose()?;
        let groups = Groups { rows: self.group_size, block: self.block_size };
        let job = TensorJob {
            name: &loaded.name,
            shape: &loaded.shape,
            values: &loaded.values,
            op,
            kind: self.quant,
            groups,
            exact: self.exact,
            importance: importance.as_deref(),
            moments: None,
        };
        let done = job.run()?;
        let started = Instant::now();
        if let Some(out) = &out {
            done.write(&loaded.shape, out, self.target)?;
        }
        let times = [read, started.elapsed()].map(|t| t.as_secs_f64());
        QuantizeReport::new(&self, &loaded, &done, times)
    }
}

/// Costs and savings of the compression.
#[derive(Serialize)]
pub struct QuantizeReport {
    tensor: String,
    shape: Vec<usize>,
    quant: String,
    exact: bool,
    weights: u64,
    seconds: f64,
    weights_per_s: f64,
    read_s: f64,
    write_s: f64,
    mse: f64,
    relative_mse: f64,
    cosine: f64,
    max_error: f64,
    /// Relative output error, inputs weighted by their importance, if it is given.
    output_error: Option<f64>,
    bytes: u64,
    bits_per_weight: f64,
    note: Option<String>,
    out: Option<String>,
}

impl QuantizeReport {
    fn new(
        args: &Args,
        loaded: &LoadedTensor,
        done: &CompressedTensor,
        [read_s, write_s]: [f64; 2],
    ) -> anyhow::Result<QuantizeReport> {
        // Compared with the values of the file: weights in f32 were rounded to fp16 before they were compressed.
        let mut own = Metrics::default();
        let decoded: Vec<f32> = done.decode()?.iter().map(|v| v.to_f32()).collect();
        own.add(&loaded.values, &decoded, None);
        let (weights, seconds) = (loaded.values.len() as u64, done.elapsed.as_secs_f64());
        let groups = Groups { rows: args.group_size, block: args.block_size };
        Ok(QuantizeReport {
            tensor: loaded.name.clone(),
            shape: loaded.shape.clone(),
            quant: done.quant.to_string(),
            exact: args.exact,
            weights,
            seconds,
            weights_per_s: weights as f64 / seconds.max(1e-9),
            read_s,
            write_s,
            mse: own.mse(),
            relative_mse: own.relative_mse(),
            cosine: own.cosine(),
            max_error: own.max_error,
            output_error: args.importance.as_ref().map(|_| done.side.metrics.output_error()),
            bytes: done.bytes(),
            bits_per_weight: done.bytes() as f64 * 8.0 / weights as f64,
            note: done.quant.differs_from(args.quant, groups).filter(|_| done.spatial == 1),
            out: args.out.as_ref().map(|p| p.display().to_string()),
        })
    }
}

impl CommandReport for QuantizeReport {
    fn print(&self, ui: &Ui) -> io::Result<()> {
        ui.line(format!("{}  {:?}  {}", self.tensor, self.shape, self.quant))?;
        if let Some(note) = &self.note {
            ui.line(format!("note: {note}"))?;
        }
        ui.line(format!(
            "{} weights in {:.3} s, {:.1} million weights/s (reading {:.2} s, writing {:.2} s)",
            ui::count(self.weights),
            self.seconds,
            self.weights_per_s / 1e6,
            self.read_s,
            self.write_s
        ))?;
        ui.line(format!(
            "mse {:.6e}, relative {:.6e}, cosine {:.7}, largest error {:.3e}",
            self.mse, self.relative_mse, self.cosine, self.max_error
        ))?;
        if let Some(error) = self.output_error {
            ui.line(format!("relative output error {error:.6e}, inputs weighted by their importance"))?;
        }
        ui.line(format!("{}, {:.3} bits per weight", ui::bytes(self.bytes), self.bits_per_weight))?;
        self.out.iter().try_for_each(|out| ui.line(format!("written to {out}")))
    }
}
