"""A function of a Core ML package, with the interface of coremltools' `MLModel`."""

from __future__ import annotations

import glob
import json
import os
import shutil
import tempfile
import uuid
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from . import _anemoe

_Path = Union[str, "os.PathLike[str]"]
# Modes of PIL images by color space, as coremltools takes them.
_MODES = {"RGB": "RGB", "BGR": "RGB", "GRAYSCALE": "L", "GRAYSCALE_FLOAT16": "F"}
# Where a model in memory seems to lie when no folder of weights is given.
_MEMORY = os.path.join("(model in memory)", "model.mlmodel")


def _words(shape: Sequence[Any]) -> str:
    """Writes a shape as Python does, with ranges in place of sizes that vary."""
    return "(" + ", ".join(str(n) for n in shape) + ("," if len(shape) == 1 else "") + ")"


@dataclass(frozen=True)
class Feature:
    """An input, output or state of a function."""

    name: str
    #: multiArray, image, int64, double, string, dictionary or sequence, as in the specification.
    kind: str
    #: NumPy's name of the element type; of a dictionary, of its keys.
    dtype: str
    #: The default shape; an image's is (1, channels, height, width), None where it follows from the inputs.
    shape: Optional[Tuple[int, ...]]
    #: The shapes that may be chosen from; empty unless they are enumerated.
    shapes: Tuple[Tuple[int, ...], ...] = ()
    #: Lower and upper bound of each dimension, None for no upper one; empty unless the shape has ranges.
    ranges: Tuple[Tuple[int, Optional[int]], ...] = ()
    #: Value of every element where the input is left out; None where it has to be given.
    default: Optional[float] = None
    #: RGB, BGR, GRAYSCALE or GRAYSCALE_FLOAT16; None unless it is an image.
    color_space: Optional[str] = None
    #: Its author's words; may be empty.
    short_description: str = ""

    @classmethod
    def _of(cls, parts: Dict[str, Any]) -> "Feature":
        shape = parts.pop("shape")
        shapes = tuple(tuple(s) for s in parts.pop("shapes", ()))
        ranges = tuple(tuple(r) for r in parts.pop("ranges", ()))
        return cls(shape=None if shape is None else tuple(shape), shapes=shapes, ranges=ranges, **parts)

    def _takes(self, shape: Tuple[int, ...]) -> bool:
        if self.shapes:
            return shape in self.shapes
        if self.ranges:
            fits = (low <= n and (high is None or n <= high) for n, (low, high) in zip(shape, self.ranges))
            return len(shape) == len(self.ranges) and all(fits)
        return self.shape is None or shape == self.shape

    def _expected(self) -> str:
        if self.shapes:
            return "one of the shapes " + ", ".join(_words(s) for s in self.shapes)
        if self.ranges:
            ends = (f"{low}..{'' if high is None else high}" if low != high else low for low, high in self.ranges)
            return "shape " + _words(list(ends))
        return "shape " + _words(self.shape or ())

    def __str__(self) -> str:
        if self.kind == "multiArray":
            return f"{self.dtype} array" + ("" if self.shape is None else f" of {self._expected()}")
        if self.kind == "image":
            return f"{self.color_space} image of {self._expected()}"
        return self.kind


class _Descriptions(Mapping[str, str]):
    """Features by name, each in words, as coremltools' `input_description` is used."""

    def __init__(self, features: Sequence[Feature]):
        self._features = {f.name: f for f in features}
        #: Words that replace the author's.
        self.new: Dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        if name not in self._features:
            raise KeyError(f"No feature with name {name}.")
        feature = self._features[name]
        return self.new.get(name, feature.short_description) or str(feature)

    def __setitem__(self, name: str, words: str) -> None:
        self[name]
        self.new[name] = _text(words)

    def __iter__(self):
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def __repr__(self) -> str:
        return f"Features({','.join(self)})"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {type(value).__name__}")
    return value


def _metadata(field: str, doc: str) -> property:
    """Makes the property of a field of the metadata; a new value is in the specification that `get_spec` and `save` make."""

    def change(self: "Model", value: str) -> None:
        self._metadata[field] = _text(value)

    return property(lambda self: self._metadata.get(field, ""), change, doc=doc)


