"""Functions over packages and tensors."""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from . import _anemoe
from .model import Feature, Model, _aligned, _source, _to_numpy


@dataclass(frozen=True)
class Finding:
    """A fault of a package."""

    #: "error" for what breaks a rule of MIL, "warning" for what is legal and not checked completely.
    severity: str
    #: Name of the function; empty for the model as a whole.
    function: str
    #: Name of the operation, input or output.
    place: str
    #: The fault in words.
    text: str

    def __str__(self) -> str:
        return f"{self.severity}: function '{self.function}', '{self.place}': {self.text}"


def verify(model: Any, weights_dir: Optional[str] = None) -> List[Finding]:
    """Infers the type of every operation and checks MIL's rules. Returns the faults; none for a sound package.

    Raises ValueError for a package that cannot be read at all.
    """
    return [Finding(*found) for found in _anemoe.verify(*_source(model, weights_dir))]


def check(model: Any, list_ops: bool = False, weights_dir: Optional[str] = None) -> Dict[str, Any]:
    """Predicts whether the Neural Engine will run a package, by rules from published measurements.

    Returns what `anemoe check --json` prints: `pass`, `packages` with `verdict`, `ops` and `reasons`, and more.
    """
    return json.loads(_anemoe.check(*_source(model, weights_dir), list_ops))


@dataclass(frozen=True)
class Quantized:
    """A compressed tensor."""

    #: The kind with its group or block.
    quant: str
    #: Values that the compressed tensor stands for, float16 in the tensor's shape.
    decoded: np.ndarray
    #: Indices into tables, or integers, in the tensor's shape.
    elements: np.ndarray
    #: Tables `[groups, blocks, .., entries, 1]`, or None.
    lut: Optional[np.ndarray]
    #: Scales, one per group or block, or None.
    scale: Optional[np.ndarray]
    #: Offsets of the scales, or None.
    offset: Optional[np.ndarray]
    #: Mean squared error, and the same over the mean square.
    mse: float
    relative_mse: float
    cosine: float
    #: Bytes of elements, tables, scales and offsets.
    bytes: int


def quantize(
    array: Any,
    quant: str = "lut4",
    group_size: int = 32,
    block_size: int = 32,
    op: Optional[str] = None,
    exact: bool = False,
    importance: Any = None,
) -> Quantized:
    """Compresses one tensor.

    quant: fp16, mxfp4, lut{1,2,3,4,6,8} with -tensor or -uniform as an option, int{4,8} with -tensor, -channel or -block and
        -asymmetric as an option.
    group_size: output channels that share a table. block_size: input channels that share a scale in kinds with -block.
    op: operation of the weight: conv [out, in, kernel..], linear [out, in], matmul [in, out]; conv from rank 3 on, else linear.
    exact: the global optimum of k-means; otherwise tables are within 1e-4 of it.
    importance: importance of each input channel, finite and not negative.
    """
    array = _to_numpy(array)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"expected an array of numbers, got {array.dtype}")
    values = _aligned(array, np.float32)
    for name, size in (("group_size", group_size), ("block_size", block_size)):
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(f"expected {name} from 1, got {size!r}")
    if importance is not None:
        importance = _aligned(_to_numpy(importance), np.float32).ravel()
    parts = _anemoe.quantize(values, quant, group_size, block_size, op, exact, importance)
    # Against the values that were given; the kinds see them rounded to fp16.
    exact_values, decoded = values.astype(np.float64), parts["decoded"].astype(np.float64)
    square, power = float(np.mean((decoded - exact_values) ** 2)), float(np.mean(exact_values**2))
    norms = math.sqrt(power * float(np.mean(decoded**2)))
    cosine = float(np.mean(decoded * exact_values)) / norms if norms else float(square == 0)
    return Quantized(**parts, mse=square, relative_mse=square / power if power else float(square > 0), cosine=cosine)


