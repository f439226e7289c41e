//! The reference run: runs a checkpoint in f32, straight from its files, without packages, shards or compression.
//!
//! The run shares only the checkpoint's reader and its configuration with the path to Core ML, so that it can check
//! that path. Its code is written to be read, not to be fast. A model of any size runs, because weights are read
//! block by block and never kept.

mod forward_pass;
mod golden;
mod input_probe;
mod math;
mod tensor_reader;

pub use forward_pass::{DecoderForward, Pass, RunOptions};
pub use golden::Golden;
pub use input_probe::{Compressor, InputMoments, InputPairs, Probe};
pub use tensor_reader::{HEAD, Rows};

use anemoe_convert::checkpoint::Checkpoint;
use anemoe_convert::{Error, Result};

/// Runs the prompt in one pass, then decodes `decode_n` greedy tokens with a key/value cache. Decoding does not end
/// at an end-of-text token. A tie goes to the lowest token id. `progress(done, total)` is called after each layer of each
/// pass.
///
/// # Errors
/// The prompt is empty, holds an id outside the vocabulary, or is too long for the model's positions with its
/// continuation. The family is not supported. A weight cannot be read, is not finite, or has another shape than the
/// configuration says.
pub fn run(
    checkpoint: &Checkpoint,
    prompt_ids: &[u32],
    decode_n: usize,
    options: RunOptions,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Golden> {
    let mut golden =
        run_model(&mut DecoderForward::open(checkpoint, None)?, prompt_ids, decode_n, options, progress)?;
    if checkpoint.variants.is_rotated {
        golden.rotate_states();
    }
    Ok(golden)
}

fn run_model(
    model: &mut DecoderForward<'_>,
    prompt_ids: &[u32],
    decode_n: usize,
    options: RunOptions,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Golden> {
    let (vocab, limit, layers) = (model.decoder.vocab, model.decoder.positions, model.decoder.layers.len());
    if prompt_ids.is_empty() {
        return Err(Error::usage("the prompt has no tokens"));
    }
    if let Some(id) = prompt_ids.iter().find(|&&id| id as usize >= vocab) {
        return Err(Error::usage(format!("prompt token {id} is not in the vocabulary of {vocab} tokens")));
    }
    if prompt_ids.len().checked_add(decode_n).is_none_or(|n| n > limit) {
        let prompt = prompt_ids.len();
        return Err(Error::usage(format!(
            "{prompt} prompt tokens and {decode_n} more exceed the model's {limit} positions"
        )));
    }
    // The prompt is one pass. The last token's logits are not needed, so the last token needs no pass.
    let total = layers * decode_n.max(1);
    let mut done = 0;
    let mut tick = || {
        done += 1;
        progress(done, total);
    };

    let prompt = model.forward(prompt_ids, options, &mut tick)?;
    let mut golden = Golden {
        prompt_ids: prompt_ids.to_vec(),
        logits_full: prompt.logits,
        next_token_logits: Vec::with_capacity(decode_n),
        decode_tokens: Vec::with_capacity(decode_n),
        hidden_states: prompt.hidden_states,
        router_index: prompt.router_index,
        router_states: prompt.router_states,
    };
    let mut logits = golden.logits_full.last().cloned().unwrap_or_default();
    for step in 0..decode_n {
        let token = math::argmax(&logits) as u32;
        golden.decode_tokens.push(token);
        golden.next_token_logits.push(logits);
        if step + 1 == decode_n {
            break;
        }
        logits = model.forward(&[token], RunOptions::default(), &mut tick)?.logits.pop().unwrap_or_default();
    }
    Ok(golden)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_convert::models;
    use anemoe_convert::variants::{Variants, ZayaSkip};
    use anemoe_npz::read_npz;
    use std::path::Path;

    fn folder(name: &str) -> String {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name).display().to_string()
    }

    fn run_quietly(
        checkpoint: &Checkpoint,
        prompt_ids: &[u32],
        decode_n: usize,
        options: RunOptions,
    ) -> Result<Golden> {
        run(checkpoint, prompt_ids, decode_n, options, &mut |_, _| {})
    }

    fn cosine(a: &[f32], b: &[f32]) -> f64 {
        assert_eq!(a.len(), b.len());
        let dot =
            |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum::<f64>();
        dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
    }

    /// Checks a run of a checkpoint against the prompt and greedy continuation of its golden file.
    fn agrees_with_transformers(name: &str, has_rounded_ropes: bool, is_rotated: bool) {
        let mut golden = Golden::read(&Path::new(&folder(name)).join("golden.npz")).unwrap();
        let mut checkpoint = models::load(folder(name)).unwrap();
        if is_rotated {
            checkpoint = models::rotate(checkpoint).unwrap();
            golden.rotate_states();
        }
        let mut decoder = models::describe(&checkpoint).unwrap();
        if has_rounded_ropes {
            let ropes = decoder.layers.iter_mut().map(|l| &mut l.attention.rope);
            ropes.flat_map(|r| &mut r.inv_freq).for_each(|f| *f = half::bf16::from_f64(*f).to_f64());
        }
        agrees(&golden, &mut DecoderForward::of(decoder, &checkpoint, None).unwrap());
    }

    fn agrees(golden: &Golden, model: &mut DecoderForward<'_>) {
        // One token more than the file has: the file also has the logits after its last token.
        let n = golden.decode_tokens.len() + 1;
        assert_eq!(golden.next_token_logits.len(), n);
        let options = RunOptions { hidden: true, routing: true };
        let own = run_model(model, &golden.prompt_ids, n, options, &mut |_, _| ()).unwrap();
        assert_eq!(own.router_index, golden.router_index);
        assert_eq!(own.decode_tokens[..n - 1], golden.decode_tokens);
        let rows = |g: &Golden| -> Vec<Vec<f32>> {
            let hidden = g.hidden_states.iter().flatten();
            g.logits_full.iter().chain(&g.next_token_logits).chain(hidden).cloned().collect()
        };
        let (own, expected) = (rows(&own), rows(golden));
        assert_eq!(own.len(), expected.len());
        for (i, (a, b)) in own.iter().zip(&expected).enumerate() {
            let cosine = cosine(a, b);
            assert!(cosine > 0.999_999, "row {i}: {cosine}");
            // The cosine does not show the scale of a row.
            let largest = b.iter().fold(0f32, |m, v| m.max(v.abs()));
            assert!(a.iter().zip(b).all(|(x, y)| (x - y).abs() <= 1e-4 * largest), "row {i}");
        }
    }

    #[test]
    fn tiny_models() {
        for name in ["gemma4-moe", "gemma4-moe-text", "zaya", "zaya-legacy"] {
            agrees_with_transformers(&format!("fixtures/tiny-{name}"), false, false);
        }
        // make_families.py rounds the frequencies, which are in the model's buffers, to bf16 with the weights.
        for name in ["llama", "mistral", "qwen2", "qwen3", "qwen3-moe", "olmoe", "gemma3", "gpt-oss"] {
            agrees_with_transformers(&format!("fixtures/tiny-{name}"), true, false);
        }
    }

    #[test]
    fn rotated_weights_compute_the_same() {
        for name in ["llama", "mistral", "qwen2", "qwen3", "qwen3-moe", "olmoe", "gpt-oss"] {
            agrees_with_transformers(&format!("fixtures/tiny-{name}"), true, true);
        }
        for name in ["gemma3", "gemma4-moe", "zaya"] {
            let other = models::load(folder(&format!("fixtures/tiny-{name}"))).unwrap();
            assert!(models::rotate(other).is_err_and(|e| e.what().contains("cannot be rotated")), "{name}");
        }
    }

    #[test]
    fn tensors_that_a_model_does_not_have_are_refused() {
        let mut checkpoint = models::load(folder("fixtures/tiny-olmoe")).unwrap();
        checkpoint.config["num_hidden_layers"] = 1.into();
        checkpoint.config.as_object_mut().unwrap().remove("layer_types");
        let error = DecoderForward::open(&checkpoint, None).err().unwrap().to_string();
        assert!(error.contains("has none of that name"), "{error}");
    }

    #[test]
    fn small_model() {
        agrees_with_transformers("models/small-gemma4", false, false);
    }

    fn skipping(skip: ZayaSkip) -> Checkpoint {
        let variants = Variants { zaya_skip: Some(skip), ..Variants::default() };
        models::load(folder("fixtures/tiny-zaya-skip")).unwrap().with_variants(variants)
    }

    #[test]
    fn zaya_that_skips_experts() {
        let path = Path::new(&folder("fixtures/tiny-zaya-skip")).join("golden.npz");
        let zero = skipping(ZayaSkip::Zero);
        agrees(&Golden::read(&path).unwrap(), &mut DecoderForward::open(&zero, None).unwrap());
        // The original reading of the skip class; its golden has the prompt's logits only.
        let arrays = read_npz(&path).unwrap();
        let expected = arrays["logits_full_mod_identity"].to_f32();
        let prompt: Vec<u32> =
            arrays["prompt_ids"].to_i64().unwrap().into_iter().map(|id| id as u32).collect();
        let own = run_quietly(&skipping(ZayaSkip::Identity), &prompt, 0, RunOptions::default()).unwrap();
        let zero = run_quietly(&zero, &prompt, 0, RunOptions::default()).unwrap();
        let vocab = own.logits_full[0].len();
        for (own, expected) in own.logits_full.iter().zip(expected.chunks_exact(vocab)) {
            assert!(cosine(own, expected) > 0.999_999);
            assert!(own.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-3));
        }
        assert_ne!(own.logits_full, zero.logits_full);
    }

    #[test]
    fn zaya_remembers_what_transformers_does() {
        let path = Path::new(&folder("fixtures/tiny-zaya")).join("golden.npz");
        let (golden, arrays) = (Golden::read(&path).unwrap(), read_npz(&path).unwrap());
        let checkpoint = models::load(folder("fixtures/tiny-zaya")).unwrap();
        // The whole prompt in one pass, and in pieces.
        for pieces in [vec![24], vec![1, 3, 4, 7, 9]] {
            let mut model = DecoderForward::open(&checkpoint, None).unwrap();
            let mut at = 0;
            for n in pieces {
                let ids = &golden.prompt_ids[at..at + n];
                model.forward(ids, RunOptions::default(), &mut || ()).unwrap();
                at += n;
            }
            let (mut conv, mut delayed) = (Vec::new(), Vec::new());
            for m in model.memories.iter().flatten() {
                // [channels, 2], as in transformers.
                conv.extend(m.window[0].iter().zip(&m.window[1]).flat_map(|(a, b)| [*a, *b]));
                delayed.extend(&m.delayed);
            }
            for (name, values) in [("cca_conv_state", conv), ("cca_delayed_v_state", delayed)] {
                let expected = arrays[name].to_f32();
                assert_eq!(values.len(), expected.len());
                assert!(values.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-4), "{name}");
            }
        }
        let own =
            run_quietly(&checkpoint, &golden.prompt_ids, 0, RunOptions { hidden: false, routing: true })
                .unwrap();
        let flat = |g: &Golden| -> Vec<f32> { g.router_states.iter().flatten().flatten().copied().collect() };
        assert_eq!(flat(&own).len(), 8 * 24 * 16);
        assert!(flat(&own).iter().zip(flat(&golden)).all(|(a, b)| (a - b).abs() < 1e-4));
    }

    #[test]
    fn prompts_that_do_not_fit() {
        let checkpoint = models::load(folder("fixtures/tiny-gemma4-moe")).unwrap();
        let refused =
            |ids: &[u32], n| run_quietly(&checkpoint, ids, n, RunOptions::default()).unwrap_err().to_string();
        assert!(refused(&[], 1).contains("no tokens"));
        assert!(refused(&[1, 512], 1).contains("512"));
        assert!(refused(&[1, 2], 511).contains("exceed the model's 512 positions"));
        assert!(refused(&[1, 2], usize::MAX).contains("exceed"));
    }

    #[test]
    fn nothing_is_recorded_unless_asked_for() {
        let checkpoint = models::load(folder("fixtures/tiny-gemma4-moe")).unwrap();
        let mut ticks = Vec::new();
        let options = RunOptions::default();
        let golden = run(&checkpoint, &[2, 7], 3, options, &mut |done, total| ticks.push((done, total)));
        let golden = golden.unwrap();
        assert!(golden.hidden_states.is_empty() && golden.router_index.is_empty());
        assert_eq!(
            (golden.logits_full.len(), golden.decode_tokens.len(), golden.next_token_logits.len()),
            (2, 3, 3)
        );
        assert_eq!(ticks, (1..=18).map(|i| (i, 18)).collect::<Vec<_>>());
    }
}
