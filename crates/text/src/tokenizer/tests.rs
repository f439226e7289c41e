//! Tests with broken or hostile tokenizers: written by hand, and made by deterministic mutations of good ones; and of streams.

use super::*;
use anemoe_io::Random;
use serde_json::{Map, json};
use std::time::{Duration, Instant};

/// Texts that are tried with every tokenizer that loads.
const TEXTS: [&str; 5] =
    ["", "a", "The quick brown fox, 12345 times.", "née 東京 \u{fdfa} İ\n\t  ", "<bos>aaaaaaaaaaaaaaa"];
/// Longest time that one file may take; all files need far less.
const MAX_TIME: Duration = Duration::from_secs(20);

/// Makes the tokenizer of the small model, with the first 500 tokens of its vocabulary and the merges among them.
fn small_bpe() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/small-gemma4/tokenizer.json");
    let mut value: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let model = &mut value["model"];
    let vocab: Map<String, Value> =
        model["vocab"].as_object().unwrap().clone().into_iter().take(500).collect();
    let kept = |merge: &Value| {
        let pair = match merge {
            Value::String(text) => text.split_once(' ').map(|(a, b)| (a.to_string(), b.to_string())),
            pair => Some((pair[0].as_str().unwrap().into(), pair[1].as_str().unwrap().into())),
        };
        let (a, b) = pair.unwrap();
        [&a, &b, &format!("{a}{b}")].iter().all(|t| vocab.contains_key(*t))
    };
    let merges: Vec<Value> =
        model["merges"].as_array().unwrap().iter().filter(|m| kept(m)).cloned().collect();
    model["merges"] = Value::Array(merges);
    model["vocab"] = Value::Object(vocab);
    value
}

fn special(id: u32, content: &str) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
}

fn vocabulary(tokens: &[&str]) -> Value {
    tokens.iter().enumerate().map(|(id, t)| (t.to_string(), json!(id))).collect::<Map<_, _>>().into()
}

/// Makes a BPE tokenizer of a few letters in byte-level form.
fn byte_level_bpe() -> Value {
    let tokens = ["<s>", "a", "b", "e", "n", "Ġ", "an", "Ġa", "1", "2"];
    json!({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 2},
        "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"},
        "added_tokens": [special(0, "<s>")],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": " {2,4}"}, "content": " "}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|\\s+(?!\\S)|[^\\s\\p{N}]+|\\s+"}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}
        ]},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "", "end_of_word_suffix": "",
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": true, "vocab": vocabulary(&tokens), "merges": [["a", "n"], ["Ġ", "a"]]}
    })
}

fn word_piece() -> Value {
    let tokens = ["[UNK]", "[CLS]", "[SEP]", "the", "quick", "##a", "a", "12", "##345", ",", "."];
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [special(1, "[CLS]"), special(2, "[SEP]")],
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": vocabulary(&tokens)}
    })
}

fn unigram() -> Value {
    json!({
        "version": "1.0", "added_tokens": [special(0, "<unk>")],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Nmt"}, {"type": "NFKC"}, {"type": "Strip", "strip_left": true, "strip_right": true},
            {"type": "Lowercase"}, {"type": "Prepend", "prepend": "▁"}]},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "decoder": {"type": "Sequence", "decoders": [{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": false,
            "vocab": [["<unk>", 0.0], ["▁", -2.0], ["a", -3.0], ["▁the", -4.0], ["quick", -5.5], ["1", -6.0]]}
    })
}

fn load_value(value: &Value) -> Result<Tokenizer> {
    Tokenizer::from_bytes(value.to_string().as_bytes(), Path::new("tokenizer.json"))
}

