//! Amounts in words, for people.

/// Formats bytes in kB, MB or GB, of 10^3, 10^6 or 10^9.
pub fn bytes(n: u64) -> String {
    match n {
        0..=999_999 => format!("{:.1} kB", n as f64 / 1e3),
        1_000_000..=999_999_999 => format!("{:.1} MB", n as f64 / 1e6),
        _ => format!("{:.2} GB", n as f64 / 1e9),
    }
}

/// Formats a duration in a fitting unit: `42 s`, `12 min`, `2.3 h`.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 90.0 => format!("{s:.0} s"),
        s if s < 5400.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// Formats a count of things: `1 shard`, `12,000 shards`.
pub fn counted(n: impl TryInto<u64>, thing: &str) -> String {
    match n.try_into().unwrap_or(u64::MAX) {
        1 => format!("1 {thing}"),
        n => format!("{} {}", count(n), plural(thing)),
    }
}

/// Returns the plural of a noun, which may follow an adjective: `near tie`, `entry`, `matrix`, `pass`.
fn plural(thing: &str) -> String {
    let consonant_y = thing.strip_suffix('y').filter(|stem| !stem.ends_with(['a', 'e', 'o', 'u']));
    match (thing.strip_suffix("ix"), consonant_y) {
        (Some(stem), _) => format!("{stem}ices"),
        (_, Some(stem)) => format!("{stem}ies"),
        _ if thing.ends_with('s') => format!("{thing}es"),
        _ => format!("{thing}s"),
    }
}

/// Formats a count with commas between groups of three digits.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn one_thing_is_not_several() {
        for (n, thing, said) in [
            (1, "shard", "1 shard"),
            (0, "shard", "0 shards"),
            (12_000u64, "near tie", "12,000 near ties"),
            (2, "entry", "2 entries"),
            (2, "matrix", "2 matrices"),
            (1, "pass", "1 pass"),
            (2, "pass", "2 passes"),
            (3, "day", "3 days"),
        ] {
            assert_eq!(counted(n, thing), said);
        }
    }
}
