//! Gated builds: an error stops early and is named, and an interrupted build goes on.
// Remarks of tests go to standard error.
#![allow(clippy::disallowed_macros)]

use crate::common::*;
use serde_json::{Value, json as value};
use std::path::{Path, PathBuf};

fn packages(bundle: &Place) -> Vec<String> {
    let entries = std::fs::read_dir(bundle.join("shards")).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

const SORTS: [&str; 4] = ["L00.attn", "L00.ffn.p0of1", "L05.attn", "head.0of1"];

#[test]
fn a_trained_model_passes_every_gate() {
    let (bundle, options) = (folder().join("b"), "--quant lut6 --tokens 1,16 --max-context 64");
    let build = format!("build {} -o {bundle} {options} --probe-layers 3", small());
    let v = json(0, &build);
    let first = &v["representative"];
    assert_eq!(value!([v["pass"], first["shards"], first["residency"]["pass"]]), value!([true, SORTS, true]));
    has(&first["probes"], value!({"pass": true, "seed": 1}));
    for (s, name) in list(&first["probes"]["shards"]).iter().zip(SORTS) {
        // 8 random probes, and a prompt of 16 tokens.
        has(s, value!({"shard": name, "counted": 24}));
        assert!(list(&s["probes"]).len() == 9 && number(&s["min_cosine"]) > 0.97, "{s}");
    }
    // Some layers are probed before the others, but no representative again; a worst layer by the shard with the matrix.
    let layers = &v["layers"];
    has(layers, value!({"spread": [0, 2, 5], "probes": {"pass": true}}));
    let probed: Vec<&str> = each(&layers["probes"]["shards"], "shard").collect();
    assert_eq!(value!(probed), layers["shards"]);
    assert!(SORTS.iter().all(|s| !probed.contains(s)), "{probed:?}");
    assert!(["L02.attn", "L02.ffn.p0of1", "L05.ffn.p0of1"].iter().all(|s| probed.contains(s)), "{probed:?}");
    let worst: Vec<&str> = each(&layers["worst"], "shard").collect();
    assert!(worst.len() == 3 && worst.iter().all(|s| probed.contains(s) || SORTS.contains(s)), "{worst:?}");
    let gate = &v["full_stack"]["golden"];
    assert_eq!((list(&gate["positions"]).len(), list(&gate["expected_ids"]).len()), (16, 8));
    assert_eq!(list(&v["full_stack"]["residency"]["packages"]).len(), 13);
    let gates = value!({"representative": "passed", "full_stack": "passed", "min_cosine": 0.97});
    assert_eq!(chain(&bundle)["gates"], gates);
    assert!(!bundle.join(".anemoe-build").exists());
    // The bundle takes at most the bytes that were announced, and more than half of them.
    let taken: u64 = contents(&bundle).iter().map(|(_, bytes)| bytes.len() as u64).sum();
    let needed = count(&v["needs"]["bundle_bytes"]);
    assert!(taken <= needed && needed < 2 * taken, "{taken} of {needed}");
    // Without gates, the bundle is the same but for its record of the gates.
    let other = built("small", options);
    assert_eq!(chain(&other)["gates"]["full_stack"], "skipped");
    assert!(contents(&bundle.join("shards")) == contents(&other.join("shards")));
    // No layers are asked for.
    std::fs::remove_dir_all(&bundle).unwrap();
    let layers = &json(0, build.replace("--probe-layers 3", "--probe-layers 0"))["layers"];
    has(layers, value!({"shards": [], "probes": null}));
}

#[test]
fn a_bad_kind_stops_before_the_other_shards() {
    let (bundle, model) = (folder().join("b"), fixture("tiny-gemma4-moe"));
    let build = format!("build {model} -o {bundle} --quant lut1 --tokens 1");
    let v = json(1, &build);
    has(&v, value!({"pass": false, "failed": "representative_probes"}));
    assert_eq!(v["full_stack"], value!({}));
    assert_eq!(packages(&bundle), SORTS.map(|s| format!("{s}.mlpackage")));
    assert!(!bundle.join("chain.json").exists());
    // For people it is the same, with the reason.
    let failed = "gate FAILED: quality of the representative shards";
    ends(1, &build, &[failed, "other 9 shards were not built", "--skip-gates"]);
    let says = ["quality of the representative shards", "anemoe journal", "--skip-gates"];
    refused(format!("generate {bundle} --prompt-ids 1"), &says);
    // Other options than those of the unfinished build are named, too.
    refused(build.replace("lut1", "lut4"), &["unfinished", "--quant lut1, now lut4"]);
    // With --skip-gates the build goes on from there.
    let v = json(0, format!("{build} --skip-gates"));
    assert_eq!((&v["reused"], &v["shards"]), (&4.into(), &13.into()));
    assert_eq!(chain(&bundle)["gates"], value!({"representative": "skipped", "full_stack": "skipped"}));
    // One bit a weight fails by a repeated token, where the reference writes a program.
    let (bundle, golden) = (built("small", "--quant lut1 --tokens 1"), small().join("golden.npz"));
    let validate = format!("validate {bundle} --golden {golden} --min-cosine 0.5");
    let v = json(1, &validate);
    let (repeated, from) = (&v["repeated"], count(&v["repeated"]["from_step"]));
    assert!(count(&repeated["times"]) >= 8 && from + count(&repeated["times"]) == 48, "{repeated}");
    assert_eq!(v["fp16"]["repeated"]["token"], repeated["token"]);
    ends(1, validate, &["FAIL: decoding falls into one repeated token"]);
}

#[test]
fn random_weights_are_undecided_without_a_reference() {
    let (model, dir) = (fixture("tiny-gemma4-moe"), folder());
    let golden = model.join("golden.npz");
    let made = |name: &str, options: &str, code: i32| {
        let bundle = dir.join(name);
        let v = json(code, format!("build {model} -o {bundle} --tokens 1 {options}"));
        let said = text(&chain(&bundle)["gates"]["full_stack"]).to_string();
        (v, said)
    };
    let (v, said) = made("undecided", "--quant lut4", 0);
    assert!(number(&v["full_stack"]["undecided"]) < 0.5);
    assert_eq!((&v["pass"], said.as_str()), (&true.into(), "undecided"));
    // A bundle that failed is complete, and names the next command.
    let (v, said) = made("given", &format!("--quant lut4 --golden {golden}"), 1);
    assert_eq!((value!([v["failed"], v["shards"]]), said.as_str()), (value!(["golden", 13]), "failed"));
    ends(1, format!("validate {dir}/given --golden {golden} --min-cosine 1"), &["next: anemoe trace "]);
    // The cosine suffices, but the tokens differ.
    assert_eq!(made("loose", &format!("--quant lut4 --golden {golden} --min-cosine 0.2"), 1).1, "failed");
    assert_eq!(made("fp16", &format!("--quant fp16 --golden {golden}"), 0).1, "passed");
}

/// Checks that a bundle fails if one of two goldens fails, in either order.
#[test]
fn every_golden_has_to_pass() {
    let (model, bundle) = (fixture("tiny-zaya"), built("tiny-zaya", "--quant fp16 --tokens 1"));
    let (good, bad) = (model.join("golden.npz"), fixture("tiny-zaya-skip").join("golden.npz"));
    let (more, other) = (folder().join("more.npz"), folder().join("b"));
    let v =
        json(1, format!("build {model} -o {other} --quant fp16 --tokens 1 --golden {good} --golden {bad}"));
    has(&v, value!({"failed": "golden", "full_stack": {"golden": {"pass": true}}}));
    assert_eq!(v["full_stack"]["also"][0]["pass"], false);
    has(&chain(&other), value!({"gates": {"full_stack": "failed"}}));
    json(0, format!("golden {model} --prompt-ids 5,6,7,8,9 --decode 4 -o {more}"));
    let v = json(0, format!("validate {bundle} --golden {good} --golden {more}"));
    assert_eq!((&v["pass"], list(&v["goldens"]).len()), (&true.into(), 2));
    for goldens in [[&good, &bad], [&bad, &good]] {
        let validate = format!("validate {bundle} --golden {} --golden {}", goldens[0], goldens[1]);
        let v = json(1, &validate);
        assert_eq!(v["pass"], false);
        for (found, path) in list(&v["goldens"]).iter().zip(goldens) {
            has(found, value!({"golden": path.to_string(), "pass": path.as_ref() == &*good}));
        }
        ends(1, validate, &[&format!("--golden {bad} shows")]);
    }
    // With one golden, the document has no list of goldens.
    assert!(json(0, format!("validate {bundle} --golden {good}"))["goldens"].is_null());
}

#[test]
fn parts_gate_their_own_representatives() {
    let (model, dir) = (fixture("tiny-zaya"), folder());
    let part = |model: &Place, bundle: &Place, which: &str, more: &str| {
        json(0, format!("build {model} -o {bundle} --quant fp16 --tokens 1 --shard {which} {more}"))
    };
    let parts = |name: &str, options: [&str; 2]| {
        let bundle = dir.join(name);
        for (which, options) in ["0/2", "1/2"].into_iter().zip(options) {
            part(&model, &bundle, which, options);
        }
        bundle
    };
    let said = |bundle: &Place| {
        let gates = &chain(bundle)["gates"];
        [&gates["representative"], &gates["full_stack"]].map(|gate| text(gate).to_string())
    };
    let bundle = dir.join("gated");
    for which in ["1/2", "0/2"] {
        let v = part(&model, &bundle, which, "");
        has(&v, value!({"representative": {"probes": {"pass": true}}}));
        assert_eq!(v["full_stack"], value!({}));
    }
    let v = json(0, format!("assemble {bundle} --golden {model}/golden.npz --min-cosine 0.99"));
    assert_eq!(v["full_stack"]["golden"]["pass"], true);
    let gates = value!({"representative": "passed", "full_stack": "passed", "min_cosine": 0.99});
    assert_eq!(chain(&bundle)["gates"], gates);
    // Without a golden, the checkpoint is run. If one part has no gates, its shards had none, but the whole has them.
    let bundle = parts("half", ["", "--skip-gates"]);
    assert_eq!(json(0, format!("assemble {bundle}"))["full_stack"]["golden"]["pass"], true);
    assert_eq!(said(&bundle), ["skipped", "passed"]);
    // If the checkpoint is gone, the bundle is completed, and records that the gate was not run.
    let (bundle, gone) = (dir.join("gone"), copied("tiny-zaya"));
    for which in ["0/2", "1/2"] {
        part(&gone, &bundle, which, "");
    }
    std::fs::remove_dir_all(&gone).unwrap();
    ends(0, format!("assemble {bundle}"), &["no gates of the whole"]);
    assert_eq!(said(&bundle), ["passed", "not_run"]);
    // The record of a part's gates is lost: their result is unknown.
    let bundle = parts("lost", ["--skip-gates", ""]);
    std::fs::remove_file(bundle.join(".anemoe-build/gates.0of2")).unwrap();
    passes(format!("assemble {bundle} --skip-gates"));
    assert_eq!(said(&bundle)[0], "not_run");
}

/// Lists the temporary files, which are neither finished nor records.
fn half_written(bundle: &Place) -> Vec<PathBuf> {
    let partial = |p: &Path| p.to_string_lossy().contains(".anemoe-tmp-");
    contents(bundle).into_iter().map(|(p, _)| p).filter(|p| partial(p)).collect()
}

#[cfg(unix)]
#[test]
fn an_interrupted_build_says_so_and_goes_on() {
    let whole = built("small", "--quant lut8 --tokens 1");
    for (name, status) in [("INT", 130), ("TERM", 143)] {
        let bundle = folder().join("b.anemoe");
        let args = format!("build {} -o {bundle} --quant lut8 --tokens 1 --jobs 1 --skip-gates", small());
        let child = start(&mut anemoe(&args));
        wait_for("finished shard", || bundle.join(".anemoe-build/L00.attn.json").exists());
        signal(&child, name);
        let (code, _, err) = ended(child.wait_with_output().unwrap());
        assert!(code == status && err.contains("interrupted"), "{code} {err}");
        assert!(!bundle.join("chain.json").exists() && half_written(&bundle).is_empty());
        passes(args);
        assert!(contents(&bundle) == contents(&whole));
    }
}

/// Checks that a full disk loses no finished shard: a limit on the size of files stands for the full disk.
#[cfg(unix)]
#[test]
fn a_full_disk_loses_nothing_that_is_finished() {
    let options = "--quant lut8 --tokens 1 --embed-quant lut4";
    let (whole, bundle) = (built("small", options), folder().join("b.anemoe"));
    let build = format!("build {} -o {bundle} --skip-gates --jobs 1 {options}", small());
    // Attention fits into 1200 blocks of 512 bytes, a pack of experts does not.
    let (code, _, err) = finish(&mut in_shell("trap '' XFSZ; ulimit -f 1200; exec \"$0\" \"$@\"", &build));
    assert!(code == 2 && err.contains("weight.bin") && err.contains("too large"), "{code} {err}");
    assert_eq!(packages(&bundle), ["L00.attn.mlpackage"]);
    assert_eq!(half_written(&bundle), Vec::<PathBuf>::new());
    assert_eq!(json(0, &build)["reused"], 1);
    assert!(contents(&bundle) == contents(&whole));
    // Where nothing is finished, nothing stays; the system's signal is no end.
    let other = folder().join("b.anemoe");
    let build = format!("build {} -o {other} --skip-gates", fixture("tiny-gemma4-moe"));
    let (code, _, err) = finish(&mut in_shell("ulimit -f 8; exec \"$0\" \"$@\"", build));
    assert!(code == 2 && err.contains("File too large") && !other.exists(), "{code} {err}");
}

/// Checks that too little room is refused before anything is written, on a file system of 2 MB, if one can be mounted.
#[cfg(target_os = "linux")]
#[test]
fn too_little_room_is_refused_before_anything_is_written() {
    use std::process::Command;
    struct Mounted(Place);
    impl Drop for Mounted {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg(&*self.0).status();
        }
    }
    let (disk, dir) = (folder(), folder());
    let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=2m", "tmpfs"]).arg(&*disk).output();
    if !mount.is_ok_and(|o| o.status.success()) {
        eprintln!("not run: only root can mount a file system");
        return;
    }
    let _mounted = Mounted(disk.clone());
    refused(format!("build {} -o {disk}/b", small()), &["bundle", "needs", "left"]);
    assert_eq!(std::fs::read_dir(&disk).unwrap().count(), 0);
    // Room for the bundle alone is not enough for its gates.
    let other = dir.join("other");
    let build = format!("build {} -o {other} --tokens 1 --scratch {disk}", fixture("tiny-gemma4-moe"));
    passes(&build);
    assert_eq!(std::fs::read_dir(&disk).unwrap().count(), 0);
    std::fs::write(disk.join("full"), vec![1; (2 << 20) - 4096]).unwrap();
    std::fs::remove_dir_all(&other).unwrap();
    refused(&build, &["the temporary files of the gates need", "left"]);
    assert!(!other.exists());
}

