//! The golden gate: compares a bundle with the golden of its checkpoint.

use crate::perplexity::log_sum_exp;
use crate::reference::Golden;
use anemoe_bundle::Chain;
use anemoe_runtime::cpu::{CpuBackend, Options, Precision, Products};
use anemoe_runtime::model::{Logits, Model};
use anemoe_runtime::sampler::argmax;
use anemoe_runtime::{Error, Result};
use serde::Serialize;
use std::path::Path;

/// Cosine that the median of all positions and steps has to reach. One position decides nothing: a router that turns at
/// a near tie moves it to 0.85, and the text after it is as good.
pub const COSINE_BOUND: f64 = 0.97;

/// One step in so many may choose another token than the golden beyond a near tie.
const STEPS_PER_WRONG: usize = 8;

/// Lead of the golden's best logit below which the golden's choice is a near tie: the second token is at least
/// e^-0.5, about 0.61, times as probable. A cosine of 0.97 allows logits to move by more.
pub const NEAR_TIE: f32 = 0.5;

/// Nats per token: a model that predicts a text less than this much better than chance has not learned from any text.
pub const LEARNED: f64 = 0.5;

/// Result of the golden gate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GoldenGate {
    /// True if both runs pass: with the default arithmetic, and with results rounded to fp16.
    pub pass: bool,
    /// Run with the default arithmetic of `generate`, keys and values in f32: it shows the changes by compression and by the form of
    /// the programs. `generate` rounds keys and values to fp16, which can decide between tokens that are nearly equal.
    #[serde(flatten)]
    pub usual: Validation,
    /// The same run with exact products; absent on a device, and where no product differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exact: Option<ExactRun>,
    /// Run with every result rounded to fp16, as on the device.
    pub fp16: Rounded,
}

/// Agreement that exact products would give.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExactRun {
    /// Lowest cosine of all positions and steps.
    pub min_cosine: f64,
    /// Mean Kullback-Leibler divergence, in nats, as [`Validation::mean_kl`].
    pub mean_kl: f64,
    /// True if the bundle's own greedy continuation equals the golden's.
    pub tokens_match: bool,
}

/// Result of a run whose results were rounded to fp16.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rounded {
    /// True if all logits are numbers, and the median reaches the threshold. A near tie of experts that rounding
    /// turns costs a few positions, and is no fault of the format.
    pub pass: bool,
    /// Indices of positions, and then of steps, whose logits overflow or are not numbers.
    pub not_finite: Vec<usize>,
    /// Least median cosine that passes, at most [`COSINE_BOUND`].
    pub threshold: f64,
    /// Lowest cosine of all positions and steps.
    pub min_cosine: f64,
    /// Median cosine of all positions and steps.
    pub median_cosine: f64,
    /// Steps whose choice differs from the golden's.
    pub wrong_choices: Vec<WrongChoice>,
    /// True if the bundle's own greedy continuation equals the golden's.
    pub tokens_match: bool,
    /// Token that the continuation repeats to its end, see [`Validation::repeated`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repeated: Option<RepeatedToken>,
}

/// Runs the golden's prompt and continuation through the bundle on this CPU: as `generate` does, with exact products, and
/// rounded to fp16.
///
/// # Errors
/// The bundle is wrong, or [`validate`] fails.
pub fn gate(bundle: &Path, golden: &Golden, threshold: f64) -> Result<GoldenGate> {
    gate_with(&|backend| Model::open(bundle, backend), golden, threshold)
}

/// Runs the golden gate on models that `open` opens.
///
/// # Errors
/// Fails like [`gate`].
pub fn gate_with(
    open: &dyn Fn(&CpuBackend) -> Result<Model>,
    golden: &Golden,
    threshold: f64,
) -> Result<GoldenGate> {
    let run = |options, threshold| validate(&open(&CpuBackend { options })?, golden, threshold);
    let f32s = |products| Options { precision: Precision::Fp32, products, ..Options::default() };
    let exact = run(f32s(Products::Exact), threshold)?;
    let usual = run(f32s(Products::Usual), threshold)?;
    // The device computes products with zero weights, too, and zero times an overflow is not a number.
    let device = Options { precision: Precision::Fp16, skip_zero: false, ..Options::default() };
    let rounded = run(device, threshold.min(COSINE_BOUND))?;
    let exact = (usual.mean_kl != exact.mean_kl).then_some(ExactRun {
        min_cosine: exact.min_cosine,
        mean_kl: exact.mean_kl,
        tokens_match: exact.tokens_match,
    });
    Ok(judge(usual, exact, rounded))
}

