//! Runs a bundle: a [`Model`] that does not change, and [`Sequence`]s to which it appends tokens.
//!
//! ```text
//! Model: chain, packages, prepared functions, embedding      Sequence: tokens, states of each package
//! forward(batch of (sequence, its next tokens, wanted logits)):
//!   functions without states run once over the tokens of all sequences, so that weights are read once,
//!   functions with states run once per sequence
//! ```

mod attached_assistant;
mod call;
mod chain_program;
mod embedding;
mod forward;
mod host;
mod kept_rows;
mod sequence;
mod vectors;
mod workspace;

pub use attached_assistant::{AttachedAssistant, DraftStart};
pub use embedding::EmbeddingFile;
pub use forward::{LayerObserver, Request};
pub use kept_rows::MOST_UNDONE;
pub(crate) use sequence::Companion;
pub use sequence::{MOST_RUN_AGAIN, Sequence};

use crate::backend::{AddedRows, Backend, BackendPackage, Counts, KeptCache, OpTime};
use crate::tensor::Tensor;
use crate::{Error, Result};
use anemoe_bundle::{CHAIN_FILE, Chain, HostInput, InputBinding, Kept, Shard, Step};
use anemoe_io::locked;
use anemoe_kernels::Pool;
use call::Call;
use chain_program::{ChainOp, ChainProgram, Names};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use vectors::VectorFile;
use workspace::PassWorkspace;

/// Tokens whose logits a pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: the tokens only fill the caches.
    None,
    /// The last token.
    Last,
    /// Every token.
    All,
}

/// Time and calls since the model was opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct ModelStats {
    /// Package calls.
    pub calls: u64,
    /// Calls skipped because no expert of the pack was chosen.
    pub skipped: u64,
    /// Time inside packages.
    pub in_packages: Duration,
}

/// Time and calls of one shard since the model was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardStats {
    /// Name of the shard in the chain.
    pub shard: String,
    /// Number of calls.
    pub calls: u64,
    /// Time of the calls, copies of inputs and outputs included.
    pub time: Duration,
    /// Work done; zeros where the backend does not count.
    pub counts: Counts,
    /// Time of each operation, where the backend measures it.
    pub ops: Vec<OpTime>,
}

/// A loaded bundle. It does not change when it runs: threads share it, and any number of sequences.
pub struct Model {
    /// Number of this model in the process; a sequence holds the number of its model.
    number: u64,
    bundle: PathBuf,
    chain: Chain,
    packages: Vec<Box<dyn BackendPackage>>,
    /// The embedding, opened at its first use.
    embedding: Mutex<Option<EmbeddingFile>>,
    body: ChainProgram,
    head: ChainProgram,
    names: Names,
    hidden: usize,
    logits: usize,
    /// Token of each row of the head, where rows are in another order.
    head_order: Option<Vec<u32>>,
    fp16_stream: bool,
    low_memory: bool,
    /// Tokens of calls, and of calls of the head, that functions are prepared for.
    preparations: Mutex<BTreeSet<(usize, usize)>>,
    counters: Counters,
    /// Memory of finished passes, for the next ones.
    workspaces: Mutex<Vec<PassWorkspace>>,
    /// Rows of logits that callers gave back.
    spare_rows: Mutex<Vec<Vec<f32>>>,
    /// True if sequences keep the hidden states of their last pass, which an assistant reads.
    keeps_hidden: AtomicBool,
    /// Tokens in the order of an assistant's groups; empty where there are none.
    token_ordering: Vec<u32>,
}

/// Counters since opening.
#[derive(Default)]
struct Counters {
    skipped: AtomicU64,
    /// Calls of each package, and their nanoseconds.
    packages: Vec<(AtomicU64, AtomicU64)>,
}

