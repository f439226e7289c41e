//! Runs a bundle: what `chain.json` says, on any backend.

mod embedding;
mod host;
mod program;
mod vectors;

use crate::backend::{Backend, BackendPackage, OpTime};
use crate::tensor::Tensor;
use crate::{Error, Result};
use anemoe_bundle::{CHAIN_FILE, Chain, Shard, TokenCount};
use anemoe_kernels::Pool;
use embedding::EmbeddingFile;
use program::{Names, Op, Program, pick, run_together};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vectors::Vectors;

/// Which logits a pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// None: the tokens only fill the caches.
    Nothing,
    /// Those of the last token.
    Last,
    /// Those of every token.
    All,
}

/// Time and calls since the engine was opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineStats {
    /// Package calls.
    pub calls: u64,
    /// Calls left out because no expert of the pack was chosen.
    pub skipped: u64,
    /// Time inside packages.
    pub in_packages: Duration,
}

/// Time and calls of one shard since the engine was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardStats {
    /// Its name in the chain.
    pub shard: String,
    /// Calls.
    pub calls: u64,
    /// Time in them, copies of inputs and outputs included.
    pub time: Duration,
    /// Bytes of weights and caches read, where the backend knows.
    pub bytes_read: u64,
    /// Time by operation, where the backend measures it.
    pub ops: Vec<OpTime>,
}

/// Sees the residual stream of `n` tokens before layer `i` (first argument), and behind the last one: `[1, C, 1, T >= n]`.
pub type Watch<'a> = dyn FnMut(usize, &Tensor, usize) + 'a;

/// A loaded bundle with its caches.
pub struct Engine {
    bundle: PathBuf,
    chain: Chain,
    packages: Vec<Box<dyn BackendPackage>>,
    embedding: Option<EmbeddingFile>,
    /// A token's embedding, and what the head reads.
    row: Vec<f32>,
    column: Tensor,
    body: Program,
    head: Program,
    registers: Vec<Tensor>,
    /// Memory for outputs.
    spares: Vec<Tensor>,
    /// Calls of a step that are not skipped.
    wanted: Vec<usize>,
    hidden: usize,
    logits: usize,
    position: usize,
    stats: EngineStats,
    /// Calls and time of each package.
    shard_stats: Vec<(u64, Duration)>,
    fp16_stream: bool,
    frugal: bool,
    names: Names,
}

impl Engine {
    /// Opens a bundle. Functions are prepared when they are first needed.
    ///
    /// # Errors
    /// The bundle or one of its packages is missing, invalid, or does not fit `chain.json`.
    pub fn open(bundle: &Path, backend: &dyn Backend) -> Result<Engine> {
        let chain = Chain::read(bundle)?;
        let mut engine = Engine::with_chain(bundle, chain, backend, &|shard| bundle.join(&shard.file))?;
        engine.embedding = Some(EmbeddingFile::open(bundle, &engine.chain.embedding)?);
        Ok(engine)
    }

