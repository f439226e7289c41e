//! Figures of `anemoe bench`: the JSON document, the CSV lines, and an earlier run beside them.

use crate::recorder::facts;
use anemoe_bundle::journal::Machine;
use anemoe_gates::figures::Figures;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Version of the JSON document.
pub(super) const SCHEMA: u32 = 1;
/// Largest document that is compared with, in bytes.
const MAX_BYTES: u64 = 64 << 20;

/// Figures of one run.
#[derive(Serialize, Deserialize)]
pub struct BenchReport {
    pub schema: u32,
    pub version: String,
    #[serde(serialize_with = "anemoe_bundle::path_text")]
    pub bundle: PathBuf,
    pub source: String,
    /// `exact` or `fast` (products of 8-bit integers and bf16), and the first option that does not have its default.
    pub mode: String,
    pub machine: MachineReport,
    pub repetitions: usize,
    /// Seconds to open the bundle.
    pub load_s: f64,
    /// Seconds from the start to the first token's logits.
    pub first_token_s: f64,
    pub prefill: Vec<PrefillSpeed>,
    pub decode: Vec<DecodeSpeed>,
    /// Batches of `--sequences`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub batches: Vec<Batch>,
    /// Passes over drafts, beside a pass over one token; with `--verify-tokens`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub verify: Vec<DraftPass>,
    /// Decoding with drafts beside plain decoding; with `--drafts`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drafts: Vec<Drafts>,
    /// Shards of one kind together, while decoding in the first context.
    pub kinds: Vec<Part>,
    /// Bounds of each kind of shard, for one token and for several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bounds: Vec<KindBound>,
    pub shards: Vec<Part>,
    pub ops: Vec<OpPart>,
    pub memory: Memory,
    /// Comparison of `--against`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub against: Option<Against>,
}

/// An earlier run beside this one.
#[derive(Serialize, Deserialize)]
pub struct Against {
    #[serde(serialize_with = "anemoe_bundle::path_text")]
    pub file: PathBuf,
    /// Differences between the two runs besides their speed.
    pub differs: Vec<String>,
    /// Measurements that both runs have.
    pub beside: Vec<Beside>,
}

#[derive(Serialize, Deserialize)]
pub struct Beside {
    /// Name of the measurement, for instance `decode at 64`.
    pub what: String,
    pub earlier_tok_s: f64,
    /// This run's speed over the earlier one's.
    pub ratio: f64,
}

impl Against {
    pub fn new(file: &Path, now: &BenchReport, earlier: &BenchReport) -> Against {
        let of = |r: &BenchReport| {
            let m = &r.machine;
            [
                ("model", r.source.clone()),
                ("version", r.version.clone()),
                ("mode", r.mode.clone()),
                ("threads", m.threads.to_string()),
                ("processor", m.machine.cpu.clone().unwrap_or_default()),
                ("instructions", m.machine.isa.clone().unwrap_or_default()),
            ]
        };
        let differs = of(now).into_iter().zip(of(earlier)).filter(|(now, was)| now.1 != was.1);
        let differs = differs.map(|((what, now), (_, was))| format!("{what} `{was}`, now `{now}`")).collect();
        let was = earlier.speeds();
        let both = now.speeds().into_iter().filter_map(|(what, tok_s)| {
            let earlier_tok_s = was.iter().find(|(w, _)| *w == what)?.1;
            Some(Beside { what, earlier_tok_s, ratio: tok_s / earlier_tok_s })
        });
        Against { file: file.to_path_buf(), differs, beside: both.collect() }
    }
}

impl DecodeSpeed {
    pub fn name(&self) -> String {
        format!("decode at {}", self.context)
    }
}

impl Batch {
    pub fn name(&self) -> String {
        format!("{} sequences at {}", self.sequences, self.context)
    }
}

impl PrefillSpeed {
    pub fn name(&self) -> String {
        format!("prefill {}", self.tokens)
    }
}

impl BenchReport {
    /// Adds the figures of the first decoding, and of passes over four tokens.
    pub fn figures(&self, figures: &mut Figures) {
        figures.add("first_token_s", self.first_token_s);
        if let Some(decode) = self.decode.first() {
            figures.add("decode_tok_s", decode.tok_s);
            figures.add("token_ms", decode.ms_per_token);
            figures.add("token_gb", decode.gb_per_token);
        }
        if let Some(pass) = self.verify.iter().find(|v| v.tokens == 4) {
            figures.add("verify_ms", pass.ms);
            figures.add("verify_ratio", pass.over_one);
        }
    }

