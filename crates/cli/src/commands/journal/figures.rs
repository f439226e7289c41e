//! Facts of events as lines for people: names, units, order.

use crate::recorder::Facts;
use crate::ui;
use serde_json::Value;

/// Unit in which a figure is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FigureUnit {
    Bytes,
    Count,
    Cosine,
    Nats,
    Share,
    Seconds,
    Plain,
}

/// Names of facts whose paths would say too little, by path.
const KNOWN: [(&str, &str); 11] = [
    ("package_bytes", "bytes of packages"),
    ("embedding_bytes", "bytes of the embedding"),
    ("reused", "packages from an earlier run"),
    ("tokens", "tokens per call"),
    ("threshold", "wanted cosine"),
    ("mean_kl", "mean divergence, nats"),
    ("top1_agreement", "same top token"),
    ("wrong_choices", "differing choices"),
    ("verdicts.ane", "packages predicted on the ANE"),
    ("verdicts.not_ane", "packages predicted elsewhere"),
    ("verdicts.unknown", "packages undecided"),
];

/// Facts that are no figures: an entry shows them in other places.
const ELSEWHERE: &str = "family source pass strict conditions golden cosine_map chain_sha256 resumes error";

/// Words of paths, and the words that replace them.
const WORDS: [(&str, &str); 8] = [
    ("min", "lowest"),
    ("max", "largest"),
    ("tok s", "tok/s"),
    ("gb s", "GB/s"),
    ("gb per", "GB per"),
    ("ane", "ANE"),
    ("gpu", "GPU"),
    ("cpu", "CPU"),
];

/// Returns the name and the unit of a fact, by its path.
pub fn known(path: &str) -> (String, FigureUnit) {
    let unit = match path {
        p if p.ends_with("bytes") => FigureUnit::Bytes,
        p if p.ends_with("cosine") => FigureUnit::Cosine,
        p if p.ends_with("_kl") => FigureUnit::Nats,
        "top1_agreement" => FigureUnit::Share,
        p if p.ends_with("seconds") || p.ends_with("_s") && !p.ends_with("tok_s") && !p.ends_with("gb_s") => {
            FigureUnit::Seconds
        }
        "threshold" => FigureUnit::Plain,
        _ => FigureUnit::Count,
    };
    if let Some((_, name)) = KNOWN.iter().find(|k| k.0 == path) {
        return (name.to_string(), unit);
    }
    let mut name = format!(" {} ", path.replace('_', " ").replace('.', " : "));
    for (word, said) in WORDS {
        name = name.replace(&format!(" {word} "), &format!(" {said} "));
    }
    (name.replace(" : ", ": ").trim().into(), unit)
}

/// Lists every figure by its path: members of objects and lists of plain values, without hashes.
pub fn flatten(facts: &Facts) -> Vec<(String, Value)> {
    fn walk(path: &str, value: &Value, found: &mut Vec<(String, Value)>) {
        match value {
            Value::Object(map) => map.iter().for_each(|(k, v)| walk(&format!("{path}.{k}"), v, found)),
            Value::Array(list) if list.is_empty() || list.iter().any(|v| v.is_object() || v.is_array()) => {}
            Value::Array(list) => {
                let texts: Vec<String> = list.iter().map(|v| text(v, FigureUnit::Plain)).collect();
                found.push((path.into(), texts.join(", ").into()));
            }
            Value::Null => {}
            _ if path.ends_with("sha256") => {}
            _ => found.push((path.into(), value.clone())),
        }
    }
    let mut found = Vec::new();
    for (key, value) in facts.iter().filter(|(k, _)| !ELSEWHERE.split_whitespace().any(|e| e == *k)) {
        walk(key, value, &mut found);
    }
    found
}

/// Formats a value in its unit.
pub fn text(value: &Value, unit: FigureUnit) -> String {
    match (value, unit) {
        (Value::String(s), _) => s.clone(),
        (Value::Bool(true), _) => "yes".into(),
        (Value::Bool(false), _) => "no".into(),
        (Value::Number(n), FigureUnit::Bytes | FigureUnit::Count) if n.is_u64() => {
            let n = n.as_u64().unwrap_or(0);
            if unit == FigureUnit::Bytes { ui::bytes(n) } else { ui::count(n) }
        }
        (Value::Number(n), _) if n.is_f64() => real(n.as_f64().unwrap_or(0.0), unit),
        (
            Value::Number(n),
            FigureUnit::Seconds | FigureUnit::Share | FigureUnit::Cosine | FigureUnit::Nats,
        ) => real(n.as_f64().unwrap_or(0.0), unit),
        (other, _) => other.to_string(),
    }
}

/// Formats a number in its unit.
fn real(x: f64, unit: FigureUnit) -> String {
    match unit {
        FigureUnit::Bytes => ui::bytes(x as u64),
        FigureUnit::Cosine => format!("{x:.6}"),
        FigureUnit::Nats => format!("{x:.5}"),
        FigureUnit::Share => format!("{:.1} %", 100.0 * x),
        FigureUnit::Seconds => format!("{x:.2}"),
        FigureUnit::Count if x == x.trunc() && (0.0..1e15).contains(&x) => ui::count(x as u64),
        FigureUnit::Count | FigureUnit::Plain if x == x.trunc() && x.abs() < 1e15 => format!("{x:.0}"),
        FigureUnit::Count | FigureUnit::Plain if x.to_string().len() <= 10 => x.to_string(),
        FigureUnit::Count | FigureUnit::Plain if x.abs() < 1e-4 => format!("{x:.3e}"),
        FigureUnit::Count | FigureUnit::Plain => {
            let digits = (5 - x.abs().log10().ceil() as i32).clamp(0, 9) as usize;
            format!("{x:.digits$}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn figures_of_known_and_unknown_facts() {
        let facts = json!({
            "ops": {"ane": 1200}, "rules": [{"rule": "x"}], "list": [1, 2], "watts": 4.5, "golden": {"sha256": "a"},
            "importance_sha256": "b", "none": null, "decode_tok_s": 9.25, "pass": true
        });
        let found = flatten(facts.as_object().unwrap());
        let lines: Vec<String> = found
            .iter()
            .map(|(path, v)| {
                let (name, unit) = known(path);
                format!("{name} {}", text(v, unit))
            })
            .collect();
        assert_eq!(lines, ["ops: ANE 1,200", "list 1, 2", "watts 4.5", "decode tok/s 9.25"]);
    }

    #[test]
    fn units() {
        assert_eq!(text(&json!(8_400_000), FigureUnit::Bytes), "8.4 MB");
        assert_eq!(text(&json!(0.5), FigureUnit::Share), "50.0 %");
        assert_eq!(text(&json!(1), FigureUnit::Cosine), "1.000000");
        assert_eq!(real(123456.789012, FigureUnit::Plain), "123457");
        assert_eq!(real(0.999999, FigureUnit::Plain), "0.999999");
        assert_eq!(real(1.0 / 3e7, FigureUnit::Plain), "3.333e-8");
        assert_eq!(real(1.0 / 3.0, FigureUnit::Plain), "0.33333");
        assert_eq!(real(1_234_567.0, FigureUnit::Count), "1,234,567");
        assert_eq!(known("decode.16.read_gb_s").0, "decode: 16: read GB/s");
    }
}