impl Counters {
    /// Adds a call of a package.
    fn add(&self, package: usize, time: Duration) {
        let (calls, nanoseconds) = &self.packages[package];
        calls.fetch_add(1, Ordering::Relaxed);
        nanoseconds.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Returns calls and time of each package.
    fn packages(&self) -> impl Iterator<Item = (u64, Duration)> {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        self.packages.iter().map(move |(calls, time)| (read(calls), Duration::from_nanos(read(time))))
    }
}

/// Returns the caches that the host keeps between calls of a shard.
fn caches_of(chain: &Chain, shard: &str) -> Vec<KeptCache> {
    let mut caches = BTreeMap::new();
    for step in &chain.steps {
        let Step::Run(run) = step else { continue };
        for (input, kept) in run.kept.iter().filter(|_| run.shards().any(|name| name == shard)) {
            let (cache, added) = match kept.clone() {
                Kept::Newest { .. } => continue,
                Kept::Lent { cache, .. } => (chain.caches.get(&cache), None),
                Kept::Cache { rows, place } => {
                    let of_host = match run.inputs.get(&place) {
                        Some(InputBinding::Host(of_host)) => Some(of_host),
                        _ => None,
                    };
                    let is_place_last = matches!(of_host, Some(HostInput::PlaceRows(_)));
                    let cache = of_host.and_then(|of_host| chain.caches.get(of_host.cache()?));
                    (cache, Some(AddedRows { rows, place, is_place_last }))
                }
            };
            let slots = cache.map_or(0, |c| c.slots);
            caches.insert(input, KeptCache { input: input.clone(), slots, added });
        }
    }
    caches.into_values().collect()
}

impl Model {
    /// Opens a bundle. Functions are prepared at their first use.
    ///
    /// # Errors
    /// The bundle or one of its packages is missing, invalid, or does not fit `chain.json`.
    pub fn open(bundle: &Path, backend: &dyn Backend) -> Result<Model> {
        let chain = Chain::read(bundle)?;
        let model = Model::with_chain(bundle, chain, backend, &|shard| bundle.join(&shard.file))?;
        if model.chain.embedding.rows > 0 {
            *locked(&model.embedding) = Some(EmbeddingFile::open(bundle, &model.chain.embedding)?);
        }
        Ok(model)
    }

    /// Opens packages with a given chain: one that is not written yet, a part of one, or one whose packages are elsewhere.
    /// `package` returns the path of a shard's package. Files beside the shards are read from `bundle`, the embedding at its
    /// first use.
    ///
    /// # Errors
    /// Fails like [`Model::open`].
    pub fn with_chain(
        bundle: &Path,
        chain: Chain,
        backend: &dyn Backend,
        package: &dyn Fn(&Shard) -> PathBuf,
    ) -> Result<Model> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let files: Vec<PathBuf> = chain.shards.iter().map(package).collect();
        let opened: Vec<Mutex<_>> = files.iter().map(|_| Mutex::new(None)).collect();
        Pool::global().run(files.len(), &|i| {
            let package = backend.open_with(&files[i], &caches_of(&chain, &chain.shards[i].name));
            *locked(&opened[i]) = Some(package);
        });
        let mut packages = Vec::new();
        let mut index = BTreeMap::new();
        for (shard, opened) in chain.shards.iter().zip(opened) {
            index.insert(shard.name.clone(), packages.len());
            let opened = opened.into_inner().unwrap_or_else(PoisonError::into_inner);
            packages.push(
                opened.ok_or_else(|| Error::input(format!("shard `{}` was not opened", shard.name)))??,
            );
        }
        let mut names = Names::default();
        let hidden = names.index("hidden");
        let vectors = VectorFile::open(bundle, chain.vectors.as_ref())?;
        let body = ChainProgram::resolve(bundle, &chain, &chain.steps, &index, &vectors, &mut names)?;
        let head = ChainProgram::resolve(bundle, &chain, &chain.head, &index, &vectors, &mut names)?;
        let logits = names.index("logits");
        // A draft of a chain has no file of vectors yet.
        let order = chain.head_order.as_deref().filter(|_| chain.vectors.is_some());
        let head_order = order.map(|name| vectors.order(name, chain.model.vocab_size)).transpose()?;
        let has_groups = chain.assistant.as_ref().is_some_and(|of| of.centroids.is_some());
        let token_ordering = match has_groups {
            true => vectors.order("token_ordering", chain.model.vocab_size)?,
            false => Vec::new(),
        };
        Ok(Model {
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            bundle: bundle.to_path_buf(),
            counters: Counters {
                packages: packages.iter().map(|_| Default::default()).collect(),
                ..Counters::default()
            },
            packages,
            embedding: Mutex::default(),
            body,
            head,
            hidden,
            logits,
            head_order,
            fp16_stream: false,
            low_memory: false,
            preparations: Mutex::default(),
            workspaces: Mutex::default(),
            spare_rows: Mutex::default(),
            keeps_hidden: AtomicBool::new(false),
            token_ordering,
            names,
            chain,
        })
    }

