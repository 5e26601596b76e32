"""Tests of response senders of models that give one response for each request."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.e2e.hosting import MODELS, Config, hosted, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.inside import hosted_in
from tests.waiting import wait_until

import moonpool
from moonpool import ModelError, RequestTimedOut
from moonpool.runtime.hosting.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("undisturbed")

RULES: Config = {"input": [tensor("HOW", "STRING", 1)], "output": [tensor("TEXTS", "STRING", -1)]}


@pytest.fixture(scope="module", autouse=True)
def rules(runtime: moonpool.Runtime) -> Iterator[None]:
    with hosted(runtime, "rules", MODELS / "sender_rules.py", RULES):
        yield


def ask(runtime: moonpool.Runtime, how: str, timeout_s: float = 30.0) -> list[str]:
    texts = runtime.infer("rules", {"HOW": [how]}, timeout_s=timeout_s)["TEXTS"]
    return [text.decode() for text in texts]


@pytest.mark.promise("Responses at any time", "Responses may come before, while and …")
@pytest.mark.parametrize(
    ("how", "said"), [("good", "good"), ("apart", "apart"), ("late", "apart"), ("unused", "returned")]
)
def test_the_response_may_be_sent_or_returned(runtime: moonpool.Runtime, how: str, said: str) -> None:
    assert ask(runtime, how) == [said]


def test_a_response_without_the_last_flag_is_an_error_when_the_sender_is_dropped(runtime: moonpool.Runtime) -> None:
    with pytest.raises(ModelError, match="its response sender was dropped"):
        ask(runtime, "without_final")


@pytest.mark.promise("Responses at any time", "If a caller gives up, its request is cancelled.")
def test_a_client_that_does_not_wait_any_more_is_a_cancelled_request(runtime: moonpool.Runtime) -> None:
    def sees_it() -> bool:
        with pytest.raises(RequestTimedOut):
            ask(runtime, "wait_cancelled", timeout_s=0.2)
        # A request that is given up before it is sent never reaches the model.
        return ask(runtime, "told") == ["cancelled"]

    wait_until(sees_it, 30.0, "a cancelled request in the model")


@pytest.mark.promise("Responses at any time", "If a caller gives up …")
def test_a_future_that_is_cancelled_is_a_cancelled_request(runtime: moonpool.Runtime) -> None:
    scheduler = hosted_in(runtime, "rules").scheduler

    def sees_it() -> bool:
        future = runtime.submit("rules", {"HOW": ["wait_cancelled"]})
        wait_until(lambda: scheduler.executing == 1)
        future.cancel()
        # A request that is cancelled right before it is sent never reaches the model.
        return ask(runtime, "told") == ["cancelled"]

    wait_until(sees_it, 30.0, "a cancelled request in the model")


def test_a_response_before_the_end_of_its_batch_leaves_nobody_waiting(
    runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callers drive each other's batches, and one may leave with its response when it has just been appointed."""
    # It would drive a batch that nobody drives.
    monkeypatch.setattr(Supervisor, "rescue", lambda _: None)

    def answers(_: int) -> list[list[str]]:
        return [ask(runtime, "apart") for _ in range(200)]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(answers, range(3))) == [[["apart"]] * 200] * 3


@pytest.mark.promise("Responses at any time", "The trace of a request reaches the model.")
def test_the_model_knows_which_trace_its_request_is_part_of(runtime: moonpool.Runtime) -> None:
    config: Config = {"output": [tensor("TRACE", "STRING", 1)]}
    with (
        hosted(runtime, "traced", MODELS / "traced.py", config),
        hosted(runtime, "other", MODELS / "traced.py", config),
    ):
        for context in ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "", None):
            for parameters in ({}, {"through": "other"}):
                response = runtime.request("traced", {}, trace_context=context, parameters=parameters)
                assert response.outputs["TRACE"].tolist() == [repr(context).encode()]
