//! Runs tokens through the layers and the head.

use super::call::{Call, CallContext, Prepared, SequenceMemory};
use super::chain_program::{ChainOp, ChainProgram};
use super::embedding::EmbeddingFile;
use super::host::{self, HostValue, HostValues, Piece, SequencePlace};
use super::kept_rows::MOST_UNDONE;
use super::sequence::{PackageStates, Sequence};
use super::workspace::PassWorkspace;
use super::{Logits, Model, Registers, locked};
use crate::backend::{CallOperands, CallTokens, INLINE_TERMS, Term};
use crate::tensor::Tensor;
use crate::{Error, Result};
use anemoe_bundle::{CHAIN_FILE, Cache, Chain};
use anemoe_kernels::{Pool, Strided, transpose};
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Observes the residual stream `[1, C, 1, T]` of a pass before layer `i` (first argument), and after the last layer.
pub type LayerObserver<'a> = dyn FnMut(usize, &Tensor) + 'a;

/// Inline capacity for the sequences of a pass.
const INLINE_SEQUENCES: usize = 8;
/// Rows of logits that are transposed together: the logits of 512 tokens would take half a gigabyte more.
const LOGIT_ROWS: usize = 16;
/// Most rows of logits that are kept for the next pass: enough for as many streams.
const SPARE_ROWS: usize = 32;
/// Positions after a call of a function that sees no positions.
const NO_POSITION: usize = 0;

/// Functions whose results are added up.
type Terms = SmallVec<[Arc<Prepared>; INLINE_TERMS]>;

/// One sequence of a batch, and its next tokens.
pub struct Request<'a> {
    /// The sequence that the tokens are appended to.
    pub sequence: &'a mut Sequence,
    /// The next tokens of the sequence.
    pub ids: &'a [u32],
    /// Tokens whose logits are wanted.
    pub logits: Logits,
}

/// Tokens of one sequence in a pass.
struct PassPart<'a> {
    sequence: &'a mut Sequence,
    ids: &'a [u32],
    /// First column of these tokens in the pass.
    first: usize,
}

impl PassPart<'_> {
    /// Returns the sequence's positions after the pass.
    fn end(&self) -> usize {
        self.sequence.position() + self.ids.len()
    }
}

/// Writes a register, which `write` changes with the other registers.
fn write(
    registers: &mut [Tensor],
    to: usize,
    write: impl FnOnce(&mut Tensor, &[Tensor]) -> std::result::Result<(), String>,
) -> std::result::Result<(), String> {
    let mut target = std::mem::take(&mut registers[to]);
    let done = write(&mut target, registers);
    registers[to] = target;
    done
}

/// Most tokens of a pass, if no function is declared for more. Backends that run functions only as they are declared split a
/// pass into pieces.
const MAX_UNDECLARED_TOKENS: usize = 64;

impl ChainProgram {
    /// Returns the most tokens of one pass.
    pub fn most(&self) -> usize {
        self.counts.iter().map(|c| c.max).max().unwrap_or(1).max(MAX_UNDECLARED_TOKENS)
    }
}

/// Returns how many tokens a call may append at `position` such that its last token does not overwrite a row that its first
/// token sees. A ring of `slots` rows holds the newest positions, and a token sees `window` of them.
fn most_in_rings(chain: &Chain, position: usize) -> usize {
    let most = |cache: &Cache| {
        let ahead = cache.slots.saturating_sub(position);
        match cache.window {
            Some(window) => ahead.max((cache.slots + 1).saturating_sub(window)).max(1),
            None => ahead.max(1),
        }
    };
    chain.caches.values().map(most).min().unwrap_or(usize::MAX)
}

