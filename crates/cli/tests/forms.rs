//! Forms of shards from the command line: the list, choices that do not fit, and bundles of each form.

mod common;

use common::{build, fixture, json, refused, run};
use std::fs;

fn text(checkpoint: &str) -> String {
    fixture(checkpoint).to_str().unwrap().to_string()
}

#[test]
fn the_ladder_names_options_and_what_was_seen() {
    for (checkpoint, has_history) in [("tiny-gemma4-moe", false), ("tiny-zaya", true)] {
        let document = json(0, &["forms", &text(checkpoint)]);
        let forms = document["forms"].as_array().unwrap();
        assert!(forms.len() >= 8);
        assert_eq!(forms[0]["build_args"].as_array().unwrap().len(), 0);
        let args = |f: &serde_json::Value| f["build_args"].to_string();
        let host = forms.iter().find(|f| args(f).contains("--cache")).unwrap();
        assert_eq!(args(host).contains("--history"), has_history);
        for form in forms {
            assert!(form["for"][0]["source"].is_string() && form["against"][0]["chip"].is_string());
            let checkpoint = text(checkpoint);
            let mut words = vec!["plan", &checkpoint];
            words.extend(form["build_args"].as_array().unwrap().iter().map(|a| a.as_str().unwrap()));
            let (status, _, error) = run(&words);
            assert_eq!(status, 0, "{words:?}: {error}");
        }
    }
}

#[test]
fn choices_that_do_not_fit_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_string()
    };
    let (gemma, zaya) = (text("tiny-gemma4-moe"), text("tiny-zaya"));
    let unknown_key = file("key.toml", "[attention]\ncaches = \"host\"\n");
    let unknown_word = file("word.toml", "[attention]\ncache = \"hosts\"\n");
    let unknown_sort = file("sort.toml", "[attentions]\ncache = \"host\"\n");
    let nothing = file("nothing.toml", "");
    let missing = dir.path().join("missing.toml").to_str().unwrap().to_string();
    for (words, says) in [
        (vec![&*zaya, "--cache", "host"], "--history host"),
        (vec![&*gemma, "--history", "host"], "--history host"),
        (vec![&*gemma, "--attention", "heads"], "per-head"),
        (vec![&*gemma, "--functions", "apart"], "--cache host"),
        (vec![&*zaya, "--functions", "apart", "--cache", "host"], "--history host"),
        (vec![&*gemma, "--forms", &*unknown_key], "caches"),
        (vec![&*gemma, "--forms", &*unknown_word], "hosts"),
        (vec![&*gemma, "--forms", &*unknown_sort], "attentions"),
        (vec![&*gemma, "--forms", &*nothing], "no sort of shards"),
        (vec![&*gemma, "--forms", &*missing], "missing.toml"),
        (vec![&*gemma, "--forms", &*nothing, "--cache", "host"], "--cache"),
    ] {
        let mut all = vec!["plan"];
        all.extend(words);
        refused(&all, &[says]);
    }
}

#[test]
fn bundles_of_every_form_generate_the_same_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let forms = dir.path().join("forms.toml");
    let toml = "[attention]\ncache = \"host\"\nattention = \"per-head\"\n[head]\nio = \"channels-last\"\n";
    fs::write(&forms, toml).unwrap();
    let forms = forms.to_str().unwrap();
    for (checkpoint, host) in [
        ("tiny-gemma4-moe", vec!["--cache", "host"]),
        ("tiny-zaya", vec!["--cache", "host", "--history", "host"]),
    ] {
        let mut others = vec![
            vec![],
            host,
            vec!["--attention", "per-head", "--io", "channels-last"],
            vec!["--activation", "sigmoid"],
        ];
        if checkpoint == "tiny-gemma4-moe" {
            others.push(vec!["--cache", "host", "--functions", "apart"]);
            others.push(vec!["--forms", forms]);
        }
        let mut tokens = Vec::new();
        for (i, form) in others.into_iter().enumerate() {
            let bundle = dir.path().join(format!("{checkpoint}-{i}"));
            let mut options = vec!["--tokens", "1,16"];
            options.extend(&form);
            build(&fixture(checkpoint), &bundle, &options);
            let bundle = bundle.to_str().unwrap();
            let ids = "5,42,79,116,33";
            let out = json(0, &["generate", bundle, "--prompt-ids", ids, "--max-new", "12"]);
            tokens.push((form, out["generated_ids"].clone()));
        }
        for (form, own) in &tokens {
            assert!(own.is_array() && *own == tokens[0].1, "{form:?}: {own}");
        }
    }
}
