//! Interface between the model runner and what executes packages.
//!
//! ```text
//! Backend --open--> BackendPackage --prepare--> BackendFunction --run(FunctionCall, with SequenceStates)--> outputs
//! ```
//! Packages and functions do not change while they run: threads and sequences share them. [`SequenceStates`] hold the values
//! that a sequence carries from call to call.

use crate::tensor::Tensor;
use crate::{Error, Result};
use anemoe_kernels::{Pool, Strided};
use smallvec::SmallVec;
use std::any::Any;
use std::collections::BTreeMap;
use std::ops::{AddAssign, Range, Sub};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Inline capacity for the inputs of a call and the terms of a sum.
pub(crate) const INLINE_TERMS: usize = 16;

/// Time of each term of a sum.
pub type Times = SmallVec<[Duration; INLINE_TERMS]>;

/// Opens packages, several at once.
pub trait Backend: Sync {
    /// Opens the package at `path`.
    ///
    /// # Errors
    /// The package is invalid, or uses something that this backend lacks.
    fn open(&self, path: &Path) -> Result<Box<dyn BackendPackage>> {
        self.open_with(path, &[])
    }

    /// Opens the package at `path` and keeps `caches` of its functions in [`SequenceStates`]. The names that [`BackendFunction`]
    /// lists hold neither the inputs nor the outputs of these caches.
    ///
    /// # Errors
    /// Fails like [`Backend::open`], or a function does not treat a cache as [`KeptCache`] says.
    fn open_with(&self, path: &Path, caches: &[KeptCache]) -> Result<Box<dyn BackendPackage>>;
}

/// A cache that functions take as an input and that their caller keeps: `[1, heads, slots, channels]`, zeros at first. A function
/// may take only the first slots; no token lies behind them then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptCache {
    /// Name of the input.
    pub input: String,
    /// Slots of the whole cache.
    pub slots: usize,
    /// Rows that a call adds; none where functions only read the cache, which [`SequenceStates::lend`] fills.
    pub added: Option<AddedRows>,
}

/// Rows that a call adds to a cache: after it, the row of each token lies in its slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddedRows {
    /// Name of the output with a row for each token of the call, `[1, heads, T, channels]`.
    pub rows: String,
    /// Name of the input that is 1 in the slot of each token's row: `[1, 1, slots, T]`, or `[1, 1, T, slots]` with slots last.
    pub place: String,
    /// True if `place` has slots on its last axis.
    pub is_place_last: bool,
}

impl KeptCache {
    /// Returns the input by which a function shows that it takes the cache: others of its package, such as experts beside
    /// attention, may have none.
    pub fn sign(&self) -> &str {
        self.added.as_ref().map_or(&self.input, |added| &added.place)
    }
}

/// An opened package: functions that share weights, and states that they share by name.
pub trait BackendPackage: Send + Sync {
    /// Prepares a function for the token count that it is declared for; the same name returns the same function again.
    ///
    /// # Errors
    /// There is no such function, or it uses something that this backend lacks.
    fn prepare(&self, function: &str) -> Result<Arc<dyn BackendFunction>>;

    /// Prepares a function for other calls than those that it is declared for. The function is declared for `declared` tokens, or
    /// for `declared` and more; `axes` gives the token axis of each input that has one. Returns `None` where the backend runs
    /// functions only as they are declared, for one sequence; callers fill such calls up.
    ///
    /// # Errors
    /// Fails like [`BackendPackage::prepare`].
    fn prepare_for(
        &self,
        function: &str,
        axes: &BTreeMap<String, usize>,
        declared: usize,
        tokens: CallTokens,
    ) -> Result<Option<Arc<dyn BackendFunction>>> {
        let _ = (function, axes, declared, tokens);
        Ok(None)
    }

    /// Makes the states of a new sequence, all zero.
    fn new_states(&self) -> Box<dyn SequenceStates>;

    /// Returns a job that maps all of the package's weights, for another thread; see [`crate::model::Model::populate`].
    fn populate(&self) -> Option<Box<dyn FnOnce() + Send>> {
        None
    }

    /// Returns the work done since opening; zeros where the backend does not count.
    fn counts(&self) -> Counts {
        Counts::default()
    }

    /// Returns the time of each operation since opening; empty where it is not measured.
    fn op_times(&self) -> Vec<OpTime> {
        Vec::new()
    }

    /// Frees memory that the next call allocates again by itself.
    fn release(&self) {}
}

/// Tokens of the calls that a function is prepared for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CallTokens {
    /// This many tokens of one sequence.
    Exactly(usize),
    /// Any number of tokens of several sequences.
    OfSequences,
}

/// A prepared function.
pub trait BackendFunction: Any + Send + Sync {
    /// Returns the names of the inputs, in the order of [`FunctionCall::inputs`].
    fn inputs(&self) -> &[String];

