//! Tests with small packages whose results would take gigabytes.

use anemoe_mlpackage::mil::builder::{FunctionBuilder, model};
use anemoe_mlpackage::mil::{
    Argument, Binding, DataType, Dim, NamedType, Operation, Opset, TensorType, Value,
};
use anemoe_mlpackage::package::PackageWriter;
use anemoe_runtime::cpu::{CpuPackage, CpuStates, Options, Precision};
use anemoe_runtime::tensor::Tensor;
use std::path::{Path, PathBuf};

const MILLION: i32 = 1_000_000;

fn name(name: &str) -> Argument {
    Argument(vec![Binding::Name(name.into())])
}

fn value(value: Value) -> Argument {
    Argument(vec![Binding::Value(value)])
}

fn op(op_type: &str, inputs: Vec<(&str, Argument)>, output: &str, ty: TensorType) -> Operation {
    Operation {
        op_type: op_type.into(),
        inputs: inputs.into_iter().map(|(param, a)| (param.to_string(), a)).collect(),
        outputs: vec![NamedType::tensor(output, ty)],
        blocks: Vec::new(),
        attributes: Default::default(),
    }
}

/// Writes a package whose function has the input `x`, fp32 `[1, 1, 8]`, these operations, and the result `y`.
fn package(dir: &Path, operations: Vec<Operation>) -> PathBuf {
    let path = dir.join("small.mlpackage");
    let mut f = FunctionBuilder::new(Opset::CoreML8);
    let x = f.input("x", TensorType::fixed(DataType::Float32, &[1, 1, 8])).unwrap();
    let y = f.add("y", &x, &x).unwrap();
    f.output(&y).unwrap();
    let mut program = model(Opset::CoreML8, vec![("main".into(), f.finish().unwrap())], "main").unwrap();
    program.program.functions.get_mut("main").unwrap().block.operations = operations;
    PackageWriter::replace(&path).unwrap().finish(&program).unwrap();
    path
}

/// Returns the errors of a package in all ways of executing it; each way has to fail, in compiling or running.
fn refusals(path: &Path, input: &Tensor) -> Vec<String> {
    let mut said = Vec::new();
    for precision in [Precision::Fp16, Precision::Fp32] {
        for fuse in [false, true] {
            let run = || -> anemoe_runtime::Result<()> {
                let options = Options { precision, fuse, ..Options::default() };
                let function = CpuPackage::open(path)?.compile(None, options)?;
                let mut states = CpuStates::new(&function);
                function.run(&[input], &mut states, &mut Vec::new()).map(|_| ())
            };
            said.push(run().expect_err("a refusal").to_string());
        }
    }
    said
}

/// Returns the type of a result as declared correctly, with unknown sizes, and with wrong sizes.
fn types(dims: &[u64], dtype: DataType) -> [TensorType; 3] {
    [
        TensorType::fixed(dtype, dims),
        TensorType::new(dtype, vec![Dim::Unknown; dims.len()]),
        TensorType::fixed(dtype, &vec![1; dims.len()]),
    ]
}

