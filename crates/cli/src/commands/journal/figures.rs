//! Facts of events as lines for people.

use crate::recorder::Facts;
use crate::ui;
use serde_json::Value;

/// Facts that are no figures: an entry shows them in other places.
const ELSEWHERE: &str = "family source title pass strict conditions golden cosine_map cosine_map_layers \
    chain_sha256 resumes error lesson gate again";

/// Lists every figure with its path: members of objects and lists of plain values, without hashes.
pub fn of_facts(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    for (key, value) in facts.iter().filter(|(key, _)| !ELSEWHERE.split_whitespace().any(|e| e == *key)) {
        walk(key, value, &mut found);
    }
    found
}

fn walk(path: &str, value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(map) if path == "figures" => map.iter().for_each(|(k, v)| walk(k, v, found)),
        Value::Object(map) => map.iter().for_each(|(k, v)| walk(&format!("{path}.{k}"), v, found)),
        Value::Array(list) if list.is_empty() || list.iter().any(|v| v.is_object() || v.is_array()) => {}
        Value::Array(list) => {
            found.push(format!("{path} {}", list.iter().map(plain).collect::<Vec<_>>().join(", ")));
        }
        Value::Null => {}
        _ if path.ends_with("sha256") => {}
        Value::Number(n) if n.is_u64() => {
            let n = n.as_u64().unwrap_or(0);
            let shown = if path.ends_with("bytes") { ui::bytes(n) } else { ui::count(n) };
            found.push(format!("{path} {shown}"));
        }
        plainly => found.push(format!("{path} {}", plain(plainly))),
    }
}

/// Formats a value; a number with six digits.
pub fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "-".into(),
        Value::Bool(yes) => (if *yes { "yes" } else { "no" }).into(),
        Value::Number(n) if n.is_f64() => {
            // A sum of nothing is -0.
            let x = n.as_f64().unwrap_or(0.0) + 0.0;
            if x != 0.0 && !(1e-4..1e15).contains(&x.abs()) {
                return format!("{x:.3e}");
            }
            let digits = (6.0 - x.abs().log10().ceil()).clamp(0.0, 9.0) as usize;
            let text = format!("{x:.digits$}");
            if digits > 0 { text.trim_end_matches('0').trim_end_matches('.').into() } else { text }
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn figures_have_their_paths_and_six_digits() {
        let facts = json!({
            "ops": {"ane": 1200}, "rules": [{"rule": "x"}], "list": [1, 2], "watts": 4.5, "golden": {"sha256": "a"},
            "importance_sha256": "b", "none": null, "figures": {"decode_tok_s": 9.25}, "pass": true, "done": true,
            "package_bytes": 8_400_000, "min_cosine": 0.99999912, "relative": 3.3e-8, "seconds": 123456.789, "zero": 0.0
        });
        let mut found = of_facts(facts.as_object().unwrap());
        found.sort();
        assert_eq!(
            found,
            [
                "decode_tok_s 9.25",
                "done yes",
                "list 1, 2",
                "min_cosine 0.999999",
                "ops.ane 1,200",
                "package_bytes 8.4 MB",
                "relative 3.300e-8",
                "seconds 123457",
                "watts 4.5",
                "zero 0",
            ]
        );
    }
}
