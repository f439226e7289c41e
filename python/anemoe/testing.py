"""Comparison of packages with saved results or with torch, in tests.

The fixture `anemoe_matches` comes with the package; nothing has to be imported:

    def test_model(anemoe_matches):
        anemoe_matches("model.mlpackage", {"x": x}, golden="tests/model.npz")  # pytest --anemoe-update writes the file
        anemoe_matches("model.mlpackage", {"x": x}, torch=module.eval())

A difference fails the test and names the operation at which results part.
"""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from .model import Model
from .tools import distance

#: Elements of each operation's result that a golden holds.
_SAMPLE = 256


def _sample(value: np.ndarray) -> np.ndarray:
    flat = np.asarray(value).ravel()
    if flat.size <= _SAMPLE:
        return flat
    return flat[np.linspace(0, flat.size - 1, _SAMPLE).astype(np.int64)]


def _error(expected: Any, got: Any) -> float:
    return distance(np.asarray(expected), np.asarray(got))[1]


def _arrays(outputs: Dict[str, Any]) -> Dict[str, np.ndarray]:
    """Makes arrays of outputs: a classifier's probabilities become a vector, a label a text, an image its pixels."""
    return {name: np.asarray(list(v.values()) if isinstance(v, dict) else v) for name, v in outputs.items()}


def _compare(name: str, expected: np.ndarray, got: np.ndarray, tolerance: float) -> Optional[str]:
    if expected.dtype.kind in "US" or got.dtype.kind in "US":
        return None if str(expected) == str(got) else f"output '{name}': expected '{expected}', got '{got}'"
    if expected.shape != got.shape:
        return f"output '{name}': expected shape {expected.shape}, got {got.shape}"
    largest, relative = distance(expected, got)
    if relative <= tolerance:
        return None
    return f"output '{name}': largest difference {largest:.3g}, relative error {relative:.3g}, allowed is {tolerance:.3g}"


def _predict(model: Model, inputs: Dict[str, Any]) -> Dict[str, np.ndarray]:
    return _arrays(model.predict(dict(inputs), model.make_state() if model.states else None))


def assert_matches(
    model: Any,
    inputs: Dict[str, Any],
    golden: Any = None,
    torch: Any = None,
    tolerance: float = 1e-2,
    precision: Optional[str] = "fp16",
    update: bool = False,
) -> None:
    """Runs a package and compares its outputs.

    golden: a .npz file of an earlier run, which `update` writes. It holds outputs, and a sample of each operation's result.
    torch: a module, called with the inputs in the package's order and in its own type, images as planes of their pixels; its outputs
        are in the package's order, without a classifier's label.
    tolerance: largest norm of a difference over the norm of what is expected.

    Raises AssertionError, which names the operation at which results part.
    """
    if (golden is None) == (torch is None):
        raise TypeError("expected either golden or torch")
    model = model if isinstance(model, Model) else Model(model, precision=precision)
    if torch is not None:
        _with_torch(model, inputs, torch, tolerance)
        return
    outputs = _predict(model, inputs)
    path = os.fspath(golden)
    if not update and not os.path.exists(path):
        raise AssertionError(f"{path}: no such golden; `pytest --anemoe-update`, or update=True, writes it")
    if update:
        results = {f"operation:{name}": _sample(v) for name, v in model.trace(dict(inputs)).items()}
        with open(path, "wb") as file:
            np.savez_compressed(file, **{f"output:{name}": v for name, v in outputs.items()}, **results)
        return
    with np.load(path, allow_pickle=False) as saved:
        expected = {name[len("output:") :]: saved[name] for name in saved.files if name.startswith("output:")}
        samples = {name[len("operation:") :]: saved[name] for name in saved.files if name.startswith("operation:")}
    faults = [f"output '{name}' is missing" for name in expected if name not in outputs]
    found = (_compare(name, expected[name], outputs[name], tolerance) for name in expected if name in outputs)
    faults += [fault for fault in found if fault]
    if faults:
        raise AssertionError("\n".join([f"{path}: the package differs from its golden", *faults, _parting(model, inputs, samples, tolerance)]))


