//! Forms of shards from the command line: the list, choices that do not fit, and bundles of forms.

use crate::common::*;
use serde_json::Value;
use std::fs;

#[test]
fn the_ladder_names_options_and_what_was_seen() {
    for (checkpoint, has_history) in [("tiny-gemma4-moe", false), ("tiny-zaya", true)] {
        let checkpoint = fixture(checkpoint);
        let document = json(0, format!("forms {checkpoint}"));
        let forms = list(&document["forms"]);
        let args = |f: &Value| list(&f["build_args"]).iter().map(text).collect::<Vec<_>>().join(" ");
        assert!(forms.len() >= 8 && args(&forms[0]).is_empty());
        let host = forms.iter().find(|f| args(f).contains("--cache")).unwrap();
        assert_eq!(args(host).contains("--history"), has_history);
        for form in forms {
            assert!(form["for"][0]["source"].is_string() && form["against"][0]["chip"].is_string());
        }
        passes(format!("plan {checkpoint} {}", args(forms.last().unwrap())));
    }
    // A bundle whose packages choose the experts has the forms of its checkpoint, few experts in a call included.
    let bundle = built("tiny-zaya", "--tokens 1,16 --layers-per-shard 2");
    let forms = |path: &Place| json(0, format!("forms {path}"))["forms"].clone();
    assert_eq!(forms(&bundle), forms(&fixture("tiny-zaya")));
    assert!(forms(&bundle).to_string().contains("--experts-per-shard"));
    for (experts, says) in [(0, "num_experts must be from 1"), (1, "where num_experts is 1")] {
        let bundle = built("tiny-gemma4-moe", "--tokens 1 --experts-per-shard 1");
        edit_json(bundle.join("chain.json"), |chain| chain["model"]["num_experts"] = experts.into());
        refused(format!("forms {bundle}"), &["chain.json", says]);
    }
}

#[test]
fn choices_that_do_not_fit_are_refused_by_name() {
    for (model, options, says) in [
        ("tiny-zaya", "--cache host", "--history host"),
        ("tiny-gemma4-moe", "--history host", "--history host"),
        ("tiny-gemma4-moe", "--attention heads", "per-head"),
        ("tiny-gemma4-moe", "--functions apart", "--cache host"),
        ("tiny-zaya", "--functions apart --cache host", "--history host"),
        ("tiny-gemma4-moe", "--context-buckets 0", "0 positions"),
        ("tiny-gemma4-moe", "--context-buckets 1024", "1024 is more than the 512 positions"),
        ("tiny-zaya", "--context-buckets 64 --max-context 32", "larger --max-context"),
        ("tiny-gemma4-moe", "--layers-per-shard 0", "--layers-per-shard"),
        ("tiny-zaya", "--layers-per-shard 2 --experts-per-shard 2", "--experts-per-shard 4"),
        ("tiny-zaya", "--layers-per-shard 2 --cache host", "--history host"),
        ("tiny-gemma4-moe", "--forms missing.toml", "missing.toml"),
    ] {
        refused(format!("plan {} {options}", fixture(model)), &[says]);
    }
    let file = folder().join("forms.toml");
    for (toml, options, says) in [
        ("[attention]\ncaches = \"host\"", "", "[attention]: there is no choice `caches`; known here are"),
        ("[attentions]\ncache = \"host\"", "", "`attentions` is no sort of shards; there are the tables"),
        ("", "", "no sort of shards"),
        ("", "--cache host", "--cache"),
        ("", "--context-buckets 64", "--context-buckets"),
        ("[attention]\nfunctions = \"apart\"", "", "[attention]: --functions apart"),
        ("[experts]\nattention = \"per-head\"", "", "[experts]: `attention` changes nothing of this sort"),
        ("[attention]\ncontext-buckets = \"96\"", "--max-context 64", "--context-buckets 96"),
        ("[attention]\nlayers-per-shard = 2", "", "[attention]: `layers-per-shard` changes nothing"),
        ("[layers]\ncache = \"host\"", "", "[layers]: without layers-per-shard"),
    ] {
        fs::write(&file, toml).unwrap();
        let says = if toml.is_empty() { says.into() } else { format!("forms.toml: invalid forms: {says}") };
        refused(format!("plan {} --forms {file} {options}", fixture("tiny-gemma4-moe")), &[&says]);
    }
    // A plan names the tables that concern none of its shards.
    fs::write(&file, "[attention]\nattention = \"per-head\"\n[moe]\nio = \"channels-last\"\n").unwrap();
    let plan = json(0, format!("plan {} --forms {file}", fixture("tiny-gemma4-moe")));
    let told: Vec<_> = list(&plan["notes"]).iter().map(text).filter(|n| n.contains("no shard")).collect();
    assert!(matches!(told.as_slice(), [one] if one.ends_with("no shard here is of [moe]")), "{told:?}");
}

