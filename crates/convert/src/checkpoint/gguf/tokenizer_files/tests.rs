//! Tests of tokenizers made from metadata: against pieces of published tokenizers, against llama.cpp's way to merge, and of
//! metadata that is wrong.

use super::super::header;
use super::super::writer::Gguf;
use super::*;
use anemoe_io::Random;
use std::path::Path;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, Tokenizer};

fn with<T>(g: &Gguf, read: impl FnOnce(Metadata<'_>) -> T) -> T {
    let file = g.write();
    let head = header::parse(&file).unwrap();
    read(Metadata { path: Path::new("m.gguf"), file: &file, values: &head.values })
}

fn made(g: &Gguf) -> Value {
    with(g, |m| tokenizer(m).unwrap().unwrap())
}

fn loaded(g: &Gguf) -> Tokenizer {
    Tokenizer::from_bytes(made(g).to_string()).unwrap()
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, true).unwrap().get_ids().to_vec()
}

/// Makes a byte-level file: a letter for each byte, `more`, and the merges that make `more`.
fn byte_level_file(pre: &str, more: &[&str], merges: &[&str]) -> Gguf {
    let letters = (0u8..=255).map(|b| match b {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(b),
        0..=b' ' => char::from_u32(0x100 + u32::from(b)).unwrap(),
        0x7f..=0xa0 => char::from_u32(0x100 + 33 + u32::from(b) - 0x7f).unwrap(),
        0xad => '\u{143}',
    });
    let tokens: Vec<String> = letters.map(String::from).chain(more.iter().map(|t| t.to_string())).collect();
    let mut g = Gguf::new();
    g.text(MODEL, "gpt2");
    g.text(PRE, pre);
    g.texts(TOKENS, &tokens);
    g.texts(MERGES, merges);
    g
}

/// Text with what pre-tokenizers differ in: contractions, digits, case, scripts, runs of spaces, ends of lines, slashes.
const PIECES: &str = "I'VE we'll 1234567½ naïve  café\n\n x=1;//\nÀÉHTTPServer iOS漢字かなカナ! ٣٤\t\t y…";

/// Checks the pieces against those that the Python package `tokenizers` cuts with the `pre_tokenizer` of Llama 3.1, Qwen3,
/// gpt-oss, DeepSeek V3, OLMo and OLMo 2, and of SmolLM2 and Mistral Nemo as published (2026-11-28).
#[test]
fn pieces_are_those_of_the_published_tokenizers() {
    for (name, expected) in [
        (
            "llama-bpe",
            "I|'VE| we|'ll| |123|456|7½| naïve| | café|\n\n| x|=|1|;//\n|ÀÉHTTPServer| iOS漢字かなカナ|!| |٣٤|\t\t| y|…",
        ),
        (
            "dbrx",
            "I|'VE| we|'ll| |123|456|7½| naïve| | café|\n\n| x|=|1|;//\n|ÀÉHTTPServer| iOS漢字かなカナ|!| |٣٤|\t\t| y|…",
        ),
        (
            "qwen2",
            "I|'VE| we|'ll| |1|2|3|4|5|6|7|½| naïve| | café|\n\n| x|=|1|;//\n|ÀÉHTTPServer| iOS漢字かなカナ|!| |٣|٤|\t\t| y|…",
        ),
        (
            "gpt-4o",
            "I'VE| we'll| |123|456|7½| naïve| | café|\n\n| x|=|1|;//\n|ÀÉHTTPServer| i|OS漢字かなカナ|!| |٣٤|\t\t| y|…",
        ),
        (
            "tekken",
            "I|'VE| we|'ll| |1|2|3|4|5|6|7|½| naïve| | café|\n\n| x|=|1|;//\n|ÀÉHTTPServer| i|OS漢字かなカナ|!| |٣|٤|\t\t| y|…",
        ),
        (
            "deepseek-v3",
            "I|'VE| we|'ll| |123|456|7½| naïve| | café|\n\n| x|=|1|;//\n|ÀÉHTTPServer| iOS|漢字かなカナ|!| |٣٤|\t\t| y|…",
        ),
        (
            "olmo",
            "I|'|VE| we|'ll| 1234567½| naïve| | café|\n\n| x|=|1|;//|\n|ÀÉHTTPServer| iOS漢字かなカナ|!| ٣٤|\t\t| y|…",
        ),
        (
            "smollm",
            "I|'|VE| we|'ll| |1|2|3|4|5|6|7|½| naïve| | café|\n\n| x|=|1|;//|\n|ÀÉHTTPServer| iOS漢字かなカナ|!| |٣|٤|\t\t| y|…",
        ),
    ] {
        let steps = PreTokenizer::named(Some(name)).unwrap().steps();
        let steps: tokenizers::PreTokenizerWrapper = serde_json::from_value(steps).unwrap();
        let mut text = PreTokenizedString::from(PIECES);
        steps.pre_tokenize(&mut text).unwrap();
        let splits = text.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let found: Vec<&str> = splits.iter().map(|(_, (from, to), _)| &PIECES[*from..*to]).collect();
        assert_eq!(found.join("|"), expected, "{name}");
    }
}

