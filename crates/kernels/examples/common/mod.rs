//! What the measurements have in common.

/// What stands behind `name=` on the command line.
pub fn argument(name: &str) -> Option<String> {
    std::env::args().find_map(|a| Some(a.strip_prefix(name)?.strip_prefix('=')?.to_string()))
}

/// As [`argument`], a number.
pub fn number(name: &str, default: usize) -> usize {
    argument(name).map_or(default, |v| v.parse().unwrap_or_else(|_| panic!("{name}={v} is no number")))
}

/// The middle one, of at least one.
pub fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}
