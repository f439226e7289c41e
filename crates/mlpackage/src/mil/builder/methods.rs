//! Typed methods of the ops that lowerings call. [`FunctionBuilder::op`] and [`FunctionBuilder::single`] build every
//! other op of the table by its name.

use super::{Arg, FunctionBuilder, Var};
use crate::Result;
use crate::mil::{DataType, Value};
use half::f16;

/// Formula of `gelu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeluMode {
    /// Exact, with the error function.
    Exact,
    /// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`
    TanhApproximation,
    /// `x sigmoid(1.702 x)`
    SigmoidApproximation,
}

/// Parameters of `conv`. Empty lists mean ones (strides, dilations) and zeros (pad).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConvParams {
    /// One per spatial axis.
    pub strides: Vec<i32>,
    /// Padding before and after each spatial axis; a list that is not empty makes `pad_type` custom.
    pub pad: Vec<i32>,
    /// One per spatial axis.
    pub dilations: Vec<i32>,
    /// Groups of channels; 0 counts as 1.
    pub groups: i32,
}

/// Parameters of `slice_by_index`; a list that is empty is not written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SliceParams {
    /// First index per axis.
    pub begin: Vec<i32>,
    /// Index behind the last per axis.
    pub end: Vec<i32>,
    /// Step per axis.
    pub stride: Vec<i32>,
    /// Axes whose `begin` is ignored.
    pub begin_mask: Vec<bool>,
    /// Axes whose `end` is ignored.
    pub end_mask: Vec<bool>,
    /// Axes that are reduced to one index and removed.
    pub squeeze_mask: Vec<bool>,
}

impl From<GeluMode> for Arg {
    fn from(mode: GeluMode) -> Arg {
        Arg::from(match mode {
            GeluMode::Exact => "EXACT",
            GeluMode::TanhApproximation => "TANH_APPROXIMATION",
            GeluMode::SigmoidApproximation => "SIGMOID_APPROXIMATION",
        })
    }
}

/// Makes a list argument: `list`, or `n` times `default` where `list` is empty.
fn list_or(list: Vec<i32>, default: i32, n: usize) -> Arg {
    Arg::from(if list.is_empty() { vec![default; n] } else { list }.as_slice())
}

/// Declares methods by op and parameters. The parameters' order is the order in which constants are written.
macro_rules! ops {
    ($($op:ident($($param:ident: $ty:ty),*)),* $(,)?) => {$(
        #[doc = concat!("`", stringify!($op($($param),*)), "`")]
        ///
        /// # Errors
        /// An operand or a parameter does not fit.
        pub fn $op(&mut self, name: &str, $($param: $ty),*) -> Result<Var> {
            self.single(stringify!($op), name, vec![$((stringify!($param), $param.into())),*])
        }
    )*};
}

impl FunctionBuilder {
    ops! {
        // elementwise, broadcast as NumPy does
        abs(x: &Var),
        identity(x: &Var),
        relu(x: &Var),
        sigmoid(x: &Var),
        silu(x: &Var),
        gelu(x: &Var, mode: GeluMode),
        add(x: &Var, y: &Var),
        mul(x: &Var, y: &Var),
        maximum(x: &Var, y: &Var),
        minimum(x: &Var, y: &Var),
        real_div(x: &Var, y: &Var),
        sub(x: &Var, y: &Var),
        // products
        linear(x: &Var, weight: &Var, bias: Option<&Var>),
        matmul(x: &Var, y: &Var, transpose_x: bool, transpose_y: bool),
        // along axes
        concat(values: &[&Var], axis: i32),
        cumsum(x: &Var, axis: i32, exclusive: bool, reverse: bool),
        reduce_max(x: &Var, axes: &[i32], keep_dims: bool),
        reduce_mean(x: &Var, axes: &[i32], keep_dims: bool),
        reduce_sum(x: &Var, axes: &[i32], keep_dims: bool),
        softmax(x: &Var, axis: i32),
        // shapes
        pad(x: &Var, pad: &[i32], constant_val: &Var),
        reshape(x: &Var, shape: &[i32]),
        slice_by_size(x: &Var, begin: &[i32], size: &[i32]),
        transpose(x: &Var, perm: &[i32]),
        // states, attention
        read_state(input: &Var),
        scaled_dot_product_attention(query: &Var, key: &Var, value: &Var, attn_mask: Option<&Var>),
        // compressed weights
        constexpr_blockwise_shift_scale(data: Value, scale: Value, offset: Option<Value>),
        constexpr_lut_to_dense(indices: Value, lut: Value),
    }

