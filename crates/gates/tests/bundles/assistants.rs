//! Checks assistants against goldens of transformers, in every form of both packages, and that they change no token.

use crate::common::{cosine, fixed, fixture};
use anemoe_convert::build::build;
use anemoe_convert::plan::PlanOptions;
use anemoe_convert::quant::Quant;
use anemoe_npz::read_npz;
use anemoe_runtime::cpu::{CpuBackend, Options, Precision};
use anemoe_runtime::model::{AttachedAssistant, DraftStart, Logits, Model};
use std::path::Path;

const TARGET: &str = "tiny-gemma4-moe";
const ASSISTANTS: [&str; 2] = ["tiny-gemma4-assistant", "tiny-gemma4-assistant-ordered"];
/// Steps and vocabulary of the goldens.
const STEPS: usize = 6;
const VOCABULARY: usize = 512;

fn options() -> PlanOptions {
    PlanOptions { quant: Quant::Fp16, tokens: fixed(&[1, 64]), ..PlanOptions::default() }
}

fn open(dir: &Path, name: &str, (plan, run): (&PlanOptions, Options)) -> Model {
    let out = dir.join(name);
    if !out.exists() {
        let family = fixture(name);
        build(&family, &family.plan(plan).unwrap(), None, &out, 2, &|_| ()).unwrap();
    }
    Model::open(&out, &CpuBackend { options: run }).unwrap()
}

fn argmax(row: &[f32]) -> u32 {
    (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a))).unwrap() as u32
}

/// Compares the drafts of an assistant with its golden: the median of the cosines, and tokens but for ties.
fn agrees(name: &str, target: &Model, small: Model, what: &str) {
    let assistant = AttachedAssistant::new(small, target).unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name);
    let golden = read_npz(&path.join("golden.npz")).unwrap();
    let ids: Vec<u32> = golden["prompt_ids"].to_i64().unwrap().into_iter().map(|id| id as u32).collect();
    let logits = golden["draft_logits"].to_f32();
    let mut rows = logits.chunks_exact(VOCABULARY);
    let mut cosines = Vec::new();
    for n in golden["prefix_lengths"].to_i64().unwrap() {
        let mut sequence = target.sequence();
        target.append(&mut sequence, &ids[..n as usize], Logits::None, None).unwrap();
        let start = DraftStart { token: ids[n as usize - 1], position: n as usize - 1 };
        let mut steps = 0;
        let choose = &mut |row: &mut [f32]| {
            let expected = rows.next().unwrap();
            let best = argmax(expected);
            let is_tie = expected[best as usize] - expected[argmax(row) as usize] < 0.01;
            assert!(is_tie, "{name}, {what}: {n} tokens, step {steps}");
            cosines.push(cosine(row, expected));
            steps += 1;
            Some(best)
        };
        assistant.draft(target, &mut sequence, start, STEPS, choose).unwrap();
        assert_eq!(steps, STEPS);
    }
    cosines.sort_by(f64::total_cmp);
    let (least, median) = (cosines[0], cosines[cosines.len() / 2]);
    println!("{name}, {what}: least {least:.6}, median {median:.6}");
    assert!(least > 0.999 && median >= 0.9999, "{name}, {what}: {least} {median}");
}

#[test]
fn assistants_give_what_transformers_gives() {
    let dir = tempfile::tempdir().unwrap();
    let exact = Options { precision: Precision::Fp32, ..Options::default() };
    for run in [exact, Options { half_states: true, ..exact }, Options { fuse: false, ..exact }] {
        for name in ASSISTANTS {
            let target = open(dir.path(), TARGET, (&options(), run));
            let small = open(dir.path(), name, (&options(), run));
            agrees(name, &target, small, &format!("halves {}, fused {}", run.half_states, run.fuse));
        }
    }
}
