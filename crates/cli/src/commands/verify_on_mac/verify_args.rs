//! Command line of `anemoe verify-on-mac`.

use crate::child_work::RiskyArgs;
use crate::files::Overwrite;
use crate::mac_report::stage::StageName;
use anemoe_convert::quant::Quant;
use std::path::PathBuf;

/// Measure everything that only a Mac can, and put it into one file.
///
/// Runs doctor, tune, build, compile, check --device, a soak of thousands of passes, the golden gate and the bench on the Neural
/// Engine, and reads power where `powermetrics` may be run. Each stage has a process of its own: what crashes, hangs or is refused
/// is a finding, and the next stage goes on. An interrupted run goes on behind the last finished stage. The report is written at the
/// end, whatever failed; it holds no folders, user names or host names. Exit status 1 when a stage failed.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe verify-on-mac\n  anemoe verify-on-mac --dry-run\n  anemoe verify-on-mac --stages soak --again\n  anemoe import-report anemoe-mac-report.zip --evidence evidence"
)]
pub struct Args {
    /// The checkpoint [default: models/small-gemma4 of the repository].
    #[arg(long, value_name = "CHECKPOINT")]
    pub(super) checkpoint: Option<PathBuf>,
    /// The report. One of an earlier run is replaced.
    #[arg(short, long, value_name = "F.zip", default_value = "anemoe-mac-report.zip")]
    pub(super) out: PathBuf,
    /// Folder of bundle, trials and documents, with which a later run goes on [default: beside the report, with the ending .work].
    #[arg(long, value_name = "DIR")]
    pub(super) work: Option<PathBuf>,
    /// Compression.
    #[arg(long, value_name = "KIND", default_value = "lut4")]
    pub(super) quant: Quant,
    /// Token counts for which each package has a function.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,4,64", value_parser = crate::args::numbers::at_least_one)]
    pub(super) tokens: Vec<usize>,
    /// Only these stages; what others have found before stays in the report.
    #[arg(long, value_enum, value_name = "STAGE,..", value_delimiter = ',')]
    pub(super) stages: Vec<StageName>,
    /// Run stages again that an earlier run has finished.
    #[arg(long)]
    pub(super) again: bool,
    /// List the stages with rough times, and do nothing.
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Calls of each form that are measured, as `tune --calls`.
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u32).range(20..=100_000))]
    pub(super) calls: u32,
    /// Passes of each token count in the soak.
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    pub(super) soak_passes: u64,
    /// Least seconds of the soak: objects that are never let go end a process after some five minutes. --timeout does not limit the
    /// whole of it: it ends a soak in which no pass comes for so long.
    #[arg(long, value_name = "S", default_value_t = 360, value_parser = clap::value_parser!(u64).range(0..=86_400))]
    pub(super) soak_seconds: u64,
    /// Seconds of which power is measured.
    #[arg(long, value_name = "S", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(super) energy_seconds: u64,
    #[command(flatten)]
    pub(super) risky: RiskyArgs,
    #[command(flatten)]
    pub(super) overwrite: Overwrite,
}
