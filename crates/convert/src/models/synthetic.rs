//! Models of the real shapes, and a small one, whose weights are computed instead of read: full-size work needs no
//! download.

use super::keys::merged;
use super::registry::parse;
use super::tensor_table::{TensorRow, full_name};
use super::{gemma3, gemma4, gpt_oss, llama, qwen_moe, zaya};
use crate::checkpoint::{Checkpoint, Dtype, TensorInfo, TensorSource};
use crate::variants::Variants;
use crate::{Error, Result};
use anemoe_io::Random;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Opens the synthetic model `NAME?seed=N&layers=N&outliers=N`; `spec` is its whole name, prefix included.
pub(super) fn open(spec: &str, name: &str) -> Result<Checkpoint> {
    let path = PathBuf::from(spec);
    let (model, query) = name.split_once('?').unwrap_or((name, ""));
    let (mut seed, mut layers, mut outliers) = (0u64, None, 0);
    for pair in query.split('&').filter(|p| !p.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let wrong = |_| Error::usage(format!("{spec}: `{pair}` is not of the form {QUERY}"));
        let number: u64 = value.parse().map_err(wrong)?;
        match key {
            "seed" => seed = number,
            "layers" if (1..=1000).contains(&number) => layers = Some(number as usize),
            "outliers" if number <= MOST_PLANTED => outliers = number,
            _ => return Err(Error::usage(format!("{spec}: `{pair}`: expected {QUERY}"))),
        }
    }
    let Some((_, published)) = MODELS.iter().find(|(name, _)| *name == model) else {
        let known = MODELS.map(|(name, _)| name).join(", ");
        return Err(Error::usage(format!("{spec}: no synthetic model `{model}`; there are {known}")));
    };
    let mut config = published();
    if let Some(layers) = layers {
        limit_layers(&mut config, layers);
    }
    let variants = Variants::default();
    let decoder = parse(&config, &path, variants)?;
    let name = |row: &TensorRow| full_name(decoder.prefixes[0], &row.name);
    let rows: BTreeMap<String, TensorRow> =
        decoder.tensors().into_iter().map(|row| (name(&row), row)).collect();
    let roles = rows.iter().map(|(name, row)| (name.clone(), row.role)).collect();
    let info = |(name, row): (String, TensorRow)| {
        let (bytes, shape) = (2 * row.elements(), row.shape);
        TensorInfo { name, dtype: Dtype::BF16, bytes, shape, file: path.clone() }
    };
    let tensors = rows.into_iter().map(info).collect();
    let shape = match model {
        ZAYA => Shape::Networked,
        GEMMA_MINI => Shape::SmallBranches,
        _ => Shape::Plain,
    };
    let source = Box::new(Synthetic { path: path.clone(), shape, roles, seed, outliers, tensors });
    let (name, remarks) = (spec.to_string(), Vec::new());
    Ok(Checkpoint { name, path, config, generation_config: None, source, variants, remarks })
}

/// Configuration of a published model.
type PublishedConfig = fn() -> Value;

/// Synthetic models, each with its configuration.
pub(super) const MODELS: [(&str, PublishedConfig); 10] = [
    ("gemma4-26b-a4b", gemma4::published_config),
    ("gemma4-26b-a4b-assistant", gemma4::published_assistant),
    (GEMMA_MINI, gemma_mini),
    (ZAYA, zaya::published_config),
    ("qwen3-30b-a3b", qwen_moe::qwen3_30b),
    ("gpt-oss-20b", gpt_oss::gpt_oss_20b),
    ("olmoe-1b-7b", qwen_moe::olmoe_7b),
    ("llama-3.2-1b", llama::llama_1b),
    ("qwen3-0.6b", llama::qwen3_600m),
    ("gemma3-1b", gemma3::gemma_1b),
];

/// Name of the synthetic ZAYA.
const ZAYA: &str = "zaya1-8b";
/// Name of a Gemma of 30 layers that is built in seconds.
const GEMMA_MINI: &str = "gemma4-mini";

