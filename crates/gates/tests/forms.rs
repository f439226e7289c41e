//! Every form of shards gives what the default form gives, and sequences can be cut, saved and batched in each.

use anemoe_bundle::{Chain, ShardKind, TokenCount};
use anemoe_convert::build::build;
use anemoe_convert::form::{
    ActivationForm, AttentionForm, CacheForm, ExpertForm, FunctionForm, HistoryForm, IoForm, NormForm,
    ShardForm,
};
use anemoe_convert::models;
use anemoe_convert::plan::PlanOptions;
use anemoe_runtime::backend::{Backend, BackendFunction, BackendPackage, KeptCache, SequenceStates};
use anemoe_runtime::cpu::{CpuBackend, Options, Precision};
use anemoe_runtime::model::{Logits, Model, Request, Sequence};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Both families: one with rings and two kinds of layers, one with a history.
const MODELS: [(&str, bool); 2] = [("tiny-gemma4-moe", false), ("tiny-zaya", true)];
/// More than the window, and than one call takes.
const TOKENS: usize = 45;

/// Layers of both models.
const LAYERS: [usize; 2] = [6, 8];

fn joined(form: ShardForm, layers: usize) -> ShardForm {
    ShardForm { layers_per_shard: NonZeroUsize::new(layers), ..form }
}

/// Single changes, and all of them together; each with whether its results have the bits of the default form.
fn forms(has_history: bool) -> Vec<(ShardForm, bool)> {
    let form = ShardForm::default();
    let history = if has_history { HistoryForm::Host } else { HistoryForm::State };
    let by_host = ShardForm { cache: CacheForm::Host, history, ..form };
    let mut forms = vec![
        (by_host, true),
        (ShardForm { functions: FunctionForm::Apart, ..by_host }, true),
        (ShardForm { attention: AttentionForm::PerHead, ..form }, true),
        (ShardForm { io: IoForm::ChannelsLast, ..form }, true),
        // SiLU has no factors; those of GELU are rounded to fp16.
        (ShardForm { activation: ActivationForm::Sigmoid, ..form }, has_history),
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
    }
    // What the host computes in f32 between layers is rounded to fp16 where a package holds it as vectors.
    let has_same_bits = !has_history;
    forms.push((joined(form, 2), has_same_bits));
    forms.push((joined(ShardForm { attention: AttentionForm::PerHead, ..by_host }, 3), has_same_bits));
    let all = forms.iter().map(|(form, _)| *form).find(|form| form.experts == ExpertForm::Bank);
    forms.extend(all.map(|form| (joined(form, 3), false)));
    forms
}

/// Numbers of layers in a package: one, those that divide the layers and that do not, all, and more.
fn numbers_of_layers(layers: usize) -> [usize; 6] {
    [1, 2, 3, layers - 1, layers, layers + 1]
}

fn options(has_history: bool, form: ShardForm) -> PlanOptions {
    PlanOptions {
        quant: "lut4".parse().unwrap(),
        tokens: [1, 16].map(|n| TokenCount { min: n, max: n }).to_vec(),
        // Whole layers of ZAYA have all of their experts in one call.
        experts_per_shard: if has_history && form.layers_per_shard.is_some() { None } else { Some(2) },
        form,
        ..PlanOptions::default()
    }
}

fn bundle(dir: &Path, name: &str, options: &PlanOptions) -> PathBuf {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name);
    let family = models::open(models::load(fixture.to_str().unwrap()).unwrap()).unwrap();
    let packs = options.ffn_shards.map_or_else(String::new, |n| format!("-{n}"));
    let out = dir.join(format!("{name}-{}{packs}", options.form.to_string().replace(' ', "_")));
    build(family.as_ref(), &family.plan(options).unwrap(), None, &out, 2, &|_| ()).unwrap();
    out
}

fn open(bundle: &Path, fuse: bool) -> Model {
    let options = Options { precision: Precision::Fp32, fuse, ..Options::default() };
    Model::open(bundle, &CpuBackend { options }).unwrap()
}

fn ids(sequence: usize, n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 37 + sequence * 11 + 5) % 120) as u32).collect()
}

fn alone(model: &Model, ids: &[u32]) -> Vec<Vec<f32>> {
    let mut sequence = model.sequence();
    let one = |id: &u32| model.append(&mut sequence, &[*id], Logits::All, None).unwrap().remove(0);
    ids.iter().map(one).collect()
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(p, q)| f64::from(*p) * f64::from(*q)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn are_near(got: &[Vec<f32>], want: &[Vec<f32>], least: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (a, b)) in got.iter().zip(want).enumerate() {
        let cosine = cosine(a, b);
        assert!(cosine >= least, "{what}, token {i}: {cosine}");
    }
}

