//! Folder of evidence that `import-report` filled, as an option.

use anemoe_gates::cost::chips::ChipProfile;
use anemoe_gates::residency::imported::{ImportedEvidence, PROFILE_FILE, report_folders};
use anemoe_io::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Environment variable that names the folder.
const VARIABLE: &str = "ANEMOE_EVIDENCE";
/// Largest profile that is read.
const MAX_PROFILE_BYTES: u64 = 1 << 20;

/// Evidence of one's own Macs.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct EvidenceArgs {
    /// Folder of evidence from Macs, which `anemoe import-report` fills [default: the one that ANEMOE_EVIDENCE names, else none].
    #[arg(long, value_name = "DIR")]
    evidence: Option<PathBuf>,
}

impl EvidenceArgs {
    /// The folder that is used.
    fn folder(&self) -> Option<PathBuf> {
        let named = || std::env::var_os(VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from);
        self.evidence.clone().or_else(named)
    }

    /// Outcomes of the folder; none where no folder is named.
    ///
    /// # Errors
    /// The folder is not there, or a table in it is damaged.
    pub fn outcomes(&self) -> anyhow::Result<Option<Arc<ImportedEvidence>>> {
        let Some(folder) = self.folder() else { return Ok(None) };
        Ok(Some(Arc::new(ImportedEvidence::read(&folder)?)))
    }

    /// The figures of a chip as reports calibrated them, joined; `chip` itself where none is about it.
    ///
    /// # Errors
    /// The folder is not there, or a profile in it is damaged.
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
/// It is damaged.
pub fn read_profile(file: &Path) -> anyhow::Result<ChipProfile> {
    let text = anemoe_io::read_text(file, MAX_PROFILE_BYTES).map_err(|e| Error::io(file, e))?;
    ChipProfile::parse(&text).map_err(|what| Error::invalid(file, what).into())
}
