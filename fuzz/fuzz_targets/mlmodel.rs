//! `model.mlmodel`: decoding, verification, text, placement, and encoding again.
#![no_main]

use anemoe_gates::residency::{self, verdict::Judge};
use anemoe_mlpackage::mil::{text, verify};
use anemoe_mlpackage::spec;
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fuzz_target!(|input: &[u8]| {
    let path = Path::new("model.mlmodel");
    let Ok(model) = spec::decode(input, path) else { return };
    let _ = verify::verify(&model);
    let _ = text::program(&model.program);
    let _ = Judge::new(Default::default(), None).package("m", &residency::facts(&model), true);
    if let Ok(bytes) = spec::encode(&model) {
        let again = spec::decode(&bytes, path).expect("an encoded model is decoded");
        assert_eq!(text::program(&again.program), text::program(&model.program));
    }
});
