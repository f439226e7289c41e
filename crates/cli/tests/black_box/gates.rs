//! Gated builds: an error stops early and is named, and an interrupted build goes on.
// Remarks of tests go to standard error.
#![allow(clippy::disallowed_macros)]

use crate::common::{anemoe, build, contents, finish, fixture, ids, json, refused, run};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn chain(bundle: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(bundle.join("chain.json")).unwrap()).unwrap()
}

fn packages(bundle: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(bundle.join("shards")).unwrap();
    let mut names: Vec<String> =
        entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Lists the member `key` of an array of objects.
fn names(values: &Value, key: &str) -> Vec<String> {
    values.as_array().unwrap().iter().map(|v| v[key].as_str().unwrap().to_string()).collect()
}

const SORTS: [&str; 4] = ["L00.attn", "L00.ffn.p0of1", "L05.attn", "head.0of1"];

#[test]
fn a_trained_model_passes_every_gate() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b");
    let model = fixture("../models/small-gemma4");
    let options = ["--quant", "lut6", "--tokens", "1,16", "--max-context", "64"];
    let mut args = vec!["build", text(&model), "-o", text(&bundle)];
    args.extend(options);
    let v = json(0, &args);
    assert_eq!(v["pass"], true);
    assert_eq!(v["representative"]["shards"], serde_json::json!(SORTS));
    assert_eq!(v["representative"]["residency"]["pass"], true);
    let probes = &v["representative"]["probes"];
    assert_eq!((&probes["pass"], &probes["seed"]), (&Value::Bool(true), &serde_json::json!(1)));
    assert_eq!(names(&probes["shards"], "shard"), SORTS);
    for s in probes["shards"].as_array().unwrap() {
        // 8 random probes, and a prompt of 16 tokens.
        assert_eq!(s["counted"], 24, "{s}");
        assert_eq!(s["probes"].as_array().unwrap().len(), 9);
        assert!(s["min_cosine"].as_f64().unwrap() > 0.97, "{s}");
    }
    let gate = &v["full_stack"]["golden"];
    assert_eq!(gate["pass"], true);
    assert_eq!(gate["positions"].as_array().unwrap().len(), 16);
    assert_eq!(ids(&gate["expected_ids"]).len(), 8);
    assert_eq!(v["full_stack"]["residency"]["packages"].as_array().unwrap().len(), 13);
    let gates = serde_json::json!({"representative": "passed", "full_stack": "passed", "min_cosine": 0.97});
    assert_eq!(chain(&bundle)["gates"], gates);
    assert!(!bundle.join(".anemoe-build").exists());
    // The bundle takes at most the bytes that were announced, and more than half of them.
    let taken: u64 = contents(&bundle).iter().map(|(_, bytes)| bytes.len() as u64).sum();
    let needed = v["needs"]["bundle_bytes"].as_u64().unwrap();
    assert!(taken <= needed && needed < 2 * taken, "{taken} of {needed}");
    // Without gates, the bundle is the same but for its record of the gates.
    let other = dir.path().join("other");
    build(&model, &other, &options);
    assert_eq!(chain(&other)["gates"]["full_stack"], "skipped");
    let shards =
        |b: &Path| contents(b).into_iter().filter(|(p, _)| p.starts_with("shards")).collect::<Vec<_>>();
    assert!(shards(&bundle) == shards(&other));
}

#[test]
fn a_bad_kind_stops_before_the_other_shards() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b");
    let model = fixture("tiny-gemma4-moe");
    let args = ["build", text(&model), "-o", text(&bundle), "--quant", "lut1", "--tokens", "1"];
    let v = json(1, &args);
    assert_eq!((&v["pass"], &v["failed"]), (&Value::Bool(false), &"representative_probes".into()));
    assert_eq!(packages(&bundle), SORTS.map(|s| format!("{s}.mlpackage")));
    assert!(!bundle.join("chain.json").exists());
    assert!(v["full_stack"].as_object().unwrap().is_empty());
    // For people it is the same, with the reason.
    let (code, out, _) = run(&args);
    assert_eq!(code, 1);
    for says in
        ["gate FAILED: quality of the representative shards", "other 9 shards were not built", "--skip-gates"]
    {
        assert!(out.contains(says), "{says}: {out}");
    }
    // With --skip-gates the build goes on from there.
    let mut all = args.to_vec();
    all.push("--skip-gates");
    let v = json(0, &all);
    assert_eq!((&v["reused"], &v["shards"]), (&4.into(), &13.into()));
    assert_eq!(
        chain(&bundle)["gates"],
        serde_json::json!({"representative": "skipped", "full_stack": "skipped"})
    );
}

