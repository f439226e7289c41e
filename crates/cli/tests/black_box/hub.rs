//! `hf:OWNER/NAME` as a checkpoint, with a server in this process for the hub.

use crate::common::{contents, finish, fixture};
use crate::hub_server::{COMMIT, Reply, TestRepository, TestServer};
use std::path::Path;

const SPEC: &str = "hf:someone/tiny-zaya";

struct Machine {
    server: TestServer,
    dir: tempfile::TempDir,
}

impl Machine {
    fn new(repository: TestRepository) -> Machine {
        let server = TestServer::start(move |asked| match asked.header("authorization") {
            Some("Bearer hf_secret") => repository.answer(asked),
            _ => Reply::new(401, ""),
        });
        Machine { server, dir: tempfile::tempdir().unwrap() }
    }

    fn run(&self, args: &[&str]) -> (i32, String, String) {
        let mut command = crate::common::anemoe(args);
        command.current_dir(self.dir.path()).env("HF_HOME", self.dir.path().join("home"));
        command
            .env("HF_ENDPOINT", &self.server.address)
            .env("HF_TOKEN", "hf_secret")
            .env_remove("HF_HUB_OFFLINE");
        finish(command.output().unwrap())
    }

    fn passes(&self, args: &[&str]) -> String {
        let (code, out, err) = self.run(args);
        assert_eq!(code, 0, "{args:?}\n{out}\n{err}");
        assert!(!(out.clone() + &err).contains("hf_secret"));
        out
    }
}

#[test]
fn a_checkpoint_of_the_hub_is_built_as_one_in_a_folder() {
    let machine = Machine::new(TestRepository::of(&fixture("tiny-zaya")));
    let local = fixture("tiny-zaya");
    let options = ["--skip-gates", "--no-journal", "--tokens", "1"];
    let build = |checkpoint: &str, out: &str| {
        machine.passes(&[&["build", checkpoint, "-o", out][..], &options].concat());
    };
    build(SPEC, "hub.anemoe");
    build(local.to_str().unwrap(), "folder.anemoe");
    let bundle = |name: &str| contents(&machine.dir.path().join(name));
    assert!(bundle("hub.anemoe") == bundle("folder.anemoe"));
    let fetched = machine.server.asked_for("/resolve/").len();
    // The cache serves every other command, also without the server.
    machine.passes(&["inspect", SPEC]);
    machine.passes(&["forms", SPEC]);
    machine.passes(&["golden", SPEC, "--prompt-ids", "1,2", "--decode", "1", "-o", "g.npz"]);
    assert_eq!(machine.server.asked_for("/resolve/").len(), fetched);
    let asked = machine.server.asked().len();
    machine.passes(&["plan", SPEC, "--offline"]);
    assert_eq!(machine.server.asked().len(), asked);
    // The checkpoint has no tokenizer: the hub is asked whether this commit has one.
    machine.passes(&["plan", &format!("{SPEC}@{COMMIT}")]);
    assert_eq!(machine.server.asked_for("/resolve/").len(), fetched);
    let (code, _, err) = machine.run(&["plan", "hf:someone/else", "--offline"]);
    assert_eq!(code, 2);
    assert!(err.contains("the hub is not asked") && err.contains("revision main"), "{err}");
}

/// Counts the bytes of weights that were asked for.
fn weights_asked(machine: &Machine, size: usize) -> usize {
    let asked = machine.server.asked_for(".safetensors");
    let weights = asked.iter().filter(|a| !a.path.ends_with(".json"));
    weights.map(|a| a.last().map_or(size, |last| last + 1) - a.from()).sum()
}

