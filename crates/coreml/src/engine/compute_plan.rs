//! Compute plans of Core ML: the preferred and the supported devices of each operation.

use super::failure::{Failure, caught};
use super::loading::{Handover, configuration, file_url};
use crate::op_plan::{OpPlan, PlanDevice};
use crate::settings::ComputeUnits;
use crate::{Error, Result};
use block2::RcBlock;
use objc2::msg_send;
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::AnyObject;
use objc2_core_ml::{
    MLCPUComputeDevice, MLComputePlan, MLComputePlanDeviceUsage, MLGPUComputeDevice, MLModelStructureProgram,
    MLModelStructureProgramBlock, MLModelStructureProgramFunction, MLNeuralEngineComputeDevice,
};
use objc2_foundation::{NSArray, NSError, NSString};
use std::path::Path;
use std::sync::mpsc::sync_channel;

/// Returns the plan of a function of `package`, whose compiled model is `compiled`. `named` is false for the only
/// function of a package.
///
/// # Errors
/// `compiled` is not a compiled model (Core ML would end the process), or Core ML gives no plan.
pub fn plan_of(
    package: &Path,
    compiled: &Path,
    function: &str,
    named: bool,
    units: ComputeUnits,
) -> Result<Vec<OpPlan>> {
    super::available()?;
    if !crate::compiled::is_compiled(compiled) {
        return Err(Error::unsupported(compiled, "as a compiled model: it has no coremldata.bin"));
    }
    let ops = autoreleasepool(|_| caught(|| read(compiled, function, named, units)));
    ops.map_err(|e| e.at(package, function))
}

type PlanReply = std::result::Result<Handover<Retained<MLComputePlan>>, Failure>;

fn read(
    compiled: &Path,
    function: &str,
    named: bool,
    units: ComputeUnits,
) -> std::result::Result<Vec<OpPlan>, Failure> {
    let url = file_url(compiled)?;
    let configuration = configuration(named.then_some(function), units);
    let (send, receive) = sync_channel::<PlanReply>(1);
    let handler = RcBlock::new(move |plan: *mut MLComputePlan, error: *mut NSError| {
        // SAFETY: both live while the handler runs; a reference of this crate keeps the plan.
        let answer = unsafe {
            match Retained::retain(plan) {
                Some(plan) => Ok(Handover::new(plan)),
                None => Err(error
                    .as_ref()
                    .map_or_else(|| Failure::Misfit("neither plan nor error".into()), Failure::reported)),
            }
        };
        let _ = send.send(answer);
    });
    // SAFETY: the handler may run on any thread.
    unsafe {
        MLComputePlan::loadContentsOfURL_configuration_completionHandler(&url, &configuration, &handler);
    }
    drop(handler);
    let answer = receive.recv().unwrap_or_else(|_| Err(Failure::Misfit("Core ML did not answer".into())));
    let plan = answer?.into_inner();
    // SAFETY: plain getters of a living plan.
    let program = unsafe { plan.modelStructure().program() };
    let program = program.ok_or_else(|| Failure::Misfit("the plan of what is no ML program".into()))?;
    let body = find(&program, function)?;
    let mut ops = Vec::new();
    // SAFETY: as above.
    let block = unsafe { body.block() };
    walk(&plan, &block, &mut ops);
    Ok(ops)
}

/// Finds a function of a program by its name, or the only function, which the system may name `main`.
fn find(
    program: &MLModelStructureProgram,
    name: &str,
) -> std::result::Result<Retained<MLModelStructureProgramFunction>, Failure> {
    // SAFETY: a plain getter of a living object.
    let functions = unsafe { program.functions() };
    if let Some(found) = functions.objectForKey(&NSString::from_str(name)) {
        return Ok(found);
    }
    let only = functions.keys().next().filter(|_| functions.count() == 1);
    let found = only.and_then(|key| functions.objectForKey(&key));
    found.ok_or_else(|| Failure::Misfit("the plan has no such function".into()))
}

/// Lists the operations of a block and of its nested blocks.
fn walk(plan: &MLComputePlan, block: &MLModelStructureProgramBlock, ops: &mut Vec<OpPlan>) {
    // SAFETY: plain getters of living objects.
    unsafe {
        for operation in block.operations().iter() {
            let usage = plan.computeDeviceUsageForMLProgramOperation(&operation);
            let cost = plan.estimatedCostOfMLProgramOperation(&operation);
            let first = operation.outputs().iter().next();
            ops.push(OpPlan {
                name: first.map(|o| o.name().to_string()).unwrap_or_default(),
                op_type: operation.operatorName().to_string(),
                preferred: usage.as_deref().and_then(preferred),
                supported: usage.as_deref().map(supported).unwrap_or_default(),
                cost: cost.map(|c| c.weight()).filter(|c| c.is_finite()),
            });
            for inside in operation.blocks().iter() {
                walk(plan, &inside, ops);
            }
        }
    }
}

/// Returns the preferred device; `None` for constants, which have none although the binding's type says otherwise.
fn preferred(usage: &MLComputePlanDeviceUsage) -> Option<PlanDevice> {
    // SAFETY: a getter of an object, which may be nil.
    let device: Option<Retained<AnyObject>> = unsafe { msg_send![usage, preferredComputeDevice] };
    device.as_deref().and_then(device_of)
}

fn supported(usage: &MLComputePlanDeviceUsage) -> Vec<PlanDevice> {
    // SAFETY: a getter of an array, which may be nil.
    let all: Option<Retained<NSArray<AnyObject>>> = unsafe { msg_send![usage, supportedComputeDevices] };
    all.map(|all| all.iter().filter_map(|d| device_of(&d)).collect()).unwrap_or_default()
}

fn device_of(device: &AnyObject) -> Option<PlanDevice> {
    if device.downcast_ref::<MLNeuralEngineComputeDevice>().is_some() {
        return Some(PlanDevice::Ane);
    }
    if device.downcast_ref::<MLGPUComputeDevice>().is_some() {
        return Some(PlanDevice::Gpu);
    }
    device.downcast_ref::<MLCPUComputeDevice>().map(|_| PlanDevice::Cpu)
}
