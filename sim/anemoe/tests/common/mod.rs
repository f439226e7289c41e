//! Runs the program that is built with the fake Core ML.
#![allow(dead_code)]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Fixtures of checkpoints, one of each family.
pub const TINY: [&str; 2] = ["tiny-gemma4-moe", "tiny-zaya"];

/// Folder of one test: bundles, caches, planted faults.
pub struct Sandbox {
    pub dir: TempDir,
}

impl Sandbox {
    pub fn new() -> Sandbox {
        Sandbox { dir: tempfile::tempdir().unwrap() }
    }

    /// Returns a path in the sandbox.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Makes a command of the program with the sandbox's cache, temporary folder and faults.
    pub fn anemoe(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_anemoe"));
        command.args(args).env("XDG_CACHE_HOME", self.path("cache")).env("TMPDIR", self.path(""));
        let faults = self.path("faults");
        if faults.exists() {
            command.env("FAKE_COREML_FAULTS", faults);
        }
        command
    }

    /// Plants faults, a line each, that apply from now on; an empty text plants none.
    pub fn plant(&self, lines: &str) {
        std::fs::write(self.path("faults"), lines).unwrap();
    }

    /// Runs the program. Returns its exit status, standard output and standard error.
    pub fn run(&self, args: &[&str]) -> (i32, String, String) {
        let output = self.anemoe(args).output().unwrap();
        let text = |b: Vec<u8>| String::from_utf8_lossy(&b).into_owned();
        (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
    }

    /// Runs the program with `--json`, checks its exit status and returns the document.
    pub fn json(&self, expected: i32, args: &[&str]) -> Value {
        let (code, out, err) = self.run(&[args, &["--json"]].concat());
        assert_eq!(code, expected, "{args:?}\n{out}\n{err}");
        serde_json::from_str(&out).unwrap_or_else(|e| panic!("{args:?}: {e}\n{out}"))
    }

    /// Runs the program and checks that it ends with status 2, without a panic, and with each of `says` in its message.
    pub fn refused(&self, args: &[&str], says: &[&str]) {
        let (code, out, err) = self.run(args);
        assert_eq!(code, 2, "{args:?}\n{out}\n{err}");
        assert!(!err.contains("panicked"), "{args:?}\n{err}");
        for text in says {
            assert!(err.contains(text), "{args:?}: `{text}` is not in\n{err}");
        }
    }

    /// Builds a bundle of a fixture, without gates. Returns its path.
    pub fn build(&self, fixture: &str, options: &[&str]) -> PathBuf {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(fixture);
        let bundle = self.path(&format!("{fixture}.anemoe"));
        let fixed = ["--quant", "lut4", "--tokens", "1,8", "--experts-per-shard", "2", "--skip-gates"];
        let paths = ["build", source.to_str().unwrap(), "-o", bundle.to_str().unwrap()];
        let args = [&paths[..], &fixed, options].concat();
        let (code, out, err) = self.run(&args);
        assert_eq!(code, 0, "{args:?}\n{out}\n{err}");
        bundle
    }
}
