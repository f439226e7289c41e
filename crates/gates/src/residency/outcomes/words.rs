//! Finds the facts of a graph in the words of a row, for tables that were written for people.

use super::super::graph::{GraphState, Shapes, StoredForm};
use super::super::rule::{Chip, Conditions, DeviceTarget, SystemRelease, Units, family_of};
use super::super::rules;
use super::row::Row;
use super::sketch::Sketch;
use anemoe_convert::quant::Granularity;
use anemoe_mlpackage::mil::DataType;

/// Row of a table of words.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WordRow {
    /// Id of the row.
    pub id: String,
    /// Model and part, in words.
    pub model: String,
    /// Dimensions and ops of the graph, in words.
    pub facts: String,
    /// Compression, in words.
    pub quant: String,
    /// Megabytes of weights.
    pub mb: Option<f64>,
    /// Token count and states, in words.
    pub shape: String,
    /// Chip and system, in words.
    pub chip: String,
    /// Label: where the graph ran, or how it failed.
    pub label: String,
    /// Source of the row.
    pub source: String,
}

impl WordRow {
    /// Finds the facts in the words.
    pub fn read(&self) -> Row {
        let words = Words::new(&[&self.model, &self.facts]);
        let around = Words::new(&[&self.model, &self.facts, &self.shape, &self.chip]);
        Row {
            id: self.id.clone(),
            model: self.model.clone(),
            label: self.label.clone(),
            project: family_of(&self.source).to_string(),
            conditions: conditions(self, &around),
            machine: self.chip.clone(),
            program: String::new(),
            features: Vec::new(),
            sketch: sketch(self, &words),
        }
    }
}

fn conditions(row: &WordRow, around: &Words) -> Conditions {
    let chip_text = row.chip.to_ascii_lowercase();
    let chip = row.chip.split([',', '/', '(']).find_map(Chip::parse);
    let phone = chip_text.contains("iphone") || chip.is_some_and(|c| !c.mac);
    let all = around.has_pair("units", "all") || around.has("units=all") || around.has("computeunits.all");
    Conditions {
        target: if phone { DeviceTarget::Iphone } else { DeviceTarget::Mac },
        units: if all { Units::All } else { Units::CpuAndNe },
        chip,
        system: row.chip.split([',', '(', ')']).find_map(|part| {
            part.trim().starts_with(|c: char| c.is_alphabetic()).then(|| SystemRelease::parse(part))?
        }),
    }
}

/// Words for graphs that have the ops of a layer around their products.
const LAYERS: [&str; 27] = [
    "layer",
    "layers",
    "attn",
    "attention",
    "block",
    "blocks",
    "pack",
    "packs",
    "ffn",
    "moe",
    "experts",
    "expert",
    "monolith",
    "encoder",
    "chunk",
    "transformer",
    "unet",
    "shard",
    "shards",
    "heads",
    "stack",
    "model",
    "bank",
    "banks",
    "vocoder",
    "backbone",
    "whole",
];

/// Words for graphs that join other graphs.
const GLUE: [&str; 6] = ["combiner", "joint", "joiner", "vad", "glue", "joint_decision"];

/// Lower-case words of texts, with a bar between texts.
pub struct Words {
    words: Vec<String>,
}

impl Words {
    pub fn new(texts: &[&str]) -> Words {
        let split = |c: char| c.is_whitespace() || matches!(c, ',' | ';' | '(' | ')' | '+' | ':');
        // A bar between texts keeps words of two columns from being neighbours.
        let words = texts.iter().flat_map(|t| t.split(split).chain(["|"])).filter(|w| !w.is_empty());
        let words = words.map(|w| {
            let w = w.to_ascii_lowercase();
            // Op names may have an opset in front: `ios16.cumsum`.
            match w.split_once('.') {
                Some((opset, op)) if opset.starts_with("ios") && !op.is_empty() => op.to_string(),
                _ => w,
            }
        });
        Words { words: words.collect() }
    }

    pub fn has(&self, word: &str) -> bool {
        self.words.iter().any(|w| w == word)
    }

    pub fn any(&self, words: &[&str]) -> bool {
        words.iter().any(|w| self.has(w))
    }

    pub fn has_pair(&self, first: &str, second: &str) -> bool {
        self.words.windows(2).any(|w| w[0] == first && w[1] == second)
    }

    /// Tells whether the words hold `word` without a denial beside it.
    fn affirms(&self, word: &str) -> bool {
        self.words.iter().enumerate().any(|(i, w)| {
            let denied = i > 0 && matches!(self.words[i - 1].as_str(), "no" | "without" | "minus" | "not");
            let free = self.words.get(i + 1).is_some_and(|n| matches!(n.as_str(), "free" | "removed"));
            w == word && !denied && !free
        })
    }

