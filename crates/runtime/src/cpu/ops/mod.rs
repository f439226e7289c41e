//! The op library: one pure function per MIL op over dense host tensors. Programs, compressed weights, states and control flow
//! are handled in `cpu::compile`.
//!
//! An op's function computes in f32 and does not round: the executor rounds a result to fp16 where its type is fp16.

mod conv_transpose;
mod elementwise_binary;
mod elementwise_unary;
pub(super) mod image;
mod image_resizing;
pub(super) mod linear;
mod lists;
mod normalization;
mod operands;
mod random_ops;
mod recurrent;
mod reduction;
mod scatter_gather;
pub(super) mod shape;
mod sliding;
mod suppression;
mod tensor_operation;
mod tensor_transformation;
pub(super) mod window;

pub(super) use elementwise_binary::{BinaryLoops, binary_loops};
pub(super) use elementwise_unary::{ElementFunction, activation, copy, element_function, map_all, sigmoid};
pub(crate) use linear::dot;
pub use operands::{OpContext, OpError, OpFunction, OpResult};
pub(super) use reduction::{Reduce, ReductionLoops, exact_reduction, fast_reduction};
pub(super) use sliding::PoolParams;

use crate::tensor::{Data, Tensor};
use anemoe_mlpackage::mil::{DataType, TensorType};

/// Tells whether an op is a function of each element of one tensor, with parameters of one number.
#[rustfmt::skip]
fn is_unary(op: &str) -> bool {
    matches!(op,
        "abs" | "acos" | "asin" | "atan" | "atanh" | "ceil" | "cos" | "cosh" | "erf" | "exp" | "exp2" | "floor" | "round"
        | "sign" | "sin" | "sinh" | "sqrt" | "square" | "tan" | "tanh" | "relu" | "relu6" | "sigmoid" | "silu" | "softplus"
        | "softsign" | "clamped_relu" | "clip" | "elu" | "gelu" | "inverse" | "leaky_relu" | "linear_activation" | "log" | "rsqrt"
        | "scaled_tanh" | "sigmoid_hard" | "threshold" | "thresholded_relu")
}

/// Tells whether an op computes a number of each pair of elements.
pub(super) fn is_binary(op: &str) -> bool {
    binary_loops(op).is_some()
}

/// Tells whether an op computes a bool of each pair of elements.
#[rustfmt::skip]
fn is_comparison(op: &str) -> bool {
    matches!(op,
        "equal" | "not_equal" | "greater" | "greater_equal" | "less" | "less_equal" | "logical_and" | "logical_or" | "logical_xor")
}

/// Tells whether an op takes any number of tokens on an axis and treats tokens alike, whatever its parameters are.
#[rustfmt::skip]
pub(super) fn is_tokenwise(op: &str) -> bool {
    is_unary(op) || matches!(op,
        "cast" | "identity" | "softmax" | "conv" | "linear" | "matmul" | "transpose" | "expand_dims" | "squeeze" | "pad" | "concat"
        | "write_state" | "read_state" | "select")
}

/// Tells whether an op is a reduction or norm that treats tokens alike where its axes do not include theirs.
#[rustfmt::skip]
pub(super) fn is_over_axes(op: &str) -> bool {
    matches!(op,
        "reduce_max" | "reduce_mean" | "reduce_min" | "reduce_sum" | "reduce_sum_square" | "reduce_l2_norm" | "reduce_prod" | "layer_norm")
}

/// Tells whether the shape of an op's result follows from the shapes of its operands alone.
#[rustfmt::skip]
pub(super) fn has_shape_by_shapes(op: &str) -> bool {
    is_binary(op) || is_comparison(op) || matches!(op,
        "select" | "matmul" | "linear" | "conv" | "einsum" | "scaled_dot_product_attention" | "layer_norm" | "batch_norm"
        | "instance_norm" | "gather" | "gather_along_axis" | "gather_nd" | "scatter" | "scatter_along_axis" | "scatter_nd" | "concat"
        | "stack" | "reshape_like" | "fill_like" | "prelu" | "slice_update" | "clip" | "quantize" | "dequantize" | "rnn" | "gru"
        | "lstm" | "resample" | "affine" | "crop_resize" | "non_maximum_suppression")
}

