//! Goldens: results of a reference run, and their file.

use anemoe_convert::checkpoint::Rotation;
use anemoe_convert::{Error, Result};
use anemoe_npz::{Array, ArrayData, read_npz, write_npz_compressed};
use std::collections::BTreeMap;
use std::path::Path;

/// Results of a reference run, by [`super::run`] or by Hugging Face transformers.
#[derive(Clone, Debug, PartialEq)]
pub struct Golden {
    /// Ids of the prompt, `[T]`.
    pub prompt_ids: Vec<u32>,
    /// Logits after each prompt token, `[T, vocab_size]`.
    pub logits_full: Vec<Vec<f32>>,
    /// Logits that each greedy token was chosen from, `[N, vocab_size]`. The first row equals the last of
    /// `logits_full`. A file may have one more row, after the last token.
    pub next_token_logits: Vec<Vec<f32>>,
    /// Ids of the greedy continuation, `[N]`.
    pub decode_tokens: Vec<u32>,
    /// Residual stream of the prompt before the first layer and after each layer (before the final norm):
    /// `[layers + 1, T, hidden_size]`; empty where not recorded.
    pub hidden_states: Vec<Vec<Vec<f32>>>,
    /// Experts that each layer chose for each prompt token, most probable first, `[layers, T, top_k]`; empty where
    /// not recorded.
    pub router_index: Vec<Vec<Vec<u32>>>,
    /// Router states that each layer hands to the next one, `[layers, T, router_hidden_size]`; empty where not
    /// recorded, or where routers have no state.
    pub router_states: Vec<Vec<Vec<f32>>>,
}

impl Golden {
    /// Returns this run with the recorded layer states of another run of the same prompt.
    #[must_use]
    pub fn with_states_of(&self, other: Golden) -> Golden {
        Golden {
            hidden_states: other.hidden_states,
            router_index: other.router_index,
            router_states: other.router_states,
            ..self.clone()
        }
    }

    /// Turns the residual stream to that of the checkpoint with rotated weights.
    pub fn rotate_states(&mut self) {
        let mut rows = self.hidden_states.iter_mut().flatten();
        let Some(first) = rows.next().filter(|row| !row.is_empty()) else { return };
        let rotation = Rotation::new(first.len());
        rotation.rotate_rows(first);
        rows.for_each(|row| rotation.rotate_rows(row));
    }

