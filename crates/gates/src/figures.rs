//! Figures of reports by name, for experiments that are held against expectations.
//!
//! A name says its unit: `_mb` is 10^6 bytes, `_du_mib` 2^20, rounded up as `du` prints sizes; sizes are of the weights as
//! stored. `pack` is the first package of experts, `shard` the largest one.

use crate::gated::{GatedReport, NamedGate};
use crate::golden_gate::{GoldenGate, MIN_COSINE};
use crate::probe::{ProbeReport, ProbeResult, ShardProbes};
use crate::residency::Report;
use crate::residency::rule::Verdict;
use crate::residency::verdict::PackageReport;
use crate::trace::Trace;
use anemoe_bundle::ShardKind;
use anemoe_convert::models::Family;
use anemoe_convert::outliers::Outlier;
use anemoe_convert::plan::Plan;
use anemoe_convert::shard_program::lower_without_weights;
use anemoe_mlpackage::mil::Block;
use anemoe_runtime::bench::Speeds;
use anemoe_runtime::generate::Generated;
use std::collections::BTreeMap;

const MB: f64 = 1e6;
const MIB: f64 = 1048576.0;
const GB: f64 = 1e9;

/// Figures by name.
#[derive(Clone, Default, serde::Deserialize, serde::Serialize)]
#[serde(transparent)]
pub struct NamedFigures(pub BTreeMap<String, f64>);

/// Ops of one function, by type.
pub type OpTypes = BTreeMap<String, u64>;

/// Counts the ops of every shard's first function, by type. Shards of one type have the same counts.
///
/// # Errors
/// A shard cannot be lowered.
pub fn op_types(family: &Family, plan: &Plan) -> crate::Result<Vec<OpTypes>> {
    let mut known: BTreeMap<String, OpTypes> = BTreeMap::new();
    let mut all = Vec::new();
    for shard in &plan.shards {
        let signature = shard.signature();
        if !known.contains_key(&signature) {
            let mut types = OpTypes::new();
            let program = lower_without_weights(family, shard)?.program;
            if let Some((_, function)) = program.functions.first_key_value() {
                count_ops(&function.block, &mut types);
            }
            known.insert(signature.clone(), types);
        }
        all.push(known[&signature].clone());
    }
    Ok(all)
}

fn count_ops(block: &Block, types: &mut OpTypes) {
    for op in &block.operations {
        *types.entry(op.op_type.clone()).or_default() += 1;
        op.blocks.iter().for_each(|b| count_ops(b, types));
    }
}

/// Tells whether shards of this kind hold experts.
fn is_pack(kind: &str) -> bool {
    [ShardKind::Experts, ShardKind::ExpertsCombine, ShardKind::Moe].iter().any(|k| k.name() == kind)
}

impl NamedFigures {
    /// Adds a figure, if it is a number.
    pub fn add(&mut self, name: &str, value: impl Into<Option<f64>>) {
        let value = value.into().filter(|x| x.is_finite());
        self.0.extend(value.map(|x| (name.to_string(), x)));
    }

    /// Adds the figures of a plan with its placement, its outliers, and the ops of each shard's first function.
    pub fn plan(&mut self, plan: &Plan, placement: &Report, outliers: &[Outlier], op_types: &[OpTypes]) {
        let shards = &plan.shards;
        self.placed(placement.packages.iter().zip(shards).map(|(p, s)| (p, Some(s.bytes))).collect());
        let totals = &plan.totals;
        self.add("shards", totals.shards as f64);
        self.add("layer_shards", totals.layer_shards as f64);
        self.add("params", totals.params as f64);
        self.add("token_gb", totals.bytes_per_token as f64 * 1e-9);
        self.add("outlier_ratio", outliers.iter().map(|o| o.ratio).reduce(f64::max));
        let Some((pack, types)) = shards.iter().zip(op_types).find(|(s, _)| is_pack(s.kind.name())) else {
            return;
        };
        self.add("pack_matrix_weights", pack.matrices.iter().map(|m| m.weights() as f64).reduce(f64::max));
        let count = |fits: &dyn Fn(&str) -> bool| {
            types.iter().filter(|(name, _)| fits(name)).map(|(_, n)| *n as f64).sum::<f64>()
        };
        self.add("pack_conv_ops", count(&|name| name == "conv"));
        self.add("pack_constexpr_ops", count(&|name| name.starts_with("constexpr_")));
        self.add("pack_const_ops", count(&|name| name == "const"));
    }

