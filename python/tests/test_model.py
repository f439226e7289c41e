import os
import subprocess
import sys
import threading

import anemoe
import coremltools as ct
import numpy as np
import pytest
from conftest import OUT, WIDTH, convert, linear_expected, weight
from coremltools.converters.mil import Builder as mb


def random(*shape, seed=7):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(a, b, tolerance=2e-3):
    assert np.linalg.norm(np.asarray(a, np.float64) - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_package_runs_in_both_precisions(linear, precision):
    x = random(1, WIDTH)
    model = anemoe.Model(linear, precision=precision)
    y = model.predict({"x": x})["second"]
    assert y.dtype == np.float32 and y.shape == (1, 32) and y.flags.owndata is False
    close(y, linear_expected(x))
    # The program is fp16: without rounding it is closer.
    close(y, linear_expected(x), 2e-3 if precision == "fp16" else 4e-4)


def test_paths_bytes_specs_and_models_are_the_same_model(linear, linear_model):
    x = random(1, WIDTH)
    expected = anemoe.Model(linear).predict({"x": x})["second"]
    spec = linear_model.get_spec()
    sources = [
        (os.path.join(linear), {}),
        (linear_model, {}),
        (spec, {"weights_dir": linear_model.weights_dir}),
        (spec.SerializeToString(), {"weights_dir": linear_model.weights_dir}),
        (ct.models.MLModel(linear, skip_model_load=True), {}),
    ]
    for source, options in sources:
        np.testing.assert_array_equal(anemoe.Model(source, **options).predict({"x": x})["second"], expected)
    with pytest.raises(ValueError, match="give weights_dir"):
        anemoe.Model(spec.SerializeToString())
    with pytest.raises(TypeError, match="expected the path"):
        anemoe.Model(3)


def test_one_import_swaps_coremltools_model(linear):
    def use(MLModel):
        return MLModel(linear, compute_units=ct.ComputeUnit.CPU_ONLY, skip_model_load=True)

    ours, theirs = use(anemoe.Model), use(ct.models.MLModel)
    assert list(ours.input_description) == list(theirs.input_description) == ["x"]
    assert list(ours.output_description) == list(theirs.output_description)
    assert "x" in ours.input_description and len(ours.input_description) == 1
    assert ours.get_spec() == theirs.get_spec()
    assert ours.user_defined_metadata == dict(theirs.user_defined_metadata)


def test_descriptions_are_the_authors_words(linear, folder):
    model = ct.models.MLModel(linear, skip_model_load=True)
    model.input_description["x"] = "Sixty-four numbers."
    model.author = "A. Nemone"
    path = str(folder / "described.mlpackage")
    model.save(path)
    ours = anemoe.Model(path)
    assert ours.input_description["x"] == "Sixty-four numbers." and ours.author == "A. Nemone"
    assert anemoe.Model(linear).input_description["x"] == "float32 array of shape (1, 64)"
    with pytest.raises(KeyError):
        ours.input_description["z"]


def test_a_spec_without_coremltools_is_a_dict(linear):
    code = (
        "import sys; sys.modules['coremltools'] = None\n"
        f"import anemoe; spec = anemoe.Model({linear!r}).get_spec()\n"
        "assert spec['specificationVersion'] == 9 and spec['description']['input'][0]['name'] == 'x', spec"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lists_of_inputs_are_batches(linear):
    model = anemoe.Model(linear)
    xs = [random(1, WIDTH, seed=i) for i in range(3)]
    batch = model.predict([{"x": x} for x in xs])
    for x, y in zip(xs, batch):
        np.testing.assert_array_equal(y["second"], model.predict({"x": x})["second"])


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({}, KeyError, "no value for input 'x', float32 array of shape \\(1, 64\\)"),
        ({"z": 1}, KeyError, "'z' is not an input"),
        ({"x": np.zeros((1, 128), np.float32)}, ValueError, r"expected shape \(1, 64\), got \(1, 128\)"),
        ({"x": np.zeros(64, np.float32)}, ValueError, r"expected shape \(1, 64\), got \(64,\)"),
        ({"x": np.zeros((1, 64), np.complex64)}, TypeError, "expected float32, got an array of complex64"),
        ({"x": np.full((1, 64), "a")}, TypeError, "expected float32, got an array of <U1"),
        ({"x": "text"}, TypeError, "expected float32, got str"),
        ({"x": [[1], [2, 3]]}, ValueError, "input 'x': "),
        ({"x": None}, TypeError, "expected float32, got NoneType"),
        ({"x": np.full((1, 64), None)}, TypeError, "an array of object"),
        ([1], TypeError, "must contain only dictionaries"),
        ("x", TypeError, "must be either a dict or list of dict"),
    ],
)
def test_wrong_inputs_are_python_exceptions(linear, given, error, words):
    with pytest.raises(error, match=words):
        anemoe.Model(linear).predict(given)


