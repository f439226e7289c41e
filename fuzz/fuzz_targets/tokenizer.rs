//! `tokenizer.json`: reading, and text to ids and back.
#![no_main]

use anemoe_text::tokenizer::{TextStream, Tokenizer};
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fuzz_target!(|input: &[u8]| {
    let Ok(tokenizer) = Tokenizer::from_bytes(input, Path::new("tokenizer.json")) else { return };
    if let Ok(ids) = tokenizer.encode("The café of 2 <bos>\u{1f980}\n", Some(2)) {
        let _ = tokenizer.decode(&ids);
        let Ok(mut stream) = TextStream::new(&tokenizer, &ids) else { return };
        for id in ids {
            let _ = stream.push(id);
        }
    }
    let _ = tokenizer.decode(&[0, 1, u32::MAX]);
});
