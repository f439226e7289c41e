//! Soaks a bundle: runs the same tokens again and again, through every declared function, and watches states, memory
//! and numbers.
//!
//! ```text
//! cycle   passes of T1 tokens, T2 tokens, .., and again, until the context or the cycle is full
//!         in the middle: fork; save and restore; cut back by one token and run it again
//! watched every pass against the same pass of the first cycle, and the first cycle against the CPU executor
//!         memory of the process, SAMPLES times
//! ```
//!
//! A leak of one kilobyte per call, such as a missing autorelease pool, shows after thousands of calls as a rising line.

use anemoe_bundle::Chain;
use anemoe_coreml::{HELD_MEMORY, held_memory};
use anemoe_gates::golden_gate::cosine;
use anemoe_io::{Error, Random, Result};
use anemoe_runtime::backend::Backend;
use anemoe_runtime::cpu::CpuBackend;
use anemoe_runtime::model::{Logits, Model, Sequence};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Instant;

/// Least cosine of a pass with the same pass of the first cycle.
const LEAST_CYCLE_COSINE: f64 = 0.999;
/// Least median cosine of the first cycle with the CPU executor, as in the golden gate.
const LEAST_COSINE_WITH_CPU: f64 = 0.97;
/// Most passes of each token count in a cycle.
const PASSES_OF_A_CYCLE: usize = 4;
/// Fewest samples of the memory; there are at most twice as many.
const SAMPLES: usize = 20;
/// Share of the samples that is left out at the beginning, while caches and pools fill up.
const WARM_UP: f64 = 0.25;
/// Growth of memory, in bytes, that is no leak: allocators keep freed memory.
const NO_GROWTH: u64 = 32 << 20;
/// Least share of rising steps between samples for growth to be a leak.
const RISING: f64 = 0.75;

/// Figures of a soak.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SoakFigures {
    pub passes: u64,
    pub tokens: u64,
    pub calls: u64,
    pub seconds: f64,
    /// Names of shards that no token was routed to.
    pub never_called: Vec<String>,
    /// Lowest cosine of a pass with the same pass of the first cycle; 0 where a value is not a number.
    pub min_cosine: f64,
    /// Median cosine of the first cycle's passes with the CPU executor.
    pub median_cosine_with_cpu: f64,
    /// Number of passes whose cosine is below [`LEAST_CYCLE_COSINE`].
    pub wrong_passes: u64,
    pub first_wrong: Option<u64>,
    /// Number of checks of a fork, a saved and a cut sequence in which the next token's logits differed.
    pub wrong_states: u64,
    /// Bytes that the process held, sampled in the course of the soak.
    pub memory: Vec<u64>,
    /// Name of the memory figure: `phys_footprint` on macOS, `resident` elsewhere.
    pub memory_figure: String,
    /// Bytes by which each pass raised the held memory, after the warm-up.
    pub growth_per_pass: f64,
    /// True if memory rises without end.
    pub leaks: bool,
    /// Reasons for which the soak failed.
    pub faults: Vec<String>,
}

/// Least length of a soak, which ends after the cycle that reaches both figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SoakLength {
    /// Least number of passes of each token count.
    pub passes: u64,
    /// Least duration in seconds.
    pub seconds: f64,
}

/// Hears numbers above 0 that work counts, and tells whether the work may stop.
pub type Told<'a> = &'a mut dyn FnMut(u64) -> bool;

/// Samples the memory of the process at even distances, whatever the length of the soak.
struct MemoryWatch {
    /// Passes between two samples.
    each: u64,
    held: Vec<u64>,
}

impl MemoryWatch {
    fn pass(&mut self, number: u64) {
        if !number.is_multiple_of(self.each) {
            return;
        }
        self.held.extend(held_memory());
        if self.held.len() >= 2 * SAMPLES {
            // Every second sample stays: the multiples of twice the distance.
            self.held = self.held.chunks_exact(2).map(|pair| pair[1]).collect();
            self.each *= 2;
        }
    }
}

