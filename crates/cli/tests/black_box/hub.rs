//! `hf:OWNER/NAME` as a checkpoint, with a server in this process for the hub.

use crate::common::*;
use crate::hub_server::{COMMIT, Reply, TestRepository, TestServer};
use std::process::Command;

const SPEC: &str = "hf:someone/tiny-zaya";

struct Machine {
    server: TestServer,
    dir: Place,
}

impl Machine {
    fn new(repository: TestRepository) -> Machine {
        let server = TestServer::start(move |asked| match asked.header("authorization") {
            Some("Bearer hf_secret") => repository.answer(asked),
            _ => Reply::new(401, ""),
        });
        Machine { server, dir: folder() }
    }

    fn command(&self, line: impl AsRef<str>) -> Command {
        let mut command = anemoe(line);
        command.current_dir(&self.dir).env("HF_HOME", self.dir.join("home").as_os_str());
        command.env("HF_ENDPOINT", &self.server.address).env("HF_TOKEN", "hf_secret");
        command.env_remove("HF_HUB_OFFLINE");
        command
    }

    fn passes(&self, line: impl AsRef<str>) -> String {
        let (code, out, err) = finish(&mut self.command(&line));
        assert_eq!(code, 0, "{}\n{out}\n{err}", line.as_ref());
        assert!(!(out.clone() + &err).contains("hf_secret"));
        out
    }

    fn refuses(&self, line: impl AsRef<str>, says: &[&str]) {
        refuses(&mut self.command(line), says);
    }
}

#[test]
fn a_checkpoint_of_the_hub_is_built_as_one_in_a_folder() {
    let machine = Machine::new(TestRepository::of(&fixture("tiny-zaya")));
    let build = |checkpoint: &str, out: &str| {
        machine.passes(format!("build {checkpoint} -o {out} --skip-gates --no-journal --tokens 1"));
        contents(&machine.dir.join(out))
    };
    assert!(build(SPEC, "hub.anemoe") == build(&fixture("tiny-zaya").to_string(), "folder.anemoe"));
    let fetched = machine.server.asked_for("/resolve/").len();
    // The cache serves every other command, also without the server.
    machine.passes(format!("inspect {SPEC}"));
    machine.passes(format!("forms {SPEC}"));
    machine.passes(format!("golden {SPEC} --prompt-ids 1,2 --decode 1 -o g.npz"));
    assert_eq!(machine.server.asked_for("/resolve/").len(), fetched);
    let asked = machine.server.asked().len();
    machine.passes(format!("plan {SPEC} --offline"));
    assert_eq!(machine.server.asked().len(), asked);
    // The checkpoint has no tokenizer: the hub is asked whether this commit has one.
    machine.passes(format!("plan {SPEC}@{COMMIT}"));
    // Parts remember the commit; the gates of the whole run on the checkpoint.
    for part in ["0/2", "1/2"] {
        machine.passes(format!("build {SPEC} -o parts.anemoe --shard {part} --tokens 1"));
    }
    let document = machine.passes("assemble parts.anemoe --json");
    assert!(document.contains("\"golden\""), "{document}");
    assert_eq!(machine.server.asked_for("/resolve/").len(), fetched);
    machine.refuses("plan hf:someone/else --offline", &["the hub is not asked", "revision main"]);
}

/// Counts the bytes of weights that were asked for.
fn weights_asked(machine: &Machine, size: usize) -> usize {
    let asked = machine.server.asked_for(".safetensors");
    let weights = asked.iter().filter(|a| !a.path.ends_with(".json"));
    weights.map(|a| a.last().map_or(size, |last| last + 1) - a.from()).sum()
}

#[test]
fn looking_at_a_checkpoint_takes_headers_and_small_tensors() {
    let (local, remote) = (small().to_string(), "hf:someone/small-gemma4");
    let size = small().join("model.safetensors").metadata().unwrap().len() as usize;
    let machine = Machine::new(TestRepository::of(&small()));
    let snapshot = machine.dir.join("home/hub/models--someone--small-gemma4/snapshots").join(COMMIT);
    // A forecast names the source of its shapes.
    let same = |command: &str, options: &str| {
        let of = |checkpoint: &str| {
            machine.passes(format!("{command} {checkpoint} --json {options}")).replace(checkpoint, "")
        };
        assert_eq!(of(remote), of(&local), "{command}");
    };
    for command in ["inspect", "plan", "forms"] {
        same(command, "");
    }
    same("predict-speed", "--quant lut4");
    let looked = weights_asked(&machine, size);
    assert!(looked > 0 && looked < size / 10, "{looked} of {size} bytes");
    assert!(snapshot.join("config.json").is_file() && !snapshot.join("model.safetensors").exists());
    // Without the server, the fetched parts suffice for a plan; an error says that the rest is missing.
    let asked = machine.server.asked().len();
    machine.passes(format!("plan {remote} --offline"));
    let golden = format!("golden {remote} --offline --prompt-ids 1 -o g.npz");
    machine.refuses(golden, &["model.safetensors is not in"]);
    assert_eq!(machine.server.asked().len(), asked);
    // The weights are fetched for a plan that measures them.
    same("plan", "--quant int8-tensor");
    assert_eq!(weights_asked(&machine, size), looked + size);
    assert!(snapshot.join("model.safetensors").exists());
}
