//! Estimates the time of a call from its work.
//!
//! ```text
//! t_call = call + max(read, decode, arithmetic) + unhidden * min(read, decode) + cache / BW
//! read = bytes / BW      decode = weights / R      arithmetic = multiply-adds / peak
//! ```

use super::chips::{ChipProfile, SpeedCase};
use super::work::CallWork;
use serde::{Deserialize, Serialize};

/// Part of a call that takes most of its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bottleneck {
    /// Fixed cost of the call.
    Call,
    /// Reading the bytes of weights from memory.
    Bandwidth,
    /// Decoding weights and feeding them.
    Weights,
    /// Multiply-adds.
    Arithmetic,
    /// Reading and writing the bytes of the cache.
    Cache,
    /// Reading weights that do not fit into memory from storage.
    Storage,
}

impl Bottleneck {
    /// Returns the name in words.
    pub const fn name(self) -> &'static str {
        match self {
            Bottleneck::Call => "calls",
            Bottleneck::Bandwidth => "bandwidth",
            Bottleneck::Weights => "weights",
            Bottleneck::Arithmetic => "arithmetic",
            Bottleneck::Cache => "cache",
            Bottleneck::Storage => "storage",
        }
    }
}

/// Computes the milliseconds of a call on a chip, and the part that takes most of them.
pub fn call_ms(work: &CallWork, chip: &ChipProfile, case: SpeedCase) -> (f64, Bottleneck) {
    // 10^9 per second are 10^6 per millisecond.
    let per_ms = |amount: f64, billions: f64| amount / (billions * 1e6);
    let bandwidth = chip.bandwidth_gb_s.speed(case);
    // In a large product, reading and decoding were measured as one rate.
    let (rate, unhidden) = match work.one_product {
        true => (&chip.head_rate_gw_s, 0.0),
        false => (&chip.rate_gw_s, chip.unhidden.loss(case)),
    };
    let call = chip.call_ms.loss(case);
    let read = per_ms(work.bytes, bandwidth);
    let decode = per_ms(work.weights, rate.speed(case));
    let arithmetic = per_ms(work.multiply_adds, 1e3 * chip.peak_tmac_s.speed(case));
    let cache = per_ms(work.cache_bytes, bandwidth);
    let parts = [
        (call, Bottleneck::Call),
        (read, Bottleneck::Bandwidth),
        (decode, Bottleneck::Weights),
        (arithmetic, Bottleneck::Arithmetic),
        (cache, Bottleneck::Cache),
    ];
    let longest =
        parts.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).map_or(Bottleneck::Call, |part| part.1);
    (call + read.max(decode).max(arithmetic) + unhidden * read.min(decode) + cache, longest)
}
