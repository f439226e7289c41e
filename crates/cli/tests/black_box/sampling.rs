//! Sampling as the makers of a model recommend it, and as the command line says, in `generate`, `chat` and `serve`.

use crate::common::{anemoe, build, finish, ids, json, refused};
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Builds the small model, which repeats itself.
fn small(dir: &Path) -> PathBuf {
    let path = dir.join("small.anemoe");
    let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/small-gemma4");
    build(&small, &path, &["--max-context", "256", "--no-journal", "--quant", "lut4"]);
    path
}

fn recommend(bundle: &Path, file: &Value) {
    fs::write(bundle.join("generation_config.json"), file.to_string()).unwrap();
}

#[test]
fn a_bundle_is_sampled_as_its_makers_recommend() {
    let dir = tempfile::tempdir().unwrap();
    let path = small(dir.path());
    let bundle = path.to_str().unwrap();
    let generate = |options: &[&str]| {
        let mut args = vec!["generate", bundle, "-p", "def main():\n", "--ignore-eos"];
        args.extend(options);
        json(0, &args)
    };
    let tokens = |options: &[&str]| ids(&generate(options)["generated_ids"]);
    recommend(&path, &json!({"do_sample": false}));
    let plain = generate(&["-n", "48"]);
    let greedy = ids(&plain["generated_ids"]);
    assert_eq!(
        (&plain["sampling"]["temperature"], &plain["sampling"]["from_model"]),
        (&json!(0.0), &json!([]))
    );

    // Penalties count without random choices, and the command line goes first.
    let file = json!({"repetition_penalty": 1.3, "frequency_penalty": 0.1, "temperature": 0.7, "max_new_tokens": 48});
    recommend(&path, &file);
    let penalized = generate(&[]);
    let own = &penalized["sampling"];
    assert_eq!(own["from_model"], json!(["repetition_penalty", "frequency_penalty"]), "{own}");
    assert_eq!((&own["repetition_penalty"], &own["temperature"]), (&json!(1.3), &json!(0.0)));
    let penalized = ids(&penalized["generated_ids"]);
    assert_eq!(penalized.len(), 48);
    assert_ne!(penalized, greedy);
    assert_eq!(tokens(&["--repetition-penalty", "1", "--frequency-penalty", "0"]), greedy);
    assert_eq!(tokens(&["--speculate", "ngram", "--ngram-min", "1"]), penalized, "drafts change no token");
    assert_eq!(tokens(&["--speculate", "off"]), penalized);
    recommend(&path, &json!({}));
    let said = ["-n", "48", "--repetition-penalty", "1.3", "--frequency-penalty", "0.1"];
    assert_eq!(tokens(&said), penalized);
    let bias = format!("{}:-100", greedy[0]);
    assert!(!tokens(&["-n", "9", "--logit-bias", &bias]).contains(&greedy[0]));
    recommend(&path, &json!({"suppress_tokens": [greedy[0]]}));
    assert!(!tokens(&["-n", "9"]).contains(&greedy[0]));

    // With random choices, seeds differ; filters that leave one token do not.
    recommend(&path, &json!({"do_sample": true, "temperature": 1.5, "min_p": 0.01}));
    assert_ne!(tokens(&["--seed", "1"]), tokens(&["--seed", "2"]));
    for one in [["--min-p", "1"], ["--temperature", "0"], ["--top-k", "1"], ["--top-p", "0.000001"]] {
        assert_eq!(tokens(&[&["-n", "48", "--seed", "1"][..], &one].concat()), greedy, "{one:?}");
    }
    let sampled = tokens(&["--seed", "3", "--speculate", "off"]);
    assert_eq!(tokens(&["--seed", "3", "--speculate", "ngram", "--ngram-min", "1"]), sampled);
    let chat = |seed: &str| {
        let mut command = anemoe(&["chat", bundle, "-n", "12", "--seed", seed, "--json"]);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"import re\n").unwrap();
        let (code, out, err) = finish(child.wait_with_output().unwrap());
        assert_eq!(code, 0, "{err}");
        (serde_json::from_str::<Value>(&out).unwrap(), err)
    };
    let (first, second) = (chat("1").0, chat("2").0);
    assert_ne!(first["turns"][0]["text"], second["turns"][0]["text"]);
    assert_eq!(first["sampling"]["from_model"], json!(["temperature", "top_k", "min_p"]));

    // What has no effect is named.
    recommend(&path, &json!({"num_beams": 4, "no_repeat_ngram_size": 3}));
    assert!(chat("1").1.contains("no effect here: num_beams, no_repeat_ngram_size"));
    for (file, says) in [
        (json!({"temperature": "hot"}), "`temperature` is not a number"),
        (json!({"min_p": 2}), "`min_p`: 2 is not"),
        (json!({"bad_words_ids": 3}), "`bad_words_ids` is not"),
    ] {
        recommend(&path, &file);
        let says = ["generation_config.json", says];
        refused(&["generate", bundle, "-p", "a"], &says);
        refused(&["chat", bundle], &says);
        refused(&["serve", bundle, "--port", "0"], &says);
        refused(&["check", bundle], &says);
    }
    recommend(&path, &json!({}));
    for (options, says) in [
        (&["--min-p", "2"][..], "--min-p: 2 is not from 0 to 1"),
        (&["--temperature", "-1"], "--temperature: -1 is not"),
        (&["--repetition-penalty", "0"], "--repetition-penalty: 0 is not"),
        (&["--presence-penalty", "3"], "--presence-penalty: 3 is not from -2 to 2"),
        (&["--logit-bias", "999999:1"], "--logit-bias: has token 999999"),
        (&["--logit-bias", "5:101"], "`5:101` is not"),
        (&["--typical-p", "0.5"], "--typical-p has no effect without --temperature"),
    ] {
        refused(&[&["generate", bundle, "-p", "a"][..], options].concat(), &[says]);
        refused(&[&["chat", bundle][..], options].concat(), &[says]);
    }
    refused(&["serve", bundle, "--port", "0", "--min-p", "2"], &["--min-p: 2 is not"]);
}