def _parting(model: Model, inputs: Dict[str, Any], samples: Dict[str, np.ndarray], tolerance: float) -> str:
    """Names the first operation whose result differs from its sample, and operations that one side lacks."""
    results = model.trace(dict(inputs))
    for name, value in results.items():
        if name in samples:
            got = _sample(value)
            error = _error(samples[name], got) if got.shape == samples[name].shape else float("inf")
            if error > tolerance:
                return f"they part at operation '{name}' (relative error {error:.3g}); all common operations before it agree"
    new = [name for name in results if name not in samples]
    return f"all common operations agree; new are: {', '.join(new[:5]) or 'none'}"


def _torch_inputs(model: Model, inputs: Dict[str, Any], module: Any) -> List[Any]:
    """Makes the module's tensors of the arrays that the package gets: floats in the module's type, integers in that of a tensor or int64."""
    import torch

    own = [*module.parameters(), *module.buffers()]
    dtype = next((t.dtype for t in own if t.is_floating_point()), torch.float32)
    device = own[0].device if own else "cpu"
    tensors = []
    for f, array in zip(model.inputs, model._arrays(inputs)):
        given = inputs.get(f.name)
        to = {"f": dtype, "i": torch.int64, "b": torch.bool}[array.dtype.kind]
        if array.dtype.kind == "i" and isinstance(given, torch.Tensor) and not given.is_floating_point():
            to = given.dtype
        tensors.append(torch.as_tensor(array).to(device, to))
    return tensors


def _with_torch(model: Model, inputs: Dict[str, Any], module: Any, tolerance: float) -> None:
    import torch

    values = model._run(model._runner, dict(inputs), model.make_state() if model.states else None)
    outputs = {f.name: value for f, value in zip(model._results, values)}
    names = [f.name for f in model.outputs]
    if model._runner.classifier is not None:
        label, probabilities, tensor, _ = model._runner.classifier
        names.remove(label)
        outputs[probabilities] = outputs[tensor].ravel()

    calls: List[Tuple[str, str, np.ndarray]] = []

    def flat(value: Any) -> List[Any]:
        if isinstance(value, torch.Tensor):
            return [value]
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return [tensor for each in values for tensor in flat(each)]

    def record(name: str) -> Any:
        def hook(of: Any, _: Any, result: Any) -> None:
            calls.extend((name, type(of).__name__, t.detach().float().cpu().numpy()) for t in flat(result))

        return hook

    hooks = [m.register_forward_hook(record(name)) for name, m in module.named_modules() if name]
    try:
        with torch.no_grad():
            results = flat(module(*_torch_inputs(model, inputs, module)))
    finally:
        for hook in hooks:
            hook.remove()
    if len(results) != len(names):
        raise AssertionError(f"torch gives {len(results)} outputs, the package {len(names)}: {', '.join(names)}")
    faults = []
    for name, result in zip(names, results):
        expected, got = result.detach().float().cpu().numpy(), outputs[name]
        # Core ML has no arrays of rank 0, and probabilities no shape.
        if expected.size == got.size and (got.size == 1 or got.ndim == 1):
            expected = expected.reshape(got.shape)
        fault = _compare(name, expected, got, tolerance)
        faults += [fault] if fault else []
    if not faults:
        return
    traced = {name: value.ravel() for name, value in model.trace(dict(inputs)).items() if value.dtype.kind == "f"}
    last, first = None, None
    for name, kind, expected in calls:
        near = [(_error(expected.ravel(), value), op) for op, value in traced.items() if value.size == expected.size]
        error, op = min(near, default=(float("inf"), ""))
        # A module that was fused into the next one has no result of its own.
        if error <= tolerance:
            last, first = f"module '{name}' ({kind}), operation '{op}'", None
        elif first is None:
            first = f"module '{name}' ({kind})" + (f"; nearest is operation '{op}', relative error {error:.3g}" if op else "")
    where = f"they agree up to {last or 'the inputs'} and part at {first or 'the outputs'}"
    raise AssertionError("\n".join(["the package differs from torch", *faults, where]))


try:
    import pytest
except ImportError:  # the functions above need no pytest
    pass
else:

    def pytest_addoption(parser: Any) -> None:
        parser.addoption("--anemoe-update", action="store_true", help="write the goldens of anemoe_matches again")

    @pytest.fixture
    def anemoe_matches(request: Any) -> Any:
        """Compares a package with a golden or with torch; see `anemoe.testing.assert_matches`."""

        def matches(model: Any, inputs: Dict[str, Any], **options: Any) -> None:
            assert_matches(model, inputs, update=request.config.getoption("--anemoe-update"), **options)

        return matches