#[test]
fn looking_at_a_checkpoint_takes_headers_and_small_tensors() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/small-gemma4");
    let size = folder.join("model.safetensors").metadata().unwrap().len() as usize;
    let machine = Machine::new(TestRepository::of(&folder));
    let (local, remote) = (folder.to_str().unwrap(), "hf:someone/small-gemma4");
    let plan = ["--quant", "lut4", "--json"];
    for args in [
        vec!["inspect", "--json"],
        [&["plan"][..], &plan].concat(),
        vec!["forms", "--json"],
        vec!["predict-speed", "--quant", "lut4", "--json"],
    ] {
        let of = |checkpoint: &str| machine.passes(&[&[args[0], checkpoint], &args[1..]].concat());
        // A forecast names the source of its shapes.
        let document = of(remote).replace(remote, "");
        assert_eq!(document, of(local).replace(local, ""), "{args:?}");
    }
    let looked = weights_asked(&machine, size);
    assert!(looked > 0 && looked < size / 10, "{looked} of {size} bytes");
    assert!(!folder_has_weights(&machine));
    // Without the server, the fetched parts suffice for a plan; an error says that the rest is missing.
    let asked = machine.server.asked().len();
    machine.passes(&[&["plan", remote, "--offline"][..], &plan].concat());
    let (code, _, err) = machine.run(&["golden", remote, "--offline", "--prompt-ids", "1", "-o", "g.npz"]);
    assert!(code == 2 && err.contains("model.safetensors is not in"), "{err}");
    assert_eq!(machine.server.asked().len(), asked);
    // The weights are fetched for a plan that measures them.
    let measured = ["--quant", "int8-tensor", "--json"];
    let document = machine.passes(&[&["plan", remote][..], &measured].concat());
    assert_eq!(document, machine.passes(&[&["plan", local][..], &measured].concat()));
    assert_eq!(weights_asked(&machine, size), looked + size);
    assert!(folder_has_weights(&machine));
}

/// Tells whether the snapshot has a file of weights.
fn folder_has_weights(machine: &Machine) -> bool {
    let home = machine.dir.path().join("home/hub/models--someone--small-gemma4/snapshots").join(COMMIT);
    assert!(home.join("config.json").is_file());
    home.join("model.safetensors").exists()
}

#[test]
fn headers_that_lie_are_refused_by_name() {
    let whole = std::fs::read(fixture("tiny-zaya").join("model.safetensors")).unwrap();
    for (bytes, says) in [
        ([&(1u64 << 60).to_le_bytes()[..], &whole[8..]].concat(), "a length of 1152921504606846976 bytes"),
        (whole[..whole.len() - 1].to_vec(), "the file is cut off"),
        (whole[..100].to_vec(), "but only 92 follow"),
    ] {
        let mut repository = TestRepository::of(&fixture("tiny-zaya"));
        repository.files.retain(|(name, _)| name != "model.safetensors");
        repository.files.push(("model.safetensors".into(), bytes));
        let machine = Machine::new(repository);
        let (code, _, err) = machine.run(&["inspect", SPEC]);
        assert!(code == 2 && err.contains("model.safetensors") && err.contains(says), "{err}");
    }
}

#[test]
fn parts_remember_the_commit() {
    let machine = Machine::new(TestRepository::of(&fixture("tiny-zaya")));
    for part in ["0/2", "1/2"] {
        machine.passes(&["build", SPEC, "-o", "parts.anemoe", "--shard", part, "--tokens", "1"]);
    }
    let document = machine.passes(&["assemble", "parts.anemoe", "--json"]);
    // The gates of the whole ran on the checkpoint.
    assert!(document.contains("\"golden\""), "{document}");
    assert!(Path::new(&machine.dir.path().join("parts.anemoe/chain.json")).is_file());
}

#[test]
fn models_that_are_not_known_and_names_that_are_none_are_refused() {
    let files =
        [("config.json", br#"{"model_type": "llama"}"#.to_vec()), ("model.safetensors", vec![0; 4000])];
    let files = files.map(|(n, b)| (n.to_string(), b)).to_vec();
    let machine = Machine::new(TestRepository { files, bare: false });
    for command in ["plan", "inspect", "forms"] {
        let (code, _, err) = machine.run(&[command, "hf:a/b"]);
        assert_eq!(code, 2);
        assert!(err.contains("model_type `llama`"), "{err}");
    }
    assert!(machine.server.asked_for("safetensors").is_empty());
    for wrong in ["hf:a", "hf:../../etc", "hf:a/b@../../x"] {
        let (code, _, err) = machine.run(&["inspect", wrong]);
        assert!(code == 2 && err.contains("is not hf:OWNER/NAME[@REV]"), "{err}");
    }
    let (code, _, err) = machine.run(&["generate", "hf:a/b", "--prompt-ids", "1"]);
    assert!(code == 2 && err.contains("anemoe build hf:a/b -o b.anemoe"), "{err}");
}
