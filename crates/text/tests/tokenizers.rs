//! Tests tokenizers built as those of published families against ids of the `tokenizers` package.

use anemoe_text::tokenizer::{TextStream, Tokenizer};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Reads the families, their models and texts; `tokenizers/make_families.py` makes the file.
fn fixture() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tokenizers/families.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Makes the `tokenizer.json` of a family.
fn tokenizer_json(all: &Value, family: &Value) -> Value {
    let flags = family["flags"].as_object().unwrap();
    let kind = if flags.contains_key("byte_fallback") { "characters" } else { "bytes" };
    let names = all["models"][kind]["vocab"].as_array().unwrap().iter().enumerate();
    let vocab: Map<String, Value> = names.map(|(id, t)| (t.as_str().unwrap().into(), id.into())).collect();
    let mut model = json!({"type": "BPE", "vocab": vocab, "merges": all["models"][kind]["merges"]});
    model.as_object_mut().unwrap().extend(flags.clone());
    let mut made = json!({"version": "1.0", "model": model});
    for part in ["normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens"] {
        made[part] = family[part].clone();
    }
    made
}

fn numbers(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as u32).collect()
}

#[test]
fn every_family_has_the_ids_of_the_package() {
    let all = fixture();
    for (name, family) in all["families"].as_object().unwrap() {
        let text = tokenizer_json(&all, family).to_string();
        let tokenizer = Tokenizer::from_bytes(text.as_bytes(), Path::new(name)).unwrap();
        for (i, text) in all["texts"].as_array().unwrap().iter().enumerate() {
            let ids = numbers(&family["ids"][i]);
            let decoded = family["decoded"][i].as_str().unwrap();
            assert_eq!(tokenizer.encode(text.as_str().unwrap(), None).unwrap(), ids, "{name} {text}");
            assert_eq!(tokenizer.decode(&ids).unwrap(), decoded, "{name} {text}");
            let mut stream = TextStream::new(&tokenizer, &[]).unwrap();
            let pieces: Vec<String> = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
            assert_eq!(pieces.concat(), decoded, "{name} {text}");
        }
    }
}

/// Checks that a model's starting token begins texts only where texts of its tokenizer have one.
#[test]
fn a_start_that_the_tokenizer_never_writes_is_not_added() {
    let all = fixture();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    let open = |name: &str, template: bool, config: Option<&str>| {
        let mut made = tokenizer_json(&all, &all["families"][name]);
        if !template {
            made["post_processor"] = Value::Null;
        }
        std::fs::write(&path, made.to_string()).unwrap();
        let beside = dir.path().join("tokenizer_config.json");
        match config {
            Some(text) => std::fs::write(beside, text).unwrap(),
            None => drop(std::fs::remove_file(beside)),
        }
        Tokenizer::open(&path).unwrap()
    };
    for (name, template, config, begins) in [
        ("qwen", true, None, false),
        ("smollm", true, None, false),
        ("smollm", true, Some(r#"{"add_bos_token": true}"#), true),
        ("smollm", true, Some(r#"{"add_bos_token": false}"#), false),
        // The chat template refuses it.
        ("smollm", true, Some("{"), false),
        ("llama-3", true, None, true),
        ("llama-3", true, Some(r#"{"add_bos_token": false}"#), true),
        ("llama-3", false, None, false),
        ("gemma-3", true, None, true),
        ("gemma-3", false, None, true),
        // Files of Gemma 4 say so, and the model needs it.
        ("gemma-3", false, Some(r#"{"add_bos_token": false, "tokenizer_class": "GemmaTokenizer"}"#), true),
        ("llama-2", false, None, true),
        // Yi.
        ("llama-2", false, Some(r#"{"add_bos_token": false}"#), false),
        ("llama-2", true, Some(r#"{"add_bos_token": false}"#), true),
    ] {
        let tokenizer = open(name, template, config);
        let said = format!("{name} {template} {config:?}");
        assert_eq!(tokenizer.bos(Some(0)), begins.then_some(0), "{said}");
        assert_eq!(tokenizer.bos(None), None, "{said}");
        let ids = tokenizer.encode("the", Some(0)).unwrap();
        assert_eq!(ids.iter().filter(|id| **id == 0).count(), usize::from(begins), "{said}");
        assert_eq!(ids[0] == 0, begins, "{said}");
    }
}