    /// Returns the name and the tokens per second of each measurement.
    pub fn speeds(&self) -> Vec<(String, f64)> {
        let decode = self.decode.iter().map(|d| (d.name(), d.tok_s));
        let batches = self.batches.iter().map(|b| (b.name(), b.tok_s));
        decode.chain(batches).chain(self.prefill.iter().map(|p| (p.name(), p.tok_s))).collect()
    }
}

#[derive(Serialize, Deserialize)]
pub struct MachineReport {
    #[serde(flatten)]
    pub machine: Machine,
    pub threads: usize,
    /// Bandwidth of all threads together before the measurements, in GB/s.
    pub read_gb_s: f64,
    /// Bandwidth of all threads together after the measurements, in GB/s.
    pub read_gb_s_after: f64,
}

#[derive(Serialize, Deserialize)]
pub struct PrefillSpeed {
    pub tokens: usize,
    pub seconds: f64,
    pub tok_s: f64,
    /// Gigabytes of weights and caches read.
    pub gb: f64,
    pub gb_s: f64,
    /// Different experts that a layer ran in a call, on average; absent without experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distinct_experts: Option<f64>,
}

/// Several sequences that take a token each in every pass.
#[derive(Serialize, Deserialize)]
pub struct Batch {
    pub sequences: usize,
    pub context: usize,
    /// Tokens of each sequence.
    pub tokens: usize,
    pub seconds: f64,
    /// Tokens per second of all sequences together.
    pub tok_s: f64,
    pub tok_s_per_sequence: f64,
    /// Speed of all sequences over the speed of one sequence; absent if that was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over_one: Option<f64>,
    pub gb_per_token: f64,
    pub gb_s: f64,
    /// Different experts that a layer ran in a pass, on average; absent without experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distinct_experts: Option<f64>,
}

#[derive(Serialize, Deserialize)]
pub struct DecodeSpeed {
    pub context: usize,
    pub tokens: usize,
    pub seconds: f64,
    pub tok_s: f64,
    pub ms_per_token: f64,
    /// Gigabytes of weights and caches read per token.
    pub gb_per_token: f64,
    pub gb_s: f64,
    /// Bandwidth of all threads, measured right before and after, in GB/s.
    pub read_gb_s: f64,
    /// Median share of the bandwidth over the repetitions, each compared with its own measurement of the bandwidth.
    pub share_of_bandwidth: f64,
    /// Tokens per second if reading these bytes were all that takes time.
    pub ceiling_tok_s: f64,
}

#[derive(Serialize, Deserialize)]
pub struct Part {
    pub name: String,
    pub calls: u64,
    pub ms_per_token: f64,
    pub share: f64,
    pub gb_per_token: f64,
    pub gb_s: f64,
    /// Millions of multiply-adds by weights, keys and values per token; absent if they are not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub million_multiply_adds_per_token: Option<f64>,
}

/// Work of the shards of one kind in a pass, and its bound.
#[derive(Serialize, Deserialize)]
pub struct KindBound {
    pub kind: String,
    /// Tokens of the pass.
    pub tokens: usize,
    pub ms: f64,
    pub gb: f64,
    pub million_multiply_adds: f64,
    /// Milliseconds that reading takes at the bandwidth measured in this run.
    pub read_ms: f64,
    /// Milliseconds that products take with weights in the caches, measured in this run for these tokens and this mode.
    pub multiply_ms: f64,
    /// The longer of `read_ms` and `multiply_ms`, or calls.
    pub bound: BoundBy,
}

/// The part of a machine that a pass waits for.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BoundBy {
    Bandwidth,
    Arithmetic,
    /// Neither: the cost of calls and of passing values on.
    Calls,
}

impl BoundBy {
    pub fn name(self) -> &'static str {
        match self {
            BoundBy::Bandwidth => "bandwidth",
            BoundBy::Arithmetic => "arithmetic",
            BoundBy::Calls => "calls",
        }
    }
}

#[derive(Serialize, Deserialize)]
pub struct OpPart {
    pub op: String,
    pub ms_per_token: f64,
    pub share: f64,
}

/// Resident memory after the last measurement; absent if the system does not tell.
#[derive(Serialize, Deserialize)]
pub struct Memory {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub own_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mapped_bytes: Option<u64>,
}