/// Options that may stand behind the `?`.
const QUERY: &str = "seed=N, layers=N from 1 to 1000, or outliers=N up to 10000";
/// Largest planted outlier, in deviations of its tensor: fp16 has to hold it.
const MOST_PLANTED: u64 = 10_000;

/// Returns the published configuration with every width cut down; layers, choice of experts and constants stay.
fn gemma_mini() -> Value {
    let mut config = gemma4::published_config();
    let small = json!({
        "hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "num_key_value_heads": 2, "global_head_dim": 64,
        "num_global_key_value_heads": 1, "sliding_window": 64, "intermediate_size": 96, "num_experts": 16, "top_k_experts": 4,
        "moe_intermediate_size": 64, "vocab_size": 1024, "max_position_embeddings": 1024
    });
    config["text_config"] = merged(config["text_config"].take(), small);
    config
}

/// Keeps the first `layers` layers of a configuration; more repeat its pattern.
fn limit_layers(config: &mut Value, layers: usize) {
    let text = if config.get("text_config").is_some() { &mut config["text_config"] } else { config };
    text["num_hidden_layers"] = layers.into();
    if let Some(types) = text["layer_types"].as_array().cloned().filter(|t| !t.is_empty()) {
        text["layer_types"] = (0..layers).map(|l| types[l % types.len()].clone()).collect();
    }
}

/// Shape of the values of a model.
#[derive(Clone, Copy, PartialEq)]
enum Shape {
    Plain,
    /// Branches are small beside the stream, as in trained models: otherwise 30 layers blow up every rounding.
    SmallBranches,
    /// The choice of a router network depends on the token; see [`Shaping::of`].
    Networked,
}

struct Synthetic {
    path: PathBuf,
    shape: Shape,
    /// Role of each tensor, by name.
    roles: BTreeMap<String, &'static str>,
    seed: u64,
    /// Largest planted outlier, in deviations; see [`Synthetic::planted`].
    outliers: u64,
    tensors: Vec<TensorInfo>,
}

impl Synthetic {
    /// Returns the planted outlier of a tensor of experts: its element, and its size in deviations, from 0 to
    /// `outliers`, other for each layer. Other tensors have none.
    fn planted(&self, info: &TensorInfo) -> Option<(u64, f32)> {
        if self.outliers == 0 || !info.name.contains("experts.") {
            return None;
        }
        let mut random = Random::new(hash(&info.name, !self.seed));
        let size = self.outliers as f64 * random.uniform();
        Some(((random.uniform() * info.elements() as f64) as u64, size as f32))
    }
}

