//! Filters that make a text of a text.

use super::arguments::{GivenArguments, int_or, is_set, needed, printed_or, text_of, text_or_none};
use super::lexer::is_blank;
use super::meter::{Fallible, Text, TextOut, fail, scan, spend};
use super::print::{escape, printed, represented};
use super::py_value::{PyValue, char_count, sort};
use super::text_methods::{self, adjusted, format_filter, lines, replaced};

/// Characters of a line of `pprint`, which breaks longer ones.
const MOST_PRETTY: usize = 80;

/// Calls a filter on a text; none where it is another filter.
pub fn filter_text(name: &str, value: &PyValue, given: &GivenArguments) -> Fallible<Option<PyValue>> {
    let text = |text: String| Ok(Some(PyValue::text(text)));
    if ["replace", "indent", "truncate", "wordwrap", "urlencode"].contains(&name) {
        scan(value.as_str().unwrap_or_default())?;
    }
    let plain = |value: &PyValue| {
        given.bind::<0>(name, [])?;
        let text = printed(value)?;
        scan(&text)?;
        Ok(text)
    };
    match name {
        "string" => match value {
            PyValue::Markup(_) => Ok(Some(value.clone())),
            _ => text(plain(value)?),
        },
        "upper" | "lower" | "capitalize" => text_methods::call(&plain(value)?, name, given).map(Some),
        "title" => text(titled(&plain(value)?)),
        "wordcount" => {
            let is_word = |c: char| c == '_' || c.is_alphanumeric();
            let words = plain(value)?.split(|c| !is_word(c)).filter(|word| !word.is_empty()).count();
            Ok(Some(PyValue::Int(words as i128)))
        }
        "escape" | "e" | "forceescape" => match value {
            PyValue::Markup(_) if name != "forceescape" => Ok(Some(value.clone())),
            _ => Ok(Some(PyValue::Markup(Text::new(escaped(&plain(value)?)?)))),
        },
        "safe" => Ok(Some(PyValue::Markup(Text::new(plain(value)?)))),
        "striptags" => {
            let whole = plain(value)?;
            (0..4).try_for_each(|_| scan(&whole))?;
            text(without_tags(&whole))
        }
        "pprint" => match represented(&with_sorted_keys(value)?)? {
            short if char_count(&short) <= MOST_PRETTY => text(short),
            _ => fail(format!("pprint: more than the {MOST_PRETTY} characters of a line")),
        },
        "trim" => text_methods::call(&printed(value)?, "strip", given).map(Some),
        "center" => {
            let [width] = given.bind(name, ["width"])?;
            text(adjusted(&printed(value)?, int_or(&width, 80)?, ' ', name)?)
        }
        "replace" => {
            let [old, new, count] = given.bind(name, ["old", "new", "count"])?;
            let (old, new) = (printed(needed(&old, "old")?)?, printed(needed(&new, "new")?)?);
            let count = if matches!(count, Some(PyValue::None)) { None } else { count };
            text(replaced(&printed(value)?, &old, &new, int_or(&count, -1)?)?)
        }
        "format" => format_filter(value, given).map(Some),
        "indent" => {
            let [width, first, blank] = given.bind(name, ["width", "first", "blank"])?;
            let Some(body) = value.as_str() else {
                value.defined()?;
                return fail(format!(
                    "unsupported operand type(s) for +=: '{}' and 'str'",
                    value.type_name()
                ));
            };
            let indent = match &width {
                Some(width) if width.as_str().is_some() => printed(width)?,
                width => " ".repeat(usize::try_from(int_or(width, 4)?.min(1 << 20)).unwrap_or(0)),
            };
            let body = [body, "\n"].concat();
            let mut out = TextOut::default();
            out.push(if is_set(&first) { &indent } else { "" })?;
            for (i, line) in lines(&body, false).into_iter().enumerate() {
                if i > 0 {
                    out.push("\n")?;
                    out.push(if !line.is_empty() || is_set(&blank) { &indent } else { "" })?;
                }
                out.push(line)?;
            }
            text(out.finish())
        }
        "truncate" => {
            let [length, kills, end, leeway] = given.bind(name, ["length", "killwords", "end", "leeway"])?;
            let (length, end) = (int_or(&length, 255)?, printed_or(&end, "...")?);
            let leeway = if matches!(leeway, Some(PyValue::None)) { 5 } else { int_or(&leeway, 5)? };
            let Some(size) = value.length() else {
                return fail(format!("object of type '{}' has no len()", value.type_name()));
            };
            let kept = length - char_count(&end) as i128;
            if kept < 0 || leeway < 0 {
                return fail("truncate: a length below that of the end");
            }
            if size as i128 <= length + leeway {
                return Ok(Some(value.clone()));
            }
            let Some(whole) = value.as_str() else { return fail("truncate: a text expected") };
            let cut: String = whole.chars().take(kept as usize).collect();
            let cut = if is_set(&kills) {
                cut.as_str()
            } else {
                cut.rsplit_once(' ').map_or(cut.as_str(), |(a, _)| a)
            };
            text([cut, &end].concat())
        }
        "wordwrap" => {
            let names = ["width", "break_long_words", "wrapstring", "break_on_hyphens"];
            let [width, breaks, wrap, hyphens] = given.bind(name, names)?;
            let width = usize::try_from(int_or(&width, 79)?).unwrap_or(0);
            if width == 0 {
                return fail("invalid width (must be > 0)");
            }
            let wrap = text_or_none(&wrap)?.unwrap_or("\n");
            let breaks = breaks.is_none() || is_set(&breaks);
            let hyphens = hyphens.is_none() || is_set(&hyphens);
            let value = Some(value.clone());
            let mut out = TextOut::default();
            for (i, line) in lines(text_of(&value, "value")?, false).into_iter().enumerate() {
                out.push(if i > 0 { wrap } else { "" })?;
                out.push(&wrapped(line, width, breaks, hyphens)?.join(wrap))?;
            }
            text(out.finish())
        }
        "urlencode" => {
            given.bind::<0>(name, [])?;
            let pairs = match value {
                PyValue::Dict(dict) => dict.entries().to_vec(),
                _ if value.as_str().is_some() || value.values().is_err() => {
                    return text(url_quoted(&printed(value)?, "/")?);
                }
                _ => {
                    let pair = |pair: PyValue| match &pair.to_vec()?[..] {
                        [key, value] => Ok((key.clone(), value.clone())),
                        _ => fail("urlencode: pairs expected"),
                    };
                    value.values()?.map(pair).collect::<Fallible<_>>()?
                }
            };
            let mut out = TextOut::default();
            for (i, (key, value)) in pairs.iter().enumerate() {
                out.push(if i > 0 { "&" } else { "" })?;
                out.push(&url_quoted(&printed(key)?, "")?.replace("%20", "+"))?;
                out.push("=")?;
                out.push(&url_quoted(&printed(value)?, "")?.replace("%20", "+"))?;
            }
            text(out.finish())
        }
        "xmlattr" => {
            let [space] = given.bind(name, ["autospace"])?;
            let PyValue::Dict(dict) = value else { return fail("xmlattr: a map expected") };
            let mut out = TextOut::default();
            for (key, value) in dict.entries() {
                if matches!(value, PyValue::None | PyValue::Undefined(_)) {
                    continue;
                }
                let key = printed(key)?;
                if key.contains([' ', '\t', '\n', '\r', '\u{b}', '\u{c}', '/', '>', '=']) {
                    return fail(format!("Invalid character in attribute name: {key:?}"));
                }
                let first = out.text().is_empty();
                out.push(if !first || space.is_none() || is_set(&space) { " " } else { "" })?;
                out.push(&escaped(&key)?)?;
                out.push("=\"")?;
                out.push(&if let PyValue::Markup(text) = value {
                    text.to_string()
                } else {
                    escaped(&printed(value)?)?
                })?;
                out.push("\"")?;
            }
            text(out.finish())
        }
        "filesizeformat" => {
            let [binary] = given.bind(name, ["binary"])?;
            let bytes = match (value.as_float(), value.as_str().map(|text| text.trim().parse())) {
                (Some(x), _) | (_, Some(Ok(x))) => x,
                _ => return fail("filesizeformat: a number expected"),
            };
            text(file_size(bytes, is_set(&binary)))
        }
        _ => Ok(None),
    }
}

