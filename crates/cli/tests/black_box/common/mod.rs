//! Helpers that run the built binary. A command is a line of words; words with blanks stand between quotes.
#![allow(dead_code)]

pub mod scripted;

use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A path that lines of words can hold. A temporary folder stays as long as a path in it.
#[derive(Clone, Debug)]
pub struct Place {
    path: PathBuf,
    folder: Option<Arc<TempDir>>,
}

impl Place {
    pub fn join(&self, name: impl AsRef<Path>) -> Place {
        Place { path: self.path.join(name), folder: self.folder.clone() }
    }
}

impl Deref for Place {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.path
    }
}

impl AsRef<Path> for Place {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.path.to_str().unwrap())
    }
}

/// Makes a temporary folder.
pub fn folder() -> Place {
    let folder = tempfile::tempdir().unwrap();
    Place { path: folder.path().into(), folder: Some(Arc::new(folder)) }
}

/// Returns the path of a file of the repository.
pub fn root(name: &str) -> Place {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap().join(name);
    Place { path, folder: None }
}

pub fn fixture(name: &str) -> Place {
    root("fixtures").join(name)
}

/// Returns the path of the small trained model of the repository, which has a tokenizer.
pub fn small() -> Place {
    root("models/small-gemma4")
}

/// Options with which kinds are searched for.
const GOALS: [&str; 5] = ["--quant", "--max-kl", "--max-bytes", "--auto-text", "--objective"];

/// Makes a command of the binary with these words. Plans and builds without a kind get lut4, since a binary that is not
/// optimized searches long for kinds.
pub fn anemoe(line: impl AsRef<str>) -> Command {
    let mut command = anemoe_as_is(&line);
    let words: Vec<&str> = line.as_ref().split_whitespace().collect();
    if let ["plan" | "build", rest @ ..] = words.as_slice()
        && !rest.iter().any(|word| GOALS.contains(word))
    {
        command.args(["--quant", "lut4"]);
    }
    command
}

/// Makes a command of the binary with exactly these words.
pub fn anemoe_as_is(line: impl AsRef<str>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_anemoe"));
    command.args(shlex::split(line.as_ref()).unwrap());
    command
}

/// Makes a command that runs the binary below a line of the shell, as `$0` and `$@`.
pub fn in_shell(script: &str, line: impl AsRef<str>) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_anemoe")]).args(shlex::split(line.as_ref()).unwrap());
    command
}

/// Runs the binary and returns its exit status, standard output and standard error.
pub fn run(line: impl AsRef<str>) -> (i32, String, String) {
    finish(&mut anemoe(line))
}

/// Runs a command and returns its exit status, standard output and standard error.
pub fn finish(command: &mut Command) -> (i32, String, String) {
    ended(command.output().unwrap())
}

/// Returns the exit status (-1 for a signal), standard output and standard error of a program that did not panic.
pub fn ended(output: Output) -> (i32, String, String) {
    let text = |b: Vec<u8>| String::from_utf8_lossy(&b).into_owned();
    let (out, err) = (text(output.stdout), text(output.stderr));
    assert!(!err.contains("panicked"), "{out}\n{err}");
    (output.status.code().unwrap_or(-1), out, err)
}

/// Starts a command with pipes as its input, output and messages.
pub fn start(command: &mut Command) -> Child {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs a command with this input.
pub fn fed(command: &mut Command, input: impl AsRef<[u8]>) -> (i32, String, String) {
    let mut child = start(command);
    // A command that is refused does not read its input.
    let _ = child.stdin.take().unwrap().write_all(input.as_ref());
    ended(child.wait_with_output().unwrap())
}

/// Sends a signal to a program.
pub fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").args(["-s", name, &child.id().to_string()]).status();
    assert!(status.unwrap().success());
}

