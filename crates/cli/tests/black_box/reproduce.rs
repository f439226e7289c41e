//! `anemoe reproduce`: recipes of the field notes, a recipe of one's own, resumed runs, wrong recipes.

use crate::common::{fixture, json, refused, run};
use serde_json::Value;
use std::path::Path;

fn rows(document: &Value) -> Vec<(String, String, &Value)> {
    let all = document["rows"].as_array().unwrap();
    let text = |r: &Value, key: &str| r[key].as_str().unwrap().to_string();
    all.iter().map(|r| (text(r, "figure"), text(r, "verdict"), r)).collect()
}

fn row<'a>(document: &'a Value, figure: &str, build: &str) -> &'a Value {
    let all = document["rows"].as_array().unwrap();
    all.iter()
        .find(|r| r["figure"] == figure && r["build"] == build)
        .unwrap_or_else(|| panic!("{figure} {build}"))
}

#[test]
fn recipes_of_the_field_notes_agree_or_say_why() {
    let list = json(0, &["reproduce", "--list"]);
    let names: Vec<&str> =
        list["recipes"].as_array().unwrap().iter().map(|r| r["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["exp-34", "exp-35", "t4.1.2", "t4.1.3", "t4.3", "exp-36", "l0-probe"]);
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        let output = crate::common::anemoe(&["reproduce", name, "--dry-run", "--json"])
            .current_dir(folder.path())
            .output()
            .unwrap();
        let (code, out, err) = crate::common::finish(output);
        assert_eq!(code, 0, "{name}\n{out}\n{err}");
        let document: Value = serde_json::from_str(&out).unwrap();
        let agree = rows(&document).iter().filter(|(_, verdict, _)| verdict == "agrees").count();
        assert!(agree >= 1, "{name}: {out}");
        for (figure, verdict, r) in rows(&document) {
            let why = r["why"].as_str().unwrap();
            let bare = why.trim_start_matches("--dry-run: only planned").trim_start_matches("; ");
            let is_reason = bare.len() > 40 && bare != "as above";
            assert!(
                verdict == "agrees" || verdict == "not run" || is_reason,
                "{name} {figure} {verdict}: {why}"
            );
            assert!(
                verdict != "needs a Mac" || r["ours"].is_null(),
                "{name} {figure}: no figure of this machine is the Mac's"
            );
            assert!(!r["from"].as_str().unwrap().is_empty() && !r["unit"].as_str().unwrap().is_empty());
        }
    }
    // A dry run writes nothing.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn sizes_and_counts_of_the_book_are_ours() {
    let l0 = json(0, &["reproduce", "L0 probe", "--dry-run"]);
    for (figure, build, ours) in [
        ("pack_du_mib", "lut4", 46.0),
        ("shard_du_mib", "lut4", 54.0),
        ("pack_du_mib", "fp16", 182.0),
        ("shard_du_mib", "fp16", 216.0),
        ("moe_shards", "lut4", 240.0),
    ] {
        let r = row(&l0, figure, build);
        assert_eq!((r["ours"].as_f64(), r["verdict"].as_str()), (Some(ours), Some("agrees")), "{r}");
    }
    let e35 = json(0, &["reproduce", "exp-35", "--dry-run"]);
    assert_eq!(row(&e35, "pack_conv_ops", "int4")["ours"], 36.0);
    assert_eq!(row(&e35, "moe_shards", "int4")["verdict"], "agrees");
    assert_eq!(row(&e35, "decode_tok_s", "int4")["verdict"], "needs a Mac");
    assert_eq!(row(&e35, "probe_cosine_min", "int4")["verdict"], "needs the real weights");
    assert_eq!(row(&e35, "new_tokens", "int4")["verdict"], "not run");
    let t413 = json(0, &["reproduce", "t4.1.3", "--dry-run"]);
    for figure in ["stack_cosine_first", "stack_cosine_middle", "stack_cosine_last", "stack_failed_layer"] {
        assert_eq!(row(&t413, figure, "bank")["verdict"], "not run");
    }
    assert_eq!(row(&t413, "shard_du_mib", "int8")["ours"], 398.0);
    assert_eq!(row(&t413, "pack_du_mib", "int8")["ours"], 364.0);
}

/// Writes a recipe for the tiny fixture, with `more` after its figures, and returns its path.
fn own(folder: &Path, more: &str) -> String {
    let checkpoint = fixture("tiny-gemma4-moe");
    let text = format!(
        "title = 'tiny'\nintent = 'does it run?'\nsource = '{}'\nfamily = 'gemma4'\nprompt_ids = [2, 5, 9]\nnew_tokens = 3\n\
         gates = ['plan', 'build', 'check', 'validate', 'trace', 'generate', 'bench']\n\
         [options]\nbuild = ['--skip-gates']\nbench = ['--decode=2', '--context=4', '--prefill=4', '--verify-tokens=4', '--repetitions=1']\n\
         generate = ['--ignore-eos']\n\
         [[builds]]\nname = 'fp16'\noptions = ['--quant=fp16', '--max-context=64']\n\
         [[builds]]\nname = 'lut4'\noptions = ['--quant=lut4', '--max-context=64']\n\
         [[figures]]\nfigure = 'logit_cosine_min'\nunit = 'cosine'\nbook = '>=0.999'\nfrom = 'here'\n\
         [[figures]]\nfigure = 'tokens_expected'\nunit = 'tokens'\nbook = 3\nfrom = 'here'\n\
         [[figures]]\nfigure = 'new_tokens'\nunit = 'tokens'\nbook = 3\nfrom = 'here'\n\
         [[figures]]\nfigure = 'decode_tok_s'\nunit = 'tok/s'\nbook = '>0'\nneeds = 'nothing'\nfrom = 'here'\n\
         [[figures]]\nfigure = 'stack_cosine_min'\nunit = 'cosine'\nbook = '>=0.999'\nfrom = 'here'\n\
         [[figures]]\nfigure = 'shards'\nunit = 'packages'\nbuild = 'lut4'\nbook = '>1'\nfrom = 'here'\n{more}",
        checkpoint.display()
    );
    let file = folder.join("own.toml");
    std::fs::write(&file, text).unwrap();
    file.to_str().unwrap().into()
}

#[test]
fn a_recipe_of_ones_own_runs_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let file = own(folder.path(), "");
    let out = folder.path().join("out");
    let out = out.to_str().unwrap();
    let first = json(0, &["reproduce", &file, "-o", out]);
    assert!(rows(&first).iter().all(|(_, verdict, _)| verdict == "agrees"), "{first:#}");
    // A build of which only figures of the plan are asked is not made.
    assert!(Path::new(out).join("fp16.anemoe").is_dir() && !Path::new(out).join("lut4.anemoe").exists());
    // Nothing runs again: the second run has the first run's figures, including times.
    let (code, text, err) = run(&["reproduce", &file, "-o", out]);
    assert_eq!((code, err.as_str()), (0, ""), "{text}");
    let again = json(0, &["reproduce", &file, "-o", out]);
    assert_eq!(again["rows"], first["rows"]);
    // The journal of the folder tells what came out, and takes what people add.
    let (code, page, _) = run(&["journal", out]);
    assert_eq!(code, 0, "{page}");
    for says in [
        "### Intent\n\n- does it run?",
        "tiny of ",
        "plan done in",
        "### Surprise\n\n(none)",
        "fp16: tokens_expected 3 tokens, the book's 3 (here): agrees",
        "recipe, sha256",
    ] {
        assert!(page.contains(says), "{says}\n{page}");
    }
    let (code, _, err) = run(&["journal", "add", out, "--lesson", "it runs", "--next", "a larger one"]);
    assert_eq!(code, 0, "{err}");
    let entry = json(0, &["journal", out])["entries"][0].clone();
    assert_eq!((&entry["lesson"][0], &entry["next"][0]), (&"it runs".into(), &"a larger one".into()));
    // The journal of a run that was killed after the build, before the build was written down.
    let journal = Path::new(out).join("journal.jsonl");
    let whole = std::fs::read_to_string(&journal).unwrap();
    let early =
        |line: &&str| ["reproduce", "plan"].iter().any(|kind| line.contains(&format!("\"kind\":\"{kind}\"")));
    let lines: Vec<&str> = whole.lines().filter(early).collect();
    std::fs::write(&journal, lines.join("\n") + "\n").unwrap();
    let resumed = json(0, &["reproduce", &file, "-o", out]);
    assert!(rows(&resumed).iter().all(|(_, verdict, _)| verdict == "agrees"), "{resumed:#}");
    // A figure that is asked for later runs nothing again; one that differs without a reason fails, and surprises.
    own(folder.path(), "[[figures]]\nfigure = 'params'\nunit = 'weights'\nbook = 7\nfrom = 'nowhere'\n");
    let more = json(1, &["reproduce", &file, "-o", out]);
    assert_eq!((&row(&more, "params", "fp16")["verdict"], &more["pass"]), (&"differs".into(), &false.into()));
    let surprise = json(0, &["journal", out])["entries"][0]["surprise"].to_string();
    assert!(surprise.contains("fp16: params ") && surprise.contains("where 7 was expected"), "{surprise}");
    // A recipe with other builds is another run, which the same folder does not take.
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("--quant=lut4", "--quant=lut6")).unwrap();
    refused(&["reproduce", &file, "-o", out], &["other builds", "--out"]);
}

