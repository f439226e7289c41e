//! Values as models write them: JSON, Gemma's braces, Python, and what small models make of these.
//!
//! ```text
//! VALUE  "text" | 'text' | <|"|>text<|"|> | text | 1 | true | True | null | None | {KEY:VALUE,..} | [VALUE,..]
//! ```
//! Marks around a text may be missing on either side. The schema of the tool decides where such a text ends (before the
//! next property), and whether `5` is a number or a text. What it leaves undecided is no value.

use super::schema::{ArgumentShape, FRACTION, INTEGER, LIST, LONG, NULL, OBJECT, TEXT, type_of};
use serde_json::{Map, Number, Value};

/// Most nested values that are read.
const MAX_DEPTH: usize = 64;
/// Most bytes of a key without quotation marks.
const MAX_KEY: usize = 128;

/// Reads values from a text.
pub struct ValueReader<'a> {
    text: &'a str,
    at: usize,
    /// Mark around texts besides quotation marks; empty where there is none.
    mark: &'a str,
    /// True if the end of the text closes what is open.
    is_ended: bool,
    /// True if the end of the text had to close something.
    pub is_mended: bool,
    /// Quotation marks that close no text from here on, so that none is looked for again.
    unclosed: Vec<char>,
}

impl<'a> ValueReader<'a> {
    /// Makes a reader. `is_ended` says that the text is whole, so that its end may close what is open.
    pub fn new(text: &'a str, mark: &'a str, is_ended: bool) -> ValueReader<'a> {
        ValueReader { text, at: 0, mark, is_ended, is_mended: false, unclosed: Vec::new() }
    }

    /// Returns the text that is not read yet.
    pub fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// Skips blanks, and returns the next character.
    fn peek(&mut self) -> Option<char> {
        self.at = self.text.len() - self.rest().trim_start().len();
        self.rest().chars().next()
    }

    fn skip(&mut self, mark: char) -> bool {
        let found = self.peek() == Some(mark);
        self.at += if found { mark.len_utf8() } else { 0 };
        found
    }

    /// Tells whether the text ends here; that closes what is open.
    fn ends(&mut self) -> bool {
        let ends = self.peek().is_none() && self.is_ended;
        self.is_mended |= ends;
        ends
    }

    /// Skips what separates entries; before a key of `object` it may be missing. Returns false where the mark `outer` ends what is around, since the own one is
    /// missing; `None` where the text goes on otherwise.
    fn goes_on(&mut self, own: char, outer: char, object: Option<&ArgumentShape<'_>>) -> Option<bool> {
        if self.skip(',') || self.ends() || object.is_some_and(|o| self.key_follows(self.rest(), o)) {
            return Some(true);
        }
        match self.peek()? {
            c if c == own => Some(true),
            c if c == outer && self.is_ended => {
                self.is_mended = true;
                Some(false)
            }
            _ => None,
        }
    }

    /// Reads an object; `None` where the text has another form.
    pub fn object(&mut self, shape: &ArgumentShape<'_>, depth: usize) -> Option<Map<String, Value>> {
        if depth >= MAX_DEPTH || !self.skip('{') {
            return None;
        }
        // Models that saw templates of Python double the braces.
        let is_doubled = self.skip('{');
        let mut object = Map::new();
        while !self.skip('}') {
            if self.ends() {
                return Some(object).filter(|object| !object.is_empty());
            }
            let key = self.key()?;
            if key.is_empty() || !(self.skip(':') || self.skip('=')) || self.peek().is_none() {
                return None;
            }
            let (start, inner) = (self.at, shape.property(&key));
            let value = self.value(&inner, Some(shape), depth + 1)?;
            // What the schema does not let be null is left out.
            let is_none = ["None", "null"].contains(&self.text[start..self.at].trim());
            if !is_none || inner.types() & NULL != 0 || shape.requires(&key) {
                object.insert(key, value);
            }
            if !self.goes_on('}', ']', Some(shape))? {
                return Some(object);
            }
        }
        if is_doubled {
            self.skip('}');
        }
        Some(object)
    }

    fn list(&mut self, shape: &ArgumentShape<'_>, depth: usize) -> Option<Vec<Value>> {
        if depth >= MAX_DEPTH || !self.skip('[') {
            return None;
        }
        let mut list = Vec::new();
        while !self.skip(']') {
            if self.ends() {
                break;
            }
            list.push(self.value(&shape.item(list.len()), None, depth + 1)?);
            if !self.goes_on(']', '}', None)? {
                break;
            }
        }
        Some(list)
    }

    fn key(&mut self) -> Option<String> {
        let first = self.peek()?;
        if !self.mark.is_empty()
            && let Some(rest) = self.rest().strip_prefix(self.mark)
        {
            let (key, _) = rest.split_once(self.mark)?;
            self.at += key.len() + 2 * self.mark.len();
            return Some(key.into());
        }
        if matches!(first, '"' | '\'') {
            return self.quoted(first, &[':']);
        }
        let length = self.rest().bytes().take(MAX_KEY).position(|b| b":={}[],\"".contains(&b))?;
        let key = self.rest().get(..length)?;
        self.at += length;
        Some(key.trim().into())
    }

    /// Reads a value that fits a schema, if its text does. `object` is the shape of the object that holds it.
    fn value(
        &mut self,
        shape: &ArgumentShape<'_>,
        object: Option<&ArgumentShape<'_>>,
        depth: usize,
    ) -> Option<Value> {
        let first = self.peek()?;
        if !self.mark.is_empty() && self.rest().starts_with(self.mark) {
            return self.marked(object).map(|text| fit(text, shape, depth));
        }
        let types = shape.types();
        match first {
            '{' | '[' => {
                let (start, is_mended) = (self.at, self.is_mended);
                let value = match first {
                    '{' => self.object(shape, depth).map(Value::from),
                    _ => self.list(shape, depth).map(Value::from),
                };
                let is_whole = value.is_some() && is_end(self.rest(), &[',', '}', ']']);
                if is_whole || types & TEXT == 0 {
                    return value;
                }
                // A text that begins with a bracket.
                (self.at, self.is_mended) = (start, is_mended);
            }
            // A tuple of Python.
            '(' if types & LIST != 0 && types & TEXT == 0 => {
                let mut ends = self.rest().match_indices(')').map(|(i, _)| i);
                let end = ends.find(|i| is_end(&self.rest()[i + 1..], &[',', '}', ']']))?;
                let inner = format!("[{}]", &self.rest()[1..end]);
                let mut reader = ValueReader::new(&inner, self.mark, false);
                let list = reader.list(shape, depth)?;
                self.at += end + 1;
                return reader.rest().is_empty().then(|| list.into());
            }
            '"' | '\'' => {
                if let Some(text) = self.quoted(first, &[',', '}', ']']) {
                    return Some(fit(text, shape, depth));
                }
                // The closing mark is missing.
                self.at += usize::from(first == '"');
                let (text, is_closed) = self.bare(object, true)?;
                let opened = text.strip_prefix('\'').filter(|_| is_closed);
                let text = opened.unwrap_or(if first == '"' { without_close(text) } else { text });
                return Some(fit(text.into(), shape, depth));
            }
            _ => {}
        }
        match self.bare(object, types & TEXT != 0)? {
            ("", _) => None,
            (text, true) => Some(fit(text.into(), shape, depth)),
            (word, false) => fit_word(word, shape),
        }
    }

    /// Reads a text that begins with a mark.
    fn marked(&mut self, object: Option<&ArgumentShape<'_>>) -> Option<String> {
        self.at += self.mark.len();
        let rest = self.rest();
        if let Some((text, behind)) = rest.split_once(self.mark)
            && (is_end(behind, &[',', '}', ']']) || object.is_some_and(|o| self.key_follows(behind, o)))
        {
            self.at += text.len() + self.mark.len();
            return Some(text.into());
        }
        // The closing mark is missing: the text must end before the next one.
        let (text, _) = self.bare(object, true)?;
        (!text.contains(self.mark)).then(|| without_close(text).into())
    }

    /// Reads a text in quotation marks. The closing one is followed by one of `ends`, so that others may stand inside.
    fn quoted(&mut self, quote: char, ends: &[char]) -> Option<String> {
        if self.unclosed.contains(&quote) {
            return None;
        }
        let (rest, mut text) = (&self.rest()[1..], String::new());
        let mut chars = rest.char_indices();
        while let Some((i, c)) = chars.next() {
            if c == quote && is_end(&rest[i + 1..], ends) {
                self.at += i + 2;
                // Three marks, as in Python.
                let two = [quote, quote].iter().collect::<String>();
                if rest[..i].len() >= 4 && rest.starts_with(&two) && rest[..i].ends_with(&two) {
                    text = text[2..text.len() - 2].into();
                }
                return Some(text);
            }
            if c != '\\' {
                text.push(c);
                continue;
            }
            let Some((_, escape)) = chars.next() else { break };
            match escape {
                'n' => text.push('\n'),
                't' => text.push('\t'),
                'r' => text.push('\r'),
                'b' => text.push('\u{8}'),
                'f' => text.push('\u{c}'),
                'u' => text.push(escaped(&mut chars)),
                '"' | '\'' | '\\' | '/' => text.push(escape),
                _ => text.extend(['\\', escape]),
            }
        }
        if ends.len() > 1 {
            self.unclosed.push(quote);
        }
        None
    }

    /// Reads a text without an opening mark, up to the end of the list or before the next key of `object`; a word, which
    /// is no text, up to the next comma or bracket. Returns it, and whether a closing mark followed it.
    fn bare(&mut self, object: Option<&ArgumentShape<'_>>, is_text: bool) -> Option<(&'a str, bool)> {
        let rest = self.rest();
        let (mut end, mut braces, mut is_odd) = (None, 0, false);
        for (i, byte) in rest.bytes().enumerate() {
            let behind = || &rest[i + 1..];
            let is_end = match (byte, object) {
                (b',' | b']', None) => true,
                (b',' | b']' | b'}', _) if !is_text => true,
                (b',', Some(object)) => self.key_follows(behind(), object),
                // Braces of the text itself, but not the last one.
                (b'{', _) => {
                    braces += 1;
                    false
                }
                (b'}', _) if braces > 0 && !is_end(behind(), &[]) => {
                    braces -= 1;
                    false
                }
                (b'}', _) => {
                    let is_closing = self.is_closing(behind());
                    is_odd |= !is_closing;
                    is_closing
                }
                _ if !self.mark.is_empty() && byte == self.mark.as_bytes()[0] => {
                    let behind = rest.get(i..).and_then(|rest| rest.strip_prefix(self.mark));
                    if behind.is_some_and(|behind| is_end(behind, &[',', '}', ']'])) {
                        self.at += i + self.mark.len();
                        return Some((rest[..i].trim(), true));
                    }
                    false
                }
                _ => false,
            };
            if is_end {
                end = Some(i);
                break;
            }
        }
        if end.is_none() {
            if !self.is_ended || is_odd {
                return None;
            }
            self.is_mended = true;
        }
        let end = end.unwrap_or(rest.len());
        self.at += end;
        // A quotation mark at the end alone lacks the opening one.
        let text = rest[..end].trim();
        let marked = text.strip_suffix('"').filter(|text| is_text && !text.contains('"'));
        Some((marked.unwrap_or(text), marked.is_some()))
    }

    /// Tells whether a text, which follows a comma, begins with a key: one of `object`, or what looks like one.
    fn key_follows(&self, text: &str, object: &ArgumentShape<'_>) -> bool {
        let rest = text.trim_start();
        let has_blank = rest.len() < text.len();
        let open = [self.mark, "\"", "'"].into_iter().find(|q| !q.is_empty() && rest.starts_with(q));
        if let Some(quote) = open {
            let key = rest[quote.len()..].split_once(quote);
            return key.is_some_and(|(_, behind)| behind.trim_start().starts_with(':'));
        }
        let is_part = |b: u8| b.is_ascii_alphanumeric() || b"_.-$".contains(&b) || b >= 0x80;
        let length = rest.bytes().take(MAX_KEY).take_while(|b| is_part(*b)).count();
        let Some(key) = rest.get(..length).filter(|key| !key.is_empty()) else { return false };
        let behind = rest[length..].trim_start();
        if !behind.starts_with(':') {
            return behind.starts_with('=') && object.has(key);
        }
        let is_word = !key.starts_with(|c: char| c.is_ascii_digit()) && !behind.starts_with("://");
        object.has(key) || is_word && (!has_blank || !object.has_properties())
    }

    /// Tells whether a text may follow the brace that closes an object.
    fn is_closing(&self, text: &str) -> bool {
        let rest = text.trim_start();
        match rest.chars().next() {
            None | Some('}' | ']' | '{' | ';' | '`' | '<') => true,
            Some(',') => {
                let next = rest[1..].trim_start();
                let any = ArgumentShape::new(&Value::Null, &Value::Null);
                next.is_empty() || next.starts_with(['{', '[', '"', '\'']) || self.key_follows(next, &any)
            }
            // The word of the next call.
            Some(_) => rest.starts_with("call:"),
        }
    }
}