    /// Returns the numbers after a prefix: `k=4096`, `d3072`, and `ffn 512` where the prefix is a word of its own.
    fn numbers(&self, prefix: &str) -> Vec<u64> {
        let mut found = Vec::new();
        for (i, w) in self.words.iter().enumerate() {
            if let Some(n) = w.strip_prefix(prefix).and_then(number) {
                found.push(n);
            } else if w == prefix.trim_end_matches('=')
                && !prefix.ends_with('=')
                && let Some(n) = self.words.get(i + 1).and_then(|n| number(n))
            {
                found.push(n);
            }
        }
        found
    }

    fn first(&self, prefixes: &[&str]) -> Option<u64> {
        prefixes.iter().find_map(|p| self.numbers(p).first().copied())
    }

    /// Returns the number before a word: `18 ops`, `32 layers`.
    fn before(&self, units: &[&str]) -> Option<u64> {
        self.words.windows(2).find_map(|w| units.contains(&w[1].as_str()).then(|| number(&w[0]))?)
    }

    /// Returns the number before a suffix: `24l`, `768-wide`, `12-layer`.
    fn suffixed(&self, suffix: &str) -> Option<u64> {
        self.words.iter().find_map(|w| w.strip_suffix(suffix).and_then(number))
    }

    /// Returns the numbers on both sides of an arrow: `4096->5120`, `d3072 -> ~50k`.
    fn arrow(&self) -> Option<(u64, u64)> {
        for (i, w) in self.words.iter().enumerate() {
            if w == "->" {
                let left = self.words.get(i.checked_sub(1)?)?;
                let right = self.words.get(i + 1)?;
                return Some((
                    number(left.trim_start_matches(|c: char| c.is_ascii_alphabetic()))?,
                    number(right)?,
                ));
            }
            if let Some((left, right)) = w.split_once("->")
                && let (Some(left), Some(right)) =
                    (number(left.trim_start_matches(|c: char| c.is_ascii_alphabetic())), number(right))
            {
                return Some((left, right));
            }
        }
        None
    }

    /// Returns the factors of a product: `512x512x512`, `512^3`, `1x16x2048x64`.
    fn extents(&self) -> Option<Vec<u64>> {
        self.words.iter().find_map(|w| {
            if let Some((n, power)) = w.split_once('^') {
                return Some(vec![number(n)?; usize::try_from(number(power)?).ok().filter(|&p| p <= 4)?]);
            }
            let parts: Option<Vec<u64>> = w.split('x').map(number).collect();
            parts.filter(|p| p.len() >= 2)
        })
    }
}

/// Parses a number: `4096`, `~50k`, `1024.`.
fn number(text: &str) -> Option<u64> {
    let text = text.trim_start_matches(['~', '=']).trim_end_matches('.');
    let (digits, factor) = match text.strip_suffix('k') {
        Some(t) => (t, 1000),
        None => (text, 1),
    };
    let n: u64 = digits.parse().ok()?;
    n.checked_mul(factor).filter(|&n| n < 1 << 24)
}

