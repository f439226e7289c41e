//! Typed access to `config.json`, with errors that name the key.

use crate::checkpoint::Checkpoint;
use crate::{Error, Result};
use anemoe_bundle::SOFTCAPPING;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// Largest size that any dimension may have; products of two fit 64 bits.
const MAX_SIZE: u64 = 1 << 24;
/// Smallest epsilon; published ones are from 1e-8 to 1e-5.
const MIN_EPSILON: f64 = 1e-20;
/// Largest epsilon.
const MAX_EPSILON: f64 = 0.1;

/// Most layers of a model.
const MAX_LAYERS: usize = 1000;

/// One object of a configuration, and the file that errors name.
#[derive(Clone, Copy)]
pub struct Keys<'a> {
    /// Keys and values.
    pub map: &'a Map<String, Value>,
    /// File that errors name.
    pub path: &'a Path,
}

impl<'a> Keys<'a> {
    /// Returns the keys of the text model: those of `text_config`, or of the whole configuration.
    ///
    /// # Errors
    /// The configuration, or its `text_config`, is no object.
    pub fn of_text(config: &'a Value, path: &'a Path) -> Result<Keys<'a>> {
        let Keys { map, path } = Keys::of_all(config, path)?;
        match map.get("text_config") {
            None => Ok(Keys { map, path }),
            Some(Value::Object(map)) => Ok(Keys { map, path }),
            Some(_) => Err(Error::invalid(path, "configuration: `text_config` is not an object")),
        }
    }

    /// Returns the keys of the whole configuration.
    ///
    /// # Errors
    /// The configuration is no object.
    pub fn of_all(config: &'a Value, path: &'a Path) -> Result<Keys<'a>> {
        let map = config.as_object();
        let map = map.ok_or_else(|| Error::invalid(path, "configuration: not a JSON object"))?;
        Ok(Keys { map, path })
    }

    /// Makes an error: a value breaks the format.
    pub fn invalid(&self, what: String) -> Error {
        Error::invalid(self.path, format!("configuration: {what}"))
    }

    /// Makes an error: a value is well formed and not implemented.
    pub fn unsupported(&self, what: String) -> Error {
        Error::unsupported(self.path, format!("configuration: {what}"))
    }

    /// Returns the value of a key; none where the key is missing or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// Returns a dimension that must be there.
    ///
    /// # Errors
    /// The key is missing, or its value is no number from 1 to `MAX_SIZE`.
    pub fn size(&self, key: &str) -> Result<usize> {
        let value = self.get(key).ok_or_else(|| self.invalid(format!("`{key}` is missing")))?;
        self.size_of(key, value)
    }

    /// Returns a dimension, or `default` where the key is missing.
    ///
    /// # Errors
    /// The value is no number from 1 to `MAX_SIZE`.
    pub fn size_or(&self, key: &str, default: usize) -> Result<usize> {
        self.get(key).map_or(Ok(default), |value| self.size_of(key, value))
    }

    /// Reads `value`, found under `key`, as a dimension.
    ///
    /// # Errors
    /// The value is no number from 1 to `MAX_SIZE`.
    pub fn size_of(&self, key: &str, value: &Value) -> Result<usize> {
        match value.as_u64() {
            Some(n @ 1..=MAX_SIZE) => Ok(n as usize),
            _ => Err(self.invalid(format!("`{key}` is {value}, expected a number from 1 to {MAX_SIZE}"))),
        }
    }

    /// Returns a yes or no, or `default` where the key is missing.
    ///
    /// # Errors
    /// The value is neither true nor false.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(v) => Err(self.invalid(format!("`{key}` is {v}, expected true or false"))),
        }
    }

    /// Returns the number of layers.
    ///
    /// # Errors
    /// The key is missing, or there are more than `MAX_LAYERS`.
    pub fn layers(&self) -> Result<usize> {
        match self.size("num_hidden_layers")? {
            n @ 0..=MAX_LAYERS => Ok(n),
            n => Err(self.invalid(format!("`num_hidden_layers` is {n}, more than {MAX_LAYERS}"))),
        }
    }

    /// Returns the types of all layers; none where the key is missing.
    ///
    /// # Errors
    /// The list has another length, or a type that is not in `known`.
    pub fn layer_types(&self, layers: usize, known: &[&'static str]) -> Result<Option<Vec<&'static str>>> {
        let Some(types) = self.get("layer_types") else { return Ok(None) };
        let types = types.as_array().ok_or_else(|| self.invalid("`layer_types` is not a list".into()))?;
        if types.len() != layers {
            let n = types.len();
            return Err(self.invalid(format!("`layer_types` has {n} entries for {layers} layers")));
        }
        let one = |v: &Value| {
            let found = known.iter().find(|name| v == **name).copied();
            let known = known.join(" and ");
            found.ok_or_else(|| self.unsupported(format!("`layer_types` has {v}, implemented is {known}")))
        };
        types.iter().map(one).collect::<Result<Vec<_>>>().map(Some)
    }

    /// Returns the object under a key.
    ///
    /// # Errors
    /// The value is no object.
    pub fn object(&self, key: &str) -> Result<Option<Keys<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Keys { map, path: self.path })),
            Some(_) => Err(self.invalid(format!("`{key}` is not an object"))),
        }
    }

    /// Checks that key/value heads divide the query heads.
    ///
    /// # Errors
    /// They do not.
    pub fn check_heads(&self, heads: usize, kv_heads: usize) -> Result<()> {
        match heads.is_multiple_of(kv_heads) {
            true => Ok(()),
            false => Err(self.invalid(format!("{heads} query heads for {kv_heads} key/value heads"))),
        }
    }

    /// Returns the values of keys that are there, for people.
    pub fn summary(&self, keys: &[&str]) -> BTreeMap<String, Value> {
        keys.iter().filter_map(|key| Some(((*key).to_string(), self.get(key)?.clone()))).collect()
    }

    /// Returns a positive number; none where the key is missing.
    ///
    /// # Errors
    /// The value is no positive number.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => {
                let n = v.as_f64().filter(|n| n.is_finite() && *n > 0.0);
                n.map(Some).ok_or_else(|| self.invalid(format!("`{key}` is {v}, expected a positive number")))
            }
        }
    }

    /// Returns an epsilon, which must be there.
    ///
    /// # Errors
    /// The key is missing, or its value is no number from `MIN_EPSILON` to `MAX_EPSILON`.
    pub fn epsilon(&self, key: &str) -> Result<f32> {
        let n = self.number(key)?.ok_or_else(|| self.invalid(format!("`{key}` is missing")))?;
        if !(MIN_EPSILON..=MAX_EPSILON).contains(&n) {
            let (least, most) = (MIN_EPSILON, MAX_EPSILON);
            return Err(
                self.invalid(format!("`{key}` is {n:e}, expected a number from {least:e} to {most:e}"))
            );
        }
        Ok(n as f32)
    }

    /// Returns `cap` of `cap * tanh(logits / cap)`; none where the key is missing.
    ///
    /// # Errors
    /// The value is no number in `SOFTCAPPING`.
    pub fn softcapping(&self, key: &str) -> Result<Option<f32>> {
        let Some(n) = self.number(key)? else { return Ok(None) };
        if !SOFTCAPPING.contains(&(n as f32)) {
            let (least, most) = (SOFTCAPPING.start(), SOFTCAPPING.end());
            return Err(self.invalid(format!("`{key}` is {n:e}, expected a number from {least} to {most}")));
        }
        Ok(Some(n as f32))
    }

    /// Returns one token id or a list of them, without ids outside the vocabulary, which no text has: configurations write
    /// -1 for no token, or keep the ids of a larger vocabulary. Empty where the key is missing.
    ///
    /// # Errors
    /// An element is no number.
    pub fn tokens(&self, key: &str, vocab_size: usize) -> Result<Vec<u32>> {
        let ids = match self.get(key) {
            None => &[],
            Some(Value::Array(list)) => list.as_slice(),
            Some(one) => std::slice::from_ref(one),
        };
        match ids.iter().find(|v| !v.is_number() && !v.is_null()) {
            None => Ok(token_ids(Some(&Value::from(ids)), vocab_size)),
            Some(v) => Err(self.invalid(format!("`{key}` has {v}, expected token ids"))),
        }
    }

    /// Refuses values that change the computation in ways that are not implemented.
    ///
    /// # Errors
    /// The value is there and not in `allowed`.
    pub fn expect(&self, key: &str, allowed: &[Value]) -> Result<()> {
        match self.get(key) {
            None => Ok(()),
            Some(v) if allowed.contains(v) => Ok(()),
            Some(v) if allowed.is_empty() => {
                Err(self.unsupported(format!("`{key}` is {v}, implemented is a model without it")))
            }
            Some(v) => {
                let allowed: Vec<String> = allowed.iter().map(Value::to_string).collect();
                Err(self.unsupported(format!("`{key}` is {v}, implemented is {}", allowed.join(" or "))))
            }
        }
    }
}

