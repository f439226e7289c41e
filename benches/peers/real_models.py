#!/usr/bin/env python3
"""A real model by anemoe and by llama.cpp, from the same GGUF file: perplexity of a text, greedy tokens, and speed in turn.

    real_models.py --llama FOLDER --gguf F.gguf --text T.txt [--anemoe target/release/anemoe --bundle B.anemoe ..]
                   [--speed Q4_0=B.anemoe ..] [--context 512] [--max-tokens 65536] [--max-new 48] [--f32]
                   [--scratch DIR] [--json OUT] [-- OPTIONS OF alternate.py]

FOLDER holds llama-score, and for --speed and --f32 llama-bench and llama-quantize (build_llama.sh). The bundles are built from F.gguf.

Perplexity: `anemoe perplexity --context N --max-tokens M`. llama-score sees the same windows: N tokens, the first of them
the token that starts a text where the bundle has one, the others the next of the text; every token behind a window's first is
scored.
Greedy: 20 prompts, as many new tokens on both sides, end tokens included. Of the first difference: how far llama.cpp's choice led, and
how far ours leads in `anemoe golden`, which computes the file in f32.
--f32: perplexity and tokens of llama.cpp on the file's weights in F32 as well, where it does not round activations to 8 bits.
Speed: llama-quantize makes the file of that type (Q4_0: all matrices), and alternate.py times both.
Without --anemoe only llama.cpp is asked. Needs Python 3.10 and nothing else.
"""
import argparse, array, ast, json, math, os, pathlib, subprocess, sys, tempfile, zipfile

PROMPTS = [
    "The history of the lighthouse begins in",
    "Once upon a time, in a small village by the sea, there lived a girl who",
    "The three most important inventions of the nineteenth century were",
    "Water boils at a lower temperature on a mountain because",
    "The capital of France is Paris. The capital of Italy is",
    "Dear Sir or Madam, I am writing to you about",
    "Question: Why is the sky blue?\nAnswer:",
    "def fibonacci(n):\n    \"\"\"Returns the n-th Fibonacci number.\"\"\"\n",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "Monday, Tuesday, Wednesday,",
    "1, 1, 2, 3, 5, 8, 13,",
    "To bake bread, you need flour, water, salt and yeast. First,",
    "In mathematics, a prime number is",
    "The old man opened the door and saw",
    "# Shopping list\n\n- apples\n- bread\n-",
    "Il était une fois un roi qui",
    "Die Stadt liegt an einem Fluss und",
    "{\"name\": \"Ada\", \"born\": 1815, \"known_for\": \"",
    "She said that she would come back in the spring, but",
]


