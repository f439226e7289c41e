#!/usr/bin/env python3
"""Writes a synthetic GGUF of a real model's shape: random Q4_0 blocks, for timing only.

    make_gguf.py gemma4-26b-a4b OUT.gguf [--layers N] [--head q6_k|q4_0] [--seed 1]
    make_gguf.py zaya1-8b OUT.gguf
    make_gguf.py --describe FILE.gguf

gemma4-26b-a4b is the arch `gemma4` with 30 layers, 128 experts of which 8 are used. The types are those that llama-quantize
gives for Q4_0: matrices Q4_0, the tied embedding and head Q6_K, router and norms F32. --head q4_0 makes the head Q4_0 too.
zaya1-8b is a proxy: llama.cpp has no such arch, so it is an arch `qwen3moe` with the same number of layers, heads, experts
and weights, and without ZAYA's convolutions, router network and residual scales.
Scales are random and such that each matrix keeps the size of its input, so that all values stay finite.
Beside OUT.gguf lies OUT.json with the bytes that one decoded token reads; --describe prints them of any file.
Needs numpy and gguf (pip install gguf).
"""
import argparse, json, os, sys

import numpy as np
import gguf
from gguf import GGMLQuantizationType as T

# A block of Q4_0 is d and 32 nibbles q, and stands for d * (q - 8): with uniform nibbles its deviation is 4.61 d.
# A block of Q6_K is 256 values d * s * (q - 32) with sixteen signed scales s; q has a deviation of 18.5.
Q4_0_SIGMA, Q6_K_SIGMA = 4.61, 18.5
SHAPES = {
    "gemma4-26b-a4b": dict(arch="gemma4", layers=30, hidden=2816, vocab=262144, experts=128, used=8, ff_expert=704, ff=2112,
                           heads=16, period=6, swa=dict(kv=8, dim=256), full=dict(kv=2, dim=512), window=1024),
    "zaya1-8b": dict(arch="qwen3moe", layers=40, hidden=2048, vocab=262272, experts=16, used=1, ff_expert=2048,
                     heads=8, kv=2, dim=128),
}