/// Runs the golden gate on a model that a device runs. The one run on the device counts as both runs.
///
/// # Errors
/// Fails like [`validate`].
pub fn gate_on_device(model: &Model, golden: &Golden, threshold: f64) -> Result<GoldenGate> {
    let run = validate(model, golden, threshold)?;
    let rounded = Validation { threshold: threshold.min(COSINE_BOUND), ..run.clone() };
    Ok(judge(run, None, rounded))
}

/// Joins the usual run and the rounded run into one result.
fn judge(usual: Validation, exact: Option<ExactRun>, rounded: Validation) -> GoldenGate {
    let all = rounded.positions.iter().map(|p| p.agreement).chain(rounded.decode.iter().map(|d| d.agreement));
    let not_finite: Vec<usize> = all.enumerate().filter(|(_, a)| a.kl.is_none()).map(|(i, _)| i).collect();
    let median_cosine = rounded.median_cosine;
    let fp16 = Rounded {
        pass: not_finite.is_empty() && median_cosine >= rounded.threshold && rounded.repeated.is_none(),
        not_finite,
        threshold: rounded.threshold,
        min_cosine: rounded.min_cosine,
        median_cosine,
        wrong_choices: rounded.wrong_choices,
        tokens_match: rounded.tokens_match,
        repeated: rounded.repeated,
    };
    GoldenGate { pass: usual.ok && fp16.pass, usual, exact, fp16 }
}

/// Checks that a golden can be compared with a bundle.
///
/// # Errors
/// Vocabulary, context or the width of the hidden states does not fit.
pub fn fits(golden: &Golden, chain: &Chain) -> std::result::Result<(), String> {
    let model = &chain.model;
    let mut rows = golden.logits_full.iter().chain(&golden.next_token_logits);
    if golden.prompt_ids.is_empty() || !rows.all(|r| r.len() == model.vocab_size) {
        return Err(format!("logits: not of a vocabulary of {} tokens, as the model's", model.vocab_size));
    }
    if golden.prompt_ids.len() > model.max_context {
        let n = golden.prompt_ids.len();
        return Err(format!("prompt: {n} tokens where the caches hold {}: --max-context", model.max_context));
    }
    let states = &golden.hidden_states;
    let fit = states.iter().flatten().all(|h| h.len() == model.hidden_size);
    if !states.is_empty() && (states.len() != model.num_layers + 1 || !fit) {
        let (layers, width) = (model.num_layers, model.hidden_size);
        return Err(format!("hidden_states: not of {layers} layers of width {width}, as the model's"));
    }
    Ok(())
}

/// Computes how much better than chance the checkpoint predicts the golden's prompt: the logarithm of the
/// vocabulary's size less the mean surprise per token, in nats. Random weights give 0 or less; their logits differ by
/// chaos, not by quality. Returns `None` for a prompt of one token.
pub fn better_than_chance(golden: &Golden) -> Option<f64> {
    let next = golden.prompt_ids.iter().skip(1);
    let surprise = |(row, &id): (&Vec<f32>, &u32)| Some(log_sum_exp(row) - f64::from(*row.get(id as usize)?));
    let all: Option<Vec<f64>> = golden.logits_full.iter().zip(next).map(surprise).collect();
    let all = all.filter(|all| !all.is_empty())?;
    let vocab = golden.logits_full.first()?.len();
    Some((vocab as f64).ln() - all.iter().sum::<f64>() / all.len() as f64)
}

/// Result of one run of a golden through a bundle.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Validation {
    /// True if the median cosine reaches the threshold, at most one choice of eight is not the golden's beyond near
    /// ties, and the bundle's own continuation does not end in one repeated token.
    #[serde(skip)]
    pub ok: bool,
    /// Cosine that the median of all positions and steps has to reach.
    pub threshold: f64,
    /// Lowest cosine of all positions and steps.
    pub min_cosine: f64,
    /// Median cosine of all positions and steps.
    pub median_cosine: f64,
    /// Number of positions and steps below the threshold.
    pub below: usize,
    /// Mean Kullback-Leibler divergence of the next token's distribution from the golden's, in nats.
    pub mean_kl: f64,
    /// Share of positions and steps where the same token is the most probable.
    pub top1_agreement: f64,
    /// Agreement after each prompt token.
    pub positions: Vec<Position>,
    /// Agreement after each token of the golden's continuation, which the bundle is fed.
    pub decode: Vec<DecodeStep>,
    /// Steps whose choice differs from the golden's.
    pub wrong_choices: Vec<WrongChoice>,
    /// Number of these steps that are near ties.
    pub near_ties: usize,
    /// Margin of near ties, see [`NEAR_TIE`].
    pub near_tie_margin: f32,
    /// True if the bundle's own greedy continuation equals the golden's.
    pub tokens_match: bool,
    /// The bundle's own greedy continuation.
    pub generated_ids: Vec<u32>,
    /// The golden's continuation.
    pub expected_ids: Vec<u32>,
    /// Tokens of the bundle's own continuation that equal the golden's, up to the first that differs.
    pub tokens_equal: usize,
    /// Token that the bundle's own continuation repeats to its end, where the golden's does not: a failure, even if
    /// every choice is a near tie.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repeated: Option<RepeatedToken>,
}

