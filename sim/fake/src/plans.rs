//! Fakes of MLComputePlan and of the structure of programs, with placements that tests plant.

use crate::faults::{Fault, error, faults, faults_of};
use crate::features::FakeConfiguration;
use crate::models::{MARK, Sent, on_other_thread};
use anemoe_mlpackage::mil::{Block, DataType, Operation};
use anemoe_runtime::cpu::CpuPackage;
use block2::{DynBlock, RcBlock};
use objc_sim::class;
use objc2::DefinedClass;
use objc2::rc::Retained;
use objc2::runtime::AnyObject;
use objc2_core_ml::MLComputeUnits;
use objc2_foundation::{NSArray, NSDictionary, NSError, NSString, NSURL};
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

class!(FakeNeuralEngine, "MLNeuralEngineComputeDevice", u8, {});
class!(FakeGpu, "MLGPUComputeDevice", u8, {});
class!(FakeCpu, "MLCPUComputeDevice", u8, {});
class!(FakeCost, "MLComputePlanCost", f64, {
    #[unsafe(method(weight))]
    fn weight(&self) -> f64 {
        *self.ivars()
    }
});

/// Device of an operation.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Place {
    Ane,
    Cpu,
    /// The operation has a usage without a device.
    Nowhere,
}

/// A device, and whether only the CPU is allowed.
type Allowed = (Place, bool);
/// A function's name and its block.
type Named = (String, Block);

class!(FakeUsage, "MLComputePlanDeviceUsage", Allowed, {
    #[unsafe(method_id(preferredComputeDevice))]
    fn preferred(&self) -> Option<Retained<AnyObject>> {
        match self.ivars().0 {
            Place::Ane => Some(FakeNeuralEngine::new(0).into_super().into_super()),
            Place::Cpu => Some(FakeCpu::new(0).into_super().into_super()),
            Place::Nowhere => None,
        }
    }
    #[unsafe(method_id(supportedComputeDevices))]
    fn supported(&self) -> Retained<NSArray<AnyObject>> {
        let (place, cpu_only) = *self.ivars();
        let mut all: Vec<Retained<AnyObject>> = Vec::new();
        if place != Place::Nowhere {
            all.push(FakeCpu::new(0).into_super().into_super());
        }
        if place == Place::Ane && !cpu_only {
            all.push(FakeNeuralEngine::new(0).into_super().into_super());
        }
        NSArray::from_retained_slice(&all)
    }
});

class!(FakeNamedType, "MLModelStructureProgramNamedValueType", String, {
    #[unsafe(method_id(name))]
    fn name(&self) -> Retained<NSString> {
        NSString::from_str(self.ivars())
    }
});
class!(FakeOperation, "MLModelStructureProgramOperation", Operation, {
    #[unsafe(method_id(operatorName))]
    fn operator(&self) -> Retained<NSString> {
        NSString::from_str(&format!("ios18.{}", self.ivars().op_type))
    }
    #[unsafe(method_id(outputs))]
    fn outputs(&self) -> Retained<NSArray<FakeNamedType>> {
        let all: Vec<_> = self.ivars().outputs.iter().map(|o| FakeNamedType::new(o.name.clone())).collect();
        NSArray::from_retained_slice(&all)
    }
    #[unsafe(method_id(blocks))]
    fn blocks(&self) -> Retained<NSArray<FakeBlock>> {
        let all: Vec<_> = self.ivars().blocks.iter().map(|b| FakeBlock::new(b.clone())).collect();
        NSArray::from_retained_slice(&all)
    }
});
class!(FakeBlock, "MLModelStructureProgramBlock", Block, {
    #[unsafe(method_id(operations))]
    fn operations(&self) -> Retained<NSArray<FakeOperation>> {
        let all: Vec<_> = self.ivars().operations.iter().map(|o| FakeOperation::new(o.clone())).collect();
        NSArray::from_retained_slice(&all)
    }
});
class!(FakeFunction, "MLModelStructureProgramFunction", Block, {
    #[unsafe(method_id(block))]
    fn block(&self) -> Retained<FakeBlock> {
        FakeBlock::new(self.ivars().clone())
    }
});
class!(FakeProgram, "MLModelStructureProgram", Named, {
    #[unsafe(method_id(functions))]
    fn functions(&self) -> Retained<NSDictionary<NSString, FakeFunction>> {
        let (name, block) = self.ivars();
        let name = NSString::from_str(name);
        NSDictionary::from_retained_objects(&[&*name], &[FakeFunction::new(block.clone())])
    }
});
class!(FakeStructure, "MLModelStructure", Named, {
    #[unsafe(method_id(program))]
    fn program(&self) -> Option<Retained<FakeProgram>> {
        Some(FakeProgram::new(self.ivars().clone()))
    }
});

