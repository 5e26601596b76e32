"""Traced requests in the scheduler: what may take long happens while others can go on, and before the caller has the
answer.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.inside import hosted_in, registry_of
from tests.runtime.held_batches import holding
from tests.runtime.recorder import PATIENCE_S, row
from tests.waiting import wait_until

from moonpool import Response
from moonpool.runtime.hosting.hosted_model import HostedModel
from moonpool.runtime.model.request import Answer, ModelVersion, RequestTrace
from moonpool.runtime.model.signature import make_request
from moonpool.runtime.schedule.callers import FutureWaiter


class Witness(RequestTrace):
    """Notes what is called, in order, and if the caller still waits then."""

    context = "#1"

    def __init__(self, hosted: HostedModel) -> None:
        self.told: list[tuple[str, bool]] = []
        self._hosted = hosted
        self.future: Future[Response] = Future()

    def executed(self, answer: Answer, *_: int) -> None:  # noqa: ARG002 - it may be used later only
        self.told.append(("executed", not self.future.done()))

    def _note(self, name: str) -> None:
        other = threading.Thread(target=self._hosted.scheduler.executing_since, args=(0,))
        other.start()
        other.join(PATIENCE_S)
        assert not other.is_alive(), "others can use the scheduler meanwhile"
        self.told.append((name, not self.future.done()))

    def answered(self) -> None:
        self._note("answered")

    def settled(self) -> None:
        self._note("settled")

    def responded(self, answer: object) -> None:
        raise AssertionError(answer)

    def child(self, model: ModelVersion, request_id: str) -> Any:
        raise AssertionError(model, request_id)

    def follow(self, request: Any) -> None:
        request.trace = self

    def end(self) -> None:
        """Note nothing."""


@pytest.mark.parametrize("others", [0, 2], ids=["alone", "in a batch"])
def test_the_tensors_of_a_trace_become_text_without_the_lock(folder: Path, others: int) -> None:
    batching = {"max_batch_size": 8, "dynamic_batching": {}}
    with holding(folder, **batching) as (backend, runtime):
        hosted = hosted_in(runtime, "m")
        first = runtime.submit("m", row(0))
        request = make_request(hosted.signature, row(1))
        witness = Witness(hosted)
        witness.follow(request)
        waiter = FutureWaiter(registry_of(runtime).deliveries, lambda: None)
        request.waiter, witness.future = waiter, waiter.future
        assert hosted.scheduler.submit(request) is None
        futures = [runtime.submit("m", row(2 + i)) for i in range(others)]
        backend.is_quick = True
        backend.wait_for(1).answer()

        waiter.future.result(PATIENCE_S)
        for future in (first, *futures):
            future.result(PATIENCE_S)
        wait_until(lambda: len(witness.told) == 3)
    assert witness.told[:2] == [("executed", True), ("answered", True)]
    assert witness.told[2][0] == "settled"
