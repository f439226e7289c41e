#!/usr/bin/env python3
"""Makes the cases of this folder: small programs from coremltools' builder, with results of the independent evaluator.

    python generate.py            (coremltools==9.0, numpy, safetensors)

Each case is NAME/NAME.mlpackage with NAME/inputs.npz, NAME/expected.npz (fp32, the evaluator of xtask/oracle) and
NAME/case.json, in the layout of ../interop.
"""
import json, logging, os, shutil, sys, warnings

warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
import functools
import numpy as np
import coremltools as ct
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.optimize import coreml as cto

here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(here, "../../../../xtask/oracle"))
import mil_check

rng = np.random.default_rng(0)
T = ct.target


def normal(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def save(name, model):
    folder = os.path.join(here, name)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    path = os.path.join(folder, f"{name}.mlpackage")
    model.save(path)
    checker = mil_check.Checker(path)
    inputs = {}
    for key, (shape, dtype) in checker.input_shapes(checker.default).items():
        whole = dtype.startswith("INT")
        inputs[key] = rng.integers(0, 4, shape).astype(np.int32) if whole else rng.standard_normal(shape).astype(np.float16 if dtype == "FLOAT16" else np.float32)
    outputs, _ = checker.run(inputs, checker.default, "fp32", {})
    np.savez_compressed(os.path.join(folder, "inputs.npz"), **inputs)
    wide = lambda v: np.asarray(v).astype(np.int32 if np.asarray(v).dtype.kind in "iu" else np.float32)
    np.savez_compressed(os.path.join(folder, "expected.npz"), **{k: wide(v) for k, v in outputs.items()})
    tolerance = {"tolerance_cos": 0.9995, "tolerance_rtol": 0.01}
    with open(os.path.join(folder, "case.json"), "w") as f:
        json.dump({"name": name, "function": "main", "steps": 1, **tolerance}, f, indent=1)


def program(name, shapes, body, target=T.iOS17):
    specs = [mb.TensorSpec(shape=s[0], dtype=s[1]) if isinstance(s[0], tuple) else mb.TensorSpec(shape=s) for s in shapes]
    prog = mb.program(input_specs=specs, opset_version=target)(body)
    options = dict(convert_to="mlprogram", minimum_deployment_target=target, skip_model_load=True)
    save(name, ct.convert(prog, compute_precision=ct.precision.FLOAT32, **options))


def compressed(name, passes, target):
    @mb.program(input_specs=[mb.TensorSpec(shape=(1, 32, 1, 4))], opset_version=target)
    def prog(x):
        y = mb.conv(x=x, weight=normal(64, 32, 1, 1) * 0.1)
        z = mb.reshape(x=y, shape=[4, 64])
        return mb.linear(x=z, weight=normal(32, 64) * 0.1), mb.matmul(x=z, y=normal(64, 48))

    model = ct.convert(prog, convert_to="mlprogram", minimum_deployment_target=target, skip_model_load=True)
    for function, config in passes:
        model = function(model, cto.OptimizationConfig(global_config=config))
    save(name, model)


def loop(x):
    more = lambda a, n: mb.less(x=n, y=4)
    body = lambda a, n: (mb.mul(x=a, y=1.5), mb.add(x=n, y=1))
    a, n = mb.while_loop(_cond=more, _body=body, loop_vars=(x, np.int32(0)))
    return mb.add(x=a, y=1.0), mb.identity(x=n)


program("while_loop", [(2, 3)], loop)
program("pools", [(1, 3, 9, 10)], lambda x: (
    mb.max_pool(x=x, kernel_sizes=[3, 2], strides=[2, 2], pad_type="custom", pad=[1, 1, 0, 1]),
    mb.avg_pool(x=x, kernel_sizes=[3, 3], strides=[2, 2], pad_type="same", exclude_padding_from_average=True),
    mb.avg_pool(x=x, kernel_sizes=[3, 3], strides=[2, 2], pad_type="custom", pad=[1, 1, 1, 1], ceil_mode=True),
    mb.l2_pool(x=x, kernel_sizes=[2, 2], strides=[1, 1], pad_type="valid")))
program("convs", [(2, 4, 11, 9), (1, 4, 12), (1, 2, 5, 6, 7)], lambda x, y, z: (
    mb.conv(x=x, weight=normal(6, 2, 3, 3), bias=normal(6), strides=[2, 1], pad_type="same", dilations=[1, 2], groups=2),
    mb.conv(x=x, weight=normal(8, 4, 1, 1)),
    mb.conv(x=x, weight=normal(4, 1, 5, 1), groups=4, pad_type="custom", pad=[2, 2, 0, 0]),
    mb.conv(x=x, weight=normal(8, 4, 2, 2), pad_type="same_lower", strides=[2, 2]),
    mb.conv(x=y, weight=normal(5, 4, 3), strides=[2], pad_type="custom", pad=[1, 2]),
    mb.conv(x=z, weight=normal(3, 2, 2, 3, 2), strides=[1, 2, 1]),
    mb.conv_transpose(x=x, weight=normal(4, 3, 3, 3), strides=[2, 2], pad_type="custom", pad=[1, 1, 0, 1], bias=normal(3))))
program("binary", [(2, 1, 4), (3, 1), ((3, 4), types.int32)], lambda x, y, n: (
    mb.pow(x=mb.abs(x=x), y=y), mb.mod(x=x, y=y), mb.floor_div(x=x, y=y), mb.maximum(x=x, y=y),
    mb.cast(x=mb.logical_xor(x=mb.greater(x=x, y=y), y=mb.less_equal(x=x, y=0.0)), dtype="fp32"),
    mb.mod(x=n, y=3), mb.floor_div(x=n, y=-2), mb.select(cond=mb.greater(x=x, y=y), a=x, b=y)))
program("reductions", [(2, 3, 4, 5)], lambda x: (
    mb.reduce_l1_norm(x=x, axes=[1, 3]), mb.reduce_l2_norm(x=x, axes=[-1], keep_dims=True),
    mb.reduce_log_sum_exp(x=x, axes=[0, 2]), mb.reduce_prod(x=x, axes=[1]), mb.reduce_min(x=x, axes=[2]),
    mb.reduce_sum_square(x=x, axes=[0, 1, 2, 3], keep_dims=True), mb.reduce_argmin(x=x, axis=1),
    mb.reduce_argmax(x=x, axis=-2, keep_dims=True)))
program("scatters", [(5, 4), (2, 4)], lambda d, u: (
    mb.scatter(data=d, indices=np.array([1, 3]), updates=u, axis=0, mode="add"),
    mb.scatter_nd(data=d, indices=np.array([[0, 1], [4, 3]]), updates=np.array([5.0, 6.0], np.float32), mode="max"),
    mb.scatter_along_axis(data=d, indices=np.array([[0, 1, 2, 3], [4, 3, 2, 1]]), updates=u, axis=0, mode="mul")))
program("gathers", [(4, 5, 6)], lambda x: (
    mb.gather(x=x, indices=np.array([[0, 2], [3, 1]]), axis=0), mb.gather_nd(x=x, indices=np.array([[0, 1], [3, 4]])),
    mb.gather(x=x, indices=np.array([[1, 2], [0, 0], [3, 3], [1, 0]]), axis=2, batch_dims=1),
    mb.gather_nd(x=x, indices=np.array([[[1], [2]], [[0], [0]], [[3], [3]], [[1], [0]]]), batch_dims=1)))
program("attention", [(1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 6), (5, 7)], lambda q, k, v, m: (
    mb.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=m),
    mb.scaled_dot_product_attention(query=q, key=k, value=v)), T.iOS18)
