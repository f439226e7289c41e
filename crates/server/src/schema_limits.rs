//! Limits of JSON schemas in requests: larger schemas take more of the grammar library's stack, memory or time than a
//! request may.

use serde_json::Value;
use std::collections::BTreeSet;

/// Most nested values.
const MAX_DEPTH: usize = 64;
/// Most values in all.
const MAX_VALUES: usize = 20_000;
/// Most properties of an object: the library's parser holds some 2000 items in a row, five for each optional property.
const MAX_PROPERTIES: usize = 400;
/// Most definitions that references name, which may refer to each other.
const MAX_REFERENCES: usize = 200;
/// Most bytes of a regular expression, and of all regular expressions together.
const MAX_PATTERN: usize = 1000;
const MAX_PATTERNS: usize = 8000;

/// Refuses a schema that exceeds a limit.
///
/// # Errors
/// The schema exceeds a limit; the error names it.
pub fn check(schema: &Value) -> Result<(), String> {
    let mut open = vec![(schema, 0)];
    let (mut values, mut patterns) = (0, 0);
    let mut references = BTreeSet::new();
    while let Some((value, depth)) = open.pop() {
        values += 1;
        if values > MAX_VALUES {
            return Err(format!("the schema has more than {MAX_VALUES} values"));
        }
        if depth > MAX_DEPTH {
            return Err(format!("the schema has more than {MAX_DEPTH} values within each other"));
        }
        match value {
            Value::Array(list) => open.extend(list.iter().map(|v| (v, depth + 1))),
            Value::Object(object) => {
                for (key, value) in object {
                    let mut pattern = |text: &str| {
                        patterns += text.len();
                        match text.len() > MAX_PATTERN || patterns > MAX_PATTERNS {
                            true => Err(format!(
                                "patterns of the schema have more than {MAX_PATTERN} bytes, or {MAX_PATTERNS} together"
                            )),
                            false => Ok(()),
                        }
                    };
                    match (key.as_str(), value) {
                        ("$ref", Value::String(name)) => {
                            references.insert(name.as_str());
                        }
                        ("pattern", Value::String(text)) => pattern(text)?,
                        ("patternProperties", Value::Object(all)) => {
                            all.keys().try_for_each(|text| pattern(text))?;
                        }
                        ("properties", Value::Object(all)) if all.len() > MAX_PROPERTIES => {
                            return Err(format!(
                                "an object of the schema has {} properties, more than {MAX_PROPERTIES}",
                                all.len()
                            ));
                        }
                        _ => {}
                    }
                    open.push((value, depth + 1));
                }
            }
            _ => {}
        }
    }
    if references.len() > MAX_REFERENCES {
        return Err(format!("the schema refers to more than {MAX_REFERENCES} definitions"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::check;
    use serde_json::{Map, Value, json};

    #[test]
    fn schemas_of_people_pass_and_larger_ones_are_refused_with_the_limit() {
        let wide = |n: usize| {
            let all = (0..n).map(|i| (format!("p{i}"), json!({"type": "string"})));
            json!({"type": "object", "properties": all.collect::<Map<String, Value>>()})
        };
        let deep = |n: usize| (0..n).fold(json!({}), |inner, _| json!({"items": inner}));
        let chain = |n: usize| {
            let all = (0..n).map(|i| (format!("d{i}"), json!({"$ref": format!("#/$defs/d{}", i + 1)})));
            json!({"$defs": all.collect::<Map<String, Value>>(), "$ref": "#/$defs/d0"})
        };
        let pattern = |n: usize| json!({"type": "string", "pattern": "a".repeat(n)});
        for schema in [wide(300), deep(40), chain(100), pattern(500), json!({"$ref": "#"})] {
            assert_eq!(check(&schema), Ok(()));
        }
        for (schema, says) in [
            (wide(401), "401 properties, more than 400"),
            (deep(100), "within each other"),
            (chain(300), "more than 200 definitions"),
            (pattern(1001), "more than 1000 bytes"),
            (json!(vec![pattern(900); 9]), "8000 together"),
            (json!({"enum": vec![1; 30_000]}), "more than 20000 values"),
        ] {
            let error = check(&schema).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
