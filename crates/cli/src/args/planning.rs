//! Options that decide a plan, and `--quant auto`.

use super::form_args::FormArgs;
use super::hub_checkpoint::Extent;
use super::numbers::{choice, count};
use super::reading::Reading;
use super::text_windows::read_text;
use crate::ui::{self, Ui, advance};
use anemoe_bundle::ShardKind;
use anemoe_bundle::TokenCount;
use anemoe_convert::form::{ExpertForm, ShardForm};
use anemoe_convert::importance::Importance;
use anemoe_convert::kind_search::Objective;
use anemoe_convert::lattice::Lattice;
use anemoe_convert::models::{self, Family, Preset};
use anemoe_convert::outliers::{self, Outlier};
use anemoe_convert::plan::{MatrixPlan, PartKinds, Plan, PlanOptions, ScaleScope};
use anemoe_convert::quant::{Groups, Quant};
use anemoe_gates::auto::{Goal, KindSearch, SearchBound, choose};
use anemoe_gates::checkpoint_text::{LEAST_JUDGED, MAX_WHOLE, search_windows};
use anemoe_gates::golden_gate::COSINE_BOUND;
use anemoe_gates::search_record::SearchRecord;
use anemoe_gates::text_feedback::{self, Candidates};
use anemoe_io::{Error, Kind};
use anyhow::bail;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Default bound of the mean divergence if `--quant` is not given, in nats.
const DEFAULT_MAX_KL: f64 = 0.0025;

/// Returns the help of `--quant`.
fn quant_help() -> String {
    format!(
        "Compression: {}; or auto: a kind per tensor, chosen from measured errors [default: auto for speed, with a divergence \
         that passes on texts it was not chosen on; a preset of the family above 64 million parameters]",
        Quant::NAMES_EXPECTED
    )
}