/// Loads a tokenizer and encodes and decodes [`TEXTS`] with it; returns the last error, if any.
fn try_all(text: &[u8]) -> Option<String> {
    let from = Instant::now();
    let mut said = None;
    match Tokenizer::from_bytes(text, Path::new("tokenizer.json")) {
        Err(e) => said = Some(e.to_string()),
        Ok(tokenizer) => {
            for text in TEXTS {
                match tokenizer.encode(text, Some(2)) {
                    Err(e) => said = Some(e.to_string()),
                    Ok(ids) => {
                        assert!(ids.len() < 1 << 20, "{} ids", ids.len());
                        match tokenizer.decode(&ids) {
                            Err(e) => said = Some(e.to_string()),
                            Ok(text) => assert!(text.len() < 1 << 24, "{} bytes", text.len()),
                        }
                    }
                }
            }
        }
    }
    assert!(from.elapsed() < MAX_TIME, "{:?}", from.elapsed());
    if let Some(said) = &said {
        assert!(said.starts_with("tokenizer.json: invalid tokenizer: "), "{said}");
    }
    said
}

/// Lists JSON pointers to all values, but only to a few of vocabularies and merges.
fn pointers(value: &Value, at: String, out: &mut Vec<String>) {
    let few = match at.ends_with("/vocab") || at.ends_with("/merges") {
        true => 4,
        false => usize::MAX,
    };
    match value {
        Value::Array(list) => {
            list.iter().enumerate().take(few).for_each(|(i, v)| pointers(v, format!("{at}/{i}"), out));
        }
        Value::Object(map) => map.iter().take(few).for_each(|(key, v)| {
            pointers(v, format!("{at}/{}", key.replace('~', "~0").replace('/', "~1")), out);
        }),
        _ => {}
    }
    out.push(at);
}

fn mutate(value: &mut Value, random: &mut Random) {
    let mut all = Vec::new();
    pointers(value, String::new(), &mut all);
    let other = all[random.below(all.len())].clone();
    let other = value.pointer(&other).cloned().unwrap_or_default();
    let at = all[random.below(all.len())].clone();
    let target = value.pointer_mut(&at).unwrap();
    let numbers =
        [json!(4_000_000_000u64), json!(u64::MAX), json!(-1), json!(1e300), json!(0), json!(1), json!(0.5)];
    let kinds = [
        Value::Null,
        json!(true),
        json!([]),
        json!({}),
        json!(""),
        json!("a"),
        json!("▁"),
        json!([[]]),
        json!("(a|a)*b"),
        json!("x".repeat(5000)),
        json!({"Regex": "(?:a{1000}){1000}"}),
        json!({"type": "Sequence"}),
    ];
    match random.below(6) {
        0 => *target = numbers[random.below(numbers.len())].clone(),
        1 => *target = kinds[random.below(kinds.len())].clone(),
        2 => *target = other,
        3 => match target {
            Value::Object(map) => {
                let key = map.keys().nth(random.below(map.len())).cloned();
                key.map(|key| map.shift_remove(&key));
            }
            Value::Array(list) if !list.is_empty() => drop(list.remove(random.below(list.len()))),
            Value::String(text) => *text = text.chars().rev().chain("é".chars()).collect(),
            _ => *target = Value::Null,
        },
        4 => match target {
            Value::Array(list) => {
                let more: Vec<Value> = list.iter().cycle().take(8 * list.len().min(64)).cloned().collect();
                list.extend(more);
            }
            Value::Object(map) if map.contains_key("type") => {
                let one = Value::Object(map.clone());
                *target = json!({"type": "Sequence", "normalizers": vec![one.clone(); 12], "pretokenizers": vec![one.clone(); 12],
                    "decoders": vec![one.clone(); 12], "processors": vec![one; 12]});
            }
            Value::Number(n) => *target = json!(n.as_f64().unwrap_or(1.0) * 1e9),
            _ => *target = json!("\u{0}\u{10ffff}"),
        },
        _ => {
            let from = all[random.below(all.len())].clone();
            let taken = value.pointer_mut(&from).map(Value::take).unwrap_or_default();
            if let Some(target) = value.pointer_mut(&at) {
                *target = taken;
            }
        }
    }
}

