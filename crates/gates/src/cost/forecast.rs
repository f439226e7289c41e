//! Forecasts a pass of a model on a chip: the functions that the pass calls, how often, and their time.

use super::chips::{ChipProfile, SpeedCase};
use super::estimate::{Bottleneck, CallTime};
use super::work::CallWork;
use crate::program::PackageFacts;
use anemoe_bundle::{Chain, Run, Shard, ShardFunction, ShardKind, Step};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
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
        let mut found = TokenCalls::default();
        let (mut packs, mut chosen) = (0usize, 0usize);
        let is_run = |step: &&Step| matches!(step, Step::Run(_));
        let head = chain.head.iter().filter(is_run).count();
        let all = calls(chain, 1);
        let body = all.len() - head;
        for (_, often) in &all[..body] {
            found.layers += often;
        }
        for step in &chain.steps {
            match step {
                Step::Route { top_k, .. } => (packs, chosen) = (0, *top_k),
                Step::Run(run) if run.when.is_some() && packs >= chosen => {}
                Step::Run(run) => {
                    packs += usize::from(run.when.is_some());
                    found.layers_at_most += 1.0;
                }
                _ => {}
            }
        }
        found.head = head;
        found
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
/// its name, the tokens of a call and the number of calls.
fn function_for<'a>(
    packages: &[&'a Costed],
    run: &Run,
    pass: PassSize,
) -> Option<(&'a Costed, &'a str, usize, f64)> {
    let tokens = pass.tokens;
    let of_unit = || {
        packages.iter().flat_map(|p| p.functions.iter().filter(|f| f.unit == run.unit).map(move |f| (*p, f)))
    };
    let holds = |context: &usize| pass.context.is_some_and(|positions| positions <= *context);
    let context = of_unit().filter_map(|(_, f)| f.context.filter(holds)).min();
    let own = || of_unit().filter(|(_, f)| f.context == context);
    let fits = own().filter(|(_, f)| f.tokens.max >= tokens).min_by_key(|(_, f)| f.tokens.max);
    let (package, f) = fits.or_else(|| own().max_by_key(|(_, f)| f.tokens.max))?;
    let takes = if f.tokens.min < f.tokens.max { tokens.min(f.tokens.max) } else { f.tokens.max };
    Some((package, &f.name, takes, (tokens as f64 / f.tokens.max as f64).max(1.0).ceil()))
}

/// Call of a pass with its work.
struct PassCall {
    kind: ShardKind,
    often: f64,
    work: CallWork,
}

fn planned(chain: &Chain, packages: &[Costed], pass: PassSize) -> Vec<PassCall> {
    let by_name: BTreeMap<&str, &Costed> = packages.iter().map(|p| (p.name.as_str(), p)).collect();
    let mut all = Vec::new();
    for (run, often) in calls(chain, pass.tokens) {
        let own: Vec<&Costed> = run.shards().filter_map(|name| by_name.get(name).copied()).collect();
        let Some((package, name, takes, times)) = function_for(&own, run, pass) else { continue };
        // Shards of one type share a program, whose functions may be named after another shard's experts. The order
        // by name is the same.
        let mut names: Vec<&str> = package.functions.iter().map(|f| f.name.as_str()).collect();
        names.sort_unstable();
        let at = names.iter().position(|n| *n == name);
        let Some(graph) = at.and_then(|i| package.facts.graphs.get(i)) else { continue };
        let work = CallWork::of(graph, takes, run.kept.keys());
        all.push(PassCall { kind: package.kind, often: often * times, work });
    }
    all
}

/// Forecasts a pass of a chain on a chip.
pub fn forecast(chain: &Chain, packages: &[Costed], chip: &ChipProfile, pass: PassSize) -> Forecast {
    let planned = planned(chain, packages, pass);
    let mut kinds: Vec<KindForecast> = Vec::new();
    let mut bottlenecks: BTreeMap<(usize, Bottleneck), f64> = BTreeMap::new();
    for p in &planned {
        let time = |case| p.often * CallTime::of(&p.work, chip, case).total();
        let ms = Span::of(time);
        let at = kinds.iter().position(|k| k.kind == p.kind).unwrap_or_else(|| {
            kinds.push(KindForecast {
                kind: p.kind,
                calls: 0.0,
                bytes: 0.0,
                weights: 0.0,
                multiply_adds: 0.0,
                cache_bytes: 0.0,
                ms: Span::default(),
                bottleneck: Bottleneck::Call,
            });
            kinds.len() - 1
        });
        let k = &mut kinds[at];
        k.calls += p.often;
        k.bytes += p.often * p.work.bytes;
        k.weights += p.often * p.work.weights;
        k.multiply_adds += p.often * p.work.multiply_adds;
        k.cache_bytes += p.often * p.work.cache_bytes;
        k.ms = Span { low: k.ms.low + ms.low, likely: k.ms.likely + ms.likely, high: k.ms.high + ms.high };
        *bottlenecks.entry((at, CallTime::of(&p.work, chip, SpeedCase::Likely).bottleneck())).or_default() +=
            ms.likely;
    }
    let mut whole: BTreeMap<Bottleneck, f64> = BTreeMap::new();
    for (i, k) in kinds.iter_mut().enumerate() {
        let own = bottlenecks.iter().filter(|((at, _), _)| *at == i);
        for ((_, b), ms) in own.clone() {
            *whole.entry(*b).or_default() += ms;
        }
        let most = own.max_by(|a, b| a.1.total_cmp(b.1));
        k.bottleneck = most.map_or(Bottleneck::Call, |((_, b), _)| *b);
    }
    let sum = |of: fn(&KindForecast) -> f64| kinds.iter().map(of).sum::<f64>();
    let ms = Span { low: sum(|k| k.ms.low), likely: sum(|k| k.ms.likely), high: sum(|k| k.ms.high) };
    Forecast {
        chip: chip.chip.clone(),
        tokens: pass.tokens,
        context: pass.context,
        calls: sum(|k| k.calls),
        ms,
        tok_s: ms.per_second(pass.tokens as f64),
        bundle_bytes: packages.iter().filter_map(|p| p.weight_bytes).map(|b| b as f64).sum(),
        bottleneck: whole.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).map_or(Bottleneck::Call, |b| b.0),
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
    let ms = |case| read / (chip.storage_gb_s.speed(case) * 1e6);
    let extra = Span::of(ms);
    let now = forecast.ms;
    let ms =
        Span { low: now.low + extra.low, likely: now.likely + extra.likely, high: now.high + extra.high };
    forecast.bottleneck = if extra.likely > now.likely { Bottleneck::Storage } else { forecast.bottleneck };
    forecast.tok_s = ms.per_second(forecast.tokens as f64);
    forecast.ms = ms;
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
