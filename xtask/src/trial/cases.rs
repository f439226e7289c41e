//! Commands that a trial runs, and the inputs that they read.

use super::process;
use super::snapshot::copy;
use crate::files::tiny::{self, as_f32, gguf_of};
use crate::seeds;
use crate::task::root;
use anemoe_npz::{Array, write_npy};
use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Commands and their arguments.
const CASES: &str = include_str!("cases.txt");
/// Commands that add to the journal of the bundle that they read.
const JOURNALED: [&str; 5] = ["bench", "check", "journal", "trace", "validate"];

/// A command with valid inputs. Paths are relative to the scratch folder; `in/` has copies of the inputs.
#[derive(Clone, Debug)]
pub struct Case {
    /// Name of the sub-command.
    pub command: &'static str,
    /// Arguments after the sub-command.
    pub args: Vec<&'static str>,
    /// Options that take numbers or names, to which hostile values are given.
    pub options: Vec<&'static str>,
}

impl Case {
    /// Parses all cases.
    pub fn all() -> Vec<Case> {
        let (mut command, mut options) = ("", Vec::new());
        let mut all = Vec::new();
        for line in CASES.lines().filter(|line| !line.starts_with('#')) {
            let mut words = line.split_whitespace();
            if line.starts_with(' ') {
                all.push(Case { command, args: words.collect(), options: options.clone() });
            } else {
                command = words.next().unwrap_or_default();
                options = words.collect();
            }
        }
        all
    }

    /// Returns the names of the inputs in the pool.
    pub fn inputs(&self) -> impl Iterator<Item = &'static str> {
        let paths = self.args.iter().filter_map(|arg| arg.strip_prefix("in/"));
        paths.map(|path| path.split(['/', ':']).next().unwrap_or_default())
    }

    /// Returns the first output.
    pub fn output(&self) -> Option<&'static str> {
        self.args.iter().copied().find(|arg| arg.starts_with("out/"))
    }

    /// Returns the paths that the command may create or change.
    pub fn allowed(&self) -> Vec<PathBuf> {
        let is_output = |arg: &&&str| arg.starts_with("out/") || self.command == "assemble";
        let mut all: Vec<PathBuf> = self.args.iter().filter(is_output).map(PathBuf::from).collect();
        if JOURNALED.contains(&self.command) {
            let bundles = self.inputs().filter(|input| input.ends_with(".anemoe"));
            all.extend(bundles.map(|bundle| Path::new("in").join(bundle).join("journal.jsonl")));
        }
        if self.command == "pull" {
            // Files of a bundle that did not arrive completely.
            all.push("out/.p.anemoe.anemoe-pull".into());
        }
        all
    }
}

/// Valid inputs, made once.
pub struct InputPool {
    pub folder: PathBuf,
}

impl InputPool {
    /// Makes every input in a folder; some are made by the binary.
    pub fn make(folder: &Path, binary: &Path) -> Result<InputPool, Box<dyn Error>> {
        fs::create_dir_all(folder.join("tmp"))?;
        let at = |name: &str| folder.join(name);
        let fixtures = root().join("fixtures");
        for (name, fixture) in
            [("gemma", "tiny-gemma4-moe-text"), ("zaya", "tiny-zaya"), ("sharded", "tiny-gemma4-moe")]
        {
            copy(&fixtures.join(fixture), &at(name))?;
            fs::remove_file(at(name).join("golden.npz"))?;
        }
        fs::write(at("gemma/tokenizer.json"), seeds::tokenizer(512)?.to_string())?;
        copy(&fixtures.join("tiny-gemma4-moe-text/golden.npz"), &at("golden.npz"))?;
        copy(&fixtures.join("tiny-zaya/golden.npz"), &at("golden-zaya.npz"))?;
        let gguf = gguf_of(&fixtures.join("tiny-gemma4-moe"), tiny::Options { fused: true, encode: as_f32 });
        fs::write(at("tiny.gguf"), gguf.write())?;
        let tests = root().join("crates/runtime/tests/interop");
        for name in ["functions_s", "kv_state_s", "index_s", "norms_s", "lut4_g32", "conv_mix_s"] {
            copy(&tests.join(name).join(format!("{name}.mlpackage")), &at(&format!("{name}.mlpackage")))?;
            let inputs = ["inputs.npz", "step0.npz"].map(|i| tests.join(name).join(i));
            let inputs = inputs.iter().find(|i| i.exists()).ok_or("inputs of a package")?;
            copy(inputs, &at(&format!("{name}.npz")))?;
        }
        copy(&root().join("crates/gates/src/residency/outcomes.tsv"), &at("known.tsv"))?;
        fs::write(at("text.txt"), "Once upon a time there was a small model that ran on a chip.\n")?;
        let values: Vec<f32> = (0..64 * 64).map(|i| ((i * 37 % 101) as f32 - 50.0) / 64.0).collect();
        write_npy(&at("a.npy"), &Array { shape: vec![64, 64], data: values.into() })?;
        fs::write(at("report.json"), REPORT)?;
        let pool = InputPool { folder: folder.to_path_buf() };
        for command in [
            "build gemma -o gemma.anemoe --skip-gates --tokens 1,4 --quant fp16",
            "build zaya -o zaya.anemoe --skip-gates --tokens 1 --quant fp16",
            "build gemma -o halves.anemoe --skip-gates --tokens 1 --quant fp16 --shard 0/2",
            "build gemma -o halves.anemoe --skip-gates --tokens 1 --quant fp16 --shard 1/2",
            "calibrate gemma --text text.txt --context 8 --max-tokens 24 -o importance.npz",
            "push gemma.anemoe store --name a",
        ] {
            pool.run(binary, command)?;
        }
        Ok(pool)
    }

    fn run(&self, binary: &Path, command: &str) -> Result<(), Box<dyn Error>> {
        let args: Vec<OsString> = command.split(' ').map(OsString::from).collect();
        let logs = self.folder.join("tmp");
        if process::drops_rights() {
            super::snapshot::give(&self.folder, process::NOBODY)?;
        }
        let ran = process::run(binary, &args, &self.folder, &logs, Duration::from_secs(60))?;
        if ran.status.success() {
            return Ok(());
        }
        Err(format!("{command}: {}", String::from_utf8_lossy(&ran.stderr)).into())
    }
}

/// A plan report for the package `functions_s`.
const REPORT: &str = r#"{"format":1,"os":"macOS 26.0.1","chip":"Apple M4 Max","compute_units":"cpuAndNeuralEngine",
"generator":"anemoe","plans":[{"package":"functions_s","function":"main","ops":[
{"name":"y","type":"ios18.mul","preferred":"ane","supported":["ane","gpu","cpu"],"cost":0.5}]}]}"#;
