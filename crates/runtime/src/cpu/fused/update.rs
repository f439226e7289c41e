//! Changes slots of a state in place: finds the slots that a call changes, and writes them.

use super::inputs::NodeInputs;
use super::nodes::{Computation, Node, NodeKind};
use super::view::{Base, View};
use crate::cpu::state_value::{StatePiece, StateValue};
use anemoe_kernels::Pool;
use std::cell::RefCell;
use std::ops::Range;

/// Slots that are tested together.
const TESTED: usize = 32;
/// Slots that a thread tests in one part of a job.
const SCANNED: usize = 256;
/// Fewest elements of `place` that several threads test: one thread needs about 20 microseconds for them.
const SEVERAL: usize = 1 << 17;

thread_local! {
    static ROW: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// Sum that is added to a row.
    static PLACED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// A slot that a call changes.
#[derive(Clone)]
pub(super) struct Change {
    slot: usize,
    /// Range from the first to the last token that changes the slot.
    tokens: Range<usize>,
}

/// Returns for each state, `[1, heads, rows, d]`, how many rows of a head may be held in fp16: slots that only updates
/// write, so that later operations of the call also read them rounded. None where other operations write the state, or
/// attention reads rows that are no slots. All rows are slots where nothing writes the state.
pub(super) fn caches(nodes: &[Node], states: &[Vec<usize>]) -> Vec<Option<usize>> {
    let mut slots = vec![None; states.len()];
    let mut others = vec![false; states.len()];
    for node in nodes {
        match &node.work {
            NodeKind::Update { state, slots: own, .. } => {
                let own = *own;
                others[*state] |= slots[*state].replace(own).is_some_and(|before| before != own);
            }
            NodeKind::WriteState { state, .. } => others[*state] = true,
            _ => {}
        }
    }
    for node in nodes {
        let NodeKind::Compute(Computation::Attention { k, v, .. }, _) = &node.work else { continue };
        for view in [k, v] {
            let Base::State(s) = view.base else { continue };
            let &[_, _, rows, d] = states[s].as_slice() else { continue };
            let slots = *slots[s].get_or_insert(rows);
            let row = view.offset % (rows * d).max(1) / d.max(1);
            let whole = view.strides[1..] == [rows * d, d, 1];
            others[s] |= !whole || view.offset % d.max(1) + view.shape[3] > d || row + view.shape[2] > slots;
        }
    }
    slots.into_iter().zip(others).map(|(slots, others)| slots.filter(|_| !others)).collect()
}

/// Finds the slots that change: `keep`, `[1, 1, slots, 1]`, is not 1, or `place`, `[1, 1, slots, tokens]`, is not 0 for one of
/// the `tokens`.
pub(super) fn find_changes(
    pool: &Pool,
    sources: &NodeInputs<'_>,
    (keep, place): (&View, &View),
    tokens: usize,
    changes: &mut Vec<Change>,
) {
    let slots = keep.shape[2];
    let (keeps, places) = (&sources.get(keep.base)[keep.offset..], &sources.get(place.base)[place.offset..]);
    let change = |slot: usize| {
        let at = |t: usize| places[slot * place.strides[2] + t * place.strides[3]];
        let none = tokens > 0 && place.strides[3] == 1 && {
            places[slot * place.strides[2]..][..tokens].iter().fold(true, |none, p| none & (*p == 0.0))
        };
        let mut seen = (0..tokens).filter(|t| !none && at(*t) != 0.0);
        let first = seen.next();
        let end = first.map_or(0, |first| seen.next_back().unwrap_or(first) + 1);
        let changes = first.is_some() || keeps[slot * keep.strides[2]] != 1.0;
        changes.then(|| Change { slot, tokens: first.unwrap_or(0)..end })
    };
    changes.clear();
    let in_order =
        keep.strides[2] == 1 && place.strides[2] == tokens && (tokens == 1 || place.strides[3] == 1);
    if tokens > 1 && (!in_order || slots * tokens >= SEVERAL) {
        changes.resize(slots, Change { slot: usize::MAX, tokens: 0..0 });
        pool.for_chunks(changes, SCANNED, &|i, some| {
            for (slot, to) in (i * SCANNED..).zip(some) {
                if let Some(change) = change(slot) {
                    *to = change;
                }
            }
        });
        return changes.retain(|c| c.slot != usize::MAX);
    }
    // Most slots do not change; groups of them are skipped.
    let mut slot = 0;
    while slot < slots {
        if in_order && slot + TESTED <= slots {
            let stay = keeps[slot..slot + TESTED].iter().fold(true, |stay, k| stay & (*k == 1.0));
            let tested = &places[slot * tokens..(slot + TESTED) * tokens];
            if stay && tested.iter().fold(true, |none, p| none & (*p == 0.0)) {
                slot += TESTED;
                continue;
            }
        }
        changes.extend(change(slot));
        slot += 1;
    }
}

/// Computes `state = state * keep + sum over tokens of place * new` for the slots in `changes`; other slots are not touched.
/// `tail`, a view and its first row, is written whole behind all slots.
pub(super) fn update(
    pool: &Pool,
    state: &mut StateValue,
    sources: &NodeInputs<'_>,
    (new, keep, place, tail): (&View, &View, &View, Option<(&View, usize)>),
    changes: &[Change],
    round: bool,
) {
    let &[_, _, tokens, d] = new.shape.as_slice() else { return };
    let (values, keeps, places) = (sources.get(new.base), sources.get(keep.base), sources.get(place.base));
    let kept = |slot: usize| keeps[keep.offset + slot * keep.strides[2]];
    let at = |slot: usize, t: usize| places[place.offset + slot * place.strides[2] + t * place.strides[3]];
    let tail = tail.map(|(tail, slots)| (tail, slots, sources.get(tail.base)));
    let write = |h: usize, mut state: StatePiece<'_>| {
        let mut row = ROW.take();
        row.resize(d, 0.0);
        for &Change { slot, ref tokens } in changes {
            match kept(slot) {
                0.0 => row.fill(0.0),
                kept => (0..d).for_each(|c| row[c] = state.get(slot * d + c) * kept),
            }
            if round {
                add_rounded(
                    &mut row,
                    tokens
                        .clone()
                        .map(|t| (at(slot, t), new.offset + h * new.strides[1] + t * new.strides[2])),
                    values,
                    new.strides[3],
                );
                state.set(slot * d, &row);
                continue;
            }
            for t in tokens.clone() {
                let factor = at(slot, t);
                if factor != 0.0 {
                    let from = new.offset + h * new.strides[1] + t * new.strides[2];
                    match new.strides[3] {
                        1 => row.iter_mut().zip(&values[from..]).for_each(|(r, v)| *r += factor * v),
                        step => (0..d).for_each(|c| row[c] += factor * values[from + c * step]),
                    }
                }
            }
            state.set(slot * d, &row);
        }
        if let Some((tail, slots, values)) = tail {
            let rows = tail.shape[2];
            if rows > 0 && tail.strides[3] == 1 && tail.strides[2] == d {
                state.set(slots * d, &values[tail.offset + h * tail.strides[1]..][..rows * d]);
            } else {
                for r in 0..rows {
                    let from = tail.offset + h * tail.strides[1] + r * tail.strides[2];
                    (0..d).for_each(|c| row[c] = values[from + c * tail.strides[3]]);
                    state.set((slots + r) * d, &row);
                }
            }
        }
        ROW.set(row);
    };
    if let (StateValue::Cache(cache), Some(last)) = (&mut *state, changes.last()) {
        cache.reach(last.slot);
    }
    state.heads(pool, tokens > 1, &write);
}