/// Returns an object with the keys of another one, which replace its own.
pub fn merged(mut object: Value, other: Value) -> Value {
    if let (Some(map), Value::Object(other)) = (object.as_object_mut(), other) {
        map.extend(other);
    }
    object
}

/// Returns the tokens that end a text: those of the generation configuration, of the configuration, then `own`.
pub fn eos_token_ids(checkpoint: &Checkpoint, own: &[u32], vocab_size: usize) -> Vec<u32> {
    let generation = checkpoint.generation_config.as_ref().and_then(|g| g.get("eos_token_id"));
    let mut ids = token_ids(generation, vocab_size);
    let more = token_ids(checkpoint.config.get("eos_token_id"), vocab_size);
    for id in more.into_iter().chain(own.iter().copied()) {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    ids
}

/// Reads one token id or a list of them; leaves out what is no id below `vocab_size`.
pub fn token_ids(value: Option<&Value>, vocab_size: usize) -> Vec<u32> {
    let id = |v: &Value| v.as_u64().filter(|n| *n < vocab_size as u64).and_then(|n| u32::try_from(n).ok());
    match value {
        Some(Value::Array(list)) => list.iter().filter_map(id).collect(),
        Some(one) => id(one).into_iter().collect(),
        None => Vec::new(),
    }
}
