//! Predicts the speed on the Neural Engine from counted work and published figures. Every figure has a range.
//!
//! ```text
//! program --work--> bytes, weights, multiply-adds, cache of a call --estimate--> milliseconds of a call on a chip
//! chain --forecast--> calls of each function in a pass -----------------------> milliseconds of a pass, and its
//! bottleneck
//! drafts: passes over drafted tokens, and the time of a drafter
//! forms: other packings, kinds and contexts of one checkpoint, compared, with their predicted placement
//! ```
//!
//! `docs/predict-speed.md` has the formulas, and the measured rows that they meet; `examples/published_speeds.rs` compares
//! them.

pub mod bench_fit;
pub mod chips;
pub mod drafts;
pub mod estimate;
pub mod forecast;
pub mod forms;
pub mod work;
