//! Messages that name the given word and the command or option that is meant, and values as people write them.

use crate::common::{build, fixture, json, refused, run};
use std::fs;
use std::path::{Path, PathBuf};

fn bundle(dir: &Path) -> PathBuf {
    let bundle = dir.join("b.anemoe");
    build(&fixture("tiny-gemma4-moe-text"), &bundle, &["--no-journal"]);
    bundle
}

#[test]
fn paths_of_another_kind_are_named_with_what_is_meant() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path());
    let b = bundle.to_str().unwrap();
    let chain = bundle.join("chain.json");
    let generate = |path: &str, says: &[&str]| {
        refused(&["generate", path, "--prompt-ids", "1", "-n", "1"], says);
    };
    generate(chain.to_str().unwrap(), &["give the folder of the bundle", b]);
    refused(
        &["inspect", "nosuch"],
        &["nosuch", "Hugging Face folder", ".gguf", "synthetic:NAME", "a bundle", ".mlpackage"],
    );
    let predict = |path: &str, says: &[&str]| {
        refused(&["predict", path, "--inputs", "a.npz", "--outputs", "o.npz"], says);
    };
    predict(b, &["a finished bundle", "shards", "anemoe generate"]);
    predict(fixture("tiny-zaya").to_str().unwrap(), &["a Hugging Face checkpoint", "anemoe build"]);
    #[cfg(unix)]
    {
        fs::remove_file(&chain).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &chain).unwrap();
        for args in
            [&["inspect", b][..], &["generate", b, "--prompt-ids", "1"], &["check", b, "--no-journal"]]
        {
            refused(args, &["chain.json", "a device, where a regular file is expected"]);
        }
    }
}

#[test]
fn lists_may_have_blanks() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path());
    let tiny = fixture("tiny-gemma4-moe-text");
    let plan = json(0, &["plan", tiny.to_str().unwrap(), "--tokens", "1, 4"]);
    assert_eq!(plan["options"]["tokens"][1]["max"], 4);
    let bench = [
        "bench",
        bundle.to_str().unwrap(),
        "--no-journal",
        "--context",
        "4, 8",
        "--prefill",
        " 0",
        "--decode",
        "1",
    ];
    let found = json(0, &bench.iter().copied().chain(["--repetitions", "1"]).collect::<Vec<_>>());
    assert_eq!(found["decode"][1]["context"], 8);
    refused(&["plan", tiny.to_str().unwrap(), "--tokens", "1,x"], &["`x` is not a whole number"]);
}

#[test]
fn prompts_are_found_or_explained() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path());
    let b = bundle.to_str().unwrap();
    refused(&["generate", b, "--prompt-file", "-"], &["--prompt - reads standard input"]);
    refused(&["generate", b, "-p", ""], &["the prompt is empty"]);
    let empty = dir.path().join("empty");
    fs::write(&empty, "").unwrap();
    refused(&["generate", b, "--prompt-file", empty.to_str().unwrap()], &["the prompt is empty"]);
}

#[test]
fn names_of_other_tools_are_translated() {
    let tiny = fixture("tiny-gemma4-moe-text");
    let tiny = tiny.to_str().unwrap();
    for name in ["fp32", "bf16", "f32"] {
        refused(&["plan", tiny, "--quant", name], &["did you mean", "fp16"]);
    }
    let tensor = format!("{tiny}/model.safetensors:model.layers.0.self_attn");
    refused(
        &["quantize", &tensor],
        &["no tensor `model.layers.0.self_attn`", "; so begin 6 names", "self_attn.k_proj.weight"],
    );
}

#[test]
fn chips_are_read_in_one_word() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path());
    for chip in ["m3max", "M3 Max", "m3-pro", "a17pro"] {
        let (code, _, err) = run(&["check", bundle.to_str().unwrap(), "--no-journal", "--chip", chip]);
        assert!(code <= 1, "{chip}: {err}");
    }
    refused(&["check", bundle.to_str().unwrap(), "--chip", "m3fast"], &["not a known chip"]);
}

