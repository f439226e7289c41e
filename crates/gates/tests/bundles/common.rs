//! Fixtures, token ids and backends that tests of built bundles share.

use anemoe_bundle::TokenCount;
use anemoe_convert::models::{self, Family};
use anemoe_runtime::backend::{Backend, BackendFunction, BackendPackage, KeptCache, SequenceStates};
use anemoe_runtime::cpu::CpuBackend;
use anemoe_runtime::model::{Logits, Model};
use std::path::Path;
use std::sync::Arc;

/// Opens a fixture checkpoint of the repository.
pub fn fixture(name: &str) -> Family {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name);
    models::open(models::load(path.to_str().unwrap()).unwrap()).unwrap()
}

/// Returns token counts of functions with fixed shapes.
pub fn fixed(counts: &[usize]) -> Vec<TokenCount> {
    counts.iter().map(|&n| TokenCount { min: n, max: n }).collect()
}

/// Returns `n` token ids of a sequence, by its number.
pub fn ids(sequence: usize, n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 37 + sequence * 11 + 5) % 120) as u32).collect()
}

/// Returns the logits of every token, run one by one.
pub fn alone(model: &Model, ids: &[u32]) -> Vec<Vec<f32>> {
    let mut sequence = model.sequence();
    let one = |id: &u32| model.append(&mut sequence, &[*id], Logits::All, None).unwrap().remove(0);
    ids.iter().map(one).collect()
}

/// Computes the cosine of two vectors.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(p, q)| f64::from(*p) * f64::from(*q)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Backend that runs functions only as declared, as the Neural Engine does.
pub struct AsDeclared(pub CpuBackend);

struct Declared(Box<dyn BackendPackage>);

impl Backend for AsDeclared {
    fn open_with(
        &self,
        path: &Path,
        caches: &[KeptCache],
    ) -> anemoe_runtime::Result<Box<dyn BackendPackage>> {
        Ok(Box::new(Declared(self.0.open_with(path, caches)?)))
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
