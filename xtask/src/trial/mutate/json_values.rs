//! Damages JSON: values of other types and sizes, missing and repeated keys, text that is not JSON.

use super::super::choices::Choices;
use super::bytes::damage_bytes;
use serde_json::{Map, Value, json};

/// Prefix of a key that is written without it, so that the key occurs twice.
const TWICE: &str = "@twice@";

/// Changes values of a JSON document, or its text.
pub fn edit(text: &mut Vec<u8>, r: &mut Choices) {
    let Ok(mut value) = serde_json::from_slice::<Value>(text) else { return damage_bytes(text, r) };
    if r.once_in(8) {
        return spoil(text, r);
    }
    for _ in 0..1 + r.below(2) {
        change(&mut value, r);
    }
    *text = write(&value);
}

/// Writes a document as text; marked keys lose their mark.
pub fn write(value: &Value) -> Vec<u8> {
    value.to_string().replace(TWICE, "").into_bytes()
}

/// Changes a random value of a document.
pub fn change(value: &mut Value, r: &mut Choices) {
    let n = count(value);
    let mut at = r.below(n);
    visit(value, &mut at, &mut |value| alter(value, r));
}

fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(all) => all.iter().map(count).sum(),
        Value::Object(all) => all.values().map(count).sum(),
        _ => 0,
    }
}

/// Calls `then` on value number `at`, counted from the outside in. Tells whether it was found.
fn visit(value: &mut Value, at: &mut usize, then: &mut dyn FnMut(&mut Value)) -> bool {
    if *at == 0 {
        then(value);
        return true;
    }
    *at -= 1;
    match value {
        Value::Array(all) => all.iter_mut().any(|v| visit(v, at, then)),
        Value::Object(all) => all.values_mut().any(|v| visit(v, at, then)),
        _ => false,
    }
}

fn alter(value: &mut Value, r: &mut Choices) {
    match value {
        Value::Object(all) if !all.is_empty() && !r.once_in(6) => keys(all, r),
        Value::Array(all) if !all.is_empty() && !r.once_in(6) => {
            let i = r.below(all.len());
            match r.below(4) {
                0 => {
                    all.remove(i);
                }
                1 => all.insert(i, all[i].clone()),
                2 => {
                    let j = r.below(all.len());
                    all.swap(i, j);
                }
                _ => all[i] = hostile(r),
            }
        }
        Value::Number(n) if r.once_in(2) => {
            let n = n.as_f64().unwrap_or(0.0);
            *value = match r.below(6) {
                0 => json!(n + 1.0),
                1 => json!(n - 1.0),
                2 => json!(-n),
                3 => json!(n * 2.0),
                4 => json!((n * 1e6) as i64),
                _ => json!((n as i64).saturating_add(1)),
            };
        }
        _ => *value = hostile(r),
    }
}

fn keys(all: &mut Map<String, Value>, r: &mut Choices) {
    let names: Vec<String> = all.keys().cloned().collect();
    let (name, other) = (r.pick(&names).clone(), r.pick(&names).clone());
    match r.below(6) {
        0 => {
            all.remove(&name);
        }
        1 => {
            let value = if r.once_in(2) { all[&name].clone() } else { hostile(r) };
            all.insert(format!("{TWICE}{name}"), value);
        }
        2 => {
            let value = all.remove(&name).unwrap_or_default();
            all.insert(format!("{name}\u{1b}[31m"), value);
        }
        3 => {
            let (a, b) = (all[&name].clone(), all[&other].clone());
            all.insert(name, b);
            all.insert(other, a);
        }
        4 => {
            all.insert(name, hostile(r));
        }
        _ => {
            all.insert("no_such_key".into(), hostile(r));
        }
    }
}

/// Draws a value that readers seldom expect.
fn hostile(r: &mut Choices) -> Value {
    match r.below(20) {
        0 => Value::Null,
        1 => json!(r.once_in(2)),
        2 => json!(0),
        3 => json!(-1),
        4 => json!(0.5),
        5 => json!(r.edge()),
        6 => json!(-(r.edge() as i64 as i128).clamp(0, i64::MAX.into()) as i64),
        7 => json!(1e308),
        8 => json!(-1e308),
        9 => json!(1e-320),
        10 => json!(""),
        11 => json!("\u{1b}[31mred\u{7}\n\u{202e}"),
        12 => json!("../../../../etc/passwd"),
        13 => json!("/dev/zero"),
        14 => json!("x".repeat(100_000)),
        15 => json!([]),
        16 => json!({}),
        17 => (0..100).fold(json!(1), |inner, _| json!([inner])),
        18 => json!(vec![1; 10_000]),
        _ => json!(r.below(1000)),
    }
}

/// Changes the text so that it may not be JSON any more.
fn spoil(text: &mut Vec<u8>, r: &mut Choices) {
    let digits: Vec<usize> =
        text.iter().enumerate().filter(|(_, b)| b.is_ascii_digit()).map(|(i, _)| i).collect();
    let at = if digits.is_empty() { r.below(text.len()) } else { *r.pick(&digits) };
    let long = "9".repeat(400);
    let deep = "[".repeat(100_000);
    let pieces: [&[u8]; 9] =
        [b"NaN", b"-Infinity", b"1e999", b"-0.0", b"0x10", b"\xff", b"\"", long.as_bytes(), deep.as_bytes()];
    match r.below(4) {
        0 => text.splice(0..0, *b"\xef\xbb\xbf").for_each(drop),
        1 => text.extend_from_slice(b"{}"),
        _ => text.splice(at..(at + 1).min(text.len()), r.pick(&pieces).iter().copied()).for_each(drop),
    }
}
