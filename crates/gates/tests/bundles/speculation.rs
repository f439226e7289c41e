//! Checks that drafts change no token: generation with drafts gives the tokens of plain decoding, at any temperature.

use crate::common::{fixed, fixture};
use anemoe_convert::build::build;
use anemoe_convert::plan::PlanOptions;
use anemoe_runtime::cpu::{CpuBackend, Options, Precision, Products};
use anemoe_runtime::generate::{GenerateOptions, generate};
use anemoe_runtime::model::{Logits, Model};
use anemoe_runtime::sampler::{Sampling, TokenBias};
use anemoe_runtime::speculate::{
    Controller, Corpus, DraftKind, DraftModel, DraftSource, DraftStatistics, Mode, PassTime, Speculation,
    draft_lengths, prepare_drafts,
};
use std::path::Path;
use std::sync::Arc;

fn open(dir: &Path, name: &str, counts: &[usize], half_states: bool) -> Model {
    let options = Options { precision: Precision::Fp32, half_states, ..Options::default() };
    open_with(dir, name, counts, options)
}

fn open_with(dir: &Path, name: &str, counts: &[usize], options: Options) -> Model {
    let out = dir.join(format!("{name}-{}", counts.len()));
    if !out.exists() {
        let family = fixture(name);
        let tokens = fixed(counts);
        let options = PlanOptions { quant: "lut4".parse().unwrap(), tokens, ..PlanOptions::default() };
        build(&family, &family.plan(&options).unwrap(), None, &out, 2, &|_| ()).unwrap();
    }
    Model::open(&out, &CpuBackend { options }).unwrap()
}

fn prompt(kind: usize) -> Vec<u32> {
    match kind {
        // Random tokens, periodic tokens, and one repeated token.
        0 => (0..30).map(|i| (i * i * 31 + i * 17 + 5) % 120).collect(),
        1 => (0..48).map(|i| (i % 7) * 13 + 3).collect(),
        _ => vec![9; 20],
    }
}

#[test]
fn drafts_change_no_token() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["tiny-gemma4-moe", "tiny-zaya"] {
        // Rings of functions for one token have no room for more.
        for (counts, half_states) in [(&[1, 64][..], false), (&[1, 64], true), (&[1], true)] {
            let model = open(dir.path(), name, counts, half_states);
            let auto = Speculation { mode: Mode::Auto, ..Speculation::default() };
            draft_lengths(&auto).for_each(|drafted| model.prepare(drafted + 1, Logits::All));
            let mut drafted = 0;
            for kind in 0..3 {
                let prompt = prompt(kind);
                for temperature in [0.0, 0.8] {
                    let sampling = Sampling { temperature, seed: 11, ..Sampling::GREEDY };
                    let run = |speculation: Speculation, (max_new, ignore_eos): (usize, bool)| {
                        let options = GenerateOptions {
                            max_new,
                            sampling: sampling.clone(),
                            ignore_eos,
                            prefill_chunk: None,
                            speculation,
                        };
                        let mut sequence = model.sequence();
                        let mut seen = Vec::new();
                        let made = generate(&model, &mut sequence, &prompt, &options, |id| {
                            seen.push(id);
                            true
                        })
                        .unwrap();
                        assert_eq!(seen, made.ids);
                        assert_eq!(sequence.position(), prompt.len() + made.decode_tokens);
                        made
                    };
                    let limits = [(60, true), (7, true), (60, false)];
                    let plain = limits.map(|limits| run(Speculation::default(), limits));
                    let corpus = Some(Arc::new(Corpus::new(&plain[0].ids)));
                    for (mode, draft_max, corpus) in [
                        (Mode::Ngram, 1, None),
                        (Mode::Ngram, 3, None),
                        (Mode::Ngram, 8, None),
                        (Mode::Ngram, 20, corpus.clone()),
                        (Mode::Auto, 8, corpus),
                    ] {
                        let s =
                            Speculation { mode, draft_max, ngram_min: 1, corpus, ..Speculation::default() };
                        // What ends a text is the same for all sources of drafts.
                        let tried = if mode == Mode::Auto || draft_max == 3 { 0..3 } else { 2..3 };
                        for (limits, plain) in
                            limits.into_iter().zip(&plain).take(tried.end).skip(tried.start)
                        {
                            let made = run(s.clone(), limits);
                            let what = format!(
                                "{name}, prompt {kind}, temperature {temperature}, {limits:?}, {mode:?}, {draft_max}"
                            );
                            assert_eq!(made.ids, plain.ids, "{what}");
                            assert_eq!(
                                (made.stop, made.decode_tokens),
                                (plain.stop, plain.decode_tokens),
                                "{what}"
                            );
                            let report = made.speculation.unwrap();
                            assert!(report.accepted <= report.drafted);
                            // The controller's drafts depend on the times of passes.
                            drafted += if mode == Mode::Ngram { report.drafted } else { 0 };
                        }
                    }
                }
            }
            assert!(drafted > 500 || counts == [1], "{name}: {drafted}");
        }
    }
}