    /// Returns the names of the outputs, in the order of [`BackendFunction::run`].
    fn outputs(&self) -> &[String];

    /// Tells whether the function reads or writes states.
    fn has_states(&self) -> bool;

    /// Returns the rows that callers keep for the function, besides those of the chain. Inputs and outputs name them.
    fn kept_rows(&self) -> &[KeptRows] {
        &[]
    }

    /// Runs the function and writes its results to the first of `outputs`, whose memory is used again where it is large enough.
    ///
    /// # Errors
    /// An input has the wrong shape or type, states are another backend's, the function is not prepared for several sequences,
    /// or it fails.
    fn run(&self, call: FunctionCall<'_, '_>, outputs: &mut Vec<Tensor>) -> Result<()>;

    /// Adds the only result of each term to `sum`, `[1, C, 1, T]`, in the order of the terms. Results have the shape of `sum` or
    /// `[1, 1, T, C]`. Functions of terms have no states; the first term's function is this one. Returns the time of each term.
    ///
    /// # Errors
    /// Fails like [`BackendFunction::run`], or a result has another shape than `sum`.
    fn run_sum(&self, terms: &[Term<'_>], sum: &mut Tensor) -> Result<Times> {
        run_each(terms, sum)
    }
}

/// Rows of the newest tokens that a function takes as an input, `[1, heads, count, channels]` with zeros before the first token,
/// and that its caller keeps. An output holds the rows of the call's own tokens, `[1, heads, T, channels]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptRows {
    /// Name of the input that takes the rows.
    pub input: String,
    /// Name of the output with the rows of the call's own tokens.
    pub rows: String,
    /// Number of rows of each head.
    pub count: usize,
    /// Number of heads.
    pub heads: usize,
    /// Number of channels of a row.
    pub channels: usize,
}

/// One call of a function, for the tokens of any number of sequences.
pub struct FunctionCall<'a, 's> {
    /// Inputs, in the order of the function.
    pub inputs: &'a [FunctionInput<'a>],
    /// Tokens of the sequence with `states[i]`; ranges follow each other without gaps.
    pub parts: &'a [Range<usize>],
    /// States of each sequence; none for a function that has no states.
    pub states: &'a mut [&'s mut (dyn SequenceStates + 'static)],
}

/// An input of a call.
#[derive(Clone, Copy)]
pub enum FunctionInput<'a> {
    /// Values of the tokens of all sequences.
    Shared(&'a Tensor),
    /// One tensor for each sequence.
    Own(&'a [&'a Tensor]),
}

/// Inputs of a call of one sequence.
pub type CallOperands<'a> = SmallVec<[&'a Tensor; INLINE_TERMS]>;

impl<'a, 's> FunctionCall<'a, 's> {
    /// Returns inputs and states of a call for one sequence, or without states.
    ///
    /// # Errors
    /// The call has several sequences.
    pub fn of_one(self) -> Result<(CallOperands<'a>, Option<&'a mut (dyn SequenceStates + 'static)>)> {
        let several = || Error::input("a call for several sequences, where a function runs for one");
        let one = |input: &FunctionInput<'a>| match input {
            FunctionInput::Shared(tensor) => Some(*tensor),
            FunctionInput::Own([tensor]) => Some(*tensor),
            FunctionInput::Own(_) => None,
        };
        let operands = self.inputs.iter().map(one).collect::<Option<_>>().ok_or_else(several)?;
        match self.states {
            [] => Ok((operands, None)),
            [states] => Ok((operands, Some(&mut **states))),
            _ => Err(several()),
        }
    }
}

/// A function and its inputs, as one term of a sum.
pub struct Term<'a> {
    /// The function.
    pub function: &'a dyn BackendFunction,
    /// Inputs of the function.
    pub inputs: &'a [&'a Tensor],
}

