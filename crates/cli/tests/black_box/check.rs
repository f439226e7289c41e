//! `anemoe check` with the built binary.

use crate::common::{build, copy, fixture, json, refused, run};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Lists the packages that coremltools wrote.
fn interop() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../runtime/tests/interop");
    let mut cases: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()).collect();
    cases.sort();
    cases.iter().map(|c| c.join(c.file_name().unwrap()).with_extension("mlpackage")).collect()
}

fn count(ops: &Value) -> u64 {
    ["ane", "gpu", "cpu", "unknown"].iter().map(|k| ops[k].as_u64().unwrap()).sum()
}

/// Checks the facts that other programs rely on: names and kinds of the fields, sums that agree, and a status that agrees
/// with `pass`.
fn contract(v: &Value) {
    let packages = v["packages"].as_array().unwrap();
    let mut against = false;
    for p in packages {
        assert!(p["name"].is_string(), "{p}");
        let verdict = p["verdict"].as_str().unwrap();
        assert!(["ane", "not_ane", "unknown"].contains(&verdict), "{p}");
        assert!(p["ops"]["no_device"].is_u64(), "{p}");
        let by_function: u64 = p["functions"].as_array().unwrap().iter().map(|f| count(&f["ops"])).sum();
        assert_eq!(count(&p["ops"]), by_function);
        for r in p["reasons"].as_array().unwrap() {
            for key in ["rule", "severity", "op", "text", "advice", "question"] {
                assert!(r[key].is_string(), "{key}: {r}");
            }
            assert!(r["evidence"].is_array(), "{r}");
            assert_ne!(r["severity"], "warning", "{r}");
        }
        match verdict {
            "ane" => assert_eq!(p["ops"]["ane"].as_u64(), Some(count(&p["ops"])), "{p}"),
            _ => assert!(!p["reasons"].as_array().unwrap().is_empty(), "{p}"),
        }
        against |= verdict == "not_ane" && p["too_small"] == false;
    }
    assert_eq!(v["pass"].as_bool(), Some(!against), "{v}");
}

fn check(path: &Path, options: &[&str]) -> (i32, Value) {
    let mut args = vec!["check", text(path), "--json"];
    args.extend(options);
    let (code, out, err) = run(&args);
    assert!(!err.contains("panicked"), "{err}");
    let v = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{args:?}: {e}\n{out}\n{err}"));
    (code, v)
}

#[test]
fn packages_of_coremltools_are_judged() {
    let packages = interop();
    assert_eq!(packages.len(), 26);
    for path in packages {
        let (code, v) = check(&path, &["--ops"]);
        contract(&v);
        assert_eq!(code, i32::from(v["pass"] == false), "{v}");
        let name = path.file_stem().unwrap().to_str().unwrap();
        let rules: Vec<&str> = v["packages"][0]["reasons"]
            .as_array()
            .unwrap()
            .iter()
            .map(|r| r["rule"].as_str().unwrap())
            .collect();
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
        for rule in expected {
            assert!(rules.contains(&rule), "{name}: {rules:?}");
        }
        // Packages this small are not predicted on the Neural Engine.
        assert_ne!(v["packages"][0]["verdict"], "ane", "{name}");
    }
}

#[test]
fn a_bundle_of_small_shards_passes_and_says_why_it_is_small() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b");
    build(&fixture("tiny-gemma4-moe"), &bundle, &["--quant", "lut4", "--tokens", "1,4"]);
    let (code, v) = check(&bundle, &[]);
    contract(&v);
    assert_eq!(code, 0);
    assert!(v["packages"].as_array().unwrap().iter().all(|p| p["too_small"] == true), "{v}");
    let (code, out, _) = run(&["check", text(&bundle)]);
    assert_eq!(code, 0);
    assert!(out.contains("too small for it to matter") && out.contains("prefer.tiny"), "{out}");
    // Undecided and too small packages fail with --strict.
    assert_eq!(run(&["check", text(&bundle), "--strict"]).0, 1);
}

/// Checks that scales per block are a reason of their own, small or not, and that the advice is another kind.
#[test]
fn a_bundle_with_scales_per_block_fails() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b");
    build(&fixture("tiny-gemma4-moe"), &bundle, &["--quant", "int4-block", "--tokens", "1"]);
    let (code, v) = check(&bundle, &[]);
    contract(&v);
    assert_eq!(code, 1);
    let pack = v["packages"].as_array().unwrap().iter().find(|p| p["kind"] == "experts_combine").unwrap();
    assert_eq!(pack["reasons"][0]["rule"], "weight.blocks_small", "{pack}");
    assert!(pack["reasons"][0]["advice"].as_str().unwrap().contains("lut4"));
    assert_eq!(pack["ops"]["ane"], 0, "the whole package leaves with its weights");
}

