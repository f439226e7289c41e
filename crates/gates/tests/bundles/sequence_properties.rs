//! Random histories of sequences: after any appends, cuts, forks, saves, restores and batches, a sequence has the
//! bits of one that went straight to its tokens.

use crate::common::{fixed, fixture, ids};
use anemoe_convert::build::build;
use anemoe_convert::form::{CacheForm, HistoryForm, ShardForm};
use anemoe_convert::plan::PlanOptions;
use anemoe_runtime::cpu::{CpuBackend, Options, Precision};
use anemoe_runtime::model::{Logits, Model, Request, Sequence};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::path::Path;

/// Most sequences that live at once.
const SEQUENCES: usize = 4;
/// Most positions of a history; the window of sliding layers is 16, rings have 96 slots.
const LONGEST: usize = 180;

/// Step of a history. Numbers choose a sequence, and a length in tokens or thousandths of the sequence.
#[derive(Clone, Debug)]
enum Change {
    /// Appends tokens to one sequence.
    Append { sequence: usize, tokens: usize },
    /// Appends tokens to all sequences in one pass.
    AppendAll { tokens: Vec<usize> },
    /// Cuts off a few tokens, as after drafts.
    CutBack { sequence: usize, tokens: usize },
    /// Cuts to any length.
    CutTo { sequence: usize, thousandths: usize },
    /// Forks a sequence.
    Fork { sequence: usize },
    /// Saves a sequence, and replaces it by the restored one.
    SaveAndRestore { sequence: usize },
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let sequence = || 0..SEQUENCES;
    let tokens = || prop_oneof![4 => 1..6usize, 2 => 6..40usize, 1 => 60..70usize];
    let change = prop_oneof![
        5 => (sequence(), tokens()).prop_map(|(sequence, tokens)| Change::Append { sequence, tokens }),
        3 => prop::collection::vec(0..9usize, SEQUENCES).prop_map(|tokens| Change::AppendAll { tokens }),
        3 => (sequence(), 1..34usize).prop_map(|(sequence, tokens)| Change::CutBack { sequence, tokens }),
        2 => (sequence(), 0..1000usize)
            .prop_map(|(sequence, thousandths)| Change::CutTo { sequence, thousandths }),
        2 => sequence().prop_map(|sequence| Change::Fork { sequence }),
        1 => sequence().prop_map(|sequence| Change::SaveAndRestore { sequence }),
    ];
    prop::collection::vec(change, 1..14)
}

/// Sequence with the tokens that lead to it.
struct Tracked {
    sequence: Sequence,
    ids: Vec<u32>,
}

impl Tracked {
    fn cut(&mut self, model: &Model, length: usize) {
        model.truncate(&mut self.sequence, length).unwrap();
        self.ids.truncate(length);
    }
}

/// Makes the changes in order, with other tokens in every step; returns the sequences at the end.
fn follow(model: &Model, changes: &[Change]) -> Vec<Tracked> {
    let mut all = vec![Tracked { sequence: model.sequence(), ids: Vec::new() }];
    for (step, change) in changes.iter().enumerate() {
        let n = all.len();
        match change {
            Change::Append { sequence, tokens } => {
                let of = &mut all[sequence % n];
                let more = ids(step + 1, (*tokens).min(LONGEST - of.ids.len()));
                if !more.is_empty() {
                    model.append(&mut of.sequence, &more, Logits::None, None).unwrap();
                    of.ids.extend(more);
                }
            }
            Change::AppendAll { tokens } => {
                let more = |(i, of): (usize, &Tracked)| {
                    ids(10 * step + i, tokens[i % SEQUENCES].min(LONGEST - of.ids.len()))
                };
                let more: Vec<Vec<u32>> = all.iter().enumerate().map(more).collect();
                let with_tokens = all.iter_mut().zip(&more).filter(|(_, ids)| !ids.is_empty());
                let mut requests: Vec<Request<'_>> = with_tokens
                    .map(|(of, ids)| Request { sequence: &mut of.sequence, ids, logits: Logits::None })
                    .collect();
                if !requests.is_empty() {
                    model.forward(&mut requests).unwrap();
                }
                all.iter_mut().zip(more).for_each(|(of, more)| of.ids.extend(more));
            }
            Change::CutBack { sequence, tokens } => {
                let of = &mut all[sequence % n];
                of.cut(model, of.ids.len().saturating_sub(*tokens));
            }
            Change::CutTo { sequence, thousandths } => {
                let of = &mut all[sequence % n];
                of.cut(model, of.ids.len() * thousandths / 1000);
            }
            Change::Fork { sequence } if n < SEQUENCES => {
                let of = &all[sequence % n];
                let copy = Tracked { sequence: of.sequence.fork().unwrap(), ids: of.ids.clone() };
                all.push(copy);
            }
            Change::Fork { .. } => {}
            Change::SaveAndRestore { sequence } => {
                let of = &mut all[sequence % n];
                of.sequence = model.restore(&of.sequence.save(model).unwrap()).unwrap();
            }
        }
    }
    all
}

/// Returns forms in which the backend keeps states, and in which the host does.
fn holders(name: &str) -> [ShardForm; 2] {
    let form = ShardForm::default();
    let history = if name == "tiny-zaya" { HistoryForm::Host } else { HistoryForm::State };
    [form, ShardForm { cache: CacheForm::Host, history, ..form }]
}

fn open(dir: &Path, name: &str, form: ShardForm, half_states: bool) -> Model {
    let family = fixture(name);
    let out = dir.join(format!("{name}-{}", form.cache));
    let options = PlanOptions {
        quant: "lut4".parse().unwrap(),
        tokens: fixed(&[1, 64]),
        experts_per_shard: Some(2),
        form,
        ..PlanOptions::default()
    };
    if !out.exists() {
        build(&family, &family.plan(&options).unwrap(), None, &out, 2, &|_| ()).unwrap();
    }
    let options = Options { precision: Precision::Fp32, half_states, ..Options::default() };
    Model::open(&out, &CpuBackend { options }).unwrap()
}

#[test]
fn a_sequence_is_what_its_tokens_make_it_whatever_came_before() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["tiny-gemma4-moe", "tiny-zaya"] {
        for (form, half_states) in holders(name).into_iter().flat_map(|f| [(f, true), (f, false)]) {
            let model = open(dir.path(), name, form, half_states);
            let mut runner =
                TestRunner::new(Config { cases: 12, failure_persistence: None, ..Config::default() });
            let held = runner.run(&changes(), |changes| {
                let probe = [3u32, 90, 17];
                for mut of in follow(&model, &changes) {
                    prop_assert_eq!(of.sequence.position(), of.ids.len());
                    let mut direct = model.sequence();
                    if !of.ids.is_empty() {
                        model.append(&mut direct, &of.ids, Logits::None, None).unwrap();
                    }
                    let [got, want] = [&mut of.sequence, &mut direct]
                        .map(|s| model.append(s, &probe, Logits::All, None).unwrap());
                    prop_assert!(got == want, "other bits behind {} tokens", of.ids.len());
                }
                Ok(())
            });
            held.unwrap_or_else(|e| panic!("{name} {form}, states in fp16: {half_states}: {e}"));
        }
    }
}
