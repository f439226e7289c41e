//! `cargo xtask defects`: plants defects in the Core ML backend, one at a time, and lists those that the sim's tests miss.
//!
//! Works on a copy of the repository under `target/defects`; its log there says how each defect was noticed.

use crate::options::TaskOptions;
use crate::sim;
use crate::task::{Passed, root};
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Files and folders of the repository that the copy needs.
const PARTS: [&str; 6] = ["Cargo.toml", "Cargo.lock", "crates", "fixtures", "sim", "xtask"];
/// Folder of the code that is changed.
const ENGINE: &str = "crates/coreml/src/engine";
/// Longest time of a test run; a defect that makes it longer counts as noticed.
const LONGEST: Duration = Duration::from_secs(300);

/// A defect: its name, the file, the original text, and its replacement.
struct Defect(&'static str, &'static str, &'static str, &'static str);

/// Defects that the tests cannot notice.
const UNNOTICED: [&str; 1] = ["memory never freed"];

const DEFECTS: [Defect; 37] = [
    Defect(
        "model not retained",
        "loading.rs",
        "match Retained::retain(model)",
        "match Retained::from_raw(model)",
    ),
    Defect("answer not waited for", "loading.rs", "model.recv()", "model.try_recv()"),
    Defect(
        "null error dereferenced",
        "loading.rs",
        ".map_or_else(|| Failure::Misfit(\"neither model nor error\".into()), Failure::reported)",
        ".map(Failure::reported).unwrap()",
    ),
    Defect("no autorelease pool", "loading.rs", "autoreleasepool(|_| work());", "work();"),
    Defect(
        "function's name not set",
        "loading.rs",
        "if let Some(function) = function {",
        "if let (Some(function), true) = (function, false) {",
    ),
    Defect("other compute units", "loading.rs", "MLComputeUnits::CPUAndNeuralEngine", "MLComputeUnits::All"),
    Defect(
        "wrong selector",
        "loading.rs",
        "let configuration = MLModelConfiguration::new();",
        "let configuration = MLModelConfiguration::new(); let _: () = objc2::msg_send![&configuration, setUnits: 3isize];",
    ),
    Defect(
        "wrong type of an argument",
        "loading.rs",
        "let configuration = MLModelConfiguration::new();",
        "let configuration = MLModelConfiguration::new(); let _: () = objc2::msg_send![&configuration, setComputeUnits: 3i32];",
    ),
    Defect("room of a failed load not given back", "loading.rs", "o.cancel(wanted.bytes);", "o.cancel(0);"),
    Defect(
        "permit not given back",
        "loading.rs",
        "unwrap_or_else(PoisonError::into_inner) -= 1;",
        "unwrap_or_else(PoisonError::into_inner) -= 0;",
    ),
    Defect(
        "exceptions not caught",
        "failure.rs",
        "match exception::catch(AssertUnwindSafe(f)) {",
        "match Ok::<_, Option<Retained<exception::Exception>>>(AssertUnwindSafe(f).0()) {",
    ),
    Defect(
        "strides of results ignored",
        "arrays.rs",
        "unsafe { (usizes(&array.shape()), usizes(&array.strides()), array.dataType()) };\n    if kind",
        "unsafe { (usizes(&array.shape()), contiguous(&usizes(&array.shape())), array.dataType()) };\n    if kind",
    ),
    Defect(
        "strides of states ignored",
        "arrays.rs",
        "unsafe { (usizes(&array.shape()), usizes(&array.strides()), array.dataType()) };\n    if shape",
        "unsafe { (usizes(&array.shape()), contiguous(&usizes(&array.shape())), array.dataType()) };\n    if shape",
    ),
    Defect(
        "strides of written states ignored",
        "arrays.rs",
        "&usizes(unsafe { own.as_ref() })",
        "&contiguous(&usizes(unsafe { array.shape() }.as_ref()))",
    ),
    Defect("own strides wrong", "arrays.rs", "&numbers(&contiguous(shape))", "&numbers(shape)"),
    Defect(
        "array leaked",
        "arrays.rs",
        "Ok(HostArray { array,",
        "std::mem::forget(array.clone());\n        Ok(HostArray { array,",
    ),
    Defect(
        "block leaked",
        "arrays.rs",
        "let array = array.map_err",
        "std::mem::forget(free.clone());\n        let array = array.map_err",
    ),
    Defect(
        "memory never freed",
        "arrays.rs",
        "unsafe { dealloc(data.as_ptr().cast(), layout) }",
        "unsafe { let _ = (data, layout, dealloc as unsafe fn(*mut u8, Layout)); }",
    ),
    Defect(
        "dictionary of arrays instead of values",
        "instance.rs",
        "Ok(Retained::into_super(Retained::into_super(value)))",
        "Ok(Retained::into_super(Retained::into_super(array.array().clone())))",
    ),
    Defect(
        "options released twice",
        "instance.rs",
        "let options = unsafe { MLPredictionOptions::new() };",
        "let options = unsafe { MLPredictionOptions::new() };\n        unsafe { objc2::ffi::objc_release(Retained::as_ptr(&options).cast_mut().cast()) };",
    ),
    Defect("state not passed", "instance.rs", "match state {", "match state.filter(|_| false) {"),
    Defect(
        "identity of backings not compared",
        "instance.rs",
        "filter(|b| Retained::as_ptr(b.array()) == Retained::as_ptr(&array))",
        "filter(|_| true)",
    ),
    Defect(
        "values not checked against the model",
        "instance.rs",
        "if unsafe { feature.isAllowedValue(value) }",
        "if unsafe { feature.isAllowedValue(value) || true }",
    ),
    Defect(
        "cache not passed",
        "instance.rs",
        "value_of(&takes, &name, array)?",
        "value_of(&takes, &name, &HostArray::new(&slot.cache.shape, super::arrays::Element::F16)?)?",
    ),
    Defect(
        "cache of another sequence passed",
        "instance.rs",
        "self.features.get(&key)",
        "self.features.values().next()",
    ),
    Defect(
        "rows written to wrong slots",
        "arrays.rs",
        "let (slot, token) = (i / tokens, i % tokens);",
        "let (slot, token) = (slots - 1 - i / tokens, i % tokens);",
    ),
    Defect(
        "caches kept by functions",
        "objects.rs",
        "self.functions.values_mut().for_each(|f| f.instance.forget(key));",
        "",
    ),
    Defect(
        "caches that have moved kept by functions",
        "objects.rs",
        "        if has_moved {",
        "        if has_moved && states.caches.is_empty() {",
    ),
    Defect(
        "states lost with their maker",
        "objects.rs",
        "states.saved = states.read()?;",
        "states.saved = None;",
    ),
    Defect("states outlive their maker", "objects.rs", "states.live = None;\n            }", "}"),
    Defect(
        "saved states not written",
        "objects.rs",
        "move_all(&state, &states.slots, values, true)?;",
        "let _ = values;",
    ),
    Defect(
        "limit ignored",
        "objects.rs",
        "limit.is_none_or(|limit| self.bytes.saturating_add(bytes) <= limit)",
        "limit.is_none() || bytes > 0",
    ),
    Defect("states kept for ever", "coreml_states.rs", "o.end(key);", "let _ = (o, key);"),
    Defect(
        "overwritten rows not brought back",
        "coreml_states.rs",
        "o.move_rows(key, rows, &mut bits, true)",
        "o.move_rows(key, rows, &mut bits, false)",
    ),
    Defect(
        "fork without values",
        "coreml_states.rs",
        "fork.replace(self.values()?)?;",
        "fork.replace(None)?;",
    ),
    Defect(
        "states shared by a fork and its original",
        "coreml_states.rs",
        "fork.replace(self.values()?)?;",
        "(fork.key, fork.has_begun) = (self.key, self.has_begun);",
    ),
    Defect(
        "functions kept when their package goes",
        "coreml_package.rs",
        "impl Drop for CoreMlPackage {\n    fn drop(&mut self) {\n        self.release();",
        "impl Drop for CoreMlPackage {\n    fn drop(&mut self) {\n",
    ),
];