#[test]
fn a_report_of_a_mac_is_joined_and_decides() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b");
    build(&fixture("tiny-gemma4-moe"), &bundle, &["--quant", "lut4", "--tokens", "1"]);
    let (_, listed) = check(&bundle, &["--ops"]);
    let report = |device: Value, name: &str| {
        let mut plans = Vec::new();
        for p in listed["packages"].as_array().unwrap() {
            for f in p["functions"].as_array().unwrap() {
                let op = |o: &Value| {
                    let op_type = format!("ios18.{}", o["type"].as_str().unwrap());
                    serde_json::json!({"name": o["result"], "type": op_type, "preferred": device})
                };
                let mut ops: Vec<Value> = f["op_list"].as_array().unwrap().iter().map(op).collect();
                ops.push(serde_json::json!({"name": "w", "type": "ios18.constexpr_lut_to_dense"}));
                plans.push(serde_json::json!({"package": p["name"], "function": f["name"], "ops": ops}));
            }
        }
        let report = serde_json::json!({
            "format": 1, "os": "macOS 26.0", "chip": "Apple M4 Max", "compute_units": "cpuAndNeuralEngine", "plans": plans,
        });
        let path = dir.path().join(name);
        std::fs::write(&path, report.to_string()).unwrap();
        path
    };
    let on_ane = report(Value::from("ane"), "ane.json");
    let (code, v) = check(&bundle, &["--report", text(&on_ane)]);
    assert_eq!((code, &v["pass"]), (0, &Value::Bool(true)));
    let device = &v["device"];
    assert_eq!(device["verdict"], "ane");
    assert_eq!(device["not_in_packages"], 0, "{device}");
    assert_eq!(device["not_in_report"], 0, "{device}");
    // The prediction differed, and the table says so.
    let predicted_elsewhere = device["confusion"]["not_ane"]["ane"].as_u64().unwrap();
    assert_eq!(device["disagreeing"].as_u64(), Some(predicted_elsewhere));
    assert!(predicted_elsewhere > 0);

    let on_cpu = report(Value::from("cpu"), "cpu.json");
    assert_eq!(check(&bundle, &["--report", text(&on_cpu)]).0, 1);
    let nowhere = report(Value::Null, "none.json");
    let (code, v) = check(&bundle, &["--report", text(&nowhere)]);
    assert_eq!((code, &v["device"]["verdict"]), (1, &Value::from("unknown")));
    let (_, out, _) = run(&["check", text(&bundle), "--report", text(&nowhere)]);
    assert!(out.contains("the plan says unknown"), "{out}");
}

/// Checks that a plan's verdict of each shard is the check's verdict of its package.
#[test]
fn plans_have_the_verdicts_of_their_bundles() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("b");
    // Other layouts of the same networks are tried with the first options alone.
    let models = [
        ("tiny-gemma4-moe", 5),
        ("tiny-gemma4-moe-text", 1),
        ("tiny-zaya", 5),
        ("tiny-zaya-legacy", 1),
        ("tiny-zaya-skip", 2),
    ];
    for (model, tries) in models {
        let options = [
            &["--quant", "fp16"][..],
            &["--quant", "int4-block", "--tokens", "1,4"],
            &["--quant", "int8-tensor", "--token-range", "1..4"],
            &["--experts-per-shard", "1"],
            &["--ffn-shards", "2"],
        ];
        for options in &options[..tries] {
            let model = fixture(model);
            let mut args = vec!["plan", text(&model)];
            args.extend(*options);
            let planned = json(0, &args);
            build(&model, &bundle, options);
            let (_, checked) = check(&bundle, &[]);
            let verdicts = |v: &Value| -> Vec<(Value, Value)> {
                v.as_array().unwrap().iter().map(|s| (s["name"].clone(), s["verdict"].clone())).collect()
            };
            assert_eq!(verdicts(&planned["shards"]), verdicts(&checked["packages"]), "{args:?}");
            for (shard, package) in
                planned["shards"].as_array().unwrap().iter().zip(checked["packages"].as_array().unwrap())
            {
                let reason = shard["verdict_reason"].as_str().unwrap();
                let rule = package["reasons"][0]["rule"].as_str().unwrap();
                assert!(reason.starts_with(rule), "{shard} {rule}");
            }
            reasons_are_printed(&planned, &args);
            std::fs::remove_dir_all(&bundle).unwrap();
        }
    }
}

