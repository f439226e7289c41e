//! The tests behind `is`.

use super::arguments::GivenArguments;
use super::ast::{CompareOp, Operator};
use super::lexer::is_one_of;
use super::meter::{Fallible, fail};
use super::operators::{holds, operate};
use super::print::printed;
use super::py_value::{PyValue, equal};
use super::text_methods::has_case;

/// Names of the filters.
const FILTERS: &str = "abs attr batch capitalize center count d default dictsort e escape filesizeformat first float \
    forceescape format groupby indent int join last length list lower items map min max pprint reject \
    rejectattr replace reverse round safe select selectattr slice sort string striptags sum title trim \
    truncate unique upper urlencode wordcount wordwrap xmlattr tojson";

/// Names of the tests.
const CHECKS: &str = "odd even divisibleby defined undefined filter test none boolean false true integer float lower \
    upper string mapping number sequence iterable callable sameas escaped in == eq equalto != ne > gt \
    greaterthan ge >= < lt lessthan <= le";

/// Tells whether a value passes a test.
pub fn check(name: &str, value: &PyValue, given: &GivenArguments) -> Fallible<bool> {
    let remainder = |by: i128| Ok(operate(Operator::Mod, value, &PyValue::Int(by))?.as_float());
    let compared = |comparison| holds(comparison, value, &given.one(name)?);
    Ok(match name {
        "eq" | "==" | "equalto" => compared(CompareOp::Eq)?,
        "ne" | "!=" => compared(CompareOp::Ne)?,
        "lt" | "<" | "lessthan" => compared(CompareOp::Lt)?,
        "le" | "<=" => compared(CompareOp::Le)?,
        "gt" | ">" | "greaterthan" => compared(CompareOp::Gt)?,
        "ge" | ">=" => compared(CompareOp::Ge)?,
        "in" => compared(CompareOp::In)?,
        "sameas" => value.is_same(&given.one(name)?),
        "divisibleby" => equal(&operate(Operator::Mod, value, &given.one(name)?)?, &PyValue::Int(0))?,
        _ => {
            given.bind::<0>(name, [])?;
            match name {
                "defined" => !value.is_undefined(),
                "undefined" => value.is_undefined(),
                "odd" => remainder(2)? == Some(1.0),
                "even" => remainder(2)? == Some(0.0),
                "none" => matches!(value, PyValue::None),
                "boolean" => matches!(value, PyValue::Bool(_)),
                "false" => matches!(value, PyValue::Bool(false)),
                "true" => matches!(value, PyValue::Bool(true)),
                "integer" => matches!(value, PyValue::Int(_)),
                "float" => matches!(value, PyValue::Float(_)),
                "number" => matches!(value, PyValue::Int(_) | PyValue::Float(_) | PyValue::Bool(_)),
                "string" => value.as_str().is_some(),
                "escaped" => matches!(value, PyValue::Markup(_)),
                "mapping" => matches!(value, PyValue::Dict(_)),
                "sequence" => value.length().is_some() && !matches!(value, PyValue::DictView(..)),
                "iterable" => {
                    value.length().is_some() || matches!(value, PyValue::Iterator(_) | PyValue::Loop(_))
                }
                "callable" => matches!(
                    value,
                    PyValue::Macro(_)
                        | PyValue::Method(_)
                        | PyValue::Function(_)
                        | PyValue::Joiner(_)
                        | PyValue::Loop(_)
                        | PyValue::Undefined(_)
                ),
                "lower" => has_case(&printed(value)?, char::is_lowercase),
                "upper" => has_case(&printed(value)?, char::is_uppercase),
                "filter" => value.as_str().is_some_and(|name| is_one_of(FILTERS, name)),
                "test" => value.as_str().is_some_and(|name| is_one_of(CHECKS, name)),
                _ => return fail(format!("No test named '{name}'.")),
            }
        }
    })
}
