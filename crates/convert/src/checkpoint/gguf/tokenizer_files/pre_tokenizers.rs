//! Splits of a text before byte-level pairs are merged, by the name in `tokenizer.ggml.pre`.
//!
//! The names, and whether a name merges inside whole tokens or adds the start, are those of llama.cpp's
//! `src/llama-vocab.cpp`. The expressions are those of the models' own `tokenizer.json`, which llama.cpp cites beside
//! its own; where both differ in writing only (`'[sS]` and `(?i:'s)`), this is the models' own.

use serde_json::{Value, json};

/// Steps before the merges, for files with one of the names.
pub struct PreTokenizer {
    /// Names in `tokenizer.ggml.pre`, separated by blanks.
    names: &'static str,
    /// Expressions that split a text, each within the pieces of those before it. What none matches is a piece, too.
    splits: &'static [&'static str],
    /// True if text is normalized to NFC first, as the models' `tokenizer.json` says. GGUF has no key for it.
    nfc: bool,
    /// True if a piece that is a token is not merged from its bytes.
    pub ignore_merges: bool,
    /// True if the start is added where the file does not say.
    pub adds_bos: bool,
}

const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA_3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const QWEN_2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
    r"|\s+(?!\S)|\s+",
);
const MINICPM_5: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
    r"|\s+(?!\S)|\s+",
);
const SEED_CODER: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+",
    r"|\s+(?!\S)|\s+",
);
const GPT_4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const DEEPSEEK_V3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
    r##"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
);
/// Signs of DeepSeek LLM, and what it and DeepSeek Coder take for Chinese, Japanese and Korean.
const DEEPSEEK_SIGNS: &str =
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+";
const CJK: &str = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
const KANJI_AND_KANA: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
/// Viking's words: all but blanks and the stops of several scripts.
const NO_STOPS: &str = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+";
/// Words of DeepSeek LLM: letters of Latin, Greek, Cyrillic and some other scripts.
const DEEPSEEK_WORDS: &str = concat!(
    r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}",
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}",
    r"\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}",
    r"\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}",
    r"\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}",
    r"\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}",
    r"\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}",
    r"\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}",
    r"\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}",
    r"\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}",
    r"\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}",
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}",
    r"\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}",
    r"\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}",
    r"\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}",
    r"\x{1E900}-\x{1E943}]+",
);

/// All that are read. llama.cpp has more, for architectures that are not read here.
const ALL: [PreTokenizer; 16] = [
    row("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", &[LLAMA_3]).whole().with_bos(),
    row("dbrx smaug-bpe", &[LLAMA_3]),
    row("qwen2 deepseek-r1-qwen", &[QWEN_2]).nfc(),
    row("megrez kormo f2llmv2 stablelm2", &[QWEN_2]),
    row("smollm starcoder refact minerva-7b", &[r"\p{N}", GPT_2]),
    row("gpt-2 phi-2 gigachat a.x-4.0 mellum trillion", &[GPT_2]),
    row("olmo mpt", &[GPT_2]).nfc(),
    row("gpt-4o llama4 kanana2", &[GPT_4O]),
    row("tekken", &[TEKKEN]).whole().with_bos(),
    row("deepseek-llm", &[r"[\r\n]", DEEPSEEK_WORDS, DEEPSEEK_SIGNS, r"\s+$", CJK, r"\p{N}"]),
    row("deepseek-coder", &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"]),
    row("deepseek-v3", &[r"\p{N}{1,3}", KANJI_AND_KANA, DEEPSEEK_V3]),
    row("minicpm5", &[r"\p{N}{1,3}", MINICPM_5]).whole(),
    row("seed-coder", &[SEED_CODER]),
    row("viking", &[NO_STOPS, r"\p{N}"]),
    // llama.cpp takes it for files without a name, too.
    row("default", &[r"[\p{P}\$\+<=>\^~\|]+", GPT_2, r"\p{N}+", r"[0-9][0-9][0-9]"]),
];

const fn row(names: &'static str, splits: &'static [&'static str]) -> PreTokenizer {
    PreTokenizer { names, splits, nfc: false, ignore_merges: false, adds_bos: false }
}

impl PreTokenizer {
    /// Returns the row with pieces kept whole that are tokens.
    const fn whole(self) -> Self {
        PreTokenizer { ignore_merges: true, ..self }
    }

    const fn with_bos(self) -> Self {
        PreTokenizer { adds_bos: true, ..self }
    }

    const fn nfc(self) -> Self {
        PreTokenizer { nfc: true, ..self }
    }

    /// Finds the row of a name; none means `default`.
    pub fn named(name: Option<&str>) -> Option<&'static PreTokenizer> {
        let name = name.unwrap_or("default");
        ALL.iter().find(|row| row.names.split(' ').any(|n| n == name))
    }

    /// Lists all names, for messages.
    pub fn names() -> String {
        ALL.map(|row| row.names).join(" ").replace(' ', ", ")
    }

    /// Makes `normalizer` of `tokenizer.json`.
    pub fn normalizer(&self) -> Value {
        if self.nfc { json!({"type": "NFC"}) } else { Value::Null }
    }

    /// Makes `pre_tokenizer` of `tokenizer.json`: the splits, then a letter for each byte.
    pub fn steps(&self) -> Value {
        let split = |expression: &&str| {
            let pattern = json!({"Regex": expression});
            json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false})
        };
        let mut steps: Vec<Value> = self.splits.iter().map(split).collect();
        steps.push(byte_level());
        json!({"type": "Sequence", "pretokenizers": steps})
    }
}

/// Makes the step, and the decoder, between bytes and the letters that stand for them.
pub fn byte_level() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false})
}