/// Checks that random weights leave the golden gate undecided, unless the user gives a reference.
#[test]
fn random_weights_are_undecided_without_a_reference() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("tiny-gemma4-moe");
    let golden = model.join("golden.npz");
    let at = |name: &str| dir.path().join(name);
    let built = |name: &str, quant: &str, more: &[&str], code: i32| {
        let bundle = at(name);
        let mut args = vec!["build", text(&model), "-o", text(&bundle), "--quant", quant, "--tokens", "1"];
        args.extend(more);
        (json(code, &args), chain(&bundle)["gates"]["full_stack"].clone())
    };
    let (v, said) = built("undecided", "lut4", &[], 0);
    assert!(v["full_stack"]["undecided"].as_f64().unwrap() < 0.5);
    assert_eq!((v["pass"].clone(), said), (true.into(), "undecided".into()));
    let (v, said) = built("given", "lut4", &["--golden", text(&golden)], 1);
    assert_eq!((v["failed"].clone(), said), ("golden".into(), "failed".into()));
    // A bundle that failed is complete.
    assert_eq!(v["shards"], 13);
    let (_, said) = built("fp16", "fp16", &["--golden", text(&golden)], 0);
    assert_eq!(said, "passed");
    let (_, said) = built("loose", "lut4", &["--golden", text(&golden), "--min-cosine", "0.2"], 1);
    // The cosine suffices, but the tokens differ.
    assert_eq!(said, "failed");
}

#[test]
fn parts_gate_their_own_representatives() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("tiny-zaya");
    let golden = model.join("golden.npz");
    let part = |bundle: &Path, which: &str, more: &[&str]| {
        let mut args = vec![
            "build",
            text(&model),
            "-o",
            text(bundle),
            "--quant",
            "fp16",
            "--tokens",
            "1",
            "--shard",
            which,
        ];
        args.extend(more);
        json(0, &args)
    };
    let said = |bundle: &Path| chain(bundle)["gates"].clone();
    let bundle = dir.path().join("gated");
    for which in ["1/2", "0/2"] {
        let v = part(&bundle, which, &[]);
        assert_eq!(v["representative"]["probes"]["pass"], true, "{v}");
        assert!(v["full_stack"].as_object().unwrap().is_empty());
    }
    let v = json(0, &["assemble", text(&bundle), "--golden", text(&golden), "--min-cosine", "0.99"]);
    assert_eq!(v["full_stack"]["golden"]["pass"], true);
    let gates = serde_json::json!({"representative": "passed", "full_stack": "passed", "min_cosine": 0.99});
    assert_eq!(said(&bundle), gates);
    // Without a golden, the checkpoint is run.
    let bundle = dir.path().join("own");
    part(&bundle, "0/2", &[]);
    part(&bundle, "1/2", &[]);
    let v = json(0, &["assemble", text(&bundle)]);
    assert_eq!(v["full_stack"]["golden"]["pass"], true);
    assert_eq!(said(&bundle)["full_stack"], "passed");
    // If the checkpoint is gone, the bundle is completed, and records that the gate was not run.
    let (bundle, gone) = (dir.path().join("gone"), dir.path().join("model"));
    copied(&model, &gone);
    for which in ["0/2", "1/2"] {
        json(
            0,
            &[
                "build",
                text(&gone),
                "-o",
                text(&bundle),
                "--quant",
                "fp16",
                "--tokens",
                "1",
                "--shard",
                which,
            ],
        );
    }
    std::fs::remove_dir_all(&gone).unwrap();
    let (code, _, err) = run(&["assemble", text(&bundle)]);
    assert!(code == 0 && err.contains("no gates of the whole"), "{err}");
    assert_eq!(said(&bundle)["representative"], "passed");
    assert_eq!(said(&bundle)["full_stack"], "not_run");
    // One part without gates: its shards had no gates, the whole has them.
    let bundle = dir.path().join("half");
    part(&bundle, "0/2", &[]);
    part(&bundle, "1/2", &["--skip-gates"]);
    json(0, &["assemble", text(&bundle)]);
    assert_eq!(said(&bundle)["representative"], "skipped");
    assert_eq!(said(&bundle)["full_stack"], "passed");
    // If no part has gates, the whole has none.
    let bundle = dir.path().join("none");
    part(&bundle, "0/2", &["--skip-gates"]);
    part(&bundle, "1/2", &["--skip-gates"]);
    json(0, &["assemble", text(&bundle)]);
    assert_eq!(said(&bundle)["full_stack"], "skipped");
    // The record of a part's gates is lost: their result is unknown.
    let bundle = dir.path().join("lost");
    part(&bundle, "0/2", &["--skip-gates"]);
    part(&bundle, "1/2", &[]);
    std::fs::remove_file(bundle.join(".anemoe-build/gates.0of2")).unwrap();
    json(0, &["assemble", text(&bundle), "--skip-gates"]);
    assert_eq!(said(&bundle)["representative"], "not_run");
}