    /// Adds the figures of a build.
    pub fn build(&mut self, report: &GatedReport) {
        report.full_stack.residency.iter().for_each(|placement| self.check(placement));
        report.representative.probes.iter().for_each(|probes| self.probes(probes));
        let also = report.full_stack.also.iter().map(|g| &g.gate);
        self.goldens(report.full_stack.golden.iter().chain(also).collect());
        if let Some(built) = &report.build {
            self.add("shards", built.shards as f64);
            self.add("bundle_mb", built.package_bytes as f64 * 1e-6);
            self.add("min_weight_cosine", built.min_weight_cosine);
            self.add("build_s", built.seconds);
            self.add("shard_s", built.seconds / built.shards as f64);
        }
    }

    /// Adds the figures of a placement.
    pub fn check(&mut self, report: &Report) {
        self.placed(report.packages.iter().map(|p| (p, p.weight_bytes)).collect());
    }

    /// Adds the figures of packages with their bytes of weights.
    fn placed(&mut self, all: Vec<(&PackageReport, Option<u64>)>) {
        let counted = |n: usize| (n > 0).then_some(n as f64);
        let of_kind =
            |kind: ShardKind| all.iter().filter(|p| p.0.kind.as_deref() == Some(kind.name())).count();
        self.add("attn_shards", counted(of_kind(ShardKind::Attention)));
        self.add("head_shards", counted(of_kind(ShardKind::Head)));
        let on_ane = all.iter().filter(|p| p.0.verdict == Verdict::Ane).count();
        self.add("ane_shards", (!all.is_empty()).then_some(on_ane as f64));
        let packs: Vec<_> = all.iter().filter(|p| p.0.kind.as_deref().is_some_and(is_pack)).collect();
        self.add("moe_shards", counted(packs.len()));
        let packs_bytes: Vec<f64> = packs.iter().filter_map(|p| Some(p.1? as f64)).collect();
        let whole = all.iter().filter_map(|p| Some(p.1? as f64)).reduce(|a, b| a + b);
        self.add("weights_gb", whole.map(|b| b / GB));
        self.add("experts_gb", packs_bytes.iter().copied().reduce(|a, b| a + b).map(|b| b / GB));
        let largest = packs_bytes.iter().copied().reduce(f64::max);
        for (which, bytes) in [("pack", packs_bytes.first().copied()), ("shard", largest)] {
            self.add(&format!("{which}_mb"), bytes.map(|b| b / MB));
            self.add(&format!("{which}_du_mib"), bytes.map(|b| (b / MIB).ceil()));
        }
        let Some(ops) = packs.first().map(|p| p.0.functions.first().map_or(p.0.ops, |f| f.ops)) else {
            return;
        };
        self.add("pack_ane_ops", ops.ane as f64);
        self.add("pack_gpu_ops", ops.gpu as f64);
        self.add("pack_cpu_ops", ops.cpu as f64);
        self.add("pack_no_device_ops", ops.no_device as f64);
        self.add("pack_compute_ops", ops.compute() as f64);
    }

    /// Adds the figures of golden gates, the first of which counts alone where none is the worst, and of probes.
    pub fn validate(&mut self, gates: &[NamedGate], probes: Option<&ProbeReport>) {
        self.goldens(gates.iter().map(|g| &g.gate).collect());
        probes.into_iter().for_each(|probes| self.probes(probes));
        let Some(gate) = gates.first().map(|g| &g.gate.usual) else { return };
        self.add("prompt_cosine_min", gate.positions.iter().map(|p| p.agreement.cosine).reduce(f64::min));
        self.add("first_decode_cosine", gate.decode.first().map(|d| d.agreement.cosine));
        self.add("tokens_equal", gate.equal_tokens() as f64);
        self.add("tokens_expected", gate.expected_ids.len() as f64);
    }