/// Hashes a name to 64 bits, by FNV-1a.
fn hash(text: &str, seed: u64) -> u64 {
    text.bytes()
        .fold(seed ^ 0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Computes a nearly normal number of mean 0 and deviation 1: four uniform 16-bit numbers added (Irwin-Hall).
#[inline(always)]
fn normal(bits: u64) -> f32 {
    let lanes = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
    (lanes as f32 - 131_070.0) * (1.0 / 37_837.2)
}

impl TensorSource for Synthetic {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn path(&self) -> &Path {
        &self.path
    }

    /// Computes elements of a tensor, the same for any pieces in which they are read. Matrices are normal with
    /// deviation 1/sqrt(inputs), and one of 1024 weights is ten times as large; biases are near 0, other vectors near
    /// 1.
    fn read(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        let info =
            self.info(name).ok_or_else(|| Error::invalid(&self.path, format!("use: no tensor `{name}`")))?;
        info.check_range(&range, out.len())?;
        let random = Random::new(hash(name, self.seed));
        let role = self.roles.get(name).copied().unwrap_or_default();
        let shaping = Shaping::of(self.shape, role);
        if info.shape.len() < 2 {
            let mean = if name.contains("bias") { 0.0 } else { shaping.mean };
            for (i, o) in (range.start..).zip(out.iter_mut()) {
                let (i_paired, sign) = shaping.paired(i, 1);
                // The bias of ZAYA's skip class, the class behind the last expert, is -1 when training starts.
                let skip = name.ends_with("balancing_biases") && i + 1 == info.elements();
                *o = if skip { -1.0 } else { mean + sign * shaping.bias * normal(random.bits_at(i_paired)) };
            }
            return Ok(());
        }
        // A short last axis is the kernel of a convolution.
        let inputs = match info.shape.as_slice() {
            [.., channels, taps @ 1..=4] => channels * taps,
            _ => info.shape.last().copied().unwrap_or(1),
        };
        let scale = 1.0 / (inputs as f32).sqrt();
        for (i, o) in (range.start..).zip(out.iter_mut()) {
            let (i, sign) = shaping.paired(i, inputs);
            let bits = random.bits_at(i);
            let outlier = bits.wrapping_mul(0xd6e8_feb8_6659_fd93) >> 54 == 0;
            *o = sign * shaping.weight * normal(bits) * if outlier { 10.0 * scale } else { scale };
        }
        if let Some((place, deviations)) = self.planted(info).filter(|(place, _)| range.contains(place)) {
            out[(place - range.start) as usize] = deviations * scale;
        }
        Ok(())
    }
}

/// Shape of a tensor's values.
struct Shaping {
    /// Factor on the deviation of a matrix, 1/sqrt(inputs).
    weight: f32,
    /// Deviation of a vector.
    bias: f32,
    /// Mean of a vector that scales.
    mean: f32,
    /// True if rows come in pairs `w, -w`.
    paired_rows: bool,
    /// True if columns come in pairs `w, -w`.
    paired_columns: bool,
}

impl Shaping {
    const PLAIN: Shaping =
        Shaping { weight: 1.0, bias: 0.05, mean: 1.0, paired_rows: false, paired_columns: false };

    /// Returns the shape of the values of a role's tensor, so that tokens are spread over the experts, as trained
    /// routers spread them.
    ///
    /// Plain random weights send all tokens of ZAYA to the same experts, for two reasons. First, the residual stream
    /// starts with embeddings of deviation 0.02, and attention adds much larger means over all tokens. So the outputs of
    /// attention and experts and the biases of the stream are made as small as the embeddings or smaller. Second, the
    /// activations of the router's MLP have positive means. So hidden units come in pairs: with gelu(a) - gelu(-a) = a,
    /// logits depend on the token alone.
    fn of(shape: Shape, role: &str) -> Shaping {
        let plain = Shaping::PLAIN;
        match (shape, role) {
            (Shape::SmallBranches, "post_attention_norm" | "post_feedforward_norm") => {
                Shaping { bias: 0.005, mean: 0.06, ..plain }
            }
            (Shape::Plain | Shape::SmallBranches, _) => plain,
            (Shape::Networked, "o_proj") => Shaping { weight: 1.0 / 256.0, ..plain },
            (Shape::Networked, "down") => Shaping { weight: 1.0 / 32.0, ..plain },
            (Shape::Networked, "balancing_biases") => Shaping { bias: 0.005, ..plain },
            (Shape::Networked, "router_fc1" | "router_fc1_bias" | "router_fc2_bias") => {
                Shaping { paired_rows: true, ..plain }
            }
            (Shape::Networked, "router_fc2") => Shaping { paired_rows: true, paired_columns: true, ..plain },
            (Shape::Networked, "router_logits") => Shaping { paired_columns: true, ..plain },
            (Shape::Networked, role)
                if ["branch_bias", "stream_bias", "input_bias"].iter().any(|end| role.ends_with(end)) =>
            {
                Shaping { bias: 0.001, ..plain }
            }
            (Shape::Networked, _) => plain,
        }
    }

    /// Returns the element whose value element `i` takes, and the sign of that value. A vector has one column.
    fn paired(&self, i: u64, columns: u64) -> (u64, f32) {
        let (row, column) = (i / columns, i % columns);
        let (odd_row, odd_column) =
            (self.paired_rows && row % 2 == 1, self.paired_columns && column % 2 == 1);
        let at = (row - u64::from(odd_row)) * columns + column - u64::from(odd_column);
        (at, if odd_row == odd_column { 1.0 } else { -1.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::load;

    #[test]
    fn any_piece_has_the_same_values() {
        let c = load("synthetic:gemma4-26b-a4b?seed=3&layers=1").unwrap();
        let name = "model.language_model.layers.0.self_attn.q_proj.weight";
        let mut whole = vec![0f32; 10_000];
        c.source.read(name, 500..10_500, &mut whole).unwrap();
        let mut part = vec![0f32; 7];
        c.source.read(name, 4_321..4_328, &mut part).unwrap();
        assert_eq!(part, whole[3_821..3_828]);
        let other = load("synthetic:gemma4-26b-a4b?seed=4&layers=1").unwrap();
        other.source.read(name, 4_321..4_328, &mut part).unwrap();
        assert_ne!(part, whole[3_821..3_828]);
        // Deviation 1/sqrt(2816), and outliers of ten times that.
        let variance = whole.iter().map(|v| v * v).sum::<f32>() / 10_000.0 * 2816.0;
        assert!((0.9..1.4).contains(&variance), "{variance}");
        let outliers = whole.iter().filter(|v| v.abs() * 2816f32.sqrt() > 4.0).count();
        assert!((1..30).contains(&outliers), "{outliers}");
    }

    #[test]
    fn outliers_are_planted_in_experts_alone() {
        let at = |spec: &str| load(spec).unwrap();
        let (plain, planted) =
            (at("synthetic:gemma4-mini?layers=2"), at("synthetic:gemma4-mini?layers=2&outliers=500"));
        let read = |c: &Checkpoint, info: &TensorInfo| {
            let mut values = vec![0f32; info.elements() as usize];
            c.source.read(&info.name, 0..info.elements(), &mut values).unwrap();
            values
        };
        for info in plain.source.tensors() {
            let (a, b) = (read(&plain, info), read(&planted, info));
            let differ = a.iter().zip(&b).filter(|(a, b)| a != b).count();
            assert_eq!(differ, usize::from(info.name.contains("experts.")), "{}", info.name);
            // Any piece has the same values.
            let mut piece = vec![0f32; b.len() / 2];
            let start = (b.len() - piece.len()) as u64;
            planted.source.read(&info.name, start..b.len() as u64, &mut piece).unwrap();
            assert_eq!(piece, b[start as usize..]);
        }
    }

    #[test]
    fn hidden_units_of_zayas_router_come_in_pairs_that_cancel() {
        let c = load("synthetic:zaya1-8b?layers=2").unwrap();
        let read = |name: &str, range: Range<u64>| {
            let mut values = vec![0f32; (range.end - range.start) as usize];
            c.source.read(&format!("model.layers.1.mlp.gate.router_mlp.{name}"), range, &mut values).unwrap();
            values
        };
        let negated = |v: &[f32]| v.iter().map(|v| -v).collect::<Vec<_>>();
        let fc1 = read("fc1.weight", 0..512);
        assert_eq!(fc1[256..], negated(&fc1[..256]));
        let bias = read("fc1.bias", 0..256);
        assert!(bias.chunks(2).all(|pair| pair[0] == -pair[1]));
        let (fc2, out) = (read("fc2.weight", 512..1024), read("out_proj.weight", 256..512));
        assert!(fc2.chunks(2).chain(out.chunks(2)).all(|pair| pair[0] == -pair[1]));
        assert_eq!(fc2[256..], negated(&fc2[..256]));
        // Any piece has the same values.
        assert_eq!(read("fc2.weight", 700..703), fc2[188..191]);
    }

    #[test]
    fn wrong_queries_are_refused() {
        for spec in [
            "synthetic:gemma5",
            "synthetic:gemma4-26b-a4b?layers=0",
            "synthetic:gemma4-26b-a4b?speed=1",
            "synthetic:gemma4-26b-a4b?seed",
            "synthetic:gemma4-26b-a4b?outliers=10001",
        ] {
            let err = load(spec).err().unwrap().to_string();
            assert!(err.starts_with("synthetic:gemma"), "{err}");
        }
    }
}