/// Checks that the tokenizer of every name loads, keeps a text, and that no name is there twice.
#[test]
fn every_name_makes_a_tokenizer() {
    let names = PreTokenizer::names();
    let names: Vec<&str> = names.split(", ").collect();
    assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len());
    for name in names {
        let t = loaded(&byte_level_file(name, &[], &[]));
        assert_eq!(t.decode(&ids(&t, PIECES), false).unwrap(), PIECES, "{name}");
    }
    let mut unnamed = byte_level_file("x", &[], &[]);
    unnamed.remove(PRE);
    assert_eq!(made(&unnamed), made(&byte_level_file("default", &[], &[])));
}

/// Checks what a name decides besides pieces: normalization, whole tokens, and the start.
#[test]
fn a_name_decides_on_more_than_pieces() {
    // `Ġhi` is a token, but merges make `Ġh` `i` of its bytes.
    let file = |pre: &str| {
        let mut g = byte_level_file(pre, &["Ġh", "hi", "Ġhi", "Ã©", "<s>"], &["Ġ h", "h i", "Ã ©"]);
        g.u32("tokenizer.ggml.bos_token_id", 260);
        g
    };
    let of = |g: &Gguf, text: &str| ids(&loaded(g), text);
    assert_eq!(of(&file("llama-bpe"), " hi"), [260, 258]);
    assert_eq!(of(&file("dbrx"), " hi"), [256, u32::from(b'i')]);
    assert_eq!(of(&file("tekken"), " hi"), [260, 258]);
    // An accent of its own is joined to its letter, or keeps its bytes.
    assert_eq!(of(&file("qwen2"), "e\u{301}"), [259]);
    assert_eq!(of(&file("gpt-2"), "e\u{301}"), [u32::from(b'e'), 0xcc, 0x81]);
    // The file has the last word on the start and the end.
    let mut g = file("llama-bpe");
    g.bool("tokenizer.ggml.add_bos_token", false);
    g.bool("tokenizer.ggml.add_eos_token", true);
    g.u32("tokenizer.ggml.eos_token_id", 256);
    assert_eq!(of(&g, "hi"), [257, 256]);
    with(&g, |m| {
        let config = tokenizer_config(m).unwrap().unwrap();
        assert_eq!(config["add_bos_token"], json!(false));
        assert_eq!((&config["bos_token"], &config["eos_token"]), (&json!("<s>"), &json!("Ġh")));
        assert_eq!(config["tokenizer_class"], "PreTrainedTokenizerFast");
    });
}

#[test]
fn special_tokens_are_found_by_type_and_ends_by_text() {
    let mut g = byte_level_file("qwen2", &["<a>", "<b>", "  ", "<|im_end|>", "[PAD260]", ""], &[]);
    let types: Vec<i32> = [1; 256].into_iter().chain([3, 2, 4, 1, 5, 1]).collect();
    g.i32s(TYPES, &types);
    let t = loaded(&g);
    assert_eq!(ids(&t, "<a>  <b><|im_end|>"), [256, 258, 257, 259]);
    assert_eq!(t.decode(&[256, 258, 257, 259, 65], true).unwrap(), "  A");
    // A token that is not in use is no special one, and an empty one is never found.
    assert_eq!(ids(&t, "[PAD260]").len(), 8);
    assert_eq!(t.id_to_token(261).unwrap(), "[EMPTY_261]");
}

