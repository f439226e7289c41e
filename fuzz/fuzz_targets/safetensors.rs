//! Safetensors: one file, or an index with up to three files behind it.
#![no_main]

use anemoe_convert::checkpoint::open_safetensors;

use anemoe_convert::models;
use libfuzzer_sys::fuzz_target;

/// Configurations that decide how tensors are read: as they are, and FP8 under scales for rows and for blocks.
const CONFIGS: [&str; 3] = [
    "{}",
    r#"{"quantization_config":{"quant_method":"fp8"}}"#,
    r#"{"quantization_config":{"quant_method":"fp8","weight_block_size":[2,4]}}"#,
];

fuzz_target!(|input: &[u8]| {
    let files = anemoe_fuzz::files(input);
    if let [one] = files[..] {
        let path = anemoe_fuzz::write("m.safetensors", one);
        if let Ok(source) = open_safetensors(&path) {
            anemoe_fuzz::read_tensors(source.as_ref());
        }
        return;
    }
    anemoe_fuzz::write("m/model.safetensors.index.json", files[0]);
    for (i, bytes) in files[1..].iter().enumerate().take(3) {
        anemoe_fuzz::write(&format!("m/{i}.safetensors"), bytes);
    }
    let path = anemoe_fuzz::folder().join("m");
    for config in CONFIGS {
        anemoe_fuzz::write("m/config.json", config.as_bytes());
        if let Ok(checkpoint) = models::load(path.to_str().expect("a name in UTF-8")) {
            anemoe_fuzz::read_tensors(checkpoint.source.as_ref());
        }
    }
});
