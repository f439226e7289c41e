#!/usr/bin/env python3
"""Speculation by lookup of n-grams side by side: anemoe's --speculate auto, and llama.cpp's llama-lookup, each against its own
greedy decoding of the same prompts.

    lookup.py --anemoe target/release/anemoe --bundle B.anemoe --llama FOLDER --gguf F.gguf --text FILE..
              [--prompts 40] [--max-new 64] [--draft 8] [--json OUT]

FOLDER holds llama-lookup (EXAMPLES=ON build_llama.sh); F.gguf is the bundle's model
(small_gguf.py). Kinds of prompts are those of ../speculation.py that are texts. Per kind and program: the median gain, the lowest
and highest, accepted of drafted tokens, and how often the text differs from that of plain greedy decoding.
Needs Python 3.10 and nothing else.
"""
import argparse, json, pathlib, random, re, statistics, subprocess, sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import speculation

KINDS = ["passage", "repeated passage", "edited passage"]


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr[-2000:]}")
    return done.stdout, done.stderr


def llama(folder, gguf, prompt, max_new, draft):
    """(tok/s, text) plain, and (tok/s, text, drafted, accepted) with lookup."""
    path = pathlib.Path("/tmp") / "lookup-prompt.txt"
    path.write_text(prompt)

    def lookup(most):
        command = [f"{folder}/llama-lookup", "-m", gguf, "-f", str(path), "-n", str(max_new), "--temp", "0", "-t", "2", "-c", "1024",
                   "--spec-draft-n-max", str(most)]
        # Its log is written by a thread of its own, which now and then does not come to the last lines.
        for _ in range(5):
            out, err = run(command)
            if "n_accept" in out + err:
                break
        number = lambda pattern: float(re.search(pattern, out + err)[1])
        text = out.lstrip("\n").removeprefix("<bos>").removeprefix(prompt).rstrip("\n")
        return (number(r"decoded\s+\d+ tokens in\s+[\d.]+ seconds, speed:\s+([\d.]+)"), text,
                int(number(r"n_drafted\s*=\s*(\d+)")), int(number(r"n_accept\s*=\s*(\d+)")))

    # With drafts of no token it decodes plainly, with as many threads.
    return lookup(0)[:2], lookup(draft)


def anemoe(program, bundle, prompt, max_new, draft):
    found = {}
    for mode in ("off", "auto"):
        out, _ = run([program, "generate", bundle, "--prompt=" + prompt, "--max-new", str(max_new), "--ignore-eos", "--json",
                      "--speculate", mode, "--draft-max", str(draft)])
        found[mode] = json.loads(out)
    speed = lambda mode: found[mode]["timing"]["decode_tok_s"]
    s = found["auto"]["speculation"]
    return (speed("off"), found["off"]["generated_ids"]), (speed("auto"), found["auto"]["generated_ids"], s["drafted"], s["accepted"])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--anemoe", required=True)
    p.add_argument("--bundle", required=True)
    p.add_argument("--llama", required=True)
    p.add_argument("--gguf", required=True)
    p.add_argument("--text", nargs="+", required=True)
    p.add_argument("--prompts", type=int, default=40)
    p.add_argument("--max-new", type=int, default=64)
    p.add_argument("--draft", type=int, default=8)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--json")
    a = p.parse_args()
    texts = [pathlib.Path(f).read_text(encoding="utf-8") for f in a.text]
    rng = random.Random(a.seed)
    rows = {(kind, program): dict(gains=[], drafted=0, accepted=0, differ=0, plain=[]) for kind in KINDS for program in ("anemoe", "llama.cpp")}
    for i in range(a.prompts):
        kind = KINDS[i % len(KINDS)]
        prompt = speculation.make_prompt(kind, texts, rng, 0)[0].removeprefix("--prompt=").strip()
        for program, (plain, drafted) in (("anemoe", anemoe(a.anemoe, a.bundle, prompt, a.max_new, a.draft)),
                                          ("llama.cpp", llama(a.llama, a.gguf, prompt, a.max_new, a.draft))):
            row = rows[kind, program]
            row["gains"].append(drafted[0] / plain[0])
            row["plain"].append(plain[0])
            row["drafted"] += drafted[2]
            row["accepted"] += drafted[3]
            n = min(len(plain[1]), len(drafted[1]))
            row["differ"] += plain[1][:n] != drafted[1][:n]
    print("| prompts | program | of each kind | plain tok/s | gain, median | lowest to highest | accepted of drafted | text differs |")
    print("|---|---|---|---|---|---|---|---|")
    for (kind, program), r in rows.items():
        g = sorted(r["gains"])
        print(f"| {kind} | {program} | {len(g)} | {statistics.median(r['plain']):.0f} | {statistics.median(g):.3f} "
              f"| {g[0]:.2f} to {g[-1]:.2f} | {r['accepted']} of {r['drafted']} | {r['differ']} |")
    if a.json:
        json.dump([dict(kind=k, program=p, **r) for (k, p), r in rows.items()], open(a.json, "w"))


if __name__ == "__main__":
    main()