/// Experts' tensor into which tests plant an outlier for each expert's matrix [64, 32].
const TENSOR: &str = "layers.3.experts.down_proj";

/// Copies the tiny model with outliers.
fn with_outliers() -> Place {
    let model = copied("tiny-gemma4-moe");
    plant(&model, &format!("model.language_model.{TENSOR}"), 64 * 32, 60.0);
    model
}

/// Checks an outlier in one bank of experts under one scale per tensor: `plan` warns of it, and `trace --swap` names layer,
/// part, tensor and cause.
#[test]
fn a_planted_outlier_is_named() {
    let (model, dir) = (with_outliers(), folder());
    let golden = dir.join("golden.npz");
    json(0, format!("golden {model} --prompt-ids 2,17,40,99,300,7,81,5 --decode 4 -o {golden}"));
    let plan = format!("plan {model} --quant int8-tensor");
    let outliers = json(0, &plan)["outliers"].clone();
    assert_eq!(list(&outliers).len(), 8, "{outliers}");
    for o in list(&outliers) {
        has(o, value!({"layer": 3, "part": "experts", "tensor": TENSOR}));
        assert!(number(&o["predicted_loss"]) > 0.3 && number(&o["ratio"]) > 100.0, "{o}");
    }
    ends(0, &plan, &["warning: L03.ffn.p0of1, experts,", "use int8-channel or lut4", "3 more matrices"]);
    for kind in ["int8-channel", "lut4"] {
        assert_eq!(json(0, plan.replace("int8-tensor", kind))["outliers"], value!([]), "{kind}");
    }
    let plain = fixture("tiny-gemma4-moe");
    assert_eq!(json(0, format!("plan {plain} --quant int8-tensor"))["outliers"], value!([]));

    let bundle = dir.join("b");
    build(&model, &bundle, "--quant int8-tensor --tokens 1");
    let trace = |unit: &str| format!("trace {bundle} --golden {golden} --swap {unit} --checkpoint {model}");
    let (swap, out) = (json(0, trace("each"))["swap"].clone(), passes(trace("each")));
    let (first, worst) = (&swap["swaps"][0], &swap["swaps"][0]["worst"]);
    has(first, value!({"layer": 3, "part": "experts", "worst": {"tensor": TENSOR, "outlier": true}}));
    // At least half of the divergence comes from this part.
    let (gain, all) = (number(&first["gain_kl"]), number(&swap["baseline"]["mean_kl"]));
    assert!(number(&worst["ratio"]) > 100.0 && gain > 0.5 * all, "{out}");
    assert!(out.contains("costs most: layer 3, experts;") && out.contains("an outlier of 6.000e1"), "{out}");
    assert!(!out.contains("also:"), "{out}");
    // Every part of every layer, and the head; the router is fp16 and left out.
    assert_eq!(list(&swap["swaps"]).len(), 6 * 3 + 1);
    let swaps = json(0, trace("part"))["swap"]["swaps"].clone();
    assert_eq!((&swaps[0]["part"], list(&swaps).len()), (&"experts".into(), 4));
}