#[test]
fn results_that_nothing_justifies_are_refused() {
    use DataType::{Float32, Int32};
    let dir = tempfile::tempdir().unwrap();
    let x = Tensor::f32(&[1, 1, 8], vec![1.0; 8]);
    let fill =
        |shape: &[i32]| vec![("shape", value(Value::int32s(shape))), ("value", value(Value::fp32(1.0)))];
    let hundred = 100 * MILLION;
    let mut cases: Vec<(&str, Vec<Operation>)> = Vec::new();
    for ty in types(&[100_000_000, 1, 8], Float32) {
        let square = vec![
            ("x", name("x")),
            ("y", name("x")),
            ("transpose_x", value(Value::bool(true))),
            ("transpose_y", value(Value::bool(false))),
        ];
        let square = op("matmul", square, "s", TensorType::fixed(Float32, &[1, 8, 8]));
        let product = vec![
            ("x", name("f")),
            ("y", name("s")),
            ("transpose_x", value(Value::bool(false))),
            ("transpose_y", value(Value::bool(false))),
        ];
        let f = op("fill", fill(&[hundred, 1, 8]), "f", ty.clone());
        cases.push(("op `fill`", vec![square, f, op("matmul", product, "y", ty.clone())]));
        let tile = vec![("x", name("x")), ("reps", value(Value::int32s(&[hundred, 1, 1])))];
        cases.push(("op `tile`", vec![op("tile", tile, "y", ty)]));
    }
    for ty in types(&[1_000_000_000], Int32) {
        let range = vec![
            ("start", value(Value::int32(0))),
            ("end", value(Value::int32(1000 * MILLION))),
            ("step", value(Value::int32(1))),
        ];
        cases.push(("op `range_1d`", vec![op("range_1d", range, "y", ty)]));
    }
    for ty in types(&[1, 1, 600_000_008], Float32) {
        let pad = vec![
            ("x", name("x")),
            ("pad", value(Value::int32s(&[0, 0, 0, 0, 0, 600 * MILLION]))),
            ("mode", value(Value::string("constant"))),
            ("constant_val", value(Value::fp32(0.0))),
        ];
        cases.push(("op `pad`", vec![op("pad", pad, "y", ty)]));
    }
    for ty in types(&[8, 100_000_000], Int32) {
        let indices = op(
            "cast",
            vec![("x", name("x")), ("dtype", value(Value::string("int32")))],
            "i",
            TensorType::fixed(Int32, &[1, 1, 8]),
        );
        let shape = vec![("x", name("i")), ("shape", value(Value::int32s(&[8])))];
        let flat = op("reshape", shape, "j", TensorType::fixed(Int32, &[8]));
        let hot = vec![
            ("indices", name("j")),
            ("one_hot_vector_size", value(Value::int32(hundred))),
            ("axis", value(Value::int32(-1))),
            ("on_value", value(Value::int32(1))),
            ("off_value", value(Value::int32(0))),
        ];
        cases.push(("op `one_hot`", vec![indices, flat, op("one_hot", hot, "y", ty)]));
    }
    for ty in types(&[30_000, 30_000], Float32) {
        let row = op("fill", fill(&[1, 30_000]), "r", TensorType::fixed(Float32, &[1, 30_000]));
        let column = op("fill", fill(&[30_000, 1]), "c", TensorType::fixed(Float32, &[30_000, 1]));
        let add = op("add", vec![("x", name("r")), ("y", name("c"))], "y", ty);
        cases.push(("op `add`", vec![row, column, add]));
    }
    // Each result is small enough to be computed at load, but all of them together are not.
    let part = TensorType::fixed(Float32, &[1 << 24]);
    let mut many: Vec<Operation> =
        (0..40).map(|i| op("fill", fill(&[1 << 24]), &format!("f{i}"), part.clone())).collect();
    let all = Argument((0..40).map(|i| Binding::Name(format!("f{i}"))).collect());
    let axis = value(Value::int32(0));
    let one = TensorType::new(Float32, vec![Dim::Unknown]);
    many.push(op(
        "concat",
        vec![("values", all), ("axis", axis), ("interleave", value(Value::bool(false)))],
        "y",
        one,
    ));
    cases.push(("", many));
    // 4 kB of 1-bit indices, each of which stands for 16384 numbers.
    let indices = Value::bytes(DataType::UInt1, &[32768], vec![0x55; 4096]);
    let lut = Value::bytes(DataType::Float16, &[1, 2, 16384], vec![0; 65536]);
    for ty in types(&[32768 * 16384], DataType::Float16) {
        let lookup = vec![
            ("indices", value(indices.clone())),
            ("lut", value(lut.clone())),
            ("vector_axis", value(Value::int32(0))),
        ];
        let table = op("constexpr_lut_to_dense", lookup, "w", ty.clone());
        let sum = vec![("x", name("w")), ("y", name("w"))];
        cases.push(("op `constexpr_lut_to_dense`", vec![table, op("add", sum, "y", ty)]));
    }
    for (says, operations) in cases {
        let path = package(dir.path(), operations);
        for said in refusals(&path, &x) {
            assert!(said.contains("small.mlpackage") && said.contains(says), "{said}, expected {says}");
            let size = ["more than the 1073741824", "is too large", "a constant of type"];
            assert!(size.iter().any(|s| said.contains(s)), "{said}");
        }
    }
    #[cfg(target_os = "linux")]
    {
        let peak = anemoe_io::peak_memory().unwrap();
        assert!(peak < 3 << 29, "{peak} bytes");
    }
}

#[test]
fn states_that_nothing_justifies_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = package(dir.path(), Vec::new());
    let mut f = FunctionBuilder::new(Opset::CoreML8);
    let x = f.input("x", TensorType::fixed(DataType::Float32, &[1, 1, 8])).unwrap();
    for i in 0..4 {
        f.state(&format!("s{i}"), TensorType::fixed(DataType::Float16, &[1, 100_000_000])).unwrap();
    }
    let y = f.add("y", &x, &x).unwrap();
    f.output(&y).unwrap();
    let program = model(Opset::CoreML8, vec![("main".into(), f.finish().unwrap())], "main").unwrap();
    PackageWriter::replace(&path).unwrap().finish(&program).unwrap();
    for said in refusals(&path, &Tensor::f32(&[1, 1, 8], vec![1.0; 8])) {
        assert!(said.contains("function `main`: ") && said.contains("states of 1600000000"), "{said}");
    }
}

/// Checks that shapes that are known only with the inputs are limited by the sizes of the actual inputs.
#[test]
fn results_of_shapes_that_come_with_inputs_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ranged.mlpackage");
    let mut f = FunctionBuilder::new(Opset::CoreML8);
    let x = f.input_ranged("x", DataType::Float32, &[1, 8], &[(1, 1), (1, 1_000_000)]).unwrap();
    let y = f.matmul("y", &x, &x, true, false).unwrap();
    f.output(&y).unwrap();
    let program = model(Opset::CoreML8, vec![("main".into(), f.finish().unwrap())], "main").unwrap();
    PackageWriter::create(&path).unwrap().finish(&program).unwrap();
    let function = CpuPackage::open(&path).unwrap().compile(None, Options::default()).unwrap();
    let (mut states, mut outputs) = (CpuStates::new(&function), Vec::new());
    let mut run = |n: usize| function.run(&[&Tensor::f32(&[1, n], vec![1.0; n])], &mut states, &mut outputs);
    run(100).unwrap();
    let said = run(20_000).unwrap_err().to_string();
    assert!(said.contains("op `matmul`") && said.contains("(20000, 20000) is too large"), "{said}");
    run(100).unwrap();
}
