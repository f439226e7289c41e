//! Tests with programs and descriptions that contradict each other.

use anemoe_mlpackage::mil::builder::{FunctionBuilder, model};
use anemoe_mlpackage::mil::{DataType, FeatureShape, MlModel, Opset, TensorType};
use anemoe_mlpackage::package::PackageWriter;
use anemoe_runtime::backend::{Backend, FunctionCall, FunctionInput};
use anemoe_runtime::cpu::{CpuBackend, Options};
use anemoe_runtime::tensor::Tensor;
use std::path::{Path, PathBuf};

/// Writes a package of one function that adds its input `x` to its state, or to itself if `scalar`; `change` falsifies it.
fn write(dir: &Path, scalar: bool, change: impl FnOnce(&mut MlModel)) -> PathBuf {
    let path = dir.join("b.mlpackage");
    let writer = PackageWriter::create(&path).unwrap();
    let mut f = FunctionBuilder::new(Opset::CoreML8);
    let x = f.input("x", TensorType::fixed(DataType::Float16, if scalar { &[] } else { &[1] })).unwrap();
    let sum = if scalar {
        f.add("y", &x, &x).unwrap()
    } else {
        let state = f.state("s", TensorType::fixed(DataType::Float16, &[1])).unwrap();
        let read = f.read_state("r", &state).unwrap();
        f.add("y", &x, &read).unwrap()
    };
    f.output(&sum).unwrap();
    let mut program = model(Opset::CoreML8, vec![("main".into(), f.finish().unwrap())], "main").unwrap();
    change(&mut program);
    writer.finish(&program).unwrap();
    path
}

fn error_of(path: &Path, fuse: bool, x: &Tensor) -> String {
    let backend = CpuBackend { options: Options { fuse, ..Options::default() } };
    let run = || -> anemoe_runtime::Result<()> {
        let package = backend.open(path)?;
        let function = package.prepare("main")?;
        let mut states = package.new_states();
        let inputs = [FunctionInput::Shared(x)];
        let call = FunctionCall { inputs: &inputs, parts: &[], states: &mut [states.as_mut()] };
        function.run(call, &mut Vec::new())
    };
    run().unwrap_err().to_string()
}

#[test]
fn two_inputs_of_one_name_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), false, |program| {
        let main = program.program.functions.get_mut("main").unwrap();
        let state = main.inputs.iter().find(|i| i.name == "s").unwrap().clone();
        main.inputs.push(state);
    });
    for fuse in [false, true] {
        let e = error_of(&path, fuse, &Tensor::f32(&[1], vec![1.0]));
        assert!(e.contains("two inputs are named `s`"), "{e}");
    }
}

#[test]
fn a_scalar_that_is_described_as_more_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), true, |program| {
        program.functions[0].inputs[0].shape = FeatureShape::Fixed(vec![2]);
    });
    for fuse in [false, true] {
        let e = error_of(&path, fuse, &Tensor::f32(&[2], vec![1.0; 2]));
        assert!(e.contains("input `x`"), "{e}");
    }
}
