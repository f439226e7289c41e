//! Dense arrays of NumPy's numeric types.

use half::f16;

/// A dense array in C order.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// Dimensions, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// Elements; as many as the product of `shape`.
    pub data: ArrayData,
}

impl Array {
    /// Makes an array, or returns `None` when the shape's product is not the number of elements.
    pub fn new(shape: Vec<usize>, data: impl Into<ArrayData>) -> Option<Array> {
        let data = data.into();
        (elements(&shape) == Some(data.len())).then_some(Array { shape, data })
    }

    /// Returns the elements as f32: integers and f64 are rounded to the nearest, bools become 0 and 1.
    pub fn to_f32(&self) -> Vec<f32> {
        self.data.to_f32()
    }

    /// Returns the elements as i64 (bools become 0 and 1), or `None` where an element is not an integer that i64 holds.
    pub fn to_i64(&self) -> Option<Vec<i64>> {
        self.data.to_i64()
    }
}

/// Returns the product of a shape's dimensions, or `None` where it overflows `usize`. A dimension of 0 makes the
/// product 0, whatever the others are.
pub(crate) fn elements(shape: &[usize]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))
}

/// Element type with its stored form: little-endian bytes.
trait StoredElement: Copy {
    const BYTES: usize;
    fn from_le(bytes: &[u8]) -> Self;
    fn put_le(self, out: &mut Vec<u8>);
}