/// Reads the facts from the words of a row.
pub fn sketch(row: &WordRow, words: &Words) -> Sketch {
    let shape = Words::new(&[&row.shape]);
    let everywhere = Words::new(&[&row.model, &row.facts, &row.shape, &row.quant]);
    let quant = row.quant.to_ascii_lowercase();
    let text = format!("{} {}", row.model, row.facts).to_ascii_lowercase();
    let form = form(&quant);
    let mut states = states(&shape, &everywhere);
    if let Some(width) = words.first(&["state width ", "width="]).filter(|_| !states.is_empty()) {
        states[0].dims = vec![1, width];
    }
    let lone = lone(words);
    let mut named = named(words);
    if lone.is_some() {
        named.retain(|n| Some(n.as_str()) != lone);
    }
    let ranged = everywhere.any(&["rangedim", "ranged", "flexible", "dynamic"]);
    let enumerated = everywhere.any(&["enumerated", "enumeratedshapes"]);
    let shapes = match (enumerated, ranged) {
        (true, _) => Shapes::Enumerated,
        (_, true) => Shapes::Ranged(range(&everywhere, &states)),
        _ => Shapes::Fixed,
    };
    let arrow = words.arrow().or_else(|| Some((words.first(&["k="])?, words.first(&["n="])?)));
    let mut depths = words.numbers("k=");
    depths.extend(arrow.filter(|_| lone.is_some()).map(|a| a.0));
    if depths.is_empty() && lone.is_some() {
        depths = words.numbers("k");
    }
    let gated_mlp =
        words.any(&["swiglu", "mlp"]) && !words.any(&["layer", "layers", "attention", "attn", "whole"]);
    let layers = words
        .before(&["layers", "layer"])
        .or_else(|| words.suffixed("-layer"))
        .or_else(|| words.suffixed("l"))
        .or_else(|| layer_range(&text));
    // One larger joint was measured: it had a wide output, and ran on the ANE.
    let joins = words.has("combiner") || words.any(&GLUE) && row.mb.is_none_or(|mb| mb <= 15.0);
    let glue = joins && !words.any(&["pack", "packs", "encoder", "layer", "layers"]);
    let head = words.any(&["head", "lm_head"]) && words.any(&["lm", "incl", "vocab", "vocabulary", "with"])
        || words.words.iter().any(|w| w.strip_prefix("vocab").is_some_and(|n| number(n).is_some()));
    let layered = !glue && lone.is_none() && !gated_mlp && (layers.is_some() || words.any(&LAYERS));
    Sketch {
        fp32: quant.contains("fp32") || text.contains("fp32"),
        activations: ["w8a8", "w4a8", "a8"].iter().any(|w| quant.contains(w)),
        form,
        bytes: row.mb.map(|mb| (mb * 1e6) as u64),
        positions: positions(&shape, words, !states.is_empty()),
        shapes,
        states,
        named,
        op_count: words.before(&["ops", "op", "ops)"]),
        layers,
        lone,
        lone_product: arrow,
        depths,
        extents: words.extents(),
        width: words.first(&["d=", "d", "h", "hidden", "hidden="]).or_else(|| words.suffixed("-wide")),
        mlp: words.first(&["dff", "ffn", "fc1", "intermediate"]),
        heads: heads(words),
        head_dim: words.first(&["dh"]),
        slots: words.first(&["s"]),
        gated_mlp,
        layered,
        glue,
        head,
        rank_2: text.contains("rank-2") || text.contains("rank 2"),
        batch_over_pixels: text.contains("[b,c,1,1]") || text.contains("(b,c,1,1)"),
        conv: words.words.iter().any(|w| w.starts_with("conv")),
        runtime_bound: text.contains("data-dependent") || text.contains("runtime bound"),
    }
}

/// Returns the number of layers of a range: `[16,24)` has 8.
fn layer_range(text: &str) -> Option<u64> {
    let inside = text.split('[').skip(1).find_map(|t| t.split_once(')')).map(|(inside, _)| inside)?;
    let (from, to) = inside.split_once(',')?;
    number(to.trim())?.checked_sub(number(from.trim())?).filter(|&n| n > 0)
}

fn form(quant: &str) -> StoredForm {
    let bits = |word: &str| {
        quant
            .split(word)
            .nth(1)
            .and_then(|t| t.trim_start_matches(['-', ' ', '_']).chars().next()?.to_digit(10))
    };
    let table = quant.contains("lut") || quant.contains("palett") || quant.contains("pal4");
    if table {
        let two = quant.contains("row,block") || quant.contains("(row");
        let scaled =
            quant.contains("chained") || quant.contains("channel_scale") || quant.contains("blockwise scale");
        let int8 =
            quant.contains("int8 entries") || quant.contains("int8 lut") || quant.contains("int8-entry");
        let bits = bits("lut").or(bits("int")).unwrap_or(4);
        return StoredForm::Lut {
            bits: u64::from(bits),
            grouped_axes: if two {
                vec![0, 1]
            } else if quant.contains("tensor") {
                vec![]
            } else {
                vec![0]
            },
            entries: if int8 { DataType::Int8 } else { DataType::Float16 },
            vector: 1,
            scaled,
        };
    }
    let four = quant.contains("int4") || quant.contains("w4");
    let eight = quant.contains("int8") || quant.contains("w8");
    let block =
        quant.contains("block") || quant.contains(" g3") || quant.contains(" g6") || quant.contains(" bs");
    match (four, eight) {
        // Both integer widths, without their places.
        (true, true) if quant.contains("int8") && quant.contains("int4") => StoredForm::Unstated,
        // INT4 is always stored per block: one scale for a channel of 4-bit integers is useless.
        (true, _) => StoredForm::Linear { bits: 4, grain: Granularity::Block },
        (_, true) if block => StoredForm::Linear { bits: 8, grain: Granularity::Block },
        (_, true) if quant.contains("channel") => StoredForm::Linear { bits: 8, grain: Granularity::Channel },
        (_, true) => StoredForm::Linear { bits: 8, grain: Granularity::Tensor },
        _ if quant.contains("fp32") => StoredForm::Dense(DataType::Float32),
        _ if quant.contains("fp16") || quant.contains("f16") => StoredForm::Dense(DataType::Float16),
        _ if quant.is_empty() || quant == "-" || quant == "?" => StoredForm::Unstated,
        _ => StoredForm::Unstated,
    }
}

