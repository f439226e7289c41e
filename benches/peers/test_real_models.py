#!/usr/bin/env python3
"""real_models.py against small programs that answer as llama.cpp's and anemoe would: python3 test_real_models.py"""
import json, math, os, pathlib, stat, subprocess, sys, tempfile, unittest

HERE = pathlib.Path(__file__).resolve().parent

# A model of 256 bytes: the next byte is the last one plus 1, the logit of which leads by 3 that of plus 2.
SCORE = r'''#!/usr/bin/env python3
import json, math, sys
bos = -1 if "nobos" in sys.argv[1] else 2
for line in sys.stdin:
    command, *words = line.split(" ", 1)
    if command.strip() == "info":
        print(json.dumps({"vocab": 256, "bos": 2, "add_bos": bos == 2}), flush=True)
    elif command == "tokenize":
        print(json.dumps([bos] * (bos == 2) + list(open(words[0].strip(), "rb").read())), flush=True)
    elif command == "score":
        ids = list(map(int, words[0].split()))
        print(json.dumps([0.5 if b == (a + 1) % 256 else 2.5 for a, b in zip(ids, ids[1:])]), flush=True)
    elif command == "greedy":
        n, *ids = map(int, words[0].split())
        print(json.dumps({"ids": [(ids[-1] + 1 + i) % 256 for i in range(n)], "second": [(ids[-1] + 2 + i) % 256 for i in range(n)],
                          "margin": [3.0] * n}), flush=True)
'''

ANEMOE = r'''#!/usr/bin/env python3
import io, json, math, struct, sys, zipfile
value = lambda name: sys.argv[sys.argv.index(name) + 1]
command, bundle = sys.argv[1:3]
def start():
    bos = json.load(open(bundle + "/chain.json"))["model"]["bos_token_id"]
    return [bos] if bos is not None and "unwritten" not in bundle else []
if command == "perplexity":
    assert "--json" in sys.argv
    ids = list(open(value("--text"), "rb").read())[:int(value("--max-tokens"))]
    if "other" in bundle:
        ids = ids[1:]
    n = int(value("--context")) - len(start())
    windows = [start() + ids[i:i + n] for i in range(0, len(ids), n)]
    nll = [0.5 if b == (a + 1) % 256 else 2.501 for w in windows for a, b in zip(w, w[1:])]
    print(json.dumps({"perplexity": math.exp(sum(nll) / len(nll)), "tokens": len(nll), "windows": len(windows), "tok_s": 9.0}))
elif command == "generate":
    assert "--ignore-eos" in sys.argv and value("--speculate") == "off" and value("--temperature") == "0"
    if "--prompt-ids" in sys.argv:
        ids = list(map(int, value("--prompt-ids").split(",")))
    else:
        text = next(a for a in sys.argv if a.startswith("--prompt="))[len("--prompt="):]
        ids = start() + list(text.encode())
        if "other" in bundle:
            ids = ids[:1] + ids[2:]
    new = [(ids[-1] + 1 + i) % 256 for i in range(int(value("--max-new")))]
    # After a prompt that ends with a comma another choice in the third step, and what follows from it.
    if "int4" in bundle and ids[-1] == ord(","):
        new = new[:2] + [(t + 1) % 256 for t in new[2:]]
    print(json.dumps({"prompt_ids": ids, "generated_ids": new}))
elif command == "golden":
    ids = list(map(int, value("--prompt-ids").split(",")))
    assert value("--decode") == "0"
    row = [0.0] * 256
    row[(ids[-1] + 1) % 256], row[(ids[-1] + 2) % 256] = 3.0, 2.75
    rows = [[0.0] * 256] * (len(ids) - 1) + [row]
    head = str({"descr": "<f4", "fortran_order": False, "shape": (len(rows), 256)}) + "\n"
    with zipfile.ZipFile(value("-o"), "w") as z:
        z.writestr("logits_full.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode()
                   + b"".join(struct.pack("<256f", *r) for r in rows))
elif command == "bench":
    json.dump({"schema": 1, "mode": "default", "machine": {"cpu": "fake", "read_gb_s": 33.0}, "prefill": [{"tokens": 512, "tok_s": 90.0}],
               "decode": [{"context": 64, "tokens": 32, "tok_s": 12.0}]}, open(value("--save"), "w"))
'''

QUANTIZE = r'''#!/usr/bin/env python3
import os, sys
source, to, kind, threads = sys.argv[-4:]
assert "--allow-requantize" in sys.argv and ("--pure" in sys.argv) == (kind == "Q4_0")
open(to, "w").write(kind)
'''

BENCH = r'''#!/usr/bin/env python3
import json, sys
value = lambda name: sys.argv[sys.argv.index(name) + 1]
# Twice as fast where a matrix has half the bits.
speed = {"Q4_0": 10.0, "Q8_0": 5.0}[open(value("-m")).read()]
row = lambda fa: dict(n_prompt=int(value("-p")), n_gen=int(value("-n")), n_depth=64 if value("-n") != "0" else 0, flash_attn=fa,
                      samples_ts=[0.1, speed * (1 if value("-n") != "0" else 8)])
print(json.dumps([row(int(fa)) for fa in value("-fa").split(",")]))
'''


