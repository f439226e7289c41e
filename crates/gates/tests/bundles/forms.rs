//! Checks that every form of shards gives the default form's results, and that sequences can be cut, saved and
//! batched in each form.

use crate::common::{AsDeclared, alone, cosine, fixed, fixture, ids};
use anemoe_bundle::{Chain, ShardKind, TokenCount};
use anemoe_convert::build::build;
use anemoe_convert::context_buckets::ContextBuckets;
use anemoe_convert::form::{
    ActivationForm, AttentionForm, CacheForm, ExpertForm, FunctionForm, HistoryForm, IoForm, NormForm,
    ShardForm,
};
use anemoe_convert::models;
use anemoe_convert::plan::PlanOptions;
use anemoe_runtime::backend::{
    Backend, BackendFunction, BackendPackage, FunctionCall, KeptCache, KeptRows, SequenceStates,
};
use anemoe_runtime::cpu::{CpuBackend, Options, Precision};
use anemoe_runtime::model::{Logits, Model, Request, Sequence};
use anemoe_runtime::tensor::Tensor;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Fixtures of both families and whether they have a history: one has rings and two kinds of layers, one a history.
const MODELS: [(&str, bool); 2] = [("tiny-gemma4-moe", false), ("tiny-zaya", true)];
/// Tokens of a test: more than the window, than one call, and than a bucket.
const TOKENS: usize = 45;
/// Positions of the bucket.
const BUCKET: usize = 32;

/// Numbers of layers of both models.
const LAYERS: [usize; 2] = [6, 8];

fn joined(form: ShardForm, layers: usize) -> ShardForm {
    ShardForm { layers_per_shard: NonZeroUsize::new(layers), ..form }
}

/// Returns forms with single changes and with all changes; each with whether its results have the default form's bits.
fn forms(has_history: bool) -> Vec<(ShardForm, bool)> {
    let form = ShardForm::default();
    let history = if has_history { HistoryForm::Host } else { HistoryForm::State };
    let by_host = ShardForm { cache: CacheForm::Host, history, ..form };
    let context_buckets = ContextBuckets::new(&[BUCKET]).unwrap();
    let mut forms = vec![
        (by_host, true),
        (ShardForm { functions: FunctionForm::Apart, ..by_host }, true),
        (ShardForm { context_buckets, ..form }, true),
        (ShardForm { context_buckets, ..by_host }, true),
        (ShardForm { context_buckets, functions: FunctionForm::Apart, ..by_host }, true),
        (
            ShardForm {
                context_buckets,
                attention: AttentionForm::PerHead,
                io: IoForm::ChannelsLast,
                ..form
            },
            true,
        ),
        (ShardForm { attention: AttentionForm::PerHead, ..form }, true),
        (ShardForm { io: IoForm::ChannelsLast, ..form }, true),
        // SiLU has no factors. The factors of GELU, which routers use too, are rounded to fp16.
        (ShardForm { activation: ActivationForm::Sigmoid, ..form }, false),
        (ShardForm { norm: NormForm::Plain, ..form }, false),
        (ShardForm { attention: AttentionForm::PerHead, io: IoForm::ChannelsLast, ..by_host }, true),
        (
            ShardForm {
                attention: AttentionForm::PerHead,
                activation: ActivationForm::Sigmoid,
                io: IoForm::ChannelsLast,
                norm: NormForm::Plain,
                experts: ExpertForm::Bank,
                functions: FunctionForm::Apart,
                ..by_host
            },
            false,
        ),
    ];
    if has_history {
        forms.push((ShardForm { history: HistoryForm::Host, ..form }, true));
        forms.push((ShardForm { context_buckets, history: HistoryForm::Host, ..form }, true));
    }
    // Values that the host computes in f32 between layers are rounded to fp16 where a package holds them as vectors.
    let has_same_bits = !has_history;
    forms.push((joined(form, 2), has_same_bits));
    forms.push((joined(ShardForm { context_buckets, ..form }, 2), has_same_bits));
    forms.push((
        joined(ShardForm { context_buckets, functions: FunctionForm::Apart, ..by_host }, 3),
        has_same_bits,
    ));
    forms.push((joined(ShardForm { attention: AttentionForm::PerHead, ..by_host }, 3), has_same_bits));
    let all = forms.iter().map(|(form, _)| *form).find(|form| form.experts == ExpertForm::Bank);
    forms.extend(all.map(|form| (joined(form, 3), false)));
    forms
}

