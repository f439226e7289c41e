import re

import anemoe
import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import pytest
from conftest import OUT, WIDTH, convert, linear_program, mb, weight

Config, Palettizer, Quantizer, Pruner = (
    cto.OptimizationConfig,
    cto.OpPalettizerConfig,
    cto.OpLinearQuantizerConfig,
    cto.OpThresholdPrunerConfig,
)


def weights(model):
    read = anemoe._anemoe.Weights(*anemoe.model._source(model))
    return {name: read.read(name) for name in read.names}


def pairs(conv_model, config, theirs):
    """Compresses with both tools; yields each weight as it was, ours and theirs."""
    was = weights(conv_model)
    ours = weights(anemoe.compress(conv_model, config))
    # coremltools renames what it compresses.
    named = re.compile("_(quantized|palettized|sparsified)$")
    theirs = {named.sub("", name): values for name, values in weights(theirs(conv_model, config)).items()}
    assert set(ours) == set(theirs) == set(was)
    return [(name, was[name], ours[name], theirs[name]) for name in was]


def error(a, b):
    return float(np.sum((a.astype(np.float64) - b) ** 2))


@pytest.mark.parametrize(
    "config",
    [
        Quantizer(mode="linear_symmetric"),
        Quantizer(mode="linear", dtype="uint8"),
        Quantizer(mode="linear_symmetric", granularity="per_tensor"),
        Quantizer(mode="linear", dtype="int4", granularity="per_block", block_size=16),
        Quantizer(mode="linear_symmetric", dtype="uint4", granularity="per_block", block_size=32),
    ],
    ids=lambda c: f"{c.mode}-{c.granularity.name}",
)
def test_linear_quantization_is_as_good_as_coremltools(conv_model, config):
    for name, was, ours, theirs in pairs(conv_model, Config(global_config=config), cto.linear_quantize_weights):
        assert 0 < error(was, ours) <= 1.02 * error(was, theirs), name


@pytest.mark.parametrize(
    "config",
    [
        Palettizer(mode="uniform", nbits=4),
        Palettizer(mode="uniform", nbits=6, granularity="per_grouped_channel", group_size=16),
    ],
    ids=lambda c: f"{c.mode}-{c.granularity.name}",
)
def test_palettization_is_as_good_as_coremltools(conv_model, config):
    for name, was, ours, theirs in pairs(conv_model, Config(global_config=config), cto.palettize_weights):
        assert 0 < error(was, ours) <= 1.02 * error(was, theirs), name


def test_kmeans_is_as_good_as_coremltools(conv_model):
    pytest.importorskip("sklearn")
    for granularity in ("per_tensor", "per_grouped_channel"):
        config = Config(global_config=Palettizer(mode="kmeans", nbits=3, granularity=granularity, group_size=16))
        for name, was, ours, theirs in pairs(conv_model, config, cto.palettize_weights):
            assert 0 < error(was, ours) <= 1.02 * error(was, theirs), name


def test_pruning_is_coremltools(conv_model):
    for config in (Pruner(threshold=0.1), cto.OpMagnitudePrunerConfig(target_sparsity=0.75)):
        for name, _, ours, theirs in pairs(conv_model, Config(global_config=config), cto.prune_weights):
            # numpy rounds a percentile of fp16 values to fp16, in some versions up to the next one.
            assert np.mean(ours != theirs) < 0.001, name


def test_vectors_are_as_good_as_coremltools(conv_model):
    pytest.importorskip("sklearn")
    for length, granularity in ((2, "per_tensor"), (4, "per_grouped_channel")):
        config = Palettizer(mode="kmeans", nbits=4, granularity=granularity, group_size=16, cluster_dim=length)
        for name, was, ours, theirs in pairs(conv_model, Config(global_config=config), cto.palettize_weights):
            assert 0 < error(was, ours) <= error(was, theirs), name


