//! Messages that name the kind of a path, differences, and the next command; prompts; names that are not UTF-8; signals.

use crate::common::*;
use serde_json::Value;
use std::fs;

#[test]
fn a_path_of_another_kind_is_named_with_the_next_command() {
    let (dir, bundle) = (folder(), built("tiny-gemma4-moe-text", "--no-journal"));
    copy(&fixture("tiny-gemma4-moe"), &dir.join("my models/tiny"));
    for name in ["empty", "lora", "begun/.anemoe-build"] {
        fs::create_dir_all(dir.join(name)).unwrap();
    }
    for (name, text) in [
        ("m.gguf", "GGUF"),
        ("notes.txt", "x"),
        ("lora/adapter_config.json", "{}"),
        ("begun/.anemoe-build/plan.json", "{}"),
    ] {
        fs::write(dir.join(name), text).unwrap();
    }
    let golden = fixture("tiny-gemma4-moe/golden.npz");
    let package = bundle.join("shards/L00.attn.mlpackage");
    for (path, says) in [
        (
            dir.join("my models/tiny"),
            &["a Hugging Face checkpoint", "anemoe build '", "/my models/tiny' -o tiny.anemoe"][..],
        ),
        (dir.join("my models"), &["a folder of checkpoints", "my models/tiny"]),
        (dir.join("m.gguf"), &["a GGUF file", "anemoe build", "-o m.anemoe"]),
        (dir.join("notes.txt"), &["a file of another kind", "chain.json"]),
        (dir.join("empty"), &["an empty folder", "anemoe build CHECKPOINT -o"]),
        (dir.join("begun"), &["an unfinished bundle", "repeat its build command"]),
        (package, &["a .mlpackage", "anemoe predict"]),
        (dir.join("none"), &["no such file or folder", "anemoe build CHECKPOINT -o"]),
    ] {
        for line in [
            "generate @PATH --prompt-ids 1",
            "validate @PATH --golden @GOLDEN",
            "trace @PATH --golden @GOLDEN",
            "bench @PATH",
            "journal @PATH",
            "assemble @PATH",
            "check @PATH",
        ] {
            let is_begun =
                says[0] == "an unfinished bundle" && ["journal @PATH", "assemble @PATH"].contains(&line);
            if !is_begun && (says[0] != "a .mlpackage" || line != "check @PATH") {
                let line =
                    line.replace("@PATH", &format!("'{path}'")).replace("@GOLDEN", &golden.to_string());
                refused(line, says);
            }
        }
        let error = &json(2, format!("generate '{path}' --prompt-ids 1"))["error"];
        assert!(error["path"] == path.to_string() && text(&error["message"]).contains(says[0]), "{error}");
    }
    for (line, says) in [
        (
            "generate 'synthetic:zaya1-8b?layers=1' --prompt-ids 1",
            &["anemoe build 'synthetic:zaya1-8b?layers=1' -o"][..],
        ),
        ("generate @BUNDLE/chain.json --prompt-ids 1", &["give the folder of the bundle", "b.anemoe"]),
        ("inspect @DIR/begun", &["an unfinished bundle"]),
        ("perplexity @DIR/begun --text @DIR/notes.txt", &["an unfinished bundle"]),
        ("inspect @DIR/notes.txt", &["a file of another kind"]),
        ("plan @DIR/lora", &["unsupported checkpoint: this is an adapter (adapter_config.json)"]),
        (
            "inspect no/such",
            &["no such file or folder", "Hugging Face folder", "synthetic:NAME", "a bundle", ".mlpackage"],
        ),
        ("predict @BUNDLE --inputs a.npz", &["a finished bundle", "shards", "anemoe generate"]),
        ("predict @FIXTURES/tiny-zaya --inputs a.npz", &["a Hugging Face checkpoint", "anemoe build"]),
        ("plan @BUNDLE", &["a finished bundle"]),
        ("generate hf:a/b --prompt-ids 1", &["anemoe build hf:a/b -o b.anemoe"]),
        ("inspect hf:../../etc", &["is not hf:OWNER/NAME[@REV]"]),
        ("plan @FIXTURES", &["a folder of checkpoints", "tiny-gemma4-moe-text", "tiny-zaya"]),
        ("plan @FIXTURES/tiny-gemma4-moe-text/model.safetensors", &["a .safetensors file", "config.json"]),
        ("report @FIXTURES/tiny-zaya", &["anemoe build"]),
        // A checkpoint of another family.
        ("build @FIXTURES/tiny-zaya -o @BUNDLE --skip-gates", &["family", "gemma4", "zaya"]),
        (
            "trace @BUNDLE --golden @FIXTURES/tiny-gemma4-moe-text/golden.npz --swap --checkpoint @FIXTURES/tiny-zaya",
            &["is of the family zaya, not gemma4"],
        ),
    ] {
        let line = line.replace("@BUNDLE", &bundle.to_string()).replace("@DIR", &dir.to_string());
        refused(line.replace("@FIXTURES", &fixture("").to_string()), says);
    }
}

