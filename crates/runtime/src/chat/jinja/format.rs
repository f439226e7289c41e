//! Values in a text: the `%` of Python's texts, `str.format`, and its format specifications.

use super::items::{attribute, item};
use super::meter::{Fallible, TextOut, fail};
use super::print::{exponent_text, float, print, printed, quote, represented};
use super::py_value::{PyValue, char_count};

/// Largest width or precision.
const MOST_WIDTH: usize = 1 << 20;
/// Most digits behind the point: a float has no more.
const MOST_DIGITS: usize = 1100;

/// Form in which a value is written.
#[derive(Clone, Default)]
struct Spec {
    fill: Option<char>,
    align: Option<char>,
    sign: Option<char>,
    alternate: bool,
    grouping: Option<char>,
    width: usize,
    precision: Option<usize>,
    kind: Option<char>,
}

/// Writes a number and its sign into the width of a specification.
fn padded(out: &mut TextOut, spec: &Spec, default: char, sign: &str, body: &str) -> Fallible<()> {
    let missing = spec.width.saturating_sub(char_count(sign) + char_count(body));
    let fill = spec.fill.unwrap_or(' ');
    let (before, behind) = match spec.align.unwrap_or(default) {
        '<' => (0, missing),
        '^' => (missing / 2, missing - missing / 2),
        '=' => {
            out.push(sign)?;
            out.pad(fill, missing)?;
            return out.push(body);
        }
        _ => (missing, 0),
    };
    out.pad(fill, before)?;
    out.push(sign)?;
    out.push(body)?;
    out.pad(fill, behind)
}

fn sign_text(spec: &Spec, negative: bool) -> String {
    match (negative, spec.sign) {
        (true, _) => "-".into(),
        (false, Some(sign @ ('+' | ' '))) => sign.into(),
        _ => String::new(),
    }
}

/// Puts a separator between groups of digits before the point.
fn grouped(digits: &str, separator: Option<char>, size: usize) -> String {
    let Some(separator) = separator else { return digits.into() };
    let end = digits.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(digits.len());
    let mut out = String::new();
    for (i, c) in digits[..end].chars().enumerate() {
        if i > 0 && (end - i) % size == 0 {
            out.push(separator);
        }
        out.push(c);
    }
    out + &digits[end..]
}