def test_channels_are_scaled(conv_model):
    """Channels of unequal size are nearer to their weights with a scale each."""
    rows = 2.0 ** (np.arange(OUT) % 7)

    @mb.program(input_specs=[mb.TensorSpec(shape=(1, WIDTH))], opset_version=ct.target.iOS18)
    def program(x):
        return mb.linear(x=x, weight=(weight(OUT, WIDTH) * rows[:, None]).astype(np.float32), name="y")

    model = convert(program)
    plain, scaled = (anemoe.compress(model, Palettizer(nbits=4, enable_per_channel_scale=s)) for s in (False, True))
    assert scaled.compression[0]["relative_mse"] < 0.6 * plain.compression[0]["relative_mse"]
    ((_, was),), ((_, now),) = weights(model).items(), [i for i in weights(scaled).items() if "unscaled" not in i[0]]
    assert error(was, now) / error(was, 0) == pytest.approx(scaled.compression[0]["relative_mse"], rel=0.01)
    assert [f for f in anemoe.verify(scaled) if f.severity == "error"] == []


def test_structured_pruning_is_coremltools(conv_model):
    configs = [
        cto.OpMagnitudePrunerConfig(target_sparsity=0.6, block_size=4),
        cto.OpMagnitudePrunerConfig(target_sparsity=0.3, block_size=3, dim=1),
        cto.OpMagnitudePrunerConfig(n_m_ratio=(3, 4)),
        cto.OpMagnitudePrunerConfig(n_m_ratio=(1, 5), dim=0),
    ]
    for config in configs:
        # The matmul's weight stays: only linear and conv have structure.
        for name, _, ours, theirs in pairs(conv_model, Config(global_config=config), cto.prune_weights):
            zeros = np.mean(theirs == 0)
            assert np.mean(ours == 0) == pytest.approx(zeros, abs=0.001)
            assert np.mean(ours != theirs) < 0.002, (config, name)


@pytest.mark.parametrize(
    "config",
    [{"nbits": 3}, {"dtype": "int4"}, {"nbits": 3, "enable_per_channel_scale": True}, {"nbits": 6, "cluster_dim": 2}],
)
def test_samples_lower_the_change_of_outputs(config):
    """Inputs of a layer that are alike, as those of real networks are: weights matter by what they multiply."""
    rng = np.random.default_rng(5)
    mix = rng.standard_normal((8, 16)) * 2.0 ** -np.arange(8)[:, None]

    def samples(n):
        x = np.einsum("nchw,cd->ndhw", rng.standard_normal((n, 8, 12, 12)), mix)
        return [{"x": (each[None] + 0.01).astype(np.float32)} for each in x]

    @mb.program(input_specs=[mb.TensorSpec(shape=(1, 16, 12, 12))], opset_version=ct.target.iOS18)
    def program(x):
        x = mb.conv(x=x, weight=weight(48, 16, 3, 3), pad_type="same", name="conv")
        return mb.linear(x=mb.reduce_mean(x=x, axes=[2, 3]), weight=weight(80, 48, seed=3), name="y")

    model = convert(program)
    given, other = samples(6), samples(6)
    expected = [anemoe.Model(model, precision="fp32").predict(d)["y"] for d in other]

    def change(**options):
        compressed = anemoe.Model(anemoe.compress(model, config, **options), precision="fp32")
        return sum(np.sum((compressed.predict(d)["y"] - e) ** 2) for d, e in zip(other, expected))

    # Vectors know of each input's size alone, not of their likeness.
    assert change(sample_data=given) < (0.95 if "cluster_dim" in config else 0.7) * change()
    with pytest.raises(TypeError, match="list of dicts"):
        anemoe.compress(model, config, sample_data=given[0])
    with pytest.raises(ValueError, match="inputs from sample 1 are not all finite"):
        anemoe.compress(model, config, sample_data=[given[0], {"x": given[0]["x"] * np.nan}])
    with pytest.raises(KeyError, match="not an input"):
        anemoe.compress(model, config, sample_data=[{"z": given[0]["x"]}])


