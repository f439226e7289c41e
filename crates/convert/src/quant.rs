//! Compression kinds as the command line names them.

use crate::nearest::nearest;
use anemoe_bundle::{IndexBits, IntBits, WeightFormat};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A weight compression kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Quant {
    /// Plain fp16.
    Fp16,
    /// Palettization: an index of `bits` bits into a table of fp16 values, `constexpr_lut_to_dense`.
    Lut {
        /// Width of an index.
        bits: IndexBits,
        /// Equidistant tables instead of k-means.
        uniform: bool,
        /// One table for the whole matrix instead of one per group of rows.
        per_tensor: bool,
    },
    /// Linear: an integer times an fp16 scale, `constexpr_blockwise_shift_scale`.
    Int {
        /// Width of an integer.
        bits: IntBits,
        /// Elements that share a scale.
        granularity: Granularity,
        /// True if every scale has an offset.
        asymmetric: bool,
    },
    /// 4-bit floats (E2M1) times a power of two per block of input channels: `constexpr_lut_to_dense` with one table,
    /// then `constexpr_blockwise_shift_scale`.
    Mxfp4,
}

/// Elements that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Granularity {
    /// The whole matrix.
    Tensor,
    /// An output channel.
    Channel,
    /// A block of input channels of one output channel.
    Block,
}

impl Granularity {
    /// All of them.
    pub const ALL: [Granularity; 3] = [Granularity::Tensor, Granularity::Channel, Granularity::Block];

    /// Returns the name in kinds and tables: `tensor`, `channel`, `block`.
    pub const fn name(self) -> &'static str {
        match self {
            Granularity::Tensor => "tensor",
            Granularity::Channel => "channel",
            Granularity::Block => "block",
        }
    }

    /// Finds a granularity by its name.
    pub fn of_name(name: &str) -> Option<Granularity> {
        Granularity::ALL.into_iter().find(|g| g.name() == name)
    }
}

/// Kinds that are suggested for a mistyped name, and that tests go through.
pub(crate) const NAMES: [&str; 29] = [
    "fp16",
    "int8-tensor",
    "int8-tensor-asymmetric",
    "int8-channel",
    "int8-channel-asymmetric",
    "int8-block",
    "int8-block-asymmetric",
    "int4-tensor",
    "int4-tensor-asymmetric",
    "int4-channel",
    "int4-channel-asymmetric",
    "int4-block",
    "int4-block-asymmetric",
    "lut1",
    "lut2",
    "lut3",
    "lut4",
    "lut6",
    "lut8",
    "lut4-uniform",
    "lut6-uniform",
    "lut8-uniform",
    "lut4-tensor",
    "lut6-tensor",
    "lut8-tensor",
    "lut4-uniform-tensor",
    "lut6-uniform-tensor",
    "lut8-uniform-tensor",
    "mxfp4",
];

/// Finds the kind that is nearest to another tool's kind: `q6_k` gives `lut6`.
fn foreign_name(text: &str) -> Option<&'static str> {
    Some(match text.to_lowercase().as_str() {
        "f16" | "float16" | "half" | "none" | "bf16" | "bfloat16" | "fp32" | "f32" | "float32" | "float" => {
            "fp16"
        }
        "int4" | "q4" | "q4_0" | "4bit" | "w4" => "int4-block",
        "q4_1" => "int4-block-asymmetric",
        "int8" | "q8" | "8bit" | "w8" => "int8-channel",
        "q8_0" => "int8-block",
        "q4_k" | "q4_k_m" | "q4_k_s" | "iq4_nl" | "nf4" => "lut4",
        "fp4" | "mx4" | "e2m1" | "mxfp4_moe" => "mxfp4",
        "q6_k" => "lut6",
        "q3_k" | "q3_k_m" | "q3_k_s" => "lut3",
        "q2_k" => "lut2",
        _ => return None,
    })
}

impl Quant {
    /// Names of all kinds, for help and messages.
    pub const NAMES_EXPECTED: &str = "fp16, int{4,8} with -tensor, -channel or -block and -asymmetric as an option, \
                                      lut{1,2,3,4,6,8} with -uniform and -tensor as options, or mxfp4";

