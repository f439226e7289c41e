//! Checkpoints as a whole: the fixtures open, and each way to damage one is refused with an error that names it.

use anemoe_convert::checkpoint::Checkpoint;
use anemoe_convert::models;
use anemoe_convert::plan::PlanOptions;
use anemoe_io::{Error, Kind};
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn open(folder: &Path) -> Result<(), Error> {
    models::open(models::load(folder.to_str().unwrap())?).map(|_| ())
}

/// Copy of a tiny checkpoint of one file, for a test to damage.
struct Copy(tempfile::TempDir);

impl Copy {
    fn new() -> Self {
        Copy::of("fixtures/tiny-gemma4-moe-text")
    }

    fn of(folder: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for file in fs::read_dir(repository(folder)).unwrap() {
            let file = file.unwrap().path();
            fs::copy(&file, dir.path().join(file.file_name().unwrap())).unwrap();
        }
        Copy(dir)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Changes the header and the data of the weights, and writes both.
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

    /// Renames a tensor in the header.
    fn renamed(self, from: &str, to: &str) -> Self {
        self.header(|header, _| {
            let entry = header.remove(from).unwrap_or_else(|| panic!("{from}"));
            header.insert(to.into(), entry);
        })
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

    /// Opens a checkpoint that is refused with an error of this kind, and returns the error's text.
    fn refused(&self, kind: Kind) -> String {
        let e = open(self.0.path()).unwrap_err();
        let inside = e.path().is_some_and(|path| path.starts_with(self.0.path()));
        assert!(e.kind() == kind && inside, "{e}");
        e.what().into()
    }

    /// Returns the error's text of a checkpoint that is invalid.
    fn invalid(&self) -> String {
        self.refused(Kind::Invalid)
    }

    /// Returns the error's text of a checkpoint that is not implemented.
    fn unsupported(&self) -> String {
        self.refused(Kind::Unsupported)
    }
}

/// Returns the value of an F8_E4M3 that is not NaN.
fn f8(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7) / 8.0);
    let magnitude = match exponent {
        0 => mantissa * 2f32.powi(-6),
        _ => (1.0 + mantissa) * 2f32.powi(exponent - 7),
    };
    if byte < 128 { magnitude } else { -magnitude }
}

impl Copy {
    /// Stores every matrix `[rows, cols]` of bf16 as FP8 under a scale for 32 rows and columns.
    fn in_fp8(self) -> Self {
        let values: Vec<(f32, u8)> = (0..=255).filter(|b| b & 0x7f != 0x7f).map(|b| (f8(b), b)).collect();
        let nearest =
            |v: f32| values.iter().min_by(|a, b| (a.0 - v).abs().total_cmp(&(b.0 - v).abs())).unwrap().1;
        self.config(|c| {
            c["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": [32, 32]});
        })
        .header(|header, data| {
            let mut packed = Vec::new();
            for (name, mut entry) in std::mem::take(header) {
                if name == "__metadata__" {
                    continue;
                }
                let range = [0, 1].map(|i| entry["data_offsets"][i].as_u64().unwrap() as usize);
                let bytes = &data[range[0]..range[1]];
                let start = packed.len();
                let shape: Vec<usize> = serde_json::from_value(entry["shape"].clone()).unwrap();
                if let ([rows, cols], Some("BF16")) = (&shape[..], entry["dtype"].as_str()) {
                    let weights: Vec<f32> = bytes
                        .chunks_exact(2)
                        .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
                        .collect();
                    let blocks = [rows.div_ceil(32), cols.div_ceil(32)];
                    let place = |i: usize| i / cols / 32 * blocks[1] + i % cols / 32;
                    let mut scales = vec![0f32; blocks[0] * blocks[1]];
                    for (i, w) in weights.iter().enumerate() {
                        let scale = &mut scales[place(i)];
                        *scale = scale.max(w.abs() / 448.0);
                    }
                    packed.extend(
                        weights.iter().enumerate().map(|(i, w)| nearest(w / scales[place(i)].max(1e-30))),
                    );
                    entry["dtype"] = json!("F8_E4M3");
                    let end = packed.len();
                    packed.extend(scales.iter().flat_map(|s| s.to_le_bytes()));
                    let scale = json!({"dtype": "F32", "shape": blocks, "data_offsets": [end, packed.len()]});
                    header.insert(format!("{name}_scale_inv"), scale);
                    entry["data_offsets"] = json!([start, end]);
                } else {
                    packed.extend(bytes);
                    entry["data_offsets"] = json!([start, packed.len()]);
                }
                header.insert(name, entry);
            }
            *data = packed;
        })
    }
}

