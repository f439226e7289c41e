//! Models that many sequences share: in any batch and after any history, each token has the bits that it has alone.

use crate::common::{AsDeclared, alone, fixed, fixture, ids};
use anemoe_bundle::TokenCount;
use anemoe_convert::build::build;
use anemoe_convert::plan::PlanOptions;
use anemoe_runtime::cpu::{CpuBackend, Options, Precision};
use anemoe_runtime::model::{Logits, Model, Request, Sequence};
use std::path::{Path, PathBuf};

/// Fixtures of both families: one with sliding windows and rings, one with carried rows.
const MODELS: [&str; 2] = ["tiny-gemma4-moe", "tiny-zaya"];

fn bundle(dir: &Path, name: &str, tokens: &[TokenCount]) -> PathBuf {
    let family = fixture(name);
    let options = PlanOptions {
        quant: "lut4".parse().unwrap(),
        tokens: tokens.to_vec(),
        experts_per_shard: Some(2),
        ..PlanOptions::default()
    };
    let out = dir.join(format!(
        "{name}-{}",
        tokens.iter().map(|t| format!("{}to{}", t.min, t.max)).collect::<Vec<_>>().join("-")
    ));
    build(&family, &family.plan(&options).unwrap(), None, &out, 2, &|_| ()).unwrap();
    out
}

fn open(bundle: &Path, half_states: bool) -> Model {
    let options = Options { precision: Precision::Fp32, half_states, ..Options::default() };
    Model::open(bundle, &CpuBackend { options }).unwrap()
}

/// Returns the logits of three fixed tokens after a sequence.
fn after(model: &Model, sequence: &mut Sequence) -> Vec<Vec<f32>> {
    model.append(sequence, &[3, 90, 17], Logits::All, None).unwrap()
}

#[test]
fn any_number_of_tokens_is_one_call_and_has_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let functions = [fixed(&[1]), fixed(&[1, 64]), vec![TokenCount { min: 1, max: 64 }]];
    for name in MODELS {
        for functions in &functions {
            let out = bundle(dir.path(), name, functions);
            let model = open(&out, true);
            let ids = ids(0, 70);
            let want = alone(&model, &ids);
            let most = functions.iter().map(|t| t.max).max().unwrap();
            let passes = |model: &Model| model.stats().calls + model.stats().skipped;
            let of_one_token = passes(&model) / 70;
            for n in [2, 3, 5, 8, 31, 33, 63] {
                let mut sequence = model.sequence();
                let before = passes(&model);
                let got = model.append(&mut sequence, &ids[..n], Logits::All, None).unwrap();
                assert!(got == want[..n], "{name} {functions:?}: {n} tokens");
                // Rings for calls of one token have no room for more.
                if most > 1 {
                    assert_eq!(passes(&model) - before, of_one_token, "{name} {functions:?}: {n} tokens");
                }
                let got = model.append(&mut sequence, &ids[n..], Logits::All, None).unwrap();
                assert!(got == want[n..], "{name} {functions:?}: {} tokens behind {n}", 70 - n);
            }
        }
    }
}

