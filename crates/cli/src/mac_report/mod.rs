//! Reports of `verify-on-mac`: one zip file with the document of every stage, which `import-report` reads elsewhere.
//!
//! ```text
//! manifest.json      format, program, and size and SHA-256 of every other entry
//! system.json        system, chip, memory, model
//! packages.json      cells of a table of outcomes that follow from each package's program
//! stages/NAME.json   how a stage ended, and its document
//! plan.json          plan report, as `check --report` reads it
//! bench.json         document of `bench --save`
//! forms.toml         choice of `tune`
//! ```

pub mod archive;
pub mod private;
pub mod stage;

use anemoe_coreml::SystemFacts;
use anemoe_gates::residency::outcomes::cells::OutcomeCells;
use serde::{Deserialize, Serialize};

/// Version of the format.
pub const FORMAT: u32 = 1;
/// Entry with the list of all other entries.
pub const REPORT_MANIFEST: &str = "manifest.json";
/// Entry with the system.
pub const SYSTEM: &str = "system.json";
/// Entry with the packages.
pub const PACKAGES: &str = "packages.json";
/// Entry with the plan report.
pub const PLAN: &str = "plan.json";
/// Entry with the saved bench.
pub const BENCH: &str = "bench.json";
/// Entry with the forms.
pub const FORMS: &str = "forms.toml";

/// Chip from whose figures a chip is calibrated that the table of chips lacks.
pub const STAND_IN: &str = "m4-max";

/// The machine and the model of a report.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReportSystem {
    /// System and chip.
    pub system: SystemFacts,
    /// Bytes of memory.
    pub memory_bytes: Option<u64>,
    /// Number of cores.
    pub cores: Option<u64>,
    /// Version of anemoe.
    pub version: String,
    /// Name of the checkpoint, without its folder.
    pub model: String,
    /// Compression that was asked for.
    pub quant: String,
    /// Token counts of the functions.
    pub tokens: Vec<usize>,
}

/// A package of the bundle that a report is about.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DescribedPackage {
    /// Name of the shard.
    pub name: String,
    /// Kind of shard.
    pub kind: String,
    /// Bytes of the package.
    pub bytes: u64,
    /// Cells that follow from the package's program.
    pub cells: OutcomeCells,
}

/// Returns the short name of a chip, as tables of chips have it: `m4-max` for `Apple M4 Max`.
pub fn chip_slug(chip: &str) -> String {
    let name = chip.trim().trim_start_matches("Apple ").to_ascii_lowercase();
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    name.chars().map(plain).collect::<String>().trim_matches('-').chars().take(24).collect()
}

#[cfg(test)]
mod tests {
    use super::chip_slug;

    #[test]
    fn chips_have_short_names() {
        for (chip, slug) in
            [("Apple M4 Max", "m4-max"), ("Apple M1", "m1"), ("M5 Pro ", "m5-pro"), ("../x", "x")]
        {
            assert_eq!(chip_slug(chip), slug);
        }
    }
}