/// Checks that the layer with the outlier is among the worst, and that the errors of its weights end the build if no layer
/// is probed.
#[test]
fn a_matrix_far_from_its_like_stops_the_build() {
    let (model, dir) = (with_outliers(), folder());
    let bundle = dir.join("b");
    let build = |bundle: &Place, more: &str| {
        format!("build {model} -o {bundle} --quant int8-tensor --tokens 1 {more}")
    };
    let stops = build(&bundle, "--probe-layers 0 --jobs 1");
    for _ in 0..2 {
        // A rerun ends there, too.
        let v = json(1, &stops);
        let fault = &v["weight_fault"];
        has(&v, value!({"failed": "shards", "weight_fault": {"tensor": TENSOR, "layer": 3}}));
        assert!(number(&fault["error"]) > 4.0 * number(&fault["usual"]), "{fault}");
        assert!(!bundle.join("chain.json").exists() && packages(&bundle).len() < 13);
    }
    ends(1, &stops, &["weights: FAIL, L03.ffn.p0of1", TENSOR]);
    assert_eq!(json(0, format!("{stops} --skip-gates"))["shards"], 13);
    // If layers are probed, the matrix is the worst of all.
    let (_, out, _) = run(build(&dir.join("probed"), "--json"));
    let worst = &serde_json::from_str::<Value>(&out).unwrap()["layers"]["worst"][0];
    has(worst, value!({"tensor": TENSOR, "layer": 3, "whole": true}));
    assert!(number(&worst["ratio"]) > 100.0);
}

