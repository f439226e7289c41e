//! Sampling that a model's makers recommend.

use crate::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// Sampling of a bundle's `generation_config.json`, as far as it says.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// The model is meant to be sampled from.
    pub do_sample: bool,
    /// Divides the logits.
    pub temperature: Option<f32>,
    /// Most probable tokens that count.
    pub top_k: Option<usize>,
    /// Probability that they reach.
    pub top_p: Option<f32>,
}

/// Largest file that is read.
const MAX_BYTES: u64 = 1 << 20;

impl SamplingDefaults {
    /// Reads those of a bundle; without a file, nothing is said.
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
