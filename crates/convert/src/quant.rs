//! Compression kinds as the command line names them.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A weight compression kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Quant {
    /// Plain fp16.
    Fp16,
    /// Palettization: an index of `bits` bits into a table of fp16 values, `constexpr_lut_to_dense`.
    Lut {
        /// 1, 2, 3, 4, 6 or 8.
        bits: u8,
        /// Equidistant tables instead of k-means.
        uniform: bool,
        /// One table for the whole matrix instead of one per group of rows.
        per_tensor: bool,
    },
}

impl fmt::Display for Quant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Quant::Fp16 => f.write_str("fp16"),
            Quant::Lut { bits, uniform, per_tensor } => {
                write!(f, "lut{bits}")?;
                if *uniform {
                    f.write_str("-uniform")?;
                }
                if *per_tensor {
                    f.write_str("-tensor")?;
                }
                Ok(())
            }
        }
    }
}

impl FromStr for Quant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || {
            format!(
                "unknown compression kind `{text}`: expected fp16 or lut{{1,2,3,4,6,8}} with -uniform and -tensor as options"
            )
        };
        if text == "fp16" {
            return Ok(Quant::Fp16);
        }
        let rest = text.strip_prefix("lut").ok_or_else(unknown)?;
        let (rest, per_tensor) = rest.strip_suffix("-tensor").map_or((rest, false), |r| (r, true));
        let (rest, uniform) = rest.strip_suffix("-uniform").map_or((rest, false), |r| (r, true));
        match rest {
            "1" | "2" | "3" | "4" | "6" | "8" => {
                Ok(Quant::Lut { bits: rest.as_bytes()[0] - b'0', uniform, per_tensor })
            }
            "5" | "7" => {
                Err(format!("`{text}`: Core ML has no {rest}-bit element type; use 1, 2, 3, 4, 6 or 8 bits"))
            }
            _ => Err(unknown()),
        }
    }
}

impl Serialize for Quant {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Quant {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A kind as it is applied to one matrix, with the group size that fits its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MatrixQuant {
    /// The kind.
    pub kind: Quant,
    /// Rows that share a table; all rows for one table per matrix; 0 without tables.
    pub group_rows: usize,
}

impl MatrixQuant {
    /// Plain fp16.
    pub const FP16: MatrixQuant = MatrixQuant { kind: Quant::Fp16, group_rows: 0 };

    /// What `kind` becomes on a matrix of `rows` x `cols`: the group is the largest divisor of `rows` that is at most
    /// `group_size`, and a matrix whose tables would cost more than they save stays fp16.
    pub fn resolve(kind: Quant, group_size: usize, rows: usize, cols: usize) -> MatrixQuant {
        let Quant::Lut { per_tensor, .. } = kind else { return MatrixQuant::FP16 };
        let group_rows = if per_tensor {
            rows
        } else {
            (1..=group_size.min(rows)).rev().find(|g| rows.is_multiple_of(*g)).unwrap_or(1)
        };
        let quant = MatrixQuant { kind, group_rows };
        if quant.bytes(rows, cols) < MatrixQuant::FP16.bytes(rows, cols) { quant } else { MatrixQuant::FP16 }
    }

    /// Bytes of a matrix of `rows` x `cols`: indices and tables, or fp16 values.
    pub fn bytes(&self, rows: usize, cols: usize) -> u64 {
        let n = rows as u64 * cols as u64;
        match self.kind {
            Quant::Fp16 => 2 * n,
            Quant::Lut { bits, .. } => {
                (n * u64::from(bits)).div_ceil(8) + (rows / self.group_rows) as u64 * (2 << bits)
            }
        }
    }
}

impl fmt::Display for MatrixQuant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Quant::Fp16 | Quant::Lut { per_tensor: true, .. } => self.kind.fmt(f),
            Quant::Lut { .. } => write!(f, "{} g{}", self.kind, self.group_rows),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_read_as_it_is_written() {
        for text in [
            "fp16",
            "lut1",
            "lut2",
            "lut3",
            "lut4",
            "lut6",
            "lut8",
            "lut4-uniform",
            "lut6-tensor",
            "lut8-uniform-tensor",
        ] {
            assert_eq!(text.parse::<Quant>().unwrap().to_string(), text);
        }
        for (text, says) in [
            ("lut5", "5-bit"),
            ("int3", "unknown"),
            ("lut", "unknown"),
            ("lut44", "unknown"),
            ("", "unknown"),
        ] {
            let err = text.parse::<Quant>().unwrap_err();
            assert!(err.contains(says), "{text}: {err}");
        }
    }

    #[test]
    fn a_group_divides_the_rows_or_the_matrix_stays_fp16() {
        let lut4 = "lut4".parse().unwrap();
        assert_eq!(MatrixQuant::resolve(lut4, 32, 704, 2816).group_rows, 32);
        assert_eq!(MatrixQuant::resolve(lut4, 32, 48, 64).group_rows, 24);
        assert_eq!(MatrixQuant::resolve(lut4, 32, 37, 4096).group_rows, 1);
        // 32 bytes of table for each row of 8 weights would be more than fp16.
        assert_eq!(MatrixQuant::resolve(lut4, 32, 37, 8), MatrixQuant::FP16);
    }

    #[test]
    fn bytes_of_the_real_expert_pack() {
        let lut4: Quant = "lut4".parse().unwrap();
        let gate_up = MatrixQuant::resolve(lut4, 32, 1408, 2816);
        let down = MatrixQuant::resolve(lut4, 32, 2816, 704);
        let weights = 16 * (1408 * 2816 + 2816 * 704) as u64;
        let tables = 16 * (1408 / 32 + 2816 / 32) * 32;
        assert_eq!(16 * (gate_up.bytes(1408, 2816) + down.bytes(2816, 704)), weights / 2 + tables);
        assert_eq!(weights / 2, 47_579_136);
    }
}
