//! Messages that name the kind of a path, differences, and the next command; prompts; help texts.

use crate::common::{anemoe, build, copy, finish, fixture, json, refused, run};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Returns the path of the small trained model of the repository, which has a tokenizer.
fn small() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/small-gemma4")
}

fn tiny_bundle(dir: &Path, name: &str, options: &[&str]) -> PathBuf {
    let out = dir.join(name);
    let mut all = vec!["--tokens", "1", "--max-context", "64"];
    all.extend(options);
    build(&fixture("tiny-gemma4-moe"), &out, &all);
    out
}

#[test]
fn a_path_that_is_no_bundle_is_named_with_the_next_command() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let bundle = tiny_bundle(dir.path(), "b", &[]);
    copy(&fixture("tiny-gemma4-moe"), &at("my models/tiny"));
    fs::write(at("m.gguf"), b"GGUF").unwrap();
    fs::write(at("notes.txt"), "x").unwrap();
    fs::create_dir(at("empty")).unwrap();
    fs::create_dir_all(at("begun/.anemoe-build")).unwrap();
    fs::write(at("begun/.anemoe-build/plan.json"), "{}").unwrap();
    let package = bundle.join("shards/L00.attn.mlpackage");
    let cases: [(PathBuf, &[&str]); 8] = [
        (
            at("my models/tiny"),
            &["a Hugging Face checkpoint", "anemoe build '", "/my models/tiny' -o tiny.anemoe"],
        ),
        (at("my models"), &["a folder of checkpoints", "my models/tiny"]),
        (at("m.gguf"), &["a GGUF file", "anemoe build", "-o m.anemoe"]),
        (at("notes.txt"), &["a file of another kind", "chain.json"]),
        (at("empty"), &["an empty folder", "anemoe build CHECKPOINT -o"]),
        (at("begun"), &["an unfinished bundle", "repeat its build command"]),
        (package, &["a .mlpackage", "anemoe predict"]),
        (at("none"), &["no such file or folder", "anemoe build CHECKPOINT -o"]),
    ];
    let golden = fixture("tiny-gemma4-moe/golden.npz");
    for (path, says) in &cases {
        let path = text(path);
        let golden = text(&golden);
        refused(&["generate", path, "--prompt-ids", "1"], says);
        refused(&["validate", path, "--golden", golden], says);
        refused(&["trace", path, "--golden", golden], says);
        refused(&["bench", path], says);
        if says[0] != "an unfinished bundle" {
            refused(&["journal", path], says);
            refused(&["assemble", path], says);
        }
        if says[0] != "a .mlpackage" {
            refused(&["check", path], says);
        }
        let v = json(2, &["generate", path, "--prompt-ids", "1"]);
        assert_eq!(v["error"]["path"], path);
        assert!(v["error"]["message"].as_str().unwrap().contains(says[0]), "{v}");
    }
    let synthetic = "synthetic:zaya1-8b?layers=1";
    refused(
        &["generate", synthetic, "--prompt-ids", "1"],
        &["anemoe build 'synthetic:zaya1-8b?layers=1' -o"],
    );
    let begun = at("begun");
    refused(&["inspect", text(&begun)], &["an unfinished bundle"]);
    refused(&["perplexity", text(&begun), "--text", text(&at("notes.txt"))], &["an unfinished bundle"]);
}

#[test]
fn a_build_that_a_gate_stopped_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("b");
    let model = fixture("tiny-gemma4-moe");
    let args = [
        "build",
        text(&model),
        "-o",
        text(&out),
        "--tokens",
        "1",
        "--quant",
        "lut1",
        "--min-cosine",
        "0.999",
    ];
    let (code, stdout, err) = run(&args);
    assert_eq!(code, 1, "{stdout}\n{err}");
    refused(
        &["generate", text(&out), "--prompt-ids", "1"],
        &["quality of the representative shards", "anemoe journal", "--skip-gates"],
    );
    // Other options than those of the unfinished build are named, too.
    refused(
        &["build", text(&model), "-o", text(&out), "--tokens", "1", "--quant", "lut4"],
        &["unfinished", "--quant lut1, now lut4"],
    );
}

#[test]
fn a_path_that_is_no_checkpoint_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = tiny_bundle(dir.path(), "b", &[]);
    let file = dir.path().join("notes.txt");
    fs::write(&file, "x").unwrap();
    refused(&["inspect", text(&file)], &["a file of another kind"]);
    refused(&["inspect", "no/such/path"], &["no such file or folder"]);
    refused(&["plan", text(&bundle)], &["a finished bundle"]);
    let fixtures = fixture("");
    refused(&["plan", text(&fixtures)], &["a folder of checkpoints", "tiny-gemma4-moe-text", "tiny-zaya"]);
    let weights = fixture("tiny-gemma4-moe-text/model.safetensors");
    refused(&["plan", text(&weights)], &["a .safetensors file", "config.json"]);
}

