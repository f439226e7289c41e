//! `chain.json` of a bundle.
#![no_main]

use anemoe_bundle::Chain;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    anemoe_fuzz::write("chain.json", input);
    let Ok(chain) = Chain::read(anemoe_fuzz::folder()) else { return };
    let _ = chain.max_tokens();
    // A chain that was accepted is written and read back as it is.
    let text = serde_json::to_vec(&chain).expect("a chain is written");
    anemoe_fuzz::write("chain.json", &text);
    assert!(Chain::read(anemoe_fuzz::folder()).expect("a chain is read back") == chain);
});
