//! `anemoe report`: a page that shows records, names commands for missing ones, and lets nothing from outside in.

use crate::common::{build, fixture, json, refused, run};
use std::path::Path;

const HOSTILE: &str = "<script>alert('x')<!-- & \"y\".anemoe";
const NOTE: &str = "<img src=x onerror=alert(1)>\u{1b}[31m";

fn page(bundle: &Path, more: &[&str]) -> String {
    let file = bundle.parent().unwrap().join("report.html");
    let args = ["report", bundle.to_str().unwrap(), "--force", "-o", file.to_str().unwrap()];
    let (code, out, err) = run(&[&args[..], more].concat());
    assert_eq!(code, 0, "{out}\n{err}");
    std::fs::read_to_string(file).unwrap()
}

/// Reads the document inside a page.
fn document(page: &str) -> serde_json::Value {
    let (_, rest) = page.split_once("id=\"report\">").unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

fn passes(args: &[&str]) {
    let (code, out, err) = run(args);
    assert!(code <= 1, "{args:?}\n{out}\n{err}");
}

#[test]
fn a_page_grows_with_what_commands_record() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("tiny.anemoe");
    let b = bundle.to_str().unwrap();
    let golden = fixture("tiny-gemma4-moe-text/golden.npz");
    let golden = golden.to_str().unwrap();
    build(&fixture("tiny-gemma4-moe-text"), &bundle, &[]);
    let bare = page(&bundle, &[]);
    assert_eq!(bare.matches("This brings it").count(), 3, "{bare}");
    for command in ["anemoe trace", "anemoe validate", "anemoe bench"] {
        assert!(bare.contains(&format!("<code>{command} ")), "{command}");
    }
    let found = json(0, &["report", b]);
    let shards = found["shards"].as_array().unwrap().len();
    assert!(shards > 4 && found["cosines"].is_null());
    // The page holds the document that `--json` prints, and a table with a row for each package.
    assert_eq!(document(&bare), found);
    let table = bare.split("<section id=\"shards\"").nth(1).unwrap().split("</table>").next().unwrap();
    assert_eq!(table.matches("<tr>").count(), shards + 1);
    passes(&["trace", b, "--golden", golden]);
    passes(&["validate", b, "--golden", golden, "--min-cosine", "0.5"]);
    passes(&["bench", b, "--context", "8", "--prefill", "8", "--decode", "2", "--repetitions", "1"]);
    let full = page(&bundle, &["--text"]);
    assert!(!full.contains("This brings it") && full.len() > bare.len());
    assert!(full.contains("decode at 8") && full.contains("prefill 8"));
    let found = json(0, &["report", b]);
    let rows = found["cosines"]["rows"].as_array().unwrap();
    assert_eq!(rows.len() as u64, found["layers"].as_u64().unwrap() + 1);
    assert!(found["roofline"]["points"].as_array().unwrap().len() >= 2);
    assert!(found["gates"].as_array().unwrap().iter().any(|g| g["gate"] == "validate"));
    let (_, text, _) = run(&["report", b]);
    for says in [
        "Packages by kind",
        "Packages by layer",
        "Error by layer and part",
        "behind",
        "by the logarithm of 1 minus the cosine",
        "decode at 8",
        "m4-max",
        "validate",
        "Journal: ",
        "setup",
    ] {
        assert!(text.contains(says), "{says}: {text}");
    }
    assert!(text.lines().filter(|line| line.starts_with("layer 0 ")).count() == 3, "{text}");
    // Forms are predicted from the checkpoint that the build recorded: a speed for each chip, the bundle's own form first.
    let speeds = found["form_speeds"].clone();
    let forms = speeds["forms"].as_array().unwrap();
    assert!(forms.len() > 4 && forms[0]["name"] == "as built", "{speeds}");
    assert!(
        forms
            .iter()
            .all(|f| f["tok_s"].as_array().unwrap().len() == speeds["chips"].as_array().unwrap().len())
    );
    assert!(full.contains("--cache host") && text.contains("--cache host"));
    // What the packages give and what the shapes of another form with the same work give is nearly the same.
    let sigmoid = forms.iter().find(|f| f["name"] == "--activation sigmoid").unwrap();
    for (own, other) in forms[0]["tok_s"].as_array().unwrap().iter().zip(sigmoid["tok_s"].as_array().unwrap())
    {
        let ratio = own["likely"].as_f64().unwrap() / other["likely"].as_f64().unwrap();
        assert!((0.9..1.1).contains(&ratio), "{own} {other}");
    }
    // The journal for people does not list every cosine.
    assert!(!run(&["journal", b]).1.contains("cosine_map"));
}

