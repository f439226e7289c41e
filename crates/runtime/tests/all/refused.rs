//! Tests with programs and descriptions that contradict each other, and with sizes that are known too late to skip a product.

use anemoe_mlpackage::mil::builder::{ConvParams, FunctionBuilder, model};
use anemoe_mlpackage::mil::{DataType, FeatureShape, MlModel, Opset, TensorType, Value};
use anemoe_mlpackage::package::PackageWriter;
use anemoe_runtime::backend::Backend;
use anemoe_runtime::cpu::{CpuBackend, CpuPackage, CpuStates, Options};
use anemoe_runtime::tensor::Tensor;
use half::f16;
use std::path::{Path, PathBuf};

/// Checks `conv(y) * w` with `w` of size 1 and zero: the product is not skipped where its size is unknown.
#[test]
fn a_product_whose_size_the_weight_does_not_tell_is_computed() {
    for (ranges, shape) in [
        ([(1, 1), (8, 8), (1, 1), (1, 4)], [1, 8, 1, 3]),
        ([(1, 1), (8, 8), (1, 4), (1, 1)], [1, 8, 3, 1]),
        ([(1, 1), (8, 8), (1, 1), (1, 4)], [1, 8, 1, 1]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.mlpackage");
        let mut writer = PackageWriter::create(&path).unwrap();
        let bytes: Vec<u8> = (0..64).flat_map(|i| f16::from_f32(i as f32).to_le_bytes()).collect();
        let offset = writer.weights().append(DataType::Float16, 64, &bytes).unwrap();
        let mut f = FunctionBuilder::new(Opset::CoreML8);
        let y = f.input_ranged("y", DataType::Float16, &[1, 8, 1, 1], &ranges).unwrap();
        let w = f.input("w", TensorType::fixed(DataType::Float16, &[1])).unwrap();
        let k = f.constant("k", Value::blob(DataType::Float16, &[8, 8, 1, 1], offset)).unwrap();
        let c = f.conv("c", &y, &k, None, ConvParams::default()).unwrap();
        let product = f.mul("m", &c, &w).unwrap();
        f.output(&product).unwrap();
        let program = model(Opset::CoreML8, vec![("main".into(), f.finish().unwrap())], "main").unwrap();
        writer.finish(&program).unwrap();
        for skip_zero in [false, true] {
            let package = CpuPackage::open(&path).unwrap();
            let function = package.compile(None, Options { skip_zero, ..Options::default() }).unwrap();
            let (mut states, mut outputs) = (CpuStates::new(&function), Vec::new());
            let y = Tensor::f32(&shape, vec![1.0; shape.iter().product()]);
            function.run(&[&y, &Tensor::f32(&[1], vec![0.0])], &mut states, &mut outputs).unwrap();
            assert_eq!(outputs[0].shape, shape, "{skip_zero}");
            assert!(outputs[0].as_f32().unwrap().iter().all(|v| *v == 0.0));
        }
    }
}

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
        function.run(&[x], package.new_states().as_mut(), &mut Vec::new())
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
