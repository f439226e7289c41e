//! The op table: name, first opset, parameters, type inference.
//!
//! A parameter is required, optional (`?`), has a default (`=`), or takes any number of values (`*`).

use super::context::{Context, Inferred};
use super::infer::*;
use super::infer_index::*;
use super::infer_shape::*;
use crate::mil::Opset::{self, CoreML5 as iOS15, CoreML6 as iOS16, CoreML7 as iOS17, CoreML8 as iOS18};

type OpRow = (&'static str, Opset, &'static str, fn(&Context<'_>) -> Inferred);

#[rustfmt::skip]
pub(super) static ROWS: &[OpRow] = &[
    // activation
    ("clamped_relu", iOS15, "x alpha beta", same_float),
    ("elu", iOS15, "x alpha=1.0", same_float),
    ("gelu", iOS15, "x mode='EXACT'", same_float),
    ("leaky_relu", iOS15, "x alpha=0.01", same_float),
    ("linear_activation", iOS15, "x alpha beta=0.0", same_float),
    ("prelu", iOS15, "x alpha", same_float),
    ("relu", iOS15, "x", same_float),
    ("relu6", iOS15, "x", same_float),
    ("scaled_tanh", iOS15, "x alpha=1.0 beta=1.0", same_float),
    ("sigmoid", iOS15, "x", same_float),
    ("sigmoid_hard", iOS15, "x alpha=0.2 beta=0.5", same_float),
    ("silu", iOS15, "x", same_float),
    ("softplus", iOS15, "x", same_float),
    ("softplus_parametric", iOS15, "x alpha beta", same_float),
    ("softmax", iOS15, "x axis=-1", softmax),
    ("softsign", iOS15, "x", same_float),
    ("thresholded_relu", iOS15, "x alpha=1.0", same_float),
    // elementwise_unary
    ("abs", iOS15, "x", same), ("acos", iOS15, "x", same_float), ("asin", iOS15, "x", same_float),
    ("atan", iOS15, "x", same_float), ("atanh", iOS15, "x", same_float), ("ceil", iOS15, "x", same_float),
    ("clip", iOS15, "x alpha beta", same_float), ("cos", iOS15, "x", same_float), ("cosh", iOS15, "x", same_float),
    ("erf", iOS15, "x", same_float), ("exp", iOS15, "x", same_float), ("exp2", iOS15, "x", same_float),
    ("floor", iOS15, "x", same_float), ("inverse", iOS15, "x epsilon=1e-4", same_float),
    ("log", iOS15, "x epsilon=1e-45", same_float), ("logical_not", iOS15, "x", same),
    ("round", iOS15, "x", same_float), ("rsqrt", iOS15, "x epsilon=1e-12", same_float), ("sign", iOS15, "x", same),
    ("sin", iOS15, "x", same_float), ("sinh", iOS15, "x", same_float), ("sqrt", iOS15, "x", same_float),
    ("square", iOS15, "x", same), ("tan", iOS15, "x", same_float), ("tanh", iOS15, "x", same_float),
    ("threshold", iOS15, "x alpha", same), ("cast", iOS15, "x dtype", cast),
    // elementwise_binary
    ("add", iOS15, "x y", binary), ("sub", iOS15, "x y", binary), ("mul", iOS15, "x y", binary),
    ("real_div", iOS15, "x y", binary), ("floor_div", iOS15, "x y", binary), ("mod", iOS15, "x y", binary),
    ("maximum", iOS15, "x y", binary), ("minimum", iOS15, "x y", binary), ("pow", iOS15, "x y", binary),
    ("equal", iOS15, "x y", compare), ("not_equal", iOS15, "x y", compare), ("greater", iOS15, "x y", compare),
    ("greater_equal", iOS15, "x y", compare), ("less", iOS15, "x y", compare), ("less_equal", iOS15, "x y", compare),
    ("logical_and", iOS15, "x y", compare), ("logical_or", iOS15, "x y", compare), ("logical_xor", iOS15, "x y", compare),
    // conv, linear
    ("conv", iOS15, "x weight bias? strides? pad_type='valid' pad? dilations? groups=1", conv),
    ("conv_transpose", iOS15, "x weight bias? pad? output_shape? pad_type='valid' strides? dilations? groups=1", conv_transpose),
    ("linear", iOS15, "x weight bias?", linear),
    ("matmul", iOS15, "x y transpose_x=false transpose_y=false", matmul),
    ("einsum", iOS15, "values* equation", einsum),
    // normalization
    ("batch_norm", iOS15, "x mean variance gamma? beta? epsilon=1e-5", norm),
    ("instance_norm", iOS15, "x gamma? beta? epsilon=1e-5", norm),
    ("l2_norm", iOS15, "x epsilon=1e-6", norm),
    ("layer_norm", iOS15, "x axes? gamma? beta? epsilon=1e-5", norm),
    ("local_response_norm", iOS15, "x size alpha=1e-4 beta=0.75 k=1.0", norm),
    // pool
    ("avg_pool", iOS15, "x kernel_sizes strides? pad_type pad? exclude_padding_from_average=false ceil_mode=false", pool),
    ("l2_pool", iOS15, "x kernel_sizes strides? pad_type pad? ceil_mode=false", pool),
    ("max_pool", iOS15, "x kernel_sizes strides? pad_type pad? ceil_mode=false", pool),
    // reduction
    ("reduce_argmax", iOS15, "x axis=-1 keep_dims=false output_dtype?", reduce_arg),
    ("reduce_argmin", iOS15, "x axis=-1 keep_dims=false output_dtype?", reduce_arg),
    ("reduce_l1_norm", iOS15, "x axes? keep_dims=false", reduce),
    ("reduce_l2_norm", iOS15, "x axes? keep_dims=false", reduce),
    ("reduce_log_sum", iOS15, "x axes? keep_dims=false", reduce),
    ("reduce_log_sum_exp", iOS15, "x axes? keep_dims=false", reduce),
    ("reduce_max", iOS15, "x axes? keep_dims=false", reduce),
    ("reduce_mean", iOS15, "x axes? keep_dims=false", reduce),
    ("reduce_min", iOS15, "x axes? keep_dims=false", reduce),
    ("reduce_prod", iOS15, "x axes? keep_dims=false", reduce),
    ("reduce_sum", iOS15, "x axes? keep_dims=false", reduce),
    ("reduce_sum_square", iOS15, "x axes? keep_dims=false", reduce),
    // classify
    ("classify", iOS15, "probabilities classes", classify),
    // scatter_gather
    ("gather", iOS15, "x indices axis=0 batch_dims? validate_indices?", gather),
    ("gather_along_axis", iOS15, "x indices axis=0 validate_indices?", gather_along_axis),
    ("gather_nd", iOS15, "x indices batch_dims? validate_indices?", gather_nd),
    ("scatter", iOS15, "data indices updates axis=0 mode='add' validate_indices?", scatter),
    ("scatter_along_axis", iOS15, "data indices updates axis=0 mode='add' validate_indices?", scatter),
    ("scatter_nd", iOS15, "data indices updates mode='add' validate_indices?", scatter),
    // tensor_operation
    ("argsort", iOS15, "x axis=-1 ascending=false output_dtype?", argsort),
    ("band_part", iOS15, "x lower=-1 upper=-1", same),
    ("concat", iOS15, "values* axis interleave=false", concat),
    ("cumsum", iOS15, "x axis=0 exclusive=false reverse=false", same),
    ("fill", iOS15, "shape value?", fill),
    ("fill_like", iOS16, "ref_tensor value?", fill_like),
    ("flatten2d", iOS15, "x axis=1", flatten2d),
    ("identity", iOS15, "x", identity),
    ("non_zero", iOS15, "x", non_zero),
    ("one_hot", iOS15, "indices one_hot_vector_size axis=-1 on_value? off_value?", one_hot),
    ("pad", iOS15, "x pad mode='constant' constant_val?", pad),
    ("range_1d", iOS15, "end start step", range_1d),
    ("select", iOS15, "cond a b", select),
    ("shape", iOS15, "x output_dtype?", shape),
    ("split", iOS15, "x num_splits? split_sizes? axis", split),
    ("stack", iOS15, "values* axis", stack),
    ("tile", iOS15, "x reps", tile),
    ("topk", iOS15, "x k=1 axis=-1 ascending=false sort? return_indices? output_indices_dtype?", topk),
    // tensor_transformation
    ("batch_to_space", iOS15, "x block_shape crops", batch_space),
    ("depth_to_space", iOS15, "x block_size", depth_to_space),
    ("expand_dims", iOS15, "x axes", expand_dims),
    ("pixel_shuffle", iOS15, "x upscale_factor", pixel_shuffle),
    ("pixel_unshuffle", iOS16, "x downscale_factor", pixel_unshuffle),
    ("reshape", iOS15, "x shape", reshape),
    ("reshape_like", iOS16, "x ref_tensors* begins ends end_masks", reshape_like),
    ("reverse", iOS15, "x axes?", same),
    ("reverse_sequence", iOS15, "x lengths seq_axis? batch_axis?", same),
    ("slice_by_index", iOS15, "x begin end stride? begin_mask? end_mask? squeeze_mask?", slice_by_index),
    ("slice_by_size", iOS15, "x begin size", slice_by_size),
    ("slice_update", iOS18, "x update begin end stride? begin_mask? end_mask? squeeze_mask?", slice_update),
    ("sliding_windows", iOS15, "x axis size stride=1", sliding_windows),
    ("space_to_batch", iOS15, "x block_shape paddings", batch_space),
    ("space_to_depth", iOS15, "x block_size", space_to_depth),
    ("squeeze", iOS15, "x axes?", squeeze),
    ("transpose", iOS15, "x perm", transpose),
    // image_resizing
    ("crop", iOS15, "x crop_height crop_width", crop),
    ("resize_bilinear", iOS15, "x target_size_height=1 target_size_width=1 sampling_mode='DEFAULT'", resize_to),
    ("resize_nearest_neighbor", iOS15, "x target_size_height target_size_width", resize_to),
    ("upsample_bilinear", iOS15, "x scale_factor_height=1 scale_factor_width=1 align_corners=true half_pixel_centers?", upsample),
    ("upsample_nearest_neighbor", iOS15, "x scale_factor_height=1 scale_factor_width=1", upsample),
    // quantization, states, transformers, control flow
    ("quantize", iOS17, "input scale zero_point? axis? output_dtype", quantize),
    ("dequantize", iOS17, "input scale zero_point? axis?", dequantize),
    ("read_state", iOS18, "input", read_state),
    ("write_state", iOS18, "input data", write_state),
    ("scaled_dot_product_attention", iOS18, "query key value attn_mask?", attention),
    ("cond", iOS15, "pred", cond),
    ("while_loop", iOS15, "loop_vars*", while_loop),
    // compression
    ("constexpr_lut_to_dense", iOS16, "indices lut shape? vector_axis?", lut_to_dense),
    ("constexpr_affine_dequantize", iOS16, "quantized_data zero_point scale axis", affine_dequantize),
    ("constexpr_sparse_to_dense", iOS16, "nonzero_data mask shape?", sparse_to_dense),
    ("constexpr_cast", iOS16, "source_val output_dtype", constexpr_cast),
    ("constexpr_blockwise_shift_scale", iOS18, "data scale offset?", blockwise),
    ("constexpr_lut_to_sparse", iOS18, "indices_mask indices_nonzero_data lut vector_axis?", to_sparse),
    ("constexpr_sparse_blockwise_shift_scale", iOS18, "data_mask nonzero_data scale offset?", to_sparse),
];