pub(crate) struct PlanIvars {
    name: String,
    block: Block,
    package: PathBuf,
    cpu_only: bool,
}

type PlanHandler = dyn Fn(*mut FakePlan, *mut NSError);

class!(FakePlan, "MLComputePlan", PlanIvars, {
    #[unsafe(method(loadContentsOfURL:configuration:completionHandler:))]
    fn load(url: &NSURL, configuration: &FakeConfiguration, handler: &DynBlock<PlanHandler>) {
        let folder = PathBuf::from(url.path().unwrap().to_string());
        // Core ML ends the process, too, when the folder is not a compiled model.
        let Ok(package) = fs::read_to_string(folder.join(MARK)) else { std::process::abort() };
        let package = PathBuf::from(package);
        if faults(&package).contains(&Fault::PlanCrash) {
            std::process::abort();
        }
        let cpu_only = configuration.ivars().units.get() == MLComputeUnits::CPUOnly.0;
        if cpu_only && faults(&package).contains(&Fault::PlanCpuCrash) {
            std::process::abort();
        }
        let opened = open(&package, configuration.ivars().function.borrow().as_deref());
        let sent: Sent<(RcBlock<PlanHandler>, _)> = Sent((handler.copy(), opened));
        on_other_thread(move || {
            let (handler, opened) = sent.into_inner();
            match opened {
                Ok((name, block)) => {
                    let plan = FakePlan::new(PlanIvars { name, block, package, cpu_only });
                    handler.call((Retained::autorelease_ptr(plan), null_mut()));
                }
                Err(what) => handler.call((null_mut(), error(0, &what))),
            }
        });
    }
    #[unsafe(method_id(modelStructure))]
    fn structure(&self) -> Retained<FakeStructure> {
        let own = self.ivars();
        FakeStructure::new((own.name.clone(), own.block.clone()))
    }
    #[unsafe(method_id(computeDeviceUsageForMLProgramOperation:))]
    fn usage(&self, operation: &FakeOperation) -> Option<Retained<FakeUsage>> {
        self.usage_of(operation.ivars())
    }
    #[unsafe(method_id(estimatedCostOfMLProgramOperation:))]
    fn cost(&self, operation: &FakeOperation) -> Option<Retained<FakeCost>> {
        (operation.ivars().op_type != "const").then(|| FakeCost::new(0.01))
    }
});

impl FakePlan {
    fn usage_of(&self, operation: &Operation) -> Option<Retained<FakeUsage>> {
        let (own, op) = (self.ivars(), operation.op_type.as_str());
        if op == "const" || op.starts_with("constexpr_") {
            return None;
        }
        let faults = faults_of(&own.package, &own.name);
        let is_product = matches!(op, "conv" | "linear" | "matmul");
        // The Neural Engine computes in fp16: ops with f32 results go to the CPU.
        let is_fp32 =
            operation.outputs.iter().any(|o| o.ty.tensor().is_some_and(|t| t.dtype == DataType::Float32));
        let place = match () {
            () if faults.contains(&Fault::PlanAne) => Place::Ane,
            () if faults.contains(&Fault::PlanNone) => Place::Nowhere,
            () if own.cpu_only || is_fp32 || faults.contains(&Fault::PlanCpu) => Place::Cpu,
            () if is_product && faults.contains(&Fault::PlanProductsCpu) => Place::Cpu,
            () => Place::Ane,
        };
        Some(FakeUsage::new((place, own.cpu_only)))
    }
}

/// Returns a function's name and its block.
fn open(package: &Path, function: Option<&str>) -> Result<(String, Block), String> {
    if faults(package).contains(&Fault::PlanError) {
        return Err("Failed to build the compute plan: planted".into());
    }
    let opened = CpuPackage::open(package).map_err(|e| e.to_string())?;
    let model = opened.package().model();
    let name = function.unwrap_or(&model.default_function).to_string();
    let body = model.program.functions.get(&name).ok_or_else(|| format!("no function {name}"))?;
    Ok((name, body.block.clone()))
}
