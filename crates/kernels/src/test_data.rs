//! Numbers for tests.

use proptest::prelude::ProptestConfig;

/// As many cases as `PROPTEST_CASES` says, for emulators, or 32.
pub(crate) fn cases() -> ProptestConfig {
    let default = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { default.cases } else { 32 };
    ProptestConfig { cases, ..default }
}

/// From -0.5 to 0.5.
pub(crate) fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        (s >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..n).map(|_| next()).collect()
}

/// Any bytes.
pub(crate) fn bytes(seed: u64, n: usize) -> Vec<u8> {
    noise(seed, n).iter().map(|v| (v * 1000.0) as i32 as u8).collect()
}
