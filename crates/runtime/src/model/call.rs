//! One package call of a chain: registers in, function, registers out.
//!
//! ```text
//! registers [1, C, 1, M] --piece's columns, rows, padding--> inputs [1, C', 1, T] --function--> outputs --columns--> registers
//! ```
//! A piece is the tokens of one sequence in a call, or all tokens of a pass where the function has no states.

use super::host::{self, HostValues, Piece};
use super::kept_rows::{RowsByInput, append_rows, fill_rows};
use crate::backend::{
    BackendFunction, BackendPackage, CallOperands, CallTokens, FunctionCall, FunctionInput, INLINE_TERMS,
    KeptRows, SequenceStates, Term,
};
use crate::tensor::Tensor;
use crate::{Error, Result};
use anemoe_bundle::{CHAIN_FILE, RowRange, TokenCount};
use anemoe_kernels::{Pool, Strided};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

/// Cost of one more token in a call, relative to a call for one token, on a device that is limited by reading weights. It
/// decides between one padded call and several small ones.
const COST_PER_TOKEN: f64 = 0.05;

/// Picks the function to call when `n` tokens are left: the cheapest one per token.
fn pick(counts: &[TokenCount], n: usize) -> TokenCount {
    let per_token = |c: &TokenCount| {
        let width = if c.min == c.max { c.max } else { n.min(c.max) };
        (1.0 + COST_PER_TOKEN * width as f64) / n.min(c.max) as f64
    };
    let best = counts.iter().copied().min_by(|a, b| per_token(a).total_cmp(&per_token(b)));
    best.unwrap_or(TokenCount { min: 1, max: 1 })
}

/// Most prepared functions that a call keeps, by token count and context.
const KEPT_FUNCTIONS: usize = 32;

/// A prepared function, with the visible slots and the tokens that it was prepared for; none where the backend has no such
/// function.
type PreparedFor = ((usize, CallTokens), Option<Arc<Prepared>>);

/// Package index and function name, by the token count that the function is declared for.
type ByTokens = BTreeMap<TokenCount, (usize, String)>;

/// The functions of a call, by the positions that a sequence has after the call.
#[derive(Default)]
pub(super) struct CallFunctions {
    /// Functions that see only the first slots of a cache, by the number of these slots.
    by_context: BTreeMap<usize, ByTokens>,
    pub whole: ByTokens,
}

impl CallFunctions {
    /// Adds a function.
    pub fn insert(&mut self, context: Option<usize>, tokens: TokenCount, function: (usize, String)) {
        let own = match context {
            Some(context) => self.by_context.entry(context).or_default(),
            None => &mut self.whole,
        };
        own.insert(tokens, function);
    }

    /// Returns the smallest context that holds `positions`, as the slots that its functions see; the maximum where none does.
    fn context(&self, positions: usize) -> usize {
        self.by_context.range(positions..).next().map_or(usize::MAX, |(context, _)| *context)
    }

    fn of(&self, context: usize) -> &ByTokens {
        self.by_context.get(&context).unwrap_or(&self.whole)
    }

    fn packages(&self) -> impl Iterator<Item = usize> {
        self.whole
            .values()
            .chain(self.by_context.values().flat_map(BTreeMap::values))
            .map(|(package, _)| *package)
    }
}

/// Origin of an input of a call.
#[derive(Clone, Copy)]
pub(super) enum InputSource {
    Register {
        index: usize,
        rows: Option<RowRange>,
        rescale: bool,
    },
    Host(usize),
    /// Rows of earlier tokens, by their index in [`Prepared::kept`].
    Kept(usize),
}

impl InputSource {
    fn host(&self) -> Option<usize> {
        if let InputSource::Host(index) = self { Some(*index) } else { None }
    }
}

/// Receiver of an output of a call.
#[derive(Clone, Copy)]
pub(super) enum OutputSink {
    Register(RegisterSink),
    /// Rows of the call's tokens, by their index in [`Prepared::kept`].
    Kept(usize),
}

