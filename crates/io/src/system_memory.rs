//! Memory of this machine and of this process, where the system tells it.

/// Reads a line `NAME:   123 kB` of a file of the proc file system. Returns bytes; `None` on other systems.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub fn proc_bytes(file: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns `None`: this system has no such file.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub fn proc_bytes(_: &str, _: &str) -> Option<u64> {
    None
}

/// Returns the bytes that this system could give to a program, cached files included; `None` where unknown.
pub fn free_memory() -> Option<u64> {
    proc_bytes("/proc/meminfo", "MemAvailable")
}

/// Returns the most bytes that were ever resident in this process; `None` where unknown.
pub fn peak_memory() -> Option<u64> {
    proc_bytes("/proc/self/status", "VmHWM")
}

/// Returns the bytes resident in this process; `None` where unknown. On macOS other kinds of memory count, too:
/// `anemoe-coreml` reads the process's footprint there.
pub fn held_memory() -> Option<u64> {
    proc_bytes("/proc/self/status", "VmRSS")
}

#[cfg(test)]
mod tests {
    #[cfg(target_os = "linux")]
    #[test]
    fn held_memory_is_some_and_at_most_the_peak() {
        let held = super::held_memory().unwrap();
        assert!(held > 0 && super::peak_memory().unwrap() >= held / 2);
    }
}
