//! `anemoe check` with the built binary.

use crate::common::*;
use serde_json::{Value, json as value};
use std::path::Path;

/// Lists the packages that coremltools wrote.
fn interop() -> Vec<Place> {
    let folder = root("crates/runtime/tests/interop");
    let entries = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap());
    let names = entries.filter(|e| e.path().is_dir()).map(|e| e.file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names.iter().map(|name| folder.join(format!("{name}/{name}.mlpackage"))).collect()
}

fn count_ops(ops: &Value) -> u64 {
    ["ane", "gpu", "cpu", "unknown"].iter().map(|k| count(&ops[k])).sum()
}

fn rules<'a>(package: &'a Value, key: &'a str) -> Vec<&'a str> {
    each(&package[key], "rule").collect()
}

/// Runs the check, and checks the facts that other programs rely on: names and kinds of the fields, sums that agree, and a
/// status that agrees with `pass`. Returns the document.
fn check(path: &Path, options: &str) -> Value {
    let line = format!("check {} --json {options}", path.display());
    let (code, out, err) = run(&line);
    let v: Value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{line}: {e}\n{out}\n{err}"));
    let mut against = false;
    for p in list(&v["packages"]) {
        let (verdict, ops) = (text(&p["verdict"]), &p["ops"]);
        assert!(p["name"].is_string() && ops["no_device"].is_u64(), "{p}");
        let by_function = list(&p["functions"]).iter().map(|f| count_ops(&f["ops"]));
        assert_eq!(count_ops(ops), by_function.sum::<u64>());
        for r in list(&p["reasons"]) {
            let texts = ["rule", "severity", "op", "text", "advice", "question"];
            assert!(texts.iter().all(|key| r[key].is_string()) && r["evidence"].is_array(), "{r}");
            assert_ne!(r["severity"], "warning", "{r}");
        }
        match verdict {
            "ane" => assert_eq!(count(&ops["ane"]), count_ops(ops), "{p}"),
            "not_ane" | "unknown" => assert!(!list(&p["reasons"]).is_empty(), "{p}"),
            _ => panic!("{p}"),
        }
        against |= verdict == "not_ane" && p["too_small"] == false;
    }
    // A plan of a Mac decides over what is predicted.
    assert!(v["pass"] == !against || v["device"].is_object(), "{v}");
    assert_eq!(code, i32::from(v["pass"] == false), "{v}");
    v
}

#[test]
fn packages_of_coremltools_are_judged() {
    let packages = interop();
    assert_eq!(packages.len(), 26);
    for path in packages {
        let package = &check(&path, "--ops")["packages"][0];
        let name = path.file_stem().unwrap().to_str().unwrap();
        // Everything in fp32 is elsewhere, and so is the op that each of these packages is about.
        let expected = match name {
            n if n.ends_with("_f32") => vec!["type.fp32"],
            "cond_activations_ios15" => vec!["op.control_flow", "op.logic"],
            "tiny_llama_f16" => vec!["op.gather"],
            "moe_block_f16_s" => vec!["prefer.tiny"],
            "kv_cache_torch_f16" => vec!["state.two"],
            "int4_block32" => vec!["weight.blocks_small"],
            _ => vec![],
        };
        assert!(expected.iter().all(|rule| rules(package, "reasons").contains(rule)), "{name}: {package}");
        // Packages this small are not predicted on the Neural Engine.
        assert_ne!(package["verdict"], "ane", "{name}");
        if name == "kv_cache_torch_f16" {
            let warned = |options: &str| {
                let p = check(&path, options)["packages"][0].clone();
                [rules(&p, "reasons"), rules(&p, "warnings")].concat().contains(&"prefer.gpu_decodes")
            };
            assert!(!warned("") && warned("--units all"));
            let conditions = &check(&path, "--target iphone --chip a19")["conditions"];
            has(conditions, value!({"target": "iphone", "chip": "a19"}));
        }
    }
}

#[test]
fn a_bundle_of_small_shards_passes_and_says_why_it_is_small() {
    let bundle = built("tiny-gemma4-moe", "--tokens 1,4");
    let v = check(&bundle, "");
    assert!(v["pass"] == true && list(&v["packages"]).iter().all(|p| p["too_small"] == true), "{v}");
    ends(0, format!("check {bundle}"), &["too small for it to matter", "prefer.tiny"]);
    // Undecided and too small packages fail with --strict.
    assert_eq!(run(format!("check {bundle} --strict")).0, 1);
    // Scales per block are a reason of their own, small or not, and the advice is another kind.
    let bundle = built("tiny-gemma4-moe", "--quant int4-block --tokens 1");
    let v = check(&bundle, "");
    assert_eq!(v["pass"], false);
    let pack = list(&v["packages"]).iter().find(|p| p["kind"] == "experts_combine").unwrap();
    assert_eq!(pack["reasons"][0]["rule"], "weight.blocks_small", "{pack}");
    assert!(text(&pack["reasons"][0]["advice"]).contains("lut4"));
    assert_eq!(pack["ops"]["ane"], 0, "the whole package leaves with its weights");
}

