//! Checkpoints as a whole: the fixtures open, and each way to damage one is refused with an error that names it.

use anemoe_convert::Error;
use anemoe_convert::checkpoint::Checkpoint;
use anemoe_convert::models;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn open(folder: &Path) -> Result<(), Error> {
    models::open(Checkpoint::open(folder.to_str().unwrap())?).map(|_| ())
}

/// A copy of the tiny text checkpoint (one file) that a test damages.
struct Copy(tempfile::TempDir);

impl Copy {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for file in fs::read_dir(repository("fixtures/tiny-gemma4-moe-text")).unwrap() {
            let file = file.unwrap().path();
            fs::copy(&file, dir.path().join(file.file_name().unwrap())).unwrap();
        }
        Copy(dir)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Changes the header of the weights, and lets the data follow it.
    fn header(self, change: impl FnOnce(&mut Map<String, Value>, &mut Vec<u8>)) -> Self {
        let bytes = fs::read(self.at("model.safetensors")).unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
        let mut data = bytes[8 + n..].to_vec();
        change(&mut header, &mut data);
        let header = serde_json::to_vec(&header).unwrap();
        let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
        fs::write(self.at("model.safetensors"), file).unwrap();
        self
    }

    /// Adds a tensor behind all others.
    fn with_tensor(self, name: &str) -> Self {
        self.header(|header, data| {
            let end = data.len();
            header
                .insert(name.into(), json!({"dtype": "BF16", "shape": [3], "data_offsets": [end, end + 6]}));
            data.extend([0; 6]);
        })
    }

    fn config(self, change: impl FnOnce(&mut Value)) -> Self {
        let mut config = serde_json::from_slice(&fs::read(self.at("config.json")).unwrap()).unwrap();
        change(&mut config);
        fs::write(self.at("config.json"), serde_json::to_vec(&config).unwrap()).unwrap();
        self
    }

    /// What is said of a checkpoint that is wrong.
    fn invalid(&self) -> String {
        match open(self.0.path()).unwrap_err() {
            Error::Invalid { path, what } if path.starts_with(self.0.path()) => what,
            other => panic!("{other}"),
        }
    }

    /// What is said of a checkpoint that is not implemented.
    fn unsupported(&self) -> String {
        match open(self.0.path()).unwrap_err() {
            Error::Unsupported { path, what } if path.starts_with(self.0.path()) => what,
            other => panic!("{other}"),
        }
    }
}

const Q_PROJ: &str = "model.layers.1.self_attn.q_proj.weight";

#[test]
fn every_layout_opens() {
    for name in ["fixtures/tiny-gemma4-moe", "fixtures/tiny-gemma4-moe-text", "models/small-gemma4"] {
        open(&repository(name)).unwrap();
    }
    open(Copy::new().0.path()).unwrap();
}

/// One network in two layouts: the same configuration and the same values.
#[test]
fn both_layouts_hold_the_same_weights() {
    let [published, text] = ["tiny-gemma4-moe", "tiny-gemma4-moe-text"].map(|name| {
        let folder = repository("fixtures").join(name);
        models::open(Checkpoint::open(folder.to_str().unwrap()).unwrap()).unwrap()
    });
    for (tensor, elements) in
        [("layers.5.experts.down_proj", 8 * 64 * 32), ("layers.0.self_attn.v_proj.weight", 32 * 64)]
    {
        let (mut a, mut b) = (vec![0f32; elements], vec![1f32; elements]);
        published.read(tensor, 0..elements as u64, &mut a).unwrap();
        text.read(tensor, 0..elements as u64, &mut b).unwrap();
        assert_eq!(a, b, "{tensor}");
    }
}

#[test]
fn tensors_that_text_does_not_need_are_skipped() {
    for name in [
        "model.vision_tower.encoder.layers.0.weight",
        "model.embed_vision.embedding_projection.weight",
        "model.audio_tower.conv.weight",
        "model.embed_audio.weight",
        "model.multi_modal_projector.weight",
        "lm_head.weight",
    ] {
        open(Copy::new().with_tensor(name).0.path()).unwrap();
    }
}

#[test]
fn a_missing_tensor() {
    let copy = Copy::new().header(|header, data| {
        // The last tensor, so that the others stay in place.
        let last = header.iter().max_by_key(|(_, e)| e["data_offsets"][1].as_u64()).unwrap();
        let (name, start) = (last.0.clone(), last.1["data_offsets"][0].as_u64().unwrap());
        header.remove(&name);
        data.truncate(start as usize);
        assert_eq!(name, "model.norm.weight");
    });
    assert!(copy.invalid().contains("tensor `model.norm.weight` [64] is missing"));
}

