"""The main process's end of its front ends: it sends them models and stubs, and receives counts and losses.

Theory of operation. The main process owns everything: it starts a stub, watches it, recycles it and ends it. A front end
only has a work channel and a control channel of its own to that stub. `_connect` makes both pairs of sockets, sends one end
of each to the stub over the stub's control channel, and the other ends to the front end with STUB. No process reads another
one's channel, so a front end that dies takes nothing with it but its own requests.

Front ends know nothing but the messages of this object. `_lock` is held over each change together with the messages about
it, and `FrontEndProcess.send` only appends to a queue. So every front end gets all changes in one order, `add` sends a
new one the present state without missing or repeating a change, and no caller ever waits for a front end that does not
read.

These are called from everywhere: `receive` by the reactor, the methods of `StubSharing` by threads that load, unload,
recycle or recover, and some of them under the locks of those. A method that waits does so on `_changed`, which gives
`_lock` up.

- A stub that ends: if a front end notices first, it reports LOST, and `mistrust` ends the stub soon unless it ends by
  itself. The runtime reports `stub_gone`, and STUB_GONE carries the reason, which only this process knows. A front end
  keeps the requests that the stub had until it knows the reason, which decides what the callers get.
- A front end that ends: `remove` strikes it off every set that somebody may be waiting on, and gives up the regions that it
  had for stubs. The stubs find its channels closed.
- A stub that is recycled: `withdraw` sends LEAVE and waits until each front end has answered LEFT. If one is late, the stub
  stays in service: those that left are connected again, and so is the late one when its LEFT comes.
- Counts travel by themselves soon after each request, and `catch_up` asks for the rest. `_asking` lets one thread ask at a
  time, because `_counting` holds the answers to one question.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from moonpool.ipc.errors import Closed, MoonpoolError
from moonpool.ipc.messages import Side, beginning
from moonpool.runtime.errors import LoadFailed, OutOfThreads
from moonpool.runtime.hosting.python_backend import PythonBackend
from moonpool.runtime.isolation.public_text import public_text
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.backend import Model
from moonpool.runtime.observe.metrics_options import duration_bounds_ns
from moonpool.runtime.observe.statistics import Counts, Statistics, add_counts, take_counts
from moonpool.runtime.process.diagnose import remedy
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.schedule.failures import took_too_long
from moonpool.runtime.schedule.scheduler import Scheduler
from moonpool.runtime.server.metrics import FrontendMetrics, Traffic
from moonpool.runtime.server.pool.front_end_process import FrontEndProcess
from moonpool.runtime.server.pool.messages import MAX_TEXT, Word
from moonpool.runtime.stubs.allotment import Allotment
from moonpool.runtime.stubs.handle import StubHandle, StubSharing

_log = RuntimeLog("moonpool")
# How long a front end may take to answer COUNT. After that the figures are those of a moment ago.
_COUNT_S = 1.0
# How much longer than its requests a front end may take to answer DRAIN.
_DRAINED_S = 5.0


class Directory(StubSharing):
    """Tells every front end which models and stubs there are, also one that starts later. Thread-safe."""

    is_there = True

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._numbers = itertools.count(1)
        self._models: dict[Model, int] = {}
        self._stubs: dict[StubHandle, tuple[int, int]] = {}
        self._served: dict[str, list[int]] = {}
        self._front_ends: set[FrontEndProcess] = set()
        self._passes_on = False
        # Counts the connections and answers of front ends. The server puts its own object here.
        self.traffic = FrontendMetrics()
        # Front ends that have not answered DRAIN yet, each with the number of the model.
        self._draining: set[tuple[FrontEndProcess, int]] = set()
        # Stubs that get no more batches from front ends, and the front ends that have not answered LEAVE for one.
        self._resting: set[int] = set()
        self._leaving: set[tuple[FrontEndProcess, int]] = set()
        self._counting: dict[FrontEndProcess, int] = {}
        # The counts of front ends that nobody has asked for yet, by the number of the model.
        self._counts: dict[int, Statistics] = {}
        self._failed: list[list[Any]] = []

    # Front ends

    def add(self, front_end: FrontEndProcess) -> None:
        """Tell a new front end the present state, and from now on every change.

        Raises `LoadFailed` and `OSError` if this process has no descriptors for that. The front end must be ended then.
        """
        with self._lock:
            for model, number in self._models.items():
                self._send_model(front_end, model, number)
            for stub, (number, model_number) in self._stubs.items():
                if number not in self._resting:
                    self._connect(front_end, stub, number, model_number)
            for name, numbers in self._served.items():
                front_end.send(Word.SERVE, name, numbers)
            front_end.send(Word.PASS_ON, self._passes_on)
            self._front_ends.add(front_end)

    def pass_on(self, everything: bool) -> None:
        """Have front ends answer no request themselves, or answer again.

        While requests are traced, this process must see them all.
        """
        with self._lock:
            self._passes_on = everything
            self._send_all(Word.PASS_ON, everything)

    def remove(self, front_end: FrontEndProcess) -> None:
        """Forget a front end that has ended, so that nobody waits for it."""
        with self._lock:
            self._front_ends.discard(front_end)
            self.traffic.forget(front_end)
            self._draining = {each for each in self._draining if each[0] is not front_end}
            self._leaving = {each for each in self._leaving if each[0] is not front_end}
            self._counting.pop(front_end, None)
            for memory in self._all_memory():
                memory.abandon(front_end)
            self._changed.notify_all()

    def receive(self, front_end: FrontEndProcess, fields: list[Any]) -> None:
        """Act on a message of a front end. For the reactor's thread."""
        word = fields[0]
        with self._lock:
            if word == Word.LISTENING:
                front_end.is_listening.set()
            elif word == Word.DRAINED:
                self._draining.discard((front_end, fields[1]))
                self._changed.notify_all()
            elif word == Word.COUNTS:
                self._count(fields[1], (fields[2], fields[3]))
            elif word == Word.FAILED:
                self._failed.append(fields[1:])
            elif word == Word.TRAFFIC:
                self.traffic.add(front_end, Traffic(*fields[1:]))
            elif word == Word.COUNTED:
                if self._counting.get(front_end) == fields[1]:
                    del self._counting[front_end]
                    self._changed.notify_all()
            elif word == Word.LOST:
                for stub in self._find(fields[1]):
                    stub.mistrust(fields[2])
            elif word == Word.LEFT:
                self._left(front_end, fields[1])
            elif word == Word.MEMORY:
                self._set_aside(front_end, *fields[1:])
            elif word == Word.RETURNED:
                memory = self._memory_of(*fields[1:4])
                if memory is not None:
                    memory.take_back(front_end, fields[4])
            elif word == Word.SERVED:
                for stub in self._find(fields[1]):
                    stub.count_served(fields[2])
            elif word == Word.OVERDUE:
                self._end_overdue(fields[1])

    def _count(self, number: int, counts: Counts) -> None:
        statistics = self._counts.get(number)
        if statistics is None:
            model = next((known for known, each in self._models.items() if each == number), None)
            bounds_ns = duration_bounds_ns({} if model is None else model.config.raw)
            statistics = self._counts[number] = Statistics("", "", bounds_ns)
        try:
            add_counts(statistics, counts)
        except ValueError as error:
            _log.error("the counts of a front end cannot be read: %s", error)

    # Memory. A stub may keep the descriptor of every region that any process has sent it, so all of them count towards its
    # limit. That is why front ends get their regions from here.

    def _memory_of(self, model: int, stub: int, writer: int) -> Allotment | None:
        for each in self._find(stub):
            return each.allotments[Side(writer)]
        if stub == 0:
            for known, number in self._models.items():
                if number == model:
                    return allotment_of(known)
        return None

    def _all_memory(self) -> list[Allotment]:
        found = [allotment_of(model) for model in self._models]
        found += [each for stub in self._stubs for each in stub.allotments.values()]
        return [each for each in found if each is not None]

    def _set_aside(
        self,
        front_end: FrontEndProcess,
        question: int,
        model: int,
        stub: int,
        writer: int,
        region: int,
        present_bytes: int,
        needed_bytes: int,
    ) -> None:
        memory = self._memory_of(model, stub, writer)

        def act() -> None:
            try:
                if memory is None:
                    raise Closed("the stub is gone")
                size_bytes, fd = memory.give_elsewhere(
                    front_end, region, present_bytes, needed_bytes
                )
            except MoonpoolError as error:
                front_end.send(Word.SET_ASIDE, question, 0, beginning(str(error), MAX_TEXT))
                return
            with self._lock:
                if front_end in self._front_ends:
                    front_end.send(Word.SET_ASIDE, question, size_bytes, "", fds=(fd,))
                    return
            os.close(fd)
            # The front end has ended meanwhile. The region was not sent, so nobody has it.
            memory.take_back(front_end, region)

        # A millisecond for every few megabytes, which the reactor cannot spare.
        try:
            start_thread(threading.Thread(target=act, name="moonpool-grow", daemon=True))
        except OutOfThreads as error:
            front_end.send(Word.SET_ASIDE, question, 0, beginning(str(error), MAX_TEXT))

    def _left(self, front_end: FrontEndProcess, number: int) -> None:
        for stub in self._find(number):
            for memory in stub.allotments.values():
                memory.abandon(front_end)
        if (front_end, number) in self._leaving:
            self._leaving.remove((front_end, number))
            self._changed.notify_all()
            return
        for stub in self._find(number):  # `withdraw` waits no more, so the stub is served on
            self._connect_again(front_end, stub, number, self._stubs[stub][1])

    def _find(self, number: int) -> list[StubHandle]:
        """Return the stub of that number, or nothing if it has ended."""
        return [stub for stub, (each, _) in self._stubs.items() if each == number]

    def _end_overdue(self, number: int) -> None:
        models = {each: model for model, each in self._models.items()}
        for stub in self._find(number):
            _, model_number = self._stubs[stub]
            model = models[model_number]
            limit_s = model.options.execute_timeout_s
            if limit_s is not None:
                stub.abort(took_too_long(stub.name, limit_s, model.denials))

    def _send_all(self, *message: object) -> None:
        for front_end in self._front_ends:
            front_end.send(*message)

    @staticmethod
    def _send_model(front_end: FrontEndProcess, model: Model, number: int) -> None:
        words = number, model.version, model.options.sandbox, model.source.kind
        front_end.send_with_file(Word.MODEL, *words, contents=model.config.raw)

    def _connect(
        self, front_end: FrontEndProcess, stub: StubHandle, number: int, model_number: int
    ) -> None:
        """Join a front end and a stub by a work channel and a control channel of their own.

        Raises `LoadFailed` if this process has no descriptors for them.
        """
        pairs: list[tuple[socket.socket, socket.socket]] = []
        try:
            # If the second pair fails, the list has the first one.
            pairs.extend(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
            stub.control.send_peer(*(theirs.fileno() for _, theirs in pairs))
        except (MoonpoolError, OSError) as error:
            for ours, _ in pairs:
                ours.close()
            if isinstance(error, MoonpoolError):
                _log.debug("[%s] is about to end and cannot be shared: %s", stub.name, error)
                return
            raise LoadFailed(
                f"'{stub.name}' cannot be shared with {front_end.name}: {error.strerror}"
                f"{remedy(error)}",
                stage="start",
            ) from error
        finally:
            for _, theirs in pairs:
                theirs.close()
        fds = tuple(ours.detach() for ours, _ in pairs)
        front_end.send(Word.STUB, model_number, number, stub.name, fds=fds)

    def _connect_again(
        self, front_end: FrontEndProcess, stub: StubHandle, number: int, model_number: int
    ) -> None:
        """Connect a front end that has left a stub. If that fails, end it: it is started again, and gets all stubs."""
        try:
            self._connect(front_end, stub, number, model_number)
        except LoadFailed as error:
            _log.error("[%s] killed, and will be started again: %s", front_end.name, error)
            front_end.process.kill()

    # What the runtime reports: see `StubSharing`.

    def model_ready(self, model: Model) -> None:
        config = model.config
        if model.has_one_scheduler:
            return  # a response that one process keeps would not be found by the others, nor would the resources that it takes
        if config.sequence_batching is not None:
            return  # the state of a sequence lies in one instance, and only one scheduler knows in which
        if config.dynamic_batching is not None and config.dynamic_batching.rejects_late:
            return  # in the stub, a request may wait behind another front end's batch for longer than its timeout
        with self._lock:
            number = self._models[model] = next(self._numbers)
            for front_end in self._front_ends:
                self._send_model(front_end, model, number)

    def model_gone(self, model: Model) -> None:
        with self._lock:
            number = self._models.pop(model, None)
            if number is not None:
                self._send_all(Word.MODEL_GONE, number)

    def stub_ready(self, model: Model, stub: StubHandle) -> None:
        with self._lock:
            model_number = self._models.get(model)
            if model_number is None:
                return
            number = next(self._numbers)
            self._stubs[stub] = number, model_number
            for front_end in self._front_ends:
                self._connect(front_end, stub, number, model_number)

    def stub_gone(self, stub: StubHandle, reason: BaseException) -> None:
        with self._lock:
            number, _ = self._stubs.pop(stub, (None, 0))
            if number is not None:
                self._resting.discard(number)
                error = type(reason).__name__
                public = getattr(reason, "public_message", None) or ""
                words = beginning(str(reason), MAX_TEXT), beginning(public, MAX_TEXT)
                self._send_all(Word.STUB_GONE, number, beginning(error, 64), *words)

    def withdraw(self, stub: StubHandle, timeout_s: float) -> bool:
        with self._lock:
            number, model_number = self._stubs.get(stub, (0, 0))
            if not number:
                return True
            self._resting.add(number)
            front_ends = set(self._front_ends)
            self._leaving |= {(front_end, number) for front_end in front_ends}
            self._send_all(Word.LEAVE, number)
            if self._changed.wait_for(
                lambda: all(each != number for _, each in self._leaving), timeout_s
            ):
                return True
            # One of them is late. The stub was not withdrawn, so it must not lose its clients: those that have left get new
            # channels now. A late one still has its channels, and `_left` connects it again when its LEFT comes.
            late = {front_end for front_end, each in self._leaving if each == number}
            self._leaving = {each for each in self._leaving if each[1] != number}
            self._resting.discard(number)
            for front_end in self._front_ends - late:
                self._connect_again(front_end, stub, number, model_number)
            return False

    def serve(self, name: str, versions: Sequence[Model]) -> None:
        with self._lock:
            known = [self._models[model] for model in versions if model in self._models]
            # A front end answers for all versions or for none, as it must know which version is the latest.
            numbers = known if len(known) == len(versions) else []
            before = self._served.pop(name, [])
            if numbers:
                self._served[name] = numbers
            if numbers or before:
                self._send_all(Word.SERVE, name, numbers)

    def refuse(self, model: Model, error: MoonpoolError) -> None:
        with self._lock:
            number = self._models.get(model)
            if number is not None:
                self._send_all(Word.REFUSE, number, beginning(public_text(error), MAX_TEXT))

    def welcome(self, model: Model) -> None:
        with self._lock:
            number = self._models.get(model)
            if number is not None:
                self._send_all(Word.WELCOME, number)

    def drain(self, model: Model, error: MoonpoolError, timeout_s: float) -> Callable[[], object]:
        with self._lock:
            number = self._models.get(model)
            if number is not None:
                self._draining |= {(front_end, number) for front_end in self._front_ends}
                self._send_all(
                    Word.DRAIN, number, beginning(str(error), MAX_TEXT), int(timeout_s * 1000)
                )
        end_s = time.monotonic() + timeout_s + _DRAINED_S

        def wait() -> None:
            with self._lock:
                self._changed.wait_for(
                    lambda: all(each != number for _, each in self._draining),
                    max(0.0, end_s - time.monotonic()),
                )
                self._draining = {each for each in self._draining if each[1] != number}

        return wait

    def catch_up(self, schedulers: Callable[[Model], Scheduler | None]) -> None:
        # An answer to an earlier question that came too late has another number, and does not count for this one.
        with self._asking, self._lock:
            question = next(self._numbers)
            self._counting = dict.fromkeys(self._front_ends, question)
            self._send_all(Word.COUNT, question)
            self._changed.wait_for(lambda: question not in self._counting.values(), _COUNT_S)
            counts, self._counts = self._counts, {}
            failed, self._failed = self._failed, []
            models = {number: model for model, number in self._models.items()}
        for number, statistics in counts.items():
            model = models.get(number)
            where = None if model is None else schedulers(model)
            counted = take_counts(statistics)
            if where is not None and counted is not None:
                where.add_counts(counted)
        for number, *error in failed:
            model = models.get(number)
            where = None if model is None else schedulers(model)
            if where is not None:
                where.note(*error)


def allotment_of(model: Model) -> Allotment | None:
    """Return the allotment of callers that write in place for a model; None if this process does not count it."""
    source = PythonBackend.memory_of(model).source
    return source if isinstance(source, Allotment) else None