#[test]
fn a_report_of_a_mac_is_joined_and_decides() {
    let bundle = built("tiny-gemma4-moe", "--tokens 1");
    let listed = check(&bundle, "--ops");
    let report = folder().join("r.json");
    let with_device = |device: Value| {
        let mut plans = Vec::new();
        for p in list(&listed["packages"]) {
            for f in list(&p["functions"]) {
                let op = |o: &Value| value!({"name": o["result"], "type": format!("ios18.{}", text(&o["type"])), "preferred": device});
                let mut ops: Vec<Value> = list(&f["op_list"]).iter().map(op).collect();
                ops.push(value!({"name": "w", "type": "ios18.constexpr_lut_to_dense"}));
                plans.push(value!({"package": p["name"], "function": f["name"], "ops": ops}));
            }
        }
        let all = value!({"format": 1, "os": "macOS 26.0", "chip": "Apple M4 Max", "compute_units": "cpuAndNeuralEngine", "plans": plans});
        std::fs::write(&report, all.to_string()).unwrap();
        check(&bundle, &format!("--report {report}"))
    };
    let v = with_device("ane".into());
    let device = &v["device"];
    has(&v, value!({"pass": true, "device": {"verdict": "ane", "not_in_packages": 0, "not_in_report": 0}}));
    // The prediction differed, and the table says so.
    let predicted_elsewhere = count(&device["confusion"]["not_ane"]["ane"]);
    assert!(device["disagreeing"] == predicted_elsewhere && predicted_elsewhere > 0, "{device}");
    assert_eq!(with_device("cpu".into())["pass"], false);
    let v = with_device(Value::Null);
    assert_eq!((&v["pass"], &v["device"]["verdict"]), (&false.into(), &"unknown".into()));
    ends(1, format!("check {bundle} --report {report}"), &["the plan says unknown"]);
}

/// Checks that each verdict but `ane` of a plan has its reason, once for all shards that share it, in the document and for
/// people; the verdicts are those of the bundle.
#[test]
fn plans_have_the_verdicts_of_their_bundles() {
    let plan = format!("plan {} --quant int4-block --tokens 1", fixture("tiny-gemma4-moe"));
    let (planned, out) = (json(0, &plan), passes(&plan));
    let checked = check(&built("tiny-gemma4-moe", "--quant int4-block --tokens 1"), "");
    let verdicts = |all: &Value| each(all, "verdict").map(String::from).collect::<Vec<_>>();
    assert_eq!(verdicts(&planned["shards"]), verdicts(&checked["packages"]));
    let reasons = list(&planned["verdict_reasons"]);
    let of = |r: &Value, s: &Value| {
        let begins = format!("{}: ", text(&r["rule"]));
        r["verdict"] == s["verdict"] && text(&s["verdict_reason"]).starts_with(&begins)
    };
    let against: Vec<&Value> = list(&planned["shards"]).iter().filter(|s| s["verdict"] != "ane").collect();
    assert!(!against.is_empty() && against.iter().all(|s| reasons.iter().any(|r| of(r, s))), "{reasons:?}");
    assert_eq!(reasons.iter().map(|r| count(&r["packages"])).sum::<u64>(), against.len() as u64);
    for r in reasons {
        let words = [format!(", {}", text(&r["first"])), format!("[{}]", text(&r["rule"]))];
        let lines = out.lines().filter(|line| words.iter().all(|word| line.contains(word)));
        assert_eq!(lines.count(), 1, "{r}\n{out}");
    }
}

#[test]
fn the_rules_print_themselves() {
    let rules = list(&json(0, "check --rules")["rules"]).clone();
    let is_whole = |r: &Value| r["rule"].is_string() && r["evidence"].is_array() && r["matches"].is_string();
    assert!(rules.len() > 60 && rules.iter().all(is_whole), "{rules:?}");
    assert!(passes("check --rules").contains("load.program_size"));
}

