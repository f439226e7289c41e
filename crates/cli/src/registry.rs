//! Figures by name: their units, and how each is read from the `--json` documents of commands.
//!
//! ```text
//! document of plan, build, check, ... --readers--> figure --Bound--> a recipe's row
//! ```
//!
//! A figure has one unit. Sizes are of the weights as stored; MB is 10^6 bytes, MiB 2^20.

use anemoe_gates::golden_gate::MIN_COSINE;
use serde_json::Value;

/// One figure that commands bring.
pub struct Figure {
    /// Name in recipes.
    pub name: &'static str,
    /// Unit.
    pub unit: &'static str,
    /// Meaning, in one line.
    pub text: &'static str,
    /// Needs of the figure, without which its name is misleading.
    pub needs: FigureNeeds,
    /// Commands that bring the figure, the most telling first.
    readers: &'static [(&'static str, NumberReader)],
}

/// Needs of a figure besides a bundle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FigureNeeds {
    /// Nothing: it follows from shapes and options.
    #[default]
    Nothing,
    /// Trained weights.
    Weights,
    /// A Neural Engine.
    Mac,
}

/// A way from a document to a number.
#[derive(Clone, Copy)]
enum NumberReader {
    /// The number at a JSON pointer, times a factor.
    At(&'static str, f64),
    /// A function of the document.
    By(fn(&Value) -> Option<f64>),
}
use NumberReader::{At, By};

impl Figure {
    /// Reads the figure from the document of `command`; none if the document does not hold it.
    pub fn read(&self, command: &str, document: &Value) -> Option<f64> {
        let (_, reader) = self.readers.iter().find(|(c, _)| *c == command)?;
        let found = match reader {
            At(pointer, factor) => document.pointer(pointer)?.as_f64()? * factor,
            By(read) => read(document)?,
        };
        found.is_finite().then_some(found)
    }

    /// Returns the reason why another source or machine gives another figure; empty if the figure needs nothing.
    pub fn needs_because(&self, needs: FigureNeeds) -> &'static str {
        match (needs, self.unit) {
            (FigureNeeds::Nothing, _) => "",
            (FigureNeeds::Mac, "ops" | "packages") => {
                "Core ML chooses the device when a Mac loads the package, and nothing here can ask it"
            }
            (FigureNeeds::Mac, _) => {
                "it is a time of that Mac and its Neural Engine; no other processor's says anything about it"
            }
            (FigureNeeds::Weights, "cosine" | "nats" | "layer") => {
                "what compression costs depends on how the weights are distributed, and synthetic ones are drawn at random"
            }
            (FigureNeeds::Weights, "probes") => {
                "which experts a router chooses depends on its weights, and synthetic ones are drawn at random"
            }
            (FigureNeeds::Weights, _) => {
                "which tokens follow, and which drafts are right, depends on trained weights: synthetic ones repeat themselves or not by chance"
            }
        }
    }

    /// Lists the commands that bring the figure, the most telling first.
    pub fn commands(&self) -> impl Iterator<Item = &'static str> {
        self.readers.iter().map(|(command, _)| *command)
    }
}

/// Finds the figure of this name.
///
/// # Errors
/// There is no such figure; the message lists all.
pub fn find(name: &str) -> Result<&'static Figure, String> {
    FIGURES.iter().find(|f| f.name == name).ok_or_else(|| {
        let known: Vec<&str> = FIGURES.iter().map(|f| f.name).collect();
        format!("no figure is named `{name}`; there are: {}", known.join(", "))
    })
}

/// Returns all figures.
pub fn all() -> &'static [Figure] {
    FIGURES
}

const MB: f64 = 1e6;
const MIB: f64 = 1048576.0;
const GB: f64 = 1e9;

/// Lists the shards of a plan, or the packages of a check or of a build's gates.
fn packages(document: &Value) -> &[Value] {
    let places = ["/shards", "/packages", "/full_stack/residency/packages"];
    let found = places.iter().find_map(|p| document.pointer(p)?.as_array());
    found.map_or(&[], Vec::as_slice)
}

/// Returns the bytes of a package's weights.
fn weight_bytes(package: &Value) -> Option<f64> {
    package["bytes"].as_f64().or_else(|| package["weight_bytes"].as_f64())
}

