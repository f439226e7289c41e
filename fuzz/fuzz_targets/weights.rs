//! `weight.bin`: the chain of blobs and their data.
#![no_main]

use anemoe_mlpackage::blob::BlobFile;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let path = anemoe_fuzz::write("weight.bin", input);
    let Ok(file) = BlobFile::open(&path) else { return };
    for offset in file.offsets() {
        let blob = file.blob(offset).expect("a blob at a listed offset");
        let sum = blob.data.iter().fold(0u64, |sum, &b| sum.wrapping_add(b.into()));
        std::hint::black_box((blob.count, sum));
    }
});