def test_what_is_written_is_what_coremltools_decompresses(conv_model, tmp_path):
    """coremltools opens the packages and finds the values in them that our reader finds."""
    for config in (
        Palettizer(mode="kmeans", nbits=4, granularity="per_grouped_channel", group_size=16),
        Palettizer(mode="kmeans", nbits=6, granularity="per_grouped_channel", group_size=16, cluster_dim=4),
        Palettizer(mode="kmeans", nbits=4, cluster_dim=2),
        Palettizer(mode="kmeans", nbits=4, enable_per_channel_scale=True),
        Quantizer(mode="linear", dtype="uint4", granularity="per_block", block_size=16),
        Quantizer(dtype="int4"),
        cto.OpMagnitudePrunerConfig(n_m_ratio=(3, 4)),
        Pruner(threshold=0.1),
    ):
        ours = anemoe.compress(conv_model, Config(global_config=config))
        assert isinstance(ours, ct.models.MLModel)
        dense = weights(cto.decompress_weights(ours))
        for name, values in weights(ours).items():
            if not name.endswith("_unscaled"):
                np.testing.assert_allclose(values, dense[name], rtol=2e-3, atol=2e-4, err_msg=f"{config} {name}")


def test_results_follow_and_verify(linear, tmp_path):
    x = np.random.default_rng(3).standard_normal((1, WIDTH)).astype(np.float32)
    expected = anemoe.Model(linear).predict({"x": x})["second"]
    for i, (config, allowed) in enumerate([({"nbits": 6}, 0.1), ({"dtype": "int8"}, 0.02), ({"threshold": 0.01}, 0.1)]):
        if "threshold" in config:
            config["minimum_sparsity_percentile"] = 0.01
        path = str(tmp_path / f"{i}.mlpackage")
        model = anemoe.compress(linear, config, output=path)
        y = model.predict({"x": x})["second"]
        assert 0 < np.linalg.norm(y - expected) <= allowed * np.linalg.norm(expected), config
        assert [f for f in anemoe.verify(path) if f.severity == "error"] == []
        assert {row["name"] for row in model.compression} == {"first_weight_0_to_fp16", "second_weight_0_to_fp16"} or len(model.compression) == 2


def test_levels_choose_by_name_type_and_globally(conv_model):
    names = [name for _, name, _, _ in anemoe._anemoe.dense_weights(*anemoe.model._source(conv_model))]
    config = Config(global_config=Quantizer(), op_type_configs={"conv": None})
    assert len(names) == 2 and len(anemoe.compress(conv_model, config).compression) == 1
    user = anemoe._anemoe.dense_weights(*anemoe.model._source(conv_model))[1][3][0][1]
    config = Config(op_name_configs={names[0]: Palettizer(nbits=2), user: Quantizer()})
    assert sorted(row["kind"] for row in anemoe.compress(conv_model, config).compression) == ["int8-channel", "lut2-tensor"]
    assert anemoe.compress(conv_model, Quantizer(weight_threshold=10**6)).compression == []


def test_older_systems_get_their_own_forms():
    old = convert(linear_program(ct.target.iOS16), minimum_deployment_target=ct.target.iOS16)
    for config, op in [
        (Palettizer(nbits=4), "constexpr_lut_to_dense"),
        (Quantizer(), "constexpr_affine_dequantize"),
        (Quantizer(mode="linear", dtype="uint8", granularity="per_tensor"), "constexpr_affine_dequantize"),
        (Pruner(threshold=0.1), "constexpr_sparse_to_dense"),
    ]:
        ours = anemoe.compress(old, config)
        spec = ours.get_spec()
        block = next(iter(spec.mlProgram.functions["main"].block_specializations.values()))
        assert any(o.type == op for o in block.operations), config
        dense = weights(cto.decompress_weights(ours))
        for name, values in weights(ours).items():
            np.testing.assert_allclose(values, dense[name], rtol=2e-3, atol=2e-4)
    for config in (
        Palettizer(nbits=4, granularity="per_grouped_channel"),
        Palettizer(nbits=4, cluster_dim=2),
        Palettizer(nbits=4, enable_per_channel_scale=True),
    ):
        with pytest.raises(ValueError, match="iOS16 or iOS17"):
            anemoe.compress(old, config)
    oldest = convert(linear_program(ct.target.iOS15), minimum_deployment_target=ct.target.iOS15)
    with pytest.raises(ValueError, match="minimum_deployment_target=iOS16"):
        anemoe.compress(oldest, Palettizer(nbits=4))


