//! What tests of the Core ML backend on the fake share.

use anemoe_bundle::{Chain, TokenCount};
use anemoe_convert::build::build;
use anemoe_convert::models;
use anemoe_convert::plan::PlanOptions;
use anemoe_coreml::{CompiledModels, CoreMlBackend, CoreMlSettings};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard};

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