@dataclass
class Difference:
    """What differs between two packages."""

    #: Lines of a unified diff of inputs, outputs and operations, without names of values.
    structure: List[str] = field(default_factory=list)
    #: Largest difference and relative error (norm of the difference over the norm of the first) of each common weight that differs.
    weights: Dict[str, Tuple[float, float]] = field(default_factory=dict)
    #: The same of each common output on the same inputs.
    outputs: Dict[str, Tuple[float, float]] = field(default_factory=dict)
    #: Why outputs were not compared; empty if they were.
    not_run: str = ""

    def __bool__(self) -> bool:
        return bool(self.structure or self.weights or any(largest for largest, _ in self.outputs.values()))

    def __str__(self) -> str:
        lines = list(self.structure)
        for noun, values in (("weight", self.weights), ("output", self.outputs)):
            differing = ((name, a, r) for name, (a, r) in values.items() if a)
            lines += [f"{noun} {name}: largest difference {a:.3g}, relative error {r:.3g}" for name, a, r in differing]
        lines += [f"outputs were not compared: {self.not_run}"] if self.not_run else []
        return "\n".join(lines) or "no difference"


def distance(a: np.ndarray, b: np.ndarray) -> Tuple[float, float]:
    """Returns the largest difference, and the norm of the difference over the norm of `a`; equal values have none, infinite ones included."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        return float("inf"), float("inf")
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        d = np.where(same, 0.0, a - b)
    if not np.isfinite(d).all():
        return float("inf"), float("inf")
    norm = float(np.linalg.norm(np.where(np.isfinite(a), a, 0.0)))
    off = float(np.linalg.norm(d))
    return (float(np.abs(d).max()) if d.size else 0.0), (off / norm if norm else float("inf") if off else 0.0)


def random_inputs(model: Model, seed: int = 0) -> Dict[str, np.ndarray]:
    """Makes inputs of a model's default shapes: normal numbers, pixels from 0 to 255, small integers."""
    random = np.random.default_rng(seed)

    def make(f: Feature) -> np.ndarray:
        shape = f.shape or ()
        if f.kind == "image":
            return random.integers(0, 256, shape).astype(np.float32)
        if f.dtype.startswith("float"):
            return random.standard_normal(shape).astype(np.float32)
        return random.integers(0, 2, shape).astype(np.int32)

    return {f.name: make(f) for f in model.inputs}


def _check_inputs(models: List[Model], inputs: Dict[str, Any]) -> None:
    """Raises the first model's exception for inputs that no model takes."""
    faults = []
    for model in models:
        try:
            model._arrays(inputs)
        except (KeyError, TypeError, ValueError) as e:
            faults.append(e)
    if len(faults) == len(models):
        raise faults[0]


def diff(a: Any, b: Any, inputs: Optional[Dict[str, Any]] = None, precision: Optional[str] = "fp16") -> Difference:
    """Compares two packages: operations, weights by name, and outputs on the same inputs (random ones without `inputs`).

    Raises KeyError, TypeError or ValueError for `inputs` that neither package takes.
    """
    found = Difference()
    lines = [_anemoe.structure(*_source(model)) for model in (a, b)]
    found.structure = list(difflib.unified_diff(*lines, "a", "b", lineterm="", n=1))
    weights = [_anemoe.Weights(*_source(model)) for model in (a, b)]
    others = set(weights[1].names)
    for name in weights[0].names:
        if name in others:
            largest, relative = distance(*(w.read(name) for w in weights))
            if largest:
                found.weights[name] = (largest, relative)
    try:
        models = [Model(model, precision=precision) for model in (a, b)]
    except (ValueError, NotImplementedError) as e:
        found.not_run = str(e)
        return found
    if inputs is not None:
        _check_inputs(models, inputs)
    try:
        inputs = random_inputs(models[0]) if inputs is None else inputs
        results = []
        for model in models:
            results.append(model.predict(dict(inputs), model.make_state() if model.states else None))
    except (KeyError, TypeError, ValueError, NotImplementedError) as e:
        found.not_run = str(e.args[0] if e.args else e)  # the text of a KeyError is its repr
        return found
    for name, first in results[0].items():
        if name in results[1] and not isinstance(first, (str, int)):
            second = results[1][name]
            if isinstance(first, dict):
                first, second = list(first.values()), list(second.values())
            found.outputs[name] = distance(np.asarray(first), np.asarray(second))
    return found