#[test]
fn check_refuses_side_files_that_a_run_would_refuse() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b.anemoe");
    let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/small-gemma4");
    build(&small, &bundle, &["--no-journal"]);
    let b = bundle.to_str().unwrap();
    let check = ["check", b, "--no-journal"];
    let (code, _, err) = run(&check);
    assert!(code <= 1, "{err}");
    for (name, text, says) in [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer.json", r#"{"version": "1.0"}"#, "tokenizer.json"),
        ("tokenizer_config.json", "no JSON", "JSON"),
        ("generation_config.json", r#"{"eos_token_id": [1, 77]}"#, "77 ends a text here"),
        ("generation_config.json", "{", "generation_config.json"),
    ] {
        let path = bundle.join(name);
        let kept = fs::read(&path).ok();
        fs::write(&path, text).unwrap();
        refused(&check, &[name, says]);
        match kept {
            Some(kept) => fs::write(&path, kept).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
    }
    assert!(run(&check).0 <= 1);
}

#[test]
fn damaged_json_is_explained_in_words_of_json() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path());
    let file = bundle.join("chain.json");
    let chain: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let mut without = chain.clone();
    without.as_object_mut().unwrap().remove("model");
    let mut tokens = chain.clone();
    tokens["tokens"] = serde_json::json!([3]);
    let mut bytes = chain.clone();
    bytes["shards"][0]["bytes"] = serde_json::json!("many");
    let mut steps = chain.clone();
    steps["steps"] = serde_json::json!([]);
    for (value, says) in [
        (without, "key `model` is missing"),
        (tokens, "found 3, expected an object"),
        (bytes, "found \"many\", expected a whole number"),
        (steps, "chain: steps: none"),
    ] {
        fs::write(&file, serde_json::to_vec(&value).unwrap()).unwrap();
        refused(&["inspect", bundle.to_str().unwrap()], &["chain.json", says]);
    }
}

#[test]
fn a_checkpoint_of_another_family_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path());
    let (b, zaya) = (bundle.to_str().unwrap(), fixture("tiny-zaya"));
    let zaya = zaya.to_str().unwrap();
    refused(&["build", zaya, "-o", b, "--skip-gates"], &["family", "gemma4", "zaya"]);
    let golden = fixture("tiny-gemma4-moe-text/golden.npz");
    let golden = golden.to_str().unwrap();
    let trace = ["trace", b, "--golden", golden, "--swap", "--checkpoint", zaya, "--no-journal"];
    refused(&trace, &["is of the family zaya, not gemma4"]);
}

#[cfg(unix)]
#[test]
fn signals_have_their_own_exit_status() {
    use std::process::{Command, Stdio};
    let dir = tempfile::tempdir().unwrap();
    let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/small-gemma4");
    let out = dir.path().join("g.npz");
    // Tests that run under `nohup` themselves cannot see what HUP does.
    let ignored = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored =
        ignored.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    let ignores_hup = ignored.is_some_and(|mask| mask & 1 == 1);
    for (signal, status) in [("-INT", 130), ("-TERM", 143), ("-HUP", 129)] {
        if signal == "-HUP" && ignores_hup {
            continue;
        }
        // The command waits for a prompt.
        let args = ["golden", small.to_str().unwrap(), "-p", "-", "-o", out.to_str().unwrap()];
        let mut command = crate::common::anemoe(&args);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take();
        std::thread::sleep(std::time::Duration::from_secs(2));
        Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        // A command that ignores the signal ends with its input: under `nohup`, HUP is ignored.
        std::thread::sleep(std::time::Duration::from_secs(1));
        drop(input);
        assert_eq!(child.wait().unwrap().code(), Some(status), "{signal}");
    }
    // Under `nohup` a closed terminal ends nothing.
    let script = "trap '' HUP; sleep 3 | \"$0\" golden \"$1\" -p - -o \"$2\" & sleep 1.5; kill -HUP -- $! ; wait $!; echo $?";
    let mut shell = Command::new("sh");
    shell.args(["-c", script, env!("CARGO_BIN_EXE_anemoe"), small.to_str().unwrap(), out.to_str().unwrap()]);
    let (_, out, err) = crate::common::finish(shell.output().unwrap());
    assert!(out.trim().ends_with('2') && err.contains("the prompt is empty"), "{out} {err}");
}

#[test]
fn control_characters_in_notes_are_shown_as_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path());
    let b = bundle.to_str().unwrap();
    let (code, _, err) = run(&["journal", "add", b, "--note", "red \u{1b}[31m"]);
    assert_eq!(code, 0, "{err}");
    let (_, out, _) = run(&["journal", b]);
    assert!(out.contains(r"note: red \u{1b}[31m"), "{out}");
}

#[test]
fn small_figures_are_in_their_units() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path());
    let (_, out, _) = run(&["check", bundle.to_str().unwrap(), "--no-journal"]);
    assert!(!out.contains("0.0 MB"), "{out}");
    let text = dir.path().join("t.txt");
    fs::write(&text, "def main():\n    return 1\n").unwrap();
    let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/small-gemma4");
    let (code, out, err) = run(&["perplexity", small.to_str().unwrap(), "--text", text.to_str().unwrap()]);
    assert!(code == 0 && out.contains(" in 1 window of"), "{out} {err}");
}
