//! Form of shards: choices that change whether a chip takes a program, but not what the program computes.
//!
//! Published findings about the Neural Engine contradict each other, so a plan names a form and a Mac decides between
//! forms. Every form gives the same results on the CPU. `docs/ane-form.md` describes each.

use crate::context_buckets::ContextBuckets;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

/// Declares a choice and its values; the first value is the default.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $value:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        pub enum $name {
            $($(#[$vdoc])* $value),+
        }

        impl $name {
            /// Words of all values, the default first.
            pub const WORDS: &'static [&'static str] = &[$($word),+];

            /// Returns the word on the command line.
            pub const fn word(self) -> &'static str {
                match self { $($name::$value => $word),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.word())
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> std::result::Result<Self, String> {
                match text {
                    $($word => Ok($name::$value),)+
                    _ => Err(format!("`{text}` is not one of {}", Self::WORDS.join(", "))),
                }
            }
        }
    };
}

choice! {
    /// Holder of keys and values between calls.
    CacheForm {
        /// A Core ML state, read and written by the program.
        #[default]
        State = "state",
        /// The host: the program takes them as an input and gives the call's own rows as an output.
        Host = "host",
    }
}

choice! {
    /// Holder of the history: rows of earlier tokens that short convolutions and delayed values need.
    HistoryForm {
        /// Rows behind the slots of the cache's state.
        #[default]
        State = "state",
        /// The host: the program takes the newest rows as an input and gives the call's own rows as an output.
        Host = "host",
    }
}

choice! {
    /// Layout of attention's products.
    AttentionForm {
        /// Query heads that share a key/value head are rows of one product; softmax over the last axis.
        #[default]
        Grouped = "grouped",
        /// Each query head has its own products; softmax over the channel axis.
        PerHead = "per-head",
    }
}

choice! {
    /// Functions that gate an MLP.
    ActivationForm {
        /// The ops `silu` and `gelu`.
        #[default]
        Native = "native",
        /// Products with `sigmoid`.
        Sigmoid = "sigmoid",
    }
}

choice! {
    /// Layout of the stream at a function's border.
    IoForm {
        /// `[1, C, 1, T]`, as inside.
        #[default]
        ChannelsFirst = "channels-first",
        /// `[1, 1, T, C]`: the last axis is never 1.
        ChannelsLast = "channels-last",
    }
}

choice! {
    /// Arithmetic of RMS norms.
    NormForm {
        /// Values are divided by a part of the largest magnitude before their squares are summed.
        #[default]
        Scaled = "scaled",
        /// Values are squared as they are: fewer ops, but squares are infinite in fp16 from a value of 256 on.
        Plain = "plain",
    }
}

choice! {
    /// Layout of the experts of a call.
    ExpertForm {
        /// Two convolutions for each expert.
        #[default]
        Separate = "separate",
        /// Two convolutions for all: the experts' matrices stacked along their output channels, the second one in groups.
        Bank = "bank",
    }
}

choice! {
    /// Packages of a shard that has functions for several token counts.
    FunctionForm {
        /// One package, whose functions share weights and states.
        #[default]
        Shared = "shared",
        /// One package for each token count, each with its own weights.
        Apart = "apart",
    }
}

/// Option that puts several layers into one package.
pub const LAYERS_PER_SHARD: &str = "--layers-per-shard";

/// All choices of a form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShardForm {
    /// See [`CacheForm`].
    #[serde(skip_serializing_if = "is_default")]
    pub cache: CacheForm,
    /// See [`HistoryForm`].
    #[serde(skip_serializing_if = "is_default")]
    pub history: HistoryForm,
    /// See [`AttentionForm`].
    #[serde(skip_serializing_if = "is_default")]
    pub attention: AttentionForm,
    /// See [`ActivationForm`].
    #[serde(skip_serializing_if = "is_default")]
    pub activation: ActivationForm,
    /// See [`IoForm`].
    #[serde(skip_serializing_if = "is_default")]
    pub io: IoForm,
    /// See [`NormForm`].
    #[serde(skip_serializing_if = "is_default")]
    pub norm: NormForm,
    /// See [`ExpertForm`].
    #[serde(skip_serializing_if = "is_default")]
    pub experts: ExpertForm,
    /// See [`FunctionForm`].
    #[serde(skip_serializing_if = "is_default")]
    pub functions: FunctionForm,
    /// See [`ContextBuckets`].
    #[serde(rename = "context-buckets", skip_serializing_if = "is_default")]
    pub context_buckets: ContextBuckets,
    /// Neighbouring layers that share a package, at most; none where attention and experts are packages of their own.
    #[serde(rename = "layers-per-shard", skip_serializing_if = "is_default")]
    pub layers_per_shard: Option<NonZeroUsize>,
}

