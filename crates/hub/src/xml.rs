//! XML answers of servers, read by the elements' own names: namespaces, prefixes, order and white space do not matter.

pub use roxmltree::{Document, Node};

/// Parses an answer. White space before it is no XML, but S3 sends it to keep a connection open.
///
/// # Errors
/// The text is no XML.
pub fn parse(text: &str) -> Result<Document<'_>, String> {
    let text = text.trim_start_matches(|c: char| c.is_whitespace() || c == '\u{feff}');
    Document::parse(text).map_err(|e| format!("no XML: {e}"))
}

/// Returns the elements of this name below a node, in order.
pub fn all<'a>(node: Node<'a, 'a>, name: &'static str) -> impl Iterator<Item = Node<'a, 'a>> {
    node.descendants().filter(move |n| n.is_element() && n.tag_name().name() == name)
}

/// Returns the text of the first element of this name below a node, without white space around it.
pub fn text(node: Node<'_, '_>, name: &str) -> Option<String> {
    let mut named = node.descendants().filter(|n| n.is_element() && n.tag_name().name() == name);
    // Comments and CDATA sections divide a text.
    let parts = named.next()?.children().filter_map(|n| if n.is_text() { n.text() } else { None });
    Some(parts.collect::<String>().trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_found_however_they_are_written() {
        for xml in [
            "<E><Code>a&b</Code></E>".replace("a&b", "a&amp;b").as_str(),
            "\n \u{feff}<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<E xmlns=\"x\">\n <Other/>\n <Code>\n a&#38;b</Code>\n</E>\n",
            "<s:E xmlns:s=\"x\"><s:Code><![CDATA[a&]]><!-- c -->b</s:Code><s:Code>later</s:Code></s:E>",
        ] {
            assert_eq!(text(parse(xml).unwrap().root(), "Code").as_deref(), Some("a&b"), "{xml}");
        }
        assert_eq!(text(parse("<E><Code/></E>").unwrap().root(), "Code").as_deref(), Some(""));
        for wrong in
            ["", "{}", "<html><body>", "<E><Code>a</E>", "<!DOCTYPE a [<!ENTITY b \"c\">]><a>&b;</a>"]
        {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