/// Kinds of shards that hold experts.
const WITH_EXPERTS: [&str; 3] = ["experts", "experts_combine", "moe"];

fn is_pack(package: &Value) -> bool {
    package["kind"].as_str().is_some_and(|kind| WITH_EXPERTS.contains(&kind))
}

/// Lists the packages that hold experts, in order.
fn packs(document: &Value) -> impl Iterator<Item = &Value> {
    packages(document).iter().filter(|p| is_pack(p))
}

fn first_pack(document: &Value) -> Option<&Value> {
    packs(document).next()
}

fn pack_bytes(document: &Value) -> Option<f64> {
    weight_bytes(first_pack(document)?)
}

fn largest_pack(document: &Value) -> Option<f64> {
    packs(document).filter_map(weight_bytes).reduce(f64::max)
}

/// Adds the bytes of packages; none without a package.
fn sum<'a>(packages: impl Iterator<Item = &'a Value>) -> Option<f64> {
    packages.filter_map(weight_bytes).reduce(|a, b| a + b)
}

/// Lists a figure of the golden gate for each golden: of `validate`, whose document is that of the first golden, or of
/// `build`.
fn of_goldens<'a>(document: &'a Value, key: &'a str) -> impl Iterator<Item = f64> + 'a {
    let (all, stack) = (&document["goldens"], &document["full_stack"]);
    let lists = [all, &stack["also"]].into_iter().filter_map(Value::as_array).flatten();
    [document, &stack["golden"]].into_iter().chain(lists).filter_map(move |gate| gate[key].as_f64())
}

/// Returns the share of drafted tokens that were right, in %; none if none was drafted.
fn acceptance(document: &Value) -> Option<f64> {
    let speculation = &document["speculation"];
    speculation["drafted"].as_f64().filter(|n| *n > 0.0)?;
    Some(speculation["acceptance"].as_f64()? * 100.0)
}

/// Returns MiB as `du` prints them: rounded up.
fn du(bytes: f64) -> f64 {
    (bytes / MIB).ceil()
}

fn count(packages: usize) -> Option<f64> {
    (packages > 0).then_some(packages as f64)
}

fn kinds(document: &Value, kind: &str) -> Option<f64> {
    count(packages(document).iter().filter(|p| p["kind"] == kind).count())
}

/// Counts the ops of the first pack's first function on some devices.
fn pack_ops(document: &Value, devices: &[&str]) -> Option<f64> {
    let pack = first_pack(document)?;
    let ops = pack.pointer("/functions/0/ops").or_else(|| pack.get("ops"))?;
    devices.iter().map(|d| ops[*d].as_f64()).sum()
}

const DEVICES: [&str; 4] = ["ane", "gpu", "cpu", "unknown"];

/// Counts the ops of the first pack's first function whose type begins with `beginning`.
fn pack_types(document: &Value, beginning: &str) -> Option<f64> {
    let types = first_pack(document)?.get("op_types")?.as_object()?;
    Some(types.iter().filter(|(t, _)| t.starts_with(beginning)).filter_map(|(_, n)| n.as_f64()).sum())
}

fn pack_conv(document: &Value) -> Option<f64> {
    Some(first_pack(document)?.pointer("/op_types/conv").and_then(Value::as_f64).unwrap_or(0.0))
}

/// Counts the packages that are predicted on the Neural Engine.
fn predicted(document: &Value) -> Option<f64> {
    let all = packages(document);
    count(all.len()).map(|_| all.iter().filter(|p| p["verdict"] == "ane").count() as f64)
}

/// Lists the probed shards of a build's gate or of `validate --probes`.
fn probes(document: &Value) -> &[Value] {
    let places = ["/representative/probes/shards", "/probes/shards"];
    places.iter().find_map(|p| document.pointer(p)?.as_array()).map_or(&[], Vec::as_slice)
}

fn probed_packs<'a>(document: &'a Value, figure: &'a str) -> impl Iterator<Item = f64> + 'a {
    let packs = probes(document).iter().filter(|p| is_pack(p));
    packs.filter(|p| p["counted"].as_u64() > Some(0)).filter_map(move |p| p.pointer(figure)?.as_f64())
}

