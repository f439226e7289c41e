#!/usr/bin/env python3
"""Weight compression: `anemoe quantize` against coremltools 9 on the same file, alternating, medians.

    quantize_vs_coremltools.py --anemoe target/release/anemoe [--runs 3] [--quick] [--json OUT.json]

The weight is a convolution's [45056, 704, 1, 1]: numpy default_rng(1234), N(0, 0.02), 0.1 % of the entries times 10, cast
to fp16. coremltools' time is that of the call to palettize_weights or linear_quantize_weights on a loaded model, with two
workers where it can use them; ours is the `seconds` of `anemoe quantize --json` on the same weight in memory, with all
processors. The mean squared errors are computed here, from both decoded weights, in float64. --quick takes 2048 rows.
Needs Python with coremltools==9.0, numpy and (for coremltools' k-means) scikit-learn.
"""
import argparse, json, logging, os, statistics, subprocess, sys, tempfile, time, warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
import numpy as np
import coremltools as ct
import coremltools.optimize.coreml as cto
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

# name, our kind and flags, rows, coremltools' configuration, wanted (ratio of times, ratio of errors)
CASES = [
    ("LUT4 k-means g32", ["--quant", "lut4"], None, ("kmeans", 4, 32), (80, 1.0001)),
    ("LUT4 k-means g32, exact", ["--quant", "lut4", "--exact"], None, ("kmeans", 4, 32), (8, 1.000001)),
    ("LUT8 k-means g32, 2048 rows", ["--quant", "lut8"], 2048, ("kmeans", 8, 32), (200, 1.0)),
    ("LUT4 k-means g8, 2048 rows", ["--quant", "lut4", "--group-size", "8"], 2048, ("kmeans", 4, 8), (None, 1.0)),
    ("LUT4 uniform g32", ["--quant", "lut4-uniform"], None, ("uniform", 4, 32), (15, 1.0)),
    ("int8 per tensor", ["--quant", "int8-tensor"], None, ("int8", "per_tensor", None), (10, 0.55)),
    ("int8 per channel", ["--quant", "int8-channel"], None, ("int8", "per_channel", None), (10, 0.985)),
    ("int4 per block 32", ["--quant", "int4-block"], None, ("int4", "per_block", 32), (10, 0.82)),
]


def weight(rows):
    rng = np.random.default_rng(1234)
    w = rng.standard_normal((45056, 704), dtype=np.float32) * 0.02
    w[rng.random((45056, 704)) < 0.001] *= 10
    return w[:rows].astype(np.float16)


def model(w):
    rows, cols = w.shape
    @mb.program(input_specs=[mb.TensorSpec((1, cols, 1, 1), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x):
        return mb.conv(x=x, weight=w.reshape(rows, cols, 1, 1), name="y")
    return ct.convert(program, minimum_deployment_target=ct.target.iOS18, skip_model_load=True,
                      compute_precision=ct.precision.FLOAT16)


def coremltools_run(mlmodel, config):
    mode, detail, group = config
    if mode in ("kmeans", "uniform"):
        op = cto.OpPalettizerConfig(mode=mode, nbits=detail, granularity="per_grouped_channel", group_size=group,
                                    **({"num_kmeans_workers": 2} if mode == "kmeans" else {}))
        call = cto.palettize_weights
    else:
        op = cto.OpLinearQuantizerConfig(mode="linear_symmetric", dtype=mode, granularity=detail,
                                         **({"block_size": group} if group else {}))
        call = cto.linear_quantize_weights
    start = time.perf_counter()
    compressed = call(mlmodel, cto.OptimizationConfig(global_config=op))
    seconds = time.perf_counter() - start
    for operation in compressed._mil_program.functions["main"].operations:
        if operation.op_type.startswith("constexpr"):
            return seconds, operation.materialized_val_inference()
    raise RuntimeError("coremltools compressed nothing")


def child(name, file, decoded):
    """One coremltools run in a process of its own: its worker pool serves one call per process."""
    config = next(case[3] for case in CASES if case[0] == name)
    w = np.load(file)
    seconds, value = coremltools_run(model(w.reshape(w.shape[:2])), config)
    np.save(decoded, np.asarray(value))
    print(json.dumps({"seconds": seconds}))


def main():
    if sys.argv[1:2] == ["--child"]:
        return child(*sys.argv[2:5])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anemoe", required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--only", help="cases whose name contains this")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, flags, rows, config, wanted in CASES:
            if arguments.only and arguments.only not in name:
                continue
            w = weight(2048 if arguments.quick else rows or 45056)
            file, decoded = os.path.join(scratch, "w.npy"), os.path.join(scratch, "d.npy")
            np.save(file, w.reshape(*w.shape, 1, 1))
            theirs_file = os.path.join(scratch, "t.npy")
            ours, theirs = [], []
            mse = lambda v: float(np.mean((np.asarray(v, np.float32).reshape(w.shape) - w.astype(np.float32)) ** 2, dtype=np.float64))
            for _ in range(arguments.runs):
                out = subprocess.run([arguments.anemoe, "quantize", file, "--json", "--force", *flags, "-o", decoded],
                                     capture_output=True, text=True, check=True)
                ours.append(json.loads(out.stdout)["seconds"])
                out = subprocess.run([sys.executable, __file__, "--child", name, file, theirs_file],
                                     capture_output=True, text=True)
                if out.returncode != 0:
                    sys.exit(f"{name}: coremltools failed: {out.stderr[-500:]}")
                theirs.append(json.loads(out.stdout.strip().splitlines()[-1])["seconds"])
            our_mse, their_mse = mse(np.load(decoded)), mse(np.load(theirs_file))
            t0, t1 = statistics.median(theirs), statistics.median(ours)
            result = {"case": name, "weights": int(w.size), "coremltools_s": t0, "anemoe_s": t1, "times_faster": t0 / t1,
                      "coremltools_mse": their_mse, "anemoe_mse": our_mse, "mse_ratio": our_mse / their_mse,
                      "mweights_per_s": w.size / t1 / 1e6, "wanted": wanted}
            results.append(result)
            print(f"{name:30} {t0:8.3f} s {t1:8.4f} s  {t0 / t1:7.1f} x (wanted {wanted[0]})  "
                  f"mse {their_mse:.6e} {our_mse:.6e}  ratio {our_mse / their_mse:.7f} (wanted {wanted[1]})", flush=True)
    if arguments.json:
        with open(arguments.json, "w") as f:
            json.dump(results, f, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