#[test]
fn mutations_are_errors_or_tokenizers() {
    let seeds = [small_bpe(), byte_level_bpe(), word_piece(), unigram()];
    for seed in &seeds {
        assert_eq!(try_all(seed.to_string().as_bytes()), None);
    }
    let mut random = Random::new(1);
    let (mut refused, mut caught) = (0, 0);
    for i in 0..2000 {
        let mut value = seeds[i % seeds.len()].clone();
        for _ in 0..1 + random.below(4) / 3 {
            mutate(&mut value, &mut random);
        }
        let mut text = value.to_string().into_bytes();
        // Now and then, the text itself is truncated or damaged.
        match random.below(16) {
            0 => text.truncate(random.below(text.len())),
            1 => {
                let at = random.below(text.len());
                text[at] = b"{}[],:\"\\0\xff"[random.below(10)];
            }
            _ => {}
        }
        if let Some(said) = try_all(&text) {
            refused += 1;
            caught += usize::from(said.contains("library failed"));
        }
    }
    #[cfg(target_os = "linux")]
    {
        let peak = anemoe_io::peak_memory().unwrap();
        assert!(peak < 1 << 30, "{peak} bytes");
    }
    assert!(
        refused > 500 && refused < 1800,
        "{refused} refused, {caught} of them for a panic of the library"
    );
}

#[test]
fn every_cut_of_the_structure_is_an_error() {
    for seed in [small_bpe(), byte_level_bpe(), word_piece(), unigram()] {
        let text = seed.to_string();
        let structure: Vec<usize> =
            text.bytes().enumerate().filter(|(_, b)| b"{}[]:,".contains(b)).map(|(at, _)| at).collect();
        for at in structure.iter().step_by(structure.len() / 100 + 1) {
            assert!(try_all(&text.as_bytes()[..*at]).is_some(), "{at}");
        }
        // Every cut around the last parts.
        let decoder = text.find("\"decoder\"").unwrap();
        for at in decoder..decoder + 120 {
            assert!(try_all(&text.as_bytes()[..at]).is_some(), "{at}");
        }
    }
}

#[test]
fn truncation_and_padding_change_no_text() {
    let text = "an an an an an an an an an an an an";
    let mut plain = byte_level_bpe();
    plain["truncation"] = Value::Null;
    plain["padding"] = Value::Null;
    let ids = load_value(&plain).unwrap().encode(text, None).unwrap();
    assert!(ids.len() > 16);
    let mut hostile = byte_level_bpe();
    assert_eq!(load_value(&hostile).unwrap().encode(text, None).unwrap(), ids);
    hostile["padding"]["strategy"]["Fixed"] = json!(4_000_000_000u64);
    hostile["truncation"]["stride"] = json!(1000);
    hostile["truncation"]["max_length"] = json!(0);
    let tokenizer = load_value(&hostile).unwrap();
    assert_eq!(tokenizer.encode(text, None).unwrap(), ids);
    assert_eq!(tokenizer.encode("", None).unwrap(), [0u32; 0]);
}

#[test]
fn chains_that_multiply_a_text_are_refused() {
    let replace = |content: &str| json!({"type": "Replace", "pattern": {"String": "a"}, "content": content});
    let regex = |content: &str| json!({"type": "Replace", "pattern": {"Regex": "x*"}, "content": content});
    let level =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    let cases = [
        ("normalizer", vec![replace("aa"); 26], "normalizer: step Replace"),
        ("normalizer", vec![replace(&"a".repeat(400)); 3], "normalizer: step Replace"),
        (
            "normalizer",
            vec![replace(&"\u{fdfa}".repeat(400)), json!({"type": "NFKC"})],
            "normalizer: step NFKC",
        ),
        ("normalizer", vec![regex(&"b".repeat(100_000)); 2], "normalizer: step Replace"),
        (
            "normalizer",
            vec![json!({"type": "Prepend", "prepend": "a".repeat(100_000)})],
            "normalizer: step Prepend",
        ),
        ("normalizer", vec![json!({"type": "ByteLevel"}); 26], "normalizer: step ByteLevel"),
        ("normalizer", vec![json!({"type": "Lowercase"}); 65], "more than 64 steps"),
        ("decoder", vec![replace("aa"); 26], "decoder: step Replace"),
        (
            "decoder",
            vec![
                json!({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "", "cleanup": true});
                26
            ],
            "decoder: step CTC",
        ),
        ("pre_tokenizer", vec![level; 26], "pre_tokenizer: its steps may make a text"),
        ("pre_tokenizer", vec![json!({"type": "FixedLength", "length": 0})], "pieces of length 0"),
    ];
    for (part, steps, says) in cases {
        let mut value = byte_level_bpe();
        let list = ["normalizers", "decoders", "pretokenizers"]
            [["normalizer", "decoder", "pre_tokenizer"].iter().position(|p| *p == part).unwrap()];
        value[part] = json!({"type": "Sequence", list: steps});
        let said = try_all(value.to_string().as_bytes()).unwrap_or_default();
        assert!(
            said.contains(says),
            "{}: {said}, expected {says}",
            &value[part].to_string()[..200.min(value[part].to_string().len())]
        );
    }
}

