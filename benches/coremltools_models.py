#!/usr/bin/env python3
"""Networks that coremltools converts (networks.py), run by the Python package: whether results agree with torch, and how fast they are.

    pip install anemoe torch torchvision transformers coremltools==9.0 onnx onnxruntime "numpy<2.4"
    coremltools_models.py [--networks resnet18,unet | all] [--keep FOLDER] [--json OUT.json]
    coremltools_models.py --time torch,onnx,fp32,fp16 [--threads 2] [--cpu] [--rounds 9] [--networks resnet18,unet,..]

Each network is converted in fp16 and in fp32. Results are compared with torch's in float32, within the tolerances of coremltools'
own tests of its converter: 1e-4 and a relative 1e-5 in fp32, 0.5 and a relative 0.05 in fp16; and, as these are wide for small
numbers, within a relative error of 0.1 (fp32: 1e-4) of all numbers of a result. With `--time`, processes of the named kinds run the network in
turn, twice at a time, of which the second counts: torch and onnxruntime in float32, the fp16 package with precision fp32 and fp16; medians. `--cpu` measures processor time, for
one thread on a machine that others use too.
"""
import argparse, gc, json, logging, os, statistics, subprocess, sys, tempfile, time, warnings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KMP_BLOCKTIME", "0")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
import numpy as np

# Absolute and relative tolerance, and of the norm.
TOLERANCES = {"fp32": (1e-4, 1e-5, 1e-4), "fp16": (0.5, 0.05, 0.1)}
# What is compared: precision of the package and of the run.
RUNS = [("fp32", "fp32"), ("fp16", "fp32"), ("fp16", "fp16")]


def traced(model, inputs):
    import torch

    with torch.no_grad():
        return torch.jit.trace(model, tuple(inputs.values()), check_trace=False)


def convert(model, inputs, precision, path):
    import coremltools as ct
    import torch

    floats = np.float32 if precision == "fp32" else np.float16
    is_int = lambda v: v.dtype == torch.int32
    types = [ct.TensorType(n, v.shape, dtype=np.int32 if is_int(v) else np.float32) for n, v in inputs.items()]
    states = [ct.StateType(ct.TensorType(shape=b.shape, dtype=np.float16), name=n) for n, b in model.named_buffers() if n.endswith("_cache")]
    kind = ct.precision.FLOAT32 if precision == "fp32" else ct.precision.FLOAT16
    target = ct.target.iOS18 if states else ct.target.iOS17
    made = ct.convert(traced(model, inputs), inputs=types, states=states or None, compute_precision=kind, convert_to="mlprogram",
                      minimum_deployment_target=target, skip_model_load=True)
    made.save(path)


def results(model, inputs):
    """torch's results, caches empty before."""
    import torch

    for name, buffer in model.named_buffers():
        if name.endswith("_cache"):
            buffer.zero_()
    with torch.inference_mode():
        y = model(*inputs.values())
    return [v.numpy() for v in (y if isinstance(y, (tuple, list)) else [y])]


def difference(got, expected, precision):
    """The relative error over all numbers, and whether the result is within the tolerances."""
    absolute, relative, norm = TOLERANCES[precision]
    if got.size != expected.size:
        return float("nan"), False
    got, expected = got.ravel().astype(np.float64), expected.ravel().astype(np.float64)
    error = float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30))
    return error, bool(np.allclose(got, expected, atol=absolute, rtol=relative) and error <= norm)


def compare(name, folder):
    """Converts a network, runs it, and returns a row of errors by run."""
    import anemoe
    import networks

    model, inputs = networks.make(name)
    theirs = results(model, inputs)
    row, given = {"network": name}, {n: v.numpy() for n, v in inputs.items()}
    for precision in ("fp16", "fp32"):
        package = os.path.join(folder, f"{precision}.mlpackage")
        if not os.path.exists(package):
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith("_cache"):
                    buffer.zero_()
            convert(model, inputs, precision, package)
        for _, run in [r for r in RUNS if r[0] == precision]:
            ours = anemoe.Model(package, precision=run)
            state = ours.make_state() if ours.states else None
            started = time.perf_counter()
            got = list((ours.predict(given, state) if ours.states else ours.predict(given)).values())
            seconds = time.perf_counter() - started
            expected = networks.expected(name, got, theirs)
            pairs = [difference(g, e, precision) for g, e in zip(got, expected)]
            fits = len(got) == len(expected) and all(ok for _, ok in pairs)
            row[f"{precision} as {run}"] = {"error": max(e for e, _ in pairs), "fits": fits, "seconds": seconds}
    return row


