"""Compression of whole packages, with the configurations of `coremltools.optimize.coreml`."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from . import _anemoe
from .model import Model, _source, _Temporary

_DEFAULTS: Dict[str, Dict[str, Any]] = {
    "OpPalettizerConfig": {
        "mode": "kmeans",
        "nbits": None,
        "lut_function": None,
        "granularity": "per_tensor",
        "group_size": 32,
        "channel_axis": None,
        "cluster_dim": 1,
        "enable_per_channel_scale": False,
        "num_kmeans_workers": 1,
        "weight_threshold": 2048,
    },
    "OpLinearQuantizerConfig": {
        "mode": "linear_symmetric",
        "dtype": "int8",
        "granularity": "per_channel",
        "block_size": 32,
        "weight_threshold": 2048,
    },
    "OpThresholdPrunerConfig": {"threshold": 1e-12, "minimum_sparsity_percentile": 0.5, "weight_threshold": 2048},
    "OpMagnitudePrunerConfig": {
        "target_sparsity": None,
        "block_size": None,
        "n_m_ratio": None,
        "dim": None,
        "weight_threshold": 2048,
    },
}
# Type, name, parameter, transposition and groups of an operation that uses a weight.
_User = Tuple[str, str, str, bool, int]
_LEVELS = ("global_config", "op_type_configs", "op_name_configs")


@dataclass(frozen=True)
class _Config:
    """The configuration of one operation."""

    kind: str
    fields: Tuple[Tuple[str, Any], ...]

    def __getitem__(self, name: str) -> Any:
        return dict(self.fields)[name]


def _op_config(config: Any, kind: Optional[str] = None) -> Optional[_Config]:
    """Reads coremltools' object, or a dict of its fields; without a `kind` the dict names it as `config_type` or by its fields."""
    if config is None:
        return None
    if isinstance(config, dict):
        given = dict(config)
        kind = given.pop("config_type", kind) or _guess(given)
    else:
        kind = type(config).__name__
        given = {name: getattr(config, name) for name in _DEFAULTS.get(kind, ()) if hasattr(config, name)}
    if kind not in _DEFAULTS:
        raise ValueError(f"expected one of {', '.join(_DEFAULTS)}, got {kind}")
    unknown = [name for name in given if name not in _DEFAULTS[kind]]
    if unknown:
        raise ValueError(f"{kind} has no '{unknown[0]}'; it has {', '.join(_DEFAULTS[kind])}")
    fields = {**_DEFAULTS[kind], **given}
    for name in ("weight_threshold", "target_sparsity"):
        value = fields.get(name)
        if value is not None and not (_is_number(value) and value >= 0):
            raise ValueError(f"{kind}: expected {name} from 0, got {value!r}")
    ratio = fields.get("n_m_ratio")
    if ratio is not None and not (isinstance(ratio, (list, tuple)) and len(ratio) == 2):
        raise ValueError(f"{kind}: expected an n_m_ratio of two numbers n <= m, got {ratio!r}")
    if "mode" in fields:
        fields["mode"] = str(fields["mode"]).lower()
    if "granularity" in fields:  # coremltools' is an enum
        fields["granularity"] = getattr(fields["granularity"], "name", str(fields["granularity"])).lower()
    if "dtype" in fields:
        fields["dtype"] = _dtype(fields["dtype"])
    if isinstance(fields.get("block_size"), (list, tuple)):
        fields["block_size"] = tuple(fields["block_size"])
    return _Config(kind, tuple(fields.items()))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _guess(fields: Dict[str, Any]) -> str:
    if "threshold" in fields or "minimum_sparsity_percentile" in fields:
        return "OpThresholdPrunerConfig"
    if "target_sparsity" in fields or "n_m_ratio" in fields:
        return "OpMagnitudePrunerConfig"
    if "nbits" in fields or fields.get("mode") in ("kmeans", "uniform", "unique", "custom"):
        return "OpPalettizerConfig"
    return "OpLinearQuantizerConfig"