def test_wrong_models_are_python_exceptions(linear, tmp_path):
    with pytest.raises(FileNotFoundError):
        anemoe.Model(str(tmp_path / "absent.mlpackage"))
    with pytest.raises(ValueError, match="expected precision 'fp16' or 'fp32', got 'fp8'"):
        anemoe.Model(linear, precision="fp8")
    with pytest.raises(ValueError, match="no function 'other'; there is 'main'"):
        anemoe.Model(linear, function="other")
    with pytest.raises(ValueError):
        anemoe.Model(b"no specification")
    with pytest.raises(ValueError, match="expected threads"):
        anemoe.Model(linear, threads=0)
    network = ct.proto.Model_pb2.Model()
    network.specificationVersion = 4
    network.neuralNetwork.SetInParent()
    with pytest.raises(NotImplementedError, match="a neural network"):
        anemoe.Model(network)


def test_any_layout_and_number_type_is_taken(linear):
    model = anemoe.Model(linear)
    x = np.arange(WIDTH, dtype=np.float32)[np.newaxis] / WIDTH
    expected = model.predict({"x": x})["second"]
    wide = np.zeros((2 * WIDTH, 1), np.float32)
    wide[::2, 0] = x
    for same in (np.asfortranarray(x), wide[::2].T, x.astype(np.float64), x.tolist(), x.astype(">f4")):
        np.testing.assert_array_equal(model.predict({"x": same})["second"], expected)
    ints = np.ones((1, WIDTH), np.int64)
    np.testing.assert_array_equal(
        model.predict({"x": ints})["second"], model.predict({"x": ints.astype(np.float32)})["second"]
    )


def test_integers_are_whole(integers):
    model = anemoe.Model(integers)
    ids = np.array([[0, 9, 3, 3, 1]])
    rows = model.predict({"ids": ids})["rows"]
    close(rows, weight(10, 4)[ids])
    # Core ML converts floats, and so do coremltools' own tests.
    np.testing.assert_array_equal(model.predict({"ids": ids.astype(np.float32)})["rows"], rows)
    with pytest.raises(TypeError, match="expected int32, got float64 with fractions"):
        model.predict({"ids": ids + 0.5})
    with pytest.raises(ValueError, match="fit int32"):
        model.predict({"ids": ids + 2**40})


def test_ranged_and_enumerated_shapes(ranged, enumerated):
    model = anemoe.Model(ranged)
    assert model.inputs[0].ranges == ((1, 1), (2, 6)) and model.inputs[0].shape == (1, 3)
    for n in (2, 6):
        np.testing.assert_array_equal(model.predict({"x": np.ones((1, n))})["y"], np.ones((1, n)))
    with pytest.raises(ValueError, match=r"expected shape \(1, 2\.\.6\), got \(1, 7\)"):
        model.predict({"x": np.ones((1, 7))})
    model = anemoe.Model(enumerated)
    assert model.inputs[0].shapes == ((1, 2), (1, 5))
    assert model.predict({"x": np.ones((1, 5))})["y"].shape == (1, 5)
    with pytest.raises(ValueError, match=r"expected one of the shapes \(1, 2\), \(1, 5\), got \(1, 3\)"):
        model.predict({"x": np.ones((1, 3))})