program("quantization", [(2, 4, 3)], lambda x: (
    mb.dequantize(input=mb.quantize(input=x, scale=np.float32(0.05), zero_point=np.int8(3), output_dtype="int8"),
                  scale=np.float32(0.05), zero_point=np.int8(3))))
pal, lin = cto.OpPalettizerConfig, cto.OpLinearQuantizerConfig
prune = (cto.prune_weights, cto.OpMagnitudePrunerConfig(target_sparsity=0.6, weight_threshold=100))
joint_pal = functools.partial(cto.palettize_weights, joint_compression=True)
joint_lin = functools.partial(cto.linear_quantize_weights, joint_compression=True)
grouped = dict(granularity="per_grouped_channel", group_size=8, weight_threshold=100)
compressed("lut3_grouped", [(cto.palettize_weights, pal(mode="uniform", nbits=3, **grouped))], T.iOS18)
compressed("lut4_axis1", [(cto.palettize_weights, pal(mode="uniform", nbits=4, channel_axis=1, **grouped))], T.iOS18)
compressed("lut4_int8_table", [(cto.palettize_weights, pal(mode="uniform", nbits=4, weight_threshold=100)),
                               (joint_lin, lin(mode="linear_symmetric", dtype="int8", granularity="per_tensor", weight_threshold=1))], T.iOS18)