/// Returns numbers of layers per package: one, divisors and others, all layers, and more.
fn numbers_of_layers(layers: usize) -> [usize; 6] {
    [1, 2, 3, layers - 1, layers, layers + 1]
}

fn options(has_history: bool, form: ShardForm) -> PlanOptions {
    PlanOptions {
        quant: "lut4".parse().unwrap(),
        tokens: fixed(&[1, 16]),
        // Joined layers of ZAYA have all of their experts in one call.
        experts_per_shard: if has_history && form.layers_per_shard.is_some() { None } else { Some(2) },
        form,
        ..PlanOptions::default()
    }
}

fn bundle(dir: &Path, name: &str, options: &PlanOptions) -> PathBuf {
    let family = fixture(name);
    let mut options = options.clone();
    if family.decoder.experts().is_none() {
        (options.experts_per_shard, options.form.experts) = (None, ExpertForm::Separate);
    }
    let options = &options;
    std::fs::create_dir_all(dir).unwrap();
    let packs = options.ffn_shards.map_or_else(String::new, |n| format!("-{n}"));
    let out = dir.join(format!("{name}-{}{packs}", options.form.to_string().replace(' ', "_")));
    build(&family, &family.plan(options).unwrap(), None, &out, 2, &|_| ()).unwrap();
    out
}

fn open(bundle: &Path, fuse: bool) -> Model {
    let options = Options { precision: Precision::Fp32, fuse, ..Options::default() };
    Model::open(bundle, &CpuBackend { options }).unwrap()
}

fn are_near(got: &[Vec<f32>], want: &[Vec<f32>], least: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (a, b)) in got.iter().zip(want).enumerate() {
        let cosine = cosine(a, b);
        assert!(cosine >= least, "{what}, token {i}: {cosine}");
    }
}

#[test]
fn every_form_of_rings_gives_what_the_default_gives() {
    check_every_form(MODELS[0]);
}

#[test]
fn every_form_of_a_history_gives_what_the_default_gives() {
    check_every_form(MODELS[1]);
}

#[test]
fn every_form_of_dense_layers_gives_what_the_default_gives() {
    check_every_form(("tiny-gemma3", false));
    check_every_form(("tiny-gemma4-dense", false));
}

#[test]
fn every_form_of_sinks_and_biases_gives_what_the_default_gives() {
    check_every_form(("tiny-gpt-oss", false));
}

#[test]
fn every_form_of_dense_layers_among_experts_gives_what_the_default_gives() {
    check_every_form(("tiny-qwen3-moe", false));
}

/// Builds a bundle in each form, which takes longest, and makes all checks of forms with it.
fn check_every_form((name, has_history): (&str, bool)) {
    let dir = tempfile::tempdir().unwrap();
    let all: Vec<Vec<u32>> = (0..3).map(|s| ids(s, TOKENS)).collect();
    let want =
        alone(&open(&bundle(dir.path(), name, &options(has_history, ShardForm::default())), true), &all[0]);
    for (form, has_same_bits) in forms(has_history) {
        let what = format!("{name} {form}");
        let out = bundle(dir.path(), name, &options(has_history, form));
        let model = open(&out, true);
        let got: Vec<_> = all.iter().map(|ids| alone(&model, ids)).collect();
        are_near(&got[0], &want, 0.99999, &what);
        assert!(!has_same_bits || got[0] == want, "{what}: other bits");
        let whole = model.append(&mut model.sequence(), &all[0], Logits::All, None).unwrap();
        assert!(whole == got[0], "{what}: a token has other bits in a batch");
        let steps = open(&out, false);
        let steps = steps.append(&mut steps.sequence(), &all[0], Logits::All, None).unwrap();
        are_near(&steps, &want, 0.99999, &format!("{what}, step by step"));
        go_back_and_come_back(&model, &all, &got, &what);
        fill_calls_up(&out, &all[0], &what);
        std::fs::remove_dir_all(out).unwrap();
    }
}

