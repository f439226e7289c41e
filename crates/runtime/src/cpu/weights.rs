//! Constants of a program: dense tensors, or matrices that stay compressed in the mapped package.

use super::ops::OpResult;
use super::strided::dense_strides;
use crate::cpu::ops::OpError;
use crate::cpu::ops::shape::count;
use crate::tensor::Tensor;
use anemoe_io::locked;
use anemoe_kernels::{
    IndexBits, IntBits, MXFP4_TABLE, Matrix, OwnedMatrix, PackedRows, Products, Weight, WeightFormat,
    f32_bytes,
};
use anemoe_mlpackage::blob::{SharedBlob, unpack_sub_byte};
use anemoe_mlpackage::mil::{Argument, Binding, DataType, Operation, TensorData, Value, ValueType};
use anemoe_mlpackage::package::Package;
use half::{bf16, f16};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// Key of a transposed weight: the blob that it is made from, and its columns.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Transposition {
    /// Address and length in bytes.
    blob: (usize, usize),
    cols: usize,
    products: Products,
}

/// Transposed weights that functions hold. The kept blob ensures that no other blob gets the same address.
static TRANSPOSED: Mutex<BTreeMap<Transposition, (SharedBlob, Weak<StoredWeight>)>> =
    Mutex::new(BTreeMap::new());

/// A constant value of a program.
#[derive(Clone)]
pub(super) enum Constant {
    /// A decoded tensor.
    Dense(Arc<Tensor>),
    /// A weight left as stored.
    Stored(Arc<StoredWeight>),
}

/// Fewest tokens for which the rows of a dense weight are packed: for fewer, reading it takes longer than multiplying.
const MIN_PACKED_TOKENS: usize = 9;

/// A weight tensor that kernels read as stored.
pub(super) struct StoredWeight {
    matrix: OwnedMatrix<Elements>,
    /// Shape of the dense tensor; the first dimension gives the rows, all others the columns.
    pub shape: Vec<usize>,
    /// Rows packed for products with many tokens.
    packed: OnceLock<PackedRows>,
}

enum Elements {
    /// Elements in the mapped package.
    Blob(SharedBlob),
    /// Decoded elements, for formats that kernels do not read as stored.
    Dense(Arc<Tensor>),
    /// Rearranged elements, in the format of the blob.
    Owned(Vec<u8>),
}

impl AsRef<[u8]> for Elements {
    fn as_ref(&self) -> &[u8] {
        match self {
            Elements::Blob(blob) => blob.data(),
            Elements::Dense(t) => f32_bytes(t.as_f32().unwrap_or_default()),
            Elements::Owned(bytes) => bytes,
        }
    }
}

impl StoredWeight {
    fn new(weight: Weight<Elements, Vec<f32>>, shape: Vec<usize>) -> OpResult<StoredWeight> {
        let (rows, cols) = (shape.first().copied().unwrap_or(1), shape.iter().skip(1).product());
        let matrix =
            OwnedMatrix::new(weight, rows, cols).map_err(|e| OpError::Invalid(format!("matrix: {e}")))?;
        Ok(StoredWeight { matrix, shape, packed: OnceLock::new() })
    }

    /// Makes a weight whose elements stay in the package, with its tables or scales, and its offsets.
    fn mapped(
        package: &Package,
        data: &Value,
        format: WeightFormat,
        (values, offsets): (Option<Vec<f32>>, Option<Vec<f32>>),
        shape: Vec<usize>,
    ) -> OpResult<StoredWeight> {
        let blob = package.shared_blob(data).map_err(|e| OpError::Invalid(e.to_string()))?;
        StoredWeight::new(Weight { format, elements: Elements::Blob(blob), values, offsets }, shape)
    }

    /// Makes a weight of f32 elements.
    pub fn dense(tensor: Arc<Tensor>) -> OpResult<StoredWeight> {
        let shape = tensor.shape.clone();
        let (format, elements) = (WeightFormat::F32, Elements::Dense(tensor));
        StoredWeight::new(Weight { format, elements, values: None, offsets: None }, shape)
    }

    /// Makes the tables that products read; without them products are exact, in f32.
    pub fn prepare(&mut self, products: Products) {
        self.matrix.prepare(products);
    }

    /// Returns the number of rows: the size of the first dimension.
    pub fn rows(&self) -> usize {
        self.matrix().rows()
    }

    /// Returns the number of elements of a row: the product of all other dimensions.
    pub fn cols(&self) -> usize {
        self.matrix().cols()
    }