    /// Computes `1 / sqrt(x + epsilon)`, epsilon in the element type of `x`.
    ///
    /// # Errors
    /// The operand does not fit.
    pub fn rsqrt(&mut self, name: &str, x: &Var, epsilon: f32) -> Result<Var> {
        let epsilon = match x.dtype() {
            DataType::Float16 => Value::fp16(f16::from_f32(epsilon)),
            _ => Value::fp32(epsilon),
        };
        self.single("rsqrt", name, vec![("x", x.into()), ("epsilon", epsilon.into())])
    }

    /// Computes `conv(x, weight, bias)`: x `[N, C, spatial..]`, weight `[O, C/groups, kernel..]`, bias `[O]`.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn conv(
        &mut self,
        name: &str,
        x: &Var,
        weight: &Var,
        bias: Option<&Var>,
        p: ConvParams,
    ) -> Result<Var> {
        let n = x.dims().len().saturating_sub(2);
        let pad_type = if p.pad.is_empty() { "valid" } else { "custom" };
        let args = vec![
            ("x", x.into()),
            ("weight", weight.into()),
            ("strides", list_or(p.strides, 1, n)),
            ("pad_type", pad_type.into()),
            ("pad", list_or(p.pad, 0, 2 * n)),
            ("dilations", list_or(p.dilations, 1, n)),
            ("groups", p.groups.max(1).into()),
            ("bias", bias.into()),
        ];
        self.single("conv", name, args)
    }

    /// Splits a tensor into `n` equal parts along `axis`.
    ///
    /// # Errors
    /// The axis is not divisible.
    pub fn split(&mut self, name: &str, x: &Var, n: usize, axis: i32) -> Result<Vec<Var>> {
        let n = i32::try_from(n).unwrap_or(-1);
        self.op("split", name, vec![("x", x.into()), ("num_splits", n.into()), ("axis", axis.into())])
    }

    /// Splits a tensor into parts of `sizes` elements along `axis`.
    ///
    /// # Errors
    /// The sizes do not add up.
    pub fn split_sizes(&mut self, name: &str, x: &Var, sizes: &[i32], axis: i32) -> Result<Vec<Var>> {
        self.op("split", name, vec![("x", x.into()), ("split_sizes", sizes.into()), ("axis", axis.into())])
    }

    /// Computes `x[begin:end:stride]`.
    ///
    /// # Errors
    /// The operand or a parameter does not fit.
    pub fn slice_by_index(&mut self, name: &str, x: &Var, p: SliceParams) -> Result<Var> {
        let mut args =
            vec![("x", x.into()), ("begin", p.begin.as_slice().into()), ("end", p.end.as_slice().into())];
        if !p.stride.is_empty() {
            args.push(("stride", p.stride.as_slice().into()));
        }
        for (name, mask) in
            [("begin_mask", p.begin_mask), ("end_mask", p.end_mask), ("squeeze_mask", p.squeeze_mask)]
        {
            if !mask.is_empty() {
                args.push((name, Value::bools(&mask).into()));
            }
        }
        self.single("slice_by_index", name, args)
    }

    /// Returns `x` with `update` in place of `x[begin:end]`.
    ///
    /// # Errors
    /// The operand or a parameter does not fit.
    pub fn slice_update(
        &mut self,
        name: &str,
        x: &Var,
        update: &Var,
        begin: &[i32],
        end: &[i32],
    ) -> Result<Var> {
        let no = vec![false; begin.len()];
        let args = vec![
            ("x", x.into()),
            ("update", update.into()),
            ("begin", begin.into()),
            ("end", end.into()),
            ("stride", vec![1; begin.len()].as_slice().into()),
            ("begin_mask", Value::bools(&no).into()),
            ("end_mask", Value::bools(&no).into()),
            ("squeeze_mask", Value::bools(&no).into()),
        ];
        self.single("slice_update", name, args)
    }

    /// Writes a state. The operation is named after the value, as in coremltools.
    ///
    /// # Errors
    /// The value has another type than the state.
    pub fn write_state(&mut self, state: &Var, value: &Var) -> Result<()> {
        let name = format!("{}_write_state", value.name());
        self.op("write_state", &name, vec![("input", state.into()), ("data", value.into())]).map(drop)
    }
}
