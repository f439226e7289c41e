//! Packages and functions of the Core ML backend, as the model runner sees them.

use super::coreml_states::{CoreMlStates, StatesInfo};
use super::failure::Failure;
use super::interface::{CacheSlot, Interface, StateSlot, UndoRule, states_of, undo_rule};
use super::loading::{Engine, Loadable};
use crate::settings::CoreMlSettings;
use crate::{Error, Result};
use anemoe_mlpackage::mil::FunctionDescription;
use anemoe_mlpackage::package::{Package, WeightFiles};
use anemoe_runtime::backend::{
    Backend, BackendFunction, BackendPackage, FunctionCall, KeptCache, NoStates, SequenceStates,
};
use anemoe_runtime::tensor::Tensor;
use std::any::Any;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Runs packages on the Neural Engine.
pub struct CoreMlBackend {
    engine: Arc<Engine>,
    settings: CoreMlSettings,
}

impl CoreMlBackend {
    /// Starts Core ML with its thread.
    ///
    /// # Errors
    /// The system has no Core ML, or a version before macOS 15.
    pub fn new(settings: CoreMlSettings) -> Result<CoreMlBackend> {
        let engine = Arc::new(Engine::start(settings.max_loaded_bytes, settings.units)?);
        Ok(CoreMlBackend { engine, settings })
    }
}

impl Backend for CoreMlBackend {
    fn open_with(&self, path: &Path, caches: &[KeptCache]) -> Result<Box<dyn BackendPackage>> {
        let compiled = self.settings.compiled.expect(path)?;
        let package = Package::open_to_run(path, &[], &WeightFiles::default())?;
        let model = package.model();
        let slots = states_of(&model.functions).map_err(|e| e.at(path, "states"))?;
        let arrays = caches_of(path, &model.functions, caches)?;
        Ok(Box::new(CoreMlPackage {
            engine: self.engine.clone(),
            compiled,
            path: path.to_path_buf(),
            has_names: model.functions.len() > 1,
            bytes: folder_bytes(path)?,
            states: Arc::new(StatesInfo {
                package: path.to_path_buf(),
                slots: slots.into(),
                caches: arrays.into(),
                rule: OnceLock::new(),
            }),
            caches: caches.to_vec(),
            functions: Mutex::default(),
        }))
    }
}

/// Returns the caches that the functions of a package take, each with the slots of the whole cache. Functions that take
/// caches must take the same.
fn caches_of(path: &Path, functions: &[FunctionDescription], caches: &[KeptCache]) -> Result<Vec<StateSlot>> {
    let mut arrays: Option<Vec<StateSlot>> = None;
    for described in functions.iter().filter(|_| !caches.is_empty()) {
        let at = |failure: Failure| failure.at(path, &described.name);
        let interface = Interface::of(described, caches).map_err(at)?;
        let whole = |(slot, cache): (CacheSlot, &KeptCache)| {
            let mut whole = slot.cache;
            match whole.shape.get_mut(2) {
                Some(slots) if *slots <= cache.slots => *slots = cache.slots,
                own => {
                    return Err(at(Failure::Misfit(format!(
                        "cache `{}`: {} slots, where the whole cache has {}",
                        cache.input,
                        own.map_or(0, |n| *n),
                        cache.slots
                    ))));
                }
            }
            Ok(whole)
        };
        let own = interface.caches.into_iter().zip(caches).map(whole).collect::<Result<Vec<_>>>()?;
        match &arrays {
            _ if own.is_empty() => {}
            Some(others) if *others != own => {
                return Err(at(Failure::Misfit("other caches than the package's other functions".into())));
            }
            _ => arrays = Some(own),
        }
    }
    Ok(arrays.unwrap_or_default())
}

/// Returns the bytes of all files in a folder and its subfolders.
fn folder_bytes(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    let failed = |e| Error::io(folder, e);
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let about = entry.metadata().map_err(failed)?;
        bytes += if about.is_dir() { folder_bytes(&entry.path())? } else { about.len() };
    }
    Ok(bytes)
}

/// A package. Its functions are loaded on first use.
struct CoreMlPackage {
    engine: Arc<Engine>,
    compiled: PathBuf,
    path: PathBuf,
    /// True if the package has several functions, which Core ML then knows by name.
    has_names: bool,
    bytes: u64,
    states: Arc<StatesInfo>,
    /// Caches that the host keeps for the package's functions.
    caches: Vec<KeptCache>,
    functions: Mutex<BTreeMap<String, Arc<CoreMlFunction>>>,
}

