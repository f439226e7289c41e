//! A thread that owns values which must not leave it.
//!
//! Work is handed over as a pointer to a closure on the caller's stack while the caller waits, so that nothing is allocated.

use crate::{Error, Result};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Callers whose work can queue; further callers wait for a place in the queue.
const WAITING: usize = 64;

/// Work on the values that the thread owns.
type OwnerWork<S> = dyn FnMut(&mut S) + Send;

/// Work on its way to the thread.
struct OwnerJob<S> {
    work: *mut OwnerWork<S>,
    done: Arc<Done>,
}

// SAFETY: the closure is `Send`, and its caller waits until the thread is done with it.
unsafe impl<S> Send for OwnerJob<S> {}

/// Signal that work is done, and its outcome.
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
    /// Signal of this thread's current work: a thread waits for one piece of work at a time.
    static DONE: Arc<Done> = Arc::default();
}

/// A handle of the thread.
pub(crate) struct Owner<S: 'static> {
    jobs: Option<SyncSender<OwnerJob<S>>>,
    thread: Option<JoinHandle<()>>,
}

impl<S> Owner<S> {
    /// Starts the thread. `make` makes the values that it owns, on the thread; `around` is called with each piece of
    /// work and must call it.
    ///
    /// # Errors
    /// The system cannot start a thread.
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

    /// Runs `work` on the thread, waits for it and returns its result.
    ///
    /// # Errors
    /// The thread has ended.
    pub fn run<R: Send>(&self, work: impl FnOnce(&mut S) -> R + Send) -> Result<R> {
        let gone = || Error::unsupported_here("the thread of Core ML has ended");
        let mut work = Some(work);
        let mut result = None;
        let mut once = |owned: &mut S| result = work.take().map(|work| work(owned));
        let once: &mut (dyn FnMut(&mut S) + Send + '_) = &mut once;
        // SAFETY: only the lifetime changes. The thread uses the pointer only before it signals that the work is done,
        // and this call waits for that signal.
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
            // SAFETY: the caller waits, so the closure lives and has no other user.
            unsafe { (*job.work)(&mut owned) }
        };
        let ended = catch_unwind(AssertUnwindSafe(|| around(&mut work)));
        job.done.set(ended);
    }
    // The owned values are dropped on this thread, too.
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
