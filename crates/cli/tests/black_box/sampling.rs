//! Sampling as the makers of a model recommend it, and as the command line says, in `generate`, `chat` and `serve`.

use crate::common::*;
use serde_json::{Value, json as value};
use std::fs;

#[test]
fn a_bundle_is_sampled_as_its_makers_recommend() {
    let bundle = built("small", "--max-context 256 --no-journal");
    let generate =
        |options: &str| json(0, format!("generate {bundle} -p 'def main():\n' --ignore-eos {options}"));
    let tokens = |options: &str| ids(&generate(options)["generated_ids"]);
    let recommend = |file: Value| fs::write(bundle.join("generation_config.json"), file.to_string()).unwrap();
    recommend(value!({"do_sample": false}));
    let plain = generate("-n 48");
    let greedy = ids(&plain["generated_ids"]);
    let sampling = &plain["sampling"];
    has(sampling, value!({"temperature": 0.0, "from_model": []}));

    // Penalties count without random choices, and the command line goes first.
    recommend(
        value!({"repetition_penalty": 1.3, "frequency_penalty": 0.1, "temperature": 0.7, "max_new_tokens": 48}),
    );
    let penalized = generate("");
    let (own, from_model) = (&penalized["sampling"], ["repetition_penalty", "frequency_penalty"]);
    has(own, value!({"from_model": from_model, "repetition_penalty": 1.3, "temperature": 0.0}));
    let penalized = ids(&penalized["generated_ids"]);
    assert!(penalized.len() == 48 && penalized != greedy);
    assert_eq!(tokens("--repetition-penalty 1 --frequency-penalty 0"), greedy);
    assert_eq!(tokens("--speculate ngram --ngram-min 1"), penalized, "drafts change no token");
    assert_eq!(tokens("--speculate off"), penalized);
    recommend(value!({}));
    assert_eq!(tokens("-n 48 --repetition-penalty 1.3 --frequency-penalty 0.1"), penalized);
    assert!(!tokens(&format!("-n 9 --logit-bias {}:-100", greedy[0])).contains(&greedy[0]));
    recommend(value!({"suppress_tokens": [greedy[0]]}));
    assert!(!tokens("-n 9").contains(&greedy[0]));

    // With random choices, seeds differ; filters that leave one token do not.
    recommend(value!({"do_sample": true, "temperature": 1.5, "min_p": 0.01}));
    assert_ne!(tokens("--seed 1"), tokens("--seed 2"));
    for one in ["--min-p 1", "--temperature 0", "--top-k 1", "--top-p 0.000001"] {
        assert_eq!(tokens(&format!("-n 48 --seed 1 {one}")), greedy, "{one}");
    }
    assert_eq!(tokens("--seed 3 --speculate off"), tokens("--seed 3 --speculate ngram --ngram-min 1"));
    let chat = |seed: u64| {
        let mut command = anemoe(format!("chat {bundle} -n 12 --seed {seed} --json"));
        let (code, out, err) = fed(&mut command, "import re\n");
        assert_eq!(code, 0, "{err}");
        (serde_json::from_str::<Value>(&out).unwrap(), err)
    };
    let (first, second) = (chat(1).0, chat(2).0);
    assert_ne!(first["turns"][0]["text"], second["turns"][0]["text"]);
    assert_eq!(first["sampling"]["from_model"], value!(["temperature", "top_k", "min_p"]));

    // What has no effect is named.
    recommend(value!({"num_beams": 4, "no_repeat_ngram_size": 3}));
    assert!(chat(1).1.contains("no effect here: num_beams, no_repeat_ngram_size"));
    let commands = ["generate -p a", "chat", "serve --port 0"].map(|command| format!("{command} {bundle}"));
    for (file, says) in [
        (value!({"temperature": "hot"}), "`temperature` is not a number"),
        (value!({"min_p": 2}), "`min_p`: 2 is not"),
        (value!({"bad_words_ids": 3}), "`bad_words_ids` is not"),
    ] {
        recommend(file);
        for line in commands.iter().chain([&format!("check {bundle}")]) {
            refused(line, &["generation_config.json", says]);
        }
    }
    recommend(value!({}));
    for (options, says) in [
        ("--min-p 2", "--min-p: 2 is not from 0 to 1"),
        ("--temperature -1", "--temperature: -1 is not"),
        ("--top-p nan", "--top-p"),
        ("--repetition-penalty 0", "--repetition-penalty: 0 is not"),
        ("--presence-penalty 3", "--presence-penalty: 3 is not from -2 to 2"),
        ("--logit-bias 999999:1", "--logit-bias: has token 999999"),
        ("--logit-bias 5:101", "`5:101` is not"),
        ("--typical-p 0.5", "--typical-p has no effect without --temperature"),
    ] {
        for line in &commands[..2] {
            refused(format!("{line} {options}"), &[says]);
        }
    }
    refused(format!("{} --min-p 2", commands[2]), &["--min-p: 2 is not"]);
}