/// Waits until something is there, a minute at most.
pub fn wait_for(what: &str, mut is_there: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_there() {
        assert!(started.elapsed() < Duration::from_secs(60), "no {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Runs the binary, which has to succeed, and returns its output.
pub fn passes(line: impl AsRef<str>) -> String {
    let (code, out, err) = run(&line);
    assert_eq!(code, 0, "{}\n{out}\n{err}", line.as_ref());
    out
}

/// Runs the binary with `--json`, checks its exit status, and returns the document.
pub fn json(expected: i32, line: impl AsRef<str>) -> Value {
    json_of(expected, &mut anemoe(line))
}

/// Runs a command with `--json`, checks its exit status, and returns the document.
pub fn json_of(expected: i32, command: &mut Command) -> Value {
    let (code, out, err) = finish(command.arg("--json"));
    assert_eq!(code, expected, "{command:?}\n{out}\n{err}");
    serde_json::from_str(&out).unwrap_or_else(|e| panic!("{command:?}: {e}\n{out}"))
}

/// Checks that a text has each of these parts.
pub fn shows(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in\n{text}");
    }
}

/// Checks the exit status of the binary, and that each of `says` is in its output or its messages.
pub fn ends(expected: i32, line: impl AsRef<str>, says: &[&str]) {
    let (code, out, err) = run(&line);
    assert_eq!(code, expected, "{}\n{out}\n{err}", line.as_ref());
    shows(&(out + &err), says);
}

/// Checks that the binary ends with exit status 2 and each of `says` in its message.
pub fn refused(line: impl AsRef<str>, says: &[&str]) {
    refuses(&mut anemoe(line), says);
}

/// Checks that a command ends with exit status 2 and each of `says` in its message, which is returned.
pub fn refuses(command: &mut Command, says: &[&str]) -> String {
    let (code, out, err) = finish(command);
    assert_eq!(code, 2, "{command:?}\n{out}\n{err}");
    shows(&err, says);
    err
}

/// Builds a bundle without gates, since tests check themselves what gates would.
pub fn build(checkpoint: impl AsRef<Path>, bundle: impl AsRef<Path>, options: &str) {
    let (checkpoint, bundle) = (checkpoint.as_ref().display(), bundle.as_ref().display());
    passes(format!("build '{checkpoint}' -o '{bundle}' --skip-gates {options}"));
}

/// Returns a test's own copy of a bundle of a fixture, or of the small model.
pub fn built(model: &str, options: &str) -> Place {
    let checkpoint = if model == "small" { small() } else { fixture(model) };
    shared(&format!("{model}{options}"), |bundle| build(checkpoint, bundle, options))
}

/// Returns a test's own copy of a bundle that is made once for all tests, also of other processes.
pub fn shared(key: &str, make: impl FnOnce(&Path)) -> Place {
    static MADE: Mutex<BTreeMap<PathBuf, Arc<OnceLock<()>>>> = Mutex::new(BTreeMap::new());
    let binary = Path::new(env!("CARGO_BIN_EXE_anemoe")).metadata().unwrap().modified().unwrap();
    let age = format!("{}", binary.duration_since(std::time::UNIX_EPOCH).unwrap().as_millis());
    let all = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bundles");
    let kept = all.join(&age).join(key.replace(['/', ' '], "_"));
    let made = MADE.lock().unwrap().entry(kept.clone()).or_default().clone();
    made.get_or_init(|| {
        // Bundles of an earlier binary are of no use.
        let old = fs::read_dir(&all).into_iter().flatten().flatten().filter(|e| *e.file_name() != *age);
        old.for_each(|e| drop(fs::remove_dir_all(e.path())));
        if !kept.is_dir() {
            fs::create_dir_all(all.join(&age)).unwrap();
            let here = tempfile::tempdir_in(all.join(&age)).unwrap();
            make(&here.path().join("b"));
            // Another process may have been faster.
            let _ = fs::rename(here.path().join("b"), &kept);
        }
    });
    let own = folder().join("b.anemoe");
    copy(&kept, &own);
    own
}

pub fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap_or_else(|| panic!("{value}"))
}

pub fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value}"))
}