    /// Makes the kind of k-means tables per group of rows, with indices of `bits` bits.
    pub const fn lut(bits: IndexBits) -> Quant {
        Quant::Lut { bits, uniform: false, per_tensor: false }
    }

    /// Makes the kind of integers of `bits` bits without offsets.
    pub const fn int(bits: IntBits, granularity: Granularity) -> Quant {
        Quant::Int { bits, granularity, asymmetric: false }
    }

    /// Returns the bits of a stored element.
    pub const fn bits(self) -> u8 {
        match self {
            Quant::Fp16 => 16,
            Quant::Lut { bits, .. } => bits.bits(),
            Quant::Int { bits, .. } => bits.bits(),
            Quant::Mxfp4 => 4,
        }
    }

    /// Tells whether each block of input channels has a scale. A convolution's block holds the whole kernels of its
    /// channels.
    pub const fn has_blocks(self) -> bool {
        matches!(self, Quant::Int { granularity: Granularity::Block, .. } | Quant::Mxfp4)
    }

    /// Tells whether the whole matrix has one scale, and no offset.
    pub const fn has_one_scale(self) -> bool {
        matches!(self, Quant::Int { granularity: Granularity::Tensor, asymmetric: false, .. })
    }

    /// Tells whether the whole matrix has one table or scale.
    pub const fn is_per_tensor(self) -> bool {
        matches!(
            self,
            Quant::Lut { per_tensor: true, .. } | Quant::Int { granularity: Granularity::Tensor, .. }
        )
    }

    /// Explains why the kind cannot be written for systems before iOS18 and macOS 15, whose tables and scales are per
    /// tensor or per channel; none where it can.
    pub fn refused_by_ios16(self) -> Option<String> {
        match self {
            Quant::Lut { per_tensor: false, .. } => {
                Some("before iOS18 a table belongs to a whole tensor: add -tensor".into())
            }
            Quant::Lut { bits: IndexBits::Three, .. } => {
                Some("before iOS18 there are no 3-bit indices".into())
            }
            Quant::Int { bits: IntBits::Four, .. } | Quant::Int { granularity: Granularity::Block, .. } => {
                Some("before iOS18 there are neither 4-bit integers nor scales per block".into())
            }
            Quant::Mxfp4 => Some("before iOS18 there are no scales per block".into()),
            _ => None,
        }
    }
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
            Quant::Int { bits, granularity, asymmetric } => {
                write!(f, "int{bits}-{}", granularity.name())?;
                if *asymmetric {
                    f.write_str("-asymmetric")?;
                }
                Ok(())
            }
            Quant::Mxfp4 => f.write_str("mxfp4"),
        }
    }
}

impl FromStr for Quant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || {
            let meant = foreign_name(text).or_else(|| nearest(text, NAMES));
            let question = meant.map(|name| format!("did you mean `{name}`? ")).unwrap_or_default();
            format!("unknown compression kind `{text}`: {question}expected {}", Quant::NAMES_EXPECTED)
        };
        match text {
            "fp16" => return Ok(Quant::Fp16),
            "mxfp4" => return Ok(Quant::Mxfp4),
            _ => {}
        }
        if text.starts_with("int") {
            let (name, asymmetric) = text.strip_suffix("-asymmetric").map_or((text, false), |t| (t, true));
            let (stem, shared) = name.split_once('-').ok_or_else(unknown)?;
            let granularity = Granularity::of_name(shared).ok_or_else(unknown)?;
            let bits =
                IntBits::ALL.into_iter().find(|bits| format!("int{bits}") == stem).ok_or_else(unknown)?;
            return Ok(Quant::Int { bits, granularity, asymmetric });
        }
        let rest = text.strip_prefix("lut").ok_or_else(unknown)?;
        let (rest, per_tensor) = rest.strip_suffix("-tensor").map_or((rest, false), |r| (r, true));
        let (rest, uniform) = rest.strip_suffix("-uniform").map_or((rest, false), |r| (r, true));
        match IndexBits::ALL.into_iter().find(|bits| bits.to_string() == rest) {
            Some(bits) => Ok(Quant::Lut { bits, uniform, per_tensor }),
            None if matches!(rest, "5" | "7") => {
                Err(format!("`{text}`: Core ML has no {rest}-bit element type; use 1, 2, 3, 4, 6 or 8 bits"))
            }
            None => Err(unknown()),
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

/// A kind as it is applied to one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MatrixQuant {
    /// The kind.
    pub kind: Quant,
    /// Rows that share a table, or input channels that share a scale: a divisor of their number. 0 where the kind has
    /// no groups.
    pub group: usize,
}

