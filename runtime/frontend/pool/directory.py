"""What the main process tells its front ends: models, stubs, and what goes where."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from moonpool.ipc.errors import Closed, MoonpoolError
from moonpool.ipc.messages import Side
from moonpool.ipc.texts import beginning
from moonpool.runtime.allotment import Allotment
from moonpool.runtime.audience import Audience
from moonpool.runtime.counts import add_counts, take_counts
from moonpool.runtime.failures import took_too_long
from moonpool.runtime.frontend.frontend_metrics import FrontendMetrics, Traffic
from moonpool.runtime.frontend.pool.messages import MAX_TEXT, Word
from moonpool.runtime.public_text import public_text
from moonpool.runtime.python_backend import PythonBackend
from moonpool.runtime.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonpool.runtime.backend import Model
    from moonpool.runtime.counts import Counts
    from moonpool.runtime.frontend.pool.member import Member
    from moonpool.runtime.outcomes import Outcomes
    from moonpool.runtime.stub_handle import StubHandle


_log = logging.getLogger("moonpool")
# How long a front end may take to say what it has counted; then figures are of a moment ago.
_COUNT_S = 1.0
# How long it may take, over the time that its requests have, to say that they have finished.
_DRAINED_S = 5.0


class Directory(Audience):
    """Knows what there is, and tells it to every front end, whenever that comes. Thread-safe."""

    is_there = True

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._numbers = itertools.count(1)
        self._models: dict[Model, int] = {}
        self._stubs: dict[StubHandle, tuple[int, int]] = {}
        self._served: dict[str, list[int]] = {}
        self._members: set[Member] = set()
        self._passes_on = False
        # Where connections and answers of front ends are counted; for whoever makes the server to replace.
        self.traffic = FrontendMetrics()
        # Who has yet to say that the requests of which model have finished.
        self._draining: set[tuple[Member, int]] = set()
        # Stubs that take no more batches, and who has yet to say that its own are finished.
        self._resting: set[int] = set()
        self._leaving: set[tuple[Member, int]] = set()
        self._counting: dict[Member, int] = {}
        # The counts of front ends for each model, by its number, that nobody has asked for yet.
        self._counts: dict[int, Statistics] = {}
        self._failed: list[list[Any]] = []

    # Front ends

    def add(self, member: Member) -> None:
        """A front end that is to be told everything."""
        with self._lock:
            for model, number in self._models.items():
                self._tell_model(member, model, number)
            for stub, (number, model_number) in self._stubs.items():
                if number not in self._resting:
                    self._connect(member, stub, number, model_number)
            for name, numbers in self._served.items():
                member.tell(Word.SERVE, name, numbers)
            member.tell(Word.PASS_ON, self._passes_on)
            self._members.add(member)

    def pass_on(self, everything: bool) -> None:
        """Have front ends answer nothing themselves, as long as something is to be seen that only this process sees."""
        with self._lock:
            self._passes_on = everything
            self._tell_all(Word.PASS_ON, everything)

    def remove(self, member: Member) -> None:
        """A front end that is gone: nobody waits for it any more."""
        with self._lock:
            self._members.discard(member)
            self.traffic.forget(member)
            self._draining = {each for each in self._draining if each[0] is not member}
            self._leaving = {each for each in self._leaving if each[0] is not member}
            self._counting.pop(member, None)
            for memory in self._all_memory():
                memory.abandon(member)
            self._changed.notify_all()

    def hear(self, member: Member, fields: list[Any]) -> None:
        """What a front end says. On the reactor's thread."""
        word = fields[0]
        with self._lock:
            if word == Word.LISTENING:
                member.is_listening.set()
            elif word == Word.DRAINED:
                self._draining.discard((member, fields[1]))
                self._changed.notify_all()
            elif word == Word.COUNTS:
                self._count(fields[1], (fields[2], fields[3]))
            elif word == Word.FAILED:
                self._failed.append(fields[1:])
            elif word == Word.TRAFFIC:
                self.traffic.add(member, Traffic(*fields[1:]))
            elif word == Word.COUNTED:
                if self._counting.get(member) == fields[1]:
                    del self._counting[member]
                    self._changed.notify_all()
            elif word == Word.LOST:
                for stub in self._find(fields[1]):
                    stub.mistrust(fields[2])
            elif word == Word.LEFT:
                self._left(member, fields[1])
            elif word == Word.MEMORY:
                self._set_aside(member, *fields[1:])
            elif word == Word.RETURNED:
                memory = self._memory_of(*fields[1:4])
                if memory is not None:
                    memory.take_back(member, fields[4])
            elif word == Word.SERVED:
                for stub in self._find(fields[1]):
                    stub.count_served(fields[2])
            elif word == Word.OVERDUE:
                self._end_overdue(fields[1])

    def _count(self, number: int, counts: Counts) -> None:
        statistics = self._counts.setdefault(number, Statistics("", ""))
        try:
            add_counts(statistics, counts)
        except ValueError as error:
            _log.error("a front end counts what nobody understands: %s", error)

    # Memory. It is counted here, because a stub may still have what any process of the runtime has sent it.

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
        member: Member,
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
                size_bytes, fd = memory.give_elsewhere(member, region, present_bytes, needed_bytes)
            except MoonpoolError as error:
                member.tell(Word.SET_ASIDE, question, 0, beginning(str(error), MAX_TEXT))
                return
            with self._lock:
                if member in self._members:
                    member.tell(Word.SET_ASIDE, question, size_bytes, "", fds=(fd,))
                    return
            os.close(fd)
            # The region was not sent, so nobody has it.
            memory.take_back(member, region)

        # It takes a millisecond for every few megabytes.
        try:
            threading.Thread(target=act, name="moonpool-grow", daemon=True).start()
        except RuntimeError as error:
            why = f"the runtime has no thread for this: {error}"
            member.tell(Word.SET_ASIDE, question, 0, beginning(why, MAX_TEXT))

    def _left(self, member: Member, number: int) -> None:
        for stub in self._find(number):
            for memory in stub.allotments.values():
                memory.abandon(member)
        if (member, number) in self._leaving:
            self._leaving.remove((member, number))
            self._changed.notify_all()
            return
        for stub in self._find(number):  # too late: it is served on
            self._connect(member, stub, number, self._stubs[stub][1])

    def _find(self, number: int) -> list[StubHandle]:
        """The stub of that number, if it is there still."""
        return [stub for stub, (each, _) in self._stubs.items() if each == number]

    def _end_overdue(self, number: int) -> None:
        models = {each: model for model, each in self._models.items()}
        for stub in self._find(number):
            _, model_number = self._stubs[stub]
            limit_s = models[model_number].options.execute_timeout_s
            if limit_s is not None:
                stub.abort(took_too_long(stub.name, limit_s))

    def _tell_all(self, *message: object) -> None:
        for member in self._members:
            member.tell(*message)

    @staticmethod
    def _tell_model(member: Member, model: Model, number: int) -> None:
        words = number, model.version, model.options.sandbox
        member.tell_with_file(Word.MODEL, *words, contents=model.config.raw)

    def _connect(self, member: Member, stub: StubHandle, number: int, model_number: int) -> None:
        """Join a front end and a stub by channels of their own."""
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        try:
            stub.control.send_peer(*(theirs.fileno() for _, theirs in pairs))
        except MoonpoolError as error:
            _log.debug("[%s] cannot be shared, it is about to end: %s", stub.name, error)
            for ours, _ in pairs:
                ours.close()
            return
        finally:
            for _, theirs in pairs:
                theirs.close()
        fds = tuple(ours.detach() for ours, _ in pairs)
        member.tell(Word.STUB, model_number, number, stub.name, fds=fds)

    # What happens in the runtime

    def model_ready(self, model: Model) -> None:
        config = model.config
        if config.sequence_batching is not None:
            return  # the state of a sequence is in one instance, and one scheduler knows in which
        if config.dynamic_batching is not None and config.dynamic_batching.rejects_late:
            return  # in the stub, a request could wait behind another front end's batch for longer than its timeout
        with self._lock:
            number = self._models[model] = next(self._numbers)
            for member in self._members:
                self._tell_model(member, model, number)

    def model_gone(self, model: Model) -> None:
        with self._lock:
            number = self._models.pop(model, None)
            if number is not None:
                self._tell_all(Word.MODEL_GONE, number)

    def stub_ready(self, model: Model, stub: StubHandle) -> None:
        with self._lock:
            model_number = self._models.get(model)
            if model_number is None:
                return
            number = next(self._numbers)
            self._stubs[stub] = number, model_number
            for member in self._members:
                self._connect(member, stub, number, model_number)

    def stub_gone(self, stub: StubHandle, reason: BaseException) -> None:
        with self._lock:
            number, _ = self._stubs.pop(stub, (None, 0))
            if number is not None:
                self._resting.discard(number)
                error = type(reason).__name__
                told = getattr(reason, "told", None) or ""
                words = beginning(str(reason), MAX_TEXT), beginning(told, MAX_TEXT)
                self._tell_all(Word.STUB_GONE, number, beginning(error, 64), *words)

    def withdraw(self, stub: StubHandle, timeout_s: float) -> bool:
        with self._lock:
            number, model_number = self._stubs.get(stub, (0, 0))
            if not number:
                return True
            self._resting.add(number)
            members = set(self._members)
            self._leaving |= {(member, number) for member in members}
            self._tell_all(Word.LEAVE, number)
            if self._changed.wait_for(
                lambda: all(each != number for _, each in self._leaving), timeout_s
            ):
                return True
            late = {member for member, each in self._leaving if each == number}
            self._leaving = {each for each in self._leaving if each[1] != number}
            self._resting.discard(number)
            for member in self._members - late:
                self._connect(member, stub, number, model_number)
            return False

    def serve(self, name: str, versions: Sequence[Model]) -> None:
        with self._lock:
            known = [self._models[model] for model in versions if model in self._models]
            # A front end answers for all versions or for none.
            numbers = known if len(known) == len(versions) else []
            before = self._served.pop(name, [])
            if numbers:
                self._served[name] = numbers
            if numbers or before:
                self._tell_all(Word.SERVE, name, numbers)

    def refuse(self, model: Model, error: MoonpoolError) -> None:
        with self._lock:
            number = self._models.get(model)
            if number is not None:
                self._tell_all(Word.REFUSE, number, beginning(public_text(error), MAX_TEXT))

    def welcome(self, model: Model) -> None:
        with self._lock:
            number = self._models.get(model)
            if number is not None:
                self._tell_all(Word.WELCOME, number)

    def drain(self, model: Model, error: MoonpoolError, timeout_s: float) -> Callable[[], object]:
        with self._lock:
            number = self._models.get(model)
            if number is not None:
                self._draining |= {(member, number) for member in self._members}
                self._tell_all(
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

    def catch_up(self, outcomes: Callable[[Model], Outcomes | None]) -> None:
        with self._asking, self._lock:
            question = next(self._numbers)
            self._counting = dict.fromkeys(self._members, question)
            self._tell_all(Word.COUNT, question)
            self._changed.wait_for(lambda: question not in self._counting.values(), _COUNT_S)
            counts, self._counts = self._counts, {}
            failed, self._failed = self._failed, []
            models = {number: model for model, number in self._models.items()}
        for number, statistics in counts.items():
            model = models.get(number)
            where = None if model is None else outcomes(model)
            counted = take_counts(statistics)
            if where is not None and counted is not None:
                where.add_counts(counted)
        for number, *told in failed:
            model = models.get(number)
            where = None if model is None else outcomes(model)
            if where is not None:
                where.note(*told)


def allotment_of(model: Model) -> Allotment | None:
    """Return the allotment of callers that write in place for a model, if this process counts it."""
    source = PythonBackend.memory_of(model).source
    return source if isinstance(source, Allotment) else None