#[test]
fn tables_of_outcomes_are_scored() {
    let known = include_str!("../../../gates/src/residency/outcomes.tsv");
    let v = json(0, "check --outcomes known");
    for s in [&v["score"], &v["left_out"]] {
        assert!(number(&s["accuracy"]) >= 0.85 && number(&s["unknown_share"]) <= 0.35, "{s}");
        assert!(number(&s["forced"]) >= number(&s["majority"]), "{s}");
    }
    // A row names the rules or the measured graphs that decided it, and never itself.
    for row in list(&v["rows"]).iter().filter(|row| row["verdict"] == "ane") {
        assert!(!list(&row["rules"]).is_empty() && !list(&row["rows"]).contains(&row["id"]), "{row}");
    }
    let file = folder().join("own.tsv");
    let score = format!("check --outcomes {file}");
    let head = "id\tmodel_or_op\tgraph_facts\tquant\tMB\tshape/state\tchip_os\tlabel\tdetail\tsource\n";
    let unknown = "C\tan encoder\t-\t?\t?\t-\tM3\tMIXED\t\tme\n";
    let others = "A\tsingle linear 1000->1000\tk=1000 n=1000 M=1\tfp16\t2\tstateless M=1\tM3\tCPU_ALL\t\tme\n\
        B\tios18.cumsum\t-\tfp16\t\t-\tM3\tANE_ALL\t\tme\n";
    std::fs::write(&file, format!("{head}{others}{unknown}")).unwrap();
    let found = &json(0, &score)["score"];
    has(found, value!({"rows": 3, "decided": 2, "right": 1}));
    ends(0, &score, &["WRONG", "majority", "left out"]);
    // Where no row is decided, there is no accuracy.
    std::fs::write(&file, format!("{head}{unknown}")).unwrap();
    assert!(json(0, &score)["score"]["accuracy"].is_null() && passes(&score).contains("none decided"));
    std::fs::write(&file, head).unwrap();
    refused(&score, &["own.tsv", "no row"]);
    std::fs::write(&file, "a\tb\n1\t2\n").unwrap();
    refused(&score, &["own.tsv", "model_or_op"]);
    // A typed table has a column for each fact; an error names the allowed values of a cell.
    std::fs::write(&file, known.replacen("\tconv\t", "\tsideways\t", 1)).unwrap();
    refused(&score, &["own.tsv", "line", "sideways", "graph", "attention"]);
}

#[test]
fn bad_input_is_refused() {
    let dir = folder();
    std::fs::write(dir.join("r.json"), "{}").unwrap();
    let (original, broken) = (interop().remove(0), dir.join("broken.mlpackage"));
    copy(&original, &broken);
    let file = broken.join("Data/com.apple.CoreML/model.mlmodel");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    for (options, says) in [
        (format!("{dir}/nothing"), &["no such file or folder", "nothing"][..]),
        (format!("{dir}/x.mlpackage"), &["x.mlpackage"]),
        (String::new(), &["PATH"]),
        ("p.mlpackage --chip z80".into(), &["z80"]),
        ("p.mlpackage --device".into(), &["macOS"]),
        (format!("--outcomes {dir}/nothing"), &["nothing"]),
        (broken.to_string(), &["model.mlmodel"]),
        (format!("{original} --report {dir}/r.json"), &["r.json", "plan report"]),
    ] {
        refused(format!("check {options}"), says);
    }
    // Chips are read in one word.
    let bundle = built("tiny-gemma4-moe", "--tokens 1,4");
    for chip in ["m3max", "'M3 Max'", "m3-pro", "a17pro"] {
        check(&bundle, &format!("--chip {chip}"));
    }
    refused(format!("check {bundle} --chip m3fast"), &["not a known chip"]);
}

#[test]
fn side_files_that_a_run_would_refuse_are_refused() {
    let bundle = built("small", "--max-context 256 --no-journal");
    check(&bundle, "");
    for (name, text, says) in [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer.json", r#"{"version": "1.0"}"#, "tokenizer.json"),
        ("tokenizer_config.json", "no JSON", "JSON"),
        ("generation_config.json", r#"{"eos_token_id": [1, 77]}"#, "77 ends a text here"),
        ("generation_config.json", "{", "generation_config.json"),
    ] {
        let path = bundle.join(name);
        let kept = std::fs::read(small().join(name)).unwrap();
        std::fs::write(&path, text).unwrap();
        refused(format!("check {bundle} --no-journal"), &[name, says]);
        std::fs::write(&path, kept).unwrap();
    }
    check(&bundle, "");
}

/// Checks commands with Core ML on systems without it, where it is not the default.
#[cfg(not(target_os = "macos"))]
#[test]
fn core_ml_is_refused_where_there_is_none() {
    let bundle = built("tiny-gemma4-moe", "--tokens 1,4");
    let model = fixture("tiny-gemma4-moe");
    let (generate, golden) =
        (format!("generate {bundle} --prompt-ids 1,2 --max-new 2"), model.join("golden.npz"));
    for (line, says) in [
        (format!("{generate} --backend coreml"), &["Core ML is a part of macOS", "--backend cpu"][..]),
        (format!("bench {bundle} --backend coreml"), &["Core ML is a part of macOS"]),
        (format!("validate {bundle} --golden {golden} --backend coreml"), &["Core ML is a part of macOS"]),
        (format!("compile {bundle}"), &["Core ML is a part of macOS"]),
        (format!("tune {model}"), &["Core ML is a part of macOS"]),
        (format!("check {bundle} --device"), &["Core ML is a part of macOS"]),
        ("step".into(), &["`step` is for anemoe itself"]),
        (format!("{generate} --backend coreml --fast"), &["--fast", "--backend cpu"]),
        (format!("{generate} --backend cpu --max-loaded 1"), &["--max-loaded"]),
        (format!("{generate} --max-loaded 0"), &["no number of GB"]),
    ] {
        // Some of these commands read their standard input.
        refuses(anemoe(&line).stdin(std::process::Stdio::null()), says);
    }
    let by = |backend: &str| json(0, format!("{generate} {backend}"))["generated_ids"].clone();
    assert_eq!(by(""), by("--backend cpu"));
}