/// Wanted sizes of the groups that share a table or a scale. A matrix has the largest divisor up to the wanted size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Groups {
    /// Rows that share a table.
    pub rows: usize,
    /// Input channels that share a scale.
    pub block: usize,
}

impl Default for Groups {
    fn default() -> Self {
        Groups { rows: 32, block: 32 }
    }
}

fn largest_divisor(n: usize, limit: usize) -> usize {
    (1..=limit.min(n)).rev().find(|d| n.is_multiple_of(*d)).unwrap_or(1)
}

/// Fewest rows that share a table, unless fewer are wanted. A table for every row was placed on the ANE, but its
/// results drifted (CoreML-LLM); coremltools leaves such matrices uncompressed.
const MIN_TABLE_ROWS: usize = 8;

impl MatrixQuant {
    /// Plain fp16.
    pub const FP16: MatrixQuant = MatrixQuant { kind: Quant::Fp16, group: 0 };

    /// Resolves `kind` for a matrix of `rows` x `cols`: the group is the largest divisor that is at most the
    /// wanted size, and a matrix whose tables or scales would cost more than they save stays fp16.
    pub fn resolve(kind: Quant, groups: Groups, rows: usize, cols: usize) -> MatrixQuant {
        MatrixQuant::resolve_kernels(kind, groups, rows, (cols, 1))
    }

    /// Resolves `kind` like [`MatrixQuant::resolve`] for `rows` of `taps` weights for each input channel. A block of input
    /// channels holds their whole kernels.
    pub fn resolve_kernels(
        kind: Quant,
        groups: Groups,
        rows: usize,
        (channels, taps): (usize, usize),
    ) -> MatrixQuant {
        let cols = channels * taps;
        let group = match kind {
            Quant::Fp16 => return MatrixQuant::FP16,
            Quant::Lut { per_tensor: true, .. } => rows,
            Quant::Lut { .. } => largest_divisor(rows, groups.rows),
            _ if kind.has_blocks() => largest_divisor(channels, groups.block) * taps,
            Quant::Int { .. } | Quant::Mxfp4 => 0,
        };
        let quant = MatrixQuant { kind, group };
        // The largest divisor is far below the wanted size: nearly every row would have its own table.
        if matches!(kind, Quant::Lut { per_tensor: false, .. }) && group < MIN_TABLE_ROWS.min(groups.rows) {
            return MatrixQuant::FP16;
        }
        if quant.bytes(rows, cols) < MatrixQuant::FP16.bytes(rows, cols) { quant } else { MatrixQuant::FP16 }
    }

    /// Returns the numbers of row groups and of column blocks; each pair of them has its own table or scale.
    pub fn groups_and_blocks(&self, rows: usize, cols: usize) -> (usize, usize) {
        let (block_rows, block_cols) = self.block(rows, cols);
        (rows / block_rows.max(1), cols / block_cols.max(1))
    }

    /// Returns the rows and columns that share a table or a scale.
    pub fn block(&self, rows: usize, cols: usize) -> (usize, usize) {
        match self.kind {
            Quant::Int { granularity: Granularity::Tensor, .. } | Quant::Fp16 => (rows, cols),
            Quant::Int { granularity: Granularity::Channel, .. } => (1, cols),
            Quant::Int { granularity: Granularity::Block, .. } | Quant::Mxfp4 => (1, self.group),
            Quant::Lut { .. } => (self.group, cols),
        }
    }