/// Makes a file with scores: bytes, the characters of `letters`, and `more`, each with its score.
fn scores_file(letters: &str, more: &[(&str, f32)]) -> Gguf {
    let bytes = (0..256).map(|b| format!("<0x{b:02X}>"));
    let fixed = ["<unk>", "<s>", "</s>"].map(String::from).into_iter().chain(bytes);
    let fixed: Vec<(String, f32)> = fixed.map(|t| (t, 0.0)).collect();
    let letters = letters.chars().enumerate().map(|(i, c)| (c.to_string(), -1000.0 - i as f32));
    let more = more.iter().map(|(t, score)| (t.to_string(), *score));
    let (tokens, scores): (Vec<String>, Vec<f32>) = fixed.into_iter().chain(more).chain(letters).unzip();
    let mut types = vec![1; tokens.len()];
    types[..3].copy_from_slice(&[2, 3, 3]);
    types[3..259].fill(6);
    let mut g = Gguf::new();
    g.text(MODEL, "llama");
    g.texts(TOKENS, &tokens);
    g.f32s("tokenizer.ggml.scores", &scores);
    g.i32s(TYPES, &types);
    g
}

#[test]
fn scores_make_a_tokenizer_of_sentence_pieces() {
    let more = [("▁t", -1.0), ("he", -2.0), ("▁the", -3.0), ("▁▁", -4.0)];
    let mut g = scores_file("▁the", &more);
    let found = made(&g);
    assert_eq!(found["model"]["merges"], json!([["▁", "t"], ["h", "e"], ["▁t", "he"], ["▁", "▁"]]));
    let t = loaded(&g);
    // The start, a space before the text and behind a special token, and bytes.
    assert_eq!(ids(&t, "the"), [1, 261]);
    assert_eq!(ids(&t, "the</s>the"), [1, 261, 2, 261]);
    assert_eq!(ids(&t, "é\n"), [1, 263, 3 + 0xc3, 3 + 0xa9, 3 + 0x0a]);
    assert_eq!(t.decode(&[1, 261, 261, 3 + 0xc3, 3 + 0xa9, 2], true).unwrap(), "the theé");
    assert_eq!(ids(&t, ""), [1]);
    g.bool("tokenizer.ggml.add_space_prefix", false);
    g.bool("tokenizer.ggml.add_bos_token", false);
    let t = loaded(&g);
    assert_eq!(ids(&t, "the the"), [264, 260, 261]);
    assert_eq!(ids(&t, "  "), [262]);
    assert_eq!(t.decode(&[261, 261], true).unwrap(), " the the");
    g.bool("tokenizer.ggml.remove_extra_whitespaces", true);
    assert_eq!(ids(&loaded(&g), "  the   the "), [264, 260, 261]);
}

/// Merges as llama.cpp does: the neighbours whose joined text has the best score, of equals the leftmost.
fn merged_by_scores(text: &str, scores: &HashMap<String, f32>) -> Vec<String> {
    let mut symbols: Vec<String> = text.chars().map(String::from).collect();
    loop {
        let mut best: Option<(f32, usize)> = None;
        for i in 1..symbols.len() {
            let joined = format!("{}{}", symbols[i - 1], symbols[i]);
            if let Some(&score) = scores.get(&joined)
                && best.is_none_or(|(other, _)| score > other)
            {
                best = Some((score, i));
            }
        }
        let Some((_, i)) = best else { return symbols };
        let right = symbols.remove(i);
        symbols[i - 1].push_str(&right);
    }
}

#[test]
fn merges_by_scores_are_those_of_llama_cpp() {
    let mut random = Random::new(1);
    for round in 0..40 {
        // Tokens as a training makes them: of two tokens, each later one with a lower score.
        let mut more: Vec<(String, f32)> = Vec::new();
        let letters = ["abc▁", "ab", "abcdé▁"][round % 3];
        for i in 0..30 {
            let mut part = || {
                let all = more.len() + letters.chars().count();
                let at = random.below(all);
                more.get(at)
                    .map_or_else(|| letters.chars().nth(at - more.len()).unwrap().into(), |m| m.0.clone())
            };
            let joined = part() + &part();
            if joined.chars().count() < 12 && more.iter().all(|(t, _)| *t != joined) {
                more.push((joined, -(i as f32)));
            }
        }
        let scored: Vec<(&str, f32)> = more.iter().map(|(t, s)| (t.as_str(), *s)).collect();
        let mut g = scores_file(letters, &scored);
        g.bool("tokenizer.ggml.add_bos_token", false);
        g.bool("tokenizer.ggml.add_space_prefix", false);
        let t = loaded(&g);
        let scores: HashMap<String, f32> = more.iter().cloned().collect();
        for _ in 0..100 {
            let n = random.below(40);
            let text: String =
                (0..n).map(|_| letters.chars().nth(random.below(letters.chars().count())).unwrap()).collect();
            let found = t.encode(text.as_str(), false).unwrap().get_tokens().to_vec();
            assert_eq!(found, merged_by_scores(&text, &scores), "{text} {more:?}");
        }
    }
}