impl Model {
    /// Appends tokens to several sequences at once. Returns the wanted logits: for each request, one row of `vocab_size`
    /// values per token.
    ///
    /// # Errors
    /// An id is outside the vocabulary, a context is full, or a sequence is of another model or given twice: nothing is
    /// appended then. Or a package fails: the sequences of its pass have to be cleared then.
    pub fn forward(&self, requests: &mut [Request<'_>]) -> Result<Vec<Vec<Vec<f32>>>> {
        let mut logits = vec![Vec::new(); requests.len()];
        self.advance(requests, None, &mut |_, _| (), &mut |request, row| logits[request].push(row))?;
        Ok(logits)
    }

    /// Appends `ids` to one sequence and returns the wanted logits, one row of `vocab_size` values per token.
    ///
    /// `chunk` limits the tokens of one pass; the result does not depend on it.
    ///
    /// # Errors
    /// Fails like [`Model::forward`].
    pub fn append(
        &self,
        sequence: &mut Sequence,
        ids: &[u32],
        logits: Logits,
        chunk: Option<usize>,
    ) -> Result<Vec<Vec<f32>>> {
        self.append_watched(sequence, ids, logits, chunk, &mut |_, _| ())
    }

    /// Appends `ids` like [`Model::append`], and shows `watch` the residual stream between layers.
    ///
    /// # Errors
    /// Fails like [`Model::forward`].
    pub fn append_watched(
        &self,
        sequence: &mut Sequence,
        ids: &[u32],
        logits: Logits,
        chunk: Option<usize>,
        watch: &mut LayerObserver<'_>,
    ) -> Result<Vec<Vec<f32>>> {
        let mut rows = Vec::new();
        let mut requests = [Request { sequence, ids, logits }];
        self.advance(&mut requests, chunk, watch, &mut |_, row| rows.push(row))?;
        Ok(rows)
    }

    /// Takes back rows of logits, whose memory the next pass uses instead of new pages: a row for 262,144 tokens has 256 pages.
    pub fn reuse_rows(&self, rows: impl IntoIterator<Item = Vec<f32>>) {
        let mut spare = locked(&self.spare_rows);
        let room = SPARE_ROWS.saturating_sub(spare.len());
        spare.extend(rows.into_iter().take(room));
    }

    /// Appends `tokens` tokens in one pass. Their registers, `[channels, tokens]`, are given: `hidden` in place of embeddings, and
    /// all registers that the steps read before they write them. Shows `read` the registers after the steps.
    ///
    /// # Errors
    /// There are no tokens, or more than the context or a ring of a cache has room for; a register is not one of the chain's, or
    /// not of `tokens` tokens; a package fails.
    pub fn pass_from<T>(
        &self,
        sequence: &mut Sequence,
        tokens: usize,
        registers: &[(&str, &[f32])],
        read: &mut dyn FnMut(Registers<'_>) -> T,
    ) -> Result<T> {
        self.check(sequence)?;
        let room = self.room_for_pass(sequence);
        if room == 0 {
            return Err(Error::input(format!("context of {} tokens is full", self.chain.model.max_context)));
        }
        if tokens == 0 || tokens > room {
            return Err(Error::input(format!("a pass of {tokens} tokens, where 1 to {room} have room")));
        }
        let mut workspace = self.workspace();
        for (name, values) in registers {
            let index = self.register(name)?;
            if !values.len().is_multiple_of(tokens) {
                let what = format!("register `{name}`: {} values for {tokens} tokens", values.len());
                return Err(Error::input(what));
            }
            let register = &mut workspace.registers[index];
            register.reset_f32(&[1, values.len() / tokens, 1, tokens]).copy_from_slice(values);
        }
        // Only the number of ids matters.
        let ids = vec![0; tokens];
        let mut parts = [PassPart { sequence, ids: &ids, first: 0 }];
        parts[0].sequence.is_broken = true;
        self.execute(false, &mut parts, tokens, &mut workspace, &mut |_, _| ())?;
        let [PassPart { sequence, .. }] = parts;
        sequence.is_broken = false;
        sequence.push_unknown(tokens);
        let found = read(Registers { names: &self.names, values: &workspace.registers });
        locked(&self.workspaces).push(workspace);
        Ok(found)
    }

    /// Returns the most tokens that one pass may append to a sequence: the room in the context and in the rings of caches.
    pub fn room_for_pass(&self, sequence: &Sequence) -> usize {
        let position = sequence.position();
        let left = self.chain.model.max_context.saturating_sub(position);
        left.min(most_in_rings(&self.chain, position))
    }

    /// Returns the most tokens of one pass, where callers limit it to `chunk`.
    pub fn most_tokens(&self, chunk: Option<usize>) -> usize {
        chunk.unwrap_or(usize::MAX).clamp(1, self.body.most())
    }

    /// Returns the index of a register.
    fn register(&self, name: &str) -> Result<usize> {
        let missing = || self.contradiction(format!("no step has a register `{name}`"));
        self.names.find(name).ok_or_else(missing)
    }

    /// Takes memory for a pass: from an earlier pass, or new.
    fn workspace(&self) -> PassWorkspace {
        let mut workspace = locked(&self.workspaces).pop().unwrap_or_default();
        workspace.registers.resize_with(self.names.len(), Tensor::default);
        for (values, program) in workspace.host.iter_mut().zip([&self.body, &self.head]) {
            values.resize_with(program.host.len(), HostValue::default);
        }
        workspace
    }

    /// Opens the embedding at its first use.
    pub(super) fn opened<'a>(
        &self,
        embedding: &'a mut Option<EmbeddingFile>,
    ) -> Result<&'a mut EmbeddingFile> {
        Ok(match embedding.take() {
            Some(open) => embedding.insert(open),
            None => embedding.insert(EmbeddingFile::open(&self.bundle, &self.chain.embedding)?),
        })
    }