/// The register that receives an output.
#[derive(Clone, Copy)]
pub(super) struct RegisterSink {
    pub register: usize,
    /// Rows that are written, and the number of rows of the whole register.
    pub rows: Option<(RowRange, usize)>,
    pub accumulate: bool,
}

/// A call of a package, by names; names are resolved when a function is prepared.
#[derive(Default)]
pub(super) struct Call {
    pub shard: String,
    /// Layer of the shard.
    pub layer: Option<usize>,
    /// Layer that begins with this call, if its stream is the output of the layer before: a package may reach from a layer into
    /// the next one.
    pub begins: Option<usize>,
    /// Index of the package; of the first one, where each token count has a package of its own. Its states serve all of them.
    pub package: usize,
    pub when: Option<(usize, RowRange)>,
    pub inputs: BTreeMap<String, InputSource>,
    pub outputs: BTreeMap<String, RegisterSink>,
    /// Rows that are kept by the chain.
    pub kept: Vec<KeptRows>,
    pub functions: CallFunctions,
    /// Token axis of each input that has one.
    pub axes: BTreeMap<String, usize>,
    /// True if registers go in and out as `[1, 1, T, C]`.
    pub channels_last: bool,
    /// Prepared functions by context and tokens of a call, up to [`KEPT_FUNCTIONS`], oldest first.
    pub prepared: RwLock<Vec<PreparedFor>>,
    pub has_states: OnceLock<bool>,
}

/// A function, the index of its package, and the tokens of its calls where they have a fixed number.
type ChosenFunction = (usize, Arc<dyn BackendFunction>, Option<usize>);

/// Packages of a model, by index.
type Packages = [Box<dyn BackendPackage>];

/// A function that is prepared for calls.
pub(super) struct Prepared {
    /// Index of its package.
    pub package: usize,
    pub function: Arc<dyn BackendFunction>,
    /// Sources of the function's inputs, in their order.
    inputs: Vec<InputSource>,
    /// Targets of the function's outputs, in their order.
    outputs: Vec<OutputSink>,
    kept: Vec<KeptRows>,
    channels_last: bool,
    /// Tokens of the function's call, where it has a fixed number; a piece with fewer tokens is padded.
    width: Option<usize>,
    /// First slots of a cache that the function sees; the maximum if it sees all.
    seen: usize,
}

/// States and kept rows of one sequence of a call.
pub(super) struct SequenceMemory<'a> {
    pub states: &'a mut (dyn SequenceStates + 'static),
    pub rows: &'a mut RowsByInput,
}

/// Values that calls of a pass of `tokens` tokens read and write.
pub(super) struct CallContext<'a, 'h> {
    pub bundle: &'a Path,
    pub tokens: usize,
    pub registers: &'a mut [Tensor],
    pub host: &'a mut HostValues<'h>,
    pub scratch: &'a mut CallScratch,
}

/// Memory of calls.
#[derive(Default)]
pub(super) struct CallScratch {
    /// For each input, a copy of rows or columns of a register, and whether the call reads the copy.
    copies: Vec<(Tensor, bool)>,
    /// For each kept rows, those of each sequence.
    rows: Vec<Vec<Tensor>>,
    /// The copies for each term of a sum.
    terms: Vec<Vec<(Tensor, bool)>>,
    outputs: Vec<Tensor>,
    /// Copy of an output that is transposed.
    transposed: Vec<f32>,
}

/// Transposes an output `[1, 1, T, C]` to `[1, C, 1, T]`, with memory for a copy.
fn put_channels_first(output: &mut Tensor, copy: &mut Vec<f32>) -> std::result::Result<(), String> {
    let &[1, 1, tokens, channels] = output.shape.as_slice() else {
        return Err(format!("an output of shape {:?}, expected [1, 1, T, C]", output.shape));
    };
    output.shape = vec![1, channels, 1, tokens];
    if let Some(values) = output.as_f32_mut().filter(|_| tokens > 1) {
        copy.clear();
        copy.extend_from_slice(values);
        transpose((tokens, channels), copy, values);
    }
    Ok(())
}

