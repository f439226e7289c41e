//! HTML and SVG as text: nothing from outside can become markup.

use crate::ui::printable;
use std::fmt::{Display, Write};

/// Markup that is being written. Tags come from the program's own text; everything else is escaped.
#[derive(Clone, Debug, Default)]
pub struct Markup {
    out: String,
}

impl Markup {
    /// Adds markup from the program's own text, not escaped.
    pub fn raw(&mut self, markup: &'static str) -> &mut Markup {
        self.out.push_str(markup);
        self
    }

    /// Adds escaped text, which may also stand in the quotes of an attribute.
    pub fn text(&mut self, text: impl Display) -> &mut Markup {
        let text = text.to_string();
        for c in printable(&text).chars() {
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

    /// Adds a coordinate with one decimal; 0 if it is not finite.
    pub fn number(&mut self, x: f64) -> &mut Markup {
        let x = if x.is_finite() { x } else { 0.0 };
        let _ = write!(self.out, "{:.1}", x);
        self
    }

    /// Adds an attribute whose value is a coordinate.
    pub fn at(&mut self, name: &'static str, x: f64) -> &mut Markup {
        self.raw(" ").raw(name).raw("=\"").number(x).raw("\"")
    }

    /// Adds other markup.
    pub fn append(&mut self, other: &Markup) -> &mut Markup {
        self.out.push_str(&other.out);
        self
    }

    /// Returns the markup as text.
    pub fn finish(self) -> String {
        self.out
    }
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
            m.finish(),
            "<p title=\"&quot; onload=&#39;x&#39;\">&lt;script&gt;alert(1)&lt;/script&gt;&amp;\\u{1b}</p>"
        );
        let mut m = Markup::default();
        m.raw("<a").at("x", f64::NAN).raw(">");
        assert_eq!(m.finish(), "<a x=\"0.0\">");
    }
}
