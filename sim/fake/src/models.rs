//! Fakes of MLModel, MLModelDescription and MLState.

use crate::arrays::FakeArray;
use crate::faults::{Fault, error, faults, faults_of, hang, log, raise};
use crate::features::{FakeConfiguration, FakeFeature, FakeOptions, FakeResult, FakeValue, fits, kind_of};
use anemoe_mlpackage::mil::{Feature, FunctionDescription};
use anemoe_runtime::backend::BackendFunction;
use anemoe_runtime::cpu::{CompiledFunction, CpuPackage, CpuStates, Options};
use anemoe_runtime::tensor::{Data, Tensor};
use block2::{DynBlock, RcBlock};
use objc_sim::class;
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::AnyObject;
use objc2::{DefinedClass, Message, msg_send};
use objc2_core_ml::{MLComputeUnits, MLMultiArray, MLMultiArrayDataType};
use objc2_foundation::{NSDictionary, NSError, NSString, NSURL};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

/// File of every compiled model; holds the path of its package.
pub(crate) const MARK: &str = "coremldata.bin";
/// File that makes a compiled model one of another system.
const STALE: &str = "stale";

/// Threads that call handlers, until [`settle`] joins them.
static THREADS: Mutex<Vec<JoinHandle<()>>> = Mutex::new(Vec::new());
/// Numbers of living models; states know their makers by them.
static LIVING: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

/// Waits until every handler has run and its thread has ended.
pub fn settle() {
    let threads = std::mem::take(&mut *THREADS.lock().unwrap());
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// Returns the number of models that are loaded.
pub fn loaded() -> usize {
    LIVING.lock().unwrap().len()
}

/// Runs `work` on a thread of its own while messages of all other threads wait: objects that it releases are gone
/// before anyone uses them.
pub(crate) fn on_other_thread(work: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(move || objc_sim::hold(|| autoreleasepool(|_| work())));
    THREADS.lock().unwrap().push(thread);
}

/// A value that one thread at a time uses.
pub(crate) struct Sent<T>(pub T);
// SAFETY: blocks and objects of the fake may be used on any thread.
unsafe impl<T> Send for Sent<T> {}
impl<T> Sent<T> {
    pub fn into_inner(self) -> T {
        self.0
    }
}

pub(crate) struct StateIvars {
    states: Mutex<CpuStates>,
    package: PathBuf,
    maker: usize,
    busy: AtomicBool,
}

class!(FakeState, "MLState", StateIvars, {
    #[unsafe(method(getMultiArrayForStateNamed:handler:))]
    fn get(&self, name: &NSString, handler: &DynBlock<dyn Fn(NonNull<MLMultiArray>)>) {
        let name = name.to_string();
        let mut states = self.states();
        let Some(value) = states.get(&name) else { raise(&format!("no state {name}")) };
        // Each call gets new memory, which is overwritten afterwards; what was written is copied back.
        autoreleasepool(|_| {
            let view = FakeArray::shown(&value, MLMultiArrayDataType::Float16.0);
            handler.call((NonNull::from(view.as_array()),));
            states.set(&name, view.ivars().read()).unwrap();
            view.ivars().spoil();
        });
    }
});

impl FakeState {
    fn states(&self) -> MutexGuard<'_, CpuStates> {
        let ivars = self.ivars();
        if !LIVING.lock().unwrap().contains(&ivars.maker) {
            raise("a state whose model is gone");
        }
        ivars.states.lock().unwrap_or_else(|e| e.into_inner())
    }
}

class!(FakeDescription, "MLModelDescription", FunctionDescription, {
    #[unsafe(method_id(inputDescriptionsByName))]
    fn inputs(&self) -> Retained<NSDictionary<NSString, FakeFeature>> {
        describe(&self.ivars().inputs)
    }
    #[unsafe(method_id(outputDescriptionsByName))]
    fn outputs(&self) -> Retained<NSDictionary<NSString, FakeFeature>> {
        describe(&self.ivars().outputs)
    }
    #[unsafe(method_id(stateDescriptionsByName))]
    fn states(&self) -> Retained<NSDictionary<NSString, FakeFeature>> {
        describe(&self.ivars().states)
    }
});