    /// Writes an `.npz` file with the keys `prompt_ids`, `logits_full`, `next_token_logits` and `decode_tokens`, and
    /// where recorded `hidden_states`, `router_index` and `router_states`.
    ///
    /// # Errors
    /// The rows have different lengths, or the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let (tokens, vocab) = (self.prompt_ids.len(), self.vocab_size());
        let ids = |ids: &[u32]| ids.iter().map(|&id| i64::from(id)).collect::<Vec<i64>>();
        let (next, decoded) = (&self.next_token_logits, &self.decode_tokens);
        let mut arrays: Vec<(&str, Vec<usize>, ArrayData)> = vec![
            ("prompt_ids", vec![tokens], ids(&self.prompt_ids).into()),
            ("logits_full", vec![tokens, vocab], self.logits_full.concat().into()),
            ("next_token_logits", vec![next.len(), vocab], next.concat().into()),
            ("decode_tokens", vec![decoded.len()], ids(decoded).into()),
        ];
        for (name, blocks) in [("hidden_states", &self.hidden_states), ("router_states", &self.router_states)]
        {
            if let Some(width) = innermost(blocks) {
                arrays.push((name, vec![blocks.len(), tokens, width], blocks.concat().concat().into()));
            }
        }
        if let Some(top_k) = innermost(&self.router_index) {
            let shape = vec![self.router_index.len(), tokens, top_k];
            arrays.push(("router_index", shape, ids(&self.router_index.concat().concat()).into()));
        }
        let mut entries = Vec::new();
        for (name, shape, data) in arrays {
            let what = || Error::invalid(path, format!("array `{name}`: rows that do not make up {shape:?}"));
            entries.push((name.to_string(), Array::new(shape.clone(), data).ok_or_else(what)?));
        }
        write_npz_compressed(path, &entries)
    }

    /// Reads an `.npz` file with the keys of [`Golden::write`]; other keys are ignored. `next_token_ids` is another
    /// name of `decode_tokens`. Numbers may have any type, but ids have to be integers.
    ///
    /// # Errors
    /// The file cannot be read, a key is missing, the shapes do not fit each other, or a value is not finite.
    pub fn read(path: &Path) -> Result<Golden> {
        let mut arrays = Arrays { path, arrays: read_npz(path)? };
        let prompt_ids = arrays.ids("prompt_ids")?.ok_or_else(|| arrays.missing("prompt_ids"))?;
        let decode_tokens = match arrays.ids("decode_tokens")? {
            Some(ids) => ids,
            None => arrays.ids("next_token_ids")?.ok_or_else(|| arrays.missing("decode_tokens"))?,
        };
        let tokens = prompt_ids.len();
        if tokens == 0 {
            return Err(arrays.invalid("prompt_ids", "it is empty"));
        }
        let (shape, logits_full) =
            arrays.floats("logits_full")?.ok_or_else(|| arrays.missing("logits_full"))?;
        let vocab = match shape[..] {
            [t, v] if t == tokens && v > 0 => v,
            _ => {
                let what = format!(
                    "shape {shape:?}, expected [{tokens}, vocabulary] as there are {tokens} prompt_ids"
                );
                return Err(arrays.invalid("logits_full", &what));
            }
        };
        for (name, ids) in [("prompt_ids", &prompt_ids), ("decode_tokens", &decode_tokens)] {
            if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
                let what = format!("token {id} with logits for a vocabulary of {vocab}");
                return Err(arrays.invalid(name, &what));
            }
        }
        let n = decode_tokens.len();
        let (shape, next_token_logits) = match arrays.floats("next_token_logits")? {
            Some(found) => found,
            // No tokens were decoded.
            None if n == 0 => (vec![0, vocab], Vec::new()),
            None => return Err(arrays.missing("next_token_logits")),
        };
        if shape.len() != 2 || shape[1] != vocab || shape[0] < n || shape[0] > n + 1 {
            let what = format!("shape {shape:?}, expected [{n}, {vocab}] or [{}, {vocab}]", n + 1);
            return Err(arrays.invalid("next_token_logits", &what));
        }
        let mut floats = |name: &str| match arrays.floats(name)? {
            None => Ok(Vec::new()),
            Some((shape, data)) => arrays.blocks(name, tokens, &shape, data),
        };
        let (hidden_states, router_states) = (floats("hidden_states")?, floats("router_states")?);
        let router_index = match arrays.integers("router_index")? {
            None => Vec::new(),
            Some((shape, data)) => arrays.blocks("router_index", tokens, &shape, data)?,
        };
        let rows = |data: Vec<f32>| data.chunks(vocab).map(<[f32]>::to_vec).collect::<Vec<_>>();
        Ok(Golden {
            prompt_ids,
            logits_full: rows(logits_full),
            next_token_logits: rows(next_token_logits),
            decode_tokens,
            hidden_states,
            router_index,
            router_states,
        })
    }

    /// Returns the vocabulary size: the length of a row of logits.
    fn vocab_size(&self) -> usize {
        self.logits_full.first().map_or(0, Vec::len)
    }
}

/// Returns the length of the innermost vectors, or `None` where there are none.
fn innermost<T>(blocks: &[Vec<Vec<T>>]) -> Option<usize> {
    blocks.first().and_then(|b| b.first()).map(Vec::len)
}

/// Arrays of a file that were not taken yet.
struct Arrays<'a> {
    path: &'a Path,
    arrays: BTreeMap<String, Array>,
}

