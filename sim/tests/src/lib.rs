//! Helpers for tests of the Core ML backend on the fake Core ML.
//!
//! # Tests
//! `tests/` checks that every form of both families gives the tokens of the CPU backend, also for sequences that were
//! cut, forked, saved or batched. It checks that faults become errors with a cause, and that objects and blocks are
//! released. `cargo xtask sim` runs the tests.

use anemoe_bundle::{Chain, TokenCount};
use anemoe_convert::build::build;
use anemoe_convert::context_buckets::ContextBuckets;
use anemoe_convert::form::{CacheForm, HistoryForm, ShardForm};
use anemoe_convert::models;
use anemoe_convert::plan::PlanOptions;
use anemoe_coreml::{CompiledModels, CoreMlBackend, CoreMlSettings};
use anemoe_runtime::backend::{Backend, BackendFunction, BackendPackage, KeptCache, SequenceStates};
use anemoe_runtime::cpu::{CpuBackend, Precision};
use anemoe_runtime::generate::{GenerateOptions, generate};
use anemoe_runtime::model::{Logits, Model};
use anemoe_runtime::sampler::Sampling;
use anemoe_runtime::speculate::Speculation;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

/// Fixtures: a family with ring caches, and a family with carried rows.
pub const FAMILIES: [&str; 2] = ["tiny-gemma4-moe", "tiny-zaya"];

/// Object counts are per process, so one test runs at a time.
static ONE: Mutex<()> = Mutex::new(());

/// Begins a test: installs the classes and clears all faults. Returns the lock that tests share.
pub fn begin() -> MutexGuard<'static, ()> {
    let guard = ONE.lock().unwrap_or_else(|e| e.into_inner());
    fake_coreml::install();
    fake_coreml::clear_faults();
    fake_coreml::settle();
    guard
}

/// Returns the number of objects alive by class, Foundation's included, and of blocks on the heap.
pub fn living() -> (BTreeMap<String, usize>, isize) {
    fake_coreml::settle();
    (objc_sim::alive(), objc_sim::BLOCKS.load(Ordering::SeqCst))
}

/// Runs a test and checks that it leaves no objects and blocks behind.
pub fn leaves_nothing(test: impl FnOnce()) {
    let _one = begin();
    let before = living();
    test();
    fake_coreml::clear_faults();
    assert_eq!(living(), before, "left behind");
}

/// The CPU backend as the fake runs it: functions as declared, every result rounded to fp16.
pub struct AsDeclared;

struct Declared(Box<dyn BackendPackage>);

impl Backend for AsDeclared {
    fn open_with(
        &self,
        path: &Path,
        caches: &[KeptCache],
    ) -> anemoe_runtime::Result<Box<dyn BackendPackage>> {
        Ok(Box::new(Declared(CpuBackend::with(Precision::Fp16).open_with(path, caches)?)))
    }
}

impl BackendPackage for Declared {
    fn prepare(&self, function: &str) -> anemoe_runtime::Result<Arc<dyn BackendFunction>> {
        self.0.prepare(function)
    }

    fn new_states(&self) -> Box<dyn SequenceStates> {
        self.0.new_states()
    }
}

/// Returns `n` tokens of the test sequence number `sequence`.
pub fn ids(sequence: usize, n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 37 + sequence * 11 + 5) % 120) as u32).collect()
}

/// Returns the 24 most likely tokens that follow a prompt (greedy decoding).
pub fn greedy(model: &Model, prompt: &[u32], speculation: Speculation) -> Vec<u32> {
    let sampling = Sampling::GREEDY;
    let options =
        GenerateOptions { max_new: 24, sampling, ignore_eos: true, prefill_chunk: None, speculation };
    generate(model, &mut model.sequence(), prompt, &options, |_| true).unwrap().ids
}

/// Returns the logits of every token, computed `chunk` tokens a pass.
pub fn logits(model: &Model, ids: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    model.append(&mut model.sequence(), ids, Logits::All, Some(chunk)).unwrap()
}

/// Returns the form in which the host keeps all caches and carried rows of the family's layers.
pub fn by_host(family: &str) -> ShardForm {
    let history = if family.contains("zaya") { HistoryForm::Host } else { HistoryForm::State };
    ShardForm { cache: CacheForm::Host, history, ..ShardForm::default() }
}

/// Returns both families with Core ML's states and with the host's caches, each also with a context bucket that the
/// tests' sequences outgrow.
pub fn families_by_cache() -> [(&'static str, ShardForm); 8] {
    let [gemma, zaya] = FAMILIES;
    let context_buckets = ContextBuckets::new(&[32]).unwrap();
    let short = |form| ShardForm { context_buckets, ..form };
    let form = ShardForm::default();
    [
        (gemma, form),
        (zaya, form),
        (gemma, by_host(gemma)),
        (zaya, by_host(zaya)),
        (gemma, short(form)),
        (zaya, short(form)),
        (gemma, short(by_host(gemma))),
        (zaya, short(by_host(zaya))),
    ]
}

/// Returns plan options for functions of 1 and of 8 tokens.
pub fn one_and_eight(form: ShardForm) -> PlanOptions {
    PlanOptions {
        quant: "lut4".parse().unwrap(),
        tokens: fixed(&[1, 8]),
        experts_per_shard: Some(2),
        form,
        ..PlanOptions::default()
    }
}

/// Returns token counts; each gets a function of its own.
pub fn fixed(counts: &[usize]) -> Vec<TokenCount> {
    counts.iter().map(|&n| TokenCount { min: n, max: n }).collect()
}

/// A bundle and the places of its compiled models.
pub struct Compiled {
    pub bundle: PathBuf,
    pub chain: Chain,
    cache: PathBuf,
}

impl Compiled {
    /// Builds a fixture with a compression and token counts, and compiles it.
    pub fn new(dir: &Path, fixture: &str, quant: &str, tokens: Vec<TokenCount>) -> Compiled {
        Compiled::with(
            dir,
            fixture,
            PlanOptions {
                quant: quant.parse().unwrap(),
                tokens,
                experts_per_shard: Some(2),
                ..PlanOptions::default()
            },
        )
    }

    /// Builds a fixture by plan options, and compiles it.
    pub fn with(dir: &Path, fixture: &str, options: PlanOptions) -> Compiled {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(fixture);
        let family = models::open(models::load(source.to_str().unwrap()).unwrap()).unwrap();
        let bundle = dir.join(format!("{fixture}.anemoe"));
        build(&family, &family.plan(&options).unwrap(), None, &bundle, 2, &|_| ()).unwrap();
        let chain = Chain::read(&bundle).unwrap();
        let compiled = Compiled { bundle, chain, cache: dir.join("cache") };
        compiled.compile();
        compiled
    }

    /// Compiles every package of the bundle.
    pub fn compile(&self) {
        let models = self.models();
        for shard in &self.chain.shards {
            let package = self.bundle.join(&shard.file);
            anemoe_coreml::compile(&package, &models.place(&package).unwrap()).unwrap();
        }
        assert!(models.is_complete());
    }

    /// Returns the places of the compiled models.
    pub fn models(&self) -> CompiledModels {
        let system = anemoe_coreml::this_system().unwrap();
        CompiledModels::new(&self.bundle, &self.chain, Some(&self.cache), &system)
    }

    /// Starts the Core ML backend with a limit of loaded bytes.
    pub fn backend(&self, max_loaded_bytes: Option<u64>) -> CoreMlBackend {
        let settings =
            CoreMlSettings { compiled: self.models(), max_loaded_bytes, ..CoreMlSettings::default() };
        CoreMlBackend::new(settings).unwrap()
    }
}
