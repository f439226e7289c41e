//! Sizes and ops of a bundle's packages, counted from the programs.

use anemoe_bundle::Chain;
use anemoe_mlpackage::package::Package;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Op types of transformer graphs that `MLComputePlan` or a profiler placed on the ANE (ane-book journal 093 and 112,
/// VoxCPMANE #15, CoreML-LLM).
const SEEN_ON_ANE: [&str; 29] = [
    "add",
    "concat",
    "conv",
    "exp2",
    "gelu",
    "layer_norm",
    "linear",
    "matmul",
    "mul",
    "read_state",
    "reduce_max",
    "reduce_mean",
    "reduce_sum",
    "reshape",
    "rsqrt",
    "select",
    "sigmoid",
    "silu",
    "slice_by_index",
    "slice_by_size",
    "slice_update",
    "softmax",
    "split",
    "sub",
    "tanh",
    "transpose",
    "upsample_nearest_neighbor",
    "write_state",
    "conv_transpose",
];

/// Op types that were seen on the CPU, or that cannot be planned for the ANE (coremltools #1103, larql ANE-1,
/// roboflow/rf-detr #1495, ANEForge's op catalog).
const OFF_THE_ANE: [&str; 21] = [
    "band_part",
    "cond",
    "cumsum",
    "gather",
    "gather_along_axis",
    "gather_nd",
    "gru",
    "logical_and",
    "logical_or",
    "logical_xor",
    "lstm",
    "mod",
    "non_zero",
    "one_hot",
    "range_1d",
    "reduce_prod",
    "rnn",
    "scatter",
    "scatter_along_axis",
    "scatter_nd",
    "while_loop",
];

/// Counts over all functions of all packages.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct OpReport {
    /// Sums per kind of shard.
    pub kinds: BTreeMap<String, KindReport>,
    /// Ops by type that others saw on the ANE.
    pub seen: BTreeMap<String, u64>,
    /// Ops by type without a published sighting.
    pub unseen: BTreeMap<String, u64>,
    /// Ops by type that leave the ANE.
    pub off: BTreeMap<String, u64>,
}

/// Counts over the packages of one kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct KindReport {
    /// Packages.
    pub packages: u64,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Bytes of the largest.
    pub largest_bytes: u64,
    /// Functions.
    pub functions: u64,
    /// Ops that compute.
    pub compute_ops: u64,
    /// `const` and `constexpr_*`, which have no device.
    pub constants: u64,
}

/// Counts what the packages of a bundle hold.
///
/// # Errors
/// A package is missing or invalid.
pub fn bundle(path: &Path, chain: &Chain) -> Result<OpReport, anemoe_mlpackage::Error> {
    let mut report = OpReport::default();
    for shard in &chain.shards {
        let package = Package::open(&path.join(&shard.file))?;
        let kind = report.kinds.entry(shard.kind.name().to_string()).or_default();
        kind.packages += 1;
        kind.bytes += shard.bytes;
        kind.largest_bytes = kind.largest_bytes.max(shard.bytes);
        for function in package.model().program.functions.values() {
            kind.functions += 1;
            for op in &function.block.operations {
                let name = op.op_type.as_str();
                if name == "const" || name.starts_with("constexpr_") {
                    kind.constants += 1;
                    continue;
                }
                kind.compute_ops += 1;
                let counts = if OFF_THE_ANE.contains(&name) {
                    &mut report.off
                } else if SEEN_ON_ANE.contains(&name) {
                    &mut report.seen
                } else {
                    &mut report.unseen
                };
                *counts.entry(name.to_string()).or_default() += 1;
            }
        }
    }
    Ok(report)
}