/// Pass of a cycle: its tokens, and the logits of its last token in the first cycle.
struct Lap {
    ids: Vec<u32>,
    first: Vec<f32>,
}

/// Soaks a bundle on a backend. `told` hears the number of passes after each pass, and after the CPU executor's
/// passes at the end, which do not count.
pub fn soak(bundle: &Path, backend: &dyn Backend, length: SoakLength, told: Told<'_>) -> Result<SoakFigures> {
    let model = Model::open(bundle, backend)?;
    let mut laps = cycle(model.chain())?;
    let memory_figure = HELD_MEMORY.into();
    let mut found = SoakFigures { min_cosine: 1.0, memory_figure, ..SoakFigures::default() };
    let of_each = (laps.len() / counts(model.chain()).len().max(1)).max(1) as u64;
    let cycles = length.passes.div_ceil(of_each).max(2);
    let each = (cycles * laps.len() as u64 / SAMPLES as u64).max(1);
    let mut watch = MemoryWatch { each, held: Vec::new() };
    let started = Instant::now();
    let mut sequence = model.sequence();
    let (mut done, middle) = (0, laps.len() / 2);
    while done < cycles || started.elapsed().as_secs_f64() < length.seconds {
        sequence.clear();
        for (i, lap) in laps.iter_mut().enumerate() {
            if i == middle && !states_hold(&model, &mut sequence, &lap.ids)? {
                found.wrong_states += 1;
            }
            let logits = last(&model, &mut sequence, &lap.ids)?;
            if done == 0 {
                lap.first = logits;
            } else {
                found.count(cosine(&lap.first, &logits));
            }
            found.tokens += lap.ids.len() as u64;
            found.passes += 1;
            told(found.passes);
            watch.pass(found.passes);
        }
        done += 1;
    }
    found.seconds = started.elapsed().as_secs_f64();
    for s in model.shard_stats() {
        found.calls += s.calls;
        found.never_called.extend((s.calls == 0).then_some(s.shard));
    }
    drop(sequence);
    drop(model);
    found.median_cosine_with_cpu = beside_cpu(bundle, &laps, &mut || told(found.passes))?;
    (found.growth_per_pass, found.leaks) = growth(&watch.held, watch.each);
    found.memory = watch.held;
    found.faults = faults(&found);
    Ok(found)
}

/// Runs the passes of a soak until `told` returns true; `told` hears the number of passes after each pass. The first
/// cycle, in which functions are loaded, is neither told nor counted. Returns tokens per second.
pub fn run_until(bundle: &Path, backend: &dyn Backend, told: Told<'_>) -> Result<f64> {
    let model = Model::open(bundle, backend)?;
    let laps = cycle(model.chain())?;
    let mut sequence = model.sequence();
    laps.iter().try_for_each(|lap| last(&model, &mut sequence, &lap.ids).map(drop))?;
    let (started, mut tokens) = (Instant::now(), 0);
    for (passes, lap) in (1..).zip(laps.iter().cycle()) {
        if (passes - 1) % laps.len() as u64 == 0 {
            sequence.clear();
        }
        last(&model, &mut sequence, &lap.ids)?;
        tokens += lap.ids.len();
        if told(passes) {
            break;
        }
    }
    Ok(tokens as f64 / started.elapsed().as_secs_f64().max(1e-9))
}

/// Returns the token counts of the chain's functions, ascending; of a range both ends.
fn counts(chain: &Chain) -> BTreeSet<usize> {
    let all = chain.tokens.iter().flat_map(|t| [t.min, t.max]).map(|n| n.min(chain.model.max_context));
    all.filter(|&n| n > 0).collect()
}

/// Makes the passes of a cycle: every token count in turn, as long as they fit the context with one token to spare.
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

