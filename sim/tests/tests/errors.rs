//! Checks errors and exceptions of Core ML as a user sees them.

use anemoe_convert::plan::PlanOptions;
use anemoe_coreml::op_plan::PlanDevice;
use anemoe_coreml::{CompiledModels, ComputeUnits, CoreMlBackend, CoreMlSettings, plan_of};
use anemoe_io::Kind;
use anemoe_runtime::backend::{Backend, BackendFunction, FunctionCall, FunctionInput};
use anemoe_runtime::model::{Logits, Model};
use anemoe_runtime::tensor::Tensor;
use fake_coreml::{Fault, clear_faults, plant};
use sim_tests::{Compiled, by_host, fixed, leaves_nothing, one_and_eight};
use std::fs;
use std::path::Path;

fn bundle(dir: &Path) -> Compiled {
    Compiled::new(dir, "tiny-gemma4-moe", "lut4", fixed(&[1, 8]))
}

/// Returns the logits of a bundle's first three tokens, or the error's text.
fn first_tokens(compiled: &Compiled, limit: Option<u64>) -> Result<Vec<Vec<f32>>, String> {
    let model = Model::open(&compiled.bundle, &compiled.backend(limit)).map_err(|e| e.to_string())?;
    let mut sequence = model.sequence();
    model.append(&mut sequence, &[1, 2, 3], Logits::All, Some(1)).map_err(|e| e.to_string())
}

fn refused(compiled: &Compiled, fault: Fault, words: &[&str]) {
    plant("attn", fault);
    let error = first_tokens(compiled, None).unwrap_err();
    for word in words {
        assert!(error.contains(word), "{fault:?}: `{word}` is not in: {error}");
    }
    clear_faults();
    assert_eq!(first_tokens(compiled, None).unwrap().len(), 3, "behind {fault:?}");
}

#[test]
fn faults_are_errors_that_name_package_function_and_cause() {
    leaves_nothing(|| {
        let dir = tempfile::tempdir().unwrap();
        let compiled = bundle(dir.path());
        refused(
            &compiled,
            Fault::NoPlan,
            &[
                "attn.mlpackage",
                "function `",
                "-14",
                "appleneuralengine 7: ANE model load failed",
                "anemoe compile",
                "--max-loaded",
            ],
        );
        refused(
            &compiled,
            Fault::LoadException,
            &["exception NSInvalidArgumentException", "planted at load"],
        );
        refused(&compiled, Fault::NoAnswer, &["did not answer"]);
        refused(&compiled, Fault::EmptyAnswer, &["neither model nor error"]);
        refused(&compiled, Fault::Error(1), &["com.apple.CoreML 29", "0x1d"]);
        refused(
            &compiled,
            Fault::Exception(1),
            &["exception NSInvalidArgumentException", "planted at predict"],
        );
    });
}

#[test]
fn a_load_that_failed_takes_no_room() {
    leaves_nothing(|| {
        let dir = tempfile::tempdir().unwrap();
        let compiled = bundle(dir.path());
        let limit = 2 * compiled.chain.shards.iter().map(|s| s.bytes).sum::<u64>();
        let backend = compiled.backend(Some(limit));
        let file = compiled.bundle.join(&compiled.chain.shards[0].file);
        let package = backend.open(&file).unwrap();
        let name = &compiled.chain.shards[0].functions[0].name;
        plant("mlpackage", Fault::NoPlan);
        for _ in 0..200 {
            assert!(package.prepare(name).is_err(), "nothing was tried: no room was left");
        }
    });
}

#[test]
fn a_sequence_goes_on_behind_a_failed_prediction() {
    leaves_nothing(|| {
        let dir = tempfile::tempdir().unwrap();
        let compiled = bundle(dir.path());
        let model = Model::open(&compiled.bundle, &compiled.backend(None)).unwrap();
        let mut sequence = model.sequence();
        let want = model.append(&mut sequence, &[4, 5], Logits::All, Some(1)).unwrap();
        for fault in [Fault::Error(0), Fault::Exception(0)] {
            plant("attn", fault);
            model.append(&mut sequence, &[6], Logits::All, None).unwrap_err();
            clear_faults();
            assert!(model.append(&mut sequence, &[6], Logits::All, None).is_err(), "a broken sequence");
            sequence.clear();
            assert!(model.append(&mut sequence, &[4, 5], Logits::All, Some(1)).unwrap() == want);
        }
    });
}