/// Returns a text without the quotation mark at its end that closes another mark.
fn without_close(text: &str) -> &str {
    text.strip_suffix('\'').filter(|text| !text.contains('\'')).unwrap_or(text)
}

/// Tells whether a text is empty or begins with one of `ends`, after blanks.
fn is_end(text: &str, ends: &[char]) -> bool {
    text.trim_start().chars().next().is_none_or(|c| ends.contains(&c))
}

/// Reads the digits of an escaped character, and of its second half where there are two.
fn escaped(chars: &mut std::str::CharIndices<'_>) -> char {
    let unit = |chars: &mut std::str::CharIndices<'_>| {
        let digits = chars.as_str().get(..4)?;
        let unit = u16::from_str_radix(digits, 16).ok()?;
        chars.nth(3);
        Some(unit)
    };
    let Some(first) = unit(chars) else { return char::REPLACEMENT_CHARACTER };
    let second = match first {
        0xd800..0xdc00 if chars.as_str().starts_with("\\u") => {
            chars.nth(1);
            unit(chars)
        }
        _ => None,
    };
    let units = [Some(first), second];
    let decoded = char::decode_utf16(units.into_iter().flatten()).next();
    decoded.and_then(Result::ok).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// Returns the value of a written text: the text, or what it says where the schema takes no texts.
