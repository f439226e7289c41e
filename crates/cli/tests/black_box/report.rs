//! `anemoe report`: a page that shows records, names commands for missing ones, and lets nothing from outside in.

use crate::common::*;
use serde_json::Value;

const HOSTILE: &str = "<script>alert('x')<!-- & \"y\".anemoe";
const NOTE: &str = "<img src=x onerror=alert(1)>\u{1b}[31m";

/// Writes the page of a bundle, whose path stands between quotes, and returns it with the document inside it.
fn page(bundle: &str, more: &str) -> (String, Value) {
    let file = folder().join("report.html");
    passes(format!("report {bundle} --force -o {file} {more}"));
    let page = std::fs::read_to_string(&file).unwrap();
    let (_, rest) = page.split_once("id=\"report\">").unwrap();
    let document = serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap();
    (page, document)
}

#[test]
fn a_page_grows_with_what_commands_record() {
    let b = built("tiny-gemma4-moe-text", "");
    let golden = fixture("tiny-gemma4-moe-text/golden.npz");
    let (bare, inside) = page(&b.to_string(), "");
    assert_eq!(bare.matches("This brings it").count(), 3, "{bare}");
    for command in ["anemoe trace", "anemoe validate", "anemoe bench"] {
        assert!(bare.contains(&format!("<code>{command} ")), "{command}");
    }
    let found = json(0, format!("report {b}"));
    let shards = list(&found["shards"]).len();
    assert!(shards > 4 && found["cosines"].is_null());
    // The page holds the document that `--json` prints, and a table with a row for each package.
    assert_eq!(inside, found);
    let table = bare.split("<section id=\"shards\"").nth(1).unwrap().split("</table>").next().unwrap();
    assert_eq!(table.matches("<tr>").count(), shards + 1);
    for line in [
        format!("trace {b} --golden {golden}"),
        format!("validate {b} --golden {golden} --min-cosine 0.5"),
        format!("bench {b} --context 8 --prefill 8 --decode 2 --repetitions 1"),
    ] {
        assert!(run(line).0 <= 1);
    }
    let (full, _) = page(&b.to_string(), "--text");
    assert!(!full.contains("This brings it") && full.len() > bare.len());
    assert!(full.contains("decode at 8") && full.contains("prefill 8"));
    let found = json(0, format!("report {b}"));
    assert_eq!(list(&found["cosines"]["rows"]).len() as u64, count(&found["layers"]) + 1);
    assert!(list(&found["roofline"]["points"]).len() >= 2);
    assert!(list(&found["gates"]).iter().any(|g| g["gate"] == "validate"));
    let text = passes(format!("report {b}"));
    let parts = "Packages by kind|Packages by layer|Error by layer and part|behind|lowest cosine of the hidden state|\
        decode at 8|m4-max|validate|Journal: |setup";
    shows(&text, &parts.split('|').collect::<Vec<_>>());
    assert_eq!(text.lines().filter(|line| line.starts_with("layer 0 ")).count(), 3, "{text}");
    let chips = list(&found["chip_speeds"]);
    assert!(chips.len() > 4 && chips.iter().all(|c| number(&c["tok_s"]["likely"]) > 0.0), "{chips:?}");
    // The journal for people does not list every cosine.
    assert!(!passes(format!("journal {b}")).contains("cosine_map"));
}

#[test]
fn nothing_from_outside_is_markup() {
    let bundle = folder().join(HOSTILE);
    // As a shell quotes a quote.
    let b = format!("'{}'", bundle.to_string().replace('\'', r"'\''"));
    passes(format!("build {} -o {b} --skip-gates --intent '{NOTE}'", fixture("tiny-gemma4-moe-text")));
    passes(format!("journal add {b} --lesson '</article><iframe>' --surprise '{NOTE}'"));
    let (page, inside) = page(&b, &format!("--against {b}"));
    assert_eq!(inside["name"], HOSTILE);
    // The template's own scripts, of which a browser runs the one whose hash the page names.
    assert_eq!((page.matches("<script").count(), page.matches("</script").count()), (2, 2));
    let bad = [
        "<!--",
        "<img",
        "<iframe",
        "onerror=alert(1)>",
        "\u{1b}",
        "http://",
        "https://",
        "javascript:",
        "url(",
    ];
    assert!(bad.iter().all(|bad| !page.contains(bad)), "{page}");
    for escaped in [
        "&lt;script&gt;alert(&#39;x&#39;)&lt;!-- &amp; &quot;y&quot;",
        "&lt;img src=x",
        "default-src 'none'",
        "script-src 'sha256-",
    ] {
        assert!(page.contains(escaped), "{escaped}");
    }
}
