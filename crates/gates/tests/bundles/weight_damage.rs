//! Tests that the weight gate finds damage that hardly moves the predictions of the whole, and names it.

use crate::common::{fixed, fixture, ids};
use anemoe_bundle::{Chain, Gates};
use anemoe_convert::build::Build;
use anemoe_convert::compressed::CompressedMatrices;
use anemoe_convert::models::Family;
use anemoe_convert::plan::{Plan, PlanOptions};
use anemoe_gates::text_feedback;
use anemoe_gates::weight_gate::{self, WeightGate};
use anemoe_mlpackage::mil::{Binding, Value};
use anemoe_mlpackage::package::Package;
use anemoe_npz::{Array, read_npz, write_npz};
use half::f16;
use std::path::Path;

/// A built bundle and what it was built from.
struct Built {
    family: Family,
    plan: Plan,
    folder: tempfile::TempDir,
}

impl Built {
    /// Builds a fixture in a kind, with its weights compressed for a text where `calibrate` says so.
    fn new(kind: &str, calibrate: bool) -> Built {
        let family = fixture("tiny-gemma4-moe");
        let quant = kind.parse().unwrap();
        let plan = PlanOptions { quant, sort_head: calibrate, tokens: fixed(&[1]), ..PlanOptions::default() };
        let plan = family.plan(&plan).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let mut build = Build::begin(&family, &plan, None, &folder.path().join("b"), None).unwrap();
        if calibrate {
            let windows: Vec<Vec<u32>> = (0..16).map(|i| ids(i, 24)).collect();
            text_feedback::compress(&family, &plan, &windows, build.folder(), &mut |_, _| ()).unwrap();
            let _ = family.checked.compressed.set(CompressedMatrices::new(build.folder()));
        }
        build.host_files().unwrap();
        build.shards(&build.own_shards(), 1, &|_| ()).unwrap();
        build.finish(Gates::skipped()).unwrap();
        Built { family, plan, folder }
    }

    fn bundle(&self) -> std::path::PathBuf {
        self.folder.path().join("b")
    }

    fn gate(&self) -> WeightGate {
        let chain = Chain::read(&self.bundle()).unwrap();
        weight_gate::gate(&self.family, &self.plan, &self.bundle(), &chain, true, &mut || ()).unwrap()
    }

    /// Changes the stored bytes of an operand of a weight, passes them to the gate, and puts them back.
    fn damaged(&self, shard: &str, weight: &str, operand: &str, change: &dyn Fn(&mut [u8])) -> WeightGate {
        let path = self.bundle().join("shards").join(format!("{shard}.mlpackage"));
        let package = Package::open(&path).unwrap();
        let function = package.model().program.functions.values().next().unwrap();
        let named =
            |o: &&anemoe_mlpackage::mil::Operation| o.outputs.iter().any(|output| output.name == weight);
        let op = function.block.operations.iter().find(named).unwrap();
        let value: &Value = match op.inputs.get(operand).map(|a| a.0.as_slice()) {
            Some([Binding::Value(value)]) => value,
            _ => &op.attributes["val"],
        };
        let stored = package.blob(value).unwrap().data.to_vec();
        drop(package);
        let file = path.join("Data/com.apple.CoreML/weights/weight.bin");
        let whole = std::fs::read(&file).unwrap();
        let places: Vec<usize> =
            (0..=whole.len() - stored.len()).filter(|&i| whole[i..].starts_with(&stored)).collect();
        assert_eq!(places.len(), 1, "{weight} is found once");
        let mut other = whole.clone();
        change(&mut other[places[0]..][..stored.len()]);
        std::fs::write(&file, other).unwrap();
        let gate = self.gate();
        std::fs::write(&file, whole).unwrap();
        gate
    }
}

/// Expects one fault, at a place that is named.
fn names(gate: &WeightGate, weight: &str, what: &str) {
    let said: Vec<String> = gate.faults.iter().map(ToString::to_string).collect();
    assert!(!gate.pass && gate.wrong == 1 && said.len() == 1, "{said:?}");
    assert!(said[0].contains(weight) && said[0].contains(what), "{said:?}");
}

/// Multiplies fp16 values by 1.1.
fn louder(bytes: &mut [u8]) {
    for b in bytes.as_chunks_mut().0 {
        *b = f16::from_f32(f16::from_le_bytes(*b).to_f32() * 1.1).to_le_bytes();
    }
}

#[test]
fn planted_damage_is_named() {
    for (calibrate, least) in [(false, 0.9), (true, 0.3)] {
        let built = Built::new("lut4", calibrate);
        let whole = built.gate();
        assert!(whole.pass && whole.compared > 40 && whole.min_row_cosine > least, "{whole:?}");
        damage(&built);
    }
}

fn damage(built: &Built) {
    // Tables: entries in reverse order, and a tenth larger.
    let reversed = |bytes: &mut [u8]| bytes.as_chunks_mut::<2>().0.chunks_mut(16).for_each(<[_]>::reverse);
    names(
        &built.damaged("L00.ffn.p0of1", "expert_003_down_weight", "lut", &reversed),
        "expert_003_down_weight",
        "rows",
    );
    names(
        &built.damaged("L01.ffn.p0of1", "expert_001_gate_up_weight", "lut", &louder),
        "expert_001",
        "scale",
    );
    // Indices: the first eight rows for the last eight.
    let swapped = |bytes: &mut [u8]| {
        let eighth = bytes.len() / 8;
        let (first, rest) = bytes.split_at_mut(eighth);
        let at = rest.len() - eighth;
        first.swap_with_slice(&mut rest[at..]);
    };
    names(&built.damaged("L00.attn", "q_proj_weight", "indices", &swapped), "q_proj_weight", "rows");
    // Vectors are held to every bit.
    names(&built.damaged("L01.attn", "input_norm_weight", "val", &louder), "input_norm_weight", "value 0");
    assert!(built.gate().pass);
}

#[test]
fn rows_of_a_sorted_head_and_their_ids_belong_together() {
    let built = Built::new("int8-channel", true);
    assert!(built.gate().pass);
    let path = built.bundle().join("vectors.npz");
    let mut ids = read_npz(&path).unwrap()["head_order"].to_f32();
    ids.swap(3, 70);
    let array = Array::new(vec![ids.len()], ids).unwrap();
    write_npz(&path, &[("head_order".to_string(), array)]).unwrap();
    names(&built.gate(), "head_order", "value 3");
}

#[test]
fn a_package_of_other_weights_is_refused_by_name() {
    let built = Built::new("fp16", false);
    let shards = built.bundle().join("shards");
    let other = |name: &str| shards.join(format!("{name}.mlpackage"));
    copy(&other("L00.attn"), &other("L01.attn"));
    let gate = built.gate();
    assert!(!gate.pass && gate.faults.iter().all(|f| f.place == "L01.attn"), "{:?}", gate.faults);
    assert!(gate.faults.iter().any(|f| f.weight == "q_proj_weight"), "{:?}", gate.faults);
}

fn copy(from: &Path, to: &Path) {
    for file in ["Data/com.apple.CoreML/model.mlmodel", "Data/com.apple.CoreML/weights/weight.bin"] {
        std::fs::copy(from.join(file), to.join(file)).unwrap();
    }
}