/// Checks that heads between transposes, and banks whose products are few and large, do not count as glue.
#[test]
fn forms_of_the_small_model_pass_its_gate_of_placement() {
    for form in ["--io channels-last", "--experts bank"] {
        let plan = json(0, format!("plan {} {form}", small()));
        for shard in list(&plan["shards"]) {
            let reason = shard["verdict_reason"].as_str().unwrap_or_default();
            assert!(!reason.contains("prefer.glue"), "{form} {}: {reason}", shard["name"]);
        }
    }
}

/// Checks that options and files of forms reach bundles, whose forms have tests of their own.
#[test]
fn bundles_of_other_forms_generate_the_same_tokens() {
    let forms = folder().join("forms.toml");
    let toml = "[attention]\ncache = \"host\"\nattention = \"per-head\"\ncontext-buckets = [32, 64]\n[head]\nio = \"channels-last\"\n";
    fs::write(&forms, toml).unwrap();
    for (checkpoint, form) in [
        ("tiny-gemma4-moe", format!("--forms {forms}")),
        ("tiny-gemma4-moe", "--cache host --functions apart --activation sigmoid".into()),
        ("tiny-zaya", "--layers-per-shard 3 --io channels-last --cache host --history host".into()),
        ("tiny-zaya", "--attention per-head --context-buckets 32".into()),
    ] {
        let other = folder().join("b");
        build(fixture(checkpoint), &other, &format!("--tokens 1,16 {form}"));
        // After 32 positions, functions of a bucket see too few slots.
        let tokens =
            |bundle: &Place| generated(bundle, "--prompt-ids 5,42,79,116,33 -n 40 --ignore-eos --exact");
        let expected = tokens(&built(checkpoint, "--tokens 1,16"));
        assert_eq!((tokens(&other), expected.len()), (expected, 40), "{form}");
    }
}