#[test]
fn a_finished_bundle_names_the_options_that_differ() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("tiny-gemma4-moe");
    let out = tiny_bundle(dir.path(), "b", &["--quant", "lut4", "--head-quant", "lut6"]);
    let out = text(&out);
    let args =
        ["build", text(&model), "-o", out, "--tokens", "1,4", "--max-context", "64", "--quant", "fp16"];
    let says = [
        "finished bundle",
        "--head-quant lut6, now (default)",
        "--quant lut4, now fp16",
        "--tokens 1, now 1,4",
    ];
    refused(&args, &says);
    let (_, _, err) = run(&args);
    assert!(!err.contains("--max-context"), "{err}");
    let other = fixture("tiny-gemma4-moe-text");
    let args =
        ["build", text(&other), "-o", out, "--tokens", "1", "--max-context", "64", "--head-quant", "lut6"];
    refused(&args, &["the checkpoint's contents"]);
}

#[test]
fn prompts_come_from_arguments_files_and_standard_input() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("b");
    build(&small(), &out, &["--tokens", "1", "--max-context", "64", "--quant", "fp16"]);
    let bundle = text(&out);
    let ids = |args: &[&str], stdin: Option<&[u8]>| {
        let mut command = anemoe(args);
        command.arg("--json").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(stdin.unwrap_or_default()).unwrap();
        let (code, out, err) = finish(child.wait_with_output().unwrap());
        assert_eq!(code, 0, "{args:?}\n{out}\n{err}");
        let v: serde_json::Value = serde_json::from_str(&out).unwrap();
        (v["prompt_ids"].clone(), v["generated_ids"].clone())
    };
    let plain = ids(&["generate", bundle, "--prompt", "def main():", "--max-new", "4"], None);
    assert_eq!(ids(&["generate", "-m", bundle, "-p", "def main():", "-n", "4"], None), plain);
    assert_eq!(ids(&["generate", bundle, "-p", "-", "-n", "4"], Some(b"def main():\n")), plain);
    let file = dir.path().join("prompt.txt");
    fs::write(&file, "def main():\r\n").unwrap();
    assert_eq!(ids(&["generate", bundle, "--prompt-file", text(&file), "-n", "4"], None), plain);
    let spaced = ids(&["generate", bundle, "--prompt-ids", "2, 3", "-n", "2"], None);
    assert_eq!(spaced.0, serde_json::json!([2, 3]));

    let generate = |args: &[&str], says: &[&str]| {
        let mut all = vec!["generate", bundle];
        all.extend(args);
        refused(&all, says);
    };
    generate(&["--prompt-file", text(dir.path())], &["not a regular file"]);
    generate(&["--prompt-file", "no/such/file"], &["no/such/file"]);
    fs::write(&file, [0xff, 0xfe]).unwrap();
    generate(&["--prompt-file", text(&file)], &["not UTF-8"]);
    fs::write(&file, "").unwrap();
    generate(&["--prompt-file", text(&file)], &["empty"]);
    fs::File::create(&file).unwrap().set_len(20_000_000).unwrap();
    generate(&["--prompt-file", text(&file)], &["more than 16 MB"]);
    generate(&["--prompt-ids", "2,x"], &["`x` is not a token id"]);
    generate(&["-p", "a", "--prompt-ids", "1"], &["cannot be used with"]);
    // Limits on random choices have no effect at temperature 0.
    generate(&["--prompt-ids", "2", "--top-k", "5"], &["--top-k has no effect without --temperature"]);
    generate(&["--prompt-ids", "2", "--top-p", "0.5"], &["--top-p has no effect without --temperature"]);
    let random = ["generate", bundle, "--prompt-ids", "2", "-n", "2", "--temperature", "0.7", "--top-k", "5"];
    ids(&random, None);
    let v = json(2, &["generate", bundle, "--prompt-ids", "2", "--top-k", "5"]);
    assert_eq!(v["error"]["kind"], "usage");

    // The help's example of contexts fits a bundle with default options.
    let (_, help, _) = run(&["bench", "--help"]);
    assert!(help.contains("--context 64,1024"), "{help}");
}

