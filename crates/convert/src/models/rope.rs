//! Rotary frequencies from the keys of a configuration.

use super::keys::Keys;
use crate::Result;
use anemoe_bundle::Rope;
use serde_json::Value;
use std::f64::consts::TAU;

/// Largest base of rotary frequencies; published ones are up to 1e7.
const MAX_THETA: f64 = 1e12;
/// Rotations over the trained positions from which on YaRN keeps a frequency, and up to which it divides it, where the
/// configuration names none.
const YARN_BETAS: [f64; 2] = [32.0, 1.0];

/// Returns the place of a layer's rope among the keys, and the object there: `rope_parameters`, which may hold one object
/// for each type of layers, or the older `rope_scaling`.
fn find<'a>(k: Keys<'a>, kind: &str) -> Result<(String, Option<Keys<'a>>)> {
    let scaling = k.object("rope_scaling")?;
    let Some(all) = k.object("rope_parameters")? else {
        let place = if scaling.is_some() { "rope_scaling" } else { "rope_parameters" };
        return Ok((place.to_string(), scaling));
    };
    let (place, own) = match all.object(kind).ok().flatten() {
        Some(own) => (format!("rope_parameters.{kind}"), own),
        None => ("rope_parameters".to_string(), all),
    };
    let spelled = |key: &str| if key == "type" { "rope_type" } else { key }.to_string();
    let differs = |(key, value): &(&String, &Value)| own.get(&spelled(key)) != Some(*value);
    match scaling.and_then(|scaling| scaling.map.iter().find(differs)) {
        None => Ok((place, Some(own))),
        Some((key, _)) => {
            Err(k.unsupported(format!("`rope_scaling.{key}` differs from `{place}`: write both as one")))
        }
    }
}

