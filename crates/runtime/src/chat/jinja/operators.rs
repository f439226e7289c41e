//! Python's arithmetic on values.

use super::ast::{CompareOp, Operator};
use super::filter_text::escaped;
use super::format::percent;
use super::meter::{Fallible, Text, fail, reserve};
use super::py_value::{PyValue, compare, contains, equal};
use std::cmp::Ordering;
use std::sync::Arc;

fn joined(a: &str, b: &str) -> Fallible<Arc<Text>> {
    reserve(a.len() + b.len())?;
    Ok(Text::new([a, b].concat()))
}

/// Tells whether a comparison of two values holds.
pub fn holds(comparison: CompareOp, a: &PyValue, b: &PyValue) -> Fallible<bool> {
    let ordered = |operator, test: fn(Ordering) -> bool| Ok(compare(a, b, operator)?.is_some_and(test));
    match comparison {
        CompareOp::Eq => equal(a, b),
        CompareOp::Ne => Ok(!equal(a, b)?),
        CompareOp::Lt => ordered("<", Ordering::is_lt),
        CompareOp::Le => ordered("<=", Ordering::is_le),
        CompareOp::Gt => ordered(">", Ordering::is_gt),
        CompareOp::Ge => ordered(">=", Ordering::is_ge),
        CompareOp::In => contains(b, a),
        CompareOp::NotIn => Ok(!contains(b, a)?),
    }
}

/// Returns the value of an operator on two values.
pub fn operate(operator: Operator, a: &PyValue, b: &PyValue) -> Fallible<PyValue> {
    a.defined()?;
    if operator != Operator::Mod || a.as_str().is_none() {
        b.defined()?;
    }
    match (operator, a, b) {
        (Operator::Add, PyValue::Str(a), PyValue::Str(b)) => Ok(PyValue::Str(joined(a, b)?)),
        (Operator::Add, PyValue::Markup(a), PyValue::Markup(b)) => Ok(PyValue::Markup(joined(a, b)?)),
        (Operator::Add, PyValue::Markup(a), PyValue::Str(b)) => Ok(PyValue::Markup(joined(a, &escaped(b)?)?)),
        (Operator::Add, PyValue::Str(a), PyValue::Markup(b)) => Ok(PyValue::Markup(joined(&escaped(a)?, b)?)),
        (Operator::Add, PyValue::List(x), PyValue::List(y))
        | (Operator::Add, PyValue::Tuple(x), PyValue::Tuple(y)) => {
            let all = [&x[..], &y[..]].concat();
            if matches!(a, PyValue::List(_)) { PyValue::list(all) } else { PyValue::tuple(all) }
        }
        (Operator::Mod, PyValue::Str(format) | PyValue::Markup(format), values) => {
            Ok(PyValue::text(percent(format, values)?))
        }
        (Operator::Mul, sequence, n) | (Operator::Mul, n, sequence)
            if n.as_int().is_some()
                && (sequence.as_str().is_some()
                    || matches!(sequence, PyValue::List(_) | PyValue::Tuple(_))) =>
        {
            let n = usize::try_from(n.as_int().unwrap_or(0).max(0)).unwrap_or(usize::MAX);
            match sequence {
                PyValue::List(items) | PyValue::Tuple(items) => {
                    reserve(items.len().saturating_mul(n).saturating_mul(size_of::<PyValue>()))?;
                    let all: Vec<PyValue> = std::iter::repeat_n(&items[..], n).flatten().cloned().collect();
                    if matches!(sequence, PyValue::List(_)) {
                        PyValue::list(all)
                    } else {
                        PyValue::tuple(all)
                    }
                }
                text => {
                    let text = text.as_str().unwrap_or_default();
                    reserve(text.len().saturating_mul(n))?;
                    Ok(PyValue::text(text.repeat(n)))
                }
            }
        }
        _ => match (a.as_int(), b.as_int()) {
            (Some(x), Some(y)) => on_ints(operator, x, y),
            _ => match (a.as_float(), b.as_float()) {
                (Some(x), Some(y)) => on_floats(operator, x, y),
                _ => {
                    let symbol = match operator {
                        Operator::Add => "+",
                        Operator::Sub => "-",
                        Operator::Mul => "*",
                        Operator::Div => "/",
                        Operator::FloorDiv => "//",
                        Operator::Mod => "%",
                        Operator::Pow => "** or pow()",
                    };
                    let (a, b) = (a.type_name(), b.type_name());
                    fail(format!("unsupported operand type(s) for {symbol}: '{a}' and '{b}'"))
                }
            },
        },
    }
}

fn on_ints(operator: Operator, a: i128, b: i128) -> Fallible<PyValue> {
    let result = match operator {
        Operator::Add => a.checked_add(b),
        Operator::Sub => a.checked_sub(b),
        Operator::Mul => a.checked_mul(b),
        Operator::Div if b != 0 => return Ok(PyValue::Float(a as f64 / b as f64)),
        Operator::FloorDiv if b != 0 => {
            a.checked_div_euclid(b).map(|q| match a.rem_euclid(b) != 0 && b < 0 {
                // Euclid's remainder is never negative, Python's has the sign of the divisor.
                true => q - 1,
                false => q,
            })
        }
        Operator::Mod if b != 0 => a.checked_rem_euclid(b).map(|r| if r != 0 && b < 0 { r + b } else { r }),
        Operator::Div | Operator::FloorDiv | Operator::Mod => return fail("division by zero"),
        Operator::Pow => match u32::try_from(b) {
            Ok(n) => a.checked_pow(n),
            Err(_) if b < 0 => return on_floats(operator, a as f64, b as f64),
            Err(_) => (a.unsigned_abs() < 2).then(|| if b % 2 == 0 { a * a } else { a }),
        },
    };
    result.map_or_else(|| fail("a number that is too large"), |n| Ok(PyValue::Int(n)))
}

fn on_floats(operator: Operator, a: f64, b: f64) -> Fallible<PyValue> {
    let remainder = || {
        let r = a % b;
        match r {
            0.0 => 0.0f64.copysign(b),
            r if (b < 0.0) != (r < 0.0) => r + b,
            r => r,
        }
    };
    Ok(PyValue::Float(match operator {
        Operator::Add => a + b,
        Operator::Sub => a - b,
        Operator::Mul => a * b,
        Operator::Pow if a == 0.0 && b < 0.0 => return fail("0.0 cannot be raised to a negative power"),
        Operator::Pow => {
            let x = a.powf(b);
            if x.is_nan() && !a.is_nan() && !b.is_nan() {
                return fail("a complex number");
            }
            if x.is_infinite() && a.is_finite() && b.is_finite() {
                return fail("(34, 'Numerical result out of range')");
            }
            x
        }
        _ if b == 0.0 => return fail("float division by zero"),
        Operator::Div => a / b,
        Operator::Mod => remainder(),
        Operator::FloorDiv => {
            let quotient =
                (a - a % b) / b - if a % b != 0.0 && (b < 0.0) != (a % b < 0.0) { 1.0 } else { 0.0 };
            match quotient {
                0.0 => 0.0f64.copysign(a / b),
                q if q - q.floor() > 0.5 => q.floor() + 1.0,
                q => q.floor(),
            }
        }
    }))
}