#[test]
fn mistyped_names_are_answered_with_near_ones() {
    let model = fixture("tiny-gemma4-moe");
    for (kind, meant) in
        [("LUT4", "lut4"), ("int4", "int4-block"), ("q4_0", "int4-block"), ("lut4-tensr", "lut4-tensor")]
    {
        let says = format!("did you mean `{meant}`?");
        refused(&["plan", text(&model), "--quant", kind], &[&says]);
        let v = json(2, &["plan", text(&model), "--quant", kind]);
        assert!(v["error"]["message"].as_str().unwrap().contains(&says), "{v}");
    }
    let weights = format!(
        "{}:model.layers.0.self_attn.q_prog.weight",
        text(&fixture("tiny-gemma4-moe-text/model.safetensors"))
    );
    refused(&["quantize", &weights], &["did you mean `model.layers.0.self_attn.q_proj.weight`?"]);
    refused(&["check", "x", "--chip", "m9"], &["m9", "m1, m2, m3, m4, m5", "a19"]);
}

/// Checks paths whose names are not UTF-8.
#[cfg(target_os = "linux")]
#[test]
fn paths_need_not_be_utf8() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join(OsStr::from_bytes(b"a\xffb"));
    let model = root.join("model");
    copy(&fixture("tiny-gemma4-moe-text"), &model);
    let bundle = root.join(OsStr::from_bytes(b"\xfe.anemoe"));
    let go = |args: &[&OsStr], status: i32| {
        for with_json in [false, true] {
            let mut command = anemoe(&[]);
            command.args(args);
            if with_json {
                command.arg("--json");
            }
            let (code, out, err) = finish(command.output().unwrap());
            assert_eq!(code, status, "{args:?}\n{out}\n{err}");
            assert!(!err.contains("panicked"), "{args:?}\n{err}");
            if with_json {
                serde_json::from_str::<serde_json::Value>(&out)
                    .unwrap_or_else(|e| panic!("{args:?}: {e}\n{out}"));
            }
        }
    };
    let o = OsStr::new;
    let golden = root.join("golden.npz");
    go(&[o("inspect"), model.as_os_str()], 0);
    go(&[o("plan"), model.as_os_str(), o("--quant"), o("fp16")], 0);
    go(
        &[
            o("golden"),
            model.as_os_str(),
            o("--prompt-ids"),
            o("2,3,4"),
            o("--decode"),
            o("2"),
            o("-o"),
            golden.as_os_str(),
            o("--force"),
        ],
        0,
    );
    // Built in parts, so that the path of the checkpoint is written down.
    for part in ["0/2", "1/2"] {
        let mut all = vec![o("build"), model.as_os_str(), o("-o"), bundle.as_os_str(), o("--tokens"), o("1")];
        all.extend([o("--shard"), o(part), o("--quant"), o("fp16")]);
        go(&all, 0);
    }
    let (code, out, err) = finish(anemoe(&[]).arg("assemble").arg(&bundle).output().unwrap());
    assert_eq!(code, 0, "{out}\n{err}");
    assert!(!err.contains("no gates of the whole"), "{err}");
    go(&[o("inspect"), bundle.as_os_str()], 0);
    go(&[o("check"), bundle.as_os_str()], 0);
    go(&[o("generate"), bundle.as_os_str(), o("--prompt-ids"), o("1"), o("-n"), o("2")], 0);
    go(&[o("validate"), bundle.as_os_str(), o("--golden"), golden.as_os_str()], 0);
    go(&[o("trace"), bundle.as_os_str(), o("--golden"), golden.as_os_str()], 0);
    go(&[o("journal"), bundle.as_os_str()], 0);
    go(&[o("report"), bundle.as_os_str(), o("--against"), bundle.as_os_str()], 0);
    let mut tensor = model.join("model.safetensors").into_os_string();
    tensor.push(":model.layers.0.self_attn.q_proj.weight");
    let out = root.join("q.npz");
    go(&[o("quantize"), &tensor, o("-o"), out.as_os_str(), o("--force")], 0);
    go(&[o("generate"), root.as_os_str(), o("--prompt-ids"), o("1")], 2);
    go(&[o("plan"), root.join("none").as_os_str()], 2);
    assert!(root.join("q.npz").is_file());
}

#[test]
fn help_has_a_line_per_command_and_three_examples() {
    let (code, help, _) = run(&["--help"]);
    assert_eq!(code, 0);
    let commands = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    for line in commands.lines() {
        assert!(line.starts_with("  ") && !line.starts_with("   "), "a second line: `{line}`");
        assert!(line.split_whitespace().count() > 3, "`{line}` does not say what the command does");
    }
    assert!(commands.lines().count() >= 25, "{commands}");
    let examples = help.split("Examples:\n").nth(1).unwrap();
    assert_eq!(examples.lines().filter(|l| l.starts_with("  anemoe ")).count(), 3, "{help}");
}

