"""Packages for the tests, written by coremltools."""

import warnings

import numpy as np
import pytest

ct = pytest.importorskip("coremltools")
from coremltools.converters.mil import Builder as mb  # noqa: E402
from coremltools.converters.mil.mil import types  # noqa: E402

pytest_plugins = ["pytester"]
WIDTH, OUT = 64, 96


def weight(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / 8


def convert(program, **options):
    """Converts a program of the builder; nothing is loaded."""
    options = {"minimum_deployment_target": ct.target.iOS18, "skip_model_load": True, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ct.convert(program, convert_to="mlprogram", **options)


def saved(model, folder, name):
    path = folder / f"{name}.mlpackage"
    model.save(str(path))
    return str(path)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("packages")


def linear_program(opset=ct.target.iOS18):
    @mb.program(input_specs=[mb.TensorSpec(shape=(1, WIDTH))], opset_version=opset)
    def program(x):
        y = mb.linear(x=x, weight=weight(OUT, WIDTH), bias=weight(OUT, seed=1), name="first")
        y = mb.relu(x=y, name="active")
        return mb.linear(x=y, weight=weight(32, OUT, seed=2), name="second")

    return program


def linear_expected(x):
    y = np.maximum(x @ weight(OUT, WIDTH).T + weight(OUT, seed=1), 0)
    return y @ weight(32, OUT, seed=2).T


@pytest.fixture(scope="session")
def linear_model():
    return convert(linear_program())


@pytest.fixture(scope="session")
def linear(linear_model, folder):
    return saved(linear_model, folder, "linear")


@pytest.fixture(scope="session")
def conv_model():
    @mb.program(input_specs=[mb.TensorSpec(shape=(1, 32, 8, 8))], opset_version=ct.target.iOS18)
    def program(x):
        x = mb.conv(x=x, weight=weight(64, 32, 3, 3), pad_type="same", name="conv")
        x = mb.reduce_mean(x=x, axes=[2, 3], name="mean")
        return mb.matmul(x=x, y=weight(64, 48, seed=3), name="product")

    return convert(program)


@pytest.fixture(scope="session")
def conv(conv_model, folder):
    return saved(conv_model, folder, "conv")


def identity(spec, name="y", **options):
    @mb.program(input_specs=[spec], opset_version=ct.target.iOS18)
    def program(x):
        return mb.mul(x=x, y=np.float32(1), name=name)

    return convert(program, **options)


@pytest.fixture(scope="session")
def ranged(folder):
    from coremltools.converters.mil.mil import get_new_symbol

    n = get_new_symbol()
    model = identity(
        mb.TensorSpec(shape=(1, n)), inputs=[ct.TensorType("x", shape=(1, ct.RangeDim(2, 6, default=3)))]
    )
    return saved(model, folder, "ranged")


@pytest.fixture(scope="session")
def enumerated(folder):
    from coremltools.converters.mil.mil import get_new_symbol

    n = get_new_symbol()
    shapes = ct.EnumeratedShapes(shapes=[(1, 2), (1, 5)], default=(1, 2))
    model = identity(mb.TensorSpec(shape=(1, n)), inputs=[ct.TensorType("x", shape=shapes)])
    return saved(model, folder, "enumerated")


@pytest.fixture(scope="session")
def picture(folder):
    """A BGR image in, the same planes out as an RGB image."""
    image = ct.ImageType("x", shape=(1, 3, 4, 6), color_layout=ct.colorlayout.BGR)
    spec = identity(mb.TensorSpec(shape=(1, 3, 4, 6)), inputs=[image]).get_spec()
    out = spec.description.output[0].type.imageType
    out.width, out.height, out.colorSpace = 6, 4, ct.proto.FeatureTypes_pb2.ImageFeatureType.RGB
    return saved(ct.models.MLModel(spec, skip_model_load=True, weights_dir=str(folder)), folder, "picture")


@pytest.fixture(scope="session")
def classifier(folder):
    @mb.program(input_specs=[mb.TensorSpec(shape=(1, 3))], opset_version=ct.target.iOS18)
    def program(x):
        return mb.softmax(x=x, axis=-1, name="scores")

    model = convert(program, classifier_config=ct.ClassifierConfig(["cat", "dog", "eel"]))
    return saved(model, folder, "classifier")


@pytest.fixture(scope="session")
def counter(folder):
    """Adds its input to a state and returns the sum."""

    @mb.program(
        input_specs=[mb.TensorSpec(shape=(1, 4), dtype=types.fp16), mb.StateTensorSpec((1, 4), dtype=types.fp16)],
        opset_version=ct.target.iOS18,
    )
    def program(x, total):
        new = mb.add(x=mb.read_state(input=total), y=x, name="sum")
        return mb.coreml_update_state(state=total, value=new, name="updated")

    return saved(convert(program), folder, "counter")


@pytest.fixture(scope="session")
def integers(folder):
    @mb.program(input_specs=[mb.TensorSpec(shape=(1, 5), dtype=types.int32)], opset_version=ct.target.iOS18)
    def program(ids):
        return mb.gather(x=weight(10, 4), indices=ids, axis=0, name="rows")

    return saved(convert(program), folder, "integers")


@pytest.fixture(scope="session")
def functions(folder):
    """Two functions, `double` and `triple`; the first is the default."""
    description = ct.utils.MultiFunctionDescriptor()
    for factor, name in ((2.0, "double"), (3.0, "triple")):

        @mb.program(input_specs=[mb.TensorSpec(shape=(1, 4))], opset_version=ct.target.iOS18)
        def program(x):
            return mb.mul(x=x, y=np.float32(factor), name="y")

        path = saved(convert(program), folder, name)
        description.add_function(path, src_function_name="main", target_function_name=name)
    description.default_function_name = "double"
    path = str(folder / "functions.mlpackage")
    ct.utils.save_multifunction(description, path)
    return path
