//! Rows of the newest tokens that a function takes as an input, kept beside the states of its package.
//!
//! ```text
//! call n      rows of earlier tokens  --input--> function --output--> rows of the call's own tokens
//! call n + 1  the newest of both      --input--> ...
//! ```
//! To the model, a package wrapped here looks like one whose states hold the rows.

use crate::backend::{
    BackendFunction, BackendPackage, BatchFunction, BatchInput, Counts, OpTime, SequenceStates,
};
use crate::tensor::Tensor;
use crate::{Error, Result};
use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

/// Most tokens of a pass that can be undone one by one.
pub const MOST_UNDONE: usize = 31;

/// Rows of the newest tokens, `[1, heads, count, channels]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NewestRows {
    /// Name of the input that takes the rows.
    pub input: String,
    /// Name of the output with the rows of the call's own tokens.
    pub rows: String,
    /// Name of the input that is zero in all slots for padding: `[1, 1, slots, T]`, or `[1, 1, T, slots]` with slots last.
    pub place: String,
    /// True if `place` has slots on its last axis.
    pub is_place_last: bool,
    pub count: usize,
    pub heads: usize,
    pub channels: usize,
}

/// A package, with the rows that are kept for it.
pub(super) struct RowsPackage {
    pub inner: Box<dyn BackendPackage>,
    pub kept: Arc<[NewestRows]>,
}

/// Kept rows among a function's inputs and outputs.
struct RowsPlaces {
    kept: Arc<[NewestRows]>,
    /// Inputs that callers see; `outputs`: outputs that callers see.
    inputs: Vec<String>,
    outputs: Vec<String>,
    /// Kept rows that each input of the function takes; the other inputs are the callers', in order.
    taken: Vec<Option<usize>>,
    given: Vec<Option<usize>>,
    /// For each kept rows, the callers' input `place`, by index.
    places: Vec<usize>,
}

struct RowsFunction {
    inner: Arc<dyn BackendFunction>,
    at: RowsPlaces,
}

struct RowsBatch {
    inner: Arc<dyn BatchFunction>,
    at: RowsPlaces,
}

/// Kept rows of a sequence, for one [`NewestRows`].
#[derive(Clone, Debug, Default)]
struct SequenceRows {
    /// Values of each of the newest tokens, `heads * channels` each, newest last.
    of_tokens: VecDeque<Vec<f32>>,
    /// True if rows of older tokens were dropped, so that the rows before these are not zero.
    has_more: bool,
}

/// States of a package, with the rows of a sequence's newest tokens.
struct RowsStates {
    inner: Box<dyn SequenceStates>,
    kept: Arc<[NewestRows]>,
    rows: Vec<SequenceRows>,
}

impl NewestRows {
    /// Returns how many tokens' rows are kept, so that the newest tokens can be undone.
    fn most(&self) -> usize {
        self.count + MOST_UNDONE
    }
}

impl SequenceRows {
    /// Makes the input of a call: the newest rows, with zeros before the first token.
    fn input(&self, of: &NewestRows) -> Tensor {
        let mut tensor = Tensor::default();
        let values = tensor.reset_f32(&[1, of.heads, of.count, of.channels]);
        values.fill(0.0);
        let first = self.of_tokens.len().saturating_sub(of.count);
        let empty = of.count - (self.of_tokens.len() - first);
        for (i, row) in self.of_tokens.iter().skip(first).enumerate() {
            for (head, row) in row.chunks_exact(of.channels).enumerate() {
                values[(head * of.count + empty + i) * of.channels..][..of.channels].copy_from_slice(row);
            }
        }
        tensor
    }

