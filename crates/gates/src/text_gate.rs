//! The text gate: compares a bundle's predictions with those of its checkpoint in f32 over a text.
//!
//! ```text
//! windows of the text  --- checkpoint in f32 --->  p, logits after each token
//!                      --- bundle, as it runs -->  q
//! KL = sum p ln(p / q)       mean and 99th percentile; share of tokens where both find the same token best
//! ratio of perplexities      exp(mean of ln p(next) - ln q(next)), with an interval over the windows' means
//! ```
//! A single position says little: a router that changes its mind at a near tie moves one position far, and costs
//! nothing on average. A damaged matrix moves many.

use crate::golden_gate::{LEARNED, divergence};
use crate::perplexity::{Likelihood, each_window};
use anemoe_convert::checkpoint::Checkpoint;
use anemoe_runtime::model::{Logits, Model};
use anemoe_runtime::sampler::argmax;
use anemoe_runtime::{Error, Result};
use serde::Serialize;

/// Tokens of the built-in text that the gate predicts.
pub const TOKENS: usize = 2048;
/// Most tokens of a window, the starting token included.
pub const WINDOW: usize = 128;

/// Bounds of the text gate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TextBounds {
    /// Largest mean divergence in nats.
    pub mean_kl: f64,
    /// Largest divergence in nats that 99 % of the tokens have.
    pub p99_kl: f64,
    /// Least share of tokens after which both find the same token the most probable.
    pub top1_agreement: f64,
    /// Largest lower end of the interval of the ratio of perplexities.
    pub perplexity_ratio: f64,
}

impl Default for TextBounds {
    /// Returns the bounds of docs/gates.md, which has the measurements behind them.
    fn default() -> TextBounds {
        TextBounds { mean_kl: 0.05, p99_kl: 0.5, top1_agreement: 0.8, perplexity_ratio: 1.05 }
    }
}

/// Result of the text gate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TextGate {
    /// True if every figure is within its bound.
    pub pass: bool,
    /// Figures outside their bounds.
    pub outside: Vec<&'static str>,
    /// Name of the text: the built-in one, a file, or spread tokens for a checkpoint without a tokenizer.
    pub text: String,
    /// Number of predictions that are compared: those after all tokens but the first and the last of each window.
    pub tokens: usize,
    /// Mean Kullback-Leibler divergence of the next token's distribution from the checkpoint's, in nats.
    pub mean_kl: f64,
    /// Divergence that 99 % of the predictions do not exceed, in nats.
    pub p99_kl: f64,
    /// Share of the predictions where the same token is the most probable.
    pub top1_agreement: f64,
    /// Perplexity of the bundle.
    pub perplexity: f64,
    /// Perplexity of the checkpoint.
    pub reference_perplexity: f64,
    /// Ratio of the two.
    pub perplexity_ratio: f64,
    /// Interval in which the ratio lies with a probability of 95 %, by the spread of the windows.
    pub perplexity_ratio_interval: [f64; 2],
    /// Bounds of the figures.
    pub bounds: TextBounds,
    /// True if the checkpoint predicts the text better than chance by [`LEARNED`] nats per token. Random weights do
    /// not, and their divergence is chaos.
    pub learned: bool,
}

/// Text of the gate, as windows of tokens; without windows where no gate runs.
#[derive(Default)]
pub struct GateText {
    /// Windows of at least two tokens.
    pub windows: Vec<Vec<u32>>,
    /// Name of the text, see [`TextGate::text`].
    pub name: String,
}

/// Compares a bundle's predictions over a text with its checkpoint's. `progress` is called after each layer of the
/// checkpoint in each window.
///
/// # Errors
/// A window does not fit the model, the checkpoint cannot be read, or a package fails.
pub fn gate(
    model: &Model,
    checkpoint: &Checkpoint,
    text: &GateText,
    bounds: TextBounds,
    progress: &mut dyn FnMut(),
) -> Result<TextGate> {
    let (mut own, mut reference) = (Likelihood::default(), Likelihood::default());
    let (mut kl, mut equal, mut failed) = (Vec::new(), 0usize, None);
    // Mean of ln p(next) - ln q(next), and the tokens, of each window.
    let mut windows: Vec<(f64, f64)> = Vec::new();
    let mut sequence = model.sequence();
    let mut compare = |window: &[u32], p: Vec<Vec<f32>>| {
        sequence.clear();
        let q = match model.append(&mut sequence, window, Logits::All, None) {
            Ok(q) => q,
            Err(e) => return failed = failed.take().or(Some(e)),
        };
        let mut of_window = (Likelihood::default(), Likelihood::default());
        of_window.0.add(window, &q);
        of_window.1.add(window, &p);
        let tokens = of_window.0.tokens as f64;
        windows.push(((of_window.0.nll - of_window.1.nll) / tokens, tokens));
        own.join(of_window.0);
        reference.join(of_window.1);
        // The prediction after the first token is the same in every window, and would count again and again.
        for (q, p) in q.iter().zip(&p).take(window.len() - 1).skip(1) {
            kl.push(divergence(p, q));
            equal += usize::from(argmax(q) == argmax(p));
        }
    };
    each_window(checkpoint, None, &text.windows, progress, &mut compare)?;
    if let Some(e) = failed {
        return Err(e);
    }
    if kl.is_empty() {
        return Err(Error::input(format!("text {}: windows of two tokens say nothing", text.name)));
    }
    let tokens = kl.len();
    let vocab = model.chain().model.vocab_size as f64;
    // What is not a number sorts last.
    kl.sort_by(f64::total_cmp);
    let (ratio, interval) = ratio_of(&windows);
    let mut gate = TextGate {
        pass: true,
        outside: Vec::new(),
        text: text.name.clone(),
        tokens,
        mean_kl: kl.iter().sum::<f64>() / tokens as f64,
        p99_kl: kl[((tokens as f64 * 0.99) as usize).min(tokens - 1)],
        top1_agreement: equal as f64 / tokens as f64,
        perplexity: own.perplexity(),
        reference_perplexity: reference.perplexity(),
        perplexity_ratio: ratio,
        perplexity_ratio_interval: interval,
        bounds,
        learned: vocab.ln() - reference.perplexity().ln() >= LEARNED,
    };
    gate.judge();
    Ok(gate)
}