/// Checks that each verdict but `ane` has its reason, once for all shards that share it, in the document and for people.
fn reasons_are_printed(planned: &Value, args: &[&str]) {
    let reasons = planned["verdict_reasons"].as_array().unwrap();
    let shards = planned["shards"].as_array().unwrap();
    let of = |r: &Value, s: &Value| {
        let reason = s["verdict_reason"].as_str().unwrap();
        r["verdict"] == s["verdict"] && reason.starts_with(&format!("{}: ", r["rule"].as_str().unwrap()))
    };
    let against: Vec<&Value> = shards.iter().filter(|s| s["verdict"] != "ane").collect();
    assert!(!against.is_empty() && against.iter().all(|s| reasons.iter().any(|r| of(r, s))), "{reasons:?}");
    let told: u64 = reasons.iter().map(|r| r["packages"].as_u64().unwrap()).sum();
    assert_eq!(told, against.len() as u64);
    let (_, out, _) = run(args);
    for r in reasons {
        let (first, rule) = (r["first"].as_str().unwrap(), r["rule"].as_str().unwrap());
        let lines =
            out.lines().filter(|l| l.contains(&format!(", {first}")) && l.contains(&format!("[{rule}]")));
        assert_eq!(lines.count(), 1, "{r}\n{out}");
    }
}

/// Checks that advice of Apple's rules is gone where it was followed.
#[test]
fn advice_that_was_followed_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let followed =
        ["apple.one_position_last", "apple.scaled_norm", "apple.native_activation", "apple.heads_together"];
    let options =
        ["--io", "channels-last", "--norm", "plain", "--activation", "sigmoid", "--attention", "per-head"];
    for model in ["tiny-gemma4-moe", "tiny-zaya"] {
        for (name, options) in [("default", &[][..]), ("followed", &options)] {
            let bundle = dir.path().join(format!("{model}-{name}"));
            build(&fixture(model), &bundle, &[&["--quant", "fp16"][..], options].concat());
            let (_, checked) = check(&bundle, &[]);
            let packages = checked["packages"].as_array().unwrap();
            let warnings = packages.iter().flat_map(|p| p["warnings"].as_array().unwrap());
            let given: Vec<&str> = warnings.map(|w| w["rule"].as_str().unwrap()).collect();
            for rule in followed {
                assert_eq!(given.contains(&rule), name == "default", "{model} {name}: {rule}");
            }
        }
    }
}

#[test]
fn options_change_what_is_predicted() {
    let path = interop().into_iter().find(|p| p.ends_with("kv_cache_torch_f16.mlpackage")).unwrap();
    let rules = |options: &[&str]| -> Vec<String> {
        let (_, v) = check(&path, options);
        let p = &v["packages"][0];
        let all = [&p["reasons"], &p["warnings"]];
        all.iter()
            .flat_map(|l| l.as_array().unwrap())
            .map(|r| r["rule"].as_str().unwrap().to_string())
            .collect()
    };
    assert!(!rules(&[]).contains(&"prefer.gpu_decodes".to_string()));
    assert!(rules(&["--units", "all"]).contains(&"prefer.gpu_decodes".to_string()));
    let (_, v) = check(&path, &["--target", "iphone", "--chip", "a19"]);
    assert_eq!(v["conditions"]["target"], "iphone");
    assert_eq!(v["conditions"]["chip"], "a19");
}

#[test]
fn the_rules_print_themselves() {
    let v = json(0, &["check", "--rules"]);
    let rules = v["rules"].as_array().unwrap();
    assert!(rules.len() > 60);
    for r in rules {
        assert!(r["rule"].is_string() && r["evidence"].is_array() && r["matches"].is_string(), "{r}");
    }
    let (code, out, _) = run(&["check", "--rules"]);
    assert_eq!(code, 0);
    assert!(out.contains("load.program_size") && out.contains("prefer.layers"), "{out}");
}

