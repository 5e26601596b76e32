"""Tests of models whose `execute` is a coroutine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, Config, hosted, options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401

import moonpool
from moonpool import ModelError

pytestmark = pytest.mark.usefixtures("undisturbed")

CONFIG: Config = {
    "input": [tensor("HOW", "STRING", 1)],
    "output": [tensor("Y", "INT32", 1)],
    **options(CONCURRENT_BATCHES=4),
}
STREAMING: Config = {
    "input": [tensor("N", "INT32", 1)],
    "output": [tensor("Y", "INT32", 1)],
    "model_transaction_policy": {"decoupled": True},
}


@pytest.fixture(scope="module", autouse=True)
def models(runtime: moonpool.Runtime) -> Iterator[None]:
    with (
        hosted(runtime, "coroutines", MODELS / "coroutines.py", CONFIG),
        hosted(runtime, "streaming", MODELS / "streaming_coroutine.py", STREAMING),
    ):
        yield


def ask(runtime: moonpool.Runtime, how: str) -> int:
    return int(runtime.infer("coroutines", {"HOW": [how]}, timeout_s=60.0)["Y"][0])


def together(runtime: moonpool.Runtime, how: str, count: int) -> list[int]:
    futures = [runtime.submit("coroutines", {"HOW": [how]}) for _ in range(count)]
    return [int(future.result(60.0).outputs["Y"][0]) for future in futures]


@pytest.mark.promise("Responses at any time", "Coroutines of successive batches overlap, up to the allowed number.")
def test_batches_of_one_instance_overlap(runtime: moonpool.Runtime) -> None:
    ask(runtime, "reset")
    assert max(together(runtime, "meet", 2)) == 2


@pytest.mark.promise("Responses at any time", "Coroutines of successive batches overlap …")
def test_no_more_batches_overlap_than_are_allowed(runtime: moonpool.Runtime) -> None:
    ask(runtime, "reset")
    assert max(together(runtime, "crowd", 20)) == 4


@pytest.mark.promise("Responses at any time", "A request whose sender is dropped, …")
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("fail", "Failed to process the request.s. for model 'coroutines_0'.*raised in a coroutine"),
        ("leave", "SystemExit: 3"),
        ("wrong", "Expected an 'InferenceResponse' object in the execute function return list"),
        ("nothing", "without a last response"),
        ("sender_of_a_task_that_raises", "without a last response"),
    ],
)
def test_a_coroutine_that_fails_ends_its_requests(runtime: moonpool.Runtime, how: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        ask(runtime, how)
    assert ask(runtime, "reset") == 0


def test_a_task_that_outlives_execute_may_answer(runtime: moonpool.Runtime) -> None:
    assert ask(runtime, "sender") == 5


def test_decoupled_coroutines_take_turns(runtime: moonpool.Runtime) -> None:
    streams = [runtime.stream("streaming", {"N": np.array([n], np.int32)}, timeout_s=60.0) for n in (200, 3, 100)]
    taken = [[int(r.outputs["Y"][0]) for r in responses] for responses in streams]
    assert taken == [list(range(n)) for n in (200, 3, 100)]


def test_a_decoupled_coroutine_that_raises_ends_its_stream(runtime: moonpool.Runtime) -> None:
    responses = runtime.stream("streaming", {"N": np.array([-2], np.int32)}, timeout_s=60.0)
    assert [int(next(responses).outputs["Y"][0]) for _ in range(2)] == [0, 1]
    with pytest.raises(ModelError, match="wait_secs cannot be negative"):
        next(responses)