/// Checks that every drafted position is chosen with the tokens before it in mind, and through each filter.
#[test]
fn drafts_change_no_token_with_penalties_and_filters() {
    let dir = tempfile::tempdir().unwrap();
    let greedy = Sampling::GREEDY;
    let warm = Sampling { temperature: 0.9, seed: 5, ..Sampling::GREEDY };
    let follows = |tokens: &[u32], bias| TokenBias { tokens: tokens.to_vec(), bias };
    let samplings = [
        Sampling { repetition_penalty: 1.4, ..greedy.clone() },
        Sampling { repetition_penalty: 1.4, repeat_last_n: Some(3), ..greedy.clone() },
        Sampling { presence_penalty: 0.5, frequency_penalty: 0.4, ..greedy.clone() },
        Sampling {
            biases: vec![follows(&[5], 3.0), follows(&[5, 9], 9.0), follows(&[9, 4], 9.0)],
            ..greedy.clone()
        },
        Sampling { biases: vec![follows(&[1], 9.0)], min_new: 9, begin_suppress: vec![9, 3], ..greedy },
        Sampling { repetition_penalty: 0.7, frequency_penalty: -0.5, ..warm.clone() },
        Sampling { top_k: 5, ..warm.clone() },
        Sampling { top_p: 0.7, ..warm.clone() },
        Sampling { min_p: 0.2, ..warm.clone() },
        Sampling { typical_p: 0.5, ..warm.clone() },
        Sampling { top_k: 20, top_p: 0.9, min_p: 0.05, typical_p: 0.8, repetition_penalty: 1.1, ..warm },
    ];
    for name in ["tiny-gemma4-moe", "tiny-zaya"] {
        let model = open(dir.path(), name, &[1, 64], true);
        for sampling in &samplings {
            let (mut drafted, mut accepted) = (0, 0);
            for kind in 0..3 {
                let run = |speculation: Speculation| {
                    let options = GenerateOptions {
                        max_new: 40,
                        sampling: sampling.clone(),
                        ignore_eos: false,
                        prefill_chunk: None,
                        speculation,
                    };
                    generate(&model, &mut model.sequence(), &prompt(kind), &options, |_| true).unwrap()
                };
                let plain = run(Speculation::default());
                assert!(plain.ids.len() >= sampling.min_new, "{sampling:?}");
                // A text whose tokens are sometimes right.
                let known = plain.ids.iter().enumerate().map(|(i, id)| if i % 7 == 6 { 2 } else { *id });
                let corpus = Some(Arc::new(Corpus::new(&known.collect::<Vec<_>>())));
                let mode = Mode::Ngram;
                let made = run(Speculation { mode, ngram_min: 1, corpus, ..Speculation::default() });
                assert_eq!((&made.ids, made.stop), (&plain.ids, plain.stop), "{name}, {kind}: {sampling:?}");
                let report = made.speculation.unwrap();
                (drafted, accepted) = (drafted + report.drafted, accepted + report.accepted);
            }
            assert!(accepted > 9 && accepted < drafted, "{name}, {sampling:?}: {accepted} of {drafted}");
        }
    }
}

