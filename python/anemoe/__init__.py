"""Runs, checks, compares and compresses Core ML packages on any machine.

>>> import anemoe
>>> model = anemoe.Model("model.mlpackage")
>>> model.predict({"x": x})["y"]
"""

from typing import TYPE_CHECKING, Any

from ._anemoe import __version__
from .compression import compress
from .model import Feature, Model, State
from .tools import Difference, Finding, Quantized, check, diff, quantize, verify

if TYPE_CHECKING:
    from . import testing

__all__ = [
    "Difference",
    "Feature",
    "Finding",
    "Model",
    "Quantized",
    "State",
    "__version__",
    "check",
    "compress",
    "diff",
    "quantize",
    "testing",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Imports `anemoe.testing` when it is first used, because it imports pytest."""
    if name == "testing":
        from importlib import import_module

        return import_module(".testing", __name__)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