    /// Runs one step of an assistant at the place of its sequence; `input` is its register of that name. Returns logits and the
    /// next hidden state.
    ///
    /// # Errors
    /// A package fails, or does not fit the chain.
    pub(super) fn assist(&self, own: &mut Sequence, input: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        let mut workspace = self.workspace();
        let (given, state) = (self.register("input")?, self.register("state")?);
        workspace.registers[given].reset_f32(&[1, input.len(), 1, 1]).copy_from_slice(input);
        let mut parts = [PassPart { sequence: own, ids: &[0], first: 0 }];
        self.execute(false, &mut parts, 1, &mut workspace, &mut |_, _| ())?;
        let mut logits = Vec::new();
        match self.chain.assistant.as_ref().and_then(|of| of.centroids) {
            None => self.read_logits(&[(0, 0)], &mut workspace, &mut |_, row| logits = row)?,
            Some(of) => {
                self.execute(true, &mut [], 1, &mut workspace, &mut |_, _| ())?;
                let values = |i: usize| workspace.registers[i].as_f32().unwrap_or_default();
                logits =
                    self.logits_of_groups(of, values(self.logits), values(self.register("normalized")?))?;
            }
        }
        let state = workspace.registers[state].as_f32().unwrap_or_default().to_vec();
        locked(&self.workspaces).push(workspace);
        Ok((logits, state))
    }

