//! Package folders: manifest, model and weights, with everything that `check` does.
#![no_main]

use anemoe_gates::residency::{self, CheckOptions};
use anemoe_mlpackage::mil::{ValueData, verify};
use anemoe_mlpackage::package::Package;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let files = anemoe_fuzz::files(input);
    let file = |i: usize| files.get(i).copied();
    let path = anemoe_fuzz::write_package(file(0).unwrap_or_default(), file(1).unwrap_or_default(), file(2));
    let Ok(package) = Package::open(&path) else { return };
    let _ = verify::verify(package.model());
    for function in package.model().program.functions.values() {
        for op in &function.block.operations {
            for value in op.attributes.values().filter(|v| matches!(v.data, ValueData::Blob { .. })) {
                let _ = package.tensor_bytes(value).expect("a blob of an opened package").len();
            }
        }
    }
    let options = CheckOptions { strict: true, list_ops: true, ..CheckOptions::default() };
    let _ = residency::package(&path, &options);
});
