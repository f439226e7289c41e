//! Sampling that the makers of a model recommend.

use crate::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// Sampling settings in a bundle's `generation_config.json`; `None` where the file does not give one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// True if the model is meant to be sampled from.
    pub do_sample: bool,
    /// Divisor of the logits.
    pub temperature: Option<f32>,
    /// Number of most probable tokens that are sampled from.
    pub top_k: Option<usize>,
    /// Probability that the sampled tokens reach together.
    pub top_p: Option<f32>,
}

/// Largest file that is read, in bytes.
const MAX_BYTES: u64 = 1 << 20;

impl SamplingDefaults {
    /// Reads the settings of a bundle; without a file, all settings are empty.
    ///
    /// # Errors
    /// The file is damaged.
    pub fn open(bundle: &Path) -> Result<SamplingDefaults> {
        let path = bundle.join("generation_config.json");
        if path.symlink_metadata().is_err() {
            return Ok(SamplingDefaults::default());
        }
        let text = anemoe_io::read_input(&path, MAX_BYTES).map_err(|e| Error::io(&path, e))?;
        let value: Value =
            anemoe_io::json::parse(&text).map_err(|e| Error::invalid(&path, format!("JSON: {e}")))?;
        let number = |key: &str| value.get(key).and_then(Value::as_f64).map(|v| v as f32);
        Ok(SamplingDefaults {
            do_sample: value.get("do_sample").and_then(Value::as_bool).unwrap_or(false),
            temperature: number("temperature").filter(|t| t.is_finite() && *t >= 0.0),
            top_k: value.get("top_k").and_then(Value::as_u64).and_then(|k| usize::try_from(k).ok()),
            top_p: number("top_p").filter(|p| *p > 0.0 && *p <= 1.0),
        })
    }
}
