//! Host tensors: the values of inputs, outputs and operands.

/// Elements of a tensor. Float types are held as f32 (fp16 values are already rounded), integer types as i32.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// fp16, fp32, fp64.
    F32(Vec<f32>),
    /// Integers of any width.
    I32(Vec<i32>),
    /// bool.
    Bool(Vec<bool>),
    /// Strings; only constant parameters such as `pad_type` have this type.
    Str(Vec<String>),
}

/// A dense row-major tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Dimensions, outermost first; a scalar has none.
    pub shape: Vec<usize>,
    /// `shape.iter().product()` elements.
    pub data: Data,
}

/// An empty tensor: no elements, not even the one of a scalar, and of strings, so that a kernel that reads it by mistake
/// reports an error.
impl Default for Tensor {
    fn default() -> Self {
        Tensor { shape: Vec::new(), data: Data::Str(Vec::new()) }
    }
}

impl Tensor {
    /// Makes a float tensor. `data` must have as many elements as `shape`.
    pub fn f32(shape: &[usize], data: Vec<f32>) -> Self {
        assert_eq!(shape.iter().product::<usize>(), data.len());
        Tensor { shape: shape.to_vec(), data: Data::F32(data) }
    }

    /// Makes an integer tensor. `data` must have as many elements as `shape`.
    pub fn i32(shape: &[usize], data: Vec<i32>) -> Self {
        assert_eq!(shape.iter().product::<usize>(), data.len());
        Tensor { shape: shape.to_vec(), data: Data::I32(data) }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match &self.data {
            Data::F32(v) => v.len(),
            Data::I32(v) => v.len(),
            Data::Bool(v) => v.len(),
            Data::Str(v) => v.len(),
        }
    }

    /// Tells whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Returns the elements; none where they are of another type.
    pub fn elements<T: TensorElement>(&self) -> Option<&[T]> {
        T::of(&self.data).map(Vec::as_slice)
    }

    /// Returns the elements of a float tensor; none for other types.
    pub fn as_f32(&self) -> Option<&[f32]> {
        self.elements()
    }

    /// Returns the elements of a float tensor for writing; none for other types.
    pub fn as_f32_mut(&mut self) -> Option<&mut [f32]> {
        f32::of_mut(&mut self.data).map(Vec::as_mut_slice)
    }

    /// Returns the elements of an integer tensor; none for other types.
    pub fn as_i32(&self) -> Option<&[i32]> {
        self.elements()
    }

    /// Returns the elements of a bool tensor; none for other types.
    pub fn as_bool(&self) -> Option<&[bool]> {
        self.elements()
    }

    /// Makes it a tensor of `shape`, keeping its allocation; elements are unspecified until written.
    pub fn reset<T: TensorElement>(&mut self, shape: &[usize]) -> &mut [T] {
        self.shape.clear();
        self.shape.extend_from_slice(shape);
        if T::of(&self.data).is_none() {
            self.data = T::data(Vec::new());
        }
        let Some(v) = T::of_mut(&mut self.data) else { unreachable!("set just above") };
        v.resize(shape.iter().product(), T::default());
        v
    }

    /// Makes it a float tensor like [`Tensor::reset`].
    pub fn reset_f32(&mut self, shape: &[usize]) -> &mut [f32] {
        self.reset(shape)
    }

    /// Makes it an integer tensor like [`Tensor::reset`].
    pub fn reset_i32(&mut self, shape: &[usize]) -> &mut [i32] {
        self.reset(shape)
    }

    /// Makes it a bool tensor like [`Tensor::reset`].
    pub fn reset_bool(&mut self, shape: &[usize]) -> &mut [bool] {
        self.reset(shape)
    }
}

/// Type of the elements of a tensor.
pub trait TensorElement: Copy + Default + PartialEq + Send + Sync + 'static {
    /// Returns the elements; none where they are of another type.
    fn of(data: &Data) -> Option<&Vec<Self>>;
    /// Returns the elements for writing; none where they are of another type.
    fn of_mut(data: &mut Data) -> Option<&mut Vec<Self>>;
    /// Makes the data of a tensor.
    fn data(elements: Vec<Self>) -> Data;
    /// Converts an element to a number, exactly; `true` is 1.
    fn number(self) -> f64;
}

/// Implements [`TensorElement`] for a type, given its variant of [`Data`] and the conversion to a number.
macro_rules! element {
    ($ty:ty, $kind:ident, $number:expr) => {
        impl TensorElement for $ty {
            fn of(data: &Data) -> Option<&Vec<$ty>> {
                if let Data::$kind(v) = data { Some(v) } else { None }
            }

            fn of_mut(data: &mut Data) -> Option<&mut Vec<$ty>> {
                if let Data::$kind(v) = data { Some(v) } else { None }
            }

            fn data(elements: Vec<$ty>) -> Data {
                Data::$kind(elements)
            }

            #[inline(always)]
            fn number(self) -> f64 {
                $number(self)
            }
        }
    };
}
element!(f32, F32, f64::from);
element!(i32, I32, f64::from);
element!(bool, Bool, |v| f64::from(u8::from(v)));

/// Runs code, compiled for each of some types, with the elements of one or two tensors of one type. Runs `$other` where they are
/// of another type: `with_elements!(F32 | I32, &x.data, |v| v.len(), 0)`.
macro_rules! with_elements {
    ($($kind:ident)|+, $data:expr, |$v:ident| $code:expr, $other:expr) => {
        match $data {
            $($crate::tensor::Data::$kind($v) => $code,)+
            _ => $other,
        }
    };
    ($($kind:ident)|+, ($a:expr, $b:expr), |$v:ident, $w:ident| $code:expr, $other:expr) => {
        match ($a, $b) {
            $(($crate::tensor::Data::$kind($v), $crate::tensor::Data::$kind($w)) => $code,)+
            _ => $other,
        }
    };
}
pub(crate) use with_elements;