compressed("uint4_block", [(cto.linear_quantize_weights, lin(mode="linear", dtype="uint4", granularity="per_block", block_size=16, weight_threshold=100))], T.iOS18)
compressed("sparse_lut", [prune, (joint_pal, pal(mode="uniform", nbits=4, weight_threshold=100))], T.iOS18)
compressed("sparse_int8", [prune, (joint_lin, lin(mode="linear_symmetric", dtype="int8", weight_threshold=100))], T.iOS18)
compressed("sparse_ios16", [prune], T.iOS16)


def loop_block(x, n):
    """A block of a transformer in a loop, with a branch inside, and operations before and behind it."""
    qkv, out, up, down = normal(48, 16) / 4, normal(16, 16) / 4, normal(32, 16) / 4, normal(16, 32) / 4

    def block(a, i):
        h = mb.layer_norm(x=a, axes=[-1], gamma=np.ones(16, np.float32), beta=np.zeros(16, np.float32), epsilon=1e-5)
        q, k, v = mb.split(x=mb.linear(x=h, weight=qkv), num_splits=3, axis=-1)
        w = mb.softmax(x=mb.mul(x=mb.matmul(x=q, y=k, transpose_y=True), y=0.25), axis=-1)
        a = mb.add(x=a, y=mb.linear(x=mb.matmul(x=w, y=v), weight=out))
        gated = lambda: mb.linear(x=mb.silu(x=mb.linear(x=a, weight=up)), weight=down)
        plain = lambda: mb.mul(x=mb.tanh(x=a), y=0.5)
        even = mb.equal(x=mb.mod(x=i, y=2), y=0)
        return mb.add(x=a, y=mb.cond(pred=even, _true_fn=gated, _false_fn=plain)), mb.add(x=i, y=1)

    x = mb.mul(x=mb.add(x=x, y=0.5), y=0.7)
    a, i = mb.while_loop(_cond=lambda a, i: mb.less(x=i, y=5), _body=block, loop_vars=(x, mb.squeeze(x=n, axes=[0])))
    return mb.relu(x=mb.linear(x=a, weight=out)), mb.expand_dims(x=i, axes=[0])


def found(x):
    """A shape that depends on what is in a value, between products."""
    w = normal(6, 6)
    h = mb.linear(x=mb.relu(x=x), weight=w)
    at = mb.non_zero(x=mb.cast(x=mb.greater(x=mb.reduce_sum(x=h, axes=[1]), y=0.0), dtype="fp32"))
    rows = mb.gather_nd(x=h, indices=at)
    return mb.reduce_sum(x=mb.sigmoid(x=mb.linear(x=rows, weight=w)), axes=[0]), mb.tanh(x=h)


program("loop_block", [(1, 3, 16), ((1,), types.int32)], loop_block)
program("found_rows", [(5, 6)], found)
program("transposed_convs", [(2, 16, 6, 5), (1, 8, 9), (1, 8, 2, 3, 4)], lambda x, y, z: (
    mb.conv_transpose(x=x, weight=normal(16, 6, 2, 2), strides=[2, 2]),
    mb.conv_transpose(x=x, weight=normal(16, 3, 3, 3), groups=2, dilations=[2, 1], bias=normal(6)),
    mb.conv_transpose(x=x, weight=normal(16, 1, 4, 4), groups=16, strides=[2, 2], pad_type="custom", pad=[1, 1, 1, 1]),
    mb.conv_transpose(x=y, weight=normal(8, 5, 5), strides=[3], pad_type="custom", pad=[2, 1]),
    mb.conv_transpose(x=z, weight=normal(8, 4, 2, 3, 2), strides=[1, 2, 2])))