    /// Refuses requests that could not be run completely.
    fn check_requests(&self, requests: &[Request<'_>]) -> Result<()> {
        let model = &self.chain.model;
        if self.chain.assistant.is_some() {
            let what = "an assistant drafts for another model: give its bundle to --drafter";
            return Err(Error::input(what));
        }
        for request in requests {
            self.check(request.sequence)?;
            if let Some(id) = request.ids.iter().find(|&&id| id as usize >= model.vocab_size) {
                return Err(Error::input(format!(
                    "token id {id} is outside the vocabulary of {} tokens",
                    model.vocab_size
                )));
            }
            let position = request.sequence.position();
            if request.ids.len() > model.max_context - position.min(model.max_context) {
                return Err(Error::input(format!(
                    "context of {} tokens is full: {position} tokens are in it and {} more were given; build with a larger --max-context",
                    model.max_context,
                    request.ids.len()
                )));
            }
        }
        Ok(())
    }

    /// Runs requests in passes of as many tokens as one call takes, at most `chunk`. Calls `out` with the request's index and
    /// each row of logits.
    ///
    /// # Errors
    /// Fails like [`Model::forward`].
    pub(crate) fn advance(
        &self,
        requests: &mut [Request<'_>],
        chunk: Option<usize>,
        watch: &mut LayerObserver<'_>,
        out: &mut dyn FnMut(usize, Vec<f32>),
    ) -> Result<()> {
        self.check_requests(requests)?;
        let limit = self.most_tokens(chunk);
        let mut done: SmallVec<[usize; INLINE_SEQUENCES]> = requests.iter().map(|_| 0).collect();
        let mut workspace = self.workspace();
        loop {
            let mut room = limit;
            let mut parts: SmallVec<[PassPart<'_>; INLINE_SEQUENCES]> = SmallVec::new();
            let mut rows: SmallVec<[(usize, usize); INLINE_SEQUENCES]> = SmallVec::new();
            for (i, (request, done)) in requests.iter_mut().zip(&mut done).enumerate() {
                let left = request.ids.len() - *done;
                let n = left.min(room).min(most_in_rings(&self.chain, request.sequence.position()));
                if n == 0 {
                    continue;
                }
                let first = limit - room;
                let ids = &request.ids[*done..*done + n];
                parts.push(PassPart { sequence: request.sequence, ids, first });
                let wanted = match request.logits {
                    Logits::All => first..first + n,
                    Logits::Last if n == left => first + n - 1..first + n,
                    _ => 0..0,
                };
                rows.extend(wanted.map(|column| (i, column)));
                *done += n;
                room -= n;
            }
            if parts.is_empty() {
                locked(&self.workspaces).push(workspace);
                return Ok(());
            }
            parts.iter_mut().for_each(|part| part.sequence.is_broken = true);
            self.embed(&parts, limit - room, &mut workspace)?;
            self.execute(false, &mut parts, limit - room, &mut workspace, watch)?;
            self.keep_hidden(&mut parts, &workspace.registers[self.hidden]);
            self.read_logits(&rows, &mut workspace, out)?;
            for part in &mut parts {
                let sequence = &mut *part.sequence;
                sequence.is_broken = false;
                sequence.ids.extend_from_slice(part.ids);
                sequence.highest = sequence.highest.max(sequence.position());
            }
        }
    }

    /// Keeps the hidden states of the last tokens of each part, where an assistant needs them: as many as a pass over a draft has.
    fn keep_hidden(&self, parts: &mut [PassPart<'_>], hidden: &Tensor) {
        let (&[1, channels, 1, tokens], Some(values)) = (hidden.shape.as_slice(), hidden.as_f32()) else {
            return;
        };
        if !self.keeps_hidden.load(Ordering::Relaxed) {
            return;
        }
        for PassPart { sequence, ids, first } in parts {
            let n = ids.len().min(MOST_UNDONE + 1);
            let column = *first + ids.len() - n;
            let (from, rows) = (sequence.position() + ids.len() - n, &mut sequence.hidden);
            rows.0 = from;
            rows.1.clear();
            for t in column..column + n {
                rows.1.extend((0..channels).map(|c| values[c * tokens + t]));
            }
        }
    }

    /// Fills register `hidden`, `[1, hidden_size, 1, tokens]`, with scaled embeddings.
    fn embed(&self, parts: &[PassPart<'_>], tokens: usize, workspace: &mut PassWorkspace) -> Result<()> {
        let mut embedding = locked(&self.embedding);
        let embedding = self.opened(&mut embedding)?;
        let cols = self.chain.embedding.cols;
        let row = &mut workspace.row;
        row.resize(cols, 0.0);
        let out = workspace.registers[self.hidden].reset_f32(&[1, cols, 1, tokens]);
        for part in parts {
            for (t, &id) in part.ids.iter().enumerate() {
                embedding.row(id as usize, row)?;
                for (c, v) in row.iter().enumerate() {
                    out[c * tokens + part.first + t] = *v;
                }
            }
        }
        Ok(())
    }

    /// Computes the logits of columns of register `hidden`, each given with the index of its request.
    fn read_logits(
        &self,
        columns: &[(usize, usize)],
        workspace: &mut PassWorkspace,
        out: &mut dyn FnMut(usize, Vec<f32>),
    ) -> Result<()> {
        if columns.is_empty() {
            return Ok(());
        }
        // Register `hidden` takes the input of the head, so the layers' result moves out of it first.
        let column = std::mem::take(&mut workspace.column);
        let hidden = std::mem::replace(&mut workspace.registers[self.hidden], column);
        let done = self.logits_of(&hidden, columns, workspace, out);
        workspace.column = std::mem::replace(&mut workspace.registers[self.hidden], hidden);
        done
    }

    fn logits_of(
        &self,
        hidden: &Tensor,
        columns: &[(usize, usize)],
        workspace: &mut PassWorkspace,
        out: &mut dyn FnMut(usize, Vec<f32>),
    ) -> Result<()> {
        let (channels, vocabulary) = (self.chain.model.hidden_size, self.chain.model.vocab_size);
        let wrong = || self.contradiction(format!("the layers leave a stream of shape {:?}", hidden.shape));
        let (&[1, rows, 1, tokens], Some(values)) = (hidden.shape.as_slice(), hidden.as_f32()) else {
            return Err(wrong());
        };
        if rows != channels || columns.iter().any(|(_, column)| *column >= tokens) {
            return Err(wrong());
        }
        for columns in columns.chunks(self.head.most()) {
            let n = columns.len();
            let read = workspace.registers[self.hidden].reset_f32(&[1, channels, 1, n]);
            for (row, values) in read.chunks_exact_mut(n).zip(values.chunks_exact(tokens)) {
                row.iter_mut().zip(columns).for_each(|(v, (_, column))| *v = values[*column]);
            }
            self.execute(true, &mut [], n, workspace, &mut |_, _| ())?;
            let logits = &workspace.registers[self.logits];
            let values = logits.as_f32().unwrap_or_default();
            if logits.shape != [1, vocabulary, 1, n] || values.len() != vocabulary * n {
                return Err(
                    self.contradiction(format!("head: logits {:?} for {vocabulary} tokens", logits.shape))
                );
            }
            for (group, columns) in columns.chunks(LOGIT_ROWS).enumerate() {
                let rows = match n {
                    1 => values,
                    _ => {
                        let rows = &mut workspace.logit_rows;
                        rows.resize(vocabulary * columns.len(), 0.0);
                        let from = Strided { first: group * LOGIT_ROWS, stride: n };
                        let to = Strided { first: 0, stride: vocabulary };
                        transpose(Pool::global(), (columns.len(), vocabulary), (values, from), (rows, to));
                        rows.as_slice()
                    }
                };
                for (row, (request, _)) in rows.chunks_exact(vocabulary).zip(columns) {
                    let mut copy = locked(&self.spare_rows).pop().unwrap_or_default();
                    copy.clear();
                    copy.extend_from_slice(row);
                    for (id, v) in self.head_order.iter().flatten().zip(row) {
                        copy[*id as usize] = *v;
                    }
                    if let Some(cap) = self.chain.model.final_logit_softcapping {
                        anemoe_kernels::softcap(&mut copy, cap);
                    }
                    out(*request, copy);
                }
            }
        }
        Ok(())
    }

    /// Runs the layers, or the head, on registers of `tokens` columns.
    fn execute(
        &self,
        head: bool,
        parts: &mut [PassPart<'_>],
        tokens: usize,
        workspace: &mut PassWorkspace,
        watch: &mut LayerObserver<'_>,
    ) -> Result<()> {
        let program = if head { &self.head } else { &self.body };
        workspace.pass += 1;
        for op in &program.steps {
            let PassWorkspace { registers, ranking, .. } = &mut *workspace;
            let done = match op {
                ChainOp::Zero { register, channels } => {
                    registers[*register].reset_f32(&[1, *channels, 1, tokens]).fill(0.0);
                    Ok(())
                }
                ChainOp::Route { logits, weights, routing } => {
                    write(registers, *weights, |to, all| host::route(&all[*logits], to, routing, ranking))
                }
                ChainOp::Residual { stream, branch, mix } => write(registers, *stream, |to, all| {
                    mix.apply(to, branch.map(|b| &all[b]))?;
                    if self.fp16_stream {
                        anemoe_kernels::round_to_f16(to.as_f32_mut().unwrap_or_default());
                    }
                    Ok(())
                }),
                ChainOp::Normalize { from, to, norm } => {
                    write(registers, *to, |to, all| norm.apply(&all[*from], to))
                }
                ChainOp::AddScaled { register, from, weights, row } => {
                    write(registers, *register, |to, all| {
                        host::add_scaled(to, &all[*from], &all[*weights], *row)
                    })
                }
                ChainOp::Calls(calls) => {
                    if let Some(layer) = calls[0].begins {
                        watch(layer, &registers[self.hidden]);
                    }
                    self.choose(calls, tokens, workspace);
                    match self.terms(calls, tokens, workspace)? {
                        None => self.run_calls(calls, head, parts, tokens, workspace)?,
                        Some(prepared) => {
                            let PassWorkspace { registers, scratch, .. } = &mut *workspace;
                            let mut sum = std::mem::take(&mut registers[prepared[0].target()]);
                            let times = {
                                let inputs: SmallVec<[CallOperands<'_>; INLINE_TERMS]> =
                                    scratch.operands(&prepared, registers).collect();
                                let terms: SmallVec<[Term<'_>; INLINE_TERMS]> =
                                    prepared.iter().zip(&inputs).map(|(p, inputs)| p.term(inputs)).collect();
                                prepared[0].function.run_sum(&terms, &mut sum)
                            };
                            registers[prepared[0].target()] = sum;
                            let counted = prepared.iter().zip(times?);
                            counted.for_each(|(p, time)| self.counters.add(p.package, time));
                        }
                    }
                    Ok(())
                }
            };
            done.map_err(|what| Error::invalid(self.bundle.join(CHAIN_FILE), what))?;
        }
        if !head {
            watch(self.chain.model.num_layers, &workspace.registers[self.hidden]);
        }
        Ok(())
    }

    /// Chooses the calls whose experts are chosen, and those without a condition.
    fn choose(
        &self,
        calls: &[Call],
        tokens: usize,
        PassWorkspace { registers, wanted, .. }: &mut PassWorkspace,
    ) {
        let zero = |call: &Call| {
            call.when.as_ref().is_some_and(|(register, rows)| {
                let v = registers[*register].as_f32().unwrap_or_default();
                let range = rows.start * tokens..(rows.start + rows.count) * tokens;
                v.get(range).is_some_and(|v| v.iter().all(|&x| x == 0.0))
            })
        };
        wanted.clear();
        wanted.extend((0..calls.len()).filter(|&i| !zero(&calls[i])));
        let skipped = (calls.len() - wanted.len()) as u64;
        self.counters.skipped.fetch_add(skipped, Ordering::Relaxed);
    }

    /// Prepares the chosen calls, which add to one register, as terms of one sum, and gathers their inputs; none where they have
    /// states, read host inputs, or need padding. Even a single term runs as a sum, so that its result is the same as beside
    /// other terms.
    fn terms(&self, calls: &[Call], tokens: usize, workspace: &mut PassWorkspace) -> Result<Option<Terms>> {
        let PassWorkspace { registers, wanted, scratch, .. } = workspace;
        if calls.len() < 2 || wanted.is_empty() || self.low_memory {
            return Ok(None);
        }
        let mut terms = Terms::new();
        for call in wanted.iter().map(|&i| &calls[i]) {
            if call.has_states(&self.packages, &self.bundle)? {
                return Ok(None);
            }
            let prepared = call.prepare(&self.packages, tokens, NO_POSITION, &self.bundle)?;
            if !prepared.is_exact(tokens) || !prepared.reads_registers() {
                return Ok(None);
            }
            terms.push(prepared);
        }
        let gathered = scratch.gather(&terms, tokens, registers);
        gathered.map_err(|(i, what)| calls[wanted[i]].contradiction(&self.bundle, what))?;
        Ok(Some(terms))
    }

    /// Runs the chosen calls one after the other.
    fn run_calls(
        &self,
        calls: &[Call],
        head: bool,
        parts: &mut [PassPart<'_>],
        tokens: usize,
        workspace: &mut PassWorkspace,
    ) -> Result<()> {
        for k in 0..workspace.wanted.len() {
            let call = &calls[workspace.wanted[k]];
            self.call(call, head, parts, tokens, workspace)?;
            if self.low_memory {
                call.packages().for_each(|package| self.packages[package].release());
            }
        }
        Ok(())
    }

    /// Runs one call: once over all tokens, or once per sequence if the function has states and the backend does not run several
    /// at once; in several pieces where the backend has only functions for fewer tokens.
    fn call(
        &self,
        call: &Call,
        head: bool,
        parts: &mut [PassPart<'_>],
        tokens: usize,
        workspace: &mut PassWorkspace,
    ) -> Result<()> {
        let (packages, bundle) = (self.packages.as_slice(), self.bundle.as_path());
        let has_states = call.has_states(packages, bundle)?;
        if has_states && parts.is_empty() {
            return Err(self.contradiction("head: a function with states or inputs of the host".into()));
        }
        let PassWorkspace { registers, scratch, host, pass, .. } = workspace;
        let program = if head { &self.head } else { &self.body };
        let place = |p: &PassPart<'_>| (p.sequence.position(), p.first, p.sequence.lent);
        let places: SmallVec<[SequencePlace; INLINE_SEQUENCES]> = parts.iter().map(place).collect();
        let mut host = HostValues {
            model: &self.chain,
            inputs: &program.host,
            values: &mut host[usize::from(head)],
            places: &places,
            pass: *pass,
        };
        let mut run = |prepared: &Prepared, pieces: &[Piece], parts: &mut [PassPart<'_>]| {
            let started = Instant::now();
            let packages = parts.iter_mut().map(|part| &mut part.sequence.packages[call.package]);
            let mut carried: SmallVec<[SequenceMemory<'_>; INLINE_SEQUENCES]> = packages
                .map(|PackageStates { states, rows }| SequenceMemory { states: states.as_mut(), rows })
                .collect();
            let context = CallContext { bundle, tokens, registers, host: &mut host, scratch };
            let ran = call.run(prepared, pieces, &mut carried, context);
            self.counters.add(prepared.package, started.elapsed());
            ran
        };
        let ends = parts.iter().map(PassPart::end).max().unwrap_or(NO_POSITION);
        if has_states
            && parts.len() > 1
            && let Some(prepared) = call.prepare_for(packages, CallTokens::OfSequences, ends, bundle)?
        {
            let piece =
                |(i, p): (usize, &PassPart<'_>)| Piece { first: p.first, tokens: p.ids.len(), sequence: i };
            let pieces: SmallVec<[Piece; INLINE_SEQUENCES]> = parts.iter().enumerate().map(piece).collect();
            return run(&prepared, &pieces, parts);
        }
        let count = if has_states { parts.len() } else { 1 };
        for i in 0..count {
            let (own, positions) = match has_states {
                true => (i..i + 1, parts[i].end()),
                false => (0..0, NO_POSITION),
            };
            let part = parts.get(i).filter(|_| has_states);
            let (mut first, end) = part.map_or((0, tokens), |p| (p.first, p.first + p.ids.len()));
            while first < end {
                let prepared = call.prepare(packages, end - first, positions, bundle)?;
                let n = prepared.tokens_of(end - first);
                run(&prepared, &[Piece { first, tokens: n, sequence: i }], &mut parts[own.clone()])?;
                first += n;
            }
        }
        Ok(())
    }
}