pub fn fit(text: String, shape: &ArgumentShape<'_>, depth: usize) -> Value {
    let types = shape.types();
    if types & TEXT != 0 || depth >= MAX_DEPTH {
        return text.into();
    }
    let mut inner = ValueReader::new(text.trim(), "", false);
    let read = match inner.peek() {
        Some('{') if types & OBJECT != 0 => inner.object(shape, depth + 1).map(Value::from),
        Some('[') if types & LIST != 0 => inner.list(shape, depth + 1).map(Value::from),
        _ => fit_word(text.trim(), shape).filter(|value| type_of(value) & types != 0),
    };
    match read {
        Some(value) if inner.rest().is_empty() || !matches!(value, Value::Array(_) | Value::Object(_)) => {
            value
        }
        _ => text.into(),
    }
}

/// Returns the value of a word without marks; `None` for a number that JSON has not.
fn fit_word(word: &str, shape: &ArgumentShape<'_>) -> Option<Value> {
    let types = shape.types();
    let literal = match word {
        "None" => Some(Value::Null),
        "True" => Some(true.into()),
        "False" => Some(false.into()),
        _ => serde_json::from_str(word).ok(),
    };
    Some(match literal {
        // JSON's own null is meant as it stands.
        Some(Value::Null) if word == "null" || types & NULL != 0 => Value::Null,
        Some(Value::Number(number)) if number.is_f64() && types & INTEGER != 0 && is_whole(word) => {
            format!("{LONG}{word}").into()
        }
        Some(value) if type_of(&value) & types != 0 => value,
        Some(Value::Number(number)) if types & (INTEGER | FRACTION) != 0 => whole(number).into(),
        _ if types & TEXT != 0 => word.into(),
        Some(value) => value,
        None if types & (INTEGER | FRACTION) != 0 => match word.parse().map(Number::from_f64) {
            Ok(Some(number)) => whole(number).into(),
            Ok(None) if types & NULL != 0 => Value::Null,
            Ok(None) => return None,
            Err(_) => word.into(),
        },
        None => match word.to_ascii_lowercase().as_str() {
            "true" => true.into(),
            "false" => false.into(),
            _ => word.into(),
        },
    })
}

fn is_whole(word: &str) -> bool {
    let digits = word.strip_prefix('-').unwrap_or(word);
    !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
}

/// Writes a value as JSON, long whole numbers with all of their digits.
pub fn written(value: &Value) -> String {
    match value {
        Value::String(text) => match text.strip_prefix(LONG).filter(|digits| is_whole(digits)) {
            Some(digits) => digits.into(),
            None => value.to_string(),
        },
        Value::Array(list) => format!("[{}]", list.iter().map(written).collect::<Vec<_>>().join(",")),
        Value::Object(object) => {
            let entry =
                |(key, value): (&String, &Value)| format!("{}:{}", Value::from(key.as_str()), written(value));
            format!("{{{}}}", object.iter().map(entry).collect::<Vec<_>>().join(","))
        }
        _ => value.to_string(),
    }
}

/// Makes a whole number of one that is written with a fraction of zero.
fn whole(number: Number) -> Number {
    // Numbers of f64 are exact up to 2^53.
    let exact = number.as_f64().filter(|n| number.is_f64() && n.fract() == 0.0 && n.abs() < 9e15);
    exact.map_or(number, |n| (n as i64).into())
}