def recurrent(x, h, c, h2, c2):
    """Every direction, state, activation and output of the recurrent ops: 3 inputs and 4 hidden values."""
    w = lambda gates: dict(weight_ih=normal(4 * gates, 3) / 2, weight_hh=normal(4 * gates, 4) / 2, bias=normal(4 * gates) / 4)
    back = {f"{k}_back": v for k, v in w(4).items()}
    return (*mb.lstm(x=x, initial_h=h, initial_c=c, **w(4), output_sequence=True),
            *mb.lstm(x=x, initial_h=h2, initial_c=c2, **w(4), **back, direction="bidirectional", output_sequence=True),
            *mb.lstm(x=x, initial_h=h2, initial_c=c2, **w(4), **back, direction="bidirectional"),
            mb.lstm(x=x, initial_h=h, initial_c=c, **w(4), peephole=normal(12) / 2, clip=np.float32(0.4), direction="reverse",
                    recurrent_activation="hard_sigmoid", cell_activation="relu", activation="linear")[0],
            *mb.gru(x=x, initial_h=h, **w(3), output_sequence=True),
            mb.gru(x=x, initial_h=h, **w(3), direction="reverse", recurrent_activation="tanh", activation="sigmoid")[0],
            mb.gru(x=x, initial_h=h, **w(3), reset_after=True, input_bias=normal(12) / 4, output_sequence=True)[0],
            *mb.rnn(x=x, initial_h=h, **w(1), output_sequence=True),
            mb.rnn(x=x, initial_h=h, **w(1), direction="reverse", activation="scaled_tanh")[0])


def images(x, at, sizes):
    """Resizing in every mode, boxes and sampled places."""
    modes = ["DEFAULT", "STRICT_ALIGN_CORNERS", "ALIGN_CORNERS", "OFFSET_CORNERS", "UNALIGN_CORNERS"]
    sampled = lambda **k: mb.resample(x=x, coordinates=at, padding_value=np.float32(0.5), **k)
    boxes = np.array([[0.1, 0.2, 3.7, 3.1], [3.0, 2.5, 1.0, 0.5], [-1.0, 1.0, 2.0, 6.5]], np.float32)
    cut = dict(x=x, boxes=boxes, box_indices=np.array([0, 1, 1]), target_height=3, target_width=4, pad_value=np.float32(-2))
    turn = np.array([[0.8, -0.5, 0.1, 0.4, 0.9, -0.2], [1, 0, 0, 0, 1, 0]], np.float32)
    padded = [("bilinear", "constant", "normalized_minus_one_to_one", True), ("bilinear", "border", "normalized_minus_one_to_one", False),
              ("bilinear", "reflection", "normalized_zero_to_one", True), ("nearest", "symmetric", "unnormalized", False)]
    return (*(mb.resize_bilinear(x=x, target_size_height=3, target_size_width=9, sampling_mode=m) for m in modes),
            mb.resize_nearest_neighbor(x=x, target_size_height=3, target_size_width=9),
            mb.upsample_bilinear(x=x, scale_factor_height=2, scale_factor_width=3, align_corners=False),
            mb.resize(x=x, shape=[7, 0, 2], resized_dims=np.uint32(3)),
            mb.resize(x=x, shape=sizes, resized_dims=np.uint32(2), interpolation_mode="NEAREST_NEIGHBOR"),
            *(sampled(sampling_mode=s, padding_mode=p, coordinates_mode=c, align_corners=a) for s, p, c, a in padded),
            mb.affine(x=x, transform_matrix=turn, output_height=3, output_width=5, sampling_mode="bilinear", padding_mode="constant",
                      padding_value=np.float32(0), coordinates_mode="normalized_minus_one_to_one", align_corners=True),
            *(mb.crop_resize(**cut, sampling_mode=m) for m in modes[:4]),
            mb.crop_resize(**{**cut, "boxes": boxes / 4}, normalized_coordinates=True, box_coordinate_mode="CENTER_SIZE_WIDTH_FIRST"))