/// Runs a batch of sequences of different lengths, cuts them back, forks, saves and restores them. `want` has the results
/// of `all` sequences alone.
fn go_back_and_come_back(model: &Model, all: &[Vec<u32>], want: &[Vec<Vec<f32>>], what: &str) {
    let mut sequences: Vec<Sequence> = all.iter().map(|_| model.sequence()).collect();
    let lengths = [TOKENS, 17, 3];
    let mut requests: Vec<Request<'_>> = sequences
        .iter_mut()
        .zip(all)
        .zip(lengths)
        .map(|((sequence, ids), n)| Request { sequence, ids: &ids[..n], logits: Logits::All })
        .collect();
    let got = model.forward(&mut requests).unwrap();
    for (s, n) in lengths.into_iter().enumerate() {
        assert!(got[s] == want[s][..n], "{what}: sequence {s} of a batch");
    }
    for (s, back) in [(0, 1), (0, 30), (1, 2), (2, 3)] {
        let n = sequences[s].position();
        let mut fork = sequences[s].fork().unwrap();
        model.truncate(&mut fork, n - back).unwrap();
        let bytes = fork.save(model).unwrap();
        let mut restored = model.restore(&bytes).unwrap();
        for sequence in [&mut fork, &mut restored] {
            let got = model.append(sequence, &all[s][n - back..n], Logits::All, None).unwrap();
            assert!(got == want[s][n - back..n], "{what}: sequence {s}, {back} back");
        }
        assert!(model.restore(&bytes[..bytes.len() - 1]).is_err(), "{what}: cut short");
    }
}

/// Runs calls that declared functions fill up: no row of what fills them is kept.
fn fill_calls_up(bundle: &Path, ids: &[u32], what: &str) {
    let model = Model::open(bundle, &AsDeclared(CpuBackend::with(Precision::Fp32))).unwrap();
    let want = alone(&model, ids);
    let mut sequence = model.sequence();
    let parts = ids.chunks(13);
    let got = parts.flat_map(|part| model.append(&mut sequence, part, Logits::All, None).unwrap());
    are_near(&got.collect::<Vec<_>>(), &want, 0.99999, what);
}

/// Checks packages, calls and results by the number of layers per package.
#[test]
fn any_number_of_layers_can_share_a_package() {
    let dir = tempfile::tempdir().unwrap();
    for ((name, has_history), layers) in MODELS.into_iter().zip(LAYERS) {
        let ids = ids(0, TOKENS);
        let packs = if has_history { None } else { Some(4) };
        let with = |form: ShardForm| PlanOptions {
            ffn_shards: packs,
            experts_per_shard: None,
            ..options(has_history, form)
        };
        let want = alone(&open(&bundle(dir.path(), name, &with(ShardForm::default())), true), &ids);
        for n in numbers_of_layers(layers) {
            let what = format!("{name}, {n} layers");
            let out = bundle(dir.path(), name, &with(joined(ShardForm::default(), n)));
            let chain = Chain::read(&out).unwrap();
            let kinds = |kind| chain.shards.iter().filter(|s| s.kind == kind).count();
            let (own, attention) = (kinds(ShardKind::Layers), kinds(ShardKind::Attention));
            if has_history {
                assert_eq!((own, attention), (layers.div_ceil(n), 0), "{what}");
            } else if n == 1 {
                assert_eq!((own, attention, kinds(ShardKind::ExpertsCombine)), (0, layers, layers), "{what}");
            } else {
                // The first attention and the last pack have no neighbour to share a package with.
                let ends = (attention, kinds(ShardKind::ExpertsCombine), kinds(ShardKind::Experts));
                assert_eq!((own, ends), (layers - 1, (1, 1, 3 * layers)), "{what}");
            }
            let got = alone(&open(&out, true), &ids);
            are_near(&got, &want, 0.99999, &what);
            assert!(has_history || got == want, "{what}: other bits");
        }
    }
}

#[test]
fn layers_without_all_experts_in_a_call_share_no_package() {
    let family = fixture("tiny-zaya");
    let form = joined(ShardForm::default(), 2);
    let plan = |options: PlanOptions| family.plan(&options).map(|_| ()).unwrap_err().to_string();
    let err = plan(PlanOptions { experts_per_shard: Some(2), ..options(true, form) });
    assert!(err.contains("--layers-per-shard") && err.contains("--experts-per-shard 4"), "{err}");
    // Forms of a kind of shard that cannot be joined, and of joined layers that join none.
    for (kind, form, says) in [
        (ShardKind::Attention, form, "[attention]: layers-per-shard"),
        (ShardKind::Layers, ShardForm::default(), "without layers-per-shard"),
    ] {
        let err = plan(PlanOptions { forms: [(kind, form)].into(), ..options(true, ShardForm::default()) });
        assert!(err.contains(says), "{err}");
    }
    // All layers of the published model have more bytes than a package may have.
    let family = models::open(models::load("synthetic:zaya1-8b").unwrap()).unwrap();
    let err =
        family.plan(&options(true, joined(ShardForm::default(), 40))).map(|_| ()).unwrap_err().to_string();
    assert!(err.contains("fewer layers"), "{err}");
}