/// Options that decide a plan, shared with `build`.
#[derive(clap::Args, Clone)]
pub struct PlanArgs {
    #[arg(long, value_name = "KIND", help = quant_help())]
    pub quant: Option<QuantChoice>,
    /// For --quant auto: the fewest bytes with at least this cosine of logits. For the gates of a build: the least cosine
    /// that passes [default: 0.97].
    #[arg(long, value_name = "COSINE", conflicts_with_all = ["max_bytes", "max_kl"])]
    pub min_cosine: Option<f64>,
    /// For --quant auto: the fewest bytes with at most this mean divergence of the next token, in nats.
    #[arg(long, value_name = "NATS", conflicts_with = "max_bytes")]
    pub max_kl: Option<f64>,
    /// For --quant auto: the least loss with at most this many bytes of matrices (6000000, 6MB, 1.5GiB).
    #[arg(long, value_name = "BYTES", value_parser = byte_count)]
    pub max_bytes: Option<u64>,
    /// For --quant auto: the fewest bytes with at most the mean divergence that this format of GGUF would have.
    #[arg(long, value_parser = ["q4_0"], conflicts_with_all = ["max_bytes", "max_kl", "min_cosine"])]
    pub like: Option<String>,
    /// For --quant auto: bytes that count, of the bundle, or those that a token reads (experts by how often they are
    /// chosen) [default: size; speed where --quant is not given].
    #[arg(long, value_parser = choice([("size", Objective::Size), ("speed", Objective::Speed)]))]
    pub objective: Option<Objective>,
    /// For --quant auto: text to run the model on, instead of a built-in one.
    #[arg(long, value_name = "FILE")]
    pub auto_text: Option<PathBuf>,
    /// Second moments of the projections' inputs, from `calibrate`: errors are weighed with them.
    #[arg(long, value_name = "F.npz")]
    pub importance: Option<PathBuf>,
    /// Compression of the attention projections, where it differs.
    #[arg(long, value_name = "KIND")]
    pub attn_quant: Option<Quant>,
    /// Compression of the experts, where it differs.
    #[arg(long, value_name = "KIND")]
    pub expert_quant: Option<Quant>,
    /// Compression of the MLP that every token meets, where it differs.
    #[arg(long, value_name = "KIND")]
    pub mlp_quant: Option<Quant>,
    /// Compression of the router [default: fp16 where it is one matrix (Gemma), as the model where it is a network (ZAYA)].
    #[arg(long, value_name = "KIND")]
    pub router_quant: Option<Quant>,
    /// Compression of the output head, where it differs.
    #[arg(long, value_name = "KIND")]
    pub head_quant: Option<Quant>,
    /// Compression of the host's embedding [default: fp16, whatever --quant says].
    #[arg(long, value_name = "KIND")]
    pub embed_quant: Option<Quant>,
    /// Output channels that share a table.
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub group_size: usize,
    /// Input channels that share a scale in kinds with -block.
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub block_size: usize,
    /// Experts that one call computes; fewer than 16 become functions of one package [default: 16].
    #[arg(long, value_name = "N", conflicts_with = "ffn_shards")]
    pub experts_per_shard: Option<usize>,
    /// Packages that the experts of a layer are spread over.
    #[arg(long, value_name = "N")]
    pub ffn_shards: Option<usize>,
    #[command(flatten)]
    pub form: FormArgs,
    /// Token counts for which each package has a function.
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', default_value = "1,64", value_parser = count)]
    pub tokens: Vec<usize>,
    /// One function for a range of token counts instead, for instance 1..4.
    #[arg(long, value_name = "MIN..MAX", conflicts_with = "tokens", value_parser = token_range)]
    pub token_range: Option<TokenCount>,
    /// Positions that the caches hold [default: 2048, or the model's limit where that is less].
    #[arg(long, value_name = "N")]
    pub max_context: Option<usize>,
    /// Most weights in a package, in MB.
    #[arg(long, value_name = "MB", default_value_t = 1900)]
    pub max_shard_mb: u64,
    /// Experts that share a scale in kinds with one for a tensor (int8-tensor): each `matrix` has its own, or all of a package
    /// share one per `bank`, as ports by hand have it. A bank is ruined by one outlier.
    #[arg(long, value_parser = choice([("matrix", ScaleScope::Matrix), ("bank", ScaleScope::Bank)]), default_value = "matrix")]
    pub scale_scope: ScaleScope,
    /// Do not look for outliers. It takes reading every weight whose kind has one step for a whole tensor (int8-tensor).
    #[arg(long)]
    pub skip_outliers: bool,
    /// Text that weights are compressed for.
    #[arg(skip)]
    pub calibration: Option<Calibration>,
    /// Folder in which a search for kinds keeps what it measures.
    #[arg(skip)]
    pub search_in: Option<PathBuf>,
    #[command(flatten)]
    pub reading: Reading,
}

fn token_range(text: &str) -> Result<TokenCount, String> {
    let parsed = text.split_once("..").and_then(|(a, b)| {
        Some(TokenCount { min: a.parse().ok()?, max: b.trim_start_matches('=').parse().ok()? })
    });
    parsed
        .filter(|t| t.min >= 1 && t.min < t.max)
        .ok_or_else(|| format!("`{text}` is not a range such as 1..4"))
}

impl PlanArgs {
    /// Returns how kinds are chosen for a model: one kind, a preset, or a search.
    fn kind_choice(&self, family: &Family) -> KindChoice {
        // An assistant is not run by itself.
        let is_whole = family.decoder.parameters() <= MAX_WHOLE && family.decoder.assistant.is_none();
        let wants_search = self.max_bytes.is_some()
            || self.max_kl.is_some()
            || self.like.is_some()
            || self.auto_text.is_some()
            || self.objective.is_some();
        let (objective, bound) = match self.quant {
            Some(QuantChoice::Kind(kind)) => return KindChoice::One(kind),
            Some(QuantChoice::Auto) => (Objective::Size, SearchBound::MinCosine(COSINE_BOUND)),
            None if is_whole || wants_search => (Objective::Speed, SearchBound::MaxKl(DEFAULT_MAX_KL)),
            None => return KindChoice::Preset(family.preset()),
        };
        let bound = match (self.max_bytes, self.max_kl, self.min_cosine) {
            (Some(n), ..) => SearchBound::MaxBytes(n),
            (_, Some(nats), _) => SearchBound::MaxKl(nats),
            (_, _, Some(c)) => SearchBound::MinCosine(c),
            _ if self.like.is_some() => SearchBound::LikeQ4,
            _ => bound,
        };
        KindChoice::Search(Goal { objective: self.objective.unwrap_or(objective), bound })
    }