def _dtype(dtype: Any) -> str:
    if isinstance(dtype, str):
        name = dtype
    elif hasattr(dtype, "get_bitwidth"):  # coremltools' own types
        name = ("uint" if dtype.is_unsigned() else "int") + str(dtype.get_bitwidth())
    else:
        name = np.dtype(dtype).name
    if name not in ("int4", "int8", "uint4", "uint8"):
        raise ValueError(f"expected dtype int4, int8, uint4 or uint8, got {name}")
    return name


class _Choice:
    """The configuration of each weight, as `OptimizationConfig` chooses it: by name, by the users' types, or the global one."""

    def __init__(self, config: Any):
        if isinstance(config, dict) and not any(level in config for level in _LEVELS):
            config = {"global_config": config}
        elif not isinstance(config, dict) and type(config).__name__ in _DEFAULTS:
            config = {"global_config": config}
        if isinstance(config, dict):
            unknown = [key for key in config if key not in _LEVELS and key != "config_type"]
            if unknown:
                raise ValueError(f"expected {', '.join(_LEVELS)}, got '{unknown[0]}'")
            kind = config.get("config_type")
            levels = [config.get(level) for level in _LEVELS]
        elif all(hasattr(config, level) for level in _LEVELS):
            kind, levels = None, [getattr(config, level) for level in _LEVELS]
        else:
            raise TypeError(f"expected coremltools' OptimizationConfig or a dict, got {type(config).__name__}")
        self.default = _op_config(levels[0], kind)
        self.types = {name: _op_config(c, kind) for name, c in (levels[1] or {}).items()}
        self.names = {name: _op_config(c, kind) for name, c in (levels[2] or {}).items()}

    def of(self, name: str, users: List[_User]) -> Optional[_Config]:
        if name in self.names:
            return self.names[name]
        chosen = [self._of_user(op_type, op_name) for op_type, op_name, *_ in users]
        # A constant that is an output itself is not compressed.
        if not chosen:
            return None
        if any(c != chosen[0] for c in chosen):
            raise ValueError(f"weight '{name}': operations {', '.join(u[1] for u in users)} use it with different configurations")
        return chosen[0]

    def _of_user(self, op_type: str, op_name: str) -> Optional[_Config]:
        if op_name in self.names:
            return self.names[op_name]
        return self.types[op_type] if op_type in self.types else self.default


