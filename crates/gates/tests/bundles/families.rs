//! Checks that bundles of every family give what Hugging Face transformers gives: each family's tiny checkpoint in
//! fp16 against its golden.

use crate::common::{fixed, fixture};
use anemoe_convert::build::build;
use anemoe_convert::plan::PlanOptions;
use anemoe_convert::quant::Quant;
use anemoe_gates::golden_gate::gate;
use anemoe_gates::reference::Golden;
use std::path::Path;

/// Tiny checkpoints, one or more of each family.
const ALL: [&str; 11] = [
    "tiny-llama",
    "tiny-mistral",
    "tiny-qwen2",
    "tiny-qwen3",
    "tiny-qwen3-moe",
    "tiny-olmoe",
    "tiny-gemma3",
    "tiny-gpt-oss",
    "tiny-gemma4-moe",
    "tiny-gemma4-dense",
    "tiny-zaya",
];

#[test]
fn every_family_gives_what_transformers_gives() {
    let dir = tempfile::tempdir().unwrap();
    for name in ALL {
        let family = fixture(name);
        let options = PlanOptions { quant: Quant::Fp16, tokens: fixed(&[1, 8]), ..PlanOptions::default() };
        let out = dir.path().join(name);
        build(&family, &family.plan(&options).unwrap(), None, &out, 2, &|_| ()).unwrap();
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name);
        let golden = Golden::read(&golden.join("golden.npz")).unwrap();
        let found = gate(&out, &golden, 0.995).unwrap();
        assert!(found.pass && found.usual.tokens_match, "{name}: {found:?}");
        assert!(found.fp16.median_cosine >= 0.999, "{name}: {}", found.fp16.median_cosine);
        assert!(found.usual.min_cosine >= 0.9999, "{name}: {}", found.usual.min_cosine);
    }
}