#[test]
fn sequences_of_a_batch_do_not_know_of_each_other() {
    let dir = tempfile::tempdir().unwrap();
    for name in MODELS {
        let out = bundle(dir.path(), name, &fixed(&[1, 64]));
        for half_states in [false, true] {
            let model = open(&out, half_states);
            let all: Vec<Vec<u32>> = (0..5).map(|s| ids(s, 40)).collect();
            let want: Vec<_> = all.iter().map(|ids| alone(&model, ids)).collect();
            let mut sequences: Vec<Sequence> = all.iter().map(|_| model.sequence()).collect();
            let mut at = [0; 5];
            // Each sequence takes another number of tokens in each batch, also none.
            for round in 0.. {
                let counts: Vec<usize> =
                    (0..5).map(|s| ([1, 7, 0, 20, 3][(s + round) % 5]).min(40 - at[s])).collect();
                if at == [40; 5] {
                    break;
                }
                let mut requests: Vec<Request<'_>> = sequences
                    .iter_mut()
                    .enumerate()
                    .map(|(s, sequence)| Request {
                        sequence,
                        ids: &all[s][at[s]..at[s] + counts[s]],
                        logits: if round % 2 == 0 { Logits::All } else { Logits::Last },
                    })
                    .collect();
                let got = model.forward(&mut requests).unwrap();
                for s in 0..5 {
                    let first =
                        if round % 2 == 0 { at[s] } else { (at[s] + counts[s]).saturating_sub(1).max(at[s]) };
                    assert!(
                        got[s] == want[s][first..at[s] + counts[s]],
                        "{name}: sequence {s}, round {round}"
                    );
                    at[s] += counts[s];
                }
            }
            // All sequences run in one pass, functions with states included, and the sequences can be cut back afterwards.
            let passes = |model: &Model| model.stats().calls + model.stats().skipped;
            let before = passes(&model);
            alone(&model, &[7]);
            let of_one = passes(&model) - before;
            let mut requests: Vec<Request<'_>> = sequences
                .iter_mut()
                .map(|sequence| Request { sequence, ids: &[7, 8, 9], logits: Logits::Last })
                .collect();
            let before = passes(&model);
            model.forward(&mut requests).unwrap();
            assert_eq!(passes(&model) - before, of_one, "{name}");
            for (sequence, ids) in sequences.iter_mut().zip(&all) {
                model.truncate(sequence, 41).unwrap();
                let whole: Vec<u32> = ids.iter().copied().chain([7, 3, 90, 17]).collect();
                assert!(after(&model, sequence) == alone(&model, &whole)[41..], "{name}");
            }
        }
    }
}

#[test]
fn declared_functions_are_filled_up_and_repeated() {
    let dir = tempfile::tempdir().unwrap();
    for name in MODELS {
        for functions in [fixed(&[1]), fixed(&[1, 4]), fixed(&[1, 16]), vec![TokenCount { min: 1, max: 8 }]] {
            let out = bundle(dir.path(), name, &functions);
            let model = open(&out, false);
            let declared = Model::open(&out, &AsDeclared(CpuBackend::default())).unwrap();
            let all: Vec<Vec<u32>> = (0..2).map(|s| ids(s, 37)).collect();
            let want: Vec<_> = all.iter().map(|ids| alone(&model, ids)).collect();
            let mut sequences = [declared.sequence(), declared.sequence()];
            let mut requests: Vec<Request<'_>> = sequences
                .iter_mut()
                .zip(&all)
                .map(|(sequence, ids)| Request { sequence, ids, logits: Logits::All })
                .collect();
            let got = declared.forward(&mut requests).unwrap();
            let cosine = |a: &[f32], b: &[f32]| {
                let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(p, q)| f64::from(p * q)).sum::<f64>();
                dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
            };
            // A range runs step by step, with other rounding.
            let is_fixed = functions.iter().all(|t| t.min == t.max);
            for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                assert!(got == want || !is_fixed && cosine(got, want) > 0.9999, "{name} {functions:?}");
            }
        }
    }
}

#[test]
fn forks_go_their_own_ways() {
    let dir = tempfile::tempdir().unwrap();
    for name in MODELS {
        let model = open(&bundle(dir.path(), name, &fixed(&[1, 64])), true);
        let prompt = ids(0, 30);
        let mut first = model.sequence();
        model.append(&mut first, &prompt, Logits::None, None).unwrap();
        let mut second = first.fork().unwrap();
        for (sequence, other) in [(&mut first, 1), (&mut second, 2)] {
            let more = ids(other, 12);
            let got = model.append(sequence, &more, Logits::All, None).unwrap();
            let whole: Vec<u32> = prompt.iter().chain(&more).copied().collect();
            assert!(got == alone(&model, &whole)[30..], "{name}: fork {other}");
        }
    }
}

