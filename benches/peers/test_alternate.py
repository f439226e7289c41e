#!/usr/bin/env python3
"""alternate.py against two small programs that print what `anemoe bench` and llama-bench would: python3 test_alternate.py"""
import json, os, stat, subprocess, sys, tempfile, unittest

HERE = os.path.dirname(os.path.abspath(__file__))

ANEMOE = r'''#!/usr/bin/env python3
import argparse, json, os, sys
assert sys.argv[1] == "bench"
p = argparse.ArgumentParser()
p.add_argument("bundle"); p.add_argument("--save"); p.add_argument("--prefill", type=int); p.add_argument("--context")
p.add_argument("--no-journal", action="store_true")
p.add_argument("--decode", type=int); p.add_argument("--repetitions", type=int); p.add_argument("--exact", action="store_true")
a = p.parse_args(sys.argv[2:])
log = os.path.join(os.path.dirname(sys.argv[0]), "log")
open(log, "a").write("anemoe\n")
n = open(log).read().count("anemoe")
speed = lambda context: (20.0 if a.exact else 10.0) + n - context / 1024
json.dump({"schema": 1, "mode": "exact" if a.exact else "default",
           "machine": {"cpu": "fake", "isa": "none", "threads": 2, "read_gb_s": 33.0}, "load_s": 0.5,
           "prefill": [{"tokens": a.prefill, "tok_s": 100.0 + n}],
           "decode": [{"context": c, "tokens": a.decode, "tok_s": speed(c), "gb_per_token": 2.0, "gb_s": 2 * speed(c),
                       "share_of_bandwidth": 2 * speed(c) / 33} for c in map(int, a.context.split(","))]}, open(a.save, "w"))
'''

LLAMA = r'''#!/usr/bin/env python3
import argparse, json, os, sys
p = argparse.ArgumentParser()
for o in ("-m", "-t", "-fa", "--repack", "-r", "-o", "-p", "-n"):
    p.add_argument(o)
p.add_argument("-d", default="0")
a = p.parse_args()
ints = lambda s: [int(x) for x in s.split(",")]
open(os.path.join(os.path.dirname(sys.argv[0]), "log"), "a").write("llama\n")
rows = []
for depth in ints(a.d):
    for fa in ints(a.fa):
        for prompt, gen in [(int(a.p), 0), (0, int(a.n))]:
            if prompt + gen == 0:
                continue
            # Flash attention: faster prompts, slower decoding. No repacking: half as fast. The first sample is cold.
            speed = (50.0 + 10 * fa if prompt else 6.0 - fa * 2) * (1 if a.repack == "1" else 0.5)
            rows.append(dict(build_commit="f00", build_number=1, cpu_info="fake", model_type="fake", model_size=1, model_n_params=1,
                             n_threads=int(a.t), n_prompt=prompt, n_gen=gen, n_depth=depth, flash_attn=fa,
                             samples_ts=[0.1] + [speed] * (int(a.r) - 1)))
print(json.dumps(rows))
'''


class Alternate(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        for name, text in (("anemoe", ANEMOE), ("llama-bench", LLAMA)):
            path = self.path(name)
            with open(path, "w") as f:
                f.write(text)
            os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)
        os.mkdir(self.path("b.anemoe"))
        for name, text in (("b.anemoe/chain.json", "{}"), ("m.gguf", "GGUF"), ("m.json", '{"bytes_per_token": 2400000000}')):
            with open(self.path(name), "w") as f:
                f.write(text)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def alternate(self, *options, status=0):
        command = [sys.executable, os.path.join(HERE, "alternate.py"), "--json", self.path("out.json"), "--max-busy", "99", *options]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(done.returncode, status, done.stderr)
        if status:
            return done.stderr, None
        with open(self.path("out.json")) as f:
            return done.stdout, json.load(f)

    def ours(self):
        return ["--anemoe", self.path("anemoe"), "--bundle", self.path("b.anemoe")]

    def theirs(self):
        return ["--llama-bench", self.path("llama-bench"), "--gguf", self.path("m.gguf")]

    def test_both(self):
        text, doc = self.alternate(*self.ours(), *self.theirs(), "--context", "64,4096", "--rounds", "2")
        rows = {r["figure"]: r for r in doc["figures"]}
        self.assertEqual(list(rows), ["decode at 64", "decode at 4096", "prefill 512"])
        # The best setting differs from figure to figure.
        self.assertEqual(rows["decode at 64"]["llama_setting"], "-fa 0 --repack 1")
        self.assertEqual(rows["prefill 512"]["llama_setting"], "-fa 1 --repack 1")
        self.assertEqual(rows["decode at 64"]["llama_tok_s"], 6.0)  # the cold sample is not in it
        self.assertEqual(rows["prefill 512"]["llama_tok_s"], 60.0)
        self.assertEqual(rows["decode at 64"]["anemoe_all"], [11 - 0.0625, 12 - 0.0625])
        self.assertEqual(rows["decode at 4096"]["anemoe_all"], [7, 8])
        self.assertAlmostEqual(rows["decode at 64"]["anemoe_tok_s"], 11.5 - 0.0625)
        self.assertAlmostEqual(rows["decode at 64"]["ratio"], (11.5 - 0.0625) / 6)
        self.assertAlmostEqual(rows["decode at 64"]["llama_gb_s"], 14.4)
        self.assertAlmostEqual(rows["decode at 64"]["llama_share_of_bandwidth"], 14.4 / 33)
        # Settings that are far behind run in the first round only.
        self.assertEqual({k: len(v) for k, v in rows["decode at 64"]["llama_all"].items()},
                         {"-fa 0 --repack 1": 2, "-fa 1 --repack 1": 1, "-fa 0 --repack 0": 1, "-fa 1 --repack 0": 1})
        self.assertIn("| decode at 64 | 11.44 |", text)
        self.assertIn("| prefill 512 |", text)
        # The second round begins with the other side.
        with open(self.path("log")) as f:
            order = f.read().split()
        self.assertEqual(order, ["anemoe"] + ["llama"] * 4 + ["llama"] * 2 + ["anemoe"])

    def test_one_side(self):
        text, doc = self.alternate(*self.theirs(), "--rounds", "1", "--settings", "0/1")
        self.assertEqual(doc["figures"][0]["llama_tok_s"], 6.0)
        self.assertIsNone(doc["figures"][0]["ratio"])
        text, doc = self.alternate(*self.ours(), "--rounds", "1", "--exact")
        self.assertEqual(doc["mode"], "exact")
        self.assertGreater(doc["figures"][0]["anemoe_tok_s"], 20)

    def test_failure_is_told(self):
        text, _ = self.alternate("--anemoe", "false", "--bundle", self.path("b.anemoe"), status=1)
        self.assertIn("exit status 1", text)
        text, _ = self.alternate("--anemoe", self.path("anemoe"), status=2)
        self.assertIn("--bundle", text)


if __name__ == "__main__":
    unittest.main()
