//! Chip profiles: figures of a chip's Neural Engine, from the table that anemoe ships or calibrated by a Mac's bench.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Table of chips, in TOML.
const TABLE: &str = include_str!("chips.toml");

/// Suffix of a chip's name whose figures a bench calibrated.
pub const CALIBRATED: &str = "-calibrated";

/// Figure of a chip with its range.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChipFigure {
    /// Lowest known value.
    pub low: f64,
    /// Likely value, used by forecasts.
    pub likely: f64,
    /// Highest known value.
    pub high: f64,
    /// Source: project that measured the figure, and place in it.
    pub source: String,
}

/// Case of a forecast: which value of each figure counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpeedCase {
    /// The slowest value of every figure.
    Slow,
    /// The likely value of every figure.
    Likely,
    /// The fastest value of every figure.
    Fast,
}

impl ChipFigure {
    /// Returns the value of a speed: low is slow.
    pub fn speed(&self, case: SpeedCase) -> f64 {
        match case {
            SpeedCase::Slow => self.low,
            SpeedCase::Likely => self.likely,
            SpeedCase::Fast => self.high,
        }
    }

    /// Returns the value of a time or a loss: high is slow.
    pub fn loss(&self, case: SpeedCase) -> f64 {
        match case {
            SpeedCase::Slow => self.high,
            SpeedCase::Likely => self.likely,
            SpeedCase::Fast => self.low,
        }
    }

    fn times(&self, factor: &ChipFigure) -> ChipFigure {
        let source = format!("{}, times the bandwidth", factor.source);
        let likely = self.likely * factor.likely;
        ChipFigure { low: self.likely * factor.low, likely, high: self.likely * factor.high, source }
    }

    fn check(&self, name: &str) -> Result<(), String> {
        let ChipFigure { low, likely, high, .. } = *self;
        // No figure of a chip is near these bounds, and sums and quotients of such figures stay finite.
        let plausible = 1e-6..=1e6;
        if plausible.contains(&low) && plausible.contains(&high) && low <= likely && likely <= high {
            Ok(())
        } else {
            Err(format!("{name}: {low:e}, {likely:e}, {high:e} are not between 1e-6 and 1e6 and ascending"))
        }
    }
}

