//! Makes the seeds of fuzz targets from fixtures, tests and crates of the repository.

use crate::files::tiny::{self, as_f32, gguf_of};
use crate::task::root;
use anemoe_bundle::journal::{self, Event};
use anemoe_convert::importance::Importance;
use anemoe_convert::models;
use anemoe_convert::plan::PlanOptions;
use anemoe_npz::{Array, ArrayData};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

type SeedsPassed = Result<(), Box<dyn Error>>;

/// Line between the files of an input that holds several files, as in `fuzz/src/lib.rs`.
const SEPARATOR: &[u8] = b"\n--8<--\n";
/// Most bytes of a seed for most targets: short seeds run more often.
const MAX_SEED: usize = 12 << 10;
const FIXTURES: [&str; 5] =
    ["tiny-gemma4-moe", "tiny-gemma4-moe-text", "tiny-zaya", "tiny-zaya-legacy", "tiny-zaya-skip"];

/// Writes the seeds of every target into a folder of its own.
pub fn write(corpus: &Path) -> SeedsPassed {
    let seeds = Seeds { corpus };
    seeds.configurations()?;
    seeds.packages()?;
    seeds.arrays()?;
    seeds.checkpoints()?;
    seeds.bundle_files()?;
    seeds.tables()?;
    Ok(())
}

struct Seeds<'a> {
    corpus: &'a Path,
}

