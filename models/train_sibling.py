#!/usr/bin/env python3
"""Train a small sibling (drafter) of a Llama-like model in GGUF by distillation, on a GPU.

  train_sibling.py MODEL.gguf --tokenizer tokenizer.json --text FILE [--text FILE..] --out F.gguf [--sample-seconds N] [--train-seconds N]

1. The model continues chats from their template on, so that it asks and answers, and passages of the texts: ROWS sequences of LENGTH
   tokens at a time.
2. The sibling learns the model's distribution after every token of these sequences: loss KL(model | sibling). One sequence of 64 is held out.
3. For the second half of the steps its weights are those of Q4_0, gradients go straight through: F.gguf holds exactly what was trained.

The sibling has the tokenizer of MODEL.gguf; tokenizer.json is the same one. Every line says how often the sibling's best token is the model's, on held-out sequences.
"""
import argparse, math, time
import gguf
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, FEED_FORWARD = 192, 4, 3, 1, 64, 768
LENGTH, PREFIX, ROWS, BATCH = 512, 32, 2048, 40
TEMPERATURES = (0.5, 0.8, 1.0)


def q4_0(w):
    """Returns the values of Q4_0 nearest to `w`, and its scales and codes: blocks of 32 inputs, d = the value of largest magnitude / -8."""
    blocks = w.float().reshape(-1, 32)
    d = (blocks.gather(1, blocks.abs().argmax(1, keepdim=True)) / -8).half()
    scale = d.float()
    codes = torch.where(scale == 0, 8.0, torch.floor(blocks / torch.where(scale == 0, 1.0, scale) + 8.5)).clamp(0, 15)
    return ((codes - 8) * scale).reshape(w.shape), d, codes.to(torch.uint8)


def packed(w):
    """Returns the bytes of `w` in Q4_0: d, then 16 bytes with inputs i and i + 16."""
    _, d, codes = q4_0(w)
    low, high = codes[:, :16], codes[:, 16:]
    return np.concatenate([d.cpu().numpy().view(np.uint8), (low | high << 4).cpu().numpy()], 1).reshape(w.shape[0], -1)


class Llama(nn.Module):
    """Llama with the layout of GGUF: rotary pairs are neighbours. Matrices are [outputs, inputs]; the embedding is the head."""

    def __init__(self, vocabulary, hidden, layers, heads, kv_heads, head, feed_forward, base, epsilon):
        super().__init__()
        self.heads, self.kv_heads, self.head, self.epsilon, self.layers = heads, kv_heads, head, epsilon, layers
        shapes = {"attn_q": (heads * head, hidden), "attn_k": (kv_heads * head, hidden), "attn_v": (kv_heads * head, hidden),
                  "attn_output": (hidden, heads * head), "ffn_gate": (feed_forward, hidden), "ffn_up": (feed_forward, hidden),
                  "ffn_down": (hidden, feed_forward)}
        self.weights = nn.ParameterDict({"token_embd": nn.Parameter(torch.randn(vocabulary, hidden) * hidden**-0.5)})
        self.norms = nn.ParameterDict({"output_norm": nn.Parameter(torch.ones(hidden))})
        for n in range(layers):
            for name, shape in shapes.items():
                self.weights[f"blk-{n}-{name}"] = nn.Parameter(torch.randn(shape) * shape[1] ** -0.5)
            for name in ("attn_norm", "ffn_norm"):
                self.norms[f"blk-{n}-{name}"] = nn.Parameter(torch.ones(hidden))
        self.register_buffer("frequencies", base ** (-torch.arange(0, head, 2) / head), persistent=False)

    def matrices(self, rounded):
        """Returns the matrices in bfloat16, as they are or as Q4_0 holds them."""
        if not rounded:
            return {name: w.bfloat16() for name, w in self.weights.items()}
        return {name: (w + (q4_0(w.detach())[0] - w).detach()).bfloat16() for name, w in self.weights.items()}

    def norm(self, x, name):
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.epsilon) * self.norms[name]).bfloat16()

    def rotate(self, x, first):
        angles = torch.arange(first, first + x.shape[1], device=x.device)[:, None] * self.frequencies  # [T, head / 2]
        cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).bfloat16()

    def forward(self, ids, w, cache=None, first=0):
        """Returns states after the last norm, [B, T, hidden]. With a cache, T = 1 or first = 0."""
        (rows, tokens), groups = ids.shape, self.heads // self.kv_heads
        x = F.embedding(ids, w["token_embd"])
        for n in range(self.layers):
            h = self.norm(x, f"blk-{n}-attn_norm")
            project = lambda name, heads: F.linear(h, w[f"blk-{n}-{name}"]).view(rows, tokens, heads, self.head)
            q, k, v = self.rotate(project("attn_q", self.heads), first), self.rotate(project("attn_k", self.kv_heads), first), project("attn_v", self.kv_heads)
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            if cache is not None:
                cache[n][0][:, :, first:first + tokens], cache[n][1][:, :, first:first + tokens] = k, v
            if tokens == 1:  # the heads of a group are the rows of one query
                keys, values = (c[:, :, :first + 1] for c in cache[n])
                y = F.scaled_dot_product_attention(q.view(rows, self.kv_heads, groups, self.head), keys, values)
            else:
                k, v = (y.repeat_interleave(groups, 1) for y in (k, v))
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = y.reshape(rows, self.heads, tokens, self.head).transpose(1, 2).reshape(rows, tokens, -1)
            x = x + F.linear(y, w[f"blk-{n}-attn_output"])
            h = self.norm(x, f"blk-{n}-ffn_norm")
            x = x + F.linear(F.silu(F.linear(h, w[f"blk-{n}-ffn_gate"])) * F.linear(h, w[f"blk-{n}-ffn_up"]), w[f"blk-{n}-ffn_down"])
        return self.norm(x, "output_norm")


