//! Forms of shards from the command line: the list, choices that do not fit, and bundles of each form.

use crate::common::{build, fixture, json, refused, run};
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

/// Checks that a bundle whose packages choose the experts has the forms of its checkpoint, few experts in a call included.
#[test]
fn a_bundle_has_the_forms_of_its_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("whole.anemoe");
    build(&fixture("tiny-zaya"), &bundle, &["--tokens", "1,16", "--layers-per-shard", "2"]);
    let forms = |path: &str| json(0, &["forms", path])["forms"].clone();
    let of_bundle = forms(bundle.to_str().unwrap());
    assert_eq!(of_bundle, forms(&text("tiny-zaya")));
    assert!(of_bundle.to_string().contains("--experts-per-shard"));
}

#[test]
fn a_bundle_of_fewer_experts_than_are_routed_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("none.anemoe");
    build(&fixture("tiny-gemma4-moe"), &bundle, &["--tokens", "1", "--experts-per-shard", "1"]);
    let path = bundle.join("chain.json");
    let mut chain: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (experts, says) in [(0, "num_experts must be from 1"), (1, "where num_experts is 1")] {
        chain["model"]["num_experts"] = experts.into();
        fs::write(&path, chain.to_string()).unwrap();
        refused(&["forms", bundle.to_str().unwrap()], &["chain.json", says]);
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
    let short = file("short.toml", "[attention]\ncontext-buckets = \"96\"\n");
    let wrong_sort = file("layers.toml", "[attention]\nlayers-per-shard = 2\n");
    let apart = file("apart.toml", "[attention]\nfunctions = \"apart\"\n");
    let useless = file("useless.toml", "[experts]\nattention = \"per-head\"\n");
    let no_layers = file("none.toml", "[layers]\ncache = \"host\"\n");
    let missing = dir.path().join("missing.toml").to_str().unwrap().to_string();
    for (words, says) in [
        (vec![&*zaya, "--cache", "host"], "--history host"),
        (vec![&*gemma, "--history", "host"], "--history host"),
        (vec![&*gemma, "--attention", "heads"], "per-head"),
        (vec![&*gemma, "--functions", "apart"], "--cache host"),
        (vec![&*zaya, "--functions", "apart", "--cache", "host"], "--history host"),
        (
            vec![&*gemma, "--forms", &*unknown_key],
            "key.toml: invalid forms: [attention]: there is no choice `caches`; known here are: cache",
        ),
        (
            vec![&*gemma, "--forms", &*unknown_word],
            "word.toml: invalid forms: [attention]: cache: `hosts` is not one of state, host",
        ),
        (
            vec![&*gemma, "--forms", &*unknown_sort],
            "sort.toml: invalid forms: `attentions` is no sort of shards; there are the tables: attention",
        ),
        (vec![&*gemma, "--forms", &*nothing], "no sort of shards"),
        (vec![&*gemma, "--forms", &*apart], "apart.toml: invalid forms: [attention]: --functions apart"),
        (
            vec![&*gemma, "--forms", &*useless],
            "useless.toml: invalid forms: [experts]: `attention` changes nothing of this sort",
        ),
        (vec![&*gemma, "--forms", &*missing], "missing.toml"),
        (vec![&*gemma, "--forms", &*nothing, "--cache", "host"], "--cache"),
        (vec![&*gemma, "--context-buckets", "0"], "0 positions"),
        (vec![&*gemma, "--context-buckets", "64,32"], "ascending"),
        (vec![&*gemma, "--context-buckets", "100"], "give 128"),
        (vec![&*gemma, "--context-buckets", "short"], "not a number"),
        (vec![&*gemma, "--context-buckets", "32,64,96,128,160"], "4 at most"),
        (vec![&*gemma, "--context-buckets", "1024"], "--context-buckets 1024 is more than the 512 positions"),
        (vec![&*zaya, "--context-buckets", "64", "--max-context", "32"], "larger --max-context"),
        (
            vec![&*gemma, "--forms", &*short, "--max-context", "64"],
            "short.toml: invalid forms: --context-buckets 96",
        ),
        (vec![&*gemma, "--forms", &*nothing, "--context-buckets", "64"], "--context-buckets"),
        (vec![&*gemma, "--layers-per-shard", "0"], "--layers-per-shard"),
        (vec![&*zaya, "--layers-per-shard", "2", "--experts-per-shard", "2"], "--experts-per-shard 4"),
        (vec![&*zaya, "--layers-per-shard", "2", "--cache", "host"], "--history host"),
        (
            vec![&*gemma, "--forms", &*wrong_sort],
            "layers.toml: invalid forms: [attention]: `layers-per-shard` changes nothing",
        ),
        (
            vec![&*gemma, "--forms", &*no_layers],
            "none.toml: invalid forms: [layers]: without layers-per-shard",
        ),
    ] {
        let mut all = vec!["plan"];
        all.extend(words);
        refused(&all, &[says]);
    }
}

