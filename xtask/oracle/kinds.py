#!/usr/bin/env python3
"""Check that packages of every compression kind decode to the values that `anemoe quantize` claims.

    kinds.py --anemoe target/release/anemoe

For every kind, operation (conv, linear, matmul) and target (iOS18, iOS16): the package passes the checker without errors
and warnings, the checker's own decompression of its weight equals the claimed values bit by bit, and `anemoe predict`
runs it. Kinds that the target's format lacks must be refused with exit status 2 and a reason.
Needs Python with coremltools==9.0 and numpy. Exit status 0 when everything agrees.
"""
import argparse, functools, itertools, json, multiprocessing, os, subprocess, sys, tempfile

# Each processor has a case of its own.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import mil_check

LUTS = [f"lut{bits}{uniform}{tensor}" for bits in (1, 2, 3, 4, 6, 8) for uniform in ("", "-uniform") for tensor in ("", "-tensor")]
INTS = [f"int{bits}-{shared}{suffix}" for bits in (4, 8) for shared in ("tensor", "channel", "block") for suffix in ("", "-asymmetric")]
# Shapes whose channels 32 divides, and others whose groups have to shrink.
SHAPES = {"conv": [(64, 96, 1, 1), (24, 40, 3, 3)], "linear": [(64, 96), (36, 45)], "matmul": [(96, 64), (45, 36)]}


def refused_by_ios16(kind):
    return kind == "mxfp4" or kind.startswith("int4") or "block" in kind or kind.startswith("lut3") or (kind.startswith("lut") and not kind.endswith("-tensor"))


def weight_of_shape(shape):
    rng = np.random.default_rng(7)
    weight = (rng.standard_normal(shape) * 0.02).astype(np.float32)
    weight[rng.random(shape) < 0.01] *= 8
    return weight


def check_in(scratch, anemoe, op, shape, target, kind):
    """Problems of one package."""
    file, package, claimed = (os.path.join(scratch, name) for name in ("weight.npy", "out.mlpackage", "out.npy"))
    np.save(file, weight_of_shape(shape))
    command = [anemoe, "quantize", file, "--quant", kind, "--op", op, "--target", target]
    run = subprocess.run(command + ["--json", "-o", package], capture_output=True, text=True)
    if target == "ios16" and refused_by_ios16(kind):
        error = json.loads(run.stdout).get("error", {}) if run.stdout else {}
        ok = run.returncode == 2 and "iOS16" in error.get("message", "") and not os.path.exists(package)
        return [] if ok else [f"not refused: {run.returncode} {run.stdout}{run.stderr}"]
    if run.returncode != 0:
        return [run.stderr.strip()]
    problems = []
    if target == "ios16" and json.loads(run.stdout)["quant"] != kind:
        problems.append(f"became {json.loads(run.stdout)['quant']}")
    subprocess.run(command + ["-o", claimed], capture_output=True, check=True)
    checker = mil_check.Checker(package)
    problems += [f"{level} {what}: {text}" for level, what, text in checker.R.items if level in ("ERROR", "WARN")]
    evaluator = mil_check.Evaluator(checker.prog, "main", "fp16", keep=("weight",), paranoid=True)
    channels = shape[0] if op == "matmul" else shape[1]
    x = np.ones((1, channels) + tuple(shape[2:]), np.float16)
    expected = evaluator.run({"x": x}, {})["y"]
    found = evaluator.kept.get("weight")
    if found is None:
        found = {v.name: v for o in checker.prog.functions["main"].operations for v in o.outputs}["weight"].val
    found = np.asarray(found).astype(np.float16)
    values = np.load(claimed)
    if values.dtype != np.float16 or values.shape != shape or not np.array_equal(found, values):
        problems.append(f"decodes to other values than claimed ({np.abs(found.astype(float) - values.astype(float)).max()})")
    problems += [text for level, _, text in evaluator.R.items if level == "ERROR"]
    inputs, outputs = os.path.join(scratch, "in.npz"), os.path.join(scratch, "y.npz")
    np.savez(inputs, x=x)
    run = subprocess.run([anemoe, "predict", package, "--inputs", inputs, "--outputs", outputs, "--force"], capture_output=True, text=True)
    if run.returncode != 0:
        problems.append(run.stderr.strip())
    elif not np.allclose(np.load(outputs)["y"].astype(float), expected.astype(float), rtol=1e-2, atol=2e-3):
        problems.append("predict disagrees")
    return problems


def check(anemoe, case):
    with tempfile.TemporaryDirectory() as scratch:
        return case, check_in(scratch, anemoe, *case)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anemoe", required=True, help="the binary")
    anemoe = parser.parse_args().anemoe
    matrices = [(op, shape) for op, shapes in SHAPES.items() for shape in shapes]
    cases = [(*matrix, *rest) for matrix, *rest in itertools.product(matrices, ("ios18", "ios16"), ["fp16", "mxfp4"] + LUTS + INTS)]
    refused = sum(target == "ios16" and refused_by_ios16(kind) for _, _, target, kind in cases)
    failed = 0
    with multiprocessing.Pool() as pool:
        for (op, shape, target, kind), problems in pool.imap(functools.partial(check, anemoe), cases):
            failed += bool(problems)
            for problem in problems:
                print(f"FAIL {kind} {op} {list(shape)} {target}: {problem}")
    print(f"{len(cases) - refused} packages checked, {refused} refusals checked, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
