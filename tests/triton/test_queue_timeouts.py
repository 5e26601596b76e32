"""The meaning of a request's timeout, for clients and for models that ask other models."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tests.triton.answers import Failure
from tests.triton.both import Both, agree

pytestmark = [pytest.mark.triton, pytest.mark.promise("Requests between models", "The timeout of a request, from …")]

# These models have different queue policies. The timeout of a request counts only if it may override the policy's.
POLICIES = ["timed", "timed_fixed", "timed_free", "timed_delayed", "timed_not", "timed_alone"]
LATE = Failure("UNAVAILABLE", "Request timeout expired")
SEEN = {"X": np.full((1, 1), -1, np.float32)}
AT_ONCE = {"X": np.zeros((1, 1), np.float32)}

TIMEOUTS_US = [1, 100_000, 5_000_000]
REQUEST = """
def request(model, x, **more):
    return asking(model, ["Y"], X=np.array([[x]], np.float32), **more)
"""
# The model asks one that is idle.
ASKS = """
request(model, -1).exec()
response = request(model, 0, timeout=timeout_us).exec()
response.error() and response.error().message(), request(model, -1).exec().output_tensors()
"""
# The model sends a request for three seconds to each of several models, and behind it one with each of the timeouts. It
# answers with the errors, and with what the models have seen.
ASKS_BUSY_ONES = """
import threading, time
def seen(model):
    return sorted(request(model, -1).exec().output_tensors()[0].as_numpy().ravel().tolist())
def ask(model, timeout_us):
    error = request(model, 0, timeout=timeout_us).exec().error()
    said[f"{model} {timeout_us}"] = error and error.message()
said = {}
for model in models:
    seen(model)
first = [threading.Thread(target=request(model, 3).exec) for model in models]
[each.start() for each in first]
time.sleep(0.6)
others = [threading.Thread(target=ask, args=(m, t)) for m in models for t in timeouts_us]
[each.start() for each in others]
[each.join() for each in first + others]
[[name, said[name]] for name in sorted(said)], [[model, seen(model)] for model in models]
"""


def seen(both: Both, model: str) -> Any:
    """The timeouts of the requests that the model got since it was asked last."""
    return both.answer(model, SEEN).outputs


@pytest.mark.parametrize("model", POLICIES)
@pytest.mark.parametrize("timeout_us", [0, 1, 5_000_000])
def test_a_client_asks_a_model_that_is_idle(both: Both, model: str, timeout_us: int) -> None:
    seen(both, model)

    outcome = both.infer(model, AT_ONCE, queue_timeout_us=timeout_us)

    assert (outcome == LATE) == (model == "timed" and timeout_us == 1)
    assert seen(both, model)["Y"].shape == (1, int(outcome != LATE))


def test_a_policy_that_lets_nobody_wait_rejects_everybody(both: Both) -> None:
    assert both.infer("timed_shortly", AT_ONCE) == LATE
    assert both.infer("timed_shortly", AT_ONCE, queue_timeout_us=5_000_000) == LATE


# On a busy machine, a tenth of a second may be over before an idle model has the request.
@pytest.mark.parametrize("model", POLICIES)
@pytest.mark.parametrize("timeout_us", [1, 5_000_000])
def test_a_model_asks_another_one(both: Both, model: str, timeout_us: int) -> None:
    theirs, ours = both.said(f"model, timeout_us = {model!r}, {timeout_us}" + REQUEST + ASKS)

    assert agree(theirs, ours), (theirs, ours)
    assert ("expired" in ours) == (model == "timed" and timeout_us == 1)


def test_a_model_asks_others_that_are_busy(both: Both) -> None:
    theirs, ours = both.said(f"models, timeouts_us = {POLICIES}, {TIMEOUTS_US}" + REQUEST + ASKS_BUSY_ONES)

    assert agree(theirs, ours), (theirs, ours)
    expired = re.findall(r"list\['(\w+ \d+)', '[^']*expired'\]", ours)
    assert expired == ["timed 1", "timed 100000"]