/// Returns statistics by which drafts of up to eight tokens pay after any match.
fn promising() -> DraftStatistics {
    let mut c = Controller::new(DraftStatistics::new(8), Vec::new());
    let time = |drafted| PassTime { seconds: 1.0, streams: 1, drafted };
    (0..20).for_each(|_| c.note(DraftSource::Repetition(1), (0, 0), time(0), 0.0));
    for matched in [1, 2, 4, 8, 16, 32] {
        (0..40).for_each(|_| c.note_followed(matched, true));
    }
    for drafted in [1, 2, 4, 8] {
        (0..3).for_each(|_| c.note(DraftSource::Repetition(24), (drafted, drafted), time(drafted), 0.0));
    }
    c.note(DraftSource::Repetition(1), (0, 0), time(0), 0.0);
    c.statistics().clone()
}

#[test]
fn drafts_change_no_token_in_other_arithmetic() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["tiny-gemma4-moe", "tiny-zaya"] {
        for (products, precision) in [
            (Products::Fast, Precision::Fp32),
            (Products::Exact, Precision::Fp16),
            (Products::Usual, Precision::Fp32),
        ] {
            let options = Options { products, precision, half_states: true, ..Options::default() };
            let model = open_with(dir.path(), name, &[1, 64], options);
            let mut drafted = [0; 2];
            for kind in 0..3 {
                let run = |speculation| {
                    let options = GenerateOptions {
                        max_new: 100,
                        sampling: Sampling::GREEDY,
                        ignore_eos: true,
                        prefill_chunk: None,
                        speculation,
                    };
                    generate(&model, &mut model.sequence(), &prompt(kind), &options, |_| true).unwrap()
                };
                let plain = run(Speculation::default());
                let corpus = Some(Arc::new(Corpus::new(&plain.ids)));
                for (i, mode) in [Mode::Ngram, Mode::Auto].into_iter().enumerate() {
                    for draft_max in [8, 31] {
                        let statistics = if draft_max == 8 { promising().into() } else { Default::default() };
                        let corpus = corpus.clone();
                        let s = Speculation {
                            mode,
                            draft_max,
                            ngram_min: 1,
                            corpus,
                            statistics,
                            ..Speculation::default()
                        };
                        draft_lengths(&s).for_each(|drafted| model.prepare(drafted + 1, Logits::All));
                        let made = run(s);
                        assert_eq!(
                            made.ids, plain.ids,
                            "{name}, {products:?}, {precision:?}, {mode:?}, {draft_max}"
                        );
                        drafted[i] += made.speculation.unwrap().drafted;
                    }
                }
            }
            assert!(drafted[0] > 200 && drafted[1] > 0, "{name}, {products:?}, {precision:?}: {drafted:?}");
        }
    }
}

#[test]
fn a_text_that_is_known_takes_few_passes() {
    let dir = tempfile::tempdir().unwrap();
    let model = open(dir.path(), "tiny-zaya", &[1, 64], true);
    let options = |speculation| GenerateOptions {
        max_new: 80,
        sampling: Sampling::GREEDY,
        ignore_eos: true,
        prefill_chunk: None,
        speculation,
    };
    let mut sequence = model.sequence();
    let off = options(Speculation::default());
    let plain = generate(&model, &mut sequence, &prompt(0), &off, |_| true).unwrap();
    let whole: Vec<u32> = prompt(0).into_iter().chain(plain.ids.iter().copied()).collect();
    let corpus = Some(Arc::new(Corpus::new(&whole)));
    let speculation = Speculation { mode: Mode::Ngram, corpus, ..Speculation::default() };
    let made = generate(&model, &mut sequence, &prompt(0), &options(speculation), |_| true).unwrap();
    assert_eq!(made.ids, plain.ids);
    let report = made.speculation.unwrap();
    assert!(report.acceptance > 0.8 && report.verifier_calls <= 16, "{report:?}");
}

fn small(model: Model) -> Arc<DraftModel> {
    Arc::new(DraftModel::new(DraftKind::Small(model)))
}

