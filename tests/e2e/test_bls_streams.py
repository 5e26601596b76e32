"""Tests of requests to models that have many responses, or none."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, hosted, options
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.e2e.test_bls import CALLEE, CALLER
from tests.inside import hosted_in
from tests.waiting import wait_until

import moonpool

PATIENCE_S = 60.0
DECOUPLED = {"model_transaction_policy": {"decoupled": True}}


@pytest.fixture(scope="module", autouse=True)
def models(runtime: moonpool.Runtime) -> Iterator[None]:
    runtime.load("caller", MODELS / "caller.py", config=CALLER, instances=2)
    for name in ("stream", "endless"):
        parameters = {"parameters": {"MODE": {"string_value": name}}}
        runtime.load(name, MODELS / "callee.py", config=CALLEE | DECOUPLED | parameters)
    yield
    for name in ("caller", "stream", "endless"):
        runtime.unload(name)


def do(runtime: moonpool.Runtime, name: str, *x: float, **told: Any) -> Any:
    asked = {"DO": [name + json.dumps(told)], "X": np.array(x, np.float32)}
    outputs = runtime.infer("caller", asked, timeout_s=PATIENCE_S)
    return outputs["SAID"][0].decode() if "SAID" in outputs else outputs["Y"].copy()


@pytest.mark.promise("Requests between models", "A call may have any …")
@pytest.mark.parametrize("size", [4, 50_000])
@pytest.mark.parametrize("count", [2, 3, 200])
def test_responses_come_in_order_and_are_seen_again(runtime: moonpool.Runtime, count: int, size: int) -> None:
    seen, again = json.loads(do(runtime, "streamed", count, size=size))
    # The last response has no tensors.
    assert seen == [[i] for i in range(count)] + [[]]
    assert again == [1] * count + [0]


def test_a_stream_may_have_no_response(runtime: moonpool.Runtime) -> None:
    assert do(runtime, "streams", 0, count=2).tolist() == [1, 1]


def test_streams_that_wait_to_be_read(runtime: moonpool.Runtime) -> None:
    assert do(runtime, "streams", 300, count=5).tolist() == [301] * 5


@pytest.mark.promise("Requests between models", "A call may have any …")
@pytest.mark.parametrize(("by", "said"), [("cancel", "ended"), ("forgetting", "forgotten")])
def test_a_stream_is_left(runtime: moonpool.Runtime, by: str, said: str) -> None:
    assert json.loads(do(runtime, "cancelled", 1, by=by)) == [[0, 1, 2], said]
    # The model learned of the cancellation, and ended.
    wait_until(lambda: not len(hosted_in(runtime, "endless").scheduler.open_requests))


def test_a_model_with_many_responses_must_be_asked_for_them(runtime: moonpool.Runtime) -> None:
    said = do(runtime, "error", 1, model="stream")
    assert said == (
        "UNSUPPORTED: Model stream - Error when running inference: Model stream is using the "
        "decoupled. The current BLS request call doesn't support models using the decoupled "
        "transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' "
        "calls for decoupled models.'"
    )


def test_a_stream_ends_with_the_model_that_read_it(runtime: moonpool.Runtime) -> None:
    with hosted(runtime, "brief", MODELS / "caller.py", CALLER | options(RETRY="no")):
        asked = {"DO": ['iterated{"model": "endless"}'], "X": np.ones(2, np.float32)}
        future = runtime.submit("brief", asked)
        wait_until(lambda: hosted_in(runtime, "endless").scheduler.in_flight == 1)
        os.kill(runtime.instances("brief")[0]["pid"], signal.SIGKILL)
        with pytest.raises(moonpool.StubDied):
            future.result(PATIENCE_S)
    wait_until(lambda: not len(hosted_in(runtime, "endless").scheduler.open_requests))