#[test]
fn what_is_not_compiled_or_not_a_model_is_refused() {
    leaves_nothing(|| {
        let dir = tempfile::tempdir().unwrap();
        let compiled = bundle(dir.path());
        let open = |models: CompiledModels| {
            let settings = CoreMlSettings { compiled: models, ..CoreMlSettings::default() };
            Model::open(&compiled.bundle, &CoreMlBackend::new(settings).unwrap())
                .err()
                .map(|e| (e.kind(), e.to_string()))
        };
        let (kind, error) = open(CompiledModels::default()).unwrap();
        assert!(kind == Kind::Unsupported && error.contains("anemoe compile"), "{error}");
        assert_eq!(open(compiled.models()), None);
        // A compiled model of another package.
        let package = compiled.bundle.join(&compiled.chain.shards[0].file);
        let place = compiled.models().place(&package).unwrap();
        fs::write(place.join("coremldata.bin"), dir.path().join("gone.mlpackage").to_str().unwrap()).unwrap();
        assert!(first_tokens(&compiled, None).unwrap_err().contains("gone.mlpackage"));
        // A failed compilation leaves nothing behind.
        let before = fs::read_dir(place.parent().unwrap()).unwrap().count();
        plant("mlpackage", Fault::NotCompiled);
        let error = anemoe_coreml::compile(&package, &place).unwrap_err().to_string();
        assert!(error.contains("planted") && error.contains("mlpackage"), "{error}");
        assert_eq!(fs::read_dir(place.parent().unwrap()).unwrap().count(), before);
        clear_faults();
        anemoe_coreml::compile(&package, &place).unwrap();
        assert_eq!(first_tokens(&compiled, None).unwrap().len(), 3);
    });
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    leaves_nothing(|| {
        let dir = tempfile::tempdir().unwrap();
        let compiled = bundle(dir.path());
        let backend = compiled.backend(None);
        // The head has no states.
        let shard = compiled.chain.shards.last().unwrap();
        let package = backend.open(&compiled.bundle.join(&shard.file)).unwrap();
        assert!(package.prepare("no such function").is_err());
        let function = package.prepare(&shard.functions[0].name).unwrap();
        assert!(!function.has_states());
        let run_function = |function: &dyn BackendFunction, inputs: &[&Tensor]| {
            let inputs: Vec<FunctionInput<'_>> = inputs.iter().map(|t| FunctionInput::Shared(t)).collect();
            let call = FunctionCall { inputs: &inputs, parts: &[], states: &mut [] };
            function.run(call, &mut Vec::new())
        };
        let run = |inputs: &[&Tensor]| {
            run_function(function.as_ref(), inputs).err().map(|e| e.to_string()).unwrap_or_default()
        };
        assert!(run(&[]).contains("inputs"));
        let wrong = Tensor::f32(&[1, 3, 1, 1], vec![0.0; 3]);
        assert!(run(&[&wrong]).contains("shape [1, 3, 1, 1]"), "{}", run(&[&wrong]));
        let hidden = compiled.chain.model.hidden_size;
        let numbers = Tensor::i32(&[1, hidden, 1, 1], vec![0; hidden]);
        assert!(run(&[&numbers]).contains("another type"));
        let right = Tensor::f32(&[1, hidden, 1, 1], vec![0.5; hidden]);
        assert_eq!(run(&[&right]), "");
        // The compiled model is that of another package, with other shapes.
        let place = compiled.models().place(&compiled.bundle.join(&shard.file)).unwrap();
        let other = compiled.bundle.join(&compiled.chain.shards[0].file);
        fs::write(place.join("coremldata.bin"), other.to_str().unwrap()).unwrap();
        let fresh = compiled.backend(None).open(&compiled.bundle.join(&shard.file)).unwrap();
        let result = fresh.prepare(&shard.functions[0].name).map(|f| run_function(f.as_ref(), &[&right]));
        let error = match result {
            Ok(ran) => ran.unwrap_err().to_string(),
            Err(e) => e.to_string(),
        };
        assert!(error.contains("compiled model") || error.contains("does not exist"), "{error}");
    });
}

