//! Sampling that the makers of a model recommend.

use super::{REPEAT_LAST_N, Sampling, SamplingSettings, TokenBias};
use crate::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// Settings of a bundle's `generation_config.json`, as Hugging Face transformers reads it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// True if the model is meant to be sampled from.
    pub do_sample: bool,
    /// Settings that the file gives.
    pub settings: SamplingSettings,
    /// Tokens that no answer begins with.
    pub begin_suppress: Vec<u32>,
    /// Fewest tokens of prompt and answer before an end token.
    pub min_length: usize,
    /// Most new tokens.
    pub max_new_tokens: Option<usize>,
    /// Most tokens of prompt and answer.
    pub max_length: Option<usize>,
    /// Keys of the file that ask for something else, and have no effect.
    pub ignored: Vec<&'static str>,
}

/// Largest file that is read, in bytes.
const MAX_BYTES: u64 = 1 << 20;
/// `top_k` of transformers where a model is sampled from and its file has none.
const TOP_K: i64 = 50;
/// Keys that change what is generated and have no effect here, with the number that means the same; the last of each are those of
/// llama.cpp, which a GGUF file may give.
const IGNORED: [(&str, Option<f64>); 3] = [
    ("num_beams num_beam_groups encoder_repetition_penalty guidance_scale", Some(1.0)),
    (
        "penalty_alpha no_repeat_ngram_size epsilon_cutoff eta_cutoff xtc_probability mirostat dry_multiplier",
        Some(0.0),
    ),
    (
        "top_h exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id force_words_ids constraints \
         watermarking_config dola_layers token_healing stop_strings max_time sequence",
        None,
    ),
];

impl SamplingDefaults {
    /// Reads the settings of a bundle; without a file, all settings are empty.
    ///
    /// # Errors
    /// The file is damaged, or a setting is of another type or out of range.
    pub fn open(bundle: &Path) -> Result<SamplingDefaults> {
        let path = bundle.join("generation_config.json");
        if path.symlink_metadata().is_err() {
            return Ok(SamplingDefaults::default());
        }
        let text = anemoe_io::read_input(&path, MAX_BYTES).map_err(|e| Error::io(&path, e))?;
        let value: Value =
            anemoe_io::json::parse(&text).map_err(|e| Error::invalid(&path, format!("JSON: {e}")))?;
        SamplingDefaults::parse(&value).map_err(|what| Error::invalid(&path, what))
    }