class Divergence(torch.autograd.Function):
    """Mean KL(model | sibling) of states [N, hidden] under their heads, by chunks: the gradient of the logits is softmax - target."""

    @staticmethod
    def forward(ctx, states, head, target_states, target_head):
        total, agree, d_states, d_head = 0.0, 0, torch.empty_like(states), torch.zeros_like(head, dtype=torch.float32)
        for i in range(0, len(states), 4096):
            part = slice(i, i + 4096)
            target = F.log_softmax(F.linear(target_states[part], target_head).float(), -1)
            ours = F.log_softmax(F.linear(states[part], head).float(), -1)
            agree += (target.argmax(-1) == ours.argmax(-1)).sum()
            p = target.exp()
            total += (p * (target - ours)).sum()
            gradient = ((ours.exp() - p) / len(states)).bfloat16()
            d_states[part] = gradient @ head
            d_head += gradient.T @ states[part]
        ctx.save_for_backward(d_states, d_head.bfloat16())
        return total / len(states), agree / len(states)

    @staticmethod
    def backward(ctx, d_loss, _):
        d_states, d_head = ctx.saved_tensors
        return d_states * d_loss, d_head * d_loss, None, None


def load(path, device):
    """Returns the model of a GGUF file and its reader."""
    reader = gguf.GGUFReader(path)
    key = lambda name: reader.fields[f"llama.{name}"].parts[-1][0].item()
    tensors = {t.name: t for t in reader.tensors}
    heads, hidden = key("attention.head_count"), key("embedding_length")
    model = Llama(int(tensors["token_embd.weight"].shape[1]), hidden, key("block_count"), heads, key("attention.head_count_kv"), hidden // heads,
                  key("feed_forward_length"), key("rope.freq_base"), key("attention.layer_norm_rms_epsilon"))
    with torch.no_grad():
        for table in (model.weights, model.norms):
            for name, p in table.items():
                t = tensors[name.replace("-", ".") + ".weight"]
                p.copy_(torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)).view(p.shape))
    return model.to(device).requires_grad_(False), reader


@torch.no_grad()
def sample(model, w, prefixes, rows, length):
    """Returns `rows` sequences [rows, length] that begin with rows of `prefixes` [N, P]; those of -1 are shorter."""
    device = prefixes.device
    ids = torch.zeros(rows, length, dtype=torch.long, device=device)
    begin = prefixes[torch.randint(len(prefixes), (rows,), device=device)]
    cache = [[torch.zeros(rows, model.kv_heads, length, model.head, dtype=torch.bfloat16, device=device) for _ in "kv"] for _ in range(model.layers)]
    temperature = torch.tensor(TEMPERATURES, device=device)[torch.randint(len(TEMPERATURES), (rows, 1), device=device)]
    ids[:, 0] = begin[:, 0]
    for n in range(length - 1):
        state = model(ids[:, n:n + 1], w, cache, n)[:, 0]
        p = F.softmax(F.linear(state, w["token_embd"]).float() / temperature, -1)
        drawn = (p / torch.empty_like(p).exponential_()).argmax(-1)
        ids[:, n + 1] = torch.where(begin[:, n + 1] >= 0, begin[:, n + 1], drawn) if n + 1 < begin.shape[1] else drawn
    return ids


