//! Helpers that run the built binary.
#![allow(dead_code)]

pub mod scripted;

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Returns the path of a fixture of the repository.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

/// Options with which kinds are searched for.
const GOALS: [&str; 5] = ["--quant", "--max-kl", "--max-bytes", "--auto-text", "--objective"];

/// Makes a command of the binary with these arguments. Plans and builds without a kind get lut4, since a binary that is not
/// optimized searches long for kinds.
pub fn anemoe(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_anemoe"));
    match args {
        [first @ ("plan" | "build"), rest @ ..] if !rest.iter().any(|a| GOALS.contains(a)) => {
            command.args([first, "--quant", "lut4"]).args(rest)
        }
        all => command.args(all),
    };
    command
}

/// Makes a command of the binary with exactly these arguments.
pub fn anemoe_as_is(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_anemoe"));
    command.args(args);
    command
}

/// Runs the binary and returns its exit status, standard output and standard error.
pub fn run(args: &[&str]) -> (i32, String, String) {
    finish(anemoe(args).output().unwrap())
}

/// Returns the exit status (-1 for a signal), standard output and standard error.
pub fn finish(output: Output) -> (i32, String, String) {
    let text = |b: Vec<u8>| String::from_utf8_lossy(&b).into_owned();
    (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
}

/// Runs the binary with `--json`, checks its exit status, and returns the document.
pub fn json(expected: i32, args: &[&str]) -> Value {
    let mut all = args.to_vec();
    all.push("--json");
    let (code, out, err) = run(&all);
    assert_eq!(code, expected, "{args:?}\n{out}\n{err}");
    serde_json::from_str(&out).unwrap_or_else(|e| panic!("{args:?}: {e}\n{out}"))
}

/// Checks that the binary ends with exit status 2, no panic, and each of `says` in its message.
pub fn refused(args: &[&str], says: &[&str]) {
    let (code, out, err) = run(args);
    assert_eq!(code, 2, "{args:?}\n{out}\n{err}");
    assert!(!err.contains("panicked"), "{args:?}\n{err}");
    for text in says {
        assert!(err.contains(text), "{args:?}: `{text}` is not in\n{err}");
    }
}

/// Builds a bundle without gates, since tests check themselves what gates would.
pub fn build(checkpoint: &Path, bundle: &Path, options: &[&str]) {
    let mut args = vec!["build", checkpoint.to_str().unwrap(), "-o", bundle.to_str().unwrap()];
    args.push("--skip-gates");
    args.extend(options);
    let (code, out, err) = run(&args);
    assert_eq!(code, 0, "{args:?}\n{out}\n{err}");
}

/// Runs the golden gate, checks its exit status, and returns the document.
pub fn validate(bundle: &Path, golden: &Path, min_cosine: &str, status: i32) -> Value {
    let (bundle, golden) = (bundle.to_str().unwrap(), golden.to_str().unwrap());
    json(status, &["validate", bundle, "--golden", golden, "--min-cosine", min_cosine])
}

/// Reads the token ids of a document.
pub fn ids(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).collect()
}

/// Checks that a prompt of 29 tokens gives the same 24 tokens in one call and in chunks of each of these sizes.
pub fn same_in_chunks(bundle: &Path, chunks: &[&str]) {
    let prompt: Vec<String> = (0..29).map(|i| ((i * 37 + 2) % 512).to_string()).collect();
    let prompt = prompt.join(",");
    let generate = |chunk: &[&str]| {
        let mut args = vec!["generate", bundle.to_str().unwrap(), "--prompt-ids", &prompt];
        args.extend(["--max-new", "24", "--ignore-eos"]);
        args.extend(chunk);
        let v = json(0, &args);
        assert_eq!(v["timing"]["prefill_tokens"], 29);
        assert_eq!(v["timing"]["decode_tokens"], 23);
        ids(&v["generated_ids"])
    };
    let whole = generate(&[]);
    assert_eq!(whole.len(), 24);
    for chunk in chunks {
        assert_eq!(generate(&["--prefill-chunk", chunk]), whole, "{} in chunks of {chunk}", bundle.display());
    }
}

/// Returns every file of a folder with its contents, by relative path; without a bundle's journal, which holds times.
pub fn contents(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    fn walk(dir: &Path, files: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { walk(&path, files) } else { files.push(path) }
        }
    }
    let mut files = Vec::new();
    walk(dir, &mut files);
    files.retain(|f| *f != dir.join("journal.jsonl"));
    files.sort();
    files
        .into_iter()
        .map(|f| (f.strip_prefix(dir).unwrap().to_path_buf(), std::fs::read(f).unwrap()))
        .collect()
}

/// Copies a folder of files.
pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &target);
        } else {
            std::fs::copy(&path, &target).unwrap();
        }
    }
}
