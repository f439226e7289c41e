//! System and chip, on which compiled models depend.

use crate::SystemFacts;

/// Returns the folder name of this system's build and chip, such as `24B83-Apple-M4`. `None` where the system does not tell them.
pub fn this_system() -> Option<String> {
    let (build, chip) = (text("kern.osversion")?, text("machdep.cpu.brand_string")?);
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    Some(format!("{build}-{chip}").chars().map(plain).collect())
}

/// Returns the facts of this system. `None` where the system does not tell them.
#[cfg(target_vendor = "apple")]
pub fn system_facts() -> Option<SystemFacts> {
    Some(SystemFacts {
        os: format!("macOS {}", text("kern.osproductversion")?),
        build: text("kern.osversion")?,
        chip: text("machdep.cpu.brand_string")?,
        simulated: false,
    })
}

/// Returns the facts of the system that the fake Core ML stands for; `FAKE_COREML_CHIP` names another chip.
#[cfg(not(target_vendor = "apple"))]
pub fn system_facts() -> Option<SystemFacts> {
    let chip = std::env::var("FAKE_COREML_CHIP").unwrap_or_else(|_| "Apple M4 Max".into());
    Some(SystemFacts { os: "macOS 26.0".into(), build: "sim".into(), chip, simulated: true })
}

#[cfg(target_vendor = "apple")]
fn text(name: &str) -> Option<String> {
    let name = std::ffi::CString::new(name).ok()?;
    let mut bytes = [0u8; 256];
    let mut length = bytes.len();
    // SAFETY: the buffer has the given length, and no value is set.
    let failed = unsafe {
        libc::sysctlbyname(name.as_ptr(), bytes.as_mut_ptr().cast(), &mut length, std::ptr::null_mut(), 0)
    };
    if failed != 0 {
        return None;
    }
    let text = bytes.get(..length)?.split(|b| *b == 0).next()?;
    String::from_utf8(text.to_vec()).ok()
}

/// Returns facts of the fake, which has no system.
#[cfg(not(target_vendor = "apple"))]
fn text(name: &str) -> Option<String> {
    Some(if name == "kern.osversion" { "sim".into() } else { "fake".into() })
}

/// Returns the process's physical footprint in bytes. It counts compressed and swapped pages and buffers of the Neural
/// Engine, but no pages shared with files.
#[cfg(target_os = "macos")]
pub fn held_memory() -> Option<u64> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage_info_v4>::zeroed();
    let process = libc::c_int::try_from(std::process::id()).ok()?;
    // SAFETY: the buffer has the requested version's type; all zeros are valid for its numbers.
    let usage = unsafe {
        let failed = libc::proc_pid_rusage(process, libc::RUSAGE_INFO_V4, usage.as_mut_ptr().cast());
        if failed != 0 {
            return None;
        }
        usage.assume_init()
    };
    Some(usage.ri_phys_footprint)
}

/// Returns the bytes of memory that this process holds.
#[cfg(not(target_os = "macos"))]
pub fn held_memory() -> Option<u64> {
    anemoe_io::held_memory()
}

/// Name of the figure that [`held_memory`] returns.
pub const HELD_MEMORY: &str = if cfg!(target_os = "macos") { "phys_footprint" } else { "resident" };
