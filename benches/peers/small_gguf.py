#!/usr/bin/env python3
"""Writes a checkpoint of the Gemma 4 family with experts, as small as models/small-gemma4, as a GGUF file in F16 or Q8_0.

    small_gguf.py CHECKPOINT OUT.gguf [--type f16|q8_0]

So llama.cpp runs the same model on the same prompts. Needs numpy and gguf (pip install gguf).
"""
import argparse, json, pathlib, struct

import numpy as np
import gguf
from gguf import GGMLQuantizationType as T

import make_gguf

LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "router.proj": "ffn_gate_inp",
}
BARE = {
    "layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def tensors(path):
    """(name, f32 array) of a safetensors file of bf16."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + size])
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16", f"{name}: {entry['dtype']}"
            start, end = entry["data_offsets"]
            bits = np.frombuffer(raw[8 + size + start:8 + size + end], "<u2").astype(np.uint32) << 16
            yield name, bits.view(np.float32).reshape(entry["shape"])


def renamed(name):
    name = name.removeprefix("model.language_model.").removeprefix("model.")
    if name == "embed_tokens.weight":
        return "token_embd.weight"
    if name == "norm.weight":
        return "output_norm.weight"
    _, layer, rest = name.split(".", 2)
    bare = rest.removesuffix(".weight")
    return f"blk.{layer}." + (BARE[rest] if rest in BARE else f"{LAYER[bare]}.weight")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint", type=pathlib.Path)
    p.add_argument("out")
    p.add_argument("--type", choices=["f16", "q8_0"], default="f16")
    a = p.parse_args()
    c = json.loads((a.checkpoint / "config.json").read_text())
    c = c.get("text_config", c)
    assert c["layer_types"][-1] == "full_attention"
    shape = dict(
        arch="gemma4", layers=c["num_hidden_layers"], hidden=c["hidden_size"], vocab=c["vocab_size"], experts=c["num_experts"],
        used=c["top_k_experts"], ff_expert=c["moe_intermediate_size"], ff=c["intermediate_size"], heads=c["num_attention_heads"],
        period=c["layer_types"].index("full_attention") + 1, swa=dict(kv=c["num_key_value_heads"], dim=c["head_dim"]),
        full=dict(kv=c["num_global_key_value_heads"], dim=c["global_head_dim"]), window=c["sliding_window"])
    w = gguf.GGUFWriter(a.out, "gemma4")
    w.add_name(a.checkpoint.name)
    make_gguf.metadata(w, shape)
    t = json.loads((a.checkpoint / "tokenizer.json").read_text())
    vocabulary = sorted(t["model"]["vocab"], key=t["model"]["vocab"].get)
    special = {x["content"]: gguf.TokenType.CONTROL for x in t["added_tokens"] if x["special"]} | {"<unk>": gguf.TokenType.UNKNOWN}
    byte = lambda text: len(text) == 6 and text.startswith("<0x")
    kind = lambda text: special.get(text, gguf.TokenType.BYTE if byte(text) else gguf.TokenType.NORMAL)
    w.add_tokenizer_model("gemma4")
    w.add_token_list(vocabulary)
    w.add_token_scores([-float(i) for i in range(len(vocabulary))])
    w.add_token_types([int(kind(text)) for text in vocabulary])
    w.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in t["model"]["merges"]])
    w.add_add_space_prefix(False)
    w.add_add_bos_token(True)
    w.add_pad_token_id(0)
    w.add_eos_token_id(c["eos_token_id"])
    w.add_bos_token_id(c["bos_token_id"])
    w.add_unk_token_id(3)
    half = c["global_head_dim"] // 2
    turned = int(c["rope_parameters"]["full_attention"]["partial_rotary_factor"] * half)
    w.add_tensor("rope_freqs.weight", np.where(np.arange(half) < turned, 1.0, 1e30).astype(np.float32))
    for name, values in tensors(a.checkpoint / "model.safetensors"):
        name = renamed(name)
        matrix = values.ndim >= 2 and "ffn_gate_inp" not in name
        if matrix and a.type == "q8_0":
            w.add_tensor(name, gguf.quants.quantize(values, T.Q8_0), raw_dtype=T.Q8_0)
        else:
            w.add_tensor(name, values.astype(np.float16) if matrix else values)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    main()
