//! The longest suffix of a sequence that occurred before, kept while the sequence grows.
//!
//! A suffix automaton: its states stand for sets of substrings that end at the same positions. When a token is appended, the
//! suffix link of the newest state is the longest suffix that occurred before. Time is constant per token on average, memory
//! proportional to the tokens.

use std::collections::HashMap;
use std::sync::Arc;

/// State of the empty string.
const ROOT: u32 = 0;
/// No state.
const NONE: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct State {
    /// Length of its longest substring.
    length: u32,
    link: u32,
    /// An end position of its substrings, the most recent that is known.
    end: u32,
    /// Tokens that lead on from here.
    tokens: Vec<u32>,
}

/// Suffix automaton of tokens.
#[derive(Clone, Debug)]
struct Automaton {
    states: Vec<State>,
    /// The state behind a state and a token.
    next: HashMap<(u32, u32), u32>,
    last: u32,
    ids: Vec<u32>,
}

impl Default for Automaton {
    fn default() -> Self {
        let root = State { length: 0, link: NONE, end: 0, tokens: Vec::new() };
        Automaton { states: vec![root], next: HashMap::new(), last: ROOT, ids: Vec::new() }
    }
}

impl Automaton {
    fn state(&self, at: u32) -> &State {
        &self.states[at as usize]
    }

    fn lead(&mut self, from: u32, id: u32, to: u32) {
        if self.next.insert((from, id), to).is_none() {
            self.states[from as usize].tokens.push(id);
        }
    }

    fn push(&mut self, id: u32) {
        let end = self.ids.len() as u32;
        self.ids.push(id);
        let length = self.state(self.last).length + 1;
        let new = self.states.len() as u32;
        self.states.push(State { length, link: ROOT, end, tokens: Vec::new() });
        let mut at = self.last;
        while at != NONE && !self.next.contains_key(&(at, id)) {
            self.lead(at, id, new);
            at = self.state(at).link;
        }
        if at != NONE {
            let old = self.next[&(at, id)];
            let longest = self.state(at).length + 1;
            let link = if self.state(old).length == longest { old } else { self.split(at, id, old, longest) };
            self.states[new as usize].link = link;
        }
        self.last = new;
    }

    /// Takes the substrings of `old` that are at most `length` long into a state of their own.
    fn split(&mut self, at: u32, id: u32, old: u32, length: u32) -> u32 {
        let copy = self.states.len() as u32;
        let state = State { length, ..self.state(old).clone() };
        for token in state.tokens.clone() {
            let to = self.next[&(old, token)];
            self.next.insert((copy, token), to);
        }
        self.states.push(state);
        self.states[old as usize].link = copy;
        let mut at = at;
        while at != NONE && self.next.get(&(at, id)) == Some(&old) {
            self.next.insert((at, id), copy);
            at = self.state(at).link;
        }
        copy
    }
}

/// Tokens of one sequence.
#[derive(Clone, Debug, Default)]
pub struct Ngrams {
    automaton: Automaton,
    /// State of the longest suffix that occurred before, and where it ended then.
    matched: Option<(u32, u32)>,
}

impl Ngrams {
    /// Appends a token.
    pub fn push(&mut self, id: u32) {
        self.automaton.push(id);
        let link = self.automaton.state(self.automaton.last).link;
        let end = self.automaton.ids.len() as u32 - 1;
        self.matched = (link != ROOT && link != NONE).then(|| {
            let state = &mut self.automaton.states[link as usize];
            // From now on, the most recent one is this.
            (state.length, std::mem::replace(&mut state.end, end))
        });
    }

    /// Length of the longest suffix that occurred before, and the tokens that came behind it then.
    pub fn longest_match(&self) -> (usize, &[u32]) {
        match self.matched {
            Some((length, end)) => (length as usize, &self.automaton.ids[end as usize + 1..]),
            None => (0, &[]),
        }
    }
}

/// Tokens that drafts may come from besides a sequence's own.
#[derive(Clone, Debug, Default)]
pub struct Corpus(Automaton);

impl Corpus {
    /// Reads the tokens of a text.
    pub fn new(ids: &[u32]) -> Corpus {
        let mut automaton = Automaton::default();
        ids.iter().for_each(|&id| automaton.push(id));
        Corpus(automaton)
    }
}

/// The longest suffix of a sequence that is in a corpus.
#[derive(Clone, Debug)]
pub(super) struct Walk {
    corpus: Arc<Corpus>,
    state: u32,
    length: u32,
}

impl Walk {
    pub fn new(corpus: Arc<Corpus>) -> Walk {
        Walk { corpus, state: ROOT, length: 0 }
    }

    pub fn push(&mut self, id: u32) {
        let automaton = &self.corpus.0;
        loop {
            if let Some(&next) = automaton.next.get(&(self.state, id)) {
                (self.state, self.length) = (next, self.length + 1);
                return;
            }
            match automaton.state(self.state).link {
                NONE => {
                    (self.state, self.length) = (ROOT, 0);
                    return;
                }
                link => (self.state, self.length) = (link, automaton.state(link).length),
            }
        }
    }

    pub fn longest_match(&self) -> (usize, &[u32]) {
        if self.length == 0 {
            return (0, &[]);
        }
        let end = self.corpus.0.state(self.state).end as usize;
        (self.length as usize, &self.corpus.0.ids[end + 1..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The longest suffix that ends earlier too.
    fn expected(ids: &[u32]) -> usize {
        (1..ids.len())
            .rev()
            .find(|&n| ids[..ids.len() - 1].windows(n).any(|w| w == &ids[ids.len() - n..]))
            .unwrap_or(0)
    }

    proptest! {
        #[test]
        fn the_longest_repeated_suffix_is_found(ids in prop::collection::vec(0u32..4, 0..60)) {
            let mut ngrams = Ngrams::default();
            for (i, &id) in ids.iter().enumerate() {
                ngrams.push(id);
                let so_far = &ids[..=i];
                let (length, next) = ngrams.longest_match();
                prop_assert_eq!(length, expected(so_far));
                if length > 0 {
                    // What is proposed came behind the same tokens.
                    let at = so_far.len() - next.len();
                    prop_assert!(at >= length && !next.is_empty());
                    prop_assert_eq!(&so_far[at - length..at], &so_far[so_far.len() - length..]);
                    prop_assert_eq!(next, &so_far[at..]);
                }
            }
        }

        #[test]
        fn the_longest_suffix_in_a_corpus_is_found(
            corpus in prop::collection::vec(0u32..4, 0..60),
            ids in prop::collection::vec(0u32..4, 0..30),
        ) {
            let mut walk = Walk::new(Arc::new(Corpus::new(&corpus)));
            for (i, &id) in ids.iter().enumerate() {
                walk.push(id);
                let so_far = &ids[..=i];
                let is_in = |n: &usize| corpus.windows(*n).any(|w| w == &so_far[so_far.len() - n..]);
                let (length, next) = walk.longest_match();
                prop_assert_eq!(length, (1..=so_far.len()).rev().find(is_in).unwrap_or(0));
                if length > 0 {
                    let at = corpus.len() - next.len();
                    prop_assert_eq!(&corpus[at - length..at], &so_far[so_far.len() - length..]);
                }
            }
        }
    }
}