#[test]
fn a_finished_bundle_names_the_options_that_differ() {
    let out = built("tiny-gemma4-moe", "--quant lut4 --head-quant lut6 --tokens 1 --max-context 64");
    let (model, changed) = (fixture("tiny-gemma4-moe"), "--quant lut4, now fp16");
    let line = format!("build {model} -o {out} --tokens 1,4 --max-context 64 --quant fp16");
    let says = ["finished bundle", "--head-quant lut6, now (default)", changed, "--tokens 1, now 1,4"];
    let err = refuses(&mut anemoe(line), &says);
    assert!(!err.contains("--max-context"), "{err}");
    let other = fixture("tiny-gemma4-moe-text");
    let line = format!("build {other} -o {out} --tokens 1 --max-context 64 --head-quant lut6");
    refused(line, &["the checkpoint's contents"]);
}

#[test]
fn prompts_come_from_arguments_files_and_standard_input() {
    let (bundle, dir) = (built("small", "--max-context 256 --no-journal"), folder());
    let file = dir.join("prompt.txt");
    let plain = generated(&bundle, "--prompt 'def main():' --max-new 4");
    let (_, out, _) = fed(&mut anemoe(format!("generate {bundle} -p - -n 4 --json")), "def main():\n");
    assert_eq!(ids(&serde_json::from_str::<Value>(&out).unwrap()["generated_ids"]), plain);
    fs::write(&file, "def main():\r\n").unwrap();
    assert_eq!(generated(&bundle, &format!("--prompt-file {file} -n 4")), plain);
    assert_eq!(generated(&bundle, "-p 'def main():' -n 4"), plain);
    let spaced =
        json(0, format!("generate -m {bundle} --prompt-ids '2, 3' -n 2 --temperature 0.7 --top-k 5"));
    assert_eq!(spaced["prompt_ids"], serde_json::json!([2, 3]));
    let empty = json(0, format!("generate {bundle} -p '' -n 1"));
    assert_eq!(empty["prompt_ids"], serde_json::json!([2]));
    // The terminal gets the text of the document.
    let long = format!("generate {bundle} -p 'def main():\n    ' -n 20 --ignore-eos");
    let document = json(0, &long);
    assert_eq!((&document["prompt_ids"][0], list(&document["generated_ids"]).len()), (&2.into(), 20));
    assert!(!text(&document["text"]).trim().is_empty());
    assert_eq!(passes(&long).trim(), text(&document["text"]).trim());

    let huge = dir.join("huge");
    fs::File::create(&huge).unwrap().set_len(20_000_000).unwrap();
    fs::write(dir.join("binary"), [0xff, 0xfe]).unwrap();
    fs::write(dir.join("empty"), "").unwrap();
    let many: Vec<String> = (0..257).map(|i| i.to_string()).collect();
    for (options, says) in [
        (String::new(), &["--prompt"][..]),
        (format!("--prompt-file {dir}"), &["not a regular file"]),
        ("--prompt-file no/such/file".into(), &["no/such/file"]),
        (format!("--prompt-file {dir}/binary"), &["not UTF-8"]),
        (format!("--prompt-file {dir}/empty"), &["the prompt is empty"]),
        (format!("--prompt-file {huge}"), &["more than 16 MB"]),
        ("--prompt-file -".into(), &["--prompt - reads standard input"]),
        ("-p a --prompt-ids 1".into(), &["cannot be used with"]),
        ("--prompt-ids 2,x".into(), &["`x` is not a token id"]),
        (format!("--prompt-ids {}", many.join(",")), &["257 tokens", "256"]),
        ("--prompt-ids 1,99999".into(), &["99999", "vocabulary"]),
        ("--prompt-ids 1,4294967295".into(), &["4294967295"]),
        ("--prompt-ids 1,-3".into(), &["-3"]),
        ("--prompt-ids 2 --prefill-chunk 0".into(), &["--prefill-chunk", "from 1 on"]),
        // Limits on random choices have no effect at temperature 0.
        ("--prompt-ids 2 --top-k 5".into(), &["--top-k has no effect without --temperature"]),
        ("--prompt-ids 2 --top-p 0.5".into(), &["--top-p has no effect without --temperature"]),
    ] {
        refused(format!("generate {bundle} {options}"), says);
    }
    refused(format!("generate {} --prompt text", fixture("tiny-zaya")), &["anemoe build"]);
    assert_eq!(json(2, format!("generate {bundle} --prompt-ids 2 --top-k 5"))["error"]["kind"], "usage");
    // A full context ends generation without an error.
    let ids: Vec<String> = (0..252).map(|i| i.to_string()).collect();
    let v = json(0, format!("generate {bundle} --prompt-ids {} --ignore-eos", ids.join(",")));
    assert_eq!((&v["stop"], list(&v["generated_ids"]).len()), (&"context_full".into(), 5));
}