#[test]
fn functions_for_short_contexts_are_planned_predicted_and_checked() {
    for (checkpoint, form, function) in [
        ("tiny-gemma4-moe", "--token-range 1..4", "t1to4_c64"),
        ("tiny-zaya", "--tokens 1,4 --cache host --history host --functions apart", "t1_c64"),
        ("tiny-zaya", "--tokens 1,4", "t1_c64"),
    ] {
        let options = format!("--context-buckets 64,128 --max-context 128 {form}");
        let plan = json(0, format!("plan {} {options}", fixture(checkpoint)));
        let attention = list(&plan["shards"]).iter().filter(|s| s["kind"] == "attention");
        let names: Vec<String> = attention.map(|s| s["functions"].to_string()).collect();
        assert!(names.iter().any(|n| n.contains(function)), "{names:?}");
        assert!(names.iter().all(|n| !n.contains("c128")), "the whole context: {names:?}");
        let notes = plan["notes"].to_string();
        assert!(notes.contains("context bucket 128 is the whole cache"), "{notes}");
        let b = built(checkpoint, &options);
        assert!(chain(&b)["shards"].to_string().contains("\"context\":64"), "{}", chain(&b));
        assert!(run(format!("check {b}")).0 < 2);
        let speed = json(0, format!("predict-speed {b}"));
        let cache =
            |pass: &Value| -> f64 { list(&pass["kinds"]).iter().map(|k| number(&k["cache_bytes"])).sum() };
        let short = &speed["contexts"][0];
        assert_eq!(short["context"], 64);
        assert!(cache(short) < cache(&speed["one"]) && cache(short) > 0.0, "{short}");
        assert_eq!(generated(&b, "--prompt-ids 5,42 --max-new 70 --ignore-eos").len(), 70);
    }
    let zaya = fixture("tiny-zaya");
    let speed = json(0, format!("predict-speed {zaya} --context 128 --context-buckets 64 --tokens 1"));
    assert_eq!(speed["contexts"][0]["context"], 64);
    let b = built("tiny-zaya", "--context-buckets 64,128 --max-context 128 --tokens 1,4");
    refused(format!("predict-speed {b} --context-buckets 64"), &["--context-buckets", "is built"]);
    let forms = json(0, format!("forms {b}"));
    assert!(forms["forms"].to_string().contains("--context-buckets\",\"32\""), "{forms}");
    refused(format!("forms {b} --max-context 64"), &["--max-context", "is built"]);
}

/// Checks that a plan counts its calls, and that packages of several layers are traced, checked and reported as others.
#[test]
fn layers_that_share_a_package_are_counted_and_gated() {
    for (checkpoint, options, calls, shards) in [
        ("tiny-zaya", "", 16.0, 16),
        ("tiny-zaya", "--layers-per-shard 1", 8.0, 8),
        ("tiny-zaya", "--layers-per-shard 3", 3.0, 3),
        // A token chooses two of eight experts, in packs of two: two packs, one of which may be the last.
        ("tiny-gemma4-moe", "--ffn-shards 4", 6.0 * 4.0, 6 * 5),
        ("tiny-gemma4-moe", "--ffn-shards 4 --layers-per-shard 2", 19.0, 25),
    ] {
        let v = json(0, format!("plan {} {options}", fixture(checkpoint)));
        let found = (number(&v["calls_per_token"]["layers_at_most"]), count(&v["totals"]["layer_shards"]));
        assert_eq!(found, (calls, shards), "{checkpoint} {options}");
    }
    for (checkpoint, behind) in [("tiny-zaya", vec![0, 3, 6, 8]), ("tiny-gemma4-moe", vec![0, 6])] {
        let b = built(checkpoint, "--quant fp16 --layers-per-shard 3 --tokens 1,4");
        let trace = json(0, format!("trace {b} --golden {}/golden.npz", fixture(checkpoint)));
        let layers = list(&trace["layers"]);
        assert_eq!(layers.iter().map(|l| count(&l["boundary"])).collect::<Vec<_>>(), behind, "{checkpoint}");
        let least = layers.iter().filter_map(|l| l["fidelity"]["min_cosine"].as_f64());
        assert!(least.min_by(f64::total_cmp).unwrap() > 0.999, "{trace}");
        assert!(run(format!("check {b}")).0 < 2);
        passes(format!("predict-speed {b}"));
        passes(format!("report {b} --text"));
    }
    // One part of one layer is put back to FP16, also if its package has other layers.
    let (model, b) = (fixture("tiny-zaya"), built("tiny-zaya", "--layers-per-shard 4 --tokens 1,4"));
    let swap = format!("trace {b} --golden {model}/golden.npz --checkpoint {model} --swap layer");
    let v = json(0, swap);
    let layers = list(&v["swap"]["swaps"]).iter().filter_map(|s| s["layer"].as_u64());
    assert_eq!(layers.collect::<std::collections::BTreeSet<_>>(), (0..8).collect());
}