#[test]
fn sorts_of_shards_have_forms_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let ids = ids(0, 20);
    let want = alone(
        &open(&bundle(dir.path(), "tiny-gemma4-moe", &options(false, ShardForm::default())), true),
        &ids,
    );
    let mut options = options(false, ShardForm { io: IoForm::ChannelsLast, ..ShardForm::default() });
    let attention =
        ShardForm { cache: CacheForm::Host, attention: AttentionForm::PerHead, ..ShardForm::default() };
    options.forms.insert(ShardKind::Attention, attention);
    options.forms.insert(ShardKind::Head, ShardForm::default());
    let out = bundle(dir.path(), "tiny-gemma4-moe", &options);
    assert!(alone(&open(&out, true), &ids) == want);
    // The plan of a bundle can be made again with its forms.
    let family = fixture("tiny-gemma4-moe");
    let plan = models::replan(&family, &out, &Chain::read(&out).unwrap()).unwrap();
    let of = |kind| plan.shards.iter().find(|s| s.kind == kind).unwrap().form;
    assert_eq!(
        (of(ShardKind::Attention), of(ShardKind::ExpertsCombine).io),
        (attention, IoForm::ChannelsLast)
    );
}

/// Returns options with two buckets: both smaller than the cache of full attention, one smaller than the ring.
fn bucketed(has_history: bool, form: ShardForm, tokens: &[TokenCount]) -> PlanOptions {
    let context_buckets = ContextBuckets::new(&[32, 64]).unwrap();
    let form = ShardForm { context_buckets, ..form };
    PlanOptions { tokens: tokens.to_vec(), max_context: Some(128), ..options(has_history, form) }
}

/// Returns forms with caches kept by the backend and by the host; the last one also joins layers.
fn holders(has_history: bool) -> Vec<ShardForm> {
    let form = ShardForm::default();
    let history = if has_history { HistoryForm::Host } else { HistoryForm::State };
    let by_host = ShardForm { cache: CacheForm::Host, history, ..form };
    vec![form, by_host, joined(by_host, 2)]
}

#[test]
fn sequences_cross_the_borders_of_buckets_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    // Rings for calls of 64 tokens have 96 slots, those for calls of 8 tokens 32.
    let fixed = [1, 64].map(|n| TokenCount { min: n, max: n });
    let ranged = [TokenCount { min: 1, max: 8 }];
    for (name, has_history) in MODELS {
        for tokens in [&fixed[..], &ranged[..]] {
            for form in holders(has_history) {
                let what = format!("{name} {form} {tokens:?}");
                let own = dir.path().join(tokens.len().to_string());
                let plain = PlanOptions { form, ..bucketed(has_history, form, tokens) };
                let all: Vec<Vec<u32>> = (0..3).map(|s| ids(s, 100)).collect();
                let want: Vec<_> = {
                    let model = open(&bundle(&own, name, &plain), true);
                    all.iter().map(|ids| alone(&model, ids)).collect()
                };
                let model = open(&bundle(&own, name, &bucketed(has_history, form, tokens)), true);
                assert_eq!(model.chain().contexts(), [32, 64], "{what}");
                assert!(alone(&model, &all[0]) == want[0], "{what}: one by one");
                // Tokens of the last call are cut off without running other tokens again, as drafts need it.
                let mut drafted = model.sequence();
                model.append(&mut drafted, &all[0][..20], Logits::None, None).unwrap();
                assert_eq!(model.tokens_to_run_again(&drafted, 17), 0, "{what}");
                // Calls that meet a border, end there and cross it.
                for sizes in [[29, 6], [32, 1], [7, 31], [60, 16]] {
                    let (mut sequence, mut at, mut got) = (model.sequence(), 0, Vec::new());
                    for size in sizes.into_iter().cycle() {
                        let end = (at + size).min(all[0].len());
                        got.extend(model.append(&mut sequence, &all[0][at..end], Logits::All, None).unwrap());
                        at = end;
                        if at == all[0].len() {
                            break;
                        }
                    }
                    assert!(got == want[0], "{what}: calls of {sizes:?}");
                }
                // A batch of sequences in different buckets; one changes its bucket.
                let mut sequences: Vec<Sequence> = all.iter().map(|_| model.sequence()).collect();
                let mut ends = [0; 3];
                for step in [[30, 40, 70], [1, 20, 9], [4, 3, 2]] {
                    let mut requests: Vec<Request<'_>> = Vec::new();
                    for (s, sequence) in sequences.iter_mut().enumerate() {
                        let ids = &all[s][ends[s]..ends[s] + step[s]];
                        requests.push(Request { sequence, ids, logits: Logits::All });
                    }
                    let got = model.forward(&mut requests).unwrap();
                    for s in 0..3 {
                        let end = ends[s] + step[s];
                        assert!(got[s] == want[s][ends[s]..end], "{what}: sequence {s} to {end}");
                        ends[s] = end;
                    }
                }
                // Cuts back across borders, in a fork and after a save, and appends again.
                for (s, length) in [(0, 34), (0, 32), (0, 30), (1, 60), (1, 20), (2, 65), (2, 63), (2, 3)] {
                    let mut fork = sequences[s].fork().unwrap();
                    model.truncate(&mut fork, length).unwrap();
                    let mut restored = model.restore(&fork.save(&model).unwrap()).unwrap();
                    for sequence in [&mut fork, &mut restored] {
                        let got =
                            model.append(sequence, &all[s][length..ends[s]], Logits::All, None).unwrap();
                        assert!(got == want[s][length..ends[s]], "{what}: sequence {s} back to {length}");
                    }
                }
            }
        }
    }
}

