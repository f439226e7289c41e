//! `config.json` of the Gemma family, to its plan.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| anemoe_fuzz::config(input, &["tiny-gemma4-moe-text", "tiny-gemma4-moe"]));
