#!/usr/bin/env python3
"""Runs .mlpackage functions on Apple's own CPU kernels, and compares with `anemoe predict`.

Apple's Core AI runtime (package coreai-core, BSD-3) executes on Linux. This script translates the MIL of a package op by op
into a Core AI program (weights as they are stored: tables, indices, scales), runs three steps with random inputs and the
states carried over, and prints the largest difference to the executor of anemoe.

    pip install coreai-core==1.0.0b3 coremltools==9.0          # Python 3.11, Linux x86-64
    apple_cpu.py --anemoe target/release/anemoe BUNDLE_OR_PACKAGE... [--precision f32|f16] [--function NAME] [--limit 1e-5]

What it shows: kernels of Apple, given this reading of MIL, compute what the executor computes, decoding of tables, states and
several functions included. What it does not: that Core ML loads the package, or where an op would run.
f32 is the comparison that counts (sums of a fp16 matrix product in Core AI are in fp16; they are done in f32 here).
Ops that it lacks end the run with the op's name. A C++ error of the runtime ends a process, so each package has one of its own.
Exit status 1 where a difference exceeds the limit.
"""

import argparse, asyncio, glob, multiprocessing, os, struct, subprocess, sys, tempfile, traceback
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from pathlib import Path
import logging

logging.disable(logging.WARNING)
import coreai.authoring as A
from coreai.authoring import AIProgram, Module
from coreai._compiler.dialects import coreai as ops
from coreai._compiler.dialects._coreai_ops_gen import ConstantOp
from coreai._compiler.ir import RankedTensorType, F16Type, F32Type, IntegerType, DenseResourceElementsAttr, InsertionPoint
from coreai._compiler._mlir_libs._coreaiIR._bindings.mlir.dialects.coreai import HandleType, TokenType
from coreai.authoring.graph_builder import GraphOp
from coreai.runtime import NDArray
from coremltools.proto import Model_pb2, MIL_pb2

DT = {
    MIL_pb2.FLOAT16: np.float16,
    MIL_pb2.FLOAT32: np.float32,
    MIL_pb2.INT32: np.int32,
    MIL_pb2.INT16: np.int16,
    MIL_pb2.UINT16: np.uint16,
    MIL_pb2.INT8: np.int8,
    MIL_pb2.UINT8: np.uint8,
    MIL_pb2.BOOL: np.bool_,
}
SUB = {MIL_pb2.UINT4: 4, MIL_pb2.UINT6: 6, MIL_pb2.UINT3: 3, MIL_pb2.UINT2: 2, MIL_pb2.UINT1: 1, MIL_pb2.INT4: 4}


def dims(t):
    return [int(d.constant.size) for d in t.dimensions]


class Pkg:
    def __init__(s, p):
        s.dir = p
        m = Model_pb2.Model()
        f = glob.glob(p + "/Data/com.apple.CoreML/*.mlmodel")[0]
        m.ParseFromString(open(f, "rb").read())
        s.m = m
        s.w = {}

    def blob(s, v):
        fn = v.blobFileValue.fileName.replace("@model_path", s.dir + "/Data/com.apple.CoreML")
        if fn not in s.w:
            s.w[fn] = np.memmap(fn, np.uint8, "r")
        b = s.w[fn]
        o = v.blobFileValue.offset
        sent, dt, size, off = struct.unpack("<IIQQ", bytes(b[o : o + 24]))
        assert sent == 0xDEADBEEF
        return np.array(b[off : off + size])

    def value(s, v):
        """-> numpy array, or (packed bytes, shape, bits, signed)"""
        t = v.type.tensorType
        sh = dims(t)
        if v.WhichOneof("value") == "blobFileValue":
            raw = s.blob(v)
            if t.dataType in SUB:
                return (raw, sh, SUB[t.dataType], t.dataType == MIL_pb2.INT4)
            return raw.view(DT[t.dataType]).reshape(sh)
        x = v.immediateValue.tensor
        k = x.WhichOneof("value")
        if k == "strings":
            r = [y for y in x.strings.values]
            return r[0] if not sh else r
        if k == "bytes":
            if t.dataType in SUB:
                return (np.frombuffer(x.bytes.values, np.uint8), sh, SUB[t.dataType], False)
            return np.frombuffer(x.bytes.values, DT[t.dataType]).reshape(sh)
        return np.array(list(getattr(x, k).values), DT.get(t.dataType, np.int32)).reshape(sh)


