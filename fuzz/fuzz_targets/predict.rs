//! One package on the CPU: compiled and run on small inputs.
#![no_main]

use anemoe_mlpackage::mil::FeatureShape;
use anemoe_runtime::cpu::{CpuPackage, CpuStates, Options, Precision};
use anemoe_runtime::tensor::Tensor;
use libfuzzer_sys::fuzz_target;
use std::sync::Once;

const MANIFEST: &[u8] = br#"{"fileFormatVersion":"1.0.0","rootModelIdentifier":"m","itemInfoEntries":{
"m":{"author":"com.apple.CoreML","description":"","name":"model.mlmodel","path":"com.apple.CoreML/model.mlmodel"},
"w":{"author":"com.apple.CoreML","description":"","name":"weights","path":"com.apple.CoreML/weights"}}}"#;
/// Elements of all values of a program; more would time the kernels.
const MAX_ELEMENTS: u64 = 1 << 16;

fuzz_target!(|input: &[u8]| {
    static ONE_THREAD: Once = Once::new();
    ONE_THREAD.call_once(|| {
        anemoe_kernels::Pool::set_threads(1);
        let _ = rayon::ThreadPoolBuilder::new().num_threads(1).build_global();
    });
    let files = anemoe_fuzz::files(input);
    let path = anemoe_fuzz::write_package(MANIFEST, files[0], files.get(1).copied());
    let Ok(package) = CpuPackage::open(&path) else { return };
    if anemoe_fuzz::elements(package.package().model()).is_none_or(|n| n > MAX_ELEMENTS) {
        return;
    }
    for precision in [Precision::Fp16, Precision::Fp32] {
        let Ok(function) = package.compile(None, Options { precision, ..Options::default() }) else {
            return;
        };
        let inputs: Option<Vec<Tensor>> = function.inputs().iter().map(input_of).collect();
        let Some(inputs) = inputs else { return };
        let (mut states, mut outputs) = (CpuStates::new(&function), Vec::new());
        for _ in 0..2 {
            if function.run(&inputs.iter().collect::<Vec<_>>(), &mut states, &mut outputs).is_err() {
                break;
            }
        }
    }
});

fn input_of(feature: &anemoe_mlpackage::mil::Feature) -> Option<Tensor> {
    let shape = match &feature.shape {
        FeatureShape::Fixed(shape) | FeatureShape::Range { default: shape, .. } => shape,
        FeatureShape::Enumerated(shapes) => shapes.first()?,
        FeatureShape::Dynamic => return None,
    };
    let n = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).filter(|&n| n <= MAX_ELEMENTS)?;
    let shape: Vec<usize> = shape.iter().map(|&d| d as usize).collect();
    Some(if feature.dtype.is_float() {
        Tensor::f32(&shape, (0..n).map(|i| (i % 17) as f32 * 0.25 - 2.0).collect())
    } else {
        Tensor::i32(&shape, (0..n).map(|i| (i % 5) as i32).collect())
    })
}