/// Returns the digits of a number in the form `e`, `f` or `g`; `alternate` keeps the zeros of `g`.
fn digits_of(x: f64, kind: char, precision: usize, alternate: bool) -> String {
    if !x.is_finite() {
        return float(x.abs());
    }
    let x = x.abs();
    let precision = precision.min(MOST_DIGITS);
    let scientific = |digits: usize| {
        let text = format!("{x:.digits$e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        (digits.to_string(), exponent.parse::<i32>().unwrap_or(0))
    };
    match kind {
        'f' => format!("{x:.precision$}"),
        'e' => {
            let (digits, exponent) = scientific(precision);
            digits + &exponent_text(exponent)
        }
        _ => {
            let precision = precision.max(1);
            let (digits, exponent) = scientific(precision - 1);
            let is_fixed = (-4..precision as i32).contains(&exponent);
            let mut text = match is_fixed {
                true => format!("{x:.*}", (precision as i32 - 1 - exponent) as usize),
                false => digits,
            };
            if text.contains('.') && !alternate {
                text.truncate(text.trim_end_matches('0').trim_end_matches('.').len());
            }
            if is_fixed { text } else { text + &exponent_text(exponent) }
        }
    }
}

/// Returns the digits of a whole number in the base of `kind`, with the base's mark.
fn int_digits(n: i128, spec: &Spec, kind: char) -> (&'static str, String) {
    let n = n.unsigned_abs();
    let (mark, digits) = match kind {
        'x' => ("0x", format!("{n:x}")),
        'X' => ("0X", format!("{n:X}")),
        'o' => ("0o", format!("{n:o}")),
        'b' => ("0b", format!("{n:b}")),
        _ => ("", n.to_string()),
    };
    (if spec.alternate { mark } else { "" }, digits)
}

/// Writes a value as `format(value, specification)` does.
pub fn formatted(value: &PyValue, specification: &str, out: &mut TextOut) -> Fallible<()> {
    if specification.is_empty() {
        return print(value, out);
    }
    let mut spec = Spec::default();
    let mut chars = specification.chars().peekable();
    let is_align = |c: &char| matches!(c, '<' | '>' | '^' | '=');
    let mut ahead = specification.chars();
    if let (Some(first), Some(second)) = (ahead.next(), ahead.next())
        && is_align(&second)
    {
        (spec.fill, spec.align) = (Some(first), Some(second));
        chars.nth(1);
    } else {
        spec.align = chars.next_if(is_align);
    }
    spec.sign = chars.next_if(|c| matches!(c, '+' | '-' | ' '));
    chars.next_if_eq(&'z');
    spec.alternate = chars.next_if_eq(&'#').is_some();
    if chars.next_if_eq(&'0').is_some() && spec.fill.is_none() {
        spec.fill = Some('0');
        spec.align = spec.align.or((value.as_str().is_none()).then_some('='));
    }
    let number = |chars: &mut std::iter::Peekable<std::str::Chars<'_>>| {
        let digits: String = std::iter::from_fn(|| chars.next_if(char::is_ascii_digit)).collect();
        digits.parse::<usize>().ok()
    };
    spec.width = number(&mut chars).unwrap_or(0);
    spec.grouping = chars.next_if(|c| matches!(c, ',' | '_'));
    if chars.next_if_eq(&'.').is_some() {
        spec.precision = number(&mut chars);
        if spec.precision.is_none() {
            return fail("Format specifier missing precision");
        }
    }
    spec.kind = chars.next();
    if chars.next().is_some() {
        return fail("Invalid format specifier");
    }
    if spec.width > MOST_WIDTH || spec.precision.is_some_and(|p| p > MOST_WIDTH) {
        return fail("a format that is too wide");
    }
    let unknown = |value: &PyValue| {
        fail(format!(
            "Unknown format code '{}' for object of type '{}'",
            spec.kind.unwrap_or(' '),
            value.type_name()
        ))
    };
    match value {
        PyValue::Str(text) | PyValue::Markup(text) => match spec.kind {
            None | Some('s') if spec.sign.is_none() && spec.align != Some('=') => {
                let cut: String = text.chars().take(spec.precision.unwrap_or(usize::MAX)).collect();
                padded(out, &spec, '<', "", &cut)
            }
            _ => unknown(value),
        },
        PyValue::Int(_) | PyValue::Bool(_)
            if matches!(spec.kind, None | Some('d' | 'b' | 'o' | 'x' | 'X' | 'c' | 'n')) =>
        {
            let n = value.as_int().unwrap_or(0);
            if spec.kind == Some('c') {
                let c = u32::try_from(n).ok().and_then(char::from_u32);
                return padded(out, &spec, '<', "", &c.map(String::from).unwrap_or_default());
            }
            if spec.precision.is_some() {
                return fail("Precision not allowed in integer format specifier");
            }
            let kind = spec.kind.unwrap_or('d');
            let (mark, digits) = int_digits(n, &spec, kind);
            let digits = grouped(&digits, spec.grouping, if matches!(kind, 'd' | 'n') { 3 } else { 4 });
            padded(out, &spec, '>', &(sign_text(&spec, n < 0) + mark), &digits)
        }
        PyValue::Float(_) | PyValue::Int(_) | PyValue::Bool(_) => {
            let x = value.as_float().unwrap_or(0.0);
            let kind = spec.kind.unwrap_or('r');
            let digits = match (kind, spec.precision) {
                ('r', None) => float(x.abs()),
                ('r', Some(precision)) => {
                    let text = digits_of(x, 'g', precision, spec.alternate);
                    if text.contains(['.', 'e', 'n']) { text } else { text + ".0" }
                }
                ('%', precision) => digits_of(x * 100.0, 'f', precision.unwrap_or(6), false) + "%",
                ('e' | 'f' | 'g', precision) => digits_of(x, kind, precision.unwrap_or(6), spec.alternate),
                ('n', precision) => digits_of(x, 'g', precision.unwrap_or(6), spec.alternate),
                ('E' | 'F' | 'G', precision) => {
                    let kind = kind.to_ascii_lowercase();
                    digits_of(x, kind, precision.unwrap_or(6), spec.alternate).to_uppercase()
                }
                _ => return unknown(value),
            };
            padded(
                out,
                &spec,
                '>',
                &sign_text(&spec, x.is_sign_negative()),
                &grouped(&digits, spec.grouping, 3),
            )
        }
        other => fail(format!("unsupported format string passed to {}.__format__", other.type_name())),
    }
}

