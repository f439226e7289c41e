from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

__version__: str

class State:
    names: List[str]
    def read_state(self, name: str) -> np.ndarray: ...
    def write_state(self, name: str, value: np.ndarray) -> None: ...

class Runner:
    name: str
    specification_version: int
    metadata: List[Tuple[str, str]]
    inputs: List[Dict[str, Any]]
    states: List[Dict[str, Any]]
    outputs: List[Dict[str, Any]]
    described_outputs: List[Dict[str, Any]]
    classifier: Optional[Tuple[str, str, str, List[Any]]]
    def __init__(
        self, path: str, spec: Optional[bytes], function: Optional[str], precision: str, every_result: bool = False
    ) -> None: ...
    def make_state(self) -> State: ...
    def run(self, inputs: Sequence[np.ndarray], state: Optional[State]) -> List[Any]: ...

class Weights:
    names: List[str]
    def __init__(self, path: str, spec: Optional[bytes] = None) -> None: ...
    def read(self, name: str) -> np.ndarray: ...

class Job:
    @staticmethod
    def quantize(
        function: str,
        name: str,
        kind: str,
        groups: Sequence[int],
        axes: Sequence[int],
        unsigned: bool,
        vector: int,
        scaled: bool,
    ) -> Job: ...
    @staticmethod
    def tables(
        function: str,
        name: str,
        bits: int,
        indices: np.ndarray,
        lut: np.ndarray,
        vector_axis: Optional[int],
        scale: np.ndarray,
        relative_mse: float,
    ) -> Job: ...
    @staticmethod
    def threshold(function: str, name: str, threshold: float, least: float) -> Job: ...
    @staticmethod
    def share(function: str, name: str, share: float, size: int, axis: int) -> Job: ...
    @staticmethod
    def neighbours(function: str, name: str, n: int, m: int, axis: int) -> Job: ...

def set_threads(threads: Optional[int]) -> None: ...
def verify(path: str, spec: Optional[bytes] = None) -> List[Tuple[str, str, str, str]]: ...
def check(path: str, spec: Optional[bytes], list_ops: bool) -> str: ...
def structure(path: str, spec: Optional[bytes] = None) -> List[str]: ...
def quantize(
    array: np.ndarray,
    quant: str,
    group_size: int,
    block_size: int,
    op: Optional[str],
    exact: bool,
    importance: Optional[np.ndarray],
) -> Dict[str, Any]: ...
def dense_weights(path: str, spec: Optional[bytes] = None) -> List[Tuple[str, str, List[int], List[Tuple[str, str, str, bool, int]]]]: ...
def compress(
    path: str,
    spec: Optional[bytes],
    target: str,
    jobs: Sequence[Job],
    runner: Optional[Runner],
    samples: Sequence[Sequence[np.ndarray]],
    for_samples: Sequence[str],
) -> List[Tuple[str, str, int, int, float]]: ...
