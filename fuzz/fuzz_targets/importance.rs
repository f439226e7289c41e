//! Importance files: moments of inputs from `calibrate`.
#![no_main]

use anemoe_convert::importance::Importance;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let path = anemoe_fuzz::write("importance.npz", input);
    let Ok(importance) = Importance::read(&path) else { return };
    let _ = importance.check_names(|name| name.starts_with("layers."));
});