    /// Drops what the options say about experts.
    fn drop_experts(&mut self) {
        (self.expert_quant, self.router_quant) = (None, None);
        (self.experts_per_shard, self.ffn_shards) = (None, None);
        self.form.experts = ExpertForm::default();
        self.scale_scope = ScaleScope::Matrix;
    }

    /// Converts the options to the planner's, with a choice of kinds.
    fn to_plan_options(&self, choice: &KindChoice, forms: &BTreeMap<ShardKind, ShardForm>) -> PlanOptions {
        let (quant, preset) = match choice {
            KindChoice::One(kind) => (*kind, PartKinds::default()),
            KindChoice::Preset(preset) => (preset.quant, preset.parts),
            KindChoice::Search(_) => (PlanOptions::default().quant, PartKinds::default()),
        };
        let tokens = match self.token_range {
            Some(range) => vec![range],
            None => self.tokens.iter().map(|&n| TokenCount { min: n, max: n }).collect(),
        };
        PlanOptions {
            quant,
            parts: PartKinds {
                attention: self.attn_quant.or(preset.attention),
                experts: self.expert_quant.or(preset.experts),
                dense_mlp: self.mlp_quant.or(preset.dense_mlp),
                router: self.router_quant.or(preset.router),
                head: self.head_quant.or(preset.head),
                embedding: self.embed_quant.or(preset.embedding),
            },
            defaults: PartKinds::default(),
            groups: Groups { rows: self.group_size, block: self.block_size },
            experts_per_shard: self.experts_per_shard,
            ffn_shards: self.ffn_shards,
            form: self.form.form(),
            forms: forms.clone(),
            tokens,
            max_context: self.max_context,
            max_shard_mb: self.max_shard_mb,
            scale_scope: self.scale_scope,
            sort_head: false,
        }
    }
}

/// Choice of a plan's kinds: one, a preset, or a search.
enum KindChoice {
    One(Quant),
    Preset(Preset),
    Search(Goal),
}

/// A kind for all, or a search for one per tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QuantChoice {
    Kind(Quant),
    Auto,
}

impl FromStr for QuantChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(QuantChoice::Auto);
        }
        text.parse().map(QuantChoice::Kind).map_err(|e: String| format!("{e}; or auto"))
    }
}

/// Parses a number of bytes, with kB, MB, GB, KiB, MiB or GiB.
pub fn byte_count(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor = match unit {
        "" | "B" => 1.0,
        "kB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "KiB" => 1024.0,
        "MiB" => 1048576.0,
        "GiB" => 1073741824.0,
        _ => return Err(format!("`{text}`: unknown unit `{unit}`")),
    };
    match number.trim().parse::<f64>() {
        Ok(n) if n.is_finite() && n >= 1.0 => Ok((n * factor) as u64),
        _ => Err(format!("`{text}` is not a number of bytes")),
    }
}

/// An open checkpoint, with the plan that the options ask for.
pub struct PlannedCheckpoint {
    pub family: Family,
    pub plan: Plan,
    pub importance: Option<Importance>,
    /// Windows of tokens that weights are compressed for, where they are for any.
    pub calibration: Option<Windows>,
    /// Record of the search for kinds, where there was one that keeps any.
    pub search: Option<SearchRecord>,
}

/// Windows of tokens.
type Windows = Vec<Vec<u32>>;

/// Text that weights are compressed for.
#[derive(Clone, Debug)]
pub struct Calibration {
    /// The text; none for the built-in one.
    pub text: Option<String>,
    /// Most seconds that it may take; none where the user asks for it.
    pub within: Option<f64>,
    /// Most memory, in bytes.
    pub memory: u64,
}

