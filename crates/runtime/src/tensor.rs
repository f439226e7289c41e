//! Host tensors: what goes into a prediction and comes out of it.

/// Elements. Every float type is held as f32 (fp16-typed values are already rounded to fp16), every integer type as i32.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// fp16, fp32, fp64.
    F32(Vec<f32>),
    /// Integers of any width.
    I32(Vec<i32>),
    /// bool.
    Bool(Vec<bool>),
    /// string; only constants of attributes such as `pad_type` have it.
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

/// No tensor yet: not even the element that a scalar has, and of a kind that nothing computes with, so that whoever reads it
/// is told so.
impl Default for Tensor {
    fn default() -> Self {
        Tensor { shape: Vec::new(), data: Data::Str(Vec::new()) }
    }
}

impl Tensor {
    /// A float tensor. `data` must have as many elements as `shape` says.
    pub fn f32(shape: &[usize], data: Vec<f32>) -> Self {
        assert_eq!(shape.iter().product::<usize>(), data.len());
        Tensor { shape: shape.to_vec(), data: Data::F32(data) }
    }

    /// An integer tensor. `data` must have as many elements as `shape` says.
    pub fn i32(shape: &[usize], data: Vec<i32>) -> Self {
        assert_eq!(shape.iter().product::<usize>(), data.len());
        Tensor { shape: shape.to_vec(), data: Data::I32(data) }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match &self.data {
            Data::F32(v) => v.len(),
            Data::I32(v) => v.len(),
            Data::Bool(v) => v.len(),
            Data::Str(v) => v.len(),
        }
    }

    /// No elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// The elements of a float tensor.
    pub fn as_f32(&self) -> Option<&[f32]> {
        match &self.data {
            Data::F32(v) => Some(v),
            _ => None,
        }
    }

    /// The elements of a float tensor, to be changed.
    pub fn as_f32_mut(&mut self) -> Option<&mut [f32]> {
        match &mut self.data {
            Data::F32(v) => Some(v),
            _ => None,
        }
    }

    /// The elements of an integer tensor.
    pub fn as_i32(&self) -> Option<&[i32]> {
        match &self.data {
            Data::I32(v) => Some(v),
            _ => None,
        }
    }

    /// The elements of a bool tensor.
    pub fn as_bool(&self) -> Option<&[bool]> {
        match &self.data {
            Data::Bool(v) => Some(v),
            _ => None,
        }
    }

    /// Becomes a float tensor of `shape`, keeping its allocation; the elements are unspecified until written.
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

    /// Becomes an integer tensor of `shape`, keeping its allocation; the elements are unspecified until written.
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

    /// Becomes a bool tensor of `shape`, keeping its allocation; the elements are unspecified until written.
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
