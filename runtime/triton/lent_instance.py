"""An instance that executes for another process: what that process says of it, and is told."""

from __future__ import annotations

import errno
import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from moonpool.ipc.errors import PeerGone, ProtocolError
from moonpool.ipc.messages import Side
from moonpool.runtime.backend import ModelInstance
from moonpool.runtime.call_desk import BROKE
from moonpool.runtime.errors import LoadFailed, StubDied
from moonpool.runtime.failures import as_load_failure, as_moonpool_error, took_too_long
from moonpool.runtime.public_text import public_text
from moonpool.runtime.python_backend import EndedIdle
from moonpool.runtime.restart import GiveUp
from moonpool.runtime.states import InstanceState
from moonpool.runtime.supervisor import Supervisor
from moonpool.runtime.triton.error_codes import code_of
from moonpool.runtime.triton.lent_stub import LentStub
from moonpool.runtime.triton.messages import Word
from moonpool.runtime.triton.models import refusal

if TYPE_CHECKING:
    from moonpool.runtime.allotment import Allotment
    from moonpool.runtime.backend import Backend, Model
    from moonpool.runtime.reactor import Reactor
    from moonpool.runtime.triton.post import Post

_log = logging.getLogger("moonpool")
_S = InstanceState
# How often a start that is to be given up is looked at.
_LOOK_S = 0.1
_NOTHING_BROKEN = (0, PeerGone("there was no process"))


