"""Instances whose stubs this process starts and ends, while the shim inside the server talks to them.

Theory of operation. `LentInstance` connects a supervisor, which starts processes and restarts them, with the shim,
which alone sees requests and answers. Both may find out that a process is broken: the supervisor sees a start fail, the
shim sees a channel end. A loss is identified by its generation, the number of the process; reports of an earlier one
are ignored. `_broken` holds the loss that the shim reported, under `_lock`, until it was passed to the supervisor. That
may be at once (state READY), or when a start that could no longer be stopped has become READY. Whichever thread takes
it out of `_broken` passes it on, so the supervisor learns of each loss once. No other method is called with the lock
held.

A stub's channels change hands. BORN gives the control and calls channels to the shim, before any code of the model
runs, because a model logs and asks for other models while it initializes. STARTED gives the work channel. To finalize
the model, the launcher uses the work channel again, after the shim has stopped using it (END, RENEW).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from moonpool.ipc.channel import Channel
from moonpool.ipc.errors import PeerGone, ProtocolError
from moonpool.ipc.messages import Side
from moonpool.ipc.region import SharedRegion
from moonpool.runtime.errors import LoadFailed, StubDied
from moonpool.runtime.hosting.python_backend import EndedIdle, PythonBackend
from moonpool.runtime.hosting.supervisor import Supervisor
from moonpool.runtime.isolation.environment_variables import OF_THE_INTERPRETER
from moonpool.runtime.isolation.public_text import public_text
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.backend import Backend, Model, ModelInstance
from moonpool.runtime.model.request import InferenceRequest
from moonpool.runtime.model.states import InstanceState
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.restart import GiveUp
from moonpool.runtime.schedule.failures import as_load_failure, as_moonpool_error, took_too_long
from moonpool.runtime.stubs.allotment import Allotment
from moonpool.runtime.stubs.calls.dispatcher import BROKE
from moonpool.runtime.stubs.handle import StubHandle
from moonpool.runtime.stubs.link import Link
from moonpool.runtime.triton.launcher_channel import LauncherChannel
from moonpool.runtime.triton.messages import Word, code_of
from moonpool.runtime.triton.models import refusal


class LentStub(StubHandle):
    """A stub of this process that the shim talks to.

    It lends the control and calls channels before any code of the model runs, and the work channel by `lend_work`.
    """

    # The shim waits at a socket.
    may_use_slots = False

    def __init__(self, *arguments: Any, born: Callable[[LentStub, tuple[int, ...]], None]) -> None:
        """Start it like a `StubHandle`. `born` gets the descriptors for BORN, and owns them."""
        self._born = born
        super().__init__(*arguments)

    def _listen(self, calls: Channel) -> None:
        # A channel has one reader, and here it is the shim.
        self._is_mute = True
        files = (self.requests.fd, self.responses.fd)
        fds = (self.control.channel.fileno(), calls.fileno(), self.process.pidfd, *files)
        self._born(self, tuple(os.dup(fd) for fd in fds))
        # Our end stays open until the stub is ready. If the server has no descriptor left for it, the stub must not see
        # the end of the channel before LOST has told this process the reason. The shim, which reads, can still shut it
        # down.
        self._calls = calls

    @property
    def requests(self) -> SharedRegion:
        """The first region for requests."""
        return self.link.borrowed_blocks.first

    @property
    def responses(self) -> SharedRegion:
        """The first region for responses."""
        (region,) = self.link.response_regions.values()
        return region

    def lend_work(self) -> int:
        """Return a descriptor of the work channel for the shim. The model is initialized.

        This process uses the channel again when the model is to finalize.
        """
        self.control.channel.close()
        self._calls.close()
        return os.dup(self.link.conversation.channel.fileno())

    def close(self) -> None:
        super().close()
        self._calls.close()

    def send(self, *message: object) -> None:
        """Do nothing: the shim has the control channel, and sends its messages."""


_log = RuntimeLog("moonpool")
_S = InstanceState
# Seconds between two attempts to break off a start.
_LOOK_S = 0.1
_NOTHING_BROKEN = (0, PeerGone("there was no process"))


class LentInstance(ModelInstance):
    """An instance whose requests the shim sends. The shim has given it a number. Any thread may call any method."""

    def __init__(
        self,
        backend: Backend,
        model: Model,
        number: int,
        name: str,
        kind: str,
        device_id: int,
        peer: LauncherChannel,
        reactor: Reactor,
    ) -> None:
        super().__init__(backend, model, name, kind, device_id)
        # The number of its present process, or of the last one.
        self.generation = 0
        # The reason why the last process ended or did not start.
        self.reason: BaseException = LoadFailed(f"'{name}' was not started")
        self._number = number
        self._was_started = threading.Event()
        self._lock = threading.Lock()
        # The last process that the shim reported as lost, and why. It is empty once the loss was handled.
        self._broken: tuple[int, BaseException] = _NOTHING_BROKEN
        self._peer = peer
        # The server may offer no way to load the model again, so the instance is always started again.
        self._supervisor = Supervisor(backend, model, [self], reactor, self._moved, _nothing, goes_on=_always)
        (self._record,) = self._supervisor.records

    @property
    def stub(self) -> LentStub:
        """The present process, or the last one. Raises `PeerGone` if there was none."""
        stub = self.state
        if not isinstance(stub, LentStub):
            raise PeerGone(f"'{self.name}' has no process")
        return stub

    # Messages from the shim

    def start(self) -> bool:
        """Start the first process, wait, and send the outcome. Return False if it did not start."""
        try:
            self._supervisor.start_all()
        except Exception as error:
            failure = as_load_failure(error, self.name)
            reason = refusal(failure, f"[{self.name}]", self.model)
            self._send(Word.REFUSED, code_of(failure), reason)
            return False
        finally:
            self._was_started.set()
        return True

    def lose(self, generation: int, is_executing: bool, is_shortage: bool, why: str) -> None:
        """Handle LOST: the stub has ended or, if `why` is not empty, has broken the protocol.

        With `is_shortage`, the server had no descriptor, memory or thread for the stub; `why` says which.
        """
        state = self._record.machine.state
        if generation != self.generation or state not in (_S.READY, _S.STARTING):
            return
        is_starting = state is _S.STARTING
        error: BaseException = PeerGone("the stub has ended")
        if is_shortage:
            error = _no_room(self.name, why)
        elif is_starting:
            subject = f"Stub process '{self.name}' {BROKE}"
            error = StubDied(f"{subject}: {why}", subject)
        elif why:
            error = ProtocolError(why)
        elif not is_executing:
            error = EndedIdle("the stub has ended")
        with self._lock:
            self._broken = generation, error
        if is_shortage or is_starting:
            self.backend.abort(self, error)
        # `abort` may come too late to break off a start. Then the start ends with READY, and `_moved` finds `_broken`.
        # READY may also come between the two checks; both look, and `_lose_broken` lets only one report it.
        if self._record.machine.state is _S.READY:
            self._lose_broken()

    def _lose_broken(self) -> bool:
        """Report the present process as lost if the shim has said so. Several threads may call it; one reports."""
        with self._lock:
            (generation, error), self._broken = self._broken, _NOTHING_BROKEN
        if generation != self.generation:
            return False
        self._supervisor.lost(self, (), error)
        return True

    def exceed(self, generation: int) -> None:
        """Handle OVERDUE: a batch takes too long, so kill the process. The shim will send LOST."""
        limit_s = self.model.options.execute_timeout_s
        if generation == self.generation and limit_s is not None:
            self.backend.abort(self, took_too_long(self.name, limit_s, self.model.denials))

    def memory(self, generation: int, writer: int) -> Allotment:
        """Return the allotment of this generation's process for the regions that `writer` writes. Raises `PeerGone`."""
        stub = self.stub
        if generation != self.generation:
            raise PeerGone(f"that process of '{self.name}' has ended")
        return stub.allotments[Side(writer)]

    def check_wear(self, generation: int) -> None:
        """Renew a process that was refused memory, if a new process could get that memory."""
        may_renew = self.model.config.sequence_batching is None
        if may_renew and generation == self.generation and self.stub.is_worn:
            self._supervisor.recycling.worn(self, self.stub.given_bytes)
            self._send(Word.GROWN, generation)

    def renew(self, generation: int, served: int) -> None:
        """Handle RENEW: end the process, which has served enough requests, and start another one."""
        if generation != self.generation or self._record.machine.state is not _S.READY:
            return
        self.served = served
        self._supervisor.begin(self._record, partial(self._supervisor.renew, self._record), "recycle")

    def end(self, *, finalizes: bool = True) -> None:
        """End the process for good, and wait. The model finalizes first if `finalizes` is true."""
        self.is_healthy &= finalizes
        while not self._was_started.wait(_LOOK_S):
            # The start may not have a process yet that could be ended, so try again until it is over.
            self._supervisor.give_up_starting()
        self._supervisor.stop_all()
        self._send(Word.ENDED)

    # Messages to the shim

    def born(self, stub: LentStub, fds: tuple[int, ...]) -> None:
        """Send BORN: a process was started and does not know its model yet. Owns the descriptors."""
        self.state = stub
        regions = (stub.requests, stub.responses)
        sizes = [part for region in regions for part in (region.id, region.size_bytes)]
        self._send(Word.BORN, self.generation, stub.process.pid, *sizes, fds=fds)

    def _moved(self, _: str, state: str, because: str) -> None:
        """Send STARTED or DIED when the supervisor has moved the instance to another state."""
        _log.debug("%s is %s: %s", self.name, state, because)
        if state == _S.READY:
            if self._lose_broken():
                return
            stub = self.stub
            has_check, sandbox = stub.readiness.has_check, str(stub.confinement)
            fds = (stub.lend_work(),)
            self._send(Word.STARTED, self.generation, has_check, sandbox, fds=fds)
            if self.model.config.sequence_batching is None:
                stub.bounds.serves(partial(self._grown, self.generation))
        elif state == _S.BACKING_OFF:
            self._send_death()

    def _grown(self, generation: int, rss_bytes: int) -> None:
        self._supervisor.recycling.outgrown(self, rss_bytes)
        self._send(Word.GROWN, generation)

    def _send_death(self) -> None:
        reason = as_moonpool_error(self.reason)
        message = public_text(reason)
        decision = self._supervisor.next_start(self._record)
        restarts_in_ms = None
        if isinstance(decision, GiveUp):
            rest_s = self._supervisor.rest_s
            notice = f"it {decision.reason}; it is started again after {rest_s:g} s"
            _log.error("[%s] is not restarted now: %s", self.name, notice)
            message = f"{message} ({notice})"
        else:
            restarts_in_ms = max(0, int((decision.at_s - time.monotonic()) * 1000))
        self._send(Word.DIED, self.generation, code_of(reason), message, restarts_in_ms)

    def _send(self, word: Word, *fields: Any, fds: tuple[int, ...] = ()) -> None:
        self._peer.send(word, self._number, *fields, fds=fds)


