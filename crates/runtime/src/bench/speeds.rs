//! Options and figures of measurements.

use crate::shard_work::{KindBound, OpPart, WorkPart};
use crate::speculate::{DraftModel, SourceReport};
use serde::Serialize;
use std::sync::Arc;

/// Measurements that are wanted.
pub struct BenchOptions {
    /// Prompt lengths; 0 for none.
    pub prefill: Vec<usize>,
    /// Contexts in which tokens are decoded.
    pub context: Vec<usize>,
    /// Tokens decoded in each context; 0 for none.
    pub decode: usize,
    /// Numbers of sequences that are decoded at once, in the first context.
    pub sequences: Vec<usize>,
    /// Tokens of passes over drafts; 0 for none.
    pub verify_tokens: Vec<usize>,
    /// Probabilities with which drafted tokens are right.
    pub drafts: Vec<f64>,
    /// Drafter whose drafts are measured, besides those of `drafts`, which cost what its drafts cost.
    pub drafter: Option<Arc<DraftModel>>,
    /// Times that each is measured.
    pub repetitions: usize,
    /// Most tokens of one prefill call.
    pub prefill_chunk: Option<usize>,
    /// Start of the random tokens.
    pub seed: u64,
}

/// Measured speeds of a model. Figures are medians.
#[derive(Serialize)]
pub struct Speeds {
    /// Prompts.
    pub prefill: Vec<PrefillSpeed>,
    /// Decoding of one sequence.
    pub decode: Vec<DecodeSpeed>,
    /// Decoding of several sequences.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub batches: Vec<BatchSpeed>,
    /// Passes over drafts, beside a pass over one token.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub verify: Vec<DraftPass>,
    /// Decoding with drafts beside plain decoding.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub drafts: Vec<DraftedSpeed>,
    /// Shards of one kind together, while decoding in the first context.
    pub kinds: Vec<WorkPart>,
    /// Bounds of each kind of shard, for one token and for several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bounds: Vec<KindBound>,
    /// Single shards.
    pub shards: Vec<WorkPart>,
    /// Operations of fused functions, if they are measured.
    pub ops: Vec<OpPart>,
}

impl BenchOptions {
    /// Counts the runs of [`BenchOptions::measure`].
    pub fn runs(&self) -> usize {
        let prompts = self.prefill.iter().filter(|&&n| n > 0).count();
        let decodes = if self.decode > 0 { self.context.len() + self.sequences.len() } else { 0 };
        let verify = usize::from(self.verify_tokens.iter().any(|&n| n > 0));
        (prompts + decodes + verify + self.planted().count()) * (self.repetitions + 1)
    }

    /// Returns the probabilities with which drafts are right; none for the drafter's own.
    pub(super) fn planted(&self) -> impl Iterator<Item = Option<f64>> {
        self.drafts.iter().copied().map(Some).chain(self.drafter.iter().map(|_| None))
    }

    /// Returns the tokens that the caches have to hold.
    pub fn longest(&self) -> usize {
        let first = self.context.first().copied().unwrap_or(0);
        let verified = self.verify_tokens.iter().copied().max().filter(|n| *n > 0);
        let drafted =
            Some(first.max(1).saturating_add(self.decode)).filter(|_| self.planted().next().is_some());
        let behind = self.context.iter().map(|c| c.saturating_add(self.decode));
        let all = self.prefill.iter().copied().chain(behind).chain(verified.map(|n| first.saturating_add(n)));
        all.chain(drafted).max().unwrap_or(0)
    }
}

/// Speed of a prompt.
#[derive(Serialize)]
pub struct PrefillSpeed {
    /// Number of tokens.
    pub tokens: usize,
    /// Seconds of all of them.
    pub seconds: f64,
    /// Tokens per second.
    pub tok_s: f64,
    /// Gigabytes of weights and caches read.
    pub gb: f64,
    /// Gigabytes read per second.
    pub gb_s: f64,
    /// Different experts that a layer ran in a call, on average; absent without experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distinct_experts: Option<f64>,
}

/// Several sequences that take a token each in every pass.
#[derive(Serialize)]
pub struct BatchSpeed {
    /// Number of sequences.
    pub sequences: usize,
    /// Tokens before the first.
    pub context: usize,
    /// Tokens of each sequence.
    pub tokens: usize,
    /// Seconds of all of them.
    pub seconds: f64,
    /// Tokens per second of all sequences together.
    pub tok_s: f64,
    /// Tokens per second of one sequence.
    pub tok_s_per_sequence: f64,
    /// Speed of all sequences over the speed of one sequence; absent if that was not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub over_one: Option<f64>,
    /// Gigabytes of weights and caches read per token.
    pub gb_per_token: f64,
    /// Gigabytes read per second.
    pub gb_s: f64,
    /// Different experts that a layer ran in a pass, on average; absent without experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distinct_experts: Option<f64>,
}

/// Speed of decoding in a context.
#[derive(Serialize)]
pub struct DecodeSpeed {
    /// Tokens before the first.
    pub context: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Seconds of all of them.
    pub seconds: f64,
    /// Tokens per second.
    pub tok_s: f64,
    /// Milliseconds per token.
    pub ms_per_token: f64,
    /// Gigabytes of weights and caches read per token.
    pub gb_per_token: f64,
    /// Gigabytes read per second.
    pub gb_s: f64,
    /// Bandwidth of all threads, measured right before and after, in GB/s.
    pub read_gb_s: f64,
    /// Median share of the bandwidth over the repetitions, each compared with its own measurement of the bandwidth.
    pub share_of_bandwidth: f64,
    /// Tokens per second if reading these bytes were all that takes time.
    pub ceiling_tok_s: f64,
}

/// A pass over several tokens of one sequence with logits of each, as drafts are verified.
#[derive(Serialize)]
pub struct DraftPass {
    /// Number of tokens.
    pub tokens: usize,
    /// Tokens before the first.
    pub context: usize,
    /// Milliseconds.
    pub ms: f64,
    /// `t(T) / t(1)`, from times measured in turn.
    pub over_one: f64,
    /// Bytes read by this pass over bytes read by a pass over one token.
    pub bytes_over_one: f64,
    /// Gigabytes read.
    pub gb: f64,
    /// Gigabytes read per second.
    pub gb_s: f64,
    /// Different experts that a layer ran in a pass, on average; absent without experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distinct_experts: Option<f64>,
    /// Acceptance per drafted token from which drafts of `T - 1` tokens pay; absent if none does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub break_even: Option<f64>,
}

/// Decoding with drafts of a drafter, or that are accepted with a planted probability, beside plain decoding.
#[derive(Serialize)]
pub struct DraftedSpeed {
    /// Probability that a drafted token is the right one; absent for the drafter's own tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub planted: Option<f64>,
    /// Number of tokens.
    pub tokens: usize,
    /// Tokens per second without drafts.
    pub plain_tok_s: f64,
    /// Tokens per second.
    pub tok_s: f64,
    /// Speed over the speed of plain decoding: the median of pairs measured in turn.
    pub gain: f64,
    /// Counts of the last pair.
    pub verifier_calls: u64,
    /// Drafted tokens.
    pub drafted: u64,
    /// Drafted tokens that were accepted.
    pub accepted: u64,
    /// Passes without a draft.
    pub fallbacks: u64,
    /// Counts by source, with a drafter.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourceReport>,
}
