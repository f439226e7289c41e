//! One typed method per op.

use super::{Arg, FunctionBuilder, Var};
use crate::Result;
use crate::mil::{DataType, Value};
use half::f16;

/// Which formula `gelu` uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeluMode {
    /// With the error function.
    Exact,
    /// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`
    TanhApproximation,
    /// `x sigmoid(1.702 x)`
    SigmoidApproximation,
}

/// Parameters of `conv`; empty lists stand for ones (strides, dilations) and zeros (pad).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConvParams {
    /// One per spatial axis.
    pub strides: Vec<i32>,
    /// Before and after each spatial axis; any makes `pad_type` custom.
    pub pad: Vec<i32>,
    /// One per spatial axis.
    pub dilations: Vec<i32>,
    /// Groups of channels; 0 counts as 1.
    pub groups: i32,
}

/// Parameters of pools; empty lists as in [`ConvParams`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PoolParams {
    /// One per spatial axis.
    pub kernel_sizes: Vec<i32>,
    /// One per spatial axis.
    pub strides: Vec<i32>,
    /// Before and after each spatial axis.
    pub pad: Vec<i32>,
}

/// Parameters of `slice_by_index` and `slice_update`; empty lists are left out.
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
    /// Axes that are taken at one index and removed.
    pub squeeze_mask: Vec<bool>,
}

/// A number of the element type of `like`.
fn number(like: &Var, v: f32) -> Arg {
    Arg::Value(match like.dtype() {
        DataType::Float16 => Value::fp16(f16::from_f32(v)),
        DataType::Int32 => Value::int32(v as i32),
        _ => Value::fp32(v),
    })
}

fn ints(v: &[i32]) -> Arg {
    Arg::Value(Value::int32s(v))
}

fn int(v: i32) -> Arg {
    Arg::Value(Value::int32(v))
}

fn flag(v: bool) -> Arg {
    Arg::Value(Value::bool(v))
}

fn text(v: &str) -> Arg {
    Arg::Value(Value::string(v))
}

macro_rules! unary {
    ($($op:ident),*) => {$(
        #[doc = concat!("`", stringify!($op), "(x)`")]
        ///
        /// # Errors
        /// The operand does not fit.
        pub fn $op(&mut self, name: &str, x: &Var) -> Result<Var> {
            self.single(stringify!($op), name, vec![("x", x.into())])
        }
    )*};
}

macro_rules! binary {
    ($($op:ident),*) => {$(
        #[doc = concat!("`", stringify!($op), "(x, y)`, broadcast as NumPy does.")]
        ///
        /// # Errors
        /// The operands do not fit.
        pub fn $op(&mut self, name: &str, x: &Var, y: &Var) -> Result<Var> {
            self.single(stringify!($op), name, vec![("x", x.into()), ("y", y.into())])
        }
    )*};
}

macro_rules! reduction {
    ($($op:ident),*) => {$(
        #[doc = concat!("`", stringify!($op), "` over `axes`.")]
        ///
        /// # Errors
        /// The operand or an axis does not fit.
        pub fn $op(&mut self, name: &str, x: &Var, axes: &[i32], keep_dims: bool) -> Result<Var> {
            let args = vec![("x", x.into()), ("axes", ints(axes)), ("keep_dims", flag(keep_dims))];
            self.single(stringify!($op), name, args)
        }
    )*};
}

/// Ops with numbers as further parameters, in the element type of `x`.
macro_rules! scaled {
    ($($op:ident($($param:ident),*)),*) => {$(
        #[doc = concat!("`", stringify!($op), "(x)` with its parameters in the element type of `x`.")]
        ///
        /// # Errors
        /// The operand does not fit.
        pub fn $op(&mut self, name: &str, x: &Var, $($param: f32),*) -> Result<Var> {
            self.single(stringify!($op), name, vec![("x", x.into()), $((stringify!($param), number(x, $param))),*])
        }
    )*};
}

/// Ops with constant integers as further parameters.
macro_rules! with_ints {
    ($($op:ident($param:ident)),*) => {$(
        #[doc = concat!("`", stringify!($op), "(x)` with constant `", stringify!($param), "`.")]
        ///
        /// # Errors
        /// The operand or the parameter does not fit.
        pub fn $op(&mut self, name: &str, x: &Var, $param: &[i32]) -> Result<Var> {
            self.single(stringify!($op), name, vec![("x", x.into()), (stringify!($param), ints($param))])
        }
    )*};
}