#[test]
fn every_form_gives_what_the_default_gives() {
    let dir = tempfile::tempdir().unwrap();
    for (name, has_history) in MODELS {
        let ids = ids(0, TOKENS);
        let want =
            alone(&open(&bundle(dir.path(), name, &options(has_history, ShardForm::default())), true), &ids);
        for (form, has_same_bits) in forms(has_history) {
            let what = format!("{name} {form}");
            let out = bundle(dir.path(), name, &options(has_history, form));
            let model = open(&out, true);
            let got = alone(&model, &ids);
            are_near(&got, &want, 0.99999, &what);
            assert!(!has_same_bits || got == want, "{what}: other bits");
            let whole = model.append(&mut model.sequence(), &ids, Logits::All, None).unwrap();
            assert!(whole == got, "{what}: a token has other bits in a batch");
            let steps = open(&out, false);
            let steps = steps.append(&mut steps.sequence(), &ids, Logits::All, None).unwrap();
            are_near(&steps, &want, 0.99999, &format!("{what}, step by step"));
        }
    }
}

#[test]
fn sequences_go_back_and_come_back_in_every_form() {
    let dir = tempfile::tempdir().unwrap();
    for (name, has_history) in MODELS {
        for (form, _) in forms(has_history) {
            let what = format!("{name} {form}");
            let model = open(&bundle(dir.path(), name, &options(has_history, form)), true);
            let all: Vec<Vec<u32>> = (0..3).map(|s| ids(s, TOKENS)).collect();
            let want: Vec<_> = all.iter().map(|ids| alone(&model, ids)).collect();
            // Sequences of different lengths in one batch.
            let mut sequences: Vec<Sequence> = all.iter().map(|_| model.sequence()).collect();
            let lengths = [TOKENS, 17, 3];
            let mut requests: Vec<Request<'_>> = sequences
                .iter_mut()
                .zip(&all)
                .zip(lengths)
                .map(|((sequence, ids), n)| Request { sequence, ids: &ids[..n], logits: Logits::All })
                .collect();
            let got = model.forward(&mut requests).unwrap();
            for (s, n) in lengths.into_iter().enumerate() {
                assert!(got[s] == want[s][..n], "{what}: sequence {s} of a batch");
            }
            // Cut back by few tokens and by many, forked, saved and restored.
            for (s, back) in [(0, 1), (0, 30), (1, 2), (2, 3)] {
                let n = sequences[s].position();
                let mut fork = sequences[s].fork().unwrap();
                model.truncate(&mut fork, n - back).unwrap();
                let mut bytes = Vec::new();
                bytes.extend(fork.save(&model).unwrap());
                let mut restored = model.restore(&bytes).unwrap();
                for sequence in [&mut fork, &mut restored] {
                    let got = model.append(sequence, &all[s][n - back..n], Logits::All, None).unwrap();
                    assert!(got == want[s][n - back..n], "{what}: sequence {s}, {back} back");
                }
                assert!(model.restore(&bytes[..bytes.len() - 1]).is_err(), "{what}: cut short");
            }
        }
    }
}

/// A backend that runs functions only as they are declared, as a Neural Engine does.
struct AsDeclared(CpuBackend);

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

#[test]
fn calls_that_are_filled_up_keep_no_rows_of_what_fills_them() {
    let dir = tempfile::tempdir().unwrap();
    for (name, has_history) in MODELS {
        let ids = ids(0, TOKENS);
        for (form, _) in forms(has_history) {
            let out = bundle(dir.path(), name, &options(has_history, form));
            let model = Model::open(&out, &AsDeclared(CpuBackend::with(Precision::Fp32))).unwrap();
            let want = alone(&model, &ids);
            let mut sequence = model.sequence();
            let mut got = Vec::new();
            for part in ids.chunks(13) {
                got.extend(model.append(&mut sequence, part, Logits::All, None).unwrap());
            }
            are_near(&got, &want, 0.99999, &format!("{name} {form}"));
        }
    }
}

/// Packages, calls and results by the number of layers that share a package.
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
                // The first attention and the last pack have nothing to share a package with.
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
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny-zaya");
    let family = models::open(models::load(fixture.to_str().unwrap()).unwrap()).unwrap();
    let form = joined(ShardForm::default(), 2);
    let plan = |options: PlanOptions| family.plan(&options).map(|_| ()).unwrap_err().to_string();
    let err = plan(PlanOptions { experts_per_shard: Some(2), ..options(true, form) });
    assert!(err.contains("--layers-per-shard") && err.contains("--experts-per-shard 4"), "{err}");
    // A table of a sort that is not joined, and one of joined layers that joins none.
    for (kind, form, says) in [
        (ShardKind::Attention, form, "forms of attention"),
        (ShardKind::Layers, ShardForm::default(), "without layers-per-shard"),
    ] {
        let err = plan(PlanOptions { forms: [(kind, form)].into(), ..options(true, ShardForm::default()) });
        assert!(err.contains(says), "{err}");
    }
    // All layers of the published model have more bytes than a package may.
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
    // The plan of a bundle is made again with its forms.
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny-gemma4-moe");
    let family = models::open(models::load(fixture.to_str().unwrap()).unwrap()).unwrap();
    let plan = models::replan(family.as_ref(), &out, &Chain::read(&out).unwrap()).unwrap();
    let of = |kind| plan.shards.iter().find(|s| s.kind == kind).unwrap().form;
    assert_eq!(
        (of(ShardKind::Attention), of(ShardKind::ExpertsCombine).io),
        (attention, IoForm::ChannelsLast)
    );
}
