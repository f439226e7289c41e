//! `anemoe quantize`

use crate::args::numbers::choice;
use crate::command::{Command, Page};
use crate::files::Overwrite;
use crate::ui::{self, Ui};
use anemoe_convert::one_tensor::{CompressedTensor, SystemTarget, TensorJob, WeightOp};
use anemoe_convert::quant::{Groups, Quant};
use anemoe_convert::quantize::Metrics;
use anemoe_convert::tensor_file::{LoadedTensor, file_and_tensor, read_channel_importance};
use anyhow::bail;
use serde_json::json;
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
    type Report = Page;

    fn run(self, _: &Ui) -> anyhow::Result<Page> {
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
        page(&self, &loaded, &done, times)
    }
}

/// Shows costs and savings of the compression.
fn page(
    args: &Args,
    loaded: &LoadedTensor,
    done: &CompressedTensor,
    [read_s, write_s]: [f64; 2],
) -> anyhow::Result<Page> {
    // Compared with the values of the file: weights in f32 were rounded to fp16 before they were compressed.
    let mut own = Metrics::default();
    let decoded: Vec<f32> = done.decode()?.iter().map(|v| v.to_f32()).collect();
    own.add(&loaded.values, &decoded, None);
    let (mse, relative_mse, cosine, max_error) = (own.mse(), own.relative_mse(), own.cosine(), own.max_error);
    let (weights, seconds) = (loaded.values.len() as u64, done.elapsed.as_secs_f64());
    let weights_per_s = weights as f64 / seconds.max(1e-9);
    let bytes = done.bytes();
    let bits_per_weight = bytes as f64 * 8.0 / weights as f64;
    // Relative, with inputs weighted by their importance.
    let output_error = args.importance.as_ref().map(|_| done.side.metrics.output_error());
    let groups = Groups { rows: args.group_size, block: args.block_size };
    let note = done.quant.differs_from(args.quant, groups).filter(|_| done.spatial == 1);
    let (quant, out) = (done.quant.to_string(), args.out.as_ref().map(|p| p.display().to_string()));
    let mut lines = vec![format!("{}  {:?}  {quant}", loaded.name, loaded.shape)];
    lines.extend(note.iter().map(|note| format!("note: {note}")));
    lines.push(format!(
        "{} weights in {seconds:.3} s, {:.1} million weights/s (reading {read_s:.2} s, writing {write_s:.2} s)",
        ui::count(weights),
        weights_per_s / 1e6
    ));
    lines.push(format!(
        "mse {mse:.6e}, relative {relative_mse:.6e}, cosine {cosine:.7}, largest error {max_error:.3e}"
    ));
    let weighted = |e: f64| format!("relative output error {e:.6e}, inputs weighted by their importance");
    lines.extend(output_error.map(weighted));
    lines.push(format!("{}, {bits_per_weight:.3} bits per weight", ui::bytes(bytes)));
    lines.extend(out.iter().map(|out| format!("written to {out}")));
    let document = json!({
        "tensor": loaded.name, "shape": loaded.shape, "quant": quant, "exact": args.exact, "weights": weights,
        "seconds": seconds, "weights_per_s": weights_per_s, "read_s": read_s, "write_s": write_s, "mse": mse,
        "relative_mse": relative_mse, "cosine": cosine, "max_error": max_error, "output_error": output_error,
        "bytes": bytes, "bits_per_weight": bits_per_weight, "note": note, "out": out,
    });
    Ok(Page::new(document, lines))
}
