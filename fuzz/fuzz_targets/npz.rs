//! `.npz` archives.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let path = anemoe_fuzz::write("a.npz", input);
    let Ok(arrays) = anemoe_npz::read_npz(&path) else { return };
    for array in arrays.values() {
        assert_eq!(array.shape.iter().product::<usize>(), array.data.len());
        let _ = (array.to_f32(), array.to_i64());
    }
});