    /// Appends the rows of `tokens` from an output `[1, heads, T, channels]`.
    fn append(&mut self, of: &NewestRows, output: &Tensor, tokens: Range<usize>) -> Result<()> {
        let wrong = || {
            let expected = format!("[1, {}, T, {}]", of.heads, of.channels);
            Error::input(format!("output `{}`: shape {:?}, expected {expected}", of.rows, output.shape))
        };
        let (&[1, heads, width, channels], Some(values)) = (output.shape.as_slice(), output.as_f32()) else {
            return Err(wrong());
        };
        if (heads, channels) != (of.heads, of.channels) || tokens.end > width {
            return Err(wrong());
        }
        let skipped = tokens.len().saturating_sub(of.most());
        self.has_more |= skipped > 0;
        for t in tokens.skip(skipped) {
            let mut row = match self.of_tokens.len() >= of.most() {
                true => self.of_tokens.pop_front().unwrap_or_default(),
                false => Vec::new(),
            };
            self.has_more |= !row.is_empty();
            row.clear();
            for head in 0..heads {
                row.extend_from_slice(&values[(head * width + t) * channels..][..channels]);
            }
            self.of_tokens.push_back(row);
        }
        Ok(())
    }
}

/// Returns the number of a call's tokens that are not padding: the last token of `place` that has a slot, plus one.
fn count_unpadded(place: Option<&Tensor>, is_place_last: bool) -> usize {
    let Some((&[_, _, rows, columns], values)) = place.and_then(|p| Some((p.shape.as_slice(), p.as_f32()?)))
    else {
        return 0;
    };
    let (slots, width) = if is_place_last { (columns, rows) } else { (rows, columns) };
    let at = |s: usize, t: usize| if is_place_last { t * slots + s } else { s * width + t };
    let is_there = |t: usize| (0..slots).any(|s| values.get(at(s, t)).is_some_and(|v| *v != 0.0));
    (0..width).rev().find(|t| is_there(*t)).map_or(0, |last| last + 1)
}

impl RowsPlaces {
    fn of(kept: &Arc<[NewestRows]>, inputs: &[String], outputs: &[String]) -> Result<RowsPlaces> {
        let find =
            |name: &String, named: fn(&NewestRows) -> &String| kept.iter().position(|k| named(k) == name);
        let taken: Vec<_> = inputs.iter().map(|name| find(name, |k| &k.input)).collect();
        let given: Vec<_> = outputs.iter().map(|name| find(name, |k| &k.rows)).collect();
        let others = |names: &[String], places: &[Option<usize>]| -> Vec<String> {
            names.iter().zip(places).filter(|(_, p)| p.is_none()).map(|(n, _)| n.clone()).collect()
        };
        let (own, outputs) = (others(inputs, &taken), others(outputs, &given));
        let mut places = Vec::new();
        for (k, of) in kept.iter().enumerate() {
            let place = own.iter().position(|name| *name == of.place);
            let (Some(place), true, true) = (place, taken.contains(&Some(k)), given.contains(&Some(k)))
            else {
                let NewestRows { input, rows, place, .. } = of;
                return Err(Error::input(format!("a function without `{input}`, `{rows}` or `{place}`")));
            };
            places.push(place);
        }
        Ok(RowsPlaces { kept: kept.clone(), inputs: own, outputs, taken, given, places })
    }

    /// Moves outputs that callers see to the front, in order, and returns the others with the index of their kept rows.
    fn sort_outputs(&self, outputs: &mut Vec<Tensor>) -> Vec<(usize, Tensor)> {
        let (mut own, mut rows) = (Vec::new(), Vec::new());
        for (output, given) in outputs.drain(..).zip(&self.given) {
            match given {
                Some(k) => rows.push((*k, output)),
                None => own.push(output),
            }
        }
        *outputs = own;
        rows
    }
}

/// Returns a sequence's states as states of a package with kept rows; an error for other states.
fn states_of(states: &mut dyn SequenceStates) -> Result<&mut RowsStates> {
    let states: &mut dyn Any = states;
    states.downcast_mut().ok_or_else(|| Error::input("states of another backend"))
}