/// Lists the random probes of the first probed package of experts.
fn random_of_pack(document: &Value) -> Option<impl Iterator<Item = &Value>> {
    let probes = probes(document).iter().find(|p| is_pack(p))?["probes"].as_array()?;
    Some(probes.iter().filter(|p| p["probe"].as_str().is_some_and(|name| name.starts_with("random"))))
}

/// Lists the cosines of one kind (`branch`, `with_residual`) of the random probes of the first package of experts.
fn probed(document: &Value, kind: &str) -> Vec<f64> {
    let all = random_of_pack(document).into_iter().flatten();
    all.filter_map(|p| p[kind].as_array()).flatten().filter_map(Value::as_f64).collect()
}

fn lowest_of(values: &[f64]) -> Option<f64> {
    values.iter().copied().reduce(f64::min)
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

fn random_probes(document: &Value) -> Option<f64> {
    count(random_of_pack(document)?.count())
}

/// Counts random probes without a cosine at any position: the FP16 form gives zeros.
fn probes_zero(document: &Value) -> Option<f64> {
    random_probes(document)?;
    let is_zero = |p: &&Value| p["positions"].as_array().is_some_and(|c| c.iter().all(Value::is_null));
    Some(random_of_pack(document)?.filter(is_zero).count() as f64)
}

/// Counts greedy tokens from the first on that equal the golden's.
fn tokens_equal(document: &Value) -> Option<f64> {
    let ids = |key: &str| document[key].as_array();
    let equal = ids("generated_ids")?.iter().zip(ids("expected_ids")?).take_while(|(a, b)| a == b);
    Some(equal.count() as f64)
}

fn length(document: &Value, pointer: &str) -> Option<f64> {
    Some(document.pointer(pointer)?.as_array()?.len() as f64)
}

fn lowest(document: &Value, list: &str, figure: &str) -> Option<f64> {
    let all = document.pointer(list)?.as_array()?;
    all.iter().filter_map(|x| x.pointer(figure)?.as_f64()).reduce(f64::min)
}

/// Lists the boundaries of a trace after layers, in order, without the embedding.
fn boundaries_after_layers(document: &Value) -> Option<Vec<&Value>> {
    let all = document["layers"].as_array()?;
    Some(all.iter().filter(|l| l["boundary"].as_u64() > Some(0)).collect())
}

/// Returns the mean cosine of the hidden state after one of n layers; `choose` maps n to a number from 1 to n.
fn mean_behind(document: &Value, choose: impl Fn(usize) -> usize) -> Option<f64> {
    let all = boundaries_after_layers(document)?;
    all.get(choose(all.len()).checked_sub(1)?)?.pointer("/fidelity/mean_cosine")?.as_f64()
}

/// Returns the first layer after which the hidden state is too far from the golden's.
fn failed_layer(document: &Value) -> Option<f64> {
    let too_low = |l: &&Value| {
        l.pointer("/fidelity/min_cosine").and_then(Value::as_f64).is_some_and(|c| c < MIN_COSINE)
    };
    Some(boundaries_after_layers(document)?.into_iter().find(too_low)?["boundary"].as_f64()? - 1.0)
}

fn outlier_ratio(document: &Value) -> Option<f64> {
    document["outliers"].as_array()?.iter().filter_map(|o| o["ratio"].as_f64()).reduce(f64::max)
}

/// Returns the time of a pass over four tokens, over the time of a pass over one.
fn verify_ratio(document: &Value) -> Option<f64> {
    document["verify"].as_array()?.iter().find(|v| v["tokens"] == 4)?["over_one"].as_f64()
}

macro_rules! figure {
    ($name:literal, $unit:literal, $needs:ident, $text:literal, $($command:literal => $reader:expr),+) => {
        Figure { name: $name, unit: $unit, text: $text, needs: FigureNeeds::$needs, readers: &[$(($command, $reader)),+] }
    };
}

const FIGURES: &[Figure] = &[
    // Sizes and counts.
    figure!("shards", "packages", Nothing, "packages of the model", "plan" => At("/totals/shards", 1.0), "build" => At("/shards", 1.0)),
    figure!("layer_shards", "packages", Nothing, "packages of layers, without the head", "plan" => At("/totals/layer_shards", 1.0)),
    figure!("attn_shards", "packages", Nothing, "attention packages", "plan" => By(|d| kinds(d, "attention")), "check" => By(|d| kinds(d, "attention"))),
    figure!("moe_shards", "packages", Nothing, "packages that hold experts", "plan" => By(|d| count(packs(d).count())), "check" => By(|d| count(packs(d).count()))),
    figure!("head_shards", "packages", Nothing, "slices of the head", "plan" => By(|d| kinds(d, "head")), "check" => By(|d| kinds(d, "head"))),
    figure!("pack_mb", "MB", Nothing, "weights of the first package of experts", "check" => By(|d| pack_bytes(d).map(|b| b / MB)), "build" => By(|d| pack_bytes(d).map(|b| b / MB)), "plan" => By(|d| pack_bytes(d).map(|b| b / MB))),
    figure!("pack_mib", "MiB", Nothing, "the same", "check" => By(|d| pack_bytes(d).map(|b| b / MIB)), "build" => By(|d| pack_bytes(d).map(|b| b / MIB)), "plan" => By(|d| pack_bytes(d).map(|b| b / MIB))),
    figure!("shard_mb", "MB", Nothing, "weights of the largest package of experts", "check" => By(|d| largest_pack(d).map(|b| b / MB)), "build" => By(|d| largest_pack(d).map(|b| b / MB)), "plan" => By(|d| largest_pack(d).map(|b| b / MB))),
    figure!("shard_mib", "MiB", Nothing, "the same", "check" => By(|d| largest_pack(d).map(|b| b / MIB)), "build" => By(|d| largest_pack(d).map(|b| b / MIB)), "plan" => By(|d| largest_pack(d).map(|b| b / MIB))),
    figure!("pack_du_mib", "MiB", Nothing, "weights of the first package of experts, rounded up as du prints sizes", "check" => By(|d| pack_bytes(d).map(du)), "plan" => By(|d| pack_bytes(d).map(du))),
    figure!("shard_du_mib", "MiB", Nothing, "the same of the largest package of experts", "check" => By(|d| largest_pack(d).map(du)), "plan" => By(|d| largest_pack(d).map(du))),
    figure!("pack_matrix_weights", "weights", Nothing, "largest matrix of the first package of experts, which has its own tables or scales", "plan" => By(|d| first_pack(d)?.get("largest_matrix")?.as_f64())),
    figure!("experts_gb", "GB", Nothing, "weights of all packages of experts", "plan" => By(|d| sum(packs(d)).map(|b| b / GB)), "check" => By(|d| sum(packs(d)).map(|b| b / GB))),
    figure!("weights_gb", "GB", Nothing, "weights of all packages", "plan" => By(|d| sum(packages(d).iter()).map(|b| b / GB)), "check" => By(|d| sum(packages(d).iter()).map(|b| b / GB))),
    figure!("bundle_mb", "MB", Nothing, "packages as files", "build" => At("/package_bytes", 1e-6)),
    figure!("params", "weights", Nothing, "parameters of the model", "plan" => At("/totals/params", 1.0)),
    figure!("active_params", "weights", Nothing, "parameters that a token meets", "plan" => At("/totals/active_params_per_token", 1.0)),
    figure!("token_gb", "GB", Nothing, "weights that a token has to read", "plan" => At("/totals/bytes_per_token", 1e-9), "bench" => At("/decode/0/gb_per_token", 1.0)),
    figure!("outlier_tensors", "tensors", Nothing, "tensors whose largest weight spoils their one scale", "plan" => By(|d| length(d, "/outliers"))),
    figure!("outlier_ratio", "times", Nothing, "largest weight over the mean magnitude, of the worst tensor with one scale", "plan" => By(outlier_ratio)),
    // Ops and placement.
    figure!("pack_conv_ops", "ops", Nothing, "convolutions of the first package of experts, for one token", "plan" => By(pack_conv)),
    figure!("pack_compute_ops", "ops", Nothing, "its ops that run somewhere", "plan" => By(|d| pack_ops(d, &DEVICES)), "check" => By(|d| pack_ops(d, &DEVICES))),
    figure!("pack_const_ops", "ops", Nothing, "its const ops", "plan" => By(|d| pack_types(d, "const").zip(pack_types(d, "constexpr_")).map(|(a, b)| a - b))),
    figure!("pack_constexpr_ops", "ops", Nothing, "its constexpr ops, one for each compressed matrix", "plan" => By(|d| pack_types(d, "constexpr_"))),
    figure!("pack_no_device_ops", "ops", Nothing, "its const and constexpr ops, which have no device", "plan" => By(|d| pack_ops(d, &["no_device"])), "check" => By(|d| pack_ops(d, &["no_device"]))),
    figure!("pack_ane_ops", "ops", Mac, "its ops on the Neural Engine; here predicted", "check" => By(|d| pack_ops(d, &["ane"])), "plan" => By(|d| pack_ops(d, &["ane"]))),
    figure!("pack_gpu_ops", "ops", Mac, "its ops on the GPU; here predicted", "check" => By(|d| pack_ops(d, &["gpu"])), "plan" => By(|d| pack_ops(d, &["gpu"]))),
    figure!("pack_cpu_ops", "ops", Mac, "its ops on the CPU; here predicted", "check" => By(|d| pack_ops(d, &["cpu"])), "plan" => By(|d| pack_ops(d, &["cpu"]))),
    figure!("ane_shards", "packages", Mac, "packages on the Neural Engine; here predicted", "plan" => By(predicted), "check" => By(predicted), "build" => By(predicted)),
    // Quality.
    figure!("min_weight_cosine", "cosine", Nothing, "lowest cosine of a compressed matrix", "build" => At("/min_weight_cosine", 1.0)),
    figure!("probe_cosine_min", "cosine", Weights, "random probes of the first probed package of experts against FP16: lowest", "validate" => By(|d| lowest_of(&probed(d, "branch"))), "build" => By(|d| lowest_of(&probed(d, "branch")))),
    figure!("probe_cosine_mean", "cosine", Weights, "the same: mean", "validate" => By(|d| mean(&probed(d, "branch"))), "build" => By(|d| mean(&probed(d, "branch")))),
    figure!("probe_stream_cosine_min", "cosine", Weights, "the same with the residual stream added: lowest", "validate" => By(|d| lowest_of(&probed(d, "with_residual"))), "build" => By(|d| lowest_of(&probed(d, "with_residual")))),
    figure!("probe_stream_cosine_mean", "cosine", Weights, "the same with the residual stream added: mean", "validate" => By(|d| mean(&probed(d, "with_residual"))), "build" => By(|d| mean(&probed(d, "with_residual")))),
    figure!("probes", "probes", Nothing, "random probes of that package", "validate" => By(random_probes), "build" => By(random_probes)),
    figure!("probes_zero", "probes", Weights, "those that choose no expert of that package", "validate" => By(probes_zero), "build" => By(probes_zero)),
    figure!("layer_cosine_min", "cosine", Weights, "packages of experts against FP16, residual stream added: lowest mean of a package", "validate" => By(|d| probed_packs(d, "/with_residual/mean_cosine").reduce(f64::min))),
    figure!("layer_cosine_max", "cosine", Weights, "the same: highest mean of a package", "validate" => By(|d| probed_packs(d, "/with_residual/mean_cosine").reduce(f64::max))),
    figure!("branch_cosine_min", "cosine", Weights, "packages of experts against FP16: lowest mean of a package", "validate" => By(|d| probed_packs(d, "/branch/mean_cosine").reduce(f64::min))),
    figure!("stack_cosine_min", "cosine", Weights, "hidden state behind the layers against the golden: lowest", "trace" => By(|d| lowest(d, "/layers", "/fidelity/min_cosine"))),
    figure!("stack_cosine_first", "cosine", Weights, "hidden state behind the first layer: mean", "trace" => By(|d| mean_behind(d, |n| n.min(1)))),
    figure!("stack_cosine_middle", "cosine", Weights, "hidden state behind the middle layer: mean", "trace" => By(|d| mean_behind(d, |n| n.div_ceil(2)))),
    figure!("stack_failed_layer", "layer", Weights, "first layer, counted from 0, behind which the lowest cosine of the hidden state is below 0.97", "trace" => By(failed_layer)),
    figure!("stack_cosine_last", "cosine", Weights, "hidden state behind the last layer: mean", "trace" => By(|d| mean_behind(d, |n| n))),
    figure!("logit_cosine_min", "cosine", Weights, "logits against the goldens: lowest of all positions and steps", "validate" => By(|d| of_goldens(d, "min_cosine").reduce(f64::min)), "build" => By(|d| of_goldens(d, "min_cosine").reduce(f64::min))),
    figure!("prompt_cosine_min", "cosine", Weights, "logits at the positions of the prompt: lowest", "validate" => By(|d| lowest(d, "/positions", "/cosine"))),
    figure!("first_decode_cosine", "cosine", Weights, "logits of the first decoded token", "validate" => At("/decode/0/cosine", 1.0)),
    figure!("mean_kl", "nats", Weights, "divergence of the next token's distribution from the golden's; of several goldens the largest", "validate" => By(|d| of_goldens(d, "mean_kl").reduce(f64::max)), "build" => By(|d| of_goldens(d, "mean_kl").reduce(f64::max))),
    figure!("tokens_equal", "tokens", Weights, "greedy tokens that equal the golden's", "validate" => By(tokens_equal)),
    figure!("tokens_expected", "tokens", Nothing, "greedy tokens of the golden", "validate" => By(|d| length(d, "/expected_ids"))),
    // Generation and speed.
    figure!("prompt_tokens", "tokens", Nothing, "tokens of the prompt", "generate" => By(|d| length(d, "/prompt_ids"))),
    figure!("new_tokens", "tokens", Nothing, "tokens behind the prompt", "generate" => By(|d| length(d, "/generated_ids"))),
    figure!("verifier_calls", "calls", Weights, "passes over drafts", "generate" => At("/speculation/verifier_calls", 1.0)),
    figure!("drafted", "tokens", Weights, "drafted tokens", "generate" => At("/speculation/drafted", 1.0)),
    figure!("accepted", "tokens", Weights, "drafted tokens that were right", "generate" => At("/speculation/accepted", 1.0)),
    figure!("fallbacks", "calls", Weights, "passes without a draft", "generate" => At("/speculation/fallbacks", 1.0)),
    figure!("acceptance", "%", Weights, "drafted tokens that were right, of all", "generate" => By(acceptance)),
    figure!("ngram_tok_s", "tok/s", Mac, "decoding with drafts", "generate" => At("/timing/decode_tok_s", 1.0)),
    figure!("decode_tok_s", "tok/s", Mac, "decoding, one token a pass", "bench" => At("/decode/0/tok_s", 1.0)),
    figure!("token_ms", "ms", Mac, "a pass over one token", "bench" => At("/decode/0/ms_per_token", 1.0)),
    figure!("verify_ratio", "times", Mac, "a pass over four tokens over one over one token", "bench" => By(verify_ratio)),
    figure!("verify_ms", "ms", Mac, "a pass over four tokens", "bench" => By(|d| d["verify"].as_array()?.iter().find(|v| v["tokens"] == 4)?["ms"].as_f64())),
    figure!("first_token_s", "s", Mac, "from the start to the first token", "bench" => At("/first_token_s", 1.0)),
    figure!("build_s", "s", Nothing, "time of the build", "build" => At("/seconds", 1.0)),
    figure!("shard_s", "s", Mac, "time of the build by its packages, without Core ML's compiler", "build" => By(|d| Some(d["seconds"].as_f64()? / d["shards"].as_f64()?))),
];

/// Relation of a figure to a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Relation {
    Equal,
    About,
    Less,
    AtMost,
    More,
    AtLeast,
}