def run(command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace", **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nexit status {done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def say(text):
    print(text, file=sys.stderr, flush=True)


# ---- llama.cpp

class Score:
    """A llama-score that runs."""

    def __init__(self, a, gguf):
        command = [f"{a.llama}/llama-score", gguf, str(a.threads), str(max(a.context, 512))]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.info = self.ask("info")

    def ask(self, *words):
        try:
            self.child.stdin.write(" ".join(map(str, words)) + "\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            pass
        line = self.child.stdout.readline()
        if not line:
            sys.exit(f"llama-score ended with {self.child.wait()}")
        return json.loads(line)

    def tokenize(self, text):
        """Tokens of a text, with what llama.cpp itself puts in front of it."""
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="") as f:
            f.write(text)
            f.flush()
            return self.ask("tokenize", f.name)

    def end(self):
        self.child.stdin.close()
        self.child.wait()


def windows(ids, bos, context, limit):
    """As `windows` in crates/gates/src/perplexity.rs."""
    if bos is not None and ids[:1] == [bos]:
        ids = ids[1:]
    ids = ids[:limit]
    text = max(context - (bos is not None), 1)
    start = [] if bos is None else [bos]
    return [w for i in range(0, len(ids), text) if len(w := start + ids[i:i + text]) > 1]


def theirs(score, pieces, name):
    total, tokens = 0.0, 0
    for i, piece in enumerate(pieces):
        nll = score.ask("score", *piece)
        total, tokens = total + math.fsum(nll), tokens + len(nll)
        if i % 16 == 15:
            say(f"{name}: {i + 1} of {len(pieces)} windows, perplexity {math.exp(total / tokens):.4f}")
    return {"perplexity": math.exp(total / tokens), "tokens": tokens, "windows": len(pieces)}


def quantized(a, kind):
    """The file in another type, made where it is not there."""
    path = a.scratch / f"{pathlib.Path(a.gguf).stem}-{kind}.gguf"
    if not path.exists():
        # By default the head of Q4_0 has 6 bits, which are not equal bits.
        pure = ["--pure"] if kind == "Q4_0" else []
        half = path.with_suffix(".half")
        run([f"{a.llama}/llama-quantize", "--allow-requantize", *pure, a.gguf, half, kind, a.threads])
        half.rename(path)
    return path


# ---- ours

def bos_of(a, bundle):
    """The token that starts a text: the model's, where a prompt begins with it."""
    chain = json.loads((pathlib.Path(bundle) / "chain.json").read_text(encoding="utf-8"))
    bos = chain["model"].get("bos_token_id")
    return bos if generate(a, bundle, ["--prompt=a"])["prompt_ids"][0] == bos else None


def last_row(npz, name):
    """Last row of a matrix of f32 in an .npz."""
    with zipfile.ZipFile(npz) as z, z.open(f"{name}.npy") as f:
        magic = f.read(8)
        size = int.from_bytes(f.read(2 if magic[6] == 1 else 4), "little")
        header = ast.literal_eval(f.read(size).decode("latin-1"))
        assert header["descr"] == "<f4" and not header["fortran_order"], header
        rows, columns = header["shape"]
        f.read((rows - 1) * columns * 4)
        row = array.array("f")
        row.frombytes(f.read(columns * 4))
    if sys.byteorder == "big":
        row.byteswap()
    return row


def lead(a, prefix, chosen, other):
    """How far a token leads another one behind these, by the file in f32."""
    with tempfile.TemporaryDirectory(dir=a.scratch) as folder:
        out = os.path.join(folder, "golden.npz")
        run([a.anemoe, "golden", a.gguf, "--prompt-ids", ",".join(map(str, prefix)), "--decode", "0", "-o", out])
        row = last_row(out, "logits_full")
        return row[chosen] - row[other]


def generate(a, bundle, prompt):
    return json.loads(run([a.anemoe, "generate", bundle, *prompt, "--max-new", a.max_new, "--ignore-eos", "--temperature", "0",
                           "--speculate", "off", "--json"]))


# ---- comparisons

def sides(a):
    """llama.cpp with the file, and with its weights in F32."""
    return [("llama.cpp", a.gguf)] + ([("llama.cpp, F32", quantized(a, "F32"))] if a.f32 else [])


def perplexities(a):
    text = pathlib.Path(a.text).read_text(encoding="utf-8")
    bundles = [(b, bos_of(a, b)) for b in a.bundle]
    score = Score(a, a.gguf)
    own = score.info["bos"] if score.info["add_bos"] else None
    starts = {bos for _, bos in bundles} or {own}
    for bos in starts - {own}:
        say(f"bundles start a text with {bos}, llama.cpp with {own}: both are measured with {bos}")
    ids = score.tokenize(text)
    score.end()
    if own is not None:
        assert ids[0] == own
        ids = ids[1:]
    rows = []
    for name, gguf in sides(a):
        score = Score(a, gguf)
        for bos in starts:
            rows.append({"what": name, "bos": bos, **theirs(score, windows(ids, bos, a.context, a.max_tokens), name)})
        score.end()
    for bundle, bos in bundles:
        doc = json.loads(run([a.anemoe, "perplexity", bundle, "--text", a.text, "--context", a.context, "--max-tokens", a.max_tokens,
                              "--json"]))
        peer = next(r for r in rows if r["what"] == "llama.cpp" and r["bos"] == bos)
        row = {"what": pathlib.Path(bundle).name, "bos": bos} | {k: doc[k] for k in ("perplexity", "tokens", "windows", "tok_s")}
        row["over_llama"] = row["perplexity"] / peer["perplexity"] - 1
        row["same_tokens"] = (row["tokens"], row["windows"]) == (peer["tokens"], peer["windows"])
        say(f"{bundle}: {row}")
        rows.append(row)
    print("| | perplexity | of llama.cpp's | tokens | windows |\n|---|---|---|---|---|")
    for r in rows:
        share = f"{100 * r['over_llama']:+.2f} %" if "over_llama" in r else ""
        other = "" if r.get("same_tokens", True) else " (other tokens)"
        print(f"| {r['what']} | {r['perplexity']:.4f} | {share} | {r['tokens']}{other} | {r['windows']} |")
    return rows


def greedy(a):
    peers = {}
    for name, gguf in sides(a):
        score = Score(a, gguf)
        peers[name] = []
        for prompt in PROMPTS:
            ids = score.tokenize(prompt)
            peers[name].append({"prompt": prompt, "prompt_ids": ids, **score.ask("greedy", a.max_new, *ids)})
        score.end()
    found = []
    for bundle in a.bundle:
        prompts = []
        for peer in peers["llama.cpp"]:
            doc = generate(a, bundle, ["--prompt=" + peer["prompt"]])
            row = {"same_prompt": doc["prompt_ids"] == peer["prompt_ids"]}
            if not row["same_prompt"]:
                row["prompt_ids"] = doc["prompt_ids"]
                doc = generate(a, bundle, ["--prompt-ids", ",".join(map(str, peer["prompt_ids"]))])
            prompts.append(row | {"ids": doc["generated_ids"]})
        found.append({"bundle": pathlib.Path(bundle).name, "prompts": prompts,
                      "against": {name: [difference(a, row["ids"], peer) for row, peer in zip(prompts, rows)]
                                  for name, rows in peers.items()}})
    if found:
        print("| | against | equal | other tokens of a prompt | first differences: step, llama.cpp's margin, ours in f32 |\n"
              "|---|---|---|---|---|")
    for f in found:
        odd = sum(not r["same_prompt"] for r in f["prompts"])
        for name, gaps in f["against"].items():
            gaps = [g for g in gaps if g]
            shown = "; ".join(f"{g['step']}, {g['their_margin']:.3f}{'' if g['ours_is_their_second'] else ' (its third or later)'}, "
                              f"{g['our_lead_in_f32']:+.3f}" for g in gaps)
            print(f"| {f['bundle']} | {name} | {len(PROMPTS) - len(gaps)} of {len(PROMPTS)} | {odd} | {shown} |")
    return {"peers": peers, "bundles": found}


def difference(a, ours, peer):
    """The first step at which the tokens differ; none where all are equal."""
    theirs = peer["ids"]
    if len(ours) != len(theirs):
        sys.exit(f"{len(ours)} new tokens, llama.cpp has {len(theirs)}")
    step = next((i for i, (x, y) in enumerate(zip(ours, theirs)) if x != y), None)
    if step is None:
        return None
    return {"step": step, "ours": ours[step], "theirs": theirs[step], "their_margin": peer["margin"][step],
            "ours_is_their_second": ours[step] == peer["second"][step],
            "our_lead_in_f32": lead(a, peer["prompt_ids"] + ours[:step], ours[step], theirs[step])}


def speed(a, kind, bundle):
    gguf = quantized(a, kind)
    with tempfile.TemporaryDirectory(dir=a.scratch) as folder:
        out = os.path.join(folder, "speed.json")
        side = ["--anemoe", a.anemoe, "--bundle", bundle] if bundle else []
        command = [sys.executable, pathlib.Path(__file__).with_name("alternate.py"), *side, "--llama-bench", f"{a.llama}/llama-bench",
                   "--gguf", gguf, "--threads", a.threads, "--json", out, *a.alternate]
        say(" ".join(map(str, command)))
        done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            sys.exit(done.returncode)
        print(f"{kind}{': ' + pathlib.Path(bundle).name if bundle else ''}\n\n{done.stdout}")
        with open(out) as f:
            return {"kind": kind, "bundle": bundle, **json.load(f)}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--llama", required=True, metavar="FOLDER")
    p.add_argument("--gguf", required=True)
    p.add_argument("--text")
    p.add_argument("--anemoe")
    p.add_argument("--bundle", action="append", default=[])
    p.add_argument("--speed", action="append", default=[], metavar="TYPE[=BUNDLE]", help="the bundle of about as many bits")
    p.add_argument("--no-greedy", action="store_true")
    p.add_argument("--f32", action="store_true")
    p.add_argument("--context", type=int, default=512)
    p.add_argument("--max-tokens", type=int, default=65536)
    p.add_argument("--max-new", type=int, default=48)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--scratch", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()))
    p.add_argument("--json")
    p.add_argument("alternate", nargs="*", metavar="OPTION", help="of alternate.py, behind --")
    a = p.parse_args()
    pairs = [s.partition("=")[::2] for s in a.speed]
    if not a.anemoe and (a.bundle or any(b for _, b in pairs)):
        p.error("a bundle needs --anemoe")
    doc = {"schema": 1, "gguf": pathlib.Path(a.gguf).name, "context": a.context, "max_tokens": a.max_tokens}
    if a.text:
        doc["perplexity"] = perplexities(a)
        print()
    if not a.no_greedy:
        doc["greedy"] = greedy(a)
        print()
    doc["speed"] = [speed(a, kind, bundle) for kind, bundle in pairs]
    if a.json:
        with open(a.json, "w") as f:
            json.dump(doc, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    main()
