//! The Core ML backend in a process in which the fake Core ML is installed from the start, with faults of a file.
//!
//! Its tests are those of the program that is linked with it, in `sim/anemoe/tests`.

pub use anemoe_coreml::*;

/// Environment variable that names a file of faults, see [`fake_coreml::plant_from`].
const FAULTS: &str = "FAKE_COREML_FAULTS";

extern "C" fn start() {
    fake_coreml::install();
    if let Some(file) = std::env::var_os(FAULTS) {
        fake_coreml::plant_from(file.as_ref());
    }
}

/// Function that the loader calls before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;