/// Signs of relations; a sign that begins with another sign comes first.
const SIGNS: [(&str, Relation); 7] = [
    ("<=", Relation::AtMost),
    (">=", Relation::AtLeast),
    ("==", Relation::Equal),
    ("<", Relation::Less),
    (">", Relation::More),
    ("=", Relation::Equal),
    ("about ", Relation::About),
];

/// Largest relative deviation from an `about` bound.
const ABOUT: f64 = 0.1;

/// A number that a figure is compared with: `101.2`, `>=0.97`, `<110`, `about 35`.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    text: String,
    relation: Relation,
    pub value: f64,
    /// Half a unit of the last written digit.
    half: f64,
}

impl Bound {
    /// Parses a bound. A number alone means equality, to the digits that are written.
    ///
    /// # Errors
    /// The text holds no number.
    pub fn parse(text: &str) -> Result<Bound, String> {
        let text = text.trim();
        let (relation, number) = SIGNS
            .iter()
            .find_map(|(sign, relation)| Some((*relation, text.strip_prefix(sign)?)))
            .unwrap_or((Relation::Equal, text));
        let number = number.trim();
        let wrong = || format!("`{text}` is not a number, nor <, <=, >, >=, = or `about` with one");
        let plain = number.bytes().all(|b| b.is_ascii_digit() || b".-+eE".contains(&b));
        let value: f64 = number.parse().ok().filter(|v: &f64| plain && v.is_finite()).ok_or_else(wrong)?;
        let digits =
            number.split(['e', 'E']).next().and_then(|m| m.split_once('.')).map_or(0, |(_, d)| d.len());
        let half =
            if value == value.trunc() && digits == 0 { 0.0 } else { 0.5 * 10f64.powi(-(digits as i32)) };
        Ok(Bound { text: text.into(), relation, value, half })
    }

