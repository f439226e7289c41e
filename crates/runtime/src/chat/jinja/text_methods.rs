//! Methods of Python's texts.

use super::arguments::{GivenArguments, int_or, is_set, needed, text_of, text_or_none};
use super::format::{braces, percent};
use super::items::slice_range;
use super::lexer::is_blank;
use super::meter::{Fallible, TextOut, fail, reserve, scan, spend};
use super::print::{is_printable, printed};
use super::py_value::{PyValue, char_count};

/// Calls a method of a text.
pub fn call(text: &str, method: &str, given: &GivenArguments) -> Fallible<PyValue> {
    let only_ends = ["startswith", "endswith", "removeprefix", "removesuffix"].contains(&method)
        && given.positional.len() == 1;
    scan(if only_ends { "" } else { text })?;
    let is_all = |test: fn(char) -> bool| !text.is_empty() && text.chars().all(test);
    let nothing = || given.bind::<0>(method, []).map(|_| ());
    let new = |text: String| Ok(PyValue::text(text));
    match method {
        "upper" => nothing().and_then(|()| new(text.to_uppercase())),
        "lower" => nothing().and_then(|()| new(text.to_lowercase())),
        "casefold" => nothing().and_then(|()| new(text.to_lowercase().replace('ß', "ss"))),
        "capitalize" => nothing().and_then(|()| new(capitalized(text))),
        "title" => nothing().and_then(|()| new(titled(text))),
        "swapcase" => nothing().and_then(|()| {
            let swapped = |c: char| match c.is_uppercase() {
                true => c.to_lowercase().collect::<String>(),
                false => c.to_uppercase().collect(),
            };
            new(text.chars().map(swapped).collect())
        }),
        "isalnum" => Ok(PyValue::Bool(is_all(char::is_alphanumeric))),
        "isalpha" => Ok(PyValue::Bool(is_all(char::is_alphabetic))),
        "isascii" => Ok(PyValue::Bool(text.is_ascii())),
        "isdecimal" | "isdigit" => Ok(PyValue::Bool(is_all(|c| c.is_numeric() && is_digit(c)))),
        "isnumeric" => Ok(PyValue::Bool(is_all(char::is_numeric))),
        "isidentifier" => Ok(PyValue::Bool(
            is_all(|c| c == '_' || c.is_alphanumeric()) && !text.starts_with(|c: char| c.is_numeric()),
        )),
        "islower" => Ok(PyValue::Bool(has_case(text, char::is_lowercase))),
        "isupper" => Ok(PyValue::Bool(has_case(text, char::is_uppercase))),
        "isprintable" => Ok(PyValue::Bool(text.chars().all(is_printable))),
        "isspace" => Ok(PyValue::Bool(is_all(is_blank))),
        "istitle" => {
            let has_letters = text.chars().any(|c| c.is_uppercase() || c.is_lowercase());
            Ok(PyValue::Bool(has_letters && titled(text) == text))
        }
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = given.bind(method, ["chars"])?;
            new(stripped(text, text_or_none(&chars)?, method != "rstrip", method != "lstrip").into())
        }
        "removeprefix" | "removesuffix" => {
            let [part] = given.bind(method, ["part"])?;
            let part = text_of(&part, "part")?;
            let rest =
                if method == "removeprefix" { text.strip_prefix(part) } else { text.strip_suffix(part) };
            new(rest.unwrap_or(text).into())
        }
        "startswith" | "endswith" => {
            let [parts, start, end] = given.bind(method, ["parts", "start", "end"])?;
            let within = part_between(text, start, end)?;
            let matches = |part: &str| match within {
                Some(within) if method == "startswith" => within.starts_with(part),
                Some(within) => within.ends_with(part),
                None => false,
            };
            match needed(&parts, "parts")? {
                PyValue::Tuple(items) => {
                    let mut any = false;
                    for part in items.iter() {
                        any |= matches(text_of(&Some(part.clone()), "parts")?);
                    }
                    Ok(PyValue::Bool(any))
                }
                _ => Ok(PyValue::Bool(matches(text_of(&parts, "parts")?))),
            }
        }
        "find" | "rfind" | "index" | "rindex" | "count" => {
            let [part, start, end] = given.bind(method, ["part", "start", "end"])?;
            let part = text_of(&part, "part")?;
            let offset = match &start {
                None | Some(PyValue::None) => 0,
                Some(_) => slice_range(&[start.clone(), None, None], char_count(text))?.start as usize,
            };
            let within = part_between(text, start, end)?;
            if method == "count" {
                let count = within.map_or(0, |within| match part {
                    "" => char_count(within) + 1,
                    part => within.matches(part).count(),
                });
                return Ok(PyValue::Int(count as i128));
            }
            let found = within.and_then(|within| {
                let at = if method.starts_with('r') { within.rfind(part) } else { within.find(part) };
                at.map(|at| offset + char_count(&within[..at]))
            });
            match found {
                Some(at) => Ok(PyValue::Int(at as i128)),
                None if method.ends_with("index") => fail("substring not found"),
                None => Ok(PyValue::Int(-1)),
            }
        }
        "replace" => {
            let [old, new_part, count] = given.bind(method, ["old", "new", "count"])?;
            let count = int_or(&count, -1)?;
            new(replaced(text, text_of(&old, "old")?, text_of(&new_part, "new")?, count)?)
        }
        "split" | "rsplit" => {
            let [separator, count] = given.bind(method, ["sep", "maxsplit"])?;
            split(text, text_or_none(&separator)?, int_or(&count, -1)?, method == "rsplit")
        }
        "splitlines" => {
            let [keep] = given.bind(method, ["keepends"])?;
            PyValue::list(lines(text, is_set(&keep)).into_iter().map(PyValue::text).collect())
        }
        "partition" | "rpartition" => {
            let separator = given.one(method)?;
            let separator = Some(separator);
            let separator = text_of(&separator, "sep")?;
            if separator.is_empty() {
                return fail("empty separator");
            }
            let parts = match (method, text.split_once(separator), text.rsplit_once(separator)) {
                ("partition", Some((a, b)), _) | ("rpartition", _, Some((a, b))) => [a, separator, b],
                ("partition", ..) => [text, "", ""],
                _ => ["", "", text],
            };
            PyValue::tuple(parts.into_iter().map(PyValue::text).collect())
        }
        "join" => {
            let mut out = TextOut::default();
            for (i, part) in given.one(method)?.values()?.enumerate() {
                match part.as_str() {
                    Some(part) => {
                        out.push(if i > 0 { text } else { "" })?;
                        out.push(part)?;
                    }
                    None => {
                        let found = part.type_name();
                        return fail(format!("sequence item {i}: expected str instance, {found} found"));
                    }
                }
            }
            new(out.finish())
        }
        "ljust" | "rjust" | "center" => {
            let [width, fill] = given.bind(method, ["width", "fillchar"])?;
            needed(&width, "width")?;
            let fill = text_or_none(&fill)?.unwrap_or(" ");
            let (Some(c), 1) = (fill.chars().next(), char_count(fill)) else {
                return fail("The fill character must be exactly one character long");
            };
            new(adjusted(text, int_or(&width, 0)?, c, method)?)
        }
        "zfill" => {
            let [width] = given.bind(method, ["width"])?;
            needed(&width, "width")?;
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            let width = int_or(&width, 0)? - sign.len() as i128;
            new([sign, &adjusted(digits, width, '0', "rjust")?].concat())
        }
        "expandtabs" => {
            let [size] = given.bind(method, ["tabsize"])?;
            let size = usize::try_from(int_or(&size, 8)?.clamp(0, 1 << 20)).unwrap_or(0);
            let mut out = TextOut::default();
            let mut column = 0;
            for c in text.chars() {
                match c {
                    '\t' if size == 0 => {}
                    '\t' => {
                        out.pad(' ', size - column % size)?;
                        column += size - column % size;
                    }
                    c => {
                        out.push(c.encode_utf8(&mut [0; 4]))?;
                        column = if c == '\n' || c == '\r' { 0 } else { column + 1 };
                    }
                }
            }
            new(out.finish())
        }
        "format" => {
            let names = given.named.iter().map(|(name, value)| (PyValue::Str(name.clone()), value.clone()));
            new(braces(text, &given.positional, &PyValue::dict(names)?)?)
        }
        "format_map" => new(braces(text, &[], &given.one(method)?)?),
        _ => fail(format!("'str' object has no attribute '{method}'")),
    }
}

