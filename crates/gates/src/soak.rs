//! Soaks a bundle: the same tokens again and again, through every function that is declared, with states, memory and numbers watched.
//!
//! ```text
//! cycle   pass of T1 tokens, of T2, .., of T1 again, until the context or the cycle is full
//!         in its middle: fork, save and restore, cut back by a token and run it again
//! watched every pass beside the same pass of the first cycle, and that beside the CPU executor
//!         memory of the process, [`SAMPLES`] times
//! ```
//!
//! A leak of a kilobyte for each call, such as a missing autorelease pool, shows after thousands of calls as a line that rises.

use crate::golden_gate::cosine;
use crate::{Error, Result};
use anemoe_bundle::Chain;
use anemoe_io::Random;
use anemoe_runtime::backend::Backend;
use anemoe_runtime::cpu::CpuBackend;
use anemoe_runtime::model::{Logits, Model, Sequence};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::Instant;

/// Least cosine of a pass with the same pass of the first cycle.
pub const LEAST_CYCLE_COSINE: f64 = 0.999;
/// Least median cosine of the first cycle with the CPU executor: that of the golden gate.
pub const LEAST_COSINE_WITH_CPU: f64 = 0.97;
/// Passes of each token count in a cycle at most.
const PASSES_OF_A_CYCLE: usize = 4;
/// Looks at the memory, at least; at most twice as many.
pub const SAMPLES: usize = 20;
/// Share of the looks at the beginning that is left out: caches and pools fill up.
const WARM_UP: f64 = 0.25;
/// Growth of memory that is none: allocators keep what they had.
const NO_GROWTH: u64 = 32 << 20;
/// Share of steps between samples that rise where memory leaks.
const RISING: f64 = 0.75;

/// Figures of a soak.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SoakFigures {
    /// Passes through the model.
    pub passes: u64,
    /// Tokens of them.
    pub tokens: u64,
    /// Calls of packages.
    pub calls: u64,
    /// Seconds.
    pub seconds: f64,
    /// Passes by token count.
    pub by_tokens: Vec<SoakedTokens>,
    /// Calls of each shard.
    pub shards: Vec<SoakedShard>,
    /// Shards that no token led to.
    pub never_called: Vec<String>,
    /// Lowest cosine of a pass with the same pass of the first cycle; 0 where a value is not a number.
    pub min_cosine: f64,
    /// Median cosine of the first cycle's passes with the CPU executor.
    pub median_cosine_with_cpu: f64,
    /// Passes that differ from the first cycle.
    pub wrong_passes: u64,
    /// Number of the first of them.
    pub first_wrong: Option<u64>,
    /// Forks, saved sequences and cuts whose next tokens differed.
    pub wrong_states: u64,
    /// Bytes that the process held, in the course of the soak.
    pub memory: Vec<u64>,
    /// Name of that figure: `phys_footprint` on macOS, `resident` elsewhere.
    #[serde(default)]
    pub memory_figure: String,
    /// Bytes by which a pass left more memory held, behind the warm-up.
    pub growth_per_pass: f64,
    /// Memory rises without end.
    pub leaks: bool,
    /// Reasons for which it failed.
    pub faults: Vec<String>,
}

/// Passes of one token count.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SoakedTokens {
    /// Tokens of a pass.
    pub tokens: usize,
    /// Passes.
    pub passes: u64,
}

/// Calls of one shard.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SoakedShard {
    /// Shard.
    pub shard: String,
    /// Calls.
    pub calls: u64,
}

/// Least length of a soak; it ends behind a cycle that reaches both.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SoakLength {
    /// Passes of each token count.
    pub passes: u64,
    /// Seconds.
    pub seconds: f64,
}

/// A figure of the memory that this process holds.
#[derive(Clone, Copy)]
pub struct MemoryFigure<'a> {
    /// Its name, for people.
    pub name: &'a str,
    /// Gives it in bytes, where the system tells.
    pub look: &'a dyn Fn() -> Option<u64>,
}