/// Starts a build and waits until it has finished a shard.
fn begun(bundle: &Path, model: &Path) -> std::process::Child {
    let args = [
        "build",
        text(model),
        "-o",
        text(bundle),
        "--quant",
        "lut8",
        "--tokens",
        "1",
        "--jobs",
        "1",
        "--skip-gates",
    ];
    let child = anemoe(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    let record = bundle.join(".anemoe-build/L00.attn.json");
    while !record.exists() {
        assert!(started.elapsed() < Duration::from_secs(300), "no shard was finished");
        std::thread::sleep(Duration::from_millis(2));
    }
    child
}

/// Lists the temporary files, which are neither finished nor records.
fn half_written(bundle: &Path) -> Vec<PathBuf> {
    let partial = |p: &Path| p.to_string_lossy().contains(".anemoe-tmp-");
    contents(bundle).into_iter().map(|(p, _)| p).filter(|p| partial(p)).collect()
}

#[cfg(unix)]
#[test]
fn an_interrupted_build_says_so_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("../models/small-gemma4");
    let options = ["--quant", "lut8", "--tokens", "1"];
    let whole = dir.path().join("whole");
    build(&model, &whole, &options);
    for (signal, status) in [("-INT", 130), ("-TERM", 143)] {
        let bundle = dir.path().join(signal);
        let child = begun(&bundle, &model);
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        let (code, _, err) = finish(child.wait_with_output().unwrap());
        assert_eq!(code, status, "{err}");
        assert!(err.contains("interrupted"), "{err}");
        assert!(!bundle.join("chain.json").exists());
        assert_eq!(half_written(&bundle), Vec::<PathBuf>::new());
        build(&model, &bundle, &options);
        assert!(contents(&bundle) == contents(&whole));
    }
}

/// Checks that a full disk loses no finished shard: a limit on the size of files stands for the full disk.
#[cfg(unix)]
#[test]
fn a_full_disk_loses_nothing_that_is_finished() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("../models/small-gemma4");
    let options = ["--quant", "lut8", "--tokens", "1", "--embed-quant", "lut4"];
    let whole = dir.path().join("whole");
    build(&model, &whole, &options);
    let bundle = dir.path().join("b");
    let mut args = vec!["build", text(&model), "-o", text(&bundle), "--skip-gates", "--jobs", "1"];
    args.extend(options);
    let line = args.join(" ");
    // Attention fits into 1200 blocks of 512 bytes, a pack of experts does not.
    let script = format!("trap '' XFSZ; ulimit -f 1200; exec {} {line}", env!("CARGO_BIN_EXE_anemoe"));
    let (code, _, err) = finish(Command::new("sh").args(["-c", &script]).output().unwrap());
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("weight.bin") && err.contains("too large"), "{err}");
    assert_eq!(packages(&bundle), ["L00.attn.mlpackage"]);
    assert_eq!(half_written(&bundle), Vec::<PathBuf>::new());
    let (code, out, err) = run(&[&args[..], &["--json"]].concat());
    assert_eq!(code, 0, "{err}");
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap()["reused"], 1);
    assert!(contents(&bundle) == contents(&whole));
}