#[test]
fn a_sequence_that_was_cut_back_is_one_that_went_there() {
    let dir = tempfile::tempdir().unwrap();
    for name in MODELS {
        let model = open(&bundle(dir.path(), name, &fixed(&[1, 64])), true);
        let (prompt, more) = (ids(0, 50), ids(3, 64));
        for length in [0, 1, 5, 29, 30, 31, 49, 50] {
            // Several sizes of calls; cuts in the last call, before it, and twice.
            for calls in [vec![50], vec![30, 20], vec![49, 1], vec![40, 4, 6]] {
                let mut sequence = model.sequence();
                let mut at = 0;
                for n in &calls {
                    model.append(&mut sequence, &prompt[at..at + n], Logits::None, None).unwrap();
                    at += n;
                }
                model.append(&mut sequence, &more[..9], Logits::None, None).unwrap();
                let before = model.stats().calls;
                model.truncate(&mut sequence, 54).unwrap();
                model.truncate(&mut sequence, 50).unwrap();
                assert_eq!(
                    model.stats().calls,
                    before,
                    "{name}: tokens of the last call go without running others"
                );
                model.truncate(&mut sequence, length).unwrap();
                assert_eq!(sequence.position(), length);
                let mut direct = model.sequence();
                model.append(&mut direct, &prompt[..length], Logits::None, None).unwrap();
                let what = format!("{name}: {calls:?} cut back to {length}");
                assert!(after(&model, &mut sequence) == after(&model, &mut direct), "{what}");
                let rest = model.append(&mut sequence, &more, Logits::All, None).unwrap();
                assert!(rest == model.append(&mut direct, &more, Logits::All, None).unwrap(), "{what}");
            }
        }
        let mut sequence = model.sequence();
        model.append(&mut sequence, &prompt, Logits::None, None).unwrap();
        assert!(model.truncate(&mut sequence, 51).is_err());
    }
}

#[test]
fn a_saved_sequence_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    for name in MODELS {
        let out = bundle(dir.path(), name, &fixed(&[1, 64]));
        for half_states in [false, true] {
            let model = open(&out, half_states);
            let mut sequence = model.sequence();
            model.append(&mut sequence, &ids(0, 45), Logits::None, None).unwrap();
            let bytes = sequence.save(&model).unwrap();
            // A second model of the same bundle, as in another process.
            let model = open(&out, half_states);
            let mut again = model.restore(&bytes).unwrap();
            let mut direct = model.sequence();
            model.append(&mut direct, &ids(0, 45), Logits::None, None).unwrap();
            assert_eq!(again.position(), 45);
            assert!(after(&model, &mut again) == after(&model, &mut direct), "{name}");
            assert!(
                model.append(&mut sequence, &[1], Logits::Last, None).is_err(),
                "a sequence of another model"
            );
        }
    }
}

#[test]
fn saved_sequences_that_are_cut_or_changed_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = open(&bundle(dir.path(), "tiny-zaya", &fixed(&[1])), true);
    let mut sequence = model.sequence();
    model.append(&mut sequence, &ids(0, 4), Logits::None, None).unwrap();
    let bytes = sequence.save(&model).unwrap();
    for length in (0..bytes.len()).step_by(bytes.len() / 300 + 1) {
        assert!(model.restore(&bytes[..length]).is_err(), "the first {length} bytes");
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert!(model.restore(&longer).is_err());
    // Any changed byte gives an error, or a sequence that runs or fails, but no panic.
    for at in (0..bytes.len().min(4000)).step_by(7) {
        let mut changed = bytes.clone();
        changed[at] ^= 0x55;
        if let Ok(mut sequence) = model.restore(&changed) {
            let _ = model.append(&mut sequence, &[1], Logits::Last, None);
        }
    }
}