#[test]
fn wrong_recipes_and_sources_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    refused(&["reproduce", "exp-99"], &["exp-34, exp-35", "t4.3"]);
    refused(&["reproduce"], &["--list"]);
    // A recipe writes into the folder of the run alone, and sends nothing.
    let victim = folder.path().join("victim");
    std::fs::write(&victim, "precious").unwrap();
    let file = own(folder.path(), "");
    let out = folder.path().join("out");
    let text = std::fs::read_to_string(&file).unwrap();
    for (place, options) in [
        ("'--quant=lut4', ", format!("'--out={}', '--force', ", victim.display())),
        ("'--quant=lut4', ", format!("'-o', '{}', ", victim.display())),
        ("build = ['--skip-gates'", format!("build = ['--shard=0/1', '--push={}'", victim.display())),
        ("bench = [", format!("bench = ['--save={}', '--force', ", victim.display())),
        ("generate = [", format!("generate = ['--model={}', ", victim.display())),
    ] {
        std::fs::write(&file, text.replace(place, &options)).unwrap();
        refused(
            &["reproduce", &file, "--out", out.to_str().unwrap()],
            &["a recipe gives options", "folder of the run"],
        );
    }
    assert!(std::fs::read(&victim).unwrap() == b"precious" && !out.exists());
    refused(
        &["reproduce", "exp-35", "--checkpoint", "nowhere"],
        &["nowhere", "no checkpoint", "synthetic:zaya1-8b"],
    );
    let gemma = fixture("tiny-gemma4-moe");
    let gemma = gemma.to_str().unwrap();
    refused(&["reproduce", "exp-35", "--checkpoint", gemma, "--dry-run"], &["gemma4", "zaya"]);
    refused(&["reproduce", "exp-35", "--checkpoint", gemma, "--layers", "2"], &["--layers", "whole"]);
    for (more, says) in [
        ("[[figures]]\nfigure = 'shard_gb'\nunit = 'GB'\nbook = 1\nfrom = 'x'\n", "shard_mb"),
        ("[[figures]]\nfigure = 'shard_mb'\nbook = 1\nfrom = 'x'\n", "has no unit"),
        (
            "[[figures]]\nfigure = 'shard_mb'\nunit = 'MB'\nbook = 1\nfrom = 'x'\ncolour = 'red'\n",
            "unknown field `colour`",
        ),
        ("[[builds]]\nname = 'odd'\noptions = ['--quant=lut9']\n", "lut9"),
    ] {
        refused(&["reproduce", &own(folder.path(), more), "--dry-run"], &[says]);
    }
    std::fs::write(folder.path().join("binary.toml"), [0u8, 159, 255]).unwrap();
    refused(&["reproduce", folder.path().join("binary.toml").to_str().unwrap()], &["binary.toml"]);
    refused(&["reproduce", folder.path().to_str().unwrap()], &[]);
    // A folder with something else in it is not used.
    let file = own(folder.path(), "");
    refused(&["reproduce", &file, "-o", folder.path().to_str().unwrap()], &["is not empty"]);
}

