//! Numbers on the command line.

/// Parses a number of a list, without the blanks around it.
pub fn count(text: &str) -> Result<usize, String> {
    let text = text.trim();
    text.parse().map_err(|_| format!("`{text}` is not a whole number from 0 on"))
}

/// Parses a number that is not 0.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| format!("`{text}` is not a number from 1 on"))
}
