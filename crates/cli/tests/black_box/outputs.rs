//! Outputs replace no input, no pipe and no file of a bundle, even with `--force`, and other files only with it.
#![cfg(unix)]

use crate::common::*;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

fn pipe(path: impl AsRef<Path>) {
    let _ = fs::remove_file(&path);
    assert!(Command::new("mkfifo").arg(path.as_ref()).status().unwrap().success());
}

/// Makes a command that ends within 30 seconds, since a wait for the other end of a pipe never ends.
fn shortly(line: impl AsRef<str>) -> Command {
    in_shell("exec timeout 30 \"$0\" \"$@\"", line)
}

fn package() -> Place {
    root("crates/runtime/tests/suite/lut4_axis1/lut4_axis1.mlpackage")
}

#[test]
fn no_input_of_any_command_is_replaced() {
    let (dir, small, tiny) = (folder(), small(), fixture("tiny-gemma4-moe-text"));
    let (input, link, hard) = (dir.join("in.npz"), dir.join("link.npz"), dir.join("hard.npz"));
    fs::write(&input, "theirs").unwrap();
    symlink(&input, &link).unwrap();
    fs::hard_link(&input, &hard).unwrap();
    let unchanged = || assert_eq!(fs::read_to_string(&input).unwrap(), "theirs");
    for out in [&input, &link, &hard] {
        for line in [
            format!("golden {small} --prompt-file {input} -o {out}"),
            format!("calibrate {small} --text {input} -o {out}"),
            format!("plan {tiny} --importance {input} --out {out}"),
            format!("plan {tiny} --auto-text {input} --out {out}"),
            format!("quantize {dir}/w.npy --importance {input} -o {out}"),
            format!("predict {} --inputs {dir}/other.npz {input} --outputs {out}", package()),
        ] {
            refused(format!("{line} --force"), &["belongs to an input"]);
            unchanged();
        }
    }
    // A file on standard input is an input.
    let mut command = anemoe(format!("golden {small} -p - -o {input} --force"));
    refuses(command.stdin(fs::File::open(&input).unwrap()), &["belongs to an input"]);
    unchanged();
}

#[test]
fn outputs_are_replaced_only_with_force() {
    let (dir, model) = (folder(), fixture("tiny-gemma4-moe-text"));
    let quantize = format!("quantize {model}/model.safetensors:model.layers.1.self_attn.q_proj.weight -o");
    let predict = format!("predict {} --inputs {} --outputs", package(), package().join("../inputs.npz"));
    for line in [
        format!("{quantize} {dir}/a.npy"),
        format!("{quantize} {dir}/a.npz"),
        format!("{quantize} {dir}/a.mlpackage"),
        format!("golden {model} --prompt-ids 1,2 --decode 1 -o {dir}/g.npz"),
        format!("plan {model} --out {dir}/p.json"),
        format!("{predict} {dir}/o{{}}.npz"),
    ] {
        passes(&line);
        let before = contents(&dir);
        refused(&line, &["it exists already; give --force"]);
        assert_eq!(contents(&dir), before);
        passes(format!("{line} --force"));
    }
    assert!(dir.join("o0.npz").exists());
    let before = fs::read(dir.join("a.npy")).unwrap();
    refused(format!("quantize {dir}/a.npy -o {dir}/a.npy --force"), &["belongs to an input"]);
    assert_eq!(fs::read(dir.join("a.npy")).unwrap(), before);
    // A folder that is no package is not replaced by one.
    fs::create_dir(dir.join("photos.mlpackage")).unwrap();
    fs::write(dir.join("photos.mlpackage/a.jpg"), "theirs").unwrap();
    refused(format!("{quantize} {dir}/photos.mlpackage --force"), &["it exists and is not a package"]);
    assert!(dir.join("photos.mlpackage/a.jpg").exists());
}

#[test]
fn pipes_are_no_outputs() {
    let (dir, tiny) = (folder(), fixture("tiny-gemma4-moe-text"));
    let bundle = built("tiny-gemma4-moe-text", "--no-journal");
    let tensor = format!("{tiny}/model.safetensors:model.layers.1.self_attn.q_proj.weight");
    for name in ["o.npz", "o.npy", "o.json"] {
        pipe(dir.join(name));
    }
    for line in [
        format!("quantize {tensor} -o {dir}/o.npz"),
        format!("quantize {tensor} -o {dir}/o.npy"),
        format!("golden {tiny} --prompt-ids 1 --decode 1 -o {dir}/o.npz"),
        format!("plan {tiny} --quant lut4 --out {dir}/o.json"),
        format!("bench {bundle} --no-journal --context 4 --decode 1 --prefill 0 --save {dir}/o.json"),
    ] {
        for force in ["", "--force"] {
            let mut command = shortly(format!("{line} {force}"));
            refuses(&mut command, &["a pipe, where a regular file is expected"]);
        }
    }
    // A pipe that the shell opened is written to under its own name.
    let plan = format!("plan {tiny} --quant lut4 --out /dev/stdout");
    let (_, out, err) = finish(in_shell("\"$0\" \"$@\" | head -c 1", plan).stdin(Stdio::null()));
    assert!(!out.is_empty(), "{err}");
}

#[test]
fn files_of_a_bundle_are_no_outputs() {
    let (bundle, tiny) = (built("tiny-gemma4-moe-text", "--no-journal"), fixture("tiny-gemma4-moe-text"));
    let before = contents(&bundle);
    let names = "chain.json embed.bin tokenizer.json shards/x.npz shards/L00.attn.mlpackage/Manifest.json";
    for name in names.split(' ') {
        let says = ["is a file of the", "choose another name"];
        refused(format!("golden {tiny} --prompt-ids 1 -o {bundle}/{name} --force"), &says);
        refused(format!("plan {tiny} --out {bundle}/{name} --force"), &says);
    }
    refused(format!("report {bundle} -o {bundle}/chain.json --force"), &["belongs to an input"]);
    assert_eq!(contents(&bundle), before);
    // Other names in the bundle's folder are the user's.
    passes(format!("plan {tiny} --out {bundle}/plan.json"));
}