/// Writes a recipe whose kind fails the gate of the representative shards, and returns its path.
fn failing(folder: &Path, source: &str) -> String {
    let text = format!(
        "title = 'two bits'\nintent = 'x'\nsource = '{source}'\nlayers = 1\nprompt_ids = [2, 5]\nnew_tokens = 2\n\
         gates = ['plan', 'build', 'generate']\n[options]\nbuild = ['--probes=2']\ngenerate = ['--ignore-eos']\n\
         [[builds]]\nname = 'lut1'\noptions = ['--quant=lut1', '--max-context=64', '--tokens=1']\n\
         [[figures]]\nfigure = 'probes'\nunit = 'probes'\nbook = 2\nfrom = 'here'\n\
         [[figures]]\nfigure = 'new_tokens'\nunit = 'tokens'\nbook = 2\nfrom = 'here'\n"
    );
    let file = folder.join("failing.toml");
    std::fs::write(&file, text).unwrap();
    file.to_str().unwrap().into()
}

#[test]
fn a_gate_stops_real_weights_and_not_synthetic_ones() {
    let folder = tempfile::tempdir().unwrap();
    let out = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let checkpoint = fixture("tiny-gemma4-moe");
    let file = failing(folder.path(), checkpoint.to_str().unwrap());
    for _ in 0..2 {
        let (code, text, _) = run(&["reproduce", &file, "-o", &out("real")]);
        assert_eq!(code, 1, "{text}");
        assert!(
            text.contains("nothing behind it ran") && text.contains("not run: the gate `quality of the rep"),
            "{text}"
        );
    }
    let file = failing(folder.path(), "synthetic:gemma4-mini");
    let (code, text, _) = run(&["reproduce", &file, "-o", &out("synthetic")]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("(L00.") && text.contains("built without gates"), "{text}");
    let again = json(0, &["reproduce", &file, "-o", &out("synthetic")]);
    assert!(rows(&again).iter().all(|(_, verdict, _)| verdict == "agrees"), "{again:#}");
    assert_eq!(again["bundles"].as_array().unwrap().len(), 1);
}

