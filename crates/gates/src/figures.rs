//! Figures of reports by name, for experiments that are held against expectations.
//!
//! A name says its unit: `_mb` is 10^6 bytes, `_mib` 2^20, `_du_mib` rounded up as `du` prints sizes; sizes are of the
//! weights as stored. `pack` is the first package of experts, `shard` the largest one.

use crate::gated::{GatedReport, NamedGate};
use crate::golden_gate::{GoldenGate, MIN_COSINE};
use crate::probe::{ProbeReport, ProbeResult, ShardProbes};
use crate::residency::Report;
use crate::residency::rule::Verdict;
use crate::residency::verdict::PackageReport;
use crate::trace::Trace;
use anemoe_bundle::ShardKind;
use anemoe_convert::outliers::Outlier;
use anemoe_convert::plan::Plan;
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

/// Kind of a package, its bytes of weights, and its placement.
type PlacedPackage<'a> = (&'a str, Option<u64>, &'a PackageReport);

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
        let placed = shards.iter().zip(&placement.packages);
        self.packages(placed.map(|(s, p)| (s.kind.name(), Some(s.bytes), p)).collect());
        let totals = &plan.totals;
        self.add("shards", totals.shards as f64);
        self.add("layer_shards", totals.layer_shards as f64);
        self.add("params", totals.params as f64);
        self.add("active_params", totals.active_params_per_token as f64);
        self.add("token_gb", totals.bytes_per_token as f64 * 1e-9);
        self.add("outlier_tensors", outliers.len() as f64);
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
        let kind = |p: &PackageReport| p.kind.clone().unwrap_or_default();
        let kinds: Vec<String> = report.packages.iter().map(kind).collect();
        let placed = report.packages.iter().zip(&kinds);
        self.packages(placed.map(|(p, kind)| (kind.as_str(), p.weight_bytes, p)).collect());
    }

    /// Adds the figures of golden gates, the first of which counts alone where none is the worst, and of probes.
    pub fn validate(&mut self, gates: &[NamedGate], probes: Option<&ProbeReport>) {
        self.goldens(gates.iter().map(|g| &g.gate).collect());
        probes.into_iter().for_each(|probes| self.probes(probes));
        let Some(gate) = gates.first().map(|g| &g.gate.exact) else { return };
        self.add("prompt_cosine_min", gate.positions.iter().map(|p| p.agreement.cosine).reduce(f64::min));
        self.add("first_decode_cosine", gate.decode.first().map(|d| d.agreement.cosine));
        let equal = gate.generated_ids.iter().zip(&gate.expected_ids).take_while(|(a, b)| a == b);
        self.add("tokens_equal", equal.count() as f64);
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

    fn packages(&mut self, all: Vec<PlacedPackage<'_>>) {
        let counted = |n: usize| (n > 0).then_some(n as f64);
        let of_kind = |kind: ShardKind| counted(all.iter().filter(|p| p.0 == kind.name()).count());
        self.add("attn_shards", of_kind(ShardKind::Attention));
        self.add("head_shards", of_kind(ShardKind::Head));
        let on_ane = all.iter().filter(|p| p.2.verdict == Verdict::Ane).count();
        self.add("ane_shards", (!all.is_empty()).then_some(on_ane as f64));
        let packs: Vec<_> = all.iter().filter(|p| is_pack(p.0)).collect();
        self.add("moe_shards", counted(packs.len()));
        let bytes: Vec<f64> = packs.iter().filter_map(|p| Some(p.1? as f64)).collect();
        let whole = all.iter().filter_map(|p| Some(p.1? as f64)).reduce(|a, b| a + b);
        self.add("weights_gb", whole.map(|b| b / GB));
        self.add("experts_gb", bytes.iter().copied().reduce(|a, b| a + b).map(|b| b / GB));
        let largest = bytes.iter().copied().reduce(f64::max);
        for (which, bytes) in [("pack", bytes.first().copied()), ("shard", largest)] {
            self.add(&format!("{which}_mb"), bytes.map(|b| b / MB));
            self.add(&format!("{which}_mib"), bytes.map(|b| b / MIB));
            self.add(&format!("{which}_du_mib"), bytes.map(|b| (b / MIB).ceil()));
        }
        let Some(ops) = packs.first().map(|p| p.2.functions.first().map_or(p.2.ops, |f| f.ops)) else {
            return;
        };
        self.add("pack_ane_ops", ops.ane as f64);
        self.add("pack_gpu_ops", ops.gpu as f64);
        self.add("pack_cpu_ops", ops.cpu as f64);
        self.add("pack_no_device_ops", ops.no_device as f64);
        self.add("pack_compute_ops", ops.compute() as f64);
    }

    /// Adds the figures of golden gates: of several goldens, the worst.
    fn goldens(&mut self, gates: Vec<&GoldenGate>) {
        self.add("logit_cosine_min", gates.iter().map(|g| g.exact.min_cosine).reduce(f64::min));
        self.add("mean_kl", gates.iter().map(|g| g.exact.mean_kl).reduce(f64::max));
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