    /// Returns a view of the weight for kernels.
    pub fn matrix(&self) -> Matrix<'_> {
        self.matrix.view()
    }

    /// Returns the bytes of the elements that are not in the package.
    pub fn owned_bytes(&self) -> u64 {
        match self.matrix.elements() {
            Elements::Blob(_) => 0,
            Elements::Dense(t) => t.len() as u64 * 4,
            Elements::Owned(bytes) => bytes.len() as u64,
        }
    }

    /// Returns the rows packed for products with many tokens; packs them at the first call.
    pub fn packed_rows(&self) -> &PackedRows {
        self.packed.get_or_init(|| PackedRows::new(&self.matrix(), 1, 1))
    }

    /// Tells whether a product with so many tokens packs the rows.
    pub fn packs_for(&self, tokens: usize) -> bool {
        self.is_dense() && tokens >= MIN_PACKED_TOKENS
    }

    /// Tells whether the elements are floats.
    pub fn is_dense(&self) -> bool {
        matches!(self.matrix.format(), WeightFormat::F32 | WeightFormat::Fp16)
    }

    /// Returns the transposed matrix; a compressed one is decoded.
    pub fn transposed(&self) -> OpResult<Arc<StoredWeight>> {
        let (rows, cols) = (self.rows(), self.cols());
        let made = self.shared(|| self.rearranged(vec![cols, rows], |i| i % rows * cols + i / rows));
        if let Some(weight) = made {
            return Ok(weight);
        }
        let dense = self.to_dense();
        let values = dense.as_f32().unwrap_or_default();
        let transposed = (0..values.len()).map(|i| values[i % rows * cols + i / rows]).collect();
        Ok(Arc::new(StoredWeight::dense(Arc::new(Tensor::f32(&[cols, rows], transposed)))?))
    }

    /// Returns the result of `make`, or its result for another function that reads the same blob: functions of a
    /// package, for one or for several token counts, share their weights.
    fn shared(&self, make: impl FnOnce() -> Option<StoredWeight>) -> Option<Arc<StoredWeight>> {
        let Elements::Blob(blob) = self.matrix.elements() else { return make().map(Arc::new) };
        let key = Transposition {
            blob: (blob.data().as_ptr() as usize, blob.data().len()),
            cols: self.cols(),
            products: self.matrix.products(),
        };
        let all = || locked(&TRANSPOSED);
        if let Some((_, made)) =
            all().get(&key).and_then(|(blob, made)| Some((blob.clone(), made.upgrade()?)))
        {
            return Some(made);
        }
        let made = Arc::new(make()?);
        let mut all = all();
        all.retain(|_, (_, made)| made.strong_count() > 0);
        all.insert(key, (blob.clone(), Arc::downgrade(&made)));
        Some(made)
    }

    /// Returns the weight whose element i is element `from(i)` of this one; none where it is compressed.
    fn rearranged(&self, shape: Vec<usize>, from: impl Fn(usize) -> usize) -> Option<StoredWeight> {
        let format = self.matrix.format();
        let elements = match (format, self.matrix.elements()) {
            (WeightFormat::F32, Elements::Dense(t)) => {
                let values = t.as_f32()?;
                let values = (0..values.len()).map(|i| values[from(i)]).collect();
                Elements::Dense(Arc::new(Tensor::f32(&shape, values)))
            }
            (WeightFormat::Fp16, Elements::Blob(blob)) => {
                let halves = blob.data().as_chunks::<2>().0;
                Elements::Owned((0..halves.len()).flat_map(|i| halves[from(i)]).collect())
            }
            _ => return None,
        };
        let weight = Weight { format, elements, values: None, offsets: None };
        let mut made = StoredWeight::new(weight, shape).ok()?;
        made.prepare(self.matrix.products());
        Some(made)
    }

    /// Decodes the weight to a dense tensor.
    pub fn to_dense(&self) -> Tensor {
        let mut out = Tensor::default();
        self.matrix().to_dense(out.reset_f32(&self.shape));
        out
    }
}

/// Operands of a constant operation: attributes (iOS16), inputs (iOS18), or results of other `constexpr_*` operations.
pub(super) struct Operands<'a> {
    package: &'a Arc<Package>,
    values: BTreeMap<&'a str, &'a Value>,
    chained: BTreeMap<&'a str, Constant>,
}

impl<'a> Operands<'a> {
    pub fn new(
        package: &'a Arc<Package>,
        op: &'a Operation,
        known: &dyn Fn(&str) -> Option<Constant>,
    ) -> Self {
        let mut o = Operands { package, values: BTreeMap::new(), chained: BTreeMap::new() };
        for (name, value) in &op.attributes {
            if name != "name" {
                o.values.insert(name, value);
            }
        }
        for (name, Argument(bindings)) in &op.inputs {
            match bindings.first() {
                Some(Binding::Value(v)) => drop(o.values.insert(name, v)),
                Some(Binding::Name(n)) => {
                    if let Some(constant) = known(n) {
                        o.chained.insert(name, constant);
                    }
                }
                None => {}
            }
        }
        o
    }