    /// As [`Engine::open`], with a contract of one's own: one that is not written yet, a part of one, or one whose packages
    /// are elsewhere. `package` says where a shard's package is; files beside the shards are those of `bundle`, the embedding
    /// when it is first needed.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn with_chain(
        bundle: &Path,
        chain: Chain,
        backend: &dyn Backend,
        package: &dyn Fn(&Shard) -> PathBuf,
    ) -> Result<Engine> {
        let files: Vec<PathBuf> = chain.shards.iter().map(package).collect();
        let opened: Vec<Mutex<_>> = files.iter().map(|_| Mutex::new(None)).collect();
        Pool::global().run(files.len(), &|i| {
            let package = backend.open(&files[i]);
            *opened[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(package);
        });
        let mut packages = Vec::new();
        let mut index = BTreeMap::new();
        for (shard, opened) in chain.shards.iter().zip(opened) {
            index.insert(shard.name.clone(), packages.len());
            let opened = opened.into_inner().unwrap_or_else(PoisonError::into_inner);
            packages.push(
                opened.ok_or_else(|| Error::Input(format!("shard `{}` was not opened", shard.name)))??,
            );
        }
        let mut names = Names::default();
        let hidden = names.index("hidden");
        let vectors = Vectors::open(bundle, chain.vectors.as_ref())?;
        let body = Program::resolve(bundle, &chain, &chain.steps, &index, &vectors, &mut names)?;
        let head = Program::resolve(bundle, &chain, &chain.head, &index, &vectors, &mut names)?;
        let logits = names.index("logits");
        Ok(Engine {
            bundle: bundle.to_path_buf(),
            shard_stats: vec![(0, Duration::ZERO); packages.len()],
            packages,
            embedding: None,
            row: Vec::new(),
            column: Tensor::default(),
            body,
            head,
            registers: vec![Tensor::default(); names.len()],
            spares: Vec::new(),
            wanted: Vec::new(),
            hidden,
            logits,
            position: 0,
            stats: EngineStats::default(),
            fp16_stream: false,
            frugal: false,
            names,
            chain,
        })
    }

    /// The contract.
    pub fn chain(&self) -> &Chain {
        &self.chain
    }

    /// Where the bundle is.
    pub fn bundle(&self) -> &Path {
        &self.bundle
    }

    /// Tokens in the caches.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Counters since opening.
    pub fn stats(&self) -> EngineStats {
        self.stats
    }

    /// Time and calls of each shard since opening.
    pub fn shard_stats(&self) -> Vec<ShardStats> {
        let all = self.chain.shards.iter().zip(&self.shard_stats).zip(&self.packages);
        all.map(|((shard, &(calls, time)), package)| ShardStats {
            shard: shard.name.clone(),
            calls,
            time,
            bytes_read: package.bytes_read(),
            ops: package.op_times(),
        })
        .collect()
    }

    /// Rounds the residual stream to fp16 whenever the host has changed it, to show what that costs.
    pub fn set_fp16_stream(&mut self, on: bool) {
        self.fp16_stream = on;
    }

    /// Lets go of a package's weights and intermediate values after each call, so that resident memory stays small however
    /// large the bundle is. They come back with the next call, which takes time.
    pub fn set_frugal(&mut self, on: bool) {
        self.frugal = on;
    }

    /// Prepares the functions for a call of `tokens` tokens, and for the logits of one, on several threads; otherwise each is
    /// prepared when it is first needed. What is wrong with one is said then.
    pub fn prepare(&mut self, tokens: usize) {
        let mut wanted: Vec<Vec<&str>> = vec![Vec::new(); self.packages.len()];
        for (program, tokens) in [(&self.body, tokens.max(1)), (&self.head, 1)] {
            let count = pick(&program.counts, tokens);
            for step in &program.steps {
                let Op::Calls(calls) = step else { continue };
                for call in calls {
                    wanted[call.package].extend(call.function(count));
                }
            }
        }
        let work: Vec<_> = self.packages.iter_mut().zip(wanted).map(Mutex::new).collect();
        Pool::global().run(work.len(), &|i| {
            let mut work = work[i].lock().unwrap_or_else(PoisonError::into_inner);
            let (package, functions) = &mut *work;
            for function in functions.iter() {
                if package.prepare(function).is_err() {
                    break;
                }
            }
        });
    }

    /// Maps all weights in the background, so that reading one for the first time does not stop at every few pages. Does
    /// nothing where the machine's free memory does not hold them, or does not say what it has. Gives the thread, for whoever
    /// wants to wait.
    pub fn populate(&self) -> Option<JoinHandle<()>> {
        let bytes: u64 = self.chain.shards.iter().map(|s| s.bytes).sum();
        if crate::memory::free_memory().is_none_or(|free| free < bytes) {
            return None;
        }
        let jobs: Vec<_> = self.packages.iter().filter_map(|p| p.populate()).collect();
        let map = move || jobs.into_iter().for_each(|job| job());
        // Without a thread, pages are mapped as they are read.
        std::thread::Builder::new().name("anemoe-map".into()).spawn(map).ok()
    }

    /// As if `tokens` tokens were in the context, with noise for their keys and values: for measurements of time, which does
    /// not depend on them.
    ///
    /// # Errors
    /// The context holds fewer, or the backend cannot write states.
    pub fn pretend(&mut self, tokens: usize, seed: u64) -> Result<()> {
        let room = self.chain.model.max_context;
        if tokens > room {
            return Err(Error::Input(format!("a context of {tokens} tokens, where the bundle holds {room}")));
        }
        for (i, package) in self.packages.iter_mut().enumerate() {
            if !package.fill_states(seed + i as u64) {
                return Err(Error::Input("this backend cannot write states".into()));
            }
        }
        self.position = tokens;
        Ok(())
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) {
        for package in &mut self.packages {
            package.reset();
        }
        self.position = 0;
    }

    /// Appends `ids` to the context and gives the logits that are wanted, one row of `vocab_size` per token.
    ///
    /// `chunk` limits the tokens of one call; the result does not depend on it but for rounding.
    ///
    /// # Errors
    /// An id is outside the vocabulary, or the context is full; nothing has been appended then. A package fails.
    pub fn forward(&mut self, ids: &[u32], want: Want, chunk: Option<usize>) -> Result<Vec<Vec<f32>>> {
        self.forward_watched(ids, want, chunk, &mut |_, _, _| ())
    }

    /// As [`Engine::forward`], showing the residual stream between layers.
    ///
    /// # Errors
    /// As [`Engine::forward`].
    pub fn forward_watched(
        &mut self,
        ids: &[u32],
        want: Want,
        chunk: Option<usize>,
        watch: &mut Watch<'_>,
    ) -> Result<Vec<Vec<f32>>> {
        let model = &self.chain.model;
        if let Some(id) = ids.iter().find(|&&id| id as usize >= model.vocab_size) {
            return Err(Error::Input(format!(
                "token id {id} is outside the vocabulary of {} tokens",
                model.vocab_size
            )));
        }
        let room = model.max_context - self.position;
        if ids.len() > room {
            return Err(Error::Input(format!(
                "context of {} tokens is full: {} tokens are in it and {} more were given; build with a larger --max-context",
                model.max_context,
                self.position,
                ids.len()
            )));
        }
        let limit = chunk.unwrap_or(usize::MAX).max(1);
        let mut logits = Vec::new();
        let mut at = 0;
        while at < ids.len() {
            let left = (ids.len() - at).min(limit);
            let count = pick(&self.body.counts, left);
            let n = left.min(count.max);
            let last = at + n == ids.len();
            self.pass(&ids[at..at + n], count, watch)?;
            match want {
                Want::All => self.read_logits(0, n, &mut logits)?,
                Want::Last if last => self.read_logits(n - 1, 1, &mut logits)?,
                _ => {}
            }
            at += n;
            self.position += n;
        }
        Ok(logits)
    }

    /// Appends one token whose registers are given: `hidden` in place of an embedding, and what else the steps read before
    /// they write it. The steps' results are in [`Engine::register`].
    ///
    /// # Errors
    /// The context is full, a register is not one of the chain's, or a package fails.
    pub fn step_from(&mut self, registers: &[(&str, &[f32])]) -> Result<()> {
        if self.position >= self.chain.model.max_context {
            let max = self.chain.model.max_context;
            return Err(Error::Input(format!("context of {max} tokens is full")));
        }
        for (name, values) in registers {
            let index = self.names.find(name);
            let index =
                index.ok_or_else(|| self.contradiction(format!("no step has a register `{name}`")))?;
            self.registers[index].reset_f32(&[1, values.len(), 1, 1]).copy_from_slice(values);
        }
        let count = pick(&self.body.counts, 1);
        for (value, input) in self.body.values.iter_mut().zip(&self.body.host) {
            host::fill(value, input, &self.chain, self.position, 1, 1);
        }
        self.execute(false, 1, 1, count, &mut |_, _, _| ())?;
        self.position += 1;
        Ok(())
    }

    /// A register as the last pass left it.
    pub fn register(&self, name: &str) -> Option<&Tensor> {
        self.registers.get(self.names.find(name)?)
    }

    /// One pass of `ids` through the layers; register `hidden` holds the result.
    fn pass(&mut self, ids: &[u32], count: TokenCount, watch: &mut Watch<'_>) -> Result<()> {
        let width = if count.min == count.max { count.max } else { ids.len() };
        self.embed(ids, width)?;
        for (value, input) in self.body.values.iter_mut().zip(&self.body.host) {
            host::fill(value, input, &self.chain, self.position, ids.len(), width);
        }
        self.execute(false, ids.len(), width, count, watch)
    }

    fn read_logits(&mut self, first: usize, n: usize, out: &mut Vec<Vec<f32>>) -> Result<()> {
        // The head reads a register of its own while this one is read.
        let column = std::mem::take(&mut self.column);
        let hidden = std::mem::replace(&mut self.registers[self.hidden], column);
        let done = self.logits_of(&hidden, first, n, out);
        self.column = std::mem::replace(&mut self.registers[self.hidden], hidden);
        done
    }

    fn logits_of(&mut self, hidden: &Tensor, first: usize, n: usize, out: &mut Vec<Vec<f32>>) -> Result<()> {
        let (&[1, rows, 1, tokens], Some(values)) = (hidden.shape.as_slice(), hidden.as_f32()) else {
            return Err(self.contradiction(format!("the layers leave a stream of shape {:?}", hidden.shape)));
        };
        if rows != self.chain.model.hidden_size || tokens < first + n {
            return Err(self.contradiction(format!("the layers leave a stream of shape {:?}", hidden.shape)));
        }
        let mut done = 0;
        while done < n {
            let count = pick(&self.head.counts, n - done);
            let m = (n - done).min(count.max);
            let width = if count.min == count.max { count.max } else { m };
            let channels = self.chain.model.hidden_size;
            let columns = self.registers[self.hidden].reset_f32(&[1, channels, 1, width]);
            for c in 0..channels {
                for t in 0..width {
                    columns[c * width + t] = if t < m { values[c * tokens + first + done + t] } else { 0.0 };
                }
            }
            self.execute(true, m, width, count, &mut |_, _, _| ())?;
            let logits = &self.registers[self.logits];
            let rows = logits.as_f32().unwrap_or_default();
            let vocab = self.chain.model.vocab_size;
            if logits.shape != [1, vocab, 1, width] {
                return Err(self.contradiction(format!("head: logits {:?} for {vocab} tokens", logits.shape)));
            }
            for t in 0..m {
                let mut row = match width {
                    1 => rows.to_vec(),
                    _ => rows.chunks_exact(width).map(|all| all[t]).collect(),
                };
                if let Some(cap) = self.chain.model.final_logit_softcapping {
                    anemoe_kernels::softcap(&mut row, cap);
                }
                out.push(row);
            }
            done += m;
        }
        Ok(())
    }

    fn contradiction(&self, what: String) -> Error {
        Error::invalid(self.bundle.join(CHAIN_FILE), what)
    }

    /// Register `hidden` becomes `[1, hidden_size, 1, width]`: scaled embeddings, zero behind the last token.
    fn embed(&mut self, ids: &[u32], width: usize) -> Result<()> {
        let embedding = match self.embedding.take() {
            Some(embedding) => self.embedding.insert(embedding),
            None => self.embedding.insert(EmbeddingFile::open(&self.bundle, &self.chain.embedding)?),
        };
        let cols = self.chain.embedding.cols;
        let row = &mut self.row;
        row.resize(cols, 0.0);
        let out = self.registers[self.hidden].reset_f32(&[1, cols, 1, width]);
        out.fill(0.0);
        for (t, &id) in ids.iter().enumerate() {
            embedding.row(id as usize, row)?;
            for (c, v) in row.iter().enumerate() {
                out[c * width + t] = *v;
            }
        }
        Ok(())
    }

    /// Runs the layers, or the head: `n` tokens in functions for `count`, whose token dimension is `width`.
    fn execute(
        &mut self,
        head: bool,
        n: usize,
        width: usize,
        count: TokenCount,
        watch: &mut Watch<'_>,
    ) -> Result<()> {
        let Engine {
            body,
            head: head_program,
            registers,
            spares,
            wanted,
            packages,
            stats,
            shard_stats,
            bundle,
            ..
        } = self;
        let program = if head { head_program } else { body };
        let mut layers = 0;
        for op in &mut program.steps {
            match op {
                Op::Zero { register, channels } => {
                    registers[*register].reset_f32(&[1, *channels, 1, width]).fill(0.0);
                }
                Op::Route { logits, weights, routing, ranking } => {
                    let mut target = std::mem::take(&mut registers[*weights]);
                    let routed = host::route(&registers[*logits], &mut target, routing, ranking, n);
                    registers[*weights] = target;
                    routed.map_err(|what| Error::invalid(bundle.join(CHAIN_FILE), what))?;
                }
                Op::Residual { stream, branch, mix } => {
                    let mut target = std::mem::take(&mut registers[*stream]);
                    let mixed = mix.apply(&mut target, branch.map(|b| &registers[b]), n);
                    if self.fp16_stream
                        && let Some(values) = target.as_f32_mut()
                    {
                        anemoe_kernels::round_to_f16(values);
                    }
                    registers[*stream] = target;
                    mixed.map_err(|what| Error::invalid(bundle.join(CHAIN_FILE), what))?;
                }
                Op::Normalize { from, to, norm } => {
                    let mut target = std::mem::take(&mut registers[*to]);
                    let done = norm.apply(&registers[*from], &mut target);
                    registers[*to] = target;
                    done.map_err(|what| Error::invalid(bundle.join(CHAIN_FILE), what))?;
                }
                Op::AddScaled { register, from, weights, row } => {
                    let mut target = std::mem::take(&mut registers[*register]);
                    let added = host::add_scaled(&mut target, &registers[*from], &registers[*weights], *row);
                    registers[*register] = target;
                    added.map_err(|what| Error::invalid(bundle.join(CHAIN_FILE), what))?;
                }
                Op::Calls(calls) => {
                    if calls[0].layer == Some(layers) {
                        watch(layers, &registers[self.hidden], n);
                        layers += 1;
                    }
                    wanted.clear();
                    for (i, call) in calls.iter().enumerate() {
                        let zero = call.when.as_ref().is_some_and(|(register, rows)| {
                            let v = registers[*register].as_f32().unwrap_or_default();
                            let range = rows.start * width..(rows.start + rows.count) * width;
                            v.get(range).is_some_and(|v| v.iter().all(|&x| x == 0.0))
                        });
                        if zero { stats.skipped += 1 } else { wanted.push(i) }
                    }
                    let mut ran = |package: usize, time: Duration| {
                        stats.in_packages += time;
                        stats.calls += 1;
                        shard_stats[package].0 += 1;
                        shard_stats[package].1 += time;
                    };
                    // A sum is one job even where only one term is left, so that its order is that of other calls.
                    let together = match calls.len() > 1 && !wanted.is_empty() && !self.frugal {
                        true => {
                            run_together(calls, wanted, packages, registers, &program.values, count, bundle)?
                        }
                        false => None,
                    };
                    for (k, &i) in wanted.iter().enumerate() {
                        let call = &mut calls[i];
                        match &together {
                            Some(all) => ran(call.package, all[k]),
                            None => {
                                let started = Instant::now();
                                call.run(packages, registers, (&program.values, spares), count, bundle)?;
                                ran(call.package, started.elapsed());
                            }
                        }
                        if self.frugal {
                            packages[call.package].release();
                        }
                    }
                }
            }
        }
        if !head {
            watch(layers, &registers[self.hidden], n);
        }
        Ok(())
    }

    /// Prepares every function for these many tokens now instead of at its first use.
    ///
    /// # Errors
    /// A package lacks the function or uses something that the backend lacks.
    pub fn warm_up(&mut self, tokens: usize) -> Result<()> {
        for program in [&mut self.body, &mut self.head] {
            let count = pick(&program.counts, tokens);
            for op in &mut program.steps {
                let Op::Calls(calls) = op else { continue };
                for call in calls {
                    call.prepare(&mut self.packages, count, &self.bundle)?;
                }
            }
        }
        Ok(())
    }
}
