"""A signal handler of a model's may raise anywhere in a request to another model: nothing is lost, and the next request
works.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from tests.runtime.interrupting import OF_A_STUB, Alarm, Interrupted, interrupted_everywhere
from tests.stub.closing import apart, blocks_left
from tests.stub.hosts.test_usual_asks import FORMS, FROM_RUNTIME, ROWS, Asking, request
from tests.waiting import wait_until

from moonpool.ipc.codec import encode
from moonpool.ipc.errors import PeerGone
from moonpool.ipc.messages import Kind
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.tensor import Tensor

PATIENCE_S = 60.0


class Answered(Asking):
    """A stub's host, whose runtime is a thread that answers each request and counts what it lends."""

    region_bytes = 1 << 17

    def __init__(self, *, is_compiled: bool) -> None:
        super().__init__(is_compiled=is_compiled)
        # Places of blocks that the stub was lent and has not given back.
        self.lent: Counter[tuple[int, int]] = Counter()
        self.kinds: Counter[Kind] = Counter()
        self.offsets = itertools.cycle(range(0, 512, 128))
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        # The test may end while a request that nobody waits for is answered.
        with suppress(PeerGone):
            while True:
                self._answer(self.codec.decode(self.runtime.receive()))

    def _answer(self, fields: Any) -> None:
        back = []
        if fields[0] == Kind.INDIRECT:
            _, region, offset, size = fields
            memory = self.regions.region(region).memory()
            fields = self.codec.decode(bytes(memory[offset : offset + size]))
            back.append([region, offset])
        kind = Kind(fields[0])
        self.kinds[kind] += 1
        if kind == Kind.LET_GO:
            self.lent.subtract(map(tuple, fields[1]))
        if kind != Kind.INFER:
            return
        _, number, _, _, is_decoupled, _, released, blocks, *_ = fields
        self.lent.subtract(map(tuple, released))
        back += [block[:2] for block in blocks]
        for is_last in [False, True] if is_decoupled else [True]:
            offset = next(self.offsets)
            self.lent[FROM_RUNTIME, offset] += 1
            lent = [[FROM_RUNTIME, offset, 80]]
            self.runtime.send(encode(Kind.REPLY, number, is_last, back, lent, ROWS, None, None))
            back = []

    def ask_on(self, size: int) -> NoReturn:
        """Ask one time after the other."""
        while True:
            self.host.infer(request(size=size), False)

    def check(self) -> None:
        """A request is answered, and nothing of those before is left."""
        apart(self._ask)
        assert self.left()[3] == []
        assert blocks_left(self.regions) == []
        self.calls.tidy()
        wait_until(lambda: not any(self.lent.values()), PATIENCE_S)

    def _ask(self) -> None:
        response: Any = self.host.infer(request(), False)
        assert response.error() is None
        assert [len(each.as_numpy()) for each in response.output_tensors()] == [4, 2]

    def close(self) -> None:
        self.runtime.wake()
        self.thread.join(PATIENCE_S)
        super().close()


@pytest.fixture(params=FORMS, ids=["Python", "compiled"][: len(FORMS)])
def answered(request: pytest.FixtureRequest) -> Iterator[Answered]:
    made = Answered(is_compiled=request.param)
    # From now on, requests of this kind are usual.
    for _ in range(2):
        made.check()
    yield made
    made.close()


def of_text() -> InferenceRequest:
    return request(inputs=[Tensor("A", np.array([b"text"], object))])


@pytest.mark.promise(
    "Requests between models",
    "A signal handler of a model may raise at any point of `exec`: `exec` raises that, and the next one works.",
)
@pytest.mark.parametrize(
    "make",
    [
        request,
        lambda: request(request_id="not usual"),
        of_text,
        # Of another size than the one before, so that the tables of the allocator change.
        lambda: request(size=999),
        # It lies in a block itself, too.
        lambda: request(parameters={"long": "x" * 40_000}),
    ],
    ids=["usual", "with details", "text", "larger", "stored"],
)
def test_an_interrupt_at_any_point_of_a_request_loses_nothing(
    answered: Answered, make: Callable[[], InferenceRequest]
) -> None:
    kept: list[Any] = []

    def ask() -> None:
        # A response that ended inside would end with the exception, too.
        kept.append(answered.host.infer(make(), False))

    def check() -> None:
        kept.clear()
        answered.check()

    assert interrupted_everywhere(ask, check, within=OF_A_STUB, at_lines=False) > 2


def test_an_interrupt_at_any_point_of_a_decoupled_request_loses_nothing(answered: Answered) -> None:
    kept: list[Any] = []

    def ask() -> None:
        responses: Any = answered.host.infer(request(), True)
        kept.append(responses)
        kept.extend(responses)

    def check() -> None:
        kept.clear()
        answered.check()

    assert interrupted_everywhere(ask, check, within=OF_A_STUB, at_lines=False) > 20


@pytest.mark.promise(
    "Requests between models",
    "A loop over responses that a signal handler interrupts, at any point, goes on with the one that it would have "
    "got.",
)
def test_a_loop_that_is_interrupted_anywhere_goes_on_with_the_response_that_it_missed(answered: Answered) -> None:
    got: list[Any] = []
    left: list[Any] = []

    def check() -> None:
        # A loop that has had both begins anew.
        got.extend(itertools.islice(left.pop(), 2 - len(got)))
        # By identity: none is missed, and none comes twice.
        assert len(got) == len(set(map(id, got))) == 2
        got.clear()
        answered.check()
        left.append(answered.host.infer(request(), True))

    left.append(answered.host.infer(request(), True))
    events = interrupted_everywhere(lambda: got.extend(left[0]), check, within=OF_A_STUB, at_lines=False)
    left.clear()
    assert events > 20


@pytest.mark.parametrize("error", [Interrupted, TimeoutError, MemoryError])
def test_what_a_handler_raised_leaves_the_request_as_it_is(answered: Answered, error: type[BaseException]) -> None:
    for number in range(150):
        # Of many sizes, so that some are allocated in Python.
        with pytest.raises(error), Alarm(error, number * 4e-6):
            answered.ask_on(1 + number % 7 * 100)
        answered.check()


def test_a_thread_that_follows_a_leader_who_is_interrupted_gets_its_answer(answered: Answered) -> None:
    stops = threading.Event()
    count = 0

    def follow() -> None:
        nonlocal count
        while not stops.is_set():
            response: Any = answered.host.infer(request(), False)
            assert response.error() is None
            count += 1

    threads = [threading.Thread(target=follow) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(100):
            before = count
            with pytest.raises(Interrupted), Alarm(Interrupted, number * 5e-6):
                answered.ask_on(4)
            wait_until(lambda before=before: count > before, PATIENCE_S)  # type: ignore[misc]
    finally:
        stops.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    answered.check()


SMALL = """
import threading
from tests.stub.hosts.test_interrupted_asks import Answered, request

answered = Answered(is_compiled=True)
for _ in range(2):
    answered.check()
responses = []
threading.stack_size(32 * 1024)
thread = threading.Thread(target=lambda: responses.append(answered.host.infer(request(), False)))
thread.start()
thread.join()
assert responses[0].error() is None
answered.close()
"""


@pytest.mark.skipif(len(FORMS) < 2, reason="moonpool was installed without its compiled code")
def test_a_thread_with_the_smallest_stack_may_ask() -> None:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    ended = subprocess.run([sys.executable, "-c", SMALL], env=environment, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0