/// Transposes `from`, `[rows, columns]`, to `to`, `[columns, rows]`.
fn transpose((rows, columns): (usize, usize), from: &[f32], to: &mut [f32]) {
    if rows == 1 || columns == 1 {
        return to.copy_from_slice(from);
    }
    let dense = |stride| Strided { first: 0, stride };
    anemoe_kernels::transpose(Pool::global(), (columns, rows), (from, dense(columns)), (to, dense(rows)));
}

/// Transposes inputs from registers to copies `[1, 1, T, C]`.
fn put_channels_last(inputs: &[InputSource], copies: &mut [(Tensor, bool)], registers: &[Tensor]) {
    for (source, (copy, taken)) in inputs.iter().zip(copies) {
        let InputSource::Register { index, .. } = source else { continue };
        let own = std::mem::take(copy);
        let from = if *taken { &own } else { &registers[*index] };
        let (&[_, channels, _, tokens], Some(values)) = (from.shape.as_slice(), from.as_f32()) else {
            continue;
        };
        transpose((channels, tokens), values, copy.reset_f32(&[1, 1, tokens, channels]));
        *taken = true;
    }
}

impl Call {
    /// Returns the indices of its packages.
    pub fn packages(&self) -> impl Iterator<Item = usize> {
        self.functions.packages()
    }

    /// Tells whether both calls are of one layer and add to the same register, which neither reads.
    pub fn is_like(&self, other: &Call) -> bool {
        let sum = |c: &Call| match c.outputs.values().collect::<Vec<_>>().as_slice() {
            [RegisterSink { register, rows: None, accumulate: true }] => Some(*register),
            _ => None,
        };
        let reads = |c: &Call, register: usize| {
            let is = |s: &InputSource| matches!(s, InputSource::Register { index, .. } if *index == register);
            c.inputs.values().any(is) || c.when.as_ref().is_some_and(|(when, _)| *when == register)
        };
        let (Some(own), Some(others)) = (sum(self), sum(other)) else { return false };
        self.channels_last == other.channels_last
            && own == others
            && self.layer == other.layer
            && !reads(self, own)
            && !reads(other, own)
    }

    /// Makes an error of the chain at this call.
    pub fn contradiction(&self, bundle: &Path, what: String) -> Error {
        Error::invalid(bundle.join(CHAIN_FILE), format!("chain: shard `{}`: {what}", self.shard))
    }

    /// Tells whether the function has states: each sequence then needs a call of its own.
    ///
    /// # Errors
    /// Fails like [`Call::prepare`].
    pub fn has_states(&self, packages: &Packages, bundle: &Path) -> Result<bool> {
        if let Some(known) = self.has_states.get() {
            return Ok(*known);
        }
        let with_host = self.inputs.values().any(|s| matches!(s, InputSource::Host(_)));
        let found = with_host || self.prepare(packages, 1, 1, bundle)?.function.has_states();
        Ok(*self.has_states.get_or_init(|| found))
    }

    /// Prepares the function for pieces of at most `tokens` tokens, after which a sequence has at most `positions` positions.
    /// If the backend runs functions only as they are declared, the function may be for fewer tokens, and the piece has to
    /// be split.
    ///
    /// # Errors
    /// The package has no such function, it is invalid, or its inputs and outputs are not those of the chain.
    pub fn prepare(
        &self,
        packages: &Packages,
        tokens: usize,
        positions: usize,
        bundle: &Path,
    ) -> Result<Arc<Prepared>> {
        let prepared = self.prepare_for(packages, CallTokens::Exactly(tokens), positions, bundle)?;
        prepared.ok_or_else(|| Error::input(format!("shard `{}` has no function", self.shard)))
    }