#[test]
fn forms_need_the_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("tiny.anemoe");
    let b = bundle.to_str().unwrap();
    let checkpoint = fixture("tiny-gemma4-moe-text");
    build(&checkpoint, &bundle, &["--no-journal"]);
    let found = json(0, &["report", b]);
    assert_eq!(found["form_speeds"]["forms"].as_array().unwrap().len(), 1, "{found}");
    assert!(page(&bundle, &[]).contains("--checkpoint CHECKPOINT"));
    assert!(run(&["report", b]).1.contains("--checkpoint CHECKPOINT"));
    let named = json(0, &["report", b, "--checkpoint", checkpoint.to_str().unwrap()]);
    assert!(named["form_speeds"]["forms"].as_array().unwrap().len() > 4);
    refused(
        &["report", b, "--checkpoint", fixture("tiny-zaya").to_str().unwrap()],
        &["--checkpoint", "zaya"],
    );
    refused(&["report", b, "--checkpoint", "nowhere"], &["--checkpoint nowhere"]);
}

#[test]
fn nothing_from_outside_is_markup() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join(HOSTILE);
    build(&fixture("tiny-gemma4-moe-text"), &bundle, &["--intent", NOTE]);
    let b = bundle.to_str().unwrap();
    passes(&["journal", "add", b, "--lesson", "</article><iframe>", "--surprise", NOTE]);
    let page = page(&bundle, &["--against", b]);
    assert_eq!(document(&page)["name"], HOSTILE);
    // The template's own scripts, of which a browser runs the one whose hash the page names.
    assert_eq!((page.matches("<script").count(), page.matches("</script").count()), (2, 2));
    for bad in [
        "<!--",
        "<img",
        "<iframe",
        "onerror=alert(1)>",
        "\u{1b}",
        "http://",
        "https://",
        "javascript:",
        "url(",
    ] {
        assert!(!page.contains(bad), "{bad}");
    }
    assert!(
        page.contains("&lt;script&gt;alert(&#39;x&#39;)&lt;!-- &amp; &quot;y&quot;")
            && page.contains("&lt;img src=x")
    );
    assert!(page.contains("default-src 'none'") && page.contains("script-src 'sha256-"));
}

#[test]
fn pages_replace_no_file_of_a_bundle() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("tiny.anemoe");
    build(&fixture("tiny-gemma4-moe-text"), &bundle, &["--no-journal"]);
    let b = bundle.to_str().unwrap();
    let chain = bundle.join("chain.json");
    refused(&["report", b, "--force", "-o", chain.to_str().unwrap()], &["belongs to an input"]);
    refused(&["report", fixture("tiny-zaya").to_str().unwrap()], &["anemoe build"]);
    // Facts in a wrong form leave sections empty.
    let event = r#"{"id":"aaaa","time":"2026-01-01T00:00:00Z","kind":"trace","status":"done","version":"1","facts":{"cosine_map":[["x"],7]}}"#;
    std::fs::write(bundle.join("journal.jsonl"), format!("{event}\n")).unwrap();
    let (code, out, err) = run(&["report", b]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("anemoe trace"), "{out}");
}