#[test]
fn shards_are_probed_against_fp16() {
    for (model, options) in [
        ("tiny-gemma4-moe", "--experts-per-shard 4"),
        ("tiny-gemma4-moe", "--layers-per-shard 3"),
        ("tiny-zaya", "--experts-per-shard 1"),
        ("tiny-zaya", "--layers-per-shard 3"),
    ] {
        let bundle = built(model, &format!("--quant fp16 {options} --tokens 1,4"));
        let model = fixture(model);
        let gate = format!("validate {bundle} --golden {model}/golden.npz --checkpoint {model}");
        let v = json(0, format!("{gate} --probes 3 --shards all"));
        let shards = list(&v["probes"]["shards"]);
        assert_eq!(shards.len(), list(&chain(&bundle)["shards"]).len());
        for s in shards {
            // A shard in FP16 is its own reference.
            assert!(number(&s["min_cosine"]) > 0.999_999 && s["counted"] == 3 + 24, "{s}");
        }
    }
}

#[test]
fn packs_without_an_active_expert_are_listed() {
    let (model, bundle) = (fixture("tiny-gemma4-moe"), built("tiny-gemma4-moe", "--tokens 1 --ffn-shards 4"));
    let gate = format!("validate {bundle} --golden {model}/golden.npz --probes 8");
    let packs = format!("{gate} --checkpoint {model} --shards L00.ffn.p0of4,L00.ffn.p3of4");
    let v = json(1, &packs);
    let [pack, last] = [0, 1].map(|i| &v["probes"]["shards"][i]);
    let (counted, none) = (count(&pack["counted"]), count(&pack["no_active_expert"]));
    // A token chooses two of eight experts, and a pack has two of them.
    assert!(counted > 5 && none > 5 && counted + none == 8 + 24, "{counted} {none}");
    let listed = list(&pack["probes"]).iter().flat_map(|p| list(&p["positions"]));
    assert_eq!(listed.filter(|c| c.is_null()).count() as u64, none);
    // The last pack also joins the branches, so that its output is never empty.
    has(last, value!({"no_active_expert": 0, "kind": "experts_combine"}));
    assert!(number(&pack["median_cosine"]) > 0.97);
    let warnings = v["probes"]["warnings"].to_string();
    assert!(warnings.contains("token that starts a text"), "{warnings}");
    // The same seed gives the same figures, another seed gives others.
    assert_eq!(json(1, &packs)["probes"], v["probes"]);
    assert_ne!(json(1, format!("{packs} --seed 2"))["probes"]["shards"], v["probes"]["shards"]);
    for (wrong, says) in [
        (String::new(), "--checkpoint"),
        (format!("--checkpoint {model} --shards L09"), "L09"),
        (format!("--checkpoint {}", fixture("tiny-zaya")), "is not what"),
    ] {
        refused(format!("{gate} {wrong}"), &[says]);
    }
}