def _count(config: _Config, field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{config.kind}: expected {field} from 1, got {value!r}")
    return int(value)


def _axes(rank: int, users: List[_User]) -> Optional[Tuple[int, int]]:
    """Returns the axes of output and input channels, as coremltools chooses them; None where operations have different ones."""
    found = set()
    for op_type, _, param, transposes, _ in users:
        if op_type == "conv_transpose":
            found.add((1, 0))
        elif op_type == "matmul":
            last_is_output = (param == "y") != transposes
            found.add((rank - 1, rank - 2) if last_is_output else (rank - 2, rank - 1))
        else:
            found.add((0, 1))
    return None if len(found) > 1 else found.pop() if found else (0, 1)


def _pruned(config: _Config, function: str, name: str, shape: List[int], users: List[_User], named: bool) -> Optional[_anemoe.Job]:
    """Returns the job of a pruned weight; None where it stays."""
    if config.kind == "OpThresholdPrunerConfig":
        for field in ("threshold", "minimum_sparsity_percentile"):
            if not _is_number(config[field]) or not config[field] >= 0:
                raise ValueError(f"{config.kind}: expected {field} from 0, got {config[field]!r}")
        return _anemoe.Job.threshold(function, name, float(config["threshold"]), float(config["minimum_sparsity_percentile"]))
    share, size, ratio = config["target_sparsity"], config["block_size"], config["n_m_ratio"]
    if (share is None) == (ratio is None) or (size is not None and ratio is not None):
        raise ValueError(f"{config.kind}: expected target_sparsity, with or without block_size, or n_m_ratio")
    axis = config["dim"] if config["dim"] is not None else 0 if ratio is None else 1
    if axis not in (0, 1):
        raise ValueError(f"{config.kind}: expected dim of 0 or 1, got {axis!r}")
    # Blocks and neighbours are for the weights of linear and conv, and for those that are named.
    has_structure = size is not None or ratio is not None
    if has_structure and not named and any(u[0] not in ("conv", "linear") or u[2] != "weight" for u in users):
        return None
    if ratio is not None:
        n, m = (_count(config, "n_m_ratio", v) for v in ratio)
        if n > m:
            raise ValueError(f"{config.kind}: expected an n_m_ratio of two numbers n <= m, got {ratio!r}")
        return _anemoe.Job.neighbours(function, name, n, m, axis)
    if not 0 <= share <= 1:
        raise ValueError(f"{config.kind}: expected target_sparsity from 0 to 1, got {share!r}")
    size = 1 if size is None else _count(config, "block_size", size)
    return None if share == 0 else _anemoe.Job.share(function, name, float(share), size, axis)


def _custom(config: _Config, function: str, name: str, weight: np.ndarray, axis: int, group: int, vector: int, scaled: bool) -> Optional[_anemoe.Job]:
    """Returns the job of the tables that `lut_function` gives for each group of channels; None where groups or vectors do not fit."""
    wrong = lambda what: ValueError(f"weight '{name}': lut_function {what}")
    whole, scale = weight, np.zeros((0,) * weight.ndim, np.float32)
    if scaled:
        scale = np.abs(weight).max(axis=tuple(a for a in range(weight.ndim) if a != axis), keepdims=True)
        scale[scale == 0] = 1
        weight = weight / scale
    moved = np.swapaxes(weight, 0, axis)
    if moved.shape[0] % group or group % vector:
        return None
    tables, codes = [], []
    for rows in np.split(moved, moved.shape[0] // group):
        lut, indices = config["lut_function"](rows)
        lut, indices = np.asarray(lut, np.float32), np.asarray(indices)
        if lut.size == 0 or lut.size % vector or lut.size // vector > 256 or not np.all(np.isfinite(lut)):
            raise wrong(f"gave a table of shape {lut.shape}, expected up to 256 finite entries of {vector}")
        if indices.size != rows.size // vector or indices.dtype.kind not in "iu":
            raise wrong(f"gave {indices.size} indices of {indices.dtype}, expected {rows.size // vector} integers")
        if indices.min() < 0 or indices.max() >= lut.size // vector:
            raise wrong(f"gave an index of {indices.min()} or {indices.max()} for {lut.size // vector} entries")
        tables.append(lut.reshape(-1, vector))
        codes.append(indices.astype(np.uint8).reshape(group // vector, *moved.shape[1:]))
    most = max(len(lut) for lut in tables)
    bits = next(n for n in (1, 2, 3, 4, 6, 8) if most <= 2**n)
    tables = [np.pad(lut, ((0, 2**bits - len(lut)), (0, 0))) for lut in tables]
    decoded = [np.moveaxis(lut[c], -1, 1).reshape(group, *moved.shape[1:]) for lut, c in zip(tables, codes)]
    decoded = np.swapaxes(np.concatenate(decoded), 0, axis) * (scale if scaled else 1)
    lut = np.swapaxes(np.stack(tables).reshape(len(tables), *(1,) * (weight.ndim - 1), 2**bits, vector), 0, axis)
    square = lambda values: float(np.sum(values.astype(np.float64) ** 2))
    relative = square(decoded - whole) / (square(whole) or 1.0)
    flat = lambda values, dtype: np.ascontiguousarray(values, dtype)
    indices = flat(np.swapaxes(np.concatenate(codes), 0, axis), np.uint8)
    vector_axis = axis if vector > 1 else None
    return _anemoe.Job.tables(function, name, bits, indices, flat(lut, np.float32), vector_axis, flat(scale, np.float32), relative)


def _job(config: _Config, function: str, name: str, shape: List[int], users: List[_User], named: bool, read: Any) -> Optional[_anemoe.Job]:
    """Returns the job of a weight; None where it stays."""
    if np.prod(shape) <= (config["weight_threshold"] or 0):
        return None
    if config.kind in ("OpThresholdPrunerConfig", "OpMagnitudePrunerConfig"):
        return _pruned(config, function, name, shape, users, named)
    refuse = lambda what: NotImplementedError(f"{config.kind}: {what}")
    per_tensor = config["granularity"] == "per_tensor"
    axes = _axes(len(shape), users)
    if axes is None and not per_tensor:
        raise ValueError(f"weight '{name}': its operations have their output channels on different axes; give it no groups")
    axes = axes or (0, 1)
    if config.kind == "OpPalettizerConfig":
        mode, nbits = config["mode"], config["nbits"]
        if (mode == "custom") != callable(config["lut_function"]):
            raise ValueError(f"expected a function as lut_function for mode 'custom' alone, got {config['lut_function']!r} for '{mode}'")
        vector, scaled = _count(config, "cluster_dim", config["cluster_dim"]), bool(config["enable_per_channel_scale"])
        if mode == "unique" and (vector > 1 or scaled):
            raise refuse("mode 'unique' with cluster_dim or enable_per_channel_scale is not implemented")
        if mode == "unique":
            distinct = len(np.unique(read()))
            nbits = next((n for n in (1, 2, 4, 6, 8) if distinct <= 2**n), None)
            if nbits is None:
                return None
        elif mode == "custom":
            if nbits is not None:
                raise ValueError(f"expected no nbits with mode 'custom', whose lut_function decides, got {nbits}")
        elif mode not in ("kmeans", "uniform"):
            raise ValueError(f"expected mode 'kmeans', 'uniform', 'unique' or 'custom', got '{mode}'")
        elif nbits not in (1, 2, 3, 4, 6, 8):
            raise ValueError(f"expected nbits of 1, 2, 3, 4, 6 or 8, got {nbits}")
        if config["granularity"] not in ("per_tensor", "per_grouped_channel"):
            raise ValueError(f"expected granularity 'per_tensor' or 'per_grouped_channel', got '{config['granularity']}'")
        if not per_tensor and config["channel_axis"] is not None:
            axis = config["channel_axis"]
            if axis not in range(-len(shape), len(shape)):
                raise ValueError(f"weight '{name}': expected channel_axis below {len(shape)}, got {axis!r}")
            axis %= len(shape)
            axes = (axis, next(a for a in (axes[1], axes[0]) if a != axis))
        kind = f"lut{nbits}" + ("-uniform" if mode == "uniform" else "") + ("-tensor" if per_tensor else "")
        # Vectors lie within a group of a convolution.
        output = lambda user: shape[axes[0]] // (user[4] if user[0] in ("conv", "conv_transpose") and axes[0] == 0 else 1)
        if any(output(user) % vector for user in users):
            return None
        group = _count(config, "group_size", config["group_size"] or shape[axes[0]])
        if mode == "custom":
            return _custom(config, function, name, read(), axes[0], shape[axes[0]] if per_tensor else group, vector, scaled)
        return _anemoe.Job.quantize(function, name, kind, [group, 32], list(axes), False, vector, scaled)
    block = config["block_size"]
    granularity = {"per_tensor": "tensor", "per_channel": "channel", "per_block": "block"}.get(config["granularity"])
    if granularity is None:
        raise ValueError(f"expected granularity 'per_tensor', 'per_channel' or 'per_block', got '{config['granularity']}'")
    if config["mode"] not in ("linear", "linear_symmetric"):
        raise ValueError(f"expected mode 'linear' or 'linear_symmetric', got '{config['mode']}'")
    if granularity == "block" and isinstance(block, tuple):
        if len(block) != len(shape):
            raise ValueError(f"weight '{name}': expected a block_size of {len(shape)} numbers, got {block}")
        others = [n for axis, n in enumerate(block) if axis not in axes and n not in (0, shape[axis])]
        if block[axes[0]] != 1 or others:
            raise refuse(f"block_size {block} is not implemented; expected blocks of input channels")
        block = block[axes[1]]
    bits = config["dtype"].lstrip("uint")
    kind = f"int{bits}-{granularity}" + ("-asymmetric" if config["mode"] == "linear" else "")
    if granularity != "block":
        block = 32
    elif block == 0:  # the whole axis
        block = shape[axes[1]]
    groups = [32, _count(config, "block_size", block)]
    return _anemoe.Job.quantize(function, name, kind, groups, list(axes), config["dtype"].startswith("uint"), 1, False)


def compress(model: Any, config: Any, output: Any = None, weights_dir: Optional[str] = None, sample_data: Any = None) -> Any:
    """Compresses the weights of a package, with the configurations of `coremltools.optimize.coreml`.

    model: what `anemoe.Model` takes. config: coremltools' OptimizationConfig with OpPalettizerConfig, OpLinearQuantizerConfig,
        OpThresholdPrunerConfig or OpMagnitudePrunerConfig, one of these alone, or a dict of the same fields.
    output: path of the new .mlpackage, which must not exist; a temporary folder without it.
    sample_data: a list of dicts of inputs. Tables and integers are chosen so that the outputs of linear and conv layers change least for
        these inputs, instead of their weights.

    Returns a coremltools MLModel for one, else a Model. `compression` of either lists what was done: name, kind, bytes before and
    after, and relative error of each weight. The result keeps the model's function, precision, compute units and optimization hints.
    """
    choice = _Choice(config)
    source = _source(model, weights_dir)
    runner, samples = None, []
    if sample_data is not None:
        runs = model if isinstance(model, Model) else Model(model, weights_dir=weights_dir, precision="fp32")
        if not isinstance(sample_data, (list, tuple)) or not sample_data or not all(isinstance(d, dict) for d in sample_data):
            raise TypeError("expected sample_data as a list of dicts of inputs")
        runner, samples = runs._runner, [runs._arrays(data) for data in sample_data]
    weights = None
    jobs, for_samples = [], []
    for function, name, shape, users in _anemoe.dense_weights(*source):
        chosen = choice.of(name, users)
        if chosen is None:
            continue

        def read(function: str = function, name: str = name) -> np.ndarray:
            nonlocal weights
            weights = weights or _anemoe.Weights(*source)
            return weights.read(f"{function}/{name}" if f"{function}/{name}" in weights.names else name)

        named = name in choice.names or any(user[1] in choice.names for user in users)
        job = _job(chosen, function, name, shape, users, named, read)
        if job is not None:
            jobs.append(job)
            # Codes of tables on other axes than the operation's know of no inputs.
            if dict(chosen.fields).get("channel_axis") is None and _axes(len(shape), users) is not None:
                for_samples.append(name)
    folder = None
    if output is None:
        folder = tempfile.TemporaryDirectory(prefix="anemoe-")
        output = os.path.join(folder.name, "compressed.mlpackage")
    output = os.path.expanduser(os.fspath(output))
    report = _anemoe.compress(*source, output, jobs, runner, samples, for_samples)
    if hasattr(model, "get_spec") and not isinstance(model, Model):
        kept = {"compute_units": model.compute_unit, "function_name": model.function_name, "optimization_hints": model.optimization_hints}
        result = type(model)(output, skip_model_load=True, **kept)
        result._anemoe_folder = folder
    else:
        kept = {}
        if isinstance(model, Model):
            kept = {"function": model.function_name, "precision": model._precision, "compute_units": model._compute_unit}
            kept["optimization_hints"] = model.optimization_hints
        result = Model(output, **kept) if folder is None else _Temporary(folder, output, **kept)
    result.compression = [dict(zip(("name", "kind", "before", "after", "relative_mse"), row)) for row in report]
    return result
