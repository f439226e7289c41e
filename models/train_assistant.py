#!/usr/bin/env python3
"""Train an assistant (drafter) of small-gemma4 by distillation, on the CPU.

  train_assistant.py --corpus DIR[:DIR..] --minutes N [--target DIR] [--out DIR] [--threads N]

The protocol is that of fixtures/make_assistant.py, at all positions of a text at once: the query of token n sees the target's keys 0 .. n-1, its
input is the target's embedding of token n beside the target's hidden state of n-1; later steps take the text's next token beside the assistant's own
state, at the same position. The loss is the cross entropy to the target's distribution. What the target says of a passage is computed once and kept.

One file of sixteen, chosen by the hash of its name, is held out; --held-out FILE writes their texts. Every line says, by step and over held-out text,
how often the assistant's best token is the target's. The best weights so far are in DIR, with golden.npz as that of the fixtures.
"""
import argparse, copy, hashlib, html, json, math, os, random, re, sys, time
import numpy as np
import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "fixtures"))
import make_assistant as protocol
from tokenizers import Tokenizer
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForConditionalGeneration, Gemma4TextConfig, GenerationConfig

STEPS, LENGTH, BATCH = 3, 384, 2
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]


def texts(corpus, megabytes, seed):
    """Texts for training and held-out ones."""
    files = []
    for folder in corpus.split(":"):
        found = []
        for root, folders, names in os.walk(folder):
            folders[:] = [f for f in folders if f not in ("test", "tests", "idle_test", "__pycache__", "site-packages", "lib2to3", "encodings")]
            found += [(folder, os.path.join(root, n)) for n in names if n.endswith((".py", ".md", ".rst", ".txt", ".html", ".rs"))]
        found.sort()
        random.Random(seed).shuffle(found)
        files.append(found)
    train, held, seen = [], [], set()
    for found in files:
        size = 0
        for folder, path in found:
            try:
                text = open(path, encoding="utf-8").read()
            except (UnicodeDecodeError, OSError):
                continue
            if path.endswith(".html"):
                text = re.sub(r"(?is)<(script|style|nav|head).*?</\1>", "", text)
                text = re.sub(r"\n\s*\n+", "\n\n", html.unescape(re.sub(r"(?s)<[^>]+>", "", text))).strip()
            digest = hashlib.md5(text.encode()).digest()
            if not 1000 < len(text) < 200_000 or digest in seen or sum(c.isdigit() for c in text) > 0.2 * len(text):
                continue
            seen.add(digest)
            name = hashlib.md5(os.path.relpath(path, folder).encode()).digest()
            (held if name[0] % 16 == 0 else train).append((path, text))
            size += len(text)
            if size > megabytes * 1e6 / len(files):
                break
    return train, held


def passages(tokenizer, documents):
    """Rows of LENGTH tokens, each within one document, with <bos> before the first only."""
    rows = []
    for i in range(0, len(documents), 32):
        for e in tokenizer.encode_batch([text for _, text in documents[i:i + 32]]):
            rows += [e.ids[k:k + LENGTH] for k in range(0, len(e.ids) - LENGTH + 1, LENGTH)]
    return torch.tensor(rows)


class Target:
    """The target, and what it says of passages: hidden states after the final norm, keys and values of the last layer of each kind."""

    def __init__(self, folder):
        self.model = Gemma4ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        self.embed = self.model.get_input_embeddings()
        self.head = self.model.get_output_embeddings().weight.detach()
        config = self.model.config.get_text_config()
        self.cap, self.last = config.final_logit_softcapping, {kind: i for i, kind in enumerate(config.layer_types)}
        self.known = {}

    @torch.no_grad()
    def says(self, rows, which):
        missing = [i for i in which if i not in self.known]
        if missing:
            out = self.model.model(input_ids=rows[missing], use_cache=False, return_shared_kv_states=True)
            for k, i in enumerate(missing):
                shared = {kind: [t[k].half() for t in out.shared_kv_states[kind]] for kind in self.last}
                self.known[i] = out.last_hidden_state[k].half(), shared
        found = [self.known[i] for i in which]
        hidden = torch.stack([h for h, _ in found]).float()
        shared = {kind: tuple(torch.stack([s[kind][side] for _, s in found]).float() for side in (0, 1)) for kind in self.last}
        return hidden, shared

    def logits(self, hidden):
        return self.cap * torch.tanh(hidden @ self.head.T / self.cap)


