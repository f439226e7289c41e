//! Limits of JSON schemas in requests: larger schemas take more of the grammar library's stack, memory or time than a
//! request may.

use serde_json::{Map, Value};
use std::collections::{BTreeSet, HashMap};

/// Most nested values.
const MAX_DEPTH: usize = 64;
/// Most values in all.
const MAX_VALUES: usize = 20_000;
/// Most properties of an object, and most names that it requires: the library's parser holds some 2000 items in a row,
/// five for each optional property, and takes time with the square of the names.
const MAX_PROPERTIES: usize = 400;
/// Most names that all objects require: those of schemas that hold together (`allOf`) add up.
const MAX_REQUIRED: usize = 4000;
/// Most patterns of an object's property names.
const MAX_PATTERN_PROPERTIES: usize = 32;
/// Most comparisons of such patterns: each with each, again for each schema that holds together with others.
const MAX_COMPARISONS: usize = 100_000;
/// Most combinations of alternatives (`anyOf`, `oneOf`) of schemas that hold together.
const MAX_COMBINATIONS: u64 = 256;
/// Most remainders of all `multipleOf` together, in their last decimal place: each is a state of the automaton.
const MAX_REMAINDERS: u64 = 20_000;
/// Most decimal places of `multipleOf`: the library multiplies ten to this power in 32 bits.
const MAX_PLACES: u32 = 8;
/// Most definitions that references name, which may refer to each other.
const MAX_REFERENCES: usize = 200;
/// Most references that lead to each other.
const MAX_CHAIN: usize = 500;
/// Most bytes of a regular expression, and of all regular expressions together.
const MAX_PATTERN: usize = 1000;
const MAX_PATTERNS: usize = 8000;

/// Refuses schemas that exceed a limit, alone or together.
///
/// # Errors
/// A limit is exceeded; the error names it.
pub fn check<'a>(schemas: impl IntoIterator<Item = &'a Value>) -> Result<(), String> {
    let mut open: Vec<(&Value, &Value, usize)> =
        schemas.into_iter().map(|schema| (schema, schema, 0)).collect();
    let (mut values, mut patterns, mut required, mut together, mut named) = (0, 0, 0, 1, 0usize);
    let mut references = BTreeSet::new();
    let (mut divisors, mut combinations) = (Divisors::default(), HashMap::new());
    while let Some((root, value, depth)) = open.pop() {
        values += 1;
        if values > MAX_VALUES {
            return Err(format!("the schema has more than {MAX_VALUES} values"));
        }
        if depth > MAX_DEPTH {
            return Err(format!("the schema has more than {MAX_DEPTH} values within each other"));
        }
        match value {
            Value::Array(list) => open.extend(list.iter().map(|v| (root, v, depth + 1))),
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
                    let mut most = usize::MAX;
                    match (key.as_str(), value) {
                        ("$ref", Value::String(name)) => {
                            references.insert(name.as_str());
                            together += 1;
                        }
                        ("pattern", Value::String(text)) => pattern(text)?,
                        ("multipleOf", Value::Number(number)) => divisors.add(&number.to_string())?,
                        ("allOf", Value::Array(all)) => together += all.len(),
                        ("patternProperties", Value::Object(all)) => {
                            all.keys().try_for_each(|text| pattern(text))?;
                            named += all.len().pow(2);
                            most = MAX_PATTERN_PROPERTIES;
                        }
                        ("properties", Value::Object(_)) => most = MAX_PROPERTIES,
                        ("required", Value::Array(all)) => {
                            required += all.len();
                            most = MAX_PROPERTIES;
                        }
                        _ => {}
                    }
                    let entries = value.as_array().map(Vec::len).or(value.as_object().map(Map::len));
                    let entries = entries.unwrap_or(0);
                    if entries > most {
                        return Err(format!("an object of the schema has {entries} {key}, more than {most}"));
                    }
                    open.push((root, value, depth + 1));
                }
                alternatives(root, value, &mut combinations, 0)?;
            }
            _ => {}
        }
    }
    if references.len() > MAX_REFERENCES {
        return Err(format!("the schema refers to more than {MAX_REFERENCES} definitions"));
    }
    if required > MAX_REQUIRED {
        return Err(format!("the schema requires more than {MAX_REQUIRED} names"));
    }
    if named * together > MAX_COMPARISONS {
        return Err("patternProperties of the schema, with allOf and $ref, take too much".into());
    }
    Ok(())
}

/// Counts the alternatives of a schema: those of `anyOf` and `oneOf` add up, those of what holds together multiply.
/// `known` has the counts of schemas so far, 1 for those around this one.
fn alternatives<'a>(
    root: &'a Value,
    schema: &'a Value,
    known: &mut HashMap<*const Value, u64>,
    depth: usize,
) -> Result<u64, String> {
    if let Some(count) = known.get(&std::ptr::from_ref(schema)) {
        return Ok(*count);
    }
    if depth > MAX_CHAIN {
        return Err(format!("more than {MAX_CHAIN} parts of the schema refer to each other"));
    }
    known.insert(schema, 1);
    let mut product = 1u64;
    let mut multiply = |count: u64| {
        let one = product.min(count) <= 1;
        product = product.max(1).saturating_mul(count.max(1));
        match one || product <= MAX_COMBINATIONS {
            true => Ok(()),
            false => {
                Err(format!("alternatives of the schema have more than {MAX_COMBINATIONS} combinations"))
            }
        }
    };
    for key in ["anyOf", "oneOf"] {
        let mut sum = 0u64;
        for one in schema[key].as_array().into_iter().flatten() {
            sum = sum.saturating_add(alternatives(root, one, known, depth + 1)?);
        }
        multiply(sum)?;
    }
    for one in schema["allOf"].as_array().into_iter().flatten() {
        multiply(alternatives(root, one, known, depth + 1)?)?;
    }
    if let Some(target) = schema["$ref"].as_str().and_then(|name| root.pointer(name.strip_prefix('#')?)) {
        multiply(alternatives(root, target, known, depth + 1)?)?;
    }
    known.insert(schema, product);
    Ok(product)
}

