#!/usr/bin/env python3
"""Models that coremltools converts, run by anemoe and by torch in turn: medians, ratios, and whether outputs agree.

    cargo build --release -p anemoe-runtime --example time_package
    coremltools_models.py [--models resnet18,unet,segmenter,generator,gpt2,gpt2-token] [--rounds 9] [--threads 2] [--keep FOLDER]
                          [--time target/release/examples/time_package] [--before OTHER/time_package] [--json OUT.json]

Weights are random. torch runs in float32; the packages are coremltools' own (mlprogram, fp16), run with `--precision fp32`
and `fp16`. Needs Python with torch, torchvision, transformers, coremltools==9.0 and numpy.
"""
import argparse, json, logging, os, statistics, subprocess, sys, tempfile, time, warnings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KMP_BLOCKTIME", "0")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
import numpy as np
import torch
from torch import nn


class Block(nn.Module):
    """Norm, activation, convolution, twice, with a step's embedding between them and the input added."""
    def __init__(self, c_in, c_out, emb):
        super().__init__()
        self.a, self.b = nn.GroupNorm(16, c_in), nn.GroupNorm(16, c_out)
        self.c, self.d = nn.Conv2d(c_in, c_out, 3, padding=1), nn.Conv2d(c_out, c_out, 3, padding=1)
        self.e = nn.Linear(emb, c_out)
        self.skip = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x, emb):
        h = self.c(nn.functional.silu(self.a(x))) + self.e(emb)[:, :, None, None]
        return self.skip(x) + self.d(nn.functional.silu(self.b(h)))