/// Token that a continuation repeats to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RepeatedToken {
    /// Id of the token.
    pub token: u32,
    /// Step of the first repetition.
    pub from_step: usize,
    /// Number of repetitions.
    pub times: usize,
}

/// Repetitions of one token at the end of a long continuation that make it no text. For a continuation of n tokens:
/// half of n where that is fewer, at least [`LEAST_REPEATS`]; of two tokens both.
const REPEATS: usize = 8;
/// Fewest repetitions in a continuation of three and more tokens: two at the end prove nothing.
const LEAST_REPEATS: usize = 3;

impl RepeatedToken {
    /// Finds a token that `own` repeats to its end, where `reference` has no run of any token as long as the fewest
    /// that count.
    pub fn find(own: &[u32], reference: &[u32]) -> Option<RepeatedToken> {
        let &token = own.last()?;
        let times = own.iter().rev().take_while(|&&t| t == token).count();
        let longest = reference.chunk_by(|a, b| a == b).map(<[u32]>::len).max().unwrap_or(0);
        let least = match own.len() {
            0..=2 => 2,
            n => n.div_ceil(2).clamp(LEAST_REPEATS, REPEATS),
        };
        (times >= least && longest < least).then(|| RepeatedToken {
            token,
            from_step: own.len() - times,
            times,
        })
    }
}

/// Step at which the bundle chooses another token than the golden.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WrongChoice {
    /// Number of the step, from 0.
    pub step: usize,
    /// Token that the bundle chooses.
    pub chosen: u32,
    /// Token of the golden.
    pub expected: u32,
    /// Golden's best logit less its second best.
    pub margin: f32,
    /// True if the margin is below [`NEAR_TIE`].
    pub near_tie: bool,
}

/// Agreement of the bundle's logits with the golden's after the same tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Agreement {
    /// Cosine of the logits.
    pub cosine: f64,
    /// Kullback-Leibler divergence of the next token's distribution from the golden's, in nats; absent where the
    /// bundle's logits are no distribution.
    pub kl: Option<f64>,
    /// True if the same token is the most probable.
    pub top1: bool,
}

impl Agreement {
    fn of(own: &[f32], reference: &[f32]) -> Agreement {
        let kl = Some(divergence(reference, own)).filter(|kl| kl.is_finite());
        Agreement { cosine: cosine(own, reference), kl, top1: argmax(own) == argmax(reference) }
    }
}

/// Agreement at a prompt position.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Position {
    /// Number of the position, from 0.
    pub pos: usize,
    /// Agreement with the golden.
    #[serde(flatten)]
    pub agreement: Agreement,
}

/// Agreement at a decode step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DecodeStep {
    /// Number of the step, from 0: the tokens of the continuation before these logits.
    pub step: usize,
    /// Agreement with the golden.
    #[serde(flatten)]
    pub agreement: Agreement,
}

/// Computes the Kullback-Leibler divergence of `softmax(other)` from `softmax(reference)`, in nats.
pub fn divergence(reference: &[f32], other: &[f32]) -> f64 {
    let (a, b) = (log_sum_exp(reference), log_sum_exp(other));
    let term = |(&x, &y): (&f32, &f32)| {
        let log = f64::from(x) - a;
        log.exp() * (log - (f64::from(y) - b))
    };
    reference.iter().zip(other).map(term).sum()
}

/// Computes the cosine of two vectors in f64. Two zero vectors give 1; a result that is not a number gives 0.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let (mut dot, mut aa, mut bb) = (0.0f64, 0.0f64, 0.0f64);
    for (&x, &y) in a.iter().zip(b) {
        let (x, y) = (f64::from(x), f64::from(y));
        dot += x * y;
        aa += x * x;
        bb += y * y;
    }
    if aa == 0.0 && bb == 0.0 {
        return 1.0;
    }
    let cosine = dot / (aa.sqrt() * bb.sqrt());
    if cosine.is_finite() { cosine } else { 0.0 }
}

