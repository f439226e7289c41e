//! Summaries of the ops of a package, or of all packages: devices of the products, devices of all ops, ops without a device.
//!
//! `conv 36/36 ane; 34 compute ops ane, 0 gpu, 0 cpu; no device: 44 const, 4 constexpr_lut_to_dense`

use super::device::Device;
use super::rule::Verdict;
use serde::Serialize;
use std::collections::BTreeMap;

/// Op types of products with stored weights, which do nearly all of the work.
const PRODUCTS: [&str; 3] = ["conv", "conv_transpose", "linear"];

/// Number of ops per predicted device. The sum is the number of all ops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct OpCounts {
    /// On the Neural Engine.
    pub ane: u64,
    /// On the GPU.
    pub gpu: u64,
    /// On the CPU.
    pub cpu: u64,
    /// `const` and `constexpr_*`, which have no device.
    pub no_device: u64,
    /// Not decided: predictions say neither, plans name no device.
    pub unknown: u64,
}

impl OpCounts {
    /// Adds other counts.
    pub fn add(&mut self, o: &OpCounts) {
        self.ane += o.ane;
        self.gpu += o.gpu;
        self.cpu += o.cpu;
        self.no_device += o.no_device;
        self.unknown += o.unknown;
    }

    /// Counts every op with a device as an op on the Neural Engine.
    pub fn place_all_on_ane(&mut self) {
        *self = OpCounts { ane: self.compute(), no_device: self.no_device, ..OpCounts::default() };
    }

    /// Returns the number of ops that need a device.
    pub const fn compute(&self) -> u64 {
        self.ane + self.gpu + self.cpu + self.unknown
    }
}

/// Counts of the ops of one type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct OnAne {
    /// Number of ops on the Neural Engine.
    pub ane: u64,
    /// Number of all ops of the type.
    pub of: u64,
}

/// Counts of ops, as predicted or as planned by a Mac.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct OpSummary {
    /// Line for people.
    pub line: String,
    /// Counts of products with stored weights, by op type.
    pub products: BTreeMap<String, OnAne>,
    /// Counts of all ops.
    pub ops: OpCounts,
    /// Number of ops without a device, by op type.
    pub no_device: BTreeMap<String, u64>,
}

impl OpSummary {
    /// Counts a compute op; `place` is `None` where its device is not known.
    pub fn count(&mut self, op_type: &str, place: Option<Device>) {
        match place {
            Some(Device::Ane) => self.ops.ane += 1,
            Some(Device::Gpu) => self.ops.gpu += 1,
            Some(Device::Cpu) => self.ops.cpu += 1,
            None => self.ops.unknown += 1,
        }
        if PRODUCTS.contains(&op_type) {
            let product = self.products.entry(op_type.to_string()).or_default();
            product.ane += u64::from(place == Some(Device::Ane));
            product.of += 1;
        }
    }

    /// Counts ops of a type that has no device.
    pub fn count_without_device(&mut self, op_type: &str, ops: u64) {
        self.ops.no_device += ops;
        *self.no_device.entry(op_type.to_string()).or_default() += ops;
    }

    /// Adds the counts of another package.
    pub fn add(&mut self, other: &OpSummary) {
        self.ops.add(&other.ops);
        for (op_type, o) in &other.products {
            let product = self.products.entry(op_type.clone()).or_default();
            product.ane += o.ane;
            product.of += o.of;
        }
        for (op_type, n) in &other.no_device {
            *self.no_device.entry(op_type.clone()).or_default() += n;
        }
    }

    /// Counts every op with a device as an op on the Neural Engine, and writes the line again.
    pub fn place_all_on_ane(&mut self) {
        self.ops.place_all_on_ane();
        self.products.values_mut().for_each(|p| p.ane = p.of);
        *self = std::mem::take(self).finish();
    }

    /// Writes the line, once all ops are counted.
    pub fn finish(mut self) -> OpSummary {
        let mut parts: Vec<String> =
            self.products.iter().map(|(op_type, p)| format!("{op_type} {}/{} ane", p.ane, p.of)).collect();
        let OpCounts { ane, gpu, cpu, unknown, .. } = self.ops;
        let undecided = if unknown > 0 { format!(", {unknown} undecided") } else { String::new() };
        parts.push(format!("{ane} compute ops ane, {gpu} gpu, {cpu} cpu{undecided}"));
        let without: Vec<String> =
            self.no_device.iter().map(|(op_type, n)| format!("{n} {op_type}")).collect();
        if !without.is_empty() {
            parts.push(format!("no device: {}", without.join(", ")));
        }
        self.line = parts.join("; ");
        self
    }
}

/// Returns the predicted device of an op. An op that leaves the Neural Engine goes to the CPU, or to the GPU where a
/// rule says so; `None` where the verdict is unknown.
pub fn predicted_device(verdict: Verdict, to_gpu: bool) -> Option<Device> {
    match verdict {
        Verdict::Ane => Some(Device::Ane),
        Verdict::Unknown => None,
        Verdict::NotAne if to_gpu => Some(Device::Gpu),
        Verdict::NotAne => Some(Device::Cpu),
    }
}