class Runner:
    """A process that runs a network once for each line it is sent."""

    def __init__(self, kind, name, folder, args, python=sys.executable):
        clock = ["--cpu"] if args.cpu else []
        self.process = subprocess.Popen([python, os.path.abspath(__file__), "--run", kind, name, folder, str(args.threads), *clock],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self.process.stdout.readline()

    def run(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def serve(kind, name, folder, threads, clock):
    """What a `Runner`'s process does."""
    if kind in ("torch", "onnx"):
        import torch
        import networks

        model, inputs = networks.make(name)
        torch.set_num_threads(threads)
    if kind == "torch":
        run = lambda: results(model, inputs)
    elif kind == "onnx":
        import onnxruntime

        path = os.path.join(folder, "model.onnx")
        if not os.path.exists(path):
            torch.onnx.export(model, tuple(inputs.values()), path, input_names=list(inputs), opset_version=18, dynamo=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        given = {n: v.numpy() for n, v in inputs.items() if n in {i.name for i in session.get_inputs()}}
        run = lambda: session.run(None, given)
    else:
        import anemoe

        model = anemoe.Model(os.path.join(folder, "fp16.mlpackage"), precision=kind, threads=threads)
        given = dict(np.load(os.path.join(folder, "inputs.npz")))
        if model.states:
            state = model.make_state()
            run = lambda: model.predict(given, state)
        else:
            run = lambda: model.predict(given)
    run()
    print("ready", flush=True)
    for _ in sys.stdin:
        # onnxruntime's threads spin after a run, and would delay the next process.
        time.sleep(0.05)
        run()
        started = clock()
        run()
        print(1e3 * (clock() - started), flush=True)


def measure(name, folder, args):
    """Runs a network by all kinds in turn and returns a row of medians."""
    import networks

    package = os.path.join(folder, "fp16.mlpackage")
    model, inputs = networks.make(name)
    if not os.path.exists(package):
        convert(model, inputs, "fp16", package)
    np.savez(os.path.join(folder, "inputs.npz"), **{n: v.numpy() for n, v in inputs.items()})
    del model
    gc.collect()
    kinds = {k: Runner(k, name, folder, args) for k in args.time.split(",")}
    if args.before:
        kinds |= {f"{k} before": Runner(k, name, folder, args, args.before) for k in args.time.split(",") if k.startswith("fp")}
    kinds = {k: r for k, r in kinds.items() if r.ready}
    times = {k: [] for k in kinds}
    for round in range(args.rounds + 1):
        for k, runner in kinds.items():
            ms = runner.run()
            if round:  # The first one warms up.
                times[k].append(ms)
    for runner in kinds.values():
        runner.end()
    return {"network": name, "threads": args.threads, **{k: statistics.median(v) for k, v in times.items()}}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--networks", default="all")
    p.add_argument("--time", help="kinds to time: torch, onnx, fp32, fp16")
    p.add_argument("--before", help="a Python with another version of the package, timed beside this one's")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--cpu", action="store_true", help="time processor time")
    p.add_argument("--keep", help="folder of the packages, which are used again")
    p.add_argument("--json")
    p.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.run:
        return serve(*args.run[:3], int(args.run[3]), time.process_time if args.cpu else time.perf_counter)
    import networks

    rows, wrong = [], []
    names = list(networks.NETWORKS) if args.networks == "all" else args.networks.split(",")
    for name in names:
        work = tempfile.TemporaryDirectory()
        folder = os.path.join(args.keep or work.name, name)
        os.makedirs(folder, exist_ok=True)
        try:
            row = measure(name, folder, args) if args.time else compare(name, folder)
        except Exception as e:
            row = {"network": name, "fault": f"{type(e).__name__}: {str(e).splitlines()[0][:300] if str(e) else ''}"}
        rows.append(row)
        if "fault" in row:
            wrong.append(name)
            print(f"{name:22} {row['fault']}", flush=True)
        elif args.time:
            best = min([v for k, v in row.items() if k in ("torch", "onnx")], default=float("nan"))
            shown = [f"{k} {v:8.2f} ms ({v / best:5.2f})" for k, v in row.items() if isinstance(v, float)]
            print(f"{name:22} " + "  ".join(shown), flush=True)
        else:
            shown = [f"{k} {v['error']:.1e}{'' if v['fits'] else ' DIFFERS'}" for k, v in row.items() if isinstance(v, dict)]
            wrong += [name] if not all(v["fits"] for v in row.values() if isinstance(v, dict)) else []
            print(f"{name:22} " + "  ".join(shown), flush=True)
        work.cleanup()
        gc.collect()
    print(f"{len(names) - len(wrong)} of {len(names)} networks run" + ("" if args.time else " and agree") + (f"; not {', '.join(wrong)}" if wrong else ""))
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
