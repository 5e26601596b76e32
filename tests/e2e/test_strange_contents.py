"""Tests that no message of a stub causes an error of the runtime itself, and that the log stays small.

The stub is `tests/faults/misbehave.py`. It sends every kind of message with contents that nobody expects, and each of
them many times.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, Config, hosted, options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.faults.contents import channels, packets
from tests.faults.known import MISBEHAVE
from tests.inside import boot_with

import moonpool
from moonpool.ipc.messages import Kind

SIGNATURE: Config = {"input": [tensor("X", "FP32", 4)], "output": [tensor("Y", "FP32", -1)]}
LIMITS = {"ENVIRONMENT": "FAULT_*", "RESTART_WINDOW_S": 0.001, "LOG_LINES_PER_S": 5}
X = np.zeros(4, np.float32)
TIMES = 100
# The log lines about an end: the reason, and once more that it ended.
LINES_OF_AN_END, LONGEST_LINE = 2, 10_000
pytestmark = pytest.mark.usefixtures("undisturbed")


@pytest.fixture(scope="module", params=["standard", "strict"])
def rogue(
    runtime: moonpool.Runtime,
    request: pytest.FixtureRequest,
    sibling_model: None,  # noqa: ARG001 - the last stub that is an honest one
) -> Iterator[str]:
    name = f"rogue_{request.param}"
    with pytest.MonkeyPatch.context() as patch:
        boot_with(MISBEHAVE, patch)
        config = SIGNATURE | options(**LIMITS, SANDBOX=request.param)
        with hosted(runtime, name, MODELS / "echo.py", config):
            yield name


@pytest.mark.promise(
    "Containment",
    "No message of a stub, of any kind, causes an error that is logged as the runtime's own. "
    "The log has no traceback of it and stays small, also in tritonserver. If a stub makes a "
    "request that is not granted, it gets an error as the answer.",
)
@pytest.mark.parametrize(("channel", "kind"), [pytest.param(*each, id=each[1].name) for each in channels()])
def test_strange_contents_are_no_error_of_the_runtimes_own(
    runtime: moonpool.Runtime, rogue: str, channel: str, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    reasons = []
    for packet in packets(channel, kind):
        try:
            said = f"says {channel} {TIMES} {packet.hex()}"
            runtime.infer(rogue, {"X": X}, request_id=said, timeout_s=60.0)
        except moonpool.StubDied as error:
            reasons.append(str(error))
    runtime.metrics()  # reads the remaining messages

    own = [each for each in caplog.records if each.name == "moonpool"]
    told = [each for each in own if each.levelno > logging.INFO]
    assert [each for each in own if each.exc_info] == []
    assert [each for each in reasons if "broke the protocol and was ended" not in each] == []
    # A packet ends the stub once at most, and the runtime may notice after the request was answered.
    assert len(told) <= LINES_OF_AN_END * len(packets(channel, kind))
    # The stub itself may print one, when it meets the end of its channel before its own.
    others = [each for each in caplog.records if each.name != "moonpool.stub"]
    assert not any("Traceback" in each.getMessage() for each in others)
    assert all(len(each.getMessage()) <= LONGEST_LINE for each in told)
