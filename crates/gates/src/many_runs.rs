//! Runs a checkpoint with many sets of weights at once, layer by layer, so that a model of any size needs the weights of
//! one layer at a time.
//!
//! ```text
//! own weights        ──layer 0──┬──layer 1──┬── ... ──head──> logits
//! run 1 (layer 0)       W'0  ───┴──layer 1──┼── ... ──head──> logits, compared with the own weights'
//! run 2 (layer 1)               └──── W'1 ──┴── ... ──head──> logits
//! ```
//! A run is the model itself up to the first layer that it changes. Runs with the same weights in a layer go through
//! it together.

use crate::Result;
use crate::golden_gate::{cosine, divergence};
use crate::perplexity::check_windows;
use crate::reference::{DecoderForward, Probe, Rows};
use anemoe_convert::build::check_interrupted;
use anemoe_convert::checkpoint::Checkpoint;
use anemoe_convert::kind_search::ExpertUse;
use anemoe_convert::models::{self, Decoder};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Most tokens that go through a layer at once.
const TOKENS: usize = 4096;
/// Most bytes of logits that are in memory at once, beside those of the model itself.
const LOGITS: usize = 512 << 20;

/// Distance of logits from the uncompressed model's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Distance {
    /// Mean cosine of the logits.
    pub mean: f64,
    /// Lowest cosine of the logits.
    pub min: f64,
    /// Mean Kullback-Leibler divergence of the next token's distribution from the uncompressed model's, in nats.
    pub loss: f64,
}

/// Tensor that runs may replace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReplacedTensor {
    /// Layer that reads it; none for the head.
    pub layer: Option<usize>,
    /// Name without the checkpoint's prefix; [`HEAD`](crate::reference::HEAD) for the head.
    pub name: String,
    /// Experts of a stacked tensor that are replaced, ascending; empty for the whole tensor.
    pub experts: Vec<usize>,
}

/// Replacements of a run: for each tensor, which one; none for the checkpoint's own weights.
pub type ReplacedSet = Vec<Option<usize>>;

/// Gives the values of a replacement of a tensor, by the indices of both.
pub type Replacements<'a> = dyn FnMut(usize, usize) -> Result<Arc<Vec<f32>>> + 'a;

/// Model and text that runs are made of.
pub struct ManyRuns<'a> {
    /// Checkpoint with the model's own weights.
    pub checkpoint: &'a Checkpoint,
    /// Tensors that runs may replace.
    pub tensors: &'a [ReplacedTensor],
    /// Windows of token ids, each run from an empty context.
    pub windows: &'a [Vec<u32>],
}

/// Hidden states of a run's tokens, with the states of their routers.
#[derive(Clone, Default)]
struct RunStream {
    s: Rows,
    router: Option<Rows>,
}

/// Tensors of a layer with the replacements that a run has there.
type Replaced = Vec<(usize, usize)>;

