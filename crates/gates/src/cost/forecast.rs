//! Forecasts a pass of a model on a chip: the functions that the pass calls, how often, and their time.

use super::chips::{ChipProfile, SpeedCase};
use super::estimate::{Bottleneck, call_ms};
use super::work::CallWork;
use crate::program_facts::PackageFacts;
use crate::program_facts::facts;
use anemoe_bundle::{Chain, Run, Shard, ShardFunction, ShardKind, Step};
use anemoe_mlpackage::package::Package;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Package with the facts of its functions.
pub struct Costed {
    /// Name of the shard.
    pub name: String,
    /// Kind of the shard.
    pub kind: ShardKind,
    /// Functions of the shard, with the token counts that they take. The chain of a plan has no shards yet.
    pub functions: Vec<ShardFunction>,
    /// Facts of the functions' programs.
    pub facts: Arc<PackageFacts>,
    /// Bytes of weights as stored, shared ones once; absent where not known.
    pub weight_bytes: Option<u64>,
}

impl Costed {
    /// Makes the entry of a package that was read, with its functions as in the chain.
    pub fn of_package(shard: &Shard, facts: PackageFacts) -> Costed {
        let weight_bytes = facts.weight_bytes;
        Costed {
            name: shard.name.clone(),
            kind: shard.kind,
            functions: shard.functions.clone(),
            facts: Arc::new(facts),
            weight_bytes,
        }
    }
}

/// Opens the packages of a bundle, and counts the facts of their functions.
///
/// # Errors
/// A package is missing or invalid.
pub fn open_packages(bundle: &Path, chain: &Chain) -> crate::Result<Vec<Costed>> {
    let open = |shard: &Shard| {
        let package = Package::open(&bundle.join(&shard.file))?;
        Ok(Costed::of_package(shard, facts(package.model())))
    };
    chain.shards.iter().map(open).collect()
}

/// Range of a time in milliseconds, or of another figure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// Value with every figure of the chip at its fastest.
    pub low: f64,
    /// Value with the likely figures.
    pub likely: f64,
    /// Value with every figure of the chip at its slowest.
    pub high: f64,
}

impl Span {
    fn of(value: impl Fn(SpeedCase) -> f64) -> Span {
        Span { low: value(SpeedCase::Fast), likely: value(SpeedCase::Likely), high: value(SpeedCase::Slow) }
    }

    fn plus(&self, other: &Span) -> Span {
        Span { low: self.low + other.low, likely: self.likely + other.likely, high: self.high + other.high }
    }

    /// Converts a time into a speed: `1000 * amount / ms`, in units of `amount` per second.
    pub fn per_second(&self, amount: f64) -> Span {
        let speed = |ms: f64| 1e3 * amount / ms.max(1e-9);
        Span { low: speed(self.high), likely: speed(self.likely), high: speed(self.low) }
    }
}

/// Work and time of the shards of one kind in a pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KindForecast {
    /// Kind of the shards.
    pub kind: ShardKind,
    /// Expected number of calls. A pack of experts is called only if one of its experts is chosen.
    pub calls: f64,
    /// Bytes of weights.
    pub bytes: f64,
    /// Number of weights.
    pub weights: f64,
    /// Number of multiply-adds.
    pub multiply_adds: f64,
    /// Bytes of caches, read and written.
    pub cache_bytes: f64,
    /// Time in milliseconds.
    pub ms: Span,
    /// Part that takes most of the time.
    pub bottleneck: Bottleneck,
}

impl KindForecast {
    fn empty(kind: ShardKind) -> KindForecast {
        let (ms, bottleneck) = (Span::default(), Bottleneck::Call);
        let [calls, bytes, weights, multiply_adds, cache_bytes] = [0.0; 5];
        KindForecast { kind, calls, bytes, weights, multiply_adds, cache_bytes, ms, bottleneck }
    }
}

/// Forecast of a pass on a chip.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// Name of the chip.
    pub chip: String,
    /// Number of tokens of the pass.
    pub tokens: usize,
    /// Positions after the pass, where functions of a context bucket run; absent for the whole context.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<usize>,
    /// Forecasts by kind of shard.
    pub kinds: Vec<KindForecast>,
    /// Expected number of calls.
    pub calls: f64,
    /// Time of the pass in milliseconds.
    pub ms: Span,
    /// Tokens per second, if every token counts.
    pub tok_s: Span,
    /// Bytes of weights of all packages.
    pub bundle_bytes: f64,
    /// Part that takes most of the time.
    pub bottleneck: Bottleneck,
}

/// Number of calls of a pass of one token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TokenCalls {
    /// Expected calls of layers. A pack of experts is called only if one of its experts is chosen.
    pub layers: f64,
    /// Most calls of layers: every chosen expert in another pack.
    pub layers_at_most: f64,
    /// Number of calls of the head.
    pub head: usize,
}

