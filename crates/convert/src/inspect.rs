//! Contents of a checkpoint, by part of the model, and of a package.

use crate::Result;
use crate::checkpoint::Checkpoint;
use crate::lattice_report::LatticeShares;
use crate::models;
use crate::plan::PlanOptions;
use anemoe_mlpackage::mil::{Feature, FeatureKind};
use anemoe_mlpackage::package::Package;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// A checkpoint in numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckpointReport {
    /// Model family.
    pub family: String,
    /// The folder's or file's name, or the synthetic model's.
    pub name: String,
    /// Sizes from the configuration.
    pub config: BTreeMap<String, serde_json::Value>,
    /// Sums per part.
    pub parts: BTreeMap<String, PartSums>,
    /// All parameters of the model; the tied embedding counts once.
    pub total_parameters: u64,
    /// Parameters that a token uses; the embedding counts once, as the head.
    pub active_parameters: u64,
    /// Bytes of the model's tensors as stored.
    pub bytes: u64,
    /// The model's tensors.
    pub tensors: Vec<TensorReport>,
    /// Tensors that the text model does not need.
    pub skipped: Vec<String>,
    /// Sampled tensors that lie on the lattice of a 4-bit format.
    pub lattices: LatticeShares,
    /// Remarks on the checkpoint's values, for those who run it.
    pub remarks: Vec<String>,
}

/// Sums over a part of the model.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PartSums {
    /// Tensors.
    pub tensors: u64,
    /// Parameters.
    pub parameters: u64,
    /// Bytes as stored.
    pub bytes: u64,
}

/// One tensor of the model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorReport {
    /// Name in the checkpoint.
    pub name: String,
    /// Stored element type.
    pub dtype: String,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Part of the model.
    pub part: String,
}

/// Counts tensors, parameters and bytes of a checkpoint by part, after a check against its family's tensor table.
///
/// # Errors
/// The family is not known, or the checkpoint does not fit it.
pub fn checkpoint(checkpoint: Checkpoint) -> Result<CheckpointReport> {
    let name = checkpoint.name.clone();
    let infos = checkpoint.source.tensors().to_vec();
    let family = models::open(checkpoint)?;
    let mut report = CheckpointReport {
        family: family.decoder.family.into(),
        name,
        config: family.decoder.summary.clone(),
        parts: BTreeMap::new(),
        total_parameters: 0,
        active_parameters: family.decoder.active_parameters(),
        bytes: 0,
        tensors: Vec::new(),
        skipped: Vec::new(),
        lattices: LatticeShares::default(),
        remarks: family.remarks()?,
    };
    // Values are a remark: without a plan or with unreadable weights, the headers are all that is told.
    if let Ok(plan) = family.plan(&PlanOptions::default()) {
        report.lattices = LatticeShares::of(&family, &plan);
        report.remarks.extend(report.lattices.remarks());
    }
    let parts = family.checked.parts();
    for info in infos {
        let Some(part) = parts.get(&info.name) else {
            report.skipped.push(info.name);
            continue;
        };
        let sums = report.parts.entry(part.name().into()).or_default();
        sums.tensors += 1;
        sums.parameters += info.elements();
        sums.bytes += info.bytes;
        report.total_parameters += info.elements();
        report.bytes += info.bytes;
        report.tensors.push(TensorReport {
            name: info.name,
            dtype: info.dtype.name().into(),
            shape: info.shape,
            part: part.name().into(),
        });
    }
    Ok(report)
}

/// Contents of a package.
#[derive(Serialize)]
pub struct PackageContents {
    /// Path of the package.
    pub path: String,
    /// Version of Core ML's format.
    pub specification_version: i32,
    /// Function that runs where none is named.
    pub default_function: String,
    /// Functions by name.
    pub functions: BTreeMap<String, FunctionContents>,
    /// Bytes of all files.
    pub bytes: u64,
}

/// Interface and ops of a function.
#[derive(Serialize)]
pub struct FunctionContents {
    /// Version of the ops.
    pub opset: &'static str,
    /// Inputs.
    pub inputs: Vec<FeatureContents>,
    /// Outputs.
    pub outputs: Vec<FeatureContents>,
    /// States.
    pub states: Vec<FeatureContents>,
    /// Number of ops of each type.
    pub ops: BTreeMap<String, u64>,
}

/// An input, an output or a state.
#[derive(Serialize)]
pub struct FeatureContents {
    /// Name.
    pub name: String,
    kind: &'static str,
    dtype: &'static str,
    shape: String,
    color: Option<&'static str>,
    default: Option<f64>,
    /// Type, for people.
    #[serde(skip)]
    pub shown: String,
}

impl FeatureContents {
    fn of(f: &Feature) -> FeatureContents {
        let (kind, color) = match f.kind {
            FeatureKind::MultiArray => ("array", None),
            FeatureKind::Image(color) => ("image", Some(color.name())),
            FeatureKind::Scalar => ("scalar", None),
            FeatureKind::Dictionary => ("dictionary", None),
            FeatureKind::Sequence => ("sequence", None),
        };
        let (name, dtype, shape) = (f.name.clone(), f.dtype.name(), f.shape.to_string());
        FeatureContents { name, kind, dtype, shape, color, default: f.default, shown: f.to_string() }
    }
}

/// Lists the contents of an open package.
pub fn package(path: &Path, package: &Package) -> PackageContents {
    let model = package.model();
    let all = |features: &[Feature]| features.iter().map(FeatureContents::of).collect();
    let mut functions = BTreeMap::new();
    for described in &model.functions {
        let Some(f) = model.program.functions.get(&described.name) else { continue };
        let mut ops: BTreeMap<String, u64> = BTreeMap::new();
        for op in &f.block.operations {
            *ops.entry(op.op_type.clone()).or_default() += 1;
        }
        let (inputs, outputs) = (all(&described.inputs), all(&described.outputs));
        let states = all(&described.states);
        let contents = FunctionContents { opset: f.opset.name(), inputs, outputs, states, ops };
        functions.insert(described.name.clone(), contents);
    }
    PackageContents {
        path: path.display().to_string(),
        specification_version: model.specification_version,
        default_function: model.default_function.clone(),
        functions,
        bytes: package.total_bytes(),
    }
}
