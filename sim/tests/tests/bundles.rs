//! Runs bundles through the Core ML backend on the fake Core ML, compared with the CPU backend.

use anemoe_convert::form::{
    ActivationForm, AttentionForm, ExpertForm, HistoryForm, IoForm, NormForm, ShardForm,
};
use anemoe_convert::plan::PlanOptions;
use anemoe_runtime::cpu::{CpuBackend, Precision};
use anemoe_runtime::model::{AttachedAssistant, DraftStart, Logits, Model, Request};
use anemoe_runtime::speculate::{DraftKind, DraftModel, Mode, Speculation};
use fake_coreml::{Fault, plant};
use sim_tests::{
    AsDeclared, Compiled, FAMILIES, by_host, families_by_cache, fixed, greedy, ids, leaves_nothing, living,
    logits, one_and_eight,
};
use std::num::NonZeroUsize;
use std::sync::Arc;

const FIXTURES: [&str; 5] =
    ["tiny-gemma4-moe", "tiny-gemma4-moe-text", "tiny-zaya", "tiny-zaya-legacy", "tiny-zaya-skip"];

/// Returns forms with one change each, and a form with all changes.
fn forms(family: &str) -> Vec<ShardForm> {
    let (form, by_host) = (ShardForm::default(), by_host(family));
    let mut forms = vec![
        by_host,
        ShardForm { attention: AttentionForm::PerHead, ..form },
        ShardForm { io: IoForm::ChannelsLast, ..form },
        ShardForm { activation: ActivationForm::Sigmoid, ..form },
        ShardForm { norm: NormForm::Plain, ..form },
        ShardForm { experts: ExpertForm::Bank, ..form },
        ShardForm { layers_per_shard: NonZeroUsize::new(2), ..form },
        ShardForm { layers_per_shard: NonZeroUsize::new(3), ..by_host },
        ShardForm {
            attention: AttentionForm::PerHead,
            activation: ActivationForm::Sigmoid,
            io: IoForm::ChannelsLast,
            norm: NormForm::Plain,
            experts: ExpertForm::Bank,
            ..by_host
        },
    ];
    if by_host.history == HistoryForm::Host {
        forms.push(ShardForm { history: HistoryForm::Host, ..form });
    }
    forms
}

#[test]
fn every_form_gives_the_tokens_of_the_cpu() {
    for fixture in FAMILIES {
        for form in forms(fixture) {
            leaves_nothing(|| {
                let dir = tempfile::tempdir().unwrap();
                let mut options = one_and_eight(form);
                // Whole layers run all experts in one call.
                options.experts_per_shard =
                    options.experts_per_shard.filter(|_| form.layers_per_shard.is_none());
                let compiled = Compiled::with(dir.path(), fixture, options);
                let sim = Model::open(&compiled.bundle, &compiled.backend(None)).unwrap();
                let cpu = Model::open(&compiled.bundle, &AsDeclared).unwrap();
                let (got, want) = (logits(&sim, &ids(0, 45), 45), logits(&cpu, &ids(0, 45), 45));
                assert!(got == want, "{fixture} {form}: other bits");
                let greedy = |model| greedy(model, &ids(1, 11), Speculation::default());
                assert_eq!(greedy(&sim), greedy(&cpu), "{fixture} {form}");
            });
        }
    }
}

