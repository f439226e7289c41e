//! A function's compute plan, as `MLComputePlan` reports it.

use serde::{Deserialize, Serialize};

/// A device of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlanDevice {
    /// The Neural Engine.
    Ane,
    /// The GPU.
    Gpu,
    /// The CPU.
    Cpu,
}

/// An operation of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpPlan {
    /// Name of its first output; empty for an operation without outputs.
    pub name: String,
    /// Operator name.
    #[serde(rename = "type")]
    pub op_type: String,
    /// Preferred device, where the plan gives one.
    pub preferred: Option<PlanDevice>,
    /// Supported devices.
    pub supported: Vec<PlanDevice>,
    /// Share of the estimated total cost, where the plan gives one.
    pub cost: Option<f64>,
}
