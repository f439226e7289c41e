#!/usr/bin/env python3
"""Compression of whole packages: `anemoe.compress` against coremltools 9 with the same settings, in turn.

    pip install anemoe torch torchvision transformers coremltools==9.0 "numpy<2.4" scikit-learn==1.5.1 kmeans1d
    compress_vs_coremltools.py [--networks resnet50,gpt2] [--settings kmeans-tensor,kmeans-32,..] [--keep FOLDER] [--json OUT.json]

Times are those of the two calls, on a package that lies in a file and on the same package as coremltools' MLModel; ours uses all
processors, coremltools one. Errors are squared errors over squared weights of all weights that both compress, from the values that our reader finds
in both packages; sizes are those of the files of weights.
"""
import argparse, json, logging, os, sys, tempfile, time, warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
import numpy as np
import coremltools as ct
import coremltools.optimize.coreml as cto
import anemoe
import networks
from coremltools_models import traced

SETTINGS = {
    "kmeans-tensor": cto.OpPalettizerConfig(nbits=4),
    "kmeans-32": cto.OpPalettizerConfig(nbits=4, granularity="per_grouped_channel", group_size=32),
    "vectors-2": cto.OpPalettizerConfig(nbits=4, cluster_dim=2),
    "scaled": cto.OpPalettizerConfig(nbits=4, enable_per_channel_scale=True),
    "int8": cto.OpLinearQuantizerConfig(mode="linear_symmetric"),
    "int4-block": cto.OpLinearQuantizerConfig(mode="linear_symmetric", dtype="int4", granularity="per_block", block_size=32),
    "n-of-m": cto.OpMagnitudePrunerConfig(n_m_ratio=(2, 4)),
}


def converted(name, path):
    model, inputs = networks.make(name)
    types = [ct.TensorType(n, v.shape, dtype=np.int32 if v.is_floating_point() is False else np.float32) for n, v in inputs.items()]
    ct.convert(traced(model, inputs), inputs=types, convert_to="mlprogram", minimum_deployment_target=ct.target.iOS18,
               skip_model_load=True).save(path)


def theirs(model, config):
    kind = type(config).__name__
    call = {"OpPalettizerConfig": cto.palettize_weights, "OpLinearQuantizerConfig": cto.linear_quantize_weights}.get(kind, cto.prune_weights)
    return call(model, cto.OptimizationConfig(global_config=config))


def weights(path):
    found = anemoe._anemoe.Weights(path)
    clean = lambda name: name.replace("_palettized_pcs", "").replace("_palettized", "").replace("_quantized", "").replace("_sparsified", "")
    return {clean(name): found.read(name) for name in found.names if not name.endswith("_unscaled")}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--networks", default="resnet50,gpt2")
    p.add_argument("--settings", default=",".join(SETTINGS))
    p.add_argument("--keep")
    p.add_argument("--json")
    args = p.parse_args()
    rows = []
    for name in args.networks.split(","):
        work = tempfile.TemporaryDirectory()
        source = os.path.join(args.keep or work.name, f"{name}.mlpackage")
        if not os.path.exists(source):
            converted(name, source)
        was = weights(source)
        for setting in args.settings.split(","):
            config, seconds, errors, sizes = SETTINGS[setting], {}, {}, {}
            for tool in ("anemoe", "coremltools"):
                path = os.path.join(work.name, f"{setting}-{tool}.mlpackage")
                if tool == "anemoe":
                    started = time.perf_counter()
                    anemoe.compress(source, config, output=path)
                    seconds[tool] = time.perf_counter() - started
                else:
                    model = ct.models.MLModel(source, skip_model_load=True)
                    started = time.perf_counter()
                    compressed = theirs(model, config)
                    seconds[tool] = time.perf_counter() - started
                    compressed.save(path)
                now = weights(path)
                pairs = [(was[n].astype(np.float64), now[n]) for n in was if n in now and now[n].shape == was[n].shape]
                errors[tool] = sum(np.sum((a - b) ** 2) for a, b in pairs) / sum(np.sum(a**2) for a, _ in pairs)
                sizes[tool] = os.path.getsize(os.path.join(path, "Data/com.apple.CoreML/weights/weight.bin"))
            row = dict(network=name, setting=setting, seconds=seconds, error=errors, bytes=sizes)
            rows.append(row)
            ratio = lambda d: d["anemoe"] / d["coremltools"]
            print(f"{name:10} {setting:14} {seconds['anemoe']:7.2f} s for {seconds['coremltools']:8.2f} s: {1 / ratio(seconds):6.1f} times as fast, "
                  f"error {errors['anemoe']:.3e} ({ratio(errors):.4f} of theirs), size {ratio(sizes):.4f} of theirs", flush=True)
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
