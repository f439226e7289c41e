//! Checks that bundles give the same logits fused and step by step, and that fused logits do not depend on the cuts
//! of a prompt.

use crate::common::{cosine, fixed, fixture};
use anemoe_bundle::IndexBits;
use anemoe_convert::build::build;
use anemoe_convert::form::{ExpertForm, ShardForm};
use anemoe_convert::plan::PlanOptions;
use anemoe_convert::quant::Quant;
use anemoe_runtime::cpu::{CpuBackend, Options, Precision, Products};
use anemoe_runtime::model::{Logits, Model};

#[test]
fn fused_bundles_compute_what_their_steps_do() {
    let dir = tempfile::tempdir().unwrap();
    let ids: Vec<u32> = (0..29).map(|i| (i * 37 + 5) % 120).collect();
    // Other layouts of the same networks are tested with the first kinds only.
    let models = [
        ("tiny-gemma4-moe", 7),
        ("tiny-gemma4-moe-text", 1),
        ("tiny-zaya", 7),
        ("tiny-zaya-legacy", 1),
        ("tiny-zaya-skip", 2),
        ("tiny-gpt-oss", 7),
        ("tiny-qwen3-moe", 1),
        ("tiny-llama", 1),
    ];
    for (name, tries) in models {
        let family = fixture(name);
        let mut separate = Vec::new();
        for (i, (quant, per_shard, experts)) in [
            ("fp16", None, ExpertForm::Separate),
            ("lut4", None, ExpertForm::Separate),
            ("int8-tensor", Some(1), ExpertForm::Separate),
            ("int4-block", Some(2), ExpertForm::Separate),
            ("fp16", None, ExpertForm::Bank),
            ("int4-block", Some(2), ExpertForm::Bank),
            ("lut4", Some(2), ExpertForm::Bank),
        ]
        .into_iter()
        .take(tries)
        .enumerate()
        {
            let tokens = fixed(&[1, 4, 32]);
            let quant: Quant = quant.parse().unwrap();
            let options = PlanOptions {
                quant,
                tokens,
                experts_per_shard: per_shard,
                form: ShardForm { experts, ..ShardForm::default() },
                ..PlanOptions::default()
            };
            let out = dir.path().join(format!("{name}.{i}"));
            build(&family, &family.plan(&options).unwrap(), None, &out, 2, &|_| ()).unwrap();
            let open = |fuse| {
                let options = Options { precision: Precision::Fp32, fuse, ..Options::default() };
                Model::open(&out, &CpuBackend { options }).unwrap()
            };
            let all = |model: &Model| model.append(&mut model.sequence(), &ids, Logits::All, None).unwrap();
            let (whole, expected) = (all(&open(true)), all(&open(false)));
            for (i, (a, b)) in whole.iter().zip(&expected).enumerate() {
                let cosine = cosine(a, b);
                assert!(cosine >= 0.99999, "{name} {quant}, row {i}: {cosine}");
            }
            // Where tables and scales do not depend on the stacking of rows, banks give the bits of separate experts.
            match experts {
                ExpertForm::Separate => separate.push((quant, per_shard, whole.clone())),
                ExpertForm::Bank => {
                    let same = separate.iter().find(|(q, p, _)| (*q, *p) == (quant, per_shard));
                    assert!(
                        same.is_none_or(|(.., bits)| *bits == whole),
                        "{name} {quant}: banks change bits"
                    );
                    assert!(same.is_some() || quant == Quant::lut(IndexBits::Four), "{quant}");
                }
            }
            let rounded = |fuse| {
                let options = Options { precision: Precision::Fp16, fuse, ..Options::default() };
                all(&Model::open(&out, &CpuBackend { options }).unwrap())
            };
            assert!(rounded(true) == rounded(false), "{name} {quant}: other bits in fp16");
            for (products, half_states) in [
                (Products::Exact, false),
                (Products::Exact, true),
                (Products::Fast, false),
                (Products::Usual, true),
            ] {
                let what = format!("{name} {quant}, {products:?}, caches in fp16 {half_states}");
                let options =
                    Options { precision: Precision::Fp32, products, half_states, ..Options::default() };
                let model = Model::open(&out, &CpuBackend { options }).unwrap();
                let own = all(&model);
                if half_states && products == Products::Exact {
                    let mut cosines: Vec<_> = own.iter().zip(&whole).map(|(a, b)| cosine(a, b)).collect();
                    cosines.sort_by(f64::total_cmp);
                    // In these random models rounding may turn the choice of a token's few experts.
                    let turns = ["tiny-zaya", "tiny-gpt-oss"].iter().any(|model| name.starts_with(model));
                    let at = if turns { cosines.len() / 2 } else { 0 };
                    assert!(cosines[at] >= 0.999, "{what}: {cosines:?}");
                    assert_ne!(own, whole, "{what}");
                }
                for chunk in [1, 3, 4] {
                    let mut sequence = model.sequence();
                    let pieces = model.append(&mut sequence, &ids, Logits::All, Some(chunk)).unwrap();
                    assert!(pieces == own, "{what}: calls of {chunk} tokens change bits");
                }
            }
        }
    }
}
