//! Packages on the CPU: each function is compiled at its first use.

use super::batch::{KeptFunctions, StagedFunction};
use super::bindings::{constant, names};
use super::cache_states::{divide_states, make_state_of};
use super::classifier::Classifier;
use super::function::CompiledFunction;
use super::fused::experts::{self, ExpertPack, SumTarget, are_alike};
use super::plans_by_tokens::{PlansByTokens, ReadFunction};
use super::shared_constants::CompileContext;
use super::tokens::{keep_rows, stages};
use super::weights::const_value;
use super::{CpuStates, INLINE_TERMS, Options, Precision, compile};
use crate::backend::{
    self, Backend, BackendFunction, CallTokens, Counts, FunctionCall, KeptCache, KeptRows, OpTime, Term,
    Times,
};
use crate::tensor::Tensor;
use crate::{Error, Result};
use anemoe_io::locked;
use anemoe_mlpackage::mil::{
    Block, DataType, Feature, FeatureShape, Function, FunctionDescription, Operation, ValueType,
};
use anemoe_mlpackage::package::{Package, WeightFiles};
use smallvec::{SmallVec, smallvec};
use std::any::Any;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// An opened package whose functions are compiled one by one, for callers that run single packages.
#[derive(Clone)]
pub struct CpuPackage {
    package: Arc<Package>,
}

impl CpuPackage {
    /// Opens a package.
    ///
    /// # Errors
    /// The package is missing or invalid.
    pub fn open(path: &Path) -> Result<CpuPackage> {
        Ok(CpuPackage::of(Package::open(path)?))
    }

    /// Takes an opened package.
    pub fn of(package: Package) -> CpuPackage {
        CpuPackage { package: Arc::new(package) }
    }

    /// Returns the package.
    pub fn package(&self) -> &Package {
        &self.package
    }

    /// Compiles a function; the default function when none is named. A classifier has its tensor of probabilities as output,
    /// in place of what [`CpuPackage::classifier`] names.
    ///
    /// # Errors
    /// There is no such function, or it uses an operation or a form that is not implemented (named in the error).
    pub fn compile(&self, function: Option<&str>, options: Options) -> Result<CompiledFunction> {
        let (body, described) = self.function(function)?;
        let context = CompileContext { package: &self.package, options, constants: None };
        match self.classifier(function)? {
            None => compile::compile(context, &described.name, body, described),
            Some(classifier) => {
                let (body, described) = classifier.without(body, described);
                compile::compile(context, &described.name, &body, &described)
            }
        }
    }

    /// Compiles a function like [`CpuPackage::compile`]; its outputs are those tensors that its operations make, in order, whose names
    /// `keep` takes: not constants, nor what nested blocks keep to themselves.
    ///
    /// # Errors
    /// Fails like [`CpuPackage::compile`].
    pub fn compile_traced(
        &self,
        function: Option<&str>,
        options: Options,
        keep: &dyn Fn(&str) -> bool,
    ) -> Result<CompiledFunction> {
        let (body, described) = self.function(function)?;
        let (mut body, mut described) = (body.clone(), described.clone());
        body.block.operations.retain(|op| op.op_type != "classify");
        let made = body.block.operations.iter().filter(|op| !op.op_type.starts_with("const"));
        let tensors = made.flat_map(|op| &op.outputs).filter_map(|output| match &output.ty {
            ValueType::Tensor(ty) if ty.dtype != DataType::String && keep(&output.name) => {
                Some(Feature::array(&output.name, ty.dtype, FeatureShape::Dynamic))
            }
            _ => None,
        });
        described.outputs = tensors.collect();
        body.block.outputs = described.outputs.iter().map(|f| f.name.clone()).collect();
        let context = CompileContext { package: &self.package, options, constants: None };
        compile::compile(context, &described.name, &body, &described)
    }

    /// Computes a constant of a function: a `const`, or what a `constexpr_*` operation stands for.
    ///
    /// # Errors
    /// There is no such constant, or it has a form that is not implemented.
    pub fn constant(&self, function: &str, name: &str) -> Result<Tensor> {
        let (body, described) = self.function(Some(function))?;
        let block = Block {
            inputs: Vec::new(),
            operations: constants_of(&body.block, name),
            outputs: vec![name.to_string()],
        };
        let body = Function { inputs: Vec::new(), opset: body.opset, block };
        let output = Feature::array(name, DataType::Float32, FeatureShape::Dynamic);
        let described =
            FunctionDescription { name: described.name.clone(), outputs: vec![output], ..Default::default() };
        let options = Options { precision: Precision::Fp32, fuse: false, ..Options::default() };
        let context = CompileContext { package: &self.package, options, constants: None };
        let mut outputs = Vec::new();
        compile::compile(context, function, &body, &described)?.run(
            &[],
            &mut CpuStates::default(),
            &mut outputs,
        )?;
        Ok(outputs.swap_remove(0))
    }

