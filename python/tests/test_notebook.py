"""The notebook runs from its first cell to the last."""

import json
from pathlib import Path


def test_the_notebook_runs(capsys):
    notebook = json.loads((Path(__file__).parents[1] / "examples" / "packages.ipynb").read_text())
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "packages.ipynb", "exec"), names)
    assert "relative error" in capsys.readouterr().out
