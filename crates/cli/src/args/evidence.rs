//! Option that names the folder of evidence, which `import-report` fills.

use anemoe_gates::cost::chips::ChipProfile;
use anemoe_gates::residency::imported::ImportedEvidence;
use std::path::PathBuf;
use std::sync::Arc;

/// Environment variable that names the folder.
const VARIABLE: &str = "ANEMOE_EVIDENCE";

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
    pub fn outcomes(&self) -> anyhow::Result<Option<Arc<ImportedEvidence>>> {
        let Some(folder) = self.folder() else { return Ok(None) };
        Ok(Some(Arc::new(ImportedEvidence::read(&folder)?)))
    }

    /// Joins the figures that the folder's reports calibrated for a chip; returns `chip` itself if no report is about it.
    pub fn calibrated(&self, chip: &ChipProfile) -> anyhow::Result<ChipProfile> {
        match self.folder() {
            Some(folder) => Ok(chip.calibrated(&folder)?),
            None => Ok(chip.clone()),
        }
    }
}