/// Adds rows of `values`, each times a factor, to `row`; both parts and their sum are rounded to fp16. `rows` gives the factor
/// and the first element of each row.
fn add_rounded(row: &mut [f32], rows: impl Iterator<Item = (f32, usize)>, values: &[f32], step: usize) {
    let mut placed = PLACED.take();
    placed.clear();
    placed.resize(row.len(), 0.0);
    for (factor, from) in rows.filter(|(factor, _)| *factor != 0.0) {
        placed.iter_mut().enumerate().for_each(|(c, p)| *p += factor * values[from + c * step]);
    }
    anemoe_kernels::round_to_f16(&mut placed);
    anemoe_kernels::round_to_f16(row);
    row.iter_mut().zip(&placed).for_each(|(r, p)| *r += p);
    anemoe_kernels::round_to_f16(row);
    PLACED.set(placed);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes the changed slots by the definition, each with the range of tokens that change it.
    fn expected(keep: &[f32], place: &[f32], tokens: usize) -> Vec<(usize, Range<usize>)> {
        let slots = keep.iter().enumerate().map(|(slot, keep)| {
            let own: Vec<_> = (0..tokens).filter(|t| place[slot * tokens + t] != 0.0).collect();
            let range = own.first().map_or(0..0, |first| *first..own[own.len() - 1] + 1);
            (slot, range, *keep != 1.0 || !own.is_empty())
        });
        slots.filter(|s| s.2).map(|(slot, range, _)| (slot, range)).collect()
    }

    #[test]
    fn changes_are_found_for_any_number_of_tokens_and_any_order() {
        let slots = SCANNED + TESTED + 5;
        for tokens in [0, 1, 2, 7] {
            let keep: Vec<_> = (0..slots).map(|s| if s % 97 == 3 { 0.5 } else { 1.0 }).collect();
            let place: Vec<_> = (0..slots * tokens).map(|i| if i % 61 == 5 { 1.0 } else { 0.0 }).collect();
            let transposed: Vec<_> =
                (0..slots * tokens).map(|i| place[i % slots * tokens + i / slots]).collect();
            let view = |base, shape: [usize; 4], strides: [usize; 4]| View {
                base: Base::Buffer(base),
                offset: 0,
                shape: shape.to_vec(),
                strides: strides.to_vec(),
            };
            let buffers = [keep.clone(), place.clone(), transposed];
            let sources = NodeInputs { buffers: &buffers, tensors: &[], constants: &[], inputs: &[] };
            let keeps = view(0, [1, 1, slots, 1], [slots, slots, 1, 1]);
            let want = expected(&keep, &place, tokens);
            assert!(!want.is_empty());
            for (base, strides) in [(1, [0, 0, tokens, 1]), (2, [0, 0, 1, slots])] {
                let places = view(base, [1, 1, slots, tokens], strides);
                let mut changes = Vec::new();
                find_changes(Pool::global(), &sources, (&keeps, &places), tokens, &mut changes);
                let found: Vec<_> = changes.into_iter().map(|c| (c.slot, c.tokens)).collect();
                assert_eq!(found, want, "{tokens} tokens, places {strides:?}");
            }
        }
    }
}
