//! `config.json` of the ZAYA family, to its plan.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    anemoe_fuzz::config(input, &["tiny-zaya", "tiny-zaya-legacy", "tiny-zaya-skip"]);
});
