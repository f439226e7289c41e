import anemoe
import coremltools as ct
import numpy as np
import pytest
from conftest import linear_program, convert, weight


def test_a_sound_package_has_no_findings(linear, linear_model, functions):
    for model in (linear, linear_model, functions):
        assert [f for f in anemoe.verify(model) if f.severity == "error"] == []


def test_findings_name_the_operation(linear_model):
    spec = linear_model.get_spec()
    block = next(iter(spec.mlProgram.functions["main"].block_specializations.values()))
    (op,) = [op for op in block.operations if op.type == "relu"]
    op.outputs[0].type.tensorType.dimensions[1].constant.size = 7
    found = anemoe.verify(spec, weights_dir=linear_model.weights_dir)
    assert any(f.severity == "error" and "active" in f.place and "7" in f.text for f in found), found
    assert "active" in str(found[0])


def test_a_placement_has_verdict_and_reasons(linear, linear_model):
    report = anemoe.check(linear, list_ops=True)
    assert report["packages"][0]["verdict"] in ("ane", "not_ane", "unknown")
    assert report["packages"][0]["functions"][0]["op_list"]
    assert anemoe.check(linear_model)["packages"][0]["verdict"] == report["packages"][0]["verdict"]


def test_errors_are_those_of_the_given_values():
    w = weight(64, 128)
    assert 0 < anemoe.quantize(w, "fp16").relative_mse < 1e-6
    lost = anemoe.quantize(w * 1e-12, "lut4")
    assert lost.relative_mse == 1 and lost.cosine == 0
    assert anemoe.quantize(np.zeros((32, 32)), "lut4").relative_mse == 0


@pytest.mark.parametrize(
    "quant, bits", [("lut4", 4), ("lut2-tensor", 2), ("lut6-uniform", 6), ("int8-channel", 8), ("int4-block", 4)]
)
def test_a_tensor_is_compressed(quant, bits):
    w = weight(64, 128)
    q = anemoe.quantize(w, quant, group_size=32)
    error = np.mean((w - q.decoded.astype(np.float32)) ** 2)
    assert q.mse == pytest.approx(error, rel=1e-4) and q.relative_mse < 0.2
    assert q.decoded.shape == q.elements.shape == w.shape
    assert w.size * bits / 8 <= q.bytes < w.size * 2
    if quant == "lut4":
        assert q.quant == "lut4 g32" and q.lut.shape == (2, 1, 16, 1)
        np.testing.assert_array_equal(np.take_along_axis(q.lut[:, 0, :, 0].repeat(32, 0), q.elements.astype(int), 1), q.decoded)
    if quant == "int8-channel":
        np.testing.assert_allclose(q.elements * q.scale.astype(np.float32), q.decoded, rtol=1e-3)


def test_wrong_tensors_are_python_exceptions():
    for args, error, words in [
        ((weight(4, 4), "lut5"), ValueError, "no 5-bit element type"),
        ((np.full((4, 4), np.nan), "lut4"), ValueError, "element 0 is NaN"),
        ((np.zeros(4, np.float32), "lut4"), ValueError, "shape"),
        ((np.full((8, 8), "a"), "lut4"), TypeError, "expected an array of numbers"),
        ((weight(4, 4), "lut4", 0), ValueError, "group_size"),
        ((weight(4, 4), "lut4", 32, 32, "gemm"), ValueError, "expected op 'conv'"),
    ]:
        with pytest.raises(error, match=words):
            anemoe.quantize(*args)


def test_equal_packages_do_not_differ(linear, linear_model):
    found = anemoe.diff(linear, linear_model)
    assert not found and str(found) == "no difference", found
    assert found.outputs == {"second": (0.0, 0.0)}


def test_a_diff_shows_structure_and_numbers(linear, conv, folder):
    spec = linear_program(ct.target.iOS17)
    other = convert(spec, minimum_deployment_target=ct.target.iOS17, compute_precision=ct.precision.FLOAT32)
    found = anemoe.diff(linear, other)
    assert found and any(line.startswith("-specification version 9") for line in found.structure)
    assert found.outputs["second"][1] < 1e-2 and not found.not_run
    unlike = anemoe.diff(linear, conv)
    assert unlike.not_run and any("conv(" in line for line in unlike.structure)


def test_wrong_inputs_of_a_diff_are_exceptions(linear, linear_model, conv):
    with pytest.raises(KeyError, match="'typo' is not an input"):
        anemoe.diff(linear, linear_model, inputs={"typo": 1})
    with pytest.raises(ValueError, match="expected shape"):
        anemoe.diff(linear, linear_model, inputs={"x": np.ones(3)}, precision=None)
    # Inputs of one of the packages are right.
    found = anemoe.diff(linear, conv, inputs={"x": np.ones((1, 64), np.float32)})
    assert found.not_run.startswith("input 'x': expected shape")


def test_a_reason_is_no_repr(linear, integers):
    found = anemoe.diff(integers, linear)
    assert found.not_run.startswith("'ids' is not an input"), found.not_run


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
def test_importances_are_finite_and_not_negative(wrong):
    importance = np.ones(64)
    assert anemoe.quantize(weight(64, 64), importance=importance).relative_mse < 0.1
    importance[5] = wrong
    with pytest.raises(ValueError, match="an importance is negative or no number"):
        anemoe.quantize(weight(64, 64), importance=importance)


def test_sizes_are_from_1():
    for options in ({"group_size": -1}, {"block_size": -1}, {"group_size": "x"}):
        with pytest.raises(ValueError, match="expected (group|block)_size from 1"):
            anemoe.quantize(weight(64, 64), **options)
