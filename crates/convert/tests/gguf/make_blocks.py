#!/usr/bin/env python3
"""Writes blocks.gguf, which has a tensor of every type that is read, and expected.gguf, the same tensors as f32 by
`gguf.quants.dequantize`. The bytes are random but for the scales, which are finite: zero, subnormal, negative and ordinary.

Needs numpy and gguf 0.19: `python make_blocks.py`
"""
import os
import numpy as np
import gguf
from gguf import GGMLQuantizationType as T

ROWS, COLUMNS = 5, 512
# Byte offsets of the f16 numbers of a block.
SCALES = {T.F16: None, T.BF16: None, T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0],
          T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208], T.IQ4_NL: [0], T.MXFP4: []}
SPECIAL = np.array([0.0, -0.0, 6e-8, -3e-6, 6.1e-5, 1.0, -2.5, 65504.0, -65504.0], np.float16)


def blocks(rng, kind):
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    n = ROWS * COLUMNS // per_block
    out = rng.integers(0, 256, (n, size), np.uint8)
    for at in SCALES[kind]:
        scale = rng.normal(0, 0.02, n).astype(np.float16)
        k = min(len(SPECIAL), n // 2)
        scale[:k] = rng.permutation(SPECIAL)[:k]
        out[:, at:at + 2] = scale.view(np.uint8).reshape(n, 2)
    if kind == T.MXFP4:
        out[:, 0] = rng.integers(100, 140, n)
        out[:6, 0] = [0, 1, 2, 3, 127, 250]
    return out.reshape(ROWS, COLUMNS // per_block * size)


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    rng = np.random.default_rng(7)
    tensors = {"f32": (rng.normal(0, 1, (ROWS, COLUMNS)).astype(np.float32), T.F32)}
    tensors["f16"] = (tensors["f32"][0].astype(np.float16), T.F16)
    tensors["f16"][0][0, :len(SPECIAL)] = SPECIAL
    tensors["bf16"] = (gguf.quants.quantize(tensors["f32"][0], T.BF16), T.BF16)
    for kind, scales in SCALES.items():
        if scales is not None:
            tensors[kind.name.lower()] = (blocks(rng, kind), kind)
    for name in ["blocks", "expected"]:
        w = gguf.GGUFWriter(os.path.join(here, f"{name}.gguf"), "none")
        for tensor, (data, kind) in tensors.items():
            if name == "blocks":
                raw = data if kind in (T.F32, T.F16) else data.view(np.uint8)
                w.add_tensor(tensor, raw, raw_dtype=kind)
            else:
                value = gguf.quants.dequantize(data, kind).astype(np.float32)
                assert value.shape == (ROWS, COLUMNS) and np.isfinite(value).all(), tensor
                w.add_tensor(tensor, value)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()


main()
