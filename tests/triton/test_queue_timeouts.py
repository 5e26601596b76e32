"""The meaning of a request's timeout, for clients and for models that ask other models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.triton.answers import Failure
from tests.triton.both import Both, agree

pytestmark = [
    pytest.mark.triton,
    pytest.mark.promise("Requests between models", "The timeout of a request, from …"),
]

# These models have different queue policies. The timeout of a request counts only if it may override the policy's.
POLICIES = ["timed", "timed_fixed", "timed_free", "timed_delayed", "timed_not", "timed_alone"]
LATE = Failure("UNAVAILABLE", "Request timeout expired")
SEEN = {"X": np.full((1, 1), -1, np.float32)}
AT_ONCE = {"X": np.zeros((1, 1), np.float32)}

# The model sends a first request, if the other model should be busy, and then one with a timeout.
ASKS = """
import threading, time
def request(x, **more):
    return asking({model!r}, ["Y"], X=np.array([[x]], np.float32), **more)
request(-1).exec()
first = threading.Thread(target=request({busy_s}).exec)
if {busy_s}:
    first.start()
    time.sleep(0.2)
response = request(0, timeout={timeout_us}).exec()
if {busy_s}:
    first.join()
response.error() and response.error().message(), request(-1).exec().output_tensors()
"""


def seen(both: Both, model: str) -> Any:
    """The timeouts of the requests that the model got since it was asked last."""
    return both.answer(model, SEEN).outputs


@pytest.mark.parametrize("model", POLICIES)
@pytest.mark.parametrize("timeout_us", [0, 5, 5_000_000])
def test_a_client_asks_a_model_that_is_idle(both: Both, model: str, timeout_us: int) -> None:
    seen(both, model)

    outcome = both.infer(model, AT_ONCE, queue_timeout_us=timeout_us)

    assert (outcome == LATE) == (model == "timed" and timeout_us == 5)
    assert seen(both, model)["Y"].shape == (1, int(outcome != LATE))


def test_a_policy_that_lets_nobody_wait_rejects_everybody(both: Both) -> None:
    assert both.infer("timed_shortly", AT_ONCE) == LATE
    assert both.infer("timed_shortly", AT_ONCE, queue_timeout_us=5_000_000) == LATE


@pytest.mark.parametrize("model", POLICIES)
@pytest.mark.parametrize("timeout_us", [5, 100_000, 5_000_000])
@pytest.mark.parametrize("busy_s", [0, 0.6], ids=["idle", "busy"])
def test_a_model_asks_another_one(both: Both, model: str, timeout_us: int, busy_s: float) -> None:
    if timeout_us == 100_000 and not busy_s:
        pytest.skip(
            "on a busy machine, a tenth of a second may be over before an idle model has it"
        )
    code = ASKS.format(model=model, timeout_us=timeout_us, busy_s=busy_s)

    theirs, ours = both.said(code)

    assert agree(theirs, ours), (theirs, ours)
    assert ("expired" in ours) == (model == "timed" and timeout_us < 5_000_000)
