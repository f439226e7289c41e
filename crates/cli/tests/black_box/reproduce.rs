//! `anemoe reproduce`: recipes of the field notes, a recipe of one's own, resumed runs, wrong recipes.

use crate::common::*;
use serde_json::{Value, json as value};
use std::fs;

fn agree(document: &Value) -> bool {
    each(&document["rows"], "verdict").all(|verdict| verdict == "agrees")
}

fn row<'a>(document: &'a Value, figure: &str, build: &str) -> &'a Value {
    let is_asked = |r: &&Value| r["figure"] == figure && r["build"] == build;
    list(&document["rows"]).iter().find(is_asked).unwrap_or_else(|| panic!("{figure} {build}"))
}

#[test]
fn recipes_of_the_field_notes_agree_or_say_why() {
    let (recipes, folder) = (json(0, "reproduce --list"), folder());
    let names: Vec<&str> = each(&recipes["recipes"], "name").collect();
    assert_eq!(names, ["exp-34", "exp-35", "t4.1.2", "t4.1.3", "t4.3", "exp-36", "l0-probe"]);
    for name in names {
        let document = json_of(0, anemoe(format!("reproduce {name} --dry-run")).current_dir(&folder));
        assert!(each(&document["rows"], "verdict").any(|verdict| verdict == "agrees"), "{name}: {document}");
        for r in list(&document["rows"]) {
            let (verdict, why) = (text(&r["verdict"]), text(&r["why"]));
            let bare = why.trim_start_matches("--dry-run: only planned").trim_start_matches("; ");
            let is_reason = bare.len() > 40 && bare != "as above";
            assert!(verdict == "agrees" || verdict == "not run" || is_reason, "{name} {r}");
            assert!(
                verdict != "needs a Mac" || r["ours"].is_null(),
                "{r}: no figure of this machine is the Mac's"
            );
            assert!(!text(&r["from"]).is_empty() && !text(&r["unit"]).is_empty());
        }
    }
    // A dry run writes nothing.
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
}

#[test]
fn recipes_that_do_not_fit_their_source_are_refused() {
    let zoo = format!("--checkpoint {} --dry-run", fixture("tiny-gemma4-moe"));
    for (options, says) in [
        ("exp-99".to_string(), &["exp-34, exp-35", "t4.3"][..]),
        (String::new(), &["--list"]),
        ("exp-35 --checkpoint nowhere".into(), &["nowhere", "no checkpoint", "synthetic:zaya1-8b"]),
        (format!("exp-35 {zoo}"), &["gemma4", "zaya"]),
        (format!("exp-35 {zoo} --layers 2"), &["--layers", "whole"]),
        ("exp-35 --layers 41 --dry-run".into(), &["--layers 41", "has 40"]),
    ] {
        refused(format!("reproduce {options}"), says);
    }
}

/// A recipe of one's own.
struct Recipe {
    dir: Place,
    file: Place,
    out: Place,
    text: String,
}

/// Writes a figure of a recipe.
fn figure(name: &str, unit: &str, book: &str, more: &str) -> String {
    format!("[[figures]]\nfigure = '{name}'\nunit = '{unit}'\nbook = {book}\nfrom = 'here'\n{more}")
}

impl Recipe {
    fn new(text: String) -> Recipe {
        let dir = folder();
        let recipe = Recipe { file: dir.join("own.toml"), out: dir.join("out"), dir, text };
        recipe.write(&recipe.text);
        recipe
    }