/// Checks that too little room is refused before anything is written, on a file system of 2 MB, if one can be mounted.
#[cfg(target_os = "linux")]
#[test]
fn too_little_room_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=2m", "tmpfs", text(&disk)]).output();
    if !mounted.is_ok_and(|o| o.status.success()) {
        eprintln!("not run: only root can mount a file system");
        return;
    }
    struct Mounted<'a>(&'a Path);
    impl Drop for Mounted<'_> {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg(self.0).status();
        }
    }
    let _mounted = Mounted(&disk);
    let model = fixture("../models/small-gemma4");
    let bundle = disk.join("b");
    refused(&["build", text(&model), "-o", text(&bundle)], &["bundle", "needs", "left"]);
    assert!(!bundle.exists());
    // Room for the bundle alone is not enough for its gates.
    let tiny = fixture("tiny-gemma4-moe");
    let other = dir.path().join("other");
    let args = ["build", text(&tiny), "-o", text(&other), "--quant", "lut4", "--tokens", "1", "--scratch"];
    json(0, &[&args[..], &[text(&disk)]].concat());
    assert_eq!(std::fs::read_dir(&disk).unwrap().count(), 0);
    std::fs::write(disk.join("full"), vec![1; (2 << 20) - 4096]).unwrap();
    std::fs::remove_dir_all(&other).unwrap();
    refused(&[&args[..], &[text(&disk)]].concat(), &["the temporary files of the gates need", "left"]);
    assert!(!other.exists());
}

