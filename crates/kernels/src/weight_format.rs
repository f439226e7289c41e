//! Formats of stored weights, declared once for plans, programs, files, mapped files and the views that kernels read.
//!
//! ```text
//! format   elements, packed least significant bit first     values                        weight
//! Fp16     fp16                                             none                          element
//! F32      f32                                              none                          element
//! Lut      indices of `bits` bits                           tables of 2^bits entries      values[table of row][index]
//! Int      integers of `bits` bits                          scales, one per block         value * (element - offset)
//! Mxfp4    indices of 4 bits                                powers of two, one per block  value * MXFP4_TABLE[index]
//! ```

use serde::{Deserialize, Serialize};
use std::fmt;

/// Declares widths of stored elements, in ascending order.
macro_rules! widths {
    ($(#[$doc:meta])* $name:ident { $($width:ident = $bits:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "u8", into = "u8")]
        #[allow(missing_docs)]
        pub enum $name {
            $($width = $bits,)*
        }

        impl $name {
            /// All of them.
            pub const ALL: [$name; [$($bits),*].len()] = [$($name::$width),*];

            /// Returns the bits of an element.
            pub const fn bits(self) -> u8 {
                self as u8
            }
        }

        impl From<$name> for u8 {
            fn from(width: $name) -> u8 {
                width.bits()
            }
        }

        impl TryFrom<u8> for $name {
            type Error = String;

            fn try_from(bits: u8) -> Result<Self, String> {
                let wrong = || format!("elements of {bits} bits: expected {:?}", $name::ALL.map(u8::from));
                $name::ALL.into_iter().find(|width| width.bits() == bits).ok_or_else(wrong)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.bits().fmt(f)
            }
        }
    };
}

widths!(
    /// Names a width of indices into tables of `2^bits` values.
    IndexBits { One = 1, Two = 2, Three = 3, Four = 4, Six = 6, Eight = 8, }
);
widths!(
    /// Names a width of integers with a scale.
    IntBits { Four = 4, Eight = 8, }
);

/// Says how the weights of a matrix are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum WeightFormat {
    /// fp16 elements.
    #[default]
    Fp16,
    /// f32 elements; only in memory.
    #[serde(skip)]
    F32,
    /// Indices into tables of `2^bits` values.
    Lut {
        /// Width of an index.
        bits: IndexBits,
        /// Rows that share a table.
        rows_per_table: usize,
    },
    /// Integers; a value is `scale * (q - offset)`.
    Int {
        /// Width of an integer.
        bits: IntBits,
        /// True if integers are two's complement, as in every file that anemoe writes.
        #[serde(skip, default = "is_signed")]
        signed: bool,
        /// Rows that share a scale.
        block_rows: usize,
        /// Columns that share a scale.
        block_cols: usize,
        /// True if there are offsets.
        offsets: bool,
    },
    /// Indices into [`MXFP4_TABLE`]; a value is `scale * entry`, every scale a power of two.
    Mxfp4 {
        /// Columns that share a scale.
        block_cols: usize,
    },
}

/// Holds the values of the 4-bit floats E2M1, by their bits: a sign, two bits of exponent, one of mantissa.
pub const MXFP4_TABLE: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

fn is_signed() -> bool {
    true
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())?;
        match self {
            WeightFormat::Fp16 | WeightFormat::F32 => Ok(()),
            WeightFormat::Lut { rows_per_table, .. } => write!(f, " with {rows_per_table} rows per table"),
            WeightFormat::Int { block_rows, block_cols, offsets, .. } => {
                let and = if *offsets { " and offset" } else { "" };
                write!(f, " with a scale{and} per block of [{block_rows}, {block_cols}]")
            }
            WeightFormat::Mxfp4 { block_cols } => write!(f, " with a scale per block of [1, {block_cols}]"),
        }
    }
}

impl WeightFormat {
    /// Returns the short name: `fp16`, `lut4`, `int8`, `mxfp4`.
    pub fn name(self) -> String {
        match self {
            WeightFormat::Fp16 => "fp16".into(),
            WeightFormat::F32 => "f32".into(),
            WeightFormat::Lut { bits, .. } => format!("lut{bits}"),
            WeightFormat::Int { bits, .. } => format!("int{bits}"),
            WeightFormat::Mxfp4 { .. } => "mxfp4".into(),
        }
    }

    /// Returns the bits per element.
    pub const fn bits(self) -> u8 {
        match self {
            WeightFormat::Fp16 => 16,
            WeightFormat::F32 => 32,
            WeightFormat::Lut { bits, .. } => bits.bits(),
            WeightFormat::Int { bits, .. } => bits.bits(),
            WeightFormat::Mxfp4 { .. } => 4,
        }
    }

    /// Tells whether the format has tables or scales.
    pub const fn has_values(self) -> bool {
        matches!(self, WeightFormat::Lut { .. } | WeightFormat::Int { .. } | WeightFormat::Mxfp4 { .. })
    }

    /// Tells whether there are offsets, one per scale.
    pub const fn has_offsets(self) -> bool {
        matches!(self, WeightFormat::Int { offsets: true, .. })
    }

    /// Returns the bytes of the elements, and the number of values (entries of all tables, or scales). `None` where the
    /// format does not fit the matrix.
    pub(crate) fn lengths(self, rows: usize, cols: usize) -> Option<(u64, u64)> {
        let elements =
            (rows as u64).checked_mul(cols as u64)?.checked_mul(u64::from(self.bits()))?.div_ceil(8);
        let parts = |n: usize, by: usize| (by > 0 && n.is_multiple_of(by)).then(|| (n / by) as u64);
        let values = match self {
            WeightFormat::Fp16 | WeightFormat::F32 => 0,
            WeightFormat::Lut { bits, rows_per_table } => {
                parts(rows, rows_per_table)?.checked_mul(1 << bits.bits())?
            }
            WeightFormat::Int { block_rows, block_cols, .. } => {
                parts(rows, block_rows)?.checked_mul(parts(cols, block_cols)?)?
            }
            WeightFormat::Mxfp4 { block_cols } => (rows as u64).checked_mul(parts(cols, block_cols)?)?,
        };
        Some((elements, values))
    }

    /// Returns the bytes of elements, fp16 values and int8 offsets of a matrix in a file of its own. `None` where the
    /// format does not fit the matrix.
    pub fn stored_sizes(self, rows: usize, cols: usize) -> Option<(u64, u64, u64)> {
        let (elements, values) = self.lengths(rows, cols)?;
        Some((elements, values.checked_mul(2)?, if self.has_offsets() { values } else { 0 }))
    }
}

/// Joins the operands of a stored matrix: values of a program, parts of a mapped file, or slices.
#[derive(Clone, Copy, Debug)]
pub struct Weight<D, V> {
    /// Format: the meaning of the operands.
    pub format: WeightFormat,
    /// Packed elements.
    pub elements: D,
    /// Tables or scales, where the format has them.
    pub values: Option<V>,
    /// Offsets, where the format has them.
    pub offsets: Option<V>,
}