impl ManyRuns<'_> {
    /// Runs the model with its own weights and once for each of `runs`. Returns the distance of each run, and the experts
    /// that tokens chose with the own weights. `progress` is called after each layer; the head counts as one.
    ///
    /// # Errors
    /// A token or a window does not fit the model, a weight cannot be read, or the user interrupts.
    pub fn distances(
        &self,
        runs: &[ReplacedSet],
        values: &mut Replacements<'_>,
        progress: &mut dyn FnMut(),
    ) -> Result<(Vec<Distance>, ExpertUse)> {
        let decoder = models::describe(self.checkpoint)?;
        let own = DecoderForward::of(decoder.clone(), self.checkpoint, None)?;
        check_windows(&decoder, self.windows)?;
        let ids = self.windows.concat();
        let mut base = RunStream { s: own.embed(&ids)?, router: None };
        let mut changed: Vec<Option<RunStream>> = vec![None; runs.len()];
        let mut used = ExpertUse { chosen: Vec::new(), tokens: ids.len() as u64 };
        for l in 0..decoder.layers.len() {
            check_interrupted()?;
            let mut classes = self.classes(runs, Some(l));
            let same = classes.remove(&Vec::new()).unwrap_or_default();
            for (replaced, members) in classes {
                let streams = members.iter().map(|&i| changed[i].take().unwrap_or_else(|| base.clone()));
                let streams: Vec<RunStream> = streams.collect();
                let probe = self.probe(&replaced, values)?;
                let (streams, _) = self.through(&decoder, Some(&probe), l, streams)?;
                members.iter().zip(streams).for_each(|(&i, stream)| changed[i] = Some(stream));
            }
            let members: Vec<usize> = same.into_iter().filter(|&i| changed[i].is_some()).collect();
            let mut streams = vec![std::mem::take(&mut base)];
            streams.extend(members.iter().filter_map(|&i| changed[i].take()));
            let (streams, mut chosen) = self.through(&decoder, None, l, streams)?;
            let mut streams = streams.into_iter();
            base = streams.next().unwrap_or_default();
            members.iter().zip(streams).for_each(|(&i, stream)| changed[i] = Some(stream));
            chosen.truncate(ids.len());
            let mut counts = vec![0u64; decoder.layers[l].experts.map_or(0, |e| e.count)];
            for &expert in chosen.iter().flatten() {
                // A token that skips its expert reads no expert.
                if let Some(n) = counts.get_mut(expert as usize) {
                    *n += 1;
                }
            }
            used.chosen.push(counts);
            progress();
        }
        let expected = own.logits(&own.head_input(&base.s)?)?;
        let mut found = vec![Distance { mean: 1.0, min: 1.0, loss: 0.0 }; runs.len()];
        let at_once = (LOGITS / (4 * decoder.vocab * ids.len().max(1))).max(1);
        for (replaced, members) in self.classes(runs, None) {
            let probe = self.probe(&replaced, values)?;
            let head = DecoderForward::of(decoder.clone(), self.checkpoint, Some(&probe))?;
            let is_changed = |i: &usize| changed[*i].is_some() || !replaced.is_empty();
            let members: Vec<usize> = members.into_iter().filter(is_changed).collect();
            for some in members.chunks(at_once) {
                check_interrupted()?;
                let s: Rows =
                    some.iter().flat_map(|&i| changed[i].as_ref().unwrap_or(&base).s.clone()).collect();
                let logits = head.logits(&head.head_input(&s)?)?;
                for (&i, logits) in some.iter().zip(logits.chunks(ids.len().max(1))) {
                    found[i] = distance(&expected, logits);
                }
            }
        }
        progress();
        Ok((found, used))
    }

    /// Returns the runs by what they replace in a layer, or in the head.
    fn classes(&self, runs: &[ReplacedSet], layer: Option<usize>) -> BTreeMap<Replaced, Vec<usize>> {
        let mut classes: BTreeMap<Replaced, Vec<usize>> = BTreeMap::new();
        let own: Vec<usize> = (0..self.tensors.len()).filter(|&t| self.tensors[t].layer == layer).collect();
        for (i, run) in runs.iter().enumerate() {
            let replaced = own.iter().filter_map(|&t| Some((t, run[t]?))).collect();
            classes.entry(replaced).or_default().push(i);
        }
        classes
    }

    fn probe(&self, replaced: &Replaced, values: &mut Replacements<'_>) -> Result<Probe> {
        let mut probe = Probe::default();
        for &(tensor, replacement) in replaced {
            let ReplacedTensor { name, experts, .. } = &self.tensors[tensor];
            let new = values(tensor, replacement)?;
            if experts.is_empty() {
                probe.replaced.insert(name.clone(), new);
                continue;
            }
            for (&expert, own) in experts.iter().zip(new.chunks_exact(new.len() / experts.len())) {
                probe.replaced_experts.insert((name.clone(), expert), Arc::new(own.to_vec()));
            }
        }
        Ok(probe)
    }

    /// Sends streams through a layer. Returns them, and the experts that each token chose.
    fn through(
        &self,
        decoder: &Decoder,
        probe: Option<&Probe>,
        l: usize,
        streams: Vec<RunStream>,
    ) -> Result<(Vec<RunStream>, Vec<Vec<u32>>)> {
        let mut model = DecoderForward::of(decoder.clone(), self.checkpoint, probe)?;
        let lengths: Vec<usize> = self.windows.iter().map(Vec::len).collect();
        let tokens: usize = lengths.iter().sum();
        let (mut out, mut chosen) = (Vec::with_capacity(streams.len()), Vec::new());
        let mut streams = streams.into_iter().peekable();
        while streams.peek().is_some() {
            let (mut s, mut router, mut n) = (Rows::new(), None::<Rows>, 0);
            for stream in streams.by_ref().take((TOKENS / tokens.max(1)).max(1)) {
                s.extend(stream.s);
                if let Some(own) = stream.router {
                    router.get_or_insert_default().extend(own);
                }
                n += 1;
            }
            let own = model.layer_of_windows(l, &lengths.repeat(n), &mut s, &mut router)?;
            chosen.extend(own.unwrap_or_default());
            let mut router = router.map(Rows::into_iter);
            let mut s = s.into_iter();
            for _ in 0..n {
                let router = router.as_mut().map(|rows| rows.by_ref().take(tokens).collect());
                out.push(RunStream { s: s.by_ref().take(tokens).collect(), router });
            }
        }
        Ok((out, chosen))
    }
}

