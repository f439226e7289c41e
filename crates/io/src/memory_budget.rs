//! Memory budget for a piece of work, such as a program that comes with a model.
//!
//! Libraries that run such programs bound their steps but not the memory of a step. [`BudgetAllocator`] counts the
//! bytes that a thread holds beyond those at the start of [`within`], and ends the process where they exceed the
//! budget: no library could go on after a failed allocation.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write;

/// Exit status of a process that exceeds a budget: that of wrong input.
const WRONG_INPUT: i32 = 2;

/// Budget of a thread.
#[derive(Clone, Copy)]
struct ThreadBudget {
    /// Bytes that may still be allocated.
    left: usize,
    /// Name of the work, for the message.
    work: &'static str,
    /// Bytes of the whole budget.
    whole: usize,
}

thread_local! {
    static BUDGET: Cell<Option<ThreadBudget>> = const { Cell::new(None) };
}

/// The system's allocator with thread budgets. A program makes it its global allocator; in other programs [`within`]
/// bounds nothing.
pub struct BudgetAllocator;

/// Calls `f` with a budget of `bytes` bytes beyond those held now. If `f` needs more, the process ends with status 2
/// and a message that names the work.
pub fn within<T>(bytes: usize, work: &'static str, f: impl FnOnce() -> T) -> T {
    /// Restores the earlier budget, also where `f` panics.
    struct Restored(Option<ThreadBudget>);
    impl Drop for Restored {
        fn drop(&mut self) {
            BUDGET.set(self.0);
        }
    }
    let _restored = Restored(BUDGET.replace(Some(ThreadBudget { left: bytes, work, whole: bytes })));
    f()
}

/// Takes bytes from the thread's budget; ends the process where it is exceeded.
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

/// Returns bytes to the thread's budget.
fn give(bytes: usize) {
    let Ok(Some(budget)) = BUDGET.try_with(Cell::get) else { return };
    BUDGET.set(Some(ThreadBudget { left: budget.left.saturating_add(bytes).min(budget.whole), ..budget }));
}

// SAFETY: every call goes to the system's allocator; the counting allocates nothing unless the process ends.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for BudgetAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller promises what `System` requires.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller promises what `System` requires.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        give(layout.size());
        // SAFETY: the caller promises what `System` requires.
        unsafe { System.dealloc(start, layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        take(size);
        give(layout.size());
        // SAFETY: the caller promises what `System` requires.
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
            // Freeing memory from before the budget does not enlarge it.
            give(1000);
            assert_eq!(left(), Some(100));
        });
        assert_eq!(left(), None);
        take(usize::MAX);
    }
}