    /// Prepares the function for calls of `tokens`, after which a sequence has at most `positions` positions; none where the
    /// backend runs sequences one by one.
    ///
    /// # Errors
    /// Fails like [`Call::prepare`].
    pub fn prepare_for(
        &self,
        packages: &Packages,
        tokens: CallTokens,
        positions: usize,
        bundle: &Path,
    ) -> Result<Option<Arc<Prepared>>> {
        let seen = self.functions.context(positions);
        let find =
            |all: &[PreparedFor]| all.iter().find(|(key, _)| *key == (seen, tokens)).map(|(_, p)| p.clone());
        if let Some(found) = find(&self.prepared.read().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(found);
        }
        let functions = self.functions.of(seen);
        let chosen = match tokens {
            CallTokens::Exactly(n) => self.choose(packages, functions, n)?,
            CallTokens::OfSequences => match functions.iter().next_back() {
                Some((count, (package, name))) => packages[*package]
                    .prepare_for(name, &self.axes, count.min, tokens)?
                    .map(|function| (*package, function, None)),
                None => None,
            },
        };
        let bound = |(package, function, width)| self.bind(package, function, width, seen, bundle);
        let prepared = chosen.map(bound).transpose()?.map(Arc::new);
        let mut all = self.prepared.write().unwrap_or_else(PoisonError::into_inner);
        Ok(find(&all).unwrap_or_else(|| {
            if all.len() >= KEPT_FUNCTIONS {
                all.remove(0);
            }
            all.push(((seen, tokens), prepared.clone()));
            prepared
        }))
    }

    /// Finds the sources and sinks of a function's inputs and outputs.
    fn bind(
        &self,
        package: usize,
        function: Arc<dyn BackendFunction>,
        width: Option<usize>,
        seen: usize,
        bundle: &Path,
    ) -> Result<Prepared> {
        let wrong = |what: String| self.contradiction(bundle, what);
        let kept: Vec<KeptRows> = self.kept.iter().chain(function.kept_rows()).cloned().collect();
        for KeptRows { input, rows, .. } in &kept {
            if !function.inputs().contains(input) || !function.outputs().contains(rows) {
                return Err(wrong(format!("a function without `{input}` or `{rows}`")));
            }
        }
        let mut inputs = Vec::new();
        for name in function.inputs() {
            let kept = kept.iter().position(|k| k.input == *name).map(InputSource::Kept);
            let source = kept.or_else(|| self.inputs.get(name).copied());
            inputs.push(source.ok_or_else(|| wrong(format!("nothing is bound to input `{name}`")))?);
        }
        if inputs.len() != self.inputs.len() + kept.len() {
            let (bound, has) = (self.inputs.len() + kept.len(), inputs.len());
            return Err(wrong(format!("{bound} inputs are bound, the function has {has}")));
        }
        let mut outputs = Vec::new();
        for name in function.outputs() {
            let kept = kept.iter().position(|k| k.rows == *name).map(OutputSink::Kept);
            let sink = kept.or_else(|| self.outputs.get(name).copied().map(OutputSink::Register));
            outputs.push(sink.ok_or_else(|| wrong(format!("output `{name}` goes nowhere")))?);
        }
        if outputs.len() != self.outputs.len() + kept.len() {
            let (bound, has) = (self.outputs.len() + kept.len(), outputs.len());
            return Err(wrong(format!("{bound} outputs are bound, the function has {has}")));
        }
        let channels_last = self.channels_last;
        Ok(Prepared { package, function, inputs, outputs, kept, channels_last, width, seen })
    }