/// Returns the text of `format % values`.
pub fn percent(format: &str, values: &PyValue) -> Fallible<String> {
    let given: Vec<PyValue> = match values {
        PyValue::Tuple(items) => items.to_vec(),
        one => vec![one.clone()],
    };
    let mut next = given.iter();
    let mut out = TextOut::default();
    let mut uses_names = false;
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        out.push(&rest[..at])?;
        rest = &rest[at + 1..];
        let mut named = None;
        if let Some(inner) = rest.strip_prefix('(') {
            let Some((name, behind)) = inner.split_once(')') else { return fail("incomplete format key") };
            let PyValue::Dict(dict) = values else { return fail("format requires a mapping") };
            named = match dict.named(name) {
                Some(value) => Some(value.clone()),
                None => return fail(format!("KeyError: {name:?}")),
            };
            uses_names = true;
            rest = behind;
        }
        let mut spec = Spec::default();
        while let Some(c) = rest.chars().next().filter(|c| matches!(c, '-' | '+' | ' ' | '#' | '0')) {
            match c {
                '-' => spec.align = Some('<'),
                '#' => spec.alternate = true,
                '0' => spec.fill = Some('0'),
                '+' => spec.sign = Some('+'),
                _ => spec.sign = spec.sign.or(Some(' ')),
            }
            rest = &rest[1..];
        }
        let mut number = |rest: &mut &str| -> Fallible<Option<i128>> {
            if let Some(behind) = rest.strip_prefix('*') {
                *rest = behind;
                return match next.next().and_then(PyValue::as_int) {
                    Some(n) => Ok(Some(n)),
                    None => fail("* wants int"),
                };
            }
            let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            let digits = &rest[..end];
            *rest = &rest[end..];
            Ok(if digits.is_empty() { None } else { Some(digits.parse().unwrap_or(i128::MAX)) })
        };
        let limited = |n: i128| match usize::try_from(n.unsigned_abs()) {
            Ok(n) if n <= MOST_WIDTH => Ok(n),
            _ => fail("a format that is too wide"),
        };
        if let Some(width) = number(&mut rest)? {
            spec.align = if width < 0 { Some('<') } else { spec.align };
            spec.width = limited(width)?;
        }
        if let Some(behind) = rest.strip_prefix('.') {
            rest = behind;
            spec.precision = Some(limited(number(&mut rest)?.unwrap_or(0).max(0))?);
        }
        rest = rest.strip_prefix(['h', 'l', 'L']).unwrap_or(rest);
        let Some(kind) = rest.chars().next() else { return fail("incomplete format") };
        rest = &rest[kind.len_utf8()..];
        if kind == '%' {
            out.push("%")?;
            continue;
        }
        let Some(value) = named.as_ref().or_else(|| next.next()) else {
            return fail("not enough arguments for format string");
        };
        percent_one(&mut out, &mut spec, kind, value)?;
    }
    out.push(rest)?;
    let accepts_more = uses_names
        || matches!(values, PyValue::Dict(_) | PyValue::List(_) | PyValue::Range(_) | PyValue::Undefined(_));
    if next.next().is_some() && !accepts_more {
        return fail("not all arguments converted during string formatting");
    }
    Ok(out.finish())
}

fn percent_one(out: &mut TextOut, spec: &mut Spec, kind: char, value: &PyValue) -> Fallible<()> {
    let default = if matches!(spec.fill, Some('0')) && spec.align.is_none() { '=' } else { '>' };
    if spec.align == Some('<') {
        spec.fill = None;
    }
    let wrong = || fail(format!("%{kind} format: a number is required, not {}", value.type_name()));
    match kind {
        's' | 'r' | 'a' | 'c' => {
            let text = match (kind, value.as_int()) {
                ('c', Some(n)) => {
                    u32::try_from(n).ok().and_then(char::from_u32).map(String::from).unwrap_or_default()
                }
                ('c', None) if value.as_str().is_none_or(|c| char_count(c) != 1) => {
                    return fail("%c requires int or char");
                }
                ('r' | 'a', _) => represented(value)?,
                _ => printed(value)?,
            };
            let text: String = match spec.precision {
                Some(n) if kind != 'c' => text.chars().take(n).collect(),
                _ => text,
            };
            spec.fill = None;
            padded(out, spec, '>', "", &text)
        }
        'd' | 'i' | 'u' | 'x' | 'X' | 'o' => {
            value.defined()?;
            let n = match (value, value.as_int()) {
                (_, Some(n)) => n,
                (PyValue::Float(x), _) if matches!(kind, 'd' | 'i' | 'u') && x.is_finite() => *x as i128,
                _ => return wrong(),
            };
            let (mark, mut digits) = int_digits(n, spec, kind);
            let missing = spec.precision.unwrap_or(0).saturating_sub(digits.len());
            digits.insert_str(0, &"0".repeat(missing));
            padded(out, spec, default, &(sign_text(spec, n < 0) + mark), &digits)
        }
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
            value.defined()?;
            let Some(x) = value.as_float() else { return wrong() };
            let digits = digits_of(x, kind.to_ascii_lowercase(), spec.precision.unwrap_or(6), spec.alternate);
            let digits = if kind.is_ascii_uppercase() { digits.to_uppercase() } else { digits };
            padded(out, spec, default, &sign_text(spec, x.is_sign_negative()), &digits)
        }
        other => fail(format!("unsupported format character '{other}'")),
    }
}