/// Ops with one constant integer as further parameter.
macro_rules! with_int {
    ($($op:ident($param:ident)),*) => {$(
        #[doc = concat!("`", stringify!($op), "(x)` with constant `", stringify!($param), "`.")]
        ///
        /// # Errors
        /// The operand or the parameter does not fit.
        pub fn $op(&mut self, name: &str, x: &Var, $param: i32) -> Result<Var> {
            self.single(stringify!($op), name, vec![("x", x.into()), (stringify!($param), int($param))])
        }
    )*};
}

impl FunctionBuilder {
    unary!(
        abs,
        acos,
        asin,
        atan,
        atanh,
        ceil,
        cos,
        cosh,
        erf,
        exp,
        exp2,
        floor,
        identity,
        logical_not,
        non_zero,
        relu,
        relu6,
        round,
        shape,
        sigmoid,
        sign,
        silu,
        sin,
        sinh,
        softplus,
        softsign,
        sqrt,
        square,
        tan,
        tanh
    );
    binary!(
        add,
        equal,
        floor_div,
        greater,
        greater_equal,
        less,
        less_equal,
        logical_and,
        logical_or,
        logical_xor,
        maximum,
        minimum,
        mul,
        not_equal,
        pow,
        real_div,
        sub
    );
    reduction!(
        reduce_l1_norm,
        reduce_l2_norm,
        reduce_log_sum,
        reduce_log_sum_exp,
        reduce_max,
        reduce_mean,
        reduce_min,
        reduce_prod,
        reduce_sum,
        reduce_sum_square
    );
    scaled!(
        clamped_relu(alpha, beta),
        clip(alpha, beta),
        elu(alpha),
        inverse(epsilon),
        l2_norm(epsilon),
        leaky_relu(alpha),
        linear_activation(alpha, beta),
        log(epsilon),
        rsqrt(epsilon),
        scaled_tanh(alpha, beta),
        sigmoid_hard(alpha, beta),
        threshold(alpha),
        thresholded_relu(alpha)
    );
    with_ints!(expand_dims(axes), reshape(shape), reverse(axes), squeeze(axes), tile(reps), transpose(perm));
    with_int!(
        depth_to_space(block_size),
        flatten2d(axis),
        pixel_shuffle(upscale_factor),
        pixel_unshuffle(downscale_factor),
        softmax(axis),
        space_to_depth(block_size)
    );