    /// Returns the format in which a matrix of `rows` x `cols` is stored.
    pub fn format(&self, rows: usize, cols: usize) -> WeightFormat {
        let (block_rows, block_cols) = self.block(rows, cols);
        match self.kind {
            Quant::Fp16 => WeightFormat::Fp16,
            Quant::Lut { bits, .. } => WeightFormat::Lut { bits, rows_per_table: block_rows },
            Quant::Int { bits, asymmetric, .. } => {
                WeightFormat::Int { bits, signed: true, block_rows, block_cols, offsets: asymmetric }
            }
            Quant::Mxfp4 => WeightFormat::Mxfp4 { block_cols },
        }
    }

    /// Returns the bytes of a matrix of `rows` x `cols` with its tables, scales and offsets.
    pub fn bytes(&self, rows: usize, cols: usize) -> u64 {
        let elements = (rows as u64 * cols as u64 * u64::from(self.kind.bits())).div_ceil(8);
        let (groups, blocks) = self.groups_and_blocks(rows, cols);
        let sides = groups as u64 * blocks as u64;
        elements
            + match self.kind {
                Quant::Fp16 => 0,
                Quant::Lut { bits, .. } => sides * (2 << bits.bits()),
                Quant::Int { asymmetric: false, .. } | Quant::Mxfp4 => 2 * sides,
                Quant::Int { bits, asymmetric: true, .. } => {
                    2 * sides + (sides * u64::from(bits.bits())).div_ceil(8)
                }
            }
    }

    /// Explains how kind or group differ from the kind `asked` and the wanted `groups`; none where they do not.
    pub fn differs_from(&self, asked: Quant, groups: Groups) -> Option<String> {
        if self.kind != asked {
            return Some(format!("stays {}: tables or scales would cost more than {asked} saves", self.kind));
        }
        let (wanted, of) = match asked {
            Quant::Lut { per_tensor: false, .. } => (groups.rows, "rows"),
            _ if asked.has_blocks() => (groups.block, "input channels"),
            _ => return None,
        };
        (self.group != wanted).then(|| format!("groups of {} {of}: {wanted} do not divide them", self.group))
    }
}