def test_float32_weights_stay_float32():
    wide = convert(linear_program(), compute_precision=ct.precision.FLOAT32)
    for config in (Palettizer(nbits=8), Quantizer(mode="linear"), Pruner(threshold=0.1)):
        assert [f for f in anemoe.verify(anemoe.compress(wide, config)) if f.severity == "error"] == []


def test_functions_share_compressed_weights(functions, linear, folder):
    description = ct.utils.MultiFunctionDescriptor()
    for name in ("a", "b"):
        description.add_function(linear, src_function_name="main", target_function_name=name)
    description.default_function_name = "a"
    path = str(folder / "shared.mlpackage")
    ct.utils.save_multifunction(description, path)
    model = anemoe.compress(path, Quantizer())
    assert len(model.compression) == 4
    import os

    size = os.path.getsize(os.path.join(model._source[0], "Data/com.apple.CoreML/weights/weight.bin"))
    assert size < 1.3 * sum(row["after"] for row in model.compression[:2]) + 2000


def thirds(weight):
    """A table of three multiples of the largest weight, as `lut_function` gives it."""
    lut = (float(weight.max()) * np.array([-0.6, 0.0, 0.6, 0.0])).astype(weight.dtype)
    return lut, np.argmin(np.abs(weight.reshape(-1, 1) - lut[:3]), axis=1).astype(np.uint8)


@pytest.mark.parametrize(
    "fields",
    [{}, {"granularity": "per_grouped_channel", "group_size": 8}, {"granularity": "per_grouped_channel", "group_size": 4, "channel_axis": 1}],
)
def test_tables_of_a_function_are_those_that_coremltools_writes(conv_model, fields):
    config = Config(global_config=Palettizer(mode="custom", lut_function=thirds, **fields))
    found = pairs(conv_model, config, cto.palettize_weights)
    assert any(not np.array_equal(was, ours) for _, was, ours, _ in found)
    for name, _, ours, theirs in found:
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