    /// `mod(x, y)` with the sign of `y`.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn modulo(&mut self, name: &str, x: &Var, y: &Var) -> Result<Var> {
        self.single("mod", name, vec![("x", x.into()), ("y", y.into())])
    }

    /// `gelu(x)`
    ///
    /// # Errors
    /// The operand does not fit.
    pub fn gelu(&mut self, name: &str, x: &Var, mode: GeluMode) -> Result<Var> {
        let mode = match mode {
            GeluMode::Exact => "EXACT",
            GeluMode::TanhApproximation => "TANH_APPROXIMATION",
            GeluMode::SigmoidApproximation => "SIGMOID_APPROXIMATION",
        };
        self.single("gelu", name, vec![("x", x.into()), ("mode", text(mode))])
    }

    /// `prelu(x)` with a slope per channel.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn prelu(&mut self, name: &str, x: &Var, alpha: &Var) -> Result<Var> {
        self.single("prelu", name, vec![("x", x.into()), ("alpha", alpha.into())])
    }

    /// `softplus_parametric(x)` with two factors per channel.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn softplus_parametric(&mut self, name: &str, x: &Var, alpha: &Var, beta: &Var) -> Result<Var> {
        self.single(
            "softplus_parametric",
            name,
            vec![("x", x.into()), ("alpha", alpha.into()), ("beta", beta.into())],
        )
    }

    /// `cast(x)`
    ///
    /// # Errors
    /// The type cannot be cast to.
    pub fn cast(&mut self, name: &str, x: &Var, dtype: DataType) -> Result<Var> {
        self.single("cast", name, vec![("x", x.into()), ("dtype", text(dtype.name()))])
    }

    /// `select(cond, a, b)`
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn select(&mut self, name: &str, cond: &Var, a: &Var, b: &Var) -> Result<Var> {
        self.single("select", name, vec![("cond", cond.into()), ("a", a.into()), ("b", b.into())])
    }

    /// `conv(x, weight, bias)`: x `[N, C, spatial..]`, weight `[O, C/groups, kernel..]`, bias `[O]`.
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
        let or = |v: Vec<i32>, default: i32, n: usize| if v.is_empty() { vec![default; n] } else { v };
        let pad_type = if p.pad.is_empty() { "valid" } else { "custom" };
        let mut args = vec![
            ("x", x.into()),
            ("weight", weight.into()),
            ("strides", ints(&or(p.strides, 1, n))),
            ("pad_type", text(pad_type)),
            ("pad", ints(&or(p.pad, 0, 2 * n))),
            ("dilations", ints(&or(p.dilations, 1, n))),
            ("groups", int(p.groups.max(1))),
        ];
        if let Some(bias) = bias {
            args.push(("bias", bias.into()));
        }
        self.single("conv", name, args)
    }

    /// `linear(x, weight, bias)`: x `[.., I]`, weight `[O, I]`, bias `[O]`.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn linear(&mut self, name: &str, x: &Var, weight: &Var, bias: Option<&Var>) -> Result<Var> {
        let mut args = vec![("x", x.into()), ("weight", weight.into())];
        if let Some(bias) = bias {
            args.push(("bias", bias.into()));
        }
        self.single("linear", name, args)
    }

    /// `matmul(x, y)` over the last two axes; the others broadcast.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn matmul(
        &mut self,
        name: &str,
        x: &Var,
        y: &Var,
        transpose_x: bool,
        transpose_y: bool,
    ) -> Result<Var> {
        let args = vec![
            ("x", x.into()),
            ("y", y.into()),
            ("transpose_x", flag(transpose_x)),
            ("transpose_y", flag(transpose_y)),
        ];
        self.single("matmul", name, args)
    }

    /// `layer_norm(x)` over `axes`.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn layer_norm(
        &mut self,
        name: &str,
        x: &Var,
        axes: &[i32],
        gamma: Option<&Var>,
        beta: Option<&Var>,
        epsilon: f32,
    ) -> Result<Var> {
        let mut args = vec![("x", x.into()), ("axes", ints(axes)), ("epsilon", number(x, epsilon))];
        args.extend(gamma.map(|v| ("gamma", v.into())));
        args.extend(beta.map(|v| ("beta", v.into())));
        self.single("layer_norm", name, args)
    }

    /// `batch_norm(x, mean, variance, gamma, beta)`
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn batch_norm(
        &mut self,
        name: &str,
        x: &Var,
        (mean, variance): (&Var, &Var),
        gamma: Option<&Var>,
        beta: Option<&Var>,
        epsilon: f32,
    ) -> Result<Var> {
        let mut args = vec![
            ("x", x.into()),
            ("mean", mean.into()),
            ("variance", variance.into()),
            ("epsilon", number(x, epsilon)),
        ];
        args.extend(gamma.map(|v| ("gamma", v.into())));
        args.extend(beta.map(|v| ("beta", v.into())));
        self.single("batch_norm", name, args)
    }

    /// `max_pool(x)`
    ///
    /// # Errors
    /// The operand or a parameter does not fit.
    pub fn max_pool(&mut self, name: &str, x: &Var, p: PoolParams) -> Result<Var> {
        self.pool("max_pool", name, x, p)
    }

    /// `avg_pool(x)`
    ///
    /// # Errors
    /// The operand or a parameter does not fit.
    pub fn avg_pool(&mut self, name: &str, x: &Var, p: PoolParams) -> Result<Var> {
        self.pool("avg_pool", name, x, p)
    }

    /// `l2_pool(x)`
    ///
    /// # Errors
    /// The operand or a parameter does not fit.
    pub fn l2_pool(&mut self, name: &str, x: &Var, p: PoolParams) -> Result<Var> {
        self.pool("l2_pool", name, x, p)
    }

    fn pool(&mut self, op: &'static str, name: &str, x: &Var, p: PoolParams) -> Result<Var> {
        let n = p.kernel_sizes.len();
        let or = |v: Vec<i32>, default: i32, n: usize| if v.is_empty() { vec![default; n] } else { v };
        let pad_type = if p.pad.is_empty() { "valid" } else { "custom" };
        let args = vec![
            ("x", x.into()),
            ("kernel_sizes", ints(&p.kernel_sizes)),
            ("strides", ints(&or(p.strides, 1, n))),
            ("pad_type", text(pad_type)),
            ("pad", ints(&or(p.pad, 0, 2 * n))),
        ];
        self.single(op, name, args)
    }

    /// Index of the largest element along `axis`.
    ///
    /// # Errors
    /// The operand or the axis does not fit.
    pub fn reduce_argmax(&mut self, name: &str, x: &Var, axis: i32, keep_dims: bool) -> Result<Var> {
        let args = vec![("x", x.into()), ("axis", int(axis)), ("keep_dims", flag(keep_dims))];
        self.single("reduce_argmax", name, args)
    }

    /// Index of the smallest element along `axis`.
    ///
    /// # Errors
    /// The operand or the axis does not fit.
    pub fn reduce_argmin(&mut self, name: &str, x: &Var, axis: i32, keep_dims: bool) -> Result<Var> {
        let args = vec![("x", x.into()), ("axis", int(axis)), ("keep_dims", flag(keep_dims))];
        self.single("reduce_argmin", name, args)
    }

    /// `gather(x, indices)` along `axis`.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn gather(&mut self, name: &str, x: &Var, indices: &Var, axis: i32) -> Result<Var> {
        self.single("gather", name, vec![("x", x.into()), ("indices", indices.into()), ("axis", int(axis))])
    }

    /// `gather_along_axis(x, indices)`
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn gather_along_axis(&mut self, name: &str, x: &Var, indices: &Var, axis: i32) -> Result<Var> {
        self.single(
            "gather_along_axis",
            name,
            vec![("x", x.into()), ("indices", indices.into()), ("axis", int(axis))],
        )
    }

    /// `gather_nd(x, indices)`
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn gather_nd(&mut self, name: &str, x: &Var, indices: &Var) -> Result<Var> {
        self.single("gather_nd", name, vec![("x", x.into()), ("indices", indices.into())])
    }

    /// The `k` largest elements along `axis`, and their indices.
    ///
    /// # Errors
    /// The operand or a parameter does not fit.
    pub fn topk(&mut self, name: &str, x: &Var, k: i32, axis: i32) -> Result<Vec<Var>> {
        self.op("topk", name, vec![("x", x.into()), ("k", int(k)), ("axis", int(axis))])
    }

    /// Running sum along `axis`.
    ///
    /// # Errors
    /// The operand or the axis does not fit.
    pub fn cumsum(&mut self, name: &str, x: &Var, axis: i32, exclusive: bool, reverse: bool) -> Result<Var> {
        let args = vec![
            ("x", x.into()),
            ("axis", int(axis)),
            ("exclusive", flag(exclusive)),
            ("reverse", flag(reverse)),
        ];
        self.single("cumsum", name, args)
    }

    /// Joins tensors along `axis`.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn concat(&mut self, name: &str, values: &[&Var], axis: i32) -> Result<Var> {
        self.single("concat", name, vec![("values", values.into()), ("axis", int(axis))])
    }

    /// Joins tensors along a new `axis`.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn stack(&mut self, name: &str, values: &[&Var], axis: i32) -> Result<Var> {
        self.single("stack", name, vec![("values", values.into()), ("axis", int(axis))])
    }

    /// Cuts a tensor into `n` equal parts along `axis`.
    ///
    /// # Errors
    /// The axis is not divisible.
    pub fn split(&mut self, name: &str, x: &Var, n: usize, axis: i32) -> Result<Vec<Var>> {
        let n = i32::try_from(n).unwrap_or(-1);
        self.op("split", name, vec![("x", x.into()), ("num_splits", int(n)), ("axis", int(axis))])
    }

    /// Cuts a tensor into parts of these sizes along `axis`.
    ///
    /// # Errors
    /// The sizes do not add up.
    pub fn split_sizes(&mut self, name: &str, x: &Var, sizes: &[i32], axis: i32) -> Result<Vec<Var>> {
        self.op("split", name, vec![("x", x.into()), ("split_sizes", ints(sizes)), ("axis", int(axis))])
    }

    /// `pad(x)` with a constant: amounts before and after each of the last axes.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn pad(&mut self, name: &str, x: &Var, amounts: &[i32], constant_val: &Var) -> Result<Var> {
        let args = vec![("x", x.into()), ("pad", ints(amounts)), ("constant_val", constant_val.into())];
        self.single("pad", name, args)
    }

    fn slice_args(p: SliceParams, args: &mut Vec<(&'static str, Arg)>) {
        args.extend([("begin", ints(&p.begin)), ("end", ints(&p.end))]);
        if !p.stride.is_empty() {
            args.push(("stride", ints(&p.stride)));
        }
        for (name, mask) in
            [("begin_mask", p.begin_mask), ("end_mask", p.end_mask), ("squeeze_mask", p.squeeze_mask)]
        {
            if !mask.is_empty() {
                args.push((name, Arg::Value(Value::bools(&mask))));
            }
        }
    }

    /// `x[begin:end:stride]`
    ///
    /// # Errors
    /// The operand or a parameter does not fit.
    pub fn slice_by_index(&mut self, name: &str, x: &Var, p: SliceParams) -> Result<Var> {
        let mut args = vec![("x", x.into())];
        Self::slice_args(p, &mut args);
        self.single("slice_by_index", name, args)
    }

    /// `x[begin:end:stride] = update`
    ///
    /// # Errors
    /// The operands or a parameter does not fit.
    pub fn slice_update(&mut self, name: &str, x: &Var, update: &Var, p: SliceParams) -> Result<Var> {
        let mut args = vec![("x", x.into()), ("update", update.into())];
        Self::slice_args(p, &mut args);
        self.single("slice_update", name, args)
    }

    /// `size` elements from `begin` on; a size of -1 goes to the end.
    ///
    /// # Errors
    /// The operand or a parameter does not fit.
    pub fn slice_by_size(&mut self, name: &str, x: &Var, begin: &[i32], size: &[i32]) -> Result<Var> {
        self.single(
            "slice_by_size",
            name,
            vec![("x", x.into()), ("begin", ints(begin)), ("size", ints(size))],
        )
    }

    /// Attention of `[.., L, E]` over `[.., S, E]`, with an optional additive mask `[.., L, S]`.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn scaled_dot_product_attention(
        &mut self,
        name: &str,
        (query, key, value): (&Var, &Var, &Var),
        attn_mask: Option<&Var>,
    ) -> Result<Var> {
        let mut args = vec![("query", query.into()), ("key", key.into()), ("value", value.into())];
        args.extend(attn_mask.map(|m| ("attn_mask", m.into())));
        self.single("scaled_dot_product_attention", name, args)
    }

    /// The state's value now.
    ///
    /// # Errors
    /// The operand is not a state.
    pub fn read_state(&mut self, name: &str, state: &Var) -> Result<Var> {
        self.single("read_state", name, vec![("input", state.into())])
    }

    /// Sets a state; the operation is named after the value, as coremltools does.
    ///
    /// # Errors
    /// The value has another type than the state.
    pub fn write_state(&mut self, state: &Var, value: &Var) -> Result<()> {
        let name = format!("{}_write_state", value.name());
        self.op("write_state", &name, vec![("input", state.into()), ("data", value.into())]).map(drop)
    }

    /// Palettized weight: `indices` of the weight's shape, `lut` `[groups.., 2^bits, 1]`.
    ///
    /// # Errors
    /// The tables do not fit the indices.
    pub fn constexpr_lut_to_dense(&mut self, name: &str, indices: Value, lut: Value) -> Result<Var> {
        self.single("constexpr_lut_to_dense", name, vec![("indices", indices.into()), ("lut", lut.into())])
    }

    /// Palettized weight as before iOS18: `indices` packed into uint8, one table `lut` `[2^bits]`, the weight's `shape` in
    /// uint32.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn constexpr_lut_to_dense_ios16(
        &mut self,
        name: &str,
        indices: Value,
        lut: Value,
        shape: Value,
    ) -> Result<Var> {
        let args = vec![("indices", indices.into()), ("lut", lut.into()), ("shape", shape.into())];
        self.single("constexpr_lut_to_dense", name, args)
    }

    /// Linearly quantized weight as before iOS18: `scale * (quantized_data - zero_point)`, scalars or vectors along `axis`.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn constexpr_affine_dequantize(
        &mut self,
        name: &str,
        quantized_data: Value,
        zero_point: Value,
        scale: Value,
        axis: Value,
    ) -> Result<Var> {
        let args = vec![
            ("quantized_data", quantized_data.into()),
            ("zero_point", zero_point.into()),
            ("scale", scale.into()),
            ("axis", axis.into()),
        ];
        self.single("constexpr_affine_dequantize", name, args)
    }

    /// Linearly quantized weight: `scale * (data - offset)`, with a scale per block.
    ///
    /// # Errors
    /// The scales do not fit the data.
    pub fn constexpr_blockwise_shift_scale(
        &mut self,
        name: &str,
        data: Value,
        scale: Value,
        offset: Option<Value>,
    ) -> Result<Var> {
        let mut args = vec![("data", data.into()), ("scale", scale.into())];
        args.extend(offset.map(|o| ("offset", o.into())));
        self.single("constexpr_blockwise_shift_scale", name, args)
    }
}
