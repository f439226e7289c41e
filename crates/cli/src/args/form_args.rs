//! Options that decide the form of shards.

use anemoe_bundle::ShardKind;
use anemoe_convert::context_buckets::ContextBuckets;
use anemoe_convert::form::{
    ActivationForm, AttentionForm, CacheForm, ExpertForm, FunctionForm, HistoryForm, IoForm, NormForm,
    ShardForm,
};
use anemoe_convert::forms_file;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// Makes a parser of the words of a choice.
fn words<T>(all: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: std::str::FromStr<Err = String> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(all).try_map(|word| word.parse::<T>())
}

/// The form of shards; `anemoe forms` lists what speaks for and against each.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Form of shards")]
pub struct FormArgs {
    /// Holder of keys and values between calls: a Core ML state, or the host, which gives them as an input.
    #[arg(long, value_name = "FORM", value_parser = words::<CacheForm>(CacheForm::WORDS), default_value_t)]
    pub cache: CacheForm,
    /// Holder of what ZAYA's convolutions need of earlier tokens: rows of the cache's state, or the host.
    #[arg(long, value_name = "FORM", value_parser = words::<HistoryForm>(HistoryForm::WORDS), default_value_t)]
    pub history: HistoryForm,
    /// Products of attention: query heads of a key/value head together, or each by itself.
    #[arg(long, value_name = "FORM", value_parser = words::<AttentionForm>(AttentionForm::WORDS), default_value_t)]
    pub attention: AttentionForm,
    /// Functions that gate MLPs, and those of routers: the ops `silu` and `gelu`, or products with `sigmoid`.
    #[arg(long, value_name = "FORM", value_parser = words::<ActivationForm>(ActivationForm::WORDS), default_value_t)]
    pub activation: ActivationForm,
    /// Layout of the stream at a function's border: [1, C, 1, T], or [1, 1, T, C], whose last axis is never 1.
    #[arg(long, value_name = "FORM", value_parser = words::<IoForm>(IoForm::WORDS), default_value_t)]
    pub io: IoForm,
    /// RMS norms: divided by a part of the largest magnitude first, or squared as they are.
    #[arg(long, value_name = "FORM", value_parser = words::<NormForm>(NormForm::WORDS), default_value_t)]
    pub norm: NormForm,
    /// Layout of the experts of a call: two convolutions each, or two for all.
    #[arg(long, value_name = "FORM", value_parser = words::<ExpertForm>(ExpertForm::WORDS), default_value_t)]
    pub experts: ExpertForm,
    /// Packages of a shard with functions for several token counts: one, or one for each count, with weights of its own. The
    /// latter needs `--cache host`, as packages share no states.
    #[arg(long, value_name = "FORM", value_parser = words::<FunctionForm>(FunctionForm::WORDS), default_value_t)]
    pub functions: FunctionForm,
    /// Contexts, in positions, for which attention has functions of its own besides those for the whole context: they read the
    /// first slots of the cache alone. Ascending multiples of 32, four at most.
    #[arg(long, value_name = "N,N,..", default_value_t, hide_default_value = true)]
    pub context_buckets: ContextBuckets,
    /// Layers that share a package, at most: neighbours of one kind without experts [default: 8, of 288 MB at most]; whole
    /// ones where one call computes all experts of a layer (ZAYA, 1 puts attention and experts together); where the host
    /// chooses experts, the last pack of a layer and the attention of the next one (from 2 on) [default of both: a package for
    /// each part of a layer].
    #[arg(long, value_name = "N")]
    pub layers_per_shard: Option<NonZeroUsize>,
    /// Forms by sort of shard, from a TOML file: a table for each of attention, experts, experts_combine, moe, layers and head,
    /// with the names of those of these options as keys that change shards of the sort.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["cache", "history", "attention", "activation", "io", "norm", "experts", "functions", "context_buckets", "layers_per_shard"])]
    pub forms: Option<PathBuf>,
}

impl FormArgs {
    /// Returns the form of all sorts of shards that `--forms` does not name.
    pub fn form(&self) -> ShardForm {
        ShardForm {
            cache: self.cache,
            history: self.history,
            attention: self.attention,
            activation: self.activation,
            io: self.io,
            norm: self.norm,
            experts: self.experts,
            functions: self.functions,
            context_buckets: self.context_buckets,
            layers_per_shard: self.layers_per_shard,
        }
    }

    /// Reads the forms of `--forms`, by sort of shard; empty without the option.
    pub fn forms(&self) -> anyhow::Result<BTreeMap<ShardKind, ShardForm>> {
        let Some(path) = &self.forms else { return Ok(BTreeMap::new()) };
        let text = anemoe_io::read_text(path, MAX_FILE_BYTES).map_err(|e| anemoe_io::Error::io(path, e))?;
        Ok(forms_file::parse(path, &text)?)
    }
}

/// Largest file of forms that is read, in bytes; a file with a table for each sort has a few hundred.
const MAX_FILE_BYTES: u64 = 1 << 20;