/// Returns settings by which a drafter drafts always, since no repetition is long enough.
fn always(drafter: &Arc<DraftModel>) -> Speculation {
    let (ngram_min, ngram_max, drafter) = (1000, 1000, Some(Arc::clone(drafter)));
    Speculation { mode: Mode::Ngram, ngram_min, ngram_max, drafter, ..Speculation::default() }
}

fn greedy(max_new: usize, speculation: Speculation) -> GenerateOptions {
    let sampling = Sampling::GREEDY;
    GenerateOptions { max_new, sampling, ignore_eos: true, prefill_chunk: None, speculation }
}

/// Checks drafts of a small model in new, cut, forked, and restored sequences. A model that drafts for itself is always right, at
/// any temperature: its copy of the sampler draws with the same random numbers.
#[test]
fn a_drafter_changes_no_token_and_follows_its_target() {
    let dir = tempfile::tempdir().unwrap();
    for (target, other) in [("tiny-gemma4-moe", "tiny-llama"), ("tiny-zaya", "tiny-gemma4-moe")] {
        let model = open(dir.path(), target, &[1, 64], true);
        let drafters = [target, other].map(|name| small(open(dir.path(), name, &[1, 64], true)));
        for (temperature, seed) in [(0.0, 1), (0.8, 2), (1.5, 3)] {
            let options = |speculation| GenerateOptions {
                sampling: Sampling { temperature, seed, repetition_penalty: 1.1, ..Sampling::GREEDY },
                ..greedy(40, speculation)
            };
            for (i, drafter) in drafters.iter().enumerate() {
                let mut sequence = model.sequence();
                // The second prompt shares its beginning with the first one; the third one goes on in a copy, the fourth in a
                // restored sequence, and the last one is longer than a pass of the drafter.
                for (n, kind) in [0, 1, 0, 1, 3].into_iter().enumerate() {
                    let prompt: Vec<u32> = match kind {
                        3 => (0..150).map(|i| (i * i * 7 + i) % 120).collect(),
                        _ => (0..12).chain(prompt(kind)).collect(),
                    };
                    let plain = options(Speculation::default());
                    let plain = generate(&model, &mut model.sequence(), &prompt, &plain, |_| true).unwrap();
                    sequence = match n {
                        2 => sequence.fork().unwrap(),
                        3 => model.restore(&sequence.save(&model).unwrap()).unwrap(),
                        _ => sequence,
                    };
                    let made = generate(&model, &mut sequence, &prompt, &options(always(drafter)), |_| true)
                        .unwrap();
                    let what = format!("{target}, drafter {i}, temperature {temperature}, prompt {n}");
                    assert_eq!(made.ids, plain.ids, "{what}");
                    let report = made.speculation.unwrap();
                    assert_eq!(report.sources.len(), 2, "{what}");
                    assert!(report.drafted > 20, "{what}: {report:?}");
                    assert_eq!(report.sources[1].drafted, report.drafted, "{what}");
                    assert!(i > 0 || report.accepted == report.drafted, "{what}: {report:?}");
                }
            }
        }
    }
}

#[test]
fn a_drafter_in_mode_auto_or_off_changes_no_token() {
    let dir = tempfile::tempdir().unwrap();
    let model = open(dir.path(), "tiny-gemma4-moe", &[1, 64], true);
    let drafter = Some(small(open(dir.path(), "tiny-gemma4-moe", &[1, 64], true)));
    let run = |speculation| {
        generate(&model, &mut model.sequence(), &prompt(0), &greedy(160, speculation), |_| true).unwrap()
    };
    let plain = run(Speculation::default());
    let auto = Speculation { mode: Mode::Auto, drafter, ..Speculation::default() };
    prepare_drafts(&model, &auto).unwrap();
    assert_eq!(run(auto.clone()).ids, plain.ids);
    let without = run(Speculation { drafter: None, ..auto.clone() }).speculation.unwrap();
    assert!(without.sources.is_empty(), "sources are named where there are several");
    assert_eq!(run(Speculation { mode: Mode::Off, ..auto }).ids, plain.ids);
}

