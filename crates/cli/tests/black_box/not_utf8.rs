//! Paths that are not UTF-8, in arguments and in the environment: documents are whole, and nothing panics.

use crate::common::{build, finish, fixture};
use serde_json::Value;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::Command;

/// Makes a name that is not UTF-8.
fn odd(name: &str) -> OsString {
    let mut odd = OsString::from(name);
    odd.push(OsStr::from_bytes(b"\xff"));
    odd
}

/// A folder with a name that is not UTF-8, which is also the home.
struct Place {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(odd("home"));
        std::fs::create_dir_all(path.join(".cache")).unwrap();
        Place { _dir: dir, path }
    }

    fn run(&self, args: &[&OsStr]) -> (i32, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_anemoe"));
        command.args(args).current_dir(&self.path).env("HOME", &self.path).env("TMPDIR", &self.path);
        let ended = finish(command.env_remove("XDG_CACHE_HOME").env_remove("HF_HOME").output().unwrap());
        assert!(!ended.2.contains("panicked"), "{args:?}\n{}", ended.2);
        ended
    }

    /// Runs a command that has to end with this status, and returns its document.
    fn json(&self, status: i32, args: &[&OsStr]) -> Value {
        let (code, out, err) = self.run(&[args, &["--json".as_ref()]].concat());
        assert_eq!(code, status, "{args:?}\n{out}\n{err}");
        serde_json::from_str(&out).unwrap_or_else(|e| panic!("{args:?}: {e}\n{out}"))
    }
}

fn words(text: &str) -> Vec<&OsStr> {
    text.split(' ').map(OsStr::new).collect()
}

#[test]
fn a_home_need_not_be_text() {
    let place = Place::new();
    let found = place.json(0, &words("doctor --quick"));
    assert!(
        found["disks"].as_array().unwrap().iter().any(|d| d["path"].as_str().unwrap().contains("anemoe"))
    );
    let offline = place.json(2, &words("inspect hf:a/b --offline"));
    let said = offline["error"]["message"].as_str().unwrap();
    assert!(said.contains("huggingface/hub") && !said.contains("set HF_HOME"), "{said}");
}

#[test]
fn every_command_takes_such_paths_and_prints_a_whole_document() {
    let place = Place::new();
    let (bundle, out) = (odd("b.anemoe"), odd("out"));
    let dir = tempfile::tempdir().unwrap();
    build(&fixture("tiny-zaya"), &dir.path().join("b"), &["--tokens", "1"]);
    std::fs::rename(dir.path().join("b"), place.path.join(&bundle)).unwrap();
    for (command, options) in [
        ("inspect", ""),
        ("check", ""),
        ("report", ""),
        ("journal", ""),
        ("predict-speed", ""),
        ("generate", "--prompt-ids 2,5 --max-new 2"),
        ("bench", "--decode 2 --context 4 --prefill 4 --verify-tokens 0 --repetitions 1"),
        ("push", "store --name x"),
    ] {
        let mut args: Vec<&OsStr> = vec![command.as_ref(), &bundle];
        args.extend(options.split_whitespace().map(OsStr::new));
        place.json(0, &args);
    }
    place.json(0, &["pull".as_ref(), "store".as_ref(), &out, "--name".as_ref(), "x".as_ref()]);
    std::fs::remove_dir_all(place.path.join(&out)).unwrap();
    place.json(0, &["man".as_ref(), "--out".as_ref(), &out]);
    place.json(2, &["import-report".as_ref(), &odd("none.zip"), "--evidence".as_ref(), &odd("e")]);
    let recipe = place.path.join(odd("r.toml"));
    let text = format!(
        "title = 't'\nintent = 'i'\nsource = '{}'\ngates = ['plan', 'build']\n[options]\nbuild = ['--skip-gates']\n\
         [[builds]]\nname = 'a'\noptions = ['--quant=lut4', '--tokens=1']\n\
         [[figures]]\nfigure = 'bundle_mb'\nunit = 'MB'\nbook = '>0'\nfrom = 'x'\n",
        fixture("tiny-zaya").display()
    );
    std::fs::write(&recipe, text).unwrap();
    place.json(0, &["reproduce".as_ref(), recipe.as_os_str(), "--out".as_ref(), &odd("run")]);
    assert!(place.path.join(odd("run")).join("a.anemoe/chain.json").is_file());
}