def _write_package(path: str, spec: bytes, weights_dir: Optional[str]) -> None:
    """Writes a package of a specification and a folder of weights."""
    author, items = "com.apple.CoreML", {}
    folder = os.path.join(path, "Data", author)
    os.makedirs(folder)
    with open(os.path.join(folder, "model.mlmodel"), "wb") as file:
        file.write(spec)
    parts = [("model.mlmodel", "CoreML Model Specification")]
    if weights_dir is not None:
        shutil.copytree(weights_dir, os.path.join(folder, "weights"))
        parts.append(("weights", "CoreML Model Weights"))
    for name, words in parts:
        items[str(uuid.uuid4()).upper()] = {"author": author, "description": words, "name": name, "path": f"{author}/{name}"}
    manifest = {"fileFormatVersion": "1.0.0", "itemInfoEntries": items, "rootModelIdentifier": next(iter(items))}
    with open(os.path.join(path, "Manifest.json"), "w") as file:
        json.dump(manifest, file, indent=4)


def _root_model(package: str) -> str:
    """Returns the path of a package's specification, which its manifest names."""
    with open(os.path.join(package, "Manifest.json"), encoding="utf-8") as file:
        manifest = json.load(file)
    return os.path.join(package, "Data", manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"])


def _source(model: Any, weights_dir: Optional[str] = None) -> Tuple[str, Optional[bytes]]:
    """Returns the path of a model, or the place and the bytes of one that is in memory."""
    if isinstance(model, Model):
        return model._current()
    if isinstance(model, (str, os.PathLike)):
        return os.path.expanduser(os.fspath(model)), None
    if hasattr(model, "get_spec"):
        weights_dir = weights_dir or getattr(model, "weights_dir", None)
        model = model.get_spec()
    if hasattr(model, "SerializeToString"):
        model = model.SerializeToString()
    if not isinstance(model, (bytes, bytearray, memoryview)):
        raise TypeError(
            "expected the path of a .mlpackage or .mlmodel, a specification (bytes or Model_pb2) or a coremltools MLModel, "
            f"got {type(model).__name__}"
        )
    if weights_dir is None:
        return _MEMORY, bytes(model)
    folder, name = os.path.split(os.path.normpath(os.fspath(weights_dir)))
    if name != "weights":
        raise ValueError(f"expected a weights_dir named 'weights', got '{weights_dir}'")
    return os.path.join(folder, "model.mlmodel"), bytes(model)


def _to_numpy(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):  # a tensor of torch, which knows bfloat16
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
        return value.numpy()
    return np.asarray(value)


def _aligned(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Converts to a type in C order and aligned, without a copy where it is all that."""
    return np.require(array, dtype, ["C", "A"]).reshape(array.shape)


def _convert(feature: Feature, value: Any) -> np.ndarray:
    """Converts a value to the float32, int32 or bool array that an input takes.

    Raises TypeError for another type, ValueError for another shape.
    """
    name = feature.name
    if feature.kind == "image":
        array = _planes(feature, value)
    elif feature.kind == "multiArray":
        try:
            array = _to_numpy(value)
        except ValueError as e:  # lists of unequal lengths
            raise ValueError(f"input '{name}': {e}") from None
    else:
        raise NotImplementedError(f"input '{name}' is a {feature.kind}, which is not implemented")
    wanted = np.float32 if feature.dtype.startswith("float") else np.bool_ if feature.dtype == "bool" else np.int32
    if array.dtype.kind not in "biuf":
        got = f"an array of {array.dtype}" if isinstance(value, np.ndarray) else f"{type(value).__name__}"
        raise TypeError(f"input '{name}': expected {feature.dtype}, got {got}")
    if wanted == np.int32 and array.dtype.kind == "f":
        # Core ML converts floats, and coremltools' own tests give them.
        if array.size and not (np.isfinite(array).all() and (array == np.trunc(array)).all()):
            raise TypeError(f"input '{name}': expected {feature.dtype}, got {array.dtype} with fractions")
    if wanted == np.int32 and array.dtype != np.int32 and array.size and array.dtype.kind != "b":
        low, high = array.min(), array.max()
        if low < -(2**31) or high >= 2**31:
            raise ValueError(f"input '{name}': expected numbers that fit int32, got {low} to {high}")
    if not feature._takes(array.shape):
        # A scalar is described as one element.
        if array.shape != () or feature.shape != (1,):
            raise ValueError(f"input '{name}': expected {feature._expected()}, got {_words(array.shape)}")
        array = array.reshape(1)
    return _aligned(array, wanted)


def _planes(feature: Feature, value: Any) -> np.ndarray:
    """Makes (1, channels, height, width) of a PIL image, of uint8 pixels (height, width[, channels]), or takes planes as they are."""
    name, mode = feature.name, _MODES[feature.color_space or "RGB"]
    pixels = _to_numpy(value)
    if isinstance(getattr(value, "mode", None), str):  # of a tensor it is a method
        if value.mode != mode:
            raise TypeError(f"image input '{name}': expected a PIL image of mode '{mode}', got mode '{value.mode}'")
    elif pixels.ndim == 4:
        return pixels
    elif pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
        raise TypeError(f"image input '{name}': expected a PIL image of mode '{mode}' or an array of its pixels")
    if pixels.size == 0:
        raise ValueError(f"image input '{name}': expected {feature._expected()}, got an image of {_words(pixels.shape[:2])} pixels")
    pixels = pixels.reshape(pixels.shape[0], pixels.shape[1], -1)
    channels = 3 if mode == "RGB" else 1
    if pixels.shape[2] != channels:
        raise ValueError(f"image input '{name}': expected {channels} channels, got {pixels.shape[2]}")
    if feature.color_space == "BGR":
        pixels = pixels[:, :, ::-1]
    return pixels.transpose(2, 0, 1)[np.newaxis].astype(np.float32)


def _image(feature: Feature, planes: np.ndarray) -> Any:
    """Makes the PIL image of an output: RGBA, L or F, as coremltools does."""
    from PIL import Image

    pixels = planes[0].transpose(1, 2, 0)
    if feature.color_space == "GRAYSCALE_FLOAT16":
        return Image.fromarray(pixels[:, :, 0].astype(np.float32))
    pixels = np.clip(np.nan_to_num(np.rint(pixels)), 0, 255).astype(np.uint8)
    if feature.color_space == "GRAYSCALE":
        return Image.fromarray(np.ascontiguousarray(pixels[:, :, 0]))
    pixels = pixels[:, :, ::-1] if feature.color_space == "BGR" else pixels
    opaque = np.full(pixels.shape[:2] + (1,), 255, np.uint8)
    return Image.fromarray(np.concatenate([pixels, opaque], axis=2))


class State:
    """States of a sequence, as `Model.make_state()` returns them."""

    def __init__(self, state: _anemoe.State, halves: Sequence[str] = ()):
        self._state = state
        #: Names of the states that hold fp16.
        self._halves = frozenset(halves)

    def read_state(self, name: str) -> np.ndarray:
        """Returns a copy of a state."""
        return self._state.read_state(name)

    def write_state(self, name: str, value: Any) -> None:
        """Sets a state, rounded to its type."""
        values = _to_numpy(value)
        if name in self._halves:
            with np.errstate(over="ignore"):
                values = values.astype(np.float16)
        self._state.write_state(name, _aligned(values, np.float32))


class Model:
    """A function of a Core ML package, ready to run on this machine's CPU.

    model: path of a .mlpackage or .mlmodel, a specification (bytes or Model_pb2), or a coremltools MLModel.
    function, function_name: name of the function; the package's default without one.
    precision: "fp16" rounds every fp16 result, as the device does; "fp32" rounds nothing.
    threads: threads to compute with, shared by all models of the process; one per processor without it.
    weights_dir: the folder `weights` of a specification in memory.

    The other arguments are those of coremltools' MLModel, and change nothing here; compute_units and optimization_hints are kept.
    """

    def __init__(
        self,
        model: Any,
        function: Optional[str] = None,
        precision: Optional[str] = "fp16",
        threads: Optional[int] = None,
        *,
        function_name: Optional[str] = None,
        weights_dir: Optional[str] = None,
        compute_units: Any = None,
        optimization_hints: Optional[dict] = None,
        is_temp_package: bool = False,
        mil_program: Any = None,
        skip_model_load: bool = False,
    ):
        del is_temp_package, mil_program, skip_model_load
        precision = "fp16" if precision is None else precision
        if threads is not None and threads < 1:
            raise ValueError(f"expected threads from 1, got {threads}")
        if function is not None and function_name is not None and function != function_name:
            raise ValueError(f"expected one function, got '{function}' and '{function_name}'")
        function = function_name if function is None else function
        if function is not None and not isinstance(function, str):
            raise TypeError(f"expected the name of a function, got {type(function).__name__}; MLModel's other arguments are given by name")
        if hasattr(model, "get_spec"):
            function = getattr(model, "function_name", None) if function is None else function
            compute_units = getattr(model, "_compute_unit", getattr(model, "compute_unit", None)) if compute_units is None else compute_units
            if optimization_hints is None:
                optimization_hints = getattr(model, "optimization_hints", None)
        self._compute_unit = compute_units
        #: Hints for Core ML, which are kept and change nothing here.
        self.optimization_hints = None if optimization_hints is None else dict(optimization_hints)
        _anemoe.set_threads(threads)
        self._given = model  # keeps a temporary package alive
        self._source = _source(model, weights_dir)
        self._precision = precision
        try:
            self._runner = _anemoe.Runner(*self._source, function, precision)
        except FileNotFoundError:
            if self._source[0] == _MEMORY:
                raise ValueError("the model's weights are in a file; give weights_dir") from None
            raise
        self.function_name = self._runner.name
        self._inputs = [Feature._of(f) for f in self._runner.inputs]
        self._results = [Feature._of(f) for f in self._runner.outputs]
        self._outputs = [Feature._of(f) for f in self._runner.described_outputs]
        self._states = [Feature._of(f) for f in self._runner.states]
        own = ("author", "license", "shortDescription", "versionString")
        self._metadata = {key: text for key, text in self._runner.metadata if key in own}
        self._user_defined = {key: text for key, text in self._runner.metadata if key not in own}
        self._input_description, self._output_description = _Descriptions(self._inputs), _Descriptions(self._outputs)

    @property
    def inputs(self) -> List[Feature]:
        """Inputs of the function, in order."""
        return list(self._inputs)

    @property
    def outputs(self) -> List[Feature]:
        """Outputs of the function, in order."""
        return list(self._outputs)

    @property
    def states(self) -> List[Feature]:
        """States of the function, in order."""
        return list(self._states)

    @property
    def input_description(self) -> Mapping[str, str]:
        """Inputs by name: their author's words, or type and shape."""
        return self._input_description

    @property
    def output_description(self) -> Mapping[str, str]:
        """Outputs by name: their author's words, or type and shape."""
        return self._output_description

    @property
    def user_defined_metadata(self) -> Dict[str, str]:
        """Metadata without fields of their own; what is set is in the specification that `get_spec` and `save` make."""
        return self._user_defined

    author = _metadata("author", "Author of the model.")
    license = _metadata("license", "License of the model.")
    short_description = _metadata("shortDescription", "What the model is.")
    version = _metadata("versionString", "Version of the model.")

    @property
    def compute_unit(self) -> Any:
        """The compute units that were given, which change nothing here; coremltools' default without them."""
        if self._compute_unit is not None:
            return self._compute_unit
        try:
            from coremltools import ComputeUnit
        except ImportError:
            return None
        return ComputeUnit.ALL

    @property
    def is_package(self) -> bool:
        """True unless the model is a single file."""
        return self._source[1] is not None or os.path.isdir(self._source[0])

    @property
    def package_path(self) -> Optional[str]:
        """Path of the package; None for a file and for a specification in memory."""
        if self._source[1] is None:
            return os.path.abspath(self._source[0]) if self.is_package else None
        return getattr(self._given, "package_path", None)

    @property
    def weights_dir(self) -> Optional[str]:
        """Path of the folder `weights`; None where the model has none."""
        path, spec = self._source
        found = glob.glob(os.path.join(glob.escape(path if spec is None else os.path.dirname(path)), "Data/*/weights" if spec is None else "weights"))
        return os.path.abspath(found[0]) if found else None

    def _is_changed(self) -> bool:
        described = self._input_description.new or self._output_description.new
        return bool(described) or {**self._metadata, **self._user_defined} != dict(self._runner.metadata)

    def _current(self) -> Tuple[str, Optional[bytes]]:
        """Returns the path, or place and bytes where the model is in memory or its metadata were changed."""
        if not self._is_changed():
            return self._source
        weights = self.weights_dir
        return os.path.join(os.path.dirname(weights), "model.mlmodel") if weights else _MEMORY, self._changed_spec()

    def _changed_spec(self) -> bytes:
        spec = self.get_spec()
        if isinstance(spec, dict):
            raise NotImplementedError("metadata that were changed are written with coremltools, which is not installed")
        return spec.SerializeToString()

    def _describe(self, spec: Any) -> Any:
        """Writes changed metadata and descriptions into a specification."""
        metadata = spec.description.metadata
        for field, text in self._metadata.items():
            setattr(metadata, field, text)
        metadata.userDefined.clear()
        metadata.userDefined.update(self._user_defined)
        parts = [f for f in spec.description.functions if f.name == self.function_name] or [spec.description]
        for features, words in ((parts[0].input, self._input_description.new), (parts[0].output, self._output_description.new)):
            for feature in features:
                feature.shortDescription = words.get(feature.name, feature.shortDescription)
        return spec

    def get_spec(self) -> Any:
        """Returns a copy of the specification: coremltools' Model_pb2 where coremltools is installed, else a dict with its first fields."""
        path, spec = self._source
        try:
            from coremltools.models.utils import load_spec
            from coremltools.proto import Model_pb2
        except ImportError:
            fields = ("input", "output", "state")
            lists = (self._inputs, self._outputs, self._states)
            described: Dict[str, Any] = {name: [vars(f).copy() for f in features] for name, features in zip(fields, lists)}
            described["metadata"] = {**self._metadata, **self._user_defined}
            return {"specificationVersion": self._runner.specification_version, "description": described}
        try:
            read = load_spec(path) if spec is None else Model_pb2.Model.FromString(spec)
        except Exception as e:  # coremltools raises RuntimeError and protobuf's own
            raise ValueError(f"coremltools cannot read {path}: {e}") from e
        return self._describe(read) if self._is_changed() else read

    def save(self, save_path: Optional[_Path] = None, *, path: Optional[_Path] = None) -> None:
        """Writes the package, over one that is there. A path without an extension gets `.mlpackage`.

        save_path, path: where; both names mean the same.
        """
        if (save_path is None) == (path is None):
            raise TypeError("expected a save_path")
        target = os.path.abspath(os.path.expanduser(os.fspath(path if save_path is None else save_path)))
        extension = os.path.splitext(target)[1]
        if self.is_package and extension != ".mlpackage":
            if extension:
                raise ValueError(f"expected a path that ends in .mlpackage, got '{target}'")
            target += ".mlpackage"
        if os.path.isdir(target) and os.listdir(target) and not os.path.exists(os.path.join(target, "Manifest.json")):
            raise FileExistsError(f"{target} is a folder and no package")
        changed = self._changed_spec() if self._is_changed() else None
        os.makedirs(os.path.dirname(target), exist_ok=True)
        # Beside the target first: that may be this model's own package.
        with tempfile.TemporaryDirectory(prefix=".anemoe-", dir=os.path.dirname(target)) as folder:
            new = os.path.join(folder, os.path.basename(target))
            if self._source[1] is not None:
                _write_package(new, changed or self._source[1], self.weights_dir)
            elif self.is_package:
                shutil.copytree(self._source[0], new)
            else:
                shutil.copyfile(self._source[0], new)
            if changed and self._source[1] is None:
                with open(_root_model(new) if self.is_package else new, "wb") as file:
                    file.write(changed)
            if os.path.isdir(target):
                os.replace(target, os.path.join(folder, "old"))
            os.replace(new, target)

    def make_state(self) -> State:
        """Makes the states of a new sequence, all zero."""
        halves = [f.name for f in self._states if f.dtype == "float16" and self._precision == "fp16"]
        return State(self._runner.make_state(), halves)

    def predict(self, data: Any, state: Optional[State] = None) -> Any:
        """Runs the function on a dict of inputs by name, or on each of a list of dicts.

        Inputs are arrays, tensors of torch, lists or PIL images. Outputs are arrays (float32 for floats of 16 and 32 bits, as
        coremltools gives them), PIL images, or a class and its probabilities.

        Raises KeyError for a name that is no input and for an input that is missing, TypeError for a value of another type,
        ValueError for one of another shape.
        """
        if isinstance(data, list):
            if not all(isinstance(each, dict) for each in data):
                raise TypeError('"data" list must contain only dictionaries')
            if state is not None:
                raise ValueError("expected one dict of inputs with a state, got a list")
            return [self.predict(each) for each in data]
        results = self._run(self._runner, data, state)
        outputs = {f.name: self._output(f, value) for f, value in zip(self._results, results)}
        if self._runner.classifier is not None:
            label, probabilities, tensor, classes = self._runner.classifier
            values = outputs[tensor].ravel()
            if len(values) != len(classes):
                raise ValueError(f"output '{probabilities}': {len(values)} values for {len(classes)} classes")
            if all(f.name != tensor for f in self._outputs):
                del outputs[tensor]
            outputs[label] = classes[int(values.argmax())]
            outputs[probabilities] = dict(zip(classes, values.astype(float).tolist()))
        return outputs

    def trace(self, data: Dict[str, Any], state: Optional[State] = None) -> Dict[str, np.ndarray]:
        """Runs the function and returns the result of every operation by name, in order; a state is not changed."""
        runner = _anemoe.Runner(*self._source, self.function_name, self._precision, True)
        copy = None
        if self._states:
            copy = self.make_state()
            for f in self._states if state is not None else ():
                copy.write_state(f.name, state.read_state(f.name))
        results = self._run(runner, data, copy)
        return {f["name"]: value for f, value in zip(runner.outputs, results)}

    def _run(self, runner: _anemoe.Runner, data: Any, state: Optional[State]) -> List[Any]:
        if not isinstance(data, dict):
            raise TypeError(f'"data" parameter must be either a dict or list of dict, but got {type(data)}.')
        if state is not None and not isinstance(state, State):
            raise TypeError(f"expected a state that make_state() returned, got {type(state).__name__}")
        if state is None and self._states:
            raise ValueError("the model has states; expected state=model.make_state()")
        arrays = self._arrays(data)
        return runner.run(arrays, None if state is None else state._state)

    def _arrays(self, data: Dict[str, Any]) -> List[np.ndarray]:
        """Converts the inputs to arrays, in the function's order."""
        names = [f.name for f in self._inputs]
        for name in data:
            if name not in names:
                raise KeyError(f"'{name}' is not an input of the model; its inputs are: {', '.join(names)}")
        arrays = []
        for f in self._inputs:
            if f.name in data:
                arrays.append(_convert(f, data[f.name]))
            elif f.default is not None and f.shape is not None:
                arrays.append(_convert(f, np.broadcast_to(np.float64(f.default), f.shape)))
            else:
                raise KeyError(f"no value for input '{f.name}', {f}")
        return arrays

    @staticmethod
    def _output(feature: Feature, value: np.ndarray) -> Any:
        if feature.kind == "image":
            return _image(feature, value)
        # Core ML has no arrays of rank 0.
        value = value.reshape(1) if value.ndim == 0 else value
        return value.astype(np.float64) if feature.dtype == "float64" else value

    def __repr__(self) -> str:
        features = [f"  {word} {f.name}: {f}" for word, all_ in (("input", self._inputs), ("state", self._states), ("output", self._outputs)) for f in all_]
        return "\n".join([f"Model({os.path.basename(self._source[0])!r}, function {self.function_name!r})", *features])


class _Temporary(Model):
    """A model whose package lies in a temporary folder, which goes with it."""

    def __init__(self, folder: "tempfile.TemporaryDirectory[str]", path: str, **kwargs: Any):
        self._folder = folder
        super().__init__(path, **kwargs)
