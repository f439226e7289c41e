//! Limits the memory that a function may take, by the sizes of its inputs and of its package.
//!
//! ```text
//! allowed = max(1 GiB, min(256 * bytes of the inputs + 1024 * bytes of the package, bytes of free memory))
//! ```
//! A program of a few kilobytes can name results of terabytes. Attention takes most memory per byte of inputs: for 4096 tokens
//! with heads of 64 channels, its scores are 21 times its queries, keys and values, and softmax holds several copies. Caches
//! take most memory per byte of weights: at 262144 slots about 200 times the weights of a layer in LUT4, and several times
//! more where the interpreter runs operations.

use anemoe_io::free_memory;

/// Bytes that any function may take: 1 GiB.
const FLOOR: u64 = 1 << 30;
/// Bytes that a function may take for each byte of its inputs, as f32 or int32.
const PER_INPUT: u64 = 256;
/// Bytes that a function may take for each byte of the package's files.
const PER_FILE: u64 = 1024;

/// Bytes that a function may take for states, constants and values together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allowance {
    /// The limit.
    pub bytes: u64,
    /// Bytes of the package's files.
    files: u64,
    /// Bytes of the inputs.
    inputs: u64,
}

impl Allowance {
    /// Returns the allowance of a function of a package of `files` bytes, called with `inputs` bytes.
    pub fn new(files: u64, inputs: u64) -> Allowance {
        let justified = inputs.saturating_mul(PER_INPUT).saturating_add(files.saturating_mul(PER_FILE));
        let free = if justified > FLOOR { free_memory() } else { None };
        Allowance { bytes: justified.min(free.unwrap_or(u64::MAX)).max(FLOOR), files, inputs }
    }

    /// Returns the allowance of the same function for other inputs.
    pub fn with_inputs(self, inputs: u64) -> Allowance {
        Allowance::new(self.files, inputs)
    }

    /// Returns how many elements of 4 bytes are left beside `held` bytes.
    pub fn elements_beside(self, held: u64) -> usize {
        usize::try_from(self.bytes.saturating_sub(held) / 4).unwrap_or(usize::MAX)
    }

    /// Refuses `bytes` bytes of `what` if they are more than allowed.
    ///
    /// # Errors
    /// The bytes are more than allowed; the text says what would take them.
    pub fn check(self, what: &str, bytes: u64) -> Result<(), String> {
        if bytes <= self.bytes {
            return Ok(());
        }
        let Allowance { bytes: allowed, files, inputs } = self;
        Err(format!(
            "{what} would take {bytes} bytes, more than the {allowed} that inputs of {inputs} bytes, a package of {files} \
             and the free memory allow"
        ))
    }
}

/// Memory that a function takes for any values: bytes of constants; and the operation and the bytes of its largest result, which
/// an error names.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemoryNeed {
    pub constants: u64,
    pub largest: (String, u64),
}

impl MemoryNeed {
    /// Refuses a function whose values, states and constants together take more than is allowed.
    ///
    /// # Errors
    /// They take more than is allowed; the text says what takes how much.
    pub fn check(&self, allowance: Allowance, values: u64, states: u64) -> Result<(), String> {
        let all = values.saturating_add(states).saturating_add(self.constants);
        let largest = match &self.largest {
            (op, bytes) if *bytes > 0 => format!("; the largest result, {bytes} bytes, is that of {op}"),
            _ => String::new(),
        };
        let constants = self.constants;
        let what = format!("values of {values} bytes, states of {states} and constants of {constants}");
        allowance.check(&what, all).map_err(|what| format!("{what}{largest}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_packages_have_the_floor_and_others_what_they_bring() {
        assert_eq!(Allowance::new(4300, 64).bytes, 1 << 30);
        assert_eq!(Allowance::new(4300, 64).elements_beside(1 << 29), 1 << 27);
        assert_eq!(Allowance::new(4300, 64).elements_beside(1 << 31), 0);
        let large = Allowance::new(10 << 20, 0).bytes;
        assert!(large > 1 << 30 || free_memory().is_some_and(|free| free < 10 << 30));
        assert!(large <= 10 << 30);
        assert_eq!(Allowance::new(4300, 64).with_inputs(1 << 24), Allowance::new(4300, 1 << 24));
        let said = Allowance::new(4300, 64).check("values", u64::MAX).unwrap_err();
        assert!(said.contains("inputs of 64 bytes, a package of 4300"), "{said}");
    }
}