impl Calibration {
    /// Cuts the text into windows; none where it would take too long, or could gain nothing. Returns a fact for the plan.
    fn windows(
        &self,
        family: &Family,
        plan: &Plan,
        is_search: bool,
    ) -> anyhow::Result<(Option<Windows>, Option<String>)> {
        let windows = text_feedback::windows(family, self.text.as_deref(), self.memory);
        let mut matrices = plan.shards.iter().flat_map(|s| &s.matrices);
        let Some(within) = self.within else {
            let windows = windows?;
            if !is_search && !matrices.any(text_feedback::is_compressed) {
                let fact = "--calibrate changes nothing: no weight has a kind that is chosen for a text";
                return Ok((None, Some(fact.into())));
            }
            let whole = text_feedback::windows(family, self.text.as_deref(), u64::MAX)?.len();
            let tokens: usize = windows.iter().map(|w| w.len() - 1).sum();
            let fact = match windows.len() {
                n if n < whole => {
                    Some(format!("--calibration-memory lets {n} of the text's {whole} windows in"))
                }
                _ if tokens < LEAST_JUDGED => Some(format!(
                    "the text has {tokens} tokens; fewer than {LEAST_JUDGED} choose weights badly"
                )),
                _ => None,
            };
            return Ok((Some(windows), fact));
        };
        let gains = family.decoder.assistant.is_none()
            && text_feedback::fits_experts(family, plan)
            && matrices.any(|m| text_feedback::is_compressed(m) && m.quant.kind.bits() < 8);
        let (Ok(windows), true) = (windows, gains) else {
            return Ok((None, None));
        };
        let seconds = text_feedback::forecast(family, plan, windows.iter().map(Vec::len).sum());
        let time = ui::duration(seconds);
        Ok(match seconds <= within {
            true => {
                let fact = format!(
                    "weights are compressed for the built-in text, in about {time} (--calibrate none does not)"
                );
                (Some(windows), Some(fact))
            }
            false => {
                let fact = format!(
                    "--calibrate default would take about {time}; on small models it halves the divergence of 4 bits, in the \
                     same bytes"
                );
                (None, Some(fact))
            }
        })
    }
}

/// Purpose of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanUse {
    /// A look: only headers and small tensors of a checkpoint of the hub are fetched, unless the options have it measured.
    Look,
    /// A build of packages.
    Build,
    /// A build of packages that have to pass gates, which `--min-cosine` is for, too.
    GatedBuild,
    /// The same of a drafter, with the options of its target: those of experts do not count if it has none.
    Drafter,
}

