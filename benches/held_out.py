#!/usr/bin/env python3
"""Which kinds hold on prompts that nothing was chosen on: the golden gate over many prompts, kinds side by side.

    held_out.py --anemoe target/release/anemoe --checkpoint DIR [--checkpoint DIR ..] --text FILE.. [--prompts 16] [--seed 1]
                [--decode 16] [--kinds 'lut4;lut4 --attn-quant lut6;..'] [--json OUT]

A kind is what stands behind `--quant` (an empty one: the default). Prompts are passages of the texts. Each gets a golden (the
checkpoint in f32); each kind gets a bundle, built without gates; each bundle is validated against each golden. Per kind: goldens
that pass, those that pass without forgiving a near tie, mean divergence in nats, lowest cosine, bytes of all matrices and bytes
that a token reads. Needs Python 3.10 and nothing else.
"""
import argparse, json, pathlib, random, shlex, statistics, subprocess, sys, tempfile

KINDS = ("lut4;lut4 --attn-quant lut6;lut4 --head-quant lut6;lut4 --attn-quant lut6 --head-quant lut6;"
         "auto --objective size --max-kl 0.005;auto --objective speed --max-kl 0.01;auto --objective speed --max-kl 0.005;"
         "auto --objective speed --max-kl 0.0025;")


def run(command, codes=(0,)):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in codes:
        sys.exit(f"{shlex.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--anemoe", required=True)
    p.add_argument("--checkpoint", action="append", required=True)
    p.add_argument("--text", nargs="+", required=True)
    p.add_argument("--prompts", type=int, default=16)
    p.add_argument("--decode", type=int, default=16)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--kinds", default=KINDS)
    p.add_argument("--json")
    a = p.parse_args()
    texts = [pathlib.Path(f).read_text(encoding="utf-8") for f in a.text]
    rows = []
    for checkpoint in a.checkpoint:
        rng = random.Random(a.seed)
        with tempfile.TemporaryDirectory() as folder:
            goldens = []
            for i in range(a.prompts):
                text = rng.choice(texts)
                start = rng.randrange(max(1, len(text) - 200))
                path = f"{folder}/{i}.npz"
                run([a.anemoe, "golden", checkpoint, "--prompt=" + text[start:start + rng.randrange(40, 160)],
                     "--decode", str(a.decode), "-o", path])
                goldens.append(path)
            print(f"\n{checkpoint}: {len(goldens)} prompts\n")
            print("| kinds | pass | pass, no tie forgiven | mean divergence | lowest cosine | MB | MB a token |")
            print("|---|---|---|---|---|---|---|", flush=True)
            for n, kind in enumerate(a.kinds.split(";")):
                options = ["--quant", *shlex.split(kind)] if kind.strip() else []
                bundle = f"{folder}/{n}.anemoe"
                run([a.anemoe, "build", checkpoint, "-o", bundle, "--skip-gates", "--max-context", "512", *options])
                sizes = options[:options.index("--calibrate")] if "--calibrate" in options else options  # of the same kinds
                totals = json.loads(run([a.anemoe, "plan", checkpoint, "--max-context", "512", "--json", *sizes]))["totals"]
                found = [json.loads(run([a.anemoe, "validate", bundle, "--golden", g, "--json"], (0, 1))) for g in goldens]
                row = {
                    "checkpoint": checkpoint, "kind": kind or "(default)", "prompts": len(goldens),
                    "pass": sum(f["pass"] for f in found),
                    "exact": sum(f["pass"] and f["tokens_match"] for f in found),
                    "mean_kl": statistics.mean(f["mean_kl"] for f in found),
                    "min_cosine": min(f["min_cosine"] for f in found),
                    "bytes": totals["bytes"], "bytes_per_token": totals["bytes_per_token"],
                }
                rows.append(row)
                print(f"| {row['kind']} | {row['pass']} of {row['prompts']} | {row['exact']} | {row['mean_kl']:.4f} "
                      f"| {row['min_cosine']:.4f} | {row['bytes'] / 1e6:.1f} | {row['bytes_per_token'] / 1e6:.2f} |", flush=True)
    if a.json:
        json.dump(rows, open(a.json, "w"), indent=1)


if __name__ == "__main__":
    main()