    /// Chooses the function for `tokens` tokens; prefers a
    /// function declared for exactly these tokens, then one that the backend makes for them, then the cheapest declared one.
    fn choose(
        &self,
        packages: &Packages,
        functions: &ByTokens,
        tokens: usize,
    ) -> Result<Option<ChosenFunction>> {
        let holds = |c: &TokenCount| c.min <= tokens && tokens <= c.max;
        let exact = functions.iter().find(|(c, _)| holds(c));
        if let Some((count, (package, name))) = exact
            && count.min == count.max
        {
            return Ok(Some((*package, packages[*package].prepare(name)?, Some(tokens))));
        }
        // A function of many tokens shows their axes better than one of a single token. A function of a fixed shape runs
        // faster than one of a range.
        let larger = || functions.iter().find(|(c, _)| c.max > tokens);
        if let Some((count, (package, name))) = exact.or_else(larger).or_else(|| functions.iter().next_back())
            && let Some(function) =
                packages[*package].prepare_for(name, &self.axes, count.min, CallTokens::Exactly(tokens))?
        {
            return Ok(Some((*package, function, Some(tokens))));
        }
        if let Some((_, (package, name))) = exact {
            return Ok(Some((*package, packages[*package].prepare(name)?, Some(tokens))));
        }
        let counts: Vec<TokenCount> = functions.keys().copied().collect();
        let count = pick(&counts, tokens);
        let width = if count.min == count.max { count.max } else { tokens.min(count.max) };
        let Some((package, name)) = functions.get(&count) else { return Ok(None) };
        Ok(Some((*package, packages[*package].prepare(name)?, Some(width))))
    }

