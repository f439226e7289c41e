import subprocess
import sys

import anemoe
import numpy as np
import pytest
from anemoe.testing import assert_matches
from conftest import OUT, WIDTH, convert, linear_program, weight


def x():
    return np.random.default_rng(5).standard_normal((1, WIDTH)).astype(np.float32)


def test_a_golden_is_written_and_then_compared(linear, tmp_path):
    golden = tmp_path / "linear.npz"
    with pytest.raises(AssertionError, match="no such golden"):
        assert_matches(linear, {"x": x()}, golden=golden)
    for update in (True, False):
        assert_matches(linear, {"x": x()}, golden=golden, update=update)
    with pytest.raises(AssertionError, match="part at operation 'x_to_fp16'"):
        assert_matches(linear, {"x": 2 * x()}, golden=golden)


def test_the_operation_at_which_results_part_is_named(linear, linear_model, tmp_path):
    golden = tmp_path / "linear.npz"
    assert_matches(linear, {"x": x()}, golden=golden, update=True)
    spec = linear_model.get_spec()
    block = next(iter(spec.mlProgram.functions["main"].block_specializations.values()))
    (op,) = [op for op in block.operations if op.type == "relu"]
    op.type = "tanh"
    changed = anemoe.Model(spec, weights_dir=linear_model.weights_dir)
    with pytest.raises(AssertionError, match="part at operation 'active"):
        assert_matches(changed, {"x": x()}, golden=golden)


def linear_module(torch):
    """Makes the module that computes what `linear` does."""
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, OUT), torch.nn.ReLU(), torch.nn.Linear(OUT, 32, bias=False))
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor(weight(OUT, WIDTH)))
        module[0].bias.copy_(torch.tensor(weight(OUT, seed=1)))
        module[2].weight.copy_(torch.tensor(weight(32, OUT, seed=2)))
    return module


def test_torch_is_compared_and_the_module_named(linear):
    torch = pytest.importorskip("torch")
    module = linear_module(torch)
    with torch.no_grad():
        assert_matches(linear, {"x": x()}, torch=module)
        module[2].weight *= 2
    with pytest.raises(AssertionError, match=r"agree up to module '1' \(ReLU\).* part at module '2' \(Linear\)"):
        assert_matches(linear, {"x": x()}, torch=module)


def test_the_fixture_works_without_an_import(linear, pytester):
    pytester.makepyfile(
        f"""
        import numpy as np
        def test_it(anemoe_matches):
            anemoe_matches({linear!r}, {{"x": np.ones((1, {WIDTH}), np.float32)}}, golden="golden.npz")
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(failed=1)
    for options in (("--anemoe-update",), ()):
        pytester.runpytest_subprocess(*options).assert_outcomes(passed=1)
    assert (pytester.path / "golden.npz").exists()


def test_testing_is_imported_when_it_is_used():
    code = (
        "import sys, anemoe; assert 'pytest' not in sys.modules\n"
        "assert callable(anemoe.testing.assert_matches) and 'testing' in anemoe.__all__\n"
        "try: anemoe.typo\n"
        "except AttributeError as e: assert 'typo' in str(e)\n"
        "else: raise SystemExit('no error')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_classifiers_are_compared_with_torch(classifier):
    torch = pytest.importorskip("torch")
    given = {"x": [[0.0, 2.0, 1.0]]}
    assert_matches(classifier, given, torch=torch.nn.Softmax(-1), precision=None)
    with pytest.raises(AssertionError, match="differs from torch"):
        assert_matches(classifier, given, torch=torch.nn.LogSoftmax(-1))


def test_torch_gets_the_packages_inputs(linear, integers):
    torch = pytest.importorskip("torch")
    module = linear_module(torch)
    for each in (module, module.half()):
        for same in (x(), x().astype(np.float64), x().tolist(), torch.tensor(x(), requires_grad=True)):
            assert_matches(linear, {"x": same}, torch=each)
    rows = torch.nn.Embedding.from_pretrained(torch.tensor(weight(10, 4)))
    for ids in ([[0, 9, 3, 3, 1]], np.array([[0, 9, 3, 3, 1]], np.int32), torch.tensor([[0, 9, 3, 3, 1]])):
        assert_matches(integers, {"ids": ids}, torch=rows)


def test_pictures_are_compared_with_torch(picture):
    torch, Image = pytest.importorskip("torch"), pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3)).astype(np.uint8)
    for given in (Image.fromarray(pixels), pixels, torch.tensor(pixels)):
        assert_matches(picture, {"x": given}, torch=torch.nn.Identity())
    with pytest.raises(AssertionError, match="differs from torch"):
        assert_matches(picture, {"x": pixels}, torch=torch.nn.Sigmoid())