fn is_digit(c: char) -> bool {
    c.is_ascii_digit()
        || !c.is_ascii() && !matches!(c, '¼'..='¾' | '\u{2150}'..='\u{218b}' | '一'..='\u{9fff}')
}

/// Tells whether all letters with a case have this one, and there is one.
pub fn has_case(text: &str, test: fn(char) -> bool) -> bool {
    let mut letters = text.chars().filter(|c| c.is_uppercase() || c.is_lowercase()).peekable();
    letters.peek().is_some() && letters.all(test)
}

/// Returns a text with its first letter in upper case, and the others in lower case.
fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(title_letter).unwrap_or_default();
    first + &chars.as_str().to_lowercase()
}

/// Returns a letter as a word begins with it: `Ss` of `ß`.
fn title_letter(c: char) -> String {
    match c {
        'Ǆ' | 'ǆ' => "ǅ".into(),
        'Ǉ' | 'ǉ' => "ǈ".into(),
        'Ǌ' | 'ǌ' => "ǋ".into(),
        'Ǳ' | 'ǳ' => "ǲ".into(),
        c => {
            let mut upper = c.to_uppercase();
            upper.next().into_iter().chain(upper.flat_map(char::to_lowercase)).collect()
        }
    }
}

/// Returns a text with the first letter of each word in upper case, as the method does.
fn titled(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        if in_word {
            out.extend(c.to_lowercase());
        } else {
            out += &title_letter(c);
        }
        in_word = c.is_uppercase() || c.is_lowercase();
    }
    out
}