    /// Runs the function for one piece, or for the pieces of all sequences of a pass: gathers its inputs from registers, host
    /// values and kept rows, and scatters its outputs. `carried` belongs to the pieces' sequences.
    ///
    /// # Errors
    /// A register does not fit, or the function fails.
    pub fn run(
        &self,
        prepared: &Prepared,
        pieces: &[Piece],
        carried: &mut [SequenceMemory<'_>],
        context: CallContext<'_, '_>,
    ) -> Result<()> {
        let CallContext { bundle, tokens: all, registers, host, scratch } = context;
        let wrong = |what: String| self.contradiction(bundle, what);
        let CallScratch { copies, rows, outputs, transposed, .. } = scratch;
        let first = pieces.first().map_or(0, |piece| piece.first);
        let columns = first..pieces.last().map_or(0, |piece| piece.first + piece.tokens);
        let width = prepared.width.unwrap_or(columns.len());
        let wanted: SmallVec<[usize; INLINE_TERMS]> =
            prepared.inputs.iter().filter_map(InputSource::host).collect();
        for piece in pieces {
            let width = if pieces.len() == 1 { width } else { piece.tokens };
            host.fill(*piece, &wanted, width, prepared.seen);
        }
        prepared.gather(columns.clone(), width, all, copies, registers).map_err(wrong)?;
        rows.resize_with(rows.len().max(prepared.kept.len()), Vec::new);
        for (kept, rows) in prepared.kept.iter().zip(&mut *rows) {
            rows.resize_with(rows.len().max(carried.len()), Tensor::default);
            rows.iter_mut().zip(&*carried).for_each(|(to, of)| fill_rows(to, of.rows, kept));
        }
        {
            let host = &*host;
            let of_sequences: SmallVec<[SmallVec<[&Tensor; 1]>; INLINE_TERMS]> = prepared
                .inputs
                .iter()
                .map(|source| match source {
                    InputSource::Register { .. } => SmallVec::new(),
                    InputSource::Host(i) => pieces.iter().map(|piece| host.get(*piece, *i)).collect(),
                    InputSource::Kept(k) => rows[*k].iter().take(pieces.len()).collect(),
                })
                .collect();
            let inputs = prepared.inputs.iter().zip(copies.iter()).zip(&of_sequences);
            let inputs: SmallVec<[FunctionInput<'_>; INLINE_TERMS]> = inputs
                .map(|((source, copy), own)| match source {
                    InputSource::Register { index, .. } => {
                        FunctionInput::Shared(operand(*index, copy, registers))
                    }
                    InputSource::Host(_) | InputSource::Kept(_) => FunctionInput::Own(own),
                })
                .collect();
            let parts: SmallVec<[Range<usize>; 1]> =
                pieces.iter().map(|p| p.first - first..p.first - first + p.tokens).collect();
            let mut states: SmallVec<[&mut (dyn SequenceStates + 'static); 1]> =
                carried.iter_mut().map(|of| &mut *of.states).collect();
            let call = FunctionCall { inputs: &inputs, parts: &parts, states: &mut states };
            prepared.function.run(call, outputs)?;
        }
        for (sink, output) in prepared.outputs.iter().zip(outputs) {
            match sink {
                OutputSink::Kept(k) => {
                    for (of, piece) in carried.iter_mut().zip(pieces) {
                        let kept = &prepared.kept[*k];
                        let tokens = piece.first - first..piece.first - first + piece.tokens;
                        append_rows(of.rows, kept, output, tokens)?;
                    }
                }
                OutputSink::Register(sink) => {
                    if prepared.channels_last {
                        put_channels_first(output, transposed).map_err(wrong)?;
                    }
                    scatter(output, sink, columns.clone(), width, all, registers).map_err(wrong)?;
                }
            }
        }
        Ok(())
    }
}

impl CallScratch {
    /// Gathers the inputs of terms of a sum, which are `tokens` tokens wide. An error has the index of its term.
    pub fn gather(
        &mut self,
        terms: &[Arc<Prepared>],
        tokens: usize,
        registers: &[Tensor],
    ) -> std::result::Result<(), (usize, String)> {
        self.terms.resize_with(self.terms.len().max(terms.len()), Vec::new);
        for (i, (prepared, copies)) in terms.iter().zip(&mut self.terms).enumerate() {
            let gathered = prepared.gather(0..tokens, tokens, tokens, copies, registers);
            gathered.map_err(|what| (i, what))?;
        }
        Ok(())
    }

    /// Returns the inputs of each term, after [`CallScratch::gather`].
    pub fn operands<'a>(
        &'a self,
        terms: &'a [Arc<Prepared>],
        registers: &'a [Tensor],
    ) -> impl Iterator<Item = CallOperands<'a>> {
        terms.iter().zip(&self.terms).map(|(prepared, copies)| prepared.operands(copies, registers))
    }
}

/// Returns a register, or the copy that a call reads in its place.
fn operand<'a>(index: usize, (copy, taken): &'a (Tensor, bool), registers: &'a [Tensor]) -> &'a Tensor {
    if *taken { copy } else { &registers[index] }
}

impl Prepared {
    /// Returns how many of `left` tokens a call takes.
    pub fn tokens_of(&self, left: usize) -> usize {
        self.width.map_or(left, |width| width.min(left))
    }

    /// Tells whether the call takes exactly `tokens` tokens, without padding.
    pub fn is_exact(&self, tokens: usize) -> bool {
        self.width == Some(tokens)
    }

    /// Returns the register that its only output goes to; the first one where it has others.
    pub fn target(&self) -> usize {
        match self.outputs.first() {
            Some(OutputSink::Register(sink)) => sink.register,
            _ => 0,
        }
    }

    /// Makes a term of a sum.
    pub fn term<'a>(&'a self, inputs: &'a [&'a Tensor]) -> Term<'a> {
        Term { function: self.function.as_ref(), inputs }
    }

    /// Tells whether all inputs come from registers.
    pub fn reads_registers(&self) -> bool {
        self.inputs.iter().all(|s| matches!(s, InputSource::Register { .. }))
    }

    /// Copies inputs that are not just a register, for a call of `width` tokens: rows of one, `columns` of registers of `all`
    /// columns, or a rescaled register.
    fn gather(
        &self,
        columns: Range<usize>,
        width: usize,
        all: usize,
        copies: &mut Vec<(Tensor, bool)>,
        registers: &[Tensor],
    ) -> std::result::Result<(), String> {
        copies.resize_with(copies.len().max(self.inputs.len()), Default::default);
        let whole = columns == (0..all) && width == all;
        for (source, (copy, taken)) in self.inputs.iter().zip(copies.iter_mut()) {
            *taken = false;
            let InputSource::Register { index, rows, rescale } = source else { continue };
            let register = &registers[*index];
            let values = register.as_f32().unwrap_or_default();
            let has = register.shape.last().copied().unwrap_or(0);
            if has != all {
                return Err(format!("a register of shape {:?}, where {all} tokens are run", register.shape));
            }
            if rows.is_some() || !whole {
                let rows = match rows {
                    Some(rows) => rows.start..rows.start + rows.count,
                    None => 0..values.len() / all.max(1),
                };
                let part = values.get(rows.start * all..rows.end * all);
                let part = part.ok_or_else(|| {
                    format!("rows {}.. of a register of shape {:?}", rows.start, register.shape)
                })?;
                let to = copy.reset_f32(&[1, rows.len(), 1, width]);
                if whole {
                    to.copy_from_slice(part);
                } else {
                    copy_columns(part, all, columns.clone(), to, width);
                }
                *taken = true;
            }
            if *rescale && host::is_large(if *taken { copy.as_f32().unwrap_or_default() } else { values }) {
                if !*taken {
                    copy.reset_f32(&register.shape).copy_from_slice(values);
                    *taken = true;
                }
                host::rescale(copy.as_f32_mut().unwrap_or_default(), width);
            }
        }
        if self.channels_last {
            put_channels_last(&self.inputs, copies, registers);
        }
        Ok(())
    }

    /// Returns the inputs of a call that reads only registers, after [`Prepared::gather`].
    fn operands<'a>(&self, copies: &'a [(Tensor, bool)], registers: &'a [Tensor]) -> CallOperands<'a> {
        let registers = self.inputs.iter().zip(copies).filter_map(|(source, copy)| match source {
            InputSource::Register { index, .. } => Some(operand(*index, copy, registers)),
            InputSource::Host(_) | InputSource::Kept(_) => None,
        });
        registers.collect()
    }
}