impl CoreMlPackage {
    fn function(&self, name: &str) -> Result<Arc<CoreMlFunction>> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = functions.get(name) {
            return Ok(found.clone());
        }
        let package = Package::open_to_run(&self.path, &[name], &WeightFiles::default())?;
        let model = package.model();
        let described = model.functions.iter().find(|f| f.name == name);
        let (Some(body), Some(described)) = (model.program.functions.get(name), described) else {
            return Err(Error::invalid(&self.path, format!("use: no function `{name}`")));
        };
        let interface = Interface::of(described, &self.caches).map_err(|e| e.at(&self.path, name))?;
        let rule = undo_rule(body, &interface, &self.states.slots);
        let mut selection = None;
        let has_states = interface.has_states || !interface.caches.is_empty();
        if has_states {
            if let UndoRule::Rows { selection: input, .. } = rule {
                selection = Some(input);
            }
            // Functions of a package differ only in their numbers of tokens and slots.
            let _ = self.states.rule.set(rule);
        }
        let function = Arc::new(CoreMlFunction {
            inputs: interface.inputs.iter().map(|s| s.name.clone()).collect(),
            outputs: interface.outputs.iter().map(|s| s.name.clone()).collect(),
            selection,
            has_states,
            engine: self.engine.clone(),
            loadable: Loadable {
                key: self.engine.new_key(),
                compiled: self.compiled.clone(),
                named: self.has_names.then(|| name.to_string()),
                function: name.to_string(),
                package: self.path.clone(),
                bytes: self.bytes,
                interface: Arc::new(interface),
                busy: Mutex::default(),
            },
        });
        functions.insert(name.to_string(), function.clone());
        Ok(function)
    }
}

impl BackendPackage for CoreMlPackage {
    fn prepare(&self, function: &str) -> Result<Arc<dyn BackendFunction>> {
        let function = self.function(function)?;
        self.engine.load_ahead(&function.loadable)?;
        Ok(function)
    }

    fn new_states(&self) -> Box<dyn SequenceStates> {
        match self.states.slots.is_empty() && self.caches.is_empty() {
            true => Box::new(NoStates),
            false => Box::new(CoreMlStates::new(self.engine.clone(), self.states.clone())),
        }
    }

    fn release(&self) {
        let functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        for function in functions.values() {
            let key = function.loadable.key;
            let _ = self.engine.ask(|o| o.unload(key));
        }
    }
}

impl Drop for CoreMlPackage {
    fn drop(&mut self) {
        self.release();
    }
}

/// A function of a package.
struct CoreMlFunction {
    engine: Arc<Engine>,
    loadable: Loadable,
    inputs: Vec<String>,
    outputs: Vec<String>,
    /// Index of the input that says how many tokens a call has.
    selection: Option<usize>,
    has_states: bool,
}

impl CoreMlFunction {
    /// Returns the tokens of a call without those that only fill it up; 0 where the count does not matter.
    fn tokens(&self, inputs: &[&Tensor]) -> usize {
        let selection = self.selection.and_then(|i| inputs.get(i)).and_then(|t| t.as_f32());
        selection.and_then(|v| v.iter().position(|v| *v == 1.0)).unwrap_or(0)
    }
}

impl BackendFunction for CoreMlFunction {
    fn inputs(&self) -> &[String] {
        &self.inputs
    }

    fn outputs(&self) -> &[String] {
        &self.outputs
    }

    fn has_states(&self) -> bool {
        self.has_states
    }

    fn run(&self, call: FunctionCall<'_, '_>, outputs: &mut Vec<Tensor>) -> Result<()> {
        let key = self.loadable.key;
        let (inputs, states) = call.of_one()?;
        let states = match self.has_states {
            false => None,
            true => {
                let states = states.and_then(|states| {
                    let states: &mut dyn Any = states;
                    states.downcast_mut::<CoreMlStates>()
                });
                let states = states.ok_or_else(|| Error::input("states of another backend"))?;
                Some(states.ready(self.tokens(&inputs))?)
            }
        };
        self.engine.use_loaded(&self.loadable, |o| o.predict(key, states, &inputs, outputs))
    }
}