class RealModels(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for name, text in (("llama-score", SCORE), ("anemoe", ANEMOE), ("llama-quantize", QUANTIZE), ("llama-bench", BENCH)):
            self.put(name, text).chmod(0o755)
        self.put("m.gguf", "GGUF")
        self.put("nobos.gguf", "GGUF")
        self.text = self.put("text.txt", "abcdefgh abc, zyx. " * 20)

    def put(self, name, text):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def bundle(self, name, bos=2):
        return self.put(f"{name}.anemoe/chain.json", json.dumps({"model": {"bos_token_id": bos}})).parent

    def run_it(self, *options, gguf="m.gguf"):
        out = self.folder / "out.json"
        command = [sys.executable, HERE / "real_models.py", "--llama", self.folder, "--gguf", self.folder / gguf, "--scratch", self.folder,
                   "--context", "64", "--max-new", "8", "--json", out, *options]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done, json.loads(out.read_text())

    def ours(self, *names, bos=2):
        return ["--anemoe", self.folder / "anemoe", *(x for n in names for x in ("--bundle", self.bundle(n, bos)))]

    def test_perplexity_over_the_same_tokens(self):
        done, doc = self.run_it("--text", self.text, "--no-greedy", "--max-tokens", "150", *self.ours("fp16", "other"))
        theirs, fp16, other = doc["perplexity"]
        # Two windows of 63 tokens of the text and one of 24, each behind the starting token.
        self.assertEqual((theirs["tokens"], theirs["windows"], theirs["bos"]), (150, 3, 2))
        self.assertTrue(fp16["same_tokens"])
        self.assertTrue(0 < fp16["over_llama"] < 0.003)
        self.assertIn("| fp16.anemoe | ", done.stdout)
        ids = list(self.text.read_bytes())[:150]
        rows = [[2, *ids[i:i + 63]] for i in range(0, 150, 63)]
        nll = [0.5 if b == a + 1 else 2.5 for r in rows for a, b in zip(r, r[1:])]
        self.assertAlmostEqual(theirs["perplexity"], math.exp(sum(nll) / len(nll)))

    def test_other_counts_of_tokens_are_told(self):
        self.text.write_text("x" * 100)
        done, doc = self.run_it("--text", self.text, "--no-greedy", *self.ours("other"))
        self.assertFalse(doc["perplexity"][1]["same_tokens"])
        self.assertIn("99 (other tokens)", done.stdout)

    def test_the_bundle_says_how_a_text_starts(self):
        done, doc = self.run_it("--text", self.text, "--no-greedy", "--max-tokens", "128", *self.ours("fp16"), gguf="nobos.gguf")
        self.assertEqual([r["bos"] for r in doc["perplexity"]], [2, 2])
        self.assertIn("bundles start a text with 2, llama.cpp with None", done.stderr)
        _, doc = self.run_it("--text", self.text, "--no-greedy", "--max-tokens", "128", *self.ours("fp16", bos=None), gguf="nobos.gguf")
        self.assertEqual([(r["bos"], r["tokens"]) for r in doc["perplexity"]], [(None, 126), (None, 126)])
        # A token that is named and never written.
        _, doc = self.run_it("--text", self.text, "--no-greedy", "--max-tokens", "128", *self.ours("unwritten"), gguf="nobos.gguf")
        self.assertEqual([(r["bos"], r["tokens"]) for r in doc["perplexity"]], [(None, 126), (None, 126)])

    def test_equal_and_different_tokens(self):
        done, doc = self.run_it(*self.ours("fp16", "int4"))
        fp16, int4 = doc["greedy"]["bundles"]
        self.assertEqual(fp16["against"], {"llama.cpp": [None] * 20})
        self.assertIn("| fp16.anemoe | llama.cpp | 20 of 20 | 0 |  |", done.stdout)
        gaps = [g for g in int4["against"]["llama.cpp"] if g]
        commas = [r for r in doc["greedy"]["peers"]["llama.cpp"] if r["prompt"].endswith(",")]
        self.assertEqual(len(gaps), len(commas))
        self.assertEqual(gaps[0], {"step": 2, "ours": 48, "theirs": 47, "their_margin": 3.0, "ours_is_their_second": True,
                                   "our_lead_in_f32": -0.25})
        self.assertIn("2, 3.000, -0.250", done.stdout)

    def test_prompts_that_are_tokenized_otherwise_are_told(self):
        done, doc = self.run_it(*self.ours("other"))
        self.assertIn("| other.anemoe | llama.cpp | 20 of 20 | 20 |", done.stdout)

    def test_speed_of_each_type(self):
        done, doc = self.run_it("--no-greedy", "--anemoe", self.folder / "anemoe", "--speed", f"Q4_0={self.bundle('lut4')}",
                                "--speed", f"Q8_0={self.bundle('int8')}", "--", "--rounds", "1", "--max-busy", "99")
        rows = {s["kind"]: {r["figure"]: r for r in s["figures"]} for s in doc["speed"]}
        self.assertAlmostEqual(rows["Q4_0"]["decode at 64"]["ratio"], 1.2)
        self.assertAlmostEqual(rows["Q8_0"]["decode at 64"]["ratio"], 2.4)
        self.assertEqual(rows["Q8_0"]["prefill 512"]["llama_tok_s"], 40.0)
        self.assertIn("Q4_0: lut4.anemoe", done.stdout)

    def test_llama_alone(self):
        _, doc = self.run_it("--text", self.text, "--f32", "--speed", "Q4_0", "--", "--rounds", "1", "--max-busy", "99")
        self.assertEqual([r["what"] for r in doc["perplexity"]], ["llama.cpp", "llama.cpp, F32"])
        self.assertEqual([len(rows) for rows in doc["greedy"]["peers"].values()], [20, 20])
        self.assertEqual(doc["speed"][0]["figures"][0]["llama_tok_s"], 10.0)


if __name__ == "__main__":
    unittest.main()
