//! Cuts a template into tokens, with the rules of Jinja for blanks around tags.

use super::meter::{Fallible, TemplateFault};

/// A token.
#[derive(Clone, Debug, PartialEq)]
pub enum TemplateToken {
    Data(String),
    VariableBegin,
    VariableEnd,
    BlockBegin,
    BlockEnd,
    Identifier(String),
    Text(String),
    Int(i128),
    Float(f64),
    Operator(&'static str),
    End,
}

/// Operators, the longest first.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<",
    "=", ".", ":", "|", ",", ";",
];

/// Tells whether a word is in a list, whose words have blanks between them.
pub fn is_one_of(list: &str, word: &str) -> bool {
    list.split(' ').any(|known| known == word)
}

/// Tells whether Python counts a character as a blank.
pub fn is_blank(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Cuts a template into tokens with their lines. Line ends are `\n`, and the last one is left out, as in Jinja.
pub fn tokens(template: &str) -> Fallible<Vec<(TemplateToken, usize)>> {
    let mut text = template.replace("\r\n", "\n").replace('\r', "\n");
    if text.ends_with('\n') {
        text.pop();
    }
    let mut lexer = Lexer { text: &text, at: 0, counted: 0, line: 1, begins_line: true, tokens: Vec::new() };
    lexer.run().map_err(|what| TemplateFault { what, line: lexer.line })?;
    lexer.add(TemplateToken::End);
    Ok(lexer.tokens)
}

struct Lexer<'a> {
    text: &'a str,
    at: usize,
    /// Place up to which lines were counted.
    counted: usize,
    line: usize,
    /// True if the last match ended with a line end.
    begins_line: bool,
    tokens: Vec<(TemplateToken, usize)>,
}

type Lexed<T> = Result<T, String>;

