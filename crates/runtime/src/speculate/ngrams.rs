//! Finds the longest suffix of a sequence that occurred before, while the sequence grows.
//!
//! A suffix automaton: a state stands for a set of substrings that end at the same positions. When a token is appended, the
//! suffix link of the newest state gives the longest suffix that occurred before. Time per token is constant on average, and
//! memory is proportional to the number of tokens.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Index of the state of the empty string.
const ROOT: u32 = 0;
/// Index that stands for no state.
const NONE: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct State {
    /// Length of the state's longest substring.
    length: u32,
    link: u32,
    /// An end position of the state's substrings: the newest that is known.
    end: u32,
    /// Tokens with a transition from this state.
    tokens: Vec<u32>,
}

/// Suffix automaton of tokens.
#[derive(Clone, Debug)]
struct Automaton {
    states: Vec<State>,
    /// Transitions: from a state and a token to a state.
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

    /// Moves the substrings of `old` that are at most `length` long to a new state, and returns it.
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

/// Tokens of one sequence, with their longest repeated suffix of at most `longest` tokens.
#[derive(Clone, Debug)]
pub struct Ngrams {
    automaton: Automaton,
    longest: usize,
    /// Position where the newest occurrence of `longest` tokens ends, by their hash.
    windows: HashMap<u64, u32>,
    /// Length of the longest suffix that occurred before, and the position where that occurrence ended.
    matched: Option<(u32, u32)>,
}

impl Ngrams {
    /// Makes an empty sequence whose matches have at most `longest` tokens.
    pub fn new(longest: usize) -> Ngrams {
        Ngrams { automaton: Automaton::default(), longest, windows: HashMap::new(), matched: None }
    }

    /// Appends a token.
    pub fn push(&mut self, id: u32) {
        self.automaton.push(id);
        let link = self.automaton.state(self.automaton.last).link;
        let end = self.automaton.ids.len() as u32 - 1;
        self.matched = (link != ROOT && link != NONE).then(|| {
            let state = &mut self.automaton.states[link as usize];
            // From now on, this is the newest occurrence.
            (state.length, std::mem::replace(&mut state.end, end))
        });
        // Of a longer match only the newest tokens count, and where these occurred last.
        let ids = &self.automaton.ids;
        if let Some(window) = ids.len().checked_sub(self.longest).map(|first| &ids[first..]) {
            let before = self.windows.insert(hash(window), end);
            let before = before.filter(|&at| ids[..=at as usize].ends_with(window));
            match (before, self.matched) {
                (Some(at), Some((length, _))) if length as usize > self.longest => {
                    self.matched = Some((self.longest as u32, at));
                }
                _ => {}
            }
        }
    }

    /// Returns the length of the longest suffix that occurred before, and the tokens that followed it there.
    pub fn longest_match(&self) -> (usize, &[u32]) {
        match self.matched {
            Some((length, end)) => (length as usize, &self.automaton.ids[end as usize + 1..]),
            None => (0, &[]),
        }
    }
}

/// Computes the hash of some tokens.
fn hash(ids: &[u32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    ids.hash(&mut hasher);
    hasher.finish()
}

/// Tokens in which drafts find matches, besides a sequence's own.
#[derive(Clone, Debug, Default)]
pub struct Corpus(Automaton);

impl Corpus {
    /// Makes a corpus of the tokens of a text.
    pub fn new(ids: &[u32]) -> Corpus {
        let mut automaton = Automaton::default();
        ids.iter().for_each(|&id| automaton.push(id));
        Corpus(automaton)
    }
}

/// Finds the longest suffix of a sequence that occurs in a corpus.
#[derive(Clone, Debug)]
pub(super) struct Walk {
    corpus: Arc<Corpus>,
    longest: usize,
    state: u32,
    length: u32,
}

impl Walk {
    pub fn new(corpus: Arc<Corpus>, longest: usize) -> Walk {
        Walk { corpus, longest, state: ROOT, length: 0 }
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
        ((self.length as usize).min(self.longest), &self.corpus.0.ids[end + 1..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Computes the length of the longest suffix that also ends earlier.
    fn expected(ids: &[u32]) -> usize {
        (1..ids.len())
            .rev()
            .find(|&n| ids[..ids.len() - 1].windows(n).any(|w| w == &ids[ids.len() - n..]))
            .unwrap_or(0)
    }

    proptest! {
        #[test]
        fn the_longest_repeated_suffix_is_found(ids in prop::collection::vec(0u32..4, 0..60), longest in 1..12usize) {
            let mut ngrams = Ngrams::new(longest);
            for (i, &id) in ids.iter().enumerate() {
                ngrams.push(id);
                let so_far = &ids[..=i];
                let (length, next) = ngrams.longest_match();
                prop_assert_eq!(length, expected(so_far).min(longest));
                if length > 0 {
                    // The proposed tokens followed the same tokens.
                    let at = so_far.len() - next.len();
                    prop_assert!(at >= length && !next.is_empty());
                    prop_assert_eq!(&so_far[at - length..at], &so_far[so_far.len() - length..]);
                    prop_assert_eq!(next, &so_far[at..]);
                    if length == longest {
                        // No newer occurrence of these tokens.
                        let suffix = &so_far[so_far.len() - length..];
                        let newer = (at + 1..so_far.len()).any(|end| so_far[..end].ends_with(suffix));
                        prop_assert!(!newer || expected(so_far) == longest);
                    }
                }
            }
        }

        #[test]
        fn the_longest_suffix_in_a_corpus_is_found(
            corpus in prop::collection::vec(0u32..4, 0..60),
            ids in prop::collection::vec(0u32..4, 0..30),
        ) {
            let mut walk = Walk::new(Arc::new(Corpus::new(&corpus)), 8);
            for (i, &id) in ids.iter().enumerate() {
                walk.push(id);
                let so_far = &ids[..=i];
                let is_in = |n: &usize| corpus.windows(*n).any(|w| w == &so_far[so_far.len() - n..]);
                let (length, next) = walk.longest_match();
                prop_assert_eq!(length, (1..=so_far.len()).rev().find(is_in).unwrap_or(0).min(8));
                if length > 0 {
                    let at = corpus.len() - next.len();
                    prop_assert_eq!(&corpus[at - length..at], &so_far[so_far.len() - length..]);
                }
            }
        }
    }
}
