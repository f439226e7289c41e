//! Suggestions for names that were mistyped.

/// Finds the known name that is closest to `wanted`, upper and lower case being equal; none where nothing is close.
pub fn nearest<'a>(wanted: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let wanted: Vec<char> = wanted.to_lowercase().chars().collect();
    // A third of the letters may differ, and one of a short name.
    let most = (wanted.len() / 3).max(1);
    let distances = known.into_iter().map(|name| (distance(&wanted, name), name));
    distances.filter(|(d, _)| *d <= most).min_by_key(|(d, _)| *d).map(|(_, name)| name)
}

/// Most names that are listed for a beginning.
const MAX_LISTED: usize = 3;

/// Adds `; did you mean NAME?` to a message, where a known name is close; or the first names in the group `wanted`, whose names
/// go on with a dot.
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

/// Counts the letters to insert, delete or replace (Levenshtein distance).
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