#[test]
fn every_fixture_gives_the_tokens_of_the_cpu() {
    for fixture in FIXTURES {
        leaves_nothing(|| {
            let dir = tempfile::tempdir().unwrap();
            for (quant, tokens) in [("lut4", vec![1, 8]), ("fp16", vec![1]), ("int8-channel", vec![1, 4, 16])]
            {
                let inside = dir.path().join(quant);
                std::fs::create_dir(&inside).unwrap();
                let compiled = Compiled::new(&inside, fixture, quant, fixed(&tokens));
                let sim = Model::open(&compiled.bundle, &compiled.backend(None)).unwrap();
                let same = Model::open(&compiled.bundle, &AsDeclared).unwrap();
                let (a, b) = (logits(&sim, &ids(0, 29), 29), logits(&same, &ids(0, 29), 29));
                assert!(a == b, "{fixture} {quant} {tokens:?}: other bits");
                let rounded = Model::open(&compiled.bundle, &CpuBackend::with(Precision::Fp16)).unwrap();
                let prompt = ids(1, 11);
                let want = greedy(&rounded, &prompt, Speculation::default());
                assert_eq!(
                    greedy(&sim, &prompt, Speculation::default()),
                    want,
                    "{fixture} {quant} {tokens:?}"
                );
            }
        });
    }
}

#[test]
fn cut_forked_saved_and_batched_sequences_are_those_of_the_cpu() {
    for (fixture, form) in families_by_cache() {
        leaves_nothing(|| {
            let dir = tempfile::tempdir().unwrap();
            let compiled = Compiled::with(dir.path(), fixture, one_and_eight(form));
            let backend = compiled.backend(None);
            let model = Model::open(&compiled.bundle, &backend).unwrap();
            let other = Model::open(&compiled.bundle, &backend).unwrap();
            let cpu = Model::open(&compiled.bundle, &AsDeclared).unwrap();
            let all = ids(0, 40);
            let want = logits(&cpu, &all, 1);
            let mut sequence = model.sequence();
            // Single tokens, then calls of several; cuts within a call, before it, and at its end.
            for (n, cut) in
                [(20, 20), (21, 17), (33, 25), (31, 30), (32, 32), (40, 8), (24, 3), (9, 0), (12, 12)]
            {
                let at = sequence.position();
                let got =
                    model.append(&mut sequence, &all[at..n], Logits::All, Some(if n > 30 { 8 } else { 1 }));
                assert!(got.unwrap() == want[at..n], "{fixture} {form}: {at}..{n}");
                model.truncate(&mut sequence, cut).unwrap();
                let mut fork = sequence.fork().unwrap();
                let saved = sequence.save(&model).unwrap();
                let mut restored = other.restore(&saved).unwrap();
                let next = &all[cut..cut + 3];
                for (model, sequence) in [(&model, &mut fork), (&other, &mut restored)] {
                    let got = model.append(sequence, next, Logits::All, Some(1)).unwrap();
                    assert!(got == want[cut..cut + 3], "{fixture} {form}: behind a cut from {n} to {cut}");
                }
            }
            assert!(cpu.restore(&sequence.save(&model).unwrap()).is_err(), "states of another backend");
            // Several sequences in one pass.
            let mut sequences = [model.sequence(), model.sequence(), model.sequence()];
            let tokens: Vec<Vec<u32>> = (0..3).map(|s| ids(s, 13 + s)).collect();
            let mut requests: Vec<Request<'_>> = sequences
                .iter_mut()
                .zip(&tokens)
                .map(|(sequence, ids)| Request { sequence, ids, logits: Logits::All })
                .collect();
            let got = model.forward(&mut requests).unwrap();
            for (got, ids) in got.iter().zip(&tokens) {
                assert!(*got == logits(&cpu, ids, 1), "{fixture} {form}: a batch");
            }
        });
    }
}

#[test]
fn drafts_change_no_token() {
    for (fixture, form) in families_by_cache() {
        leaves_nothing(|| {
            let dir = tempfile::tempdir().unwrap();
            let compiled = Compiled::with(dir.path(), fixture, one_and_eight(form));
            let model = Model::open(&compiled.bundle, &compiled.backend(None)).unwrap();
            let prompt: Vec<u32> = ids(0, 6).into_iter().cycle().take(30).collect();
            let plain = greedy(&model, &prompt, Speculation::default());
            let drafted = Speculation { mode: Mode::Ngram, ..Speculation::default() };
            assert_eq!(greedy(&model, &prompt, drafted), plain, "{fixture} {form}");
        });
    }
}