/// Returns the rope of layers of the type `kind`, with heads of `head_dim` channels, and the factor that lengths of cosines
/// and sines put on their scores. Only if `is_partial` is set, `partial_rotary_factor` counts for plain ropes:
/// transformers' code of most families does not read it there.
///
/// # Errors
/// A key is missing or has an impossible value, or the type of rope is not known.
pub fn rope(k: Keys<'_>, kind: &str, head_dim: usize, is_partial: bool) -> Result<(Rope, f64)> {
    if !head_dim.is_multiple_of(2) {
        return Err(k.invalid(format!("`head_dim` is {head_dim}, expected an even number")));
    }
    let positions = k.size("max_position_embeddings")? as f64;
    let share = k.number("partial_rotary_factor")?;
    let base = k.number("rope_theta")?;
    let trained = k.number("original_max_position_embeddings")?;
    let (place, own_keys) = find(k, kind)?;
    let named = |key: &str| format!("`{place}.{key}`");
    let own = |key: &str| own_keys.as_ref().and_then(|own| own.get(key));
    let number = |key: &str| own_keys.as_ref().map_or(Ok(None), |own| own.number(key));
    let needed = |key: &str| -> Result<f64> {
        number(key)?.ok_or_else(|| k.invalid(format!("{} is missing", named(key))))
    };
    let theta = match number("rope_theta")?.or(base) {
        None => return Err(k.invalid(format!("{} is missing", named("rope_theta")))),
        Some(theta) if (1.0..=MAX_THETA).contains(&theta) => theta,
        Some(theta) => {
            let what = format!("is {theta:e}, expected a number from 1 to {MAX_THETA:e}");
            return Err(k.invalid(format!("{} {what}", named("rope_theta"))));
        }
    };
    let kind = match own("rope_type").or_else(|| own("type")) {
        None => "default",
        Some(v) => v.as_str().ok_or_else(|| k.invalid(format!("{} is {v}", named("rope_type"))))?,
    };
    let keys: &[&str] = match kind {
        "default" | "proportional" => &[],
        // `dynamic` scales nothing up to `max_position_embeddings`, and no bundle goes farther.
        "linear" | "dynamic" => &["factor"],
        "llama3" => &["factor", "low_freq_factor", "high_freq_factor"],
        "yarn" => &[
            "factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "finetuned",
        ],
        "divisors" => &["divisors"],
        _ => {
            return Err(k.unsupported(format!(
                "{} is {kind}; implemented are default, linear, dynamic, llama3, yarn, proportional and \
                     divisors",
                named("rope_type")
            )));
        }
    };
    const COMMON: [&str; 5] =
        ["rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"];
    for (key, value) in own_keys.iter().flat_map(|own| own.map) {
        let is_one =
            || ["factor", "attention_factor"].contains(&key.as_str()) && own(key) == Some(&1.0.into());
        let known = COMMON.contains(&key.as_str()) || keys.contains(&key.as_str());
        if own(key).is_some() && !known && !is_one() {
            let uses: String = match keys {
                [] => "no key of its own".into(),
                _ => keys.join(", "),
            };
            let what = format!("is {value}; implemented of the type {kind}: {uses}");
            return Err(k.unsupported(format!("{} {what}", named(key))));
        }
    }

    let is_read = is_partial || kind != "default";
    let partial = number("partial_rotary_factor")?.or(share).filter(|_| is_read).unwrap_or(1.0);
    // With `proportional`, pairs that do not rotate keep their place, and the exponent counts all channels.
    let width = if kind == "proportional" { head_dim } else { (partial * head_dim as f64) as usize };
    let turning =
        if kind == "proportional" { 2 * ((partial * head_dim as f64 / 2.0) as usize) } else { width };
    if turning == 0 || partial > 1.0 || !width.is_multiple_of(2) {
        let what = format!("is {partial}: {turning} of {head_dim} channels would rotate");
        return Err(k.invalid(format!("{} {what}", named("partial_rotary_factor"))));
    }
    let plain = |c: usize| theta.powf(-((2 * c) as f64) / width as f64);
    let mut inv_freq: Vec<f64> =
        (0..width / 2).map(|c| if 2 * c < turning { plain(c) } else { 0.0 }).collect();
    let trained = trained.map_or_else(|| number("original_max_position_embeddings"), |n| Ok(Some(n)))?;
    let trained = trained.unwrap_or(positions);
    let mut factor = 1.0;
    match kind {
        "linear" => {
            let by = needed("factor")?;
            inv_freq.iter_mut().for_each(|f| *f /= by);
        }
        "llama3" => {
            let (by, low, high) =
                (needed("factor")?, needed("low_freq_factor")?, needed("high_freq_factor")?);
            if high <= low {
                return Err(k.invalid(format!("{} is {high}, at most {low}", named("high_freq_factor"))));
            }
            // Turns over the trained positions decide: few are slowed down, many stay.
            for f in &mut inv_freq {
                let kept = ((trained * *f / TAU - low) / (high - low)).clamp(0.0, 1.0);
                *f = (1.0 - kept) * *f / by + kept * *f;
            }
        }
        "yarn" => {
            let by = number("factor")?.unwrap_or(positions / trained);
            let betas = ["beta_fast", "beta_slow"].map(&number);
            let [fast, slow] = betas;
            let (fast, slow) = (fast?.unwrap_or(YARN_BETAS[0]), slow?.unwrap_or(YARN_BETAS[1]));
            // The pair that makes this many turns over the trained positions.
            let pair = |turns: f64| width as f64 * (trained / (turns * TAU)).ln() / (2.0 * theta.ln());
            let (mut low, mut high) = (pair(fast), pair(slow));
            // Null is no in Python.
            if !matches!(
                own_keys.as_ref().and_then(|own| own.map.get("truncate")),
                Some(Value::Bool(false) | Value::Null)
            ) {
                (low, high) = (low.floor(), high.ceil());
            }
            let (low, high) = (low.max(0.0), high.min(width as f64 - 1.0));
            let span = if high > low { high - low } else { 0.001 };
            for (c, f) in inv_freq.iter_mut().enumerate() {
                let slowed = ((c as f64 - low) / span).clamp(0.0, 1.0);
                *f = slowed * *f / by + (1.0 - slowed) * *f;
            }
            let scaled = |by_log: f64| if by > 1.0 { 0.1 * by_log * by.ln() + 1.0 } else { 1.0 };
            // 0 is as good as absent.
            let mscale = |key: &str| {
                if own(key).and_then(Value::as_f64) == Some(0.0) { Ok(None) } else { number(key) }
            };
            let length = match (mscale("mscale")?, mscale("mscale_all_dim")?) {
                (Some(one), Some(all)) => scaled(one) / scaled(all),
                _ => scaled(1.0),
            };
            let length = number("attention_factor")?.unwrap_or(length);
            factor = length * length;
        }
        "divisors" => {
            let list = own("divisors").and_then(Value::as_array);
            let list: Option<Vec<f64>> = list.and_then(|list| list.iter().map(Value::as_f64).collect());
            let fits = |d: &Vec<f64>| d.len() == inv_freq.len() && d.iter().all(|d| *d >= 1.0);
            let list = list.filter(fits).ok_or_else(|| {
                k.invalid(format!("{}: expected {} numbers from 1 on", named("divisors"), inv_freq.len()))
            })?;
            inv_freq.iter_mut().zip(list).for_each(|(f, d)| *f /= d);
        }
        _ => {}
    }
    if let Some(f) = inv_freq.iter().find(|f| !(0.0..=1.0).contains(*f)) {
        return Err(k.invalid(format!("`{place}` makes a frequency of {f:e}, expected numbers from 0 to 1")));
    }
    Ok((Rope { width, inv_freq }, factor))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::path::Path;

    fn parse(config: &Value, head_dim: usize) -> Result<(Rope, f64)> {
        rope(Keys::of_text(config, Path::new("config.json"))?, "full_attention", head_dim, true)
    }

    fn config(rope: Value) -> Value {
        json!({"max_position_embeddings": 512, "rope_parameters": rope})
    }

    #[test]
    fn both_spellings_are_one() {
        let new = config(json!({"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}));
        let old = json!({"max_position_embeddings": 512, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}});
        let (new, old) = (parse(&new, 8).unwrap().0, parse(&old, 8).unwrap().0);
        assert_eq!(new, old);
        assert_eq!((new.width, new.inv_freq[0]), (8, 0.125));
    }

    #[test]
    fn two_spellings_at_once_have_to_agree() {
        let mut both = config(json!({"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}));
        let alone = parse(&both, 8).unwrap().0;
        both["rope_scaling"] = json!({"type": "linear", "factor": 8.0});
        assert_eq!(parse(&both, 8).unwrap().0, alone);
        both["rope_scaling"] = json!({"rope_type": "yarn", "factor": 4.0});
        let error = parse(&both, 8).err().unwrap().to_string();
        assert!(error.contains("`rope_scaling.rope_type` differs from `rope_parameters`"), "{error}");
    }

    #[test]
    fn trained_positions_of_the_configuration_come_before_those_of_the_rope() {
        let llama = |inner: Value, outer: Value| {
            let rope = json!({"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": inner});
            let mut all = config(rope);
            all["original_max_position_embeddings"] = outer;
            parse(&all, 16).unwrap().0.inv_freq
        };
        assert_eq!(llama(json!(64), json!(32)), llama(json!(32), Value::Null));
        assert_ne!(llama(json!(64), json!(32)), llama(json!(64), Value::Null));
    }

    #[test]
    fn a_quarter_of_the_pairs_rotate() {
        let whole =
            config(json!({"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}));
        let rope = parse(&whole, 512).unwrap().0;
        assert_eq!((rope.width, rope.inv_freq.iter().filter(|f| **f > 0.0).count()), (512, 64));
        assert!((rope.inv_freq[1] - 1e6f64.powf(-2.0 / 512.0)).abs() < 1e-12);
        let first = config(json!({"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}));
        let rope = parse(&first, 128).unwrap().0;
        assert_eq!((rope.width, rope.inv_freq.len()), (64, 32));
        let k = Keys::of_text(&first, Path::new("config.json")).unwrap();
        let whole = super::rope(k, "full_attention", 128, false).unwrap().0;
        assert_eq!(whole.width, 128);
    }

    #[test]
    fn slow_pairs_are_slowed_down() {
        let llama =
            config(json!({"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}));
        let rope = parse(&llama, 16).unwrap().0.inv_freq;
        assert_eq!(rope[0], 1.0);
        assert_eq!(rope[7], 5e5f64.powf(-14.0 / 16.0) / 8.0);
        let yarn = config(json!({"rope_type": "yarn", "rope_theta": 15e4, "factor": 32.0, "truncate": false,
            "original_max_position_embeddings": 4096}));
        let yarn = parse(&yarn, 64).unwrap();
        assert!((yarn.1 - (0.1 * 32f64.ln() + 1.0).powi(2)).abs() < 1e-12);
        assert_eq!(yarn.0.inv_freq[0], 1.0);
        assert_eq!(yarn.0.inv_freq[31], 15e4f64.powf(-62.0 / 64.0) / 32.0);
    }

    /// Checks against the formulas of transformers 5.24: `0.1 mscale ln(factor) + 1`, or the quotient of two of them.
    #[test]
    fn lengths_of_yarn_are_those_of_transformers() {
        let plain = json!({"type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 128,
            "finetuned": true});
        let length = |more: &Value| {
            let mut rope = plain.clone();
            rope.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            parse(&config(rope), 64).unwrap().1.sqrt()
        };
        for (more, expected) in [
            (json!({}), 1.3688879454113936),
            (json!({"mscale": 1.0}), 1.3688879454113936),
            (json!({"mscale": 1.0, "mscale_all_dim": 0}), 1.3688879454113936),
            (json!({"mscale": 1.0, "mscale_all_dim": 1.0}), 1.0),
            (json!({"mscale": 1.0, "mscale_all_dim": 0.707}), 1.0857263992561355),
            (json!({"mscale": 1.0, "mscale_all_dim": 0.707, "attention_factor": 1.5}), 1.5),
            // 512 positions over 128.
            (json!({"factor": null}), 1.138629436111989),
        ] {
            assert!((length(&more) - expected).abs() < 1e-12, "{more}");
        }
    }

    #[test]
    fn a_dynamic_rope_scales_nothing_up_to_the_models_positions() {
        let rope = |kind: &str| {
            parse(&config(json!({"rope_type": kind, "rope_theta": 1e4, "factor": 4.0})), 64).unwrap().0
        };
        let plain = parse(&config(json!({"rope_theta": 1e4})), 64).unwrap().0;
        assert_eq!(rope("dynamic").inv_freq, plain.inv_freq);
        assert_ne!(rope("linear").inv_freq, plain.inv_freq);
    }

    #[test]
    fn ropes_that_are_not_known_or_impossible_are_named() {
        for (rope, says) in [
            (json!({"rope_type": "longrope", "rope_theta": 1e4}), "longrope"),
            (
                json!({"type": "su", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [2.0]}),
                "is su; implemented are",
            ),
            (
                json!({"rope_type": "default", "rope_theta": 1e4, "mscale": 2.0}),
                "`rope_parameters.mscale` is 2.0; implemented of the type default: no key of its own",
            ),
            (
                json!({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0}),
                "`rope_parameters.low_freq_factor` is 1.0; implemented of the type linear: factor",
            ),
            (json!({"rope_type": "default"}), "rope_theta"),
            (json!({"rope_type": "default", "rope_theta": 1e300}), "rope_theta"),
            (json!({"rope_type": "linear", "rope_theta": 1e4}), "rope_parameters.factor"),
            (json!({"rope_type": "linear", "rope_theta": 1e4, "factor": 0.5}), "frequency"),
            (
                json!({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 2.0}),
                "partial_rotary_factor",
            ),
            (json!({"rope_type": "divisors", "rope_theta": 1e4, "divisors": [1.0]}), "divisors"),
        ] {
            let error = parse(&config(rope), 8).err().unwrap().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