/// Checks a drafter whose context is shorter than its target's: it begins anew with the newest tokens.
#[test]
fn a_drafter_with_a_short_context_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let model = open(dir.path(), "tiny-gemma4-moe", &[1, 64], true);
    let out = dir.path().join("short");
    let family = fixture("tiny-llama");
    let options = PlanOptions { max_context: Some(32), tokens: fixed(&[1]), ..PlanOptions::default() };
    build(&family, &family.plan(&options).unwrap(), None, &out, 2, &|_| ()).unwrap();
    let drafter = small(Model::open(&out, &CpuBackend::default()).unwrap());
    let prompt: Vec<u32> = (0..100).map(|i| (i * 37) % 120).collect();
    let run = |s| generate(&model, &mut model.sequence(), &prompt, &greedy(100, s), |_| true).unwrap();
    let made = run(always(&drafter));
    assert_eq!(made.ids, run(Speculation::default()).ids);
    assert!(made.speculation.unwrap().drafted > 100);
}

#[test]
fn a_failing_drafter_ends_drafts_and_not_generation() {
    let dir = tempfile::tempdir().unwrap();
    let model = open(dir.path(), "tiny-gemma4-moe", &[1, 64], true);
    let whole = open(dir.path(), "tiny-llama", &[1, 64], true);
    // The embedding is opened at its first use.
    let mut chain = whole.chain().clone();
    chain.embedding.file = "gone.bin".into();
    let package = |shard: &anemoe_bundle::Shard| whole.bundle().join(&shard.file);
    let broken = Model::with_chain(whole.bundle(), chain, &CpuBackend::default(), &package).unwrap();
    let drafter = small(broken);
    let run = |s| generate(&model, &mut model.sequence(), &prompt(0), &greedy(20, s), |_| true).unwrap();
    let made = run(always(&drafter));
    assert_eq!(made.ids, run(Speculation::default()).ids);
    assert!(drafter.is_broken() && made.speculation.unwrap().drafted == 0);
}

/// Makes a drafter for tiny-gemma4-moe with its weights in fewer bits, which is often right, and not always.
fn coarse(dir: &Path, half_states: bool) -> Arc<DraftModel> {
    let out = dir.join("coarse");
    if !out.exists() {
        let family = fixture("tiny-gemma4-moe");
        let (quant, tokens) = ("lut3".parse().unwrap(), fixed(&[1, 64]));
        let options = PlanOptions { quant, tokens, ..PlanOptions::default() };
        build(&family, &family.plan(&options).unwrap(), None, &out, 2, &|_| ()).unwrap();
    }
    let options = Options { precision: Precision::Fp32, half_states, ..Options::default() };
    small(Model::open(&out, &CpuBackend { options }).unwrap())
}

/// Decodes many prompts with a drafter and without, with both kinds of caches.
#[test]
fn prompts_have_the_same_tokens_with_a_drafter() {
    let dir = tempfile::tempdir().unwrap();
    for half_states in [false, true] {
        let model = open(dir.path(), "tiny-gemma4-moe", &[1, 64], half_states);
        let drafter = coarse(dir.path(), half_states);
        let (mut drafted, mut accepted) = (0, 0);
        for seed in 0..40u32 {
            let prompt: Vec<u32> = (0..8 + seed).map(|i| (i * i * (seed + 3) + 7 * i) % 120).collect();
            let run = |s| generate(&model, &mut model.sequence(), &prompt, &greedy(30, s), |_| true).unwrap();
            let made = run(always(&drafter));
            assert_eq!(made.ids, run(Speculation::default()).ids, "prompt {seed}");
            let report = made.speculation.unwrap();
            (drafted, accepted) = (drafted + report.drafted, accepted + report.accepted);
        }
        assert!(accepted > 100 && accepted < drafted, "{accepted} of {drafted}");
    }
}