    /// Adds the figures of a trace.
    pub fn trace(&mut self, report: &Trace) {
        self.add("stack_cosine_min", report.layers.iter().map(|l| l.fidelity.min_cosine).reduce(f64::min));
        let behind: Vec<_> = report.layers.iter().filter(|l| l.boundary > 0).collect();
        let mean = |n: usize| Some(behind.get(n.checked_sub(1)?)?.fidelity.mean_cosine);
        self.add("stack_cosine_first", mean(1));
        self.add("stack_cosine_middle", mean(behind.len().div_ceil(2)));
        self.add("stack_cosine_last", mean(behind.len()));
        let failed = behind.iter().find(|l| l.fidelity.min_cosine < MIN_COSINE);
        self.add("stack_failed_layer", failed.map(|l| l.boundary as f64 - 1.0));
    }

    /// Adds the figures of a prompt's continuation.
    pub fn generate(&mut self, prompt: &[u32], generated: &Generated) {
        self.add("prompt_tokens", prompt.len() as f64);
        self.add("new_tokens", generated.ids.len() as f64);
        self.add("ngram_tok_s", generated.tokens_per_second());
        let Some(drafts) = &generated.speculation else { return };
        self.add("verifier_calls", drafts.verifier_calls as f64);
        self.add("drafted", drafts.drafted as f64);
        self.add("accepted", drafts.accepted as f64);
        self.add("fallbacks", drafts.fallbacks as f64);
        self.add("acceptance", (drafts.drafted > 0).then_some(100.0 * drafts.acceptance));
    }

    /// Adds the figures of the first decoding, and of passes over four tokens.
    pub fn bench(&mut self, speeds: &Speeds) {
        if let Some(decode) = speeds.decode.first() {
            self.add("decode_tok_s", decode.tok_s);
            self.add("token_ms", decode.ms_per_token);
            self.add("token_gb", decode.gb_per_token);
        }
        if let Some(pass) = speeds.verify.iter().find(|v| v.tokens == 4) {
            self.add("verify_ms", pass.ms);
            self.add("verify_ratio", pass.over_one);
        }
    }

    /// Adds the figures of golden gates: of several goldens, the worst.
    fn goldens(&mut self, gates: Vec<&GoldenGate>) {
        self.add("logit_cosine_min", gates.iter().map(|g| g.usual.min_cosine).reduce(f64::min));
        self.add("mean_kl", gates.iter().map(|g| g.usual.mean_kl).reduce(f64::max));
    }

    /// Adds the figures of probes: of all packages of experts, and of the random probes of the first one.
    fn probes(&mut self, report: &ProbeReport) {
        let packs: Vec<&ShardProbes> = report.shards.iter().filter(|s| is_pack(s.kind.name())).collect();
        let counted = || packs.iter().filter(|s| s.counted > 0);
        let streams = || counted().filter_map(|s| Some(s.with_residual?.mean_cosine));
        self.add("layer_cosine_min", streams().reduce(f64::min));
        self.add("layer_cosine_max", streams().reduce(f64::max));
        let branches = counted().filter_map(|s| Some(s.branch?.mean_cosine));
        self.add("branch_cosine_min", branches.reduce(f64::min));
        let all = packs.first().map_or(&[][..], |first| &first.probes);
        let random: Vec<&ProbeResult> = all.iter().filter(|p| p.probe.starts_with("random")).collect();
        if random.is_empty() {
            return;
        }
        self.add("probes", random.len() as f64);
        let is_zero = |p: &&&ProbeResult| p.positions.iter().all(Option::is_none);
        self.add("probes_zero", random.iter().filter(is_zero).count() as f64);
        let branch = random.iter().flat_map(|p| &p.branch).flatten();
        let stream = random.iter().flat_map(|p| &p.with_residual).flatten();
        for (name, cosines) in [("probe", branch.collect::<Vec<_>>()), ("probe_stream", stream.collect())] {
            let (sum, n) = (cosines.iter().copied().sum::<f64>(), cosines.len() as f64);
            self.add(&format!("{name}_cosine_mean"), sum / n);
            self.add(&format!("{name}_cosine_min"), cosines.into_iter().copied().reduce(f64::min));
        }
    }
}
