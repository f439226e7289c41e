#!/usr/bin/env python3
"""Check Core ML packages with mil_check.py, and `anemoe predict` against its evaluator on random inputs.

    agree.py --anemoe target/release/anemoe PACKAGE_OR_FOLDER...

For every package found: no error and no warning of the checker; for every function, two consecutive runs in fp16 with
states carried over, every output and state of the executor at a cosine of at least 0.9999 to the evaluator's.
Needs Python with coremltools==9.0, numpy and safetensors. Exit status 0 when everything agrees.
"""
import argparse, functools, multiprocessing, os, subprocess, sys, tempfile

# Each processor has a package of its own.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import mil_check

MIN_COSINE = 0.9999


def packages(paths):
    for path in paths:
        if path.rstrip("/").endswith(".mlpackage"):
            yield path
            continue
        for root, folders, _ in sorted(os.walk(path)):
            for name in sorted(folders):
                if name.endswith(".mlpackage"):
                    yield os.path.join(root, name)


def cosine(a, b):
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    if a.shape != b.shape:
        return -1.0
    norm = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / norm) if norm else float((a == b).all())


def random_inputs(checker, function, seed):
    rng = np.random.default_rng(seed)
    inputs = {}
    for name, (shape, dtype) in checker.input_shapes(function).items():
        inputs[name] = rng.standard_normal(shape).astype(np.float16)
        # A cache row is written by at most one token, as the host does it.
        if name == "kv_place":
            # Channels-last forms have slots last: [1, 1, T, slots].
            is_last = checker.input_shapes(function)["kv_keep"][0][3] > 1
            rows = inputs[name][0, 0] if is_last else inputs[name][0, 0].T
            rows[:] = 0
            for token, row in enumerate(rows):
                row[(seed * 7 + token) % len(row)] = 1
        if name == "kv_keep":
            inputs[name] = rng.integers(0, 2, shape).astype(np.float16)
        # Some experts are not chosen.
        if name == "routing":
            inputs[name] = np.abs(inputs[name]) * (rng.random(shape) < 0.6)
            inputs[name] = inputs[name].astype(np.float16)
    return inputs


def check(anemoe, functions_wanted, path):
    checker = mil_check.Checker(path)
    problems = [f"{level} {kind}: {text}" for level, kind, text in checker.R.items if level in ("ERROR", "WARN")]
    lowest = 1.0
    functions = sorted(checker.prog.functions) if checker.prog is not None else []
    for function in functions[:functions_wanted]:
        with tempfile.TemporaryDirectory() as scratch:
            files, state, expected = [], {}, []
            for step in range(2):
                inputs = random_inputs(checker, function, step + 1)
                files.append(os.path.join(scratch, f"in{step}.npz"))
                np.savez(files[-1], **inputs)
                outputs, state = checker.run(inputs, function, "fp16", state)
                states = {"state:" + name: np.array(value) for name, value in state.items()}
                expected.append({**{k: np.array(v) for k, v in outputs.items()}, **states})
            command = [anemoe, "predict", path, "--function", function, "--precision", "fp16", "--force"]
            command += [argument for file in files for argument in ("--inputs", file)]
            command += ["--outputs", os.path.join(scratch, "out{}.npz")]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode != 0:
                problems.append(f"{function}: predict failed: {run.stderr.strip()}")
                continue
            for step in range(2):
                found = dict(np.load(os.path.join(scratch, f"out{step}.npz")))
                for name, value in expected[step].items():
                    agreement = cosine(found[name], value) if name in found else -1.0
                    lowest = min(lowest, agreement)
                    if not agreement >= MIN_COSINE:
                        problems.append(f"{function}, run {step}, {name}: cosine {agreement:.6f}")
    return path, len(functions), lowest, problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anemoe", required=True, help="the binary")
    parser.add_argument("--functions", type=int, default=1 << 30, help="most functions that are run per package")
    parser.add_argument("paths", nargs="+", help="packages, or folders that hold some")
    arguments = parser.parse_args()
    checked = failed = 0
    lowest = 1.0
    with multiprocessing.Pool() as pool:
        one = functools.partial(check, arguments.anemoe, arguments.functions)
        for path, functions, cosine_found, problems in pool.imap(one, packages(arguments.paths)):
            checked += 1
            failed += bool(problems)
            lowest = min(lowest, cosine_found)
            print(f"{'FAIL' if problems else 'ok  '} {path}: {functions} functions, lowest cosine {cosine_found:.7f}", flush=True)
            for problem in problems:
                print(f"     {problem}")
    print(f"{checked} packages checked, {failed} refused, lowest cosine {lowest:.7f}")
    return 1 if failed or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