#[test]
fn long_texts_pass_the_chains_of_published_tokenizers() {
    let mut value = unigram();
    let text = "東京 née İ ".repeat(20_000);
    value["normalizer"]["normalizers"]
        .as_array_mut()
        .unwrap()
        .insert(0, json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}));
    value["normalizer"]["normalizers"].as_array_mut().unwrap().push(json!({"type": "NFKD"}));
    assert!(load_value(&value).unwrap().encode(&text, None).unwrap().len() > 20_000);
}

#[test]
fn parts_that_the_library_panics_at_are_errors() {
    let with = |base: Value, at: &str, value: Value| {
        let mut out = base;
        *out.pointer_mut(at).unwrap() = value;
        out
    };
    let template = |single: Value, tokens: Value| {
        let template =
            json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": tokens});
        with(byte_level_bpe(), "/post_processor", template)
    };
    let a = json!({"Sequence": {"id": "A", "type_id": 0}});
    let b = json!({"Sequence": {"id": "B", "type_id": 0}});
    let bos = json!({"SpecialToken": {"id": "<bos>", "type_id": 0}});
    let bos_of = |ids: Vec<u32>, tokens: usize| json!({"<bos>": {"id": "<bos>", "ids": ids, "tokens": vec!["<bos>"; tokens]}});
    let mut cut_merge = byte_level_bpe();
    cut_merge["model"]["vocab"]["東"] = json!(10);
    cut_merge["model"]["merges"] = json!([["a", "東"]]);
    cut_merge["model"]["continuing_subword_prefix"] = json!("x");
    let table = |text: &str| {
        with(byte_level_bpe(), "/normalizer", json!({"type": "Precompiled", "precompiled_charsmap": text}))
    };
    let mut deep = json!({"type": "NFC"});
    for _ in 0..20 {
        deep = json!({"type": "Sequence", "normalizers": [deep]});
    }
    let regex = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let cases = [
        (template(json!([bos, a]), json!({})), "`<bos>`, which is not among `special_tokens`"),
        (template(json!([bos, a]), bos_of(vec![1, 2], 1)), "has 2 `ids` and 1 `tokens` for `<bos>`"),
        (template(json!([a, b]), json!({})), "has a second text"),
        (template(json!([a, a, a, a, a]), json!({})), "repeat a text 5 times"),
        (template(json!([bos, a]), bos_of(vec![1; 5000], 5000)), "add 5000 tokens"),
        (
            with(byte_level_bpe(), "/model/continuing_subword_prefix", json!("####")),
            "a merge ends with `n`, which has no `continuing_subword_prefix` `####`",
        ),
        (cut_merge, "a merge ends with `東`, which has no `continuing_subword_prefix` `x`"),
        (table("/////w=="), "a table of 4294967295 bytes in 6"),
        (table("BAAA"), "not the base64 of a table"),
        (table("BAAAAAAAAAAA東"), "tokenizer: "),
        (with(byte_level_bpe(), "/decoder", json!(7)), "did not match"),
        (with(byte_level_bpe(), "/normalizer", deep), "normalizer: nested more than 16 deep"),
        (
            with(byte_level_bpe(), "/pre_tokenizer", regex("(?:(?=a){1000}){1000}")),
            "counts of a regular expression",
        ),
        (with(byte_level_bpe(), "/pre_tokenizer", regex(&"(".repeat(70_000))), "70000 bytes"),
        (with(byte_level_bpe(), "/pre_tokenizer", regex(&"(".repeat(60_000))), "tokenizer: "),
        (
            with(word_piece(), "/model/max_input_chars_per_word", json!(4_000_000_000u64)),
            "4000000000, more than 1000",
        ),
        (with(unigram(), "/decoder/decoders/1/stop", json!(u64::MAX)), "cannot decode tokens: "),
    ];
    for (value, says) in cases {
        let said = try_all(value.to_string().as_bytes()).unwrap_or_default();
        assert!(said.contains(says), "{said}, expected {says}");
    }
    let twice = byte_level_bpe().to_string().replace("\"a\":1", "\"a\":1,\"a\":1");
    assert!(try_all(twice.as_bytes()).unwrap().contains("key `a` is there twice"));
}

