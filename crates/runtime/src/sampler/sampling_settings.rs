//! Settings of sampling.

use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// Settings for choosing the next token. [`Sampling::GREEDY`] has the neutral value of each.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 takes the most probable token.
    pub temperature: f32,
    /// Number of most probable tokens that are sampled from; 0 for all.
    pub top_k: usize,
    /// Probability that the sampled tokens reach together, most probable first; 1 for all.
    pub top_p: f32,
    /// Least probability of a sampled token, as a share of the largest; 0 for all.
    pub min_p: f32,
    /// Probability that the sampled tokens reach together, those first whose information is nearest to the entropy; 1 for all.
    pub typical_p: f32,
    /// Divisor of the positive logits, and factor of the negative ones, of tokens of prompt and answer.
    pub repetition_penalty: f32,
    /// Number of newest tokens that the repetition penalty looks at; `None` for all.
    pub repeat_last_n: Option<usize>,
    /// Subtrahend of the logits of tokens of the answer.
    pub presence_penalty: f32,
    /// Subtrahend of a logit for each time that its token is in the answer.
    pub frequency_penalty: f32,
    /// Summands of logits.
    pub biases: Vec<TokenBias>,
    /// Tokens that no answer begins with.
    pub begin_suppress: Vec<u32>,
    /// Fewest tokens before an end token.
    pub min_new: usize,
    /// Fewest tokens of prompt and answer before an end token.
    pub min_length: usize,
    /// Start of the random sequence; the same seed gives the same tokens.
    pub seed: u64,
}

/// Summand of a token's logit.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenBias {
    /// The token, behind those that it has to follow to be biased.
    pub tokens: Vec<u32>,
    /// The summand; negative infinity forbids the token.
    pub bias: f32,
}

impl TokenBias {
    /// Makes the bias of a single token.
    pub fn single(id: u32, bias: f32) -> TokenBias {
        TokenBias { tokens: vec![id], bias }
    }
}

/// A setting that is out of range.
#[derive(Clone, Debug, PartialEq)]
pub struct SettingError {
    /// Name of the setting in requests and `generation_config.json`.
    pub field: &'static str,
    /// Fault of its value.
    pub what: String,
}

impl std::fmt::Display for SettingError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.field, self.what)
    }
}

/// Largest bias, and largest presence and frequency penalty, either way, as in OpenAI's API.
const MOST_BIAS: f32 = 100.0;
const MOST_PENALTY: f32 = 2.0;
/// Tokens that llama.cpp's `repeat_penalty` looks at unless `repeat_last_n` says otherwise.
pub const REPEAT_LAST_N: i64 = 64;

impl Sampling {
    /// Settings that always take the most probable token.
    pub const GREEDY: Sampling = Sampling {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        typical_p: 1.0,
        repetition_penalty: 1.0,
        repeat_last_n: None,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        biases: Vec::new(),
        begin_suppress: Vec::new(),
        min_new: 0,
        min_length: 0,
        seed: 0,
    };

    /// Checks that the settings are in range.
    ///
    /// # Errors
    /// The error names the first one that is not.
    pub fn check(&self) -> Result<(), SettingError> {
        type Check = (fn(f32) -> bool, &'static str);
        let share: Check = (|v| v > 0.0 && v <= 1.0, "not above 0 and at most 1");
        let penalty: Check = (|v| v.abs() <= MOST_PENALTY, "not from -2 to 2");
        let temperature: Check = (|v| v.is_finite() && v >= 0.0, "not a number of at least 0");
        let factor: Check = (|v| v.is_finite() && v > 0.0, "not a number above 0");
        for (field, value, (is_right, range)) in [
            ("temperature", self.temperature, temperature),
            ("top_p", self.top_p, share),
            ("min_p", self.min_p, (|v| (0.0..=1.0).contains(&v), "not from 0 to 1")),
            ("typical_p", self.typical_p, share),
            ("repetition_penalty", self.repetition_penalty, factor),
            ("presence_penalty", self.presence_penalty, penalty),
            ("frequency_penalty", self.frequency_penalty, penalty),
        ] {
            if !is_right(value) {
                return Err(SettingError { field, what: format!("{value} is {range}") });
            }
        }
        Ok(())
    }

    /// Tells whether logits change before a token is chosen.
    pub(super) fn changes_logits(&self) -> bool {
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } = *self;
        (repetition_penalty, presence_penalty, frequency_penalty) != (1.0, 0.0, 0.0)
            || !(self.biases.is_empty() && self.begin_suppress.is_empty())
            || self.min_new.max(self.min_length) > 0
    }
}