#[test]
fn a_reason_explains_one_difference() {
    let folder = tempfile::tempdir().unwrap();
    let with = |ours: &str| {
        let figure = "[[figures]]\nfigure = 'tokens_expected'\nunit = 'tokens'\nbook = 9\nfrom = 'x'\nwhy = 'shorter'\n";
        own(folder.path(), &format!("{figure}ours = {ours}\n"))
    };
    let out = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let explained = json(0, &["reproduce", &with("3"), "-o", &out("three")]);
    assert_eq!(explained["pass"], true);
    let other = json(1, &["reproduce", &with("4"), "-o", &out("four")]);
    let said: Vec<_> = rows(&other).into_iter().filter(|(_, verdict, _)| verdict == "differs").collect();
    assert!(said.len() == 1 && said[0].2["why"].as_str().unwrap().contains("would be 4 here"), "{other:#}");
    refused(&["reproduce", "exp-35", "--layers", "41", "--dry-run"], &["--layers 41", "has 40"]);
}

/// Checks T4.1.3 with fewer layers: an outlier in a bank with one scale for all of it.
#[test]
fn one_scale_for_a_bank_is_ruined_by_an_outlier() {
    let folder = tempfile::tempdir().unwrap();
    let (file, out) = (folder.path().join("banks.toml"), folder.path().join("out"));
    let mut text = String::from(
        "title = 'banks'\nintent = 'x'\nsource = 'synthetic:gemma4-mini?layers=4&outliers=3000'\n\
         prompt_ids = [2, 36, 563, 506]\nnew_tokens = 2\ngates = ['plan', 'build', 'validate', 'trace']\n\
         [options]\nbuild = ['--skip-gates']\nvalidate = ['--probes=2', '--shards=all']\n",
    );
    let int8 = "'--quant=int8-tensor'";
    for (name, options) in [
        ("bank", format!("{int8}, '--scale-scope=bank'")),
        ("matrix", int8.into()),
        ("lut4", "'--quant=lut4'".into()),
    ] {
        let parts =
            "'--attn-quant=fp16', '--mlp-quant=fp16', '--head-quant=fp16', '--tokens=1', '--max-context=32'";
        text += &format!("[[builds]]\nname = '{name}'\noptions = [{options}, {parts}]\n");
        let cascade = ["stack_cosine_first", "stack_cosine_middle", "stack_cosine_last"];
        for figure in [&["layer_cosine_min", "branch_cosine_min", "stack_cosine_min"][..], &cascade].concat()
        {
            text += &format!(
                "[[figures]]\nfigure = '{figure}'\nunit = 'cosine'\nbook = '>=-1'\nneeds = 'nothing'\nbuild = '{name}'\nfrom = 'x'\n"
            );
        }
    }
    text += "[[figures]]\nfigure = 'outlier_ratio'\nunit = 'times'\nbook = '>55'\nfrom = 'x'\n";
    std::fs::write(&file, text).unwrap();
    let document = json(0, &["reproduce", file.to_str().unwrap(), "-o", out.to_str().unwrap()]);
    let ours = |figure: &str, build: &str| row(&document, figure, build)["ours"].as_f64().unwrap();
    for figure in ["branch_cosine_min", "layer_cosine_min", "stack_cosine_min"] {
        let [bank, matrix, lut4] = ["bank", "matrix", "lut4"].map(|build| ours(figure, build));
        assert!(bank < matrix && bank < lut4, "{figure}: {bank} {matrix} {lut4}");
    }
    let [first, middle, last] =
        ["stack_cosine_first", "stack_cosine_middle", "stack_cosine_last"].map(|figure| ours(figure, "bank"));
    assert!(
        first > middle && middle > last && last > ours("stack_cosine_min", "bank"),
        "{first} {middle} {last}"
    );
    assert!(ours("branch_cosine_min", "bank") < 0.95);
    assert!(ours("outlier_ratio", "bank") > 100.0);
}

