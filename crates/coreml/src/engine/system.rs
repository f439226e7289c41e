//! The system and the chip, as compiled models depend on them.

use crate::SystemFacts;

/// Names this system's build and chip, as a folder: `24B83-Apple-M4`. None where the system does not say.
pub fn this_system() -> Option<String> {
    let (build, chip) = (text("kern.osversion")?, text("machdep.cpu.brand_string")?);
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    Some(format!("{build}-{chip}").chars().map(plain).collect())
}

/// Tells the system that Core ML belongs to. None where it does not say.
#[cfg(target_vendor = "apple")]
pub fn system_facts() -> Option<SystemFacts> {
    Some(SystemFacts {
        os: format!("macOS {}", text("kern.osproductversion")?),
        build: text("kern.osversion")?,
        chip: text("machdep.cpu.brand_string")?,
        simulated: false,
    })
}

/// Tells the system that the fake stands for; `FAKE_COREML_CHIP` names another chip.
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
    // SAFETY: the buffer has the length that is given, and nothing is set.
    let failed = unsafe {
        libc::sysctlbyname(name.as_ptr(), bytes.as_mut_ptr().cast(), &mut length, std::ptr::null_mut(), 0)
    };
    if failed != 0 {
        return None;
    }
    let text = bytes.get(..length)?.split(|b| *b == 0).next()?;
    String::from_utf8(text.to_vec()).ok()
}

/// The fake has no system.
#[cfg(not(target_vendor = "apple"))]
fn text(name: &str) -> Option<String> {
    Some(if name == "kern.osversion" { "sim".into() } else { "fake".into() })
}

/// Returns the bytes of memory that the system holds this process to account for: its physical footprint, which counts compressed
/// and swapped pages and buffers of the Neural Engine, and no pages that files share.
#[cfg(target_os = "macos")]
pub fn held_memory() -> Option<u64> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage_info_v4>::zeroed();
    let process = libc::c_int::try_from(std::process::id()).ok()?;
    // SAFETY: the buffer is one of the version that is asked for, all zero, which is valid for numbers.
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