def test_functions_give_tables_of_vectors_and_see_scaled_weights(linear):
    seen = []

    def pairs_of_rows(rows):
        seen.append(float(np.abs(rows).max()))
        return np.array([[-0.5, 0.5], [0.5, 0.5]], np.float32), np.arange(rows.size // 2) % 2

    config = {"mode": "custom", "lut_function": pairs_of_rows, "cluster_dim": 2, "enable_per_channel_scale": True}
    model = anemoe.compress(linear, config)
    assert seen == [1.0, 1.0]
    before, after = weights(linear), weights(model)
    for row in model.compression:
        assert row["kind"] == "lut1" and row["after"] < row["before"] / 8
        was, now = before[row["name"]], after[row["name"]]
        scale = np.abs(was).max(axis=1, keepdims=True)
        np.testing.assert_allclose(np.abs(now), np.broadcast_to(scale / 2, now.shape), rtol=2e-3)
        assert row["relative_mse"] == pytest.approx(error(was, now) / error(was, 0 * was), rel=1e-2)


@pytest.mark.parametrize(
    "config, error, words",
    [
        (3, TypeError, "expected coremltools' OptimizationConfig or a dict"),
        ({"nbits": 5}, ValueError, "expected nbits"),
        ({"nbits": 4, "granularity": "per_grouped_channel", "group_size": -1}, ValueError, "expected group_size from 1"),
        ({"nbits": 4, "granularity": "per_grouped_channel", "channel_axis": 2}, ValueError, "expected channel_axis"),
        ({"dtype": "int8", "granularity": "per_block", "block_size": -1}, ValueError, "expected block_size from 1"),
        ({"threshold": float("nan")}, ValueError, "expected threshold from 0"),
        ({"nbits": 4, "group": 3}, ValueError, "has no 'group'"),
        ({"mode": "linear", "dtype": "int3"}, ValueError, "expected dtype"),
        ({"global_configs": {}}, ValueError, "has no 'global_configs'"),
        ({"nbits": 4, "cluster_dim": 0}, ValueError, "expected cluster_dim from 1"),
        ({"nbits": 4, "lut_function": len}, ValueError, "for mode 'custom' alone"),
        ({"mode": "custom"}, ValueError, "expected a function as lut_function"),
        ({"mode": "custom", "lut_function": lambda w: ([0.0, 1.0], [0])}, ValueError, "gave 1 indices"),
        ({"mode": "custom", "lut_function": lambda w: ([0.0], np.ones(w.size, int))}, ValueError, "an index of 1 or 1 for 1 entries"),
        ({"mode": "custom", "lut_function": lambda w: (np.zeros(300), np.zeros(w.size, int))}, ValueError, "up to 256"),
        ({"mode": "uniform", "nbits": 4, "cluster_dim": 2}, ValueError, "uniform tables have no vectors"),
        ({"n_m_ratio": (3, 2)}, ValueError, "n <= m"),
        ({"n_m_ratio": 3}, ValueError, "expected an n_m_ratio of two numbers"),
        ({"nbits": 4, "weight_threshold": "x"}, ValueError, "expected weight_threshold from 0, got 'x'"),
        ({"target_sparsity": "x"}, ValueError, "expected target_sparsity from 0, got 'x'"),
        ({"target_sparsity": 1.5}, ValueError, "expected target_sparsity from 0 to 1"),
        ({"nbits": 4, "group_size": -1}, ValueError, "expected group_size from 1"),
        ({"n_m_ratio": (1, 2), "target_sparsity": 0.5}, ValueError, "expected target_sparsity"),
        ({"n_m_ratio": (1, 2), "dim": 2}, ValueError, "expected dim"),
    ],
)
def test_wrong_configurations_are_python_exceptions(linear, config, error, words):
    with pytest.raises(error, match=words):
        anemoe.compress(linear, config)


def test_an_output_that_exists_is_kept(linear, tmp_path):
    path = tmp_path / "there.mlpackage"
    path.mkdir()
    with pytest.raises(ValueError, match="exists"):
        anemoe.compress(linear, {"nbits": 4}, output=path)
    assert list(path.iterdir()) == [] and list(tmp_path.iterdir()) == [path]


def test_all_weights_can_be_pruned(linear):
    old = convert(linear_program(ct.target.iOS16), minimum_deployment_target=ct.target.iOS16)
    for package, options in ((linear, {}), (linear, {"block_size": 4}), (old, {})):
        for config in (cto.OpMagnitudePrunerConfig(target_sparsity=1.0, **options), Pruner(threshold=100.0)):
            model = anemoe.Model(anemoe.compress(package, config))
            assert not any(values.any() for values in weights(model).values())
        np.testing.assert_array_equal(model.predict({"x": np.ones((1, WIDTH))})["second"], np.zeros((1, 32)))


def test_a_result_keeps_what_the_model_was_opened_with(functions, tmp_path):
    options = {
        "function_name": "triple",
        "compute_units": ct.ComputeUnit.CPU_ONLY,
        "optimization_hints": {"allowLowPrecisionAccumulationOnGPU": True},
    }
    ours = anemoe.Model(functions, precision="fp32", **options)
    del options["optimization_hints"]  # coremltools refuses them except on macOS
    theirs = ct.models.MLModel(functions, skip_model_load=True, **options)
    models = [ours, theirs, anemoe.Model(theirs)]
    for i, model in enumerate(models):
        for output in (None, tmp_path / f"{i}.mlpackage"):
            result = anemoe.compress(model, {"nbits": 4}, output=output)
            assert isinstance(result, ct.models.MLModel if model is theirs else anemoe.Model)
            assert result.function_name == "triple" and result.compute_unit == options["compute_units"]
            assert result.optimization_hints == model.optimization_hints
            assert getattr(result, "_precision", None) == getattr(model, "_precision", None)