def _nothing(_: str) -> None:
    """Do nothing, since DIED reports it."""


def _always() -> bool:
    return True


def _no_room(name: str, why: str) -> StubDied:
    """Make the error for a process for which the server lacks a resource. The model is not to blame."""
    error = StubDied(f"Stub process '{name}' was ended, as the server has no room for it: {why}")
    error.__cause__ = OSError(errno.EMFILE, why)
    return error


class LentBackend(PythonBackend):
    """The backend of stubs that the shim sends requests to. All its instances are `LentInstance`."""

    # PYTHONPATH has packages for the server's Python. A model with another Python must not get them.
    _leading = (*OF_THE_INTERPRETER, "PYTHONPATH")
    # The shim has the channels of an instance from its birth on.
    _keeps_completing = False

    def model_instance_initialize(self, instance: ModelInstance) -> None:
        lent = _lent(instance)
        lent.generation += 1
        try:
            self.start_stub(lent, partial(LentStub, born=lent.born))
        except BaseException as error:
            lent.reason = error
            raise

    def explain(self, instance: ModelInstance, error: BaseException) -> BaseException:
        lent = _lent(instance)
        lent.reason = super().explain(lent, error)
        return lent.reason

    def model_instance_execute(self, instance: ModelInstance, requests: Sequence[InferenceRequest]) -> Link:
        raise NotImplementedError(f"{instance.name} has its {len(requests)} requests elsewhere")


def _lent(instance: ModelInstance) -> LentInstance:
    if not isinstance(instance, LentInstance):
        raise TypeError(f"{instance!r} is of another backend")
    return instance
