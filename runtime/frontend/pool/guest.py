"""A model version in a front end: a scheduler for stubs that another process has started."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from moonpool.ipc.channel import Channel
from moonpool.ipc.errors import MoonpoolError, PeerGone, ProtocolError
from moonpool.ipc.messages import Side
from moonpool.ipc.policy import is_contained
from moonpool.runtime.backend import Backend, ModelInstance
from moonpool.runtime.control_channel import ControlChannel
from moonpool.runtime.errors import ModelUnavailable, StubDied
from moonpool.runtime.failures import as_moonpool_error, tell_callers
from moonpool.runtime.recent_errors import RecentErrors
from moonpool.runtime.regions import CallerMemory
from moonpool.runtime.scheduler import Scheduler
from moonpool.runtime.signature import Signature
from moonpool.runtime.stub_connection import StubConnection

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from moonpool.runtime.allotment import RegionSource
    from moonpool.runtime.backend import Model
    from moonpool.runtime.link import Link
    from moonpool.runtime.reactor import Reactor
    from moonpool.runtime.request import InferenceRequest

_log = logging.getLogger("moonpool")
# How long the main process may take to say why a stub is gone.
_REASON_S = 15.0
# Into how many parts a number of requests is divided, after which the main process is told of them.
_TOLD_PER_LIMIT = 16


class GuestBackend(Backend):
    """Sends batches to stubs; somebody else starts and ends them."""

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


class Seat:
    """A stub as a front end has it. For the reactor's thread."""

    def __init__(self, number: int, instance: ModelInstance) -> None:
        self.number = number
        self.instance = instance
        # What it had when it was found to be gone, and why it is gone: both are needed to go on.
        self.requests: Sequence[InferenceRequest] | None = None
        self.reason: MoonpoolError | None = None

    @property
    def connection(self) -> StubConnection:
        connection: StubConnection = self.instance.state
        return connection


