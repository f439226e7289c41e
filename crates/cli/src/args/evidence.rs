//! Option that names the folder of evidence, which `import-report` fills.

use anemoe_gates::cost::chips::ChipProfile;
use anemoe_gates::residency::imported::{ImportedEvidence, PROFILE_FILE, report_folders};
use anemoe_io::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Environment variable that names the folder.
const VARIABLE: &str = "ANEMOE_EVIDENCE";
/// Largest profile that is read, in bytes.
const MAX_PROFILE_BYTES: u64 = 1 << 20;

/// Evidence of one's own Macs.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct EvidenceArgs {
    /// Folder of evidence from Macs, which `anemoe import-report` fills [default: the one that ANEMOE_EVIDENCE names, else none].
    #[arg(long, value_name = "DIR")]
    evidence: Option<PathBuf>,
}

impl EvidenceArgs {
    /// Returns the folder of `--evidence`, else the folder that the variable names; none without either.
    fn folder(&self) -> Option<PathBuf> {
        let named = || std::env::var_os(VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from);
        self.evidence.clone().or_else(named)
    }

    /// Reads the outcomes in the folder; none if no folder is named.
    ///
    /// # Errors
    /// The folder does not exist, or a table in it is damaged.
    pub fn outcomes(&self) -> anyhow::Result<Option<Arc<ImportedEvidence>>> {
        let Some(folder) = self.folder() else { return Ok(None) };
        Ok(Some(Arc::new(ImportedEvidence::read(&folder)?)))
    }

    /// Joins the figures that the folder's reports calibrated for a chip; returns `chip` itself if no report is about it.
    ///
    /// # Errors
    /// The folder does not exist, or a profile in it is damaged.
    pub fn calibrated(&self, chip: &ChipProfile) -> anyhow::Result<ChipProfile> {
        let Some(folder) = self.folder() else { return Ok(chip.clone()) };
        let mut own = Vec::new();
        for report in report_folders(&folder)? {
            let path = report.join(PROFILE_FILE);
            if path.symlink_metadata().is_err() {
                continue;
            }
            let profile = read_profile(&path)?;
            if profile.base_name() == chip.base_name() {
                own.push(profile);
            }
        }
        Ok(ChipProfile::joined(&own).unwrap_or_else(|| chip.clone()))
    }
}

/// Reads a profile.
///
/// # Errors
/// The file cannot be read, or is damaged.
pub fn read_profile(file: &Path) -> anyhow::Result<ChipProfile> {
    let text = anemoe_io::read_text(file, MAX_PROFILE_BYTES).map_err(|e| Error::io(file, e))?;
    ChipProfile::parse(&text).map_err(|what| Error::invalid(file, what).into())
}
