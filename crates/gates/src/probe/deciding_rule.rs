//! Rule that says at which positions of the probes the threshold has to be reached.

use crate::golden_gate::{LEARNED, better_than_chance};
use crate::reference::Golden;
use serde::Serialize;

/// Fewest predicted tokens by which a prompt shows that a model has not learned: the shortest prompt of a build's own
/// gates has 8 tokens. In a shorter prompt, one or two rare tokens decide the mean surprise.
const TELLING: usize = 7;

/// Rule that says at which positions the threshold has to be reached. Positions where a near tie of a router chose
/// another expert do not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DecidingRule {
    /// Every counted position.
    EveryPosition,
    /// Half of the counted positions: the model has not learned to predict the prompt, and the results of single
    /// positions are chance.
    Median,
}

impl DecidingRule {
    /// Chooses the rule, and returns it with the reason in words. The median needs evidence: weights that are random
    /// by their source, or a prompt of at least 8 tokens that the model predicts no better than chance.
    pub(super) fn choose(golden: Option<&Golden>, random_weights: bool) -> (DecidingRule, String) {
        let Some(golden) = golden else {
            return (DecidingRule::EveryPosition, "no prompt shows that the model has not learned".into());
        };
        let predicted = golden.prompt_ids.len().saturating_sub(1);
        let better = better_than_chance(golden);
        let by = better.map_or_else(String::new, |nats| {
            let than = if nats < 0.0 { "worse" } else { "better" };
            format!(", {:.2} nats per token {than} than chance", nats.abs())
        });
        match better {
            Some(nats) if nats >= LEARNED => {
                (DecidingRule::EveryPosition, format!("the model predicts the prompt{by}"))
            }
            _ if random_weights => {
                (DecidingRule::Median, format!("the weights are synthetic: single positions are chance{by}"))
            }
            None => (
                DecidingRule::EveryPosition,
                "a prompt of one token shows nothing of what the model has learned".into(),
            ),
            Some(_) if predicted < TELLING => (
                DecidingRule::EveryPosition,
                format!(
                    "the prompt has {predicted} predicted token{}{by}: fewer than {TELLING} do not show that the model has not \
                     learned, so no position is left out; where the weights are random, give a golden of {} tokens and more",
                    if predicted == 1 { "" } else { "s" },
                    TELLING + 1
                ),
            ),
            Some(_) => (
                DecidingRule::Median,
                format!(
                    "the model predicts the prompt little better than chance, or worse{by}, where {LEARNED} are wanted: its weights \
                     are random, or it has not learned such text"
                ),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a golden of `n` tokens out of 10; the logit of each next token is `logit`, of the others 0.
    fn golden(n: usize, logit: f32) -> Golden {
        let ids: Vec<u32> = (0..n as u32).collect();
        let row = |next: usize| (0..10).map(|i| if i == next { logit } else { 0.0 }).collect();
        Golden {
            logits_full: (0..n).map(|t| row(t + 1)).collect(),
            prompt_ids: ids,
            next_token_logits: vec![],
            decode_tokens: vec![],
            hidden_states: vec![],
            router_index: vec![],
            router_states: vec![],
        }
    }

    #[test]
    fn the_median_needs_evidence() {
        let choose =
            |n: usize, logit: f32, random: bool| DecidingRule::choose(Some(&golden(n, logit)), random);
        for (n, logit, random, rule, says) in [
            (9, 4.0, false, DecidingRule::EveryPosition, "better than chance"),
            (9, 4.0, true, DecidingRule::EveryPosition, "better than chance"),
            (9, -1.0, false, DecidingRule::Median, "nats per token worse than chance"),
            (8, -1.0, false, DecidingRule::Median, "not learned such text"),
            // Two surprising tokens happen to a trained model, too.
            (7, -1.0, false, DecidingRule::EveryPosition, "6 predicted tokens, "),
            (2, -1.0, false, DecidingRule::EveryPosition, "1 predicted token, "),
            (2, -1.0, true, DecidingRule::Median, "synthetic"),
            (1, -1.0, false, DecidingRule::EveryPosition, "a prompt of one token"),
        ] {
            let (found, why) = choose(n, logit, random);
            assert!(found == rule && why.contains(says), "{n} {logit} {random}: {found:?} {why}");
        }
        assert_eq!(DecidingRule::choose(None, true).0, DecidingRule::EveryPosition);
    }
}
