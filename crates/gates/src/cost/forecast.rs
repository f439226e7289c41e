//! A pass of a model on a chip: which functions a pass calls, how often, and what they take together.

use super::chips::{ChipProfile, SpeedCase};
use super::estimate::{Bottleneck, CallTime};
use super::work::CallWork;
use crate::residency::rule::PackageFacts;
use anemoe_bundle::{Chain, Run, Shard, ShardFunction, ShardKind, Step};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A package with what its functions do.
pub struct Costed {
    /// Name of the shard.
    pub name: String,
    /// Its kind.
    pub kind: ShardKind,
    /// Its functions, with the token counts that they take. The chain of a plan has no shards yet.
    pub functions: Vec<ShardFunction>,
    /// Programs of the functions.
    pub facts: Arc<PackageFacts>,
    /// Bytes of weights as stored, shared ones once; where known.
    pub weight_bytes: Option<u64>,
}

impl Costed {
    /// A package that was read, with its functions as the chain has them.
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

/// Milliseconds that lie between two bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// Milliseconds with every figure as fast as it may be.
    pub low: f64,
    /// Milliseconds with the likely figures.
    pub likely: f64,
    /// Milliseconds with every figure as slow as it may be.
    pub high: f64,
}

impl Span {
    fn of(value: impl Fn(SpeedCase) -> f64) -> Span {
        Span { low: value(SpeedCase::Fast), likely: value(SpeedCase::Likely), high: value(SpeedCase::Slow) }
    }

    /// `amount` for each of these milliseconds a second: a speed from a time.
    pub fn per_second(&self, amount: f64) -> Span {
        let speed = |ms: f64| 1e3 * amount / ms.max(1e-9);
        Span { low: speed(self.high), likely: speed(self.likely), high: speed(self.low) }
    }
}

/// Shards of one kind in a pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KindForecast {
    /// Kind.
    pub kind: ShardKind,
    /// Calls in a pass; packs of experts as often as some expert of theirs is expected to be chosen.
    pub calls: f64,
    /// Bytes of weights.
    pub bytes: f64,
    /// Weights.
    pub weights: f64,
    /// Multiply-adds.
    pub multiply_adds: f64,
    /// Bytes of caches, read and written.
    pub cache_bytes: f64,
    /// Milliseconds.
    pub ms: Span,
    /// The part that takes most of it.
    pub bottleneck: Bottleneck,
}

/// A pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// Chip.
    pub chip: String,
    /// Tokens of the pass.
    pub tokens: usize,
    /// Positions behind the pass, where functions see the slots for them alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<usize>,
    /// Forecasts by kind of shard.
    pub kinds: Vec<KindForecast>,
    /// Calls of the pass.
    pub calls: f64,
    /// Milliseconds of the pass.
    pub ms: Span,
    /// Tokens a second, if every one of them counts.
    pub tok_s: Span,
    /// Bytes of the packages.
    pub bundle_bytes: f64,
    /// The part that takes most of it.
    pub bottleneck: Bottleneck,
}

/// Calls of a pass of one token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TokenCalls {
    /// Calls of layers, packs of experts as often as some expert of theirs is expected to be chosen.
    pub layers: f64,
    /// Calls of layers if every pack has a chosen expert, as far as there are experts to choose.
    pub layers_at_most: f64,
    /// Calls of the head.
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

/// The likelihood that a pack with `own` of `all` experts is called in a pass of `tokens` tokens that choose `chosen` each.
fn called(own: usize, all: usize, chosen: usize, tokens: usize) -> f64 {
    let (own, all) = (own.min(all), all.max(1));
    // C(all - own, chosen) / C(all, chosen), factor by factor.
    let missed: f64 = (0..chosen)
        .map(|i| all.saturating_sub(own + i) as f64 / all.saturating_sub(i).max(1) as f64)
        .product();
    1.0 - missed.powi(tokens.min(1 << 16) as i32)
}

/// Expected calls of each step of a pass.
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

/// Tokens of a pass, and positions behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassSize {
    /// Tokens.
    pub tokens: usize,
    /// Positions; none for as many as the caches hold.
    pub context: Option<usize>,
}

impl PassSize {
    /// A pass at the end of the context.
    pub const fn of(tokens: usize) -> PassSize {
        PassSize { tokens, context: None }
    }
}

/// The function of these packages that takes a pass, its package, and how often it is called for it.
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

/// A call of a pass, ready to be timed.
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
        // Shards of one type share a program whose functions may be named after another's experts: the order is the same.
        let mut names: Vec<&str> = package.functions.iter().map(|f| f.name.as_str()).collect();
        names.sort_unstable();
        let at = names.iter().position(|n| *n == name);
        let Some(graph) = at.and_then(|i| package.facts.graphs.get(i)) else { continue };
        let work = CallWork::of(graph, takes, run.kept.keys());
        all.push(PassCall { kind: package.kind, often: often * times, work });
    }
    all
}

/// Forecasts a pass.
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

/// Adds what a pass takes when the packages do not fit into `memory` bytes: what it reads comes from storage, since every package
/// is called in turn and the first is gone when the last was read.
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

/// Tokens that a verifier call of `drafted` drafts gives on average when each is right with probability `p`.
pub fn tokens_per_call(p: f64, drafted: usize) -> f64 {
    (0..=drafted).map(|i| p.powi(i as i32)).sum()
}

#[cfg(test)]
mod tests {
    use super::{called, tokens_per_call};

    #[test]
    fn packs_are_called_as_often_as_they_are_chosen() {
        // 16 of 128 experts, 8 chosen: 1 - (112 .. 105) / (128 .. 121).
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