    /// Tells whether a figure keeps the bound.
    pub fn holds(&self, found: f64) -> bool {
        match self.relation {
            // A whole number of a unit that is not counted is rounded, too: see `rounded`.
            Relation::Equal => (found - self.value).abs() <= self.half * (1.0 + 1e-9),
            Relation::About => (found - self.value).abs() <= ABOUT * self.value.abs(),
            Relation::Less => found < self.value,
            Relation::AtMost => found <= self.value,
            Relation::More => found > self.value,
            Relation::AtLeast => found >= self.value,
        }
    }

    /// Returns the bound for a quantity that is measured, not counted: `202` holds for 201.99.
    pub fn rounded(mut self) -> Bound {
        if self.half == 0.0 {
            self.half = 0.5;
        }
        self
    }

    /// Returns the text as it was written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the number for an equality, else the text as it was written.
    pub fn to_json(&self) -> Value {
        match self.relation {
            Relation::Equal => self.value.into(),
            _ => self.text.clone().into(),
        }
    }
}

/// Units of figures that are counted, and therefore exact.
const COUNTED: [&str; 8] = ["layer", "packages", "ops", "tokens", "calls", "probes", "tensors", "weights"];

impl Figure {
    /// Parses a bound of this figure.
    ///
    /// # Errors
    /// The text holds no number.
    pub fn bound(&self, text: &str) -> Result<Bound, String> {
        let bound = Bound::parse(text)?;
        Ok(if COUNTED.contains(&self.unit) { bound } else { bound.rounded() })
    }

