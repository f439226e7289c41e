//! Estimates times of calls from their work.
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

/// Parts of a call's time, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct CallTime {
    /// Fixed cost of the call.
    pub call: f64,
    /// Time of reading weights.
    pub read: f64,
    /// Time of decoding weights.
    pub decode: f64,
    /// Time of multiply-adds.
    pub arithmetic: f64,
    /// Part of the shorter one of reading and decoding that the longer one does not hide.
    pub unhidden: f64,
    /// Time of reading and writing the cache.
    pub cache: f64,
}

impl CallTime {
    /// Computes the time of a call on a chip.
    pub fn of(work: &CallWork, chip: &ChipProfile, case: SpeedCase) -> CallTime {
        // 10^9 per second are 10^6 per millisecond.
        let per_ms = |amount: f64, billions: f64| amount / (billions * 1e6);
        let bandwidth = chip.bandwidth_gb_s.speed(case);
        let read = per_ms(work.bytes, bandwidth);
        // In a large product, reading and decoding were measured as one rate.
        let rate = if work.one_product { &chip.head_rate_gw_s } else { &chip.rate_gw_s };
        let decode = per_ms(work.weights, rate.speed(case));
        let unhidden = if work.one_product { 0.0 } else { chip.unhidden.loss(case) * read.min(decode) };
        CallTime {
            call: chip.call_ms.loss(case),
            read,
            decode,
            arithmetic: per_ms(work.multiply_adds, 1e3 * chip.peak_tmac_s.speed(case)),
            unhidden,
            cache: per_ms(work.cache_bytes, bandwidth),
        }
    }

    /// Returns the milliseconds of the call.
    pub fn total(&self) -> f64 {
        self.call + self.read.max(self.decode).max(self.arithmetic) + self.unhidden + self.cache
    }

    /// Returns the part that takes most of the time.
    pub fn bottleneck(&self) -> Bottleneck {
        let parts = [
            (self.call, Bottleneck::Call),
            (self.read, Bottleneck::Bandwidth),
            (self.decode, Bottleneck::Weights),
            (self.arithmetic, Bottleneck::Arithmetic),
            (self.cache, Bottleneck::Cache),
        ];
        parts.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).map_or(Bottleneck::Call, |p| p.1)
    }
}
