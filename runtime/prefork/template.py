"""The template of a model version: started, watched, started again, ended."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from moonpool.runtime.errors import ModelUnavailable
from moonpool.runtime.failures import is_shortage
from moonpool.runtime.prefork.template_stub import ForkRefused, TemplateGone, TemplateStub
from moonpool.runtime.restart import GiveUp, RestartPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moonpool.runtime.config_options import ModelOptions
    from moonpool.runtime.stub_handle import StubHandle

_log = logging.getLogger("moonpool")


class _State(Enum):
    STARTING = auto()
    READY = auto()
    # It is not there, or not to be forked from; perhaps it comes back.
    AWAY = auto()
    CLOSED = auto()


class Template:
    """Forks the instances of a model, or says that they have to be started as others are.

    Any thread may call any method, but for the reactor's.
    """

    def __init__(
        self,
        model: str,
        options: ModelOptions,
        start_stub: Callable[[], TemplateStub],
        start: Mapping[str, Any],
    ) -> None:
        """`start_stub` starts the process, and `start` is what START says to it."""
        self._model = model
        self._timeout_s = options.load_timeout_s
        self._start_stub = start_stub
        self._start = start
        self._policy = RestartPolicy(
            max_restarts=options.max_restarts,
            window_s=options.restart_window_s,
            backoff_s=options.restart_backoff_s,
            backoff_max_s=options.restart_backoff_max_s,
        )
        self._deaths_s: deque[float] = deque(maxlen=options.max_restarts + 1)
        # Starts in a row that failed for want of descriptors, memory or processes.
        self._shortages = 0
        self._changed = threading.Condition()
        self._state = _State.STARTING
        self._stub: TemplateStub | None = None
        self._restart: threading.Thread | None = None
        # Names of instances that wait for it, with why one is not to wait any more.
        self._waiting: dict[str, BaseException | None] = {}

    def start(self) -> None:
        """Start it for the first time, and wait. Raises `LoadFailed` with what the model says."""
        try:
            self._start_once()
        except BaseException:
            self._set(_State.AWAY)
            raise

    def _start_once(self) -> None:
        stub = self._start_stub()
        with self._changed:
            self._stub = stub
            is_wanted = self._state is _State.STARTING
        if not is_wanted:
            stub.abort(ModelUnavailable(f"model '{self._model}' is being unloaded"))
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        try:
            stub.start(self._start, deadline)
            stub.check_threads()
        except ForkRefused as refused:
            self._set(_State.AWAY)
            self._warn(refused)
            stub.end()
            return
        except BaseException:
            stub.end()
            raise
        self._set(_State.READY)
        stub.notify_exit(lambda: self._lost(stub))

    def _set(self, state: _State) -> None:
        with self._changed:
            if self._state is not _State.CLOSED:
                self._state = state
                self._changed.notify_all()

    def _warn(self, why: object) -> None:
        _log.warning(
            "the template of model '%s' cannot be forked from: %s; instances are started without it",
            self._model,
            why,
        )

    # Forks

    def fork(
        self, name: str, deadline: float | None, hold: Callable[[TemplateStub], StubHandle]
    ) -> StubHandle | None:
        """What `hold` makes of a template to fork an instance from; None where it has to be started in another way.

        Waits while the template is being started; `abort` ends that.
        """
        while (stub := self._ready(name, deadline)) is not None:
            try:
                return hold(stub)
            except TemplateGone:
                self._lost(stub)
            except ForkRefused as refused:
                self._warn(refused)
                self._set(_State.AWAY)
        return None

    def _ready(self, name: str, deadline: float | None) -> TemplateStub | None:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        with self._changed:
            self._waiting[name] = None
            self._changed.wait_for(
                lambda: self._state is not _State.STARTING or self._waiting[name], left_s
            )
            reason = self._waiting.pop(name)
            if reason is not None:
                raise reason
            return self._stub if self._state is _State.READY else None

    def abort(self, name: str, reason: BaseException) -> None:
        """Let an instance that waits for the template wait no longer."""
        with self._changed:
            if name in self._waiting:
                self._waiting[name] = reason
                self._changed.notify_all()

    def abort_start(self, reason: BaseException) -> None:
        """The first start takes too long."""
        with self._changed:
            stub = self._stub
        if stub is not None:
            stub.abort(reason)

    # Death and return

    def _lost(self, stub: TemplateStub) -> None:
        """It has ended, and with it all that it forked. Does not block."""
        with self._changed:
            if self._stub is not stub or self._state not in (_State.READY, _State.AWAY):
                return
            # Who starts meanwhile waits: the first restart follows at once, and takes no longer than a stub's.
            self._state = _State.STARTING
            self._restart = threading.Thread(
                target=self._bring_back,
                args=(stub,),
                name=f"moonpool-template-{self._model}",
                daemon=True,
            )
            try:
                self._restart.start()
            except RuntimeError:  # the machine has no thread to spare
                self._restart = None
                self._set(_State.AWAY)
            else:
                # Its end is told twice, by who wanted a fork and by the kernel.
                self._stub = None

    def _bring_back(self, dead: TemplateStub) -> None:
        dead.end()
        why = dead.reason or repr(dead.process)
        _log.error("the template of model '%s' has ended: %s", self._model, why)
        self._deaths_s.append(time.monotonic())
        while self._wait_for_turn():
            self._set(_State.STARTING)
            try:
                self._start_once()
            except Exception as error:
                _log.warning("the template of model '%s' did not start: %s", self._model, error)
                self._shortages = self._shortages + 1 if is_shortage(error) else 0
                if not self._shortages:
                    self._deaths_s.append(time.monotonic())
            else:
                return
        self._set(_State.AWAY)

    def _wait_for_turn(self) -> bool:
        """Wait as the restart policy says; False if there is to be no other start."""
        now_s = time.monotonic()
        decision = self._policy.decide(list(self._deaths_s), now_s)
        if isinstance(decision, GiveUp):
            self._warn(f"it {decision.reason}")
            return False
        left_s = decision.at_s - now_s
        if self._shortages:
            left_s = self._policy.pause_after_s(self._shortages)
        with self._changed:
            if left_s > 0:
                self._set(_State.AWAY)
                self._changed.wait_for(lambda: self._state is _State.CLOSED, left_s)
            return self._state is not _State.CLOSED

    def close(self, timeout_s: float | None) -> None:
        """End it. What it has forked has been ended before."""
        with self._changed:
            self._state = _State.CLOSED
            self._changed.notify_all()
            stub, restart = self._stub, self._restart
        if restart is not None:
            self.abort_start(ModelUnavailable(f"model '{self._model}' is being unloaded"))
            restart.join()
            stub = self._stub
        if stub is None:
            return
        try:
            if stub.process.wait(0) is None:
                stub.finalize(timeout_s)
        finally:
            stub.end()
