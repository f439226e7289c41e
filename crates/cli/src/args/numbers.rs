//! Numbers and words on the command line.

use clap::builder::{PossibleValuesParser, TypedValueParser};

/// Parses a number of a list, without the blanks around it.
pub fn count(text: &str) -> Result<usize, String> {
    let text = text.trim();
    text.parse().map_err(|_| format!("`{text}` is not a whole number from 0 on"))
}

/// Parses a number that is not 0.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| format!("`{text}` is not a number from 1 on"))
}

/// Makes a parser of words that stand for values.
pub fn choice<T, const N: usize>(all: [(&'static str, T); N]) -> impl TypedValueParser<Value = T>
where
    T: Copy + Send + Sync + 'static,
{
    let words = PossibleValuesParser::new(all.map(|(word, _)| word));
    words.map(move |said| all.iter().find(|(word, _)| *word == said).unwrap_or(&all[0]).1)
}
