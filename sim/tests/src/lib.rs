//! Helpers of the tests of the Core ML backend on the fake.
//!
//! # Tests
//! `tests/` proves that every form of both families gives the CPU's tokens, also for sequences that were cut, forked, saved or
//! batched; that faults are errors with a cause; and that objects and blocks are let go. `cargo xtask sim` runs them.

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

/// One with rings, one with rows that are carried from call to call.
pub const FAMILIES: [&str; 2] = ["tiny-gemma4-moe", "tiny-zaya"];

/// Counts of objects are of the process, so one test runs at a time.
static ONE: Mutex<()> = Mutex::new(());

/// Begins a test: classes are there, and no faults.
pub fn begin() -> MutexGuard<'static, ()> {
    let guard = ONE.lock().unwrap_or_else(|e| e.into_inner());
    fake_coreml::install();
    fake_coreml::clear_faults();
    fake_coreml::settle();
    guard
}

/// Objects alive by class, Foundation's too, and blocks on the heap.
pub fn living() -> (BTreeMap<String, isize>, isize) {
    fake_coreml::settle();
    (objc_sim::alive(), objc_sim::BLOCKS.load(Ordering::SeqCst))
}

/// Runs a test and compares what lives behind it with what lived before.
pub fn leaves_nothing(test: impl FnOnce()) {
    let _one = begin();
    let before = living();
    test();
    fake_coreml::clear_faults();
    assert_eq!(living(), before, "left behind");
}

/// The CPU backend with functions as they are declared and every result in fp16, as the fake runs them.
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

/// Tokens of a sequence.
pub fn ids(sequence: usize, n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 37 + sequence * 11 + 5) % 120) as u32).collect()
}

/// The most likely tokens behind a prompt.
pub fn greedy(model: &Model, prompt: &[u32], speculation: Speculation) -> Vec<u32> {
    let sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };
    let options =
        GenerateOptions { max_new: 24, sampling, ignore_eos: true, prefill_chunk: None, speculation };
    generate(model, &mut model.sequence(), prompt, &options, |_| true).unwrap().ids
}

/// Logits of every token, `chunk` tokens a pass.
pub fn logits(model: &Model, ids: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    model.append(&mut model.sequence(), ids, Logits::All, Some(chunk)).unwrap()
}

/// The form in which the host keeps everything that a layer of the family hands on.
pub fn by_host(family: &str) -> ShardForm {
    let history = if family.contains("zaya") { HistoryForm::Host } else { HistoryForm::State };
    ShardForm { cache: CacheForm::Host, history, ..ShardForm::default() }
}

/// The two families with states of Core ML's, and with caches of the host; each also with functions for a context that the tests'
/// sequences outgrow.
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

/// Options of a bundle with functions for 1 and for 8 tokens.
pub fn one_and_eight(form: ShardForm) -> PlanOptions {
    PlanOptions {
        quant: "lut4".parse().unwrap(),
        tokens: fixed(&[1, 8]),
        experts_per_shard: Some(2),
        form,
        ..PlanOptions::default()
    }
}

/// Numbers of tokens, each with a function of its own.
pub fn fixed(counts: &[usize]) -> Vec<TokenCount> {
    counts.iter().map(|&n| TokenCount { min: n, max: n }).collect()
}

/// A bundle and its compiled models.
pub struct Compiled {
    pub bundle: PathBuf,
    pub chain: Chain,
    cache: PathBuf,
}

impl Compiled {
    /// Builds a fixture and compiles it.
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

    /// Builds a fixture by options and compiles it.
    pub fn with(dir: &Path, fixture: &str, options: PlanOptions) -> Compiled {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(fixture);
        let family = models::open(models::load(source.to_str().unwrap()).unwrap()).unwrap();
        let bundle = dir.join(format!("{fixture}.anemoe"));
        build(family.as_ref(), &family.plan(&options).unwrap(), None, &bundle, 2, &|_| ()).unwrap();
        let chain = Chain::read(&bundle).unwrap();
        let compiled = Compiled { bundle, chain, cache: dir.join("cache") };
        compiled.compile();
        compiled
    }

    /// Compiles every package.
    pub fn compile(&self) {
        let models = self.models();
        for shard in &self.chain.shards {
            let package = self.bundle.join(&shard.file);
            anemoe_coreml::compile(&package, &models.place(&package).unwrap()).unwrap();
        }
        assert!(models.is_complete());
    }

    /// Places of the compiled models.
    pub fn models(&self) -> CompiledModels {
        let system = anemoe_coreml::this_system().unwrap();
        CompiledModels::new(&self.bundle, &self.chain, Some(&self.cache), &system)
    }

    /// The backend.
    pub fn backend(&self, max_loaded_bytes: Option<u64>) -> CoreMlBackend {
        let settings =
            CoreMlSettings { compiled: self.models(), max_loaded_bytes, ..CoreMlSettings::default() };
        CoreMlBackend::new(settings).unwrap()
    }
}