/// Runs the task for defects whose names contain one of the words, or for all.
pub fn run(options: TaskOptions) -> Passed {
    let words = options.finish()?;
    let tree = root().join("target/defects");
    copy_tree(&tree)?;
    sim::prepare(&tree)?;
    let log = tree.join("log.txt");
    // The first build takes longer than a test run may.
    let mut build = tests(&tree);
    if !build.arg("--no-run").status()?.success() {
        return Err("the tests cannot be built".into());
    }
    if !passes(&tree, &log)? {
        return Err(format!("the tests fail without any defect: {}", log.display()).into());
    }
    let mut wrong = 0;
    for Defect(name, file, old, new) in &DEFECTS {
        if !words.is_empty() && !words.iter().any(|w| name.contains(w.as_str())) {
            continue;
        }
        let path = tree.join(ENGINE).join(file);
        let text = fs::read_to_string(&path)?;
        if text.matches(old).count() != 1 {
            return Err(format!("{name}: `{old}` is not in {file} exactly once").into());
        }
        fs::write(&path, text.replace(old, new))?;
        let noticed = !passes(&tree, &log)?;
        fs::write(&path, &text)?;
        let report = fs::read_to_string(&log)?;
        let is_right = noticed != UNNOTICED.contains(name) && !report.contains("could not compile");
        wrong += usize::from(!is_right);
        let verdict = match (noticed, is_right) {
            (true, true) => "noticed",
            (false, true) => "not noticed, as known",
            (false, false) => "MISSED",
            (true, false) => "WRONG",
        };
        println!("{verdict:8}  {name}: {}", reason(&report));
    }
    println!("{wrong} of {} defects not as expected", DEFECTS.len());
    Ok(wrong == 0)
}