pub(super) fn read_report(path: &Path) -> anyhow::Result<BenchReport> {
    let what = || format!("--against {}", path.display());
    let text = anemoe_io::read_input(path, MAX_BYTES).with_context(what)?;
    let report: BenchReport = anemoe_io::json::parse(&text).with_context(what)?;
    anyhow::ensure!(
        report.schema == SCHEMA,
        "--against {}: schema {} where this version reads {SCHEMA}",
        path.display(),
        report.schema
    );
    for (measured, tok_s) in report.speeds() {
        anyhow::ensure!(
            tok_s.is_finite() && tok_s > 0.0,
            "--against {}: {measured}: {tok_s} tokens per second",
            path.display()
        );
    }
    Ok(report)
}

pub(super) fn event(report: &BenchReport) -> crate::recorder::Facts {
    let mut facts = facts::of(serde_json::json!({
        "mode": report.mode,
        "threads": report.machine.threads,
        "read_gb_s": report.machine.read_gb_s,
        "load_s": report.load_s,
        "first_token_s": report.first_token_s,
    }));
    for p in &report.prefill {
        facts.insert(format!("prefill_{}_tok_s", p.tokens), p.tok_s.into());
        facts.insert(format!("prefill_{}_gb_s", p.tokens), p.gb_s.into());
    }
    for d in &report.decode {
        facts.insert(format!("decode_at_{}_tok_s", d.context), d.tok_s.into());
        facts.insert(format!("decode_at_{}_gb_s", d.context), d.gb_s.into());
    }
    facts
}

pub(super) fn csv(report: &BenchReport) -> String {
    let mut lines = vec!["what,size,figure,unit".to_string()];
    let mut add = |what: &str, size: &dyn std::fmt::Display, figure: f64, unit: &str| {
        // Names of shards and operations contain no quotes.
        lines.push(format!("{what},{size},{figure},{unit}"));
    };
    add("read bandwidth", &"", report.machine.read_gb_s, "GB/s");
    add("load", &"", report.load_s, "s");
    add("first token", &"", report.first_token_s, "s");
    for p in &report.prefill {
        add("prefill", &p.tokens, p.tok_s, "tok/s");
        add("prefill", &p.tokens, p.gb_s, "GB/s");
    }
    for d in &report.decode {
        add("decode", &d.context, d.tok_s, "tok/s");
        add("decode", &d.context, d.gb_per_token, "GB/token");
        add("decode", &d.context, d.gb_s, "GB/s");
        add("decode", &d.context, d.share_of_bandwidth, "share of bandwidth");
    }
    for b in &report.batches {
        add("sequences", &b.sequences, b.tok_s, "tok/s");
        add("sequences", &b.sequences, b.tok_s_per_sequence, "tok/s each");
        add("sequences", &b.sequences, b.gb_per_token, "GB/token");
    }
    for v in &report.verify {
        add("verify", &v.tokens, v.ms, "ms/pass");
        add("verify", &v.tokens, v.over_one, "times a pass of one");
        add("verify", &v.tokens, v.bytes_over_one, "times its bytes");
    }
    for d in &report.drafts {
        add("drafts", &d.planted, d.tok_s, "tok/s");
        add("drafts", &d.planted, d.gain, "times plain decoding");
    }
    for (what, parts) in [("kind", &report.kinds), ("shard", &report.shards)] {
        for p in parts {
            add(what, &p.name, p.ms_per_token, "ms/token");
            add(what, &p.name, p.gb_s, "GB/s");
        }
    }
    for o in &report.ops {
        add("op", &o.op, o.ms_per_token, "ms/token");
    }
    lines.push(String::new());
    lines.join("\n")
}

/// A pass over several tokens of one sequence with logits of each, as drafts are verified.
#[derive(Serialize, Deserialize)]
pub struct DraftPass {
    pub tokens: usize,
    pub context: usize,
    pub ms: f64,
    /// `t(T) / t(1)`, from times measured in turn.
    pub over_one: f64,
    /// Bytes read by this pass over bytes read by a pass over one token.
    pub bytes_over_one: f64,
    pub gb: f64,
    pub gb_s: f64,
    /// Different experts that a layer ran in a pass, on average; absent without experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distinct_experts: Option<f64>,
    /// Acceptance per drafted token from which drafts of `T - 1` tokens pay; absent if none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub break_even: Option<f64>,
}

/// Decoding with drafts that are accepted with a planted probability, beside plain decoding.
#[derive(Serialize, Deserialize)]
pub struct Drafts {
    /// Probability that a drafted token is the right one.
    pub planted: f64,
    pub tokens: usize,
    pub plain_tok_s: f64,
    pub tok_s: f64,
    /// Speed over the speed of plain decoding: the median of pairs measured in turn.
    pub gain: f64,
    /// Counts of the last pair.
    pub verifier_calls: u64,
    pub drafted: u64,
    pub accepted: u64,
    pub fallbacks: u64,
}