def test_pictures_go_in_and_out(picture):
    Image = pytest.importorskip("PIL.Image")
    model = anemoe.Model(picture)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3)).astype(np.uint8)
    image = Image.fromarray(pixels)
    out = model.predict({"x": image})["y"]
    # The program takes BGR and gives what it says is RGB.
    assert out.mode == "RGBA" and out.size == (6, 4)
    np.testing.assert_array_equal(np.asarray(out)[:, :, :3], pixels[:, :, ::-1])
    np.testing.assert_array_equal(np.asarray(model.predict({"x": pixels})["y"]), np.asarray(out))
    with pytest.raises(TypeError, match="expected a PIL image of mode 'RGB', got mode 'L'"):
        model.predict({"x": image.convert("L")})
    with pytest.raises(ValueError, match=r"expected shape \(1, 3, 4, 6\), got \(1, 3, 5, 5\)"):
        model.predict({"x": image.resize((5, 5))})
    with pytest.raises(TypeError, match="expected a PIL image"):
        model.predict({"x": 5.0})


def test_a_classifier_gives_a_class_and_probabilities(classifier):
    model = anemoe.Model(classifier)
    out = model.predict({"x": np.array([[0.0, 2.0, 1.0]])})
    assert out["classLabel"] == "dog"
    (probabilities,) = (v for v in out.values() if isinstance(v, dict))
    assert list(probabilities) == ["cat", "dog", "eel"] and abs(sum(probabilities.values()) - 1) < 1e-2
    assert set(out) == set(model.output_description)


def test_states_carry_over(counter):
    model = anemoe.Model(counter)
    state, x = model.make_state(), np.ones((1, 4))
    with pytest.raises(ValueError, match="the model has states"):
        model.predict({"x": x})
    for n in (1, 2, 3):
        (y,) = model.predict({"x": x}, state).values()
        np.testing.assert_array_equal(y, np.full((1, 4), n))
    np.testing.assert_array_equal(state.read_state("total"), np.full((1, 4), 3))
    state.write_state("total", np.full((1, 4), 10))
    (y,) = model.predict({"x": x}, state=state).values()
    np.testing.assert_array_equal(y, np.full((1, 4), 11))
    with pytest.raises(KeyError, match="no state 'other'; there is 'total'"):
        state.read_state("other")
    with pytest.raises(ValueError, match=r"expected shape \(1, 4\), got \(4,\)"):
        state.write_state("total", np.zeros(4))


def test_a_state_of_another_model_is_refused(counter, linear):
    with pytest.raises(ValueError, match="of another model"):
        anemoe.Model(linear).predict({"x": random(1, WIDTH)}, anemoe.Model(counter).make_state())
    with pytest.raises(TypeError, match="make_state"):
        anemoe.Model(linear).predict({"x": random(1, WIDTH)}, state=3)


def test_functions_are_chosen_by_name(functions):
    x = np.ones((1, 4))
    assert anemoe.Model(functions).function_name == "double"
    for options, factor in (({}, 2), ({"function": "triple"}, 3), ({"function_name": "triple"}, 3)):
        np.testing.assert_array_equal(anemoe.Model(functions, **options).predict({"x": x})["y"], factor * x)
    assert anemoe.Model(functions, "triple", "fp32").function_name == "triple"
    with pytest.raises(ValueError, match="expected one function, got 'double' and 'triple'"):
        anemoe.Model(functions, "double", function_name="triple")
    with pytest.raises(TypeError, match="expected the name of a function, got bool"):
        anemoe.Model(functions, False)


def test_arrays_without_alignment_are_copied(linear):
    record = np.zeros(1, [("one", "u1"), ("x", "<f4", (1, WIDTH))])
    record["x"] = random(1, 1, WIDTH)
    x = record["x"][0]
    assert not x.flags.aligned
    model = anemoe.Model(linear)
    np.testing.assert_array_equal(model.predict({"x": x})["second"], model.predict({"x": x.copy()})["second"])


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_nan_stays_nan(precision):
    """As Apple's CPU kernels and torch have it."""

    @mb.program(input_specs=[mb.TensorSpec((1, 1, 2, 4)), mb.TensorSpec((1, 1, 2, 4))], opset_version=ct.target.iOS17)
    def program(x, y):
        pair = {"maximum": mb.maximum, "minimum": mb.minimum}
        results = [op(x=x, y=y, name=name) for name, op in pair.items()]
        results += [op(x=x, name=name) for name, op in (("relu", mb.relu), ("relu6", mb.relu6))]
        results += [op(x=x, axes=[-1], keep_dims=True, name=name) for name, op in (("reduce_max", mb.reduce_max), ("reduce_min", mb.reduce_min))]
        return (*results, mb.max_pool(x=x, kernel_sizes=[1, 4], strides=[1, 4], pad_type="valid", name="max_pool"))

    x = np.array([[[[np.nan, 1, -1, 2], [3, -np.inf, np.inf, -3]]]], np.float32)
    y = np.array([[[[0, np.nan, 0, 0], [1, 1, 1, 1]]]], np.float32)
    found = anemoe.Model(convert(program), precision=precision).predict({"x": x, "y": y})
    row = lambda function: function(x, axis=-1, keepdims=True)
    expected = {
        "maximum": np.maximum(x, y),
        "minimum": np.minimum(x, y),
        "relu": np.maximum(x, 0),
        "relu6": np.clip(x, 0, 6),
        "reduce_max": row(np.max),
        "reduce_min": row(np.min),
        "max_pool": row(np.max),
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, name)