/// Looks at the memory of the process, evenly spaced however long a soak is.
struct MemoryWatch<'a> {
    look: &'a dyn Fn() -> Option<u64>,
    each: u64,
    held: Vec<u64>,
}

impl MemoryWatch<'_> {
    fn pass(&mut self, number: u64) {
        if !number.is_multiple_of(self.each) {
            return;
        }
        self.held.extend((self.look)());
        if self.held.len() >= 2 * SAMPLES {
            let mut i = 0;
            // The odd ones stay: those are the multiples of twice the distance.
            self.held.retain(|_| {
                i += 1;
                i % 2 == 0
            });
            self.each *= 2;
        }
    }
}

/// One pass of a cycle: its tokens, and the logits of its last token in the first cycle.
struct Lap {
    ids: Vec<u32>,
    first: Vec<f32>,
}

/// Soaks a bundle on a backend.
///
/// # Errors
/// The bundle cannot be opened, or a package fails. `told` hears the number of passes behind each of them, those of the CPU
/// executor at the end included, which do not count.
pub fn soak(
    bundle: &Path,
    backend: &dyn Backend,
    length: SoakLength,
    memory: MemoryFigure<'_>,
    told: &mut dyn FnMut(u64),
) -> Result<SoakFigures> {
    let model = Model::open(bundle, backend)?;
    let mut laps = cycle(model.chain())?;
    let mut found = SoakFigures { min_cosine: 1.0, ..SoakFigures::default() };
    let counts = counts(model.chain());
    found.by_tokens = counts.iter().map(|&tokens| SoakedTokens { tokens, passes: 0 }).collect();
    let of_each = (laps.len() / counts.len().max(1)).max(1) as u64;
    let cycles = length.passes.div_ceil(of_each).max(2);
    let each = (cycles * laps.len() as u64 / SAMPLES as u64).max(1);
    let mut watch = MemoryWatch { look: memory.look, each, held: Vec::new() };
    let started = Instant::now();
    let mut sequence = model.sequence();
    let mut done_cycles = 0;
    while done_cycles < cycles || started.elapsed().as_secs_f64() < length.seconds {
        sequence.clear();
        let middle = laps.len() / 2;
        for (i, lap) in laps.iter_mut().enumerate() {
            if i == middle && !states_hold(&model, &mut sequence, &lap.ids)? {
                found.wrong_states += 1;
            }
            let logits = last(&model, &mut sequence, &lap.ids)?;
            if done_cycles == 0 {
                lap.first = logits;
            } else {
                let number = found.passes;
                count_wrong(&mut found, number, closeness(&lap.first, &logits));
            }
            let own = found.by_tokens.iter_mut().find(|t| t.tokens == lap.ids.len());
            own.into_iter().for_each(|t| t.passes += 1);
            found.tokens += lap.ids.len() as u64;
            found.passes += 1;
            told(found.passes);
            watch.pass(found.passes);
        }
        done_cycles += 1;
    }
    found.seconds = started.elapsed().as_secs_f64();
    for s in model.shard_stats() {
        found.calls += s.calls;
        if s.calls == 0 {
            found.never_called.push(s.shard.clone());
        }
        found.shards.push(SoakedShard { shard: s.shard, calls: s.calls });
    }
    drop(sequence);
    drop(model);
    found.median_cosine_with_cpu = beside_cpu(bundle, &laps, &mut || told(found.passes))?;
    (found.growth_per_pass, found.leaks) = growth(&watch.held, watch.each);
    found.memory = watch.held;
    found.memory_figure = memory.name.into();
    found.faults = faults(&found);
    Ok(found)
}

/// Figures of a run without an end of its own.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunFigures {
    /// Tokens of the passes behind the first cycle.
    pub tokens: u64,
    /// Seconds that they took.
    pub seconds: f64,
}