/// Returns the probabilities of the `k` most probable tokens at a temperature.
fn probabilities(logits: &[f32], temperature: f64, k: usize) -> Vec<(u32, f64)> {
    let mut all: Vec<(u32, f64)> = logits.iter().zip(0..).map(|(&v, id)| (id, f64::from(v))).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all.truncate(k);
    let largest = all[0].1;
    all.iter_mut().for_each(|(_, v)| *v = ((*v - largest) / temperature).exp());
    let sum: f64 = all.iter().map(|(_, v)| v).sum();
    all.into_iter().map(|(id, v)| (id, v / sum)).collect()
}

#[test]
fn drafts_leave_the_distribution_of_samples() {
    const RUNS: u64 = 1500;
    const K: usize = 6;
    let dir = tempfile::tempdir().unwrap();
    let model = open(dir.path(), "tiny-gemma4-moe", &[1, 64], true);
    let prompt = prompt(0);
    let mut sequence = model.sequence();
    let row = |ids: &[u32], sequence: &mut anemoe_runtime::model::Sequence| {
        sequence.clear();
        model.append(sequence, ids, Logits::Last, None).unwrap().remove(0)
    };
    // Distribution of the second new token: the sum over the first tokens.
    let mut expected = std::collections::BTreeMap::<u32, f64>::new();
    let first = probabilities(&row(&prompt, &mut sequence), 1.5, K);
    for &(id, p) in &first {
        let ids: Vec<u32> = prompt.iter().copied().chain([id]).collect();
        for (id, q) in probabilities(&row(&ids, &mut sequence), 1.5, K) {
            *expected.entry(id).or_default() += p * q * RUNS as f64;
        }
    }
    // The corpus drafts likely tokens, some of which are refused.
    let mut corpus = prompt.clone();
    for &(id, _) in &first {
        let ids: Vec<u32> = prompt.iter().copied().chain([id]).collect();
        corpus.extend([
            prompt[prompt.len() - 1],
            id,
            probabilities(&row(&ids, &mut sequence), 1.5, 1)[0].0,
            1,
        ]);
    }
    let corpus = Some(Arc::new(Corpus::new(&corpus)));
    let ngrams = Speculation { mode: Mode::Ngram, ngram_min: 1, corpus, ..Speculation::default() };
    let other = always(&coarse(dir.path(), true));
    for speculation in [ngrams, other] {
        let mut seen = std::collections::BTreeMap::<u32, f64>::new();
        let (mut drafted, mut accepted) = (0, 0);
        for seed in 0..RUNS {
            let options = GenerateOptions {
                max_new: 3,
                sampling: Sampling { temperature: 1.5, top_k: K, seed, ..Sampling::GREEDY },
                ignore_eos: true,
                prefill_chunk: None,
                speculation: speculation.clone(),
            };
            let made = generate(&model, &mut sequence, &prompt, &options, |_| true).unwrap();
            *seen.entry(made.ids[1]).or_default() += 1.0;
            let report = made.speculation.unwrap();
            (drafted, accepted) = (drafted + report.drafted, accepted + report.accepted);
        }
        assert!(drafted > RUNS / 2 && accepted > 100 && accepted < drafted - 100, "{accepted} of {drafted}");
        assert!(seen.keys().all(|id| expected.contains_key(id)), "a token that cannot be drawn");
        // Chi-squared test, with rare tokens as one cell.
        let (mut rare, mut chi, mut cells) = ((0.0, 0.0), 0.0, 0);
        for (id, &e) in &expected {
            let o = seen.get(id).copied().unwrap_or(0.0);
            if e < 8.0 {
                rare = (rare.0 + e, rare.1 + o);
            } else {
                (chi, cells) = (chi + (o - e) * (o - e) / e, cells + 1);
            }
        }
        if rare.0 > 0.0 {
            (chi, cells) = (chi + (rare.1 - rare.0) * (rare.1 - rare.0) / rare.0.max(1.0), cells + 1);
        }
        let freedom = f64::from(cells - 1);
        assert!(freedom >= 4.0, "{cells} cells");
        assert!(
            chi < freedom + 4.0 * (2.0 * freedom).sqrt(),
            "chi squared {chi:.1} of {freedom} degrees of freedom"
        );
    }
}