/// Checks a finished bundle whose bytes changed: every gate names the file, and the same build repairs it.
#[test]
fn changed_bytes_are_named_and_mended() {
    let (model, bundle) = (fixture("tiny-gemma4-moe"), built("tiny-gemma4-moe", "--quant fp16 --tokens 1"));
    let whole = contents(&bundle);
    let golden = format!("--golden {model}/golden.npz");
    let judges = |says: &[&str]| {
        for command in ["check", "validate", "trace", "generate", "bench"] {
            let more = match command {
                "check" => "",
                "generate" => "--prompt-ids 1,2 --max-new 1",
                "bench" => "--context 4 --decode 1 --prefill 4 --repetitions 1 --no-journal",
                _ => &golden,
            };
            refused(format!("{command} {bundle} {more}"), says);
            if says.contains(&"SHA-256") {
                let (code, _, err) = run(format!("{command} {bundle} {more} --no-verify"));
                assert!(code <= 1, "{command}: {err}");
            }
        }
    };
    let build = |model: &Place| format!("build {model} -o {bundle} --skip-gates --quant fp16 --tokens 1");
    let mended = |reused: u64| {
        let v = json(0, build(&model));
        has(&v, value!({"shards": 13, "reused": reused}));
        assert!(contents(&bundle) == whole);
    };
    // The hashes are verified once, and remembered where the system allows it.
    passes(format!("generate {bundle} --prompt-ids 1,2 --max-new 1"));
    flip(bundle.join("shards/L02.attn.mlpackage/Data/com.apple.CoreML/weights/weight.bin"));
    judges(&["L02.attn.mlpackage", "SHA-256", "chain.json"]);
    mended(12);
    flip(bundle.join("embed.bin"));
    refused(format!("check {bundle}"), &["embed.bin", "SHA-256"]);
    std::fs::remove_dir_all(bundle.join("shards/L03.attn.mlpackage")).unwrap();
    std::fs::write(bundle.join("generation_config.json"), b"{").unwrap();
    mended(12);
    std::fs::remove_dir_all(bundle.join("shards/L03.attn.mlpackage")).unwrap();
    judges(&["L03.attn.mlpackage"]);
    mended(12);
    // Nothing is wrong, and nothing is built.
    mended(13);
    // Another plan, and another checkpoint of the same shapes; its contents elsewhere are the same checkpoint.
    refused(format!("{} --max-context 64", build(&model)), &["finished bundle", "other options"]);
    let changed = copied("tiny-gemma4-moe");
    passes(build(&changed));
    plant(&changed, &format!("model.language_model.{TENSOR}"), 1000, 0.5);
    refused(build(&changed), &["finished bundle", "another checkpoint"]);
    // A contract that is cut off, and one of another model.
    let chain = std::fs::read(bundle.join("chain.json")).unwrap();
    std::fs::write(bundle.join("chain.json"), &chain[..1000]).unwrap();
    judges(&["chain.json"]);
    let zaya = built("tiny-zaya", "--quant fp16 --tokens 1");
    std::fs::copy(zaya.join("chain.json"), bundle.join("chain.json")).unwrap();
    refused(format!("check {bundle}"), &["L00.attn.mlpackage", "size: "]);
}