impl Arrays<'_> {
    fn invalid(&self, name: &str, what: &str) -> Error {
        Error::invalid(self.path, format!("array `{name}`: {what}"))
    }

    fn missing(&self, name: &str) -> Error {
        let keys = "prompt_ids, logits_full, decode_tokens and next_token_logits";
        self.invalid(name, &format!("it is missing; a golden file has {keys}"))
    }

    /// Takes an array of finite numbers: shape and values. `None` where it is missing.
    fn floats(&mut self, name: &str) -> Result<Option<(Vec<usize>, Vec<f32>)>> {
        let Some(array) = self.arrays.remove(name) else { return Ok(None) };
        let data = array.to_f32();
        match data.iter().position(|v| !v.is_finite()) {
            Some(i) => Err(self.invalid(name, &format!("element {i} is {}", data[i]))),
            None => Ok(Some((array.shape, data))),
        }
    }

    /// Takes an array of integers from 0 to 2^32 - 1: shape and values. `None` where it is missing.
    fn integers(&mut self, name: &str) -> Result<Option<(Vec<usize>, Vec<u32>)>> {
        let Some(array) = self.arrays.remove(name) else { return Ok(None) };
        let ids = |all: Vec<i64>| all.into_iter().map(|id| u32::try_from(id).ok()).collect();
        match array.to_i64().and_then(ids) {
            Some(data) => Ok(Some((array.shape, data))),
            None => Err(self.invalid(name, "a number that is no integer from 0 to 2^32 - 1")),
        }
    }

    /// Takes a list of token ids. `None` where it is missing.
    fn ids(&mut self, name: &str) -> Result<Option<Vec<u32>>> {
        match self.integers(name)? {
            Some((shape, _)) if shape.len() != 1 => {
                Err(self.invalid(name, &format!("shape {shape:?}, expected one dimension")))
            }
            found => Ok(found.map(|(_, data)| data)),
        }
    }

    /// Cuts `data` of shape `[layers, tokens, width]` into nested vectors.
    fn blocks<T: Clone>(
        &self,
        name: &str,
        tokens: usize,
        shape: &[usize],
        data: Vec<T>,
    ) -> Result<Vec<Vec<Vec<T>>>> {
        match *shape {
            [layers, t, width] if layers > 0 && t == tokens && width > 0 => {
                Ok(data.chunks(t * width).map(|b| b.chunks(width).map(<[T]>::to_vec).collect()).collect())
            }
            _ => Err(self.invalid(name, &format!("shape {shape:?}, expected [layers, {tokens}, width]"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_npz::write_npz;

    fn example() -> Golden {
        Golden {
            prompt_ids: vec![2, 0],
            logits_full: vec![vec![0.5, 1.0, -1.0], vec![3.0, 2.0, 1.0]],
            next_token_logits: vec![vec![3.0, 2.0, 1.0]],
            decode_tokens: vec![0],
            hidden_states: vec![vec![vec![1.0, 2.0], vec![3.0, 4.0]]; 3],
            router_index: vec![vec![vec![4, 1], vec![0, 7]]; 2],
            router_states: vec![vec![vec![0.5], vec![-1.0]]; 2],
        }
    }

    /// Writes the example's file, lets `change` alter its arrays, and reads it.
    fn read_changed(change: impl FnOnce(&mut BTreeMap<String, Array>)) -> Result<Golden> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("g.npz");
        example().write(&path).unwrap();
        let mut arrays = read_npz(&path).unwrap();
        change(&mut arrays);
        write_npz(&path, &arrays.into_iter().collect::<Vec<_>>()).unwrap();
        Golden::read(&path)
    }

    fn refused(change: impl FnOnce(&mut BTreeMap<String, Array>)) -> String {
        let err = read_changed(change).unwrap_err();
        assert!(err.kind() == anemoe_io::Kind::Invalid, "{err}");
        err.to_string()
    }

    fn put<T>(name: &str, shape: &[usize], data: Vec<T>) -> impl FnOnce(&mut BTreeMap<String, Array>)
    where
        anemoe_npz::ArrayData: From<Vec<T>>,
    {
        let (name, array) = (name.to_string(), Array::new(shape.to_vec(), data).unwrap());
        move |arrays| drop(arrays.insert(name, array))
    }

    #[test]
    fn a_file_is_read_as_it_was_written() {
        assert_eq!(read_changed(|_| ()).unwrap(), example());
        let short =
            Golden { hidden_states: vec![], router_index: vec![], router_states: vec![], ..example() };
        let dir = tempfile::tempdir().unwrap();
        short.write(&dir.path().join("g.npz")).unwrap();
        assert_eq!(Golden::read(&dir.path().join("g.npz")).unwrap(), short);
    }

    #[test]
    fn other_names_types_and_one_row_more_are_read() {
        let golden = read_changed(|a| {
            let ids = a.remove("decode_tokens").unwrap();
            a.insert("next_token_ids".into(), ids);
            put("prompt_ids", &[2], vec![2u8, 0])(a);
            put("next_token_logits", &[2, 3], vec![3.0f64, 2.0, 1.0, 0.0, 0.0, 9.0])(a);
            put("somebody_elses", &[1], vec![f32::NAN])(a);
        });
        let golden = golden.unwrap();
        assert_eq!(golden.next_token_logits.len(), 2);
        assert_eq!(
            (golden.prompt_ids, golden.decode_tokens),
            (example().prompt_ids, example().decode_tokens)
        );
    }

    #[test]
    fn a_missing_key() {
        for key in ["prompt_ids", "logits_full", "next_token_logits", "decode_tokens"] {
            let err = refused(|a| drop(a.remove(key)));
            assert!(err.contains(&format!("`{key}`: it is missing")), "{err}");
        }
    }

    #[test]
    fn shapes_that_do_not_fit() {
        for (name, err) in [
            ("logits_full", refused(put("logits_full", &[3, 3], vec![0f32; 9]))),
            ("logits_full", refused(put("logits_full", &[6], vec![0f32; 6]))),
            ("logits_full", refused(put("logits_full", &[2, 0], vec![0f32; 0]))),
            ("next_token_logits", refused(put("next_token_logits", &[1, 4], vec![0f32; 4]))),
            ("next_token_logits", refused(put("next_token_logits", &[3, 3], vec![0f32; 9]))),
            ("prompt_ids", refused(put("prompt_ids", &[1, 2], vec![0i32; 2]))),
            ("prompt_ids", refused(put("prompt_ids", &[0], vec![0i32; 0]))),
            ("hidden_states", refused(put("hidden_states", &[3, 1, 2], vec![0f32; 6]))),
            ("router_index", refused(put("router_index", &[4, 2], vec![0i32; 8]))),
        ] {
            assert!(err.contains(&format!("array `{name}`")), "{err}");
        }
    }

    #[test]
    fn values_that_are_impossible() {
        assert!(refused(put("prompt_ids", &[2], vec![0i64, -1])).contains("no integer from 0"));
        assert!(refused(put("prompt_ids", &[2], vec![0f32, 0.5])).contains("no integer from 0"));
        assert!(refused(put("prompt_ids", &[2], vec![0i64, 3])).contains("token 3"));
        assert!(refused(put("decode_tokens", &[1], vec![4_294_967_296i64])).contains("no integer from 0"));
        assert!(refused(put("logits_full", &[2, 3], vec![f32::NAN; 6])).contains("element 0 is NaN"));
    }

    #[test]
    fn rows_of_different_lengths_are_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let bad = Golden { logits_full: vec![vec![0.0; 3], vec![0.0; 2]], ..example() };
        let err = bad.write(&dir.path().join("g.npz")).unwrap_err().to_string();
        assert!(err.contains("logits_full"), "{err}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
