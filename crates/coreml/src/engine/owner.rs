//! A thread that owns values which must not leave it.
//!
//! Work is handed over as a pointer to a closure on the caller's stack, and the caller waits: nothing is allocated.

use crate::{Error, Result};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Callers that can wait for the thread before others wait to be heard.
const WAITING: usize = 64;

/// Work on what the thread owns.
type OwnerWork<S> = dyn FnMut(&mut S) + Send;

/// Work on its way to the thread.
struct OwnerJob<S> {
    work: *mut OwnerWork<S>,
    done: Arc<Done>,
}

// SAFETY: the closure is `Send`, and its caller waits until the thread is done with it.
unsafe impl<S> Send for OwnerJob<S> {}

/// Says that work is done, and how it ended.
#[derive(Default)]
struct Done {
    ended: Mutex<Option<std::thread::Result<()>>>,
    changed: Condvar,
}

impl Done {
    fn set(&self, ended: std::thread::Result<()>) {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(ended);
        self.changed.notify_one();
    }

    fn wait(&self) -> std::result::Result<(), Box<dyn Any + Send>> {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match ended.take() {
                Some(ended) => return ended,
                None => ended = self.changed.wait(ended).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

thread_local! {
    /// A thread waits for one piece of work at a time.
    static DONE: Arc<Done> = Arc::default();
}

/// The thread.
pub(crate) struct Owner<S: 'static> {
    jobs: Option<SyncSender<OwnerJob<S>>>,
    thread: Option<JoinHandle<()>>,
}

impl<S> Owner<S> {
    /// Starts the thread, on which `make` makes what it owns. `around` is given each piece of work to call.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(
        make: impl FnOnce() -> S + Send + 'static,
        around: fn(&mut dyn FnMut()),
    ) -> Result<Owner<S>> {
        let (jobs, receive) = sync_channel::<OwnerJob<S>>(WAITING);
        let thread = std::thread::Builder::new().name("anemoe-coreml".into());
        let thread = thread.spawn(move || serve(make, around, &receive));
        let thread = thread.map_err(|e| Error::io("thread of Core ML", e))?;
        Ok(Owner { jobs: Some(jobs), thread: Some(thread) })
    }

    /// Runs `work` on the thread and waits for it.
    ///
    /// # Errors
    /// The thread has ended.
    pub fn run<R: Send>(&self, work: impl FnOnce(&mut S) -> R + Send) -> Result<R> {
        let gone = || Error::unsupported_here("the thread of Core ML has ended");
        let mut work = Some(work);
        let mut result = None;
        let mut once = |owned: &mut S| result = work.take().map(|work| work(owned));
        let once: &mut (dyn FnMut(&mut S) + Send + '_) = &mut once;
        // SAFETY: only the lifetime changes. The thread uses the pointer before it says that the work is done, and this call
        // does not end before.
        let work =
            unsafe { std::mem::transmute::<*mut (dyn FnMut(&mut S) + Send + '_), *mut OwnerWork<S>>(once) };
        let done = DONE.with(Arc::clone);
        let job = OwnerJob { work, done: done.clone() };
        let jobs = self.jobs.as_ref().ok_or_else(gone)?;
        jobs.send(job).map_err(|_| gone())?;
        if let Err(panic) = done.wait() {
            resume_unwind(panic);
        }
        result.ok_or_else(gone)
    }
}

fn serve<S>(make: impl FnOnce() -> S, around: fn(&mut dyn FnMut()), jobs: &Receiver<OwnerJob<S>>) {
    let mut owned = make();
    for job in jobs {
        let mut work = || {
            // SAFETY: the caller waits, so that the closure lives and nobody else uses it.
            unsafe { (*job.work)(&mut owned) }
        };
        let ended = catch_unwind(AssertUnwindSafe(|| around(&mut work)));
        job.done.set(ended);
    }
    // What is owned goes on this thread, too.
    let mut owned = Some(owned);
    around(&mut || drop(owned.take()));
}

impl<S> Drop for Owner<S> {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
