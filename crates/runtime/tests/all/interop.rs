//! Runs packages written by coremltools in both precisions, fused and step by step, and compares with stored results;
//! `interop/README.md` describes the packages and the tolerances.

use anemoe_npz::{Array, read_npz};
use anemoe_runtime::cpu::{CpuPackage, CpuStates, Options, Precision};
use anemoe_runtime::predict::{bind, results};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn compare(
    case: &str,
    name: &str,
    got: &Array,
    expected: &Array,
    min_cosine: f64,
    max_relative: f64,
) -> Result<(), String> {
    // A scalar is given with an axis of one element.
    let scalar = expected.shape.is_empty() && got.shape == [1];
    if got.shape != expected.shape && !scalar {
        return Err(format!("{case}: {name}: shape {:?}, expected {:?}", got.shape, expected.shape));
    }
    if matches!(expected.data, anemoe_npz::ArrayData::I32(_)) {
        return if got.to_i64() == expected.to_i64() {
            Ok(())
        } else {
            Err(format!("{case}: {name}: integers differ"))
        };
    }
    let wide = |a: &Array| a.to_f32().into_iter().map(f64::from).collect::<Vec<_>>();
    let (a, b) = (wide(got), wide(expected));
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(p, q)| p * q).sum::<f64>();
    let (na, nb) = (dot(&a, &a).sqrt(), dot(&b, &b).sqrt());
    let cosine = if na == 0.0 && nb == 0.0 { 1.0 } else { dot(&a, &b) / (na * nb) };
    let off = a.iter().zip(&b).map(|(x, y)| (x - y) * (x - y)).sum::<f64>().sqrt();
    let relative = if nb > 0.0 { off / nb } else { off };
    if cosine >= min_cosine && relative <= max_relative {
        Ok(())
    } else {
        Err(format!("{case}: {name}: cosine {cosine}, relative error {relative}"))
    }
}

/// Named results of each step.
type Steps = Vec<BTreeMap<String, Array>>;

/// Runs the steps of one function of a case; returns a list of errors, and all results.
fn run(
    case: &Path,
    info: &Value,
    function: Option<&str>,
    steps: &[(String, String)],
    precision: Precision,
    fuse: bool,
) -> (Vec<String>, Steps) {
    let name = info["name"].as_str().unwrap();
    let label = format!("{name} {precision:?} fuse {fuse} {}", function.unwrap_or("default"));
    let package =
        CpuPackage::open(&case.join(format!("{name}.mlpackage"))).unwrap_or_else(|e| panic!("{label}: {e}"));
    let options = Options { precision, fuse, ..Options::default() };
    let function = package.compile(function, options).unwrap_or_else(|e| panic!("{label}: {e}"));
    let (mut states, mut outputs) = (CpuStates::new(&function), Vec::new());
    let (mut problems, mut all) = (Vec::new(), Vec::new());
    for (inputs, expected) in steps {
        let path = case.join(inputs);
        let inputs = bind(&function, &mut states, read_npz(&path).unwrap(), &path)
            .unwrap_or_else(|e| panic!("{label}: {e}"));
        function
            .run(&inputs.iter().collect::<Vec<_>>(), &mut states, &mut outputs)
            .unwrap_or_else(|e| panic!("{label}: {e}"));
        let entries = results(&function, &outputs, &states, precision);
        let given = entries.len();
        let found: BTreeMap<String, Array> = entries.into_iter().collect();
        assert_eq!(found.len(), given, "{label}: a result that is there twice");
        for (key, value) in read_npz(&case.join(expected)).unwrap() {
            let Some(got) = found.get(&key) else {
                problems.push(format!("{label}: no output `{key}`"));
                continue;
            };
            let min_cosine = info["tolerance_cos"].as_f64().unwrap();
            let max_relative = info["tolerance_rtol"].as_f64().unwrap_or(f64::INFINITY);
            problems.extend(compare(&label, &key, got, &value, min_cosine, max_relative).err());
        }
        all.push(found);
    }
    (problems, all)
}

/// Tells whether the results have the same bits.
fn are_same(a: &Steps, b: &Steps) -> bool {
    let bits = |a: &Array| match &a.data {
        anemoe_npz::ArrayData::F32(v) => v.iter().map(|v| i64::from(v.to_bits())).collect(),
        anemoe_npz::ArrayData::F16(v) => v.iter().map(|v| i64::from(v.to_bits())).collect(),
        _ => a.to_i64().unwrap_or_default(),
    };
    let same = |(a, b): (&BTreeMap<String, Array>, &BTreeMap<String, Array>)| {
        a.len() == b.len()
            && a.iter().zip(b).all(|((n, a), (m, b))| n == m && a.shape == b.shape && bits(a) == bits(b))
    };
    a.len() == b.len() && a.iter().zip(b).all(same)
}

/// Runs every case of a folder in both precisions, and fails with a list of the errors.
fn run_folder(name: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name);
    let mut cases: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()).collect();
    cases.sort();
    assert!(!cases.is_empty(), "no case in {name}");
    let mut problems = Vec::new();
    for case in &cases {
        let info: Value = serde_json::from_slice(&std::fs::read(case.join("case.json")).unwrap()).unwrap();
        let text = |v: &Value| v.as_str().map(str::to_string);
        let steps: Vec<(String, String)> = match info["steps"].as_u64().unwrap() {
            1 if case.join("inputs.npz").exists() => vec![("inputs.npz".into(), "expected.npz".into())],
            n => (0..n).map(|k| (format!("step{k}.npz"), format!("expected{k}.npz"))).collect(),
        };
        let mut functions = vec![(info["function"].as_str().map(str::to_string), steps)];
        if let Some(also) = info.get("also") {
            let steps = vec![(text(&also["inputs"]).unwrap(), text(&also["expected"]).unwrap())];
            functions.push((text(&also["function"]), steps));
        }
        for (function, steps) in &functions {
            for precision in [Precision::Fp16, Precision::Fp32] {
                let [(one, by_steps), (two, fused)] =
                    [false, true].map(|fuse| run(case, &info, function.as_deref(), steps, precision, fuse));
                problems.extend(one.into_iter().chain(two));
                // With rounding, a plan gives the same bits as separate operations.
                if precision == Precision::Fp16 && !are_same(&by_steps, &fused) {
                    problems.push(format!("{}: fused, other bits in fp16", case.display()));
                }
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn packages_of_coremltools_give_their_results() {
    run_folder("interop");
}

/// Runs the cases that `suite/generate.py` makes, all of which are there.
#[test]
fn programs_of_the_op_suite_give_their_results() {
    let suite = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/suite");
    let generator = std::fs::read_to_string(suite.join("generate.py")).unwrap();
    let names = generator
        .lines()
        .filter_map(|line| line.strip_prefix("program(\"").or_else(|| line.strip_prefix("compressed(\"")))
        .filter_map(|rest| rest.split_once('"'));
    for (name, _) in names {
        assert!(suite.join(name).join("case.json").exists(), "{name}");
    }
    run_folder("suite");
}
