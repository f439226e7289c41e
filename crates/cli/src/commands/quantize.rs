//! `anemoe quantize`

use crate::command::{Command, CommandReport};
use crate::files::Overwrite;
use crate::ui::{self, Ui};
use anemoe_convert::checkpoint::open_safetensors;
use anemoe_convert::nearest::did_you_mean;
use anemoe_convert::one_tensor::{CompressedTensor, SystemTarget, TensorJob, WeightOp};
use anemoe_convert::quant::{Groups, Quant};
use anemoe_convert::quantize::Metrics;
use anemoe_io::Output;
use anemoe_mlpackage::mil::{DataType, TensorType, Value, ValueData};
use anemoe_mlpackage::package::{Package, is_model_name};
use anemoe_npz::{Array, read_npy, read_npz, write_npy, write_npz};
use anyhow::{Context, bail};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
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
    #[arg(long, value_enum)]
    op: Option<QuantizeOp>,
    /// The global optimum of k-means; the default is within 1e-4 of it.
    #[arg(long)]
    exact: bool,
    /// Importance of each input channel: F.npy `[in]`, or F.npz with an array named after the tensor.
    #[arg(long, value_name = "FILE")]
    importance: Option<PathBuf>,
    /// Systems that a package is for.
    #[arg(long, value_enum, default_value = "ios18")]
    target: QuantizeTarget,
    /// Write the result: .mlpackage (an operation with this weight), .npz (elements, tables or scales, decoded values) or .npy
    /// (decoded values).
    #[arg(short, long, value_name = "OUT")]
    out: Option<PathBuf>,
    #[command(flatten)]
    overwrite: Overwrite,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum QuantizeOp {
    Conv,
    Linear,
    Matmul,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum QuantizeTarget {
    Ios16,
    Ios18,
}

/// A tensor that was read from a file.
struct LoadedTensor {
    name: String,
    shape: Vec<usize>,
    values: Vec<f32>,
}

/// Splits `F.safetensors:TENSOR` or `F.mlpackage:TENSOR` into file and tensor; the tensor is none without the colon.
fn file_and_tensor(spec: &Path) -> (PathBuf, Option<String>) {
    const MARKS: [&[u8]; 3] = [b".safetensors:", b".mlpackage:", b".mlmodel:"];
    let bytes = spec.as_os_str().as_encoded_bytes();
    let end = |mark: &&[u8]| Some(bytes.windows(mark.len()).rposition(|w| w == *mark)? + mark.len());
    let Some(i) = MARKS.iter().filter_map(end).max() else { return (spec.into(), None) };
    let (file, tensor) = (&bytes[..i - 1], &bytes[i..]);
    #[cfg(unix)]
    let file = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(file);
    #[cfg(not(unix))]
    let file = String::from_utf8_lossy(file).into_owned();
    (file.into(), Some(String::from_utf8_lossy(tensor).into_owned()))
}

fn load(spec: &Path) -> anyhow::Result<LoadedTensor> {
    if spec.extension().is_some_and(|e| e == "npy") {
        let array = read_npy(spec)?;
        let values = array.to_f32();
        return Ok(LoadedTensor { name: spec.display().to_string(), shape: array.shape, values });
    }
    let (path, tensor) = file_and_tensor(spec);
    let file = path.display();
    if is_model_name(&path) {
        return load_weight(&path, tensor.as_deref());
    }
    if path.extension().is_none_or(|e| e != "safetensors") {
        bail!("{file}: expected F.npy, or F.safetensors or F.mlpackage with :TENSOR");
    }
    let source = open_safetensors(&path)?;
    let info = match (tensor.as_deref(), source.tensors()) {
        (None, [only]) => only,
        (None, all) => {
            let names: Vec<&str> = all.iter().take(5).map(|t| t.name.as_str()).collect();
            bail!("{file}: holds {} tensors, name one with :TENSOR ({}, ..)", all.len(), names.join(", "))
        }
        (Some(name), all) => source.info(name).with_context(|| {
            let names = all.iter().map(|t| t.name.as_str());
            format!("{file}: no tensor `{name}`{}", did_you_mean(name, names))
        })?,
    };
    let n = info.elements();
    let mut values = vec![0f32; usize::try_from(n)?];
    source.read(&info.name, 0..n, &mut values)?;
    Ok(LoadedTensor {
        name: info.name.clone(),
        shape: info.shape.iter().map(|&d| d as usize).collect(),
        values,
    })
}

/// Reads a weight of a package: a constant in its weight file that is not compressed yet.
fn load_weight(path: &Path, name: Option<&str>) -> anyhow::Result<LoadedTensor> {
    let (package, file) = (Package::open(path)?, path.display());
    let functions = package.model().program.functions.values();
    let constants = functions.flat_map(|f| &f.block.operations).filter(|op| op.op_type == "const");
    let weights: BTreeMap<&str, (&Value, &TensorType)> = constants
        .filter_map(|op| {
            let (output, value) = (op.outputs.first()?, op.attributes.get("val")?);
            let ty = value.ty.tensor()?;
            let is_weight = matches!(value.data, ValueData::Blob { .. }) && ty.rank() >= 2;
            let is_dense = matches!(ty.dtype, DataType::Float16 | DataType::Float32);
            (is_weight && is_dense).then_some((output.name.as_str(), (value, ty)))
        })
        .collect();
    let (name, (value, ty)) = match (name, weights.len()) {
        (None, 1) => weights.first_key_value().map(|(n, w)| (*n, *w)).context("one weight")?,
        (None, 0) => bail!("{file}: holds no weight of two or more axes that is not compressed"),
        (None, n) => {
            let names: Vec<&str> = weights.keys().copied().take(5).collect();
            bail!(
                "{file}: holds {n} weights that are not compressed, name one with :TENSOR ({}, ..)",
                names.join(", ")
            )
        }
        (Some(name), _) => (
            name,
            *weights.get(name).with_context(|| {
                let names = weights.keys().copied();
                format!("{file}: no weight `{name}` that is not compressed{}", did_you_mean(name, names))
            })?,
        ),
    };
    let bytes = package.tensor_bytes(value)?;
    let values = match ty.dtype {
        DataType::Float16 => {
            bytes.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
        }
        _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    };
    let shape = ty.shape().unwrap_or_default().iter().map(|&d| d as usize).collect();
    Ok(LoadedTensor { name: name.into(), shape, values })
}

/// Reads the importances of the input channels, `[in]`.
fn importance(path: &Path, tensor: &str) -> anyhow::Result<Vec<f32>> {
    let array = match path.extension().and_then(|e| e.to_str()) {
        Some("npy") => read_npy(path)?,
        _ => {
            let mut all = read_npz(path)?;
            all.remove(tensor).with_context(|| format!("{}: no array `{tensor}`", path.display()))?
        }
    };
    let values = array.to_f32();
    if array.shape.len() != 1 || values.iter().any(|v| !v.is_finite() || *v < 0.0) {
        bail!("{}: expected a vector of numbers from 0, one per input channel", path.display());
    }
    Ok(values)
}

impl Command for Args {
    type Report = QuantizeReport;

    fn run(self, _: &Ui) -> anyhow::Result<QuantizeReport> {
        if self.group_size == 0 || self.block_size == 0 {
            bail!("--group-size and --block-size must be at least 1");
        }
        let target = match self.target {
            QuantizeTarget::Ios16 => SystemTarget::IOS16,
            QuantizeTarget::Ios18 => SystemTarget::IOS18,
        };
        if target == SystemTarget::IOS16
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
        let loaded = load(&self.tensor)?;
        let read = started.elapsed();
        let op = match self.op {
            Some(QuantizeOp::Conv) => WeightOp::Conv,
            Some(QuantizeOp::Linear) => WeightOp::Linear,
            Some(QuantizeOp::Matmul) => WeightOp::MatMul,
            None if loaded.shape.len() >= 4 => WeightOp::Conv,
            None => WeightOp::Linear,
        };
        let importance = self.importance.as_deref().map(|p| importance(p, &loaded.name)).transpose()?;
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
        };
        let done = job.run()?;
        let started = Instant::now();
        if let Some(out) = &out {
            write(&done, &loaded.shape, out, target)?;
        }
        let times = [read, started.elapsed()].map(|t| t.as_secs_f64());
        QuantizeReport::new(&self, &loaded, &done, times)
    }
}