    fn dense(&self, name: &str) -> OpResult<Tensor> {
        if let Some(constant) = self.chained.get(name) {
            return constant.to_tensor();
        }
        let value = self.values.get(name);
        let value =
            value.ok_or_else(|| OpError::Invalid(format!("required parameter `{name}` is missing")))?;
        dense_value(self.package, value)
    }

    fn floats(&self, name: &str) -> OpResult<(Vec<usize>, Vec<f32>)> {
        let t = self.dense(name)?;
        let shape = t.shape.clone();
        match t.data {
            crate::tensor::Data::F32(v) => Ok((shape, v)),
            crate::tensor::Data::I32(v) => Ok((shape, v.into_iter().map(|x| x as f32).collect())),
            _ => Err(OpError::Invalid(format!("parameter `{name}` must be numbers"))),
        }
    }

    fn optional(&self, name: &str) -> OpResult<Option<(Vec<usize>, Vec<f32>)>> {
        self.has(name).then(|| self.floats(name)).transpose()
    }

    /// Unpacks an operand of bytes to elements of `bits` bits, as many as `shape` has.
    fn unpacked(&self, name: &str, bits: usize, shape: &[usize]) -> OpResult<Vec<u8>> {
        let missing = || OpError::Invalid(format!("required parameter `{name}` is missing"));
        let packed = self.values.get(name).ok_or_else(missing)?;
        let bytes = self.package.tensor_bytes(packed).map_err(|e| OpError::Invalid(e.to_string()))?;
        let n = shape.iter().product();
        let elements = unpack_sub_byte(&bytes, bits, n);
        if elements.len() != n {
            return Err(OpError::Invalid(format!("{} bytes of `{name}` for shape {shape:?}", bytes.len())));
        }
        Ok(elements)
    }

    /// Returns an operand that is a blob in the package, with its type.
    fn blob(&self, name: &str) -> Option<(&'a Value, DataType)> {
        let value = self.values.get(name)?;
        let dtype = value.ty.tensor()?.dtype;
        self.package.blob(value).ok().map(|_| (*value, dtype))
    }

    fn has(&self, name: &str) -> bool {
        self.values.contains_key(name) || self.chained.contains_key(name)
    }

    fn int(&self, name: &str) -> OpResult<i32> {
        let value = self.values.get(name).and_then(|v| v.as_ints()).and_then(|v| v.first().copied());
        value.ok_or_else(|| OpError::Invalid(format!("parameter `{name}` must be an integer")))
    }
}

impl Constant {
    pub fn to_tensor(&self) -> OpResult<Tensor> {
        match self {
            Constant::Dense(t) => Ok(t.as_ref().clone()),
            Constant::Stored(w) => Ok(w.to_dense()),
        }
    }
}

fn shape_of(value: &Value) -> OpResult<Vec<usize>> {
    let ValueType::Tensor(ty) = &value.ty else {
        return Err(OpError::Unsupported(format!("a constant of type {}", value.ty)));
    };
    let shape: Option<Vec<usize>> =
        ty.shape().map(|s| s.into_iter().map(|d| usize::try_from(d).unwrap_or(usize::MAX)).collect());
    let shape = shape.ok_or_else(|| OpError::Invalid(format!("a constant of type {ty}")))?;
    match count(&shape) {
        Ok(_) => Ok(shape),
        Err(_) => Err(OpError::Invalid(format!("a constant of type {ty} is too large"))),
    }
}

/// Returns the constant of a `const` operation; fp16 blobs of two dimensions or more stay in the package.
pub(super) fn const_value(package: &Arc<Package>, value: &Value) -> OpResult<Constant> {
    let shape = shape_of(value)?;
    let stays = value.ty.tensor().is_some_and(|t| t.dtype == DataType::Float16) && shape.len() >= 2;
    if stays && package.blob(value).is_ok() {
        let weight = StoredWeight::mapped(package, value, WeightFormat::Fp16, (None, None), shape)?;
        return Ok(Constant::Stored(Arc::new(weight)));
    }
    Ok(Constant::Dense(Arc::new(dense_value(package, value)?)))
}

/// Decodes the elements of a value to a tensor.
fn dense_value(package: &Package, value: &Value) -> OpResult<Tensor> {
    let shape = shape_of(value)?;
    if let Some(TensorData::Strings(v)) = value.tensor_data() {
        return Ok(Tensor { shape, data: crate::tensor::Data::Str(v.clone()) });
    }
    let bytes = package.tensor_bytes(value).map_err(|e| OpError::Invalid(e.to_string()))?;
    let dtype = value.ty.tensor().map_or(DataType::Float32, |t| t.dtype);
    decode(&bytes, dtype, shape)
}

