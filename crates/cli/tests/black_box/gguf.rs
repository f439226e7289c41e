//! GGUF files from file to tokens, with the built binary.

use crate::common::*;
use crate::files::gguf::Gguf;
use crate::files::tiny::{Options, as_f32, gguf_of, tokenizer};
use serde_json::{Value, json as value};

const TINY: &str = "tiny-gemma4-moe";

fn write(g: &Gguf) -> Place {
    let path = folder().join("tiny.gguf");
    std::fs::write(&path, g.write()).unwrap();
    path
}

fn tiny(fused: bool) -> Gguf {
    gguf_of(&fixture(TINY), Options { fused, encode: as_f32 })
}

/// Makes the tiny model with the first 512 tokens of the small model's tokenizer.
fn with_tokenizer() -> Gguf {
    let mut t = read_json(small().join("tokenizer.json"));
    let vocab = t["model"]["vocab"].as_object_mut().unwrap();
    vocab.retain(|_, id| count(id) < 512);
    let vocab = vocab.clone();
    let known = |m: &Value| {
        let [a, b] = [0, 1].map(|i| m[i].as_str().unwrap());
        [a.into(), b.into(), format!("{a}{b}")].iter().all(|t: &String| vocab.contains_key(t))
    };
    t["model"]["merges"].as_array_mut().unwrap().retain(known);
    let mut g = tiny(false);
    tokenizer(&mut g, &t);
    g
}

#[test]
fn a_file_gives_the_bundle_of_its_folder() {
    let options = "--quant fp16 --tokens 1,4";
    let expected = built(TINY, options);
    for fused in [true, false] {
        let bundle = folder().join("b.anemoe");
        build(write(&tiny(fused)), &bundle, options);
        let bytes = |b: &Place| (contents(&b.join("shards")), std::fs::read(b.join("embed.bin")).unwrap());
        assert!(bytes(&bundle) == bytes(&expected), "fused: {fused}");
        let (mut found, folder) = (chain(&bundle), chain(&expected));
        assert_eq!(found["source"], "tiny.gguf");
        assert_ne!(found["checkpoint_sha256"], folder["checkpoint_sha256"]);
        for other in ["source", "checkpoint_sha256"] {
            found[other] = folder[other].clone();
        }
        assert_eq!(found, folder);
    }
}

/// Checks that a text prompt needs nothing but the file, that the bundle has all that it needs, and that what the file's
/// makers recommend for sampling reaches the tokens.
#[test]
fn a_text_needs_nothing_but_the_file() {
    let (dir, mut g) = (folder(), with_tokenizer());
    g.raw("general.sampling.top_k", 5, &40i32.to_le_bytes());
    g.f32("general.sampling.temp", 1.5);
    g.f32("general.sampling.penalty_repeat", 1.1);
    let (file, out) = (write(&g), dir.join("golden.npz"));
    let golden = json(0, format!("golden {file} --prompt 'def in(self):' --decode 4 -o {out}"));
    let prompt = list(&golden["prompt_ids"]);
    assert!(prompt[0] == 2 && prompt.len() > 4, "{golden}");

    let bundle = dir.join("tiny.anemoe");
    build(&file, &bundle, "--quant fp16 --tokens 1");
    let generate =
        |options: &str| json(0, format!("generate {bundle} -p 'def in(self):' --ignore-eos {options}"));
    let plain = generate("-n 4 --temperature 0 --repetition-penalty 1");
    has(&plain, value!({"prompt_ids": golden["prompt_ids"], "generated_ids": golden["decode_tokens"]}));
    assert!(plain["text"].is_string());
    let (one, two) = (generate("-n 8 --seed 1"), generate("-n 8 --seed 2"));
    assert_ne!(one["generated_ids"], two["generated_ids"]);
    let from_model = ["temperature", "top_k", "repetition_penalty"];
    has(&one["sampling"], value!({"from_model": from_model, "temperature": 1.5, "top_k": 40}));
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        assert!(bundle.join(name).is_file(), "{name}");
    }
    // The folder has no tokenizer, but its weights are the same.
    let (ids, of_folder) = (golden["prompt_ids"].to_string(), dir.join("folder.npz"));
    let ids = ids.trim_matches(['[', ']']);
    passes(format!("golden {} --prompt-ids {ids} --decode 4 -o {of_folder}", fixture(TINY)));
    assert!(std::fs::read(&out).unwrap() == std::fs::read(&of_folder).unwrap());
}

#[test]
fn a_file_is_inspected_and_planned() {
    let file = write(&tiny(true));
    let report = json(0, format!("inspect {file}"));
    let folder = json(0, format!("inspect {}", fixture(TINY)));
    assert_eq!(report["name"], "tiny.gguf");
    for key in ["family", "config", "total_parameters", "active_parameters"] {
        assert_eq!(report[key], folder[key], "{key}");
    }
    assert_eq!(report["bytes"], 4 * count(&report["total_parameters"]));
    assert!(list(&report["tensors"]).iter().all(|t| t["dtype"] == "f32"));
    passes(format!("plan {file}"));
}

#[test]
fn wrong_files_are_refused() {
    let bundle = folder().join("none.anemoe");
    let mut parts = with_tokenizer();
    parts.u32("split.count", 3);
    // The error is found before the packages are built.
    let mut merges = with_tokenizer();
    merges.remove("tokenizer.ggml.merges");
    merges.texts("tokenizer.ggml.merges", &["t"]);
    for (g, says) in [(parts, "`split.count` is 3"), (merges, "`tokenizer.ggml.merges` has `t` as 0")] {
        let file = write(&g);
        refused(format!("build {file} -o {bundle}"), &["tiny.gguf", says]);
        assert!(!bundle.exists());
    }
    let file = folder().join("text.gguf");
    std::fs::write(&file, "no model").unwrap();
    refused(format!("inspect {file}"), &["text.gguf", "expected `GGUF`"]);
    let plain = write(&tiny(true));
    refused(format!("golden {plain} --prompt x -o {plain}.npz"), &["tokenizer", "--prompt-ids"]);
}