class LentInstance(ModelInstance):
    """Has a number that the other process has given it. Any thread may call any method."""

    def __init__(
        self,
        backend: Backend,
        model: Model,
        number: int,
        name: str,
        kind: str,
        device_id: int,
        post: Post,
        reactor: Reactor,
    ) -> None:
        super().__init__(backend, model, name, kind, device_id)
        # Of its present process, or the last one.
        self.generation = 0
        # Why the last one ended, or did not start.
        self.reason: BaseException = LoadFailed(f"'{name}' was not started")
        self._number = number
        self._was_started = threading.Event()
        self._lock = threading.Lock()
        # The last process that the other one was done with, and why.
        self._broken: tuple[int, BaseException] = _NOTHING_BROKEN
        self._post = post
        # Nobody here knows whether the server lets anybody load the model again, so the instance always comes back.
        self._supervisor = Supervisor(
            backend, model, [self], reactor, self._moved, _nothing, goes_on=_always
        )
        (self._seat,) = self._supervisor.seats

    @property
    def stub(self) -> LentStub:
        """Its process, the present one or the last."""
        stub = self.state
        if not isinstance(stub, LentStub):
            raise PeerGone(f"'{self.name}' has no process")
        return stub

    # What the other process says

    def start(self) -> bool:
        """Start the first process, and say how that went; waits. False where it did not start."""
        try:
            self._supervisor.start_all()
        except Exception as error:
            failure = as_load_failure(error, self.name)
            told = refusal(failure, f"[{self.name}]", self.model)
            self._tell(Word.REFUSED, code_of(failure), told)
            return False
        finally:
            self._was_started.set()
        return True

    def lose(self, generation: int, *, is_executing: bool, is_shortage: bool, why: str) -> None:
        """The other process is done with a stub that has ended or, where `why` says how, broken the protocol.

        With `is_shortage` the other process has no descriptor, memory or thread for it, as `why` says.
        """
        state = self._seat.machine.state
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
        # A start that this was too late to break off ends with READY, and then `_moved` finds what is broken.
        if self._seat.machine.state is _S.READY:
            self._lose_broken()

    def _lose_broken(self) -> bool:
        """Report the present process as lost if it is broken. Several threads may find out; it is reported once."""
        with self._lock:
            (generation, error), self._broken = self._broken, _NOTHING_BROKEN
        if generation != self.generation:
            return False
        self._supervisor.lost(self, (), error)
        return True

    def exceed(self, generation: int) -> None:
        """A batch takes too long: end the process, whose loss will be told."""
        limit_s = self.model.options.execute_timeout_s
        if generation == self.generation and limit_s is not None:
            self.backend.abort(self, took_too_long(self.name, limit_s))

    def memory(self, generation: int, writer: int) -> Allotment:
        """Return the allotment of the process of this generation, by the side that writes there. Raises `PeerGone`."""
        stub = self.stub
        if generation != self.generation:
            raise PeerGone(f"that process of '{self.name}' has ended")
        return stub.allotments[Side(writer)]

    def check_wear(self, generation: int) -> None:
        """Have a process that was refused memory renewed, if another one could have that memory."""
        may_renew = self.model.config.sequence_batching is None
        if may_renew and generation == self.generation and self.stub.is_worn:
            self._supervisor.recycling.worn(self, self.stub.given_bytes)
            self._tell(Word.GROWN, generation)

    def renew(self, generation: int, served: int) -> None:
        """The process has served long enough: end it, and start another one."""
        if generation != self.generation or self._seat.machine.state is not _S.READY:
            return
        self.served = served
        self._supervisor.begin(self._seat, partial(self._supervisor.renew, self._seat), "recycle")

    def end(self, *, finalizes: bool = True) -> None:
        """Let the model finalize unless that is of no use, end the process, and start no other; waits."""
        self.is_healthy &= finalizes
        while not self._was_started.wait(_LOOK_S):
            # It may have nothing yet that could be broken off.
            self._supervisor.give_up_starting()
        self._supervisor.stop_all()
        self._tell(Word.ENDED)

    # What it is told

    def born(self, stub: LentStub, fds: tuple[int, ...]) -> None:
        """A process has been started, which knows nothing of its model yet. Owns the descriptors."""
        self.state = stub
        regions = (stub.requests, stub.responses)
        sizes = [part for region in regions for part in (region.id, region.size_bytes)]
        self._tell(Word.BORN, self.generation, stub.process.pid, *sizes, fds=fds)

    def _moved(self, _: str, state: str, because: str) -> None:
        """The supervisor has moved the instance to another state."""
        _log.debug("%s is %s: %s", self.name, state, because)
        if state == _S.READY:
            if self._lose_broken():
                return
            stub = self.stub
            has_check, sandbox = stub.readiness.has_check, str(stub.confinement)
            fds = (stub.lend_work(),)
            self._tell(Word.STARTED, self.generation, has_check, sandbox, fds=fds)
            if self.model.config.sequence_batching is None:
                stub.bounds.serves(partial(self._grown, self.generation))
        elif state == _S.BACKING_OFF:
            self._tell_death()

    def _grown(self, generation: int, rss_bytes: int) -> None:
        self._supervisor.recycling.outgrown(self, rss_bytes)
        self._tell(Word.GROWN, generation)

    def _tell_death(self) -> None:
        reason = as_moonpool_error(self.reason)
        message = public_text(reason)
        decision = self._supervisor.next_start(self._seat)
        restarts_in_ms = None
        if isinstance(decision, GiveUp):
            rest_s = self._supervisor.rest_s
            told = f"it {decision.reason}; it is started again after {rest_s:g} s"
            _log.error("[%s] is given up: %s", self.name, told)
            message = f"{message} ({told})"
        else:
            restarts_in_ms = max(0, int((decision.at_s - time.monotonic()) * 1000))
        self._tell(Word.DIED, self.generation, code_of(reason), message, restarts_in_ms)

    def _tell(self, word: Word, *fields: Any, fds: tuple[int, ...] = ()) -> None:
        self._post.tell(word, self._number, *fields, fds=fds)


def _nothing(_: str) -> None:
    """DIED tells of it."""


def _always() -> bool:
    return True


def _no_room(name: str, why: str) -> StubDied:
    """Make the error of a process that the server has no room for. The model is not to blame."""
    error = StubDied(f"Stub process '{name}' was ended, as the server has no room for it: {why}")
    error.__cause__ = OSError(errno.EMFILE, why)
    return error
