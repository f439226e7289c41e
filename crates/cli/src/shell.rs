//! Commands that users may copy into a shell.

use std::path::Path;

/// Quotes a path for a POSIX shell if needed.
pub fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:,@%".contains(c);
    // A command would take a name that begins with a hyphen for an option.
    let text = if text.starts_with('-') { format!("./{text}") } else { text };
    if !text.is_empty() && text.chars().all(plain) {
        text
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_quoted_where_a_shell_would_change_them() {
        for (path, shown) in [
            ("a/b.anemoe", "a/b.anemoe"),
            ("my models/b", "'my models/b'"),
            ("it's", r"'it'\''s'"),
            ("$HOME", "'$HOME'"),
            ("-o", "./-o"),
            ("", "''"),
        ] {
            assert_eq!(quoted(Path::new(path)), shown);
        }
    }
}