    /// Returns the chain.
    pub fn chain(&self) -> &Chain {
        &self.chain
    }

    /// Returns the path of the bundle's folder.
    pub fn bundle(&self) -> &Path {
        &self.bundle
    }

    /// Returns bytes that identify the bundle: a hash of its chain.
    pub(super) fn identity(&self) -> Vec<u8> {
        let text = serde_json::to_vec(&self.chain).unwrap_or_default();
        anemoe_bundle::sha256(&text).into_bytes()
    }

    /// Returns the counters since opening.
    pub fn stats(&self) -> ModelStats {
        let skipped = self.counters.skipped.load(Ordering::Relaxed);
        let (calls, in_packages) =
            self.counters.packages().fold((0, Duration::ZERO), |a, b| (a.0 + b.0, a.1 + b.1));
        ModelStats { calls, skipped, in_packages }
    }

    /// Returns time and calls of each shard since opening.
    pub fn shard_stats(&self) -> Vec<ShardStats> {
        let all = self.chain.shards.iter().zip(self.counters.packages()).zip(&self.packages);
        all.map(|((shard, (calls, time)), package)| ShardStats {
            shard: shard.name.clone(),
            calls,
            time,
            counts: package.counts(),
            ops: package.op_times(),
        })
        .collect()
    }

    /// Sets whether the residual stream is rounded to fp16 after each change by the host, to measure the loss.
    pub fn set_fp16_stream(&mut self, on: bool) {
        self.fp16_stream = on;
    }

    /// Sets whether a package's weights and intermediate values are freed after each call. Resident memory then stays small
    /// for any size of bundle, but each call reads the weights again, which takes time.
    pub fn set_low_memory(&mut self, on: bool) {
        self.low_memory = on;
    }

    /// Prepares the functions for calls of `tokens` tokens, and the head for as many logits as `logits` asks for, on several
    /// threads. Without it, each function is prepared at its first use, where errors are reported, too.
    pub fn prepare(&self, tokens: usize, logits: Logits) {
        let of_head = if logits == Logits::All { tokens.max(1) } else { 1 };
        let mut wanted: Vec<Vec<(&Call, usize)>> = vec![Vec::new(); self.packages.len()];
        for (program, tokens) in [(&self.body, tokens.max(1)), (&self.head, of_head)] {
            let tokens = tokens.min(program.most());
            for step in &program.steps {
                let ChainOp::Calls(calls) = step else { continue };
                calls.iter().for_each(|call| wanted[call.package].push((call, tokens)));
            }
        }
        Pool::global().run(wanted.len(), &|i| {
            let prepare = |(call, tokens): &(&Call, usize)| {
                call.prepare(&self.packages, *tokens, *tokens, &self.bundle).is_ok()
            };
            let _ = wanted[i].iter().all(prepare);
        });
        locked(&self.preparations).insert((tokens, of_head));
    }

    /// Tells whether [`Model::prepare`] was called for these tokens and logits.
    pub fn has_prepared(&self, tokens: usize, logits: Logits) -> bool {
        let of_head = if logits == Logits::All { tokens } else { 1 };
        locked(&self.preparations).contains(&(tokens, of_head))
    }

    /// Maps all weights in the background, so that reading them for the first time does not stop at every few pages. Returns the
    /// thread, for callers that want to wait; none where free memory is too small or unknown, or no thread starts.
    pub fn populate(&self) -> Option<JoinHandle<()>> {
        let bytes: u64 = self.chain.shards.iter().map(|s| s.bytes).sum();
        if anemoe_io::free_memory().is_none_or(|free| free < bytes) {
            return None;
        }
        let jobs: Vec<_> = self.packages.iter().filter_map(|p| p.populate()).collect();
        let map = move || jobs.into_iter().for_each(|job| job());
        // Without a thread, pages are mapped when they are read.
        std::thread::Builder::new().name("anemoe-map".into()).spawn(map).ok()
    }

    fn contradiction(&self, what: String) -> Error {
        Error::invalid(self.bundle.join(CHAIN_FILE), what)
    }
}

/// Registers after a pass.
pub struct Registers<'a> {
    names: &'a Names,
    values: &'a [Tensor],
}

impl Registers<'_> {
    /// Returns a register by its name in the chain: `[1, channels, 1, tokens]`.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.values.get(self.names.find(name)?)
    }
}