def test_pools_of_the_largest_numbers():
    @mb.program(input_specs=[mb.TensorSpec((1, 2, 1, 4))], opset_version=ct.target.iOS17)
    def program(x):
        return mb.max_pool(x=x, kernel_sizes=[1, 4], strides=[1, 4], pad_type="valid", name="y")

    large = np.finfo(np.float32).max
    x = np.array([[[[large] * 4], [[-large] * 4]]], np.float32)
    model = anemoe.Model(convert(program, compute_precision=ct.precision.FLOAT32), precision="fp32")
    np.testing.assert_array_equal(model.predict({"x": x})["y"].ravel(), [large, -large])


def test_python_runs_while_a_model_does(linear):
    """Several threads share a model; each gets its own results."""
    model = anemoe.Model(linear)
    xs = [random(1, WIDTH, seed=i) for i in range(8)]
    expected = [model.predict({"x": x})["second"] for x in xs]
    faults = []

    def work(i):
        for _ in range(50):
            if not np.array_equal(model.predict({"x": xs[i]})["second"], expected[i]):
                faults.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_a_trace_has_every_operation(linear):
    x = random(1, WIDTH)
    traced = anemoe.Model(linear).trace({"x": x})
    close(traced["active_cast_fp16"], np.maximum(x @ weight(OUT, WIDTH).T + weight(OUT, seed=1), 0))
    assert list(traced)[-1] == "second"


def test_a_trace_leaves_states(counter):
    model = anemoe.Model(counter)
    state = model.make_state()
    state.write_state("total", np.full((1, 4), 2))
    assert model.trace({"x": np.ones((1, 4))}, state)["sum"][0, 0] == 3
    assert state.read_state("total")[0, 0] == 2


