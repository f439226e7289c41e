//! Drafters: a model that drafts for another one, beside it or in its bundle.

use crate::common::*;
use serde_json::{Value, json as value};
use std::fs;

const LONG: &str = "-p 'def main():\n' -n 160 --ignore-eos";

#[test]
fn a_drafter_changes_no_token_and_is_counted() {
    let bundle = built("small", "--max-context 512 --no-journal --quant fp16");
    let coarse = built("small", "--max-context 512 --no-journal --quant lut4");
    let run = |options: &str| json(0, format!("generate {bundle} {LONG} {options}"));
    let plain = run("--speculate off");
    assert!(plain["speculation"].is_null());
    assert!(run("")["speculation"]["sources"].is_null(), "one source needs no names");
    for options in ["--speculate ngram --ngram-min 24", "", "--temperature 0.8 --seed 5 --speculate ngram"] {
        let sampled = options.contains("0.8").then(|| run("--temperature 0.8 --seed 5 --speculate off"));
        let (drafted, expected) = (run(&format!("{options} --drafter {coarse}")), sampled.as_ref());
        assert_eq!(drafted["generated_ids"], expected.unwrap_or(&plain)["generated_ids"], "{options}");
        let sources = list(&drafted["speculation"]["sources"]);
        let names: Vec<&Value> = sources.iter().map(|s| &s["source"]).collect();
        assert_eq!(names, ["repetition", "drafter"]);
        let sum = |key: &str| sources.iter().map(|s| count(&s[key])).sum::<u64>();
        assert_eq!(sum("drafted"), count(&drafted["speculation"]["drafted"]));
        assert_eq!(sum("accepted"), count(&drafted["speculation"]["accepted"]));
        if options.contains("ngram-min") {
            assert!(count(&sources[1]["accepted"]) > 40 && number(&sources[1]["ms"]) > 0.0, "{sources:?}");
        }
    }
    assert!(!passes(format!("generate {bundle} {LONG} --speculate ngram --drafter {coarse}")).is_empty());
    let options = "--drafts 0.7 --decode 24 --repetitions 1 --prefill 0";
    let bench = json(0, format!("bench {bundle} --drafter {coarse} {options}"));
    let drafts = list(&bench["drafts"]);
    assert_eq!((drafts.len(), &drafts[0]["planted"]), (2, &value!(0.7)));
    assert!(drafts[1]["planted"].is_null() && list(&drafts[1]["sources"]).len() == 2, "{drafts:?}");
}

#[test]
fn a_drafter_with_other_tokens_or_none_is_refused() {
    let bundle = built("small", "--max-context 256 --no-journal --quant fp16");
    let other = bundle.join("../other.anemoe");
    copy(&bundle, &other);
    let with = |options: &str| format!("generate {bundle} -p x -n 4 {options}");
    let beside = with(&format!("--drafter {other}"));
    refused(format!("{beside} --speculate off"), &["--drafter has no effect with --speculate off"]);
    refused(with(&format!("--drafter {bundle}/shards")), &["shards"]);
    let file = other.join("tokenizer.json");
    let whole = fs::read(&file).unwrap();
    fs::write(&file, [&whole[..], b"\n"].concat()).unwrap();
    passes(&beside);
    edit_json(&file, |v| {
        let vocab = v["model"]["vocab"].as_object_mut().unwrap();
        let (name, id) = vocab.iter().map(|(n, id)| (n.clone(), id.clone())).next_back().unwrap();
        vocab.remove(&name);
        vocab.insert("another name".into(), id);
        v["model"]["merges"] = value!([]);
    });
    refused(&beside, &["token ", "a drafter needs the same tokens"]);
    fs::remove_file(&file).unwrap();
    refused(&beside, &["has no tokenizer.json", "a drafter needs the same tokens"]);
    fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    refused(&beside, &["tokenizer.json"]);
    // Without tokenizers, sizes are compared.
    let [none, like] = ["tiny-llama", "tiny-qwen3"].map(|name| built(name, "--max-context 64 --no-journal"));
    let ids = |options: &str| format!("generate {none} --prompt-ids 1,2 -n 30 --ignore-eos {options}");
    let [plain, drafted] = ["--speculate off".into(), format!("--speculate ngram --drafter {like}")]
        .map(|options: String| json(0, ids(&options))["generated_ids"].clone());
    assert_eq!(plain, drafted);
    refused(ids(&format!("--drafter {bundle}")), &["has a tokenizer.json, and the model has none"]);
    refused(format!("serve {bundle} {none} --drafter {bundle}"), &["--drafter drafts for a single bundle"]);
}

