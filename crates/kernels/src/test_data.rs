//! Random numbers for tests and examples: the only generator of this crate.
#![allow(dead_code, reason = "each test and example uses some of them")]

use proptest::prelude::ProptestConfig;

/// Returns the proptest configuration: `PROPTEST_CASES` cases, or else 32 (emulators need fewer).
pub(crate) fn cases() -> ProptestConfig {
    let default = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { default.cases } else { 32 };
    ProptestConfig { cases, ..default }
}

/// Iterates over pseudorandom 64-bit numbers (xorshift64, not `anemoe_io::Random`: the digests of tests are of these numbers).
pub(crate) fn random_bits(seed: u64) -> impl Iterator<Item = u64> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(move || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        s
    })
}

/// Returns `n` pseudorandom numbers from -0.5 to 0.5.
pub(crate) fn noise(seed: u64, n: usize) -> Vec<f32> {
    random_bits(seed).map(|s| (s >> 40) as f32 / (1u64 << 24) as f32 - 0.5).take(n).collect()
}

/// Returns `n` pseudorandom bytes.
pub(crate) fn bytes(seed: u64, n: usize) -> Vec<u8> {
    noise(seed, n).iter().map(|v| (v * 1000.0) as i32 as u8).collect()
}
