//! Plan reports: answers of `MLComputePlan` on a Mac.
//!
//! The format is JSON, written by `anemoe check --device` on macOS; `docs/residency.md` describes it.

use super::rule::Verdict;
use serde::{Deserialize, Serialize};

/// Version of the format of plan reports.
pub const FORMAT: u32 = 1;

/// Plan report of a Mac.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlanReport {
    /// Format version: [`FORMAT`].
    pub format: u32,
    /// Operating system and version, for instance `macOS 26.0.1`.
    pub os: String,
    /// Chip, for instance `Apple M4 Max`.
    pub chip: String,
    /// Compute units as `MLComputeUnits` names them: `cpuAndNeuralEngine`, `all`, `cpuOnly`, `cpuAndGPU`.
    pub compute_units: String,
    /// Program that wrote the report.
    #[serde(default)]
    pub generator: String,
    /// One entry per function of a package.
    pub plans: Vec<FunctionPlan>,
}

/// Plan of one function.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FunctionPlan {
    /// Name of the shard, or of the package with or without `.mlpackage`.
    pub package: String,
    /// Name of the function; empty where the package has one function.
    #[serde(default)]
    pub function: String,
    /// Ops of the plan.
    pub ops: Vec<PlannedOp>,
}

/// Op of a plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlannedOp {
    /// Name of the op's first output.
    pub name: String,
    /// Op type, which may have an opset in front (`ios18.conv`).
    #[serde(rename = "type")]
    pub op_type: String,
    /// Preferred device; absent where the plan gives none.
    #[serde(default)]
    pub preferred: Option<Device>,
    /// Supported devices.
    #[serde(default)]
    pub supported: Vec<Device>,
    /// `estimatedCost`: the op's share of the function's cost; absent where the plan gives none.
    #[serde(default)]
    pub cost: Option<f64>,
}

/// Compute device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// The Neural Engine.
    #[serde(
        alias = "neuralEngine",
        alias = "NeuralEngine",
        alias = "MLNeuralEngineComputeDevice",
        alias = "ANE"
    )]
    Ane,
    /// The GPU.
    #[serde(alias = "MLGPUComputeDevice", alias = "GPU")]
    Gpu,
    /// The CPU.
    #[serde(alias = "MLCPUComputeDevice", alias = "CPU")]
    Cpu,
}

impl PlanReport {
    /// Reads a plan report.
    ///
    /// # Errors
    /// The text is not JSON of this [`FORMAT`]; the message names the place.
    pub fn parse(text: &[u8]) -> Result<PlanReport, String> {
        let report: PlanReport =
            anemoe_io::json::parse_large(text).map_err(|e| format!("plan report: {e}"))?;
        if report.format != FORMAT {
            return Err(format!("plan report: format {}, {FORMAT} is read", report.format));
        }
        Ok(report)
    }
}

/// Number of ops per preferred device of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceCounts {
    /// Preferred on the ANE.
    pub ane: u64,
    /// Preferred on the GPU.
    pub gpu: u64,
    /// Preferred on the CPU.
    pub cpu: u64,
    /// Listed in the plan without a device.
    pub none: u64,
}

impl DeviceCounts {
    /// Counts the ops of plans, without constants, which have no device.
    pub fn of<'a>(ops: impl IntoIterator<Item = &'a PlannedOp>) -> DeviceCounts {
        let mut counts = DeviceCounts::default();
        for op in ops {
            let name = op.op_type.rsplit('.').next().unwrap_or_default();
            if name != "const" && !name.starts_with("constexpr_") {
                counts.count(op.preferred);
            }
        }
        counts
    }

    pub(super) fn count(&mut self, device: Option<Device>) {
        match device {
            Some(Device::Ane) => self.ane += 1,
            Some(Device::Gpu) => self.gpu += 1,
            Some(Device::Cpu) => self.cpu += 1,
            None => self.none += 1,
        }
    }

    /// Returns the verdict of a plan with these counts: `unknown` where no op has a device, or some have none.
    pub fn verdict(&self) -> Verdict {
        match (self.gpu + self.cpu, self.none, self.ane) {
            (1.., _, _) => Verdict::NotAne,
            (0, 0, 1..) => Verdict::Ane,
            _ => Verdict::Unknown,
        }
    }
}
