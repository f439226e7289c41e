//! Tables of known placements: reading, rebuilding graphs, judging.
#![no_main]

use anemoe_gates::residency::outcomes;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let Ok(rows) = outcomes::parse(text) else { return };
    let judged = outcomes::judge(&rows);
    let _ = outcomes::score(rows.iter().zip(&judged));
});