    /// Formats a value for people.
    pub fn show(&self, value: f64) -> String {
        match self.unit {
            unit if COUNTED.contains(&unit) && value.abs() < 1e15 => {
                let sign = if value < 0.0 { "-" } else { "" };
                format!("{sign}{}", crate::ui::count(value.abs().round() as u64))
            }
            "cosine" | "nats" => format!("{value:.5}"),
            _ if value.abs() >= 1000.0 => format!("{value:.0}"),
            _ if value.abs() >= 1.0 => format!("{value:.2}"),
            _ => format!("{value:.4}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::BTreeSet;

    #[test]
    fn every_figure_has_a_name_of_its_own() {
        let names: BTreeSet<&str> = FIGURES.iter().map(|f| f.name).collect();
        assert_eq!(names.len(), FIGURES.len());
        let said = find("shard_gb").err().unwrap();
        assert!(said.contains("`shard_gb`") && said.contains("shard_mb, "), "{said}");
    }

    #[test]
    fn the_worst_golden_counts_and_nothing_drafted_is_no_acceptance() {
        let read = |name: &str, command: &str, document: Value| find(name).unwrap().read(command, &document);
        let several = json!({"min_cosine": 0.98, "goldens": [{"min_cosine": 0.98}, {"min_cosine": 0.88}]});
        assert_eq!(read("logit_cosine_min", "validate", several), Some(0.88));
        let built = json!({"full_stack": {"golden": {"mean_kl": 0.1}, "also": [{"mean_kl": 0.3}]}});
        assert_eq!(read("mean_kl", "build", built), Some(0.3));
        let drafts = |drafted: u64| json!({"speculation": {"drafted": drafted, "acceptance": 0.5}});
        assert_eq!(read("acceptance", "generate", drafts(0)), None);
        assert_eq!(read("acceptance", "generate", drafts(4)), Some(50.0));
    }

    #[test]
    fn bounds_hold_to_their_digits() {
        let size = find("shard_mb").unwrap();
        for (text, found, holds) in [
            ("101.2", 101.249, true),
            ("101.2", 101.26, false),
            ("202", 201.99, true),
            ("202", 202.6, false),
            ("<110", 110.0, false),
            ("<=110", 110.0, true),
            (">8.59", 8.6, true),
            ("about 35", 38.0, true),
            ("about 35", 39.0, false),
            (">= .97", 0.97, true),
            ("-1.5", -1.5, true),
        ] {
            assert_eq!(size.bound(text).unwrap().holds(found), holds, "{text} {found}");
        }
        let counted = find("pack_conv_ops").unwrap();
        assert!(counted.bound("36").unwrap().holds(36.0) && !counted.bound("36").unwrap().holds(36.4));
        for wrong in ["", "<", "nan", "inf", "<inf", "1e999", "twelve", "1..2", "about", "<<1"] {
            assert!(Bound::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_trace_gives_its_cascade() {
        let layer = |boundary: usize, min: f64, mean: f64| json!({"boundary": boundary, "fidelity": {"min_cosine": min, "mean_cosine": mean}});
        let trace = json!({"layers": [
            layer(0, 1.0, 1.0), layer(1, 0.99, 0.998), layer(2, 0.98, 0.99), layer(3, 0.96, 0.98), layer(4, 0.9, 0.95),
        ]});
        let read = |name: &str, document: &Value| find(name).unwrap().read("trace", document);
        let cascade = [
            "stack_cosine_first",
            "stack_cosine_middle",
            "stack_cosine_last",
            "stack_cosine_min",
            "stack_failed_layer",
        ];
        let found: Vec<f64> = cascade.iter().map(|name| read(name, &trace).unwrap()).collect();
        assert_eq!(found, [0.998, 0.99, 0.95, 0.9, 2.0]);
        let one = json!({"layers": [layer(0, 1.0, 1.0), layer(1, 0.99, 0.998)]});
        assert_eq!(read("stack_cosine_middle", &one), Some(0.998));
        assert_eq!(read("stack_failed_layer", &one), None);
        assert_eq!(read("stack_cosine_last", &json!({"layers": [layer(0, 1.0, 1.0)]})), None);
    }

    #[test]
    fn documents_give_figures() {
        let plan = json!({
            "totals": {"shards": 3},
            "shards": [
                {"kind": "attention", "bytes": 5},
                {"kind": "moe", "bytes": 2_000_000, "op_types": {"conv": 36, "const": 44, "constexpr_lut_to_dense": 4},
                 "ops": {"ane": 34, "gpu": 0, "cpu": 0, "unknown": 2, "no_device": 48}, "verdict": "ane"},
            ],
        });
        let read = |name: &str| find(name).unwrap().read("plan", &plan);
        assert_eq!(read("shards"), Some(3.0));
        assert_eq!(read("shard_mb"), Some(2.0));
        assert_eq!((read("pack_const_ops"), read("pack_constexpr_ops")), (Some(44.0), Some(4.0)));
        assert_eq!((read("pack_compute_ops"), read("pack_no_device_ops")), (Some(36.0), Some(48.0)));
        assert_eq!((read("head_shards"), read("decode_tok_s")), (None, None));
        // Documents of another form give nothing.
        for document in [json!(null), json!([]), json!({"shards": 7}), json!({"shards": [{"kind": "moe"}]})] {
            assert_eq!(find("shard_mb").unwrap().read("plan", &document), None, "{document}");
        }
    }
}
