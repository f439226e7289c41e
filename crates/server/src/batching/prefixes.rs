//! Sequences of ended answers and of prefixes that several prompts share.

use anemoe_runtime::Result;
use anemoe_runtime::model::{MOST_RUN_AGAIN, Model, Sequence};
use std::collections::VecDeque;

/// Fewest shared tokens for which a sequence is reused.
pub const MIN_SHARED_TOKENS: usize = 16;
/// Recent prompts that are compared to find shared prefixes.
const RECENT: usize = 32;

/// A sequence that no job runs.
struct KeptPrefix {
    sequence: Sequence,
    ids: Vec<u32>,
    /// True if several prompts share it: jobs run copies, and it stays.
    is_shared: bool,
}

/// Kept sequences with which prompts may begin. The least recently used goes first; sequences of one prompt go before
/// shared ones.
pub struct Prefixes {
    most: usize,
    /// Kept sequences, the newest last.
    kept: VecDeque<KeptPrefix>,
    recent: VecDeque<Vec<u32>>,
}

/// Sequence that a prompt continues.
pub struct Found {
    /// Sequence of exactly the prompt's first tokens.
    pub sequence: Sequence,
    /// Length at which a copy should be kept, since a recent prompt diverges there.
    pub parts_at: Option<usize>,
}

fn shared(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl Prefixes {
    /// Makes a store of at most `most` sequences.
    pub fn new(most: usize) -> Prefixes {
        Prefixes { most, kept: VecDeque::new(), recent: VecDeque::new() }
    }

    /// Returns the number of kept sequences.
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// Finds the longest kept prefix of a prompt; an empty sequence where there is none.
    ///
    /// # Errors
    /// States cannot be copied, or running tokens again fails.
    pub fn find(&mut self, model: &Model, prompt: &[u32]) -> Result<Found> {
        let all = &prompt[..prompt.len() - 1];
        let usable = |kept: &KeptPrefix| {
            let n = kept.sequence.shared_with(all);
            let fits =
                n >= MIN_SHARED_TOKENS && model.tokens_to_run_again(&kept.sequence, n) <= MOST_RUN_AGAIN;
            if fits { n } else { 0 }
        };
        let best = self.kept.iter().map(usable).enumerate().max_by_key(|(_, n)| *n).filter(|(_, n)| *n > 0);
        let mut reused = 0;
        let sequence = match best.and_then(|(i, n)| Some((self.kept.remove(i)?, n))) {
            None => model.sequence(),
            Some((kept, n)) => {
                reused = n;
                let mut sequence = if n == kept.sequence.position() && !kept.is_shared {
                    kept.sequence
                } else {
                    let copy = kept.sequence.fork();
                    self.kept.push_back(kept);
                    copy?
                };
                model.truncate(&mut sequence, n)?;
                sequence
            }
        };
        let parts_at =
            self.recent.iter().map(|r| shared(r, all)).max().filter(|n| *n >= reused + 2 * MIN_SHARED_TOKENS);
        Ok(Found { sequence, parts_at: parts_at.filter(|_| self.most > 0) })
    }

    /// Records a prompt, to find prefixes that later prompts share with it.
    pub fn note(&mut self, prompt: &[u32]) {
        if self.most == 0 {
            return;
        }
        self.recent.retain(|r| shared(r, prompt) < r.len().min(prompt.len()));
        self.recent.push_back(prompt.to_vec());
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
    }

    /// Keeps a sequence of the tokens `ids`.
    pub fn keep(&mut self, sequence: Sequence, ids: &[u32], is_shared: bool) {
        let ids = ids[..sequence.position().min(ids.len())].to_vec();
        if self.most == 0 || ids.len() < MIN_SHARED_TOKENS {
            return;
        }
        // An older sequence of the same tokens is redundant.
        self.kept.retain(|kept| kept.ids != ids);
        self.kept.push_back(KeptPrefix { sequence, ids, is_shared });
        while self.kept.len() > self.most {
            let all: Vec<bool> = self.kept.iter().map(|kept| kept.is_shared).collect();
            self.kept.remove(first_to_go(&all, self.most));
        }
    }
}

/// Returns the index of the sequence to drop: the least recently used one that is not shared, so that answers that end
/// together do not displace their common prefix. If more than half of the places are shared, the least recently used shared one.
fn first_to_go(is_shared: &[bool], most: usize) -> usize {
    let too_many = is_shared.iter().filter(|shared| **shared).count() > most / 2;
    is_shared.iter().position(|shared| *shared == too_many).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::first_to_go;

    #[test]
    fn shared_beginnings_outlive_a_burst_and_do_not_take_all_places() {
        // The newest is the last.
        assert_eq!(first_to_go(&[true, false, false, false, false], 4), 1);
        assert_eq!(first_to_go(&[false, true, true, false, false], 4), 0);
        assert_eq!(first_to_go(&[true, true, true, false, false], 4), 0);
        assert_eq!(first_to_go(&[true, true, false], 2), 0);
        assert_eq!(first_to_go(&[true, false], 1), 0);
        assert_eq!(first_to_go(&[false, false], 1), 0);
    }
}