    /// Parses the content of the file.
    ///
    /// # Errors
    /// The error names the key.
    pub fn parse(file: &Value) -> std::result::Result<SamplingDefaults, String> {
        let key = |name: &str| file.get(name).filter(|v| !v.is_null());
        fn typed<T>(
            name: &str,
            value: Option<&Value>,
            kind: &str,
            read: impl Fn(&Value) -> Option<T>,
        ) -> std::result::Result<Option<T>, String> {
            let wrong = || format!("`{name}` is not {kind}");
            value.map(|v| read(v).ok_or_else(wrong)).transpose()
        }
        let number = |name| typed(name, key(name), "a number", |v| Some(v.as_f64()? as f32));
        // Writers also give whole numbers as 50.0 or 1e30.
        let integer =
            |v: &Value| v.as_i64().or_else(|| v.as_f64().filter(|n| n.fract() == 0.0).map(|n| n as i64));
        let whole = |name| typed(name, key(name), "a whole number", integer);
        let count =
            |name| typed(name, key(name), "a whole number from 0 on", |v| usize::try_from(integer(v)?).ok());
        let id = |v: &Value| u32::try_from(v.as_u64()?).ok();
        // -1 stands for no token.
        let is_token = |v: &&Value| v.as_i64() != Some(-1);
        let ids = |v: &Value| v.as_array()?.iter().filter(is_token).map(id).collect::<Option<Vec<u32>>>();
        let list = |name| typed(name, key(name), "a list of token ids", ids);
        let do_sample =
            typed("do_sample", key("do_sample"), "true or false", Value::as_bool)?.unwrap_or(false);
        let biases = typed("sequence_bias", key("sequence_bias"), "a list of [[token ids], bias]", |v| {
            let one = |v: &Value| match v.as_array()?.as_slice() {
                [tokens, bias] => Some(TokenBias { tokens: ids(tokens)?, bias: bias.as_f64()? as f32 }),
                _ => None,
            };
            v.as_array()?.iter().map(one).collect::<Option<Vec<_>>>()
        })?;
        let bad_words = typed("bad_words_ids", key("bad_words_ids"), "a list of lists of token ids", |v| {
            v.as_array()?.iter().map(ids).collect::<Option<Vec<_>>>()
        })?;
        // A token that ends the text is no bad word by itself.
        let end = |v: &Value| ids(v).or_else(|| Some(vec![id(v)?]));
        let ends = key("eos_token_id").and_then(end).unwrap_or_default();
        let bad_words =
            bad_words.into_iter().flatten().filter(|t| !matches!(t[..], [id] if ends.contains(&id)));
        let forbidden = list("suppress_tokens")?.into_iter().flatten().map(|id| vec![id]);
        let forbidden =
            bad_words.chain(forbidden).map(|tokens| TokenBias { tokens, bias: f32::NEG_INFINITY });
        let min_tokens = count("min_new_tokens")?;
        let min_length = count("min_length")?.filter(|_| min_tokens.is_none()).unwrap_or(0);
        let is_asked = |(name, neutral): &(&'static str, Option<f64>)| match key(name) {
            None | Some(Value::Bool(false)) => false,
            Some(Value::Number(n)) => n.as_f64() != *neutral,
            Some(Value::Array(list)) => !list.is_empty(),
            Some(_) => true,
        };
        let ignored = IGNORED.into_iter().flat_map(|(names, n)| names.split(' ').map(move |name| (name, n)));
        let limit = |name| count(name).map(|n| n.filter(|n| *n > 0));
        let defaults = SamplingDefaults {
            do_sample,
            settings: SamplingSettings {
                temperature: number("temperature")?,
                top_k: whole("top_k")?.or(do_sample.then_some(TOP_K)),
                top_p: number("top_p")?,
                min_p: number("min_p")?,
                typical_p: number("typical_p")?,
                repetition_penalty: number("repetition_penalty")?,
                repeat_penalty: None,
                repeat_last_n: whole("penalty_last_n")?,
                presence_penalty: number("presence_penalty")?,
                frequency_penalty: number("frequency_penalty")?,
                logit_bias: biases.into_iter().flatten().chain(forbidden).collect(),
                min_tokens,
                seed: None,
            },
            begin_suppress: list("begin_suppress_tokens")?.unwrap_or_default(),
            min_length,
            max_new_tokens: limit("max_new_tokens")?,
            max_length: limit("max_length")?,
            ignored: ignored.filter(is_asked).map(|(name, _)| name).collect(),
        };
        let all = SamplingSettings { temperature: defaults.settings.temperature, ..Default::default() };
        defaults.sampling(&all).check().map_err(|e| format!("`{}`: {}", e.field, e.what))?;
        Ok(defaults)
    }

    /// Returns the most new tokens that the model's makers recommend for a prompt of this length.
    pub fn max_new(&self, prompt: usize) -> Option<usize> {
        let rest = || self.max_length?.checked_sub(prompt).filter(|n| *n > 0);
        self.max_new_tokens.or_else(rest)
    }

