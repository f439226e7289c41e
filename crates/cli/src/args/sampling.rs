//! Sampling of the commands that generate text, as options.

use crate::ui::message;
use anemoe_runtime::sampler::SamplingDefaults;
use anemoe_runtime::sampler::{Sampling, SamplingSettings, TokenBias};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Sampling: how tokens are chosen. What is not given is what the model's makers recommend in its generation_config.json.
#[derive(Clone, Debug, clap::Args)]
pub struct SamplingArgs {
    /// Divides the logits; 0 always takes the most probable token [default: the model's own, else 0; of a server: else 1].
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Draw among the N most probable tokens only; 0 for all [default: the model's own].
    #[arg(long, value_name = "N")]
    top_k: Option<u32>,
    /// Draw among the most probable tokens only that together reach this probability [default: the model's own].
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Draw only tokens with at least this share of the most probable one's probability [default: the model's own].
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Draw among the most typical tokens only that together reach this probability: those whose information is nearest to the
    /// entropy [default: the model's own].
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    typical_p: Option<f32>,
    /// Divides logits above 0, and multiplies those below, of tokens that prompt or answer have [default: the model's own].
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,
    /// Is subtracted from the logits of tokens that the answer has [default: the model's own].
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// Is subtracted from a logit for each time that the answer has its token [default: the model's own].
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// Adds a number from -100 to 100 to the logit of a token; may be given several times.
    #[arg(long, value_name = "ID:BIAS", value_parser = bias)]
    logit_bias: Vec<TokenBias>,
    /// Starts the random sequence [default: 0; of a server: another for each answer].
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

fn bias(text: &str) -> Result<TokenBias, String> {
    let parsed = text
        .split_once(':')
        .and_then(|(id, bias)| Some((id.trim().parse().ok()?, bias.trim().parse().ok()?)));
    match parsed {
        Some((id, bias)) if (-100.0..=100.0).contains(&bias) => Ok(TokenBias::single(id, bias)),
        _ => Err(format!("`{text}` is not TOKEN ID:NUMBER FROM -100 TO 100, as in 42:-1.5")),
    }
}

impl SamplingArgs {
    /// Returns what the command line says.
    fn settings(&self) -> SamplingSettings {
        SamplingSettings {
            temperature: self.temperature,
            top_k: self.top_k.map(i64::from),
            top_p: self.top_p,
            min_p: self.min_p,
            typical_p: self.typical_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.clone(),
            seed: self.seed.map(|seed| seed as i64),
            ..SamplingSettings::default()
        }
    }

    /// Returns the bundle's own settings with those of the command line in their place, for requests that say nothing.
    pub fn defaults(&self, bundle: &Path) -> anyhow::Result<SamplingDefaults> {
        let mut own = open(bundle)?;
        let said = self.settings();
        check(&own.sampling(&said), &said, usize::MAX)?;
        own.settings = said.or(&own.settings);
        Ok(own)
    }

    /// Returns the sampling of the command line; the bundle's own settings fill the gaps.
    pub fn choose(&self, bundle: &Path, vocab_size: usize) -> anyhow::Result<ChosenSampling> {
        let own = open(bundle)?;
        let said = self.settings();
        let sampling = own.sampling(&said);
        check(&sampling, &said, vocab_size)?;
        let filters = [
            ("--top-k", self.top_k.is_some_and(|k| k > 0)),
            ("--top-p", self.top_p.is_some()),
            ("--min-p", self.min_p.is_some_and(|p| p > 0.0)),
            ("--typical-p", self.typical_p.is_some()),
        ];
        if let Some((name, _)) =
            filters.iter().find(|(_, given)| *given).filter(|_| sampling.temperature == 0.0)
        {
            anyhow::bail!(
                "{name} has no effect without --temperature: at 0, the most probable token is always taken; \
                 add for instance --temperature 0.7"
            );
        }
        Ok(ChosenSampling { sampling, said, own })
    }
}

/// Opens the bundle's own settings, and names those that have no effect.
fn open(bundle: &Path) -> anyhow::Result<SamplingDefaults> {
    let own = SamplingDefaults::open(bundle)?;
    if !own.ignored.is_empty() {
        message(format!(
            "generation_config.json asks for what has no effect here: {}",
            own.ignored.join(", ")
        ));
    }
    Ok(own)
}

/// Checks settings; those of the file are in range, so that a wrong one is an option.
fn check(sampling: &Sampling, said: &SamplingSettings, vocab_size: usize) -> anyhow::Result<()> {
    let checked = sampling.check().and_then(|()| said.check(vocab_size));
    checked.map_err(|e| anyhow::anyhow!("--{}: {}", e.field.replace('_', "-"), e.what))
}

/// Sampling of an answer, with its sources.
pub struct ChosenSampling {
    pub sampling: Sampling,
    /// Settings of the command line.
    said: SamplingSettings,
    /// Settings of the bundle.
    pub own: SamplingDefaults,
}

impl ChosenSampling {
    /// Returns the settings as JSON: each with its value, and in `from_model` the names of those that the bundle chose.
    pub fn document(&self) -> Value {
        let (s, said, own) = (&self.sampling, &self.said, &self.own.settings);
        // An f32 as its shortest decimal.
        let number = |v: f32| v.to_string().parse::<f64>().map_or(Value::Null, Value::from);
        macro_rules! row {
            ($name:ident, $value:expr) => {
                (stringify!($name), $value, said.$name.is_none() && own.$name.is_some())
            };
        }
        let rows = [
            ("temperature", number(s.temperature), said.temperature.is_none() && self.own.do_sample),
            row!(top_k, json!(s.top_k)),
            row!(top_p, number(s.top_p)),
            row!(min_p, number(s.min_p)),
            row!(typical_p, number(s.typical_p)),
            row!(repetition_penalty, number(s.repetition_penalty)),
            row!(presence_penalty, number(s.presence_penalty)),
            row!(frequency_penalty, number(s.frequency_penalty)),
            ("logit_bias", json!(s.biases.len()), !own.logit_bias.is_empty()),
            ("seed", json!(s.seed), false),
        ];
        let from_model = rows.iter().filter(|row| row.2).map(|row| row.0).collect::<Vec<_>>();
        let mut document: Map<String, Value> =
            rows.iter().map(|(name, value, _)| (name.to_string(), value.clone())).collect();
        document.insert("from_model".into(), json!(from_model));
        document.into()
    }
}