def write(path, reader, model):
    """Writes the sibling in Q4_0, with the tokenizer of the model's file."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    writer.add_name("sibling")
    writer.add_context_length(reader.fields["llama.context_length"].contents())
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(reader.fields["llama.rope.freq_base"].contents())
    writer.add_layer_norm_rms_eps(model.epsilon)
    writer.add_vocab_size(model.weights["token_embd"].shape[0])
    for name, p in model.norms.items():
        writer.add_tensor(name.replace("-", ".") + ".weight", p.detach().float().cpu().numpy())
    for name, p in model.weights.items():
        writer.add_tensor(name.replace("-", ".") + ".weight", packed(p.detach()), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", action="append", required=True, help="UTF-8 text")
    parser.add_argument("--chat", default="<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\n")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json of the model")
    parser.add_argument("--out", required=True)
    parser.add_argument("--sample-seconds", type=float, default=120)
    parser.add_argument("--train-seconds", type=float, default=400)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a run of seconds, to try the script")
    options = parser.parse_args()
    torch.manual_seed(1)
    device = options.device
    length, rows, batch = (48, 4, 2) if options.small else (LENGTH, ROWS, BATCH)

    model, reader = load(options.model, device)
    target = model.matrices(False)
    tokenizer = Tokenizer.from_file(options.tokenizer)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    chat, ids = encode(options.chat), []
    for path in options.text:
        ids += encode(open(path, encoding="utf-8").read())
    passages = torch.tensor(ids[:len(ids) // length * length], device=device).view(-1, length)
    prefixes = torch.full((2 * len(passages), max(PREFIX, len(chat))), -1, device=device)
    prefixes[:len(passages), :len(chat)] = torch.tensor(chat, device=device)
    prefixes[len(passages):, :PREFIX] = passages[:, :PREFIX]

    begun, sequences = time.time(), [passages]
    while time.time() - begun < options.sample_seconds:
        sequences.append(sample(model, target, prefixes, rows, length))
    sequences = torch.cat(sequences)
    sequences = sequences[torch.randperm(len(sequences), device=device)]
    held, sequences = sequences[:max(1, len(sequences) // 64)][:256], sequences[len(sequences) // 64 + 1:]
    print(f"{len(sequences)} sequences of {length} tokens after {time.time() - begun:.0f} s", flush=True)

    key = lambda name: reader.fields[f"llama.{name}"].contents()
    sibling = Llama(len(target["token_embd"]), HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, FEED_FORWARD, key("rope.freq_base"),
                    key("attention.layer_norm_rms_epsilon"))
    with torch.no_grad():  # the embedding begins as the model's, in its directions of most variance
        embedding = model.weights["token_embd"].float().cpu()
        _, directions = torch.linalg.eigh((embedding.T @ embedding).double())
        sibling.weights["token_embd"].copy_(embedding @ directions[:, -HIDDEN:].float())
        for name, w in sibling.weights.items():
            if name.endswith(("attn_output", "ffn_down")):
                w.mul_((2 * LAYERS) ** -0.5)
    sibling = sibling.to(device)
    optimizer = torch.optim.AdamW([{"params": list(sibling.weights.values()), "weight_decay": 0.02}, {"params": list(sibling.norms.values()), "weight_decay": 0.0}],
                                  lr=1.0, betas=(0.9, 0.95), fused=device == "cuda")

    def evaluate(rounded):
        with torch.no_grad():
            w, sums = sibling.matrices(rounded), [0.0, 0.0]
            for part in held.split(batch):
                loss, agree = Divergence.apply(sibling(part, w).flatten(0, 1), w["token_embd"], model(part, target).flatten(0, 1), target["token_embd"])
                sums = [sums[0] + loss.item() * len(part), sums[1] + agree.item() * len(part)]
            return [s / len(held) for s in sums]

    begun, step, reported = time.time(), 0, 0.0
    while (done := (time.time() - begun) / options.train_seconds) < 1:
        rate = 3e-3 * min(1, (step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = sequences[torch.randint(len(sequences), (batch,), device=device)]
        with torch.no_grad():
            states = model(ids, target).flatten(0, 1)
        w = sibling.matrices(done > 0.5)
        loss, _ = Divergence.apply(sibling(ids, w).flatten(0, 1), w["token_embd"], states, target["token_embd"])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(sibling.parameters(), 1.0)
        optimizer.step()
        step += 1
        if done > reported:
            reported += 0.1
            print(f"step {step}, {time.time() - begun:.0f} s: loss {loss.item():.3f}; held out: KL, agreement %.3f %.3f" % tuple(evaluate(done > 0.5)), flush=True)
    print(f"step {step}: held out: KL, agreement %.3f %.3f" % tuple(evaluate(True)))
    write(options.out, reader, sibling)


if __name__ == "__main__":
    main()