impl fmt::Display for MatrixQuant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Quant::Lut { per_tensor: false, .. } => write!(f, "{} g{}", self.kind, self.group),
            kind if kind.has_blocks() => write!(f, "{kind} g{}", self.group),
            kind => kind.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_read_as_it_is_written() {
        for text in NAMES {
            assert_eq!(text.parse::<Quant>().unwrap().to_string(), text);
        }
        for (text, says) in [
            ("lut5", "5-bit"),
            ("lut7-uniform", "7-bit"),
            ("int3", "unknown"),
            ("int4-row", "unknown"),
            ("int16-tensor", "unknown"),
            ("int4-", "unknown"),
            ("lut", "unknown"),
            ("lut44", "unknown"),
            ("", "unknown"),
            ("LUT4", "did you mean `lut4`?"),
            ("int4", "did you mean `int4-block`?"),
            ("mxfp", "did you mean `mxfp4`?"),
            ("MXFP4", "did you mean `mxfp4`?"),
            ("q4_0", "did you mean `int4-block`?"),
            ("Q8_0", "did you mean `int8-block`?"),
            ("lut4-unifrom", "did you mean `lut4-uniform`?"),
        ] {
            let err = text.parse::<Quant>().unwrap_err();
            assert!(err.contains(says), "{text}: {err}");
        }
    }

    #[test]
    fn a_group_divides_or_the_matrix_stays_fp16() {
        let lut4 = Quant::lut(IndexBits::Four);
        let groups = Groups::default();
        assert_eq!(MatrixQuant::resolve(lut4, groups, 704, 2816).group, 32);
        assert_eq!(MatrixQuant::resolve(lut4, groups, 48, 64).group, 24);
        // A depthwise kernel of nine taps is worth a scale of its own, one tap is not; blocks hold whole kernels.
        let int8: Quant = "int8-channel".parse().unwrap();
        assert_eq!(MatrixQuant::resolve_kernels(int8, groups, 96, (1, 9)).kind, int8);
        assert_eq!(MatrixQuant::resolve_kernels(int8, groups, 96, (1, 1)), MatrixQuant::FP16);
        let block: Quant = "int4-block".parse().unwrap();
        assert_eq!(MatrixQuant::resolve_kernels(block, groups, 96, (64, 9)).group, 32 * 9);
        // Every row would have a table.
        let stays = MatrixQuant::resolve(lut4, groups, 37, 4096);
        assert_eq!(stays, MatrixQuant::FP16);
        assert_eq!(
            MatrixQuant::resolve(lut4, Groups { rows: 1, ..groups }, 37, 4096).group,
            1,
            "as asked for"
        );
        // 32 bytes of table for each 8 rows of 2 weights would be more than fp16.
        assert_eq!(MatrixQuant::resolve(lut4, Groups { rows: 8, ..groups }, 8, 2), MatrixQuant::FP16);
        assert!(stays.differs_from(lut4, groups).unwrap().contains("stays fp16"));
        let shorter = MatrixQuant::resolve(lut4, groups, 48, 64).differs_from(lut4, groups);
        assert!(shorter.unwrap().contains("groups of 24 rows"));
        assert_eq!(MatrixQuant::resolve(lut4, groups, 64, 64).differs_from(lut4, groups), None);
        let block: Quant = "int4-block".parse().unwrap();
        assert_eq!(MatrixQuant::resolve(block, groups, 5, 720).group, 30);
        // Every weight would have a scale.
        assert_eq!(MatrixQuant::resolve(block, groups, 5, 37), MatrixQuant::FP16);
    }

    #[test]
    fn bytes_count_tables_scales_and_offsets() {
        let groups = Groups::default();
        let bytes = |kind: &str| MatrixQuant::resolve(kind.parse().unwrap(), groups, 64, 96).bytes(64, 96);
        assert_eq!(bytes("fp16"), 12288);
        assert_eq!(bytes("lut4"), 3072 + 2 * 32);
        assert_eq!(bytes("lut3-tensor"), 2304 + 16);
        assert_eq!(bytes("int8-tensor"), 6144 + 2);
        assert_eq!(bytes("int8-channel-asymmetric"), 6144 + 64 * 3);
        assert_eq!(bytes("int8-block"), 6144 + 64 * 3 * 2);
        assert_eq!(bytes("int4-channel"), 3072 + 64 * 2);
        assert_eq!(bytes("int4-channel-asymmetric"), 3072 + 64 * 2 + 32);
        assert_eq!(bytes("int4-block"), 3072 + 64 * 3 * 2);
        assert_eq!(bytes("mxfp4"), 3072 + 64 * 3 * 2);
        assert_eq!(bytes("int4-block-asymmetric"), 3072 + 64 * 3 * 2 + 96);
    }

    #[test]
    fn older_systems_refuse_some_kinds() {
        let refused = |kind: &str| kind.parse::<Quant>().unwrap().refused_by_ios16();
        assert!(refused("lut3-tensor").unwrap().contains("3-bit"));
        assert!(refused("lut4").unwrap().contains("-tensor"));
        for kind in ["int4-block", "int4-channel", "int4-tensor-asymmetric", "int8-block"] {
            assert!(refused(kind).unwrap().contains("4-bit"), "{kind}");
        }
        assert!(refused("mxfp4").unwrap().contains("scales per block"));
        for kind in ["fp16", "lut4-tensor", "int8-tensor", "int8-channel", "int8-channel-asymmetric"] {
            assert_eq!(refused(kind), None, "{kind}");
        }
    }

    #[test]
    fn bytes_of_the_real_expert_pack() {
        let lut4 = Quant::lut(IndexBits::Four);
        let gate_up = MatrixQuant::resolve(lut4, Groups::default(), 1408, 2816);
        let down = MatrixQuant::resolve(lut4, Groups::default(), 2816, 704);
        let weights = 16 * (1408 * 2816 + 2816 * 704) as u64;
        let tables = 16 * (1408 / 32 + 2816 / 32) * 32;
        assert_eq!(16 * (gate_up.bytes(1408, 2816) + down.bytes(2816, 704)), weights / 2 + tables);
        assert_eq!(weights / 2, 47_579_136);
    }
}
