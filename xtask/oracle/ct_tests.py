#!/usr/bin/env python3
"""Runs coremltools' own op tests with anemoe in place of Core ML, and lists what passes, fails and is refused by op.

    pip install coremltools==9.0 numpy scipy torch pytest pytest-timeout
    ct_tests.py --anemoe target/release/anemoe --each 20 --report ct_tests.json [-k lstm]
    pip install anemoe && ct_tests.py --each 20

The tests lie in coremltools' wheel (converters/mil/mil/ops/tests). Their expectations are numpy, torch or what Apple recorded; they
run on a Mac only. Here `MLModel.predict` is that of the Python package; with `--anemoe` it saves the package and runs the command on it.
`--each` takes that many cases of each test, spread evenly. `--tests` names another folder or file of coremltools' tests. The exit status
is 1 where a test fails; with `--least`, where fewer than that share of the tests that predict pass.
A test counts as refused where the package cannot be run (exit status 2, or an exception), as failed where its result differs, and as skipped where it predicts nothing.
"""

import argparse, collections, json, os, re, subprocess, sys, tempfile, warnings

os.environ.update(PYMIL_TEST_TARGETS="mlprogram", INCLUDE_MIL_FP32_UNIT_TESTS="1", RUN_BACKWARD_COMPATIBILITY="1")
warnings.filterwarnings("ignore")
import numpy as np
import pytest
from PIL import Image
import coremltools as ct
from coremltools.models import utils
from coremltools.proto import FeatureTypes_pb2

from coremltools import _deps
from coremltools.models.model import MLModel

# The tests predict where coremltools takes the machine for a Mac.
_deps._IS_MACOS = True
utils._macos_version = lambda: (15, 0)
KINDS = FeatureTypes_pb2.ArrayFeatureType
DTYPES = {KINDS.FLOAT32: np.float32, KINDS.FLOAT16: np.float16, KINDS.DOUBLE: np.float64, KINDS.INT32: np.int32}


class Refused(RuntimeError):
    """The command's message, in the class and after the words of Core ML's errors that the tests expect."""

    def __init__(self, said):
        super().__init__(f"Unable to compute the prediction using ML Program: {said}")


class State(dict):
    """Values of a model's states after its last prediction."""


def described(model):
    spec = model.get_spec().description
    if not model._is_multifunction():
        return spec
    name = model.function_name or spec.defaultFunctionName
    return next(f for f in spec.functions if f.name == name)


def predict(model, data, state=None):
    if isinstance(data, list):
        return [predict(model, d, state) for d in data]
    survey.predictions += 1
    if survey.anemoe is None:
        import anemoe

        try:
            return anemoe.Model(model).predict(data, state)
        except (KeyError, TypeError, ValueError, NotImplementedError, OSError) as e:
            raise Refused(f"{type(e).__name__}: {e}") from None
    about = described(model)
    features = {f.name: f.type for f in about.input}
    with tempfile.TemporaryDirectory() as folder:
        path, arrays, pictures = os.path.join(folder, "m.mlpackage"), {}, []
        model.save(path)
        for name, value in data.items():
            if isinstance(value, Image.Image):
                picture = os.path.join(folder, f"{len(pictures)}.png")
                value.save(picture)
                pictures.append(f"{name}={picture}")
                continue
            array = np.asarray(value)
            if name in features and features[name].WhichOneof("Type") == "multiArrayType":
                array = array.astype(DTYPES[features[name].multiArrayType.dataType])
            arrays[name] = array
        arrays.update({f"state:{k}": v for k, v in (state or {}).items()})
        inputs, outputs = os.path.join(folder, "in.npz"), os.path.join(folder, "out.npz")
        np.savez(inputs, **arrays)
        command = [survey.anemoe, "predict", path, "--json", "--inputs", inputs, *pictures, "--outputs", outputs]
        if model._is_multifunction() and model.function_name:
            command += ["--function", model.function_name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise Refused(done.stderr.strip().splitlines()[-1] if done.returncode == 2 else f"exit {done.returncode}: {done.stderr}")
        found = dict(np.load(outputs))
        classes = json.loads(done.stdout)["outputs"][0].get("classes", {})
    if state is not None:
        state.update({k[6:]: v for k, v in found.items() if k.startswith("state:")})
    results = {}
    for output in about.output:
        value = classes.get(output.name, found.get(output.name))
        if output.type.WhichOneof("Type") == "imageType":
            planes = np.clip(np.round(value[0]), 0, 255).astype(np.uint8)
            value = Image.fromarray(planes[0] if len(planes) == 1 else planes.transpose(1, 2, 0))
        results[output.name] = value
    return results


MLModel.predict = predict


def make_state(model):
    if survey.anemoe is not None:
        return State()
    import anemoe

    return anemoe.Model(model).make_state()


MLModel.make_state = make_state


class Survey:
    def __init__(self, options):
        self.anemoe, self.each, self.report_to = options.anemoe, options.each, options.report
        self.predictions, self.rows = 0, []

    def pytest_collection_modifyitems(self, config, items):
        cases = collections.defaultdict(list)
        for item in items:
            cases[item.nodeid.partition("[")[0]].append(item)
        items[:] = [c[k * len(c) // n] for c in cases.values() for n in [min(self.each, len(c))] for k in range(n)]

    def pytest_runtest_setup(self, item):
        self.predictions = 0

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        outcome = yield
        report = outcome.get_result()
        if call.when != "call":
            return
        result, reason = report.outcome, ""
        if call.excinfo is not None:
            reason = str(call.excinfo.value)[:600]
            refused = call.excinfo.errisinstance(Refused)
            if result == "failed":
                result = "refused" if refused else "failed" if self.predictions else "skipped"
        elif not self.predictions:
            result = "skipped"
        op = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", item.cls.__name__.removeprefix("Test") if item.cls else item.name).lower()
        self.rows.append(dict(test=item.nodeid, op=op, result=result, reason=reason))

    def pytest_sessionfinish(self):
        table = collections.defaultdict(collections.Counter)
        for row in self.rows:
            for name in (row["op"], "all"):
                table[name][row["result"]] += 1
        results = ["passed", "failed", "refused", "skipped"]
        print("\n| test | " + " | ".join(results) + " |\n|---|" + "---:|" * len(results))
        for op, counts in sorted(table.items()):
            if counts.total() > counts["skipped"]:
                print(f"| {op} | " + " | ".join(str(counts[r]) for r in results) + " |")
        if self.report_to:
            with open(self.report_to, "w") as f:
                json.dump(self.rows, f, indent=1)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--anemoe")
parser.add_argument("--each", type=int, default=sys.maxsize)
parser.add_argument("--report")
parser.add_argument("--least", type=float, default=1.0)
parser.add_argument("--tests", default="converters/mil/mil/ops/tests")
options, rest = parser.parse_known_args()
survey = Survey(options)
tests = os.path.join(os.path.dirname(ct.__file__), options.tests)
pytest.main([tests, "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "--timeout=120", "-W", "ignore", *rest], plugins=[survey])
counts = collections.Counter(row["result"] for row in survey.rows)
judged = counts["passed"] + counts["failed"] + (counts["refused"] if options.least < 1 else 0)
print(f"{counts['passed']} of {judged} passed")
sys.exit(counts["passed"] < options.least * judged or not judged)