impl<'a> Lexer<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn add(&mut self, token: TemplateToken) {
        self.line += self.text[self.counted..self.at].matches('\n').count();
        self.counted = self.at;
        self.tokens.push((token, self.line));
    }

    /// Goes on by `n` bytes, and over blanks behind them if `trims`.
    fn advance(&mut self, n: usize, trims: bool) {
        self.at += n;
        if trims {
            self.at += self.rest().len() - self.rest().trim_start_matches(is_blank).len();
        }
        self.begins_line = self.text[..self.at].ends_with('\n');
    }

    fn run(&mut self) -> Lexed<()> {
        loop {
            let rest = self.rest();
            let Some(open) = rest.match_indices('{').map(|(i, _)| i).find(|i| {
                rest[*i..].starts_with("{{") || rest[*i..].starts_with("{%") || rest[*i..].starts_with("{#")
            }) else {
                if !rest.is_empty() {
                    self.add(TemplateToken::Data(rest.to_string()));
                    self.at = self.text.len();
                }
                return Ok(());
            };
            let kind = rest.as_bytes()[open + 1];
            let sign = rest[open + 2..].chars().next().filter(|c| matches!(c, '-' | '+'));
            self.data(open, sign, kind != b'{');
            self.at += open;
            match kind {
                b'{' => {
                    self.add(TemplateToken::VariableBegin);
                    self.advance(2 + usize::from(sign.is_some()), false);
                    self.inside("}}", TemplateToken::VariableEnd)?;
                }
                b'%' => match raw_begin(self.rest(), "raw") {
                    Some((length, trims)) => {
                        self.advance(length, trims);
                        self.raw()?;
                    }
                    None => {
                        self.add(TemplateToken::BlockBegin);
                        self.advance(2 + usize::from(sign.is_some()), false);
                        self.inside("%}", TemplateToken::BlockEnd)?;
                    }
                },
                _ => {
                    self.advance(2 + usize::from(sign.is_some()), false);
                    let end = self.rest().find("#}").ok_or("a comment without an end")?;
                    let before = self.rest()[..end].chars().next_back();
                    self.advance(end, false);
                    self.close(before.filter(|c| matches!(c, '-' | '+')), true);
                }
            }
        }
    }

    /// Adds the text before a tag, `length` bytes, without the blanks that the tag removes.
    fn data(&mut self, length: usize, sign: Option<char>, is_block: bool) {
        let mut text = &self.rest()[..length];
        match sign {
            Some('-') => text = text.trim_end_matches(is_blank),
            Some(_) => {}
            None if is_block => {
                let start = text.rfind('\n').map_or(0, |i| i + 1);
                if (start > 0 || self.begins_line) && text[start..].chars().all(is_blank) {
                    text = &text[..start];
                }
            }
            None => {}
        }
        if !text.is_empty() {
            self.add(TemplateToken::Data(text.to_string()));
        }
    }

    /// Goes over the end of a tag, two bytes, and what it removes behind it.
    fn close(&mut self, sign: Option<char>, is_block: bool) {
        self.advance(2, sign == Some('-'));
        if sign.is_none() && is_block && self.rest().starts_with('\n') {
            self.advance(1, false);
        }
    }

    /// Adds the text up to `endraw`.
    fn raw(&mut self) -> Lexed<()> {
        let rest = self.rest();
        let found = rest.match_indices("{%").find_map(|(i, _)| Some((i, raw_begin(&rest[i..], "endraw")?)));
        let (open, (length, trims)) = found.ok_or("`raw` without an end")?;
        let sign = rest[open + 2..].chars().next().filter(|c| matches!(c, '-' | '+'));
        self.data(open, sign, true);
        let keeps = rest[open..open + length].ends_with("+%}");
        self.advance(open + length, trims);
        if !trims && !keeps && self.rest().starts_with('\n') {
            self.advance(1, false);
        }
        Ok(())
    }

    /// Adds the tokens of a tag up to its end.
    fn inside(&mut self, end: &str, end_token: TemplateToken) -> Lexed<()> {
        let mut open = Vec::new();
        loop {
            let rest = self.rest();
            let Some(c) = rest.chars().next() else { return Err("the template ends inside a tag".into()) };
            if open.is_empty() {
                let sign = Some(c).filter(|c| *c == '-' || *c == '+' && end == "%}");
                if rest[sign.map_or(0, char::len_utf8)..].starts_with(end) {
                    self.add(end_token);
                    self.at += sign.map_or(0, char::len_utf8);
                    self.close(sign, end == "%}");
                    return Ok(());
                }
            }
            if is_blank(c) {
                self.at += c.len_utf8();
            } else if c.is_ascii_digit() {
                self.number()?;
            } else if c == '_' || c.is_alphabetic() {
                let length = rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len());
                self.add(TemplateToken::Identifier(rest[..length].to_string()));
                self.at += length;
            } else if c == '"' || c == '\'' {
                let mut escaped = false;
                let end = rest.char_indices().skip(1).find(|(_, x)| {
                    let ends = *x == c && !escaped;
                    escaped = *x == '\\' && !escaped;
                    ends
                });
                let (end, _) = end.ok_or("a text without a closing quote")?;
                self.add(TemplateToken::Text(unescaped(&rest[1..end])?));
                self.at += end + 1;
            } else {
                let operator = OPERATORS.iter().find(|o| rest.starts_with(**o));
                let operator = *operator.ok_or_else(|| format!("unexpected character {c:?}"))?;
                match operator {
                    "(" | "[" | "{" => open.push(operator),
                    ")" | "]" | "}" => {
                        let pair = open.pop().map(|o| match o {
                            "(" => ")",
                            "[" => "]",
                            _ => "}",
                        });
                        if pair != Some(operator) {
                            return Err(format!("unexpected `{operator}`"));
                        }
                    }
                    _ => {}
                }
                self.add(TemplateToken::Operator(operator));
                self.at += operator.len();
            }
            self.begins_line = false;
        }
    }

    fn number(&mut self) -> Lexed<()> {
        let rest = self.rest();
        let digits = |from: usize, is_digit: fn(&u8) -> bool| {
            let bytes = rest.as_bytes();
            let mut at = from;
            while bytes.get(at).is_some_and(is_digit)
                || at > from && bytes.get(at) == Some(&b'_') && bytes.get(at + 1).is_some_and(is_digit)
            {
                at += 1;
            }
            at
        };
        let decimal = digits(0, u8::is_ascii_digit);
        let mut end = decimal;
        if !self.text[..self.at].ends_with('.') {
            if rest[end..].starts_with('.') && digits(end + 1, u8::is_ascii_digit) > end + 1 {
                end = digits(end + 1, u8::is_ascii_digit);
            }
            if rest[end..].starts_with(['e', 'E']) {
                let from = end + 1 + usize::from(rest[end + 1..].starts_with(['+', '-']));
                let to = digits(from, u8::is_ascii_digit);
                end = if to > from { to } else { end };
            }
        }
        let (token, end) = if end > decimal {
            let value = rest[..end].replace('_', "").parse().map_err(|_| "a wrong number")?;
            (TemplateToken::Float(value), end)
        } else {
            let (radix, from, is_digit): (u32, usize, fn(&u8) -> bool) = match rest.as_bytes().get(..2) {
                Some(b"0x" | b"0X") => (16, 2, u8::is_ascii_hexdigit),
                Some(b"0o" | b"0O") => (8, 2, |b| (b'0'..b'8').contains(b)),
                Some(b"0b" | b"0B") => (2, 2, |b| matches!(b, b'0' | b'1')),
                _ => (10, 0, u8::is_ascii_digit),
            };
            let end = digits(from, is_digit);
            let value = i128::from_str_radix(&rest[from..end].replace('_', ""), radix);
            (TemplateToken::Int(value.map_err(|_| "a number that is too large")?), end)
        };
        self.add(token);
        self.at += end;
        Ok(())
    }
}

