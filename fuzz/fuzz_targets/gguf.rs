//! GGUF files: head, metadata, tensors, the files made of metadata, and the plan.
#![no_main]

use anemoe_convert::models;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let path = anemoe_fuzz::write("m.gguf", input);
    let Ok(checkpoint) = models::load(path.to_str().expect("a name in UTF-8")) else { return };
    anemoe_fuzz::read_tensors(checkpoint.source.as_ref());
    let _ = checkpoint.side_files();
    anemoe_fuzz::plan(checkpoint);
});