#[test]
fn a_bundle_has_its_drafter() {
    let (dir, model) = (folder(), small());
    let out = dir.join("pair.anemoe");
    let options = "--max-context 512 --skip-gates --no-journal --quant lut4";
    refused(format!("build {model} -o {out} {options} --drafter {model} --shard 0/2"), &["--shard"]);
    refused(format!("build {model} -o {out} {options} --drafter {dir}/none"), &["none"]);
    assert!(!out.exists());
    passes(format!("build {model} -o {out} {options} --drafter {model}"));
    let contract = chain(&out);
    assert_eq!(contract["drafter"], "drafter.anemoe");
    assert!(passes(format!("inspect {out}")).contains("drafter.anemoe drafts for it"));
    let run = |options: &str| json(0, format!("generate {out} {LONG} {options}"));
    let (plain, drafted) =
        (run("--speculate off"), run("--speculate ngram --ngram-min 1000 --ngram-max 1000"));
    assert_eq!(plain["generated_ids"], drafted["generated_ids"]);
    assert!(count(&drafted["speculation"]["sources"][1]["accepted"]) > 40, "{drafted}");
    // The drafter travels with the bundle, and is verified with it.
    let store = dir.join("store");
    fs::create_dir(&store).unwrap();
    passes(format!("push {out} {store} --name pair"));
    passes(format!("pull {store} {dir}/copy.anemoe --name pair"));
    let copy = dir.join("copy.anemoe");
    assert_eq!(contents(&copy), contents(&out));
    let generate = format!("generate {copy} -p x -n 2");
    flip(copy.join("drafter.anemoe/embed.bin"));
    refused(format!("{generate} --speculate off"), &["drafter.anemoe", "embed.bin", "SHA-256"]);
    fs::remove_dir_all(copy.join("drafter.anemoe")).unwrap();
    refused(&generate, &["drafter.anemoe"]);
    edit_json(copy.join("chain.json"), |v| v["drafter"] = "../out".into());
    refused(&generate, &["drafter: path `../out` leaves the bundle"]);
    // A bundle inside a bundle ends there.
    edit_json(out.join("drafter.anemoe/chain.json"), |v| v["drafter"] = "drafter.anemoe".into());
    refused(format!("generate {out} -p x -n 2"), &["drafter.anemoe", "the drafter has one of its own"]);
}

/// Checks the trained pair of the repository, on text that neither was trained on. Options of experts do not count for the
/// assistant, which has none.
#[test]
fn the_trained_assistant_drafts_for_its_model() {
    let (dir, model, assistant) = (folder(), small(), root("models/small-gemma4-assistant"));
    let (out, forms) = (dir.join("trained.anemoe"), dir.join("forms.toml"));
    fs::write(&forms, "[experts]\nexperts = \"bank\"\n").unwrap();
    let options = "--max-context 512 --skip-gates --no-journal --quant fp16 --expert-quant int8-tensor --router-quant fp16";
    let options = format!("{options} --experts-per-shard 8 --scale-scope bank --forms {forms}");
    passes(format!("build {model} -o {out} {options} --drafter {assistant}"));
    let mut places = [[0; 2]; 3];
    for prompt in [
        "def read_header(stream, limit):\n    \"\"\"Return the names and values of a header.\"\"\"\n",
        "A bundle is a folder with packages and a file that says how they are called. The",
    ] {
        let prompt = shlex::try_quote(prompt).unwrap();
        let run = |options: &str| {
            json(0, format!("generate {out} -p {prompt} -n 96 --ignore-eos --speculate {options}"))
        };
        let drafted = run("ngram --ngram-min 1000 --ngram-max 1000 --draft-max 3");
        assert_eq!(drafted["generated_ids"], run("off")["generated_ids"]);
        for (sum, place) in places.iter_mut().zip(list(&drafted["speculation"]["sources"][1]["places"])) {
            sum.iter_mut().zip(list(place)).for_each(|(sum, n)| *sum += count(n));
        }
    }
    let acceptance = places.map(|[compared, accepted]| accepted as f64 / compared as f64);
    assert!(acceptance.iter().all(|share| *share > 0.4), "{places:?}");
}

/// Checks that a build goes on where it ended, with the drafter it has, and that other options are refused.
#[test]
fn a_build_with_a_drafter_goes_on() {
    let (dir, model) = (folder(), small());
    let (out, other) = (dir.join("pair.anemoe"), dir.join("other.anemoe"));
    let options = "--max-context 64 --skip-gates --no-journal --quant lut4";
    let line = format!("build {model} -o {out} {options}");
    passes(format!("{line} --drafter {model}"));
    let whole = contents(&out);
    refused(&line, &["finished bundle already", "--drafter drafter.anemoe, now none"]);
    fs::remove_dir_all(out.join("drafter.anemoe/shards")).unwrap();
    fs::remove_dir_all(out.join("shards")).unwrap();
    passes(format!("{line} --drafter {model}"));
    assert_eq!(contents(&out), whole);
    // A wrong drafter leaves nothing behind.
    let damaged = dir.join("damaged");
    copy(&model, &damaged);
    plant(&damaged, "model.language_model.layers.1.mlp.down_proj.weight", 1000, f32::NAN);
    refused(format!("build {model} -o {other} {options} --drafter {damaged}"), &["damaged", "down_proj"]);
    assert!(!other.exists());
}

/// Checks the trained drafter of SmolLM2: a GGUF file with a tokenizer of 49,152 tokens, and weights on the lattice of Q4_0. Damage
/// of either gives thousands where it has 89, and SmolLM2 27.
#[test]
fn the_drafter_of_smollm2_predicts_english() {
    let (dir, model) = (folder(), root("models/smollm2-135m-drafter/smollm2-135m-drafter-q4_0.gguf"));
    let text = "The kettle began to whistle, and she took two cups from the shelf above the stove. Outside, the rain \
                had stopped, and the first light of the morning was on the roofs of the houses across the street. He \
                was still asleep in the other room. She decided to wait until he woke up by himself, because it was \
                Sunday and there was no reason to hurry.";
    let file = dir.join("text.txt");
    fs::write(&file, text).unwrap();
    let found = json(0, format!("perplexity {model} --text {file}"));
    assert_eq!(count(&found["tokens"]), 74, "{found}");
    assert!((60.0..120.0).contains(&number(&found["perplexity"])), "{found}");
    assert!(passes(format!("inspect {model}")).contains("lie on the lattice of Q4_0"));
}
