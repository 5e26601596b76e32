"""The states of backends, models and instances, and the transitions between them.

Pure: no clock, no lock. The tables below have every transition that is allowed. `draw` makes the diagrams in the
documentation from them.
"""

# Theory of operation
#
# A table maps every state to the states that may follow it, each with the event that leads there.
# Its first state is where a machine begins; a state that nothing may follow is where it ends.  A
# machine does nothing by itself: the code that carries out a step moves it, and gives the reason.
#
# Instance.  CREATED exists as an object only.  STARTING has a process that is not ready yet, READY
# one that takes batches.  DRAINING takes no new batch and finishes the one it has; FINALIZING runs
# the model's finalize under its deadline; STOPPED has no process and never will again.  BACKING_OFF
# has no process and waits for the time of its restart.  FAILED has no process: its first
# start failed, or the restart policy gave up.  In a tritonserver, and if nobody can load the model again
# (`--model-control-mode` none or poll), an instance that was given up is started again after a rest, and its
# model is READY again.  RECYCLING ends a process that has served long enough, in the way of FINALIZING, to
# start another one.
# A death while DRAINING or FINALIZING leads to STOPPED as well: there is nothing left to save.
#
# There is no EXECUTING.  The scheduler knows which instances are idle from its own list; a move for
# every batch would cost more than the decision which batch to send, and would push everything
# worth reading out of the story.
#
# Model.  The states of Triton's repository index, less UNKNOWN.  READY means that loading is over and
# unloading has not begun; whether a request could run at this moment also depends on whether an
# instance is READY or coming back, and is asked of the instances.  UNAVAILABLE always has its reason:
# not loaded yet, the error of the load, that every instance gave up, or that it was unloaded.
#
# Backend.  READY from a successful initialize to the start of finalize.
#
# Residence. If a READY model has processes. ASLEEP has none, and a request wakes it. WAITING waits until there is room
# in memory; WAKING starts its instances; AWAKE has them. LEAVING ends them; nothing is inside, and a request that comes
# meanwhile waits, and wakes the model again. DORMANT sleeps with its processes, which have freed what they can. RESTING
# could not be started, and refuses requests for a while. A model that never sleeps has no such machine.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from moonpool.ipc.errors import MoonpoolError


class BackendState(StrEnum):
    """The state of a backend between its initialize and its finalize."""

    CREATED = "CREATED"
    INITIALIZING = "INITIALIZING"
    READY = "READY"
    FINALIZING = "FINALIZING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


class ModelState(StrEnum):
    """The state of a model version, in the words of Triton's repository index."""

    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"


class InstanceState(StrEnum):
    """The state of a model instance, through all its processes."""

    CREATED = "CREATED"
    STARTING = "STARTING"
    READY = "READY"
    BACKING_OFF = "BACKING_OFF"
    RECYCLING = "RECYCLING"
    DRAINING = "DRAINING"
    FINALIZING = "FINALIZING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


class Residence(StrEnum):
    """The state of a model that may be without processes."""

    ASLEEP = "ASLEEP"
    WAITING = "WAITING"
    WAKING = "WAKING"
    AWAKE = "AWAKE"
    LEAVING = "LEAVING"
    DORMANT = "DORMANT"
    RESTING = "RESTING"


S = TypeVar("S", bound=StrEnum)
Table: TypeAlias = "Mapping[S, Mapping[S, str]]"

_B, _M, _I, _R = BackendState, ModelState, InstanceState, Residence

BACKEND: Table[BackendState] = {
    _B.CREATED: {_B.INITIALIZING: "first model", _B.STOPPED: "never used"},
    _B.INITIALIZING: {_B.READY: "initialize returned", _B.FAILED: "initialize failed"},
    _B.READY: {_B.FINALIZING: "closed"},
    _B.FINALIZING: {_B.STOPPED: "finalize ended"},
    _B.STOPPED: {},
    _B.FAILED: {},
}

MODEL: Table[ModelState] = {
    _M.UNAVAILABLE: {_M.LOADING: "load", _M.READY: "an instance came back", _M.UNLOADING: "unload after giving up"},
    _M.LOADING: {_M.READY: "every instance ready", _M.UNAVAILABLE: "load failed"},
    _M.READY: {_M.UNLOADING: "unload", _M.UNAVAILABLE: "every instance gave up"},
    _M.UNLOADING: {_M.UNAVAILABLE: "unloaded"},
}

