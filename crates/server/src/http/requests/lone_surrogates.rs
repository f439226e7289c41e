//! Escapes of half a character in JSON.

use std::borrow::Cow;

/// Replaces escapes of half a character in JSON text by the sign for a character that is not known. Clients that cut texts
/// write `\ud83d` alone, which stands for no text.
pub fn without_lone_surrogates(json: &[u8]) -> Cow<'_, [u8]> {
    // `\uXXXX` at a place, where the text has it.
    let unit = |at: usize| {
        let digits = json.get(at..at + 6)?.strip_prefix(b"\\u")?;
        u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
    };
    let (mut out, mut copied, mut at) = (Vec::new(), 0, 0);
    while let Some(next) = json[at..].iter().position(|byte| *byte == b'\\') {
        at += next;
        let (length, is_lone) = match (unit(at), unit(at + 6)) {
            (Some(0xd800..=0xdbff), Some(0xdc00..=0xdfff)) => (12, false),
            (Some(0xd800..=0xdfff), _) => (6, true),
            _ => (2, false),
        };
        let end = json.len().min(at + length);
        if is_lone {
            out.extend_from_slice(&json[copied..at]);
            out.extend_from_slice(b"\\ufffd");
            copied = end;
        }
        at = end;
    }
    match copied {
        0 => json.into(),
        _ => [&out, &json[copied..]].concat().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_character_becomes_an_unknown_one() {
        for (text, expected) in [
            (r"a\ud83dX\uDE00", r"a\ufffdX\ufffd"),
            (r"\ud83d\ude00\ud83d", r"\ud83d\ude00\ufffd"),
            (r"\ud83d\ud83d\ude00", r"\ufffd\ud83d\ude00"),
            (r"\\ud83d\u00e9", r"\\ud83d\u00e9"),
            (r"\\\ud83d", r"\\\ufffd"),
            (r"\ud8", r"\ud8"),
            (r"\u+83d\", r"\u+83d\"),
        ] {
            assert_eq!(without_lone_surrogates(text.as_bytes()), expected.as_bytes(), "{text}");
        }
    }
}