const Q_PROJ: &str = "model.layers.1.self_attn.q_proj.weight";

#[test]
fn every_layout_opens() {
    for name in [
        "fixtures/tiny-gemma4-moe",
        "fixtures/tiny-gemma4-moe-text",
        "models/small-gemma4",
        "fixtures/tiny-zaya",
        "fixtures/tiny-zaya-legacy",
        "fixtures/tiny-zaya-skip",
    ] {
        open(&repository(name)).unwrap();
    }
    open(Copy::new().0.path()).unwrap();
}

/// Checks that one network in two layouts has the same values.
#[test]
fn both_layouts_hold_the_same_weights() {
    let [published, text] = ["tiny-gemma4-moe", "tiny-gemma4-moe-text"].map(|name| {
        let folder = repository("fixtures").join(name);
        models::open(models::load(folder.to_str().unwrap()).unwrap()).unwrap()
    });
    for (tensor, elements) in
        [("layers.5.experts.down_proj", 8 * 64 * 32), ("layers.0.self_attn.v_proj.weight", 32 * 64)]
    {
        let (mut a, mut b) = (vec![0f32; elements], vec![1f32; elements]);
        published.checked.read(tensor, 0..elements as u64, &mut a).unwrap();
        text.checked.read(tensor, 0..elements as u64, &mut b).unwrap();
        assert_eq!(a, b, "{tensor}");
    }
}

/// Checks that families read their weights from FP8 under scales, in any layout.
#[test]
fn families_in_fp8() {
    for (folder, tensor, elements) in [
        ("fixtures/tiny-gemma4-moe-text", "layers.0.self_attn.v_proj.weight", 32 * 64),
        (ZAYA, "layers.0.self_attn.o_proj.weight", 64 * 32),
        (LEGACY, "layers.1.mlp.experts.down_proj", 4 * 64 * 48),
    ] {
        let copy = Copy::of(folder).in_fp8();
        let [before, after] = [repository(folder), copy.0.path().to_path_buf()].map(|folder| {
            let family = models::open(models::load(folder).unwrap()).unwrap();
            let mut values = vec![0f32; elements];
            family.checked.read(tensor, 0..elements as u64, &mut values).unwrap();
            values
        });
        let wrong = before.iter().zip(&after).find(|(a, b)| (**a - **b).abs() > a.abs() / 15.0 + 1e-3);
        assert!(wrong.is_none() && before != after, "{folder}: {wrong:?}");
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
        "score.weight",
        "mtp.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
    ] {
        open(Copy::new().with_tensor(name).0.path()).unwrap();
    }
    let copy = Copy::new().with_tensor("score.weight").with_tensor("score.bias");
    let family = models::open(models::load(copy.0.path()).unwrap()).unwrap();
    let facts = family.plan(&PlanOptions::default()).unwrap().facts;
    let says = "`score.bias` and 1 more: left out, since generating text does not need it";
    assert!(facts.iter().any(|fact| fact == says), "{facts:?}");
}