INSTANCE: Table[InstanceState] = {
    _I.CREATED: {_I.STARTING: "load", _I.STOPPED: "load given up"},
    _I.STARTING: {
        _I.READY: "initialized",
        _I.BACKING_OFF: "died or failed in a restart",
        _I.FAILED: "first start failed",
    },
    _I.READY: {_I.DRAINING: "unload", _I.BACKING_OFF: "died or was killed", _I.RECYCLING: "has served long enough"},
    _I.RECYCLING: {_I.STARTING: "recycled", _I.STOPPED: "unload"},
    _I.BACKING_OFF: {_I.STARTING: "restart", _I.STOPPED: "unload", _I.FAILED: "gave up"},
    _I.DRAINING: {_I.FINALIZING: "drained", _I.STOPPED: "died"},
    _I.FINALIZING: {_I.STOPPED: "finalized or killed"},
    _I.STOPPED: {},
    _I.FAILED: {_I.STARTING: "nobody can load it again", _I.STOPPED: "unload"},
}

RESIDENCE: Table[Residence] = {
    _R.ASLEEP: {_R.WAITING: "a request came", _R.AWAKE: "loaded with its instances"},
    _R.WAITING: {
        _R.WAKING: "there is room",
        _R.ASLEEP: "nobody waits any more, or no room in time",
        _R.DORMANT: "the same, with its processes",
    },
    _R.WAKING: {_R.AWAKE: "an instance is ready", _R.RESTING: "start failed"},
    _R.AWAKE: {_R.LEAVING: "not used, or memory is short"},
    _R.LEAVING: {_R.ASLEEP: "instances ended", _R.DORMANT: "instances sleep", _R.AWAKE: "a request was inside"},
    _R.DORMANT: {_R.WAITING: "a request came", _R.LEAVING: "memory is short, or an instance died"},
    _R.RESTING: {_R.ASLEEP: "the pause is over"},
}

_STORY = 32


class InvalidMove(MoonpoolError):
    """A step that the table does not allow. It is a mistake in moonpool, not in a model."""


class Step(NamedTuple, Generic[S]):
    """One line of a machine's story."""

    at_s: float
    """The monotonic time that the mover gave."""
    state: S
    because: str


class Machine(Generic[S]):
    """The state of one object, its history, and the callbacks for its steps.

    Not thread-safe: the owner holds one lock around `move` and `watch`. `state` and `because` may be read without it,
    each by itself.
    """

    def __init__(self, name: str, table: Table[S], now_s: float, because: str = "created") -> None:
        self.name = name
        self._table = table
        self._step = Step(now_s, next(iter(table)), because)
        self._story: deque[Step[S]] = deque([self._step], maxlen=_STORY)
        self._watchers: list[Callable[[Step[S]], None]] = []
        self._telling = False

    def __repr__(self) -> str:
        return f"<{self.name}: {self._step.state} because {self._step.because}>"

    @property
    def state(self) -> S:
        return self._step.state

    @property
    def because(self) -> str:
        """The reason for the present state, as a text for a person."""
        return self._step.because

    @property
    def ended(self) -> bool:
        """True if no state can follow any more."""
        return not self._table[self._step.state]

    def may(self, to: S) -> bool:
        """Return True if the table allows this move now."""
        return to in self._table[self._step.state]

    def move(self, to: S, because: str, now_s: float) -> None:
        """Go to a state that the table allows from here, then call every watcher.

        If the table forbids the move, or a watcher tries it, raises `InvalidMove` and stays. A watcher that raises does
        not undo the move: all others are called, then its error is raised.
        """
        if self._telling:
            raise InvalidMove(f"{self.name}: a watcher tried to move it to {to} ({because})")
        if not self.may(to):
            raise InvalidMove(f"{self.name} cannot go from {self.state} to {to} ({because}); so far: {self.tell()}")
        self._step = Step(now_s, to, because)
        self._story.append(self._step)
        self._wake()

    def watch(self, callback: Callable[[Step[S]], None]) -> Callable[[], None]:
        """Call `callback` with every later step. Returns a function that ends this.

        Callbacks run in the mover's thread under the owner's lock, in the order in which they were added. They may set
        an event or call a loop's `call_soon_threadsafe`, but must not block or move the machine.
        """
        self._watchers.append(callback)

        def unwatch() -> None:
            if callback in self._watchers:
                self._watchers.remove(callback)

        return unwatch

    def tell(self) -> str:
        """Return the story in one line, with seconds since its first step."""
        begin_s = self._story[0].at_s
        return ", ".join(f"{step.state} at +{step.at_s - begin_s:.3f} s ({step.because})" for step in self._story)

    def _wake(self) -> None:
        error: Exception | None = None
        self._telling = True
        try:
            for callback in tuple(self._watchers):
                try:
                    callback(self._step)
                except Exception as raised:
                    error = error or raised
        finally:
            self._telling = False
        if error is not None:
            raise error


def draw(table: Table[S]) -> str:
    """Draw the table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(table))}"]
    for state, followers in table.items():
        lines += [f"    {state} --> {to}: {event}" for to, event in followers.items()]
        if not followers:
            lines.append(f"    {state} --> [*]")
    return "\n".join(lines) + "\n"