/// Sets every `step`-th element of a tensor of a checkpoint to `value`.
fn plant(dir: &Path, tensor: &str, step: usize, value: f32) {
    let index = std::fs::read(dir.join("model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    let file = dir.join(index["weight_map"][tensor].as_str().unwrap());
    let mut bytes = std::fs::read(&file).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let info = &header[tensor];
    assert_eq!(info["dtype"], "BF16");
    let (from, to) = (info["data_offsets"][0].as_u64().unwrap(), info["data_offsets"][1].as_u64().unwrap());
    let value = ((value.to_bits() >> 16) as u16).to_le_bytes();
    for at in (8 + n + from as usize..8 + n + to as usize).step_by(2 * step) {
        bytes[at..at + 2].copy_from_slice(&value);
    }
    std::fs::write(file, bytes).unwrap();
}

fn copied(model: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(model).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

/// Checks an outlier in one bank of experts under one scale per tensor: `plan` warns of it, and `trace --swap` names layer,
/// part, tensor and cause.
#[test]
fn a_planted_outlier_is_named() {
    const TENSOR: &str = "layers.3.experts.down_proj";
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    copied(&fixture("tiny-gemma4-moe"), &model);
    let full = format!("model.language_model.{TENSOR}");
    // One outlier in each expert's matrix [64, 32].
    plant(&model, &full, 64 * 32, 60.0);
    let golden = dir.path().join("golden.npz");
    let prompt = "2,17,40,99,300,7,81,5";
    json(0, &["golden", text(&model), "--prompt-ids", prompt, "--decode", "4", "-o", text(&golden)]);

    let v = json(0, &["plan", text(&model), "--quant", "int8-tensor"]);
    let outliers = v["outliers"].as_array().unwrap();
    assert_eq!(outliers.len(), 8, "{outliers:?}");
    for o in outliers {
        assert_eq!((&o["layer"], &o["part"], &o["tensor"]), (&3.into(), &"experts".into(), &TENSOR.into()));
        assert!(o["predicted_loss"].as_f64().unwrap() > 0.3 && o["ratio"].as_f64().unwrap() > 100.0, "{o}");
    }
    let (code, out, _) = run(&["plan", text(&model), "--quant", "int8-tensor"]);
    assert_eq!(code, 0);
    assert!(
        out.contains("warning: L03.ffn.p0of1, experts,") && out.contains("use int8-channel or lut4"),
        "{out}"
    );
    assert!(out.contains("3 more matrices"), "{out}");
    for kind in ["int8-channel", "lut4"] {
        assert_eq!(
            json(0, &["plan", text(&model), "--quant", kind])["outliers"],
            serde_json::json!([]),
            "{kind}"
        );
    }
    assert_eq!(
        json(0, &["plan", text(&fixture("tiny-gemma4-moe")), "--quant", "int8-tensor"])["outliers"],
        serde_json::json!([])
    );

    let bundle = dir.path().join("b");
    build(&model, &bundle, &["--quant", "int8-tensor", "--tokens", "1"]);
    let traced = |unit: &str| {
        let args =
            ["trace", text(&bundle), "--golden", text(&golden), "--swap", unit, "--checkpoint", text(&model)];
        (json(0, &args)["swap"].clone(), run(&args).1)
    };
    let (swap, out) = traced("each");
    let first = &swap["swaps"][0];
    assert_eq!((&first["layer"], &first["part"]), (&3.into(), &"experts".into()), "{out}");
    let worst = &first["worst"];
    assert_eq!((&worst["tensor"], &worst["outlier"]), (&TENSOR.into(), &Value::Bool(true)));
    assert!(worst["ratio"].as_f64().unwrap() > 100.0);
    // At least half of the divergence comes from this part.
    let (gain, all) = (first["gain_kl"].as_f64().unwrap(), swap["baseline"]["mean_kl"].as_f64().unwrap());
    assert!(gain > 0.5 * all, "{out}");
    assert!(out.contains("costs most: layer 3, experts;") && out.contains("an outlier of 6.000e1"), "{out}");
    assert!(!out.contains("also:"), "{out}");
    // Every part of every layer, and the head; the router is fp16 and left out.
    assert_eq!(swap["swaps"].as_array().unwrap().len(), 6 * 3 + 1);
    let (swap, _) = traced("layer");
    assert_eq!((&swap["swaps"][0]["layer"], swap["swaps"].as_array().unwrap().len()), (&3.into(), 7));
    let (swap, _) = traced("part");
    assert_eq!((&swap["swaps"][0]["part"], swap["swaps"].as_array().unwrap().len()), (&"experts".into(), 4));
}

/// Checks that the layer with the outlier is among the worst, and that the errors of its weights end the build if no layer
/// is probed.
#[test]
fn a_matrix_far_from_its_like_stops_the_build() {
    const TENSOR: &str = "layers.3.experts.down_proj";
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    copied(&fixture("tiny-gemma4-moe"), &model);
    plant(&model, &format!("model.language_model.{TENSOR}"), 64 * 32, 60.0);
    let bundle = dir.path().join("b");
    let mut args =
        vec!["build", text(&model), "-o", text(&bundle), "--quant", "int8-tensor", "--tokens", "1"];
    args.extend(["--probe-layers", "0", "--jobs", "1"]);
    for _ in 0..2 {
        // A rerun ends there, too.
        let v = json(1, &args);
        assert_eq!(v["failed"], "shards");
        let fault = &v["weight_fault"];
        assert_eq!((&fault["tensor"], &fault["layer"]), (&TENSOR.into(), &3.into()), "{fault}");
        assert!(fault["error"].as_f64().unwrap() > 4.0 * fault["usual"].as_f64().unwrap(), "{fault}");
        assert!(!bundle.join("chain.json").exists() && packages(&bundle).len() < 13);
    }
    let (code, out, _) = run(&args);
    assert!(code == 1 && out.contains("weights: FAIL, L03.ffn.p0of1") && out.contains(TENSOR), "{out}");
    let v = json(0, &[&args[..], &["--skip-gates"]].concat());
    assert_eq!(v["shards"], 13);
    // If layers are probed, the matrix is the worst of all.
    let bundle = dir.path().join("probed");
    args[3] = text(&bundle);
    let (_, out, _) = run(&[&args[..8], &["--json"]].concat());
    let v: Value = serde_json::from_str(&out).unwrap();
    let worst = &v["layers"]["worst"][0];
    assert_eq!(
        (&worst["tensor"], &worst["layer"], &worst["whole"]),
        (&TENSOR.into(), &3.into(), &true.into())
    );
    assert!(worst["ratio"].as_f64().unwrap() > 100.0);
}

#[test]
fn some_layers_are_probed_before_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b");
    let model = fixture("../models/small-gemma4");
    let options = ["--quant", "lut6", "--tokens", "1", "--max-context", "64"];
    let mut args = vec!["build", text(&model), "-o", text(&bundle)];
    args.extend(options);
    args.extend(["--probe-layers", "3"]);
    let v = json(0, &args);
    let layers = &v["layers"];
    assert_eq!(layers["spread"], serde_json::json!([0, 2, 5]));
    assert_eq!(layers["worst"].as_array().unwrap().len(), 3);
    assert_eq!(layers["probes"]["pass"], true);
    // The representatives are not probed again; a worst layer is probed by the shard with the matrix.
    let probed = names(&layers["probes"]["shards"], "shard");
    assert_eq!(Value::from(probed.clone()), layers["shards"]);
    assert!(SORTS.iter().all(|s| !probed.contains(&s.to_string())), "{probed:?}");
    for name in ["L02.attn", "L02.ffn.p0of1", "L05.ffn.p0of1"] {
        assert!(probed.contains(&name.to_string()), "{probed:?}");
    }
    for worst in layers["worst"].as_array().unwrap() {
        let shard = worst["shard"].as_str().unwrap().to_string();
        assert!(probed.contains(&shard) || SORTS.contains(&shard.as_str()), "{worst}");
    }
    let (code, out, _) = run(&[&args[..], &["-h"]].concat());
    assert!(code == 0 && out.contains("--probe-layers"), "{out}");
    // No layers are asked for.
    let bundle = dir.path().join("none");
    args[3] = text(&bundle);
    *args.last_mut().unwrap() = "0";
    let v = json(0, &args);
    assert_eq!(v["layers"]["shards"], serde_json::json!([]));
    assert!(v["layers"]["probes"].is_null());
}

/// Checks that a bundle fails if one of two goldens fails, in either order.
#[test]
fn every_golden_has_to_pass() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("tiny-zaya");
    let bundle = dir.path().join("b");
    build(&model, &bundle, &["--quant", "fp16", "--tokens", "1"]);
    let (good, bad) = (model.join("golden.npz"), fixture("tiny-zaya-skip").join("golden.npz"));
    let more = dir.path().join("more.npz");
    json(0, &["golden", text(&model), "--prompt-ids", "5,6,7,8,9", "--decode", "4", "-o", text(&more)]);
    let all = |code: i32, goldens: &[&Path]| {
        let mut args = vec!["validate", text(&bundle)];
        goldens.iter().for_each(|g| args.extend(["--golden", text(g)]));
        (json(code, &args), run(&args).1)
    };
    let (v, _) = all(0, &[&good, &more]);
    assert_eq!((&v["pass"], v["goldens"].as_array().unwrap().len()), (&true.into(), 2));
    for goldens in [[&good, &bad], [&bad, &good]] {
        let (v, out) = all(1, &goldens.map(PathBuf::as_path));
        assert_eq!(v["pass"], false);
        for (found, path) in v["goldens"].as_array().unwrap().iter().zip(goldens) {
            assert_eq!((&found["golden"], &found["pass"]), (&text(path).into(), &(path == &good).into()));
        }
        assert!(out.contains(&format!("--golden {} shows", text(&bad))), "{out}");
    }
    // With one golden, the document has no list of goldens.
    let (v, _) = all(0, &[&good]);
    assert!(v["goldens"].is_null());
    let built = dir.path().join("built");
    let mut args = vec!["build", text(&model), "-o", text(&built), "--quant", "fp16", "--tokens", "1"];
    args.extend(["--golden", text(&good), "--golden", text(&bad)]);
    let v = json(1, &args);
    assert_eq!((&v["failed"], &v["full_stack"]["golden"]["pass"]), (&"golden".into(), &true.into()));
    assert_eq!(v["full_stack"]["also"][0]["pass"], false);
    assert_eq!(chain(&built)["gates"]["full_stack"], "failed");
}

/// Checks that one bit per weight fails by a repeated token, where the reference writes a program.
#[test]
fn a_repeated_token_fails_by_that_name() {
    let dir = tempfile::tempdir().unwrap();
    let (model, bundle) = (fixture("../models/small-gemma4"), dir.path().join("b"));
    let golden = model.join("golden.npz");
    build(&model, &bundle, &["--quant", "lut1", "--tokens", "1"]);
    let args = ["validate", text(&bundle), "--golden", text(&golden), "--min-cosine", "0.5"];
    let v = json(1, &args);
    let repeated = &v["repeated"];
    let (from, times) = (repeated["from_step"].as_u64().unwrap(), repeated["times"].as_u64().unwrap());
    assert!(times >= 8 && from + times == 48, "{repeated}");
    assert_eq!(v["fp16"]["repeated"]["token"], repeated["token"]);
    let (_, out, _) = run(&args);
    assert!(out.contains("FAIL: decoding falls into one repeated token"), "{out}");
}

/// Checks that a position is excused, with its margin, if compression changed a close choice of a router there.
#[test]
fn near_ties_of_routers_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("tiny-zaya");
    let golden = model.join("golden.npz");
    let (mut ties, mut excused) = (0, 0);
    for more in [&[][..], &["--experts-per-shard", "1"]] {
        let bundle = dir.path().join(format!("b{}", more.len()));
        build(&model, &bundle, &[&["--quant", "lut3", "--tokens", "1"], more].concat());
        let mut args =
            vec!["validate", text(&bundle), "--golden", text(&golden), "--checkpoint", text(&model)];
        args.extend(["--probes", "16", "--shards", "all", "--min-cosine", "0.9", "--json"]);
        let (_, out, err) = run(&args);
        let v: Value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e} {err}"));
        for s in v["probes"]["shards"].as_array().unwrap() {
            let choices = s["choices"].as_array().unwrap();
            assert!(choices.is_empty() || s["kind"] == "moe", "{s}");
            let near: Vec<&Value> = choices.iter().filter(|c| c["near_tie"] == true).collect();
            assert_eq!(s["excused"], near.len(), "{s}");
            assert!(near.iter().all(|c| (0.0..0.5).contains(&c["margin"].as_f64().unwrap())), "{s}");
            let positions: usize = s["probes"]
                .as_array()
                .unwrap()
                .iter()
                .map(|p| p["positions"].as_array().unwrap().len())
                .sum();
            let rest =
                s["no_active_expert"].as_u64().unwrap() + s["not_zero"].as_array().unwrap().len() as u64;
            assert_eq!(s["counted"].as_u64().unwrap() + rest + near.len() as u64, positions as u64, "{s}");
            ties += choices.len();
            excused += near.len();
        }
    }
    assert!(ties > 0 && excused > 0, "{ties} {excused}");
}

