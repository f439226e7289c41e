//! Times of calls from their work.
//!
//! ```text
//! t_call = call + max(read, decode, arithmetic) + unhidden * min(read, decode) + cache / BW
//! read = bytes / BW      decode = weights / R      arithmetic = multiply-adds / peak
//! ```

use super::chips::{ChipProfile, SpeedCase};
use super::work::CallWork;
use serde::{Deserialize, Serialize};

/// The part of a call that takes most of its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bottleneck {
    /// The call itself.
    Call,
    /// Bytes of weights through memory.
    Bandwidth,
    /// Decoding and feeding weights.
    Weights,
    /// Multiply-adds.
    Arithmetic,
    /// Bytes of the cache.
    Cache,
    /// Weights that do not fit into memory.
    Storage,
}

impl Bottleneck {
    /// Name in words.
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

/// Milliseconds of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct CallTime {
    /// The call itself.
    pub call: f64,
    /// Reading weights.
    pub read: f64,
    /// Decoding weights.
    pub decode: f64,
    /// Multiply-adds.
    pub arithmetic: f64,
    /// Milliseconds of the shorter one of reading and decoding that the longer one does not hide.
    pub unhidden: f64,
    /// Reading and writing the cache.
    pub cache: f64,
}

impl CallTime {
    /// The time of a call on a chip.
    pub fn of(work: &CallWork, chip: &ChipProfile, case: SpeedCase) -> CallTime {
        // 10^9 a second are 10^6 a millisecond.
        let per_ms = |amount: f64, billions: f64| amount / (billions * 1e6);
        let bandwidth = chip.bandwidth_gb_s.speed(case);
        let read = per_ms(work.bytes, bandwidth);
        // A large product decodes as it reads: measured together.
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

    /// All of it.
    pub fn total(&self) -> f64 {
        self.call + self.read.max(self.decode).max(self.arithmetic) + self.unhidden + self.cache
    }

    /// Gives the part that takes most of it.
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