/// Returns the length of `{% WORD %}` at the beginning of a text, and whether it removes the blanks behind it.
fn raw_begin(text: &str, word: &str) -> Option<(usize, bool)> {
    let rest = text.strip_prefix("{%")?;
    let rest = rest.strip_prefix(['-', '+']).unwrap_or(rest).trim_start_matches(is_blank);
    let rest = rest.strip_prefix(word)?.trim_start_matches(is_blank);
    let trims = rest.starts_with('-');
    let rest = rest.strip_prefix(if word == "raw" { &['-'][..] } else { &['-', '+'][..] }).unwrap_or(rest);
    Some((text.len() - rest.strip_prefix("%}")?.len(), trims))
}

/// Replaces the escapes of Python's texts.
fn unescaped(text: &str) -> Lexed<String> {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        let Some(c) = chars.next() else { return Err("a text ends with a backslash".into()) };
        let hex = |chars: &mut std::iter::Peekable<std::str::Chars<'_>>, n: usize| {
            let digits: String = (0..n).filter_map(|_| chars.next_if(char::is_ascii_hexdigit)).collect();
            let code = u32::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == n);
            code.ok_or_else(|| format!("truncated \\{c} escape"))
        };
        match c {
            '\n' => {}
            'n' => out.push('\n'),
            't' => out.push('\t'),
            'r' => out.push('\r'),
            'a' => out.push('\u{7}'),
            'b' => out.push('\u{8}'),
            'f' => out.push('\u{c}'),
            'v' => out.push('\u{b}'),
            '\\' | '\'' | '"' => out.push(c),
            '0'..='7' => {
                let mut code = c.to_digit(8).unwrap_or(0);
                for _ in 0..2 {
                    if let Some(d) = chars.next_if(|c| ('0'..='7').contains(c)) {
                        code = code * 8 + d.to_digit(8).unwrap_or(0);
                    }
                }
                out.extend(char::from_u32(code));
            }
            'x' | 'u' | 'U' => {
                let mut code = hex(
                    &mut chars,
                    if c == 'x' {
                        2
                    } else if c == 'u' {
                        4
                    } else {
                        8
                    },
                )?;
                let ahead: String = chars.clone().take(6).collect();
                let low = ahead.strip_prefix("\\u").and_then(|h| u32::from_str_radix(h, 16).ok());
                // The two halves of a character beyond 16 bits.
                if let (0xd800..=0xdbff, Some(low @ 0xdc00..=0xdfff)) = (code, low) {
                    code = 0x10000 + ((code & 0x3ff) << 10) + (low & 0x3ff);
                    chars.nth(5);
                }
                out.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
            _ => out.extend(['\\', c]),
        }
    }
    Ok(out)
}
