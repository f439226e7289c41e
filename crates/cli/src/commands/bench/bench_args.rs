//! Command line of `anemoe bench`.

use crate::args::executor::ExecutorArgs;
use crate::args::numbers::{at_least_one, count};
use crate::args::runner::RunnerArgs;
use crate::bundle::Verify;
use crate::files::Overwrite;
use crate::recorder::JournalArgs;
use anemoe_convert::quant::Quant;
use anemoe_runtime::model::MOST_UNDONE;
use std::path::PathBuf;

/// Measure the speed of a bundle on this machine.
///
/// Measures loading, prefill, and decode at several context lengths, and shows the bytes that are read beside the bandwidth of the
/// memory.
///
/// Tokens are random, so that each one goes to other experts. In front of a decode the context is filled with noise, since
/// the time does not depend on what is in it. Figures are medians.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  anemoe bench small.anemoe\n  anemoe bench small.anemoe --context 64,1024 --fast\n  anemoe bench small.anemoe --save a.json\n  anemoe bench small.anemoe --against a.json\n  anemoe bench small.anemoe --drafts 0,0.8\n  anemoe bench 'synthetic:zaya1-8b?layers=2' --dispatch"
)]
pub struct Args {
    /// The bundle; with --dispatch a checkpoint.
    pub(super) bundle: PathBuf,
    /// Prompt lengths; 0 for none.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "64", value_parser = count)]
    pub(super) prefill: Vec<usize>,
    /// Contexts in which tokens are decoded; the bundle's own limit is that of `build --max-context`.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "64", value_parser = count)]
    pub(super) context: Vec<usize>,
    /// Tokens decoded in each context; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub(super) decode: usize,
    /// Also decode in so many sequences at once, in the first context.
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = at_least_one)]
    pub(super) sequences: Vec<usize>,
    /// Also time passes over so many tokens of one sequence, as drafts are verified, beside passes over one; 0 for none.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "2,4,8", value_parser = verified)]
    pub(super) verify_tokens: Vec<usize>,
    /// Also decode with drafts of which each token is right with this probability, beside plain decoding: 0.8 of four in five, 0
    /// for the worst text.
    #[arg(long, value_name = "P,..", value_delimiter = ',', value_parser = probability)]
    pub(super) drafts: Vec<f64>,
    /// Build a checkpoint with so many experts per shard, one bundle for each number in a temporary folder, and decode with them
    /// in turn: calls and bytes for a token, and its time. Without numbers: 1,2,4,8,16.
    #[arg(long, value_name = "N,..", value_delimiter = ',', num_args = 0..=1, require_equals = true,
        default_missing_value = "1,2,4,8,16", value_parser = at_least_one,
        conflicts_with_all = ["sequences", "drafts", "against", "csv", "shards", "ops"])]
    pub(super) dispatch: Vec<usize>,
    /// For --dispatch: compression, as `build --quant`.
    #[arg(long, value_name = "KIND", default_value = "lut4", requires = "dispatch")]
    pub(super) quant: Quant,
    /// Times that each is measured.
    #[arg(long, value_name = "N", default_value = "3", value_parser = at_least_one)]
    pub(super) repetitions: usize,
    /// Most tokens of one prefill call.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(super) prefill_chunk: Option<usize>,
    /// Start of the random tokens.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) seed: u64,
    /// Also show each shard.
    #[arg(long)]
    pub(super) shards: bool,
    /// Also measure each operation of fused functions, which takes a little time itself.
    #[arg(long)]
    pub(super) ops: bool,
    /// Write the figures as JSON.
    #[arg(long, value_name = "F.json")]
    pub(super) save: Option<PathBuf>,
    /// Write the figures as lines of comma-separated values.
    #[arg(long, value_name = "F.csv")]
    pub(super) csv: Option<PathBuf>,
    #[command(flatten)]
    pub(super) overwrite: Overwrite,
    #[command(flatten)]
    pub(super) verify: Verify,
    /// Show the figures beside those of an earlier run, from --save.
    #[arg(long, value_name = "F.json")]
    pub(super) against: Option<PathBuf>,
    #[command(flatten)]
    pub(super) runner: RunnerArgs,
    #[command(flatten)]
    pub(super) executor: ExecutorArgs,
    #[command(flatten)]
    pub(super) journal: JournalArgs,
}

/// Parses the tokens of a pass over a draft, 2 to `MOST_UNDONE + 1`; 0 for no pass.
fn verified(text: &str) -> Result<usize, String> {
    let n = count(text)?;
    if n == 1 || n > MOST_UNDONE + 1 {
        return Err(format!("{n} tokens, where a pass over a draft has 2 to {}", MOST_UNDONE + 1));
    }
    Ok(n)
}

/// Parses a probability, 0 to 1.
fn probability(text: &str) -> Result<f64, String> {
    let p: Option<f64> = text.trim().parse().ok();
    p.filter(|p| (0.0..=1.0).contains(p)).ok_or_else(|| format!("`{text}` is not a probability from 0 to 1"))
}