/// The `multipleOf` of schemas: `digits * 10^-places`.
#[derive(Default)]
struct Divisors {
    all: BTreeSet<(u64, u32)>,
}

impl Divisors {
    /// Adds a number as JSON writes it. A negative one is left to the library.
    fn add(&mut self, number: &str) -> Result<(), String> {
        if number.starts_with('-') {
            return Ok(());
        }
        decimal(number).map(|divisor| self.all.insert(divisor));
        let is_small = decimal(number).is_some() && self.remainders().is_some_and(|n| n <= MAX_REMAINDERS);
        let what = format!(
            "multipleOf {number}, alone or with others of the schema, has more than {MAX_REMAINDERS} remainders"
        );
        is_small.then_some(()).ok_or(what)
    }

    /// Returns the states of the largest automaton that numbers of these divisors may need, or of all together.
    fn remainders(&self) -> Option<u64> {
        let most = self.all.iter().map(|(_, places)| *places).max().unwrap_or(0);
        // Those that hold for the same number make one automaton, of their least common multiple.
        let mut common = 1u64;
        for (digits, places) in &self.all {
            let divisor = (digits * 10u64.pow(most - places)).max(1);
            // The library multiplies 32-bit numbers.
            common = common.checked_mul(divisor).filter(|n| *n <= u32::MAX.into())? / gcd(common, divisor);
        }
        let sum: u64 = self.all.iter().map(|(digits, _)| digits).sum();
        Some(sum.max(common / gcd(common, 10u64.pow(most))))
    }
}

/// Returns digits and decimal places of a number, as few as possible; `None` where there are too many.
fn decimal(number: &str) -> Option<(u64, u32)> {
    let (mantissa, exponent) = number.split_once(['e', 'E']).unwrap_or((number, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let mut digits: u64 = format!("{whole}{fraction}").parse().ok()?;
    let mut places =
        i64::try_from(fraction.len()).ok()? - exponent.trim_start_matches('+').parse::<i64>().ok()?;
    while places > 0 && digits.is_multiple_of(10) {
        (digits, places) = (digits / 10, if digits == 0 { 0 } else { places - 1 });
    }
    while places < 0 && digits > 0 {
        (digits, places) = (digits.checked_mul(10)?, places + 1);
    }
    let places = u32::try_from(places.max(0)).ok().filter(|places| *places <= MAX_PLACES)?;
    Some((digits, places)).filter(|_| digits <= MAX_REMAINDERS)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
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
        let keys = |n: usize| (0..n).map(|i| format!("p{i}")).collect::<Vec<_>>();
        let multiples =
            |all: &[f64]| json!({"allOf": all.iter().map(|n| json!({"multipleOf": n})).collect::<Vec<_>>()});
        let union = json!({"anyOf": vec![json!({"anyOf": [{"type": "string"}, {"$ref": "#"}]}); 300], "allOf": [{"type": "string"}]});
        let few = [
            json!({"required": keys(400)}),
            json!({"multipleOf": 10_000}),
            multiples(&[0.01, 5.0, 60.0, 7.0, -3.0, 0.0]),
            multiples(&[1e-8]),
            union,
        ];
        for schema in
            [wide(300), deep(40), chain(100), pattern(500), json!({"$ref": "#"})].into_iter().chain(few)
        {
            assert_eq!(check([&schema]), Ok(()), "{schema}");
        }
        for (schema, says) in [
            (wide(401), "401 properties, more than 400"),
            (deep(100), "within each other"),
            (chain(300), "more than 200 definitions"),
            (pattern(1001), "more than 1000 bytes"),
            (json!(vec![pattern(900); 9]), "8000 together"),
            (json!({"enum": vec![1; 30_000]}), "more than 20000 values"),
            (json!({"required": keys(401)}), "401 required, more than 400"),
            (
                json!({"patternProperties": keys(33).into_iter().map(|k| (k, json!(true))).collect::<Map<_, _>>()}),
                "more than 32",
            ),
            (json!(vec![json!({"required": keys(300)}); 14]), "more than 4000 names"),
            (
                json!({"$defs": {"a": {"patternProperties": keys(32).into_iter().map(|k| (k, json!(true))).collect::<Map<_, _>>()}}, "allOf": vec![json!({"$ref": "#/$defs/a"}); 100]}),
                "patternProperties",
            ),
            (
                json!({"$defs": {"a": {"anyOf": [{}, {}, {}]}}, "allOf": vec![json!({"$ref": "#/$defs/a"}); 6]}),
                "more than 256 combinations",
            ),
            (json!({"multipleOf": 999_983}), "multipleOf 999983"),
            (json!({"multipleOf": 1e300}), "multipleOf 1e+300"),
            (json!({"multipleOf": 1e-9}), "multipleOf 1e-9"),
            (multiples(&[997.0, 991.0]), "more than 20000 remainders"),
            (multiples(&[0.00001, 7.0, 99.0]), "more than 20000 remainders"),
            (
                json!((0..100).map(|i| json!({"multipleOf": 9001 + i})).collect::<Vec<_>>()),
                "more than 20000 remainders",
            ),
        ] {
            let error = check([&schema]).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        let half = json!({"enum": vec![1; 15_000]});
        assert_eq!((check([&half]), check([&half, &half]).is_err()), (Ok(()), true));
    }
}