#[test]
fn names_without_a_prefix_are_those_of_a_model_without_a_head() {
    let weight = |checkpoint: Checkpoint, name: &str| {
        let mut out = [0f32; 8];
        checkpoint.source.read(name, 0..8, &mut out).unwrap();
        out
    };
    for folder in ["tiny-llama", "tiny-gemma3", "tiny-gemma4-moe-text", "tiny-qwen3-moe"] {
        let folder = format!("fixtures/{folder}");
        let copy = Copy::of(&folder).header(|header, _| {
            for (name, entry) in std::mem::take(header) {
                header.insert(name.strip_prefix("model.").unwrap_or(&name).into(), entry);
            }
        });
        open(copy.0.path()).unwrap();
        let (base, original) = (models::load(copy.0.path()), models::load(repository(&folder)));
        assert_eq!(weight(base.unwrap(), "norm.weight"), weight(original.unwrap(), "model.norm.weight"));
    }
}

#[test]
fn the_text_model_beside_images_is_read_in_both_layouts() {
    let wrap = |config: &mut Value| {
        *config = json!({"model_type": "mistral3", "text_config": config.take(), "vision_config": {}})
    };
    let original = models::load(repository("fixtures/tiny-mistral")).unwrap();
    let logits = |checkpoint: &Checkpoint, name: &str| {
        let mut out = [0f32; 8];
        checkpoint.source.read(name, 0..8, &mut out).unwrap();
        out
    };
    for (prefix, head) in [
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
    ] {
        let copy = Copy::of("fixtures/tiny-mistral")
            .config(wrap)
            .header(|header, _| {
                for (name, entry) in std::mem::take(header) {
                    let own = name.strip_prefix("model.").map(|rest| format!("{prefix}{rest}"));
                    header.insert(
                        own.unwrap_or(if name == "lm_head.weight" { head.into() } else { name }),
                        entry,
                    );
                }
            })
            .with_tensor("vision_tower.patch_conv.weight")
            .with_tensor("multi_modal_projector.norm.weight");
        open(copy.0.path()).unwrap();
        let checkpoint = models::load(copy.0.path()).unwrap();
        assert_eq!(models::describe(&checkpoint).unwrap().family, "mistral");
        if original.source.info("lm_head.weight").is_some() {
            assert_eq!(logits(&checkpoint, "lm_head.weight"), logits(&original, "lm_head.weight"));
        }
    }
    for unknown in ["ministral3", "llama4_text", "gemma3_text"] {
        let copy = Copy::of("fixtures/tiny-mistral").config(|config| {
            wrap(config);
            config["text_config"]["model_type"] = unknown.into();
        });
        assert!(copy.unsupported().contains(&format!("`text_config.model_type` is {unknown}; known are")));
    }
    // transformers saves keys that it has read otherwise: the head that lies in the file decides.
    let copy = Copy::of("fixtures/tiny-mistral").config(|config| {
        wrap(config);
        config["text_config"]["model_type"] = Value::Null;
        config["text_config"]["tie_word_embeddings"] = false.into();
        config["tie_word_embeddings"] = true.into();
    });
    let decoder = models::describe(&models::load(copy.0.path()).unwrap()).unwrap();
    assert_eq!((decoder.family, decoder.is_tied), ("mistral", false));
    assert_eq!(
        decoder.layers[0].attention.window,
        models::describe(&original).unwrap().layers[0].attention.window
    );
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
    let what = Copy::new().config(|c| c["model_type"] = json!("llama4")).unsupported();
    assert!(what.contains("llama4") && what.contains("gemma4"), "{what}");
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
    let missing = open(copy.0.path());
    assert!(matches!(missing, Err(e) if e.what().contains("config.json; there is none")));
}

#[test]
fn a_configuration_nested_without_end() {
    let copy = Copy::new();
    fs::write(copy.at("config.json"), "[".repeat(1 << 20)).unwrap();
    assert!(copy.invalid().contains("recursion"));
}