/// Checks runs of spaces, whose tokens all have the same score in Llama 2's file.
#[test]
fn runs_of_equal_scores_are_those_of_llama_cpp() {
    let runs: Vec<String> = (2..17).map(|n| "▁".repeat(n)).collect();
    let more: Vec<(&str, f32)> = runs.iter().map(|run| (run.as_str(), -1e9)).chain([("▁a", -1.0)]).collect();
    let mut g = scores_file("▁a", &more);
    g.bool("tokenizer.ggml.add_space_prefix", false);
    let t = loaded(&g);
    let scores: HashMap<String, f32> = more.iter().map(|(t, s)| (t.to_string(), *s)).collect();
    for n in 0..70 {
        for text in ["▁".repeat(n), "▁".repeat(n) + "a▁▁▁a"] {
            let found = t.encode(text.as_str(), false).unwrap().get_tokens().to_vec();
            assert_eq!(found, merged_by_scores(&text, &scores), "{text}");
        }
    }
}

/// Returns the error of a file that is changed.
fn error(g: &Gguf, change: &dyn Fn(&mut Gguf)) -> String {
    let mut changed = Gguf::new();
    changed.keys = g.keys.clone();
    change(&mut changed);
    with(&changed, |m| tokenizer(m).expect_err("an error").to_string())
}

fn replaced(key: &'static str, set: impl Fn(&mut Gguf)) -> impl Fn(&mut Gguf) {
    move |g| {
        g.remove(key);
        set(g);
    }
}

#[test]
fn models_and_names_that_are_unknown() {
    let g = byte_level_file("smollm", &[], &[]);
    let model = error(&g, &replaced(MODEL, |g| g.text(MODEL, "bert")));
    assert_eq!(
        model,
        "m.gguf: unsupported metadata: `tokenizer.ggml.model` is bert; implemented are gpt2, llama and gemma4"
    );
    let pre = error(&g, &replaced(PRE, |g| g.text(PRE, "kimi-k2")));
    let says = "m.gguf: unsupported metadata: `tokenizer.ggml.pre` is kimi-k2; implemented are llama3, ";
    assert!(pre.starts_with(says) && pre.contains(", qwen2, "), "{pre}");
    let map = error(&scores_file("ab", &[]), &|g| {
        g.raw(
            "tokenizer.ggml.precompiled_charsmap",
            9,
            &[&[0, 0, 0, 0][..], &1u64.to_le_bytes(), &[7]].concat(),
        );
    });
    assert!(map.contains("unsupported metadata: `tokenizer.ggml.precompiled_charsmap` is there"), "{map}");
}

#[test]
fn lists_of_other_lengths() {
    let bytes = byte_level_file("smollm", &["ab"], &["a b"]);
    let short = error(&bytes, &|g| g.i32s(TYPES, &[1; 256]));
    assert!(short.contains("`tokenizer.ggml.token_type` has 256 values, expected 257"), "{short}");
    const SCORES: &str = "tokenizer.ggml.scores";
    let scores = scores_file("ab", &[("ab", -1.0)]);
    let missing = error(&scores, &|g| g.remove(SCORES));
    assert!(missing.contains("`tokenizer.ggml.scores` is missing"), "{missing}");
    let short = error(&scores, &replaced(SCORES, |g| g.f32s(SCORES, &[0.0; 3])));
    assert!(short.contains("`tokenizer.ggml.scores` has 3 values, expected 262"), "{short}");
    let nan = error(&scores, &replaced(SCORES, |g| g.f32s(SCORES, &[f32::NAN; 262])));
    assert!(nan.contains("`tokenizer.ggml.scores` has NaN, expected finite numbers"), "{nan}");
    let texts = error(&scores, &replaced(SCORES, |g| g.texts(SCORES, &["1"; 262])));
    assert!(texts.contains("`tokenizer.ggml.scores` is of type array of string"), "{texts}");
}

