//! Counts the allocations of a token, after the first tokens have made room.

use anemoe_bundle::TokenCount;
use anemoe_convert::build::build;
use anemoe_convert::models;
use anemoe_convert::plan::PlanOptions;
use anemoe_runtime::cpu::{CpuBackend, Options, Precision, Products};
use anemoe_runtime::model::{Logits, Model};
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: the system's allocator does all of the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps this function's contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps this function's contract.
        unsafe { System.realloc(at, layout, size) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps this function's contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_token_allocates_its_logits_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["tiny-gemma4-moe", "tiny-zaya"] {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name);
        let family = models::open(models::load(fixture.to_str().unwrap()).unwrap()).unwrap();
        let tokens = [1, 8].map(|n| TokenCount { min: n, max: n }).to_vec();
        let options = PlanOptions {
            quant: "lut4".parse().unwrap(),
            tokens,
            experts_per_shard: Some(2),
            ..PlanOptions::default()
        };
        let out = dir.path().join(name);
        build(&family, &family.plan(&options).unwrap(), None, &out, 2, &|_| ()).unwrap();
        for products in [Products::Exact, Products::Fast] {
            let options = Options {
                precision: Precision::Fp32,
                fuse: true,
                half_states: true,
                products,
                ..Options::default()
            };
            let model = Model::open(&out, &CpuBackend { options }).unwrap();
            let mut sequence = model.sequence();
            for id in 0..20 {
                model.append(&mut sequence, &[id], Logits::Last, None).unwrap();
            }
            let mut counts = Vec::new();
            for id in 0..21 {
                let before = ALLOCATIONS.load(Ordering::Relaxed);
                let logits = model.append(&mut sequence, &[id], Logits::Last, None).unwrap();
                counts.push(ALLOCATIONS.load(Ordering::Relaxed) - before);
                assert_eq!(logits.len(), 1);
            }
            // The list of rows and the row. A thread that takes a larger part of a job than before may allocate room for it.
            counts.sort_unstable();
            assert_eq!((counts[0], counts[10]), (2, 2), "{name}, {products:?}: {counts:?}");
        }
    }
}
