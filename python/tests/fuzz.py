"""Damages packages and gives them to every function of the module: `python fuzz.py PACKAGE.. --runs 300 --seed 1`.

Damage is in the bytes of a file, or in a field of the specification. Only Python's own exceptions may come of it. A run that takes
longer than a minute, more than 2 GiB of memory, or the interpreter itself is a fault; its number is printed.
"""

import argparse
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ALLOWED = (KeyError, TypeError, ValueError, NotImplementedError, OSError)


def damage_bytes(package, rng):
    files = [p for p in sorted(package.rglob("*")) if p.is_file()]
    path = rng.choice([p for p in files if p.stat().st_size] or files)
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 8])):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0 and data:
            data[place % len(data)] = rng.randrange(256)
        elif kind == 1:
            del data[place : place + rng.choice([1, 8, 1000, len(data)])]
        elif kind == 2:
            data[place:place] = rng.randbytes(rng.choice([1, 4, 64]))
        elif len(data) > 8:
            place %= len(data) - 8
            data[place : place + 8] = rng.choice([b"\0" * 8, b"\xff" * 8, (2**40).to_bytes(8, "little")])
    path.write_bytes(data)


def damage_spec(package, rng):
    from coremltools.proto import Model_pb2

    path = package / "Data" / "com.apple.CoreML" / "model.mlmodel"
    spec = Model_pb2.Model.FromString(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 4])):
        fields = []

        def walk(message, depth=0):
            for field, value in message.ListFields():
                repeated = hasattr(value, "__len__") and not isinstance(value, (str, bytes))
                if hasattr(value, "items") and field.message_type is not None and field.message_type.GetOptions().map_entry:
                    for key in list(value):
                        if hasattr(value[key], "ListFields"):
                            fields.append((value, key, None))
                            walk(value[key], depth + 1)
                elif field.message_type is not None:
                    for i, each in enumerate(value if repeated else [value]):
                        fields.append((message, field.name, i if repeated else None))
                        walk(each, depth + 1)
                else:
                    for i in range(len(value) if repeated else 1):
                        if i < 4:
                            fields.append((message, field.name, i if repeated else None))

        walk(spec)
        message, name, i = rng.choice(fields)
        if not hasattr(message, "ListFields"):
            del message[name]
            continue
        value = getattr(message, name) if i is None else getattr(message, name)[i]
        if isinstance(value, bool):
            new = not value
        elif isinstance(value, int):
            new = rng.choice([0, 1, 2, 3, value + 1, value - 1, -1, 7, 64, 2**20, 2**31 - 1])
        elif isinstance(value, float):
            new = rng.choice([0.0, -1.0, float("nan"), float("inf"), 1e30])
        elif isinstance(value, str):
            strings = [getattr(m, n) for m, n, j in fields if j is None and isinstance(n, str) and isinstance(getattr(m, n, None), str)]
            new = rng.choice(strings + ["", "x", value + "_"])
        elif isinstance(value, bytes):
            new = value[: rng.randrange(len(value) + 1)]
        else:
            if i is None:
                message.ClearField(name)
            elif rng.random() < 0.5:
                del getattr(message, name)[i]
            else:
                getattr(message, name).append(value)
            continue
        try:
            if i is None:
                setattr(message, name, new)
            else:
                getattr(message, name)[i] = new
        except (ValueError, TypeError):
            continue
    path.write_bytes(spec.SerializeToString())


# Forms of compression, one of which is tried.
CONFIGS = [
    {"dtype": "int8"},
    {"nbits": 3, "granularity": "per_grouped_channel", "group_size": 4},
    {"nbits": 2, "cluster_dim": 2},
    {"nbits": 4, "enable_per_channel_scale": True},
    {"target_sparsity": 0.6, "block_size": 2},
    {"n_m_ratio": (1, 2)},
]


def use(package, rng):
    import anemoe
    from anemoe.tools import random_inputs

    def run():
        model = anemoe.Model(package, threads=2)
        if sum(f.shape is not None and bool(f.shape) and _elements(f.shape) > 2**22 for f in model.inputs):
            return
        inputs = random_inputs(model)
        model.predict(dict(inputs), model.make_state() if model.states else None)
        model.trace(inputs)
        str(model), model.get_spec()

    def compress():
        with tempfile.TemporaryDirectory() as folder:
            config, samples = {**rng.choice(CONFIGS), "weight_threshold": 16}, None
            if rng.random() < 0.5 and sum(path.stat().st_size for path in package.rglob("*")) < 2**22:
                model = anemoe.Model(package)
                if all(f.shape and _elements(f.shape) <= 2**22 for f in model.inputs):
                    samples = [random_inputs(model)]
            anemoe.compress(package, config, output=os.path.join(folder, "c.mlpackage"), sample_data=samples)

    for call in (run, lambda: anemoe.verify(package), lambda: anemoe.check(package), compress):
        try:
            call()
        except ALLOWED:
            continue


def _elements(shape):
    n = 1
    for d in shape:
        n *= d
    return n


def child(packages, first, last, seed):
    for number in range(first, last):
        rng = random.Random(seed * 1000003 + number)
        print(number, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder) / "p.mlpackage"
            shutil.copytree(rng.choice(packages), package)
            for path in package.rglob("*"):
                path.chmod(0o755 if path.is_dir() else 0o644)
            damage = rng.choice([damage_bytes, damage_spec, damage_spec])
            damage(package, rng)
            use(package, rng)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if used > 2 << 30:
            raise MemoryError(f"{used} bytes")


def main(packages, runs, seed):
    """Returns the numbers of the runs that are faults."""
    faults, first = [], 0
    while first < runs:
        command = [sys.executable, __file__, "--child", str(first), "--runs", str(runs), "--seed", str(seed), *packages]
        with tempfile.TemporaryFile("w+") as out:
            try:
                status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=60 + 2 * (runs - first)).returncode
            except subprocess.TimeoutExpired:
                status = "time"
            out.seek(0)
            text = out.read()
        numbers = [int(line) for line in text.splitlines() if line.isdigit()]
        if status == 0:
            return faults
        number = numbers[-1] if numbers else first
        tail = "\n".join(text.splitlines()[-12:])
        print(f"run {number} of seed {seed}: {status}\n{tail}", file=sys.stderr)
        faults.append(number)
        first = number + 1
    return faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", type=int)
    args = parser.parse_args()
    if args.child is not None:
        child([Path(p) for p in args.packages], args.child, args.runs, args.seed)
    else:
        found = main(args.packages, args.runs, args.seed)
        print(f"{args.runs} runs, {len(found)} faults")
        sys.exit(bool(found))
