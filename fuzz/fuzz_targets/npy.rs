//! `.npy` files.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let path = anemoe_fuzz::write("a.npy", input);
    let Ok(array) = anemoe_npz::read_npy(&path) else { return };
    assert_eq!(array.shape.iter().product::<usize>(), array.data.len());
    let _ = (array.to_f32(), array.to_i64());
});