    /// Writes a recipe for the tiny fixture.
    fn tiny() -> Recipe {
        let figures = [
            figure("logit_cosine_min", "cosine", "'>=0.999'", ""),
            figure("tokens_expected", "tokens", "3", ""),
            figure("new_tokens", "tokens", "3", ""),
            figure("decode_tok_s", "tok/s", "'>0'", "needs = 'nothing'\n"),
            figure("stack_cosine_min", "cosine", "'>=0.999'", ""),
            figure("stack_cosine_first", "cosine", "'>=0.999'", ""),
            figure("stack_cosine_last", "cosine", "'>=0.999'", ""),
            figure("shards", "packages", "'>1'", "build = 'lut4'\n"),
        ];
        Recipe::new(format!(
            "title = 'tiny'\nintent = 'does it run?'\nsource = '{}'\nfamily = 'gemma4'\nprompt_ids = [2, 5, 9]\nnew_tokens = 3\n\
             gates = ['plan', 'build', 'check', 'validate', 'trace', 'generate', 'bench']\n\
             [options]\nbuild = ['--skip-gates']\nbench = ['--decode=2', '--context=4', '--prefill=4', '--verify-tokens=4', '--repetitions=1']\n\
             generate = ['--ignore-eos']\n\
             [[builds]]\nname = 'fp16'\noptions = ['--quant=fp16', '--max-context=64']\n\
             [[builds]]\nname = 'lut4'\noptions = ['--quant=lut4', '--max-context=64']\n{}",
            fixture("tiny-gemma4-moe"),
            figures.concat()
        ))
    }

    fn write(&self, text: &str) {
        fs::write(&self.file, text).unwrap();
    }

    fn add(&self, more: &str) {
        self.write(&format!("{}{more}", self.text));
    }

    fn line(&self) -> String {
        format!("reproduce {} -o {}", self.file, self.out)
    }

    /// Checks that the recipe is refused with these words when it is run and when it is planned, and that nothing is made.
    fn refused(&self, says: &[&str]) {
        refused(self.line(), says);
        refused(format!("reproduce {} --dry-run", self.file), says);
        assert!(!self.out.exists());
    }
}

#[test]
fn a_recipe_of_ones_own_runs_and_goes_on() {
    let recipe = Recipe::tiny();
    let out = &recipe.out;
    let first = json(0, recipe.line());
    assert!(agree(&first), "{first:#}");
    // A build of which only figures of the plan are asked is not made.
    assert!(out.join("fp16.anemoe").is_dir() && !out.join("lut4.anemoe").exists());
    // Nothing runs again: the second run has the first run's figures, including times.
    let (code, said, err) = run(recipe.line());
    assert_eq!((code, err.as_str()), (0, ""), "{said}");
    assert_eq!(json(0, recipe.line())["rows"], first["rows"]);
    // The journal of the folder tells what came out, and takes what people add.
    let page = [
        "### Intent\n\n- does it run?",
        "tiny of ",
        "plan done in",
        "### Surprise\n\n(none)",
        "fp16: tokens_expected 3 tokens, the book's 3 (here): agrees",
        "recipe, sha256",
    ];
    ends(0, format!("journal {out}"), &page);
    passes(format!("journal {out} --lesson 'it runs' --next 'a larger one'"));
    let entry = || json(0, format!("journal {out}"))["entries"][0].clone();
    assert_eq!(value!([entry()["lesson"][0], entry()["next"][0]]), value!(["it runs", "a larger one"]));
    // The journal of a run that was killed after the build, before the build was written down.
    let journal = out.join("journal.jsonl");
    let whole = fs::read_to_string(&journal).unwrap();
    let early =
        |line: &&str| ["reproduce", "plan"].iter().any(|k| line.contains(&format!("\"kind\":\"{k}\"")));
    let lines: Vec<&str> = whole.lines().filter(early).collect();
    fs::write(&journal, lines.join("\n") + "\n").unwrap();
    assert!(agree(&json(0, recipe.line())));
    // A figure that is asked for later runs nothing again; one that differs without a reason fails, and surprises.
    recipe.add(&figure("params", "weights", "7", ""));
    let more = json(1, recipe.line());
    assert_eq!(value!([row(&more, "params", "fp16")["verdict"], more["pass"]]), value!(["differs", false]));
    let surprise = entry()["surprise"].to_string();
    assert!(surprise.contains("fp16: params ") && surprise.contains("where 7 was expected"), "{surprise}");
    // A reason explains one difference.
    let explained = |ours: &str| {
        recipe.add(&figure("tokens_expected", "tokens", "9", &format!("why = 'shorter'\nours = {ours}\n")));
    };
    explained("3");
    assert_eq!(json(0, recipe.line())["pass"], true);
    explained("4");
    let other = json(1, recipe.line());
    let said: Vec<&Value> = list(&other["rows"]).iter().filter(|r| r["verdict"] == "differs").collect();
    assert!(said.len() == 1 && text(&said[0]["why"]).contains("would be 4 here"), "{other:#}");
    // A recipe with other builds is another run, which the same folder does not take.
    recipe.write(&recipe.text.replace("--quant=lut4", "--quant=lut6"));
    refused(recipe.line(), &["other builds", "--out"]);
}

