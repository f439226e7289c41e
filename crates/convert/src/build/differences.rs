//! Options in which a build differs from the one that a folder holds.

use crate::variants::ROTATION;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Name of the checkpoint among what may differ.
const CHECKPOINT: &str = "the checkpoint";
/// Options of the command line by their places in the JSON form of [`crate::plan::PlanOptions`].
const NAMES: [(&str, &str); 14] = [
    ("/quant", "--quant"),
    ("/parts/attention", "--attn-quant"),
    ("/parts/experts", "--expert-quant"),
    ("/parts/dense_mlp", "--mlp-quant"),
    ("/parts/router", "--router-quant"),
    ("/parts/head", "--head-quant"),
    ("/parts/embedding", "--embed-quant"),
    ("/groups/rows", "--group-size"),
    ("/groups/block", "--block-size"),
    ("/experts_per_shard", "--experts-per-shard"),
    ("/ffn_shards", "--ffn-shards"),
    ("/tokens", "--tokens"),
    ("/max_context", "--max-context"),
    ("/max_shard_mb", "--max-shard-mb"),
];

/// Returns the option that chooses the kind of a part of the model, named as in a plan; `--quant` for other parts.
pub fn quant_option(part: &str) -> &'static str {
    let of = |(place, _): &&(&str, &str)| place.strip_prefix("/parts/") == Some(part);
    NAMES.iter().find(of).map_or("--quant", |(_, option)| option)
}

/// Lists what differs between two builds as `--option old value, now new value`. A build is a chain and its inputs (hashes of
/// the checkpoint and of the importances), all as JSON.
pub fn differences(old: (&Value, &Value), new: (&Value, &Value)) -> String {
    let [was, now] = [old.0, new.0].map(|chain| value(&chain["family"]));
    if was != now {
        return format!("a model of the family {was}, now {now}");
    }
    let (old_options, new_options) = (&old.0["options"], &new.0["options"]);
    let same_readings = old.0["readings"] == new.0["readings"];
    let (old, mut new) = (settings(old), settings(new));
    if !same_readings {
        // Readings count for the hash of a checkpoint.
        new.remove(CHECKPOINT);
    }
    let forms = form_differences(old_options, new_options);
    let all: Vec<String> = new
        .iter()
        .filter_map(|(name, now)| {
            let was = old.get(name)?;
            (was != now).then(|| match *name {
                CHECKPOINT => "the checkpoint's contents".to_string(),
                _ => format!("{name} {was}, now {now}"),
            })
        })
        .chain(forms)
        .collect();
    match all.is_empty() {
        true => "no option differs, but its chain does: another version of anemoe wrote it".into(),
        false => all.join("; "),
    }
}

/// Lists the choices of the form that differ, by option; all of `--forms` is one choice.
fn form_differences(old: &Value, new: &Value) -> Vec<String> {
    let choices = [old, new].into_iter().filter_map(|options| options["form"].as_object());
    let all: BTreeSet<&String> = choices.flat_map(|form| form.keys()).collect();
    let differ = |was: &Value, now: &Value, option: String| {
        (was != now && !old.is_null() && !new.is_null())
            .then(|| format!("{option} {}, now {}", value(was), value(now)))
    };
    let of_form = all
        .iter()
        .filter_map(|k| differ(&old["form"][k.as_str()], &new["form"][k.as_str()], format!("--{k}")));
    of_form.chain(differ(&old["forms"], &new["forms"], "--forms".into())).collect()
}