#[test]
fn a_failed_validation_names_the_next_command() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = tiny_bundle(dir.path(), "my bundle", &["--quant", "lut4"]);
    let golden = fixture("tiny-gemma4-moe/golden.npz");
    let (code, out, _) = run(&["validate", text(&bundle), "--golden", text(&golden), "--min-cosine", "1"]);
    assert_eq!(code, 1, "{out}");
    assert!(out.contains("next: anemoe trace '") && out.contains("my bundle' --golden "), "{out}");
    // A build that fails at a golden names the next command, too.
    let (model, out) = (fixture("tiny-gemma4-moe"), dir.path().join("c"));
    let args = ["build", text(&model), "-o", text(&out), "--tokens", "1", "--golden", text(&golden)];
    let (code, said, _) = run(&args);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("next: anemoe trace ") && said.contains("golden.npz shows"), "{said}");
    // The journal names the next command, too, with a path that a shell takes unchanged.
    let (_, out, _) = run(&["journal", text(&bundle)]);
    assert!(out.contains("my bundle' --entry "), "{out}");
}

#[test]
fn a_build_speaks_plainly_of_its_own_gates() {
    let dir = tempfile::tempdir().unwrap();
    let built = |model: &Path, name: &str, quant: &str| {
        let out = dir.path().join(name);
        let args = [
            "build",
            text(model),
            "-o",
            text(&out),
            "--tokens",
            "1",
            "--max-context",
            "64",
            "--quant",
            quant,
        ];
        let (code, said, err) = run(&args);
        assert!(code < 2, "{said}\n{err}");
        (out, said)
    };
    let (a, said) = built(&small(), "a", "fp16");
    // The user could not change the gates' own prompt, so there is no warning.
    assert!(!said.contains("warning"), "{said}");
    assert!(said.contains("they run on the CPU, which is fine"), "{said}");

    let (code, out, _) = run(&["check", text(&a)]);
    assert_eq!(code, 0, "{out}");
    let (rules, notes) = out.split_once("\nsources (").unwrap();
    assert!(rules.contains("measured: [1]") && rules.contains("CPU: small, fine"), "{out}");
    assert!(notes.contains("  [1] A: ") && !rules.contains("journal 0"), "{out}");
}

#[test]
fn messages_hold_no_types_of_the_program_and_no_colours() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = tiny_bundle(dir.path(), "b", &[]);
    let embed = bundle.join("embed.bin");
    fs::write(&embed, "short").unwrap();
    let (_, _, err) = run(&["generate", text(&bundle), "--prompt-ids", "1"]);
    assert!(err.contains("embed.bin: invalid size: 5 bytes where"), "{err}");
    assert!(!err.contains("Fp16"), "{err}");
    let file = dir.path().join("g.npz");
    fs::write(&file, "no archive").unwrap();
    let (_, _, err) = run(&["validate", text(&bundle), "--golden", text(&file)]);
    assert!(err.contains("not a zip archive") && !err.contains("EOCD"), "{err}");
    // Inputs of another shape.
    let package = bundle.join("shards/L00.attn.mlpackage");
    let inputs = dir.path().join("in.npz");
    let array = |n: usize| anemoe_npz::Array::new(vec![n], vec![0f32; n]).unwrap();
    anemoe_npz::write_npz(&inputs, &[("hidden".to_string(), array(3))]).unwrap();
    let out = dir.path().join("o.npz");
    let (code, _, err) =
        run(&["predict", text(&package), "--inputs", text(&inputs), "--outputs", text(&out)]);
    assert_eq!(code, 2, "{err}");
    assert!(!err.contains("Fixed("), "{err}");
    let model = fixture("tiny-gemma4-moe");
    let (_, _, err) = finish(anemoe(&["plan", text(&model)]).env("ANEMOE_LOG", "trace").output().unwrap());
    assert!(!err.contains('\u{1b}'), "{err}");
}

/// Checks that a plan has one column of megabytes, of 10^6 bytes.
#[test]
fn a_plan_has_one_column_of_megabytes() {
    let (_, out, _) = run(&["plan", text(&fixture("tiny-gemma4-moe"))]);
    assert!(out.contains("  MB  ") && !out.contains("MiB"), "{out}");
}
