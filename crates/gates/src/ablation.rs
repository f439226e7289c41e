//! Ablation: finds the compression that costs most, by running a bundle with one part of a layer after the other in FP16.

use crate::golden_gate::{Validation, validate};
use crate::reference::Golden;
use crate::{Error, Result};
use anemoe_bundle::Chain;
use anemoe_convert::bank_scales::BankScales;
use anemoe_convert::build::{check_scratch, write_shard};
use anemoe_convert::importance::Importance;
use anemoe_convert::lower::encode_matrix;
use anemoe_convert::models::Family;
use anemoe_convert::outliers::{Outlier, Spread};
use anemoe_convert::plan::{MatrixPlan, Plan, PlannedShard};
use anemoe_convert::quant::{MatrixQuant, Quant};
use anemoe_io::Temporary;
use anemoe_runtime::cpu::CpuBackend;
use anemoe_runtime::model::Model;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Unit that is put back to FP16 at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AblationUnit {
    /// One part of one layer.
    Each,
    /// A part in all layers.
    Part,
    /// All parts of a layer.
    Layer,
}

/// Inputs of an ablation.
pub struct AblationContext<'a> {
    /// Family of the checkpoint.
    pub family: &'a Family,
    /// The plan that the bundle was built from.
    pub plan: &'a Plan,
    /// Importances that the bundle was built with.
    pub importance: Option<&'a Importance>,
    /// Folder of the bundle.
    pub bundle: &'a Path,
    /// Contract of the bundle.
    pub chain: &'a Chain,
    /// Golden that the bundle is compared with.
    pub golden: &'a Golden,
    /// Folder for the FP16 shards, which are temporary.
    pub scratch: &'a Path,
}

/// Distance of a bundle from its golden.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// Lowest cosine of logits.
    pub min_cosine: f64,
    /// Mean Kullback-Leibler divergence of the next token's distribution, in nats.
    pub mean_kl: f64,
    /// Number of steps at which the bundle chooses another token.
    pub wrong_choices: usize,
}

impl From<&Validation> for Figures {
    fn from(v: &Validation) -> Figures {
        Figures { min_cosine: v.min_cosine, mean_kl: v.mean_kl, wrong_choices: v.wrong_choices.len() }
    }
}

/// Result of putting one unit back to FP16.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ablation {
    /// Layer, from 0; absent for the head, and where a part was put back in all layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
    /// Part of the model; absent where all parts of a layer were put back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// Kinds that FP16 replaced.
    pub kinds: Vec<String>,
    /// Distance of the bundle with the unit in FP16.
    #[serde(flatten)]
    pub figures: Figures,
    /// Divergence that the replacement removes: baseline less `mean_kl`, in nats.
    pub gain_kl: f64,
    /// Matrix with the largest error of its kind.
    pub worst: Worst,
}

/// Matrix of a replaced part with the largest error of its kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worst {
    /// Name of the shard.
    pub shard: String,
    /// Name of the matrix in the shard.
    pub matrix: String,
    /// Name of the checkpoint's tensor, without the checkpoint's prefix.
    pub tensor: String,
    /// Compression kind of the matrix.
    pub kind: String,
    /// Measured squared error over the squares of the values.
    pub relative_error: f64,
    /// Largest and mean magnitude of the matrix's values.
    #[serde(flatten)]
    pub spread: Spread,
    /// Largest magnitude over mean magnitude.
    pub ratio: f64,
    /// Predicted relative squared error of INT8 with one scale per tensor.
    pub int8_tensor_loss: f64,
    /// True if an outlier spoils the kind.
    pub outlier: bool,
    /// Cause of the error, in words.
    pub cause: String,
}

/// Result of an ablation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AblationReport {
    /// Distance of the bundle as it is.
    pub baseline: Figures,
    /// Replacements, largest gain first.
    pub swaps: Vec<Ablation>,
}

/// Layer and part of the matrices that are replaced together.
type AblationGroup = (Option<usize>, Option<String>);

