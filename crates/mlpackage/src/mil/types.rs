//! Data types, dimensions and value types.

use std::fmt;

/// Element type of a tensor, named and numbered as in `MIL.proto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum DataType {
    Bool,
    String,
    Float16,
    Float32,
    Float64,
    BFloat16,
    Int8,
    Int16,
    Int32,
    Int64,
    Int4,
    UInt8,
    UInt16,
    UInt32,
    UInt64,
    UInt4,
    UInt2,
    UInt1,
    UInt6,
    UInt3,
    Float8E4M3FN,
    Float8E5M2,
}

impl DataType {
    /// Returns the bits of one stored element; 0 for strings, which have no fixed size.
    pub const fn bits(self) -> usize {
        use DataType::*;
        match self {
            String => 0,
            UInt1 => 1,
            UInt2 => 2,
            UInt3 => 3,
            Int4 | UInt4 => 4,
            UInt6 => 6,
            Bool | Int8 | UInt8 | Float8E4M3FN | Float8E5M2 => 8,
            Float16 | BFloat16 | Int16 | UInt16 => 16,
            Float32 | Int32 | UInt32 => 32,
            Float64 | Int64 | UInt64 => 64,
        }
    }

    /// Returns the bytes of `count` elements; sub-byte types are packed without padding. `None` when the product overflows.
    pub fn packed_bytes(self, count: u64) -> Option<u64> {
        Some(count.checked_mul(self.bits() as u64)?.div_ceil(8))
    }

    /// Tells whether the type is floating point, of any width.
    pub const fn is_float(self) -> bool {
        use DataType::*;
        matches!(self, Float16 | Float32 | Float64 | BFloat16 | Float8E4M3FN | Float8E5M2)
    }

    /// Tells whether the type is a signed or unsigned integer of any width; bool is not one.
    pub const fn is_int(self) -> bool {
        !self.is_float() && !matches!(self, DataType::Bool | DataType::String)
    }

    /// Returns the name in MIL text and in `cast`'s `dtype` argument, for instance `fp16`.
    pub const fn name(self) -> &'static str {
        use DataType::*;
        match self {
            Bool => "bool",
            String => "string",
            Float16 => "fp16",
            Float32 => "fp32",
            Float64 => "fp64",
            BFloat16 => "bf16",
            Int8 => "int8",
            Int16 => "int16",
            Int32 => "int32",
            Int64 => "int64",
            Int4 => "int4",
            UInt8 => "uint8",
            UInt16 => "uint16",
            UInt32 => "uint32",
            UInt64 => "uint64",
            UInt4 => "uint4",
            UInt2 => "uint2",
            UInt1 => "uint1",
            UInt6 => "uint6",
            UInt3 => "uint3",
            Float8E4M3FN => "fp8e4m3fn",
            Float8E5M2 => "fp8e5m2",
        }
    }

    /// Returns the unsigned type of `bits` bits that LUT indices use; `None` unless `bits` is 1, 2, 3, 4, 6 or 8.
    pub const fn uint_of_bits(bits: usize) -> Option<DataType> {
        match bits {
            1 => Some(DataType::UInt1),
            2 => Some(DataType::UInt2),
            3 => Some(DataType::UInt3),
            4 => Some(DataType::UInt4),
            6 => Some(DataType::UInt6),
            8 => Some(DataType::UInt8),
            _ => None,
        }
    }

    /// Returns the signed type of `bits` bits that weights have; `None` unless `bits` is 4 or 8.
    pub const fn int_of_bits(bits: usize) -> Option<DataType> {
        match bits {
            4 => Some(DataType::Int4),
            8 => Some(DataType::Int8),
            _ => None,
        }
    }

    /// Tells whether integers of the type are two's complement; `None` for other types than [`DataType::int_of_bits`] and
    /// [`DataType::uint_of_bits`] give.
    pub fn weight_is_signed(self) -> Option<bool> {
        let is = |of: Option<DataType>| of == Some(self);
        let (signed, unsigned) =
            (is(DataType::int_of_bits(self.bits())), is(DataType::uint_of_bits(self.bits())));
        (signed || unsigned).then_some(signed)
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One dimension of a tensor type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dim {
    /// Known size.
    Fixed(u64),
    /// Known only when the program runs (`unknown {}` in the format; it carries no name).
    Unknown,
    /// Any number of dimensions, known only when the program runs (`unknown { variadic: true }`).
    Variadic,
}

impl Dim {
    /// Returns the size; `None` if it is unknown.
    pub const fn fixed(self) -> Option<u64> {
        match self {
            Dim::Fixed(n) => Some(n),
            Dim::Unknown | Dim::Variadic => None,
        }
    }
}

impl From<u64> for Dim {
    fn from(n: u64) -> Self {
        Dim::Fixed(n)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Fixed(n) => write!(f, "{n}"),
            Dim::Unknown => f.write_str("?"),
            Dim::Variadic => f.write_str("..."),
        }
    }
}