fn decode(bytes: &[u8], dtype: DataType, shape: Vec<usize>) -> OpResult<Tensor> {
    use DataType as T;
    let n: usize = shape.iter().product();
    let mut out = Tensor::default();
    fn each<const N: usize, T>(bytes: &[u8], out: &mut [T], f: impl Fn([u8; N]) -> T) {
        out.iter_mut().zip(bytes.as_chunks().0).for_each(|(o, b)| *o = f(*b));
    }
    fn ints<const N: usize>(bytes: &[u8], shape: &[usize], out: &mut Tensor, f: fn([u8; N]) -> i32) {
        each(bytes, out.reset_i32(shape), f);
    }
    match dtype {
        T::Float16 => anemoe_kernels::f16_to_f32(bytes, out.reset_f32(&shape)),
        T::BFloat16 => each(bytes, out.reset_f32(&shape), |b| bf16::from_le_bytes(b).to_f32()),
        T::Float32 => each(bytes, out.reset_f32(&shape), f32::from_le_bytes),
        T::Float64 => each(bytes, out.reset_f32(&shape), |b| f64::from_le_bytes(b) as f32),
        T::Bool => each(bytes, out.reset_bool(&shape), |[b]| b != 0),
        T::Int8 => ints(bytes, &shape, &mut out, |[b]| i32::from(b as i8)),
        T::UInt8 => ints(bytes, &shape, &mut out, |[b]| i32::from(b)),
        T::Int16 => ints(bytes, &shape, &mut out, |b| i32::from(i16::from_le_bytes(b))),
        T::UInt16 => ints(bytes, &shape, &mut out, |b| i32::from(u16::from_le_bytes(b))),
        T::Int32 | T::UInt32 => ints(bytes, &shape, &mut out, i32::from_le_bytes),
        T::Int64 | T::UInt64 => ints(bytes, &shape, &mut out, |b| i64::from_le_bytes(b) as i32),
        T::UInt1 | T::UInt2 | T::UInt3 | T::UInt4 | T::UInt6 | T::Int4 => {
            let codes = unpack_sub_byte(bytes, dtype.bits(), n);
            let value = |c: u8| if dtype == T::Int4 && c >= 8 { i32::from(c) - 16 } else { i32::from(c) };
            out.reset_i32(&shape).iter_mut().zip(codes).for_each(|(o, c)| *o = value(c));
        }
        other => return Err(OpError::Unsupported(format!("constants of {other}"))),
    }
    Ok(out)
}

/// Returns the results of a `constexpr_*` operation; the joint sparse forms have two results.
pub(super) fn constexpr(op: &Operation, o: &Operands<'_>) -> OpResult<Vec<Constant>> {
    let dense = |t: Tensor| Ok(vec![Constant::Dense(Arc::new(t))]);
    let stored = match op.op_type.as_str() {
        "constexpr_lut_to_dense" if o.has("shape") => stored_lut_ios16(o)?,
        "constexpr_lut_to_dense" => stored_lut(o)?,
        "constexpr_blockwise_shift_scale" => stored_int(o)?.or(stored_mxfp4(o)?),
        "constexpr_affine_dequantize" => stored_affine(o)?,
        _ => None,
    };
    if let Some(weight) = stored {
        return Ok(vec![Constant::Stored(Arc::new(weight))]);
    }
    match op.op_type.as_str() {
        "constexpr_lut_to_dense" if o.has("shape") => dense(lut_ios16(o)?),
        "constexpr_lut_to_dense" => {
            let (indices_shape, indices) = o.floats("indices")?;
            let (lut_shape, lut) = o.floats("lut")?;
            let (shape, values) = lookup(o, &indices_shape, &indices, &lut_shape, &lut)?;
            dense(Tensor::f32(&shape, values))
        }
        "constexpr_blockwise_shift_scale" => {
            let (shape, data) = o.floats("data")?;
            dense(Tensor::f32(&shape, scaled(o, &shape, &data)?))
        }
        "constexpr_affine_dequantize" => dense(affine(o)?),
        "constexpr_sparse_to_dense" => dense(sparse(o)?),
        "constexpr_cast" => {
            let (shape, v) = o.floats("source_val")?;
            dense(Tensor::f32(&shape, v))
        }
        "constexpr_lut_to_sparse" => {
            let (mask_shape, mask) = o.floats("indices_mask")?;
            let (_, indices) = o.floats("indices_nonzero_data")?;
            let (lut_shape, lut) = o.floats("lut")?;
            lut_to_sparse(o, mask_shape, mask, &indices, &lut_shape, &lut)
        }
        "constexpr_sparse_blockwise_shift_scale" => {
            let (mask_shape, mask) = o.floats("data_mask")?;
            let (_, data) = o.floats("nonzero_data")?;
            // Scales are per block of the dense grid: expand the data, scale it, and pick the set places again.
            let v = scaled(o, &mask_shape, &expand(&mask, &data)?)?;
            let kept: Vec<f32> = v.iter().zip(&mask).filter(|(_, m)| **m != 0.0).map(|(v, _)| *v).collect();
            Ok(sparse_pair(mask_shape, &mask, kept))
        }
        other => Err(OpError::Unsupported(format!("op `{other}`"))),
    }
}