impl BackendPackage for RowsPackage {
    fn prepare(&self, function: &str) -> Result<Arc<dyn BackendFunction>> {
        let inner = self.inner.prepare(function)?;
        let at = RowsPlaces::of(&self.kept, inner.inputs(), inner.outputs())?;
        Ok(Arc::new(RowsFunction { inner, at }))
    }

    fn prepare_for(
        &self,
        function: &str,
        axes: &BTreeMap<String, usize>,
        declared: usize,
        tokens: usize,
    ) -> Result<Option<Arc<dyn BackendFunction>>> {
        let Some(inner) = self.inner.prepare_for(function, axes, declared, tokens)? else { return Ok(None) };
        let at = RowsPlaces::of(&self.kept, inner.inputs(), inner.outputs())?;
        Ok(Some(Arc::new(RowsFunction { inner, at })))
    }

    fn prepare_batch(
        &self,
        function: &str,
        axes: &BTreeMap<String, usize>,
        declared: usize,
    ) -> Result<Option<Arc<dyn BatchFunction>>> {
        let Some(inner) = self.inner.prepare_batch(function, axes, declared)? else { return Ok(None) };
        let at = RowsPlaces::of(&self.kept, inner.inputs(), inner.outputs())?;
        Ok(Some(Arc::new(RowsBatch { inner, at })))
    }

    fn new_states(&self) -> Box<dyn SequenceStates> {
        let rows = self.kept.iter().map(|_| SequenceRows::default()).collect();
        Box::new(RowsStates { inner: self.inner.new_states(), kept: self.kept.clone(), rows })
    }

    fn populate(&self) -> Option<Box<dyn FnOnce() + Send>> {
        self.inner.populate()
    }

    fn counts(&self) -> Counts {
        self.inner.counts()
    }

    fn op_times(&self) -> Vec<OpTime> {
        self.inner.op_times()
    }

    fn release(&self) {
        self.inner.release();
    }
}

impl BackendFunction for RowsFunction {
    fn inputs(&self) -> &[String] {
        &self.at.inputs
    }

    fn outputs(&self) -> &[String] {
        &self.at.outputs
    }

    fn has_states(&self) -> bool {
        true
    }

    fn run(
        &self,
        inputs: &[&Tensor],
        states: &mut dyn SequenceStates,
        outputs: &mut Vec<Tensor>,
    ) -> Result<()> {
        let states = states_of(states)?;
        let own: Vec<Tensor> =
            states.rows.iter().zip(self.at.kept.iter()).map(|(rows, of)| rows.input(of)).collect();
        let mut others = inputs.iter().copied();
        let all: Option<Vec<&Tensor>> = self
            .at
            .taken
            .iter()
            .map(|taken| match taken {
                Some(k) => own.get(*k),
                None => others.next(),
            })
            .collect();
        let all = all.ok_or_else(|| Error::input("too few inputs"))?;
        self.inner.run(&all, states.inner.as_mut(), outputs)?;
        for (k, output) in self.at.sort_outputs(outputs) {
            let tokens =
                count_unpadded(inputs.get(self.at.places[k]).copied(), self.at.kept[k].is_place_last);
            states.rows[k].append(&self.at.kept[k], &output, 0..tokens)?;
        }
        Ok(())
    }
}

impl BatchFunction for RowsBatch {
    fn inputs(&self) -> &[String] {
        &self.at.inputs
    }

    fn outputs(&self) -> &[String] {
        &self.at.outputs
    }