/// Runs the terms of a sum one after the other and returns the time of each; see [`BackendFunction::run_sum`].
pub(crate) fn run_each(terms: &[Term<'_>], sum: &mut Tensor) -> Result<Times> {
    let mut outputs = Vec::new();
    let mut times = Times::new();
    for term in terms {
        let started = Instant::now();
        let inputs: SmallVec<[_; INLINE_TERMS]> =
            term.inputs.iter().map(|tensor| FunctionInput::Shared(tensor)).collect();
        term.function.run(FunctionCall { inputs: &inputs, parts: &[], states: &mut [] }, &mut outputs)?;
        let sizes = match sum.shape.as_slice() {
            &[1, channels, 1, tokens] => (channels, tokens),
            _ => (0, 0),
        };
        let (Some(values), Some(sum)) = (outputs.first().and_then(Tensor::as_f32), sum.as_f32_mut()) else {
            return Err(Error::input("a sum of what is no float tensor"));
        };
        if sum.len() != values.len() {
            return Err(Error::input(format!("{} elements added to {}", values.len(), sum.len())));
        }
        match outputs[0].shape.as_slice() {
            &[1, 1, tokens, channels] if sizes == (channels, tokens) && tokens > 1 => {
                let dense = |stride| Strided { first: 0, stride };
                let (from, to) = ((values, dense(channels)), (sum, dense(tokens)));
                anemoe_kernels::transpose_add(Pool::global(), sizes, from, to);
            }
            _ => sum.iter_mut().zip(values).for_each(|(a, b)| *a += b),
        }
        times.push(started.elapsed());
    }
    Ok(times)
}

/// Values that a sequence carries from call to call in one package.
pub trait SequenceStates: Any + Send + Sync {
    /// Copies the states.
    ///
    /// # Errors
    /// The backend cannot read states.
    fn fork(&self) -> Result<Box<dyn SequenceStates>>;

    /// Sets every state to zero.
    fn clear(&mut self);

    /// Tells whether [`SequenceStates::rewind`] can undo the last `tokens` tokens.
    fn can_rewind(&self, tokens: usize) -> bool {
        let _ = tokens;
        false
    }

    /// Undoes the last `tokens` tokens. Rows of caches may stay, because callers mask them; carried rows become what they were.
    ///
    /// # Errors
    /// [`SequenceStates::can_rewind`] says no, or the backend fails.
    fn rewind(&mut self, tokens: usize) -> Result<()> {
        Err(Error::input(format!("states that cannot undo {tokens} tokens")))
    }

    /// Appends the states to `out`, in a form that [`SequenceStates::restore`] of the same backend reads.
    ///
    /// # Errors
    /// The backend cannot read states.
    fn save(&self, out: &mut Vec<u8>) -> Result<()>;

    /// Takes states from the front of `bytes` and leaves the rest in it.
    ///
    /// # Errors
    /// The bytes are no states of this package.
    fn restore(&mut self, bytes: &mut &[u8]) -> Result<()>;

    /// Lends the last cache, of shape `shape`, to another model's states of the same backend, as `name`. It must not be used until
    /// [`SequenceStates::take_back`].
    ///
    /// # Errors
    /// There is no such cache, or the backend cannot lend it.
    fn lend(&mut self, to: &mut dyn SequenceStates, name: &str, shape: [usize; 4]) -> Result<()> {
        let _ = (to, name, shape);
        Err(Error::input("this backend cannot lend caches to an assistant"))
    }

    /// Takes a cache back that was lent.
    fn take_back(&mut self, from: &mut dyn SequenceStates, name: &str) {
        let _ = (from, name);
    }

    /// Fills every state with noise for measurements, as if tokens had been in it. Returns false where that is not possible.
    fn fill_with_noise(&mut self, seed: u64) -> bool {
        let _ = seed;
        false
    }
}

/// States of functions that have none.
#[derive(Clone, Copy, Debug)]
pub struct NoStates;

impl SequenceStates for NoStates {
    fn fork(&self) -> Result<Box<dyn SequenceStates>> {
        Ok(Box::new(NoStates))
    }

    fn clear(&mut self) {}

    fn can_rewind(&self, _: usize) -> bool {
        true
    }

    fn rewind(&mut self, _: usize) -> Result<()> {
        Ok(())
    }

    fn save(&self, _: &mut Vec<u8>) -> Result<()> {
        Ok(())
    }

    fn fill_with_noise(&mut self, _: u64) -> bool {
        true
    }

    fn restore(&mut self, _: &mut &[u8]) -> Result<()> {
        Ok(())
    }
}

/// Work that calls did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bytes of weights, keys and values read.
    pub bytes_read: u64,
    /// Multiply-adds by weights, keys and values.
    pub multiply_adds: u64,
    /// Experts that ran.
    pub experts: u64,
    /// Experts that did not run because their result is multiplied by zero.
    pub skipped: u64,
}

impl Counts {
    /// Counts a product that read `bytes` bytes of weights and made `results` values, each a sum of `depth` products.
    pub fn product(bytes: u64, results: usize, depth: usize) -> Counts {
        Counts { bytes_read: bytes, multiply_adds: results as u64 * depth as u64, ..Counts::default() }
    }
}

impl Sub for Counts {
    type Output = Counts;

    fn sub(self, earlier: Counts) -> Counts {
        Counts {
            bytes_read: self.bytes_read - earlier.bytes_read,
            multiply_adds: self.multiply_adds - earlier.multiply_adds,
            experts: self.experts - earlier.experts,
            skipped: self.skipped - earlier.skipped,
        }
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.bytes_read += other.bytes_read;
        self.multiply_adds += other.multiply_adds;
        self.experts += other.experts;
        self.skipped += other.skipped;
    }
}

/// Time of an operation, or of several fused ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpTime {
    /// Operation type, for instance `conv`.
    pub op_type: String,
    /// Name of the operation.
    pub name: String,
    /// Time of all calls.
    pub time: Duration,
}