/// Checks that opening does not read the weights, and that reading finds the value.
#[test]
fn a_weight_that_is_not_a_number() {
    let copy = Copy::new().header(|header, data| {
        let at = header[Q_PROJ]["data_offsets"][0].as_u64().unwrap() as usize + 2 * 70;
        data[at..at + 2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    });
    let family = models::open(models::load(copy.0.path().to_str().unwrap()).unwrap()).unwrap();
    let name = Q_PROJ.strip_prefix("model.").unwrap();
    family.checked.read(name, 0..70, &mut [0f32; 70]).unwrap();
    let err = family.checked.read(name, 64..128, &mut [0f32; 64]).unwrap_err().to_string();
    assert!(err.contains(Q_PROJ) && err.contains("element 70 is NaN"), "{err}");
}

#[test]
fn a_tied_head_without_an_embedding_is_both() {
    let read = |checkpoint: Checkpoint| {
        let mut out = [0f32; 8];
        checkpoint.source.read("model.embed_tokens.weight", 0..8, &mut out).unwrap();
        out
    };
    for folder in ["fixtures/tiny-qwen2", "fixtures/tiny-gemma4-moe-text"] {
        let copy = Copy::of(folder).header(|header, _| {
            let entry = header.remove("model.embed_tokens.weight").unwrap();
            header.insert("lm_head.weight".into(), entry);
        });
        open(copy.0.path()).unwrap();
        let (copy, original) = (models::load(copy.0.path()), models::load(repository(folder)));
        assert_eq!(read(copy.unwrap()), read(original.unwrap()));
    }
    // A head that is no embedding cannot stand for it.
    let copy = Copy::of("fixtures/tiny-qwen3").header(|header, _| {
        let entry = header.remove("model.embed_tokens.weight").unwrap();
        header.insert("model.embedding.weight".into(), entry);
    });
    assert!(copy.invalid().contains("`model.embed_tokens.weight` [512, 64] is missing"));
}

/// Checks that a head beside a tied embedding is the head where its values differ, as in transformers 5.
#[test]
fn a_head_with_other_values_than_a_tied_embedding() {
    const EMBEDDING: &str = "model.embed_tokens.weight";
    let with_head = |folder: &str, change: u8| {
        Copy::of(folder).header(|header, data| {
            let mut entry = header[EMBEDDING].clone();
            let at = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
            let mut copy = data[at(0)..at(1)].to_vec();
            copy[2 * 77] ^= change;
            entry["data_offsets"] = json!([data.len(), data.len() + copy.len()]);
            data.extend(copy);
            header.insert("lm_head.weight".into(), entry);
        })
    };
    for (change, is_tied) in [(0, true), (1, false)] {
        let copy = with_head("fixtures/tiny-qwen2", change);
        let checkpoint = models::load(copy.0.path().to_str().unwrap()).unwrap();
        assert_eq!(checkpoint.remarks.len(), usize::from(!is_tied));
        let family = models::open(checkpoint).unwrap();
        assert_eq!(family.decoder.is_tied, is_tied);
        family.plan(&PlanOptions::default()).unwrap();
    }
    // A family without a head of its own.
    let copy = with_head("fixtures/tiny-gemma4-moe-text", 1);
    let error = models::load(copy.0.path().to_str().unwrap()).err().unwrap().to_string();
    assert!(error.contains("lm_head.weight") && error.contains("tie_word_embeddings"), "{error}");
}

#[test]
fn a_folder_that_is_not_there() {
    assert!(open(&repository("no/such/folder")).unwrap_err().kind() == Kind::Io);
}

#[test]
fn the_synthetic_model_has_every_tensor_of_the_real_one() {
    let checkpoint = models::load("synthetic:gemma4-26b-a4b?seed=1").unwrap();
    let parameters: u64 = checkpoint.source.tensors().iter().map(|t| t.elements()).sum();
    assert_eq!((checkpoint.source.tensors().len(), parameters), (657, 25_233_141_790));
    let family = models::open(checkpoint).unwrap();
    // One expert of the last layer, of 128.
    let mut slab = vec![0f32; 1408 * 2816];
    let n = slab.len() as u64;
    family.checked.read("layers.29.experts.gate_up_proj", 127 * n..128 * n, &mut slab).unwrap();
    let mean_square = slab.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n as f64;
    // Deviation 1/sqrt(2816), and one of 1024 weights ten times as large.
    let expected = (1.0 + 99.0 / 1024.0) / 2816.0;
    assert!((mean_square / expected - 1.0).abs() < 0.01, "{mean_square} {expected}");
    assert!(
        family.checked.read("layers.29.experts.gate_up_proj", 128 * n..128 * n + 1, &mut [0f32]).is_err()
    );
}

const ZAYA: &str = "fixtures/tiny-zaya";
const LEGACY: &str = "fixtures/tiny-zaya-legacy";

/// Checks that every tensor has the same values under the same name in both layouts, also where stacked experts meet.
#[test]
fn both_layouts_of_zaya_hold_the_same_weights() {
    let [new, old] = [ZAYA, LEGACY].map(|name| models::load(repository(name).to_str().unwrap()).unwrap());
    let names = |c: &Checkpoint| c.source.tensors().iter().map(|t| t.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&new), names(&old));
    for info in new.source.tensors() {
        let n = info.elements();
        assert_eq!(old.source.info(&info.name).unwrap().shape, info.shape);
        let (mut a, mut b) = (vec![0f32; n as usize], vec![1f32; n as usize]);
        new.source.read(&info.name, 0..n, &mut a).unwrap();
        old.source.read(&info.name, 0..n, &mut b).unwrap();
        assert_eq!(a, b, "{}", info.name);
    }
    let name = "model.layers.3.mlp.experts.down_proj";
    let mut piece = vec![0f32; 100];
    old.source.read(name, 64 * 48 - 50..64 * 48 + 50, &mut piece).unwrap();
    let mut expected = vec![0f32; 100];
    new.source.read(name, 64 * 48 - 50..64 * 48 + 50, &mut expected).unwrap();
    assert_eq!(piece, expected);
    assert!(old.source.read(name, 0..4 * 64 * 48 + 1, &mut vec![0f32; 4 * 64 * 48 + 1]).is_err());
    assert!(old.source.read("model.nothing", 0..1, &mut [0f32]).is_err());
}