/// Lists the choices of a build by option.
fn settings((chain, inputs): (&Value, &Value)) -> BTreeMap<&'static str, String> {
    let options = &chain["options"];
    let at = |place: &str| options.pointer(place).unwrap_or(&Value::Null);
    let mut all: BTreeMap<&'static str, String> =
        NAMES.iter().map(|(place, name)| (*name, value(at(place)))).collect();
    if let Some(goal) = chain["auto"]["goal"].as_str() {
        all.insert("--quant", format!("auto ({goal})"));
    }
    if options.is_null() {
        // An older version wrote the chain.
        all.clear();
        all.insert("--max-context", value(&chain["model"]["max_context"]));
        all.insert("--tokens", value(&chain["tokens"]));
    } else if at("/max_context").is_null() {
        let context = value(&chain["model"]["max_context"]);
        all.insert("--max-context", context);
    }
    all.insert("--drafter", chain["drafter"].as_str().unwrap_or("none").into());
    let skip = &chain["readings"]["zaya_skip"];
    all.insert("--zaya-skip", value(skip));
    all.insert(
        "--importance",
        inputs["importance"].as_str().map_or("none".into(), |h| format!("of SHA-256 {h}")),
    );
    all.insert(
        "--calibrate",
        inputs["calibration"].as_str().map_or("none".into(), |h| format!("on tokens of SHA-256 {h}")),
    );
    all.insert("the rotation of weights:", value(&chain["readings"][ROTATION]));
    all.insert(CHECKPOINT, value(&inputs["checkpoint"]));
    all.insert("the version of anemoe:", value(&chain["generator"]));
    all
}

/// Writes a value as on the command line.
fn value(value: &Value) -> String {
    match value {
        Value::Null => "(default)".into(),
        Value::String(text) => text.clone(),
        Value::Array(all) => all.iter().map(self::value).collect::<Vec<_>>().join(","),
        Value::Object(range) => match (range.get("min"), range.get("max")) {
            (Some(min), Some(max)) if min == max => min.to_string(),
            (Some(min), Some(max)) => format!("{min}..{max}"),
            _ => value.to_string(),
        },
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn differing_forms_are_listed_by_their_options() {
        let chain =
            |form: Value, forms: Value| json!({"options": {"quant": "lut4", "form": form, "forms": forms}});
        let plain = chain(Value::Null, Value::Null);
        let host = chain(json!({"cache": "host", "io": "channels-last"}), Value::Null);
        let sorts = chain(Value::Null, json!({"head": {"norm": "plain"}}));
        let inputs = json!({"checkpoint": "aa"});
        let of = |a: &Value, b: &Value| differences((a, &inputs), (b, &inputs));
        assert_eq!(of(&plain, &host), "--cache (default), now host; --io (default), now channels-last");
        assert!(of(&plain, &sorts).starts_with("--forms (default), now {"));
        assert!(of(&host, &host).contains("no option differs"));
    }

    #[test]
    fn differing_options_are_listed_with_both_values() {
        let chain = |quant: &str, head: Value, tokens: Value| {
            json!({
                "generator": "anemoe 1", "model": {"max_context": 2048},
                "options": {"quant": quant, "parts": {"head": head}, "tokens": tokens, "max_context": null},
            })
        };
        let one = json!([{"min": 1, "max": 1}]);
        let a = chain("lut4", "lut6".into(), one.clone());
        let b = chain("fp16", Value::Null, json!([{"min": 1, "max": 4}]));
        let inputs = json!({"checkpoint": "aa", "importance": null});
        assert_eq!(
            differences((&a, &inputs), (&b, &inputs)),
            "--head-quant lut6, now (default); --quant lut4, now fp16; --tokens 1, now 1..4"
        );
        let other = json!({"checkpoint": "bb", "importance": "cc"});
        assert_eq!(
            differences((&a, &inputs), (&a, &other)),
            "--importance none, now of SHA-256 cc; the checkpoint's contents"
        );
        assert!(differences((&a, &inputs), (&a, &inputs)).contains("another version"));
        // A reading counts for the hash of the checkpoint.
        let mut rotated = b.clone();
        rotated["readings"] = json!({"rotation": "hadamard"});
        let found = differences((&a, &inputs), (&rotated, &json!({"checkpoint": "bb", "importance": null})));
        assert!(found.contains("--quant") && !found.contains("contents"), "{found}");
        let mut zaya = b.clone();
        zaya["family"] = "zaya".into();
        let mut gemma = a.clone();
        gemma["family"] = "gemma4".into();
        assert_eq!(differences((&gemma, &inputs), (&zaya, &other)), "a model of the family gemma4, now zaya");
        // An option that is set to its default does not differ.
        let mut c = a.clone();
        c["options"]["max_context"] = 2048.into();
        assert!(differences((&a, &inputs), (&c, &inputs)).contains("no option differs"));
    }
}