def res(arr, shape, ty, name):
    arr = np.ascontiguousarray(arr).reshape(-1)
    arr.flags.writeable = False
    return ConstantOp(value=DenseResourceElementsAttr.get_from_buffer(arr, name, RankedTensorType.get(shape, ty))).result


class Tr:
    def __init__(s, pkg, prec):
        s.p = pkg
        s.prec = prec
        s.np = np.float16 if prec == "f16" else np.float32

    def fty(s):
        return F16Type.get() if s.prec == "f16" else F32Type.get()

    def c(s, a):
        if a.dtype in (np.float16, np.float32):
            a = a.astype(s.np)
            if a.size > 8:
                return res(a, list(a.shape), s.fty(), "w")
            return ops.constant(a)
        return ops.constant(a)

    def function(s, name, fn):
        b = fn.block_specializations[fn.opset]
        ins = []
        sts = []
        for i in fn.inputs:
            if i.type.WhichOneof("type") == "stateType":
                sts.append((i.name, dims(i.type.stateType.wrappedType.tensorType)))
            else:
                ins.append((i.name, dims(i.type.tensorType)))
        ty = lambda sh: RankedTensorType.get(sh, s.fty())
        outs = list(b.outputs)
        osh = {}
        for o in b.operations:
            for x in o.outputs:
                if x.type.WhichOneof("type") == "tensorType":
                    osh[x.name] = dims(x.type.tensorType)
        g = GraphOp(
            name,
            [ty(sh) for _, sh in ins] + [HandleType.get(ty(sh)) for _, sh in sts],
            [ty(osh[o]) for o in outs] + [TokenType.get() for _ in sts],
            input_names=[n for n, _ in ins] + [n for n, _ in sts],
        )
        env = {}
        tok = {}
        with g.block:
            for (n, _), v in zip(ins + sts, g.arguments):
                env[n] = v
            for n, _ in sts:
                tok[n] = ops.create_token()
            for o in b.operations:
                s.op(o, env, tok, osh)
            ops.output([env[o] for o in outs] + [tok[n] for n, _ in sts])
        from coreai._compiler.ir import ArrayAttr, DictAttr, StringAttr

        g.res_attrs = ArrayAttr.get(
            [DictAttr.get({"coreai.name": StringAttr.get(o)}) for o in outs] + [DictAttr.get({}) for _ in sts]
        )
        return ins, sts, outs

    def op(s, o, env, tok, osh):
        t = o.type

        def get(k, d=None):
            if k not in o.inputs:
                return d
            a = o.inputs[k].arguments
            r = [s.p.value(x.value) if x.WhichOneof("binding") == "value" else env[x.name] for x in a]
            return r if k == "values" else r[0]

        def V(x):
            return s.c(x) if isinstance(x, np.ndarray) else x

        def shape(v):
            return list(RankedTensorType(v.type).shape)

        out = [x.name for x in o.outputs]

        def put(v):
            env[out[0]] = v

        def bc(f, fb, x, y):
            x, y = V(x), V(y)
            return f(x, y) if shape(x) == shape(y) else fb(x, y)

        if t == "const":
            put(s.p.value(o.attributes["val"]))
            return
        if t == "read_state":
            n = o.inputs["input"].arguments[0].name
            r = ops.read_handle(env[n], tok[n])
            put(r[0])
            tok[n] = r[1]
            return
        if t == "write_state":
            n = o.inputs["input"].arguments[0].name
            tok[n] = ops.write_handle(env[n], V(get("data")), tok[n])
            return
        if t == "constexpr_lut_to_dense":
            raw, sh, bits, _ = (
                get("indices") if isinstance(get("indices"), tuple) else (get("indices"), list(get("indices").shape), 8, False)
            )
            lut = get("lut").astype(s.np)
            i = res(raw, sh, IntegerType.get_unsigned(bits), "i")
            ax = get("vector_axis")
            put(
                ops.lut_to_dense(
                    i, res(lut, list(lut.shape), s.fty(), "l"), ops.constant(np.array(0 if ax is None else int(ax), np.int16))
                )
            )
            return
        if t == "constexpr_blockwise_shift_scale":
            d = get("data")
            sc = get("scale").astype(s.np)
            off = get("offset")
            if not isinstance(d, (tuple, np.ndarray)):
                # A table behind scales: the values that were looked up, times the scales of their blocks.
                assert off is None, "offsets behind a table"
                for axis, n in enumerate(osh[o.outputs[0].name]):
                    sc = np.repeat(sc, n // sc.shape[axis], axis)
                put(ops.mul(d, res(sc, list(sc.shape), s.fty(), "s")))
                return
            if isinstance(d, tuple):
                raw, sh, bits, sg = d
            else:
                raw, sh, bits, sg = d, list(d.shape), 8, d.dtype == np.int8
            ity = (IntegerType.get_signed if sg else IntegerType.get_unsigned)(bits)
            z = (
                np.zeros(sc.size if bits == 8 else (sc.size * bits + 7) // 8, np.uint8)
                if off is None
                else (off[0] if isinstance(off, tuple) else off)
            )
            put(
                ops.blockwise_shift_scale(
                    res(raw, sh, ity, "d"),
                    res(sc, list(sc.shape), s.fty(), "s"),
                    res(z, list(sc.shape), ity, "z"),
                    res(np.zeros_like(sc), list(sc.shape), s.fty(), "o"),
                )
            )
            return
        x = get("x")
        y = get("y")
        if t == "add":
            put(bc(ops.add, ops.broadcasting_add, x, y))
        elif t == "sub":
            put(bc(ops.sub, ops.broadcasting_sub, x, y))
        elif t == "mul":
            put(bc(ops.mul, ops.broadcasting_mul, x, y))
        elif t == "real_div":
            put(bc(ops.divide, ops.broadcasting_divide, x, y))
        elif t == "maximum":
            put(bc(ops.maximum, ops.broadcasting_maximum, x, y))
        elif t == "minimum":
            put(bc(ops.minimum, ops.broadcasting_minimum, x, y))
        elif t == "abs":
            put(ops.abs_(V(x)))
        elif t == "relu":
            put(ops.relu(V(x)))
        elif t == "sigmoid":
            put(ops.sigmoid(V(x)))
        elif t == "silu":
            put(ops.silu(V(x)))
        elif t == "tanh":
            put(ops.tanh(V(x)))
        elif t == "exp":
            put(ops.exp(V(x)))
        elif t == "square":
            put(ops.mul(V(x), V(x)))
        elif t == "rsqrt":
            e = get("epsilon")
            put(
                ops.rsqrt(
                    ops.broadcasting_add(V(x), s.c(np.asarray(e, np.float16).reshape([1] * len(shape(V(x)))).astype(s.np)))
                )
            )
        elif t == "gelu":
            put(ops.gelu(V(x), approximate={"EXACT": "none", "TANH_APPROXIMATION": "tanh"}[get("mode")]))
        elif t in ("reduce_max", "reduce_mean", "reduce_sum"):
            r = getattr(ops, t)(V(x), ops.constant(np.asarray(get("axes"), np.int32).reshape(-1)))
            put(ops.reshape(r, ops.constant(np.array(osh[out[0]], np.uint32))))
        elif t == "reshape":
            put(ops.reshape(V(x), ops.constant(np.array(osh[out[0]], np.uint32))))
        elif t == "transpose":
            n = len(shape(V(x)))
            put(ops.transpose(V(x), ops.constant(np.array([int(p) % n for p in get("perm")], np.uint32))))
        elif t == "softmax":
            put(ops.softmax(V(x), ops.constant(np.array(int(get("axis")), np.int32))))
        elif t == "concat":
            put(ops.concat(ops.constant(np.array(int(get("axis")), np.int32)), [V(v) for v in get("values")]))
        elif t == "split":
            ax = int(get("axis"))
            sh = shape(V(x))
            ax %= len(sh)
            p = 0
            for n in out:
                k = osh[n][ax]
                st = [0] * len(sh)
                en = list(sh)
                st[ax] = p
                en[ax] = p + k
                p += k
                env[n] = ops.slice_(
                    V(x),
                    ops.constant(np.array(st, np.int32)),
                    ops.constant(np.array(en, np.int32)),
                    ops.constant(np.ones(len(sh), np.int32)),
                )
        elif t == "slice_by_index":
            sh = shape(V(x))
            bg = list(get("begin"))
            en = list(get("end"))
            bm = get("begin_mask")
            em = get("end_mask")
            st = get("stride")
            for i in range(len(sh)):
                if bm is not None and bm[i]:
                    bg[i] = 0
                if em is not None and em[i]:
                    en[i] = sh[i]
            r = ops.slice_(
                V(x),
                ops.constant(np.array(bg, np.int32)),
                ops.constant(np.array(en, np.int32)),
                ops.constant(np.array(st if st is not None else np.ones(len(sh)), np.int32)),
            )
            if shape(r) != osh[out[0]]:
                r = ops.reshape(r, ops.constant(np.array(osh[out[0]], np.uint32)))
            put(r)
        elif t == "slice_update":
            # Along one axis, at constant bounds: the parts before and behind stay.
            sh = shape(V(x))
            bg, en = [int(v) for v in get("begin")], [int(v) for v in get("end")]
            axes = [i for i in range(len(sh)) if (bg[i], en[i]) != (0, sh[i])] or [0]
            assert len(axes) == 1 and not any(get("begin_mask")) and not any(get("end_mask"))
            (ax,) = axes

            def part(first, last):
                lo, hi = [0] * len(sh), list(sh)
                lo[ax], hi[ax] = first, last
                return ops.slice_(
                    V(x),
                    ops.constant(np.array(lo, np.int32)),
                    ops.constant(np.array(hi, np.int32)),
                    ops.constant(np.ones(len(sh), np.int32)),
                )

            parts = [part(0, bg[ax])] if bg[ax] > 0 else []
            parts.append(V(get("update")))
            parts += [part(en[ax], sh[ax])] if en[ax] < sh[ax] else []
            put(ops.concat(ops.constant(np.array(ax, np.int32)), parts))
        elif t == "slice_by_size":
            sh = shape(V(x))
            bg = [int(v) for v in get("begin")]
            sz = [int(v) for v in get("size")]
            en = [sh[i] if sz[i] == -1 else bg[i] + sz[i] for i in range(len(sh))]
            put(
                ops.slice_(
                    V(x),
                    ops.constant(np.array(bg, np.int32)),
                    ops.constant(np.array(en, np.int32)),
                    ops.constant(np.ones(len(sh), np.int32)),
                )
            )
        elif t == "pad":
            n = len(shape(V(x)))
            pd = [int(v) for v in get("pad")]
            pd = [0] * (2 * n - len(pd)) + pd
            cv = get("constant_val")
            put(ops.pad(V(x), ops.constant(np.array(pd, np.uint32)), ops.constant(np.array(cv, s.np).reshape(())), get("mode")))
        elif t == "matmul":
            a, b = V(x), V(y)

            def tp(v):
                p = list(range(len(shape(v))))
                p[-1], p[-2] = p[-2], p[-1]
                return ops.transpose(v, ops.constant(np.array(p, np.uint32)))

            if get("transpose_x"):
                a = tp(a)
            if get("transpose_y"):
                b = tp(b)
            if s.prec == "f16" and MM32:  # f16 batch_matmul of the runtime sums in f16: do it in f32 and round once
                a = ops.cast(a, F32Type.get())
                b = ops.cast(b, F32Type.get())
            r = ops.batch_matmul(a, b) if shape(a)[:-2] == shape(b)[:-2] else ops.broadcasting_batch_matmul(a, b)
            put(ops.cast(r, F16Type.get()) if s.prec == "f16" and MM32 else r)
        elif t == "conv":
            assert get("pad_type") in ("valid", "custom") and not np.any(get("pad", np.zeros(1))), "pad"
            r = ops.conv2d(
                V(x),
                V(get("weight")),
                ops.constant(np.array(get("strides"), np.uint32)),
                ops.constant(np.array(get("dilations"), np.uint32)),
                ops.constant(np.array(int(get("groups")), np.uint32)),
            )
            bi = get("bias")
            if bi is not None:
                r = ops.broadcasting_add(r, s.c(bi.reshape(1, -1, 1, 1)))
            put(r)
        else:
            raise SystemExit("MIL op not mapped: " + t)


MM32 = True


def inputs_of(ins, rng, step):
    """Random inputs that a program of ours can meet: masks, one-hot places of the cache, routing weights."""
    x = {}
    for nm, sh in ins:
        if nm == "mask":
            v = np.where(rng.random(sh) < 0.5, 0, -30000)
        elif nm in ("kv_place", "kv_keep"):
            v = None
        elif nm.startswith("rope"):
            v = rng.uniform(-1, 1, sh)
        elif nm == "carry":
            v = np.zeros(sh)
            v[0, 0, 0, sh[3] - 2] = 1
            v[0, 0, 1, sh[3] - 1] = 1
        elif nm == "routing":
            v = np.where(rng.random(sh) < 0.4, rng.random(sh), 0)
        else:
            v = rng.normal(0, 1, sh)
        x[nm] = v
    if "kv_place" in x:
        shape, kept = dict(ins)["kv_place"], dict(ins)["kv_keep"]
        # Channels-last forms have slots last: [1, 1, T, slots] and [1, 1, 1, slots].
        is_last = kept[3] > 1
        count, t = (shape[3], shape[2]) if is_last else (shape[2], shape[3])
        slots = (np.arange(t) + step * t) % count
        place, keep = np.zeros((1, 1, count, t)), np.ones(count)
        place[0, 0, slots, np.arange(t)] = 1
        keep[slots] = 0
        x["kv_place"] = place.transpose(0, 1, 3, 2) if is_last else place
        x["kv_keep"] = keep.reshape(kept)
        # Slots are the last axis of a mask, or channels where heads are apart.
        seen = [slice(None)] * 4
        seen[3 if x["mask"].shape[3] == count else 1] = slots
        x["mask"][tuple(seen)] = 0
    return {k: v.astype(np.float16) for k, v in x.items()}


async def compare(pkg, a):
    P = Pkg(pkg)
    fs = P.m.mlProgram.functions
    want = [a.function] if a.function else list(fs)
    bad = 0
    m = Module.create()
    sig = {}
    with m:
        for n in want:
            sig[n] = Tr(P, a.precision).function(n, fs[n])
    m.verify()
    fl = np.float16 if a.precision == "f16" else np.float32
    with tempfile.TemporaryDirectory() as d:
        asset = AIProgram(m).save_asset(Path(d) / "x.aimodel")
        async with asset.executable() as model:
            for n in want:
                ins, sts, outs = sig[n]
                rng = np.random.default_rng(7)
                f = model.load_function(n)
                st = {k: NDArray(np.zeros(sh, fl)) for k, sh in sts}
                steps = [inputs_of(ins, rng, k) for k in range(3)]
                files = []
                for k, x in enumerate(steps):
                    np.savez(f"{d}/in{k}.npz", **x)
                    files += ["--inputs", f"{d}/in{k}.npz"]
                r = subprocess.run(
                    [
                        a.anemoe,
                        "predict",
                        pkg,
                        "--function",
                        n,
                        "--precision",
                        "fp16" if a.precision == "f16" else "fp32",
                        "--force",
                        "--outputs",
                        d + "/out{}.npz",
                    ]
                    + files,
                    capture_output=True,
                    text=True,
                )
                if r.returncode:
                    print(r.stderr)
                    return 1
                worst, cosine, count = 0.0, 1.0, 0
                for k, x in enumerate(steps):
                    y = await f({kk: NDArray(np.ascontiguousarray(v.astype(fl))) for kk, v in x.items()}, st)
                    z = np.load(f"{d}/out{k}.npz")
                    pairs = [(y[o].numpy(), z[o]) for o in outs]
                    pairs += [(st[s].numpy(), z["state:" + s]) for s in st if "state:" + s in z]
                    for p, q in pairs:
                        p, q = p.astype(np.float64).ravel(), q.astype(np.float64).ravel()
                        count += 1
                        worst = max(worst, np.abs(p - q).max() / (np.abs(q).max() + 1e-30))
                        if p @ p and q @ q:
                            cosine = min(cosine, p @ q / np.sqrt((p @ p) * (q @ q)))
                ok = worst <= a.limit
                bad |= not ok
                print(
                    f"{os.path.basename(pkg)} {n} {a.precision}: {count} arrays, largest difference {worst:.2e} of the largest value, lowest cosine {cosine:.9f}{'' if ok else '  EXCEEDS THE LIMIT'}",
                    flush=True,
                )
    return int(bad)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("paths", nargs="+")
    ap.add_argument("--anemoe", required=True)
    ap.add_argument("--function")
    ap.add_argument("--precision", choices=("f32", "f16"), default="f32")
    ap.add_argument("--limit", type=float)
    a = ap.parse_args()
    a.limit = a.limit or (1e-5 if a.precision == "f32" else 2e-2)
    packages = [
        q
        for p in a.paths
        for q in ([p] if p.rstrip("/").endswith(".mlpackage") else sorted(glob.glob(p + "/shards/*.mlpackage")))
    ]
    if not packages:
        sys.exit("no packages")
    if len(packages) == 1:
        sys.exit(asyncio.run(compare(packages[0], a)))
    # Each child is a fork of this process, which has loaded the runtime and not used it.
    forks = multiprocessing.get_context("fork")

    def judge(package):
        code = 1
        try:
            code = asyncio.run(compare(package, a))
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        # The runtime's own cleanup does not expect a fork.
        os._exit(code)

    def run(package):
        child = forks.Process(target=judge, args=(package,))
        child.start()
        child.join()
        return child.exitcode

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        codes = list(pool.map(run, packages))
    bad = [p for p, code in zip(packages, codes) if code]
    for p in bad:
        print(f"{p} does not agree")
    print(f"{len(packages)-len(bad)} of {len(packages)} packages agree")
    sys.exit(1 if bad else 0)


main()