#[test]
fn a_missing_tensor_of_zaya() {
    for (folder, name) in [
        (ZAYA, "model.layers.2.self_attn.qkv_proj.conv_qk_grouped.bias"),
        (ZAYA, "model.layers.7.mlp.experts.down_proj"),
        (ZAYA, "model.input_hidden_states_scale"),
        (LEGACY, "model.layers.4.self_attn.qkv.val_proj2.weight"),
        (LEGACY, "model.layers.15.zaya_block.router.balancing_biases"),
        (LEGACY, "model.res_scale.residual_bias"),
        (LEGACY, "model.embed_tokens.weight"),
    ] {
        let what = Copy::of(folder).renamed(name, "somebody_elses").invalid();
        assert!(what.contains(&format!("`{name}`")) && what.contains("missing"), "{what}");
    }
}

#[test]
fn a_missing_expert_is_named() {
    for (e, piece) in [(3, "linear_fc1"), (0, "linear_fc2")] {
        let name = format!("model.layers.5.zaya_block.experts.local_experts.{e}.{piece}.weight");
        let what = Copy::of(LEGACY).renamed(&name, &name.replace("local_experts", "lost_experts")).invalid();
        assert!(what.contains(&format!("tensor `{name}`")) && what.contains("missing"), "{what}");
    }
}

#[test]
fn an_extra_tensor_of_zaya() {
    for (folder, name) in [
        (ZAYA, "model.layers.8.input_layernorm.weight"),
        (ZAYA, "model.layers.0.mlp.gate.router_states_scale"),
        (LEGACY, "model.layers.1.zaya_block.experts.local_experts.4.linear_fc1.weight"),
    ] {
        let what = Copy::of(folder).with_tensor(name).invalid();
        assert!(what.contains(&format!("tensor `{name}`")), "{what}");
    }
    open(Copy::of(ZAYA).with_tensor("lm_head.weight").0.path()).unwrap();
    open(Copy::of(LEGACY).with_tensor("lm_head.weight").0.path()).unwrap();
}