#[test]
fn shards_are_probed_against_fp16() {
    let dir = tempfile::tempdir().unwrap();
    for (model, options) in [
        ("tiny-gemma4-moe", ["--experts-per-shard", "4"]),
        ("tiny-zaya", ["--experts-per-shard", "1"]),
        ("tiny-zaya", ["--experts-per-shard", "4"]),
    ] {
        let bundle = dir.path().join("b");
        let model = fixture(model);
        let golden = model.join("golden.npz");
        let mut all = vec!["--quant", "fp16", "--tokens", "1,4"];
        all.extend(options);
        build(&model, &bundle, &all);
        let args = [
            "validate",
            text(&bundle),
            "--golden",
            text(&golden),
            "--checkpoint",
            text(&model),
            "--probes",
            "3",
            "--shards",
        ];
        let v = json(0, &[&args[..], &["all"]].concat());
        let shards = v["probes"]["shards"].as_array().unwrap();
        assert_eq!(shards.len(), chain(&bundle)["shards"].as_array().unwrap().len());
        for s in shards {
            // A shard in FP16 is its own reference.
            assert!(s["min_cosine"].as_f64().unwrap() > 0.999_999, "{s}");
            assert_eq!(s["counted"], 3 + 24, "{s}");
        }
        std::fs::remove_dir_all(&bundle).unwrap();
    }
}