fn states(shape: &Words, everywhere: &Words) -> Vec<GraphState> {
    let stateless = shape.any(&["stateless"]) || everywhere.any(&["stateless", "non-stateful"]);
    let says = shape
        .words
        .iter()
        .chain(&everywhere.words)
        .any(|w| w.starts_with("mlstate") || w == "stateful" || w == "states" || w == "state");
    if stateless || !says {
        return Vec::new();
    }
    let count = if everywhere.any(&["dual", "two"]) {
        2
    } else {
        everywhere.before(&["mlstate", "mlstates", "states", "statetypes"]).unwrap_or(1)
    };
    (0..count.min(64)).map(|i| GraphState { name: format!("state{i}"), dims: Vec::new() }).collect()
}

/// Returns the upper bound of a range. Beside a state, whose size is fixed, only the few tokens of a decoding step
/// can vary: 4.
fn range(words: &Words, states: &[GraphState]) -> Option<u64> {
    let bound = words.words.iter().find_map(|w| number(w.split_once("..")?.1.trim_end_matches(']')));
    bound.or((!states.is_empty()).then_some(4))
}

fn positions(shape: &Words, words: &Words, stateful: bool) -> Vec<u64> {
    let mut found: Vec<u64> = ["t=", "m=", "batch="].iter().flat_map(|p| shape.numbers(p)).collect();
    if found.is_empty() {
        found = ["t=", "m="].iter().flat_map(|p| words.numbers(p)).collect();
    }
    if found.is_empty() {
        // A sequence length is a token count, unless it may be the length of a cache.
        found = words
            .numbers("s=")
            .into_iter()
            .chain(shape.numbers("s="))
            .filter(|&n| !stateful || n == 1)
            .collect();
    }
    if found.is_empty() && words.any(&["single-token"]) {
        found.push(1);
    }
    found.sort_unstable();
    found.dedup();
    found
}

fn lone(words: &Words) -> Option<&'static str> {
    const OPS: [&str; 4] = ["linear", "conv", "matmul", "scaled_dot_product_attention"];
    let known = |w: &str| {
        let w = if w == "sdpa" { "scaled_dot_product_attention" } else { w };
        OPS.into_iter().find(|o| *o == w)
    };
    let first = words.words.first()?;
    if let Some(op) = known(first)
        && !words.any(&["bank", "banks", "single"])
    {
        return Some(op);
    }
    let pair = words
        .words
        .windows(2)
        .find_map(|w| known(&w[1]).filter(|_| matches!(w[0].as_str(), "single" | "one" | "lone")));
    let only = words.words.windows(2).find_map(|w| known(&w[0]).filter(|_| w[1] == "only"));
    // A slice of a head is a lone product.
    let head = (words.any(&["head"])
        && words.any(&["lm"])
        && words.arrow().is_some()
        && !words.any(&["layers", "layer"]))
    .then_some("conv");
    pair.or(only).or(head)
}

fn named(words: &Words) -> Vec<String> {
    // Words that also occur in English or in model names.
    const WORDS: [&str; 5] = ["mod", "shape", "cond", "tan", "rnn"];
    let mut found: Vec<String> = rules::off_the_ane()
        .filter(|op| !WORDS.contains(op) && words.affirms(op))
        .map(str::to_string)
        .collect();
    for (word, op) in [
        ("topk", "topk"),
        ("top-1", "topk"),
        ("top-k", "topk"),
        ("argmax", "reduce_argmax"),
        ("reduce_argmax", "reduce_argmax"),
        ("cast", "cast"),
        ("sort", "argsort"),
    ] {
        if words.affirms(word) && !found.iter().any(|f| f == op) {
            found.push(op.into());
        }
    }
    found
}

fn heads(words: &Words) -> Option<(u64, u64)> {
    let at = words.words.iter().position(|w| w == "heads");
    if let Some(w) = at.and_then(|i| words.words.get(i.checked_sub(1)?)) {
        return match w.split_once('/') {
            Some((q, kv)) => Some((number(q)?, number(kv)?)),
            None => number(w).map(|n| (n, n)),
        };
    }
    Some((words.first(&["nh"])?, words.first(&["nkv"])?))
}
