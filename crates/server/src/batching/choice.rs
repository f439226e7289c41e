//! Chooses a token from its row of logits.

use crate::grammar::AnswerGrammar;
use anemoe_runtime::sampler::{Sampler, log_sum_exp, most_probable};

/// A chosen token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChosenToken {
    /// Id of the token.
    pub id: u32,
    /// Natural logarithm of its probability, before biases, penalties and temperature; `None` unless wanted.
    pub logprob: Option<f32>,
    /// Most probable tokens with their logarithms, in descending order.
    pub top: Vec<(u32, f32)>,
}

/// Chooses the next token with the sampler, among the tokens that the grammar allows. `logprobs` is the number of
/// alternatives to report.
///
/// # Errors
/// The grammar fails, or allows no token.
pub fn choose(
    row: &mut [f32],
    sampler: &mut Sampler,
    grammar: Option<&mut AnswerGrammar>,
    logprobs: Option<usize>,
) -> Result<ChosenToken, String> {
    // Of all tokens, also of those that the grammar forbids.
    let probabilities = logprobs.map(|most| (log_sum_exp(row), most_probable(row, most)));
    if let Some(grammar) = grammar {
        let mask = grammar.mask()?;
        let mut any = false;
        for (id, logit) in row.iter_mut().enumerate() {
            match id < mask.len() && mask.get(id) {
                true => any = true,
                false => *logit = f32::NEG_INFINITY,
            }
        }
        if !any {
            return Err("no token fits".into());
        }
    }
    let id = sampler.next(row) as u32;
    let mut choice = ChosenToken { id, logprob: None, top: Vec::new() };
    if let Some((log, top)) = probabilities {
        let logprob = |logit: f32| (f64::from(logit) - log) as f32;
        choice.logprob = row.get(id as usize).map(|&logit| logprob(logit));
        choice.top = top.into_iter().map(|(id, logit)| (id, logprob(logit))).collect();
    }
    Ok(choice)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_runtime::sampler::Sampling;

    #[test]
    fn probabilities_are_those_of_all_tokens() {
        let mut row = [1.0, 3.0, 2.0, -1.0];
        let choice = choose(&mut row, &mut Sampler::new(Sampling::GREEDY, &[], &[]), None, Some(2)).unwrap();
        let sum: f32 = [1.0f32, 3.0, 2.0, -1.0].iter().map(|v| v.exp()).sum();
        assert_eq!(choice.id, 1);
        assert!((choice.logprob.unwrap() - (3.0 - sum.ln())).abs() < 1e-6);
        assert_eq!(choice.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 2]);
        let none =
            choose(&mut [0.0, 1.0], &mut Sampler::new(Sampling::GREEDY, &[], &[]), None, None).unwrap();
        assert_eq!(none, ChosenToken { id: 1, ..ChosenToken::default() });
    }
}