/// Runs the golden's prompt and continuation through the bundle.
///
/// The bundle is fed the golden's continuation, so that a cosine means the same at every step, whatever token the
/// bundle would have chosen. If all its choices agree, they are its own continuation too; otherwise that continuation
/// is generated.
///
/// # Errors
/// The golden does not fit the bundle (vocabulary, context), or a package fails.
pub fn validate(model: &Model, golden: &Golden, threshold: f64) -> Result<Validation> {
    let vocab = model.chain().model.vocab_size;
    let fits = |row: &[f32]| row.len() == vocab;
    if golden.prompt_ids.is_empty() || !golden.logits_full.iter().all(|r| fits(r)) {
        return Err(Error::input(format!(
            "the golden file's logits are not for a vocabulary of {vocab} tokens"
        )));
    }
    let mut sequence = model.sequence();
    let prompt = model.append(&mut sequence, &golden.prompt_ids, Logits::All, None)?;
    let positions: Vec<Position> = prompt
        .iter()
        .zip(&golden.logits_full)
        .enumerate()
        .map(|(pos, (a, b))| Position { pos, agreement: Agreement::of(a, b) })
        .collect();

    let mut decode: Vec<DecodeStep> = Vec::new();
    let mut choices = Vec::new();
    let mut logits = prompt.last().cloned().unwrap_or_default();
    for (step, &expected) in golden.decode_tokens.iter().enumerate() {
        if let Some(reference) = golden.next_token_logits.get(step) {
            decode.push(DecodeStep { step, agreement: Agreement::of(&logits, reference) });
        }
        choices.push(argmax(&logits) as u32);
        if sequence.position() == model.chain().model.max_context {
            break;
        }
        logits = model.append(&mut sequence, &[expected], Logits::Last, None)?.pop().unwrap_or_default();
    }
    if let Some(reference) = golden.next_token_logits.get(golden.decode_tokens.len()) {
        let step = golden.decode_tokens.len();
        decode.push(DecodeStep { step, agreement: Agreement::of(&logits, reference) });
    }
    let expected_ids = golden.decode_tokens.clone();
    let wrong_choices: Vec<WrongChoice> = choices
        .iter()
        .zip(&expected_ids)
        .enumerate()
        .filter(|(_, (a, b))| a != b)
        .map(|(step, (&chosen, &expected))| {
            let margin = golden.next_token_logits.get(step).map_or(f32::INFINITY, |row| lead(row));
            WrongChoice { step, chosen, expected, margin, near_tie: margin < NEAR_TIE }
        })
        .collect();
    let tokens_match = choices == expected_ids;
    let generated_ids = if tokens_match { choices } else { greedy(model, golden, &prompt)? };
    let all: Vec<Agreement> =
        positions.iter().map(|p| p.agreement).chain(decode.iter().map(|d| d.agreement)).collect();
    let mut cosines: Vec<f64> = all.iter().map(|a| a.cosine).collect();
    cosines.sort_by(f64::total_cmp);
    let (min_cosine, median_cosine) = (cosines[0], cosines[cosines.len() / 2]);
    let share = |n: usize| n as f64 / all.len().max(1) as f64;
    let divergences: Vec<f64> = all.iter().filter_map(|a| a.kl).collect();
    let repeated = RepeatedToken::find(&generated_ids, &expected_ids);
    Ok(Validation {
        ok: median_cosine >= threshold
            && wrong_choices.iter().filter(|c| !c.near_tie).count() <= expected_ids.len() / STEPS_PER_WRONG
            && repeated.is_none(),
        threshold,
        min_cosine,
        median_cosine,
        below: cosines.iter().filter(|c| **c < threshold).count(),
        mean_kl: divergences.iter().sum::<f64>() / divergences.len().max(1) as f64,
        top1_agreement: share(all.iter().filter(|a| a.top1).count()),
        positions,
        decode,
        near_ties: wrong_choices.iter().filter(|c| c.near_tie).count(),
        wrong_choices,
        near_tie_margin: NEAR_TIE,
        tokens_match,
        tokens_equal: generated_ids.iter().zip(&expected_ids).take_while(|(a, b)| a == b).count(),
        generated_ids,
        expected_ids,
        repeated,
    })
}