class GuestModel:
    """Takes requests as `HostedModel` does. `attach` and what follows it is for the reactor's thread."""

    def __init__(
        self,
        model: Model,
        reactor: Reactor,
        executor: Executor,
        memory: Callable[[int, Side], RegionSource],
        tell_lost: Callable[[int, str], None],
        tell_served: Callable[[int, int], None],
    ) -> None:
        """`memory` makes the source of regions for a stub, from its number and the writer; the number 0 stands for callers.

        `tell_lost` gets the number of a stub that is gone, and how that was noticed.

        `tell_served` gets the number of one, and how many requests more it has executed, where that counts.
        """
        self.model = model
        self.signature = Signature(model.config)
        self._reactor = reactor
        self._tell_lost = tell_lost
        self._tell_served = tell_served
        self._backend = GuestBackend(model.config.backend)
        self._memory = memory
        self.memory = CallerMemory(model.options.region_limit_bytes, source=memory(0, Side.RUNTIME))
        self._seats: dict[int, Seat] = {}
        self.scheduler = Scheduler(model, reactor, executor, self._lost)
        self.errors = RecentErrors()
        self.scheduler.outcomes.note = partial(self.errors.add, model.name, model.version)
        self.scheduler.open()

    # Stubs

    def attach(self, number: int, name: str, work: socket.socket, control: socket.socket) -> None:
        """Send batches to this stub, too. Owns the sockets. Raises `OutOfMemory`."""
        connection = StubConnection(
            Channel(work),
            ControlChannel(Channel(control)),
            self.model.options,
            self._reactor,
            is_loaded=True,
            is_shared=True,
            # Which GPU is a contained one's own only the main process knows.
            gpus=() if is_contained(self.model.options.sandbox) else None,
            memory=(self._memory(number, Side.RUNTIME), self._memory(number, Side.STUB)),
        )
        instance = ModelInstance(self._backend, self.model, name, "CPU", 0)
        instance.state = connection
        instance.respond = partial(self.scheduler.outcomes.respond, instance)
        connection.serve(instance.respond)
        connection.link.serve(self.model.config, self.memory)
        connection.link.is_on_gpu = self.model.config.uses_gpu
        seat = self._seats[number] = Seat(number, instance)
        self._reactor.watch(control.fileno(), lambda: self._read(seat))
        limit = self.model.options.recycle_requests
        if limit is not None:
            instance.serves_until = max(1, limit // _TOLD_PER_LIMIT)
            instance.recycle = partial(self._count, seat)
        instance.accepts = True
        self.scheduler.add(instance)

    def has(self, number: int) -> bool:
        """Whether it sends batches to this stub."""
        return number in self._seats

    def _count(self, seat: Seat, _: object) -> bool:
        """It has executed some requests more. The scheduler's lock is held."""
        requests, seat.instance.served = seat.instance.served, 0
        self._reactor.call_soon(lambda: self._tell_served(seat.number, requests))
        return False

    def leave(self, number: int, done: Callable[[], object]) -> None:
        """Give a stub no more batches; when it has finished those it has, let go of it and call `done`.

        Where no thread can be started to wait for that, the stub is kept, as whoever asked waits for a while only.
        """
        seat = self._seats.get(number)
        if seat is None:  # it is gone already
            done()
            return
        instance = seat.instance

        def let_go() -> None:
            if self._seats.get(number) is seat:
                del self._seats[number]
                seat.connection.close()
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
            thread.start()
        except RuntimeError as error:
            _log.error("[%s] cannot be let go of: %s", instance.name, error)

    def _read(self, seat: Seat) -> None:
        try:
            seat.connection.read(64)
        except Exception as error:  # also where it is nobody's fault: what was said is lost
            if not isinstance(error, (PeerGone, ProtocolError)):
                _log.exception("[%s] what it says cannot be heard", seat.instance.name)
            self._reactor.forget(seat.connection.control.channel.fileno())
            self._break(seat, as_moonpool_error(error))

    def _break(self, seat: Seat, error: MoonpoolError) -> None:
        """Let whoever has the instance, or is to get it, find that it is gone."""
        if seat.number in self._seats:
            self.scheduler.report(seat.instance, error)
            seat.connection.link.conversation.channel.wake()

    def _lost(
        self, instance: ModelInstance, requests: Sequence[InferenceRequest], error: BaseException
    ) -> None:
        """An instance is gone, and with it these requests. From any thread."""
        instance.accepts = False

        def act() -> None:
            seats = [each for each in self._seats.values() if each.instance is instance]
            if not seats:
                return
            seat = seats[0]
            if seat.requests is not None:
                return  # told already
            seat.requests = requests
            if seat.reason is None:
                self._tell_lost(seat.number, str(error))
                unknown = StubDied(f"Stub process '{instance.name}' is not healthy: {error}")
                self._reactor.call_later(_REASON_S, lambda: self.detach(seat.number, unknown))
            else:
                self._settle(seat, seat.reason)

        self._reactor.call_soon(act)

    def detach(self, number: int, reason: MoonpoolError) -> None:
        """A stub is gone, for this reason. Twice is as good as once."""
        seat = self._seats.get(number)
        if seat is None:
            return
        if seat.reason is None:
            seat.reason = reason
        if seat.requests is None:
            self._break(seat, reason)
        else:
            self._settle(seat, seat.reason)

    def _settle(self, seat: Seat, reason: MoonpoolError) -> None:
        if self._seats.pop(seat.number, None) is not None:
            tell_callers(
                self.scheduler, self.model.options, seat.instance, seat.requests or (), reason
            )
            seat.connection.close()

    def overdue(self) -> list[int]:
        """The stubs that have been executing for longer than the model may."""
        limit_s = self.model.options.execute_timeout_s
        if limit_s is None:
            return []
        since_ns = time.monotonic_ns() - int(limit_s * 1e9)
        late = self.scheduler.executing_since(since_ns)
        instances = {each.instance for each in late if each.began_before(since_ns)}
        return [seat.number for seat in self._seats.values() if seat.instance in instances]

    def tidy(self) -> None:
        """Give back memory that was not needed lately."""
        self.memory.tidy(time.monotonic())
        for seat in list(self._seats.values()):
            if self.scheduler.take(seat.instance):
                try:
                    seat.connection.tidy()
                except (MoonpoolError, OSError) as error:
                    self.scheduler.lose(seat.instance, error)
                else:
                    self.scheduler.add(seat.instance)

    # The end

    def refuse(self, error: MoonpoolError) -> None:
        """Give this error to all requests that wait, and to those that come."""
        self.scheduler.refuse(error)
        self.scheduler.drop(error)

    def welcome(self) -> None:
        """Take requests again after `refuse`."""
        self.scheduler.open()

    def drain(self, error: MoonpoolError, timeout_s: float, done: Callable[[], object]) -> None:
        """Refuse requests; when those that are there have finished, or the time is over, call `done`."""
        self.scheduler.refuse(error)

        def wait() -> None:
            if not self.scheduler.wait_empty(time.monotonic() + timeout_s):
                self.scheduler.drop(error)
            done()

        threading.Thread(target=wait, name=f"moonpool-drain-{self.model.name}", daemon=True).start()

    def close(self) -> None:
        """Let go of all stubs; what they still execute fails."""
        gone = ModelUnavailable(f"model '{self.model.name}' is being unloaded")
        self.refuse(gone)
        for number in list(self._seats):
            self.detach(number, gone)
        self.memory.close()
