"""The models that a front end answers for itself, as the main process tells it."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.texts import beginning
from moonpool.runtime import errors
from moonpool.runtime.backend import Model
from moonpool.runtime.config import ModelConfig
from moonpool.runtime.config_options import ModelOptions
from moonpool.runtime.errors import ModelNotFound, ModelUnavailable, StubDied
from moonpool.runtime.frontend.frontend_metrics import FrontendMetrics
from moonpool.runtime.frontend.pool.borrowed_memory import BorrowedMemory, MemoryDesk
from moonpool.runtime.frontend.pool.guest import GuestModel
from moonpool.runtime.frontend.pool.messages import MAX_BATCH_SIZES, MAX_TEXT, Word
from moonpool.runtime.source import ModelSource

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from pathlib import Path

    from moonpool.ipc.messages import Side
    from moonpool.runtime.reactor import Reactor

_TIDY_S = 5.0
# The time between two reports of counts to the main process: while requests come, and otherwise.
_SOON_S, _IDLE_S = 0.02, 0.1
# An execution over its limit is noticed after this part of the limit more, at the latest.
_CHECKS_PER_LIMIT = 20


class GuestModels:
    """`find` is for any thread; the rest is for the reactor's."""

    def __init__(
        self, reactor: Reactor, executor: Executor, tell: Callable[..., None], nowhere: Path
    ) -> None:
        """`tell` sends a message to the main process. `nowhere` stands for the files of models."""
        self._reactor = reactor
        self._executor = executor
        self._tell = tell
        self._nowhere = nowhere
        self._models: dict[int, GuestModel] = {}
        self._served: dict[str, list[GuestModel]] = {}
        self._passes_on = False
        self.memory = MemoryDesk(tell)
        # What the protocols count in.
        self.traffic = FrontendMetrics()
        reactor.call_later(_TIDY_S, self._tidy)
        reactor.call_later(_IDLE_S, self._tell_soon)

    def find(self, name: str, version: int | None = None) -> GuestModel:
        """A model version, the latest by default. Raises `ModelNotFound` where the main process is to be asked."""
        served = () if self._passes_on else self._served.get(name, ())
        for model in reversed(served):
            if version is None or model.model.version == version:
                return model
        raise ModelNotFound(f"'{name}' is not answered for here")

    def handle(self, fields: list[Any], fds: list[int]) -> None:
        """What the main process says of models. Owns the descriptors."""
        word = fields[0]
        if word == Word.MODEL:
            self._add(fields[1], fields[2], fields[3], fds[0])
        elif word == Word.SERVE:
            self._serve(fields[1], fields[2])
        elif word == Word.STUB:
            self._attach(*fields[1:], *fds)
        elif word == Word.STUB_GONE:
            reason = _error(*fields[2:])
            for model in self._models.values():
                model.detach(fields[1], reason)
        elif word == Word.LEAVE:
            self._leave(fields[1])
        elif word == Word.PASS_ON:
            self._passes_on = fields[1]
        elif word == Word.COUNT:
            self._count(fields[1])
        elif fields[1] in self._models:
            self._handle_end(fields, self._models[fields[1]])

    def _handle_end(self, fields: list[Any], model: GuestModel) -> None:
        word, number = fields[0], fields[1]
        if word == Word.REFUSE:
            model.refuse(ModelUnavailable(fields[2]))
        elif word == Word.WELCOME:
            model.welcome()
        elif word == Word.DRAIN:
            error, timeout_s = ModelUnavailable(fields[2]), fields[3] / 1000
            model.drain(error, timeout_s, lambda: self._reactor.call_soon(lambda: done()))

            def done() -> None:
                self._tell_all(number, model)
                self._tell(Word.DRAINED, number)

        elif word == Word.MODEL_GONE:
            model.close()
            del self._models[number]

    def _add(self, number: int, version: int, sandbox: str, fd: int) -> None:
        with open(fd, "rb") as file:
            config = ModelConfig.from_dict(json.loads(file.read()))
        source = ModelSource("triton", self._nowhere, None, self._nowhere, self._nowhere)
        options = replace(ModelOptions.from_parameters(config), sandbox=sandbox)
        model = Model(config, options, version, source)

        def memory(stub: int, writer: Side) -> BorrowedMemory:
            return BorrowedMemory(self.memory, number, stub, writer, options.region_limit_bytes)

        self._models[number] = GuestModel(
            model, self._reactor, self._executor, memory, self._lost, self._served_by
        )
        if options.execute_timeout_s is not None:
            self._check_overdue(number, options.execute_timeout_s / _CHECKS_PER_LIMIT)

    def _serve(self, name: str, numbers: list[int]) -> None:
        models = [self._models[number] for number in numbers if number in self._models]
        if models:
            self._served[name] = models
        else:
            self._served.pop(name, None)

    def _attach(self, model: int, stub: int, name: str, work_fd: int, control_fd: int) -> None:
        channels = socket.socket(fileno=work_fd), socket.socket(fileno=control_fd)
        try:
            self._models[model].attach(stub, name, *channels)
        except (KeyError, MoonpoolError) as error:
            for channel in channels:
                channel.close()
            self._lost(stub, str(error))

    def _leave(self, stub: int) -> None:
        for model in self._models.values():
            if model.has(stub):
                model.leave(stub, lambda: self._tell(Word.LEFT, stub))
                return
        self._tell(Word.LEFT, stub)

    def _served_by(self, stub: int, requests: int) -> None:
        self._tell(Word.SERVED, stub, requests)

    def _lost(self, stub: int, why: str) -> None:
        self._tell(Word.LOST, stub, beginning(why, MAX_TEXT))

    # What is to be done from time to time

    def _check_overdue(self, number: int, pause_s: float) -> None:
        model = self._models.get(number)
        if model is not None:
            for stub in model.overdue():
                self._tell(Word.OVERDUE, stub)
            self._reactor.call_later(pause_s, lambda: self._check_overdue(number, pause_s))

    def _tidy(self) -> None:
        for model in self._models.values():
            model.tidy()
        self._reactor.call_later(_TIDY_S, self._tidy)

    # What was counted

    def _tell_soon(self) -> None:
        """Report counts without being asked: if this process is killed, counts that it has not reported are lost."""
        told = [self._tell_counts(number, model) for number, model in self._models.items()]
        self._tell_traffic()
        self._reactor.call_later(_SOON_S if any(told) else _IDLE_S, self._tell_soon)

    def _tell_traffic(self) -> None:
        for traffic in self.traffic.take():
            self._tell(Word.TRAFFIC, *traffic)

    def _count(self, question: int) -> None:
        for number, model in self._models.items():
            self._tell_all(number, model)
        self._tell_traffic()
        self._tell(Word.COUNTED, question)

    def _tell_all(self, number: int, model: GuestModel) -> None:
        for each in model.errors.take():
            request_id = beginning(each.request_id, MAX_TEXT)
            self._tell(Word.FAILED, number, each.text, each.instance, request_id, each.requests)
        self._tell_counts(number, model)

    def _tell_counts(self, number: int, model: GuestModel) -> bool:
        """Report the counts of a model; False if there are none."""
        counts = model.scheduler.outcomes.take_counts()
        if counts is None:
            return False
        figures, batches = counts
        self._tell(Word.COUNTS, number, figures, batches[:MAX_BATCH_SIZES])
        nothing = [0] * len(figures)
        for start in range(MAX_BATCH_SIZES, len(batches), MAX_BATCH_SIZES):
            self._tell(Word.COUNTS, number, nothing, batches[start : start + MAX_BATCH_SIZES])
        return True

    def leave(self) -> None:
        """The front end ends: tell the last figures, and let go of everything."""
        self._count(0)
        for model in self._models.values():
            model.close()


def _error(kind: str, text: str, told: str) -> MoonpoolError:
    """The reason for which a stub is gone, as the main process has it."""
    found = getattr(errors, kind, None)
    error: MoonpoolError = StubDied(text)
    if isinstance(found, type) and issubclass(found, MoonpoolError):
        error = found(text)
    error.told = told or None
    return error