/// Figures of a chip.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChipProfile {
    /// Name, for instance `m4-max`.
    pub chip: String,
    /// Bytes of weights read from memory, in 10^9 per second.
    pub bandwidth_gb_s: ChipFigure,
    /// Fixed cost of a call, in milliseconds.
    pub call_ms: ChipFigure,
    /// Multiply-adds, in 10^12 per second.
    pub peak_tmac_s: ChipFigure,
    /// Weights decoded and multiplied in layers, in 10^9 per second.
    pub rate_gw_s: ChipFigure,
    /// Weights decoded and multiplied in one large product, in 10^9 per second.
    pub head_rate_gw_s: ChipFigure,
    /// Share of the shorter one of reading and decoding that the longer one does not hide.
    pub unhidden: ChipFigure,
    /// Bytes of weights read from storage where they do not fit into memory, in 10^9 per second.
    pub storage_gb_s: ChipFigure,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChipTable {
    defaults: ChipDefaults,
    chips: BTreeMap<String, ChipEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChipDefaults {
    rate_over_bandwidth: ChipFigure,
    head_rate_over_bandwidth: ChipFigure,
    unhidden: ChipFigure,
    storage_gb_s: ChipFigure,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChipEntry {
    bandwidth_gb_s: ChipFigure,
    call_ms: ChipFigure,
    peak_tmac_s: ChipFigure,
    rate_gw_s: Option<ChipFigure>,
    head_rate_gw_s: Option<ChipFigure>,
}

fn table() -> Result<ChipTable, String> {
    toml::from_str(TABLE).map_err(|e| e.to_string())
}

/// Returns the names of the table's chips.
pub fn names() -> Vec<String> {
    table().map(|t| t.chips.into_keys().collect()).unwrap_or_default()
}

impl ChipProfile {
    /// Finds a chip of the table, by a name such as `m4-max` or `M4 Max`.
    ///
    /// # Errors
    /// The table has no chip of this name; the message lists all names.
    pub fn named(name: &str) -> Result<ChipProfile, String> {
        let ChipTable { defaults, mut chips } = table()?;
        let wanted = name.trim().to_ascii_lowercase().replace([' ', '_'], "-");
        let Some(entry) = chips.remove(&wanted) else {
            return Err(format!("`{name}` is not a chip of the table: {}", names().join(", ")));
        };
        let profile = ChipProfile {
            rate_gw_s: entry
                .rate_gw_s
                .unwrap_or_else(|| entry.bandwidth_gb_s.times(&defaults.rate_over_bandwidth)),
            head_rate_gw_s: entry
                .head_rate_gw_s
                .unwrap_or_else(|| entry.bandwidth_gb_s.times(&defaults.head_rate_over_bandwidth)),
            chip: wanted,
            bandwidth_gb_s: entry.bandwidth_gb_s,
            call_ms: entry.call_ms,
            peak_tmac_s: entry.peak_tmac_s,
            unhidden: defaults.unhidden,
            storage_gb_s: defaults.storage_gb_s,
        };
        profile.check()?;
        Ok(profile)
    }

    /// Reads a profile that [`ChipProfile::text`] wrote.
    ///
    /// # Errors
    /// The text is not a profile; the message names the place.
    pub fn parse(text: &str) -> Result<ChipProfile, String> {
        let profile: ChipProfile = toml::from_str(text).map_err(|e| format!("profile of a chip: {e}"))?;
        profile.check()?;
        Ok(profile)
    }

    fn figures(&self) -> [(&'static str, &ChipFigure); 7] {
        [
            ("bandwidth_gb_s", &self.bandwidth_gb_s),
            ("call_ms", &self.call_ms),
            ("peak_tmac_s", &self.peak_tmac_s),
            ("rate_gw_s", &self.rate_gw_s),
            ("head_rate_gw_s", &self.head_rate_gw_s),
            ("unhidden", &self.unhidden),
            ("storage_gb_s", &self.storage_gb_s),
        ]
    }

    /// Joins profiles of one chip: means of the likely values, and ranges that hold all ranges. Returns `None`
    /// without profiles.
    pub fn joined(profiles: &[ChipProfile]) -> Option<ChipProfile> {
        let join = |of: fn(&ChipProfile) -> &ChipFigure| {
            let all = || profiles.iter().map(of);
            let mut sources: Vec<&str> = all().map(|f| f.source.as_str()).collect();
            sources.dedup();
            ChipFigure {
                low: all().map(|f| f.low).fold(f64::INFINITY, f64::min),
                likely: all().map(|f| f.likely).sum::<f64>() / profiles.len() as f64,
                high: all().map(|f| f.high).fold(0.0, f64::max),
                source: sources.join("; "),
            }
        };
        Some(ChipProfile {
            chip: profiles.first()?.chip.clone(),
            bandwidth_gb_s: join(|p| &p.bandwidth_gb_s),
            call_ms: join(|p| &p.call_ms),
            peak_tmac_s: join(|p| &p.peak_tmac_s),
            rate_gw_s: join(|p| &p.rate_gw_s),
            head_rate_gw_s: join(|p| &p.head_rate_gw_s),
            unhidden: join(|p| &p.unhidden),
            storage_gb_s: join(|p| &p.storage_gb_s),
        })
    }

    /// Returns the name of the chip without the suffix [`CALIBRATED`].
    pub fn base_name(&self) -> &str {
        self.chip.trim_end_matches(CALIBRATED)
    }

    /// Checks that every figure is one that a chip can have.
    ///
    /// # Errors
    /// A figure is not; the message names it.
    pub(super) fn check(&self) -> Result<(), String> {
        self.figures().iter().try_for_each(|(name, figure)| figure.check(name))
    }

    /// Returns the profile as TOML, as [`ChipProfile::parse`] reads it.
    pub fn text(&self) -> String {
        let mut text = format!("chip = {:?}\n", self.chip);
        for (name, f) in self.figures() {
            text += &format!(
                "{name} = {{ low = {:?}, likely = {:?}, high = {:?}, source = {:?} }}\n",
                f.low, f.likely, f.high, f.source
            );
        }
        text
    }
}