def new_assistant(target, folder, hidden, wide):
    t = target.model.config.get_text_config()
    t.allow_global_per_layer_attribute_access = True
    raw = json.load(open(os.path.join(folder, "config.json")))["text_config"]
    text = Gemma4TextConfig(
        vocab_size=t.vocab_size, vocab_size_per_layer_input=0, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=len(LAYERS),
        num_attention_heads=t.num_attention_heads, num_key_value_heads=raw["num_key_value_heads"], num_global_key_value_heads=raw["num_global_key_value_heads"],
        head_dim=raw["head_dim"], global_head_dim=raw["global_head_dim"], hidden_activation=t.hidden_activation, max_position_embeddings=t.max_position_embeddings,
        rms_norm_eps=t.rms_norm_eps, tie_word_embeddings=True, attention_k_eq_v=t.attention_k_eq_v, sliding_window=t.sliding_window, layer_types=LAYERS,
        final_logit_softcapping=None, hidden_size_per_layer_input=0, num_kv_shared_layers=len(LAYERS), use_double_wide_mlp=False, enable_moe_block=False,
        rope_parameters=t.rope_parameters, pad_token_id=0, eos_token_id=1, bos_token_id=2, dtype="bfloat16")
    m = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=text, backbone_hidden_size=t.hidden_size, use_ordered_embeddings=False)).float()
    m.set_attn_implementation("sdpa")
    with torch.no_grad():
        # The head starts as the best approximation of the target's, and the layers as the target's last ones, in the same basis.
        u, s, v = torch.linalg.svd(target.head, full_matrices=False)
        basis = v[:hidden]
        m.model.embed_tokens.weight.copy_(u[:, :hidden] * s[:hidden])
        m.pre_projection.weight.copy_(torch.cat([basis, 0.5 * basis], -1))
        m.post_projection.weight.copy_(basis.T)
        last = len(target.model.model.language_model.layers) - len(LAYERS)
        for i, (layer, kind) in enumerate(zip(m.model.layers, LAYERS)):
            theirs = target.model.model.language_model.layers[target.last[kind]]
            layer.self_attn.q_norm.weight.copy_(theirs.self_attn.q_norm.weight)
            layer.self_attn.q_proj.weight.copy_(theirs.self_attn.q_proj.weight * theirs.input_layernorm.weight @ basis.T)
            layer.self_attn.o_proj.weight.copy_(basis @ theirs.self_attn.o_proj.weight)
            theirs = target.model.model.language_model.layers[last + i]
            for name in ("gate_proj", "up_proj"):
                getattr(layer.mlp, name).weight.copy_(getattr(theirs.mlp, name).weight * theirs.pre_feedforward_layernorm.weight @ basis.T)
            layer.mlp.down_proj.weight.copy_(basis @ theirs.mlp.down_proj.weight)
            layer.post_attention_layernorm.weight.fill_(0.3)
            layer.post_feedforward_layernorm.weight.fill_(0.3)
    return m


def run(m, target, rows, hidden, shared, masks):
    """Final states of STEPS steps for the queries 1 .. LENGTH - 1 - STEPS, [STEPS, rows, queries, H], before the head."""
    n = LENGTH - 1 - STEPS
    keys = {kind: tuple(t[:, :, :n] for t in pair) for kind, pair in shared.items()}
    state, out = hidden[:, :n], []
    with torch.no_grad():
        embedded = target.embed(rows)
    for step in range(STEPS):
        x = m.pre_projection(torch.cat([embedded[:, 1 + step:1 + step + n], state], -1))
        last = m.model(inputs_embeds=x, attention_mask=masks, position_ids=torch.arange(1, n + 1)[None], shared_kv_states=keys, use_cache=False,
                       logits_to_keep=None).last_hidden_state
        state = m.post_projection(last)
        out.append(last)
    return torch.stack(out)


def attention_masks(window):
    n = LENGTH - 1 - STEPS
    query, key = torch.arange(1, n + 1)[:, None], torch.arange(n)[None]
    full = key < query
    return {"full_attention": full[None, None], "sliding_attention": (full & (key >= query - 1 - window))[None, None]}


@torch.no_grad()
def evaluate(m, target, rows, masks):
    """Of the positions where all earlier steps agreed with the target's best token, the share where this one does."""
    hits, alive = np.zeros(STEPS), np.zeros(STEPS)
    n = LENGTH - 1 - STEPS
    m.eval()
    for i in range(0, len(rows), BATCH):
        which = list(range(i, min(i + BATCH, len(rows))))
        hidden, shared = target.says(rows, which)
        states = run(m, target, rows[which], hidden, shared, masks)
        best = target.logits(hidden).argmax(-1)
        going = torch.ones(len(which), n, dtype=torch.bool)
        for step in range(STEPS):
            alive[step] += going.sum()
            going = going & (m.lm_head(states[step]).argmax(-1) == best[:, 1 + step:1 + step + n])
            hits[step] += going.sum()
            # Later steps are fed the text's token: count them where it is the target's.
            going = going & (rows[which][:, 2 + step:2 + step + n] == best[:, 1 + step:1 + step + n])
    m.train()
    return hits / np.maximum(alive, 1)