/// Opens a checkpoint and plans it.
pub fn plan_checkpoint(
    spec: &Path,
    options: &PlanArgs,
    plan_use: PlanUse,
    ui: &Ui,
) -> anyhow::Result<PlannedCheckpoint> {
    let one_kind = matches!(options.quant, Some(QuantChoice::Kind(_)));
    for (given, name) in [
        (options.min_cosine.is_some() && matches!(plan_use, PlanUse::Look | PlanUse::Build), "--min-cosine"),
        (options.max_kl.is_some(), "--max-kl"),
        (options.like.is_some(), "--like"),
        (options.max_bytes.is_some(), "--max-bytes"),
        (options.objective.is_some(), "--objective"),
        (options.auto_text.is_some(), "--auto-text"),
    ] {
        if given && one_kind {
            bail!("{name} is a goal of --quant auto");
        }
    }
    if let Some(c) = options.min_cosine.filter(|c| !(0.0..=1.0).contains(c)) {
        bail!("--min-cosine {c} is not a cosine between 0 and 1");
    }
    if let Some(nats) = options.max_kl.filter(|nats| !(nats.is_finite() && *nats > 0.0)) {
        bail!("--max-kl {nats} is not a positive number of nats");
    }
    let extent = if plan_use == PlanUse::Look { Extent::Headers } else { Extent::Whole };
    let mut reading = options.reading;
    let mut family = models::open(reading.open_extent(spec, extent)?)?;
    let choice = options.kind_choice(&family);
    let mut forms = options.form.forms()?;
    let mut own = options.clone();
    if plan_use == PlanUse::Drafter && family.decoder.experts().is_none() {
        own.drop_experts();
        forms.retain(|sort, _| matches!(sort, ShardKind::Layers | ShardKind::Head));
    }
    let options = &own;
    let plan_options = options.to_plan_options(&choice, &forms);
    let plan = family.plan(&plan_options);
    let mut plan = match (plan, &options.form.forms) {
        // If the plan succeeds without the file of forms, the file is at fault.
        (Err(e), Some(path))
            if e.kind() == Kind::Usage
                && family.plan(&options.to_plan_options(&choice, &BTreeMap::new())).is_ok() =>
        {
            return Err(Error::invalid(path, format!("forms: {}", e.what())).into());
        }
        (plan, _) => plan?,
    };
    reading.is_rotated = gains_by_rotation(options, &choice, &family, &plan);
    // A look at one kind needs no rotated weights, each of which takes a whole matrix of the checkpoint.
    let is_search = matches!(choice, KindChoice::Search(_));
    if reading.is_rotated && (plan_use != PlanUse::Look || is_search) {
        family = models::open(reading.open_extent(spec, extent)?)?;
    }
    let (calibration, fact) = match &options.calibration {
        Some(asked) => asked.windows(&family, &plan, is_search)?,
        None => (None, None),
    };
    if reading.is_rotated || calibration.is_some() {
        plan = family.plan(&PlanOptions { sort_head: calibration.is_some(), ..plan_options })?;
    }
    let facts = [reading.is_rotated.then(|| ROTATED.into()), fact];
    if facts.iter().any(Option::is_some) {
        plan.facts.extend(facts.into_iter().flatten());
        plan.complete()?;
    }
    if let Some(path) = &options.form.forms {
        let absent = forms.keys().filter(|sort| plan.shards.iter().all(|s| s.kind != **sort));
        let tables: Vec<String> = absent.map(|sort| format!("[{}]", sort.name())).collect();
        if !tables.is_empty() {
            plan.facts.push(format!("{}: no shard here is of {}", path.display(), tables.join(", ")));
            plan.complete()?;
        }
    }
    if options.scale_scope == ScaleScope::Bank {
        let shares = plan.shards.iter().flat_map(|s| &s.matrices).any(|m| m.bank);
        anyhow::ensure!(
            shares && !matches!(choice, KindChoice::Search(_)),
            "--scale-scope bank: no expert has a kind with one scale; give --quant or --expert-quant int8-tensor"
        );
    }
    let is_measured = matches!(choice, KindChoice::Search(_))
        || (!options.skip_outliers && outliers::matrices_at_risk(&plan).next().is_some());
    if extent == Extent::Headers && is_measured {
        family = models::open(reading.open(spec)?)?;
    }
    let importance =
        options.importance.as_deref().map(|path| Importance::read_for(&plan, path)).transpose()?;
    if let KindChoice::Preset(preset) = &choice {
        plan.facts.insert(0, preset.to_string());
        plan.complete()?;
    }
    let mut record = None;
    if let KindChoice::Search(goal) = choice {
        let checkpoint = reading.open(spec)?;
        let own = match &options.auto_text {
            Some(path) => {
                Some((read_text(path)?, path.file_name().unwrap_or_default().to_string_lossy().into_owned()))
            }
            None => None,
        };
        let is_own = own.is_some();
        let (mut windows, mut text) = search_windows(&checkpoint, &plan, own)?;
        let is_asked = options.calibration.as_ref().is_some_and(|c| c.within.is_none());
        if let Some(all) = calibration.as_ref().filter(|_| is_asked && !is_own) {
            (windows, text) = (text_feedback::search_windows(all), "other windows of the text".into());
        }
        let as_stored = Reading { is_rotated: false, ..reading };
        let stored =
            reading.is_rotated.then(|| anyhow::Ok(models::open(as_stored.open(spec)?)?)).transpose()?;
        let mut search = KindSearch {
            checkpoint: &checkpoint,
            family: &family,
            stored: stored.as_ref(),
            importance: importance.as_ref(),
            candidates: None,
            record: None,
            windows: &windows,
            text,
        };
        if let Some(parent) = &options.search_in {
            let identity = search.identity(&plan, calibration.as_deref())?;
            record = Some(SearchRecord::open(parent, &identity)?);
        }
        let (all, record) = (calibration.as_deref().filter(|_| is_asked), record.as_ref());
        search.record = record;
        if let Err(e) = search_kinds(search, &mut plan, goal, all, ui) {
            record.inspect(|record| record.remove_after(&e));
            return Err(e.into());
        }
    }
    Ok(PlannedCheckpoint { family, plan, importance, calibration, search: record })
}