    /// Returns the classifier of a function; `None` where it is none.
    ///
    /// # Errors
    /// There is no such function, or its operation `classify` is wrong.
    pub fn classifier(&self, function: Option<&str>) -> Result<Option<Classifier>> {
        Classifier::of(self.function(function)?.0, self.package.path())
    }

    /// Returns the description of a function; of the default function when none is named.
    ///
    /// # Errors
    /// There is no such function.
    pub fn description(&self, function: Option<&str>) -> Result<&FunctionDescription> {
        Ok(self.function(function)?.1)
    }

    /// Returns the program and the description of a function; of the default function when none is named.
    fn function(&self, function: Option<&str>) -> Result<(&Function, &FunctionDescription)> {
        let model = self.package.model();
        let name = function.unwrap_or(&model.default_function);
        let described = model.functions.iter().find(|f| f.name == name);
        let (Some(body), Some(described)) = (model.program.functions.get(name), described) else {
            let known: Vec<&str> = model.functions.iter().map(|f| f.name.as_str()).collect();
            return Err(Error::invalid(
                self.package.path(),
                format!("use: no function `{name}`; there is {}", known.join(", ")),
            ));
        };
        Ok((body, described))
    }
}

/// Copies the operation that makes the constant `name`, and what it is made from, in order.
fn constants_of(block: &Block, name: &str) -> Vec<Operation> {
    let (mut needed, mut found) = (vec![name], Vec::new());
    // Operands stand before what is made from them.
    for op in block.operations.iter().rev().filter(|op| op.op_type.starts_with("const")) {
        if !op.outputs.iter().any(|output| needed.contains(&output.name.as_str())) {
            continue;
        }
        needed.extend(names(op));
        found.push(op.clone());
    }
    found.reverse();
    found
}

/// Reads the constant `name` of a function of the package at `path`; none where it has none.
///
/// # Errors
/// The package is missing or invalid.
pub(crate) fn read_constant(path: &Path, function: &str, name: &str) -> Result<Option<Vec<f32>>> {
    let package = Package::open_to_run(path, &[function], &WeightFiles::default())?;
    let body = package.model().program.functions.get(function);
    let value = body.and_then(|f| constant(&f.block.operations, name)).cloned();
    let Some(value) = value else { return Ok(None) };
    let tensor = const_value(&Arc::new(package), &value).and_then(|constant| constant.to_tensor());
    Ok(tensor.ok().and_then(|tensor| tensor.as_f32().map(<[f32]>::to_vec)))
}

/// Runs packages on this machine's CPU.
#[derive(Clone, Copy, Debug)]
pub struct CpuBackend {
    /// Options of execution, for all functions.
    pub options: Options,
}

impl Default for CpuBackend {
    /// Makes an exact backend: weights as stored, everything else in f32.
    fn default() -> Self {
        CpuBackend::with(Precision::Fp32)
    }
}

impl CpuBackend {
    /// Makes a backend with this rounding of results.
    pub fn with(precision: Precision) -> Self {
        CpuBackend { options: Options { precision, ..Options::default() } }
    }
}

impl Backend for CpuBackend {
    fn open_with(&self, path: &Path, caches: &[KeptCache]) -> Result<Box<dyn backend::BackendPackage>> {
        // An invalid package fails here, not at its first function.
        Package::open_to_run(path, &[], &WeightFiles::default())?;
        Ok(Box::new(LoadedPackage {
            weights: Mutex::default(),
            path: path.to_path_buf(),
            caches: caches.to_vec(),
            options: self.options,
            functions: Mutex::default(),
            resized: KeptFunctions::new(),
            staged: Mutex::default(),
            plans_by_tokens: Mutex::default(),
        }))
    }
}

/// A package whose functions are compiled at their first use.
struct LoadedPackage {
    /// Weight files, mapped for the compiled functions.
    weights: Mutex<WeightFiles>,
    path: PathBuf,
    /// Caches that become states of functions.
    caches: Vec<KeptCache>,
    options: Options,
    /// Compiled functions by name.
    functions: Mutex<BTreeMap<String, Arc<CompiledFunction>>>,
    /// Functions compiled for a token count, by name and count.
    resized: KeptFunctions<(String, usize)>,
    /// Functions in stages, for batches, by name; none for functions that cannot be split into stages.
    staged: Mutex<BTreeMap<String, Option<Arc<StagedFunction>>>>,
    /// The function that was last compiled for a token count, as read from the package, with its name.
    plans_by_tokens: Mutex<Option<(String, Arc<PlansByTokens>)>>,
}