fn with_sorted_keys(value: &PyValue) -> Fallible<PyValue> {
    match value {
        PyValue::List(items) => PyValue::list(items.iter().map(with_sorted_keys).collect::<Fallible<_>>()?),
        PyValue::Tuple(items) => PyValue::tuple(items.iter().map(with_sorted_keys).collect::<Fallible<_>>()?),
        PyValue::Dict(dict) => {
            let keys =
                sort(dict.entries().iter().map(|(key, _)| (key.clone(), key.clone())).collect(), false)?;
            let pair = |key: PyValue| {
                Ok((key.clone(), with_sorted_keys(dict.get(&key)?.unwrap_or(&PyValue::None))?))
            };
            PyValue::dict(keys.into_iter().map(pair).collect::<Fallible<Vec<_>>>()?)
        }
        other => Ok(other.clone()),
    }
}

/// Returns a text with the characters of HTML escaped.
pub fn escaped(text: &str) -> Fallible<String> {
    let mut out = TextOut::default();
    let is_plain = |c: char| !"&<>\"'".contains(c);
    escape(text, is_plain, &mut out, |c, out| {
        out.push(match c {
            '&' => "&amp;",
            '<' => "&lt;",
            '>' => "&gt;",
            '"' => "&#34;",
            _ => "&#39;",
        })
    })?;
    Ok(out.finish())
}