#[test]
fn functions_of_buckets_run_where_they_hold_a_pass() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = [1, 16].map(|n| TokenCount { min: n, max: n });
    for (name, has_history) in MODELS {
        for form in holders(has_history) {
            let out =
                bundle(&dir.path().join(form.cache.word()), name, &bucketed(has_history, form, &tokens));
            let calls = Arc::new(Mutex::new(Vec::new()));
            let backend = Recorded(CpuBackend::with(Precision::Fp32), calls.clone());
            let model = Model::open(&out, &backend).unwrap();
            let ids = ids(0, 70);
            let want = alone(&model, &ids);
            let names = |calls: &Mutex<Vec<String>>| {
                let mut names = std::mem::take(&mut *calls.lock().unwrap());
                names.retain(|name| name.contains("_c"));
                // Where layers share a package, the unit that ends a layer has the next layer's caches.
                names.iter_mut().for_each(|name| *name = name.trim_start_matches("combine_").into());
                names.dedup();
                names
            };
            // Rings with fewer slots keep their own functions.
            assert_eq!(names(&calls), ["t1_c32", "t1_c64"], "{name} {form}");
            // Calls that are filled up: 12 tokens in calls of 16.
            let mut sequence = model.sequence();
            let mut got = Vec::new();
            for part in ids.chunks(12) {
                got.extend(model.append(&mut sequence, part, Logits::All, None).unwrap());
            }
            are_near(&got, &want, 0.99999, &format!("{name} {form}"));
            assert_eq!(names(&calls), ["t16_c32", "t16_c64"], "{name} {form}");
        }
    }
}

/// Backend that runs functions as declared, and records the names of functions with states.
struct Recorded(CpuBackend, Arc<Mutex<Vec<String>>>);

struct RecordedPackage(Box<dyn BackendPackage>, Arc<Mutex<Vec<String>>>);

struct RecordedFunction(Arc<dyn BackendFunction>, String, Arc<Mutex<Vec<String>>>);

impl Backend for Recorded {
    fn open_with(
        &self,
        path: &Path,
        caches: &[KeptCache],
    ) -> anemoe_runtime::Result<Box<dyn BackendPackage>> {
        Ok(Box::new(RecordedPackage(self.0.open_with(path, caches)?, self.1.clone())))
    }
}

impl BackendPackage for RecordedPackage {
    fn prepare(&self, function: &str) -> anemoe_runtime::Result<Arc<dyn BackendFunction>> {
        Ok(Arc::new(RecordedFunction(self.0.prepare(function)?, function.to_string(), self.1.clone())))
    }

    fn new_states(&self) -> Box<dyn SequenceStates> {
        self.0.new_states()
    }
}

impl BackendFunction for RecordedFunction {
    fn inputs(&self) -> &[String] {
        self.0.inputs()
    }

    fn outputs(&self) -> &[String] {
        self.0.outputs()
    }

    fn has_states(&self) -> bool {
        self.0.has_states()
    }

    fn kept_rows(&self) -> &[KeptRows] {
        self.0.kept_rows()
    }

    fn run(&self, call: FunctionCall<'_, '_>, outputs: &mut Vec<Tensor>) -> anemoe_runtime::Result<()> {
        if self.0.has_states() {
            self.2.lock().unwrap().push(self.1.clone());
        }
        self.0.run(call, outputs)
    }
}