fn describe(features: &[Feature]) -> Retained<NSDictionary<NSString, FakeFeature>> {
    by_name(features, &features.iter().cloned().map(FakeFeature::new).collect::<Vec<_>>())
}

/// Makes a dictionary of values by their features' names.
fn by_name<T: Message>(features: &[Feature], values: &[Retained<T>]) -> Retained<NSDictionary<NSString, T>> {
    let names: Vec<_> = features.iter().map(|f| NSString::from_str(&f.name)).collect();
    let names: Vec<&NSString> = names.iter().map(|n| &**n).collect();
    NSDictionary::from_retained_objects(&names, values)
}

pub(crate) struct ModelIvars {
    number: usize,
    package: PathBuf,
    function: CompiledFunction,
    described: FunctionDescription,
    calls: AtomicUsize,
}

impl Drop for ModelIvars {
    fn drop(&mut self) {
        LIVING.lock().unwrap().remove(&self.number);
    }
}

type LoadHandler = dyn Fn(*mut FakeModel, *mut NSError);
type CompileHandler = dyn Fn(*mut NSURL, *mut NSError);

class!(FakeModel, "MLModel", ModelIvars, {
    #[unsafe(method(compileModelAtURL:completionHandler:))]
    fn compile(url: &NSURL, handler: &DynBlock<CompileHandler>) {
        let package = PathBuf::from(url.path().unwrap().to_string());
        let handler: Sent<RcBlock<CompileHandler>> = Sent(handler.copy());
        on_other_thread(move || {
            let handler = handler.into_inner();
            match compiled(&package) {
                Ok(folder) => {
                    let url = NSURL::fileURLWithPath(&NSString::from_str(folder.to_str().unwrap()));
                    handler.call((Retained::autorelease_ptr(url), null_mut()));
                }
                Err(what) => handler.call((null_mut(), error(0, &what))),
            }
        });
    }

    #[unsafe(method(loadContentsOfURL:configuration:completionHandler:))]
    fn load(url: &NSURL, configuration: &FakeConfiguration, handler: &DynBlock<LoadHandler>) {
        let folder = PathBuf::from(url.path().unwrap().to_string());
        let package = fs::read_to_string(folder.join(MARK)).map(PathBuf::from);
        let named = configuration.ivars().function.borrow().clone().unwrap_or_default();
        let faults = package.as_ref().map(|p| faults_of(p, &named)).unwrap_or_default();
        if faults.contains(&Fault::LoadCrash) {
            std::process::abort();
        }
        if faults.contains(&Fault::LoadException) {
            raise("planted at load");
        }
        let units = [MLComputeUnits::CPUAndNeuralEngine.0, MLComputeUnits::CPUOnly.0];
        if !units.contains(&configuration.ivars().units.get()) {
            raise("compute units that nobody asked for");
        }
        if faults.contains(&Fault::NoAnswer) {
            return;
        }
        let function = configuration.ivars().function.borrow().clone();
        let opened = match package {
            Ok(_) if faults.contains(&Fault::NoPlan) || folder.join(STALE).exists() => {
                let what = "Failed to build the model execution plan using a model architecture file with error code: -14.";
                Err((0, what.to_string()))
            }
            Ok(package) => open(&package, function.as_deref()).map_err(|what| (0, what)),
            Err(_) => {
                Err((0, format!("Unable to load model: {}. Compile the model with Xcode.", folder.display())))
            }
        };
        let sent = Sent((handler.copy(), opened));
        on_other_thread(move || {
            let (handler, opened) = sent.into_inner();
            for fault in &faults {
                if let Fault::LoadSlow(milliseconds) = fault {
                    std::thread::sleep(Duration::from_millis(*milliseconds as u64));
                }
            }
            log("loaded");
            match opened {
                Ok(_) if faults.contains(&Fault::LoadHang) => hang(),
                Ok(_) if faults.contains(&Fault::EmptyAnswer) => handler.call((null_mut(), null_mut())),
                Ok(ivars) => {
                    handler.call((Retained::autorelease_ptr(FakeModel::new(ivars)), null_mut()));
                }
                Err((code, what)) => handler.call((null_mut(), error(code, &what))),
            }
        });
    }

    #[unsafe(method_id(modelDescription))]
    fn modelDescription(&self) -> Retained<FakeDescription> {
        FakeDescription::new(self.ivars().described.clone())
    }

    #[unsafe(method_id(newState))]
    fn newState(&self) -> Retained<FakeState> {
        let ivars = self.ivars();
        if ivars.described.states.is_empty() {
            raise("a model without states");
        }
        FakeState::new(StateIvars {
            states: Mutex::new(CpuStates::new(&ivars.function)),
            package: ivars.package.clone(),
            maker: ivars.number,
            busy: AtomicBool::new(false),
        })
    }

    #[unsafe(method_id(predictionFromFeatures:options:error:))]
    fn predict(
        &self,
        features: &AnyObject,
        options: &FakeOptions,
        out: *mut *mut NSError,
    ) -> Option<Retained<FakeResult>> {
        if !self.ivars().described.states.is_empty() {
            raise("a stateful model needs a state");
        }
        self.run(features, &mut CpuStates::default(), options, out)
    }

    #[unsafe(method_id(predictionFromFeatures:usingState:options:error:))]
    fn predict_with_state(
        &self,
        features: &AnyObject,
        state: &FakeState,
        options: &FakeOptions,
        out: *mut *mut NSError,
    ) -> Option<Retained<FakeResult>> {
        let own = state.ivars();
        assert!(
            !own.busy.swap(true, Ordering::SeqCst),
            "fake Core ML: two predictions on one state at a time"
        );
        if own.package != self.ivars().package {
            raise("a state of another package");
        }
        let result = self.run(features, &mut state.states(), options, out);
        own.busy.store(false, Ordering::SeqCst);
        result
    }
});

