//! Merges from the scores of tokens.
//!
//! SentencePiece and llama.cpp (`llm_tokenizer_spm`) join the two neighbours whose joined text is the token with the
//! best score, the leftmost of equals, until no neighbours make a token. A list of merges does the same if it has each
//! way to cut a token into two tokens, best score first:
//! ```text
//! score    -1 ▁t    -2 he    -3 ▁the            merges   ▁ t    h e    ▁t he
//! ```
//! Only tokens of equal scores can differ, since merges know no equals. Files have them for runs of one character (16 of
//! Llama 2's), and for tokens that are found before anything is merged.

use super::super::metadata::{Metadata, TOKENS};

use crate::Result;
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::HashMap;

const SCORES: &str = "tokenizer.ggml.scores";
/// Most bytes that are looked up to cut all tokens: a token of n bytes takes n^2. Gemma's take 30 million.
const MAX_LOOKUPS: u64 = 1 << 30;
/// Most merges for each token, besides [`FREE_MERGES`]. Llama's and Gemma's tokens have two.
const MERGES_PER_TOKEN: usize = 4;
/// Merges of any vocabulary: the runs of 300 equal characters have 45 thousand.
const FREE_MERGES: usize = 1 << 16;

/// Makes the merges of all tokens.
pub fn merges(m: Metadata<'_>, tokens: &[&str], ids: &HashMap<&str, usize>) -> Result<Vec<Value>> {
    let scores = m.needed(SCORES, m.numbers(SCORES, tokens.len())?)?;
    let most = FREE_MERGES + MERGES_PER_TOKEN * tokens.len();
    let mut lookups = 0u64;
    // (token, bytes of its left part)
    let mut cuts: Vec<(usize, usize)> = Vec::new();
    for (id, token) in tokens.iter().enumerate() {
        let refused = |what: &str| {
            let start = token.chars().take(16).collect::<String>();
            m.unsupported(TOKENS, format!("has `{}` as {id}, and {what}", start.escape_debug()))
        };
        lookups = lookups.saturating_add((token.len() as u64).saturating_pow(2));
        if lookups > MAX_LOOKUPS {
            return Err(refused("tokens this long take too long to cut"));
        }
        for (at, _) in token.char_indices().skip(1) {
            if ids.contains_key(&token[..at]) && ids.contains_key(&token[at..]) {
                cuts.push((id, at));
            }
        }
        if cuts.len() > most {
            return Err(refused("the tokens up to it make more merges than 4 for each"));
        }
    }
    // Of equal scores longer parts come first: then the leftmost run of one character grows to its end.
    let order = |&(id, at): &(usize, usize)| {
        let [left, right] = [&tokens[id][..at], &tokens[id][at..]].map(|part| Reverse(part.chars().count()));
        (Reverse(ordered(scores[id])), left, right, id)
    };
    cuts.sort_by_cached_key(order);
    Ok(cuts.into_iter().map(|(id, at)| json!([tokens[id][..at], tokens[id][at..]])).collect())
}

/// Returns a finite number as an integer of the same order.
fn ordered(score: f64) -> i64 {
    // Adding zero makes -0 equal to 0.
    let bits = (score + 0.0).to_bits() as i64;
    if bits < 0 { i64::MIN - bits } else { bits }
}
