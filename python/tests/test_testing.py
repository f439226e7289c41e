import anemoe
import numpy as np
import pytest
from anemoe.testing import assert_matches
from conftest import OUT, WIDTH, convert, linear_program, weight


def x():
    return np.random.default_rng(5).standard_normal((1, WIDTH)).astype(np.float32)


def test_a_golden_is_written_and_then_compared(linear, tmp_path):
    golden = tmp_path / "linear.npz"
    for _ in range(2):
        assert_matches(linear, {"x": x()}, golden=golden)
    with pytest.raises(AssertionError, match="part at operation 'x_to_fp16'"):
        assert_matches(linear, {"x": 2 * x()}, golden=golden)


def test_the_operation_at_which_results_part_is_named(linear, linear_model, tmp_path):
    golden = tmp_path / "linear.npz"
    assert_matches(linear, {"x": x()}, golden=golden)
    spec = linear_model.get_spec()
    block = next(iter(spec.mlProgram.functions["main"].block_specializations.values()))
    (op,) = [op for op in block.operations if op.type == "relu"]
    op.type = "tanh"
    changed = anemoe.Model(spec, weights_dir=linear_model.weights_dir)
    with pytest.raises(AssertionError, match="part at operation 'active"):
        assert_matches(changed, {"x": x()}, golden=golden)


def test_torch_is_compared_and_the_module_named(linear):
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, OUT), torch.nn.ReLU(), torch.nn.Linear(OUT, 32, bias=False))
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor(weight(OUT, WIDTH)))
        module[0].bias.copy_(torch.tensor(weight(OUT, seed=1)))
        module[2].weight.copy_(torch.tensor(weight(32, OUT, seed=2)))
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
    for options in ((), (), ("--anemoe-update",)):
        pytester.runpytest_subprocess(*options).assert_outcomes(passed=1)
    assert (pytester.path / "golden.npz").exists()