#[test]
fn an_extra_tensor() {
    let copy = Copy::new().with_tensor("model.layers.6.input_layernorm.weight");
    assert!(copy.invalid().contains("tensor `model.layers.6.input_layernorm.weight`"));
}

#[test]
fn a_checkpoint_without_an_embedding() {
    let copy = Copy::new().header(|header, _| {
        let entry = header.remove("model.embed_tokens.weight").unwrap();
        header.insert("model.embedding.weight".into(), entry);
    });
    assert!(copy.invalid().contains("model.embed_tokens.weight"));
}

#[test]
fn a_wrong_shape() {
    let copy = Copy::new().header(|header, _| header[Q_PROJ]["shape"] = json!([32, 128]));
    let what = copy.invalid();
    assert!(what.contains(Q_PROJ) && what.contains("[32, 128]") && what.contains("[64, 64]"), "{what}");
}

#[test]
fn a_wrong_dtype() {
    let copy = Copy::new().header(|header, _| header[Q_PROJ]["dtype"] = json!("I16"));
    let what = copy.unsupported();
    assert!(what.contains(Q_PROJ) && what.contains("I16") && what.contains("BF16"), "{what}");
}

#[test]
fn a_configuration_of_another_family() {
    let what = Copy::new().config(|c| c["model_type"] = json!("llama")).unsupported();
    assert!(what.contains("llama") && what.contains("gemma4"), "{what}");
    let what = Copy::new().config(|c| drop(c.as_object_mut().unwrap().remove("model_type"))).invalid();
    assert!(what.contains("model_type"), "{what}");
}

#[test]
fn a_configuration_with_an_unknown_feature() {
    let what = Copy::new().config(|c| c["hidden_size_per_layer_input"] = json!(256)).unsupported();
    assert!(what.contains("hidden_size_per_layer_input"), "{what}");
}

#[test]
fn a_configuration_of_another_size() {
    let what = Copy::new().config(|c| c["num_experts"] = json!(16)).invalid();
    assert!(what.contains("experts") && what.contains("16"), "{what}");
}

#[test]
fn a_configuration_that_is_not_json() {
    let copy = Copy::new();
    for text in [&b""[..], b"{", b"\xff", b"[]", b"3"] {
        fs::write(copy.at("config.json"), text).unwrap();
        copy.invalid();
    }
    fs::remove_file(copy.at("config.json")).unwrap();
    assert!(matches!(open(copy.0.path()), Err(Error::Io { path, .. }) if path.ends_with("config.json")));
}

#[test]
fn a_configuration_nested_without_end() {
    let copy = Copy::new();
    fs::write(copy.at("config.json"), "[".repeat(1 << 20)).unwrap();
    assert!(copy.invalid().contains("recursion"));
}

/// Opening does not read the weights; reading finds it.
#[test]
fn a_weight_that_is_not_a_number() {
    let copy = Copy::new().header(|header, data| {
        let at = header[Q_PROJ]["data_offsets"][0].as_u64().unwrap() as usize + 2 * 70;
        data[at..at + 2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    });
    let family = models::open(Checkpoint::open(copy.0.path().to_str().unwrap()).unwrap()).unwrap();
    let name = Q_PROJ.strip_prefix("model.").unwrap();
    family.read(name, 0..70, &mut [0f32; 70]).unwrap();
    let err = family.read(name, 64..128, &mut [0f32; 64]).unwrap_err().to_string();
    assert!(err.contains(Q_PROJ) && err.contains("element 70 is NaN"), "{err}");
}

#[test]
fn a_folder_that_is_not_there() {
    assert!(matches!(open(&repository("no/such/folder")), Err(Error::Io { .. })));
}

#[test]
fn the_synthetic_model_has_every_tensor_of_the_real_one() {
    let checkpoint = Checkpoint::open("synthetic:gemma4-26b-a4b?seed=1").unwrap();
    let parameters: u64 = checkpoint.source.tensors().iter().map(|t| t.elements()).sum();
    assert_eq!((checkpoint.source.tensors().len(), parameters), (657, 25_233_141_790));
    let family = models::open(checkpoint).unwrap();
    // One expert of the last layer, of 128.
    let mut slab = vec![0f32; 1408 * 2816];
    let n = slab.len() as u64;
    family.read("layers.29.experts.gate_up_proj", 127 * n..128 * n, &mut slab).unwrap();
    let mean_square = slab.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n as f64;
    // Deviation 1/sqrt(2816), and one of 1024 weights ten times as large.
    let expected = (1.0 + 99.0 / 1024.0) / 2816.0;
    assert!((mean_square / expected - 1.0).abs() < 0.01, "{mean_square} {expected}");
    assert!(family.read("layers.29.experts.gate_up_proj", 128 * n..128 * n + 1, &mut [0f32]).is_err());
}
