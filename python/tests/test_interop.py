"""Packages of coremltools with the results that they must have, where the folder of these cases lies beside the repository."""

import json
import os
from pathlib import Path

import anemoe
import numpy as np
import pytest

FOLDER = Path(os.environ.get("ANEMOE_INTEROP", Path(__file__).parents[3] / "shared" / "interop"))
CASES = sorted(p.parent.name for p in FOLDER.glob("*/case.json"))


@pytest.mark.skipif(not CASES, reason="no folder of cases")
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_coremltools(name, precision):
    case = json.loads((FOLDER / name / "case.json").read_text())
    (package,) = (FOLDER / name).glob("*.mlpackage")
    model = anemoe.Model(package, function=case.get("function"), precision=precision)
    state = model.make_state() if model.states else None
    steps = sorted((FOLDER / name).glob("step*.npz"), key=lambda p: int(p.stem[4:])) or [FOLDER / name / "inputs.npz"]
    for step in steps:
        data = dict(np.load(step))
        for key in [key for key in data if key.startswith("state:")]:
            state.write_state(key[6:], data.pop(key))
        got = model.predict(data, state)
        expected = np.load(FOLDER / name / step.name.replace("step", "expected").replace("inputs", "expected"))
        for key in expected.files:
            a, e = expected[key], state.read_state(key[6:]) if key.startswith("state:") else got[key]
            assert a.shape == e.shape, key
            a, e = a.astype(np.float64).ravel(), e.astype(np.float64).ravel()
            norm = np.linalg.norm(a)
            assert np.linalg.norm(a - e) <= case.get("tolerance_rtol", 0.02) * (norm or 1), key
            if norm and np.linalg.norm(e):
                assert a @ e / norm / np.linalg.norm(e) >= case["tolerance_cos"] - 1e-12, key