/// Makes a tokenizer of a vocabulary without merges.
fn with_names(decoder: &str, names: &[&str]) -> Tokenizer {
    let file = json!({
        "decoder": {"type": decoder, "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocabulary(names), "merges": [], "byte_fallback": decoder == "ByteFallback"},
    });
    load_value(&file).unwrap()
}

/// Returns the pieces of a stream over the tokens of a vocabulary.
fn pieces(decoder: &str, names: &[&str], ids: &[u32]) -> Vec<String> {
    let tokenizer = with_names(decoder, names);
    let mut stream = TextStream::new(&tokenizer, &[]).unwrap();
    ids.iter().map(|id| stream.push(*id).unwrap()).collect()
}

#[test]
fn a_replacement_character_of_its_own_is_text_and_a_part_of_a_character_waits() {
    let letters = ["a", "ï¿½", "ï", "¿", "½", "Ã", "¤"];
    assert_eq!(pieces("ByteLevel", &letters, &[0, 1, 0]), ["a", "\u{fffd}", "a"]);
    assert_eq!(pieces("ByteLevel", &letters, &[2, 3, 4]), ["", "", "\u{fffd}"]);
    assert_eq!(pieces("ByteLevel", &letters, &[0, 5, 6]), ["a", "", "ä"]);
    let bytes = ["a", "\u{fffd}", "<0xEF>", "<0xBF>", "<0xBD>", "<0xC3>", "<0xA4>"];
    assert_eq!(pieces("ByteFallback", &bytes, &[0, 1]), ["a", "\u{fffd}"]);
    assert_eq!(pieces("ByteFallback", &bytes, &[0, 5, 6]), ["a", "", "ä"]);
    assert_eq!(pieces("ByteFallback", &bytes, &[2, 3, 4]).concat(), "\u{fffd}");
}

#[test]
fn a_long_run_of_bytes_is_text_at_its_last_bytes() {
    for (bytes, letter) in [
        (vec!["<0xC3>", "<0xA9>"], "é"),
        (vec!["<0xE2>", "<0x82>", "<0xAC>"], "€"),
        (vec!["<0xF0>", "<0x9F>", "<0xA6>", "<0x99>"], "🦙"),
    ] {
        let names: Vec<&str> = bytes.iter().copied().chain(["a"]).collect();
        let tokenizer = with_names("ByteFallback", &names);
        let letters = |i: usize| if i.is_multiple_of(40) { "a" } else { letter };
        let ids = |from: usize, to: usize| -> Vec<u32> {
            let n = bytes.len() as u32;
            (from..to).flat_map(|i| if i % 40 == 0 { n..n + 1 } else { 0..n }).collect()
        };
        for prompt in 0..50 {
            let mut stream = TextStream::new(&tokenizer, &ids(0, prompt)).unwrap();
            let found: String = ids(prompt, 120).iter().map(|id| stream.push(*id).unwrap()).collect();
            assert_eq!(found, (prompt..120).map(letters).collect::<String>(), "{prompt}");
        }
    }
}