impl TokenCalls {
    /// Counts the calls of a chain.
    pub fn of(chain: &Chain) -> TokenCalls {
        let head = chain.head.iter().filter(|step| matches!(step, Step::Run(_))).count();
        let all = calls(chain, 1);
        let layers = all[..all.len() - head].iter().map(|(_, often)| often).sum();
        let mut layers_at_most = 0.0;
        let (mut packs, mut chosen) = (0usize, 0usize);
        for step in &chain.steps {
            match step {
                Step::Route { top_k, .. } => (packs, chosen) = (0, *top_k),
                Step::Run(run) if run.when.is_some() && packs >= chosen => {}
                Step::Run(run) => {
                    packs += usize::from(run.when.is_some());
                    layers_at_most += 1.0;
                }
                _ => {}
            }
        }
        TokenCalls { layers, layers_at_most, head }
    }
}

/// Computes the probability that a pack with `own` of `all` experts is called in a pass of `tokens` tokens, each with
/// `chosen` experts.
fn called(own: usize, all: usize, chosen: usize, tokens: usize) -> f64 {
    let (own, all) = (own.min(all), all.max(1));
    // C(all - own, chosen) / C(all, chosen), factor by factor: no expert of the pack is chosen by a token.
    let missed: f64 = (0..chosen)
        .map(|i| all.saturating_sub(own + i) as f64 / all.saturating_sub(i).max(1) as f64)
        .product();
    1.0 - missed.powi(tokens.min(1 << 16) as i32)
}

/// Returns the expected number of calls of each step of a pass.
fn calls(chain: &Chain, tokens: usize) -> Vec<(&Run, f64)> {
    let steps = || chain.steps.iter().chain(&chain.head);
    let mut experts: BTreeMap<&str, usize> = BTreeMap::new();
    for step in steps() {
        if let Step::Run(Run { when: Some(when), .. }) = step {
            let end = when.rows.start + when.rows.count;
            let known = experts.entry(&when.register).or_default();
            *known = (*known).max(end);
        }
    }
    let mut chosen: BTreeMap<&str, usize> = BTreeMap::new();
    let mut all = Vec::new();
    for step in steps() {
        match step {
            Step::Route { weights, top_k, .. } => drop(chosen.insert(weights, *top_k)),
            Step::Run(run) => {
                let often = run.when.as_ref().map_or(1.0, |when| {
                    let register = when.register.as_str();
                    let k = chosen.get(register).copied().unwrap_or(1);
                    called(when.rows.count, experts.get(register).copied().unwrap_or(1), k, tokens)
                });
                all.push((run, often));
            }
            _ => {}
        }
    }
    all
}

/// Number of tokens of a pass, and positions after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassSize {
    /// Number of tokens.
    pub tokens: usize,
    /// Positions after the pass; `None` for as many as the caches hold.
    pub context: Option<usize>,
}

impl PassSize {
    /// Makes a pass at the end of the context.
    pub const fn of(tokens: usize) -> PassSize {
        PassSize { tokens, context: None }
    }
}

/// Finds the function for a pass among packages with the same function for several token counts. Returns its package,
/// its name and the number of calls.
fn function_for<'a>(
    packages: &[&'a Costed],
    run: &Run,
    pass: PassSize,
) -> Option<(&'a Costed, &'a str, f64)> {
    let of_unit = || {
        packages.iter().flat_map(|p| p.functions.iter().filter(|f| f.unit == run.unit).map(move |f| (*p, f)))
    };
    let holds = |context: &usize| pass.context.is_some_and(|positions| positions <= *context);
    let context = of_unit().filter_map(|(_, f)| f.context.filter(holds)).min();
    let own = || of_unit().filter(|(_, f)| f.context == context);
    let fits = own().filter(|(_, f)| f.tokens.max >= pass.tokens).min_by_key(|(_, f)| f.tokens.max);
    let (package, f) = fits.or_else(|| own().max_by_key(|(_, f)| f.tokens.max))?;
    Some((package, &f.name, (pass.tokens as f64 / f.tokens.max as f64).max(1.0).ceil()))
}

/// Lists the calls of a pass: kind of the shard, expected number of calls, and work of a call.
fn planned(chain: &Chain, packages: &[Costed], pass: PassSize) -> Vec<(ShardKind, f64, CallWork)> {
    let by_name: BTreeMap<&str, &Costed> = packages.iter().map(|p| (p.name.as_str(), p)).collect();
    let mut all = Vec::new();
    for (run, often) in calls(chain, pass.tokens) {
        let own: Vec<&Costed> = run.shards().filter_map(|name| by_name.get(name).copied()).collect();
        let Some((package, name, times)) = function_for(&own, run, pass) else { continue };
        // Shards of one type share a program, whose functions may be named after another shard's experts. The order
        // by name is the same.
        let mut names: Vec<&str> = package.functions.iter().map(|f| f.name.as_str()).collect();
        names.sort_unstable();
        let at = names.iter().position(|n| *n == name);
        let Some(graph) = at.and_then(|i| package.facts.graphs.get(i)) else { continue };
        all.push((package.kind, often * times, CallWork::of(graph, run.kept.keys())));
    }
    all
}