/// Tells whether a fork, a saved and a cut-back sequence give the same next logits. Leaves `sequence` as it was.
fn states_hold(model: &Model, sequence: &mut Sequence, ids: &[u32]) -> Result<bool> {
    let at = sequence.position();
    let forked = last(model, &mut sequence.fork()?, &ids[..1])?;
    let bytes = sequence.save(model)?;
    let again = last(model, &mut model.restore(&bytes)?, &ids[..1])?;
    let own = last(model, sequence, &ids[..1])?;
    model.truncate(sequence, at)?;
    let cut = last(model, sequence, &ids[..1])?;
    model.truncate(sequence, at)?;
    Ok([&forked, &again, &cut].iter().all(|other| cosine(&own, other) >= LEAST_CYCLE_COSINE))
}

impl SoakFigures {
    /// Counts the cosine of the next pass.
    fn count(&mut self, cosine: f64) {
        self.min_cosine = self.min_cosine.min(cosine);
        if cosine < LEAST_CYCLE_COSINE {
            self.wrong_passes += 1;
            self.first_wrong.get_or_insert(self.passes);
        }
    }
}

/// Runs the first cycle on the CPU executor, and returns the median cosine with the recorded logits.
fn beside_cpu(bundle: &Path, laps: &[Lap], told: &mut dyn FnMut() -> bool) -> Result<f64> {
    let model = Model::open(bundle, &CpuBackend::default())?;
    let mut sequence = model.sequence();
    let mut all = Vec::new();
    for lap in laps {
        all.push(cosine(&last(&model, &mut sequence, &lap.ids)?, &lap.first));
        told();
    }
    all.sort_by(f64::total_cmp);
    Ok(all.get(all.len() / 2).copied().unwrap_or(0.0))
}

/// Returns the bytes of growth per pass after the warm-up, and whether they are a leak: more than [`NO_GROWTH`] in
/// all, and rising in nearly every step.
fn growth(memory: &[u64], passes_between: u64) -> (f64, bool) {
    let behind = memory.get((memory.len() as f64 * WARM_UP) as usize..).unwrap_or_default();
    let [first, .., end] = *behind else { return (0.0, false) };
    let steps = behind.len() - 1;
    let rising = behind.windows(2).filter(|w| w[1] > w[0]).count();
    let grown = end.saturating_sub(first);
    let per_pass = (end as f64 - first as f64) / (steps as u64 * passes_between) as f64;
    (per_pass, grown > NO_GROWTH && rising as f64 >= RISING * steps as f64)
}

fn faults(found: &SoakFigures) -> Vec<String> {
    let SoakFigures { passes, wrong_passes, min_cosine, wrong_states, memory_figure, .. } = found;
    let (with_cpu, growth) = (found.median_cosine_with_cpu, found.growth_per_pass);
    let first = found.first_wrong.map(|first| first + 1);
    let all = [
        first.map(|first| {
            format!(
                "{wrong_passes} of {passes} passes differ from the first ones, the first is number {first}: lowest cosine \
                 {min_cosine:.4}, {LEAST_CYCLE_COSINE} is wanted"
            )
        }),
        (with_cpu < LEAST_COSINE_WITH_CPU).then(|| {
            format!("median cosine {with_cpu:.4} with the CPU executor, {LEAST_COSINE_WITH_CPU} is wanted")
        }),
        (*wrong_states > 0).then(|| {
            format!("{wrong_states} times a fork, a saved sequence or a cut went on with other logits")
        }),
        found.leaks.then(|| {
            format!("memory rises by {growth:.0} bytes for each pass, without end ({memory_figure})")
        }),
    ];
    all.into_iter().flatten().collect()
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
        found.count(cosine(&[1.0, 2.0], &[1.0, 2.0]));
        assert_eq!(found.first_wrong, None);
        found.passes = 4;
        found.count(cosine(&[1.0, 2.0], &[1.0, f32::NAN]));
        assert_eq!((found.first_wrong, found.min_cosine), (Some(4), 0.0));
    }
}
