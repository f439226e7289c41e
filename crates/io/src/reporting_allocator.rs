//! The allocator of a program that says so when no memory is left, and ends with the status of an error.
//!
//! Rust's own answer to a failed allocation is to abort the process: a dump of it, and a status that no script expects. Nothing
//! can go on after most failed allocations, so the process ends here as after any other error.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// Exit status of a process that has no memory left: that of every error.
const ERROR: i32 = 2;
/// True if errors are written as JSON, too.
static AS_JSON: AtomicBool = AtomicBool::new(false);
/// True once a thread reports.
static REPORTED: AtomicBool = AtomicBool::new(false);

/// The system's allocator. Where it has no memory left, the process ends with status 2 and a message.
pub struct ReportingAllocator;

/// Lets the report be a JSON document on standard output, too.
pub fn report_as_json() {
    AS_JSON.store(true, Ordering::Relaxed);
}

/// Reports that an allocation failed, and ends the process. Allocates nothing.
#[cold]
fn end(bytes: usize) -> ! {
    while REPORTED.swap(true, Ordering::Relaxed) {
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
    let mut text = [0; 256];
    let mut write = |output: i32, before: &str, behind: &str| {
        let mut rest = &mut text[..];
        let _ = writeln!(rest, "{before}no memory is left: {bytes} bytes more were needed{behind}");
        let left = rest.len();
        write_out(output, &text[..text.len() - left]);
    };
    if AS_JSON.load(Ordering::Relaxed) {
        write(1, "{\"error\":{\"kind\":\"io\",\"message\":\"", "\",\"path\":null}}");
    }
    write(2, "error: ", "");
    leave()
}

#[cfg(unix)]
#[allow(unsafe_code)]
fn write_out(output: i32, text: &[u8]) {
    // SAFETY: the pointer and the length are those of a slice. The streams of the standard library may be locked here.
    unsafe { libc::write(output, text.as_ptr().cast(), text.len()) };
}

#[cfg(not(unix))]
fn write_out(output: i32, text: &[u8]) {
    let _ = if output == 1 { std::io::stdout().write_all(text) } else { std::io::stderr().write_all(text) };
}

#[cfg(unix)]
#[allow(unsafe_code)]
fn leave() -> ! {
    // SAFETY: the call does not return. What runs at a usual exit may ask for memory.
    unsafe { libc::_exit(ERROR) }
}

#[cfg(not(unix))]
fn leave() -> ! {
    std::process::exit(ERROR)
}

/// Returns what the system gave; ends the process if it gave nothing.
fn given(start: *mut u8, bytes: usize) -> *mut u8 {
    if start.is_null() { end(bytes) } else { start }
}

// SAFETY: every call goes to the system's allocator.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for ReportingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller promises what `System` requires.
        given(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller promises what `System` requires.
        given(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller promises what `System` requires.
        unsafe { System.dealloc(start, layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises what `System` requires.
        given(unsafe { System.realloc(start, layout, size) }, size)
    }
}