def boxes_ios15(x, scores, boxes):
    roi = np.array([[[[[1]], [[0.2]], [[0.1]], [[0.7]], [[0.9]]]], [[[[0]], [[0.5]], [[0]], [[1.2]], [[0.5]]]]], np.float32)
    cut = dict(target_height=2, target_width=3, normalized_coordinates=True)
    best = dict(boxes=mb.abs(x=boxes), scores=scores, iou_threshold=np.float32(0.2), score_threshold=np.float32(-0.5), max_boxes=6)
    return (mb.crop_resize(x=mb.slice_by_size(x=x, begin=[1, 0, 0, 0], size=[1, 2, 5, 4]), roi=roi[1:], **cut),
            mb.crop_resize(x=x, roi=roi[:, :, 1:], sampling_mode="ALIGN_CORNERS", **cut),
            *mb.non_maximum_suppression(**best), *mb.non_maximum_suppression(**best, per_class_suppression=True)[:3])


def lists(x, n):
    """A list that a loop fills, with the shape of its elements left open."""
    row = lambda i: mb.reshape(x=mb.slice_by_index(x=x, begin=mb.concat(values=[i, 0], axis=0), end=[0, 4], end_mask=[False, True],
                                                   squeeze_mask=[True, False]), shape=[4])
    body = lambda i, ls: (mb.add(x=i, y=1), mb.list_write(ls=ls, index=i, value=mb.mul(x=row(i), y=2.0)))
    made = mb.make_list(init_length=1, dynamic_length=True, elem_shape=(4,), dtype="fp32")
    i, ls = mb.while_loop(_cond=lambda i, ls: mb.less(x=i, y=3), _body=body, loop_vars=(mb.squeeze(x=n, axes=[0]), made))
    ls = mb.list_scatter(ls=ls, indices=np.array([4, 0]), value=x if x.shape[0] == 2 else mb.slice_by_size(x=x, begin=[0, 0], size=[2, 4]))
    return mb.list_gather(ls=ls, indices=[0, 1, 2, 4]), mb.list_read(ls=ls, index=2), mb.expand_dims(x=mb.list_length(ls=ls), axes=[0])


def wholes(x, y, w):
    """Products of integers, zeros in shapes, axes apart."""
    return (mb.matmul(x=x, y=y, transpose_y=True), mb.linear(x=x, weight=np.arange(12, dtype=np.int32).reshape(3, 4), bias=np.array([1, 2, 3], np.int32)),
            mb.reshape(x=w, shape=[1, 0, -1, 0]), mb.layer_norm(x=w, axes=[0, 2], gamma=normal(2, 5), beta=normal(2, 5)),
            mb.reshape_like(x=w, ref_tensors=(x, w), begins=(0, 1), ends=(1, 3), end_masks=(False, False)))


program("recurrent", [(5, 2, 3), (2, 4), (2, 4), (2, 8), (2, 8)], recurrent, T.iOS18)
program("images", [(2, 3, 5, 6), (2, 4, 3, 2), ((2,), types.int32)], images)
program("boxes_ios15", [(2, 2, 5, 4), (2, 9, 3), (2, 9, 4)], boxes_ios15, T.iOS16)
program("boxes_ios17", [(2, 3, 9), (2, 4, 9)], lambda s, b: (
    *mb.non_maximum_suppression(boxes=mb.abs(x=b), scores=s, iou_threshold=np.float32(0.3), max_boxes=5),
    *mb.non_maximum_suppression(boxes=mb.abs(x=b), scores=s, iou_threshold=np.float32(0.1), max_boxes=12, per_class_suppression=True)))
program("lists", [(3, 4), ((1,), types.int32)], lists)
program("wholes", [((2, 4), types.int32), ((3, 4), types.int32), (2, 3, 5)], wholes)


def twice(x):
    y = mb.add(x=x, y=1.0)
    return y, y, mb.reduce_sum(x=y)


program("twice", [(2, 3)], twice)