/// Chooses kinds for a plan, from matrices that are compressed for `calibration` where there is one, and applies them.
fn search_kinds(
    search: KindSearch<'_>,
    plan: &mut Plan,
    goal: Goal,
    calibration: Option<&[Vec<u32>]>,
    ui: &Ui,
) -> anemoe_io::Result<()> {
    let candidates = match (calibration, search.record) {
        (Some(all), Some(record)) => {
            let bar = ui.bar(1, "compressing for the text, in several kinds");
            let mut show = |done: usize, total: usize| advance(&bar, done, total, "layers");
            Some(Candidates::new(search.family, &plan.options, all, record, &mut show)?)
        }
        _ => None,
    };
    let search = KindSearch { candidates: candidates.as_ref(), ..search };
    let bar = ui.bar(1, "choosing kinds");
    choose(&search, plan, goal, &mut |what, done, total| advance(&bar, done, total, what))?;
    Ok(())
}

/// Fact about a plan whose weights are rotated.
const ROTATED: &str = "weights and activations are rotated: the model computes the same, no channel stands out, and few bits \
                       lose less";

/// Tells whether a model is rotated before it is compressed: where its family allows it, some kind has less than 8 bits,
/// and no weights lie on a lattice that would be kept. A table holds nearly all of MXFP4's.
fn gains_by_rotation(options: &PlanArgs, choice: &KindChoice, family: &Family, plan: &Plan) -> bool {
    let is_search = matches!(choice, KindChoice::Search(_));
    let keeps = |m: &MatrixPlan| {
        let lattice = Lattice::of_matrix(family, m);
        lattice.is_some_and(|l| is_search || l == Lattice::Mxfp4 || l.kind() == m.quant.kind)
    };
    let matrices = || plan.shards.iter().flat_map(|s| &s.matrices);
    // Weights of a part are alike.
    let one_of_each: BTreeMap<&str, &MatrixPlan> = matrices().map(|m| (m.part.as_str(), m)).collect();
    models::can_rotate(&family.decoder)
        && options.importance.is_none()
        && (is_search || matrices().any(|m| m.quant.kind.bits() < 8))
        && !one_of_each.into_values().any(keeps)
}

/// Finds tensors that the plan's kinds would spoil. Examines only kinds with one step for a whole tensor, since it has to
/// read their weights.
pub fn find_outliers(
    family: &Family,
    plan: &Plan,
    options: &PlanArgs,
    ui: &Ui,
) -> anyhow::Result<Vec<Outlier>> {
    if options.skip_outliers {
        return Ok(Vec::new());
    }
    let weights: u64 = outliers::matrices_at_risk(plan).map(|(_, m)| m.weights()).sum();
    let bar = ui.bar(weights, "looking for outliers");
    Ok(outliers::find(family, plan, &mut |n| bar.inc(n))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_counts_have_units() {
        assert_eq!(byte_count("6000000"), Ok(6_000_000));
        assert_eq!(byte_count("1.5GB"), Ok(1_500_000_000));
        assert_eq!(byte_count("2MiB"), Ok(2 << 20));
        for wrong in ["", "GB", "-1", "5 apples", "nan", "inf", "0"] {
            assert!(byte_count(wrong).is_err(), "{wrong}");
        }
    }
}