#[test]
fn ids_outside_the_vocabulary_stand_for_no_token() {
    let plain = made(&byte_level_file("smollm", &[], &[]));
    for role in ["bos", "eos", "unknown", "padding"] {
        let key = format!("tokenizer.ggml.{role}_token_id");
        for (kind, value) in [(4, 256u32), (4, u32::MAX), (5, -1i32 as u32)] {
            let mut g = byte_level_file("smollm", &[], &[]);
            g.raw(&key, kind, &value.to_le_bytes());
            assert_eq!(made(&g), plain, "{role} {value}");
        }
        let said = error(&byte_level_file("smollm", &[], &[]), &|g| g.text(&key, "x"));
        assert!(said.contains(&format!("`{key}` is of type string, expected an integer")), "{said}");
    }
}

#[test]
fn merges_and_tokens_that_are_wrong() {
    let g = byte_level_file("smollm", &["ab"], &["a b"]);
    for (merges, says) in [
        (vec!["a b", "ab"], "has `ab` as 1, which is not two tokens"),
        (vec!["a c"], "has `a c` as 0, which is not two tokens that make a third"),
        (vec!["ab xyz"], "has `ab xyz` as 0, which is not two tokens that make a third"),
    ] {
        let said = error(&g, &replaced(MERGES, |g| g.texts(MERGES, &merges)));
        assert!(said.contains(says), "{said}");
    }
    let missing = error(&g, &|g| g.remove(MERGES));
    assert!(missing.contains("`tokenizer.ggml.merges` is missing"), "{missing}");
    let twice = error(&scores_file("aba", &[]), &|_| {});
    assert!(twice.contains("`tokenizer.ggml.tokens` has `a` as 259 and as 261"), "{twice}");
    // Of equal merges the first counts, as in llama.cpp.
    let mut again = byte_level_file("smollm", &["ab", "bc"], &["a b", "b c", "a b"]);
    assert_eq!(made(&again)["model"]["merges"], json!([["a", "b"], ["b", "c"]]));
    again.remove(MERGES);
    again.texts::<&str>(MERGES, &[]);
    assert_eq!(ids(&loaded(&again), "ab"), [97, 98]);
}

#[test]
fn absurd_tokens_are_refused_at_once() {
    let started = std::time::Instant::now();
    let long = "ab".repeat(40_000);
    let said = error(&scores_file("ab", &[(&long, -1.0)]), &|_| {});
    assert!(said.contains("tokens this long take too long to cut"), "{said}");
    let runs: Vec<String> = (2..2000).map(|n| "a".repeat(n)).collect();
    let runs: Vec<(&str, f32)> = runs.iter().map(|t| (t.as_str(), -1.0)).collect();
    let said = error(&scores_file("a", &runs), &|_| {});
    assert!(said.contains("make more merges than 4 for each"), "{said}");
    assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
}

/// Checks that metadata with wrong bytes is refused or read, without a panic, and that what is read is a tokenizer.
#[test]
fn metadata_with_wrong_bytes() {
    let mut random = Random::new(1);
    let files = [
        byte_level_file("llama-bpe", &["ab", "<|eot_id|>"], &["a b"]),
        scores_file("▁ab", &[("ab", -1.0), ("▁ab", -2.0)]),
    ];
    for whole in files.map(|g| g.write()) {
        for _ in 0..2000 {
            let mut bytes = whole.clone();
            for _ in 0..1 + random.below(3) {
                let at = random.below(bytes.len());
                bytes[at] = random.below(256) as u8;
            }
            let Ok(head) = header::parse(&bytes) else { continue };
            let m = Metadata { path: Path::new("m.gguf"), file: &bytes, values: &head.values };
            let _ = tokenizer_config(m);
            if let Ok(Some(made)) = tokenizer(m) {
                Tokenizer::from_bytes(made.to_string()).unwrap();
            }
        }
    }
}
