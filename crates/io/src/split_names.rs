//! Names of the parts of a split GGUF file, as llama.cpp writes them.

/// Returns the names of all parts of a split GGUF file `STEM-00001-of-0000N.gguf`, from the name of any of them; the name
/// itself where it is none of a part.
pub fn split_parts(name: &str) -> Vec<String> {
    let digits = |s: &str| if s.len() == 5 { s.parse::<u32>().ok() } else { None };
    let parsed = || {
        let (stem, ending) = name.split_at_checked(name.len().checked_sub(5)?)?;
        let (stem, count) = stem.rsplit_once("-of-")?;
        let (stem, part) = stem.rsplit_once('-')?;
        let (part, count) = (digits(part)?, digits(count)?);
        (ending.eq_ignore_ascii_case(".gguf") && (1..=count).contains(&part)).then_some((stem, count, ending))
    };
    match parsed() {
        Some((stem, count, ending)) => {
            (1..=count).map(|i| format!("{stem}-{i:05}-of-{count:05}{ending}")).collect()
        }
        None => vec![name.into()],
    }
}

#[cfg(test)]
mod tests {
    use super::split_parts;

    #[test]
    fn names_of_parts() {
        assert_eq!(split_parts("a-00002-of-00002.gguf"), ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]);
        for other in [
            "a.gguf",
            "a-00003-of-00002.gguf",
            "a-1-of-2.gguf",
            "a-00000-of-00002.gguf",
            "",
            "a-00001-of-00002.bin",
        ] {
            assert_eq!(split_parts(other), [other]);
        }
    }
}