/// Returns the function of an op type, if the library has one.
#[rustfmt::skip]
pub fn op_function(op_type: &str) -> Option<OpFunction> {
    Some(match op_type {
        _ if is_unary(op_type) => elementwise_unary::unary,
        _ if is_binary(op_type) => elementwise_binary::arithmetic,
        _ if is_comparison(op_type) => elementwise_binary::compare,
        "prelu" | "softplus_parametric" => elementwise_unary::per_channel,
        "softmax" => elementwise_unary::softmax,
        "logical_not" => elementwise_unary::logical_not,
        "identity" => elementwise_unary::identity,
        "cast" => elementwise_unary::cast,
        "select" => elementwise_binary::select,
        "conv" => sliding::conv,
        "conv_quantized" => sliding::conv_quantized,
        "conv_transpose" => conv_transpose::conv_transpose,
        "avg_pool" | "max_pool" | "l2_pool" => sliding::pool,
        "linear" => linear::linear,
        "matmul" => linear::matmul,
        "einsum" => linear::einsum,
        "scaled_dot_product_attention" => linear::attention,
        "layer_norm" => normalization::layer_norm,
        "batch_norm" | "instance_norm" => normalization::channel_norm,
        "l2_norm" => normalization::l2_norm,
        "local_response_norm" => normalization::local_response_norm,
        "reduce_l1_norm" | "reduce_l2_norm" | "reduce_log_sum" | "reduce_log_sum_exp" | "reduce_max" | "reduce_mean"
        | "reduce_min" | "reduce_prod" | "reduce_sum" | "reduce_sum_square" => reduction::reduce,
        "reduce_argmax" | "reduce_argmin" => reduction::arg,
        "gather" => scatter_gather::gather,
        "gather_along_axis" => scatter_gather::gather_along_axis,
        "gather_nd" => scatter_gather::gather_nd,
        "scatter" => scatter_gather::scatter,
        "scatter_along_axis" => scatter_gather::scatter_along_axis,
        "scatter_nd" => scatter_gather::scatter_nd,
        "argsort" => tensor_operation::argsort,
        "band_part" => tensor_operation::band_part,
        "concat" => tensor_operation::concat,
        "cumsum" => tensor_operation::cumsum,
        "fill" | "fill_like" => tensor_operation::fill,
        "non_zero" => tensor_operation::non_zero,
        "one_hot" => tensor_operation::one_hot,
        "pad" => tensor_operation::pad,
        "quantize" | "dequantize" => tensor_operation::quantization,
        "range_1d" => tensor_operation::range_1d,
        "shape" => tensor_operation::shape,
        "split" => tensor_operation::split,
        "stack" => tensor_operation::stack,
        "tile" => tensor_operation::tile,
        "topk" => tensor_operation::topk,
        "batch_to_space" | "space_to_batch" => tensor_transformation::batches,
        "depth_to_space" | "space_to_depth" | "pixel_shuffle" | "pixel_unshuffle" => tensor_transformation::blocks,
        "expand_dims" | "squeeze" | "flatten2d" => tensor_transformation::reranked,
        "reshape" => tensor_transformation::reshape,
        "reshape_like" => tensor_transformation::reshape_like,
        "reverse" => tensor_transformation::reverse,
        "reverse_sequence" => tensor_transformation::reverse_sequence,
        "slice_by_index" => tensor_transformation::slice_by_index,
        "slice_by_size" => tensor_transformation::slice_by_size,
        "slice_update" => tensor_transformation::slice_update,
        "sliding_windows" => tensor_transformation::sliding_windows,
        "transpose" => tensor_transformation::transpose,
        "crop" => image_resizing::crop,
        "resize" | "resize_bilinear" | "resize_nearest_neighbor" | "upsample_bilinear" | "upsample_nearest_neighbor" =>
            image_resizing::resize,
        "crop_resize" => image_resizing::crop_resize,
        "resample" => image_resizing::resample,
        "affine" => image_resizing::affine,
        "rnn" => recurrent::rnn,
        "gru" => recurrent::gru,
        "lstm" => recurrent::lstm,
        "non_maximum_suppression" => suppression::non_maximum_suppression,
        "random_bernoulli" | "random_normal" | "random_uniform" => random_ops::distribution,
        "random_categorical" => random_ops::categorical,
        "make_list" => lists::make_list,
        "list_read" | "list_gather" => lists::gather,
        "list_write" | "list_scatter" => lists::scatter,
        "list_length" => lists::length,
        _ => return None,
    })
}

/// Refuses an op's result whose shape or element type is not the declared one.
pub(super) fn check_result(t: &Tensor, ty: &TensorType) -> OpResult {
    let fits = !ty.has_rank()
        || t.rank() == ty.rank()
            && t.shape.iter().zip(&ty.dims).all(|(&d, dim)| dim.fixed().is_none_or(|n| n == d as u64));
    let kind = match &t.data {
        Data::F32(_) => ty.dtype.is_float(),
        Data::I32(_) => ty.dtype.is_int(),
        Data::Bool(_) => ty.dtype == DataType::Bool,
        Data::Str(_) => ty.dtype == DataType::String,
    };
    if fits && kind {
        Ok(())
    } else {
        Err(OpError::Invalid(format!("a result of shape {:?}, declared is {ty}", t.shape)))
    }
}
