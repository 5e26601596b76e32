"""The models of a front end: a scheduler for each model version, over stubs that the main process has started.

Theory of operation. The main process owns the stubs: it starts, watches and ends them, and only it learns why one died. A
front end has two channels of its own to each stub, forms batches in a scheduler of its own, and reads the answers itself. A
stub takes batches from the main process and from every front end, one after another.

All attaching, detaching and reporting happens on the reactor's thread, so the tables need no lock. Requests come from the
event loop and from threads that copy. They meet the reactor only in the scheduler, which has its own lock. What may block runs
on a thread of its own: `leave` waits for batches in flight, `drain` for all requests of a model.

A stub that dies leaves two facts, which come in any order: the requests that it had, from the thread that found its channel broken
(`_lost`), and the reason, from the main process (`detach`). The requests fail with the reason, so `_settle` runs when both
are there. If a front end is the first to notice, it reports LOST, and gives the main process `_REASON_S` to say why.

When the main process ends, nothing here needs to be undone: this process ends with it. When this process ends, the stubs
find its channels closed and drop what they had for it.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from moonpool.ipc.channel import Channel
from moonpool.ipc.errors import MoonpoolError, PeerGone, ProtocolError
from moonpool.ipc.messages import Side, beginning
from moonpool.ipc.policy import is_contained
from moonpool.runtime import errors
from moonpool.runtime.errors import ModelNotFound, ModelUnavailable, OutOfThreads, StubDied
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.backend import Backend, Model, ModelInstance
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.config.options import ModelOptions
from moonpool.runtime.model.request import InferenceRequest
from moonpool.runtime.model.signature import Signature
from moonpool.runtime.model.source import ModelSource
from moonpool.runtime.observe.recent_errors import RecentErrors
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.schedule.failures import as_moonpool_error, notify_callers
from moonpool.runtime.schedule.scheduler import Scheduler
from moonpool.runtime.server.metrics import FrontendMetrics
from moonpool.runtime.server.pool.borrowed_memory import BorrowedMemory, MemoryClient
from moonpool.runtime.server.pool.messages import MAX_BATCH_SIZES, MAX_TEXT, Word
from moonpool.runtime.stubs.allotment import RegionSource
from moonpool.runtime.stubs.connection import StubConnection
from moonpool.runtime.stubs.control import ControlChannel
from moonpool.runtime.stubs.link import Link
from moonpool.runtime.stubs.regions import CallerMemory

_log = RuntimeLog("moonpool")
# How long the main process may take to give the reason for the end of a stub.
_REASON_S = 15.0
# For a model that is recycled after a number of requests: the main process gets a report after each of so many parts of it.
_TOLD_PER_LIMIT = 16


class AttachedBackend(Backend):
    """Sends batches to stubs that the main process starts and ends."""

    blocks = False

    def model_instance_execute(
        self, instance: ModelInstance, requests: Sequence[InferenceRequest]
    ) -> Link:
        link: Link = instance.state.link
        link.execute(requests)
        return link

    def began_ns(self, instance: ModelInstance, sent_ns: int) -> int | None:
        link: Link = instance.state.link
        return link.began_ns(sent_ns)

    def cancel(self, instance: ModelInstance, request: InferenceRequest) -> None:
        connection: StubConnection = instance.state
        connection.cancel(request)


class AttachedInstance:
    """A stub of the main process, as this front end uses it. For the reactor's thread."""

    def __init__(self, number: int, instance: ModelInstance) -> None:
        self.number = number
        self.instance = instance
        # The requests that it had when it broke, and the reason for its end. Callers get their error when both are known.
        self.requests: Sequence[InferenceRequest] | None = None
        self.reason: MoonpoolError | None = None

    @property
    def connection(self) -> StubConnection:
        connection: StubConnection = self.instance.state
        return connection