/// Returns a text with the first letter of each word in upper case, as the filter does.
fn titled(text: &str) -> String {
    let ends_word = |c: char| is_blank(c) || matches!(c, '-' | '(' | '{' | '[' | '<');
    let mut out = String::with_capacity(text.len());
    let mut begins = true;
    for c in text.chars() {
        if begins {
            out.extend(c.to_uppercase());
        } else {
            out.extend(c.to_lowercase());
        }
        begins = ends_word(c);
    }
    out
}

fn without_tags(text: &str) -> String {
    let mut out = text.to_string();
    for (open, close) in [("<!--", "-->"), ("<", ">")] {
        let mut kept = String::new();
        let mut rest = out.as_str();
        while let Some(at) = rest.find(open) {
            let Some(end) = rest[at..].find(close) else { break };
            kept += &rest[..at];
            rest = &rest[at + end + close.len()..];
        }
        out = kept + rest;
    }
    let words: Vec<&str> = out.split(is_blank).filter(|word| !word.is_empty()).collect();
    let text = words.join(" ");
    [("&lt;", "<"), ("&gt;", ">"), ("&#34;", "\""), ("&quot;", "\""), ("&#39;", "'"), ("&amp;", "&")]
        .iter()
        .fold(text, |text, (code, c)| text.replace(code, c))
}

fn url_quoted(text: &str, safe: &str) -> Fallible<String> {
    let mut out = TextOut::default();
    for byte in text.bytes() {
        let c = char::from(byte);
        if c.is_ascii_alphanumeric() || "_.-~".contains(c) || safe.contains(c) {
            out.push(c.encode_utf8(&mut [0; 4]))?;
        } else {
            out.push(&format!("%{byte:02X}"))?;
        }
    }
    Ok(out.finish())
}

fn file_size(bytes: f64, binary: bool) -> String {
    let base: f64 = if binary { 1024.0 } else { 1000.0 };
    if bytes == 1.0 {
        return "1 Byte".into();
    }
    if bytes < base {
        return format!("{} Bytes", bytes as i64);
    }
    let mut unit = base;
    let mut names = "kMGTPEZY".chars();
    let mut name = names.next();
    while bytes >= unit * base
        && let Some(next) = names.next()
    {
        (unit, name) = (unit * base, Some(next));
    }
    let name =
        name.map(|c| if binary { c.to_uppercase().collect() } else { String::from(c) }).unwrap_or_default();
    format!("{:.1} {name}{}", bytes / unit, if binary { "iB" } else { "B" })
}

/// Wraps a line as Python's `textwrap` does, blanks kept as they are.
fn wrapped(line: &str, width: usize, breaks: bool, hyphens: bool) -> Fallible<Vec<String>> {
    let mut chunks: Vec<&str> = Vec::new();
    let mut start = 0;
    let chars: Vec<(usize, char)> = line.char_indices().collect();
    for (i, (at, c)) in chars.iter().enumerate() {
        let Some((_, before)) = i.checked_sub(1).map(|i| chars[i]) else { continue };
        let is_letter =
            |i: Option<usize>| i.and_then(|i| chars.get(i)).is_some_and(|(_, c)| c.is_alphabetic());
        let behind_hyphen = hyphens
            && before == '-'
            && is_letter(i.checked_sub(2))
            && is_letter(i.checked_sub(3))
            && is_letter(Some(i))
            && (is_letter(Some(i + 1)) || chars.get(i + 1).is_some_and(|(_, c)| *c == '-'));
        if is_blank(before) != is_blank(*c) || behind_hyphen {
            chunks.push(&line[start..*at]);
            start = *at;
        }
    }
    chunks.push(&line[start..]);
    chunks.retain(|chunk| !chunk.is_empty());
    spend(2 * chunks.len() as u64)?;
    chunks.reverse();
    let is_space = |chunk: &str| chunk.chars().all(is_blank);
    let mut all: Vec<String> = Vec::new();
    while !chunks.is_empty() {
        if !all.is_empty() && chunks.last().is_some_and(|chunk| is_space(chunk)) {
            chunks.pop();
        }
        let mut current: Vec<&str> = Vec::new();
        let mut length = 0;
        while let Some(chunk) = chunks.last().filter(|chunk| length + char_count(chunk) <= width) {
            length += char_count(chunk);
            current.push(chunk);
            chunks.pop();
        }
        if let Some(chunk) = chunks.last().copied().filter(|chunk| char_count(chunk) > width) {
            if breaks {
                let end = chunk.char_indices().nth(width - length).map_or(chunk.len(), |(at, _)| at);
                current.push(&chunk[..end]);
                chunks.pop();
                chunks.push(&chunk[end..]);
            } else if current.is_empty() {
                current.push(chunk);
                chunks.pop();
            }
        }
        if current.last().is_some_and(|chunk| is_space(chunk)) {
            current.pop();
        }
        if !current.is_empty() {
            all.push(current.concat());
        }
    }
    Ok(all)
}
