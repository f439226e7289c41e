//! Cuts text into windows, and measures how well a model predicts it.

use crate::reference::{DecoderForward, Probe};
use anemoe_convert::checkpoint::Checkpoint;
use anemoe_convert::models::Decoder;
use anemoe_runtime::model::{Logits, Model};
use serde::Serialize;

/// Most tokens that go through a layer together; a longer window goes alone.
const TOKENS: usize = 8192;

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

    /// Adds the likelihood of other tokens.
    pub fn join(&mut self, other: Likelihood) {
        self.tokens += other.tokens;
        self.nll += other.nll;
    }

    /// Adds the likelihood of a window's tokens, given the logits `[T, vocab]` after each of them.
    pub fn add(&mut self, window: &[u32], logits: &[Vec<f32>]) {
        for (row, &next) in logits.iter().zip(&window[1..]) {
            self.tokens += 1;
            self.nll += log_sum_exp(row) - f64::from(row[next as usize]);
        }
    }
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
/// Fails like [`crate::reference::run`].
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

/// Runs each window through a checkpoint from an empty context, and hands the logits `[T, vocab]` to `each`. Windows
/// go through a layer together, so that its weights are read once.
///
/// # Errors
/// Fails like [`crate::reference::run`].
pub fn each_window(
    checkpoint: &Checkpoint,
    probe: Option<&Probe>,
    windows: &[Vec<u32>],
    progress: &mut dyn FnMut(),
    each: &mut EachWindow<'_>,
) -> anemoe_convert::Result<()> {
    let mut model = DecoderForward::open(checkpoint, probe)?;
    check_windows(&model.decoder, windows)?;
    let mut rest = windows;
    while !rest.is_empty() {
        let mut tokens = 0;
        let fitting = rest.iter().take_while(|w| {
            tokens += w.len();
            tokens <= TOKENS
        });
        let (some, behind) = rest.split_at(fitting.count().max(1));
        rest = behind;
        let lengths: Vec<usize> = some.iter().map(Vec::len).collect();
        let (mut s, mut router) = (model.embed(&some.concat())?, None);
        for l in 0..model.decoder.layers.len() {
            model.layer_of_windows(l, &lengths, &mut s, &mut router)?;
            some.iter().for_each(|_| progress());
        }
        let mut x = model.head_input(&s)?;
        for window in some {
            let behind = x.split_off(window.len());
            each(window, model.logits(&x)?);
            x = behind;
        }
    }
    Ok(())
}

/// Checks that windows of token ids fit a model.
///
/// # Errors
/// A token is outside the vocabulary, or a window has more tokens than the model has positions.
pub fn check_windows(decoder: &Decoder, windows: &[Vec<u32>]) -> anemoe_convert::Result<()> {
    for window in windows {
        if let Some(id) = window.iter().find(|&&id| id as usize >= decoder.vocab) {
            return Err(anemoe_convert::Error::usage(format!(
                "token {id} is not in the vocabulary of {} tokens",
                decoder.vocab
            )));
        }
        if window.len() > decoder.positions {
            return Err(anemoe_convert::Error::usage(format!(
                "windows of {} tokens exceed the model's {} positions",
                window.len(),
                decoder.positions
            )));
        }
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
