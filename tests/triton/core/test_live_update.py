"""A load with other instance groups alone: which instances a real Triton starts, and how it names them."""

from __future__ import annotations

import pytest
from tests.triton.answers import LogLine
from tests.triton.core.conftest import Core
from tests.triton.moonpool_side import MoonpoolSide
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.triton,
    pytest.mark.timeout(300),
    pytest.mark.promise(
        "Fidelity", "A change of `instance_group` alone starts and ends the same instances as in a real Triton."
    ),
]

SAYS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
        pb_utils.Logger.log_info(f"begin {self.name}")

    def execute(self, requests):
        raise ValueError("nobody asks")

    def finalize(self):
        pb_utils.Logger.log_info(f"end {self.name}")
"""
TENSORS = """
backend: "python" input [{ name: "X" data_type: TYPE_FP32 dims: [1] }] output [{ name: "Y" data_type: TYPE_FP32 dims: [1] }]
"""
ONE = "instance_group [{ kind: KIND_CPU count: 1 }]"
THREE = "instance_group [{ kind: KIND_CPU count: 3 }]"
GROUPS = "instance_group [{ kind: KIND_CPU count: 1 }, { kind: KIND_CPU count: 1 }]"
POLICY = "version_policy { all { } }"
DELAY = "max_batch_size: 2 dynamic_batching { max_queue_delay_microseconds: %d }"
# The configurations that are loaded one after the other.
CASES = {
    "groups": [ONE, GROUPS],
    "more and fewer": [ONE, THREE, ONE, THREE],
    "a version policy": [ONE, ONE + POLICY],
    "the same": [THREE, THREE],
}


class Alike:
    """Chooses the lines of a model, in an order of their own, when there are as many as moonpool's."""

    def __init__(self, name: str, side: MoonpoolSide) -> None:
        self._name = name
        self._side = side
        self.ours: list[LogLine] = []

    def __repr__(self) -> str:
        return repr(self._name)

    def __call__(self, lines: list[LogLine]) -> list[LogLine] | None:
        self.ours += self._of_the_model(self._side.log())
        theirs = self._of_the_model(lines)
        return theirs if theirs == sorted(self.ours) else None

    def _of_the_model(self, lines: list[LogLine]) -> list[LogLine]:
        # Lines of the model of the test before may come late.
        return sorted(line for line in lines if self._name in line.text)


@pytest.mark.parametrize("what", CASES)
def test_the_same_instances_come_and_go(core: Core, what: str) -> None:
    name = f"live_{what.replace(' ', '_')}"
    core.triton.forget_log()
    core.moonpool.forget_log()
    seen = []
    try:
        for groups in CASES[what]:
            core.write(name, TENSORS + groups, SAYS)
            assert (core.triton.load(name), core.moonpool.load(name)) == (None, None)
            alike = Alike(name, core.moonpool)
            seen.append(core.triton.lines(alike))
            wait_until(lambda alike=alike, lines=seen[-1]: alike(lines) is not None)  # type: ignore[misc]
    finally:
        core.triton.unload(name)
        core.moonpool.unload(name)
    assert seen[0]
    assert any(seen[1:]) or what in ("a version policy", "the same")