#[test]
fn a_build_speaks_plainly_of_its_own_gates() {
    let out = folder().join("a");
    let (code, said, err) =
        run(format!("build {} -o {out} --tokens 1 --max-context 64 --quant fp16", small()));
    // The user could not change the gates' own prompt, so there is no warning.
    assert!(code < 2 && !said.contains("warning"), "{said}\n{err}");
    assert!(said.contains("they run on the CPU, which is fine"), "{said}");
    let said = passes(format!("check {out}"));
    let (rules, notes) = said.split_once("\nsources (").unwrap();
    assert!(rules.contains("measured: [1]") && rules.contains("CPU: small, fine"), "{said}");
    assert!(notes.contains("  [1] A: ") && !rules.contains("journal 0"), "{said}");
    assert!(!said.contains("0.0 MB"), "{said}");
}

#[test]
fn messages_hold_no_types_of_the_program_and_no_colours() {
    let (bundle, dir) = (built("tiny-gemma4-moe", "--tokens 1,4"), folder());
    let file = dir.join("g.npz");
    fs::write(&file, "no archive").unwrap();
    let err = refuses(&mut anemoe(format!("validate {bundle} --golden {file}")), &["not a zip archive"]);
    assert!(!err.contains("EOCD"), "{err}");
    // Inputs of another shape.
    let array = anemoe_npz::Array::new(vec![3], vec![0f32; 3]).unwrap();
    anemoe_npz::write_npz(&file, &[("hidden".to_string(), array)]).unwrap();
    let predict = format!("predict {bundle}/shards/L00.attn.mlpackage --inputs {file} --outputs {dir}/o.npz");
    let err = refuses(&mut anemoe(predict), &[]);
    assert!(!err.contains("Fixed("), "{err}");
    // A plan has one column of megabytes, of 10^6 bytes, and no colours in a file.
    let plan = format!("plan {}", fixture("tiny-gemma4-moe"));
    let (_, out, err) = finish(anemoe(plan).env("ANEMOE_LOG", "trace"));
    assert!(!err.contains('\u{1b}') && out.contains("  MB  ") && !out.contains("MiB"), "{out} {err}");
}

