//! Cuts text into windows, and measures how well a model predicts it.

use crate::reference::{self, Probe, RunOptions};
use anemoe_convert::checkpoint::Checkpoint;
use anemoe_runtime::model::{Logits, Model};
use anemoe_runtime::sampler::argmax;
use serde::Serialize;

/// Negative log-likelihood of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Likelihood {
    /// Number of predicted tokens: all but the first of each window.
    pub tokens: u64,
    /// Sum of the negative log-likelihoods of these tokens, in nats.
    pub nll: f64,
}

impl Likelihood {
    /// Returns `exp` of the mean negative log-likelihood; not a number without tokens.
    pub fn perplexity(&self) -> f64 {
        (self.nll / self.tokens as f64).exp()
    }

    /// Adds the likelihood of a window's tokens, given the logits `[T, vocab]` after each of them.
    pub fn add(&mut self, window: &[u32], logits: &[Vec<f32>]) {
        for (row, &next) in logits.iter().zip(&window[1..]) {
            self.tokens += 1;
            self.nll += log_sum_exp(row) - f64::from(row[next as usize]);
        }
    }
}

/// Divergence of one model's predictions from another's.
#[derive(Clone, Debug, Default)]
pub struct Divergence {
    /// Kullback-Leibler divergence after each token but the first of a window, in nats.
    kl: Vec<f64>,
    /// Tokens after which the same token is the most probable.
    same_best: u64,
    /// Likelihood of the text by the other model.
    pub reference: Likelihood,
}

impl Divergence {
    /// Adds a window's logits `[T, vocab]`. The prediction after the first token is left out: it is the same in every
    /// window, and would count again and again.
    fn add(&mut self, window: &[u32], own: &[Vec<f32>], reference: &[Vec<f32>]) {
        self.reference.add(window, reference);
        for (own, reference) in own.iter().zip(reference).take(window.len() - 1).skip(1) {
            let (all, of) = (log_sum_exp(reference), log_sum_exp(own));
            let term = |(p, q): (&f32, &f32)| {
                let p = f64::from(*p) - all;
                p.exp() * (p - (f64::from(*q) - of))
            };
            self.kl.push(reference.iter().zip(own).map(term).sum());
            self.same_best += u64::from(argmax(own) == argmax(reference));
        }
    }

    /// Returns the mean divergence in nats.
    pub fn mean(&self) -> f64 {
        self.kl.iter().sum::<f64>() / self.kl.len() as f64
    }

    /// Returns the divergence that a share of the tokens does not exceed.
    pub fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.kl.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get((share * sorted.len() as f64) as usize).or(sorted.last()).copied().unwrap_or(f64::NAN)
    }

    /// Returns the share of tokens after which both models find the same token the most probable.
    pub fn same_best(&self) -> f64 {
        self.same_best as f64 / self.kl.len() as f64
    }
}

/// Computes the divergence of a bundle's predictions from those of its checkpoint in f32, and its likelihood.
/// `progress` is called after each layer of the checkpoint in each window.
///
/// # Errors
/// Fails like [`each_window`] and [`bundle_likelihood`].
pub fn divergence(
    model: &Model,
    checkpoint: &Checkpoint,
    windows: &[Vec<u32>],
    progress: &mut dyn FnMut(),
) -> anemoe_runtime::Result<(Likelihood, Divergence)> {
    let (mut own, mut all, mut failed) = (Likelihood::default(), Divergence::default(), None);
    let mut sequence = model.sequence();
    each_window(checkpoint, None, windows, progress, &mut |window, reference| {
        sequence.clear();
        match model.append(&mut sequence, window, Logits::All, None) {
            Ok(logits) => {
                own.add(window, &logits);
                all.add(window, &logits, &reference);
            }
            Err(e) => failed = failed.take().or(Some(e)),
        }
    })?;
    failed.map_or(Ok((own, all)), Err)
}

