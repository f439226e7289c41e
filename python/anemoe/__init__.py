"""Runs, checks, compares and compresses Core ML packages on any machine.

>>> import anemoe
>>> model = anemoe.Model("model.mlpackage")
>>> model.predict({"x": x})["y"]
"""

from ._anemoe import __version__
from .compression import compress
from .model import Feature, Model, State
from .tools import Difference, Finding, Quantized, check, diff, quantize, verify

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
    "verify",
]