class AttachedModel:
    """Takes requests as `HostedModel` does. `attach` and all methods below it are for the reactor's thread."""

    def __init__(
        self,
        model: Model,
        reactor: Reactor,
        executor: Executor,
        memory: Callable[[int, Side], RegionSource],
        report_lost: Callable[[int, str], None],
        report_served: Callable[[int, int], None],
    ) -> None:
        """Open a scheduler without stubs.

        `memory` makes the source of regions for a stub, from its number and the writer; the number 0 stands for callers.
        `report_lost` gets the number of a broken stub and the error. `report_served` gets the number of a stub and of the
        requests that it has executed since the last report, if the model is recycled by number.
        """
        self.model = model
        self.signature = Signature(model.config, is_native=model.source.is_native)
        self._reactor = reactor
        self._report_lost = report_lost
        self._report_served = report_served
        self._backend = AttachedBackend(model.config.backend)
        self._memory = memory
        self.memory = CallerMemory(model.options.region_limit_bytes, source=memory(0, Side.RUNTIME))
        self._attached: dict[int, AttachedInstance] = {}
        self.scheduler = Scheduler(model, reactor, executor, self._lost)
        self.errors = RecentErrors()
        self.scheduler.note = partial(self.errors.add, model.name, model.version)
        self.scheduler.open()

    # Stubs

    def attach(self, number: int, name: str, work: socket.socket, control: socket.socket) -> None:
        """Send batches to another stub. Owns the sockets. Raises `OutOfMemory`."""
        connection = StubConnection(
            Channel(work),
            ControlChannel(Channel(control)),
            self.model.options,
            self._reactor,
            is_loaded=True,
            is_shared=True,
            # Only the main process knows which GPU a contained stub has.
            gpus=() if is_contained(self.model.options.sandbox) else None,
            memory=(self._memory(number, Side.RUNTIME), self._memory(number, Side.STUB)),
        )
        instance = ModelInstance(self._backend, self.model, name, "CPU", 0)
        instance.state, instance.port = connection, connection.link.usual_port
        instance.respond = partial(self.scheduler.respond, instance)
        connection.serve(instance.respond)
        connection.link.serve(self.model.config, self.memory)
        connection.link.is_on_gpu = self.model.config.uses_gpu
        attached = self._attached[number] = AttachedInstance(number, instance)
        self._reactor.watch(control.fileno(), lambda: self._read(attached))
        limit = self.model.options.recycle_requests
        if limit is not None:
            instance.serves_until = max(1, limit // _TOLD_PER_LIMIT)
            instance.recycle = partial(self._count, attached)
        instance.accepts = True
        self.scheduler.add(instance)

    def has(self, number: int) -> bool:
        """Return whether the model sends batches to this stub."""
        return number in self._attached

    def _count(self, attached: AttachedInstance, _: object) -> bool:
        """Report the requests that a stub has executed. The scheduler's lock is held."""
        requests, attached.instance.served = attached.instance.served, 0
        self._reactor.call_soon(lambda: self._report_served(attached.number, requests))
        return False

    def leave(self, number: int, done: Callable[[], object]) -> None:
        """Send a stub no more batches, and when it has finished those in flight, close its channels and call `done`.

        If no thread can be started to wait for that, the stub stays in service. The main process waits for a while only.
        """
        attached = self._attached.get(number)
        if attached is None:  # it has ended
            done()
            return
        instance = attached.instance

        def let_go() -> None:
            if self._attached.get(number) is attached:
                del self._attached[number]
                attached.connection.close()
            done()

        def wait() -> None:
            instance.accepts = False
            if not self.scheduler.retire(instance):
                self.scheduler.wait_idle(instance, None)
            self.scheduler.wait_closed(instance, None)
            if instance.broken is None:
                self._reactor.call_soon(let_go)
            else:
                self.scheduler.lose(instance, instance.broken)
                self._reactor.call_soon(done)

        thread = threading.Thread(target=wait, name=f"moonpool-leave-{instance.name}", daemon=True)
        try:
            start_thread(thread)
        except OutOfThreads as error:
            _log.error(
                "[%s] is still used, because no thread could be started to wait for its batches: %s",
                instance.name,
                error,
            )

    def _read(self, attached: AttachedInstance) -> None:
        try:
            attached.connection.read(64)
        except Exception as error:  # whatever failed, a message of the stub is lost
            if not isinstance(error, (PeerGone, ProtocolError)):
                _log.exception("[%s] its messages cannot be read", attached.instance.name)
            self._reactor.forget(attached.connection.control.channel.fileno())
            self._break(attached, as_moonpool_error(error))

    def _break(self, attached: AttachedInstance, error: MoonpoolError) -> None:
        """Have the thread that waits for the stub, or the next one that gets it, find it broken."""
        if attached.number in self._attached:
            self.scheduler.report(attached.instance, error)
            attached.connection.link.conversation.channel.wake()

    def _lost(
        self, instance: ModelInstance, requests: Sequence[InferenceRequest], error: BaseException
    ) -> None:
        """Note that an instance broke while it had these requests. From any thread."""
        instance.accepts = False

        def act() -> None:
            found = [each for each in self._attached.values() if each.instance is instance]
            if not found:
                return
            attached = found[0]
            if attached.requests is not None:
                return  # reported before
            attached.requests = requests
            if attached.reason is None:
                self._report_lost(attached.number, str(error))
                unknown = StubDied(f"Stub process '{instance.name}' is not healthy: {error}")
                self._reactor.call_later(_REASON_S, lambda: self.detach(attached.number, unknown))
            else:
                self._settle(attached, attached.reason)

        self._reactor.call_soon(act)

    def detach(self, number: int, reason: MoonpoolError) -> None:
        """Note the reason for the end of a stub. A second call does nothing."""
        attached = self._attached.get(number)
        if attached is None:
            return
        if attached.reason is None:
            attached.reason = reason
        if attached.requests is None:
            self._break(attached, reason)
        else:
            self._settle(attached, attached.reason)

    def _settle(self, attached: AttachedInstance, reason: MoonpoolError) -> None:
        if self._attached.pop(attached.number, None) is not None:
            notify_callers(
                self.scheduler,
                self.model.options,
                attached.instance,
                attached.requests or (),
                reason,
            )
            attached.connection.close()

    def overdue(self) -> list[int]:
        """Return the stubs that have been executing for longer than the model's limit."""
        limit_s = self.model.options.execute_timeout_s
        if limit_s is None:
            return []
        since_ns = time.monotonic_ns() - int(limit_s * 1e9)
        late = self.scheduler.executing_since(since_ns)
        instances = {each.instance for each in late if each.began_before(since_ns)}
        return [
            attached.number
            for attached in self._attached.values()
            if attached.instance in instances
        ]

    def tidy(self) -> None:
        """Give back memory that was not needed lately. A stub with a batch is left alone."""
        now_s = time.monotonic()
        self.memory.tidy(now_s)
        for attached in list(self._attached.values()):
            if self.scheduler.take(attached.instance):
                try:
                    attached.connection.tidy(now_s)
                except (MoonpoolError, OSError) as error:
                    self.scheduler.lose(attached.instance, error)
                else:
                    self.scheduler.add(attached.instance)

    # The end

    def refuse(self, error: MoonpoolError) -> None:
        """Fail all queued requests with this error, and all new ones until `welcome`."""
        self.scheduler.refuse(error)
        self.scheduler.drop(error)

    def welcome(self) -> None:
        """Take requests again after `refuse`."""
        self.scheduler.open()

    def drain(self, error: MoonpoolError, timeout_s: float, done: Callable[[], object]) -> None:
        """Refuse new requests, and call `done` when the others have finished or the time is over."""
        self.scheduler.refuse(error)
        end_s = time.monotonic() + timeout_s

        def wait() -> None:
            if not self.scheduler.wait_empty(end_s):
                self.scheduler.drop(error)
            done()

        def begin() -> None:
            name = f"moonpool-drain-{self.model.name}"
            try:
                start_thread(threading.Thread(target=wait, name=name, daemon=True))
            except OutOfThreads:
                if time.monotonic() < end_s:
                    self._reactor.call_later(_AGAIN_S, begin)
                else:
                    wait()

        begin()

    def close(self) -> None:
        """Detach all stubs. Requests that they still execute fail."""
        gone = ModelUnavailable(f"model '{self.model.name}' is being unloaded")
        self.refuse(gone)
        for number in list(self._attached):
            self.detach(number, gone)
        self.memory.close()


_TIDY_S = 5.0
# The pause before a thread is asked for again.
_AGAIN_S = 0.1
# The time between two reports of counts to the main process, while requests come and otherwise.
_SOON_S, _IDLE_S = 0.02, 0.1


class AttachedModels:
    """Does what the directory says of models. `find` is for any thread, the rest for the reactor's."""

    def __init__(
        self, reactor: Reactor, executor: Executor, send: Callable[..., None], nowhere: Path
    ) -> None:
        """`send` sends a message to the main process. `nowhere` stands for the model's files, which a front end never opens."""
        self._reactor = reactor
        self._executor = executor
        self._send = send
        self._nowhere = nowhere
        self._models: dict[int, AttachedModel] = {}
        self._served: dict[str, list[AttachedModel]] = {}
        self._passes_on = False
        self.memory = MemoryClient(send)
        # The protocols count their connections and answers here.
        self.traffic = FrontendMetrics()
        reactor.call_later(_TIDY_S, self._tidy)
        reactor.call_later(_IDLE_S, self._report_soon)

    def find(self, name: str, version: int | None = None) -> AttachedModel:
        """Return a model version, the latest by default. Raises `ModelNotFound` if the main process must answer."""
        served = () if self._passes_on else self._served.get(name, ())
        for model in reversed(served):
            if version is None or model.model.version == version:
                return model
        raise ModelNotFound(f"model '{name}' is not served by this front end")

    def handle(self, fields: list[Any], fds: list[int]) -> None:
        """Act on a message of the main process. Owns the descriptors."""
        word = fields[0]
        if word == Word.MODEL:
            self._add(*fields[1:5], fd=fds[0])
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

    def _handle_end(self, fields: list[Any], model: AttachedModel) -> None:
        word, number = fields[0], fields[1]
        if word == Word.REFUSE:
            model.refuse(ModelUnavailable(fields[2]))
        elif word == Word.WELCOME:
            model.welcome()
        elif word == Word.DRAIN:
            error, timeout_s = ModelUnavailable(fields[2]), fields[3] / 1000
            model.drain(error, timeout_s, lambda: self._reactor.call_soon(lambda: done()))

            def done() -> None:
                self._report_all(number, model)
                self._send(Word.DRAINED, number)

        elif word == Word.MODEL_GONE:
            model.close()
            del self._models[number]

    def _add(self, number: int, version: int, sandbox: str, kind: str, *, fd: int) -> None:
        with open(fd, "rb") as file:
            config = ModelConfig.from_dict(json.loads(file.read()))
        source = ModelSource(kind, self._nowhere, None, self._nowhere, self._nowhere)
        options = replace(ModelOptions.from_parameters(config), sandbox=sandbox)
        model = Model(config, options, version, source)

        def memory(stub: int, writer: Side) -> BorrowedMemory:
            return BorrowedMemory(self.memory, number, stub, writer, options.region_limit_bytes)

        self._models[number] = AttachedModel(
            model, self._reactor, self._executor, memory, self._lost, self._served_by
        )
        if options.execute_timeout_s is not None:
            self._check_overdue(number)

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
                model.leave(stub, lambda: self._send(Word.LEFT, stub))
                return
        self._send(Word.LEFT, stub)

    def _served_by(self, stub: int, requests: int) -> None:
        self._send(Word.SERVED, stub, requests)

    def _lost(self, stub: int, why: str) -> None:
        self._send(Word.LOST, stub, beginning(why, MAX_TEXT))

    # Timers

    def _check_overdue(self, number: int) -> None:
        model = self._models.get(number)
        if model is not None:
            for stub in model.overdue():
                self._send(Word.OVERDUE, stub)
            is_idle = not model.scheduler.has_begun
            pause_s = model.model.options.overdue_pause_s(is_idle=is_idle)
            self._reactor.call_later(pause_s, lambda: self._check_overdue(number))

    def _tidy(self) -> None:
        for model in self._models.values():
            model.tidy()
        self._reactor.call_later(_TIDY_S, self._tidy)

    # Counts

    def _report_soon(self) -> None:
        """Report counts without being asked: if this process is killed, counts that it has not reported are lost."""
        reported = [self._report_counts(number, model) for number, model in self._models.items()]
        self._report_traffic()
        self._reactor.call_later(_SOON_S if any(reported) else _IDLE_S, self._report_soon)

    def _report_traffic(self) -> None:
        for traffic in self.traffic.take():
            self._send(Word.TRAFFIC, *traffic)

    def _count(self, question: int) -> None:
        for number, model in self._models.items():
            self._report_all(number, model)
        self._report_traffic()
        self._send(Word.COUNTED, question)

    def _report_all(self, number: int, model: AttachedModel) -> None:
        for each in model.errors.take():
            request_id = beginning(each.request_id, MAX_TEXT)
            self._send(Word.FAILED, number, each.text, each.instance, request_id, each.requests)
        self._report_counts(number, model)

    def _report_counts(self, number: int, model: AttachedModel) -> bool:
        """Report the counts of a model; False if there are none."""
        counts = model.scheduler.take_counts()
        if counts is None:
            return False
        figures, batches = counts
        self._send(Word.COUNTS, number, figures, batches[:MAX_BATCH_SIZES])
        nothing = [0] * len(figures)
        for start in range(MAX_BATCH_SIZES, len(batches), MAX_BATCH_SIZES):
            self._send(Word.COUNTS, number, nothing, batches[start : start + MAX_BATCH_SIZES])
        return True

    def leave(self) -> None:
        """Report the last counts, and close all models: the front end ends."""
        self._count(0)
        for model in self._models.values():
            model.close()


def _error(kind: str, text: str, public_message: str) -> MoonpoolError:
    """Return the error that the main process describes in STUB_GONE."""
    found = getattr(errors, kind, None)
    error: MoonpoolError = StubDied(text)
    if isinstance(found, type) and issubclass(found, MoonpoolError):
        error = found(text)
    error.public_message = public_message or None
    return error