/// Puts one unit after the other back to FP16, and runs the golden's prompt and continuation each time. `progress`
/// hears how many units are done, and how many there are.
///
/// # Errors
/// The bundle is not built from this checkpoint, the golden does not fit the bundle, every matrix is fp16 already, or
/// a shard cannot be written.
pub fn search(
    s: &AblationContext<'_>,
    unit: AblationUnit,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<AblationReport> {
    let mut groups: BTreeMap<AblationGroup, BTreeSet<&str>> = BTreeMap::new();
    let compressed = |m: &&MatrixPlan| m.quant.kind != Quant::Fp16;
    for shard in &s.plan.shards {
        for m in shard.matrices.iter().filter(compressed) {
            let group = match unit {
                AblationUnit::Each => (m.layer(), Some(m.part.clone())),
                AblationUnit::Part => (None, Some(m.part.clone())),
                // The head belongs to no layer.
                AblationUnit::Layer => (m.layer(), m.layer().is_none().then(|| m.part.clone())),
            };
            groups.entry(group).or_default().insert(&shard.name);
        }
    }
    if groups.is_empty() {
        return Err(Error::usage(format!("{}: every matrix is fp16 already", s.bundle.display())));
    }
    // A package may have matrices of several layers.
    let is_replaced = |m: &MatrixPlan, layer: Option<usize>, part: Option<&String>| {
        let is_own = layer.is_none_or(|layer| m.layer() == Some(layer));
        m.quant.kind != Quant::Fp16 && is_own && part.is_none_or(|part| *part == m.part)
    };
    let stand_in = |shard: &PlannedShard, layer: Option<usize>, part: Option<&String>| {
        shard.requantized(|m| is_replaced(m, layer, part).then_some(MatrixQuant::FP16))
    };
    // The temporary shards of one unit lie on disk at a time.
    let most = groups.iter().map(|((layer, part), shards)| {
        let each = shards.iter().filter_map(|name| s.plan.shard(name));
        each.map(|shard| stand_in(shard, *layer, part.as_ref()).package_bytes()).sum::<u64>()
    });
    check_scratch(s.scratch, most.max().unwrap_or(0))?;
    let total = groups.len();
    let baseline = Figures::from(&run(s, &BTreeMap::new())?);
    let mut swaps = Vec::new();
    for (done, ((layer, part), shards)) in groups.into_iter().enumerate() {
        progress(done, total);
        let folder = Temporary::dir(s.scratch, "").map_err(|source| Error::io(s.scratch, source))?;
        let mut stand_ins = BTreeMap::new();
        let mut kinds = BTreeSet::new();
        let mut worst: Option<Worst> = None;
        for name in shards {
            let Some(shard) = s.plan.shard(name) else { continue };
            for m in shard.matrices.iter().filter(|m| is_replaced(m, layer, part.as_ref())) {
                kinds.insert(m.quant.kind.to_string());
                let found = look(s, shard, m)?;
                if worst.as_ref().is_none_or(|w| found.relative_error > w.relative_error) {
                    worst = Some(found);
                }
            }
            let stand_in = stand_in(shard, layer, part.as_ref());
            let path = folder.path().join(format!("{name}.mlpackage"));
            write_shard(s.family, &stand_in, s.importance, &path)?;
            stand_ins.insert(name.to_string(), path);
        }
        let figures = Figures::from(&run(s, &stand_ins)?);
        let gain_kl = baseline.mean_kl - figures.mean_kl;
        let Some(worst) = worst else { continue };
        swaps.push(Ablation { layer, part, kinds: kinds.into_iter().collect(), figures, gain_kl, worst });
    }
    progress(total, total);
    swaps.sort_by(|a, b| b.gain_kl.total_cmp(&a.gain_kl));
    Ok(AblationReport { baseline, swaps })
}

/// Runs the golden's prompt and continuation through the bundle, with other packages for some shards.
fn run(s: &AblationContext<'_>, stand_ins: &BTreeMap<String, PathBuf>) -> Result<Validation> {
    let package = |shard: &anemoe_bundle::Shard| {
        stand_ins.get(&shard.name).cloned().unwrap_or_else(|| s.bundle.join(&shard.file))
    };
    let model = Model::with_chain(s.bundle, s.chain.clone(), &CpuBackend::default(), &package)?;
    validate(&model, s.golden, 0.0)
}

/// Measures the error that a matrix's kind causes, and names the cause.
fn look(s: &AblationContext<'_>, shard: &PlannedShard, m: &MatrixPlan) -> Result<Worst> {
    let scale = BankScales::default().of(s.family, shard, m)?;
    let side = encode_matrix(&s.family.checked, m, s.importance, scale, &mut |_| Ok(()))?;
    let error = side.metrics.relative_mse();
    let spread = Spread::of(s.family, m)?;
    let outlier = Outlier::of(shard, m, spread);
    let cause = match &outlier {
        Some(o) => format!(
            "an outlier of {:.3e}, {:.0} times the mean magnitude, sets the one step of {}: use int8-channel or lut4",
            spread.largest, o.ratio, o.kind
        ),
        None => format!("no outlier: {} is this coarse for all of its values", m.quant.kind),
    };
    Ok(Worst {
        shard: shard.name.clone(),
        matrix: m.name.clone(),
        tensor: m.tensor.clone(),
        kind: m.quant.kind.to_string(),
        relative_error: error,
        spread,
        ratio: spread.ratio(),
        int8_tensor_loss: spread.int8_tensor_loss(),
        outlier: outlier.is_some(),
        cause,
    })
}