#[test]
fn tables_of_outcomes_are_scored() {
    let known = include_str!("../../../gates/src/residency/outcomes.tsv");
    let v = json(0, &["check", "--outcomes", "known"]);
    let figure = |v: &Value, key: &str| v[key].as_f64().unwrap();
    for s in [&v["score"], &v["left_out"]] {
        assert!(figure(s, "accuracy") >= 0.85 && figure(s, "unknown_share") <= 0.35, "{s}");
        assert!(figure(s, "forced") >= figure(s, "majority"), "{s}");
    }
    // A row names the rules or the measured graphs that decided it, and never itself.
    for row in v["rows"].as_array().unwrap().iter().filter(|row| row["verdict"] == "ane") {
        assert!(!row["rules"].as_array().unwrap().is_empty(), "{row}");
        assert!(row["rows"].as_array().unwrap().iter().all(|id| *id != row["id"]), "{row}");
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("own.tsv");
    let lines = "id\tmodel_or_op\tgraph_facts\tquant\tMB\tshape/state\tchip_os\tlabel\tdetail\tsource\n\
        A\tsingle linear 1000->1000\tk=1000 n=1000 M=1\tfp16\t2\tstateless M=1\tM3\tCPU_ALL\t\tme\n\
        B\tios18.cumsum\t-\tfp16\t\t-\tM3\tANE_ALL\t\tme\n\
        C\tan encoder\t-\t?\t?\t-\tM3\tMIXED\t\tme\n";
    std::fs::write(&file, lines).unwrap();
    let v = json(0, &["check", "--outcomes", text(&file)]);
    let score = &v["score"];
    assert_eq!((&score["rows"], &score["decided"], &score["right"]), (&3.into(), &2.into(), &1.into()));
    let (code, out, _) = run(&["check", "--outcomes", text(&file)]);
    assert_eq!(code, 0);
    assert!(out.contains("WRONG") && out.contains("majority") && out.contains("left out"), "{out}");
    // Where no row is decided, there is no accuracy.
    let head = lines.lines().next().unwrap();
    std::fs::write(&file, format!("{head}\n{}\n", lines.lines().last().unwrap())).unwrap();
    assert!(json(0, &["check", "--outcomes", text(&file)])["score"]["accuracy"].is_null());
    assert!(run(&["check", "--outcomes", text(&file)]).1.contains("none decided"));
    std::fs::write(&file, head).unwrap();
    refused(&["check", "--outcomes", text(&file)], &["own.tsv", "no row"]);
    // A typed table has a column for each fact; an error names the allowed values of a cell.
    std::fs::write(&file, known.replacen("\tconv\t", "\tsideways\t", 1)).unwrap();
    refused(&["check", "--outcomes", text(&file)], &["own.tsv", "line", "sideways", "graph", "attention"]);
}

#[test]
fn bad_input_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let nothing = dir.path().join("nothing");
    refused(&["check", text(&nothing)], &["no such file or folder", "nothing"]);
    refused(&["check", text(&dir.path().join("x.mlpackage"))], &["x.mlpackage"]);
    refused(&["check"], &["PATH"]);
    refused(&["check", "p.mlpackage", "--chip", "z80"], &["z80"]);
    refused(&["check", "p.mlpackage", "--device"], &["macOS"]);
    refused(&["check", "--outcomes", text(&nothing)], &["nothing"]);

    let original = interop().remove(0);
    let broken = dir.path().join("broken.mlpackage");
    copy(&original, &broken);
    let file = broken.join("Data/com.apple.CoreML/model.mlmodel");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    refused(&["check", text(&broken)], &["model.mlmodel"]);

    let table = dir.path().join("t.tsv");
    std::fs::write(&table, "a\tb\n1\t2\n").unwrap();
    refused(&["check", "--outcomes", text(&table)], &["t.tsv", "model_or_op"]);
    let report = dir.path().join("r.json");
    std::fs::write(&report, "{}").unwrap();
    refused(&["check", text(&original), "--report", text(&report)], &["r.json", "plan report"]);

    let bundle = dir.path().join("b");
    build(&fixture("tiny-gemma4-moe"), &bundle, &["--quant", "lut4", "--tokens", "1"]);
    std::fs::remove_dir_all(bundle.join("shards/L01.attn.mlpackage")).unwrap();
    refused(&["check", text(&bundle)], &["L01.attn.mlpackage"]);
    std::fs::write(bundle.join("chain.json"), "{\"format\": 1").unwrap();
    refused(&["check", text(&bundle)], &["chain.json"]);
}
