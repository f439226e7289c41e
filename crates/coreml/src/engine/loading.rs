//! Functions on their way in: several at once, each on Core ML's own threads.

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

/// Functions that are loaded at the same time: their service is one process, and each takes memory while it loads.
const AT_ONCE: usize = 4;

/// A value that goes to another thread once.
pub(super) struct Handover<T>(T);

impl<T> Handover<T> {
    /// Wraps a value that nobody else uses.
    ///
    /// # Safety
    /// The value may be used on any one thread, and the caller keeps nothing of it.
    pub unsafe fn new(value: T) -> Handover<T> {
        Handover(value)
    }

    /// The value.
    pub fn into_inner(self) -> T {
        self.0
    }
}

// SAFETY: handed over once, over a channel; the sender keeps nothing.
unsafe impl<T> Send for Handover<T> {}

/// A function that can be loaded.
pub(crate) struct Loadable {
    pub key: FunctionKey,
    /// Compiled model.
    pub compiled: PathBuf,
    /// Name that Core ML is told; none for the one function of a package.
    pub named: Option<String>,
    /// Name.
    pub function: String,
    /// The package.
    pub package: PathBuf,
    /// Bytes that count against the limit.
    pub bytes: u64,
    pub interface: Arc<Interface>,
    /// Held while the function is loaded, so that others wait for it.
    pub busy: Mutex<()>,
}

/// Core ML with its thread.
pub(crate) struct Engine {
    owner: Owner<Objects>,
    limit: Option<u64>,
    units: ComputeUnits,
    keys: AtomicU64,
    loads: Mutex<usize>,
    load_ended: Condvar,
}

/// Runs work in an autorelease pool of its own; without one, everything that Core ML makes for a call would stay.
fn pooled(work: &mut dyn FnMut()) {
    autoreleasepool(|_| work());
}

/// Checks that the system has states and functions of models.
///
/// # Errors
/// It is older.
pub fn available() -> Result<()> {
    if !objc2::available!(macos = 15.0, ios = 18.0, tvos = 18.0, watchos = 11.0, visionos = 2.0, ..) {
        return Err(Error::unsupported_here("on this system: states and functions of models need macOS 15"));
    }
    Ok(())
}

impl Engine {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system is older than states and functions of models, or has no thread left.
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

    /// A number that nothing else of this engine has.
    pub fn new_key(&self) -> u64 {
        self.keys.fetch_add(1, Ordering::Relaxed)
    }

    /// Runs `work` on Core ML's thread; its exceptions are failures.
    pub fn ask<R: Send>(
        &self,
        work: impl FnOnce(&mut Objects) -> std::result::Result<R, Failure> + Send,
    ) -> std::result::Result<R, Failure> {
        self.owner.run(|objects| caught(|| work(objects))).unwrap_or_else(|e| Err(Failure::Known(e)))
    }

    /// Loads a function if it fits in without another going: for what may be needed soon.
    ///
    /// # Errors
    /// Core ML refuses it.
    pub fn load_ahead(&self, wanted: &Loadable) -> Result<()> {
        let loaded = self.with_loaded(wanted, |o| Ok(o.reserve_free(wanted.bytes, self.limit)), |_| Ok(()));
        loaded.map(|_| ()).map_err(|e| e.at(&wanted.package, &wanted.function))
    }

    /// Does `work` that needs a function: at once where it is loaded, else behind loading it. Nothing comes between loading and
    /// work, so that another function's load cannot push it out before its first use.
    ///
    /// # Errors
    /// Core ML refuses it, or `work` fails.
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

    /// Loads a function unless it is there, where `reserve` has room for it, and does `work` before anything else can happen.
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
            // Nothing comes where Core ML lets go of its handler uncalled.
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

    /// Waits until fewer functions than [`AT_ONCE`] are being loaded.
    fn permit(&self) -> Permit<'_> {
        let mut loads = self.loads.lock().unwrap_or_else(PoisonError::into_inner);
        while *loads >= AT_ONCE {
            loads = self.load_ended.wait(loads).unwrap_or_else(PoisonError::into_inner);
        }
        *loads += 1;
        Permit(self)
    }
}

/// One of the loads that may run.
struct Permit<'a>(&'a Engine);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        *self.0.loads.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.load_ended.notify_one();
    }
}

/// The URL of a file.
pub(super) fn file_url(path: &Path) -> std::result::Result<Retained<NSURL>, Failure> {
    let text = path.to_str().ok_or_else(|| Failure::Misfit("a path that is not UTF-8".into()))?;
    Ok(NSURL::fileURLWithPath(&NSString::from_str(text)))
}

/// The configuration for a function of a package, by name where it has several.
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

/// Begins to load a function; the model comes from a thread of Core ML's.
fn begin(
    compiled: &Path,
    function: Option<&str>,
    units: ComputeUnits,
) -> std::result::Result<Receiver<LoadReply>, Failure> {
    let url = file_url(compiled)?;
    let (send, receive) = sync_channel(1);
    let handler = RcBlock::new(move |model: *mut MLModel, error: *mut NSError| {
        // SAFETY: both live while the handler runs; the model is kept by a reference of our own.
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
    // SAFETY: a handler that may run on any thread.
    unsafe {
        MLModel::loadContentsOfURL_configuration_completionHandler(&url, &configuration, &handler);
    }
    Ok(receive)
}
