//! Loading of functions: several at once, each on threads of Core ML.

use super::failure::{Failure, caught};
use super::interface::Interface;
use super::objects::{FunctionKey, Objects};
use super::owner::Owner;
use crate::settings::ComputeUnits;
use crate::{Error, Result};
use block2::RcBlock;
use objc2::rc::{Retained, autoreleasepool};
use objc2_core_ml::{MLComputeUnits, MLModel, MLModelConfiguration};
use objc2_foundation::{NSError, NSString, NSURL};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Most functions that load at the same time: one system process loads them all, and each takes memory meanwhile.
const AT_ONCE: usize = 4;

/// A value that goes to another thread once.
pub(super) struct Handover<T>(T);

impl<T> Handover<T> {
    /// Wraps a value that has no other user.
    ///
    /// # Safety
    /// The value may be used on any single thread, and the caller keeps no reference to it.
    pub unsafe fn new(value: T) -> Handover<T> {
        Handover(value)
    }

    /// Returns the value.
    pub fn into_inner(self) -> T {
        self.0
    }
}

// SAFETY: the value is handed over once, over a channel; the sender keeps nothing.
unsafe impl<T> Send for Handover<T> {}

/// A function that can be loaded.
pub(crate) struct Loadable {
    pub key: FunctionKey,
    /// Path of the compiled model.
    pub compiled: PathBuf,
    /// Function name for Core ML; `None` for the only function of a package.
    pub named: Option<String>,
    /// Function name in the package.
    pub function: String,
    /// Path of the package.
    pub package: PathBuf,
    /// Bytes that count against the limit of loaded bytes.
    pub bytes: u64,
    pub interface: Arc<Interface>,
    /// Locked while the function is loaded, so that other callers wait.
    pub busy: Mutex<()>,
}

/// Core ML with the thread that owns its objects.
pub(crate) struct Engine {
    owner: Owner<Objects>,
    limit: Option<u64>,
    units: ComputeUnits,
    keys: AtomicU64,
    loads: Mutex<usize>,
    load_ended: Condvar,
}

/// Runs work in an autorelease pool of its own; without it, every object that Core ML makes for a call would stay.
fn pooled(work: &mut dyn FnMut()) {
    autoreleasepool(|_| work());
}

/// Checks that the system supports states and multifunction models (macOS 15).
///
/// # Errors
/// The system is older.
pub fn available() -> Result<()> {
    if !objc2::available!(macos = 15.0, ios = 18.0, tvos = 18.0, watchos = 11.0, visionos = 2.0, ..) {
        return Err(Error::unsupported_here("on this system: states and functions of models need macOS 15"));
    }
    Ok(())
}

impl Engine {
    /// Starts the thread of Core ML's objects.
    ///
    /// # Errors
    /// The system does not support states and multifunction models, or cannot start a thread.
    pub fn start(limit: Option<u64>, units: ComputeUnits) -> Result<Engine> {
        available()?;
        Ok(Engine {
            owner: Owner::start(Objects::default, pooled)?,
            limit,
            units,
            keys: AtomicU64::new(1),
            loads: Mutex::new(0),
            load_ended: Condvar::new(),
        })
    }

    /// Returns a number that is unique in this engine.
    pub fn new_key(&self) -> u64 {
        self.keys.fetch_add(1, Ordering::Relaxed)
    }

    /// Runs `work` on Core ML's thread. Exceptions become failures.
    pub fn ask<R: Send>(
        &self,
        work: impl FnOnce(&mut Objects) -> std::result::Result<R, Failure> + Send,
    ) -> std::result::Result<R, Failure> {
        self.owner.run(|objects| caught(|| work(objects))).unwrap_or_else(|e| Err(Failure::Known(e)))
    }

    /// Loads a function that may be needed soon, if it fits without unloading another.
    ///
    /// # Errors
    /// Core ML refuses the function.
    pub fn load_ahead(&self, wanted: &Loadable) -> Result<()> {
        let loaded = self.with_loaded(wanted, |o| Ok(o.reserve_free(wanted.bytes, self.limit)), |_| Ok(()));
        loaded.map(|_| ()).map_err(|e| e.at(&wanted.package, &wanted.function))
    }

    /// Runs `work`, which needs a function: at once if it is loaded, else right after loading it. Nothing runs between
    /// loading and work, so that another function's load cannot unload it before its first use.
    ///
    /// # Errors
    /// Core ML refuses the function, or `work` fails.
    pub fn use_loaded<R: Send>(
        &self,
        wanted: &Loadable,
        mut work: impl FnMut(&mut Objects) -> std::result::Result<R, Failure> + Send,
    ) -> Result<R> {
        let at = |e: Failure| e.at(&wanted.package, &wanted.function);
        match self.ask(&mut work) {
            Err(Failure::Absent) => {}
            done => return done.map_err(at),
        }
        let reserve = |o: &mut Objects| o.reserve(wanted.bytes, self.limit).map(|()| true);
        self.with_loaded(wanted, reserve, work).map_err(at)?.ok_or_else(|| at(Failure::Absent))
    }

