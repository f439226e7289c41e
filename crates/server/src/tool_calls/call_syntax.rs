//! Syntax of calls, and the tags around them.

/// Most bytes of a tag before or after a call.
const MAX_TAG: usize = 64;

/// Syntax of a call between its tags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CallSyntax {
    /// A JSON object with a name and arguments.
    Json {
        /// Text between the tags and the object: blanks, and brackets of a list.
        around: (String, String),
        /// Key of the arguments: `arguments` or `parameters`.
        key: String,
    },
    /// A name, with arguments in braces whose keys have no quotation marks.
    Braces {
        /// Text before the name.
        word: String,
        /// Mark before and after a text.
        quote: String,
    },
    /// A name, a text behind it, and arguments in JSON.
    Named {
        /// Text between name and arguments.
        between: String,
    },
    /// `<function=NAME>`, `<parameter=KEY>text</parameter>`.
    Tags,
}

/// Returns the tag `<..>` or `[..]` with which a text begins.
pub(super) fn first_tag(text: &str) -> Option<String> {
    let close = match text.chars().next()? {
        '<' => '>',
        '[' => ']',
        _ => return None,
    };
    let end = text.find(close).filter(|end| (2..MAX_TAG).contains(end))?;
    Some(text[..=end].to_string())
}

/// Returns all tags of a text.
pub(super) fn tags(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices(['<', '[']).filter_map(|(i, _)| Some(&text[i..i + first_tag(&text[i..])?.len()]))
}
