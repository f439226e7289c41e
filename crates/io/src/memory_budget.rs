//! Budget of memory for a piece of work, such as a program that came with a model.
//!
//! Libraries that run such programs bound their steps and not what a step allocates. [`BudgetAllocator`] counts what a thread
//! holds more than at the beginning of [`within`], and ends the process where that exceeds the budget: no library could go on
//! without memory that it asked for.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write;

/// Exit status of a process that a budget ends: that of wrong input.
const WRONG_INPUT: i32 = 2;

/// Budget of a thread.
#[derive(Clone, Copy)]
struct ThreadBudget {
    /// Bytes that may be allocated still.
    left: usize,
    /// Name of the work, for the message.
    work: &'static str,
    /// Bytes of the whole budget.
    whole: usize,
}

thread_local! {
    static BUDGET: Cell<Option<ThreadBudget>> = const { Cell::new(None) };
}

/// The system's allocator, with budgets of threads. A program makes it its global allocator; in others [`within`] bounds nothing.
pub struct BudgetAllocator;

/// Calls `f`, which may hold up to `bytes` bytes more than there are now; where it asks for more, the process ends with a message
/// that names the work, and with status 2.
pub fn within<T>(bytes: usize, work: &'static str, f: impl FnOnce() -> T) -> T {
    /// Sets the budget of before, also where `f` panics.
    struct Restored(Option<ThreadBudget>);
    impl Drop for Restored {
        fn drop(&mut self) {
            BUDGET.set(self.0);
        }
    }
    let _restored = Restored(BUDGET.replace(Some(ThreadBudget { left: bytes, work, whole: bytes })));
    f()
}

/// Takes bytes from the thread's budget.
fn take(bytes: usize) {
    let Ok(Some(budget)) = BUDGET.try_with(Cell::get) else { return };
    match budget.left.checked_sub(bytes) {
        Some(left) => BUDGET.set(Some(ThreadBudget { left, ..budget })),
        None => {
            BUDGET.set(None);
            let mut stderr = std::io::stderr();
            let _ = writeln!(
                stderr,
                "error: the {} asks for more than {} MB of memory",
                budget.work,
                budget.whole / 1_000_000
            );
            std::process::exit(WRONG_INPUT);
        }
    }
}

/// Gives bytes back to the thread's budget.
fn give(bytes: usize) {
    let Ok(Some(budget)) = BUDGET.try_with(Cell::get) else { return };
    BUDGET.set(Some(ThreadBudget { left: budget.left.saturating_add(bytes).min(budget.whole), ..budget }));
}

// SAFETY: every call is the system's own; what is counted beside it allocates nothing unless the process ends.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for BudgetAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        give(layout.size());
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.dealloc(start, layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        take(size);
        give(layout.size());
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.realloc(start, layout, size) }
    }
}

#[cfg(test)]
mod tests {
    use super::{BUDGET, give, take, within};

    #[test]
    fn what_is_given_back_can_be_taken_again_and_budgets_end() {
        let left = || BUDGET.get().map(|budget| budget.left);
        within(100, "work", || {
            take(60);
            within(10, "part of it", || take(10));
            assert_eq!(left(), Some(40));
            give(30);
            assert_eq!(left(), Some(70));
            // Memory from before the budget makes it no larger.
            give(1000);
            assert_eq!(left(), Some(100));
        });
        assert_eq!(left(), None);
        take(usize::MAX);
    }
}