/// Makes the folder of a compiled model. Returns its path, or an error in words.
fn compiled(package: &Path) -> Result<PathBuf, String> {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    for fault in faults(package) {
        match fault {
            Fault::NotCompiled => return Err("Error compiling model: planted".into()),
            Fault::CompileCrash => std::process::abort(),
            Fault::CompileHang => hang(),
            _ => {}
        }
    }
    CpuPackage::open(package).map_err(|e| format!("Error compiling model: {e}"))?;
    let number = NUMBER.fetch_add(1, Ordering::SeqCst);
    let folder = std::env::temp_dir().join(format!("fake-coreml-{}-{number}.mlmodelc", std::process::id()));
    fs::create_dir_all(&folder).map_err(|e| e.to_string())?;
    fs::write(folder.join(MARK), package.to_str().unwrap()).map_err(|e| e.to_string())?;
    Ok(folder)
}

/// Opens a function of a package.
fn open(package: &Path, function: Option<&str>) -> Result<ModelIvars, String> {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let opened = CpuPackage::open(package).map_err(|e| e.to_string())?;
    let model = opened.package().model();
    if model.functions.len() == 1 && function.is_some() {
        return Err("a model of one function, and a function's name".into());
    }
    let name = function.unwrap_or(&model.default_function);
    let described = model.functions.iter().find(|f| f.name == name).cloned();
    let described = described.ok_or_else(|| format!("function {name} does not exist in the model"))?;
    let function = opened.compile(function, Options::default()).map_err(|e| e.to_string())?;
    let number = NUMBER.fetch_add(1, Ordering::SeqCst);
    LIVING.lock().unwrap().insert(number);
    Ok(ModelIvars { number, package: package.to_path_buf(), function, described, calls: AtomicUsize::new(0) })
}