fn sparse_pair(mask_shape: Vec<usize>, mask: &[f32], values: Vec<f32>) -> Vec<Constant> {
    let mask = Tensor::i32(&mask_shape, mask.iter().map(|&m| m as i32).collect());
    let n = values.len();
    vec![Constant::Dense(Arc::new(mask)), Constant::Dense(Arc::new(Tensor::f32(&[n], values)))]
}

/// Expands nonzero values to a dense list: values where the mask is set, zeros elsewhere.
fn expand(mask: &[f32], values: &[f32]) -> OpResult<Vec<f32>> {
    let set = mask.iter().filter(|m| **m != 0.0).count();
    if set != values.len() {
        return Err(OpError::Invalid(format!("a mask with {set} bits for {} values", values.len())));
    }
    let mut values = values.iter();
    Ok(mask.iter().map(|&m| if m != 0.0 { values.next().copied().unwrap_or(0.0) } else { 0.0 }).collect())
}

/// Makes a stored weight of tables per group of rows, over scalar indices in a blob; none where the form is another.
fn stored_lut(o: &Operands<'_>) -> OpResult<Option<StoredWeight>> {
    let Some((indices, dtype)) = o.blob("indices") else { return Ok(None) };
    if o.chained.contains_key("lut") {
        return Ok(None);
    }
    let shape = shape_of(indices)?;
    let (lut_shape, lut) = o.floats("lut")?;
    let k = shape.len();
    let by_rows =
        lut_shape.len() == k + 2 && lut_shape[1..k].iter().all(|&g| g == 1) && lut_shape.last() == Some(&1);
    if k < 2 || !by_rows || lut_shape[0] == 0 || shape[0] % lut_shape[0] != 0 {
        return Ok(None);
    }
    let bits = IndexBits::try_from(dtype.bits() as u8).map_err(OpError::Invalid)?;
    let rows_per_table = shape[0] / lut_shape[0];
    let format = WeightFormat::Lut { bits, rows_per_table };
    StoredWeight::mapped(o.package, indices, format, (Some(lut), None), shape).map(Some)
}

/// Makes a stored weight of integers in a blob, with scales per block of rows and of the second axis; none for other forms.
fn stored_int(o: &Operands<'_>) -> OpResult<Option<StoredWeight>> {
    let Some((data, dtype)) = o.blob("data") else { return Ok(None) };
    let (Some(signed), Ok(bits)) = (dtype.weight_is_signed(), IntBits::try_from(dtype.bits() as u8)) else {
        return Ok(None);
    };
    let shape = shape_of(data)?;
    let (scale_shape, scale) = o.floats("scale")?;
    let fits = shape.len() >= 2
        && scale_shape.len() == shape.len()
        && scale_shape.iter().zip(&shape).all(|(&s, &d)| s > 0 && d % s == 0);
    // Kernels have no blocks along further axes.
    if !fits || scale_shape[2..].iter().any(|&s| s != 1) {
        return Ok(None);
    }
    let offset = o.optional("offset")?;
    if offset.as_ref().is_some_and(|(s, _)| *s != scale_shape) {
        return Err(OpError::Invalid("offset and scale of different shapes".into()));
    }
    let further: usize = shape[2..].iter().product();
    let format = WeightFormat::Int {
        bits,
        signed,
        block_rows: shape[0] / scale_shape[0],
        block_cols: shape[1] / scale_shape[1] * further,
        offsets: offset.is_some(),
    };
    let values = (Some(scale), offset.map(|(_, v)| v));
    StoredWeight::mapped(o.package, data, format, values, shape).map(Some)
}

/// Makes a stored weight of 4-bit floats: scales per block of the second axis, each a power of two, over the result of
/// another operation, which looks indices of a blob up in the one table [`MXFP4_TABLE`]; none for other forms.
fn stored_mxfp4(o: &Operands<'_>) -> OpResult<Option<StoredWeight>> {
    let Some(Constant::Stored(unscaled)) = o.chained.get("data") else { return Ok(None) };
    let matrix = unscaled.matrix();
    let Elements::Blob(blob) = unscaled.matrix.elements() else { return Ok(None) };
    let one_table = WeightFormat::Lut { bits: IndexBits::Four, rows_per_table: matrix.rows() };
    let shape = &unscaled.shape;
    if unscaled.matrix.format() != one_table || matrix.values() != MXFP4_TABLE || o.has("offset") {
        return Ok(None);
    }
    let (scale_shape, scale) = o.floats("scale")?;
    let is_power = |s: &f32| s.is_normal() && *s > 0.0 && s.to_bits() << 9 == 0;
    let fits = scale_shape.len() == shape.len()
        && scale_shape[0] == shape[0]
        && scale_shape[1] > 0
        && shape[1].is_multiple_of(scale_shape[1])
        && scale_shape[2..].iter().all(|&s| s == 1);
    if !fits || !scale.iter().all(is_power) {
        return Ok(None);
    }
    let further: usize = shape[2..].iter().product();
    let format = WeightFormat::Mxfp4 { block_cols: shape[1] / scale_shape[1] * further };
    let weight =
        Weight { format, elements: Elements::Blob(blob.clone()), values: Some(scale), offsets: None };
    StoredWeight::new(weight, shape.clone()).map(Some)
}

