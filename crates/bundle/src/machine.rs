//! The machine that a program runs on, as far as the system tells.

use anemoe_kernels::Isa;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Machine on which a program ran; unknown properties are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Model of the processor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// Number of processors that the program may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<u64>,
    /// Bytes of memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Operating system and its version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub os: Option<String>,
    /// Architecture, for instance `x86_64`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arch: Option<String>,
    /// Instructions that kernels use: `scalar`, `neon`, `avx2`, `avx512`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isa: Option<String>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

impl Machine {
    /// Returns the facts of this machine.
    pub fn here() -> Machine {
        let (cpu, memory_bytes, os) = system();
        Machine {
            cpu,
            cores: std::thread::available_parallelism().ok().map(|n| n.get() as u64),
            memory_bytes,
            os: Some(os),
            arch: Some(std::env::consts::ARCH.into()),
            isa: Some(Isa::best().name().into()),
            ..Machine::default()
        }
    }
}

/// Returns the value of `key` in a text of `key: value` or `key=value` lines; none if it is missing or empty.
#[cfg(any(target_os = "linux", test))]
fn field(text: &str, key: &str) -> Option<String> {
    let value = |line: &str| {
        let rest = line.strip_prefix(key)?.trim_start().strip_prefix([':', '='])?;
        Some(rest.trim().trim_matches('"').to_string())
    };
    text.lines().find_map(value).filter(|v| !v.is_empty())
}

/// Returns the processor, the bytes of memory, and the system with its version.
#[cfg(target_os = "linux")]
fn system() -> (Option<String>, Option<u64>, String) {
    let of_file = |file: &str, key: &str| field(&std::fs::read_to_string(file).ok()?, key);
    let mut os = of_file("/etc/os-release", "PRETTY_NAME").unwrap_or_else(|| "Linux".into());
    if let Ok(kernel) = std::fs::read_to_string("/proc/sys/kernel/osrelease") {
        os += &format!(", kernel {}", kernel.trim());
    }
    (of_file("/proc/cpuinfo", "model name"), anemoe_io::proc_bytes("/proc/meminfo", "MemTotal"), os)
}

#[cfg(target_os = "macos")]
fn system() -> (Option<String>, Option<u64>, String) {
    let said_by = |program: &str, args: &[&str]| {
        let output = std::process::Command::new(program).args(args).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?.trim().to_string();
        (output.status.success() && !text.is_empty()).then_some(text)
    };
    let sysctl = |name: &str| said_by("/usr/sbin/sysctl", &["-n", name]);
    let version = said_by("/usr/bin/sw_vers", &["-productVersion"]);
    let memory = sysctl("hw.memsize").and_then(|bytes| bytes.parse().ok());
    (sysctl("machdep.cpu.brand_string"), memory, version.map_or("macOS".into(), |v| format!("macOS {v}")))
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn system() -> (Option<String>, Option<u64>, String) {
    (None, None, std::env::consts::OS.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_system_files() {
        let text = "processor\t: 0\nmodel name\t: A CPU @ 2 GHz\nMemTotal:  16 kB\nPRETTY_NAME=\"An OS 1\"\nflags =\n";
        assert_eq!(field(text, "model name").as_deref(), Some("A CPU @ 2 GHz"));
        assert_eq!(field(text, "MemTotal").as_deref(), Some("16 kB"));
        assert_eq!(field(text, "PRETTY_NAME").as_deref(), Some("An OS 1"));
        assert_eq!(field(text, "flags"), None);
        assert_eq!(field(text, "model"), None);
    }

    #[test]
    fn this_machine_has_cores_and_a_system() {
        let machine = Machine::here();
        assert!(machine.cores.is_some_and(|n| n > 0));
        assert!(machine.os.is_some() && machine.arch.is_some() && machine.isa.is_some());
    }
}
