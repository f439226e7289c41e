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

    /// Returns the elements of a float tensor; none for other types.
    pub fn as_f32(&self) -> Option<&[f32]> {
        match &self.data {
            Data::F32(v) => Some(v),
            _ => None,
        }
    }

    /// Returns the elements of a float tensor for writing; none for other types.
    pub fn as_f32_mut(&mut self) -> Option<&mut [f32]> {
        match &mut self.data {
            Data::F32(v) => Some(v),
            _ => None,
        }
    }

    /// Returns the elements of an integer tensor; none for other types.
    pub fn as_i32(&self) -> Option<&[i32]> {
        match &self.data {
            Data::I32(v) => Some(v),
            _ => None,
        }
    }

    /// Returns the elements of a bool tensor; none for other types.
    pub fn as_bool(&self) -> Option<&[bool]> {
        match &self.data {
            Data::Bool(v) => Some(v),
            _ => None,
        }
    }

    /// Makes it a float tensor of `shape`, keeping its allocation; elements are unspecified until written.
    pub fn reset_f32(&mut self, shape: &[usize]) -> &mut [f32] {
        let n = shape.iter().product();
        self.shape.clear();
        self.shape.extend_from_slice(shape);
        if !matches!(self.data, Data::F32(_)) {
            self.data = Data::F32(Vec::new());
        }
        let Data::F32(v) = &mut self.data else { unreachable!("set just above") };
        v.resize(n, 0.0);
        v
    }

    /// Makes it an integer tensor of `shape`, keeping its allocation; elements are unspecified until written.
    pub fn reset_i32(&mut self, shape: &[usize]) -> &mut [i32] {
        let n = shape.iter().product();
        self.shape.clear();
        self.shape.extend_from_slice(shape);
        if !matches!(self.data, Data::I32(_)) {
            self.data = Data::I32(Vec::new());
        }
        let Data::I32(v) = &mut self.data else { unreachable!("set just above") };
        v.resize(n, 0);
        v
    }

    /// Makes it a bool tensor of `shape`, keeping its allocation; elements are unspecified until written.
    pub fn reset_bool(&mut self, shape: &[usize]) -> &mut [bool] {
        let n = shape.iter().product();
        self.shape.clear();
        self.shape.extend_from_slice(shape);
        if !matches!(self.data, Data::Bool(_)) {
            self.data = Data::Bool(Vec::new());
        }
        let Data::Bool(v) = &mut self.data else { unreachable!("set just above") };
        v.resize(n, false);
        v
    }
}