#[test]
fn wrong_recipes_are_refused() {
    let recipe = Recipe::tiny();
    // A recipe writes into the folder of the run alone, and sends nothing.
    let victim = recipe.dir.join("victim");
    fs::write(&victim, "precious").unwrap();
    for (place, options) in [
        ("'--quant=lut4', ", format!("'--out={victim}', '--force', ")),
        ("'--quant=lut4', ", format!("'-o', '{victim}', ")),
        ("build = ['--skip-gates'", format!("build = ['--shard=0/1', '--push={victim}'")),
        ("bench = [", format!("bench = ['--save={victim}', '--force', ")),
        ("generate = [", format!("generate = ['--model={victim}', ")),
    ] {
        recipe.write(&recipe.text.replace(place, &options));
        recipe.refused(&["a recipe gives options", "folder of the run"]);
    }
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    for (more, says) in [
        (figure("shard_gb", "GB", "1", ""), "shard_mb"),
        (figure("shard_mb", "", "1", "").replace("unit = ''\n", ""), "has no unit"),
        (figure("shard_mb", "MB", "1", "colour = 'red'\n"), "unknown field `colour`"),
        ("[[builds]]\nname = 'odd'\noptions = ['--quant=lut9']\n".into(), "lut9"),
    ] {
        recipe.add(&more);
        refused(format!("reproduce {} --dry-run", recipe.file), &[says]);
    }
    fs::write(recipe.dir.join("binary.toml"), [0u8, 159, 255]).unwrap();
    refused(format!("reproduce {}/binary.toml", recipe.dir), &["binary.toml"]);
    refused(format!("reproduce {}", recipe.dir), &[]);
    // Gates need a bundle and no order.
    let order = "'plan', 'build', 'check', 'validate', 'trace', 'generate', 'bench'";
    recipe.write(&recipe.text.replace("'build', 'check'", "'check'"));
    recipe.refused(&["gate `check` needs the bundle that `build` makes"]);
    let odd = "'bench', 'validate', 'plan', 'trace', 'build', 'generate', 'check', 'plan'";
    recipe.write(&recipe.text.replace(order, odd));
    assert!(agree(&json(0, recipe.line())));
    recipe.write(&recipe.text.replace("build = ['--skip-gates']", "build = ['--golden=later.npz']"));
    let reproduce = format!("reproduce {} -o {}", recipe.file, recipe.dir);
    refused(format!("{reproduce}/other"), &["build fp16: build", "later.npz"]);
    // A folder with something else in it is not used.
    recipe.write(&recipe.text);
    refused(reproduce, &["is not empty"]);
}

#[test]
fn a_gate_stops_real_weights_and_not_synthetic_ones() {
    // The kind fails the gate of the representative shards.
    let failing = |source: &str| {
        Recipe::new(format!(
            "title = 'two bits'\nintent = 'x'\nsource = '{source}'\nlayers = 1\nprompt_ids = [2, 5]\nnew_tokens = 2\n\
             gates = ['plan', 'build', 'generate']\n[options]\nbuild = ['--probes=2']\ngenerate = ['--ignore-eos']\n\
             [[builds]]\nname = 'lut1'\noptions = ['--quant=lut1', '--max-context=64', '--tokens=1']\n{}{}",
            figure("probes", "probes", "2", ""),
            figure("new_tokens", "tokens", "2", "")
        ))
    };
    let real = failing(&fixture("tiny-gemma4-moe").to_string());
    for _ in 0..2 {
        ends(1, real.line(), &["nothing behind it ran", "not run: the gate `quality of the rep"]);
    }
    let synthetic = failing("synthetic:gemma4-mini");
    ends(0, synthetic.line(), &["(L00.", "built without gates"]);
    let again = json(0, synthetic.line());
    assert!(agree(&again) && list(&again["bundles"]).len() == 1, "{again:#}");
}