def save(m, target, out, rows):
    os.makedirs(out, exist_ok=True)
    # A copy, since casting a model also rounds the frequencies of its ropes.
    copy.deepcopy(m).to(torch.bfloat16).save_pretrained(out)
    GenerationConfig(do_sample=False, num_assistant_tokens=STEPS).save_pretrained(out)
    saved = Gemma4AssistantForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    target.model.set_attn_implementation("eager")
    protocol.PREFIXES, protocol.STEPS = [9, 40, 160], STEPS
    np.savez_compressed(os.path.join(out, "golden.npz"), **protocol.golden(target.model, saved, rows[:1, :160]))
    target.model.set_attn_implementation("sdpa")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--corpus", required=True)
    p.add_argument("--megabytes", type=float, default=6)
    p.add_argument("--minutes", type=float, default=40)
    p.add_argument("--target", default=os.path.join(HERE, "small-gemma4"))
    p.add_argument("--out", default=os.path.join(HERE, "small-gemma4-assistant"))
    p.add_argument("--held-out")
    p.add_argument("--hidden", type=int, default=128)
    p.add_argument("--wide", type=int, default=384)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    begin = time.time()
    documents, held = texts(a.corpus, a.megabytes, a.seed)
    if a.held_out:
        os.makedirs(a.held_out, exist_ok=True)
        for i, (path, text) in enumerate(held):
            open(os.path.join(a.held_out, f"{i:03d}-{os.path.basename(path)}"), "w").write(text)
    tokenizer = Tokenizer.from_file(os.path.join(a.target, "tokenizer.json"))
    rows, unseen = passages(tokenizer, documents), passages(tokenizer, held)
    g = torch.Generator().manual_seed(a.seed)
    rows, unseen = rows[torch.randperm(len(rows), generator=g)], unseen[torch.randperm(len(unseen), generator=g)][:24]
    target = Target(a.target)
    m = new_assistant(target, a.target, a.hidden, a.wide).train()
    print(f"{sum(p.numel() for p in m.parameters())/1e6:.2f} M parameters, {len(rows)} passages, {len(held)} held-out files, {time.time()-begin:.0f} s", flush=True)
    masks = attention_masks(target.model.config.get_text_config().sliding_window)
    held_target = Target.__new__(Target)
    held_target.__dict__.update(target.__dict__, known={})
    wide = [p for p in m.parameters() if p.ndim >= 2]
    opt = torch.optim.AdamW([{"params": wide, "weight_decay": 0.05}, {"params": [p for p in m.parameters() if p.ndim < 2], "weight_decay": 0.0}],
                            lr=a.lr, betas=(0.9, 0.95), fused=True)
    weights = torch.tensor([0.7 ** k for k in range(STEPS)])
    n = LENGTH - 1 - STEPS
    start, step, saved, best, next_row, loss_mean = time.time(), 0, time.time(), 0.0, 0, None
    while True:
        share = (time.time() - start) / (60 * a.minutes)
        if share >= 1:
            break
        for group in opt.param_groups:
            group["lr"] = a.lr * min(1, (step + 1) / 50) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * share)))
        # Every other batch is new; the others are what the target was asked before.
        if (step % 2 == 0 or not target.known) and next_row + BATCH <= len(rows):
            which = list(range(next_row, next_row + BATCH))
            next_row += BATCH
        else:
            which = random.sample(sorted(target.known), BATCH)
        hidden, shared = target.says(rows, which)
        states = run(m, target, rows[which], hidden, shared, masks)
        # A quarter of the positions, another at each step, goes through the head.
        loss = 0.0
        with torch.no_grad():
            wanted = torch.softmax(target.logits(hidden), -1)
        for k in range(STEPS):
            chosen = torch.randperm(n, generator=g)[:n // 2 if k == 0 else n // 4]
            said = torch.log_softmax(m.lm_head(states[k][:, chosen]), -1)
            loss = loss - weights[k] * (wanted[:, 1 + k + chosen] * said).sum(-1).mean()
        loss = loss / weights.sum()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        opt.step()
        step += 1
        loss_mean = loss.item() if loss_mean is None else 0.95 * loss_mean + 0.05 * loss.item()
        if step % 20 == 0 or step == 1:
            print(json.dumps(dict(step=step, loss=round(loss_mean, 4), t=round(time.time() - start), cpu=round(time.process_time()), asked=next_row)), flush=True)
        if time.time() - saved > 180 or step == 1:
            shares = evaluate(m, held_target, unseen, masks)
            value = float(sum(np.cumprod(shares)))
            print(json.dumps(dict(step=step, agrees=[round(float(s), 4) for s in shares], value=round(value, 4))), flush=True)
            if value > best:
                best = value
                save(m, target, a.out, unseen)
            saved = time.time()
    shares = evaluate(m, held_target, unseen, masks)
    value = float(sum(np.cumprod(shares)))
    print(json.dumps(dict(final=True, steps=step, agrees=[round(float(s), 4) for s in shares], value=round(value, 4), cpu=round(time.process_time()))), flush=True)
    if value > best:
        save(m, target, a.out, unseen)


if __name__ == "__main__":
    main()
