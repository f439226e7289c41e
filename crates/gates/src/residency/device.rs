//! Plan reports: what `MLComputePlan` said on a Mac.
//!
//! The format is JSON, written by `anemoe check --device` on macOS; `docs/residency.md` describes it.

use super::rule::Verdict;
use serde::{Deserialize, Serialize};

/// Version of the format.
pub const FORMAT: u32 = 1;

/// A plan report.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlanReport {
    /// [`FORMAT`].
    pub format: u32,
    /// System and version, for instance `macOS 26.0.1`.
    pub os: String,
    /// Chip, for instance `Apple M4 Max`.
    pub chip: String,
    /// Compute units as `MLComputeUnits` names them: `cpuAndNeuralEngine`, `all`, `cpuOnly`, `cpuAndGPU`.
    pub compute_units: String,
    /// Program that wrote it.
    #[serde(default)]
    pub generator: String,
    /// One entry per function of a package.
    pub plans: Vec<FunctionPlan>,
}

/// The plan of one function.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FunctionPlan {
    /// Name of the shard, or of the package with or without `.mlpackage`.
    pub package: String,
    /// Name of the function; empty for the only one.
    #[serde(default)]
    pub function: String,
    /// Every op of the plan.
    pub ops: Vec<PlannedOp>,
}

/// One op of a plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlannedOp {
    /// Name of its first output.
    pub name: String,
    /// Operator name; it may carry the opset (`ios18.conv`).
    #[serde(rename = "type")]
    pub op_type: String,
    /// Preferred device; absent where the plan gives none.
    #[serde(default)]
    pub preferred: Option<Device>,
    /// Supported devices.
    #[serde(default)]
    pub supported: Vec<Device>,
    /// `estimatedCost`, the share of the whole; absent where the plan gives none.
    #[serde(default)]
    pub cost: Option<f64>,
}

/// A compute device.
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
    /// Reads a report.
    ///
    /// # Errors
    /// It is not JSON of this [`FORMAT`]; the message says where.
    pub fn parse(text: &[u8]) -> Result<PlanReport, String> {
        let report: PlanReport = anemoe_io::json::parse(text).map_err(|e| format!("plan report: {e}"))?;
        if report.format != FORMAT {
            return Err(format!("plan report: format {}, {FORMAT} is read", report.format));
        }
        Ok(report)
    }
}

/// Ops by prediction and by where the plan puts them.
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
    pub(super) fn count(&mut self, device: Option<Device>) {
        match device {
            Some(Device::Ane) => self.ane += 1,
            Some(Device::Gpu) => self.gpu += 1,
            Some(Device::Cpu) => self.cpu += 1,
            None => self.none += 1,
        }
    }

    /// Verdict of a plan with these counts: `unknown` where no op, or not every op, has a device.
    pub fn verdict(&self) -> Verdict {
        match (self.gpu + self.cpu, self.none, self.ane) {
            (1.., _, _) => Verdict::NotAne,
            (0, 0, 1..) => Verdict::Ane,
            _ => Verdict::Unknown,
        }
    }
}