impl Seeds<'_> {
    fn add(&self, target: &str, name: &str, bytes: &[u8]) -> SeedsPassed {
        let folder = self.corpus.join(target);
        fs::create_dir_all(&folder)?;
        Ok(fs::write(folder.join(format!("seed-{name}")), bytes)?)
    }

    fn configurations(&self) -> SeedsPassed {
        for name in FIXTURES {
            let text = fs::read(root().join("fixtures").join(name).join("config.json"))?;
            let family = if name.contains("zaya") { "config_zaya" } else { "config_gemma4" };
            self.add(family, name, &text)?;
            // White space is removed, so that mutations hit content.
            let short: Value = serde_json::from_slice(&text)?;
            self.add(family, &format!("{name}-short"), short.to_string().as_bytes())?;
        }
        Ok(())
    }

    fn packages(&self) -> SeedsPassed {
        let tests = root().join("crates/runtime/tests");
        for (name, package) in
            packages(&tests.join("interop"))?.into_iter().chain(packages(&tests.join("suite"))?)
        {
            let data = package.join("Data/com.apple.CoreML");
            let model = fs::read(data.join("model.mlmodel"))?;
            let weights = fs::read(data.join("weights/weight.bin")).unwrap_or_default();
            if model.len() > MAX_SEED {
                continue;
            }
            self.add("mlmodel", &name, &model)?;
            if !weights.is_empty() && weights.len() <= 8 << 10 {
                self.add("weights", &name, &weights)?;
            }
            if model.len() + weights.len() <= MAX_SEED {
                let manifest = fs::read(package.join("Manifest.json"))?;
                self.add("package", &name, &[&manifest, SEPARATOR, &model, SEPARATOR, &weights].concat())?;
                self.add("predict", &name, &[&model, SEPARATOR, &weights[..]].concat())?;
            }
        }
        Ok(())
    }

    fn arrays(&self) -> SeedsPassed {
        let dir = tempfile::tempdir()?;
        let (npy, npz) = (dir.path().join("a.npy"), dir.path().join("a.npz"));
        let data: [(&str, ArrayData); 5] = [
            ("bool", ArrayData::Bool(vec![true, false, true, true])),
            ("i32", vec![1i32, -2, 3, 4].into()),
            ("i64", vec![1i64, -2, 3, 4].into()),
            ("f32", vec![1f32, -2.5, 3.0, 0.0].into()),
            ("f64", vec![1f64, -2.5, 3.0, 0.0].into()),
        ];
        let mut entries = Vec::new();
        for (name, data) in data {
            let array = Array { shape: vec![2, 2], data };
            anemoe_npz::write_npy(&npy, &array)?;
            self.add("npy", name, &fs::read(&npy)?)?;
            entries.push((name.to_string(), array));
        }
        anemoe_npz::write_npz(&npz, &entries)?;
        self.add("npz", "stored", &fs::read(&npz)?)?;
        anemoe_npz::write_npz_compressed(&npz, &entries)?;
        self.add("npz", "deflated", &fs::read(&npz)?)?;
        let moments = BTreeMap::from([
            ("layers.0.self_attn.q_proj.weight".to_string(), (vec![4], vec![0.5f32; 4])),
            ("layers.0.experts.down_proj".to_string(), (vec![2, 3], vec![0.25f32; 6])),
        ]);
        Importance::write(&npz, &moments)?;
        self.add("importance", "written", &fs::read(&npz)?)
    }

    fn checkpoints(&self) -> SeedsPassed {
        let a: Vec<u8> = [1f32, 2.0, 3.0, 4.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        let b = [0u8, 0x3c, 0, 0x40];
        let first = TensorView::new(Dtype::F32, vec![2, 2], &a)?;
        let second = TensorView::new(Dtype::BF16, vec![2], &b)?;
        let third = TensorView::new(Dtype::F16, vec![1, 2], &b)?;
        let both = safetensors::serialize([("a", first.clone()), ("b.weight", second)], None)?;
        self.add("safetensors", "single", &both)?;
        let one = safetensors::serialize([("a", first)], None)?;
        let two = safetensors::serialize([("c", third)], None)?;
        let index = json!({"metadata": {"total_size": 20}, "weight_map": {"a": "0.safetensors", "c": "1.safetensors"}});
        let index = index.to_string();
        self.add("safetensors", "index", &[index.as_bytes(), SEPARATOR, &one, SEPARATOR, &two].concat())?;
        let weight = TensorView::new(Dtype::F8_E4M3, vec![2, 4], &[0x38; 8])?;
        let scale = TensorView::new(Dtype::F32, vec![1, 1], &a[..4])?;
        let bytes = TensorView::new(Dtype::U8, vec![4], &b)?;
        let fp8 = [("a.weight", weight), ("a.weight_scale", scale), ("b_blocks", bytes)];
        let fp8 = safetensors::serialize(fp8, None)?;
        let place = "0.safetensors";
        let index = json!({"weight_map": {"a.weight": place, "a.weight_scale": place, "b_blocks": place}});
        self.add("safetensors", "fp8", &[index.to_string().as_bytes(), SEPARATOR, &fp8].concat())?;

        self.add("gguf", "blocks", &fs::read(root().join("crates/convert/tests/gguf/blocks.gguf"))?)?;
        let tiny = root().join("fixtures/tiny-gemma4-moe");
        let mut gguf = gguf_of(&tiny, tiny::Options { fused: true, encode: as_f32 });
        // Keeps all metadata, and only short tensors.
        gguf.tensors.retain(|t| t.data.len() <= 256);
        self.add("gguf", "vectors", &gguf.write())?;
        gguf.tensors.truncate(2);
        self.add("gguf", "metadata", &gguf.write())?;
        tiny::tokenizer(&mut gguf, &tokenizer(24)?);
        self.add("gguf", "tokenizer", &gguf.write())
    }

    fn bundle_files(&self) -> SeedsPassed {
        for name in FIXTURES {
            let path = root().join("fixtures").join(name);
            let checkpoint = models::load(path.to_str().ok_or("a path in UTF-8")?)?;
            let family = models::open(checkpoint)?;
            let chain = family.plan(&PlanOptions::default())?.chain;
            self.add("chain", name, &serde_json::to_vec(&chain)?)?;
        }
        self.add("tokenizer", "bpe", tokenizer(40)?.to_string().as_bytes())?;
        for (name, model) in [
            ("wordlevel", json!({"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"})),
            (
                "unigram",
                json!({"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.5]], "byte_fallback": false}),
            ),
            (
                "wordpiece",
                json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                       "max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "a": 1, "##b": 2}}),
            ),
        ] {
            let text = json!({"version": "1.0", "added_tokens": [], "normalizer": {"type": "NFKC"},
                "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null, "model": model});
            self.add("tokenizer", name, text.to_string().as_bytes())?;
        }
        let dir = tempfile::tempdir()?;
        let first = journal::append(dir.path(), Event::new("build", "done"))?;
        let mut second = Event::new("gate", "failed");
        second.seconds = Some(1.5);
        second.of = Some(first.id);
        second.options.insert("quant".into(), "lut4".into());
        second.facts.insert("min_cosine".into(), json!(0.97));
        journal::append(dir.path(), second)?;
        self.add("journal", "two", &fs::read(dir.path().join("journal.jsonl"))?)
    }

    fn tables(&self) -> SeedsPassed {
        let text = fs::read_to_string(root().join("crates/gates/src/residency/outcomes.tsv"))?;
        let mut lines = text.lines().filter(|l| !l.starts_with('#'));
        let headings = lines.next().ok_or("a table with headings")?;
        for (i, rows) in lines.collect::<Vec<_>>().chunks(3).enumerate() {
            let text = format!("{headings}\n{}\n", rows.join("\n"));
            self.add("outcomes", &format!("known-{i}"), text.as_bytes())?;
        }
        let op = |name: &str, device: &str| json!({"name": name, "type": "ios18.mul", "preferred": device, "supported": ["ane", "cpu"], "cost": 0.5});
        let report = json!({"format": 1, "os": "macOS 26.0.1", "chip": "Apple M4 Max",
            "compute_units": "cpuAndNeuralEngine", "generator": "anemoe 0.1.0",
            "plans": [{"package": "functions_s", "function": "main", "ops": [op("y", "ane"), op("z", "cpu")]}]});
        self.add("plan_report", "one", report.to_string().as_bytes())
    }
}

/// Returns the packages of a folder of tests, with their names.
pub fn packages(tests: &Path) -> Result<Vec<(String, PathBuf)>, Box<dyn Error>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(tests)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let package = entry.path().join(format!("{name}.mlpackage"));
        if package.is_dir() {
            found.push((name, package));
        }
    }
    found.sort();
    Ok(found)
}

/// Makes the small model's tokenizer with its first `tokens` tokens.
pub fn tokenizer(tokens: u64) -> Result<Value, Box<dyn Error>> {
    let mut t: Value = serde_json::from_slice(&fs::read(root().join("models/small-gemma4/tokenizer.json"))?)?;
    let vocab = t["model"]["vocab"].as_object_mut().ok_or("a vocabulary")?;
    vocab.retain(|_, id| id.as_u64().is_some_and(|id| id < tokens));
    let vocab = vocab.clone();
    let known = |m: &Value| {
        let parts: Option<Vec<&str>> = (0..2).map(|i| m[i].as_str()).collect();
        parts.is_some_and(|p| {
            vocab.contains_key(p[0]) && vocab.contains_key(p[1]) && vocab.contains_key(&p.concat())
        })
    };
    t["model"]["merges"].as_array_mut().ok_or("merges")?.retain(known);
    t["added_tokens"]
        .as_array_mut()
        .ok_or("added tokens")?
        .retain(|a| a["id"].as_u64().is_some_and(|id| id < tokens));
    Ok(t)
}