/// Returns a text without blanks, or without `chars`, at its ends.
fn stripped<'a>(text: &'a str, chars: Option<&str>, start: bool, end: bool) -> &'a str {
    let goes = |c: char| chars.map_or_else(|| is_blank(c), |chars| chars.contains(c));
    let text = if start { text.trim_start_matches(goes) } else { text };
    if end { text.trim_end_matches(goes) } else { text }
}

/// Returns the part of a text between two places; none where the first lies behind the text.
fn part_between(text: &str, start: Option<PyValue>, end: Option<PyValue>) -> Fallible<Option<&str>> {
    if start.is_none() && end.is_none() {
        return Ok(Some(text));
    }
    let length = char_count(text);
    if start.as_ref().and_then(PyValue::as_int).is_some_and(|n| n > length as i128) {
        return Ok(None);
    }
    let range = slice_range(&[start, end, None], length)?;
    let byte = |i: i128| text.char_indices().nth(i as usize).map_or(text.len(), |(at, _)| at);
    Ok(Some(&text[byte(range.start)..byte(range.start + range.length)]))
}

/// Returns a text with a part replaced, at most `count` times where that is not negative.
pub fn replaced(text: &str, old: &str, new: &str, count: i128) -> Fallible<String> {
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let found = text.matches(old).take(count).count();
    reserve((text.len() - found * old.len()).saturating_add(found.saturating_mul(new.len())))?;
    Ok(text.replacen(old, new, count))
}

fn split(text: &str, separator: Option<&str>, count: i128, from_end: bool) -> Fallible<PyValue> {
    let count = usize::try_from(count).unwrap_or(usize::MAX - 1);
    let mut parts: Vec<&str> = match separator {
        Some("") => return fail("empty separator"),
        Some(separator) if from_end => text.rsplitn(count + 1, separator).collect(),
        Some(separator) => text.splitn(count + 1, separator).collect(),
        None => {
            let mut parts = Vec::new();
            let mut rest = stripped(text, None, !from_end, from_end);
            while !rest.is_empty() {
                let cut = if from_end { rest.rfind(is_blank) } else { rest.find(is_blank) };
                if parts.len() >= count || cut.is_none() {
                    break;
                }
                let Some(at) = cut else { break };
                let blank = rest[at..].chars().next().map_or(1, char::len_utf8);
                let (before, behind) = (&rest[..at], &rest[at + blank..]);
                parts.push(if from_end { behind } else { before });
                rest = stripped(if from_end { before } else { behind }, None, !from_end, from_end);
            }
            if !rest.is_empty() {
                parts.push(rest);
            }
            parts
        }
    };
    if from_end {
        parts.reverse();
    }
    spend(parts.len() as u64)?;
    reserve(parts.len().saturating_mul(size_of::<PyValue>() + 48).saturating_add(text.len()))?;
    PyValue::list(parts.into_iter().map(PyValue::text).collect())
}

/// Splits a text at its line ends.
pub fn lines(text: &str, keep: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = text;
    let ends_line = |c| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    while !rest.is_empty() {
        let Some(at) = rest.find(ends_line) else {
            lines.push(rest);
            break;
        };
        let length = match rest[at..].starts_with("\r\n") {
            true => 2,
            false => rest[at..].chars().next().map_or(1, char::len_utf8),
        };
        lines.push(&rest[..at + if keep { length } else { 0 }]);
        rest = &rest[at + length..];
    }
    lines
}

/// Returns a text filled up to a width.
pub fn adjusted(text: &str, width: i128, fill: char, method: &str) -> Fallible<String> {
    let missing = usize::try_from(width - char_count(text) as i128).unwrap_or(0);
    let before = match method {
        "ljust" => 0,
        "rjust" => missing,
        // Python puts the odd one before the text where the width is odd.
        _ => missing / 2 + (missing & width as usize & 1),
    };
    let mut out = TextOut::default();
    out.pad(fill, before)?;
    out.push(text)?;
    out.pad(fill, missing - before)?;
    Ok(out.finish())
}

/// Returns the text of the filter `format`.
pub fn format_filter(format: &PyValue, given: &GivenArguments) -> Fallible<PyValue> {
    let format = printed(format)?;
    let values = match (given.named.is_empty(), given.positional.is_empty()) {
        (false, true) => PyValue::dict(
            given.named.iter().map(|(name, value)| (PyValue::Str(name.clone()), value.clone())),
        )?,
        (true, _) => PyValue::tuple(given.positional.clone())?,
        _ => return fail("can't handle positional and keyword arguments at the same time"),
    };
    Ok(PyValue::text(percent(&format, &values)?))
}
