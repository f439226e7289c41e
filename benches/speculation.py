#!/usr/bin/env python3
"""`anemoe generate` with --speculate auto and off in turn: are all tokens equal, and what is gained or lost?

    speculation.py --anemoe target/release/anemoe --bundle B.anemoe [--bundle C.anemoe ..] --text FILE..
                   [--prompts 200] [--rounds 1] [--max-new 400] [--mode auto] [--kind passage] [--json OUT]

A fifth of the prompts are random ids (the worst case: nothing repeats in them), a fifth are one passage of the texts, a fifth
a passage said twice and begun again (a code edit, a quotation), a fifth a short list of ids again and again, and a fifth
passages of which half is left out the second time. Per kind: the median gain (decoding speed over that of `off`, the two
processes run in turn, each first in every second pair), the lowest and highest, accepted of drafted tokens; with a drafter, its
acceptance by place in the draft.
Needs Python 3.10 and nothing else.
"""
import argparse, json, random, statistics, subprocess, sys

KINDS = ["random ids", "passage", "repeated passage", "periodic ids", "edited passage"]


def passage(texts, rng, size):
    text = rng.choice(texts)
    start = rng.randrange(max(1, len(text) - size))
    return text[start:start + size]


def make_prompt(kind, texts, rng, vocabulary):
    """Arguments of `anemoe generate` for one prompt."""
    if kind == "random ids":
        ids = [rng.randrange(vocabulary) for _ in range(rng.randrange(8, 96))]
    elif kind == "periodic ids":
        period = [rng.randrange(vocabulary) for _ in range(rng.randrange(2, 12))]
        ids = (period * 64)[: rng.randrange(24, 96)]
    else:
        a = passage(texts, rng, rng.randrange(120, 360))
        half = a[: len(a) // 3]
        if kind == "passage":
            text = a
        elif kind == "repeated passage":
            text = a + "\n\n" + half
        else:
            text = a + "\n\n" + a[len(a) // 4: len(a) // 2]
        return ["--prompt=" + (text if text not in ("", "-") else "def")]
    return ["--prompt-ids", ",".join(map(str, ids))]


def run(anemoe, bundle, prompt, mode, max_new, extra):
    command = [anemoe, "generate", bundle, *prompt, "--max-new", str(max_new), "--ignore-eos", "--speculate", mode, "--json", *extra]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--anemoe", required=True)
    p.add_argument("--bundle", action="append", required=True)
    p.add_argument("--text", action="append", required=True)
    p.add_argument("--prompts", type=int, default=200)
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--max-new", type=int, default=400)
    p.add_argument("--mode", default="auto")
    p.add_argument("--kind", action="append", choices=KINDS, help="kinds of prompts; by default all")
    p.add_argument("--vocabulary", type=int, default=0, help="random ids are below it; by default the bundle's")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--json")
    p.add_argument("--extra", default="", help="more options of generate, in one argument")
    a = p.parse_args()
    texts = [open(f, encoding="utf-8").read() for f in a.text]
    extra, kinds = a.extra.split(), a.kind or KINDS
    rows = []
    for bundle in a.bundle:
        chain = json.load(open(f"{bundle}/chain.json"))
        vocabulary = a.vocabulary or chain["model"]["vocab_size"]
        rng = random.Random(a.seed)
        found = {kind: {"gains": [], "drafted": 0, "accepted": 0, "differ": 0, "prompts": 0, "places": []} for kind in kinds}
        for i in range(a.prompts):
            kind = kinds[i % len(kinds)]
            prompt = make_prompt(kind, texts, rng, vocabulary)
            f = found[kind]
            f["prompts"] += 1
            for r in range(a.rounds):
                modes = [a.mode, "off"] if (i + r) % 2 == 0 else ["off", a.mode]
                out = {m: run(a.anemoe, bundle, prompt, m, a.max_new, extra) for m in modes}
                with_, without = out[a.mode], out["off"]
                if with_["generated_ids"] != without["generated_ids"]:
                    f["differ"] += 1
                f["gains"].append(with_["timing"]["decode_tok_s"] / without["timing"]["decode_tok_s"])
                f["drafted"] += with_["speculation"]["drafted"]
                f["accepted"] += with_["speculation"]["accepted"]
                for source in with_["speculation"].get("sources", [])[1:]:
                    for place, counts in enumerate(source["places"]):
                        f["places"] += [[0, 0]] * (place + 1 - len(f["places"]))
                        f["places"][place] = [x + y for x, y in zip(f["places"][place], counts)]
        print(f"\n{bundle}, {a.mode} against off, {a.max_new} tokens, {a.rounds} pairs of each prompt\n")
        print("| prompts | of each kind | gain, median | lowest to highest | accepted of drafted | drafter, by place | tokens differ |")
        print("|---|---|---|---|---|---|---|")
        for kind in kinds:
            f = found[kind]
            g = sorted(f["gains"])
            print(f"| {kind} | {f['prompts']} | {statistics.median(g):.3f} | {g[0]:.2f} to {g[-1]:.2f} "
                  f"| {f['accepted']} of {f['drafted']} | {', '.join(f'{y / x:.2f}' for x, y in f['places'])} | {f['differ']} |")
            rows.append({"bundle": bundle, "kind": kind, "median": statistics.median(g), **f})
    if a.json:
        json.dump({"max_new": a.max_new, "rounds": a.rounds, "rows": rows}, open(a.json, "w"))
    if any(r["differ"] for r in rows):
        sys.exit("tokens differ")
    if not sum(r["drafted"] for r in rows):
        sys.exit("nothing was drafted, so that equal tokens say nothing: a larger --max-new gives drafts time to pay")


if __name__ == "__main__":
    main()