/// Returns the logits of four steps of an assistant after eleven tokens.
fn steps(target: &Model, assistant: &AttachedAssistant) -> Vec<Vec<f32>> {
    let (mut sequence, mut rows) = (target.sequence(), Vec::new());
    target.append(&mut sequence, &ids(0, 11), Logits::None, None).unwrap();
    let start = DraftStart { token: 7, position: 11 };
    let choose = &mut |row: &mut [f32]| {
        rows.push(row.to_vec());
        Some(rows.len() as u32)
    };
    assistant.draft(target, &mut sequence, start, 4, choose).unwrap();
    rows
}

#[test]
fn assistants_draft_as_on_the_cpu_and_change_no_token() {
    let gemma = families_by_cache().into_iter().filter(|(fixture, _)| fixture.contains("gemma"));
    for ((fixture, form), name) in gemma
        .flat_map(|target| ["tiny-gemma4-assistant", "tiny-gemma4-assistant-ordered"].map(|a| (target, a)))
    {
        leaves_nothing(|| {
            let dir = tempfile::tempdir().unwrap();
            let options = one_and_eight(form);
            let own = PlanOptions { experts_per_shard: None, form: ShardForm::default(), ..options.clone() };
            let target = Compiled::with(dir.path(), fixture, options);
            let small = Compiled::with(dir.path(), name, own);
            let attached = |target: &Model, small: Model| AttachedAssistant::new(small, target).unwrap();
            let cpu = Model::open(&target.bundle, &AsDeclared).unwrap();
            let of_cpu = attached(&cpu, Model::open(&small.bundle, &AsDeclared).unwrap());
            let sim = Model::open(&target.bundle, &target.backend(None)).unwrap();
            let of_sim = attached(&sim, Model::open(&small.bundle, &small.backend(None)).unwrap());
            let rows = steps(&sim, &of_sim);
            assert_eq!(rows.len(), 4, "{fixture} {form} {name}");
            assert!(rows == steps(&cpu, &of_cpu), "{fixture} {form} {name}: other bits");
            let prompt = ids(1, 11);
            let plain = greedy(&sim, &prompt, Speculation::default());
            let drafter = Some(Arc::new(DraftModel::new(DraftKind::Assistant(of_sim))));
            let drafted = Speculation { mode: Mode::Ngram, ngram_min: 24, drafter, ..Speculation::default() };
            assert_eq!(greedy(&sim, &prompt, drafted), plain, "{fixture} {form} {name}");
        });
    }
}

#[test]
fn functions_that_do_not_fit_together_take_turns() {
    for (fixture, form) in families_by_cache() {
        leaves_nothing(|| {
            let dir = tempfile::tempdir().unwrap();
            let compiled = Compiled::with(dir.path(), fixture, one_and_eight(form));
            let cpu = Model::open(&compiled.bundle, &AsDeclared).unwrap();
            let want = logits(&cpu, &ids(0, 23), 23);
            let all: u64 = compiled.chain.shards.iter().map(|s| s.bytes).sum();
            // Limits with room for two functions, and for one package at a time.
            for limit in [all / 3, 1] {
                let model = Model::open(&compiled.bundle, &compiled.backend(Some(limit))).unwrap();
                model.prepare(8, Logits::Last);
                let mut sequence = model.sequence();
                let got = model.append(&mut sequence, &ids(0, 23), Logits::All, None).unwrap();
                assert!(got == want, "{fixture} {form}: {limit} bytes");
                model.truncate(&mut sequence, 21).unwrap();
                let got = model.append(&mut sequence, &ids(0, 23)[21..], Logits::All, None).unwrap();
                assert!(got == want[21..], "{fixture} {form}: {limit} bytes, behind a cut");
                let most = if limit == 1 { 1 } else { compiled.chain.shards.len() };
                let loaded = fake_coreml::loaded();
                assert!(loaded <= most, "{fixture} {form}: {loaded} loaded");
            }
        });
    }
}