/// Makes a stored weight of integers in a blob, with a scale and a zero point for all rows or for each row; none for other forms.
fn stored_affine(o: &Operands<'_>) -> OpResult<Option<StoredWeight>> {
    let Some((data, dtype)) = o.blob("quantized_data") else { return Ok(None) };
    let (Some(signed), 8) = (dtype.weight_is_signed(), dtype.bits()) else { return Ok(None) };
    let shape = shape_of(data)?;
    let ((_, scale), (_, zero)) = (o.floats("scale")?, o.floats("zero_point")?);
    let axis = super::ops_axis(o.int("axis")?, shape.len());
    let rows = scale.len().max(zero.len());
    if shape.len() < 2 || shape.contains(&0) || !(rows == 1 || (axis == Some(0) && rows == shape[0])) {
        return Ok(None);
    }
    // A single scale or zero point applies to all rows.
    let all = |v: Vec<f32>| match v.as_slice() {
        &[one] => Some(vec![one; rows]),
        _ => (v.len() == rows).then_some(v),
    };
    let (Some(scale), Some(zero)) = (all(scale), all(zero)) else { return Ok(None) };
    let offset = zero.iter().any(|&z| z != 0.0).then_some(zero);
    let format = WeightFormat::Int {
        bits: IntBits::Eight,
        signed,
        block_rows: shape[0] / rows,
        block_cols: shape[1..].iter().product(),
        offsets: offset.is_some(),
    };
    StoredWeight::mapped(o.package, data, format, (Some(scale), offset), shape).map(Some)
}

/// Makes a stored weight of one table and indices packed in a blob of bytes; none where the form is another.
fn stored_lut_ios16(o: &Operands<'_>) -> OpResult<Option<StoredWeight>> {
    let Some((packed, DataType::UInt8)) = o.blob("indices") else { return Ok(None) };
    let (shape, (_, lut)) = (packed_shape(o)?, o.floats("lut")?);
    let bits = lut_bits(&lut)?;
    if shape.len() < 2 {
        return Ok(None);
    }
    let format = WeightFormat::Lut { bits, rows_per_table: shape[0] };
    // A blob with bytes to spare is refused here, and decoded instead.
    Ok(StoredWeight::mapped(o.package, packed, format, (Some(lut), None), shape).ok())
}

/// Finds the width of the indices into a table of the iOS16 form, which has none of 3 bits.
fn lut_bits(lut: &[f32]) -> OpResult<IndexBits> {
    let fits = |bits: &IndexBits| lut.len() == 1 << bits.bits() && *bits != IndexBits::Three;
    let bits = IndexBits::ALL.into_iter().find(fits);
    bits.ok_or_else(|| OpError::Invalid(format!("a lut of {} entries", lut.len())))
}

/// Looks indices up in tables of any layout, `lut` `[groups.., entries, vector]`. Returns shape and elements of the dense tensor.
fn lookup(
    o: &Operands<'_>,
    shape: &[usize],
    indices: &[f32],
    lut_shape: &[usize],
    lut: &[f32],
) -> OpResult<(Vec<usize>, Vec<f32>)> {
    let k = shape.len();
    let wrong = || OpError::Invalid(format!("lut of shape {lut_shape:?} for indices of shape {shape:?}"));
    if lut_shape.len() != k + 2 || !lut_shape.iter().zip(shape).take(k).all(|(&g, &d)| g > 0 && d % g == 0) {
        return Err(wrong());
    }
    let (entries, vector) = (lut_shape[k], lut_shape[k + 1]);
    let axis = if vector > 1 { super::ops_axis(o.int("vector_axis")?, k).ok_or_else(wrong)? } else { 0 };
    let mut out_shape = shape.to_vec();
    if vector > 1 {
        out_shape[axis] = out_shape[axis].checked_mul(vector).ok_or_else(wrong)?;
    }
    let mut out = vec![0f32; count(&out_shape)?];
    let (own, target) = (dense_strides(shape), dense_strides(&out_shape));
    let groups = dense_strides(&lut_shape[..k]);
    for (i, &index) in indices.iter().enumerate() {
        let (mut group, mut to) = (0, 0);
        for a in 0..k {
            let at = i / own[a] % shape[a];
            group += at / (shape[a] / lut_shape[a]) * groups[a];
            to += if vector > 1 && a == axis { at * vector } else { at } * target[a];
        }
        let from = (group * entries + index as usize) * vector;
        for v in 0..vector {
            out[to + v * target.get(axis).copied().unwrap_or(1)] = *lut.get(from + v).ok_or_else(wrong)?;
        }
    }
    Ok((out_shape, out))
}