/// Copies the needed parts of the repository; files that cargo made in the copy stay.
fn copy_tree(tree: &Path) -> io::Result<()> {
    for part in PARTS {
        let (from, to) = (root().join(part), tree.join(part));
        if !from.is_dir() {
            fs::create_dir_all(tree)?;
            fs::copy(from, to)?;
            continue;
        }
        if to.exists() {
            fs::remove_dir_all(&to)?;
        }
        sim::copy_folder(&from, &to)?;
    }
    Ok(())
}

/// Makes the command that builds and runs the backend's tests.
fn tests(tree: &Path) -> Command {
    let mut command = sim::cargo_test(tree, &tree.join("target/build"));
    command.args(["-p", "sim-tests"]);
    command
}

/// Tells whether the tests pass within [`LONGEST`].
fn passes(tree: &Path, log: &Path) -> io::Result<bool> {
    let out = File::create(log)?;
    let tests = tests(tree);
    // `timeout` also ends the processes that cargo has started.
    let mut command = Command::new("timeout");
    command.arg(LONGEST.as_secs().to_string()).arg(tests.get_program()).args(tests.get_args());
    // The longest tests repeat the others' checks for more bundles.
    command.args(["--", "--skip", "every_fixture", "--skip", "every_form"]);
    command.envs(tests.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.current_dir(tests.get_current_dir().unwrap_or(tree));
    Ok(command.stdout(out.try_clone()?).stderr(out).stdin(Stdio::null()).status()?.success())
}

/// Returns the first line that says why a test failed, at most 140 characters.
fn reason(report: &str) -> String {
    let mut lines = report.lines();
    let found = lines.find(|l| l.contains("panicked at") || l.contains("error:") || l.contains("signal:"));
    let line = match found {
        Some(line) if line.contains("panicked at") => lines.next().unwrap_or(line),
        Some(line) => line,
        None => "",
    };
    line.chars().take(140).collect()
}