/// Returns the text of `format.format(values, names)`.
pub fn braces(format: &str, values: &[PyValue], names: &PyValue) -> Fallible<String> {
    let mut out = TextOut::default();
    let mut count = 0;
    braces_into(&mut out, format, values, names, &mut count, 2)?;
    Ok(out.finish())
}

fn braces_into(
    out: &mut TextOut,
    format: &str,
    values: &[PyValue],
    names: &PyValue,
    count: &mut usize,
    depth: usize,
) -> Fallible<()> {
    let Some(depth) = depth.checked_sub(1) else { return fail("Max string recursion exceeded") };
    let mut rest = format;
    while let Some(at) = rest.find(['{', '}']) {
        out.push(&rest[..at])?;
        let brace = &rest[at..=at];
        rest = &rest[at + 1..];
        if let Some(behind) = rest.strip_prefix(brace) {
            out.push(brace)?;
            rest = behind;
            continue;
        }
        if brace == "}" {
            return fail("Single '}' encountered in format string");
        }
        let mut open = 1;
        let end = rest.find(|c| {
            open = if c == '{' {
                open + 1
            } else if c == '}' {
                open - 1
            } else {
                open
            };
            open == 0
        });
        let Some(end) = end else { return fail("expected '}' before end of string") };
        let field = &rest[..end];
        rest = &rest[end + 1..];
        let (field, specification) = match field.find(':') {
            Some(i) => (&field[..i], &field[i + 1..]),
            None => (field, ""),
        };
        let (field, conversion) = match field.split_once('!') {
            Some((field, conversion)) => (field, Some(conversion)),
            None => (field, None),
        };
        let value = field_value(field, values, names, count)?;
        let mut specified = TextOut::default();
        braces_into(&mut specified, specification, values, names, count, depth)?;
        match conversion {
            None => formatted(&value, specified.text(), out)?,
            Some("s") => formatted(&PyValue::text(printed(&value)?), specified.text(), out)?,
            Some("r" | "a") => formatted(&PyValue::text(represented(&value)?), specified.text(), out)?,
            Some(other) => return fail(format!("Unknown conversion specifier {other}")),
        }
    }
    out.push(rest)
}

/// Returns the value of a field such as `0.name[key]`.
fn field_value(field: &str, values: &[PyValue], names: &PyValue, count: &mut usize) -> Fallible<PyValue> {
    let end = field.find(['.', '[']).unwrap_or(field.len());
    let first = &field[..end];
    let position = match first {
        "" => {
            *count += 1;
            Some(*count - 1)
        }
        first => first.parse().ok(),
    };
    let mut value = match position {
        Some(i) => values.get(i).cloned().ok_or_else(|| {
            super::meter::TemplateFault::new(format!(
                "Replacement index {i} out of range for positional args tuple"
            ))
        })?,
        None => match names {
            PyValue::Dict(dict) if dict.named(first).is_some() => {
                dict.named(first).cloned().unwrap_or(PyValue::None)
            }
            _ => {
                let mut out = TextOut::default();
                quote(first, &mut out)?;
                return fail(format!("KeyError: {}", out.text()));
            }
        },
    };
    let mut rest = &field[end..];
    while !rest.is_empty() {
        if let Some(inner) = rest.strip_prefix('[') {
            let Some((key, behind)) = inner.split_once(']') else {
                return fail("Missing ']' in format string");
            };
            let key = key.parse().map_or_else(|_| PyValue::text(key), PyValue::Int);
            value = item(&value, &key)?;
            rest = behind;
        } else {
            let inner = &rest[1..];
            let end = inner.find(['.', '[']).unwrap_or(inner.len());
            value = attribute(&value, &super::meter::Text::new(&inner[..end]))?;
            rest = &inner[end..];
        }
    }
    Ok(value)
}