#[test]
fn a_wrong_shape_of_zaya() {
    for (folder, name, shape, right) in [
        (ZAYA, "model.layers.1.mlp.experts.gate_up_proj", json!([4, 64, 96]), "[4, 96, 64]"),
        (ZAYA, "model.layers.1.self_attn.qkv_proj.conv_qk_depthwise.weight", json!([48, 2, 1]), "[48, 1, 2]"),
        (
            LEGACY,
            "model.layers.3.zaya_block.experts.local_experts.2.linear_fc2.weight",
            json!([48, 64]),
            "[64, 48]",
        ),
    ] {
        let copy = Copy::of(folder).header(|header, _| header[name]["shape"] = shape.clone());
        let what = copy.invalid();
        assert!(what.contains(name) && what.contains(right), "{what}");
    }
}

#[test]
fn a_weight_of_zaya_that_is_not_a_number() {
    let name = "model.layers.3.zaya_block.experts.local_experts.2.linear_fc2.weight";
    let copy = Copy::of(LEGACY).header(|header, data| {
        let at = header[name]["data_offsets"][0].as_u64().unwrap() as usize + 2 * 7;
        data[at..at + 2].copy_from_slice(&0x7f80u16.to_le_bytes());
    });
    let family = models::open(models::load(copy.0.path().to_str().unwrap()).unwrap()).unwrap();
    let n = 64 * 48;
    let err =
        family.checked.read("layers.1.mlp.experts.down_proj", 2 * n..3 * n, &mut vec![0f32; n as usize]);
    let err = err.unwrap_err().to_string();
    assert!(err.contains(name) && err.contains("element 7 is inf"), "{err}");
}

/// Checks that a value that fp16 cannot hold is named as the file has it, the expert included.
#[test]
fn a_weight_of_zaya_that_fp16_cannot_hold() {
    use anemoe_convert::build::write_shard;
    use anemoe_convert::plan::PlanOptions;
    let large = |name: &str| {
        Copy::of(LEGACY).header(|header, data| {
            let at = header[name]["data_offsets"][0].as_u64().unwrap() as usize;
            // 2^21 in bf16.
            data[at..at + 2].copy_from_slice(&0x4a00u16.to_le_bytes());
        })
    };
    for (name, shard) in [
        ("model.layers.3.zaya_block.experts.local_experts.2.linear_fc2.weight", "L01.moe"),
        ("model.layers.2.self_attn.qkv.temp", "L01.attn"),
        ("model.layers.2.self_attn.qkv.linear_k.weight", "L01.attn"),
    ] {
        let copy = large(name);
        let checkpoint = models::load(copy.0.path().to_str().unwrap()).unwrap();
        let family = models::open(checkpoint).unwrap();
        let plan = family.plan(&PlanOptions::default()).unwrap();
        let out = tempfile::tempdir().unwrap();
        let path = out.path().join("x.mlpackage");
        let result = write_shard(&family, plan.shard(shard).unwrap(), None, &path);
        let err = result.map(|_| ()).unwrap_err().to_string();
        assert!(err.contains(name) && err.contains("model.safetensors") && err.contains("fp16"), "{err}");
        assert!(!path.exists());
    }
}

