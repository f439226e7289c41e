//! Typed methods of the ops that language models seldom need.

use super::{Arg, FunctionBuilder, Var};
use crate::Result;
use crate::mil::{DataType, Value};

/// Methods whose operands are values and whose parameters are constants of Rust types.
macro_rules! ops {
    ($($op:ident($($operand:ident),*; $($param:ident: $ty:ty),*)),* $(,)?) => {$(
        #[doc = concat!("`", stringify!($op), "`")]
        ///
        /// # Errors
        /// The operands or a parameter does not fit.
        pub fn $op(&mut self, name: &str, $($operand: &Var,)* $($param: $ty),*) -> Result<Var> {
            #[allow(unused_mut)]
            let mut args: Vec<(&'static str, Arg)> = vec![$((stringify!($operand), $operand.into())),*];
            $(args.push((stringify!($param), $param.constant()));)*
            self.single(stringify!($op), name, args)
        }
    )*};
}

/// Constants as parameters.
trait Constant {
    fn constant(&self) -> Arg;
}

impl Constant for i32 {
    fn constant(&self) -> Arg {
        Arg::Value(Value::int32(*self))
    }
}

impl Constant for &[i32] {
    fn constant(&self) -> Arg {
        Arg::Value(Value::int32s(self))
    }
}

impl Constant for bool {
    fn constant(&self) -> Arg {
        Arg::Value(Value::bool(*self))
    }
}

impl Constant for &str {
    fn constant(&self) -> Arg {
        Arg::Value(Value::string(*self))
    }
}

impl FunctionBuilder {
    ops!(
        argsort(x; axis: i32, ascending: bool),
        band_part(x; lower: i32, upper: i32),
        batch_to_space(x; block_shape: &[i32], crops: &[i32]),
        crop(x; crop_height: &[i32], crop_width: &[i32]),
        dequantize(input, scale;),
        fill_like(ref_tensor, value;),
        instance_norm(x, gamma, beta;),
        local_response_norm(x; size: i32),
        one_hot(indices, on_value, off_value; one_hot_vector_size: i32, axis: i32),
        quantize(input, scale; output_dtype: &str),
        range_1d(start, end, step;),
        resize_bilinear(x; target_size_height: i32, target_size_width: i32, sampling_mode: &str),
        resize_nearest_neighbor(x; target_size_height: i32, target_size_width: i32),
        reverse_sequence(x, lengths; seq_axis: i32, batch_axis: i32),
        scatter(data, indices, updates; axis: i32, mode: &str),
        scatter_along_axis(data, indices, updates; axis: i32, mode: &str),
        scatter_nd(data, indices, updates; mode: &str),
        sliding_windows(x; axis: i32, size: i32, stride: i32),
        space_to_batch(x; block_shape: &[i32], paddings: &[i32]),
        upsample_bilinear(x; scale_factor_height: i32, scale_factor_width: i32, align_corners: bool),
        upsample_nearest_neighbor(x; scale_factor_height: i32, scale_factor_width: i32),
    );

    /// `fill`: a tensor of one value.
    ///
    /// # Errors
    /// The shape does not fit.
    pub fn fill(&mut self, name: &str, shape: &[i32], value: Value) -> Result<Var> {
        self.single("fill", name, vec![("shape", shape.constant()), ("value", value.into())])
    }

    /// `einsum` of two operands.
    ///
    /// # Errors
    /// The operands do not fit the equation.
    pub fn einsum(&mut self, name: &str, values: &[&Var], equation: &str) -> Result<Var> {
        self.single("einsum", name, vec![("values", values.into()), ("equation", equation.constant())])
    }

    /// `reshape_like`: dimensions `begins[i]..ends[i]` of each reference; `end_masks` take all of one.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn reshape_like(
        &mut self,
        name: &str,
        x: &Var,
        ref_tensors: &[&Var],
        begins: &[i32],
        ends: &[i32],
        end_masks: &[bool],
    ) -> Result<Var> {
        let args = vec![
            ("x", x.into()),
            ("ref_tensors", ref_tensors.into()),
            ("begins", begins.constant()),
            ("ends", ends.constant()),
            ("end_masks", Arg::Value(Value::bools(end_masks))),
        ];
        self.single("reshape_like", name, args)
    }

    /// `conv_transpose(x, weight)`: x `[N, C, spatial..]`, weight `[C, O/groups, kernel..]`.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn conv_transpose(
        &mut self,
        name: &str,
        x: &Var,
        weight: &Var,
        bias: Option<&Var>,
        strides: &[i32],
        groups: i32,
    ) -> Result<Var> {
        let n = strides.len();
        let mut args = vec![
            ("x", x.into()),
            ("weight", weight.into()),
            ("pad", vec![0; 2 * n].as_slice().constant()),
            ("strides", strides.constant()),
            ("dilations", vec![1; n].as_slice().constant()),
            ("groups", groups.constant()),
        ];
        args.extend(bias.map(|b| ("bias", b.into())));
        self.single("conv_transpose", name, args)
    }

    /// `constexpr_sparse_to_dense`: values where the bit mask is set.
    ///
    /// # Errors
    /// Mask and values do not fit.
    pub fn constexpr_sparse_to_dense(&mut self, name: &str, nonzero_data: Value, mask: Value) -> Result<Var> {
        self.single(
            "constexpr_sparse_to_dense",
            name,
            vec![("nonzero_data", nonzero_data.into()), ("mask", mask.into())],
        )
    }

    /// `constexpr_cast`: fp16 stored, another float type in the program. Only before iOS18.
    ///
    /// # Errors
    /// The type cannot be cast to.
    pub fn constexpr_cast(&mut self, name: &str, source_val: Value, output_dtype: DataType) -> Result<Var> {
        let dtype = Arg::Value(Value::string(output_dtype.name()));
        self.single("constexpr_cast", name, vec![("source_val", source_val.into()), ("output_dtype", dtype)])
    }
}
