//! `hf:OWNER/NAME` wherever a checkpoint is named, with a server in this process for the hub.

mod common;
#[path = "../../hub/tests/common/mod.rs"]
mod hub_server;

use common::{contents, finish, fixture};
use hub_server::{COMMIT, Reply, TestRepository, TestServer};
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
        let mut command = common::anemoe(args);
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
    // This checkpoint has no tokenizer: whether the hub has one of this commit is asked.
    machine.passes(&["plan", &format!("{SPEC}@{COMMIT}")]);
    assert_eq!(machine.server.asked_for("/resolve/").len(), fetched);
    let (code, _, err) = machine.run(&["plan", "hf:someone/else", "--offline"]);
    assert_eq!(code, 2);
    assert!(err.contains("the hub is not asked") && err.contains("revision main"), "{err}");
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