#[test]
fn compiled_models_of_other_shapes_are_refused_before_they_run() {
    leaves_nothing(|| {
        let inputs = "takes another shape or type than the package says";
        for (form, words) in [(Default::default(), "a state of type"), (by_host("tiny-zaya"), inputs)] {
            let dir = tempfile::tempdir().unwrap();
            let [own, other] = [64, 96].map(|slots| {
                let inside = dir.path().join(slots.to_string());
                fs::create_dir(&inside).unwrap();
                let options = PlanOptions { max_context: Some(slots), ..one_and_eight(form) };
                Compiled::with(&inside, "tiny-zaya", options)
            });
            assert!(first_tokens(&own, None).is_ok());
            let shard = own.chain.shards.iter().find(|s| s.file.contains("attn")).unwrap();
            let place = own.models().place(&own.bundle.join(&shard.file)).unwrap();
            let package = other.bundle.join(&shard.file);
            fs::write(place.join("coremldata.bin"), package.to_str().unwrap()).unwrap();
            let error = first_tokens(&own, None).unwrap_err();
            assert!(error.contains(words), "{form}: {error}");
        }
    });
}

#[test]
fn threads_share_a_model() {
    leaves_nothing(|| {
        let dir = tempfile::tempdir().unwrap();
        let compiled = bundle(dir.path());
        let all: u64 = compiled.chain.shards.iter().map(|s| s.bytes).sum();
        for limit in [None, Some(all / 2)] {
            let model = Model::open(&compiled.bundle, &compiled.backend(limit)).unwrap();
            let want = model.append(&mut model.sequence(), &[7, 8, 9], Logits::All, Some(1)).unwrap();
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        let got =
                            model.append(&mut model.sequence(), &[7, 8, 9], Logits::All, Some(1)).unwrap();
                        assert!(got == want);
                    });
                }
            });
        }
    });
}

#[test]
fn functions_that_push_each_other_out_run_all_the_same() {
    leaves_nothing(|| {
        let dir = tempfile::tempdir().unwrap();
        let compiled = bundle(dir.path());
        // Room for nothing: each load unloads functions of others, whether they have called them or not.
        let backend = compiled.backend(Some(1));
        let model = Model::open(&compiled.bundle, &backend).unwrap();
        let want = model.append(&mut model.sequence(), &[7, 8, 9], Logits::All, Some(1)).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..12 {
                scope.spawn(|| {
                    for _ in 0..3 {
                        let got = model.append(&mut model.sequence(), &[7, 8, 9], Logits::All, Some(1));
                        assert!(got.unwrap() == want);
                    }
                });
            }
        });
    });
}

#[test]
fn plans_leave_nothing_behind() {
    leaves_nothing(|| {
        let dir = tempfile::tempdir().unwrap();
        let compiled = bundle(dir.path());
        let shard = &compiled.chain.shards[0];
        let package = compiled.bundle.join(&shard.file);
        let place = compiled.models().place(&package).unwrap();
        let plan =
            |name: &str, place: &Path| plan_of(&package, place, name, true, ComputeUnits::CpuAndNeuralEngine);
        let name = &shard.functions[0].name;
        let ops = plan(name, &place).unwrap();
        let constants = ops.iter().filter(|op| op.op_type == "ios18.const");
        assert!(constants.clone().count() > 0 && constants.clone().all(|op| op.preferred.is_none()));
        assert!(ops.iter().any(|op| op.preferred == Some(PlanDevice::Ane) && op.cost.is_some()));
        assert!(plan("no such function", &place).is_err());
        // Core ML would end the process.
        assert!(plan(name, &package).unwrap_err().to_string().contains("coremldata.bin"));
        plant("mlpackage", Fault::PlanError);
        assert!(plan(name, &place).unwrap_err().to_string().contains("planted"));
        clear_faults();
        plant("mlpackage", Fault::PlanNone);
        assert!(
            plan(name, &place).unwrap().iter().all(|op| op.preferred.is_none() && op.supported.is_empty())
        );
    });
}