/// Looks the nonzero indices up; the mask is repeated along the vector axis. Returns mask and nonzero values.
fn lut_to_sparse(
    o: &Operands<'_>,
    mask_shape: Vec<usize>,
    mask: Vec<f32>,
    indices: &[f32],
    lut_shape: &[usize],
    lut: &[f32],
) -> OpResult<Vec<Constant>> {
    let full = expand(&mask, indices)?;
    let (shape, values) = lookup(o, &mask_shape, &full, lut_shape, lut)?;
    let vector = lut_shape.last().copied().unwrap_or(1);
    let wide = if vector > 1 {
        let axis = super::ops_axis(o.int("vector_axis")?, mask_shape.len());
        let axis = axis.ok_or_else(|| OpError::Invalid("parameter `vector_axis`".into()))?;
        let inner: usize = mask_shape[axis + 1..].iter().product();
        let mut wide = Vec::with_capacity(values.len());
        for row in mask.chunks_exact(inner.max(1)) {
            (0..vector).for_each(|_| wide.extend_from_slice(row));
        }
        wide
    } else {
        mask
    };
    let kept = values.iter().zip(&wide).filter(|(_, m)| **m != 0.0).map(|(v, _)| *v).collect();
    Ok(sparse_pair(shape, &wide, kept))
}

/// Multiplies data by the operands `scale` and `offset`.
fn scaled(o: &Operands<'_>, shape: &[usize], data: &[f32]) -> OpResult<Vec<f32>> {
    let (scale_shape, scale) = o.floats("scale")?;
    let offset = o.optional("offset")?.map(|(_, v)| v);
    blockwise(shape, data, &scale_shape, &scale, offset.as_deref())
}

fn blockwise(
    shape: &[usize],
    data: &[f32],
    scale_shape: &[usize],
    scale: &[f32],
    offset: Option<&[f32]>,
) -> OpResult<Vec<f32>> {
    let fits =
        scale_shape.len() == shape.len() && scale_shape.iter().zip(shape).all(|(&s, &d)| s > 0 && d % s == 0);
    if !fits || offset.is_some_and(|o| o.len() != scale.len()) {
        return Err(OpError::Invalid(format!("scale of shape {scale_shape:?} for data of shape {shape:?}")));
    }
    let (own, blocks) = (dense_strides(shape), dense_strides(scale_shape));
    let block = |i: usize| -> usize {
        (0..shape.len()).map(|a| i / own[a] % shape[a] / (shape[a] / scale_shape[a]) * blocks[a]).sum()
    };
    Ok(data
        .iter()
        .enumerate()
        .map(|(i, q)| {
            let b = block(i);
            scale[b] * (q - offset.map_or(0.0, |o| o[b]))
        })
        .collect())
}

fn affine(o: &Operands<'_>) -> OpResult<Tensor> {
    let (shape, q) = o.floats("quantized_data")?;
    let ((_, scale), (_, zero)) = (o.floats("scale")?, o.floats("zero_point")?);
    let axis = super::ops_axis(o.int("axis")?, shape.len())
        .ok_or_else(|| OpError::Invalid("parameter `axis`".into()))?;
    // One scale or zero point is that of all channels.
    let of_channels = |v: Vec<f32>| if v.len() == 1 { vec![v[0]; shape[axis]] } else { v };
    let (scale, zero) = (of_channels(scale), of_channels(zero));
    if scale.len() != shape[axis] {
        return Err(OpError::Invalid(format!("{} scales for {} channels", scale.len(), shape[axis])));
    }
    let mut scale_shape = vec![1; shape.len()];
    scale_shape[axis] = shape[axis];
    let values = blockwise(&shape, &q, &scale_shape, &scale, Some(&zero))?;
    Ok(Tensor::f32(&shape, values))
}

/// Reads the operand `shape` of the iOS16 forms: the dense shape of packed bits or indices.
fn packed_shape(o: &Operands<'_>) -> OpResult<Vec<usize>> {
    let t = o.dense("shape")?;
    let v = t.as_i32().ok_or_else(|| OpError::Invalid("parameter `shape` must be integers".into()))?;
    let shape: Option<Vec<usize>> = v.iter().map(|&d| usize::try_from(d).ok()).collect();
    shape.filter(|s| count(s).is_ok()).ok_or_else(|| OpError::Invalid(format!("parameter `shape` is {v:?}")))
}

