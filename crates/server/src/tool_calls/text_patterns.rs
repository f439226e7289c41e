//! Regular expressions of what a schema says of a text: `pattern`, `format`, `minLength` and `maxLength`.

use llguidance::regex_to_lark;
use regex_syntax::hir::{Dot, Hir, HirKind, Look, Repetition};
use serde_json::Value;

const DATE: &str = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])";
const TIME: &str =
    r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]+)?([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
const HOST: &str =
    r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(\.[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)*";
const BYTE: &str = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";

/// Returns terminals in Lark, all of which a text has to match that fits these parts of a schema.
pub(super) fn text_patterns(parts: &[&Value]) -> Vec<String> {
    let mut all = Vec::new();
    for part in parts {
        if let Some(pattern) = part["pattern"].as_str() {
            // Classes of digits and letters are ASCII's. The library says what is wrong with a pattern.
            let pattern = regex_to_lark(pattern, "dw");
            let whole = regex_syntax::parse(&pattern).ok().and_then(|hir| matching_whole(&hir, true, true));
            all.push(whole.map_or(pattern, |whole| regex_to_lark(&whole.to_string(), "")));
        }
        all.extend(
            part["format"].as_str().and_then(format_pattern).map(|pattern| regex_to_lark(&pattern, "")),
        );
        let length = |key: &str| part[key].as_f64().map(|n| (n.max(0.0) as u32).to_string());
        let (least, most) = (length("minLength"), length("maxLength"));
        if least.is_some() || most.is_some() {
            all.push(format!("(?s:.{{{},{}}})", least.unwrap_or("0".into()), most.unwrap_or_default()));
        }
    }
    all.iter().map(|pattern| format!("/{pattern}/")).collect()
}

/// Returns the regular expression of a format; `None` where the schema's library has none.
fn format_pattern(name: &str) -> Option<String> {
    let all = match name {
        "date" => DATE.into(),
        "time" => TIME.into(),
        "date-time" => format!("{DATE}[tT]{TIME}"),
        "duration" => {
            let time = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)";
            let days = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)";
            format!("P({days}({time})?|{time}|[0-9]+W)")
        }
        "email" => format!("[a-zA-Z0-9!#$%&'*+/=?^_`{{|}}~-]+(\\.[a-zA-Z0-9!#$%&'*+/=?^_`{{|}}~-]+)*@{HOST}"),
        "hostname" => HOST.into(),
        "ipv4" => format!(r"({BYTE}\.){{3}}{BYTE}"),
        "ipv6" => {
            // Groups before the longest run of zeros, `::`, and groups behind it.
            let group = "[0-9a-fA-F]{1,4}";
            let short = |before: usize| match before {
                0 => format!("::({group}(:{group}){{0,6}})?"),
                7 => format!("{group}(:{group}){{6}}::"),
                n => format!("{group}(:{group}){{{}}}::({group}(:{group}){{0,{}}})?", n - 1, 6 - n),
            };
            let all: Vec<String> = (0..8).map(short).collect();
            format!("({group}:){{7}}{group}|{}", all.join("|"))
        }
        "uuid" => "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}".into(),
        "uri" => r"[a-zA-Z][a-zA-Z0-9+.-]*:([a-zA-Z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9a-fA-F]{2})+".into(),
        _ => return None,
    };
    Some(all)
}

/// Returns the expression of all texts in which an expression occurs. `starts` and `ends` tell whether it stands at the
/// start and at the end, where it may have an anchor; `None` for an anchor elsewhere and for other assertions.
fn matching_whole(hir: &Hir, starts: bool, ends: bool) -> Option<Hir> {
    let any = |is_open: bool| match is_open {
        true => Hir::repetition(Repetition {
            min: 0,
            max: None,
            greedy: true,
            sub: Box::new(Hir::dot(Dot::AnyChar)),
        }),
        false => Hir::empty(),
    };
    Some(match hir.kind() {
        HirKind::Look(Look::Start) if starts => any(ends),
        HirKind::Look(Look::End) if ends => any(starts),
        HirKind::Capture(capture) => matching_whole(&capture.sub, starts, ends)?,
        HirKind::Alternation(all) => {
            Hir::alternation(all.iter().map(|one| matching_whole(one, starts, ends)).collect::<Option<_>>()?)
        }
        HirKind::Concat(all) => {
            let is = |look: Look| move |hir: &Hir| *hir.kind() == HirKind::Look(look);
            let (first, last) =
                (all.first().is_some_and(is(Look::Start)), all.last().is_some_and(is(Look::End)));
            let inner = &all[usize::from(first)..all.len() - usize::from(last)];
            if (first && !starts) || (last && !ends) {
                return None;
            }
            let (starts, ends) = (starts && !first, ends && !last);
            let one =
                |(i, one): (usize, &Hir)| matching_whole(one, starts && i == 0, ends && i + 1 == inner.len());
            match inner {
                [] => Hir::empty(),
                inner => Hir::concat(inner.iter().enumerate().map(one).collect::<Option<_>>()?),
            }
        }
        _ if !hir.properties().look_set().is_empty() => return None,
        _ => Hir::concat(vec![any(starts), hir.clone(), any(ends)]),
    })
}