/// Settings as a request or a command line gives them; `None` leaves the choice to the model, see
/// [`SamplingDefaults`](crate::sampler::SamplingDefaults). The names are those of requests; other keys are passed over.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub struct SamplingSettings {
    /// Divisor of the logits.
    pub temperature: Option<f32>,
    /// Number of most probable tokens that are sampled from; 0 or less for all.
    pub top_k: Option<i64>,
    /// Probability that the sampled tokens reach together.
    pub top_p: Option<f32>,
    /// Least probability of a sampled token, as a share of the largest.
    pub min_p: Option<f32>,
    /// Probability that the most typical tokens reach together.
    pub typical_p: Option<f32>,
    /// Penalty of tokens of prompt and answer, as Hugging Face and vLLM have it.
    pub repetition_penalty: Option<f32>,
    /// The same for the newest tokens alone, as llama.cpp has it.
    pub repeat_penalty: Option<f32>,
    /// Number of newest tokens that either penalty looks at; less than 0 for all.
    pub repeat_last_n: Option<i64>,
    /// Penalty of tokens of the answer.
    pub presence_penalty: Option<f32>,
    /// Penalty of tokens of the answer, for each time.
    pub frequency_penalty: Option<f32>,
    /// Summands of logits: `{"ID": BIAS}`, or `[[ID, BIAS]]` where `false` forbids.
    #[serde(deserialize_with = "logit_bias")]
    pub logit_bias: Vec<TokenBias>,
    /// Fewest tokens before an end token.
    pub min_tokens: Option<usize>,
    /// Start of the random sequence.
    pub seed: Option<i64>,
}

impl SamplingSettings {
    /// Returns these settings with those of `other` where they say nothing; biases of both count.
    #[must_use]
    pub fn or(&self, other: &SamplingSettings) -> SamplingSettings {
        let is_penalized = self.repetition_penalty.or(self.repeat_penalty).is_some();
        let repeats = if is_penalized { self } else { other };
        SamplingSettings {
            temperature: self.temperature.or(other.temperature),
            top_k: self.top_k.or(other.top_k),
            top_p: self.top_p.or(other.top_p),
            min_p: self.min_p.or(other.min_p),
            typical_p: self.typical_p.or(other.typical_p),
            repetition_penalty: repeats.repetition_penalty,
            repeat_penalty: repeats.repeat_penalty,
            repeat_last_n: self.repeat_last_n.or(repeats.repeat_last_n),
            presence_penalty: self.presence_penalty.or(other.presence_penalty),
            frequency_penalty: self.frequency_penalty.or(other.frequency_penalty),
            logit_bias: other.logit_bias.iter().chain(&self.logit_bias).cloned().collect(),
            min_tokens: self.min_tokens.or(other.min_tokens),
            seed: self.seed.or(other.seed),
        }
    }

    /// Checks what a request can get wrong beyond [`Sampling::check`].
    ///
    /// # Errors
    /// A biased token is outside the vocabulary, or two settings contradict each other.
    pub fn check(&self, vocab_size: usize) -> Result<(), SettingError> {
        let ids = self.logit_bias.iter().flat_map(|b| &b.tokens);
        if let Some(id) = ids.copied().find(|id| *id as usize >= vocab_size) {
            let what = format!("has token {id}, outside the vocabulary of {vocab_size}");
            return Err(SettingError { field: "logit_bias", what });
        }
        let is_penalty = |p: Option<f32>| p.is_some_and(|p| p != 1.0);
        if is_penalty(self.repetition_penalty) && is_penalty(self.repeat_penalty) {
            let what = "and repetition_penalty are two names of one setting: give one".into();
            return Err(SettingError { field: "repeat_penalty", what });
        }
        Ok(())
    }
}

