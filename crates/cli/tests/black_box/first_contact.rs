//! First contact: no command, mistyped commands, completions, manual pages, help, and the lists of the documents.

use crate::common::*;
use std::collections::BTreeSet;
use std::fs;

/// Lists the lines of the commands in the help.
fn commands() -> Vec<String> {
    let help = passes("--help");
    let commands = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    commands.lines().map(String::from).filter(|line| line.split_whitespace().next() != Some("help")).collect()
}

/// Lists the names of the commands.
fn names() -> Vec<String> {
    commands().iter().map(|line| line.split_whitespace().next().unwrap().into()).collect()
}

#[test]
fn no_command_says_what_to_type_next() {
    let (code, out, err) = finish(&mut anemoe_as_is(""));
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(err.contains("anemoe quickstart") && err.contains("anemoe help"), "{err}");
    assert!(err.lines().count() <= 10 && !err.contains("error"), "{err}");
    assert_eq!(json(2, "")["error"]["kind"], "usage");
}

#[test]
fn mistyped_words_and_words_of_other_tools_find_what_is_meant() {
    for (said, meant) in [
        ("biuld", "build"),
        ("genrate", "generate"),
        ("run", "generate"),
        ("convert", "build"),
        ("server", "serve"),
        ("benchmark", "bench"),
        ("eval", "validate"),
        ("ps", "inspect"),
    ] {
        refused(said, &["a similar subcommand exists", &format!("'{meant}'")]);
    }
    let tiny = fixture("tiny-gemma4-moe-text");
    for (said, says) in [
        ("chat x --sesion f", &["--session"][..]),
        ("chat x --n-predict 8", &["'--n-predict'", "'--max-new'"]),
        ("chat x '--system-prompt=Be brief.'", &["'--system'"]),
        ("serve x --parallel 4", &["'--max-sequences'"]),
        ("serve x --ctx-size 4096", &["tip: a bundle has the context that it was built for"]),
        ("chat --model x", &["tip: the checkpoint or bundle is named without an option"]),
        ("plan TINY --quantt lut4", &["--quant"]),
        ("plan TINY --quant fp32", &["did you mean", "fp16"]),
        ("plan TINY --quant bf16", &["did you mean", "fp16"]),
        ("plan TINY --quant LUT4", &["did you mean `lut4`?"]),
        ("plan TINY --quant int4", &["did you mean `int4-block`?"]),
        ("plan TINY --quant q4_0", &["did you mean `int4-block`?"]),
        ("plan TINY --quant lut4-tensr", &["did you mean `lut4-tensor`?"]),
        ("quantize TINY/model.safetensors:q_prj", &["no tensor `q_prj`"]),
        (
            "quantize TINY/model.safetensors:model.layers.0.self_attn",
            &["no tensor `model.layers.0.self_attn`", "; so begin 6 names", "self_attn.k_proj.weight"],
        ),
        (
            "quantize TINY/model.safetensors:model.layers.0.self_attn.q_prog.weight",
            &["did you mean `model.layers.0.self_attn.q_proj.weight`?"],
        ),
        ("check x --chip m9", &["m9", "m1, m2, m3, m4, m5", "a19"]),
    ] {
        refused(said.replace("TINY", &tiny.to_string()), says);
    }
    // A command without such an option gives no such tip.
    let (code, _, err) = run("inspect x --n-predict 8");
    assert!(code == 2 && !err.contains("--max-new"), "{err}");
}

#[test]
fn help_has_a_line_for_each_command_and_examples() {
    let commands = commands();
    assert!(commands.len() >= 25, "{commands:?}");
    for line in &commands {
        assert!(line.starts_with("  ") && !line.starts_with("   "), "a second line: `{line}`");
        assert!(line.split_whitespace().count() > 3, "`{line}` does not say what the command does");
    }
    let help = passes("--help");
    let examples = help.split("Examples:\n").nth(1).unwrap();
    assert_eq!(examples.lines().filter(|l| l.starts_with("  anemoe ")).count(), 3, "{help}");
    for name in names() {
        let help = passes(format!("{name} --help"));
        assert!(help.contains("Example"), "{name}: {help}");
    }
    // The example of contexts fits a bundle with default options.
    assert!(passes("bench --help").contains("--context 64,1024"));
}

#[test]
fn completions_and_manual_pages_know_every_command() {
    let names = names();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = passes(format!("completions {shell}"));
        assert!(names.iter().all(|name| script.contains(name)), "{shell}");
        assert_eq!(json(0, format!("completions {shell}"))["script"], script);
    }
    refused("completions tcsh", &["tcsh", "bash"]);
    let page = passes("man");
    assert!(page.contains(".TH anemoe 1") && page.contains("quickstart"), "{page}");
    let folder = folder().join("man1");
    let document = json(0, format!("man -o {folder}"));
    let pages: BTreeSet<&str> = document["pages"].as_array().unwrap().iter().map(text).collect();
    for name in &names {
        let page = format!("anemoe-{name}.1");
        assert!(pages.contains(page.as_str()), "{page} is not in {pages:?}");
        assert!(fs::read_to_string(folder.join(page)).unwrap().contains(".SH OPTIONS"));
    }
    refused(format!("man -o {folder}"), &["--force"]);
}

#[test]
fn documents_name_every_command() {
    let page = fs::read_to_string(root("docs/commands.md")).unwrap();
    for name in names() {
        assert!(page.contains(&format!("| `anemoe {name}")), "docs/commands.md does not list {name}");
    }
}