    fn run(
        &self,
        inputs: &[BatchInput<'_>],
        parts: &[Range<usize>],
        states: &mut [&mut dyn SequenceStates],
        outputs: &mut Vec<Tensor>,
    ) -> Result<()> {
        let mut own: Vec<Vec<Tensor>> = self.at.kept.iter().map(|_| Vec::new()).collect();
        for states in states.iter_mut() {
            let states = states_of(*states)?;
            for ((own, rows), of) in own.iter_mut().zip(&states.rows).zip(self.at.kept.iter()) {
                own.push(rows.input(of));
            }
        }
        let own: Vec<Vec<&Tensor>> = own.iter().map(|all| all.iter().collect()).collect();
        let mut others = inputs.iter();
        let all: Option<Vec<BatchInput<'_>>> = self
            .at
            .taken
            .iter()
            .map(|taken| match taken {
                Some(k) => own.get(*k).map(|all| BatchInput::Own(all)),
                None => others.next().map(|input| match input {
                    BatchInput::Shared(tensor) => BatchInput::Shared(tensor),
                    BatchInput::Own(all) => BatchInput::Own(all),
                }),
            })
            .collect();
        let all = all.ok_or_else(|| Error::input("too few inputs"))?;
        {
            let mut inner: Vec<&mut dyn SequenceStates> = Vec::new();
            for states in states.iter_mut() {
                inner.push(states_of(*states)?.inner.as_mut());
            }
            self.inner.run(&all, parts, &mut inner, outputs)?;
        }
        for (k, output) in self.at.sort_outputs(outputs) {
            for (states, part) in states.iter_mut().zip(parts) {
                states_of(*states)?.rows[k].append(&self.at.kept[k], &output, part.clone())?;
            }
        }
        Ok(())
    }
}

impl SequenceStates for RowsStates {
    fn fork(&self) -> Result<Box<dyn SequenceStates>> {
        let (inner, kept) = (self.inner.fork()?, self.kept.clone());
        Ok(Box::new(RowsStates { inner, kept, rows: self.rows.clone() }))
    }

    fn clear(&mut self) {
        self.inner.clear();
        self.rows.iter_mut().for_each(|rows| *rows = SequenceRows::default());
    }

    fn can_rewind(&self, tokens: usize) -> bool {
        let holds = |(rows, of): (&SequenceRows, &NewestRows)| match rows.has_more {
            false => tokens <= rows.of_tokens.len(),
            true => tokens + of.count <= rows.of_tokens.len(),
        };
        self.rows.iter().zip(self.kept.iter()).all(holds) && self.inner.can_rewind(tokens)
    }

    fn rewind(&mut self, tokens: usize) -> Result<()> {
        if !self.can_rewind(tokens) {
            return Err(Error::input(format!("states that cannot undo {tokens} tokens")));
        }
        self.inner.rewind(tokens)?;
        for rows in &mut self.rows {
            rows.of_tokens.truncate(rows.of_tokens.len() - tokens);
        }
        Ok(())
    }

    fn save(&self, out: &mut Vec<u8>) -> Result<()> {
        self.inner.save(out)?;
        for rows in &self.rows {
            out.push(u8::from(rows.has_more));
            out.extend((rows.of_tokens.len() as u64).to_le_bytes());
            rows.of_tokens.iter().flatten().for_each(|v| out.extend(v.to_le_bytes()));
        }
        Ok(())
    }

    fn restore(&mut self, bytes: &mut &[u8]) -> Result<()> {
        self.inner.restore(bytes)?;
        let read = |bytes: &mut &[u8], of: &NewestRows| -> Option<SequenceRows> {
            let has_more = match bytes.split_off_first()? {
                0 => false,
                1 => true,
                _ => return None,
            };
            let count = u64::from_le_bytes(bytes.split_off(..8)?.try_into().ok()?);
            let count = usize::try_from(count).ok().filter(|n| *n <= of.most())?;
            let mut of_tokens = VecDeque::new();
            for _ in 0..count {
                let part = bytes.split_off(..4 * of.heads * of.channels)?;
                of_tokens.push_back(part.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect());
            }
            Some(SequenceRows { of_tokens, has_more })
        };
        for (rows, of) in self.rows.iter_mut().zip(self.kept.iter()) {
            let wrong = || Error::input("saved sequence: its kept rows are cut short or wrong");
            *rows = read(bytes, of).ok_or_else(wrong)?;
        }
        Ok(())
    }

