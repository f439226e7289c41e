"""Formulas in NumPy of recurrent ops, images, boxes and lists, for the evaluator of mil_check.py.

Each function takes an operation and its operands by parameter, as coremltools names them, and returns the results.
"""
import numpy as np

ACTIVATIONS = {
    "tanh": np.tanh, "scaled_tanh": np.tanh, "relu": lambda v: np.maximum(v, 0), "linear": lambda v: v,
    "sigmoid": lambda v: 1 / (1 + np.exp(-v)), "hard_sigmoid": lambda v: np.clip(0.2 * v + 0.5, 0, 1),
    "sigmoid_hard": lambda v: np.clip(0.2 * v + 0.5, 0, 1),
}


def recurrent(op, I):
    act = lambda k, d: ACTIVATIONS[str(I.get(k) if I.get(k) is not None else d)]
    x, n, kind = I["x"], I["weight_hh"].shape[1], op.op_type
    way = str(I.get("direction") or "forward")
    halves, hs, cs = [], [], []
    for d, back in enumerate(["", "_back"] if way == "bidirectional" else [""]):
        get = lambda k, size: np.zeros(size, x.dtype) if I.get(k) is None else I[k]
        wi, wh = I["weight_ih" + back], I["weight_hh" + back]
        b, p = get("bias" + back, len(wi)), np.split(get("peephole" + back, 3 * n), 3)
        h = I["initial_h"][:, d * n:(d + 1) * n]
        c = I["initial_c"][:, d * n:(d + 1) * n] if kind == "lstm" else None
        steps = []
        for xt in x[::-1] if way == "reverse" or d else x:
            part = lambda g: xt @ wi[g * n:(g + 1) * n].T
            held = lambda g, v: v @ wh[g * n:(g + 1) * n].T
            bias = lambda g: b[g * n:(g + 1) * n]
            if kind == "rnn":
                h = act("activation", "tanh")(part(0) + held(0, h) + b)
            elif kind == "gru":
                gate = act("recurrent_activation", "sigmoid")
                bi = np.split(get("input_bias", 3 * n), 3)
                r, z = (gate(part(g) + held(g, h) + bias(g) + bi[g]) for g in (0, 2))
                inner = r * (held(1, h) + bias(1)) if I.get("reset_after") else held(1, r * h) + bias(1)
                h = (1 - z) * act("activation", "tanh")(part(1) + bi[1] + inner) + z * h
            else:
                gate, s = act("recurrent_activation", "sigmoid"), lambda g: part(g) + held(g, h) + bias(g)
                c2 = gate(s(1) + p[1] * c) * c + gate(s(0) + p[0] * c) * act("cell_activation", "tanh")(s(3))
                c2 = c2 if I.get("clip") is None else np.clip(c2, -I["clip"], I["clip"])
                h = gate(s(2) + p[2] * c2) * act("activation", "tanh")(c2)
                c = c2
            steps.append(h)
        last = steps[-1:]
        halves.append(np.stack((steps[::-1] if d else steps) if I.get("output_sequence") else last))
        hs.append(h), cs.append(c)
    join = lambda parts: np.concatenate(parts, -1)
    return [join(halves), join(hs)] + ([join(cs)] if kind == "lstm" else [])


def grid(mode, n, o):
    i = np.arange(o)
    if mode == "UNALIGN_CORNERS": return (i + 0.5) * n / o - 0.5
    if mode == "OFFSET_CORNERS": return (i + 0.5) * max(1, n - 1) / o
    if mode == "DEFAULT": return i * n / o
    return i * (n - 1) / (o - 1) if o > 1 else np.array([(n - 1) / 2 if mode == "ALIGN_CORNERS" else 0.0])


def matrix(places, n):
    """The matrix that interpolates linearly between `n` values at `places`."""
    return np.maximum(0, 1 - np.abs(np.clip(places, 0, n - 1)[:, None] - np.arange(n)[None]))


def nearest(n, o): return np.floor((np.arange(o) + 0.5) * n / o).astype(int)