impl TextGate {
    /// Tells whether a bundle passes: also where the checkpoint has not learned to predict text, unless a prediction is
    /// not a number.
    pub fn is_good_enough(&self) -> bool {
        self.pass || !self.learned && self.mean_kl.is_finite()
    }

    /// Compares the figures with their bounds. A figure that is not a number is outside.
    fn judge(&mut self) {
        let b = self.bounds;
        let all = [
            ("mean_kl", self.mean_kl <= b.mean_kl),
            ("p99_kl", self.p99_kl <= b.p99_kl),
            ("top1_agreement", self.top1_agreement >= b.top1_agreement),
            ("perplexity_ratio", self.perplexity_ratio_interval[0] <= b.perplexity_ratio),
        ];
        self.outside = all.iter().filter(|(_, is_within)| !is_within).map(|(name, _)| *name).collect();
        self.pass = self.outside.is_empty();
    }
}

/// Returns `exp` of the mean of windows' values, weighed by their tokens, and its interval of 95 %: 1.96 standard errors
/// to both sides.
fn ratio_of(windows: &[(f64, f64)]) -> (f64, [f64; 2]) {
    let tokens: f64 = windows.iter().map(|w| w.1).sum();
    let mean = windows.iter().map(|w| w.0 * w.1).sum::<f64>() / tokens;
    let spread: f64 = windows.iter().map(|w| (w.1 * (w.0 - mean)).powi(2)).sum();
    let n = windows.len() as f64;
    let error = if n > 1.0 { (spread * n / (n - 1.0)).sqrt() / tokens } else { 0.0 };
    (mean.exp(), [(mean - 1.96 * error).exp(), (mean + 1.96 * error).exp()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_shrinks_with_the_windows_and_holds_the_ratio() {
        let (one, alone) = ratio_of(&[(0.01, 127.0)]);
        assert_eq!(alone, [one, one]);
        let of = |n: usize| {
            let windows: Vec<(f64, f64)> = (0..n).map(|i| (0.02 * (i % 2) as f64, 127.0)).collect();
            ratio_of(&windows)
        };
        let ((few, a), (many, b)) = (of(4), of(64));
        assert!((few.ln() - 0.01).abs() < 1e-12 && (many.ln() - 0.01).abs() < 1e-12);
        assert!(a[0] < b[0] && b[0] < many && many < b[1] && b[1] < a[1]);
        // 64 windows of standard deviation 0.01 (0.01008 with n - 1): error 0.00126.
        assert!(((b[1] / many).ln() - 1.96 * 0.00126).abs() < 1e-5);
    }

    #[test]
    fn every_figure_has_its_bound_and_no_number_is_outside() {
        let good = TextGate {
            pass: false,
            outside: Vec::new(),
            text: "built-in".into(),
            tokens: 2,
            mean_kl: 0.01,
            p99_kl: 0.1,
            top1_agreement: 0.95,
            perplexity: 10.0,
            reference_perplexity: 10.0,
            perplexity_ratio: 1.0,
            perplexity_ratio_interval: [0.99, 1.01],
            bounds: TextBounds::default(),
            learned: true,
        };
        let outside = |change: &dyn Fn(&mut TextGate)| {
            let mut gate = good.clone();
            change(&mut gate);
            gate.judge();
            assert_eq!(gate.pass, gate.outside.is_empty());
            gate.outside
        };
        assert!(outside(&|_| ()).is_empty());
        assert_eq!(outside(&|g| g.mean_kl = 0.06), ["mean_kl"]);
        assert_eq!(outside(&|g| g.p99_kl = f64::NAN), ["p99_kl"]);
        assert_eq!(outside(&|g| g.top1_agreement = 0.79), ["top1_agreement"]);
        assert_eq!(outside(&|g| g.perplexity_ratio_interval = [1.06, 1.2]), ["perplexity_ratio"]);
    }
}
