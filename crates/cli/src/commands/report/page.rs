//! The report as one HTML file that needs no network. Its charts are drawn by a script from the report's document, which lies
//! inside it; its tables need no script.

use super::report_sections::ReportSection;
use crate::ui::printable;
use anemoe_gates::bundle_report::BundleReport;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use sha2::{Digest, Sha256};

/// Page with places for the document and for what is made of it.
const TEMPLATE: &str = include_str!("page.html");

/// Markup that is being written. Tags come from the program's own text; everything else is escaped.
#[derive(Default)]
struct Markup {
    out: String,
}

impl Markup {
    /// Adds markup from the program's own text, not escaped.
    fn raw(&mut self, markup: &'static str) -> &mut Markup {
        self.out.push_str(markup);
        self
    }

    /// Adds escaped text.
    fn text(&mut self, text: &str) -> &mut Markup {
        for c in printable(text).chars() {
            match c {
                '&' => self.out.push_str("&amp;"),
                '<' => self.out.push_str("&lt;"),
                '>' => self.out.push_str("&gt;"),
                '"' => self.out.push_str("&quot;"),
                '\'' => self.out.push_str("&#39;"),
                c => self.out.push(c),
            }
        }
        self
    }

    /// Adds a document for a script. Without `<`, `>` and `&`, no text in it can end the element or begin another one.
    fn json(&mut self, document: &BundleReport) -> serde_json::Result<&mut Markup> {
        for c in serde_json::to_string(document)?.chars() {
            match c {
                '<' => self.out.push_str("\\u003c"),
                '>' => self.out.push_str("\\u003e"),
                '&' => self.out.push_str("\\u0026"),
                c => self.out.push(c),
            }
        }
        Ok(self)
    }

    fn section(&mut self, s: &ReportSection) {
        self.raw("<section id=\"")
            .raw(s.id)
            .raw("\"><h2>")
            .raw(s.title)
            .raw("</h2><p>")
            .text(&s.note)
            .raw("</p>");
        if let Some(command) = &s.missing {
            self.raw("<p class=\"absent\">nothing is recorded. This brings it: <code>").text(command);
            self.raw("</code></p>");
        }
        let [headings, rows @ ..] = s.table.rows() else { return };
        if !rows.is_empty() {
            self.raw("<div class=\"wide\"><table><thead><tr>");
            for heading in headings {
                self.raw("<th>").text(heading).raw("</th>");
            }
            self.raw("</tr></thead><tbody>");
            for row in rows {
                self.raw("<tr>");
                for cell in row {
                    self.raw("<td>").text(cell).raw("</td>");
                }
                self.raw("</tr>");
            }
            self.raw("</tbody></table></div>");
        }
        self.raw("</section>\n");
    }
}

/// Returns the base64 of the SHA-256 of the template's script, the only one that a browser may run in the page.
fn script_hash() -> String {
    let script = TEMPLATE.split_once("<script>").and_then(|(_, rest)| rest.split_once("</script>"));
    BASE64_STANDARD.encode(Sha256::digest(script.map_or("", |(script, _)| script)))
}

/// Writes the page.
pub fn page(report: &BundleReport, sections: &[ReportSection]) -> serde_json::Result<String> {
    let mut m = Markup::default();
    let mut parts = TEMPLATE.split("{{");
    m.raw(parts.next().unwrap_or_default());
    for (place, rest) in parts.filter_map(|part| part.split_once("}}")) {
        match place {
            "script_hash" => m.text(&script_hash()),
            "name" => m.text(&report.name),
            "version" => m.text(env!("CARGO_PKG_VERSION")),
            "report" => m.json(report)?,
            _ => {
                sections.iter().for_each(|s| m.section(s));
                &mut m
            }
        };
        m.raw(rest);
    }
    Ok(m.out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_never_markup() {
        let mut m = Markup::default();
        m.raw("<p title=\"")
            .text("\" onload='x'")
            .raw("\">")
            .text("<script>alert(1)</script>&\u{1b}")
            .raw("</p>");
        assert_eq!(
            m.out,
            "<p title=\"&quot; onload=&#39;x&#39;\">&lt;script&gt;alert(1)&lt;/script&gt;&amp;\\u{1b}</p>"
        );
    }

    /// Checks that the script has no way to make markup or code of a text, nor to load anything.
    #[test]
    fn the_script_sets_text_only() {
        let (_, script) = TEMPLATE.split_once("<script>").unwrap();
        for bad in [
            "HTML",
            "document.write",
            "eval",
            "Function(",
            "import",
            "fetch",
            "XMLHttp",
            "href",
            "src",
            "\"on",
        ] {
            assert!(!script.contains(bad), "{bad}");
        }
        assert!(script.contains("textContent"));
    }
}