impl FakeModel {
    fn run(
        &self,
        features: &AnyObject,
        states: &mut CpuStates,
        options: &FakeOptions,
        out: *mut *mut NSError,
    ) -> Option<Retained<FakeResult>> {
        match self.try_run(features, states, options) {
            Ok(result) => Some(result),
            Err((code, what)) => {
                // SAFETY: `out` points to the caller's error.
                unsafe { *out = error(code, &what) };
                None
            }
        }
    }

    fn try_run(
        &self,
        features: &AnyObject,
        states: &mut CpuStates,
        options: &FakeOptions,
    ) -> Result<Retained<FakeResult>, (isize, String)> {
        let ivars = self.ivars();
        let faults = faults_of(&ivars.package, &ivars.described.name);
        let calls = ivars.calls.fetch_add(1, Ordering::SeqCst);
        for fault in &faults {
            match *fault {
                Fault::Error(right) if calls >= right => {
                    return Err((29, "Unable to compute the prediction: 0x1d".into()));
                }
                Fault::Exception(right) if calls >= right => raise("planted at predict"),
                Fault::Crash(right) if calls >= right => std::process::abort(),
                Fault::Hang(right) if calls >= right => hang(),
                Fault::Leak(bytes) => std::mem::forget(vec![1u8; bytes]),
                Fault::Slow(microseconds) => std::thread::sleep(Duration::from_micros(microseconds as u64)),
                _ => {}
            }
        }
        let inputs: Vec<Tensor> =
            ivars.described.inputs.iter().map(|f| input(features, f)).collect::<Result<_, _>>()?;
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        let mut outputs = Vec::new();
        BackendFunction::run(&ivars.function, &inputs, states, &mut outputs)
            .map_err(|e| (0, e.to_string()))?;
        for fault in &faults {
            match *fault {
                Fault::Wrong(right) if calls >= right => {
                    change(&mut outputs, |i, v| if i % 2 == 0 { -v } else { v })
                }
                Fault::NotNumbers(right) if calls >= right => change(&mut outputs, |_, _| f32::NAN),
                _ => {}
            }
        }
        let mut values = Vec::new();
        for (feature, tensor) in ivars.described.outputs.iter().zip(&outputs) {
            let backing = options.backing(&feature.name);
            let value = match backing.filter(|_| !faults.contains(&Fault::NoBackings)) {
                Some(backing) => {
                    let array = FakeArray::behind(&backing);
                    if !fits(feature, array) || array.ivars().shape != tensor.shape {
                        return Err((1, format!("output backing {} does not fit", feature.name)));
                    }
                    array.ivars().write(tensor);
                    FakeValue::new(backing)
                }
                None => FakeValue::new(FakeArray::result(tensor, kind_of(feature.dtype)).as_array().retain()),
            };
            values.push((feature.name.clone(), value));
        }
        Ok(FakeResult::new(values))
    }
}

/// Replaces every number `v` of the results, at index `i` of its tensor, by `with(i, v)`.
fn change(outputs: &mut [Tensor], with: impl Fn(usize, f32) -> f32) {
    for output in outputs {
        if let Data::F32(values) = &mut output.data {
            values.iter_mut().enumerate().for_each(|(i, v)| *v = with(i, *v));
        }
    }
}

/// Reads an input from an object that provides features.
fn input(features: &AnyObject, feature: &Feature) -> Result<Tensor, (isize, String)> {
    let name = NSString::from_str(&feature.name);
    // SAFETY: a method of the protocol MLFeatureProvider.
    let value: Option<Retained<AnyObject>> = unsafe { msg_send![features, featureValueForName: &*name] };
    let value = value.ok_or_else(|| (1, format!("Feature {name} is required but not specified.")))?;
    let value =
        value.downcast::<FakeValue>().unwrap_or_else(|v| raise(&format!("{v:?} is no MLFeatureValue")));
    if !fits(feature, value.array()) {
        let shape = &value.array().ivars().shape;
        return Err((
            1,
            format!("MultiArray shape {shape:?} does not match the shape {} of {name}", feature.shape),
        ));
    }
    Ok(value.array().ivars().read())
}