/// Returns the bottleneck of the calls that take most of the time.
fn longest(ms: &BTreeMap<Bottleneck, f64>) -> Bottleneck {
    ms.iter().max_by(|a, b| a.1.total_cmp(b.1)).map_or(Bottleneck::Call, |(bottleneck, _)| *bottleneck)
}

/// Forecasts a pass of a chain on a chip.
pub fn forecast(chain: &Chain, packages: &[Costed], chip: &ChipProfile, pass: PassSize) -> Forecast {
    let mut kinds: Vec<KindForecast> = Vec::new();
    // Milliseconds by bottleneck, of each kind and of the pass.
    let mut of_kinds: BTreeMap<ShardKind, BTreeMap<Bottleneck, f64>> = BTreeMap::new();
    let mut whole: BTreeMap<Bottleneck, f64> = BTreeMap::new();
    for (kind, often, work) in planned(chain, packages, pass) {
        let ms = Span::of(|case| often * call_ms(&work, chip, case).0);
        let (_, bottleneck) = call_ms(&work, chip, SpeedCase::Likely);
        let sums = of_kinds.entry(kind).or_default();
        for sums in [&mut *sums, &mut whole] {
            *sums.entry(bottleneck).or_default() += ms.likely;
        }
        let at = kinds.iter().position(|k| k.kind == kind).unwrap_or_else(|| {
            kinds.push(KindForecast::empty(kind));
            kinds.len() - 1
        });
        let k = &mut kinds[at];
        k.calls += often;
        k.bytes += often * work.bytes;
        k.weights += often * work.weights;
        k.multiply_adds += often * work.multiply_adds;
        k.cache_bytes += often * work.cache_bytes;
        k.ms = k.ms.plus(&ms);
        k.bottleneck = longest(sums);
    }
    let ms = kinds.iter().fold(Span::default(), |sum, k| sum.plus(&k.ms));
    Forecast {
        chip: chip.chip.clone(),
        tokens: pass.tokens,
        context: pass.context,
        calls: kinds.iter().map(|k| k.calls).sum(),
        ms,
        tok_s: ms.per_second(pass.tokens as f64),
        bundle_bytes: packages.iter().filter_map(|p| p.weight_bytes).map(|b| b as f64).sum(),
        bottleneck: longest(&whole),
        kinds,
    }
}

/// Adds the time of storage where the packages do not fit into `memory` bytes. The pass reads all of its weights from
/// storage: packages run in turn, and the first one is evicted when the last one is read.
pub fn with_memory(mut forecast: Forecast, chip: &ChipProfile, memory: f64) -> Forecast {
    if forecast.bundle_bytes <= memory {
        return forecast;
    }
    let read: f64 = forecast.kinds.iter().map(|k| k.bytes).sum();
    let extra = Span::of(|case| read / (chip.storage_gb_s.speed(case) * 1e6));
    if extra.likely > forecast.ms.likely {
        forecast.bottleneck = Bottleneck::Storage;
    }
    forecast.ms = forecast.ms.plus(&extra);
    forecast.tok_s = forecast.ms.per_second(forecast.tokens as f64);
    forecast
}

/// Computes `1 + p + .. + p^drafted`: the mean number of tokens of a verifier call with `drafted` drafts, each right
/// with probability `p`.
pub fn tokens_per_call(p: f64, drafted: usize) -> f64 {
    (0..=drafted).map(|i| p.powi(i as i32)).sum()
}

#[cfg(test)]
mod tests {
    use super::{called, tokens_per_call};

    #[test]
    fn packs_are_called_as_often_as_they_are_chosen() {
        // 16 of 128 experts in the pack, 8 chosen: 1 - (112 * .. * 105) / (128 * .. * 121).
        assert!((called(16, 128, 8, 1) - 0.668).abs() < 0.001, "{}", called(16, 128, 8, 1));
        assert_eq!(called(16, 16, 1, 1), 1.0);
        assert!((called(1, 16, 1, 1) - 1.0 / 16.0).abs() < 1e-12);
        assert!(called(1, 128, 8, 4) > 3.0 * called(1, 128, 8, 1) && called(1, 128, 8, 4) < 0.25);
    }

    #[test]
    fn drafts_that_are_right_give_tokens() {
        assert!((tokens_per_call(0.7, 3) - 2.533).abs() < 0.001);
        assert_eq!((tokens_per_call(0.0, 3), tokens_per_call(1.0, 3)), (1.0, 4.0));
    }
}