    /// Returns the sampling of an answer: what `said` says, else what the model's makers recommend, else what changes nothing.
    /// The temperature is the makers' only where they sample, else 0; biases of both count.
    pub fn sampling(&self, said: &SamplingSettings) -> Sampling {
        let own_temperature = if self.do_sample { self.settings.temperature.unwrap_or(1.0) } else { 0.0 };
        let all = said.or(&self.settings);
        let neutral = Sampling::GREEDY;
        let (repetition_penalty, last_n) = match (all.repetition_penalty, all.repeat_penalty) {
            (_, Some(p)) if p != 1.0 => (p, all.repeat_last_n.or(Some(REPEAT_LAST_N))),
            (p, _) => (p.unwrap_or(neutral.repetition_penalty), all.repeat_last_n),
        };
        Sampling {
            temperature: said.temperature.unwrap_or(own_temperature),
            top_k: all.top_k.map_or(neutral.top_k, |k| usize::try_from(k).unwrap_or(0)),
            top_p: all.top_p.unwrap_or(neutral.top_p),
            min_p: all.min_p.unwrap_or(neutral.min_p),
            typical_p: all.typical_p.unwrap_or(neutral.typical_p),
            repetition_penalty,
            repeat_last_n: last_n.and_then(|n| usize::try_from(n).ok()),
            presence_penalty: all.presence_penalty.unwrap_or(neutral.presence_penalty),
            frequency_penalty: all.frequency_penalty.unwrap_or(neutral.frequency_penalty),
            biases: all.logit_bias,
            begin_suppress: self.begin_suppress.clone(),
            min_new: all.min_tokens.unwrap_or(0),
            min_length: if said.min_tokens.is_some() { 0 } else { self.min_length },
            seed: all.seed.map_or(0, |seed| seed as u64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn said(temperature: Option<f32>) -> SamplingSettings {
        SamplingSettings { temperature, ..SamplingSettings::default() }
    }

    #[test]
    fn what_is_not_said_is_the_models_own() {
        let own = SamplingDefaults::parse(
            &json!({"do_sample": true, "temperature": 0.5, "top_p": 0.9, "min_p": 0.05,
            "repetition_penalty": 1.25, "suppress_tokens": [3], "min_length": 4, "eos_token_id": [1, 2],
            "bad_words_ids": [[1], [5, 1]], "sequence_bias": [[[7], -2.5]], "begin_suppress_tokens": [8]}),
        );
        let own = own.unwrap();
        let s = own.sampling(&said(None));
        assert_eq!((s.temperature, s.top_k, s.top_p, s.min_p), (0.5, 50, 0.9, 0.05));
        assert_eq!((s.repetition_penalty, s.repeat_last_n, s.min_length), (1.25, None, 4));
        // A bad word that is an end token is none.
        let forbid = |tokens: &[u32]| TokenBias { tokens: tokens.to_vec(), bias: f32::NEG_INFINITY };
        assert_eq!(s.biases, [TokenBias::single(7, -2.5), forbid(&[5, 1]), forbid(&[3])]);
        assert_eq!(s.begin_suppress, [8]);
        let s = own.sampling(&SamplingSettings {
            top_k: Some(-1),
            repeat_penalty: Some(1.5),
            min_tokens: Some(2),
            logit_bias: vec![TokenBias::single(9, 1.0)],
            ..said(Some(0.0))
        });
        assert_eq!((s.temperature, s.top_k, s.repetition_penalty, s.repeat_last_n), (0.0, 0, 1.5, Some(64)));
        assert_eq!((s.min_new, s.min_length, s.biases.len()), (2, 0, 4));
    }

    #[test]
    fn a_model_is_sampled_from_only_where_its_file_says_so() {
        let own = SamplingDefaults::parse(&json!({"temperature": 0.6, "top_p": 0.9})).unwrap();
        assert_eq!(own.sampling(&said(None)).temperature, 0.0);
        let s = own.sampling(&said(Some(1.5)));
        assert_eq!((s.temperature, s.top_k, s.top_p), (1.5, 0, 0.9));
        assert_eq!(SamplingDefaults::default().sampling(&said(None)), Sampling::GREEDY);
        let own = SamplingDefaults::parse(&json!({"do_sample": true})).unwrap();
        assert_eq!(own.sampling(&said(None)).temperature, 1.0);
    }

    #[test]
    fn limits_are_those_of_transformers() {
        let own = |file: Value| SamplingDefaults::parse(&file).unwrap();
        assert_eq!(own(json!({"max_length": 20, "max_new_tokens": 7})).max_new(15), Some(7));
        assert_eq!(own(json!({"max_length": 20.0})).max_new(15), Some(5));
        assert_eq!(own(json!({"max_length": 1e30})).max_new(0), Some(i64::MAX as usize));
        assert_eq!(own(json!({"max_length": 20})).max_new(25), None);
        assert_eq!(own(json!({"min_length": 20, "min_new_tokens": 7})).sampling(&said(None)).min_length, 0);
    }

    #[test]
    fn wrong_settings_are_named_and_those_without_effect_are_listed() {
        for (file, says) in [
            (json!({"temperature": "hot"}), "`temperature` is not a number"),
            (json!({"temperature": -1}), "`temperature`: -1 is not"),
            (json!({"top_p": 1.5}), "`top_p`: 1.5 is not"),
            (json!({"top_k": 1.5}), "`top_k` is not a whole number"),
            (json!({"min_p": 2}), "`min_p`: 2 is not"),
            (json!({"repetition_penalty": 0}), "`repetition_penalty`: 0 is not"),
            (json!({"do_sample": 1}), "`do_sample` is not true or false"),
            (json!({"bad_words_ids": [1]}), "`bad_words_ids` is not a list of lists"),
            (json!({"sequence_bias": {"1": 2}}), "`sequence_bias` is not a list of [["),
            (json!({"suppress_tokens": [-2]}), "`suppress_tokens` is not a list"),
            (json!({"max_new_tokens": -1}), "`max_new_tokens` is not a whole number from 0"),
        ] {
            let said = SamplingDefaults::parse(&file).unwrap_err();
            assert!(said.starts_with(says), "{said}");
        }
        let none = json!({"suppress_tokens": [-1]});
        assert_eq!(SamplingDefaults::parse(&none), SamplingDefaults::parse(&json!({})));
        let file = json!({"num_beams": 4, "no_repeat_ngram_size": 0, "epsilon_cutoff": 0.1, "stop_strings": [],
            "token_healing": false, "top_h": null, "sequence": "top_k;temperature", "temperature": null});
        assert_eq!(
            SamplingDefaults::parse(&file).unwrap().ignored,
            ["num_beams", "epsilon_cutoff", "sequence"]
        );
    }
}