/// Returns the largest value less the second largest.
fn lead(row: &[f32]) -> f32 {
    let best = argmax(row);
    let second =
        row.iter().enumerate().filter(|(i, _)| *i != best).map(|(_, v)| *v).fold(f32::NEG_INFINITY, f32::max);
    row.get(best).map_or(0.0, |v| v - second)
}

fn greedy(model: &Model, golden: &Golden, prompt: &[Vec<f32>]) -> Result<Vec<u32>> {
    let mut sequence = model.sequence();
    model.append(&mut sequence, &golden.prompt_ids, Logits::None, None)?;
    let mut logits = prompt.last().cloned().unwrap_or_default();
    let mut ids = Vec::new();
    while ids.len() < golden.decode_tokens.len() && sequence.position() < model.chain().model.max_context {
        let id = argmax(&logits) as u32;
        ids.push(id);
        logits = model.append(&mut sequence, &[id], Logits::Last, None)?.pop().unwrap_or_default();
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::{Golden, RepeatedToken, better_than_chance, cosine, divergence};

    #[test]
    fn one_token_again_and_again_is_found() {
        let found = |own: &[u32], reference: &[u32]| RepeatedToken::find(own, reference);
        let two = found(&[236881, 236881], &[669, 5279]).unwrap();
        assert_eq!((two.token, two.from_step, two.times), (236881, 0, 2));
        // No finding: the reference repeats too, the continuation is short, or the run ends before the end.
        assert_eq!(found(&[236881, 236881], &[669, 669]), None);
        assert_eq!(found(&[7], &[8]), None);
        assert_eq!(found(&[], &[]), None);
        assert_eq!(found(&[7, 7, 7, 8], &[1, 2, 3, 4]), None);
        // Half of a short continuation but at least three, and eight tokens of a long one.
        assert!(found(&[1, 2, 7, 7], &[1, 2, 3, 4]).is_none() && found(&[1, 2, 3, 7, 7], &[1; 0]).is_none());
        assert!(found(&[1, 7, 7, 7], &[1, 2, 3, 4]).is_some());
        let long = |times: usize| [(0..48 - times as u32).collect::<Vec<_>>(), vec![99; times]].concat();
        let text: Vec<u32> = (100..148).collect();
        assert_eq!(found(&long(7), &text), None);
        assert_eq!(found(&long(8), &text).map(|r| (r.from_step, r.times)), Some((40, 8)));
        // A run of one token anywhere in the reference permits one.
        assert_eq!(found(&long(20), &[vec![5; 8], text].concat()), None);
    }

    #[test]
    fn divergence_of_known_distributions() {
        // The distributions are 1/2, 1/2 and 1/4, 3/4.
        let found = divergence(&[0.0, 0.0], &[0.0, 3f32.ln()]);
        let expected = 0.5 * 2f64.ln() + 0.5 * (2.0f64 / 3.0).ln();
        assert!((found - expected).abs() < 1e-6, "{found} {expected}");
        assert!(divergence(&[1.0, 5.0], &[3.0, 7.0]).abs() < 1e-6);
    }

    #[test]
    fn chance_is_the_size_of_the_vocabulary() {
        let golden = |logits: Vec<f32>| Golden {
            prompt_ids: vec![0, 1, 1],
            logits_full: vec![logits; 3],
            next_token_logits: vec![],
            decode_tokens: vec![],
            hidden_states: vec![],
            router_index: vec![],
            router_states: vec![],
        };
        // Equal logits: chance. Probability 3/4 for the next token: ln 2 + ln 3/4 better. Probability 1/4: worse than chance.
        assert!(better_than_chance(&golden(vec![0.0, 0.0])).unwrap().abs() < 1e-9);
        let better = better_than_chance(&golden(vec![0.0, 3f32.ln()])).unwrap();
        assert!((better - 1.5f64.ln()).abs() < 1e-6, "{better}");
        assert!(better_than_chance(&golden(vec![3f32.ln(), 0.0])).unwrap() < 0.0);
        assert!(better_than_chance(&Golden { prompt_ids: vec![1], ..golden(vec![0.0, 0.0]) }).is_none());
    }

    #[test]
    fn cosine_of_extremes() {
        assert_eq!(cosine(&[0.0, 0.0], &[0.0, 0.0]), 1.0);
        assert_eq!(cosine(&[1.0, 0.0], &[0.0, 0.0]), 0.0);
        assert_eq!(cosine(&[f32::NAN, 0.0], &[1.0, 0.0]), 0.0);
        assert!((cosine(&[1.0, 2.0], &[-2.0, -4.0]) + 1.0).abs() < 1e-12);
    }
}