def tensors(s):
    """(name, shape with the rows' length last, type, deviation of the weights or a constant) in the order of the file."""
    h, e, fe = s["hidden"], s["experts"], s["ff_expert"]
    matrix = lambda name, *shape: (name, shape, T.Q4_0, shape[-1] ** -0.5)
    ones = lambda name, n: (name, (n,), T.F32, "ones")
    # Large enough that the scales of Q6_K are not subnormal in fp16.
    yield "token_embd.weight", (s["vocab"], h), s["head"], 0.06
    if s["arch"] == "gemma4":
        # 64 of 256 frequencies turn; the others are divided away.
        yield "rope_freqs.weight", (s["full"]["dim"] // 2,), T.F32, "rope"
    for i in range(s["layers"]):
        b = f"blk.{i}."
        gemma = s["arch"] == "gemma4"
        full = gemma and i % s["period"] == s["period"] - 1
        a = (s["full"] if full else s["swa"]) if gemma else s
        yield ones(b + "attn_norm.weight", h)
        yield matrix(b + "attn_q.weight", s["heads"] * a["dim"], h)
        yield matrix(b + "attn_k.weight", a["kv"] * a["dim"], h)
        if not full:
            yield matrix(b + "attn_v.weight", a["kv"] * a["dim"], h)
        yield ones(b + "attn_q_norm.weight", a["dim"])
        yield ones(b + "attn_k_norm.weight", a["dim"])
        yield matrix(b + "attn_output.weight", h, s["heads"] * a["dim"])
        yield ones(b + "ffn_norm.weight", h)
        # Logits of about one: all experts are chosen now and then.
        router = h ** -0.5 if not gemma else 1.0
        yield b + "ffn_gate_inp.weight", (e, h), T.F32, router
        if gemma:
            for name in ("post_attention_norm", "post_ffw_norm", "post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"):
                yield ones(f"{b}{name}.weight", h)
            yield ones(b + "layer_output_scale.weight", 1)
            yield ones(b + "ffn_gate_inp.scale", h)
            yield matrix(b + "ffn_gate.weight", s["ff"], h)
            yield matrix(b + "ffn_up.weight", s["ff"], h)
            yield matrix(b + "ffn_down.weight", h, s["ff"])
            yield matrix(b + "ffn_gate_up_exps.weight", e, 2 * fe, h)
            yield ones(b + "ffn_down_exps.scale", e)
        else:
            yield matrix(b + "ffn_gate_exps.weight", e, fe, h)
            yield matrix(b + "ffn_up_exps.weight", e, fe, h)
        yield matrix(b + "ffn_down_exps.weight", e, h, fe)
    yield ones("output_norm.weight", h)


def stored_bytes(shape, kind):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    assert shape[-1] % block == 0, f"rows of {shape[-1]} do not divide into blocks of {block} of {kind.name}"
    return int(np.prod(shape, dtype=np.int64)) // block * size


def data(shape, kind, size, rng):
    """The tensor's bytes as gguf wants them: f32, or uint8 with the rows' bytes last."""
    if kind == T.F32:
        if size == "ones":
            return np.ones(shape, np.float32)
        if size == "rope":
            return np.where(np.arange(shape[0]) < shape[0] // 4, 1.0, 1e30).astype(np.float32)
        return (rng.standard_normal(shape, dtype=np.float32) * size).astype(np.float32)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    n = stored_bytes(shape, kind) // block_bytes
    raw = np.frombuffer(bytearray(rng.bytes(n * block_bytes)), np.uint8).reshape(n, block_bytes)
    jitter = rng.random(n, dtype=np.float32) + np.float32(0.5)
    if kind == T.Q4_0:
        raw[:, :2] = (jitter * np.float32(size / Q4_0_SIGMA)).astype("<f2").view(np.uint8).reshape(n, 2)
    else:
        assert kind == T.Q6_K, kind
        # Sixteen scales of 16 to 63, signs at random.
        scales = (raw[:, 192:208] % 48).astype(np.int8) + 16
        raw[:, 192:208] = np.where(raw[:, 192:208] & 64, -scales, scales).view(np.uint8)
        raw[:, 208:] = (jitter * np.float32(size / (Q6_K_SIGMA * 41.8))).astype("<f2").view(np.uint8).reshape(n, 2)
    return raw.reshape(*shape[:-1], shape[-1] // block * block_bytes)


def per_token(rows, experts, used):
    """Bytes that decoding one token reads of the weights, from (name, bytes, weights) of all tensors. A tied embedding is
    read whole, as the head; one beside a head of its own gives one row. Experts count as far as they are used."""
    tied = all(name != "output.weight" for name, _, _ in rows)
    total = read = weights = active = 0
    for name, size, n in rows:
        share = 1.0
        if "_exps." in name and experts:
            share = used / experts
        if name == "token_embd.weight" and not tied:
            share = 0.0
        total, weights = total + size, weights + n
        read, active = read + size * share, active + n * share
    return dict(schema=1, bytes=total, weights=weights, bytes_per_token=round(read), active_weights=round(active))


def vocabulary(w, s):
    """Tokens that mean nothing, as many as the model has, and one merge."""
    fixed = ["<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "ab"]
    types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.UNKNOWN] + [gguf.TokenType.NORMAL] * 3
    if s["arch"] == "gemma4":
        fixed += [f"<0x{i:02X}>" for i in range(256)]
        types += [gguf.TokenType.BYTE] * 256
        w.add_tokenizer_model("gemma4")
        w.add_add_space_prefix(False)
    else:
        fixed += ["\u010a"]  # the newline of byte-level BPE
        types += [gguf.TokenType.NORMAL]
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("qwen2")
    n = s["vocab"] - len(fixed)
    w.add_token_list(fixed + [f"t{i}" for i in range(n)])
    w.add_token_scores([0.0] * s["vocab"])
    w.add_token_types([int(t) for t in types] + [int(gguf.TokenType.NORMAL)] * n)
    w.add_token_merges(["a b"])
    w.add_pad_token_id(0)
    w.add_eos_token_id(1)
    w.add_bos_token_id(2)
    w.add_unk_token_id(3)
    w.add_add_bos_token(True)


def metadata(w, s):
    w.add_context_length(131072)
    w.add_embedding_length(s["hidden"])
    w.add_block_count(s["layers"])
    w.add_head_count(s["heads"])
    w.add_layer_norm_rms_eps(1e-6)
    w.add_expert_count(s["experts"])
    w.add_expert_used_count(s["used"])
    w.add_expert_feed_forward_length(s["ff_expert"])
    w.add_vocab_size(s["vocab"])
    if s["arch"] == "gemma4":
        swa = [i % s["period"] != s["period"] - 1 for i in range(s["layers"])]
        w.add_feed_forward_length(s["ff"])
        w.add_head_count_kv([s["swa"]["kv"] if x else s["full"]["kv"] for x in swa])
        w.add_shared_kv_layers(0)
        w.add_embedding_length_per_layer_input(0)
        w.add_sliding_window(s["window"])
        w.add_sliding_window_pattern(swa)
        w.add_key_length(s["full"]["dim"])
        w.add_value_length(s["full"]["dim"])
        w.add_key_length_swa(s["swa"]["dim"])
        w.add_value_length_swa(s["swa"]["dim"])
        w.add_rope_dimension_count(s["full"]["dim"])
        w.add_rope_dimension_count_swa(s["swa"]["dim"])
        w.add_rope_freq_base(1e6)
        w.add_rope_freq_base_swa(1e4)
        w.add_final_logit_softcapping(30.0)
    else:
        w.add_feed_forward_length(s["ff_expert"])
        w.add_head_count_kv(s["kv"])
        w.add_key_length(s["dim"])
        w.add_value_length(s["dim"])
        w.add_rope_freq_base(5e6)
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)


def write(path, s, seed):
    w = gguf.GGUFWriter(path + ".part", s["arch"])
    w.add_name(f"synthetic {s['name']}, {s['layers']} layers")
    metadata(w, s)
    vocabulary(w, s)
    table = list(tensors(s))
    for name, shape, kind, _ in table:
        size = stored_bytes(shape, kind)
        if kind == T.F32:
            w.add_tensor_info(name, list(shape), np.dtype(np.float32), size)
        else:
            w.add_tensor_info(name, list(gguf.quant_shape_to_byte_shape(shape, kind)), np.dtype(np.uint8), size, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for i, (name, shape, kind, size) in enumerate(table):
        # Of its own for each tensor: a file with fewer layers begins like the whole one.
        w.write_tensor_data(data(shape, kind, size, np.random.Generator(np.random.SFC64([seed, i]))))
        if name.endswith("ffn_down_exps.weight"):
            print(f"\r{name.split('.')[1]}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    w.close()
    os.replace(path + ".part", path)
    rows = [(name, stored_bytes(shape, kind), int(np.prod(shape, dtype=np.int64))) for name, shape, kind, _ in table]
    return per_token(rows, s["experts"], s["used"])


def describe(path):
    r = gguf.GGUFReader(path)
    arch = r.get_field("general.architecture").contents()
    number = lambda key: (f.contents() if (f := r.get_field(f"{arch}.{key}")) else 0)
    rows = [(t.name, int(t.n_bytes), int(t.n_elements)) for t in r.tensors]
    return per_token(rows, number("expert_count"), number("expert_used_count"))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("shape", nargs="?", choices=sorted(SHAPES))
    p.add_argument("out", nargs="?")
    p.add_argument("--layers", type=int)
    p.add_argument("--head", choices=["q6_k", "q4_0"], default="q6_k")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--describe", metavar="FILE")
    a = p.parse_args()
    if a.describe:
        print(json.dumps(describe(a.describe)))
        return
    if not a.out:
        p.error("a shape and a file are needed")
    s = dict(SHAPES[a.shape], name=a.shape, head=T[a.head.upper()])
    if a.layers:
        s["layers"] = a.layers
    facts = dict(write(a.out, s, a.seed), shape=a.shape, layers=s["layers"], head=a.head)
    with open(os.path.splitext(a.out)[0] + ".json", "w") as f:
        json.dump(facts, f)
        f.write("\n")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
