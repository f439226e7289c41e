//! Arguments, random numbers and medians of the examples.
#![allow(dead_code, reason = "each example uses some of them")]

#[path = "../../src/test_data.rs"]
pub mod test_data;

/// Returns the value of `name=` on the command line.
pub fn argument(name: &str) -> Option<String> {
    std::env::args().find_map(|a| Some(a.strip_prefix(name)?.strip_prefix('=')?.to_string()))
}

/// Returns the value of `name=` on the command line as a number, or else `default`.
pub fn number(name: &str, default: usize) -> usize {
    argument(name).map_or(default, |v| v.parse().unwrap_or_else(|_| panic!("{name}={v} is no number")))
}

/// Returns the median of at least one value.
pub fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}