class Attention(nn.Module):
    def __init__(self, c, heads=4):
        super().__init__()
        self.norm, self.qkv, self.out, self.heads = nn.GroupNorm(16, c), nn.Linear(c, 3 * c), nn.Linear(c, c), heads

    def forward(self, x):
        b, c, h, w = map(int, x.shape)
        t = self.norm(x).reshape(b, c, h * w).permute(0, 2, 1)
        q, k, v = (p.reshape(b, h * w, self.heads, c // self.heads).permute(0, 2, 1, 3) for p in self.qkv(t).split(c, -1))
        s = torch.softmax(q @ k.transpose(-1, -2) * (c // self.heads) ** -0.5, -1)
        return x + self.out((s @ v).permute(0, 2, 1, 3).reshape(b, h * w, c)).permute(0, 2, 1).reshape(b, c, h, w)


class UNet(nn.Module):
    """A U-Net as diffusion models have them: 64 to 256 channels, three levels, attention at the lowest."""
    def __init__(self, base=64, emb=256):
        super().__init__()
        self.first, self.time = nn.Conv2d(4, base, 3, padding=1), nn.Linear(emb, emb)
        c = [base, 2 * base, 4 * base]
        self.down = nn.ModuleList([Block(base, c[0], emb), Block(c[0], c[1], emb), Block(c[1], c[2], emb)])
        self.smaller = nn.ModuleList([nn.Conv2d(c[0], c[0], 3, 2, 1), nn.Conv2d(c[1], c[1], 3, 2, 1)])
        self.mid, self.att = Block(c[2], c[2], emb), Attention(c[2])
        self.up = nn.ModuleList([Block(2 * c[2], c[2], emb), Block(c[2] + c[1], c[1], emb), Block(c[1] + c[0], c[0], emb)])
        self.larger = nn.ModuleList([nn.Conv2d(c[2], c[2], 3, padding=1), nn.Conv2d(c[1], c[1], 3, padding=1)])
        self.norm, self.last = nn.GroupNorm(16, base), nn.Conv2d(base, 4, 3, padding=1)

    def forward(self, x, t):
        emb, x, kept = nn.functional.silu(self.time(t)), self.first(x), []
        for i, block in enumerate(self.down):
            x = block(x, emb)
            kept.append(x)
            x = self.smaller[i](x) if i < 2 else x
        x = self.att(self.mid(x, emb))
        for i, block in enumerate(self.up):
            x = block(torch.cat([x, kept.pop()], 1), emb)
            x = self.larger[i](nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")) if i < 2 else x
        return self.last(nn.functional.silu(self.norm(x)))


class Segmenter(nn.Module):
    """A U-Net as segmentation has them: 32 to 256 channels, four levels, each enlarged by a transposed convolution."""
    def __init__(self, c=(32, 64, 128, 256)):
        super().__init__()
        two = lambda a, b: nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(),
                                         nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        self.down = nn.ModuleList([two(a, b) for a, b in zip((3, *c), c)])
        self.larger = nn.ModuleList([nn.ConvTranspose2d(a, b, 2, 2) for a, b in zip(c[:0:-1], c[-2::-1])])
        self.up = nn.ModuleList([two(2 * b, b) for b in c[-2::-1]])
        self.last = nn.Conv2d(c[0], 2, 1)

    def forward(self, x):
        kept = []
        for i, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if i else x)
            kept.append(x)
        kept.pop()
        for larger, block in zip(self.larger, self.up):
            x = block(torch.cat([larger(x), kept.pop()], 1))
        return self.last(x)


class Generator(nn.Module):
    """The generator of DCGAN: transposed convolutions alone, from 100 numbers to an image of 64 x 64."""
    def __init__(self, c=(512, 256, 128, 64)):
        super().__init__()
        layers = [nn.ConvTranspose2d(100, c[0], 4, 1, 0, bias=False), nn.BatchNorm2d(c[0]), nn.ReLU()]
        for a, b in zip(c, c[1:]):
            layers += [nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.ConvTranspose2d(c[-1], 3, 4, 2, 1), nn.Tanh())

    def forward(self, x):
        return self.layers(x)


class Gpt2(nn.Module):
    """GPT-2 without a cache, logits of all positions; blocks are transformers' own."""
    def __init__(self):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel
        self.m = GPT2LMHeadModel(GPT2Config(use_cache=False, attn_implementation="eager"))

    def forward(self, ids):
        g, n = self.m.transformer, int(ids.shape[1])
        x = g.wte(ids) + g.wpe.weight[:n]
        mask = torch.full((n, n), -1e4).triu(1)[None, None]
        for block in g.h:
            h, a = block.ln_1(x), block.attn
            q, k, v = (p.reshape(1, n, a.num_heads, a.head_dim).permute(0, 2, 1, 3) for p in a.c_attn(h).split(a.split_size, 2))
            s = torch.softmax(q @ k.transpose(-1, -2) * a.head_dim ** -0.5 + mask, -1)
            x = x + a.c_proj((s @ v).permute(0, 2, 1, 3).reshape(1, n, -1))
            x = x + block.mlp(block.ln_2(x))
        return self.m.lm_head(g.ln_f(x))


def make(name):
    """The torch model and its inputs by name."""
    torch.manual_seed(7)
    if name == "resnet18":
        from torchvision.models import resnet18
        return resnet18(weights=None), {"image": torch.randn(1, 3, 224, 224)}
    if name == "mobilenet":
        from torchvision.models import mobilenet_v2
        return mobilenet_v2(weights=None), {"image": torch.randn(1, 3, 224, 224)}
    if name == "unet":
        return UNet(), {"latent": torch.randn(1, 4, 64, 64), "step": torch.randn(1, 256)}
    if name == "segmenter":
        return Segmenter(), {"image": torch.randn(1, 3, 256, 256)}
    if name == "generator":
        return Generator(), {"noise": torch.randn(1, 100, 1, 1)}
    tokens = {"gpt2": 128, "gpt2-token": 1}[name]
    return Gpt2(), {"ids": torch.randint(0, 50257, (1, tokens), dtype=torch.int32)}


def convert(model, inputs, path):
    import coremltools as ct
    with torch.no_grad():
        traced = torch.jit.trace(model, tuple(inputs.values()))
    types = [ct.TensorType(n, v.shape, dtype=np.int32 if v.dtype == torch.int32 else np.float32) for n, v in inputs.items()]
    ct.convert(traced, inputs=types, outputs=[ct.TensorType("out", dtype=np.float32)], convert_to="mlprogram",
               minimum_deployment_target=ct.target.iOS17, skip_model_load=True).save(path)


class Timed:
    """A process that runs a package once for each line it is sent."""
    def __init__(self, binary, package, folder, precision, threads, label):
        self.out = os.path.join(folder, f"{label}.npz")
        self.p = subprocess.Popen([binary, package, os.path.join(folder, "inputs.npz"), self.out, precision],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                  env={**os.environ, "ANEMOE_THREADS": str(threads)})

    def run(self):
        self.p.stdin.write("\n")
        self.p.stdin.flush()
        return float(self.p.stdout.readline())

    def results(self):
        self.p.stdin.close()
        self.p.wait()
        return np.load(self.out)["out"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--models", default="resnet18,unet,segmenter,generator,gpt2,gpt2-token")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--time", default="target/release/examples/time_package")
    p.add_argument("--before")
    p.add_argument("--precisions", default="fp32,fp16")
    p.add_argument("--keep")
    p.add_argument("--json")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for name in args.models.split(","):
        folder = os.path.join(args.keep or tempfile.mkdtemp(), name)
        os.makedirs(folder, exist_ok=True)
        package = os.path.join(folder, "model.mlpackage")
        model, inputs = make(name)
        model.eval()
        if not os.path.exists(package):
            convert(model, inputs, package)
        np.savez(os.path.join(folder, "inputs.npz"), **{n: v.numpy() for n, v in inputs.items()})
        kinds = {q: Timed(args.time, package, folder, q, args.threads, q) for q in args.precisions.split(",")}
        if args.before:
            kinds |= {f"{q} before": Timed(args.before, package, folder, q, args.threads, f"{q}-before") for q in args.precisions.split(",")}
        times = {k: [] for k in ["torch", *kinds]}
        with torch.inference_mode():
            for round in range(args.rounds + 1):
                started = time.perf_counter()
                expected = model(*inputs.values())
                found = {"torch": 1e3 * (time.perf_counter() - started)} | {k: t.run() for k, t in kinds.items()}
                if round:  # The first one warms up.
                    for k, v in found.items():
                        times[k].append(v)
        expected = expected.numpy().ravel()
        row = {"model": name, "torch_ms": statistics.median(times["torch"])}
        for k, t in kinds.items():
            got = t.results().ravel()
            # Without a direction there is no cosine: NaN, which counts as wrong.
            cosine = float(got @ expected / (np.linalg.norm(got) * np.linalg.norm(expected)))
            ms = statistics.median(times[k])
            row[k] = {"ms": ms, "ratio": ms / row["torch_ms"], "cosine": cosine}
            print(f"{name:12} {k:12} {ms:9.2f} ms  torch {row['torch_ms']:8.2f} ms  ratio {ms / row['torch_ms']:6.2f}  cosine {cosine:.6f}", flush=True)
        rows.append(row)
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)
    wrong = [r["model"] for r in rows for k in r.values() if isinstance(k, dict) and not k["cosine"] >= 0.999]
    sys.exit(f"outputs differ: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
