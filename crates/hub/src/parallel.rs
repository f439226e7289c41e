//! Work on several items at a time.

use crate::{Error, Result};
use anemoe_io::locked;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Calls `work` for each item, `jobs` at a time, until one fails.
///
/// # Errors
/// The first error of `work`.
pub fn for_each<T: Sync>(items: &[T], jobs: usize, work: &(dyn Fn(&T) -> Result<()> + Sync)) -> Result<()> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let failure: Mutex<Option<Error>> = Mutex::new(None);
    let work_on = || {
        while !failed.load(Ordering::Relaxed) {
            let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            if let Err(e) = work(item) {
                failed.store(true, Ordering::Relaxed);
                locked(&failure).get_or_insert(e);
            }
        }
    };
    std::thread::scope(|scope| {
        // This thread works, too, so that the items move where no other thread starts.
        for _ in 1..jobs.min(items.len()) {
            if std::thread::Builder::new().spawn_scoped(scope, work_on).is_err() {
                break;
            }
        }
        work_on();
    });
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_job_needs_no_other_thread() {
        let here = std::thread::current().id();
        let done = AtomicUsize::new(0);
        for_each(&[1, 2, 3], 1, &|_| {
            done.fetch_add(usize::from(std::thread::current().id() == here), Ordering::Relaxed);
            Ok(())
        })
        .unwrap();
        assert_eq!(done.into_inner(), 3);
    }
}
