//! Speed on the Neural Engine, from counted work and published figures. Every figure is a prediction with a range.
//!
//! ```text
//! program --work--> bytes, weights, multiply-adds, cache of a call --estimate--> milliseconds on a chip
//! chain --forecast--> which functions a pass calls, how often --------------------> milliseconds of a pass, what bounds it
//! forms: other packings, kinds and contexts of one checkpoint, side by side, with their predicted placement
//! ```
//!
//! `docs/predict-speed.md` has the formulas, and which measured rows they meet.

pub mod bench_fit;
pub mod chips;
pub mod estimate;
pub mod forecast;
pub mod forms;
pub mod held_out;
pub mod work;
