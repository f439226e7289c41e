//! Pattern of an update of a state: a mask keeps or replaces its slots.
//!
//! ```text
//! updated = old * keep + placed            old: the state, or its first slots
//! state   = updated | concat(updated, tail) | state[first slots] = updated | the same, and state[rows behind all slots] = tail
//! ```

use super::super::ir::{InstrKind, ValueRef};
use super::patterns::{Fused, FusedSteps, InstrGraph};

/// A value that is written to a state, in parts.
struct WrittenRows {
    /// The first rows.
    updated: ValueRef,
    /// Rows behind all slots.
    tail: Option<ValueRef>,
    /// Rows of the state before the tail.
    slots: usize,
}

impl InstrGraph<'_> {
    /// Finds `state = state * keep + placed`, with `placed` made of `new` by `place`, and rows behind it that are written whole.
    pub fn update(&self, root: usize, state_shape: &[usize]) -> FusedSteps {
        let InstrKind::WriteState { state, data } = &self.instructions[root].work else { return None };
        let &[1, rows, all, d] = state_shape else { return None };
        let mut inside = Vec::new();
        let WrittenRows { updated, tail, slots: cache } =
            self.take_apart(*data, *state, state_shape, &mut inside)?;
        let sum = self.by(updated, "add")?;
        inside.push(sum);
        let &[1, _, slots, _] = self.shape(updated)? else { return None };
        if cache + tail.map_or(Some(0), |t| self.shape(t).and_then(|s| s.get(2).copied()))? != all {
            return None;
        }
        let is_whole = slots == all;
        self.both(sum).into_iter().find_map(|(kept, placed)| {
            let mut inside = inside.clone();
            let k = self.by(kept, "mul")?;
            let (p, product) = match self.by(placed, "matmul") {
                Some(p) => (p, true),
                None => (self.by(placed, "mul")?, false),
            };
            inside.extend([k, p]);
            let (_, keep) = self.both(k).into_iter().find(|(old, _)| match (old, is_whole) {
                (ValueRef::State(s), true) => s == state,
                (old, false) => self.is_start_of(*old, *state, slots, &mut inside),
                _ => false,
            })?;
            let (new, place) = if product {
                let flag = |name: &str| self.flag(self.arg(p, name), false);
                if flag("transpose_x")? || flag("transpose_y")? {
                    return None;
                }
                (self.arg(p, "y")?, self.arg(p, "x")?)
            } else {
                self.both(p).into_iter().find(|(_, place)| self.shape(*place) == Some(&[1, 1, slots, 1]))?
            };
            let tokens = *self.shape(place)?.get(3)?;
            let fits = self.shape(keep)? == [1, 1, slots, 1]
                && self.shape(place)? == [1, 1, slots, tokens]
                && self.shape(new)? == [1, rows, tokens, d]
                && tail.is_none_or(|t| self.shape(t) == Some(&[1, rows, all - cache, d]));
            let state = *state;
            (fits && self.closed(&inside, root))
                .then_some((Fused::Update { state, new, keep, place, tail, slots: cache }, inside))
        })
    }

    /// Splits a value that is written to a state into its parts: all rows at once, rows joined with a tail, or an update of the
    /// first rows and of a tail.
    fn take_apart(
        &self,
        data: ValueRef,
        state: usize,
        state_shape: &[usize],
        inside: &mut Vec<usize>,
    ) -> Option<WrittenRows> {
        let &[1, rows, all, d] = state_shape else { return None };
        if let Some(c) = self.by(data, "concat") {
            inside.push(c);
            let &[updated, tail] = self.instructions[c].values() else { return None };
            let axis = self.ints(self.arg(c, "axis"))?.first()?;
            let slots = *self.shape(updated)?.get(2)?;
            return (self.axis(*axis, 4)? == 2).then_some(WrittenRows { updated, tail: Some(tail), slots });
        }
        let Some(last) = self.by(data, "slice_update") else {
            return Some(WrittenRows { updated: data, tail: None, slots: all });
        };
        // Returns the first row and the update of a slice of axis 2; the slice is whole on the other axes.
        let part = |s: usize| {
            let [begin, end] = ["begin", "end"].map(|name| self.ints(self.arg(s, name)));
            let update = self.arg(s, "update")?;
            let &[1, own, n, width] = self.shape(update)? else { return None };
            let first = *begin?.get(2)?;
            let last = first.checked_add(i32::try_from(n).ok()?)?;
            let [h, w] = [own, width].map(|n| i32::try_from(n).unwrap_or(-1));
            let ones = self
                .arg(s, "stride")
                .is_none_or(|v| self.ints(Some(v)).is_some_and(|strides| strides.iter().all(|&v| v == 1)));
            let masks = ["begin_mask", "end_mask", "squeeze_mask"].into_iter().filter_map(|m| self.arg(s, m));
            let mut masks = masks.map(|mask| self.constant(mask).and_then(|t| t.as_bool()));
            let unmasked = masks.all(|mask| mask.is_some_and(|all| all.iter().all(|v| !v)));
            let fits = begin? == [0, 0, first, 0] && end? == [1, h, last, w] && (own, width) == (rows, d);
            (fits && ones && unmasked).then_some((usize::try_from(first).ok()?, update))
        };
        inside.push(last);
        let before = self.arg(last, "x")?;
        match (part(last)?, before) {
            ((0, updated), ValueRef::State(s)) if s == state => {
                Some(WrittenRows { updated, tail: None, slots: all })
            }
            ((slots, tail), _) => {
                let first = self.by(before, "slice_update")?;
                inside.push(first);
                let is_state = self.arg(first, "x") == Some(ValueRef::State(state));
                match part(first)? {
                    (0, updated) if is_state && self.shape(updated)?[2] <= slots => {
                        Some(WrittenRows { updated, tail: Some(tail), slots })
                    }
                    _ => None,
                }
            }
        }
    }

    /// Tells whether `old` is the first `slots` rows of the state, and adds its step to `inside`.
    fn is_start_of(&self, old: ValueRef, state: usize, slots: usize, inside: &mut Vec<usize>) -> bool {
        let Some(s) = self.by(old, "slice_by_size") else { return false };
        let zeros = self.ints(self.arg(s, "begin")).is_some_and(|b| b.iter().all(|&v| v == 0));
        let fits = self.shape(old).is_some_and(|o| o.get(2) == Some(&slots));
        let found = self.arg(s, "x") == Some(ValueRef::State(state)) && zeros && fits;
        if found {
            inside.push(s);
        }
        found
    }
}