/// Checks that every command takes paths that are not UTF-8, in arguments and in the environment, and prints whole documents.
#[cfg(target_os = "linux")]
#[test]
fn paths_and_homes_need_not_be_utf8() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let odd = |name: &str| OsStr::from_bytes(&[name.as_bytes(), b"\xff"].concat()).to_os_string();
    let dir = folder();
    let home = dir.join(odd("home"));
    fs::create_dir_all(home.join(".cache")).unwrap();
    copy(&fixture("tiny-zaya"), &home.join(odd("m")));
    let recipe = format!(
        "title = 't'\nintent = 'i'\nsource = '{}'\ngates = ['plan', 'build']\n[options]\nbuild = ['--skip-gates']\n\
         [[builds]]\nname = 'a'\noptions = ['--quant=lut4', '--tokens=1']\n\
         [[figures]]\nfigure = 'bundle_mb'\nunit = 'MB'\nbook = '>0'\nfrom = 'x'\n",
        fixture("tiny-zaya")
    );
    fs::write(home.join(odd("r")), recipe).unwrap();
    // A word of one letter stands for a path, built in parts, so that the path of the checkpoint is written down.
    for (status, line) in [
        (0, "inspect m"),
        (0, "golden m --prompt-ids 2,3,4 --decode 2 -o g"),
        (0, "build m -o b --tokens 1 --quant fp16 --shard 0/2"),
        (0, "build m -o b --tokens 1 --quant fp16 --shard 1/2"),
        (0, "assemble b"),
        (0, "inspect b"),
        (0, "check b"),
        (0, "generate b --prompt-ids 2,5 --max-new 2"),
        (0, "validate b --golden g"),
        (0, "trace b --golden g"),
        (0, "journal b"),
        (0, "report b --against b"),
        (0, "bench b --decode 2 --context 4 --prefill 4 --verify-tokens 0 --repetitions 1"),
        (0, "push b s --name xx"),
        (0, "pull s p --name xx"),
        (0, "reproduce r --out u"),
        (0, "doctor --quick"),
        (2, "generate m --prompt-ids 1"),
        (2, "plan n"),
        (2, "inspect hf:a/b --offline"),
    ] {
        let is_path = |word: &str| word.len() == 1 && word > "9";
        let words = line.split(' ').map(|word| if is_path(word) { odd(word) } else { word.into() });
        let mut command = anemoe("");
        command.args(words).current_dir(&home).env("HOME", &*home).env("TMPDIR", &*home);
        let document = json_of(status, command.env_remove("XDG_CACHE_HOME").env_remove("HF_HOME"));
        match line {
            "doctor --quick" => assert!(document["disks"].to_string().contains("anemoe"), "{document}"),
            "assemble b" => assert!(document["full_stack"]["golden"].is_object(), "{document}"),
            "inspect hf:a/b --offline" => {
                let said = text(&document["error"]["message"]);
                assert!(said.contains("huggingface/hub") && !said.contains("set HF_HOME"), "{said}");
            }
            _ => {}
        }
    }
    assert!(home.join(odd("u")).join("a.anemoe/chain.json").is_file());
}

#[cfg(unix)]
#[test]
fn signals_have_their_own_exit_status() {
    let out = folder().join("g.npz");
    let golden = format!("golden {} -p - -o {out}", small());
    // Tests that run under `nohup` themselves cannot see what HUP does.
    let ignored = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored =
        ignored.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    let ignores_hup = ignored.is_some_and(|mask| mask & 1 == 1);
    for (name, status) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        if name == "HUP" && ignores_hup {
            continue;
        }
        // The command waits for a prompt.
        let mut child = start(&mut anemoe(&golden));
        let input = child.stdin.take();
        std::thread::sleep(std::time::Duration::from_secs(2));
        signal(&child, name);
        // A command that ignores the signal ends with its input.
        std::thread::sleep(std::time::Duration::from_secs(1));
        drop(input);
        assert_eq!(child.wait().unwrap().code(), Some(status), "{name}");
    }
    // Under `nohup` a closed terminal ends nothing.
    let script = "trap '' HUP; sleep 3 | \"$0\" \"$@\" & sleep 1.5; kill -HUP -- $! ; wait $!; echo $?";
    let (_, out, err) = finish(&mut in_shell(script, golden));
    assert!(out.trim().ends_with('2') && err.contains("the prompt is empty"), "{out} {err}");
}
