//! Fits two rates to published rows of Phi-4-mini, and predicts published rows of other models: `docs/predict-speed.md`.
//!
//! ```text
//! cargo run -p anemoe-gates --example published_speeds
//! ```
//!
//! All rows are of one M4 Max with 48 GB: AB is videlalvaro/ane-book.

use anemoe_gates::cost::chips::{ChipProfile, SpeedCase};
use anemoe_gates::cost::estimate::call_ms;
use anemoe_gates::cost::work::CallWork;

/// Milliseconds of all layers of Phi-4-mini in INT8, by number of packages: AB, journal 029 to 055.
const PHI_MS: [(f64, f64); 6] =
    [(32.0, 117.7), (11.0, 68.2), (8.0, 60.0), (6.0, 57.0), (5.0, 55.0), (4.0, 53.95)];
const PHI_WEIGHTS: f64 = 3.22e9;
/// Caches of 32 layers: 8 heads, 128 wide, 2048 slots (assumed), in fp16, read and written.
const PHI_CACHE_BYTES: f64 = 32.0 * 16.8e6;
const PHI_HEAD: (f64, f64, f64) = (4.0, 0.615e9, 5.08); // packages, weights, ms

/// Layers of ZAYA1-8B: AB, experiments 29 to 35. A whole attention shard takes 0.38 ms.
const ZAYA_LAYERS: f64 = 40.0;
const ZAYA_MOE_WEIGHTS: f64 = 201.8e6;
const ZAYA_ATTENTION: (f64, f64) = (5.3e6, 4.2e6); // weights, bytes of the cache
const ZAYA_HEAD: (f64, f64) = (3.0, 537e6); // packages, weights
const ZAYA_TOK_S: (f64, f64) = (8.59, 9.25); // INT8 (8.94 in its fastest run), INT4
const ZAYA_FOUR_MS: (f64, f64) = (499.0, 483.0); // four tokens in one call
const ZAYA_HEAD_MS: f64 = 4.7;
/// Bytes per weight with 4-bit tables for 32 channels each: 101.2 MB for 201.8 million weights.
const LUT4: f64 = 0.5015;

/// Gemma-4-26B-A4B in FP16, more than the memory: AB, journal 109 and 110.
const GEMMA: (f64, f64, f64) = (270.0, 49.3e9, 24.6e9); // packages, bytes, weights
const GEMMA_TOKEN_S: f64 = 28.9;

/// Fits the rates of layers and head to Phi-4-mini. A line through the rows has the time without any package.
fn fit(chip: &mut ChipProfile) {
    let n = PHI_MS.len() as f64;
    let (x, y) = PHI_MS.iter().fold((0.0, 0.0), |(x, y), row| (x + row.0 / n, y + row.1 / n));
    let sum = |of: fn(f64, f64) -> f64| PHI_MS.iter().map(|row| of(row.0 - x, row.1 - y)).sum::<f64>();
    let package_ms = sum(|x, y| x * y) / sum(|x, _| x * x);
    let offset_ms = y - package_ms * x;
    let bandwidth = chip.bandwidth_gb_s.likely * 1e6;
    let other = (PHI_CACHE_BYTES + chip.unhidden.likely * PHI_WEIGHTS) / bandwidth;
    let (packages, weights, ms) = PHI_HEAD;
    chip.rate_gw_s.likely = PHI_WEIGHTS / (offset_ms - other) / 1e6;
    chip.head_rate_gw_s.likely = weights / (ms - packages * chip.call_ms.likely) / 1e6;
    let rates = [chip.rate_gw_s.likely, chip.head_rate_gw_s.likely];
    println!(
        "Phi-4-mini: {offset_ms:.1} ms, and {package_ms:.2} ms for a package; {:.1} and {:.1} G weights/s",
        rates[0], rates[1]
    );
}

fn zaya_head_ms(chip: &ChipProfile, case: SpeedCase) -> f64 {
    let (packages, all) = ZAYA_HEAD;
    let weights = all / packages;
    let work = CallWork { bytes: weights, weights, one_product: true, ..CallWork::default() };
    packages * call_ms(&work, chip, case).0
}

/// Computes the milliseconds of a pass of ZAYA, with `bytes` bytes for each weight of an expert.
fn zaya_ms(chip: &ChipProfile, case: SpeedCase, bytes: f64, tokens: f64) -> f64 {
    let call = |weights: f64, bytes: f64, cache_bytes: f64| {
        let work =
            CallWork { bytes, weights, multiply_adds: tokens * weights, cache_bytes, one_product: false };
        call_ms(&work, chip, case).0
    };
    let (weights, cache_bytes) = ZAYA_ATTENTION;
    let layer = call(weights, weights, cache_bytes) + call(ZAYA_MOE_WEIGHTS, ZAYA_MOE_WEIGHTS * bytes, 0.0);
    ZAYA_LAYERS * layer + zaya_head_ms(chip, case)
}

/// Computes the seconds of a token of Gemma, which reads all of its weights from storage.
fn gemma_s(chip: &ChipProfile, case: SpeedCase) -> f64 {
    let (packages, bytes, weights) = GEMMA;
    let (bytes_each, weights_each) = (bytes / packages, weights / packages);
    let work = CallWork {
        bytes: bytes_each,
        weights: weights_each,
        multiply_adds: weights_each,
        ..CallWork::default()
    };
    packages * call_ms(&work, chip, case).0 / 1e3 + bytes / (chip.storage_gb_s.speed(case) * 1e9)
}

fn main() -> Result<(), String> {
    let mut chip = ChipProfile::named("m4-max")?;
    fit(&mut chip);
    let row = |what: &str, measured: f64, model: &dyn Fn(SpeedCase) -> f64| {
        let [slow, likely, fast] = [SpeedCase::Slow, SpeedCase::Likely, SpeedCase::Fast].map(model);
        let error = 100.0 * (likely / measured - 1.0);
        let (low, high) = (slow.min(fast), slow.max(fast));
        println!("{what:44} {measured:7.2} {likely:7.2} ({low:.2} to {high:.2}) {error:+.1} %");
    };
    println!("{:44} measured, predicted (range), error", "rows that were not fitted");
    row("ZAYA INT8, tok/s", ZAYA_TOK_S.0, &|c| 1e3 / zaya_ms(&chip, c, 1.0, 1.0));
    row("ZAYA INT4, tok/s", ZAYA_TOK_S.1, &|c| 1e3 / zaya_ms(&chip, c, LUT4, 1.0));
    row("ZAYA, head, ms", ZAYA_HEAD_MS, &|c| zaya_head_ms(&chip, c));
    row("ZAYA INT8, four tokens in one call, ms", ZAYA_FOUR_MS.0, &|c| zaya_ms(&chip, c, 1.0, 4.0));
    row("ZAYA INT4, four tokens in one call, ms", ZAYA_FOUR_MS.1, &|c| zaya_ms(&chip, c, LUT4, 4.0));
    row("ZAYA INT8, as if once for each of four, ms", ZAYA_FOUR_MS.0, &|c| 4.0 * zaya_ms(&chip, c, 1.0, 1.0));
    row("ZAYA INT4, as if once for each of four, ms", ZAYA_FOUR_MS.1, &|c| {
        4.0 * zaya_ms(&chip, c, LUT4, 1.0)
    });
    row("Gemma FP16, 270 packages, s", GEMMA_TOKEN_S, &|c| gemma_s(&chip, c));
    Ok(())
}