/// Checks that heads between transposes, and banks whose products are few and large, do not count as glue.
#[test]
fn forms_of_the_small_model_pass_its_gate_of_placement() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/small-gemma4");
    for form in [["--io", "channels-last"], ["--experts", "bank"]] {
        let plan = json(0, &["plan", model, "--quant", "lut4", form[0], form[1]]);
        for shard in plan["shards"].as_array().unwrap() {
            let reason = shard["verdict_reason"].as_str().unwrap_or_default();
            assert!(!reason.contains("prefer.glue"), "{form:?} {}: {reason}", shard["name"]);
        }
    }
}

/// Checks that a plan names the sorts in a file of forms that the model does not have.
#[test]
fn a_plan_names_the_tables_that_concern_none_of_its_shards() {
    let dir = tempfile::tempdir().unwrap();
    let forms = dir.path().join("forms.toml");
    fs::write(&forms, "[attention]\nattention = \"per-head\"\n[moe]\nio = \"channels-last\"\n").unwrap();
    let checkpoint = fixture("tiny-gemma4-moe");
    let plan = json(0, &["plan", checkpoint.to_str().unwrap(), "--forms", forms.to_str().unwrap()]);
    let notes = plan["notes"].as_array().unwrap();
    let told: Vec<_> = notes.iter().filter_map(|n| n.as_str()).filter(|n| n.contains("no shard")).collect();
    assert!(matches!(told.as_slice(), [one] if one.ends_with("no shard here is of [moe]")), "{told:?}");
}

#[test]
fn bundles_of_every_form_generate_the_same_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let forms = dir.path().join("forms.toml");
    let toml = "[attention]\ncache = \"host\"\nattention = \"per-head\"\ncontext-buckets = [32, 64]\n[head]\nio = \"channels-last\"\n";
    fs::write(&forms, toml).unwrap();
    let forms = forms.to_str().unwrap();
    for (checkpoint, host) in [
        ("tiny-gemma4-moe", vec!["--cache", "host"]),
        ("tiny-zaya", vec!["--cache", "host", "--history", "host"]),
    ] {
        let mut others = vec![
            vec![],
            host.clone(),
            vec!["--attention", "per-head", "--io", "channels-last"],
            vec!["--activation", "sigmoid"],
            vec!["--context-buckets", "32"],
            vec!["--layers-per-shard", "2"],
            [&["--layers-per-shard", "3", "--io", "channels-last"], host.as_slice()].concat(),
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
            // After 32 positions, functions of a bucket see too few slots.
            let generate =
                ["generate", bundle, "--prompt-ids", ids, "--max-new", "40", "--ignore-eos", "--exact"];
            let out = json(0, &generate);
            assert_eq!(out["generated_ids"].as_array().unwrap().len(), 40);
            tokens.push((form, out["generated_ids"].clone()));
        }
        for (form, own) in &tokens {
            assert!(own.is_array() && *own == tokens[0].1, "{form:?}: {own}");
        }
    }
}