/// Measures the distance of logits from the expected ones.
fn distance(expected: &[Vec<f32>], logits: &[Vec<f32>]) -> Distance {
    let n = logits.len().max(1) as f64;
    let cosines: Vec<f64> = logits.iter().zip(expected).map(|(a, b)| cosine(a, b)).collect();
    Distance {
        loss: logits.iter().zip(expected).map(|(a, b)| divergence(b, a)).sum::<f64>() / n,
        mean: cosines.iter().sum::<f64>() / n,
        min: cosines.iter().copied().fold(1.0, f64::min),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perplexity::each_window;
    use anemoe_convert::kind_search::matrices;
    use anemoe_convert::plan::PlanOptions;
    use std::path::Path;

    /// Halves the precision of values to three bits of mantissa.
    fn coarse(values: &[f32]) -> Vec<f32> {
        values.iter().map(|v| f32::from_bits(v.to_bits() & 0xfff0_0000)).collect()
    }

    #[test]
    fn runs_together_are_as_each_by_itself() {
        for name in ["gemma4-moe", "zaya", "qwen3-moe", "gemma3"] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../fixtures/tiny-{name}"));
            let checkpoint = models::load(&path).unwrap();
            let family = models::open(models::load(&path).unwrap()).unwrap();
            let plan = family.plan(&PlanOptions::default()).unwrap();
            let (mut tensors, mut values) = (Vec::new(), Vec::new());
            for ((tensor, part), own) in matrices(&plan) {
                let (layer, is_head) = (own[0].layer(), part == "head");
                let wanted = is_head || ["attention", "experts", "dense_mlp"].contains(&part.as_str());
                if !wanted
                    || tensors
                        .iter()
                        .any(|t: &ReplacedTensor| t.layer == layer && t.name != tensor && layer != Some(1))
                {
                    continue;
                }
                let weights = own.iter().map(|m| m.offset + m.weights()).max().unwrap();
                let mut read = vec![0f32; weights as usize];
                family.checked.read(&tensor, 0..weights, &mut read).unwrap();
                let name = if is_head { crate::reference::HEAD.to_string() } else { tensor };
                tensors.push(ReplacedTensor { layer, name, experts: vec![] });
                values.push(Arc::new(coarse(&read)));
            }
            assert!(tensors.len() > 4, "{name}: {tensors:?}");
            let windows = vec![vec![2, 7, 19, 33, 5], vec![2, 90, 91]];
            let none: ReplacedSet = vec![None; tensors.len()];
            let mut runs: Vec<ReplacedSet> = vec![none.clone(), vec![Some(0); tensors.len()]];
            for t in 0..tensors.len() {
                let mut run = none.clone();
                run[t] = Some(0);
                runs.push(run);
            }
            let together = ManyRuns { checkpoint: &checkpoint, tensors: &tensors, windows: &windows };
            let mut ticks = 0;
            let (found, used) =
                together.distances(&runs, &mut |t, _| Ok(values[t].clone()), &mut || ticks += 1).unwrap();
            let layers = family.decoder.layers.len();
            assert_eq!((ticks, used.tokens, used.chosen.len()), (layers + 1, 8, layers));
            for (layer, counts) in family.decoder.layers.iter().zip(&used.chosen) {
                let active = layer.experts.map_or(0, |e| e.active as u64);
                assert!(counts.iter().sum::<u64>() <= 8 * active && counts.is_empty() == (active == 0));
            }
            let logits = |probe: Option<&Probe>| {
                let mut rows = Rows::new();
                each_window(&checkpoint, probe, &windows, &mut || (), &mut |_, l| rows.extend(l)).unwrap();
                rows
            };
            let expected = logits(None);
            assert_eq!(found[0], Distance { mean: 1.0, min: 1.0, loss: 0.0 });
            assert!(found[1].loss > 0.0);
            for (run, found) in runs.iter().zip(&found) {
                let mut probe = Probe::default();
                for t in (0..tensors.len()).filter(|&t| run[t].is_some()) {
                    probe.replaced.insert(tensors[t].name.clone(), values[t].clone());
                }
                let alone = distance(&expected, &logits(Some(&probe)));
                assert!(
                    (alone.loss - found.loss).abs() <= 1e-6 + 1e-3 * alone.loss,
                    "{name}: {alone:?} {found:?}"
                );
                assert!((alone.min - found.min).abs() < 1e-5 && (alone.mean - found.mean).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn experts_replaced_apart_are_as_their_whole_tensor() {
        for name in ["gemma4-moe", "zaya"] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../fixtures/tiny-{name}"));
            let checkpoint = models::load(&path).unwrap();
            let family = models::open(models::load(&path).unwrap()).unwrap();
            let plan = family.plan(&PlanOptions::default()).unwrap();
            let ((tensor, _), own) =
                matrices(&plan).into_iter().find(|((t, _), _)| t.ends_with("experts.down_proj")).unwrap();
            let mut read = vec![0f32; own.iter().map(|m| m.weights() as usize).sum()];
            family.checked.read(&tensor, 0..read.len() as u64, &mut read).unwrap();
            let (coarse, n) = (coarse(&read), own.len());
            let part = |experts: &[usize]| -> Vec<f32> {
                let each = read.len() / n;
                experts.iter().flat_map(|&e| coarse[e * each..][..each].to_vec()).collect()
            };
            let (odd, even): (Vec<usize>, Vec<usize>) = (0..n).partition(|e| e % 2 == 1);
            let values = [coarse.clone(), part(&odd), part(&even)].map(Arc::new);
            let tensors = [vec![], odd, even].map(|experts| ReplacedTensor {
                layer: own[0].layer(),
                name: tensor.clone(),
                experts,
            });
            let windows = vec![vec![2, 7, 19, 33, 5], vec![2, 90, 91]];
            let model = ManyRuns { checkpoint: &checkpoint, tensors: &tensors, windows: &windows };
            let runs = [[true, false, false], [false, true, true], [false, true, false]];
            let runs = runs.map(|run| run.map(|is| is.then_some(0)).to_vec());
            let (found, _) = model.distances(&runs, &mut |t, _| Ok(values[t].clone()), &mut || ()).unwrap();
            assert!(found[0].loss > 0.0 && found[0] == found[1] && found[2] != found[0], "{name}: {found:?}");
        }
    }

    #[test]
    fn tokens_that_a_model_does_not_know_are_refused() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny-llama");
        let checkpoint = models::load(&path).unwrap();
        let model = ManyRuns { checkpoint: &checkpoint, tensors: &[], windows: &[vec![2, 1 << 20]] };
        let refused = model.distances(&[], &mut |_, _| unreachable!(), &mut || ()).unwrap_err().to_string();
        assert!(refused.contains("not in the vocabulary"), "{refused}");
    }
}