/// Element type and dimensions. A scalar has no dimensions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorType {
    /// Element type.
    pub dtype: DataType,
    /// Dimensions, outermost first; row-major storage.
    pub dims: Vec<Dim>,
}

impl TensorType {
    /// Makes a type with known dimensions.
    pub fn fixed(dtype: DataType, dims: &[u64]) -> Self {
        TensorType { dtype, dims: dims.iter().copied().map(Dim::Fixed).collect() }
    }

    /// Makes a type with known or unknown dimensions.
    pub fn new(dtype: DataType, dims: Vec<Dim>) -> Self {
        TensorType { dtype, dims }
    }

    /// Makes the type of a scalar, which has no dimensions.
    pub fn scalar(dtype: DataType) -> Self {
        TensorType { dtype, dims: Vec::new() }
    }

    /// Returns the number of dimensions.
    pub fn rank(&self) -> usize {
        self.dims.len()
    }

    /// Tells whether the number of dimensions is known.
    pub fn has_rank(&self) -> bool {
        !self.dims.contains(&Dim::Variadic)
    }

    /// Returns all sizes; `None` when one is unknown.
    pub fn shape(&self) -> Option<Vec<u64>> {
        self.dims.iter().map(|d| d.fixed()).collect()
    }

    /// Returns the number of elements; `None` when a size is unknown or the product overflows.
    pub fn elements(&self) -> Option<u64> {
        self.dims.iter().try_fold(1u64, |n, d| n.checked_mul(d.fixed()?))
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tensor<{}, [", self.dtype)?;
        for (i, d) in self.dims.iter().enumerate() {
            write!(f, "{}{d}", if i > 0 { ", " } else { "" })?;
        }
        f.write_str("]>")
    }
}

/// Type of a value in a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValueType {
    /// A tensor; scalars are tensors of rank 0.
    Tensor(TensorType),
    /// A state that outlives one prediction; only function inputs have this type.
    State(TensorType),
    /// A list of values of one type; `length` is unknown for dynamic lists.
    List {
        /// Type of each element.
        element: Box<ValueType>,
        /// Number of elements.
        length: Dim,
    },
    /// A fixed sequence of types.
    Tuple(Vec<ValueType>),
    /// A map.
    Dictionary {
        /// Type of the keys.
        key: Box<ValueType>,
        /// Type of the values.
        value: Box<ValueType>,
    },
}

impl ValueType {
    /// Returns the type of a tensor, or of the tensor that a state wraps; `None` for other types.
    pub fn tensor(&self) -> Option<&TensorType> {
        match self {
            ValueType::Tensor(t) | ValueType::State(t) => Some(t),
            _ => None,
        }
    }
}

impl From<TensorType> for ValueType {
    fn from(t: TensorType) -> Self {
        ValueType::Tensor(t)
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ValueType::Tensor(t) => t.fmt(f),
            ValueType::State(t) => write!(f, "state<{t}>"),
            ValueType::List { element, length } => write!(f, "list<{element}, {length}>"),
            ValueType::Tuple(types) => {
                f.write_str("tuple<")?;
                for (i, t) in types.iter().enumerate() {
                    write!(f, "{}{t}", if i > 0 { ", " } else { "" })?;
                }
                f.write_str(">")
            }
            ValueType::Dictionary { key, value } => write!(f, "dict<{key}, {value}>"),
        }
    }
}