fn logit_bias<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<TokenBias>, D::Error> {
    let wrong = |what: &str| serde::de::Error::custom(format!("{what}; expected {{\"TOKEN ID\": BIAS}}"));
    let bias = |id: Option<u32>, bias: &Value| match (id, bias.as_f64()) {
        (None, _) => Err(wrong("a key is not a token id")),
        (Some(id), _) if *bias == false => Ok(TokenBias::single(id, f32::NEG_INFINITY)),
        (Some(id), Some(b)) if b.abs() <= f64::from(MOST_BIAS) => Ok(TokenBias::single(id, b as f32)),
        (Some(id), _) => Err(wrong(&format!("the bias of {id} is not a number from -100 to 100"))),
    };
    match Value::deserialize(deserializer)? {
        Value::Null => Ok(Vec::new()),
        Value::Object(map) => map.iter().map(|(id, b)| bias(id.trim().parse().ok(), b)).collect(),
        Value::Array(list) => list
            .iter()
            .map(|pair| match pair.as_array().map(Vec::as_slice) {
                Some([id, b]) => bias(id.as_u64().and_then(|id| u32::try_from(id).ok()), b),
                _ => Err(wrong("an entry is not a pair")),
            })
            .collect(),
        _ => Err(wrong("neither an object nor a list")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn settings_out_of_range_are_named() {
        let g = Sampling { temperature: 1.0, ..Sampling::GREEDY };
        assert_eq!(g.check(), Ok(()));
        for (wrong, says) in [
            (Sampling { temperature: -1.0, ..g.clone() }, "temperature -1 is not a number of at least 0"),
            (Sampling { temperature: f32::NAN, ..g.clone() }, "temperature NaN is"),
            (Sampling { top_p: 0.0, ..g.clone() }, "top_p 0 is not above 0"),
            (Sampling { top_p: 1.5, ..g.clone() }, "top_p 1.5 is"),
            (Sampling { min_p: 1.5, ..g.clone() }, "min_p 1.5 is not from 0 to 1"),
            (Sampling { min_p: f32::NAN, ..g.clone() }, "min_p NaN is"),
            (Sampling { typical_p: 0.0, ..g.clone() }, "typical_p 0 is"),
            (
                Sampling { repetition_penalty: 0.0, ..g.clone() },
                "repetition_penalty 0 is not a number above 0",
            ),
            (Sampling { presence_penalty: 2.5, ..g.clone() }, "presence_penalty 2.5 is not from -2 to 2"),
            (Sampling { frequency_penalty: f32::INFINITY, ..g.clone() }, "frequency_penalty inf is"),
        ] {
            let said = wrong.check().unwrap_err().to_string();
            assert!(said.starts_with(says), "{said}");
        }
    }

    #[test]
    fn requests_give_biases_in_two_forms() {
        let parse =
            |bias: Value| serde_json::from_value::<SamplingSettings>(json!({"logit_bias": bias, "x": 1}));
        let two = vec![TokenBias::single(5, -100.0), TokenBias::single(7, 0.5)];
        assert_eq!(parse(json!({"5": -100, "7": 0.5})).unwrap().logit_bias, two);
        assert_eq!(parse(json!([[5, -100], [7, 0.5]])).unwrap().logit_bias, two);
        let forbidden = parse(json!([[5, false]])).unwrap();
        assert_eq!(forbidden.logit_bias, [TokenBias::single(5, f32::NEG_INFINITY)]);
        assert_eq!(forbidden.check(6), Ok(()));
        assert_eq!(forbidden.check(5).unwrap_err().field, "logit_bias");
        assert!(parse(Value::Null).unwrap().logit_bias.is_empty());
        for wrong in
            [json!({"a": 1}), json!({"5": 101}), json!({"5": "x"}), json!([[5]]), json!([["a", 1]]), json!(3)]
        {
            assert!(parse(wrong.clone()).is_err(), "{wrong}");
        }
        let both = SamplingSettings {
            repetition_penalty: Some(1.2),
            repeat_penalty: Some(1.1),
            ..SamplingSettings::default()
        };
        assert_eq!(both.check(9).unwrap_err().field, "repeat_penalty");
    }
}