    fn fill_with_noise(&mut self, seed: u64) -> bool {
        let mut random = anemoe_io::Random::new(seed);
        for (rows, of) in self.rows.iter_mut().zip(self.kept.iter()) {
            let mut row = || (0..of.heads * of.channels).map(|_| random.uniform() as f32 - 0.5).collect();
            *rows = SequenceRows { of_tokens: (0..of.most()).map(|_| row()).collect(), has_more: true };
        }
        self.inner.fill_with_noise(seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(count: usize) -> NewestRows {
        let name = |s: &str| s.to_string();
        NewestRows {
            input: name("i"),
            rows: name("r"),
            place: name("p"),
            is_place_last: false,
            count,
            heads: 2,
            channels: 3,
        }
    }

    /// Makes an output for tokens `first..first + n` in a call of `width`; each value encodes head, token and channel.
    fn output(first: usize, n: usize, width: usize) -> Tensor {
        let value = |h: usize, t: usize, c: usize| match t < n {
            true => (100 * h + 10 * (first + t) + c) as f32,
            false => f32::NAN,
        };
        let values = (0..2).flat_map(|h| (0..width).flat_map(move |t| (0..3).map(move |c| value(h, t, c))));
        Tensor::f32(&[1, 2, width, 3], values.collect())
    }

    #[test]
    fn the_newest_rows_come_back_however_calls_are_cut() {
        let of = of(2);
        for cuts in [vec![5], vec![1, 4], vec![2, 1, 2], vec![1; 5], vec![4, 1]] {
            let (mut rows, mut at) = (SequenceRows::default(), 0);
            for n in cuts {
                rows.append(&of, &output(at, n, n + 2), 0..n).unwrap();
                at += n;
            }
            let want = [30, 31, 32, 40, 41, 42, 130, 131, 132, 140, 141, 142].map(|v| v as f32);
            assert_eq!(rows.input(&of), Tensor::f32(&[1, 2, 2, 3], want.to_vec()));
        }
    }

    #[test]
    fn before_the_first_token_there_are_zeros() {
        let (of, mut rows) = (of(2), SequenceRows::default());
        assert_eq!(rows.input(&of), Tensor::f32(&[1, 2, 2, 3], vec![0.0; 12]));
        rows.append(&of, &output(7, 1, 1), 0..1).unwrap();
        let want = [0, 0, 0, 70, 71, 72, 0, 0, 0, 170, 171, 172].map(|v| v as f32);
        assert_eq!(rows.input(&of), Tensor::f32(&[1, 2, 2, 3], want.to_vec()));
    }

    #[test]
    fn few_rows_are_kept_of_many_and_say_so() {
        let (of, mut rows) = (of(2), SequenceRows::default());
        rows.append(&of, &output(0, 50, 50), 0..50).unwrap();
        assert_eq!((rows.of_tokens.len(), rows.has_more), (of.most(), true));
        assert!(rows.append(&of, &output(0, 2, 2), 0..3).is_err());
    }

    #[test]
    fn tokens_that_fill_a_call_up_are_not_counted() {
        let place = |columns: &[usize], width: usize| {
            let mut values = vec![0.0; 4 * width];
            columns.iter().enumerate().for_each(|(t, slot)| values[slot * width + t] = 1.0);
            Tensor::f32(&[1, 1, 4, width], values)
        };
        assert_eq!(count_unpadded(Some(&place(&[3], 1)), false), 1);
        assert_eq!(count_unpadded(Some(&place(&[3, 0], 4)), false), 2);
        assert_eq!(count_unpadded(Some(&place(&[0, 1, 2], 3)), false), 3);
        // Two tokens of a call for three, with four slots last.
        let mut rows = Tensor::default();
        rows.reset_f32(&[1, 1, 3, 4]).copy_from_slice(&[0., 0., 0., 1., 1., 0., 0., 0., 0., 0., 0., 0.]);
        assert_eq!(count_unpadded(Some(&rows), true), 2);
        assert_eq!(count_unpadded(None, false), 0);
    }
}