/// Tells whether a value is its type's default, which is not written.
pub fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl ShardForm {
    /// Returns the choices that are not the default, as option and word.
    pub fn differences(&self) -> Vec<(&'static str, String)> {
        let all = [
            ("--cache", is_default(&self.cache), self.cache.word()),
            ("--history", is_default(&self.history), self.history.word()),
            ("--attention", is_default(&self.attention), self.attention.word()),
            ("--activation", is_default(&self.activation), self.activation.word()),
            ("--io", is_default(&self.io), self.io.word()),
            ("--norm", is_default(&self.norm), self.norm.word()),
            ("--experts", is_default(&self.experts), self.experts.word()),
            ("--functions", is_default(&self.functions), self.functions.word()),
        ];
        let words = all.into_iter().filter(|(_, default, _)| !default);
        let mut words: Vec<(&str, String)> = words.map(|(option, _, word)| (option, word.into())).collect();
        let buckets = Some(self.context_buckets).filter(|buckets| !is_default(buckets));
        words.extend(buckets.map(|buckets| ("--context-buckets", buckets.to_string())));
        words.extend(self.layers_per_shard.map(|n| (LAYERS_PER_SHARD, n.to_string())));
        words
    }

    /// Sets the choice that an option names.
    ///
    /// # Errors
    /// No choice has this name, or the choice has no such word.
    pub fn set(&mut self, option: &str, word: &str) -> std::result::Result<(), String> {
        match option {
            "--cache" => self.cache = word.parse()?,
            "--history" => self.history = word.parse()?,
            "--attention" => self.attention = word.parse()?,
            "--activation" => self.activation = word.parse()?,
            "--io" => self.io = word.parse()?,
            "--norm" => self.norm = word.parse()?,
            "--experts" => self.experts = word.parse()?,
            "--functions" => self.functions = word.parse()?,
            "--context-buckets" => self.context_buckets = word.parse()?,
            LAYERS_PER_SHARD => {
                let n = word.parse().map_err(|_| format!("`{word}` is not a number of layers, from 1 on"))?;
                self.layers_per_shard = Some(n);
            }
            _ => return Err(format!("no choice of a form is named `{option}`")),
        }
        Ok(())
    }

    /// Refuses choices that contradict each other, in a model with a history or without.
    ///
    /// # Errors
    /// Choices contradict each other; the error names the options.
    pub fn check(&self, has_history: bool) -> Result<()> {
        if !has_history && self.history == HistoryForm::Host {
            return Err(Error::usage(
                "--history host: this family remembers nothing besides keys and values",
            ));
        }
        if has_history && self.cache == CacheForm::Host && self.history == HistoryForm::State {
            return Err(Error::usage(
                "--cache host leaves no state for the history of convolutions: give --history host too",
            ));
        }
        if self.functions == FunctionForm::Apart && self.cache == CacheForm::State {
            return Err(Error::usage(
                "--functions apart: packages share no state, and a sequence has one cache for all token counts: give --cache \
                 host too",
            ));
        }
        Ok(())
    }
}

impl fmt::Display for ShardForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<String> = self.differences().iter().map(|(o, w)| format!("{o} {w}")).collect();
        f.write_str(if words.is_empty() { "default" } else { "" })?;
        f.write_str(&words.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_back_and_others_are_named() {
        for word in AttentionForm::WORDS {
            assert_eq!(word.parse::<AttentionForm>().unwrap().word(), *word);
        }
        let error = "heads".parse::<AttentionForm>().unwrap_err();
        assert!(error.contains("grouped, per-head"), "{error}");
    }

    #[test]
    fn the_default_form_writes_nothing() {
        assert_eq!(serde_json::to_string(&ShardForm::default()).unwrap(), "{}");
        let layers_per_shard = NonZeroUsize::new(2);
        let form = ShardForm {
            cache: CacheForm::Host,
            attention: AttentionForm::PerHead,
            layers_per_shard,
            ..ShardForm::default()
        };
        let text = serde_json::to_string(&form).unwrap();
        assert_eq!(text, r#"{"cache":"host","attention":"per-head","layers-per-shard":2}"#);
        assert_eq!(serde_json::from_str::<ShardForm>(&text).unwrap(), form);
        assert_eq!(form.to_string(), "--cache host --attention per-head --layers-per-shard 2");
        assert!(serde_json::from_str::<ShardForm>(r#"{"layers-per-shard":0}"#).is_err());
        assert!(ShardForm::default().set(LAYERS_PER_SHARD, "0").unwrap_err().contains("from 1 on"));
        assert!(serde_json::from_str::<ShardForm>(r#"{"caches":"host"}"#).is_err());
        let form = ShardForm { context_buckets: "512,1024".parse().unwrap(), ..ShardForm::default() };
        let text = serde_json::to_string(&form).unwrap();
        assert_eq!(text, r#"{"context-buckets":"512,1024"}"#);
        assert_eq!(serde_json::from_str::<ShardForm>(&text).unwrap(), form);
        assert_eq!(form.to_string(), "--context-buckets 512,1024");
        assert!(serde_json::from_str::<ShardForm>(r#"{"context-buckets":"9"}"#).is_err());
    }

    #[test]
    fn a_cache_of_the_host_takes_the_history_along() {
        let form = ShardForm { cache: CacheForm::Host, ..ShardForm::default() };
        assert!(form.check(false).is_ok());
        assert!(form.check(true).unwrap_err().to_string().contains("--history host"));
        let form = ShardForm { history: HistoryForm::Host, ..ShardForm::default() };
        assert!(form.check(true).is_ok());
        assert!(form.check(false).unwrap_err().to_string().contains("--history host"));
    }

    #[test]
    fn packages_of_their_own_need_a_cache_of_the_host() {
        let form = ShardForm { functions: FunctionForm::Apart, ..ShardForm::default() };
        for has_history in [false, true] {
            assert!(form.check(has_history).unwrap_err().to_string().contains("--cache host"));
        }
        let form = ShardForm { cache: CacheForm::Host, ..form };
        assert!(form.check(false).is_ok());
        assert!(form.check(true).unwrap_err().to_string().contains("--history host"));
        assert!(ShardForm { history: HistoryForm::Host, ..form }.check(true).is_ok());
    }
}