pub fn count(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value}"))
}

pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value}"))
}

/// Checks that a document has these members; others do not matter.
pub fn has(found: &Value, wanted: Value) {
    fn fits(found: &Value, wanted: &Value) -> bool {
        match wanted {
            Value::Object(all) => all.iter().all(|(key, wanted)| fits(&found[key], wanted)),
            _ => found == wanted,
        }
    }
    assert!(fits(found, &wanted), "{wanted} is not in {found}");
}

/// Lists the member `key` of each object of a list.
pub fn each<'a>(values: &'a Value, key: &'a str) -> impl Iterator<Item = &'a str> {
    list(values).iter().map(move |v| text(&v[key]))
}

/// Reads the token ids of a document.
pub fn ids(value: &Value) -> Vec<u64> {
    list(value).iter().map(count).collect()
}

/// Generates tokens with these options, and returns them.
pub fn generated(bundle: &Place, options: &str) -> Vec<u64> {
    ids(&json(0, format!("generate {bundle} {options}"))["generated_ids"])
}

pub fn read_json(path: impl AsRef<Path>) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Reads the contract of a bundle.
pub fn chain(bundle: &Path) -> Value {
    read_json(bundle.join("chain.json"))
}

pub fn edit_json(path: impl AsRef<Path>, edit: impl FnOnce(&mut Value)) {
    let mut value = read_json(&path);
    edit(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

/// Flips a bit in the middle of a file.
pub fn flip(path: impl AsRef<Path>) {
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// Edits the header and the data of a file of safetensors.
pub fn edit_weights(file: &Path, edit: impl FnOnce(&mut Map<String, Value>, &mut Vec<u8>)) {
    let bytes = fs::read(file).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let (mut header, mut data) = (serde_json::from_slice(&bytes[8..8 + n]).unwrap(), bytes[8 + n..].to_vec());
    edit(&mut header, &mut data);
    let header = serde_json::to_vec(&header).unwrap();
    fs::write(file, [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()).unwrap();
}

/// Sets every `step`-th element of a tensor in BF16 of a checkpoint.
pub fn plant(model: &Path, tensor: &str, step: usize, value: f32) {
    let index = model.join("model.safetensors.index.json");
    let index = if index.is_file() { read_json(index) } else { Value::Null };
    let file = index["weight_map"][tensor].as_str().unwrap_or("model.safetensors");
    edit_weights(&model.join(file), |header, data| {
        let info = &header[tensor];
        assert_eq!(info["dtype"], "BF16");
        let at: Range<usize> =
            count(&info["data_offsets"][0]) as usize..count(&info["data_offsets"][1]) as usize;
        for at in at.step_by(2 * step) {
            data[at..at + 2].copy_from_slice(&((value.to_bits() >> 16) as u16).to_le_bytes());
        }
    });
}

/// Returns every file of a folder with its contents, by relative path; without a bundle's journal, which holds times.
pub fn contents(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    fn walk(dir: &Path, files: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { walk(&path, files) } else { files.push(path) }
        }
    }
    let mut files = Vec::new();
    walk(dir, &mut files);
    files.retain(|f| *f != dir.join("journal.jsonl"));
    files.sort();
    files.into_iter().map(|f| (f.strip_prefix(dir).unwrap().to_path_buf(), fs::read(f).unwrap())).collect()
}

/// Encodes a field of a protobuf that holds bytes.
pub fn field(number: u32, bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for mut n in [u64::from(number << 3 | 2), bytes.len() as u64] {
        while n > 127 {
            out.push(n as u8 | 128);
            n >>= 7;
        }
        out.push(n as u8);
    }
    [out, bytes.to_vec()].concat()
}

/// Copies a folder of files.
pub fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &target);
        } else {
            fs::copy(&path, &target).unwrap();
        }
    }
}

/// Copies a fixture into a temporary folder.
pub fn copied(name: &str) -> Place {
    let model = folder().join(name);
    copy(&fixture(name), &model);
    model
}