fn write(done: &CompressedTensor, shape: &[usize], out: &Output, target: SystemTarget) -> anyhow::Result<()> {
    let (out, replace) = (out.path(), out.replaces());
    let array = |shape: &[usize], data: anemoe_npz::ArrayData| {
        Array::new(shape.to_vec(), data).context("an array of another size than its shape")
    };
    match out.extension().and_then(|e| e.to_str()) {
        Some("mlpackage") => done.write_package(out, replace, target)?,
        Some("npy") => write_npy(out, &array(shape, done.decode()?.into())?)?,
        _ => {
            let mut arrays = vec![("decoded".to_string(), array(shape, done.decode()?.into())?)];
            let dims = done.side_dims();
            match done.quant.kind {
                Quant::Fp16 => {}
                Quant::Lut { .. } => {
                    arrays.push(("indices".into(), array(shape, done.elements().into())?));
                    arrays.push(("lut".into(), array(&dims, done.side_values().into())?));
                }
                Quant::Int { asymmetric, .. } => {
                    let codes: Vec<i8> = done.elements().into_iter().map(|c| c as i8).collect();
                    arrays.push(("data".into(), array(shape, codes.into())?));
                    arrays.push(("scale".into(), array(&dims, done.side_values().into())?));
                    if asymmetric {
                        arrays.push(("offset".into(), array(&dims, done.side_offsets().into())?));
                    }
                }
            }
            write_npz(out, &arrays)?;
        }
    }
    Ok(())
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