#[test]
fn functions_for_short_contexts_are_planned_predicted_and_checked() {
    let dir = tempfile::tempdir().unwrap();
    for (checkpoint, form) in [
        ("tiny-gemma4-moe", vec![]),
        ("tiny-zaya", vec![]),
        ("tiny-zaya", vec!["--cache", "host", "--history", "host", "--functions", "apart"]),
        ("tiny-gemma4-moe", vec!["--token-range", "1..4"]),
    ] {
        let bundle = dir.path().join(format!("{checkpoint}-{}", form.len()));
        let path = text(checkpoint);
        let mut options = vec!["--context-buckets", "64,128", "--max-context", "128"];
        if form != ["--token-range", "1..4"] {
            options.extend(["--tokens", "1,4"]);
        }
        options.extend(&form);
        let plan = json(0, &[vec!["plan", &path], options.clone()].concat());
        let names = |shard: &serde_json::Value| shard["functions"].to_string();
        let attention: Vec<String> = plan["shards"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|s| s["kind"] == "attention")
            .map(names)
            .collect();
        let with = if form == ["--token-range", "1..4"] { "t1to4_c64" } else { "t1_c64" };
        assert!(attention.iter().any(|names| names.contains(with)), "{attention:?}");
        assert!(attention.iter().all(|names| !names.contains("c128")), "the whole context: {attention:?}");
        assert!(
            plan["notes"].to_string().contains("context bucket 128 is the whole cache"),
            "{}",
            plan["notes"]
        );
        build(&fixture(checkpoint), &bundle, &options);
        let b = bundle.to_str().unwrap();
        let chain: serde_json::Value =
            serde_json::from_slice(&fs::read(bundle.join("chain.json")).unwrap()).unwrap();
        let contexts: Vec<_> = chain["shards"].as_array().unwrap().iter().map(|s| &s["functions"]).collect();
        assert!(contexts.iter().any(|f| f.to_string().contains("\"context\":64")), "{contexts:?}");
        let (code, _, err) = run(&["check", b]);
        assert!(code < 2, "{err}");
        let speed = json(0, &["predict-speed", b]);
        let cache = |pass: &serde_json::Value| -> f64 {
            pass["kinds"].as_array().unwrap().iter().map(|k| k["cache_bytes"].as_f64().unwrap()).sum()
        };
        let short = &speed["contexts"][0];
        assert_eq!(short["context"], 64);
        assert!(cache(short) < cache(&speed["one"]) && cache(short) > 0.0, "{short}");
        let whole = ["generate", b, "--prompt-ids", "5,42", "--max-new", "70", "--ignore-eos"];
        assert_eq!(json(0, &whole)["generated_ids"].as_array().unwrap().len(), 70);
    }
    let speed = json(
        0,
        &[
            "predict-speed",
            &text("tiny-zaya"),
            "--context",
            "128",
            "--context-buckets",
            "64",
            "--tokens",
            "1",
        ],
    );
    assert_eq!(speed["contexts"][0]["context"], 64);
    let bundle = dir.path().join("tiny-zaya-0");
    let b = bundle.to_str().unwrap();
    refused(&["predict-speed", b, "--context-buckets", "64"], &["--context-buckets", "is built"]);
    let forms = json(0, &["forms", b]);
    assert!(forms["forms"].to_string().contains("--context-buckets\",\"32\""), "{forms}");
    refused(&["forms", b, "--max-context", "64"], &["--max-context", "is built"]);

    // Contexts that contradict the contract.
    let path = bundle.join("chain.json");
    let chain = fs::read_to_string(&path).unwrap();
    for (from, to, says) in [
        ("\"context\": 64", "\"context\": 128", "fewer than the 128 slots"),
        ("\"context\": 64", "\"context\": 0", "one at least"),
        ("\"context\": 64", "\"context\": -1", "found -1"),
    ] {
        assert!(chain.contains(from));
        fs::write(&path, chain.replace(from, to)).unwrap();
        refused(&["generate", b, "--prompt-ids", "5", "--max-new", "1"], &["chain.json", says]);
    }
}
/// Checks that a plan counts its calls, and that packages of several layers are probed, traced, checked and reported as
/// others.
#[test]
fn layers_that_share_a_package_are_counted_and_gated() {
    let dir = tempfile::tempdir().unwrap();
    let calls = |checkpoint: &str, more: &[&str]| {
        let path = text(checkpoint);
        let v = json(0, &[&["plan", &path], more].concat());
        let calls = &v["calls_per_token"];
        (calls["layers_at_most"].as_f64().unwrap(), v["totals"]["layer_shards"].as_u64().unwrap())
    };
    assert_eq!(calls("tiny-zaya", &[]), (16.0, 16));
    assert_eq!(calls("tiny-zaya", &["--layers-per-shard", "1"]), (8.0, 8));
    assert_eq!(calls("tiny-zaya", &["--layers-per-shard", "3"]), (3.0, 3));
    // A token chooses two of eight experts, in packs of two: two packs, one of which may be the last.
    let packs = ["--ffn-shards", "4"];
    assert_eq!(calls("tiny-gemma4-moe", &packs), (6.0 * 4.0, 6 * 5));
    assert_eq!(calls("tiny-gemma4-moe", &[&packs[..], &["--layers-per-shard", "2"]].concat()), (19.0, 25));
    for (checkpoint, behind) in [("tiny-zaya", vec![0, 3, 6, 8]), ("tiny-gemma4-moe", vec![0, 6])] {
        let (model, bundle) = (fixture(checkpoint), dir.path().join(checkpoint));
        build(&model, &bundle, &["--quant", "fp16", "--layers-per-shard", "3", "--tokens", "1,4"]);
        let (model, golden) = (text(checkpoint), fixture(checkpoint).join("golden.npz"));
        let (bundle, golden) = (bundle.to_str().unwrap(), golden.to_str().unwrap());
        let gate = [
            "validate",
            bundle,
            "--golden",
            golden,
            "--checkpoint",
            &model,
            "--probes",
            "3",
            "--shards",
            "all",
        ];
        let v = json(0, &gate);
        for s in v["probes"]["shards"].as_array().unwrap() {
            // A shard in FP16 is its own reference.
            assert!(s["min_cosine"].as_f64().unwrap() > 0.999_999, "{s}");
            assert_eq!(s["counted"], 3 + 24, "{s}");
        }
        let trace = json(0, &["trace", bundle, "--golden", golden]);
        let seen: Vec<u64> =
            trace["layers"].as_array().unwrap().iter().map(|l| l["boundary"].as_u64().unwrap()).collect();
        assert_eq!(seen, behind, "{checkpoint}");
        let least = trace["layers"].as_array().unwrap().iter().map(|l| l["fidelity"]["min_cosine"].as_f64());
        assert!(least.flatten().all(|c| c > 0.999), "{trace}");
        for command in [&["check", bundle][..], &["predict-speed", bundle], &["report", bundle, "--text"]] {
            let (status, _, err) = run(command);
            assert!(status == 0 || command[0] == "check" && status == 1, "{command:?}: {err}");
        }
    }
}

/// Checks that one part of one layer is put back to FP16, also if its package has other layers.
#[test]
fn parts_of_joined_layers_are_replaced_by_layer() {
    let dir = tempfile::tempdir().unwrap();
    let (model, golden) = (text("tiny-zaya"), fixture("tiny-zaya").join("golden.npz"));
    let bundle = dir.path().join("b");
    build(&fixture("tiny-zaya"), &bundle, &["--quant", "lut4", "--layers-per-shard", "4", "--tokens", "1,4"]);
    let words =
        ["trace", bundle.to_str().unwrap(), "--golden", golden.to_str().unwrap(), "--checkpoint", &model];
    let v = json(0, &[&words[..], &["--swap", "layer"]].concat());
    let layers: std::collections::BTreeSet<u64> =
        v["swap"]["swaps"].as_array().unwrap().iter().filter_map(|s| s["layer"].as_u64()).collect();
    assert_eq!(layers, (0..8).collect());
}
