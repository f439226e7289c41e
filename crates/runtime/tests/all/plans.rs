//! Tests that functions become plans.

use anemoe_mlpackage::mil::builder::{FunctionBuilder, model};
use anemoe_mlpackage::mil::{DataType, Opset, TensorType, Value};
use anemoe_mlpackage::package::PackageWriter;
use anemoe_runtime::cpu::{CpuPackage, CpuStates, Options};
use anemoe_runtime::tensor::Tensor;

#[test]
fn integers_in_another_shape_are_read_by_a_plan() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.mlpackage");
    let mut f = FunctionBuilder::new(Opset::CoreML8);
    let x = f.input("x", TensorType::fixed(DataType::Int32, &[1, 3])).unwrap();
    let row =
        f.single("squeeze", "row", vec![("x", (&x).into()), ("axes", Value::int32s(&[0]).into())]).unwrap();
    let dtype = Value::string("fp16");
    let y = f.single("cast", "y", vec![("x", (&row).into()), ("dtype", dtype.into())]).unwrap();
    f.output(&y).unwrap();
    let program = model(Opset::CoreML8, vec![("main".into(), f.finish().unwrap())], "main").unwrap();
    PackageWriter::create(&path).unwrap().finish(&program).unwrap();
    let function = CpuPackage::open(&path).unwrap();
    let function = function.compile(None, Options { profile: true, ..Options::default() }).unwrap();
    let (mut states, mut outputs) = (CpuStates::new(&function), Vec::new());
    function.run(&[&Tensor::i32(&[1, 3], vec![3, -1, 7])], &mut states, &mut outputs).unwrap();
    assert_eq!(
        (outputs[0].shape.as_slice(), outputs[0].as_f32().unwrap()),
        (&[3][..], &[3.0, -1.0, 7.0][..])
    );
    assert!(!function.op_times().is_empty(), "an interpreter has no times");
}
