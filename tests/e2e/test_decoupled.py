"""Tests of models that answer with response senders: any number of responses, at any time, from any thread."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import runpy
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, Config, hosted, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.inside import hosted_in
from tests.waiting import wait_until

import moonpool
from moonpool import InvalidRequest, ModelError, RequestTimedOut, ResponseStream, StubDied
from moonpool.runtime.hosting import supervisor

pytestmark = pytest.mark.usefixtures("undisturbed")

PAGE = Path(__file__).parents[2] / "docs" / "TRITON_MODELS.md"
RESPONDER: Config = {
    "input": [tensor("HOW", "STRING", 1), tensor("N", "INT32", 1)],
    "output": [tensor("Y", "INT32", -1)],
    "model_transaction_policy": {"decoupled": True},
    # Some tests have thousands of requests open, and each may have a thread. The default at `strict` is 512.
    "parameters": {"MOONPOOL_TASK_LIMIT": {"string_value": "8192"}},
}


@pytest.fixture(scope="module", autouse=True)
def responder(runtime: moonpool.Runtime) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "_TIDY_S", 0.05)
        with hosted(runtime, "responder", MODELS / "responder.py", RESPONDER):
            yield


def stream(runtime: moonpool.Runtime, how: str, n: int = 0, **options: Any) -> ResponseStream:
    options.setdefault("timeout_s", 60.0)
    inputs = {"HOW": [how], "N": np.array([n], np.int32)}
    return runtime.stream("responder", inputs, **options)


def values(responses: ResponseStream) -> list[int]:
    return [int(response.outputs["Y"][0]) for response in responses]


def open_requests(runtime: moonpool.Runtime) -> int:
    return len(hosted_in(runtime, "responder").scheduler.open_requests)


@pytest.mark.promise(
    "Responses at any time",
    "Responses of one sender arrive in the order in which they were sent, from however many "
    "threads. None arrives after the last.",
)
@pytest.mark.parametrize("how", ["count", "last_with_flag", "in_thread"])
@pytest.mark.parametrize("n", [1, 2, 1000])
def test_responses_come_in_the_order_in_which_they_were_sent(runtime: moonpool.Runtime, how: str, n: int) -> None:
    assert values(stream(runtime, how, n)) == list(range(n))


def test_a_request_may_have_no_response_at_all(runtime: moonpool.Runtime) -> None:
    assert values(stream(runtime, "count", 0)) == []


def test_responses_of_several_threads_all_arrive_before_the_last(runtime: moonpool.Runtime) -> None:
    assert sorted(values(stream(runtime, "from_threads", 400))) == list(range(400))


@pytest.mark.promise(
    "Responses at any time",
    "Responses may come before, while and after `execute` returns, also in models that are not decoupled.",
)
def test_a_response_may_come_after_execute_has_returned(runtime: moonpool.Runtime) -> None:
    first = stream(runtime, "keep")
    assert values(stream(runtime, "release", 7)) == list(range(7))
    assert values(first) == [7]


def test_an_input_stays_what_it_was_after_execute_has_returned(runtime: moonpool.Runtime) -> None:
    first = stream(runtime, "give_input_later", 42)
    for i in range(5):
        values(stream(runtime, "count", i))
    values(stream(runtime, "give_now"))
    assert values(first) == [42]


def test_parameters_come_with_each_response_floats_too(runtime: moonpool.Runtime) -> None:
    given = [response.parameters for response in stream(runtime, "parameters", 3)]
    assert given == [{"i": i, "half": i / 2} for i in range(3)]


def test_memory_for_large_responses_is_given_back(runtime: moonpool.Runtime) -> None:
    for i, response in enumerate(stream(runtime, "big", 64)):
        assert response.outputs["Y"].shape == (1 << 18,)
        assert (response.outputs["Y"] == i).all()
    del response
    link = hosted_in(runtime, "responder").supervisor.records[0].instance.state.link
    wait_until(lambda: link.size_bytes() <= 4 << 20, what="the regions to be given back")


@pytest.mark.promise(
    "Responses at any time",
    "A request whose sender is dropped, or whose thread, task or coroutine raises, ends with an error.",
)
@pytest.mark.parametrize("n", [0, 3])
def test_a_sender_that_is_dropped_ends_its_request_with_an_error(runtime: moonpool.Runtime, n: int) -> None:
    responses = stream(runtime, "drop_after", n)
    assert [int(next(responses).outputs["Y"][0]) for _ in range(n)] == list(range(n))
    with pytest.raises(ModelError, match="without a last response to this request"):
        next(responses)
    assert list(responses) == []


def test_a_request_whose_sender_was_never_asked_for_ends_with_an_error(runtime: moonpool.Runtime) -> None:
    with pytest.raises(ModelError, match="or never asked for"):
        next(stream(runtime, "nothing"))


def test_a_sender_that_only_a_cycle_keeps_ends_its_request_when_that_is_collected(runtime: moonpool.Runtime) -> None:
    with pytest.raises(ModelError, match="its response sender was dropped"):
        next(stream(runtime, "cycle"))


def test_a_sender_that_was_kept_and_forgotten_ends_its_request(runtime: moonpool.Runtime) -> None:
    first = stream(runtime, "keep")
    values(stream(runtime, "forget", 1))
    with pytest.raises(ModelError, match="its response sender was dropped"):
        next(first)


@pytest.mark.parametrize("n", [0, 2])
def test_an_exception_ends_the_request_after_its_responses(runtime: moonpool.Runtime, n: int) -> None:
    responses = stream(runtime, "raise_after", n)
    assert [int(next(responses).outputs["Y"][0]) for _ in range(n)] == list(range(n))
    with pytest.raises(ModelError, match="raised on purpose"):
        next(responses)


@pytest.mark.promise("Responses at any time", "A request whose sender is dropped, …")
def test_a_thread_that_raises_ends_its_request(runtime: moonpool.Runtime) -> None:
    responses = stream(runtime, "raise_in_thread")
    assert int(next(responses).outputs["Y"][0]) == 0
    with pytest.raises(ModelError, match="its response sender was dropped"):
        next(responses)


def test_an_error_between_responses_is_raised_and_the_next_one_follows(runtime: moonpool.Runtime) -> None:
    responses = stream(runtime, "error_between")
    assert int(next(responses).outputs["Y"][0]) == 0
    with pytest.raises(ModelError, match="not this one") as caught:
        next(responses)
    assert caught.value.code == "NOT_FOUND"
    assert values(responses) == [2]


def test_an_output_that_the_model_does_not_have_is_left_out(runtime: moonpool.Runtime) -> None:
    first, second = stream(runtime, "wrong_name")
    assert first.outputs == {}
    assert second.outputs["Y"].tolist() == [1]


def test_an_error_too_long_for_a_packet_arrives(runtime: moonpool.Runtime) -> None:
    with pytest.raises(ModelError) as caught:
        next(stream(runtime, "long_error"))
    assert str(caught.value) == "x" * 60_000


# Readers of streams


def test_a_stream_can_be_iterated_over_in_an_event_loop(runtime: moonpool.Runtime) -> None:
    async def take(n: int) -> list[int]:
        responses = stream(runtime, "in_thread", n)
        return [int(response.outputs["Y"][0]) async for response in responses]

    async def main() -> list[list[int]]:
        return list(await asyncio.gather(*(take(n) for n in (0, 1, 50, 300))))

    assert asyncio.run(main()) == [list(range(n)) for n in (0, 1, 50, 300)]


def test_one_who_takes_a_single_response_is_told_to_use_a_stream(runtime: moonpool.Runtime) -> None:
    with pytest.raises(InvalidRequest, match="taken from a stream"):
        runtime.infer("responder", {"HOW": ["count"], "N": np.array([1], np.int32)})


def ends(name: str, responses: ResponseStream) -> None:
    """End a stream early."""
    if name == "close":
        responses.close()
    elif name == "with":
        with responses:
            next(responses)
    else:
        del responses
        gc.collect()


def endless(runtime: moonpool.Runtime, **options: Any) -> ResponseStream:
    """Start a stream that ends when the model learns that nobody takes it."""
    responses = stream(runtime, "until_cancelled", **options)
    wait_until(lambda: open_requests(runtime) == 1, what="the request to be open")
    return responses


@pytest.mark.promise("Responses at any time", "If a caller ends a stream early, in whatever way, the model learns it.")
@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_ending_a_stream_early_tells_the_model(runtime: moonpool.Runtime, how: str) -> None:
    responses = endless(runtime)
    next(responses)
    ends(how, responses)
    del responses
    wait_until(lambda: open_requests(runtime) == 0, what="the model to notice")
    assert values(stream(runtime, "was_cancelled")) == [1]


@pytest.mark.promise("Responses at any time", "If a caller ends a …")
def test_a_task_that_is_cancelled_in_a_stream_tells_the_model(runtime: moonpool.Runtime) -> None:
    async def main() -> None:
        async with endless(runtime) as responses:
            async for _ in responses:
                raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    wait_until(lambda: open_requests(runtime) == 0, what="the model to notice")
    assert values(stream(runtime, "was_cancelled")) == [1]


@pytest.mark.promise("Responses at any time", "If a caller ends a …")
def test_a_stream_whose_time_is_over_tells_the_model(runtime: moonpool.Runtime) -> None:
    responses = endless(runtime, timeout_s=0.3)
    with pytest.raises(RequestTimedOut):
        list(responses)
    assert list(responses) == []
    wait_until(lambda: open_requests(runtime) == 0, what="the model to notice")


def test_a_stream_whose_time_is_over_gives_no_response_that_came_before(runtime: moonpool.Runtime) -> None:
    responses = stream(runtime, "count", 100)
    next(responses)
    wait_until(lambda: responses._waiter.waiting)
    responses._deadline = time.monotonic()
    with pytest.raises(RequestTimedOut):
        next(responses)


def test_a_stream_of_a_model_with_one_response_has_one(runtime: moonpool.Runtime) -> None:
    x = np.arange(3, dtype=np.float32)
    (response,) = runtime.stream("sibling", {"X": x})
    assert response.outputs["OUT_X"].tolist() == [0, 1, 2]


# Ends


@pytest.mark.promise(
    "Responses at any time",
    "When a stub dies, its open requests fail, after all responses that it had sent were delivered.",
)
def test_open_requests_fail_when_their_stub_dies(runtime: moonpool.Runtime) -> None:
    second = endless(runtime)
    next(second)
    first = stream(runtime, "keep")
    wait_until(lambda: open_requests(runtime) == 2)
    (instance,) = runtime.instances("responder")
    hosted_in(runtime, "responder").supervisor.records[0].instance.state.process.kill()
    with pytest.raises(StubDied):
        next(first)
    with pytest.raises(StubDied):
        list(second)
    wait_until(lambda: runtime.instances("responder")[0]["restarts"] == instance["restarts"] + 1)
    assert values(stream(runtime, "count", 2)) == [0, 1]


def test_an_unload_waits_for_open_requests_and_gives_up_in_time() -> None:
    with moonpool.Runtime(drain_timeout_s=0.2) as runtime:
        runtime.load("responder", MODELS / "responder.py", config=RESPONDER)
        first = stream(runtime, "keep")
        wait_until(lambda: open_requests(runtime) == 1)
        runtime.unload("responder")
        with pytest.raises(moonpool.ModelUnavailable, match="being unloaded"):
            next(first)


def test_thousands_of_requests_may_be_open(runtime: moonpool.Runtime) -> None:
    streams = [stream(runtime, "in_thread", 2) for _ in range(2000)]
    assert all(values(responses) == [0, 1] for responses in streams)
    wait_until(lambda: open_requests(runtime) == 0)


@pytest.mark.promise(
    "Responses at any time",
    "If many callers leave at the same time, the model learns of each one, even if it reads slowly.",
)
def test_a_model_is_told_of_all_who_leave_at_the_same_time(runtime: moonpool.Runtime) -> None:
    """Let more callers leave than a socket can hold messages, while the stub does not read."""
    many = 600
    config: Config = {**RESPONDER, "input": [tensor("N", "INT32", 1)]}

    def ask(n: int) -> ResponseStream:
        return runtime.stream("many", {"N": np.array([n], np.int32)}, timeout_s=60.0)

    with hosted(runtime, "many", MODELS / "keeps_senders.py", config):
        streams = [ask(1) for _ in range(many)]
        scheduler = hosted_in(runtime, "many").scheduler
        wait_until(lambda: len(scheduler.open_requests) == many)
        pid = runtime.instances("many")[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            for each in streams:
                each.close()
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: values(ask(0)) == [many])


# The documentation


@pytest.mark.skipif(not PAGE.exists(), reason="only the tests are here, without the documents")
def test_the_example_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("take_countdown.py")
    assert capsys.readouterr().out.split() == ["[3]", "[2]", "[1]", "[0]"]