def test_threads_are_set_once():
    code = (
        "import anemoe._anemoe as a; a.set_threads(2); a.set_threads(2); a.set_threads(None)\n"
        "try: a.set_threads(3)\n"
        "except ValueError as e: assert 'threads=2' in str(e), e\n"
        "else: raise SystemExit('threads changed')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_saved_model_is_the_package(linear, tmp_path):
    path = str(tmp_path / "copy.mlpackage")
    anemoe.Model(linear).save(path)
    x = random(1, WIDTH)
    np.testing.assert_array_equal(
        anemoe.Model(path).predict({"x": x})["second"], anemoe.Model(linear).predict({"x": x})["second"]
    )


def test_torch_pictures_are_arrays(picture):
    torch = pytest.importorskip("torch")
    model = anemoe.Model(picture)
    planes = np.random.default_rng(0).integers(0, 256, (1, 3, 4, 6)).astype(np.float32)
    expected = np.asarray(model.predict({"x": planes})["y"])
    for same in (torch.tensor(planes), torch.tensor(planes, requires_grad=True), torch.tensor(planes).half()):
        np.testing.assert_array_equal(np.asarray(model.predict({"x": same})["y"]), expected)
    pixels = torch.tensor(planes[0, ::-1].transpose(1, 2, 0).astype(np.uint8))
    np.testing.assert_array_equal(np.asarray(model.predict({"x": pixels})["y"]), expected)


def test_states_are_rounded_to_their_type(counter):
    value = np.full((1, 4), 0.1, np.float32)
    for precision, expected in (("fp16", np.float32(np.float16(0.1))), ("fp32", np.float32(0.1)), (None, np.float32(np.float16(0.1)))):
        state = anemoe.Model(counter, precision=precision).make_state()
        state.write_state("total", value)
        np.testing.assert_array_equal(state.read_state("total"), np.full((1, 4), expected))


def test_save_is_that_of_coremltools(linear, linear_model, tmp_path):
    x = random(1, WIDTH)
    expected = anemoe.Model(linear).predict({"x": x})["second"]
    sources = {
        "path": anemoe.Model(linear),
        "mlmodel": anemoe.Model(linear_model),
        "spec": anemoe.Model(linear_model.get_spec(), weights_dir=linear_model.weights_dir),
    }
    for name, model in sources.items():
        assert model.is_package and os.path.samefile(model.weights_dir, os.path.join(model.weights_dir, "../weights"))
        model.save(str(tmp_path / name))
        model.save(save_path=tmp_path / f"{name}.mlpackage")  # over the first
        anemoe.Model(tmp_path / f"{name}.mlpackage").save(path=tmp_path / f"{name}.mlpackage")  # over itself
        assert sorted(p.name for p in tmp_path.iterdir()) == [f"{name}.mlpackage"]
        theirs = ct.models.MLModel(str(tmp_path / f"{name}.mlpackage"), skip_model_load=True)
        for saved in (theirs, theirs.package_path):
            np.testing.assert_array_equal(anemoe.Model(saved).predict({"x": x})["second"], expected)
        os.rename(tmp_path / f"{name}.mlpackage", tmp_path.parent / f"{tmp_path.name}-{name}.mlpackage")
    with pytest.raises(ValueError, match="ends in .mlpackage"):
        model.save(tmp_path / "m.mlmodel")
    with pytest.raises(TypeError, match="save_path"):
        model.save()
    (tmp_path / "f.mlpackage").mkdir()
    (tmp_path / "f.mlpackage" / "letter.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match="no package"):
        model.save(tmp_path / "f.mlpackage")
    assert (tmp_path / "f.mlpackage" / "letter.txt").exists()


def test_a_model_without_weights_is_saved(tmp_path):
    from conftest import identity, mb

    model = anemoe.Model(identity(mb.TensorSpec(shape=(1, 3))).get_spec())
    model.save(tmp_path / "m")
    assert anemoe.Model(tmp_path / "m.mlpackage").predict({"x": np.ones((1, 3))})["y"].tolist() == [[1, 1, 1]]
    assert model.weights_dir is None and model.package_path is None


def test_changed_metadata_are_saved(linear, linear_model, functions, tmp_path):
    for i, source in enumerate((linear, linear_model, linear_model.get_spec(), functions)):
        options = {"weights_dir": linear_model.weights_dir} if i == 2 else {}
        model = anemoe.Model(source, **options)
        model.author, model.license, model.short_description, model.version = "A. Nemone", "MIT", "Words.", "2"
        model.user_defined_metadata["key"] = "value"
        model.input_description["x"] = "Numbers."
        path = str(tmp_path / f"{i}.mlpackage")
        model.save(path)
        for saved in (anemoe.Model(path), anemoe.Model(anemoe.compress(model, {"nbits": 4})), ct.models.MLModel(path, skip_model_load=True)):
            assert (saved.author, saved.license, saved.short_description, saved.version) == ("A. Nemone", "MIT", "Words.", "2")
            assert saved.user_defined_metadata["key"] == "value"
            if isinstance(saved, anemoe.Model):
                assert saved.input_description["x"] == "Numbers."
        assert not [f for f in anemoe.verify(model) if f.severity == "error"]
        assert anemoe.Model(source, **options).author == ""
    with pytest.raises(TypeError, match="expected a text"):
        model.author = 3
    with pytest.raises(KeyError):
        model.input_description["z"] = "None."


def test_attributes_are_those_of_coremltools(linear):
    theirs = ct.models.MLModel(linear, skip_model_load=True)
    units, hints = ct.ComputeUnit.CPU_ONLY, {"allowLowPrecisionAccumulationOnGPU": True}
    for ours in (anemoe.Model(linear), anemoe.Model(theirs)):
        assert ours.package_path == theirs.package_path and os.path.samefile(ours.weights_dir, theirs.weights_dir)
        assert ours.compute_unit == theirs.compute_unit and ours.optimization_hints is None and ours.is_package
    ours = anemoe.Model(linear, compute_units=units, optimization_hints=hints)
    assert ours.compute_unit == units and ours.optimization_hints == hints