/// Checks that gates run in the order that is possible, however they are listed.
#[test]
fn gates_need_a_bundle_and_no_order() {
    let folder = tempfile::tempdir().unwrap();
    let file = own(folder.path(), "");
    let text = std::fs::read_to_string(&file).unwrap();
    let order = "'plan', 'build', 'check', 'validate', 'trace', 'generate', 'bench'";
    let out = folder.path().join("out");
    let refuse = |text: String, says: &[&str]| {
        std::fs::write(&file, text).unwrap();
        refused(&["reproduce", &file, "-o", out.to_str().unwrap()], says);
        refused(&["reproduce", &file, "--dry-run"], says);
        assert!(!out.exists());
    };
    let never = text.replace(order, "'plan', 'check', 'validate', 'trace', 'generate', 'bench'");
    refuse(never, &["gate `check` needs the bundle that `build` makes"]);
    let odd =
        text.replace(order, "'bench', 'validate', 'plan', 'trace', 'build', 'generate', 'check', 'plan'");
    std::fs::write(&file, &odd).unwrap();
    let ran = json(0, &["reproduce", &file, "-o", out.to_str().unwrap()]);
    assert!(rows(&ran).iter().all(|(_, verdict, _)| verdict == "agrees"), "{ran:#}");
    let golden = text.replace("build = ['--skip-gates']", "build = ['--golden=later.npz']");
    std::fs::write(&file, golden).unwrap();
    let out = folder.path().join("other");
    refused(&["reproduce", &file, "-o", out.to_str().unwrap()], &["build fp16: build", "later.npz"]);
}

#[test]
fn a_shared_scale_needs_a_kind_with_one() {
    let source = "synthetic:gemma4-mini?layers=1";
    refused(&["plan", source, "--scale-scope", "bank"], &["--scale-scope bank", "int8-tensor"]);
    refused(&["plan", source, "--quant", "auto", "--scale-scope", "bank"], &["--scale-scope bank"]);
    refused(&["plan", source, "--quant", "int8-tensor", "--scale-scope", "row"], &["bank"]);
    let (code, out, _) = run(&["plan", source, "--quant", "int8-tensor", "--scale-scope", "bank"]);
    assert_eq!(code, 0, "{out}");
    assert!(out.contains("one scale for up to 262,144 weights"), "{out}");
}
