//! Calibrates a chip's profile with a run of `anemoe bench --save` on a Mac.

use super::chips::{CALIBRATED, ChipFigure, ChipProfile};
use super::forecast::Forecast;
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

/// Fits `ms = calls * call + factor * rest` to the measured kinds of shards: the cost of a call, and one factor on all
/// speeds. `forecast` is the forecast for the same bundle and one token with `chip`; `source` says who measured. A small
/// model shows only the cost of a call.
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
    let call = chip.call_ms.likely;
    let mut rows: Vec<(f64, f64, f64)> = Vec::new();
    for k in &forecast.kinds {
        let own = bench.kinds.iter().find(|b| b.name == k.kind.name());
        let measured = own.map(|b| b.ms_per_token).filter(|ms| ms.is_finite() && *ms > 0.0);
        rows.extend(measured.map(|ms| (k.calls, k.ms.likely - k.calls * call, ms)));
    }
    if rows.is_empty() {
        let whole = bench.decode.iter().map(|d| d.ms_per_token).find(|ms| ms.is_finite() && *ms > 0.0);
        let ms = whole.ok_or("the bench has no times: neither of kinds of shards nor of decoding")?;
        rows.push((forecast.calls, forecast.ms.likely - forecast.calls * call, ms));
    }
    let rest = rows.iter().map(|r| r.1).sum::<f64>();
    let predicted = rest + rows.iter().map(|r| r.0).sum::<f64>() * call;
    let tells_speeds = rest >= TELLING * predicted;
    let (call, factor) = if tells_speeds { fit(&rows, call) } else { (fit_call(&rows), 1.0) };
    let mut profile = chip.clone();
    profile.chip = format!("{}{CALIBRATED}", chip.base_name());
    let figure = |likely: f64| ChipFigure {
        low: likely * (1.0 - SPREAD),
        likely,
        high: likely * (1.0 + SPREAD),
        source: source.into(),
    };
    profile.call_ms = figure(call);
    let mut speeds = [
        &mut profile.bandwidth_gb_s,
        &mut profile.rate_gw_s,
        &mut profile.head_rate_gw_s,
        &mut profile.peak_tmac_s,
    ];
    if tells_speeds {
        speeds.iter_mut().for_each(|f| **f = figure(f.likely / factor));
    }
    let checked = profile.check().map_err(|what| format!("times that no machine has: {what}"));
    checked.map(|()| profile)
}

/// Fits the milliseconds of a call alone, where calls take nearly all of the time. Rows are calls, predicted
/// milliseconds of the rest, measured milliseconds.
fn fit_call(rows: &[(f64, f64, f64)]) -> f64 {
    let sum = |of: fn(&(f64, f64, f64)) -> f64| rows.iter().map(of).sum::<f64>();
    let all = sum(|r| r.2);
    // Rates that are far too slow must not make a call cost nothing.
    ((all - sum(|r| r.1)).max(0.1 * all)) / sum(|r| r.0).max(1e-9)
}

/// Fits `ms = calls * call + factor * rest` to rows (calls, rest, ms) by least squares of relative errors, so that
/// small kinds count as much as large ones. Returns the call and the factor. The call stays as given where the rows
/// do not separate calls from the rest.
fn fit(rows: &[(f64, f64, f64)], call: f64) -> (f64, f64) {
    let (mut aa, mut ab, mut bb, mut ay, mut by) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for &(calls, rest, ms) in rows {
        let (a, b) = (calls / ms, rest / ms);
        aa += a * a;
        ab += a * b;
        bb += b * b;
        ay += a;
        by += b;
    }
    let determinant = aa * bb - ab * ab;
    let (fitted, factor) = ((ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant);
    if rows.len() > 1 && determinant > 1e-9 * aa * bb && fitted > 0.0 && factor > 0.0 {
        return (fitted, factor);
    }
    let sum = |of: fn(&(f64, f64, f64)) -> f64| rows.iter().map(of).sum::<f64>();
    let rest = sum(|r| r.1).max(1e-9);
    (call, ((sum(|r| r.2) - sum(|r| r.0) * call) / rest).max(0.01))
}

#[cfg(test)]
mod tests {
    use super::fit;

    #[test]
    fn calls_and_speeds_are_told_apart() {
        let row = |calls: f64, rest: f64| (calls, rest, 0.2 * calls + 1.5 * rest);
        let (call, factor) = fit(&[row(40.0, 2.0), row(40.0, 90.0), row(4.0, 5.0)], 0.1);
        assert!((call - 0.2).abs() < 1e-9 && (factor - 1.5).abs() < 1e-9);
        // One row does not separate calls from the rest.
        let (call, factor) = fit(&[row(40.0, 90.0)], 0.2);
        assert!((call - 0.2).abs() < 1e-9 && (factor - 1.5).abs() < 1e-9);
    }
}
