//! NamedFigures of `anemoe bench`: the JSON document.

use crate::recorder::{Facts, facts};
use anemoe_bundle::journal::Machine;
use anemoe_runtime::shard_work::{KindBound, OpPart, WorkPart};
use anemoe_gates::figures::NamedFigures;
use serde::Serialize;
use std::path::PathBuf;

/// Version of the JSON document.
pub(super) const SCHEMA: u32 = 1;

/// NamedFigures of one run.
#[derive(Serialize)]
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
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub batches: Vec<Batch>,
    /// Passes over drafts, beside a pass over one token; with `--verify-tokens`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub verify: Vec<DraftPass>,
    /// Decoding with drafts beside plain decoding; with `--drafts`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub drafts: Vec<Drafts>,
    /// Shards of one kind together, while decoding in the first context.
    pub kinds: Vec<WorkPart>,
    /// Bounds of each kind of shard, for one token and for several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bounds: Vec<KindBound>,
    pub shards: Vec<WorkPart>,
    pub ops: Vec<OpPart>,
    pub memory: Memory,
}

impl BenchReport {
    /// Makes the facts of the journal, which `anemoe report` reads.
    pub fn facts(&self) -> Facts {
        let mut facts = facts::of(serde_json::json!({
            "mode": self.mode,
            "threads": self.machine.threads,
            "read_gb_s": self.machine.read_gb_s,
            "load_s": self.load_s,
            "first_token_s": self.first_token_s,
        }));
        for p in &self.prefill {
            facts.insert(format!("prefill_{}_tok_s", p.tokens), p.tok_s.into());
            facts.insert(format!("prefill_{}_gb_s", p.tokens), p.gb_s.into());
        }
        for d in &self.decode {
            facts.insert(format!("decode_at_{}_tok_s", d.context), d.tok_s.into());
            facts.insert(format!("decode_at_{}_gb_s", d.context), d.gb_s.into());
        }
        facts
    }

    /// Adds the figures of the first decoding, and of passes over four tokens.
    pub fn figures(&self, figures: &mut NamedFigures) {
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
}

#[derive(Serialize)]
pub struct MachineReport {
    #[serde(flatten)]
    pub machine: Machine,
    pub threads: usize,
    /// Bandwidth of all threads together before the measurements, in GB/s.
    pub read_gb_s: f64,
    /// Bandwidth of all threads together after the measurements, in GB/s.
    pub read_gb_s_after: f64,
}

#[derive(Serialize)]
pub struct PrefillSpeed {
    pub tokens: usize,
    pub seconds: f64,
    pub tok_s: f64,
    /// Gigabytes of weights and caches read.
    pub gb: f64,
    pub gb_s: f64,
    /// Different experts that a layer ran in a call, on average; absent without experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distinct_experts: Option<f64>,
}

/// Several sequences that take a token each in every pass.
#[derive(Serialize)]
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub over_one: Option<f64>,
    pub gb_per_token: f64,
    pub gb_s: f64,
    /// Different experts that a layer ran in a pass, on average; absent without experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distinct_experts: Option<f64>,
}

#[derive(Serialize)]
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

/// Resident memory after the last measurement; absent if the system does not tell.
#[derive(Serialize)]
pub struct Memory {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub own_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mapped_bytes: Option<u64>,
}

/// A pass over several tokens of one sequence with logits of each, as drafts are verified.
#[derive(Serialize)]
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distinct_experts: Option<f64>,
    /// Acceptance per drafted token from which drafts of `T - 1` tokens pay; absent if none does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub break_even: Option<f64>,
}

/// Decoding with drafts that are accepted with a planted probability, beside plain decoding.
#[derive(Serialize)]
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