def resize(op, I):
    x, kind = I["x"], op.op_type
    if kind == "resize":
        axes = int(I["resized_dims"])
        sizes = [int(v) or x.shape[x.ndim - axes + k] for k, v in enumerate(I["shape"][len(I["shape"]) - axes:])]
    elif "upsample" in kind:
        sizes = [int(np.floor(x.shape[k] * float(I[f]))) for k, f in ((-2, "scale_factor_height"), (-1, "scale_factor_width"))]
    else: sizes = [int(I["target_size_height"]), int(I["target_size_width"])]
    flat = "nearest" in kind or str(I.get("interpolation_mode")) == "NEAREST_NEIGHBOR"
    mode = str(I["sampling_mode"]) if I.get("sampling_mode") is not None else "DEFAULT"
    if kind == "upsample_bilinear":
        aligned = bool(I["align_corners"])
        half = not aligned if I.get("half_pixel_centers") is None else bool(I["half_pixel_centers"])
        mode = "STRICT_ALIGN_CORNERS" if aligned else "UNALIGN_CORNERS" if half else "DEFAULT"
    for k, o in enumerate(sizes):
        axis = x.ndim - len(sizes) + k
        n = x.shape[axis]
        if flat: x = np.take(x, nearest(n, o) if "upsample" not in kind else np.arange(o) * n // o, axis)
        else: x = np.moveaxis(np.tensordot(matrix(grid(mode, n, o), n), x, (1, axis)), 0, axis)
    return x


def crop_resize(op, I):
    x, h, w = I["x"], int(I["target_height"]), int(I["target_width"])
    mode, order = str(I["sampling_mode"]), str(I["box_coordinate_mode"])
    pad = float(I["pad_value"]) if I.get("pad_value") is not None else 0.0
    if I.get("roi") is not None:
        rows = I["roi"].reshape(len(I["roi"]), -1)
        images = [[int(r[0])] if len(r) == 5 else range(len(x)) for r in rows]
        rows, stacked = rows[:, -4:], True
    else:
        rows, stacked = I["boxes"].astype(np.float64), False
        images = [[int(v)] for v in (range(len(rows)) if I.get("box_indices") is None else I["box_indices"])]
    result = []
    for row, chosen in zip(rows, images):
        a = np.array(row, np.float64)
        if "WIDTH" in order: a = a[[1, 0, 3, 2]]
        if "CENTER" in order: a = np.concatenate([a[:2] - a[2:] / 2, a[:2] + a[2:] / 2])
        axes = []
        for n, o, s, e in ((x.shape[2], h, a[0], a[2]), (x.shape[3], w, a[1], a[3])):
            f = float(I["spatial_scale"]) * (n - 1 if I["normalized_coordinates"] else 1)
            at = grid(mode, n, o) if mode == "UNALIGN_CORNERS" else s * f + grid(mode, (e - s) * f + 1, o)
            if mode == "DEFAULT": at = np.minimum(at, max(s * f, e * f))
            axes.append((matrix(at, n), (at >= 0) & (at <= n - 1)))
        inside = axes[0][1][:, None] & axes[1][1][None]
        cut = np.stack([np.where(inside, axes[0][0] @ x[b] @ axes[1][0].T, pad) for b in chosen])
        result.append(cut if stacked else cut[0])
    return np.stack(result)


def sample(x, at, I):
    """Samples `[B, C, H, W]` at `[B, H2, W2, (x, y)]`."""
    mode, aligned = str(I["coordinates_mode"]), bool(I["align_corners"])
    edge, y = str(I["padding_mode"]), []
    for k, n in ((1, x.shape[2]), (0, x.shape[3])):
        v = at[..., k].astype(np.float64)
        if mode != "unnormalized":
            v = (v + 1) / 2 if mode == "normalized_minus_one_to_one" else v
            v = v * (n - 1) if aligned else v * n - 0.5
        if edge == "border": v = np.clip(v, 0, n - 1)
        if edge in ("reflection", "symmetric"):
            low, span = (0, n - 1) if edge == "reflection" else (-0.5, n)
            m = np.mod(np.abs(v - low), 2 * span) if span else 0 * v
            v = np.clip(low + np.where(m > span, 2 * span - m, m), 0, n - 1)
        y.append(v)

    def pixel(r, c):
        ok = (r >= 0) & (r < x.shape[2]) & (c >= 0) & (c < x.shape[3])
        r, c = (np.clip(v, 0, n - 1).astype(int) for v, n in ((r, x.shape[2]), (c, x.shape[3])))
        found = np.stack([x[b][:, r[b], c[b]] for b in range(len(x))])
        return np.where(ok[:, None], found, float(I["padding_value"])) if edge == "constant" else found

    r, c = y
    if str(I["sampling_mode"]) == "nearest": return pixel(np.round(r), np.round(c))
    a, b = np.floor(r), np.floor(c)
    fr, fc = (r - a)[:, None], (c - b)[:, None]
    return (pixel(a, b) * (1 - fr) + pixel(a + 1, b) * fr) * (1 - fc) + (pixel(a, b + 1) * (1 - fr) + pixel(a + 1, b + 1) * fr) * fc


def affine(op, I):
    h, w = int(I["output_height"]), int(I["output_width"])
    unit = lambda n: np.linspace(-1, 1, n) if n > 1 else np.zeros(1)
    gy, gx = np.meshgrid(unit(h), unit(w), indexing="ij")
    m = np.broadcast_to(I["transform_matrix"], (len(I["x"]), 6)).astype(np.float64)
    at = np.stack([m[:, k, None, None] * gx + m[:, k + 1, None, None] * gy + m[:, k + 2, None, None] for k in (0, 3)], -1)
    return sample(I["x"], at, I)


def suppression(op, I):
    last = I.get("score_threshold") is None
    boxes, scores = (np.swapaxes(I[k], 1, 2) if last else I[k] for k in ("boxes", "scores"))
    most, enough = int(I["max_boxes"]), -np.inf if last else float(I["score_threshold"])
    out = [np.zeros((len(boxes), most, 4)), np.zeros((len(boxes), most, scores.shape[2])), np.full((len(boxes), most), -1), np.zeros(len(boxes))]
    for i, (bx, sc) in enumerate(zip(boxes, scores)):
        best, kind = sc.max(-1), sc.argmax(-1)
        low, high = bx[:, :2] - bx[:, 2:] / 2, bx[:, :2] + bx[:, 2:] / 2
        kept = []
        for k in np.argsort(-best, kind="stable"):
            def overlap(j):
                side = np.maximum(0, np.minimum(high[j], high[k]) - np.maximum(low[j], low[k])).prod()
                return side / (bx[j, 2:].prod() + bx[k, 2:].prod() - side) if bx[j, 2:].prod() > 0 and bx[k, 2:].prod() > 0 else 0
            same = lambda j: not I["per_class_suppression"] or kind[j] == kind[k]
            if best[k] > enough and not any(same(j) and overlap(j) > I["iou_threshold"] for j in kept): kept.append(k)
        kept = (kept or [int(best.argmax())])[:most]
        out[0][i, :len(kept)], out[1][i, :len(kept)], out[2][i, :len(kept)], out[3][i] = bx[kept], sc[kept], kept, len(kept)
    return [np.swapaxes(out[0], 1, 2), np.swapaxes(out[1], 1, 2), out[2]] if last else out


def reshape_like(op, I):
    parts = zip(I["ref_tensors"], I["begins"], I["ends"], I["end_masks"])
    return I["x"].reshape([n for r, b, e, m in parts for n in r.shape[int(b):None if m else int(e)]])


def lists(op, I):
    """A list is an array of its elements."""
    if op.op_type == "make_list": return np.zeros([int(I["init_length"])] + [int(v) if np.ndim(v) == 0 and not isinstance(v, str) else 0 for v in I["elem_shape"]])
    ls, at = I["ls"], np.atleast_1d(I.get("index") if I.get("index") is not None else I.get("indices", 0))
    if op.op_type == "list_length": return np.int32(len(ls))
    if op.op_type == "list_read": return ls[at[0]]
    if op.op_type == "list_gather": return ls[at]
    value = I["value"] if op.op_type == "list_scatter" else I["value"][None]
    grown = np.zeros((max(len(ls), int(at.max()) + 1), *value.shape[1:]), value.dtype)
    if ls.size: grown[:len(ls)] = ls
    grown[at] = value
    return grown


TABLE = {name: lambda evaluator, op, I, f=f: f(op, I) for f, names in {
    recurrent: "rnn gru lstm", crop_resize: "crop_resize", affine: "affine", suppression: "non_maximum_suppression", reshape_like: "reshape_like",
    lists: "make_list list_length list_read list_gather list_write list_scatter",
    resize: "resize resize_bilinear resize_nearest_neighbor upsample_bilinear",
    (lambda op, I: sample(I["x"], I["coordinates"], I)): "resample"}.items() for name in names.split()}
