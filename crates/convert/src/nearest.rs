//! Suggestions for mistyped names.

/// Finds the known name that is closest to `wanted`, ignoring case; none where no name is close.
pub fn nearest<'a>(wanted: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let wanted: Vec<char> = wanted.to_lowercase().chars().collect();
    // A third of the letters may differ, and at least one.
    let most = (wanted.len() / 3).max(1);
    let distances = known.into_iter().map(|name| (distance(&wanted, name), name));
    distances.filter(|(d, _)| *d <= most).min_by_key(|(d, _)| *d).map(|(_, name)| name)
}

/// Most names of a group that are listed.
const MAX_LISTED: usize = 3;

/// Returns an addition to a message: `; did you mean NAME?` where a known name is close to `wanted`. Where known
/// names continue `wanted` with a dot, the addition lists the first three; otherwise it is empty.
pub fn did_you_mean<'a>(wanted: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.into_iter().collect();
    let in_group = |name: &&str| name.strip_prefix(wanted).is_some_and(|rest| rest.starts_with('.'));
    let group: Vec<&str> = known.iter().copied().filter(in_group).collect();
    match group.len() {
        0 => nearest(wanted, known).map(|name| format!("; did you mean `{name}`?")).unwrap_or_default(),
        1..=MAX_LISTED => format!("; so begin: {}", group.join(", ")),
        n => format!("; so begin {n} names: {}, ..", group[..MAX_LISTED].join(", ")),
    }
}

/// Computes the Levenshtein distance: how many letters to insert, delete or replace. Case in `b` is ignored.
fn distance(a: &[char], b: &str) -> usize {
    let mut row: Vec<usize> = (0..=a.len()).collect();
    for (i, y) in b.to_lowercase().chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, x) in a.iter().enumerate() {
            let above = row[j + 1];
            row[j + 1] = (diagonal + usize::from(*x != y)).min(above + 1).min(row[j] + 1);
            diagonal = above;
        }
    }
    row[a.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_names_are_found_and_others_are_not() {
        let known = ["lut4", "lut6", "int4-block", "layers.0.mlp.up_proj", "layers.1.mlp.up_proj"];
        for (wanted, found) in [
            ("LUT4", Some("lut4")),
            ("lut44", Some("lut4")),
            ("int4_block", Some("int4-block")),
            ("layers.1.mlp.upproj", Some("layers.1.mlp.up_proj")),
            ("nonsense", None),
            ("", None),
        ] {
            assert_eq!(nearest(wanted, known), found, "{wanted}");
        }
        assert_eq!(did_you_mean("lut5", ["lut4"]), "; did you mean `lut4`?");
        assert_eq!(did_you_mean("x", ["lut4"]), "");
        let names = ["a.0.mlp.down", "a.0.mlp.gate", "a.0.mlp.up", "a.0.norm", "b"];
        assert_eq!(did_you_mean("a.0.mlp", names), "; so begin: a.0.mlp.down, a.0.mlp.gate, a.0.mlp.up");
        assert_eq!(
            did_you_mean("a.0", names),
            "; so begin 4 names: a.0.mlp.down, a.0.mlp.gate, a.0.mlp.up, .."
        );
        assert_eq!(did_you_mean("a.0.m", names), "");
    }
}