impl LoadedPackage {
    /// Returns every function that is compiled and kept.
    fn compiled(&self) -> Vec<Arc<CompiledFunction>> {
        let mut all: Vec<Arc<CompiledFunction>> = locked(&self.functions).values().cloned().collect();
        all.extend(self.resized.all());
        let staged = locked(&self.staged);
        all.extend(
            staged.values().flatten().flat_map(|staged| staged.functions()).flat_map(KeptFunctions::all),
        );
        all
    }

    /// Reads a function, makes states of its caches, and has its callers keep the rows that it carries. Programs take more memory than
    /// compiled functions, so only one of each package is kept, see [`LoadedPackage::plans_by_tokens`].
    fn read(&self, function: &str) -> Result<ReadFunction> {
        let weights = locked(&self.weights).clone();
        let package = Package::open_to_run(&self.path, &[function], &weights)?;
        locked(&self.weights).extend(package.weights());
        let package = CpuPackage { package: Arc::new(package) };
        let (body, described) = package.function(Some(function))?;
        let (mut body, mut described) = (body.clone(), described.clone());
        let takes = |cache: &&KeptCache| described.inputs.iter().any(|i| i.name == cache.sign());
        let caches: Vec<&KeptCache> = self.caches.iter().filter(takes).collect();
        for cache in caches {
            make_state_of(&mut body, &mut described, cache).map_err(|what| {
                let what = format!("function `{function}`: cache `{}`: {what}", cache.input);
                Error::invalid(&self.path, what)
            })?;
        }
        divide_states(&mut body, &mut described)
            .map_err(|what| Error::invalid(&self.path, format!("function `{function}`: {what}")))?;
        let carried = keep_rows(&mut body, &mut described).map(Arc::new);
        Ok(ReadFunction { package: package.package, body, described, carried })
    }

    /// Returns a function as read, from which functions for token counts are compiled. Reading takes as long as compiling, so the
    /// last one is kept.
    fn plans_by_tokens(&self, function: &str) -> Result<Arc<PlansByTokens>> {
        if let Some((name, read)) = &*locked(&self.plans_by_tokens)
            && name == function
        {
            return Ok(Arc::clone(read));
        }
        let read = Arc::new(PlansByTokens::new(self.read(function)?, self.options));
        *locked(&self.plans_by_tokens) = Some((function.to_string(), Arc::clone(&read)));
        Ok(read)
    }

    /// Returns a function for `tokens` tokens of one sequence; none where it only runs as it is declared.
    fn resized(
        &self,
        function: &str,
        axes: &BTreeMap<String, usize>,
        declared: usize,
        tokens: usize,
    ) -> Result<Option<Arc<dyn BackendFunction>>> {
        let make = || {
            let plans = self.plans_by_tokens(function).map_err(Some)?;
            plans.for_tokens(axes, declared, tokens).map_err(|_| None)
        };
        match self.resized.get((function.to_string(), tokens), make) {
            Ok(function) => Ok(Some(function)),
            Err(None) => Ok(None),
            Err(Some(e)) => Err(e),
        }
    }

    /// Returns a function for tokens of several sequences; none where it cannot be split into stages.
    fn staged(
        &self,
        function: &str,
        axes: &BTreeMap<String, usize>,
        declared: usize,
    ) -> Result<Option<Arc<dyn BackendFunction>>> {
        let found = locked(&self.staged).get(function).cloned();
        let staged = match found {
            Some(found) => found,
            None => {
                let ReadFunction { package, body, described, carried } = self.read(function)?;
                let made = stages(&body, &described, axes, declared).and_then(|stages| {
                    StagedFunction::new(package, self.options, described, carried, stages)
                });
                locked(&self.staged).entry(function.to_string()).or_insert(made.map(Arc::new)).clone()
            }
        };
        Ok(staged.map(|staged| staged as Arc<dyn BackendFunction>))
    }
}

impl backend::BackendPackage for LoadedPackage {
    fn prepare(&self, function: &str) -> Result<Arc<dyn BackendFunction>> {
        if let Some(found) = locked(&self.functions).get(function) {
            return Ok(found.clone());
        }
        let ReadFunction { package, body, described, carried } = self.read(function)?;
        let context = CompileContext { package: &package, options: self.options, constants: None };
        let mut compiled = compile::compile(context, &described.name, &body, &described)?;
        compiled.set_carried(carried.as_ref());
        Ok(locked(&self.functions).entry(function.to_string()).or_insert(Arc::new(compiled)).clone())
    }

