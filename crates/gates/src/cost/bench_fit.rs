//! Calibrates a chip's profile with a run of `anemoe bench --save` on a Mac.

use super::chips::{CALIBRATED, ChipFigure, ChipProfile};
use super::forecast::{Forecast, KindForecast};
use serde::Deserialize;

/// Fields of a bench's document that are read; other fields are ignored.
#[derive(Deserialize)]
struct BenchDocument {
    schema: u32,
    kinds: Vec<BenchKind>,
    decode: Vec<BenchDecode>,
}

#[derive(Deserialize)]
struct BenchKind {
    name: String,
    ms_per_token: f64,
}

#[derive(Deserialize)]
struct BenchDecode {
    ms_per_token: f64,
}

/// Schema version of the bench documents that are read.
const SCHEMA: u32 = 1;
/// Relative error of a calibrated figure: medians of runs on one machine differ by as much.
const SPREAD: f64 = 0.1;

/// Milliseconds for a token that a machine can have: 100 ns to 1000 s.
const PLAUSIBLE_MS: std::ops::RangeInclusive<f64> = 1e-4..=1e6;

/// Least share of the predicted time besides the fixed cost of calls, for a bench to show speeds. Below it, only the
/// cost of a call is fitted, and rates stay as published.
const TELLING: f64 = 0.25;

/// Calibrates a chip by the measured kinds of shards, or the whole of decoding. Where calls take nearly all of the predicted
/// time, the bench shows the cost of a call; else one factor on all speeds. `forecast` is the forecast for the same bundle and
/// one token with `chip`; `source` says who measured.
///
/// # Errors
/// The document is not a bench's, or has no kind that the forecast has; the message says which.
pub fn calibrate(
    text: &[u8],
    forecast: &Forecast,
    chip: &ChipProfile,
    source: &str,
) -> Result<ChipProfile, String> {
    let bench: BenchDocument = anemoe_io::json::parse(text)
        .map_err(|e| format!("not a document that `anemoe bench --save` writes: {e}"))?;
    if bench.schema != SCHEMA {
        return Err(format!(
            "schema {}: this version reads bench documents of schema {SCHEMA}",
            bench.schema
        ));
    }
    let times = bench.kinds.iter().map(|k| k.ms_per_token).chain(bench.decode.iter().map(|d| d.ms_per_token));
    if let Some(ms) = times.into_iter().find(|ms| *ms != 0.0 && !PLAUSIBLE_MS.contains(ms)) {
        return Err(format!("{ms:e} ms for a token are a time that no machine has"));
    }
    // Calls, predicted milliseconds and measured milliseconds.
    let of_kind = |k: &KindForecast| {
        let own = bench.kinds.iter().find(|b| b.name == k.kind.name() && b.ms_per_token > 0.0)?;
        Some((k.calls, k.ms.likely, own.ms_per_token))
    };
    let of_whole = |d: &BenchDecode| (forecast.calls, forecast.ms.likely, d.ms_per_token);
    let whole = bench.decode.iter().find(|d| d.ms_per_token > 0.0).map(of_whole);
    let kinds = forecast.kinds.iter().filter_map(of_kind);
    let kinds = kinds.reduce(|sum, k| (sum.0 + k.0, sum.1 + k.1, sum.2 + k.2));
    let (calls, predicted, measured) =
        kinds.or(whole).ok_or("the bench has no times: neither of kinds of shards nor of decoding")?;
    let in_calls = calls * chip.call_ms.likely;
    let rest = predicted - in_calls;
    let figure = |likely: f64| ChipFigure {
        low: likely * (1.0 - SPREAD),
        likely,
        high: likely * (1.0 + SPREAD),
        source: source.into(),
    };
    let mut profile = chip.clone();
    profile.chip = format!("{}{CALIBRATED}", chip.base_name());
    if rest < TELLING * predicted {
        // Rates that are far too slow must not make a call cost nothing.
        profile.call_ms = figure((measured - rest).max(0.1 * measured) / calls.max(1e-9));
    } else {
        let factor = ((measured - in_calls) / rest).max(0.01);
        let speeds = [
            &mut profile.bandwidth_gb_s,
            &mut profile.rate_gw_s,
            &mut profile.head_rate_gw_s,
            &mut profile.peak_tmac_s,
        ];
        speeds.into_iter().for_each(|f| *f = figure(f.likely / factor));
    }
    let checked = profile.check().map_err(|what| format!("times that no machine has: {what}"));
    checked.map(|()| profile)
}