#[test]
fn a_legacy_configuration_that_is_wrong() {
    type Change = fn(&mut Value);
    let cases: [(Change, &str); 11] = [
        (|c| drop(c.as_object_mut().unwrap().remove("zaya_mlp_expansion")), "zaya_mlp_expansion"),
        (|c| drop(c.as_object_mut().unwrap().remove("num_query_groups")), "missing"),
        (|c| c["num_hidden_layers"] = json!(15), "num_hidden_layers"),
        (|c| c["num_hidden_layers"] = json!(1u64 << 23), "num_hidden_layers"),
        (|c| c["ffn_hidden_size"] = json!(95), "ffn_hidden_size"),
        (|c| c["num_experts"] = json!(1 << 20), "num_experts"),
        (|c| drop(c.as_object_mut().unwrap().remove("norm_epsilon")), "rms_norm_eps"),
        (|c| c["norm_epsilon"] = json!(1e308), "rms_norm_eps"),
        (|c| c["norm_epsilon"] = json!(1e-50), "rms_norm_eps"),
        (|c| c["rope_theta"] = json!(5e-324), "rope_theta"),
        (|c| c["num_experts"] = json!(["x", -4, 4]), "num_experts"),
    ];
    for (change, says) in cases {
        let mut copy = Copy::of(LEGACY).config(change);
        if says == "missing" {
            // The number has other names, too.
            copy = copy.config(|c| drop(c.as_object_mut().unwrap().remove("num_key_value_heads")));
        }
        let what = copy.invalid();
        assert!(what.contains(says), "{says}: {what}");
    }
}

#[test]
fn a_legacy_configuration_with_an_unknown_feature() {
    for (key, value) in [
        ("zaya_use_mod", json!(false)),
        ("zaya_use_eda", json!(false)),
        ("cca", json!(false)),
        ("clamp_temp", json!(true)),
        ("rope_scaling", json!({"factor": 2})),
        ("activation_func", json!("gelu")),
        ("moe_router_topk", json!(2)),
        ("swa_layers", json!([0, 4096])),
        ("swa_layers", json!(4096)),
        ("sliding_window", json!(4096)),
        ("cca_time0", json!(3)),
    ] {
        let what = Copy::of(LEGACY).config(|c| c[key] = value.clone()).unsupported();
        let known = if key == "moe_router_topk" { "num_experts_per_tok" } else { key };
        assert!(what.contains(known), "{key}: {what}");
    }
}

/// Checks that other names of sizes, and sizes for each half-layer, are read: releases differ in these.
#[test]
fn other_forms_of_the_legacy_configuration() {
    let copy = Copy::of(LEGACY).config(|c| {
        c["num_attention_heads"] = json!(8);
        c["cca_num_q_heads"] = json!([4, 0, 4, 0]);
        c["ffn_hidden_size_list"] = json!([0, 96]);
        c["zaya_mlp_expansion"] = json!([0, 16, 0, 16]);
        c["moe_intermediate_size"] = Value::Null;
        let map = c.as_object_mut().unwrap();
        map.remove("ffn_hidden_size");
        map.remove("head_dim");
        map.remove("num_query_groups");
    });
    open(copy.0.path()).unwrap();
    let what = Copy::of(LEGACY).config(|c| c["zaya_mlp_expansion"] = json!([0, 16, 0, 32])).unsupported();
    assert!(what.contains("zaya_mlp_expansion"), "{what}");
}

#[test]
fn the_synthetic_zaya_has_every_tensor_of_the_real_one() {
    let checkpoint = models::load("synthetic:zaya1-8b?seed=1").unwrap();
    let parameters: u64 = checkpoint.source.tensors().iter().map(|t| t.elements()).sum();
    assert_eq!((checkpoint.source.tensors().len(), parameters), (4 + 40 * 32 - 1, 8_840_489_464));
    let family = models::open(checkpoint).unwrap();
    let mut biases = [0f32; 17];
    family.checked.read("layers.7.mlp.gate.balancing_biases", 0..17, &mut biases).unwrap();
    assert_eq!(biases[16], -1.0);
    assert!(biases[..16].iter().all(|b| b.abs() < 0.5));
    // A kernel's inputs are its channels at each of its positions.
    let mut kernel = vec![0f32; 1280 * 256];
    family
        .checked
        .read("layers.0.self_attn.qkv_proj.conv_qk_grouped.weight", 0..1280 * 256, &mut kernel)
        .unwrap();
    let mean_square = kernel.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / kernel.len() as f64;
    assert!((mean_square * 256.0 - 1.0).abs() < 0.2, "{mean_square}");
}