/// Computes `ln(sum(exp(x)))`.
pub fn log_sum_exp(x: &[f32]) -> f64 {
    let max = f64::from(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + x.iter().map(|&v| (f64::from(v) - max).exp()).sum::<f64>().ln()
}

/// Cuts token ids into windows of at most `context` tokens, each started by `bos` where it is given. Takes at most
/// `limit` tokens of text. Leaves out a last window without a token to predict.
pub fn windows(ids: &[u32], bos: Option<u32>, context: usize, limit: usize) -> Vec<Vec<u32>> {
    let ids = match bos {
        Some(bos) if ids.first() == Some(&bos) => &ids[1..],
        _ => ids,
    };
    let ids = &ids[..ids.len().min(limit)];
    let text = context.saturating_sub(usize::from(bos.is_some())).max(1);
    ids.chunks(text)
        .map(|chunk| bos.into_iter().chain(chunk.iter().copied()).collect::<Vec<u32>>())
        .filter(|w| w.len() > 1)
        .collect()
}

/// Computes the likelihood of windows by a checkpoint in f32, with the weights that the probe replaces. `progress` is
/// called after each layer of each window.
///
/// # Errors
/// Fails like [`reference::run`].
pub fn checkpoint_likelihood(
    checkpoint: &Checkpoint,
    probe: Option<&Probe>,
    windows: &[Vec<u32>],
    progress: &mut dyn FnMut(),
) -> anemoe_convert::Result<Likelihood> {
    let mut total = Likelihood::default();
    each_window(checkpoint, probe, windows, progress, &mut |window, logits| {
        total.add(window, &logits);
    })?;
    Ok(total)
}

/// Function that takes a window and its logits `[T, vocab]`.
pub type EachWindow<'a> = dyn FnMut(&[u32], Vec<Vec<f32>>) + 'a;

/// Runs each window through a checkpoint from an empty context, and hands the logits `[T, vocab]` to `each`.
///
/// # Errors
/// Fails like [`reference::run`].
pub fn each_window(
    checkpoint: &Checkpoint,
    probe: Option<&Probe>,
    windows: &[Vec<u32>],
    progress: &mut dyn FnMut(),
    each: &mut EachWindow<'_>,
) -> anemoe_convert::Result<()> {
    let mut model = reference::open(checkpoint, probe)?;
    let limits = model.limits();
    for window in windows {
        if let Some(id) = window.iter().find(|&&id| id as usize >= limits.vocab) {
            return Err(anemoe_convert::Error::usage(format!(
                "token {id} is not in the vocabulary of {} tokens",
                limits.vocab
            )));
        }
        if window.len() > limits.positions {
            return Err(anemoe_convert::Error::usage(format!(
                "windows of {} tokens exceed the model's {} positions",
                window.len(),
                limits.positions
            )));
        }
        model.reset();
        let pass = model.forward(window, RunOptions::default(), progress)?;
        each(window, pass.logits);
    }
    Ok(())
}

/// Computes the likelihood of windows by a bundle. `progress` is called after each window.
///
/// # Errors
/// A token or a window does not fit the bundle, or a package fails.
pub fn bundle_likelihood(
    model: &Model,
    windows: &[Vec<u32>],
    progress: &mut dyn FnMut(),
) -> anemoe_runtime::Result<Likelihood> {
    let mut total = Likelihood::default();
    let mut sequence = model.sequence();
    for window in windows {
        sequence.clear();
        let logits = model.append(&mut sequence, window, Logits::All, None)?;
        total.add(window, &logits);
        progress();
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_start_with_bos_and_hold_the_text_once() {
        let ids = [2, 10, 11, 12, 13, 14];
        assert_eq!(windows(&ids, Some(2), 3, 100), [vec![2, 10, 11], vec![2, 12, 13], vec![2, 14]]);
        assert_eq!(windows(&ids[1..], None, 2, 100), [vec![10, 11], vec![12, 13]]);
        assert_eq!(windows(&ids, Some(2), 8, 3), [vec![2, 10, 11, 12]]);
        assert!(windows(&[], Some(2), 8, 3).is_empty());
    }

    #[test]
    fn divergence_of_known_distributions() {
        let mut d = Divergence::default();
        // Probabilities 1/4 and 3/4 against 1/2 and 1/2.
        let (even, row) = (vec![5.0, 5.0], vec![0.0, 3f32.ln()]);
        d.add(&[0, 1, 0, 1], &[even.clone(), row.clone(), even.clone(), even], &vec![row; 4]);
        let expected = 0.25 * 0.5f64.ln() + 0.75 * 1.5f64.ln();
        assert!((d.mean() - expected / 2.0).abs() < 1e-6);
        assert!((d.quantile(0.99) - expected).abs() < 1e-6 && d.quantile(0.0).abs() < 1e-6);
        assert_eq!((d.same_best(), d.reference.tokens), (0.5, 3));
    }

    #[test]
    fn likelihood_of_a_known_distribution() {
        let mut l = Likelihood::default();
        // Logits of the probabilities 1/4 and 3/4.
        let row = vec![0.0, 3f32.ln()];
        l.add(&[0, 1, 0], &[row.clone(), row.clone(), row]);
        assert_eq!(l.tokens, 2);
        assert!((l.nll - (-(0.75f64.ln()) - 0.25f64.ln())).abs() < 1e-6);
        assert!((l.perplexity() - (1.0 / (0.75f64 * 0.25)).sqrt()).abs() < 1e-6);
    }
}
