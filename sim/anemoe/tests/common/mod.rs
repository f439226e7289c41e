//! Runs the program that is built against the fake.
#![allow(dead_code)]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A bundle's checkpoint of each family.
pub const TINY: [&str; 2] = ["tiny-gemma4-moe", "tiny-zaya"];

/// Folders of one test, faults included.
pub struct Sandbox {
    pub dir: TempDir,
}

impl Sandbox {
    pub fn new() -> Sandbox {
        Sandbox { dir: tempfile::tempdir().unwrap() }
    }

    /// A path in the sandbox.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The program, with a cache of its own.
    pub fn anemoe(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_anemoe"));
        command.args(args).env("XDG_CACHE_HOME", self.path("cache")).env("TMPDIR", self.path(""));
        let faults = self.path("faults");
        if faults.exists() {
            command.env("FAKE_COREML_FAULTS", faults);
        }
        command
    }

    /// Plants faults from now on, a line each; none with an empty text.
    pub fn plant(&self, lines: &str) {
        std::fs::write(self.path("faults"), lines).unwrap();
    }

    /// Runs it and gives its exit status, standard output and standard error.
    pub fn run(&self, args: &[&str]) -> (i32, String, String) {
        let output = self.anemoe(args).output().unwrap();
        let text = |b: Vec<u8>| String::from_utf8_lossy(&b).into_owned();
        (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
    }

    /// Runs it with `--json`, expecting this exit status, and gives the document.
    pub fn json(&self, expected: i32, args: &[&str]) -> Value {
        let (code, out, err) = self.run(&[args, &["--json"]].concat());
        assert_eq!(code, expected, "{args:?}\n{out}\n{err}");
        serde_json::from_str(&out).unwrap_or_else(|e| panic!("{args:?}: {e}\n{out}"))
    }

    /// Runs it expecting exit status 2, no panic, and each of `says` in the message.
    pub fn refused(&self, args: &[&str], says: &[&str]) {
        let (code, out, err) = self.run(args);
        assert_eq!(code, 2, "{args:?}\n{out}\n{err}");
        assert!(!err.contains("panicked"), "{args:?}\n{err}");
        for text in says {
            assert!(err.contains(text), "{args:?}: `{text}` is not in\n{err}");
        }
    }

    /// Builds a bundle of a fixture, without gates.
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
