#!/usr/bin/env python3
"""Writes blocks.gguf, which has a tensor of every type that is read and that `gguf.quants.dequantize` knows, and expected.gguf,
the same tensors as f32 by that function. The bytes are random but for the scales, which are finite: zero, subnormal, negative
and ordinary.

Needs numpy and gguf 0.19: `python make_blocks.py [FOLDER [ROWS]]`
"""
import os
import sys
import numpy as np
import gguf
from gguf import GGMLQuantizationType as T

FOLDER = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
ROWS, COLUMNS = int(sys.argv[2]) if len(sys.argv) > 2 else 4, 512
# Byte offsets of the f16 numbers of a block.
SCALES = {T.F16: None, T.BF16: None, T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0],
          T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208], T.IQ1_S: [0], T.IQ1_M: [],
          T.IQ2_XXS: [0], T.IQ2_XS: [0], T.IQ2_S: [0], T.IQ3_XXS: [0], T.IQ3_S: [0], T.IQ4_NL: [0], T.IQ4_XS: [0],
          T.TQ1_0: [52], T.TQ2_0: [64], T.MXFP4: [], T.NVFP4: []}
SPECIAL = np.array([0.0, -0.0, 6e-8, -3e-6, 6.1e-5, 1.0, -2.5, 65504.0, -65504.0], np.float16)


def scales(rng, n):
    out = rng.normal(0, 0.02, n).astype(np.float16)
    k = min(len(SPECIAL), n // 2)
    out[:k] = rng.permutation(SPECIAL)[:k]
    return out


def blocks(rng, kind):
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    n = ROWS * COLUMNS // per_block
    out = rng.integers(0, 256, (n, size), np.uint8)
    for at in SCALES[kind]:
        out[:, at:at + 2] = scales(rng, n).view(np.uint8).reshape(n, 2)
    if kind == T.IQ1_M:  # The f16 lies in the upper nibbles of four u16.
        bits = scales(rng, n).view(np.uint16)
        for i in range(4):
            out[:, 49 + 2 * i] = out[:, 49 + 2 * i] & 15 | (bits >> 4 * i & 15).astype(np.uint8) << 4
    if kind == T.MXFP4:
        out[:, 0] = rng.integers(100, 140, n)
        out[:6, 0] = [0, 1, 2, 3, 127, 250]
    if kind == T.NVFP4:
        out[0, :4] = [0, 1, 127, 255]
        out[1, :4] = [7, 8, 126, 128]
    return out.reshape(ROWS, COLUMNS // per_block * size)


def main():
    rng = np.random.default_rng(7)
    tensors = {"f32": (rng.normal(0, 1, (ROWS, COLUMNS)).astype(np.float32), T.F32)}
    tensors["f16"] = (tensors["f32"][0].astype(np.float16), T.F16)
    tensors["f16"][0][0, :len(SPECIAL)] = SPECIAL
    tensors["bf16"] = (gguf.quants.quantize(tensors["f32"][0], T.BF16), T.BF16)
    for kind, at in SCALES.items():
        if at is not None:
            tensors[kind.name.lower()] = (blocks(rng, kind), kind)
    for name in ["blocks", "expected"]:
        w = gguf.GGUFWriter(os.path.join(FOLDER, f"{name}.gguf"), "none")
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