#[test]
fn a_token_makes_no_arrays_dictionaries_or_blocks() {
    for (fixture, form) in families_by_cache() {
        leaves_nothing(|| {
            let dir = tempfile::tempdir().unwrap();
            let compiled = Compiled::with(dir.path(), fixture, one_and_eight(form));
            let model = Model::open(&compiled.bundle, &compiled.backend(None)).unwrap();
            let mut sequence = model.sequence();
            // After this, every expert has been called once.
            for id in 0..60 {
                model.append(&mut sequence, &[id], Logits::Last, None).unwrap();
            }
            let count = || {
                let made = objc_sim::made();
                let classes = [
                    "MLDictionaryFeatureProvider",
                    "MLPredictionOptions",
                    "NSDictionary",
                    "MLModel",
                    "MLState",
                ];
                let objects: Vec<usize> =
                    classes.iter().map(|class| made.get(*class).copied().unwrap_or(0)).collect();
                (objects, objc_sim::COPIED.load(std::sync::atomic::Ordering::SeqCst))
            };
            let arrays = || objc_sim::made().get("MLMultiArray").copied().unwrap_or(0);
            let (before, arrays_before) = (count(), arrays());
            for id in 0..10 {
                model.append(&mut sequence, &[id], Logits::Last, None).unwrap();
            }
            assert_eq!(count(), before, "{fixture} {form}");
            // The fake itself makes an array to show a state.
            let stateful = compiled
                .chain
                .shards
                .iter()
                .filter(|s| s.kind == anemoe_bundle::ShardKind::Attention)
                .count();
            let carries = fixture.contains("zaya") && form.history == HistoryForm::State;
            let shown = if carries { 10 * stateful } else { 0 };
            assert_eq!(arrays() - arrays_before, shown, "{fixture} {form}");
        });
    }
}

#[test]
fn results_of_core_ml_s_own_are_read_by_their_strides() {
    for (fixture, form) in families_by_cache() {
        leaves_nothing(|| {
            let dir = tempfile::tempdir().unwrap();
            let compiled = Compiled::with(dir.path(), fixture, one_and_eight(form));
            let cpu = Model::open(&compiled.bundle, &AsDeclared).unwrap();
            plant("mlpackage", Fault::NoBackings);
            let model = Model::open(&compiled.bundle, &compiled.backend(None)).unwrap();
            assert!(logits(&model, &ids(0, 21), 21) == logits(&cpu, &ids(0, 21), 21), "{fixture} {form}");
        });
    }
}

#[test]
fn nothing_is_kept_of_sequences_and_models_that_went() {
    for (fixture, form) in families_by_cache() {
        leaves_nothing(|| {
            let dir = tempfile::tempdir().unwrap();
            let compiled = Compiled::with(dir.path(), fixture, one_and_eight(form));
            let backend = compiled.backend(None);
            let without_models = living();
            let model = Model::open(&compiled.bundle, &backend).unwrap();
            let run = || {
                let mut sequence = model.sequence();
                model.append(&mut sequence, &ids(0, 11), Logits::Last, None).unwrap();
                let mut fork = sequence.fork().unwrap();
                model.append(&mut fork, &ids(1, 3), Logits::Last, None).unwrap();
                sequence.clear();
                model.append(&mut sequence, &ids(2, 2), Logits::Last, None).unwrap();
                living()
            };
            let with_sequences = run();
            let without_sequences = living();
            for _ in 0..3 {
                assert_eq!(run(), with_sequences, "{fixture} {form}: behind other sequences");
                assert_eq!(living(), without_sequences, "{fixture} {form}: kept of sequences");
            }
            drop(model);
            assert_eq!(fake_coreml::loaded(), 0, "{fixture} {form}: functions kept");
            assert_eq!(living(), without_models, "{fixture} {form}: kept of the model");
        });
    }
}