macro_rules! elements_as_bytes {
    ($($ty:ty),*) => {$(
        impl StoredElement for $ty {
            const BYTES: usize = size_of::<$ty>();

            fn from_le(bytes: &[u8]) -> Self {
                let mut own = [0u8; size_of::<$ty>()];
                own.copy_from_slice(bytes);
                <$ty>::from_le_bytes(own)
            }

            fn put_le(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}

elements_as_bytes!(f16, f32, f64, i8, u8, i16, u16, i32, u32, i64, u64);

impl StoredElement for bool {
    const BYTES: usize = 1;

    /// Returns true for any byte but 0. The reader has refused bytes other than 0 and 1 before.
    fn from_le(bytes: &[u8]) -> Self {
        bytes != [0]
    }

    fn put_le(self, out: &mut Vec<u8>) {
        out.push(u8::from(self));
    }
}

macro_rules! array_data {
    ($($variant:ident, $ty:ty, $descr:literal;)*) => {
        /// Elements of an array.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs)]
        pub enum ArrayData {
            $($variant(Vec<$ty>),)*
        }

        /// Element type of an array.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub enum DType {
            $($variant,)*
        }

        impl DType {
            /// All element types.
            pub const ALL: &[DType] = &[$(DType::$variant,)*];

            /// Returns NumPy's `dtype.str`, for instance `<f4`.
            pub const fn descr(self) -> &'static str {
                match self { $(DType::$variant => $descr,)* }
            }

            /// Returns the bytes of one element.
            pub const fn bytes(self) -> usize {
                match self { $(DType::$variant => <$ty as StoredElement>::BYTES,)* }
            }
        }

        impl ArrayData {
            /// Returns the element type.
            pub fn dtype(&self) -> DType {
                match self { $(ArrayData::$variant(_) => DType::$variant,)* }
            }

            /// Returns the number of elements.
            pub fn len(&self) -> usize {
                match self { $(ArrayData::$variant(v) => v.len(),)* }
            }

            /// Makes an empty list of elements of this type.
            pub(crate) fn empty(dtype: DType) -> ArrayData {
                match dtype { $(DType::$variant => ArrayData::$variant(Vec::new()),)* }
            }

            /// Appends the elements of little-endian `bytes`, without a last incomplete one. Returns false when
            /// memory runs out.
            pub(crate) fn extend_le(&mut self, bytes: &[u8]) -> bool {
                match self { $(ArrayData::$variant(v) => extend_le(v, bytes),)* }
            }

            /// Appends elements `range` to `out` as little-endian bytes.
            pub(crate) fn put_le(&self, range: std::ops::Range<usize>, out: &mut Vec<u8>) {
                match self {
                    $(ArrayData::$variant(v) => v[range].iter().for_each(|&x| x.put_le(out)),)*
                }
            }

            /// Returns the elements in C order; `self` holds them in Fortran order.
            pub(crate) fn fortran_to_c(&self, shape: &[usize]) -> ArrayData {
                match self { $(ArrayData::$variant(v) => ArrayData::$variant(fortran_to_c(v, shape)),)* }
            }
        }

        $(impl From<Vec<$ty>> for ArrayData {
            fn from(v: Vec<$ty>) -> Self {
                ArrayData::$variant(v)
            }
        })*
    };
}

array_data! {
    F16, f16, "<f2";
    F32, f32, "<f4";
    F64, f64, "<f8";
    I8, i8, "|i1";
    U8, u8, "|u1";
    I16, i16, "<i2";
    U16, u16, "<u2";
    I32, i32, "<i4";
    U32, u32, "<u4";
    I64, i64, "<i8";
    U64, u64, "<u8";
    Bool, bool, "|b1";
}

impl ArrayData {
    /// Tells whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Converts the elements to f32, as [`Array::to_f32`] does.
    pub fn to_f32(&self) -> Vec<f32> {
        fn each<T: Copy>(v: &[T], f: impl Fn(T) -> f32) -> Vec<f32> {
            v.iter().map(|&x| f(x)).collect()
        }
        match self {
            ArrayData::F16(v) => each(v, f16::to_f32),
            ArrayData::F32(v) => v.clone(),
            ArrayData::F64(v) => each(v, |x| x as f32),
            ArrayData::I8(v) => each(v, f32::from),
            ArrayData::U8(v) => each(v, f32::from),
            ArrayData::I16(v) => each(v, f32::from),
            ArrayData::U16(v) => each(v, f32::from),
            ArrayData::I32(v) => each(v, |x| x as f32),
            ArrayData::U32(v) => each(v, |x| x as f32),
            ArrayData::I64(v) => each(v, |x| x as f32),
            ArrayData::U64(v) => each(v, |x| x as f32),
            ArrayData::Bool(v) => each(v, |x| f32::from(u8::from(x))),
        }
    }

    /// Converts the elements to i64, as [`Array::to_i64`] does.
    pub fn to_i64(&self) -> Option<Vec<i64>> {
        fn each<T: Copy>(v: &[T], f: impl Fn(T) -> i64) -> Option<Vec<i64>> {
            Some(v.iter().map(|&x| f(x)).collect())
        }
        fn floats(v: impl Iterator<Item = f64>) -> Option<Vec<i64>> {
            // 2^63 is the first number that i64 does not hold; i64 holds -2^63.
            let limit = 9_223_372_036_854_775_808.0;
            v.map(|x| (x.trunc() == x && (-limit..limit).contains(&x)).then_some(x as i64)).collect()
        }
        match self {
            ArrayData::F16(v) => floats(v.iter().map(|x| x.to_f64())),
            ArrayData::F32(v) => floats(v.iter().map(|&x| f64::from(x))),
            ArrayData::F64(v) => floats(v.iter().copied()),
            ArrayData::I8(v) => each(v, i64::from),
            ArrayData::U8(v) => each(v, i64::from),
            ArrayData::I16(v) => each(v, i64::from),
            ArrayData::U16(v) => each(v, i64::from),
            ArrayData::I32(v) => each(v, i64::from),
            ArrayData::U32(v) => each(v, i64::from),
            ArrayData::I64(v) => Some(v.clone()),
            ArrayData::U64(v) => v.iter().map(|&x| i64::try_from(x).ok()).collect(),
            ArrayData::Bool(v) => each(v, i64::from),
        }
    }
}

fn extend_le<T: StoredElement>(v: &mut Vec<T>, bytes: &[u8]) -> bool {
    if v.try_reserve(bytes.len() / T::BYTES).is_err() {
        return false;
    }
    v.extend(bytes.chunks_exact(T::BYTES).map(T::from_le));
    true
}

/// Computes `v[i0 + d0 * (i1 + d1 * ...)]` for every index in C order; `v` is in Fortran order.
fn fortran_to_c<T: Copy>(v: &[T], shape: &[usize]) -> Vec<T> {
    // An empty array has nothing to reorder, and its other dimensions may be of any size.
    if v.is_empty() {
        return Vec::new();
    }
    let mut strides = Vec::with_capacity(shape.len());
    let mut stride = 1;
    for &d in shape {
        strides.push(stride);
        stride *= d;
    }
    let mut index = vec![0usize; shape.len()];
    let mut at = 0;
    let mut out = Vec::with_capacity(v.len());
    for _ in 0..v.len() {
        out.push(v[at]);
        for axis in (0..shape.len()).rev() {
            index[axis] += 1;
            at += strides[axis];
            if index[axis] < shape[axis] {
                break;
            }
            at -= index[axis] * strides[axis];
            index[axis] = 0;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fortran_order_is_transposed() {
        // [[0, 1, 2], [3, 4, 5]] in Fortran order.
        let data = ArrayData::from(vec![0u8, 3, 1, 4, 2, 5]);
        assert_eq!(data.fortran_to_c(&[2, 3]), vec![0u8, 1, 2, 3, 4, 5].into());
        let n: Vec<i32> = (0..24).collect();
        let c = ArrayData::from(n.clone()).fortran_to_c(&[2, 3, 4]).to_i64().unwrap();
        for (i, &value) in c.iter().enumerate() {
            let (a, b, d) = (i / 12, i / 4 % 3, i % 4);
            assert_eq!(value, (a + 2 * (b + 3 * d)) as i64);
        }
    }

    #[test]
    fn integers_are_exact_or_refused() {
        assert_eq!(ArrayData::from(vec![1.0f32, -2.0]).to_i64(), Some(vec![1, -2]));
        assert_eq!(ArrayData::from(vec![i64::MIN as f64]).to_i64(), Some(vec![i64::MIN]));
        assert_eq!(ArrayData::from(vec![u64::MAX]).to_i64(), None);
        for bad in [0.5, f64::NAN, f64::INFINITY, 9.3e18] {
            assert_eq!(ArrayData::from(vec![bad]).to_i64(), None, "{bad}");
        }
    }

    #[test]
    fn a_shape_that_is_not_the_data_is_refused() {
        assert!(Array::new(vec![2, 3], vec![0f32; 6]).is_some());
        assert!(Array::new(vec![2, 3], vec![0f32; 5]).is_none());
        assert!(Array::new(vec![usize::MAX, 2], vec![0f32; 0]).is_none());
        assert!(Array::new(vec![usize::MAX, 2, 0], vec![0f32; 0]).is_some());
    }
}