/// Copies `columns` of each row of `width` elements to the front of a row of `to_width`, and fills the rest with zeros.
fn copy_columns(from: &[f32], width: usize, columns: Range<usize>, to: &mut [f32], to_width: usize) {
    let n = columns.len();
    for (from, to) in from.chunks_exact(width.max(1)).zip(to.chunks_exact_mut(to_width.max(1))) {
        to[..n].copy_from_slice(&from[columns.clone()]);
        to[n..].fill(0.0);
    }
}

/// Writes an output, `[1, rows, 1, width]`, to `columns` of a register of `all` columns.
fn scatter(
    output: &mut Tensor,
    sink: &RegisterSink,
    columns: Range<usize>,
    width: usize,
    all: usize,
    registers: &mut [Tensor],
) -> std::result::Result<(), String> {
    let register = &mut registers[sink.register];
    let has = output.shape.last().copied().unwrap_or(0);
    let Some(values) = output.as_f32().filter(|_| has == width && width > 0) else {
        return Err(format!("an output of shape {:?}, where {width} tokens were run", output.shape));
    };
    let whole = columns == (0..all) && width == all;
    if whole && sink.rows.is_none() && !sink.accumulate {
        std::mem::swap(register, output);
        return Ok(());
    }
    let count = values.len() / width;
    let (first, rows) = match sink.rows {
        Some((range, _)) if range.count != count => {
            return Err(format!("an output of shape {:?}, not {} rows", output.shape, range.count));
        }
        Some((range, rows)) => (range.start, rows),
        None => (0, count),
    };
    if sink.accumulate {
        let sum = register.as_f32_mut().filter(|sum| sum.len() == rows * all && first == 0 && rows == count);
        let sum = sum.ok_or("an output does not fit the register that it is added to")?;
        if whole {
            sum.iter_mut().zip(values).for_each(|(a, b)| *a += b);
            return Ok(());
        }
        for (to, from) in sum.chunks_exact_mut(all).zip(values.chunks_exact(width)) {
            to[columns.clone()].iter_mut().zip(from).for_each(|(a, b)| *a += b);
        }
        return Ok(());
    }
    let to = register.reset_f32(&[1, rows, 1, all]);
    let to = &mut to[first * all..(first + count) * all];
    if whole {
        to.copy_from_slice(values);
        return Ok(());
    }
    for (to, from) in to.chunks_exact_mut(all).zip(values.chunks_exact(width)) {
        to[columns.clone()].copy_from_slice(&from[..columns.len()]);
    }
    Ok(())
}
