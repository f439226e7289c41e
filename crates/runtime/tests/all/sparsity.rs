//! Tests that products with zero are skipped, with the same results.

use anemoe_mlpackage::mil::builder::{ConvParams, FunctionBuilder, GeluMode, Var, model};
use anemoe_mlpackage::mil::{DataType, Opset, TensorType, Value};
use anemoe_mlpackage::package::PackageWriter;
use anemoe_runtime::backend::Counts;
use anemoe_runtime::cpu::{CpuPackage, CpuStates, Options};
use anemoe_runtime::tensor::Tensor;
use half::f16;
use std::path::{Path, PathBuf};

const HIDDEN: u64 = 24;
const EXPERTS: usize = 3;

/// Writes a sum of three experts, each a gated MLP times its routing weight, for 1 token or for 1 to 4.
fn write(dir: &Path, ranged: bool) -> PathBuf {
    let path = dir.join(if ranged { "ranged.mlpackage" } else { "fixed.mlpackage" });
    let mut writer = PackageWriter::create(&path).unwrap();
    let mut random = anemoe_io::Random::new(1);
    let mut weight = |rows: u64, cols: u64| {
        let values = (0..rows * cols).flat_map(|_| f16::from_f64(random.uniform() - 0.5).to_le_bytes());
        let bytes: Vec<u8> = values.collect();
        let offset = writer.weights().append(DataType::Float16, rows * cols, &bytes).unwrap();
        Value::blob(DataType::Float16, &[rows, cols, 1, 1], offset)
    };
    let mut f = FunctionBuilder::new(Opset::CoreML8);
    let input = |f: &mut FunctionBuilder, name: &str, channels: u64| match ranged {
        true => f.input_ranged(
            name,
            DataType::Float16,
            &[1, channels, 1, 1],
            &[(1, 1), (channels, channels), (1, 1), (1, 4)],
        ),
        false => f.input(name, TensorType::fixed(DataType::Float16, &[1, channels, 1, 1])),
    };
    let y = input(&mut f, "y", HIDDEN).unwrap();
    let routing = input(&mut f, "routing", EXPERTS as u64).unwrap();
    let weights = f.split("w", &routing, EXPERTS, 1).unwrap();
    let mut sum: Option<Var> = None;
    for (e, w) in weights.iter().enumerate() {
        let n = |part: &str| format!("e{e}_{part}");
        let gate_up = f.constant(&n("gate_up_weight"), weight(32, HIDDEN)).unwrap();
        let gate_up = f.conv(&n("gate_up"), &y, &gate_up, None, ConvParams::default()).unwrap();
        let halves = f.split(&n("half"), &gate_up, 2, 1).unwrap();
        let gate = f.gelu(&n("gelu"), &halves[0], GeluMode::TanhApproximation).unwrap();
        let act = f.mul(&n("act"), &gate, &halves[1]).unwrap();
        let act = f.mul(&n("weighted"), &act, w).unwrap();
        let down = f.constant(&n("down_weight"), weight(HIDDEN, 16)).unwrap();
        let down = f.conv(&n("down"), &act, &down, None, ConvParams::default()).unwrap();
        sum = Some(match sum {
            None => down,
            Some(s) => f.add(&n("sum"), &s, &down).unwrap(),
        });
    }
    f.output(&sum.unwrap()).unwrap();
    let m = model(Opset::CoreML8, vec![("main".into(), f.finish().unwrap())], "main").unwrap();
    writer.finish(&m).unwrap();
    path
}

fn run(path: &Path, skip_zero: bool, tokens: usize, routing: &[f32]) -> (Vec<f32>, Counts) {
    let package = CpuPackage::open(path).unwrap();
    let function = package.compile(None, Options { skip_zero, ..Options::default() }).unwrap();
    let (mut states, mut outputs) = (CpuStates::new(&function), Vec::new());
    let y: Vec<f32> = (0..HIDDEN as usize * tokens).map(|i| (i as f32 * 0.7).sin()).collect();
    let y = Tensor::f32(&[1, HIDDEN as usize, 1, tokens], y);
    let routing = Tensor::f32(&[1, EXPERTS, 1, tokens], routing.to_vec());
    function.run(&[&y, &routing], &mut states, &mut outputs).unwrap();
    (outputs[0].as_f32().unwrap().to_vec(), function.counts())
}

#[test]
fn experts_without_weight_are_not_computed() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), false);
    let one_expert = (32 + 16) * HIDDEN * 2;
    for (routing, active) in
        [([0.5, 0.0, 0.25], 2), ([0.0, 0.0, 1.0], 1), ([1.0, 1.0, 1.0], 3), ([0.0, 0.0, 0.0], 0)]
    {
        let (plain, all) = run(&path, false, 1, &routing);
        let (sparse, some) = run(&path, true, 1, &routing);
        assert_eq!(plain, sparse, "{routing:?}");
        assert_eq!(plain.iter().any(|&v| v != 0.0), active > 0);
        assert_eq!((all.bytes_read, all.skipped), (3 * one_expert, 0));
        assert_eq!(some.bytes_read, active * one_expert, "{routing:?}");
        assert_eq!(some.skipped > 0, active < 3);
    }
}

#[test]
fn an_expert_that_one_token_wants_is_computed() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), true);
    // No token chooses expert 1, one of three tokens chooses expert 0, the others choose expert 2.
    let routing = [0.0, 0.9, 0.0, 0.0, 0.0, 0.0, 0.4, 0.0, 0.3];
    let (plain, _) = run(&path, false, 3, &routing);
    let (sparse, stats) = run(&path, true, 3, &routing);
    assert_eq!(plain, sparse);
    assert_eq!(stats.bytes_read, 2 * (32 + 16) * HIDDEN * 2);
}

/// Checks that an op without a kernel is refused when the function is compiled, with the op and the file named.
#[test]
fn an_op_that_is_missing_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), false);
    let file = path.join("Data/com.apple.CoreML/model.mlmodel");
    let mut m = anemoe_mlpackage::spec::decode(&std::fs::read(&file).unwrap(), &file).unwrap();
    let ops = &mut m.program.functions.get_mut("main").unwrap().block.operations;
    ops.iter_mut().find(|op| op.op_type == "gelu").unwrap().op_type = "custom_layer".into();
    std::fs::write(&file, anemoe_mlpackage::spec::encode(&m).unwrap()).unwrap();
    let package = CpuPackage::open(&path).unwrap();
    let message = package
        .compile(None, Options::default())
        .err()
        .expect("custom layers are not implemented")
        .to_string();
    for part in ["fixed.mlpackage", "unsupported", "`custom_layer`", "e0_gelu"] {
        assert!(message.contains(part), "{message}");
    }
}