/// Checks that tokens that choose none of a pack's experts are listed, and not counted.
#[test]
fn packs_without_an_active_expert_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b");
    let model = fixture("tiny-gemma4-moe");
    let golden = model.join("golden.npz");
    build(&model, &bundle, &["--quant", "lut4", "--tokens", "1", "--ffn-shards", "4"]);
    let args = [
        "validate",
        text(&bundle),
        "--golden",
        text(&golden),
        "--checkpoint",
        text(&model),
        "--probes",
        "8",
        "--shards",
        "L00.ffn.p0of4,L00.ffn.p3of4",
    ];
    let v = json(1, &args);
    let [pack, last] = [0, 1].map(|i| &v["probes"]["shards"][i]);
    let (counted, none) = (pack["counted"].as_u64().unwrap(), pack["no_active_expert"].as_u64().unwrap());
    // A token chooses two of eight experts, and a pack has two of them.
    assert!(counted > 5 && none > 5 && counted + none == 8 + 24, "{counted} {none}");
    let listed = pack["probes"].as_array().unwrap().iter().flat_map(|p| p["positions"].as_array().unwrap());
    assert_eq!(listed.filter(|c| c.is_null()).count() as u64, none);
    // The last pack also joins the branches, so that its output is never empty.
    assert_eq!((&last["no_active_expert"], &last["kind"]), (&0.into(), &"experts_combine".into()));
    assert!(pack["median_cosine"].as_f64().unwrap() > 0.97);
    let warnings = v["probes"]["warnings"].as_array().unwrap();
    assert!(
        warnings.iter().any(|w| w.as_str().unwrap().contains("token that starts a text")),
        "{warnings:?}"
    );
    // The same seed gives the same figures, another seed gives others.
    let again = json(1, &args);
    assert_eq!(again["probes"], v["probes"]);
    let other = json(1, &[&args[..], &["--seed", "2"]].concat());
    assert_ne!(other["probes"]["shards"], v["probes"]["shards"]);
    for (wrong, says) in [
        (vec!["--probes", "8"], "--checkpoint"),
        (vec!["--probes", "8", "--checkpoint", text(&model), "--shards", "L09"], "L09"),
        (vec!["--probes", "8", "--checkpoint", text(&fixture("tiny-zaya"))], "is not what"),
    ] {
        refused(&[&["validate", text(&bundle), "--golden", text(&golden)][..], &wrong].concat(), &[says]);
    }
}