/// Runs the passes of a soak until `told`, which hears their number behind each one, says that it is enough. The first cycle, in
/// which every function is loaded, counts neither for `told` nor for the figures.
///
/// # Errors
/// The bundle cannot be opened, or a package fails.
pub fn run_until(
    bundle: &Path,
    backend: &dyn Backend,
    told: &mut dyn FnMut(u64) -> bool,
) -> Result<RunFigures> {
    let model = Model::open(bundle, backend)?;
    let laps = cycle(model.chain())?;
    let mut sequence = model.sequence();
    for lap in &laps {
        last(&model, &mut sequence, &lap.ids)?;
    }
    let (started, mut passes, mut tokens) = (Instant::now(), 0, 0);
    loop {
        sequence.clear();
        for lap in &laps {
            last(&model, &mut sequence, &lap.ids)?;
            tokens += lap.ids.len() as u64;
            passes += 1;
            if told(passes) {
                return Ok(RunFigures { tokens, seconds: started.elapsed().as_secs_f64() });
            }
        }
    }
}

/// Token counts that the chain's functions are declared for; of a range its ends.
fn counts(chain: &Chain) -> Vec<usize> {
    let room = chain.model.max_context;
    let mut counts: Vec<usize> =
        chain.tokens.iter().flat_map(|t| [t.min, t.max]).map(|n| n.min(room)).collect();
    counts.retain(|&n| n > 0);
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// Passes of every token count in turn, of random tokens, as far as the context reaches with one token left.
fn cycle(chain: &Chain) -> Result<Vec<Lap>> {
    let counts = counts(chain);
    let mut random = Random::new(7);
    let vocabulary = chain.model.vocab_size.max(1);
    let mut room = chain.model.max_context.saturating_sub(1);
    let mut laps = Vec::new();
    for _ in 0..PASSES_OF_A_CYCLE {
        let tokens: usize = counts.iter().sum();
        if tokens > room && !laps.is_empty() {
            break;
        }
        for &n in counts.iter().filter(|n| **n <= room) {
            let id = |_| ((random.uniform() * vocabulary as f64) as usize).min(vocabulary - 1) as u32;
            laps.push(Lap { ids: (0..n).map(id).collect(), first: Vec::new() });
        }
        room = room.saturating_sub(tokens);
    }
    if laps.is_empty() {
        return Err(Error::usage("the bundle's context holds no pass that could be soaked"));
    }
    Ok(laps)
}

fn last(model: &Model, sequence: &mut Sequence, ids: &[u32]) -> Result<Vec<f32>> {
    Ok(model.append(sequence, ids, Logits::Last, Some(ids.len()))?.pop().unwrap_or_default())
}

/// A fork, a saved sequence and one that was cut back go on with the same logits. Leaves `sequence` as it was.
fn states_hold(model: &Model, sequence: &mut Sequence, ids: &[u32]) -> Result<bool> {
    let at = sequence.position();
    let mut fork = sequence.fork()?;
    let forked = last(model, &mut fork, &ids[..1])?;
    drop(fork);
    let bytes = sequence.save(model)?;
    let mut restored = model.restore(&bytes)?;
    let again = last(model, &mut restored, &ids[..1])?;
    drop(restored);
    let own = last(model, sequence, &ids[..1])?;
    model.truncate(sequence, at)?;
    let cut = last(model, sequence, &ids[..1])?;
    model.truncate(sequence, at)?;
    Ok([&forked, &again, &cut].iter().all(|other| closeness(&own, other) >= LEAST_CYCLE_COSINE))
}

/// Cosine; 0 where a value is not a number.
fn closeness(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() || a.iter().chain(b).any(|v| !v.is_finite()) { 0.0 } else { cosine(a, b) }
}

fn count_wrong(found: &mut SoakFigures, number: u64, cosine: f64) {
    found.min_cosine = found.min_cosine.min(cosine);
    if cosine < LEAST_CYCLE_COSINE {
        found.wrong_passes += 1;
        found.first_wrong.get_or_insert(number);
    }
}

/// Median cosine of the first cycle with the CPU executor.
fn beside_cpu(bundle: &Path, laps: &[Lap], told: &mut dyn FnMut()) -> Result<f64> {
    let model = Model::open(bundle, &CpuBackend::default())?;
    let mut sequence = model.sequence();
    let mut all = Vec::new();
    for lap in laps {
        all.push(closeness(&last(&model, &mut sequence, &lap.ids)?, &lap.first));
        told();
    }
    all.sort_by(f64::total_cmp);
    Ok(all.get(all.len() / 2).copied().unwrap_or(0.0))
}

/// Bytes for each pass behind the warm-up, and whether they are a leak: more than [`NO_GROWTH`] in all, and rising nearly always.
fn growth(memory: &[u64], passes_between: u64) -> (f64, bool) {
    let behind = memory.get((memory.len() as f64 * WARM_UP) as usize..).unwrap_or_default();
    let (Some(&first), Some(&end)) = (behind.first(), behind.last()) else { return (0.0, false) };
    let steps = behind.len().saturating_sub(1);
    if steps == 0 {
        return (0.0, false);
    }
    let rising = behind.windows(2).filter(|w| w[1] > w[0]).count();
    let grown = end.saturating_sub(first);
    let per_pass = (end as f64 - first as f64) / (steps as u64 * passes_between) as f64;
    (per_pass, grown > NO_GROWTH && rising as f64 >= RISING * steps as f64)
}

fn faults(found: &SoakFigures) -> Vec<String> {
    let mut all = Vec::new();
    if let Some(first) = found.first_wrong {
        all.push(format!(
            "{} of {} passes differ from the first ones, the first is number {}: lowest cosine {:.4}, {LEAST_CYCLE_COSINE} is wanted",
            found.wrong_passes, found.passes, first + 1, found.min_cosine
        ));
    }
    if found.median_cosine_with_cpu < LEAST_COSINE_WITH_CPU {
        all.push(format!(
            "median cosine {:.4} with the CPU executor, {LEAST_COSINE_WITH_CPU} is wanted",
            found.median_cosine_with_cpu
        ));
    }
    if found.wrong_states > 0 {
        all.push(format!(
            "{} times a fork, a saved sequence or a cut went on with other logits",
            found.wrong_states
        ));
    }
    if found.leaks {
        all.push(format!(
            "memory rises by {:.0} bytes for each pass, without end ({})",
            found.growth_per_pass, found.memory_figure
        ));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rising_line_is_a_leak_and_a_step_is_none() {
        let mb = 1u64 << 20;
        let rising: Vec<u64> = (0..20).map(|i| (100 + 4 * i) * mb).collect();
        let (per_pass, leaks) = growth(&rising, 10);
        assert!(leaks && (per_pass - 0.4 * mb as f64).abs() < 1.0);
        let step: Vec<u64> = (0..20).map(|i| if i < 10 { 100 * mb } else { 200 * mb }).collect();
        assert!(!growth(&step, 10).1);
        let filling: Vec<u64> = (0..20).map(|i| (100 + 50 * i.min(5)) * mb).collect();
        assert_eq!(growth(&filling, 10), (0.0, false));
        assert_eq!(growth(&[], 10), (0.0, false));
    }

    #[test]
    fn numbers_that_are_none_are_wrong() {
        let mut found = SoakFigures { min_cosine: 1.0, ..SoakFigures::default() };
        count_wrong(&mut found, 3, closeness(&[1.0, 2.0], &[1.0, 2.0]));
        assert_eq!(found.first_wrong, None);
        count_wrong(&mut found, 4, closeness(&[1.0, 2.0], &[1.0, f32::NAN]));
        assert_eq!((found.first_wrong, found.min_cosine), (Some(4), 0.0));
    }
}