fn lut_ios16(o: &Operands<'_>) -> OpResult<Tensor> {
    let shape = packed_shape(o)?;
    let (_, lut) = o.floats("lut")?;
    let bits = usize::from(lut_bits(&lut)?.bits());
    let indices = o.unpacked("indices", bits, &shape)?;
    Ok(Tensor::f32(&shape, indices.iter().map(|&i| lut[usize::from(i)]).collect()))
}

fn sparse(o: &Operands<'_>) -> OpResult<Tensor> {
    let (_, values) = o.floats("nonzero_data")?;
    let (shape, mask) = if o.has("shape") {
        let shape = packed_shape(o)?;
        let bits = o.unpacked("mask", 1, &shape)?;
        (shape, bits.into_iter().map(f32::from).collect())
    } else {
        o.floats("mask")?
    };
    Ok(Tensor::f32(&shape, expand(&mask, &values)?))
}

/// Rounds a number to fp16.
pub(super) fn to_f16(v: f32) -> f32 {
    f16::from_f32(v).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_mlpackage::mil::builder::{ConvParams, FunctionBuilder, model};
    use anemoe_mlpackage::mil::{Opset, TensorType};
    use anemoe_mlpackage::package::PackageWriter;

    const DIMS: [u64; 4] = [8, 64, 1, 1];

    /// Returns the constant that a table of 16 and scales per block of 32 make of the indices 0 to 15 in turn.
    fn scaled_table(table: [f32; 16], scales: &[f32; 16]) -> Constant {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pair.mlpackage");
        let mut writer = PackageWriter::create(&path).unwrap();
        let blobs = writer.weights();
        let indices: Vec<u8> = (0..256).map(|i| (i * 2 % 16 * 17 + 16) as u8).collect();
        let indices =
            Value::blob(DataType::UInt4, &DIMS, blobs.append(DataType::UInt4, 512, &indices).unwrap());
        let halves: Vec<u8> = scales.iter().flat_map(|&s| f16::from_f32(s).to_le_bytes()).collect();
        let scale = blobs.append(DataType::Float16, 16, &halves).unwrap();
        let scale = Value::blob(DataType::Float16, &[8, 2, 1, 1], scale);
        let lut = Value::fp16_tensor(&[1, 1, 1, 1, 16, 1], &table.map(f16::from_f32));
        let mut f = FunctionBuilder::new(Opset::CoreML8);
        let x = f.input("x", TensorType::fixed(DataType::Float16, &[1, 64, 1, 1])).unwrap();
        let data = f.constexpr_lut_to_dense("data", indices, lut).unwrap();
        let operands = vec![("data", (&data).into()), ("scale", scale.into())];
        let weight = f.single("constexpr_blockwise_shift_scale", "weight", operands).unwrap();
        let y = f.conv("y", &x, &weight, None, ConvParams::default()).unwrap();
        f.output(&y).unwrap();
        let m = model(Opset::CoreML8, vec![("main".to_string(), f.finish().unwrap())], "main").unwrap();
        assert_eq!(anemoe_mlpackage::mil::verify::verify(&m), []);
        writer.finish(&m).unwrap();
        let package = Arc::new(Package::open(&path).unwrap());
        let mut known: BTreeMap<String, Constant> = BTreeMap::new();
        let operations = &package.model().program.functions["main"].block.operations;
        for op in operations.iter().filter(|op| op.op_type.starts_with("constexpr_")) {
            let operands = Operands::new(&package, op, &|name| known.get(name).cloned());
            let made = constexpr(op, &operands).unwrap().remove(0);
            known.insert(op.outputs[0].name.clone(), made);
        }
        known.remove("weight").unwrap()
    }

    #[test]
    fn tables_behind_powers_of_two_stay_as_stored() {
        let powers = std::array::from_fn(|i| 2f32.powi(i as i32 - 12));
        let mut thirds = powers;
        thirds[3] = 0.75;
        let mut sorted = MXFP4_TABLE;
        sorted.sort_by(f32::total_cmp);
        for (table, scales, is_mxfp4) in
            [(MXFP4_TABLE, powers, true), (MXFP4_TABLE, thirds, false), (sorted, powers, false)]
        {
            let made = scaled_table(table, &scales);
            let values = made.to_tensor().unwrap();
            let expected: Vec<f32> = (0..512).map(|i| scales[i / 32] * table[i % 16]).collect();
            assert_eq!(
                (values.shape.as_slice(), values.as_f32().unwrap()),
                (&[8, 64, 1, 1][..], &expected[..])
            );
            match made {
                Constant::Stored(w) if is_mxfp4 => {
                    assert_eq!(w.matrix.format(), WeightFormat::Mxfp4 { block_cols: 32 });
                    assert_eq!(w.owned_bytes(), 0);
                }
                made => assert!(!is_mxfp4 && matches!(made, Constant::Dense(_))),
            }
        }
    }
}