/// Checks a finished bundle whose bytes changed: every gate names the file, and the same build repairs it.
#[test]
fn changed_bytes_are_named_and_mended() {
    let dir = tempfile::tempdir().unwrap();
    let (bundle, model) = (dir.path().join("b"), fixture("tiny-gemma4-moe"));
    let golden = model.join("golden.npz");
    let options = ["--quant", "fp16", "--tokens", "1"];
    build(&model, &bundle, &options);
    let whole = contents(&bundle);
    let judges = [
        vec!["check", text(&bundle)],
        vec!["validate", text(&bundle), "--golden", text(&golden)],
        vec!["trace", text(&bundle), "--golden", text(&golden)],
    ];
    let weights = bundle.join("shards/L02.attn.mlpackage/Data/com.apple.CoreML/weights/weight.bin");
    let flip = |file: &Path| {
        let mut bytes = std::fs::read(file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(file, bytes).unwrap();
    };
    let mut args = vec!["build", text(&model), "-o", text(&bundle), "--skip-gates"];
    args.extend(options);
    let mended = |reused: u64| {
        let v = json(0, &args);
        assert_eq!((&v["shards"], &v["reused"]), (&13.into(), &reused.into()));
        assert!(contents(&bundle) == whole);
    };
    flip(&weights);
    for judge in &judges {
        refused(judge, &["L02.attn.mlpackage", "SHA-256", "chain.json"]);
    }
    mended(12);
    flip(&bundle.join("embed.bin"));
    refused(&judges[0], &["embed.bin", "SHA-256"]);
    std::fs::remove_dir_all(bundle.join("shards/L03.attn.mlpackage")).unwrap();
    std::fs::write(bundle.join("generation_config.json"), b"{").unwrap();
    mended(12);
    std::fs::remove_dir_all(bundle.join("shards/L03.attn.mlpackage")).unwrap();
    for judge in &judges {
        refused(judge, &["L03.attn.mlpackage"]);
    }
    mended(12);
    // Nothing is wrong, and nothing is built.
    mended(13);
    // Another plan, and another checkpoint of the same shapes.
    let mut other = args.clone();
    other.extend(["--max-context", "64"]);
    refused(&other, &["finished bundle", "other options"]);
    let changed = dir.path().join("model");
    copied(&model, &changed);
    plant(&changed, "model.language_model.layers.3.experts.down_proj", 1000, 0.5);
    args[1] = text(&changed);
    refused(&args, &["finished bundle", "another checkpoint"]);
    // The same contents elsewhere are the same checkpoint.
    let moved = dir.path().join("tiny-gemma4-moe");
    copied(&model, &moved);
    args[1] = text(&moved);
    json(0, &args);
    // A contract that is cut off, and one of another model.
    std::fs::write(bundle.join("chain.json"), &std::fs::read(bundle.join("chain.json")).unwrap()[..1000])
        .unwrap();
    for judge in &judges {
        refused(judge, &["chain.json"]);
    }
    let zaya = dir.path().join("zaya");
    build(&fixture("tiny-zaya"), &zaya, &["--quant", "fp16", "--tokens", "1"]);
    std::fs::copy(zaya.join("chain.json"), bundle.join("chain.json")).unwrap();
    refused(&judges[0], &["L00.attn.mlpackage", "size: "]);
}