    /// Loads a function unless it is loaded, if `reserve` finds room, and runs `work` right after. Returns `None` without room.
    fn with_loaded<R: Send>(
        &self,
        wanted: &Loadable,
        reserve: impl FnOnce(&mut Objects) -> std::result::Result<bool, Failure> + Send,
        mut work: impl FnMut(&mut Objects) -> std::result::Result<R, Failure> + Send,
    ) -> std::result::Result<Option<R>, Failure> {
        let _busy = wanted.busy.lock().unwrap_or_else(PoisonError::into_inner);
        let there = self.ask(|o| if o.holds(wanted.key) { work(o).map(Some) } else { Ok(None) })?;
        if there.is_some() {
            return Ok(there);
        }
        let _permit = self.permit();
        if !self.ask(reserve)? {
            return Ok(None);
        }
        let begun = self.ask(|_| begin(&wanted.compiled, wanted.named.as_deref(), self.units));
        let loaded = begun.and_then(|model| {
            // The channel closes if Core ML drops its handler without calling it.
            model.recv().unwrap_or_else(|_| Err(Failure::Misfit("Core ML did not answer".into())))
        });
        match loaded {
            Ok(model) => self.ask(|o| {
                o.insert(wanted.key, model.into_inner(), wanted.interface.clone(), wanted.bytes);
                work(o).map(Some)
            }),
            Err(failure) => {
                self.ask(|o| {
                    o.cancel(wanted.bytes);
                    Ok(())
                })?;
                Err(failure)
            }
        }
    }

    /// Waits until fewer than [`AT_ONCE`] functions are loading.
    fn permit(&self) -> Permit<'_> {
        let mut loads = self.loads.lock().unwrap_or_else(PoisonError::into_inner);
        while *loads >= AT_ONCE {
            loads = self.load_ended.wait(loads).unwrap_or_else(PoisonError::into_inner);
        }
        *loads += 1;
        Permit(self)
    }
}

/// Permission for one of the concurrent loads.
struct Permit<'a>(&'a Engine);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        *self.0.loads.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.load_ended.notify_one();
    }
}

/// Makes the URL of a file.
pub(super) fn file_url(path: &Path) -> std::result::Result<Retained<NSURL>, Failure> {
    let text = path.to_str().ok_or_else(|| Failure::Misfit("a path that is not UTF-8".into()))?;
    Ok(NSURL::fileURLWithPath(&NSString::from_str(text)))
}

/// Makes the configuration for a function of a package, by name where the package has several.
pub(super) fn configuration(function: Option<&str>, units: ComputeUnits) -> Retained<MLModelConfiguration> {
    // SAFETY: setters of a new object.
    unsafe {
        let configuration = MLModelConfiguration::new();
        configuration.setComputeUnits(match units {
            ComputeUnits::CpuAndNeuralEngine => MLComputeUnits::CPUAndNeuralEngine,
            ComputeUnits::CpuOnly => MLComputeUnits::CPUOnly,
        });
        if let Some(function) = function {
            configuration.setFunctionName(Some(&NSString::from_str(function)));
        }
        configuration
    }
}

type LoadReply = std::result::Result<Handover<Retained<MLModel>>, Failure>;

/// Begins to load a function. The model arrives over the channel, from a thread of Core ML.
fn begin(
    compiled: &Path,
    function: Option<&str>,
    units: ComputeUnits,
) -> std::result::Result<Receiver<LoadReply>, Failure> {
    let url = file_url(compiled)?;
    let (send, receive) = sync_channel(1);
    let handler = RcBlock::new(move |model: *mut MLModel, error: *mut NSError| {
        // SAFETY: both live while the handler runs; a reference of this crate keeps the model.
        let answer = unsafe {
            match Retained::retain(model) {
                Some(model) => Ok(Handover::new(model)),
                None => Err(error
                    .as_ref()
                    .map_or_else(|| Failure::Misfit("neither model nor error".into()), Failure::reported)),
            }
        };
        let _ = send.send(answer);
    });
    let configuration = configuration(function, units);
    // SAFETY: the handler may run on any thread.
    unsafe {
        MLModel::loadContentsOfURL_configuration_completionHandler(&url, &configuration, &handler);
    }
    Ok(receive)
}