    fn prepare_for(
        &self,
        function: &str,
        axes: &BTreeMap<String, usize>,
        declared: usize,
        tokens: CallTokens,
    ) -> Result<Option<Arc<dyn BackendFunction>>> {
        match tokens {
            CallTokens::Exactly(tokens) => self.resized(function, axes, declared, tokens),
            CallTokens::OfSequences => self.staged(function, axes, declared),
        }
    }

    fn new_states(&self) -> Box<dyn backend::SequenceStates> {
        Box::new(CpuStates::default())
    }

    fn populate(&self) -> Option<Box<dyn FnOnce() + Send>> {
        let weights = locked(&self.weights).clone();
        Some(Box::new(move || weights.populate()))
    }

    fn counts(&self) -> Counts {
        let mut all = self.resized.gone();
        let staged = locked(&self.staged);
        staged.values().flatten().flat_map(|staged| staged.functions()).for_each(|kept| all += kept.gone());
        drop(staged);
        self.compiled().iter().for_each(|f| all += f.counts());
        all
    }

    fn op_times(&self) -> Vec<OpTime> {
        self.compiled().iter().flat_map(|f| f.op_times()).collect()
    }

    fn release(&self) {
        locked(&self.weights).release();
        self.compiled().iter().for_each(|f| f.release());
        super::fused::release_memory();
    }
}

impl BackendFunction for CompiledFunction {
    fn inputs(&self) -> &[String] {
        &self.input_names
    }

    fn outputs(&self) -> &[String] {
        &self.output_names
    }

    fn has_states(&self) -> bool {
        !self.states().is_empty()
    }

    fn kept_rows(&self) -> &[KeptRows] {
        self.carried.as_ref().map_or(&[], |carried| &carried.kept)
    }

    fn run(&self, call: FunctionCall<'_, '_>, outputs: &mut Vec<Tensor>) -> Result<()> {
        let (inputs, states) = call.of_one()?;
        if !self.has_states() {
            return CompiledFunction::run(self, &inputs, &mut CpuStates::default(), outputs).map(|_| ());
        }
        let states = states.and_then(|states| {
            let states: &mut dyn Any = states;
            states.downcast_mut::<CpuStates>()
        });
        let states = states.ok_or_else(|| Error::input("states of another backend"))?;
        states.add_states_of(self).map_err(|what| Error::invalid(self.path(), what))?;
        states.may_stay = false;
        CompiledFunction::run(self, &inputs, states, outputs)?;
        // Only a function that holds all states of the package knows everything that is carried.
        states.may_stay = self.may_stay && self.states().len() == states.names().len();
        Ok(())
    }

    fn run_sum(&self, terms: &[Term<'_>], sum: &mut Tensor) -> Result<Times> {
        let started = Instant::now();
        let mut functions: SmallVec<[&CompiledFunction; INLINE_TERMS]> = SmallVec::new();
        let mut packs: SmallVec<[ExpertPack<'_>; INLINE_TERMS]> = SmallVec::new();
        for term in terms {
            let function: &dyn Any = term.function;
            let function = function.downcast_ref::<CompiledFunction>();
            let Some((function, pack)) =
                function.and_then(|f| Some((f, f.plan()?.expert_pack(term.inputs)?)))
            else {
                return backend::run_each(terms, sum);
            };
            function.check_inputs(term.inputs)?;
            functions.push(function);
            packs.push(pack);
        }
        let n = sum.as_f32().map_or(0, <[f32]>::len);
        let Some(to) = sum.as_f32_mut().filter(|_| are_alike(&packs, n)) else {
            return backend::run_each(terms, sum);
        };
        let mut counts: SmallVec<[Counts; INLINE_TERMS]> = smallvec![Counts::default(); packs.len()];
        experts::sum(&packs, SumTarget::Added(to), &mut counts);
        let (time, all) = (started.elapsed(), counts.iter().map(|c| c.bytes_read).sum::<u64>());
        let share = |bytes: u64| if all > 0 { bytes as f64 / all as f64 } else { 1.0 / packs.len() as f64 };
        let times: Times = counts.iter().map(|c| time.mul_f64(share(c.bytes_read))).collect();
        functions.iter().zip(counts).zip(&times).for_each(|((f, counts), time)| f.count_term(counts, *time));
        Ok(times)
    }
}
